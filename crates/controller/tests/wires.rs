//! Wires between ports, as the controller keeps them: among fake nodes.

use crate::fakes::{World, name, soon};
use godwit_api::public::CreateVm;
use godwit_api::trust::{NewApiToken, TokenRole};
use godwit_api::wire::{ConnectWire, PortWire, Rewire, WireOrder, WirePath, WireState};
use godwit_api::{Problem, PublicClient};
use godwit_trust::{AccessToken, Identity, Role};
use serde_json::{Value, json};

/// A VM with a port for wires, one with a name, one of another MTU, and one on a switch.
fn vm(called: &str, at: &str, number: u8) -> CreateVm {
    let mac = |n: u8| format!("02:00:00:00:{n:02x}:{number:02x}");
    let nics: Value = json!([
        {"mac": mac(0)}, {"mac": mac(1), "name": "uplink"}, {"mac": mac(2), "mtu": 9000}, {"mac": mac(3), "component": "lan"},
    ]);
    serde_json::from_value(json!({"name": called, "at": at, "spec": {
        "memory": 64 << 20, "disks": [], "nics": nics, "boot": {"kernel": {"kernel": "vmlinuz"}},
    }}))
    .unwrap()
}

fn wire(a: &str, b: &str) -> ConnectWire {
    ConnectWire { a: a.parse().unwrap(), b: b.parse().unwrap() }
}

async fn world() -> World {
    let world = World::new().await;
    world.api.create_vm(&vm("web", "ohio", 1)).await.unwrap();
    world.api.create_vm(&vm("db", "texas", 2)).await.unwrap();
    world
}

#[tokio::test]
async fn a_wire_is_told_to_the_hosts_of_its_ends_and_taken_away_from_every_host() {
    let world = world().await;
    let made = world.api.connect_wire(&wire("web:eth0", "db:uplink")).await.unwrap();
    assert_eq!((made.state, made.path), (WireState::Connected, WirePath::Tunnel));
    assert_eq!(world.api.wires().await.unwrap().len(), 2, "those to components are listed apart");
    let told = world.fakes["ohio"].with(|n| n.wires[&made.id].clone());
    assert_eq!(told, world.fakes["texas"].with(|n| n.wires[&made.id].clone()));
    let hosts = told.ends.each_ref().map(|end| end.view.host.name.to_string());
    assert_eq!((hosts, told.vni, told.mtu), (["ohio".into(), "texas".into()], made.vni, 1500));
    let endpoints = told.ends.each_ref().map(|end| end.endpoint);
    let record =
        |host: &str, nic: usize| world.fakes[host].with(|n| n.vms.values().next().unwrap().definition.wires[nic].id);
    assert_eq!(endpoints, [record("ohio", 0), record("texas", 1)], "an endpoint's number is its interface's");

    for (ends, problem, said) in [
        (wire("web:eth0", "db:eth0"), Problem::Conflict, "wired already"),
        (wire("db:eth0", "db:eth0"), Problem::Invalid, "itself"),
        (wire("db:eth0", "web:eth3"), Problem::Conflict, "wired to `lan`"),
        (wire("db:eth0", "web:eth2"), Problem::Conflict, "MTU"),
        (wire("db:eth0", "web:eth7"), Problem::NotFound, "eth7"),
        (wire("db:eth1", "web:uplink"), Problem::NotFound, "eth1"),
        (wire("db:eth0", "nobody:eth0"), Problem::NotFound, "nobody"),
    ] {
        let error = world.api.connect_wire(&ends).await.unwrap_err();
        assert_eq!(error.problem, problem, "{error}");
        assert!(error.message.contains(said), "{error}");
    }
    let error = world.api.remove_vm(&name("db")).await.unwrap_err();
    assert!(error.message.contains("is wired"), "{error}");

    // Where an end was once.
    world.fakes["maine"].with(|n| n.wires.insert(made.id, told));
    world.api.disconnect_wire(made.id).await.unwrap();
    assert!(["ohio", "texas", "maine"].iter().all(|host| world.fakes[host].with(|n| n.wires.is_empty())));
    assert_eq!(world.api.port_wires().await.unwrap(), []);
    assert_eq!(world.api.port_wire(made.id).await.unwrap_err().problem, Problem::NotFound);
    world.api.connect_wire(&wire("web:eth0", "db:eth0")).await.unwrap();
}

