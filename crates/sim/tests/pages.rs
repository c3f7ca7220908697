//! Worlds in which memory follows its guest: as many by default as take some seconds, more with `GODWIT_SIM_SCHEDULES`; or one, traced,
//! with `SEED`.

mod common;

use common::{needs, run_all};
use godwit_handoff::{Guard, Guards};
use godwit_sim::{ShellGuard, ShellGuards, Theme};

#[test]
fn a_guest_runs_once_while_its_memory_follows_and_nobody_drops_a_page_that_it_lacks() {
    let Some((schedules, all)) = run_all(Theme::Pages, |told| told.pages) else { return };
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
    let mut missing = vec![];
    for guard in [Guard::PreparedKeeps, Guard::StartedAfterDrained, Guard::AbandonOnlyLost] {
        let seed = needs(Theme::Pages, Guards::without(guard), 20_000);
        println!("{guard:?}: seed {seed:?}");
        missing.extend(seed.is_none().then_some(guard));
    }
    assert!(missing.is_empty(), "no seed needs {missing:?}");
}

#[test]
fn what_a_node_does_so_that_a_source_can_go_back_left_out_makes_a_seed_fail_that_passes_with_it() {
    let mut missing = vec![];
    for guard in ShellGuard::ALL {
        let seed = needs(Theme::Pages, ShellGuards::without(guard), 20_000);
        println!("{guard:?}: seed {seed:?}");
        missing.extend(seed.is_none().then_some(guard));
    }
    assert!(missing.is_empty(), "no seed needs {missing:?}");
}
