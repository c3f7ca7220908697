//! Components between guests, each guest a network namespace. Needs root; everything goes with the namespaces.
#![allow(clippy::unwrap_used, reason = "a test")]

use godwit_component::{ComponentError, Kind, NetNs, Place, Spec};
use godwit_net::{Net, PacketSocket, Prefix, Route, VethEnd};
use godwit_wire::Wires;
use std::collections::BTreeSet;
use std::future::Future;
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsRawFd;
use std::process::Command;
use std::time::{Duration, Instant};

/// Longer than a busy machine needs for anything here.
const LONG: Duration = Duration::from_secs(60);
/// How long nothing has to come before it is believed that nothing will; a retransmission or two.
const NOTHING: Duration = Duration::from_millis(700);

/// Runs a test in a host's namespace of its own.
fn on_a_host<F: Future<Output = ()>>(test: impl FnOnce(Host) -> F + Send + 'static) {
    NetNs::fresh(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let host = Host { net: Net::open().unwrap(), folder: tempfile::tempdir().unwrap() };
            let lo = host.net.get("lo").await.unwrap();
            host.net.up(lo.index).await.unwrap();
            test(host).await;
        });
    })
    .expect("needs root");
}

struct Host {
    net: Net,
    folder: tempfile::TempDir,
}

/// A component's place; its holder ends with it, also when the test fails.
struct Here {
    place: Place,
    wires: Wires,
    prefix: &'static str,
    ids: Vec<u64>,
}

impl Drop for Here {
    fn drop(&mut self) {
        for id in &self.ids {
            // What the test itself removes is gone already.
            if let Some(pid) = self.pid(*id) {
                rustix::process::kill_process(
                    rustix::process::Pid::from_raw(pid).unwrap(),
                    rustix::process::Signal::KILL,
                )
                .unwrap();
            }
        }
    }
}

impl Here {
    fn pid(&self, id: u64) -> Option<i32> {
        self.place.namespace(id)?;
        std::fs::read_to_string(self.place.holder_file(id)).ok()?.trim().parse().ok()
    }
}

impl Host {
    /// Another host, as far as components can tell: other names, another folder.
    fn here(&self, prefix: &'static str, ids: &[u64]) -> Here {
        let wires = Wires::new(prefix, [127, 0, 0, 1].into()).unwrap();
        let place = Place::new(wires.clone(), prefix, &self.folder.path().join(prefix)).unwrap();
        Here { place, wires, prefix, ids: ids.to_vec() }
    }

    async fn guest(&self, name: &'static str, address: &str, via: Option<&str>) -> Guest {
        let ns = NetNs::fresh(NetNs::current).unwrap().unwrap();
        let mac = |last| godwit_net::MacAddr([2, 0, 0, 0, last, name.as_bytes()[1]]);
        let (here, there) =
            (VethEnd { name, mac: mac(1), mtu: 1500 }, VethEnd { name: "eth0", mac: mac(2), mtu: 1500 });
        let link = self.net.ensure_veth(here, there, &ns).await.unwrap();
        // The wire: a bridge of two ports.
        let wire = self.net.ensure_bridge(&format!("w{name}"), Some(0)).await.unwrap();
        self.net.set_master(link.index, Some(wire.index)).await.unwrap();
        // The host itself is silent on it, as on a wire of ours.
        for name in [name.to_owned(), format!("w{name}")] {
            Net::without_ipv6(&name).unwrap();
        }
        self.net.up(link.index).await.unwrap();
        self.net.up(wire.index).await.unwrap();
        let net = ns.net().unwrap();
        let eth0 = net.get("eth0").await.unwrap();
        ns.set(&[("ipv6/conf/all/disable_ipv6", "1")]).unwrap();
        let address: Prefix = address.parse().unwrap();
        net.set_addresses(eth0.index, &[address]).await.unwrap();
        net.up(eth0.index).await.unwrap();
        if let Some(via) = via {
            let to = "0.0.0.0/0".parse().unwrap();
            net.set_routes(&[Route { to, via: Some(via.parse().unwrap()), by: None }]).await.unwrap();
        }
        Guest { ns, ip: address.ip, wire: format!("w{name}") }
    }

    /// Takes a port's device to a guest's wire, as a wire would.
    async fn wire(&self, here: &Here, endpoint: u32, guest: &Guest) {
        let device = self.net.get(&here.place.device(endpoint)).await.unwrap();
        let wire = self.net.get(&guest.wire).await.unwrap();
        self.net.set_master(device.index, Some(wire.index)).await.unwrap();
    }

