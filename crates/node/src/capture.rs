//! What passes a wire's port on this host, on request: bounded in time and bytes, and a few at a time.

use crate::node::{Node, network};
use crate::spec;
use godwit_api::capture::{Capture, CaptureWire, CapturedFrame, LONGEST_CAPTURE_MS};
use godwit_api::{ApiError, Problem};
use godwit_wire::CaptureBounds;
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};
use tokio::sync::Semaphore;

/// Captures at a time: each holds some megabytes until it is answered.
static PLACES: Semaphore = Semaphore::const_new(8);
/// What is kept of a frame: its headers, through a tunnel's as well.
const EACH: usize = 256;
/// What is kept of all frames together: 4096 of the longest heads.
const BYTES: usize = 1 << 20;

/// Records what passes the wire here.
///
/// # Errors
/// [`Problem::NotFound`] where no end of the wire is open here; [`Problem::Conflict`] when too many are under way.
pub async fn capture(node: &Arc<Node>, wire: u32, asked: CaptureWire) -> Result<Capture, ApiError> {
    let Ok(_place) = PLACES.try_acquire() else {
        let message = format!("{} records frames for others already", node.name());
        return Err(ApiError::new(Problem::Conflict, message).remedy("try again in a minute"));
    };
    let local = node.local_wire(wire).await?;
    let Some(endpoint) = local.open.first() else {
        let message = format!("no end of wire {wire:08x} is open at {}", node.name());
        return Err(ApiError::new(Problem::NotFound, message));
    };
    let lasting = Duration::from_millis(asked.for_ms.min(LONGEST_CAPTURE_MS));
    let bounds = CaptureBounds { lasting, bytes: BYTES, each: EACH };
    let captured = node.wires().capture(&spec::device(*endpoint), bounds).await.map_err(network)?;
    let frame = |frame: &godwit_wire::CapturedFrame| CapturedFrame {
        at_us: frame.at.duration_since(UNIX_EPOCH).map_or(0, |at| at.as_micros() as u64),
        length: u32::try_from(frame.length).unwrap_or(u32::MAX),
        head: godwit_api::capture::hex(&frame.head),
    };
    Ok(Capture {
        endpoint: *endpoint,
        frames: captured.frames.iter().map(frame).collect(),
        not_kept: captured.not_kept,
    })
}
