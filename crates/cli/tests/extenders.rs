//! Extenders between real nodes, each host in a network namespace of its own on one underlay: what crosses it is encrypted, whoever is
//! killed. At the ends of the wires are routers, whose namespaces ping each other.

use crate::common::pair::{Pair, can_run, inside, space_of};
use crate::common::{holders, marked};
use godwit_trust::{Credentials, Identity};
use rustix::net::{AddressFamily, Protocol, RawProtocol, SocketType};
use serde_json::Value;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// One after the other: each has nodes, a controller, and programs that encrypt.
static MACHINE: Mutex<()> = Mutex::new(());

const VXLAN: u16 = 4789;
/// What pings carry, so that they are found in what was captured: 16 bytes, again and again.
const PATTERN: &str = "676f64776974207761732068657265";

/// Whether the kernel makes WireGuard devices; it loads the module for it.
static BY_KERNEL: LazyLock<bool> = LazyLock::new(|| {
    let name = format!("gwtry{}", std::process::id());
    let ip = |words: &[&str]| Command::new("ip").args(words).output().is_ok_and(|o| o.status.success());
    ip(&["link", "add", &name, "type", "wireguard"]) && ip(&["link", "del", &name])
});

fn ready() -> bool {
    let has = |program: &str| Command::new(program).arg("--version").output().is_ok_and(|o| o.status.success());
    if !has("wg") || !(*BY_KERNEL || has("wireguard-go")) {
        eprintln!(
            "SKIPPED: this needs wireguard-tools, and wireguard-go where the kernel has no WireGuard: scripts/setup.sh installs them"
        );
        return false;
    }
    can_run()
}

fn kill(pid: u32) {
    let _ = Command::new("kill").args(["-9", &pid.to_string()]).status();
}

struct World {
    pair: Pair,
}

impl Drop for World {
    fn drop(&mut self) {
        for name in ["a", "b", "d", "e"] {
            if self.pair.has(name) {
                self.pair.kill_node(name);
            }
        }
        for mark in ["GODWIT_EXTENDER", "GODWIT_COMPONENT"] {
            marked(mark, self.pair.folder.path()).into_iter().for_each(kill);
        }
    }
}

/// A ping that goes on: answers by their numbers.
struct Pinging(Child, std::path::PathBuf);

impl Pinging {
    fn answered(&self) -> Vec<u32> {
        let said = std::fs::read_to_string(&self.1).unwrap_or_default();
        // It tells of questions that could not be asked, too.
        let answers = said.lines().filter(|line| line.contains("bytes from"));
        let numbers = answers.filter_map(|line| line.split("icmp_seq=").nth(1)?.split(' ').next()?.parse().ok());
        numbers.collect()
    }

    fn last(&self) -> u32 {
        self.answered().last().copied().unwrap_or(0)
    }

    /// Waits until twenty more answers have come; gives how long the longest gap was, in questions.
    fn goes_on(&self, pair: &Pair) -> u32 {
        self.goes_on_since(self.last(), pair)
    }

    /// As [`Self::goes_on`], with the gap since this answer.
    fn goes_on_since(&self, since: u32, pair: &Pair) -> u32 {
        // Answers, not questions: after a cut the first one is hundreds of questions further.
        let before = self.answered().len();
        pair.until("pings are answered", || self.answered().len() >= before + 20);
        let numbers: Vec<u32> = self.answered().into_iter().filter(|n| *n >= since).collect();
        numbers.windows(2).map(|two| two[1].saturating_sub(two[0] + 1)).max().unwrap_or(0)
    }
}

/// A TCP session from the first router to the second, with a number every 10 ms that the other end sends back.
struct Session {
    stop: Arc<AtomicBool>,
    answers: std::sync::mpsc::Receiver<Instant>,
    ends: std::thread::JoinHandle<u64>,
    /// When the last answer came that was looked at.
    last: Instant,
}

