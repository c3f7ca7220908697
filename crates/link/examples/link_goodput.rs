//! How much of a path a stream gets: `cargo run --release -p godwit-link --example goodput` (part of `make bench`).
//!
//! What the path could carry at the most is its rate less IP's, UDP's and QUIC's headers, about 96 %. Its queue holds 50 ms.

#![allow(clippy::unwrap_used, reason = "a figure that cannot be had is none")]

use bytes::Bytes;
use godwit_link::{Addresses, Config, Endpoint, Lane, Peer, Priority};
use godwit_trust::{Authority, Credentials, Identity, Validity};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

#[path = "../tests/wan/mod.rs"]
mod wan;

/// Not counted: the beginning of each transfer.
const START: Duration = Duration::from_secs(2);
/// Counted.
const COUNTED: Duration = Duration::from_secs(6);

fn endpoint(ca: &Authority, folder: &std::path::Path, name: &str) -> Endpoint {
    let dir = folder.join(name);
    ca.issue(&Identity::node(name).unwrap(), Validity::days(1)).unwrap().write(&dir).unwrap();
    let any: SocketAddr = "127.0.0.1:0".parse().unwrap();
    let config = Config::new(Addresses { control: any, disk: any, memory: any });
    Endpoint::bind(config, &Credentials::load(&dir).unwrap()).unwrap()
}

#[tokio::main]
async fn main() {
    let folder = tempfile::tempdir().unwrap();
    let ca = Authority::create(&folder.path().join("ca")).unwrap();
    println!("{:>10}  {:>7}  {:>6}  {:>15}", "rate", "rtt", "loss", "goodput/rate");
    for (n, (mbit, rtt_ms, loss)) in
        [(100.0, 1, 0.0), (100.0, 27, 0.0), (100.0, 100, 0.0), (100.0, 27, 0.001), (200.0, 27, 0.0), (30.0, 100, 0.0)]
            .into_iter()
            .enumerate()
    {
        let a = endpoint(&ca, folder.path(), &format!("a{n}"));
        let b = endpoint(&ca, folder.path(), &format!("b{n}"));
        let path = wan::Path {
            rate: mbit * 1e6,
            delay: Duration::from_millis(rtt_ms) / 2,
            jitter: Duration::ZERO,
            loss,
            queue: Duration::from_millis(50),
        };
        let addresses = wan::join_all(b.addresses(), path).await;
        let peer = Peer { identity: Identity::node(format!("b{n}")).unwrap(), addresses };
        let (ours, theirs) = tokio::join!(a.connect(peer), b.accept());
        let (ours, theirs) = (ours.unwrap(), theirs.unwrap());
        let stream = ours.open_stream(Lane::Disk, Priority::Bulk, Bytes::new()).await.unwrap();
        let (_, _, mut other) = theirs.accept_stream().await.unwrap();
        let mut send = stream.send;
        let writer = tokio::spawn(async move {
            let piece = Bytes::from(vec![7; 65536]);
            while send.write(piece.clone()).await.is_ok() {}
        });
        let (began, mut counted) = (Instant::now(), 0u64);
        while began.elapsed() < START + COUNTED {
            let data = other.recv.read().await.unwrap().unwrap();
            if began.elapsed() > START {
                counted += data.len() as u64;
            }
        }
        writer.abort();
        let goodput = counted as f64 * 8.0 / COUNTED.as_secs_f64() / (mbit * 1e6);
        println!("{:>5} Mbit/s  {rtt_ms:>4} ms  {:>5.1}%  {:>14.1}%", mbit, loss * 100.0, goodput * 100.0);
    }
}
