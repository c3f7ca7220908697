//! The source's side: owns the VM, seals it, and lets go when the destination has started.

use crate::evidence::Fenced;
use crate::guards::{Guard, Guards};
use crate::ids::Ticket;
use crate::io::{Action, Body, CannotBegin, Event, Message, OtherRole, PeerHistory, Run, Seen, Status, Verdict, Why};
use crate::outbox::Outbox;
use crate::record::{Owner, Ram, Record};
use godwit_units::{Lineage, MoveId, VmId};

/// Where the source stands.
///
/// ```text
///            begin            Persisted          VcpusStopped          ready: closed,
///  Owning ----------> Beginning ------> Copying -------------> Stopped  verified, postmigrate
///   ^  ^                  |                |                     |   |
///   |  +---- undo: Open, cont (cancel, failure, restart) --------+   v
///   |                                                             Sealing
///   |  Persisted                       Refused, Returned             |  Persisted SEALED(g)
///   +------------- Unsealing <---------------------------- Sealed <--+  then COMMIT or RECALL, for ever
///   |               OWNED(g+2)                               |
///   |                                                        | Started
///   |              Persisted                                 v
///   +------ Claiming <------ claim ------ Released <----- Releasing
///                    <------ claim ------ Sealed    Persisted RELEASED: Quit, Ack
///
///  With memory post-copy: PREPARED is heard instead of VERIFIED, and
///
///          Draining               Started
///  Sealed ----------> Draining ------------> Releasing       the QEMU here gives the pages that the guest over there lacks
///                         | claim
///                         v
///                     Claiming
///
///  Outranked(lineage) takes every state but the first row's to Yielding, and that to Outranked.
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SourceState {
    /// The VM is ours, and no move is under way.
    Owning {
        /// As what we own it.
        owner: Owner,
        /// How far it is up.
        upkeep: Upkeep,
    },
    /// The ticket is being used up durably; nothing was sent under it yet.
    Beginning {
        /// As what we own it, the ticket used.
        owner: Owner,
        /// The attempt.
        ticket: Ticket,
    },
    /// The guest runs while its memory is copied.
    Copying {
        /// As what we own it.
        owner: Owner,
        /// The attempt.
        ticket: Ticket,
    },
    /// The vCPUs are stopped. Until the seal, any failure leads back to `Owning`.
    Stopped {
        /// As what we own it.
        owner: Owner,
        /// The attempt.
        ticket: Ticket,
        /// What the seal still waits for.
        ready: Ready,
        /// How many more timers it waits.
        patience: u8,
    },
    /// SEALED is being written: nobody can tell whether it would survive a crash now, so nothing is decided.
    Sealing {
        /// The attempt.
        ticket: Ticket,
        /// What to ask for once sealed.
        asking: Asking,
    },
    /// The VM is the destination's for the taking.
    Sealed {
        /// The attempt.
        ticket: Ticket,
        /// What we ask for.
        asking: Asking,
    },
    /// The VM runs at the destination, and pages of its memory are only here.
    Draining {
        /// The attempt.
        ticket: Ticket,
    },
    /// The destination gave it up for ever; our ownership at g+2 is being written.
    Unsealing {
        /// Who we are once that is durable.
        owner: Owner,
        /// How the VM will run.
        run: Run,
    },
    /// The destination has started; RELEASED is being written.
    Releasing {
        /// The attempt.
        ticket: Ticket,
    },
    /// The VM is gone. We answer STARTED with an acknowledgement, and no more.
    Released {
        /// The attempt.
        ticket: Ticket,
    },
    /// A claim for this node is being written.
    Claiming {
        /// Who we are once that is durable.
        owner: Owner,
        /// How the VM will run.
        run: Run,
    },
    /// A claim elsewhere won; that is being written.
    Yielding {
        /// The VM.
        vm: VmId,
        /// The lineage of the claim.
        lineage: Lineage,
    },
    /// A claim elsewhere won.
    Outranked {
        /// The VM.
        vm: VmId,
        /// The lineage of the claim.
        lineage: Lineage,
    },
}

