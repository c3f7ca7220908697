//! What a hand-off machine wants done, done. Each is safe to do twice: a restarted node does them again.
//!
//! An effect that fails reports nothing, or that the QEMU died, whichever the machine can do something with; what cannot be left
//! undone is tried until it is done.

use crate::actor::{Input, boot_retry};
use crate::failpoint::{Point, reach_async};
use crate::node::Node;
use crate::parts::Parts;
use crate::registry::Power;
use crate::{incoming, outgoing};
use godwit_api::progress::NoteKind;
use godwit_api::{ApiError, Problem};
use godwit_handoff::{Action, Event, Generation, Lineage, Record, Run, Ticket};
use godwit_vmm::{Qemu, VmmError};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How long the last writes of a stopped guest may take to be answered: they never wait for the WAN.
const DRAIN: Duration = Duration::from_secs(10);
/// How long a destination that was granted the VM tries to open it, before it returns it. The guest stands meanwhile.
const RETURNING: Duration = Duration::from_secs(5);
/// Between two tries to let a guest go on whose write found no room: from here, twice as long each time.
const FIRST_ROOM: Duration = Duration::from_secs(1);
/// To here.
const LAST_ROOM: Duration = Duration::from_secs(30);
/// How long a step that has to succeed is left alone before it is tried again.
const AGAIN: Duration = Duration::from_secs(1);

/// Does what the machine says; the event is to be reported.
pub async fn perform(node: &Arc<Node>, parts: &Arc<Parts>, action: Action, arriving: bool) -> Option<Event> {
    tracing::debug!(vm = parts.name, ?action, "effect");
    match action {
        Action::Open(lineage, generation) => {
            // What has been granted can still be returned, and after STARTED it cannot: so this is the moment to look.
            let granted = matches!(node.record(parts.id), Some(Record::Prepared(_) | Record::Granted(_)));
            if arriving && granted && !is_loaded(parts).await {
                return Some(Event::QemuDied);
            }
            // What can still be returned is not held on both sides for a bridge or a disk that has gone meanwhile.
            let until = (arriving && granted).then(|| Instant::now() + RETURNING);
            match open(node, parts, lineage, generation, until).await {
                Ok(()) => Some(Event::Opened),
                Err(error) => {
                    tracing::error!(vm = parts.name, %error, "it cannot be opened here, and goes back to where it came from");
                    if let Some(moving) = parts.moving() {
                        moving.failed(error.to_string());
                    }
                    Some(Event::QemuDied)
                }
            }
        }
        Action::Close => {
            let closed = close(node, parts, arriving).await;
            if is_outranked(node, parts) {
                // A boot that was under way when somebody else took the VM has come to its end since.
                pause(parts).await;
            }
            closed.then_some(Event::Closed)
        }
        Action::Run(run) => {
            if arriving {
                reach_async(Point::Started, parts.id).await;
                take_over(node, parts);
            }
            self::run(node, parts, run).await;
            if arriving || parts.moving().is_some_and(|moving| moving.is_to_arrive()) {
                incoming::runs(node, parts);
            }
            Some(Event::Ran)
        }
        Action::Quit => {
            quit(node, parts).await;
            None
        }
        Action::Migrate(ticket) => {
            outgoing::start(node, parts, ticket);
            None
        }
        Action::AnswerShut => {
            if let Some(moving) = parts.moving() {
                moving.shut.cancel();
            }
            None
        }
        Action::AbortMigration => {
            abort(parts).await;
            None
        }
        Action::Receive(ticket) => receive(node, parts, ticket).await,
        Action::Persist(_) | Action::Send(_) | Action::SetTimer => None,
    }
}

/// Whether the QEMU that loaded the VM still holds it.
async fn is_loaded(parts: &Arc<Parts>) -> bool {
    match parts.qemu() {
        Some(qemu) => matches!(on_qemu(&qemu, Qemu::state).await, Ok(godwit_vmm::State::Stopped)),
        None => false,
    }
}

