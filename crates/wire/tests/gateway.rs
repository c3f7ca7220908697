//! A wire to a gateway, with frames: two hosts, a gateway with a client behind it, and a stranger, each a network namespace,
//! on one underlay. Needs root, `ip`, and `nft` for what is to be kept out.
#![allow(clippy::unwrap_used, reason = "a test")]

mod common;

use common::place::Place;
use godwit_net::{Net, PacketSocket};
use godwit_wire::{
    Component, EndpointId, EndpointSpec, GatewayPort, PortState, Refused, Sequence, Vni, WireError, WireId, Wires,
};
use std::io::{Read, Write};
use std::net::IpAddr;
use std::os::fd::AsRawFd;
use std::process::Command;
use std::time::{Duration, Instant};
use tokio::net::UdpSocket;
use tokio::time::timeout;

const GUEST: [u8; 6] = [2, 0, 0, 0, 0, 5];
const WIRE: WireId = WireId(7);
const VNI: Vni = Vni(0x00ab_cd07);
/// What a client waits for when it expects an answer, and when it expects none.
const LONG: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_millis(200);

/// Everything: A and B are 10.0.0.1 and 10.0.0.2, the gateway 10.0.0.3, the stranger 10.0.0.9; the client is behind the
/// gateway's bridge.
struct World {
    hosts: [Place; 2],
    gateway: Place,
    stranger: Place,
    client: Place,
    _underlay: Place,
}

impl World {
    fn new() -> Self {
        let underlay = Place::new();
        underlay.run("ip link add under type bridge; ip link set under up");
        let host = |n: u8| {
            let place = Place::new();
            underlay.run(&format!(
                "ip link add u{n} type veth peer name eth0 netns {}; ip link set u{n} master under up",
                place.path()
            ));
            place.run(&format!("ip addr add 10.0.0.{n}/24 dev eth0; ip link set eth0 up"));
            place
        };
        let (hosts, gateway, stranger) = ([host(1), host(2)], host(3), host(9));
        let client = Place::new();
        gateway.run(&format!(
            "ip link add clients type bridge; ip link set clients up; \
             ip link add c0 type veth peer name eth0 netns {}; ip link set c0 master clients up",
            client.path()
        ));
        client.run("ip addr add 10.9.0.1/24 dev eth0; ip link set eth0 up");
        Self { hosts, gateway, stranger, client, _underlay: underlay }
    }
}

fn host(n: u8) -> IpAddr {
    [10, 0, 0, n].into()
}

fn at(generation: u64) -> Sequence {
    Sequence { lineage: 0, generation }
}

fn endpoint() -> EndpointSpec {
    EndpointSpec {
        id: EndpointId(1),
        tap: "gwt1".into(),
        mac: "02:00:00:00:00:05".parse().unwrap(),
        mtu: 1500,
        component: Component::Gateway {
            host: host(3),
            bridge: "clients".into(),
            wire: WIRE,
            vni: VNI,
            port: godwit_wire::DEFAULT_PORT,
        },
        ips: vec![[10, 9, 0, 5].into()],
    }
}

fn port() -> GatewayPort {
    GatewayPort { wire: WIRE, vni: VNI, port: godwit_wire::DEFAULT_PORT, bridge: "clients".into(), mtu: 1500 }
}

/// A guest of a few lines, 10.9.0.5: answers ARP requests, and sends UDP back to where it came from.
fn guest(tap: &str) {
    let mut tun = common::tap(tap);
    std::thread::spawn(move || {
        let mut frame = [0; 2048];
        while let Ok(got) = tun.read(&mut frame) {
            let asker: [u8; 6] = frame[6..12].try_into().unwrap();
            if common::asks_for(&frame[..got], [10, 9, 0, 5]) {
                let _ = tun.write_all(&common::arp_answer(&frame[..got], GUEST));
            } else if got >= 42 && frame[..6] == GUEST && frame[12..14] == [8, 0] && frame[23] == 17 {
                frame[..6].copy_from_slice(&asker);
                frame[6..12].copy_from_slice(&GUEST);
                // Check sums are sums: they do not mind.
                for (from, to, bytes) in [(26, 30, 4), (34, 36, 2)] {
                    for i in 0..bytes {
                        frame.swap(from + i, to + i);
                    }
                }
                let _ = tun.write_all(&frame[..got]);
            }
        }
    });
}

