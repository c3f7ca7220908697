//! How long the plan of 5,000 VMs' evacuation takes, with deadlines from far too short to ample. Prints, asserts nothing.
//!
//! `cargo run --release -p godwit-predict --example fleet_speed`

#![allow(clippy::unwrap_used, reason = "an example that cannot go on has failed")]

use godwit_predict::fleet::{Fleet, FleetLink, FleetVm, Strategy};
use std::time::{Duration, Instant};

const VMS: usize = 5000;

fn main() {
    let mut seed = 1_u64;
    let mut below = |n: u64| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) % n
    };
    let vms = (0..VMS).map(|i| {
        let memory_mib = 512 << below(6);
        let mut strategies = vec![Strategy::Mirror, Strategy::Postcopy];
        if below(10) == 0 {
            strategies.push(Strategy::Cold);
        }
        FleetVm {
            disk_gib: below(100) as f64,
            dirty_pages_per_s: below(5000) as f64,
            working_set_mib: Some(memory_mib / (1 + below(8))),
            disk_kib_per_s: below(4000) as f64,
            strategies,
            ..FleetVm::new(&format!("vm{i}"), memory_mib)
        }
    });
    let link = |to: &str, rate_mbit, per_move_mbit| FleetLink {
        rtt_ms: 20.0,
        per_move_mbit: Some(per_move_mbit),
        ..FleetLink::new(to, rate_mbit)
    };
    let fleet = Fleet {
        link: vec![link("texas", 40_000.0, 5000.0), link("ohio", 10_000.0, 10_000.0)],
        vm: vms.collect(),
        ..Fleet::default()
    };
    println!("{VMS} VMs, links of 40 and 10 Gbit/s, at most 5 Gbit/s a move over the former");
    for minutes in [10, 60, 600, 1200, 6000] {
        let begin = Instant::now();
        let plan = fleet.plan(Duration::from_secs(minutes * 60)).unwrap();
        let seconds = begin.elapsed().as_secs_f64();
        let disturbed = plan.moves.iter().filter(|m| m.in_time && m.strategy != Strategy::Mirror).count();
        println!(
            "{minutes:>5} min: planned in {seconds:.2} s; {} in time, at most {} by any plan, {disturbed} of them not mirrored; all \
             away after {:.0} min",
            plan.in_time,
            plan.at_most,
            plan.end_s / 60.0
        );
    }
}
