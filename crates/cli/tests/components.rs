//! Components on real nodes, with a real controller, each in a network namespace of its own: made, configured, moved, with nodes
//! killed at each step of the hand-off. What passes through a component is proved where it is made (`crates/component`).

use crate::common::holders;
use crate::common::pair::{Pair, can_run, inside, space_of};
use serde_json::Value;
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::process::Command;
use std::sync::{Mutex, PoisonError};

/// One after the other: each has two nodes and a controller.
static MACHINE: Mutex<()> = Mutex::new(());

const FIREWALL: &str = r#"
mode = "bridged"
rules = """
table inet filter {
  chain forward {
    type filter hook forward priority filter; policy drop;
    ct state established,related accept
  }
}
"""
"#;

struct World {
    pair: Pair,
}

impl Drop for World {
    fn drop(&mut self) {
        for name in ["a", "b"] {
            if self.pair.has(name) {
                self.pair.kill_node(name);
            }
        }
        for pid in holders(self.pair.folder.path()) {
            let _ = Command::new("kill").args(["-9", &pid.to_string()]).status();
        }
    }
}

impl World {
    fn new(test: &str) -> Self {
        let mut world = Self { pair: Pair::new(test) };
        world.pair.start_controller();
        world.pair.start_node("a");
        world.pair.start_node("b");
        world
    }

