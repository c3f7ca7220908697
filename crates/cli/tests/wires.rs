//! Wires between the interfaces of real guests, through moves: as users order them, and with the controller gone. The guests are the
//! lab's tiny image with a program that pings the other one and says so on its console.

use crate::common;
use crate::common::pair::{Pair, can_run};
use serde_json::{Value, json};
use std::path::Path;

/// Two hosts with a controller, `web` on `a` and `db` on `b`; neither is wired.
fn two_guests(test: &str, tiny: &Path) -> Pair {
    let mut pair = Pair::new(test);
    let pings = b"#!/bin/busybox sh\nexec /bin/busybox ping \"$1\"\n";
    common::with_program(tiny, &pair.path("images"), "bin/godwit-load", pings);
    pair.start_controller();
    pair.start_node("a");
    pair.start_node("b");
    for (name, at, number, other) in [("web", "a", 1, 2), ("db", "b", 2, 1)] {
        let cmdline = format!(
            "console=ttyS0 quiet panic=-1 random.trust_cpu=on no_timer_check tsc=reliable clocksource=tsc nowatchdog \
             godwit.ip=10.9.0.{number}/24 godwit.mtu=1500 godwit.args=10.9.0.{other}"
        );
        let spec = json!({
            "memory": (128 << 20) + 8192, "accel": "tcg", "cpu": "qemu64,+rdrand,+ssse3,+sse4.1,+sse4.2,+popcnt",
            "boot": {"kernel": {"kernel": "vmlinuz", "initrd": "initrd", "cmdline": cmdline}},
            "nics": [{"mac": format!("02:00:00:00:00:0{number}"), "ips": [format!("10.9.0.{number}")]}],
        });
        let file = pair.path(&format!("{name}.json"));
        std::fs::write(&file, spec.to_string()).unwrap();
        pair.ok(&["vm", "create", name, "--at", at, "--file", file.to_str().unwrap(), "--start"]);
    }
    for (vm, host) in [(1, "a"), (2, "b")] {
        pair.until("the guest is up", || console(&pair, host, vm).contains("PING 10.9.0"));
    }
    pair
}

fn console(pair: &Pair, host: &str, vm: u64) -> String {
    let path = pair.path(&format!("{host}/vms/{vm}/console.log"));
    String::from_utf8_lossy(&std::fs::read(path).unwrap_or_default()).into_owned()
}

/// The answers that a guest has had, as its console at that host tells.
fn answers(pair: &Pair, host: &str, vm: u64) -> usize {
    console(pair, host, vm).matches("bytes from 10.9.0").count()
}

/// Waits until both guests, at these hosts, have further answers.
fn they_talk(pair: &Pair, web: &str, db: &str) {
    let before = (answers(pair, web, 1), answers(pair, db, 2));
    pair.until("the guests talk", || answers(pair, web, 1) > before.0 + 1 && answers(pair, db, 2) > before.1 + 1);
}

/// The names of a host's interfaces that are the wire's.
fn interfaces(pair: &Pair, host: &str) -> Vec<String> {
    let out = pair.within(host, "ip -o link show");
    let names = out.lines().filter_map(|line| line.split(": ").nth(1)).map(|name| name.split('@').next().unwrap());
    let mut names: Vec<String> =
        names.filter(|name| name.starts_with("gw-")).map(|name| name[..4].to_owned()).collect();
    names.sort();
    names
}

fn wire(pair: &Pair) -> Value {
    pair.json(&["wire", "show", "web:eth0"])
}

