//! Worlds of claims: as many by default as take some seconds, more with `GODWIT_SIM_SCHEDULES`; or one, traced, with `SEED`.

mod common;

use common::{needs, run_all};
use godwit_handoff::{Guard, Guards};
use godwit_sim::Theme;

#[test]
fn whoever_claims_owns_alone_and_whoever_returns_learns_it() {
    let Some((schedules, all)) = run_all(Theme::Claims, |told| told.counts) else { return };
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
    for guard in [
        Guard::FenceOverwrites,
        Guard::ClaimNeedsStatement,
        Guard::ClaimNeedsSilence,
        Guard::ClaimKnowsNewest,
        Guard::OlderLineageIsTold,
        Guard::ClaimDropsStaleRam,
        Guard::StaleRamRecorded,
    ] {
        let seed = needs(Theme::Claims, Guards::without(guard), 4_000);
        println!("{guard:?}: seed {:?}", seed.unwrap_or_else(|| panic!("no seed needs {guard:?}")));
    }
}
