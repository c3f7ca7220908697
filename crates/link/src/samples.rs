//! What each acknowledgement says of the round trip, beside QUIC's own congestion control.
//!
//! QUIC's estimate is an average: on a host with more work than processors a part of the answers come some milliseconds late, and the
//! average with them. So what gives way asks for a quantile of the last moments ([`Path::rtt`]): late answers do not move it while they
//! are fewer than most. The least would be steadier still, and blind: a TCP flow sends its window in clumps, so that in each round trip
//! a queue that costs it packets is empty for a moment.

use crate::Lane;
use crate::trains::{Shown, Trains};
use crate::windows::Windows;
use quinn::congestion::{Controller, ControllerFactory, ControllerMetrics, CubicConfig};
use std::any::Any;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// For so long round trips are kept, and so many: a quantile of more is no better.
const KEPT: Duration = Duration::from_secs(1);
const MOST: usize = 1024;
/// The moments that count, if there were enough answers in them; else the last ones before, too.
pub(crate) const MOMENTS: Duration = Duration::from_millis(80);
/// Enough.
pub(crate) const ENOUGH: usize = 10;
/// Which of them, by length: so much of them is shorter.
pub(crate) const QUANTILE: f64 = 0.4;

/// CUBIC's answer to a loss (RFC 9438): a window becomes so much of itself.
const BETA: f64 = 0.7;

/// A lane's path now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Path {
    /// What most round trips of the last moments exceed a little or are near; none where nothing was acknowledged for a second.
    pub rtt: Option<Duration>,
    /// The shortest since it was connected: what is left of a round trip when nothing waits for the link, unless the path is another one by now.
    pub least: Option<Duration>,
    /// Packets that were lost since it was connected.
    pub lost: u64,
    /// Bytes that were acknowledged since it was connected.
    pub acknowledged: u64,
    /// Bytes that may be on their way.
    pub window: u64,
    /// Which connection it is: another one has counted from nought.
    pub connection: usize,
}

/// The quantile of round trips.
pub(crate) fn quantile(rtts: &mut [Duration]) -> Option<Duration> {
    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "a thousand"
    )]
    let at = (rtts.len() as f64 * QUANTILE) as usize;
    (!rtts.is_empty()).then(|| *rtts.select_nth_unstable(at).1)
}

#[derive(Debug, Default)]
struct Inner {
    recent: VecDeque<(Instant, Duration)>,
    least: Option<Duration>,
    acknowledged: u64,
    window: u64,
    trains: Trains,
}

/// The round trips of a connection's last second.
#[derive(Debug, Default)]
pub struct Samples {
    inner: Mutex<Inner>,
    /// The session's, and which of its lanes this connection is.
    windows: OnceLock<(Arc<Windows>, Lane)>,
}

impl Samples {
    /// This connection is a lane of a session.
    pub fn join(&self, windows: &Arc<Windows>, lane: Lane) {
        if self.windows.set((Arc::clone(windows), lane)).is_ok() {
            windows.begin(lane);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A packet was acknowledged.
    fn put(&self, now: Instant, sent: Instant, bytes: u64, window: u64) {
        let rtt = now.saturating_duration_since(sent);
        let mut inner = self.lock();
        inner.acknowledged += bytes;
        inner.window = window;
        inner.least = Some(inner.least.map_or(rtt, |least| least.min(rtt)));
        inner.trains.put(now, sent, bytes);
        inner.recent.push_back((now, rtt));
        if inner.recent.len() > MOST {
            inner.recent.pop_front();
        }
    }

    /// What the link carries of this connection's packets, as far as those of the last second show it that were sent close together.
    pub fn shown(&self, now: Instant) -> Option<Shown> {
        self.lock().trains.shown(now)
    }

    /// How the path was in the last moments, by a connection that the caller names.
    pub fn path(&self, now: Instant, lost: u64) -> Path {
        let inner = self.lock();
        let age = |at: Instant| now.saturating_duration_since(at);
        let recent = inner.recent.iter().rev().take_while(|(at, _)| age(*at) <= KEPT);
        let mut rtts: Vec<Duration> = recent
            .enumerate()
            .take_while(|(n, (at, _))| *n < ENOUGH || age(*at) <= MOMENTS)
            .map(|(_, (_, rtt))| *rtt)
            .collect();
        Path {
            rtt: quantile(&mut rtts),
            least: inner.least,
            lost,
            acknowledged: inner.acknowledged,
            window: inner.window,
            ..Path::default()
        }
    }
}

/// Makes CUBIC controllers that take samples, and that begin with so many bytes.
pub struct Sampling {
    pub initial_window: u64,
}

impl ControllerFactory for Sampling {
    fn build(self: Arc<Self>, now: Instant, mtu: u16) -> Box<dyn Controller> {
        let initial = self.initial_window;
        Box::new(Sampled { cubic: cubic(initial, now, mtu), initial, mtu, samples: Arc::default() })
    }
}

fn cubic(window: u64, now: Instant, mtu: u16) -> Box<dyn Controller> {
    let mut config = CubicConfig::default();
    config.initial_window(window);
    Arc::new(config).build(now, mtu)
}

/// CUBIC, what it hears of round trips, and the session's other lanes.
pub struct Sampled {
    cubic: Box<dyn Controller>,
    initial: u64,
    mtu: u16,
    samples: Arc<Samples>,
}

impl Sampled {
    /// The samples of a connection.
    pub fn of(connection: &quinn::Connection) -> Option<Arc<Samples>> {
        connection.congestion_state().into_any().downcast::<Self>().ok().map(|sampled| sampled.samples)
    }

    /// Goes on with a window that this path has carried moments ago: as after a loss that cut a larger one down to it, so that it grows as
    /// CUBIC's windows do near what was too much, not as at a connection's beginning.
    fn go_on_with(&mut self, window: u64, now: Instant) {
        #[allow(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            clippy::cast_precision_loss,
            reason = "a window is some megabytes"
        )]
        let before = (window as f64 / BETA) as u64;
        self.cubic = cubic(before, now, self.mtu);
        self.cubic.on_congestion_event(now, now, false, 0);
    }
}

