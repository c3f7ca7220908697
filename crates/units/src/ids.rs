//! The names of things, and the numbers that order a VM's owners and a volume's writes.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A virtual machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(transparent)]
pub struct VmId(pub u64);

/// An order to move a VM. The controller may use one id again for a retry, so it names an attempt only together with
/// the generation; see `handoff::Ticket`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(transparent)]
pub struct MoveId(pub u64);

/// Counts a VM's owners within a [`Lineage`]. A hand-off goes from g to g+1; one taken back after the seal ends at g+2,
/// at the source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(transparent)]
pub struct Generation(pub u64);

/// Counts the times that an operator's claim overrode the protocol. Generations start afresh in each lineage, so two of
/// them compare only within one lineage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(transparent)]
pub struct Lineage(pub u64);

impl Generation {
    /// The first owner of a lineage.
    pub const FIRST: Self = Self(1);

    /// The generation after this one. A counter of 64 bits does not run out in the life of a VM.
    #[must_use]
    pub const fn next(self) -> Self {
        Self(self.0.saturating_add(1))
    }
}

impl Lineage {
    /// The lineage that a VM is created in.
    pub const FIRST: Self = Self(0);

    /// The lineage that a claim starts.
    #[must_use]
    pub const fn next(self) -> Self {
        Self(self.0.saturating_add(1))
    }
}

/// A virtual disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(transparent)]
pub struct VolumeId(pub u64);

/// A numbered interval of writes to a volume, within one generation of its owner.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(transparent)]
pub struct Epoch(pub u32);

/// A block of a volume, counted from its start. Blocks are 4 KiB.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(transparent)]
pub struct BlockIndex(pub u64);
