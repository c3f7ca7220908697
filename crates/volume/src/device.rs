//! A block device that a replica's blocks lie on: an LVM volume, a partition, a whole disk. Stamps and all else lie in the replica's folder, whose
//! `data` is a symbolic link to the device; so it is removed with the folder, and what the device holds stays.
//!
//! # What a device does not know, and how it is made up for
//!
//! *Holes.* Where a file is punched, the device is told to forget the blocks in a way that they read as zeroes; one that cannot is
//! written with zeroes. A device cannot say what it holds, so the replica's stamps do: what was never written is a hole. That holds
//! because the whole volume is zeroed before the replica is one ([`create`]), unless somebody vouches that it reads as zeroes.
//!
//! *Its size.* It is what the device says, not what was written; it has to hold the volume, and what lies behind the volume is left alone.
//!
//! *Whose it is.* It is opened exclusively: what is mounted, swapped to, part of another device, or another replica's is refused by the
//! kernel, also later, for as long as the replica is open.
//!
//! *Its name.* `/dev/sdb` may be another disk after a reboot. So what the system says of its identity is kept beside it, and a device with
//! another identity is refused.

use crate::error::{VolumeError, io_error};
use crate::file::{Description, DescriptionFile, Disk, Medium, SlottedFile};
use crate::meta::Meta;
use godwit_units::{Bytes, VolumeId};
use rustix::fs::{FallocateFlags, OFlags, fallocate};
use std::fs::{DirBuilder, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::fd::BorrowedFd;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

/// Where the identity of a replica's device is kept, in its folder.
const IDENTITY: &str = "device";
/// What is zeroed at once: other I/O has a turn in between.
const PIECE: u64 = 1 << 30;
/// Devices do nothing with less than this: the largest logical block.
const ALIGNED: u64 = 4096;

/// What a device holds before it becomes a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Before {
    /// Anything: it is zeroed.
    Anything,
    /// Zeroes, as somebody vouches.
    Zeroes,
}

/// An open block device.
#[derive(Debug)]
pub(crate) struct Device(Disk);

impl Device {
    /// Opens it, for nobody else.
    pub fn open(path: &Path, least: u64) -> Result<Self, VolumeError> {
        let exclusive = OFlags::EXCL.bits().cast_signed();
        let mut file = match OpenOptions::new().read(true).write(true).custom_flags(exclusive).open(path) {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::ResourceBusy => return Err(VolumeError::Busy(path.to_owned())),
            Err(e) => return Err(io_error("open", path)(e)),
        };
        let is_device = file.metadata().is_ok_and(|m| m.file_type().is_block_device());
        if !is_device {
            return Err(io_error("open", path)(io::Error::other("it is no block device")));
        }
        let size = file.seek(SeekFrom::End(0)).map_err(io_error("find the size of", path))?;
        if size < least {
            return Err(VolumeError::Range(format!("{} has {size} bytes, and the volume {least}", path.display())));
        }
        Ok(Self(Disk::new(file, size)))
    }

    /// What the system says about which device this is; none where it says nothing that outlives a reboot.
    fn identity(&self) -> Option<String> {
        let number = self.0.as_file().metadata().ok()?.rdev();
        let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
        let about = Path::new("/sys/dev/block").join(format!("{major}:{minor}"));
        let said = |what: &str| {
            let text = std::fs::read_to_string(about.join(what)).ok()?;
            Some(format!("{what} {}", text.trim())).filter(|_| !text.trim().is_empty())
        };
        // A partition's own number within what its disk says.
        let partition = std::fs::read_to_string(about.join("partition")).unwrap_or_default();
        let names = ["dm/uuid", "loop/backing_file", "wwid", "serial", "device/wwid", "device/serial"];
        let of_disk = ["../wwid", "../serial", "../device/wwid", "../device/serial", "../loop/backing_file"];
        let own = names.iter().find_map(|name| said(name));
        own.or_else(|| of_disk.iter().filter(|_| !partition.is_empty()).find_map(|name| said(name)))
            .map(|identity| format!("{identity} {}", partition.trim()).trim().to_owned())
    }
}

