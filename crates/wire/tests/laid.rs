//! What leads wires' frames into tunnels, in a network namespace where others remove rules and routes. Needs root, `ip` and `nft`.
#![allow(clippy::unwrap_used, reason = "a test")]

mod common;

use common::place::Place;
use godwit_net::Net;
use godwit_wire::extender::rules::{self, Passing};
use godwit_wire::extender::{Beyond, Hop, Laid, NoWay, Paths, let_forward};
use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::process::Command;
use tokio::runtime::Runtime;

const PORT: u16 = 4789;
const MATE: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 2);
const BEYOND: Ipv4Addr = Ipv4Addr::new(10, 1, 0, 2);
const TUNNEL: &str = "gx00000001";
const WHOLE: Laid = Laid { missing: vec![], changed: false };
const MENDED: Laid = Laid { missing: vec![], changed: true };

/// A host on one network with another one of its site, with a device that stands in for a tunnel's.
struct Host {
    place: Place,
    net: Net,
    runtime: Runtime,
    _mate: Place,
}

impl Host {
    fn new() -> Self {
        let (place, mate) = (Place::new(), Place::new());
        place.run(&format!("ip link add eth0 type veth peer name eth0 netns {}", mate.path()));
        mate.run(&format!("ip addr add {MATE}/24 dev eth0; ip link set eth0 up"));
        place.run("ip addr add 10.0.0.1/24 dev eth0; ip link set eth0 up; ip route add default via 10.0.0.2");
        place
            .run(&format!("ip link add {TUNNEL} type veth peer name far; ip link set far up; ip link set {TUNNEL} up"));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let net = runtime.block_on(async { Net::open() }).unwrap();
        Self { place, net, runtime, _mate: mate }
    }

    fn lay(&self, paths: &Paths) -> Laid {
        self.place.enter();
        self.runtime.block_on(paths.lay(&self.net, PORT)).unwrap()
    }

    /// Its rules, in any order.
    fn rules(&self) -> Vec<String> {
        let mut rules: Vec<String> = self.place.run("ip rule").lines().map(ToOwned::to_owned).collect();
        rules.sort();
        rules
    }
}

/// The host's own frames go to another carrier, and what it is given goes into its tunnel.
fn paths() -> Paths {
    let beyond = Beyond { hosts: [BEYOND].into(), hop: Some(Hop::Carrier(MATE)), into: Some(TUNNEL.into()) };
    Paths { clear: [MATE].into(), beyond: vec![beyond], closed: ["eth0".to_owned()].into() }
}

#[test]
fn what_somebody_has_removed_of_rules_and_routes_is_seen_and_laid_again_and_the_rest_is_not_touched() {
    let (host, paths) = (Host::new(), paths());
    assert_eq!(host.lay(&paths), MENDED);
    assert_eq!(host.lay(&paths), WHOLE);
    let rules = host.rules();
    assert_eq!(rules.iter().filter(|rule| rule.contains("lookup 47")).count(), 3, "{rules:?}");
    for removed in [
        "ip rule del pref 4789",
        "ip rule del pref 4790",
        "ip rule del pref 4790; ip rule del pref 4790",
        "ip rule add pref 4790 fwmark 1 lookup 4790",
        "ip route flush table 4789",
        "ip route flush table 4790",
        "ip route replace 10.1.0.2 dev eth0 table 4789",
        "ip route add 10.1.0.3 dev eth0 table 4790",
        // What leads onto it is gone, and nothing else.
        "ip link set eth0 down; ip link set eth0 up",
    ] {
        host.place.run(removed);
        assert_eq!(host.lay(&paths), MENDED, "{removed}");
        assert_eq!(host.lay(&paths), WHOLE, "{removed}");
        assert_eq!(host.rules(), rules, "{removed}");
    }

    // What cannot be laid keeps nothing else from being laid.
    host.place.run("ip link set eth0 down; ip rule del pref 4789");
    let Laid { missing, changed } = host.lay(&paths);
    assert!(changed && matches!(missing[..], [(0, NoWay::NoRoute(..))]), "{missing:?}");
    assert_eq!(host.rules(), rules);
    assert!(host.place.run("ip route show table 4789 10.1.0.2").starts_with("blackhole"));
    host.place.run(&format!("ip link set eth0 up; ip link set {TUNNEL} down"));
    assert_eq!(host.lay(&paths), MENDED, "its own frames have a way again");
    assert!(host.place.run("ip route show table 4790 10.1.0.2").starts_with("blackhole"));
    host.place.run(&format!("ip link set {TUNNEL} up"));
    assert_eq!(host.lay(&paths), MENDED);

    host.runtime.block_on(Paths::take_up(&host.net, PORT)).unwrap();
    assert!(host.rules().iter().all(|rule| !rule.contains("lookup 47")));
}

#[test]
fn what_comes_in_to_be_carried_goes_into_a_tunnel_or_nowhere_also_without_nftables() {
    let (host, paths) = (Host::new(), paths());
    host.lay(&paths);
    let_forward("eth0", true).unwrap();
    let way = |to: &str| {
        let output = Command::new("ip").args(["route", "get", to, "from", "10.0.0.2", "iif", "eth0"]).output().unwrap();
        output.status.success().then(|| String::from_utf8(output.stdout).unwrap())
    };
    // There is a route to both for everybody else, back to where it comes from.
    assert!(way("10.1.0.2").is_some_and(|way| way.contains(TUNNEL)));
    assert_eq!(way("192.0.2.1"), None, "the host is an open router");
    assert!(way("10.0.0.1").is_some_and(|way| way.contains("local")));
    host.place.run(&format!("ip link set {TUNNEL} down"));
    assert_eq!(way("10.1.0.2"), None, "frames go in clear");
    host.place.run(&format!("ip link set {TUNNEL} up"));

    // Where somebody has what is for the host itself looked for last, it would not be heard any more.
    host.place.run("ip rule add pref 32765 lookup local; ip rule del pref 0");
    assert_eq!(host.lay(&paths), MENDED);
    assert!(host.rules().iter().all(|rule| !rule.contains("iif eth0")));
    assert!(way("10.0.0.1").is_some_and(|way| way.contains("local")));
}

#[test]
fn a_carriers_rules_are_seen_to_be_others_when_somebody_has_removed_some() {
    let host = Host::new();
    let nft = |words: &[&str]| Command::new("nft").args(words).output().is_ok_and(|output| output.status.success());
    if !nft(&["list", "ruleset"]) {
        eprintln!("SKIPPED: this needs nftables");
        return;
    }
    let hosts = |site: u8| -> BTreeSet<Ipv4Addr> { (1..=9).map(|n| Ipv4Addr::new(10, site, 0, n)).collect() };
    let passing = Passing { beyond: hosts(1), mates: hosts(0), port: PORT, closed: ["eth0".to_owned()].into() };
    host.place.enter();
    host.runtime.block_on(async {
        let seen = rules::enforce(&passing).await.unwrap();
        assert_eq!(rules::in_force().await, Ok(seen.clone()));
        for removed in [
            &["flush", "ruleset"][..],
            &["flush", "chain", "inet", "godwit-extenders", "forward"],
            &["delete", "element", "inet", "godwit-extenders", "mates", "{ 10.0.0.3 }"],
        ] {
            assert!(nft(removed), "{removed:?}");
            assert_ne!(rules::in_force().await, Ok(seen.clone()), "{removed:?}");
            assert_eq!(rules::enforce(&passing).await, Ok(seen.clone()), "{removed:?}");
        }
        rules::lift().await;
        assert!(rules::in_force().await.is_err());
    });
}
