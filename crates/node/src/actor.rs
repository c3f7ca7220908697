//! One VM's keeper: the shell around its hand-off machine.
//!
//! The machine ([`godwit_handoff::Machine`]) decides; this task feeds it and does what it says. Records and effects are two
//! queues that do not wait for each other, each in its own order: at most one record is being written and one effect is
//! being done at a time, as tasks whose results come back as events. Messages go out at once and may be lost. Nothing
//! else holds the machine, so there is nothing to lock.
//!
//! A record that cannot be written ends the process: nobody knows what is on the disk then, and the machine that
//! recovers from it after a restart does.

use crate::effects;
use crate::failpoint::{Point, reach};
use crate::keeping::{Timer, fatal, finished};
use crate::node::Node;
use crate::parts::Parts;
use crate::registry::Power;
use crate::tracker::Tracker;
use godwit_api::host::{MoveOrder, MoveRole, Ownership, PeerHost};
use godwit_api::progress::{NoteKind, Outcome, PhaseName};
use godwit_api::{ApiError, Problem};
use godwit_handoff::{
    Action, Body, CannotBegin, Destination, DestinationState, Event, Fenced, Ledger, Lineage, Machine, Message, Owner,
    Record, Seen, Source, SourceState, Status, There, Ticket, Upkeep, Verdict,
};
use godwit_units::VolumeId;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio::time::Instant;

/// Inputs that may wait for a VM's keeper. Effects and people are few; messages from the network are dropped when it is full.
const INBOX: usize = 256;
/// How long a source waits for the figures of the VM's start.
const LAST_FIGURES: Duration = Duration::from_secs(3);
/// What the source says of a move whose memory it lost.
const LOST_HERE: &str = "the VM's QEMU at the source ended while pages of its memory were only there: they are lost, and the VM stands still at the \
                         destination until it is started from its disks";
/// Between two tries to boot a VM that does not come up.
const BOOT_RETRY: Duration = Duration::from_secs(5);

/// An answer to somebody who asked.
pub type Reply<T> = oneshot::Sender<Result<T, ApiError>>;

/// What a keeper can be told.
#[derive(Debug)]
pub enum Input {
    /// Something happened to the VM.
    Event(Event),
    /// The guest powered itself off.
    PoweredOff,
    /// The guest has waited long for blocks that are elsewhere.
    Starves,
    /// Its QEMU made the guest stand still, because a write of it found no room.
    Stalled,
    /// The peer says something.
    Message {
        /// Who.
        from: String,
        /// What.
        message: Message,
    },
    /// A move is ordered; this host is its source.
    Begin {
        /// The order.
        order: Box<MoveOrder>,
        /// Answered when it was accepted.
        reply: Reply<()>,
    },
    /// The destination has a place for it, or has not.
    Reserved {
        /// For which attempt.
        ticket: Ticket,
        /// What it said.
        result: Result<(), ApiError>,
    },
    /// A source asks for a place; this host is the destination.
    Stage {
        /// For which attempt.
        ticket: Ticket,
        /// The source.
        source: Box<PeerHost>,
        /// Answered when everything is ready to receive.
        reply: Reply<()>,
    },
    /// The place is ready to receive.
    Ready,
    /// Boot it. Answered when it runs, or when the first try has failed.
    Start(Reply<()>),
    /// It did not come up; it is tried again.
    BootFailed(ApiError),
    /// Power it off.
    Stop {
        /// By pulling the plug.
        force: bool,
        /// Answered when it was told.
        reply: Reply<()>,
    },
    /// An operator takes the VM for this host.
    Claim {
        /// On this evidence.
        fenced: Fenced,
        /// Its disks are known to be whole, whatever its record says.
        whole: bool,
        /// Answered when it was taken up.
        reply: Reply<()>,
    },
    /// A claim elsewhere began this lineage.
    Outrank {
        /// The claim's.
        lineage: Lineage,
        /// Answered when that is durable here.
        reply: Reply<()>,
    },
    /// What its QEMU does is known at last.
    Known(Seen),
    /// Is the VM nobody's business here, so that it may be removed?
    MayRemove(Reply<()>),
    /// An image is to be copied into a volume. Answered with the VM's owner when it is off and stays so.
    Import {
        /// The volume.
        volume: VolumeId,
        /// See above.
        reply: Reply<Owner>,
    },
}

/// How others reach a keeper.
#[derive(Clone, Debug)]
pub struct Handle {
    inbox: mpsc::Sender<Input>,
}

impl Handle {
    /// Tells the keeper; waits while its inbox is full.
    pub async fn tell(&self, input: Input) {
        // A keeper ends only with the node.
        let _ = self.inbox.send(input).await;
    }

    /// Tells the keeper unless it is too busy: for what may be lost.
    pub fn try_tell(&self, input: Input) {
        let _ = self.inbox.try_send(input);
    }

    /// Asks the keeper.
    ///
    /// # Errors
    /// What it says; or that the node ends.
    pub async fn ask<T>(&self, input: impl FnOnce(Reply<T>) -> Input) -> Result<T, ApiError> {
        let (reply, answer) = oneshot::channel();
        self.tell(input(reply)).await;
        answer.await.unwrap_or_else(|_| Err(ApiError::new(Problem::Unreachable, "the node is ending")))
    }
}

