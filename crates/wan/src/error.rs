//! What can go wrong, and what the user can do about it.

use std::io;
use thiserror::Error;

/// Why a path could not be made, changed or asked.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum WanError {
    /// A field of a [`PathSpec`](crate::PathSpec) is outside its range; nothing was changed.
    #[error("path spec refused: {field} is {value}, but {rule}")]
    InvalidSpec {
        /// The field's name.
        field: &'static str,
        /// Its value, as the user would write it.
        value: String,
        /// What it has to satisfy.
        rule: &'static str,
    },
    /// No interface of this name exists in the calling thread's network namespace.
    #[error(
        "no interface `{interface}` in this thread's network namespace: create it there (or move it in) before starting the path"
    )]
    NoInterface {
        /// The name asked for.
        interface: String,
    },
    /// The kernel refused to open or configure the packet socket.
    #[error(
        "cannot {attempt} on `{interface}`: {source} (packet sockets need CAP_NET_RAW, and CAP_NET_ADMIN in the namespace)"
    )]
    Socket {
        /// What was tried, as a verb phrase.
        attempt: &'static str,
        /// The interface it was tried on.
        interface: String,
        /// The kernel's answer.
        source: io::Error,
    },
    /// A forwarding thread or its wake-up descriptor could not be made.
    #[error(
        "cannot start the forwarding threads of path `{path}`: {source}; raise the limits on threads and open files"
    )]
    Start {
        /// The path's name.
        path: String,
        /// The system's answer.
        source: io::Error,
    },
    /// A forwarding thread has died, which is a bug: the path carries nothing in one direction. Start a new path.
    #[error(
        "a forwarding thread of path `{path}` has died (a bug; its panic message is on stderr): drop the path and start a new one"
    )]
    Dead {
        /// The path's name.
        path: String,
    },
    /// `ethtool` is missing or could not be run.
    #[error("cannot run `ethtool` for `{interface}`: {source}; install ethtool")]
    NoEthtool {
        /// The interface to be changed.
        interface: String,
        /// Why it did not run.
        source: io::Error,
    },
    /// `ethtool` ran, and the interface is not as asked.
    #[error(
        "cannot change segmentation offloads of `{interface}`: {answer}; run this in the interface's namespace, as root"
    )]
    Offload {
        /// The interface to be changed.
        interface: String,
        /// What `ethtool` said, or which features stayed as they were.
        answer: String,
    },
}
