//! The controller's API: what people and programs ask of Godwit.
//!
//! | request | body -> answer |
//! |---|---|
//! | `GET /v1/sites`, `POST /v1/sites`, `DELETE /v1/sites/{site}` | [`Site`] |
//! | `POST /v1/sites/{site}/evacuation-plan` | [`PlanEvacuation`](crate::evacuation::PlanEvacuation) -> [`Evacuation`](crate::evacuation::Evacuation) |
//! | `GET /v1/hosts`, `POST /v1/hosts`, `GET`, `DELETE /v1/hosts/{host}` | [`AddHost`] -> [`Host`] |
//! | `GET /v1/components`, `POST`, `DELETE /v1/components/{component}` | [`Component`] |
//! | `GET /v1/vms`, `POST`, `GET`, `DELETE /v1/vms/{vm}` | [`CreateVm`] -> [`Vm`] |
//! | `POST /v1/vms/{vm}/start`, `/stop`, `/monitor` | as the node's |
//! | `GET /v1/volumes` | [`Volume`] |
//! | `GET /v1/precaches`, `POST`, `DELETE /v1/precaches/{volume}/{to}` | [`StartPrecache`](crate::precache::StartPrecache) -> [`Precache`](crate::precache::Precache) |
//! | `GET /v1/wires` | [`Wire`]: to components |
//! | `GET`, `POST /v1/extenders`, `GET /v1/extenders/{a}/{b}`, `POST .../rotate`, `.../disconnect` | [`ConnectExtender`](crate::extender::ConnectExtender), [`DisconnectExtender`](crate::extender::DisconnectExtender) -> [`Extender`](crate::extender::Extender) |
//! | `GET /v1/port-wires`, `POST`, `GET`, `DELETE /v1/port-wires/{wire}` | [`ConnectWire`](crate::wire::ConnectWire) -> [`PortWire`](crate::wire::PortWire): between ports |
//! | `POST /v1/port-wires/{wire}/capture` | [`CaptureWire`](crate::capture::CaptureWire) -> [`HostCapture`](crate::capture::HostCapture)s |
//! | `GET /v1/network` | [`HostFinding`](crate::network::HostFinding) |
//! | `GET /v1/orphans`, `DELETE /v1/orphans/{host}/{orphan}` | [`JudgedOrphan`](crate::orphan::JudgedOrphan) |
//! | `POST /v1/moves` | [`StartMove`] -> [`Move`], or with `dry_run` -> [`DryRun`] |
//! | `GET /v1/moves`, `GET /v1/moves/{id}` | [`Move`] |
//! | `POST /v1/moves/{id}/cancel`, `/limit` | -> [`Move`] |
//! | `POST /v1/moves/{id}/retry` | orders the same move again -> [`Move`] |
//! | `POST /v1/moves/{id}/resolve` | [`ResolveMove`] -> [`Move`] |

use crate::host::{Blocker, DiskStrategy, HostFacts, Ownership, RunState};
use crate::name::Name;
use crate::progress::MoveProgress;
use crate::vm::{ComponentSpec, Placement, VmSpec};
use godwit_units::{BitRate, Bytes, Generation, Lineage, MaxDrain, MoveId, Policy, VmId, VolumeId};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;

/// Takes the VM of a move that waits for a host that is lost for good.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ResolveMove {
    /// The host or site that is to have the VM: the move's source or its destination.
    pub claim: Name,
    /// How the other host is kept from running the VM: powered off, cut from storage and network. Kept in the record and the log.
    #[schemars(regex(pattern = r"^\s*\S[\s\S]{6,}\S\s*$"))]
    pub fenced: String,
    /// Whether somebody knows that the VM did not run on the other host since it stopped.
    #[serde(default)]
    pub peer_did_not_run: bool,
}

/// A site.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Site {
    /// Its name.
    pub name: Name,
}

/// Makes a host known.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct AddHost {
    /// Its name, as in its certificate.
    pub name: Name,
    /// The site that it is in; must exist.
    pub site: Name,
    /// Where its node's API listens.
    #[schemars(schema_with = "crate::patterns::socket")]
    pub api: SocketAddr,
}

/// A host, and what it says of itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Host {
    /// Its name.
    pub name: Name,
    /// Its site.
    pub site: Name,
    /// Where its node's API listens.
    #[schemars(schema_with = "crate::patterns::socket")]
    pub api: SocketAddr,
    /// What it says of itself; none while it cannot be reached.
    pub facts: Option<HostFacts>,
    /// Why it cannot be reached.
    pub error: Option<String>,
}

/// A component that wires lead to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Component {
    /// Its name.
    pub name: Name,
    /// What it is.
    pub kind: ComponentSpec,
}

/// Creates a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateVm {
    /// Its name.
    pub name: Name,
    /// The host to create it on, or a site with room: the first host of that name, else of that site.
    pub at: Name,
    /// What it is made of.
    pub spec: VmSpec,
    /// Whether to start it at once.
    #[serde(default)]
    pub start: bool,
}

