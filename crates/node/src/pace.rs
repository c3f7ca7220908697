//! Packs a stream as hard as pays: what `godwit_content::choose` decides, fed with what is measured here.

use crate::processors;
use godwit_content::choose::{Chooser, Measured, Now};
use godwit_content::{PackError, Packer};
use godwit_units::Bytes;
use std::time::{Duration, Instant};

/// What is measured at once: twice zstd's window, since a change begins with an empty one.
const PIECE: u64 = 16 << 20;
/// If it takes longer there was not always something to send, and it says nothing about the link.
const LONGEST: Duration = Duration::from_secs(30);
/// Nor where the link had nothing for a larger part of it ([`Paced::idled`]). A smaller one is a disk's or a scheduler's, and changes no choice.
const IDLE: f64 = 0.1;

/// A packer that finds its level.
#[derive(Debug)]
pub(crate) struct Paced {
    packer: Packer,
    chooser: Chooser,
    plain: u64,
    packed: u64,
    packing: Duration,
    idle: Duration,
    since: Now,
}

impl Paced {
    /// A stream that begins.
    pub(crate) fn new() -> Result<Self, PackError> {
        let (packer, chooser) = (Packer::new()?, Chooser::for_disks());
        let (packing, idle, since) = (Duration::ZERO, Duration::ZERO, processors::now());
        Ok(Self { packer, chooser, plain: 0, packed: 0, packing, idle, since })
    }

    /// For so long until now there was nothing to send, and what had been sent was all there: that was not the link's time. Else a link on which
    /// nobody asks for anything looks like a slow one.
    pub(crate) fn idled(&mut self, time: Duration) {
        self.idle += time;
        if self.plain == 0 {
            // Nothing is measured yet that could be spoilt.
            (self.idle, self.since) = (Duration::ZERO, processors::now());
        }
    }

    fn timed(
        &mut self,
        out: &mut Vec<u8>,
        what: impl FnOnce(&mut Packer, &mut Vec<u8>) -> Result<(), PackError>,
    ) -> Result<(), PackError> {
        let (begin, before) = (Instant::now(), out.len());
        what(&mut self.packer, out)?;
        self.packing += begin.elapsed();
        self.packed += (out.len() - before) as u64;
        Ok(())
    }

    /// As [`Packer::push`].
    pub(crate) fn push(&mut self, message: &[u8], out: &mut Vec<u8>) -> Result<(), PackError> {
        self.plain += message.len() as u64;
        self.timed(out, |packer, out| packer.push(message, out))
    }

    /// As [`Packer::flush`]. Between two of these everything that was packed is to be sent.
    pub(crate) fn flush(&mut self, out: &mut Vec<u8>) -> Result<(), PackError> {
        self.timed(out, Packer::flush)?;
        if self.plain >= PIECE {
            let now = processors::now();
            let time = now.at.saturating_sub(self.since.at);
            if time < LONGEST && self.idle <= time.mul_f64(IDLE) {
                let (plain, packed) = (Bytes(self.plain), Bytes(self.packed));
                let before = self.chooser.level();
                let free = now.free_since(self.since);
                let level = self.chooser.measured(&Measured {
                    plain,
                    packed,
                    packing: self.packing,
                    zstd: Duration::ZERO,
                    longest: self.packing,
                    time,
                    free,
                });
                if level != before {
                    tracing::debug!(?before, ?level, %plain, %packed, packing = ?self.packing, ?time, free, "another level of zstd");
                }
                self.packer.set_level(level);
            }
            (self.plain, self.packed, self.packing) = (0, 0, Duration::ZERO);
            (self.idle, self.since) = (Duration::ZERO, now);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use godwit_content::Unpacker;
    use godwit_content::choose::Level;

    /// 64 KiB that zstd makes something of.
    fn message(n: u32) -> Vec<u8> {
        let words = (0..16_384u32).map(|i| (i.wrapping_mul(n | 1).wrapping_mul(0x9e37_79b9) >> 20) % 700);
        words.flat_map(u32::to_le_bytes).collect()
    }

    #[test]
    fn a_slow_link_gets_a_higher_level_and_every_message_arrives() {
        let (mut paced, mut unpacker) = (Paced::new().expect("begins"), Unpacker::new().expect("begins"));
        let mut levels = vec![];
        for n in 0..400u32 {
            let (message, mut wire) = (message(n), vec![]);
            paced.push(&message, &mut wire).expect("packs");
            // As if a core packed 500 MB a second, and the link took 50 ms for each message.
            paced.packing = Duration::from_nanos(paced.plain * 2);
            paced.since.at -= Duration::from_millis(50);
            paced.flush(&mut wire).expect("flushes");
            unpacker.push(&wire);
            assert_eq!(unpacker.poll().expect("is sound"), Some(message));
            levels.push(paced.chooser.level());
        }
        assert_eq!(levels[0], Level::One);
        assert!(*levels.last().expect("there are some") > Level::One, "{levels:?}");
    }

    #[test]
    fn where_nobody_asks_for_anything_the_link_is_not_taken_for_a_slow_one() {
        let mut paced = Paced::new().expect("begins");
        // What is measured at once, of which each message took 50 ms, and so much of that nobody had asked for it.
        let mut piece = |idle: Duration| {
            for n in 0..256 {
                paced.since.at -= Duration::from_millis(50);
                paced.idled(idle);
                let mut wire = vec![];
                paced.push(&message(n), &mut wire).expect("packs");
                paced.packing = Duration::from_nanos(paced.plain * 2);
                paced.flush(&mut wire).expect("flushes");
            }
            assert_eq!(paced.plain, 0, "it was measured");
            paced.chooser.level()
        };
        assert_eq!(piece(Duration::from_millis(45)), Level::One);
        assert!(piece(Duration::from_millis(2)) > Level::One, "a moment now and then is no matter");
    }
}
