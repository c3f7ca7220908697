//! Two hosts and a controller, each in a network namespace of its own on one underlay, whose nodes can be killed and started
//! again. What a test makes is in its namespaces and its folder, and goes with them.

use godwit_trust::{Access, Authority, Credentials, Identity, Role, Validity};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// The hosts `a` and `b`, `d` and `e` for tests that need more of them, and `c` for the controller.
const PLACES: [(&str, u8); 5] = [("a", 1), ("b", 2), ("d", 3), ("e", 4), ("c", 9)];

/// Whether there is what such a test needs; says so, if not.
pub fn can_run() -> bool {
    let has = |program: &str, word: &str| Command::new(program).arg(word).output().is_ok_and(|o| o.status.success());
    let root = Command::new("id").arg("-u").output().is_ok_and(|o| o.stdout.starts_with(b"0\n"));
    let ready = root && has("qemu-system-x86_64", "--version") && has("ip", "-V") && has("nft", "--version");
    if !ready {
        eprintln!("SKIPPED: this needs root, qemu-system-x86_64, ip and nft");
    }
    ready
}

fn must(command: &str) {
    let mut words = command.split(' ');
    let output = Command::new(words.next().unwrap()).args(words).output().unwrap();
    assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
}

/// How the network namespaces of these tests begin; the process id follows.
const PREFIX: &str = "gwtest";

/// Removes the network namespaces of tests that were killed, and so could not.
fn remove_what_was_left() {
    let Ok(entries) = std::fs::read_dir("/run/netns") else { return };
    for space in entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()) {
        let Some(rest) = space.strip_prefix(PREFIX) else { continue };
        let process: String = rest.chars().take_while(char::is_ascii_digit).collect();
        if !process.is_empty() && !std::path::Path::new("/proc").join(process).exists() {
            // Another test may have been quicker.
            let _ = Command::new("ip").args(["netns", "del", &space]).stderr(Stdio::null()).status();
        }
    }
}

/// See above.
pub struct Pair {
    pub folder: TempDir,
    id: String,
    daemons: HashMap<&'static str, Child>,
    /// What nodes are told besides; and their environment.
    pub more: HashMap<&'static str, Vec<String>>,
    pub environment: Vec<(&'static str, PathBuf)>,
    /// Where hosts find programs that do not find them where the rest does.
    pub path_of: HashMap<&'static str, OsString>,
    /// The sites of hosts that are not in one of their own.
    pub sites: HashMap<&'static str, String>,
}

/// The network namespace of a process.
pub fn space_of(pid: u32) -> std::fs::File {
    std::fs::File::open(format!("/proc/{pid}/ns/net")).unwrap()
}

/// Carries something out in a network namespace.
pub fn inside<T: Send + 'static>(
    space: std::fs::File,
    what: impl FnOnce() -> T + Send + 'static,
) -> std::thread::JoinHandle<T> {
    std::thread::spawn(move || {
        let kind = Some(rustix::thread::LinkNameSpaceType::Network);
        rustix::thread::move_into_link_name_space(std::os::fd::AsFd::as_fd(&space), kind).unwrap();
        what()
    })
}

