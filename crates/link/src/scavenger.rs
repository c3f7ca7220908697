//! A rate for what must give way to everybody: pre-caching beside other people's flows.
//!
//! LEDBAT's idea (RFC 6817): a queue that grows is a sign that somebody else wants the path, long before anything is lost. What
//! is measured is what most round trips of the last moments took ([`crate::Path`]), over the least that this was in the last minutes. Unlike LEDBAT this is a rate and not a
//! window, because a window of one packet a round trip is much on a short path; and the delay that it stands depends on the
//! queue that it has seen, because a router that holds 10 ms never shows the 25 ms of LEDBAT's target: there LEDBAT is as bold as
//! TCP.
//!
//! # What can go wrong
//!
//! *The path gets longer*: the least round trip is one of the last [`HISTORY`] minutes, so a new path looks busy for that
//! long. *The host trembles*: where most round trips of some moments change by more than [`LEAST_SIGNAL`] without a queue, the rate is cut
//! in vain, and comes back soon to half of what it was. Both cost the pre-cache time and nobody else anything. (To wait for a second sign
//! helped it on such hosts, and cost TCP flows on paths with small queues more than they may lose.)
//!
//! *It sees its own queue*: one cut drains that, and it goes on from [`KEPT`] of what it was. Where the queue stays, somebody else makes it; and
//! also where it comes back while less is sent than made it before ([`OWN`]), or where packets are lost in it, since a rate that grows this
//! slowly is cut long before. Then the rate falls to the least and waits, twice as long each time that the others are still there. (To give
//! way by little and little instead cost a flow that begins beside it a tenth of its first 20 s, on a path whose queue holds 10 ms.)
//!
//! *QUIC's own window holds it back*: a rate that is not used would grow past what the path carries, and a cut of it cut nothing: it
//! would be one more TCP flow. So it grows only while what was acknowledged says that it is used ([`crate::pace`]).
//!
//! No clock: time is a [`Duration`] since any fixed moment, and comes in with every call.

use godwit_units::BitRate;
use std::collections::VecDeque;
use std::time::Duration;

/// Minutes of which the least round trip counts, as in RFC 6817.
pub const HISTORY: usize = 10;
/// A queue below this is never a sign: what schedulers and acknowledgements make of a round trip.
pub const LEAST_SIGNAL: Duration = Duration::from_millis(2);
/// Two cuts lie so far apart at least, or a round trip and the moments of a sample.
const CUT: Duration = Duration::from_millis(100);
/// The part of a rate that made a queue, and was cut for it, below which it does not make the next one, for as long.
const OWN: (f64, Duration) = (0.9, Duration::from_secs(30));
/// Cuts in a row after which the queue is somebody else's.
const STRIKES: u32 = 3;
/// What is kept of the rate where a cut has drained the queue: it was little more than the path carries.
const KEPT: f64 = 0.7;
/// The first and the longest wait at the least rate.
const WAITS: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(16));
/// Others that are not seen for so long after a wait were gone: the next wait is a first one.
const STAY: Duration = Duration::from_secs(3);
/// The quiet after which the last sign tells little of what the path carries now, where it carries more than it did then.
pub(crate) const QUIET: Duration = Duration::from_secs(6);
/// The quiet after which others count as gone.
const GONE: Duration = Duration::from_secs(20);
/// How the rate grows, a second: where nothing is known of what the path carries; near what it carried at the last sign.
const GROWTH: (f64, f64) = (1.0, 0.1);
/// The minute of a history.
const MINUTE: Duration = Duration::from_secs(60);

/// What can be set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// The queue that it may make on a path with large ones.
    pub target: Duration,
    /// What it never falls below: so that it learns when the others are gone.
    pub least: BitRate,
    /// What it never exceeds.
    pub most: Option<BitRate>,
}

impl Default for Config {
    fn default() -> Self {
        Self { target: Duration::from_millis(25), least: BitRate(256_000), most: None }
    }
}

