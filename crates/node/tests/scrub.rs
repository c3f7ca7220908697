//! Scrubs between real nodes on this machine's loopback. They need a QEMU to say what the host can do, and skip without, aloud.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod common;

use common::{World, name};
use godwit_api::host::PeerHost;
use godwit_api::precache::{self as precached, IMAGE_ROOM, NO_MOVE, PrecacheOrder, PrecacheState};
use godwit_api::verify::{self as verified, CopyState, ToldBy, Verified, VerifyOrder, VerifyPeer};
use godwit_api::vm::VmDefinition;
use godwit_node::node::Node;
use godwit_node::{precache, scrub};
use godwit_trust::{Capability, Credentials, Identity, Role, SignedCapability};
use godwit_units::{Bytes as Amount, Generation, Lineage, VmId, VolumeId};
use serde_json::json;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

const SIZE: u64 = 8 << 20;
const SOON: Duration = Duration::from_secs(60);

impl World {
    async fn node(&self, whom: &str, host: u8) -> Arc<Node> {
        self.credentials(Role::Node, whom);
        Node::start(self.config(whom, host)).await.unwrap()
    }

    fn capability(&self, signer: &Credentials, to: &PeerHost, definition: [u8; 32]) -> SignedCapability {
        let now = SystemTime::now();
        let capability = Capability {
            mv: NO_MOVE,
            vm: VmId(1),
            lineage: Lineage::FIRST,
            generation: Generation::FIRST,
            from: Identity::node("a").unwrap(),
            to: Identity::node(to.name.as_str()).unwrap(),
            remote: to.underlay,
            volumes: vec![VolumeId(1)],
            wires: vec![],
            definition,
            begins: now,
            ends: now + Duration::from_secs(600),
        };
        signer.grant(&capability).unwrap()
    }

    fn precache(&self, signer: &Credentials, to: PeerHost) -> PrecacheOrder {
        let capability = self.capability(signer, &to, precached::digest(VolumeId(1), Amount(SIZE), None));
        PrecacheOrder {
            vm: VmId(1),
            lineage: Lineage::FIRST,
            generation: Generation::FIRST,
            volume: VolumeId(1),
            to,
            limit: None,
            interval_ms: 500,
            consistent: false,
            image_room: IMAGE_ROOM,
            domain: None,
            capability,
        }
    }

    fn order(&self, signer: &Credentials, others: &[PeerHost]) -> VerifyOrder {
        let definition = verified::digest(VolumeId(1), Amount(SIZE));
        let peer =
            |peer: &PeerHost| VerifyPeer { peer: peer.clone(), capability: self.capability(signer, peer, definition) };
        VerifyOrder {
            vm: VmId(1),
            lineage: Lineage::FIRST,
            generation: Generation::FIRST,
            volume: VolumeId(1),
            size: Amount(SIZE),
            others: others.iter().map(peer).collect(),
            from: 0,
            repair: false,
            believe: None,
            rate: Amount(1 << 30),
        }
    }

    /// What the guest's disk begins with.
    fn image(&self, fill: u8, length: usize) -> String {
        let path = self.folder.path().join("image");
        std::fs::write(&path, vec![fill; length]).unwrap();
        path.to_str().unwrap().to_owned()
    }

    fn data(&self, whom: &str) -> PathBuf {
        self.folder.path().join(format!("state-{whom}/volumes/1/data"))
    }

    /// A bit turns around on a disk.
    fn rot(&self, whom: &str, block: u64, bit: u8) {
        let file = OpenOptions::new().read(true).write(true).open(self.data(whom)).unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, block * 4096 + 1234).unwrap();
        file.write_all_at(&[byte[0] ^ bit], block * 4096 + 1234).unwrap();
    }

    fn block(&self, whom: &str, block: u64) -> Vec<u8> {
        let mut bytes = vec![0; 4096];
        File::open(self.data(whom)).unwrap().read_exact_at(&mut bytes, block * 4096).unwrap();
        bytes
    }
}

fn definition(disk: &str) -> VmDefinition {
    serde_json::from_value(json!({
        "id": 1, "name": "web", "volumes": [1], "wires": [],
        "spec": {"memory": (1 << 20) + 8192, "accel": "tcg", "machine": "pc-q35-7.2",
                 "disks": [{"volume": "root", "size": SIZE, "from": disk}]},
    }))
    .unwrap()
}

