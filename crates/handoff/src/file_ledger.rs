//! Records in files: one file a VM, two slots in each.
//!
//! A store ([`Slots`]) has to wait for one `fdatasync` only: it stands in a VM's pause three times.
//!
//! A file in which neither slot is whole is an error, never "no record": somebody else might run the VM already.
//!
//! What a process finds in a file may be in memory only: the one before was killed between write and sync, or ended because the sync failed. So
//! the first look at a record makes it durable. Else a source that finds SEALED would send COMMIT on the strength of what a loss of power
//! takes away, and own the VM again after it, beside the destination; and the next store would go over the only record that is on the medium.

use crate::record::{Ledger, Record};
use godwit_durable::{Layout, Slots};
use godwit_units::VmId;
use rustix::fs::{FlockOperation, Mode, OFlags, flock};
use std::cell::RefCell;
use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::fs::{DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// A page each.
const LAYOUT: Layout = Layout { magic: *b"GWREC\0\0\x01", slot: 4096 };

/// Records in a folder that one process at a time holds.
#[derive(Debug)]
pub struct FileLedger {
    folder: PathBuf,
    /// Held for as long as the ledger is; the kernel drops it with the process.
    lock: File,
    open: HashMap<VmId, Slots>,
    /// Those whose record is known to be as durable as it is read: all that are open, and more.
    sure: RefCell<HashSet<VmId>>,
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
            Ok(()) => {
                let (open, sure) = (HashMap::new(), RefCell::new(HashSet::new()));
                let ledger = Self { folder: folder.to_owned(), lock, open, sure };
                // The names of records that another process made.
                ledger.sync_folder()?;
                Ok(ledger)
            }
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
        self.doubt(vm);
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

    /// Makes a VM's record durable as it is read, if there is one and nobody is sure of it yet.
    fn make_sure(&self, vm: VmId, path: &Path) -> Result<(), LedgerError> {
        if self.sure.borrow().contains(&vm) {
            return Ok(());
        }
        match LAYOUT.make_sure(path) {
            Ok(true) => {}
            Ok(false) => return Err(LedgerError::Corrupt { path: path.to_owned() }),
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(e) => return Err(io_error("make durable", path)(e)),
        }
        self.sure.borrow_mut().insert(vm);
        Ok(())
    }

    /// Nobody is sure of a VM's record any more.
    fn doubt(&mut self, vm: VmId) {
        self.open.remove(&vm);
        self.sure.get_mut().remove(&vm);
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

    /// The first time in a process it waits for the disk.
    fn load(&self, vm: VmId) -> Result<Option<Record>, LedgerError> {
        let path = self.path(vm);
        self.make_sure(vm, &path)?;
        let bytes = match std::fs::read(&path) {
            Ok(bytes) => bytes,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(io_error("read", &path)(e)),
        };
        newest(&bytes).map(Some).ok_or(LedgerError::Corrupt { path })
    }

    fn store(&mut self, vm: VmId, record: &Record) -> Result<(), LedgerError> {
        let path = self.path(vm);
        let record = serde_json::to_vec(record).expect("a record is plain data");
        if record.len() > LAYOUT.most() {
            return Err(LedgerError::TooLong(record.len()));
        }
        self.make_sure(vm, &path)?;
        let slots = match self.open.entry(vm) {
            Entry::Occupied(open) => open.into_mut(),
            Entry::Vacant(place) => match LAYOUT.open(&path) {
                Ok(slots) => place.insert(slots.ok_or_else(|| LedgerError::Corrupt { path: path.clone() })?),
                Err(e) if e.kind() == io::ErrorKind::NotFound => {
                    place.insert(LAYOUT.create(&path, &record).map_err(io_error("make", &path))?);
                    self.sure.get_mut().insert(vm);
                    return Ok(());
                }
                Err(e) => return Err(io_error("open", &path)(e)),
            },
        };
        let stored = slots.store(&record);
        if stored.is_err() {
            self.doubt(vm);
        }
        stored.map_err(io_error("write", &path))
    }
}

/// The newest whole record of a file.
fn newest(bytes: &[u8]) -> Option<Record> {
    serde_json::from_slice(LAYOUT.newest(bytes)?).ok()
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
    fn a_file_without_a_whole_record_is_an_error_and_not_a_vm_without_a_record() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut ledger = FileLedger::open(folder.path()).expect("opens");
        ledger.store(VM, &Record::Staged(ticket(1))).expect("stores");
        let path = ledger.path(VM);
        for bytes in [vec![], vec![0; 2 * LAYOUT.slot], vec![0xff; 2 * LAYOUT.slot]] {
            std::fs::write(&path, bytes).expect("writes");
            assert!(matches!(ledger.load(VM), Err(LedgerError::Corrupt { .. })));
            // Nor does anybody write over what may be somebody's.
            ledger.open.clear();
            let stored = ledger.store(VM, &Record::Staged(ticket(2)));
            assert!(matches!(stored, Err(LedgerError::Corrupt { .. })), "{stored:?}");
        }
    }

    /// What a store that failed, or a process that was killed in one, leaves is read as what is durable is; so it cannot be told, and is written.
    #[test]
    fn a_record_that_another_process_left_is_made_durable_before_anybody_goes_by_it_and_once() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut ledger = FileLedger::open(folder.path()).expect("opens");
        ledger.store(VM, &Record::Staged(ticket(1))).expect("stores");
        ledger.store(VM, &Record::Sealed(ticket(1))).expect("stores");
        let path = ledger.path(VM);
        let long_ago = std::time::SystemTime::UNIX_EPOCH;
        // Whether it is written to, by whoever has only looked.
        let is_written = |look: &dyn Fn()| {
            File::options().write(true).open(&path).and_then(|file| file.set_modified(long_ago)).expect("has a time");
            let before = std::fs::read(&path).expect("reads");
            look();
            assert!(std::fs::read(&path).expect("reads") == before, "something changed");
            std::fs::metadata(&path).and_then(|file| file.modified()).expect("has a time") > long_ago
        };
        let load = |ledger: &FileLedger| {
            assert_eq!(ledger.load(VM).expect("loads"), Some(Record::Sealed(ticket(1))));
        };
        assert!(!is_written(&|| load(&ledger)), "this process has stored it");
        drop(ledger);
        let mut ledger = FileLedger::open(folder.path()).expect("opens");
        assert!(is_written(&|| load(&ledger)));
        assert!(!is_written(&|| load(&ledger)), "each look costs a write");
        // As a store leaves it that failed.
        ledger.doubt(VM);
        assert!(is_written(&|| load(&ledger)));
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
