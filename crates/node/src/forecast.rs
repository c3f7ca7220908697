//! How long a pause would be if the guest were stopped now.
//!
//! Four things happen between the guest's stop here and its start over there: what is on its way already gets there; what is still dirty
//! is sent behind it; the hand-off goes over the link and back, twice; and both nodes write and open what they have to. The first two are
//! bytes, and take their time at the link's rate; the others take as long as they take.
//!
//! # What can go wrong
//!
//! *The rate is the sender's*: a guest that dirties little lets the link stand idle, and what went in such a moment says nothing of what
//! could. So the rate is the greatest of the last moments: no more was ever acknowledged in one than the link carries.
//!
//! *The rate falls.* A moment is forgotten after [`REMEMBERED`]: so long a forecast may be too good.
//!
//! *The link stands*: then a forecast says when what is left would be there if it did not, later with each look, and nothing is to be done because of
//! that ([`Flowing`]).
//!
//! What is on its way is bounded by a window, and so the window follows the link ([`Goodput::window`]): as much as keeps it busy, and no
//! more, since all of it is part of the pause.
//!
//! Pure: times and counters in, a forecast out.

use godwit_predict::whole::under_way;
use godwit_units::Bytes;
use std::collections::VecDeque;
use std::time::Duration;

/// A moment: shorter ones see acknowledgements in clumps.
const MOMENT: Duration = Duration::from_millis(240);
/// For so long a moment's rate counts.
const REMEMBERED: Duration = Duration::from_secs(10);
/// Round trips that a hand-off takes between the last page and the guest's start: the pages and their confirmation, the commit and its
/// answer.
const ROUND_TRIPS: u32 = 2;
/// What both nodes and both QEMUs need beside: the last state, durable records, open disks. On an idle machine it is half of that.
const WORK: Duration = Duration::from_millis(50);

/// What a link has lately carried of one stream.
#[derive(Clone, Debug, Default)]
pub struct Goodput {
    /// When each moment ended, and what had been acknowledged then.
    seen: VecDeque<(Duration, u64)>,
}

/// Whether a stream gets on, from look to look.
#[derive(Clone, Copy, Debug, Default)]
pub struct Flowing(u64);

impl Flowing {
    /// So many bytes have been acknowledged by now: whether some of them were since the look before, over a link that is not known to be down.
    pub const fn look(&mut self, acknowledged: u64, is_down: bool) -> bool {
        let gets_on = acknowledged > self.0;
        self.0 = acknowledged;
        gets_on && !is_down
    }
}

/// Of what a pause would consist.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Forecast {
    /// What is on its way already.
    pub on_its_way: Duration,
    /// What would be sent after the stop.
    pub rest: Duration,
    /// The hand-off.
    pub hand_off: Duration,
}

impl Forecast {
    /// All of it.
    #[must_use]
    pub fn total(&self) -> Duration {
        self.on_its_way + self.rest + self.hand_off
    }

    /// That of a guest which its memory follows.
    #[must_use]
    pub fn without_rest(&self) -> Duration {
        self.on_its_way + self.hand_off
    }
}

impl Goodput {
    /// So many bytes have been acknowledged by `now`, counted from any moment.
    pub fn seen(&mut self, now: Duration, acknowledged: u64) {
        if self.seen.back().is_some_and(|(last, _)| now.saturating_sub(*last) < MOMENT) {
            return;
        }
        self.seen.push_back((now, acknowledged));
        while self.seen.len() > 2 && self.seen.front().is_some_and(|(at, _)| now.saturating_sub(*at) > REMEMBERED) {
            self.seen.pop_front();
        }
    }

    /// Bytes a second in the best of the last moments; none where nothing was carried.
    #[must_use]
    pub fn rate(&self) -> Option<f64> {
        let pairs = self.seen.iter().zip(self.seen.iter().skip(1));
        let rates = pairs.map(|((from, before), (to, after))| {
            after.saturating_sub(*before) as f64 / to.saturating_sub(*from).as_secs_f64().max(0.001)
        });
        rates.max_by(f64::total_cmp).filter(|rate| *rate > 0.0)
    }

    /// How many bytes may be on their way ([`under_way`]): always more than keeps up the rate that was measured, so a window never holds the
    /// rate down for long. None where no rate is known.
    #[must_use]
    pub fn window(&self, rtt: Duration) -> Option<Bytes> {
        Some(under_way(self.rate()?, rtt))
    }

