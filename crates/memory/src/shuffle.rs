//! Pages whose bytes zstd packs better apart: the first bytes of all words, then all second ones, and so on (the shuffle of HDF5 and Blosc).
//!
//! Page tables, arrays of structures, hash tables and lists are words whose upper bytes are those of the words around, and whose lower ones are
//! not. As they lie, each word costs a match of a few bytes and some literals; apart, the upper bytes are long runs, and the lower ones are only
//! literals. Most pages are worse for it, and no look at a page that is cheaper than packing it was found to say which: how often a byte is that of
//! the word before picks wrongly for half of the pages and more. So each is packed alone by zstd at a level that looks for few matches, as it lies and
//! apart, and goes as it was smallest; below level 9 its middle quarter is packed for it ([`SAMPLE`]). (Level 1 picks half as many, since in a page alone
//! it finds the short matches that are so dear; of the levels around -4 is best, given that what no match covers is entropy-coded, which they do not do by themselves.)
//!
//! Of what is left of two recorded streams without zero pages, differences and what lies on disks (a compiler's guest and a database's), one page
//! in four and one in three go apart, by words of four bytes or of eight, and level 9 makes 6 and 10 % less of the whole. A page's tries take some
//! 60 us, level 9 itself 100. zstd's next strategy with matches of three bytes makes 2.5 % less than level 9 in 2.4 times as long, and 6 % in 3.7 times.
//!
//! A quarter of a page is alike enough to the rest that tries of it take half as long and find nearly as much: of such streams (a database's and a compiler's, whole and
//! without what lies on disks) level 3 makes 3, 2.5, 7 and 4 % less so, in 1.3 to 1.7 times as long, which is about what level 6 makes of them as they lie in as
//! long a time. Whole pages find half a percent more, and up to 1.7 at level 9. So this is for who has time for more than level 1, and while the guest runs.

use crate::format;
use crate::record::{PAGE_SIZE, PageBytes};
use std::io;
use std::ops::Range;
use zstd::zstd_safe::{CParameter, ParamSwitch};

/// From this level of zstd's on.
pub(crate) const FROM_LEVEL: i32 = 3;
/// From this one on whole pages are tried: a slow link has time for it, and who wants the fewest bytes takes it.
const WHOLE_FROM_LEVEL: i32 = 9;
/// What is tried of a page below, bytes: its middle.
const SAMPLE: usize = PAGE_SIZE / 4;
/// zstd's level for the tries.
const TRY_LEVEL: i32 = -4;
/// What packs to less than one part in so many, as it lies, is not tried; nor is what shrinks by less: it is encrypted, or packed already.
const PART: usize = 32;

/// The words whose bytes are laid apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Word {
    /// Of four bytes.
    Four,
    /// Of eight.
    Eight,
}

impl Word {
    const ALL: [Self; 2] = [Self::Four, Self::Eight];

    /// Which it is, of a page operation's bits.
    pub(crate) fn of(kind: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|word| word.kind() == kind)
    }

    /// The page operation's bits.
    pub(crate) const fn kind(self) -> u8 {
        match self {
            Self::Four => format::SHUFFLED_4,
            Self::Eight => format::SHUFFLED_8,
        }
    }

    /// The bytes of this word's place in all words one after the other.
    pub(crate) fn apart(self, page: &PageBytes) -> PageBytes {
        let mut out = [0; PAGE_SIZE];
        self.lay_apart(page, &mut out);
        out
    }

    /// The same of a part of a page, whole words of it.
    fn lay_apart(self, part: &[u8], out: &mut [u8]) {
        match self {
            Self::Four => apart::<4>(part, out),
            Self::Eight => apart::<8>(part, out),
        }
    }

    /// The opposite of [`Word::apart`].
    pub(crate) fn together(self, page: &PageBytes) -> PageBytes {
        match self {
            Self::Four => together::<4>(page),
            Self::Eight => together::<8>(page),
        }
    }
}

fn apart<const WORD: usize>(part: &[u8], out: &mut [u8]) {
    for (place, plane) in out.chunks_exact_mut(part.len() / WORD).enumerate() {
        for (byte, word) in plane.iter_mut().zip(part.chunks_exact(WORD)) {
            *byte = word[place];
        }
    }
}

fn together<const WORD: usize>(page: &PageBytes) -> PageBytes {
    let mut out = [0; PAGE_SIZE];
    for (place, plane) in page.chunks_exact(PAGE_SIZE / WORD).enumerate() {
        for (byte, word) in plane.iter().zip(out.chunks_exact_mut(WORD)) {
            word[place] = *byte;
        }
    }
    out
}

/// Tries which way a page packs best.
pub(crate) struct Shuffler {
    zstd: zstd::bulk::Compressor<'static>,
    packed: Vec<u8>,
    /// The part of a page that is tried.
    sample: Range<usize>,
}

