//! `godwit volume import` and `export` of volumes that a node holds, from the command line to the node's disk.

use crate::common::pair::{Pair, can_run};
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
    guest_writes_at(pair, "a", what);
}

fn guest_writes_at(pair: &Pair, host: &str, what: &str) {
    let socket = pair.path(&format!("run-{host}/vms/1/disk0.sock"));
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

/// Begins an export that is held, and has its guest overwrite something.
fn begin_held(pair: &Pair, image: &str) {
    let _ = std::fs::remove_file(pair.path("points/export.reached"));
    hold(pair, "export", "hold");
    pair.ok(&["volume", "export", "--volume", "root", image, "--detach"]);
    reached(pair, "export");
}

fn export_stands(pair: &Pair) -> serde_json::Value {
    pair.json(&["volume", "export", "--volume", "root", "--status"])
}

fn ended(pair: &Pair) -> serde_json::Value {
    std::fs::remove_file(pair.path("points/export")).unwrap();
    pair.until("the export ends", || export_stands(pair)["state"] != "copying");
    export_stands(pair)
}

#[test]
fn an_export_goes_on_where_it_began_when_its_vm_moves_away() {
    let _machine = MACHINE.lock();
    if !can_run() {
        return;
    }
    let pair = Pair::with_a_disk("exportmove");
    begin_held(&pair, "one.qcow2");
    guest_writes(&pair, "write -P 0x77 1M 2M");
    pair.ok(&["move", "web", "--to", "b"]);
    guest_writes_at(&pair, "b", "write -P 0x66 3M 2M");
    let stands = export_stands(&pair);
    assert_eq!((&stands["host"], &stands["state"]), (&json!("a"), &json!("copying")), "{stands}");
    // What would change the blocks that are still to be read waits.
    pair.ok(&["volume", "precache", "root", "--to", "a", "--interval", "1s"]);
    pair.until("the pre-cache says why it waits", || {
        pair.json(&["volume", "status"]).to_string().contains("still being exported at a")
    });
    // Another one of the same volume, where it is now.
    std::fs::remove_file(pair.path("points/export.reached")).unwrap();
    let now = filled(&[(0x5a, 1 << 20), (0x77, 2 << 20), (0x66, 2 << 20), (0x5a, 3 << 20)]);
    let release = pair.path("points/export");
    let other = pair.ok(&["volume", "export", "--volume", "root", "two.qcow2", "--detach"]);
    assert!(other.contains("at b"), "{other}");
    reached(&pair, "export");
    std::fs::remove_file(release).unwrap();
    pair.until("both exports end", || export_stands(&pair)["state"] != "copying");
    let stands = export_stands(&pair);
    assert_eq!((&stands["host"], &stands["state"]), (&json!("b"), &json!("done")), "{stands}");
    assert!(contents(&pair, "images/one.qcow2") == filled(&[(0x5a, 8 << 20)]), "as it was when it began");
    assert!(contents(&pair, "images/two.qcow2") == now);
    pair.until("the pre-cache goes on", || std::fs::read(pair.path("a/volumes/1/data")).unwrap() == now);
}

#[test]
fn an_export_that_begins_during_a_move_is_of_that_moment_and_one_of_what_has_not_come_yet_is_refused() {
    let _machine = MACHINE.lock();
    if !can_run() {
        return;
    }
    let pair = Pair::with_a_disk("moveexport");
    hold(&pair, "copy-disk", "hold");
    pair.ok(&["move", "web", "--to", "b", "--detach"]);
    reached(&pair, "copy-disk");
    begin_held(&pair, "one.qcow2");
    guest_writes(&pair, "write -P 0x77 1M 2M");
    std::fs::remove_file(pair.path("points/copy-disk")).unwrap();
    pair.until("it has moved", || pair.json(&["vm", "show", "web"])["host"] == "b");
    guest_writes_at(&pair, "b", "write -P 0x66 3M 2M");
    let done = ended(&pair);
    assert_eq!((&done["host"], &done["state"]), (&json!("a"), &json!("done")), "{done}");
    assert!(contents(&pair, "images/one.qcow2") == filled(&[(0x5a, 8 << 20)]), "as it was when it began");
    pair.until("the move has ended", || pair.json(&["move", "ls"]).to_string().contains("completed"));

    // One that its VM comes back to breaks off, and says so; the VM is whole.
    guest_writes_at(&pair, "b", "write -P 0x44 0 1M");
    begin_held(&pair, "three.qcow2");
    pair.ok(&["move", "web", "--to", "a"]);
    guest_writes(&pair, "write -P 0x33 5M 1M");
    pair.ok(&["move", "web", "--to", "b"]);
    let broken = ended(&pair);
    let why = broken["error"]["message"].as_str().unwrap_or_default();
    assert!(broken["state"] == "failed" && why.contains("comes back to this host"), "{broken}");
    assert!(!pair.path("images/three.qcow2").exists());

    // The VM runs here, and its blocks follow: from a host that is cut off.
    guest_writes_at(&pair, "b", "write -P 0x22 6M 1M");
    hold(&pair, "granted", "hold");
    pair.ok(&["move", "web", "--to", "a", "--disk", "postcopy", "--detach"]);
    reached(&pair, "granted");
    pair.within("c", "ip link set to-b down");
    std::fs::remove_file(pair.path("points/granted")).unwrap();
    pair.until("it has moved", || pair.json(&["vm", "show", "web"])["host"] == "a");
    let words = ["volume", "export", "--volume", "root", "four.qcow2"];
    let (code, _, said) = pair.godwit(&words);
    assert!(code == 1 && said.contains("not all here yet") && said.contains("until the fill has ended"), "{said}");
    pair.within("c", "ip link set to-b up");
    pair.until("it is whole", || pair.godwit(&words).0 == 0);
    let now = [(0x44, 1 << 20), (0x77, 2 << 20), (0x66, 2 << 20), (0x33, 1 << 20), (0x22, 1 << 20), (0x5a, 1 << 20)];
    assert!(contents(&pair, "images/four.qcow2") == filled(&now));
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

#[test]
fn a_vm_has_one_import_at_a_time_and_half_of_one_is_not_forgotten_for_another() {
    let _machine = MACHINE.lock();
    if !can_run() {
        return;
    }
    let mut pair = Pair::with_a_disk("imports");
    std::fs::write(pair.path("images/new.raw"), vec![0x33; 2 << 20]).unwrap();
    let spec = json!({
        "memory": (128 << 20) + 8192, "accel": "tcg", "cpu": "qemu64", "machine": "pc-q35-7.2",
        "disks": [{"volume": "system", "size": SIZE}, {"volume": "data", "size": SIZE}],
    });
    let file = pair.path("both.json");
    std::fs::write(&file, spec.to_string()).unwrap();
    pair.ok(&["vm", "create", "both", "--at", "a", "--file", text(&file)]);
    let import = |pair: &Pair, volume: &str, more: &[&str]| {
        pair.godwit(&[&["volume", "import", "--volume", volume, "new.raw"], more].concat())
    };
    hold(&pair, "import", "hold");
    let (code, _, said) = import(&pair, "system", &["--detach"]);
    assert_eq!(code, 0, "{said}");
    reached(&pair, "import");
    let (code, _, said) = import(&pair, "data", &["--detach"]);
    assert!(code == 1 && said.contains("waits for an image that is copied into `system`"), "{said}");
    pair.kill_node("a");
    std::fs::remove_file(pair.path("points/import")).unwrap();
    pair.start_node("a");
    // Its end would be taken for the other one's.
    let (code, _, said) = import(&pair, "data", &[]);
    assert!(code == 1 && said.contains("an import into `system` broke off"), "{said}");
    let (code, _, said) = import(&pair, "system", &[]);
    assert_eq!(code, 0, "{said}");
    let (code, _, said) = import(&pair, "data", &[]);
    assert_eq!(code, 0, "{said}");
    pair.ok(&["vm", "start", "both"]);
}
