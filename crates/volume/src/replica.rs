//! One site's copy of a volume.
//!
//! The order of things in a write: the region is hot, durably; the data, and the stamp in memory, under one lock. In [`Replica::settle`]: the data
//! is durable; the stamps are; what came to a shadow volume is here for good; the region is cold. So what a stamp on the disk says is
//! true, or its region is hot.
//!
//! # The end of a process
//!
//! One that dies leaves regions hot. They are doubted by the next, which restamps or forgets all of them, and so they travel again, though
//! with the power still on nothing was lost. One that is told to end closes what it has ([`Replica::end`]), whoever holds it still, with the lock held
//! that each write is made under:
//!
//! 1. *Nobody writes any more*, whatever becomes of the other steps. A write that was begun has been made, data and stamp; one that comes later
//!    finds the replica closed where it would mark its region, as each guest's and each other replica's has to do before it touches anything.
//!    What marks nothing looks for that itself: a repair, whose block keeps its stamp, and a table that is made sure, which stays unsure. So nothing is
//!    hot behind the next step, and no data is newer than its stamp.
//! 2. *All regions are settled* as any are: data, stamps, what is here for good, and then they are cold. Where a thread ended in a bug with the
//!    lock held, half a write may be there: nothing is settled then, and this fails.
//! 3. *That they are cold is durable.* Else a loss of power before the next start would bring marks back.
//! 4. *The description says that it was closed*, last. The next opening takes that back, durably, before it can mark anything. So where it is said
//!    nothing is hot; and whatever ends the process before, it is as if nobody had tried: the marks that stand are doubted, those that
//!    are gone were of regions in order.
//!
//! A write that was made and not answered is, to whoever asked for it, one that may have been made: asked for again, it is made again, in a
//! later epoch. What was answered is durable, flushed or not.

use crate::blocks::{BLOCK, touched};
use crate::device::Before;
use crate::error::{VolumeError, io_error};
use crate::file::{Description, Disk, Media, Medium, SlottedFile, power};
use crate::guards::{Guard, Guards};
use crate::journal::Journal;
use crate::meta::{Complete, MOST_OWNERS, Meta, SURE};
use crate::per_region::PerRegion;
use crate::shadow::Shadow;
use crate::shared::{FolderLock, Shared};
use crate::stamp::Stamp;
use crate::stamps::{REGION, Stamps, WINDOW, entry, nobodys};
use crate::synced::Synced;
use godwit_units::{Bytes, Epoch, Generation, Lineage, VolumeId};
use std::collections::BTreeSet;
use std::fs::DirBuilder;
use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

/// Regions that are marked with one wait for the disk, at the most, as a power of two: 256 MiB of disk.
const MOST_AHEAD: u32 = 6;
/// Settlings for which a region of a whole volume stays hot after its last write: a minute, where one settles every five
/// seconds. A guest that comes back to it meanwhile does not wait for a mark, and the sync before it cools finds little that
/// the system has not written by itself.
pub const LINGERING: u32 = 12;
/// Hot regions that nobody writes to, at the most: 2 GiB of disk. After a crash so much may travel without need, and once more as
/// much as is written between two settlings.
const MOST_LINGERING: usize = 512;
/// Epochs that are set aside with one write of the description: the guest waits for the disk once in so many of them. A process that
/// dies leaves those unused that it has not come to.
const EPOCHS_AHEAD: u32 = if cfg!(test) { 4 } else { 64 };
/// For how long a walk over the table lets go of the lock after a window that took as long.
const TURN: Duration = Duration::from_micros(100);
/// Nobody has asked yet how much was written.
const UNKNOWN: u64 = u64::MAX;
#[cfg(test)]
thread_local! {
    /// Takes a rule away: a secondary that forgets says first that it holds no epoch.
    pub(crate) static FORGETS_SILENTLY: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
    /// Takes a rule away: an epoch that begins is one that no later process can begin.
    pub(crate) static ROLLS_FORGETFULLY: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// A replica. Reads run beside each other; what changes it is serialised, so that writes that overlap reach everything
/// in one order.
#[derive(Debug)]
pub struct Replica {
    folder: PathBuf,
    /// Shared with a library, which reads it and never writes.
    pub(crate) data: Arc<dyn Medium>,
    /// Never changes.
    size: Bytes,
    /// Whether something may be absent: see [`Replica::is_partial`].
    partial: AtomicBool,
    /// The last figure of [`Replica::allocated`], where it is counted.
    counted: AtomicU64,
    inner: Mutex<Inner>,
    /// One settling at a time: another one's look at the regions would hide what was written from this one.
    settling: Mutex<()>,
    /// Held for as long as the replica is.
    _lock: Option<FolderLock>,
    /// What is special about one on shared storage.
    pub(crate) shared: Option<Shared>,
}

#[derive(Debug)]
pub(crate) struct Inner {
    pub meta: Meta,
    pub stamps: Stamps,
    /// What is not here yet.
    pub shadow: Shadow,
    hot: Box<dyn Medium>,
    /// Hot regions, and how many settlings ago each was written: 0 since the last one.
    regions: PerRegion<u32>,
    /// How many regions are marked together, as a power of two: one more with each mark, one less with each settling that saw none.
    ahead: u32,
    /// Whether a guest's write had to wait for a mark since the last settling.
    marked: bool,
    frozen: bool,
    /// It ends with this process, described as closed or not: nobody writes to it any more.
    pub closed: bool,
    /// Epochs up to this one are this process's: no later one begins them. What is stored as the epoch of now is never less.
    set_aside: u32,
    /// Nobody knows whether the epoch that this secondary holds is stored as it is here.
    unstored: bool,
    description: Box<dyn Description>,
    /// The replica's place, for errors.
    folder: PathBuf,
    pub guards: Guards,
}

/// What a replica was found like.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Opened {
    /// Whether it was closed properly.
    pub clean: bool,
    /// Blocks whose stamps could not be trusted: restamped by a primary, forgotten by a secondary.
    pub doubted: u64,
}

/// What a write did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Written {
    /// The blocks that it touched.
    pub blocks: Range<u64>,
}

/// What says what a replica's blocks are.
pub(crate) const TABLES: [&str; 5] = ["stamps", "hot", "words", "journal", "order"];

/// Removes what is left in a folder of a replica that has no description any more: it would be believed of the next one.
pub(crate) fn clear(folder: &Path, files: &[&str]) -> Result<(), VolumeError> {
    for file in files {
        let path = folder.join(file);
        godwit_durable::remove(&path).map_err(io_error("remove", &path))?;
    }
    Ok(())
}

