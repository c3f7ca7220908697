//! How hard zstd tries on memory: by what the link carried and the processor packed so far in this move
//! ([`godwit_content::choose`]). On a slow link a core has time for level 3 or 6, which make some hundredths less of it; on one that is faster than
//! the encoder what it spares by not looking far back is worth more.
//!
//! Another level begins a new frame with an empty window, so what came before is not referred to any more: a look is taken early, when little
//! is lost, and [`CHANGES`] of them change something at the most. From the lowest levels that bound keeps a busy machine, too: what they leave to the
//! wire takes processors at both ends, of which a look at the encoder tells nothing.
//!
//! Who asks for the fewest bytes ([`Policy::LeastBytes`]) gets [`LEAST`] from the first byte to the last: there is no trade to be measured.

use godwit_content::choose::{Chooser, Level, Measured};
use godwit_memory::{Progress, Reach};
use godwit_units::{Bytes, Policy};
use std::time::{Duration, Instant};

/// Raw bytes between two looks: some tenths of a second of a gigabit.
const LOOK: u64 = 16 << 20;
/// A window is worth more than a better level by the third time.
const CHANGES: u32 = 2;

/// An acknowledgement may be so much later than a round trip. Where more is on its way than arrives in both, the rest waits for the link, in
/// buffers that take some megabytes before anybody is made to wait: then it is not the encoder that holds the stream up, whatever it took.
const LATE: Duration = Duration::from_millis(50);

/// Where packing and waiting for the link take a smaller part of the time, QEMU is what the stream waits for, and nothing is learnt of the link.
const OURS: f64 = 0.5;

/// The level that makes the least of memory. Beside level 1 it takes three to four times as long, trying how each page is smallest with it, for 14 to 17 %
/// fewer bytes; level 12 takes half as long again as 9 for another hundredth, 19 a hundred times for a sixth (recorded streams of a compiler's and a
/// database's guest).
const LEAST: Level = Level::Nine;

/// Measures a stream, and says when to go on with another level.
#[derive(Debug)]
pub(crate) struct Levels {
    /// The one that was asked for, whatever is measured.
    fixed: Option<Level>,
    chooser: Chooser,
    began: Instant,
    packing: Duration,
    waiting: Duration,
    raw: u64,
    wire: u64,
    arrived: u64,
    left: u32,
}

/// What the link has made of the stream.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Carried {
    /// Packed bytes that the other side has acknowledged.
    pub arrived: u64,
    /// How long one takes to be, where nothing waits.
    pub round_trip: Duration,
}

/// How far back such a level looks: where the encoder is what the stream waits for, not over long distances.
pub(crate) fn reach(level: Level) -> Reach {
    if level < Level::One { Reach::Near } else { Reach::Far }
}

impl Levels {
    /// From now on. With level 1, but for a policy that says itself what is wanted.
    pub(crate) fn new(policy: Policy) -> Self {
        let fixed = (policy == Policy::LeastBytes).then_some(LEAST);
        Self {
            fixed,
            chooser: Chooser::for_memory(),
            began: Instant::now(),
            packing: Duration::ZERO,
            waiting: Duration::ZERO,
            raw: 0,
            wire: 0,
            arrived: 0,
            left: if fixed.is_some() { 0 } else { CHANGES },
        }
    }

    /// The level that is in force.
    pub(crate) fn level(&self) -> Level {
        self.fixed.unwrap_or(self.chooser.level())
    }

    /// So long it took to pack something.
    pub(crate) fn packed(&mut self, time: Duration) {
        self.packing += time;
    }

    /// So long the link had no room for more. What reading takes, and waiting for QEMU, says nothing of the link: where that was counted as its
    /// time a gigabit looked like 200 Mbit/s to a source with busy processors.
    pub(crate) fn waited(&mut self, time: Duration) {
        self.waiting += time;
    }

    /// The level to go on with, if it is another one.
    pub(crate) fn look(&mut self, progress: &Progress, carried: impl FnOnce() -> Carried) -> Option<Level> {
        if progress.raw_bytes - self.raw < LOOK {
            return None;
        }
        self.look_after(progress, self.began.elapsed(), carried)
    }

