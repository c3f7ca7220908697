//! Memory that follows its guest (post-copy): real nodes, real QEMUs, a link that is slower than the guest, and what may happen on the way.
//!
//! The guest proves by itself that no page was lost or came late: see [`crate::common::checker`]. It writes 8 MiB.
//!
//! How far a round is behind depends on who else uses the machine. So the point `diverge` says that rounds do not converge and leave enough to
//! follow, and nothing here bounds how long memory is predicted to follow but where that is what is tested.

use crate::common::checker;
use crate::common::pair::{Pair, can_run};
use godwit_api::progress::{Outcome, PhaseName};
use godwit_api::public::Move;
use serde_json::json;
use std::sync::{Mutex, MutexGuard, PoisonError};

static MACHINE: Mutex<()> = Mutex::new(());

const MEMORY: u64 = (64 << 20) + 8192;
/// What the link carries. A round over what the guest writes takes over three seconds then.
const LIMIT: &str = "20Mbit/s";
/// Ends the rounds after the first, whatever the machine makes of it: a second one would end too late.
const POLICY: &str = "deadline=1s";
/// No bound: how fast the link is thought to be depends on who else uses the machine.
const FOLLOWS: &str = "--memory-postcopy=1000s";

struct World {
    pair: Pair,
    _machine: MutexGuard<'static, ()>,
}

/// Two hosts, and a guest at the first that writes and checks.
fn world(name: &str) -> Option<World> {
    let machine = MACHINE.lock().unwrap_or_else(PoisonError::into_inner);
    if !can_run() {
        return None;
    }
    let mut pair = Pair::new(name);
    pair.start_controller();
    pair.start_node("a");
    pair.start_node("b");
    let path = pair.path("disk-web");
    std::fs::write(&path, checker::disk(8)).unwrap();
    let spec = json!({"memory": MEMORY, "accel": "tcg", "cpu": "qemu64", "machine": "pc-q35-7.2",
                      "disks": [{"volume": "web", "size": 1 << 20, "from": path}]});
    pair.create("web", &spec);
    // Whether a guest's writes outrun its link is the machine's to decide, and not what is tested.
    std::fs::write(pair.path("points/diverge"), "").unwrap();
    let world = World { pair, _machine: machine };
    world.checks("a", 2);
    Some(world)
}

impl World {
    /// Passes that the guest at `host` has made, and what it has found wrong.
    fn passes(&self, host: &str) -> Option<(u32, u32)> {
        let [pid] = self.pair.guests(host)[..] else { return None };
        checker::passes(pid, MEMORY)
    }

    /// The guest makes so many more passes at `host`, and finds nothing wrong.
    fn checks(&self, host: &str, more: u32) {
        let begun = self.passes(host).map_or(0, |(passes, _)| passes);
        self.pair.until("the guest checks its memory", || {
            let (passes, wrong) = self.passes(host).unwrap_or_default();
            assert_eq!(wrong, 0, "a word that is not what was written, at {wrong:#x}, in pass {passes}");
            passes >= begun + more
        });
    }

    fn order(&self, to: &str, more: &[&str]) -> Move {
        let words = ["move", "web", "--to", to, "--policy", POLICY, "--limit", LIMIT, "--json"];
        let out = self.pair.ok(&[&words, more].concat());
        serde_json::from_str(out.lines().last().unwrap()).unwrap()
    }

    /// Orders a move by post-copy.
    fn follow(&self, to: &str) {
        self.pair.ok(&["move", "web", "--to", to, "--policy", POLICY, "--limit", LIMIT, FOLLOWS, "--detach"]);
    }

    /// Begins one, and returns when the guest runs at its destination without all of its memory.
    fn begin(&self, to: &str) {
        self.follow(to);
        self.until_phase(PhaseName::Drain);
    }

    fn moved(&self) -> Move {
        serde_json::from_value(self.pair.json(&["move", "show", "web"])).unwrap()
    }

    fn until_phase(&self, phase: PhaseName) {
        self.pair.until("the phase", || {
            let mv = self.moved();
            assert!(
                mv.progress.outcome.is_open(),
                "{:?}: {:?}{}",
                mv.progress.outcome,
                mv.progress.error,
                self.pair.logs()
            );
            mv.progress.phase == phase
        });
    }

