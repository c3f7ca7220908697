//! Shadow volumes: a replica that was given the primary role before it holds every block (xNBD+, section 3.1; vMocity, section 2.2).
//!
//! The table of stamps says what the blocks *here* hold (the cache epoch table, CET). Beside it lies a table of *words*, eight
//! bytes a block, that says what they have to hold (the final epoch table, FET), as far as it differs:
//!
//! ```text
//!   0              the block is here: the stamp says the truth, and so does the medium
//!   wanted         absent: these contents are at the holders that the word names
//!   wanted, here   it has come, or was written, but perhaps not durably
//! ```
//!
//! # What can go wrong
//!
//! *The source says half of what is wanted, and dies.* The words count only when [`Replica::finish_wants`] has made all of them
//! durable and the description says so; before that nobody may be granted the volume. What an attempt left behind is gone before
//! the next one begins.
//!
//! *A block counts as here and its contents are lost.* Three things happen to a block that comes or is written whole, in this
//! order: its contents are written; its word says "here"; and when the contents are on the disk for certain, the word is 0. A word that
//! says "here" is believed for as long as the power stays on: what a process wrote survives the process. After a loss of power it
//! says "absent" again, and the old contents are fetched again: to a guest that had not flushed, its write is lost, as with any disk.
//! [`Replica::flush`] sets to 0 what is here, so that what was flushed stays. Whether the power stayed on is told by the kernel's
//! boot id; one that is unknown counts as another one. The other way, an fdatasync before each first write to a block, would cost the
//! guest a disk's turn for each block while the fill lasts.
//!
//! *What comes late.* A block that the guest wrote while its old contents were on their way is here; they are thrown away.
//!
//! *A holder lets go too soon.* [`Replica::left`] counts the words that name a holder, and a word goes when the block is here
//! durably. At nought the holder is not needed any more, by nobody.
//!
//! *Contents that changed at the holder.* A block is wanted with its stamp, and [`Replica::held`] reads a block only if it has
//! that stamp. A source makes everything durable before it says its last word ([`Replica::settled`]): a crash makes it give new
//! stamps to regions that were hot, and then it could not serve what it promised.
//!
//! # Blocks, not sectors
//!
//! A read of 512 bytes fetches the block of 4 KiB that they lie in. vMocity fetches single bytes at once and the rest of their
//! block afterwards, and keeps a map of bytes for each block, because its blocks are objects of megabytes; what is touched
//! moves whole there, too. With blocks of 4 KiB the rest of the block is 3.5 KiB: 0.29 ms at 100 Mbit/s beside round trips of 27 to
//! 100 ms, and it has to travel anyway, each byte once. A guest's file systems write whole blocks; whoever writes a part of one waits
//! for the rest of it ([`VolumeError::Absent`]). So there is no third kind of entry, and no block of which two sites hold a part.

use crate::blocks::{BLOCK, BlockSet};
use crate::error::VolumeError;
use crate::file::Medium;
use crate::guards::{Guard, Guards};
use crate::meta::Wants;
use crate::replica::{Contents, Inner, Replica};
use crate::stamp::Stamp;
use crate::stamps::{Stamps, WINDOW, push};
use godwit_units::{BlockIndex, Bytes, Lineage};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::io;
use std::ops::Range;

/// Who has blocks: a name that the caller understands.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Holder(pub String);

/// Holders of a block that words can name, as sets of them: one more for each hand-off while a fill lasts.
pub(crate) const MOST_SETS: usize = 255;
/// The longest name of a holder.
pub(crate) const LONGEST_HOLDER: usize = 255;
/// Holders of one block.
pub(crate) const MOST_HOLDERS: usize = 8;

/// Regions of which something was told that is not on the disk: 2 MiB of table.
const MOST_TOLD: usize = WINDOW as usize;

/// The block is here, as long as the power stays on.
const HERE: u64 = 1 << 32;

