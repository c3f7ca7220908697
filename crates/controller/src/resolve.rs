//! What people do about a move that did not end as it should: order it again, or take the VM although a host is lost.
//!
//! A move past its seal whose destination is silent waits for ever, and rightly: only the two nodes together know whose the VM
//! is. When one of them is gone for good, somebody who has seen to it that it stays gone may claim the VM for the other one. That
//! begins a new lineage. What can go wrong is that the lost host was not lost: so it must not answer, what was done to it is
//! asked for and kept, and when it does come back it is paused, and nothing of it is thrown away.

use crate::moves;
use crate::record::{Claim, MoveRecord, Step, VmRecord};
use crate::rights::Caller;
use crate::state::{Controller, HostRecord, conflict, invalid, missing};
use crate::store::{Change, Kind};
use axum::Json;
use axum::extract::{Extension, Path, State};
use axum::response::Response;
use godwit_api::host::{ClaimVm, OutrankVm, Ownership};
use godwit_api::public::{Move, ResolveMove, StartMove};
use godwit_api::{ApiError, Name, Problem};
use godwit_units::{Lineage, MoveId, VmId};
use std::sync::Arc;

type Shared = State<Arc<Controller>>;

/// Less than this tells nobody what was done to a host, in characters.
const SHORTEST_EVIDENCE: usize = 8;

/// That something is said of how the host that is lost is kept down; else `lacks` says what is missing.
///
/// # Errors
/// [`Problem::Invalid`].
pub(crate) fn check_evidence(fenced: &str, lacks: &str) -> Result<(), ApiError> {
    if fenced.trim().chars().count() >= SHORTEST_EVIDENCE {
        return Ok(());
    }
    Err(invalid(lacks).remedy("say what was done and by whom, such as `power cut at the PDU, by ann`"))
}

/// Orders a move again that has ended without bringing the VM over. It is another move; what the first one has brought is there.
pub async fn retry(State(c): Shared, who: Extension<Caller>, Path(id): Path<u64>) -> Result<Response, ApiError> {
    let record = c.move_record(MoveId(id))?;
    if record.step != Step::Ended {
        return Err(conflict(format!("move {id} goes on")).remedy("wait for its end, or cancel it"));
    }
    if record.progress.outcome.has_arrived() {
        return Err(conflict(format!("move {id} has brought `{}` to `{}`", record.vm, record.order.to.name))
            .remedy("order another move"));
    }
    if c.vm_record(&record.vm)?.definition.id != record.order.vm {
        return Err(conflict(format!("move {id} was another VM's, which was called `{}`, too", record.vm))
            .remedy(format!("order a move of this one: `godwit move {} --to {}`", record.vm, record.order.to.name)));
    }
    let again = StartMove {
        vm: record.vm,
        to: record.order.to.name,
        disk: record.order.disk,
        limit: record.order.limit,
        policy: record.order.policy,
        throttle: record.order.throttle,
        memory_postcopy: record.order.memory_postcopy,
        vcpus: record.order.vcpus,
        keep_checkpoint: record.order.keep_checkpoint,
        place: record.place,
        dry_run: false,
    };
    moves::start(State(c), who, Json(again)).await
}

/// Which of a move's two hosts `place` means, and the other one.
fn sides(c: &Controller, record: &MoveRecord, place: &Name) -> Result<(HostRecord, HostRecord), ApiError> {
    let (from, to) = (c.host(&record.from)?, c.host(&record.order.to.name)?);
    match (place == &from.name || place == &from.site, place == &to.name || place == &to.site) {
        (true, false) => Ok((from, to)),
        (false, true) => Ok((to, from)),
        (true, true) => Err(invalid(format!("`{place}` has both hosts of the move")).remedy("name the host")),
        (false, false) => Err(invalid(format!("`{place}` has no part in move {}", record.id().0))
            .remedy(format!("claim it for `{}` or for `{}`", from.name, to.name))),
    }
}

