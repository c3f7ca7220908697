//! What the controller allows two nodes to do in a move, signed.

use crate::record::{MoveRecord, VmRecord};
use crate::state::{Controller, missing};
use crate::store::Kind;
use godwit_api::host::MoveOrder;
use godwit_api::{ApiError, Name, Problem};
use godwit_trust::{CLOCK_SKEW, Capability, Identity};
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
    let failed = |e: String| ApiError::new(Problem::Failed, e);
    let node = |name: &Name| Identity::node(name.as_str()).map_err(|e| failed(e.to_string()));
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
    let signed = c.credentials().grant(&capability).map_err(|e| failed(e.to_string()))?;
    Ok(MoveOrder { capability: Some(signed), ..record.order.clone() })
}
