//! What a move does where the guest's pause does not come down to what was ordered, or its rounds do not get shorter: it is given up, and the guest
//! stays; or the guest is slowed until it can go. Real nodes, real QEMUs.

use crate::common::checker;
use crate::common::pair::{Pair, can_run};
use godwit_api::progress::Outcome;
use godwit_api::public::Move;
use godwit_units::Bytes;
use serde_json::{Value, json};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

static MACHINE: Mutex<()> = Mutex::new(());

const MEMORY: u64 = (64 << 20) + 8192;
/// What a guest writes again and again, MiB.
const WRITTEN: u8 = 2;
/// What the link carries. A round over what the guest writes takes two seconds then: QEMU looks after one, no sooner, whether to slow it, and a guest
/// on a busy machine has the time to write all of it.
const LIMIT: &str = "8Mbit/s";
/// Less than the hand-off alone is foreseen to take.
const TOO_SHORT: &str = "max-downtime=20ms";

/// A guest that counts itself, and writes nothing more.
const IDLER: [u8; 14] = [
    0x31, 0xc0, 0x8e, 0xd8, //             ds = 0
    0xc7, 0x06, 0x00, 0x7e, 0x01, 0x00, // [0x7e00] = 1
    0xfa, //                               cli
    0xf4, 0xeb, 0xfd, //             halt: hlt; jmp halt
];

/// Two hosts, and at the first the VM `web`, which boots from this disk.
fn world(name: &str, disk: &[u8]) -> Pair {
    let mut pair = Pair::new(name);
    pair.start_controller();
    pair.start_node("a");
    pair.start_node("b");
    let path = pair.path("disk-web");
    std::fs::write(&path, disk).unwrap();
    let spec = json!({"memory": MEMORY, "accel": "tcg", "cpu": "qemu64", "machine": "pc-q35-7.2",
                      "disks": [{"volume": "web", "size": 1 << 20, "from": path}]});
    pair.create("web", &spec);
    pair
}

/// Passes that the guest at `host` has made over what it writes; it has found nothing wrong. None where it is not there.
fn passes(pair: &Pair, host: &str) -> Option<u32> {
    let [pid] = pair.guests(host)[..] else { return None };
    let (passes, wrong) = checker::passes(pid, MEMORY)?;
    assert_eq!(wrong, 0, "a word that is not what was written, at {wrong:#x}, in pass {passes}");
    Some(passes)
}

/// Waits until it has made so many more, and says how many it makes in a second.
fn goes_on(pair: &Pair, host: &str, more: u32) -> f64 {
    pair.until("the guest is there", || passes(pair, host).is_some());
    let (before, began) = (passes(pair, host).unwrap(), Instant::now());
    pair.until("the guest goes on", || passes(pair, host).is_some_and(|now| now >= before + more));
    f64::from(more) / began.elapsed().as_secs_f64()
}

/// Orders a move of it to `b`, which has to arrive there.
fn moved(pair: &Pair, more: &[&str]) -> Move {
    moved_to(pair, "b", more)
}

fn moved_to(pair: &Pair, host: &str, more: &[&str]) -> Move {
    let out = pair.ok(&[&["move", "web", "--to", host, "--json"], more].concat());
    let mv: Move = serde_json::from_str(out.lines().last().unwrap()).unwrap();
    assert_eq!(mv.progress.outcome, Outcome::Completed);
    assert_eq!(pair.json(&["vm", "show", "web"])["host"], host);
    mv
}

/// Orders a move that is given up: the guest stays at `a`, and it is said why.
fn is_given_up(pair: &Pair) -> Move {
    let (code, _, said) = pair.godwit(&["move", "web", "--to", "b", "--limit", LIMIT, "--policy", TOO_SHORT]);
    assert!(code == 1 && said.contains("the VM stays"), "{code}: {said}{}", pair.logs());
    let mv: Move = serde_json::from_value(pair.json(&["move", "show", "web"])).unwrap();
    assert_eq!(mv.progress.outcome, Outcome::Failed);
    let why = mv.progress.error.as_deref().unwrap();
    assert!(why.contains("the pause would be") && why.contains(TOO_SHORT) && why.contains("another policy"), "{why}");
    assert!(said_of(&mv, "given up: the pause would be"), "{:?}", mv.progress.trace.notes);
    assert_eq!(pair.json(&["vm", "show", "web"])["host"], "a");
    pair.until("nothing is left of it at the destination", || pair.guests("b").is_empty());
    mv
}

fn said_of(mv: &Move, begins: &str) -> bool {
    mv.progress.trace.notes.iter().any(|note| note.text.starts_with(begins))
}

