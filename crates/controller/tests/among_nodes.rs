//! The controller among fake nodes that say what the test has them say.

use crate::fakes::{World, name, soon, to_host, web};
use godwit_api::host::{Blocker, LocalVm, Ownership, RunState, SetLimit, StopVm};
use godwit_api::orphan::{Orphan, OrphanKind};
use godwit_api::precache::StartPrecache;
use godwit_api::progress::{Outcome, Phase, PhaseName};
use godwit_api::promote::PromoteVolume;
use godwit_api::public::{AddHost, MoveTogether, ResolveMove, Site, StartMove};
use godwit_api::{ApiError, Problem, PublicClient};
use godwit_trust::{Access, Identity, Revocations, Role};
use godwit_units::{BitRate, Bytes, Generation, MaxDrain, MoveId, Policy};
use serde_json::json;
use std::time::Duration;

fn blocker(host: &str, message: &str) -> Blocker {
    Blocker { host: name(host), kind: "memory".into(), message: message.into(), remedy: "make room".into() }
}

#[tokio::test]
async fn a_vm_is_created_resolved_wired_and_started() {
    let world = World::new().await;
    let vm = world.api.create_vm(&web("ohio")).await.unwrap();
    assert_eq!((vm.host.as_str(), vm.site.as_str(), vm.spec.machine.as_str()), ("ohio", "east", "pc-q35-7.2"));
    assert_eq!(serde_json::to_value(vm.run).unwrap(), "running");
    let volumes = world.api.volumes().await.unwrap();
    assert_eq!((volumes[0].name.as_str(), volumes[0].replicas.clone()), ("root", vec![name("ohio")]));
    let wires = world.api.wires().await.unwrap();
    assert_eq!(wires.iter().map(|w| (w.nic, w.component.as_str())).collect::<Vec<_>>(), [(0, "lan"), (1, "out")]);
    // Only the gateway's wire has another end, and it leads to ohio (whose address ends with its name's length).
    let gateways = world.fakes["maine"].with(|n| n.gateways.clone());
    assert_eq!(gateways.keys().copied().collect::<Vec<_>>(), [wires[1].id]);
    let port = &gateways[&wires[1].id];
    assert_eq!((port.remote.to_string().as_str(), port.vni, port.bridge.as_str()), ("10.0.0.4", wires[1].id, "br1"));
    // The VM's node is told where the gateway's node is, so that it can point it without the controller.
    let told = world.fakes["ohio"].with(|n| n.vms[&1].definition.wires.clone());
    let told: Vec<_> =
        told.iter().map(|w| w.gateway.as_ref().map(|g| (g.name.as_str(), g.link.control.port()))).collect();
    assert_eq!(told, [None, Some(("maine", 1))]);

    let other = |change: &dyn Fn(&mut godwit_api::public::CreateVm)| {
        let mut new = web("ohio");
        new.name = name("other");
        change(&mut new);
        new
    };
    for (new, problem, said) in [
        (web("ohio"), Problem::Conflict, "already"),
        (other(&|_| {}), Problem::Conflict, "volume `root`"),
        (other(&|n| n.spec.disks[0].volume = name("data")), Problem::Conflict, "MAC"),
        (other(&|n| n.spec.nics[0].component = Some(name("wan"))), Problem::NotFound, "component"),
        (other(&|n| n.at = name("nowhere")), Problem::NotFound, "nowhere"),
        (other(&|n| n.spec.cpu = "host".into()), Problem::Invalid, "cpu"),
    ] {
        let error = world.api.create_vm(&new).await.unwrap_err();
        assert_eq!(error.problem, problem, "{error}");
        assert!(error.message.contains(said), "{error}");
    }
    assert_eq!(world.api.vms().await.unwrap().len(), 1);
}

#[tokio::test]
async fn a_creation_that_fails_leaves_nothing_behind() {
    let world = World::new().await;
    world.fakes["maine"].with(|n| n.refuse_gateway = true);
    let error = world.api.create_vm(&web("ohio")).await.unwrap_err();
    assert!(error.message.contains("no such bridge"), "{error}");
    assert!(world.fakes["ohio"].with(|n| n.vms.is_empty()));
    assert!(world.api.vms().await.unwrap().is_empty() && world.api.volumes().await.unwrap().is_empty());
    world.fakes["maine"].with(|n| n.refuse_gateway = false);
    let vm = world.api.create_vm(&web("east")).await.unwrap();
    assert_eq!(vm.host.as_str(), "maine", "the first host of the site");
    assert_eq!(vm.id.0, 2, "a number is never given twice");
}

#[tokio::test]
async fn nothing_in_use_is_deleted() {
    let world = World::new().await;
    world.web().await;
    let api = &world.api;
    let refused: [Result<(), ApiError>; 5] = [
        api.remove_site(&name("east")).await,
        api.remove_host(&name("ohio")).await,
        api.remove_host(&name("maine")).await,
        api.remove_component(&name("out")).await,
        api.remove_vm(&name("web")).await,
    ];
    for refusal in refused {
        let error = refusal.unwrap_err();
        assert_eq!(error.problem, Problem::Conflict, "{error}");
        assert!(error.remedy.is_some(), "{error}");
    }
    world.fakes["ohio"].with(|n| n.vms.get_mut(&1).unwrap().run = RunState::Off);
    api.remove_vm(&name("web")).await.unwrap();
    assert!(world.fakes["ohio"].with(|n| n.vms.is_empty()));
    assert!(world.fakes["maine"].with(|n| n.gateways.is_empty()));
    api.remove_component(&name("out")).await.unwrap();
    api.remove_host(&name("ohio")).await.unwrap();
    api.remove_host(&name("maine")).await.unwrap();
    api.remove_site(&name("east")).await.unwrap();
    assert_eq!(api.remove_site(&name("east")).await.unwrap_err().problem, Problem::NotFound);
    assert_eq!(api.hosts().await.unwrap().len(), 1);
}

