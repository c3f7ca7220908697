//! What names one attempt.

use godwit_units::{Generation, Lineage, MoveId, VmId};
use serde::{Deserialize, Serialize};
use std::fmt;

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
