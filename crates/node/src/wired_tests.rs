//! What is remembered of a wire, and which wires there may be.

use super::*;
use serde_json::json;

fn order(id: u32, ends: [u32; 2]) -> WireOrder {
    let end = |endpoint: u32, n: u8| {
        let at = |port: u16| format!("10.0.0.{n}:{port}");
        json!({
            "endpoint": endpoint, "name": format!("vm{endpoint}:eth0"), "mac": format!("02:00:00:00:00:0{n}"),
            "view": {
                "host": {"name": format!("h{n}"), "underlay": format!("10.0.0.{n}"),
                         "link": {"control": at(1), "disk": at(2), "memory": at(3)}},
                "lineage": 0, "generation": 1,
            },
        })
    };
    serde_json::from_value(json!({"id": id, "vni": id, "mtu": 1500, "ends": [end(ends[0], 1), end(ends[1], 2)]}))
        .unwrap()
}

fn held(order: WireOrder) -> Held {
    Held::new(&"h1".parse().unwrap(), Kept { order, before: vec![] })
}

#[test]
fn an_endpoint_has_one_wire_at_the_most() {
    let folder = tempfile::tempdir().unwrap();
    let wired = Wired::new(folder.path());
    wired.take_in(held(order(7, [1, 2]))).unwrap();
    let error = wired.take_in(held(order(8, [2, 3]))).unwrap_err();
    assert_eq!(error.problem, Problem::Conflict, "{error}");
    assert!(wired.of(3).is_none() && wired.of(2).is_some() && !wired.has(8));
    wired.take_in(held(order(8, [3, 4]))).unwrap();
}

#[test]
fn a_wire_is_remembered_with_where_its_ends_are_and_who_has_not_heard_yet() {
    let folder = tempfile::tempdir().unwrap();
    let wired = Wired::new(folder.path());
    let mut it = held(order(7, [1, 2]));
    let me = it.order.ends[0].view.host.clone();
    let open = Opened { sequence: Sequence { lineage: 0, generation: 4 }, capability: None };
    // The second end has come here, too.
    it.opened(&me, Side::A, &open).unwrap();
    it.opened(&me, Side::B, &open).unwrap();
    assert_eq!((it.plan().remotes, it.plan().devices), (vec![], vec!["gwt1".into(), "gwt2".into()]));
    wired.store(7, &serde_json::to_vec(&it.kept()).unwrap()).unwrap();
    let kept: Kept = serde_json::from_slice(&std::fs::read(wired.path(7)).unwrap()).unwrap();
    let again = Held::new(&me.name, kept);
    assert_eq!(again.order, it.order);
    assert_eq!(
        again.machine.due(),
        BTreeSet::from(["h2".parse().unwrap()]),
        "it went from there, and that is not known there"
    );
    assert_eq!(again.hosts[&"h2".parse::<Name>().unwrap()].underlay, IpAddr::from([10, 0, 0, 2]));
}

#[test]
fn an_end_that_has_been_on_more_hosts_than_are_remembered_is_still_found() {
    let mut it = held(order(7, [1, 2]));
    let before = it.order.ends[1].view.host.clone();
    for n in 1..=2 * MOST_HOSTS as u64 {
        let mut told = it.order.ends.clone().map(|end| end.view);
        told[1].host = PeerHost { name: format!("host{n}").parse().unwrap(), ..before.clone() };
        told[1].generation = Generation(1 + n);
        let from = told[1].host.name.clone();
        assert!(it.learn(&from, told, false));
        assert!(it.hosts.contains_key(&from) && it.hosts.len() < MOST_HOSTS, "{n}: {:?}", it.hosts.keys());
    }
}

#[test]
fn a_wire_whose_file_is_torn_is_still_one_until_it_is_told_again_or_forgotten() {
    let folder = tempfile::tempdir().unwrap();
    let wired = Wired::new(folder.path());
    for wire in [7, 8] {
        wired.store(wire, b"torn").unwrap();
    }
    wired.store(9, &serde_json::to_vec(&held(order(9, [3, 4])).kept()).unwrap()).unwrap();
    let wired = Wired::new(folder.path());
    wired.recover(&"h1".parse().unwrap());
    assert_eq!([7, 8, 9, 10].map(|wire| wired.has(wire)), [true, true, true, false]);
    assert_eq!(wired.unread().into_keys().collect::<Vec<_>>(), [7, 8]);
    assert!(wired.get(7).is_none() && wired.get(9).is_some());
    wired.take_in(held(order(7, [1, 2]))).unwrap();
    wired.forget(8).unwrap();
    assert_eq!(wired.unread(), BTreeMap::new());
    assert_eq!([7, 8].map(|wire| wired.has(wire)), [true, false]);
}

#[test]
fn an_answer_to_what_was_said_before_leaves_it_to_be_said_what_has_changed_since() {
    let (mut it, me, open) = opened_here();
    let other: Name = "h2".parse().unwrap();
    let there = PeerHost { name: "h3".parse().unwrap(), ..me.clone() };
    let views = |order: &WireOrder| order.ends.clone().map(|end| end.view);
    let said = views(&it.order);
    assert!(it.left(Side::A, &Coming { host: there, capability: None }));
    let told = views(&it.order);
    // The move is undone while that is under way, and its answer comes afterwards.
    it.opened(&me, Side::A, &open).unwrap();
    let known = views(&it.order);
    let answer = |told: &[EndView; 2], said: &[EndView; 2]| {
        [0, 1].map(|i| as_answered(&told[i], said[i].clone(), known[i].clone()))
    };
    it.learn(&other, answer(&told, &told), true);
    assert!(it.machine.due().contains(&other));
    // One that does not believe what it is told is not told for ever.
    it.learn(&other, answer(&known, &said), true);
    assert!(!it.machine.due().contains(&other));
    // Whoever speaks of what is over hears of it.
    let mut again = Held::new(&me.name, it.kept());
    again.opened(&me, Side::A, &open).unwrap();
    again.learn(&other, [0, 1].map(|i| as_said(said[i].clone(), known[i].clone())), false);
    assert!(again.machine.due().contains(&other));
}