/// A client's socket, in the namespace of the calling thread. Unless frames may be cut, they say so.
async fn client(may_be_cut: bool) -> UdpSocket {
    let socket = UdpSocket::bind("10.9.0.1:0").await.unwrap();
    let value: libc::c_int = if may_be_cut { libc::IP_PMTUDISC_DONT } else { libc::IP_PMTUDISC_DO };
    // SAFETY: the pointer and the length describe `value`, which outlives the call.
    let set = unsafe {
        let (value, size) = ((&raw const value).cast(), size_of_val(&value) as u32);
        libc::setsockopt(socket.as_raw_fd(), libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, value, size)
    };
    assert_eq!(set, 0);
    socket.connect("10.9.0.5:7").await.unwrap();
    socket
}

/// The client sends packets of `length` bytes, IP header included, until one comes back; how long that took.
async fn ask(client: &UdpSocket, length: usize, within: Duration) -> Result<Duration, String> {
    let start = Instant::now();
    let mut last = "no answer".to_owned();
    let mut buffer = [0; 2048];
    for number in 0_u64.. {
        if start.elapsed() >= within {
            break;
        }
        let mut payload = vec![0x5a; length - 28];
        payload[..8].copy_from_slice(&number.to_be_bytes());
        if let Err(error) = client.send(&payload).await {
            last = error.to_string();
        }
        while let Ok(got) = timeout(Duration::from_millis(20), client.recv(&mut buffer)).await {
            match got {
                Ok(got) if buffer[..got] == payload => return Ok(start.elapsed()),
                Ok(_) => {}
                Err(error) => last = error.to_string(),
            }
        }
    }
    Err(last)
}

/// The packet filter of the namespace of the calling thread; empty without `nft`.
fn rules() -> String {
    let output = Command::new("nft").args(["list", "ruleset"]).output();
    output.map_or_else(|_| String::new(), |output| String::from_utf8(output.stdout).unwrap())
}

fn test(body: impl AsyncFnOnce() + Send + 'static) {
    std::thread::spawn(|| {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(body());
    })
    .join()
    .unwrap();
}

/// The world with the guest at A, talking with the client.
async fn wired() -> (World, [Wires; 2], Wires) {
    let world = World::new();
    let wires = [0, 1].map(|i| {
        world.hosts[i].enter();
        Wires::new("gw", host(1 + i as u8)).unwrap()
    });
    world.gateway.enter();
    let gateway = Wires::new("gw", host(3)).unwrap();
    gateway.gateway_ensure("clients").await.unwrap();
    gateway.gateway_attach(&port(), host(1), at(1)).await.unwrap();
    world.hosts[0].enter();
    wires[0].stage(&endpoint()).await.unwrap();
    guest("gwt1");
    wires[0].activate(&endpoint(), at(1)).await.unwrap();
    (world, wires, gateway)
}