/// Runs something on a QEMU's monitor, which may block, away from the tasks.
///
/// # Errors
/// What the monitor says.
pub async fn on_qemu<T: Send + 'static>(
    qemu: &Arc<Qemu>,
    what: impl FnOnce(&Qemu) -> Result<T, VmmError> + Send + 'static,
) -> Result<T, ApiError> {
    let qemu = qemu.clone();
    match tokio::task::spawn_blocking(move || what(&qemu)).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(error)) => Err(ApiError::new(Problem::Failed, error.to_string())),
        Err(_) => Err(ApiError::new(Problem::Failed, "a QEMU command ended in a bug of the node")),
    }
}

/// Opens what is here to the guest: tries until it is done, or until a moment.
///
/// # Errors
/// What is in the way at that moment.
async fn open(
    node: &Arc<Node>,
    parts: &Arc<Parts>,
    lineage: Lineage,
    generation: Generation,
    until: Option<Instant>,
) -> Result<(), ApiError> {
    let gives_up = || until.is_some_and(|until| Instant::now() >= until);
    // In the background: what a gateway needs to hear of it takes a round trip, and it may not be there at all.
    crate::gateways::point_here(node, parts, lineage, generation);
    let mut laps = Laps::begin();
    // The disks first: a guest that is announced is spoken to. What lets nothing pass is done beside them.
    let (mut staged, disks) = tokio::join!(node.prepare_host(parts), open_disks(parts, lineage, generation, gives_up));
    disks?;
    // What may be given back still, its lender keeps until it is started.
    if until.is_none() {
        take_over(node, parts);
    }
    laps.lap("the disks");
    loop {
        let activated = match staged {
            Ok(()) => node.activate(parts, lineage, generation).await,
            Err(error) => Err(error),
        };
        let Err(error) = activated else { break };
        if gives_up() {
            return Err(error);
        }
        tracing::error!(vm = parts.name, %error, "the network cannot be activated; trying again");
        tokio::time::sleep(AGAIN).await;
        staged = node.prepare_host(parts).await;
    }
    laps.lap("the network");
    laps.note(parts, "opened");
    Ok(())
}

/// Nobody fetches from the VM's owner any more, which fetches what it lacks.
fn take_over(node: &Arc<Node>, parts: &Arc<Parts>) {
    if let Err(error) = parts.change(|file| file.lent.clear()) {
        tracing::warn!(vm = parts.name, %error, "cannot remember that nothing is lent any more");
    }
    crate::fill::begin(node, parts);
}

async fn open_disks(
    parts: &Arc<Parts>,
    lineage: Lineage,
    generation: Generation,
    gives_up: impl Fn() -> bool,
) -> Result<(), ApiError> {
    for disk in parts.disks() {
        while let Err(error) = disk.open(lineage, generation).await {
            if gives_up() {
                return Err(ApiError::new(Problem::Failed, format!("disk `{}`: {error:#}", disk.name)));
            }
            tracing::error!(vm = parts.name, %error, "a disk cannot be opened; trying again");
            tokio::time::sleep(AGAIN).await;
        }
    }
    Ok(())
}

/// What takes how long while a guest stands, for its move's trace.
struct Laps {
    last: Instant,
    taken: Vec<String>,
}

impl Laps {
    fn begin() -> Self {
        Self { last: Instant::now(), taken: vec![] }
    }

    /// This ended now.
    fn lap(&mut self, what: &str) {
        let now = Instant::now();
        let ms = now.duration_since(self.last).as_secs_f64() * 1000.0;
        self.taken.push(format!("{what} in {ms:.1} ms"));
        self.last = now;
    }

    fn note(self, parts: &Parts, what: &str) {
        if let Some(moving) = parts.moving().filter(|moving| !moving.tracker.ended()) {
            moving.note(NoteKind::HandOff, format!("{what}: {}", self.taken.join(", ")));
        }
    }
}