#[tokio::test]
async fn a_name_is_a_site_or_a_host_and_never_both() {
    let world = World::new().await;
    let error = world.api.add_site(&Site { name: name("ohio") }).await.unwrap_err();
    assert_eq!(error.problem, Problem::Conflict);
    let host =
        |host: &str, site: &str| AddHost { name: name(host), site: name(site), api: "127.0.0.1:1".parse().unwrap() };
    assert_eq!(world.api.add_host(&host("west", "west")).await.unwrap_err().problem, Problem::Conflict);
    assert_eq!(world.api.add_host(&host("ohio", "west")).await.unwrap_err().problem, Problem::Conflict);
    assert_eq!(world.api.add_host(&host("utah", "north")).await.unwrap_err().problem, Problem::NotFound);
    let utah = world.api.add_host(&host("utah", "west")).await.unwrap();
    assert!(utah.facts.is_none() && utah.error.unwrap().contains("node/utah"));
}

#[tokio::test]
async fn a_move_ends_when_the_destination_owns_the_vm_and_everything_follows() {
    let world = World::new().await;
    world.web().await;
    let mv = world.order("west").await.unwrap();
    assert_eq!((mv.from.as_str(), mv.to.as_str(), mv.progress.outcome), ("ohio", "texas", Outcome::Running));
    world.say("ohio", mv.id, |p| p.predicted_end_unix_us = Some(2000));
    world.until(mv.id, |m| m.progress.predicted_end_unix_us == Some(2000)).await;
    world.say("ohio", mv.id, |p| (p.predicted_end_unix_us, p.zero_pages) = (Some(1000), 7));
    let shown = world.until(mv.id, |m| m.progress.zero_pages == 7).await;
    assert_eq!(shown.progress.predicted_end_unix_us, Some(2000), "never towards the present");

    world.hand_over("ohio", "texas");
    world.say("texas", mv.id, |p| p.resumed_unix_us = Some(77));
    // The source is done; the destination still proves the network.
    world.say("ohio", mv.id, |p| (p.outcome, p.zero_pages, p.stopped_unix_us) = (Outcome::Completed, 8, Some(60)));
    let proving = world.until(mv.id, |m| m.progress.zero_pages == 8).await;
    assert_eq!(proving.progress.outcome, Outcome::Running);
    world.fakes["texas"].with(|n| n.vms.values_mut().for_each(|vm| vm.definition.spec.vcpus = 3));
    world.say("texas", mv.id, |p| p.outcome = Outcome::Completed);
    let ended = world.until(mv.id, |m| m.progress.outcome != Outcome::Running).await;
    assert_eq!((ended.progress.outcome, ended.progress.resumed_unix_us), (Outcome::Completed, Some(77)));
    assert!(ended.progress.phases.last().unwrap().ended_unix_us.is_some());
    let vm = world.api.vm(&name("web")).await.unwrap();
    assert_eq!((vm.host.as_str(), vm.generation, vm.mv), ("texas", Generation(2), None));
    assert_eq!(vm.spec.vcpus, 3, "plugged in on arrival");
    // No node measured the pause: the two clocks have to do.
    assert_eq!(ended.progress.downtime_ms, Some(0.017));
    assert_eq!(world.api.volumes().await.unwrap()[0].replicas, [name("texas"), name("ohio")]);
    let port = world.fakes["maine"].with(|n| n.gateways.values().next().unwrap().clone());
    assert_eq!((port.remote.to_string().as_str(), port.generation), ("10.0.0.5", Generation(2)));

    // And back, under a new number.
    let back = world.order("ohio").await.unwrap();
    assert!(back.id > mv.id);
    assert_eq!(world.api.moves().await.unwrap().iter().map(|m| m.id).collect::<Vec<_>>(), [back.id, mv.id]);
}

#[tokio::test]
async fn a_move_that_fails_leaves_the_vm_with_its_owner() {
    let world = World::new().await;
    world.web().await;
    let mv = world.order("texas").await.unwrap();
    world.say("ohio", mv.id, |p| (p.outcome, p.error) = (Outcome::Failed, Some("no room".into())));
    let ended = world.until(mv.id, |m| m.progress.outcome == Outcome::Failed).await;
    assert_eq!(ended.progress.error.as_deref(), Some("no room"));
    assert_eq!(world.api.vm(&name("web")).await.unwrap().host.as_str(), "ohio");
    for refusal in [world.api.cancel(mv.id).await, world.api.limit(mv.id, SetLimit { limit: None }).await] {
        assert_eq!(refusal.unwrap_err().problem, Problem::Conflict);
    }
}

#[tokio::test]
async fn memory_does_not_follow_where_it_is_to_be_kept_nor_where_that_is_not_allowed() {
    let world = World::new().await;
    world.api.create_vm(&web("ohio")).await.unwrap();
    let follows = StartMove { memory_postcopy: Some(MaxDrain::DEFAULT), ..to_host("texas") };
    let both = StartMove { keep_checkpoint: true, ..follows.clone() };
    for order in [both.clone(), StartMove { dry_run: true, ..both }] {
        let error = world.api.start_move(&order).await.unwrap_err();
        assert_eq!(error.problem, Problem::Invalid, "{error}");
        assert!(error.message.contains("keep_checkpoint"), "{error}");
    }
    let error = world.api.dry_run(&follows).await.unwrap_err();
    assert_eq!(error.problem, Problem::Forbidden, "an experiment: {error}");
}