impl Session {
    fn begin(client: u32, server: u32) -> Self {
        let listener = inside(space_of(server), || TcpListener::bind("10.9.0.2:7007").unwrap()).join().unwrap();
        std::thread::spawn(move || {
            let (mut from, _) = listener.accept().unwrap();
            let mut to = from.try_clone().unwrap();
            let _ = std::io::copy(&mut from, &mut to);
        });
        let (stop, (came, answers)) = (Arc::new(AtomicBool::new(false)), std::sync::mpsc::channel());
        let ended = stop.clone();
        let ends = inside(space_of(client), move || {
            let mut session = TcpStream::connect("10.9.0.2:7007").unwrap();
            session.set_nodelay(true).unwrap();
            let mut hearing = session.try_clone().unwrap();
            let hears = std::thread::spawn(move || {
                let (mut next, mut bytes) = (0_u64, [0; 8]);
                while hearing.read_exact(&mut bytes).is_ok() {
                    assert_eq!(u64::from_be_bytes(bytes), next, "the session loses or swaps something");
                    next += 1;
                    let _ = came.send(Instant::now());
                }
                next
            });
            let mut sent = 0_u64;
            while !ended.load(Ordering::Relaxed) {
                session.write_all(&sent.to_be_bytes()).expect("the session breaks");
                sent += 1;
                std::thread::sleep(Duration::from_millis(10));
            }
            session.shutdown(std::net::Shutdown::Write).unwrap();
            assert_eq!(hears.join().unwrap(), sent, "the session ends before all has come back");
            sent
        });
        Self { stop, answers, ends, last: Instant::now() }
    }

    /// The longest time without an answer, from the last look until twenty answers have come that were not there by now.
    fn longest_gap(&mut self) -> Duration {
        let (now, mut since, mut longest) = (Instant::now(), 0, Duration::ZERO);
        while since < 20 {
            let answer = self.answers.recv_timeout(Duration::from_secs(60)).expect("the session does not go on");
            longest = longest.max(answer.duration_since(self.last));
            self.last = answer;
            since += u32::from(answer > now);
        }
        longest
    }

    /// How many numbers went there and came back.
    fn end(self) -> u64 {
        self.stop.store(true, Ordering::Relaxed);
        self.ends.join().unwrap()
    }
}

/// Segments that were sent again in a component's namespace, as the kernel counts them.
fn sent_again(holder: u32) -> u64 {
    let told = std::fs::read_to_string(format!("/proc/{holder}/net/snmp")).unwrap();
    let mut lines = told.lines().filter(|line| line.starts_with("Tcp:"));
    let (names, values) = (lines.next().unwrap(), lines.next().unwrap());
    let mut both = names.split(' ').zip(values.split(' '));
    both.find(|(name, _)| *name == "RetransSegs").unwrap().1.parse().unwrap()
}

impl Drop for Pinging {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl World {
    /// A controller, and nodes as the hosts of sites; those with a third word carry.
    fn new(test: &str, hosts: &[(&'static str, &'static str, Option<&str>)]) -> Self {
        let mut pair = Pair::new(test);
        pair.start_controller();
        for (host, site, extender) in hosts {
            // As on a machine that is no router, whatever this one is.
            pair.within(host, "sysctl -qw net.ipv4.conf.under.forwarding=0");
            pair.sites.insert(*host, (*site).to_owned());
            if let Some(extender) = extender {
                pair.more.insert(*host, vec!["--extender".into(), (*extender).into()]);
            }
            pair.start_node(host);
        }
        Self { pair }
    }

    /// A router on each of two hosts, joined by a wire.
    fn routers(&self, hosts: [&str; 2]) {
        for (number, host) in [1, 2].iter().zip(hosts) {
            let file = self.pair.path(&format!("r{number}.toml"));
            let text = format!("[[port]]\nnumber = 1\naddresses = [\"10.9.0.{number}/24\"]\n");
            std::fs::write(&file, text).unwrap();
            let (name, file) = (format!("r{number}"), file.to_str().unwrap().to_owned());
            let words =
                ["component", "create", &name, "--kind", "router", "--ports", "1", "--host", host, "--config", &file];
            self.pair.ok(&words);
        }
        self.pair.ok(&["wire", "connect", "r1:p1", "r2:p1"]);
    }

    fn holder(&self, host: &str) -> u32 {
        let [pid] = holders(&self.pair.path(&format!("run-{host}")))[..] else { panic!("{host} has no component") };
        pid
    }

