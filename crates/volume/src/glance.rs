//! What lies on shared storage while another host has the volume, read by one to which its VM is on its way.
//!
//! A guest's memory is half its files, as a rule, and these are on its disk: where both hosts reach that, a move's memory need not carry them. So the
//! destination reads blocks that the source names, before they are its own. What it reads may be of any moment, or older than what the
//! source has answered its guest; so it is for whoever knows what ought to be there, and compares (`godwit_memory::disks`), and never for a
//! guest.
//!
//! # Why nothing old is read later
//!
//! What a host reads, its kernel keeps, and it does not hear of what another host writes. So it is read past that memory (`O_DIRECT`): from block devices, and
//! from each file system that is not known to be this host's alone. One that is shows every process the same, and keeps no second copy.
//! Where a file system does not know how, nothing is read. The file is open for reading only, and closed when the volume is attached
//! (`shared`).

use crate::blocks::BLOCK;
use rustix::fs::OFlags;
use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

/// File systems of one host: ext2 to ext4, XFS, Btrfs, ZFS, F2FS, bcachefs, tmpfs, and what lies over one of them.
const OF_ONE_HOST: [u32; 8] =
    [0xef53, 0x5846_5342, 0x9123_683e, 0x2fc1_2fc1, 0xf2f5_2010, 0xca45_1a4e, 0x0102_1994, 0x794c_7630];
/// Places at which it is tried how fast reading is, and what is read at each: what a group of pages names at most.
const PLACES: u64 = 8;
const PIECE: u64 = 16 * BLOCK;
/// Trying ends after this.
const TRYING: Duration = Duration::from_millis(50);

/// The blocks of a volume, as they lie there.
#[derive(Debug)]
pub(crate) struct Glance {
    file: File,
    size: u64,
    /// Past what the kernel keeps.
    direct: bool,
}

impl Glance {
    /// Of a volume of this size, whose blocks are in a file, or on a device.
    pub fn open(data: &Path, size: u64) -> io::Result<Self> {
        Self::opened(data, size, !is_of_this_host(data)?)
    }

    fn opened(data: &Path, size: u64, direct: bool) -> io::Result<Self> {
        let flags = if direct { OFlags::DIRECT.bits().cast_signed() } else { 0 };
        let file = OpenOptions::new().read(true).custom_flags(flags).open(data)?;
        Ok(Self { file, size, direct })
    }

    /// Whole blocks, all of them inside.
    pub fn read(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        let length = into.len() as u64;
        if !(at.is_multiple_of(BLOCK) && length.is_multiple_of(BLOCK))
            || at.checked_add(length).is_none_or(|end| end > self.size)
        {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "these are no blocks of the volume's"));
        }
        if !self.direct {
            return self.file.read_exact_at(into, at);
        }
        // Devices write to memory at a border as they have.
        let mut room = vec![0; into.len() + BLOCK as usize];
        let first = room.as_ptr().align_offset(BLOCK as usize);
        let aligned = &mut room[first..first + into.len()];
        self.file.read_exact_at(aligned, at)?;
        into.copy_from_slice(aligned);
        Ok(())
    }

    /// Bytes that come in a second, in pieces from all over what the guest has used, or was written where nobody knows that.
    pub fn rate(&self, used: &[Range<u64>]) -> io::Result<u64> {
        let (began, mut read, mut piece) = (Instant::now(), 0, vec![0; PIECE as usize]);
        let end = self.size / BLOCK * BLOCK;
        for place in 0..PLACES {
            let wanted = match used.get(used.len() * place as usize / PLACES as usize) {
                Some(run) => run.start.saturating_mul(BLOCK),
                None => self.size / PLACES * place,
            };
            // A hole costs nothing, and tells nothing.
            let written = rustix::fs::seek(&self.file, rustix::fs::SeekFrom::Data(wanted)).unwrap_or(wanted);
            let at = written.min(end) / BLOCK * BLOCK;
            let length = PIECE.min(end - at);
            self.read(at, &mut piece[..length as usize])?;
            read += length;
            if began.elapsed() > TRYING {
                break;
            }
        }
        Ok((read as f64 / began.elapsed().as_secs_f64().max(1e-6)) as u64)
    }
}

/// Whether it is a file on a file system that no other host writes to.
fn is_of_this_host(data: &Path) -> io::Result<bool> {
    if !std::fs::metadata(data)?.is_file() {
        return Ok(false);
    }
    let kind = rustix::fs::statfs(data)?.f_type;
    Ok(OF_ONE_HOST.iter().any(|known| i128::from(*known) == i128::from(kind)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_read_past_the_kernels_memory_is_what_was_written_wherever_it_is_put() {
        const BLOCKS: u64 = 64;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("data");
        let bytes: Vec<u8> = (0..BLOCKS * BLOCK).map(|n| (n / BLOCK * 7 + n % 251) as u8).collect();
        std::fs::write(&path, &bytes).unwrap();
        let size = BLOCKS * BLOCK;
        let glance = match Glance::opened(&path, size, true) {
            // Memory itself, with a kernel before 6.6.
            Err(e) if e.kind() == io::ErrorKind::InvalidInput => {
                return println!("nothing can be read past memory here");
            }
            glance => glance.unwrap(),
        };
        for (at, blocks, shift) in [(0, 1, 0), (5, 16, 1), (BLOCKS - 3, 3, 4095)] {
            let (at, length) = ((at * BLOCK) as usize, blocks * BLOCK as usize);
            let mut into = vec![0; length + shift];
            glance.read(at as u64, &mut into[shift..]).unwrap();
            assert!(into[shift..] == bytes[at..at + length], "{blocks} blocks at {at}");
        }
        assert!(glance.rate(&[]).unwrap() > 0);
        // What was cut off is not taken for zeroes, and an order of another volume's harms nobody.
        let longer = Glance::opened(&path, 2 * size, true).unwrap();
        assert!(longer.read(size, &mut [0; BLOCK as usize]).is_err());
        assert!(glance.rate(&[u64::MAX - 1..u64::MAX, BLOCKS..BLOCKS + 1]).is_ok());
    }

    #[test]
    fn a_file_in_this_hosts_memory_is_its_own_and_no_device_is() {
        assert!(is_of_this_host(Path::new("/dev/null")).is_ok_and(|own| !own));
        assert!(is_of_this_host(Path::new("/proc/self/stat")).is_ok_and(|own| !own), "one that is not known");
        let file = tempfile::NamedTempFile::new().unwrap();
        assert!(is_of_this_host(file.path()).unwrap());
    }
}
