//! Keys of what a guest's former hosts keep of its memory for its way back (`--keep-checkpoint`): which host has something, under which key, until when.
//!
//! They go with the guest, from owner to owner, so that one which comes back by way of other hosts finds what it left as well. Each host's key is its
//! own: it made it when the guest left, and has forgotten it since, so that none can read what another one keeps.

use crate::proto::{KeptAt, Secret};
use godwit_api::name::Name;
use godwit_memory::CheckpointKey;
use std::fs::OpenOptions;
use std::io::{self, ErrorKind, Write as _};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// How long pages are kept for who does not come.
pub const EXPIRY: Duration = Duration::from_secs(24 * 3600);
/// A guest that follows the sun has fewer places. Of more the one that expires first is left out.
const MOST: usize = 8;

/// What all of them do, one entry for each.
#[derive(Clone, Debug, Default)]
pub struct Keys(Vec<KeptAt>);

impl Keys {
    /// As a peer told them, or a file: at most so many, and none for longer than anything is kept.
    #[must_use]
    pub fn told(told: Vec<KeptAt>, now: SystemTime) -> Self {
        let (now, last) = (seconds(now), seconds(now + EXPIRY));
        let mut keys = Self::default();
        for one in told.into_iter().filter(|one| one.until_unix_s > now) {
            keys.put(KeptAt { until_unix_s: one.until_unix_s.min(last), ..one });
        }
        keys
    }

    /// With what this host keeps from now on. What it kept before is gone.
    #[must_use]
    pub fn with(mut self, host: Name, key: Secret, now: SystemTime) -> Self {
        self.put(KeptAt { host, key, until_unix_s: seconds(now + EXPIRY) });
        self
    }

    fn put(&mut self, one: KeptAt) {
        self.0.retain(|other| other.host != one.host);
        self.0.push(one);
        self.0.sort_by_key(|one| std::cmp::Reverse(one.until_unix_s));
        self.0.truncate(MOST);
    }

    /// Without what this host keeps: the guest is there.
    #[must_use]
    pub fn without(mut self, host: &Name) -> Self {
        self.0.retain(|one| one.host != *host);
        self
    }

    /// The key of what this host keeps.
    #[must_use]
    pub fn of(&self, host: &Name) -> Option<CheckpointKey> {
        self.0.iter().find(|one| one.host == *host).map(|one| CheckpointKey(one.key.0))
    }

    /// For a peer.
    #[must_use]
    pub fn into_told(self) -> Vec<KeptAt> {
        self.0
    }

    /// Of the VM with this folder, those that still open something. What cannot be read is none: nothing but time is lost by it.
    #[must_use]
    pub fn read(folder: &Path, now: SystemTime) -> Self {
        let read = std::fs::read(path(folder)).map(|bytes| serde_json::from_slice(&bytes));
        match read {
            Ok(Ok(told)) => return Self::told(told, now),
            Ok(Err(error)) => tracing::warn!(folder = %folder.display(), %error, "keys of checkpoints are lost"),
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => tracing::warn!(folder = %folder.display(), %error, "keys of checkpoints cannot be read"),
        }
        Self::default()
    }

    /// Makes these the keys of the VM with this folder.
    ///
    /// # Errors
    /// When they cannot be written.
    pub fn write(&self, folder: &Path) -> io::Result<()> {
        if self.0.is_empty() {
            forget(folder);
            return Ok(());
        }
        put(&path(folder), &serde_json::to_vec(&self.0)?)
    }
}

fn seconds(time: SystemTime) -> u64 {
    time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs()
}

fn path(folder: &Path) -> PathBuf {
    folder.join("checkpoint.keys")
}

/// Forgets the keys of the VM with this folder.
pub fn forget(folder: &Path) {
    removed(&path(folder));
}

/// Removes a file, if it is there.
pub(crate) fn removed(path: &Path) {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            tracing::warn!(path = %path.display(), %error, "cannot be removed");
        }
        _ => {}
    }
}

/// Replaces a file, for its owner's eyes only. Not durable: what is in it is worth a few seconds of a move.
///
/// # Errors
/// When it cannot be written.
pub(crate) fn put(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut fresh = path.as_os_str().to_owned();
    fresh.push(".new");
    OpenOptions::new().create(true).truncate(true).write(true).mode(0o600).open(&fresh)?.write_all(bytes)?;
    std::fs::rename(&fresh, path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn host(name: &str) -> Name {
        name.parse().unwrap()
    }

    fn at(name: &str, until_unix_s: u64) -> KeptAt {
        KeptAt { host: host(name), key: Secret([7; 32]), until_unix_s }
    }

    fn hosts(keys: &Keys) -> Vec<&str> {
        keys.0.iter().map(|one| one.host.as_str()).collect()
    }

    #[test]
    fn keys_outlast_a_restart_for_their_owners_eyes_only_until_what_they_open_is_dropped() {
        let folder = tempfile::tempdir().unwrap();
        let now = SystemTime::now();
        let keys = Keys::default().with(host("a"), Secret([1; 32]), now).with(host("b"), Secret([2; 32]), now);
        keys.write(folder.path()).unwrap();
        let mode = std::fs::metadata(path(folder.path())).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let read = Keys::read(folder.path(), now);
        assert_eq!(read.of(&host("a")), Some(CheckpointKey([1; 32])));
        assert_eq!(read.of(&host("b")), Some(CheckpointKey([2; 32])));
        assert_eq!(read.of(&host("c")), None);
        assert!(hosts(&Keys::read(folder.path(), now + EXPIRY)).is_empty());
        std::fs::write(path(folder.path()), b"[{\"torn").unwrap();
        assert!(hosts(&Keys::read(folder.path(), now)).is_empty());
        Keys::default().write(folder.path()).unwrap();
        assert!(!path(folder.path()).exists());
    }

    #[test]
    fn a_host_keeps_one_thing_and_none_once_the_guest_is_there() {
        let now = SystemTime::now();
        let keys = Keys::default().with(host("a"), Secret([1; 32]), now).with(host("a"), Secret([2; 32]), now);
        assert_eq!((hosts(&keys), keys.of(&host("a"))), (vec!["a"], Some(CheckpointKey([2; 32]))));
        assert!(hosts(&keys.without(&host("a"))).is_empty());
    }

    #[test]
    fn what_a_peer_tells_is_bounded_in_number_and_in_time() {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000);
        let mut told: Vec<_> = (0..100).map(|n| at(&format!("h{n}"), 1_000_000 + n)).collect();
        told.push(at("for-ever", u64::MAX));
        let keys = Keys::told(told, now);
        assert_eq!(hosts(&keys), ["for-ever", "h99", "h98", "h97", "h96", "h95", "h94", "h93"]);
        assert_eq!(keys.0[0].until_unix_s, 1_000_000 + EXPIRY.as_secs());
        assert!(hosts(&Keys::told(vec![at("a", 999_999)], now)).is_empty(), "it is gone");
    }
}