    fn until(&self, outcome: Outcome) -> Move {
        self.pair.until(&format!("{outcome:?}"), || self.moved().progress.outcome == outcome);
        self.moved()
    }
}

#[test]
fn a_guests_memory_follows_it_and_the_guest_finds_each_page_as_it_was() {
    let Some(world) = world("postshort") else { return };
    let moved = world.order("b", &[FOLLOWS]);
    assert_eq!(moved.progress.outcome, Outcome::Completed);
    let trace = moved.progress.trace;
    assert!(
        moved.progress.phases.iter().any(|phase| phase.name == PhaseName::Drain),
        "{:?}: {trace:?}",
        moved.progress.phases
    );
    world.checks("b", 2);
    assert!(world.pair.guests("a").is_empty(), "nothing is left at the source");
}

#[test]
#[ignore = "takes over half a minute: see scripts/soak.sh follows"]
fn a_guest_that_writes_faster_than_the_link_pauses_far_shorter_when_its_memory_follows_it() {
    let Some(world) = world("postcopy") else { return };
    let anyway = world.order("b", &[]);
    world.checks("b", 2);
    let back = world.order("a", &[FOLLOWS]);
    world.checks("a", 2);
    assert_eq!((anyway.progress.outcome, back.progress.outcome), (Outcome::Completed, Outcome::Completed));
    let notes: Vec<&str> = back.progress.trace.notes.iter().map(|note| note.text.as_str()).collect();
    assert!(notes.iter().any(|note| note.starts_with("post-copy: rounds do not converge")), "{notes:?}");
    assert!(notes.iter().any(|note| note.starts_with("the last page of memory is here")), "{notes:?}");
    assert!(back.progress.phases.iter().any(|phase| phase.name == PhaseName::Drain), "{:?}", back.progress.phases);
    let pause = |mv: &Move| mv.progress.downtime_ms.unwrap();
    println!("pause: {:.0} ms stopped anyway, {:.0} ms by post-copy", pause(&anyway), pause(&back));
    println!("{notes:#?}");
    assert!(pause(&back) * 3.0 < pause(&anyway), "{} and {} ms", pause(&back), pause(&anyway));

    // Less than it would take is allowed: it stops anyway, and says why.
    let short = world.order("b", &["--memory-postcopy=100ms"]);
    let notes = short.progress.trace.notes;
    assert!(notes.iter().any(|note| note.text.starts_with("no post-copy: ")), "{notes:?}");
    assert!(short.progress.phases.iter().all(|phase| phase.name != PhaseName::Drain));
    world.checks("b", 2);
}

#[test]
#[ignore = "takes over half a minute: see scripts/soak.sh follows"]
fn a_cut_while_memory_follows_makes_the_guest_wait_and_is_made_up_for() {
    let Some(world) = world("postcut") else { return };
    world.begin("b");
    world.pair.within("c", "ip link set to-b down");
    std::thread::sleep(std::time::Duration::from_secs(6));
    world.pair.within("c", "ip link set to-b up");
    world.until(Outcome::Completed);
    world.checks("b", 2);
    assert!(world.pair.guests("a").is_empty(), "nothing is left at the source");
}

#[test]
#[ignore = "takes over half a minute: see scripts/soak.sh follows"]
fn a_node_that_is_killed_while_memory_follows_goes_on_where_it_was() {
    let Some(mut world) = world("postkill") else { return };
    for (from, to, killed) in [("a", "b", "a"), ("b", "a", "a")] {
        world.begin(to);
        world.pair.kill_node(killed);
        world.pair.start_node(killed);
        world.until(Outcome::Completed);
        world.checks(to, 2);
        assert!(world.pair.guests(from).is_empty(), "nothing is left at the source");
    }
}

