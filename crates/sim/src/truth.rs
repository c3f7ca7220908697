//! What the guest may find on its disk: the model that every replica is held to.
//!
//! Of each sector it knows what a flush made durable, what was written since, and whether a write was cut short that nobody
//! has answered. As long as neither power nor QEMU is lost, a guest finds the last write and nothing else.

use crate::media::{BLOCKS, SECTORS, Store};

/// One sector.
#[derive(Clone, Debug, Default)]
struct Sector {
    flushed: u64,
    /// Written since, in order.
    since: Vec<u64>,
    /// A write that was cut short: there or not.
    maybe: Option<u64>,
}

impl Sector {
    fn now(&self) -> u64 {
        self.since.last().copied().unwrap_or(self.flushed)
    }
}

/// The volume as the guest knows it.
#[derive(Clone, Debug)]
pub struct Truth {
    sectors: Vec<Sector>,
    /// Where the guest wrote last.
    pub home: usize,
    /// Power was lost there since.
    lossy: bool,
    /// A claim makes the volume what is found there, whatever is lost.
    reset: Option<usize>,
}

/// A sector that holds what it must not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wrong {
    /// The block.
    pub block: usize,
    /// What was found.
    pub found: u64,
    /// The last write.
    pub expected: u64,
}

impl Truth {
    /// All zeroes.
    #[must_use]
    pub fn new(home: usize) -> Self {
        Self { sectors: vec![Sector::default(); BLOCKS * SECTORS], home, lossy: false, reset: None }
    }

    /// A write was done.
    pub fn wrote(&mut self, sectors: std::ops::Range<usize>, value: u64) {
        for sector in &mut self.sectors[sectors] {
            sector.since.push(value);
            sector.maybe = None;
        }
    }

    /// A write was cut short.
    pub fn tried(&mut self, sectors: std::ops::Range<usize>, value: u64) {
        for sector in &mut self.sectors[sectors] {
            sector.maybe = Some(value);
        }
    }

    /// What was written is durable where the guest is.
    pub fn flushed(&mut self) {
        for sector in &mut self.sectors {
            sector.flushed = sector.now();
            sector.since.clear();
        }
    }

    /// A site loses its power.
    pub fn lost_power(&mut self, site: usize) {
        self.lossy |= site == self.home;
    }

    /// What a guest must find now.
    pub fn now(&self) -> Vec<u64> {
        self.sectors.iter().map(Sector::now).collect()
    }

    /// Whether a site holds the volume as it is.
    #[must_use]
    pub fn is_at(&self, store: &Store) -> bool {
        !self.lossy && store.contents(|found| found.iter().zip(&self.sectors).all(|(f, s)| *f == s.now()))
    }

    /// The operator lets a site go on with what it has.
    pub fn reset_at(&mut self, site: usize) {
        self.reset = Some(site);
    }

    /// Looks at blocks through the eyes of a guest that runs.
    ///
    /// # Errors
    /// The first sector that is wrong.
    pub fn check(&self, blocks: std::ops::Range<usize>, found: &[u64]) -> Result<(), Wrong> {
        let first = blocks.start * SECTORS;
        for (i, found) in found.iter().enumerate() {
            let sector = &self.sectors[first + i];
            if *found != sector.now() && Some(*found) != sector.maybe {
                return Err(Wrong { block: (first + i) / SECTORS, found: *found, expected: sector.now() });
            }
        }
        Ok(())
    }

    /// A guest begins to run at a site, with its RAM or afresh: what it finds is the volume from now on.
    ///
    /// # Errors
    /// The first sector that it must not find.
    pub fn begins_at(&mut self, site: usize, store: &Store) -> Result<(), Wrong> {
        let any = self.reset.take_if(|reset| *reset == site).is_some();
        let found = store.contents(<[u64]>::to_vec);
        let (lossy, mut after) = (self.lossy || any, if self.lossy || any { store.histories() } else { vec![] });
        for (i, (sector, found)) in self.sectors.iter_mut().zip(found).enumerate() {
            let now = sector.now();
            let possible = found == now
                || Some(found) == sector.maybe
                || (self.lossy && (found == sector.flushed || sector.since.contains(&found)));
            if !any && !possible {
                return Err(Wrong { block: i / SECTORS, found, expected: now });
            }
            if lossy {
                let (durable, written) = std::mem::take(&mut after[i]);
                sector.since = written;
                sector.flushed = durable;
            } else if found != now {
                sector.since.push(found);
            }
            sector.maybe = None;
        }
        self.lossy = false;
        self.home = site;
        Ok(())
    }
}