    /// Everything under a prefix, without the pen.
    async fn left(&self, here: &Here) -> Vec<String> {
        let links = self.net.list(here.prefix).await.unwrap();
        links.into_iter().map(|l| l.name).filter(|name| !name.ends_with("-pen")).collect()
    }
}

struct Guest {
    ns: NetNs,
    ip: IpAddr,
    wire: String,
}

impl Guest {
    fn listen(&self, port: u16) -> TcpListener {
        self.ns.within(|| TcpListener::bind((self.ip, port))).unwrap().unwrap()
    }

    fn connect(&self, to: &Self, port: u16, within: Duration) -> std::io::Result<TcpStream> {
        let stream = self.ns.within(|| TcpStream::connect_timeout(&SocketAddr::new(to.ip, port), within)).unwrap()?;
        stream.set_read_timeout(Some(LONG)).unwrap();
        Ok(stream)
    }

    fn udp(&self) -> UdpSocket {
        let socket = self.ns.within(|| UdpSocket::bind((self.ip, 9))).unwrap().unwrap();
        socket.set_read_timeout(Some(NOTHING)).unwrap();
        socket
    }

    /// Whether a datagram gets there, sent again for as long as may be.
    fn reaches(&self, to: &Self, within: Duration) -> bool {
        let (from, at) = (self.udp(), to.udp());
        let end = Instant::now() + within;
        let mut buffer = [0; 8];
        while Instant::now() < end {
            from.send_to(b"hello", SocketAddr::new(to.ip, 9)).unwrap();
            at.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
            if at.recv(&mut buffer).is_ok() {
                return true;
            }
        }
        false
    }
}

fn spec(id: u64, kind: Kind, ports: u32, file: &str) -> Spec {
    Spec::read(id, kind, (1..=ports).collect(), file).unwrap_or_else(|e| panic!("{e}"))
}

fn says(stream: &mut TcpStream, other: &mut TcpStream, text: &[u8]) {
    stream.write_all(text).unwrap();
    let mut heard = vec![0; text.len()];
    other.read_exact(&mut heard).unwrap();
    assert_eq!(heard, text);
}

#[test]
fn a_switch_forwards_between_wired_ports_and_what_it_learnt_moves_with_it() {
    on_a_host(async |host| {
        let (a, b) = (host.here("ga", &[7]), host.here("gb", &[7]));
        let (g1, g2) = (host.guest("g1", "10.0.0.1/24", None).await, host.guest("g2", "10.0.0.2/24", None).await);
        let sw = spec(7, Kind::Switch, 4, "");
        a.place.stage(&sw).await.unwrap();
        a.place.open(&sw).await.unwrap();
        assert!(!g1.reaches(&g2, NOTHING), "a port that no wire has taken forwards");
        for (endpoint, guest) in [(1, &g1), (2, &g2)] {
            host.wire(&a, endpoint, guest).await;
        }
        assert!(g1.reaches(&g2, LONG) && g2.reaches(&g1, LONG));

        b.place.stage(&sw).await.unwrap();
        a.place.close(&sw).await.unwrap();
        assert!(!g1.reaches(&g2, NOTHING), "a closed switch forwards");
        let state = a.place.state(&sw).await.unwrap();
        // The guests' own; the host's sides of their pairs may have spoken, too.
        let guests = state.stations.iter().filter(|s| s.mac.0[4] == 2);
        let ports: Vec<(u8, u8)> = guests.map(|s| (s.port, s.mac.0[5])).collect();
        assert_eq!(ports, [(1, b'1'), (2, b'2')]);
        assert_eq!(b.place.state(&sw).await.unwrap().stations, []);
        let loaded = b.place.load(&sw, state.clone()).await.unwrap();
        assert_eq!(loaded.stations, state.stations.len());
        assert_eq!(b.place.state(&sw).await.unwrap().stations, state.stations);
        b.place.open(&sw).await.unwrap();
        for (endpoint, guest) in [(1, &g1), (2, &g2)] {
            host.wire(&b, endpoint, guest).await;
        }
        a.place.remove(7, &sw.endpoints).await.unwrap();
        assert!(g1.reaches(&g2, LONG) && g2.reaches(&g1, LONG));
        assert_eq!(host.left(&a).await, Vec::<String>::new());
        b.place.remove(7, &sw.endpoints).await.unwrap();
    });
}