impl Replica {
    /// Makes a replica in a folder that does not exist yet. It holds zeroes, and belongs to nobody: a secondary.
    ///
    /// # Errors
    /// When the size is no multiple of 4 KiB or too large, or the medium fails.
    pub fn create(folder: &Path, volume: VolumeId, size: Bytes) -> Result<Self, VolumeError> {
        clear(folder, &["data"])?;
        Self::create_beside(folder, volume, size)?;
        Ok(Self::open(folder)?.0)
    }

    /// Makes the folder of a replica whose blocks lie elsewhere: for [`Replica::open_beside`].
    ///
    /// # Errors
    /// As [`Replica::create`].
    pub fn create_beside(folder: &Path, volume: VolumeId, size: Bytes) -> Result<(), VolumeError> {
        let meta = Meta::fresh(volume, size)?;
        DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(io_error("make", folder))?;
        clear(folder, &TABLES)?;
        // Last, because a folder with a description is a replica.
        meta.store(&SlottedFile::new(folder.join("meta")), folder)
    }

    /// Makes a replica whose blocks lie on a block device. It holds zeroes, and belongs to nobody.
    ///
    /// # Errors
    /// When the device is in use, or too small, or a medium fails; what the device held may be lost then.
    pub fn create_on(
        folder: &Path,
        device: &Path,
        volume: VolumeId,
        size: Bytes,
        before: Before,
    ) -> Result<(), VolumeError> {
        crate::device::create(folder, device, volume, size, before)
    }

    /// Describes a replica that holds zeroes and belongs to nobody, on media that are empty.
    ///
    /// # Errors
    /// As [`Replica::create`].
    pub fn format(description: &dyn Description, volume: VolumeId, size: Bytes) -> Result<(), VolumeError> {
        Meta::fresh(volume, size)?.store(description, Path::new("a new replica"))
    }

    /// Whether there is one.
    #[must_use]
    pub fn exists(folder: &Path) -> bool {
        folder.join("meta").exists()
    }

    /// Opens a replica. A new epoch begins.
    ///
    /// # Errors
    /// When another process has it, it is damaged, or the medium fails.
    pub fn open(folder: &Path) -> Result<(Self, Opened), VolumeError> {
        Self::open_beside(folder, &folder.join("data"))
    }

    /// Opens a replica whose blocks are a file or block device elsewhere: a raw image, tracked by the folder beside it.
    ///
    /// # Errors
    /// As [`Replica::open`].
    pub fn open_beside(folder: &Path, data: &Path) -> Result<(Self, Opened), VolumeError> {
        let lock = Self::lock_folder(folder)?;
        let (it, opened) = Self::open_locked(folder, data, Some(lock))?;
        if Journal::exists(folder) {
            Journal::open(folder)?.recover(&it)?;
        }
        Ok((it, opened))
    }

    /// Opens what nobody else has open.
    pub(crate) fn open_locked(
        folder: &Path,
        data: &Path,
        lock: Option<FolderLock>,
    ) -> Result<(Self, Opened), VolumeError> {
        let description = SlottedFile::new(folder.join("meta"));
        let meta = Meta::load(&description, folder)?;
        let regions = (meta.size.0 / BLOCK).div_ceil(REGION);
        let open = |path: &Path, size: u64| -> Result<Box<dyn Medium>, VolumeError> {
            Ok(Box::new(Disk::open(path, size).map_err(io_error("open", path))?))
        };
        let media = Media {
            data: match crate::rados::open(folder)? {
                Some(objects) => objects,
                // Made before the table: where only that is there a removal has broken off, and what it says is here is not.
                None if data.symlink_metadata().is_err() && folder.join("stamps").exists() => {
                    return Err(VolumeError::Damaged { path: data.to_owned(), why: "it is missing".into() });
                }
                None => {
                    refuse_short(folder, data, meta.size)?;
                    crate::device::open(data, meta.size.0)?
                }
            },
            stamps: open(&folder.join("stamps"), regions * REGION * 8)?,
            hot: open(&folder.join("hot"), regions)?,
            words: open(&folder.join("words"), regions * REGION * 8)?,
            power: power(),
            description: Box::new(description),
            region: REGION,
        };
        Self::assemble(folder, meta, media, lock, Guards::ALL)
    }

    /// Opens a replica on media of the caller's, which nobody else uses. A new epoch begins. `name` is for errors.
    ///
    /// # Errors
    /// When it is damaged, or a medium fails.
    pub fn open_on(name: &Path, media: Media) -> Result<(Self, Opened), VolumeError> {
        let meta = Meta::load(&*media.description, name)?;
        Self::assemble(name, meta, media, None, Guards::ALL)
    }

    #[cfg(feature = "sabotage")]
    #[doc(hidden)]
    pub fn open_on_with(name: &Path, media: Media, guards: Guards) -> Result<(Self, Opened), VolumeError> {
        let meta = Meta::load(&*media.description, name)?;
        Self::assemble(name, meta, media, None, guards)
    }

    pub(crate) fn assemble(
        folder: &Path,
        meta: Meta,
        media: Media,
        lock: Option<FolderLock>,
        guards: Guards,
    ) -> Result<(Self, Opened), VolumeError> {
        let media = Synced::all(media);
        let mut opened = Opened { clean: meta.clean, doubted: 0 };
        let blocks = meta.size.0 / BLOCK;
        let mut inner = Inner {
            meta,
            stamps: Stamps::new(media.stamps, blocks, media.region),
            shadow: Shadow::new(media.words, blocks, media.region),
            hot: media.hot,
            regions: PerRegion::default(),
            ahead: 0,
            marked: false,
            frozen: true,
            closed: false,
            set_aside: 0,
            unstored: false,
            description: media.description,
            folder: folder.to_owned(),
            guards,
        };
        // Before the power that is on now is written down: a crash in between must not make words believed that its loss made doubtful.
        match &inner.meta.wants {
            Some(wants) if wants.complete => {
                let lost = inner.meta.power != media.power || media.power.is_empty();
                let doubt = lost && inner.guards.hold(Guard::DoubtedAbsent);
                inner.shadow.load(doubt, guards).map_err(io_error("read the words of", folder))?;
            }
            // Half of what is wanted is nothing.
            _ => inner.meta.wants = None,
        }
        inner.meta.power = media.power;
        inner.meta.epoch += 1;
        inner.meta.clean = false;
        inner.store_meta()?;
        let size = inner.meta.size;
        let it = Self {
            folder: folder.to_owned(),
            data: media.data.into(),
            size,
            partial: AtomicBool::new(inner.is_shadow()),
            counted: AtomicU64::new(UNKNOWN),
            inner: Mutex::new(inner),
            settling: Mutex::default(),
            _lock: lock,
            shared: None,
        };
        opened.doubted = it.recover().map_err(io_error("recover", folder))?;
        Ok((it, opened))
    }

