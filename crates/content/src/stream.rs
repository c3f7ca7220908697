//! Messages on their way: each with its length before it, and all of them through one zstd stream, so that a block like one that
//! went a moment ago costs next to nothing.
//!
//! Both ends forget everything when the stream ends. It belongs to one volume, hence to one customer: its length tells nobody
//! anything about a neighbour's disk.
//!
//! # What can go wrong
//!
//! *A few bytes expand to gigabytes.* The [`Unpacker`] makes at most [`STEP`] bytes at a time, and none while a whole
//! message is at hand. *The other end waits for what lies in zstd's buffers*: [`Packer::flush`] before waiting.

use crate::choose::Level;
use std::io;
use zstd::stream::raw::{CParameter, DParameter, Decoder, Encoder, InBuffer, Operation, OutBuffer};

/// Logarithm of zstd's window in bytes, which both ends allocate: 8 MiB. Repetitions over longer distances are the
/// business of a dictionary.
const WINDOW_LOG: u32 = 23;
/// The longest message: 256 KiB of blocks, and what is said about them.
pub const LONGEST: usize = (256 << 10) + 64;
/// What is compressed or expanded at once.
const STEP: usize = 128 << 10;

/// The stream cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum PackError {
    /// zstd.
    #[error("zstd cannot {doing} a stream's messages: {source}; the stream is damaged, or memory is short")]
    Zstd {
        /// What it was to do.
        doing: &'static str,
        /// What it says.
        source: io::Error,
    },
    /// A length that no message has.
    #[error("the other side of a stream announces a message of {0} bytes; the longest has {LONGEST}")]
    TooLong(usize),
}

fn doing(doing: &'static str) -> impl FnOnce(io::Error) -> PackError {
    move |source| PackError::Zstd { doing, source }
}

/// Lets zstd write behind `out`'s end.
fn append<T>(out: &mut Vec<u8>, f: impl FnOnce(&mut OutBuffer<'_, Vec<u8>>) -> io::Result<T>) -> io::Result<T> {
    out.reserve(STEP);
    let end = out.len();
    f(&mut OutBuffer::around_pos(out, end))
}

/// Packs messages.
pub struct Packer {
    zstd: Encoder<'static>,
    holds: bool,
    level: Level,
    /// The level of what comes next, once what is in the making is ended.
    wanted: Level,
}

impl std::fmt::Debug for Packer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Packer").field("holds", &self.holds).finish_non_exhaustive()
    }
}

impl Packer {
    /// A stream that begins.
    ///
    /// # Errors
    /// When memory is short.
    pub fn new() -> Result<Self, PackError> {
        let mut zstd = Encoder::new(Level::One.number()).map_err(doing("begin to compress"))?;
        zstd.set_parameter(CParameter::WindowLog(WINDOW_LOG)).map_err(doing("take the window's size for"))?;
        Ok(Self { zstd, holds: false, level: Level::One, wanted: Level::One })
    }

    /// What comes from now on is compressed so hard; [`Level::One`] in the beginning. With another level it begins with an empty
    /// window, so this is not for each message.
    pub const fn set_level(&mut self, level: Level) {
        self.wanted = level;
    }

    fn change_level(&mut self, out: &mut Vec<u8>) -> Result<(), PackError> {
        while append(out, |out| self.zstd.finish(out, true)).map_err(doing("end a part of"))? > 0 {}
        self.zstd
            .set_parameter(CParameter::CompressionLevel(self.wanted.number()))
            .map_err(doing("take another level for"))?;
        (self.level, self.holds) = (self.wanted, false);
        Ok(())
    }

    /// Takes a message; appends to `out` what is ready for the wire, which may be nothing.
    ///
    /// # Errors
    /// When zstd fails.
    pub fn push(&mut self, message: &[u8], out: &mut Vec<u8>) -> Result<(), PackError> {
        debug_assert!(message.len() <= LONGEST, "whoever sends keeps to the bound");
        let length = u32::try_from(message.len()).map_err(|_| PackError::TooLong(message.len()))?;
        if self.level != self.wanted {
            self.change_level(out)?;
        }
        for piece in [&length.to_le_bytes()[..], message] {
            let mut input = InBuffer::around(piece);
            while input.pos() < piece.len() {
                self.holds = true;
                append(out, |out| self.zstd.run(&mut input, out)).map_err(doing("compress"))?;
            }
        }
        Ok(())
    }

