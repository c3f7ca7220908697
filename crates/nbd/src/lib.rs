//! The Network Block Device protocol, without sockets: a machine takes what a client sent and gives requests, takes
//! answers and gives what is to be sent.
//!
//! [`Server`] is one connection to a client: QEMU, libnbd's tools, the kernel's `nbd-client`. It speaks the fixed
//! newstyle handshake, structured replies and `base:allocation`; TLS it requires or declines, and extended headers it
//! declines, as the protocol provides for.
//!
//! [`Client`] is the same from the other end: what the server takes as a [`Command`], the client sends as one.
//!
//! # What can go wrong
//!
//! *A client lies about lengths.* Each is compared with a bound ([`MAX_REQUEST`], [`MAX_OPTION`]) before anything is
//! kept for it; an option that is too long is read past and declined, a request that is too long ends the connection,
//! because its payload could not be told from the next request.
//!
//! *A client asks faster than it is answered.* [`Server::wants_input`] says no at [`MAX_IN_FLIGHT`] requests or
//! [`MAX_HELD`] bytes, and [`Server::poll_request`] gives no more; the shell stops reading then, and the client's socket fills.
//!
//! *A request makes no sense* (past the end, unknown command): it is answered with an error here, and whoever serves the
//! disk never sees it. A read or a trim past the end is EINVAL, a write ENOSPC, as the protocol asks.
//!
//! The protocol: <https://github.com/NetworkBlockDevice/nbd/blob/master/doc/proto.md>.

#![forbid(unsafe_code)]
mod client;
mod client_handshake;
mod flight;
mod handshake;
mod proto;
mod server;

pub use client::{Blocks, Client, ClientError, Event, NotSent, Remote};
pub use proto::{Errno, MAX_EXTENTS, MAX_HELD, MAX_IN_FLIGHT, MAX_NAME, MAX_OPTION, MAX_PIECES, MAX_REQUEST};
pub use server::{BegunWrite, Command, Cookie, Export, Extent, Filled, Piece, ProtocolError, Reply, Request, Server};
