//! What can go wrong with a QEMU.

use std::io;
use std::path::PathBuf;

/// Why something could not be done.
#[derive(Debug, thiserror::Error)]
pub enum VmmError {
    /// QMP failed.
    #[error(transparent)]
    Qmp(#[from] godwit_qmp::QmpError),
    /// A file or a process.
    #[error("cannot {what} {}: {source}", path.display())]
    Io {
        /// What was tried.
        what: &'static str,
        /// With what.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// QEMU did not come up.
    #[error("QEMU did not come up: {why}; its log ends: {log}")]
    NotUp {
        /// As far as is known.
        why: String,
        /// The end of its log.
        log: String,
    },
    /// It runs and says nothing. That does not make it gone: its guest may run.
    #[error(
        "QEMU's monitor (process {pid}) does not answer: {why}; it is tried again for as long as the process is there"
    )]
    Unreachable {
        /// Its process.
        pid: u32,
        /// As far as is known.
        why: String,
    },
    /// There is one already.
    #[error(
        "a QEMU of this VM runs here already (process {pid}); two would spoil its disks, so none is started beside it"
    )]
    Already {
        /// Its process.
        pid: u32,
    },
    /// The VM cannot be run as it is.
    #[error("{0}")]
    Spec(String),
    /// QEMU is in a state in which this cannot be done.
    #[error("QEMU is `{state}`, and cannot {what} now")]
    State {
        /// What was tried.
        what: &'static str,
        /// Its state.
        state: String,
    },
    /// A source in post-copy that can neither give pages any more nor go on with its guest.
    #[error("QEMU's post-copy broke off where QEMU can neither go on with it nor go back")]
    Stuck,
    /// QEMU said something that makes no sense.
    #[error("QEMU's answer to `{command}` has no {missing}")]
    Answer {
        /// The command.
        command: &'static str,
        /// What is missing.
        missing: &'static str,
    },
}

pub(crate) fn io_error(what: &'static str, path: &std::path::Path) -> impl FnOnce(io::Error) -> VmmError {
    let path = path.to_owned();
    move |source| VmmError::Io { what, path, source }
}
