//! Records in files: one file a VM, two slots in each.
//!
//! A store writes the slot that does not hold the last record, and then has to wait for one `fdatasync` only: it stands
//! in a VM's pause three times. A power loss on the way tears that slot, which its checksum tells; the other still
//! holds the record before. Each slot has a page of its own, so that no sector belongs to both.
//!
//! A file in which neither slot is whole is an error, never "no record": somebody else might run the VM already.

use crate::record::{Ledger, Record};
use godwit_units::VmId;
use rustix::fs::{FlockOperation, Mode, OFlags, flock};
use std::collections::HashMap;
use std::fs::{DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::xxh3_128;

/// One slot: a page, so that no write of the other can touch it.
const SLOT: usize = 4096;
/// What a slot begins with: a mark and the format's version.
const MAGIC: [u8; 8] = *b"GWREC\0\0\x01";
/// Mark, sequence, length, checksum.
const HEADER: usize = 8 + 8 + 8 + 16;

/// Records in a folder that one process at a time holds.
#[derive(Debug)]
pub struct FileLedger {
    folder: PathBuf,
    /// Held for as long as the ledger is; the kernel drops it with the process.
    lock: File,
    /// Open files, and the sequence of the last record in each.
    open: HashMap<VmId, Slots>,
}

#[derive(Debug)]
struct Slots {
    file: File,
    sequence: u64,
}

/// Why a record could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum LedgerError {
    /// The medium failed.
    #[error("cannot {what} {}: {source}", path.display())]
    Io {
        /// What was tried.
        what: &'static str,
        /// On which file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Another process holds the folder.
    #[error("{} is in use by another process; a host runs one node", folder.display())]
    Locked {
        /// The folder.
        folder: PathBuf,
    },
    /// Neither slot holds a whole record.
    #[error("{} holds no whole record: restore it, or claim the VM at the site that should own it", path.display())]
    Corrupt {
        /// The file.
        path: PathBuf,
    },
    /// Records are small; one that is not is a bug of the caller.
    #[error("a record of {0} bytes does not fit into a slot of the ledger")]
    TooLong(usize),
}

fn io_error(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> LedgerError {
    let path = path.to_owned();
    move |source| LedgerError::Io { what, path, source }
}

impl Drop for FileLedger {
    /// By word, not only by closing it: a program that this process starts has it open, too, from its fork to its exec.
    fn drop(&mut self) {
        let _ = flock(&self.lock, FlockOperation::Unlock);
    }
}

impl FileLedger {
    /// Opens the folder, and makes it if need be.
    ///
    /// # Errors
    /// When another process holds it, or the medium fails.
    pub fn open(folder: &Path) -> Result<Self, LedgerError> {
        DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(io_error("make", folder))?;
        let path = folder.join("lock");
        let lock = OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(&path);
        let lock = lock.map_err(io_error("open", &path))?;
        match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Self { folder: folder.to_owned(), lock, open: HashMap::new() }),
            Err(rustix::io::Errno::WOULDBLOCK) => Err(LedgerError::Locked { folder: folder.to_owned() }),
            Err(e) => Err(io_error("lock", &path)(e.into())),
        }
    }

    /// The VMs that have a record.
    ///
    /// # Errors
    /// When the folder cannot be read.
    pub fn vms(&self) -> Result<Vec<VmId>, LedgerError> {
        let mut found = vec![];
        for entry in std::fs::read_dir(&self.folder).map_err(io_error("list", &self.folder))? {
            let name = entry.map_err(io_error("list", &self.folder))?.file_name();
            let id = name.to_str().and_then(|n| n.strip_prefix("vm-")).and_then(|n| n.strip_suffix(".rec"));
            found.extend(id.and_then(|id| id.parse().ok()).map(VmId));
        }
        found.sort_unstable();
        Ok(found)
    }

    /// Forgets a VM: for one that was deleted everywhere.
    ///
    /// # Errors
    /// When the medium failed.
    pub fn forget(&mut self, vm: VmId) -> Result<(), LedgerError> {
        self.open.remove(&vm);
        let path = self.path(vm);
        match std::fs::remove_file(&path) {
            Ok(()) => self.sync_folder(),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(e) => Err(io_error("remove", &path)(e)),
        }
    }

    fn path(&self, vm: VmId) -> PathBuf {
        self.folder.join(format!("vm-{}.rec", vm.0))
    }

    fn sync_folder(&self) -> Result<(), LedgerError> {
        let folder =
            rustix::fs::open(&self.folder, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty());
        let folder = folder.map_err(|e| io_error("open", &self.folder)(e.into()))?;
        rustix::fs::fsync(folder).map_err(|e| io_error("sync", &self.folder)(e.into()))
    }
}

