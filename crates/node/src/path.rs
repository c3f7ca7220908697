//! What this host's link knows of the way to another: round trip, loss, and, if asked to measure, what it carries.
//!
//! Goodput is best known from moves and pre-caches that were made; this is for hosts between which there were none. What is sent is
//! filler, in requests that the other node answers: no more than [`MOST`] and for no longer than [`LONGEST`].

use crate::node::Node;
use crate::proto::{self, Request};
use godwit_api::ApiError;
use godwit_api::host::PeerHost;
use godwit_api::predict::{AskPath, PathFacts};
use godwit_link::{Lane, Session};
use godwit_units::BitRate;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::task::JoinSet;

/// What is sent at the most.
const MOST: usize = 8 << 20;
/// For how long.
const LONGEST: Duration = Duration::from_millis(700);
/// In pieces of.
const PIECE: usize = 64 << 10;
/// So many under way at a time, at the most: a bandwidth-delay product of 200 Mbit/s and 60 ms.
const AT_ONCE: usize = 24;
/// As many as the link answered in so much time: a slow one is not given what it would take seconds for.
const AHEAD: Duration = Duration::from_millis(150);
/// A packet, for a count of those that were acknowledged.
const PACKET: u64 = 1200;

/// Answers.
///
/// # Errors
/// The other host cannot be reached.
pub async fn ask(node: &Arc<Node>, asked: AskPath) -> Result<PathFacts, ApiError> {
    let session = node.peers().session(&asked.peer).await?;
    let goodput = if asked.measure { measure(node, &session, &asked.peer).await } else { None };
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

async fn measure(node: &Arc<Node>, session: &Session, peer: &PeerHost) -> Option<BitRate> {
    let filler = proto::encode(&Request::Filler("x".repeat(PIECE)));
    let begin = Instant::now();
    let (mut under_way, mut sent, mut answered) = (JoinSet::new(), 0, vec![]);
    loop {
        while under_way.len() < at_once(answered.len(), begin.elapsed()) && sent < MOST && begin.elapsed() < LONGEST {
            let (node, peer, filler) = (node.clone(), peer.clone(), filler.clone());
            under_way.spawn(async move { node.peers().request(&peer, filler, LONGEST * 8).await.is_ok() });
            sent += PIECE;
        }
        match under_way.join_next().await {
            Some(Ok(true)) => answered.push(begin.elapsed()),
            Some(_) => return None,
            None => break,
        }
    }
    carried(&answered, Duration::from_secs_f64(round_trip(session) / 1e3))
}

/// How many pieces may be under way when so many were answered until now.
fn at_once(answered: usize, since: Duration) -> usize {
    let ahead = answered as f64 * AHEAD.as_secs_f64() / since.as_secs_f64().max(1e-3);
    (ahead.ceil() as usize + 2).min(AT_ONCE)
}

/// What the link carried, by when each piece was answered: all of it, since pieces that are under way together are answered together. The
/// first piece's round trip is no part of it.
fn carried(answered: &[Duration], rtt: Duration) -> Option<BitRate> {
    let time = answered.last()?.saturating_sub(rtt);
    (!time.is_zero()).then(|| BitRate(((answered.len() * PIECE * 8) as f64 / time.as_secs_f64()) as u64))
}

#[cfg(test)]
mod tests {
    use super::*;

    const RTT: Duration = Duration::from_millis(20);

    #[test]
    fn pieces_that_are_answered_together_are_no_faster_link() {
        let ms = Duration::from_millis;
        // One after the other, and six at a time: 64 KiB * 8 / 50 ms.
        let each: Vec<Duration> = (1..=12).map(|i| RTT + ms(i * 50)).collect();
        let together: Vec<Duration> = [300, 600].into_iter().flat_map(|at| vec![RTT + ms(at); 6]).collect();
        for answered in [each, together] {
            let mbit = carried(&answered, RTT).map_or(0.0, BitRate::mbit);
            assert!((10.4..10.6).contains(&mbit), "{mbit}");
        }
        assert_eq!((carried(&[], RTT), carried(&[ms(1)], RTT)), (None, None));
    }

    #[test]
    fn a_slow_link_is_asked_for_little_and_a_fast_one_for_much() {
        assert_eq!(at_once(0, Duration::ZERO), 2);
        // 1 Mbit/s and 200 Mbit/s.
        assert_eq!(at_once(1, Duration::from_millis(524)), 3);
        assert_eq!(at_once(380, Duration::from_secs(1)), AT_ONCE);
    }
}
