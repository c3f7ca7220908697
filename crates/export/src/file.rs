//! Disks that are files: plain, or a replica with its stamps.

use crate::backend::{Answers, Backend, Put, Untaken};
use godwit_nbd::{self as nbd, Command, Cookie, Export, Extent, Piece, Reply};
use godwit_units::{Bytes, Generation, Lineage, VolumeId};
use godwit_volume::{BLOCK, Disk, LINGERING, Medium, Replica, Synced, VolumeError};
use rustix::fs::{FallocateFlags, FlockOperation, fallocate, flock};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Why something cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The file.
    #[error("cannot {what} {}: {source}", path.display())]
    Io {
        /// What was tried.
        what: &'static str,
        /// On what.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Somebody else has it.
    #[error("{} is in use by another process", .0.display())]
    Locked(PathBuf),
    /// It cannot be tracked.
    #[error("{} has {size} bytes, and only whole blocks of {BLOCK} can be tracked: serve it with --no-track, or `truncate -s %4096` it", path.display())]
    NotBlocks {
        /// The file.
        path: PathBuf,
        /// Its size.
        size: u64,
    },
    /// It is a folder, and no replica.
    #[error("{} is a folder, and holds no replica", .0.display())]
    NoReplica(PathBuf),
    /// The replica.
    #[error(transparent)]
    Volume(#[from] VolumeError),
}

fn io_error(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> ServeError {
    let path = path.to_owned();
    move |source| ServeError::Io { what, path, source }
}

/// By word, not only by closing it: a program that this process starts has the file open, too, from its fork to its exec.
fn unlock(file: &File) {
    let _ = flock(file, FlockOperation::Unlock);
}

/// A raw file that is tracked, for nobody else.
#[derive(Debug)]
struct Raw(File);

impl Drop for Raw {
    fn drop(&mut self) {
        unlock(&self.0);
    }
}

/// Opens a file, for nobody else.
fn open_locked(path: &Path) -> Result<(File, u64), ServeError> {
    let file = OpenOptions::new().read(true).write(true).open(path).map_err(io_error("open", path))?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(Errno::WOULDBLOCK) => return Err(ServeError::Locked(path.to_owned())),
        Err(e) => return Err(io_error("lock", path)(e.into())),
    }
    // Of a block device, too.
    let size = (&file).seek(SeekFrom::End(0)).map_err(io_error("find the size of", path))?;
    Ok((file, size))
}

fn name_of(path: &Path) -> String {
    path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned())
}

fn extents(found: Vec<(u64, bool)>) -> Reply {
    let extent = |(length, hole)| Extent { length: u32::try_from(length).unwrap_or(u32::MAX), hole };
    Reply::Status(found.into_iter().map(extent).collect())
}

/// A file or block device, as it is: nobody remembers what was written.
#[derive(Debug)]
pub struct Plain {
    disk: Disk,
    /// The same file, for what is to be durable: of several clients that flush the system would tell one of a lost write.
    syncs: Synced,
    path: PathBuf,
    size: u64,
    /// A device knows no holes.
    device: bool,
}

impl Drop for Plain {
    fn drop(&mut self) {
        unlock(self.disk.as_file());
    }
}

impl Plain {
    /// Opens it.
    ///
    /// # Errors
    /// When it cannot be opened, or somebody else has it.
    pub fn open(path: &Path) -> Result<Self, ServeError> {
        let (file, size) = open_locked(path)?;
        let device = file.metadata().map_err(io_error("look at", path))?.file_type().is_block_device();
        // The same description: whatever it has to tell of a write is told here.
        let again = file.try_clone().map_err(io_error("open", path))?;
        let syncs = Synced::new(Box::new(Disk::new(again, size)));
        Ok(Self { disk: Disk::new(file, size), syncs, path: path.to_owned(), size, device })
    }

    /// What was written survives a loss of power.
    ///
    /// # Errors
    /// When the disk fails, or has failed before.
    pub fn close(&self) -> Result<(), ServeError> {
        self.syncs.sync().map_err(io_error("sync", &self.path))
    }

