//! What goes into a machine and what comes out of it.

use crate::evidence::Fenced;
use crate::ids::Ticket;
use crate::record::Record;
use godwit_units::{Generation, Lineage, MoveId};
use serde::{Deserialize, Serialize};

/// A message between the two nodes of a hand-off. It may be lost, doubled, delayed and overtaken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// The attempt it is about.
    pub ticket: Ticket,
    /// What it says of it.
    pub body: Body,
}

/// What a [`Message`] says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Body {
    /// Source: I am sealed; take the VM.
    Commit,
    /// Source: if you have not taken the VM, do not.
    Recall,
    /// Source: I know that you started, and have let go.
    Ack,
    /// Destination: I have a place for this, but not everything yet. Do you still mean it?
    Pending,
    /// Destination: everything arrived and was verified.
    Verified,
    /// Destination: everything but pages of the guest's memory arrived and was verified. I will not refuse it any more.
    Prepared,
    /// Source: it is over, and was never sealed. Said to who is [`Body::Prepared`], and only by a source that can never seal it again.
    Over,
    /// Destination: the VM is mine; I have not started it.
    Granted,
    /// Destination: the VM has started here, and pages of its memory are still to come from you. Keep them.
    Draining,
    /// Source: those pages are lost.
    Lost,
    /// Destination: the VM has started here, and needs nothing of yours.
    Started,
    /// Destination: I will never take it.
    Refused,
    /// Destination: I had taken it, never started it, and lost its RAM. It is yours again.
    Returned,
    /// Either: a claim began this lineage; what you ask about is void.
    Outranked(Lineage),
}

/// What a node sees of the VM's QEMU when it restarts and adopts it again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seen {
    /// Its vCPUs run.
    Running,
    /// A source whose vCPUs do not run: stopped for the last pages, or in `postmigrate`.
    Stopped,
    /// An incoming QEMU with the whole state loaded (`paused`, and the node's own checks passed).
    Loaded,
    /// No process, or an incoming one whose stream broke off, which is worth as much.
    Gone,
}

/// What somebody who knows can say about the other side when they override the protocol with a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerHistory {
    /// The VM did not run there since the stop: RAM and volumes here still belong together.
    DidNotRun,
    /// It may have run: only the volumes can be trusted.
    MayHaveRun,
}

/// What happened. Effects are reported in the order in which the actions were polled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A message came from the peer, authenticated.
    Message(Message),
    /// The record given to [`Action::Persist`] is durable.
    Persisted(Record),
    /// [`Action::Open`] is done.
    Opened,
    /// [`Action::Close`] is done.
    Closed,
    /// [`Action::Run`] is done.
    Ran,
    /// The timer set by [`Action::SetTimer`] went off.
    Timer,
    /// Source: the last round began, the vCPUs are stopped.
    VcpusStopped,
    /// Source: what was left of memory at the stop flows, and the destination acknowledges it. Said only for as long as a guest may stand
    /// for it.
    Flowing,
    /// Source: QEMU does not resume by itself any more: it is in `postmigrate`, or its post-copy has begun.
    Postmigrate,
    /// Source: the migration failed; QEMU may have resumed by itself.
    MigrationFailed,
    /// Destination: everything arrived and was verified, and QEMU waits under `-S`.
    Loaded,
    /// Destination: everything but pages of memory arrived and was verified, and QEMU waits under `-S`, ready to fetch them.
    Listens,
    /// Destination: the last page of memory is here.
    Drained,
    /// Destination: an operator gives up memory that is lost.
    Abandon,
    /// The VM's QEMU on this host is no more.
    QemuDied,
    /// Somebody asks for this move to be undone. Source: works until the seal; from then on it is a RECALL.
    Cancel,
    /// An operator claims the VM for this node.
    Claim(Fenced),
}

/// How to make the VM run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Run {
    /// `cont`, on the QEMU that is there. Does nothing where it runs already.
    Cont,
    /// End what is left of the QEMU, and boot a fresh one from the volumes, as after a power failure.
    Boot,
}

