//! Plans of sites that are made up: what is known becomes what is planned, and of thousands of VMs in time.

use super::*;
use crate::testing::{ended_move, local_vm, progress};
use godwit_api::profile::{ProfileState, StartProfile};
use godwit_api::progress::{Outcome, Round};
use godwit_units::{BitRate, Generation, Lineage};
use serde_json::json;
use std::time::Instant;

fn name(name: &str) -> Name {
    name.parse().unwrap()
}

fn facts(host: &str, memory_gib: u64) -> HostFacts {
    serde_json::from_value(json!({
        "name": host, "version": "1", "qemu": "7.2", "machines": ["pc-q35-7.2"], "kvm": false, "memory_free": memory_gib << 30,
        "disk_free": 1_u64 << 45, "certificate_expires_unix_s": 1, "underlay": "127.0.0.1",
        "link": {"control": "127.0.0.1:1", "disk": "127.0.0.1:2", "memory": "127.0.0.1:3"},
    }))
    .unwrap()
}

fn vm(id: u64, host: &str) -> VmRecord {
    let mut definition = local_vm(Ownership::Here, 1).definition;
    (definition.id, definition.name) = (VmId(id), name(&format!("vm{id}")));
    definition.spec.machine = "pc-q35-7.2,usb=off".into();
    definition.spec.memory = Bytes::gib(1);
    definition.spec.disks =
        serde_json::from_value(json!([{"volume": format!("disk{id}"), "size": 1_u64 << 30}])).unwrap();
    definition.volumes = vec![VolumeId(id)];
    let record = json!({
        "definition": definition, "host": host, "lineage": Lineage(0), "generation": Generation(1), "life": "ready",
    });
    serde_json::from_value(record).unwrap()
}

fn volume(id: u64, replicas: &[&str]) -> Volume {
    let replicas = replicas.iter().map(|host| name(host)).collect();
    let vm = name(&format!("vm{id}"));
    Volume { id: VolumeId(id), name: name(&format!("disk{id}")), size: Bytes::gib(1), vm, replicas }
}

/// A move of a VM of 100 s whose rounds sent and dirtied so many pages.
fn a_move(id: u64, vm: u64, hosts: (&str, &str), pages: u64, dirtied: u64) -> MoveRecord {
    let mut p = progress(Outcome::Completed);
    p.resumed_unix_us = Some(100_000_000);
    p.downtime_ms = Some(200.0);
    p.rounds = vec![Round { pages, dirtied, wire: Bytes(pages * 1000), seconds: 90.0, ..Round::default() }];
    ended_move(id, (vm, &format!("vm{vm}")), hosts, &p)
}

/// The site `old` with `h1`, which is to be left for `n1` and `n2` in `new`, over 100 Mbit/s.
fn seen(vms: u64) -> Seen {
    let hosts = [("h1", "old"), ("n1", "new"), ("n2", "new")];
    let records: Vec<VmRecord> = (0..vms).map(|id| vm(id, "h1")).collect();
    let local = records.iter().map(|record| {
        let local = LocalVm {
            definition: record.definition.clone(),
            allocated: Bytes::mib(512),
            ..local_vm(Ownership::Here, 1)
        };
        ((record.host.clone(), record.definition.id), local)
    });
    let host = |(host, site): &(&str, &str)| HostRecord {
        name: name(host),
        site: name(site),
        api: "127.0.0.1:1".parse().unwrap(),
    };
    Seen {
        site: name("old"),
        sites: hosts.iter().map(|(host, site)| (name(host), name(site))).collect(),
        to: hosts[1..].iter().map(host).collect(),
        local: local.collect(),
        facts: hosts.iter().map(|(host, _)| (name(host), facts(host, 100_000))).collect(),
        activity: vec![(
            name("h1"),
            (0..vms).map(|id| Activity { vm: VmId(id), written_per_s: Some(0.0), profile: None }).collect(),
        )],
        moves: vec![],
        volumes: (0..vms).map(|id| volume(id, &["h1"])).collect(),
        precaches: HashMap::new(),
        paths: HashMap::from([(
            name("new"),
            PathFacts { rtt_ms: 20.0, loss: 0.0, goodput: Some(BitRate::from_mbit(100.0)) },
        )]),
        silent: vec![],
        now_s: 1_790_000_000,
        at_unix_s: 1_790_000_000,
        vms: records,
    }
}

fn wanted(deadline_s: f64) -> PlanEvacuation {
    PlanEvacuation { deadline_s, vms: None, to: vec![], limit: None, at_unix_s: None, cold: false }
}

fn local(seen: &mut Seen, id: u64) -> &mut LocalVm {
    seen.local.get_mut(&(name("h1"), VmId(id))).unwrap()
}

fn find<'a>(plan: &'a Evacuation, vm: &str) -> &'a EvacuationMove {
    plan.moves.iter().find(|mv| mv.vm.as_str() == vm).unwrap_or_else(|| panic!("{vm} is not in {plan:?}"))
}

