//! What becomes of memory over several moves: it is kept for a guest's way back, and several guests go in one order. Real nodes, real QEMUs.

use crate::common::pair::{Pair, can_run};
use crate::common::ram;
use godwit_api::public::Move;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// One after the other: each has two guests for a while.
static MACHINE: Mutex<()> = Mutex::new(());

/// A controller, and nodes on these hosts; none where nothing can run.
fn hosts(name: &str, hosts: &[&'static str]) -> Option<(MutexGuard<'static, ()>, Pair)> {
    let machine = MACHINE.lock().unwrap_or_else(PoisonError::into_inner);
    if !can_run() {
        return None;
    }
    let mut pair = Pair::new(name);
    pair.start_controller();
    hosts.iter().for_each(|host| pair.start_node(host));
    Some((machine, pair))
}

/// Fills 512 KiB of memory with what is not zero, and stands still.
const FILLER: [u8; 33] = [
    0xbd, 0x00, 0x10, //       mov bp, 0x1000
    0x8e, 0xc5, //       next: mov es, bp
    0x31, 0xff, //             xor di, di
    0xb9, 0x00, 0x80, //       mov cx, 0x8000
    0x69, 0xc0, 0x55, 0x62, // word: imul ax, ax, 0x6255
    0x05, 0x19, 0x36, //       add ax, 0x3619
    0xab, //                   stosw
    0xe2, 0xf6, //             loop word
    0x81, 0xc5, 0x00, 0x10, // add bp, 0x1000
    0x81, 0xfd, 0x00, 0x90, // cmp bp, 0x9000
    0x75, 0xe5, //             jne next
    0xf4, //             halt: hlt
    0xeb, 0xfd, //             jmp halt
];
const FILLED: u64 = 512 << 10;

/// A VM that fills some memory.
fn spec(pair: &Pair, name: &str, memory: u64) -> Value {
    let mut disk = vec![0; 1 << 20];
    disk[..FILLER.len()].copy_from_slice(&FILLER);
    disk[510..512].copy_from_slice(&[0x55, 0xaa]);
    let path = pair.path(&format!("disk-{name}"));
    std::fs::write(&path, disk).unwrap();
    json!({"memory": memory, "accel": "tcg", "cpu": "qemu64", "machine": "pc-q35-7.2",
           "disks": [{"volume": name, "size": 1 << 20, "from": path}]})
}

/// Such a VM; when it has.
fn create(pair: &Pair, name: &str, memory: u64) {
    pair.create(name, &spec(pair, name, memory));
    filled(pair, "a", memory);
}

/// When the VM with so much memory has filled some of it.
fn filled(pair: &Pair, host: &str, memory: u64) {
    // Its last word, in the RAM that QEMU shares with whoever is root.
    pair.until("its memory is filled", || {
        pair.guests(host).into_iter().any(|pid| {
            ram(pid, memory).is_some_and(|ram| {
                let mut last = [0; 4];
                ram.read_exact_at(&mut last, 0x8fff8).is_ok() && last != [0; 4]
            })
        })
    });
}

/// A file with a token of a trust domain.
fn token(pair: &Pair, domain: &str) -> String {
    let token = pair.ok(&["token", "create", domain, "--domain", domain, "--role", "admin"]);
    let file = pair.path(&format!("token-{domain}"));
    std::fs::write(&file, token.trim()).unwrap();
    file.to_str().unwrap().to_owned()
}

fn moved(pair: &Pair, to: &str, more: &[&str]) -> Move {
    let out = pair.ok(&[&["move", "web", "--to", to, "--json"], more].concat());
    let mv: Move = serde_json::from_str(out.lines().last().unwrap()).unwrap();
    assert_eq!(pair.json(&["vm", "show", "web"])["host"], to);
    mv
}

#[test]
fn a_vm_that_comes_back_finds_the_memory_that_it_left() {
    let Some((_machine, pair)) = hosts("memback", &["a", "b"]) else { return };
    create(&pair, "web", (128 << 20) + 8192);
    let at = |host: &str, file: &str| pair.path(&format!("{host}/vms/1/{file}"));

    let there = moved(&pair, "b", &["--keep-checkpoint"]);
    let kept = at("a", "checkpoint");
    pair.until("the memory is kept", || kept.metadata().is_ok_and(|m| m.len() > FILLED));
    let sealed = std::fs::read(&kept).unwrap();
    assert!(!sealed.windows(64).any(|w| w == &FILLER[..32] || w.starts_with(&FILLER)), "it is sealed");
    assert!(!at("a", "checkpoint.key").exists() && at("b", "checkpoint.keys").exists(), "the key went with the guest");
    // Whoever has no key has nothing: nobody can start it here either.
    assert_eq!(pair.ask("a", "GET", "/v1/vms").unwrap()[0]["ownership"], "elsewhere");

    let back = moved(&pair, "a", &[]);
    assert!(back.progress.held_memory.0 >= FILLED, "{:?}", back.progress);
    for (host, file) in [("a", "checkpoint"), ("a", "checkpoint.keys"), ("b", "checkpoint"), ("b", "checkpoint.keys")] {
        assert!(!at(host, file).exists(), "{host}: {file}");
    }

    let (again, home) = (moved(&pair, "b", &[]), moved(&pair, "a", &[]));
    assert_eq!((again.progress.held_memory.0, home.progress.held_memory.0), (0, 0));
    let (with, without) = (back.progress.bytes.memory.0, home.progress.bytes.memory.0);
    println!("memory there {}, back with checkpoint {with}, without {without} bytes", there.progress.bytes.memory.0);
    assert!(with * 2 < without, "{with} and {without} bytes");
}

#[test]
fn a_vm_that_comes_back_by_way_of_another_host_finds_the_memory_that_it_left() {
    let Some((_machine, mut pair)) = hosts("memround", &["a", "b", "d"]) else { return };
    create(&pair, "web", (128 << 20) + 8192);
    let root = pair.path(".");
    let at = |host: &str, file: &str| root.join(format!("{host}/vms/1/{file}"));

    moved(&pair, "b", &["--keep-checkpoint"]);
    pair.until("the memory is kept", || at("a", "checkpoint").metadata().is_ok_and(|m| m.len() > FILLED));
    let told = std::fs::read_to_string(at("b", "checkpoint.keys")).unwrap();
    // Its owner there is killed and started again: the keys are on its disk.
    pair.kill_node("b");
    pair.start_node("b");
    let on = moved(&pair, "d", &["--keep-checkpoint"]);
    assert_eq!(on.progress.held_memory.0, 0, "nothing was ever there");
    pair.until("the memory is kept", || at("b", "checkpoint").metadata().is_ok_and(|m| m.len() > FILLED));
    assert!(!at("b", "checkpoint.keys").exists(), "a former owner has no keys");
    let keys: Vec<Value> = serde_json::from_slice(&std::fs::read(at("d", "checkpoint.keys")).unwrap()).unwrap();
    let of = |host: &str| keys.iter().find(|one| one["host"] == host).unwrap_or_else(|| panic!("{host}")).clone();
    assert_eq!(keys.len(), 2);
    assert_ne!(of("a")["key"], of("b")["key"], "what one host has made opens nothing of another's");
    assert!(told.contains(&of("a")["key"].to_string()));

    let home = moved(&pair, "a", &[]);
    assert!(home.progress.held_memory.0 >= FILLED, "{:?}", home.progress);
    // What the third one's neighbour keeps is there still.
    let back = moved(&pair, "b", &[]);
    assert!(back.progress.held_memory.0 >= FILLED, "{:?}", back.progress);
    for (host, file) in
        ["a", "b", "d"].iter().flat_map(|host| ["checkpoint", "checkpoint.keys"].map(|file| (host, file)))
    {
        assert!(!at(host, file).exists(), "{host}: {file}");
    }
}

#[test]
fn a_move_that_is_given_up_in_its_first_seconds_leaves_what_had_come_for_the_next_one() {
    let Some((_machine, pair)) = hosts("memagain", &["a", "b"]) else { return };
    create(&pair, "web", (128 << 20) + 8192);
    pair.ok(&["move", "web", "--to", "b", "--limit", "800k", "--detach"]);
    let sent = || pair.json(&["move", "show", "web"])["progress"]["bytes"]["memory"].as_u64().unwrap_or_default();
    pair.until("some of its memory has gone", || sent() > 192 << 10);
    pair.ok(&["move", "web", "--cancel"]);
    pair.until("it is given up", || pair.json(&["move", "show", "web"])["progress"]["outcome"] == "cancelled");
    pair.until("its place is gone", || pair.guests("b").is_empty());
    let there = moved(&pair, "b", &[]);
    assert!(there.progress.held_memory.0 >= 32 << 10, "{:?}", there.progress);
}

#[test]
fn several_vms_in_one_order_go_one_after_another_and_one_that_waits_can_be_taken_back() {
    let Some((_machine, mut pair)) = hosts("together", &["a", "b"]) else { return };
    create(&pair, "web", (128 << 20) + 8192);
    create(&pair, "mail", (96 << 20) + 8192);

    let (code, out, _) = pair.godwit(&["move", "web", "mail", "--to", "b", "--dry-run", "--json"]);
    let dry: Vec<Value> = serde_json::from_str(&out).unwrap();
    // Which of them is foretold to be over sooner is the machine's to decide.
    let mut named: Vec<&str> = dry.iter().map(|one| one["vm"].as_str().unwrap()).collect();
    named.sort_unstable();
    assert_eq!((code, named), (0, vec!["mail", "web"]));

    let out = pair.ok(&["move", "web", "mail", "--to", "b", "--json"]);
    let moves: Vec<Move> = serde_json::from_str(out.lines().last().unwrap()).unwrap();
    let [first, second] = &moves[..] else { panic!("{out}") };
    assert!(first.id.0 < second.id.0 && first.vm != second.vm, "{out}");
    let runs = first.progress.resumed_unix_us.unwrap();
    // Of a move that waits nothing is done but that it is written down.
    let begins = second.progress.phases.iter().map(|phase| phase.started_unix_us).nth(1).unwrap();
    assert!(begins > runs, "{begins} and {runs}");
    for vm in ["web", "mail"] {
        assert_eq!(pair.json(&["vm", "show", vm])["host"], "b");
    }

    let (code, _, said) = pair.godwit(&["move", "web", "nobody", "--to", "a"]);
    assert!(code != 0 && said.contains("nobody"), "{said}");
    assert_eq!(pair.json(&["vm", "show", "web"])["host"], "b", "all or none");

    // The first one stands still until it is let go: the other waits, also for a controller that is started again.
    std::fs::write(pair.path("points/memory"), "hold").unwrap();
    let table = pair.ok(&["move", "web", "mail", "--to", "a", "--detach"]);
    assert!(table.contains("2 VMs") && table.contains("waits"), "{table}");
    let is_first = pair.json(&["move", "show", "web"])["after"].is_null();
    let (first, second) = if is_first { ("web", "mail") } else { ("mail", "web") };
    pair.until("the first is there", || pair.path("points/memory.reached").exists());
    pair.kill_node("c");
    pair.start_controller();
    let waits = pair.json(&["move", "show", second]);
    assert_eq!(waits["after"], pair.json(&["move", "show", first])["id"], "{waits}");
    pair.ok(&["move", second, "--cancel"]);
    pair.until("it is taken back", || pair.json(&["move", "show", second])["progress"]["outcome"] == "cancelled");
    std::fs::remove_file(pair.path("points/memory")).unwrap();
    pair.until("the other has arrived", || pair.json(&["vm", "show", first])["host"] == "a");
    assert_eq!(pair.json(&["vm", "show", second])["host"], "b");
}

#[test]
fn a_guest_of_the_same_trust_domain_names_what_the_one_before_it_has_brought_and_one_of_another_names_nothing() {
    let Some((_machine, pair)) = hosts("neighbours", &["a", "b"]) else { return };
    // The firmware's memory is all that they have.
    for (domain, names) in [("ann", ["mail", "web"]), ("bob", ["shop", "till"])] {
        let file = token(&pair, domain);
        for name in names {
            let spec = json!({"memory": (96 << 20) + 8192, "accel": "tcg", "cpu": "qemu64", "machine": "pc-q35-7.2",
                              "disks": [{"volume": name, "size": 1 << 20}]});
            let path = pair.path("spec.json");
            std::fs::write(&path, spec.to_string()).unwrap();
            let path = path.to_str().unwrap();
            pair.ok(&["--api-token-file", &file, "vm", "create", name, "--at", "a", "--file", path, "--start"]);
        }
    }
    // `shop` goes between the two, if they are foretold alike: what `mail` brought is nothing to it.
    let out = pair.ok(&["move", "mail", "shop", "web", "--to", "b", "--json"]);
    let moves: Vec<Move> = serde_json::from_str(out.lines().last().unwrap()).unwrap();
    let named: Vec<(&str, u64)> = moves.iter().map(|mv| (mv.vm.as_str(), mv.progress.neighbour_memory.0)).collect();
    println!("{named:?}");
    let of = |is_shop| named.iter().filter(|(vm, _)| (*vm == "shop") == is_shop).collect::<Vec<_>>();
    let (ann, bob) = (of(false), of(true));
    let ([first, second], [shop]) = (&ann[..], &bob[..]) else { panic!("{named:?}") };
    assert_eq!((first.1, shop.1), (0, 0));
    assert!(second.1 >= 64 << 10, "{named:?}");
}

#[test]
fn a_guest_names_what_one_of_its_domain_has_that_was_started_at_the_destination_and_one_of_another_names_nothing() {
    let Some((_machine, pair)) = hosts("residents", &["a", "b"]) else { return };
    let tokens = HashMap::from(["ann", "bob"].map(|domain| (domain, token(&pair, domain))));
    for (name, domain, host, mib) in [("mail", "ann", "b", 96), ("web", "ann", "a", 96), ("shop", "bob", "a", 112)] {
        let memory = (mib << 20) + 8192;
        let mut spec = spec(&pair, name, memory);
        // A customer names no file of a host.
        let from = spec["disks"][0].as_object_mut().unwrap().remove("from").unwrap();
        let file = pair.path("spec.json");
        std::fs::write(&file, spec.to_string()).unwrap();
        let file = file.to_str().unwrap();
        pair.ok(&["--api-token-file", &tokens[domain], "vm", "create", name, "--at", host, "--file", file]);
        let from = from.as_str().unwrap();
        pair.ok(&["volume", "import", "--format", "raw", "--overwrite", "--volume", name, from]);
        pair.ok(&["vm", "start", name]);
        filled(&pair, host, memory);
    }
    let [shop, web] = ["shop", "web"].map(|vm| {
        // So small a memory is through before anybody has looked twice: it waits.
        std::fs::write(pair.path("points/memory"), "hold").unwrap();
        pair.ok(&["move", vm, "--to", "b", "--detach"]);
        pair.until("memory is to go", || pair.path("points/memory.reached").exists());
        let is_told = || {
            let shown = pair.json(&["move", "show", vm]);
            let notes = shown["progress"]["trace"]["notes"].as_array().unwrap();
            notes.iter().any(|note| note["text"].as_str().unwrap().contains("guests of the trust domain have there"))
        };
        // What the destination says of its answer, which it would not if it had not been asked.
        let answered = || {
            let log = std::fs::read_to_string(pair.path("b.log")).unwrap();
            let is_answer = |line: &&str| line.contains("its source was told what others have in memory");
            let line = log.lines().filter(is_answer).find(|line| line.contains(vm))?;
            line.split_once("pages=")?.1.split(' ').next()?.parse::<u64>().ok()
        };
        pair.until("the destination has answered", || answered().is_some());
        if vm == "web" {
            assert!(answered() > Some(0));
            pair.until("the source has heard of a guest", is_told);
        } else {
            assert_eq!(answered(), Some(0), "of a guest of another domain");
            assert!(!is_told());
        }
        for point in ["points/memory", "points/memory.reached"] {
            std::fs::remove_file(pair.path(point)).unwrap();
        }
        pair.until("it has arrived", || pair.json(&["move", "show", vm])["progress"]["outcome"] == "completed");
        serde_json::from_value::<Move>(pair.json(&["move", "show", vm])).unwrap().progress
    });
    let named = [shop.neighbour_memory.0, web.neighbour_memory.0];
    let sent = [shop.bytes.memory.0, web.bytes.memory.0];
    println!("named {named:?}, memory {sent:?} bytes");
    assert_eq!(named[0], 0);
    assert!(named[1] >= FILLED, "{named:?}");
    assert!(sent[1] + (64 << 10) < sent[0], "{sent:?}");
}