/// Blocks of one version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Version {
    /// The blocks.
    pub blocks: Range<u64>,
    /// Their last write; none if they were never written.
    pub stamp: Option<Stamp>,
    /// Who has them, where it is not this replica.
    pub holders: Vec<Holder>,
}

const fn word(entry: u64, set: u64) -> u64 {
    ((entry >> 32) << 48) | (set << 40) | (entry & 0xffff_ffff)
}

const fn wanted_entry(word: u64) -> u64 {
    ((word >> 48) << 32) | (word & 0xffff_ffff)
}

const fn set_of(word: u64) -> usize {
    ((word >> 40) & 0xff) as usize
}

const fn is_absent(word: u64) -> bool {
    word != 0 && word & HERE == 0
}

/// The words, and what is counted of them.
#[derive(Debug)]
pub(crate) struct Shadow {
    words: Stamps,
    /// Whose words say "here".
    here: BlockSet,
    /// Words that name each set of holders, the first set first.
    left: Vec<u64>,
    absent: u64,
    /// Regions in which something was told that is not on the disk.
    told: BTreeSet<u64>,
    /// Counts what was told: blocks that were here by what was told before say nothing of this one's.
    round: u64,
}

/// Blocks that were here at some moment: see [`Shadow::keep`].
#[derive(Clone, Debug)]
pub(crate) struct Here {
    blocks: BlockSet,
    round: u64,
}

impl Shadow {
    pub fn new(medium: Box<dyn Medium>, blocks: u64, region: u64) -> Self {
        let words = Stamps::new(medium, blocks, region);
        Self { words, here: BlockSet::default(), left: vec![], absent: 0, told: BTreeSet::new(), round: 0 }
    }

    /// Counts the words that are on the disk. `doubt`: nobody knows whether the power stayed on.
    pub fn load(&mut self, doubt: bool, rules: Guards) -> io::Result<()> {
        if rules.hold(Guard::FoundWordsSynced) {
            // A process may have died between a word and its sync: what is found must not be lost after it was believed.
            self.words.persist()?;
        }
        self.recount(doubt)
    }

    fn recount(&mut self, doubt: bool) -> io::Result<()> {
        self.here = BlockSet::default();
        self.left.clear();
        self.absent = 0;
        self.round += 1;
        let mut doubted = false;
        for (run, word) in self.words.runs()? {
            let length = run.end - run.start;
            self.count(word, length);
            if is_absent(word) {
                self.absent += length;
            } else if doubt {
                self.absent += length;
                self.words.set(run, word & !HERE)?;
                doubted = true;
            } else {
                self.here.insert(run);
            }
        }
        if doubted { self.words.persist() } else { Ok(()) }
    }

    fn count(&mut self, word: u64, blocks: u64) {
        let set = set_of(word);
        if self.left.len() < set {
            self.left.resize(set, 0);
        }
        if let Some(left) = set.checked_sub(1).and_then(|i| self.left.get_mut(i)) {
            *left += blocks;
        }
    }

    fn uncount(&mut self, word: u64) {
        if let Some(left) = set_of(word).checked_sub(1).and_then(|i| self.left.get_mut(i)) {
            *left -= 1;
        }
    }

    fn clear(&mut self) -> io::Result<()> {
        self.here = BlockSet::default();
        self.left.clear();
        self.absent = 0;
        self.told.clear();
        self.round += 1;
        self.words.clear()
    }

    /// What is told of a block: its word from now on, in memory, and counted.
    fn tell(&mut self, block: u64, word: u64) -> io::Result<()> {
        let before = self.words.get(block)?;
        if before == word {
            return Ok(());
        }
        if before != 0 {
            self.uncount(before);
            self.absent -= u64::from(is_absent(before));
        }
        if word != 0 {
            self.count(word, 1);
            self.absent += 1;
        }
        self.told.insert(block / self.words.region);
        self.words.set(block..block + 1, word)
    }

