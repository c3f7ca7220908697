//! Things on a host that nobody there looks after: what a crash or a lost host has left behind, and what is kept on purpose
//! and may go. The host says what it finds ([`Orphan`]), the controller whether it may be removed ([`JudgedOrphan`]).

use crate::name::Name;
use godwit_units::{Bytes, Generation, Lineage, VmId};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum OrphanKind {
    /// A QEMU of a VM that this host does not know.
    Qemu,
    /// A volume that belongs to no VM of this host.
    Volume,
    /// An interface of a wire that no VM of this host has.
    Interface,
    /// The gateway's end of a wire. A gateway cannot know whose it is; the controller shows it when it is nobody's.
    Port,
    /// Rules about who may send into a tunnel that is not there.
    Rules,
    /// A record of ownership without a VM.
    Record,
    /// What is left here of a VM that is another host's: its replicas, its definition, half a copy.
    Replica,
    /// A VM of this host that cannot be read, and with which nothing is done.
    Quarantined,
}

/// Something that a host finds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Orphan {
    /// What it is called, such as `volume-7`.
    pub id: String,
    /// What it is.
    pub kind: OrphanKind,
    /// Whose it is, where that is known.
    pub vm: Option<VmId>,
    /// The number of the volume, or of the wire, that it is.
    pub number: Option<u64>,
    /// What the host can say about it.
    pub what: String,
    /// What it takes up.
    pub bytes: Option<Bytes>,
    /// By what right it was here last, where that is known.
    pub owner: Option<(Lineage, Generation)>,
    /// Whether blocks of it were handed on before they had left, and the owner has not said that it has them.
    #[serde(default)]
    pub lent: bool,
    /// For how long this host has seen it as nobody's, since its node was started.
    pub seen_s: u64,
    /// Why it may be the truth about a VM, where the host has a reason to think so.
    pub may_be_truth: Option<String>,
}

/// What the controller says about it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct JudgedOrphan {
    /// Where it is.
    pub host: Name,
    /// What it is.
    #[serde(flatten)]
    pub orphan: Orphan,
    /// Whether it may be removed.
    pub removable: bool,
    /// Whether it is removed without anybody asking for it.
    pub by_itself: bool,
    /// Why, or why not.
    pub why: String,
}