    fn file(&self, name: &str, text: &str) -> String {
        let path = self.pair.path(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    }

    fn holders(&self, host: &str) -> Vec<u32> {
        holders(&self.pair.path(&format!("run-{host}")))
    }

    fn show(&self, name: &str) -> Value {
        self.pair.json(&["component", "show", name])
    }

    /// A component's namespace, as a file.
    fn space(&self, name: &str) -> String {
        let shown = self.show(name);
        let run = self.pair.path(&format!("run-{}", shown["host"].as_str().unwrap()));
        let pid = std::fs::read_to_string(run.join(format!("components/{}.pid", shown["id"]))).unwrap();
        format!("/proc/{}/ns/net", pid.trim())
    }

    /// Runs something inside the component on a host.
    fn inside(&self, host: &str, command: &str) -> String {
        let [pid] = self.holders(host)[..] else { panic!("{host}: {:?}", self.holders(host)) };
        let mut nsenter = Command::new("nsenter");
        nsenter.arg(format!("--net=/proc/{pid}/ns/net")).args(command.split(' '));
        let output = nsenter.output().unwrap();
        assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    /// A connection that the component's namespace tracks.
    fn connect_inside(&self, host: &str) -> (TcpStream, TcpStream) {
        let [pid] = self.holders(host)[..] else { panic!("{host} has no component") };
        inside(space_of(pid), || {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            (client, listener.accept().unwrap().0)
        })
        .join()
        .unwrap()
    }

    /// Has the component's namespace track so many connections, for minutes.
    fn track(&self, host: &str, count: u16) {
        let [pid] = self.holders(host)[..] else { panic!("{host} has no component") };
        let tracking = inside(space_of(pid), move || {
            std::fs::write("/proc/sys/net/netfilter/nf_conntrack_udp_timeout", "600").unwrap();
            let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
            for port in 1..=count {
                socket.send_to(b"hello", ("127.0.0.1", port)).unwrap();
            }
        });
        tracking.join().unwrap();
    }

    /// Ports' devices on a host.
    fn devices(&self, host: &str) -> Vec<String> {
        let links = self.pair.within(host, "ip -o link");
        let names = links.lines().filter_map(|line| line.split(": ").nth(1)?.split('@').next());
        names.filter(|name| name.starts_with("gwt")).map(str::to_owned).collect()
    }

    /// Orders a move, and waits until it has come to a point, where a node is to be killed.
    fn moves_until(&self, name: &str, to: &str, point: &str, meanwhile: impl Fn()) {
        std::fs::write(self.pair.path("points").join(point), "kill").unwrap();
        self.pair.ok(&["move", name, "--to", to, "--detach"]);
        let reached = self.pair.path("points").join(format!("{point}.reached"));
        self.pair.until(&format!("{point} is reached"), || {
            meanwhile();
            reached.exists()
        });
        std::fs::remove_file(reached).unwrap();
    }

    /// Whether nothing of a component is on a host.
    fn gone(&self, host: &str) -> bool {
        self.holders(host).is_empty() && self.devices(host).is_empty()
    }

    /// Waits until the component is one host's, and nothing of it is on the other; gives that host.
    fn settled(&self, name: &str) -> &'static str {
        let here = || {
            let shown = self.show(name);
            let open = shown["last_move"]["outcome"] == "running" || shown["last_move"]["outcome"] == "waits-for-peer";
            let host = if shown["host"] == "a" { ("a", "b") } else { ("b", "a") };
            let alone = self.holders(host.0).len() == 1 && self.holders(host.1).is_empty();
            (!open && shown["ownership"] == "here" && alone && self.devices(host.1).is_empty()).then_some(host.0)
        };
        self.pair.until("the component is one host's", || here().is_some());
        here().unwrap()
    }
}

const MAC: &str = "02:00:00:00:00:aa";

#[test]
fn a_component_is_made_configured_moved_with_what_it_knows_and_deleted_without_a_trace() {
    let _one = MACHINE.lock().unwrap_or_else(PoisonError::into_inner);
    if !can_run() {
        return;
    }
    let world = World::new("comp");
    let (pair, file) = (&world.pair, world.file("fw.toml", FIREWALL));
    pair.ok(&[
        "component",
        "create",
        "fw1",
        "--kind",
        "firewall",
        "--ports",
        "2",
        "--site",
        "site-a",
        "--config",
        &file,
    ]);
    let (code, _, said) =
        pair.godwit(&["component", "create", "fw1", "--kind", "switch", "--ports", "2", "--site", "site-a"]);
    assert!(code == 1 && said.contains("already"), "{said}");
    assert!(pair.ok(&["component", "ls"]).contains("firewall"));
    assert_eq!(world.devices("a").len(), 2);

    // A file that does not do is refused with its line, and changes nothing.
    let bad = world.file("bad.toml", &FIREWALL.replace("related accept", "related accpet"));
    let before = world.inside("a", "nft -a list ruleset");
    let (code, _, said) = pair.godwit(&["component", "apply", "fw1", "--config", &bad]);
    assert!(code == 1 && said.contains("line 7"), "{said}");
    assert_eq!(world.inside("a", "nft -a list ruleset"), before);
    assert_eq!(world.show("fw1")["config"], FIREWALL);
    let (code, _, said) = pair.godwit(&[
        "component",
        "create",
        "fw2",
        "--kind",
        "firewall",
        "--ports",
        "2",
        "--site",
        "site-a",
        "--config",
        &bad,
    ]);
    assert!(code == 1 && said.contains("line 7"), "{said}");
    assert_eq!((pair.godwit(&["component", "show", "fw2"]).0, world.holders("a").len()), (1, 1));
    let good = FIREWALL.replace("related accept", "related accept\n    tcp dport 443 accept");
    pair.ok(&["component", "apply", "fw1", "--config", &world.file("good.toml", &good)]);
    assert!(world.inside("a", "nft list ruleset").contains("443"));

    world.inside("a", &format!("bridge fdb add {MAC} dev p2 master dynamic"));
    let _open = world.connect_inside("a");
    let said = pair.ok(&["move", "fw1", "--to", "site-b"]);
    println!("{said}");
    assert_eq!(world.settled("fw1"), "b");
    let shown = world.show("fw1");
    assert_eq!((&shown["last_move"]["outcome"], &shown["generation"]), (&"completed".into(), &2.into()));
    assert!(shown["last_move"]["flows"].as_u64().unwrap() >= 1, "{shown}");
    assert!(world.inside("b", "bridge fdb show dev p2").contains(MAC));
    assert!(world.inside("b", "nft list ruleset").contains("443"));
    let (code, _, said) = pair.godwit(&["move", "fw1", "--to", "site-b"]);
    assert!(code == 1 && said.contains("already"), "{said}");

    pair.ok(&["component", "delete", "fw1"]);
    for host in ["a", "b"] {
        assert_eq!((world.devices(host), world.holders(host)), (vec![], vec![]), "{host}");
        let left: Vec<_> = std::fs::read_dir(pair.path(host).join("components")).unwrap().collect();
        assert_eq!(left.len(), 1, "its file is left on {host}: {left:?}");
        assert_eq!(std::fs::read_dir(pair.path(host).join("components/records")).unwrap().count(), 1);
    }
}

#[test]
fn a_component_has_one_owner_in_the_end_whichever_node_is_killed_at_whichever_step() {
    let _one = MACHINE.lock().unwrap_or_else(PoisonError::into_inner);
    if !can_run() {
        return;
    }
    let mut world = World::new("compkill");
    world.pair.ok(&["component", "create", "sw1", "--kind", "switch", "--ports", "4", "--host", "a"]);
    world.inside("a", &format!("bridge fdb add {MAC} dev p2 master dynamic"));
    let mut at = "a";
    for (point, of_source) in [
        ("reserve", true),
        ("staged", false),
        ("stopped", true),
        ("sealing", true),
        ("sealed", true),
        ("commit", false),
        ("granted", false),
        ("started", false),
        ("releasing", true),
        ("settling", false),
    ] {
        let to = if at == "a" { "b" } else { "a" };
        let killed = if of_source { at } else { to };
        world.moves_until("sw1", to, point, || ());
        world.pair.kill_node(killed);
        world.pair.start_node(killed);
        at = world.settled("sw1");
        println!("{point}: killed {killed}, it is on {at}");
        assert!(world.inside(at, "bridge fdb show dev p2").contains(MAC), "{point}: what it had learnt is lost");
    }

    // With the controller gone after the start the nodes end it.
    let to = if at == "a" { "b" } else { "a" };
    let hold = world.pair.path("points").join("sealed");
    std::fs::write(&hold, "hold").unwrap();
    world.pair.ok(&["move", "sw1", "--to", to, "--detach"]);
    let id = world.show("sw1")["id"].as_u64().unwrap();
    world.pair.until("it is sealed", || world.pair.path("points").join("sealed.reached").exists());
    world.pair.kill_node("c");
    std::fs::remove_file(&hold).unwrap();
    let path = format!("/v1/components/{id}");
    world.pair.until("the nodes end it alone", || {
        let ask = |host| world.pair.ask(host, "GET", &path).unwrap_or_default();
        ask(to)["ownership"] == "here" && ask(at)["ownership"] == "elsewhere"
    });
    world.pair.start_controller();
    assert_eq!(world.settled("sw1"), to);

    // A host that loses its power makes the component again from its file, with nothing learnt.
    for pid in world.holders(to) {
        Command::new("kill").args(["-9", &pid.to_string()]).status().unwrap();
    }
    world.pair.lose_power(to);
    world.pair.until("its devices are gone", || world.devices(to).is_empty());
    world.pair.start_node(to);
    assert_eq!(world.settled("sw1"), to);
    assert_eq!(world.devices(to).len(), 4);
    assert!(!world.inside(to, "bridge fdb show dev p2").contains(MAC));
    world.pair.ok(&["component", "delete", "sw1"]);
}

/// Takes a host's power, as far as components go.
fn lose(world: &mut World, host: &'static str) {
    for pid in world.holders(host) {
        Command::new("kill").args(["-9", &pid.to_string()]).status().unwrap();
    }
    world.pair.lose_power(host);
    world.pair.until("its devices are gone", || world.devices(host).is_empty());
}

const CUT: &str = "power cut at the PDU, by ann";

/// Claims as soon as the other node takes the lost one for silent, which it does some seconds later.
fn claim(world: &World, name: &str, at: &str) {
    let words = ["component", "claim", name, "--at", at, "--fenced", CUT];
    world.pair.until("its peer is heard no more", || {
        let (code, _, said) = world.pair.godwit(&words);
        assert!(code == 0 || said.contains("is heard here, so it is not fenced"), "{said}");
        code == 0
    });
}

#[test]
fn a_component_whose_host_is_lost_is_claimed_for_another_and_the_lost_host_lets_go_when_it_is_back() {
    let _one = MACHINE.lock().unwrap_or_else(PoisonError::into_inner);
    if !can_run() {
        return;
    }
    let mut world = World::new("complost");
    for (name, host, file) in [("lost", "a", INNER), ("peer", "b", OUTER)] {
        let file = world.file(&format!("{name}.toml"), file);
        let create =
            ["component", "create", name, "--kind", "router", "--ports", "1", "--host", host, "--config", &file];
        world.pair.ok(&create);
    }
    world.pair.ok(&["wire", "connect", "lost:p1", "peer:p1"]);
    let answers = |world: &World| {
        let mut ping = Command::new("nsenter");
        ping.arg(format!("--net={}", world.space("peer"))).args(["ping", "-c1", "-W1", "10.1.0.2"]);
        ping.output().unwrap().status.success()
    };
    world.pair.until("they are wired", || answers(&world));
    let refused = |world: &World, fenced: &str, why: &str| {
        let (code, _, said) = world.pair.godwit(&["component", "claim", "lost", "--at", "b", "--fenced", fenced]);
        assert!(code == 1 && said.contains(why), "{said}");
    };
    refused(&world, "yes", "how the component's host is kept from running it");
    refused(&world, CUT, "`a` answers, so it is not lost");

    lose(&mut world, "a");
    claim(&world, "lost", "site-b");
    let owned = |world: &World| {
        let shown = world.show("lost");
        (shown["host"] == "b" && shown["ownership"] == "here" && shown["lineage"] == 1).then_some(shown)
    };
    assert!(owned(&world).is_some(), "{}", world.show("lost"));
    world.pair.until("its wire follows", || answers(&world));
    refused(&world, CUT, "already");

    // Back, it makes the component again, as after any loss of power; and is told, and forgets nothing of that.
    world.pair.start_node("a");
    let id = world.show("lost")["id"].as_u64().unwrap();
    let outranked = |world: &World| {
        let local = world.pair.ask("a", "GET", &format!("/v1/components/{id}")).unwrap_or_default();
        local["ownership"] == "elsewhere" && local["lineage"] == 1
    };
    world.pair.until("the lost host lets go", || outranked(&world) && world.gone("a"));
    world.pair.kill_node("a");
    world.pair.start_node("a");
    world.pair.until("its node is back", || outranked(&world));
    assert!(world.gone("a") && owned(&world).is_some() && answers(&world));
    world.pair.ok(&["move", "lost", "--to", "a"]);
    assert_eq!(world.show("lost")["lineage"], 1);
    world.pair.until("its wire follows", || answers(&world));
    for words in [&["wire", "disconnect", "lost:p1", "peer:p1"][..], &["component", "delete", "lost"]] {
        world.pair.ok(words);
    }
    assert!(world.gone("a"));
}

/// An interface of a host has another name from now on.
fn rename(world: &World, host: &str, from: &str, to: &str) {
    for command in [format!("{from} down"), format!("{from} name {to}"), format!("{to} up")] {
        world.pair.within(host, &format!("ip link set {command}"));
    }
}

#[test]
fn a_gateway_whose_way_out_is_gone_takes_another_file_or_is_deleted_and_lets_go_when_it_was_claimed() {
    let _one = MACHINE.lock().unwrap_or_else(PoisonError::into_inner);
    if !can_run() {
        return;
    }
    let mut world = World::new("compgone");
    for host in ["a", "b"] {
        for command in ["add eth1 type veth peer name far", "set eth1 up", "set far up"] {
            world.pair.within(host, &format!("ip link {command}"));
        }
    }
    let [before, after] = ["eth1", "eth2"].map(|device| {
        let text = format!(
            "outside = {{ device = \"{device}\", addresses = [\"10.6.0.1/24\"] }}\n\
             [[port]]\nnumber = 1\naddresses = [\"10.7.0.1/24\"]\n"
        );
        world.file(&format!("{device}.toml"), &text)
    });
    let create = ["component", "create", "g1", "--kind", "gateway", "--ports", "1", "--host", "a", "--config", &before];
    world.pair.ok(&create);

    // The host comes up again, and calls it otherwise.
    lose(&mut world, "a");
    rename(&world, "a", "eth1", "eth2");
    world.pair.start_node("a");
    // The controller may still be about to find the host again, or the host about to try.
    world.pair.until("it is said what is wrong", || {
        let (code, _, said) = world.pair.godwit(&["move", "g1", "--to", "b"]);
        assert_eq!(code, 1, "{said}");
        said.contains("look up `eth1`") && said.contains("component apply")
    });
    let apply = ["component", "apply", "g1", "--config", &after];
    world.pair.until("it takes another file", || world.pair.godwit(&apply).0 == 0);
    world.pair.until("it is open", || world.inside("a", "ip -o link show up").contains(" out@"));
    assert_eq!(world.show("g1")["config"], std::fs::read_to_string(&after).unwrap());

    // A destination that is to have it, and cannot make it anew just now, is patient.
    rename(&world, "b", "eth1", "eth2");
    world.moves_until("g1", "b", "started", || ());
    lose(&mut world, "b");
    rename(&world, "b", "eth2", "eth1");
    world.pair.start_node("b");
    let log = world.pair.path("b.log");
    let tries = || std::fs::read_to_string(&log).unwrap().matches("look up `eth2`").count();
    world.pair.until("it is tried", || tries() > 0);
    std::thread::sleep(std::time::Duration::from_secs(4));
    assert!(tries() < 20, "{} tries in four seconds", tries());
    rename(&world, "b", "eth1", "eth2");
    assert_eq!(world.settled("g1"), "b");

    // What can neither be opened nor is this host's any more is removed.
    lose(&mut world, "b");
    claim(&world, "g1", "site-a");
    rename(&world, "b", "eth2", "eth1");
    world.pair.start_node("b");
    let id = world.show("g1")["id"].as_u64().unwrap();
    world.pair.until("the lost host lets go", || {
        let local = world.pair.ask("b", "GET", &format!("/v1/components/{id}")).unwrap_or_default();
        local["ownership"] == "elsewhere" && world.gone("b")
    });

    lose(&mut world, "a");
    rename(&world, "a", "eth2", "eth1");
    world.pair.start_node("a");
    // In the middle of a try it is refused, and asked for again by the controller.
    world.pair.godwit(&["component", "delete", "g1"]);
    world.pair.until("it is deleted", || world.pair.godwit(&["component", "show", "g1"]).0 == 1);
    assert!(world.gone("a") && world.gone("b"));
}

#[test]
fn a_component_that_cannot_be_read_is_not_taken_for_gone_and_a_removal_that_broke_off_is_ended() {
    let _one = MACHINE.lock().unwrap_or_else(PoisonError::into_inner);
    if !can_run() {
        return;
    }
    let mut world = World::new("compbroken");
    world.pair.ok(&["component", "create", "sw1", "--kind", "switch", "--ports", "2", "--host", "a"]);
    let id = world.show("sw1")["id"].as_u64().unwrap();
    let (file, path) = (world.pair.path(&format!("a/components/{id}.json")), format!("/v1/components/{id}"));
    let whole = std::fs::read(&file).unwrap();
    world.pair.kill_node("a");
    std::fs::write(&file, "{").unwrap();
    world.pair.start_node("a");
    for method in ["GET", "DELETE"] {
        let said = world.pair.ask("a", method, &path).unwrap_err();
        assert!(said.contains("cannot be read") && said.contains("restart the node"), "{method}: {said}");
    }
    // Nobody is told to end it by hand.
    let (_, told, said) = world.pair.godwit(&["net", "check"]);
    assert!(!told.contains("namespace of component") && !said.contains("namespace of component"), "{told}{said}");
    assert_eq!((world.holders("a").len(), world.devices("a").len()), (1, 2));
    world.pair.kill_node("a");
    std::fs::write(&file, &whole).unwrap();
    world.pair.start_node("a");
    assert_eq!(world.settled("sw1"), "a");

    // Its file cannot be removed.
    std::fs::remove_file(&file).unwrap();
    std::fs::create_dir(&file).unwrap();
    for time in ["once", "again"] {
        let said = world.pair.ask("a", "DELETE", &path).unwrap_err();
        assert!(said.contains("directory"), "{time}: {said}");
    }
    std::fs::remove_dir(&file).unwrap();
    world.pair.ask("a", "DELETE", &path).unwrap();
    let said = world.pair.ask("a", "GET", &path).unwrap_err();
    assert!(said.contains("knows no component"), "{said}");
    assert_eq!((world.devices("a"), world.holders("a")), (vec![], vec![]));
    world.pair.ok(&["component", "delete", "sw1"]);
}

#[test]
fn a_firewall_that_knows_more_than_a_request_carries_moves_over_a_slow_link() {
    let _one = MACHINE.lock().unwrap_or_else(PoisonError::into_inner);
    if !can_run() {
        return;
    }
    const STATIONS: usize = 30_000;
    const FLOWS: u16 = 60_000;
    let world = World::new("compbusy");
    let file = world.file("fw.toml", FIREWALL);
    world.pair.ok(&[
        "component",
        "create",
        "fw1",
        "--kind",
        "firewall",
        "--ports",
        "2",
        "--host",
        "a",
        "--config",
        &file,
    ]);
    let station = |n: usize| format!("fdb add 02:00:00:01:{:02x}:{:02x} dev p2 master dynamic\n", n / 256, n % 256);
    let batch = world.file("stations", &(0..STATIONS).map(station).collect::<String>());
    world.inside("a", &format!("bridge -batch {batch}"));
    world.track("a", FLOWS);
    // What it knows needs longer than a source waits for a destination that is not heard.
    world.pair.within("a", "tc qdisc add dev under root tbf rate 10mbit burst 64kb latency 100ms");
    print!("{}", world.pair.ok(&["move", "fw1", "--to", "site-b"]));
    assert_eq!(world.settled("fw1"), "b");
    let shown = world.show("fw1");
    let went = |what: &str| shown["last_move"][what].as_u64().unwrap();
    assert!(went("stations") >= STATIONS as u64 && went("flows") >= u64::from(FLOWS), "{shown}");
    let table = world.inside("b", "bridge fdb show dev p2");
    assert_eq!(table.lines().filter(|line| line.starts_with("02:00:00:01:")).count(), STATIONS);
    let tracked = world.inside("b", "cat /proc/sys/net/netfilter/nf_conntrack_count");
    assert!(tracked.trim().parse::<u32>().unwrap() >= u32::from(FLOWS), "{tracked}");
}

#[test]
fn in_the_middle_of_a_move_either_host_may_be_claimed_for_when_the_other_is_lost() {
    let _one = MACHINE.lock().unwrap_or_else(PoisonError::into_inner);
    if !can_run() {
        return;
    }
    let mut world = World::new("compmid");
    world.pair.ok(&["component", "create", "sw1", "--kind", "switch", "--ports", "2", "--host", "a"]);
    for (lineage, point, killed, other) in [(1, "sealed", "a", "b"), (2, "commit", "a", "b")] {
        let to = if world.show("sw1")["host"] == "a" { "b" } else { "a" };
        world.moves_until("sw1", to, point, || {
            let shown = world.show("sw1");
            assert_ne!(shown["last_move"]["outcome"], "failed", "{shown}");
        });
        lose(&mut world, killed);
        // Whatever it has received, it may be its own, or the other's: neither goes on alone.
        assert_ne!(world.show("sw1")["ownership"], "here", "{point}");
        claim(&world, "sw1", other);
        world.pair.start_node(killed);
        assert_eq!(world.settled("sw1"), other, "{point}");
        let shown = world.show("sw1");
        assert_eq!(shown["lineage"], lineage, "{point}: {shown}");
        let outcome = shown["last_move"]["outcome"].as_str().unwrap();
        assert!(["failed", "network-unproved"].contains(&outcome), "{point}: {shown}");
    }
    // A host that came back with less than it had takes it again.
    world.pair.ok(&["move", "sw1", "--to", "a"]);
    assert_eq!(world.settled("sw1"), "a");
}

#[test]
fn a_trust_domain_sees_its_own_components_and_makes_no_gateway() {
    let _one = MACHINE.lock().unwrap_or_else(PoisonError::into_inner);
    if !can_run() {
        return;
    }
    let world = World::new("compdom");
    let pair = &world.pair;
    let with = |domain: &str, words: &[&str]| {
        let file = pair.path(&format!("token-{domain}"));
        if !file.exists() {
            let name = format!("t-{domain}");
            std::fs::write(&file, pair.ok(&["token", "create", &name, "--domain", domain, "--role", "admin"])).unwrap();
        }
        pair.godwit(&[words, &["--api-token-file", file.to_str().unwrap()]].concat())
    };
    let create = |name: &'static str, kind: &'static str| {
        ["component", "create", name, "--kind", kind, "--ports", "1", "--site", "site-a"]
    };
    assert_eq!(with("red", &create("sw1", "switch")).0, 0);
    let (code, _, said) = with("red", &create("gw1", "gateway"));
    assert!(code == 1 && said.contains("no trust domain has"), "{said}");
    assert_eq!(with("red", &["component", "show", "sw1"]).0, 0);
    for words in [
        &["component", "show", "sw1"][..],
        &["component", "delete", "sw1"],
        &["component", "apply", "sw1", "--config", "/dev/null"],
    ] {
        let (code, _, said) = with("blue", words);
        assert!(code == 1 && said.contains("there is no component"), "{words:?}: {said}");
    }
    let (_, said, _) = with("blue", &["component", "ls", "--json"]);
    assert_eq!(said.trim(), "[]");
    assert_eq!(with("red", &["component", "delete", "sw1"]).0, 0);
}

const INNER: &str = "[[port]]\nnumber = 1\naddresses = [\"10.1.0.2/24\"]\n";
const OUTER: &str = "[[port]]\nnumber = 1\naddresses = [\"10.1.0.3/24\"]\n";
const CLOSED: &str = r#"
mode = "bridged"
rules = """
table inet filter {
  chain forward {
    type filter hook forward priority filter; policy drop;
    ct state established,related accept
    ct state new ip saddr 10.1.0.2 tcp dport 7000 accept
  }
}
"""
"#;

#[test]
fn over_real_wires_an_established_connection_survives_the_moves_of_the_firewall_and_of_a_switch_before_it() {
    let _one = MACHINE.lock().unwrap_or_else(PoisonError::into_inner);
    if !can_run() {
        return;
    }
    // Routers stand for servers: an address, and sockets in their namespaces.
    let world = World::new("compwire");
    let pair = &world.pair;
    for (name, kind, ports, config) in [
        ("inner", "router", "1", INNER),
        ("outer", "router", "1", OUTER),
        ("sw1", "switch", "4", ""),
        ("fw1", "firewall", "2", CLOSED),
    ] {
        let file = world.file(&format!("{name}.toml"), config);
        pair.ok(&["component", "create", name, "--kind", kind, "--ports", ports, "--host", "a", "--config", &file]);
    }
    for (a, b) in [("inner:p1", "sw1:p1"), ("sw1:p2", "fw1:p1"), ("fw1:p2", "outer:p1")] {
        pair.ok(&["wire", "connect", a, b]);
    }
    let space = |name: &str| std::fs::File::open(world.space(name)).unwrap();
    let (ready, is_ready) = std::sync::mpsc::channel();
    let accepting = inside(space("outer"), move || {
        let listener = TcpListener::bind("10.1.0.3:7000").unwrap();
        ready.send(()).unwrap();
        listener.accept().unwrap().0
    });
    is_ready.recv().unwrap();
    let long = std::time::Duration::from_secs(60);
    let address = "10.1.0.3:7000".parse().unwrap();
    let client = inside(space("inner"), move || TcpStream::connect_timeout(&address, long).unwrap());
    let mut client = client.join().unwrap();
    let mut server = accepting.join().unwrap();
    let mut talk = |when: &str| {
        use std::io::{Read, Write};
        for stream in [&client, &server] {
            stream.set_read_timeout(Some(long)).unwrap();
        }
        let mut heard = [0; 4];
        client.write_all(b"ping").unwrap();
        server.read_exact(&mut heard).unwrap_or_else(|e| panic!("{when}: {e}{}", pair.logs()));
        server.write_all(b"pong").unwrap();
        client.read_exact(&mut heard).unwrap_or_else(|e| panic!("{when}, back: {e}{}", pair.logs()));
    };
    talk("at the beginning");
    for (name, to) in [("fw1", "b"), ("sw1", "b"), ("fw1", "a"), ("fw1", "b")] {
        print!("{}", pair.ok(&["move", name, "--to", to]));
        talk(&format!("{name} has moved to {to}"));
    }
    // The hosts hear each other, and what is in tunnels is lost on the way to b.
    pair.within("b", "nft add table inet cut");
    pair.within("b", "nft add chain inet cut in { type filter hook input priority -300 ; }");
    pair.within("b", "nft add rule inet cut in udp dport 4789 drop");
    let (code, _, said) = pair.godwit(&["move", "fw1", "--to", "a"]);
    let (unproved, wire) = ("not shown to lead there", "the wire from fw1:p1 to sw1:p2");
    assert!(code == 1 && said.contains(unproved) && said.contains(wire) && !said.contains("outer"), "{code}: {said}");
    let shown = world.show("fw1");
    let (host, outcome) = (shown["host"].as_str(), shown["last_move"]["outcome"].as_str());
    assert_eq!((host, outcome), (Some("a"), Some("network-unproved")), "{shown}");
    pair.within("b", "nft delete table inet cut");
    talk("what was lost is not any more");
    // Nothing that was never let through.
    let refused = inside(space("outer"), || {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let short = std::time::Duration::from_millis(700);
        assert!(TcpStream::connect_timeout(&"10.1.0.2:7000".parse().unwrap(), short).is_err(), "it is let in");
        TcpStream::connect(listener.local_addr().unwrap()).unwrap()
    });
    drop(refused.join().unwrap());
    let (code, _, said) = pair.godwit(&["component", "delete", "sw1"]);
    assert!(code == 1 && said.contains("is wired"), "{said}");
    for (a, b) in [("inner:p1", "sw1:p1"), ("sw1:p2", "fw1:p1"), ("fw1:p2", "outer:p1")] {
        pair.ok(&["wire", "disconnect", a, b]);
    }
    for name in ["inner", "outer", "sw1", "fw1"] {
        pair.ok(&["component", "delete", name]);
    }
    for host in ["a", "b"] {
        assert_eq!((world.devices(host), world.holders(host)), (vec![], vec![]), "{host}");
    }
}

#[test]
fn a_switch_is_split_over_two_sites_so_that_each_ones_traffic_stays_there_and_merged_again() {
    let _one = MACHINE.lock().unwrap_or_else(PoisonError::into_inner);
    if !can_run() {
        return;
    }
    let world = World::new("compsplit");
    let pair = &world.pair;
    pair.ok(&["component", "create", "sw1", "--kind", "switch", "--ports", "5", "--host", "a"]);
    for (n, host) in [(1, "a"), (2, "b"), (3, "b")] {
        let config = format!("[[port]]\nnumber = 1\naddresses = [\"10.1.0.{n}/24\"]\n");
        let (name, file) = (format!("r{n}"), world.file(&format!("r{n}.toml"), &config));
        pair.ok(&["component", "create", &name, "--kind", "router", "--ports", "1", "--host", host, "--config", &file]);
        pair.ok(&["wire", "connect", &format!("r{n}:p1"), &format!("sw1:p{n}")]);
    }
    let enter = |name: &str, command: &str| {
        let mut nsenter = Command::new("nsenter");
        nsenter.arg(format!("--net={}", world.space(name))).args(command.split(' '));
        let output = nsenter.output().unwrap();
        (output.status.success(), String::from_utf8(output.stdout).unwrap())
    };
    let all_reach = |when: &str| {
        for (from, to) in [("r1", "10.1.0.2"), ("r2", "10.1.0.3"), ("r3", "10.1.0.1")] {
            pair.until(&format!("{from} reaches {to} {when}"), || enter(from, &format!("ping -c 1 -W 1 {to}")).0);
        }
    };
    all_reach("through one switch");
    print!("{}", pair.ok(&["component", "split", "sw1", "--to", "site-b"]));
    assert_eq!(pair.ok(&["component", "split", "sw1", "--to", "site-b"]), "", "a second time it does something");
    all_reach("through two");
    // Local traffic stays local: nothing of it passes the trunk.
    let trunk = |counter: &str| -> u64 {
        let shown = enter("sw1-site-b", "ip -s -s -j link show dev p5");
        let links: Value = serde_json::from_str(&shown.1).unwrap();
        links[0]["stats64"][counter]["packets"].as_u64().unwrap()
    };
    let before = trunk("tx");
    assert!(enter("r2", "ping -c 50 -i 0.002 10.1.0.3").0);
    let after = trunk("tx");
    assert!(after - before < 25, "{} packets between hosts of one site left it", after - before);
    let traced = pair.ok(&["net", "trace", "r2"]);
    assert!(traced.contains("sw1-site-b:p5 -> sw1:p5") && traced.contains("tunnel"), "{traced}");
    assert_eq!(pair.godwit(&["net", "check"]).0, 0);
    print!("{}", pair.ok(&["component", "merge", "sw1", "sw1-site-b"]));
    assert_ne!(pair.godwit(&["component", "show", "sw1-site-b"]).0, 0);
    all_reach("through one switch again");
    assert_eq!(pair.json(&["wire", "ls"]).as_array().unwrap().len(), 3);
}

#[test]
fn a_gateway_moves_between_the_outside_networks_of_two_hosts_and_what_is_behind_it_goes_on() {
    let _one = MACHINE.lock().unwrap_or_else(PoisonError::into_inner);
    if !can_run() {
        return;
    }
    let world = World::new("compgate");
    let pair = &world.pair;
    // The same address outside, at either site.
    for host in ["a", "b"] {
        for command in [
            "ip link add lan type bridge",
            "ip link set lan up",
            "ip addr add 10.6.0.9/24 dev lan",
            "ip route add 10.7.0.0/24 via 10.6.0.1",
        ] {
            pair.within(host, command);
        }
    }
    let outside = |bridge: &str| {
        format!(
            "outside = {{ bridge = \"{bridge}\", addresses = [\"10.6.0.1/24\"] }}\n\
             [[port]]\nnumber = 1\naddresses = [\"10.7.0.1/24\"]\n"
        )
    };
    let inner = "[[port]]\nnumber = 1\naddresses = [\"10.7.0.2/24\"]\n\
                 [[route]]\nto = \"0.0.0.0/0\"\nvia = \"10.7.0.1\"\n";
    for (name, kind, config) in [("g1", "gateway", &*outside("lan")), ("r1", "router", inner)] {
        let file = world.file(&format!("{name}.toml"), config);
        pair.ok(&["component", "create", name, "--kind", kind, "--ports", "1", "--host", "a", "--config", &file]);
    }
    pair.ok(&["wire", "connect", "r1:p1", "g1:p1"]);
    let gets_out = || {
        let mut nsenter = Command::new("nsenter");
        nsenter.arg(format!("--net={}", world.space("r1"))).args(["ping", "-c", "1", "-W", "1", "10.6.0.9"]);
        nsenter.output().unwrap().status.success()
    };
    pair.until("it gets out at a", gets_out);
    for to in ["b", "a"] {
        print!("{}", pair.ok(&["move", "g1", "--to", to]));
        pair.until(&format!("it gets out at {to}"), gets_out);
        let ports = |host: &str| pair.within(host, "ip -o link show master lan");
        assert_eq!(["a", "b"].map(|host| ports(host).contains("gwo")), [to == "a", to == "b"], "{to}");
        assert_eq!(pair.godwit(&["net", "check"]).0, 0, "{to}");
    }
    // What cannot be taken is refused before anything is changed, also on the way to a host.
    let other = world.file("other.toml", &outside("other"));
    let (code, _, said) = pair.godwit(&["component", "apply", "g1", "--config", &other]);
    assert!(code == 1 && said.contains("no interface `other`"), "{said}");
    pair.within("a", "ip link add other type bridge");
    pair.ok(&["component", "apply", "g1", "--config", &other]);
    let (code, _, said) = pair.godwit(&["move", "g1", "--to", "b"]);
    assert!(code == 1 && said.contains("stays on `a`") && said.contains("no interface `other`"), "{said}");
    assert!(pair.within("a", "ip -o link show master other").contains("gwo"), "it does not lead to its new network");
    let lan = world.file("lan.toml", &outside("lan"));
    pair.ok(&["component", "apply", "g1", "--config", &lan]);
    pair.until("it gets out again", gets_out);
}
