//! Several VMs in one order: which goes first, and when the next may begin.
//!
//! Moves over one link that go at the same time share it, and each one's last rounds then have a part of it, while its guest dirties as much as
//! ever: every pause is longer, some rounds never get shorter, and no move ends sooner. So they go one after another
//! ([`may_begin`]): the next begins when the guest before it runs at its destination. What follows a guest, blocks of its disk and the proof of its
//! network, goes on beside the next move. The one that is foretold to be over soonest goes first ([`in_order`]), so that at any moment as many VMs as
//! possible are over; where predictions do not tell them apart, or there are none, the smallest memory does.
//!
//! What is foretold of each begins where that of the one before it ends; while it waits, its end is moved on with that one's. Blocks that follow a
//! guest beside the next move are not counted: they go when nothing more urgent does.
//!
//! Each of them is a move as any other, with a number, and is shown, followed and cancelled by it; its record says behind which one it waits,
//! so that a controller that is restarted goes on in that order. One that fails or is cancelled holds nobody up.
//!
//! # What can go wrong
//!
//! *One stands still*: its link is down, or its peer is gone. Then those behind it wait too: they would go over the same link. Cancel it, and
//! the next begins. *The destination has room for some and not for all*: each is checked when it is ordered, by itself, and again by the
//! destination when its turn comes; the ones that find no room fail then, and their VMs stay where they are.

use crate::moves::{self, Plan};
use crate::predictions;
use crate::record::{MoveRecord, Step};
use crate::rights::Caller;
use crate::state::{Controller, invalid};
use axum::Json;
use axum::extract::{Extension, State};
use axum::response::{IntoResponse, Response};
use futures_util::{StreamExt, TryStreamExt, stream};
use godwit_api::progress::{MoveProgress, PhaseName};
use godwit_api::public::{DryRun, Move, MoveTogether, StartMove};
use godwit_api::{ApiError, Problem};
use godwit_units::{Bytes, MoveId};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

/// VMs in one order, at most: each is checked at its source and at its destination before the answer.
const MOST: usize = 64;
/// VMs of an order that are checked at a time.
const AT_ONCE: usize = 8;
/// Times that differ by less are foretold alike.
const ALIKE: f64 = 1.1;
/// Between two looks at the move that is waited for.
const LOOK: Duration = Duration::from_millis(250);

/// Places in `vms`, each with its memory and the seconds that were foretold of its own move, in the order in which they are to go: the shortest
/// first, and what never ends last. Of those that are foretold alike the smallest memory goes first, and of equal ones as they were named. One of
/// which nothing was foretold is thought to take as long, for its memory, as the others that end do on average.
fn in_order(vms: &[(Bytes, Option<f64>)]) -> Vec<usize> {
    let told = vms.iter().filter_map(|(memory, seconds)| Some((memory.0 as f64, seconds.filter(|s| s.is_finite())?)));
    let (memory, seconds) = told.fold((0.0, 0.0), |(m, s), (memory, seconds)| (m + memory, s + seconds));
    let each = if memory > 0.0 && seconds > 0.0 { seconds / memory } else { 1.0 };
    let takes = |n: usize| vms[n].1.unwrap_or(vms[n].0.0 as f64 * each);
    let mut order: Vec<usize> = (0..vms.len()).collect();
    order.sort_by(|a, b| takes(*a).total_cmp(&takes(*b)));
    let mut left = order.as_mut_slice();
    while let Some(first) = left.first() {
        let most = takes(*first) * ALIKE;
        let alike = left.partition_point(|n| takes(*n) <= most).max(1);
        let (these, others) = std::mem::take(&mut left).split_at_mut(alike);
        these.sort_by_key(|n| (vms[*n].0, *n));
        left = others;
    }
    order
}

/// Whether the next may begin: the one before has ended, or its guest runs where it was to, and its memory needs the link no more.
fn may_begin(before: &MoveProgress) -> bool {
    !before.outcome.is_open() || (before.resumed_unix_us.is_some() && before.phase != PhaseName::Drain)
}

/// Waits until it is the turn of a move that waits behind another, or until somebody has cancelled it.
pub(crate) async fn turn(c: &Controller, record: &MoveRecord) {
    loop {
        if moves::called_off(c, record) {
            return;
        }
        match waited_for(record, |id| c.move_record(id)) {
            Ok(Some(before)) => {
                let predicted_end_unix_us = predictions::end_behind(record, &before, moves::unix_us());
                c.set_live(record.id(), Some(MoveProgress { predicted_end_unix_us, ..record.progress.clone() }));
            }
            Ok(None) => return,
            Err(error) => tracing::error!(%error, "cannot see the move that is waited for"),
        }
        tokio::time::sleep(LOOK).await;
    }
}

