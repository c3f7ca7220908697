//! A wire between two ports, with frames: three hosts on one underlay, each a network namespace, and ends that move between them as
//! [`Rehoming`] says. Needs root, `ip`, and `nft` for what is to be kept out.
#![allow(clippy::unwrap_used, reason = "a test")]

mod common;

use common::place::Place;
use godwit_net::{MacAddr, Net, PacketSocket};
use godwit_wire::{
    Component, EndpointId, EndpointSpec, PortWire, Rehoming, Sequence, Side, Stamp, View, Vni, WireId, Wires,
};
use std::collections::BTreeSet;
use std::fs::File;
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv6Addr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const LONG: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_millis(150);
const WIRE: WireId = WireId(9);
const VNI: Vni = Vni(9);
/// Frames after which a tap that has just been opened has its carrier.
const SETTLED: usize = 50;
/// Of the frames that are numbered: none that a kernel knows.
const NUMBERED: [u8; 2] = [0x88, 0xb5];

fn at(generation: u64) -> Sequence {
    Sequence { lineage: 0, generation }
}

fn address(host: usize) -> IpAddr {
    [10, 0, 0, 1 + host as u8].into()
}

fn mac(side: Side) -> MacAddr {
    MacAddr([2, 0, 0, 0, 0, 1 + side.index() as u8])
}

fn tap(side: Side) -> &'static str {
    ["gwt1", "gwt2"][side.index()]
}

fn endpoint(side: Side) -> EndpointSpec {
    EndpointSpec {
        id: EndpointId(1 + side.index() as u64),
        tap: tap(side).into(),
        mac: mac(side),
        mtu: 1500,
        component: Component::Nowhere,
        ips: vec![],
    }
}

struct Host {
    place: Place,
    wires: Wires,
    machine: Rehoming<usize>,
}

impl Host {
    async fn lay(&self) {
        self.place.enter();
        let open = Side::BOTH.into_iter().filter(|side| self.machine.is_open(*side));
        let plan = PortWire {
            wire: WIRE,
            vni: VNI,
            port: godwit_wire::DEFAULT_PORT,
            mtu: 1500,
            devices: open.map(|side| tap(side).to_owned()).collect(),
            remotes: self.machine.remotes().into_iter().map(address).collect(),
        };
        if self.wires.lay(&plan).await.unwrap() {
            self.wires.rule(&[plan]).await.unwrap();
        }
    }

    async fn stage(&self, side: Side) {
        self.place.enter();
        self.wires.stage(&endpoint(side)).await.unwrap();
        self.lay().await;
    }

    async fn open(&mut self, side: Side, sequence: Sequence) {
        self.place.enter();
        self.wires.stage(&endpoint(side)).await.unwrap();
        self.wires.activate(&endpoint(side), sequence).await.unwrap();
        self.machine.open(side, sequence).unwrap();
        self.lay().await;
    }

    async fn close(&mut self, side: Side) {
        self.place.enter();
        self.wires.isolate(&endpoint(side)).await.unwrap();
        self.machine.close(side);
        if self.machine.is_open(Side::A) || self.machine.is_open(Side::B) {
            self.lay().await;
        }
    }

    /// A guest's end of its tap here.
    fn guest(&self, side: Side) -> File {
        self.place.enter();
        common::tap(tap(side))
    }
}

/// Three hosts, the ends at these two.
async fn world(ends: [usize; 2]) -> (Vec<Host>, Place) {
    let underlay = Place::new();
    underlay.run("ip link add under type bridge; ip link set under up");
    let view = |host| View { stamp: Stamp { sequence: at(1), step: 0 }, host, coming: None };
    let mut hosts = vec![];
    for n in 0..3 {
        let place = Place::new();
        underlay.run(&format!(
            "ip link add u{n} type veth peer name eth0 netns {}; ip link set u{n} master under up",
            place.path()
        ));
        place.run(&format!("ip addr add {}/24 dev eth0; ip link set eth0 up", address(n)));
        place.enter();
        let machine = Rehoming::new(n, [view(ends[0]), view(ends[1])], BTreeSet::new());
        hosts.push(Host { wires: Wires::new("gw", address(n)).unwrap(), place, machine });
    }
    for side in Side::BOTH {
        hosts[ends[side.index()]].open(side, at(1)).await;
    }
    (hosts, underlay)
}

