//! Every guard matters: without it, some world goes wrong that goes right with it.

use godwit_sim::{Rules, run};

/// How many seeds are searched. The worlds are made so that most guards need some hundreds.
const SEEDS: u64 = 20_000;

/// The first seed that fails without a rule and does not with it.
fn witness(rules: Rules) -> Option<u64> {
    (0..SEEDS).find(|seed| run(*seed, rules).is_err() && run(*seed, Rules::ALL).is_ok())
}

/// Names those without a witness. Should there be none for a guard, it has become superfluous, or the world too kind.
fn each_has_a_witness<G: Copy + std::fmt::Debug>(guards: &[G], without: impl Fn(G) -> Rules) {
    let mut missing = vec![];
    for guard in guards {
        match witness(without(*guard)) {
            Some(seed) => println!("{guard:?}: seed {seed}"),
            None => missing.push(*guard),
        }
    }
    assert!(missing.is_empty(), "none of {SEEDS} seeds needs {missing:?}");
}

#[test]
fn each_guard_of_the_hand_off_removed_makes_a_seed_fail_that_passes_with_it() {
    use godwit_handoff::{Guard, Guards};
    // Orders to claim travel only in the worlds of `claims.rs`, which has a witness for each of these.
    let of_claims =
        [Guard::ClaimNeedsStatement, Guard::ClaimNeedsSilence, Guard::ClaimKnowsNewest, Guard::OlderLineageIsTold];
    // Nor does memory follow but in those of `pages.rs`, as above.
    let of_pages = [Guard::PreparedKeeps, Guard::StartedAfterDrained, Guard::AbandonOnlyLost];
    let elsewhere = [&of_claims[..], &of_pages[..]].concat();
    let guards: Vec<Guard> = Guard::ALL.into_iter().filter(|guard| !elsewhere.contains(guard)).collect();
    each_has_a_witness(&guards, |guard| Guards::without(guard).into());
}

#[test]
fn a_record_that_is_believed_before_it_is_durable_makes_a_seed_fail_that_passes_otherwise() {
    let seed = witness(Rules { records_made_sure: false, ..Rules::ALL });
    println!("seed {:?}", seed.unwrap_or_else(|| panic!("none of {SEEDS} seeds needs records to be made sure")));
}

#[test]
fn each_guard_of_the_volume_removed_makes_a_seed_fail_that_passes_with_it() {
    use godwit_volume::{Guard, Guards};
    each_has_a_witness(&Guard::ALL, |guard| Guards::without(guard).into());
}
