//! How a move stands, as the nodes tell it and people read it.

use godwit_units::{BitRate, Bytes};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The phases of a move, in their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum PhaseName {
    /// Checks and reservation on both sides; the destination stages replica, endpoints and QEMU.
    Reserve,
    /// Blocks are copied while the guest runs.
    CopyDisk,
    /// Memory goes in rounds; writes are mirrored.
    Memory,
    /// The vCPUs are stopped; the last pages, device state and blocks go.
    Stop,
    /// From everything verified to the destination's start.
    HandOff,
    /// The guest runs at the destination; what is left at the source is cleared away, the network is proved.
    Release,
}

/// How a move ended, or that it has not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// It goes on.
    Running,
    /// The VM runs at the destination.
    Completed,
    /// Taken back on request: it runs at the source.
    Cancelled,
    /// The VM runs at the destination, and that its network leads there could not be shown.
    NetworkUnproved,
    /// Failed: it runs at the source.
    Failed,
    /// Neither side can tell alone: the VM is paused until the other side is heard, or somebody claims it.
    WaitsForPeer,
}

/// One phase.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Phase {
    /// Which.
    pub name: PhaseName,
    /// When it began: microseconds since 1970, by the clock of the host that tells.
    pub started_unix_us: u64,
    /// When it ended, unless it goes on.
    pub ended_unix_us: Option<u64>,
}

/// One pass over the guest's memory.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Round {
    /// Pages that QEMU sent, zero pages included.
    pub pages: u64,
    /// Zero pages among them.
    pub zero: u64,
    /// Pages that were sent before with the same contents, and did not travel again.
    pub unchanged: u64,
    /// Pages that the guest had dirtied by the end of the round.
    pub dirtied: u64,
    /// What the round brought onto the link, after encoding.
    pub wire: Bytes,
    /// How long it took.
    pub seconds: f64,
}

/// Bytes of a move by what they were for, as the link counted them: both directions, UDP payload.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct MoveBytes {
    /// Memory and device state.
    pub memory: Bytes,
    /// Disk blocks.
    pub disk: Bytes,
    /// The rest.
    pub control: Bytes,
}

/// Disk side of a move.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct DiskProgress {
    /// To be copied in all, as known so far.
    pub total: Bytes,
    /// Copied.
    pub copied: Bytes,
    /// Still different at the destination.
    pub remaining: Bytes,
    /// Whether the guest's writes are answered by both sides.
    pub synchronous: bool,
}

/// How a move stands, told by one of its two nodes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct MoveProgress {
    /// How it ended, or that it has not.
    pub outcome: Outcome,
    /// Where it is.
    pub phase: PhaseName,
    /// The phases so far.
    pub phases: Vec<Phase>,
    /// Bytes on the link so far.
    pub bytes: MoveBytes,
    /// QEMU's own stream so far: what would have travelled without Godwit.
    pub raw: Bytes,
    /// Zero pages so far.
    pub zero_pages: u64,
    /// The rounds so far; the last one may be going on.
    pub rounds: Vec<Round>,
    /// The disks, all together.
    pub disk: DiskProgress,
    /// What QEMU says is left of memory.
    pub memory_remaining: Bytes,
    /// How fast the guest dirties memory, bytes a second.
    pub dirty_rate: Bytes,
    /// How fast bytes leave now.
    pub rate: BitRate,
    /// When the move is expected to end: microseconds since 1970. Never earlier than now; revised only with reason.
    pub predicted_end_unix_us: Option<u64>,
    /// The limit in force.
    pub limit: Option<BitRate>,
    /// When the vCPUs stopped at the source (QEMU's STOP event).
    pub stopped_unix_us: Option<u64>,
    /// When they ran at the destination (QEMU's RESUME event).
    pub resumed_unix_us: Option<u64>,
    /// The pause as the source measured it by its own clock, half a round trip taken off: independent of the hosts' clocks.
    /// Only where the source's node was restarted within the pause, the difference of the two times above.
    pub downtime_ms: Option<f64>,
    /// How long after the start the network was proved to lead to the new place.
    pub network_proved_ms: Option<f64>,
    /// What went wrong, or is waited for.
    pub error: Option<String>,
    /// The link: seconds since the peer was last heard, while it is down.
    pub link_down_s: Option<f64>,
}

impl Outcome {
    /// Whether the move has not ended.
    #[must_use]
    pub const fn is_open(self) -> bool {
        matches!(self, Self::Running | Self::WaitsForPeer)
    }

    /// Whether the VM runs at the destination.
    #[must_use]
    pub const fn has_arrived(self) -> bool {
        matches!(self, Self::Completed | Self::NetworkUnproved)
    }
}

impl MoveProgress {
    /// The pause by the two hosts' clocks, for where the source could not measure it by its own.
    #[must_use]
    pub fn pause_by_clocks_ms(&self) -> Option<f64> {
        let (stopped, resumed) = (self.stopped_unix_us?, self.resumed_unix_us?);
        #[allow(clippy::cast_precision_loss, reason = "a pause has less than 2^52 microseconds")]
        resumed.checked_sub(stopped).map(|us| us as f64 / 1000.0)
    }
}
