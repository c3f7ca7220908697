//! Claims on real nodes with real QEMUs: a host is lost in the middle of a hand-off, somebody claims its VM for the other one,
//! and the host comes back with what it remembers. What may happen in which order is the simulation's; this is that the
//! nodes do it.

use crate::common::pair::{Pair, can_run};
use serde_json::{Value, json};
use std::process::Command;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// One after the other: each has two guests for a while.
static MACHINE: Mutex<()> = Mutex::new(());

const FENCED: &str = "power cut at the PDU, by ann";

/// A VM whose hand-off from `a` to `b` is held at a point of the source.
fn held_at(test: &str, point: &str) -> Pair {
    let mut pair = Pair::new(test);
    pair.start_controller();
    pair.start_node("a");
    pair.start_node("b");
    pair.create(
        "web",
        &json!({
            "memory": (128 << 20) + 8192, "accel": "tcg", "cpu": "qemu64", "machine": "pc-q35-7.2",
            "disks": [{"volume": "root", "size": 16 << 20}],
        }),
    );
    std::fs::write(pair.path(&format!("points/{point}")), "hold").unwrap();
    pair.ok(&["move", "web", "--to", "b", "--detach"]);
    pair.until("the hand-off is held", || pair.path(&format!("points/{point}.reached")).exists());
    pair
}

fn claim(pair: &Pair, said: &str) -> (i32, String) {
    let (code, _, error) = pair.godwit(&["move", "resolve", "1", "--claim", "b", "--fenced", said]);
    (code, error)
}

fn local(pair: &Pair, host: &str) -> Value {
    pair.ask(host, "GET", "/v1/vms/1").unwrap_or_default()
}

fn signal(name: &str, pids: &[u32]) {
    for pid in pids {
        assert!(Command::new("kill").args([name, &pid.to_string()]).status().unwrap().success());
    }
}

/// Claims as soon as the lost host is not heard any more, and waits until the VM runs at `b`.
fn claim_at_b(pair: &Pair) {
    pair.until("the claim is obeyed", || claim(pair, FENCED).0 == 0);
    pair.until("it runs at b", || local(pair, "b")["run"] == "running");
    pair.until("the controller knows", || pair.json(&["vm", "show", "web"])["host"] == "b");
    let vm = pair.json(&["vm", "show", "web"]);
    assert_eq!((&vm["lineage"], &vm["run"]), (&json!(1), &json!("running")), "{vm}");
}

#[test]
fn a_claimed_vm_runs_at_the_destination_and_the_source_that_comes_back_sealed_is_outranked() {
    let _machine = MACHINE.lock();
    if !can_run() {
        return;
    }
    let mut pair = held_at("sealed", "sealed");
    let (code, said) = claim(&pair, "yes");
    assert!(code != 0 && said.contains("how the other host is kept"), "{said}");
    let (code, said) = claim(&pair, FENCED);
    assert!(code != 0 && said.contains("answers, so it is not lost"), "{said}");
    // The controller does not reach the source; its peer does.
    pair.within("c", "nft add table ip cut");
    pair.within("c", "nft add chain ip cut input { type filter hook input priority 0 ; }");
    pair.within("c", "nft add rule ip cut input ip saddr 10.99.0.1 drop");
    let (code, said) = claim(&pair, FENCED);
    assert!(code != 0 && said.contains("is heard here"), "{said}");
    assert_eq!(local(&pair, "b")["lineage"], json!(0), "nothing was begun");
    pair.within("c", "nft delete table ip cut");

    pair.lose_power("a");
    std::fs::remove_file(pair.path("points/sealed")).unwrap();
    claim_at_b(&pair);
    let guest = pair.guests("b");
    assert_eq!(guest.len(), 1);

    // A keeper that does not know what its VM's QEMU does touches nothing: that QEMU may run just now.
    signal("-STOP", &guest);
    pair.kill_node("b");
    pair.start_node("b");
    pair.until("it is taken in", || local(&pair, "b")["run"] == "silent");
    for refused in [&["vm", "stop", "web", "--force"][..], &["vm", "start", "web"], &["move", "web", "--to", "a"]] {
        let (code, _, said) = pair.godwit(refused);
        assert_ne!(code, 0, "{refused:?}: {said}");
    }
    let (_, _, said) = pair.godwit(&["vm", "start", "web"]);
    assert!(said.contains("nobody knows whether the QEMU"), "{said}");
    assert_eq!(pair.guests("b"), guest, "none is begun beside it, and it is not ended");
    signal("-CONT", &guest);
    pair.until("it is known", || pair.godwit(&["vm", "start", "web"]).0 == 0);
    assert_eq!((&local(&pair, "b")["run"], pair.guests("b")), (&json!("running"), guest));

    // The source comes back with its SEALED.
    pair.start_node("a");
    pair.until("it has learnt that it lost", || {
        assert!(pair.guests("a").is_empty(), "it runs nothing, at no time");
        let there = local(&pair, "a");
        (&there["ownership"], &there["lineage"]) == (&json!("elsewhere"), &json!(1))
    });
    pair.kill_node("a");
    pair.start_node("a");
    assert_eq!(local(&pair, "a")["ownership"], "elsewhere", "and remembers it");
    assert!(pair.guests("a").is_empty());
    pair.until("its half is listed", || {
        pair.json(&["orphan", "ls"]).as_array().unwrap().iter().any(|o| o["host"] == "a" && o["kind"] == "replica")
    });

    pair.until("the controller has seen the end of the first move", || {
        let outcome = pair.json(&["move", "show", "web"])["progress"]["outcome"].clone();
        outcome != "running" && outcome != "waits-for-peer"
    });

    // What it has is the way back's beginning. The session that `b` has is with the process before this one, and it has to see that.
    pair.ok(&["move", "web", "--to", "a"]);
    let vm = pair.json(&["vm", "show", "web"]);
    assert_eq!((&vm["host"], &vm["run"], &vm["lineage"]), (&json!("a"), &json!("running"), &json!(1)));
    assert_eq!((pair.guests("a").len(), pair.guests("b").len()), (1, 0));
}

#[test]
fn an_owner_that_comes_back_after_a_claim_is_paused_and_what_it_has_is_kept() {
    let _machine = MACHINE.lock();
    if !can_run() {
        return;
    }
    // Everything is verified, and the seal is not written: the source owns the VM, and will say so.
    let mut pair = held_at("owner", "sealing");
    let guest = pair.guests("a");
    pair.kill_node("a");
    std::fs::remove_file(pair.path("points/sealing")).unwrap();
    claim_at_b(&pair);

    let back = Instant::now();
    pair.start_node("a");
    pair.until("the returning owner is told", || local(&pair, "a")["ownership"] == "elsewhere");
    let told = back.elapsed();
    pair.until("its vCPUs stand still", || local(&pair, "a")["run"] == "paused");
    println!("an owner that came back was told after {:.1} s", told.as_secs_f64());
    assert!(told < Duration::from_secs(30), "{told:?}");
    assert_eq!(local(&pair, "a")["lineage"], json!(1));
    assert_eq!(pair.guests("a"), guest, "what it holds is for people to look at");
    assert_eq!(local(&pair, "b")["run"], "running");
    let (code, _, said) = pair.godwit(&["vm", "stop", "web"]);
    assert!(code == 0 || !said.contains("`a`"), "orders go to the owner: {said}");
}
