//! The names of things: VMs, moves, and the numbers that order a VM's owners.

use serde::{Deserialize, Serialize};
use std::fmt;

/// A virtual machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct VmId(pub u64);

/// An order to move a VM. The controller may use one id again for a retry, so it names an attempt only together with
/// the generation; see [`Ticket`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct MoveId(pub u64);

/// Counts a VM's owners within a [`Lineage`]. A hand-off goes from g to g+1; one taken back after the seal ends at g+2,
/// at the source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Generation(pub u64);

/// Counts the times that an operator's claim overrode the protocol. Generations start afresh in each lineage, so two of
/// them compare only within one lineage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
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

/// One attempt to hand a VM over: what every message is about and every record of the hand-off is for.
///
/// Tickets are used once: neither side begins an attempt whose ticket is not greater than every one it has seen. So
/// an answer to one attempt can never be taken for an answer to another.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Ticket {
    /// The VM.
    pub vm: VmId,
    /// The lineage that the attempt belongs to.
    pub lineage: Lineage,
    /// The generation that the destination will own: one more than the source's.
    pub generation: Generation,
    /// The order that caused the attempt.
    pub mv: MoveId,
}

impl fmt::Display for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "vm{}/l{}/g{}/m{}", self.vm.0, self.lineage.0, self.generation.0, self.mv.0)
    }
}

/// Tickets stand in every line of a trace, so they are short there too.
impl fmt::Debug for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
