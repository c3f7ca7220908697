//! How fast a wire between two ports is, beside what the kernel does without it, in one run: `cargo run --release -p godwit-wire --example
//! wire_speed [SECONDS [LINKS]...]`. Needs root and `ip`; leaves nothing.
//!
//! Two guests, each a network namespace, send TCP over 1, 4, 16 and 64 links at once, a stream each. A link is
//! - `veth`: a pair of interfaces from guest to guest;
//! - `vxlan`: on each of two hosts a bridge with the guest's interface and a VXLAN device made by `ip` with a fixed remote;
//! - `wire`: the same two hosts joined by [`Wires::lay`], with its guard;
//! - `bridge`: both guests' interfaces on a bridge of one host, made by `ip`;
//! - `collapsed`: both on one host, joined by [`Wires::lay`].
//!
//! Each is measured in turn, seven times over, so that what else the machine does falls on all. Shown are medians; a ratio is the median
//! of the rounds' ratios, so that it compares what was measured within a second or two. Latency is that of a UDP
//! packet there and back on one link, while nothing else is sent.

#![allow(clippy::unwrap_used, reason = "a measurement that cannot go on has failed")]

use godwit_wire::{DEFAULT_PORT, PortWire, Vni, WireId, Wires};
use std::error::Error;
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, TcpListener, TcpStream, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

#[path = "../tests/common/place.rs"]
mod place;
use place::Place;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const KINDS: [&str; 5] = ["veth", "vxlan", "wire", "bridge", "collapsed"];
/// Times that each is measured.
const ROUNDS: usize = 7;
/// Packets there and back.
const ECHOES: usize = 3000;

/// Two guests, and what is between them.
struct World {
    guests: [Place; 2],
    _hosts: [Place; 2],
}

fn address(link: usize, guest: usize) -> Ipv4Addr {
    Ipv4Addr::new(10, 9, u8::try_from(link).expect("few links"), 1 + guest as u8)
}

fn build(kind: &str, links: usize) -> Result<World> {
    let guests = [Place::new(), Place::new()];
    let hosts = [Place::new(), Place::new()];
    hosts[0].run(&format!("ip link add eth0 type veth peer name eth0 netns {}", hosts[1].path()));
    for (n, host) in hosts.iter().enumerate() {
        host.run(&format!("ip addr add 10.0.0.{}/24 dev eth0; ip link set eth0 up", n + 1));
    }
    let one_host = matches!(kind, "bridge" | "collapsed");
    for link in 0..links {
        if kind == "veth" {
            guests[0].run(&format!("ip link add g{link} type veth peer name g{link} netns {}", guests[1].path()));
        } else {
            for (n, guest) in guests.iter().enumerate() {
                let host = &hosts[if one_host { 0 } else { n }];
                let device = format!("gwt{}", 2 * link + n);
                host.run(&format!(
                    "ip link add {device} type veth peer name g{link} netns {}; ip link set {device} up",
                    guest.path()
                ));
            }
        }
        for (n, guest) in guests.iter().enumerate() {
            // What a wire's tunnel carries in one piece.
            let mtu = 1450;
            guest.run(&format!("ip link set g{link} mtu {mtu} up; ip addr add {}/24 dev g{link}", address(link, n)));
        }
        if kind == "bridge" {
            let (a, b) = (2 * link, 2 * link + 1);
            hosts[0].run(&format!(
                "ip link add b{link} type bridge; ip link set b{link} up; ip link set gwt{a} master b{link}; ip link set gwt{b} master b{link}"
            ));
        }
        for (n, host) in hosts.iter().enumerate().filter(|_| kind == "vxlan") {
            host.run(&format!(
                "ip link add v{link} type vxlan id {} dstport 4789 local 10.0.0.{} remote 10.0.0.{}; ip link add b{link} type bridge; \
                 ip link set b{link} up; ip link set v{link} master b{link} up; ip link set gwt{} master b{link}",
                link + 1,
                n + 1,
                2 - n,
                2 * link + n
            ));
        }
    }
    if matches!(kind, "wire" | "collapsed") {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        for (n, host) in hosts.iter().enumerate().take(if one_host { 1 } else { 2 }) {
            host.enter();
            let underlay = |n: usize| IpAddr::from([10, 0, 0, 1 + n as u8]);
            let _in = runtime.enter();
            let wires = Wires::new("gw", underlay(n))?;
            let start = Instant::now();
            for link in 0..links {
                let device = |n: usize| format!("gwt{}", 2 * link + n);
                let number = link as u32 + 1;
                let wire = PortWire {
                    wire: WireId(number),
                    vni: Vni(number),
                    port: DEFAULT_PORT,
                    mtu: 1500,
                    devices: if one_host { vec![device(0), device(1)] } else { vec![device(n)] },
                    remotes: if one_host { vec![] } else { vec![underlay(1 - n)] },
                };
                runtime.block_on(wires.lay(&wire))?;
            }
            if n == 0 {
                println!("# {kind}: {links} laid in {:.1} ms", start.elapsed().as_secs_f64() * 1000.0);
            }
        }
    }
    Ok(World { guests, _hosts: hosts })
}

