//! Moves: what is checked before one, how its saga is driven, and how it is shown.
//!
//! The nodes do everything; the controller orders a move at its source, watches, and writes down how it ended. It may
//! die at any time: the record says where the saga was, and the next controller goes on from there.

use crate::failpoint::{Point, reach};
use crate::predictions::{Ahead, Watched};
use crate::record::{MoveRecord, Step, VmRecord};
use crate::rights::Caller;
use crate::saga::{Next, Said, Seen, is_owner_after, merge, next};
use crate::state::{Controller, HostRecord, conflict, invalid, missing};
use crate::store::{Change, Counter, Kind};
use crate::vms::{learn_vcpus, open_move, settle};
use axum::Json;
use axum::extract::{Extension, Path, Query, State};
use axum::response::{IntoResponse, Response};
use godwit_api::host::{
    Blocker, CheckVm, DiskStrategy, HostFacts, LocalVm, MoveOrder, Ownership, PeerHost, RunState, SetLimit,
};
use godwit_api::predict::Foretold;
use godwit_api::progress::{DiskProgress, MoveBytes, MoveProgress, NoteKind, Outcome, Phase, PhaseName, Teller};
use godwit_api::public::{DryRun, MOST_LISTED, Move, StartMove, WantedMoves};
use godwit_api::vm::Placement;
use godwit_api::{ApiError, Name, Problem};
use godwit_units::{BitRate, Bytes, MoveId, Policy, VmId};
use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep, timeout};
use tracing::Instrument;

type Answer<T> = Result<Json<T>, ApiError>;
type Shared = State<Arc<Controller>>;

/// How often the nodes are asked.
const POLL: Duration = Duration::from_millis(250);

/// How long to wait before an order is sent, or something is stored, again.
const RETRY: Duration = Duration::from_secs(1);

/// How long whoever orders a move waits for the source's node to accept it. After that the order goes on being tried,
/// and the answer is the move as it stands.
const ACCEPTED_WITHIN: Duration = Duration::from_secs(20);

/// A certificate has to last so much longer for a move to begin: one that ends on the way would strand it.
const CERTIFICATE_LEFT: Duration = Duration::from_secs(3600);

/// A limit below this would not even carry a link's own keep-alive.
const LEAST_LIMIT: BitRate = BitRate(100_000);
/// Moves that have ended and are kept, the newest.
const MOST_KEPT: usize = 2000;
/// It is looked whether there are more after every so many moves.
const FORGET_EVERY: u64 = 50;

pub(crate) fn unix_us() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| u64::try_from(d.as_micros()).unwrap_or(u64::MAX))
}

/// A move of which nothing has been done.
#[must_use]
pub fn fresh_progress(now_unix_us: u64, limit: Option<BitRate>) -> MoveProgress {
    MoveProgress {
        outcome: Outcome::Running,
        phase: PhaseName::Reserve,
        phases: vec![Phase { name: PhaseName::Reserve, started_unix_us: now_unix_us, ended_unix_us: None }],
        bytes: MoveBytes::default(),
        raw: Bytes(0),
        zero_pages: 0,
        held_memory: Bytes(0),
        neighbour_memory: Bytes(0),
        rounds: vec![],
        disk: DiskProgress::default(),
        memory_remaining: Bytes(0),
        dirty_rate: Bytes(0),
        rate: BitRate(0),
        predicted_end_unix_us: None,
        limit,
        stopped_unix_us: None,
        resumed_unix_us: None,
        downtime_ms: None,
        network_proved_ms: None,
        error: None,
        link_down_s: None,
        predicted_downtime_ms: None,
        memory_rate: BitRate(0),
        disk_rate: BitRate(0),
        trace: Default::default(),
    }
}

fn blocker(host: &Name, kind: &str, message: impl Into<String>, remedy: impl Into<String>) -> Blocker {
    Blocker { host: host.clone(), kind: kind.into(), message: message.into(), remedy: remedy.into() }
}

fn unreachable(host: &Name, error: &ApiError) -> Blocker {
    blocker(host, "link", &error.message, error.remedy.as_deref().unwrap_or("see that its node runs"))
}

fn certificate(facts: &HostFacts) -> Option<Blocker> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let left = facts.certificate_expires_unix_s.saturating_sub(now);
    // One that is renewed by itself, also during a move, is in the way only when that has failed.
    let needed = if facts.certificate_renews { 0 } else { CERTIFICATE_LEFT.as_secs() };
    (left < needed || left == 0).then(|| {
        let message = format!("the certificate of `{}` ends in {} min", facts.name, left / 60);
        let remedy = format!(
            "see in its log why it is not renewed; or `godwit host token {}`, `godwit enroll`, and restart the node",
            facts.name
        );
        blocker(&facts.name, "certificate", message, remedy)
    })
}

