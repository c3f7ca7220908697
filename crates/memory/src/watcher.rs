//! What a guest does to its memory, seen from outside, without a migration: which pages change, and what is in them.
//!
//! The guest's RAM is a file that QEMU shares with whoever may open it. A [`Watcher`] reads it again and again and compares each page's
//! hash with the one before; a [`Sampler`] keeps a few pages, to tell what the codec would make of them.
//!
//! # What can go wrong
//!
//! *It sees changes, not writes.* A page that is written and holds afterwards what it held is not seen. For bytes on a WAN that does not
//! matter, since the encoder leaves such a page out; a hypervisor's own dirty log has more pages. *A page is read while the guest writes to
//! it*: its hash is then of neither version, and the next look finds it changed once more. *Looking costs*: memory is read as
//! fast as it can be; whoever looks decides how often.

use crate::config::Config;
use crate::record::PAGE_SIZE;
use crate::witness::{Sum, data_from};
use godwit_units::Bytes;
use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::time::Duration;

/// Read at once: enough to make calls cheap, and it stays in the processor's cache.
const CHUNK: usize = 256 * PAGE_SIZE;
/// Pages of a run that is sampled: zstd finds in a page's neighbours what it would find there in a stream.
const RUN: u64 = 64;
/// Runs that are sampled: 8 MiB, some 30 ms of a processor.
const RUNS: u64 = 32;
/// Pages whose next version is waited for: 4 MiB.
const AWAITED: usize = 1024;
/// Pairs of versions that are kept: 8 MiB.
const PAIRS: usize = 1024;
/// Pages of a glance, at the most: 16 MiB, some ten milliseconds of a processor.
const GLANCED: u64 = 4096;

/// Looks at a guest's RAM.
#[derive(Debug)]
pub struct Watcher {
    ram: File,
    sums: Vec<Sum>,
    buffer: Vec<u8>,
}

/// How fast a guest changes its memory just now, by some of its pages: what takes milliseconds, where all of them would take a second.
#[derive(Debug)]
pub struct Glances {
    ram: File,
    /// Of all RAM; one of each `every` is looked at.
    pages: u64,
    every: u64,
    sums: Vec<Sum>,
    /// When it looked last.
    looked: Option<Duration>,
}

impl Glances {
    /// Of RAM of this size. Nothing of it is read yet.
    ///
    /// # Errors
    /// The file is shorter.
    pub fn new(ram: File, size: Bytes) -> io::Result<Self> {
        let pages = pages_of(&ram, size)?;
        let every = pages.div_ceil(GLANCED).max(1);
        let sums = vec![Sum::default(); usize::try_from(pages / every).map_err(io::Error::other)?];
        Ok(Self { ram, pages, every, sums, looked: None })
    }

    /// Looks at `now` of the caller's clock. How many pages of all RAM have changed for each second since it looked last; `None`: it had not, or
    /// no time has passed.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn look(&mut self, now: Duration) -> io::Result<Option<f64>> {
        let (mut content, mut changed) = ([0; PAGE_SIZE], 0_u64);
        for (at, before) in (0..).zip(&mut self.sums) {
            // Not the same one of each: what lies in steps of a power of two is alike.
            let page = at * self.every + at.wrapping_mul(0x9e37_79b9_7f4a_7c15) % self.every;
            self.ram.read_exact_at(&mut content, page * PAGE_SIZE as u64)?;
            let sum = Sum::of(Some(&content));
            changed += u64::from(std::mem::replace(before, sum) != sum);
        }
        let passed = self.looked.replace(now).map(|before| now.saturating_sub(before).as_secs_f64());
        let share = changed as f64 / self.sums.len().max(1) as f64;
        Ok(passed.filter(|passed| *passed > 0.0).map(|passed| share * self.pages as f64 / passed))
    }
}

/// The pages of RAM of this size.
fn pages_of(ram: &File, size: Bytes) -> io::Result<u64> {
    let length = ram.metadata()?.len();
    if length < size.0 {
        let what = format!("the guest's memory has {length} bytes, and {} were said", size.0);
        return Err(io::Error::new(io::ErrorKind::InvalidData, what));
    }
    Ok(size.0 / PAGE_SIZE as u64)
}

/// What a look found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Looked {
    /// Pages that are not as they were.
    pub changed: u64,
    /// Of those, pages that are all zeroes now.
    pub zeroed: u64,
}

/// What the memory is made of, counted over all of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Census {
    /// Its pages.
    pub pages: u64,
    /// Those that are all zeroes.
    pub zero: u64,
    /// Those that are, but for a chance of 2^-64, equal to one before them, and not zero.
    pub duplicate: u64,
}

impl Watcher {
    /// Of RAM of this size; nothing of it is read yet: the first look finds all changed that is not zero.
    ///
    /// # Errors
    /// The file is shorter.
    pub fn new(ram: File, size: Bytes) -> io::Result<Self> {
        let pages = usize::try_from(pages_of(&ram, size)?).map_err(io::Error::other)?;
        Ok(Self { ram, sums: vec![Sum::default(); pages], buffer: vec![0; CHUNK] })
    }

