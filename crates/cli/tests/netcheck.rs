//! `godwit net check` on real nodes: each thing that is put wrong by hand is found, on its host, and nothing else is.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod common;

use common::pair::{Pair, can_run};
use serde_json::Value;
use std::path::Path;
use std::process::{Command, Stdio};

/// Ends the nodes, then the processes that keep components' namespaces of this test.
struct World(Pair);

impl Drop for World {
    fn drop(&mut self) {
        for name in ["a", "b"] {
            if self.0.has(name) {
                self.0.kill_node(name);
            }
        }
        for pid in holders(self.0.folder.path()) {
            let _ = Command::new("kill").args(["-9", &pid.to_string()]).status();
        }
    }
}

fn holders(folder: &Path) -> Vec<u32> {
    let mine = format!("GODWIT_COMPONENT={}", folder.display());
    let entries = std::fs::read_dir("/proc").unwrap().filter_map(Result::ok);
    let pids = entries.filter_map(|e| e.file_name().to_str()?.parse().ok());
    let is_mine = |pid: &u32| {
        let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environment.split(|b| *b == 0).any(|line| line.starts_with(mine.as_bytes()))
    };
    pids.filter(is_mine).collect()
}

/// What is found: of what kind, and where.
fn found(pair: &Pair) -> Vec<(String, String)> {
    let (_, out, said) = pair.godwit(&["net", "check", "--json"]);
    let found: Value = serde_json::from_str(&out).unwrap_or_else(|e| panic!("{e}: {out}{said}{}", pair.logs()));
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    found.as_array().unwrap().iter().map(|f| (text(&f["kind"]), text(&f["host"]))).collect()
}

/// Puts something wrong at `a`, sees that it is found, puts it right, and sees that it is not any more.
fn is_found(pair: &Pair, kind: &str, wrong: &str, right: &str) {
    pair.within("a", wrong);
    assert_eq!(found(pair), [(kind.to_owned(), "a".to_owned())], "{wrong}");
    assert_eq!(pair.godwit(&["net", "check"]).0, 1);
    pair.within("a", right);
    assert_eq!(found(pair), [], "{right}");
}

#[test]
fn what_was_put_wrong_on_a_host_is_found_and_nothing_else() {
    if !can_run() {
        return;
    }
    let mut world = World(Pair::new("check"));
    let pair = &mut world.0;
    pair.start_controller();
    pair.start_node("a");
    pair.start_node("b");
    for (name, host) in [("s1", "a"), ("s2", "b"), ("s3", "a")] {
        pair.ok(&["component", "create", name, "--kind", "switch", "--ports", "2", "--host", host]);
    }
    pair.ok(&["wire", "connect", "s1:p1", "s2:p1"]);
    pair.ok(&["wire", "connect", "s1:p2", "s3:p1"]);
    assert_eq!(found(pair), []);
    assert!(pair.ok(&["net", "check"]).contains("nothing is wrong"));

    let links = pair.within("a", "ip -o link");
    let names = || links.lines().filter_map(|line| line.split(": ").nth(1)?.split('@').next());
    let tunnel = names().find(|name| name.starts_with("gw-v")).unwrap();
    let device = names().find(|name| name.starts_with("gwt")).unwrap();
    let all = "00:00:00:00:00:00";
    is_found(
        pair,
        "forwarding",
        &format!("bridge fdb append {all} dev {tunnel} dst 10.99.0.77"),
        &format!("bridge fdb del {all} dev {tunnel} dst 10.99.0.77"),
    );
    is_found(
        pair,
        "forwarding",
        &format!("bridge fdb del {all} dev {tunnel} dst 10.99.0.2"),
        &format!("bridge fdb append {all} dev {tunnel} dst 10.99.0.2"),
    );
    is_found(
        pair,
        "forwarding",
        &format!("bridge fdb replace 02:00:00:00:00:01 dev {tunnel} dst 10.99.0.2 self static"),
        &format!("bridge fdb del 02:00:00:00:00:01 dev {tunnel} dst 10.99.0.2 self"),
    );
    is_found(pair, "mtu", &format!("ip link set {device} mtu 1400"), &format!("ip link set {device} mtu 1500"));
    is_found(pair, "mtu", &format!("ip link set {tunnel} mtu 1400"), &format!("ip link set {tunnel} mtu 1500"));
    is_found(pair, "interface", "ip link add gwt999 type veth peer name other", "ip link del gwt999");
    is_found(pair, "interface", "ip link add gw-b0000ffff type bridge", "ip link del gw-b0000ffff");
    is_found(
        pair,
        "interface",
        "ip link add gw-v0000ffff type vxlan id 999 dstport 4789 local 10.99.0.1",
        "ip link del gw-v0000ffff",
    );

    // A namespace that nobody knows, as of a component whose records were lost.
    let file = pair.path("run-a/components/77.pid");
    let mut holder = Command::new("sleep");
    holder.arg("600").env_clear().env("GODWIT_COMPONENT", &file).stdin(Stdio::null());
    let mut holder = holder.spawn().unwrap();
    std::fs::write(&file, holder.id().to_string()).unwrap();
    let seen = found(pair);
    holder.kill().unwrap();
    holder.wait().unwrap();
    assert_eq!(seen, [("namespace".to_owned(), "a".to_owned())]);
    assert_eq!(found(pair), []);

    // The other host is silent, and so is its link.
    pair.kill_node("b");
    pair.within("b", "ip link set under down");
    pair.within("a", "ip neigh flush dev under");
    let _ = pair.command("a", "ping").args(["-c1", "-W3", "10.99.0.2"]).stdout(Stdio::null()).status();
    let seen = found(pair);
    assert!(seen.contains(&("neighbour".into(), "a".into())), "{seen:?}");
    assert!(seen.contains(&("host".into(), "b".into())), "{seen:?}");
}