#[tokio::test]
async fn a_guest_that_is_stopped_after_the_first_round_is_neither_slowed_nor_followed() {
    let world = World::new().await;
    world.api.create_vm(&web("ohio")).await.unwrap();
    let least = StartMove { policy: Policy::LeastBytes, ..to_host("texas") };
    let slowed = StartMove { throttle: Some(80), ..least.clone() };
    let followed = StartMove { memory_postcopy: Some(MaxDrain::DEFAULT), ..least.clone() };
    for (order, what) in [(slowed, "throttle"), (followed, "memory_postcopy")] {
        let StartMove { policy, throttle, memory_postcopy, .. } = order;
        let both: MoveTogether = serde_json::from_value(json!({"vms": ["web"], "to": "texas"})).unwrap();
        let both = MoveTogether { policy, throttle, memory_postcopy, ..both };
        for error in [
            world.api.start_move(&order).await.unwrap_err(),
            world.api.dry_run(&order).await.unwrap_err(),
            world.api.move_together(&both).await.unwrap_err(),
        ] {
            assert_eq!(error.problem, Problem::Invalid, "{error}");
            assert!(error.message.contains(what) && error.message.contains("least-bytes"), "{error}");
            assert!(error.remedy.as_ref().unwrap().contains("another policy"), "{error}");
        }
    }
    // By itself it is a policy as any other.
    world.api.dry_run(&least).await.unwrap();
}

#[tokio::test]
async fn a_dry_run_lists_everything_in_the_way_and_moves_nothing() {
    let world = World::new().await;
    world.web().await;
    world.fakes["ohio"].with(|n| {
        n.certificate_ends = Some(1);
        n.vms.get_mut(&1).unwrap().run = RunState::Off;
    });
    world.fakes["texas"].with(|n| n.blockers = vec![blocker("texas", "too little memory")]);
    let order = StartMove { vcpus: Some(9), ..to_host("texas") };
    let dry = world.api.dry_run(&order).await.unwrap();
    let all: Vec<String> = dry.blockers.iter().map(|b| format!("{}: {}", b.host, b.message)).collect();
    for said in ["9 CPUs", "certificate of `ohio`", "does not run", "texas: too little memory"] {
        assert!(all.iter().any(|b| b.contains(said)), "{said} in {all:?}");
    }
    assert_eq!(all.len(), 4, "{all:?}");
    let blocked = world.api.start_move(&order).await.unwrap_err();
    assert_eq!(blocked.problem, Problem::Blocked);
    for b in &dry.blockers {
        assert!(blocked.message.contains(&b.message) && blocked.message.contains(&b.remedy), "{blocked}");
    }
    assert!(world.api.moves().await.unwrap().is_empty());
    assert!(world.fakes["ohio"].with(|n| n.heard.is_empty()));
}

#[tokio::test]
async fn a_site_means_its_first_host_without_blockers() {
    let mut world = World::new().await;
    world.web().await;
    // Within its own site only the other host is meant.
    assert_eq!(world.api.dry_run(&to_host("east")).await.unwrap().to.as_str(), "maine");
    let dry = world.api.dry_run(&to_host("ohio")).await.unwrap();
    assert!(dry.blockers[0].message.contains("already"), "{dry:?}");
    world.stop_node("texas").await;
    let dry = world.api.dry_run(&to_host("west")).await.unwrap();
    assert_eq!(
        (dry.blockers.len(), dry.blockers[0].host.as_str(), dry.blockers[0].kind.as_str()),
        (1, "texas", "link")
    );
    assert_eq!(world.api.dry_run(&to_host("mars")).await.unwrap_err().problem, Problem::NotFound);
}

#[tokio::test]
async fn a_source_that_refuses_the_order_is_quoted_and_the_move_has_failed() {
    let world = World::new().await;
    world.web().await;
    let refusal = ApiError::new(Problem::Conflict, "the VM is busy").remedy("wait");
    world.fakes["ohio"].with(|n| n.refuse_begin = Some(refusal.clone()));
    let told = world.order("texas").await.unwrap_err();
    assert_eq!((told.problem, told.message, told.remedy), (refusal.problem, refusal.message, refusal.remedy));
    assert_eq!(told.place.as_deref(), Some("node/ohio: POST /v1/moves"), "it is said whose refusal it is");
    let ended = world.api.mv(MoveId(1)).await.unwrap();
    assert_eq!(ended.progress.outcome, Outcome::Failed);
    world.fakes["ohio"].with(|n| n.refuse_begin = None);
    assert_eq!(world.order("texas").await.unwrap().id, MoveId(2), "a failed move does not stand in the way");
}

#[tokio::test]
async fn a_vm_has_one_move_at_a_time_however_many_are_ordered_at_once() {
    let world = World::new().await;
    world.web().await;
    let (a, b, c) = tokio::join!(world.order("texas"), world.order("texas"), world.order("maine"));
    let refused: Vec<ApiError> = [a, b, c].into_iter().filter_map(Result::err).collect();
    assert_eq!(refused.len(), 2);
    assert!(refused.iter().all(|e| matches!(e.problem, Problem::Conflict | Problem::Blocked)), "{refused:?}");
    assert_eq!(world.fakes["ohio"].with(|n| n.heard.len()), 1);
}

#[tokio::test]
async fn cancel_and_limit_are_passed_on_to_the_source() {
    let world = World::new().await;
    world.web().await;
    let mv = world.order("texas").await.unwrap();
    let limit = Some(BitRate(5_000_000));
    world.api.limit(mv.id, SetLimit { limit }).await.unwrap();
    world.until(mv.id, |m| m.progress.limit == limit).await;
    let senseless = world.api.limit(mv.id, SetLimit { limit: Some(BitRate(1)) }).await.unwrap_err();
    assert_eq!(senseless.problem, Problem::Invalid);
    world.api.cancel(mv.id).await.unwrap();
    world.until(mv.id, |m| m.progress.outcome == Outcome::Cancelled).await;
    assert_eq!(world.api.vm(&name("web")).await.unwrap().host.as_str(), "ohio");
}

