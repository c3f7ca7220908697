//! A volume as it was at one moment, for whoever copies it while its guest writes on.
//!
//! Before the guest's write of a block, what the block held is put aside: in a file without a name beside the replica, at the block's own
//! place, so that it takes what was overwritten and goes with the process. A block is noted as put aside *after* its old contents are there and
//! *before* it is overwritten. A reader reads the replica first and looks at the notes afterwards: what is not noted then was not
//! overwritten while it read; what is, it takes from the file. So nobody waits for the reader, and it never sees a newer block.
//!
//! # What can go wrong
//!
//! *There is no room, or the guest overwrites very much at once.* The guest goes first: the snapshot breaks, and its reader fails. A snapshot that
//! is broken gives nothing, so no copy is made of two moments.
//!
//! *The volume becomes another host's.* What is here does not change any more, and the reader goes on. Blocks that come from there, with the VM or
//! by a pre-cache, come past here: it is broken before the first of a VM's ([`crate::disk::Disk::receive`]), and a pre-cache has to wait
//! ([`crate::precache::stand_by`]).

use crate::parts::lock;
use godwit_units::BlockIndex;
use godwit_volume::{BLOCK, BlockSet, Replica, VolumeError, is_zero};
use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock};

/// What is put aside for one write, at the most: a guest that discards a whole disk must not wait until all of it is copied.
const MOST_AT_ONCE: u64 = 64 << 20;
/// Blocks that are noted, at the most: 256 GiB, in 8 MiB of memory.
const MOST_NOTED: u64 = 1 << 26;
/// Bytes that are copied at once.
const PIECE: u64 = 1 << 20;

/// See above.
#[derive(Debug)]
pub struct Snapshot {
    place: PathBuf,
    file: File,
    noted: Mutex<BlockSet>,
    broken: OnceLock<String>,
}

impl Snapshot {
    /// Of a volume whose replica is in this folder.
    ///
    /// # Errors
    /// When the file cannot be made.
    pub fn new(folder: &Path) -> Result<Self, VolumeError> {
        let place = folder.join("overwritten");
        let open = || {
            let file =
                OpenOptions::new().create(true).truncate(true).read(true).write(true).mode(0o600).open(&place)?;
            std::fs::remove_file(&place)?;
            io::Result::Ok(file)
        };
        let file = open().map_err(|source| VolumeError::Io { what: "make", path: place.clone(), source })?;
        Ok(Self { place, file, noted: Mutex::default(), broken: OnceLock::new() })
    }

    /// These blocks are about to be written. With the lock of the guest's writes held: one at a time.
    pub fn before_write(&self, blocks: Range<u64>, replica: &Replica) {
        if self.broken.get().is_some() {
            return;
        }
        if let Err(error) = self.keep(blocks, replica) {
            tracing::warn!(place = %self.place.display(), %error, "an export cannot go on: what its guest overwrites cannot be kept");
            self.break_off(&error.to_string());
        }
    }

    fn keep(&self, blocks: Range<u64>, replica: &Replica) -> io::Result<()> {
        let end = replica.size().0;
        let mut todo = vec![];
        {
            let noted = lock(&self.noted);
            if noted.len() + (blocks.end - blocks.start) > MOST_NOTED {
                return Err(io::Error::other(format!("more than {MOST_NOTED} blocks were overwritten meanwhile")));
            }
            let mut from = blocks.start;
            while from < blocks.end {
                let known = noted.run_after(from, blocks.end - from).filter(|run| run.start < blocks.end);
                let until = known.as_ref().map_or(blocks.end, |run| run.start);
                if from < until {
                    todo.push(from..until);
                }
                from = known.map_or(blocks.end, |run| run.end);
            }
        }
        let mut kept = 0;
        for run in &todo {
            let (mut at, last) = (run.start * BLOCK, (run.end * BLOCK).min(end));
            for (length, hole) in replica.extents(at, last - at).map_err(io::Error::other)? {
                if hole {
                    at += length;
                    continue;
                }
                kept += length;
                if kept > MOST_AT_ONCE {
                    return Err(io::Error::other(format!(
                        "the guest overwrites more than {MOST_AT_ONCE} bytes at once"
                    )));
                }
                let until = at + length;
                while at < until {
                    let mut piece = vec![0; usize::try_from((until - at).min(PIECE)).unwrap_or(0)];
                    replica.read(at, &mut piece).map_err(io::Error::other)?;
                    if !is_zero(&piece) {
                        self.file.write_all_at(&piece, at)?;
                    }
                    at += piece.len() as u64;
                }
            }
        }
        let mut noted = lock(&self.noted);
        todo.into_iter().for_each(|run| noted.insert(run));
        Ok(())
    }

    /// It gives nothing from now on.
    pub fn break_off(&self, why: &str) {
        let _ = self.broken.set(why.to_owned());
    }

    /// Why it broke, if it did.
    pub fn broken(&self) -> Option<&str> {
        self.broken.get().map(String::as_str)
    }

    fn whole(&self) -> Result<(), VolumeError> {
        let error = |why: &str| VolumeError::Io {
            what: "go on with what was overwritten at",
            path: self.place.clone(),
            source: io::Error::other(why.to_owned()),
        };
        self.broken().map_or(Ok(()), |why| Err(error(why)))
    }

