//! How much may be on its way without an answer: what a path holds follows from what it carries and how long it is, and a fixed window is too
//! little for a fast and long one, and keeps others waiting on a slow one.

use godwit_units::{BitRate, BlockIndex};
use std::collections::BTreeSet;
use std::ops::{Range, RangeInclusive};
use std::time::Duration;

/// How many times what the path holds, in bytes before they are packed: blocks are packed to a half or a third, and what holds the rate
/// down is to grow.
const PACKED: u64 = 4;
/// How many times what came in a round trip the fill asks ahead: as [`PACKED`], and what comes is counted unpacked.
const TWICE: u64 = 2;

/// What may be on its way over a path, of a sender that is acknowledged.
pub(crate) fn held_by(rate: BitRate, round_trip: Duration, bounds: RangeInclusive<u64>) -> u64 {
    rate.bytes_in(round_trip).0.saturating_mul(PACKED).clamp(*bounds.start(), *bounds.end())
}

/// How far a requester asks ahead. It knows no rate: it times one question at a time, and counts what comes until that is answered. The shortest
/// such time is the path's, without a queue.
#[derive(Debug)]
pub(crate) struct Ahead {
    bounds: RangeInclusive<u64>,
    window: u64,
    least: Option<Duration>,
    /// A block that was asked for, when, and how many had come by then.
    timed: Option<(u64, Duration, u64)>,
    came: u64,
    /// Where questions begin that are not answered.
    questions: BTreeSet<u64>,
}

impl Ahead {
    /// Blocks, from so many at first, to so many.
    pub(crate) const fn new(bounds: RangeInclusive<u64>) -> Self {
        let window = *bounds.start();
        Self { bounds, window, least: None, timed: None, came: 0, questions: BTreeSet::new() }
    }

    /// Blocks that may be asked for and not answered.
    pub(crate) const fn window(&self) -> u64 {
        self.window
    }

    /// Questions that are not answered.
    pub(crate) fn questions(&self) -> usize {
        self.questions.len()
    }

    pub(crate) fn asked(&mut self, blocks: &Range<u64>, now: Duration) {
        self.questions.insert(blocks.start);
        self.timed.get_or_insert((blocks.start, now, self.came));
    }

    /// Blocks that were asked for have come, or are known not to: `None` where nothing was timed.
    pub(crate) fn answered(&mut self, blocks: &Range<u64>, now: Option<Duration>) {
        let begun: Vec<_> = self.questions.range(blocks.clone()).copied().collect();
        begun.iter().for_each(|block| _ = self.questions.remove(block));
        if now.is_some() {
            self.came += blocks.end - blocks.start;
        }
        let Some((_, asked, before)) = self.timed.take_if(|(block, ..)| blocks.contains(block)) else { return };
        let Some(took) = now.map(|now| now.saturating_sub(asked)).filter(|took| !took.is_zero()) else { return };
        let least = self.least.map_or(took, |least| least.min(took));
        self.least = Some(least);
        let in_least = (self.came - before) as f64 * least.as_secs_f64() / took.as_secs_f64();
        self.window = (in_least as u64).saturating_mul(TWICE).clamp(*self.bounds.start(), *self.bounds.end());
    }

    /// What was asked of somebody who has gone is not answered.
    pub(crate) fn forget(&mut self, is_lost: impl Fn(BlockIndex) -> bool) {
        self.questions.retain(|block| !is_lost(BlockIndex(*block)));
        self.timed.take_if(|(block, ..)| is_lost(BlockIndex(*block)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::VecDeque;

    /// Fills over a path of so many blocks a second, with so long a round trip, for so many seconds: the window then, and the part of the
    /// path's rate that the last second had.
    fn fills(rate: u64, round_trip: Duration, seconds: u64) -> (u64, f64) {
        let mut ahead = Ahead::new(2048..=16384);
        let (step, mut now, mut next) = (Duration::from_millis(1), Duration::ZERO, 0);
        let mut line: VecDeque<(Duration, Range<u64>)> = VecDeque::new();
        // When the path has carried all that was asked for so far, were it one answer after the other.
        let (mut free, mut late) = (Duration::ZERO, 0);
        let mut under_way = 0;
        while now < Duration::from_secs(seconds) {
            while under_way + 16 <= ahead.window() {
                let blocks = next..next + 16;
                ahead.asked(&blocks, now);
                free = free.max(now + round_trip) + Duration::from_secs_f64(16.0 / rate as f64);
                line.push_back((free, blocks));
                (next, under_way) = (next + 16, under_way + 16);
            }
            now += step;
            while let Some((_, blocks)) = line.pop_front_if(|(at, _)| *at <= now) {
                ahead.answered(&blocks, Some(now));
                under_way -= 16;
                late += if now + Duration::from_secs(1) > Duration::from_secs(seconds) { 16 } else { 0 };
            }
        }
        assert_eq!(ahead.questions(), under_way as usize / 16);
        (ahead.window(), late as f64 / rate as f64)
    }

    #[test]
    fn a_fast_and_long_path_is_filled_and_a_slow_one_is_not_asked_for_more_than_before() {
        let ms = Duration::from_millis;
        // 10 MB/s and 100 ms hold a megabyte; 400 MB/s and 100 ms hold 40, five times what is asked for at first.
        let (window, part) = fills(2_500, ms(100), 10);
        assert!(window == 2048 && part > 0.97, "{window} {part}");
        let (window, part) = fills(100_000, ms(100), 10);
        assert!((10_000..=16_384).contains(&window) && part > 0.9, "{window} {part}");
        let mut fixed = Ahead::new(2048..=2048);
        fixed.asked(&(0..16), Duration::ZERO);
        fixed.answered(&(0..16), Some(ms(1)));
        assert_eq!(fixed.window(), 2048);
    }

    #[test]
    fn what_is_lost_is_neither_timed_nor_counted() {
        let mut ahead = Ahead::new(4..=64);
        let s = Duration::from_secs;
        ahead.asked(&(0..4), s(0));
        ahead.asked(&(8..12), s(0));
        ahead.forget(|block| block.0 < 8);
        assert_eq!((ahead.questions(), ahead.timed), (1, None));
        ahead.answered(&(8..12), None);
        assert_eq!((ahead.questions(), ahead.came, ahead.window()), (0, 0, 4));
        ahead.asked(&(16..48), s(5));
        ahead.answered(&(16..48), Some(s(6)));
        assert_eq!(ahead.window(), 64);
    }

    #[test]
    fn a_window_follows_rate_and_round_trip_within_its_bounds() {
        let held = |mbit, ms| held_by(BitRate::from_mbit(mbit), Duration::from_millis(ms), 4 << 20..=64 << 20);
        assert_eq!((held(100.0, 20), held(10_000.0, 100)), (4 << 20, 64 << 20));
        assert_eq!(held(500.0, 50), 500_000_000 / 8 / 20 * PACKED);
    }
}
