//! The controller dies at every single thing that it does: before it, and after it but before the answer. The next controller
//! on the same store finishes what was begun, or takes it back: nothing is forgotten, nothing is left half done.
//!
//! What counts as a thing is what others can see: a commit of its store, a number that it draws, an order to a node. In
//! between there is nothing that a crash could tell apart.

use crate::fakes::{Death, World, name, soon, to_host, web};
use godwit_api::host::RunState;
use godwit_api::progress::Outcome;
use godwit_api::public::CreateVm;
use godwit_api::wire::{ConnectWire, Rewire, WireState};
use godwit_units::Generation;

/// More deeds than any of these takes: one that gets here would go on for ever.
const MOST: u64 = 60;

/// Asks, and hears the answer, or that the controller died: then nobody answers any more.
async fn ask<T>(world: &World, asking: impl Future<Output = T>) {
    tokio::select! {
        _ = asking => {}
        dead = soon(async || world.fate.is_dead()) => assert!(dead, "neither an answer nor a death"),
    }
}

/// The ways to die, the `number`th deed of each.
fn deaths(number: u64) -> [(u64, Death); 2] {
    assert!(number < MOST);
    [(number, Death::Before), (number, Death::After)]
}

/// Nothing of a VM is anywhere.
async fn is_nowhere(world: &World) -> bool {
    let told = world.api.vms().await.is_ok_and(|vms| vms.is_empty())
        && world.api.volumes().await.is_ok_and(|volumes| volumes.is_empty());
    told && world.fakes.values().all(|f| f.with(|n| n.vms.is_empty() && n.gateways.is_empty()))
}

/// It is wholly there, runs, and its gateway leads to it.
async fn is_whole(world: &World) -> bool {
    let Ok(vm) = world.api.vm(&name("web")).await else { return false };
    let on_node = world.fakes["ohio"].with(|n| n.vms.values().any(|vm| vm.run == RunState::Running));
    let wired = world.fakes["maine"].with(|n| n.gateways.values().any(|port| port.generation == Generation(1)));
    // A life of its own: what is not ready refuses this with a conflict.
    let ready = world.api.monitor(&name("web"), None, &serde_json::json!({"execute": "query-status"})).await.is_ok();
    vm.run == Some(RunState::Running) && on_node && wired && ready
}

#[tokio::test]
async fn a_creation_is_finished_or_undone_wherever_the_controller_dies() {
    let (mut whole, mut nowhere) = (0, 0);
    for number in 0.. {
        let mut survived = false;
        for (number, death) in deaths(number) {
            let mut world = World::new().await;
            world.fate.arm(number, death);
            let _ = world.api.create_vm(&web("ohio")).await;
            survived = !world.fate.is_dead();
            if survived {
                break;
            }
            world.stop_controller().await;
            world.start_controller().await;
            let ended = soon(async || is_whole(&world).await || is_nowhere(&world).await).await;
            assert!(ended, "half a VM is left: {death:?} deed {number}: {:#?}", world.api.vms().await);
            if is_whole(&world).await {
                whole += 1;
            } else {
                nowhere += 1;
                world.api.create_vm(&web("ohio")).await.unwrap();
                assert!(is_whole(&world).await, "its name and its volume are free again");
            }
        }
        if survived {
            break;
        }
    }
    assert!(whole >= 4 && nowhere >= 8, "{whole} finished, {nowhere} undone");
}

#[tokio::test]
async fn a_deletion_is_finished_or_never_begun_wherever_the_controller_dies() {
    let mut gone = 0;
    for number in 0.. {
        let mut survived = false;
        for (number, death) in deaths(number) {
            let mut world = World::new().await;
            world.web().await;
            world.fakes["ohio"].with(|n| n.vms.get_mut(&1).unwrap().run = RunState::Off);
            world.fate.arm(number, death);
            let _ = world.api.remove_vm(&name("web")).await;
            survived = !world.fate.is_dead();
            if survived {
                break;
            }
            world.stop_controller().await;
            world.start_controller().await;
            let begun = number > 0 || death == Death::After;
            if begun {
                assert!(soon(async || is_nowhere(&world).await).await, "{death:?} deed {number}");
                gone += 1;
            } else {
                assert!(world.api.vm(&name("web")).await.is_ok(), "nobody had heard of its end");
            }
        }
        if survived {
            break;
        }
    }
    assert!(gone >= 5, "{gone}");
}