pub async fn resolve(
    State(c): Shared,
    Path(id): Path<u64>,
    Json(how): Json<ResolveMove>,
) -> Result<Json<Move>, ApiError> {
    check_evidence(&how.fenced, "a claim needs to know how the other host is kept from running the VM")?;
    let record = c.move_record(MoveId(id))?;
    if record.step == Step::Ended {
        return Err(
            conflict(format!("move {id} has ended already")).remedy(format!("`godwit move show {id}` tells how"))
        );
    }
    let (here, lost) = sides(&c, &record, &how.claim)?;
    if c.node(&lost).facts().await.is_ok() {
        return Err(conflict(format!("`{}` answers, so it is not lost", lost.name))
            .remedy("wait: the two nodes end the move by themselves; or cancel it; or fence that host first"));
    }
    let vm: VmRecord = c.store.read(Kind::Vm, record.order.vm.0)?.ok_or_else(|| missing("VM", &record.vm))?;
    let _in_hand = c.take_alone(record.order.vm, &record.vm)?;
    let mut newest = vm.lineage.max(record.owner.0);
    for earlier in [&vm.promoted, &record.claim] {
        newest = newest.max(crate::promote::newest(newest, earlier.as_ref(), &here.name));
    }
    let claim = ClaimVm { fenced: how.fenced.clone(), peer_did_not_run: how.peer_did_not_run, newest };
    tracing::warn!(id, vm = %record.vm, at = %here.name, lost = %lost.name, fenced = how.fenced, "an operator claims a VM");
    {
        // Before it is done: who claimed, and why, is known whatever happens now.
        let _deciding = c.decide();
        let now: Option<MoveRecord> = c.store.read(Kind::Move, id)?;
        let mut now = now.ok_or_else(|| missing("move", id))?;
        if now.step == Step::Ended {
            return Err(conflict(format!("move {id} has ended by now")).remedy("look at it again"));
        }
        if now.claim != record.claim {
            return Err(conflict(format!("move {id} was claimed by somebody else just now")).remedy("look at it again"));
        }
        now.claim = Some(Claim { host: here.name.clone(), lost: lost.name.clone(), fenced: how.fenced, newest });
        c.store.commit(&[Change::put(Kind::Move, id, &now)])?;
    }
    // Its answer may be lost, and the claim made: then the saga sees the new lineage there.
    c.node(&here).claim(record.order.vm, &claim).await?;
    Ok(Json(c.move_record(MoveId(id))?.public()))
}

/// A host says that it owns a VM by an older lineage than a claim began: it pauses, and keeps what it has.
pub async fn outrank(c: &Controller, vm: VmId, host: &Name, lineage: Lineage) {
    let result = match c.node_of(host) {
        Ok(node) => node.outrank(vm, OutrankVm { lineage }).await,
        Err(error) => Err(error),
    };
    match result {
        Ok(()) => {
            tracing::error!(vm = vm.0, %host, "it was claimed elsewhere, and is paused there now; `godwit orphan ls` shows it")
        }
        Err(error) if error.problem == Problem::Conflict => tracing::warn!(vm = vm.0, %host, %error, "not paused"),
        Err(error) => {
            tracing::error!(vm = vm.0, %host, %error, "it was claimed elsewhere, and cannot be paused there yet")
        }
    }
}

/// Whether what a host says of a VM contradicts a claim: it may be running there.
#[must_use]
pub fn contradicts(ownership: Ownership, theirs: Lineage, known: Lineage) -> bool {
    theirs < known && ownership != Ownership::Elsewhere
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_who_may_run_a_vm_by_an_older_lineage_contradicts_a_claim() {
        for ownership in [Ownership::Here, Ownership::Pausing, Ownership::WaitsForPeer] {
            assert!(contradicts(ownership, Lineage(0), Lineage(1)));
            assert!(!contradicts(ownership, Lineage(1), Lineage(1)));
        }
        assert!(!contradicts(Ownership::Elsewhere, Lineage(0), Lineage(1)));
    }
}