    /// Doubts what was hot when the last process ended.
    fn recover(&self) -> io::Result<u64> {
        let mut inner = self.lock();
        let blocks = inner.meta.size.0 / BLOCK;
        let each = inner.stamps.region;
        let regions = blocks.div_ceil(each);
        let (mut at, mut hot) = (0, BTreeSet::new());
        for (length, hole) in inner.hot.extents(0, regions)? {
            if !hole {
                let mut bytes = vec![0; usize::try_from(length).unwrap_or(0)];
                inner.hot.read(at, &mut bytes)?;
                hot.extend((at..).zip(&bytes).filter(|(_, b)| **b != 0).map(|(region, _)| region));
            }
            at += length;
        }
        if !hot.is_empty() {
            // A process may have died between a mark and its sync. What is done here must not outlive the mark that it is done for.
            inner.hot.sync()?;
        }
        if inner.meta.redo && !inner.meta.primary {
            // Whatever was being written is in the journal, whole, and nothing else was touched: it is written again.
            hot.iter().for_each(|region| inner.regions.insert(*region, 0));
            return Ok(0);
        }
        #[cfg(test)]
        let silent = FORGETS_SILENTLY.get();
        #[cfg(not(test))]
        let silent = false;
        if !hot.is_empty() && !inner.meta.primary && inner.meta.complete.is_some() && !silent {
            // Before anything is forgotten: what is not all here must not be believed complete.
            inner.meta.complete = None;
            inner.store_meta().map_err(io::Error::other)?;
        }
        let now = inner.entry();
        let mut doubted = 0;
        for region in &hot {
            let range = region * each..((region + 1) * each).min(blocks);
            doubted += range.end - range.start;
            if inner.meta.primary {
                if inner.guards.hold(Guard::DoubtedRestamped) {
                    self.restamp(&mut inner, range, now)?;
                }
            } else if inner.guards.hold(Guard::DoubtedForgotten) {
                // What was never written reads as zeroes at every replica, so it must here.
                self.data.punch(range.start * BLOCK, (range.end - range.start) * BLOCK)?;
                inner.stamps.set(range, 0)?;
            }
        }
        if !hot.is_empty() {
            self.data.sync()?;
            inner.stamps.persist()?;
            inner.keep_here()?;
            for region in &hot {
                inner.hot.write(*region, &[0])?;
            }
            inner.hot.sync()?;
        }
        Ok(doubted)
    }

