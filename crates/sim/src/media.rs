//! What a simulated replica lies on: a disk with a write cache, and a fuse.
//!
//! A process that dies keeps what it wrote. A loss of power leaves of what was not synced any part, sector by sector. Either
//! may strike in the middle of what a replica does: the fuse counts the operations that still succeed; the one at which it
//! blows is done in part, and nothing succeeds after it until the world has taken note.

use godwit_volume::{Description, Media, Medium};
use rand::Rng;
use rand::rngs::SmallRng;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Blocks of the volume.
pub const BLOCKS: usize = 48;
/// Bytes of a sector: what a disk writes whole.
pub const SECTOR: usize = 512;
/// Sectors of a block.
pub const SECTORS: usize = 8;
/// Blocks of a region: so that a volume this small has several.
const REGION: usize = 16;
/// Bytes of the table of stamps that are written whole. Less than a sector, as a region is less than on a real disk.
const STAMPS_ATOM: usize = 64;

/// Atoms that are written whole, and a cache in front of them.
#[derive(Debug)]
struct Cached<T> {
    now: Vec<T>,
    durable: Vec<T>,
    /// Since the last sync, in order.
    pending: Vec<(usize, T)>,
}

impl<T: Copy> Cached<T> {
    fn new(atoms: usize, zero: T) -> Self {
        Self { now: vec![zero; atoms], durable: vec![zero; atoms], pending: vec![] }
    }

    /// Has so many atoms, or more.
    fn grow(&mut self, atoms: usize, zero: T) {
        if self.now.len() < atoms {
            self.now.resize(atoms, zero);
            self.durable.resize(atoms, zero);
        }
    }

    fn put(&mut self, at: usize, atom: T) {
        self.now[at] = atom;
        self.pending.push((at, atom));
    }

    fn sync(&mut self) {
        for (at, atom) in self.pending.drain(..) {
            self.durable[at] = atom;
        }
    }

    fn lose_power(&mut self, rng: &mut SmallRng, percent: u32) {
        for (at, atom) in self.pending.drain(..) {
            if rng.random_ratio(percent, 100) {
                self.durable[at] = atom;
            }
        }
        self.now.clone_from(&self.durable);
    }
}

#[derive(Debug)]
struct Inner {
    /// A sector is one number, repeated.
    data: Cached<u64>,
    stamps: Cached<[u8; STAMPS_ATOM]>,
    hot: Cached<u8>,
    words: Cached<[u8; STAMPS_ATOM]>,
    /// As long as what was written to it.
    journal: Cached<[u8; SECTOR]>,
    /// How often the power came on.
    power: u64,
    description: Vec<u8>,
    /// Operations that still succeed.
    fuse: Option<u32>,
    /// How much of the last one is done.
    torn: usize,
    blown: bool,
}

impl Inner {
    /// How many of an operation's atoms are written.
    fn spend(&mut self, atoms: usize) -> Result<usize, usize> {
        if self.blown {
            return Err(0);
        }
        match &mut self.fuse {
            None => Ok(atoms),
            Some(0) => {
                self.blown = true;
                self.fuse = None;
                Err(self.torn % (atoms + 1))
            }
            Some(left) => {
                *left -= 1;
                Ok(atoms)
            }
        }
    }
}

/// One site's disk. It outlives the node's process.
#[derive(Clone, Debug)]
pub struct Store(Arc<Mutex<Inner>>);

#[derive(Clone, Copy, Debug)]
enum Part {
    Data,
    Stamps,
    Hot,
    Words,
}

#[derive(Debug)]
struct File {
    store: Store,
    part: Part,
}

fn gone() -> io::Error {
    io::Error::other("the simulator ended the process or its power")
}

