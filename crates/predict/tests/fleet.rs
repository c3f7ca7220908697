//! Evacuations: against all plans there are, where that is little enough; and what every plan has to keep to.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use godwit_predict::fleet::{Fleet, FleetLink, FleetVm, Plan, Strategy};
use proptest::prelude::*;
use std::time::Duration;

fn vm(name: &str, memory_mib: u64, disk_gib: f64) -> FleetVm {
    FleetVm {
        name: name.into(),
        memory_mib,
        disk_gib,
        held_gib: 0.0,
        dirty_pages_per_s: 0.0,
        working_set_mib: None,
        disk_kib_per_s: 0.0,
        strategies: vec![Strategy::Mirror, Strategy::Postcopy],
        to: None,
    }
}

fn link(to: &str, rate_mbit: f64) -> FleetLink {
    FleetLink { to: to.into(), rate_mbit, rtt_ms: 20.0, per_move_mbit: None, room_gib: None }
}

fn fleet(link: Vec<FleetLink>, vm: Vec<FleetVm>) -> Fleet {
    Fleet { pre_s: 2.0, post_ms: 100.0, boot_s: 60.0, link, vm }
}

/// What each VM costs alone, on each link, with each strategy: seconds of the link. As the planner itself has it.
fn seconds_alone(whole: &Fleet) -> Vec<Vec<Vec<(Strategy, f64)>>> {
    let alone = |vm: &FleetVm, link: &FleetLink, strategy| {
        let vm = FleetVm { strategies: vec![strategy], ..vm.clone() };
        let alone = Fleet { link: vec![link.clone()], vm: vec![vm], ..whole.clone() };
        let plan = alone.plan(Duration::from_secs(1)).unwrap();
        let fixed = whole.pre_s + (whole.post_ms + 1.5 * link.rtt_ms) / 1e3;
        plan.moves.first().map(|m| (strategy, m.end_s - m.start_s - fixed))
    };
    let of_link = |vm: &FleetVm, link: &FleetLink| -> Vec<_> {
        vm.strategies.iter().filter_map(|strategy| alone(vm, link, *strategy)).collect()
    };
    whole.vm.iter().map(|vm| whole.link.iter().map(|link| of_link(vm, link)).collect()).collect()
}

/// How many are in time, and how much that disturbs, negated: more is better.
type Score = (usize, i64);

/// The best of all plans.
fn best(fleet: &Fleet, deadline: f64) -> Score {
    fn go(costs: &[Vec<Vec<(Strategy, f64)>>], rooms: &mut Vec<f64>) -> Score {
        let Some((vm, rest)) = costs.split_first() else { return (0, 0) };
        let mut best = go(rest, rooms);
        for (link, ways) in vm.iter().enumerate() {
            for (strategy, seconds) in ways {
                if rooms[link] >= *seconds {
                    rooms[link] -= seconds;
                    let (count, gain) = go(rest, rooms);
                    rooms[link] += seconds;
                    best = best.max((count + 1, gain - strategy.disturbs() as i64));
                }
            }
        }
        best
    }
    let room = |link: &FleetLink| deadline - fleet.pre_s - (fleet.post_ms + 1.5 * link.rtt_ms) / 1e3 + 1e-6;
    let mut rooms = fleet.link.iter().map(room).collect();
    go(&seconds_alone(fleet), &mut rooms)
}

fn score(plan: &Plan) -> Score {
    let in_time = plan.moves.iter().filter(|m| m.in_time);
    (plan.in_time, -(in_time.map(|m| m.strategy.disturbs()).sum::<u64>() as i64))
}

fn a_vm() -> impl Strategy_<Value = FleetVm> {
    let ways = prop::sample::subsequence(vec![Strategy::Mirror, Strategy::Postcopy, Strategy::Cold], 1..=3);
    (64_u64..4096, 0.0..4.0, 0.0..3000.0, 0.0..4000.0, ways).prop_map(|(memory, disk, dirty, writes, strategies)| {
        FleetVm {
            dirty_pages_per_s: dirty,
            disk_kib_per_s: writes,
            working_set_mib: Some(memory / 4),
            strategies,
            ..vm("", memory, disk)
        }
    })
}
use proptest::strategy::Strategy as Strategy_;