/// What the source and the VM itself have against a move. The destination does not matter to this.
async fn check_source(
    c: &Controller,
    vm: &VmRecord,
    vcpus: Option<u32>,
) -> Result<(Vec<Blocker>, Option<LocalVm>), ApiError> {
    let (name, host) = (&vm.definition.name, &vm.host);
    let mut blockers = vec![];
    let max = vm.definition.spec.max_vcpus.max(vm.definition.spec.vcpus);
    if let Some(wanted) = vcpus
        && !(vm.definition.spec.vcpus..=max).contains(&wanted)
    {
        let message =
            format!("`{name}` cannot have {wanted} CPUs: it has {} and room for {max}", vm.definition.spec.vcpus);
        blockers.push(blocker(host, "vm", message, "create it with more max_vcpus"));
    }
    if let Some(mv) = open_move(c, vm.definition.id)?.filter(|mv| !is_filling(c, mv)) {
        let message = format!("`{name}` is being moved already (move {})", mv.id().0);
        blockers.push(blocker(host, "vm", message, format!("wait for its end, or `godwit move {name} --cancel`")));
    }
    let node = c.node_of(host)?;
    let (facts, local, departure) =
        tokio::join!(node.facts(), node.vm(vm.definition.id), node.departure(vm.definition.id));
    // Where it cannot be asked, the answers below say so.
    blockers.extend(departure.into_iter().flat_map(|report| report.blockers));
    match facts {
        Ok(facts) => blockers.extend(certificate(&facts)),
        Err(error) => blockers.push(unreachable(host, &error)),
    }
    match &local {
        Ok(local) if local.ownership != Ownership::Here => {
            let message = format!("`{host}` does not own `{name}` now (it says: {:?})", local.ownership);
            blockers.push(blocker(host, "vm", message, format!("see `godwit vm show {name}`, and wait for its owner")));
        }
        Ok(local) if local.run != RunState::Running => {
            blockers.push(blocker(host, "vm", format!("`{name}` does not run"), format!("`godwit vm start {name}`")));
        }
        // Once is enough.
        Err(error) if error.problem == Problem::Unreachable => {}
        Err(error) => blockers.push(unreachable(host, error)),
        Ok(_) => {}
    }
    Ok((blockers, local.ok()))
}

/// What a destination has against a move, and what is foretold of it where that is nothing. `known`: its facts, where it has been asked for them; then
/// both are found out at the same time. `guest`: what its host and the hosts before say of it, where it may go.
async fn check_destination(
    c: &Controller,
    (vm, order): (&VmRecord, &StartMove),
    to: &HostRecord,
    known: Option<Result<HostFacts, ApiError>>,
    check: &CheckVm,
    guest: Option<(&LocalVm, Option<&Watched>)>,
) -> (Vec<Blocker>, Option<(HostFacts, Ahead)>) {
    if to.name == vm.host {
        let message = format!("`{}` is on `{}` already", vm.definition.name, to.name);
        return (vec![blocker(&to.name, "vm", message, "name another host")], None);
    }
    let node = c.node(to);
    let foretell = async |facts: &HostFacts| match guest {
        Some(guest) => crate::predictions::before(c, vm, (to, facts), guest, order).await,
        None => Ahead::default(),
    };
    let (facts, report, ahead) = match known {
        Some(Ok(facts)) => {
            let (report, ahead) = tokio::join!(node.check(check), foretell(&facts));
            (Ok(facts), report, Some(ahead))
        }
        Some(Err(error)) => return (vec![unreachable(&to.name, &error)], None),
        None => {
            let (facts, report) = tokio::join!(node.facts(), node.check(check));
            (facts, report, None)
        }
    };
    let facts = match facts {
        Ok(facts) => facts,
        Err(error) => return (vec![unreachable(&to.name, &error)], None),
    };
    let mut blockers: Vec<Blocker> = certificate(&facts).into_iter().collect();
    match report {
        Ok(report) => blockers.extend(report.blockers),
        Err(error) => blockers.push(unreachable(&to.name, &error)),
    }
    let ahead = match ahead {
        Some(ahead) => ahead,
        None if blockers.is_empty() => foretell(&facts).await,
        None => Ahead::default(),
    };
    (blockers, Some((facts, ahead)))
}

/// Where a move would go, and what is in its way.
pub(crate) struct Plan {
    pub(crate) vm: VmRecord,
    pub(crate) to: HostRecord,
    pub(crate) blockers: Vec<Blocker>,
    facts: Option<HostFacts>,
    local: Option<LocalVm>,
    /// What is foretold of it where nothing is in its way.
    pub(crate) ahead: Ahead,
    /// When the order came: what is checked and foretold before the move begins is a part of what its user waits for.
    came_unix_us: u64,
}

