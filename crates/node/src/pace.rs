//! Packs a stream as hard as pays: what `godwit_content::choose` decides, fed with what is measured here.

use godwit_content::choose::{Chooser, Measured};
use godwit_content::{PackError, Packer};
use godwit_units::Bytes;
use std::time::{Duration, Instant};

/// What is measured at once: twice zstd's window, since a change begins with an empty one.
const PIECE: u64 = 16 << 20;
/// If it takes longer there was not always something to send, and it says nothing about the link.
const LONGEST: Duration = Duration::from_secs(30);

/// A packer that finds its level.
#[derive(Debug)]
pub(crate) struct Paced {
    packer: Packer,
    chooser: Chooser,
    plain: u64,
    packed: u64,
    packing: Duration,
    since: Instant,
}

impl Paced {
    /// A stream that begins.
    pub(crate) fn new() -> Result<Self, PackError> {
        let (packer, chooser) = (Packer::new()?, Chooser::for_disks());
        Ok(Self { packer, chooser, plain: 0, packed: 0, packing: Duration::ZERO, since: Instant::now() })
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
            let time = self.since.elapsed();
            if time < LONGEST {
                let (plain, packed) = (Bytes(self.plain), Bytes(self.packed));
                let before = self.chooser.level();
                let level = self.chooser.measured(&Measured { plain, packed, packing: self.packing, time });
                if level != before {
                    tracing::debug!(?before, ?level, %plain, %packed, packing = ?self.packing, ?time, "another level of zstd");
                }
                self.packer.set_level(level);
            }
            (self.plain, self.packed, self.packing, self.since) = (0, 0, Duration::ZERO, Instant::now());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use godwit_content::Unpacker;
    use godwit_content::choose::Level;

    #[test]
    fn a_slow_link_gets_a_higher_level_and_every_message_arrives() {
        let (mut paced, mut unpacker) = (Paced::new().expect("begins"), Unpacker::new().expect("begins"));
        let mut levels = vec![];
        for n in 0..400u32 {
            let words = (0..16_384u32).map(|i| (i.wrapping_mul(n | 1).wrapping_mul(0x9e37_79b9) >> 20) % 700);
            let (message, mut wire): (Vec<u8>, _) = (words.flat_map(u32::to_le_bytes).collect(), vec![]);
            paced.push(&message, &mut wire).expect("packs");
            // As if a core packed 500 MB a second, and the link took 50 ms for each message.
            paced.packing = Duration::from_nanos(paced.plain * 2);
            paced.since -= Duration::from_millis(50);
            paced.flush(&mut wire).expect("flushes");
            unpacker.push(&wire);
            assert_eq!(unpacker.poll().expect("is sound"), Some(message));
            levels.push(paced.chooser.level());
        }
        assert_eq!(levels[0], Level::One);
        assert!(*levels.last().expect("there are some") > Level::One, "{levels:?}");
    }
}