    /// From the first router to the second, every 50 ms.
    fn ping(&self, host: &str) -> Pinging {
        let path = self.pair.path("ping.log");
        let out = std::fs::File::create(&path).unwrap();
        let mut ping = Command::new("nsenter");
        ping.arg(format!("--net=/proc/{}/ns/net", self.holder(host)));
        ping.args(["ping", "-i", "0.05", "-s", "200", "-p", PATTERN, "10.9.0.2"]);
        let child = ping.stdin(Stdio::null()).stdout(out).stderr(Stdio::null()).spawn().unwrap();
        Pinging(child, path)
    }

    /// A packet of this size that may not be cut, as the first router has learnt by now.
    fn fits(&self, host: &str, payload: usize) -> bool {
        let mut ping = Command::new("nsenter");
        ping.arg(format!("--net=/proc/{}/ns/net", self.holder(host)));
        ping.args(["ping", "-c", "3", "-i", "0.2", "-W", "1", "-M", "do", "-s", &payload.to_string(), "10.9.0.2"]);
        ping.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status().unwrap().success()
    }

    fn engines(&self, host: &str) -> Vec<u32> {
        marked("GODWIT_EXTENDER", &self.pair.path(&format!("run-{host}")))
    }

    /// A host's tunnels' devices: each one's number, which is another one when it is made anew, and name.
    fn devices(&self, host: &str) -> Vec<(u32, String)> {
        let links = self.pair.within(host, "ip -o link");
        let device = |line: &str| {
            let mut words = line.split(": ");
            Some((words.next()?.parse().ok()?, words.next().filter(|name| name.starts_with("gx"))?.to_owned()))
        };
        links.lines().filter_map(device).collect()
    }

    /// Does something with the devices of a host's tunnels.
    fn to_devices(&self, host: &str, command: impl Fn(&str) -> String) {
        self.devices(host).iter().for_each(|(_, name)| drop(self.pair.within(host, &command(name))));
    }

    /// A host's tunnels come to their end: programs are killed, and where the kernel has made the devices these are removed.
    fn end_tunnels(&self, host: &str) {
        let engines = self.engines(host);
        assert_eq!(engines.is_empty(), *BY_KERNEL, "the kernel makes tunnels where it has WireGuard");
        engines.into_iter().for_each(kill);
        if *BY_KERNEL {
            self.to_devices(host, |name| format!("ip link del {name}"));
        }
    }

    fn extender(&self) -> Value {
        self.pair.json(&["extender", "show", "site-a", "site-b"])
    }

    /// What a host's node tells Prometheus.
    fn metrics(&self, host: &'static str, address: [u8; 4]) -> String {
        let space = std::fs::File::open(format!("/run/netns/{}", self.pair.space("c"))).unwrap();
        let credentials = Credentials::load(&self.pair.path("cert-ann")).unwrap();
        let asked = inside(space, move || {
            let node = Identity::node(host).unwrap();
            let at = std::net::SocketAddr::from((address, 7410));
            let client = godwit_api::Client::new(at, node, &credentials, Duration::from_secs(30));
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(client.text("/metrics")).unwrap()
        });
        asked.join().unwrap()
    }

    fn until_up(&self) {
        self.pair.until("the extender is up", || {
            let shown = self.extender();
            shown["up"] == true && shown["problems"].as_array().unwrap().is_empty()
        });
    }

    /// Which way a host's frames take.
    fn way(&self, host: &str) -> Value {
        let ways = self.extender()["ways"].as_array().unwrap().clone();
        ways.into_iter().find(|way| way["host"] == host).unwrap()["way"].clone()
    }

    /// How many answers come in a second and a half.
    fn rate(&self, ping: &Pinging) -> u32 {
        let before = ping.last();
        std::thread::sleep(Duration::from_millis(1500));
        ping.last() - before
    }