/// Checks everything that can be checked, and foretells what will be. Whoever ordered a move waits for each round trip: what does not depend on an
/// answer is asked before it comes. Of a site's hosts the first without blockers is taken; if there is none, the
/// blockers of all of them are listed.
async fn plan(c: &Controller, order: &StartMove) -> Result<Plan, ApiError> {
    let came_unix_us = unix_us();
    let vm = c.vm_record(&order.vm)?;
    let candidates: Vec<HostRecord> = match c.store.read(Kind::Host, &order.to)? {
        Some(host) => vec![host],
        None if c.store.get(Kind::Site, order.to.as_str())?.is_none() => {
            return Err(missing("host", &order.to).remedy("name a host or a site: `godwit host ls`, `godwit site ls`"));
        }
        None => {
            let mut hosts: Vec<HostRecord> = c.hosts()?.into_iter().filter(|h| h.site == order.to).collect();
            // Where it is already comes last: only if there is no other does it make the message.
            hosts.sort_by_key(|h| h.name == vm.host);
            hosts
        }
    };
    if candidates.is_empty() {
        return Err(conflict(format!("site `{}` has no host", order.to))
            .remedy(format!("`godwit host add NAME --site {} --api ADDR`", order.to)));
    }
    let first = candidates[0].clone();
    let asking = async {
        let is_other = first.name != vm.host;
        if is_other { Some(c.node(&first).facts().await) } else { None }
    };
    let watched = crate::predictions::watched(c, &vm);
    let (source, mut known, watched) = tokio::join!(check_source(c, &vm, order.vcpus), asking, watched);
    let (mut blockers, local) = source?;
    if order.disk == DiskStrategy::Shared {
        let own = vm.definition.spec.disks.iter().filter(|disk| disk.shared().is_none());
        blockers.extend(own.map(|disk| {
            let message = format!("`{}` does not lie on shared storage", disk.volume);
            blocker(&vm.host, "disk", message, "copy it: `--disk mirror` or `--disk postcopy`")
        }));
    }
    let check = to_check(&vm, local.as_ref(), order.vcpus, &order.place);
    for to in candidates {
        if to.name == vm.host && first.name != to.name {
            continue;
        }
        // A move that its source does not let go is foretold nothing.
        let may_go = local.as_ref().filter(|_| blockers.iter().all(|b| b.host != vm.host));
        let guest = may_go.map(|local| (local, watched.as_ref()));
        let (found, seen) = check_destination(c, (&vm, order), &to, known.take(), &check, guest).await;
        if found.is_empty() {
            // What other candidates had does not matter now; what the source has does.
            blockers.retain(|b| b.host == vm.host);
            let (facts, ahead) = seen.map_or((None, Ahead::default()), |(facts, ahead)| (Some(facts), ahead));
            return Ok(Plan { vm, to, blockers, facts, local, ahead, came_unix_us });
        }
        blockers.extend(found);
    }
    let ahead = Ahead::default();
    Ok(Plan { vm, to: first, blockers, facts: None, local, ahead, came_unix_us })
}

fn blocked(plan: &Plan) -> ApiError {
    let list: Vec<String> = plan.blockers.iter().map(|b| format!("{}: {} ({})", b.host, b.message, b.remedy)).collect();
    ApiError::new(Problem::Blocked, format!("`{}` cannot be moved: {}", plan.vm.definition.name, list.join("; ")))
        .remedy("`--dry-run` lists this again without moving")
}

/// Where what is not proven yet is allowed, by names with commas between.
const EXPERIMENTAL: &str = "GODWIT_EXPERIMENTAL";
/// Memory that follows its guest: where a node dies after QEMU's last page and before all of it has arrived, what was under way is lost.
const MEMORY_POSTCOPY: &str = "memory-postcopy";

/// Refuses what is not proven yet, unless this controller was started with it.
fn allowed(what: &str) -> Result<(), ApiError> {
    if std::env::var(EXPERIMENTAL).is_ok_and(|all| all.split(',').any(|one| one == what)) {
        return Ok(());
    }
    Err(ApiError::new(Problem::Forbidden, format!("`{what}` is an experiment, and may lose a guest's memory"))
        .remedy(format!("move without it; or start the controller with {EXPERIMENTAL}={what}")))
}

/// Refuses what has nothing to do by the order's policy.
fn is_of_use(order: &StartMove) -> Result<(), ApiError> {
    let named = [("throttle", order.throttle.is_some()), ("memory_postcopy", order.memory_postcopy.is_some())];
    match named.into_iter().find(|(_, is_wanted)| *is_wanted) {
        Some((what, _)) if order.policy == Policy::LeastBytes => {
            let why = format!(
                "{what}: by least-bytes the guest is stopped after the first round, before it is known whether it writes faster than the link \
                 carries"
            );
            Err(invalid(why).remedy(format!("order it anew with another policy, or without {what}")))
        }
        _ => Ok(()),
    }
}