/// What others may see of the machine without asking.
#[derive(Clone, Copy, Debug)]
pub struct View {
    /// Whose the VM is.
    pub ownership: Ownership,
    /// As whom this host owns it, or last did.
    pub owner: (u64, u64),
    /// The newest owner that there was, as far as this host knows: one that it was to become and did not never was any.
    pub newest: (u64, u64),
    /// The attempt under way.
    pub ticket: Option<Ticket>,
}

/// The task.
#[derive(Debug)]
pub struct Actor {
    node: Arc<Node>,
    parts: Arc<Parts>,
    inbox: mpsc::Receiver<Input>,
    /// None while the VM is off, or was never here.
    machine: Option<Machine>,
    /// The last durable record.
    record: Option<Record>,
    records: VecDeque<Record>,
    writing: Option<JoinHandle<Record>>,
    effects: VecDeque<Action>,
    doing: Option<JoinHandle<Option<Event>>>,
    timer: Timer,
    /// Whoever waits for a place to be ready.
    staging: Option<Reply<()>>,
    /// Whoever waits for it to run. As many as people who ask.
    starting: Vec<Reply<()>>,
    /// Whoever waits until the VM is off.
    leaving: Vec<Reply<()>>,
    /// The order that a place is being looked for.
    reserving: Option<(Ticket, Box<MoveOrder>)>,
    /// Somebody wants it off, or the guest did it.
    powering_off: bool,
    /// Nobody knows what its QEMU does: there is no machine, and nothing is done, until that is known.
    blind: bool,
    /// What its QEMU was worth when a destination was claimed: it did not run, as that of one that has arrived does.
    claimed: Option<Seen>,
    /// Whoever waits for a claim elsewhere to be durable here.
    outranking: Option<Reply<()>>,
}

impl Actor {
    /// Starts the keeper of a VM. `record` is the VM's durable record, `seen` what its QEMU does.
    pub fn spawn(node: Arc<Node>, parts: Arc<Parts>, record: Option<Record>, seen: Seen) -> Handle {
        Self::spawn_seeing(node, parts, record, Some(seen))
    }

    /// As [`Actor::spawn`], where nobody knows what its QEMU does. It waits for [`Input::Known`].
    pub fn spawn_blind(node: Arc<Node>, parts: Arc<Parts>, record: Option<Record>) -> Handle {
        Self::spawn_seeing(node, parts, record, None)
    }

    fn spawn_seeing(node: Arc<Node>, parts: Arc<Parts>, record: Option<Record>, seen: Option<Seen>) -> Handle {
        let (sender, inbox) = mpsc::channel(INBOX);
        let handle = Handle { inbox: sender };
        parts.introduce(handle.clone());
        let machine = seen.and_then(|seen| recovered(&parts, record, seen));
        let mut actor = Self {
            node,
            parts,
            inbox,
            machine,
            record,
            records: VecDeque::new(),
            writing: None,
            effects: VecDeque::new(),
            doing: None,
            timer: Timer::new(),
            staging: None,
            starting: vec![],
            leaving: vec![],
            reserving: None,
            powering_off: false,
            blind: seen.is_none(),
            claimed: None,
            outranking: None,
        };
        if !actor.blind && actor.machine.is_none() && !actor.ends_what_is_left() {
            let (node, parts) = (actor.node.clone(), actor.parts.clone());
            actor.doing = Some(crate::trace::spawn(async move {
                crate::fill::while_off(&node, &parts).await;
                None
            }));
        }
        tokio::spawn(async move {
            actor.poll();
            actor.live().await;
        });
        handle
    }

    /// A node that died while a VM was being powered off has left it half off: it is off, so its QEMU goes. Whether there is one.
    fn ends_what_is_left(&mut self) -> bool {
        let left =
            self.machine.is_none() && matches!(self.record, Some(Record::Owned(_))) && self.parts.qemu().is_some();
        if left {
            tracing::warn!(vm = %self.parts.name, "it is to be off, and its QEMU is still there: that ends");
            self.effects.extend([Action::Close, Action::Quit]);
        }
        left
    }

    async fn live(&mut self) {
        loop {
            self.publish();
            let timer = self.timer;
            let input = tokio::select! {
                biased;
                written = finished(&mut self.writing) => {
                    let Ok(written) = written else { return std::future::pending().await };
                    let Some(record) = written else { fatal("the writer of records panicked") };
                    crate::trace::span(&self.parts).in_scope(|| self.written(record));
                    continue;
                }
                done = finished(&mut self.doing) => {
                    let Ok(done) = done else { return std::future::pending().await };
                    let _in = crate::trace::span(&self.parts).entered();
                    self.work();
                    match done {
                        Some(Some(event)) => self.feed(event),
                        Some(None) => {}
                        None => fatal("an effect of the hand-off panicked"),
                    }
                    continue;
                }
                () = timer.due() => {
                    self.timer.clear();
                    crate::trace::span(&self.parts).in_scope(|| self.feed(Event::Timer));
                    continue;
                }
                input = self.inbox.recv() => input,
            };
            let Some(input) = input else { return };
            crate::trace::span(&self.parts).in_scope(|| self.hear(input));
        }
    }