/// Makes a replica's folder whose blocks lie on a device. It belongs to nobody, and holds zeroes.
///
/// # Errors
/// When the device is in use, too small, or fails; there is no replica then, and what the device held may be lost.
pub(crate) fn create(
    folder: &Path,
    device: &Path,
    volume: VolumeId,
    size: Bytes,
    before: Before,
) -> Result<(), VolumeError> {
    let meta = Meta::fresh(volume, size)?;
    let open = Device::open(device, size.0)?;
    DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(io_error("make", folder))?;
    crate::replica::clear(folder, &crate::replica::TABLES)?;
    if before == Before::Anything {
        let mut at = 0;
        while at < size.0 {
            let length = PIECE.min(size.0 - at);
            open.punch(at, length).map_err(io_error("zero", device))?;
            at += length;
        }
        open.sync().map_err(io_error("sync", device))?;
    }
    let data = folder.join("data");
    std::os::unix::fs::symlink(device, &data).map_err(io_error("make", &data))?;
    let identity = DescriptionFile(folder.join(IDENTITY));
    identity.store(open.identity().unwrap_or_default().as_bytes()).map_err(io_error("describe", folder))?;
    // Last, because a folder with a description is a replica.
    meta.store(&SlottedFile::new(folder.join("meta")), folder)
}

/// Opens what a replica's blocks lie on: a file, or a device behind a link.
pub(crate) fn open(data: &Path, size: u64) -> Result<Box<dyn Medium>, VolumeError> {
    let linked = std::fs::symlink_metadata(data).is_ok_and(|m| m.is_symlink());
    let device = std::fs::metadata(data).is_ok_and(|m| m.file_type().is_block_device());
    if !linked && !device {
        return Ok(Box::new(Disk::open(data, size).map_err(io_error("open", data))?));
    }
    // Never made: a device that is not there would become a file in memory.
    let device = Device::open(data, size)?;
    let known = data.parent().map(|folder| folder.join(IDENTITY)).and_then(|path| std::fs::read_to_string(path).ok());
    if let Some(known) = known.filter(|known| linked && !known.is_empty()) {
        let now = device.identity().unwrap_or_default();
        if now != known {
            let why = format!(
                "it is another device now ({now}) than the volume's ({known}); name devices by /dev/disk/by-id"
            );
            return Err(VolumeError::Damaged { path: data.to_owned(), why });
        }
    }
    Ok(Box::new(device))
}

/// Whether a device could hold a volume of this size, as far as the system says.
///
/// # Errors
/// When it is in use, too small, none, or cannot be opened.
pub fn look_at(device: &Path, size: Bytes) -> Result<(), VolumeError> {
    Device::open(device, size.0).map(drop)
}

impl Medium for Device {
    fn read(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        self.0.read(at, into)
    }

    fn read_now(&self, at: u64, into: &mut [u8]) -> usize {
        self.0.read_now(at, into)
    }

    fn file(&self) -> Option<BorrowedFd<'_>> {
        self.0.file()
    }

    fn read_past_cache(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        self.0.read_past_cache(at, into)
    }

    fn warm(&self, at: u64, length: u64) {
        self.0.warm(at, length);
    }

    fn write(&self, at: u64, from: &[u8]) -> io::Result<()> {
        self.0.write(at, from)
    }

    fn punch(&self, at: u64, length: u64) -> io::Result<()> {
        let (first, last) = (at.next_multiple_of(ALIGNED), (at + length) / ALIGNED * ALIGNED);
        if first >= last {
            return self.write_zeroes(at, length);
        }
        // To forget and read as zeroes; else to write zeroes by itself; else we do.
        let done =
            [FallocateFlags::PUNCH_HOLE, FallocateFlags::ZERO_RANGE].into_iter().find_map(|how| {
                match fallocate(self.0.as_file(), how | FallocateFlags::KEEP_SIZE, first, last - first) {
                    Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::INVAL | rustix::io::Errno::NOSYS) => None,
                    other => Some(other),
                }
            });
        match done {
            Some(done) => done?,
            None => self.write_zeroes(first, last - first)?,
        }
        self.write_zeroes(at, first - at)?;
        self.write_zeroes(last, at + length - last)
    }

    fn sync(&self) -> io::Result<()> {
        self.0.sync()
    }

    fn extents(&self, _: u64, length: u64) -> io::Result<Vec<(u64, bool)>> {
        Ok(vec![(length, false)])
    }

    fn knows_holes(&self) -> bool {
        false
    }

    fn allocated(&self) -> u64 {
        0
    }
}

/// Whether another replica's blocks lie on the same device: the folders of all are in `volumes`.
#[must_use]
pub fn is_taken(device: &Path, volumes: &Path) -> Option<std::path::PathBuf> {
    let number =
        |path: &Path| std::fs::metadata(path).ok().filter(|m| m.file_type().is_block_device()).map(|m| m.rdev());
    let mine = number(device)?;
    let folders = std::fs::read_dir(volumes).ok()?.filter_map(|entry| Some(entry.ok()?.path()));
    folders.into_iter().find(|folder| number(&folder.join("data")) == Some(mine))
}

#[cfg(test)]
#[path = "device_tests.rs"]
mod tests;