    /// Words of a bitmap with a bit for each page.
    #[must_use]
    pub fn words(&self) -> usize {
        self.sums.len().div_ceil(64)
    }

    /// Reads all of it, and sets the bits of pages that are not as they were. Each of those is handed to `each`, in order.
    ///
    /// # Errors
    /// It cannot be read.
    ///
    /// # Panics
    /// The bitmap has fewer words than [`Self::words`].
    pub fn look(&mut self, changed: &mut [u64], mut each: impl FnMut(u64, &[u8; PAGE_SIZE])) -> io::Result<Looked> {
        let (mut found, pages) = (Looked::default(), self.sums.len() as u64);
        let zero = [0; PAGE_SIZE];
        let mut note = |page: u64| changed[(page / 64) as usize] |= 1 << (page % 64);
        let mut at = 0;
        while at < pages {
            let (data, end) = data_from(&self.ram, at, pages)?;
            for page in at..data {
                if !self.sums[page as usize].is_zero() {
                    (self.sums[page as usize], found.changed, found.zeroed) =
                        (Sum::default(), found.changed + 1, found.zeroed + 1);
                    note(page);
                    each(page, &zero);
                }
            }
            at = data;
            while at < end {
                let n = (((end - at) as usize) * PAGE_SIZE).min(CHUNK);
                self.ram.read_exact_at(&mut self.buffer[..n], at * PAGE_SIZE as u64)?;
                let (contents, _) = self.buffer[..n].as_chunks::<PAGE_SIZE>();
                for content in contents {
                    let (now, before) = (Sum::of(Some(content)), self.sums[at as usize]);
                    if now != before && !(now.is_zero() && before.is_zero()) {
                        found.changed += 1;
                        found.zeroed += u64::from(now.is_zero());
                        note(at);
                        each(at, content);
                    }
                    self.sums[at as usize] = now;
                    at += 1;
                }
            }
        }
        Ok(found)
    }

    /// What it is made of, as last looked at.
    #[must_use]
    pub fn census(&self) -> Census {
        let mut first = HashMap::with_capacity(self.sums.len());
        let mut census = Census { pages: self.sums.len() as u64, ..Census::default() };
        for sum in &self.sums {
            if sum.is_zero() {
                census.zero += 1;
            } else if first.insert(*sum, ()).is_some() {
                census.duplicate += 1;
            }
        }
        census
    }

    /// What the codec would make of pages that it meets for the first time: the share of their size that goes onto the wire, of pages that are
    /// neither zero nor duplicates, and how many were looked at. None where there are none.
    ///
    /// # Errors
    /// It cannot be read, or zstd refuses.
    pub fn packed(&self) -> io::Result<Option<(f64, u64)>> {
        let pages = self.sums.len() as u64;
        let (mut seen, mut raw) = (HashMap::new(), vec![]);
        let stride = (pages / RUNS).max(RUN);
        let mut from = 0;
        while from < pages {
            for page in from..(from + RUN).min(pages) {
                let sum = self.sums[page as usize];
                if !sum.is_zero() && seen.insert(sum, ()).is_none() {
                    let begin = raw.len();
                    raw.resize(begin + PAGE_SIZE, 0);
                    self.ram.read_exact_at(&mut raw[begin..], page * PAGE_SIZE as u64)?;
                }
            }
            from += stride;
        }
        if raw.is_empty() {
            return Ok(None);
        }
        Ok(Some((packed(&raw)? as f64 / raw.len() as f64, (raw.len() / PAGE_SIZE) as u64)))
    }
}

/// How many bytes a move's zstd makes of these.
fn packed(raw: &[u8]) -> io::Result<u64> {
    let config = Config::default();
    let mut encoder = zstd::stream::Encoder::new(vec![], config.level)?;
    encoder.window_log(config.window_log)?;
    encoder.long_distance_matching(true)?;
    encoder.write_all(raw)?;
    Ok(encoder.finish()?.len() as u64)
}

/// Keeps pages that changed until they change again: what a re-send costs.
#[derive(Debug, Default)]
pub struct Sampler {
    awaited: HashMap<u64, Vec<u8>>,
    before: Vec<u8>,
    after: Vec<u8>,
}

impl Sampler {
    /// A page changed to this.
    pub fn changed(&mut self, page: u64, content: &[u8; PAGE_SIZE]) {
        if content.iter().all(|byte| *byte == 0) {
            self.awaited.remove(&page);
        } else if let Some(before) = self.awaited.get_mut(&page) {
            if self.after.len() < PAIRS * PAGE_SIZE {
                self.before.extend_from_slice(before);
                self.after.extend_from_slice(content);
            }
            before.copy_from_slice(content);
        } else if self.awaited.len() < AWAITED {
            self.awaited.insert(page, content.to_vec());
        }
    }

