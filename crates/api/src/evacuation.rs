//! The plan of a site's evacuation: who goes where, how, in which order, and who is away in time.
//!
//! | request | answer |
//! |---|---|
//! | the controller's `POST /v1/sites/{site}/evacuation-plan` | [`PlanEvacuation`] -> [`Evacuation`]; nothing is moved |
//! | the node's `GET /v1/activity?at_unix_s=TIME` | [`Activity`] of each VM that it knows |
//!
//! # The format of a plan
//!
//! [`Evacuation`] is made to be kept in a file and carried out later: [`FORMAT`] and [`VERSION`] stand in it, and [`Evacuation::read`]
//! refuses what it was not made for. Within a version members may be added, and whoever reads it passes over those that they do not know;
//! none is taken away, nor means something else. `docs/evacuation.md` tells it to people.

use crate::Name;
use crate::host::DiskStrategy;
use crate::profile::Profile;
use godwit_units::{BitRate, Bytes, Span, VmId};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What a plan says it is.
pub const FORMAT: &str = "godwit-evacuation";
/// The version of its format.
pub const VERSION: u32 = 1;
/// The most VMs of one plan: its answer has to stay within what a client takes.
pub const MOST_VMS: usize = 20_000;
/// The longest deadline, in seconds: a year.
pub const LONGEST_S: f64 = 31_536_000.0;

/// Wants an evacuation planned.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PlanEvacuation {
    /// When the site must be empty, in seconds from the beginning.
    #[schemars(range(min = 0, max = 31_536_000))]
    pub deadline_s: f64,
    /// Only these VMs; none: all of the site.
    #[serde(default)]
    pub vms: Option<Vec<Name>>,
    /// Only to these sites or hosts; empty: to any other site.
    #[serde(default)]
    pub to: Vec<Name>,
    /// What all of it may use of each link, bits a second.
    #[serde(default)]
    #[schemars(schema_with = "crate::patterns::limit")]
    pub limit: Option<BitRate>,
    /// When it begins, seconds since 1970; now. Guests are known by what they did at that time of day.
    #[serde(default)]
    pub at_unix_s: Option<u64>,
    /// Whether VMs may be shut down for it, where they would not be away in time otherwise.
    #[serde(default)]
    pub cold: bool,
}

/// Whether a VM is away before the deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum InTime {
    /// Even at its latest.
    Surely,
    /// If things go as they likely do.
    Likely,
    /// Not.
    Late,
}

/// One VM's move.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct EvacuationMove {
    /// The VM.
    pub vm: Name,
    /// The host that it is on.
    pub from: Name,
    /// The host that it goes to.
    pub to: Name,
    /// That host's site: moves to one site share a link.
    pub site: Name,
    /// `mirror`, `postcopy`, `shared`, or `cold`: shut down, or off already.
    pub strategy: String,
    /// How disks travel, as a move is ordered; none where no single order does it (`cold`).
    pub disk: Option<DiskStrategy>,
    /// It begins when the guest of this one runs at its destination; none: at once, when the link is free.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<Name>,
    /// When it begins, in seconds from the beginning.
    pub start_s: f64,
    /// When it is over.
    pub end_s: Span,
    /// While the guest stands, in milliseconds.
    pub downtime_ms: Span,
    /// What crosses the link.
    pub bytes: Bytes,
    /// Whether it is over before the deadline.
    pub in_time: InTime,
    /// How the guest is known: `profile`, `moves` (its own past ones), `assumed`, `off`.
    pub model: String,
    /// What somebody has to know or do before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

/// A link of the site.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct EvacuationLink {
    /// The site that it leads to.
    pub to: Name,
    /// What moves get of it, in Mbit/s.
    pub goodput_mbit: Span,
    /// How that is known.
    pub goodput_by: String,
    /// Its round trip, in milliseconds; none where it was not measured.
    pub rtt_ms: Option<f64>,
    /// For how long moves that are under way will still take it, in seconds.
    pub busy_s: f64,
    /// Moves over it.
    pub moves: usize,
    /// The most that are under way at once: one has the link, another is being prepared.
    pub at_once: usize,
    /// What they send.
    pub bytes: Bytes,
    /// When the last is over, in seconds.
    pub end_s: Span,
}

/// A VM that is not in the plan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct LeftOut {
    /// The VM.
    pub vm: Name,
    /// The host that it is on.
    pub host: Name,
    /// Why.
    pub why: String,
}

/// A host that was asked and did not answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SilentHost {
    /// The host.
    pub host: Name,
    /// As far as is known.
    pub why: String,
}

