//! Worlds by the thousand, or one.

#![allow(dead_code, reason = "not every test of worlds has a theme")]

use godwit_sim::{Rules, Theme, Told, run_about, run_traced_about};
use std::fmt::Debug;
use std::ops::Add;

/// A number from the environment; a value that is no number is an error, not the default.
pub fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name}={text} is not a number")))
}

/// Runs 5,000 worlds of a theme, or as many as `GODWIT_SIM_SCHEDULES` says: how many there were, and what `of` says of each, added up. None:
/// only the world that `SEED` names was run, and told.
pub fn run_all<C: Add<Output = C> + Debug + Default>(theme: Theme, of: impl Fn(Told) -> C) -> Option<(u64, C)> {
    if let Some(seed) = number("SEED") {
        match run_traced_about(theme, seed, Rules::ALL) {
            Ok(told) => println!("SEED={seed}: {} events, all invariants hold", told.events),
            Err(failure) => panic!("{failure}"),
        }
        return None;
    }
    let schedules = number("GODWIT_SIM_SCHEDULES").unwrap_or(5_000);
    let (mut events, mut all) = (0, C::default());
    for seed in 0..schedules {
        match run_about(theme, seed, Rules::ALL) {
            Ok(told) => {
                events += told.events;
                all = all + of(told);
            }
            Err(failure) => {
                let traced = run_traced_about(theme, failure.seed, Rules::ALL);
                panic!("{}", traced.expect_err("the same seed is the same story"));
            }
        }
    }
    println!("{schedules} schedules, {events} events: {all:?}");
    Some((schedules, all))
}

/// The first of so many worlds of a theme that fails without a rule, and does not with it.
pub fn needs(theme: Theme, without: impl Into<Rules>, seeds: u64) -> Option<u64> {
    let without = without.into();
    let fails = |seed, rules: Rules| run_about(theme, seed, rules).is_err();
    (0..seeds).find(|seed| fails(*seed, without) && !fails(*seed, Rules::ALL))
}
