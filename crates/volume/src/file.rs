//! What a replica lies on. Files here; in tests and in the simulator, something that can lose its power at any moment.

use godwit_durable::{Layout, replace};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

/// Zeroes that are written at once.
const ZEROES: usize = 1 << 20;

/// A file with offsets, holes and a way to make it durable.
///
/// What was written and not synced survives the end of the process, and of a loss of power any part of it, in any order.
pub trait Medium: Send + Sync + std::fmt::Debug {
    /// Reads all of `into`; past the end there are zeroes.
    ///
    /// # Errors
    /// When the medium fails.
    fn read(&self, at: u64, into: &mut [u8]) -> io::Result<()>;
    /// Reads what needs no waiting for the disk; how much of `into` was filled, from its beginning. 0: whoever wants it has to
    /// wait, or has to hear of an error by [`Medium::read`].
    fn read_now(&self, _at: u64, _into: &mut [u8]) -> usize {
        0
    }
    /// The file that it is, for whoever can send from one without a copy.
    fn file(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Reads what lies on the disk, whatever the kernel holds of it in memory, and without leaving it there: for [`crate::scrub`]. All of it
    /// are whole blocks, at a block's border on the disk and in memory.
    ///
    /// # Errors
    /// When the medium fails.
    fn read_past_cache(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        self.read(at, into)
    }
    /// Waits until [`Medium::read_now`] has a chance.
    fn warm(&self, _at: u64, _length: u64) {}
    /// Writes all of `from`.
    ///
    /// # Errors
    /// When the medium fails; part of it may be written.
    fn write(&self, at: u64, from: &[u8]) -> io::Result<()>;
    /// Makes a hole that reads as zeroes.
    ///
    /// # Errors
    /// When the medium fails; part of it may be a hole.
    fn punch(&self, at: u64, length: u64) -> io::Result<()>;

    /// Writes zeroes, where nothing else makes them.
    ///
    /// # Errors
    /// When the medium fails.
    fn write_zeroes(&self, mut at: u64, mut length: u64) -> io::Result<()> {
        let zeroes = vec![0; ZEROES.min(usize::try_from(length).unwrap_or(ZEROES))];
        while length > 0 {
            let n = length.min(zeroes.len() as u64);
            self.write(at, &zeroes[..n as usize])?;
            (at, length) = (at + n, length - n);
        }
        Ok(())
    }

    /// What was written so far survives a loss of power.
    ///
    /// # Errors
    /// When the medium fails; nobody knows then what is durable.
    fn sync(&self) -> io::Result<()>;
    /// Data and holes in a range: (length, whether it is a hole), in order.
    ///
    /// # Errors
    /// When the medium fails.
    fn extents(&self, at: u64, length: u64) -> io::Result<Vec<(u64, bool)>>;
    /// Whether [`Medium::extents`] tells holes: what was never written. Else all of it counts as data, and as much as nothing as
    /// [`Medium::allocated`].
    fn knows_holes(&self) -> bool {
        true
    }
    /// Bytes allocated.
    fn allocated(&self) -> u64;
}

/// Where the description of a replica is kept: a few bytes that are replaced whole.
pub trait Description: Send + Sync + std::fmt::Debug {
    /// What was stored last.
    ///
    /// # Errors
    /// When the medium fails.
    fn load(&self) -> io::Result<Vec<u8>>;
    /// Replaces it. Durable when it returns; a crash leaves the old bytes or the new ones, never a mixture.
    ///
    /// # Errors
    /// When the medium fails; nobody knows then which of the two is there.
    fn store(&self, bytes: &[u8]) -> io::Result<()>;
}

/// Everything that a replica lies on.
#[derive(Debug)]
pub struct Media {
    /// The blocks.
    pub data: Box<dyn Medium>,
    /// The stamps: eight bytes a block.
    pub stamps: Box<dyn Medium>,
    /// The marks of hot regions: a byte each.
    pub hot: Box<dyn Medium>,
    /// What a shadow volume does not have yet: eight bytes a block.
    pub words: Box<dyn Medium>,
    /// Names the time since the power came on: it is the same for two openings only if nothing that was written between
    /// them can have been lost with the power. Empty: nobody knows, and it may have been.
    pub power: String,
    /// What the replica is.
    pub description: Box<dyn Description>,
    /// Blocks of a region, for as long as the replica lives: [`crate::REGION`] but in the simulator, whose volumes are small.
    pub region: u64,
}

/// The kernel's name for the time since it was started.
pub(crate) fn power() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id").map_or_else(|_| String::new(), |id| id.trim().to_owned())
}