#[tokio::test]
async fn silent_nodes_are_waited_for_and_a_cancel_meanwhile_is_passed_on_later() {
    let mut world = World::new().await;
    world.web().await;
    let mv = world.order("texas").await.unwrap();
    let ohio = world.stop_node("ohio").await;
    let texas = world.stop_node("texas").await;
    let cut = world.until(mv.id, |m| m.progress.error.is_some()).await;
    assert!(cut.progress.error.unwrap().contains("node/ohio"));
    world.api.cancel(mv.id).await.unwrap();
    tokio::time::sleep(Duration::from_millis(600)).await;
    assert_eq!(world.api.mv(mv.id).await.unwrap().progress.outcome, Outcome::Running);
    world.start_node("ohio", ohio).await;
    world.start_node("texas", texas).await;
    let ended = world.until(mv.id, |m| m.progress.outcome == Outcome::Cancelled).await;
    assert_eq!(ended.progress.error, None);
}

#[tokio::test]
async fn a_controller_that_died_goes_on_with_the_move() {
    let mut world = World::new().await;
    world.web().await;
    let mv = world.order("texas").await.unwrap();
    world.stop_controller().await;
    world.hand_over("ohio", "texas");
    world.say("ohio", mv.id, |p| p.outcome = Outcome::Completed);
    world.start_controller().await;
    world.until(mv.id, |m| m.progress.outcome == Outcome::Completed).await;
    assert_eq!(world.api.vm(&name("web")).await.unwrap().host.as_str(), "texas");
    let begun = world.fakes["ohio"].with(|n| n.heard.iter().filter(|h| h.starts_with("begin")).count());
    assert_eq!(begun, 1, "the order was taken before it died");
    assert!(world.order("ohio").await.unwrap().id > mv.id);
}

#[tokio::test]
async fn a_cancel_outlives_the_controller_that_took_it() {
    let mut world = World::new().await;
    world.web().await;
    let mv = world.order("texas").await.unwrap();
    let ohio = world.stop_node("ohio").await;
    world.api.cancel(mv.id).await.unwrap();
    world.stop_controller().await;
    world.start_node("ohio", ohio).await;
    world.start_controller().await;
    world.until(mv.id, |m| m.progress.outcome == Outcome::Cancelled).await;
}

/// An order arrives at its source, and its answer is lost, so that the controller does not know that it did: the node says "unreachable" as if
/// something in between had. Whoever ordered has gone.
async fn order_without_an_answer(world: &World) {
    let lost = ApiError::new(Problem::Unreachable, "lost on the way");
    world.fakes["ohio"].with(|n| n.refuse_begin = Some(lost));
    let api = world.api.clone();
    let ordering = tokio::spawn(async move { api.start_move(&to_host("texas")).await });
    world.until_node("ohio", |n| !n.heard.is_empty()).await;
    ordering.abort();
}

#[tokio::test]
async fn a_controller_that_died_while_ordering_orders_again_under_the_same_number() {
    let mut world = World::new().await;
    world.web().await;
    order_without_an_answer(&world).await;
    world.stop_controller().await;
    world.fakes["ohio"].with(|n| n.refuse_begin = None);
    world.start_controller().await;
    world.until_node("ohio", |n| !n.moves.is_empty()).await;
    let heard = world.fakes["ohio"].with(|n| n.heard.clone());
    assert!(heard.iter().all(|h| h == "begin 1 to texas"), "{heard:?}");
    assert!(heard.len() >= 2);
    // A deadline counts from the order, however late a node hears of it.
    let ago = world.fakes["ohio"].with(|n| n.ordered_ms_ago.clone());
    assert!(ago.is_sorted() && ago.first() < ago.last(), "{ago:?}");
}

#[tokio::test]
async fn a_move_that_is_cancelled_before_a_new_controller_begins_it_is_ended_by_the_node_that_has_it() {
    let mut world = World::new().await;
    world.web().await;
    order_without_an_answer(&world).await;
    let ohio = world.stop_node("ohio").await;
    world.say("ohio", MoveId(1), |_| {});
    world.api.cancel(MoveId(1)).await.unwrap();
    world.stop_controller().await;
    world.start_node("ohio", ohio).await;
    world.start_controller().await;
    world.until(MoveId(1), |m| m.progress.outcome == Outcome::Cancelled).await;
    let heard = world.fakes["ohio"].with(|n| n.heard.clone());
    assert!(heard.contains(&"cancel 1".to_owned()), "it would go on: {heard:?}");
}

#[tokio::test]
async fn of_several_vms_none_moves_when_one_does_not_fit_any_more() {
    let world = World::new().await;
    for (called, volume, memory) in [("web", "root", 128), ("db", "data", 64)] {
        let mut new = web("ohio");
        new.name = name(called);
        new.spec.memory = Bytes::mib(memory);
        new.spec.disks[0].volume = name(volume);
        new.spec.nics.clear();
        world.api.create_vm(&new).await.unwrap();
    }
    // While `db` is looked at, which is to go first, `web` is given a move of its own.
    world.fakes["texas"].with(|n| n.held = Some(name("db")));
    let order: MoveTogether = serde_json::from_value(json!({"vms": ["web", "db"], "to": "texas"})).unwrap();
    let api = world.api.clone();
    let ordering = tokio::spawn(async move { api.move_together(&order).await });
    world.until_node("texas", |n| n.heard.contains(&"check db".to_owned())).await;
    let mv = world.order("maine").await.unwrap();
    world.fakes["texas"].with(|n| n.held = None);
    let refused = ordering.await.unwrap().unwrap_err();
    assert_eq!(refused.problem, Problem::Conflict, "{refused}");
    assert!(refused.message.contains("`web`"), "{refused}");
    assert_eq!(world.api.moves().await.unwrap().iter().map(|m| m.id).collect::<Vec<_>>(), [mv.id]);
}