    pub fn is_absent(&mut self, block: u64) -> io::Result<bool> {
        Ok(self.absent > 0 && is_absent(self.words.get(block)?))
    }

    pub const fn absent(&self) -> u64 {
        self.absent
    }

    /// The parts of a run that are absent.
    pub fn absent_in(&mut self, blocks: Range<u64>) -> io::Result<Vec<Range<u64>>> {
        let mut found: Vec<Range<u64>> = vec![];
        if self.absent == 0 {
            return Ok(found);
        }
        for block in blocks {
            if is_absent(self.words.get(block)?) {
                match found.last_mut() {
                    Some(run) if run.end == block => run.end += 1,
                    _ => found.push(block..block + 1),
                }
            }
        }
        Ok(found)
    }

    /// The contents of these blocks are written. Written down before anybody is told.
    pub fn came(&mut self, blocks: Range<u64>, rules: Guards) -> io::Result<()> {
        let mut any = false;
        for block in blocks.clone() {
            let word = self.words.get(block)?;
            if !is_absent(word) {
                continue;
            }
            any = true;
            self.absent -= 1;
            if rules.hold(Guard::DataBeforePresent) {
                self.words.set(block..block + 1, word | HERE)?;
                self.here.insert(block..block + 1);
            } else {
                self.uncount(word);
                self.words.set(block..block + 1, 0)?;
            }
        }
        if any && rules.hold(Guard::PresentBeforeAnswer) { self.words.write_through(blocks) } else { Ok(()) }
    }

    /// The contents of these blocks are durable: those that are here stay. They may have been taken a while ago.
    pub fn keep(&mut self, taken: &Here) -> io::Result<()> {
        let (mut kept, mut regions): (Vec<(u64, u64)>, Vec<u64>) = (vec![], vec![]);
        if taken.round != self.round {
            return Ok(());
        }
        for block in taken.blocks.runs().flatten() {
            if self.here.contains(BlockIndex(block)) {
                kept.push((block, self.words.get(block)?));
                self.words.set(block..block + 1, 0)?;
                regions.push(block / self.words.region);
            }
        }
        if kept.is_empty() {
            return Ok(());
        }
        // A guest waits for this: no look at all of the table.
        regions.dedup();
        self.words.persist_in(&regions)?;
        // Only now, because whoever asks what is left lets holders go.
        for (block, word) in kept {
            self.here.remove(block..block + 1);
            self.uncount(word);
        }
        Ok(())
    }

    /// Whether there are blocks that are here, and not for good.
    pub fn has_fresh(&self) -> bool {
        !self.here.is_empty()
    }

    /// What is here, and not for good: for [`Shadow::keep`], once something has made its contents durable.
    pub fn taken(&self) -> Here {
        Here { blocks: self.here.clone(), round: self.round }
    }
}

impl Inner {
    /// Whether words count: the volume is this replica's, and may not be whole.
    pub(crate) fn is_shadow(&self) -> bool {
        self.meta.primary && self.meta.wants.as_ref().is_some_and(|wants| wants.complete)
    }

    /// Whether a block of it may be elsewhere only.
    pub(crate) fn lacks_some(&self) -> bool {
        self.is_shadow() && self.shadow.absent > 0
    }

    /// Refuses what needs all of the volume.
    pub(crate) fn refuse_shadow(&self) -> Result<(), VolumeError> {
        if self.is_shadow() { Err(VolumeError::Shadow(self.shadow.absent())) } else { Ok(()) }
    }

    /// Refuses what would find a block absent.
    pub(crate) fn refuse_absent(&mut self, blocks: Range<u64>) -> Result<(), VolumeError> {
        if !self.is_shadow() {
            return Ok(());
        }
        match self.shadow.absent_in(blocks).map_err(self.io("read the words of"))?.into_iter().next() {
            Some(run) => Err(VolumeError::Absent(run)),
            None => Ok(()),
        }
    }

