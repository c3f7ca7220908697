//! A host's node and its controller are replaced under a guest that writes to its disk all the time. The guest notices
//! nothing but that some of its requests took longer; how much longer is printed. A node that was told to end has closed the disk, and the next
//! one doubts nothing of it; after one that was killed some of it counts as written anew.
//!
//! It needs root, QEMU and the tiny image, and skips without them, aloud. `GODWIT_UPGRADE_FROM` names the program to begin
//! with, for an upgrade from a version that was built before; otherwise it is this build's, and what comes after it is the same
//! with other bytes at its end.

use crate::common;
use godwit_trust::{Access, Authority, Identity, Role, Validity};
use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Process 1 of the guest: writers, each to its own part of the disk, that look at what they wrote. All bypass the guest's page
/// cache. A line a round, with the time of the guest's own clock.
const GUEST: &str = r#"write() {
    head -c 4096 /proc/kallsyms >"/$1.block"
    n=0
    while :; do
        at=$(($1 * 1024 + n % 1024))
        echo "$1 $n" 1<>"/$1.block"
        dd if="/$1.block" of=/dev/vda bs=4096 count=1 seek="$at" oflag=direct conv=notrunc,fsync 2>/dev/null ||
            echo "LOAD-ERROR writing $at"
        dd if=/dev/vda bs=4096 count=1 skip="$at" iflag=direct 2>/dev/null | cmp -s - "/$1.block" ||
            echo "LOAD-ERROR reading $at"
        read -r up _ </proc/uptime
        n=$((n + 1))
        echo "LOAD $1 $n $up"
    done
}
write 0 & write 1 & write 2 &
while :; do sleep 3600; done
"#;

struct World {
    folder: TempDir,
    daemons: Vec<(&'static str, Child)>,
}

impl World {
    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn program(&self) -> PathBuf {
        self.path("godwit")
    }

    /// Puts the next version in place, as a package does: a new file under the old name.
    fn install(&self, from: &Path, version: u8) {
        let fresh = self.path("godwit.new");
        std::fs::copy(from, &fresh).unwrap();
        std::fs::OpenOptions::new().append(true).open(&fresh).unwrap().write_all(&[version]).unwrap();
        std::fs::set_permissions(&fresh, std::fs::Permissions::from_mode(0o755)).unwrap();
        std::fs::rename(fresh, self.program()).unwrap();
    }

    fn start(&mut self, daemon: &'static str, at: SocketAddr) {
        let log = std::fs::OpenOptions::new().append(true).create(true).open(self.path(daemon).with_extension("log"));
        let mut command = Command::new(self.program());
        command.args([daemon, "--config"]).arg(self.path(&format!("{daemon}.toml")));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log.unwrap());
        self.daemons.push((daemon, command.spawn().unwrap()));
        let deadline = Instant::now() + Duration::from_secs(180);
        while TcpStream::connect_timeout(&at, Duration::from_secs(1)).is_err() {
            assert!(Instant::now() < deadline, "the {daemon} does not come up: {}", self.logs());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// How long it was away.
    fn restart(&mut self, daemon: &'static str, at: SocketAddr, signal: &str) -> Duration {
        let index = self.daemons.iter().position(|(name, _)| *name == daemon).unwrap();
        let (_, mut child) = self.daemons.remove(index);
        let begin = Instant::now();
        Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap();
        child.wait().unwrap();
        self.start(daemon, at);
        begin.elapsed()
    }

    fn logs(&self) -> String {
        let read = |name: &str| std::fs::read_to_string(self.path(name)).unwrap_or_default();
        ["node.log", "controller.log"].map(|name| format!("\n{name}:\n{}", read(name))).concat()
    }

    fn ok(&self, words: &[&str]) -> String {
        let mut command = Command::new(self.program());
        command.args(words).env("GODWIT_CONTROLLER", CONTROLLER.to_string());
        command.env("GODWIT_CREDENTIALS", self.path("cert-ann")).stdin(Stdio::null());
        let output = command.output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "godwit {words:?}: {said}{}", self.logs());
        String::from_utf8(output.stdout).unwrap()
    }

    /// How often a node has found a replica that the one before it had not closed, and doubted what was hot of it.
    fn doubts(&self) -> usize {
        let said = std::fs::read_to_string(self.path("node.log")).unwrap_or_default();
        said.matches("the replica was not closed").count()
    }

    fn console(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(self.path("state/vms/1/console.log")).unwrap_or_default()).into_owned()
    }

    /// The guest's rounds so far: which writer's, and when it ended by the guest's clock.
    fn rounds(&self) -> Vec<(u32, f64)> {
        let console = self.console();
        let parse = |line: &str| {
            let mut words = line.trim().strip_prefix("LOAD ")?.split(' ');
            let writer = words.next()?.parse().ok()?;
            words.next()?;
            Some((writer, words.next()?.parse().ok()?))
        };
        // What stands behind the last end of a line is not complete yet.
        let complete = console.rfind('\n').unwrap_or_default();
        console[..complete].lines().filter_map(parse).collect()
    }

