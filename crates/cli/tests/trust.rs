//! A deployment from nothing, as an operator makes it: an authority, hosts that enrol, certificates that are renewed under a move,
//! a host that is revoked; and no secret where it does not belong. Real daemons on this machine's loopback.

use crate::common;
use godwit_api::public::{Host, Move};
use serde_json::json;
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

struct World {
    folder: TempDir,
    daemons: Vec<Child>,
}

impl World {
    fn new() -> Option<Self> {
        let root = Command::new("id").arg("-u").output().is_ok_and(|o| o.stdout.starts_with(b"0\n"));
        if !root || Command::new("qemu-system-x86_64").arg("--version").output().is_err() {
            eprintln!("SKIPPED: this needs root and qemu-system-x86_64");
            return None;
        }
        Some(Self { folder: tempfile::tempdir().unwrap(), daemons: vec![] })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn text(&self, name: &str) -> String {
        String::from_utf8_lossy(&std::fs::read(self.path(name)).unwrap_or_default()).into_owned()
    }

    fn at(host: u8, port: u16) -> SocketAddr {
        SocketAddr::from(([127, 78, 1, host], port))
    }

    fn daemon(&mut self, words: &[&str], log: &str, at: SocketAddr) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_godwit"));
        command.args(words).env_clear().env("PATH", std::env::var("PATH").unwrap()).env("GODWIT_LOG", "debug");
        let log_file = std::fs::File::create(self.path(log)).unwrap();
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log_file);
        self.daemons.push(command.spawn().unwrap());
        let deadline = Instant::now() + Duration::from_secs(180);
        while TcpStream::connect_timeout(&at, Duration::from_secs(1)).is_err() {
            assert!(Instant::now() < deadline, "nobody listens at {at}: {}", self.text(log));
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_godwit"));
        command.args(words).env("GODWIT_CONTROLLER", Self::at(9, 7400).to_string());
        command.env("GODWIT_CREDENTIALS", self.path("ctl/admin")).stdin(Stdio::null());
        command
    }

    fn godwit(&self, words: &[&str]) -> Result<String, String> {
        let output = self.command(words).output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        if output.status.success() { Ok(text(output.stdout)) } else { Err(text(output.stderr)) }
    }

    fn ok(&self, words: &[&str]) -> String {
        let logs = || ["controller.log", "a.log", "b.log"].map(|l| self.text(l)).concat();
        self.godwit(words).unwrap_or_else(|said| panic!("godwit {words:?}: {said}\n{}", logs()))
    }

    /// Enrols with a token that is written to a file, into the state folder of `host`.
    fn enrol(&self, token: &str, host: &str) -> Result<String, String> {
        std::fs::write(self.path("token"), format!("{token}\n")).unwrap();
        let (token, state) = (self.path("token"), self.path(host));
        let result =
            self.godwit(&["enroll", "--token-file", token.to_str().unwrap(), "--state", state.to_str().unwrap()]);
        std::fs::remove_file(token).unwrap();
        result
    }

    fn node(&mut self, name: &str, host: u8) {
        let [state, run, images] = [name.to_owned(), format!("run-{name}"), "images".into()]
            .map(|dir| self.path(&dir).to_str().unwrap().to_owned());
        let ip = Self::at(host, 0).ip().to_string();
        let words = ["node", "--name", name, "--state", &state, "--run", &run, "--images", &images, "--address", &ip];
        self.daemon(&words, &format!("{name}.log"), Self::at(host, 7410));
        self.ok(&["site", "add", &format!("site-{name}")]);
        let api = Self::at(host, 7410).to_string();
        self.ok(&["host", "add", name, "--site", &format!("site-{name}"), "--api", &api]);
    }

    fn host(&self, name: &str) -> Host {
        serde_json::from_str(&self.ok(&["host", "show", name, "--json"])).unwrap()
    }

    fn expires(&self, name: &str) -> u64 {
        self.host(name)
            .facts
            .unwrap_or_else(|| panic!("{name}: {}", self.text(&format!("{name}.log"))))
            .certificate_expires_unix_s
    }
}

impl Drop for World {
    fn drop(&mut self) {
        common::end(&mut self.daemons, self.folder.path());
    }
}

/// What a certificate of the controller's lasts here, seconds: a node renews it after two thirds.
const LIFE: u64 = 30;