    /// Appends all that is held back.
    ///
    /// # Errors
    /// When zstd fails.
    pub fn flush(&mut self, out: &mut Vec<u8>) -> Result<(), PackError> {
        while self.holds {
            self.holds = append(out, |out| self.zstd.flush(out)).map_err(doing("flush"))? > 0;
        }
        Ok(())
    }
}

/// Unpacks messages.
pub struct Unpacker {
    zstd: Decoder<'static>,
    /// Arrived and not expanded yet: `wire[taken..]`.
    wire: Vec<u8>,
    taken: usize,
    /// Expanded and not handed out yet: `plain[at..]`. At most a message and [`STEP`].
    plain: Vec<u8>,
    at: usize,
    /// Whether zstd may have more to give without any input: it stopped for want of room.
    holds: bool,
}

impl std::fmt::Debug for Unpacker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Unpacker")
            .field("wire", &self.wire.len())
            .field("plain", &self.plain.len())
            .finish_non_exhaustive()
    }
}

impl Unpacker {
    /// A stream that begins.
    ///
    /// # Errors
    /// When memory is short.
    pub fn new() -> Result<Self, PackError> {
        let mut zstd = Decoder::new().map_err(doing("begin to expand"))?;
        zstd.set_parameter(DParameter::WindowLogMax(WINDOW_LOG)).map_err(doing("bound the window for"))?;
        Ok(Self { zstd, wire: vec![], taken: 0, plain: vec![], at: 0, holds: false })
    }

    /// Takes bytes from the wire, cut anywhere. Whoever wants bounded memory asks for all messages before the next.
    pub fn push(&mut self, wire: &[u8]) {
        self.wire.drain(..self.taken);
        self.taken = 0;
        self.wire.extend_from_slice(wire);
    }

    /// The next message, if it is here.
    ///
    /// # Errors
    /// When the stream is damaged; it is over then.
    pub fn poll(&mut self) -> Result<Option<Vec<u8>>, PackError> {
        loop {
            let plain = &self.plain[self.at..];
            if let Some(length) = plain.first_chunk::<4>() {
                let length = u32::from_le_bytes(*length) as usize;
                if length > LONGEST {
                    return Err(PackError::TooLong(length));
                }
                if let Some(message) = plain.get(4..4 + length) {
                    let message = message.to_vec();
                    self.at += 4 + length;
                    return Ok(Some(message));
                }
            }
            self.plain.drain(..self.at);
            self.at = 0;
            if !self.expand()? {
                return Ok(None);
            }
        }
    }

    /// Expands a little; whether anything moved.
    fn expand(&mut self) -> Result<bool, PackError> {
        // zstd takes it for an error to be asked for more than nothing sixteen times.
        if self.taken == self.wire.len() && !self.holds {
            return Ok(false);
        }
        let before = self.plain.len();
        self.plain.resize(before + STEP, 0);
        let mut input = InBuffer::around(&self.wire[self.taken..]);
        let mut output = OutBuffer::around(&mut self.plain[before..]);
        let result = self.zstd.run(&mut input, &mut output);
        let (taken, made) = (input.pos(), output.pos());
        self.plain.truncate(before + made);
        self.taken += taken;
        self.holds = made == STEP;
        result.map_err(doing("expand"))?;
        Ok(taken > 0 || made > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn pack(messages: &[Vec<u8>]) -> Vec<u8> {
        let (mut packer, mut wire) = (Packer::new().expect("begins"), vec![]);
        for message in messages {
            packer.push(message, &mut wire).expect("packs");
        }
        packer.flush(&mut wire).expect("flushes");
        wire
    }

    proptest! {
        #[test]
        fn messages_arrive_as_they_were_however_the_stream_is_cut(
            messages in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..9000), 0..20),
            cut in 1usize..5000,
        ) {
            let wire = pack(&messages);
            let (mut unpacker, mut found) = (Unpacker::new().expect("begins"), vec![]);
            for piece in wire.chunks(cut) {
                unpacker.push(piece);
                while let Some(message) = unpacker.poll().expect("is sound") {
                    found.push(message);
                }
            }
            prop_assert_eq!(found, messages);
        }

        #[test]
        fn damage_is_an_error_or_other_messages_but_never_a_panic(
            seed in any::<u64>(), at in 0usize..2000, with in 1u8..,
        ) {
            let message: Vec<u8> = (0..4096u64).map(|i| (i.wrapping_mul(seed) >> 7) as u8).collect();
            let mut wire = pack(&[message]);
            let at = at % wire.len();
            wire[at] ^= with;
            let mut unpacker = Unpacker::new().expect("begins");
            unpacker.push(&wire);
            while let Ok(Some(_)) = unpacker.poll() {}
        }
    }