impl Ledger for FileLedger {
    type Error = LedgerError;

    fn load(&self, vm: VmId) -> Result<Option<Record>, LedgerError> {
        let path = self.path(vm);
        let bytes = match std::fs::read(&path) {
            Ok(bytes) => bytes,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(io_error("read", &path)(e)),
        };
        newest(&bytes).map(|(_, record)| Some(record)).ok_or(LedgerError::Corrupt { path })
    }

    fn store(&mut self, vm: VmId, record: &Record) -> Result<(), LedgerError> {
        let path = self.path(vm);
        if let Some(slots) = self.open.get_mut(&vm) {
            return slots.store(record, &path);
        }
        let slots = match OpenOptions::new().read(true).write(true).open(&path) {
            Ok(file) => {
                let mut bytes = vec![0; 2 * SLOT];
                file.read_exact_at(&mut bytes, 0).map_err(io_error("read", &path))?;
                let Some((sequence, _)) = newest(&bytes) else { return Err(LedgerError::Corrupt { path }) };
                let mut slots = Slots { file, sequence };
                slots.store(record, &path)?;
                slots
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                // The file appears whole or not at all.
                let fresh = path.with_extension("new");
                let file =
                    OpenOptions::new().create(true).truncate(true).read(true).write(true).mode(0o600).open(&fresh);
                let file = file.map_err(io_error("make", &fresh))?;
                file.set_len(2 * SLOT as u64).map_err(io_error("size", &fresh))?;
                let mut slots = Slots { file, sequence: 0 };
                slots.store(record, &fresh)?;
                slots.file.sync_all().map_err(io_error("sync", &fresh))?;
                std::fs::rename(&fresh, &path).map_err(io_error("rename", &fresh))?;
                self.sync_folder()?;
                slots
            }
            Err(e) => return Err(io_error("open", &path)(e)),
        };
        self.open.insert(vm, slots);
        Ok(())
    }
}

impl Slots {
    fn store(&mut self, record: &Record, path: &Path) -> Result<(), LedgerError> {
        let sequence = self.sequence + 1;
        let slot = encode(sequence, record)?;
        let at = (sequence % 2) * SLOT as u64;
        self.file.write_all_at(&slot, at).map_err(io_error("write", path))?;
        self.file.sync_data().map_err(io_error("sync", path))?;
        self.sequence = sequence;
        Ok(())
    }
}

fn encode(sequence: u64, record: &Record) -> Result<Vec<u8>, LedgerError> {
    let body = serde_json::to_vec(record).expect("a record is plain data");
    if HEADER + body.len() > SLOT {
        return Err(LedgerError::TooLong(body.len()));
    }
    let mut slot = Vec::with_capacity(SLOT);
    slot.extend(MAGIC);
    slot.extend(sequence.to_le_bytes());
    slot.extend((body.len() as u64).to_le_bytes());
    slot.extend(checksum(sequence, &body));
    slot.extend(body);
    slot.resize(SLOT, 0);
    Ok(slot)
}

fn checksum(sequence: u64, body: &[u8]) -> [u8; 16] {
    let mut all = sequence.to_le_bytes().to_vec();
    all.extend(body);
    xxh3_128(&all).to_le_bytes()
}