/// The nodes hand over as soon as the source has the order.
fn hand_over_when_ordered(world: &World) {
    let ordered = world.fakes["ohio"].with(|n| n.moves.keys().copied().next());
    let there = world.fakes["texas"].with(|n| n.vms.contains_key(&1));
    if let Some(id) = ordered
        && !there
    {
        world.hand_over("ohio", "texas");
        world.say("ohio", godwit_units::MoveId(id), |p| p.outcome = Outcome::Completed);
        world.say("texas", godwit_units::MoveId(id), |p| p.outcome = Outcome::Completed);
    }
}

#[tokio::test]
async fn a_move_is_finished_or_never_ordered_wherever_the_controller_dies() {
    let (mut finished, mut never) = (0, 0);
    for number in 0.. {
        let mut survived = false;
        for (number, death) in deaths(number) {
            let mut world = World::new().await;
            world.web().await;
            world.fate.arm(number, death);
            ask(&world, world.api.start_move(&to_host("texas"))).await;
            // It dies on the way, or all is done.
            let ended = soon(async || {
                hand_over_when_ordered(&world);
                let moves = world.api.moves().await;
                world.fate.is_dead() || moves.is_ok_and(|m| m.iter().any(|m| m.progress.outcome == Outcome::Completed))
            })
            .await;
            assert!(ended, "{death:?} deed {number}");
            survived = !world.fate.is_dead();
            if survived {
                break;
            }
            world.stop_controller().await;
            world.start_controller().await;
            let recorded = !world.api.moves().await.unwrap().is_empty();
            if recorded {
                let ended = soon(async || {
                    hand_over_when_ordered(&world);
                    let moves = world.api.moves().await.unwrap();
                    let vm = world.api.vm(&name("web")).await.unwrap();
                    let led =
                        world.fakes["maine"].with(|n| n.gateways.values().all(|port| port.generation == Generation(2)));
                    let told = moves[0].progress.outcome == Outcome::Completed && vm.host == name("texas");
                    moves.len() == 1 && told && vm.mv.is_none() && led
                })
                .await;
                let moves = world.api.moves().await;
                assert!(ended, "the move is forgotten: {death:?} deed {number}: {moves:#?}");
                let begun = world.fakes["ohio"].with(|n| n.moves.len());
                assert_eq!(begun, 1, "ordered twice: {death:?} deed {number}");
                finished += 1;
            } else {
                assert!(world.fakes["ohio"].with(|n| n.moves.is_empty()), "nobody knows of the order that was sent");
                let vm = world.api.vm(&name("web")).await.unwrap();
                assert_eq!((vm.host.as_str(), vm.mv), ("ohio", None));
                assert_eq!(world.order("texas").await.unwrap().from.as_str(), "ohio", "it may be moved");
                never += 1;
            }
        }
        if survived {
            break;
        }
    }
    assert!(finished >= 8 && never >= 2, "{finished} finished, {never} never ordered");
}

#[tokio::test]
async fn a_cancel_is_obeyed_or_was_never_heard_wherever_the_controller_dies() {
    for number in 0.. {
        let mut survived = false;
        for (number, death) in deaths(number) {
            let mut world = World::new().await;
            world.web().await;
            let mv = world.order("texas").await.unwrap();
            world.fate.arm(number, death);
            ask(&world, world.api.cancel(mv.id)).await;
            let cancelled = async || world.api.mv(mv.id).await.is_ok_and(|m| m.progress.outcome == Outcome::Cancelled);
            assert!(soon(async || world.fate.is_dead() || cancelled().await).await, "{death:?} deed {number}");
            survived = !world.fate.is_dead();
            if survived {
                break;
            }
            world.stop_controller().await;
            world.start_controller().await;
            if number > 0 || death == Death::After {
                let cancelled =
                    async || world.api.mv(mv.id).await.is_ok_and(|m| m.progress.outcome == Outcome::Cancelled);
                assert!(soon(cancelled).await, "the cancel is forgotten: {death:?} deed {number}");
            } else {
                assert_eq!(world.api.mv(mv.id).await.unwrap().progress.outcome, Outcome::Running);
            }
        }
        if survived {
            break;
        }
    }
}

