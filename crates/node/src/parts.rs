//! A VM's belongings on this host: its file, its disks, its QEMU, and the move that it takes part in.
//!
//! The keeper ([`crate::actor`]) decides; effects and the tasks of a move work on what is here. Locks are held for moments, never
//! over I/O.

use crate::actor::{Handle, View};
use crate::disk::Disk;
use crate::registry::{self, Noted, Power, VmFile};
use crate::tracker::Tracker;
use godwit_api::ApiError;
use godwit_api::host::{LocalMove, MoveOrder, MoveRole, Ownership, PeerHost};
use godwit_api::progress::{NoteKind, Outcome, PhaseName};
use godwit_api::vm::VmDefinition;
use godwit_handoff::{MoveId, Record, Ticket, VmId};
use godwit_vmm::{Qemu, QemuEvent};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::{Notify, broadcast};
use tokio_util::sync::CancellationToken;

/// A VM on this host.
#[derive(Debug)]
pub struct Parts {
    /// Its number.
    pub id: VmId,
    /// Its name, for people.
    pub name: String,
    /// What survives a reboot.
    pub folder: PathBuf,
    /// Sockets and process ids.
    pub run: PathBuf,
    file: Mutex<VmFile>,
    view: Mutex<View>,
    keeper: OnceLock<Handle>,
    qemu: Mutex<Option<Arc<Qemu>>>,
    disks: Mutex<Vec<Arc<Disk>>>,
    /// What its QEMU says of itself, for the tasks of a move.
    events: Mutex<Option<broadcast::Sender<QemuEvent>>>,
    /// When its vCPUs last began to run: as heard, and by QEMU's clock.
    resumed: Mutex<Option<(Instant, u64)>>,
    moving: Mutex<Option<Arc<Moving>>>,
    failure: Mutex<Option<ApiError>>,
    /// One stream at a time writes into what is kept of the VM's memory.
    pub(crate) keeping: Arc<tokio::sync::Mutex<()>>,
    /// Ends the look at what is kept, or the sealing of it, that is under way.
    looking: Mutex<CancellationToken>,
    /// Whether somebody is telling those who lent blocks of its disks that they have come.
    pub(crate) releasing: AtomicBool,
    /// Whether somebody waits for its disks, to end a move that went on over a restart.
    pub(crate) telling: AtomicBool,
    /// Whether an image is being copied into one of its volumes.
    pub(crate) importing: AtomicBool,
    /// Whether somebody waits for room, to let its guest go on.
    pub(crate) stalled: AtomicBool,
    /// Whether pages of its memory may follow it here, when it comes.
    pub(crate) may_follow: AtomicBool,
    /// What its guest is being watched doing.
    pub(crate) watched: crate::profile::Watched,
}

/// The move that a VM takes part in, or did last.
#[derive(Debug)]
pub struct Moving {
    /// The attempt.
    pub ticket: Ticket,
    /// This host's part in it.
    pub role: MoveRole,
    /// How it stands.
    pub tracker: Arc<Tracker>,
    /// The other host.
    pub peer: PeerHost,
    /// When this host heard of it, and how long after it was ordered that was.
    began: Instant,
    heard_after: Duration,
    /// Somebody asked for it to be undone.
    pub cancelled: AtomicBool,
    /// Somebody asked for the end of pre-copy.
    pub stop_now: Notify,
    /// Ends the tasks of the attempt.
    pub over: CancellationToken,
    /// Set when all of memory was read from the source's QEMU: its guest writes no more.
    pub ram_ended: CancellationToken,
    /// Set when the source's QEMU may be told that its migration has ended.
    pub shut: CancellationToken,
    /// Destination: the incoming QEMU has loaded everything, and it was verified.
    pub memory_loaded: AtomicBool,
    /// Pages of the guest's memory follow it. Source: that was begun; destination: that was seen.
    pub(crate) follows: AtomicBool,
    /// Source: its QEMU has said all that the guest needs to run there, and will not go on with it by itself.
    pub(crate) handed: CancellationToken,
    /// Source: the guest runs at the destination, and needs its pages from here; there is no way back.
    pub(crate) gone: CancellationToken,
    /// Source: the destination has said that it keeps nothing of the guest's memory.
    pub(crate) keeps_nothing: AtomicBool,
    /// Source: how fast the destination reads the disks that lie on shared storage, bit/s; zero where it does not.
    pub(crate) reads_shared: AtomicU64,
    /// Source: how much of what nobody waits for may go behind the guest's back in a second; zero where that is not known.
    pub(crate) behind: AtomicU64,
    /// Source: where QEMU's migration socket ends, so that a stream that fails does not break it: it could not be gone back to then.
    pub(crate) socket: Mutex<Option<UnixStream>>,
    /// Destination: its guest stands at the source, as the ends of its wires say.
    stands: AtomicBool,
    /// Destination: the last page is here.
    pub(crate) drained: CancellationToken,
    /// Destination: what comes after the guest's start is being done.
    pub(crate) arrived: AtomicBool,
    /// Destination: the node was restarted when the VM was its own already, and only blocks of its disks were to come.
    pub(crate) goes_on: bool,
    /// The node was restarted in the middle of it, or after it.
    pub(crate) recovered: bool,
    /// What is to be kept of memory at the source, for when the guest comes back: both sides' part.
    pub(crate) recycling: crate::recycle::Recycling,
    /// Destination: whose memory the source was told of.
    pub(crate) shown: Arc<crate::neighbours::resident::Shown>,
    /// What made the attempt fail.
    pub why: Mutex<Option<String>>,
}