#[test]
fn a_wire_joins_two_guests_follows_both_and_collapses_where_they_meet() {
    let Some(tiny) = common::tiny().filter(|_| can_run()) else { return };
    let pair = two_guests("wire", &tiny);
    let (code, _, said) = pair.godwit(&["wire", "connect", "web:eth0", "db:eth1"]);
    assert!(code != 0 && said.contains("eth0"), "{said}");
    assert_eq!((answers(&pair, "a", 1), answers(&pair, "b", 2)), (0, 0), "they talk without a wire");

    pair.ok(&["wire", "connect", "web:eth0", "db:eth0"]);
    they_talk(&pair, "a", "b");
    let (code, _, said) = pair.godwit(&["wire", "connect", "db:eth0", "web:eth0"]);
    assert!(code != 0 && said.contains("wired already"), "{said}");
    let shown = wire(&pair);
    assert_eq!((shown["state"].as_str(), shown["path"].as_str()), (Some("connected"), Some("tunnel")), "{shown}");
    for host in ["a", "b"] {
        assert_eq!(interfaces(&pair, host), ["gw-b", "gw-p", "gw-v"], "{host}");
        assert_eq!(pair.json(&["orphan", "ls"]), json!([]));
    }
    let (code, _, said) = pair.godwit(&["vm", "stop", "web", "--force"]);
    assert_eq!(code, 0, "{said}");
    let (code, _, said) = pair.godwit(&["vm", "rm", "web"]);
    assert!(code != 0 && (said.contains("is wired") || said.contains("not off")), "{said}");
    pair.ok(&["vm", "start", "web"]);
    they_talk(&pair, "a", "b");

    // A move succeeds only when the guest has been heard from the other end's host.
    pair.ok(&["move", "web", "--to", "b"]);
    they_talk(&pair, "b", "b");
    let shown = wire(&pair);
    assert_eq!(shown["path"].as_str(), Some("collapsed"), "{shown}");
    assert_eq!(shown["ends"][0]["local"]["remotes"], json!([]), "{shown}");
    assert_eq!(interfaces(&pair, "b"), ["gw-b", "gw-p"]);
    pair.until("nothing is left where it was", || interfaces(&pair, "a").iter().all(|name| name == "gw-p"));

    pair.ok(&["move", "db", "--to", "a"]);
    they_talk(&pair, "b", "a");
    assert_eq!(wire(&pair)["path"].as_str(), Some("tunnel"));

    pair.ok(&["wire", "disconnect", "db:eth0", "web:eth0"]);
    let quiet = || (answers(&pair, "b", 1), answers(&pair, "a", 2));
    // One answer may be on its way still.
    std::thread::sleep(std::time::Duration::from_secs(1));
    let before = quiet();
    std::thread::sleep(std::time::Duration::from_secs(3));
    assert_eq!(quiet(), before, "they talk over a wire that was disconnected");
    assert_eq!(pair.json(&["wire", "ls"]), json!([]));
    for host in ["a", "b"] {
        assert_eq!(interfaces(&pair, host), ["gw-p"], "{host}");
        assert!(!pair.within(host, "nft list ruleset").contains("jump"));
    }
}

#[test]
fn a_guest_whose_network_cannot_be_isolated_stays_where_it_is_and_moves_when_it_can() {
    let Some(tiny) = common::tiny().filter(|_| can_run()) else { return };
    let pair = two_guests("pen", &tiny);
    pair.ok(&["wire", "connect", "web:eth0", "db:eth0"]);
    they_talk(&pair, "a", "b");
    // Something else has the name of the bridge that endpoints are isolated on.
    pair.within("a", "ip link del gw-pen");
    pair.within("a", "ip tuntap add gw-pen mode tap");
    let (code, _, said) = pair.godwit(&["move", "web", "--to", "b"]);
    assert!(code != 0 && said.contains("cannot be isolated"), "{said}");
    they_talk(&pair, "a", "b");
    pair.within("a", "ip link del gw-pen");
    pair.ok(&["move", "web", "--to", "b"]);
    they_talk(&pair, "b", "b");
}

#[test]
fn both_ends_of_a_wire_change_places_with_the_controller_gone() {
    let Some(tiny) = common::tiny().filter(|_| can_run()) else { return };
    let mut pair = two_guests("swap", &tiny);
    pair.ok(&["wire", "connect", "web:eth0", "db:eth0"]);
    they_talk(&pair, "a", "b");
    pair.ok(&["move", "web", "--to", "b", "--detach"]);
    pair.ok(&["move", "db", "--to", "a", "--detach"]);
    pair.until("both moves are under way", || {
        ["a", "b"].iter().all(|host| pair.guests(host).len() == 2)
            || !console(&pair, "b", 1).is_empty() && !console(&pair, "a", 2).is_empty()
    });
    pair.kill_node("c");
    they_talk(&pair, "b", "a");
    // And what each node believes, is so.
    for host in ["a", "b"] {
        let wires = pair.ask(host, "GET", "/v1/wires").unwrap();
        let at = |end: usize| wires[0]["wire"]["ends"][end]["view"]["host"]["name"].as_str().unwrap().to_owned();
        assert_eq!((at(0), at(1)), ("b".into(), "a".into()), "{wires}");
        assert_eq!(wires[0]["untold"], json!([]), "{wires}");
    }
    pair.start_controller();
    pair.until("the controller has heard", || {
        let shown = wire(&pair);
        shown["ends"][0]["host"] == "b" && shown["ends"][1]["host"] == "a"
    });
    they_talk(&pair, "b", "a");
}
