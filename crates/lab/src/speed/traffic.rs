//! Traffic between two ends, and what it costs.

use crate::flow::within;
use anyhow::{Context, Result, bail};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Packets there and back for one figure.
const ECHOES: usize = 500;
/// Bytes of UDP in a frame, as the paper's netperf has them.
const FRAME: usize = 1400;
/// A packet that does not come back within this time is lost; of more than so many that are, something is wrong.
const LOST: Duration = Duration::from_millis(500);
const MOST_LOST: usize = 5;
/// How long a connection may take, and whoever answers waits.
const ANSWER: Duration = Duration::from_secs(10);

/// Two ends, and an address of each for every link between them.
#[derive(Debug)]
pub(super) struct Pair {
    /// The namespaces.
    pub ends: [PathBuf; 2],
    /// The addresses, link by link.
    pub links: Vec<[Ipv4Addr; 2]>,
}

/// Frames in one direction.
#[derive(Clone, Copy, Debug)]
pub(super) struct Frames {
    /// How many came.
    pub frames_per_s: f64,
    /// What the machine did besides being idle, for each of these.
    pub cpu_us_per_frame: Option<f64>,
}

/// Mbit/s of TCP over all links at once.
///
/// # Errors
/// When a link leads nowhere.
pub(super) fn throughput(pair: &Pair, window: Duration) -> Result<f64> {
    let (received, end) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
    let mut threads = vec![];
    for [near, far] in &pair.links {
        let listener = within(&pair.ends[1], || TcpListener::bind((*far, 0)))?;
        let to = listener.local_addr()?;
        let sender = within(&pair.ends[0], || TcpStream::connect_timeout(&to, ANSWER))
            .with_context(|| format!("{near} does not reach {far}"))?;
        let (receiver, _) = listener.accept()?;
        let (counts, ends) = (received.clone(), end.clone());
        threads.push(std::thread::spawn(move || receive(receiver, &counts)));
        threads.push(std::thread::spawn(move || send(sender, &ends)));
    }
    // Past the beginning.
    std::thread::sleep(window / 4);
    let (start, before) = (Instant::now(), received.load(Ordering::Relaxed));
    std::thread::sleep(window);
    let bytes = received.load(Ordering::Relaxed) - before;
    let rate = bytes as f64 * 8.0 / 1e6 / start.elapsed().as_secs_f64();
    end.store(true, Ordering::Relaxed);
    for thread in threads {
        let _ = thread.join();
    }
    Ok(rate)
}

fn receive(mut stream: TcpStream, received: &AtomicU64) {
    let mut buffer = vec![0; 1 << 17];
    while let Ok(got @ 1..) = stream.read(&mut buffer) {
        received.fetch_add(got as u64, Ordering::Relaxed);
    }
}

fn send(mut stream: TcpStream, end: &AtomicBool) {
    let buffer = vec![0x5a; 1 << 17];
    while !end.load(Ordering::Relaxed) && stream.write_all(&buffer).is_ok() {}
}

/// Frames of UDP over the first link, as fast as they go, and what each costs.
///
/// # Errors
/// When there are no sockets to be had.
pub(super) fn frames(pair: &Pair, window: Duration) -> Result<Frames> {
    let [near, far] = pair.links[0];
    let receiver = within(&pair.ends[1], || UdpSocket::bind((far, 0)))?;
    let to = receiver.local_addr()?;
    let sender = within(&pair.ends[0], || UdpSocket::bind((near, 0)))?;
    sender.connect(to)?;
    receiver.set_read_timeout(Some(Duration::from_millis(50)))?;
    let (came, end) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
    let (counts, ends) = (came.clone(), end.clone());
    let receiving = std::thread::spawn(move || {
        let mut buffer = [0; 2048];
        while !ends.load(Ordering::Relaxed) {
            if receiver.recv(&mut buffer).is_ok() {
                counts.fetch_add(1, Ordering::Relaxed);
            }
        }
    });
    let ends = end.clone();
    let sending = std::thread::spawn(move || {
        while !ends.load(Ordering::Relaxed) {
            // A full queue refuses, which is no reason to end.
            let _ = sender.send(&[0x5a; FRAME]);
        }
    });
    std::thread::sleep(window / 4);
    let (start, before, busy) = (Instant::now(), came.load(Ordering::Relaxed), busy_us()?);
    std::thread::sleep(window);
    let (frames, busy) = (came.load(Ordering::Relaxed) - before, busy_us()? - busy);
    let seconds = start.elapsed().as_secs_f64();
    end.store(true, Ordering::Relaxed);
    let _ = (receiving.join(), sending.join());
    let cpu_us_per_frame = (frames > 0).then(|| busy / frames as f64);
    Ok(Frames { frames_per_s: frames as f64 / seconds, cpu_us_per_frame })
}