    fn failed(&self, error: &io::Error) -> Reply {
        tracing::warn!(file = %self.path.display(), %error, "a request failed");
        Reply::Error(nbd::Errno::of(error))
    }

    fn do_it(&self, command: Command) -> io::Result<Reply> {
        let durable = |fua: bool| {
            if fua {
                self.syncs.sync()?;
            }
            Ok(Reply::Done)
        };
        match command {
            Command::Read { offset, length } => {
                let mut bytes = vec![0; length as usize];
                self.disk.read(offset, &mut bytes)?;
                Ok(Reply::Data(vec![Piece::Data(bytes.into())]))
            }
            Command::Write { offset, data, fua } => {
                self.disk.write(offset, &data)?;
                durable(fua)
            }
            Command::Trim { offset, length, fua } => {
                // Only a wish.
                let _ = self.disk.punch(offset, u64::from(length));
                durable(fua)
            }
            Command::WriteZeroes { offset, length, fua, no_hole, fast } => {
                let how = if no_hole { FallocateFlags::ZERO_RANGE } else { FallocateFlags::PUNCH_HOLE };
                match fallocate(self.disk.as_file(), how | FallocateFlags::KEEP_SIZE, offset, u64::from(length)) {
                    Ok(()) => {}
                    // What is no whole block of a device, too.
                    Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) if fast => {
                        return Ok(Reply::Error(nbd::Errno::NotSupported));
                    }
                    Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => {
                        self.disk.write_zeroes(offset, u64::from(length))?;
                    }
                    Err(e) => return Err(e.into()),
                }
                durable(fua)
            }
            Command::Flush => durable(true),
            Command::Cache { offset, length } => {
                let length = std::num::NonZeroU64::new(u64::from(length));
                let _ = rustix::fs::fadvise(self.disk.as_file(), offset, length, rustix::fs::Advice::WillNeed);
                Ok(Reply::Done)
            }
            Command::BlockStatus { offset, length, .. } if self.device => {
                let _ = offset;
                Ok(extents(vec![(u64::from(length), false)]))
            }
            Command::BlockStatus { offset, length, .. } => Ok(extents(self.disk.extents(offset, u64::from(length))?)),
        }
    }
}

impl Backend for Plain {
    fn export(&self) -> Export {
        Export { name: name_of(&self.path), size: self.size, preferred_block: BLOCK as u32, read_only: false }
    }

    fn read_now(&self, offset: u64, into: &mut [u8]) -> usize {
        self.disk.read_now(offset, into)
    }

    fn file_of(&self, _: u64, _: u64) -> Option<BorrowedFd<'_>> {
        Some(self.disk.as_file().as_fd())
    }

    fn write_by(&self, _: Cookie, offset: u64, _: u32, _: &Answers, put: Put<'_>) -> Result<Option<Reply>, Untaken> {
        Ok(Some(put(self.disk.as_file().as_fd(), offset).map_or_else(|error| self.failed(&error), |()| Reply::Done)))
    }

    fn warm(&self, offset: u64, length: u64) {
        self.disk.warm(offset, length);
    }

    fn perform(&self, _: Cookie, command: Command, _: &Answers) -> Option<Reply> {
        Some(self.do_it(command).unwrap_or_else(|error| self.failed(&error)))
    }
}

/// A replica: of a node's volume, in its folder, or a raw file with what is known of it in a folder beside it.
#[derive(Debug)]
pub struct Tracked {
    replica: Replica,
    path: PathBuf,
    read_only: bool,
    /// The raw file, locked.
    raw: Option<Raw>,
}

/// The file with [`Seen`], in the folder beside a raw file.
const SEEN: &str = "seen";

/// What a raw file looked like when it was closed, or all of it was stamped: if it looks otherwise when it is opened, somebody else had it.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Seen {
    size: u64,
    modified: i64,
    modified_ns: i64,
}

impl Seen {
    fn of(metadata: &Metadata) -> Self {
        Self { size: metadata.len(), modified: metadata.mtime(), modified_ns: metadata.mtime_nsec() }
    }

