//! A VM whose disk lies on storage that both hosts reach: a folder here. From the command line to the storage, with nodes that die on the way.

use crate::common::pair::{Pair, can_run};
use serde_json::json;
use std::path::Path;
use std::process::Command;
use std::sync::Mutex;

/// One after the other: each has two guests for a while.
static MACHINE: Mutex<()> = Mutex::new(());

const SIZE: usize = 16 << 20;

fn with_a_shared_disk(test: &str) -> Pair {
    let mut pair = Pair::new(test);
    pair.start_controller();
    pair.start_node("a");
    pair.start_node("b");
    std::fs::create_dir(pair.path("nfs")).unwrap();
    std::fs::write(pair.path("disk"), vec![0x5a; 4 << 20]).unwrap();
    let spec = json!({"memory": (128 << 20) + 8192, "accel": "tcg", "cpu": "qemu64", "machine": "pc-q35-7.2"});
    std::fs::write(pair.path("spec.json"), spec.to_string()).unwrap();
    let disk = format!("root=16M,shared={},from={}", pair.path("nfs/web").display(), pair.path("disk").display());
    let file = pair.path("spec.json");
    pair.ok(&["vm", "create", "web", "--at", "a", "--file", file.to_str().unwrap(), "--disk", &disk, "--start"]);
    pair
}

/// As the guest does, at the host that runs it. Whether it was answered.
fn guest(pair: &Pair, host: &str, what: &str) -> bool {
    within(pair, host, what, "20")
}

/// As the guest of a host that has lost the VM would: it waits in vain.
fn ghost(pair: &Pair, host: &str, what: &str) -> bool {
    within(pair, host, what, "2")
}

fn within(pair: &Pair, host: &str, what: &str, patience: &str) -> bool {
    let socket = pair.path(&format!("run-{host}/vms/1/disk0.sock"));
    let uri = format!("nbd+unix:///root?socket={}", socket.display());
    let words = [patience, "qemu-io", "-f", "raw", "-c", what, &uri];
    let output = Command::new("timeout").args(words).output().unwrap();
    output.status.success() && !String::from_utf8_lossy(&output.stdout).contains("failed")
}

/// Mounts something where only the node of a host sees it.
fn mount(pair: &Pair, host: &str, words: &[&str]) {
    beside(pair.node(host), "mount", words);
}

/// Where only this node sees it.
fn unmount(node: u32, at: &Path) {
    beside(node, "umount", &[at.to_str().unwrap()]);
}

fn beside(node: u32, program: &str, words: &[&str]) {
    let output = Command::new("nsenter").args(["-t", &node.to_string(), "-m", program]).args(words).output().unwrap();
    assert!(output.status.success(), "{program} {words:?}: {output:?}");
}

fn lies(pair: &Pair) -> Vec<u8> {
    std::fs::read(pair.path("nfs/web/data")).unwrap()
}

fn holder(pair: &Pair) -> String {
    let had = godwit_volume::shared::having(&pair.path("nfs/web")).unwrap();
    had.expect("somebody has had it").who
}

fn moved(pair: &Pair, to: &str) {
    pair.ok(&["move", "web", "--to", to, "--disk", "shared"]);
    let mv = pair.json(&["move", "show", "web"]);
    println!("to {to}: pause {} ms, disk bytes {}", mv["progress"]["downtime_ms"], mv["progress"]["bytes"]["disk"]);
    assert_eq!(pair.json(&["vm", "show", "web"])["host"], to);
    assert_eq!(holder(pair), to);
    pair.until("it runs", || pair.json(&["vm", "show", "web"])["run"] == "running");
}

