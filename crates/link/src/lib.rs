//! The authenticated, encrypted, prioritised transport between two hosts.
//!
//! An [`Endpoint`] listens and connects; a [`Session`] joins two nodes; it carries byte streams, messages and
//! requests, and knows nothing of pages or blocks. Below it is QUIC with mutual TLS (`godwit-trust`).
//!
//! # What can go wrong, and what holds nevertheless
//!
//! *The WAN is cut*, for seconds or minutes. QUIC connections die of silence after [`Config::silence`]; the session
//! does not. It connects anew for as long as somebody holds it, and every stream goes on at the byte that the other end
//! has: nothing lost, nothing twice ([`resume`]).
//!
//! *The peer's process restarts.* It knows nothing of our streams. Both sides draw an incarnation at their start, and
//! the session ends with [`Closed::PeerRestarted`].
//!
//! *Bulk holds up what is urgent.* Each [`Lane`] is a connection of its own, on its own port: a loss or a queue on one
//! does not stop another. Within a lane [`Priority`] decides, and under a limit across lanes too ([`budget`]); and bulk leaves a part of what a
//! lane may have under way to what is urgent.
//!
//! *A peer begins sessions without end.* It has a few; for another one its oldest ends. Others' places are not touched.
//!
//! *A reader is slow.* Its peer may have only a stream's window of bytes unread; then the writer waits.
//!
//! *A peer lies.* Every length is compared with a named bound before anything is allocated.

#![forbid(unsafe_code)]

pub mod budget;
mod config;
mod counters;
mod endpoint;
mod error;
mod limiter;
pub mod pace;
pub mod resume;
mod samples;
pub mod scavenger;
mod session;
mod stream;
mod trains;
mod transport;
mod windows;
mod wire;

pub use config::{Addresses, Config, Lane, Peer, Priority};
pub use counters::{Counters, LaneCounters, StreamCounters};
pub use endpoint::Endpoint;
pub use error::{Closed, LinkError, RequestError, StreamError};
pub use samples::Path;
pub use session::{Asked, MAX_MESSAGE, MAX_REQUEST, Responder, Session, State};
pub use stream::{Flow, RecvHalf, SendHalf, Stream};
pub use trains::Shown;
#[doc(hidden)]
pub use wire::read_anything;
pub use wire::{MAX_HELLO, MAX_STREAMS};
