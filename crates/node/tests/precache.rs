//! Pre-caches between real nodes on this machine's loopback. They need a QEMU to say what the host can do, and skip without, aloud.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod common;

use bytes::Bytes;
use common::{World, identity};
use godwit_api::precache::{IMAGE_ROOM, LocalPrecache, NO_MOVE, PrecacheOrder, PrecacheState, digest};
use godwit_api::vm::VmDefinition;
use godwit_nbd::{Client, Command, Event};
use godwit_node::ending::Ending;
use godwit_node::moments::Moments;
use godwit_node::node::Node;
use godwit_node::precache;
use godwit_trust::{Capability, Credentials, Role};
use godwit_units::{BitRate, Bytes as Amount, Generation, Lineage, VmId, VolumeId};
use godwit_volume::{Moment, Opened, Replica};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

const SIZE: u64 = 8 << 20;
const SOON: Duration = Duration::from_secs(60);

/// A world whose nodes `a` and `b` are certified.
fn world(net: u8) -> Option<World> {
    let world = World::new([89, net])?;
    for node in ["a", "b"] {
        world.credentials(Role::Node, node);
    }
    Some(world)
}

impl World {
    fn replica(&self, whom: &str) -> PathBuf {
        self.replica_of(whom, 1)
    }

    fn replica_of(&self, whom: &str, volume: u64) -> PathBuf {
        self.folder.path().join(format!("state-{whom}/volumes/{volume}"))
    }

    fn order(&self, controller: &Credentials, from: &str, image: bool) -> PrecacheOrder {
        self.order_of(VolumeId(1), controller, from, image)
    }

    fn order_of(&self, volume: VolumeId, controller: &Credentials, from: &str, image: bool) -> PrecacheOrder {
        let now = SystemTime::now();
        let capability = Capability {
            mv: NO_MOVE,
            vm: VmId(1),
            lineage: Lineage::FIRST,
            generation: Generation::FIRST,
            from: identity(from),
            to: identity("b"),
            remote: self.ip(2),
            volumes: vec![volume],
            wires: vec![],
            definition: digest(volume, Amount(SIZE), None),
            begins: now,
            ends: now + Duration::from_secs(600),
        };
        PrecacheOrder {
            vm: VmId(1),
            lineage: Lineage::FIRST,
            generation: Generation::FIRST,
            volume,
            to: self.peer("b", 2),
            limit: None,
            interval_ms: 500,
            consistent: image,
            image_room: IMAGE_ROOM,
            domain: None,
            capability: controller.grant(&capability).unwrap(),
        }
    }
}

fn definition() -> VmDefinition {
    serde_json::from_value(json!({
        "id": 1, "name": "web", "volumes": [1], "wires": [],
        "spec": {"memory": (1 << 20) + 8192, "accel": "tcg", "machine": "pc-q35-7.2", "disks": [{"volume": "root", "size": SIZE}]},
    }))
    .unwrap()
}

/// A guest: writes by the export that its QEMU would use.
struct Guest {
    client: Client,
    stream: UnixStream,
}

impl Guest {
    async fn connect(node: &Node) -> Self {
        Self::of(node, 0).await
    }

    /// Which of its VM's disks.
    async fn of(node: &Node, at: usize) -> Self {
        let disk = node.vm(VmId(1)).unwrap().disks()[at].clone();
        let stream = UnixStream::connect(&disk.socket).await.unwrap();
        let mut it = Self { client: Client::new(&disk.name), stream };
        while it.client.remote().is_none() {
            it.turn().await;
        }
        it
    }

    async fn turn(&mut self) -> Option<Event> {
        let mut out = self.client.transmit().split();
        self.stream.write_all_buf(&mut out).await.unwrap();
        if let Some(event) = self.client.poll_event().unwrap() {
            return Some(event);
        }
        let mut out = self.client.transmit().split();
        if out.is_empty() {
            self.stream.read_buf(self.client.input()).await.unwrap();
        } else {
            self.stream.write_all_buf(&mut out).await.unwrap();
        }
        None
    }

    /// Writes a block; how long that took.
    async fn write(&mut self, block: u64, fill: u8) {
        self.write_data(block, vec![fill; 4096]).await;
    }

