//! What a node remembers about a VM when everything else is gone: one record, overwritten durably.

use crate::ids::Ticket;
use godwit_units::{Generation, Lineage, MoveId, VmId};
use serde::{Deserialize, Serialize};

/// That a node owns a VM, and may run it without asking anybody.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Owner {
    /// The VM.
    pub vm: VmId,
    /// The lineage it is owned in.
    pub lineage: Lineage,
    /// The generation it is owned as.
    pub generation: Generation,
    /// The last move begun from this generation: it and those below it are used up.
    pub last: Option<MoveId>,
    /// Whether a QEMU found paused on this host may be continued. Stays in the record until the next move begins, so
    /// that a restart between claim and boot does not forget it.
    pub ram: Ram,
}

/// What a paused QEMU on the owner's host is worth.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Ram {
    /// Its RAM belongs to the volumes as they are.
    Current,
    /// The VM may have run elsewhere since: it must be booted from its volumes.
    Stale,
}

impl Owner {
    /// The owner of a VM that was never moved.
    #[must_use]
    pub const fn first(vm: VmId) -> Self {
        Self { vm, lineage: Lineage::FIRST, generation: Generation::FIRST, last: None, ram: Ram::Current }
    }

    /// Who owns the VM after a claim that overrides `lineage`.
    #[must_use]
    pub const fn claimed(vm: VmId, lineage: Lineage, ram: Ram) -> Self {
        Self { vm, lineage: lineage.next(), generation: Generation::FIRST, last: None, ram }
    }

    /// The owner after the hand-off of `ticket`: the destination.
    #[must_use]
    pub const fn after(ticket: Ticket) -> Self {
        Self { vm: ticket.vm, lineage: ticket.lineage, generation: ticket.generation, last: None, ram: Ram::Current }
    }

    /// The owner after the hand-off of `ticket` was taken back: the source, one generation further than the
    /// destination would have been, so that its announcements outrank any that the destination made.
    #[must_use]
    pub const fn after_undoing(ticket: Ticket) -> Self {
        Self {
            vm: ticket.vm,
            lineage: ticket.lineage,
            generation: ticket.generation.next(),
            last: None,
            ram: Ram::Current,
        }
    }

    /// The ticket that the move `mv` would get now.
    #[must_use]
    pub const fn ticket(&self, mv: MoveId) -> Ticket {
        Ticket { vm: self.vm, lineage: self.lineage, generation: self.generation.next(), mv }
    }
}

/// The one durable record that a node has for a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Record {
    /// This node owns the VM and may run it.
    Owned(Owner),
    /// Source: the VM is the destination's for the taking; this node must not run it until that is refused or returned.
    Sealed(Ticket),
    /// Source: the destination has started; what this node held of the VM's execution is gone.
    Released(Ticket),
    /// Destination: a place is reserved; nothing may run here yet.
    Staged(Ticket),
    /// Destination: everything but pages of memory is here. What the source has not ended by itself is not refused any more.
    Prepared(Ticket),
    /// Destination: the VM is ours; not started, so that it can still be returned.
    Granted(Ticket),
    /// Destination: the VM runs, or ran, here, and pages of its memory were still at the source. There is no way back by this ticket.
    Draining(Ticket),
    /// Destination: the VM runs, or ran, here. There is no way back by this ticket.
    Started(Ticket),
    /// Destination: never to be granted.
    Refused(Ticket),
    /// Destination: was granted, never started, its RAM is lost; the source's copy is the VM again.
    Returned(Ticket),
    /// A claim at another node began `lineage`: nothing of the lineages before it may run here.
    Outranked {
        /// The VM.
        vm: VmId,
        /// The lineage of the claim.
        lineage: Lineage,
    },
}

impl Record {
    /// The lineage that the record speaks of.
    #[must_use]
    pub const fn lineage(&self) -> Lineage {
        match self {
            Self::Owned(owner) => owner.lineage,
            Self::Sealed(t)
            | Self::Released(t)
            | Self::Staged(t)
            | Self::Prepared(t)
            | Self::Granted(t)
            | Self::Draining(t)
            | Self::Started(t)
            | Self::Refused(t)
            | Self::Returned(t) => t.lineage,
            Self::Outranked { lineage, .. } => *lineage,
        }
    }

    /// Whether this node has the VM, or may be given it or take it back: what it has of that may be the only truth.
    #[must_use]
    pub const fn may_have_the_vm(&self) -> bool {
        matches!(
            self,
            Self::Owned(_)
                | Self::Sealed(_)
                | Self::Prepared(_)
                | Self::Granted(_)
                | Self::Draining(_)
                | Self::Started(_)
        )
    }

    /// What has to be written over this record before the fence around a node that lost to a claim is lifted, if the
    /// record is of an older lineage than the claim's. *Every* such record: one that waits for the peer's word could
    /// be given it by a message sent before the claim, and delayed.
    #[must_use]
    pub fn overridden_by(&self, vm: VmId, claim: Lineage) -> Option<Self> {
        (self.lineage() < claim).then_some(Self::Outranked { vm, lineage: claim })
    }
}

/// Where a node keeps its records, one per VM.
///
/// `store` returns when the record will survive a power loss. A crash on the way leaves the old record or the new one,
/// never neither and never a mixture: two slots with checksums, or a rename after `fdatasync`. After an error nobody
/// knows which of the two is on the disk, so the caller must not carry on with either: it ends the machine and recovers
/// from `load`, as after a crash.
pub trait Ledger {
    /// What can go wrong with the medium.
    type Error;

    /// The VM's last durable record, if it ever had one.
    ///
    /// # Errors
    /// When the medium cannot be read. That is not the same as having no record, and must never be taken for it.
    fn load(&self, vm: VmId) -> Result<Option<Record>, Self::Error>;

    /// Replaces the VM's record, durably.
    ///
    /// # Errors
    /// When the medium failed; see above for what that means.
    fn store(&mut self, vm: VmId, record: &Record) -> Result<(), Self::Error>;
}
