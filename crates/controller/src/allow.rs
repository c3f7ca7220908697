//! What the controller allows two nodes to do in a move, or with a volume, signed.

use crate::record::{MoveRecord, VmRecord};
use crate::state::{Controller, missing};
use crate::store::Kind;
use godwit_api::host::{MoveOrder, PeerHost};
use godwit_api::precache::NO_MOVE;
use godwit_api::{ApiError, Name, Problem};
use godwit_trust::{CLOCK_SKEW, Capability, Identity, SignedCapability};
use godwit_units::VolumeId;
use std::time::{Duration, SystemTime};

/// How long after an order was sent its source may ask for a place. It asks at once; and an order that is sent again is signed again.
const BEGINS_WITHIN: Duration = Duration::from_secs(15 * 60);

/// The order of a move, with what shows the other nodes that it is one. Of the VM as it stands in the records: a source that was taken
/// over cannot have another one made of it.
///
/// # Errors
/// The store's, or the key's.
pub fn order(c: &Controller, record: &MoveRecord) -> Result<MoveOrder, ApiError> {
    let vm: VmRecord = c.store.read(Kind::Vm, record.order.vm.0)?.ok_or_else(|| missing("VM", &record.vm))?;
    let now = SystemTime::now();
    let (lineage, generation) = record.owner;
    let capability = Capability {
        mv: record.id(),
        vm: record.order.vm,
        lineage,
        generation: generation.next(),
        from: node(&record.from)?,
        to: node(&record.order.to.name)?,
        remote: record.order.to.underlay,
        volumes: vm.definition.sorted_volumes(),
        wires: vm.definition.sorted_wires(),
        definition: vm.definition.digest(),
        begins: now - CLOCK_SKEW,
        ends: now + BEGINS_WITHIN,
    };
    Ok(MoveOrder { capability: Some(sign(c, &capability)?), ..record.order.clone() })
}

/// What shows `to` that `from` may do something with a volume. What, and with a volume of which size, is what `digest` stands for. To be
/// begun within `valid`.
///
/// # Errors
/// The key's.
pub fn volume(
    c: &Controller,
    vm: &VmRecord,
    volume: VolumeId,
    digest: [u8; 32],
    from: &Name,
    to: &PeerHost,
    valid: Duration,
) -> Result<SignedCapability, ApiError> {
    let now = SystemTime::now();
    let capability = Capability {
        // No move has this number: it begins none.
        mv: NO_MOVE,
        vm: vm.definition.id,
        lineage: vm.lineage,
        generation: vm.generation,
        from: node(from)?,
        to: node(&to.name)?,
        remote: to.underlay,
        volumes: vec![volume],
        wires: vec![],
        definition: digest,
        begins: now - CLOCK_SKEW,
        ends: now + valid,
    };
    sign(c, &capability)
}

/// The order of a component's move, with what shows the other node that it is one.
///
/// # Errors
/// The key's.
pub fn component(
    c: &Controller,
    record: &crate::components::ComponentRecord,
    order: &godwit_api::component::ComponentOrder,
) -> Result<godwit_api::component::ComponentOrder, ApiError> {
    let now = SystemTime::now();
    let capability = Capability {
        mv: order.id,
        vm: record.definition.id,
        lineage: record.lineage,
        generation: record.generation.next(),
        from: node(&record.host)?,
        to: node(&order.to.name)?,
        remote: order.to.underlay,
        volumes: vec![],
        wires: record.definition.sorted_endpoints(),
        definition: record.definition.digest(),
        begins: now - CLOCK_SKEW,
        ends: now + BEGINS_WITHIN,
    };
    Ok(godwit_api::component::ComponentOrder { capability: Some(sign(c, &capability)?), ..order.clone() })
}

fn node(name: &Name) -> Result<Identity, ApiError> {
    Identity::node(name.as_str()).map_err(|e| ApiError::new(Problem::Failed, e.to_string()))
}

fn sign(c: &Controller, capability: &Capability) -> Result<SignedCapability, ApiError> {
    c.credentials().grant(capability).map_err(|e| ApiError::new(Problem::Failed, e.to_string()))
}