/// They tell each other, until nobody has anything to say.
async fn settle(hosts: &mut [Host]) {
    while let Some((from, to)) = (0..hosts.len()).find_map(|h| hosts[h].machine.due().first().map(|to| (h, *to))) {
        let views = hosts[from].machine.views().clone();
        if hosts[to].machine.heard(&from, &views) {
            hosts[to].lay().await;
        }
        let answer = hosts[to].machine.views().clone();
        if hosts[from].machine.answered(&to, &answer) {
            hosts[from].lay().await;
        }
    }
}

fn test(body: impl AsyncFnOnce() + Send + 'static) {
    std::thread::spawn(|| {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(body());
    })
    .join()
    .unwrap();
}

/// What a guest does with what comes.
fn listen(mut tun: File) -> Arc<Mutex<Vec<Vec<u8>>>> {
    let heard = Arc::new(Mutex::new(vec![]));
    let into = heard.clone();
    std::thread::spawn(move || {
        let mut frame = [0; 4096];
        while let Ok(got) = tun.read(&mut frame) {
            into.lock().unwrap().push(frame[..got].to_vec());
        }
    });
    heard
}

/// A frame of the given kind, to an address.
fn frame(to: [u8; 6], from: Side, kind: &[u8], payload: &[u8]) -> Vec<u8> {
    let mut frame = [&to[..], &mac(from).0, kind, payload].concat();
    frame.resize(frame.len().max(60), 0);
    frame
}

/// Sends a frame until it arrives; whether it does.
fn passes(sender: &mut File, heard: &Mutex<Vec<Vec<u8>>>, wanted: &[u8], within: Duration) -> bool {
    let end = Instant::now() + within;
    while Instant::now() < end {
        let _ = sender.write_all(wanted);
        std::thread::sleep(Duration::from_millis(5));
        if heard.lock().unwrap().iter().any(|frame| frame == wanted) {
            return true;
        }
    }
    false
}

#[test]
fn layer_2_passes_whole_both_ways_apart_and_collapsed() {
    test(async || {
        for ends in [[0, 1], [0, 0]] {
            let (hosts, _underlay) = world(ends).await;
            let mut guests = Side::BOTH.map(|side| hosts[ends[side.index()]].guest(side));
            let heard = [listen(guests[0].try_clone().unwrap()), listen(guests[1].try_clone().unwrap())];
            for (from, to) in [(Side::A, Side::B), (Side::B, Side::A)] {
                let vlan = [&[0x81, 0x00, 0x20, 0x64][..], &NUMBERED].concat();
                let group = |last| [0x01, 0x80, 0xc2, 0, 0, last];
                let full = [0x5a; 1500];
                for (what, frame) in [
                    ("a frame", frame(mac(to).0, from, &NUMBERED, b"plain")),
                    ("a full frame", frame(mac(to).0, from, &NUMBERED, &full)),
                    ("a full frame with a VLAN tag", frame(mac(to).0, from, &vlan, &full)),
                    ("a frame to an address that nobody has", frame([2, 9, 9, 9, 9, 9], from, &NUMBERED, b"unknown")),
                    ("a broadcast", frame([0xff; 6], from, &NUMBERED, b"broadcast")),
                    ("a multicast", frame([0x33, 0x33, 0, 0, 0, 0x16], from, &NUMBERED, b"multicast")),
                    ("spanning tree", frame(group(0), from, &[0, 0x26], b"\x42\x42\x03")),
                    ("LACP", frame(group(2), from, &[0x88, 0x09], b"\x01\x01")),
                    ("802.1X", frame(group(3), from, &[0x88, 0x8e], b"\x01\x01")),
                    ("LLDP", frame(group(0x0e), from, &[0x88, 0xcc], b"\x02\x07")),
                ] {
                    let passed = passes(&mut guests[from.index()], &heard[to.index()], &frame, LONG);
                    assert!(passed, "{what} does not pass from {from:?}, ends at {ends:?}");
                }
                // As it is said: this one the kernel keeps.
                let pause = frame(group(1), from, &[0x88, 0x08], b"\0\x01");
                assert!(!passes(&mut guests[from.index()], &heard[to.index()], &pause, SHORT), "MAC PAUSE passes");
            }
        }
    });
}

