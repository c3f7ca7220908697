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

/// Bytes as text.
#[must_use]
pub fn hex(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let digits = bytes.iter().flat_map(|byte| [DIGITS[usize::from(byte >> 4)], DIGITS[usize::from(byte & 15)]]);
    digits.map(char::from).collect()
}

/// The bytes of such a text; none where it is none.
#[must_use]
pub fn bytes(text: &str) -> Option<Vec<u8>> {
    let digits: Option<Vec<u8>> = text.chars().map(|c| u8::try_from(c.to_digit(16)?).ok()).collect();
    let digits = digits.filter(|digits| digits.len() % 2 == 0)?;
    Some(digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_read_back_from_their_text_and_what_is_no_such_text_is_none() {
        let all: Vec<u8> = (0..=255).collect();
        assert_eq!(bytes(&hex(&all)), Some(all));
        assert_eq!((bytes("0"), bytes("0g"), bytes("é0"), bytes("")), (None, None, None, Some(vec![])));
    }
}