/// Mbit/s over all links at once.
fn throughput(world: &World, links: usize, lasting: Duration) -> Result<f64> {
    world.guests[1].enter();
    let listeners: std::io::Result<Vec<_>> =
        (0..links).map(|link| TcpListener::bind((address(link, 1), 5001))).collect();
    let (received, end) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
    for listener in listeners? {
        let received = received.clone();
        std::thread::spawn(move || {
            let Ok((mut stream, _)) = listener.accept() else { return };
            let mut buffer = vec![0; 1 << 17];
            while let Ok(got @ 1..) = stream.read(&mut buffer) {
                received.fetch_add(got as u64, Ordering::Relaxed);
            }
        });
    }
    world.guests[0].enter();
    let mut senders = vec![];
    for link in 0..links {
        let mut stream = TcpStream::connect_timeout(&(address(link, 1), 5001).into(), Duration::from_secs(10))?;
        let end = end.clone();
        senders.push(std::thread::spawn(move || {
            let buffer = vec![0x5a; 1 << 17];
            while !end.load(Ordering::Relaxed) && stream.write_all(&buffer).is_ok() {}
        }));
    }
    // Past the beginning.
    std::thread::sleep(lasting / 4);
    let (start, before) = (Instant::now(), received.load(Ordering::Relaxed));
    std::thread::sleep(lasting);
    let bytes = received.load(Ordering::Relaxed) - before;
    let rate = bytes as f64 * 8.0 / 1e6 / start.elapsed().as_secs_f64();
    end.store(true, Ordering::Relaxed);
    for sender in senders {
        let _ = sender.join();
    }
    Ok(rate)
}

/// Microseconds there and back, of the median packet.
fn latency(world: &World) -> Result<f64> {
    world.guests[1].enter();
    let far = UdpSocket::bind((address(0, 1), 0))?;
    let there = far.local_addr()?;
    far.set_read_timeout(Some(Duration::from_secs(2)))?;
    std::thread::spawn(move || {
        let mut buffer = [0; 64];
        while let Ok((got, from)) = far.recv_from(&mut buffer) {
            let _ = far.send_to(&buffer[..got], from);
        }
    });
    world.guests[0].enter();
    let near = UdpSocket::bind((address(0, 0), 0))?;
    near.connect(there)?;
    near.set_read_timeout(Some(Duration::from_secs(2)))?;
    let mut took = vec![];
    for n in 0..ECHOES {
        let start = Instant::now();
        near.send(&n.to_be_bytes())?;
        near.recv(&mut [0; 64])?;
        took.push(start.elapsed());
    }
    took.sort();
    Ok(took[ECHOES / 2].as_secs_f64() * 1e6)
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}

/// A line of medians, and of the rounds' ratios.
fn show(what: &str, values: &[Vec<f64>; KINDS.len()]) {
    let cells: String = values.iter().map(|values| format!(" {:>12.1}", median(values))).collect();
    let ratio = |one: usize, other: usize| {
        let ratios: Vec<f64> = values[one].iter().zip(&values[other]).map(|(a, b)| a / b).collect();
        median(&ratios)
    };
    println!("{what} {cells}   {:>10.3}  {:>16.3}", ratio(2, 1), ratio(4, 3));
}

fn main() -> Result<()> {
    let seconds: f64 = std::env::args().nth(1).map_or(Ok(1.0), |text| text.parse())?;
    let lasting = Duration::from_secs_f64(seconds);
    let titles: String = KINDS.iter().map(|kind| format!(" {kind:>12}")).collect();
    println!("links {titles}   wire/vxlan  collapsed/bridge   (Mbit/s; `us`: there and back on one link)");
    let wanted: Vec<usize> =
        std::env::args().skip(2).map(|text| text.parse()).collect::<std::result::Result<_, _>>()?;
    for links in if wanted.is_empty() { vec![1, 4, 16, 64] } else { wanted } {
        let worlds = KINDS.iter().map(|kind| build(kind, links)).collect::<Result<Vec<_>>>()?;
        let mut rates = [const { vec![] }; KINDS.len()];
        let mut delays = [const { vec![] }; KINDS.len()];
        for round in 0..ROUNDS {
            // In another order each time: what one leaves behind falls on each.
            let mut order: Vec<usize> = (0..KINDS.len()).map(|n| (n + round) % KINDS.len()).collect();
            if round % 2 == 1 {
                order.reverse();
            }
            for kind in order {
                rates[kind].push(throughput(&worlds[kind], links, lasting)?);
                if links == 1 {
                    delays[kind].push(latency(&worlds[kind])?);
                }
            }
        }
        show(&format!("{links:>5}"), &rates);
        if links == 1 {
            show("   us", &delays);
        }
    }
    Ok(())
}
