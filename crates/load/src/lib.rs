//! The load that runs inside a guest while it is moved, and proves that nothing was lost on the way.
//!
//! A move is right when every memory page, every acknowledged disk write and every byte of every TCP session is what
//! it would have been without the move. This crate makes load of all three kinds in such a way that the load itself
//! knows what must be there, and says so when it is not:
//!
//! - **memory** ([`arena`], [`page`]): pages that carry their number, version and checksums, against a table of
//!   expected versions;
//! - **disk** ([`disk`], [`record`]): records that carry theirs, against an account of what the disk acknowledged;
//! - **echo** ([`echo`]): numbered messages on one TCP session, which must come back byte for byte;
//! - **tiers** ([`tier`]): of an application that is spread over guests, with clients outside that look at each answer.
//!
//! Beside these it can run what people run, a kernel compile or a database ([`protocol::LoadSpec`]), and it tells what the guest sees
//! of its disks, interval by interval ([`activity`]).
//!
//! The guest runs the binary ([`server`], [`engine`]); the host speaks [`protocol`] with it through
//! [`control::Control`], and runs the [`echo::EchoClient`].
#![forbid(unsafe_code)]

pub mod activity;
pub mod arena;
pub mod content;
pub mod control;
pub mod disk;
pub mod echo;
pub mod engine;
pub mod fault;
pub mod meminfo;
mod memory;
pub mod pace;
pub mod page;
pub mod protocol;
pub mod record;
pub mod server;
mod sql;
pub mod tier;
pub mod warm;
pub mod wire;
mod worker;
mod workload;
