//! A replica on storage that several hosts reach: one folder with blocks, stamps and all else, which each of them can open, and of
//! which one at a time is the volume's.
//!
//! Nothing is copied when such a volume changes hosts. Its stamps lie with its blocks and go on counting, so what knows the volume elsewhere (a
//! pre-cache, say) still knows it; the new owner's stamps bear its own generation.
//!
//! # Why two hosts never both write
//!
//! A host's [`Replica`] of such a volume is *attached* or it is not. Detached it has none of the files open, reads nothing for a guest, and takes no
//! write: there is nothing that it could write to. For memory that comes it may look at the blocks ([`Replica::glance`]), by a file of its own that is open
//! for reading only.
//!
//! 1. *It is born detached* ([`Replica::shared`]), also when a host is started again, and attaches when its host's record of the VM
//!    says that it is the owner's ([`Replica::attach`], by the hand-off's `Open`) and never else. A replica of its own a host opens at once, and
//!    doubts or restamps what it finds; of a shared one that would be another's.
//! 2. *The source detaches at the stop* ([`Replica::detach`], by `Close`): under the lock under which writes are made, so none is under way and
//!    none comes after; it makes all durable, describes it as closed, closes the files, and only then lets go of the lock. Its host does not
//!    write SEALED before that has ended (`Guard::SealAfterClosed` of the hand-off), and nobody is granted the VM before SEALED: so a write of the
//!    source's comes before each read of the destination's, also through the file system, by close-to-open.
//! 3. *What cannot be made durable is not detached*, and the move is undone: the source has it still.
//! 4. *A destination that was granted the VM and gives it back* detaches before it says so, as a source does.
//! 5. *The storage remembers who had it last* (`holder`): the greatest (lineage, generation), durably, before anything else is touched. A host that
//!    attaches as an older owner, or as the same one that another host is, is refused: ownership only grows, with each grant, return
//!    and claim. So a host that comes back with an old record, or a record that was copied, gets nothing, whatever it believes.
//! 6. *A lock* (`flock`) is held while attached. Where the file system carries locks between hosts this refuses even what was not
//!    thought of; nothing rests on it.
//!
//! What is left is a host that is cut off, attached, and writes while somebody claims the VM elsewhere. Between hosts that share nothing but
//! the storage only the storage could stop it: that is what the fence is for, that a claim needs evidence of.
//!
//! # What a crash leaves
//!
//! A volume that is not described as closed, with regions that are hot. Whoever attaches next, as the owner that the record or a claim
//! says, restamps them as any primary does; the mark and the stamps lie with the blocks. A host whose node is told to end describes it as closed
//! ([`Replica::end`]), and has it until its process is gone: it is the owner's still, and the next process attaches it as that.

use crate::error::{VolumeError, io_error};
use crate::file::{Description, DescriptionFile, Media, Medium, SlottedFile};
use crate::glance::Glance;
use crate::guards::Guards;
use crate::journal::Journal;
use crate::meta::Meta;
use crate::order::FirstAccess;
use crate::replica::Replica;
use crate::stamps::REGION;
use godwit_units::{Bytes, Generation, Lineage, VolumeId};
use serde::{Deserialize, Serialize};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

/// What a file of a host's mark is called, before its number.
const MARK: &str = "mark-";

/// Who had a shared volume last.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Having {
    /// The host.
    pub who: String,
    /// As which owner of the VM.
    pub lineage: Lineage,
    /// As the lineage.
    pub generation: Generation,
}

/// The shared side of a replica.
#[derive(Debug)]
pub(crate) struct Shared {
    place: PathBuf,
    volume: VolumeId,
    who: String,
    data: Arc<Late>,
    attached: AtomicBool,
    /// Detached, it reads as zeroes: nobody believes what is read then.
    blank: AtomicBool,
    lock: Mutex<Option<FolderLock>>,
    /// How it is looked at while it is another host's.
    glance: Mutex<Option<Arc<Glance>>>,
}