/// How far an owned VM is up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Upkeep {
    /// Export and endpoints are being opened.
    Opening(Run),
    /// The VM is being made to run.
    Starting,
    /// It runs.
    Running,
}

/// What the seal waits for: three facts, in any order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ready {
    /// The export refuses writes and the endpoints are isolated.
    pub closed: bool,
    /// The destination has everything, verified.
    pub verified: bool,
    /// QEMU cannot resume by itself.
    pub postmigrate: bool,
}

/// How many timers a stopped guest waits for its seal, while nothing of its memory gets through, before the source undoes the move. Before the seal the guest has to be
/// able to run at the source, so a destination that is not heard must not keep it paused; with timers of some hundred
/// milliseconds this is a few seconds, longer than any round trip that a live move makes sense over.
pub const PATIENCE: u8 = 8;

/// What a sealed source asks the destination for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asking {
    /// To take the VM.
    Commit,
    /// Not to, if it has not.
    Recall,
}

/// The source's machine for one VM.
///
/// Feed it with [`Source::begin`] and [`Source::handle`]; after each, do what [`Source::poll_action`] says, in that
/// order, until it says nothing.
#[derive(Clone, Debug)]
pub struct Source {
    state: SourceState,
    /// Whether the QEMU that held the VM's RAM is still there.
    qemu: Seen,
    out: Outbox,
    guards: Guards,
}

impl Source {
    /// The machine of a node after a restart, from its last durable record and what it finds of the QEMU.
    ///
    /// # Errors
    /// When the record is a destination's; [`crate::Destination::recover`] takes those.
    pub fn recover(record: Record, seen: Seen) -> Result<Self, OtherRole> {
        Self::recover_guarded(record, seen, Guards::ALL)
    }

    /// The owner of a VM that is off: it wants nothing done, and answers who asks about an attempt that came to nothing.
    #[must_use]
    pub fn at_rest(owner: Owner) -> Self {
        let state = SourceState::Owning { owner, upkeep: Upkeep::Running };
        Self { state, qemu: Seen::Gone, out: Outbox::default(), guards: Guards::ALL }
    }

    #[cfg(feature = "sabotage")]
    #[doc(hidden)]
    pub fn recover_with(record: Record, seen: Seen, guards: Guards) -> Result<Self, OtherRole> {
        Self::recover_guarded(record, seen, guards)
    }

    pub(crate) fn recover_guarded(record: Record, seen: Seen, guards: Guards) -> Result<Self, OtherRole> {
        let mut it = Self {
            state: SourceState::Outranked { vm: VmId(0), lineage: Lineage::FIRST },
            qemu: seen,
            out: Outbox::default(),
            guards,
        };
        it.state = match record {
            Record::Owned(owner) if guards.hold(Guard::RestartUndoes) => {
                // A QEMU that runs was booted since the claim: what is stale was paused, and could not resume.
                let stale = owner.ram == Ram::Stale && seen != Seen::Running;
                it.bring_up(owner, if stale { Run::Boot } else { it.run_what_is_left() })
            }
            Record::Owned(owner) => SourceState::Owning { owner, upkeep: Upkeep::Running },
            Record::Sealed(ticket) if guards.hold(Guard::SealedSurvivesRestart) => {
                it.out.push(Action::Close);
                it.ask(ticket, Asking::Commit);
                SourceState::Sealed { ticket, asking: Asking::Commit }
            }
            Record::Sealed(ticket) => it.bring_up(Owner::after_undoing(ticket), it.run_what_is_left()),
            Record::Released(ticket) => {
                it.out.push(Action::Close);
                it.quit();
                SourceState::Released { ticket }
            }
            Record::Outranked { vm, lineage } => {
                it.out.push(Action::Close);
                it.quit();
                SourceState::Outranked { vm, lineage }
            }
            Record::Staged(_)
            | Record::Prepared(_)
            | Record::Granted(_)
            | Record::Draining(_)
            | Record::Started(_)
            | Record::Refused(_)
            | Record::Returned(_) => return Err(OtherRole(record)),
        };
        Ok(it)
    }

    /// Where it stands.
    #[must_use]
    pub const fn state(&self) -> &SourceState {
        &self.state
    }

