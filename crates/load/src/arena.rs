//! The pages of a memory load, and what each of them must hold.
//!
//! Pages prove themselves ([`crate::page`]) except for one thing: that they are the *latest* version. That is what the
//! table of expected versions is for. It lies in pages of its own, which migrate like any other and may be lost like
//! any other, so they carry checksums: each table page the XOR of a hash of its entries (updated in constant time by a
//! touch), and the arena one XOR over the table pages, so that a table page that is old but whole is found as well.

use std::collections::BTreeSet;

use crate::{
    content::Prf,
    fault::Fault,
    page::{PAGE_BYTES, Page, PageFormat, PageIndex, RunId, Version},
    protocol::{BadPage, MAX_LISTED, MemoryCheck, PagePlace, Pattern, Problem},
};

const PAGES_PER_MIB: u32 = (1 << 20) / PAGE_BYTES as u32;

/// Entries of a table page; the last word is the checksum.
const ENTRIES: usize = PAGE_BYTES / 8 - 1;

#[derive(Clone)]
#[repr(C, align(4096))]
struct TablePage([u64; ENTRIES + 1]);

/// Expected versions, each page of them checksummed.
struct VersionTable {
    pages: Vec<TablePage>,
    /// XOR of the checksums of all table pages.
    root: u64,
}

/// Contribution of one entry to its page's checksum.
fn entry_hash(index: PageIndex, version: Version) -> u64 {
    Prf::new(0x7ab1_e000, index.0.into(), version.0).next_u64()
}

impl VersionTable {
    /// All versions 0.
    fn new(pages: u32) -> Result<Self, std::collections::TryReserveError> {
        let mut table = Self { pages: Vec::new(), root: 0 };
        let table_pages = (pages as usize).div_ceil(ENTRIES);
        table.pages.try_reserve_exact(table_pages)?;
        table.pages.resize(table_pages, TablePage([0; ENTRIES + 1]));
        for index in 0..table.pages.len() {
            let sum = table.sum_of(index);
            table.pages[index].0[ENTRIES] = sum;
            table.root ^= sum;
        }
        Ok(table)
    }

    fn get(&self, index: PageIndex) -> Version {
        let index = index.0 as usize;
        Version(self.pages[index / ENTRIES].0[index % ENTRIES])
    }

    fn set(&mut self, index: PageIndex, version: Version) {
        let change = entry_hash(index, self.get(index)) ^ entry_hash(index, version);
        let at = index.0 as usize;
        let page = &mut self.pages[at / ENTRIES].0;
        page[at % ENTRIES] = version.0;
        page[ENTRIES] ^= change;
        self.root ^= change;
    }

    fn sum_of(&self, table_page: usize) -> u64 {
        let first = table_page * ENTRIES;
        let entries = &self.pages[table_page].0[..ENTRIES];
        let hash = |(at, &version)| entry_hash(PageIndex((first + at) as u32), Version(version));
        entries.iter().enumerate().map(hash).fold(0, |sum, hash| sum ^ hash)
    }

    fn check(&self, mut found: impl FnMut(usize, Fault)) {
        let mut root = 0;
        for (at, page) in self.pages.iter().enumerate() {
            let (stored, sum) = (page.0[ENTRIES], self.sum_of(at));
            root ^= stored;
            if stored != sum {
                let expected = format!("entries with checksum {stored:016x}");
                found(at, Fault::new(Problem::Torn, expected, format!("entries with checksum {sum:016x}")));
            }
        }
        if root != self.root {
            let expected = format!("table pages that add up to {:016x}", self.root);
            let says = format!("{root:016x}: one of the table pages is whole but not the latest");
            found(self.pages.len(), Fault::new(Problem::Stale, expected, says));
        }
    }
}

/// Checked pages and their expected versions.
pub struct Arena {
    format: PageFormat,
    pages: Vec<Page>,
    table: VersionTable,
    /// Pages that a touch found bad. They are left as they are, as evidence for the next check; at most all.
    condemned: BTreeSet<PageIndex>,
}

impl Arena {
    /// Bytes that an arena of `mib` takes, table included.
    pub fn bytes(mib: u32) -> u64 {
        let pages = u64::from(mib) * u64::from(PAGES_PER_MIB);
        (pages + pages.div_ceil(ENTRIES as u64)) * PAGE_BYTES as u64
    }