#[test]
fn a_client_at_the_gateway_goes_on_talking_to_the_guest_after_its_move() {
    test(async || {
        let (world, [a, b], gateway) = wired().await;
        world.client.enter();
        let client = client(true).await;
        println!("first answer after {:?}", ask(&client, 100, LONG).await.unwrap());
        let net = Net::open().unwrap();
        let heard = PacketSocket::open(net.get("eth0").await.unwrap().index).unwrap();
        let neighbour = |world: &World| world.client.run("ip neigh show 10.9.0.5");
        assert!(neighbour(&world).contains("lladdr 02:00:00:00:00:05"));

        world.hosts[1].enter();
        b.stage(&endpoint()).await.unwrap();
        guest("gwt1");
        ask(&client, 100, LONG).await.expect("staging elsewhere changes nothing");
        world.hosts[0].enter();
        a.isolate(&endpoint()).await.unwrap();
        assert!(ask(&client, 100, SHORT).await.is_err(), "the source still answers after its isolation");
        world.hosts[1].enter();
        b.activate(&endpoint(), at(2)).await.unwrap();
        world.gateway.enter();
        let start = Instant::now();
        gateway.gateway_repoint(WIRE, host(2), at(2)).await.unwrap();
        let repointed = start.elapsed();
        println!("re-pointed in {repointed:?}, answer after {:?}", ask(&client, 100, LONG).await.unwrap());
        assert!(neighbour(&world).contains("lladdr 02:00:00:00:00:05"));

        // Announcements: by ARP for neighbours, by RARP for switches. Those before the re-pointing may be lost.
        let announcements = async |silence: Duration| {
            let mut frame = [0; 128];
            let (mut arp, mut rarp) = (0, 0);
            while let Ok(got) = timeout(silence, heard.receive(&mut frame)).await {
                if got.unwrap() >= 42 && frame[6..12] == GUEST && frame[..6] == [255; 6] {
                    arp += usize::from(frame[12..14] == [0x08, 0x06]);
                    rarp += usize::from(frame[12..14] == [0x80, 0x35]);
                }
                if arp > 0 && rarp > 0 && silence == LONG {
                    break;
                }
            }
            println!("heard {arp} ARP and {rarp} RARP announcements");
            arp > 0 && rarp > 0
        };
        assert!(announcements(LONG).await);
        // More than the longest time between two of them: those of the activation are over.
        announcements(Duration::from_secs(1)).await;
        world.hosts[1].enter();
        b.announce_again(&endpoint()).await.unwrap();
        assert!(announcements(LONG).await, "an active endpoint can be announced again");

        world.gateway.enter();
        let late = gateway.gateway_repoint(WIRE, host(1), at(1)).await;
        assert!(matches!(late, Err(WireError::Refused { why: Refused::Superseded { .. }, .. })), "{late:?}");
        ask(&client, 100, LONG).await.expect("a late re-pointing steals nothing");

        // And back, as a recalled hand-off does: only the sequence counts.
        world.hosts[1].enter();
        b.isolate(&endpoint()).await.unwrap();
        announcements(Duration::from_millis(100)).await;
        b.announce_again(&endpoint()).await.unwrap();
        assert!(!announcements(Duration::from_millis(100)).await, "an isolated endpoint announces nothing");
        world.hosts[0].enter();
        a.activate(&endpoint(), at(3)).await.unwrap();
        world.gateway.enter();
        gateway.gateway_repoint(WIRE, host(1), at(3)).await.unwrap();
        ask(&client, 100, LONG).await.expect("the source has it again");

        let found = gateway.list().await.unwrap();
        let left = format!("{found:?}");
        assert!(left.contains(&format!("{:?}", PortState::Attached(at(3), host(1)))), "{left}");
        gateway.gateway_detach(WIRE).await.unwrap();
        assert!(!rules().contains("jump"), "the rules of a port go with it: {}", rules());
        gateway.tidy().await.unwrap();
        assert_eq!(gateway.list().await.unwrap(), []);
        for (place, wires) in world.hosts.iter().zip([&a, &b]) {
            place.enter();
            wires.remove(&endpoint()).await.unwrap();
            assert!(!rules().contains("jump"), "the rules of a wire go with it: {}", rules());
            wires.tidy().await.unwrap();
            assert_eq!(wires.list().await.unwrap(), []);
        }
    });
}

#[test]
fn a_guest_on_the_gateways_own_host_is_on_the_clients_bridge_and_its_wire_takes_nothing_from_outside() {
    test(async || {
        let (world, [a, _], gateway) = wired().await;
        world.client.enter();
        let client = client(true).await;
        ask(&client, 100, LONG).await.unwrap();
        world.hosts[0].enter();
        a.isolate(&endpoint()).await.unwrap();
        world.gateway.enter();
        gateway.stage(&endpoint()).await.unwrap();
        guest("gwt1");
        gateway.activate(&endpoint(), at(2)).await.unwrap();
        gateway.gateway_repoint(WIRE, host(3), at(2)).await.unwrap();
        ask(&client, 1500, LONG).await.expect("no tunnel is in the way");
        let (mac, ips) = (endpoint().mac, endpoint().ips);
        gateway.gateway_probe("clients", WIRE, (mac, &ips), LONG).await.unwrap();
        assert!(rules().is_empty() || !rules().contains("return"), "somebody may send: {}", rules());
        gateway.isolate(&endpoint()).await.unwrap();
        world.hosts[0].enter();
        a.activate(&endpoint(), at(3)).await.unwrap();
        world.gateway.enter();
        gateway.gateway_repoint(WIRE, host(1), at(3)).await.unwrap();
        ask(&client, 100, LONG).await.expect("and out again");
    });
}

