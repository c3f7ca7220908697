//! What each acknowledgement says of the round trip, beside QUIC's own congestion control.
//!
//! QUIC's estimate is an average: on a host with more work than processors a part of the answers come some milliseconds late, and the
//! average with them. So what gives way asks for a quantile of the last moments ([`Path::rtt`]): late answers do not move it while they
//! are fewer than most. The least would be steadier still, and blind: a TCP flow sends its window in clumps, so that in each round trip
//! a queue that costs it packets is empty for a moment.

use quinn::congestion::{Controller, ControllerFactory, ControllerMetrics};
use std::any::Any;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
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

/// A lane's path now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Path {
    /// What most round trips of the last moments exceed a little or are near; none where nothing was acknowledged for a second.
    pub rtt: Option<Duration>,
    /// Packets that were lost since it was connected.
    pub lost: u64,
    /// Bytes that were acknowledged since it was connected.
    pub acknowledged: u64,
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
    acknowledged: u64,
}

/// The round trips of a connection's last second.
#[derive(Debug, Default)]
pub struct Samples(Mutex<Inner>);

impl Samples {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A packet was acknowledged.
    fn put(&self, now: Instant, rtt: Duration, bytes: u64) {
        let mut inner = self.lock();
        inner.acknowledged += bytes;
        inner.recent.push_back((now, rtt));
        if inner.recent.len() > MOST {
            inner.recent.pop_front();
        }
    }

    /// How the path was in the last moments.
    pub fn path(&self, now: Instant, lost: u64) -> Path {
        let inner = self.lock();
        let age = |at: Instant| now.saturating_duration_since(at);
        let recent = inner.recent.iter().rev().take_while(|(at, _)| age(*at) <= KEPT);
        let mut rtts: Vec<Duration> = recent
            .enumerate()
            .take_while(|(n, (at, _))| *n < ENOUGH || age(*at) <= MOMENTS)
            .map(|(_, (_, rtt))| *rtt)
            .collect();
        Path { rtt: quantile(&mut rtts), lost, acknowledged: inner.acknowledged }
    }
}

/// Makes controllers that take samples.
pub struct Sampling(pub Arc<dyn ControllerFactory + Send + Sync>);

impl ControllerFactory for Sampling {
    fn build(self: Arc<Self>, now: Instant, mtu: u16) -> Box<dyn Controller> {
        Box::new(Sampled { inner: Arc::clone(&self.0).build(now, mtu), samples: Arc::default() })
    }
}

/// Another controller, and what it hears of round trips.
pub struct Sampled {
    inner: Box<dyn Controller>,
    samples: Arc<Samples>,
}

impl Sampled {
    /// The samples of a connection.
    pub fn of(connection: &quinn::Connection) -> Option<Arc<Samples>> {
        connection.congestion_state().into_any().downcast::<Self>().ok().map(|sampled| sampled.samples)
    }
}

impl Controller for Sampled {
    fn on_sent(&mut self, now: Instant, bytes: u64, last_packet_number: u64) {
        self.inner.on_sent(now, bytes, last_packet_number);
    }

    fn on_ack(&mut self, now: Instant, sent: Instant, bytes: u64, app_limited: bool, rtt: &quinn_proto::RttEstimator) {
        self.samples.put(now, now.saturating_duration_since(sent), bytes);
        self.inner.on_ack(now, sent, bytes, app_limited, rtt);
    }

    fn on_end_acks(&mut self, now: Instant, in_flight: u64, app_limited: bool, largest: Option<u64>) {
        self.inner.on_end_acks(now, in_flight, app_limited, largest);
    }

    fn on_congestion_event(&mut self, now: Instant, sent: Instant, persistent: bool, lost: u64) {
        self.inner.on_congestion_event(now, sent, persistent, lost);
    }

    fn on_mtu_update(&mut self, mtu: u16) {
        self.inner.on_mtu_update(mtu);
    }

    fn window(&self) -> u64 {
        self.inner.window()
    }

    fn metrics(&self) -> ControllerMetrics {
        self.inner.metrics()
    }

    fn clone_box(&self) -> Box<dyn Controller> {
        Box::new(Self { inner: self.inner.clone_box(), samples: Arc::clone(&self.samples) })
    }

    fn initial_window(&self) -> u64 {
        self.inner.initial_window()
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
            samples.put(at(n * 2), ms(if n % 2 == 0 { 40 } else { 70 }), 1000);
        }
        assert_eq!(seen(200), Some(ms(40)));
        // A queue makes all of them late, and is seen when the moments before it are over.
        for n in 100..160 {
            samples.put(at(n * 2), ms(50), 1000);
        }
        assert_eq!(seen(320), Some(ms(50)));
        // Of few answers older ones count, too; of those of long ago none.
        samples.put(at(900), ms(90), 1000);
        assert_eq!(seen(900), Some(ms(50)));
        assert_eq!(samples.path(at(2000), 3), Path { rtt: None, lost: 3, acknowledged: 161_000 });
    }
}