/// The controller.
#[derive(Debug)]
pub struct Scavenger {
    config: Config,
    rate: f64,
    /// The least round trip of each of the last minutes.
    least: VecDeque<(u64, Duration)>,
    /// The longest queue that was seen, slowly forgotten.
    longest: f64,
    lost: u64,
    strikes: u32,
    seen_others: bool,
    cut: Option<Duration>,
    /// Whether the last look saw a queue: one that two looks see is no tremble.
    queued: bool,
    /// The rate at the last cut for a queue that has not drained since.
    draining: Option<f64>,
    /// When a cut last drained a queue, and the rate that had made it.
    own: Option<(Duration, f64)>,
    /// The rate when the last trouble began: half of it is probably free when that is over.
    proven: f64,
    /// When a sign was last seen.
    sign: Duration,
    wait: Duration,
    until: Duration,
    at: Duration,
}

impl Scavenger {
    /// Begins at the least rate.
    #[must_use]
    pub fn new(config: Config) -> Self {
        Self {
            config,
            rate: float(config.least),
            least: VecDeque::new(),
            longest: 0.0,
            lost: 0,
            strikes: 0,
            seen_others: false,
            cut: None,
            queued: false,
            draining: None,
            own: None,
            proven: 0.0,
            sign: Duration::ZERO,
            wait: WAITS.0,
            until: Duration::ZERO,
            at: Duration::ZERO,
        }
    }

    /// The rate now.
    #[must_use]
    pub fn rate(&self) -> BitRate {
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "bounded by what a link carries")]
        let rate = BitRate(self.rate as u64);
        self.config.most.map_or(rate, |most| rate.min(most))
    }

    /// When it last saw a sign of others, or of its own queue; zero: never.
    #[must_use]
    pub const fn last_sign(&self) -> Duration {
        self.sign
    }

    /// How long the queue is that it sees.
    #[must_use]
    pub fn queue(&self, rtt: Duration) -> Duration {
        rtt.saturating_sub(self.least.iter().map(|(_, least)| *least).min().unwrap_or(rtt))
    }

    /// The path was measured: the round trip of the last moments (none: nothing is known), and packets that were lost so far. `busy`:
    /// whether as much is sent as may be; a rate that is not used does not grow.
    pub fn measured(&mut self, now: Duration, rtt: Option<Duration>, lost: u64, busy: bool) {
        let passed = now.saturating_sub(self.at).min(Duration::from_secs(1)).as_secs_f64();
        self.at = now;
        let lost = std::mem::replace(&mut self.lost, lost) < lost;
        let Some(rtt) = rtt else {
            if lost {
                self.signed(now, CUT, true, false);
            }
            return;
        };
        let minute = now.as_secs() / MINUTE.as_secs();
        match self.least.back_mut() {
            Some((m, least)) if *m == minute => *least = rtt.min(*least),
            _ => self.least.push_back((minute, rtt)),
        }
        if self.least.len() > HISTORY {
            self.least.pop_front();
        }
        let queue = self.queue(rtt).as_secs_f64();
        // Forgotten by a half in about two minutes.
        self.longest = queue.max(self.longest * (1.0 - passed / 180.0));
        let signal = (self.longest / 4.0).clamp(LEAST_SIGNAL.as_secs_f64(), self.config.target.as_secs_f64());
        let queued = queue > signal;
        let stays = std::mem::replace(&mut self.queued, queued) && queued;
        if queued || lost {
            self.signed(now, rtt, lost, stays);
        } else if now >= self.until {
            self.grow(now, rtt, passed, busy);
        }
    }

    fn grow(&mut self, now: Duration, rtt: Duration, passed: f64, busy: bool) {
        let quiet = now.saturating_sub(self.sign);
        if quiet > GONE {
            (self.wait, self.strikes) = (WAITS.0, 0);
        } else if quiet > rtt + CUT {
            self.strikes = 0;
        }
        if let Some(before) = self.draining.take() {
            self.rate = self.rate.max(before * KEPT);
            self.own = Some((now, before));
        }
        if busy {
            let beyond = quiet > QUIET && self.rate > self.proven;
            let unknown = !self.seen_others || beyond || self.rate < self.proven / 2.0;
            let growth = if unknown { GROWTH.0 } else { GROWTH.1 };
            self.rate *= 1.0 + growth * passed;
        }
        let most = self.config.most.map_or(1e12, float);
        self.rate = self.rate.clamp(float(self.config.least).min(most), most);
    }

    fn signed(&mut self, now: Duration, rtt: Duration, lost: bool, stays: bool) {
        self.sign = now;
        self.seen_others = true;
        let strikes = self.strikes;
        if strikes == 0 {
            self.proven = self.rate;
        }
        let less = self.own.is_some_and(|(at, rate)| now.saturating_sub(at) < OWN.1 && self.proven < rate * OWN.0);
        if stays && (less || lost) && strikes < STRIKES {
            self.strikes = STRIKES;
        } else if self.cut.is_some_and(|cut| now.saturating_sub(cut) < rtt + CUT) {
            return;
        } else {
            self.strikes += 1;
        }
        self.cut = Some(now);
        if self.strikes < STRIKES {
            // What was lost is lost whether the queue drains or not.
            self.draining = (self.strikes == 1 && !lost).then_some(self.rate);
            self.rate *= 0.5;
        } else {
            self.draining = None;
            self.rate = 0.0;
            if now >= self.until {
                if now.saturating_sub(self.until) > STAY {
                    self.wait = WAITS.0;
                }
                self.until = now + self.wait;
                self.wait = (self.wait * 2).min(WAITS.1);
            }
        }
        self.rate = self.rate.max(float(self.config.least));
    }
}

