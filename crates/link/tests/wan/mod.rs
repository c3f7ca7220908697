//! A path over a WAN, for one UDP port: a rate, a delay, a queue that drops what does not fit, and loss from a seed.

use godwit_link::Addresses;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use rustix::net::sockopt::{set_socket_recv_buffer_size, set_socket_recv_buffer_size_force};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::net::UdpSocket;
use tokio::time::Instant;

/// What a path does, each way.
#[derive(Clone, Copy, Debug)]
pub struct Path {
    /// Bits a second, UDP and IP headers included.
    pub rate: f64,
    /// One way.
    pub delay: Duration,
    /// Up to so much more, for each packet anew: they overtake each other then.
    pub jitter: Duration,
    /// Probability that a packet is lost.
    pub loss: f64,
    /// How long the queue may get.
    pub queue: Duration,
}

/// IPv4 and UDP.
const HEADERS: usize = 28;
/// What waits at an interface while the machine does something else is not lost: only [`Path::queue`] drops anything.
const SOCKET_BUFFER: usize = 4 << 20;

/// Packets on their way in one direction.
struct Direction {
    path: Path,
    rng: SmallRng,
    /// When the sender's interface is free again.
    free: Instant,
    /// By when they arrive, and in the order in which they were sent.
    flying: BTreeMap<(Instant, u64), Vec<u8>>,
    sent: u64,
}

impl Direction {
    fn new(path: Path, seed: u64) -> Self {
        let rng = SmallRng::seed_from_u64(seed);
        Self { path, rng, free: Instant::now(), flying: BTreeMap::new(), sent: 0 }
    }

    fn send(&mut self, packet: &[u8]) {
        let now = Instant::now();
        let waits = self.free.max(now);
        if waits - now > self.path.queue || self.rng.random_bool(self.path.loss) {
            return;
        }
        self.free = waits + Duration::from_secs_f64((packet.len() + HEADERS) as f64 * 8.0 / self.path.rate);
        let jitter = self.path.jitter.mul_f64(self.rng.random());
        self.sent += 1;
        self.flying.insert((self.free + self.path.delay + jitter, self.sent), packet.to_vec());
    }

    /// When the next one arrives.
    fn next(&self) -> Instant {
        self.flying.first_key_value().map_or_else(|| Instant::now() + Duration::from_secs(3600), |((at, _), _)| *at)
    }

    fn arrived(&mut self) -> Vec<Vec<u8>> {
        let later = self.flying.split_off(&(Instant::now(), u64::MAX));
        std::mem::replace(&mut self.flying, later).into_values().collect()
    }
}

async fn socket() -> UdpSocket {
    let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let _ = set_socket_recv_buffer_size_force(&socket, SOCKET_BUFFER)
        .or_else(|_| set_socket_recv_buffer_size(&socket, SOCKET_BUFFER));
    socket
}

/// Joins whoever speaks to the address that is returned with `to`, by such a path.
pub async fn join(to: SocketAddr, path: Path, seed: u64) -> SocketAddr {
    let front = socket().await;
    let address = front.local_addr().unwrap();
    let back = socket().await;
    back.connect(to).await.unwrap();
    tokio::spawn(async move {
        let (mut there, mut here) = (Direction::new(path, seed), Direction::new(path, seed + 1));
        let (mut buffer, mut other) = (vec![0; 65536], vec![0; 65536]);
        let mut client = None;
        loop {
            let (next_there, next_here) = (there.next(), here.next());
            tokio::select! {
                Ok((n, from)) = front.recv_from(&mut buffer) => {
                    client = Some(from);
                    there.send(&buffer[..n]);
                    // All that is here, before time is looked at again.
                    while let Ok((n, _)) = front.try_recv_from(&mut buffer) {
                        there.send(&buffer[..n]);
                    }
                }
                Ok(n) = back.recv(&mut other) => {
                    here.send(&other[..n]);
                    while let Ok(n) = back.try_recv(&mut other) {
                        here.send(&other[..n]);
                    }
                }
                () = tokio::time::sleep_until(next_there) => {}
                () = tokio::time::sleep_until(next_here) => {}
            }
            for packet in there.arrived() {
                let _ = back.send(&packet).await;
            }
            if let Some(client) = client {
                for packet in here.arrived() {
                    let _ = front.send_to(&packet, client).await;
                }
            }
        }
    });
    address
}

/// As [`join`], with such a path for each lane.
pub async fn join_all(to: Addresses, path: Path) -> Addresses {
    Addresses {
        control: join(to.control, path, 1).await,
        disk: join(to.disk, path, 3).await,
        memory: join(to.memory, path, 5).await,
    }
}