/// Checks an order, and whether who gives it may.
pub(crate) async fn check(c: &Controller, who: &Caller, order: &StartMove) -> Result<Plan, ApiError> {
    is_of_use(order)?;
    if order.memory_postcopy.is_some() && order.keep_checkpoint {
        let both = "memory_postcopy and keep_checkpoint: what is kept is what was sent before the guest went, which is not all of a guest whose \
                    memory follows it";
        return Err(invalid(both).remedy("order one of them"));
    }
    if order.memory_postcopy.is_some() {
        allowed(MEMORY_POSTCOPY)?;
    }
    who.find(c, &order.vm)?;
    crate::placing::check(who, &c.vm_record(&order.vm)?.definition, &order.place)?;
    if order.throttle.is_some_and(|percent| !(1..=99).contains(&percent)) {
        return Err(invalid("throttle: from 1 to 99 percent"));
    }
    if order.limit.is_some_and(|limit| limit < LEAST_LIMIT) {
        return Err(invalid(format!("limit: less than {LEAST_LIMIT} would stop the link")));
    }
    plan(c, order).await
}

/// What is known of both ends when nothing is in the way.
pub(crate) fn admitted(plan: &Plan) -> Result<(&HostFacts, &LocalVm), ApiError> {
    match (&plan.facts, &plan.local, plan.blockers.is_empty()) {
        (Some(facts), Some(local), true) => Ok((facts, local)),
        _ => Err(blocked(plan)),
    }
}

/// Writes moves down that can begin, each behind the one before: all of them, or none.
///
/// # Errors
/// That of the first that does not fit any more, naming its VM.
pub(crate) fn store(
    c: &Controller,
    ordered: Vec<(&StartMove, &Plan, Option<Foretold>)>,
) -> Result<Vec<MoveRecord>, ApiError> {
    let _deciding = c.decide();
    let (mut records, mut changes): (Vec<MoveRecord>, Vec<Change>) = (vec![], vec![]);
    for (order, plan, prediction) in ordered {
        let before = records.last().map(MoveRecord::id);
        let (record, filling) = fits(c, order, plan, before, prediction).map_err(|mut error| {
            if !error.message.contains(&format!("`{}`", order.vm)) {
                error.message = format!("`{}` cannot be moved any more: {}", order.vm, error.message);
            }
            error
        })?;
        changes.extend(filling.iter().chain([&record]).map(|mv| Change::put(Kind::Move, mv.id().0, mv)));
        records.push(record);
    }
    c.store.commit(&changes)?;
    Ok(records)
}

/// The record of a move that can begin still; `after`: it waits for its turn behind this one. And that of the move before, where only blocks
/// of that follow. To be called while [`Controller::decide`] is held.
fn fits(
    c: &Controller,
    order: &StartMove,
    plan: &Plan,
    after: Option<MoveId>,
    prediction: Option<Foretold>,
) -> Result<(MoveRecord, Option<MoveRecord>), ApiError> {
    let (facts, local) = admitted(plan)?;
    let now = c.vm_record(&order.vm)?;
    let filling = superseded(c, now.definition.id)?;
    if now.host != plan.vm.host || (filling.is_none() && open_move(c, now.definition.id)?.is_some()) {
        return Err(conflict(format!("`{}` has just been given another move", order.vm))
            .remedy(format!("`godwit move show {}`", order.vm)));
    }
    c.host(&plan.to.name)?;
    let id = MoveId(c.store.next(Counter::Move)?);
    let to = PeerHost { name: plan.to.name.clone(), link: facts.link, underlay: facts.underlay };
    let ordered_unix_us = plan.came_unix_us;
    let record = MoveRecord {
        order: MoveOrder {
            id,
            vm: now.definition.id,
            to,
            disk: order.disk,
            limit: order.limit,
            policy: order.policy,
            // Said each time that it is sent.
            ordered_ms_ago: 0,
            throttle: order.throttle,
            memory_postcopy: order.memory_postcopy,
            vcpus: order.vcpus,
            keep_checkpoint: order.keep_checkpoint,
            capability: None,
        },
        vm: order.vm.clone(),
        from: now.host,
        owner: (local.lineage, local.generation),
        ordered_unix_us,
        memory: now.definition.spec.memory,
        disks: now.definition.spec.disks.iter().map(|d| d.size).sum(),
        step: Step::Begin,
        cancel: false,
        progress: fresh_progress(ordered_unix_us, order.limit),
        claim: None,
        superseded: false,
        after,
        turn_unix_us: None,
        prediction,
        place: order.place.clone(),
    };
    Ok((record, filling))
}

/// Drives a move that is written down; nobody waits for its being accepted.
pub(crate) fn set_off(c: &Arc<Controller>, record: MoveRecord) {
    c.spawn(drive(Arc::clone(c), record, None));
}

pub async fn start(
    State(c): Shared,
    Extension(who): Extension<Caller>,
    Json(order): Json<StartMove>,
) -> Result<Response, ApiError> {
    let mut plan = check(&c, &who, &order).await?;
    if order.dry_run {
        let Plan { vm, to, blockers, .. } = plan;
        let answer = DryRun { vm: order.vm, from: vm.host, to: to.name, blockers };
        return Ok(Json(answer).into_response());
    }
    let prediction = plan.ahead.told.take();
    let record = store(&c, vec![(&order, &plan, prediction)])?.remove(0);
    let id = record.id();
    let (accepted, answer) = oneshot::channel();
    c.spawn(drive(Arc::clone(&c), record, Some(accepted)));
    if let Ok(Ok(Err(refusal))) = timeout(ACCEPTED_WITHIN, answer).await {
        return Err(refusal);
    }
    Ok(Json(c.move_record(id)?.public()).into_response())
}