    fn note(&self, at: &Path) -> Result<(), ServeError> {
        let bytes = serde_json::to_vec(self).map_err(|e| io_error("describe", at)(e.into()))?;
        godwit_durable::replace(at, &bytes).map_err(io_error("write", at))
    }
}

impl Tracked {
    /// Where what is known of a raw file is kept.
    #[must_use]
    pub fn folder_beside(file: &Path) -> PathBuf {
        let mut name = file.as_os_str().to_owned();
        name.push(".godwit");
        name.into()
    }

    /// Opens a replica's folder, or a raw file. A replica that is another one's copy is served for reading only.
    ///
    /// # Errors
    /// When it cannot be opened, or somebody else has it.
    pub fn open(path: &Path) -> Result<Self, ServeError> {
        if !path.is_dir() {
            return Self::open_raw(path);
        }
        if !Replica::exists(path) {
            return Err(ServeError::NoReplica(path.to_owned()));
        }
        let (replica, _) = Replica::open(path)?;
        let read_only = match replica.resume() {
            Ok(()) => false,
            Err(VolumeError::Frozen) => true,
            Err(error) => return Err(error.into()),
        };
        Ok(Self { replica, path: path.to_owned(), read_only, raw: None })
    }

    fn open_raw(path: &Path) -> Result<Self, ServeError> {
        let (file, size) = open_locked(path)?;
        let file = Raw(file);
        if size == 0 || !size.is_multiple_of(BLOCK) {
            return Err(ServeError::NotBlocks { path: path.to_owned(), size });
        }
        let folder = Self::folder_beside(path);
        let known = Replica::exists(&folder);
        if !known {
            // Nobody but this file is ever compared with it under this number: a node gives a volume its own.
            Replica::create_beside(&folder, VolumeId(0), Bytes(size))?;
        }
        let now = Seen::of(&file.0.metadata().map_err(io_error("look at", path))?);
        let note = folder.join(SEEN);
        let seen: Option<Seen> = std::fs::read(&note).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok());
        // Whatever interrupts this, the next one stamps all of it: without a stamp a device's data would be a hole, and what another program
        // wrote would be what it was before.
        godwit_durable::remove(&note).map_err(io_error("remove", &note))?;
        File::open(&folder).and_then(|folder| folder.sync_all()).map_err(io_error("sync", &folder))?;
        let (replica, opened) = Replica::open_beside(&folder, path)?;
        if replica.size().0 != size {
            return Err(VolumeError::Damaged {
                path: folder,
                why: format!("it tracks {} bytes, and {} has {size}; remove it", replica.size().0, path.display()),
            }
            .into());
        }
        replica.become_primary(Lineage::FIRST, Generation(1))?;
        // After an unclean end the marks say what to doubt, and the file's time says nothing.
        if seen.is_none() || (opened.clean && seen.as_ref() != Some(&now)) {
            replica.restamp_all()?;
        }
        now.note(&note)?;
        Ok(Self { replica, path: path.to_owned(), read_only: false, raw: Some(file) })
    }

    /// To be called every few seconds.
    ///
    /// # Errors
    /// When the disk fails.
    pub fn settle(&self) -> Result<(), VolumeError> {
        self.replica.settle_after(LINGERING)
    }

    /// Closes it properly. Nothing is served after that.
    ///
    /// # Errors
    /// When the disk fails.
    pub fn close(self) -> Result<(), ServeError> {
        self.replica.flush()?;
        if let Some(raw) = &self.raw {
            let seen = Seen::of(&raw.0.metadata().map_err(io_error("look at", &self.path))?);
            seen.note(&Self::folder_beside(&self.path).join(SEEN))?;
        }
        Ok(self.replica.close()?)
    }

    fn failed(&self, error: &VolumeError) -> Reply {
        tracing::warn!(file = %self.path.display(), %error, "a request failed");
        Reply::Error(match error {
            VolumeError::Frozen => nbd::Errno::Perm,
            VolumeError::Range(_) => nbd::Errno::Invalid,
            VolumeError::Io { source, .. } => nbd::Errno::of(source),
            _ => nbd::Errno::Io,
        })
    }

    fn do_it(&self, command: Command) -> Result<Reply, VolumeError> {
        let durable = |fua: bool| {
            if fua {
                self.replica.flush()?;
            }
            Ok(Reply::Done)
        };
        match command {
            Command::Read { offset, length } => {
                let mut bytes = vec![0; length as usize];
                self.replica.read(offset, &mut bytes)?;
                Ok(Reply::Data(vec![Piece::Data(bytes.into())]))
            }
            Command::Write { offset, data, fua } => {
                self.replica.write(offset, &data)?;
                durable(fua)
            }
            Command::Trim { offset, length, fua } | Command::WriteZeroes { offset, length, fua, .. } => {
                self.replica.zero(offset, u64::from(length))?;
                durable(fua)
            }
            Command::Flush => durable(true),
            Command::Cache { .. } => Ok(Reply::Done),
            Command::BlockStatus { offset, length, .. } => {
                Ok(extents(self.replica.extents(offset, u64::from(length))?))
            }
        }
    }
}