#[test]
fn a_vm_on_shared_storage_moves_there_and_back_and_no_block_travels() {
    let _machine = MACHINE.lock();
    if !can_run() {
        return;
    }
    let pair = with_a_shared_disk("shared");
    let mut new = vec![0x5a; 4 << 20];
    new.resize(SIZE, 0);
    assert!(lies(&pair) == new);
    assert!(guest(&pair, "a", "write -P 0x11 6M 64k"));
    new[6 << 20..(6 << 20) + 65536].fill(0x11);
    moved(&pair, "b");
    assert!(lies(&pair) == new, "the source made all durable before it let go");
    assert!(guest(&pair, "b", "read -P 0x11 6M 64k") && guest(&pair, "b", "write -P 0x22 7M 64k"));
    new[7 << 20..(7 << 20) + 65536].fill(0x22);
    // Who has lost it writes nothing: its clients wait in vain.
    assert!(!ghost(&pair, "a", "write -P 0x99 0 64k"), "the former owner takes no write");
    assert!(guest(&pair, "b", "flush") && lies(&pair) == new);
    for host in ["a", "b"] {
        assert!(!pair.path(&format!("{host}/volumes/1/data")).exists(), "nothing was copied");
    }
    moved(&pair, "a");
    assert!(guest(&pair, "a", "read -P 0x22 7M 64k"));
    assert!(
        std::fs::read_dir(pair.path("nfs/web")).unwrap().all(|e| !e
            .unwrap()
            .file_name()
            .to_string_lossy()
            .starts_with("mark"))
    );

    // A pre-cache elsewhere would compare these stamps: they lie with the blocks. And another strategy copies nothing either.
    pair.ok(&["move", "web", "--to", "b", "--disk", "mirror"]);
    assert_eq!(holder(&pair), "b");
    assert!(!pair.path("b/volumes/1/data").exists());

    // Not all hosts see it.
    std::fs::rename(pair.path("nfs/web"), pair.path("nfs/elsewhere")).unwrap();
    std::fs::create_dir(pair.path("nfs/web")).unwrap();
    let (code, out, said) = pair.godwit(&["move", "web", "--to", "a", "--disk", "shared", "--dry-run"]);
    assert!(code == 3 && format!("{out}{said}").contains("a does not see `root` on shared storage"), "{out}{said}");
    let (code, _, said) = pair.godwit(&["move", "web", "--to", "a", "--disk", "shared"]);
    assert!(code == 3 && said.contains("mount the same storage"), "{code} {said}");
    std::fs::remove_dir(pair.path("nfs/web")).unwrap();
    std::fs::rename(pair.path("nfs/elsewhere"), pair.path("nfs/web")).unwrap();
    // A copy of it, as of a snapshot that somebody mounted: only a mark tells.
    let copied = Command::new("cp").arg("-a").args([pair.path("nfs"), pair.path("copy")]).status();
    assert!(copied.unwrap().success());
    mount(&pair, "a", &["--bind", pair.path("copy").to_str().unwrap(), pair.path("nfs").to_str().unwrap()]);
    let (code, _, said) = pair.godwit(&["move", "web", "--to", "a", "--disk", "shared"]);
    assert!(code != 0 && said.contains("cannot find the other host's mark"), "{code} {said}");
    mount(&pair, "a", &["-o", "remount,bind,ro", pair.path("nfs").to_str().unwrap()]);
    let (code, _, said) = pair.godwit(&["move", "web", "--to", "a", "--disk", "shared"]);
    assert!(code != 0 && said.contains("mark"), "{code} {said}");
    unmount(pair.node("a"), &pair.path("nfs"));
    assert_eq!((holder(&pair).as_str(), &pair.json(&["vm", "show", "web"])["run"]), ("b", &json!("running")));

    // What cannot be made durable stays where it is: the move is undone, and the VM runs on.
    let (node, meta) = (pair.node("b"), pair.path("nfs/web/meta"));
    let place = meta.to_str().unwrap();
    mount(&pair, "b", &["--bind", place, place]);
    mount(&pair, "b", &["-o", "remount,bind,ro", place]);
    let later = std::thread::spawn(move || {
        std::thread::sleep(std::time::Duration::from_secs(12));
        unmount(node, &meta);
    });
    assert!(guest(&pair, "b", "write -P 0x33 9M 4k"));
    let (code, _, said) = pair.godwit(&["move", "web", "--to", "a", "--disk", "shared"]);
    assert!(code == 1 && said.contains("cannot write") && said.contains("it runs at b"), "{code} {said}");
    later.join().unwrap();
    pair.until("it runs on", || pair.json(&["vm", "show", "web"])["run"] == "running");
    assert!(holder(&pair) == "b" && guest(&pair, "b", "read -P 0x33 9M 4k"));

    // A VM that goes takes its volume along; one that has its own disks does not move like this.
    pair.ok(&["vm", "stop", "web", "--force"]);
    pair.until("it is off", || pair.json(&["vm", "show", "web"])["run"] == "off");
    pair.ok(&["vm", "rm", "web"]);
    assert!(!pair.path("nfs/web").exists());
    let spec = json!({"memory": (128 << 20) + 8192, "accel": "tcg", "cpu": "qemu64", "machine": "pc-q35-7.2",
                      "disks": [{"volume": "own", "size": SIZE}]});
    pair.create("own", &spec);
    let (code, out, said) = pair.godwit(&["move", "own", "--to", "b", "--disk", "shared"]);
    assert!(code == 3 && format!("{out}{said}").contains("`own` does not lie on shared storage"), "{out}{said}");
}

#[test]
fn whoever_dies_during_the_hand_off_one_host_has_the_shared_disk_and_the_last_write() {
    let _machine = MACHINE.lock();
    if !can_run() {
        return;
    }
    let mut pair = with_a_shared_disk("sharedie");
    // (who dies, where, who has it in the end)
    let deaths = [
        ("a", "stopped", "a"),
        ("a", "sealing", "a"),
        ("a", "sealed", "b"),
        ("b", "granted", "b"),
        ("b", "started", "b"),
    ];
    for (round, (dies, point, has)) in (1_u8..).zip(deaths) {
        if pair.json(&["vm", "show", "web"])["host"] != "a" {
            moved(&pair, "a");
        }
        assert!(guest(&pair, "a", &format!("write -P {round} 8M 64k")), "{point}");
        std::fs::write(pair.path(&format!("points/{point}")), "kill").unwrap();
        let _ = std::fs::remove_file(pair.path(&format!("points/{point}.reached")));
        pair.ok(&["move", "web", "--to", "b", "--disk", "shared", "--detach"]);
        pair.until(point, || pair.path(&format!("points/{point}.reached")).exists());
        pair.kill_node(if dies == "a" { "a" } else { "b" });
        pair.start_node(if dies == "a" { "a" } else { "b" });
        pair.until("the move has ended", || {
            let vm = pair.json(&["vm", "show", "web"]);
            vm["run"] == "running" && vm["move"].is_null() && vm["mv"].is_null()
        });
        pair.until("it is where it should be", || pair.json(&["vm", "show", "web"])["host"] == has);
        assert_eq!(holder(&pair), has, "{point}");
        assert!(guest(&pair, has, &format!("read -P {round} 8M 64k")), "{point}: the last write");
        let other = if has == "a" { "b" } else { "a" };
        if pair.path(&format!("run-{other}/vms/1/disk0.sock")).exists() {
            assert!(!ghost(&pair, other, "write -P 0x99 0 64k"), "{point}: the other takes no write");
        }
    }
}