impl Shared {
    fn forget_glance(&self) {
        *self.glance.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    fn glance(&self, size: Bytes) -> io::Result<Arc<Glance>> {
        let mut glance = self.glance.lock().unwrap_or_else(PoisonError::into_inner);
        // Asked with that lock: who attaches says so before it takes what is there.
        if self.attached.load(Ordering::Acquire) {
            return Err(io::Error::other("the volume is this host's own"));
        }
        if let Some(open) = &*glance {
            return Ok(open.clone());
        }
        let open = Arc::new(Glance::open(&self.place.join("data"), size.0)?);
        *glance = Some(open.clone());
        Ok(open)
    }
}

/// Written while the guest stands: in its place, which costs no more than its own bytes, where another file under its name waits for all that
/// the file system has to make durable.
fn holder_of(place: &Path) -> SlottedFile {
    SlottedFile::new(place.join("holder"))
}

/// Who had the shared volume in this folder last; none: nobody yet.
///
/// # Errors
/// When that cannot be read.
pub fn having(place: &Path) -> Result<Option<Having>, VolumeError> {
    let holder = holder_of(place);
    match holder.load() {
        Ok(bytes) => serde_json::from_slice(&bytes)
            .map(Some)
            .map_err(|e| VolumeError::Damaged { path: holder.path().to_owned(), why: e.to_string() }),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(io_error("read", holder.path())(e)),
    }
}

/// Which volume lies in this folder, and how large it is.
///
/// # Errors
/// When none does, or it cannot be read.
pub fn what_is_in(place: &Path) -> Result<(VolumeId, Bytes), VolumeError> {
    let meta = Meta::load(&SlottedFile::new(place.join("meta")), place)?;
    Ok((meta.volume, meta.size))
}

/// A host leaves a mark in a shared volume's folder, for another to find with [`see_mark`].
///
/// # Errors
/// When it cannot write there.
pub fn leave_mark(place: &Path, number: u64, text: &str) -> Result<(), VolumeError> {
    let path = place.join(format!("{MARK}{number:016x}"));
    DescriptionFile(path).store(text.as_bytes()).map_err(io_error("leave a mark in", place))
}

/// The mark of that number that somebody left.
///
/// # Errors
/// When there is none, or it cannot be read.
pub fn see_mark(place: &Path, number: u64) -> Result<String, VolumeError> {
    let path = place.join(format!("{MARK}{number:016x}"));
    std::fs::read_to_string(&path).map_err(io_error("find the other host's mark", &path))
}

/// Takes a mark away.
pub fn remove_mark(place: &Path, number: u64) {
    let _ = std::fs::remove_file(place.join(format!("{MARK}{number:016x}")));
}

/// Blocks that are there, or are not.
#[derive(Debug, Default)]
struct Late(RwLock<Option<Arc<dyn Medium>>>);

impl Late {
    fn get(&self) -> io::Result<Arc<dyn Medium>> {
        let here = self.0.read().unwrap_or_else(PoisonError::into_inner).clone();
        here.ok_or_else(|| io::Error::other("the volume is not attached here"))
    }

    fn put(&self, medium: Option<Arc<dyn Medium>>) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = medium;
    }
}

impl Medium for Late {
    fn read(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        self.get()?.read(at, into)
    }

    fn read_now(&self, at: u64, into: &mut [u8]) -> usize {
        self.get().map_or(0, |medium| medium.read_now(at, into))
    }

    fn read_past_cache(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        self.get()?.read_past_cache(at, into)
    }

    fn warm(&self, at: u64, length: u64) {
        if let Ok(medium) = self.get() {
            medium.warm(at, length);
        }
    }

    fn write(&self, at: u64, from: &[u8]) -> io::Result<()> {
        self.get()?.write(at, from)
    }

    fn punch(&self, at: u64, length: u64) -> io::Result<()> {
        self.get()?.punch(at, length)
    }

    fn sync(&self) -> io::Result<()> {
        // All was made durable before it went.
        self.get().map_or(Ok(()), |medium| medium.sync())
    }

    fn extents(&self, at: u64, length: u64) -> io::Result<Vec<(u64, bool)>> {
        self.get().map_or_else(|_| Ok(vec![(length, true)]), |medium| medium.extents(at, length))
    }

    fn knows_holes(&self) -> bool {
        self.get().map_or(true, |medium| medium.knows_holes())
    }

    fn allocated(&self) -> u64 {
        self.get().map_or(0, |medium| medium.allocated())
    }
}

/// What a detached replica has in place of its files: nothing.
#[derive(Debug)]
struct Nothing;

impl Medium for Nothing {
    fn read(&self, _: u64, into: &mut [u8]) -> io::Result<()> {
        into.fill(0);
        Ok(())
    }

    fn write(&self, _: u64, _: &[u8]) -> io::Result<()> {
        Err(io::Error::other("the volume is not attached here"))
    }

    fn punch(&self, _: u64, _: u64) -> io::Result<()> {
        Err(io::Error::other("the volume is not attached here"))
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }

    fn extents(&self, _: u64, length: u64) -> io::Result<Vec<(u64, bool)>> {
        Ok(vec![(length, true)])
    }

    fn allocated(&self) -> u64 {
        0
    }
}

/// The description of a detached replica, which is forgotten.
#[derive(Debug, Default)]
struct Forgotten(Mutex<Vec<u8>>);

