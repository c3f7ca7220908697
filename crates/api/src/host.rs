//! The node's API: what the controller asks of a host.
//!
//! | request | body -> answer |
//! |---|---|
//! | `GET /v1/host` | [`HostFacts`] |
//! | `GET /v1/vms`, `GET /v1/vms/{id}` | [`LocalVm`] |
//! | `PUT /v1/vms/{id}` | [`VmDefinition`] -> [`LocalVm`]; creates volumes and endpoints, does not start. The answer's definition has machine type and boot files resolved |
//! | `DELETE /v1/vms/{id}` | ends it, removes replicas and endpoints; refused while a hand-off is open |
//! | `POST /v1/vms/{id}/start`, `/stop`, `/monitor` | `{}`, [`StopVm`], any QMP command -> its answer |
//! | `GET /v1/vms/{id}/departure` | -> [`CheckReport`]: what would keep the VM from leaving, as its QEMU says now |
//! | `GET /v1/vms/{id}/packs` | -> [`Packs`]: by how much its disks pack, by a few pieces of them |
//! | `POST /v1/vms/{id}/claim` | [`ClaimVm`]: this host takes the VM, in a new lineage |
//! | `POST /v1/vms/{id}/promote` | [`PromoteVm`](crate::promote::PromoteVm) -> [`LocalPromotion`](crate::promote::LocalPromotion): as a claim, from the images of pre-caches |
//! | `POST /v1/vms/{id}/outrank` | [`OutrankVm`]: a claim elsewhere has; what is here pauses |
//! | `POST /v1/wires/{wire}/capture` | [`CaptureHere`](crate::capture::CaptureHere) -> [`Capture`](crate::capture::Capture) |
//! | `GET /v1/network` | [`NetFinding`](crate::network::NetFinding)s: what is wrong with the network here |
//! | `GET /v1/orphans`, `DELETE /v1/orphans/{id}` | [`Orphan`](crate::orphan::Orphan)s: what is nobody's here |
//! | `GET /v1/activity?at_unix_s=TIME` | [`Activity`](crate::evacuation::Activity) of each VM: what it writes, and its profile |
//! | `POST /v1/check` | [`CheckVm`] -> [`CheckReport`]: what would keep the VM from running here |
//! | `POST /v1/moves` | [`MoveOrder`] -> [`LocalMove`]; the source's node drives the move from here on |
//! | `GET /v1/moves/{id}` | [`LocalMove`] |
//! | `POST /v1/moves/{id}/cancel` | -> [`LocalMove`] |
//! | `POST /v1/moves/{id}/limit` | [`SetLimit`] -> [`LocalMove`] |
//! | `POST /v1/moves/{id}/stop` | ends pre-copy at the next round -> [`LocalMove`] |
//! | `PUT /v1/revocations` | [`Revocations`](godwit_trust::Revocations): whose certificates are void |
//! | `PUT /v1/precaches` | all [`PrecacheOrder`](crate::precache::PrecacheOrder)s of this host -> [`LocalPrecache`](crate::precache::LocalPrecache)s |
//! | `POST /v1/volumes/{id}/verify` | [`VerifyOrder`](crate::verify::VerifyOrder) -> [`Verified`](crate::verify::Verified): a slice of it |
//! | `PUT /v1/volumes/{id}/place` | [`PlaceVolume`]: makes its replica on a block device, before a move brings it |
//! | `POST`, `GET`, `DELETE /v1/volumes/{id}/image` | [`ImageOrder`](crate::image::ImageOrder) -> [`ImageCopy`](crate::image::ImageCopy): begins, shows and ends an import or export |
//! | `GET /v1/components`, `GET`, `PUT`, `DELETE /v1/components/{id}` | [`ComponentDefinition`](crate::component::ComponentDefinition) -> [`LocalComponent`](crate::component::LocalComponent): made, or given another file |
//! | `POST /v1/components/{id}/move` | [`ComponentOrder`](crate::component::ComponentOrder) -> [`LocalComponent`](crate::component::LocalComponent) |
//! | `POST /v1/components/{id}/claim`, `/outrank` | [`ClaimOrder`](crate::component::ClaimOrder) -> [`LocalComponent`](crate::component::LocalComponent), [`OutrankVm`]: as a VM's |
//! | `PUT`, `GET`, `DELETE /v1/wires/{wire}`, `GET /v1/wires` | [`WireOrder`](crate::wire::WireOrder) -> [`LocalWire`](crate::wire::LocalWire): a wire between ports |
//! | `GET`, `PUT /v1/extenders` | all [`ExtenderOrders`](crate::extender::ExtenderOrders) of this host -> [`LocalExtenders`](crate::extender::LocalExtenders) |
//! | `PUT`, `DELETE /v1/gateways/{wire}` | [`GatewayPort`]: attaches or re-points a wire's end on a gateway |

