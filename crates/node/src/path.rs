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
/// So many under way at a time: a bandwidth-delay product of 200 Mbit/s and 60 ms.
const AT_ONCE: usize = 24;
/// The first answers tell of the link's start, not of what it carries.
const WARM_UP: Duration = Duration::from_millis(150);
/// A packet, for a count of those that were acknowledged.
const PACKET: u64 = 1200;

/// Answers.
///
/// # Errors
/// The other host cannot be reached.
pub async fn ask(node: &Arc<Node>, asked: AskPath) -> Result<PathFacts, ApiError> {
    let session = node.peers().session(&asked.peer).await?;
    let goodput = if asked.measure { measure(node, &asked.peer).await } else { None };
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

async fn measure(node: &Arc<Node>, peer: &PeerHost) -> Option<BitRate> {
    let filler = proto::encode(&Request::Filler("x".repeat(PIECE)));
    let begin = Instant::now();
    let (mut under_way, mut sent, mut answered) = (JoinSet::new(), 0, vec![]);
    loop {
        while under_way.len() < AT_ONCE && sent < MOST && begin.elapsed() < LONGEST {
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
    carried(&answered)
}

/// What the link carried, by when each piece was answered.
fn carried(answered: &[Duration]) -> Option<BitRate> {
    let last = *answered.last()?;
    // A short one has nothing but its start.
    let warm = answered.iter().position(|at| *at >= WARM_UP.min(last / 2))?;
    let (pieces, time) = (answered.len() - 1 - warm, last.saturating_sub(answered[warm]));
    (pieces > 0 && !time.is_zero())
        .then(|| BitRate((pieces * PIECE * 8) as u64 * 1000 / (time.as_millis() as u64).max(1)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_links_start_is_no_part_of_what_it_carries() {
        let ms = Duration::from_millis;
        // A slow start, then a piece each 10 ms: 64 KiB * 8 / 10 ms.
        let answered: Vec<Duration> = [60, 120].map(ms).into_iter().chain((0..50).map(|i| ms(160 + i * 10))).collect();
        let mbit = carried(&answered).map_or(0.0, BitRate::mbit);
        assert!((52.0..53.0).contains(&mbit), "{mbit}");
        assert_eq!((carried(&[]), carried(&[ms(1)])), (None, None));
    }
}