impl Store {
    /// An empty disk.
    #[must_use]
    pub fn new() -> Self {
        Self(Arc::new(Mutex::new(Inner {
            data: Cached::new(BLOCKS * SECTORS, 0),
            stamps: Cached::new(BLOCKS * 8 / STAMPS_ATOM, [0; STAMPS_ATOM]),
            hot: Cached::new(BLOCKS / REGION, 0),
            words: Cached::new(BLOCKS * 8 / STAMPS_ATOM, [0; STAMPS_ATOM]),
            journal: Cached::new(0, [0; SECTOR]),
            power: 1,
            description: vec![],
            fuse: None,
            torn: 0,
            blown: false,
        })))
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// As a replica needs it.
    #[must_use]
    pub fn media(&self) -> Media {
        let file = |part| Box::new(File { store: self.clone(), part });
        Media {
            data: file(Part::Data),
            stamps: file(Part::Stamps),
            hot: file(Part::Hot),
            words: file(Part::Words),
            power: self.lock().power.to_string(),
            description: Box::new(self.clone()),
            region: REGION as u64,
        }
    }

    /// What a secondary that keeps an image puts aside, beside its replica.
    #[must_use]
    pub fn journal(&self) -> Box<dyn Medium> {
        Box::new(Aside(self.clone()))
    }

    /// After so many operations more, the next one is cut short.
    pub fn arm(&self, operations: u32, torn: usize) {
        let mut inner = self.lock();
        inner.fuse = Some(operations);
        inner.torn = torn;
    }

    /// Takes the fuse out.
    pub fn disarm(&self) {
        self.lock().fuse = None;
    }

    /// Whether the fuse blew, and nothing succeeds any more.
    #[must_use]
    pub fn is_blown(&self) -> bool {
        self.lock().blown
    }

    /// The process has ended; what it wrote is there.
    pub fn lose_process(&self) {
        let mut inner = self.lock();
        inner.blown = false;
        inner.fuse = None;
    }

    /// Power has failed: of what was not synced so much in a hundred is there.
    pub fn lose_power(&self, rng: &mut SmallRng) {
        let percent = [0, 30, 50, 90, 100][rng.random_range(0..5)];
        let inner = &mut *self.lock();
        inner.blown = false;
        inner.fuse = None;
        inner.data.lose_power(rng, percent);
        inner.stamps.lose_power(rng, percent);
        inner.hot.lose_power(rng, percent);
        inner.words.lose_power(rng, percent);
        inner.journal.lose_power(rng, percent);
        inner.power += 1;
    }

    /// Another disk, as this one would be found after a loss of power that took all that was not synced.
    #[must_use]
    pub fn without_power(&self) -> Self {
        let here = self.lock();
        let other = Self::new();
        let mut there = other.lock();
        there.data.now.clone_from(&here.data.durable);
        there.data.durable.clone_from(&here.data.durable);
        there.stamps.now.clone_from(&here.stamps.durable);
        there.stamps.durable.clone_from(&here.stamps.durable);
        there.hot.now.clone_from(&here.hot.durable);
        there.hot.durable.clone_from(&here.hot.durable);
        there.words.now.clone_from(&here.words.durable);
        there.words.durable.clone_from(&here.words.durable);
        there.power = here.power + 1;
        there.description.clone_from(&here.description);
        drop(there);
        other
    }

    /// What each sector holds.
    pub fn contents<T>(&self, look: impl FnOnce(&[u64]) -> T) -> T {
        look(&self.lock().data.now)
    }

    /// Of each sector what is durable, and what was written since, in order.
    #[must_use]
    pub fn histories(&self) -> Vec<(u64, Vec<u64>)> {
        let inner = self.lock();
        let mut histories: Vec<_> = inner.data.durable.iter().map(|durable| (*durable, vec![])).collect();
        for (at, atom) in &inner.data.pending {
            histories[*at].1.push(*atom);
        }
        histories
    }
}

impl Default for Store {
    fn default() -> Self {
        Self::new()
    }
}

impl Description for Store {
    fn load(&self) -> io::Result<Vec<u8>> {
        Ok(self.lock().description.clone())
    }

