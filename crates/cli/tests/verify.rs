//! `godwit volume verify` from the command line to two nodes' disks.

use crate::common::pair::{Pair, can_run};
use serde_json::json;
use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;

fn rot(pair: &Pair, host: &str, block: u64) {
    let file = OpenOptions::new().read(true).write(true).open(pair.path(&format!("{host}/volumes/1/data"))).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, block * 4096 + 17).unwrap();
    file.write_all_at(&[!byte[0]], block * 4096 + 17).unwrap();
}

#[test]
fn rot_is_named_and_repaired_by_the_command_also_at_a_host_that_only_stands_by() {
    if !can_run() {
        return;
    }
    let mut pair = Pair::with_a_disk("verify");
    let (code, _, said) = pair.godwit(&["volume", "verify", "root"]);
    assert!(code == 1 && said.contains("no other replica"), "{said}");
    pair.ok(&["volume", "precache", "root", "--to", "b", "--interval", "1s"]);
    pair.until("b follows", || {
        let figures = pair.json(&["volume", "status"])[0]["figures"].clone();
        figures["state"] == "following" && figures["backlog"] == 0
    });
    let out = pair.ok(&["volume", "verify", "root"]);
    assert!(out.contains("root at a, b: 8.0 MiB alike"), "{out}");

    // Nobody sends to b any more, and its node has not opened the replica since it was started.
    pair.ok(&["volume", "precache", "root", "--to", "b", "--stop"]);
    pair.kill_node("b");
    rot(&pair, "b", 77);
    pair.start_node("b");
    let (code, out, said) = pair.godwit(&["volume", "verify", "root", "--site", "site-b"]);
    assert!(code == 1 && said.contains("1 blocks are rotten"), "{said}{}", pair.logs());
    assert!(out.contains("blocks 77-77") && out.contains("a right, b rotten (by the digest"), "{out}");
    let out = pair.ok(&["volume", "verify", "root", "--repair"]);
    assert!(out.contains("; repaired"), "{out}");
    let found = pair.json(&["volume", "verify", "root"]);
    assert_eq!((&found["findings"], &found["alike"]), (&json!([]), &json!(8 << 20)), "{found}");

    // It stands by still: a pre-cache goes on with it.
    pair.ok(&["volume", "precache", "root", "--to", "b", "--interval", "1s"]);
    pair.until("b follows again", || pair.json(&["volume", "status"])[0]["figures"]["state"] == "following");

    for (words, why) in [
        (&["--site", "nowhere"][..], "no replica of `root`"),
        (&["--repair", "--from", "nowhere"], "no replica of `root`"),
        (&["--rate", "1K"], "rate"),
    ] {
        let (code, _, said) = pair.godwit(&[&["volume", "verify", "root"], words].concat());
        assert!(code != 0 && said.contains(why), "{words:?}: {said}");
    }
    pair.lose_power("b");
    let (code, out, _) = pair.godwit(&["volume", "verify", "root"]);
    assert!(code == 1 && out.contains("b was left out"), "{out}");
}
