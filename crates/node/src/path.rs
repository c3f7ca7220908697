//! What this host's link knows of the way to another: round trip, loss, and, if asked to measure, what it carries.
//!
//! Goodput is best known from moves and pre-caches that were made; this is for hosts between which there were none. What is sent is
//! filler, on the lane of disks and as disks go: no more than [`MOST`] and for no longer than [`LONGEST`].

use crate::forecast::Goodput;
use crate::node::Node;
use crate::processors;
use crate::proto::{self, Hello};
use bytes::Bytes;
use godwit_api::ApiError;
use godwit_api::predict::{AskPath, PathFacts};
use godwit_link::{Flow, Lane, Priority, SendHalf, Session, Stream};
use godwit_memory::levels::Known;
use godwit_units::{BitRate, Bytes as Amount};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What is sent at the most.
const MOST: u64 = 8 << 20;
/// For how long, besides the round trips in which windows grow.
const LONGEST: Duration = Duration::from_millis(700);
/// So many.
const GROWING: u32 = 6;
/// In pieces of.
const PIECE: usize = 64 << 10;
/// Under way at first.
const AT_FIRST: u64 = 2 * PIECE as u64;
/// Then twice what the link carries in so much time, and in a round trip: a slow one is not given what it would take seconds for.
const AHEAD: Duration = Duration::from_millis(75);
/// Between two looks at what has arrived.
const LOOK: Duration = Duration::from_millis(10);
/// A rate is what arrived since so many looks before.
const LOOKS: usize = 10;
/// A packet, for a count of those that were acknowledged.
const PACKET: u64 = 1200;

/// Answers.
///
/// # Errors
/// The other host cannot be reached.
pub async fn ask(node: &Arc<Node>, asked: AskPath) -> Result<PathFacts, ApiError> {
    let session = node.peers().session(&asked.peer).await?;
    let goodput = if asked.measure { measure(&session).await } else { None };
    if goodput.is_some() {
        let found = Known { level: None, link: goodput };
        node.peers().found().keep(asked.peer.name.as_str(), found, processors::clock());
    }
    let (mut lost, mut acknowledged) = (0, 0);
    for path in Lane::ALL.iter().filter_map(|lane| session.path(*lane)) {
        (lost, acknowledged) = (lost + path.lost, acknowledged + path.acknowledged);
    }
    Ok(PathFacts {
        rtt_ms: round_trip(&session),
        loss: lost as f64 / (lost + acknowledged / PACKET).max(1) as f64,
        goodput,
    })
}

/// The least of what the lanes say: one that carries a move has its own queue before it.
fn round_trip(session: &Session) -> f64 {
    let lanes = Lane::ALL.iter().filter_map(|lane| session.path(*lane)?.rtt);
    lanes.chain(session.rtt()).min().unwrap_or_default().as_secs_f64() * 1e3
}

/// What the link to another host carries while a move goes on: all lanes together in the best of the last moments, and the least round
/// trip, which is the one without the move's own queue.
#[derive(Debug, Default)]
pub(crate) struct Carries {
    goodput: Goodput,
    least: Option<Duration>,
}

impl Carries {
    /// Looks again; nothing where that does not say anything yet.
    pub(crate) fn look(&mut self, now: Duration, session: &Session) -> Option<(BitRate, Duration)> {
        let lanes = Lane::ALL.iter().filter_map(|lane| session.path(*lane));
        let acknowledged = lanes.map(|path| path.acknowledged).sum();
        self.seen(now, acknowledged, Duration::from_secs_f64(round_trip(session) / 1e3))
    }

    fn seen(&mut self, now: Duration, acknowledged: u64, round_trip: Duration) -> Option<(BitRate, Duration)> {
        self.goodput.seen(now, acknowledged);
        // While the session is down nobody knows one.
        let known = Some(round_trip).filter(|round_trip| !round_trip.is_zero());
        self.least = self.least.into_iter().chain(known).min();
        Some((BitRate((self.goodput.rate()? * 8.0) as u64), self.least?))
    }
}

/// What has arrived by when.
type Arrived = (Duration, u64);

async fn measure(session: &Session) -> Option<BitRate> {
    let hello = proto::encode(&Hello::Filler);
    let stream = session.open_stream_with(Lane::Disk, Priority::Bulk, hello, Amount(AT_FIRST)).await.ok()?;
    let rtt = Duration::from_secs_f64(round_trip(session) / 1e3);
    let flow = stream.send.flow();
    // What came behind a packet that was lost counts when it came, and not when that one was sent again.
    let acknowledged = || session.path(Lane::Disk).map_or(0, |path| path.acknowledged);
    let before = acknowledged();
    let arrived = tokio::select! {
        biased;
        // The other host does not take it.
        () = write(stream.send) => return None,
        arrived = watch(&flow, || acknowledged().saturating_sub(before), rtt) => arrived,
    };
    let packets = arrived.last()?.1.max(1);
    let part = (flow.counters().acknowledged.0 as f64 / packets as f64).min(1.0);
    carried(&arrived, rtt).map(|rate| BitRate((rate.0 as f64 * part) as u64))
}

