//! Worlds in which memory follows its guest: as many by default as take some seconds, more with `GODWIT_SIM_SCHEDULES`; or one, traced,
//! with `SEED`.

use godwit_handoff::{Guard, Guards};
use godwit_sim::pages::Counts;
use godwit_sim::{Rules, Theme, run_about, run_traced_about};

/// A number from the environment; a value that is no number is an error, not the default.
fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name}={text} is not a number")))
}

#[test]
fn a_guest_runs_once_while_its_memory_follows_and_nobody_drops_a_page_that_it_lacks() {
    if let Some(seed) = number("SEED") {
        match run_traced_about(Theme::Pages, seed, Rules::ALL) {
            Ok(told) => println!("SEED={seed}: {} events, all invariants hold", told.events),
            Err(failure) => panic!("{failure}"),
        }
        return;
    }
    let schedules = number("GODWIT_SIM_SCHEDULES").unwrap_or(5_000);
    let (mut events, mut all) = (0, Counts::default());
    for seed in 0..schedules {
        match run_about(Theme::Pages, seed, Rules::ALL) {
            Ok(told) => {
                events += told.events;
                all = all + told.pages;
            }
            Err(failure) => {
                let traced = run_traced_about(Theme::Pages, failure.seed, Rules::ALL);
                panic!("{}", traced.expect_err("the same seed is the same story"));
            }
        }
    }
    println!("{schedules} schedules, {events} events: {all:?}");
    // A world in which nothing of the kind happens proves nothing.
    let least = |one_in: u64| u32::try_from(schedules / one_in).unwrap_or(u32::MAX);
    for (what, count, least) in [
        ("began", all.begun, least(10)),
        ("drained", all.drained, least(10)),
        ("were given up", all.given_up, least(200)),
    ] {
        assert!(count >= least, "{count} {what} in {schedules} schedules");
    }
}

#[test]
fn each_guard_of_memory_that_follows_removed_makes_a_seed_fail_that_passes_with_it() {
    let fails = |seed, rules: Rules| run_about(Theme::Pages, seed, rules).is_err();
    let mut missing = vec![];
    for guard in [Guard::PreparedBeforeTold, Guard::PreparedKeeps, Guard::StartedAfterDrained, Guard::AbandonOnlyLost] {
        let seed = (0..20_000).find(|seed| fails(*seed, Guards::without(guard).into()) && !fails(*seed, Rules::ALL));
        println!("{guard:?}: seed {seed:?}");
        missing.extend(seed.is_none().then_some(guard));
    }
    assert!(missing.is_empty(), "no seed needs {missing:?}");
}
