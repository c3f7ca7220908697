//! What passes a wire's port on this host, on request: bounded in time and bytes, and a few at a time.

use crate::node::{Node, network};
use crate::spec;
use godwit_api::capture::{self, Capture, CaptureHere, LONGEST_CAPTURE_MS};
use godwit_api::hex;
use godwit_api::{ApiError, Problem};
use godwit_wire::{CaptureBounds, Captured, CapturedFrame};
use std::sync::Arc;
use std::time::{Duration, Instant, UNIX_EPOCH};
use tokio::sync::Semaphore;

/// Captures at a time: each holds some megabytes until it is answered.
static PLACES: Semaphore = Semaphore::const_new(8);
/// What is kept of a frame: its headers, through a tunnel's as well.
const EACH: usize = 256;
/// What is kept of all frames together: 4096 of the longest heads.
const BYTES: usize = 1 << 20;

/// How soon an end that has come is found: what passes before is not in the recording.
const LOOK: Duration = Duration::from_millis(10);

/// Records what passes the wire here. An end that goes meanwhile, as by a move, may come back within the time.
///
/// # Errors
/// [`Problem::NotFound`] where no end of the wire is open here, and none is awaited; [`Problem::Conflict`] when too many are under way.
pub async fn capture(node: &Arc<Node>, wire: u32, asked: CaptureHere) -> Result<Capture, ApiError> {
    let Ok(_place) = PLACES.try_acquire() else {
        let message = format!("{} records frames for others already", node.name());
        return Err(ApiError::new(Problem::Conflict, message).remedy("try again in a minute"));
    };
    if !asked.awaits && node.local_wire(wire).await?.open.is_empty() {
        let message = format!("no end of wire {wire:08x} is open at {}", node.name());
        return Err(ApiError::new(Problem::NotFound, message));
    }
    let (endpoint, captured) = record(node, wire, Duration::from_millis(asked.for_ms.min(LONGEST_CAPTURE_MS))).await?;
    let frame = |frame: &CapturedFrame| capture::CapturedFrame {
        at_us: frame.at.duration_since(UNIX_EPOCH).map_or(0, |at| at.as_micros() as u64),
        length: u32::try_from(frame.length).unwrap_or(u32::MAX),
        head: hex::text(&frame.head),
    };
    Ok(Capture { endpoint, frames: captured.frames.iter().map(frame).collect(), not_kept: captured.not_kept })
}

/// What passes the wire's ends while they are here, and the last of these ends.
async fn record(node: &Arc<Node>, wire: u32, lasting: Duration) -> Result<(u32, Captured), ApiError> {
    let end = Instant::now() + lasting;
    let (mut endpoint, mut all, mut refused) = (0, Captured::default(), None);
    while let Some(left) = end.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) {
        if let Some(open) = node.local_wire(wire).await.ok().and_then(|local| local.open.first().copied()) {
            endpoint = open;
            let bounds = CaptureBounds { lasting: left, bytes: BYTES - all.bytes(), each: EACH };
            match node.wires().capture(&spec::device(open), bounds).await {
                Ok(more) => all.append(more),
                // The port may have gone since.
                Err(error) => refused = Some(error),
            }
        }
        tokio::time::sleep(LOOK.min(end.saturating_duration_since(Instant::now()))).await;
    }
    match refused {
        Some(error) if all == Captured::default() => Err(network(error)),
        _ => Ok((endpoint, all)),
    }
}