    /// Does something while `site-b` is cut off.
    fn cut_off(&self, meanwhile: impl FnOnce()) {
        let cut = Instant::now();
        self.pair.within("c", "ip link set to-b down");
        meanwhile();
        self.pair.within("c", "ip link set to-b up");
        println!("site cut off for {:?}", cut.elapsed());
    }
}

/// What crosses the underlay, where all hosts' cables meet.
struct Capture {
    stop: Arc<AtomicBool>,
    frames: std::thread::JoinHandle<Vec<Vec<u8>>>,
}

impl Capture {
    fn begin(pair: &Pair) -> Self {
        let space = std::fs::File::open(format!("/run/netns/{}", pair.space("c"))).unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let (ended, (ready, begun)) = (stop.clone(), std::sync::mpsc::channel());
        let frames = inside(space, move || {
            let all = RawProtocol::new(u32::from(3_u16.to_be())).map(Protocol::from_raw);
            let socket: OwnedFd = rustix::net::socket(AddressFamily::PACKET, SocketType::RAW, all).unwrap();
            rustix::net::sockopt::set_socket_timeout(
                &socket,
                rustix::net::sockopt::Timeout::Recv,
                Some(Duration::from_millis(100)),
            )
            .unwrap();
            ready.send(()).unwrap();
            let (mut frames, mut buffer) = (vec![], vec![0; 65536]);
            while !ended.load(Ordering::Relaxed) {
                if let Ok((_, length)) = rustix::net::recv(&socket, &mut buffer[..], rustix::net::RecvFlags::empty()) {
                    frames.push(buffer[..length].to_vec());
                }
            }
            frames
        });
        begun.recv().unwrap();
        Self { stop, frames }
    }

