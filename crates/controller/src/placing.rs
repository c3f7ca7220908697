//! Block devices at a move's destination, for volumes that are to lie on them: what is refused of them at once, and that they are made before the
//! move is ordered.
//!
//! The record has them, so that a controller that died goes on. Making one again does nothing, so there are no steps.

use crate::moves::called_off;
use crate::record::{MoveRecord, VmRecord};
use crate::rights::Caller;
use crate::state::{Controller, invalid, missing};
use crate::store::Kind;
use godwit_api::host::PlaceVolume;
use godwit_api::vm::{Placement, VmDefinition};
use godwit_api::{ApiError, Problem};
use godwit_units::Bytes;
use std::collections::HashSet;
use std::time::Duration;

/// How long to wait before a place is asked for again.
const RETRY: Duration = Duration::from_secs(1);
/// Volumes that one move places.
const MOST: usize = 64;

/// Whether these are places for volumes of the VM, and whether who names them may.
///
/// # Errors
/// What is wrong with them.
pub fn check(who: &Caller, definition: &VmDefinition, places: &[Placement]) -> Result<(), ApiError> {
    if places.is_empty() {
        return Ok(());
    }
    who.may_place()?;
    if places.len() > MOST {
        return Err(invalid(format!("place: more than {MOST}")));
    }
    let (mut volumes, mut devices) = (HashSet::new(), HashSet::new());
    for Placement { volume, device, .. } in places {
        let Some(disk) = definition.spec.disks.iter().find(|disk| &disk.volume == volume) else {
            return Err(
                missing("volume", volume).remedy(format!("name one of `{}`: `godwit volume ls`", definition.name))
            );
        };
        if disk.shared().is_some() {
            return Err(invalid(format!("place: `{volume}` lies on shared storage, and stays there"))
                .remedy("move it without a place"));
        }
        if !device.starts_with('/') || device.len() >= 4096 || device.contains('\0') {
            return Err(invalid(format!("place: `{volume}`: that is no path of a device at a host"))
                .remedy("name it as the host does, such as /dev/vg0/root"));
        }
        if !volumes.insert(volume) || !devices.insert(device) {
            return Err(invalid(format!("place: `{volume}` or {device} is named twice"))
                .remedy("give each volume a device of its own"));
        }
    }
    Ok(())
}

/// What of a VM's disks the node's folder has to hold.
#[must_use]
pub fn not_placed(definition: &VmDefinition, places: &[Placement]) -> Bytes {
    let placed = |name| places.iter().any(|place| &place.volume == name);
    definition.spec.disks.iter().filter(|disk| !placed(&disk.volume)).map(|disk| disk.size).sum()
}

/// Has the destination make all of a move's places; or some, where the move is cancelled meanwhile.
///
/// # Errors
/// What is in the way.
pub async fn make_all(c: &Controller, record: &MoveRecord) -> Result<(), ApiError> {
    let places = &record.place;
    if places.is_empty() {
        return Ok(());
    }
    let vm: VmRecord = c.store.read(Kind::Vm, record.order.vm.0)?.ok_or_else(|| missing("VM", &record.vm))?;
    let disks = vm.definition.spec.disks.iter().zip(&vm.definition.volumes);
    for (disk, volume) in disks {
        let Some(place) = places.iter().find(|place| place.volume == disk.volume) else { continue };
        let order = PlaceVolume {
            vm: record.order.vm,
            volume: *volume,
            size: disk.size,
            from: record.from.clone(),
            lineage: record.owner.0,
            generation: record.owner.1,
            place: place.clone(),
        };
        loop {
            // Whoever is to begin it sees that, and whether its source's node has been told.
            if called_off(c, record) {
                return Ok(());
            }
            match c.node_of(&record.order.to.name)?.place(&order).await {
                Ok(()) => break,
                // A large device is zeroed for longer than an answer is waited for.
                Err(error) if error.problem == Problem::Unreachable => tokio::time::sleep(RETRY).await,
                Err(error) => return Err(error),
            }
        }
    }
    Ok(())
}
