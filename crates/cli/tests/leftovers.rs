//! What a node that was killed has left in the network: found, and removed when the controller says so; what is a living VM's
//! is neither.

use crate::common;
use crate::common::pair::{Pair, can_run};
use serde_json::{Value, json};
use std::collections::BTreeSet;

/// A VM that boots from a disk that has nothing to boot, wired to the gateway at `b`.
fn spec(volume: &str, mac: &str) -> Value {
    json!({
        "memory": (128 << 20) + 8192, "accel": "tcg", "cpu": "qemu64", "machine": "pc-q35-7.2",
        "disks": [{"volume": volume, "size": 16 << 20}], "nics": [{"mac": mac, "component": "out"}],
    })
}

/// The names of interfaces of ours at a host, and the numbers that there are rules for.
fn network(pair: &Pair, host: &str) -> BTreeSet<String> {
    let links = pair.within(host, "ip -o link");
    let names = links.lines().filter_map(|line| line.split(": ").nth(1));
    let names = names.map(|name| name.split('@').next().unwrap().to_owned()).filter(|name| name.starts_with("gw"));
    let rules = pair.within(host, "nft list ruleset");
    let rules = rules.lines().filter_map(|line| line.trim().strip_prefix("chain w")?.strip_suffix(" {"));
    names.chain(rules.map(|number| format!("rules of {number}"))).collect()
}

fn orphans(pair: &Pair, host: &str) -> Vec<Value> {
    let found = pair.ask(host, "GET", "/v1/orphans").unwrap();
    found.as_array().unwrap().clone()
}

#[test]
fn what_a_killed_node_left_in_the_network_is_found_and_removed_and_a_living_vms_is_not() {
    if !can_run() {
        return;
    }
    let mut pair = Pair::new("left");
    pair.start_controller();
    pair.start_node("a");
    pair.start_node("b");
    pair.within("b", "ip link add lan type bridge");
    pair.ok(&["component", "add", "out", "--gateway", "b:lan"]);
    pair.create("web", &spec("web", "02:00:00:00:00:01"));
    let living = (network(&pair, "a"), network(&pair, "b"));
    pair.create("old", &spec("old", "02:00:00:00:00:02"));
    let both = (network(&pair, "a"), network(&pair, "b"));
    let left: BTreeSet<&String> = both.0.difference(&living.0).collect();
    let left_at_gateway: BTreeSet<&String> = both.1.difference(&living.1).collect();
    let of_old = ["gw-b00000002", "gw-v00000002", "gwt2", "rules of 2"].map(String::from);
    assert_eq!(left, of_old.iter().collect());
    let at_gateway = ["gw-g00000002", "rules of 2"].map(String::from);
    assert_eq!(left_at_gateway, at_gateway.iter().collect());
    let end = |name: &str| {
        let ports = format!("port-{name}");
        orphans(&pair, "b").into_iter().find(|o| o["id"] == ports.as_str())
    };
    assert!(end("gw-g00000002").is_some(), "a gateway's host lists what it has");
    assert_eq!(pair.json(&["orphan", "ls"]), json!([]), "the controller knows that it is in use");

    // Its node is killed, and all that it wrote about `old` is lost, and the guest; what the kernel has stays. A rule is there
    // whose tunnel was never made: it died between the two.
    pair.kill_node("a");
    let adopted: Vec<u32> = common::guests(&pair.path("run-a/vms/1"));
    for pid in common::guests(&pair.path("run-a/vms/2")) {
        assert!(std::process::Command::new("kill").args(["-9", &pid.to_string()]).status().unwrap().success());
    }
    pair.until("the guest is gone", || common::guests(&pair.path("run-a/vms/2")).is_empty());
    for lost in ["a/vms/2", "run-a/vms/2", "a/volumes/2"] {
        std::fs::remove_dir_all(pair.path(lost)).unwrap();
    }
    for record in std::fs::read_dir(pair.path("a/records")).into_iter().flatten().flatten() {
        if record.file_name().to_string_lossy().starts_with('2') {
            let _ = std::fs::remove_file(record.path());
        }
    }
    pair.within("a", "nft add chain inet gw-wires w77");
    pair.start_node("a");

    let found = orphans(&pair, "a");
    let ids: BTreeSet<&str> = found.iter().map(|o| o["id"].as_str().unwrap()).collect();
    let wanted = ["interface-gw-b00000002", "interface-gw-v00000002", "interface-gwt2", "rules-77"];
    assert!(wanted.iter().all(|id| ids.contains(id)), "{ids:?}");
    assert!(ids.iter().all(|id| wanted.contains(id) || *id == "record-2"), "what is `web`'s is not listed: {ids:?}");
    assert_eq!(adopted, pair.guests("a"), "`web` runs on, under the new node");

    // The controller keeps what is nobody's for ten minutes, and says why. A node does as its controller says.
    let judged = pair.json(&["orphan", "ls"]);
    let judged = judged.as_array().unwrap();
    let rules = judged.iter().find(|o| o["id"] == "rules-77").unwrap();
    assert_eq!((&rules["removable"], &rules["number"]), (&json!(false), &json!(77)), "{rules}");
    for id in wanted {
        pair.ask("a", "DELETE", &format!("/v1/orphans/{id}")).unwrap();
    }
    assert_eq!(network(&pair, "a"), living.0, "with the tunnel its rules have gone");
    let gone = pair.ask("a", "DELETE", "/v1/orphans/interface-gwt1").unwrap_err();
    assert!(gone.contains("no orphan"), "{gone}");

    // The gateway's end: the VM is deleted, and its gateway's host did not hear of it.
    pair.ask("b", "DELETE", "/v1/orphans/port-gw-g00000002").unwrap();
    assert_eq!(network(&pair, "b"), living.1);
    assert_eq!(adopted, pair.guests("a"));
}