    fn hear(&mut self, input: Input) {
        if self.blind && !matches!(input, Input::Known(_)) {
            return self.refuse(input);
        }
        match input {
            Input::Known(seen) => {
                if std::mem::take(&mut self.blind) {
                    self.machine = recovered(&self.parts, self.record, seen);
                    self.ends_what_is_left();
                    self.poll();
                    self.settle();
                }
            }
            Input::Event(event) => self.feed(event),
            Input::PoweredOff => {
                self.powering_off = true;
                if matches!(&self.machine, Some(Machine::Source(s)) if !is_owning(s)) {
                    // Whatever is under way ends first; past the seal this is a question to the destination.
                    self.feed(Event::Cancel);
                }
                self.settle();
            }
            Input::Starves => {
                // Whatever is under way with it goes first; it is said again where that leaves it starving.
                let moving =
                    matches!(&self.machine, Some(Machine::Source(s)) if !is_owning(s)) || self.reserving.is_some();
                if self.runs() && !moving && self.doing.is_none() && self.effects.is_empty() {
                    let (node, parts) = (self.node.clone(), self.parts.clone());
                    self.doing = Some(crate::trace::spawn(async move {
                        crate::fill::stand_still(&node, &parts).await;
                        None
                    }));
                }
            }
            Input::Message { from, message } => {
                let peer = self.parts.file().peer.map(|p| p.name.to_string());
                let reserving = self.reserving.as_ref().is_some_and(|(ticket, _)| *ticket == message.ticket);
                if reserving && message.body == Body::Pending {
                    // The place that we asked for, and do mean: the machine learns of it when the place is ready.
                } else if peer.as_deref() == Some(&from) {
                    match (&self.machine, self.record) {
                        (None, Some(Record::Owned(owner))) => self.answer_at_rest(owner, message),
                        _ => self.feed(Event::Message(message)),
                    }
                } else {
                    tracing::warn!(vm = %self.parts.name, from, ?message, "a host that has no part in it speaks of the hand-off");
                }
            }
            Input::Begin { order, reply } => {
                let _ = reply.send(self.begin(order));
            }
            Input::Reserved { ticket, result } => self.reserved(ticket, result),
            Input::Stage { ticket, source, reply } => self.stage(ticket, *source, reply),
            Input::Ready => self.answer_staging(Ok(())),
            Input::Start(reply) => match self.start() {
                Ok(()) if !self.runs() => self.starting.push(reply),
                Ok(()) => {
                    let (node, parts) = (self.node.clone(), self.parts.clone());
                    crate::trace::spawn(async move {
                        let _ = reply.send(effects::go_on_at_once(&node, &parts).await);
                    });
                }
                other => drop(reply.send(other)),
            },
            Input::Stalled => {
                let (node, parts) = (self.node.clone(), self.parts.clone());
                crate::trace::spawn(async move { effects::go_on_when_it_can(&node, &parts).await });
            }
            Input::BootFailed(error) => {
                let (name, message) = (&self.parts.name, &error.message);
                let error = ApiError::new(error.problem, format!("`{name}` does not come up: {message}"))
                    .remedy(format!("it is tried again every {} s; stop it if that is in vain", BOOT_RETRY.as_secs()));
                self.answer_starting(&Err(error));
            }
            Input::Stop { force, reply } => self.stop(force, reply),
            Input::Claim { fenced, whole, reply } => {
                let answer = self.claim(fenced, whole);
                let _ = reply.send(answer);
            }
            Input::Outrank { lineage, reply } => self.outrank(lineage, reply),
            Input::MayRemove(reply) => {
                let _ = reply.send(self.may_remove());
            }
            Input::Import { volume, reply } => {
                let _ = reply.send(self.import(volume));
            }
        }
    }

    /// A VM that is off has no machine; a destination that asks about a move that it was to make hears all the same that it does not.
    fn answer_at_rest(&self, owner: Owner, message: Message) {
        let mut source = Source::at_rest(owner);
        let _ = source.handle(Event::Message(message));
        while let Some(action) = source.poll_action() {
            if let Action::Send(message) = action {
                self.node.send(&self.parts, message);
            }
        }
    }

    /// Answers whoever asks while nothing can be done. What is not a question is dropped: the peer asks again.
    fn refuse(&self, input: Input) {
        let name = &self.parts.name;
        let error = || {
            ApiError::new(Problem::Conflict, format!("nobody knows whether the QEMU of `{name}` runs"))
                .remedy("see the node's log; it is looked for again every few seconds")
        };
        match input {
            Input::Begin { reply, .. }
            | Input::Stage { reply, .. }
            | Input::Start(reply)
            | Input::Stop { reply, .. }
            | Input::Claim { reply, .. }
            | Input::Outrank { reply, .. }
            | Input::MayRemove(reply) => drop(reply.send(Err(error()))),
            Input::Import { reply, .. } => drop(reply.send(Err(error()))),
            _ => {}
        }
    }

