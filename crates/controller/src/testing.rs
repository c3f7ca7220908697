//! Things that tests need to be there.

use godwit_api::host::{LocalMove, LocalVm, MoveRole, Ownership, RunState};
use godwit_api::progress::{MoveProgress, Outcome};
use godwit_api::vm::{VmDefinition, VmSpec};
use godwit_units::{Bytes, Generation, Lineage, MoveId, VmId};

pub use crate::moves::fresh_progress;

/// Progress with this outcome, and nothing done.
pub fn progress(outcome: Outcome) -> MoveProgress {
    MoveProgress { outcome, ..fresh_progress(0, None) }
}

/// The source's view of a move.
pub fn local_move(outcome: Outcome) -> LocalMove {
    LocalMove { id: MoveId(1), vm: VmId(1), role: MoveRole::Source, progress: progress(outcome) }
}

/// The smallest VM.
pub fn spec() -> VmSpec {
    serde_json::from_value(serde_json::json!({"memory": 64 << 20})).unwrap()
}

/// A VM on a host.
pub fn local_vm(ownership: Ownership, generation: u64) -> LocalVm {
    LocalVm {
        definition: VmDefinition {
            id: VmId(1),
            name: "web".parse().unwrap(),
            spec: spec(),
            volumes: vec![],
            wires: vec![],
            boot_files: vec![],
            domain: None,
        },
        ownership,
        lineage: Lineage(0),
        generation: Generation(generation),
        run: RunState::Running,
        mv: None,
        allocated: Bytes(0),
        absent: Bytes(0),
        holders: vec![],
        lent: vec![],
    }
}