/// Goes on with every move that has not ended; for a controller that starts.
///
/// # Errors
/// The store's.
pub fn resume_all(c: &Arc<Controller>) -> Result<(), ApiError> {
    for record in c.store.read_all::<MoveRecord>(Kind::Move)? {
        if record.step != Step::Ended {
            c.spawn(drive(Arc::clone(c), record, None));
        }
    }
    Ok(())
}

type Accepted = oneshot::Sender<Result<(), ApiError>>;

/// Takes a move from wherever it is to its end. What is logged on the way carries the move's number and its VM.
async fn drive(c: Arc<Controller>, record: MoveRecord, accepted: Option<Accepted>) {
    let span = tracing::info_span!("move", "move" = record.id().0, vm = %record.vm);
    carry_on(c, record, accepted).instrument(span).await;
}

async fn carry_on(c: Arc<Controller>, mut record: MoveRecord, accepted: Option<Accepted>) {
    tracing::info!(from = %record.from, to = %record.order.to.name, step = ?record.step, "driving a move");
    if record.step == Step::Begin {
        crate::together::turn(&c, &record).await;
        if record.after.is_some() && record.turn_unix_us.is_none() {
            record.turn_unix_us = Some(unix_us());
            // Also for a controller that is restarted now. One that was ended meanwhile is found to be below.
            step(&c, &mut record, Step::Begin).await;
        }
        reach(Point::SagaStored, record.order.vm).await;
        let answer = match still_room(&c, &record).await {
            Ok(()) => begin(&c, &mut record).await,
            Err(error) => Err(error),
        };
        reach(Point::SagaOrdered, record.order.vm).await;
        let refused = answer.as_ref().err().cloned();
        if let Some(error) = &refused {
            end(&c, &mut record, Outcome::Failed, Some(error.to_string())).await;
        } else if step(&c, &mut record, Step::Observe).await {
            reach(Point::SagaWatching, record.order.vm).await;
        }
        if let Some(accepted) = accepted {
            // Whoever asked may have gone.
            let _ = accepted.send(answer);
        }
        if refused.is_some() {
            return;
        }
    }
    watch(&c, &mut record).await;
}

/// Whether the destination has room still for a move that waited behind others: what those took was not gone when it was ordered. One that its
/// source has heard of has taken of that room itself.
async fn still_room(c: &Controller, record: &MoveRecord) -> Result<(), ApiError> {
    if record.after.is_none() {
        return Ok(());
    }
    match c.node_of(&record.from)?.mv(record.id()).await {
        Err(error) if error.problem == Problem::NotFound => {}
        _ => return Ok(()),
    }
    let vm = c.vm_record(&record.vm)?;
    let local = c.node_of(&vm.host)?.vm(vm.definition.id).await.ok();
    let check = to_check(&vm, local.as_ref(), record.order.vcpus, &record.place);
    // Whoever does not answer now is asked until it does.
    let Ok(report) = c.node_of(&record.order.to.name)?.check(&check).await else { return Ok(()) };
    let room = report.blockers.into_iter().find(|blocker| matches!(blocker.kind.as_str(), "disk" | "memory"));
    room.map_or(Ok(()), |blocker| Err(ApiError::new(Problem::Blocked, blocker.message).remedy(blocker.remedy)))
}

/// What a destination is asked whether it can have.
fn to_check(vm: &VmRecord, local: Option<&LocalVm>, vcpus: Option<u32>, place: &[Placement]) -> CheckVm {
    let size = crate::placing::not_placed(&vm.definition, place);
    let disk = local.map_or(size, |l| l.allocated.min(size));
    CheckVm { definition: vm.definition.clone(), disk, vcpus, place: place.to_vec() }
}

/// Has the source's node take the order: as often as it takes, since a lost answer does not mean a lost order.
async fn begin(c: &Controller, record: &mut MoveRecord) -> Result<(), ApiError> {
    crate::placing::make_all(c, record).await?;
    let node = c.node_of(&record.from)?;
    let turn = record.turn_unix_us.unwrap_or(record.ordered_unix_us);
    // The same reason is noted once, however often it is met.
    let mut told = None;
    loop {
        if is_over(c, record) {
            return Err(conflict("it was ended before its source's node had taken the order"));
        }
        if cancel_wanted(c, record) {
            match node.mv(record.id()).await {
                // It has: the cancel is told by whoever watches.
                Ok(_) => return Ok(()),
                // It has not heard of it, so nothing has to be taken back.
                Err(error) if error.problem == Problem::NotFound => {
                    return Err(conflict("cancelled before its source's node had taken the order"));
                }
                Err(_) => {}
            }
        } else {
            reach(Point::SagaOrdering, record.order.vm).await;
            let ordered_ms_ago = unix_us().saturating_sub(turn) / 1000;
            match node.begin(&MoveOrder { ordered_ms_ago, ..crate::allow::order(c, record)? }).await {
                Ok(_) => return Ok(()),
                Err(error) if error.problem == Problem::Unreachable => {
                    if told.as_ref() != Some(&error.message) {
                        let text = format!("the order is tried again: {}", error.message);
                        record.progress.trace.note(unix_us(), Teller::Controller, NoteKind::Retry, text);
                        told = Some(error.message.clone());
                    }
                    let mut progress = record.progress.clone();
                    progress.error = Some(error.message);
                    c.set_live(record.id(), Some(progress));
                }
                Err(error) => return Err(error),
            }
        }
        sleep(RETRY).await;
    }
}