    /// Gives the machine an event and does what it says.
    fn feed(&mut self, event: Event) {
        let Some(machine) = &mut self.machine else { return };
        let before = machine.describe();
        let timer = matches!(event, Event::Timer);
        let died = matches!(event, Event::QemuDied);
        let ran = matches!(event, Event::Ran);
        let said = format!("{event:?}");
        let fact = crate::trace::fact(&before, &event);
        let verdict = machine.handle(event);
        match verdict {
            Verdict::Taken => {
                let after = machine.describe();
                if let (Some(moving), Some(text)) = (self.parts.moving(), fact) {
                    moving.note(NoteKind::HandOff, text);
                }
                if let (Some(moving), Some(text)) = (self.parts.moving(), crate::trace::transition(&before, &after)) {
                    moving.note(NoteKind::HandOff, text);
                }
                tracing::debug!(vm = %self.parts.name, event = said, before, after, "hand-off");
                self.timer.taken(timer);
            }
            Verdict::Ignored(why) => {
                tracing::debug!(vm = %self.parts.name, event = said, state = before, %why, "hand-off: ignored");
            }
        }
        if ran {
            self.answer_starting(&Ok(()));
        }
        if died && self.staging.is_some() {
            let lost = || ApiError::new(Problem::Failed, "the place at the destination was lost");
            let why = self.parts.take_failure().unwrap_or_else(lost);
            self.answer_staging(Err(why));
        }
        self.poll();
        self.settle();
    }

    /// Takes what the machine wants done.
    fn poll(&mut self) {
        while let Some(action) = self.machine.as_mut().and_then(Machine::poll_action) {
            match action {
                Action::Persist(record) => self.records.push_back(record),
                Action::Send(message) => self.node.send(&self.parts, message),
                Action::SetTimer => self.timer.set(),
                Action::AbortMigration => {
                    // At once: an effect before it may be waiting for the stream that is given up here.
                    if let Some(moving) = self.parts.moving() {
                        moving.over.cancel();
                    }
                    self.effects.push_back(Action::AbortMigration);
                }
                effect => self.effects.push_back(effect),
            }
        }
        self.work();
        self.note_progress();
    }

    /// Begins the next record and the next effect, where none is under way.
    fn work(&mut self) {
        if self.writing.is_none()
            && let Some(record) = self.records.pop_front()
        {
            let (node, vm) = (self.node.clone(), self.parts.id);
            let arriving = matches!(self.machine, Some(Machine::Destination(_)));
            self.writing = Some(crate::trace::spawn_blocking(move || {
                match record {
                    Record::Sealed(_) => reach(Point::Sealing, vm),
                    Record::Granted(_) => reach(Point::Commit, vm),
                    Record::Released(_) => reach(Point::Releasing, vm),
                    Record::Owned(_) if arriving => reach(Point::Settling, vm),
                    _ => {}
                }
                if let Err(error) = node.ledger().store(vm, &record) {
                    fatal(&format!("a record of the hand-off cannot be written: {error}"));
                }
                match record {
                    Record::Staged(_) => reach(Point::Staged, vm),
                    Record::Prepared(_) => reach(Point::Prepared, vm),
                    Record::Sealed(_) => reach(Point::Sealed, vm),
                    Record::Granted(_) => reach(Point::Granted, vm),
                    _ => {}
                }
                record
            }));
        }
        if self.doing.is_none() && !self.effects.contains(&Action::Quit) {
            for reply in std::mem::take(&mut self.leaving) {
                let _ = reply.send(Ok(()));
            }
        }
        if self.doing.is_none()
            && let Some(action) = self.effects.pop_front()
        {
            let arriving = matches!(self.machine, Some(Machine::Destination(_)));
            let (node, parts) = (self.node.clone(), self.parts.clone());
            self.doing =
                Some(crate::trace::spawn(async move { effects::perform(&node, &parts, action, arriving).await }));
        }
    }

    fn written(&mut self, record: Record) {
        self.record = Some(record);
        if matches!(record, Record::Outranked { .. })
            && let Some(reply) = self.outranking.take()
        {
            let _ = reply.send(Ok(()));
        }
        self.work();
        self.feed(Event::Persisted(record));
    }

    /// Where the machine has come to rest: a destination becomes an owner, a VM that is to be off goes off.
    fn settle(&mut self) {
        if let Some(Machine::Destination(d)) = &self.machine
            && let DestinationState::Settled { owner } = d.state()
        {
            // The move itself ends when its network is proved, in `incoming::runs`.
            let record = Record::Owned(*owner);
            let seen = self.claimed.take().unwrap_or(Seen::Running);
            self.machine = Some(Machine::recover(record, seen));
            self.poll();
        }
        if let Some(Machine::Destination(d)) = &self.machine
            && matches!(d.state(), DestinationState::Refused { .. } | DestinationState::Returned { .. })
        {
            self.parts.end_move(Outcome::Failed, Some("the move was taken back; the VM runs at the source".into()));
            if self.staging.is_some() {
                let error = self.parts.take_failure().unwrap_or_else(|| {
                    ApiError::new(Problem::Failed, format!("{} could not make a place for the VM", self.node.name()))
                });
                self.answer_staging(Err(error));
            }
        }
        if self.powering_off && matches!(&self.machine, Some(Machine::Source(s)) if is_owning(s)) {
            self.powering_off = false;
            self.machine = None;
            self.effects.clear();
            self.effects.extend([Action::Close, Action::Quit]);
            self.parts.set_power(Power::Off);
            self.answer_starting(&Err(ApiError::new(Problem::Conflict, format!("`{}` was stopped", self.parts.name))));
            self.parts.end_move(Outcome::Failed, Some("the guest powered off".into()));
            self.work();
        }
    }

