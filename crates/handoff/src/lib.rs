//! Who owns a VM: the two state machines, one at each side, that hand it over so that it never runs twice.
//!
//! No sockets, clock or tasks: a machine takes events ([`Source::handle`], [`Destination::handle`]) and gives actions
//! (`poll_action`), to be polled dry after every event and carried out in order. Records and effects are two queues:
//! neither waits for the other, each keeps its own order.
//!
//! # What can go wrong
//!
//! Either node's process may be killed, and restart to find its QEMU alive. Either host may lose its power, and with
//! it every record that was not yet durable and all RAM. A QEMU may die alone. Messages may be lost, doubled, and
//! arrive years late. A controller may order anything, twice, or die half way. And QEMU itself may resume the guest:
//! a source whose migration breaks off goes on by itself, until it has reached `postmigrate`.
//!
//! # Why the steps stand in this order
//!
//! Two machines cannot agree at one instant over a network that loses messages. So ownership passes through a moment
//! in which *nobody* may run the VM, and both sides know from their own disk alone that they may not:
//!
//! 1. **The ticket is used up first**, durably at both sides, before a byte is sent under it. Whatever arrives late
//!    from an earlier attempt carries another ticket, and is nobody's answer to this one.
//! 2. **Close, verify, `postmigrate`, and only then the seal.** Whatever is undone before the seal needs no message:
//!    the source continues, as a restarted node does too. After the seal it may not; so by then the destination must have
//!    everything, no write may still be accepted, and QEMU must be past resuming by itself. SHUT, which takes it there,
//!    is answered by the source's own node when the destination's said that all was verified: half a round trip
//!    sooner than relaying the destination QEMU's. The wait for this is bounded ([`PATIENCE`]).
//! 3. **SEALED is durable before COMMIT.** A source that forgot its seal would run beside the destination.
//! 4. **GRANTED before opening, STARTED before `cont`.** A destination that forgot would answer a RECALL with REFUSED
//!    after it had opened or run. Between the two records the source's RAM is still the VM: if ours dies there, we
//!    close, write RETURNED, and the source goes on at g+2. After STARTED its RAM is stale for ever, and what remains
//!    when ours dies is a boot from the volumes. Open is finished before STARTED is written, so that everything that
//!    can still fail, fails while the VM can be returned.
//! 5. **RELEASED before the acknowledgement.** Once acknowledged, the destination forgets the hand-off and may hand
//!    the VM on; nobody would answer a source that still asked.
//! 6. **REFUSED is written before it is told**, and stays. The source runs on that word.
//!
//! # When a side is gone for good
//!
//! A sealed source without its destination is paused and says so ([`Status::WaitsForPeer`]). An operator's claim
//! overrides that, on [`Fenced`] evidence, and begins a new [`Lineage`]. Before the fence is lifted the loser's record
//! is overwritten ([`Record::overridden_by`]), whatever it is: one that waits for the peer's word might yet be given it by a
//! message from before the claim. Messages of an old lineage are answered with [`Body::Outranked`], a second line
//! behind that. RETURNED is durable before it is told for uniformity only: recovery from GRANTED without RAM gives
//! the same answer.
//!
//! # Memory that follows its guest
//!
//! With memory post-copy the guest is handed over while a part of its RAM is only at the source. Until it runs at the destination
//! nothing else is different: the source's RAM is the whole VM. But a source QEMU whose post-copy has begun is gone back to only by
//! a detour, for which its node has to keep some rules of its own; and from DRAINING on there is no way back at all. So:
//!
//! 1. **PREPARED before the seal.** The destination writes that it will not refuse before it says that it is ready: no cancel at its side
//!    and no restart sends the guest back afterwards. It refuses only when the source says OVER, which it says of attempts that
//!    it can never seal any more; a RECALL may be late. If its QEMU dies before the guest ran, it returns the VM, as ever.
//! 2. **DRAINING instead of STARTED, before `cont`,** and STARTED when the last page is here: the source keeps its QEMU until
//!    STARTED, as ever, and the acknowledgement comes after that.
//! 3. **A cut** is waited out by both sides; the guest waits for what it touches. **A source that lost its RAM says LOST**, and the
//!    destination stands still and says so ([`Status::MemoryLost`]) until somebody gives the memory up ([`Event::Abandon`]). **A source
//!    that is never heard again** takes a claim at the destination. Both boot from the volumes. **A destination whose QEMU dies** has lost the
//!    memory as any host has whose QEMU dies, and boots.

#![forbid(unsafe_code)]
mod destination;
mod evidence;
mod file_ledger;
mod guards;
mod ids;
mod io;
mod machine;
mod outbox;
mod record;
mod source;

pub use destination::{Arrival, Destination, DestinationState, Pages, There};
pub use evidence::{Fenced, NoEvidence, Peer, SHORTEST_STATEMENT};
pub use file_ledger::{FileLedger, LedgerError};
pub use godwit_units::{Generation, Lineage, MoveId, VmId};
#[cfg(feature = "sabotage")]
#[doc(hidden)]
pub use guards::{Guard, Guards};
pub use ids::Ticket;
pub use io::{Action, Body, CannotBegin, Event, Message, OtherRole, PeerHistory, Run, Seen, Status, Verdict, Why};
pub use machine::Machine;
pub use record::{Ledger, Owner, Ram, Record};
pub use source::{Asking, PATIENCE, Ready, Source, SourceState, Upkeep};