impl Backend for Tracked {
    fn export(&self) -> Export {
        let (name, size) = (name_of(&self.path), self.replica.size().0);
        Export { name, size, preferred_block: BLOCK as u32, read_only: self.read_only }
    }

    fn read_now(&self, offset: u64, into: &mut [u8]) -> usize {
        self.replica.read_now(offset, into)
    }

    fn file_of(&self, offset: u64, length: u64) -> Option<BorrowedFd<'_>> {
        self.replica.file_of(offset, length)
    }

    fn write_by(
        &self,
        _: Cookie,
        offset: u64,
        length: u32,
        _: &Answers,
        put: Put<'_>,
    ) -> Result<Option<Reply>, Untaken> {
        let file = self.replica.file().ok_or(Untaken)?;
        let written = self.replica.write_by(offset, u64::from(length), || put(file, offset));
        Ok(Some(written.map_or_else(|error| self.failed(&error), |_| Reply::Done)))
    }

    fn warm(&self, offset: u64, length: u64) {
        self.replica.warm(offset, length);
    }

    fn perform(&self, _: Cookie, command: Command, _: &Answers) -> Option<Reply> {
        Some(self.do_it(command).unwrap_or_else(|error| self.failed(&error)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};

    /// Tells of a lost write once, as the system does.
    #[derive(Debug, Default)]
    struct Once(AtomicBool);

    impl Medium for Once {
        fn read(&self, _: u64, _: &mut [u8]) -> io::Result<()> {
            Ok(())
        }
        fn write(&self, _: u64, _: &[u8]) -> io::Result<()> {
            Ok(())
        }
        fn punch(&self, _: u64, _: u64) -> io::Result<()> {
            Ok(())
        }
        fn sync(&self) -> io::Result<()> {
            if self.0.swap(true, Ordering::Relaxed) { Ok(()) } else { Err(Errno::IO.into()) }
        }
        fn extents(&self, _: u64, _: u64) -> io::Result<Vec<(u64, bool)>> {
            Ok(vec![])
        }
        fn allocated(&self) -> u64 {
            0
        }
    }

    #[test]
    fn after_a_flush_that_failed_nothing_counts_as_durable_before_the_file_is_opened_again() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("disk");
        std::fs::write(&path, [0; 8192]).expect("writes");
        let mut plain = Plain::open(&path).expect("opens");
        plain.syncs = Synced::new(Box::new(Once::default()));
        let durable = Command::Write { offset: 0, data: vec![1; 4096].into(), fua: true };
        for command in [Command::Flush, Command::Flush, durable.clone()] {
            assert!(plain.do_it(command).is_err(), "somebody is told that all is well");
        }
        assert!(plain.close().is_err());
        drop(plain);
        let plain = Plain::open(&path).expect("opens again");
        for command in [Command::Flush, durable] {
            assert!(matches!(plain.do_it(command), Ok(Reply::Done)));
        }
        plain.close().expect("is durable");
    }
}
