//! A replica's table of stamps, read a window at a time: a table has 2 MiB for each GiB that was written. No guest's write waits until all of it was read, nor
//! until all of it was synced; what one may wait for is a window, or the sync of some ([`SYNCED`]).
//!
//! A source that compares what it has with what its target says goes over its table twice:
//!
//! ```text
//!   Sure       what another site may have with other contents gets a new stamp; a sync now and then; then it is said to be sure
//!   Comparing  stamps here, and what the target says of the same blocks
//! ```
//!
//! # What can go wrong
//!
//! *The guest writes between two windows.* What is compared is no moment's table then: each block's stamp is the one that it had at some moment since the
//! beginning. That is as good, because a comparison says of each block by itself whether it is alike, and because nobody relies on it for a block that was
//! written since the beginning: whoever compares hears of each such write, from before the first window on, and counts its block as
//! different whatever the comparison says. A pre-cache's secondary is a subscriber of the recorder by then ([`crate::epoch::Recorder::subscribe`]),
//! and a mirror and a hand-off note what the guest writes while they compare ([`crate::mirror::Source::guest_wrote`],
//! [`crate::fet::Source::guest_wrote`]). So a block that is taken for alike had the same stamp, and the same contents, at every moment from
//! the beginning to the end. For the same reason the regions in which something was written need be listed only once, at the beginning.
//!
//! *It writes while stamps are made sure.* Its write's stamp is of the epoch that began with this, or of a later one, as those are that are given here.
//! Nothing of such an epoch is passed on before the end: a mirror has not begun to, and a pre-cache waits until the epoch has ended. So no
//! other site can have that stamp with other contents.
//!
//! *It is broken off*, by a crash or because nobody waits for it any more. What is unsure is described as before until the last step, when the
//! new stamps are durable: the next one begins again, and a stamp more does no harm.
//!
//! *Somebody else makes sure meanwhile, or the volume changes hands.* Each step looks whether it is still the same owner's doubt, or volume: what
//! was written elsewhere nobody here has heard of ([`Walk`]). Two pre-caches take
//! turns, and one whose secondary a move has ended takes no further step ([`crate::epoch::Recorder::make_sure`]); a move's own steps are made under
//! the guest's lock.

use crate::blocks::{BLOCK, BlockSet};
use crate::error::VolumeError;
use crate::guards::Guard;
use crate::meta::SURE;
use crate::replica::{Inner, Replica, give_way};
use crate::runs::{Compared, Run, Side};
use crate::stamp::Stamp;
use crate::stamps::{WINDOW, entry};
use std::collections::VecDeque;
use std::ops::Range;
use std::time::Instant;

#[cfg(test)]
thread_local! {
    /// Regions of a window: a test's volumes have few.
    pub(crate) static AT_ONCE: std::cell::Cell<usize> = const { std::cell::Cell::new(WINDOW as usize) };
}

#[cfg(test)]
fn at_once() -> usize {
    AT_ONCE.get()
}

#[cfg(not(test))]
const fn at_once() -> usize {
    WINDOW as usize
}

/// Changed windows that are synced at once: 16 MiB of table. A move's syncs are made under the guest's lock, and the last one should not be of
/// all that came before.
const SYNCED: u32 = 8;

/// Who compares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Who {
    /// Passes on what the guest writes in the epoch of now. Of a whole volume.
    Mirror,
    /// Says the stamps of what the guest writes in the epoch of now. Of what is here, or to come.
    HandOff,
    /// Passes on nothing of an epoch that has not ended: what was made sure stays so, and is not sent again for having been compared. Of a whole
    /// volume.
    Precache,
}

/// Regions, of which a window is looked at after the other.
#[derive(Debug)]
struct Regions {
    all: Vec<u64>,
    next: usize,
}

impl Regions {
    /// In order.
    const fn new(all: Vec<u64>) -> Self {
        Self { all, next: 0 }
    }

