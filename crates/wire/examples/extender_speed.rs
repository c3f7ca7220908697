//! How fast the programs are that could carry an extender where the kernel has no WireGuard, in one run: `cargo run --release -p
//! godwit-wire --example extender_speed [SECONDS [ROUNDS]]`. Needs root, `ip`, `wg`, and of wireguard-go, boringtun-cli and openvpn (with
//! `openssl`) those that are to be measured. Leaves nothing.
//!
//! Each joins two network namespaces by a tunnel of MTU 1420 over a veth pair; `veth` is the pair itself. One TCP stream is sent for some
//! seconds through each in turn, ROUNDS times over, so that what else the machine does falls on all. CPU is that of the two programs
//! together, user and system, by what the receiver got; the sender's and the receiver's own and the kernel's share of softirq are left out.
//! Ratios are medians of the rounds' ratios.

#![allow(clippy::unwrap_used, reason = "a measurement that cannot go on has failed")]

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream, UdpSocket};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

#[path = "../tests/common/place.rs"]
mod place;
use place::Place;

const MTU: u32 = 1420;
/// Questions there and back.
const ECHOES: usize = 2000;
/// The kernel's unit of processes' times, seconds.
const TICK: f64 = 0.01;

/// Two namespaces and the programs that join them, which end with it.
struct Joined {
    name: &'static str,
    places: [Place; 2],
    programs: Vec<Child>,
    /// The address that is reached through it.
    far: Ipv4Addr,
}

impl Drop for Joined {
    fn drop(&mut self) {
        for program in &mut self.programs {
            let _ = program.kill();
            let _ = program.wait();
        }
    }
}

fn underlay() -> [Place; 2] {
    let places = [Place::new(), Place::new()];
    places[0].run(&format!("ip link add eth0 type veth peer name eth0 netns {}", places[1].path()));
    for (n, place) in places.iter().enumerate() {
        place.run(&format!("ip addr add 10.0.0.{}/24 dev eth0; ip link set eth0 up", n + 1));
    }
    places
}