impl Description for Forgotten {
    fn load(&self) -> io::Result<Vec<u8>> {
        Ok(self.0.lock().unwrap_or_else(PoisonError::into_inner).clone())
    }

    fn store(&self, bytes: &[u8]) -> io::Result<()> {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = bytes.to_vec();
        Ok(())
    }
}

/// A replica of nothing.
fn stand_in(place: &Path, volume: VolumeId, size: Bytes) -> Result<Replica, VolumeError> {
    let media = Media {
        data: Box::new(Nothing),
        stamps: Box::new(Nothing),
        hot: Box::new(Nothing),
        words: Box::new(Nothing),
        power: String::new(),
        description: Box::<Forgotten>::default(),
        region: REGION,
    };
    let meta = Meta::fresh(volume, size)?;
    Ok(Replica::assemble(place, meta, media, None, Guards::ALL)?.0)
}

impl Replica {
    /// A host's replica of the shared volume in the folder `place`: detached. `own` is the host's own folder for it, `who` the host.
    ///
    /// # Errors
    /// When the size is none.
    pub fn shared(place: &Path, own: &Path, volume: VolumeId, size: Bytes, who: &str) -> Result<Self, VolumeError> {
        let data = Arc::new(Late::default());
        let mut replica = stand_in(own, volume, size)?;
        replica.data = data.clone();
        replica.shared = Some(Shared {
            place: place.to_owned(),
            volume,
            who: who.to_owned(),
            data,
            attached: AtomicBool::new(false),
            blank: AtomicBool::new(false),
            lock: Mutex::default(),
            glance: Mutex::default(),
        });
        Ok(replica)
    }

    /// Where it lies, if on storage that is shared.
    #[must_use]
    pub fn shared_place(&self) -> Option<&Path> {
        self.shared.as_ref().map(|shared| &*shared.place)
    }

    /// Whether it is a shared volume's that this host does not have.
    #[must_use]
    pub fn is_detached(&self) -> bool {
        self.shared.as_ref().is_some_and(|shared| !shared.attached.load(Ordering::Acquire))
    }

    /// Until it is attached it reads as zeroes: for a QEMU that looks at its disks when it starts, and runs nothing.
    pub fn read_blank(&self) {
        if let Some(shared) = &self.shared {
            shared.blank.store(true, Ordering::Release);
        }
    }

    /// Refuses to read what is not attached here; whether there are zeroes instead.
    pub(crate) fn reads_blank(&self) -> Result<bool, VolumeError> {
        match &self.shared {
            Some(shared) if !shared.attached.load(Ordering::Acquire) => {
                // Whoever asks waits, as with a volume that is frozen.
                if shared.blank.load(Ordering::Acquire) { Ok(true) } else { Err(VolumeError::Frozen) }
            }
            _ => Ok(false),
        }
    }

    /// Reads whole blocks of a shared volume that another host has, as they lie there. They may be of any moment: whoever asks has to know what they ought to
    /// be, and to compare (`glance.rs` says why nothing old is read later).
    ///
    /// # Errors
    /// When it is not shared, is attached here, or lies where it cannot be read so: in a pool, for one; when they lie outside; when storage
    /// fails.
    pub fn glance(&self, at: u64, into: &mut [u8]) -> Result<(), VolumeError> {
        self.glanced(|glance| glance.read(at, into))
    }

    /// How many bytes of it can be read so in a second, tried for some milliseconds where its guest has read and written.
    ///
    /// # Errors
    /// Those of [`Replica::glance`].
    pub fn glance_rate(&self) -> Result<u64, VolumeError> {
        let used = self.shared_place().map(FirstAccess::load).unwrap_or_default();
        self.glanced(|glance| glance.rate(used.runs()))
    }

    fn glanced<T>(&self, what: impl FnOnce(&Glance) -> io::Result<T>) -> Result<T, VolumeError> {
        let failed = || io_error("look at", self.folder());
        let Some(shared) = &self.shared else {
            return Err(failed()(io::Error::other("it is this host's own")));
        };
        what(&*shared.glance(self.size()).map_err(failed())?).map_err(failed())
    }