    /// The next window; empty, where there is none.
    fn window(&mut self) -> &[u64] {
        let from = self.next;
        self.next = self.all.len().min(from + at_once());
        &self.all[from..self.next]
    }

    /// With what the window after it begins.
    fn left(&self) -> Option<u64> {
        self.all.get(self.next).copied()
    }
}

/// A table that is being made sure.
#[derive(Debug)]
pub(crate) struct Sure {
    who: Who,
    /// From which entry on it is unsure, and whose the volume is.
    from: u64,
    owner: u32,
    regions: Regions,
    /// Whether any entry has changed, and in how many windows since the last sync.
    any: bool,
    unsynced: u32,
}

impl Sure {
    /// Refuses to go on where this is not the doubt any more that it began with.
    fn still(&self, inner: &Inner) -> Result<(), VolumeError> {
        let same = (inner.meta.unsure, inner.meta.owner) == (self.from, self.owner);
        if same && inner.meta.primary && !inner.closed { Ok(()) } else { Err(VolumeError::Frozen) }
    }
}

/// A table that is being read.
#[derive(Debug)]
pub(crate) struct Walk {
    who: Who,
    /// Whose the volume was at the beginning, and is to be until the end: what changes under another owner nobody here hears of. Nobody's: it was
    /// no primary, or nothing is compared.
    owner: Option<u32>,
    regions: Regions,
}

impl Walk {
    /// Refuses to go on where the volume is another's, or was meanwhile.
    fn still(&self, inner: &Inner) -> Result<(), VolumeError> {
        let same = self.owner.is_none_or(|owner| inner.meta.primary && inner.meta.owner == owner);
        if same { Ok(()) } else { Err(VolumeError::Frozen) }
    }
}

/// A look for what is absent, by age, that is under way.
#[derive(Debug)]
pub(crate) struct Aging {
    regions: Regions,
    oldest: Vec<(Option<Stamp>, Range<u64>)>,
}

/// What was found in a window.
#[derive(Debug)]
pub(crate) struct Window {
    /// Runs of blocks with the same stamp, in order.
    pub runs: Vec<(Range<u64>, Stamp)>,
    /// All blocks before this one have been looked at; none: all that there are.
    pub end: Option<u64>,
}

impl Replica {
    /// Begins to give a new stamp to what another site may have with other contents: what an earlier mirror passed on, and the guest may have
    /// written again. `None`: there is nothing to be made sure.
    ///
    /// # Errors
    /// When not all of the volume is here and who compares needs all of it, a pre-cache's volume is not this replica's any more, or the medium fails.
    pub(crate) fn begin_sure(&self, who: Who) -> Result<Option<Sure>, VolumeError> {
        let mut inner = self.lock();
        if who != Who::HandOff {
            inner.refuse_shadow()?;
        }
        let wanted = match who {
            Who::Mirror | Who::HandOff => inner.guards.hold(Guard::ComparedWhenSure),
            Who::Precache => inner.meta.unsure != SURE,
        };
        if !inner.meta.primary && who == Who::Precache {
            // Nothing to be made sure here is not sure.
            return Err(VolumeError::Frozen);
        }
        if !inner.meta.primary || !wanted {
            return Ok(None);
        }
        if inner.closed {
            return Err(VolumeError::Frozen);
        }
        // Durable before its first use, and never used before.
        inner.begin_epoch(0)?;
        let from = inner.meta.unsure;
        let all = if from == SURE { vec![] } else { inner.stamps.regions().map_err(self.io("read the stamps of"))? };
        Ok(Some(Sure { who, from, owner: inner.meta.owner, regions: Regions::new(all), any: false, unsynced: 0 }))
    }

