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
    wired.store(7, &it.kept()).unwrap();
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
