//! When the next bytes of what gives way may go: by the rate of a [`Scavenger`], a few milliseconds' worth at once.
//!
//! At a low rate a few milliseconds' worth is a packet or two, and each piece wakes threads at both ends and is acknowledged by itself.
//! Where the rate is low because there is no more to
//! send, and not because the path carries no more, larger pieces make no queue either. Which of them it is no one says, so it is tried:
//! pieces grow while nothing is a sign of a queue ([`Pieces`]), and a sign makes them small again.

use crate::samples::Path;
use crate::scavenger::{self, LEAST_SIGNAL, QUIET, Scavenger};
use godwit_units::BitRate;
use std::time::{Duration, Instant};

/// What leaves at once is what the rate carries in this time: as fine as a timer is.
const PIECE: Duration = Duration::from_millis(4);
/// At least and at most so much of it, bytes. At least two packets: the second has the first one's acknowledgement sent at once.
const PIECES: (usize, usize) = (2800, 128 << 10);
/// What pieces grow to, bytes: 2.6 ms of 50 Mbit/s.
const LARGEST: usize = 16 << 10;
/// So many pieces of a size have gone, for at least so long, before twice as much is tried.
const TRIED: (u32, Duration) = (8, Duration::from_secs(1));
/// After a sign pieces are small for as long, and only half of what they were for as long.
const SMALL: (Duration, Duration) = (QUIET, Duration::from_secs(60));

/// What arrives is counted over this: longer than most round trips.
const ARRIVALS: Duration = Duration::from_millis(200);
/// The part of the rate that has to arrive for the rate to grow: it grows while a round trip is under way.
const USED: f64 = 0.7;

/// How much goes at once, whatever the rate. No clock: time comes in.
#[derive(Debug)]
struct Pieces {
    size: usize,
    /// Of this size have gone.
    gone: u32,
    /// When the next size may be tried, and what it may be until then.
    next: Duration,
    most: (usize, Duration),
    /// The last sign that was seen.
    sign: Duration,
}

impl Pieces {
    const fn new() -> Self {
        Self { size: PIECES.0, gone: 0, next: TRIED.1, most: (LARGEST, Duration::ZERO), sign: Duration::ZERO }
    }

    fn sent(&mut self, bytes: usize) {
        self.gone += u32::from(bytes >= self.size);
    }

    /// `sign`: when a queue was last seen.
    fn looked(&mut self, now: Duration, sign: Duration) {
        if sign > self.sign {
            // Perhaps it was this.
            if self.size > PIECES.0 {
                self.most = ((self.size / 2).max(PIECES.0), now + SMALL.1);
            }
            *self = Self { next: now + SMALL.0, most: self.most, sign, ..Self::new() };
        } else if now >= self.next && self.gone >= TRIED.0 {
            let most = if now < self.most.1 { self.most.0 } else { LARGEST };
            (self.size, self.gone, self.next) = ((self.size * 2).min(most), 0, now + TRIED.1);
        }
    }
}

/// When a queue was last seen. The scavenger overlooks what is little beside the queues that the path has shown; a piece that waits as long for
/// itself is too large on any path.
fn sign(scavenger: &Scavenger, now: Duration, rtt: Option<Duration>) -> Duration {
    if rtt.is_some_and(|rtt| scavenger.queue(rtt) > LEAST_SIGNAL) { now } else { scavenger.last_sign() }
}

/// See above.
#[derive(Debug)]
pub struct Pace {
    scavenger: Scavenger,
    pieces: Pieces,
    began: Instant,
    next: tokio::time::Instant,
    /// Bytes since then, for the figure.
    window: (Instant, u64),
    rate: BitRate,
    /// Bytes that had been acknowledged then, and bits a second that were lately.
    acknowledged: (Instant, u64),
    arrives: f64,
}

impl Default for Pace {
    fn default() -> Self {
        Self::new()
    }
}

impl Pace {
    /// Begins at the least rate.
    #[must_use]
    pub fn new() -> Self {
        let now = Instant::now();
        Self {
            scavenger: Scavenger::new(scavenger::Config::default()),
            pieces: Pieces::new(),
            began: now,
            next: now.into(),
            window: (now, 0),
            rate: BitRate(0),
            acknowledged: (now, 0),
            arrives: 0.0,
        }
    }

    /// What goes at once, bytes.
    #[must_use]
    pub fn piece(&self) -> usize {
        let bytes = self.scavenger.rate().bytes_in(PIECE).0;
        usize::try_from(bytes).unwrap_or(0).clamp(self.pieces.size, PIECES.1)
    }

    /// Waits until the next piece may go.
    pub async fn ready(&self) {
        tokio::time::sleep_until(self.next).await;
    }

    /// So many bytes have gone.
    pub fn sent(&mut self, bytes: usize) {
        let rate = self.scavenger.rate().0.max(1);
        let took = Duration::from_secs_f64(bytes as f64 * 8.0 / rate as f64);
        self.next = self.next.max(tokio::time::Instant::now()) + took;
        self.window.1 += bytes as u64;
        self.pieces.sent(bytes);
    }

