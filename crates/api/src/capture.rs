//! Frames of a wire, recorded where it has its ends: `godwit net trace --capture`.

use crate::name::Name;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The longest that frames are recorded for one request, ms.
pub const LONGEST_CAPTURE_MS: u64 = 60_000;

/// The most hosts besides those of a wire's ends that are asked in one request: places that ends may come to.
pub const MOST_ALSO: usize = 8;

/// Asks for a recording.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CaptureWire {
    /// For how long, ms; at most [`LONGEST_CAPTURE_MS`].
    #[schemars(range(min = 1, max = 60_000))]
    pub for_ms: u64,
    /// Hosts that record as well as soon as an end of the wire comes there, as by a move; at most [`MOST_ALSO`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 8))]
    pub also: Vec<Name>,
}

/// Controller to node: asks for a recording there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CaptureHere {
    /// For how long, ms; at most [`LONGEST_CAPTURE_MS`].
    pub for_ms: u64,
    /// Waits within this time for an end of the wire that is not there yet; without it, that is an error.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub awaits: bool,
}

/// What passed a port.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Capture {
    /// The port's endpoint number; 0 where none came.
    pub endpoint: u32,
    /// Frames of both directions, in their order.
    pub frames: Vec<CapturedFrame>,
    /// How many more there were.
    pub not_kept: u64,
}

/// A frame.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct CapturedFrame {
    /// When it passed, microseconds since 1970 (UTC).
    pub at_us: u64,
    /// How long it was, bytes.
    pub length: u32,
    /// Its beginning, in hexadecimal.
    pub head: String,
}

/// The same, and where.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct HostCapture {
    /// At which host.
    pub host: Name,
    /// What.
    #[serde(flatten)]
    pub capture: Capture,
}
