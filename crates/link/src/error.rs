//! Why something did not arrive.

use crate::Lane;
use godwit_trust::{Identity, PeerError};
use std::io;
use std::net::SocketAddr;
use std::time::Duration;
use thiserror::Error;

/// Why a session is over for good.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Closed {
    /// Nobody here holds it any more, or it was closed.
    #[error("the session was closed here")]
    Here,
    /// The peer closed it.
    #[error("the peer closed the session")]
    ByPeer,
    /// The peer's process is another one: what it had received and not made durable is lost.
    #[error("the peer restarted; connect again, and ask it what it has")]
    PeerRestarted,
    /// The initiator did not come back in time, or came back too late.
    #[error("the session was down for longer than its acceptor keeps it; connect again")]
    Expired,
    /// Certificates do not fit any more.
    #[error(transparent)]
    Peer(PeerError),
}

/// An endpoint or a session could not be had.
#[derive(Debug, Error)]
pub enum LinkError {
    /// A port is taken, or not ours to have.
    #[error("binding {lane:?} lane to udp {address}: {source}")]
    Bind {
        /// Which lane.
        lane: Lane,
        /// Where.
        address: SocketAddr,
        /// Why not.
        source: io::Error,
    },
    /// A setting that QUIC cannot have.
    #[error("configuration: {0}")]
    Config(String),
    /// Nobody answered.
    #[error(
        "connecting to {peer} at udp {address}, {lane:?} lane: no answer within {waited:?} ({last}); is its node up, and UDP let through?"
    )]
    Unreachable {
        /// Whom.
        peer: Identity,
        /// Which lane.
        lane: Lane,
        /// Where.
        address: SocketAddr,
        /// How long was tried.
        waited: Duration,
        /// The last attempt's error.
        last: String,
    },
    /// Somebody answered with whom we shall not speak, or who will not speak with us.
    #[error("connecting to {peer} at udp {address}: {source}")]
    Refused {
        /// Whom we meant.
        peer: Identity,
        /// Where.
        address: SocketAddr,
        /// What was wrong.
        source: PeerError,
    },
    /// The session ended.
    #[error(transparent)]
    Closed(#[from] Closed),
    /// The endpoint was dropped.
    #[error("the endpoint is closed")]
    EndpointClosed,
}

/// A stream ended before its end.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum StreamError {
    /// The session ended, and the stream with it.
    #[error(transparent)]
    Session(#[from] Closed),
    /// The peer's process is another one.
    #[error("the peer restarted; connect again, and ask it what it has")]
    PeerRestarted,
    /// One of the sides gave it up.
    #[error("the stream was given up with code {code}")]
    Reset {
        /// The code that it gave.
        code: u32,
    },
    /// The peer broke the protocol; its stream was cut.
    #[error("the peer broke the stream protocol: {0}")]
    Protocol(String),
    /// Written to after `finish`.
    #[error("the stream was finished already")]
    Finished,
    /// Too many at once.
    #[error("{MAX} streams are open already", MAX = crate::MAX_STREAMS)]
    TooMany,
    /// A greeting over its bound.
    #[error("a hello of {size} bytes; at most {MAX} may be sent", MAX = crate::MAX_HELLO)]
    HelloTooLong {
        /// Its size.
        size: usize,
    },
}

impl StreamError {
    pub(crate) fn of(closed: Closed) -> Self {
        match closed {
            Closed::PeerRestarted => Self::PeerRestarted,
            other => Self::Session(other),
        }
    }
}

/// A request or a message was not carried.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum RequestError {
    /// No answer in time. The peer may have acted on it: ask again only what may be done twice.
    #[error("no answer within {0:?}; the peer may have acted on it")]
    TimedOut(Duration),
    /// Over its bound.
    #[error("{what} of {size} bytes; at most {limit} may be sent")]
    TooLong {
        /// A message, a request, or an answer.
        what: &'static str,
        /// Its size.
        size: usize,
        /// Its bound.
        limit: usize,
    },
    /// Its stream ended.
    #[error(transparent)]
    Stream(#[from] StreamError),
}