/// The last move before this one that it has to wait for. One that was cancelled while it waited itself was behind another; nor is one waited
/// for that is to be cancelled, and whose host may be lost.
fn waited_for(
    record: &MoveRecord,
    find: impl Fn(MoveId) -> Result<MoveRecord, ApiError>,
) -> Result<Option<MoveRecord>, ApiError> {
    let mut before = record.after;
    while let Some(id) = before {
        match find(id) {
            Ok(found) if found.step != Step::Ended && !found.cancel && !may_begin(&found.progress) => {
                return Ok(Some(found));
            }
            Ok(found) => before = found.after,
            // Nobody knows of it: nothing to wait for.
            Err(error) if error.problem == Problem::NotFound => return Ok(None),
            Err(error) => return Err(error),
        }
    }
    Ok(None)
}

/// `POST /v1/moves/together`.
pub async fn start(
    State(c): State<Arc<Controller>>,
    Extension(who): Extension<Caller>,
    Json(order): Json<MoveTogether>,
) -> Result<Response, ApiError> {
    let vms: BTreeSet<_> = order.vms.iter().collect();
    if order.vms.is_empty() || order.vms.len() > MOST || vms.len() != order.vms.len() {
        return Err(invalid(format!("vms: 1 to {MOST} of them, each once")));
    }
    let one = |vm: &godwit_api::Name| StartMove {
        vm: vm.clone(),
        to: order.to.clone(),
        disk: order.disk,
        limit: order.limit,
        policy: order.policy,
        throttle: order.throttle,
        memory_postcopy: order.memory_postcopy,
        vcpus: None,
        keep_checkpoint: order.keep_checkpoint,
        place: vec![],
        dry_run: order.dry_run,
    };
    // A host that does not answer is waited for by some at a time.
    let mut checks = vec![];
    for vm in &order.vms {
        let (order, c, who) = (one(vm), &c, &who);
        checks.push(async move { moves::check(c, who, &order).await.map(|plan| (order, plan)) });
    }
    let mut plans: Vec<(StartMove, Plan)> = stream::iter(checks).buffered(AT_ONCE).try_collect().await?;
    // Nothing is begun unless everything can be: now, and when all are written down.
    for (_, plan) in plans.iter().filter(|_| !order.dry_run) {
        moves::admitted(plan)?;
    }
    // Each by itself at first; then in their order.
    let own = plans.iter().map(|(_, plan)| plan.ahead.own_s());
    let known: Vec<_> = plans.iter().map(|(_, plan)| plan.vm.definition.spec.memory).zip(own).collect();
    let order_of = in_order(&known);
    if order.dry_run {
        let dry = |n: &usize| {
            let (order, Plan { vm, to, blockers, .. }) = &plans[*n];
            DryRun { vm: order.vm.clone(), from: vm.host.clone(), to: to.name.clone(), blockers: blockers.clone() }
        };
        return Ok(Json(order_of.iter().map(dry).collect::<Vec<_>>()).into_response());
    }
    let mut foretold: Vec<_> = order_of.iter().map(|n| plans[*n].1.ahead.told.take()).collect();
    predictions::one_after_another(&mut foretold);
    let ordered = order_of.into_iter().zip(foretold).map(|(n, prediction)| (&plans[n].0, &plans[n].1, prediction));
    let records = moves::store(&c, ordered.collect())?;
    let ids: Vec<_> = records.iter().map(MoveRecord::id).collect();
    for record in records {
        moves::set_off(&c, record);
    }
    let moves: Result<Vec<Move>, ApiError> = ids.into_iter().map(|id| Ok(c.move_record(id)?.public())).collect();
    Ok(Json(moves?).into_response())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::ended_move;
    use godwit_api::progress::Outcome;

    #[test]
    fn the_one_that_is_foretold_to_be_over_soonest_goes_first_and_equal_ones_as_they_were_named() {
        let untold = [4, 1, 2, 1, 4].map(|memory| (Bytes(memory), None));
        assert_eq!(in_order(&untold), [1, 3, 2, 0, 4]);
        // A large one that writes little, or whose disk is there already, is over before a small one.
        let of = |(memory, seconds)| (Bytes(memory), Some(seconds));
        assert_eq!(in_order(&[(8, 3.0), (1, 9.0), (2, 4.0), (4, 2.0)].map(of)), [3, 0, 2, 1]);
        // Some hundredths of the time tell nothing.
        assert_eq!(in_order(&[(4, 1.0), (2, 1.09), (2, 1.05), (1, 1.2)].map(of)), [1, 2, 0, 3]);
        // A second for each byte of memory: 2 s are thought of the one of which nobody knows.
        let some = [(4, Some(3.0)), (2, None), (1, Some(2.5)), (5, Some(4.5))].map(|(m, s)| (Bytes(m), s));
        assert_eq!(in_order(&some), [1, 2, 0, 3]);
        assert_eq!(in_order(&[(Bytes(0), Some(0.0)), (Bytes(0), None)]), [0, 1]);
        // What never ends holds nobody up, and says nothing of one of which nobody knows.
        let some = [(1, Some(f64::INFINITY)), (2, None), (4, Some(5.0)), (0, Some(f64::INFINITY))];
        assert_eq!(in_order(&some.map(|(memory, seconds)| (Bytes(memory), seconds))), [1, 2, 3, 0]);
    }

    #[test]
    fn one_that_is_cancelled_while_it_waits_lets_nobody_past_the_one_that_it_waited_for() {
        let of = |id: u64, step, outcome| {
            let progress = MoveProgress { outcome, ..moves::fresh_progress(1, None) };
            let after = Some(MoveId(id - 1)).filter(|id| id.0 > 0);
            MoveRecord { step, after, ..ended_move(id, (id, "web"), ("a", "b"), &progress) }
        };
        let begun = of(1, Step::Begin, Outcome::Running);
        let cancelled = of(2, Step::Ended, Outcome::Cancelled);
        let third = of(3, Step::Begin, Outcome::Running);
        let behind = |first: &MoveRecord| {
            let known = [first.clone(), cancelled.clone()];
            let find = |id| {
                let found = known.iter().find(|record| record.id() == id).cloned();
                found.ok_or_else(|| ApiError::new(Problem::NotFound, "it is gone"))
            };
            waited_for(&third, find).unwrap().map(|record| record.id())
        };
        assert_eq!(behind(&begun), Some(MoveId(1)));
        assert_eq!(behind(&of(1, Step::Ended, Outcome::Completed)), None);
        assert_eq!(behind(&of(7, Step::Begin, Outcome::Running)), None, "nobody knows of the first any more");
    }

    #[test]
    fn one_that_is_to_be_cancelled_lets_the_next_begin_though_its_host_never_answers() {
        let of = |id: u64, cancel| {
            let progress = MoveProgress { outcome: Outcome::Running, ..moves::fresh_progress(1, None) };
            let after = Some(MoveId(id - 1)).filter(|id| id.0 > 0);
            let ended = ended_move(id, (id, "web"), ("a", "b"), &progress);
            MoveRecord { step: Step::Observe, cancel, after, ..ended }
        };
        let behind = |known: &[MoveRecord]| {
            let find = |id| {
                let found = known.iter().find(|record| record.id() == id).cloned();
                found.ok_or_else(|| ApiError::new(Problem::NotFound, "it is gone"))
            };
            waited_for(&of(3, false), find).unwrap().map(|record| record.id())
        };
        assert_eq!(behind(&[of(1, false), of(2, true)]), Some(MoveId(1)), "it was behind another itself");
        assert_eq!(behind(&[of(1, true), of(2, true)]), None);
        assert_eq!(behind(&[of(1, true), of(2, false)]), Some(MoveId(2)));
    }

    #[test]
    fn the_next_begins_when_the_guest_before_it_runs_or_never_will_and_not_while_it_stands_still() {
        let fresh = || moves::fresh_progress(1, None);
        assert!(!may_begin(&fresh()));
        let stopped = MoveProgress { stopped_unix_us: Some(5), ..fresh() };
        assert!(!may_begin(&stopped), "its last round has the link to itself");
        let waits = MoveProgress { outcome: Outcome::WaitsForPeer, ..stopped.clone() };
        assert!(!may_begin(&waits), "nobody knows yet who owns it");
        let runs = MoveProgress { resumed_unix_us: Some(6), ..stopped.clone() };
        assert!(may_begin(&runs));
        assert!(!may_begin(&MoveProgress { phase: PhaseName::Drain, ..runs }), "it waits for its pages");
        for over in [Outcome::Completed, Outcome::Failed, Outcome::Cancelled, Outcome::NetworkUnproved] {
            assert!(may_begin(&MoveProgress { outcome: over, ..stopped.clone() }), "{over:?}");
        }
    }
}
