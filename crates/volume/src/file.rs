//! A file as the replica needs it; in tests it can lose its power.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

/// A file with offsets, holes and a way to make it durable.
pub(crate) trait Medium: Send + Sync + std::fmt::Debug {
    /// Reads all of `into`; past the end there are zeroes.
    fn read(&self, at: u64, into: &mut [u8]) -> io::Result<()>;
    /// Writes all of `from`.
    fn write(&self, at: u64, from: &[u8]) -> io::Result<()>;
    /// Makes a hole that reads as zeroes.
    fn punch(&self, at: u64, length: u64) -> io::Result<()>;
    /// What was written so far survives a loss of power.
    fn sync(&self) -> io::Result<()>;
    /// Data and holes in a range: (length, whether it is a hole), in order.
    fn extents(&self, at: u64, length: u64) -> io::Result<Vec<(u64, bool)>>;
    /// Bytes allocated.
    fn allocated(&self) -> u64;
}

/// A real file.
#[derive(Debug)]
pub(crate) struct Disk(pub File);

impl Disk {
    pub fn open(path: &Path, size: u64) -> io::Result<Self> {
        let file = OpenOptions::new().create(true).truncate(false).read(true).write(true).mode(0o600).open(path)?;
        if file.metadata()?.len() < size {
            file.set_len(size)?;
        }
        Ok(Self(file))
    }
}

impl Medium for Disk {
    fn read(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        let mut done = 0;
        while done < into.len() {
            match self.0.read_at(&mut into[done..], at + done as u64) {
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

    fn write(&self, at: u64, from: &[u8]) -> io::Result<()> {
        self.0.write_all_at(from, at)
    }

    fn punch(&self, at: u64, length: u64) -> io::Result<()> {
        use rustix::fs::{FallocateFlags, fallocate};
        Ok(fallocate(&self.0, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, at, length)?)
    }

    fn sync(&self) -> io::Result<()> {
        self.0.sync_data()
    }

    fn extents(&self, at: u64, length: u64) -> io::Result<Vec<(u64, bool)>> {
        use rustix::fs::{SeekFrom, seek};
        use rustix::io::Errno;
        let (mut found, mut here, end) = (vec![], at, at + length);
        while here < end {
            let data = match seek(&self.0, SeekFrom::Data(here)) {
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
            let hole = seek(&self.0, SeekFrom::Hole(data))?.min(end);
            found.push((hole - data, false));
            here = hole;
        }
        Ok(found)
    }

    fn allocated(&self) -> u64 {
        use std::os::unix::fs::MetadataExt;
        self.0.metadata().map_or(0, |m| m.blocks() * 512)
    }
}