    /// A window of it. Whether there is another one.
    ///
    /// # Errors
    /// When somebody else has made it sure, or unsure, meanwhile, or the medium fails.
    pub(crate) fn sure_on(&self, sure: &mut Sure) -> Result<bool, VolumeError> {
        let mut inner = self.lock();
        sure.still(&inner)?;
        let (from, now) = (sure.from, inner.entry());
        let window = sure.regions.window();
        let mut any = false;
        if inner.is_shadow() {
            let doubted = inner.stamps.runs_in(window).map_err(self.io("read the stamps of"))?;
            for (run, _) in doubted.into_iter().filter(|(_, entry)| *entry >= from) {
                any |= inner.stamp_present(run, now).map_err(self.io("stamp what is present of"))?;
            }
        } else {
            any = inner.stamps.replace_in(window, from, now).map_err(self.io("read the stamps of"))?;
        }
        if any {
            inner.stamps.write(window).map_err(self.io("write the stamps of"))?;
        }
        sure.any |= any;
        sure.unsynced += u32::from(any);
        Ok(sure.regions.left().is_some())
    }

    /// Makes the new stamps durable, when the last window was looked at. Nobody waits for this where a pre-cache wants it; a move does it under the
    /// guest's lock, and the guest's writes wait for what [`Replica::sync_some`] has left.
    ///
    /// # Errors
    /// When the medium fails.
    pub(crate) fn sync_sure(&self, sure: &mut Sure) -> Result<(), VolumeError> {
        if sure.unsynced == 0 {
            return Ok(());
        }
        let stamps = self.lock().stamps.medium();
        stamps.sync().map_err(self.io("write the stamps of"))?;
        sure.unsynced = 0;
        Ok(())
    }

    /// The same between two windows, where so many have changed that it is time to.
    ///
    /// # Errors
    /// When the medium fails.
    pub(crate) fn sync_some(&self, sure: &mut Sure) -> Result<(), VolumeError> {
        if sure.unsynced < SYNCED { Ok(()) } else { self.sync_sure(sure) }
    }

    /// Says, durably, that it is sure: of a mirror or a hand-off but for what is written from here on.
    ///
    /// # Errors
    /// As [`Replica::sure_on`]; all of it is unsure then.
    pub(crate) fn end_sure(&self, sure: &Sure) -> Result<(), VolumeError> {
        let mut inner = self.lock();
        sure.still(&inner)?;
        for region in &sure.regions.all {
            // What nobody has written to since is on the disk as it is here: it was synced, and need not be written once more. All under one
            // lock: two look-ups in memory for each 4 MiB of disk, of which 1 TiB has 262144.
            if sure.any && inner.is_cold(*region) {
                inner.stamps.is_durable(*region);
            }
        }
        inner.meta.unsure = match sure.who {
            // What is written from here on may be passed on, and written again under the same stamp.
            Who::Mirror | Who::HandOff => entry(inner.meta.owner, inner.meta.epoch + 1),
            Who::Precache => SURE,
        };
        let begun = inner.begin_epoch(0);
        if begun.is_err() {
            inner.meta.unsure = sure.from;
        }
        begun
    }

    /// Begins to read the table, to compare it.
    ///
    /// # Errors
    /// When a pre-cache's volume is not this replica's any more, or the medium fails.
    pub(crate) fn begin_walk(&self, who: Who) -> Result<Walk, VolumeError> {
        let inner = self.lock();
        let owner = inner.meta.primary.then_some(inner.meta.owner);
        if who == Who::Precache && owner.is_none() {
            return Err(VolumeError::Frozen);
        }
        let all = match who {
            Who::HandOff => inner.regions_of_versions(),
            Who::Mirror | Who::Precache => inner.stamps.regions(),
        };
        Ok(Walk { who, owner, regions: Regions::new(all.map_err(self.io("read the stamps of"))?) })
    }

    /// Reads a window of it.
    ///
    /// # Errors
    /// When the volume has changed hands meanwhile, or the medium fails.
    pub(crate) fn walk_on(&self, walk: &mut Walk) -> Result<Window, VolumeError> {
        let mut inner = self.lock();
        walk.still(&inner)?;
        let window = walk.regions.window();
        let found = match walk.who {
            Who::HandOff => inner.versions_in(window),
            Who::Mirror | Who::Precache => inner.stamps.runs_in(window),
        };
        let found = found.map_err(self.io("read the stamps of"))?;
        let runs =
            found.into_iter().filter_map(|(run, entry)| inner.stamp_of(entry).map(|stamp| (run, stamp))).collect();
        let end = walk.regions.left().map(|region| region * inner.stamps.region);
        Ok(Window { runs, end })
    }

