//! What to do next with a move, given what its two nodes say: no sockets, no clock.
//!
//! # What can go wrong
//!
//! Either node may be silent, for any time; nothing follows from silence. A node may have restarted and forgotten the
//! move. The controller may have died between any two steps. So nothing here rests on what was seen before, only on the
//! record's step and on what is said now; and of what is said, the *generation* decides: a destination that owns the VM
//! with more than the generation that it had when the move was ordered has it, whatever anybody else says.

use crate::record::Step;
use godwit_api::host::{LocalMove, LocalVm, Ownership};
use godwit_api::progress::{DiskProgress, MoveBytes, MoveProgress, Outcome, PhaseName, Trace};
use godwit_units::{Generation, Lineage};

/// What one node says of one thing.
#[derive(Clone, Debug, PartialEq)]
pub enum Said<T> {
    /// This.
    This(T),
    /// That it knows of no such thing.
    Unknown,
    /// Nothing: not reached, or it failed.
    Silent(String),
}

impl<T> Said<T> {
    /// What was said, if anything was.
    pub const fn this(&self) -> Option<&T> {
        match self {
            Self::This(value) => Some(value),
            Self::Unknown | Self::Silent(_) => None,
        }
    }
}

/// What both nodes say.
#[derive(Clone, Debug, PartialEq)]
pub struct Seen {
    /// The source of the move.
    pub source_move: Said<LocalMove>,
    /// The source of the VM.
    pub source_vm: Said<LocalVm>,
    /// The destination of the move.
    pub destination_move: Said<LocalMove>,
    /// The destination of the VM.
    pub destination_vm: Said<LocalVm>,
}

/// What to do now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    /// Ask again a little later.
    Watch,
    /// The destination has the VM, as this: records and gateways are to follow. Then go on watching.
    Settle(Lineage, Generation),
    /// It is over, this way.
    End(Outcome, Option<String>),
}

/// What follows from what the nodes say. `filling`: when the destination was heard last, blocks were still following the VM.
#[must_use]
pub fn next(step: Step, owner: (Lineage, Generation), filling: bool, seen: &Seen) -> Next {
    let arrived = seen.destination_vm.this().filter(|vm| is_owner_after(vm, owner));
    let source_outcome = seen.source_move.this().map(|m| m.progress.outcome);
    if let Some(vm) = arrived
        && step != Step::Finish
    {
        return Next::Settle(vm.lineage, vm.generation);
    }
    if arrived.is_some() || step == Step::Finish {
        // The VM is over there for good. What the source still does is clearing up; the destination proves the network.
        let there = seen.destination_move.this().map(|m| &m.progress);
        let over = match (&seen.source_move, source_outcome) {
            _ if there.is_some_and(|p| p.outcome.is_open()) => false,
            // It fills on when it is back, or has forgotten the move because nothing is left to fill.
            _ if filling && matches!(seen.destination_move, Said::Silent(_)) => false,
            (_, Some(outcome)) => !outcome.is_open(),
            (Said::Unknown, _) => true,
            // A source that is gone does not keep a move open that its destination has finished, or has long forgotten.
            (_, None) => match there {
                Some(p) => p.outcome.has_arrived(),
                None => arrived.is_some() && matches!(seen.destination_move, Said::Unknown),
            },
        };
        return match there {
            _ if !over => Next::Watch,
            Some(p) if p.outcome.has_arrived() => Next::End(p.outcome, p.error.clone()),
            _ => Next::End(Outcome::Completed, None),
        };
    }
    // Claimed at the source: whatever the destination may say when it comes back is of an older lineage.
    if let Some(claimed) = seen.source_vm.this().filter(|vm| vm.ownership == Ownership::Here && vm.lineage > owner.0) {
        let why = format!("the VM was claimed at the source, and is of lineage {} now", claimed.lineage.0);
        return Next::End(Outcome::Failed, Some(why));
    }
    match (&seen.source_move, source_outcome) {
        (Said::This(mv), Some(outcome @ (Outcome::Failed | Outcome::Cancelled))) => {
            Next::End(outcome, mv.progress.error.clone())
        }
        // The source's node restarted, took its VM back, and has forgotten the move.
        (Said::Unknown, _)
            if seen.source_vm.this().is_some_and(|vm| vm.ownership == Ownership::Here && vm.mv.is_none()) =>
        {
            let why = "the source's node restarted during the move and took the VM back";
            Next::End(Outcome::Failed, Some(why.into()))
        }
        _ => Next::Watch,
    }
}

