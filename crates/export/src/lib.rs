//! Disks served over NBD: the threads and sockets around [`godwit_nbd::Server`].
//!
//! A client has a thread of its own, which blocks where it has nothing to do: a request costs a wake-up, and whatever came
//! with it is taken, done and answered together. What the page cache holds is read where it is sent from, by this thread; what
//! it does not hold, and whatever waits for a disk, goes to helpers of its own, so that no read waits behind a flush.
//!
//! Two disks are served in this way: a node's, for a QEMU, and a plain file or a replica, without a controller
//! ([`Plain`], [`Tracked`]).
//!
//! # What can go wrong
//!
//! *A client does not read its answers.* Its thread waits in the send, and takes no more requests; nobody else's does.
//!
//! *A client leaves with requests under way.* They are done, and answered while it listens. One that is cut off sees the end of its connection
//! when they are done: no write is made over what it has written by another connection since.
//!
//! *A client takes its time before it has chosen an export.* It is shut out after half a minute, whether it says nothing, or always has more to
//! say, or takes what it is told bit by bit.
//!
//! *All of it ends with requests under way.* Nothing more is taken from anybody, and what was is done and answered. Whoever does not take the
//! answers is waited for a few seconds.
//!
//! *A flush fails.* The system tells of a lost write once: so no later flush succeeds, of any client, before the file is opened again
//! ([`godwit_volume::Synced`]).
//!
//! *A disk is slow.* At most [`MOST_HELPERS`] threads of a client wait for it; what else it asks for stands in a queue that the protocol's
//! machine bounds ([`godwit_nbd::MAX_IN_FLIGHT`]).

mod backend;
mod cached;
mod connection;
mod eager;
mod file;
mod helpers;
mod listener;
mod pipe;
mod tls;
mod wire;

pub use backend::{Answers, Backend, Put, Untaken};
pub use connection::serve;
pub use file::{Plain, ServeError, Tracked};
pub use helpers::MOST_HELPERS;
pub use listener::{Listener, MOST_CLIENTS, Stop, serve_all};
pub use tls::{TlsError, tls_from};
pub use wire::{HangUp, Wire};