    /// Begins to read the table, to say what is here. Whose it is does not matter: nothing is compared, and a target has no volume of its own.
    ///
    /// # Errors
    /// When the medium fails.
    pub(crate) fn begin_telling(&self) -> Result<Walk, VolumeError> {
        let all = self.lock().stamps.regions().map_err(self.io("read the stamps of"))?;
        Ok(Walk { who: Who::Mirror, owner: None, regions: Regions::new(all) })
    }

    /// Runs of written blocks with the same stamp, in order. Whoever writes meanwhile is let through now and then: each block's stamp is the one
    /// that it had at some moment of the call.
    ///
    /// # Errors
    /// When the medium fails.
    pub fn stamp_runs(&self) -> Result<Vec<(Range<u64>, Stamp)>, VolumeError> {
        let (mut walk, mut all) = (self.begin_telling()?, VecDeque::new());
        while self.read_on(&mut walk, &mut all)? {}
        Ok(all.into())
    }

    /// Reads a window of what is here behind what was read before, of which the last run may go on; whether there is another. Whoever writes meanwhile
    /// is let through before that.
    ///
    /// # Errors
    /// When the medium fails.
    pub(crate) fn read_on(&self, walk: &mut Walk, into: &mut VecDeque<Run>) -> Result<bool, VolumeError> {
        let began = Instant::now();
        let window = self.walk_on(walk)?;
        for (run, stamp) in window.runs {
            match into.back_mut() {
                Some((last, same)) if last.end == run.start && *same == stamp => last.end = run.end,
                _ => into.push_back((run, stamp)),
            }
        }
        let more = window.end.is_some();
        if more {
            give_way(began);
        }
        Ok(more)
    }

    /// Begins to look for what is absent, by age.
    ///
    /// # Errors
    /// When the medium fails.
    pub(crate) fn begin_aging(&self) -> Result<Aging, VolumeError> {
        let regions = self.lock().regions_with_absent().map_err(self.io("read the words of"))?;
        Ok(Aging { regions: Regions::new(regions), oldest: vec![] })
    }

    /// Looks at a window of it. At the end, runs of blocks that are absent, those that were written longest ago first, `most` of them: the least volatile
    /// come first, since what was written of late may soon be written again, and then need not come. What came or was written meanwhile
    /// may be among them.
    ///
    /// # Errors
    /// When the medium fails.
    pub(crate) fn age(&self, aging: &mut Aging, most: usize) -> Result<Option<Vec<Range<u64>>>, VolumeError> {
        let found = self.lock().absent_of(aging.regions.window()).map_err(self.io("read the words of"))?;
        aging.oldest.extend(found);
        let by_age = |(stamp, run): &(Option<Stamp>, Range<u64>)| (*stamp, run.start);
        if aging.oldest.len() > 2 * most {
            aging.oldest.select_nth_unstable_by_key(most, by_age);
            aging.oldest.truncate(most);
        }
        if aging.regions.left().is_some() {
            return Ok(None);
        }
        let mut oldest = std::mem::take(&mut aging.oldest);
        oldest.sort_unstable_by_key(by_age);
        Ok(Some(oldest.into_iter().take(most).map(|(_, run)| run).collect()))
    }

    /// Those of a mirror that has compared.
    #[cfg(test)]
    pub(crate) fn runs_to_compare(&self) -> Result<Vec<(Range<u64>, Stamp)>, VolumeError> {
        let mut comparing = Comparing::begin(Who::Mirror, self)?;
        comparing.take(&[], 0, true);
        while comparing.step(self)?.is_none() {}
        self.stamp_runs()
    }
}