#[test]
fn the_hosts_of_a_wires_ends_greet_each_other_through_its_tunnel_and_no_guest_hears_it() {
    test(async || {
        let (hosts, underlay) = world([0, 1]).await;
        let heard = Side::BOTH.map(|side| listen(hosts[side.index()].guest(side)));
        let (nonce, other) = ([7; 16], [8; 16]);
        let mut greeters = vec![];
        for host in &hosts[..2] {
            host.place.enter();
            greeters.push(host.wires.greeter(WIRE).await.unwrap());
        }
        let greet = async |nonce, bound| {
            tokio::select! {
                answered = greeters[0].greet(nonce, bound) => answered.is_ok(),
                ended = greeters[1].answer(&[7; 16], LONG) => panic!("{ended:?}"),
            }
        };
        assert!(greet(&nonce, LONG).await, "nobody answers");
        assert!(!greet(&other, SHORT).await, "what others say is answered");
        underlay.run("ip link set u1 down");
        assert!(!greet(&nonce, SHORT).await, "it passes a link that is down");
        underlay.run("ip link set u1 up");
        assert!(greet(&nonce, LONG).await, "it does not come back");
        for heard in &heard {
            let heard = heard.lock().unwrap();
            assert!(heard.iter().all(|frame| frame[..6] != [0x01, 0x80, 0xc2, 0, 0, 1]), "{heard:02x?}");
        }
        // From the tunnel to the port.
        let joined = async || hosts[0].wires.is_joined(WIRE, tap(Side::A)).await.unwrap();
        hosts[0].place.enter();
        assert!(joined().await);
        for (wrong, right) in [
            ("ip link set gw-b00000009 down", "ip link set gw-b00000009 up"),
            ("ip link set gwt1 nomaster", "ip link set gwt1 master gw-b00000009"),
        ] {
            hosts[0].place.run(wrong);
            assert!(!joined().await, "{wrong}");
            hosts[0].place.run(right);
            assert!(joined().await, "{right}");
        }
        assert!(!hosts[0].wires.is_joined(WIRE, "gwt77").await.unwrap());
    });
}

#[test]
fn a_wire_collapses_where_its_ends_meet_parts_where_they_part_and_leaves_nothing() {
    test(async || {
        let (mut hosts, _underlay) = world([0, 1]).await;
        let b = hosts[1].guest(Side::B);
        let heard = listen(b.try_clone().unwrap());
        let devices = |host: &Host| {
            let out = host.place.run("ip -o link show");
            ["gw-v", "gw-b"].map(|name| out.contains(name))
        };
        assert_eq!(devices(&hosts[1]), [true, true]);
        for (generation, to) in [(2, 1), (3, 2), (4, 1)] {
            let from = hosts.iter().position(|host| host.machine.is_open(Side::A)).unwrap();
            let views = hosts[from].machine.views().clone();
            hosts[to].machine.heard(&from, &views);
            hosts[to].stage(Side::A).await;
            hosts[from].machine.leave(Side::A, to);
            hosts[from].close(Side::A).await;
            hosts[to].open(Side::A, at(generation)).await;
            settle(&mut hosts).await;
            hosts[from].place.enter();
            hosts[from].wires.remove(&endpoint(Side::A)).await.unwrap();
            if !hosts[from].machine.is_open(Side::B) {
                hosts[from].wires.take_up(WIRE).await.unwrap();
            }
            assert_eq!(devices(&hosts[1]), [to != 1, true], "A is at {to}, B at 1");
            let mut a = hosts[to].guest(Side::A);
            let wanted = frame(mac(Side::B).0, Side::A, &NUMBERED, &generation.to_be_bytes());
            assert!(passes(&mut a, &heard, &wanted, LONG), "A at {to} does not reach B");
        }
        for host in &mut hosts {
            host.place.enter();
            host.wires.take_up(WIRE).await.unwrap();
            for side in Side::BOTH {
                host.wires.remove(&endpoint(side)).await.unwrap();
            }
            host.wires.tidy().await.unwrap();
            assert_eq!(host.wires.list().await.unwrap(), []);
        }
    });
}

