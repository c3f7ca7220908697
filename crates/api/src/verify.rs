//! Scrub: whether the replicas of a volume hold what was written, found by comparing digests.
//!
//! A whole volume takes minutes or hours. So it is asked for a slice at a time, each a few seconds long, and each says where the next one
//! begins: nothing has to be remembered anywhere, and who asks no more has ended it.

use crate::host::PeerHost;
use crate::name::Name;
use godwit_units::{Bytes, Generation, Lineage, VmId, VolumeId};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What a scrub reads of each disk in a second, unless somebody says otherwise: a tenth of what a slow solid-state disk carries.
pub const RATE: Bytes = Bytes(32 << 20);

/// The least.
pub const LEAST_RATE: Bytes = Bytes(1 << 20);

const fn rate() -> Bytes {
    RATE
}

/// Wants the next slice of a volume verified.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct VerifyVolume {
    /// Where to begin: 0, or `next` of the last answer.
    #[serde(default)]
    pub from: u64,
    /// Compare with the replicas at this site, or on this host, only.
    #[serde(default)]
    pub site: Option<Name>,
    /// Whether what can be told to be rotten is overwritten with what is right.
    #[serde(default)]
    pub repair: bool,
    /// The site or host whose replica is to be believed where nothing tells which one is right. Only with `repair`.
    #[serde(default)]
    pub believe: Option<Name>,
    /// How much of each disk is read in a second, at the most.
    #[serde(default = "rate")]
    #[schemars(range(min = 1_048_576))]
    pub rate: Bytes,
}

impl Default for VerifyVolume {
    fn default() -> Self {
        Self { from: 0, site: None, repair: false, believe: None, rate: RATE }
    }
}

/// A slice of a volume that was verified.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Verified {
    /// Where the next slice begins; none: all of the volume is verified.
    pub next: Option<u64>,
    /// The replicas that were compared, the one of the host that led first.
    pub holders: Vec<VerifiedHolder>,
    /// What at least two of them have, and all of those alike.
    pub alike: Bytes,
    /// What only one has as it is there, and nobody wrote down what it should be: the others lag behind. Nothing is known of it.
    pub behind: Bytes,
    /// What could not be compared: written each time it was looked at, or too late for stamps to prove anything, as all is after a promotion.
    pub unsettled: Bytes,
    /// What should be alike, and is not.
    pub findings: Vec<Rot>,
}

/// A replica that was compared.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct VerifiedHolder {
    /// Its host.
    pub host: Name,
    /// Why it was left out.
    pub error: Option<String>,
}

/// What a replica holds of blocks that should be alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum CopyState {
    /// What was written.
    Right,
    /// Something else.
    Rotten,
    /// Its disk cannot read them.
    Unreadable,
    /// Something else than others; nobody can tell who is right.
    Differs,
    /// An earlier state, or a later one.
    Other,
}

impl CopyState {
    /// For people.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Right => "right",
            Self::Rotten => "rotten",
            Self::Unreadable => "unreadable",
            Self::Differs => "differs",
            Self::Other => "other",
        }
    }
}

/// What a replica holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct HeldCopy {
    /// Its host.
    pub host: Name,
    /// How it is.
    pub state: CopyState,
}

/// What told which replica is right.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ToldBy {
    /// A digest that was written down when all replicas agreed.
    Record,
    /// All that can be read are the same.
    Readable,
    /// Most are the same, and at least two.
    Majority,
    /// Nothing: nobody can tell.
    Nothing,
}

/// Blocks of 4096 bytes, one after the other, that should be alike at these replicas, and are not.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Rot {
    /// The first one.
    pub block: u64,
    /// How many.
    pub blocks: u64,
    /// What each replica holds.
    pub copies: Vec<HeldCopy>,
    /// What tells which one is right.
    pub told_by: ToldBy,
    /// Whether every replica has what is right now.
    pub repaired: bool,
    /// Why not, where it was tried.
    pub error: Option<String>,
}

/// What a node is to verify, of a volume that it holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VerifyOrder {
    /// The VM.
    pub vm: VmId,
    /// Its lineage, as the controller knows it.
    pub lineage: Lineage,
    /// Its generation.
    pub generation: Generation,
    /// The volume.
    pub volume: VolumeId,
    /// Its size.
    pub size: Bytes,
    /// The other holders, each with what shows it that this was ordered.
    pub others: Vec<VerifyPeer>,
    /// The first extent.
    pub from: u64,
    /// Whether to repair.
    pub repair: bool,
    /// The host to be believed where nothing tells.
    pub believe: Option<Name>,
    /// How much of each disk is read in a second, at the most.
    pub rate: Bytes,
}

/// Another holder.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VerifyPeer {
    /// Where it is.
    pub peer: PeerHost,
    /// What shows it that this was ordered.
    pub capability: godwit_trust::SignedCapability,
}

/// What a capability to verify has in place of a definition. Another one than a pre-cache's: to read a digest, or a block, is more than
/// to bring one.
#[must_use]
pub fn digest(volume: VolumeId, size: Bytes) -> [u8; 32] {
    *blake3::hash(format!("godwit verify of volume {} with {} bytes", volume.0, size.0).as_bytes()).as_bytes()
}
