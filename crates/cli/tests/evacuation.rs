//! A real site's plan of evacuation, and a group of VMs that is foretold as one after another, and moved.

use crate::common::pair::{Pair, can_run};
use godwit_api::evacuation::{Evacuation, InTime};
use serde_json::{Value, json};

fn plan(pair: &Pair, words: &[&str]) -> Evacuation {
    let words = [&["predict", "--site", "site-a", "--json"], words].concat();
    Evacuation::read(pair.ok(&words).lines().last().unwrap()).unwrap()
}

#[test]
fn a_site_is_planned_away_and_a_group_is_foretold_one_after_another() {
    if !can_run() {
        return;
    }
    let pair = Pair::with_a_disk("evacuation");
    let spec = json!({
        "memory": (128 << 20) + 8192, "accel": "tcg", "cpu": "qemu64", "machine": "pc-q35-7.2",
        "disks": [{"volume": "db", "size": 16 << 20}],
    });
    pair.create("db", &spec);
    let idle = json!({
        "memory": (64 << 20) + 8192, "accel": "tcg", "cpu": "qemu64", "machine": "pc-q35-7.2",
        "disks": [{"volume": "idle", "size": 16 << 20}],
    });
    pair.create("idle", &idle);
    pair.ok(&["vm", "stop", "idle", "--force"]);
    pair.ok(&["vm", "profile", "db", "--for", "2s", "--interval", "200ms"]);

    // Everything is known of it, and it is off where it is off.
    let whole = plan(&pair, &["--all", "--deadline", "10m"]);
    assert_eq!((whole.vms, whole.moves.len(), whole.in_time), (3, 3, 3), "{whole:?}");
    let find = |plan: &Evacuation, vm: &str| plan.moves.iter().find(|mv| mv.vm.as_str() == vm).cloned().unwrap();
    let (web, db, off) = (find(&whole, "web"), find(&whole, "db"), find(&whole, "idle"));
    assert_eq!((web.model.as_str(), db.model.as_str(), off.strategy.as_str()), ("assumed", "profile", "cold"));
    assert!(
        [&web, &db].iter().all(|mv| mv.from.as_str() == "a" && mv.to.as_str() == "b" && mv.site.as_str() == "site-b")
    );
    assert_eq!((whole.links[0].goodput_by.as_str(), whole.silent.len()), ("measured now", 0), "{whole:?}");
    assert!(web.bytes > db.bytes || web.bytes.0 > 0, "{whole:?}");

    // For people; with a deadline that nobody meets; of some VMs only.
    let said = pair.ok(&["predict", "--site", "site-a", "--all", "--deadline", "10m"]);
    for part in
        ["STRATEGY", "LINK TO", "site-b", "idle: it is off", "3 of 3 VMs of site-a are likely away within 600.0 s"]
    {
        assert!(said.contains(part), "{part}: {said}");
    }
    let hurried = plan(&pair, &["--all", "--deadline", "10ms"]);
    assert!(hurried.in_time == 0 && hurried.moves.iter().all(|mv| mv.in_time == InTime::Late), "{hurried:?}");
    let list = pair.path("list");
    std::fs::write(&list, "db # the database\n").unwrap();
    let some = plan(&pair, &["--vms", list.to_str().unwrap(), "--deadline", "10m", "--to", "site-b"]);
    assert_eq!(some.moves.iter().map(|mv| mv.vm.as_str()).collect::<Vec<_>>(), ["db"]);
    for (words, why) in [
        (&["--all", "--deadline", "10m", "--to", "site-a"][..], "is to be left"),
        (&["--all", "--deadline", "10m", "--to", "mars"], "mars"),
        (&["--all"], "--deadline"),
        (&["--deadline", "10m"], "--all"),
    ] {
        let (code, _, said) = pair.godwit(&[&["predict", "--site", "site-a"], words].concat());
        assert!(code != 0 && said.contains(why), "{words:?}: {said}");
    }

    // Nothing but its disks can go of a VM that is off.
    let off = pair.json(&["predict", "idle", "--to", "b"]);
    assert_eq!((off["choices"].as_array().unwrap().len(), &off["recommended"]), (1, &Value::Null), "{off}");
    assert!(off["why"].as_str().unwrap().contains("is off"), "{off}");

    // A group: the second's turn comes when the first is there, and what it is foretold to take begins with that.
    let moved = pair.json(&["move", "web", "db", "--to", "b"]);
    let [first, second] = moved.as_array().unwrap().as_slice() else { panic!("{moved}") };
    let likely = |mv: &Value, what: &str| mv["prediction"][what]["likely"].as_f64().unwrap_or(-1.0);
    assert!(first["prediction"]["begins_s"].is_null(), "{first}");
    assert!((likely(second, "begins_s") - likely(first, "total_s")).abs() < 1e-6, "{second}");
    assert!(likely(second, "total_s") > likely(first, "total_s"), "{second}");
    let accuracy = pair.json(&["predict", "--accuracy"]);
    assert_eq!(accuracy["moves"], 2, "{accuracy}");

    // Who has gone is not planned any more.
    let rest = plan(&pair, &["--all", "--deadline", "10m"]);
    assert_eq!(rest.moves.iter().map(|mv| mv.vm.as_str()).collect::<Vec<_>>(), ["idle"]);
}