impl Controller for Sampled {
    fn on_sent(&mut self, now: Instant, bytes: u64, last_packet_number: u64) {
        if let Some(left) = self.samples.windows.get().and_then(|(windows, lane)| windows.left(*lane)) {
            self.cubic = cubic(left.max(self.initial), now, self.mtu);
        }
        self.cubic.on_sent(now, bytes, last_packet_number);
    }

    fn on_ack(&mut self, now: Instant, sent: Instant, bytes: u64, app_limited: bool, rtt: &quinn_proto::RttEstimator) {
        self.cubic.on_ack(now, sent, bytes, app_limited, rtt);
        if !app_limited
            && let Some((windows, lane)) = self.samples.windows.get()
            && let Some(taken) = windows.busy(*lane, self.cubic.window(), rtt.get(), now)
        {
            self.go_on_with(taken, now);
        }
        self.samples.put(now, sent, bytes, self.cubic.window());
    }

    fn on_end_acks(&mut self, now: Instant, in_flight: u64, app_limited: bool, largest: Option<u64>) {
        self.cubic.on_end_acks(now, in_flight, app_limited, largest);
    }

    fn on_congestion_event(&mut self, now: Instant, sent: Instant, persistent: bool, lost: u64) {
        self.cubic.on_congestion_event(now, sent, persistent, lost);
        if let Some((windows, lane)) = self.samples.windows.get() {
            windows.cut(*lane, self.cubic.window());
        }
    }

    fn on_mtu_update(&mut self, mtu: u16) {
        self.mtu = mtu;
        self.cubic.on_mtu_update(mtu);
    }

    fn window(&self) -> u64 {
        self.cubic.window()
    }

    fn metrics(&self) -> ControllerMetrics {
        self.cubic.metrics()
    }

    fn clone_box(&self) -> Box<dyn Controller> {
        Box::new(Self { cubic: self.cubic.clone_box(), samples: Arc::clone(&self.samples), ..*self })
    }

    fn initial_window(&self) -> u64 {
        self.initial
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn late_answers_do_not_move_what_is_seen_while_they_are_not_most() {
        let (samples, began) = (Samples::default(), Instant::now());
        let at = |ms: u64| began + Duration::from_millis(ms);
        let ms = Duration::from_millis;
        let seen = |now: u64| samples.path(at(now), 3).rtt;
        assert_eq!(seen(0), None);
        for n in 0..100 {
            samples.put(at(n * 2), at(n * 2) - ms(if n % 2 == 0 { 40 } else { 70 }), 1000, 7);
        }
        assert_eq!(seen(200), Some(ms(40)));
        // A queue makes all of them late, and is seen when the moments before it are over.
        for n in 100..160 {
            samples.put(at(n * 2), at(n * 2) - ms(50), 1000, 7);
        }
        assert_eq!(seen(320), Some(ms(50)));
        // Of few answers older ones count, too; of those of long ago none.
        samples.put(at(900), at(900) - ms(90), 1000, 7);
        assert_eq!(seen(900), Some(ms(50)));
        let path = Path { least: Some(ms(40)), lost: 3, acknowledged: 161_000, window: 7, ..Path::default() };
        assert_eq!(samples.path(at(2000), 3), path);
    }
}
