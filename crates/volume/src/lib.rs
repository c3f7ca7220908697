//! Replicas of virtual disks, and the mirror that makes a second one equal to the first.
//!
//! A [`Replica`] is a sparse file, or a [block device](device), or [objects in a pool](rados), and, for each block, the [`Stamp`] of its last write. A [`mirror`] compares the stamps of
//! two replicas, copies the blocks that differ while the guest writes on, mirrors the guest's writes once few are left, and ends
//! with both equal. It knows no sockets and no clock.
//!
//! A replica may also be given the volume before it holds every block: a `shadow` volume. Its source says what it has to hold
//! ([`fet`]), and the contents follow, what the guest asks for first ([`fetch`]), the rest in a good [`order`].
//!
//! # What can go wrong
//!
//! *Power is lost between a write and its stamp.* A stamp that is older than its block would make two replicas look alike
//! that are not. So a region of the disk is durably marked *hot* before its first write and stays so until data and stamps
//! are on the disk ([`Replica::settle`]). After an unclean end a primary restamps hot regions in an epoch that was never
//! used before, so that they travel again; a secondary forgets them. No written block is ever believed unwritten, no
//! lost write believed kept.
//!
//! *A stamp is used twice.* An epoch is durable before its first use, and each opening of a replica begins a new one.
//!
//! *A mirror breaks.* The other side keeps what had come, and the guest writes on: a block that it writes again in the same epoch has
//! its old stamp there with its old contents. So what was written since a mirror began to compare is *unsure*, durably, and
//! gets a new stamp before the next one compares. A claim may begin with half a volume, whose stamps prove nothing: all of
//! it is unsure.
//!
//! *The link dies, or is slower than the guest.* A guest's mirrored write waits while the other side is far behind, for at most
//! [`mirror::PATIENCE`]; then the mirror falls back to
//! copying behind the guest's back, and comes back when the link does.
//!
//! *A block is not here yet.* A shadow volume refuses to read it, and to write a part of it, until it has come; and it knows
//! what is here for good and what only while the power stays on. The rules stand at the top of `shadow.rs`.
//!
//! *The volume is large.* Memory and time are proportional to what was touched, never to the size.

#![forbid(unsafe_code)]
mod ahead;
mod blocks;
pub mod device;
mod entries;
pub mod epoch;
mod error;
pub mod fet;
pub mod fetch;
mod file;
mod flight;
mod glance;
mod guards;
mod has;
mod journal;
mod lag;
mod library;
mod meta;
pub mod mirror;
pub mod order;
mod per_region;
pub mod precache;
pub mod rados;
mod replica;
mod runs;
pub mod scrub;
mod shadow;
pub mod shared;
mod stamp;
mod stamps;
mod synced;
mod walk;

pub use blocks::{BLOCK, BlockSet, touched};
pub use error::VolumeError;
pub use file::{Description, Disk, Media, Medium};
pub use godwit_content::{PackError, Packer, Unpacker};
#[cfg(feature = "sabotage")]
#[doc(hidden)]
pub use guards::{Guard, Guards};
pub use has::Has;
pub use journal::Journal;
pub use library::Library;
pub use meta::{Complete, Moment};
pub use replica::{Contents, LINGERING, Opened, Replica, Written, give_way, is_zero};
pub use shadow::{Holder, Version};
pub use stamp::Stamp;
pub use stamps::REGION;
pub use synced::Synced;
