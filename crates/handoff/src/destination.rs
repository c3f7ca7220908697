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
///  With memory post-copy, where pages follow the guest:
///
///          Listens         Persisted          Commit: Open          Opened
///  Staged ---------> Preparing ------> Prepared ---------> Granted -------> Starting
///                    PREPARED             | Over              | QemuDied    DRAINING | Persisted: run
///                                         v                   v                      v    Drained
///                                     Refusing            Retreating             Draining ---------> Finishing
///                                                                     QemuDied,      |               STARTED | Persisted
///                                                                     Abandon        v                       v
///                                                                             Abandoning STARTED ------> Started
///
///  Staged, Loaded, Prepared, Refused, Returned, Draining and Started can be claimed: -> Claiming -> Settled, in a new lineage.
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
    /// PREPARED is being written.
    Preparing {
        /// The attempt.
        ticket: Ticket,
    },
    /// Everything but pages of memory is here. Refused only when the source says that it is over.
    Prepared {
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
        /// Whether all of its memory is here.
        pages: Pages,
    },
    /// STARTED or DRAINING is being written. Nobody can tell whether it would survive a crash now: nothing is returned.
    Starting {
        /// The attempt.
        ticket: Ticket,
        /// Whether all of its memory is here.
        pages: Pages,
    },
    /// There is no way back, and pages of memory are still to come from the source, which keeps them.
    Draining {
        /// The attempt.
        ticket: Ticket,
        /// How far the VM is up.
        arrival: Arrival,
        /// What is known of those pages.
        there: There,
    },
    /// The last page has come; STARTED is being written.
    Finishing {
        /// The attempt.
        ticket: Ticket,
        /// How far the VM is up.
        arrival: Arrival,
    },
    /// Memory is lost, and given up; STARTED is being written.
    Abandoning {
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

/// Whether all of a VM's memory is at the destination when it is started there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pages {
    /// All of it.
    Here,
    /// Some are still at the source.
    Owed,
}