#[test]
fn each_vm_is_in_the_plan_or_left_out_with_the_reason() {
    let mut seen = seen(7);
    local(&mut seen, 1).run = RunState::Off;
    local(&mut seen, 2).ownership = Ownership::Elsewhere;
    local(&mut seen, 3).run = RunState::Paused;
    seen.local.remove(&(name("h1"), VmId(4)));
    let mut open = a_move(9, 5, ("h1", "n1"), 1000, 10);
    open.step = Step::Observe;
    open.progress.memory_remaining = Bytes(125_000_000);
    seen.moves = vec![open];
    seen.vms[6].definition.spec.machine = "virt-9".into();
    let plan = plan(seen, &wanted(3600.0)).unwrap();
    let moves: Vec<_> = plan.moves.iter().map(|mv| (mv.vm.as_str(), mv.strategy.as_str())).collect();
    assert_eq!(moves.len() + plan.left_out.len(), plan.vms);
    assert!(moves.contains(&("vm0", "mirror")) && moves.contains(&("vm1", "cold")) && moves.len() == 2, "{plan:?}");
    for (vm, why) in [
        ("vm2", "does not own it"),
        ("vm3", "neither runs nor is off"),
        ("vm4", "says nothing of it"),
        ("vm5", "moved to `n1` already (move 9)"),
        ("vm6", "machine type `virt-9`"),
    ] {
        let left = plan.left_out.iter().find(|left| left.vm.as_str() == vm).unwrap();
        assert!(left.why.contains(why), "{left:?}");
    }
    let off = find(&plan, "vm1");
    assert_eq!((off.disk, off.downtime_ms.likely), (None, 0.0));
    assert!(off.note.as_ref().unwrap().contains("godwit vm start vm1"), "{off:?}");
    // What the move under way still sends has the link first.
    assert!(plan.links[0].busy_s > 1.0 && plan.moves.iter().all(|mv| mv.start_s >= plan.links[0].busy_s), "{plan:?}");
}

#[test]
fn a_plan_is_executable_move_by_move_and_comes_back_from_its_file() {
    let plan = plan(seen(5), &wanted(150.0)).unwrap();
    assert_eq!((plan.moves.len(), plan.in_time + plan.late), (5, 5));
    let mut before: Option<&EvacuationMove> = None;
    for mv in &plan.moves {
        assert_eq!((mv.from.as_str(), mv.site.as_str(), mv.disk), ("h1", "new", Some(DiskStrategy::Mirror)));
        assert!(["n1", "n2"].contains(&mv.to.as_str()));
        // One link: each waits for the one before it.
        assert_eq!(mv.after.as_ref(), before.map(|mv| &mv.vm));
        assert!(before.is_none_or(|before| mv.start_s >= before.start_s));
        assert!(mv.end_s.lower < mv.end_s.likely && mv.end_s.likely < mv.end_s.upper, "{mv:?}");
        let sure = if mv.end_s.upper <= 150.0 { InTime::Surely } else { InTime::Likely };
        assert_eq!(mv.in_time, if mv.end_s.likely <= 150.0 { sure } else { InTime::Late });
        before = Some(mv);
    }
    assert!(plan.surely < plan.in_time && plan.late > 0, "{plan:?}");
    let kept = serde_json::to_string(&plan).unwrap();
    let read = Evacuation::read(&kept).unwrap();
    // The last digit of a number may be another one.
    assert_eq!((read.moves.len(), read.in_time, read.bytes), (plan.moves.len(), plan.in_time, plan.bytes));
    for (read, mv) in read.moves.iter().zip(&plan.moves) {
        assert_eq!((&read.vm, &read.to, &read.after, read.disk), (&mv.vm, &mv.to, &mv.after, mv.disk));
        assert!((read.end_s.upper - mv.end_s.upper).abs() < 1e-6);
    }
}

#[test]
fn a_guest_is_known_by_its_profile_wherever_it_was_watched_then_by_its_moves_and_its_codec_counts() {
    let mut seen = seen(3);
    let begun = |host: &str, start_s: u64| {
        let start = StartProfile { for_s: 60, interval_ms: 1000 };
        let profile = Profile::begun(name(host), start_s * 1000, start, Bytes::gib(1));
        Profile { state: ProfileState::Done, looks: 9, changed_per_s: 50.0, working_set: Bytes::mib(64), ..profile }
    };
    let mut packed = begun("n1", 1_790_000_000 - 7200);
    packed.contents.packed = Some(0.05);
    packed.contents.zero = 0.5;
    // Another host has an older one.
    let older = Profile { changed_per_s: 9000.0, ..begun("n2", 1_790_000_000 - 50_000) };
    let told = |profile| vec![Activity { vm: VmId(0), written_per_s: Some(1e9), profile: Some(profile) }];
    // A host that does not have the VM says nothing of its writes.
    seen.activity = vec![(name("n1"), told(packed)), (name("n2"), told(older))];
    seen.moves = vec![a_move(1, 1, ("n1", "h1"), 262_144, 100)];
    let plan = plan(seen, &wanted(3600.0)).unwrap();
    let models = ["vm0", "vm1", "vm2"].map(|vm| find(&plan, vm).model.as_str());
    assert_eq!(models, ["profile", "moves", "assumed"]);
    assert!(find(&plan, "vm0").bytes.0 < find(&plan, "vm2").bytes.0, "{plan:?}");
    assert_eq!(find(&plan, "vm0").strategy, "mirror");
}