    /// New stamps for what is here. Of what is absent something may have come when all ended: it is nothing.
    fn restamp(&self, inner: &mut Inner, blocks: Range<u64>, now: u64) -> io::Result<()> {
        let shadow = inner.is_shadow();
        for block in blocks {
            if shadow && inner.shadow.is_absent(block)? {
                self.data.punch(block * BLOCK, BLOCK)?;
                inner.stamps.set(block..block + 1, 0)?;
            } else {
                inner.stamps.set(block..block + 1, now)?;
            }
        }
        Ok(())
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The lock, if nobody has it now.
    fn lock_now(&self) -> Option<MutexGuard<'_, Inner>> {
        match self.inner.try_lock() {
            Ok(inner) => Some(inner),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// While it is held nothing settles.
    pub(crate) fn settling(&self) -> MutexGuard<'_, ()> {
        self.settling.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What it is made of.
    pub(crate) fn into_parts(self) -> (Arc<dyn Medium>, Inner) {
        (self.data, self.inner.into_inner().unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn io(&self, what: &'static str) -> impl FnOnce(io::Error) -> VolumeError {
        io_error(what, &self.folder)
    }

    /// Its size.
    #[must_use]
    pub const fn size(&self) -> Bytes {
        self.size
    }

    /// Where it is.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Bytes that it takes up. Of a medium that knows no holes it is what was written: who asks first has the table read, a window at a time, and
    /// each write keeps the figure right from then on. Where somebody is writing the last one is near enough: nobody waits for that.
    #[must_use]
    pub fn allocated(&self) -> Bytes {
        if self.data.knows_holes() {
            return Bytes(self.data.allocated());
        }
        loop {
            let began = Instant::now();
            let mut inner = match (self.lock_now(), self.counted.load(Ordering::Relaxed)) {
                (Some(inner), _) => inner,
                (None, UNKNOWN) => self.lock(),
                (None, last) => return Bytes(last),
            };
            match inner.stamps.count_on(WINDOW) {
                Ok(Some(blocks)) => {
                    self.counted.store(blocks * BLOCK, Ordering::Relaxed);
                    return Bytes(blocks * BLOCK);
                }
                Ok(None) => {}
                Err(_) => return Bytes(0),
            }
            drop(inner);
            give_way(began);
        }
    }

    /// Begins to take writes of this owner, in a new epoch.
    ///
    /// # Errors
    /// When the medium fails; nothing has changed then.
    pub fn become_primary(&self, lineage: Lineage, generation: Generation) -> Result<(), VolumeError> {
        let mut inner = self.lock();
        if inner.closed || self.is_detached() {
            return Err(VolumeError::Frozen);
        }
        if inner.meta.redo {
            return Err(inner.journal_waits());
        }
        let index = inner.owner_index(lineage, generation)?;
        if inner.meta.primary && inner.meta.owner == index && !inner.frozen {
            return Ok(());
        }
        let before = inner.meta.clone();
        // Half of what is wanted is nothing; and what was wanted of an owner whose line ends with a claim is what nobody has any more.
        if !before.primary && before.wants.as_ref().is_some_and(|w| !w.complete || w.lineage != lineage) {
            inner.meta.wants = None;
        }
        if before.owner != index {
            let others = || (1..).zip(&before.owners).filter(|(i, _)| *i != index).map(|(_, (known, _))| *known);
            let claim = others().next().is_some() && others().all(|known| known < lineage);
            inner.meta.unsure = match (claim, before.primary) {
                // A hand-off ends with both sides alike.
                (false, _) => SURE,
                (true, true) => before.unsure,
                // Taken in the middle of a mirror, perhaps: whatever was passed on to us, our stamps are not its.
                (true, false) if inner.guards.hold(Guard::ClaimRestamps) => 0,
                (true, false) => SURE,
            };
        }
        inner.meta.primary = true;
        inner.meta.gaps = false;
        inner.meta.complete = None;
        inner.meta.owner = index;
        inner.meta.epoch += 1;
        // Before anybody can hear that the volume is here.
        self.note_partial(&inner);
        if let Err(error) = inner.store_meta() {
            inner.meta = before;
            self.note_partial(&inner);
            return Err(error);
        }
        inner.frozen = false;
        Ok(())
    }

    /// Takes writes again as the owner that it has: for tools, which serve a volume without the host's records.
    ///
    /// # Errors
    /// [`VolumeError::Frozen`] where it is a secondary, or nobody's; when the medium fails.
    pub fn resume(&self) -> Result<(), VolumeError> {
        let owner = {
            let inner = self.lock();
            let index = (inner.meta.owner as usize).checked_sub(1).filter(|_| inner.meta.primary);
            index.and_then(|index| inner.meta.owners.get(index).copied())
        };
        let (lineage, generation) = owner.ok_or(VolumeError::Frozen)?;
        self.become_primary(lineage, generation)
    }

    /// Stamps whatever is not a hole, and what had a stamp, as written now: somebody else may have written it. Durable when it
    /// returns.
    ///
    /// # Errors
    /// When the medium fails, or this takes no writes.
    pub fn restamp_all(&self) -> Result<(), VolumeError> {
        // Of a device that somebody else may have written, all is data.
        let extents = self.data.extents(0, self.size.0).map_err(self.io("map"))?;
        let mut inner = self.lock();
        if inner.frozen {
            return Err(VolumeError::Frozen);
        }
        inner.refuse_shadow()?;
        let now = inner.entry();
        let io = || {
            inner.stamps.replace(1, now)?;
            let mut at = 0;
            for (length, hole) in extents {
                if !hole {
                    inner.stamps.set(touched(at, length), now)?;
                }
                at += length;
            }
            Ok(())
        };
        io().map_err(self.io("stamp"))?;
        self.sync_data().and_then(|()| inner.stamps.persist()).map_err(self.io("write the stamps of"))
    }

    /// Takes another replica's writes from now on, and no guest's.
    ///
    /// # Errors
    /// When the medium fails.
    pub fn become_secondary(&self) -> Result<(), VolumeError> {
        let mut inner = self.lock();
        inner.frozen = true;
        // First, while it is a primary's: what is hot must be restamped after a crash, not forgotten.
        self.vouch(&mut inner)?;
        inner.meta.gaps |= inner.lacks_some();
        inner.meta.primary = false;
        // What is here is what the stamps say. What is absent here is the next owner's to fetch.
        inner.meta.wants = None;
        inner.store_meta()?;
        self.note_partial(&inner);
        Ok(())
    }

    /// Refuses the guest's writes from now on. Those before have been done.
    pub fn freeze(&self) {
        self.lock().frozen = true;
    }

    /// Whether a guest's writes are refused now.
    #[must_use]
    pub fn is_frozen(&self) -> bool {
        self.lock().frozen
    }

    /// Takes the guest's writes again after [`Replica::freeze`], where it is the primary.
    pub fn thaw(&self) {
        let mut inner = self.lock();
        inner.frozen = inner.closed || !inner.meta.primary;
    }

    /// Begins a new epoch.
    ///
    /// # Errors
    /// When the medium fails.
    pub fn roll(&self) -> Result<(), VolumeError> {
        self.lock().begin_epoch(0)
    }

    /// Ends the epoch of writes now and begins another, which no later process will: the last stamp of the one that has ended. Not while a
    /// write is under way. Whoever calls holds up the guest, so this waits for the disk only once in many epochs.
    ///
    /// # Errors
    /// When the medium fails, or this is no primary: the epoch goes on then.
    pub fn end_epoch(&self) -> Result<Stamp, VolumeError> {
        let mut inner = self.lock();
        if !inner.meta.primary {
            return Err(VolumeError::Frozen);
        }
        let ended = inner.stamp_of(inner.entry()).ok_or(VolumeError::Frozen)?;
        #[cfg(test)]
        let forgets = ROLLS_FORGETFULLY.get();
        #[cfg(not(test))]
        let forgets = false;
        if forgets || inner.meta.epoch < inner.set_aside {
            inner.meta.epoch += 1;
        } else {
            inner.begin_epoch(EPOCHS_AHEAD - 1)?;
        }
        Ok(ended)
    }

    /// The last epoch that this secondary holds.
    #[must_use]
    pub fn complete(&self) -> Option<Complete> {
        self.lock().meta.complete
    }

    /// Says, durably, which epoch this secondary holds. Everything of it is durable before ([`Replica::commit`]).
    ///
    /// # Errors
    /// When the medium fails, or this is a primary.
    pub fn set_complete(&self, complete: Option<Complete>) -> Result<(), VolumeError> {
        let mut inner = self.lock();
        if inner.meta.primary {
            return Err(VolumeError::Frozen);
        }
        // Who holds an epoch lacks nothing.
        let gaps = inner.meta.gaps && complete.is_none();
        if inner.meta.complete == complete && inner.meta.gaps == gaps && !inner.meta.redo && !inner.unstored {
            return Ok(());
        }
        let before = (inner.meta.complete, inner.meta.gaps, inner.meta.redo);
        (inner.meta.complete, inner.meta.gaps, inner.meta.redo) = (complete, gaps, false);
        let stored = inner.store_meta();
        inner.unstored = stored.is_err();
        if inner.unstored {
            // Nobody knows which of the two is stored: what says less of what may be done with the blocks is believed, until a store succeeds.
            inner.meta.complete = complete.or(before.0);
            (inner.meta.gaps, inner.meta.redo) = (before.1, before.2);
        }
        stored
    }

    /// Blocks of a journal are about to be written in their places: durable when it returns.
    pub(crate) fn begin_redo(&self) -> Result<(), VolumeError> {
        let mut inner = self.lock();
        if inner.meta.primary {
            return Err(VolumeError::Frozen);
        }
        // What else is hot would not be doubted after a crash.
        self.vouch(&mut inner)?;
        inner.meta.redo = true;
        inner.store_meta()
    }

    /// Whether an image's next epoch is being written in its place: what a crash, or a full disk, interrupted there is done again first.
    #[must_use]
    pub fn redoes(&self) -> bool {
        self.lock().meta.redo
    }

    /// Whether this replica is the volume's, or was the last to be.
    #[must_use]
    pub fn is_primary(&self) -> bool {
        self.lock().meta.primary
    }

    pub(crate) fn inside(&self, offset: u64, length: u64) -> Result<(), VolumeError> {
        if offset.checked_add(length).is_some_and(|end| end <= self.size.0) {
            return Ok(());
        }
        Err(VolumeError::Range(format!("{length} bytes at {offset} are not within {} bytes", self.size.0)))
    }

    /// Whether some of it may be absent, so that whoever reads has to look under the lock. It is asked before every read, and takes no lock.
    ///
    /// "Perhaps" may be said of a whole volume, "no" never of one that is not: this becomes true before
    /// [`Replica::become_primary`] makes the volume this replica's, and false after the last block has come and the
    /// words are gone, or the volume is another's. Who reads because the volume was granted heard of it after that
    /// store, and sees it; who sees that it is over sees (by release and acquire) what had come before. A read that
    /// began earlier reads what a secondary holds, as ever.
    pub(crate) fn is_partial(&self) -> bool {
        self.partial.load(Ordering::Acquire)
    }

    /// Says what [`Replica::is_partial`] answers from now on. With the lock held.
    pub(crate) fn note_partial(&self, inner: &Inner) {
        self.partial.store(inner.is_shadow(), Ordering::Release);
    }

    /// Whether something of these blocks is absent, or somebody is writing and nobody can say now.
    fn may_be_absent(&self, blocks: Range<u64>) -> bool {
        if !self.is_partial() {
            return false;
        }
        let Some(mut inner) = self.lock_now() else { return true };
        // Words that are not 0 are in memory: this waits for no disk. An error comes again where it can be told.
        inner.guards.hold(Guard::AbsentNotRead) && inner.refuse_absent(blocks).is_err()
    }

    /// Reads bytes.
    ///
    /// # Errors
    /// When they lie outside, are not here yet, or the medium fails.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), VolumeError> {
        self.inside(offset, into.len() as u64)?;
        if self.reads_blank()? {
            into.fill(0);
            return Ok(());
        }
        if self.is_partial() {
            let mut inner = self.lock();
            if inner.guards.hold(Guard::AbsentNotRead) {
                // What is here stays here: no need to hold the lock for longer.
                inner.refuse_absent(touched(offset, into.len() as u64))?;
            }
        }
        self.data.read(offset, into).map_err(self.io("read"))
    }

    /// Reads what needs no waiting for the disk, and without waiting for a write: how many bytes of `into` were filled, from
    /// its beginning. After 0 (or too little), [`Replica::read`] says more.
    pub fn read_now(&self, offset: u64, into: &mut [u8]) -> usize {
        if self.inside(offset, into.len() as u64).is_err() || self.may_be_absent(touched(offset, into.len() as u64)) {
            return 0;
        }
        self.data.read_now(offset, into)
    }

    /// The file in which these bytes lie, at the same offset, if they are all here: for whoever can send from one without a copy.
    pub fn file_of(&self, offset: u64, length: u64) -> Option<BorrowedFd<'_>> {
        if self.inside(offset, length).is_err() || self.may_be_absent(touched(offset, length)) {
            return None;
        }
        self.data.file()
    }

    /// The file in which its contents lie, each byte at its own offset, if there is one: for [`Replica::write_by`].
    pub fn file(&self) -> Option<BorrowedFd<'_>> {
        self.data.file()
    }

    /// Waits until [`Replica::read_now`] has a chance.
    pub fn warm(&self, offset: u64, length: u64) {
        self.data.warm(offset, length);
    }

    /// Data and holes of a range: (length, whether it is a hole), in order.
    ///
    /// # Errors
    /// When it lies outside, or the medium fails.
    pub fn extents(&self, offset: u64, length: u64) -> Result<Vec<(u64, bool)>, VolumeError> {
        self.inside(offset, length)?;
        if self.reads_blank()? {
            return Ok(vec![(length, true)]);
        }
        if !self.is_partial() {
            return self.mapped(offset, length, None);
        }
        let mut inner = self.lock();
        if !inner.is_shadow() {
            drop(inner);
            return self.mapped(offset, length, None);
        }
        // What is absent is no hole, whatever lies here. Under the lock: what comes in between must not be taken for what lay here.
        let found = self.mapped(offset, length, Some(&mut inner))?;
        let mut split: Vec<(u64, bool)> = vec![];
        let mut put = |length: u64, hole: bool| match split.last_mut() {
            _ if length == 0 => {}
            Some((known, kind)) if *kind == hole => *known += length,
            _ => split.push((length, hole)),
        };
        let mut at = offset;
        for (length, hole) in found {
            let end = at + length;
            if hole {
                for run in inner.shadow.absent_in(touched(at, length)).map_err(self.io("read the words of"))? {
                    let (first, last) = ((run.start * BLOCK).max(at), (run.end * BLOCK).min(end));
                    put(first - at, true);
                    put(last - first, false);
                    at = last;
                }
            }
            put(end - at, hole);
            at = end;
        }
        Ok(split)
    }

    /// Data and holes as the medium has them; where it knows none, what was never written is one.
    fn mapped(
        &self,
        offset: u64,
        length: u64,
        inner: Option<&mut MutexGuard<'_, Inner>>,
    ) -> Result<Vec<(u64, bool)>, VolumeError> {
        if self.data.knows_holes() {
            return self.data.extents(offset, length).map_err(self.io("map"));
        }
        let blocks = touched(offset, length);
        let written = match inner {
            Some(inner) => inner.stamps.written(blocks),
            None => self.lock().stamps.written(blocks),
        };
        let (mut at, mut found) = (offset, vec![]);
        let mut put = |until: u64, hole: bool| {
            if until > at {
                found.push((until - at, hole));
                at = until;
            }
        };
        for run in written.map_err(self.io("read the stamps of"))? {
            put((run.start * BLOCK).max(offset), true);
            put((run.end * BLOCK).min(offset + length), false);
        }
        put(offset + length, true);
        Ok(found)
    }

    /// A guest's write.
    ///
    /// # Errors
    /// When it lies outside, the volume is frozen, a block of which it is a part is not here yet, or the medium fails; parts may
    /// be written then.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<Written, VolumeError> {
        // Whole blocks of zeroes stay holes.
        let aligned = offset.is_multiple_of(BLOCK) && (bytes.len() as u64).is_multiple_of(BLOCK);
        self.change(offset, bytes.len() as u64, "write", || {
            if aligned && is_zero(bytes) {
                self.data.punch(offset, bytes.len() as u64)
            } else {
                self.data.write(offset, bytes)
            }
        })
    }

