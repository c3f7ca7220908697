//! Whether what gives way does: a TCP flow (CUBIC) beside a pre-cache's bytes on one path of the WAN emulator.
//!
//! ```text
//! cargo run --release -p godwit-link --example gives_way            # part of `make bench`
//! cargo run --release -p godwit-link --example gives_way -- 9 20    # pairs, seconds of each flow; each pair is shown with VERBOSE=1, each look at the path with TRACE=1
//! ```
//!
//! Root; everything happens in network namespaces that end with the process. For each queue: the scavenger alone; then pairs of a TCP flow
//! alone and one beside it, each first in turn, since a machine's mood changes. The scavenger has the path to itself for a while before
//! a flow begins beside it, as a pre-cache does. The flow's share is of the bytes that were read in its whole life, slow start included.

#![allow(clippy::unwrap_used, reason = "a figure that cannot be had is none")]

#[allow(dead_code, clippy::unwrap_used, unsafe_code, reason = "shared with the emulator's own tests")]
#[path = "../../wan/tests/netns/mod.rs"]
mod netns;

use bytes::Bytes;
use godwit_link::pace::Pace;
use godwit_link::{Addresses, Config, Endpoint, Lane, Peer, Priority};
use godwit_trust::{Authority, Credentials, Identity, Validity};
use godwit_units::BitRate;
use godwit_wan::{Class, Classifier, Offload, Path, PathSpec, set_segmentation};
use netns::{ADDRESS_A, ADDRESS_B, ENDS, SITE_A, SITE_B, Sites, privileged};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const TCP_PORT: u16 = 7000;
const MBIT: f64 = 50.0;
const RTT: Duration = Duration::from_millis(40);
/// How often the node's shell looks at the path.
const TICK: Duration = Duration::from_millis(50);
/// What the scavenger has alone before a flow begins beside it, and what a queue takes to drain.
const BEFORE: Duration = Duration::from_secs(12);

struct Sender {
    on: Arc<AtomicBool>,
    received: Arc<AtomicU64>,
    /// For eyes: what it may send now.
    allowed: Arc<AtomicU64>,
}

impl Sender {
    fn rate(&self, over: Duration) -> f64 {
        let before = self.received.load(Ordering::Relaxed);
        std::thread::sleep(over);
        (self.received.load(Ordering::Relaxed) - before) as f64 * 8.0 / over.as_secs_f64()
    }
}

fn endpoint(ca: &Authority, folder: &std::path::Path, name: &str, address: &str) -> Endpoint {
    let dir = folder.join(name);
    ca.issue(&Identity::node(name).unwrap(), Validity::days(1)).unwrap().write(&dir).unwrap();
    let any: SocketAddr = format!("{address}:0").parse().unwrap();
    let config = Config::new(Addresses { control: any, disk: any, memory: any });
    Endpoint::bind(config, &Credentials::load(&dir).unwrap()).unwrap()
}

/// Sends for ever, as a pre-cache does.
fn start(runtime: &tokio::runtime::Runtime, sites: &Sites, folder: &std::path::Path) -> Sender {
    let ca = Authority::create(&folder.join("ca")).unwrap();
    let bind = |name: &str, address: &str| {
        let _in = runtime.enter();
        endpoint(&ca, folder, name, address)
    };
    let a = sites.a.enter(|| bind("a", ADDRESS_A));
    let b = sites.b.enter(|| bind("b", ADDRESS_B));
    let peer = Peer { identity: Identity::node("b").unwrap(), addresses: b.addresses() };
    let (ours, theirs) = runtime.block_on(async { tokio::join!(a.connect(peer), b.accept()) });
    let (ours, theirs) = (ours.unwrap(), theirs.unwrap());
    let (on, received, allowed) =
        (Arc::new(AtomicBool::new(true)), Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let sender = Sender { on: on.clone(), received: received.clone(), allowed: allowed.clone() };
    runtime.spawn(async move {
        let _kept = b;
        let (_, _, mut other) = theirs.accept_stream().await.unwrap();
        while let Ok(Some(data)) = other.recv.read().await {
            received.fetch_add(data.len() as u64, Ordering::Relaxed);
        }
    });
    runtime.spawn(async move {
        let _kept = a;
        let mut stream = ours.open_stream(Lane::Disk, Priority::Background, Bytes::new()).await.unwrap();
        let mut tick = tokio::time::interval(TICK);
        let mut pace = Pace::new().share();
        let data = Bytes::from(vec![7; 128 << 10]);
        let (began, trace) = (Instant::now(), std::env::var_os("TRACE").is_some());
        loop {
            let busy = on.load(Ordering::Relaxed);
            tokio::select! {
                _ = tick.tick() => {
                    if let Some(path) = ours.path(Lane::Disk) {
                        if trace {
                            eprintln!("{:.2?}: may {:.2} Mbit/s, {path:?}", began.elapsed(), pace.allowed().0 as f64 / 1e6);
                        }
                        pace.measured(path, None, busy);
                    }
                    allowed.store(pace.allowed().0, Ordering::Relaxed);
                }
                bytes = pace.turn(data.len()), if busy => {
                    stream.send.write(data.slice(..bytes)).await.unwrap();
                }
            }
        }
    });
    sender
}

/// A flow of CUBIC from A to B for so long: bits of contents read in a second of its whole life.
fn tcp(sites: &Sites, life: Duration) -> f64 {
    let listener = sites.b.enter(|| TcpListener::bind((ADDRESS_B, TCP_PORT)).unwrap());
    let began = Instant::now();
    let mut sender = sites.a.enter(|| TcpStream::connect((ADDRESS_B, TCP_PORT)).unwrap());
    // A namespace may not choose it for all its sockets; root may for one.
    rustix::net::sockopt::set_tcp_congestion(&sender, "cubic").unwrap();
    let (mut receiver, _) = listener.accept().unwrap();
    receiver.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            sender.set_write_timeout(Some(Duration::from_millis(100))).unwrap();
            let chunk = vec![0x5a; 64 << 10];
            while began.elapsed() < life {
                let _ = sender.write(&chunk);
            }
            let _ = sender.shutdown(std::net::Shutdown::Both);
        });
        let (mut chunk, mut bytes) = (vec![0; 1 << 20], 0);
        while began.elapsed() < life {
            bytes += receiver.read(&mut chunk).unwrap_or(0);
        }
        bytes as f64 * 8.0 / life.as_secs_f64()
    })
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