#[tokio::test]
async fn what_a_host_that_is_away_misses_it_is_told_when_it_is_back() {
    let mut world = world().await;
    let address = world.stop_node("texas").await;
    let made = world.api.connect_wire(&wire("web:eth0", "db:eth0")).await.unwrap();
    assert_eq!(made.state, WireState::Connecting);
    world.start_node("texas", address).await;
    assert!(soon(async || world.api.port_wire(made.id).await.unwrap().state == WireState::Connected).await);
    assert!(world.fakes["texas"].with(|n| n.wires.contains_key(&made.id)));

    let address = world.stop_node("texas").await;
    world.api.disconnect_wire(made.id).await.unwrap_err();
    assert_eq!(world.api.port_wire(made.id).await.unwrap().state, WireState::Disconnecting);
    world.start_node("texas", address).await;
    assert!(soon(async || world.api.port_wires().await.unwrap().is_empty()).await);
    assert!(world.fakes["texas"].with(|n| n.wires.is_empty()));
}

#[tokio::test]
async fn what_hosts_have_of_wires_and_the_records_are_made_the_same() {
    let mut world = world().await;
    let made = world.api.connect_wire(&wire("web:eth0", "db:eth0")).await.unwrap();
    let told = world.fakes["ohio"].with(|n| n.wires[&made.id].clone());
    // Its host was away, and no host, while a wire was disconnected, or heard of it late. Another store's is not ours to take away.
    let gone = world.api.connect_wire(&wire("web:uplink", "db:uplink")).await.unwrap();
    world.api.disconnect_wire(gone.id).await.unwrap();
    let others = u32::MAX;
    let had = [gone.id, others].map(|id| (id, WireOrder { id, ..told.clone() }));
    world.fakes["maine"].with(|n| n.wires.extend(had));
    // Its file was lost, and the other end's host is away.
    world.stop_node("texas").await;
    world.fakes["ohio"].with(|n| n.wires.clear());
    let known = |host: &str| world.fakes[host].with(|n| n.wires.keys().copied().collect::<Vec<_>>());
    assert!(soon(async || known("maine") == [others] && known("ohio") == [made.id]).await);
    assert_eq!(world.fakes["ohio"].with(|n| n.wires[&made.id].clone()), told);
}

#[tokio::test]
async fn a_host_that_waits_for_one_that_there_is_not_any_more_hears_where_the_ends_are() {
    let world = world().await;
    let made = world.api.connect_wire(&wire("web:eth0", "db:eth0")).await.unwrap();
    let told = world.fakes["ohio"].with(|n| n.wires[&made.id].clone());
    // One that an end has left, and one that has an end.
    for host in ["maine", "ohio"] {
        world.fakes[host].with(|n| {
            n.wires.insert(made.id, told.clone());
            n.untold = vec![name("removed")];
        });
    }
    assert!(soon(async || ["maine", "ohio"].iter().all(|host| world.fakes[host].with(|n| n.untold.is_empty()))).await);
}

/// What there is, by its ends.
async fn ends(world: &World) -> Vec<String> {
    let said = |wire: &PortWire| format!("{}-{}", wire.ends[0].end, wire.ends[1].end);
    let mut ends: Vec<String> = world.api.port_wires().await.unwrap().iter().map(said).collect();
    ends.sort();
    ends
}