    /// Refuses a write to a part of a block that is absent.
    pub(crate) fn refuse_edges(&mut self, offset: u64, length: u64) -> Result<(), VolumeError> {
        if length == 0 || !self.guards.hold(Guard::EdgesFirst) {
            return Ok(());
        }
        let end = offset + length;
        if !offset.is_multiple_of(BLOCK) {
            self.refuse_absent(offset / BLOCK..offset / BLOCK + 1)?;
        }
        if !end.is_multiple_of(BLOCK) {
            self.refuse_absent(end / BLOCK..end / BLOCK + 1)?;
        }
        Ok(())
    }

    /// The words of an attempt that came to nothing, or of a volume that is another's now.
    pub(crate) fn drop_wants(&mut self) -> Result<(), VolumeError> {
        if let Some(wants) = self.meta.wants.take()
            && let Err(error) = self.store_meta()
        {
            self.meta.wants = Some(wants);
            return Err(error);
        }
        Ok(())
    }

    fn set_of(&mut self, holders: &[Holder]) -> Result<u64, VolumeError> {
        let Some(wants) = &mut self.meta.wants else {
            return Err(VolumeError::Range("nothing is being handed over".into()));
        };
        let known = wants.holders.iter().position(|set| set == holders);
        let index = match known {
            Some(index) => index,
            None if wants.holders.len() >= MOST_SETS => {
                return Err(VolumeError::Range(format!(
                    "the volume's blocks are at more than {MOST_SETS} different sets of sites: let a fill end before the next move"
                )));
            }
            None => {
                wants.holders.push(holders.to_vec());
                // Durable before it is used.
                if let Err(error) = self.store_meta() {
                    if let Some(wants) = &mut self.meta.wants {
                        wants.holders.pop();
                    }
                    return Err(error);
                }
                self.meta.wants.as_ref().map_or(0, |wants| wants.holders.len() - 1)
            }
        };
        Ok(index as u64 + 1)
    }

    fn holders(&self, word: u64) -> &[Holder] {
        let sets = self.meta.wants.as_ref().map_or(&[][..], |wants| &wants.holders);
        set_of(word).checked_sub(1).and_then(|i| sets.get(i)).map_or(&[], |set| set)
    }
}

/// What a shadow volume is to hold, and what of it is here.
impl Replica {
    /// Begins to be told what it does not have, as a secondary that may soon be the primary. What an earlier attempt said is
    /// forgotten.
    ///
    /// # Errors
    /// When this is a primary, or the medium fails.
    pub fn begin_wants(&self) -> Result<(), VolumeError> {
        let mut inner = self.lock();
        if inner.meta.primary {
            return Err(VolumeError::Frozen);
        }
        if inner.meta.redo {
            return Err(inner.journal_waits());
        }
        inner.drop_wants()?;
        // From here on it is no image of any epoch.
        inner.meta.complete = None;
        let begun = match inner.guards.hold(Guard::WantsBeginAfresh) {
            true => inner.shadow.clear(),
            false => inner.shadow.recount(false),
        };
        begun.map_err(self.io("clear the words of"))?;
        inner.meta.wants = Some(Wants { complete: false, lineage: Lineage(0), holders: vec![] });
        inner.store_meta()
    }

    /// These blocks have to hold what was written at `stamp`, and `holders` have it. Blocks that hold it are left alone. Durable with
    /// [`Replica::finish_wants`].
    ///
    /// # Errors
    /// When they lie outside, nothing was begun, there are no holders or too many, or the medium fails.
    pub fn want(&self, blocks: Range<u64>, stamp: Stamp, holders: &[Holder]) -> Result<(), VolumeError> {
        let mut inner = self.lock();
        self.inside(blocks.start.saturating_mul(BLOCK), run_bytes(&blocks))?;
        if inner.meta.primary || inner.meta.wants.as_ref().is_none_or(|wants| wants.complete) {
            return Err(VolumeError::Frozen);
        }
        if holders.is_empty() || holders.len() > MOST_HOLDERS {
            return Err(VolumeError::Range(format!("{} holders of a block are none or too many", holders.len())));
        }
        let entry = crate::stamps::entry(inner.owner_index(stamp.lineage, stamp.generation)?, stamp.epoch.0);
        let set = inner.set_of(holders)?;
        let Inner { shadow, stamps, .. } = &mut *inner;
        let io = || {
            for block in blocks {
                let here = stamps.get(block)? == entry;
                shadow.tell(block, if here { 0 } else { word(entry, set) })?;
            }
            Ok(())
        };
        io().map_err(self.io("write the words of"))
    }

