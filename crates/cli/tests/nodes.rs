//! Real nodes, a real controller and real QEMUs on this machine's loopback, driven by the binary as its users do.
//!
//! One after the other: each takes some hundred MiB and both cores. They need root for a folder of a given size, and skip
//! without it, aloud.

use crate::common;
use godwit_api::Client;
use godwit_api::progress::{NoteKind, Teller};
use godwit_api::public::{DryRun, Move, Vm};
use godwit_trust::{Authority, Identity, Role, Validity};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tempfile::TempDir;

static MACHINE: Mutex<()> = Mutex::new(());

/// The machine to oneself; `None`, and said, where there is nothing to run guests with.
fn machine() -> Option<MutexGuard<'static, ()>> {
    let root = Command::new("id").arg("-u").output().is_ok_and(|o| o.stdout.starts_with(b"0\n"));
    let qemu = Command::new("qemu-system-x86_64").arg("--version").output().is_ok();
    if !root || !qemu {
        eprintln!("SKIPPED: this needs root and qemu-system-x86_64");
        return None;
    }
    Some(MACHINE.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Sees to it that a QEMU that runs nothing, of which a node asks what its host can do, knows and can less.
const LESSER_QEMU: &str = r#"#!/usr/bin/perl
use strict; use IO::Socket::UNIX; use IPC::Open2;
my ($path) = map { /^unix:([^,]*),server=on/ ? $1 : () } @ARGV;
exec '/usr/bin/qemu-system-x86_64', @ARGV unless grep { $_ eq 'none' } @ARGV and defined $path;
my @words = map { /^unix:.*server=on/ ? 'stdio' : $_ } @ARGV;
my $listener = IO::Socket::UNIX->new(Local => $path, Listen => 1) or die "cannot listen: $!";
my $pid = open2(my $from, my $to, 'setpriv', '--pdeathsig', 'KILL', 'qemu-system-x86_64', @words);
my $client = $listener->accept;
my $asking = fork;
if (!$asking) {
    while (sysread $client, my $piece, 65536) { syswrite $to, $piece }
    kill KILL => $pid; exit;
}
while (my $line = <$from>) {
    $line =~ s/"pc-q35-7\.2"/"pc-q35-0.1"/g;
    $line =~ s/"ssse3": true/"ssse3": false/g;
    syswrite $client, $line;
}
"#;

/// Two hosts and a controller.
struct World {
    folder: TempDir,
    daemons: Vec<Child>,
    net: u8,
    /// Whether daemons say much, as JSON.
    debug: bool,
}

impl World {
    fn new(net: u8) -> Self {
        let world = Self { folder: tempfile::tempdir().unwrap(), daemons: vec![], net, debug: false };
        std::fs::create_dir(world.path("images")).unwrap();
        Authority::create(&world.path("ca")).unwrap();
        world.certify(Role::Controller, "controller", Duration::from_secs(86_400));
        world.certify(Role::Client(godwit_trust::Access::Admin), "ann", Duration::from_secs(86_400));
        world
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn certify(&self, role: Role, name: &str, lasting: Duration) {
        let authority = Authority::open(&self.path("ca")).unwrap();
        let issued = authority.issue(&Identity::new(role, name).unwrap(), Validity::lasting(lasting)).unwrap();
        issued.write(&self.path(&format!("cert-{name}"))).unwrap();
    }

    fn at(&self, host: u8, port: u16) -> SocketAddr {
        SocketAddr::from(([127, 77, self.net, host], port))
    }

    fn begin(&mut self, mut command: Command, log: &str) {
        let log = std::fs::File::create(self.path(log)).unwrap();
        command.env_remove("GODWIT_FAILPOINTS").stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        if self.debug {
            command.env("GODWIT_LOG", "info,godwit_node=debug").env("GODWIT_LOG_FORMAT", "json");
        }
        self.daemons.push(command.spawn().unwrap());
    }

    fn start_controller(&mut self) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_godwit"));
        command.args(["controller", "--listen", &self.at(9, 7400).to_string()]);
        command.arg("--state").arg(self.path("controller")).arg("--credentials").arg(self.path("cert-controller"));
        self.begin(command, "controller.log");
        self.listens(self.at(9, 7400));
    }

    /// `room`: the size of its state's file system, for `mount`. `lesser`: whether its QEMU is [`LESSER_QEMU`].
    fn start_node(&mut self, name: &str, host: u8, room: Option<&str>, lesser: bool) {
        let (state, run) = (self.path(name), self.path(&format!("run-{name}")));
        std::fs::create_dir(&state).unwrap();
        let mut command = Command::new("unshare");
        let script = match room {
            // Mounted where nobody else sees it: it goes with the node and its guests.
            Some(size) => format!("mount -t tmpfs -o size={size} tmpfs {} && exec \"$@\"", state.display()),
            None => "exec \"$@\"".into(),
        };
        command.args(["--mount", "sh", "-c", &script, "sh", env!("CARGO_BIN_EXE_godwit"), "node", "--name", name]);
        command.arg("--state").arg(&state).arg("--run").arg(run).arg("--images").arg(self.path("images"));
        command.arg("--credentials").arg(self.path(&format!("cert-{name}")));
        command.args(["--address", &self.at(host, 0).ip().to_string()]);
        if lesser {
            let bin = self.path("bin");
            std::fs::create_dir(&bin).unwrap();
            let script = bin.join("qemu-system-x86_64");
            std::fs::write(&script, LESSER_QEMU).unwrap();
            std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
            command.env("PATH", format!("{}:{}", bin.display(), std::env::var("PATH").unwrap()));
        }
        self.begin(command, &format!("{name}.log"));
        self.listens(self.at(host, 7410));
        self.ok(&["site", "add", &format!("site-{name}")]);
        let api = self.at(host, 7410).to_string();
        self.ok(&["host", "add", name, "--site", &format!("site-{name}"), "--api", &api]);
    }

    /// With a controller; `room` as in [`World::start_node`].
    fn start_one_node(&mut self, room: Option<&str>) {
        self.start_controller();
        self.certify(Role::Node, "a", Duration::from_secs(86_400));
        self.start_node("a", 1, room, false);
    }

    fn start_two_nodes(&mut self) {
        for (name, host) in [("a", 1), ("b", 2)] {
            self.certify(Role::Node, name, Duration::from_secs(86_400));
            self.start_node(name, host, None, false);
        }
    }

    fn listens(&self, at: SocketAddr) {
        let deadline = Instant::now() + Duration::from_secs(180);
        while TcpStream::connect_timeout(&at, Duration::from_secs(1)).is_err() {
            assert!(Instant::now() < deadline, "nobody listens at {at}: {}", self.logs());
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn logs(&self) -> String {
        let names = ["controller.log", "a.log", "b.log", "a/vms/1/qemu.log", "b/vms/1/qemu.log"];
        let read = |name| std::fs::read_to_string(self.path(name)).unwrap_or_default();
        names.map(|name| format!("\n{name}:\n{}", read(name))).concat()
    }

    /// Exit code, standard output, standard error.
    fn godwit(&self, words: &[&str]) -> (i32, String, String) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_godwit"));
        command.args(words).env("GODWIT_CONTROLLER", self.at(9, 7400).to_string());
        command.env("GODWIT_CREDENTIALS", self.path("cert-ann")).stdin(Stdio::null());
        let output = command.output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
    }

    fn ok(&self, words: &[&str]) -> String {
        let (code, out, said) = self.godwit(words);
        assert_eq!(code, 0, "godwit {words:?}: {said}{}", self.logs());
        out
    }

    fn create(&self, spec: &Value) {
        std::fs::write(self.path("spec.json"), spec.to_string()).unwrap();
        let file = self.path("spec.json");
        self.ok(&["vm", "create", "web", "--at", "a", "--file", file.to_str().unwrap(), "--start"]);
    }

    /// Moves it, and looks what became of it.
    fn moved(&self, to: &str, more: &[&str]) -> (Move, Vm) {
        let out = self.ok(&[&["move", "web", "--to", to, "--json"], more].concat());
        let mv: Move = serde_json::from_str(out.lines().last().unwrap()).unwrap();
        let vm: Vm = serde_json::from_str(&self.ok(&["vm", "show", "web", "--json"])).unwrap();
        assert_eq!(vm.host.as_str(), to, "{mv:?}");
        (mv, vm)
    }

    fn monitor(&self, command: &str) -> Value {
        serde_json::from_str(&self.ok(&["vm", "monitor", "web", &json!({"execute": command}).to_string(), "--json"]))
            .unwrap()
    }
}

impl Drop for World {
    fn drop(&mut self) {
        common::end(&mut self.daemons, self.folder.path());
    }
}

/// A VM that boots from a disk that has nothing to boot: it runs, and that is all that is asked of it.
fn spec(disks: &Value) -> Value {
    json!({"memory": (128 << 20) + 8192, "accel": "tcg", "cpu": "qemu64,+ssse3", "machine": "pc-q35-7.2", "disks": disks})
}

/// A file with `mib` MiB that nobody has anywhere else.
fn noise(world: &World, name: &str, mib: u64, seed: u64) -> String {
    let (path, mut state) = (world.path(name), seed | 1);
    let file = std::fs::File::create(&path).unwrap();
    for n in 0..mib {
        let piece: Vec<u8> = std::iter::repeat_with(|| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            ((state >> 32) as u32).to_le_bytes()
        })
        .take(1 << 18)
        .flatten()
        .collect();
        file.write_all_at(&piece, n << 20).unwrap();
    }
    path.to_str().unwrap().to_owned()
}

#[test]
fn a_dry_run_names_each_thing_that_is_in_the_way_and_copies_nothing() {
    let Some(_machine) = machine() else { return };
    let mut world = World::new(1);
    world.start_controller();
    world.certify(Role::Node, "a", Duration::from_secs(86_400));
    world.certify(Role::Node, "b", Duration::from_secs(1800));
    world.start_node("a", 1, None, false);
    world.start_node("b", 2, Some("16m"), true);
    let disk = noise(&world, "noise", 32, 1);
    let mut spec = spec(&json!([{"volume": "root", "size": 64 << 20, "from": disk}]));
    spec["devices"] = json!(["edu,id=teacher"]);
    world.create(&spec);

    let (code, out, said) = world.godwit(&["move", "web", "--to", "site-b", "--dry-run", "--json"]);
    assert_ne!(code, 0, "{out}");
    let dry: DryRun = serde_json::from_str(&out).unwrap();
    let found: BTreeSet<(&str, &str)> = dry.blockers.iter().map(|b| (b.host.as_str(), b.kind.as_str())).collect();
    let wanted =
        [("a", "device"), ("b", "certificate"), ("b", "cpu"), ("b", "device"), ("b", "disk"), ("b", "machine")];
    assert_eq!(found, BTreeSet::from(wanted), "{:#?}{said}", dry.blockers);
    for word in ["pc-q35-7.2", "ssse3", "`edu`"] {
        assert!(out.contains(word), "{word}: {out}");
    }
    assert!((10..=30).any(|left| out.contains(&format!("{left} min"))), "how long the certificate lasts: {out}");
    // For people, each with what to do; and the move itself says the same.
    let (_, table, _) = world.godwit(&["move", "web", "--to", "site-b", "--dry-run"]);
    let (code, _, refused) = world.godwit(&["move", "web", "--to", "site-b"]);
    assert_ne!(code, 0);
    for blocker in &dry.blockers {
        assert!(refused.contains(&blocker.message) && refused.contains(&blocker.remedy), "{refused}");
        assert!(table.contains(&blocker.message), "{table}");
    }
    assert!(!world.path("b/volumes").exists(), "something was copied");
    assert_eq!(world.ok(&["move", "ls", "--json"]).trim(), "[]");
    assert_eq!(world.monitor("query-status")["status"], "running");
}

#[test]
fn a_vm_is_given_cpus_on_arrival_and_keeps_them_on_the_way_back() {
    let Some(_machine) = machine() else { return };
    let mut world = World::new(2);
    world.start_controller();
    world.start_two_nodes();
    let mut spec = spec(&json!([{"volume": "root", "size": 16 << 20}]));
    spec["max_vcpus"] = json!(4);
    world.create(&spec);
    let cpus = || world.monitor("query-cpus-fast").as_array().unwrap().len();
    assert_eq!(cpus(), 1);
    let (_, vm) = world.moved("b", &["--vcpus", "3"]);
    assert_eq!((cpus(), vm.spec.vcpus), (3, 3));
    let (_, vm) = world.moved("a", &[]);
    assert_eq!((cpus(), vm.spec.vcpus), (3, 3));
    let (_, vm) = world.moved("b", &["--vcpus", "4"]);
    assert_eq!((cpus(), vm.spec.vcpus), (4, 4));
    let (code, _, said) = world.godwit(&["move", "web", "--to", "a", "--vcpus", "5"]);
    assert!(code != 0 && said.contains("room for 4"), "{said}");
}

#[test]
fn three_disks_of_up_to_4_tib_move_together_and_only_what_they_hold_travels() {
    let Some(_machine) = machine() else { return };
    let mut world = World::new(3);
    world.start_controller();
    world.start_two_nodes();
    let gib = 1u64 << 30;
    let sizes = [gib, 100 * gib, 4096 * gib];
    let mut disks = vec![];
    for (n, size) in sizes.into_iter().enumerate() {
        let from = noise(&world, &format!("noise{n}"), 4, 7 + n as u64);
        // Something at the very end as well.
        let file = std::fs::OpenOptions::new().write(true).open(&from).unwrap();
        file.write_all_at(&[n as u8 + 1; 4096], size - 4096).unwrap();
        disks.push(json!({"volume": format!("disk{n}"), "size": size, "from": from}));
    }
    world.create(&spec(&json!(disks)));
    let (there, _) = world.moved("b", &[]);
    let (back, _) = world.moved("a", &[]);
    let travelled = (there.progress.bytes.disk.0, back.progress.bytes.disk.0);
    assert!(travelled.0 > 12 << 20 && travelled.0 < 16 << 20, "{travelled:?}");
    assert!(travelled.1 < 1 << 20, "{travelled:?}");
    for (n, size) in sizes.into_iter().enumerate() {
        let read = |path: String| {
            let file = std::fs::File::open(world.path(&path)).unwrap();
            let (mut start, mut end) = (vec![0; 4 << 20], vec![0; 4096]);
            file.read_exact_at(&mut start, 0).unwrap();
            file.read_exact_at(&mut end, size - 4096).unwrap();
            (start, end)
        };
        let original = read(format!("noise{n}"));
        for host in ["a", "b"] {
            assert!(read(format!("{host}/volumes/{}/data", n + 1)) == original, "disk {n} at {host}");
        }
    }
}

/// What a node says at `GET /metrics` to an operator.
fn figures(world: &World, name: &str, host: u8) -> String {
    let operator = godwit_trust::Credentials::load(&world.path("cert-prometheus")).unwrap();
    let client = Client::new(world.at(host, 7410), Identity::node(name).unwrap(), &operator, Duration::from_secs(120));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let refused = client.get::<Value>("/v1/vms").await.unwrap_err();
        assert_eq!(refused.problem, godwit_api::Problem::Forbidden, "an operator may ask a node for nothing else");
        client.text("/metrics").await.unwrap()
    })
}