    /// Whether the VM runs here, in words for an operator.
    #[must_use]
    pub const fn status(&self) -> Status {
        match self.state {
            SourceState::Owning { .. }
            | SourceState::Beginning { .. }
            | SourceState::Copying { .. }
            | SourceState::Unsealing { .. }
            | SourceState::Claiming { .. } => Status::Runs,
            SourceState::Stopped { .. } => Status::Pausing,
            SourceState::Sealing { .. } | SourceState::Sealed { .. } => Status::WaitsForPeer,
            SourceState::Draining { .. } => Status::Lends,
            SourceState::Releasing { .. }
            | SourceState::Released { .. }
            | SourceState::Yielding { .. }
            | SourceState::Outranked { .. } => Status::NotHere,
        }
    }

    /// The ticket that [`Source::begin`] would use for `mv`: what the destination has to stage first.
    ///
    /// # Errors
    /// When the move cannot begin; see the variants.
    pub fn next_ticket(&self, mv: MoveId) -> Result<Ticket, CannotBegin> {
        match self.state {
            SourceState::Owning { owner, upkeep: Upkeep::Running } => {
                if self.guards.hold(Guard::TicketBurned) && owner.last.is_some_and(|last| mv <= last) {
                    return Err(CannotBegin::UsedTicket { mv });
                }
                Ok(owner.ticket(mv))
            }
            SourceState::Releasing { .. }
            | SourceState::Released { .. }
            | SourceState::Yielding { .. }
            | SourceState::Outranked { .. } => Err(CannotBegin::NotOwner),
            _ => Err(CannotBegin::Busy),
        }
    }

    /// Begins a move. The ticket is used up, whatever becomes of it.
    ///
    /// # Errors
    /// When the move cannot begin; nothing has changed then.
    pub fn begin(&mut self, mv: MoveId) -> Result<Ticket, CannotBegin> {
        let ticket = self.next_ticket(mv)?;
        let SourceState::Owning { owner, .. } = self.state else { return Err(CannotBegin::Busy) };
        let owner = Owner { last: Some(mv), ram: Ram::Current, ..owner };
        if self.guards.hold(Guard::TicketBurned) {
            self.out.push(Action::Persist(Record::Owned(owner)));
            self.state = SourceState::Beginning { owner, ticket };
        } else {
            self.out.push(Action::Migrate(ticket));
            self.state = SourceState::Copying { owner, ticket };
        }
        Ok(ticket)
    }

    /// What is to be done next.
    pub fn poll_action(&mut self) -> Option<Action> {
        self.out.pop()
    }

    /// Something happened.
    pub fn handle(&mut self, event: Event) -> Verdict {
        match self.step(event) {
            Ok(next) => {
                self.state = next;
                Verdict::Taken
            }
            Err(why) => Verdict::Ignored(why),
        }
    }