impl Moving {
    fn new(ticket: Ticket, role: MoveRole, peer: PeerHost) -> Self {
        Self {
            ticket,
            role,
            tracker: Arc::new(Tracker::new()),
            peer,
            began: Instant::now(),
            heard_after: Duration::ZERO,
            cancelled: AtomicBool::new(false),
            stop_now: Notify::new(),
            over: CancellationToken::new(),
            ram_ended: CancellationToken::new(),
            shut: CancellationToken::new(),
            memory_loaded: AtomicBool::new(false),
            follows: AtomicBool::new(false),
            handed: CancellationToken::new(),
            gone: CancellationToken::new(),
            keeps_nothing: AtomicBool::new(false),
            reads_shared: AtomicU64::new(0),
            behind: AtomicU64::new(0),
            socket: Mutex::default(),
            stands: AtomicBool::new(false),
            drained: CancellationToken::new(),
            arrived: AtomicBool::new(false),
            goes_on: false,
            recovered: false,
            recycling: Default::default(),
            shown: Arc::default(),
            why: Mutex::new(None),
        }
    }

    /// It is over: its tasks end.
    pub fn end(&self, outcome: Outcome, why: Option<String>) {
        self.over.cancel();
        if outcome.has_arrived() {
            self.tracker.enter(PhaseName::Release);
        }
        self.tracker.end(outcome, why);
    }

    /// How long ago it was ordered: what a deadline is held against.
    pub(crate) fn since_order(&self) -> Duration {
        self.heard_after.saturating_add(self.began.elapsed())
    }

    /// Whether pages of the guest's memory follow it.
    pub(crate) fn follows(&self) -> bool {
        self.follows.load(Ordering::Acquire)
    }

    /// Whether its guest has come here and nobody has taken that up: a node that is restarted right after STARTED may hear that it owns the VM
    /// before it has made it run again.
    pub(crate) fn is_to_arrive(&self) -> bool {
        let open = !self.goes_on && !self.tracker.ended() && !self.over.is_cancelled();
        self.role == MoveRole::Destination && open && !self.arrived.load(Ordering::Relaxed)
    }

    /// Its guest stands at the source.
    pub(crate) fn stands(&self) {
        self.stands.store(true, Ordering::Relaxed);
    }

    /// Whether its guest stands and is to run here: what else there is to write on this host's disk waits, for a bounded time.
    pub(crate) fn is_awaited(&self) -> bool {
        self.is_to_arrive() && (self.stands.load(Ordering::Relaxed) || self.memory_loaded.load(Ordering::Acquire))
    }

    /// Writes something into the move's trace.
    pub fn note(&self, kind: NoteKind, text: impl Into<String>) {
        self.tracker.note(self.role, kind, text);
    }

    /// Remembers the first thing that went wrong.
    pub fn failed(&self, why: impl Into<String>) {
        lock(&self.why).get_or_insert_with(|| why.into());
    }

    /// As the API shows it.
    #[must_use]
    pub fn local(&self) -> LocalMove {
        LocalMove { id: self.ticket.mv, vm: self.ticket.vm, role: self.role, progress: self.tracker.get() }
    }
}

