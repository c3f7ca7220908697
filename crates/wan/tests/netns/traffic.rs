//! Plain traffic between the sites: a TCP stream, UDP round trips, UDP trains.

use super::{ADDRESS_B, Sites};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::time::{Duration, Instant};

/// What came of a TCP stream from A to B.
#[derive(Clone, Copy, Debug)]
pub struct Stream {
    /// From before the connection was made until the last byte had been read: every byte crossed within this.
    pub whole: Duration,
    /// All bytes read.
    pub bytes: u64,
    /// Bytes per second after the warm-up.
    pub steady_rate: f64,
}

/// Streams from A to B for `warm_up + measured`, to `port`.
pub fn stream(sites: &Sites, port: u16, warm_up: Duration, measured: Duration) -> Stream {
    let listener = sites.b.enter(|| TcpListener::bind((ADDRESS_B, port)).unwrap());
    let began = Instant::now();
    let mut sender = sites.a.enter(|| TcpStream::connect((ADDRESS_B, port)).unwrap());
    let (mut receiver, _) = listener.accept().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let chunk = vec![0x5a; 256 << 10];
            while began.elapsed() < warm_up + measured {
                sender.write_all(&chunk).unwrap();
            }
        });
        let mut chunk = vec![0; 1 << 20];
        let (mut bytes, mut first, mut last) = (0u64, None, (Instant::now(), 0));
        loop {
            let got = receiver.read(&mut chunk).unwrap() as u64;
            if got == 0 {
                break;
            }
            bytes += got;
            let now = Instant::now();
            if now - began >= warm_up && now - began <= warm_up + measured {
                first.get_or_insert((now, bytes));
                last = (now, bytes);
            }
        }
        let (first_at, first_bytes) = first.unwrap();
        let steady_rate = (last.1 - first_bytes) as f64 / (last.0 - first_at).as_secs_f64();
        Stream { whole: began.elapsed(), bytes, steady_rate }
    })
}

/// Round trips of small datagrams from A to B and back, sorted. Datagrams lost are missing.
pub fn round_trips(sites: &Sites, port: u16, count: u32, gap: Duration) -> Vec<Duration> {
    let echo = sites.b.enter(|| UdpSocket::bind((ADDRESS_B, port)).unwrap());
    let asker = sites.a.enter(|| UdpSocket::bind("0.0.0.0:0").unwrap());
    asker.connect((ADDRESS_B, port)).unwrap();
    asker.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
    echo.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut buffer = [0; 64];
            // The asker says when it has had enough.
            while let Ok((len, from)) = echo.recv_from(&mut buffer) {
                if buffer[..len] == *b"end" {
                    break;
                }
                echo.send_to(&buffer[..len], from).unwrap();
            }
        });
        // The first settles ARP.
        asker.send(&0u32.to_be_bytes()).unwrap();
        let mut buffer = [0; 64];
        let _ = asker.recv(&mut buffer);
        let mut times = Vec::new();
        for n in 1..=count {
            let asked = Instant::now();
            asker.send(&n.to_be_bytes()).unwrap();
            while let Ok(len) = asker.recv(&mut buffer) {
                if buffer[..len] == n.to_be_bytes() {
                    times.push(asked.elapsed());
                    break;
                }
            }
            std::thread::sleep(gap);
        }
        asker.send(b"end").unwrap();
        times.sort();
        times
    })
}

/// Sends `count` datagrams of `payload` bytes from A to B, `burst` at a time with `gap` between bursts, and returns the
/// numbers of those that arrived, in their order of arrival.
pub fn train(sites: &Sites, port: u16, count: u32, payload: usize, burst: u32, gap: Duration) -> Vec<u32> {
    let receiver = sites.b.enter(|| UdpSocket::bind((ADDRESS_B, port)).unwrap());
    let sender = sites.a.enter(|| UdpSocket::bind("0.0.0.0:0").unwrap());
    receiver.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut datagram = vec![0; payload];
            for n in 0..count {
                datagram[..4].copy_from_slice(&n.to_be_bytes());
                sender.send_to(&datagram, (ADDRESS_B, port)).unwrap();
                if n % burst == burst - 1 {
                    std::thread::sleep(gap);
                }
            }
        });
        let mut buffer = vec![0; 65_536];
        let mut arrived = Vec::new();
        while receiver.recv(&mut buffer).is_ok() {
            arrived.push(u32::from_be_bytes([buffer[0], buffer[1], buffer[2], buffer[3]]));
        }
        arrived
    })
}

/// The middle of sorted values.
pub fn median(sorted: &[Duration]) -> Duration {
    sorted[sorted.len() / 2]
}