    /// What the machine's state says about the move.
    fn note_progress(&self) {
        let Some(tracker) = self.parts.tracker() else { return };
        match &self.machine {
            // One that has arrived owns the VM, too: its move ends when its network is proved.
            Some(Machine::Source(s)) if self.parts.moving().is_some_and(|m| m.role == MoveRole::Source) => {
                self.note_source(s, &tracker);
            }
            Some(Machine::Source(_)) => {}
            Some(Machine::Destination(d)) => match d.state() {
                DestinationState::Granting { .. } | DestinationState::Granted { .. } => {
                    tracker.enter(PhaseName::HandOff)
                }
                DestinationState::Draining { there, .. } => self.note_draining(*there, &tracker),
                DestinationState::Abandoning { .. } => self.abandoned(),
                DestinationState::Started { .. } if tracker.phase() < PhaseName::Release => {
                    tracker.enter(PhaseName::Release);
                }
                _ => {}
            },
            None => {}
        }
    }

    fn note_source(&self, source: &Source, tracker: &Tracker) {
        match source.state() {
            SourceState::Sealing { .. } => tracker.enter(PhaseName::HandOff),
            SourceState::Sealed { .. } if self.timer.is_slow() => tracker.update(|p| {
                p.outcome = Outcome::WaitsForPeer;
                p.error = Some(
                    "sealed, and the destination is not heard: the VM is paused on both sides until it is, or until one side is claimed"
                        .into(),
                );
            }),
            SourceState::Sealed { .. } => tracker.update(|p| {
                p.outcome = Outcome::Running;
                p.error = None;
            }),
            SourceState::Draining { .. } => {
                tracker.update(|p| {
                    p.outcome = Outcome::Running;
                    p.error = None;
                });
                if tracker.phase() < PhaseName::Drain {
                    tracker.enter(PhaseName::Drain);
                }
                if self.parts.qemu().is_none() && !tracker.ended() {
                    self.parts.end_move(Outcome::MemoryLost, Some(LOST_HERE.into()));
                }
            }
            SourceState::Releasing { .. } => {
                tracker.update(|p| {
                    p.outcome = Outcome::Running;
                    p.error = None;
                });
                tracker.enter(PhaseName::Release);
            }
            SourceState::Released { .. } => self.released(),
            SourceState::Owning { .. } if self.reserving.is_none() && !tracker.ended() => {
                // Back with the VM in our hands, and not because of a Begin: the move was undone.
                let (outcome, why) = self.parts.why_undone();
                self.parts.end_move(outcome, Some(why));
            }
            _ => {}
        }
    }

    /// The guest runs here while its memory follows, or stands still because that is lost.
    fn note_draining(&self, there: There, tracker: &Tracker) {
        if tracker.ended() {
            return;
        }
        if tracker.phase() < PhaseName::Drain {
            tracker.enter(PhaseName::Drain);
        }
        let (name, peer) = (&self.parts.name, self.parts.file().peer.map(|p| p.name.to_string()).unwrap_or_default());
        if there == There::Lost {
            let why = format!(
                "`{peer}` has lost the pages of memory that `{name}` still needed: it stands still; `godwit vm start {name}` starts it from its \
                 disks, as after a power failure"
            );
            tracing::error!(vm = %name, "{why}");
            self.parts.end_move(Outcome::MemoryLost, Some(why));
        } else if self.timer.is_slow() {
            tracker.update(|p| {
                p.outcome = Outcome::WaitsForPeer;
                p.error = Some(format!(
                    "`{name}` waits for pages of its memory that only `{peer}` has, and that is not heard; it goes on when that is back. If that \
                     is lost for good, claim the VM here, and it starts from its disks"
                ));
            });
        } else {
            tracker.update(|p| {
                p.outcome = Outcome::Running;
                p.error = None;
            });
        }
    }

    /// Its memory is gone, and it boots from its disks.
    fn abandoned(&self) {
        let open = self.parts.moving().is_some_and(|moving| !moving.tracker.ended());
        if open {
            let why = "its QEMU ended before all of its memory had come; it was started from its disks, as after a power failure";
            self.parts.end_move(Outcome::MemoryLost, Some(why.into()));
        }
    }