    fn store(&self, bytes: &[u8]) -> io::Result<()> {
        let mut inner = self.lock();
        let spent = inner.spend(1);
        if spent == Ok(1) || spent == Err(1) {
            inner.description = bytes.to_vec();
        }
        spent.map(drop).map_err(|_| gone())
    }
}

/// The number that a sector consists of.
fn tag(sector: &[u8]) -> u64 {
    let (words, rest) = sector.as_chunks::<8>();
    assert!(rest.is_empty() && words.iter().all(|w| *w == words[0]), "a sector that nobody wrote");
    u64::from_le_bytes(words[0])
}

impl File {
    fn put(&self, at: u64, length: usize, byte: impl Fn(usize) -> u8, sector: impl Fn(usize) -> u64) -> io::Result<()> {
        let inner = &mut *self.store.lock();
        let at = usize::try_from(at).map_err(io::Error::other)?;
        let size = match self.part {
            Part::Data => SECTOR,
            Part::Stamps | Part::Words => STAMPS_ATOM,
            Part::Hot => 1,
        };
        assert!(at.is_multiple_of(size) && length.is_multiple_of(size), "what is written lies on whole atoms");
        let spent = inner.spend(length / size);
        for i in 0..spent.unwrap_or_else(|part| part) {
            let atom = at / size + i;
            match self.part {
                Part::Data => inner.data.put(atom, sector(i)),
                Part::Stamps => inner.stamps.put(atom, std::array::from_fn(|n| byte(i * STAMPS_ATOM + n))),
                Part::Words => inner.words.put(atom, std::array::from_fn(|n| byte(i * STAMPS_ATOM + n))),
                Part::Hot => inner.hot.put(atom, byte(i)),
            }
        }
        spent.map(drop).map_err(|_| gone())
    }
}

impl Medium for File {
    fn read(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        let inner = self.store.lock();
        let at = usize::try_from(at).map_err(io::Error::other)?;
        match self.part {
            Part::Data => {
                for (i, sector) in into.chunks_mut(SECTOR).enumerate() {
                    let word = inner.data.now[at / SECTOR + i].to_le_bytes();
                    sector.as_chunks_mut::<8>().0.fill(word);
                }
            }
            Part::Stamps => into.copy_from_slice(&inner.stamps.now.as_flattened()[at..at + into.len()]),
            Part::Words => into.copy_from_slice(&inner.words.now.as_flattened()[at..at + into.len()]),
            Part::Hot => into.copy_from_slice(&inner.hot.now[at..at + into.len()]),
        }
        Ok(())
    }

    fn write(&self, at: u64, from: &[u8]) -> io::Result<()> {
        self.put(at, from.len(), |i| from[i], |i| tag(&from[i * SECTOR..(i + 1) * SECTOR]))
    }

    fn punch(&self, at: u64, length: u64) -> io::Result<()> {
        self.put(at, usize::try_from(length).map_err(io::Error::other)?, |_| 0, |_| 0)
    }

    fn sync(&self) -> io::Result<()> {
        let inner = &mut *self.store.lock();
        inner.spend(0).map_err(|_| gone())?;
        match self.part {
            Part::Data => inner.data.sync(),
            Part::Stamps => inner.stamps.sync(),
            Part::Hot => inner.hot.sync(),
            Part::Words => inner.words.sync(),
        }
        Ok(())
    }

    fn extents(&self, _at: u64, length: u64) -> io::Result<Vec<(u64, bool)>> {
        Ok(vec![(length, false)])
    }

    fn allocated(&self) -> u64 {
        0
    }
}

/// A file of a journal's, whose records end anywhere: what lies beside them in a sector is written again with them.
#[derive(Debug)]
struct Aside(Store);

impl Aside {
    fn put(&self, at: u64, length: usize, byte: impl Fn(usize) -> u8) -> io::Result<()> {
        let inner = &mut *self.0.lock();
        let at = usize::try_from(at).map_err(io::Error::other)?;
        let sectors = at / SECTOR..(at + length).div_ceil(SECTOR);
        inner.journal.grow(sectors.end, [0; SECTOR]);
        let spent = inner.spend(sectors.len());
        for sector in sectors.take(spent.unwrap_or_else(|part| part)) {
            let before = inner.journal.now[sector];
            let written = |n: usize| (sector * SECTOR + n).checked_sub(at).filter(|i| *i < length);
            inner.journal.put(sector, std::array::from_fn(|n| written(n).map_or(before[n], &byte)));
        }
        spent.map(drop).map_err(|_| gone())
    }
}

impl Medium for Aside {
    fn read(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        let inner = self.0.lock();
        let at = usize::try_from(at).map_err(io::Error::other)?;
        let held = inner.journal.now.as_flattened();
        let held = &held[held.len().min(at)..held.len().min(at + into.len())];
        into[..held.len()].copy_from_slice(held);
        into[held.len()..].fill(0);
        Ok(())
    }

    fn write(&self, at: u64, from: &[u8]) -> io::Result<()> {
        self.put(at, from.len(), |i| from[i])
    }

    fn punch(&self, at: u64, length: u64) -> io::Result<()> {
        self.put(at, usize::try_from(length).map_err(io::Error::other)?, |_| 0)
    }

    fn sync(&self) -> io::Result<()> {
        let inner = &mut *self.0.lock();
        inner.spend(0).map_err(|_| gone())?;
        inner.journal.sync();
        Ok(())
    }

    fn extents(&self, _at: u64, length: u64) -> io::Result<Vec<(u64, bool)>> {
        Ok(vec![(length, false)])
    }

    fn allocated(&self) -> u64 {
        0
    }
}
