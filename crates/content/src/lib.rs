//! What the other end has already, it is told by name: the dictionary of a trust domain, and the little protocol between a sender
//! and a receiver that use one (CloudNet, section 3.2.2).
//!
//! ```text
//!   sender                                        receiver
//!                <------ key, marks ------------  what its dictionary holds
//!   of a run of blocks, each one
//!   zero / named / in full  ---- frame -------->  copied out of the dictionary, verified, used
//!                <------ reply -----------------  those that it could not get
//!   these in full, as they are now ------------>
//! ```
//!
//! A block has [`BLOCK`] bytes. It is named by its [`Digest`], 128 bits of BLAKE3 under the [`Key`] of a trust domain. The receiver has
//! a [`Dictionary`], from digests to places where the contents lie: on a replica, or in a [`Store`] in memory. The sender remembers marks, 64
//! bits of each digest: of what it sent in this session, and of what the receiver said it holds. Frames leave through a
//! [`Packer`], one zstd stream with a long window beside which incompressible messages go as they are.
//!
//! Nothing here does I/O, knows a clock, or draws random numbers: keys, figures and contents are given.
//!
//! # What can go wrong
//!
//! *A name leads to other contents*: the block was overwritten since, two marks collide, the disk rots, somebody lies. What a name
//! leads to is copied out first, then verified, then used ([`Verified`]): so nothing that changes after the look counts,
//! and a wrong block is as if there were none.
//!
//! *The receiver has lost what it had.* It says which blocks it could not get; the sender sends them in full, forgets those
//! marks, and after many of them all marks ([`Sender`]). A name is a guess, never a promise: no order of losses makes anything but bytes.
//!
//! *A neighbour guesses.* Byte counts that depended on what another customer holds would answer guesses about it, and a digest
//! that everybody computes would fetch it. So a dictionary belongs to one trust domain, with a key of its own: [`Domains`] has no way from
//! one to another. Zeroes are apart: they are the same for all, and are never in a dictionary.
//!
//! *A name costs more than it spares.* A digest is computed at a tenth of the speed at which memory is copied; [`choose`] leaves
//! it, and zstd, out where the link is faster than they are.

#![forbid(unsafe_code)]

pub mod choose;
mod dictionary;
mod digest;
mod domains;
mod error;
mod frame;
mod sender;
mod store;
mod stream;
mod table;

pub use dictionary::{ContentSource, Dictionary, Place, Verified, fetch};
pub use digest::{BLOCK, Block, Digest, Key, Mark, is_zero};
pub use domains::{Domains, TrustDomain};
pub use error::ContentError;
pub use frame::{Greeting, MOST_BLOCKS, Taken, parse_greeting, reply, take};
pub use sender::{Figures, Sender};
pub use store::Store;
pub use stream::{LONGEST, PackError, Packer, Unpacker};
