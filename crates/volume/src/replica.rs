//! One site's copy of a volume.
//!
//! The order of things in a write: the region is hot, durably; the data; the stamp, in memory. In [`Replica::settle`]: the data
//! is durable; the stamps are; the region is cold. So what a stamp on the disk says is true, or its region is hot.

use crate::blocks::{BLOCK, touched};
use crate::error::{VolumeError, io_error};
use crate::file::{Description, DescriptionFile, Disk, Media, Medium, power};
use crate::guards::{Guard, Guards};
use crate::meta::{MOST_OWNERS, Meta, SURE};
use crate::shadow::Shadow;
use crate::stamp::Stamp;
use crate::stamps::{REGION, Stamps, entry};
use godwit_units::{Bytes, Epoch, Generation, Lineage, VolumeId};
use rustix::fs::{FlockOperation, flock};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{DirBuilder, File, OpenOptions};
use std::ops::Range;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A replica. Reads run beside each other; what changes it is serialised, so that writes that overlap reach everything
/// in one order.
#[derive(Debug)]
pub struct Replica {
    folder: PathBuf,
    pub(crate) data: Box<dyn Medium>,
    inner: Mutex<Inner>,
    /// Held for as long as the replica is.
    _lock: Option<File>,
}

#[derive(Debug)]
pub(crate) struct Inner {
    pub meta: Meta,
    pub stamps: Stamps,
    /// What is not here yet.
    pub shadow: Shadow,
    hot: Box<dyn Medium>,
    /// Hot regions, and whether each was written since the last settling.
    regions: BTreeMap<u64, bool>,
    frozen: bool,
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

impl Replica {
    /// Makes a replica in a folder that does not exist yet. It holds zeroes, and belongs to nobody: a secondary.
    ///
    /// # Errors
    /// When the size is no multiple of 4 KiB or too large, or the medium fails.
    pub fn create(folder: &Path, volume: VolumeId, size: Bytes) -> Result<Self, VolumeError> {
        let meta = Meta::fresh(volume, size)?;
        DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(io_error("make", folder))?;
        // Last, because a folder with a description is a replica.
        meta.store(&DescriptionFile(folder.join("meta")), folder)?;
        Ok(Self::open(folder)?.0)
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
        let path = folder.join("lock");
        let lock = OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(&path);
        let lock = lock.map_err(io_error("open", &path))?;
        match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => return Err(VolumeError::Locked(folder.to_owned())),
            Err(e) => return Err(io_error("lock", &path)(e.into())),
        }
        let description = DescriptionFile(folder.join("meta"));
        let meta = Meta::load(&description, folder)?;
        let regions = (meta.size.0 / BLOCK).div_ceil(REGION);
        let open = |name: &str, size: u64| -> Result<Box<dyn Medium>, VolumeError> {
            let path = folder.join(name);
            Ok(Box::new(Disk::open(&path, size).map_err(io_error("open", &path))?))
        };
        let media = Media {
            data: open("data", meta.size.0)?,
            stamps: open("stamps", regions * REGION * 8)?,
            hot: open("hot", regions)?,
            words: open("words", regions * REGION * 8)?,
            power: power(),
            description: Box::new(description),
            region: REGION,
        };
        Self::assemble(folder, meta, media, Some(lock), Guards::ALL)
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