/// What a destination knows of pages that are still at the source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum There {
    /// Nothing else than that they are there.
    Kept,
    /// They are lost.
    Lost,
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
                Record::Owned(_)
                | Record::Sealed(_)
                | Record::Staged(_)
                | Record::Prepared(_)
                | Record::Granted(_)
                | Record::Draining(_)
                | Record::Started(_),
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
            Record::Prepared(ticket) => it.prepared(ticket),
            Record::Granted(ticket) if seen == Seen::Loaded => it.open(ticket, Pages::Here),
            Record::Granted(ticket) => it.retreat(ticket),
            Record::Draining(ticket) if seen == Seen::Gone => it.abandon(ticket),
            Record::Draining(ticket) => {
                it.out.push(Action::Open(ticket.lineage, ticket.generation));
                it.drains(ticket);
                S::Draining { ticket, arrival: Arrival::Opening(Run::Cont), there: There::Kept }
            }
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
            S::Draining { there: There::Lost, .. } => Status::MemoryLost,
            S::Granting { .. }
            | S::Granted { .. }
            | S::Starting { .. }
            | S::Draining { .. }
            | S::Finishing { .. }
            | S::Abandoning { .. }
            | S::Started { .. }
            | S::Settling { .. }
            | S::Settled { .. }
            | S::Claiming { .. } => Status::Runs,
            S::Loaded { .. } | S::Preparing { .. } | S::Prepared { .. } => Status::WaitsForPeer,
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
            (S::Staged { ticket }, Event::Listens) => {
                self.out.push(Action::Persist(Record::Prepared(ticket)));
                Ok(S::Preparing { ticket })
            }
            (S::Preparing { ticket }, Event::Persisted(record)) if record == Record::Prepared(ticket) => {
                Ok(self.prepared(ticket))
            }
            (S::Prepared { ticket }, Event::Timer) => Ok(self.prepared(ticket)),
            (S::Prepared { ticket }, Event::Cancel) if !self.guards.hold(Guard::PreparedKeeps) => {
                Ok(self.refuse(ticket))
            }
            // What is left of it is given back when the source commits, or refused when it says that it is over.
            (S::Prepared { .. } | S::Preparing { .. }, Event::QemuDied) => Ok(self.state),
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
                Ok(self.open(ticket, Pages::Here))
            }
            (S::Granted { ticket, pages }, Event::Opened) => Ok(self.start(ticket, pages)),
            (S::Starting { ticket, .. }, Event::Persisted(record)) if record == Record::Started(ticket) => {
                self.send(ticket, Body::Started);
                self.out.push(Action::SetTimer);
                if self.guards.hold(Guard::ContAfterStarted) {
                    let run = if self.qemu == Seen::Gone { Run::Boot } else { Run::Cont };
                    self.out.push(Action::Run(run));
                }
                Ok(S::Started { ticket, arrival: Arrival::Starting })
            }
            (S::Starting { ticket, .. }, Event::Persisted(record)) if record == Record::Draining(ticket) => {
                if self.qemu == Seen::Gone {
                    return Ok(self.abandon(ticket));
                }
                self.drains(ticket);
                if self.guards.hold(Guard::ContAfterStarted) {
                    self.out.push(Action::Run(Run::Cont));
                }
                Ok(S::Draining { ticket, arrival: Arrival::Starting, there: There::Kept })
            }
            (S::Granting { .. } | S::Starting { .. } | S::Claiming { .. }, Event::QemuDied) => Ok(self.state),
            (S::Granted { ticket, .. }, Event::QemuDied) => Ok(self.retreat(ticket)),
            (S::Retreating { ticket }, Event::Closed) => Ok(self.give_back(ticket)),
            (S::Returning { ticket }, Event::Persisted(record)) if record == Record::Returned(ticket) => {
                self.quit();
                self.send(ticket, Body::Returned);
                Ok(S::Returned { ticket })
            }

            // Running, while pages follow.
            (S::Draining { ticket, arrival: Arrival::Opening(run), there }, Event::Opened) => {
                self.out.push(Action::Run(run));
                Ok(S::Draining { ticket, arrival: Arrival::Starting, there })
            }
            (S::Finishing { ticket, arrival: Arrival::Opening(run) }, Event::Opened) => {
                self.out.push(Action::Run(run));
                Ok(S::Finishing { ticket, arrival: Arrival::Starting })
            }
            (S::Draining { ticket, arrival: Arrival::Starting, there }, Event::Ran) => {
                Ok(S::Draining { ticket, arrival: Arrival::Running, there })
            }
            (S::Finishing { ticket, arrival: Arrival::Starting }, Event::Ran) => {
                Ok(S::Finishing { ticket, arrival: Arrival::Running })
            }
            (S::Draining { ticket, .. }, Event::Timer) => {
                self.drains(ticket);
                Ok(self.state)
            }
            (S::Draining { ticket, arrival, .. }, Event::Drained) => {
                self.out.push(Action::Persist(Record::Started(ticket)));
                Ok(S::Finishing { ticket, arrival })
            }
            (S::Finishing { ticket, arrival }, Event::Persisted(record)) if record == Record::Started(ticket) => {
                if self.qemu == Seen::Gone {
                    return Ok(self.boot_here(ticket));
                }
                self.send(ticket, Body::Started);
                self.out.push(Action::SetTimer);
                Ok(S::Started { ticket, arrival })
            }
            (S::Abandoning { ticket }, Event::Persisted(record)) if record == Record::Started(ticket) => {
                Ok(self.boot_here(ticket))
            }
            (S::Draining { ticket, .. }, Event::QemuDied) => Ok(self.abandon(ticket)),
            (S::Draining { ticket, there, .. }, Event::Abandon)
                if there == There::Lost || !self.guards.hold(Guard::AbandonOnlyLost) =>
            {
                Ok(self.abandon(ticket))
            }
            (S::Finishing { .. } | S::Abandoning { .. }, Event::QemuDied) => Ok(self.state),

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
                | S::Prepared { ticket }
                | S::Refused { ticket }
                | S::Returned { ticket }
                | S::Draining { ticket, .. }
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
            (
                S::Preparing { .. }
                | S::Prepared { .. }
                | S::Granted { .. }
                | S::Starting { .. }
                | S::Draining { .. }
                | S::Finishing { .. }
                | S::Abandoning { .. }
                | S::Started { .. }
                | S::Settling { .. },
                Event::Cancel,
            ) => Err(Why::TooLate),
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
                | Event::Listens
                | Event::Drained
                | Event::Abandon
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
                    return Ok(self.open(ticket, Pages::Here));
                }
                Ok(S::Granting { ticket })
            }
            // No record: PREPARED refuses as little as GRANTED does.
            (S::Prepared { .. }, Body::Commit) if self.qemu == Seen::Gone => Ok(self.retreat(ticket)),
            (S::Prepared { .. }, Body::Commit) => {
                self.send(ticket, Body::Granted);
                Ok(self.open(ticket, Pages::Owed))
            }
            (S::Prepared { .. }, Body::Recall) if !self.guards.hold(Guard::PreparedKeeps) => Ok(self.refuse(ticket)),
            (S::Prepared { .. }, Body::Recall) => {
                self.send(ticket, Body::Prepared);
                Ok(self.state)
            }
            // Nothing was opened: who says this has never committed.
            (S::Prepared { .. }, Body::Over) => Ok(self.refuse(ticket)),
            (S::Draining { .. }, Body::Commit | Body::Recall) => {
                self.send(ticket, Body::Draining);
                Ok(self.state)
            }
            (S::Draining { there: There::Kept, arrival, .. }, Body::Lost) => {
                Ok(S::Draining { ticket, arrival, there: There::Lost })
            }
            (S::Draining { there: There::Lost, .. }, Body::Lost) => Err(Why::AlreadyKnown),
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
                | S::Preparing { .. }
                | S::Granting { .. }
                | S::Finishing { .. }
                | S::Abandoning { .. }
                | S::Refusing { .. }
                | S::Retreating { .. }
                | S::Returning { .. }
                | S::Claiming { .. }
                | S::Yielding { .. },
                Body::Commit | Body::Recall | Body::Ack | Body::Over | Body::Lost,
            ) => Err(Why::Busy),
            (S::Settling { .. } | S::Settled { .. }, Body::Commit | Body::Recall | Body::Ack) => Err(Why::AlreadyKnown),
            (
                S::Staged { .. }
                | S::Loaded { .. }
                | S::Prepared { .. }
                | S::Granted { .. }
                | S::Starting { .. }
                | S::Draining { .. }
                | S::Refused { .. }
                | S::Returned { .. }
                | S::Outranked { .. },
                Body::Commit | Body::Recall | Body::Ack,
            )
            | (_, Body::Over | Body::Lost) => Err(Why::NotNow),
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
            | S::Preparing { ticket }
            | S::Prepared { ticket }
            | S::Granting { ticket }
            | S::Granted { ticket, .. }
            | S::Starting { ticket, .. }
            | S::Draining { ticket, .. }
            | S::Finishing { ticket, .. }
            | S::Abandoning { ticket }
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

    /// Also without a QEMU: that it will not refuse is true all the same, and the answer to COMMIT is then that it returns the VM.
    fn prepared(&mut self, ticket: Ticket) -> DestinationState {
        self.send(ticket, Body::Prepared);
        self.out.push(Action::SetTimer);
        DestinationState::Prepared { ticket }
    }

    fn drains(&mut self, ticket: Ticket) {
        let body = if self.guards.hold(Guard::StartedAfterDrained) { Body::Draining } else { Body::Started };
        self.send(ticket, body);
        self.out.push(Action::SetTimer);
    }

    /// Memory is lost. Nothing of the source's is needed any more, and the VM boots from its volumes.
    fn abandon(&mut self, ticket: Ticket) -> DestinationState {
        self.out.push(Action::Persist(Record::Started(ticket)));
        DestinationState::Abandoning { ticket }
    }

    fn boot_here(&mut self, ticket: Ticket) -> DestinationState {
        self.send(ticket, Body::Started);
        self.out.push(Action::SetTimer);
        self.out.push(Action::Open(ticket.lineage, ticket.generation));
        DestinationState::Started { ticket, arrival: Arrival::Opening(Run::Boot) }
    }

    fn open(&mut self, ticket: Ticket, pages: Pages) -> DestinationState {
        self.out.push(Action::Open(ticket.lineage, ticket.generation));
        DestinationState::Granted { ticket, pages }
    }

    fn start(&mut self, ticket: Ticket, pages: Pages) -> DestinationState {
        self.out.push(Action::Persist(match pages {
            Pages::Here => Record::Started(ticket),
            Pages::Owed => Record::Draining(ticket),
        }));
        if !self.guards.hold(Guard::ContAfterStarted) {
            self.out.push(Action::Run(Run::Cont));
        }
        DestinationState::Starting { ticket, pages }
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
        let incomplete = matches!(self.state, DestinationState::Prepared { .. } | DestinationState::Draining { .. });
        let stale = fenced.peer == PeerHistory::MayHaveRun && self.guards.hold(Guard::ClaimDropsStaleRam);
        let recorded = self.guards.hold(Guard::StaleRamRecorded);
        let ram = if incomplete || (stale && recorded && !started) { Ram::Stale } else { Ram::Current };
        let newest = lineage.max(fenced.newest);
        let owner = Owner::claimed(vm, newest, ram);
        self.out.push(Action::Persist(Record::Owned(owner)));
        Ok(DestinationState::Claiming { owner })
    }

    fn yield_to(&mut self, theirs: Ticket, lineage: Lineage) -> Result<DestinationState, Why> {
        use DestinationState as S;
        let ours = match self.state {
            S::Staged { ticket }
            | S::Loaded { ticket }
            | S::Prepared { ticket }
            | S::Refused { ticket }
            | S::Returned { ticket } => ticket.lineage,
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
            Event::Loaded | Event::Listens => self.qemu = Seen::Loaded,
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