#[tokio::test]
async fn what_a_vm_has_been_given_on_arrival_is_known_though_it_moves_on_before_its_disks_have_followed() {
    let world = World::new().await;
    world.web().await;
    let mv = world.order("texas").await.unwrap();
    world.hand_over("ohio", "texas");
    world.fakes["texas"].with(|n| n.vms.values_mut().for_each(|vm| vm.definition.spec.vcpus = 3));
    world.say("ohio", mv.id, |p| p.outcome = Outcome::Completed);
    world.say("texas", mv.id, |p| {
        p.phase = PhaseName::Fill;
        p.phases.push(Phase { name: PhaseName::Fill, started_unix_us: 2, ended_unix_us: None });
    });
    // As soon as it fills.
    assert!(soon(async || world.order("maine").await.is_ok()).await, "it never moves on");
    world.until(mv.id, |m| !m.progress.outcome.is_open()).await;
    assert_eq!(world.api.vm(&name("web")).await.unwrap().spec.vcpus, 3);
}

#[tokio::test]
async fn an_owner_that_changed_while_nobody_looked_is_found_by_a_new_controller() {
    let mut world = World::new().await;
    world.web().await;
    world.stop_controller().await;
    world.hand_over("ohio", "texas");
    world.start_controller().await;
    let found = async || {
        let port = world.fakes["maine"].with(|n| n.gateways.values().next().unwrap().clone());
        world.api.vm(&name("web")).await.unwrap().host.as_str() == "texas" && port.generation == Generation(2)
    };
    assert!(soon(found).await, "not found");
}

#[tokio::test]
async fn a_gateway_that_is_away_does_not_keep_a_move_open_and_is_told_later() {
    let mut world = World::new().await;
    world.web().await;
    let mv = world.order("texas").await.unwrap();
    let maine = world.stop_node("maine").await;
    world.hand_over("ohio", "texas");
    world.say("ohio", mv.id, |p| p.outcome = Outcome::Completed);
    world.until(mv.id, |m| m.progress.outcome == Outcome::Completed).await;
    let generation = || world.fakes["maine"].with(|n| n.gateways.values().next().unwrap().generation);
    assert_eq!(generation(), Generation(1));
    world.start_node("maine", maine).await;
    // The records are looked after every 10 s.
    let generation = || world.fakes["maine"].with(|n| n.gateways.values().next().unwrap().generation);
    assert!(soon(async || generation() == Generation(2)).await, "never told");
}

#[tokio::test]
async fn a_monitor_command_goes_to_the_owner_or_where_it_is_sent() {
    let world = World::new().await;
    world.web().await;
    let (web, texas, command) = (name("web"), name("texas"), json!({"execute": "query-status"}));
    assert_eq!(world.api.monitor(&web, None, &command).await.unwrap(), json!({"at": "ohio"}));
    assert_eq!(world.api.monitor(&web, Some(&texas), &command).await.unwrap(), json!({"at": "texas"}));
    assert_eq!(world.api.monitor(&web, None, &json!([])).await.unwrap_err().problem, Problem::Invalid);
    let error = world.api.monitor(&web, Some(&name("mars")), &command).await.unwrap_err();
    assert_eq!(error.problem, Problem::NotFound);
}

#[tokio::test]
async fn operators_read_and_move_and_nodes_do_nothing() {
    let world = World::new().await;
    world.web().await;
    let as_role = |role| {
        let controller = Identity::new(Role::Controller, "controller").unwrap();
        PublicClient::new(world.controller_address(), controller, &world.credentials(role, "bob"))
    };
    let operator = as_role(Role::Client(Access::Operator));
    operator.vms().await.unwrap();
    operator.dry_run(&to_host("texas")).await.unwrap();
    let stopped = operator.stop(&name("web"), StopVm { force: true }).await.unwrap_err();
    assert_eq!(stopped.problem, Problem::Forbidden);
    for role in [Role::Node, Role::Controller] {
        assert_eq!(as_role(role).vms().await.unwrap_err().problem, Problem::Forbidden);
    }
}

#[tokio::test]
async fn a_node_that_was_made_anew_is_told_again_who_is_revoked() {
    let world = World::new().await;
    let list = world.api.revoke(&Identity::node("eve").unwrap()).await.unwrap();
    for host in ["ohio", "texas"] {
        world.until_node(host, |n| n.revoked == list).await;
    }
    world.fakes["ohio"].with(|n| n.revoked = Revocations::default());
    world.until_node("ohio", |n| n.revoked == list).await;
}

#[tokio::test]
async fn a_move_that_failed_is_ordered_again_as_it_was_and_one_that_arrived_is_not() {
    let world = World::new().await;
    world.web().await;
    let first = world.order("texas").await.unwrap();
    let early = world.api.retry(first.id).await.unwrap_err();
    assert_eq!(early.problem, Problem::Conflict, "it goes on: {early}");
    world.say("ohio", first.id, |p| p.outcome = Outcome::Failed);
    world.until(first.id, |m| m.progress.outcome == Outcome::Failed).await;
    let again = world.api.retry(first.id).await.unwrap();
    assert!(again.id > first.id);
    assert_eq!((again.vm.as_str(), again.from.as_str(), again.to.as_str()), ("web", "ohio", "texas"));
    world.hand_over("ohio", "texas");
    for host in ["ohio", "texas"] {
        world.say(host, again.id, |p| p.outcome = Outcome::Completed);
    }
    world.until(again.id, |m| m.progress.outcome == Outcome::Completed).await;
    assert!(world.api.retry(again.id).await.unwrap_err().message.contains("has brought"));
}