/// A TCP segment of nobody's connection: an acknowledgement from `from` to `to`, behind Ethernet addresses.
fn forged(from: IpAddr, to: IpAddr, macs: [[u8; 6]; 2], ports: [u16; 2]) -> Vec<u8> {
    let (IpAddr::V4(from), IpAddr::V4(to)) = (from, to) else { panic!("IPv4 only") };
    let sum = |bytes: &[u8]| {
        let mut sum: u32 =
            bytes.chunks(2).map(|c| u32::from(u16::from_be_bytes([c[0], *c.get(1).unwrap_or(&0)]))).sum();
        while sum > 0xffff {
            sum = (sum & 0xffff) + (sum >> 16);
        }
        (!(sum as u16)).to_be_bytes()
    };
    let mut tcp = [ports[0].to_be_bytes(), ports[1].to_be_bytes()].concat();
    tcp.extend([0, 0, 0, 1, 0, 0, 0, 1, 0x50, 0x10, 0x20, 0, 0, 0, 0, 0]);
    tcp.extend(b"forged");
    let length = u16::try_from(tcp.len()).unwrap();
    let pseudo = [&from.octets()[..], &to.octets(), &[0, 6], &length.to_be_bytes(), &tcp].concat();
    let checked = sum(&pseudo);
    tcp[16..18].copy_from_slice(&checked);
    let mut ip = vec![0x45, 0];
    ip.extend((20 + length).to_be_bytes());
    ip.extend([0, 0, 0x40, 0, 64, 6, 0, 0]);
    ip.extend([from.octets(), to.octets()].concat());
    let checked = sum(&ip);
    ip[10..12].copy_from_slice(&checked);
    [&macs[0][..], &macs[1], &[8, 0], &ip, &tcp].concat()
}

/// Whether one of the frames that come in, until one that says `end`, says `forged`.
async fn sees_forged(at: &PacketSocket, end: &[u8]) -> bool {
    let mut frame = [0; 2048];
    let has = |frame: &[u8], text: &[u8]| frame.windows(text.len()).any(|w| w == text);
    loop {
        let got = tokio::time::timeout(LONG, at.receive(&mut frame)).await.expect("something comes").unwrap();
        if has(&frame[..got], b"forged") {
            return true;
        }
        if has(&frame[..got], end) {
            return false;
        }
    }
}

const ROUTED: &str = r#"
mode = "routed"
rules = """
table inet filter {
  chain forward {
    type filter hook forward priority filter; policy drop;
    ct state established,related accept
    ct state new iifname "p1" tcp dport 7000 accept
  }
}
"""
[[port]]
number = 1
addresses = ["10.1.0.1/24"]
[[port]]
number = 2
addresses = ["10.2.0.1/24"]
"#;

const BRIDGED: &str = r#"
mode = "bridged"
rules = """
table inet filter {
  chain forward {
    type filter hook forward priority filter; policy drop;
    ct state established,related accept
    ct state new ip saddr 10.0.0.1 tcp dport 7000 accept
  }
}
"""
"#;