    /// Reads the volume as it was.
    ///
    /// # Errors
    /// When a medium fails, or it broke.
    pub fn read(&self, offset: u64, into: &mut [u8], replica: &Replica) -> Result<(), VolumeError> {
        replica.read(offset, into)?;
        let end = offset + into.len() as u64;
        let blocks = godwit_volume::touched(offset, into.len() as u64);
        let kept: Vec<u64> = {
            let noted = lock(&self.noted);
            blocks.filter(|block| noted.contains(BlockIndex(*block))).collect()
        };
        for block in kept {
            let (first, last) = ((block * BLOCK).max(offset), ((block + 1) * BLOCK).min(end));
            let part = &mut into[(first - offset) as usize..(last - offset) as usize];
            // Past the end of the file there are zeroes.
            let mut done = 0;
            while done < part.len() {
                let read = self.file.read_at(&mut part[done..], first + done as u64);
                match read.map_err(|source| VolumeError::Io { what: "read", path: self.place.clone(), source })? {
                    0 => {
                        part[done..].fill(0);
                        break;
                    }
                    n => done += n,
                }
            }
        }
        // Last: what broke meanwhile may have been read.
        self.whole()
    }

    /// Data and holes as they were: what was overwritten counts as data.
    ///
    /// # Errors
    /// As [`Snapshot::read`].
    pub fn extents(&self, offset: u64, length: u64, replica: &Replica) -> Result<Vec<(u64, bool)>, VolumeError> {
        let found = replica.extents(offset, length)?;
        let noted = lock(&self.noted);
        let (mut at, mut split) = (offset, vec![]);
        let mut put = |length: u64, hole: bool| match split.last_mut() {
            _ if length == 0 => {}
            Some((known, kind)) if *kind == hole => *known += length,
            _ => split.push((length, hole)),
        };
        for (length, hole) in found {
            let end = at + length;
            while hole
                && at < end
                && let Some(run) = noted.run_after(at / BLOCK, length.div_ceil(BLOCK) + 1)
                && run.start * BLOCK < end
            {
                let (first, last) = ((run.start * BLOCK).max(at), (run.end * BLOCK).min(end));
                put(first - at, true);
                put(last - first, false);
                at = last;
            }
            put(end - at, hole);
            at = end;
        }
        drop(noted);
        self.whole()?;
        Ok(split)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use godwit_units::{Bytes, Generation, Lineage, VolumeId};

    const SIZE: u64 = 8 << 20;

    fn volume(folder: &Path) -> Replica {
        let replica = Replica::create(&folder.join("v"), VolumeId(1), Bytes(SIZE)).unwrap();
        replica.become_primary(Lineage::FIRST, Generation(1)).unwrap();
        replica.write(0, &vec![1; 1 << 20]).unwrap();
        replica
    }

    fn all(snapshot: &Snapshot, replica: &Replica) -> Vec<u8> {
        let mut bytes = vec![0xff; SIZE as usize];
        snapshot.read(0, &mut bytes, replica).unwrap();
        bytes
    }

    #[test]
    fn what_is_read_is_what_lay_there_when_it_began_whatever_is_written_since() {
        let folder = tempfile::tempdir().unwrap();
        let replica = volume(folder.path());
        let before = {
            let mut bytes = vec![0; SIZE as usize];
            replica.read(0, &mut bytes).unwrap();
            bytes
        };
        let snapshot = Snapshot::new(replica.folder()).unwrap();
        for (at, length) in [(4096, 4096), (100, 50), (4000, 9000), ((1 << 20) - 10, 20), (5 << 20, 4096)] {
            snapshot.before_write(godwit_volume::touched(at, length), &replica);
            replica.write(at, &vec![9; length as usize]).unwrap();
        }
        // A hole now that held data, and data now that was a hole.
        snapshot.before_write(10..20, &replica);
        replica.zero(10 * BLOCK, 10 * BLOCK).unwrap();
        assert!(all(&snapshot, &replica) == before);
        let mut at = 0;
        for (length, hole) in snapshot.extents(0, SIZE, &replica).unwrap() {
            assert!(!hole || before[at..at + length as usize].iter().all(|b| *b == 0), "a hole at {at} was data");
            at += length as usize;
        }
        assert_eq!(at as u64, SIZE);
        // Parts of blocks, at both ends.
        let mut part = vec![0; 5000];
        snapshot.read(4000, &mut part, &replica).unwrap();
        assert!(part == before[4000..9000]);
        assert!(!replica.folder().join("overwritten").exists(), "it has no name, and goes with the process");
    }

    #[test]
    fn a_snapshot_that_cannot_keep_all_gives_nothing_and_the_guest_writes_on() {
        let folder = tempfile::tempdir().unwrap();
        let replica = volume(folder.path());
        let snapshot = Snapshot::new(replica.folder()).unwrap();
        snapshot.break_off("no room");
        snapshot.before_write(0..1, &replica);
        replica.write(0, &[7; 4096]).unwrap();
        assert!(snapshot.read(0, &mut [0; 4096], &replica).unwrap_err().to_string().contains("no room"));
        assert!(snapshot.extents(0, 4096, &replica).is_err());
    }
}