/// Whether all is closed; else a move from here is undone.
async fn close(node: &Arc<Node>, parts: &Arc<Parts>, arriving: bool) -> bool {
    let mut laps = Laps::begin();
    crate::wired::leaves(node, parts).await;
    // The network first: what the guest's own stop left in flight is all that may still leave.
    while let Err(error) = node.isolate(parts).await {
        tracing::error!(vm = parts.name, %error, "the network cannot be isolated, and is not let go of");
        if !arriving && is_undone(parts, format!("the network cannot be isolated: {error}")).await {
            return false;
        }
        tokio::time::sleep(AGAIN).await;
    }
    laps.lap("the network");
    parts.disks().iter().for_each(|disk| disk.let_go());
    // QEMU answers its guest's last writes after the STOP event; by the end of RAM all of them are.
    if let Some(moving) = parts.moving().filter(|m| !m.over.is_cancelled() && outgoing::is_under_way(m)) {
        tokio::select! {
            () = moving.ram_ended.cancelled() => {}
            () = moving.over.cancelled() => {}
            () = tokio::time::sleep(DRAIN) => tracing::warn!(vm = parts.name, "the end of RAM does not come"),
        }
        laps.lap("the end of memory");
    }
    for disk in parts.disks() {
        while let Err(error) = disk.freeze().await {
            tracing::error!(vm = parts.name, volume = disk.name, %error, "a shared disk cannot be made durable, and is not let go of");
            if !arriving && is_undone(parts, format!("disk `{}`: {error}", disk.name)).await {
                return false;
            }
            tokio::time::sleep(AGAIN).await;
        }
    }
    laps.lap("the disks");
    laps.note(parts, "closed");
    true
}

/// Whether a move is under way, which is undone then: what has to be closed first cannot be.
async fn is_undone(parts: &Arc<Parts>, why: String) -> bool {
    let Some(moving) = parts.moving().filter(|moving| parts.takes_part_in(moving)) else { return false };
    moving.failed(why);
    parts.keeper().tell(Input::Event(Event::MigrationFailed)).await;
    true
}

async fn run(node: &Arc<Node>, parts: &Arc<Parts>, run: Run) {
    loop {
        let done = match (run, parts.qemu()) {
            (Run::Cont, Some(qemu)) => match on_qemu(&qemu, go_on).await {
                Ok(Went::On) => Ok(()),
                Ok(Went::Stuck) => {
                    tracing::error!(vm = parts.name, "{STUCK}");
                    if let Some(moving) = parts.moving() {
                        moving.failed(STUCK);
                    }
                    boot(node, parts).await
                }
                Err(error) => Err(error),
            },
            (Run::Cont | Run::Boot, _) => boot(node, parts).await,
        };
        match done {
            Ok(()) => return,
            Err(error) => {
                tracing::error!(vm = parts.name, %error, "the VM cannot be made to run; trying again");
                parts.keeper().tell(Input::BootFailed(error)).await;
                tokio::time::sleep(boot_retry()).await;
            }
        }
        if parts.file().power == Power::Off || is_outranked(node, parts) {
            // Somebody has given up meanwhile, or has the VM elsewhere.
            return;
        }
        if run == Run::Cont && parts.qemu().is_none_or(|q| !q.is_alive()) {
            // The watcher tells the machine, which decides what becomes of it.
            return;
        }
    }
}

/// What became of a guest that was to go on.
enum Went {
    On,
    /// Its QEMU cannot.
    Stuck,
}

/// Why a guest is booted whose QEMU is there.
const STUCK: &str =
    "QEMU cannot go back from a post-copy that was given up: the memory is lost, and the VM boots from its disks";

fn go_on(qemu: &Qemu) -> Result<Went, VmmError> {
    match qemu.cont() {
        Ok(()) => Ok(Went::On),
        Err(VmmError::Stuck) => Ok(Went::Stuck),
        Err(error) => Err(error),
    }
}

