//! Hosts with different QEMUs: what both carry goes there and back; what the older one cannot carry is refused before anything is begun.
//! The other QEMU is what `scripts/setup.sh qemu10` unpacks; without it this is skipped.

use crate::common::pair::{Pair, can_run};
use serde_json::{Value, json};
use std::path::PathBuf;

/// The folder with the other QEMU, if there is one.
fn other_qemu() -> Option<PathBuf> {
    let root = std::env::var_os("GODWIT_QEMU10").unwrap_or_else(|| "/var/cache/godwit-lab/qemu10".into());
    let folder = PathBuf::from(root).join("bin");
    if !folder.join("qemu-system-x86_64").exists() {
        eprintln!("SKIPPED: no QEMU 10 in {}: run scripts/setup.sh qemu10", folder.display());
        return None;
    }
    Some(folder)
}

fn create(pair: &Pair, name: &str, host: &str, machine: &str) {
    let file = pair.path(&format!("{name}.json"));
    let disk = json!({"volume": format!("{name}-root"), "size": 16 << 20, "from": pair.path("disk")});
    let spec = json!({
        "memory": (128 << 20) + 8192, "accel": "tcg", "cpu": "qemu64", "machine": machine, "disks": [disk],
    });
    std::fs::write(&file, spec.to_string()).unwrap();
    pair.ok(&["vm", "create", name, "--at", host, "--file", file.to_str().unwrap(), "--start"]);
}

#[test]
fn a_guest_goes_to_a_newer_qemu_and_back_and_one_that_the_older_cannot_carry_stays() {
    let (true, Some(folder)) = (can_run(), other_qemu()) else { return };
    let mut pair = Pair::new("versions");
    let path = std::env::split_paths(&std::env::var_os("PATH").unwrap()).collect::<Vec<_>>();
    pair.path_of.insert("b", std::env::join_paths([folder].into_iter().chain(path)).unwrap());
    pair.start_controller();
    pair.start_node("a");
    pair.start_node("b");
    std::fs::write(pair.path("disk"), vec![0x5a; 8 << 20]).unwrap();
    let qemu = |host: &str| pair.ask(host, "GET", "/v1/host").unwrap()["qemu"].as_str().unwrap().to_owned();
    assert!(!qemu("a").starts_with("10.") && qemu("b").starts_with("10."), "{} and {}", qemu("a"), qemu("b"));

    create(&pair, "old", "a", "q35");
    for to in ["b", "a"] {
        let moved = pair.json(&["move", "old", "--to", to]);
        assert_eq!(moved["progress"]["outcome"], "completed", "{moved}");
        assert_eq!(pair.json(&["vm", "show", "old"])["host"], *to);
    }

    create(&pair, "new", "b", "q35");
    let (code, _, said) = pair.godwit(&["move", "new", "--to", "a"]);
    assert!(code != 0 && said.contains("has no machine type `pc-q35-10.0`"), "{code}: {said}");
    let shown: Value = pair.json(&["vm", "show", "new"]);
    assert_eq!(shown["host"], "b", "{shown}");
}