fn said(program: &str, words: &[&str], input: &str) -> String {
    let mut command = Command::new(program);
    let mut child = command.args(words).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{program} {words:?}");
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

fn is_there(program: &str) -> bool {
    Command::new(program).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok()
}

fn wait_for(what: &str, is: impl Fn() -> bool) {
    let end = Instant::now() + Duration::from_secs(20);
    while !is() {
        assert!(Instant::now() < end, "{what} does not come up");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// By WireGuard, with devices made by this program.
fn wireguard(name: &'static str, program: &str, words: &[&str]) -> Joined {
    let places = underlay();
    let keys = [0, 1].map(|_| said("wg", &["genkey"], ""));
    let public = keys.each_ref().map(|key| said("wg", &["pubkey"], key));
    let mut programs = vec![];
    for (n, place) in places.iter().enumerate() {
        place.enter();
        // Sockets have these names in one folder, whatever the namespace.
        let device = format!("gx{}{}{n}", &name[..1], std::process::id() % 100_000);
        let mut command = Command::new(program);
        command.args(words).arg(&device).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        programs.push(command.spawn().unwrap());
        let socket = format!("/var/run/wireguard/{device}.sock");
        wait_for(name, || Path::new(&socket).exists());
        let (key, other, at) = (&keys[n], &public[1 - n], 2 - n);
        let text = format!(
            "[Interface]\nPrivateKey = {key}\nListenPort = 51820\n[Peer]\nPublicKey = {other}\nEndpoint = 10.0.0.{at}:51820\n\
             AllowedIPs = 10.9.0.0/24\n"
        );
        said("wg", &["setconf", &device, "/dev/stdin"], &text);
        place.run(&format!("ip addr add 10.9.0.{}/24 dev {device}; ip link set {device} mtu {MTU} up", n + 1));
    }
    Joined { name, places, programs, far: [10, 9, 0, 2].into() }
}

/// By OpenVPN with AES-256-GCM, keys from a TLS handshake of two certificates that know each other's prints.
fn openvpn(folder: &Path) -> Joined {
    let places = underlay();
    let file = |name: &str| folder.join(name).to_str().unwrap().to_owned();
    let prints = [0, 1].map(|n| {
        let (key, cert) = (file(&format!("{n}.key")), file(&format!("{n}.crt")));
        let words =
            ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"];
        let mut all = words.to_vec();
        let subject = format!("/CN=n{n}");
        all.extend(["-subj", &subject, "-keyout", &key, "-out", &cert]);
        let mut request = Command::new("openssl");
        assert!(request.args(all).stdout(Stdio::null()).stderr(Stdio::null()).status().unwrap().success());
        let print = said("openssl", &["x509", "-fingerprint", "-sha256", "-noout", "-in", &cert], "");
        print.split('=').nth(1).unwrap().to_owned()
    });
    let mut programs = vec![];
    for (n, place) in places.iter().enumerate() {
        place.enter();
        let (own, other, mtu) = (format!("10.9.0.{}", n + 1), format!("10.9.0.{}", 2 - n), MTU.to_string());
        let (key, cert, remote) = (file(&format!("{n}.key")), file(&format!("{n}.crt")), format!("10.0.0.{}", 2 - n));
        let mut words =
            vec!["--dev", "tun", "--proto", "udp", "--port", "1194", "--remote", &remote, "--ifconfig", &own, &other];
        words.extend([
            "--cert",
            &cert,
            "--key",
            &key,
            "--peer-fingerprint",
            &prints[1 - n],
            "--tun-mtu",
            &mtu,
            "--mssfix",
            "0",
        ]);
        words.extend(["--data-ciphers", "AES-256-GCM", "--cipher", "AES-256-GCM", "--disable-dco", "--verb", "1"]);
        words.extend(if n == 0 { vec!["--tls-client"] } else { vec!["--tls-server", "--dh", "none"] });
        let log = std::fs::File::create(file(&format!("{n}.log"))).unwrap();
        let mut command = Command::new("openvpn");
        command.args(words).stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
        programs.push(command.spawn().unwrap());
    }
    let up = |n: usize| {
        std::fs::read_to_string(file(&format!("{n}.log"))).unwrap().contains("Initialization Sequence Completed")
    };
    wait_for("openvpn", || up(0) && up(1));
    Joined { name: "openvpn", places, programs, far: [10, 9, 0, 2].into() }
}

fn ticks(programs: &[Child]) -> u64 {
    let of = |program: &Child| {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", program.id())).unwrap();
        let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
        fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
    };
    programs.iter().map(of).sum()
}

/// Mbit/s, and the programs' nanoseconds a byte.
fn throughput(joined: &Joined, lasting: Duration) -> (f64, f64) {
    joined.places[1].enter();
    let listener = TcpListener::bind((joined.far, 5001)).unwrap();
    let (received, end) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
    let counted = received.clone();
    let reader = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut buffer = vec![0; 1 << 17];
        while let Ok(got @ 1..) = stream.read(&mut buffer) {
            counted.fetch_add(got as u64, Ordering::Relaxed);
        }
    });
    joined.places[0].enter();
    let mut stream = TcpStream::connect_timeout(&(joined.far, 5001).into(), Duration::from_secs(10)).unwrap();
    let stop = end.clone();
    let writer = std::thread::spawn(move || {
        let buffer = vec![0x5a; 1 << 17];
        while !stop.load(Ordering::Relaxed) {
            stream.write_all(&buffer).unwrap();
        }
    });
    // Until the stream has found its pace.
    std::thread::sleep(Duration::from_millis(500));
    let (start, from, before) = (Instant::now(), received.load(Ordering::Relaxed), ticks(&joined.programs));
    std::thread::sleep(lasting);
    let bytes = (received.load(Ordering::Relaxed) - from) as f64;
    let (took, used) = (start.elapsed().as_secs_f64(), (ticks(&joined.programs) - before) as f64);
    end.store(true, Ordering::Relaxed);
    writer.join().unwrap();
    reader.join().unwrap();
    (bytes * 8.0 / took / 1e6, used * TICK * 1e9 / bytes)
}

/// Microseconds there and back, the median, while nothing else is sent.
fn latency(joined: &Joined) -> f64 {
    joined.places[1].enter();
    let echo = UdpSocket::bind((joined.far, 5002)).unwrap();
    echo.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
    let answering = std::thread::spawn(move || {
        let mut buffer = [0; 64];
        while let Ok((got, from)) = echo.recv_from(&mut buffer) {
            let _ = echo.send_to(&buffer[..got], from);
        }
    });
    joined.places[0].enter();
    let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
    socket.connect((joined.far, 5002)).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
    let mut took = vec![];
    for _ in 0..ECHOES {
        let start = Instant::now();
        socket.send(&[0x5a; 32]).unwrap();
        if socket.recv(&mut [0; 64]).is_ok() {
            took.push(start.elapsed().as_secs_f64() * 1e6);
        }
    }
    answering.join().unwrap();
    median(took)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() {
    let mut words = std::env::args().skip(1);
    let mut next = |otherwise: u64| words.next().map_or(otherwise, |word| word.parse().unwrap());
    let (lasting, rounds) = (Duration::from_secs(next(3)), usize::try_from(next(5)).unwrap());
    let folder = std::env::temp_dir().join(format!("godwit-extender-speed-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let mut all = vec![Joined { name: "veth", places: underlay(), programs: vec![], far: [10, 0, 0, 2].into() }];
    if is_there("wireguard-go") {
        all.push(wireguard("wireguard-go", "wireguard-go", &["-f"]));
    }
    if is_there("boringtun-cli") {
        all.push(wireguard("boringtun", "boringtun-cli", &["--foreground", "--disable-drop-privileges"]));
    }
    if is_there("openvpn") {
        all.push(openvpn(&folder));
    }
    let mut measured: Vec<Vec<(f64, f64, f64)>> = vec![vec![]; all.len()];
    for _ in 0..rounds {
        for (joined, found) in all.iter().zip(&mut measured) {
            let (rate, cost) = throughput(joined, lasting);
            found.push((rate, cost, latency(joined)));
        }
    }
    let against = all.iter().position(|joined| joined.name == "openvpn").unwrap_or(0);
    let base = all[against].name;
    println!("{:14}{:>10}{:>16}{:>12}   of {base}: rate   CPU", "", "Mbit/s", "CPU ns/byte", "echo us");
    for (joined, found) in all.iter().zip(&measured) {
        let of = |pick: fn(&(f64, f64, f64)) -> f64| median(found.iter().map(pick).collect());
        let ratio = |pick: fn(&(f64, f64, f64)) -> f64| {
            median(found.iter().zip(&measured[against]).map(|(one, other)| pick(one) / pick(other)).collect())
        };
        println!(
            "{:14}{:>10.0}{:>16.2}{:>12.0}{:>18.2}{:>6.2}",
            joined.name,
            of(|m| m.0),
            of(|m| m.1),
            of(|m| m.2),
            ratio(|m| m.0),
            ratio(|m| m.1)
        );
    }
    drop(all);
    let _ = std::fs::remove_dir_all(&folder);
}