async fn boot(node: &Arc<Node>, parts: &Arc<Parts>) -> Result<(), ApiError> {
    end_qemu(parts).await;
    node.prepare_host(parts).await?;
    node.start_qemu(parts, godwit_vmm::Start::Boot).await.map(drop)
}

/// Gives a VM that runs the CPUs that it was to have on arrival. Why that did not work, if it did not: it runs as it is.
pub async fn plug(parts: &Arc<Parts>) -> Option<String> {
    let wanted = parts.file().plug?;
    let plugged = match parts.qemu() {
        Some(qemu) => on_qemu(&qemu, move |q| q.plug_vcpus(wanted)).await,
        None => return None,
    };
    let done = plugged.and_then(|()| {
        let noted = parts.change(|f| (f.definition.spec.vcpus, f.plug) = (wanted, None));
        noted.map_err(|e| ApiError::new(Problem::Failed, e.to_string()))
    });
    let why = format!("`{}` could not be given {wanted} CPUs: {}", parts.name, done.err()?);
    tracing::error!("{why}");
    Some(why)
}

/// Ends a VM's QEMU, whatever state it is in.
pub async fn end_qemu(parts: &Arc<Parts>) {
    if let Some(qemu) = parts.qemu() {
        parts.set_qemu(None);
        let _ = tokio::task::spawn_blocking(move || qemu.quit()).await;
    }
    parts.disks().iter().for_each(|disk| disk.hang_up());
}

async fn quit(node: &Arc<Node>, parts: &Arc<Parts>) {
    let leaving = crate::recycle::leaving(parts);
    let neighbour = crate::neighbours::leaving(node, parts);
    end_qemu(parts).await;
    if let Err(error) = node.remove_endpoints(parts).await {
        tracing::warn!(vm = parts.name, %error, "the endpoints could not be removed");
    }
    let ours = matches!(node.record(parts.id), Some(Record::Owned(_)));
    if matches!(node.record(parts.id), Some(Record::Released(_))) {
        if parts.moving().is_some_and(|moving| !moving.recovered) {
            crate::kept::forget(&parts.folder);
        } else {
            // After a restart: what lies here may be what was kept for the way back.
            crate::kept::forget_keys(&parts.folder);
        }
        if let Some(leaving) = leaving {
            crate::recycle::take(parts, leaving);
        }
        if let Some(neighbour) = neighbour {
            crate::neighbours::remember(node, parts, neighbour);
        }
    }
    for disk in parts.disks() {
        disk.rest(!ours).await;
    }
    crate::fill::while_off(node, parts).await;
}

async fn abort(parts: &Arc<Parts>) {
    let moving = parts.moving();
    if let Some(moving) = &moving {
        moving.over.cancel();
        if !moving.handed.is_cancelled() {
            // While it writes the devices' state QEMU answers nobody; that it breaks off there takes it back.
            crate::parts::lock(&moving.socket).take();
        }
    }
    // Kept until QEMU has let go of its end: it must not see a cut while it is told to pause.
    let held = moving.as_ref().and_then(|moving| crate::parts::lock(&moving.socket).take());
    let follows = moving.as_ref().is_some_and(|moving| moving.follows());
    if let Some(qemu) = parts.qemu() {
        let given_up = on_qemu(&qemu, move |q| {
            if follows { q.go_back() } else { q.migrate_cancel() }?;
            q.let_go();
            Ok(())
        });
        if let Err(error) = given_up.await {
            tracing::warn!(vm = parts.name, %error, "its migration is not given up yet");
        }
    }
    drop(held);
    for disk in parts.disks() {
        disk.stop_mirror().await;
    }
}

async fn receive(node: &Arc<Node>, parts: &Arc<Parts>, ticket: Ticket) -> Option<Event> {
    match incoming::prepare(node, parts, ticket).await {
        Ok(()) => {
            parts.keeper().tell(Input::Ready).await;
            None
        }
        Err(error) => {
            parts.fail(error);
            Some(Event::QemuDied)
        }
    }
}

