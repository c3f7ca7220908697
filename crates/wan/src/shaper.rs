//! The line: what becomes of a frame that one direction of a path is offered, and when.
//!
//! This is the whole model, and it is pure: no clock, no socket, no thread. The caller says what time it is, so a test
//! can run an hour of traffic in a millisecond and the same seed gives the same fates.
//!
//! # The model
//!
//! ```text
//!             drop-tail queue         the line            loss        delay
//!  offer --> [ f f f f f f f ] --> ( serialises ) --> ( dice ) --> rtt/2 + jitter --> depart
//!             at most `queue`       at `rate`
//!             of backlog
//! ```
//!
//! A FIFO queue in front of a line of constant rate needs no queue to be modelled: it is enough to remember until when
//! the line is busy with what it has already taken. The backlog is that moment minus now; a frame is refused when the
//! backlog exceeds `queue` and otherwise keeps the line busy for a while longer.
//!
//! Rounding each frame's time to nanoseconds would bend the rate (7 ns for 6.72 ns is 4 %). So the shaper remembers when
//! the current busy period began and how many bytes it has carried, and rounds their quotient once: over any busy
//! period the rate is exact to a nanosecond.
//!
//! # What happens when things change
//!
//! - **Rate, delay, jitter, loss, queue**: frames that were already accepted keep their moment of departure. The line
//!   finishes its backlog as scheduled and serves later frames by the new rate. When the delay was lowered, later frames
//!   may overtake earlier ones, as they would when a route changes.
//! - **Cut**: everything in flight is lost (the caller must discard what it holds), the queue is emptied, and every frame
//!   offered is dropped.
//! - **Restore**: the line comes back idle. Frames that arrived before the moment of restoring are still dropped, even
//!   when they are read later.
//!
//! # What is so on purpose
//!
//! - A lost packet still occupies the line: it was sent, and died further on. Loss does not raise the goodput of others.
//! - Jitter reorders: each packet draws its own delay and nothing keeps them in line, as with `netem` and with parallel paths.
//! - An idle line always accepts one frame, however large the frame and small the queue; otherwise a 64 KiB
//!   super-frame could never pass a slow line with a short queue.
//! - Loss and jitter have generators of their own, each stepped once per accepted frame: turning jitter on does not
//!   change which packets get lost.

use crate::PathSpec;
use godwit_units::Bytes;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use std::time::Duration;

/// A point in time, as the duration since the path's own beginning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Moment(pub Duration);

impl Moment {
    /// The beginning.
    pub const ZERO: Self = Self(Duration::ZERO);

    /// This moment, `later` on; saturating.
    #[must_use]
    pub fn after(self, later: Duration) -> Self {
        Self(self.0.saturating_add(later))
    }

    /// How long ago `earlier` was; zero when it is still to come.
    #[must_use]
    pub fn since(self, earlier: Self) -> Duration {
        self.0.saturating_sub(earlier.0)
    }
}

/// What becomes of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It leaves the path at this moment.
    Depart {
        /// When.
        at: Moment,
    },
    /// The queue was full.
    DropQueue,
    /// It is lost on the WAN, after having occupied the line.
    DropLoss,
    /// The path was cut when it arrived.
    DropCut,
}

/// One direction of a path.
#[derive(Clone, Debug)]
pub struct Shaper {
    spec: PathSpec,
    line: Line,
    period: BusyPeriod,
    busy_until: Moment,
    loss_dice: SmallRng,
    jitter_dice: SmallRng,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Line {
    Up { since: Moment },
    Cut,
}

/// A time during which the line had always something to send, all of it at one rate.
#[derive(Clone, Copy, Debug)]
struct BusyPeriod {
    began: Moment,
    carried: Bytes,
}

impl BusyPeriod {
    fn beginning(began: Moment) -> Self {
        Self { began, carried: Bytes::ZERO }
    }
}

impl Shaper {
    /// An idle line. Equal seeds and equal offers give equal verdicts (within one build: the generator is rand's
    /// `SmallRng`, which may differ between versions and word sizes).
    #[must_use]
    pub fn new(spec: PathSpec, seed: u64) -> Self {
        // Any two different constants do: they keep the two streams apart.
        const LOSS_STREAM: u64 = 0x6c6f_7373;
        const JITTER_STREAM: u64 = 0x6a69_7474_6572;
        Self {
            spec,
            line: Line::Up { since: Moment::ZERO },
            period: BusyPeriod::beginning(Moment::ZERO),
            busy_until: Moment::ZERO,
            loss_dice: SmallRng::seed_from_u64(seed ^ LOSS_STREAM),
            jitter_dice: SmallRng::seed_from_u64(seed ^ JITTER_STREAM),
        }
    }

