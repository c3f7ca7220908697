//! In which order a fill brings blocks (vMocity, section 2.2): as guests read them first, then what lies beside recent reads, then
//! what was written longest ago.
//!
//! The order of first accesses is recorded by whoever serves the guest: what the fill, a mirror or a fetch reads is never told to
//! [`FirstAccess`]. It is kept with the volume, and goes with it to its next host, whichever way the blocks go ([`crate::mirror`],
//! [`crate::fet`]). It is a hint: a list that is lost, cut off or wrong costs time, never contents.

use crate::blocks::{BLOCK, BlockSet};
use crate::error::{VolumeError, io_error};
use crate::file::{Description, DescriptionFile};
use crate::replica::Replica;
use crate::shadow::Version;
use crate::walk::Aging;
use godwit_units::BlockIndex;
use std::collections::VecDeque;
use std::ops::Range;
use std::path::Path;

/// Runs of an order: 1 MiB on the wire. A boot of Debian reads some thousand.
pub const MOST_RUNS: usize = 1 << 16;
/// Bytes of one piece of it, on the wire.
const PIECE: usize = 64 << 10;
/// Bytes of the longest one that is kept.
const LONGEST: usize = MOST_RUNS * 16;
/// Recent reads that are remembered: what one guest does at the same time, in a few places.
const MOST_RECENT: usize = 32;
/// What is brought behind a recent read: 1 MiB, which a Linux guest reads ahead within some requests.
const BESIDE: u64 = (1 << 20) / BLOCK;
/// Runs by age that are known at once; then they are looked up again.
const MOST_AGED: usize = 1 << 16;

/// The order in which a guest has read or written blocks for the first time.
#[derive(Debug, Default)]
pub struct FirstAccess {
    seen: BlockSet,
    runs: Vec<Range<u64>>,
    fresh: bool,
}

/// An order that is to be stored: nobody who reads or writes waits for that.
#[derive(Debug)]
pub struct Fresh(Vec<u8>);

impl Fresh {
    /// Stores it in a replica's folder.
    ///
    /// # Errors
    /// When the medium fails. What was added is stored with what is added next.
    pub fn store(&self, folder: &Path) -> Result<(), VolumeError> {
        let path = folder.join("order");
        DescriptionFile(path.clone()).store(&self.0).map_err(io_error("write", &path))
    }
}

impl FirstAccess {
    /// As it was stored in a replica's folder; an empty one when there is none, or none that makes sense.
    #[must_use]
    pub fn load(folder: &Path) -> Self {
        let bytes = DescriptionFile(folder.join("order")).load().unwrap_or_default();
        Self { fresh: false, ..Self::told(decode(&bytes)) }
    }

    /// As another site recorded it.
    #[must_use]
    pub fn told(runs: Vec<Range<u64>>) -> Self {
        let mut seen = BlockSet::default();
        // A run that makes no sense must not become a large set.
        let sensible = |run: &Range<u64>| run.start <= run.end && run.end - run.start <= crate::stamps::REGION;
        let runs: Vec<_> = runs.into_iter().filter(sensible).take(MOST_RUNS).collect();
        runs.iter().for_each(|run| seen.insert(run.clone()));
        Self { seen, runs, fresh: true }
    }

    /// What is to be stored, if anything was added since it was asked for last.
    #[must_use]
    pub fn take_fresh(&mut self) -> Option<Fresh> {
        std::mem::take(&mut self.fresh).then(|| Fresh(encode(&self.runs)))
    }

    /// The guest has read or written these blocks.
    pub fn touched(&mut self, blocks: Range<u64>) {
        for block in blocks {
            if self.seen.contains(BlockIndex(block)) {
                continue;
            }
            let full = self.runs.len() >= MOST_RUNS;
            match self.runs.last_mut() {
                Some(run) if run.end == block && run.end - run.start < crate::stamps::REGION => run.end += 1,
                _ if full => return,
                _ => self.runs.push(block..block + 1),
            }
            self.seen.insert(block..block + 1);
            self.fresh = true;
        }
    }

    /// The runs, the first one first.
    #[must_use]
    pub fn runs(&self) -> &[Range<u64>] {
        &self.runs
    }

    /// Whether there was room for all that was touched. What was touched before anybody recorded it is not known.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.runs.len() < MOST_RUNS
    }

    /// What was recorded elsewhere comes before what was recorded here.
    #[must_use]
    pub fn after(self, mut before: Self) -> Self {
        before.fresh |= self.fresh;
        self.runs.into_iter().for_each(|run| before.touched(run));
        before
    }
}

/// Runs, for a file or for messages.
fn encode(runs: &[Range<u64>]) -> Vec<u8> {
    let words = |run: &Range<u64>| [run.start.to_le_bytes(), (run.end - run.start).to_le_bytes()];
    runs.iter().take(MOST_RUNS).flat_map(words).flatten().collect()
}

/// An order for another site, in messages of this kind.
pub(crate) fn pieces(kind: u8, runs: &[Range<u64>]) -> VecDeque<Vec<u8>> {
    encode(runs).chunks(PIECE).map(|piece| [&[kind][..], piece].concat()).collect()
}

