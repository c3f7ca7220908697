//! A node that was taken over: its certificate is good, it speaks the protocol, and it asks for what it was not given.
//!
//! Real nodes and real links on this machine's loopback. They need a QEMU to say what the host can do, and skip without, aloud.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod common;

use bytes::Bytes;
use common::{World, definition, handed_on, identity, lending, name, ticket};
use godwit_api::Problem;
use godwit_api::host::{GatewayPort, Ownership, PeerHost};
use godwit_api::vm::VmDefinition;
use godwit_api::wire::{EndView, WireOrder};
use godwit_handoff::{Body, FileLedger, Ledger, Message, Record, Ticket};
use godwit_link::{Addresses, Config as LinkConfig, Endpoint, Lane, LinkError, Peer, Priority, Session, State};
use godwit_node::covered;
use godwit_node::lend::Fetch;
use godwit_node::node::Node;
use godwit_node::proto::{self, Answer, GreetWire, Greeted, Hello, Note, ProbeWire, Repoint, Request, Secret, Stage};
use godwit_node::registry::{self, Power, VmFile};
use godwit_trust::{Capability, Role, SignedCapability};
use godwit_units::{Generation, Lineage, MoveId, VmId, VolumeId};
use godwit_volume::fetch::Requester;
use godwit_volume::{Holder, Packer, Replica, Unpacker};
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::time::{Duration, Instant, SystemTime};

const SOON: Duration = Duration::from_secs(120);

impl World {
    fn addresses(&self, host: u8) -> Addresses {
        let at = |port| SocketAddr::from((self.ip(host), port));
        Addresses { control: at(7411), disk: at(10809), memory: at(4444) }
    }

    /// A node of this name that does what we say, and its session with host 1, the victim.
    async fn intruder(&self, whom: &str, host: u8) -> (Endpoint, Session) {
        let credentials = self.credentials(Role::Node, whom);
        let endpoint = Endpoint::bind(LinkConfig::new(self.addresses(host)), &credentials).unwrap();
        let session = endpoint.connect(self.victim()).await.unwrap();
        (endpoint, session)
    }

    fn victim(&self) -> Peer {
        Peer { identity: identity("b"), addresses: self.addresses(1) }
    }
}

fn capability(from: &str, to: &str, definition: &VmDefinition) -> Capability {
    let (ticket, now) = (ticket(definition.id.0), SystemTime::now());
    Capability {
        mv: ticket.mv,
        vm: ticket.vm,
        lineage: ticket.lineage,
        generation: ticket.generation,
        from: identity(from),
        to: identity(to),
        remote: [10, 0, 0, 9].into(),
        volumes: definition.sorted_volumes(),
        wires: definition.sorted_wires(),
        definition: definition.digest(),
        begins: now,
        ends: now + Duration::from_secs(600),
    }
}