    /// The spec in force.
    #[must_use]
    pub fn spec(&self) -> &PathSpec {
        &self.spec
    }

    /// How long the line would need for what it has taken and not yet sent.
    #[must_use]
    pub fn backlog(&self, now: Moment) -> Duration {
        self.busy_until.since(now)
    }

    /// Decides about a frame that arrived at `now` and occupies `wire` bytes of the line (see
    /// [`FrameInfo::wire_bytes`](crate::frame::FrameInfo)). Arrivals may be offered slightly out of order.
    pub fn offer(&mut self, now: Moment, wire: Bytes) -> Verdict {
        match self.line {
            Line::Up { since } if now >= since => {}
            Line::Up { .. } | Line::Cut => return Verdict::DropCut,
        }
        if self.backlog(now) > self.spec.queue {
            return Verdict::DropQueue;
        }
        if self.busy_until <= now {
            self.period = BusyPeriod::beginning(now);
        }
        self.period.carried += wire;
        self.busy_until = self.period.began.after(self.spec.rate.time_for(self.period.carried));

        let lost = self.loss_dice.random::<f64>() < self.spec.loss;
        let jitter = self.spec.jitter.mul_f64(self.jitter_dice.random::<f64>());
        if lost {
            return Verdict::DropLoss;
        }
        Verdict::Depart { at: self.busy_until.after(self.spec.one_way_delay()).after(jitter) }
    }

    /// Puts another spec in force. Frames accepted so far keep their departure, and the line its backlog. A line that is
    /// cut stays cut.
    pub fn set(&mut self, spec: PathSpec) {
        self.spec = spec;
        self.period = BusyPeriod::beginning(self.busy_until);
    }

    /// Cuts the line and empties its queue. The caller must discard every frame that it holds for this direction.
    pub fn cut(&mut self) {
        self.line = Line::Cut;
        self.busy_until = Moment::ZERO;
    }

