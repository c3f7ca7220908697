//! Volumes in a pool of a Ceph cluster, from the command line to the cluster's objects: real Ceph, of one machine, started by
//! `scripts/ceph.sh` beside the hosts. Part of `make soak`, because Ceph's packages are large.

use crate::common::pair::{Pair, can_run};
use serde_json::json;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};

const MIB: usize = 1 << 20;

/// A cluster at place `c`, for as long as this lives.
struct Ceph {
    process: Child,
    // Its end is the cluster's.
    input: Option<ChildStdin>,
    conf: PathBuf,
}

impl Ceph {
    fn start(pair: &Pair) -> Self {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/ceph.sh");
        let mut command = pair.command("c", script.to_str().unwrap());
        command.args(["sh", "-c", "echo $CEPH_CONF; exec cat"]).env("CEPH_ADDRESS", "10.99.0.9");
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert!(!line.trim().is_empty(), "the cluster does not start");
        Self { input: process.stdin.take(), process, conf: line.trim().into() }
    }

    fn objects(&self, pair: &Pair, begin: &str) -> usize {
        let mut command = pair.command("c", "rados");
        let output = command.args(["--pool", "volumes", "--all", "ls"]).env("CEPH_CONF", &self.conf).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap().lines().filter(|line| line.contains(begin)).count()
    }
}

impl Drop for Ceph {
    fn drop(&mut self) {
        drop(self.input.take());
        let _ = self.process.wait();
    }
}

#[test]
#[ignore = "installs and starts Ceph: make soak"]
fn a_vms_disk_lies_in_a_pool_moves_into_another_hosts_pool_and_back_and_leaves_no_object() {
    if !can_run() {
        return;
    }
    let mut pair = Pair::new("rados");
    let ceph = Ceph::start(&pair);
    pair.environment = vec![("CEPH_CONF", ceph.conf.clone())];
    // All that comes to b lies in the pool; at a it is said of the disk.
    pair.more.insert("b", vec!["--pool".into(), "godwit@volumes".into()]);
    pair.start_controller();
    pair.start_node("a");
    pair.start_node("b");
    std::fs::write(pair.path("disk"), vec![0x5a; 9 * MIB]).unwrap();
    let spec = json!({"memory": (128 << 20) + 8192, "accel": "tcg", "cpu": "qemu64", "machine": "pc-q35-7.2"});
    std::fs::write(pair.path("spec.json"), spec.to_string()).unwrap();
    let create = |pair: &Pair, pool: &str| {
        let disk = format!("root=64M,rados={pool},from={}", pair.path("disk").display());
        let file = pair.path("spec.json");
        pair.godwit(&["vm", "create", "web", "--at", "a", "--file", file.to_str().unwrap(), "--disk", &disk, "--start"])
    };
    // What is not there, and what may not be used, is said before anything is made.
    let (code, _, said) = create(&pair, "nosuch");
    assert!(code == 1 && said.contains("open the pool `nosuch`"), "{said}");
    let (code, _, said) = create(&pair, "nobody@volumes");
    assert!(code == 1 && said.contains("connect to the cluster as client.nobody"), "{said}");
    assert_eq!(ceph.objects(&pair, "godwit."), 0);
    let (code, _, said) = create(&pair, "godwit@volumes");
    assert_eq!(code, 0, "{said}{}", pair.logs());
    assert_eq!(ceph.objects(&pair, "godwit."), 3, "9 MiB are three objects of 4 MiB, and holes are none");

    let mut wanted = vec![0x5a; 9 * MIB];
    wanted.resize(64 * MIB, 0);
    let socket = |pair: &Pair, host: &str| {
        let all = std::fs::read_dir(pair.path(&format!("run-{host}/vms"))).unwrap();
        let vm = all.map(|entry| entry.unwrap().path()).find(|path| path.join("disk0.sock").exists()).unwrap();
        format!("nbd+unix:///root?socket={}", vm.join("disk0.sock").display())
    };
    let io = |pair: &Pair, host: &str, what: &str| {
        let output = Command::new("qemu-io").args(["-f", "raw", "-c", what, &socket(pair, host)]).output().unwrap();
        assert!(output.status.success(), "{what}: {output:?}");
    };
    let held = |pair: &Pair, host: &str| {
        let raw = pair.path("raw");
        let words =
            ["convert", "-f", "raw", "-O", "raw", &socket(pair, host), raw.to_str().unwrap()].map(str::to_owned);
        assert!(Command::new("qemu-img").args(words).status().unwrap().success());
        std::fs::read(&raw).unwrap()
    };
    // Across objects, and a whole one that goes.
    io(&pair, "a", "write -P 0x11 7M 3M");
    wanted[7 * MIB..10 * MIB].fill(0x11);
    io(&pair, "a", "discard 4M 1M");
    wanted[4 * MIB..5 * MIB].fill(0);
    assert!(held(&pair, "a") == wanted);

    // A node that dies finds it again.
    pair.kill_node("a");
    pair.start_node("a");
    pair.until("the VM is there again", || pair.json(&["vm", "show", "web"])["run"] == "running");
    assert!(held(&pair, "a") == wanted);

    pair.ok(&["move", "web", "--to", "b"]);
    io(&pair, "b", "write -P 0x22 40M 4M");
    wanted[40 * MIB..44 * MIB].fill(0x22);
    assert!(held(&pair, "b") == wanted);
    assert!(!pair.path("b/volumes").read_dir().unwrap().any(|e| e.unwrap().path().join("data").exists()));
    pair.ok(&["move", "web", "--to", "a"]);
    assert!(held(&pair, "a") == wanted);

    // Nothing is left of it anywhere.
    pair.ok(&["vm", "stop", "web", "--force"]);
    pair.until("it is off", || pair.json(&["vm", "show", "web"])["run"] == "off");
    pair.ok(&["vm", "rm", "web"]);
    pair.until("its objects are gone", || ceph.objects(&pair, "godwit.") == 0);
}