    /// The transitions. `Err` leaves the state as it was.
    fn step(&mut self, event: Event) -> Result<SourceState, Why> {
        use SourceState as S;
        self.note_qemu(&event);
        if let Event::Message(message) = event {
            return self.hear(message);
        }
        match (self.state, event) {
            // The owner keeps its VM up.
            (S::Owning { owner, upkeep: Upkeep::Opening(run) }, Event::Opened) => {
                self.out.push(Action::Run(run));
                Ok(S::Owning { owner, upkeep: Upkeep::Starting })
            }
            (S::Owning { owner, upkeep: Upkeep::Starting }, Event::Ran) => {
                Ok(S::Owning { owner, upkeep: Upkeep::Running })
            }
            (S::Owning { owner, .. } | S::Beginning { owner, .. }, Event::QemuDied) => {
                Ok(self.bring_up(owner, Run::Boot))
            }

            // The way to the seal, and the way back from before it.
            (S::Beginning { owner, ticket }, Event::Persisted(record)) if record == Record::Owned(owner) => {
                self.out.push(Action::Migrate(ticket));
                Ok(S::Copying { owner, ticket })
            }
            (S::Copying { owner, ticket }, Event::VcpusStopped) => {
                if self.guards.hold(Guard::SealAfterClosed) {
                    self.out.push(Action::Close);
                }
                if !self.guards.hold(Guard::SealAfterVerified) {
                    self.out.push(Action::AnswerShut);
                }
                self.out.push(Action::SetTimer);
                Ok(self.seal_when_ready(owner, ticket, Ready::default(), PATIENCE))
            }
            (S::Stopped { owner, ticket, ready, patience }, Event::Closed) => {
                Ok(self.seal_when_ready(owner, ticket, Ready { closed: true, ..ready }, patience))
            }
            (S::Stopped { owner, ticket, ready, patience }, Event::Postmigrate) => {
                Ok(self.seal_when_ready(owner, ticket, Ready { postmigrate: true, ..ready }, patience))
            }
            (S::Stopped { owner, ticket, patience: 0, .. }, Event::Timer)
                if self.guards.hold(Guard::StoppedGivesUp) =>
            {
                Ok(self.undo(owner, ticket, self.run_what_is_left()))
            }
            // It is heard. Where the link is thin and much was left that may take longer than a destination that is not.
            (S::Stopped { owner, ticket, ready, .. }, Event::Flowing) => {
                Ok(S::Stopped { owner, ticket, ready, patience: PATIENCE })
            }
            (S::Stopped { owner, ticket, ready, patience }, Event::Timer) => {
                self.out.push(Action::SetTimer);
                Ok(S::Stopped { owner, ticket, ready, patience: patience.saturating_sub(1) })
            }
            (S::Beginning { owner, ticket }, Event::Cancel)
            | (
                S::Copying { owner, ticket } | S::Stopped { owner, ticket, .. },
                Event::Cancel | Event::MigrationFailed,
            ) => Ok(self.undo(owner, ticket, self.run_what_is_left())),
            (S::Copying { owner, ticket } | S::Stopped { owner, ticket, .. }, Event::QemuDied) => {
                Ok(self.undo(owner, ticket, Run::Boot))
            }

            // The seal orders cancel against COMMIT.
            (S::Sealing { ticket, asking }, Event::Persisted(record)) if record == Record::Sealed(ticket) => {
                self.ask(ticket, asking);
                Ok(S::Sealed { ticket, asking })
            }
            (S::Sealing { ticket, .. } | S::Sealed { ticket, .. }, Event::Cancel)
                if !self.guards.hold(Guard::CancelAfterSealAsks) =>
            {
                let owner = Owner::after_undoing(ticket);
                self.out.push(Action::Persist(Record::Owned(owner)));
                Ok(S::Unsealing { owner, run: self.run_what_is_left() })
            }
            (S::Sealing { ticket, .. }, Event::Cancel) => Ok(S::Sealing { ticket, asking: Asking::Recall }),
            (S::Sealed { ticket, .. }, Event::Cancel) => {
                self.ask(ticket, Asking::Recall);
                Ok(S::Sealed { ticket, asking: Asking::Recall })
            }
            (S::Sealed { ticket, asking }, Event::Timer) if self.guards.hold(Guard::CommitRepeats) => {
                self.ask(ticket, asking);
                Ok(self.state)
            }

            // While pages follow the guest.
            (S::Draining { ticket }, Event::Timer) if self.guards.hold(Guard::CommitRepeats) => {
                self.ask(ticket, Asking::Commit);
                Ok(self.state)
            }
            (S::Draining { ticket }, Event::QemuDied) => {
                self.send(ticket, Body::Lost);
                Ok(self.state)
            }
            (S::Draining { .. }, Event::Cancel) => Err(Why::TooLate),

            // After the seal.
            (S::Unsealing { owner, run }, Event::Persisted(record)) if record == Record::Owned(owner) => {
                Ok(self.bring_up(owner, self.run_at_most(run)))
            }
            (S::Releasing { ticket }, Event::Persisted(record)) if record == Record::Released(ticket) => {
                self.quit();
                self.send(ticket, Body::Ack);
                Ok(S::Released { ticket })
            }

            // Claims.
            (S::Sealed { ticket, .. } | S::Draining { ticket } | S::Released { ticket }, Event::Claim(fenced)) => {
                self.claim(ticket.vm, ticket.lineage, &fenced)
            }
            (S::Outranked { vm, lineage }, Event::Claim(fenced)) => self.claim(vm, lineage, &fenced),
            (S::Claiming { owner, run }, Event::Persisted(record)) if record == Record::Owned(owner) => {
                Ok(self.bring_up(owner, self.run_at_most(run)))
            }
            (S::Yielding { vm, lineage }, Event::Persisted(record))
                if record == (Record::Outranked { vm, lineage }) =>
            {
                Ok(S::Outranked { vm, lineage })
            }

            // A QEMU that dies under a seal is noted (see note_qemu); nothing else follows from it now.
            (
                S::Sealing { .. } | S::Sealed { .. } | S::Unsealing { .. } | S::Releasing { .. } | S::Claiming { .. },
                Event::QemuDied,
            ) => Ok(self.state),

            (S::Owning { .. } | S::Beginning { .. } | S::Copying { .. } | S::Stopped { .. }, Event::Claim(_)) => {
                Err(Why::AlreadyOwner)
            }
            (S::Releasing { .. } | S::Released { .. }, Event::Cancel) => Err(Why::TooLate),
            (S::Yielding { .. }, Event::Claim(_)) | (S::Yielding { .. } | S::Outranked { .. }, Event::Cancel) => {
                Err(Why::Outranked)
            }
            (
                S::Sealing { .. } | S::Unsealing { .. } | S::Releasing { .. } | S::Claiming { .. },
                Event::Claim(_) | Event::Cancel,
            ) => Err(Why::Busy),
            (_, Event::Loaded | Event::Listens | Event::Drained | Event::Abandon) => Err(Why::WrongRole),
            (
                _,
                Event::Persisted(_)
                | Event::Opened
                | Event::Closed
                | Event::Ran
                | Event::Timer
                | Event::VcpusStopped
                | Event::Flowing
                | Event::Postmigrate
                | Event::MigrationFailed
                | Event::QemuDied
                | Event::Cancel
                | Event::Message(_),
            ) => Err(Why::NotNow),
        }
    }