    fn look_after(&mut self, progress: &Progress, time: Duration, carried: impl FnOnce() -> Carried) -> Option<Level> {
        if self.left == 0 {
            return None;
        }
        let carried = carried();
        let measured = Measured {
            plain: Bytes(progress.raw_bytes - self.raw),
            packed: Bytes(progress.wire_bytes - self.wire),
            packing: self.packing,
            time: self.packing + self.waiting,
        };
        let on_its_way = progress.wire_bytes.saturating_sub(carried.arrived);
        let carries = carried.arrived.saturating_sub(self.arrived) as f64 / time.as_secs_f64().max(0.001);
        let waits = on_its_way as f64 > carries * (carried.round_trip + LATE).as_secs_f64();
        (self.raw, self.wire, self.arrived) = (progress.raw_bytes, progress.wire_bytes, carried.arrived);
        (self.packing, self.waiting, self.began) = (Duration::ZERO, Duration::ZERO, Instant::now());
        if measured.time.as_secs_f64() < OURS * time.as_secs_f64() {
            return None;
        }
        let (before, chooser) = (self.chooser.level(), self.chooser.clone());
        let now = self.chooser.measured(&measured);
        if waits && now < before {
            self.chooser = chooser;
            return None;
        }
        // On a stream that is short of what is raw for a while, a probe would only cost the window.
        let other = now != before && !(before == Level::Raw && self.left < CHANGES);
        self.left -= u32::from(other);
        other.then_some(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A stream that shrinks to a quarter, packed at 350 MB/s by level 1, over a link of so many Mbit/s: the levels that are changed to. For each 17 MB
    /// QEMU is waited for so long.
    fn levels(mbit: f64, qemu: Duration) -> Vec<Level> {
        let (mut levels, mut progress, mut changed) = (Levels::new(Policy::LeastDowntime), Progress::default(), vec![]);
        let mut packing = 17e6 / 350e6;
        for _ in 0..12 {
            progress.raw_bytes += 17_000_000;
            progress.wire_bytes += 17_000_000 / 4;
            levels.packed(Duration::from_secs_f64(packing));
            let waiting = Duration::from_secs_f64((17e6 / 4.0 * 8.0 / (mbit * 1e6) - packing).max(0.0));
            levels.waited(waiting);
            let time = Duration::from_secs_f64(packing) + waiting + qemu;
            if let Some(level) = levels.look_after(&progress, time, || all_but(0, &progress)) {
                packing *= if level > Level::One { 2.0 } else { 0.5 };
                changed.push(level);
            }
        }
        changed
    }

    fn all_but(on_its_way: u64, progress: &Progress) -> Carried {
        Carried { arrived: progress.wire_bytes - on_its_way, round_trip: Duration::from_millis(50) }
    }

    const NO_TIME: Duration = Duration::ZERO;

    #[test]
    fn what_lies_in_buffers_before_the_link_is_no_reason_to_pack_less() {
        let (packing, mut levels) = (Duration::from_millis(50), Levels::new(Policy::LeastDowntime));
        let mut progress = Progress { raw_bytes: 17_000_000, wire_bytes: 4_250_000, ..Progress::default() };
        levels.packed(packing);
        assert_eq!(
            levels.look_after(&progress, packing, || all_but(4_000_000, &progress)),
            None,
            "nobody was made to wait yet"
        );
        // The link is the one that is waited for, and the buffers stay full.
        for _ in 0..4 {
            progress.raw_bytes += 17_000_000;
            progress.wire_bytes += 4_250_000;
            let waited = Duration::from_millis(220);
            levels.packed(packing);
            levels.waited(waited);
            let level = levels.look_after(&progress, packing + waited, || all_but(4_000_000, &progress));
            assert!(level.is_none_or(|level| level > Level::One), "{level:?}");
        }
        // The same where all of it arrives at once.
        let mut levels = Levels::new(Policy::LeastDowntime);
        levels.packed(packing);
        assert!(
            levels
                .look_after(&progress, packing, || all_but(400_000, &progress))
                .is_some_and(|level| level < Level::One)
        );
    }

    #[test]
    fn a_slow_link_gets_a_higher_level_at_the_first_look_and_keeps_it() {
        assert_eq!(levels(50.0, NO_TIME).first(), Some(&Level::Six));
        assert!(levels(50.0, NO_TIME).len() <= CHANGES as usize);
    }

    #[test]
    fn who_wants_the_fewest_bytes_gets_the_highest_level_on_any_link() {
        let mut levels = Levels::new(Policy::LeastBytes);
        assert_eq!((levels.level(), reach(levels.level())), (Level::Nine, Reach::Far));
        let mut progress = Progress::default();
        for _ in 0..4 {
            progress.raw_bytes += 17_000_000;
            progress.wire_bytes += 4_250_000;
            // A link that takes no time at all.
            levels.packed(Duration::from_millis(400));
            assert_eq!(levels.look_after(&progress, Duration::from_millis(400), || all_but(0, &progress)), None);
        }
        assert_eq!(levels.level(), Level::Nine);
        assert_eq!(Levels::new(Policy::LeastTotal).level(), Level::One);
    }

    #[test]
    fn a_link_that_is_as_fast_as_level_1_keeps_it() {
        assert_eq!(levels(400.0, NO_TIME), []);
    }

    #[test]
    fn where_the_encoder_is_waited_for_it_looks_near_and_reading_from_qemu_is_not_taken_for_the_link() {
        assert_eq!(levels(1200.0, NO_TIME).first(), Some(&Level::Near));
        assert_eq!(levels(1200.0, Duration::from_millis(30)).first(), Some(&Level::Near));
        assert_eq!(reach(Level::Near), Reach::Near);
    }

    #[test]
    fn where_qemu_is_waited_for_the_level_stays() {
        assert_eq!(levels(1200.0, Duration::from_millis(100)), []);
    }
}