#[test]
fn hosts_enrol_renew_their_certificates_under_a_move_and_are_revoked_and_no_secret_is_seen() {
    let Some(mut world) = World::new() else { return };
    let state = world.path("ctl").to_str().unwrap().to_owned();
    world.ok(&["init", "--state", &state]);
    for key in ["ctl/ca/ca-key.pem", "ctl/credentials/key.pem", "ctl/admin/key.pem"] {
        assert_eq!(world.path(key).metadata().unwrap().permissions().mode() & 0o777, 0o600, "{key}");
    }
    let again = world.godwit(&["init", "--state", &state]).unwrap_err();
    assert!(again.contains("exists"), "{again}");
    let (listen, life) = (World::at(9, 7400).to_string(), format!("{LIFE}s"));
    let words = ["controller", "--state", &state, "--listen", &listen, "--certificate-life", &life];
    world.daemon(&words, "controller.log", World::at(9, 7400));

    // Whoever shows no certificate may enrol, and do nothing else.
    let mut tokens = vec![];
    let mut token = |host: &str, ttl: &str| {
        let token = world.ok(&["host", "token", host, "--ttl", ttl]).trim().to_owned();
        tokens.push(token.clone());
        token
    };
    let (first, brief) = (token("a", "1h"), token("b", "1s"));
    let second = token("b", "1h");
    let refused = |token: &str, why: &str| {
        let said = world.enrol(token, "nobody").unwrap_err();
        assert!(said.contains(why), "{said}");
        assert!(!said.contains(token.rsplit('.').next().unwrap()), "an error shows a secret: {said}");
        assert!(!world.path("nobody").exists(), "{why}");
    };
    refused(&first.replacen(".a.", ".b.", 1), "is for the host `a`");
    let mut parts: Vec<&str> = first.split('.').collect();
    let (pin, secret) = ("0".repeat(32), "0".repeat(64));
    parts[2] = &pin;
    refused(&parts.join("."), "not signed by our CA");
    parts = first.split('.').collect();
    parts[3] = &secret;
    refused(&parts.join("."), "knows no such token");
    refused("not a token", "no enrolment token");
    world.enrol(&first, "a").unwrap();
    refused(&first, "has been used already");
    std::thread::sleep(Duration::from_secs(2));
    refused(&brief, "has expired");
    for file in ["key.pem", "controller.json"] {
        let mode = world.path("a/credentials").join(file).metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{file}");
    }

    std::fs::create_dir(world.path("images")).unwrap();
    world.node("a", 1);
    world.enrol(&second, "b").unwrap();
    world.node("b", 2);
    let before = [world.expires("a"), world.expires("b")];

    // A token of a domain asks, and finds what is in it: nothing.
    let words = ["token", "create", "ann", "--domain", "acme", "--role", "viewer"];
    let token = world.ok(&words).trim().to_owned();
    std::fs::write(world.path("api-token"), &token).unwrap();
    tokens.push(token);
    let file = world.path("api-token").to_str().unwrap().to_owned();
    assert_eq!(world.ok(&["--api-token-file", &file, "vm", "ls", "--json"]).trim(), "[]");
    let said = world.godwit(&["--api-token-file", &file, "host", "ls"]).unwrap_err();
    assert!(said.contains("belongs to the deployment"), "{said}");

    // A move that takes longer than a certificate lasts: 24 MiB that do not compress, at 5 Mbit/s.
    let mut seed = 1_u64;
    let noise: Vec<u8> = (0..3 << 20)
        .flat_map(|_| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed ^ seed >> 29).to_le_bytes()
        })
        .collect();
    std::fs::write(world.path("noise.img"), noise).unwrap();
    let spec = json!({"memory": (128 << 20) + 8192, "accel": "tcg", "cpu": "qemu64,+ssse3", "machine": "pc-q35-7.2",
        "disks": [{"volume": "noise", "size": 24 << 20, "from": world.path("noise.img")}]});
    std::fs::write(world.path("spec.json"), spec.to_string()).unwrap();
    let file = world.path("spec.json");
    world.ok(&["vm", "create", "web", "--at", "a", "--file", file.to_str().unwrap(), "--start"]);
    let began = Instant::now();
    let out = world.ok(&["move", "web", "--to", "b", "--limit", "5M", "--json"]);
    let took = began.elapsed();
    let mv: Move = serde_json::from_str(out.lines().last().unwrap()).unwrap();
    assert!(took > Duration::from_secs(LIFE), "the move took {took:?} only, so it shows nothing: {mv:?}");
    let after = [world.expires("a"), world.expires("b")];
    assert!(after[0] > before[0] && after[1] > before[1], "{before:?} {after:?}");
    // Both ways, each with what it has now.
    world.ok(&["move", "web", "--to", "a"]);

    world.ok(&["host", "revoke", "b"]);
    let shown = world.host("b");
    assert!(shown.error.as_deref().is_some_and(|e| e.contains("revoked")), "{shown:?}");
    let deadline = Instant::now() + Duration::from_secs(180);
    while !world.text("a/revoked.json").contains("node/b") {
        assert!(Instant::now() < deadline, "a was not told: {}", world.text("controller.log"));
        std::thread::sleep(Duration::from_millis(200));
    }
    assert!(world.godwit(&["move", "web", "--to", "b"]).is_err());
    let logged = Instant::now() + Duration::from_secs(LIFE + 180);
    while !world.text("b.log").contains("cannot be renewed") {
        assert!(Instant::now() < logged, "a revoked node had its certificate renewed: {}", world.text("b.log"));
        std::thread::sleep(Duration::from_millis(200));
    }

    // Nothing secret in logs, in command lines, or (but for hashes) in the controller's store.
    let mut places = vec![];
    for file in ["controller.log", "a.log", "b.log", "ctl/controller.redb"] {
        assert!(!world.text(file).is_empty(), "{file}");
        places.push((file.to_owned(), world.text(file)));
    }
    let mine = world.folder.path().to_string_lossy().into_owned();
    for entry in std::fs::read_dir("/proc").unwrap().filter_map(Result::ok) {
        for file in ["cmdline", "environ"] {
            let line = std::fs::read(entry.path().join(file)).unwrap_or_default();
            let line = String::from_utf8_lossy(&line).into_owned();
            if line.contains(&mine) {
                places.push((format!("{:?}", entry.path().join(file)), line));
            }
        }
    }
    assert!(places.len() >= 4 + 4, "three daemons and a guest have command lines: {}", places.len());
    for (place, text) in &places {
        assert!(!text.contains("PRIVATE KEY"), "{place} has a private key");
        for token in &tokens {
            assert!(!text.contains(token.rsplit('.').next().unwrap()), "{place} has a token");
        }
    }
}