    /// The transitions that messages cause.
    fn hear(&mut self, Message { ticket: theirs, body }: Message) -> Result<SourceState, Why> {
        use SourceState as S;
        if let Body::Outranked(lineage) = body {
            return self.yield_to(theirs.vm, lineage);
        }
        match (self.state, body) {
            // A node that owns a newer lineage says so to whoever still lives in an older one.
            (
                S::Owning { owner, .. }
                | S::Beginning { owner, .. }
                | S::Copying { owner, .. }
                | S::Stopped { owner, .. },
                _,
            ) if theirs.vm == owner.vm && theirs.lineage < owner.lineage && self.guards.hold(Guard::CheckLineage) => {
                if self.guards.hold(Guard::OlderLineageIsTold) {
                    self.send(theirs, Body::Outranked(owner.lineage));
                }
                Err(Why::OtherTicket)
            }
            // A staging that we do not mean, or no longer: it was never committed, or we would not own the VM.
            (S::Owning { .. }, Body::Pending | Body::Verified | Body::Prepared) => {
                self.withdraw(theirs, body);
                Err(Why::OtherTicket)
            }
            (
                S::Beginning { ticket, .. } | S::Copying { ticket, .. } | S::Stopped { ticket, .. },
                Body::Pending | Body::Verified | Body::Prepared,
            ) if !self.same(ticket, theirs) => {
                self.withdraw(theirs, body);
                Err(Why::OtherTicket)
            }

            (S::Stopped { owner, ticket, ready, patience }, Body::Verified) => {
                if ready.verified {
                    return Err(Why::AlreadyKnown);
                }
                if self.guards.hold(Guard::SealAfterVerified) {
                    self.out.push(Action::AnswerShut);
                }
                Ok(self.seal_when_ready(owner, ticket, Ready { verified: true, ..ready }, patience))
            }
            // What is left in QEMU here is needed from now on: it gets no SHUT.
            (S::Stopped { ready: Ready { verified: true, .. }, .. }, Body::Prepared) => Err(Why::AlreadyKnown),
            (S::Stopped { owner, ticket, ready, patience }, Body::Prepared) => {
                Ok(self.seal_when_ready(owner, ticket, Ready { verified: true, ..ready }, patience))
            }
            // The destination lost or dropped what it had: no use in going on.
            (
                S::Beginning { owner, ticket } | S::Copying { owner, ticket } | S::Stopped { owner, ticket, .. },
                Body::Refused,
            ) if self.same(ticket, theirs) => Ok(self.undo(owner, ticket, self.run_what_is_left())),

            // It will not refuse: there is no use in asking it to.
            (S::Sealed { ticket, .. }, Body::Prepared) if self.same(ticket, theirs) => {
                Ok(S::Sealed { ticket, asking: Asking::Commit })
            }
            (S::Sealed { ticket, .. } | S::Draining { ticket }, Body::Draining) if self.same(ticket, theirs) => {
                if self.qemu == Seen::Gone {
                    self.send(ticket, Body::Lost);
                }
                if matches!(self.state, S::Sealed { .. }) {
                    self.out.push(Action::SetTimer);
                }
                Ok(S::Draining { ticket })
            }
            (S::Sealed { ticket, .. }, Body::Granted) if self.same(ticket, theirs) => {
                if !self.guards.hold(Guard::KeepUntilStarted) {
                    self.quit();
                }
                Ok(S::Sealed { ticket, asking: Asking::Commit })
            }
            (S::Sealed { ticket, .. } | S::Draining { ticket }, Body::Started) if self.same(ticket, theirs) => {
                self.out.push(Action::Persist(Record::Released(ticket)));
                if !self.guards.hold(Guard::AckAfterReleased) {
                    self.send(ticket, Body::Ack);
                }
                Ok(S::Releasing { ticket })
            }
            (S::Sealed { ticket, .. }, Body::Refused | Body::Returned) if self.same(ticket, theirs) => {
                let owner = Owner::after_undoing(ticket);
                let run = self.run_what_is_left();
                self.out.push(Action::Persist(Record::Owned(owner)));
                if self.guards.hold(Guard::OwnedBeforeRun) {
                    Ok(S::Unsealing { owner, run })
                } else {
                    Ok(self.bring_up(owner, run))
                }
            }
            (S::Released { ticket }, Body::Started) if self.same(ticket, theirs) => {
                self.send(ticket, Body::Ack);
                Ok(self.state)
            }
            (
                S::Sealing { .. } | S::Unsealing { .. } | S::Releasing { .. } | S::Claiming { .. } | S::Yielding { .. },
                _,
            ) => Err(Why::Busy),
            (_, Body::Commit | Body::Recall | Body::Ack | Body::Over | Body::Lost) => Err(Why::WrongRole),
            (S::Sealed { ticket, .. }, Body::Pending | Body::Verified) if self.same(ticket, theirs) => {
                Err(Why::AlreadyKnown)
            }
            (S::Sealed { .. } | S::Draining { .. } | S::Released { .. }, _) => Err(Why::OtherTicket),
            (
                _,
                Body::Pending
                | Body::Verified
                | Body::Prepared
                | Body::Granted
                | Body::Draining
                | Body::Started
                | Body::Refused
                | Body::Returned
                | Body::Outranked(_),
            ) => Err(Why::NotNow),
        }
    }

