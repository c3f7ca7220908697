//! A fill between two nodes, of a VM that is off: nobody asks for anything, and whoever lends waits.
//!
//! Real nodes and real links on this machine's loopback. They need a QEMU to say what the host can do, and skip without, aloud.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod common;

use common::{World, definition, handed_on, lending, ticket};
use godwit_handoff::{FileLedger, Ledger, Owner, Record};
use godwit_node::node::Node;
use godwit_node::registry::{self, Power, VmFile};
use godwit_trust::Role;
use godwit_units::VmId;
use godwit_volume::Replica;
use std::time::{Duration, Instant};

const SOON: Duration = Duration::from_secs(60);

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_that_is_off_gets_its_blocks_and_whoever_lent_them_is_told() {
    let Some(world) = World::new([89, 1]) else { return };
    world.credentials(Role::Node, "b");
    world.credentials(Role::Node, "c");
    let (b, c) = (world.config("b", 1), world.config("c", 2));
    drop(handed_on(&b.state.join("volumes/1"), &c.state.join("volumes/1")));
    let web = definition(1, "pc-q35-7.2", &[1], None);
    lending(&b, &web, &world.peer("c", 2));
    // It came to c, and was powered off there before its blocks had followed.
    let lacks = VmFile { holders: vec![world.peer("b", 1)], ..VmFile::new(web, Power::Off) };
    registry::store(&c.state.join("vms/1"), &lacks).unwrap();
    let owner = Owner::after(ticket(1));
    FileLedger::open(&c.state.join("records")).unwrap().store(VmId(1), &Record::Owned(owner)).unwrap();

    let (there, here) = (Node::start(b).await.unwrap(), Node::start(c.clone()).await.unwrap());
    let waiting = || !here.vm(VmId(1)).unwrap().file().holders.is_empty();
    let lends = || !there.vm(VmId(1)).unwrap().file().lent.is_empty();
    let began = Instant::now();
    while waiting() || lends() {
        let absent = here.vm(VmId(1)).unwrap().disks()[0].absent();
        assert!(began.elapsed() < SOON, "{absent} of the disk did not come, or nobody was told");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(here.vm(VmId(1)).unwrap().qemu().is_none(), "it was to stay off");

    // Nothing keeps its disks when it goes.
    let parts = here.vm(VmId(1)).unwrap();
    let disk = std::sync::Arc::downgrade(&parts.disks()[0]);
    let mut bytes = vec![0; 16];
    let folder = world.folder.path().join("copy");
    std::fs::create_dir(&folder).unwrap();
    for file in std::fs::read_dir(c.state.join("volumes/1")).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), folder.join(file.file_name())).unwrap();
    }
    Replica::open(&folder).unwrap().0.read(16, &mut bytes).unwrap();
    assert_eq!(bytes, b"another's secret");
    here.remove(&parts).await.unwrap();
    let began = Instant::now();
    while disk.strong_count() > 0 {
        assert!(began.elapsed() < SOON, "somebody holds the disk of a VM that is gone");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