    /// A pause with so many bytes on their way and so many to be sent, on a link of this round trip. `otherwise` is what the rest is
    /// thought to take where the rate is not known.
    #[must_use]
    pub fn forecast(&self, on_its_way: u64, rest: f64, rtt: Duration, otherwise: Duration) -> Forecast {
        let hand_off = rtt * ROUND_TRIPS + WORK;
        let Some(rate) = self.rate() else {
            return Forecast { on_its_way: Duration::ZERO, rest: otherwise, hand_off };
        };
        let takes = |bytes: f64| Duration::from_secs_f64((bytes / rate).clamp(0.0, 1e6));
        Forecast { on_its_way: takes(on_its_way as f64), rest: takes(rest), hand_off }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use godwit_memory::smart_stop::{Look, Policy, SmartStop};
    use proptest::prelude::*;

    const RTT: Duration = Duration::from_millis(40);

    #[test]
    fn what_is_on_its_way_is_part_of_the_pause() {
        let mut goodput = Goodput::default();
        for second in 0..4 {
            goodput.seen(Duration::from_secs(second), second * 2_500_000);
        }
        let clear = goodput.forecast(0, 250_000.0, RTT, Duration::ZERO);
        assert_eq!(clear.rest, Duration::from_millis(100));
        let full = goodput.forecast(1_000_000, 250_000.0, RTT, Duration::ZERO);
        assert_eq!(full.total() - clear.total(), Duration::from_millis(400));
        assert!(clear.hand_off >= 2 * RTT, "the hand-off goes there and back twice");
    }

    #[test]
    fn idle_moments_do_not_make_the_link_slow_and_old_ones_do_not_make_it_fast() {
        let mut goodput = Goodput::default();
        goodput.seen(Duration::ZERO, 0);
        goodput.seen(Duration::from_secs(1), 8_000_000);
        for second in 2..=9 {
            goodput.seen(Duration::from_secs(second), 8_000_000);
        }
        assert_eq!(goodput.rate(), Some(8_000_000.0));
        for second in 10..=20 {
            goodput.seen(Duration::from_secs(second), 8_000_000 + (second - 9) * 1_000_000);
        }
        assert_eq!(goodput.rate(), Some(1_000_000.0));
    }

    #[test]
    fn a_window_grows_until_the_link_is_full_and_is_no_larger_then() {
        // A link of 12.5 MB/s and 100 ms: what is in flight beyond its product waits, and lengthens the round trip.
        let (mut goodput, mut now, mut acknowledged, mut window) = (Goodput::default(), Duration::ZERO, 0.0, 100_000.0);
        let (rate, path) = (12_500_000.0, Duration::from_millis(100));
        let mut rtt = path;
        for _ in 0..100 {
            goodput.seen(now, acknowledged as u64);
            window = goodput.window(rtt).map_or(window, |window| window.0 as f64);
            rtt = path.max(Duration::from_secs_f64(window / rate)).min(2 * path);
            acknowledged += (window / rtt.as_secs_f64()).min(rate) * 0.25;
            now += Duration::from_millis(250);
        }
        assert!(goodput.rate().unwrap() > rate * 0.99, "{:?}", goodput.rate());
        assert!(window < rate * 2.0 * 0.1 * 1.25 + rate * 0.03 + 1.0, "{window}");
    }

    #[test]
    fn without_a_rate_the_rounds_own_measure_stands() {
        let thought = Duration::from_millis(70);
        assert_eq!(Goodput::default().forecast(1 << 20, 1e6, RTT, thought).rest, thought);
    }

    #[test]
    fn a_guest_is_not_stopped_into_a_link_that_stands_and_is_in_time_still_when_it_comes_back_soon() {
        // 4 MB at 400 kB a second.
        let moved = |cut: std::ops::Range<u32>, is_told: bool| {
            let mut rule = SmartStop::new(Policy::Deadline(Duration::from_secs(12)));
            let (mut flowing, mut arrived) = (Flowing::default(), 0_u32);
            (0..40).find_map(|look| {
                let (elapsed, is_cut) = (look * Duration::from_millis(250), cut.contains(&look));
                arrived += if is_cut { 0 } else { 100_000 };
                let left = Duration::from_secs_f64(f64::from(4_000_000 - arrived) / 400_000.0);
                let asked = flowing.look(u64::from(arrived), is_cut && is_told);
                asked.then(|| rule.look(&Look { left, elapsed })).flatten().map(|_| look)
            })
        };
        assert_eq!(moved(0..0, false), None, "nothing is late");
        for is_told in [false, true] {
            assert_eq!(moved(4..9, is_told), None, "it is there within 11 s");
            assert_eq!(moved(4..11, is_told), Some(11), "not before it is back");
            assert_eq!(moved(4..24, is_told), None, "it is too late");
        }
        let mut flowing = Flowing::default();
        let looks = [(0, false), (1, false), (1, false), (2, true), (3, false)];
        assert_eq!(looks.map(|(bytes, is_down)| flowing.look(bytes, is_down)), [false, true, false, false, true]);
    }

    proptest! {
        #[test]
        fn it_remembers_little_and_never_says_more_than_was_carried(steps in prop::collection::vec((1u64..2000, 0u64..10_000_000), 1..300)) {
            let (mut goodput, mut now, mut bytes, mut best) = (Goodput::default(), 0u64, 0u64, 0.0f64);
            goodput.seen(Duration::ZERO, 0);
            for (ms, more) in steps {
                (now, bytes) = (now + ms, bytes + more);
                // However the moments fall, none is faster than its fastest part.
                best = best.max(more as f64 * 1000.0 / ms as f64);
                goodput.seen(Duration::from_millis(now), bytes);
                prop_assert!(goodput.seen.len() <= 44);
                prop_assert!(goodput.rate().is_none_or(|rate| rate <= best * 1.001));
            }
        }
    }
}