    /// Ends a cut: the line is idle, and takes frames that arrive from `now` on. Does nothing on a line that is up.
    pub fn restore(&mut self, now: Moment) {
        if self.line == Line::Cut {
            self.line = Line::Up { since: now };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use godwit_units::BitRate;
    use proptest::prelude::*;

    const FULL_FRAME: Bytes = Bytes(1538);

    fn spec() -> PathSpec {
        PathSpec {
            rate: BitRate::from_mbit(100.0),
            rtt: Duration::from_millis(20),
            jitter: Duration::ZERO,
            loss: 0.0,
            queue: Duration::from_millis(50),
        }
    }

    fn at_us(us: u64) -> Moment {
        Moment(Duration::from_micros(us))
    }

    fn departure(verdict: Verdict) -> Option<Moment> {
        match verdict {
            Verdict::Depart { at } => Some(at),
            _ => None,
        }
    }

    #[test]
    fn a_frame_on_an_idle_line_takes_its_own_time_and_half_the_round_trip() {
        let mut shaper = Shaper::new(spec(), 1);
        // 1538 bytes at 100 Mbit/s are 123.04 us.
        let at = Moment(Duration::from_nanos(5_000_000 + 123_040 + 10_000_000));
        assert_eq!(shaper.offer(at_us(5_000), FULL_FRAME), Verdict::Depart { at });
    }

    #[test]
    fn the_queue_refuses_exactly_what_would_wait_longer_than_it_allows() {
        // 1250 bytes are 100 us at 100 Mbit/s: after n frames the backlog is n * 100 us.
        let mut shaper = Shaper::new(PathSpec { queue: Duration::from_micros(1000), ..spec() }, 1);
        let accepted = (0..100).filter(|_| departure(shaper.offer(Moment::ZERO, Bytes(1250))).is_some()).count();
        assert_eq!(accepted, 11, "ten make a backlog of exactly 1000 us, which still admits one");
        assert_eq!(shaper.offer(Moment(Duration::from_nanos(99_999)), Bytes(1250)), Verdict::DropQueue);
        assert!(departure(shaper.offer(at_us(100), Bytes(1250))).is_some());
    }

    #[test]
    fn an_idle_line_accepts_one_super_frame_even_without_a_queue() {
        let slow = PathSpec { rate: BitRate(64_000), queue: Duration::ZERO, ..spec() };
        let mut shaper = Shaper::new(slow, 1);
        let first = departure(shaper.offer(Moment::ZERO, Bytes(69_000))).unwrap();
        assert_eq!(first, Moment(Duration::from_millis(8_625 + 10)));
        assert_eq!(shaper.offer(at_us(1), Bytes(84)), Verdict::DropQueue);
        assert!(departure(shaper.offer(at_us(8_625_000), Bytes(84))).is_some());
    }

    #[test]
    fn a_lost_packet_still_occupies_the_line() {
        let mut shaper = Shaper::new(PathSpec { loss: 1.0, ..spec() }, 1);
        assert_eq!(shaper.offer(Moment::ZERO, FULL_FRAME), Verdict::DropLoss);
        assert_eq!(shaper.backlog(Moment::ZERO), Duration::from_nanos(123_040));
    }

    #[test]
    fn the_loss_fraction_is_as_asked_and_repeats_with_the_seed() {
        const PACKETS: u32 = 100_000;
        let fates = |seed, jitter| -> Vec<bool> {
            let mut shaper = Shaper::new(PathSpec { loss: 0.05, jitter, queue: Duration::MAX, ..spec() }, seed);
            (0..PACKETS).map(|_| shaper.offer(Moment::ZERO, FULL_FRAME) == Verdict::DropLoss).collect()
        };
        let first = fates(7, Duration::ZERO);
        let lost = first.iter().filter(|&&lost| lost).count() as f64;
        let n = f64::from(PACKETS);
        let sigma = (n * 0.05 * 0.95).sqrt();
        assert!((lost - n * 0.05).abs() < 5.0 * sigma, "{lost} of {n}");
        // Independence: a loss is no likelier after a loss. Pairs are binomial too, nearly.
        let pairs = first.windows(2).filter(|pair| pair[0] && pair[1]).count() as f64;
        assert!((pairs - n * 0.0025).abs() < 5.0 * (n * 0.0025).sqrt(), "{pairs} pairs");
        assert_eq!(first, fates(7, Duration::ZERO));
        assert_eq!(first, fates(7, Duration::from_millis(3)), "jitter does not disturb the dice of loss");
        assert_ne!(first, fates(8, Duration::ZERO));
    }

    #[test]
    fn jitter_is_uniform_between_zero_and_its_bound_and_reorders() {
        let jitter = Duration::from_millis(4);
        let mut shaper = Shaper::new(PathSpec { jitter, queue: Duration::MAX, ..spec() }, 3);
        let extra: Vec<Duration> = (1..=20_000u32)
            .map(|n| {
                let at = departure(shaper.offer(Moment::ZERO, Bytes(1250))).unwrap();
                at.since(at_us(10_000 + 100 * u64::from(n)))
            })
            .collect();
        assert!(extra.iter().all(|&extra| extra <= jitter));
        let mean = extra.iter().map(Duration::as_secs_f64).sum::<f64>() / 20_000.0;
        let sigma_of_mean = 0.004 / 12f64.sqrt() / 20_000f64.sqrt();
        assert!((mean - 0.002).abs() < 5.0 * sigma_of_mean, "{mean}");
        assert!(
            extra.iter().any(|&extra| extra < jitter / 100) && extra.iter().any(|&extra| extra > jitter * 99 / 100)
        );
        assert!(extra.windows(2).any(|pair| pair[0] > pair[1] + Duration::from_micros(100)), "some overtake");
    }

    #[test]
    fn a_cut_drops_everything_until_the_moment_of_restoring() {
        let mut shaper = Shaper::new(spec(), 1);
        for _ in 0..100 {
            shaper.offer(Moment::ZERO, FULL_FRAME);
        }
        shaper.cut();
        assert_eq!(shaper.offer(at_us(10), FULL_FRAME), Verdict::DropCut);
        shaper.set(PathSpec { rtt: Duration::ZERO, ..spec() });
        assert_eq!(shaper.offer(at_us(20), FULL_FRAME), Verdict::DropCut, "a new spec does not end a cut");
        shaper.restore(at_us(100));
        assert_eq!(shaper.offer(at_us(99), FULL_FRAME), Verdict::DropCut, "read late, but arrived during the cut");
        assert_eq!(shaper.backlog(at_us(100)), Duration::ZERO, "the queue was lost with the cut");
        let at = Moment(Duration::from_nanos(100_000 + 123_040));
        assert_eq!(shaper.offer(at_us(100), FULL_FRAME), Verdict::Depart { at });
    }

    #[test]
    fn restoring_a_line_that_is_up_changes_nothing() {
        let mut shaper = Shaper::new(spec(), 1);
        shaper.restore(at_us(500));
        assert!(departure(shaper.offer(at_us(100), FULL_FRAME)).is_some());
    }

    #[test]
    fn a_new_rate_applies_after_the_backlog_of_the_old_one() {
        let mut shaper = Shaper::new(spec(), 1);
        let first = departure(shaper.offer(Moment::ZERO, Bytes(12_500))).unwrap();
        assert_eq!(first, at_us(1_000 + 10_000));
        shaper.set(PathSpec { rate: BitRate::from_mbit(10.0), ..spec() });
        let second = departure(shaper.offer(at_us(500), Bytes(1_250))).unwrap();
        assert_eq!(second, at_us(1_000 + 1_000 + 10_000), "1 ms of old backlog, then 1 ms for 1250 bytes at 10 Mbit/s");
    }

    #[test]
    fn a_shorter_delay_lets_later_frames_overtake() {
        let mut shaper = Shaper::new(spec(), 1);
        let first = departure(shaper.offer(Moment::ZERO, FULL_FRAME)).unwrap();
        shaper.set(PathSpec { rtt: Duration::ZERO, ..spec() });
        let second = departure(shaper.offer(at_us(200), FULL_FRAME)).unwrap();
        assert!(second < first);
    }

    fn any_spec() -> impl Strategy<Value = PathSpec> {
        (1_000u64..100_000_000_000, 0u64..500_000, 0u64..50_000, 0.0..=1.0, 0u64..200_000).prop_map(
            |(rate, rtt, jitter, loss, queue)| PathSpec {
                rate: BitRate(rate),
                rtt: Duration::from_micros(rtt),
                jitter: Duration::from_micros(jitter),
                loss,
                queue: Duration::from_micros(queue),
            },
        )
    }

    proptest! {
        #[test]
        fn over_a_busy_period_the_rate_is_exact(
            rate in 1_000u64..100_000_000_000,
            frames in prop::collection::vec(84u64..70_000, 1..400),
        ) {
            let spec = PathSpec { rate: BitRate(rate), rtt: Duration::ZERO, queue: Duration::MAX, ..spec() };
            let mut shaper = Shaper::new(spec, 1);
            let began = at_us(77);
            let mut last = began;
            for &frame in &frames {
                last = departure(shaper.offer(began, Bytes(frame))).unwrap();
            }
            let total = Bytes(frames.iter().sum());
            prop_assert_eq!(last.since(began), spec.rate.time_for(total));
        }

        #[test]
        fn no_window_carries_more_than_the_rate_allows(
            spec in any_spec(),
            offers in prop::collection::vec((0u64..2_000, 84u64..70_000), 1..300),
        ) {
            let spec = PathSpec { jitter: Duration::ZERO, loss: 0.0, ..spec };
            let mut shaper = Shaper::new(spec, 1);
            let mut now = Moment::ZERO;
            let mut departures = Vec::new();
            for (gap, frame) in offers {
                now = now.after(Duration::from_micros(gap));
                if let Some(at) = departure(shaper.offer(now, Bytes(frame))) {
                    departures.push((at, Bytes(frame)));
                }
            }
            // From the departure of frame i to that of frame j the line carried i+1 to j; one nanosecond for rounding.
            for i in 0..departures.len() {
                let mut carried = Bytes::ZERO;
                for &(at, frame) in &departures[i + 1..] {
                    carried += frame;
                    let window = at.since(departures[i].0) + Duration::from_nanos(1);
                    prop_assert!(spec.rate.time_for(carried) <= window);
                }
            }
        }

        #[test]
        fn every_departure_lies_within_delay_queue_and_jitter(
            spec in any_spec(),
            offers in prop::collection::vec((0u64..2_000, 84u64..70_000), 1..300),
        ) {
            let mut shaper = Shaper::new(spec, 9);
            let mut now = Moment::ZERO;
            for (gap, frame) in offers {
                now = now.after(Duration::from_micros(gap));
                let idle = shaper.backlog(now).is_zero();
                let full = shaper.backlog(now) > spec.queue;
                let verdict = shaper.offer(now, Bytes(frame));
                prop_assert_eq!(verdict == Verdict::DropQueue, full, "the queue drops when full, and only then");
                prop_assert!(!(idle && verdict == Verdict::DropQueue), "an idle line always accepts");
                if let Some(at) = departure(verdict) {
                    let least = spec.rate.time_for(Bytes(frame)).saturating_sub(Duration::from_nanos(1)) + spec.one_way_delay();
                    let most = spec.queue + spec.rate.time_for(Bytes(frame)) + spec.one_way_delay() + spec.jitter;
                    prop_assert!(at.since(now) >= least && at.since(now) <= most + Duration::from_nanos(1));
                }
            }
        }
    }
}