    fn end(self) -> Vec<Vec<u8>> {
        self.stop.store(true, Ordering::Relaxed);
        self.frames.join().unwrap()
    }
}

/// The two UDP ports of a frame, or its fragment's protocol alone.
fn udp_ports(frame: &[u8]) -> Option<(u16, u16)> {
    let ip = frame.get(14..).filter(|_| frame[12..14] == [8, 0])?;
    let header = usize::from(ip.first()? & 15) * 4;
    let port = |at: usize| Some(u16::from_be_bytes([*ip.get(header + at)?, *ip.get(header + at + 1)?]));
    (*ip.get(9)? == 17).then_some(())?;
    Some((port(0)?, port(2)?))
}

fn has_clear_frames(frames: &[Vec<u8>]) -> bool {
    let pattern = b"godwit was here";
    frames.iter().any(|frame| {
        udp_ports(frame).is_some_and(|(_, to)| to == VXLAN)
            || frame.windows(pattern.len()).any(|window| window == pattern)
    })
}

#[test]
fn frames_between_sites_are_encrypted_whoever_is_killed_and_nothing_is_left_when_the_sites_part() {
    let _one = MACHINE.lock().unwrap_or_else(PoisonError::into_inner);
    if !ready() {
        return;
    }
    let hosts = [("a", "site-a", Some("10.99.0.1:51820")), ("b", "site-b", Some("10.99.0.2:51820"))];
    let mut world = World::new("ext", &hosts);
    world.routers(["a", "b"]);
    let ping = world.ping("a");
    ping.goes_on(&world.pair);
    let capture = Capture::begin(&world.pair);
    ping.goes_on(&world.pair);
    assert!(has_clear_frames(&capture.end()), "without an extender frames are in clear, and the capture sees them");

    let (code, _, said) = world.pair.godwit(&["extender", "connect", "site-a", "site-a"]);
    assert!(code != 0 && said.contains("itself"), "{said}");
    world.pair.ok(&["extender", "connect", "site-a", "site-b"]);
    world.until_up();
    let capture = Capture::begin(&world.pair);
    ping.goes_on(&world.pair);
    let shown = world.pair.json(&["wire", "show", "r1:p1"]);
    assert_eq!(shown["extender"]["up"], true, "{shown}");
    assert!(world.pair.ok(&["net", "trace", "r1"]).contains("extender site-a to site-b"));
    world.pair.ok(&["net", "check"]);
    // A WireGuard packet carries 80 bytes less than the underlay, and VXLAN takes 50 of these.
    assert!(world.fits("a", 1420 - 50 - 28) && !world.fits("a", 1420 - 50 - 28 + 1), "what fits is said, and passes");

    let by = if *BY_KERNEL { "kernel" } else { "wireguard-go" };
    for end in world.extender()["tunnels"][0]["ends"].as_array().unwrap() {
        assert_eq!(end["local"]["engine"], by);
    }
    let shown = world.pair.ok(&["extender", "show", "site-a", "site-b"]);
    assert!(shown.contains(by), "{shown}");
    println!("{shown}");

    // Its program is killed, or its device removed: nothing goes in clear.
    let [(device, _)] = world.devices("a")[..] else { panic!("{:?}", world.devices("a")) };
    let (killed, last) = (Instant::now(), ping.last());
    world.end_tunnels("a");
    let anew = || matches!(world.devices("a")[..], [(other, _)] if other != device);
    world.pair.until("there is another device", anew);
    let gap = ping.goes_on_since(last, &world.pair);
    println!("extender's device gone: {gap} questions of 50 ms unanswered, back within {:?}", killed.elapsed());

    // Its device is set down by somebody: its node sets it up, also while no controller repeats its orders, by which it would be set up as well.
    world.until_up();
    world.pair.kill_node("c");
    let last = ping.last();
    world.to_devices("a", |name| format!("ip link set {name} down"));
    let gap = ping.goes_on_since(last, &world.pair);
    println!("extender's device set down: {gap} questions of 50 ms unanswered");
    world.pair.start_controller();
    world.until_up();

    // Its node is killed: nothing stops. So is the tunnel: nothing goes in clear, and the next node mends it.
    world.pair.kill_node("a");
    assert_eq!(ping.goes_on(&world.pair), 0, "frames need no node");
    world.end_tunnels("a");
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(world.rate(&ping), 0, "they go somewhere without a tunnel");
    let started = Instant::now();
    world.pair.start_node("a");
    ping.goes_on(&world.pair);
    println!("node killed and its device gone: 20 answers within {:?} of the node's start", started.elapsed());
    world.until_up();

    // So is the controller.
    world.pair.kill_node("c");
    assert_eq!(ping.goes_on(&world.pair), 0, "frames need no controller");
    world.pair.start_controller();
    world.until_up();

    // The site is cut off for longer than a tunnel that only one end may speak in is left alone, and for less than WireGuard's own
    // 15 s: healed, it comes back by itself, with the session keys that it had.
    let agreed = || -> Vec<Value> {
        let shown = world.extender();
        shown["tunnels"][0]["ends"]
            .as_array()
            .unwrap()
            .iter()
            .map(|end| end["local"]["handshake_unix_s"].clone())
            .collect()
    };
    let before = agreed();
    assert!(before.iter().all(Value::is_u64), "{before:?}");
    world.cut_off(|| {
        std::thread::sleep(Duration::from_millis(6500));
        assert_eq!(world.rate(&ping), 0);
    });
    let healed = Instant::now();
    ping.goes_on(&world.pair);
    println!("site cut and healed: 20 answers within {:?}", healed.elapsed());
    world.until_up();
    assert_eq!(agreed(), before, "keys that were still good were thrown away");

    // Cut off for as long as asking about it takes, it is found dead.
    world.cut_off(|| {
        let (code, said, _) = world.pair.godwit(&["net", "check"]);
        assert!(code != 0 && said.contains("extender: no tunnel between `site-a` and `site-b` is up"), "{said}");
    });
    ping.goes_on(&world.pair);
    world.until_up();

    // New keys, without a loss.
    let before = world.extender()["tunnels"][0]["ends"][0]["local"]["key"].clone();
    let (from, begun) = (ping.last(), Instant::now());
    world.pair.ok(&["extender", "rotate", "site-a", "site-b"]);
    world.pair.until("the old keys are gone", || {
        let shown = world.extender();
        let tunnels = shown["tunnels"].as_array().unwrap();
        tunnels.len() == 1 && tunnels[0]["epoch"] == 2 && tunnels[0]["ends"][0]["local"]["key"] != before
    });
    ping.goes_on(&world.pair);
    let answered: Vec<u32> = ping.answered().into_iter().filter(|n| *n >= from).collect();
    let asked = answered.last().unwrap() - answered.first().unwrap() + 1;
    println!("keys rotated within {:?}: {} of {asked} answered", begun.elapsed(), answered.len());
    let gaps: Vec<_> = answered.windows(2).filter(|two| two[1] != two[0] + 1).collect();
    let seen = || format!("{gaps:?} of {from}.. {:#}{}", world.extender(), world.pair.logs());
    assert_eq!(u32::try_from(answered.len()).unwrap(), asked, "keys are rotated without a loss: {}", seen());

    let frames = capture.end();
    assert!(!has_clear_frames(&frames), "something went in clear");
    assert!(frames.iter().filter_map(|frame| udp_ports(frame)).any(|(_, to)| to == 51820), "{} frames", frames.len());

    let value = |sample: &str| -> f64 {
        let told = world.metrics("a", [10, 99, 0, 1]);
        let line = told.lines().find(|line| line.starts_with(sample)).unwrap_or_else(|| panic!("no {sample}: {told}"));
        line.rsplit_once(' ').unwrap().1.parse().unwrap()
    };
    assert_eq!(value("godwit_extender_way_up{site=\"site-b\"}"), 1.0);
    assert!(value("godwit_extender_way_changes_total{site=\"site-b\"}") >= 1.0, "it went over to new keys");
    assert!(value("godwit_extender_tunnel_sent_bytes_total{site=\"site-b\",peer=\"b\"") > 0.0);
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs_f64();
    let age = now - value("godwit_extender_tunnel_last_handshake_timestamp_seconds{site=\"site-b\",peer=\"b\"");
    assert!((0.0..180.0).contains(&age), "{age}");
    assert!(world.pair.ok(&["extender", "show", "site-a", "site-b"]).contains("s ago, after"));

    let (code, _, said) = world.pair.godwit(&["extender", "disconnect", "site-a", "site-b"]);
    assert!(code != 0 && said.contains("--clear"), "{said}");
    world.pair.ok(&["extender", "disconnect", "site-a", "site-b", "--clear"]);
    ping.goes_on(&world.pair);
    let told = world.pair.ok(&["events", "--after", "0", "--no-follow"]);
    for kind in ["extender-up", "extender-down", "extender-way-changed", "extender-disconnected"] {
        assert!(told.contains(kind), "no {kind}: {told}");
    }
    for host in ["a", "b"] {
        assert_eq!(world.engines(host), [0; 0], "{host}");
        assert!(!world.pair.within(host, "ip -o link").contains(": gx"), "{host}");
        for rules in ["ip rule", "ip -6 rule"] {
            assert!(!world.pair.within(host, rules).contains("4789"), "{host}");
        }
        assert_eq!(world.pair.within(host, "ip route show table all proto 72"), "", "{host}");
        assert!(!world.pair.within(host, "nft list ruleset").contains("godwit-extenders"), "{host}");
        let kept = world.pair.path(host).join("extenders/tunnels");
        assert_eq!(std::fs::read_dir(kept).unwrap().count(), 0, "{host} keeps keys");
    }
}

#[test]
fn the_second_carrier_of_a_site_takes_over_and_the_first_ones_frames_go_by_it() {
    let _one = MACHINE.lock().unwrap_or_else(PoisonError::into_inner);
    if !ready() {
        return;
    }
    let hosts = [
        ("a", "site-a", Some("10.99.0.1:51820")),
        ("d", "site-a", Some("10.99.0.3:51820")),
        ("b", "site-b", Some("10.99.0.2:51820")),
    ];
    let world = World::new("extpair", &hosts);
    world.routers(["a", "b"]);
    world.pair.ok(&["extender", "connect", "site-b", "site-a"]);
    world.until_up();
    let shown = world.extender();
    assert_eq!(shown["carriers"], serde_json::json!([["a", "d"], ["b"]]), "{shown}");
    assert_eq!(shown["tunnels"].as_array().unwrap().len(), 2);
    let ping = world.ping("a");
    ping.goes_on(&world.pair);
    let forwarding = |host: &str| world.pair.within(host, "cat /proc/sys/net/ipv4/conf/under/forwarding");
    assert_eq!(
        (forwarding("d").trim(), forwarding("b").trim()),
        ("1", "0"),
        "only who has somebody to carry for passes on"
    );

    let way = |host: &str| world.way(host);
    // Where the other carrier's came up first, a host's own is taken once it has been steady for a while.
    world.pair.until("the first carrier's frames go into its own tunnel", || !way("a")["tunnel"].is_null());

    // What the first one's tunnel sends and gets is lost; its node runs, and so does its network.
    let of_b = world.pair.within("b", "cat /sys/class/net/under/address");
    let of_b: Vec<u8> = of_b.trim().split(':').map(|byte| u8::from_str_radix(byte, 16).unwrap()).collect();
    world.pair.within("a", "nft add table ip cut");
    world.pair.within("a", "nft add chain ip cut out { type filter hook output priority 0 ; }");
    world.pair.within("a", "nft add rule ip cut out udp dport 51820-51835 drop");
    let capture = Capture::begin(&world.pair);
    let (cut, last) = (Instant::now(), ping.last());
    let gap = ping.goes_on_since(last, &world.pair);
    println!("one carrier's tunnel cut: {gap} questions of 50 ms unanswered, 20 answers within {:?}", cut.elapsed());
    assert_eq!(way("a"), serde_json::json!({"carrier": "d"}));
    let (code, said, _) = world.pair.godwit(&["net", "check"]);
    assert!(code != 0 && said.contains("between `a` and `b` is down"), "{said}");
    assert!(!said.contains("no tunnel between"), "{said}");
    assert_eq!(world.pair.json(&["wire", "show", "r1:p1"])["extender"]["up"], true);
    // Packets that have to be cut on their way to the other carrier, which sees no ports in their ends.
    let large = |size: &str| {
        let mut ping = Command::new("nsenter");
        ping.arg(format!("--net=/proc/{}/ns/net", world.holder("a")));
        ping.args(["ping", "-c", "3", "-i", "0.2", "-W", "1", "-M", "dont", "-s", size, "-p", PATTERN, "10.9.0.2"]);
        ping.stdin(Stdio::null()).stdout(Stdio::null()).status().unwrap().success()
    };
    assert!(large("1472"), "frames of 1514 bytes pass");
    assert!(world.fits("a", 1420 - 50 - 28) && !world.fits("a", 1420 - 50 - 28 + 1));
    let frames = capture.end();
    let at_b: Vec<Vec<u8>> =
        frames.into_iter().filter(|frame| frame[..6] == of_b[..] || frame[6..12] == of_b[..]).collect();
    assert!(!has_clear_frames(&at_b), "something went in clear between the sites");

    // And back, when the first one's own has been up for a while.
    world.pair.within("a", "nft delete table ip cut");
    world.pair.until("it uses its own tunnel again", || way("a").get("tunnel").is_some());
    assert_eq!(ping.goes_on(&world.pair), 0);
    world.until_up();
    world.pair.ok(&["extender", "disconnect", "site-a", "site-b", "--clear"]);
    assert_eq!(forwarding("d").trim(), "0", "what it did not do before it does not do after");
}

#[test]
fn a_tcp_session_goes_on_over_a_sites_other_carrier_when_the_carrying_host_or_its_node_and_program_die() {
    let _one = MACHINE.lock().unwrap_or_else(PoisonError::into_inner);
    if !ready() {
        return;
    }
    // The host `e` has the session's end, and does not carry.
    let hosts = [
        ("a", "site-a", Some("10.99.0.1:51820")),
        ("d", "site-a", Some("10.99.0.3:51820")),
        ("e", "site-a", None),
        ("b", "site-b", Some("10.99.0.2:51820")),
    ];
    let mut world = World::new("extdead", &hosts);
    world.routers(["e", "b"]);
    world.pair.ok(&["extender", "connect", "site-a", "site-b"]);
    world.until_up();
    let (client, server) = (world.holder("e"), world.holder("b"));
    let ping = world.ping("e");
    ping.goes_on(&world.pair);
    let mut session = Session::begin(client, server);
    session.longest_gap();
    let carrier = |world: &World| {
        let way = world.way("e");
        ["a", "d"].into_iter().find(|host| way["carrier"] == *host).unwrap_or_else(|| panic!("{way}"))
    };
    let capture = Capture::begin(&world.pair);

    // The whole host: its node, its tunnels and its cable.
    let first = carrier(&world);
    let (again, answered) = (sent_again(client) + sent_again(server), ping.last());
    session.longest_gap();
    world.pair.kill_node(first);
    world.end_tunnels(first);
    world.pair.within("c", &format!("ip link set to-{first} down"));
    world.pair.until("the other carrier has taken over", || carrier(&world) != first);
    let gap = session.longest_gap();
    let lost = ping.goes_on_since(answered, &world.pair);
    let again = sent_again(client) + sent_again(server) - again;
    println!(
        "carrying host `{first}` killed: the TCP session stood for {} ms, with {again} segments sent again; {lost} questions of 50 ms unanswered",
        gap.as_millis()
    );
    assert!(lost > 0 && again > 0, "the session did not go over the carrier that was killed");
    let second = carrier(&world);

    // It comes back, and nothing changes: the way stays where it is.
    world.pair.within("c", &format!("ip link set to-{first} up"));
    world.pair.start_node(first);
    world.until_up();
    session.longest_gap();
    assert_eq!(carrier(&world), second);

    // The other one's node and tunnels, on a host that is well and has its network.
    let (again, answered) = (sent_again(client) + sent_again(server), ping.last());
    world.pair.kill_node(second);
    world.end_tunnels(second);
    world.pair.until("the first carrier has taken over", || carrier(&world) == first);
    let gap = session.longest_gap();
    let lost = ping.goes_on_since(answered, &world.pair);
    let again = sent_again(client) + sent_again(server) - again;
    println!(
        "node and tunnels of carrier `{second}` killed: the TCP session stood for {} ms, with {again} segments sent again; {lost} questions of 50 ms unanswered",
        gap.as_millis()
    );
    assert!(lost > 0 && again > 0, "the session did not go over the carrier that was killed");

    let numbers = session.end();
    println!("{numbers} numbers went there and back in order");
    let of_b = world.pair.within("b", "cat /sys/class/net/under/address");
    let of_b: Vec<u8> = of_b.trim().split(':').map(|byte| u8::from_str_radix(byte, 16).unwrap()).collect();
    let frames = capture.end();
    let at_b: Vec<Vec<u8>> =
        frames.into_iter().filter(|frame| frame[..6] == of_b[..] || frame[6..12] == of_b[..]).collect();
    assert!(!has_clear_frames(&at_b), "something went in clear between the sites");
}

#[test]
fn a_site_behind_an_address_translation_speaks_first_and_is_found() {
    let _one = MACHINE.lock().unwrap_or_else(PoisonError::into_inner);
    if !ready() {
        return;
    }
    let mut pair = Pair::new("extnat");
    // The host `a` is behind `c`, which answers for it, hides where its tunnels come from, and lets nobody begin one to it.
    for command in [
        "ip link set to-a nomaster",
        "ip route add 10.99.0.1/32 dev to-a",
        "nft add table ip nat",
        "nft add chain ip nat out { type nat hook postrouting priority 100 ; }",
        "nft add rule ip nat out ip saddr 10.99.0.1 udp dport 51820-51835 masquerade",
        "nft add chain ip nat in { type filter hook forward priority 0 ; }",
        "nft add rule ip nat in oifname to-a udp dport { 51820-51835, 4789 } ct state new drop",
    ] {
        pair.within("c", command);
    }
    for setting in ["conf/to-a/proxy_arp", "conf/under/proxy_arp", "ip_forward"] {
        pair.within("c", &format!("sysctl -qw net.ipv4.{}=1", setting.replace('/', ".")));
    }
    pair.start_controller();
    pair.more.insert("a", vec!["--extender".into(), "outbound".into()]);
    pair.more.insert("b", vec!["--extender".into(), "outbound".into()]);
    pair.start_node("a");
    pair.start_node("b");
    let (code, _, said) = pair.godwit(&["extender", "connect", "site-a", "site-b"]);
    assert!(code != 0 && said.contains("only speak first"), "{said}");
    pair.kill_node("b");
    pair.more.insert("b", vec!["--extender".into(), "10.99.0.2:51820".into()]);
    pair.start_node("b");
    let world = World { pair };
    world.routers(["a", "b"]);
    let ping = world.ping("a");
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(ping.last(), 0, "frames in clear do not pass to a site behind a translation");
    world.pair.ok(&["extender", "connect", "site-a", "site-b"]);
    world.until_up();
    ping.goes_on(&world.pair);
    let shown = world.extender();
    let heard = shown["tunnels"][0]["ends"][1]["local"]["endpoint"].as_str().unwrap().to_owned();
    assert!(heard.starts_with("10.99.0.9:"), "{heard}");
    assert!(shown["tunnels"][0]["ends"][0].get("endpoint").is_none());
    assert!(world.pair.ok(&["extender", "show", "site-a", "site-b"]).contains("speaks first"));

    // The side that can be reached forgets where the other one is; that one speaks again by itself.
    let killed = Instant::now();
    world.end_tunnels("b");
    ping.goes_on(&world.pair);
    println!("behind a translation, the other side's device gone: 20 answers within {:?}", killed.elapsed());
}