    fn seal_when_ready(&mut self, owner: Owner, ticket: Ticket, ready: Ready, patience: u8) -> SourceState {
        let closed = ready.closed || !self.guards.hold(Guard::SealAfterClosed);
        let verified = ready.verified || !self.guards.hold(Guard::SealAfterVerified);
        let postmigrate = ready.postmigrate || !self.guards.hold(Guard::SealAfterPostmigrate);
        if !(closed && verified && postmigrate) {
            return SourceState::Stopped { owner, ticket, ready, patience };
        }
        self.out.push(Action::Persist(Record::Sealed(ticket)));
        if !self.guards.hold(Guard::CommitAfterSealed) {
            self.send(ticket, Body::Commit);
        }
        SourceState::Sealing { ticket, asking: Asking::Commit }
    }

    /// The way back from before the seal. No record is needed: OWNED(g) is the last one written. The destination is
    /// told once; should that be lost, its own question is answered by a RECALL.
    fn undo(&mut self, owner: Owner, ticket: Ticket, run: Run) -> SourceState {
        self.out.push(Action::AbortMigration);
        self.send(ticket, Body::Recall);
        self.bring_up(owner, run)
    }

    /// Answers who asks about an attempt that is not the one under way. Who is prepared does not heed a RECALL, which may be late; what was
    /// prepared was begun, so its ticket is durably used up, and OVER is true of it for ever.
    fn withdraw(&mut self, theirs: Ticket, asked: Body) {
        self.send(theirs, if asked == Body::Prepared { Body::Over } else { Body::Recall });
    }