fn a_fleet(vms: std::ops::RangeInclusive<usize>) -> impl Strategy_<Value = Fleet> {
    let links = prop::collection::vec((50.0..500.0, 1_usize..3), 1..=2);
    (links, prop::collection::vec(a_vm(), vms)).prop_map(|(links, mut vms)| {
        for (i, vm) in vms.iter_mut().enumerate() {
            vm.name = format!("vm{i}");
        }
        let links = links.into_iter().enumerate().map(|(i, (rate, _))| link(["texas", "ohio"][i], rate));
        fleet(links.collect(), vms)
    })
}

#[test]
fn small_fleets_are_planned_nearly_as_well_as_they_can_be() {
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let (mut plans, mut fewer, mut rougher) = (0, 0, 0);
    while plans < 400 {
        let tree = (a_fleet(1..=5), 20.0..300.0).new_tree(&mut runner).unwrap();
        let (fleet, deadline) = proptest::strategy::ValueTree::current(&tree);
        let plan = fleet.plan(Duration::from_secs_f64(deadline)).unwrap();
        let (ours, theirs) = (score(&plan), best(&fleet, deadline));
        assert!(ours <= theirs, "better than the best: {ours:?} {theirs:?}\n{fleet:?}");
        assert!(plan.at_most >= theirs.0, "the bound is none: {} {theirs:?}", plan.at_most);
        assert!(ours.0 + 1 >= theirs.0, "two fewer than could be: {ours:?} {theirs:?}\n{fleet:?}\n{deadline}");
        plans += 1;
        fewer += usize::from(ours.0 < theirs.0);
        rougher += usize::from(ours.0 == theirs.0 && ours.1 < theirs.1);
    }
    println!("of {plans} plans {fewer} had one VM fewer in time than the best, {rougher} disturbed more");
    assert!(fewer * 100 <= plans && rougher * 25 <= plans, "of {plans}: {fewer} fewer, {rougher} rougher");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn every_vm_is_planned_once_and_lanes_carry_one_at_a_time(fleet in a_fleet(1..=40), deadline in 10.0_f64..2000.0) {
        let plan = fleet.plan(Duration::from_secs_f64(deadline)).unwrap();
        let mut names: Vec<&str> = plan.moves.iter().map(|m| m.vm.as_str()).collect();
        names.extend(plan.stranded.iter().map(|s| s.vm.as_str()));
        names.sort_unstable();
        let mut all: Vec<&str> = fleet.vm.iter().map(|vm| vm.name.as_str()).collect();
        all.sort_unstable();
        prop_assert_eq!(names, all);
        prop_assert_eq!(plan.in_time + plan.late, plan.moves.len());
        prop_assert!(plan.in_time <= plan.at_most);
        for m in &plan.moves {
            prop_assert_eq!(m.in_time, m.end_s <= deadline + 1e-6, "{:?}", m);
            let vm = fleet.vm.iter().find(|vm| vm.name == m.vm).unwrap();
            prop_assert!(vm.strategies.contains(&m.strategy));
        }
        for link in &fleet.link {
            let fixed = fleet.pre_s + (fleet.post_ms + 1.5 * link.rtt_ms) / 1e3;
            let mine: Vec<_> = plan.moves.iter().filter(|m| m.to == link.to).collect();
            let mut free = 0.0_f64;
            for m in &mine {
                prop_assert!(m.start_s >= free - 1e-6, "two at once: {:?}", m);
                free = m.start_s + (m.end_s - m.start_s - fixed);
            }
            // No more than the link carries.
            let bytes: u64 = mine.iter().map(|m| m.bytes).sum();
            prop_assert!(bytes as f64 <= link.rate_mbit * 1e6 / 8.0 * free * 1.001 + 1.0);
        }
    }
}

#[test]
fn with_time_enough_nobody_is_disturbed_and_without_it_those_are_who_cost_least() {
    // 8 GiB of disks and a guest that writes: post-copy is shorter, since nothing is sent twice.
    let writes = |name: &str| FleetVm { disk_kib_per_s: 4000.0, ..vm(name, 256, 8.0) };
    let fleet = fleet(vec![link("texas", 100.0)], ["a", "b", "c"].map(writes).into());
    let at = |seconds| fleet.plan(Duration::from_secs(seconds)).unwrap();
    let strategies = |plan: &Plan| plan.moves.iter().map(|m| m.strategy).collect::<Vec<_>>();
    let calm = at(10_000);
    assert_eq!((calm.in_time, strategies(&calm)), (3, vec![Strategy::Mirror; 3]));
    let hurried = at(calm.end_s as u64 - 100);
    assert_eq!(hurried.in_time, 3, "{hurried:?}");
    assert!(strategies(&hurried).contains(&Strategy::Postcopy) && strategies(&hurried).contains(&Strategy::Mirror));
    let late = at(1500);
    assert_eq!((late.in_time, late.late, late.at_most), (2, 1, 2), "{late:?}");
    assert_eq!(at(0).in_time, 0);
}

