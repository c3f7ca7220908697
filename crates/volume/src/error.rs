//! What can go wrong with a replica.

use std::io;
use std::path::PathBuf;

/// Why something could not be done.
#[derive(Debug, thiserror::Error)]
pub enum VolumeError {
    /// The medium.
    #[error("cannot {what} {}: {source}", path.display())]
    Io {
        /// What was tried.
        what: &'static str,
        /// On which file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Another process has it.
    #[error("the replica {} is in use by another process", .0.display())]
    Locked(PathBuf),
    /// The system, or another process, has the device.
    #[error("{} is mounted, or in use by the system or another process; a volume needs a device for itself", .0.display())]
    Busy(PathBuf),
    /// Shared storage that another has had since.
    #[error(
        "the volume at {} was {who}'s as a later owner, or as the same: this host is not its owner any more, whatever its record says",
        place.display()
    )]
    Outranked {
        /// Where it lies.
        place: PathBuf,
        /// Who has had it.
        who: String,
    },
    /// The cluster that its blocks are in.
    #[error("Ceph: {0}")]
    Rados(String),
    /// Its description is damaged.
    #[error("{} is damaged: {why}; the replica cannot be trusted, restore it from another site", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// In what way.
        why: String,
    },
    /// A size or range that is none.
    #[error("{0}")]
    Range(String),
    /// Blocks that another site holds: a shadow volume has to fetch them first.
    #[error("{} blocks from {} on are not here yet; they come from where the volume was", .0.end - .0.start, .0.start)]
    Absent(std::ops::Range<u64>),
    /// Not with a volume that is not whole.
    #[error(
        "{0} blocks of the volume are still to come from where it was; wait until the fill has ended, or move it by post-copy"
    )]
    Shadow(u64),
    /// Writes are refused now.
    #[error("the volume takes no writes now: it is being handed over, or belongs to another host")]
    Frozen,
}

/// Whoever reads or writes for a guest makes one each time: nothing is copied before there is an error.
pub(crate) fn io_error(what: &'static str, path: &std::path::Path) -> impl FnOnce(io::Error) -> VolumeError {
    move |source| VolumeError::Io { what, path: path.to_owned(), source }
}
