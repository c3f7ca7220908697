//! What the ways cost that could carry an extender, in one run: `cargo run --release -p godwit-wire --example extender_speed [SECONDS
//! [ROUNDS]]`. Needs root, `ip`, `wg`, and of a kernel with WireGuard, wireguard-go, boringtun-cli and openvpn (with `openssl`) those that are
//! to be measured. Leaves nothing. `scripts/wireguard.sh` runs it on a kernel that has WireGuard.
//!
//! Each joins two network namespaces by a tunnel of MTU 1420 over a veth pair; `veth` is the pair itself. One TCP stream is sent for some
//! seconds through each in turn, ROUNDS times over, so that what else the machine does falls on all. CPU is told twice, by what the receiver
//! got. *Programs* is that of the tunnel's two programs together, user and system. *Machine* is all that the machine's processors did
//! meanwhile, the two ends of the stream and the kernel's own threads with it: it is the one that the kernel's WireGuard can be
//! compared by, it says something only where nothing else runs, and what `veth` has is in all of them. Frames are those of 1420 bytes that the
//! stream fills. Ratios are medians of the rounds' ratios.

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
/// What TCP carries in a frame: less two headers, and the option that has the time.
const PAYLOAD: f64 = MTU as f64 - 20.0 - 32.0;
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

/// Whether the kernel makes WireGuard devices.
fn kernel_has_wireguard() -> bool {
    Place::new().enter();
    let mut command = Command::new("ip");
    command.args(["link", "add", "gxtry", "type", "wireguard"]).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

/// By WireGuard, with devices made by this program, or by the kernel.
fn wireguard(name: &'static str, program: Option<(&str, &[&str])>) -> Joined {
    let places = underlay();
    let keys = [0, 1].map(|_| said("wg", &["genkey"], ""));
    let public = keys.each_ref().map(|key| said("wg", &["pubkey"], key));
    let mut programs = vec![];
    for (n, place) in places.iter().enumerate() {
        place.enter();
        // Sockets have these names in one folder, whatever the namespace.
        let device = format!("gx{}{}{n}", &name[..1], std::process::id() % 100_000);
        if let Some((program, words)) = program {
            let mut command = Command::new(program);
            command.args(words).arg(&device).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
            programs.push(command.spawn().unwrap());
            let socket = format!("/var/run/wireguard/{device}.sock");
            wait_for(name, || Path::new(&socket).exists());
        } else {
            place.run(&format!("ip link add {device} type wireguard"));
        }
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

/// What the machine's processors did since it started, all but idling, in ticks.
fn machine_ticks() -> u64 {
    let stat = std::fs::read_to_string("/proc/stat").unwrap();
    let times: Vec<u64> = stat.lines().next().unwrap().split_whitespace().skip(1).map(|n| n.parse().unwrap()).collect();
    // User, nice, system, idle, waiting for disks, interrupts, theirs.
    times[..3].iter().chain(&times[5..7]).sum()
}

/// Of one way, once.
#[derive(Clone, Copy)]
struct Measured {
    mbit_s: f64,
    /// The programs' nanoseconds a byte.
    programs: f64,
    /// The machine's.
    machine: f64,
    echo_us: f64,
}

fn measure(joined: &Joined, lasting: Duration) -> Measured {
    let (mbit_s, programs, machine) = throughput(joined, lasting);
    Measured { mbit_s, programs, machine, echo_us: latency(joined) }
}

/// Mbit/s, and the programs' and the machine's nanoseconds a byte.
fn throughput(joined: &Joined, lasting: Duration) -> (f64, f64, f64) {
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
    let (start, from) = (Instant::now(), received.load(Ordering::Relaxed));
    let before = [ticks(&joined.programs), machine_ticks()];
    std::thread::sleep(lasting);
    let bytes = (received.load(Ordering::Relaxed) - from) as f64;
    let took = start.elapsed().as_secs_f64();
    let used = [ticks(&joined.programs) - before[0], machine_ticks() - before[1]];
    end.store(true, Ordering::Relaxed);
    writer.join().unwrap();
    reader.join().unwrap();
    let [programs, machine] = used.map(|ticks| ticks as f64 * TICK * 1e9 / bytes);
    (bytes * 8.0 / took / 1e6, programs, machine)
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
    if kernel_has_wireguard() {
        all.push(wireguard("kernel", None));
    }
    if is_there("wireguard-go") {
        all.push(wireguard("wireguard-go", Some(("wireguard-go", &["-f"]))));
    }
    if is_there("boringtun-cli") {
        all.push(wireguard("boringtun", Some(("boringtun-cli", &["--foreground", "--disable-drop-privileges"]))));
    }
    if is_there("openvpn") {
        all.push(openvpn(&folder));
    }
    let mut measured: Vec<Vec<Measured>> = vec![vec![]; all.len()];
    for _ in 0..rounds {
        for (joined, found) in all.iter().zip(&mut measured) {
            found.push(measure(joined, lasting));
        }
    }
    tell(&all, &measured);
    drop(all);
    let _ = std::fs::remove_dir_all(&folder);
}

fn tell(all: &[Joined], measured: &[Vec<Measured>]) {
    let against = all.iter().position(|joined| joined.name == "openvpn").unwrap_or(0);
    println!(
        "{:14}{:>8}  programs' CPU  machine's CPU  machine's CPU  echo   of {}'s:",
        "", "Mbit/s", all[against].name
    );
    println!(
        "{:22}{:>15}{:>15}{:>15}{:>6}   rate  programs  machine  echo",
        "", "ns/byte", "ns/byte", "us/frame", "us"
    );
    for (joined, found) in all.iter().zip(measured) {
        let of = |pick: fn(&Measured) -> f64| median(found.iter().map(pick).collect());
        let ratio = |pick: fn(&Measured) -> f64| {
            median(found.iter().zip(&measured[against]).map(|(one, other)| pick(one) / pick(other)).collect())
        };
        println!(
            "{:14}{:>8.0}{:>15.2}{:>15.2}{:>15.1}{:>6.0}{:>7.2}{:>10.2}{:>9.2}{:>6.2}",
            joined.name,
            of(|m| m.mbit_s),
            of(|m| m.programs),
            of(|m| m.machine),
            of(|m| m.machine) * PAYLOAD / 1e3,
            of(|m| m.echo_us),
            ratio(|m| m.mbit_s),
            ratio(|m| m.programs),
            ratio(|m| m.machine),
            ratio(|m| m.echo_us),
        );
    }
}
