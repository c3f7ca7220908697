//! The destination's side: receives the VM, takes it when told to, and never runs what it might have to give back.

use crate::evidence::Fenced;
use crate::guards::{Guard, Guards};
use crate::ids::Ticket;
use crate::io::{Action, Body, CannotBegin, Event, Message, OtherRole, PeerHistory, Run, Seen, Status, Verdict, Why};
use crate::outbox::Outbox;
use crate::record::{Owner, Ram, Record};
use godwit_units::{Lineage, VmId};

/// Where the destination stands.
///
/// ```text
///  stage   Persisted        Loaded         Commit          Persisted         Opened
///  ---> Staging ----> Staged ----> Loaded ------> Granting --------> Granted -----> Starting
///          |            |            |             GRANTED   Open       |           STARTED | Persisted
///          |            |            |                         QemuDied |                   v
///          +------------+------------+ Recall, Cancel,                  v                Started: run
///                       |              QemuDied, early Commit       Retreating              |  Ack
///                       v                                             | Closed              v
///                   Refusing REFUSED                                  v                  Settling OWNED(g+1)
///                       | Persisted                               Returning RETURNED        | Persisted
///                       v                                             v Persisted           v
///                    Refused                                       Returned              Settled
///
///  Staged, Loaded, Refused, Returned and Started can be claimed: -> Claiming -> Settled, in a new lineage.
///  Outranked(lineage) takes every state in which nothing runs to Yielding, and that to Outranked.
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DestinationState {
    /// STAGED is being written; the source has heard nothing yet.
    Staging {
        /// The attempt.
        ticket: Ticket,
    },
    /// The stream is coming in.
    Staged {
        /// The attempt.
        ticket: Ticket,
    },
    /// Everything is here, verified, and waits under `-S`.
    Loaded {
        /// The attempt.
        ticket: Ticket,
    },
    /// GRANTED is being written.
    Granting {
        /// The attempt.
        ticket: Ticket,
    },
    /// The VM is ours; export and endpoints are being opened. Can still be returned.
    Granted {
        /// The attempt.
        ticket: Ticket,
    },
    /// STARTED is being written. Nobody can tell whether it would survive a crash now: nothing is returned.
    Starting {
        /// The attempt.
        ticket: Ticket,
    },
    /// There is no way back. The source is told until it acknowledges.
    Started {
        /// The attempt.
        ticket: Ticket,
        /// How far the VM is up.
        arrival: Arrival,
    },
    /// The source let go; the end of the hand-off is being written.
    Settling {
        /// As what we own the VM.
        owner: Owner,
        /// How far the VM is up.
        arrival: Arrival,
    },
    /// The hand-off is over and the VM is ours. From here on the node uses `Source::recover(Owned(owner), ..)`.
    Settled {
        /// As what we own the VM.
        owner: Owner,
    },
    /// REFUSED is being written.
    Refusing {
        /// The attempt.
        ticket: Ticket,
    },
    /// Never to be granted.
    Refused {
        /// The attempt.
        ticket: Ticket,
    },
    /// Granted, not started, and the RAM is lost: what was opened is being closed.
    Retreating {
        /// The attempt.
        ticket: Ticket,
    },
    /// RETURNED is being written.
    Returning {
        /// The attempt.
        ticket: Ticket,
    },
    /// The VM is the source's again.
    Returned {
        /// The attempt.
        ticket: Ticket,
    },
    /// A claim for this node is being written.
    Claiming {
        /// As what we own the VM once that is durable.
        owner: Owner,
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

/// How far a VM that was handed to us is up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrival {
    /// Export and endpoints are being opened once more, after a restart.
    Opening(Run),
    /// The VM is being made to run.
    Starting,
    /// It runs.
    Running,
}

/// The destination's machine for one VM.
///
/// Feed it with [`Destination::handle`]; after each event, do what [`Destination::poll_action`] says, in that order,
/// until it says nothing.
#[derive(Clone, Debug)]
pub struct Destination {
    state: DestinationState,
    /// Whether the incoming QEMU is still there.
    qemu: Seen,
    out: Outbox,
    guards: Guards,
}

impl Destination {
    /// Reserves a place for the hand-off of `ticket`, over `previous`, the node's last durable record of the VM.
    ///
    /// # Errors
    /// When the node owns the VM, still owes somebody an answer for an earlier attempt, or has seen a ticket that is
    /// not smaller.
    pub fn stage(previous: Option<Record>, ticket: Ticket) -> Result<Self, CannotBegin> {
        Self::stage_guarded(previous, ticket, Guards::ALL)
    }

    #[cfg(feature = "sabotage")]
    #[doc(hidden)]
    pub fn stage_with(previous: Option<Record>, ticket: Ticket, guards: Guards) -> Result<Self, CannotBegin> {
        Self::stage_guarded(previous, ticket, guards)
    }

    fn stage_guarded(previous: Option<Record>, ticket: Ticket, guards: Guards) -> Result<Self, CannotBegin> {
        let newer = match previous {
            None => true,
            Some(Record::Released(last) | Record::Refused(last) | Record::Returned(last)) => ticket > last,
            Some(Record::Outranked { lineage, .. }) => ticket.lineage >= lineage,
            Some(
                Record::Owned(_) | Record::Sealed(_) | Record::Staged(_) | Record::Granted(_) | Record::Started(_),
            ) => return Err(CannotBegin::Busy),
        };
        if !newer && guards.hold(Guard::StageOnlyNewer) {
            return Err(CannotBegin::UsedTicket { mv: ticket.mv });
        }
        let mut it = Self::with_state(DestinationState::Staging { ticket }, Seen::Gone, guards);
        it.out.push(Action::Persist(Record::Staged(ticket)));
        Ok(it)
    }

    /// The machine of a node after a restart, from its last durable record and what it finds of the QEMU.
    ///
    /// # Errors
    /// When the record is a source's; [`crate::Source::recover`] takes those.
    pub fn recover(record: Record, seen: Seen) -> Result<Self, OtherRole> {
        Self::recover_guarded(record, seen, Guards::ALL)
    }

    #[cfg(feature = "sabotage")]
    #[doc(hidden)]
    pub fn recover_with(record: Record, seen: Seen, guards: Guards) -> Result<Self, OtherRole> {
        Self::recover_guarded(record, seen, guards)
    }

    pub(crate) fn recover_guarded(record: Record, seen: Seen, guards: Guards) -> Result<Self, OtherRole> {
        use DestinationState as S;
        let mut it = Self::with_state(S::Outranked { vm: VmId(0), lineage: Lineage::FIRST }, seen, guards);
        it.state = match record {
            Record::Staged(ticket) if seen == Seen::Loaded || !guards.hold(Guard::GrantOnlyLoaded) => it.loaded(ticket),
            Record::Staged(ticket) => it.refuse(ticket),
            Record::Granted(ticket) if seen == Seen::Loaded => it.open(ticket),
            Record::Granted(ticket) => it.retreat(ticket),
            Record::Started(ticket) => {
                it.out.push(Action::Open(ticket.lineage, ticket.generation));
                let run = if seen == Seen::Gone { Run::Boot } else { Run::Cont };
                it.send(ticket, Body::Started);
                it.out.push(Action::SetTimer);
                S::Started { ticket, arrival: Arrival::Opening(run) }
            }
            Record::Refused(ticket) => {
                it.quit();
                S::Refused { ticket }
            }
            Record::Returned(ticket) => {
                it.out.push(Action::Close);
                it.quit();
                S::Returned { ticket }
            }
            Record::Owned(_) | Record::Sealed(_) | Record::Released(_) | Record::Outranked { .. } => {
                return Err(OtherRole(record));
            }
        };
        Ok(it)
    }

    fn with_state(state: DestinationState, qemu: Seen, guards: Guards) -> Self {
        Self { state, qemu, out: Outbox::default(), guards }
    }

    /// Where it stands.
    #[must_use]
    pub const fn state(&self) -> &DestinationState {
        &self.state
    }

    /// Whether the VM runs here, in words for an operator.
    #[must_use]
    pub const fn status(&self) -> Status {
        use DestinationState as S;
        match self.state {
            S::Granting { .. }
            | S::Granted { .. }
            | S::Starting { .. }
            | S::Started { .. }
            | S::Settling { .. }
            | S::Settled { .. }
            | S::Claiming { .. } => Status::Runs,
            S::Loaded { .. } => Status::WaitsForPeer,
            S::Staging { .. }
            | S::Staged { .. }
            | S::Refusing { .. }
            | S::Refused { .. }
            | S::Retreating { .. }
            | S::Returning { .. }
            | S::Returned { .. }
            | S::Yielding { .. }
            | S::Outranked { .. } => Status::NotHere,
        }
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
    fn step(&mut self, event: Event) -> Result<DestinationState, Why> {
        use DestinationState as S;
        self.note_qemu(&event);
        if let Event::Message(message) = event {
            return self.hear(message);
        }
        match (self.state, event) {
            // Receiving.
            (S::Staging { ticket }, Event::Persisted(record)) if record == Record::Staged(ticket) => {
                self.out.push(Action::Receive(ticket));
                self.send(ticket, Body::Pending);
                self.out.push(Action::SetTimer);
                Ok(S::Staged { ticket })
            }
            (S::Staged { ticket }, Event::Loaded) => Ok(self.loaded(ticket)),
            (S::Staged { ticket }, Event::Timer) if self.guards.hold(Guard::StagedAsks) => {
                self.send(ticket, Body::Pending);
                self.out.push(Action::SetTimer);
                Ok(self.state)
            }
            (S::Loaded { ticket }, Event::Timer) => {
                self.send(ticket, Body::Verified);
                self.out.push(Action::SetTimer);
                Ok(self.state)
            }
            (S::Staging { ticket } | S::Staged { ticket } | S::Loaded { ticket }, Event::Cancel | Event::QemuDied) => {
                Ok(self.undo(ticket))
            }
            (S::Refusing { ticket }, Event::Persisted(record)) if record == Record::Refused(ticket) => {
                self.quit();
                self.send(ticket, Body::Refused);
                Ok(S::Refused { ticket })
            }

            // Taking.
            (S::Granting { ticket }, Event::Persisted(record)) if record == Record::Granted(ticket) => {
                if self.qemu == Seen::Gone {
                    return Ok(self.retreat(ticket));
                }
                self.send(ticket, Body::Granted);
                Ok(self.open(ticket))
            }
            (S::Granted { ticket }, Event::Opened) => Ok(self.start(ticket)),
            (S::Starting { ticket }, Event::Persisted(record)) if record == Record::Started(ticket) => {
                self.send(ticket, Body::Started);
                self.out.push(Action::SetTimer);
                if self.guards.hold(Guard::ContAfterStarted) {
                    let run = if self.qemu == Seen::Gone { Run::Boot } else { Run::Cont };
                    self.out.push(Action::Run(run));
                }
                Ok(S::Started { ticket, arrival: Arrival::Starting })
            }
            (S::Granting { .. } | S::Starting { .. } | S::Claiming { .. }, Event::QemuDied) => Ok(self.state),
            (S::Granted { ticket }, Event::QemuDied) => Ok(self.retreat(ticket)),
            (S::Retreating { ticket }, Event::Closed) => Ok(self.give_back(ticket)),
            (S::Returning { ticket }, Event::Persisted(record)) if record == Record::Returned(ticket) => {
                self.quit();
                self.send(ticket, Body::Returned);
                Ok(S::Returned { ticket })
            }

            // Running.
            (S::Started { ticket, arrival: Arrival::Opening(run) }, Event::Opened) => {
                self.out.push(Action::Run(run));
                Ok(S::Started { ticket, arrival: Arrival::Starting })
            }
            (S::Settling { owner, arrival: Arrival::Opening(run) }, Event::Opened) => {
                self.out.push(Action::Run(run));
                Ok(S::Settling { owner, arrival: Arrival::Starting })
            }
            (S::Started { ticket, arrival: Arrival::Starting }, Event::Ran) => {
                Ok(S::Started { ticket, arrival: Arrival::Running })
            }
            (S::Settling { owner, arrival: Arrival::Starting }, Event::Ran) => {
                Ok(S::Settling { owner, arrival: Arrival::Running })
            }
            (S::Started { ticket, .. }, Event::Timer) if self.guards.hold(Guard::StartedRepeats) => {
                self.send(ticket, Body::Started);
                self.out.push(Action::SetTimer);
                Ok(self.state)
            }
            (S::Started { ticket, .. }, Event::QemuDied) if !self.guards.hold(Guard::NoReturnAfterStarted) => {
                Ok(self.retreat(ticket))
            }
            (S::Started { ticket, .. }, Event::QemuDied) => {
                self.out.push(Action::Open(ticket.lineage, ticket.generation));
                Ok(S::Started { ticket, arrival: Arrival::Opening(Run::Boot) })
            }
            (S::Settling { owner, .. }, Event::QemuDied) => {
                self.out.push(Action::Open(owner.lineage, owner.generation));
                Ok(S::Settling { owner, arrival: Arrival::Opening(Run::Boot) })
            }
            (S::Settling { owner, .. }, Event::Persisted(record)) if record == Record::Owned(owner) => {
                Ok(S::Settled { owner })
            }

            // Claims.
            (
                S::Staged { ticket }
                | S::Loaded { ticket }
                | S::Refused { ticket }
                | S::Returned { ticket }
                | S::Started { ticket, .. },
                Event::Claim(fenced),
            ) => self.claim(ticket.vm, ticket.lineage, &fenced),
            (S::Outranked { vm, lineage }, Event::Claim(fenced)) => self.claim(vm, lineage, &fenced),
            (S::Claiming { owner }, Event::Persisted(record)) if record == Record::Owned(owner) => {
                Ok(S::Settled { owner })
            }
            (S::Yielding { vm, lineage }, Event::Persisted(record))
                if record == (Record::Outranked { vm, lineage }) =>
            {
                Ok(S::Outranked { vm, lineage })
            }

            (S::Settled { .. }, Event::Claim(_)) => Err(Why::AlreadyOwner),
            (S::Granted { .. } | S::Starting { .. } | S::Started { .. } | S::Settling { .. }, Event::Cancel) => {
                Err(Why::TooLate)
            }
            (S::Refusing { .. } | S::Refused { .. }, Event::Cancel) => Err(Why::AlreadyKnown),
            (S::Yielding { .. }, Event::Claim(_)) => Err(Why::Outranked),
            (_, Event::Claim(_)) => Err(Why::Busy),
            (_, Event::VcpusStopped | Event::Flowing | Event::Postmigrate | Event::MigrationFailed) => {
                Err(Why::WrongRole)
            }
            (
                _,
                Event::Persisted(_)
                | Event::Opened
                | Event::Closed
                | Event::Ran
                | Event::Timer
                | Event::Loaded
                | Event::QemuDied
                | Event::Cancel
                | Event::Message(_),
            ) => Err(Why::NotNow),
        }
    }

    /// The transitions that messages cause.
    fn hear(&mut self, Message { ticket: theirs, body }: Message) -> Result<DestinationState, Why> {
        use DestinationState as S;
        if let Body::Outranked(lineage) = body {
            return self.yield_to(theirs, lineage);
        }
        let Some(ticket) = self.ticket() else { return Err(Why::OtherTicket) };
        if !crate::outbox::same(self.guards, ticket, theirs) {
            return Err(Why::OtherTicket);
        }
        match (self.state, body) {
            (S::Loaded { .. }, Body::Commit) => {
                self.out.push(Action::Persist(Record::Granted(ticket)));
                if !self.guards.hold(Guard::OpenAfterGranted) {
                    return Ok(self.open(ticket));
                }
                Ok(S::Granting { ticket })
            }
            (S::Staged { .. }, Body::Commit) if !self.guards.hold(Guard::GrantOnlyLoaded) => {
                self.out.push(Action::Persist(Record::Granted(ticket)));
                Ok(S::Granting { ticket })
            }
            // Sealed although we do not hold everything (any more): the source's copy is the only one.
            (S::Staged { .. }, Body::Commit) => Ok(self.refuse(ticket)),
            (S::Staging { .. } | S::Staged { .. } | S::Loaded { .. }, Body::Recall) => {
                if !self.guards.hold(Guard::RefusedBeforeAnswer) {
                    self.send(ticket, Body::Refused);
                }
                Ok(self.refuse(ticket))
            }
            (S::Granted { .. } | S::Starting { .. }, Body::Commit | Body::Recall) => {
                self.send(ticket, Body::Granted);
                Ok(self.state)
            }
            (S::Started { .. }, Body::Commit | Body::Recall) => {
                self.send(ticket, Body::Started);
                Ok(self.state)
            }
            (S::Started { arrival, .. }, Body::Ack) => {
                let owner = Owner::after(ticket);
                self.out.push(Action::Persist(Record::Owned(owner)));
                Ok(S::Settling { owner, arrival })
            }
            (S::Refused { .. }, Body::Commit)
                if !self.guards.hold(Guard::RefusedStays) && self.qemu == Seen::Loaded =>
            {
                self.out.push(Action::Persist(Record::Granted(ticket)));
                Ok(S::Granting { ticket })
            }
            (S::Refused { .. }, Body::Commit | Body::Recall) => {
                self.send(ticket, Body::Refused);
                Ok(self.state)
            }
            (S::Returned { .. }, Body::Commit | Body::Recall) => {
                self.send(ticket, Body::Returned);
                Ok(self.state)
            }
            (
                S::Staging { .. }
                | S::Granting { .. }
                | S::Refusing { .. }
                | S::Retreating { .. }
                | S::Returning { .. }
                | S::Claiming { .. }
                | S::Yielding { .. },
                Body::Commit | Body::Recall | Body::Ack,
            ) => Err(Why::Busy),
            (S::Settling { .. } | S::Settled { .. }, Body::Commit | Body::Recall | Body::Ack) => Err(Why::AlreadyKnown),
            (
                S::Staged { .. }
                | S::Loaded { .. }
                | S::Granted { .. }
                | S::Starting { .. }
                | S::Refused { .. }
                | S::Returned { .. }
                | S::Outranked { .. },
                Body::Commit | Body::Recall | Body::Ack,
            ) => Err(Why::NotNow),
            (
                _,
                Body::Pending
                | Body::Verified
                | Body::Granted
                | Body::Started
                | Body::Refused
                | Body::Returned
                | Body::Outranked(_),
            ) => Err(Why::WrongRole),
        }
    }

    /// The attempt that is not over, or whose outcome the source may still ask for.
    fn ticket(&self) -> Option<Ticket> {
        use DestinationState as S;
        match self.state {
            S::Staging { ticket }
            | S::Staged { ticket }
            | S::Loaded { ticket }
            | S::Granting { ticket }
            | S::Granted { ticket }
            | S::Starting { ticket }
            | S::Started { ticket, .. }
            | S::Refusing { ticket }
            | S::Refused { ticket }
            | S::Retreating { ticket }
            | S::Returning { ticket }
            | S::Returned { ticket } => Some(ticket),
            S::Settling { .. } | S::Settled { .. } | S::Claiming { .. } | S::Yielding { .. } | S::Outranked { .. } => {
                None
            }
        }
    }

    fn loaded(&mut self, ticket: Ticket) -> DestinationState {
        self.send(ticket, Body::Verified);
        self.out.push(Action::SetTimer);
        DestinationState::Loaded { ticket }
    }

    fn open(&mut self, ticket: Ticket) -> DestinationState {
        self.out.push(Action::Open(ticket.lineage, ticket.generation));
        DestinationState::Granted { ticket }
    }

    fn start(&mut self, ticket: Ticket) -> DestinationState {
        self.out.push(Action::Persist(Record::Started(ticket)));
        if !self.guards.hold(Guard::ContAfterStarted) {
            self.out.push(Action::Run(Run::Cont));
        }
        DestinationState::Starting { ticket }
    }

    fn undo(&mut self, ticket: Ticket) -> DestinationState {
        if self.guards.hold(Guard::UndoWritesRefused) {
            return self.refuse(ticket);
        }
        self.quit();
        self.send(ticket, Body::Refused);
        DestinationState::Refused { ticket }
    }

    fn refuse(&mut self, ticket: Ticket) -> DestinationState {
        if !self.guards.hold(Guard::RefusedStays) {
            self.send(ticket, Body::Refused);
            return DestinationState::Refused { ticket };
        }
        self.out.push(Action::Persist(Record::Refused(ticket)));
        DestinationState::Refusing { ticket }
    }

    fn retreat(&mut self, ticket: Ticket) -> DestinationState {
        if !self.guards.hold(Guard::CloseBeforeReturn) {
            return self.give_back(ticket);
        }
        self.out.push(Action::Close);
        DestinationState::Retreating { ticket }
    }

    fn give_back(&mut self, ticket: Ticket) -> DestinationState {
        self.out.push(Action::Persist(Record::Returned(ticket)));
        DestinationState::Returning { ticket }
    }

    /// Who claims here becomes `Settled`, and its node goes on with a [`crate::Source`], which opens and runs. RAM is
    /// worth something only where the source did not run since the stop; after STARTED it cannot have.
    fn claim(&mut self, vm: VmId, lineage: Lineage, fenced: &Fenced) -> Result<DestinationState, Why> {
        if lineage > fenced.newest && self.guards.hold(Guard::ClaimKnowsNewest) {
            return Err(Why::ClaimTooOld);
        }
        let started = matches!(self.state, DestinationState::Started { .. });
        let stale = fenced.peer == PeerHistory::MayHaveRun && self.guards.hold(Guard::ClaimDropsStaleRam);
        let recorded = self.guards.hold(Guard::StaleRamRecorded);
        let ram = if stale && recorded && !started { Ram::Stale } else { Ram::Current };
        let newest = lineage.max(fenced.newest);
        let owner = Owner::claimed(vm, newest, ram);
        self.out.push(Action::Persist(Record::Owned(owner)));
        Ok(DestinationState::Claiming { owner })
    }

    fn yield_to(&mut self, theirs: Ticket, lineage: Lineage) -> Result<DestinationState, Why> {
        use DestinationState as S;
        let ours = match self.state {
            S::Staged { ticket } | S::Loaded { ticket } | S::Refused { ticket } | S::Returned { ticket } => {
                ticket.lineage
            }
            S::Yielding { .. } | S::Outranked { .. } => return Err(Why::AlreadyKnown),
            // What may run here was fenced, and its record overwritten before the fence was lifted.
            _ => return Err(Why::NotNow),
        };
        if lineage <= ours {
            return Err(Why::OtherTicket);
        }
        self.out.push(Action::Close);
        self.quit();
        self.out.push(Action::Persist(Record::Outranked { vm: theirs.vm, lineage }));
        Ok(S::Yielding { vm: theirs.vm, lineage })
    }

    fn note_qemu(&mut self, event: &Event) {
        match event {
            Event::QemuDied => self.qemu = Seen::Gone,
            Event::Loaded => self.qemu = Seen::Loaded,
            Event::Ran => self.qemu = Seen::Running,
            _ => {}
        }
    }

    /// Ends the QEMU, and knows from now on that it is gone.
    fn quit(&mut self) {
        self.out.push(Action::Quit);
        self.qemu = Seen::Gone;
    }

    fn send(&mut self, ticket: Ticket, body: Body) {
        self.out.push(Action::Send(Message { ticket, body }));
    }
}

#[cfg(test)]
#[path = "destination_tests.rs"]
mod tests;