async fn follows(node: &Arc<Node>, to: &str) {
    let began = Instant::now();
    loop {
        let told = precache::told(node);
        let f = told.iter().find(|one| one.to.as_str() == to).map(|one| one.figures.clone()).unwrap_or_default();
        if f.state == PrecacheState::Following && f.backlog == Amount(0) && f.lag_s == Some(0.0) {
            return;
        }
        assert!(began.elapsed() < SOON, "{to} does not follow: {told:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// How each host's copy of the only finding is.
fn copies(found: &Verified) -> Vec<(String, CopyState)> {
    assert_eq!(found.findings.len(), 1, "{found:?}");
    found.findings[0].copies.iter().map(|c| (c.host.to_string(), c.state)).collect()
}

fn of(list: &[(&str, CopyState)]) -> Vec<(String, CopyState)> {
    list.iter().map(|(host, state)| ((*host).to_owned(), *state)).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn bit_rot_is_found_named_and_repaired_between_two_sites_where_something_tells_which_is_right() {
    let Some(world) = World::new([90, 1]) else { return };
    let controller = world.credentials(Role::Controller, "controller");
    let (a, b) = (world.node("a", 1).await, world.node("b", 2).await);
    a.define(definition(&world.image(0x5a, 6 << 20))).await.unwrap();
    let at_b = world.peer("b", 2);
    precache::order(&a, vec![world.precache(&controller, at_b.clone())]).unwrap();
    follows(&a, "b").await;
    let order = world.order(&controller, std::slice::from_ref(&at_b));

    // Before all ever agreed nothing tells which of two is rotten, and nothing is repaired.
    world.rot("b", 300, 1);
    let ask = VerifyOrder { repair: true, ..order.clone() };
    let found = scrub::verify(&a, &ask).await.unwrap();
    assert_eq!(copies(&found), of(&[("a", CopyState::Differs), ("b", CopyState::Differs)]));
    let rot = &found.findings[0];
    assert_eq!((rot.block, rot.blocks, rot.told_by, rot.repaired), (300, 1, ToldBy::Nothing, false));
    assert!(rot.error.as_ref().unwrap().contains("nobody can tell"), "{rot:?}");
    assert_ne!(world.block("b", 300), world.block("a", 300));
    assert_eq!(found.alike, Amount((6 << 20) - 4096));
    // But an operator can.
    let found = scrub::verify(&a, &VerifyOrder { believe: Some(name("a")), ..ask.clone() }).await.unwrap();
    assert!(found.findings[0].repaired, "{found:?}");
    assert_eq!(world.block("b", 300), vec![0x5a; 4096]);

    // All agree: that is written down, so the next rot is told, at whichever of the two it is.
    let found = scrub::verify(&a, &order).await.unwrap();
    assert_eq!((found.findings.len(), found.alike, found.next), (0, Amount(6 << 20), None));
    for (whose, block) in [("b", 700), ("a", 900)] {
        world.rot(whose, block, 2);
        world.rot(whose, block + 1, 2);
        let state = |host| if host == whose { CopyState::Rotten } else { CopyState::Right };
        for repair in [false, true] {
            let found = scrub::verify(&a, &VerifyOrder { repair, ..order.clone() }).await.unwrap();
            assert_eq!(copies(&found), of(&[("a", state("a")), ("b", state("b"))]));
            let rot = &found.findings[0];
            assert_eq!((rot.block, rot.blocks, rot.told_by, rot.repaired), (block, 2, ToldBy::Record, repair));
        }
        assert_eq!(world.block(whose, block), vec![0x5a; 4096], "{whose}");
        assert_eq!(scrub::verify(&a, &order).await.unwrap().findings, []);
    }

    // Who was not told to verify learns nothing.
    let strange = world.order(&world.credentials(Role::Node, "a"), std::slice::from_ref(&at_b));
    let found = scrub::verify(&a, &strange).await.unwrap();
    let error = found.holders[1].error.as_ref().unwrap();
    assert!(error.contains("may not verify"), "{error}");
    // Nor with the right to bring a pre-cache.
    let mut other = order.clone();
    other.others[0].capability =
        world.capability(&controller, &at_b, precached::digest(VolumeId(1), Amount(SIZE), None));
    let found = scrub::verify(&a, &other).await.unwrap();
    assert!(found.holders[1].error.as_ref().unwrap().contains("may not verify"), "{found:?}");
    drop((a, b));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_third_holder_tells_which_of_two_is_rotten() {
    let Some(world) = World::new([90, 2]) else { return };
    let controller = world.credentials(Role::Controller, "controller");
    let (a, b, c) = (world.node("a", 1).await, world.node("b", 2).await, world.node("c", 3).await);
    a.define(definition(&world.image(0x77, 2 << 20))).await.unwrap();
    let peers = [world.peer("b", 2), world.peer("c", 3)];
    let orders = peers.iter().map(|peer| world.precache(&controller, peer.clone())).collect();
    precache::order(&a, orders).unwrap();
    follows(&a, "b").await;
    follows(&a, "c").await;
    // The owner's own copy, never compared before.
    world.rot("a", 12, 4);
    let order = VerifyOrder { repair: true, ..world.order(&controller, &peers) };
    let found = scrub::verify(&a, &order).await.unwrap();
    let states = [("a", CopyState::Rotten), ("b", CopyState::Right), ("c", CopyState::Right)];
    assert_eq!((copies(&found), found.findings[0].told_by), (of(&states), ToldBy::Majority));
    assert!(found.findings[0].repaired);
    assert_eq!(world.block("a", 12), vec![0x77; 4096]);
    drop((a, b, c));
}
