//! `godwit volume import` and `export` of volumes that a node holds, from the command line to the node's disk.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod common;

use common::pair::{Pair, can_run};
use serde_json::json;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;
use std::sync::Mutex;

/// One after the other: each has a guest.
static MACHINE: Mutex<()> = Mutex::new(());

const SIZE: usize = 16 << 20;

fn tool(program: &str, words: &[&str]) -> String {
    let output = Command::new(program).args(words).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{program} {words:?}: {said}{}", String::from_utf8_lossy(&output.stdout));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// What an image holds.
fn contents(pair: &Pair, image: &str) -> Vec<u8> {
    let raw = pair.path("raw");
    tool("qemu-img", &["convert", "-O", "raw", text(&pair.path(image)), text(&raw)]);
    std::fs::read(raw).unwrap()
}

/// Bytes, then zeroes to the volume's end.
fn filled(parts: &[(u8, usize)]) -> Vec<u8> {
    let mut all: Vec<u8> = parts.iter().flat_map(|(byte, length)| vec![*byte; *length]).collect();
    all.resize(SIZE, 0);
    all
}

/// Writes as the guest does: at the export that its QEMU has.
fn guest_writes(pair: &Pair, what: &str) {
    let socket = pair.path("run-a/vms/1/disk0.sock");
    tool("qemu-io", &["-f", "raw", "-c", what, &format!("nbd+unix:///root?socket={}", text(&socket))]);
}

fn hold(pair: &Pair, point: &str, what: &str) {
    std::fs::write(pair.path(&format!("points/{point}")), what).unwrap();
}

fn reached(pair: &Pair, point: &str) {
    pair.until(point, || pair.path(&format!("points/{point}.reached")).exists());
}

#[test]
fn a_volume_is_exported_as_it_was_when_that_began_while_its_guest_writes_on() {
    let _machine = MACHINE.lock();
    if !can_run() {
        return;
    }
    let pair = Pair::with_a_disk("export");
    hold(&pair, "export", "hold");
    let begun = pair.ok(&["volume", "export", "--volume", "root", "one.qcow2", "--detach"]);
    assert!(begun.contains("copying `root` (16.0 MiB) into one.qcow2 (qcow2) at a"), "{begun}");
    reached(&pair, "export");
    // Overwritten, discarded, and new.
    guest_writes(&pair, "write -P 0x77 1M 2M");
    guest_writes(&pair, "discard 4M 1M");
    guest_writes(&pair, "write -P 0x66 12M 1M");
    assert!(!pair.path("images/one.qcow2").exists(), "it has no name before it is whole");
    let (code, _, said) = pair.godwit(&["volume", "export", "--volume", "root", "two.qcow2"]);
    assert!(code == 1 && said.contains("is being exported"), "{said}");
    std::fs::remove_file(pair.path("points/export")).unwrap();
    pair.until("the export ends", || {
        pair.json(&["volume", "export", "--volume", "root", "--status"])["state"] == "done"
    });
    assert!(contents(&pair, "images/one.qcow2") == filled(&[(0x5a, 8 << 20)]), "as it was");

    // As it is now; sparse stays sparse.
    let done = pair.ok(&["volume", "export", "--volume", "root", text(&pair.path("now.raw")), "--format", "raw"]);
    assert!(done.contains("copied `root`"), "{done}");
    let now = filled(&[
        (0x5a, 1 << 20),
        (0x77, 2 << 20),
        (0x5a, 1 << 20),
        (0, 1 << 20),
        (0x5a, 3 << 20),
        (0, 4 << 20),
        (0x66, 1 << 20),
    ]);
    assert!(std::fs::read(pair.path("now.raw")).unwrap() == now);
    assert_eq!(
        std::fs::metadata(pair.path("now.raw")).unwrap().blocks() * 512,
        8 << 20,
        "only what was written takes room"
    );

    let words = ["volume", "export", "--volume", "root", "one.qcow2"];
    let (code, _, said) = pair.godwit(&words);
    assert!(code == 1 && said.contains("exists; say --overwrite"), "{said}");
    pair.ok(&[&words[..], &["--overwrite"]].concat());
    assert!(contents(&pair, "images/one.qcow2") == now);
    let (code, _, said) = pair.godwit(&["volume", "export", "--volume", "root", "x.img", "--format", "nosuch"]);
    assert!(code == 1 && said.contains("nosuch") && !pair.path("images/x.img").exists(), "{said}");

    // A node that dies leaves nothing of it.
    let mut pair = pair;
    hold(&pair, "export", "kill");
    let (code, _, said) = pair.godwit(&["volume", "export", "--volume", "root", "cut.qcow2", "--detach"]);
    assert!(code == 0 || code == 4, "{said}");
    reached(&pair, "export");
    pair.kill_node("a");
    pair.start_node("a");
    let (code, _, said) = pair.godwit(&["volume", "export", "--volume", "root", "--status"]);
    assert!(code == 1 && said.contains("knows of no import or export"), "{said}");
    let left: Vec<_> = std::fs::read_dir(pair.path("images")).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(left, ["one.qcow2"]);
}

#[test]
fn an_image_becomes_a_volume_whole_or_not_at_all() {
    let _machine = MACHINE.lock();
    if !can_run() {
        return;
    }
    let mut pair = Pair::with_a_disk("import");
    std::fs::write(pair.path("new.raw"), [vec![0; 1 << 20], vec![0x33; 2 << 20]].concat()).unwrap();
    tool("qemu-img", &["convert", "-O", "qcow2", text(&pair.path("new.raw")), text(&pair.path("images/new.qcow2"))]);
    tool("qemu-img", &["create", "-q", "-f", "qcow2", text(&pair.path("images/large.qcow2")), "17M"]);
    let backing = pair.path("new.raw");
    let over = pair.path("images/over.qcow2");
    tool("qemu-img", &["create", "-q", "-f", "qcow2", "-b", text(&backing), "-F", "raw", text(&over)]);
    let import = |pair: &Pair, image: &str, more: &[&str]| {
        pair.godwit(&[&["volume", "import", "--volume", "root", image], more].concat())
    };

    let (code, _, said) = import(&pair, "new.qcow2", &["--overwrite"]);
    assert!(code == 1 && said.contains("is not off"), "{said}");
    pair.ok(&["vm", "stop", "web", "--force"]);
    pair.until("it is off", || pair.json(&["vm", "show", "web"])["run"] == "off");
    for (image, more, why) in [
        ("new.qcow2", &[][..], "was written to; say --overwrite"),
        ("none.qcow2", &["--overwrite"], "No such file"),
        ("large.qcow2", &["--overwrite"], "large enough"),
        ("over.qcow2", &["--overwrite"], "no whole image: it leads to"),
        ("new.qcow2", &["--overwrite", "--format", "vmdk"], "VMDK"),
    ] {
        let (code, _, said) = import(&pair, image, more);
        assert!(code == 1 && said.contains(why), "{image}: {said}");
    }
    let data = pair.path("a/volumes/1/data");
    assert!(std::fs::read(&data).unwrap() == filled(&[(0x5a, 8 << 20)]), "nothing was touched");

    // It waits for its image, over whatever dies.
    hold(&pair, "import", "hold");
    pair.ok(&["volume", "import", "--volume", "root", "new.qcow2", "--overwrite", "--detach"]);
    reached(&pair, "import");
    let (code, _, said) = pair.godwit(&["vm", "start", "web"]);
    assert!(code == 1 && said.contains("waits for an image"), "{said}");
    let (code, _, said) = pair.godwit(&["volume", "export", "--volume", "root", "half.qcow2"]);
    assert!(code == 1 && said.contains("is being imported"), "{said}");
    pair.kill_node("a");
    std::fs::remove_file(pair.path("points/import")).unwrap();
    pair.start_node("a");
    let (code, _, said) = pair.godwit(&["vm", "start", "web"]);
    assert!(code == 1 && said.contains("an import into `root` broke off"), "{said}");
    let (code, _, said) = pair.godwit(&["volume", "export", "--volume", "root", "half.qcow2"]);
    assert!(code == 1 && said.contains("holds half an image"), "{said}");

    // One that is ended by somebody, then one that succeeds: half an image needs no permission to be lost.
    std::fs::remove_file(pair.path("points/import.reached")).unwrap();
    hold(&pair, "import", "hold");
    pair.ok(&["volume", "import", "--volume", "root", "new.qcow2", "--detach"]);
    reached(&pair, "import");
    let release = pair.path("points/import");
    let releasing = std::thread::spawn(move || {
        std::thread::sleep(std::time::Duration::from_millis(300));
        std::fs::remove_file(release).unwrap();
    });
    let ended = pair.json(&["volume", "import", "--volume", "root", "--cancel"]);
    releasing.join().unwrap();
    assert_eq!(ended["state"], "failed", "{ended}");
    let (code, _, said) = pair.godwit(&["vm", "start", "web"]);
    assert!(code == 1 && said.contains("broke off"), "{said}");
    let done = pair.json(&["volume", "import", "--volume", "root", "new.qcow2"]);
    assert_eq!(
        (&done["state"], &done["done"], &done["format"]),
        (&json!("done"), &json!(1.0), &json!("qcow2")),
        "{done}"
    );
    let new = filled(&[(0, 1 << 20), (0x33, 2 << 20)]);
    assert!(std::fs::read(&data).unwrap() == new);
    assert_eq!(std::fs::metadata(&data).unwrap().blocks() * 512, 2 << 20, "sparse stays sparse");
    pair.ok(&["vm", "start", "web"]);
    pair.until("it runs", || pair.json(&["vm", "show", "web"])["run"] == "running");

    // The stamps of what was there went on counting: the other site gets all of it, and nothing of what was before.
    pair.ok(&["move", "web", "--to", "b"]);
    assert!(std::fs::read(pair.path("b/volumes/1/data")).unwrap() == new);

    // A VM that is being made takes any format, too; and what is no image makes none.
    let spec = |from: &str| {
        json!({"memory": (128 << 20) + 8192, "accel": "tcg", "cpu": "qemu64", "machine": "pc-q35-7.2",
               "disks": [{"volume": "second", "size": SIZE, "from": from}]})
    };
    let file = pair.path("bad.json");
    std::fs::write(&file, spec("over.qcow2").to_string()).unwrap();
    let (code, _, said) = pair.godwit(&["vm", "create", "two", "--at", "a", "--file", text(&file)]);
    assert!(code == 1 && said.contains("no whole image"), "{said}");
    assert!(!pair.path("a/volumes/2").exists(), "nothing is left of it");
    pair.create("two", &spec("new.qcow2"));
    assert!(std::fs::read(pair.path("a/volumes/3/data")).unwrap() == new);

    // A deletion ends an import.
    pair.ok(&["vm", "stop", "two", "--force"]);
    pair.until("it is off", || pair.json(&["vm", "show", "two"])["run"] == "off");
    pair.ok(&["volume", "import", "--volume", "second", "new.qcow2", "--overwrite", "--detach"]);
    pair.ok(&["vm", "rm", "two"]);
    assert!(!pair.path("a/volumes/3").exists());
}
