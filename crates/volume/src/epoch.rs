//! Epochs of a volume, and what its pre-caches have to know of the guest's writes.
//!
//! An epoch is the interval of writes that share a stamp. [`Recorder::roll`] ends one; what was written in it may be sent once
//! it is durable here. Each secondary has a set of blocks of epochs that have ended and that it has not been sent, and at most one
//! epoch under way.
//!
//! Epochs are the volume's, and so are their numbers; how often one begins to go to a secondary is that one's own matter ([`Recorder::every`]). It gets
//! one in each interval of the volume's clock: all that it was not sent of the epochs that have ended by then, under the number of the
//! last. So what it holds then is the volume as of that number, whether it was sent each epoch or one in a thousand. For the others the same
//! blocks are set aside until their own interval is over. All count their intervals from the same moment, whenever they came, so that ten secondaries
//! with one interval have the epochs of one, and the volume as many syncs.
//!
//! Secondaries that keep images of several volumes of one VM get epochs that ended in one [`Moment`] ([`Recorder::roll_with`]): by whoever holds the locks of the
//! guest's writes to all of them, when all are ready ([`Recorder::stands`]).
//!
//! # What can go wrong
//!
//! *A write is under way at a roll.* The shell makes the guest's writes and rolls under one lock, so a write belongs to one epoch as
//! a whole; the new epoch is no later process's before the first write that bears it ([`Replica::end_epoch`]).
//!
//! *A block is written again before it was sent.* Its stamp is newer than the epoch under way then. A secondary that holds blocks is not sent
//! it: the contents of the epoch are gone, the newer ones are not durable yet, and it comes with its own epoch; so a block that is
//! written all the time travels once an epoch at most. A secondary that keeps an *image* needs the contents as they were: they are
//! kept here before they are overwritten ([`Recorder::before_write`]), in memory and bounded; past the bound the epoch is
//! given up, and the image stays as it is until a later one is complete.
//!
//! *A block is torn while it is read for sending.* It is read without the guest's lock, so that no guest waits for that, and its stamp
//! after it: whoever tore it has given it a newer one by then ([`crate::precache::Source::poll`]).
//!
//! *A secondary lags far behind.* Its sets are large then, and the guest's writes wait for the lock that guards them. So they are counted in
//! pieces ([`Recorder::backlog`]), and what a comparison found is taken as it is.

use crate::blocks::{BLOCK, BlockSet};
use crate::error::VolumeError;
use crate::meta::{Complete, Moment};
use crate::replica::{Replica, give_way};
use crate::stamp::Stamp;
use crate::walk::Who;
use godwit_units::{BlockIndex, Bytes};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Chunks of a set that are counted under one lock: 4 GiB of disk, of which something is in the set, and some tenths of a millisecond.
const COUNTED: usize = 1024;

/// Contents that are kept for one secondary because the guest has overwritten them, where nobody says otherwise: what 10 s at 50 Mbit/s carry.
pub const MOST_KEPT: Bytes = Bytes(64 << 20);

/// Names a secondary of a recorder.
pub type Subscriber = u64;

/// A block that was overwritten before it was sent.
#[derive(Clone, Debug)]
pub(crate) struct Kept {
    pub stamp: Option<Stamp>,
    pub data: Box<[u8]>,
}

#[derive(Debug, Default)]
struct One {
    image: bool,
    /// Of ended epochs, and in no epoch under way.
    waiting: BlockSet,
    /// The epoch under way, whether it is durable here, and what of it is still to be sent.
    under_way: Option<(Complete, bool)>,
    left: BlockSet,
    kept: BTreeMap<u64, Kept>,
    /// Blocks of those, at the most.
    most_kept: u64,
    overflown: bool,
    /// Wants the next epoch: its comparison is done, and nothing is under way.
    ready: bool,
    /// Wants one even if nothing was written: it does not know what it holds.
    asks: bool,
    /// What it holds, once it has said so.
    held: Option<Option<Complete>>,
    /// Once it holds an image, its epochs end in one moment with those of other volumes: only when somebody ends all of them.
    together: bool,
    /// In each of these one epoch at the most begins to go to it; and the beginning of that in which the last one did.
    every: Duration,
    began: Option<Duration>,
}

impl One {
    /// Whether an epoch that ends now is to go to it. `fresh`: something was written in it.
    fn is_due(&self, now: Duration, fresh: bool) -> bool {
        !(self.together && self.image_held().is_some()) && self.ready && self.is_over(now) && self.has_news(fresh)
    }

    /// The image that it holds, if that is what it is for.
    fn image_held(&self) -> Option<Complete> {
        self.held.flatten().filter(|held| self.image && held.image)
    }

    fn is_over(&self, now: Duration) -> bool {
        self.began.is_none_or(|began| now.saturating_sub(began) >= self.every)
    }