    /// Builds version 0 of every page: writes all of the memory.
    ///
    /// # Errors
    /// When the address space does not have it; that it is also backed by memory the caller has to see to.
    pub fn build(
        mib: u32,
        seed: u64,
        run: RunId,
        bytes_per_page: u32,
    ) -> Result<Self, std::collections::TryReserveError> {
        let format = PageFormat::new(seed, run, bytes_per_page);
        let count = mib * PAGES_PER_MIB;
        let mut pages = Vec::new();
        pages.try_reserve_exact(count as usize)?;
        for index in 0..count {
            pages.push(Page::ZERO);
            let page = pages.last_mut().expect("a page was just pushed");
            format.build(page, PageIndex(index));
        }
        Ok(Self { format, pages, table: VersionTable::new(count)?, condemned: BTreeSet::new() })
    }

    /// Number of pages.
    pub fn len(&self) -> u32 {
        self.pages.len() as u32
    }

    /// Never: an arena has at least 1 MiB.
    pub fn is_empty(&self) -> bool {
        self.pages.is_empty()
    }

    /// Verifies page `index` as far as is cheap, and writes its next version. A page that is bad is not written, now
    /// or later, and reported once.
    ///
    /// # Errors
    /// What is wrong with the page.
    pub fn touch(&mut self, index: PageIndex) -> Result<(), Fault> {
        if !self.condemned.is_empty() && self.condemned.contains(&index) {
            return Ok(());
        }
        let version = self.table.get(index);
        let page = &mut self.pages[index.0 as usize];
        if let Err(fault) = self.format.check_quickly(page, index, version) {
            self.condemned.insert(index);
            return Err(fault);
        }
        let next = version.next();
        self.format.write(page, index, next);
        self.table.set(index, next);
        Ok(())
    }

    /// Verifies every byte of every page, and the table. `place` and `table` say how to report them.
    pub fn check(&self, place: PagePlace, table: PagePlace, report: &mut MemoryCheck) {
        let mut found = |place, page: usize, fault: Fault| {
            report.bad_count += 1;
            if report.bad.len() < MAX_LISTED {
                let Fault { kind, expected, found } = fault;
                report.bad.push(BadPage { kind, place, page: page as u64, expected, found });
            }
        };
        self.table.check(|at, fault| found(table, at, fault));
        for (at, page) in self.pages.iter().enumerate() {
            let index = PageIndex(at as u32);
            if let Err(fault) = self.format.check_fully(page, index, self.table.get(index)) {
                found(place, at, fault);
            }
        }
        report.pages_checked += (self.pages.len() + self.table.pages.len()) as u64;
    }

    /// Flips a bit of page `index` behind the table's back; returns the byte.
    pub fn damage(&mut self, index: PageIndex) -> usize {
        self.format.damage(&mut self.pages[index.0 as usize])
    }
}

/// Chooses the pages to touch.
pub struct Chooser {
    pattern: Pattern,
    pages: u32,
    prf: Prf,
    next: u32,
    stride: u64,
}

impl Chooser {
    /// For an arena of `pages`, which is not 0.
    pub fn new(pattern: Pattern, pages: u32, seed: u64) -> Self {
        assert!(pages > 0, "LoadSpec::validate bounds the working set");
        // A stride near the golden section that shares no factor with the number of pages is a permutation that
        // takes neighbouring ranks far apart, without a table that itself would have to be proven.
        let mut stride = (f64::from(pages) * 0.618_033_988) as u64 | 1;
        while greatest_common_divisor(stride, pages.into()) != 1 {
            stride += 2;
        }
        Self { pattern, pages, prf: Prf::new(seed, u64::MAX, 0), next: 0, stride }
    }

    /// The next page.
    pub fn choose(&mut self) -> PageIndex {
        PageIndex(match self.pattern {
            Pattern::Uniform => self.prf.below(self.pages.into()) as u32,
            Pattern::Sequential => {
                let index = self.next;
                self.next = (index + 1) % self.pages;
                index
            }
            Pattern::Zipf => {
                // Inverse of the continuous distribution with density ~ 1/x on [1, pages + 1): rank k has
                // probability ln(1 + 1/k) / ln(pages + 1), which is Zipf's 1/k with the first ranks smoothed.
                let x = (self.prf.unit() * (f64::from(self.pages) + 1.0).ln()).exp();
                let rank = (x as u64 - 1).min(u64::from(self.pages) - 1);
                (rank * self.stride % u64::from(self.pages)) as u32
            }
        })
    }
}

