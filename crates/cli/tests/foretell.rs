//! Predictions of real moves of a real guest: it is watched, its moves are foretold before they are made, and compared afterwards.

use crate::common::pair::{Pair, can_run};
use serde_json::Value;

fn is_ordered(span: &Value) -> bool {
    let at = |name: &str| span[name].as_f64().unwrap();
    0.0 <= at("lower") && at("lower") <= at("likely") && at("likely") <= at("upper")
}

#[test]
fn a_guest_is_watched_its_move_is_foretold_and_compared_with_what_it_took() {
    if !can_run() {
        return;
    }
    let mut pair = Pair::with_a_disk("foretell");
    // There guests are watched without being asked for.
    pair.kill_node("b");
    pair.more.insert("b", vec!["--watch-every".into(), "2s".into()]);
    pair.start_node("b");

    // Nothing is known: the link is measured, and the guest is watched for some seconds.
    assert_eq!(pair.json(&["vm", "profile", "web", "--ls"]).as_array().unwrap().len(), 0);
    let told = pair.json(&["predict", "web", "--to", "site-b"]);
    assert_eq!((&told["from"], &told["to"], &told["basis"]["model"]), (&"a".into(), &"b".into(), &"hist".into()));
    assert_eq!(pair.json(&["vm", "profile", "web", "--ls"]).as_array().unwrap().len(), 1);
    assert_eq!(told["basis"]["goodput_by"], "measured now", "{told}");

    // Watched; the log can be taken, and is predicted from without any VM.
    let log = pair.path("web.gwdl");
    let log = log.to_str().unwrap();
    let watched = pair.json(&["vm", "profile", "web", "--for", "3s", "--interval", "200ms", "--log", log]);
    assert_eq!((&watched["state"], &watched["observed"]), (&"done".into(), &"contents".into()), "{watched}");
    assert!(watched["looks"].as_u64().unwrap() > 0 && watched["contents"]["zero"].as_f64().unwrap() > 0.1, "{watched}");
    let offline = pair.json(&["predict", "--log", log, "--rate", "100Mbit"]);
    assert!(offline["total_s"].as_f64().unwrap() > 0.0);
    let (code, _, said) = pair.godwit(&["vm", "profile", "web", "--for", "0s"]);
    assert!(code != 0 && said.contains("for_s"), "{said}");

    let told = pair.json(&["predict", "web", "--to", "b", "--when"]);
    assert_eq!(told["basis"]["model"], "hist", "{told}");
    assert_eq!(told["recommended"], "mirror", "{told}");
    for choice in told["choices"].as_array().unwrap() {
        assert!(["total_s", "downtime_ms", "bytes"].iter().all(|what| is_ordered(&choice[what])), "{choice}");
    }
    let when = &told["when"];
    assert!(when["best"]["downtime_ms"].as_f64() <= when["worst"]["downtime_ms"].as_f64(), "{when}");

    // A move keeps what was foretold of it.
    let moved = pair.json(&["move", "web", "--to", "b"]);
    assert_eq!(moved["progress"]["outcome"], "completed", "{moved}");
    assert!(is_ordered(&moved["prediction"]["total_s"]) && moved["prediction"]["basis"]["model"] == "hist", "{moved}");
    let shown = pair.ok(&["move", "show", "web"]);
    assert!(shown.contains("pause predicted") && shown.contains("measured"), "{shown}");
    let accuracy = pair.json(&["predict", "--accuracy"]);
    assert_eq!(accuracy["moves"], 1, "{accuracy}");

    // The profile is found though the VM has gone, and the way back goes by what the move there has shown: what moves take between these
    // hosts. By how much the first prediction was off says nothing of it, as that one had to assume it.
    let kept = || pair.json(&["vm", "profile", "web", "--ls"]).as_array().unwrap().clone();
    let at = |host: &str| kept().iter().filter(|profile| profile["host"] == host).count();
    assert_eq!(at("a"), 2);
    pair.until("the guest is watched by itself", || {
        kept().iter().any(|profile| profile["host"] == "b" && profile["looks"].as_u64() > Some(0))
    });
    let taught = |told: &Value| {
        let basis = &told["basis"];
        (basis["past_moves"].as_u64().unwrap(), basis["past_predictions"].as_u64().unwrap(), basis["model"].clone())
    };
    let back = pair.json(&["predict", "web", "--to", "a"]);
    assert_eq!(taught(&back), (1, 0, "hist".into()), "{back}");

    // One that knew it teaches the next.
    let moved = pair.json(&["move", "web", "--to", "a"]);
    assert_eq!((&moved["progress"]["outcome"], taught(&moved["prediction"]).0), (&"completed".into(), 1), "{moved}");
    let again = pair.json(&["predict", "web", "--to", "b"]);
    assert_eq!(taught(&again), (2, 1, "hist".into()), "{again}");
}
