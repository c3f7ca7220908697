//! One guest page that can prove what it is.
//!
//! ```text
//! 0      8          16     24     32              40       48                48 + n            4088          4096
//! | magic | checksum | run  | index | base checksum | version | changing bytes | base content ... | tail version |
//!                    |<------------------ checksum ------------------------->|
//! ```
//!
//! A touch rewrites version, changing bytes (`n` = `bytes_per_page`), checksum and tail version, and nothing else: so
//! about n bytes of a page differ from its last version, which is what a delta codec lives on. What can go wrong, and
//! what tells:
//!
//! - the page never arrived (zeros, other bytes): magic and checksum;
//! - it is an old version, whole: its version against the table of expected versions (see [`crate::arena`]);
//! - it is half old, half new: head version against tail version, checksum;
//! - it is another page of the same arena, or of an earlier run: index, run;
//! - a bit flipped in the part that never changes: base checksum, looked at in a full check only.

use std::fmt;

use xxhash_rust::xxh3::xxh3_64;

use crate::{
    content::{Prf, fill_structured},
    fault::{Fault, put_u64, u64_at},
    protocol::{MAX_BYTES_PER_PAGE, Problem},
};

/// Bytes of a page; x86-64's, and a sector multiple of every disk.
pub const PAGE_BYTES: usize = 4096;

const MAGIC: u64 = u64::from_le_bytes(*b"gdwtPAGE");
const AT_CHECKSUM: usize = 8;
const AT_RUN: usize = 16;
const AT_INDEX: usize = 24;
const AT_BASE_CHECKSUM: usize = 32;
const AT_VERSION: usize = 40;
const AT_CHANGING: usize = 48;
const AT_TAIL: usize = PAGE_BYTES - 8;

/// 4 KiB, aligned as the hardware has it; also what O_DIRECT wants of a buffer.
#[derive(Clone)]
#[repr(C, align(4096))]
pub struct Page(pub [u8; PAGE_BYTES]);

impl Page {
    /// A page of zeros.
    pub const ZERO: Self = Self([0; PAGE_BYTES]);
}

impl fmt::Debug for Page {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Page({:02x?}..)", &self.0[..AT_CHANGING])
    }
}

/// Number of a page in its arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct PageIndex(pub u32);

/// How often a page was touched; 0 when built.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(pub u64);

impl Version {
    /// The version that the next touch writes.
    pub fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

/// Tells the pages and records of one `Start` from those of every other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RunId(pub u64);

/// What all pages of an arena have in common.
#[derive(Debug, Clone)]
pub struct PageFormat {
    seed: u64,
    run: RunId,
    changing_end: usize,
}

impl PageFormat {
    /// Pages of `run` whose content follows from `seed`, and of which each touch rewrites `bytes_per_page`
    /// (1 to [`MAX_BYTES_PER_PAGE`]).
    pub fn new(seed: u64, run: RunId, bytes_per_page: u32) -> Self {
        assert!((1..=MAX_BYTES_PER_PAGE).contains(&bytes_per_page), "LoadSpec::validate bounds bytes_per_page");
        Self { seed, run, changing_end: AT_CHANGING + bytes_per_page as usize }
    }

    /// Makes `page` version 0 of page `index`.
    pub fn build(&self, page: &mut Page, index: PageIndex) {
        self.fill_base(page, index);
        let base = self.base_checksum(page);
        put_u64(&mut page.0, 0, MAGIC);
        put_u64(&mut page.0, AT_RUN, self.run.0);
        put_u64(&mut page.0, AT_INDEX, index.0.into());
        put_u64(&mut page.0, AT_BASE_CHECKSUM, base);
        self.write(page, index, Version(0));
    }

    /// Makes `page`, which is some version of page `index`, version `version`.
    pub fn write(&self, page: &mut Page, index: PageIndex, version: Version) {
        put_u64(&mut page.0, AT_VERSION, version.0);
        Prf::new(self.seed, index.0.into(), version.0).fill(&mut page.0[AT_CHANGING..self.changing_end]);
        let checksum = self.checksum(page);
        put_u64(&mut page.0, AT_CHECKSUM, checksum);
        put_u64(&mut page.0, AT_TAIL, version.0);
    }