    /// Waits for so many more rounds of every writer.
    fn go_on(&self, rounds: usize) {
        let count = |writer| self.rounds().iter().filter(|(w, _)| *w == writer).count();
        let before = [0, 1, 2].map(count);
        let deadline = Instant::now() + Duration::from_secs(600);
        while (0..3).any(|w| count(w) < before[w as usize] + rounds) {
            assert!(Instant::now() < deadline, "the guest writes no more: {}{}", self.console(), self.logs());
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    fn guests(&self) -> Vec<u32> {
        common::guests(self.folder.path())
    }
}

impl Drop for World {
    fn drop(&mut self) {
        common::end(self.daemons.iter_mut().map(|(_, daemon)| daemon), self.folder.path());
    }
}

/// The longest time between two rounds of one writer, of those that ended after `from` and before `to`, by the guest's clock.
fn longest(rounds: &[(u32, f64)], from: f64, to: f64) -> f64 {
    let mut longest: f64 = 0.0;
    for writer in 0..3 {
        let times: Vec<f64> = rounds.iter().filter(|(w, _)| *w == writer).map(|(_, at)| *at).collect();
        let within = times.windows(2).filter(|pair| pair[1] > from && pair[1] <= to);
        longest = within.map(|pair| pair[1] - pair[0]).fold(longest, f64::max);
    }
    longest
}

const CONTROLLER: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::new(127, 77, 31, 9)), 7400);
const NODE: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::new(127, 77, 31, 1)), 7410);

fn prepare(world: &World, image: &Path) {
    let at = |name: &str| world.path(name);
    let authority = Authority::create(&at("ca")).unwrap();
    for (role, name) in [(Role::Controller, "controller"), (Role::Node, "a"), (Role::Client(Access::Admin), "ann")] {
        let issued = authority.issue(&Identity::new(role, name).unwrap(), Validity::days(1)).unwrap();
        issued.write(&at(&format!("cert-{name}"))).unwrap();
    }
    let controller = format!(
        "listen = \"{CONTROLLER}\"\nstate = \"{}\"\ncredentials = \"{}\"\n",
        at("store").display(),
        at("cert-controller").display()
    );
    std::fs::write(at("controller.toml"), controller).unwrap();
    let node = format!(
        "address = \"{}\"\nstate = \"{}\"\nrun = \"{}\"\nimages = \"{}\"\ncredentials = \"{}\"\n",
        NODE.ip(),
        at("state").display(),
        at("run").display(),
        at("images").display(),
        at("cert-a").display()
    );
    std::fs::write(at("node.toml"), node).unwrap();
    std::fs::create_dir(at("images")).unwrap();
    common::with_script(image, &at("images"), GUEST);
}

#[test]
fn a_guest_under_disk_load_outlives_new_versions_of_its_node_and_controller_without_an_error() {
    let root = Command::new("id").arg("-u").output().is_ok_and(|o| o.stdout.starts_with(b"0\n"));
    if !root || Command::new("qemu-system-x86_64").arg("--version").output().is_err() {
        eprintln!("SKIPPED: this needs root and qemu-system-x86_64");
        return;
    }
    let Some(image) = common::tiny() else { return };
    let mut world = World { folder: tempfile::tempdir().unwrap(), daemons: vec![] };
    prepare(&world, &image);
    let this = PathBuf::from(env!("CARGO_BIN_EXE_godwit"));
    let first = std::env::var_os("GODWIT_UPGRADE_FROM").map_or_else(|| this.clone(), PathBuf::from);
    world.install(&first, 0);
    world.start("controller", CONTROLLER);
    world.start("node", NODE);
    world.ok(&["site", "add", "here"]);
    world.ok(&["host", "add", "a", "--site", "here", "--api", &NODE.to_string()]);
    let create = ["vm", "create", "web", "--at", "a", "--memory", "131080K", "--accel", "tcg", "--disk", "root=16M"];
    world.ok(&[&create[..], &common::BOOTS[..]].concat());
    let qemu = world.guests();
    assert_eq!(qemu.len(), 1);
    world.go_on(8);

    // A signal as `systemctl restart` sends it, and one as the watchdog's or a crash.
    let now = |world: &World| world.rounds().last().unwrap().1;
    let begin = now(&world);
    let mut away = Duration::ZERO;
    for (version, daemon, at, signal) in
        [(1, "node", NODE, "-TERM"), (2, "controller", CONTROLLER, "-TERM"), (3, "node", NODE, "-KILL")]
    {
        world.install(&this, version);
        let before = world.doubts();
        let gone = world.restart(daemon, at, signal);
        if daemon == "node" {
            away = away.max(gone);
        }
        world.go_on(8);
        // What a program that was built before does when it is told to end is its own affair.
        if version > 1 || first == this {
            assert_eq!(world.doubts() - before, usize::from(signal == "-KILL"), "{daemon} {signal}: {}", world.logs());
        }
    }
    let end = now(&world);
    world.go_on(8);

    let console = world.console();
    assert!(!console.contains("LOAD-ERROR") && !console.contains("I/O error"), "{console}");
    assert_eq!(world.guests(), qemu, "the guest's QEMU is another");
    assert!(world.ok(&["vm", "show", "web"]).contains("running"));
    let rounds = world.rounds();
    println!(
        "UPGRADE: longest stall of a guest's write and read {:.2} s with a node away for {:.2} s; {:.2} s without; {} rounds",
        longest(&rounds, begin, end),
        away.as_secs_f64(),
        longest(&rounds, 0.0, begin).max(longest(&rounds, end, f64::MAX)),
        rounds.len()
    );
}