    /// A guest's write whose contents `put` brings to [`Replica::file`], at the same offset, without a look at them here: zeroes become no
    /// holes.
    ///
    /// # Errors
    /// As [`Replica::write`], and `put` was not called then; or it failed.
    pub fn write_by(
        &self,
        offset: u64,
        length: u64,
        put: impl FnOnce() -> io::Result<()>,
    ) -> Result<Written, VolumeError> {
        self.change(offset, length, "write", put)
    }

    /// A guest's zeroes, or a trim: reads as zeroes afterwards.
    ///
    /// # Errors
    /// As [`Replica::write`].
    pub fn zero(&self, offset: u64, length: u64) -> Result<Written, VolumeError> {
        self.change(offset, length, "zero", || self.data.punch(offset, length))
    }

    /// What a guest does to its disk, which is noted.
    fn change(
        &self,
        offset: u64,
        length: u64,
        what: &'static str,
        make: impl FnOnce() -> io::Result<()>,
    ) -> Result<Written, VolumeError> {
        let mut inner = self.lock();
        let blocks = self.admit(&mut inner, offset, length)?;
        let now = inner.entry();
        if !inner.lacks_some() {
            // All are here, and whatever becomes of this they are not what bore the stamps of before: nobody sees one without the other, and the
            // processor fetches the table's memory, which is seldom in its caches, while the medium is at work.
            inner.stamps.set(blocks.clone(), now).and_then(|()| make()).map_err(self.io(what))?;
            return Ok(Written { blocks });
        }
        let done = make();
        let noted = match &done {
            Ok(()) => {
                // Whatever becomes of the words: what is here now is what has this stamp.
                let came = inner.came(blocks.clone());
                came.and(inner.stamps.set(blocks.clone(), now))
            }
            // Some of it may be stored: it is not what bore the stamps of before. What is absent stays as it is elsewhere.
            Err(_) => inner.stamp_present(blocks.clone(), now).map(drop),
        };
        done.and(noted).map_err(self.io(what))?;
        Ok(Written { blocks })
    }