async fn ask(session: &Session, request: &Request) -> Answer {
    let answer = session.request(proto::encode(request), SOON).await.unwrap();
    proto::decode(&answer).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_was_taken_over_reads_no_volume_and_brings_no_vm_of_its_own() {
    let Some(world) = World::new([88, 1]) else { return };
    world.credentials(Role::Node, "b");
    let controller = world.credentials(Role::Controller, "controller");
    let node = Node::start(world.config("b", 1)).await.unwrap();
    let secret = world.folder.path().join("secret.img");
    std::fs::write(&secret, b"another's secret".repeat(65536)).unwrap();
    let web = node.define(definition(1, "pc-q35-7.2", &[1], secret.to_str())).await.unwrap();
    let owned = node.record(VmId(1));
    assert!(matches!(owned, Some(Record::Owned(_))));

    let (endpoint, session) = world.intruder("x", 2).await;
    // A mirror, as a source would open it, of what lies at the victim.
    for t in [ticket(1), Ticket { generation: Generation(1), mv: MoveId(0), ..ticket(1) }] {
        for hello in [
            Hello::Mirror { ticket: t, volume: VolumeId(1) },
            Hello::Memory { ticket: t, key: None, keep: None, elsewhere: vec![], neighbours: vec![] },
            Hello::Kept { ticket: t, key: Secret([1; 32]) },
            Hello::Neighbours { ticket: t, seed: 1, most: 4096 },
            Hello::Precache { volume: VolumeId(1) },
        ] {
            let stream = session.open_stream(Lane::Disk, Priority::Interactive, proto::encode(&hello)).await.unwrap();
            let (mut send, mut recv) = stream.split();
            let _ = send.write(Bytes::from(vec![0; 4096])).await;
            let got = tokio::time::timeout(SOON, recv.read()).await.expect("it is hung up on, not left waiting");
            assert!(!matches!(got, Ok(Some(_))), "{hello:?}: {got:?}");
        }
    }

    // A place: with nothing, with what it made itself, and with what somebody else was given.
    let wanted = definition(9, "pc-q35-none", &[90], None);
    let x = world.credentials(Role::Node, "x");
    let good = |c: &Capability| Some(controller.grant(c).unwrap());
    let given = capability("x", "b", &wanted);
    let order = |definition: &VmDefinition, capability: Option<SignedCapability>| {
        let source = world.peer("x", 2);
        let ticket = ticket(definition.id.0);
        Stage {
            ticket,
            definition: definition.clone(),
            source,
            vcpus: None,
            capability,
            holders: vec![],
            mark: None,
            postcopy: false,
            tells: false,
        }
    };
    let mut tries = vec![
        ("nothing", order(&wanted, None)),
        ("its own signature", order(&wanted, Some(x.grant(&given).unwrap()))),
        ("another source's", order(&wanted, good(&capability("a", "b", &wanted)))),
        ("for another destination", order(&wanted, good(&capability("x", "c", &wanted)))),
        ("for another VM", order(&definition(1, "pc-q35-7.2", &[1], None), good(&given))),
        ("with another's volume", order(&definition(9, "pc-q35-none", &[1], None), good(&given))),
        ("with another device", {
            let mut other = wanted.clone();
            other.spec.devices.push("pvpanic".into());
            order(&other, good(&given))
        }),
        // To be told what VMs of that domain have in memory and on disks: no question has a word for it but the definition.
        ("in another trust domain", {
            let mut other = wanted.clone();
            other.domain = Some(name("ann"));
            order(&other, good(&given))
        }),
        ("out of time", {
            let past = SystemTime::now() - Duration::from_secs(60);
            order(&wanted, good(&Capability { begins: past, ends: past, ..given.clone() }))
        }),
    ];
    let mut later = order(&wanted, good(&given));
    later.ticket.generation = Generation(3);
    tries.push(("for another generation", later));
    let mut again = order(&wanted, good(&given));
    again.ticket.mv = MoveId(6);
    tries.push(("for another move", again));
    let mut posing = order(&wanted, good(&capability("a", "b", &wanted)));
    posing.source = world.peer("a", 2);
    tries.push(("in another's name", posing));
    for (what, stage) in tries {
        let error = ask(&session, &Request::Stage(Box::new(stage))).await.unwrap_err();
        assert_eq!(error.problem, Problem::Forbidden, "{what}: {error}");
        assert!(node.vm(VmId(9)).is_none(), "{what}");
    }
    // What it was given passes, and fails for what such a VM would fail for.
    let error = ask(&session, &Request::Stage(Box::new(order(&wanted, good(&given))))).await.unwrap_err();
    assert_eq!(error.problem, Problem::Blocked, "{error}");
    assert_eq!(node.record(VmId(1)), owned);
    assert_eq!(web.definition().volumes, [VolumeId(1)]);

    // Shut out, its session ends and it finds no way back.
    let list = node.credentials().revocations().revoke(identity("x"), SystemTime::now()).unwrap();
    node.revoke(&list).unwrap();
    let mut state = session.state();
    tokio::time::timeout(SOON, state.wait_for(|s| matches!(s, State::Closed(_)))).await.unwrap().unwrap();
    let error = endpoint.connect(world.victim()).await.unwrap_err();
    assert!(matches!(error, LinkError::Refused { .. }), "{error}");
    // A node that starts again goes by the list that it kept.
    drop(node);
    let kept = std::fs::read_to_string(world.folder.path().join("state-b/revoked.json")).unwrap();
    assert!(kept.contains("node/x"), "{kept}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_was_taken_over_ends_no_hand_off_that_is_not_its_own() {
    let Some(world) = World::new([88, 2]) else { return };
    world.credentials(Role::Node, "b");
    let config = world.config("b", 1);
    // As a source that died after the seal: whoever says STARTED in the destination's name makes it give the VM up.
    let file =
        VmFile { peer: Some(world.peer("a", 3)), ..VmFile::new(definition(1, "pc-q35-7.2", &[], None), Power::On) };
    registry::store(&config.state.join("vms/1"), &file).unwrap();
    FileLedger::open(&config.state.join("records")).unwrap().store(VmId(1), &Record::Sealed(ticket(1))).unwrap();
    let node = Node::start(config).await.unwrap();
    assert_eq!(node.record(VmId(1)), Some(Record::Sealed(ticket(1))));
    let say = async |session: &Session, body| {
        let note = Note::HandOff(Message { ticket: ticket(1), body });
        session.send_message(proto::encode(&note)).unwrap();
        tokio::time::sleep(Duration::from_millis(500)).await;
    };
    let (_x, session) = world.intruder("x", 2).await;
    for body in [Body::Started, Body::Granted, Body::Refused, Body::Returned, Body::Outranked(Lineage(9)), Body::Recall]
    {
        say(&session, body).await;
        assert_eq!(node.record(VmId(1)), Some(Record::Sealed(ticket(1))), "{body:?}");
    }
    let (_a, session) = world.intruder("a", 3).await;
    let until = Instant::now() + SOON;
    while node.record(VmId(1)) != Some(Record::Released(ticket(1))) {
        assert!(Instant::now() < until, "its own destination is not believed: {:?}", node.record(VmId(1)));
        say(&session, Body::Started).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_was_taken_over_points_no_wire_of_anothers_and_asks_for_no_guest_of_anothers() {
    let Some(world) = World::new([88, 3]) else { return };
    let me = world.credentials(Role::Node, "b");
    let controller = world.credentials(Role::Controller, "controller");
    let config = world.config("b", 1);
    let gateways = config.state.join("gateways");
    let node = Node::start(config).await.unwrap();
    // As the controller's order leaves it; in the kernel there is nothing, and no bridge can have such a name: where this fails,
    // the machine's network stays as it is.
    let known = GatewayPort {
        bridge: "longer-than-any-interface".into(),
        remote: [10, 0, 0, 1].into(),
        host: Some(name("a")),
        vni: 7,
        mtu: 1500,
        lineage: Lineage::FIRST,
        generation: Generation(1),
    };
    std::fs::create_dir_all(&gateways).unwrap();
    std::fs::write(gateways.join("7.json"), serde_json::to_vec(&known).unwrap()).unwrap();

    let web = definition(1, "pc-q35-7.2", &[1], None);
    let of = |from: &str, to: &str, wires: &[u32]| {
        controller.grant(&Capability { wires: wires.to_vec(), ..capability(from, to, &web) }).unwrap()
    };
    let order = |remote: u8, generation, capability| Repoint {
        wire: 7,
        remote: [10, 0, 0, remote].into(),
        lineage: Lineage::FIRST,
        generation: Generation(generation),
        capability,
    };
    let (_x, session) = world.intruder("x", 2).await;
    let x = world.credentials(Role::Node, "x");
    let own = x.grant(&Capability { wires: vec![7], ..capability("a", "x", &web) }).unwrap();
    for (what, wanted) in [
        ("with nothing", order(9, 2, None)),
        ("with nothing, and no change but the owner", order(1, u64::MAX, None)),
        ("with nothing, and no change at all", order(1, 1, None)),
        ("with its own signature", order(9, 2, Some(own))),
        ("with another's", order(9, 2, Some(of("a", "c", &[7])))),
        ("of another wire", order(9, 2, Some(of("a", "x", &[8])))),
        ("as a later owner", order(9, 4, Some(of("a", "x", &[7])))),
        ("to another host", order(8, 2, Some(of("a", "x", &[7])))),
        ("as a source that takes back what another has had since", order(1, 3, Some(of("x", "c", &[7])))),
        ("as a source that takes its VM back to another host", order(9, 3, Some(of("x", "c", &[7])))),
    ] {
        let error = ask(&session, &Request::Repoint(wanted)).await.unwrap_err();
        assert_eq!(error.problem, Problem::Forbidden, "{what}: {error}");
        let kept: GatewayPort = serde_json::from_slice(&std::fs::read(gateways.join("7.json")).unwrap()).unwrap();
        assert_eq!(kept, known, "{what}");
    }
    let probe = ProbeWire { wire: 7, mac: "02:00:00:00:00:01".into(), ips: vec![], within_ms: 10 };
    let error = ask(&session, &Request::ProbeWire(probe)).await.unwrap_err();
    assert_eq!(error.problem, Problem::Forbidden, "{error}");
    // What the owners may.
    let may = |from: &str, order: &Repoint, known: &GatewayPort| {
        let port = covered::repoint(&me, from, order, known)?;
        Ok::<_, godwit_api::ApiError>((port.remote, port.host.map(|host| host.to_string()), port.generation.0))
    };
    let leads = |remote: u8, host: &str, generation: u64| {
        (std::net::IpAddr::from([10, 0, 0, remote]), Some(host.to_owned()), generation)
    };
    assert_eq!(may("a", &order(1, 1, None), &known).unwrap(), leads(1, "a", 1));
    let taken = order(9, 2, Some(of("a", "x", &[7])));
    assert_eq!(may("x", &taken, &known).unwrap(), leads(9, "x", 2));
    // What was taken back before anybody had heard of x.
    let back = order(1, 3, Some(of("a", "x", &[7])));
    assert_eq!(may("a", &back, &known).unwrap(), leads(1, "a", 3));
    // And after that: first x has to say so, and leads it nowhere by that; nor does it later.
    let there = covered::repoint(&me, "x", &taken, &known).unwrap();
    for whom in ["a", "c"] {
        assert_eq!(may(whom, &back, &there).unwrap_err().problem, Problem::Forbidden, "{whom}");
    }
    let given = covered::repoint(&me, "x", &back, &there).unwrap();
    assert_eq!(may("x", &back, &there).unwrap(), leads(9, "a", 2));
    assert_eq!(may("x", &back, &given).unwrap(), leads(9, "a", 2));
    for (whom, order) in [("x", &taken), ("c", &back)] {
        assert_eq!(may(whom, order, &given).unwrap_err().problem, Problem::Forbidden, "{whom}");
    }
    let mine = covered::repoint(&me, "a", &back, &given).unwrap();
    assert_eq!(may("a", &back, &given).unwrap(), leads(1, "a", 3));
    assert_eq!(may("x", &back, &mine).unwrap(), leads(1, "a", 3));
    // Its own order comes late, and finds a later word.
    assert_eq!(may("x", &back, &known).unwrap(), leads(1, "a", 2));
    drop(node);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_was_taken_over_leads_no_end_of_a_wire_to_itself_and_makes_no_wire_up() {
    let Some(world) = World::new([88, 5]) else { return };
    let me = world.credentials(Role::Node, "b");
    let controller = world.credentials(Role::Controller, "controller");
    let config = world.config("b", 1);
    let wires = config.state.join("wires");
    let web = definition(1, "pc-q35-7.2", &[1], None);
    let of = |from: &str, to: &str, wires: &[u32]| {
        controller.grant(&Capability { wires: wires.to_vec(), ..capability(from, to, &web) }).unwrap()
    };
    let host = |name: &str, n: u8| {
        let at = |port: u16| format!("10.0.0.{n}:{port}");
        let link = json!({"control": at(1), "disk": at(2), "memory": at(3)});
        json!({"name": name, "underlay": format!("10.0.0.{n}"), "link": link})
    };
    let view = |host: Value, generation: u64, signed: Option<SignedCapability>| json!({"host": host, "lineage": 0, "generation": generation, "capability": signed});
    let order = |id: u32, a: Value| -> WireOrder {
        let ends = [
            json!({"endpoint": 7, "name": "web:eth0", "view": a}),
            json!({"endpoint": 8, "name": "db:eth0", "view": view(host("b", 2), 1, None)}),
        ];
        serde_json::from_value(json!({"id": id, "vni": id, "mtu": 1500, "ends": ends})).unwrap()
    };
    // As the controller's order leaves it.
    let known = order(9, view(host("a", 1), 1, None));
    std::fs::create_dir_all(&wires).unwrap();
    std::fs::write(wires.join("9.json"), json!({"order": known}).to_string()).unwrap();
    let node = Node::start(config).await.unwrap();

    let (_x, session) = world.intruder("x", 2).await;
    let ask = async |order: &WireOrder| {
        let request = proto::encode(&Request::Wire(Box::new(order.clone())));
        let answer = session.request(request, SOON).await.unwrap();
        proto::decode::<Result<[EndView; 2], godwit_api::ApiError>>(&answer).unwrap()
    };
    let x = world.credentials(Role::Node, "x");
    let own = x.grant(&Capability { wires: vec![7], ..capability("a", "x", &web) }).unwrap();
    let next = ticket(1).generation.0;
    for (what, a) in [
        ("with nothing", view(host("x", 9), next, None)),
        ("with its own signature", view(host("x", 9), next, Some(own))),
        ("with another's", view(host("x", 9), next, Some(of("a", "c", &[7])))),
        ("of another endpoint", view(host("x", 9), next, Some(of("a", "x", &[8])))),
        ("as a later owner", view(host("x", 9), next + 2, Some(of("a", "x", &[7])))),
        ("to another host", view(host("x", 8), next, Some(of("a", "x", &[7])))),
        ("as a source that takes back what it does not have", view(host("x", 9), next + 1, Some(of("x", "c", &[7])))),
    ] {
        let error = ask(&order(9, a)).await.unwrap_err();
        assert_eq!(error.problem, Problem::Forbidden, "{what}: {error}");
    }
    // Of where another host's end is about to go it is not asked: nothing changes.
    let mut coming = order(9, view(host("a", 1), 1, None));
    coming.ends[0].view.step = 5;
    coming.ends[0].view.coming =
        serde_json::from_value(json!({"host": host("x", 9), "capability": of("a", "x", &[7])})).unwrap();
    assert_eq!(ask(&coming).await.unwrap(), known.ends.clone().map(|end| end.view));
    let error = ask(&order(10, view(host("x", 9), 1, None))).await.unwrap_err();
    assert_eq!(error.problem, Problem::NotFound, "a wire that nobody has ordered: {error}");
    assert_eq!(std::fs::read_dir(&wires).unwrap().count(), 1);
    // Nor does it have this host listen to a wire that does not lead there.
    let greeting = proto::encode(&Request::GreetWire(GreetWire { wire: 9, nonce: [7; 16], within_ms: 10 }));
    let answer = session.request(greeting, SOON).await.unwrap();
    let error = proto::decode::<Result<Greeted, godwit_api::ApiError>>(&answer).unwrap().unwrap_err();
    assert_eq!(error.problem, Problem::Forbidden, "{error}");
    // What the owners may.
    let known = &known.ends[0].view;
    let may = |from: &str, view: Value| {
        let end = &order(9, view).ends[0];
        covered::end(&me, from, end, known, || None)
            .map(|believed| (believed.host.name.to_string(), believed.coming.is_some()))
    };
    assert_eq!(may("x", view(host("x", 9), next, Some(of("a", "x", &[7])))).unwrap(), ("x".into(), false));
    // Whoever relays it.
    assert_eq!(may("c", view(host("x", 9), next, Some(of("a", "x", &[7])))).unwrap(), ("x".into(), false));
    assert_eq!(may("a", view(host("a", 1), next + 1, Some(of("a", "x", &[7])))).unwrap(), ("a".into(), false));
    assert_eq!(
        covered::end(&me, "a", &coming.ends[0], known, || None).unwrap().coming.map(|c| c.host.name),
        Some(name("x"))
    );
    // What was granted and given back: first x says so, and then nobody but a.
    let left = || Some(of("a", "x", &[7]));
    let there = covered::end(&me, "x", &order(9, view(host("x", 9), next, left())).ends[0], known, || None).unwrap();
    let back = order(9, view(host("a", 1), next + 1, left()));
    let elsewhere = order(9, view(host("a", 8), next + 1, left()));
    let may = |from: &str, order: &WireOrder, known: &EndView| {
        covered::end(&me, from, &order.ends[0], known, || None)
            .map(|believed| (believed.host.name.to_string(), believed.generation.0, believed.step))
    };
    for from in ["a", "c"] {
        assert_eq!(may(from, &back, &there).unwrap_err().problem, Problem::Forbidden, "{from}");
    }
    let given = covered::end(&me, "x", &back.ends[0], &there, || None).unwrap();
    assert_eq!(may("x", &back, &there).unwrap(), ("a".into(), next, 1));
    for from in ["x", "c"] {
        assert_eq!(may(from, &back, &given).unwrap(), ("a".into(), next, 1), "{from} relays it");
    }
    assert_eq!(may("a", &elsewhere, &given).unwrap_err().problem, Problem::Forbidden);
    assert_eq!(may("a", &back, &given).unwrap(), ("a".into(), next + 1, 0));
    // As the host that gave it back knows it.
    let source = || Some(back.ends[0].view.host.clone());
    assert!(covered::end(&me, "a", &back.ends[0], &there, source).is_ok());
    assert!(covered::end(&me, "a", &elsewhere.ends[0], &there, source).is_err());
    drop(node);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_took_back_what_it_had_given_here_says_so_and_speaks_for_it_no_longer() {
    let Some(world) = World::new([88, 6]) else { return };
    world.credentials(Role::Node, "b");
    let controller = world.credentials(Role::Controller, "controller");
    let config = world.config("b", 1);
    let (a, b) = (world.peer("a", 3), world.peer("b", 1));
    let mut web = definition(1, "pc-q35-7.2", &[], None);
    web.wires = serde_json::from_value(json!([{"id": 7}])).unwrap();
    // The VM was given here and given back; the component was refused. Both came from a.
    let file = VmFile { peer: Some(a.clone()), ..VmFile::new(web.clone(), Power::Off) };
    registry::store(&config.state.join("vms/1"), &file).unwrap();
    FileLedger::open(&config.state.join("records")).unwrap().store(VmId(1), &Record::Returned(ticket(1))).unwrap();
    let components = config.state.join("components");
    FileLedger::open(&components.join("records")).unwrap().store(VmId(2), &Record::Refused(ticket(2))).unwrap();
    let sw1 = json!({"id": 2, "name": "sw1", "kind": "switch", "endpoints": [8]});
    std::fs::write(components.join("2.json"), json!({"definition": sw1, "peer": a, "order": null}).to_string())
        .unwrap();

    let view = |host: &PeerHost, generation: u64, signed: Option<SignedCapability>| json!({"host": host, "lineage": 0, "generation": generation, "capability": signed});
    let order = |web: Value, sw1: Value| -> WireOrder {
        let ends = [
            json!({"endpoint": 7, "name": "web:eth0", "view": web}),
            json!({"endpoint": 8, "name": "sw1:p1", "view": sw1}),
        ];
        serde_json::from_value(json!({"id": 9, "vni": 9, "mtu": 1500, "ends": ends})).unwrap()
    };
    // This host had opened the VM's end.
    let known = order(view(&b, 2, None), view(&a, 1, None));
    let wires = config.state.join("wires");
    std::fs::create_dir_all(&wires).unwrap();
    std::fs::write(wires.join("9.json"), json!({"order": known}).to_string()).unwrap();
    let node = Node::start(config).await.unwrap();

    let (endpoint, session) = world.intruder("a", 3).await;
    // It says so as soon as it can, by whichever session: others believe nobody else.
    let mut theirs = None;
    let says = async {
        tokio::select! {
            asked = session.accept_request() => asked.unwrap(),
            begun = endpoint.accept() => theirs.insert(begun.unwrap()).accept_request().await.unwrap(),
        }
    };
    let asked = tokio::time::timeout(SOON, says).await.unwrap();
    let (request, responder) = asked.whole().await.unwrap();
    let Request::Wire(said) = proto::decode(&request).unwrap() else { panic!("it asks for something else") };
    let ends = said.ends.map(|end| end.view);
    assert_eq!((&ends[0].host, ends[0].generation), (&a, Generation(3)));
    responder.respond(proto::encode(&Ok::<_, godwit_api::ApiError>(ends))).await.unwrap();

    let tell = async |web: Value, sw1: Value| {
        let request = proto::encode(&Request::Wire(Box::new(order(web, sw1))));
        let answer = session.request(request, SOON).await.unwrap();
        proto::decode::<Result<[EndView; 2], godwit_api::ApiError>>(&answer).unwrap()
    };
    let left = controller.grant(&Capability { wires: vec![7], ..capability("a", "b", &web) }).unwrap();
    let sw1 = || view(&a, 1, None);
    for (what, web, sw1) in [
        ("a VM, with nothing", view(&a, 4, None), sw1()),
        ("a VM, later than it took it back", view(&a, 4, Some(left.clone())), sw1()),
        ("a component", view(&b, 2, None), view(&world.peer("x", 4), 5, None)),
    ] {
        let error = tell(web, sw1).await.unwrap_err();
        assert_eq!(error.problem, Problem::Forbidden, "{what}: {error}");
    }
    for host in [&a, &world.peer("a", 4)] {
        let known = tell(view(host, 3, Some(left.clone())), sw1()).await.unwrap();
        assert_eq!((&known[0].host, known[0].generation), (&a, Generation(3)), "it knows where that is");
    }
    drop(node);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_brings_one_end_of_a_wire_joins_it_to_no_port_of_this_hosts() {
    let Some(world) = World::new([88, 12]) else { return };
    world.credentials(Role::Node, "b");
    let config = world.config("b", 1);
    let wires = config.state.join("wires");
    let (a, b) = (world.peer("a", 3), world.peer("b", 1));
    // A component is coming from a, and a VM has come from c.
    let components = config.state.join("components");
    FileLedger::open(&components.join("records")).unwrap().store(VmId(2), &Record::Prepared(ticket(2))).unwrap();
    let sw1 = json!({"id": 2, "name": "sw1", "kind": "switch", "endpoints": [28]});
    std::fs::write(components.join("2.json"), json!({"definition": sw1, "peer": a, "order": null}).to_string())
        .unwrap();
    let mut web = definition(1, "pc-q35-7.2", &[], None);
    web.wires = serde_json::from_value(json!([{"id": 29}])).unwrap();
    let file = VmFile { peer: Some(world.peer("c", 4)), ..VmFile::new(web, Power::On) };
    registry::store(&config.state.join("vms/1"), &file).unwrap();
    FileLedger::open(&config.state.join("records")).unwrap().store(VmId(1), &Record::Prepared(ticket(1))).unwrap();
    let node = Node::start(config).await.unwrap();
    let until = Instant::now() + SOON;
    while node.vm(VmId(1)).unwrap().view().ownership != Ownership::WaitsForPeer {
        assert!(Instant::now() < until, "{:?}", node.vm(VmId(1)).unwrap().view());
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let (_a, session) = world.intruder("a", 3).await;
    let view = |host: &PeerHost| json!({"host": host, "lineage": 0, "generation": 1});
    for (what, endpoint, other) in [
        ("to a port of what is here", 29, view(&a)),
        ("to one that it says is here", 27, view(&b)),
        ("to one that comes here", 27, {
            let mut other = view(&a);
            other["coming"] = json!({"host": b});
            other
        }),
    ] {
        let ends = [
            json!({"endpoint": 28, "name": "sw1:p1", "view": view(&a)}),
            json!({"endpoint": endpoint, "name": "other:p1", "view": other}),
        ];
        let told: WireOrder = serde_json::from_value(json!({"id": 30, "vni": 30, "mtu": 1500, "ends": ends})).unwrap();
        let answer = session.request(proto::encode(&Request::Wire(Box::new(told))), SOON).await;
        // Where this fails: its devices are this machine's.
        node.disconnect(30).await.unwrap();
        let answer = proto::decode::<Result<[EndView; 2], godwit_api::ApiError>>(&answer.unwrap()).unwrap();
        assert_eq!(answer.unwrap_err().problem, Problem::Forbidden, "{what}");
        assert!(!wires.exists(), "{what}");
    }
    drop(node);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_brings_one_end_of_a_wire_is_not_believed_of_the_other() {
    let Some(world) = World::new([88, 7]) else { return };
    world.credentials(Role::Node, "b");
    let config = world.config("b", 1);
    let (a, b) = (world.peer("a", 3), world.peer("b", 1));
    // Tests run side by side on one network: a wire that no other test has. The component is coming; the VM at the other end is neither here nor there.
    let components = config.state.join("components");
    FileLedger::open(&components.join("records")).unwrap().store(VmId(2), &Record::Prepared(ticket(2))).unwrap();
    let sw1 = json!({"id": 2, "name": "sw1", "kind": "switch", "endpoints": [18]});
    std::fs::write(components.join("2.json"), json!({"definition": sw1, "peer": a, "order": null}).to_string())
        .unwrap();
    let view = |host: &PeerHost, generation: u64| json!({"host": host, "lineage": 0, "generation": generation});
    let order = |web: Value, sw1: Value| -> WireOrder {
        let ends = [
            json!({"endpoint": 17, "name": "web:eth0", "view": web}),
            json!({"endpoint": 18, "name": "sw1:p1", "view": sw1}),
        ];
        serde_json::from_value(json!({"id": 19, "vni": 19, "mtu": 1500, "ends": ends})).unwrap()
    };
    let known = order(view(&world.peer("c", 4), 1), view(&a, 1));
    let wires = config.state.join("wires");
    std::fs::create_dir_all(&wires).unwrap();
    std::fs::write(wires.join("19.json"), json!({"order": known}).to_string()).unwrap();
    let node = Node::start(config).await.unwrap();

    let (_a, session) = world.intruder("a", 3).await;
    let mut told = order(view(&a, 5), view(&a, 1));
    told.ends[1].view.step = 1;
    told.ends[1].view.coming = serde_json::from_value(json!({"host": b})).unwrap();
    let answer = session.request(proto::encode(&Request::Wire(Box::new(told))), SOON).await;
    // Its devices are this machine's: they go whatever was answered.
    node.disconnect(19).await.unwrap();
    let answer = answer.unwrap();
    let [web, sw1] = proto::decode::<Result<[EndView; 2], godwit_api::ApiError>>(&answer).unwrap().unwrap();
    assert_eq!((web.host.name.as_str(), web.generation), ("c", Generation(1)), "nothing shows the later owner");
    assert_eq!(sw1.coming.map(|coming| coming.host.name.to_string()), Some("b".into()));
    drop(node);
}

/// Fetches what is absent of `replica`, over two streams as an owner opens them. What is absent then.
async fn fetch(session: &Session, right: &Fetch, pair: u64, replica: &Replica) -> godwit_units::Bytes {
    let open = async |fill| {
        let hello = Hello::Fetch { right: Box::new(right.clone()), pair, fill };
        session.open_stream(Lane::Disk, Priority::Interactive, proto::encode(&hello)).await.unwrap()
    };
    let (mut demand, mut fill) = (open(false).await, open(true).await);
    let (mut requester, holder) = (Requester::new(vec![]), Holder("b".into()));
    requester.connected(holder.clone());
    let (mut packer, mut wire) = (Packer::new().unwrap(), vec![]);
    while let Some(question) = requester.poll(Duration::ZERO, replica).unwrap() {
        packer.push(&question.message, &mut wire).unwrap();
    }
    packer.flush(&mut wire).unwrap();
    let _ = demand.send.write(wire.into()).await;
    let mut unpacker = Unpacker::new().unwrap();
    loop {
        let piece = tokio::select! {
            piece = demand.recv.read() => piece,
            piece = fill.recv.read() => piece,
            () = tokio::time::sleep(SOON) => panic!("it is left waiting"),
        };
        let Ok(Some(piece)) = piece else { return replica.absent() };
        unpacker.push(&piece);
        while let Some(answer) = unpacker.poll().unwrap() {
            requester.handle(&holder, &answer, Duration::ZERO, replica).unwrap();
        }
        if replica.absent().0 == 0 {
            return replica.absent();
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn blocks_that_were_left_behind_go_to_the_vms_owner_and_to_nobody_else() {
    let Some(world) = World::new([88, 4]) else { return };
    world.credentials(Role::Node, "b");
    let controller = world.credentials(Role::Controller, "controller");
    let config = world.config("b", 1);
    let web = definition(1, "pc-q35-7.2", &[1], None);
    let lacking = handed_on(&config.state.join("volumes/1"), &world.folder.path().join("there"));
    // It went from here to c as generation 2; c may have handed it on.
    lending(&config, &web, &world.peer("c", 3));
    let node = Node::start(config).await.unwrap();
    let lent = || node.vm(VmId(1)).unwrap().file().lent;
    let right = |generation, capability: Option<Capability>| Fetch {
        vm: VmId(1),
        volume: VolumeId(1),
        lineage: Lineage::FIRST,
        generation: Generation(generation),
        capability: capability.map(|c| controller.grant(&c).unwrap()),
    };
    let later = |from: &str, to: &str| Capability { generation: Generation(3), ..capability(from, to, &web) };

    let (_x, session) = world.intruder("x", 2).await;
    let mut tries = vec![
        ("nothing", right(2, None)),
        ("a later generation, and nothing", right(9, None)),
        ("what another was given", right(3, Some(later("c", "d")))),
        ("what it was given before", right(2, Some(capability("a", "x", &web)))),
        ("what it is to hand on, as who gets it", right(3, Some(later("x", "d")))),
        ("what it took back, as a later owner", right(5, Some(later("x", "d")))),
    ];
    let mut other = right(3, Some(later("c", "x")));
    other.volume = VolumeId(2);
    tries.push(("another volume", other));
    for (pair, (what, right)) in (0..).zip(&tries) {
        let left = fetch(&session, right, pair, &lacking).await;
        assert_eq!(left, godwit_units::Bytes(16 << 10), "{what}: it was given something");
        let refused = ask(&session, &Request::Released(Box::new(right.clone()))).await.unwrap_err();
        assert_eq!((refused.problem, lent()), (Problem::Forbidden, vec![VolumeId(1)]), "{what}");
    }
    // What the controller has said of it is enough; and so is that this host gave it the VM.
    assert_eq!(fetch(&session, &right(3, Some(later("c", "x"))), 8, &lacking).await.0, 0);
    let mut bytes = vec![0; 16];
    lacking.read(16, &mut bytes).unwrap();
    assert_eq!(bytes, b"another's secret");
    ask(&session, &Request::Released(Box::new(right(4, Some(later("x", "d")))))).await.unwrap();
    assert_eq!(lent(), vec![], "it was about to hand the VM on, and took it back");
    node.vm(VmId(1)).unwrap().change(|file| file.lent = vec![VolumeId(1)]).unwrap();
    let (_c, session) = world.intruder("c", 3).await;
    ask(&session, &Request::Released(Box::new(right(2, None)))).await.unwrap();
    assert_eq!(lent(), vec![]);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_lent_goes_to_its_owner_though_the_vm_was_to_come_back_and_did_not() {
    let Some(world) = World::new([88, 11]) else { return };
    world.credentials(Role::Node, "b");
    let config = world.config("b", 1);
    let web = definition(1, "pc-q35-7.2", &[1], None);
    let lacking = handed_on(&config.state.join("volumes/1"), &world.folder.path().join("there"));
    // It went from here to c as generation 2, and an attempt to bring it back as generation 3 has failed.
    lending(&config, &web, &world.peer("c", 3));
    let back = Ticket { generation: Generation(3), mv: MoveId(6), ..ticket(1) };
    FileLedger::open(&config.state.join("records")).unwrap().store(VmId(1), &Record::Refused(back)).unwrap();
    let node = Node::start(config).await.unwrap();
    let lent = || node.vm(VmId(1)).unwrap().file().lent;
    let right = |generation| Fetch {
        vm: VmId(1),
        volume: VolumeId(1),
        lineage: Lineage::FIRST,
        generation: Generation(generation),
        capability: None,
    };
    let (_x, session) = world.intruder("x", 2).await;
    assert_eq!(fetch(&session, &right(2), 1, &lacking).await, godwit_units::Bytes(16 << 10), "it is not the owner");
    let (_c, session) = world.intruder("c", 3).await;
    assert_eq!(fetch(&session, &right(1), 2, &lacking).await, godwit_units::Bytes(16 << 10), "nor was that");
    assert_eq!(fetch(&session, &right(2), 3, &lacking).await.0, 0);
    ask(&session, &Request::Released(Box::new(right(2)))).await.unwrap();
    assert_eq!(lent(), vec![]);
    let refused = ask(&session, &Request::Released(Box::new(right(2)))).await.unwrap_err();
    assert_eq!(refused.problem, Problem::Forbidden, "nothing is lent any more");
}