    /// The check before each touch: everything but the base content.
    ///
    /// # Errors
    /// What is wrong.
    pub fn check_quickly(&self, page: &Page, index: PageIndex, version: Version) -> Result<(), Fault> {
        let at = |offset| u64_at(&page.0, offset);
        let checksum_holds = at(AT_CHECKSUM) == self.checksum(page);
        let (head, tail) = (Version(at(AT_VERSION)), Version(at(AT_TAIL)));
        let as_expected = checksum_holds
            && at(0) == MAGIC
            && at(AT_RUN) == self.run.0
            && at(AT_INDEX) == u64::from(index.0)
            && head == version
            && tail == version;
        if as_expected { Ok(()) } else { Err(self.diagnose(page, index, version, checksum_holds)) }
    }

    /// Says in which way a page differs from version `version` of page `index`.
    #[cold]
    fn diagnose(&self, page: &Page, index: PageIndex, version: Version, checksum_holds: bool) -> Fault {
        let at = |offset| u64_at(&page.0, offset);
        let (head, tail) = (at(AT_VERSION), at(AT_TAIL));
        let page_and_version = format!("page {} at version {}", index.0, version.0);
        match (at(0) == MAGIC, checksum_holds) {
            (false, false) => return Fault::lost(page_and_version, &page.0),
            (false, true) => return Fault::new(Problem::Torn, page_and_version, "that page with its magic changed"),
            (true, false) => {
                let found = format!("head version {head}, tail version {tail}, and a checksum that does not match");
                return Fault::new(Problem::Torn, page_and_version, found);
            }
            (true, true) => {}
        }
        if at(AT_RUN) != self.run.0 {
            Fault::new(Problem::Foreign, page_and_version, format!("a page of run {:016x}", at(AT_RUN)))
        } else if at(AT_INDEX) != u64::from(index.0) {
            Fault::new(Problem::Foreign, page_and_version, format!("page {} at version {head}", at(AT_INDEX)))
        } else if head != tail {
            let found = format!("head version {head}, tail version {tail}");
            Fault::new(Problem::Torn, page_and_version, found)
        } else if head < version.0 {
            Fault::new(Problem::Stale, page_and_version, format!("version {head}"))
        } else {
            Fault::new(Problem::Foreign, page_and_version, format!("version {head}, which was never written"))
        }
    }

    /// Every byte of the page.
    ///
    /// # Errors
    /// What is wrong.
    pub fn check_fully(&self, page: &Page, index: PageIndex, version: Version) -> Result<(), Fault> {
        self.check_quickly(page, index, version)?;
        if self.base_checksum(page) == u64_at(&page.0, AT_BASE_CHECKSUM) {
            return Ok(());
        }
        let mut right = Page::ZERO;
        self.fill_base(&mut right, index);
        let base = self.changing_end..AT_TAIL;
        let differing: Vec<usize> = base.filter(|&byte| page.0[byte] != right.0[byte]).collect();
        let (expected, found) = match differing.first() {
            Some(&byte) => (
                format!("byte {byte} of the base content to be {:#04x}", right.0[byte]),
                format!("{:#04x}; {} bytes differ", page.0[byte], differing.len()),
            ),
            None => ("a base checksum that matches".to_owned(), "base content right, its checksum wrong".to_owned()),
        };
        Err(Fault::new(Problem::Torn, expected, found))
    }

    /// Flips a bit where a touch will not repair it: in the base content if there is any. Returns the byte.
    pub(crate) fn damage(&self, page: &mut Page) -> usize {
        let byte = if self.changing_end < AT_TAIL { (self.changing_end + AT_TAIL) / 2 } else { AT_CHANGING };
        page.0[byte] ^= 0x10;
        byte
    }

    fn fill_base(&self, page: &mut Page, index: PageIndex) {
        fill_structured(&mut page.0[self.changing_end..AT_TAIL], &mut Prf::new(!self.seed, index.0.into(), 0));
    }

