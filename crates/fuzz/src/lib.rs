//! What reads bytes that others send, fed with bytes that nobody should send.
//!
//! A [`Target`] is one entry function over one of Godwit's readers, with a corpus of inputs that are in order and a bound on the
//! memory that any input may make it take. [`mutate`] breaks inputs, from a seed: the n-th input of a seed is always the same, so
//! a failure is reproduced by two numbers. It needs no nightly compiler and no instrumentation, and finds less than a fuzzer
//! that watches branches; the targets are plain functions, so one can be put behind such a fuzzer in a line.
//!
//! # What a target shows
//!
//! That it ends, does not panic, and takes no more memory than its bound, whatever the input *says* about lengths: a peer
//! that announces 2^60 bytes gets an error. Some targets also compare: what was understood and written again is understood in the
//! same way.
//!
//! Memory is counted by [`Meter`], the allocator of the tests. What zstd takes for its window it takes from C's allocator, past the
//! meter; that is bounded by the window's limit, which the decoders set.

pub mod content;
pub mod memory;
mod meter;
pub mod mirror;
pub mod mutate;
pub mod nbd;
pub mod others;
pub mod postcopy;
pub mod predict;
pub mod trust;

pub use meter::{Meter, measured};

/// A reader of others' bytes.
pub struct Target {
    /// Its name.
    pub name: &'static str,
    /// Inputs that are in order: what mutations begin with.
    pub corpus: fn() -> Vec<Vec<u8>>,
    /// Feeds it an input.
    pub run: fn(&[u8]),
    /// The most memory, in bytes, that it may take for an input of this length, what it began with included.
    pub bound: fn(usize) -> usize,
}

/// All of them.
pub const TARGETS: &[Target] = &[
    memory::ENCODER,
    memory::DECODER,
    memory::DECODER_PACKED,
    memory::RETURN_PATH,
    memory::REFERENCES,
    memory::ANSWERS,
    memory::HINTS,
    memory::HOLDING,
    memory::AGAIN,
    nbd::SERVER,
    nbd::CLIENT,
    others::LINK,
    others::MIRROR,
    mirror::TO_TARGET,
    mirror::TO_SOURCE,
    postcopy::TELL_TARGET,
    postcopy::TELL_SOURCE,
    postcopy::HOLDER,
    postcopy::OWNER,
    content::FRAME,
    content::REPLY,
    others::NODE,
    others::API,
    others::SCENARIO,
    predict::DIRTY_LOG,
    trust::CAPABILITY,
    trust::ENROLMENT,
];

/// A mebibyte.
const MIB: usize = 1 << 20;