#[test]
fn what_a_move_did_is_in_its_timeline_the_events_the_figures_and_the_logs() {
    let Some(_machine) = machine() else { return };
    let mut world = World::new(4);
    world.debug = true;
    world.start_controller();
    world.certify(Role::Client(godwit_trust::Access::Operator), "prometheus", Duration::from_secs(86_400));
    for (name, host) in [("a", 1), ("b", 2)] {
        world.certify(Role::Node, name, Duration::from_secs(86_400));
        world.start_node(name, host, None, false);
    }
    world.create(&spec(&json!([{"volume": "root", "size": 16 << 20}])));
    let (mv, _) = world.moved("b", &[]);

    let p = &mv.progress;
    let noted = |by: Teller, kind: NoteKind, text: &str| {
        p.trace.notes.iter().any(|n| n.by == by && n.kind == kind && n.text.contains(text))
    };
    assert!(noted(Teller::Source, NoteKind::Decision, "stop: "), "{:#?}", p.trace);
    assert!(noted(Teller::Source, NoteKind::HandOff, "sealing -> sealed"), "{:#?}", p.trace);
    assert!(noted(Teller::Destination, NoteKind::HandOff, "granting -> granted"), "{:#?}", p.trace);
    assert!(p.predicted_downtime_ms.is_some() && p.downtime_ms.is_some(), "{p:#?}");
    let shown = world.ok(&["move", "show", "web"]);
    for wanted in ["timeline, from ", "  copy disk ", "    round 1 ", "what happened:", "stop: ", " ms predicted, "] {
        assert!(shown.contains(wanted), "no `{wanted}`: {shown}");
    }

    let told = world.ok(&["events", "--after", "0", "--no-follow", "--json"]);
    let told: Vec<Value> = told.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let ended = told.iter().find(|e| e["kind"] == "move-ended").unwrap();
    assert_eq!((&ended["move"], &ended["outcome"]), (&json!(mv.id.0), &json!("completed")));
    let table = world.ok(&["events", "--after", "0", "--no-follow"]);
    let moved = table.lines().find(|line| line.contains(" vm-moved ")).unwrap_or_else(|| panic!("{table}"));
    assert!(moved.contains("  VM web is on b now"), "{table}");

    let labels = format!("{{move=\"{}\",vm=\"web\",from=\"a\",to=\"b\"}}", mv.id.0);
    let value = |text: &str, sample: &str| -> f64 {
        let line = text.lines().find_map(|l| l.strip_prefix(sample)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("no {sample}: {text}")).parse().unwrap()
    };
    let (from, to) = (figures(&world, "a", 1), figures(&world, "b", 2));
    let pause = value(&from, &format!("godwit_vm_migration_downtime_seconds{labels}"));
    assert!((pause * 1000.0 - p.downtime_ms.unwrap()).abs() < 0.01, "{pause}");
    for lane in ["control", "disk", "memory"] {
        let sent = value(&from, &format!("godwit_link_sent_bytes_total{{peer=\"b\",lane=\"{lane}\"}}"));
        let received = value(&to, &format!("godwit_link_received_bytes_total{{peer=\"a\",lane=\"{lane}\"}}"));
        assert!(sent > 0.0 && received > 0.0, "{lane}: {sent}, {received}");
    }
    assert_eq!(value(&from, "godwit_link_up{peer=\"b\"}"), 1.0);
    assert_eq!(
        (value(&from, "godwit_vms{ownership=\"here\"}"), value(&to, "godwit_vms{ownership=\"here\"}")),
        (0.0, 1.0)
    );

    let mut about = BTreeSet::new();
    for log in ["a.log", "b.log", "controller.log"] {
        let text = std::fs::read_to_string(world.path(log)).unwrap();
        for line in
            text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap_or_else(|e| panic!("{e}: {line}")))
        {
            let target = line["target"].as_str().unwrap();
            let of_moves = ["outgoing", "incoming", "memory_in", "memory_out", "moves"];
            let effect =
                line["fields"]["message"] == "effect" && line["fields"]["action"].as_str().unwrap().contains("Migrat");
            if effect || of_moves.iter().any(|module| target.ends_with(&format!("::{module}"))) {
                let span = &line["span"];
                assert_eq!((&span["move"], &span["vm"]), (&json!(mv.id.0), &json!("web")), "{log}: {line}");
                about.insert(target.to_owned());
            }
        }
    }
    assert!(about.len() >= 3, "{about:?}");
}