use crate::name::Name;
use crate::progress::MoveProgress;
use crate::vm::{Placement, VmDefinition};
use godwit_units::{BitRate, Bytes, Generation, Lineage, MaxDrain, MoveId, Policy, VmId, VolumeId};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::net::{IpAddr, SocketAddr};

/// What a host has and can do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct HostFacts {
    /// Its name, as in its certificate.
    pub name: Name,
    /// Version of the node.
    pub version: String,
    /// QEMU's version.
    pub qemu: String,
    /// Machine types that it can run.
    pub machines: Vec<String>,
    /// Whether guests run by hardware.
    pub kvm: bool,
    /// Memory that could be given to guests.
    pub memory_free: Bytes,
    /// Room for replicas.
    pub disk_free: Bytes,
    /// When its certificate ends, seconds since 1970.
    pub certificate_expires_unix_s: u64,
    /// Whether it renews its certificate by itself, and has not failed to.
    #[serde(default)]
    pub certificate_renews: bool,
    /// The number of the list of revocations that it goes by.
    #[serde(default)]
    pub revocations: u64,
    /// Where other nodes reach it.
    pub link: LinkAddresses,
    /// Its address for tunnels.
    #[schemars(schema_with = "crate::patterns::ip")]
    pub underlay: IpAddr,
    /// That it can carry extenders.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub extender: Option<crate::extender::ExtenderOffer>,
}

/// Where a node's link listens, by lane; UDP.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct LinkAddresses {
    /// Hand-off, orders.
    #[schemars(schema_with = "crate::patterns::socket")]
    pub control: SocketAddr,
    /// Blocks.
    #[schemars(schema_with = "crate::patterns::socket")]
    pub disk: SocketAddr,
    /// Memory.
    #[schemars(schema_with = "crate::patterns::socket")]
    pub memory: SocketAddr,
}

/// A VM on a host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct LocalVm {
    /// What it is.
    pub definition: VmDefinition,
    /// Whether this host owns it, may run it, or does not know.
    pub ownership: Ownership,
    /// Its lineage here.
    pub lineage: Lineage,
    /// Its generation here.
    pub generation: Generation,
    /// What its QEMU does.
    pub run: RunState,
    /// The move that it takes part in here, if one is under way.
    pub mv: Option<MoveId>,
    /// What its disks take up on this host.
    pub allocated: Bytes,
    /// What of them is not here yet (post-copy).
    #[serde(default)]
    pub absent: Bytes,
    /// The hosts that have what is absent.
    #[serde(default)]
    pub holders: Vec<Name>,
    /// Volumes that went from here before their blocks did: what is here is needed.
    #[serde(default)]
    pub lent: Vec<VolumeId>,
}

/// Whose a VM is, as one host sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Ownership {
    /// This host's.
    Here,
    /// Being handed over; this host would resume it by itself if that failed now.
    Pausing,
    /// Paused; whether it runs at the peer is not known here.
    WaitsForPeer,
    /// Another host's; what is here is a replica, or nothing.
    Elsewhere,
}

/// What a VM's QEMU does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum RunState {
    /// No process.
    Off,
    /// vCPUs run.
    Running,
    /// vCPUs stopped.
    Paused,
    /// Receives a migration.
    Incoming,
    /// Its QEMU is there, and its monitor cannot be reached; the node's log says why. Nothing is concluded from that.
    Silent,
}

/// How to stop a VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct StopVm {
    /// Pull the plug instead of pressing the button.
    #[serde(default)]
    pub force: bool,
}

/// Could this VM run here?
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct CheckVm {
    /// The VM.
    pub definition: VmDefinition,
    /// What its replicas will take up at the most, as far as the source knows.
    pub disk: Bytes,
    /// CPUs to plug in on arrival, if more than it has.
    pub vcpus: Option<u32>,
    /// Volumes that are to lie on block devices of this host.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub place: Vec<Placement>,
}

/// Has a volume that is about to come by a move lie on a block device. May be sent again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PlaceVolume {
    /// The VM.
    pub vm: VmId,
    /// The volume.
    pub volume: VolumeId,
    /// Its size.
    pub size: Bytes,
    /// The host that has it.
    pub from: Name,
    /// Its owner's lineage.
    pub lineage: Lineage,
    /// Its owner's generation.
    pub generation: Generation,
    /// Where it is to lie.
    pub place: Placement,
}

/// By how much a VM's disks pack, shared ones apart.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Packs {
    /// What they hold.
    pub held: Bytes,
    /// What of that a link would carry, judged by a few pieces.
    pub wire: Bytes,
}

/// What would keep a VM from running on a host. Empty: nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct CheckReport {
    /// Each with its remedy.
    pub blockers: Vec<Blocker>,
}