/// The plan.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Evacuation {
    /// [`FORMAT`].
    pub format: String,
    /// [`VERSION`].
    pub version: u32,
    /// The site that is to be left.
    pub site: Name,
    /// When the plan was made, seconds since 1970.
    pub made_unix_s: u64,
    /// When it begins.
    pub begins_unix_s: u64,
    /// When the site must be empty, in seconds from the beginning.
    pub deadline_s: f64,
    /// VMs that were looked at: those of the moves, and those that are left out.
    pub vms: usize,
    /// VMs that are surely away in time.
    pub surely: usize,
    /// VMs that likely are, those that surely are among them.
    pub in_time: usize,
    /// VMs that are away later.
    pub late: usize,
    /// No plan has more VMs away in time.
    pub at_most: usize,
    /// When all are away, in seconds.
    pub end_s: Span,
    /// What is sent.
    pub bytes: Bytes,
    /// Links.
    pub links: Vec<EvacuationLink>,
    /// Moves, in the order in which they begin.
    pub moves: Vec<EvacuationMove>,
    /// VMs that stay, and why.
    pub left_out: Vec<LeftOut>,
    /// Hosts that were not counted on.
    pub silent: Vec<SilentHost>,
}

/// Why a text is no plan to be carried out.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// It is no such JSON.
    #[error(
        "this is no plan of an evacuation: {0}; make one with `godwit predict --site SITE --all --deadline TIME --json`"
    )]
    NoPlan(serde_json::Error),
    /// It says that it is something else.
    #[error(
        "this is `{0}` and no plan of an evacuation: make one with `godwit predict --site SITE --all --deadline TIME --json`"
    )]
    Format(String),
    /// It is of another version.
    #[error("this plan has version {0}, and this Godwit carries out version {VERSION}: make the plan anew")]
    Version(u32),
}

impl Evacuation {
    /// Reads a plan that was kept.
    ///
    /// # Errors
    /// It is none, or of another version.
    pub fn read(text: &str) -> Result<Self, PlanError> {
        #[derive(Deserialize)]
        struct Head {
            format: String,
            version: u32,
        }
        // The head first: another version may have other members.
        let head: Head = serde_json::from_str(text).map_err(PlanError::NoPlan)?;
        if head.format != FORMAT {
            return Err(PlanError::Format(head.format));
        }
        if head.version != VERSION {
            return Err(PlanError::Version(head.version));
        }
        serde_json::from_str(text).map_err(PlanError::NoPlan)
    }
}

/// What a host knows of a VM's guest without moving it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Activity {
    /// The VM.
    pub vm: VmId,
    /// What it writes to its disks, bytes a second; none where it does not run here, or its QEMU does not say.
    pub written_per_s: Option<f64>,
    /// The profile that is nearest to the time of day that was asked for, if there is one here.
    pub profile: Option<Profile>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan() -> serde_json::Value {
        serde_json::json!({
            "format": FORMAT, "version": VERSION, "site": "a", "made_unix_s": 1, "begins_unix_s": 1, "deadline_s": 600.0, "vms": 1,
            "surely": 0, "in_time": 1, "late": 0, "at_most": 1, "end_s": {"lower": 1.0, "likely": 2.0, "upper": 3.0}, "bytes": 5,
            "links": [], "left_out": [], "silent": [],
            "moves": [{
                "vm": "web", "from": "h1", "to": "h2", "site": "b", "strategy": "mirror", "disk": "mirror", "start_s": 0.0,
                "end_s": {"lower": 1.0, "likely": 2.0, "upper": 3.0}, "downtime_ms": {"lower": 1.0, "likely": 2.0, "upper": 3.0},
                "bytes": 5, "in_time": "likely", "model": "assumed"
            }]
        })
    }

    #[test]
    fn a_plan_that_was_kept_comes_back_and_members_that_nobody_knows_are_passed_over() {
        let mut kept = plan();
        kept["moves"][0]["colour"] = "blue".into();
        let read = Evacuation::read(&kept.to_string()).unwrap();
        assert_eq!((read.moves[0].disk, read.moves[0].in_time), (Some(DiskStrategy::Mirror), InTime::Likely));
        assert_eq!(serde_json::to_value(&read).unwrap(), plan());
    }

    #[test]
    fn what_is_no_plan_or_of_another_version_is_refused_with_what_to_do() {
        let said = |text: &str| Evacuation::read(text).unwrap_err().to_string();
        assert!(said("{").contains("--site SITE"));
        let mut other = plan();
        other["version"] = 2.into();
        // Whatever else stands in it.
        other["moves"] = 7.into();
        assert!(said(&other.to_string()).contains("version 2"));
        other["format"] = "tar".into();
        assert!(said(&other.to_string()).contains("`tar`"));
    }
}