async fn firewall_moves(host: Host, file: &str, guests: [(&str, Option<&str>); 2]) {
    let (a, b) = (host.here("ga", &[9]), host.here("gb", &[9]));
    let g1 = host.guest("g1", guests[0].0, guests[0].1).await;
    let g2 = host.guest("g2", guests[1].0, guests[1].1).await;
    let fw = spec(9, Kind::Firewall, 2, file);
    a.place.rehearse(&fw).await.unwrap();
    a.place.stage(&fw).await.unwrap();
    a.place.open(&fw).await.unwrap();
    for (endpoint, guest) in [(1, &g1), (2, &g2)] {
        host.wire(&a, endpoint, guest).await;
    }
    let (listener, inner) = (g2.listen(7000), g1.listen(7000));
    let mut client = g1.connect(&g2, 7000, LONG).unwrap();
    let mut server = listener.accept().unwrap().0;
    server.set_read_timeout(Some(LONG)).unwrap();
    says(&mut client, &mut server, b"before the move");
    says(&mut server, &mut client, b"and back");
    assert!(g2.connect(&g1, 7000, NOTHING).is_err(), "what no rule accepts passes");
    assert!(g1.connect(&g2, 7001, NOTHING).is_err(), "what no rule accepts passes");

    // Its own move, to a host that does not know its connections yet.
    b.place.stage(&fw).await.unwrap();
    a.place.close(&fw).await.unwrap();
    let state = a.place.state(&fw).await.unwrap();
    b.place.open(&fw).await.unwrap();
    for (endpoint, guest) in [(1, &g1), (2, &g2)] {
        host.wire(&b, endpoint, guest).await;
    }
    server.set_read_timeout(Some(NOTHING)).unwrap();
    client.write_all(b"during").unwrap();
    let refused = server.read(&mut [0; 6]).expect_err("a connection passes that the firewall does not know");
    assert!(matches!(refused.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut), "{refused}");
    let loaded = b.place.load(&fw, state).await.unwrap();
    assert!(loaded.flows >= 1, "{loaded:?}");
    server.set_read_timeout(Some(LONG)).unwrap();
    let mut heard = [0; 6];
    server.read_exact(&mut heard).expect("an established connection survives the firewall's own move");
    assert_eq!(&heard, b"during");
    says(&mut server, &mut client, b"back again");
    a.place.remove(9, &fw.endpoints).await.unwrap();

    // A segment of a connection that never was, from the outside; after it one that is known to come.
    let eth0 = |guest: &Guest| guest.ns.net().unwrap();
    let at = g1.ns.packet_socket(eth0(&g1).get("eth0").await.unwrap().index).unwrap();
    let from = eth0(&g2).get("eth0").await.unwrap();
    let next = if guests[1].1.is_some() {
        // Port 2 of the router: its address stays the same wherever it is.
        [0x02, 0x67, 0, 0, 9, 2]
    } else {
        eth0(&g1).get("eth0").await.unwrap().mac.0
    };
    let sender = g2.ns.packet_socket(from.index).unwrap();
    sender.send(&forged(g2.ip, g1.ip, [next, from.mac.0], [7000, 40000])).unwrap();
    server.write_all(b"honest").unwrap();
    assert!(!sees_forged(&at, b"honest").await, "a forged connection passes the firewall");
    let mut heard = [0; 6];
    client.read_exact(&mut heard).unwrap();
    // That the frame is one which would pass, were it let through.
    let nsenter = |command: &str| {
        let ns = b.place.namespace(9).unwrap();
        let status = ns.within(|| Command::new("nft").arg(command).status().unwrap()).unwrap();
        assert!(status.success(), "nft {command}");
    };
    nsenter("flush ruleset");
    sender.send(&forged(g2.ip, g1.ip, [next, from.mac.0], [7000, 40000])).unwrap();
    server.write_all(b"honest").unwrap();
    assert!(sees_forged(&at, b"honest").await, "the forged frame is no good one: the test proves nothing");
    drop(inner);
    b.place.remove(9, &fw.endpoints).await.unwrap();
    assert_eq!(host.left(&b).await, Vec::<String>::new());
}

#[test]
fn an_established_connection_survives_the_move_of_a_routed_firewall_and_a_forged_one_does_not_pass() {
    let guests = [("10.1.0.2/24", Some("10.1.0.1")), ("10.2.0.2/24", Some("10.2.0.1"))];
    on_a_host(async move |host| firewall_moves(host, ROUTED, guests).await);
}

#[test]
fn an_established_connection_survives_the_move_of_a_bridged_firewall_and_a_forged_one_does_not_pass() {
    on_a_host(async |host| firewall_moves(host, BRIDGED, [("10.0.0.1/24", None), ("10.0.0.2/24", None)]).await);
}

#[test]
fn a_bridged_firewall_lets_nothing_pass_its_rules_by_a_tag_and_without_rules_nothing_at_all() {
    on_a_host(async |host| {
        let a = host.here("ga", &[2]);
        let (g1, g2) = (host.guest("g1", "10.0.0.1/24", None).await, host.guest("g2", "10.0.0.2/24", None).await);
        let apply = async |file: &str| a.place.stage(&spec(2, Kind::Firewall, 2, file)).await.unwrap();
        apply("mode = \"bridged\"\ndefault = \"accept\"\n").await;
        for (endpoint, guest) in [(1, &g1), (2, &g2)] {
            host.wire(&a, endpoint, guest).await;
        }
        let eth0 = async |guest: &Guest| guest.ns.net().unwrap().get("eth0").await.unwrap();
        let (from, to) = (eth0(&g1).await, eth0(&g2).await);
        let (sender, at) = (g1.ns.packet_socket(from.index).unwrap(), g2.ns.packet_socket(to.index).unwrap());
        let passes = async |frame: &[u8]| {
            sender.send(frame).unwrap();
            tokio::time::timeout(NOTHING, sees_forged(&at, b"nobody says this")).await.is_ok()
        };
        let plain = forged(g1.ip, g2.ip, [to.mac.0, from.mac.0], [7000, 40000]);
        let tagged = [&plain[..12], &[0x81, 0, 0, 5], &plain[12..]].concat();
        // Of a protocol that is none of IP's.
        let other = [&plain[..12], &[0x88, 0xb5], &plain[14..]].concat();
        let (plain, tagged, other) = (&plain[..], &tagged[..], &other[..]);
        // A port that has just been wired may not pass the first ones.
        let end = Instant::now() + LONG;
        for frame in [plain, tagged, other] {
            while !passes(frame).await {
                assert!(Instant::now() < end, "a firewall that accepts everything drops {frame:02x?}");
            }
        }
        apply(BRIDGED).await;
        assert!(!passes(plain).await && !passes(tagged).await, "what no rule accepts passes, without or with a tag");
        apply("mode = \"bridged\"\n").await;
        for frame in [plain, tagged, other] {
            assert!(!passes(frame).await, "a firewall without rules lets pass {frame:02x?}");
        }
        a.place.remove(2, &[1, 2]).await.unwrap();
    });
}