/// A move whose source is sealed, and whose destination is gone.
async fn stranded() -> (World, MoveId, std::net::SocketAddr) {
    let mut world = World::new().await;
    world.web().await;
    let mv = world.order("texas").await.unwrap();
    world.fakes["ohio"].with(|n| n.vms.get_mut(&1).unwrap().ownership = Ownership::WaitsForPeer);
    world.say("ohio", mv.id, |p| p.outcome = Outcome::WaitsForPeer);
    let texas = world.stop_node("texas").await;
    world.until(mv.id, |m| m.progress.outcome == Outcome::WaitsForPeer).await;
    (world, mv.id, texas)
}

fn claim_for(place: &str) -> ResolveMove {
    ResolveMove { claim: name(place), fenced: "power cut, by ann".into(), peer_did_not_run: false }
}

#[tokio::test]
async fn a_claim_needs_evidence_a_part_in_the_move_and_a_host_that_is_silent() {
    let (mut world, id, texas) = stranded().await;
    let short = ResolveMove { fenced: "off".into(), ..claim_for("ohio") };
    assert_eq!(world.api.resolve(id, &short).await.unwrap_err().problem, Problem::Invalid);
    assert_eq!(world.api.resolve(id, &claim_for("maine")).await.unwrap_err().problem, Problem::Invalid);
    world.start_node("texas", texas).await;
    let error = world.api.resolve(id, &claim_for("ohio")).await.unwrap_err();
    assert!(error.message.contains("answers, so it is not lost"), "{error}");
    assert!(world.fakes["ohio"].with(|n| n.heard.iter().all(|h| !h.starts_with("claim"))));
}

#[tokio::test]
async fn a_claim_begins_a_lineage_ends_the_move_and_pauses_an_owner_that_comes_back() {
    let (mut world, id, texas) = stranded().await;
    world.api.resolve(id, &claim_for("ohio")).await.unwrap();
    let heard = world.fakes["ohio"].with(|n| n.heard.clone());
    assert!(heard.contains(&"claim 1 over 0: power cut, by ann".to_owned()), "{heard:?}");
    world.until(id, |m| m.progress.outcome == Outcome::Failed).await;
    let vm = world.api.vm(&name("web")).await.unwrap();
    assert_eq!((vm.host.as_str(), vm.lineage.0, vm.mv), ("ohio", 1, None));
    // The other one had taken it after all, and was not as lost as was said.
    let mut back = world.fakes["ohio"].with(|n| n.vms[&1].clone());
    (back.lineage, back.generation) = (godwit_units::Lineage(0), Generation(2));
    world.fakes["texas"].with(|n| n.vms.insert(1, back));
    world.start_node("texas", texas).await;
    world.stop_controller().await;
    world.start_controller().await;
    world.until_node("texas", |n| n.heard.contains(&"outrank 1 by 1".to_owned())).await;
    assert!(world.fakes["texas"].with(|n| n.vms.contains_key(&1)), "nothing of it is thrown away");
    assert_eq!(world.api.vm(&name("web")).await.unwrap().host.as_str(), "ohio");
    assert!(world.fakes["ohio"].with(|n| n.heard.iter().all(|h| !h.starts_with("outrank"))));
}

#[tokio::test]
async fn a_deletion_reaches_half_copies_of_failed_moves_and_holders_that_were_away() {
    let mut world = World::new().await;
    world.web().await;
    let mv = world.order("texas").await.unwrap();
    // The destination has made a place, and the move fails: nothing of it is among the volume's replicas.
    let copy = world.fakes["ohio"].with(|n| n.vms[&1].clone());
    world.fakes["texas"].with(|n| n.vms.insert(1, copy));
    world.say("ohio", mv.id, |p| p.outcome = Outcome::Failed);
    world.until(mv.id, |m| m.progress.outcome == Outcome::Failed).await;
    world.fakes["ohio"].with(|n| n.vms.get_mut(&1).unwrap().run = RunState::Off);
    let texas = world.stop_node("texas").await;
    let error = world.api.remove_vm(&name("web")).await.unwrap_err();
    assert_eq!(error.problem, Problem::Unreachable, "{error}");
    assert!(world.fakes["ohio"].with(|n| n.vms.is_empty()), "who is there has heard");
    world.start_node("texas", texas).await;
    // Its turn comes again; a new controller takes it at once.
    world.stop_controller().await;
    world.start_controller().await;
    world.until_node("texas", |n| n.vms.is_empty()).await;
    assert!(soon(async || world.api.vms().await.unwrap().is_empty()).await, "its record is still there");
}

#[tokio::test]
async fn orphans_are_listed_with_reasons_and_only_those_that_may_go_are_removed() {
    let mut world = World::new().await;
    world.web().await;
    let orphan = |id: &str, kind: OrphanKind, vm: Option<u64>, number: Option<u64>| Orphan {
        id: id.into(),
        kind,
        vm: vm.map(godwit_units::VmId),
        number,
        what: "left".into(),
        bytes: None,
        owner: Some((godwit_units::Lineage(0), Generation(1))),
        lent: false,
        seen_s: 3600,
        may_be_truth: None,
    };
    let left = [
        // `web`'s replica, its volume, and a QEMU of it, where it is not; something of no store's; a deleted VM's volume.
        orphan("replica-1", OrphanKind::Replica, Some(1), None),
        orphan("qemu-77", OrphanKind::Qemu, Some(77), None),
        orphan("volume-1", OrphanKind::Volume, None, Some(1)),
    ];
    let at = |host: &str, left: &[Orphan]| {
        world.fakes[host].with(|n| n.orphans.extend(left.iter().map(|o| (o.id.clone(), o.clone()))));
    };
    at("texas", &left);
    at("ohio", &left[2..]);
    let found = world.api.orphans().await.unwrap();
    let seen: Vec<_> =
        found.iter().map(|o| (o.host.as_str(), o.orphan.id.as_str(), o.removable, o.by_itself)).collect();
    assert_eq!(
        seen,
        [
            ("ohio", "volume-1", false, false),
            ("texas", "qemu-77", false, false),
            ("texas", "replica-1", true, false),
            ("texas", "volume-1", true, true)
        ]
    );
    assert!(found.iter().all(|o| !o.why.is_empty()), "{found:#?}");
    let texas = name("texas");
    assert_eq!(world.api.remove_orphan(&texas, "qemu-77").await.unwrap_err().problem, Problem::Conflict);
    assert_eq!(world.api.remove_orphan(&texas, "volume-9").await.unwrap_err().problem, Problem::NotFound);
    world.api.remove_orphan(&texas, "replica-1").await.unwrap();
    // While its owner is silent, what is left of a VM elsewhere may be all that there is.
    let ohio = world.stop_node("ohio").await;
    let kept = world.api.orphans().await.unwrap();
    assert!(kept.iter().all(|o| !o.removable), "{kept:#?}");
    world.start_node("ohio", ohio).await;
    // A controller that looks after things removes by itself what nobody needs, and nothing else.
    world.stop_controller().await;
    world.start_controller().await;
    world.until_node("texas", |n| !n.orphans.contains_key("volume-1")).await;
    assert!(world.fakes["texas"].with(|n| n.orphans.contains_key("qemu-77")));
    assert!(world.fakes["ohio"].with(|n| n.orphans.contains_key("volume-1")), "its owner has it");
}