fn decode(slot: &[u8]) -> Option<(u64, Record)> {
    let word = |at: usize| Some(u64::from_le_bytes(slot.get(at..at + 8)?.try_into().ok()?));
    if slot.get(..8)? != MAGIC {
        return None;
    }
    let (sequence, length) = (word(8)?, usize::try_from(word(16)?).ok()?);
    let body = slot.get(HEADER..HEADER.checked_add(length)?)?;
    if slot.get(24..HEADER)? != checksum(sequence, body) {
        return None;
    }
    Some((sequence, serde_json::from_slice(body).ok()?))
}

/// The newest whole record of a file.
fn newest(bytes: &[u8]) -> Option<(u64, Record)> {
    bytes.chunks(SLOT).take(2).filter_map(decode).max_by_key(|(sequence, _)| *sequence)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{MoveId, Owner, Ticket};

    const VM: VmId = VmId(7);

    fn ticket(mv: u64) -> Ticket {
        Owner::first(VM).ticket(MoveId(mv))
    }

    #[test]
    fn the_last_record_is_found_again_by_the_next_process() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut ledger = FileLedger::open(folder.path()).expect("opens");
        assert_eq!(ledger.load(VM).expect("loads"), None);
        for mv in 1..10 {
            ledger.store(VM, &Record::Sealed(ticket(mv))).expect("stores");
            assert_eq!(ledger.load(VM).expect("loads"), Some(Record::Sealed(ticket(mv))));
        }
        drop(ledger);
        let mut ledger = FileLedger::open(folder.path()).expect("opens");
        assert_eq!(ledger.vms().expect("lists"), [VM]);
        assert_eq!(ledger.load(VM).expect("loads"), Some(Record::Sealed(ticket(9))));
        ledger.store(VM, &Record::Released(ticket(9))).expect("stores");
        assert_eq!(ledger.load(VM).expect("loads"), Some(Record::Released(ticket(9))));
        ledger.forget(VM).expect("forgets");
        assert_eq!(ledger.load(VM).expect("loads"), None);
    }

    #[test]
    fn a_store_that_is_torn_anywhere_leaves_the_record_before_or_the_new_one() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut ledger = FileLedger::open(folder.path()).expect("opens");
        let path = ledger.path(VM);
        ledger.store(VM, &Record::Staged(ticket(1))).expect("stores");
        ledger.store(VM, &Record::Granted(ticket(1))).expect("stores");
        let before = std::fs::read(&path).expect("reads");
        ledger.store(VM, &Record::Started(ticket(1))).expect("stores");
        let after = std::fs::read(&path).expect("reads");
        let differ: Vec<_> = (0..before.len()).filter(|i| before[*i] != after[*i]).collect();
        assert!(differ.len() > 20);
        for from in 0..differ.len() {
            for to in from..=differ.len() {
                let mut torn = before.clone();
                differ[from..to].iter().for_each(|i| torn[*i] = after[*i]);
                let (_, found) = newest(&torn).expect("a whole record");
                let whole = to - from == differ.len();
                assert_eq!(found, if whole { Record::Started(ticket(1)) } else { Record::Granted(ticket(1)) });
            }
        }
    }

    #[test]
    fn a_file_without_a_whole_record_is_an_error_and_not_a_vm_without_a_record() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut ledger = FileLedger::open(folder.path()).expect("opens");
        ledger.store(VM, &Record::Staged(ticket(1))).expect("stores");
        let path = ledger.path(VM);
        for bytes in [vec![], vec![0; 2 * SLOT], vec![0xff; 2 * SLOT]] {
            std::fs::write(&path, bytes).expect("writes");
            assert!(matches!(ledger.load(VM), Err(LedgerError::Corrupt { .. })));
        }
    }

    #[test]
    fn two_processes_never_hold_one_ledger() {
        let folder = tempfile::tempdir().expect("a folder");
        let first = FileLedger::open(folder.path()).expect("opens");
        assert!(matches!(FileLedger::open(folder.path()), Err(LedgerError::Locked { .. })));
        drop(first);
        FileLedger::open(folder.path()).expect("opens");
    }
}
