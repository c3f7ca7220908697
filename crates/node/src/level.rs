//! How hard zstd tries on memory: by what the link carried and the processor packed so far in this move
//! ([`godwit_content::choose`]). On a slow link a core has time for level 3 or 6, which make a tenth less of it; on a fast one none does anything
//! worth its time.
//!
//! Another level begins a new frame with an empty window, so what came before is not referred to any more: a look is taken early, when little
//! is lost, and [`CHANGES`] of them change something at the most.

use godwit_content::choose::{Chooser, Level, Measured};
use godwit_memory::{Progress, Reach};
use godwit_units::Bytes;
use std::time::{Duration, Instant};

/// Raw bytes between two looks: some tenths of a second of a gigabit.
const LOOK: u64 = 16 << 20;
/// A window is worth more than a better level by the third time.
const CHANGES: u32 = 2;

/// Measures a stream, and says when to go on with another level.
#[derive(Debug)]
pub(crate) struct Levels {
    chooser: Chooser,
    began: Instant,
    packing: Duration,
    raw: u64,
    wire: u64,
    left: u32,
}

/// How far back such a level looks: where the encoder is what the stream waits for, not over long distances.
pub(crate) fn reach(level: Level) -> Reach {
    if level < Level::One { Reach::Near } else { Reach::Far }
}

impl Levels {
    /// From now on, with level 1.
    pub(crate) fn new() -> Self {
        Self {
            chooser: Chooser::for_memory(),
            began: Instant::now(),
            packing: Duration::ZERO,
            raw: 0,
            wire: 0,
            left: CHANGES,
        }
    }

    /// So long it took to pack something.
    pub(crate) fn packed(&mut self, time: Duration) {
        self.packing += time;
    }

    /// The level to go on with, if it is another one.
    pub(crate) fn look(&mut self, progress: &Progress) -> Option<Level> {
        self.look_after(progress, self.began.elapsed())
    }

    fn look_after(&mut self, progress: &Progress, time: Duration) -> Option<Level> {
        if progress.raw_bytes - self.raw < LOOK || self.left == 0 {
            return None;
        }
        let before = self.chooser.level();
        let now = self.chooser.measured(&Measured {
            plain: Bytes(progress.raw_bytes - self.raw),
            packed: Bytes(progress.wire_bytes - self.wire),
            packing: self.packing,
            time,
        });
        (self.raw, self.wire) = (progress.raw_bytes, progress.wire_bytes);
        (self.packing, self.began) = (Duration::ZERO, Instant::now());
        // On a stream that is short of what is raw for a while, a probe would only cost the window.
        let other = now != before && !(before == Level::Raw && self.left < CHANGES);
        self.left -= u32::from(other);
        other.then_some(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A stream that shrinks to a quarter, packed at 350 MB/s by level 1, over a link of so many Mbit/s: the levels that are changed to.
    fn levels(mbit: f64) -> Vec<Level> {
        let (mut levels, mut progress, mut changed) = (Levels::new(), Progress::default(), vec![]);
        let mut packing = 17e6 / 350e6;
        for _ in 0..12 {
            progress.raw_bytes += 17_000_000;
            progress.wire_bytes += 17_000_000 / 4;
            levels.packed(Duration::from_secs_f64(packing));
            let time = Duration::from_secs_f64((17e6 / 4.0 * 8.0 / (mbit * 1e6)).max(packing));
            if let Some(level) = levels.look_after(&progress, time) {
                packing *= if level > Level::One { 2.0 } else { 0.5 };
                changed.push(level);
            }
        }
        changed
    }

    #[test]
    fn a_slow_link_gets_a_higher_level_at_the_first_look_and_keeps_it() {
        assert_eq!(levels(50.0).first(), Some(&Level::Three));
        assert!(levels(50.0).len() <= CHANGES as usize);
    }

    #[test]
    fn a_link_that_is_as_fast_as_level_1_keeps_it() {
        assert_eq!(levels(500.0), []);
    }
}