    #[test]
    fn the_level_may_change_between_any_two_messages() {
        let levels = [Level::Six, Level::Raw, Level::Raw, Level::One, Level::Faster, Level::Three, Level::Fast];
        let (mut packer, mut unpacker) = (Packer::new().expect("begins"), Unpacker::new().expect("begins"));
        let mut sizes = vec![];
        for n in 0..200u32 {
            packer.set_level(levels[(n / 3) as usize % levels.len()]);
            let words = (0..10_000u32).map(|i| (i.wrapping_mul(n) >> 3) % 50 * 77);
            let (message, mut wire): (Vec<u8>, _) = (words.flat_map(u32::to_le_bytes).collect(), vec![]);
            packer.push(&message, &mut wire).expect("packs");
            if n % 2 == 0 {
                packer.flush(&mut wire).expect("flushes");
                sizes.push(wire.len());
            }
            unpacker.push(&wire);
            let mut found = unpacker.poll().expect("is sound");
            if n % 2 == 0 {
                while let Some(next) = unpacker.poll().expect("is sound") {
                    found = Some(next);
                }
                assert_eq!(found, Some(message));
            }
        }
        assert!(sizes.iter().any(|n| *n < 20_000) && sizes.iter().any(|n| *n > 30_000), "{sizes:?}");
    }

    #[test]
    fn each_message_is_whole_at_the_other_end_after_a_flush() {
        let (mut packer, mut unpacker) = (Packer::new().expect("begins"), Unpacker::new().expect("begins"));
        for n in 0..100usize {
            let (message, mut wire) = (vec![n as u8; n * 40], vec![]);
            packer.push(&message, &mut wire).expect("packs");
            packer.flush(&mut wire).expect("flushes");
            unpacker.push(&wire);
            assert_eq!(unpacker.poll().expect("is sound"), Some(message));
            assert_eq!(unpacker.poll().expect("is sound"), None);
        }
    }

    #[test]
    fn what_went_a_moment_ago_goes_again_for_next_to_nothing() {
        let mut state = 1u64;
        let mut random = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) as u8
        };
        let message: Vec<u8> = (0..LONGEST).map(|_| random()).collect();
        let once = pack(std::slice::from_ref(&message)).len();
        let twice = pack(&[message.clone(), message]).len();
        assert!(once >= LONGEST && twice - once < LONGEST / 50, "{once} bytes once, {twice} twice");
    }

    #[test]
    fn a_bomb_expands_by_one_step_at_a_time_and_a_length_that_no_message_has_is_refused() {
        // 1 GiB of empty messages in some kilobytes.
        let (mut zstd, mut wire) = (Encoder::new(1).expect("begins"), vec![]);
        let zeroes = vec![0; 1 << 20];
        for _ in 0..64 {
            let mut input = InBuffer::around(&zeroes);
            while input.pos() < zeroes.len() {
                append(&mut wire, |out| zstd.run(&mut input, out)).expect("compresses");
            }
        }
        let mut unpacker = Unpacker::new().expect("begins");
        unpacker.push(&wire);
        let mut messages = 0;
        while unpacker.poll().expect("empty messages are sound here").is_some() {
            messages += 1;
            assert!(unpacker.plain.capacity() <= 4 * STEP + LONGEST, "{}", unpacker.plain.capacity());
        }
        assert!(messages > 1 << 20, "{messages}");

        let (mut zstd, mut wire) = (Encoder::new(1).expect("begins"), vec![]);
        let claim = u32::MAX.to_le_bytes();
        append(&mut wire, |out| zstd.run(&mut InBuffer::around(&claim), out)).expect("compresses");
        append(&mut wire, |out| zstd.flush(out)).expect("flushes");
        let mut unpacker = Unpacker::new().expect("begins");
        unpacker.push(&wire);
        assert!(matches!(unpacker.poll(), Err(PackError::TooLong(_))));
    }

    #[test]
    fn asking_for_what_has_not_come_goes_on_for_ever() {
        let wire = pack(&[vec![7; 5000]]);
        let mut unpacker = Unpacker::new().expect("begins");
        for byte in &wire[..20] {
            unpacker.push(&[*byte]);
        }
        for _ in 0..100 {
            assert_eq!(unpacker.poll().expect("it is not damaged"), None);
        }
        unpacker.push(&wire[20..]);
        assert_eq!(unpacker.poll().expect("it is not damaged"), Some(vec![7; 5000]));
    }
}