#[test]
#[ignore = "takes over half a minute: see scripts/soak.sh follows"]
fn nodes_that_are_killed_before_the_guest_has_gone_take_it_back_or_bring_it_over_with_its_memory() {
    let Some(mut world) = world("postpoints") else { return };
    let mut here = "a";
    // Whether the guest has to arrive where that node dies; where nothing is said it may, or stay.
    for (point, kills_source, goes) in [
        ("stopped", true, Some(false)),
        ("sealing", true, Some(false)),
        ("prepared", false, None),
        ("sealed", true, Some(true)),
        ("started", false, Some(true)),
    ] {
        let there = if here == "a" { "b" } else { "a" };
        let victim = if kills_source { here } else { there };
        let before = world.passes(here).unwrap().0;
        std::fs::write(world.pair.path(&format!("points/{point}")), "kill").unwrap();
        world.follow(there);
        world.pair.until(point, || world.pair.path(&format!("points/{point}.reached")).exists());
        std::fs::remove_file(world.pair.path(&format!("points/{point}.reached"))).unwrap();
        world.pair.kill_node(victim);
        world.pair.start_node(victim);
        world.pair.until("it ends", || !world.moved().progress.outcome.is_open());
        let outcome = world.moved().progress.outcome;
        println!("{point}: {outcome:?}");
        let arrived = outcome == Outcome::Completed;
        assert!(goes.is_none_or(|goes| goes == arrived), "{point}: {outcome:?}{}", world.pair.logs());
        here = if arrived { there } else { here };
        world.checks(here, 2);
        assert!(world.passes(here).unwrap().0 > before, "it kept its memory: {point}");
        let other = if here == "a" { "b" } else { "a" };
        world.pair.until("one QEMU is left", || world.pair.guests(other).is_empty());
    }
}

#[test]
#[ignore = "takes over half a minute: see scripts/soak.sh follows"]
fn a_post_copy_that_is_cancelled_before_the_seal_leaves_the_guest_where_it_is_with_its_memory() {
    let Some(world) = world("postcancel") else { return };
    let before = world.passes("a").unwrap().0;
    std::fs::write(world.pair.path("points/prepared"), "hold").unwrap();
    world.follow("b");
    // The source's QEMU is in post-copy, and its node waits for the word that lets it seal.
    world.pair.until("prepared", || world.pair.path("points/prepared.reached").exists());
    world.pair.ok(&["move", "web", "--cancel"]);
    world.checks("a", 2);
    assert!(world.passes("a").unwrap().0 > before, "it kept its memory");
    std::fs::remove_file(world.pair.path("points/prepared")).unwrap();
    world.until(Outcome::Cancelled);
    world.pair.until("one QEMU is left", || world.pair.guests("b").is_empty());
    // That QEMU can do it again.
    world.begin("b");
    world.until(Outcome::Completed);
    world.checks("b", 2);
}

#[test]
#[ignore = "takes over half a minute: see scripts/soak.sh follows"]
fn memory_that_is_lost_is_said_to_be_and_the_guest_starts_from_its_disks_when_somebody_wants_it() {
    let Some(mut world) = world("postlost") else { return };
    world.begin("b");
    let [source] = world.pair.guests("a")[..] else { panic!("the source has its QEMU") };
    assert!(std::process::Command::new("kill").args(["-9", &source.to_string()]).status().unwrap().success());
    let mv = world.until(Outcome::MemoryLost);
    let why = mv.progress.error.unwrap();
    assert!(why.contains("godwit vm start web"), "{why}");
    let stands = world.passes("b").unwrap();
    world.pair.ok(&["vm", "start", "web"]);
    world.pair.until("it was started anew", || world.passes("b").is_some_and(|(passes, _)| passes < stands.0));
    world.checks("b", 2);

    // The host that has the pages is gone for good, and nobody can know: it waits until somebody says so.
    world.begin("a");
    let before = world.passes("a").unwrap().0;
    world.pair.lose_power("b");
    let mv = world.until(Outcome::WaitsForPeer);
    assert!(mv.progress.error.unwrap().contains("claim"), "it says what can be done");
    let id = mv.id.0.to_string();
    world.pair.ok(&["move", "resolve", &id, "--claim", "a", "--fenced", "its power was cut by this test"]);
    let mv = world.until(Outcome::MemoryLost);
    assert!(mv.progress.error.unwrap().contains("its power was cut by this test"));
    world.pair.until("it was started anew", || world.passes("a").is_some_and(|(passes, _)| passes < before));
    world.checks("a", 2);
}
