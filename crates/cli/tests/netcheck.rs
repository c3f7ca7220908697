//! `godwit net` on real nodes: each thing that is put wrong by hand is found, on its host, and nothing else is; frames are recorded at
//! both ends of a wire.

use crate::common::holders;
use crate::common::pair::{Pair, can_run};
use serde_json::Value;
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// Ends the nodes, then the processes that keep components' namespaces of this test.
struct World(Pair);

impl Drop for World {
    fn drop(&mut self) {
        for name in ["a", "b", "d"] {
            if self.0.has(name) {
                self.0.kill_node(name);
            }
        }
        for pid in holders(self.0.folder.path()) {
            let _ = Command::new("kill").args(["-9", &pid.to_string()]).status();
        }
    }
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
    // What leads out of a gateway is Godwit's, too.
    let out = pair.path("out");
    std::fs::write(&out, "outside = { bridge = \"lan\", addresses = [\"10.6.0.1/24\"] }\n").unwrap();
    pair.within("a", "ip link add lan type bridge");
    pair.within("a", "ip link set lan up");
    let out = out.to_str().unwrap();
    pair.ok(&["component", "create", "g1", "--kind", "gateway", "--ports", "1", "--host", "a", "--config", out]);
    assert!(pair.within("a", "ip -o link").contains("gwo"), "nothing leads out of it");
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
    let way_out = names().find(|name| name.starts_with("gwo")).unwrap();
    let bridge = format!("gw-b{}", tunnel.strip_prefix("gw-v").unwrap());
    for (wrong, right) in [
        (format!("ip link set {tunnel} nomaster"), format!("ip link set {tunnel} master {bridge}")),
        (format!("ip link set {bridge} down"), format!("ip link set {bridge} up")),
        (format!("ip link set {way_out} nomaster"), format!("ip link set {way_out} master lan")),
        ("ip link set lan down".to_owned(), "ip link set lan up".to_owned()),
    ] {
        is_found(pair, "forwarding", &wrong, &right);
    }
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

    pair.kill_node("b");
    let seen = found(pair);
    assert!(seen.contains(&("host".into(), "b".into())), "{seen:?}");
}

/// The frames of a recording, each with its full length.
fn recorded(file: &Path) -> Vec<(u32, Vec<u8>)> {
    let bytes = std::fs::read(file).unwrap();
    let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    assert_eq!((word(0), word(20)), (0xa1b2_c3d4, 1), "no recording of Ethernet");
    let (mut at, mut frames) = (24, vec![]);
    while at < bytes.len() {
        let kept = word(at + 8) as usize;
        frames.push((word(at + 12), bytes[at + 16..at + 16 + kept].to_vec()));
        at += 16 + kept;
    }
    frames
}

/// A router at a, r1, that is wired to one at b, r2, and pings it in this way until the program is killed.
fn two_routers(pair: &Pair, ping: &[&str]) -> Child {
    for (name, host, number) in [("r1", "a", 1), ("r2", "b", 2)] {
        let file = pair.path(name);
        std::fs::write(&file, format!("[[port]]\nnumber = 1\naddresses = [\"10.7.0.{number}/24\"]\n")).unwrap();
        let file = file.to_str().unwrap();
        pair.ok(&["component", "create", name, "--kind", "router", "--ports", "1", "--host", host, "--config", file]);
    }
    pair.ok(&["wire", "connect", "r1:p1", "r2:p1"]);
    let [r1] = holders(&pair.path("run-a"))[..] else { panic!("one component is at a") };
    let mut pings = Command::new("nsenter");
    pings.arg(format!("--net=/proc/{r1}/ns/net")).arg("ping").args(ping).arg("10.7.0.2");
    pings.stdout(Stdio::null()).spawn().unwrap()
}

#[test]
fn a_trace_records_what_passes_each_wire_at_both_of_its_hosts() {
    if !can_run() {
        return;
    }
    let mut world = World(Pair::new("record"));
    let pair = &mut world.0;
    pair.start_controller();
    pair.start_node("a");
    pair.start_node("b");
    let mut pings = two_routers(pair, &["-i", "0.2", "-s", "1000"]);
    let wire = pair.json(&["wire", "show", "r1:p1"])["id"].clone();
    let folder = pair.path("recordings");
    let words = ["net", "trace", "r1", "--capture", folder.to_str().unwrap(), "--for", "2s"];
    let said = pair.godwit(&words);
    let again = pair.godwit(&words);
    pings.kill().unwrap();
    pings.wait().unwrap();
    assert_eq!(said.0, 0, "{said:?}{}", pair.logs());
    assert!(again.0 != 0 && again.2.contains("without recordings"), "{again:?}");
    for host in ["a", "b"] {
        let file = folder.join(format!("wire-{wire}-{host}.pcap"));
        let mode = std::os::unix::fs::PermissionsExt::mode(&file.metadata().unwrap().permissions());
        assert_eq!(mode & 0o777, 0o600);
        let frames = recorded(&file);
        // An echo request (8) or reply (0), with its headers; no more than the beginning of a frame is kept.
        let echoes =
            |kind: u8| frames.iter().filter(|(long, f)| *long == 1042 && f.len() == 256 && f[34] == kind).count();
        assert!(echoes(8) > 3 && echoes(0) > 3, "{host}: {} frames", frames.len());
    }
}

#[test]
fn a_recording_goes_along_with_a_component_that_moves() {
    if !can_run() {
        return;
    }
    let mut world = World(Pair::new("recmove"));
    let pair = &mut world.0;
    pair.start_controller();
    for host in ["a", "b", "d"] {
        pair.start_node(host);
    }
    let mut pings = two_routers(pair, &["-i", "0.1"]);
    let wire = pair.json(&["wire", "show", "r1:p1"])["id"].clone();
    let folder = pair.path("recordings");
    let words = ["net", "trace", "r1", "--capture", folder.to_str().unwrap(), "--for", "8s", "--also", "d"];
    let (said, moved) = std::thread::scope(|scope| {
        let recording = scope.spawn(|| pair.godwit(&words));
        std::thread::sleep(std::time::Duration::from_secs(2));
        let moved = pair.godwit(&["move", "r2", "--to", "d"]);
        (recording.join().unwrap(), moved)
    });
    pings.kill().unwrap();
    pings.wait().unwrap();
    assert_eq!((said.0, moved.0), (0, 0), "{said:?}{moved:?}{}", pair.logs());
    for host in ["a", "b", "d"] {
        let frames = recorded(&folder.join(format!("wire-{wire}-{host}.pcap")));
        let replies = frames.iter().filter(|(_, frame)| frame.len() > 34 && frame[23] == 1 && frame[34] == 0).count();
        assert!(replies > 3, "{host}: {} frames, {replies} answers", frames.len());
    }
}