/// A move as it is stored: requests write into it beside the saga.
fn stored(c: &Controller, id: MoveId) -> Option<MoveRecord> {
    c.store.read::<MoveRecord>(Kind::Move, id.0).ok().flatten()
}

/// Whether somebody has asked for the move's end.
fn cancel_wanted(c: &Controller, record: &MoveRecord) -> bool {
    stored(c, record.id()).is_some_and(|r| r.cancel)
}

/// Whether it was ended beside its saga: [`give_up`].
fn is_over(c: &Controller, record: &MoveRecord) -> bool {
    stored(c, record.id()).is_some_and(|r| r.step == Step::Ended)
}

/// Whether the move is not to be begun any more. Its source's node may have been told all the same, by a controller before this one.
pub(crate) fn called_off(c: &Controller, record: &MoveRecord) -> bool {
    stored(c, record.id()).is_some_and(|r| r.cancel || r.step == Step::Ended)
}

/// Whether the VM has arrived, and only blocks of its disks still follow.
fn is_filling(c: &Controller, mv: &MoveRecord) -> bool {
    let stands = c.move_record(mv.id()).map(|live| live.progress.phase);
    mv.step == Step::Finish && stands.is_ok_and(|phase| phase == PhaseName::Fill)
}

/// Ends a move whose VM has arrived, for something else to be done with the VM: its node goes on fetching the blocks that follow. To be
/// called while [`Controller::decide`] is held.
///
/// # Errors
/// The store's.
pub fn supersede(c: &Controller, vm: VmId) -> Result<(), ApiError> {
    match superseded(c, vm)? {
        Some(mv) => Ok(c.store.commit(&[Change::put(Kind::Move, mv.id().0, &mv)])?),
        None => Ok(()),
    }
}

/// The move that [`supersede`] ends, as it is stored then.
fn superseded(c: &Controller, vm: VmId) -> Result<Option<MoveRecord>, ApiError> {
    let filling = open_move(c, vm)?.filter(|mv| is_filling(c, mv));
    Ok(filling.map(|mv| MoveRecord { superseded: true, ..mv }))
}

/// A move as it is stored whose source is lost while its VM is promoted elsewhere: neither node could end it any more. Its saga finds it
/// ended, and stops. To be called while [`Controller::decide`] is held.
pub(crate) fn give_up(c: &Controller, mut mv: MoveRecord, why: String) -> Change {
    if let Ok(live) = c.move_record(mv.id()) {
        mv.progress = live.progress;
    }
    mv.progress.trace.note(unix_us(), Teller::Controller, NoteKind::Decision, why.clone());
    mv.step = Step::Ended;
    close(&mut mv.progress, Outcome::Failed, Some(why));
    Change::put(Kind::Move, mv.id().0, &mv)
}

fn said<T>(answer: Result<T, ApiError>) -> Said<T> {
    match answer {
        Ok(value) => Said::This(value),
        Err(error) if error.problem == Problem::NotFound => Said::Unknown,
        Err(error) => Said::Silent(error.message),
    }
}