    fn admit(&self, inner: &mut Inner, offset: u64, length: u64) -> Result<Range<u64>, VolumeError> {
        if inner.frozen && inner.guards.hold(Guard::FrozenRefuses) {
            return Err(VolumeError::Frozen);
        }
        self.inside(offset, length)?;
        inner.refuse_edges(offset, length)?;
        let blocks = touched(offset, length);
        let ahead = 1 << inner.ahead;
        if inner.heat(blocks.clone(), ahead).map_err(self.io("mark a region of"))? {
            inner.marked = true;
            inner.ahead = MOST_AHEAD.min(inner.ahead + 1);
        }
        Ok(blocks)
    }

    /// Another replica's blocks, here as a secondary. The primary decides which: what is here may bear a later stamp and be
    /// worth less, after a hand-off that was taken back.
    ///
    /// # Errors
    /// When they lie outside, this is a primary, or the medium fails.
    pub fn apply(&self, first: u64, stamp: Stamp, contents: Contents<'_>) -> Result<(), VolumeError> {
        let mut inner = self.lock();
        if inner.meta.primary {
            return Err(VolumeError::Frozen);
        }
        let count = contents.blocks()?;
        let bytes = count.checked_mul(BLOCK).zip(first.checked_mul(BLOCK));
        let Some((length, offset)) = bytes else {
            return Err(VolumeError::Range(format!("{count} blocks from {first} are too many")));
        };
        self.inside(offset, length)?;
        let index = inner.owner_index(stamp.lineage, stamp.generation)?;
        let blocks = first..first + count;
        let newest = entry(index, stamp.epoch.0);
        let mut io = || {
            inner.heat(blocks.clone(), 1)?;
            let done = match contents {
                Contents::Zeroes(_) => self.data.punch(offset, length),
                Contents::Data(data) => self.data.write(offset, data),
            };
            let entry = match &done {
                Ok(()) => newest,
                // What is here of it is neither what was before nor what was to come: it is forgotten, as after a crash.
                Err(_) if self.data.punch(offset, length).is_ok() => 0,
                // As in `forget`; here what was never written may hold something, too.
                Err(_) => nobodys(newest),
            };
            let noted = inner.stamps.set(blocks.clone(), entry);
            done.and(noted)
        };
        io().map_err(self.io("write"))
    }

    /// Blocks that another replica never wrote: they become unwritten here, too.
    ///
    /// # Errors
    /// As [`Replica::apply`].
    pub fn forget(&self, blocks: Range<u64>) -> Result<(), VolumeError> {
        let mut inner = self.lock();
        if inner.meta.primary {
            return Err(VolumeError::Frozen);
        }
        let length = (blocks.end.saturating_sub(blocks.start)).saturating_mul(BLOCK);
        self.inside(blocks.start.saturating_mul(BLOCK), length)?;
        let mut io = || {
            inner.heat(blocks.clone(), 1)?;
            let done = self.data.punch(blocks.start * BLOCK, length);
            // Zeroed in part, or not at all, it is neither what it was nor unwritten: as unwritten it would be alike to a source that never
            // wrote it, and what a lost timeline left would stay. With a stamp that nobody has it differs from every source, and comes again.
            // That holds when the region has cooled, too. Where it is hot when all ends, the next start punches before it forgets, or fails.
            let noted = match &done {
                Ok(()) => inner.stamps.set(blocks.clone(), 0),
                Err(_) => inner.stamps.doubt(blocks.clone()),
            };
            done.and(noted)
        };
        io().map_err(self.io("zero"))
    }

    /// The stamp of a block; none if it was never written.
    ///
    /// # Errors
    /// When the medium fails.
    pub fn stamp(&self, block: u64) -> Result<Option<Stamp>, VolumeError> {
        let mut inner = self.lock();
        let entry = inner.stamps.get(block).map_err(self.io("read the stamps of"))?;
        Ok(inner.stamp_of(entry))
    }

    /// Makes the blocks' contents durable. After a sync that has failed nothing counts as durable before the replica is opened again, and
    /// what is hot is doubted ([`Synced`]).
    pub(crate) fn sync_data(&self) -> io::Result<()> {
        self.data.sync()
    }

    /// What was answered so far survives a loss of power.
    ///
    /// # Errors
    /// When the medium fails.
    pub fn flush(&self) -> Result<(), VolumeError> {
        if !self.is_partial() {
            return self.sync_data().map_err(self.io("sync"));
        }
        let inner = self.lock();
        if !inner.is_shadow() || !inner.shadow.has_fresh() || !inner.guards.hold(Guard::FlushKeepsPresent) {
            drop(inner);
            return self.sync_data().map_err(self.io("sync"));
        }
        let here = inner.shadow.taken();
        drop(inner);
        self.sync_data().map_err(self.io("sync"))?;
        // What somebody else has kept meanwhile is durable: it leaves the set only then.
        self.lock().shadow.keep(&here).map_err(self.io("sync"))
    }

    /// Makes regions cold that were not written since the last call.
    ///
    /// # Errors
    /// When the medium fails.
    pub fn settle(&self) -> Result<(), VolumeError> {
        self.settle_after(1)
    }