/// Whether a host owns the VM by a right newer than `before`.
#[must_use]
pub fn is_owner_after(vm: &LocalVm, before: (Lineage, Generation)) -> bool {
    vm.ownership == Ownership::Here && (vm.lineage, vm.generation) > before
}

/// How the move stands: the source's view, or what was known before while it is silent, with what only the destination
/// knows filled in. The predicted end never moves towards the present.
#[must_use]
pub fn merge(before: &MoveProgress, seen: &Seen) -> MoveProgress {
    let mut now = match &seen.source_move {
        Said::This(mv) => mv.progress.clone(),
        Said::Unknown => before.clone(),
        Said::Silent(why) => MoveProgress { error: Some(why.clone()), ..before.clone() },
    };
    let told: Vec<&Trace> = [&seen.source_move, &seen.destination_move]
        .into_iter()
        .filter_map(|m| Some(&m.this()?.progress.trace))
        .collect();
    now.trace = Trace::merge(&before.trace, &told);
    if let Some(there) = seen.destination_move.this().map(|m| &m.progress) {
        now.resumed_unix_us = now.resumed_unix_us.or(there.resumed_unix_us);
        now.network_proved_ms = now.network_proved_ms.or(there.network_proved_ms);
        if seen.source_move.this().is_none() {
            // It waits for the source, or has heard of it since.
            match there.outcome {
                Outcome::WaitsForPeer => (now.outcome, now.error) = (there.outcome, there.error.clone()),
                _ => now.outcome = Outcome::Running,
            }
        }
        fill(&mut now, there);
    } else if matches!(seen.destination_move, Said::Silent(_)) {
        fill(&mut now, before);
    }
    // What was once seen stays seen, whoever has forgotten it.
    now.resumed_unix_us = now.resumed_unix_us.or(before.resumed_unix_us);
    now.network_proved_ms = now.network_proved_ms.or(before.network_proved_ms);
    now.predicted_end_unix_us = match (before.predicted_end_unix_us, now.predicted_end_unix_us) {
        (Some(then), Some(new)) => Some(then.max(new)),
        (_, new) => new,
    };
    // Whether it is over is for `next` to say.
    if now.outcome != Outcome::WaitsForPeer {
        now.outcome = Outcome::Running;
    }
    now
}

