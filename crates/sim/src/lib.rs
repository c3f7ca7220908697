//! One small world, from one number: two sites, the hand-off's machines as a node runs them, and everything that
//! can go wrong around them.
//!
//! A [`World`] holds two sites and runs at them the machines that the node runs: the hand-off's
//! ([`godwit_handoff::Machine`]), a [`godwit_volume::Replica`] with its [`mirror`](godwit_volume::mirror), a
//! [`godwit_wire::Endpoint`], and at a gateway a [`godwit_wire::Port`]. The shell around them does what the node's does, in the
//! same order, in small steps between which anything may die. Between the sites lies a network that loses, doubles, delays
//! and reorders messages, and cuts that streams survive. A controller orders moves, cancels, claims, and forgets half of
//! what it began. All chances come from the seed, so that the same seed is the same story, event by event.
//!
//! A schedule has two parts. In the first, faults strike; what strikes most is the world's [`Profile`]. In the second nothing new
//! goes wrong, messages flow, and the world has [`world::CALM`] ticks to come to rest with exactly one VM running. In some
//! schedules one site never returns: then the other must run the VM, or say what it waits for, and a claim must end the
//! wait. Worlds of another theme ([`claims`]) are about nothing else: orders to claim that are lost, doubled and late, or
//! careless, and hosts that come back.
//!
//! What the models keep of the real things, and no more:
//!
//! - **QEMU**: a source that has not reached `postmigrate` resumes by itself when its migration socket breaks, which
//!   happens when its node dies; one that has, never does. It survives the node's process, but not the power. It keeps the
//!   guest's requests until they are answered, and asks again when its node is back. A request that finds the replica
//!   frozen waits; the node's export has to see to that.
//! - **The guest** writes whole blocks, single sectors and zeroes, flushes, and reads a few blocks at every turn. Its RAM
//!   remembers its last write. [`truth::Truth`] knows what it may find: the last write, and after a loss of power nothing older
//!   than the last flush.
//! - **The disk** ([`media`]) has a write cache. A process that dies leaves what it wrote, a loss of power any part of what was
//!   not synced, sector by sector; either may strike between any two operations of a replica, or in the middle of one. The
//!   volume is small, and so are its regions, so that there are several.
//! - **The ledger** keeps of the records under way any prefix when the node dies; a torn record counts as not written,
//!   because the ledger's contract (two slots, or a rename) makes it so. What the dead process had written its next one reads, and a
//!   loss of power takes it, until that has made it durable.
//! - **The endpoint** lives in the kernel, from which its machine is rebuilt at each order; announcements live in the process.
//! - **Memory that follows** ([`pages`]): a source QEMU whose post-copy has begun gives pages until it ends, and goes on with the guest only
//!   where a node makes it and it still can, which depends on what the node did before ([`ShellGuard`]); one whose node dies before it was
//!   given its stream's other end is broken off; a guest that lacks pages waits while nobody gives them. Not modelled: a stream that breaks
//!   off just after the last page, when the guest has gone.
//! - **Streams** come in order and whole while both processes live, however long a cut lasts, and end with either.
//! - **Effects** under way when the node dies happen or not: a `cont` may sit in a socket already.

#![forbid(unsafe_code)]

pub mod check;
pub mod claims;
mod guest;
pub mod media;
pub mod mirror;
pub mod net;
pub mod nic;
pub mod pages;
pub mod postcopy;
mod profile;
mod shell;
pub mod site;
pub mod truth;
pub mod world;

pub use check::{Failure, Violation, run, run_about, run_traced, run_traced_about};
pub use godwit_handoff::{Guard, Guards};
pub use profile::{Profile, Rules, ShellGuard, ShellGuards};
pub use world::{Theme, Told};
