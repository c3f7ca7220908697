//! A site is gone, and its VM is started at another one from what a pre-cache left there: on real nodes with real QEMUs.

use crate::common::pair::{Pair, can_run};
use serde_json::{Value, json};
use std::sync::Mutex;
use std::time::Duration;

/// One after the other: each has two guests for a while.
static MACHINE: Mutex<()> = Mutex::new(());

const FENCED: &str = "power cut at the PDU, by ann";

/// A VM at `a` with these disks, of which `b` has pre-caches: of the same moment, where they are images.
fn precached(test: &str, disks: &[&str], how: &[&str]) -> Pair {
    let pair = Pair::with_disks(test, disks);
    for disk in disks {
        pair.ok(&[&["volume", "precache", disk, "--to", "b", "--interval", "1s"], how].concat());
    }
    pair.until("b holds an epoch", || {
        let status = pair.json(&["volume", "status"]);
        let all: Vec<_> = status.as_array().unwrap().iter().map(|one| one["figures"].clone()).collect();
        let follows =
            |f: &Value| f["state"] == "following" && f["image"] == json!(!how.is_empty()) && f["backlog"] == 0;
        all.len() == disks.len() && all.iter().all(|f| follows(f) && f["epoch_unix_ms"] == all[0]["epoch_unix_ms"])
    });
    pair
}

fn local(pair: &Pair, host: &str) -> Value {
    pair.ask(host, "GET", "/v1/vms/1").unwrap_or_default()
}

fn promote(pair: &Pair, words: &[&str]) -> (i32, String, String) {
    pair.godwit(&[&["volume", "promote", "root", "--site", "site-b"], words].concat())
}

#[test]
fn a_vm_is_started_from_an_image_when_its_site_is_gone_and_the_site_that_comes_back_stays_off() {
    let _machine = MACHINE.lock();
    if !can_run() {
        return;
    }
    let mut pair = precached("promote", &["root", "log"], &["--consistent"]);
    let (code, _, said) = promote(&pair, &[]);
    assert!(code != 0 && said.contains("--fenced"), "{said}");
    let (code, _, said) = promote(&pair, &["--fenced", FENCED]);
    assert!(code != 0 && said.contains("answers, so it is not lost"), "{said}");
    // The controller does not reach the host; the one that has the image does.
    pair.within("c", "nft add table ip cut");
    pair.within("c", "nft add chain ip cut input { type filter hook input priority 0 ; }");
    pair.within("c", "nft add rule ip cut input ip saddr 10.99.0.1 drop");
    let (code, _, said) = promote(&pair, &["--fenced", FENCED]);
    assert!(code != 0 && said.contains("is heard here"), "{said}");
    pair.within("c", "nft delete table ip cut");
    assert!(pair.ask("b", "GET", "/v1/vms/1").is_err(), "nothing was begun");

    pair.lose_power("a");
    pair.until("the loss is seen", || promote(&pair, &["--dry-run"]).0 == 0);
    let (_, said, _) = promote(&pair, &["--dry-run"]);
    assert!(said.contains("would be started at `b` in lineage 1") && said.contains("root as of epoch 1."), "{said}");
    assert!(said.contains("log as of epoch 1.") && said.contains("they are of one moment"), "{said}");
    let (code, _, said) = promote(&pair, &["--fenced", "yes"]);
    assert!(code != 0 && said.contains("how the VM's host is kept"), "{said}");
    assert!(pair.ask("b", "GET", "/v1/vms/1").is_err(), "nothing was begun");

    let (code, done, before) = promote(&pair, &["--fenced", FENCED]);
    assert_eq!(code, 0, "{before}{}", pair.logs());
    assert!(before.contains("would be started") && before.contains("s ago; later writes are lost"), "{before}");
    assert!(done.contains("is started at `b` in lineage 1"), "{done}");
    print!("{done}");
    pair.until("it runs at b", || local(&pair, "b")["run"] == "running");
    pair.until("the controller knows", || pair.json(&["vm", "show", "web"])["host"] == "b");
    let vm = pair.json(&["vm", "show", "web"]);
    assert_eq!((&vm["lineage"], &vm["run"]), (&json!(1), &json!("running")), "{vm}");
    let guest = pair.guests("b");
    assert_eq!(guest.len(), 1);
    let disk = std::fs::read(pair.path("b/volumes/1/data")).unwrap();
    assert!(disk[..8 << 20].iter().all(|byte| *byte == 0x5a), "it is the image");
    let (code, _, said) = promote(&pair, &["--fenced", FENCED]);
    assert!(code != 0 && said.contains("`b`'s already"), "twice: {said}");

    // What was promoted outlives its node.
    pair.kill_node("b");
    pair.start_node("b");
    pair.until("it is taken in again", || local(&pair, "b")["run"] == "running");
    assert_eq!(pair.guests("b"), guest);

    // The site comes back with its OWNED: until it has been told it may boot what it has, as after any claim; then it never does.
    pair.start_node("a");
    let back = std::time::Instant::now();
    pair.until("the returning owner is told", || local(&pair, "a")["ownership"] == "elsewhere");
    println!("an owner that came back was told after {:.1} s", back.elapsed().as_secs_f64());
    assert!(back.elapsed() < Duration::from_secs(30));
    pair.until("nothing of it runs", || local(&pair, "a")["run"] != "running");
    pair.lose_power("a");
    pair.start_node("a");
    for _ in 0..30 {
        let there = local(&pair, "a");
        assert_eq!((&there["ownership"], &there["lineage"]), (&json!("elsewhere"), &json!(1)), "{there}");
        assert!(pair.guests("a").is_empty(), "it stays off");
        std::thread::sleep(Duration::from_millis(100));
    }
    assert_eq!((local(&pair, "b")["run"].clone(), pair.guests("b")), (json!("running"), guest));

    // What it has is where the way back begins.
    pair.ok(&["move", "web", "--to", "a"]);
    let vm = pair.json(&["vm", "show", "web"]);
    assert_eq!((&vm["host"], &vm["run"], &vm["lineage"]), (&json!("a"), &json!("running"), &json!(1)));
    assert_eq!((pair.guests("a").len(), pair.guests("b").len()), (1, 0));
}