#[test]
fn a_frame_of_1500_bytes_passes_and_one_that_may_not_be_cut_is_answered_with_the_size_that_does() {
    test(async || {
        let (world, _wires, _gateway) = wired().await;
        world.client.enter();
        let cut = client(true).await;
        ask(&cut, 1500, LONG).await.expect("the tunnel's packets are cut where the underlay is narrow");
        let whole = client(false).await;
        ask(&whole, 1450, LONG).await.expect("fits");
        let until = Instant::now() + LONG;
        loop {
            let refused = ask(&whole, 1500, SHORT).await.expect_err("does not fit, and may not be cut");
            if refused.contains("too long") {
                break;
            }
            assert!(Instant::now() < until, "{refused}: the client is not told");
        }
        ask(&whole, 1450, LONG).await.expect("fits");
        let route = world.client.run("ip route get 10.9.0.5");
        assert!(route.contains("mtu 1450"), "{route}");
    });
}

#[test]
fn the_gateway_proves_the_path_exactly_while_the_guest_is_reachable_through_the_wire() {
    test(async || {
        let (world, [a, b], gateway) = wired().await;
        let (mac, ips) = (endpoint().mac, endpoint().ips);
        world.gateway.enter();
        println!("proved in {:?}", gateway.gateway_probe("clients", WIRE, (mac, &ips), LONG).await.unwrap());
        world.hosts[0].enter();
        a.isolate(&endpoint()).await.unwrap();
        world.hosts[1].enter();
        b.stage(&endpoint()).await.unwrap();
        guest("gwt1");
        b.activate(&endpoint(), at(2)).await.unwrap();
        b.probe(&endpoint(), LONG).await.expect("the host's own end of the wire works");
        world.gateway.enter();
        let not_there = gateway.gateway_probe("clients", WIRE, (mac, &ips), SHORT).await;
        assert!(matches!(not_there, Err(WireError::NoAnswer { .. })), "{not_there:?}");
        gateway.gateway_repoint(WIRE, host(2), at(2)).await.unwrap();
        gateway.gateway_probe("clients", WIRE, (mac, &ips), LONG).await.unwrap();
        let unknown = gateway.gateway_probe("clients", WireId(8), (mac, &ips), SHORT).await;
        assert!(matches!(unknown, Err(WireError::Refused { why: Refused::NotAttached, .. })), "{unknown:?}");
    });
}

#[test]
fn only_the_host_that_the_wire_leads_to_can_put_frames_into_it() {
    if Command::new("nft").arg("--version").output().is_err() {
        println!("not tested: there is no nft");
        return;
    }
    test(async || {
        let (world, _wires, gateway) = wired().await;
        world.client.enter();
        let net = Net::open().unwrap();
        let heard = PacketSocket::open(net.get("eth0").await.unwrap().index).unwrap();
        ask(&client(true).await, 100, LONG).await.unwrap();
        let forged = async |from: &Place, device: &str, to: &str| {
            from.enter();
            let _ = Command::new("ip").args(["link", "del", device]).output();
            from.run(&format!(
                "ip link add {device} type vxlan id {} dstport 4789 remote {to} local 10.0.0.9; ip link set {device} up",
                VNI.0
            ));
            let net = Net::open().unwrap();
            let socket = PacketSocket::open(net.get(device).await.unwrap().index).unwrap();
            for _ in 0..10 {
                socket.send(&godwit_net::rarp("02:00:00:00:00:66".parse().unwrap())).unwrap();
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let reached = async || {
            let mut frame = [0; 128];
            let mut forged = 0;
            while let Ok(Ok(_)) = timeout(Duration::from_millis(100), heard.receive(&mut frame)).await {
                forged += usize::from(frame[6..12] == [2, 0, 0, 0, 0, 0x66]);
            }
            forged
        };
        forged(&world.stranger, "forge", "10.0.0.3").await;
        assert_eq!(reached().await, 0, "a stranger speaks on the wire");
        // The same frames pass once the wire leads there: it is the guard that kept them out.
        world.gateway.enter();
        gateway.gateway_repoint(WIRE, host(9), at(2)).await.unwrap();
        let until = Instant::now() + LONG;
        loop {
            forged(&world.stranger, "forge", "10.0.0.3").await;
            if reached().await > 0 {
                break;
            }
            assert!(Instant::now() < until, "the host that the wire leads to is kept out");
        }
        // The guest's host takes frames from the gateway alone.
        world.hosts[0].enter();
        let net = Net::open().unwrap();
        let received = async || net.get("gw-v00000007").await.unwrap().received;
        let before = received().await;
        forged(&world.stranger, "forge", "10.0.0.1").await;
        assert_eq!(received().await, before, "a stranger reaches the guest");
    });
}