#[test]
fn a_vm_goes_to_the_host_that_has_its_disks_and_sends_what_is_missing() {
    let mut seen = seen(3);
    seen.volumes[0] = volume(0, &["h1", "n2"]);
    seen.volumes[1] = volume(1, &["h1", "n2"]);
    let figures =
        PrecacheFigures { state: PrecacheState::Following, backlog: Bytes::mib(1), ..PrecacheFigures::default() };
    seen.precaches = HashMap::from([((VolumeId(0), name("n2")), figures)]);
    let plan = plan(seen, &wanted(3600.0)).unwrap();
    let (kept, stale, whole) = (find(&plan, "vm0"), find(&plan, "vm1"), find(&plan, "vm2"));
    assert_eq!((kept.to.as_str(), stale.to.as_str()), ("n2", "n2"));
    assert!(kept.bytes.0 < stale.bytes.0 && stale.bytes.0 + (256 << 20) < whole.bytes.0, "{plan:?}");
}

#[test]
fn an_order_that_makes_no_sense_is_refused() {
    for bad in [-1.0, f64::NAN, 1e9] {
        assert!(super::super::check(&wanted(bad)).unwrap_err().message.contains("deadline_s"));
    }
    let host =
        |host: &str, site: &str| HostRecord { name: name(host), site: name(site), api: "127.0.0.1:1".parse().unwrap() };
    let all = [host("h1", "old"), host("n1", "new"), host("m1", "mid")];
    let to = |names: &[&str]| {
        let names: Vec<Name> = names.iter().map(|n| name(n)).collect();
        super::super::destinations(&all, &name("old"), &names).map(|hosts| hosts.len()).map_err(|e| e.message)
    };
    assert_eq!((to(&[]), to(&["mid"]), to(&["n1"])), (Ok(2), Ok(1), Ok(1)));
    assert!(to(&["h1"]).unwrap_err().contains("to be left") && to(&["mars"]).unwrap_err().contains("mars"));
    let alone = super::super::destinations(&all[..1], &name("old"), &[]);
    assert!(alone.unwrap_err().message.contains("no host outside"));
}

/// As many moves as VMs, each with a profile.
fn busy(vms: u64) -> Seen {
    let mut seen = seen(vms);
    seen.moves = (0..vms).map(|id| a_move(id, id, ("n1", "h1"), 262_144, 100 + id % 7)).collect();
    let begun = |id: u64| {
        let start = StartProfile { for_s: 60, interval_ms: 1000 };
        let profile = Profile::begun(name("n1"), 1_790_000_000_000 - id, start, Bytes::gib(1));
        let changed_per_s = (id % 100) as f64;
        Profile { state: ProfileState::Done, looks: 9, changed_per_s, working_set: Bytes::mib(64), ..profile }
    };
    let told = |id| Activity { vm: VmId(id), written_per_s: None, profile: Some(begun(id)) };
    seen.activity = vec![(name("h1"), (0..vms).map(told).collect())];
    seen
}

#[test]
fn four_times_as_many_vms_take_nowhere_near_sixteen_times_as_long() {
    let seconds = |vms: u64| {
        let seen = busy(vms);
        let begin = Instant::now();
        let plan = plan(seen, &wanted(1e6)).unwrap();
        assert_eq!(plan.moves.len() as u64, vms, "{:?}", plan.left_out.first());
        begin.elapsed().as_secs_f64()
    };
    // In turn, so that both have the machine's better moments.
    let (mut few, mut many) = (f64::INFINITY, f64::INFINITY);
    for _ in 0..7 {
        (few, many) = (few.min(seconds(1000)), many.min(seconds(4000)));
    }
    assert!(many < few * 10.0, "1000 VMs in {few:.3} s, 4000 in {many:.3} s");
}

/// It prints how long that takes: `cargo test --release -p godwit-controller -- --nocapture five_thousand`.
#[test]
fn five_thousand_vms_are_planned_and_the_later_the_deadline_the_more_are_in_time() {
    let mut in_time = 0;
    for deadline in [600.0, 6000.0, 60_000.0, 600_000.0] {
        let seen = busy(5000);
        let begin = Instant::now();
        let plan = plan(seen, &wanted(deadline)).unwrap();
        let took = begin.elapsed().as_secs_f64();
        println!(
            "5000 VMs by {deadline} s: planned in {took:.2} s, {} in time, at most {}",
            plan.in_time, plan.at_most
        );
        assert_eq!(plan.moves.len() + plan.left_out.len(), 5000, "each is in the plan, or left out with a reason");
        assert!(plan.in_time >= in_time && plan.in_time <= plan.moves.len(), "{deadline}: {}", plan.in_time);
        in_time = plan.in_time;
    }
    assert!(in_time > 0);
}