const TRANSLATING: &str = r#"
rules = """
table ip nat {
  chain post { type nat hook postrouting priority srcnat; oifname "p2" masquerade; }
}
"""
[[port]]
number = 1
addresses = ["10.1.0.1/24"]
[[port]]
number = 2
addresses = ["10.2.0.1/24"]
"#;

#[test]
fn a_translated_connection_survives_its_routers_move() {
    on_a_host(async |host| {
        let (a, b) = (host.here("ga", &[3]), host.here("gb", &[3]));
        // The other guest has no route back: it knows the router's own address only.
        let g1 = host.guest("g1", "10.1.0.2/24", Some("10.1.0.1")).await;
        let g2 = host.guest("g2", "10.2.0.2/24", None).await;
        let router = spec(3, Kind::Router, 2, TRANSLATING);
        a.place.stage(&router).await.unwrap();
        a.place.open(&router).await.unwrap();
        for (endpoint, guest) in [(1, &g1), (2, &g2)] {
            host.wire(&a, endpoint, guest).await;
        }
        let listener = g2.listen(80);
        let mut client = g1.connect(&g2, 80, LONG).unwrap();
        let (mut server, peer) = listener.accept().unwrap();
        server.set_read_timeout(Some(LONG)).unwrap();
        assert_eq!(peer.ip(), IpAddr::from([10, 2, 0, 1]));
        says(&mut client, &mut server, b"before");
        b.place.stage(&router).await.unwrap();
        a.place.close(&router).await.unwrap();
        let state = a.place.state(&router).await.unwrap();
        b.place.load(&router, state).await.unwrap();
        b.place.open(&router).await.unwrap();
        for (endpoint, guest) in [(1, &g1), (2, &g2)] {
            host.wire(&b, endpoint, guest).await;
        }
        // The server speaks first: nothing but the entry that moved says where to.
        says(&mut server, &mut client, b"after");
        says(&mut client, &mut server, b"and back");
        a.place.remove(3, &router.endpoints).await.unwrap();
        b.place.remove(3, &router.endpoints).await.unwrap();
    });
}

#[test]
fn of_a_routers_ports_on_one_segment_each_answers_for_its_own_address_alone() {
    on_a_host(async |host| {
        let a = host.here("gi", &[9]);
        let g1 = host.guest("g1", "10.1.0.2/24", None).await;
        let file = "[[port]]\nnumber = 1\naddresses = [\"10.1.0.1/24\"]\n\
                    [[port]]\nnumber = 2\naddresses = [\"10.2.0.1/24\"]\n";
        let router = spec(9, Kind::Router, 2, file);
        a.place.stage(&router).await.unwrap();
        a.place.open(&router).await.unwrap();
        for endpoint in [1, 2] {
            host.wire(&a, endpoint, &g1).await;
        }
        let mac = godwit_net::MacAddr([2, 0, 0, 0, 7, 7]);
        let eth0 = g1.ns.net().unwrap().get("eth0").await.unwrap();
        let runtime = tokio::runtime::Handle::current();
        let open = || {
            let _inside = runtime.enter();
            PacketSocket::open(eth0.index)
        };
        let socket = g1.ns.within(open).unwrap().unwrap();
        let mut answered = vec![];
        for ip in [[10, 1, 0, 1], [10, 2, 0, 1]] {
            // Asked again and again, since a port that has just been plugged in may not hear at once; then whoever else would answer has had time to.
            let (end, mut macs) = (Instant::now() + LONG, BTreeSet::new());
            let mut until = end;
            while Instant::now() < until {
                socket.send(&godwit_net::arp_request(mac, ip.into())).unwrap();
                let mut buffer = [0; 2048];
                let wait = Duration::from_millis(50);
                while let Ok(Ok(length)) = tokio::time::timeout(wait, socket.receive(&mut buffer)).await {
                    let frame = &buffer[..length];
                    let Some(from) = godwit_net::source_of(frame) else { continue };
                    if godwit_net::arp_reply_from(frame, from, ip.into()) && macs.insert(from.0) {
                        until = end.min(Instant::now() + NOTHING);
                    }
                }
            }
            assert_eq!(macs.len(), 1, "{ip:?} is at {macs:?}");
            answered.extend(macs);
        }
        assert_ne!(answered[0], answered[1], "both addresses are at one port");
        a.place.remove(9, &router.endpoints).await.unwrap();
    });
}