    /// Makes regions cold that were not written for `lingering` calls, or are too many ([`LINGERING`]); to be called every few
    /// seconds. What a secondary or a shadow volume has is settled with each call: others wait to hear that it is durable.
    ///
    /// # Errors
    /// When the medium fails.
    pub fn settle_after(&self, lingering: u32) -> Result<(), VolumeError> {
        let _one = self.settling();
        let (mut idle, here, stamps, guards) = {
            let mut inner = self.lock();
            inner.regions.values_mut().for_each(|ago| *ago = ago.saturating_add(1));
            let idle = inner.idle(lingering);
            if !std::mem::take(&mut inner.marked) {
                inner.ahead = inner.ahead.saturating_sub(1);
            }
            // Of a shadow volume: whose contents the sync below makes durable. What comes later is not meant.
            let here = inner.shadow.taken();
            (idle, here, inner.stamps.medium(), inner.guards)
        };
        if idle.is_empty() {
            return Ok(());
        }
        // What takes long is done while the guest writes on. What it writes to meanwhile stays hot: nobody knows whether the
        // sync was before or after.
        if guards.hold(Guard::DataBeforeStamps) {
            self.sync_data().map_err(self.io("sync"))?;
        }
        {
            let inner = self.lock();
            idle.retain(|r| inner.is_idle(*r));
            inner.stamps.write(&idle).map_err(self.io("settle"))?;
        }
        stamps.sync().map_err(self.io("settle"))?;
        let mut inner = self.lock();
        // Before any region is cold: what is here in one that is stays for good. What came to an idle region since the look at
        // them has made it hot, as any write does.
        inner.shadow.keep(&here).map_err(self.io("settle"))?;
        for region in idle {
            if inner.is_idle(region) {
                // A region that a loss of power leaves hot costs a restamping, no more: no need to wait for this.
                inner.hot.write(region, &[0]).map_err(self.io("settle"))?;
                inner.regions.remove(region);
                inner.stamps.is_durable(region);
            }
        }
        Ok(())
    }

    /// Makes everything durable, stamps included: what a secondary does before it says that it has all.
    ///
    /// # Errors
    /// When the medium fails.
    pub fn commit(&self) -> Result<(), VolumeError> {
        self.vouch(&mut self.lock())
    }

    /// Settles everything, and the marks' removal too: or a loss of power would bring them back, and a secondary forget what it
    /// holds.
    pub(crate) fn vouch(&self, inner: &mut Inner) -> Result<(), VolumeError> {
        self.settle_all(inner)?;
        self.sync_marks(inner)
    }

    fn sync_marks(&self, inner: &Inner) -> Result<(), VolumeError> {
        if inner.guards.hold(Guard::VouchedSyncsMarks) { inner.hot.sync().map_err(self.io("settle")) } else { Ok(()) }
    }

    fn settle_all(&self, inner: &mut Inner) -> Result<(), VolumeError> {
        let all: Vec<u64> = inner.regions.iter().map(|(region, _)| region).collect();
        self.cool(inner, &all)
    }

    fn cool(&self, inner: &mut Inner, regions: &[u64]) -> Result<(), VolumeError> {
        let mut io = || {
            if inner.guards.hold(Guard::DataBeforeStamps) {
                self.sync_data()?;
            }
            inner.stamps.persist()?;
            inner.keep_here()?;
            for region in regions {
                inner.hot.write(*region, &[0])?;
                // One by one: what is written to a region without a mark is not doubted after a crash.
                inner.regions.remove(*region);
            }
            // A region that a loss of power leaves hot costs a restamping, no more: no need to wait for this.
            Ok(())
        };
        io().map_err(self.io("settle"))
    }

    /// Closes it properly.
    ///
    /// # Errors
    /// When the medium fails; it is found unclean then.
    pub fn close(self) -> Result<(), VolumeError> {
        self.end()
    }

    /// Closes it properly, though others may hold it still: a guest's writes are refused from now on as while it is frozen, and all others fail.
    ///
    /// # Errors
    /// When the medium fails, or a write has ended in a bug; it is found unclean then. Writes are refused all the same.
    pub fn end(&self) -> Result<(), VolumeError> {
        {
            // First, and for good: what follows may take long, or fail.
            let mut inner = self.lock();
            inner.freeze();
            inner.closed = true;
        }
        // Nothing is attached meanwhile, nor let go of.
        let _one = self.settling();
        match self.inner.lock() {
            Ok(mut inner) => inner.close(self),
            // Its region is hot, and is to be doubted.
            Err(_) => Err(self.io("close")(io::Error::other("a write may have ended in the middle, by a bug"))),
        }
    }
}

/// What blocks hold.
#[derive(Clone, Copy, Debug)]
pub enum Contents<'a> {
    /// Whole blocks.
    Data(&'a [u8]),
    /// So many blocks of zeroes.
    Zeroes(u64),
}

impl Contents<'_> {
    /// How many blocks.
    pub(crate) fn blocks(&self) -> Result<u64, VolumeError> {
        match self {
            Self::Zeroes(count) => Ok(*count),
            Self::Data(data) if (data.len() as u64).is_multiple_of(BLOCK) => Ok(data.len() as u64 / BLOCK),
            Self::Data(data) => Err(VolumeError::Range(format!("{} bytes are not whole blocks", data.len()))),
        }
    }
}

impl Inner {
    pub(crate) const fn is_frozen(&self) -> bool {
        self.frozen
    }

    pub(crate) const fn freeze(&mut self) {
        self.frozen = true;
    }

    /// Describes it as closed, with the lock held; nobody writes any more. Where that fails it takes no guest's writes.
    pub(crate) fn close(&mut self, of: &Replica) -> Result<(), VolumeError> {
        self.freeze();
        // What is cold is on the disk, data and stamps: many disks that rest do not have to wait for it.
        if !self.regions.is_empty() || self.shadow.has_fresh() || self.stamps.has_dirty() {
            of.settle_all(self)?;
        }
        of.sync_marks(self)?;
        self.meta.clean = true;
        let stored = self.store_meta();
        // Or whatever is stored next would say so.
        self.meta.clean = stored.is_ok();
        stored
    }

    /// The stamps of a secondary say nothing before its journal is in its place.
    pub(crate) fn journal_waits(&self) -> VolumeError {
        VolumeError::Damaged { path: self.folder.clone(), why: "its journal has not been written in its place".into() }
    }

    /// The entry of a write now.
    pub(crate) const fn entry(&self) -> u64 {
        entry(self.meta.owner, self.meta.epoch)
    }

    pub(crate) fn stamp_of(&self, entry: u64) -> Option<Stamp> {
        let index = usize::try_from(entry >> 32).ok()?.checked_sub(1)?;
        let (lineage, generation) = *self.meta.owners.get(index)?;
        Some(Stamp { lineage, generation, epoch: Epoch((entry & 0xffff_ffff) as u32) })
    }