/// Has `root` pre-cached at a host or a site.
fn precache_to(to: &str) -> StartPrecache {
    StartPrecache {
        volume: name("root"),
        to: name(to),
        limit: None,
        unlimited: false,
        interval_ms: Some(1000),
        consistent: Some(true),
        image_room: Some(Bytes::mib(100)),
        follow: Some(true),
    }
}

/// An order to promote there, with evidence, and hosts that are fenced besides the VM's.
fn promotion(site: &str, also: &[&str]) -> PromoteVolume {
    PromoteVolume {
        site: name(site),
        fenced: "power cut, by ann".into(),
        also_fenced: also.iter().map(|host| name(host)).collect(),
        dry_run: false,
    }
}

#[tokio::test]
async fn a_vm_whose_move_has_lost_its_source_is_promoted_unless_the_destination_may_have_it() {
    let mut world = World::new().await;
    world.web().await;
    let root = name("root");
    world.api.start_precache(&precache_to("maine")).await.unwrap();
    let mv = world.order("texas").await.unwrap();
    let at_ohio = world.fakes["ohio"].with(|n| n.vms[&1].clone());
    world.stop_node("ohio").await;
    let stands = |ownership| {
        let there = LocalVm { ownership, ..at_ohio.clone() };
        world.fakes["texas"].with(|n| n.vms.insert(1, there));
    };
    stands(Ownership::WaitsForPeer);
    let refused = world.api.promote(&root, &promotion("maine", &["texas"])).await.unwrap_err();
    assert_eq!(refused.problem, Problem::Conflict, "it says itself that it may have it: {refused}");
    assert!(refused.to_string().contains("move resolve 1 --claim texas"), "{refused}");
    stands(Ownership::Elsewhere);
    let texas = world.stop_node("texas").await;
    let refused = world.api.promote(&root, &promotion("maine", &[])).await.unwrap_err();
    assert_eq!(refused.problem, Problem::Conflict, "it does not answer: {refused}");
    assert!(refused.to_string().contains("--also-fenced texas"), "{refused}");
    let foretold = PromoteVolume { dry_run: true, ..promotion("maine", &["texas"]) };
    assert_eq!(world.api.promote(&root, &foretold).await.unwrap().lineage.0, 1);
    assert!(world.api.mv(mv.id).await.unwrap().progress.outcome.is_open(), "nothing was done yet");

    world.start_node("texas", texas).await;
    let promoted = world.api.promote(&root, &promotion("maine", &[])).await.unwrap();
    assert_eq!((promoted.host.as_str(), promoted.lineage.0), ("maine", 1));
    let ended = world.api.mv(mv.id).await.unwrap();
    assert_eq!(ended.progress.outcome, Outcome::Failed);
    assert!(ended.progress.error.is_some_and(|why| why.contains("`ohio` is lost")));
    let here = async || {
        let vm = world.api.vm(&name("web")).await.unwrap();
        (vm.host.as_str(), vm.lineage.0, vm.mv) == ("maine", 1, None)
    };
    assert!(soon(here).await, "not there");
    // Nobody drives the move any more, now or later.
    world.stop_controller().await;
    world.start_controller().await;
    assert_eq!(world.api.mv(mv.id).await.unwrap().progress.outcome, Outcome::Failed);
}

#[tokio::test]
async fn while_a_host_is_about_to_obey_an_order_to_promote_no_other_one_is_given_it() {
    let mut world = World::new().await;
    world.web().await;
    let root = name("root");
    for host in ["texas", "maine"] {
        world.api.start_precache(&precache_to(host)).await.unwrap();
    }
    world.stop_node("ohio").await;
    world.fakes["texas"].with(|n| n.held = Some(name("web")));
    let (api, volume) = (world.api.clone(), root.clone());
    let first = tokio::spawn(async move { api.promote(&volume, &promotion("texas", &[])).await });
    world.until_node("texas", |n| n.heard.contains(&"promote 1".to_owned())).await;
    let second = world.api.promote(&root, &promotion("maine", &[])).await.unwrap_err();
    assert_eq!(second.problem, Problem::Conflict, "{second}");
    world.fakes["texas"].with(|n| n.held = None);
    assert_eq!(first.await.unwrap().unwrap().host.as_str(), "texas");
    assert!(world.fakes["maine"].with(|n| n.vms.is_empty()));
}