#[test]
fn an_address_that_stays_is_there_when_the_first_one_of_its_network_goes() {
    on_a_host(async |host| {
        let link = host.net.ensure_bridge("lan", None).await.unwrap();
        for last in [&[1, 2, 3][..], &[2, 4], &[2, 4], &[]] {
            let wanted: Vec<Prefix> = last.iter().map(|n| format!("10.0.0.{n}/24").parse().unwrap()).collect();
            host.net.set_addresses(link.index, &wanted).await.unwrap();
            let shown = Command::new("ip").args(["-o", "-4", "address", "show", "dev", "lan"]).output().unwrap();
            let shown = String::from_utf8(shown.stdout).unwrap();
            let there: Vec<Prefix> =
                shown.lines().map(|line| line.split_whitespace().nth(3).unwrap().parse().unwrap()).collect();
            assert_eq!(there, wanted, "{shown}");
        }
    });
}

#[test]
fn a_router_answers_a_packet_that_is_too_big_with_the_size_that_fits() {
    on_a_host(async |host| {
        let a = host.here("ga", &[5]);
        let g1 = host.guest("g1", "10.1.0.2/24", Some("10.1.0.1")).await;
        let g2 = host.guest("g2", "10.2.0.2/24", Some("10.2.0.1")).await;
        let file = "[[port]]\nnumber = 1\naddresses = [\"10.1.0.1/24\"]\n\
                    [[port]]\nnumber = 2\naddresses = [\"10.2.0.1/24\"]\nmtu = 1400\n";
        let router = spec(5, Kind::Router, 2, file);
        a.place.stage(&router).await.unwrap();
        a.place.open(&router).await.unwrap();
        for (endpoint, guest) in [(1, &g1), (2, &g2)] {
            host.wire(&a, endpoint, guest).await;
        }
        assert!(g1.reaches(&g2, LONG), "a router does not forward");
        let socket = g1.udp();
        socket.connect(SocketAddr::new(g2.ip, 9)).unwrap();
        let never_cut: libc::c_int = libc::IP_PMTUDISC_DO;
        // SAFETY: the pointer and the length describe `never_cut`, which outlives the call.
        let set = unsafe {
            let value = (&raw const never_cut).cast();
            libc::setsockopt(socket.as_raw_fd(), libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, value, 4)
        };
        assert_eq!(set, 0);
        // The first ones leave, since nobody knows better yet; an answer is told once for each that was on its way.
        let until = |bytes: usize, good: bool| {
            let end = Instant::now() + LONG;
            while Instant::now() < end {
                match socket.send(&vec![0; bytes]) {
                    Ok(_) if good => return true,
                    Err(error) if !good && error.raw_os_error() == Some(libc::EMSGSIZE) => return true,
                    _ => std::thread::sleep(Duration::from_millis(10)),
                }
            }
            false
        };
        assert!(until(1450, false), "the guest was never told");
        assert!(until(1400 - 28, true), "what fits is not sent");
        a.place.remove(5, &router.endpoints).await.unwrap();
    });
}

fn ruleset(place: &Place, id: u64) -> Vec<u8> {
    let ns = place.namespace(id).unwrap();
    ns.within(|| Command::new("nft").args(["-a", "list", "ruleset"]).output().unwrap().stdout).unwrap()
}