fn main() {
    if !privileged("gives_way") {
        return;
    }
    let mut arguments = std::env::args().skip(1);
    let pairs: usize = arguments.next().map_or(5, |text| text.parse().unwrap());
    let seconds: u64 = arguments.next().map_or(30, |text| text.parse().unwrap());
    let queues: Vec<u64> = arguments.next().map_or_else(|| vec![10, 200], |q| vec![q.parse().unwrap()]);
    let life = Duration::from_secs(seconds);
    println!("{MBIT} Mbit/s, {} ms; {pairs} pairs of {seconds} s; Mbit/s of contents read", RTT.as_millis());
    println!(
        "{:>8}  {:>9}  {:>22}  {:>16}  {:>9}  {:>9}",
        "queue", "scavenger", "its share of the path", "TCP (CUBIC)", "beside", "it keeps"
    );
    for queue_ms in queues {
        let spec = PathSpec {
            rate: BitRate::from_mbit(MBIT),
            rtt: RTT,
            jitter: Duration::ZERO,
            loss: 0.0,
            queue: Duration::from_millis(queue_ms),
        };
        let sites = Sites::new().unwrap();
        for (site, interface) in [(&sites.a, SITE_A), (&sites.b, SITE_B)] {
            site.enter(|| {
                set_segmentation(interface, Offload::SinglePackets).unwrap();
            });
        }
        let rules = Classifier::new([(TCP_PORT..=TCP_PORT, Class::Memory)]);
        let _path = sites.emulator.enter(|| Path::start("shared", ENDS.0, ENDS.1, spec, rules, 7)).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let sender = start(&runtime, &sites, folder.path());
        // It begins at its least rate.
        std::thread::sleep(BEFORE);
        let idle = sender.rate(life);

        let flow = |beside: bool| {
            sender.on.store(beside, Ordering::Relaxed);
            std::thread::sleep(if beside { BEFORE } else { Duration::from_secs(2) });
            let sent = sender.received.load(Ordering::Relaxed);
            let began = Instant::now();
            let rate = tcp(&sites, life);
            let of_scavenger =
                (sender.received.load(Ordering::Relaxed) - sent) as f64 * 8.0 / began.elapsed().as_secs_f64();
            if std::env::var_os("VERBOSE").is_some() {
                println!(
                    "  beside {beside}: TCP {:.2}, scavenger {:.2}, may {:.2}",
                    rate / 1e6,
                    of_scavenger / 1e6,
                    sender.allowed.load(Ordering::Relaxed) as f64 / 1e6
                );
            }
            rate
        };
        let (mut alone, mut beside, mut shares) = (vec![], vec![], vec![]);
        for pair in 0..pairs {
            let (one, other);
            if pair % 2 == 0 {
                one = flow(false);
                other = flow(true);
            } else {
                other = flow(true);
                one = flow(false);
            }
            shares.push(other / one);
            alone.push(one);
            beside.push(other);
        }
        println!(
            "{queue_ms:>5} ms  {:>9.1}  {:>20.1} %  {:>16.1}  {:>9.1}  {:>7.1} %",
            idle / 1e6,
            idle / (MBIT * 1e4),
            median(&mut alone) / 1e6,
            median(&mut beside) / 1e6,
            median(&mut shares) * 100.0,
        );
        runtime.shutdown_background();
    }
}
