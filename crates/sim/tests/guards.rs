//! Every guard matters: without it, some world goes wrong that goes right with it.

use godwit_sim::{Guard, Guards, run};

/// The first seed, from 0 upwards, that fails without the guard. When a change to the world makes one of them pass, look for
/// the next one that does not; should there be none, the guard has become superfluous, or the world too kind.
const WITNESSES: [(Guard, u64); Guard::ALL.len()] = [
    (Guard::SealAfterPostmigrate, 42),
    (Guard::SealAfterVerified, 0),
    (Guard::SealAfterClosed, 0),
    (Guard::StoppedGivesUp, 1),
    (Guard::CommitAfterSealed, 287),
    (Guard::CommitRepeats, 303),
    (Guard::CancelAfterSealAsks, 16),
    (Guard::SealedSurvivesRestart, 17),
    (Guard::RestartUndoes, 2),
    (Guard::OwnedBeforeRun, 42),
    (Guard::TicketBurned, 2055),
    (Guard::StageOnlyNewer, 1630),
    (Guard::CheckLineage, 1243),
    (Guard::CheckGeneration, 3771),
    (Guard::CheckMove, 7),
    (Guard::KeepUntilStarted, 498),
    (Guard::AckAfterReleased, 586),
    (Guard::StartedRepeats, 45),
    (Guard::GrantOnlyLoaded, 8),
    (Guard::OpenAfterGranted, 613),
    (Guard::ContAfterStarted, 7),
    (Guard::RefusedBeforeAnswer, 131474),
    (Guard::UndoWritesRefused, 12270),
    (Guard::RefusedStays, 0),
    (Guard::CloseBeforeReturn, 103),
    (Guard::NoReturnAfterStarted, 2478),
    (Guard::StagedAsks, 0),
    (Guard::ClaimDropsStaleRam, 265),
    (Guard::StaleRamRecorded, 6519),
    (Guard::FenceOverwrites, 6),
];

#[test]
fn each_guard_removed_makes_a_seed_fail_that_passes_with_it() {
    for (guard, seed) in WITNESSES {
        assert!(run(seed, Guards::without(guard)).is_err(), "seed {seed} no longer needs {guard:?}");
        if let Err(failure) = run(seed, Guards::ALL) {
            panic!("with every guard in force: {failure}");
        }
    }
}

#[test]
fn every_guard_has_a_witness() {
    for guard in Guard::ALL {
        assert!(WITNESSES.iter().any(|(witnessed, _)| *witnessed == guard), "{guard:?} has none");
    }
}