/// Asks both nodes again and again, for as long as it takes.
async fn watch(c: &Controller, record: &mut MoveRecord) {
    let (id, vm) = (record.id(), record.order.vm);
    let mut cancel_told = false;
    loop {
        let began = Instant::now();
        let (Ok(source), Ok(destination)) = (c.node_of(&record.from), c.node_of(&record.order.to.name)) else {
            if is_over(c, record) {
                return over(c, record);
            }
            // Hosts of an open move cannot be removed, so the store itself fails.
            sleep(RETRY).await;
            continue;
        };
        let (source_move, source_vm, destination_move, destination_vm) =
            tokio::join!(source.mv(id), source.vm(vm), destination.mv(id), destination.vm(vm));
        let seen = Seen {
            source_move: said(source_move),
            source_vm: said(source_vm),
            destination_move: said(destination_move),
            destination_vm: said(destination_vm),
        };
        if is_over(c, record) {
            return over(c, record);
        }
        record.progress = merge(&record.progress, &seen);
        crate::predictions::revise(record, unix_us());
        c.events.note_progress(id, &record.vm, &record.progress);
        c.set_live(id, Some(record.progress.clone()));
        if stored(c, id).is_some_and(|stored| stored.superseded) {
            let (text, proved) = (
                "the fill goes on; the move is over, since something else is wanted of the VM",
                record.progress.network_proved_ms,
            );
            record.progress.trace.note(unix_us(), Teller::Controller, NoteKind::Decision, text);
            let outcome = if proved.is_some() { Outcome::Completed } else { Outcome::NetworkUnproved };
            // Of one that has gone on meanwhile, its next host is heard.
            let there = seen.destination_vm.this().filter(|vm| vm.ownership == Ownership::Here);
            learn(c, vm, there);
            return end(c, record, outcome, None).await;
        }
        // The source knows that blocks follow before the destination has been heard to say so.
        let filling = record.progress.phase == PhaseName::Fill || record.progress.disk.absent.0 > 0;
        match next(record.step, record.owner, filling, &seen) {
            Next::Watch => {}
            Next::Settle(lineage, generation) => {
                reach(Point::SagaSettling, vm).await;
                match settle(c, vm, &record.order.to.name, (lineage, generation)).await {
                    Ok(()) => {
                        reach(Point::SagaGateways, vm).await;
                        if !step(c, record, Step::Finish).await {
                            return over(c, record);
                        }
                    }
                    Err(error) => {
                        tracing::error!(%error, "the VM has arrived, which cannot be stored; trying again");
                        sleep(RETRY).await;
                    }
                }
            }
            Next::End(outcome, error) => {
                // A claim at the source: its record and its gateways follow, as those of one that has arrived do.
                if let Some(back) = seen.source_vm.this().filter(|there| is_owner_after(there, record.owner))
                    && !outcome.has_arrived()
                    && let Err(error) = settle(c, vm, &record.from, (back.lineage, back.generation)).await
                {
                    tracing::error!(id = id.0, %error, "that the source has the VM again cannot be stored");
                }
                learn(c, vm, seen.destination_vm.this().filter(|_| outcome.has_arrived()));
                return end(c, record, outcome, error).await;
            }
        }
        // A cancel may have come while the source's node was silent, or to a controller that died: told until answered.
        if !cancel_told && cancel_wanted(c, record) {
            cancel_told = source.cancel(id).await.is_ok();
        }
        sleep(POLL.saturating_sub(began.elapsed())).await;
    }
}

/// What the host that the VM has arrived at says of it.
fn learn(c: &Controller, vm: VmId, there: Option<&LocalVm>) {
    if let Some(there) = there
        && let Err(error) = learn_vcpus(c, vm, there.definition.spec.vcpus)
    {
        tracing::error!(%error, "how many CPUs the VM has now cannot be stored");
    }
}

/// Stores that the saga is at `step`; until that has succeeded nothing goes on. `false`: it has been ended beside the saga, and stays as it is.
async fn step(c: &Controller, record: &mut MoveRecord, step: Step) -> bool {
    record.step = step;
    loop {
        let stored = {
            let _deciding = c.decide();
            // Somebody may have cancelled it meanwhile, or claimed the VM.
            let stored = match stored(c, record.id()) {
                Some(MoveRecord { step: Step::Ended, .. }) => return false,
                Some(MoveRecord { cancel, claim, superseded, .. }) => {
                    MoveRecord { cancel, claim, superseded, ..record.clone() }
                }
                None => record.clone(),
            };
            c.store.commit(&[Change::put(Kind::Move, record.id().0, &stored)])
        };
        match stored {
            Ok(()) => return true,
            Err(error) => tracing::error!(%error, "cannot store how a move stands; trying again"),
        }
        sleep(RETRY).await;
    }
}

async fn end(c: &Controller, record: &mut MoveRecord, outcome: Outcome, error: Option<String>) {
    let cancelled = outcome == Outcome::Failed && record.step == Step::Begin && cancel_wanted(c, record);
    close(&mut record.progress, if cancelled { Outcome::Cancelled } else { outcome }, error);
    reach(Point::SagaEnding, record.order.vm).await;
    step(c, record, Step::Ended).await;
    reach(Point::SagaEnded, record.order.vm).await;
    c.set_live(record.id(), None);
    tracing::info!(outcome = ?record.progress.outcome, "a move has ended");
    if record.id().0.is_multiple_of(FORGET_EVERY)
        && let Err(error) = forget_oldest(c)
    {
        tracing::warn!(%error, "old moves cannot be taken away");
    }
}

/// How a move stands that is over.
fn close(progress: &mut MoveProgress, outcome: Outcome, error: Option<String>) {
    progress.outcome = outcome;
    // What had been silent is no failure of a move that ended well.
    progress.error = error;
    progress.predicted_end_unix_us = None;
    progress.link_down_s = None;
    if outcome.has_arrived() {
        progress.downtime_ms = progress.downtime_ms.or_else(|| progress.pause_by_clocks_ms());
    }
    if let Some(last) = progress.phases.last_mut() {
        last.ended_unix_us.get_or_insert_with(unix_us);
    }
}