    /// Ends when it was answered.
    async fn write_data(&mut self, block: u64, data: Vec<u8>) {
        let data = Bytes::from(data);
        self.client.request(Command::Write { offset: block * 4096, data, fua: false }).unwrap();
        loop {
            if let Some(Event::Answered(..)) = self.turn().await {
                return;
            }
        }
    }
}

async fn until(node: &Arc<Node>, what: &str, done: impl Fn(&LocalPrecache) -> bool) -> LocalPrecache {
    let began = Instant::now();
    loop {
        let told = precache::told(node);
        if let Some(one) = told.iter().find(|one| done(one)) {
            return one.clone();
        }
        assert!(began.elapsed() < SOON, "{what} did not come: {told:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

fn caught_up(one: &LocalPrecache) -> bool {
    let f = &one.figures;
    f.state == PrecacheState::Following && f.backlog == Amount(0) && f.lag_s == Some(0.0)
}

/// What lies at a site, read after its node is gone.
fn contents(folder: &Path) -> Vec<u8> {
    let (replica, _) = Replica::open(folder).unwrap();
    let mut all = vec![0; SIZE as usize];
    replica.read(0, &mut all).unwrap();
    all
}

/// A node with tasks of its own, so that all of them can be ended at any point, as by SIGKILL.
struct Side {
    runtime: tokio::runtime::Runtime,
    node: Arc<Node>,
    replica: PathBuf,
}

impl Side {
    async fn start(world: &World, whom: &str, host: u8) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let node = runtime.spawn(Node::start(world.config(whom, host))).await.unwrap().unwrap();
        Self { runtime, node, replica: world.replica(whom) }
    }

    async fn define(&self) {
        self.define_as(definition()).await;
    }

    async fn define_as(&self, definition: VmDefinition) {
        let node = self.node.clone();
        self.runtime.spawn(async move { node.define(definition).await }).await.unwrap().unwrap();
    }

    fn order(&self, orders: Vec<PrecacheOrder>) {
        let _in = self.runtime.enter();
        precache::order(&self.node, orders).unwrap();
    }

    async fn end(self) {
        self.runtime.shutdown_background();
        drop(self.node);
        // Opened without closing it properly, as a killed node leaves it.
        left(&self.replica).await;
    }

    /// As the service manager ends it: how its replica is found then.
    async fn stop(self) -> Opened {
        let Self { runtime, node, replica } = self;
        let ending = runtime.spawn(Ending::begin(node)).await.unwrap();
        tokio::task::spawn_blocking(move || drop(ending.end(runtime))).await.unwrap();
        left(&replica).await
    }
}

/// How a replica is found whose node is gone: its threads may be there for a moment.
async fn left(replica: &Path) -> Opened {
    let began = Instant::now();
    loop {
        match Replica::open(replica) {
            Ok((_, opened)) => return opened,
            Err(error) => {
                assert!(began.elapsed() < SOON, "the replica is held by a node that is gone: {error}");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }
}

async fn goes_on(net: u8, image: bool) {
    let Some(world) = world(net) else { return };
    let controller = world.credentials(Role::Controller, "controller");
    let (a, b) = (Side::start(&world, "a", 1).await, Side::start(&world, "b", 2).await);
    a.define().await;
    let mut guest = Guest::connect(&a.node).await;
    for block in 0..512 {
        guest.write(block, 1).await;
    }
    let order = world.order(&controller, "a", image);
    a.order(vec![order.clone()]);
    let first = until(&a.node, "the first epoch", caught_up).await;
    assert_eq!((first.figures.image, first.figures.sessions), (image, 1), "{first:?}");
    assert!(first.figures.sent >= Amount(512 * 4096), "{first:?}");
    // They are all alike: the first of a message's went in full, and most of the others by name.
    assert!(first.figures.named >= Amount(400 * 4096), "{first:?}");

    // What is written afterwards travels, and nothing else.
    for block in 100..110 {
        guest.write(block, 2).await;
    }
    let second =
        until(&a.node, "the next epoch", |one| caught_up(one) && one.figures.epoch != first.figures.epoch).await;
    let more = second.figures.sent.0 - first.figures.sent.0;
    assert!((10 * 4096..=20 * 4096).contains(&more), "{more} bytes for 10 blocks");

    // The other side goes, and comes back; the guest does not notice: a write that waited for it would not be answered now.
    b.end().await;
    for block in 200..264 {
        let answered = tokio::time::timeout(Duration::from_secs(60), guest.write(block, 3)).await;
        answered.expect("a write waits for the secondary that is away");
    }
    until(&a.node, "the loss of the other side", |one| one.figures.lag_s.is_none_or(|lag| lag > 0.0)).await;
    let b = Side::start(&world, "b", 2).await;
    let third = until(&a.node, "the epoch after the other side's restart", caught_up).await;
    assert!(third.figures.sessions > 1);

    // This side goes, and comes back, and goes on without having been told anything; its VM is off now.
    for block in 300..310 {
        guest.write(block, 4).await;
    }
    drop(guest);
    a.end().await;
    let a = Side::start(&world, "a", 1).await;
    until(&a.node, "the epoch after this side's restart", caught_up).await;

    // No more of it.
    a.order(vec![]);
    assert!(precache::told(&a.node).is_empty());
    a.end().await;
    // A move that takes the replica over doubts nothing of it, however fresh: what is doubted counts as absent.
    let node = b.node.clone();
    b.runtime.spawn(async move { node.precaches().release(&[VolumeId(1)]).await }).await.unwrap();
    assert_eq!(Replica::open(&world.replica("b")).unwrap().1.doubted, 0);
    b.end().await;
    assert!(contents(&world.replica("a")) == contents(&world.replica("b")), "the replicas differ");
    assert_eq!(Replica::open(&world.replica("b")).unwrap().0.complete().is_some_and(|held| held.image), image);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_secondary_follows_over_restarts_of_either_side_and_the_guest_never_waits() {
    goes_on(1, false).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_follows_over_restarts_of_either_side_too() {
    goes_on(2, true).await;
}

/// How a node comes to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ends {
    Told,
    Killed,
}

/// What goes to the secondary after a restart of its owner's node, though it had all of the volume before. Nothing: skipped.
async fn sent_after(net: u8, ends: Ends) -> Option<Amount> {
    let world = world(net)?;
    let controller = world.credentials(Role::Controller, "controller");
    let (a, b) = (Side::start(&world, "a", 1).await, Side::start(&world, "b", 2).await);
    a.define().await;
    let mut guest = Guest::connect(&a.node).await;
    for block in 0..64 {
        guest.write(block, 1).await;
    }
    a.order(vec![world.order(&controller, "a", false)]);
    until(&a.node, "the first epoch", caught_up).await;
    // The guest is there until the end.
    match ends {
        Ends::Told => assert_eq!(a.stop().await, Opened { clean: true, doubted: 0 }),
        Ends::Killed => a.end().await,
    }
    drop(guest);
    let a = Side::start(&world, "a", 1).await;
    let after = until(&a.node, "the secondary after the restart", caught_up).await;
    assert_eq!(a.stop().await.doubted, 0);
    // A secondary that has been told to end forgets nothing either.
    assert_eq!(b.stop().await, Opened { clean: true, doubted: 0 });
    assert!(contents(&world.replica("a")) == contents(&world.replica("b")), "the replicas differ");
    Some(after.figures.sent)
}

#[tokio::test(flavor = "multi_thread")]
async fn after_a_planned_stop_nothing_travels_again_and_after_a_kill_all_that_was_hot_does() {
    let Some(told) = sent_after(4, Ends::Told).await else { return };
    assert_eq!(told, Amount(0), "it was closed, and nothing of it could be doubted");
    let killed = sent_after(5, Ends::Killed).await.unwrap();
    assert!(killed >= Amount(64 * 4096), "{killed}: the other half of this test shows nothing");
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_keeps_a_replica_here_that_the_controller_did_not_order() {
    let Some(world) = world(3) else { return };
    let controller = world.credentials(Role::Controller, "controller");
    let (a, b) = (Side::start(&world, "a", 1).await, Side::start(&world, "b", 2).await);
    a.define().await;
    // Another source's order; and one that a node has made itself.
    // And one that would share contents with a customer whose the VM is not.
    let strange = PrecacheOrder { domain: Some("acme".parse().unwrap()), ..world.order(&controller, "a", false) };
    let by_itself = world.order(&world.credentials(Role::Node, "a"), "a", false);
    for order in [world.order(&controller, "x", false), by_itself, strange] {
        a.order(vec![order]);
        let refused = until(&a.node, "the refusal", |one| one.figures.error.is_some()).await;
        assert!(refused.figures.error.as_ref().unwrap().contains("may not keep"), "{refused:?}");
        assert!(!world.replica("b").exists());
        a.order(vec![]);
    }
    a.end().await;
    b.runtime.shutdown_background();
}

/// A VM with two disks.
fn twins() -> VmDefinition {
    let disks = ["root", "log"].map(|volume| json!({"volume": volume, "size": SIZE}));
    serde_json::from_value(json!({
        "id": 1, "name": "web", "volumes": [1, 2], "wires": [],
        "spec": {"memory": (1 << 20) + 8192, "accel": "tcg", "machine": "pc-q35-7.2", "disks": disks},
    }))
    .unwrap()
}

/// What lies at the start of both disks' images at a site whose node is gone, and their moments, once what was decided is in its place.
fn images(world: &World, whom: &str) -> [(u8, Option<Moment>); 2] {
    let moments = Moments::new(&world.folder.path().join(format!("state-{whom}")));
    [1, 2].map(|volume| {
        let folder = world.replica_of(whom, volume);
        let (replica, _) = Replica::open(&folder).unwrap();
        moments.settle(VmId(1), VolumeId(volume), &replica).unwrap();
        let held = replica.complete().filter(|held| held.image).unwrap();
        let mut first = [0];
        replica.read(0, &mut first).unwrap();
        (first[0], held.moment)
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn images_of_a_vms_disks_are_of_one_moment_whenever_the_host_that_keeps_them_dies() {
    let Some(world) = world(6) else { return };
    let controller = world.credentials(Role::Controller, "controller");
    let (a, mut b) = (Side::start(&world, "a", 1).await, Side::start(&world, "b", 2).await);
    a.define_as(twins()).await;
    let (mut root, mut log) = (Guest::of(&a.node, 0).await, Guest::of(&a.node, 1).await);
    // An epoch of the log takes a second to come, one of the other a moment: they would be apart most of the time.
    let mut orders = [1, 2].map(|volume| world.order_of(VolumeId(volume), &controller, "a", true));
    orders[1].limit = Some(BitRate::from_mbit(16.0));
    a.order(orders.to_vec());
    let both = async |what: &str, done: &dyn Fn(&LocalPrecache) -> bool| {
        let began = Instant::now();
        while precache::told(&a.node).iter().filter(|one| done(one)).count() < 2 {
            assert!(began.elapsed() < SOON, "{what} did not come: {:?}", precache::told(&a.node));
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    both("an image of each", &|one| one.figures.image).await;
    let (mut written, mut drawn, mut seen) = (0, 0, vec![]);
    for round in 1..=2 {
        let epoch = |node: &Arc<Node>| precache::told(node)[1].figures.epoch.clone();
        let (before, began) = (epoch(&a.node), Instant::now());
        // It ends at other points of an epoch, and something has come in each.
        while began.elapsed() < Duration::from_millis(1500 + 230 * round) || epoch(&a.node) == before {
            assert!(began.elapsed() < SOON, "{:?}", precache::told(&a.node));
            // It writes to the one, waits for that, and writes the same to the other.
            written = if written == 200 { 1 } else { written + 1 };
            root.write(0, written).await;
            log.write(0, written).await;
            for _ in 0..4 {
                drawn += 1;
                // All different, and none compresses.
                let mut data = vec![0; 4096];
                blake3::Hasher::new().update(&u64::to_le_bytes(drawn)).finalize_xof().fill(&mut data);
                log.write_data(64 + drawn * 37 % 512, data).await;
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        b.runtime.shutdown_background();
        drop(b.node);
        for volume in [1, 2] {
            left(&world.replica_of("b", volume)).await;
        }
        let [(first, moment), (second, other)] = images(&world, "b");
        assert!(moment.is_some() && moment == other, "{round}: {moment:?} and {other:?}");
        let ahead = (i16::from(first) - i16::from(second)).rem_euclid(200);
        assert!(ahead <= 1, "{round}: one disk is of {first}, the other of {second}");
        assert!(!seen.contains(&moment), "nothing came between two losses");
        seen.push(moment);
        b = Side::start(&world, "b", 2).await;
        let follows = |one: &LocalPrecache| one.figures.state == PrecacheState::Following && one.figures.image;
        both("the next sessions", &|one| follows(one) && one.figures.sessions > round).await;
    }
    drop((root, log));
    a.end().await;
    b.runtime.shutdown_background();
}