#[test]
fn a_host_without_an_end_that_does_not_answer_is_told_until_the_controller_has_spoken() {
    let (mut it, me, _) = opened_here();
    let at = |generation| Sequence { lineage: 0, generation };
    it.opened(&me, Side::B, &Opened { sequence: at(4), capability: None }).unwrap();
    let left: Name = "h2".parse().unwrap();
    for ordered in [None, Some([at(1), at(3)])] {
        it.ordered = ordered;
        it.fell_silent(&left, false);
        assert!(it.machine.due().contains(&left), "{ordered:?}");
    }
    it.ordered = Some([at(1), at(4)]);
    it.fell_silent(&left, false);
    assert_eq!((it.machine.due(), it.kept().before), (BTreeSet::new(), vec![]));
}

#[test]
fn a_host_that_gave_an_end_back_says_so_with_what_it_came_with() {
    let (mut it, me, _) = opened_here();
    let source = PeerHost { name: "h3".parse().unwrap(), ..me.clone() };
    it.machine.close(Side::A);
    let before = it.order.ends[0].view.clone();
    it.gave_back(Side::A, &source);
    let view = EndView { host: source.clone(), generation: before.generation.next(), ..before };
    assert_eq!(it.order.ends[0].view, view);
    assert_eq!(it.machine.due(), BTreeSet::from(["h2", "h3"].map(|host| host.parse::<Name>().unwrap())));
    assert!(it.hosts.contains_key(&source.name));
}

/// A wire whose first end is open on this host: that, and how it was opened.
fn opened_here() -> (Held, PeerHost, Opened) {
    let mut it = held(order(7, [1, 2]));
    let me = it.order.ends[0].view.host.clone();
    let open = Opened { sequence: Sequence { lineage: 0, generation: 1 }, capability: None };
    it.opened(&me, Side::A, &open).unwrap();
    (it, me, open)
}

#[test]
fn what_is_said_at_a_guests_stop_is_remembered_before_and_said_by_nobody_until_then() {
    let (mut it, me, _) = opened_here();
    let there = PeerHost { name: "h3".parse().unwrap(), ..me.clone() };
    let coming = Coming { host: there.clone(), capability: None };
    let before = serde_json::to_value(it.kept()).unwrap();
    it.leaving[0] = Some(coming.clone());
    let remembered = serde_json::to_value(it.kept()).unwrap();
    assert_ne!(remembered, before);
    assert!(it.order.ends[0].view.coming.is_none() && !it.machine.due().contains(&there.name));
    // At the stop nothing is left to write.
    assert!(it.left(Side::A, &coming));
    assert_eq!(serde_json::to_value(it.kept()).unwrap(), remembered);
    assert_eq!(it.order.ends[0].view.coming.as_ref(), Some(&coming));
    assert!(it.machine.due().contains(&there.name) && !it.left(Side::A, &coming));
}

#[test]
fn a_host_that_dies_before_its_guest_stops_says_more_than_it_remembers_when_it_is_back() {
    let (mut it, me, open) = opened_here();
    let there = PeerHost { name: "h3".parse().unwrap(), ..me.clone() };
    it.leaving[0] = Some(Coming { host: there, capability: None });
    let mut again = Held::new(&me.name, it.kept());
    let remembered = stamp(&again.order.ends[0].view);
    again.opened(&me, Side::A, &open).unwrap();
    assert!(again.order.ends[0].view.coming.is_none() && stamp(&again.order.ends[0].view) > remembered);
    // The move was undone, or there was another one since: nothing is about to go.
    it.opened(&me, Side::A, &open).unwrap();
    assert_eq!(it.kept().order, it.order);
}

#[test]
fn files_of_wires_wait_for_a_guest_that_stands_and_comes_here_and_its_source_speaks_for_it_until_then() {
    let folder = tempfile::tempdir().unwrap();
    let spec = json!({"memory": 4096});
    let definition = json!({"id": 7, "name": "web", "spec": spec, "volumes": [], "wires": [{"id": 1}]});
    let file = serde_json::from_value(json!({"definition": definition})).unwrap();
    let parts = Arc::new(Parts::new(folder.path().into(), folder.path().into(), file));
    let vms = [parts.clone()];
    let speaks = |from: &str, endpoint| brought(&vms, from, endpoint).is_some();
    let ticket = godwit_handoff::Ticket {
        vm: parts.id,
        lineage: Lineage(0),
        generation: Generation(2),
        mv: godwit_handoff::MoveId(3),
    };
    parts.begin_arrival(ticket, &order(7, [1, 2]).ends[0].view.host);
    let moving = parts.moving().unwrap();
    assert_eq!([speaks("h1", 1), speaks("h2", 1), speaks("h1", 2)], [true, false, false]);
    assert!(!moving.is_awaited(), "it runs at the source");
    moving.stands();
    assert!(moving.is_awaited());
    moving.arrived.store(true, std::sync::atomic::Ordering::Relaxed);
    assert!(!moving.is_awaited() && !speaks("h1", 1), "it runs here");
    moving.arrived.store(false, std::sync::atomic::Ordering::Relaxed);
    moving.over.cancel();
    assert!(!moving.is_awaited() && !speaks("h1", 1), "it stays where it was");
}