/// A description in a file that is replaced.
#[derive(Debug)]
pub(crate) struct DescriptionFile(pub PathBuf);

impl Description for DescriptionFile {
    fn load(&self) -> io::Result<Vec<u8>> {
        std::fs::read(&self.0)
    }

    fn store(&self, bytes: &[u8]) -> io::Result<()> {
        replace(&self.0, bytes)
    }
}

/// A description in a file with two slots, for what a guest may wait for: it costs no more than its own bytes. One that is too long for a slot, as
/// that of a volume with thousands of hand-offs, replaces the file.
#[derive(Debug)]
pub(crate) struct SlottedFile {
    path: PathBuf,
    /// Whether what is read is durable. What another process left, or a store that failed, may be in memory only, and the next store goes over
    /// the slot that holds what is.
    sure: AtomicBool,
}

impl SlottedFile {
    const LAYOUT: Layout = Layout { magic: *b"GWMETA\0\x01", slot: 64 << 10 };

    pub fn new(path: PathBuf) -> Self {
        Self { path, sure: AtomicBool::new(false) }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Description for SlottedFile {
    /// Earlier versions have written files without slots.
    fn load(&self) -> io::Result<Vec<u8>> {
        let file = std::fs::read(&self.path)?;
        Ok(Self::LAYOUT.newest(&file).map(<[u8]>::to_vec).unwrap_or(file))
    }

    fn store(&self, bytes: &[u8]) -> io::Result<()> {
        if bytes.len() > Self::LAYOUT.most() {
            return replace(&self.path, bytes);
        }
        match Self::LAYOUT.open(&self.path) {
            Ok(Some(mut slots)) => {
                if !self.sure.swap(false, Ordering::AcqRel) {
                    Self::LAYOUT.make_sure(&self.path)?;
                }
                slots.store(bytes)?;
                self.sure.store(true, Ordering::Release);
                Ok(())
            }
            Ok(None) => Self::LAYOUT.create(&self.path, bytes).map(drop),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Self::LAYOUT.create(&self.path, bytes).map(drop),
            Err(e) => Err(e),
        }
    }
}

/// A real file, or a block device.
#[derive(Debug)]
pub struct Disk {
    file: File,
    /// It has as many bytes, or somebody has cut it short: what it held must not read as zeroes then.
    size: u64,
}

impl Disk {
    /// What has `size` bytes, or more. Where it ends before that, reading fails; behind that there are zeroes.
    #[must_use]
    pub const fn new(file: File, size: u64) -> Self {
        Self { file, size }
    }

    pub(crate) fn open(path: &Path, size: u64) -> io::Result<Self> {
        let file = OpenOptions::new().create(true).truncate(false).read(true).write(true).mode(0o600).open(path)?;
        let metadata = file.metadata()?;
        if metadata.is_file() && metadata.len() < size {
            file.set_len(size)?;
        }
        Ok(Self::new(file, size))
    }

    /// The file itself.
    #[must_use]
    pub const fn as_file(&self) -> &File {
        &self.file
    }
}

impl Medium for Disk {
    fn read(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        let mut done = 0;
        while done < into.len() {
            match self.file.read_at(&mut into[done..], at + done as u64) {
                Ok(0) if at + (done as u64) < self.size => {
                    let (end, size) = (at + done as u64, self.size);
                    let why = format!("it ends at byte {end} or before and had {size}: something has cut it short");
                    return Err(io::Error::new(io::ErrorKind::UnexpectedEof, why));
                }
                Ok(0) => {
                    into[done..].fill(0);
                    return Ok(());
                }
                Ok(n) => done += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    fn read_now(&self, at: u64, into: &mut [u8]) -> usize {
        use rustix::io::{ReadWriteFlags, preadv2};
        preadv2(&self.file, &mut [io::IoSliceMut::new(into)], at, ReadWriteFlags::NOWAIT).unwrap_or(0)
    }

    fn file(&self) -> Option<BorrowedFd<'_>> {
        Some(self.file.as_fd())
    }

    fn read_past_cache(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        use std::os::fd::AsRawFd;
        // The kernel writes what is dirty there first. Another description of the same file: the flag is the description's.
        let direct = rustix::fs::OFlags::DIRECT.bits().cast_signed();
        let path = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        match OpenOptions::new().read(true).custom_flags(direct).open(path) {
            Ok(file) => match Self::new(file, self.size).read(at, into) {
                Err(e) if e.kind() == io::ErrorKind::InvalidInput => self.read(at, into),
                done => done,
            },
            // A file system that does not know how.
            Err(_) => self.read(at, into),
        }
    }

    fn warm(&self, at: u64, length: u64) {
        // All of it is asked for; a byte at each end is waited for. Whoever reads hears of errors, and waits where this was in vain.
        if length > 2 * crate::BLOCK {
            let whole = std::num::NonZeroU64::new(length);
            let _ = rustix::fs::fadvise(&self.file, at, whole, rustix::fs::Advice::WillNeed);
        }
        let last = (at + length).saturating_sub(1);
        let _ = self.file.read_at(&mut [0], at);
        if last / crate::BLOCK > at / crate::BLOCK {
            let _ = self.file.read_at(&mut [0], last);
        }
    }

    fn write(&self, at: u64, from: &[u8]) -> io::Result<()> {
        self.file.write_all_at(from, at)
    }

    fn punch(&self, at: u64, length: u64) -> io::Result<()> {
        use rustix::fs::{FallocateFlags, fallocate};
        use rustix::io::Errno;
        match fallocate(&self.file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, at, length) {
            // Some file systems know no holes (NFS before 4.2, exFAT).
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => self.write_zeroes(at, length),
            done => Ok(done?),
        }
    }

    fn sync(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    fn extents(&self, at: u64, length: u64) -> io::Result<Vec<(u64, bool)>> {
        use rustix::fs::{SeekFrom, seek};
        use rustix::io::Errno;
        let (mut found, mut here, end) = (vec![], at, at + length);
        while here < end {
            let data = match seek(&self.file, SeekFrom::Data(here)) {
                Ok(data) => data.min(end),
                Err(Errno::NXIO) => end,
                Err(e) => return Err(e.into()),
            };
            if data > here {
                found.push((data - here, true));
            }
            if data >= end {
                break;
            }
            let hole = seek(&self.file, SeekFrom::Hole(data))?.min(end);
            found.push((hole - data, false));
            here = hole;
        }
        Ok(found)
    }

    fn allocated(&self) -> u64 {
        use std::os::unix::fs::MetadataExt;
        self.file.metadata().map_or(0, |m| m.blocks() * 512)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_description_is_found_again_whichever_version_wrote_it_and_however_long_it_is() {
        let folder = tempfile::tempdir().unwrap();
        let file = SlottedFile::new(folder.path().join("meta"));
        assert_eq!(file.load().unwrap_err().kind(), io::ErrorKind::NotFound);
        // An earlier version's; then short, too long for a slot, and short again.
        DescriptionFile(file.path.clone()).store(b"{}").unwrap();
        assert_eq!(file.load().unwrap(), b"{}");
        let long = vec![b'x'; SlottedFile::LAYOUT.most() + 1];
        for text in [&b"{\"a\": 1}"[..], b"{\"a\": 2}", &long, b"{\"a\": 3}", &long[1..], b""] {
            file.store(text).unwrap();
            assert!(file.load().unwrap() == text, "{} bytes", text.len());
        }
    }

    #[test]
    fn a_description_that_a_guest_waits_for_is_written_in_place() {
        use std::os::unix::fs::MetadataExt;
        let folder = tempfile::tempdir().unwrap();
        let file = SlottedFile::new(folder.path().join("meta"));
        let place = || std::fs::metadata(&file.path).map(|m| (m.ino(), m.blocks())).unwrap();
        file.store(b"one").unwrap();
        let before = place();
        for text in [b"two", b"six"] {
            file.store(text).unwrap();
        }
        assert_eq!(place(), before);
    }
}