fn run_state(world: &World) -> String {
    let shown: Value = serde_json::from_str(&world.ok(&["vm", "show", "web", "--json"])).unwrap();
    shown["run"].as_str().unwrap_or_default().to_owned()
}

#[test]
fn a_vm_that_does_not_boot_is_stopped_and_removed_as_any_other() {
    let Some(_machine) = machine() else { return };
    let mut world = World::new(5);
    world.start_one_node(None);
    let mut spec = spec(&json!([{"volume": "root", "size": 1 << 20}]));
    spec["devices"] = json!(["edu,id=teacher,no-such-property=1"]);
    std::fs::write(world.path("spec.json"), spec.to_string()).unwrap();
    let file = world.path("spec.json");
    let create = ["vm", "create", "web", "--at", "a", "--file", file.to_str().unwrap(), "--start"];
    let tries = |world: &World| {
        std::fs::read_to_string(world.path("a.log")).unwrap().matches("made to run; trying again").count()
    };

    let (code, _, said) = world.godwit(&create);
    assert!(code != 0 && said.contains("does not come up"), "{said}");
    world.ok(&["vm", "stop", "web"]);
    let tried = tries(&world);
    std::thread::sleep(Duration::from_secs(7));
    assert_eq!((run_state(&world).as_str(), tries(&world)), ("off", tried), "{}", world.logs());
    world.ok(&["vm", "rm", "web"]);

    // One that is still being tried goes as well.
    let (code, _, said) = world.godwit(&create);
    assert!(code != 0 && said.contains("does not come up"), "{said}");
    world.ok(&["vm", "rm", "web"]);
    assert_eq!(world.ok(&["vm", "ls", "--json"]).trim(), "[]");
    assert!(!world.path("a/vms/2").exists() && common::guests(world.folder.path()).is_empty());
}