    /// The share of a changed page's size that goes onto the wire where its last version went there before, and how many were looked
    /// at. None where no page was seen to change twice.
    ///
    /// # Errors
    /// zstd refuses.
    pub fn again(&self) -> io::Result<Option<(f64, u64)>> {
        if self.after.is_empty() {
            return Ok(None);
        }
        let first = packed(&self.before)?;
        let both = packed(&[&self.before[..], &self.after[..]].concat())?;
        let share = both.saturating_sub(first) as f64 / self.after.len() as f64;
        Ok(Some((share, (self.after.len() / PAGE_SIZE) as u64)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGES: u64 = 1000;

    fn ram(dir: &tempfile::TempDir) -> (File, Watcher) {
        let path = dir.path().join("ram");
        let ram = File::options().read(true).write(true).create_new(true).open(&path).expect("opens");
        ram.set_len(PAGES * PAGE_SIZE as u64).expect("grows");
        let watcher = Watcher::new(File::open(path).expect("opens"), Bytes(PAGES * PAGE_SIZE as u64)).expect("watches");
        (ram, watcher)
    }

    fn look(watcher: &mut Watcher) -> (Looked, Vec<u64>) {
        let (mut bits, mut told) = (vec![0; watcher.words()], vec![]);
        let looked = watcher.look(&mut bits, |page, _| told.push(page)).expect("reads");
        let set: Vec<u64> = (0..PAGES).filter(|p| bits[(p / 64) as usize] >> (p % 64) & 1 == 1).collect();
        assert_eq!(set, told);
        (looked, set)
    }

    #[test]
    fn glances_tell_how_many_pages_change_in_a_second() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("ram");
        let (pages, size) = (40_000_u64, Bytes(40_000 * PAGE_SIZE as u64));
        let ram = File::options().read(true).write(true).create_new(true).open(&path).expect("opens");
        ram.set_len(size.0).expect("grows");
        let mut glances = Glances::new(File::open(&path).expect("opens"), size).expect("begins");
        let mut look = |ms| glances.look(Duration::from_millis(ms)).expect("reads");
        assert_eq!((look(1000), look(1000), look(1250)), (None, None, Some(0.0)));
        // A twentieth of all pages within 250 ms, wherever they lie.
        for page in (0..pages).filter(|page| page.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32 & 0xffff < 3277) {
            ram.write_all_at(&page.to_le_bytes().map(|byte| byte | 1), page * PAGE_SIZE as u64).expect("writes");
        }
        let rate = look(1500).expect("time has passed");
        assert!((6_000.0..10_000.0).contains(&rate), "{rate}, and 8000 are true");
        assert!(Glances::new(ram, Bytes(size.0 + 1)).is_err());
    }

    #[test]
    fn a_look_finds_the_pages_that_are_not_as_at_the_look_before_and_no_others() {
        let dir = tempfile::tempdir().expect("a folder");
        let (ram, mut watcher) = ram(&dir);
        let write =
            |page: u64, fill: u8| ram.write_all_at(&[fill; PAGE_SIZE], page * PAGE_SIZE as u64).expect("writes");
        write(3, 1);
        write(700, 7);
        write(999, 7);
        assert_eq!(look(&mut watcher).1, [3, 700, 999]);
        assert_eq!(look(&mut watcher).1, [0; 0]);
        // As it was, another content, zeroes over nothing, zeroes over something.
        write(3, 1);
        write(700, 8);
        write(500, 0);
        write(999, 0);
        assert_eq!(look(&mut watcher), (Looked { changed: 2, zeroed: 1 }, vec![700, 999]));
        write(10, 8);
        look(&mut watcher);
        assert_eq!(watcher.census(), Census { pages: PAGES, zero: PAGES - 3, duplicate: 1 });
    }

    #[test]
    fn what_repeats_packs_well_and_noise_does_not() {
        let dir = tempfile::tempdir().expect("a folder");
        let (ram, mut watcher) = ram(&dir);
        assert_eq!(watcher.packed().expect("packs"), None);
        let mut noise = 1_u64;
        let mut random = || {
            let mut page = [0; PAGE_SIZE];
            page.iter_mut().for_each(|byte| {
                noise = noise.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                *byte = (noise >> 56) as u8;
            });
            page
        };
        for page in 0..PAGES {
            ram.write_all_at(&random(), page * PAGE_SIZE as u64).expect("writes");
        }
        look(&mut watcher);
        let (share, pages) = watcher.packed().expect("packs").expect("pages");
        assert!(share > 0.95 && pages > 500, "{share} of {pages}");
        for page in 0..PAGES {
            let content: Vec<u8> = (page as u32..page as u32 + 1024).flat_map(u32::to_le_bytes).collect();
            ram.write_all_at(&content, page * PAGE_SIZE as u64).expect("writes");
        }
        look(&mut watcher);
        assert!(watcher.packed().expect("packs").expect("pages").0 < 0.5);

        // Noise of which eight bytes change is little beside what went before.
        let mut sampler = Sampler::default();
        assert_eq!(sampler.again().expect("packs"), None);
        for page in 0..100 {
            let mut content = random();
            sampler.changed(page, &content);
            content[8..16].fill(1);
            sampler.changed(page, &content);
        }
        let (share, pairs) = sampler.again().expect("packs").expect("pairs");
        assert!(share < 0.1 && pairs == 100, "{share} of {pairs}");
    }
}
