//! Worlds of claims: as many by default as take some seconds, more with `GODWIT_SIM_SCHEDULES`; or one, traced, with `SEED`.

use godwit_handoff::{Guard, Guards};
use godwit_sim::claims::Counts;
use godwit_sim::{Rules, Theme, run_about, run_traced_about};

/// A number from the environment; a value that is no number is an error, not the default.
fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name}={text} is not a number")))
}

#[test]
fn whoever_claims_owns_alone_and_whoever_returns_learns_it() {
    if let Some(seed) = number("SEED") {
        match run_traced_about(Theme::Claims, seed, Rules::ALL) {
            Ok(told) => println!("SEED={seed}: {} events, all invariants hold", told.events),
            Err(failure) => panic!("{failure}"),
        }
        return;
    }
    let schedules = number("GODWIT_SIM_SCHEDULES").unwrap_or(5_000);
    let (mut events, mut all) = (0, Counts::default());
    for seed in 0..schedules {
        match run_about(Theme::Claims, seed, Rules::ALL) {
            Ok(told) => {
                events += told.events;
                all = all + told.counts;
            }
            Err(failure) => {
                let traced = run_traced_about(Theme::Claims, failure.seed, Rules::ALL);
                panic!("{}", traced.expect_err("the same seed is the same story"));
            }
        }
    }
    println!("{schedules} schedules, {events} events: {all:?}");
    // A world in which nothing of the kind happens proves nothing.
    let least = u32::try_from(schedules / 100).unwrap_or(u32::MAX);
    for (what, count) in [
        ("claims at a source", all.at_source),
        ("claims at a destination", all.at_destination),
        ("claims without evidence", all.refused),
        ("returns of outranked hosts as they were", all.came_back),
        ("returns of owners, overwritten", all.overwritten),
    ] {
        assert!(count >= least, "{what}: {count} in {schedules} schedules");
    }
    assert!(all.too_old > 0, "no claim came when a newer one had been made");
}

#[test]
fn each_guard_of_claims_removed_makes_a_seed_fail_that_passes_with_it() {
    let fails = |seed, rules: Rules| run_about(Theme::Claims, seed, rules).is_err();
    for guard in [
        Guard::FenceOverwrites,
        Guard::ClaimNeedsStatement,
        Guard::ClaimNeedsSilence,
        Guard::ClaimKnowsNewest,
        Guard::OlderLineageIsTold,
        Guard::ClaimDropsStaleRam,
        Guard::StaleRamRecorded,
    ] {
        let seed = (0..4_000).find(|seed| fails(*seed, Guards::without(guard).into()) && !fails(*seed, Rules::ALL));
        println!("{guard:?}: seed {:?}", seed.unwrap_or_else(|| panic!("no seed needs {guard:?}")));
    }
}
