//! What the store holds of VMs and moves.

use godwit_api::Name;
use godwit_api::host::MoveOrder;
use godwit_api::progress::MoveProgress;
use godwit_api::public::Move;
use godwit_api::vm::VmDefinition;
use godwit_units::{Bytes, Generation, Lineage, MoveId};
use serde::{Deserialize, Serialize};

/// A VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmRecord {
    /// What it is, as its node resolved it.
    pub definition: VmDefinition,
    /// The host that owns it, as last heard.
    pub host: Name,
    /// As last heard.
    pub lineage: Lineage,
    /// As last heard.
    pub generation: Generation,
    /// Whether it is wholly there.
    pub life: Life,
    /// Its owner has changed, and not all its gateways have been told so yet.
    #[serde(default)]
    pub gateways_due: bool,
    /// Whoever created it wants it started, and it was not yet.
    #[serde(default)]
    pub start_due: bool,
    /// The trust domain that it belongs to; none: the deployment itself.
    #[serde(default)]
    pub domain: Option<Name>,
    /// Somebody has promoted its pre-caches' images: where, and why.
    #[serde(default)]
    pub promoted: Option<Claim>,
}

/// Whether a VM is wholly there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Life {
    /// Its node may know it already. After a restart of the controller it is taken back.
    Creating,
    /// It is.
    Ready,
    /// Being taken away everywhere, until that has succeeded.
    Deleting,
}

/// A move.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MoveRecord {
    /// What the source's node is told.
    pub order: MoveOrder,
    /// The VM's name.
    pub vm: Name,
    /// The host that it leaves.
    pub from: Name,
    /// Lineage and generation when it was ordered: the destination has the VM when it says more than that.
    pub owner: (Lineage, Generation),
    /// When it was ordered, microseconds since 1970.
    pub ordered_unix_us: u64,
    /// RAM.
    pub memory: Bytes,
    /// All disks.
    pub disks: Bytes,
    /// Where the saga is.
    pub step: Step,
    /// Somebody wants it cancelled.
    pub cancel: bool,
    /// As last stored: at each step, and at the end.
    pub progress: MoveProgress,
    /// Somebody has claimed the VM for one of the two hosts.
    #[serde(default)]
    pub claim: Option<Claim>,
    /// The VM has arrived, and something else is wanted of it while blocks of its disks still follow.
    #[serde(default)]
    pub superseded: bool,
    /// It was ordered together with others, and waits for its turn behind this one.
    #[serde(default)]
    pub after: Option<MoveId>,
    /// When that turn came, microseconds since 1970: what went before it has nothing to do with its own time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub turn_unix_us: Option<u64>,
    /// What was foretold of it, by the way that was ordered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prediction: Option<godwit_api::predict::Foretold>,
    /// Volumes that are to lie on devices of the destination.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub place: Vec<godwit_api::vm::Placement>,
}

/// That somebody has claimed a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Claim {
    /// The host that is to have it.
    pub host: Name,
    /// The host that is lost.
    pub lost: Name,
    /// How that is kept from running it, as they said.
    pub fenced: String,
    /// The newest lineage that was known then.
    pub newest: Lineage,
}

/// Where a move's saga is. Each step is stored before it is begun, and can be begun again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Step {
    /// The source's node is being told; it may know already.
    Begin,
    /// The source's node knows; the nodes are watched.
    Observe,
    /// The destination has the VM: records and gateways follow. Watched until the source's node has finished, too.
    Finish,
    /// Over.
    Ended,
}

impl MoveRecord {
    /// Its number.
    #[must_use]
    pub fn id(&self) -> MoveId {
        self.order.id
    }

    /// As people see it.
    #[must_use]
    pub fn public(&self) -> Move {
        Move {
            id: self.order.id,
            vm: self.vm.clone(),
            from: self.from.clone(),
            to: self.order.to.name.clone(),
            disk: self.order.disk,
            ordered_unix_us: self.ordered_unix_us,
            progress: self.progress.clone(),
            memory: self.memory,
            disks: self.disks,
            after: self.after.filter(|_| self.step == Step::Begin),
            prediction: self.prediction.clone(),
        }
    }
}