/// A VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Vm {
    /// Its number.
    pub id: VmId,
    /// Its name.
    pub name: Name,
    /// The host that owns it, as last heard.
    pub host: Name,
    /// That host's site.
    pub site: Name,
    /// What it is made of.
    pub spec: VmSpec,
    /// What its host says of it; none while that cannot be reached.
    pub run: Option<RunState>,
    /// As [`Vm::run`].
    pub ownership: Option<Ownership>,
    /// Its lineage.
    pub lineage: Lineage,
    /// Its generation.
    pub generation: Generation,
    /// The move under way.
    pub mv: Option<MoveId>,
    /// What of its disks is not on its host yet (post-copy).
    #[serde(default)]
    pub absent: Bytes,
    /// The hosts that have it, and are needed until it has come.
    #[serde(default)]
    pub holders: Vec<Name>,
}

/// A volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Volume {
    /// Its number.
    pub id: VolumeId,
    /// Its name.
    pub name: Name,
    /// Its size.
    pub size: Bytes,
    /// The VM that it belongs to.
    pub vm: Name,
    /// Hosts that hold a replica; the first is the primary.
    pub replicas: Vec<Name>,
}

/// A wire.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Wire {
    /// Its number.
    pub id: u32,
    /// The VM.
    pub vm: Name,
    /// Which of its interfaces, counted from 0.
    pub nic: u32,
    /// What it leads to.
    pub component: Name,
    /// The host that the VM's end is on.
    pub host: Name,
}

/// Moves a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct StartMove {
    /// The VM.
    pub vm: Name,
    /// A host, or a site: its first host without blockers.
    pub to: Name,
    /// How disks travel.
    #[serde(default)]
    pub disk: DiskStrategy,
    /// At most so much on the link.
    #[serde(default)]
    #[schemars(schema_with = "crate::patterns::limit")]
    pub limit: Option<BitRate>,
    /// What it is to spare: when the guest is stopped, and whether the move is given up rather.
    #[serde(default)]
    pub policy: Policy,
    /// By how much, in percent, the guest's CPUs may be slowed when it writes faster than the link carries. None: not at all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 99))]
    pub throttle: Option<u8>,
    /// Whether a part of memory may follow the guest (post-copy) where pre-copy does not converge, and for how long at most, as far as that
    /// can be foreseen. A crash of the source's host meanwhile loses the memory (`memory-lost`). None: never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_postcopy: Option<MaxDrain>,
    /// CPUs to have at the destination, if more than now.
    #[serde(default)]
    #[schemars(range(min = 1, max = 1024))]
    pub vcpus: Option<u32>,
    /// Whether the host that it leaves keeps its memory for a day, sealed under a key that goes with the VM: coming back is less then.
    #[serde(default)]
    pub keep_checkpoint: bool,
    /// Volumes that are to lie on block devices there. Each is made before anything is copied, and stays if the move fails, for the next try. Only
    /// for admins of the deployment.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    pub place: Vec<Placement>,
    /// Only check.
    #[serde(default)]
    pub dry_run: bool,
}

/// Moves in one answer, at most, and where no number is asked for.
pub const MOST_LISTED: usize = 1000;

/// Which moves are to be listed, the newest first.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct WantedMoves {
    /// Of this VM only.
    #[serde(default)]
    pub vm: Option<Name>,
    /// At most so many; no more than [`MOST_LISTED`] in any case.
    #[serde(default)]
    pub limit: Option<usize>,
}

/// Moves several VMs to one place, one after another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct MoveTogether {
    /// The VMs. The one that is foretold to be over soonest goes first, or the smallest memory; the next begins when the one before runs at its destination, or has failed.
    #[schemars(length(min = 1, max = 64))]
    pub vms: Vec<Name>,
    /// A host, or a site: for each VM its first host without blockers.
    pub to: Name,
    /// How disks travel.
    #[serde(default)]
    pub disk: DiskStrategy,
    /// At most so much on the link.
    #[serde(default)]
    #[schemars(schema_with = "crate::patterns::limit")]
    pub limit: Option<BitRate>,
    /// What each is to spare.
    #[serde(default)]
    pub policy: Policy,
    /// As [`StartMove::throttle`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 99))]
    pub throttle: Option<u8>,
    /// As [`StartMove::memory_postcopy`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_postcopy: Option<MaxDrain>,
    /// As [`StartMove::keep_checkpoint`].
    #[serde(default)]
    pub keep_checkpoint: bool,
    /// Only check.
    #[serde(default)]
    pub dry_run: bool,
}

/// What a move would meet with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct DryRun {
    /// The VM.
    pub vm: Name,
    /// Where it is.
    pub from: Name,
    /// The host that it would go to.
    pub to: Name,
    /// What is in the way; empty: the move can begin.
    pub blockers: Vec<Blocker>,
}

/// A move.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Move {
    /// Its number.
    pub id: MoveId,
    /// The VM.
    pub vm: Name,
    /// The host that it leaves.
    pub from: Name,
    /// The host that it goes to.
    pub to: Name,
    /// How disks travel.
    pub disk: DiskStrategy,
    /// When it was ordered: microseconds since 1970.
    pub ordered_unix_us: u64,
    /// How it stands: the source's view, with what only the destination knows filled in.
    pub progress: MoveProgress,
    /// Memory and disk sizes, for a sense of proportion.
    pub memory: Bytes,
    /// As [`Move::memory`].
    pub disks: Bytes,
    /// It was ordered together with others, and waits for its turn behind this one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<MoveId>,
    /// What was foretold of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prediction: Option<crate::predict::Foretold>,
}
