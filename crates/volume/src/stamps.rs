//! The table of stamps: eight bytes a block in a sparse file, and one as a rule in memory for what was touched.
//!
//! An entry is 0 for a block that was never written, else the owner's index and the epoch. A chunk of the table covers one region,
//! which is also the unit of being hot.

use crate::entries::Entries;
use crate::file::Medium;
use crate::per_region::PerRegion;
use std::io;
use std::ops::Range;
use std::sync::Arc;

/// Blocks of a region: 4 MiB of disk, two pages of table.
pub const REGION: u64 = 1024;
/// Regions that are looked at under one lock, where many are: 1 GiB of disk, and a guest's write waits for 2 MiB of table to be read.
pub(crate) const WINDOW: u64 = 256;
const ENTRY: u64 = 8;

/// A block's entry, not 0: owner's index and epoch.
pub(crate) const fn entry(owner: u32, epoch: u32) -> u64 {
    ((owner as u64) << 32) | epoch as u64
}

/// The entry of what no replica holds but one where a write has failed: its owner's, in an epoch before all others, since each opening begins one.
pub(crate) const fn nobodys(entry: u64) -> u64 {
    entry & !0xffff_ffff
}

/// One block more, behind those of the runs; 0 is none.
pub(crate) fn push(runs: &mut Vec<(Range<u64>, u64)>, block: u64, entry: u64) {
    match runs.last_mut() {
        _ if entry == 0 => {}
        Some((run, last)) if run.end == block && *last == entry => run.end += 1,
        _ => runs.push((block..block + 1, entry)),
    }
}

#[derive(Debug)]
struct Chunk {
    entries: Entries,
    dirty: bool,
}

/// The table.
#[derive(Debug)]
pub(crate) struct Stamps {
    medium: Arc<dyn Medium>,
    blocks: u64,
    /// Blocks of a region.
    pub region: u64,
    chunks: PerRegion<Chunk>,
    /// Regions whose entries are counted ([`Stamps::count_on`]), from the first one on.
    counted: u64,
    /// How many entries of those are not 0.
    written: u64,
}

impl Stamps {
    pub fn new(medium: Box<dyn Medium>, blocks: u64, region: u64) -> Self {
        Self { medium: medium.into(), blocks, region, chunks: PerRegion::default(), counted: 0, written: 0 }
    }

    fn chunk(&mut self, region: u64) -> io::Result<&mut Chunk> {
        let (bytes_of, medium) = (self.region * ENTRY, &self.medium);
        self.chunks.or_make(region, || {
            let mut bytes = vec![0; bytes_of as usize];
            medium.read(region * bytes_of, &mut bytes)?;
            Ok(Chunk { entries: Entries::of_bytes(&bytes), dirty: false })
        })
    }

    /// The entries of a region's blocks.
    pub fn entries(&mut self, region: u64) -> io::Result<&Entries> {
        Ok(&self.chunk(region)?.entries)
    }

    pub fn get(&mut self, block: u64) -> io::Result<u64> {
        let within = (block % self.region) as usize;
        Ok(self.chunk(block / self.region)?.entries.get(within))
    }

    pub fn set(&mut self, blocks: Range<u64>, entry: u64) -> io::Result<()> {
        let (mut at, each) = (blocks.start, self.region);
        while at < blocks.end {
            let (region, within) = (at / each, at % each);
            let end = blocks.end.min((region + 1) * each);
            let counted = region < self.counted;
            let chunk = self.chunk(region)?;
            let within = within as usize..(within + end - at) as usize;
            let before = if counted { chunk.entries.written(within.clone()) as u64 } else { 0 };
            chunk.entries.fill(within, entry);
            chunk.dirty = true;
            if counted {
                self.written = self.written - before + if entry == 0 { 0 } else { end - at };
            }
            at = end;
        }
        Ok(())
    }

    /// These blocks are not what their entries say any more, as far as they have any: they become [`nobodys`].
    pub fn doubt(&mut self, blocks: Range<u64>) -> io::Result<()> {
        for block in blocks {
            let entry = self.get(block)?;
            if entry != 0 {
                self.set(block..block + 1, nobodys(entry))?;
            }
        }
        Ok(())
    }

    /// Counts the entries that are not 0, in so many regions more; how many there are, once all are counted. It reads each region once and keeps
    /// none in memory; from then on [`Stamps::set`] keeps the figure right.
    pub fn count_on(&mut self, regions: u64) -> io::Result<Option<u64>> {
        let (all, each) = (self.blocks.div_ceil(self.region), self.region * ENTRY);
        if self.counted < all {
            let end = all.min(self.counted.saturating_add(regions));
            let (mut found, mut bytes) = (0, vec![0; each as usize]);
            for region in self.perhaps_written(self.counted..end)? {
                found += match self.chunks.get(region) {
                    Some(chunk) => chunk.entries.written(0..self.region as usize),
                    None => {
                        self.medium.read(region * each, &mut bytes)?;
                        bytes.as_chunks::<8>().0.iter().filter(|e| **e != [0; 8]).count()
                    }
                };
            }
            (self.counted, self.written) = (end, self.written + found as u64);
        }
        Ok((self.counted == all).then_some(self.written))
    }

    /// Gives every block whose entry is at least `from` another one; whether there was any.
    pub fn replace(&mut self, from: u64, entry: u64) -> io::Result<bool> {
        let all = self.regions()?;
        self.replace_in(&all, from, entry)
    }

