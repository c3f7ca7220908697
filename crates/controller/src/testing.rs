//! Things that tests need to be there.

use godwit_api::host::{LocalMove, LocalVm, MoveRole, Ownership, RunState};
use godwit_api::progress::{MoveProgress, Outcome};
use godwit_api::vm::{VmDefinition, VmSpec};
use godwit_trust::{Authority, Credentials, Identity, Role, Validity};
use godwit_units::{Bytes, Generation, Lineage, MoveId, VmId};
use std::sync::Arc;
use tempfile::TempDir;

pub use crate::moves::fresh_progress;
use crate::record::MoveRecord;
use crate::{Controller, FileStore};

/// A controller that knows nothing yet, and the folder of its store.
pub fn controller() -> (TempDir, Arc<Controller>) {
    let folder = tempfile::tempdir().unwrap();
    let authority = Authority::create(&folder.path().join("ca")).unwrap();
    let identity = Identity::new(Role::Controller, "controller").unwrap();
    let out = folder.path().join("controller");
    authority.issue(&identity, Validity::days(1)).unwrap().write(&out).unwrap();
    let store = FileStore::open(&folder.path().join("state")).unwrap();
    let controller = Controller::new(Box::new(store), Credentials::load(&out).unwrap());
    (folder, controller)
}

/// Progress with this outcome, and nothing done.
pub fn progress(outcome: Outcome) -> MoveProgress {
    MoveProgress { outcome, ..fresh_progress(0, None) }
}

/// The source's view of a move.
pub fn local_move(outcome: Outcome) -> LocalMove {
    LocalMove { id: MoveId(1), vm: VmId(1), role: MoveRole::Source, progress: progress(outcome) }
}

/// A move that has ended so, of this VM between these hosts.
pub fn ended_move(id: u64, vm: (u64, &str), (from, to): (&str, &str), progress: &MoveProgress) -> MoveRecord {
    let link = serde_json::json!({"control": "127.0.0.1:1", "disk": "127.0.0.1:2", "memory": "127.0.0.1:3"});
    let to = serde_json::json!({"name": to, "underlay": "127.0.0.1", "link": link});
    let record = serde_json::json!({
        "order": {"id": id, "vm": vm.0, "disk": "mirror", "to": to}, "vm": vm.1, "from": from, "owner": [0, 0],
        "ordered_unix_us": 0, "memory": 1, "disks": 1, "step": "ended", "cancel": false, "progress": progress,
    });
    serde_json::from_value(record).unwrap()
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