    /// The VM runs elsewhere. The figures of its start are on their way, if that host still has them.
    fn released(&self) {
        let Some(moving) = self.parts.moving().filter(|m| !m.tracker.ended()) else { return };
        crate::trace::spawn(async move {
            let deadline = Instant::now() + LAST_FIGURES;
            while moving.tracker.get().downtime_ms.is_none() && Instant::now() < deadline {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            moving.end(Outcome::Completed, None);
        });
    }

    /// Lets others see where the machine stands.
    fn publish(&self) {
        let status = match (&self.machine, self.record) {
            (Some(machine), _) => machine.status(),
            (None, Some(Record::Owned(_))) => Status::Runs,
            (None, Some(_)) if self.blind => Status::WaitsForPeer,
            (None, _) => Status::NotHere,
        };
        let ticket = match &self.machine {
            Some(Machine::Source(s)) => match *s.state() {
                SourceState::Beginning { ticket, .. }
                | SourceState::Copying { ticket, .. }
                | SourceState::Stopped { ticket, .. }
                | SourceState::Sealing { ticket, .. }
                | SourceState::Sealed { ticket, .. }
                | SourceState::Draining { ticket } => Some(ticket),
                _ => self.reserving.as_ref().map(|(ticket, _)| *ticket),
            },
            Some(Machine::Destination(d)) => match *d.state() {
                DestinationState::Staging { ticket }
                | DestinationState::Staged { ticket }
                | DestinationState::Loaded { ticket }
                | DestinationState::Preparing { ticket }
                | DestinationState::Prepared { ticket }
                | DestinationState::Granting { ticket }
                | DestinationState::Granted { ticket, .. }
                | DestinationState::Starting { ticket, .. }
                | DestinationState::Draining { ticket, .. }
                | DestinationState::Finishing { ticket, .. }
                | DestinationState::Abandoning { ticket }
                | DestinationState::Started { ticket, .. } => Some(ticket),
                _ => None,
            },
            None => None,
        };
        let owner = match self.record {
            Some(Record::Owned(owner)) => (owner.lineage.0, owner.generation.0),
            Some(
                Record::Sealed(t)
                | Record::Released(t)
                | Record::Staged(t)
                | Record::Prepared(t)
                | Record::Granted(t)
                | Record::Draining(t)
                | Record::Started(t)
                | Record::Refused(t)
                | Record::Returned(t),
            ) => (t.lineage.0, t.generation.0),
            Some(Record::Outranked { lineage, .. }) => (lineage.0, 0),
            None => (0, 0),
        };
        let newest = match self.record {
            Some(Record::Staged(t) | Record::Prepared(t) | Record::Refused(t)) => {
                (t.lineage.0, t.generation.0.saturating_sub(1))
            }
            _ => owner,
        };
        if status == Status::Lends
            && let Some(moving) = self.parts.moving()
        {
            moving.gone.cancel();
        }
        self.parts.publish(View {
            ownership: match status {
                Status::Runs => Ownership::Here,
                Status::Pausing => Ownership::Pausing,
                Status::WaitsForPeer | Status::Lends => Ownership::WaitsForPeer,
                // It is nobody else's.
                Status::MemoryLost => Ownership::Here,
                Status::NotHere => Ownership::Elsewhere,
            },
            owner,
            newest,
            ticket,
        });
    }

    fn begin(&mut self, order: Box<MoveOrder>) -> Result<(), ApiError> {
        let Some(Machine::Source(source)) = &self.machine else {
            return Err(self.not_running());
        };
        if self.reserving.is_some() {
            return Err(ApiError::new(Problem::Conflict, format!("a move of `{}` is being prepared", self.parts.name))
                .remedy("wait for it, or cancel it"));
        }
        let ticket = source.next_ticket(order.id).map_err(|e| cannot_begin(&self.parts.name, e))?;
        // The proof of an owner that took the VM back is the order that it had: another one takes its place.
        crate::covered::keep_held(self.node.credentials(), &self.parts).map_err(|error| {
            ApiError::new(
                Problem::Failed,
                format!("cannot write down by what right `{}` is here: {error}", self.parts.name),
            )
        })?;
        self.parts.begin_move(&order, ticket);
        let _in = crate::trace::span(&self.parts).entered();
        let (node, parts) = (self.node.clone(), self.parts.clone());
        let copy = order.clone();
        self.reserving = Some((ticket, order));
        crate::trace::spawn(async move {
            let result = crate::outgoing::reserve(&node, &parts, &copy, ticket).await;
            parts.keeper().tell(Input::Reserved { ticket, result }).await;
        });
        Ok(())
    }

    fn reserved(&mut self, ticket: Ticket, result: Result<(), ApiError>) {
        let Some((_, order)) = self.reserving.take_if(|(t, _)| *t == ticket) else { return };
        let begun = result.and_then(|()| match &mut self.machine {
            _ if self.parts.cancelled() => Err(ApiError::new(Problem::Conflict, "cancelled before it began")),
            Some(Machine::Source(source)) => {
                source.begin(order.id).map_err(|e| cannot_begin(&self.parts.name, e)).and_then(|got| {
                    // The machine may have moved on meanwhile; the destination staged another attempt then.
                    if got == ticket {
                        Ok(())
                    } else {
                        Err(ApiError::new(Problem::Conflict, "the VM changed hands meanwhile"))
                    }
                })
            }
            _ => Err(self.not_running()),
        });
        match begun {
            Ok(()) => self.poll(),
            Err(error) => {
                let outcome = if self.parts.cancelled() { Outcome::Cancelled } else { Outcome::Failed };
                self.parts.end_move(outcome, Some(error.to_string()));
            }
        }
    }

    fn stage(&mut self, ticket: Ticket, source: PeerHost, reply: Reply<()>) {
        let staged = match Destination::stage(self.record, ticket) {
            Ok(staged) if self.writing.is_none() && self.records.is_empty() => staged,
            Ok(_) => {
                let _ = reply
                    .send(Err(ApiError::new(Problem::Conflict, "an earlier hand-off is being written; ask again")));
                return;
            }
            Err(e) => {
                let _ = reply.send(Err(cannot_begin(&self.parts.name, e)));
                return;
            }
        };
        self.parts.begin_arrival(ticket, &source);
        let _in = crate::trace::span(&self.parts).entered();
        self.staging = Some(reply);
        self.machine = Some(Machine::Destination(staged));
        self.timer.clear();
        self.poll();
    }

    fn answer_starting(&mut self, result: &Result<(), ApiError>) {
        for reply in self.starting.drain(..) {
            // Whoever asked may have gone.
            let _ = reply.send(result.clone());
        }
    }

    fn answer_staging(&mut self, result: Result<(), ApiError>) {
        if let Some(reply) = self.staging.take() {
            let _ = reply.send(result);
        }
    }

    /// The VM stays off from here on, over restarts, until its image is whole.
    fn import(&self, volume: VolumeId) -> Result<Owner, ApiError> {
        let name = &self.parts.name;
        let Some(Record::Owned(owner)) = self.record else { return Err(self.not_here()) };
        let idle = self.writing.is_none() && self.records.is_empty() && self.doing.is_none() && self.effects.is_empty();
        if self.machine.is_some() || !idle || self.parts.qemu().is_some() {
            return Err(ApiError::new(Problem::Conflict, format!("`{name}` is not off"))
                .remedy(format!("`godwit vm stop {name}` first")));
        }
        crate::image::may_import(&self.parts, volume)?;
        let noted = self.parts.change(|file| file.importing = Some(volume));
        noted.map_err(|e| ApiError::new(Problem::Failed, format!("cannot write down that `{name}` stays off: {e}")))?;
        self.parts.importing.store(true, Ordering::Relaxed);
        Ok(owner)
    }

    fn start(&mut self) -> Result<(), ApiError> {
        crate::image::may_start(&self.parts)?;
        match (&self.machine, self.record) {
            (Some(Machine::Source(s)), _) if is_owning(s) => Ok(()),
            (Some(machine), _) if machine.status() == Status::MemoryLost => {
                tracing::warn!(vm = %self.parts.name, "its memory is given up: it starts from its disks");
                self.feed(Event::Abandon);
                Ok(())
            }
            (None, record) => {
                // A VM that was just defined has no record yet: this host is its first owner.
                let owner = match record {
                    Some(Record::Owned(owner)) => owner,
                    None => Owner::first(self.parts.id),
                    Some(_) => return Err(self.not_here()),
                };
                self.parts.set_power(Power::On);
                self.machine = Some(Machine::recover(Record::Owned(owner), Seen::Gone));
                self.poll();
                Ok(())
            }
            _ => Err(self.not_here()),
        }
    }

    fn stop(&mut self, force: bool, reply: Reply<()>) {
        match &self.machine {
            None => {
                self.leaving.push(reply);
                self.work();
            }
            // Without a QEMU there is nobody to ask: it is being booted, perhaps in vain.
            Some(Machine::Source(s)) if is_owning(s) && (force || self.parts.qemu().is_none()) => {
                self.powering_off = true;
                self.settle();
                self.leaving.push(reply);
                self.work();
            }
            Some(Machine::Source(s)) if is_owning(s) => {
                let parts = self.parts.clone();
                crate::trace::spawn(async move {
                    let _ = reply.send(effects::press_power_button(&parts).await);
                });
            }
            _ => {
                let _ =
                    reply.send(Err(ApiError::new(Problem::Conflict, format!("`{}` is being moved", self.parts.name))
                        .remedy("wait for the move, or cancel it")));
            }
        }
    }

    /// Takes the VM although nobody has handed it over. What it lacks here is looked at first: a half copied disk is no VM.
    fn claim(&mut self, fenced: Fenced, whole: bool) -> Result<(), ApiError> {
        let name = self.parts.name.clone();
        if self.writing.is_some() || !self.records.is_empty() || self.doing.is_some() {
            return Err(
                ApiError::new(Problem::Conflict, format!("something is being done with `{name}`")).remedy("ask again")
            );
        }
        if !whole {
            crate::claim::is_whole(&name, self.record, &self.parts.disks())?;
        }
        if whole && self.machine.is_none() && self.record.is_none() {
            // Known here without a record, as after a place that was never taken. The promotion wrote this one.
            let nothing = Record::Outranked { vm: self.parts.id, lineage: fenced.newest };
            self.record = Some(nothing);
            self.machine = Some(Machine::recover(nothing, Seen::Gone));
        }
        let Some(machine) = &mut self.machine else { return Err(self.not_running()) };
        let seen = match machine {
            Machine::Destination(d) => match d.state() {
                DestinationState::Started { .. } => Seen::Running,
                DestinationState::Loaded { .. } => Seen::Loaded,
                _ => Seen::Gone,
            },
            Machine::Source(_) => Seen::Gone,
        };
        let drained = !matches!(machine, Machine::Destination(d)
            if matches!(d.state(), DestinationState::Prepared { .. } | DestinationState::Draining { .. }));
        let said = fenced.statement.clone();
        match machine.handle(Event::Claim(fenced)) {
            Verdict::Taken => {
                tracing::warn!(vm = name, fenced = said, "claimed for this host");
                self.parts.set_power(Power::On);
                if matches!(machine, Machine::Destination(_)) {
                    self.claimed = Some(seen);
                    let outcome = if drained { Outcome::NetworkUnproved } else { Outcome::MemoryLost };
                    self.parts.end_move(outcome, Some(format!("claimed here; the source: {said}")));
                } else if let Some(moving) = self.parts.moving() {
                    moving.failed(format!("claimed at the source; the destination: {said}"));
                }
                self.poll();
                self.settle();
                Ok(())
            }
            Verdict::Ignored(why) => {
                Err(ApiError::new(Problem::Conflict, format!("`{name}` cannot be claimed: {why}")))
            }
        }
    }

    /// A claim elsewhere has the VM. What is here stands still, and is kept: who was right is for people to say.
    fn outrank(&mut self, lineage: Lineage, reply: Reply<()>) {
        let name = &self.parts.name;
        let refusal = match self.record {
            _ if self.writing.is_some() || !self.records.is_empty() => {
                Some("a record is being written; ask again".into())
            }
            Some(record) => match record.overridden_by(self.parts.id, lineage) {
                None => Some(format!("what is here is of lineage {}", record.lineage().0)),
                Some(over) => {
                    tracing::error!(vm = %name, lineage = lineage.0, "claimed elsewhere: it stands still here from now on");
                    self.machine = None;
                    self.timer.clear();
                    self.effects.clear();
                    self.effects.push_back(Action::Close);
                    self.records.push_back(over);
                    None
                }
            },
            None => Some("it has no record here".into()),
        };
        if let Some(why) = refusal {
            let error = ApiError::new(Problem::Conflict, format!("`{name}` cannot be outranked: {why}"));
            let _ = reply.send(Err(error));
            return;
        }
        let parts = self.parts.clone();
        tokio::spawn(async move { effects::pause(&parts).await });
        self.parts.end_move(Outcome::Failed, Some("the VM was claimed elsewhere".into()));
        self.outranking = Some(reply);
        self.work();
    }

    fn may_remove(&self) -> Result<(), ApiError> {
        let idle = self.writing.is_none() && self.doing.is_none() && self.reserving.is_none();
        let over = match &self.machine {
            None => true,
            Some(Machine::Source(s)) => {
                matches!(s.state(), SourceState::Released { .. } | SourceState::Outranked { .. })
            }
            Some(Machine::Destination(d)) => matches!(
                d.state(),
                DestinationState::Refused { .. }
                    | DestinationState::Returned { .. }
                    | DestinationState::Outranked { .. }
            ),
        };
        if idle && over {
            return Ok(());
        }
        Err(ApiError::new(Problem::Conflict, format!("`{}` runs here, or is being moved", self.parts.name))
            .remedy("stop it first"))
    }

    fn runs(&self) -> bool {
        matches!(&self.machine, Some(Machine::Source(s)) if matches!(s.state(), SourceState::Owning { upkeep: Upkeep::Running, .. }))
    }

    fn not_running(&self) -> ApiError {
        match self.record {
            Some(Record::Owned(_)) | None => {
                ApiError::new(Problem::Conflict, format!("`{}` is off", self.parts.name)).remedy("start it first")
            }
            Some(_) => self.not_here(),
        }
    }

    fn not_here(&self) -> ApiError {
        ApiError::new(Problem::Conflict, format!("{} does not own `{}` now", self.node.name(), self.parts.name))
            .remedy("ask the host that does")
    }
}

/// The machine of a VM that was left with this record.
fn recovered(parts: &Parts, record: Option<Record>, seen: Seen) -> Option<Machine> {
    let power = parts.file().power;
    // An owned VM that is off has no machine; whatever else is open has to be finished whether it is off or not.
    let record = record.filter(|r| power == Power::On || !matches!(r, Record::Owned(_)));
    record.map(|record| Machine::recover(record, seen))
}

fn is_owning(source: &Source) -> bool {
    matches!(source.state(), SourceState::Owning { .. })
}

fn cannot_begin(vm: &str, why: CannotBegin) -> ApiError {
    ApiError::new(Problem::Conflict, format!("`{vm}`: {why}"))
}

/// How long to wait before a VM that did not come up is tried again.
#[must_use]
pub const fn boot_retry() -> Duration {
    BOOT_RETRY
}