    /// Brings what was told to the disk, where that is much: little is left for [`Replica::finish_wants`] then, for which a guest waits.
    ///
    /// # Errors
    /// When the medium fails.
    pub fn save_wants(&self) -> Result<(), VolumeError> {
        let (medium, regions) = {
            let mut inner = self.lock();
            if inner.shadow.told.len() < MOST_TOLD {
                return Ok(());
            }
            let regions: Vec<u64> = std::mem::take(&mut inner.shadow.told).into_iter().collect();
            inner.shadow.words.write(&regions).map_err(self.io("write the words of"))?;
            (inner.shadow.words.medium(), regions)
        };
        medium.sync().map_err(self.io("write the words of"))?;
        let Shadow { words, told, .. } = &mut self.lock().shadow;
        regions.into_iter().filter(|region| !told.contains(region)).for_each(|region| words.is_durable(region));
        Ok(())
    }

    /// These blocks were never written, and hold zeroes.
    ///
    /// # Errors
    /// As [`Replica::want`].
    pub fn want_nothing(&self, blocks: Range<u64>) -> Result<(), VolumeError> {
        self.forget(blocks.clone())?;
        let mut inner = self.lock();
        let mut told = blocks.map(|block| inner.shadow.tell(block, 0));
        told.try_for_each(|told| told).map_err(self.io("write the words of"))
    }

    /// All is told: durably, so that the volume may be granted to this replica. `lineage`: of the owner who told it. The guest stands still
    /// meanwhile: with [`Replica::save_wants`] before it, this takes the time of what was told since, however large the volume is.
    ///
    /// # Errors
    /// When nothing was begun, or the medium fails.
    pub fn finish_wants(&self, lineage: Lineage) -> Result<(), VolumeError> {
        let mut inner = self.lock();
        if inner.meta.primary || inner.meta.wants.is_none() {
            return Err(VolumeError::Frozen);
        }
        // What is here has to stay: a secondary forgets what is hot when it dies.
        self.vouch(&mut inner)?;
        let told: Vec<u64> = std::mem::take(&mut inner.shadow.told).into_iter().collect();
        let kept = match inner.guards.hold(Guard::WantsBeforeComplete) {
            true => inner.shadow.words.persist_in(&told),
            false => inner.shadow.words.write(&told),
        };
        kept.map_err(self.io("write the words of"))?;
        if let Some(wants) = &mut inner.meta.wants {
            wants.complete = true;
            wants.lineage = lineage;
        }
        inner.store_meta()
    }

    /// Refuses blocks that come for another reason than that they are wanted: words say of what is here that it is what
    /// was told, and nobody looks again.
    pub(crate) fn refuse_strange(&self) -> Result<(), VolumeError> {
        let inner = self.lock();
        inner.refuse_shadow()?;
        if inner.meta.redo {
            return Err(inner.journal_waits());
        }
        if inner.meta.wants.is_some() { Err(VolumeError::Frozen) } else { Ok(()) }
    }

    /// A source that others will fetch from: everything is durable, and nothing is hot that a crash would make it doubt.
    ///
    /// # Errors
    /// When the medium fails.
    pub fn settled(&self) -> Result<(), VolumeError> {
        let mut inner = self.lock();
        if inner.guards.hold(Guard::SettledBeforeFinal) { self.vouch(&mut inner) } else { Ok(()) }
    }