#[test]
fn a_guest_whose_pause_would_be_too_long_stays_and_one_that_is_slowed_goes_and_is_slow_no_more() {
    let _machine = MACHINE.lock().unwrap_or_else(PoisonError::into_inner);
    if !can_run() {
        return;
    }
    let pair = world("policies", &checker::disk(WRITTEN));
    pair.until("the guest checks its memory", || passes(&pair, "a") >= Some(2));
    let alone = goes_on(&pair, "a", 20);

    // Whether a round dirties as much as it sends is the machine's to decide, and not what is tested.
    std::fs::write(pair.path("points/diverge"), "").unwrap();
    let stayed = is_given_up(&pair);
    assert!(said_of(&stayed, "as much is dirtied as is sent"), "{:?}", stayed.progress.trace.notes);
    std::fs::remove_file(pair.path("points/diverge")).unwrap();
    goes_on(&pair, "a", 2);

    let mv = moved(&pair, &["--limit", LIMIT, "--throttle", "99"]);
    let notes: Vec<&str> = mv.progress.trace.notes.iter().map(|note| note.text.as_str()).collect();
    println!("{notes:#?}");
    assert!(notes.iter().any(|note| note.contains("the guest's CPUs are slowed by 40 %")), "{notes:?}");
    // In rounds over all that it writes nothing less would ever be left. On a busy machine a guest that is slowed may be held for a whole round: then
    // nothing is left at once, and QEMU stops it by itself.
    let is_less = |left: u64| left > 0 && left < u64::from(WRITTEN) * 256 / 2;
    let less = mv.progress.rounds.iter().any(|round| is_less(round.dirtied));
    let is_little = |note: &&str| note.contains("is short enough") || note.starts_with("stop: nothing is left to send");
    assert!(less || notes.iter().any(is_little), "{notes:?} {:?}", mv.progress.rounds);
    goes_on(&pair, "b", 2);
    let there = goes_on(&pair, "b", 20);
    println!("passes in a second: {alone:.1} before, {there:.1} there; pause {:?} ms", mv.progress.downtime_ms);
    assert!(there > alone / 4.0, "{there:.2} passes in a second, and {alone:.2} before");
}

#[test]
fn a_guest_that_qemu_stops_by_itself_goes_on_where_it_is_when_its_pause_would_be_too_long() {
    let _machine = MACHINE.lock().unwrap_or_else(PoisonError::into_inner);
    if !can_run() {
        return;
    }
    let mut disk = vec![0; 1 << 20];
    disk[..IDLER.len()].copy_from_slice(&IDLER);
    disk[510..512].copy_from_slice(&[0x55, 0xaa]);
    let pair = world("idles", &disk);
    pair.until("the guest idles", || {
        let [pid] = pair.guests("a")[..] else { return false };
        checker::passes(pid, MEMORY).is_some_and(|(count, _)| count & 0xffff == 1)
    });
    is_given_up(&pair);
    pair.until("it runs", || {
        let (_, out, _) = pair.godwit(&["vm", "monitor", "web", r#"{"execute": "query-status"}"#, "--json"]);
        serde_json::from_str::<Value>(&out).is_ok_and(|answer| answer["status"] == "running")
    });
    moved(&pair, &[]);
}

#[test]
fn a_deadline_ends_rounds_that_would_go_on_and_who_wants_the_fewest_bytes_has_one_round_at_the_highest_level() {
    let _machine = MACHINE.lock().unwrap_or_else(PoisonError::into_inner);
    if !can_run() {
        return;
    }
    let pair = world("deadline", &checker::disk(WRITTEN));
    pair.until("the guest checks its memory", || passes(&pair, "a") >= Some(2));
    // Its first round takes two seconds, and another one as long.
    let mv = moved(&pair, &["--limit", LIMIT, "--policy", "deadline=4s"]);
    assert!(said_of(&mv, "stop: another round would end after 4000 ms"), "{:#?}", mv.progress.trace.notes);
    goes_on(&pair, "b", 2);

    let mv = moved_to(&pair, "a", &["--limit", LIMIT, "--policy", "least-bytes"]);
    let rounds = &mv.progress.rounds;
    assert!(rounds.iter().all(|it| (it.level, it.window) == (Some(9), Some(Bytes(256 << 20)))), "{rounds:#?}");
    assert!(said_of(&mv, "stop: "), "{:#?}", mv.progress.trace.notes);
    println!("{:#?}\n{rounds:#?}", mv.progress.trace.notes);
    goes_on(&pair, "a", 2);
}
