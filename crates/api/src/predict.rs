//! Predictions: what a move will take, said before it is made, and kept with it.
//!
//! | request | answer |
//! |---|---|
//! | the controller's `GET /v1/vms/{vm}/prediction?to=PLACE` | [`MovePrediction`] |
//! | the node's `POST /v1/path` | [`AskPath`] -> [`PathFacts`] |

use crate::Name;
use crate::host::PeerHost;
use crate::public::Move;
pub use godwit_units::Span;
use godwit_units::{BitRate, Policy};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What is to be foretold.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct WantedPrediction {
    /// A host, or a site.
    pub to: Name,
    /// What the move is to spare.
    #[serde(default)]
    pub policy: Policy,
    /// What it may use of the link, bits a second.
    #[serde(default)]
    pub limit: Option<BitRate>,
    /// When it begins, seconds since 1970; now.
    #[serde(default)]
    pub at_unix_s: Option<u64>,
    /// Whether to look for the best beginning in the coming 24 hours.
    #[serde(default)]
    pub when: bool,
}

impl WantedPrediction {
    /// As it stands behind a path's `?`. Nothing in it needs to be escaped.
    #[must_use]
    pub fn query(&self) -> String {
        let mut query = format!("to={}&policy={}&when={}", self.to, self.policy, self.when);
        if let Some(limit) = self.limit {
            query += &format!("&limit={}", limit.0);
        }
        if let Some(at) = self.at_unix_s {
            query += &format!("&at_unix_s={at}");
        }
        query
    }
}

/// One way to move a VM, foretold.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Choice {
    /// `mirror`, `precache` (mirrored, once a pre-cache has caught up), `postcopy`, `shared`, `cold`.
    pub strategy: String,
    /// Whether `godwit move` can do it for this VM as things are.
    pub possible: bool,
    /// What would have to be done first, or why it never ends.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
    /// From the order to the guest's running there, in seconds. None where it never ends, as the figures below.
    pub total_s: Option<Span>,
    /// While the guest stands, in milliseconds.
    pub downtime_ms: Option<Span>,
    /// What crosses the link, in bytes.
    pub bytes: Option<Span>,
    /// For how long the guest's reads or writes of its disks wait longer than they did, in seconds.
    pub slowed_s: Option<Span>,
    /// How much longer each waits, in milliseconds.
    pub slowed_by_ms: f64,
}

/// What a prediction goes by.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Basis {
    /// What a move gets of the link, in Mbit/s.
    pub goodput_mbit: Span,
    /// How that is known: `past moves`, `measured now`, `assumed`.
    pub goodput_by: String,
    /// Round trip, in milliseconds; none where the hosts do not reach each other.
    pub rtt_ms: Option<f64>,
    /// Packets that were lost, of those sent since the hosts were connected.
    pub loss: Option<f64>,
    /// Moves over the same link that are under way.
    pub sharing: u32,
    /// What a move takes besides its bytes while the guest runs, in seconds.
    pub before_s: Span,
    /// The same while it stands, in milliseconds.
    pub pause_ms: Span,
    /// Past moves between the two hosts that overheads are taken from.
    pub past_moves: u32,
    /// Past predictions that the intervals are taken from.
    pub past_predictions: u32,
    /// How the guest is modelled: `hist`, by the profile; `avg`, by a rate; `assumed`.
    pub model: String,
    /// The profile's start, milliseconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub profile_unix_ms: Option<u64>,
    /// Pages that the guest changes in a second.
    pub changed_per_s: f64,
    /// What it changes at all, in pages.
    #[serde(default)]
    pub working_set_pages: u64,
    /// Bytes on the wire for each page of the memory, in the first round.
    pub first_bytes_a_page: f64,
    /// For each page that is sent again.
    pub again_bytes_a_page: f64,
    /// zstd's level that memory is thought to be packed by, as in the last move from the one host to the other: what is foretold goes by it, and the two
    /// above by level 1. None: where no move has shown one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub level: Option<i32>,
}

/// What a move will take, by each way.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct MovePrediction {
    /// The VM.
    pub vm: Name,
    /// Where it is.
    pub from: Name,
    /// The host that it would go to.
    pub to: Name,
    /// When it is predicted for, seconds since 1970.
    pub at_unix_s: u64,
    /// The ways.
    pub choices: Vec<Choice>,
    /// The best of those that are possible, by the policy that was asked for; none where none is.
    pub recommended: Option<String>,
    /// Why.
    pub why: String,
    /// What all this goes by.
    pub basis: Basis,
    /// Beginnings in the coming 24 hours, where that was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub when: Option<When>,
}

/// Good and bad moments to begin.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct When {
    /// Moments that were tried: those of which a profile tells.
    pub tried: u32,
    /// The best of them.
    pub best: Moment,
    /// The mean of all.
    pub mean: Moment,
    /// The worst.
    pub worst: Moment,
}

/// A moment to begin at.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Moment {
    /// When, seconds since 1970; 0 for the mean.
    pub at_unix_s: u64,
    /// How long the move takes.
    pub total_s: f64,
    /// How long the guest stands.
    pub downtime_ms: f64,
    /// What crosses the link.
    pub bytes: f64,
}

/// What was foretold of a move, kept with it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Foretold {
    /// From the order to the guest's running there, in seconds; waiting for its turn is part of it.
    pub total_s: Span,
    /// Of one that was ordered together with others: when its turn comes, in seconds after the order.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub begins_s: Option<Span>,
    /// While the guest stands, in milliseconds.
    pub downtime_ms: Span,
    /// What crosses the link, in bytes.
    pub bytes: Span,
    /// What it went by.
    pub basis: Basis,
    /// What was likely before past moves corrected it, from its turn on: they learn from this.
    pub uncorrected: Likely,
}

impl Foretold {
    /// How long the move itself likely takes, from its turn on, in seconds.
    #[must_use]
    pub fn own_s(&self) -> f64 {
        self.total_s.likely - self.begins_s.map_or(0.0, |begins| begins.likely)
    }
}

/// What a move likely takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Likely {
    /// From the order to the guest's running there, in seconds.
    pub total_s: f64,
    /// While the guest stands, in milliseconds.
    pub downtime_ms: f64,
    /// What crosses the link, in bytes.
    pub bytes: f64,
}

impl Move {
    /// From the order to the guest's running at the destination, in seconds; none of a move that did not get there.
    #[must_use]
    pub fn total_s(&self) -> Option<f64> {
        let resumed = self.progress.resumed_unix_us.filter(|_| self.progress.outcome.has_arrived())?;
        #[allow(clippy::cast_precision_loss, reason = "no move takes 2^52 microseconds")]
        resumed.checked_sub(self.ordered_unix_us).map(|us| us as f64 / 1e6)
    }

    /// All that it brought onto the link, in bytes.
    #[must_use]
    #[allow(clippy::cast_precision_loss, reason = "a figure for people")]
    pub fn total_bytes(&self) -> f64 {
        let bytes = &self.progress.bytes;
        (bytes.memory.0 + bytes.disk.0 + bytes.control.0) as f64
    }
}

/// What does a host know of the way to another?
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AskPath {
    /// The other host.
    pub peer: PeerHost,
    /// Measure what the link carries, too: up to a second of it, or 2 MiB.
    pub measure: bool,
}

/// What it knows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PathFacts {
    /// Round trip, milliseconds.
    pub rtt_ms: f64,
    /// Packets lost, of those sent since the hosts were connected.
    pub loss: f64,
    /// What the link carried when it was measured.
    pub goodput: Option<BitRate>,
}