    /// Whether a rule is in force.
    pub(crate) fn holds(&self, guard: Guard) -> bool {
        self.lock().guards.hold(guard)
    }

    /// Whether the volume is this replica's and may not be whole: until [`Replica::end_wants`] has said that it is.
    #[must_use]
    pub fn is_shadow(&self) -> bool {
        self.lock().is_shadow()
    }

    /// Whether all of the volume is here, whoever owns it: not where something is still to be fetched, if by an owner that is to be, nor where
    /// that was left to the next one.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        let inner = self.lock();
        !inner.meta.gaps && !inner.meta.wants.as_ref().is_some_and(|wants| wants.complete && inner.shadow.absent > 0)
    }

    /// A secondary has been brought all of the volume.
    ///
    /// # Errors
    /// When the medium fails.
    pub(crate) fn has_all(&self) -> Result<(), VolumeError> {
        let mut inner = self.lock();
        if !std::mem::take(&mut inner.meta.gaps) {
            return Ok(());
        }
        let stored = inner.store_meta();
        inner.meta.gaps = stored.is_err();
        stored
    }

    /// How much is not here. Of a whole volume this is told without the lock, which is held for as long as a write or a sync takes: whoever asks
    /// for a volume's state may not wait for that.
    #[must_use]
    pub fn absent(&self) -> Bytes {
        if !self.is_partial() {
            return Bytes(0);
        }
        let inner = self.lock();
        Bytes(if inner.is_shadow() { inner.shadow.absent * BLOCK } else { 0 })
    }

    /// Everybody who has something that is not durably here; told as [`Replica::absent`] is.
    #[must_use]
    pub fn holders(&self) -> Vec<Holder> {
        if !self.is_partial() {
            return vec![];
        }
        let inner = self.lock();
        if !inner.is_shadow() {
            return vec![];
        }
        let sets = inner.meta.wants.iter().flat_map(|wants| (0..).zip(&wants.holders));
        let needed = sets.filter(|(i, _): &(usize, _)| inner.shadow.left.get(*i).is_some_and(|left| *left > 0));
        let mut found: Vec<Holder> = needed.flat_map(|(_, set)| set.clone()).collect();
        found.sort_unstable();
        found.dedup();
        found
    }

    /// Blocks for which this holder is named and which are not durably here. At nought it is not needed. None: the volume
    /// is being handed over, or another's; somebody else knows then.
    ///
    /// # Errors
    /// When the medium fails.
    pub fn left(&self, holder: &Holder) -> Result<Option<u64>, VolumeError> {
        let mut inner = self.lock();
        if !inner.meta.primary || inner.is_frozen() {
            return Ok(None);
        }
        if !inner.is_shadow() {
            return Ok(Some(0));
        }
        if !inner.guards.hold(Guard::DurableBeforeRelease) {
            let runs = inner.shadow.words.runs().map_err(self.io("read the words of"))?;
            let named = runs.iter().filter(|(_, w)| is_absent(*w) && inner.holders(*w).contains(holder));
            return Ok(Some(named.map(|(run, _)| run.end - run.start).sum()));
        }
        let sets = inner.meta.wants.iter().flat_map(|wants| (0..).zip(&wants.holders));
        let named = sets.filter(|(_, set)| set.contains(holder));
        Ok(Some(named.map(|(i, _): (usize, _)| inner.shadow.left.get(i).copied().unwrap_or(0)).sum()))
    }

    /// What is absent of these blocks, with what it has to be and who has it, in order.
    ///
    /// # Errors
    /// When the medium fails.
    pub fn wanted(&self, blocks: Range<u64>) -> Result<Vec<Version>, VolumeError> {
        let mut inner = self.lock();
        if !inner.is_shadow() {
            return Ok(vec![]);
        }
        inner.wanted(blocks).map_err(self.io("read the words of"))
    }

    /// Contents that a holder has sent: they are taken where the block is absent and wants just these. How many were.
    ///
    /// # Errors
    /// When they lie outside, the volume is not this replica's, or the medium fails.
    pub fn arrive(&self, first: u64, stamp: Stamp, contents: Contents<'_>) -> Result<BlockSet, VolumeError> {
        let mut inner = self.lock();
        let blocks = first..first.saturating_add(contents.blocks()?);
        self.inside(first.saturating_mul(BLOCK), run_bytes(&blocks))?;
        let mut taken = BlockSet::default();
        if !inner.meta.primary {
            return Err(VolumeError::Frozen);
        }
        if !inner.is_shadow() {
            // The guest has written what was still on its way, and the fill has ended without it.
            return Ok(taken);
        }
        for block in blocks.clone() {
            let word = inner.shadow.words.get(block).map_err(self.io("read the words of"))?;
            let wanted = inner.stamp_of(wanted_entry(word)) == Some(stamp);
            if word != 0 && wanted && (is_absent(word) || !inner.guards.hold(Guard::ArrivalsYield)) {
                taken.insert(block..block + 1);
            }
        }
        let runs: Vec<Range<u64>> = taken.runs().collect();
        for run in runs {
            let entry = inner.shadow.words.get(run.start).map(wanted_entry).map_err(self.io("read the words of"))?;
            inner.heat(run.clone(), 1).map_err(self.io("mark a region of"))?;
            let guards = inner.guards;
            let mut io = || {
                match contents {
                    Contents::Zeroes(_) => self.data.punch(run.start * BLOCK, run_bytes(&run))?,
                    Contents::Data(data) => {
                        let at = ((run.start - first) * BLOCK) as usize;
                        self.data.write(run.start * BLOCK, &data[at..at + run_bytes(&run) as usize])?;
                    }
                }
                let came = inner.shadow.came(run.clone(), guards);
                came.and(inner.stamps.set(run.clone(), entry))
            };
            io().map_err(self.io("write"))?;
        }
        Ok(taken)
    }

    /// Every version of these blocks: here, or to come.
    ///
    /// # Errors
    /// When the medium fails.
    pub fn versions(&self, blocks: Range<u64>) -> Result<Vec<Version>, VolumeError> {
        let mut inner = self.lock();
        let shadow = inner.is_shadow();
        let mut found: Vec<Version> = vec![];
        for block in blocks {
            let mut io = || {
                let word = if shadow { inner.shadow.words.get(block)? } else { 0 };
                Ok((word, inner.stamps.get(block)?))
            };
            let (word, entry) = io().map_err(self.io("read the stamps of"))?;
            let absent = is_absent(word);
            let stamp = inner.stamp_of(if absent { wanted_entry(word) } else { entry });
            let holders = if absent { inner.holders(word) } else { &[] };
            match found.last_mut() {
                Some(last) if last.stamp == stamp && last.holders == holders => last.blocks.end += 1,
                _ => found.push(Version { blocks: block..block + 1, stamp, holders: holders.to_vec() }),
            }
        }
        Ok(found)
    }

    /// The stamp of a write now.
    #[must_use]
    pub fn writing_stamp(&self) -> Option<Stamp> {
        let inner = self.lock();
        inner.stamp_of(inner.entry())
    }

    /// The contents of these blocks for another site, if all of them are here and were last written at `stamp`. Contents and
    /// stamps belong together: they are read under the lock that writes take.
    ///
    /// # Errors
    /// When they lie outside, or the medium fails.
    pub fn held(&self, blocks: Range<u64>, stamp: Stamp) -> Result<Option<Vec<u8>>, VolumeError> {
        let mut inner = self.lock();
        self.inside(blocks.start.saturating_mul(BLOCK), run_bytes(&blocks))?;
        let shadow = inner.is_shadow();
        for block in blocks.clone() {
            let entry = inner.stamps.get(block).map_err(self.io("read the stamps of"))?;
            if inner.stamp_of(entry) != Some(stamp) {
                return Ok(None);
            }
            if shadow && inner.shadow.is_absent(block).map_err(self.io("read the words of"))? {
                return Ok(None);
            }
        }
        let mut bytes = vec![0; run_bytes(&blocks) as usize];
        self.data.read(blocks.start * BLOCK, &mut bytes).map_err(self.io("read"))?;
        Ok(Some(bytes))
    }

    /// Makes durable what has come. Whether everything has, for good: the volume is no shadow any more then.
    ///
    /// # Errors
    /// When the medium fails.
    pub fn end_wants(&self) -> Result<bool, VolumeError> {
        let mut inner = self.lock();
        if !inner.is_shadow() {
            return Ok(true);
        }
        self.vouch(&mut inner)?;
        if inner.shadow.absent > 0 || !inner.shadow.here.is_empty() {
            return Ok(false);
        }
        inner.drop_wants()?;
        self.note_partial(&inner);
        inner.shadow.clear().map_err(self.io("clear the words of"))?;
        Ok(true)
    }
}