/// What is to be done, in the order polled. Each must be safe to do twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Write the record durably, then report [`Event::Persisted`]. When that fails: end the machine, and recover.
    Persist(Record),
    /// Send to the peer, on any authenticated path; may be lost.
    Send(Message),
    /// Report [`Event::Timer`] after the retransmission interval (a fraction of a second, growing to a few). Setting
    /// it again replaces it. It is set while somebody is owed an answer, and only then.
    SetTimer,
    /// Open the export for writes, un-isolate the endpoints, announce them with a mobility sequence derived from
    /// lineage and generation; then report [`Event::Opened`].
    Open(Lineage, Generation),
    /// Make the export refuse writes (the last ones answered), isolate and drain the endpoints; report
    /// [`Event::Closed`].
    Close,
    /// Run the VM, then report [`Event::Ran`].
    Run(Run),
    /// End the VM's QEMU on this host. Not reported.
    Quit,
    /// Source: start the migration. What it sends belongs to this ticket.
    Migrate(Ticket),
    /// Source: let QEMU's return path end with SHUT, which takes it to `postmigrate`.
    AnswerShut,
    /// Source: give up the migration under way (`migrate_cancel`).
    AbortMigration,
    /// Destination: start an incoming QEMU, paused, for the stream of this ticket.
    Receive(Ticket),
}

/// What became of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It was acted upon.
    Taken,
    /// It changed nothing.
    Ignored(Why),
}

/// Why an event changed nothing. None of these is an error by itself: the network and crashes cause all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Why {
    /// It is about another attempt.
    #[error("it belongs to another attempt or lineage")]
    OtherTicket,
    /// It was acted upon before.
    #[error("it was already known")]
    AlreadyKnown,
    /// The machine is past the point where it would matter, or not there yet.
    #[error("it means nothing in this state")]
    NotNow,
    /// A record is on its way to the disk, and only that can be waited for.
    #[error("a record is being written; ask again")]
    Busy,
    /// It would undo what can no longer be undone.
    #[error("the hand-off is past the point of no return")]
    TooLate,
    /// The peer of the other role says this.
    #[error("it is addressed to the other role")]
    WrongRole,
    /// The node owns the VM as it is.
    #[error("this node owns the VM already; nothing needs to be claimed")]
    AlreadyOwner,
    /// The node lost the VM to a claim.
    #[error("a claim elsewhere began a newer lineage")]
    Outranked,
    /// Whoever claims does not know of a claim that was made since: it may be their own, heard twice.
    #[error("the VM was claimed since that was decided; look at it again, and claim it anew if that is still wanted")]
    ClaimTooOld,
}

/// Why a move cannot begin here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CannotBegin {
    /// Another attempt is under way, or the VM is not up.
    #[error("the VM is not running here undisturbed; wait until it is, or cancel the move under way")]
    Busy,
    /// The node does not own the VM.
    #[error("this node does not own the VM; ask the one that does")]
    NotOwner,
    /// The ticket was used, or is older than one that was.
    #[error("move {mv:?} was already tried from this generation; give the retry a new move id")]
    UsedTicket {
        /// The move that was ordered.
        mv: MoveId,
    },
}

/// A record was given to the machine of the other role.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the record {0:?} belongs to the other role's machine; choose by the record's kind")]
pub struct OtherRole(pub Record);

/// Whether the VM runs here, in words for an operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// This node runs the VM, or is about to without needing anybody.
    Runs,
    /// The VM is paused for the hand-off; this node would resume it by itself if the move failed now.
    Pausing,
    /// The VM is paused here, and whether it runs at the peer is not known here. Over when the peer is heard, or by a
    /// claim. The window: after SEALED, before STARTED was heard.
    WaitsForPeer,
    /// The VM runs at the peer, and pages of its memory are only here.
    Lends,
    /// The VM was taken over here, and pages of its memory that only the peer had are lost: it stands still until somebody gives them
    /// up.
    MemoryLost,
    /// The VM is not this node's to run.
    NotHere,
}