#[allow(clippy::cast_precision_loss, reason = "a rate has fewer than 2^52 bits a second")]
fn float(rate: BitRate) -> f64 {
    rate.0 as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::samples::{ENOUGH, MOMENTS, quantile};
    use rand::rngs::SmallRng;
    use rand::{Rng, SeedableRng};

    const CAPACITY: f64 = 100e6;
    const PACKET: f64 = 12_000.0;

    /// A path with a queue that drops what does not fit, by the millisecond, as a fluid; one TCP flow of CUBIC (RFC 9438), and a scavenger.
    struct Path {
        base: f64,
        queue_most: f64,
        queue: f64,
        /// CUBIC: window in packets, its last maximum, seconds since the last loss, and when it may cut again.
        window: f64,
        maximum: f64,
        since: f64,
        quiet: f64,
        slow_start: bool,
        /// What the scavenger's connection sees a round trip later; and what its answers said in the last moments.
        seen: VecDeque<(f64, u64)>,
        answers: VecDeque<(f64, f64)>,
        due: f64,
        /// How late answers come on a busy host, at the most, and how many of them.
        tremble: (f64, f64),
        dice: SmallRng,
        drops: u64,
        /// When the TCP flow begins.
        tcp_from: f64,
    }

    struct Outcome {
        tcp: f64,
        scavenger: f64,
        longest: f64,
    }

    impl Path {
        fn new(base_ms: f64, queue_ms: f64) -> Self {
            Self {
                base: base_ms / 1e3,
                queue_most: queue_ms / 1e3,
                queue: 0.0,
                window: 10.0,
                maximum: 0.0,
                since: 0.0,
                quiet: 0.0,
                slow_start: true,
                seen: VecDeque::new(),
                answers: VecDeque::new(),
                due: 0.0,
                tremble: (0.0, 0.0),
                dice: SmallRng::seed_from_u64(7),
                drops: 0,
                tcp_from: 0.0,
            }
        }

        /// Bits a second of both, over the last `seconds` less the first `warm`.
        fn run(&mut self, tcp: bool, scavenger: bool, seconds: f64, warm: f64) -> Outcome {
            let mut control = Scavenger::new(Config::default());
            let (dt, mut at) = (1e-3, 0.0);
            let (mut of_tcp, mut of_scavenger, mut longest) = (0.0, 0.0, 0.0_f64);
            while at < seconds {
                at += dt;
                let rtt = self.base + self.queue;
                let tcp = tcp && at >= self.tcp_from;
                let a = if tcp { self.window * PACKET / rtt } else { 0.0 };
                let b = if scavenger { control.rate().0 as f64 } else { 0.0 };
                let sum = a + b;
                self.queue = (self.queue + (sum - CAPACITY) / CAPACITY * dt).max(0.0);
                let carried = if sum > CAPACITY || self.queue > 0.0 { CAPACITY.min(sum.max(CAPACITY)) } else { sum };
                if at > warm && sum > 0.0 {
                    of_tcp += carried * a / sum * dt;
                    of_scavenger += carried * b / sum * dt;
                    longest = longest.max(self.queue);
                }
                self.since += dt;
                self.quiet -= dt;
                let full = self.queue > self.queue_most;
                if full {
                    self.queue = self.queue_most;
                    // Whose packets are dropped is a matter of share.
                    self.drops += u64::from(b * 20.0 > sum);
                }
                if tcp {
                    if full && self.quiet <= 0.0 {
                        self.maximum = self.window;
                        self.window *= 0.7;
                        (self.since, self.quiet, self.slow_start) = (0.0, rtt, false);
                    } else if self.slow_start {
                        self.window += self.window * dt / rtt;
                    } else if self.quiet <= 0.0 {
                        let k = (self.maximum * 0.3 / 0.4).cbrt();
                        let cubic = 0.4 * (self.since - k).powi(3) + self.maximum;
                        let reno = self.maximum * 0.7 + 0.53 * self.since / rtt;
                        self.window = self.window.max(cubic.max(reno).min(self.window * (1.0 + 0.5 * dt / rtt)));
                    }
                }
                // What the connection measures now left a round trip ago: an answer for each two packets, looked at as `crate::samples` does.
                self.seen.push_back((rtt, self.drops));
                let late = (self.base * 1e3) as usize;
                if self.seen.len() > late.max(1) {
                    let (sample, drops) = self.seen.pop_front().unwrap();
                    self.due += b / PACKET / 2.0 * dt;
                    while self.due >= 1.0 {
                        self.due -= 1.0;
                        let held_up = self.dice.random_bool(self.tremble.1);
                        let more = if held_up { self.dice.random_range(0.0..self.tremble.0) } else { 0.0 };
                        self.answers.push_back((at, sample + more));
                    }
                    while self.answers.front().is_some_and(|(when, _)| at - when > 1.0) {
                        self.answers.pop_front();
                    }
                    if ((at * 1e3) as u64).is_multiple_of(50) {
                        let now = Duration::from_secs_f64(at);
                        let mut rtts: Vec<Duration> = self
                            .answers
                            .iter()
                            .rev()
                            .enumerate()
                            .take_while(|(n, (when, _))| *n < ENOUGH || at - when <= MOMENTS.as_secs_f64())
                            .map(|(_, (_, rtt))| Duration::from_secs_f64(*rtt))
                            .collect();
                        control.measured(now, quantile(&mut rtts), drops, true);
                    }
                }
            }
            let over = seconds - warm;
            Outcome { tcp: of_tcp / over, scavenger: of_scavenger / over, longest }
        }
    }

    /// Of what a flow has alone on a path, this is left of it beside the scavenger.
    fn share(base_ms: f64, queue_ms: f64, alone: &Outcome, beside: &Outcome) -> f64 {
        let share = beside.tcp / alone.tcp;
        println!(
            "{base_ms} ms, queue {queue_ms} ms: TCP alone {:.1} Mbit/s, beside {:.1} ({:.1} %), scavenger {:.2}",
            alone.tcp / 1e6,
            beside.tcp / 1e6,
            share * 100.0,
            beside.scavenger / 1e6
        );
        share
    }

    #[test]
    fn a_tcp_flow_beside_it_keeps_95_percent_of_what_it_has_alone_whatever_the_queue() {
        for base_ms in [10.0, 40.0, 100.0] {
            for queue_ms in [10.0, 50.0, 200.0] {
                let alone = Path::new(base_ms, queue_ms).run(true, false, 240.0, 10.0);
                let beside = Path::new(base_ms, queue_ms).run(true, true, 240.0, 10.0);
                let share = share(base_ms, queue_ms, &alone, &beside);
                assert!(share >= 0.95, "{share}");
            }
        }
    }

    #[test]
    fn a_tcp_flow_that_begins_beside_it_has_the_path_within_seconds() {
        for base_ms in [10.0, 40.0, 100.0] {
            for queue_ms in [10.0, 50.0, 200.0] {
                let begins = |scavenger| {
                    let mut path = Path::new(base_ms, queue_ms);
                    path.tcp_from = 60.0;
                    path.run(true, scavenger, 90.0, 60.0)
                };
                let (alone, beside) = (begins(false), begins(true));
                let share = share(base_ms, queue_ms, &alone, &beside);
                // What is left of its rate while the flow's first 30 s pass, and most of that in the first one.
                assert!(beside.scavenger < 0.15 * CAPACITY, "{}", beside.scavenger);
                // A queue of 10 ms on a longer path overflows before a round trip tells of it: what the flow loses in its slow start
                // costs it more than what is sent beside it afterwards.
                assert!(share >= 0.95 || (queue_ms < 20.0 && base_ms > 20.0), "{share}");
            }
        }
    }

    #[test]
    fn on_a_path_of_its_own_it_uses_most_of_it_and_makes_little_queue() {
        for (base_ms, queue_ms) in [(10.0, 10.0), (40.0, 200.0), (100.0, 50.0)] {
            let mut path = Path::new(base_ms, queue_ms);
            let alone = path.run(false, true, 240.0, 60.0);
            println!(
                "{base_ms} ms, queue {queue_ms} ms: {:.1} Mbit/s, queue {:.1} ms at most",
                alone.scavenger / 1e6,
                alone.longest * 1e3
            );
            assert!(alone.scavenger > 0.5 * CAPACITY, "{}", alone.scavenger);
            assert!(alone.longest < 0.060, "{}", alone.longest);
        }
    }

    #[test]
    fn where_answers_tremble_it_still_uses_most_of_a_path_of_its_own() {
        for (base_ms, most_ms, part) in [(10.0, 20.0, 0.3), (40.0, 10.0, 0.3), (40.0, 50.0, 0.3)] {
            let mut path = Path::new(base_ms, 50.0);
            path.tremble = (most_ms / 1e3, part);
            let alone = path.run(false, true, 240.0, 60.0);
            println!("{base_ms} ms, {part} of all answers late: {:.1} Mbit/s", alone.scavenger / 1e6);
            assert!(alone.scavenger > 0.5 * CAPACITY, "{}", alone.scavenger);
        }
    }

    #[test]
    fn it_keeps_to_its_limit_and_comes_back_when_the_others_are_gone() {
        let most = Some(BitRate(2_000_000));
        let mut control = Scavenger::new(Config { most, ..Config::default() });
        let at = |ms: u64| Duration::from_millis(ms);
        let mut now = 0;
        let mut run = |control: &mut Scavenger, rtt: u64, for_ms: u64| {
            for _ in 0..for_ms / 20 {
                now += 20;
                control.measured(at(now), Some(at(rtt)), 0, true);
            }
        };
        run(&mut control, 40, 10_000);
        assert_eq!(control.rate(), BitRate(2_000_000));
        run(&mut control, 80, 10_000);
        assert_eq!(control.rate(), Config::default().least);
        run(&mut control, 40, 60_000);
        assert_eq!(control.rate(), BitRate(2_000_000));
        // A loss is a sign, too; an unused rate does not grow.
        control.measured(at(200_000), Some(at(40)), 1, true);
        assert_eq!(control.rate(), BitRate(1_000_000));
        for n in 0..100 {
            control.measured(at(210_000 + n * 100), Some(at(40)), 1, false);
        }
        assert_eq!(control.rate(), BitRate(1_000_000));
    }
}