impl Inner {
    /// Regions of which something may be here or to come, in order.
    pub(crate) fn regions_of_versions(&self) -> io::Result<Vec<u64>> {
        let mut regions = self.stamps.regions()?;
        if self.lacks_some() {
            regions.extend(self.shadow.words.regions()?);
            regions.sort_unstable();
            regions.dedup();
        }
        Ok(regions)
    }

    /// The entries of these regions, and of what is absent those that it has to have, as runs of blocks with the same one, in order.
    pub(crate) fn versions_in(&mut self, regions: &[u64]) -> io::Result<Vec<(Range<u64>, u64)>> {
        if !self.lacks_some() {
            return self.stamps.runs_in(regions);
        }
        let (each, last) = (self.stamps.region, self.meta.size.0 / BLOCK);
        let mut runs = vec![];
        for region in regions {
            let (words, entries) = (self.shadow.words.entries(*region)?, self.stamps.entries(*region)?);
            for ((block, word), entry) in (region * each..last).zip(words.iter()).zip(entries.iter()) {
                push(&mut runs, block, if is_absent(word) { wanted_entry(word) } else { entry });
            }
        }
        Ok(runs)
    }

    /// Regions of which something may be absent, in order.
    pub(crate) fn regions_with_absent(&self) -> io::Result<Vec<u64>> {
        if self.lacks_some() { self.shadow.words.regions() } else { Ok(vec![]) }
    }