    fn assemble(
        folder: &Path,
        meta: Meta,
        media: Media,
        lock: Option<File>,
        guards: Guards,
    ) -> Result<(Self, Opened), VolumeError> {
        let mut opened = Opened { clean: meta.clean, doubted: 0 };
        let blocks = meta.size.0 / BLOCK;
        let mut inner = Inner {
            meta,
            stamps: Stamps::new(media.stamps, blocks, media.region),
            shadow: Shadow::new(media.words, blocks, media.region),
            hot: media.hot,
            regions: BTreeMap::new(),
            frozen: true,
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
        let it = Self { folder: folder.to_owned(), data: media.data, inner: Mutex::new(inner), _lock: lock };
        opened.doubted = it.recover().map_err(io_error("recover", folder))?;
        Ok((it, opened))
    }

    /// Doubts what was hot when the last process ended.
    fn recover(&self) -> std::io::Result<u64> {
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
    fn restamp(&self, inner: &mut Inner, blocks: Range<u64>, now: u64) -> std::io::Result<()> {
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

    pub(crate) fn io(&self, what: &'static str) -> impl FnOnce(std::io::Error) -> VolumeError {
        io_error(what, &self.folder)
    }

    /// Its size.
    #[must_use]
    pub fn size(&self) -> Bytes {
        self.lock().meta.size
    }

    /// Where it is.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Bytes that it takes up.
    #[must_use]
    pub fn allocated(&self) -> Bytes {
        Bytes(self.data.allocated())
    }

    /// Begins to take writes of this owner, in a new epoch.
    ///
    /// # Errors
    /// When the medium fails; nothing has changed then.
    pub fn become_primary(&self, lineage: Lineage, generation: Generation) -> Result<(), VolumeError> {
        let mut inner = self.lock();
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
        inner.meta.owner = index;
        inner.meta.epoch += 1;
        if let Err(error) = inner.store_meta() {
            inner.meta = before;
            return Err(error);
        }
        inner.frozen = false;
        Ok(())
    }

    /// Runs of written blocks with the same stamp, for a mirror from here: where the other side has the same stamp, it has the
    /// same contents. What an earlier mirror may have passed on, and the guest written again, gets a new stamp first.
    ///
    /// # Errors
    /// When the medium fails.
    pub(crate) fn runs_to_compare(&self) -> Result<Vec<(Range<u64>, Stamp)>, VolumeError> {
        let mut inner = self.lock();
        if inner.is_shadow() {
            return Err(VolumeError::Shadow(inner.shadow.absent()));
        }
        if inner.meta.primary && inner.guards.hold(Guard::ComparedWhenSure) {
            self.make_sure(&mut inner)?;
        }
        drop(inner);
        self.stamp_runs()
    }

    /// Whatever is interrupted here is begun again by the next mirror: until the last step all of it is unsure.
    pub(crate) fn make_sure(&self, inner: &mut Inner) -> Result<(), VolumeError> {
        // Durable before its first use, and never used before.
        inner.meta.epoch += 1;
        inner.store_meta()?;
        let (from, now) = (inner.meta.unsure, inner.entry());
        let doubted: Vec<_> = inner.stamps.runs().map_err(self.io("read the stamps of"))?;
        let doubted: Vec<_> = doubted.into_iter().filter(|(_, entry)| *entry >= from).collect();
        let any = !doubted.is_empty();
        let shadow = inner.is_shadow();
        for block in doubted.into_iter().flat_map(|(run, _)| run) {
            // What is absent is not this replica's to restamp.
            let io = match shadow && inner.shadow.is_absent(block).map_err(self.io("read the words of"))? {
                true => Ok(()),
                false => inner.stamps.set(block..block + 1, now),
            };
            io.map_err(self.io("read the stamps of"))?;
        }
        if any {
            inner.stamps.persist().map_err(self.io("write the stamps of"))?;
        }
        // What is written from here on may be passed on, and written again under the same stamp.
        inner.meta.epoch += 1;
        inner.meta.unsure = inner.entry();
        inner.store_meta()
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
        inner.meta.primary = false;
        // What is here is what the stamps say. What is absent here is the next owner's to fetch.
        inner.meta.wants = None;
        inner.store_meta()
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
        inner.frozen = !inner.meta.primary;
    }

    /// Begins a new epoch.
    ///
    /// # Errors
    /// When the medium fails.
    pub fn roll(&self) -> Result<(), VolumeError> {
        let mut inner = self.lock();
        inner.meta.epoch += 1;
        inner.store_meta()
    }

    pub(crate) fn inside(&self, inner: &Inner, offset: u64, length: u64) -> Result<(), VolumeError> {
        if offset.checked_add(length).is_some_and(|end| end <= inner.meta.size.0) {
            return Ok(());
        }
        Err(VolumeError::Range(format!("{length} bytes at {offset} are not within {} bytes", inner.meta.size.0)))
    }

    /// Reads bytes.
    ///
    /// # Errors
    /// When they lie outside, are not here yet, or the medium fails.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), VolumeError> {
        let mut inner = self.lock();
        self.inside(&inner, offset, into.len() as u64)?;
        if inner.guards.hold(Guard::AbsentNotRead) {
            // What is here stays here: no need to hold the lock for longer.
            inner.refuse_absent(touched(offset, into.len() as u64))?;
        }
        drop(inner);
        self.data.read(offset, into).map_err(self.io("read"))
    }

    /// Data and holes of a range: (length, whether it is a hole), in order.
    ///
    /// # Errors
    /// When it lies outside, or the medium fails.
    pub fn extents(&self, offset: u64, length: u64) -> Result<Vec<(u64, bool)>, VolumeError> {
        let mut inner = self.lock();
        self.inside(&inner, offset, length)?;
        if !inner.is_shadow() {
            drop(inner);
            return self.data.extents(offset, length).map_err(self.io("map"));
        }
        // What is absent is no hole, whatever lies here. Under the lock: what comes in between must not be taken for what lay here.
        let found = self.data.extents(offset, length).map_err(self.io("map"))?;
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

    /// A guest's write.
    ///
    /// # Errors
    /// When it lies outside, the volume is frozen, a block of which it is a part is not here yet, or the medium fails; parts may
    /// be written then.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<Written, VolumeError> {
        let mut inner = self.lock();
        let blocks = self.admit(&mut inner, offset, bytes.len() as u64)?;
        // Whole blocks of zeroes stay holes.
        let aligned = offset.is_multiple_of(BLOCK) && (bytes.len() as u64).is_multiple_of(BLOCK);
        let done = if aligned && is_zero(bytes) {
            self.data.punch(offset, bytes.len() as u64)
        } else {
            self.data.write(offset, bytes)
        };
        let now = inner.entry();
        done.and_then(|()| inner.came(blocks.clone()))
            .and_then(|()| inner.stamps.set(blocks.clone(), now))
            .map_err(self.io("write"))?;
        Ok(Written { blocks })
    }

    /// A guest's zeroes, or a trim: reads as zeroes afterwards.
    ///
    /// # Errors
    /// As [`Replica::write`].
    pub fn zero(&self, offset: u64, length: u64) -> Result<Written, VolumeError> {
        let mut inner = self.lock();
        let blocks = self.admit(&mut inner, offset, length)?;
        let now = inner.entry();
        self.data
            .punch(offset, length)
            .and_then(|()| inner.came(blocks.clone()))
            .and_then(|()| inner.stamps.set(blocks.clone(), now))
            .map_err(self.io("zero"))?;
        Ok(Written { blocks })
    }

    fn admit(&self, inner: &mut Inner, offset: u64, length: u64) -> Result<Range<u64>, VolumeError> {
        if inner.frozen && inner.guards.hold(Guard::FrozenRefuses) {
            return Err(VolumeError::Frozen);
        }
        self.inside(inner, offset, length)?;
        inner.refuse_edges(offset, length)?;
        let blocks = touched(offset, length);
        inner.heat(blocks.clone()).map_err(self.io("mark a region of"))?;
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
        self.inside(&inner, offset, length)?;
        let index = inner.owner_index(stamp.lineage, stamp.generation)?;
        let blocks = first..first + count;
        let newest = entry(index, stamp.epoch.0);
        let mut io = || {
            inner.heat(blocks.clone())?;
            match contents {
                Contents::Zeroes(_) => self.data.punch(offset, length)?,
                Contents::Data(data) => self.data.write(offset, data)?,
            }
            inner.stamps.set(blocks.clone(), newest)
        };
        io().map_err(self.io("write"))
    }

    /// Blocks that another replica never wrote: they become unwritten here, too.
    ///
    /// # Errors
    /// As [`Replica::apply`].
    pub fn forget(&self, blocks: Range<u64>) -> Result<(), VolumeError> {
        let mut inner = self.lock();
        let length = (blocks.end.saturating_sub(blocks.start)).saturating_mul(BLOCK);
        self.inside(&inner, blocks.start.saturating_mul(BLOCK), length)?;
        let mut io = || {
            inner.heat(blocks.clone())?;
            self.data.punch(blocks.start * BLOCK, length)?;
            inner.stamps.set(blocks.clone(), 0)
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

    /// Runs of written blocks with the same stamp, in order.
    ///
    /// # Errors
    /// When the medium fails.
    pub fn stamp_runs(&self) -> Result<Vec<(Range<u64>, Stamp)>, VolumeError> {
        let mut inner = self.lock();
        let runs = inner.stamps.runs().map_err(self.io("read the stamps of"))?;
        Ok(runs.into_iter().filter_map(|(run, entry)| inner.stamp_of(entry).map(|stamp| (run, stamp))).collect())
    }

    /// What was answered so far survives a loss of power.
    ///
    /// # Errors
    /// When the medium fails.
    pub fn flush(&self) -> Result<(), VolumeError> {
        let inner = self.lock();
        if !inner.is_shadow() || inner.shadow.here().is_empty() || !inner.guards.hold(Guard::FlushKeepsPresent) {
            drop(inner);
            return self.data.sync().map_err(self.io("sync"));
        }
        let here = inner.shadow.here().clone();
        drop(inner);
        self.data.sync().map_err(self.io("sync"))?;
        // What somebody else has kept meanwhile is durable: it leaves the set only then.
        self.lock().shadow.keep(&here).map_err(self.io("sync"))
    }

    /// Makes regions cold that were not written since the last call; to be called every few seconds.
    ///
    /// # Errors
    /// When the medium fails.
    pub fn settle(&self) -> Result<(), VolumeError> {
        // Most of the work, while the guest writes on; what is left under the lock is little.
        self.data.sync().map_err(self.io("sync"))?;
        let mut inner = self.lock();
        let idle: Vec<u64> = inner.regions.iter().filter(|(_, written)| !**written).map(|(r, _)| *r).collect();
        inner.regions.values_mut().for_each(|written| *written = false);
        if idle.is_empty() {
            return Ok(());
        }
        self.cool(&mut inner, &idle)
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
        if inner.guards.hold(Guard::VouchedSyncsMarks) { inner.hot.sync().map_err(self.io("settle")) } else { Ok(()) }
    }

    fn settle_all(&self, inner: &mut Inner) -> Result<(), VolumeError> {
        let all: Vec<u64> = inner.regions.keys().copied().collect();
        self.cool(inner, &all)
    }

    fn cool(&self, inner: &mut Inner, regions: &[u64]) -> Result<(), VolumeError> {
        let mut io = || {
            if inner.guards.hold(Guard::DataBeforeStamps) {
                self.data.sync()?;
            }
            inner.stamps.persist()?;
            inner.keep_here()?;
            for region in regions {
                inner.hot.write(*region, &[0])?;
            }
            // A region that a loss of power leaves hot costs a restamping, no more: no need to wait for this.
            Ok(())
        };
        io().map_err(self.io("settle"))?;
        for region in regions {
            inner.regions.remove(region);
        }
        Ok(())
    }

    /// Closes it properly.
    ///
    /// # Errors
    /// When the medium fails; it is found unclean then.
    pub fn close(self) -> Result<(), VolumeError> {
        let mut inner = self.lock();
        self.vouch(&mut inner)?;
        inner.meta.clean = true;
        inner.store_meta()
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

    pub(crate) fn store_meta(&self) -> Result<(), VolumeError> {
        self.meta.store(&*self.description, &self.folder)
    }

    pub(crate) fn io(&self, what: &'static str) -> impl FnOnce(std::io::Error) -> VolumeError + use<> {
        io_error(what, &self.folder)
    }

    /// The guest has written these blocks, whole or in the part that was not here.
    fn came(&mut self, blocks: Range<u64>) -> std::io::Result<()> {
        if self.is_shadow() && self.shadow.absent() > 0 { self.shadow.came(blocks, self.guards) } else { Ok(()) }
    }

    /// The contents of all that is here are durable.
    fn keep_here(&mut self) -> std::io::Result<()> {
        if self.shadow.here().is_empty() {
            return Ok(());
        }
        let here = self.shadow.here().clone();
        self.shadow.keep(&here)
    }

    /// Marks regions hot, durably, before their first write.
    pub(crate) fn heat(&mut self, blocks: Range<u64>) -> std::io::Result<()> {
        if blocks.is_empty() {
            return Ok(());
        }
        let each = self.stamps.region;
        let touched = blocks.start / each..(blocks.end - 1) / each + 1;
        let fresh: Vec<u64> = touched.clone().filter(|r| !self.regions.contains_key(r)).collect();
        if !fresh.is_empty() && self.guards.hold(Guard::HotBeforeWrite) {
            for region in fresh {
                self.hot.write(region, &[1])?;
            }
            self.hot.sync()?;
        }
        self.regions.extend(touched.map(|r| (r, true)));
        Ok(())
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