    /// Opens a shared volume, because its VM is this host's as this owner. Nothing where it is attached, or not shared.
    ///
    /// # Errors
    /// When a later owner, or another host, has had it; when another process has it; when a medium fails. It is detached then.
    pub fn attach(&self, lineage: Lineage, generation: Generation) -> Result<(), VolumeError> {
        let Some(shared) = &self.shared else { return Ok(()) };
        let _one = self.settling();
        let mut kept = shared.lock.lock().unwrap_or_else(PoisonError::into_inner);
        if shared.attached.load(Ordering::Acquire) {
            return Ok(());
        }
        if self.lock().closed {
            // This process ends, and the next one attaches it.
            return Err(VolumeError::Frozen);
        }
        let (volume, size) = what_is_in(&shared.place)?;
        if (volume, size) != (shared.volume, self.size()) {
            let why =
                format!("it is volume {} with {size}, and not {} with {}", volume.0, shared.volume.0, self.size());
            return Err(VolumeError::Damaged { path: shared.place.clone(), why });
        }
        let lock = Self::lock_folder(&shared.place)?;
        if let Some(had) = having(&shared.place)?
            && ((had.lineage, had.generation) > (lineage, generation)
                || ((had.lineage, had.generation) == (lineage, generation) && had.who != shared.who))
        {
            return Err(VolumeError::Outranked { place: shared.place.clone(), who: had.who });
        }
        let now = Having { who: shared.who.clone(), lineage, generation };
        let bytes = serde_json::to_vec(&now).map_err(|e| io_error("describe", &shared.place)(e.into()))?;
        holder_of(&shared.place).store(&bytes).map_err(io_error("take", &shared.place))?;
        let (real, _) = Self::open_locked(&shared.place, &shared.place.join("data"), None)?;
        if Journal::exists(&shared.place) {
            Journal::open(&shared.place)?.recover(&real)?;
        }
        let (data, inner) = real.into_parts();
        {
            // Nobody sees the one without the other: what is read or written asks first whether it is attached.
            let mut mine = self.lock();
            let ended = mine.closed;
            *mine = inner;
            // By whoever waits for this, and describes it as closed then.
            mine.closed = ended;
            shared.data.put(Some(data));
            self.note_partial(&mine);
            shared.attached.store(true, Ordering::Release);
        }
        shared.forget_glance();
        *kept = Some(lock);
        Ok(())
    }

    /// Makes a shared volume durable, and lets go of it: nothing here reads or writes it afterwards. Nothing where it is detached, or
    /// not shared.
    ///
    /// # Errors
    /// When it cannot be made durable; it is attached still, and takes no writes.
    pub fn detach(&self) -> Result<(), VolumeError> {
        let Some(shared) = &self.shared else { return Ok(()) };
        let _one = self.settling();
        let mut kept = shared.lock.lock().unwrap_or_else(PoisonError::into_inner);
        if !shared.attached.load(Ordering::Acquire) {
            // Of a move that came to nothing.
            shared.forget_glance();
            return Ok(());
        }
        let nothing = stand_in(self.folder(), shared.volume, self.size())?.into_parts().1;
        {
            let mut inner = self.lock();
            inner.close(self)?;
            let ended = inner.closed;
            *inner = nothing;
            // Or it would be attached again by a process that ends.
            inner.closed = ended;
            shared.blank.store(false, Ordering::Release);
            shared.attached.store(false, Ordering::Release);
            shared.data.put(None);
            self.note_partial(&inner);
        }
        // Last.
        *kept = None;
        Ok(())
    }

    /// Makes the folder of a shared volume, which must not exist: it holds zeroes, and nobody has had it.
    ///
    /// # Errors
    /// When it exists, or cannot be made.
    pub fn create_shared(place: &Path, volume: VolumeId, size: Bytes) -> Result<(), VolumeError> {
        Meta::fresh(volume, size)?;
        let made = std::os::unix::fs::DirBuilderExt::mode(&mut std::fs::DirBuilder::new(), 0o700).create(place);
        made.map_err(io_error("make", place))?;
        Self::create_beside(place, volume, size)
    }

    pub(crate) fn lock_folder(place: &Path) -> Result<FolderLock, VolumeError> {
        let path = place.join("lock");
        let lock = OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(&path);
        let lock = lock.map_err(io_error("open", &path))?;
        match rustix::fs::flock(&lock, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(FolderLock(lock)),
            Err(rustix::io::Errno::WOULDBLOCK) => Err(VolumeError::Locked(place.to_owned())),
            Err(e) => Err(io_error("lock", &path)(e.into())),
        }
    }
}

/// Keeps others out of a folder. It is let go of by word, not only by closing it: a program that this process starts has it open, too, from
/// its fork to its exec, and would keep it from whoever opens the folder next.
#[derive(Debug)]
pub(crate) struct FolderLock(File);

impl Drop for FolderLock {
    fn drop(&mut self) {
        let _ = rustix::fs::flock(&self.0, rustix::fs::FlockOperation::Unlock);
    }
}

#[cfg(test)]
#[path = "shared_tests.rs"]
mod tests;