/// It was ended beside its saga.
fn over(c: &Controller, record: &MoveRecord) {
    c.set_live(record.id(), None);
    tracing::info!("a move was ended: its source is lost, and its VM is promoted elsewhere");
}

pub async fn list(
    State(c): Shared,
    Extension(who): Extension<Caller>,
    Query(wanted): Query<WantedMoves>,
) -> Answer<Vec<Move>> {
    let theirs = who.vms(&c)?;
    let seen = |mv: &&MoveRecord| {
        theirs.as_ref().is_none_or(|vms| vms.contains(&mv.order.vm)) && wanted.vm.as_ref().is_none_or(|vm| &mv.vm == vm)
    };
    let most = wanted.limit.unwrap_or(MOST_LISTED).min(MOST_LISTED);
    Ok(Json(c.move_records()?.iter().filter(seen).take(most).map(MoveRecord::public).collect()))
}

/// Takes away the oldest of the moves that have ended, once there are many: all of them are read for every prediction.
fn forget_oldest(c: &Controller) -> Result<(), ApiError> {
    let _deciding = c.decide();
    let vms: HashSet<VmId> = c.vm_records()?.into_iter().map(|vm| vm.definition.id).collect();
    let mut hosts = HashSet::new();
    let ended = c.move_records()?.into_iter().filter(|mv| mv.step == Step::Ended);
    // Where one has failed there may be half a copy, which the VM's deletion finds by the last of them.
    let mut is_last = |mv: &MoveRecord| hosts.insert((mv.order.vm, mv.from.clone(), mv.order.to.name.clone()));
    let mut may_go = |mv: &MoveRecord| !is_last(mv) || !vms.contains(&mv.order.vm) || mv.progress.outcome.has_arrived();
    let old = ended.enumerate().filter(|(n, mv)| may_go(mv) && *n >= MOST_KEPT).map(|(_, mv)| mv);
    let (mut changes, mut forgotten) = (vec![], BTreeMap::new());
    for mv in old {
        *forgotten.entry(crate::events::label(mv.progress.outcome)).or_insert(0) += 1;
        changes.push(Change::remove(Kind::Move, mv.id().0));
    }
    for (outcome, more) in forgotten {
        let before: u64 = c.store.read(Kind::Forgotten, outcome)?.unwrap_or(0);
        changes.push(Change::put(Kind::Forgotten, outcome, &(before + more)));
    }
    Ok(c.store.commit(&changes)?)
}

pub async fn show(State(c): Shared, Path(id): Path<u64>) -> Answer<Move> {
    Ok(Json(c.move_record(MoveId(id))?.public()))
}

fn open(c: &Controller, id: u64) -> Result<MoveRecord, ApiError> {
    let record = c.move_record(MoveId(id))?;
    match record.step {
        Step::Ended => {
            Err(conflict(format!("move {id} has ended already")).remedy(format!("`godwit move show {id}` tells how")))
        }
        _ => Ok(record),
    }
}

/// As [`open`], of a move that can still be taken back.
fn undoable(c: &Controller, id: u64) -> Result<MoveRecord, ApiError> {
    let record = open(c, id)?;
    if is_filling(c, &record) {
        let message = format!("`{}` runs on `{}` already, and its disks follow", record.vm, record.order.to.name);
        return Err(
            conflict(message).remedy(format!("to have it back: `godwit move {} --to {}`", record.vm, record.from))
        );
    }
    Ok(record)
}

pub async fn cancel(State(c): Shared, Path(id): Path<u64>) -> Answer<Move> {
    let record = undoable(&c, id)?;
    {
        let _deciding = c.decide();
        // As it is now: the saga may have stored another step.
        let Some(mut now) = c.store.read::<MoveRecord>(Kind::Move, id)? else { return Err(missing("move", id)) };
        if now.step != Step::Ended {
            now.cancel = true;
            c.store.commit(&[Change::put(Kind::Move, id, &now)])?;
        }
    }
    // The source's node orders this against the seal. If it cannot be told now, the saga tells it as soon as it can.
    match c.node_of(&record.from)?.cancel(record.id()).await {
        Ok(_) => {}
        Err(error) if matches!(error.problem, Problem::Unreachable | Problem::NotFound) => {
            tracing::warn!("move" = id, vm = %record.vm, %error, "the cancel is passed on later");
        }
        Err(error) => return Err(error),
    }
    Ok(Json(c.move_record(MoveId(id))?.public()))
}

pub async fn limit(State(c): Shared, Path(id): Path<u64>, Json(limit): Json<SetLimit>) -> Answer<Move> {
    if limit.limit.is_some_and(|limit| limit < LEAST_LIMIT) {
        return Err(invalid(format!("limit: less than {LEAST_LIMIT} would stop the link")));
    }
    let record = open(&c, id)?;
    c.node_of(&record.from)?.limit(record.id(), limit).await?;
    Ok(Json(c.move_record(MoveId(id))?.public()))
}
