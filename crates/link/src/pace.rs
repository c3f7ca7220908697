//! When the next bytes of what gives way may go: by the rate of a [`Scavenger`], a few milliseconds' worth at once.

use crate::samples::Path;
use crate::scavenger::{self, Scavenger};
use godwit_units::BitRate;
use std::time::{Duration, Instant};

/// What leaves at once is what the rate carries in this time: as fine as a timer is.
const PIECE: Duration = Duration::from_millis(4);
/// At least and at most so much of it, bytes. At least two packets: the second has the first one's acknowledgement sent at once.
const PIECES: (usize, usize) = (2800, 128 << 10);

/// What arrives is counted over this: longer than most round trips.
const ARRIVALS: Duration = Duration::from_millis(200);
/// The part of the rate that has to arrive for the rate to grow: it grows while a round trip is under way.
const USED: f64 = 0.7;

/// See above.
#[derive(Debug)]
pub struct Pace {
    scavenger: Scavenger,
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
        usize::try_from(bytes).unwrap_or(0).clamp(PIECES.0, PIECES.1)
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
        self.scavenger.measured(self.began.elapsed(), path.rtt, path.lost, busy && used);
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