    /// The index of an owner, from 1. A new one is durable before it is used.
    pub(crate) fn owner_index(&mut self, lineage: Lineage, generation: Generation) -> Result<u32, VolumeError> {
        let owner = (lineage, generation);
        let known = self.meta.owners.iter().rposition(|o| *o == owner);
        let index = match known {
            Some(index) => index,
            None if self.meta.owners.len() >= MOST_OWNERS => {
                return Err(VolumeError::Range(format!("the volume has had more than {MOST_OWNERS} owners")));
            }
            None => {
                self.meta.owners.push(owner);
                if let Err(error) = self.store_meta() {
                    self.meta.owners.pop();
                    return Err(error);
                }
                self.meta.owners.len() - 1
            }
        };
        Ok(u32::try_from(index + 1).unwrap_or(u32::MAX))
    }

    /// Begins an epoch that no process has begun, durably, and sets aside so many more. Where that fails the one of now goes on.
    pub(crate) fn begin_epoch(&mut self, ahead: u32) -> Result<(), VolumeError> {
        let before = (self.meta.epoch, self.set_aside);
        self.meta.epoch += 1;
        self.set_aside = self.set_aside.max(self.meta.epoch + ahead);
        let stored = self.store_meta();
        if stored.is_err() {
            (self.meta.epoch, self.set_aside) = before;
        }
        stored
    }

    pub(crate) fn store_meta(&self) -> Result<(), VolumeError> {
        let epoch = self.meta.epoch.max(self.set_aside);
        Meta { epoch, ..self.meta.clone() }.store(&*self.description, &self.folder)
    }

    pub(crate) fn io(&self, what: &'static str) -> impl FnOnce(io::Error) -> VolumeError {
        io_error(what, &self.folder)
    }

    /// Stamps those of these blocks that are here: what is absent is not this replica's to restamp. Whether any is.
    pub(crate) fn stamp_present(&mut self, blocks: Range<u64>, entry: u64) -> io::Result<bool> {
        if !self.is_shadow() {
            return self.stamps.set(blocks, entry).map(|()| true);
        }
        let mut any = false;
        for block in blocks {
            if !self.shadow.is_absent(block)? {
                self.stamps.set(block..block + 1, entry)?;
                any = true;
            }
        }
        Ok(any)
    }

    /// The guest has written these blocks, whole or in the part that was not here.
    fn came(&mut self, blocks: Range<u64>) -> io::Result<()> {
        if self.lacks_some() { self.shadow.came(blocks, self.guards) } else { Ok(()) }
    }

    /// The contents of all that is here are durable.
    fn keep_here(&mut self) -> io::Result<()> {
        let here = self.shadow.taken();
        self.shadow.keep(&here)
    }

    /// What a settling is to cool. It has counted itself, so that a region that was written since the one before has 1.
    fn idle(&self, lingering: u32) -> Vec<u64> {
        let lingering = if self.meta.primary && !self.is_shadow() { lingering.max(1) } else { 1 };
        let mut all: Vec<(u32, u64)> =
            self.regions.iter().map(|(r, ago)| (*ago, r)).filter(|(ago, _)| *ago > 1).collect();
        // Those that were idle for longest first.
        all.sort_unstable_by(|a, b| b.cmp(a));
        let many = all.len().saturating_sub(MOST_LINGERING);
        let long = all.partition_point(|(ago, _)| *ago > lingering);
        all.truncate(many.max(long));
        all.into_iter().map(|(_, region)| region).collect()
    }

    /// Whether a region is not hot: what its blocks and its stamps are is on the disk.
    pub(crate) fn is_cold(&self, region: u64) -> bool {
        !self.regions.contains(region)
    }

    /// Whether a hot region was not written since the last settling began.
    fn is_idle(&self, region: u64) -> bool {
        self.regions.get(region).is_some_and(|ago| *ago > 0)
    }

    /// Marks regions hot, durably, before their first write; with each that was not, its neighbours in a group of `ahead`: a
    /// guest that writes here and there would wait for the disk at each new place. A few marks too many cost, after a crash, blocks that
    /// travel without need. Whether any was cold.
    pub(crate) fn heat(&mut self, blocks: Range<u64>, ahead: u64) -> io::Result<bool> {
        if self.closed {
            return Err(io::Error::other("it was closed for the end of this process"));
        }
        if blocks.is_empty() {
            return Ok(false);
        }
        let each = self.stamps.region;
        let mut cold = false;
        for region in blocks.start / each..(blocks.end - 1) / each + 1 {
            match self.regions.get_mut(region) {
                Some(ago) => *ago = 0,
                None => cold = true,
            }
        }
        if !cold {
            return Ok(false);
        }
        let touched = blocks.start / each..(blocks.end - 1) / each + 1;
        let last = (self.meta.size.0 / BLOCK).div_ceil(each);
        let group = touched.start / ahead * ahead..(touched.end.div_ceil(ahead) * ahead).min(last);
        let fresh: Vec<u64> = group.filter(|r| !self.regions.contains(*r)).collect();
        if self.guards.hold(Guard::HotBeforeWrite) {
            for region in &fresh {
                self.hot.write(*region, &[1])?;
            }
            self.hot.sync()?;
        }
        fresh.into_iter().for_each(|r| self.regions.insert(r, u32::from(!touched.contains(&r))));
        Ok(true)
    }
}

/// Refuses a file of blocks that was cut short since: what it held would read as zeroes. One in which nothing was ever written may be short: its
/// length is on the disk with the first sync, and stamps are after that.
fn refuse_short(folder: &Path, data: &Path, size: Bytes) -> Result<(), VolumeError> {
    use std::os::unix::fs::MetadataExt;
    let stamped = std::fs::metadata(folder.join("stamps")).is_ok_and(|stamps| stamps.blocks() > 0);
    match std::fs::metadata(data) {
        Ok(file) if file.is_file() && file.len() < size.0 && stamped => {
            let why = format!("it has {} bytes, and the volume {}", file.len(), size.0);
            Err(VolumeError::Damaged { path: data.to_owned(), why })
        }
        _ => Ok(()),
    }
}

/// Between two windows of a walk over the table. The lock is not fair: taken again at once it would pass by a guest's write that waits for it.
pub fn give_way(since: Instant) {
    if since.elapsed() >= TURN {
        std::thread::sleep(TURN);
    }
}

/// Whether all bytes are zero.
#[must_use]
pub fn is_zero(bytes: &[u8]) -> bool {
    // Whole words first: this compiles to vector code.
    let (chunks, rest) = bytes.as_chunks::<64>();
    chunks.iter().all(|c| c.iter().fold(0, |a, b| a | b) == 0) && rest.iter().all(|b| *b == 0)
}

#[cfg(test)]
#[path = "replica_tests.rs"]
mod tests;