/// One thing that would make a move fail.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Blocker {
    /// The host that says so.
    pub host: Name,
    /// The kind, for programs: `memory`, `disk`, `machine`, `cpu`, `device`, `certificate`, `boot-file`, `link`, `gateway`, `vm`.
    pub kind: String,
    /// What is wrong.
    pub message: String,
    /// What to do.
    pub remedy: String,
}

/// What QEMU takes of a host's memory besides its guest's.
pub const QEMU_MEMORY: Bytes = Bytes(64 << 20);

/// How disks travel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum DiskStrategy {
    /// Copied while the guest runs, then mirrored until it stops (CloudNet): each write goes as it is made, and waits only while the other
    /// site is far behind.
    #[default]
    Mirror,
    /// Not before the VM: the destination is told what its disks have to hold, and fetches it when the VM runs there, what the guest asks
    /// for first (xNBD+, vMocity). The hosts that have the blocks are needed until the last one has come.
    Postcopy,
    /// Not at all: they lie on storage that both hosts reach. Refused where one does not. Whatever is ordered, such a disk is never copied.
    Shared,
}

impl DiskStrategy {
    /// As it is written on a command line.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Mirror => "mirror",
            Self::Postcopy => "postcopy",
            Self::Shared => "shared",
        }
    }
}

/// The order to move a VM that is here.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct MoveOrder {
    /// The move's number: greater than any before for this VM.
    pub id: MoveId,
    /// The VM.
    pub vm: VmId,
    /// Where to.
    pub to: PeerHost,
    /// How the disks travel.
    pub disk: DiskStrategy,
    /// At most so much on the link.
    pub limit: Option<BitRate>,
    /// What it is to spare.
    #[serde(default)]
    pub policy: Policy,
    /// How long ago it was ordered when this was sent, or its turn came behind others, in milliseconds: a deadline counts from there.
    #[serde(default)]
    pub ordered_ms_ago: u64,
    /// By how much, in percent, the guest's CPUs may be slowed when it writes faster than the link carries. None: not at all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub throttle: Option<u8>,
    /// For how long at most a part of memory may follow the guest (post-copy) where pre-copy does not converge. None: never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_postcopy: Option<MaxDrain>,
    /// CPUs to have at the destination, if more than now.
    pub vcpus: Option<u32>,
    /// Whether the source's host keeps the guest's memory, sealed, for when it comes back.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub keep_checkpoint: bool,
    /// What shows the other nodes that this was ordered. Signed anew each time that the order is sent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>")]
    pub capability: Option<godwit_trust::SignedCapability>,
}

/// Another host, as far as a node needs to know it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PeerHost {
    /// Its name, as in its certificate.
    pub name: Name,
    /// Where its link listens.
    pub link: LinkAddresses,
    /// Its address for tunnels.
    #[schemars(schema_with = "crate::patterns::ip")]
    pub underlay: IpAddr,
}

/// A move, as one of its two nodes sees it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct LocalMove {
    /// The move.
    pub id: MoveId,
    /// The VM.
    pub vm: VmId,
    /// Which part this host has in it.
    pub role: MoveRole,
    /// How it stands.
    pub progress: MoveProgress,
}

/// A host's part in a move.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum MoveRole {
    /// The VM leaves it.
    Source,
    /// The VM comes to it.
    Destination,
}

/// An operator takes a VM for this host, because the other host of its hand-off is lost.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClaimVm {
    /// How the other host is kept from running the VM, and who vouches for it. Kept in the logs.
    pub fenced: String,
    /// Whether somebody knows that the VM did not run there since it stopped here: then RAM that is here is still good. Else it
    /// is booted from its disks.
    #[serde(default)]
    pub peer_did_not_run: bool,
    /// The newest lineage that is known of: the claim begins one after it.
    pub newest: Lineage,
}

/// A claim elsewhere began this lineage: what is here of older ones pauses, and is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OutrankVm {
    /// The claim's.
    pub lineage: Lineage,
}

/// Changes the limit of a move under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SetLimit {
    /// None lifts it.
    #[serde(default)]
    #[schemars(schema_with = "crate::patterns::limit")]
    pub limit: Option<BitRate>,
}

/// A wire's end on a gateway.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GatewayPort {
    /// The gateway's bridge. Made when it does not exist.
    pub bridge: String,
    /// The host that the VM is on.
    pub remote: IpAddr,
    /// Its name: nobody else may ask for what is behind the port.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<Name>,
    /// The tunnel's number between the two hosts, 24 bits.
    pub vni: u32,
    /// The interface's, bytes.
    #[serde(default = "ethernet")]
    pub mtu: u16,
    /// Orders of an older owner are ignored.
    pub lineage: Lineage,
    /// As the lineage.
    pub generation: Generation,
}

const fn ethernet() -> u16 {
    crate::vm::ETHERNET_MTU
}