#[tokio::test]
async fn a_vm_is_not_promoted_to_a_second_host_while_the_first_one_may_run_it() {
    let mut world = World::new().await;
    world.web().await;
    for host in ["texas", "maine"] {
        world.api.start_precache(&precache_to(host)).await.unwrap();
    }
    world.stop_node("ohio").await;
    let (order, root) = (promotion, name("root"));
    let texas = world.stop_node("texas").await;
    world.api.promote(&root, &order("texas", &[])).await.unwrap_err();
    // It may have heard the order, and run the VM.
    for dry_run in [true, false] {
        let refused = world.api.promote(&root, &PromoteVolume { dry_run, ..order("maine", &["ohio"]) }).await;
        let refused = refused.unwrap_err();
        assert_eq!(refused.problem, Problem::Conflict, "{refused}");
        assert!(refused.to_string().contains("--also-fenced texas"), "{refused}");
    }
    let foretold = PromoteVolume { dry_run: true, ..order("maine", &["texas"]) };
    assert_eq!(world.api.promote(&root, &foretold).await.unwrap().lineage.0, 2, "it would outrank the other");
    // It answers, and has not heard it.
    world.start_node("texas", texas).await;
    let promoted = world.api.promote(&root, &order("maine", &[])).await.unwrap();
    assert_eq!((promoted.host.as_str(), promoted.lineage.0), ("maine", 2));
    assert!(soon(async || world.api.vms().await.unwrap()[0].host == name("maine")).await);
}

#[tokio::test]
async fn a_pre_cache_is_told_to_the_volumes_host_until_it_is_ended_and_follows_the_vm() {
    let world = World::new().await;
    world.web().await;
    for (to, problem) in [("nowhere", Problem::NotFound), ("ohio", Problem::Conflict)] {
        assert_eq!(world.api.start_precache(&precache_to(to)).await.unwrap_err().problem, problem);
    }
    let hasty = StartPrecache { interval_ms: Some(1), ..precache_to("west") };
    assert_eq!(world.api.start_precache(&hasty).await.unwrap_err().problem, Problem::Invalid);
    for image_room in [Bytes(4096), Bytes(1 << 40)] {
        let roomless = StartPrecache { image_room: Some(image_room), ..precache_to("west") };
        assert_eq!(world.api.start_precache(&roomless).await.unwrap_err().problem, Problem::Invalid);
    }

    let begun = world.api.start_precache(&precache_to("west")).await.unwrap();
    assert_eq!((begun.from.as_str(), begun.to.as_str(), begun.site.as_str()), ("ohio", "texas", "west"));
    assert_eq!(begun.figures.as_ref().unwrap().lag_s, Some(1.5));
    let told = world.fakes["ohio"].with(|n| n.precaches.clone());
    assert_eq!(told.len(), 1);
    assert_eq!((told[0].to.name.as_str(), told[0].interval_ms, told[0].consistent), ("texas", 1000, true));
    assert_eq!((told[0].image_room, begun.image_room), (Bytes::mib(100), Bytes::mib(100)));
    // What is not said of it stays.
    let silent =
        StartPrecache { interval_ms: None, consistent: None, image_room: None, follow: None, ..precache_to("west") };
    let limit = Some(BitRate(5_000_000));
    let both = StartPrecache { limit, unlimited: true, ..silent.clone() };
    assert_eq!(world.api.start_precache(&both).await.unwrap_err().problem, Problem::Invalid);
    let changed = world.api.start_precache(&StartPrecache { limit, ..silent.clone() }).await.unwrap();
    assert_eq!((changed.limit, changed.interval_ms, changed.consistent, changed.follow), (limit, 1000, true, true));
    assert_eq!(changed.image_room, Bytes::mib(100));
    let changed = world.api.start_precache(&StartPrecache { interval_ms: Some(2000), ..silent.clone() }).await.unwrap();
    assert_eq!((changed.limit, changed.interval_ms), (limit, 2000));
    let changed = StartPrecache { unlimited: true, consistent: Some(false), ..silent.clone() };
    let changed = world.api.start_precache(&changed).await.unwrap();
    assert_eq!((changed.limit, changed.consistent, changed.follow), (None, false, true));
    assert_eq!(world.api.start_precache(&precache_to("west")).await.unwrap(), begun);
    // Another one beside it; both are listed.
    world.api.start_precache(&precache_to("maine")).await.unwrap();
    let all = world.api.precaches().await.unwrap();
    assert_eq!(all.iter().map(|p| p.to.as_str()).collect::<Vec<_>>(), ["maine", "texas"]);
    assert_eq!(world.api.volumes().await.unwrap()[0].replicas, [name("ohio"), name("texas"), name("maine")]);

    world.api.stop_precache(&name("root"), &name("maine")).await.unwrap();
    assert_eq!(world.fakes["ohio"].with(|n| n.precaches.len()), 1);
    let again = world.api.stop_precache(&name("root"), &name("maine")).await.unwrap_err();
    assert_eq!(again.problem, Problem::NotFound);

    // The VM is in texas now: the pre-cache is turned around.
    let local = world.fakes["ohio"].with(|n| {
        let vm = n.vms.get_mut(&1).unwrap();
        vm.ownership = Ownership::Elsewhere;
        vm.clone()
    });
    world.fakes["texas"].with(|n| {
        let moved = LocalVm { ownership: Ownership::Here, generation: local.generation.next(), ..local };
        n.vms.insert(1, moved);
    });
    let began = std::time::Instant::now();
    while world.fakes["texas"].with(|n| n.precaches.is_empty()) {
        assert!(began.elapsed() < Duration::from_secs(60), "texas is not told to pre-cache");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert_eq!(world.fakes["texas"].with(|n| n.precaches[0].to.name.clone()), name("ohio"));
    assert!(world.fakes["ohio"].with(|n| n.precaches.is_empty()));
    world.api.stop_precache(&name("root"), &name("ohio")).await.unwrap();
    assert!(world.api.precaches().await.unwrap().is_empty());
    assert!(world.fakes["texas"].with(|n| n.precaches.is_empty()));
}