/// A comparison that is under way, with what a target says that it has: with the same stamp it has the same contents.
#[derive(Debug)]
pub(crate) struct Comparing {
    sure: Option<Sure>,
    walk: Walk,
    ours: Side,
    theirs: Side,
    /// Compared up to this block.
    to: u64,
    found: Compared,
}

impl Comparing {
    /// Nothing is known of the target yet. Whoever compares hears of all writes from before this on. For a pre-cache
    /// [`crate::epoch::Recorder::make_sure`] has been before.
    ///
    /// # Errors
    /// When not all of the volume is here and a mirror is to compare, or the medium fails.
    pub fn begin(who: Who, replica: &Replica) -> Result<Self, VolumeError> {
        let sure = if who == Who::Precache { None } else { replica.begin_sure(who)? };
        let (ours, theirs) = (Side::default(), Side::default());
        Ok(Self { sure, walk: replica.begin_walk(who)?, ours, theirs, to: 0, found: Compared::default() })
    }

    /// The target says more, of a volume of so many blocks; `None`: it makes no sense.
    pub fn take(&mut self, runs: &[u8], blocks: u64, last: bool) -> Option<()> {
        self.theirs.take(runs, blocks, last)
    }

    /// Whether a step brings it on. Otherwise all that the target has said was compared, and is forgotten: it has to say more.
    pub const fn may_step(&self) -> bool {
        self.sure.is_some() || self.to < self.theirs.to()
    }

    /// Runs that it holds.
    #[cfg(test)]
    pub fn held(&self) -> usize {
        self.ours.len() + self.theirs.len()
    }

    /// Looks at a window, or at one of each kind. What was found, when that was the last.
    ///
    /// # Errors
    /// When the volume has changed hands meanwhile, or the medium fails.
    pub fn step(&mut self, replica: &Replica) -> Result<Option<Compared>, VolumeError> {
        if let Some(sure) = &mut self.sure {
            if replica.sure_on(sure)? {
                replica.sync_some(sure)?;
                return Ok(None);
            }
            replica.sync_sure(sure)?;
            replica.end_sure(sure)?;
            self.sure = None;
        }
        if self.ours.to() < self.theirs.to() {
            let window = replica.walk_on(&mut self.walk)?;
            self.ours.extend(window.runs, window.end);
        }
        self.to = self.ours.to().min(self.theirs.to());
        self.found.before(self.to, &mut self.ours, &mut self.theirs);
        Ok((self.to == u64::MAX).then(|| std::mem::take(&mut self.found)))
    }
}

/// The target of a move says more of what it has, or the last of it: the comparison has begun then. `None`: it makes no sense.
///
/// # Errors
/// As [`Comparing::begin`].
pub(crate) fn told(
    comparing: &mut Option<Comparing>,
    who: Who,
    (runs, last): (&[u8], bool),
    replica: &Replica,
) -> Result<Option<()>, VolumeError> {
    let comparing = match comparing {
        Some(comparing) => comparing,
        begins => begins.insert(Comparing::begin(who, replica)?),
    };
    Ok(comparing.take(runs, replica.size().0 / BLOCK, last))
}

/// A window of a comparison that a move makes, where one is under way. When that was the last: `dirty`, in which was what the guest wrote and what came
/// meanwhile, has what differs as well, and it is told how many blocks are alike.
///
/// # Errors
/// As [`Comparing::step`].
pub(crate) fn compare(
    comparing: &mut Option<Comparing>,
    dirty: &mut BlockSet,
    replica: &Replica,
) -> Result<Option<u64>, VolumeError> {
    let Some(under_way) = comparing.as_mut().filter(|comparing| comparing.may_step()) else { return Ok(None) };
    let Some(found) = under_way.step(replica)? else { return Ok(None) };
    *comparing = None;
    // What differs may be all of the volume; what has come since is as a rule little beside it.
    let since = std::mem::replace(dirty, found.differing);
    dirty.union(&since);
    Ok(Some(found.alike))
}

#[cfg(test)]
#[path = "walk_tests.rs"]
mod tests;