#[test]
fn a_vm_is_shut_down_only_where_it_may_be_and_there_is_no_other_way_in_time() {
    let fleet = |strategies| fleet(vec![link("texas", 100.0)], vec![FleetVm { strategies, ..vm("a", 4096, 1.0) }]);
    let all = fleet(vec![Strategy::Mirror, Strategy::Cold]);
    let at = |seconds| all.plan(Duration::from_secs(seconds)).unwrap().moves[0].clone();
    assert_eq!((at(1000).strategy, at(1000).in_time), (Strategy::Mirror, true));
    assert_eq!((at(200).strategy, at(200).in_time), (Strategy::Cold, true));
    assert!(at(200).downtime_ms > 60_000.0);
    let live = fleet(vec![Strategy::Mirror]).plan(Duration::from_secs(200)).unwrap();
    assert_eq!((live.in_time, live.late), (0, 1));
}

#[test]
fn a_link_that_one_move_cannot_fill_has_several_under_way() {
    let vms = |n: usize| (0..n).map(|i| vm(&format!("vm{i}"), 1024, 0.0)).collect::<Vec<_>>();
    let plan = |per_move_mbit| {
        let link = FleetLink { per_move_mbit, ..link("texas", 1000.0) };
        fleet(vec![link], vms(8)).plan(Duration::from_secs(600)).unwrap()
    };
    let (alone, four) = (plan(None), plan(Some(250.0)));
    // One sends, another one is prepared meanwhile.
    assert_eq!((alone.links[0].at_once, four.links[0].at_once), (2, 8));
    assert!((alone.end_s - four.end_s).abs() < 1.0, "the same link: {} {}", alone.end_s, four.end_s);
}

#[test]
fn a_pre_cached_disk_is_not_sent_again() {
    let at = |held_gib| {
        let vm = FleetVm { held_gib, ..vm("a", 64, 8.0) };
        fleet(vec![link("texas", 100.0)], vec![vm]).plan(Duration::from_secs(1)).unwrap().moves[0].clone()
    };
    assert!(at(0.0).end_s > 10.0 * at(8.0).end_s && at(9.0).bytes == at(8.0).bytes);
}

#[test]
fn a_vm_that_cannot_go_is_named_with_the_reason() {
    let busy = FleetVm { disk_kib_per_s: 50_000.0, strategies: vec![Strategy::Mirror], ..vm("busy", 64, 1.0) };
    let large = FleetVm { to: Some(vec!["texas".into()]), ..vm("large", 8192, 0.0) };
    let small = FleetLink { room_gib: Some(4.0), ..link("texas", 100.0) };
    let plan = fleet(vec![small], vec![busy, large]).plan(Duration::from_secs(9999)).unwrap();
    let why = |name: &str| &plan.stranded.iter().find(|s| s.vm == name).unwrap().why;
    assert!(why("busy").contains("postcopy") && why("large").contains("no room"), "{plan:?}");
    assert_eq!((plan.in_time, plan.late), (0, 0));
}

#[test]
fn what_makes_no_sense_is_refused_by_name() {
    let plan = |links, vms| fleet(links, vms).plan(Duration::from_secs(1)).unwrap_err().to_string();
    let texas = || vec![link("texas", 100.0)];
    assert!(plan(vec![], vec![]).contains("[[link]]"));
    assert!(plan(vec![link("texas", 0.0)], vec![]).contains("rate_mbit of the link to `texas` is 0"));
    assert!(plan(texas(), vec![vm("a", 0, 0.0)]).contains("memory_mib of VM `a`"));
    assert!(plan(texas(), vec![vm("a", 1, f64::NAN)]).contains("disk_gib of VM `a` is NaN"));
    assert!(plan(texas(), vec![vm("a", 1, 0.0), vm("a", 1, 0.0)]).contains("two VMs called `a`"));
    let astray = FleetVm { to: Some(vec!["mars".into()]), ..vm("a", 1, 0.0) };
    assert!(plan(texas(), vec![astray]).contains("links lead to: texas"));
    let many = FleetLink { per_move_mbit: Some(0.001), ..link("texas", 1e6) };
    assert!(plan(vec![many], vec![]).contains("lanes"));
}