#[test]
fn a_file_that_does_not_do_is_refused_whole_with_its_line() {
    on_a_host(async |host| {
        let a = host.here("ga", &[4]);
        let fw = spec(4, Kind::Firewall, 2, ROUTED);
        a.place.rehearse(&fw).await.unwrap();
        a.place.stage(&fw).await.unwrap();
        let before = ruleset(&a.place, 4);
        assert!(!before.is_empty());
        for (file, said) in [
            (ROUTED.replace("tcp dport 7000 accept", "tcp dport 7000 accpet"), "line 8"),
            (ROUTED.replace("policy drop", "policy accept"), "line 4: no chain drops"),
            (format!("{ROUTED}[[route]]\nto = \"0.0.0.0/0\"\nvia = \"192.0.2.1\"\n"), "0.0.0.0/0"),
        ] {
            let bad = spec(4, Kind::Firewall, 2, &file);
            match a.place.rehearse(&bad).await {
                Err(ComponentError::Config(why)) => assert!(why.contains(said), "{why}"),
                other => panic!("{file}: {other:?}"),
            }
            assert_eq!(ruleset(&a.place, 4), before);
        }
        // A good one is taken in place.
        let wider = spec(4, Kind::Firewall, 2, &ROUTED.replace("7000", "{ 7000, 7001 }"));
        a.place.stage(&wider).await.unwrap();
        assert!(String::from_utf8(ruleset(&a.place, 4)).unwrap().contains("7001"));
        a.place.remove(4, &fw.endpoints).await.unwrap();
    });
}

#[test]
fn a_component_outlives_its_node_is_made_again_after_a_reboot_and_leaves_nothing_when_it_goes() {
    on_a_host(async |host| {
        let mut a = host.here("ga", &[6]);
        let (g1, g2) = (host.guest("g1", "10.0.0.1/24", None).await, host.guest("g2", "10.0.0.2/24", None).await);
        let sw = spec(6, Kind::Switch, 2, "");
        a.place.stage(&sw).await.unwrap();
        for (endpoint, guest) in [(1, &g1), (2, &g2)] {
            host.wire(&a, endpoint, guest).await;
        }
        assert!(g1.reaches(&g2, LONG));
        let before = a.place.namespace(6).unwrap();
        // The node that comes back finds it as it was, and what is wired stays wired.
        a.place = host.here("ga", &[]).place.clone();
        a.place.stage(&sw).await.unwrap();
        assert!(a.place.namespace(6).unwrap().is(&before));
        assert!(g1.reaches(&g2, LONG), "a staging that is repeated isolates what is wired");
        drop(before);

        // As after a reboot: neither process nor namespace. Its ports are isolated then.
        let pid = rustix::process::Pid::from_raw(a.pid(6).unwrap()).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
        let end = Instant::now() + LONG;
        while !host.left(&a).await.is_empty() {
            let _ = rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::NOHANG);
            assert!(Instant::now() < end, "the kernel keeps the namespace");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        a.place.stage(&sw).await.unwrap();
        assert!(!g1.reaches(&g2, NOTHING), "a port that was made again is not isolated");
        for (endpoint, guest) in [(1, &g1), (2, &g2)] {
            host.wire(&a, endpoint, guest).await;
        }
        assert!(g1.reaches(&g2, LONG));

        a.place.remove(6, &sw.endpoints).await.unwrap();
        a.place.remove(6, &sw.endpoints).await.unwrap();
        assert_eq!(host.left(&a).await, Vec::<String>::new());
        assert_eq!((a.place.list(), a.place.namespace(6).is_none()), (vec![], true));
        a.wires.tidy().await.unwrap();
    });
}

#[test]
fn a_gateways_outside_port_is_the_hosts_network_exactly_while_it_is_open() {
    for network in ["bridge = \"lan\"", "device = \"up0\""] {
        on_a_host(async move |host| {
            let a = host.here("ga", &[8]);
            let g1 = host.guest("g1", "10.1.0.2/24", Some("10.1.0.1")).await;
            let g2 = host.guest("g2", "10.2.0.2/24", Some("10.2.0.1")).await;
            // The host's outside network: a bridge, with the outer guest on it, or an interface that leads to one.
            let lan = host.net.ensure_bridge("lan", None).await.unwrap();
            host.net.up(lan.index).await.unwrap();
            let outer = host.net.get("g2").await.unwrap();
            if network.starts_with("bridge") {
                host.net.set_master(outer.index, Some(lan.index)).await.unwrap();
            } else {
                host.net.set_master(outer.index, None).await.unwrap();
                let ends = [("up0", 1), ("up1", 2)].map(|(name, n)| VethEnd {
                    name,
                    mac: godwit_net::MacAddr([2, 1, 0, 0, 0, n]),
                    mtu: 1500,
                });
                host.net.ensure_veth(ends[0], ends[1], &NetNs::current().unwrap()).await.unwrap();
                for name in ["up1", "g2"] {
                    let link = host.net.get(name).await.unwrap();
                    host.net.set_master(link.index, Some(lan.index)).await.unwrap();
                }
                for name in ["up0", "up1"] {
                    let link = host.net.get(name).await.unwrap();
                    host.net.up(link.index).await.unwrap();
                }
            }
            let file = format!(
                "outside = {{ {network}, addresses = [\"10.2.0.1/24\"] }}\n\
                 [[port]]\nnumber = 1\naddresses = [\"10.1.0.1/24\"]\n"
            );
            let gateway = spec(8, Kind::Gateway, 1, &file);
            a.place.rehearse(&gateway).await.unwrap();
            a.place.stage(&gateway).await.unwrap();
            host.wire(&a, 1, &g1).await;
            assert!(!g2.reaches(&g1, NOTHING), "a gateway that is only staged forwards");
            a.place.open(&gateway).await.unwrap();
            assert!(g1.reaches(&g2, LONG) && g2.reaches(&g1, LONG), "{network}");
            a.place.close(&gateway).await.unwrap();
            host.wire(&a, 1, &g1).await;
            assert!(!g2.reaches(&g1, NOTHING), "a gateway that was closed forwards");
            a.place.remove(8, &gateway.endpoints).await.unwrap();
            assert_eq!(host.left(&a).await, Vec::<String>::new());
        });
    }
}

