//! What was carried.

use crate::Lane;
use godwit_units::Bytes;

/// What one lane of a session carried, over all its connections.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LaneCounters {
    /// UDP payload sent: with QUIC's overhead and retransmissions, without IP and UDP headers.
    pub sent: Bytes,
    /// UDP payload received.
    pub received: Bytes,
    /// How often it was connected, the first time included.
    pub connections: u64,
}

/// What a session carried.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    pub(crate) lanes: [LaneCounters; 3],
}

impl Counters {
    /// Bytes of UDP payload on one lane, both directions.
    #[must_use]
    pub fn lane(&self, lane: Lane) -> u64 {
        let LaneCounters { sent, received, .. } = self.lanes[lane.index()];
        (sent + received).0
    }

    /// One lane in detail.
    #[must_use]
    pub const fn detail(&self, lane: Lane) -> LaneCounters {
        self.lanes[lane.index()]
    }
}

/// What one stream carried: its application's bytes, each counted once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StreamCounters {
    /// Written here.
    pub written: Bytes,
    /// Of these, received by the peer's link layer.
    pub acknowledged: Bytes,
    /// Received here.
    pub received: Bytes,
}