#[test]
fn a_vm_is_off_when_its_stop_says_so() {
    let Some(_machine) = machine() else { return };
    let mut world = World::new(6);
    world.start_one_node(None);
    world.create(&spec(&json!([{"volume": "root", "size": 1 << 20}])));
    for _ in 0..3 {
        world.ok(&["vm", "stop", "web", "--force"]);
        assert!(common::guests(world.folder.path()).is_empty());
        world.ok(&["vm", "start", "web"]);
    }
    world.ok(&["vm", "stop", "web", "--force"]);
    world.ok(&["vm", "rm", "web"]);
}

/// Process 1 of a guest that fills its disk, once.
const FILLS: &str = r#"n=0
while [ $n -lt 48 ]; do
    dd if=/dev/urandom of=/dev/vda bs=1M count=1 seek=$n oflag=direct conv=notrunc 2>/dev/null || echo "LOAD-ERROR $n"
    n=$((n + 1))
done
echo LOAD-ENDED
while :; do sleep 3600; done
"#;

#[test]
fn a_guest_whose_write_found_no_room_stands_still_and_goes_on_by_itself_when_there_is() {
    let Some(_machine) = machine() else { return };
    let Some(image) = common::tiny() else { return };
    let mut world = World::new(7);
    common::with_script(&image, &world.path("images"), FILLS);
    world.start_one_node(Some("32m"));
    let node = world.daemons.last().unwrap().id();
    let create = ["vm", "create", "web", "--at", "a", "--memory", "131080K", "--accel", "tcg", "--disk", "root=64M"];
    world.ok(&[&create[..], &common::BOOTS[..]].concat());
    let until = |what: &dyn Fn() -> bool| {
        let deadline = Instant::now() + Duration::from_secs(120);
        while !what() {
            assert!(Instant::now() < deadline, "{}", world.logs());
            std::thread::sleep(Duration::from_millis(100));
        }
    };
    until(&|| run_state(&world) == "paused");
    let (code, _, said) = world.godwit(&["vm", "start", "web"]);
    assert!(code != 0 && said.contains("no room"), "{said}");

    let state = world.path("a");
    let remount = ["-o", "remount,size=256m", state.to_str().unwrap()];
    let space = format!("--mount=/proc/{node}/ns/mnt");
    assert!(Command::new("nsenter").args([space.as_str(), "mount"]).args(remount).status().unwrap().success());
    let console = format!("/proc/{node}/root{}/vms/1/console.log", state.display());
    let said = || std::fs::read_to_string(&console).unwrap_or_default();
    until(&|| said().contains("LOAD-ENDED"));
    assert!(!said().contains("LOAD-ERROR"), "{}", said());
    assert_eq!(run_state(&world), "running");
}
