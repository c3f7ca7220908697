//! Events, figures and traces of a controller among fake nodes.

use crate::fakes::{PATIENCE, World, name};
use godwit_api::Client;
use godwit_api::events::{Event, EventStream, Happening};
use godwit_api::progress::{NoteKind, Outcome, Phase, PhaseName, Teller};
use godwit_trust::{Access, Identity, Role};
use godwit_units::{BitRate, Bytes, MoveId};
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// Reads until `last`, which is the last of what is given back.
async fn until(stream: &mut EventStream, last: impl Fn(&Happening) -> bool) -> Vec<Event> {
    let mut seen = vec![];
    let reading = async {
        while let Some(event) = stream.next().await.unwrap() {
            seen.push(event);
            if last(&seen.last().unwrap().what) {
                return;
            }
        }
        panic!("the stream ended");
    };
    let ended = tokio::time::timeout(PATIENCE, reading).await.is_ok();
    assert!(ended, "{seen:#?}");
    seen
}

fn kinds(events: &[Event]) -> Vec<String> {
    events.iter().map(|e| e.what.kind()).collect()
}

/// A move of `web` from ohio to texas, with figures, to its end.
async fn a_move(world: &World) -> MoveId {
    let id = world.order("texas").await.unwrap().id;
    world.say("ohio", id, |p| {
        p.phase = PhaseName::Memory;
        p.phases[0].ended_unix_us = Some(2_000_000);
        p.phases.push(Phase { name: PhaseName::Memory, started_unix_us: 2_000_000, ended_unix_us: None });
        p.memory_remaining = Bytes(1000);
        p.disk.remaining = Bytes(24);
        p.raw = Bytes(5000);
        p.dirty_rate = Bytes(77);
        p.memory_rate = BitRate(800);
        p.disk_rate = BitRate(80);
        p.predicted_downtime_ms = Some(40.0);
        p.trace.note(3_000_000, Teller::Source, NoteKind::Decision, "stop: enough");
    });
    world.until(id, |mv| mv.progress.phase == PhaseName::Memory).await;
    id
}

async fn ended(world: &World, id: MoveId) {
    world.hand_over("ohio", "texas");
    world.say("texas", id, |p| {
        p.outcome = Outcome::Completed;
        p.trace.note(4_000_000, Teller::Destination, NoteKind::HandOff, "granting -> granted");
    });
    world.say("ohio", id, |p| {
        p.outcome = Outcome::Completed;
        p.phase = PhaseName::Release;
        p.downtime_ms = Some(43.0);
    });
    world.until(id, |mv| mv.progress.outcome == Outcome::Completed).await;
}

#[tokio::test]
async fn what_happens_is_told_once_in_order_and_can_be_resumed_by_number() {
    let world = World::new().await;
    let mut stream = world.api.events(Some(0), true).await.unwrap();
    let before =
        until(&mut stream, |e| matches!(e, Happening::ComponentAdded { component } if component == &name("out"))).await;
    assert_eq!(kinds(&before).iter().filter(|k| *k == "host-added").count(), 3);
    world.web().await;
    let id = a_move(&world).await;
    ended(&world, id).await;
    let seen = until(&mut stream, |e| matches!(e, Happening::MoveEnded { .. })).await;
    let told: Vec<String> = kinds(&seen).into_iter().filter(|k| !k.starts_with("host-")).collect();
    let wanted = [
        "volume-created",
        "vm-created",
        "move-ordered",
        "move-phase",
        "move-phase",
        "vm-moved",
        "volume-changed",
        "move-phase",
        "move-ended",
    ];
    let wanted: BTreeSet<&str> = wanted.into();
    assert_eq!(told.iter().map(String::as_str).collect::<BTreeSet<_>>(), wanted, "{told:?}");
    assert!(told.iter().position(|k| k == "move-ordered") < told.iter().position(|k| k == "move-phase"), "{told:?}");
    let Happening::MoveEnded { mv, outcome, downtime_ms, .. } = &seen.last().unwrap().what else { unreachable!() };
    assert_eq!((*mv, *outcome, *downtime_ms), (id, Outcome::Completed, Some(43.0)));
    let ids: Vec<u64> = before.iter().chain(&seen).map(|e| e.id).collect();
    assert!(ids.windows(2).all(|pair| pair[0] + 1 == pair[1]), "{ids:?}");

    // Resumed in the middle, without following: the same again.
    let middle = seen[seen.len() / 2].id;
    let mut again = world.api.events(Some(middle), false).await.unwrap();
    let mut rest = vec![];
    while let Some(event) = again.next().await.unwrap() {
        rest.push(event);
    }
    assert_eq!(rest[..seen.len() - seen.len() / 2 - 1], seen[seen.len() / 2 + 1..]);
}

#[tokio::test]
async fn whoever_follows_over_a_restart_is_told_of_the_hole() {
    let mut world = World::new().await;
    let mut stream = world.api.events(Some(0), true).await.unwrap();
    let seen = until(&mut stream, |e| matches!(e, Happening::ComponentAdded { .. })).await;
    let last = seen.last().unwrap().id;
    // Numbers are of the second that it starts in.
    tokio::time::sleep(Duration::from_millis(1100)).await;
    world.stop_controller().await;
    assert_eq!(stream.next().await.map(|_| ()).map_err(|e| e.problem), Ok(()));
    world.start_controller().await;
    let mut stream = world.api.events(Some(last), true).await.unwrap();
    let seen = until(&mut stream, |_| true).await;
    assert_eq!(seen[0].what, Happening::Lost { count: None });
    assert!(seen[0].id > last);
}

