//! QEMU's live migration stream: taken apart at the source, made small for the WAN, and rebuilt at the destination,
//! with the hypervisor at either end unmodified.
//!
//! ```text
//!   QEMU ==unix socket==> Encoder ==WAN==> Decoder ==unix socket==> QEMU -incoming
//!        <== ReturnPath (all but SHUT) ==========================
//! ```
//!
//! No sockets, clock or tasks: [`Encoder`] and [`Decoder`] take bytes cut anywhere and append bytes to a vector. zstd may have a thread of its own
//! ([`Config::beside`]), which changes nothing of what is made.
//! What is read besides is guests' RAM: the guest's own, where there is a [`Witness`], and that of others, for [`hints`].
//! [`ReturnPath`] splits QEMU's reverse channel. [`preflight`] says beforehand whether a guest can be moved;
//! [`format`] is what crosses the WAN.
//!
//! # What makes it small
//!
//! Zero pages are counted in runs. A page that comes again as it was last sent is left out: a page is often dirtied
//! between QEMU's look at the dirty log and its sending, and then sent once more for nothing. A page that comes again changed goes as
//! the difference from what was last sent of it, if that is short (CloudNet, section 3.2.3). All else goes through one
//! zstd stream with matches over a long distance (256 MiB), which finds duplicates (of any length from some bytes on: no need
//! to cut pages into quarters for it, as CloudNet's section 3.2.2 does). What the destination has kept of an earlier try that
//! was cut short is only named ([`Checkpoint`]). And so is what lies on the guest's own disks, which the destination
//! has ([`disks`]): a page cache; and what lies in the memory of guests there that may know of each other ([`hints`]).
//!
//! # Why leaving a page out is sound
//!
//! The stream is the only thing that writes the incoming QEMU's RAM: it is started with `-S`, its vCPUs and devices
//! stand still until all is loaded, and post-copy and shared RAM, where others write or pages are discarded, are
//! refused. It reads records in order, so after record *n* a page holds what the last record about it said. The
//! encoder keeps, by block and page, just that or a hash of it: the last record *that it let pass*, not any earlier one. A
//! record that says the same would write what is there already. "The same" means an equal 128-bit keyed BLAKE3 hash,
//! under a key that is random for every stream and never leaves the encoder (or, with a [`Checkpoint`], random for every VM and
//! known to the two nodes only): two different pages are taken for equal
//! with a chance of 2^-128, which nothing in the guest can raise. A zero record has a mark of its own; a page of
//! zeroes that came as content is not taken for one.
//!
//! Records are chained: CONTINUE means "the block of the record before". When records are left out, a record whose
//! predecessor is missing is given its block's name, which means the same to QEMU. No other byte changes: sections,
//! footers and commands stay where they were, and with [`Resends::Keep`] the rebuilt stream is QEMU's to the byte.
//!
//! # What can go wrong
//!
//! - **The stream has no lengths**: what cannot be parsed cannot be skipped. It is refused with the name of what is
//!   in the way ([`StreamError`]), at preflight if possible.
//! - **Something is damaged or rebuilt wrongly.** Encoder and decoder each hash the stream as QEMU will read it
//!   (BLAKE3): the encoder what it means, the decoder what it writes. It is the rebuilt bytes and not the operations
//!   between that are hashed, so that a mistake of the decoder's is found too. [`Decoded::verified_bytes`] says how
//!   far they agreed. It gets there with a flush, not only with the trailer: a source QEMU with a return path keeps
//!   its stream open until it is told SHUT, and SHUT may only be told when all is verified.
//! - **QEMU falls silent**, waiting for an answer to what lies in zstd's buffers: [`Encoder::flush`] whenever there
//!   is nothing to read.
//! - **The other end lies.** Lengths, counts, names, RAM and window are bounded before they are believed;
//!   [`Decoder::push_some`] bounds what a few bytes can expand to.
//! - **QEMU itself loses dirty pages under TCG**: 7.2 many, when RAM is a multiple of 256 KiB; any, one in a hundred moves or so, when
//!   the machine is busy. Then the destination's RAM is wrong with any codec, unless a [`Witness`] sees it.

#![deny(unsafe_code)]
mod checkpoint;
mod cloudnet;
pub mod codec;
mod config;
mod cursor;
mod decoder;
mod delta;
pub mod disks;
#[cfg(test)]
mod disks_tests;
mod encoder;
pub mod format;
pub mod hints;
pub mod levels;
mod meter;
mod packing;
pub mod preflight;
mod record;
pub mod return_path;
mod shuffle;
pub mod smart_stop;
mod stream;
mod versions;
pub mod watcher;
mod witness;

pub use checkpoint::{Checkpoint, CheckpointKey, CheckpointWriter, Holding, HoldingError};
pub use config::{
    Config, DEFAULT_MAX_RAM, DEFAULT_VERSIONS, DEFAULT_WINDOW_LOG, Limits, MIDDLE_WINDOW_LOG, NEAR_WINDOW_LOG, PageKey,
    Reach, Resends,
};
pub use decoder::{Decoded, Decoder, ENOUGH, WireError};
pub use disks::{Blocks, Feedback, Finder, NEIGHBOURS, Spot, SpotTable};
pub use encoder::{Encoder, Progress, Summary};
pub use hints::{Hints, HintsError, Looked};
pub use levels::Levels;
pub use meter::{Clock, Stages};
pub use packing::Beside;
pub use record::{Layout, MAX_BLOCKS, PAGE_SIZE, PageBytes};
pub use return_path::{Message, ReturnPath, ReturnPathError};
pub use stream::StreamError;
pub use versions::MOST_UNREAD;
pub use witness::Witness;