    fn has_news(&self, fresh: bool) -> bool {
        self.asks || fresh || !self.waiting.is_empty()
    }
}

/// When the interval began that it is now.
fn beginning(now: Duration, every: Duration) -> Duration {
    let since = now.as_nanos().checked_rem(every.as_nanos()).unwrap_or(0);
    now.saturating_sub(Duration::from_nanos(u64::try_from(since).unwrap_or(0)))
}

/// How a secondary stands whose epochs end together with those of other volumes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stands {
    /// It holds no image yet: its epochs end by themselves until it does.
    Alone,
    /// It is being compared, or an epoch is under way.
    Busy,
    /// An epoch may begin to go to it.
    Ready {
        /// Its interval is over.
        over: bool,
        /// Something was written that it has not.
        news: bool,
        /// What its image is of, if that has something in common with other volumes' images.
        moment: Option<Moment>,
    },
}

/// What [`Recorder::clear`] took away. To give back what large sets take lasts: whoever holds the guest's lock lets go of it first.
#[derive(Debug)]
pub struct Cleared {
    _all: BTreeMap<Subscriber, One>,
    _fresh: BlockSet,
}

#[derive(Debug)]
struct Inner {
    /// Written in the epoch of now.
    fresh: BlockSet,
    all: BTreeMap<Subscriber, One>,
    next: Subscriber,
    most_kept: u64,
}

/// What the guest writes, for all pre-caches of a volume.
#[derive(Debug)]
pub struct Recorder {
    inner: Mutex<Inner>,
    /// Held by the one for which stamps are made sure: of two at once the one that ends first would compare stamps that the other still changes.
    making_sure: Mutex<()>,
}

impl Default for Recorder {
    fn default() -> Self {
        Self::new()
    }
}

impl Recorder {
    /// Nobody wants to know anything.
    #[must_use]
    pub fn new() -> Self {
        Self::keeping(MOST_KEPT)
    }

