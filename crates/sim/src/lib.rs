//! One small world, from one number: two sites, the hand-off's machines as a node runs them, and everything that
//! can go wrong around them.
//!
//! A [`World`] holds two sites. Each has a node (its machine, a ledger, effects under way), a model of QEMU, and a
//! model of the VM's export and endpoints. Between them lies a network that loses, doubles, delays and reorders. A
//! controller orders moves, cancels, claims, and forgets half of what it began. All chances come from the seed, so
//! that the same seed is the same story, event by event.
//!
//! A schedule has two parts. In the first, faults strike. In the second nothing new goes wrong, messages flow, and
//! the world has [`world::CALM`] ticks to come to rest with exactly one VM running. In some schedules one site never
//! returns: then the other must run the VM, or say what it waits for, and a claim must end the wait.
//!
//! What the models keep of the real things, and no more:
//!
//! - **QEMU**: a source that has not reached `postmigrate` resumes by itself when its migration socket breaks, which
//!   happens when its node dies; one that has, never does. It survives the node's process, but not the power.
//! - **The volume**: a register that counts writes. The guest's RAM remembers the last one that it made. A guest
//!   whose memory disagrees with the register has lost a write that was acknowledged, or there was a second writer.
//! - **The export** lives in the node's process and dies with it; **the endpoint** lives in the kernel.
//! - **The disk** keeps of the records under way any prefix when the node dies; a torn record counts as not written,
//!   because the ledger's contract (two slots, or a rename) makes it so.
//! - **Effects** under way when the node dies happen or not: a `cont` may sit in a socket already.

#![forbid(unsafe_code)]

pub mod check;
mod guest;
pub mod media;
pub mod mirror;
pub mod net;
pub mod nic;
mod profile;
mod shell;
pub mod site;
pub mod truth;
pub mod world;

pub use check::{Failure, Violation, run, run_traced};
pub use godwit_handoff::{Guard, Guards};
pub use profile::{Profile, Rules};