    fn base_checksum(&self, page: &Page) -> u64 {
        xxh3_64(&page.0[self.changing_end..AT_TAIL])
    }

    fn checksum(&self, page: &Page) -> u64 {
        xxh3_64(&page.0[AT_RUN..self.changing_end])
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const INDEX: PageIndex = PageIndex(7);

    fn format() -> PageFormat {
        PageFormat::new(42, RunId(1), 64)
    }

    fn page_at(index: PageIndex, version: u64) -> Page {
        let mut page = Page::ZERO;
        format().build(&mut page, index);
        (1..=version).for_each(|version| format().write(&mut page, index, Version(version)));
        page
    }

    fn kind(page: &Page, version: u64) -> Problem {
        format().check_fully(page, INDEX, Version(version)).unwrap_err().kind
    }

    #[test]
    fn a_page_that_never_arrived_is_lost() {
        assert_eq!(kind(&Page::ZERO, 3), Problem::Lost);
        assert_eq!(kind(&Page([0x5a; PAGE_BYTES]), 3), Problem::Lost);
    }

    #[test]
    fn an_old_version_is_stale() {
        assert_eq!(kind(&page_at(INDEX, 2), 3), Problem::Stale);
        assert_eq!(kind(&page_at(INDEX, 0), 3), Problem::Stale);
    }

    #[test]
    fn a_page_of_another_index_run_or_future_is_foreign() {
        assert_eq!(kind(&page_at(PageIndex(8), 3), 3), Problem::Foreign);
        assert_eq!(kind(&page_at(INDEX, 4), 3), Problem::Foreign);
        let mut other = Page::ZERO;
        PageFormat::new(42, RunId(2), 64).build(&mut other, INDEX);
        assert_eq!(kind(&other, 0), Problem::Foreign);
    }

    #[test]
    fn a_touch_changes_its_bytes_and_at_most_24_more() {
        for bytes_per_page in [1, 64, MAX_BYTES_PER_PAGE] {
            let format = PageFormat::new(1, RunId(1), bytes_per_page);
            let mut page = Page::ZERO;
            format.build(&mut page, INDEX);
            let before = page.clone();
            format.write(&mut page, INDEX, Version(1));
            let changed = (0..PAGE_BYTES).filter(|&byte| before.0[byte] != page.0[byte]).count();
            assert!(changed <= bytes_per_page as usize + 24, "{changed} bytes changed");
            format.check_fully(&page, INDEX, Version(1)).unwrap();
        }
    }

    proptest! {
        #[test]
        fn a_page_torn_anywhere_is_found(cut in 1..PAGE_BYTES, old in 0..5u64, newer in 1..5u64) {
            let (old_page, new_page) = (page_at(INDEX, old), page_at(INDEX, old + newer));
            let mut torn = new_page.clone();
            torn.0[cut..].copy_from_slice(&old_page.0[cut..]);
            let mut reverse = old_page.clone();
            reverse.0[cut..].copy_from_slice(&new_page.0[cut..]);
            // Between little-endian tails that share low bytes, a cut can leave a page whole.
            for (page, whole) in [(torn, &new_page), (reverse, &old_page)] {
                if page.0 != whole.0 && page.0 != old_page.0 && page.0 != new_page.0 {
                    prop_assert_eq!(kind(&page, old + newer), Problem::Torn);
                }
            }
        }

        #[test]
        fn any_flipped_bit_is_found(bit in 0..PAGE_BYTES * 8, version in 0..3u64) {
            let mut page = page_at(INDEX, version);
            page.0[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(format().check_fully(&page, INDEX, Version(version)).is_err());
        }

        #[test]
        fn arbitrary_pages_never_panic(bytes in proptest::collection::vec(any::<u8>(), PAGE_BYTES)) {
            let page = Page(bytes.try_into().unwrap());
            prop_assert!(format().check_fully(&page, INDEX, Version(1)).is_err());
        }
    }
}