/// Whether a claim elsewhere has the VM.
pub fn is_outranked(node: &Node, parts: &Parts) -> bool {
    matches!(node.record(parts.id), Some(Record::Outranked { .. }))
}

/// Stops the vCPUs, for a VM that a claim elsewhere has taken. What its QEMU holds is kept.
pub async fn pause(parts: &Arc<Parts>) {
    if let Some(qemu) = parts.qemu()
        && let Err(error) = on_qemu(&qemu, |q| q.monitor(serde_json::json!({"execute": "stop"})).map(drop)).await
    {
        tracing::error!(vm = parts.name, %error, "its vCPUs cannot be stopped; its disks refuse its writes all the same");
    }
}

/// Lets a guest go on whose QEMU made it stand still because a write of it found no room; that write is made again then.
///
/// # Errors
/// When it stands still again, or its QEMU does not answer.
pub async fn go_on_at_once(node: &Arc<Node>, parts: &Arc<Parts>) -> Result<(), ApiError> {
    let Some(qemu) = parts.qemu() else { return Ok(()) };
    // One that a claim elsewhere has taken stands, too, and is to.
    if !on_qemu(&qemu, Qemu::is_stalled).await? || is_outranked(node, parts) {
        return Ok(());
    }
    on_qemu(&qemu, Qemu::cont).await?;
    tokio::time::sleep(FIRST_ROOM).await;
    if is_outranked(node, parts) {
        pause(parts).await;
        return Ok(());
    }
    if !on_qemu(&qemu, Qemu::is_stalled).await? {
        tracing::info!(vm = parts.name, "the guest goes on: there is room again");
        return Ok(());
    }
    Err(ApiError::new(Problem::Failed, format!("`{}` stands still: there is no room for what it writes", parts.name))
        .remedy("make room where its disks are; it goes on by itself then"))
}

/// As [`go_on_at_once`], again and again, until the guest runs, is off, or somebody else has it. One at a time: each try that fails is told of
/// by QEMU, too.
pub async fn go_on_when_it_can(node: &Arc<Node>, parts: &Arc<Parts>) {
    while !parts.stalled.swap(true, Ordering::AcqRel) {
        tracing::error!(vm = parts.name, "the guest stands still: there is no room for what it writes");
        until_it_goes_on(node, parts).await;
        parts.stalled.store(false, Ordering::Release);
        // What was told of meanwhile was told to nobody.
        let stands = match parts.qemu() {
            Some(qemu) => on_qemu(&qemu, Qemu::is_stalled).await.unwrap_or_default(),
            None => false,
        };
        if !stands || is_outranked(node, parts) {
            return;
        }
    }
}

async fn until_it_goes_on(node: &Arc<Node>, parts: &Arc<Parts>) {
    let mut pause = FIRST_ROOM;
    loop {
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(LAST_ROOM);
        let Some(qemu) = parts.qemu() else { return };
        if is_outranked(node, parts) {
            return;
        }
        // A move stops and starts the guest itself.
        if parts.moving().is_some_and(|moving| !moving.tracker.ended()) {
            continue;
        }
        match on_qemu(&qemu, Qemu::is_stalled).await {
            Ok(true) if go_on_at_once(node, parts).await.is_err() => {}
            Ok(_) => return,
            Err(_) if !qemu.is_alive() => return,
            Err(_) => {}
        }
    }
}

/// Asks the guest to power itself off.
///
/// # Errors
/// When it has no QEMU, or that does not answer.
pub async fn press_power_button(parts: &Arc<Parts>) -> Result<(), ApiError> {
    let Some(qemu) = parts.qemu() else { return Ok(()) };
    on_qemu(&qemu, |q| q.monitor(serde_json::json!({"execute": "system_powerdown"})).map(drop)).await
}