/// An order that comes from another site, piece by piece.
#[derive(Debug, Default)]
pub(crate) struct Coming(Vec<u8>);

impl Coming {
    /// The next piece. It is a hint: not worth a digest, nor more memory than the longest one takes.
    pub fn push(&mut self, piece: &[u8]) {
        if self.0.len() + piece.len() <= LONGEST {
            self.0.extend(piece);
        }
    }

    /// What has come.
    pub fn runs(&self) -> Vec<Range<u64>> {
        decode(&self.0)
    }
}

/// Runs from a file or from messages; what makes no sense ends them.
fn decode(bytes: &[u8]) -> Vec<Range<u64>> {
    let (pairs, _) = bytes.as_chunks::<16>();
    let word = |pair: &[u8; 16], at: usize| u64::from_le_bytes(std::array::from_fn(|i| pair[at + i]));
    let runs = pairs.iter().map_while(|pair| {
        let (first, count) = (word(pair, 0), word(pair, 8));
        first.checked_add(count).filter(|_| count > 0).map(|end| first..end)
    });
    runs.take(MOST_RUNS).collect()
}

/// What to bring next.
#[derive(Debug, Default)]
pub struct FillOrder {
    recorded: VecDeque<Range<u64>>,
    recent: VecDeque<u64>,
    aged: VecDeque<Range<u64>>,
    /// The next ones are being looked for.
    aging: Option<Aging>,
}

/// What an order says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    /// To be brought.
    Bring(Version),
    /// A part of what is absent was looked at; there is more. Whoever else waits for the replica, or for whoever asks, has a turn now.
    Looked,
    /// Nothing is left that is free.
    Nothing,
}

impl FillOrder {
    /// A fill that begins, with the order of first accesses that the source sent ahead.
    #[must_use]
    pub fn new(recorded: Vec<Range<u64>>) -> Self {
        Self { recorded: recorded.into(), ..Self::default() }
    }

    /// The guest has read these blocks, and they had to be fetched.
    pub fn read(&mut self, blocks: &Range<u64>) {
        self.recent.retain(|end| *end != blocks.start);
        if self.recent.len() >= MOST_RECENT {
            self.recent.pop_front();
        }
        self.recent.push_back(blocks.end);
    }

    /// The next run that is absent and `free`, at most `most` blocks of one version.
    ///
    /// # Errors
    /// When the replica cannot be read.
    pub fn next(
        &mut self,
        replica: &Replica,
        most: u64,
        free: impl Fn(&Version, u64) -> bool,
    ) -> Result<Next, VolumeError> {
        let look = Look { replica, most, free };
        if let Some(found) = look.first(&mut self.recorded)? {
            return Ok(Next::Bring(found));
        }
        // The last read first.
        while let Some(end) = self.recent.back().copied() {
            if let Some(found) = look.within(&mut (end..end.saturating_add(BESIDE)))? {
                return Ok(Next::Bring(found));
            }
            self.recent.pop_back();
        }
        if let Some(found) = look.first(&mut self.aged)? {
            return Ok(Next::Bring(found));
        }
        let aging = match &mut self.aging {
            Some(aging) => aging,
            None => self.aging.insert(replica.begin_aging()?),
        };
        let Some(aged) = replica.age(aging, MOST_AGED)? else { return Ok(Next::Looked) };
        self.aging = None;
        self.aged = aged.into();
        Ok(look.first(&mut self.aged)?.map_or(Next::Nothing, Next::Bring))
    }
}

struct Look<'a, F> {
    replica: &'a Replica,
    most: u64,
    free: F,
}

impl<F: Fn(&Version, u64) -> bool> Look<'_, F> {
    /// The first that is absent and free of these runs, which begin behind it then.
    fn first(&self, runs: &mut VecDeque<Range<u64>>) -> Result<Option<Version>, VolumeError> {
        while let Some(run) = runs.front_mut() {
            if let Some(found) = self.within(run)? {
                return Ok(Some(found));
            }
            runs.pop_front();
        }
        Ok(None)
    }

    /// The same of a run.
    fn within(&self, run: &mut Range<u64>) -> Result<Option<Version>, VolumeError> {
        run.end = run.end.min(self.replica.size().0 / BLOCK);
        while run.start < run.end {
            // A little at a time: a run may be the whole volume.
            let window = run.start..run.end.min(run.start + BESIDE);
            for mut found in self.replica.wanted(window.clone())? {
                let Some(start) = found.blocks.clone().find(|b| (self.free)(&found, *b)) else { continue };
                let more = (start + 1..found.blocks.end.min(start + self.most)).take_while(|b| (self.free)(&found, *b));
                let end = more.last().unwrap_or(start) + 1;
                run.start = end;
                found.blocks = start..end;
                return Ok(Some(found));
            }
            run.start = window.end;
        }
        Ok(None)
    }
}

#[cfg(test)]
#[path = "order_tests.rs"]
mod tests;