/// Sends numbered frames, one each millisecond, until told to end; when each left.
fn number(mut tun: File, from: Side, to: Side, end: Arc<AtomicBool>) -> std::thread::JoinHandle<Vec<Instant>> {
    std::thread::spawn(move || {
        let mut left = vec![];
        while !end.load(Ordering::Relaxed) {
            let n = left.len() as u64;
            left.push(Instant::now());
            tun.write_all(&frame(mac(to).0, from, &NUMBERED, &n.to_be_bytes())).unwrap();
            std::thread::sleep(Duration::from_millis(1));
        }
        left
    })
}

fn numbers(heard: &Mutex<Vec<Vec<u8>>>) -> BTreeSet<u64> {
    let heard = heard.lock().unwrap();
    let numbered = heard.iter().filter(|frame| frame[12..14] == NUMBERED);
    numbered.map(|frame| u64::from_be_bytes(frame[14..22].try_into().unwrap())).collect()
}

/// B, at host 1, sends A numbered frames while A moves. What is told from the pause: a frame that left before A was open at its new host
/// came while A was nowhere; one that left after that has to arrive. Nobody has been told of the new owner yet then.
async fn lost_after_activation(from: usize, to: usize, announce_coming: bool) -> (usize, usize, Duration) {
    let (mut hosts, _underlay) = world([from, 1]).await;
    let before = listen(hosts[from].guest(Side::A));
    let end = Arc::new(AtomicBool::new(false));
    let sender = number(hosts[1].guest(Side::B), Side::B, Side::A, end.clone());
    while numbers(&before).len() < 2 * SETTLED {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let views = hosts[from].machine.views().clone();
    hosts[to].machine.heard(&from, &views);
    hosts[to].stage(Side::A).await;
    let after = listen(hosts[to].guest(Side::A));
    if announce_coming {
        hosts[from].machine.leave(Side::A, to);
        let views = hosts[from].machine.views().clone();
        hosts[1].machine.heard(&from, &views);
        hosts[1].lay().await;
    }
    let stopped = Instant::now();
    hosts[from].close(Side::A).await;
    // The rest of the pause.
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(numbers(&after).len(), 0, "a place that is staged lets frames in");
    hosts[to].open(Side::A, at(2)).await;
    let opened = Instant::now();
    // As long as it takes until the other end's host has heard.
    tokio::time::sleep(Duration::from_millis(100)).await;
    settle(&mut hosts).await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    end.store(true, Ordering::Relaxed);
    let left = sender.join().unwrap();
    tokio::time::sleep(Duration::from_millis(100)).await;
    let (before, after) = (numbers(&before), numbers(&after));
    assert!(before.intersection(&after).next().is_none(), "a frame arrived at both hosts");
    let lost: Vec<usize> =
        (SETTLED..left.len()).filter(|n| !before.contains(&(*n as u64)) && !after.contains(&(*n as u64))).collect();
    let after_activation = lost.iter().filter(|n| left[**n] > opened).count();
    assert!(lost.iter().all(|n| left[*n] + Duration::from_millis(20) > stopped), "lost before the stop: {lost:?}");
    (after_activation, lost.len(), opened - stopped)
}

#[test]
fn no_frame_is_lost_once_an_end_is_open_at_its_new_host_though_nobody_has_heard_of_it() {
    test(async || {
        for (what, from, to) in [("from host to host", 0, 2), ("to the other end's host", 0, 1), ("from there", 1, 2)] {
            let (lost, in_all, pause) = lost_after_activation(from, to, true).await;
            println!("{what}: paused for {pause:?}: {in_all} frames lost meanwhile, {lost} after the activation");
            assert_eq!(lost, 0, "{what}");
        }
        let (lost, in_all, _) = lost_after_activation(0, 2, false).await;
        println!("without a word at the stop: {in_all} lost, {lost} after the activation");
        assert!(lost > 0, "the word at the stop makes no difference");
    });
}

#[test]
fn a_packet_that_may_not_be_cut_is_answered_both_ways_and_passes_when_the_wire_is_collapsed() {
    test(async || {
        for (ends, tunnel) in [([0, 1], true), ([0, 0], false)] {
            let (hosts, _underlay) = world(ends).await;
            let mut guests = Side::BOTH.map(|side| hosts[ends[side.index()]].guest(side));
            let heard = [listen(guests[0].try_clone().unwrap()), listen(guests[1].try_clone().unwrap())];
            for (from, to) in [(Side::A, Side::B), (Side::B, Side::A)] {
                let last = [1 + from.index() as u8, 1 + to.index() as u8];
                let v4 = |total: u16, cut: bool| {
                    let [from_ip, to_ip] = last.map(|n| [10, 9, 0, n]);
                    frame(mac(to).0, from, &[8, 0], &common::ipv4(from_ip, to_ip, total, cut))
                };
                let v6 = |total: u16| {
                    let [from_ip, to_ip] = last.map(|n| Ipv6Addr::new(0xfd00, 9, 0, 0, 0, 0, 0, n.into()).octets());
                    frame(mac(to).0, from, &[0x86, 0xdd], &common::ipv6(from_ip, to_ip, total))
                };
                assert!(passes(&mut guests[from.index()], &heard[to.index()], &v4(1500, true), LONG), "may be cut");
                for (what, fits, large) in [("IPv4", v4(1450, false), v4(1500, false)), ("IPv6", v6(1450), v6(1500))] {
                    assert!(passes(&mut guests[from.index()], &heard[to.index()], &fits, LONG), "{what} that fits");
                    heard[from.index()].lock().unwrap().clear();
                    let until = Instant::now() + LONG;
                    let answered = loop {
                        let passed = passes(&mut guests[from.index()], &heard[to.index()], &large, SHORT);
                        // With the size that fits.
                        let told = heard[from.index()].lock().unwrap().iter().find_map(|f| common::too_large(f));
                        if passed || told.is_some() {
                            break (passed, told);
                        }
                        assert!(Instant::now() < until, "{what} that is too large is neither passed nor answered");
                    };
                    let wanted = if tunnel { (false, Some(1450)) } else { (true, None) };
                    assert_eq!(answered, wanted, "{what} from {from:?}, ends at {ends:?}");
                }
            }
        }
    });
}

#[test]
fn a_host_that_an_end_has_left_can_put_nothing_into_the_wire() {
    if std::process::Command::new("nft").arg("--version").output().is_err() {
        println!("not tested: there is no nft");
        return;
    }
    test(async || {
        let (mut hosts, _underlay) = world([0, 1]).await;
        let heard = listen(hosts[1].guest(Side::B));
        let forge = async |host: &Host, n: u8| {
            // Straight into the tunnel's end there.
            host.place.enter();
            let net = Net::open().unwrap();
            let index = net.get("gw-v00000009").await.unwrap().index;
            let socket = PacketSocket::open(index).unwrap();
            for _ in 0..5 {
                socket.send(&frame(mac(Side::B).0, Side::A, &NUMBERED, &[n; 8])).unwrap();
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        };
        let came = |n: u8| numbers(&heard).contains(&u64::from_be_bytes([n; 8]));
        forge(&hosts[0], 1).await;
        assert!(came(1), "the host that has the end is kept out");
        let views = hosts[0].machine.views().clone();
        hosts[2].machine.heard(&0, &views);
        hosts[2].stage(Side::A).await;
        forge(&hosts[2], 2).await;
        assert!(!came(2), "a host that was told of nothing speaks");
        hosts[0].close(Side::A).await;
        hosts[2].open(Side::A, at(2)).await;
        settle(&mut hosts).await;
        forge(&hosts[2], 3).await;
        assert!(came(3), "the new host is kept out");
        forge(&hosts[0], 4).await;
        assert!(!came(4), "the former host still speaks");
    });
}

#[test]
fn rules_that_cannot_be_changed_and_hold_are_an_error_and_may_be_written_again() {
    if std::process::Command::new("nft").arg("--version").output().is_err() {
        println!("not tested: there is no nft");
        return;
    }
    test(async || {
        let (hosts, _underlay) = world([0, 1]).await;
        let Host { place, wires, .. } = &hosts[0];
        let plan = PortWire {
            wire: WIRE,
            vni: VNI,
            port: godwit_wire::DEFAULT_PORT,
            mtu: 1500,
            devices: vec![],
            remotes: vec![address(2)],
        };
        // Something that no transaction of ours can be made over.
        place.run("nft flush chain inet gw-wires input; nft delete map inet gw-wires wires");
        place.run("nft add set inet gw-wires wires {type ipv4_addr;}");
        let error = wires.rule(std::slice::from_ref(&plan)).await.unwrap_err();
        assert!(error.to_string().contains("[9]"), "{error}");
        place.run("nft delete table inet gw-wires");
        wires.rule(&[plan]).await.unwrap();
        let rules = place.run("nft list chain inet gw-wires w9");
        assert!(rules.contains("10.0.0.3") && !rules.contains("10.0.0.2"), "{rules}");
    });
}

#[test]
fn a_port_passes_the_groups_of_bridges_whoever_died_before_it_could() {
    test(async || {
        let (hosts, _underlay) = world([0, 1]).await;
        let shown = || hosts[0].place.run("ip -d link show gwt1; ip -d link show gw-v00000009");
        assert_eq!(shown().matches("group_fwd_mask 0 ").count(), 0, "{}", shown());
        let undone =
            ["gwt1", "gw-v00000009"].map(|port| format!("ip link set {port} type bridge_slave group_fwd_mask 0"));
        // What is left where a host died in between: the tunnel is up when all is done.
        hosts[0].place.run(&(undone.join("; ") + "; ip link set gw-v00000009 down"));
        assert_eq!(shown().matches("group_fwd_mask 0 ").count(), 2, "{}", shown());
        hosts[0].lay().await;
        assert_eq!(shown().matches("group_fwd_mask 0 ").count(), 0, "{}", shown());
    });
}

#[test]
fn several_wires_are_laid_and_told_of_at_once() {
    let place = Arc::new(Place::new());
    let there = place.clone();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .on_thread_start(move || there.enter())
        .enable_all()
        .build()
        .unwrap();
    let all = std::thread::spawn(move || {
        place.enter();
        runtime.block_on(laid_at_once());
    });
    all.join().unwrap();
}

async fn laid_at_once() {
    let wires = Wires::new("gw", address(0)).unwrap();
    // So many that the kernel does not list them in one go.
    for n in 0..100 {
        wires.net().ensure_bridge(&format!("other{n}"), None).await.unwrap();
    }
    let plans: Vec<PortWire> = (1..=8)
        .map(|n| PortWire {
            wire: WireId(n),
            vni: Vni(100 + n),
            port: godwit_wire::DEFAULT_PORT,
            mtu: 1500,
            devices: vec![],
            remotes: [address(1), address(2)].into(),
        })
        .collect();
    for _ in 0..5 {
        let (laid, listed) = futures_util::future::join(
            futures_util::future::join_all(plans.iter().map(|plan| wires.lay(plan))),
            futures_util::future::join_all((0..8).map(|_| wires.list())),
        )
        .await;
        for laid in laid {
            laid.unwrap();
        }
        for listed in listed {
            listed.unwrap();
        }
    }
    wires.rule(&plans).await.unwrap();
    for plan in &plans {
        wires.take_up(plan.wire).await.unwrap();
    }
    wires.tidy().await.unwrap();
    assert_eq!(wires.list().await.unwrap(), []);
}