    /// With another bound for what is kept.
    #[must_use]
    pub fn keeping(most: Bytes) -> Self {
        let inner = Inner { fresh: BlockSet::default(), all: BTreeMap::new(), next: 0, most_kept: most.0 / BLOCK };
        Self { inner: Mutex::new(inner), making_sure: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A secondary that is about to be compared with. `image`: what an epoch leaves is to be reproduced as a whole. To be called under
    /// the guest's lock.
    pub fn subscribe(&self, image: bool) -> Subscriber {
        let mut inner = self.lock();
        inner.next += 1;
        let id = inner.next;
        let most_kept = inner.most_kept;
        inner.all.insert(id, One { image, most_kept, ..One::default() });
        id
    }

    /// In each such interval of the clock that [`Recorder::roll`] is told, one epoch at the most begins to go to a secondary, from now on. As long as nobody has
    /// said it: as many as end.
    pub fn every(&self, id: Subscriber, interval: Duration) {
        if let Some(one) = self.lock().all.get_mut(&id) {
            one.every = interval;
        }
    }

    /// How much is kept for a secondary's image, at the most, from now on.
    pub fn keeps(&self, id: Subscriber, most: Bytes) {
        if let Some(one) = self.lock().all.get_mut(&id) {
            one.most_kept = most.0 / BLOCK;
        }
    }

    /// From its first image on its epochs are to end in one moment with those of other volumes: [`Recorder::roll`] begins none for it that is not
    /// told to.
    pub fn together(&self, id: Subscriber, together: bool) {
        if let Some(one) = self.lock().all.get_mut(&id) {
            one.together = together;
        }
    }

    /// How a secondary stands; `None` if it is over.
    #[must_use]
    pub fn stands(&self, id: Subscriber, now: Duration) -> Option<Stands> {
        let inner = self.lock();
        let one = inner.all.get(&id)?;
        Some(match one.image_held() {
            None if one.held.is_some() => Stands::Alone,
            Some(held) if one.ready => {
                let news = one.has_news(!inner.fresh.is_empty());
                Stands::Ready { over: one.is_over(now), news, moment: held.moment }
            }
            _ => Stands::Busy,
        })
    }

    /// A secondary that is over.
    pub fn unsubscribe(&self, id: Subscriber) {
        let mut inner = self.lock();
        let over = inner.all.remove(&id);
        let fresh = inner.all.is_empty().then(|| std::mem::take(&mut inner.fresh));
        drop(inner);
        // To give back what large sets take lasts, and the guest need not wait for it.
        drop((over, fresh));
    }

    /// All secondaries are over: a move begins, or the volume is another host's.
    pub fn clear(&self) -> Cleared {
        let mut inner = self.lock();
        Cleared { _all: std::mem::take(&mut inner.all), _fresh: std::mem::take(&mut inner.fresh) }
    }

    /// Whether a secondary is still served: a move ends all of them.
    #[must_use]
    pub fn knows(&self, id: Subscriber) -> bool {
        self.lock().all.contains_key(&id)
    }

    /// Whether there is a secondary.
    #[must_use]
    pub fn is_used(&self) -> bool {
        !self.lock().all.is_empty()
    }

    /// The guest is about to write these blocks. To be called under its lock.
    ///
    /// # Errors
    /// When the replica cannot be read.
    pub fn before_write(&self, blocks: Range<u64>, replica: &Replica) -> Result<(), VolumeError> {
        let mut inner = self.lock();
        for one in inner.all.values_mut().filter(|one| one.image && !one.left.is_empty() && !one.overflown) {
            for block in blocks.clone() {
                if !one.left.contains(BlockIndex(block)) {
                    continue;
                }
                if one.kept.len() as u64 >= one.most_kept {
                    // The whole epoch is worth nothing without this block: it is given up, and memory with it.
                    one.overflown = true;
                    one.kept.clear();
                    break;
                }
                let mut data = vec![0; BLOCK as usize];
                replica.read(block * BLOCK, &mut data)?;
                one.kept.insert(block, Kept { stamp: replica.stamp(block)?, data: data.into() });
                one.left.remove(block..block + 1);
            }
        }
        Ok(())
    }

    /// The guest has written these blocks. To be called under its lock.
    pub fn wrote(&self, blocks: Range<u64>) {
        let mut inner = self.lock();
        if !inner.all.is_empty() {
            inner.fresh.insert(blocks);
        }
    }

    /// The replica's stamps can be compared with a secondary's from here on, unless a move has ended it: whether they can. A move ends all of
    /// them before its mirror compares, and each step is made with the lock that it does that under: none is made afterwards.
    ///
    /// # Errors
    /// When the medium fails.
    pub(crate) fn make_sure(&self, id: Subscriber, replica: &Replica) -> Result<bool, VolumeError> {
        let _one = self.making_sure.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(begun) = self.while_known(id, || replica.begin_sure(Who::Precache))? else { return Ok(false) };
        let Some(mut sure) = begun else { return Ok(true) };
        loop {
            let began = Instant::now();
            match self.while_known(id, || replica.sure_on(&mut sure))? {
                None => return Ok(false),
                Some(true) => give_way(began),
                Some(false) => break,
            }
            replica.sync_some(&mut sure)?;
        }
        replica.sync_sure(&mut sure)?;
        Ok(self.while_known(id, || replica.end_sure(&sure))?.is_some())
    }

    /// Does something that no move may come between; nothing, where one has ended this secondary.
    fn while_known<T>(
        &self,
        id: Subscriber,
        what: impl FnOnce() -> Result<T, VolumeError>,
    ) -> Result<Option<T>, VolumeError> {
        let inner = self.lock();
        if inner.all.contains_key(&id) { what().map(Some) } else { Ok(None) }
    }

    /// What differs at a secondary, by its stamps: it wants an epoch from now on.
    pub(crate) fn compared(&self, id: Subscriber, differ: BlockSet, held: Option<Complete>) {
        if let Some(one) = self.lock().all.get_mut(&id) {
            // What differs may be all of the volume; what has come since is as a rule little beside it.
            let since = std::mem::replace(&mut one.waiting, differ);
            one.waiting.union(&since);
            one.ready = true;
            one.asks = held.is_none_or(|held| one.image && !held.image);
            one.held = Some(held);
        }
    }

    /// Whether an epoch should end now: some secondary has nothing under way, its interval is over, and there is something for it.
    #[must_use]
    pub fn is_due(&self, now: Duration) -> bool {
        let inner = self.lock();
        let fresh = !inner.fresh.is_empty();
        inner.all.values().any(|one| one.is_due(now, fresh))
    }

    /// Ends the epoch, and begins to send it to whoever is due ([`Recorder::is_due`]). To be called under the guest's lock. What it was is durable
    /// only after [`Replica::flush`]; then comes [`Recorder::settled`].
    ///
    /// # Errors
    /// When the medium fails.
    pub fn roll(&self, replica: &Replica, now: Duration, at_unix_ms: u64) -> Result<Stamp, VolumeError> {
        self.end_epoch(replica, now, at_unix_ms, None).map(|(epoch, _)| epoch)
    }

    /// As [`Recorder::roll`]; the epoch begins to go to this secondary, too, if it is ready, and bears the moment that other volumes' have. Whether it does. To
    /// be called under the locks of the guest's writes to all these volumes.
    ///
    /// # Errors
    /// When the medium fails.
    pub fn roll_with(
        &self,
        replica: &Replica,
        now: Duration,
        at_unix_ms: u64,
        with: (Subscriber, Option<Moment>),
    ) -> Result<bool, VolumeError> {
        self.end_epoch(replica, now, at_unix_ms, Some(with)).map(|(_, began)| began)
    }

    fn end_epoch(
        &self,
        replica: &Replica,
        now: Duration,
        at_unix_ms: u64,
        with: Option<(Subscriber, Option<Moment>)>,
    ) -> Result<(Stamp, bool), VolumeError> {
        let epoch = replica.end_epoch()?;
        let mut inner = self.lock();
        let fresh = std::mem::take(&mut inner.fresh);
        let mut began = false;
        for (id, one) in &mut inner.all {
            one.waiting.union(&fresh);
            let named = with.filter(|(named, _)| named == id && one.ready && one.image_held().is_some());
            if named.is_some() || one.is_due(now, false) {
                began |= named.is_some();
                (one.ready, one.asks, one.began) = (false, false, Some(beginning(now, one.every)));
                let moment = named.and_then(|(_, moment)| moment);
                one.under_way = Some((Complete { epoch, at_unix_ms, image: one.image, moment }, false));
                one.left = std::mem::take(&mut one.waiting);
            }
        }
        Ok((epoch, began))
    }

    /// What was written before the last roll is durable here: it may be sent.
    pub fn settled(&self) {
        for one in self.lock().all.values_mut() {
            if let Some((_, durable)) = &mut one.under_way {
                *durable = true;
            }
        }
    }

    /// The epoch that may be sent to a secondary now.
    pub(crate) fn sendable(&self, id: Subscriber) -> Option<Complete> {
        self.lock().all.get(&id)?.under_way.filter(|(_, durable)| *durable).map(|(epoch, _)| epoch)
    }

    /// Where an epoch was given up because more was overwritten than is kept: how much that is.
    pub(crate) fn overflown(&self, id: Subscriber) -> Option<Bytes> {
        self.lock().all.get(&id).filter(|one| one.overflown).map(|one| Bytes(one.most_kept * BLOCK))
    }

    /// Blocks to send, at most so many: kept ones first, since they take memory.
    pub(crate) fn take_kept(&self, id: Subscriber, most: usize) -> Vec<(u64, Kept)> {
        let mut inner = self.lock();
        let Some(one) = inner.all.get_mut(&id) else { return vec![] };
        std::iter::from_fn(|| one.kept.pop_first()).take(most).collect()
    }

    /// The next run to read, at most so many blocks.
    pub(crate) fn next_run(&self, id: Subscriber, cursor: u64, most: u64) -> Option<Range<u64>> {
        self.lock().all.get(&id)?.left.run_from(cursor, most)
    }

    /// A run was read, and looked at: it is sent, or comes with a later epoch.
    pub(crate) fn read(&self, id: Subscriber, run: Range<u64>) {
        if let Some(one) = self.lock().all.get_mut(&id) {
            one.left.remove(run);
        }
    }

    /// Whether nothing of the epoch under way is left to be sent.
    pub(crate) fn is_sent(&self, id: Subscriber) -> bool {
        self.lock().all.get(&id).is_some_and(|one| one.left.is_empty() && one.kept.is_empty() && !one.overflown)
    }

    /// The secondary has the epoch under way.
    pub(crate) fn completed(&self, id: Subscriber) {
        if let Some(one) = self.lock().all.get_mut(&id) {
            one.held = Some(one.under_way.take().map(|(epoch, _)| epoch));
            one.ready = true;
        }
    }

    /// Whether there is something that a secondary has not been sent: of ended epochs, or of the epoch of now.
    #[must_use]
    pub fn is_behind(&self, id: Subscriber) -> bool {
        let inner = self.lock();
        let has_all = |one: &One| one.waiting.is_empty() && one.left.is_empty() && one.kept.is_empty();
        inner.all.get(&id).is_some_and(|one| !(has_all(one) && inner.fresh.is_empty()))
    }

    /// How much that is, for a figure: the guest writes on while it is counted, so that what comes and goes meanwhile may or may not be in it. It takes
    /// longer the more there is, so it is nothing to ask for all the time, nor where nobody may wait.
    #[must_use]
    pub fn backlog(&self, id: Subscriber) -> Bytes {
        let (mut blocks, mut from) = (0, 0);
        loop {
            let began = Instant::now();
            let (found, next, kept) = {
                let inner = self.lock();
                let Some(one) = inner.all.get(&id) else { return Bytes(0) };
                let (found, next) = BlockSet::count_any([&one.waiting, &one.left, &inner.fresh], from, COUNTED);
                (found, next, one.kept.len() as u64)
            };
            blocks += found;
            let Some(next) = next else { return Bytes(blocks.max(kept) * BLOCK) };
            from = next;
            give_way(began);
        }
    }

    /// Blocks that are kept for all secondaries.
    #[must_use]
    pub fn kept(&self) -> Bytes {
        Bytes(self.lock().all.values().map(|one| one.kept.len() as u64).sum::<u64>() * BLOCK)
    }
}