/// Writes filler until it is over. Dropped before that, it takes back what has not gone.
async fn write(mut send: SendHalf) {
    let filler = Bytes::from(vec![b'x'; PIECE]);
    for _ in 0..MOST / PIECE as u64 {
        if send.write(filler.clone()).await.is_err() {
            return;
        }
    }
    std::future::pending().await
}

async fn watch(flow: &Flow, acknowledged: impl Fn() -> u64, rtt: Duration) -> Vec<Arrived> {
    let begin = Instant::now();
    let mut arrived = vec![(Duration::ZERO, 0)];
    loop {
        tokio::time::sleep(LOOK).await;
        let now = (begin.elapsed(), acknowledged());
        arrived.push(now);
        if flow.counters().acknowledged.0 >= MOST || now.0 >= LONGEST + rtt * GROWING {
            return arrived;
        }
        flow.set_window(Amount(ahead(&arrived, rtt)));
    }
}

/// How many bytes may be under way.
fn ahead(arrived: &[Arrived], rtt: Duration) -> u64 {
    let (from, to) = (arrived[arrived.len().saturating_sub(LOOKS + 1)], arrived[arrived.len() - 1]);
    let rate = (to.1 - from.1) as f64 / (to.0 - from.0).max(LOOK).as_secs_f64();
    ((rate * (AHEAD + rtt).as_secs_f64() * 2.0) as u64).clamp(AT_FIRST, MOST)
}

/// What the link carried: the later half of what has arrived, since windows grow and the link is not full before.
fn carried(arrived: &[Arrived], rtt: Duration) -> Option<BitRate> {
    let all = arrived.last()?.1;
    let first = |least: u64| arrived.iter().find(|(_, bytes)| *bytes >= least);
    let (end, half) = (first(all.max(1))?, first(all / 2)?);
    // All at once: what it took, but for the way.
    let (from, bytes) = if half.0 < end.0 { (half.0, end.1 - half.1) } else { (rtt.min(end.0 / 2), all) };
    Some(BitRate((bytes as f64 * 8.0 / (end.0 - from).as_secs_f64()) as u64))
}

/// Another host measures: what comes is read, and is nothing.
pub fn swallow(stream: Stream) {
    tokio::spawn(async move {
        // A stream of which one half is dropped is given up.
        let (_send, mut recv) = stream.split();
        let mut left = MOST;
        while let Ok(Some(piece)) = recv.read().await {
            let Some(less) = left.checked_sub(piece.len() as u64) else { break };
            left = less;
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    const RTT: Duration = Duration::from_millis(20);
    const SECOND: u64 = 1_000_000;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn a_moves_own_queue_makes_the_link_neither_longer_nor_slower_and_silence_says_nothing() {
        let mut carries = Carries::default();
        assert_eq!(carries.seen(ms(0), 0, ms(0)), None);
        assert_eq!(carries.seen(ms(250), 0, RTT), None);
        assert_eq!(carries.seen(ms(500), SECOND / 4, RTT * 3), Some((BitRate(8 * SECOND), RTT)));
        assert_eq!(carries.seen(ms(1000), SECOND / 4, ms(0)), Some((BitRate(8 * SECOND), RTT)));
    }

    #[test]
    fn what_was_sent_while_windows_grew_does_not_make_the_link_slower() {
        // A fifth of the link until 200 ms, all of its 8 Mbit/s from then on.
        let bytes = |at: u64| if at < 200 { at * SECOND / 5000 } else { 40_000 + (at - 200) * SECOND / 1000 };
        let arrived: Vec<Arrived> = (0..=70).map(|i| (ms(i * 10), bytes(i * 10))).collect();
        let mbit = carried(&arrived, RTT).map_or(0.0, BitRate::mbit);
        assert!((7.99..8.01).contains(&mbit), "{mbit}");
    }

    #[test]
    fn of_a_link_that_answers_once_it_is_known_what_that_took() {
        let arrived = [(ms(0), 0), (ms(10), 0), (ms(520), 62_500), (ms(700), 62_500)];
        assert_eq!(carried(&arrived, RTT), Some(BitRate(1_000_000)));
        assert_eq!(carried(&arrived[..2], RTT), None);
    }

    #[test]
    fn a_slow_link_is_asked_for_little_and_a_fast_one_for_much() {
        let at = |per_ms: u64| -> Vec<Arrived> { (0..30).map(|i| (ms(i * 10), i * 10 * per_ms)).collect() };
        assert_eq!(ahead(&at(0), RTT), AT_FIRST);
        // 1 Mbit/s, 200 Mbit/s, 10 Gbit/s.
        assert_eq!(ahead(&at(125), RTT), AT_FIRST);
        assert_eq!(ahead(&at(25_000), RTT), 4_750_000);
        assert_eq!(ahead(&at(1_250_000), RTT), MOST);
    }
}