    fn bring_up(&mut self, owner: Owner, run: Run) -> SourceState {
        self.out.push(Action::Open(owner.lineage, owner.generation));
        SourceState::Owning { owner, upkeep: Upkeep::Opening(run) }
    }

    fn claim(&mut self, vm: VmId, lineage: Lineage, fenced: &Fenced) -> Result<SourceState, Why> {
        if lineage > fenced.newest && self.guards.hold(Guard::ClaimKnowsNewest) {
            return Err(Why::ClaimTooOld);
        }
        let stale = fenced.peer == PeerHistory::MayHaveRun && self.guards.hold(Guard::ClaimDropsStaleRam);
        let (ram, run) = if stale { (Ram::Stale, Run::Boot) } else { (Ram::Current, self.run_what_is_left()) };
        let newest = lineage.max(fenced.newest);
        let kept = if self.guards.hold(Guard::StaleRamRecorded) { ram } else { Ram::Current };
        let owner = Owner::claimed(vm, newest, kept);
        self.out.push(Action::Persist(Record::Owned(owner)));
        Ok(SourceState::Claiming { owner, run })
    }

    fn yield_to(&mut self, vm: VmId, lineage: Lineage) -> Result<SourceState, Why> {
        let ours = match self.state {
            SourceState::Sealed { ticket, .. }
            | SourceState::Draining { ticket }
            | SourceState::Released { ticket } => ticket.lineage,
            SourceState::Yielding { .. } | SourceState::Outranked { .. } => return Err(Why::AlreadyKnown),
            // Owners run alone; they were fenced, and their record was overwritten before the fence was lifted.
            _ => return Err(Why::NotNow),
        };
        if lineage <= ours {
            return Err(Why::OtherTicket);
        }
        self.out.push(Action::Close);
        self.quit();
        self.out.push(Action::Persist(Record::Outranked { vm, lineage }));
        Ok(SourceState::Yielding { vm, lineage })
    }

    fn note_qemu(&mut self, event: &Event) {
        match event {
            Event::QemuDied => self.qemu = Seen::Gone,
            Event::Ran => self.qemu = Seen::Running,
            _ => {}
        }
    }

    /// `cont` where there is a QEMU to continue, a boot where there is none.
    fn run_what_is_left(&self) -> Run {
        if self.qemu == Seen::Gone { Run::Boot } else { Run::Cont }
    }

    /// As decided before a record was written, unless the QEMU died in the meantime.
    fn run_at_most(&self, run: Run) -> Run {
        if self.qemu == Seen::Gone { Run::Boot } else { run }
    }

    fn ask(&mut self, ticket: Ticket, asking: Asking) {
        self.send(
            ticket,
            match asking {
                Asking::Commit => Body::Commit,
                Asking::Recall => Body::Recall,
            },
        );
        self.out.push(Action::SetTimer);
    }

    /// Ends the QEMU, and knows from now on that it is gone.
    fn quit(&mut self) {
        self.out.push(Action::Quit);
        self.qemu = Seen::Gone;
    }

    fn send(&mut self, ticket: Ticket, body: Body) {
        self.out.push(Action::Send(Message { ticket, body }));
    }

    fn same(&self, a: Ticket, b: Ticket) -> bool {
        crate::outbox::same(self.guards, a, b)
    }
}

#[cfg(test)]
#[path = "source_tests.rs"]
mod tests;