/// A lock that a panic elsewhere does not poison: what it guards is replaced whole, never half.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Parts {
    /// A VM's belongings, nothing of them open yet.
    #[must_use]
    pub fn new(folder: PathBuf, run: PathBuf, file: VmFile) -> Self {
        Self {
            id: file.definition.id,
            name: file.definition.name.to_string(),
            folder,
            run,
            file: Mutex::new(file),
            view: Mutex::new(View { ownership: Ownership::Elsewhere, owner: (0, 0), newest: (0, 0), ticket: None }),
            keeper: OnceLock::new(),
            qemu: Mutex::default(),
            disks: Mutex::default(),
            events: Mutex::default(),
            resumed: Mutex::default(),
            moving: Mutex::default(),
            failure: Mutex::default(),
            keeping: Arc::default(),
            looking: Mutex::default(),
            releasing: AtomicBool::default(),
            telling: AtomicBool::default(),
            importing: AtomicBool::default(),
            stalled: AtomicBool::default(),
            may_follow: AtomicBool::default(),
            watched: Default::default(),
        }
    }

    /// Its keeper.
    ///
    /// # Panics
    /// Before it has one; it is given one as soon as it is known.
    #[must_use]
    pub fn keeper(&self) -> &Handle {
        self.keeper.get().expect("every VM that is known has a keeper")
    }

    pub(crate) fn introduce(&self, keeper: Handle) {
        let _ = self.keeper.set(keeper);
    }

    /// What is remembered of it.
    #[must_use]
    pub fn file(&self) -> VmFile {
        lock(&self.file).clone()
    }

    /// What it is made of.
    #[must_use]
    pub fn definition(&self) -> VmDefinition {
        lock(&self.file).definition.clone()
    }

    /// Changes what is remembered, durably.
    ///
    /// # Errors
    /// When the medium fails; what is remembered is as before.
    pub fn change(&self, change: impl FnOnce(&mut VmFile)) -> std::io::Result<()> {
        let mut file = lock(&self.file);
        let mut new = file.clone();
        change(&mut new);
        if new != *file {
            registry::store(&self.folder, &new)?;
            *file = new;
        }
        Ok(())
    }

    pub(crate) fn set_power(&self, power: Power) {
        if let Err(error) = self.change(|f| f.power = power) {
            // It is on or off now all the same; only a reboot of the host would get it wrong.
            tracing::error!(vm = self.name, %error, "cannot remember whether the VM is to be on");
        }
    }

    pub(crate) fn publish(&self, view: View) {
        *lock(&self.view) = view;
    }

    /// Where its hand-off machine stands.
    #[must_use]
    pub fn view(&self) -> View {
        *lock(&self.view)
    }

    /// Its QEMU.
    #[must_use]
    pub fn qemu(&self) -> Option<Arc<Qemu>> {
        lock(&self.qemu).clone()
    }

    /// Replaces its QEMU.
    pub fn set_qemu(&self, qemu: Option<Arc<Qemu>>) {
        *lock(&self.qemu) = qemu;
    }

    pub(crate) fn set_events(&self, events: broadcast::Sender<QemuEvent>) {
        *lock(&self.events) = Some(events);
    }

    /// What its QEMU says of itself from now on.
    #[must_use]
    pub fn events(&self) -> Option<broadcast::Receiver<QemuEvent>> {
        lock(&self.events).as_ref().map(broadcast::Sender::subscribe)
    }

    /// `None`: a new QEMU, which has not run yet.
    pub(crate) fn note_resumed(&self, at: Option<(Instant, u64)>) {
        *lock(&self.resumed) = at;
    }

    /// When its vCPUs last began to run: as heard, and by QEMU's clock in microseconds since 1970.
    #[must_use]
    pub fn resumed(&self) -> Option<(Instant, u64)> {
        *lock(&self.resumed)
    }

    /// Its disks, in order.
    #[must_use]
    pub fn disks(&self) -> Vec<Arc<Disk>> {
        lock(&self.disks).clone()
    }

    /// Replaces its disks.
    pub fn set_disks(&self, disks: Vec<Arc<Disk>>) {
        *lock(&self.disks) = disks;
    }

    /// A look at what is kept of its memory begins, or its sealing, and ends when what is returned is cancelled; an earlier one ends now.
    pub(crate) fn look(&self) -> CancellationToken {
        let looking = CancellationToken::new();
        std::mem::replace(&mut *lock(&self.looking), looking.clone()).cancel();
        looking
    }

    /// Nobody waits any more for what a look at what is kept may find, or for more to be kept.
    pub(crate) fn stop_looking(&self) {
        lock(&self.looking).cancel();
    }

    /// The move that it takes part in, or did last.
    #[must_use]
    pub fn moving(&self) -> Option<Arc<Moving>> {
        lock(&self.moving).clone()
    }

    /// The move of this number, if this VM takes or took part in it last.
    #[must_use]
    pub fn moving_as(&self, id: MoveId) -> Option<Arc<Moving>> {
        self.moving().filter(|m| m.ticket.mv == id)
    }

    pub(crate) fn tracker(&self) -> Option<Arc<Tracker>> {
        self.moving().map(|m| m.tracker.clone())
    }

    pub(crate) fn begin_move(&self, order: &MoveOrder, ticket: Ticket) {
        let heard_after = Duration::from_millis(order.ordered_ms_ago);
        let moving = Moving { heard_after, ..Moving::new(ticket, MoveRole::Source, order.to.clone()) };
        moving.tracker.update(|p| p.limit = order.limit);
        self.next_move(moving);
        if let Err(error) = self.change(|f| {
            f.peer = Some(order.to.clone());
            f.order = Some(order.clone());
        }) {
            tracing::error!(vm = self.name, %error, "cannot remember where the VM goes");
        }
    }

    /// Nothing of an earlier attempt goes on beside this one.
    fn next_move(&self, moving: Moving) {
        if let Some(before) = lock(&self.moving).replace(Arc::new(moving)) {
            before.over.cancel();
        }
    }

    pub(crate) fn begin_arrival(&self, ticket: Ticket, source: &PeerHost) {
        self.next_move(Moving::new(ticket, MoveRole::Destination, source.clone()));
        if let Err(error) = self.change(|f| {
            f.peer = Some(source.clone());
            f.power = Power::On;
        }) {
            tracing::error!(vm = self.name, %error, "cannot remember where the VM comes from");
        }
    }

    /// A node that was restarted in the middle of a hand-off goes on telling of it.
    pub(crate) fn recover_move(&self, record: Option<Record>) {
        let file = self.file();
        let (ticket, role, peer) = match record {
            Some(Record::Sealed(ticket) | Record::Released(ticket)) => {
                (ticket, MoveRole::Source, file.order.filter(|o| o.id == ticket.mv).map(|o| o.to))
            }
            Some(
                Record::Prepared(ticket) | Record::Granted(ticket) | Record::Draining(ticket) | Record::Started(ticket),
            ) => (ticket, MoveRole::Destination, file.peer),
            // Its disks were still following it.
            Some(Record::Owned(owner)) if self.disks().iter().any(|disk| disk.is_shadow()) => {
                match registry::last_noted(&self.folder) {
                    Some(noted)
                        if (noted.ticket.lineage, noted.ticket.generation) == (owner.lineage, owner.generation) =>
                    {
                        (noted.ticket, MoveRole::Destination, file.peer)
                    }
                    _ => return,
                }
            }
            _ => return,
        };
        let Some(peer) = peer else { return };
        let tracker = match registry::noted(&self.folder, ticket) {
            Some(progress) => Tracker::resume(progress),
            None if role == MoveRole::Destination => Tracker::new(),
            // Its QEMU may have pages that the guest over there waits for.
            None if matches!(record, Some(Record::Sealed(_))) => Tracker::new(),
            // The controller knows more of its figures than could be told here.
            None => return,
        };
        let goes_on = matches!(record, Some(Record::Owned(_)));
        let moving = Moving { tracker: Arc::new(tracker), goes_on, recovered: true, ..Moving::new(ticket, role, peer) };
        if matches!(record, Some(Record::Prepared(_) | Record::Draining(_))) {
            moving.follows.store(true, Ordering::Release);
        }
        // It would not be sealed if all of its memory had not been read.
        moving.ram_ended.cancel();
        *lock(&self.moving) = Some(Arc::new(moving));
    }

    /// Notes how a move stands, for a node that is restarted. Blocks for a moment.
    pub(crate) fn note(&self, moving: &Moving) {
        let noted = Noted { ticket: moving.ticket, progress: moving.tracker.get() };
        if let Err(error) = registry::note(&self.folder, &noted) {
            tracing::warn!(vm = self.name, %error, "the move's figures could not be noted");
        }
    }

    pub(crate) fn end_move(&self, outcome: Outcome, why: Option<String>) {
        if let Some(moving) = self.moving() {
            moving.end(outcome, why);
        }
    }

    /// Whether this is the attempt under way.
    pub(crate) fn takes_part_in(&self, moving: &Moving) -> bool {
        self.moving().is_some_and(|m| std::ptr::eq(Arc::as_ptr(&m), moving)) && !moving.over.is_cancelled()
    }

    pub(crate) fn cancelled(&self) -> bool {
        self.moving().is_some_and(|m| m.cancelled.load(Ordering::Relaxed))
    }

    /// Why a move from here was undone.
    pub(crate) fn why_undone(&self) -> (Outcome, String) {
        let why = self.moving().and_then(|m| lock(&m.why).clone());
        if self.cancelled() {
            (Outcome::Cancelled, "cancelled; the VM runs at the source".into())
        } else {
            (
                Outcome::Failed,
                why.unwrap_or_else(|| {
                    "the destination gave it up, or did not answer in time; the VM runs at the source".into()
                }),
            )
        }
    }

    /// Remembers why an effect failed, for whoever waits for it.
    pub fn fail(&self, error: ApiError) {
        tracing::warn!(vm = self.name, %error, "failed");
        lock(&self.failure).get_or_insert(error);
    }

    pub(crate) fn take_failure(&self) -> Option<ApiError> {
        lock(&self.failure).take()
    }
}