#[tokio::test]
async fn whoever_follows_does_not_hold_up_the_controllers_end() {
    let mut world = World::new().await;
    let patience = Instant::now() + PATIENCE;
    loop {
        let _stream = world.api.events(Some(0), true).await.unwrap();
        let began = Instant::now();
        world.stop_controller().await;
        // Otherwise it waits for 5 s each time, on an idle machine too.
        if began.elapsed() < Duration::from_secs(3) {
            break;
        }
        assert!(Instant::now() < patience, "a reader holds up the controller's end");
        world.start_controller().await;
    }
}

/// A strict reader of Prometheus' text format: help and type before each metric, once; samples of one metric together; no
/// sample twice.
fn parse(text: &str) -> BTreeMap<String, f64> {
    let (mut samples, mut current, mut done) = (BTreeMap::new(), None::<(String, String)>, BTreeSet::new());
    let mut lines = text.lines().peekable();
    assert!(text.ends_with('\n'));
    while let Some(line) = lines.next() {
        if let Some(help) = line.strip_prefix("# HELP ") {
            let (metric, says) = help.split_once(' ').unwrap();
            assert!(!says.is_empty() && done.insert(metric.to_owned()), "{line}");
            let kind = lines.next().unwrap().strip_prefix(&format!("# TYPE {metric} ")).unwrap();
            assert!(["gauge", "counter"].contains(&kind), "{line}");
            assert_eq!(kind == "counter", metric.ends_with("_total"), "{metric}");
            current = Some((metric.to_owned(), kind.to_owned()));
            continue;
        }
        let (sample, value) = line.rsplit_once(' ').unwrap();
        let metric = sample.split('{').next().unwrap();
        assert_eq!(current.as_ref().unwrap().0, metric, "{line}");
        let value: f64 = value.parse().unwrap();
        assert!(value.is_finite() && value >= 0.0, "{line}");
        assert!(samples.insert(sample.to_owned(), value).is_none(), "twice: {line}");
    }
    samples
}

#[tokio::test]
async fn figures_have_the_names_that_kubevirts_users_know_and_the_moves_values() {
    let world = World::new().await;
    world.web().await;
    let id = a_move(&world).await;
    let operator = world.credentials(Role::Client(Access::Operator), "prometheus");
    let controller = Identity::new(Role::Controller, "controller").unwrap();
    let client = Client::new(world.controller_address(), controller, &operator, PATIENCE);
    let samples = parse(&client.text("/metrics").await.unwrap());
    let of = |metric: &str, more: &str| {
        let sample =
            format!("godwit_vm_migration_{metric}{{move=\"{}\",vm=\"web\",from=\"ohio\",to=\"texas\"{more}}}", id.0);
        samples.get(&sample).copied()
    };
    let mv = world.api.mv(id).await.unwrap();
    #[allow(clippy::cast_precision_loss)]
    let size = (mv.memory.0 + mv.disks.0) as f64;
    for (metric, value) in [
        ("data_remaining_bytes", 1024.0),
        ("data_processed_bytes", 5000.0),
        ("data_total_bytes", size),
        ("dirty_memory_rate_bytes", 77.0),
        ("memory_transfer_rate_bytes", 100.0),
        ("disk_transfer_rate_bytes", 10.0),
        ("predicted_downtime_seconds", 0.04),
    ] {
        assert_eq!(of(metric, ""), Some(value), "{metric}: {samples:#?}");
    }
    assert_eq!(of("phase", ",phase=\"memory\""), Some(1.0));
    assert_eq!(of("phase", ",phase=\"reserve\""), Some(0.0));
    assert_eq!(of("phase_start_timestamp_seconds", ",phase=\"memory\""), Some(2.0));
    assert_eq!(of("phase_end_timestamp_seconds", ",phase=\"reserve\""), Some(2.0));
    assert_eq!(samples["godwit_vm_migrations_in_running_phase"], 1.0);
    assert_eq!(samples["godwit_vm_migrations_total{outcome=\"completed\"}"], 0.0);

    ended(&world, id).await;
    let samples = parse(&client.text("/metrics").await.unwrap());
    assert_eq!(samples["godwit_vm_migrations_total{outcome=\"completed\"}"], 1.0);
    assert_eq!(samples["godwit_vm_migrations_in_running_phase"], 0.0);
    let pause =
        format!("godwit_vm_migration_downtime_seconds{{move=\"{}\",vm=\"web\",from=\"ohio\",to=\"texas\"}}", id.0);
    assert_eq!(samples[&pause], 0.043);
}

#[tokio::test]
async fn a_moves_trace_has_what_both_nodes_decided_and_outlives_them() {
    let world = World::new().await;
    world.web().await;
    let id = a_move(&world).await;
    ended(&world, id).await;
    let trace = world.api.mv(id).await.unwrap().progress.trace;
    let texts: Vec<&str> = trace.notes.iter().map(|n| n.text.as_str()).collect();
    assert_eq!(texts, ["stop: enough", "granting -> granted"]);
}