/// For how long the machine's processors were not idle since it started, us, all together.
fn busy_us() -> Result<f64> {
    let text = std::fs::read_to_string("/proc/stat").context("cannot read /proc/stat")?;
    busy_of(&text).context("/proc/stat is not understood")
}

fn busy_of(stat: &str) -> Option<f64> {
    /// Ticks a second, for every architecture that matters here.
    const TICK_US: f64 = 1e6 / 100.0;
    let line = stat.lines().find_map(|line| line.strip_prefix("cpu "))?;
    let ticks: Vec<f64> = line.split_whitespace().map_while(|word| word.parse().ok()).collect();
    // user, nice, system, idle, waiting for a disk, interrupts, soft ones, stolen; guests' time is in the first two.
    let [user, nice, system, _, _, hard, soft, ..] = ticks.as_slice() else { return None };
    Some((user + nice + system + hard + soft) * TICK_US)
}

/// Microseconds there and back over the first link, of the median packet.
///
/// # Errors
/// When none comes back.
pub(super) fn latency(pair: &Pair) -> Result<f64> {
    let [near, far] = pair.links[0];
    let echo = within(&pair.ends[1], || UdpSocket::bind((far, 0)))?;
    let to: SocketAddr = echo.local_addr()?;
    echo.set_read_timeout(Some(ANSWER))?;
    let echoing = std::thread::spawn(move || {
        let mut buffer = [0; 64];
        while let Ok((got @ 1.., from)) = echo.recv_from(&mut buffer) {
            let _ = echo.send_to(&buffer[..got], from);
        }
    });
    let socket = within(&pair.ends[0], || UdpSocket::bind((near, 0)))?;
    socket.connect(to)?;
    socket.set_read_timeout(Some(LOST))?;
    let (mut took, mut lost) = (vec![], 0);
    for n in 0..ECHOES {
        let start = Instant::now();
        socket.send(&n.to_be_bytes())?;
        let mut heard = [0; 8];
        // What comes too late is no answer to the next one.
        while let Ok(got) = socket.recv(&mut heard) {
            if heard[..got] == n.to_be_bytes() {
                took.push(start.elapsed().as_secs_f64() * 1e6);
                break;
            }
        }
        if took.len() + lost < n + 1 {
            lost += 1;
        }
        if lost > MOST_LOST {
            bail!("nothing comes back from {far}");
        }
    }
    // An empty one ends the other side.
    socket.send(&[])?;
    let _ = echoing.join();
    took.sort_by(f64::total_cmp);
    Ok(took[took.len() / 2])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_that_is_not_idle_is_busy() {
        assert_eq!(busy_of("cpu  1 2 3 4000 500 6 7 8 9 10\ncpu0 1 1 1 1 1 1 1\n"), Some(19.0 * 10_000.0));
        assert_eq!(busy_of("intr 5\n"), None);
    }

    #[test]
    fn traffic_within_one_namespace_is_measured() {
        let here = PathBuf::from("/proc/self/ns/net");
        if !rustix::process::geteuid().is_root() {
            eprintln!("SKIPPED: this needs root");
            return;
        }
        let pair = Pair { ends: [here.clone(), here], links: vec![[Ipv4Addr::LOCALHOST; 2]; 2] };
        let window = Duration::from_millis(100);
        assert!(throughput(&pair, window).unwrap() > 0.0);
        assert!(frames(&pair, window).unwrap().frames_per_s > 0.0);
        assert!(latency(&pair).unwrap() > 0.0);
    }
}