fn greatest_common_divisor(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ARENA: PagePlace = PagePlace::Arena { load: 0 };
    const TABLE: PagePlace = PagePlace::Table { load: 0 };

    fn arena() -> Arena {
        let mut arena = Arena::build(3, 5, RunId(1), 64).unwrap();
        let mut chooser = Chooser::new(Pattern::Uniform, arena.len(), 5);
        (0..5000).for_each(|_| arena.touch(chooser.choose()).unwrap());
        arena
    }

    fn check(arena: &Arena) -> MemoryCheck {
        let mut report = MemoryCheck::default();
        arena.check(ARENA, TABLE, &mut report);
        report
    }

    #[test]
    fn an_arena_that_was_only_touched_is_clean() {
        let report = check(&arena());
        assert_eq!((report.bad_count, report.pages_checked), (0, 768 + 2));
    }

    #[test]
    fn a_page_restored_from_before_a_touch_is_stale_for_touch_and_check() {
        let mut arena = arena();
        let before = arena.pages[9].clone();
        arena.touch(PageIndex(9)).unwrap();
        arena.pages[9] = before;
        assert_eq!(check(&arena).bad[0].kind, Problem::Stale);
        assert_eq!(arena.touch(PageIndex(9)).unwrap_err().kind, Problem::Stale);
    }

    #[test]
    fn a_bad_page_is_reported_by_one_touch_and_kept_as_evidence() {
        let mut arena = arena();
        arena.pages[9] = Page::ZERO;
        arena.touch(PageIndex(9)).unwrap_err();
        arena.touch(PageIndex(9)).unwrap();
        let report = check(&arena);
        assert_eq!(report.bad_count, 1);
        assert_eq!((report.bad[0].kind, report.bad[0].page, report.bad[0].place), (Problem::Lost, 9, ARENA));
    }

    #[test]
    fn swapped_pages_are_both_foreign() {
        let mut arena = arena();
        arena.pages.swap(10, 20);
        let report = check(&arena);
        assert_eq!(
            report.bad.iter().map(|bad| (bad.kind, bad.page)).collect::<Vec<_>>(),
            [(Problem::Foreign, 10), (Problem::Foreign, 20)]
        );
    }

    #[test]
    fn a_changed_table_entry_is_torn_and_stays_so_after_a_touch() {
        let mut arena = arena();
        arena.table.pages[1].0[3] ^= 1 << 40;
        assert!(check(&arena).bad.iter().any(|bad| bad.kind == Problem::Torn && bad.place == TABLE && bad.page == 1));
        let _ = arena.touch(PageIndex(ENTRIES as u32 + 3));
        assert!(check(&arena).bad.iter().any(|bad| bad.place == TABLE));
    }

    #[test]
    fn a_table_page_that_is_old_but_whole_is_stale_even_when_its_pages_are_old_too() {
        let mut arena = arena();
        let (table, page) = (arena.table.pages[0].clone(), arena.pages[3].clone());
        arena.touch(PageIndex(3)).unwrap();
        (arena.table.pages[0], arena.pages[3]) = (table, page);
        let report = check(&arena);
        assert_eq!(report.bad_count, 1);
        assert_eq!((report.bad[0].kind, report.bad[0].place), (Problem::Stale, TABLE));
    }

    #[test]
    fn damage_survives_touches_and_is_found() {
        for bytes_per_page in [64, crate::protocol::MAX_BYTES_PER_PAGE] {
            let mut arena = Arena::build(1, 5, RunId(1), bytes_per_page).unwrap();
            arena.damage(PageIndex(0));
            (0..3).for_each(|_| drop(arena.touch(PageIndex(0))));
            let report = check(&arena);
            assert_eq!((report.bad_count, report.bad[0].kind), (1, Problem::Torn));
        }
    }

    #[test]
    fn many_problems_are_counted_and_the_first_are_listed() {
        let mut arena = arena();
        arena.pages.fill(Page::ZERO);
        let report = check(&arena);
        assert_eq!((report.bad_count, report.bad.len()), (768, MAX_LISTED));
    }

    #[test]
    fn patterns_choose_as_their_names_say() {
        let pages = 1000;
        let count = |pattern| {
            let mut chooser = Chooser::new(pattern, pages, 3);
            let mut counts = vec![0u32; pages as usize];
            (0..100_000).for_each(|_| counts[chooser.choose().0 as usize] += 1);
            counts
        };
        assert!(count(Pattern::Sequential).iter().all(|&n| n == 100));
        assert!(count(Pattern::Uniform).iter().all(|&n| (40..180).contains(&n)));
        let zipf = count(Pattern::Zipf);
        let hottest = zipf[0];
        assert!((9_000..11_000).contains(&hottest), "rank 1 got {hottest}, ln 2 / ln 1001 is a tenth");
        let mut sorted = zipf.clone();
        sorted.sort_unstable_by(|a, b| b.cmp(a));
        // ln 2 / ln (14 / 13) is 9.35.
        assert!((8..=10).contains(&(hottest / sorted[12])), "rank 13 got {}", sorted[12]);
        assert!(sorted[999] < 40 && sorted[900] > 0, "the tail is thin, not empty: {:?}", &sorted[900..]);
        assert_eq!(zipf.iter().position(|&n| n == sorted[1]).map(|at| at > 100), Some(true), "ranks are scattered");
    }
}