#[tokio::test]
async fn wires_give_way_to_others_all_at_once_or_not_at_all() {
    let world = world().await;
    world.api.create_vm(&vm("app", "maine", 3)).await.unwrap();
    let old = world.api.connect_wire(&wire("web:eth0", "db:eth0")).await.unwrap();
    let before = ends(&world).await;
    let new = |connect: &[(&str, &str)], disconnect: &[u32], objects: Option<[&str; 2]>| Rewire {
        connect: connect.iter().map(|(a, b)| wire(a, b)).collect(),
        disconnect: disconnect.to_vec(),
        unless_joined: objects.map(|pair| pair.map(name)),
    };
    let good = ("web:eth0", "app:eth0");
    for (change, problem, said) in [
        (new(&[good], &[], None), Problem::Conflict, "wired already"),
        (new(&[good, ("db:eth0", "app:eth0")], &[old.id], None), Problem::Conflict, "wired already"),
        (new(&[good, ("db:eth0", "app:eth2")], &[old.id], None), Problem::Conflict, "MTU"),
        (new(&[good], &[old.id, 999], None), Problem::NotFound, "999"),
        (new(&[("web:uplink", "db:uplink")], &[], Some(["db", "web"])), Problem::Conflict, "joined already"),
        (new(&[good; 65], &[], None), Problem::Invalid, "at once"),
    ] {
        let error = world.api.rewire(&change).await.unwrap_err();
        assert_eq!(error.problem, problem, "{error}");
        assert!(error.message.contains(said), "{error}");
        assert_eq!(ends(&world).await, before, "{error}");
        assert!(world.fakes["maine"].with(|n| n.wires.is_empty()), "{error}");
    }
    // Those that go do not join them any more.
    let change = new(&[("app:uplink", "db:uplink"), good, ("app:eth1x", "db:eth0")], &[old.id], Some(["web", "db"]));
    assert_eq!(world.api.rewire(&change).await.unwrap_err().problem, Problem::NotFound);
    let change = new(&[("app:uplink", "db:uplink"), good], &[old.id], Some(["web", "db"]));
    let made = world.api.rewire(&change).await.unwrap();
    assert!(made.iter().all(|wire| wire.state == WireState::Connected), "{made:?}");
    assert_eq!(made.iter().map(|wire| wire.ends[0].end.to_string()).collect::<Vec<_>>(), ["app:uplink", "web:eth0"]);
    assert_eq!(ends(&world).await, ["app:uplink-db:uplink", "web:eth0-app:eth0"]);
    for (host, count) in [("ohio", 1), ("texas", 1), ("maine", 2)] {
        assert_eq!(world.fakes[host].with(|n| n.wires.len()), count, "{host}");
    }
}

#[tokio::test]
async fn a_host_that_is_away_keeps_no_other_wire_from_being_made() {
    let mut world = world().await;
    world.api.create_vm(&vm("app", "maine", 3)).await.unwrap();
    let away = world.api.connect_wire(&wire("web:eth0", "db:eth0")).await.unwrap();
    let address = world.stop_node("texas").await;
    let change = Rewire { connect: vec![wire("web:eth0", "app:eth0")], disconnect: vec![away.id], unless_joined: None };
    let made = world.api.rewire(&change).await.unwrap();
    assert_eq!(made[0].state, WireState::Connected);
    assert_eq!(world.api.port_wire(away.id).await.unwrap().state, WireState::Disconnecting);
    world.start_node("texas", address).await;
    assert!(soon(async || ends(&world).await == ["web:eth0-app:eth0"]).await);
    assert!(world.fakes["texas"].with(|n| n.wires.is_empty()));
}

#[tokio::test]
async fn a_domain_wires_its_own_and_sees_no_others() {
    let world = World::new().await;
    let mut tokens = vec![];
    for (called, domain) in [("ann", "acme"), ("bob", "beta")] {
        let new = NewApiToken { name: name(called), domain: name(domain), role: TokenRole::Admin, ttl_s: 3600 };
        let token: AccessToken = world.api.create_token(&new).await.unwrap().token.parse().unwrap();
        let controller = Identity::new(Role::Controller, "controller").unwrap();
        tokens.push(PublicClient::with_token(world.controller_address(), controller, &token));
    }
    let (ann, bob) = (&tokens[0], &tokens[1]);
    ann.create_vm(&vm("web", "ohio", 1)).await.unwrap();
    ann.create_vm(&vm("db", "texas", 2)).await.unwrap();
    bob.create_vm(&vm("other", "ohio", 3)).await.unwrap();
    let error = bob.connect_wire(&wire("other:eth0", "web:eth0")).await.unwrap_err();
    assert_eq!(error.problem, Problem::NotFound, "{error}");
    let made = ann.connect_wire(&wire("web:eth0", "db:eth0")).await.unwrap();
    assert_eq!((ann.port_wires().await.unwrap().len(), bob.port_wires().await.unwrap().len()), (1, 0));
    for error in [bob.port_wire(made.id).await.unwrap_err(), bob.disconnect_wire(made.id).await.unwrap_err()] {
        assert_eq!(error.problem, Problem::NotFound, "{error}");
    }
    ann.disconnect_wire(made.id).await.unwrap();
}