impl Shuffler {
    /// For a stream of this level; `None` where pages go as they are.
    pub(crate) fn for_level(level: i32) -> io::Result<Option<Self>> {
        if level < FROM_LEVEL {
            return Ok(None);
        }
        let packed = vec![0; zstd::zstd_safe::compress_bound(PAGE_SIZE)];
        let mut zstd = zstd::bulk::Compressor::new(TRY_LEVEL)?;
        zstd.set_parameter(CParameter::LiteralCompressionMode(ParamSwitch::Enable))?;
        let tried = if level < WHOLE_FROM_LEVEL { SAMPLE } else { PAGE_SIZE };
        let sample = (PAGE_SIZE - tried) / 2..(PAGE_SIZE + tried) / 2;
        Ok(Some(Self { zstd, packed, sample }))
    }

    /// The way, and the page laid so; `None`: as it is.
    pub(crate) fn best(&mut self, page: &PageBytes) -> Option<(Word, PageBytes)> {
        let sample = &page[self.sample.clone()];
        let plain = self.packs_to(sample)?;
        if !(sample.len() / PART..sample.len() - sample.len() / PART).contains(&plain) {
            return None;
        }
        // A few bytes fewer may be many more in the stream, where the page is like others that lie as they are.
        let (mut best, mut laid) = (None, [0; PAGE_SIZE]);
        let mut least = plain - plain / 20;
        for word in Word::ALL {
            let laid = &mut laid[..sample.len()];
            word.lay_apart(sample, laid);
            let packs_to = self.packs_to(laid)?;
            if packs_to < least {
                (least, best) = (packs_to, Some(word));
            }
        }
        best.map(|word| (word, word.apart(page)))
    }

    fn packs_to(&mut self, part: &[u8]) -> Option<usize> {
        // There is room for whatever zstd makes; where it fails all the same the page goes as it is.
        self.zstd.compress_to_buffer(part, &mut self.packed[..]).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A page table's entries: frames that lie anywhere in 16 GiB, and the same flags.
    fn page_table() -> PageBytes {
        let mut page = [0; PAGE_SIZE];
        for (n, word) in page.chunks_exact_mut(8).enumerate() {
            let frame = (n as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 42;
            word.copy_from_slice(&(1 << 63 | frame << 12 | 0x867).to_le_bytes());
        }
        page
    }

    fn text() -> PageBytes {
        let words = ["page ", "guest ", "memory ", "of ", "the ", "link, ", "and ", "bytes "];
        let text: String = (0..PAGE_SIZE).map(|n| words[(n.wrapping_mul(0x9e37_79b9) >> 13) % words.len()]).collect();
        *text.as_bytes().first_chunk().unwrap()
    }

    #[test]
    fn a_page_table_goes_apart_and_text_as_it_is() {
        let mut shuffler = Shuffler::for_level(FROM_LEVEL).unwrap().unwrap();
        let (word, laid) = shuffler.best(&page_table()).unwrap();
        assert_eq!(word.together(&laid), page_table());
        let (plain, apart) = (shuffler.packs_to(&page_table()).unwrap(), shuffler.packs_to(&laid).unwrap());
        assert!(apart * 10 < plain * 9, "{plain} as it lies, {apart} apart");
        assert!(shuffler.best(&text()).is_none());
        assert!(shuffler.best(&[7; PAGE_SIZE]).is_none());
    }

    #[test]
    fn the_middle_speaks_for_a_page_below_level_9() {
        let mut page = text();
        let middle = (PAGE_SIZE - SAMPLE) / 2..(PAGE_SIZE + SAMPLE) / 2;
        page[middle.clone()].copy_from_slice(&page_table()[middle]);
        let best = |level| Shuffler::for_level(level).unwrap().unwrap().best(&page);
        assert!(best(FROM_LEVEL).is_some() && best(WHOLE_FROM_LEVEL - 1).is_some());
        assert!(best(WHOLE_FROM_LEVEL).is_none(), "as a whole it is text");
    }

    #[test]
    fn lower_levels_do_not_try() {
        assert!(Shuffler::for_level(FROM_LEVEL - 1).unwrap().is_none());
    }

    proptest! {
        #[test]
        fn what_was_laid_apart_comes_together(page in proptest::collection::vec(any::<u8>(), PAGE_SIZE)) {
            let page: &PageBytes = page.first_chunk().unwrap();
            for word in Word::ALL {
                prop_assert_eq!(&word.together(&word.apart(page)), page);
                // The second byte of the first word is the first of the second plane.
                let bytes = if word == Word::Four { 4 } else { 8 };
                prop_assert_eq!(word.apart(page)[PAGE_SIZE / bytes], page[1]);
            }
        }
    }
}