    /// The path was measured, as [`crate::Session::path`] says. `busy`: something waits for its turn.
    pub fn measured(&mut self, path: Path, most: Option<BitRate>, busy: bool) {
        self.scavenger.set_most(most);
        let passed = self.acknowledged.0.elapsed();
        if passed >= ARRIVALS {
            // After a new connection it counts from nought again.
            let bytes = path.acknowledged.saturating_sub(self.acknowledged.1);
            self.arrives = bytes as f64 * 8.0 / passed.as_secs_f64();
            self.acknowledged = (Instant::now(), path.acknowledged);
        }
        // QUIC's own window may hold it back: what does not arrive is no reason to send more, and a cut of what is not used cuts nothing.
        let used = self.arrives > self.scavenger.rate().0 as f64 * USED;
        let now = self.began.elapsed();
        self.scavenger.measured(now, path.rtt, path.lost, busy && used);
        self.pieces.looked(now, sign(&self.scavenger, now, path.rtt));
        let passed = self.window.0.elapsed();
        if passed > Duration::from_secs(1) {
            self.rate = BitRate((self.window.1 as f64 * 8.0 / passed.as_secs_f64()) as u64);
            self.window = (Instant::now(), 0);
        }
    }

    /// How fast bytes have gone lately.
    #[must_use]
    pub const fn carried(&self) -> BitRate {
        self.rate
    }

    /// How fast they may go now.
    #[must_use]
    pub fn allowed(&self) -> BitRate {
        self.scavenger.rate()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    /// A second of pieces as large as they may be, so many.
    fn second(pieces: &mut Pieces, now: u64, many: u32, sign: Duration) -> usize {
        (0..many).for_each(|_| pieces.sent(pieces.size));
        pieces.looked(s(now), sign);
        pieces.size
    }

    #[test]
    fn a_piece_that_waits_for_itself_is_a_sign_however_long_the_paths_queues_were() {
        let mut scavenger = Scavenger::new(scavenger::Config::default());
        let ms = Duration::from_millis;
        let mut now = Duration::ZERO;
        for (rtt, ticks) in [(50, 100), (300, 40), (50, 400)] {
            for _ in 0..ticks {
                now += ms(50);
                scavenger.measured(now, Some(ms(rtt)), 0, true);
            }
        }
        let last = scavenger.last_sign();
        assert!(last < now, "the queue is gone");
        // Little beside 250 ms, for the scavenger; the fifth of twelve packets at 3 Mbit/s.
        now += ms(50);
        scavenger.measured(now, Some(ms(69)), 0, true);
        assert_eq!(scavenger.last_sign(), last);
        assert_eq!(sign(&scavenger, now, Some(ms(69))), now);
        assert_eq!(sign(&scavenger, now, Some(ms(51))), last);
    }

    #[test]
    fn pieces_grow_while_they_go_and_make_no_queue_and_no_further_than_they_may() {
        let mut pieces = Pieces::new();
        let sizes: Vec<usize> = (1..=6).map(|now| second(&mut pieces, now, 8, s(0))).collect();
        assert_eq!(sizes, [5600, 11_200, LARGEST, LARGEST, LARGEST, LARGEST]);
        // Who sends little, or less than a piece, has tried nothing.
        let mut pieces = Pieces::new();
        assert_eq!(second(&mut pieces, 1, 7, s(0)), PIECES.0);
        (0..100).for_each(|_| pieces.sent(PIECES.0 - 1));
        pieces.looked(s(2), s(0));
        assert_eq!(pieces.size, PIECES.0);
        assert_eq!(second(&mut pieces, 3, 1, s(0)), 2 * PIECES.0);
    }

    #[test]
    fn a_sign_makes_them_small_and_half_of_what_made_it_is_the_most_for_a_minute() {
        let mut pieces = Pieces::new();
        (1..=3).for_each(|now| _ = second(&mut pieces, now, 8, s(0)));
        assert_eq!(pieces.size, LARGEST);
        assert_eq!(second(&mut pieces, 4, 100, s(4)), PIECES.0);
        let sizes: Vec<usize> = (5..64).map(|now| second(&mut pieces, now, 8, s(4))).collect();
        assert_eq!(sizes[..5], [PIECES.0; 5], "for six seconds after it");
        assert_eq!(*sizes.iter().max().unwrap(), LARGEST / 2);
        assert_eq!(second(&mut pieces, 64, 8, s(4)), LARGEST);
        // One that comes while they are small says nothing of them.
        assert_eq!(second(&mut pieces, 65, 8, s(65)), PIECES.0);
        assert_eq!(second(&mut pieces, 66, 8, s(66)), PIECES.0);
        assert_eq!(pieces.most.0, LARGEST / 2);
    }

    #[test]
    fn a_fast_rate_has_its_milliseconds_and_a_slow_one_what_is_tried() {
        let mut pace = Pace::new();
        assert_eq!(pace.piece(), PIECES.0);
        pace.pieces.size = LARGEST;
        assert_eq!(pace.piece(), LARGEST);
        pace.scavenger =
            Scavenger::new(scavenger::Config { least: BitRate(100_000_000), ..scavenger::Config::default() });
        assert_eq!(pace.piece(), 50_000);
    }
}