/// What the destination alone knows of blocks that follow the VM.
fn fill(now: &mut MoveProgress, there: &MoveProgress) {
    let Some(phase) = there.phases.iter().rfind(|phase| phase.name == PhaseName::Fill) else { return };
    now.phases.retain(|known| known.name != PhaseName::Fill);
    if let Some(last) = now.phases.last_mut() {
        last.ended_unix_us.get_or_insert(phase.started_unix_us);
    }
    now.phases.push(phase.clone());
    now.phase = PhaseName::Fill;
    now.disk = DiskProgress { held: now.disk.held, ..there.disk };
    // Both count what their link to the other carries; the source ends before.
    let (ours, theirs) = (now.bytes, there.bytes);
    now.bytes = MoveBytes {
        memory: ours.memory.max(theirs.memory),
        disk: ours.disk.max(theirs.disk),
        control: ours.control.max(theirs.control),
    };
    (now.rate, now.memory_rate, now.disk_rate) = (there.rate, there.memory_rate, there.disk_rate);
    now.predicted_end_unix_us = there.predicted_end_unix_us;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{local_move, local_vm, progress};
    use godwit_api::progress::{NoteKind, Phase, Teller};
    use godwit_units::Bytes;

    const BEFORE: (Lineage, Generation) = (Lineage(0), Generation(1));

    fn silent<T>() -> Said<T> {
        Said::Silent("cut".into())
    }

    fn seen() -> Seen {
        Seen { source_move: silent(), source_vm: silent(), destination_move: silent(), destination_vm: silent() }
    }

    #[test]
    fn nothing_follows_from_silence() {
        for step in [Step::Observe, Step::Finish] {
            assert_eq!(next(step, BEFORE, false, &seen()), Next::Watch);
        }
    }

    #[test]
    fn a_newer_generation_at_the_destination_outweighs_whatever_the_source_says() {
        for outcome in [Outcome::Running, Outcome::Failed, Outcome::Cancelled, Outcome::WaitsForPeer] {
            let seen = Seen {
                source_move: Said::This(local_move(outcome)),
                destination_vm: Said::This(local_vm(Ownership::Here, 2)),
                ..seen()
            };
            assert_eq!(next(Step::Observe, BEFORE, false, &seen), Next::Settle(Lineage(0), Generation(2)));
        }
    }

    #[test]
    fn the_same_generation_at_the_destination_proves_nothing() {
        for (ownership, generation) in [(Ownership::Here, 1), (Ownership::Elsewhere, 2), (Ownership::Pausing, 2)] {
            let seen = Seen { destination_vm: Said::This(local_vm(ownership, generation)), ..seen() };
            assert_eq!(next(Step::Observe, BEFORE, false, &seen), Next::Watch);
        }
    }

    #[test]
    fn a_source_that_says_completed_is_believed_only_with_the_destination() {
        let seen = Seen { source_move: Said::This(local_move(Outcome::Completed)), ..seen() };
        assert_eq!(next(Step::Observe, BEFORE, false, &seen), Next::Watch);
        assert_eq!(next(Step::Finish, BEFORE, false, &seen), Next::End(Outcome::Completed, None));
    }

    #[test]
    fn a_move_is_over_only_when_its_destination_has_proved_the_network_or_could_not() {
        let told = |there: Outcome| {
            let mut there = local_move(there);
            there.progress.error = Some("nobody answers".into());
            let source_move = Said::This(local_move(Outcome::Completed));
            next(Step::Finish, BEFORE, false, &Seen { source_move, destination_move: Said::This(there), ..seen() })
        };
        assert_eq!(told(Outcome::Running), Next::Watch);
        let unproved = Next::End(Outcome::NetworkUnproved, Some("nobody answers".into()));
        assert_eq!(told(Outcome::NetworkUnproved), unproved);
    }

    #[test]
    fn a_move_whose_disks_follow_is_open_until_they_have_even_while_its_destination_is_silent() {
        let ended = Said::This(local_move(Outcome::Completed));
        let silent = Seen { source_move: ended.clone(), ..seen() };
        assert_eq!(next(Step::Finish, BEFORE, true, &silent), Next::Watch);
        assert_eq!(next(Step::Finish, BEFORE, false, &silent), Next::End(Outcome::Completed, None));
        let forgotten = Seen { destination_move: Said::Unknown, ..silent };
        assert_eq!(next(Step::Finish, BEFORE, true, &forgotten), Next::End(Outcome::Completed, None));
        let mut there = local_move(Outcome::Running);
        there.progress.phase = PhaseName::Fill;
        let phase = |name, started_unix_us| Phase { name, started_unix_us, ended_unix_us: None };
        there.progress.phases = vec![phase(PhaseName::Release, 30), phase(PhaseName::Fill, 50)];
        there.progress.disk = DiskProgress { total: Bytes(9), copied: Bytes(4), ..DiskProgress::default() };
        there.progress.bytes.disk = Bytes(7);
        let mut here = local_move(Outcome::Completed);
        here.progress.phases = vec![phase(PhaseName::Release, 40)];
        here.progress.disk.held = Bytes(3);
        (here.progress.bytes.disk, here.progress.bytes.memory) = (Bytes(5), Bytes(6));
        let filling = Seen { source_move: Said::This(here), destination_move: Said::This(there), ..seen() };
        assert_eq!(next(Step::Finish, BEFORE, true, &filling), Next::Watch);
        // Twice, as it is watched; and once more, while it is silent.
        let silent = Seen { destination_move: self::silent(), ..filling.clone() };
        let merged = merge(&merge(&merge(&progress(Outcome::Running), &filling), &filling), &silent);
        let names: Vec<_> = merged.phases.iter().map(|p| (p.name, p.ended_unix_us)).collect();
        assert_eq!(names, [(PhaseName::Release, Some(50)), (PhaseName::Fill, None)]);
        assert_eq!((merged.disk.total, merged.disk.copied, merged.disk.held), (Bytes(9), Bytes(4), Bytes(3)));
        assert_eq!((merged.bytes.disk, merged.bytes.memory), (Bytes(7), Bytes(6)));
    }

    #[test]
    fn a_vanished_source_does_not_keep_a_move_open_that_its_destination_has_finished() {
        let seen = Seen {
            destination_move: Said::This(local_move(Outcome::Completed)),
            destination_vm: Said::This(local_vm(Ownership::Here, 2)),
            ..seen()
        };
        assert_eq!(next(Step::Finish, BEFORE, false, &seen), Next::End(Outcome::Completed, None));
    }

    #[test]
    fn a_claim_ends_the_move_on_either_side_while_the_other_is_silent_for_ever() {
        let claimed = LocalVm { lineage: Lineage(1), ..local_vm(Ownership::Here, 1) };
        let at_source = Seen { source_vm: Said::This(claimed.clone()), ..seen() };
        assert!(matches!(next(Step::Observe, BEFORE, false, &at_source), Next::End(Outcome::Failed, Some(_))));
        let mut there = local_move(Outcome::NetworkUnproved);
        there.progress.error = Some("claimed here".into());
        let at_destination =
            Seen { destination_vm: Said::This(claimed), destination_move: Said::This(there), ..seen() };
        assert_eq!(next(Step::Observe, BEFORE, false, &at_destination), Next::Settle(Lineage(1), Generation(1)));
        let said = Next::End(Outcome::NetworkUnproved, Some("claimed here".into()));
        assert_eq!(next(Step::Finish, BEFORE, false, &at_destination), said);
    }

    #[test]
    fn a_forgotten_move_has_failed_only_when_the_source_has_its_vm_back() {
        let forgot = Seen { source_move: Said::Unknown, ..seen() };
        assert_eq!(next(Step::Observe, BEFORE, false, &forgot), Next::Watch);
        let back = Seen { source_vm: Said::This(local_vm(Ownership::Here, 1)), ..forgot.clone() };
        assert!(matches!(next(Step::Observe, BEFORE, false, &back), Next::End(Outcome::Failed, Some(_))));
        let paused = Seen { source_vm: Said::This(local_vm(Ownership::WaitsForPeer, 1)), ..forgot };
        assert_eq!(next(Step::Observe, BEFORE, false, &paused), Next::Watch);
    }

    #[test]
    fn the_predicted_end_never_moves_towards_the_present() {
        let mut known = progress(Outcome::Running);
        known.predicted_end_unix_us = Some(1000);
        for (told, shown) in [(Some(900), Some(1000)), (Some(1100), Some(1100)), (None, None)] {
            let mut mv = local_move(Outcome::Running);
            mv.progress.predicted_end_unix_us = told;
            let merged = merge(&known, &Seen { source_move: Said::This(mv), ..seen() });
            assert_eq!(merged.predicted_end_unix_us, shown);
        }
    }

    #[test]
    fn what_only_the_destination_knows_is_filled_in_and_kept() {
        let mut there = local_move(Outcome::Running);
        there.progress.resumed_unix_us = Some(5);
        there.progress.network_proved_ms = Some(7.5);
        let with = Seen { destination_move: Said::This(there), ..seen() };
        let first = merge(&progress(Outcome::Running), &with);
        assert_eq!((first.resumed_unix_us, first.network_proved_ms), (Some(5), Some(7.5)));
        let later = merge(&first, &seen());
        assert_eq!((later.resumed_unix_us, later.network_proved_ms), (Some(5), Some(7.5)));
        assert_eq!(later.error.as_deref(), Some("cut"));
    }

    #[test]
    fn the_trace_has_what_both_nodes_and_the_controller_tell_in_order_of_time() {
        let mut known = progress(Outcome::Running);
        known.trace.note(2, Teller::Controller, NoteKind::Retry, "b");
        let (mut from, mut to) = (local_move(Outcome::Running), local_move(Outcome::Running));
        from.progress.trace.note(3, Teller::Source, NoteKind::Decision, "c");
        to.progress.trace.note(1, Teller::Destination, NoteKind::HandOff, "a");
        let both = Seen { source_move: Said::This(from), destination_move: Said::This(to), ..seen() };
        let texts = |p: &MoveProgress| p.trace.notes.iter().map(|n| n.text.clone()).collect::<String>();
        let first = merge(&known, &both);
        assert_eq!((texts(&first), texts(&merge(&first, &seen())).as_str()), ("abc".into(), "abc"));
    }
}

#[cfg(test)]
#[path = "saga_tests.rs"]
mod by_seed;
