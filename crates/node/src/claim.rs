//! Whether what a host has of a VM is a VM: asked before an operator may claim it there.
//!
//! A claim boots what is here. Whoever owned the VM, or was granted it, had all of its disks; a destination that was still
//! receiving has some blocks of them, which would boot, and be nonsense.

use crate::disk::Disk;
use godwit_api::{ApiError, Problem};
use godwit_handoff::{Record, Ticket};
use std::sync::Arc;

/// What a record says of the disks of its host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holds {
    /// All blocks, as of some moment at which the guest could have lost its power.
    All,
    /// All blocks, if those of this attempt have all come.
    AllOf(Ticket),
    /// Nobody knows.
    Unknown,
}

/// What follows from a record.
#[must_use]
pub const fn holds(record: Option<Record>) -> Holds {
    match record {
        // Granted only when everything was here.
        Some(
            Record::Owned(_)
            | Record::Sealed(_)
            | Record::Released(_)
            | Record::Prepared(_)
            | Record::Granted(_)
            | Record::Draining(_)
            | Record::Started(_)
            | Record::Returned(_),
        ) => Holds::All,
        Some(Record::Staged(ticket) | Record::Refused(ticket)) => Holds::AllOf(ticket),
        Some(Record::Outranked { .. }) | None => Holds::Unknown,
    }
}

/// That all of a VM's disks are here.
///
/// # Errors
/// Which is not, and how much of it is.
pub fn is_whole(name: &str, record: Option<Record>, disks: &[Arc<Disk>]) -> Result<(), ApiError> {
    if let Some(disk) = disks.iter().find(|disk| disk.absent().0 > 0) {
        let (name, absent, holders) = (&disk.name, disk.absent(), disk.holders().join(", "));
        let message = format!("it cannot be claimed here: {absent} of `{name}` is only at {holders}");
        return Err(ApiError::new(Problem::Conflict, message).remedy("bring that host back, or claim the VM there"));
    }
    if let Some(disk) = disks.iter().find(|disk| !disk.is_whole()) {
        let message = format!(
            "it cannot be claimed here: a part of `{}` was never brought here, and is at its earlier owners",
            disk.name
        );
        return Err(
            ApiError::new(Problem::Conflict, message).remedy("bring the other host back, or claim the VM there")
        );
    }
    let ticket = match holds(record) {
        Holds::All => return Ok(()),
        Holds::AllOf(ticket) if disks.iter().all(|disk| disk.has_everything(ticket)) => return Ok(()),
        Holds::AllOf(ticket) => Some(ticket),
        Holds::Unknown => None,
    };
    let lacking: Vec<String> = disks
        .iter()
        .filter(|disk| ticket.is_none_or(|ticket| !disk.has_everything(ticket)))
        .map(|disk| format!("`{}` has {} of at most {}", disk.name, disk.allocated(), disk.size()))
        .collect();
    Err(ApiError::new(
        Problem::Conflict,
        format!("`{name}` cannot be claimed here: its disks are not known to be complete: {}", lacking.join(", ")),
    )
    .remedy("claim it at the other host, or bring that back"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use godwit_handoff::{Generation, Lineage, MoveId, Owner, VmId};

    #[test]
    fn a_half_copied_disk_is_no_vm() {
        let ticket = Ticket { vm: VmId(1), lineage: Lineage(0), generation: Generation(2), mv: MoveId(1) };
        for record in [Record::Staged(ticket), Record::Refused(ticket)] {
            assert_eq!(holds(Some(record)), Holds::AllOf(ticket), "{record:?}");
        }
        for record in [
            Record::Owned(Owner::first(VmId(1))),
            Record::Sealed(ticket),
            Record::Released(ticket),
            Record::Started(ticket),
            Record::Returned(ticket),
        ] {
            assert_eq!(holds(Some(record)), Holds::All, "{record:?}");
        }
        assert_eq!(holds(Some(Record::Outranked { vm: VmId(1), lineage: Lineage(3) })), Holds::Unknown);
        assert_eq!(holds(None), Holds::Unknown);
    }
}