impl Pair {
    /// With its controller, before any node.
    pub fn new(test: &str) -> Self {
        remove_what_was_left();
        let id = format!("{PREFIX}{}{test}", std::process::id());
        let pair = Self {
            folder: tempfile::tempdir().unwrap(),
            id,
            daemons: HashMap::new(),
            more: HashMap::new(),
            environment: vec![],
            path_of: HashMap::new(),
            sites: HashMap::new(),
        };
        std::fs::create_dir(pair.path("images")).unwrap();
        std::fs::create_dir(pair.path("points")).unwrap();
        Authority::create(&pair.path("ca")).unwrap();
        let roles = [
            (Role::Controller, "controller"),
            (Role::Client(Access::Admin), "ann"),
            (Role::Node, "a"),
            (Role::Node, "b"),
            (Role::Node, "d"),
            (Role::Node, "e"),
        ];
        for (role, name) in roles {
            let authority = Authority::open(&pair.path("ca")).unwrap();
            let issued = authority.issue(&Identity::new(role, name).unwrap(), Validity::days(1)).unwrap();
            issued.write(&pair.path(&format!("cert-{name}"))).unwrap();
        }
        for (place, _) in PLACES {
            must(&format!("ip netns add {}", pair.space(place)));
            pair.within(place, "ip link set lo up");
        }
        pair.within("c", "ip link add under type bridge");
        pair.within("c", "ip link set under up");
        pair.within("c", "ip address add 10.99.0.9/24 dev under");
        for (place, number) in &PLACES[..4] {
            pair.within("c", &format!("ip link add to-{place} type veth peer name under netns {}", pair.space(place)));
            pair.within("c", &format!("ip link set to-{place} master under up"));
            pair.within(place, &format!("ip address add 10.99.0.{number}/24 dev under"));
            pair.within(place, "ip link set under up");
        }
        pair
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn space(&self, place: &str) -> String {
        format!("{}{place}", self.id)
    }

    /// A program at a place, to be run.
    pub fn command(&self, place: &str, program: &str) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.space(place), program]).stdin(Stdio::null());
        command
    }

    /// Runs something at a place; it must succeed.
    pub fn within(&self, place: &str, command: &str) -> String {
        let mut words = command.split(' ');
        let output = self.command(place, words.next().unwrap()).args(words).output().unwrap();
        assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    fn begin(&mut self, name: &'static str, mut command: Command) {
        let log = std::fs::OpenOptions::new().create(true).append(true).open(self.path(&format!("{name}.log")));
        command.env("GODWIT_FAILPOINTS", self.path("points")).env("GODWIT_LOG", "info,godwit_node=debug");
        let daemon = command.stdout(Stdio::null()).stderr(log.unwrap()).spawn().unwrap();
        self.daemons.insert(name, daemon);
    }

    pub fn start_controller(&mut self) {
        let mut command = self.command("c", env!("CARGO_BIN_EXE_godwit"));
        command.args(["controller", "--listen", "10.99.0.9:7400"]).env("GODWIT_EXPERIMENTAL", "memory-postcopy");
        command.arg("--state").arg(self.path("controller")).arg("--credentials").arg(self.path("cert-controller"));
        self.begin("c", command);
        self.until("the controller answers", || self.godwit(&["site", "ls"]).0 == 0);
    }

    /// Starts a host's node, once more if need be.
    pub fn start_node(&mut self, name: &'static str) {
        let number = PLACES.iter().find(|place| place.0 == name).unwrap().1;
        let mut command = self.command(name, env!("CARGO_BIN_EXE_godwit"));
        command.args(["node", "--name", name, "--address", &format!("10.99.0.{number}")]);
        command.arg("--state").arg(self.path(name)).arg("--run").arg(self.path(&format!("run-{name}")));
        command.arg("--images").arg(self.path("images")).arg("--credentials").arg(self.path(&format!("cert-{name}")));
        command.args(self.more.get(name).into_iter().flatten()).envs(self.environment.clone());
        command.envs(self.path_of.get(name).map(|path| ("PATH", path)));
        self.begin(name, command);
        let api = format!("10.99.0.{number}:7410");
        self.until("the node listens", || self.ask(name, "GET", "/v1/host").is_ok());
        if self.godwit(&["host", "show", name]).0 != 0 {
            let site = self.sites.get(name).cloned().unwrap_or_else(|| format!("site-{name}"));
            if !self.ok(&["site", "ls"]).lines().any(|line| line.split(' ').next() == Some(&site)) {
                self.ok(&["site", "add", &site]);
            }
            self.ok(&["host", "add", name, "--site", &site, "--api", &api]);
        }
    }

    /// Ends a host's node as a crash does; its QEMUs go on.
    pub fn kill_node(&mut self, name: &'static str) {
        let mut daemon = self.daemons.remove(name).unwrap();
        daemon.kill().unwrap();
        daemon.wait().unwrap();
    }

    /// Whether a host's node, or the controller, was started and not ended.
    pub fn has(&self, name: &str) -> bool {
        self.daemons.contains_key(name)
    }

    /// The process of a host's node.
    pub fn node(&self, name: &str) -> u32 {
        self.daemons[name].id()
    }

    /// The QEMUs of a host.
    pub fn guests(&self, name: &str) -> Vec<u32> {
        super::guests(&self.path(&format!("run-{name}")))
    }

    /// A host without power: node and guests are gone, and so is what the kernel had of the network.
    pub fn lose_power(&mut self, name: &'static str) {
        self.kill_node(name);
        for pid in self.guests(name) {
            must(&format!("kill -9 {pid}"));
        }
        self.until("its guests are gone", || self.guests(name).is_empty());
        std::fs::remove_dir_all(self.path(&format!("run-{name}"))).unwrap();
    }

    /// Asks a node as its controller does.
    pub fn ask(&self, name: &str, method: &str, path: &str) -> Result<Value, String> {
        let number = PLACES.iter().find(|place| place.0 == name).unwrap().1;
        let credentials = Credentials::load(&self.path("cert-controller")).unwrap();
        let at = std::net::SocketAddr::from(([10, 99, 0, number], 7410));
        let space = std::fs::File::open(format!("/run/netns/{}", self.space("c"))).unwrap();
        let (method, path, name) = (method.to_owned(), path.to_owned(), name.to_owned());
        let asked = inside(space, move || {
            let patience = Duration::from_secs(5);
            let client = godwit_api::Client::new(at, Identity::node(&name).unwrap(), &credentials, patience);
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let answer = match method.as_str() {
                    "GET" => client.get::<Value>(&path).await,
                    _ => client.delete::<Value>(&path).await,
                };
                answer.map_err(|e| e.to_string())
            })
        });
        asked.join().unwrap()
    }

    /// Exit code, standard output, standard error.
    pub fn godwit(&self, words: &[&str]) -> (i32, String, String) {
        let mut command = self.command("c", env!("CARGO_BIN_EXE_godwit"));
        command.args(words).env("GODWIT_CONTROLLER", "10.99.0.9:7400").env("GODWIT_CREDENTIALS", self.path("cert-ann"));
        let output = command.output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (output.status.code().unwrap_or(-1), text(output.stdout), text(output.stderr))
    }

    pub fn ok(&self, words: &[&str]) -> String {
        let (code, out, said) = self.godwit(words);
        assert_eq!(code, 0, "godwit {words:?}: {said}{}", self.logs());
        out
    }

    pub fn json(&self, words: &[&str]) -> Value {
        let out = self.ok(&[words, &["--json"]].concat());
        serde_json::from_str(out.lines().last().unwrap()).unwrap()
    }

    /// All running, and at `a` the VM `web` with a disk `root` of which 8 MiB are written.
    pub fn with_a_disk(test: &str) -> Self {
        Self::with_disks(test, &["root"])
    }

    /// The same with several.
    pub fn with_disks(test: &str, disks: &[&str]) -> Self {
        let mut pair = Self::new(test);
        pair.start_controller();
        pair.start_node("a");
        pair.start_node("b");
        std::fs::write(pair.path("disk"), vec![0x5a; 8 << 20]).unwrap();
        let from = pair.path("disk");
        let disks: Vec<_> = disks.iter().map(|v| json!({"volume": v, "size": 16 << 20, "from": from})).collect();
        pair.create(
            "web",
            &json!({"memory": (128 << 20) + 8192, "accel": "tcg", "cpu": "qemu64", "machine": "pc-q35-7.2", "disks": disks}),
        );
        pair
    }

    pub fn create(&self, name: &str, spec: &Value) {
        let file = self.path(&format!("{name}.json"));
        std::fs::write(&file, spec.to_string()).unwrap();
        self.ok(&["vm", "create", name, "--at", "a", "--file", file.to_str().unwrap(), "--start"]);
    }

    /// Waits until something is so, for a minute at most.
    pub fn until(&self, what: &str, is: impl Fn() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while !is() {
            assert!(Instant::now() < deadline, "not within a minute: {what}{}", self.logs());
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    pub fn logs(&self) -> String {
        let tail = |name: &str| {
            let text = std::fs::read_to_string(self.path(name)).unwrap_or_default();
            let lines: Vec<&str> = text.lines().collect();
            format!("\n{name}:\n{}", lines[lines.len().saturating_sub(40)..].join("\n"))
        };
        ["c.log", "a.log", "b.log", "d.log", "e.log"].map(tail).concat()
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        super::end(self.daemons.values_mut(), self.folder.path());
        for (place, _) in PLACES {
            let _ = Command::new("ip").args(["netns", "del", &self.space(place)]).status();
        }
    }
}
