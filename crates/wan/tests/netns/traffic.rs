//! Plain traffic between the sites: a TCP stream, UDP round trips, UDP trains.

use super::{ADDRESS_B, PATIENCE, Sites};
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
        // A machine that was busy elsewhere all the time has measured nothing.
        let (first_at, first_bytes) = first.unwrap_or(last);
        let steady_rate = (last.1 - first_bytes) as f64 / (last.0 - first_at).as_secs_f64().max(1e-9);
        Stream { whole: began.elapsed(), bytes, steady_rate }
    })
}

/// Round trips of small datagrams from A to B and back, sorted. Datagrams lost are missing.
pub fn round_trips(sites: &Sites, port: u16, count: u32, gap: Duration) -> Vec<Duration> {
    let echo = sites.b.enter(|| UdpSocket::bind((ADDRESS_B, port)).unwrap());
    let asker = sites.a.enter(|| UdpSocket::bind("0.0.0.0:0").unwrap());
    asker.connect((ADDRESS_B, port)).unwrap();
    asker.set_read_timeout(Some(PATIENCE)).unwrap();
    echo.set_read_timeout(Some(PATIENCE)).unwrap();
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

/// What came of a train of datagrams from A to B.
#[derive(Clone, Debug)]
pub struct Train {
    /// The numbers of those that arrived, in their order of arrival.
    pub arrived: Vec<u32>,
    /// How long the sender took.
    pub sending: Duration,
    /// From before the first was sent until after the last had arrived.
    pub whole: Duration,
}

/// Sends `count` datagrams of `payload` bytes from A to B, `burst` at a time with `gap` between bursts. Ends when
/// `settled` says of the number that arrived that no more will, or when patience is at its end.
pub fn train(
    sites: &Sites,
    port: u16,
    (count, payload): (u32, usize),
    (burst, gap): (u32, Duration),
    settled: impl Fn(usize) -> bool,
) -> Train {
    let receiver = sites.b.enter(|| UdpSocket::bind((ADDRESS_B, port)).unwrap());
    let sender = sites.a.enter(|| UdpSocket::bind("0.0.0.0:0").unwrap());
    // Room for all of them, however late they are read.
    force_receive_buffer(&receiver, 64 << 20);
    receiver.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
    let began = Instant::now();
    std::thread::scope(|scope| {
        let sending = scope.spawn(|| {
            let mut datagram = vec![0; payload];
            for n in 0..count {
                datagram[..4].copy_from_slice(&n.to_be_bytes());
                sender.send_to(&datagram, (ADDRESS_B, port)).unwrap();
                if n % burst == burst - 1 {
                    std::thread::sleep(gap);
                }
            }
            began.elapsed()
        });
        let (mut buffer, mut arrived, mut whole) = (vec![0; 65_536], Vec::new(), Duration::ZERO);
        loop {
            if receiver.recv(&mut buffer).is_ok() {
                arrived.push(u32::from_be_bytes([buffer[0], buffer[1], buffer[2], buffer[3]]));
                whole = began.elapsed();
            } else if sending.is_finished() && (settled(arrived.len()) || began.elapsed() > PATIENCE) {
                break;
            }
        }
        Train { arrived, sending: sending.join().unwrap(), whole }
    })
}

fn force_receive_buffer(socket: &UdpSocket, bytes: libc::c_int) {
    use std::os::fd::AsRawFd;
    // SAFETY: the pointer and the length are those of `bytes`, which lives through the call.
    let answer = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_RCVBUFFORCE,
            (&raw const bytes).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        )
    };
    assert_eq!(answer, 0, "{}", std::io::Error::last_os_error());
}

/// The middle of sorted values.
pub fn median(sorted: &[Duration]) -> Duration {
    sorted[sorted.len() / 2]
}