    /// What is absent of these regions, as runs of blocks with the stamp that they have to have, in order.
    pub(crate) fn absent_of(&mut self, regions: &[u64]) -> io::Result<Vec<(Option<Stamp>, Range<u64>)>> {
        if !self.lacks_some() {
            return Ok(vec![]);
        }
        let runs = self.shadow.words.runs_in(regions)?.into_iter().filter(|(_, word)| is_absent(*word));
        Ok(runs.map(|(run, word)| (self.stamp_of(wanted_entry(word)), run)).collect())
    }

    fn wanted(&mut self, blocks: Range<u64>) -> io::Result<Vec<Version>> {
        let mut found: Vec<Version> = vec![];
        for run in self.shadow.absent_in(blocks)? {
            for block in run {
                let word = self.shadow.words.get(block)?;
                let stamp = self.stamp_of(wanted_entry(word));
                let holders = self.holders(word);
                match found.last_mut() {
                    Some(last) if last.blocks.end == block && last.stamp == stamp && last.holders == holders => {
                        last.blocks.end += 1;
                    }
                    _ => found.push(Version { blocks: block..block + 1, stamp, holders: holders.to_vec() }),
                }
            }
        }
        Ok(found)
    }
}

/// Bytes of a run of blocks; more than any volume has, if there are that many.
const fn run_bytes(blocks: &Range<u64>) -> u64 {
    blocks.end.saturating_sub(blocks.start).saturating_mul(BLOCK)
}

#[cfg(test)]
#[path = "shadow_tests.rs"]
pub(crate) mod tests;