/// Epochs of one moment have come, and nothing of them is in its place when the host that keeps them dies; then the site goes that sent them.
#[test]
fn whoever_promotes_brings_what_has_come_of_one_moment_to_its_place() {
    let _machine = MACHINE.lock();
    if !can_run() {
        return;
    }
    let mut pair = Pair::with_disks("moment", &["root", "log"]);
    std::fs::write(pair.path("points/moment.1"), "kill").unwrap();
    for disk in ["root", "log"] {
        pair.ok(&["volume", "precache", disk, "--to", "b", "--interval", "1s", "--consistent"]);
    }
    pair.until("b has all of a moment, and dies", || pair.path("points/moment.1.reached").exists());
    pair.kill_node("b");
    pair.lose_power("a");
    pair.start_node("b");
    pair.until("the loss is seen", || promote(&pair, &["--dry-run"]).0 == 0);
    let (code, done, before) = promote(&pair, &["--fenced", FENCED]);
    assert_eq!(code, 0, "{before}{}", pair.logs());
    assert!(done.contains("they are of one moment"), "{done}");
    pair.until("it runs at b", || local(&pair, "b")["run"] == "running");
}

#[test]
fn what_is_no_whole_image_is_not_promoted() {
    let _machine = MACHINE.lock();
    if !can_run() {
        return;
    }
    let mut pair = precached("blocks", &["root"], &[]);
    pair.lose_power("a");
    let mut said = String::new();
    for _ in 0..50 {
        said = promote(&pair, &["--dry-run"]).2;
        if said.contains("no whole image") {
            break;
        }
        std::thread::sleep(Duration::from_millis(200));
    }
    assert!(said.contains("no whole image of `root`"), "{said}");
    let (code, _, said) = promote(&pair, &["--fenced", FENCED]);
    assert!(code != 0 && said.contains("no whole image of `root`"), "{said}");
    assert!(pair.ask("b", "GET", "/v1/vms/1").is_err(), "nothing was begun");
}