#[test]
fn another_way_out_is_taken_in_place_and_one_that_does_not_do_is_refused() {
    on_a_host(async move |host| {
        let a = host.here("gb", &[8]);
        let g1 = host.guest("g1", "10.1.0.2/24", Some("10.1.0.1")).await;
        let g2 = host.guest("g2", "10.2.0.2/24", Some("10.2.0.1")).await;
        // The outer guest is on the bridge `right`, which the interface `up0` leads to as well.
        for name in ["wrong", "right"] {
            let bridge = host.net.ensure_bridge(name, None).await.unwrap();
            host.net.up(bridge.index).await.unwrap();
        }
        let end = |name, n| VethEnd { name, mac: godwit_net::MacAddr([2, 1, 0, 0, 0, n]), mtu: 1500 };
        host.net.ensure_veth(end("up0", 1), end("up1", 2), &NetNs::current().unwrap()).await.unwrap();
        let right = host.net.get("right").await.unwrap();
        for name in ["g2", "up1"] {
            let link = host.net.get(name).await.unwrap();
            host.net.set_master(link.index, Some(right.index)).await.unwrap();
        }
        for name in ["up0", "up1"] {
            host.net.up(host.net.get(name).await.unwrap().index).await.unwrap();
        }
        let gateway = |network: &str, mtu: u16| {
            let file = format!(
                "outside = {{ {network}, mtu = {mtu}, addresses = [\"10.2.0.1/24\"] }}\n\
                 [[port]]\nnumber = 1\naddresses = [\"10.1.0.1/24\"]\n"
            );
            spec(8, Kind::Gateway, 1, &file)
        };
        for (network, mtu, said) in [
            ("bridge = \"none\"", 1500, "no interface"),
            ("bridge = \"up0\"", 1500, "is no bridge"),
            ("device = \"up1\"", 1500, "takes no macvlan"),
            ("device = \"up0\"", 1501, "is too large"),
        ] {
            let refused = a.place.rehearse(&gateway(network, mtu)).await.unwrap_err().to_string();
            assert!(refused.contains(said) && refused.contains("nothing was changed"), "{refused}");
        }
        let wrong = gateway("bridge = \"wrong\"", 1500);
        a.place.stage(&wrong).await.unwrap();
        host.wire(&a, 1, &g1).await;
        a.place.open(&wrong).await.unwrap();
        assert!(!g1.reaches(&g2, NOTHING), "through another bridge");
        for (network, mtu) in [
            ("bridge = \"right\"", 1500),
            ("device = \"up0\"", 1500),
            ("bridge = \"right\"", 1400),
            ("device = \"up0\"", 1300),
        ] {
            let right = gateway(network, mtu);
            a.place.rehearse(&right).await.unwrap();
            a.place.stage(&right).await.unwrap();
            a.place.open(&right).await.unwrap();
            assert!(g1.reaches(&g2, LONG) && g2.reaches(&g1, LONG), "{network}");
            let inside = a.place.namespace(8).unwrap().net().unwrap();
            assert_eq!(inside.get("out").await.unwrap().mtu, u32::from(mtu), "{network}");
        }
        // As it is: nothing is made anew that stays.
        let (right, inside) = (gateway("device = \"up0\"", 1300), a.place.namespace(8).unwrap().net().unwrap());
        let before = inside.get("out").await.unwrap().index;
        a.place.stage(&right).await.unwrap();
        assert_eq!(inside.get("out").await.unwrap().index, before);
        a.place.remove(8, &right.endpoints).await.unwrap();
        assert_eq!(host.left(&a).await, Vec::<String>::new());
    });
}