    /// The same, in these regions.
    pub fn replace_in(&mut self, regions: &[u64], from: u64, entry: u64) -> io::Result<bool> {
        let mut any = false;
        for (run, _) in self.runs_in(regions)?.into_iter().filter(|(_, e)| *e >= from) {
            self.set(run, entry)?;
            any = true;
        }
        Ok(any)
    }

    /// Where they lie: to be synced without whoever holds this waiting.
    pub fn medium(&self) -> Arc<dyn Medium> {
        self.medium.clone()
    }

    /// Writes what changed of some regions. They count as changed until [`Stamps::is_durable`].
    pub fn write(&self, regions: &[u64]) -> io::Result<()> {
        let chunks = regions.iter().filter_map(|r| Some((*r, self.chunks.get(*r)?)));
        for (region, chunk) in chunks.filter(|(_, c)| c.dirty) {
            self.medium.write(region * self.region * ENTRY, &chunk.entries.bytes())?;
        }
        Ok(())
    }

    /// What [`Stamps::write`] wrote of a region was synced, and nothing has changed since.
    pub fn is_durable(&mut self, region: u64) {
        if let Some(chunk) = self.chunks.get_mut(region) {
            chunk.dirty = false;
        }
    }

    /// Whether something changed that may not be durable.
    pub fn has_dirty(&self) -> bool {
        self.chunks.iter().any(|(_, chunk)| chunk.dirty)
    }

    /// Writes what changed, durably.
    pub fn persist(&mut self) -> io::Result<()> {
        self.write_back()?;
        self.medium.sync()?;
        self.chunks.values_mut().for_each(|c| c.dirty = false);
        Ok(())
    }

    /// The same, of these regions.
    pub fn persist_in(&mut self, regions: &[u64]) -> io::Result<()> {
        self.write(regions)?;
        self.medium.sync()?;
        regions.iter().for_each(|region| self.is_durable(*region));
        Ok(())
    }

    /// Writes what changed: it survives the process, and a loss of power when [`Stamps::persist`] was called after it.
    pub fn write_back(&mut self) -> io::Result<()> {
        for (region, chunk) in self.chunks.iter().filter(|(_, c)| c.dirty) {
            self.medium.write(region * self.region * ENTRY, &chunk.entries.bytes())?;
        }
        Ok(())
    }

    /// Writes the regions of these blocks, as [`Stamps::write_back`] does.
    pub fn write_through(&mut self, blocks: Range<u64>) -> io::Result<()> {
        let regions = blocks.start / self.region..blocks.end.div_ceil(self.region);
        for (region, chunk) in self.chunks.range(regions).filter(|(_, c)| c.dirty) {
            self.medium.write(region * self.region * ENTRY, &chunk.entries.bytes())?;
        }
        Ok(())
    }

    /// Every entry becomes 0, durably.
    pub fn clear(&mut self) -> io::Result<()> {
        self.chunks = PerRegion::default();
        (self.counted, self.written) = (0, 0);
        self.medium.punch(0, self.blocks.div_ceil(self.region) * self.region * ENTRY)?;
        self.medium.sync()
    }

    /// All entries that are not 0, as runs of blocks with the same one, in order.
    pub fn runs(&mut self) -> io::Result<Vec<(Range<u64>, u64)>> {
        let all = self.regions()?;
        self.runs_in(&all)
    }

    /// The same, of these regions, which are in order.
    pub fn runs_in(&mut self, regions: &[u64]) -> io::Result<Vec<(Range<u64>, u64)>> {
        let mut runs = vec![];
        for region in regions {
            let start = region * self.region;
            for (block, entry) in (start..).zip(self.entries(*region)?.iter()) {
                push(&mut runs, block, entry);
            }
        }
        Ok(runs)
    }

    /// The regions that may have an entry that is not 0, in order: what is on the disk lies where the file is not a hole.
    pub fn regions(&self) -> io::Result<Vec<u64>> {
        self.perhaps_written(0..self.blocks.div_ceil(self.region))
    }

    /// The blocks of a range whose entry is not 0, as runs in order. What was never written takes no memory.
    pub fn written(&mut self, blocks: Range<u64>) -> io::Result<Vec<Range<u64>>> {
        let mut runs: Vec<Range<u64>> = vec![];
        for region in self.perhaps_written(blocks.start / self.region..blocks.end.div_ceil(self.region))? {
            let start = region * self.region;
            let chunk = self.chunk(region)?;
            for (block, _) in (start..).zip(chunk.entries.iter()).filter(|(_, entry)| *entry != 0) {
                match runs.last_mut() {
                    _ if !blocks.contains(&block) => {}
                    Some(run) if run.end == block => run.end += 1,
                    _ => runs.push(block..block + 1),
                }
            }
        }
        Ok(runs)
    }

    /// Those of these regions that may have an entry that is not 0, in order.
    fn perhaps_written(&self, regions: Range<u64>) -> io::Result<Vec<u64>> {
        let each = self.region * ENTRY;
        let (mut at, mut found) = (regions.start * each, vec![]);
        for (length, hole) in self.medium.extents(at, (regions.end - regions.start) * each)? {
            if !hole {
                found.extend(at / each..(at + length).div_ceil(each));
            }
            at += length;
        }
        found.extend(self.chunks.range(regions).map(|(region, _)| region));
        found.sort_unstable();
        found.dedup();
        Ok(found)
    }

    /// Chunks in memory.
    #[cfg(test)]
    pub fn in_memory(&self) -> usize {
        self.chunks.len()
    }
}