#[tokio::test]
async fn a_start_has_happened_or_not_wherever_the_controller_dies_and_is_safe_to_ask_for_again() {
    let (mut happened, mut not) = (0, 0);
    for number in 0.. {
        let mut survived = false;
        for (number, death) in deaths(number) {
            let mut world = World::new().await;
            world.web().await;
            world.fakes["ohio"].with(|n| n.vms.get_mut(&1).unwrap().run = RunState::Off);
            world.fate.arm(number, death);
            let answer = world.api.start(&name("web")).await;
            let runs = |world: &World| world.fakes["ohio"].with(|n| n.vms[&1].run == RunState::Running);
            survived = !world.fate.is_dead();
            assert_eq!(answer.is_ok(), survived, "only who has done it says so: {death:?} deed {number}");
            if survived {
                assert!(runs(&world));
                break;
            }
            if runs(&world) {
                happened += 1;
            } else {
                not += 1;
            }
            let before = runs(&world);
            world.stop_controller().await;
            world.start_controller().await;
            // Nobody was promised anything: what was not begun is not begun by itself, and what was is not taken back.
            let vm = world.api.vm(&name("web")).await.unwrap();
            assert_eq!((vm.run == Some(RunState::Running), runs(&world)), (before, before), "{death:?} deed {number}");
            world.api.start(&name("web")).await.unwrap();
            assert!(is_whole(&world).await, "{death:?} deed {number}");
        }
        if survived {
            break;
        }
    }
    assert!(happened >= 1 && not >= 1, "{happened} had happened, {not} had not");
}

#[tokio::test]
async fn wires_give_way_to_others_all_or_none_wherever_the_controller_dies() {
    let nics = |number: u8| -> serde_json::Value {
        (0..2_u8).map(|n| serde_json::json!({"mac": format!("02:00:00:00:{n:02x}:{number:02x}")})).collect()
    };
    let vm = |called: &str, at: &str, number: u8| -> CreateVm {
        serde_json::from_value(serde_json::json!({"name": called, "at": at, "spec": {
            "memory": 64 << 20, "disks": [], "nics": nics(number), "boot": {"kernel": {"kernel": "vmlinuz"}},
        }}))
        .unwrap()
    };
    let wire = |a: &str, b: &str| ConnectWire { a: a.parse().unwrap(), b: b.parse().unwrap() };
    let (mut done, mut never) = (0, 0);
    for number in 0.. {
        let mut survived = false;
        for (number, death) in deaths(number) {
            let mut world = World::new().await;
            for (called, at, n) in [("web", "ohio", 1), ("db", "texas", 2), ("app", "maine", 3)] {
                world.api.create_vm(&vm(called, at, n)).await.unwrap();
            }
            let old = world.api.connect_wire(&wire("web:eth0", "db:eth0")).await.unwrap();
            let trunk = world.api.connect_wire(&wire("web:eth1", "db:eth1")).await.unwrap();
            let connect = vec![wire("web:eth0", "app:eth0"), wire("db:eth0", "app:eth1")];
            let change = Rewire { connect, disconnect: vec![old.id, trunk.id], unless_joined: None };
            world.fate.arm(number, death);
            ask(&world, world.api.rewire(&change)).await;
            survived = !world.fate.is_dead();
            if survived {
                break;
            }
            world.stop_controller().await;
            world.start_controller().await;
            // Each port of the change has one wire, whichever: none is without.
            let whole = async || {
                let wires = world.api.port_wires().await.unwrap();
                let mut ends: Vec<String> =
                    wires.iter().map(|w| format!("{}-{}", w.ends[0].end, w.ends[1].end)).collect();
                ends.sort();
                let connected = wires.iter().all(|wire| wire.state == WireState::Connected);
                let known: usize = world.fakes.values().map(|fake| fake.with(|n| n.wires.len())).sum();
                let new = ends == ["db:eth0-app:eth1", "web:eth0-app:eth0"];
                let old = ends == ["web:eth0-db:eth0", "web:eth1-db:eth1"];
                ((new || old) && connected && known == 4).then_some(new)
            };
            assert!(soon(async || whole().await.is_some()).await, "{death:?} deed {number}");
            if whole().await == Some(true) { done += 1 } else { never += 1 }
        }
        if survived {
            break;
        }
    }
    assert!(done >= 6 && never >= 2, "{done} done, {never} never begun");
}
