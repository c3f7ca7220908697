//! Pages whose bytes zstd packs better apart: the first bytes of all words, then all second ones, and so on (the shuffle of HDF5 and Blosc).
//!
//! Page tables, arrays of structures, hash tables and lists are words whose upper bytes are those of the words around, and whose lower ones are
//! not. As they lie, each word costs a match of a few bytes and some literals; apart, the upper bytes are long runs, and the lower ones are only
//! literals. Most pages are worse for it. How often a byte is that of the word before says by which words a page would go apart, and for which pages
//! there is nothing to be had, but picks wrongly for half of the rest. So of those the middle quarter is *reckoned*, as it lies and apart: what an
//! encoder of zstd's kind would find to match in it, each match at the same price, and what the entropy of the bytes is that no match covers
//! ([`Shuffler::reckon`]). It goes apart where that makes a tenth less: fewer bytes in a page may be more in the stream, where it is like others that lie as they are.
//!
//! This takes some 5 us a page, where level 1 takes some 25 in all, and one page in seven goes apart. Of recorded streams of a database's and a compiler's guest
//! every level makes 2.7 to 3 % less so. Packing the quarter by zstd, each way (level -4, the literals entropy-coded), takes four times as long and finds
//! as much: 66.5 and 73.3 MB by level 3, 66.5 and 73.1 as it is reckoned, 68.6 and 75.2 as all pages lie. The whole page instead of the quarter
//! spares another 0.6 % in three times as long: level 9 has the time for that.
//!
//! So this is for who looks far back ([`Reach::Far`]), and while the guest runs.

use crate::config::Reach;
use crate::format;
use crate::record::{PAGE_SIZE, PageBytes};
use std::ops::Range;

/// From this level of zstd's on.
const FROM_LEVEL: i32 = 1;
/// From this one on whole pages are reckoned: a slow link has time for it, and who wants the fewest bytes takes it.
const WHOLE_FROM_LEVEL: i32 = 9;
/// What is looked at of a page below, bytes: its middle.
const SAMPLE: usize = PAGE_SIZE / 4;
/// Where a smaller part of the bytes are those of a word before, one in so many, the page is text or code, or packed already.
const ALIKE: usize = 16;
/// What does not become so much smaller apart, one part in so many, goes as it lies.
const GAIN: u32 = 10;

/// A match that is reckoned with has so many bytes, as level 1's have.
const MATCH: usize = 5;
/// Matches are looked for at each second place only.
const STEP: usize = 2;
/// Logarithm of how many places of what went before are remembered.
const PLACES_LOG: u32 = 9;
/// What is reckoned, in parts of a bit.
const BIT: u32 = 16;
/// A match, and one as far back as the match before it. Dearer ones let more pages go apart, and make more of the streams.
const MATCH_COSTS: u32 = 14 * BIT;
const AGAIN_COSTS: u32 = 10 * BIT;
/// To say how often a byte is there.
const BYTE_COSTS: u32 = 3 * BIT;

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

/// Reckons which way a page packs best.
pub(crate) struct Shuffler {
    /// The part of a page that is looked at.
    sample: Range<usize>,
    /// By n, n times its logarithm.
    logs: Vec<u32>,
}

impl Shuffler {
    /// For a stream of this level, which looks so far back; `None` where pages go as they are.
    pub(crate) fn of(level: i32, reach: Reach) -> Option<Self> {
        if level < FROM_LEVEL || reach == Reach::Near {
            return None;
        }
        let looked_at = if level < WHOLE_FROM_LEVEL { SAMPLE } else { PAGE_SIZE };
        let sample = (PAGE_SIZE - looked_at) / 2..(PAGE_SIZE + looked_at) / 2;
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "at most 4096 * 12 * 16")]
        let log = |n: usize| (BIT as f32 * n as f32 * (n.max(1) as f32).log2()) as u32;
        Some(Self { sample, logs: (0..=looked_at).map(log).collect() })
    }

    /// The way, and the page laid so; `None`: as it is.
    pub(crate) fn best(&self, page: &PageBytes) -> Option<(Word, PageBytes)> {
        let sample = &page[self.sample.clone()];
        let [four, eight] = [4, 8].map(|word| alike(sample, word));
        let (alike, word) = if eight > four { (eight, Word::Eight) } else { (four, Word::Four) };
        if alike * ALIKE < sample.len() {
            return None;
        }
        let (mut laid, as_it_lies) = ([0; PAGE_SIZE], self.reckon(sample));
        let laid = &mut laid[..sample.len()];
        word.lay_apart(sample, laid);
        (self.reckon(laid) < as_it_lies - as_it_lies / GAIN).then(|| (word, word.apart(page)))
    }

    /// What such a part of a page packs to by itself, roughly, in parts of a bit.
    fn reckon(&self, part: &[u8]) -> u32 {
        let eight = |at: usize| u64::from_le_bytes(*part[at..].first_chunk().expect("there are eight"));
        let first = |at: usize| eight(at) << (64 - 8 * MATCH);
        // Where such a match was last, and one more; 0: nowhere.
        let mut places = [0_u16; 1 << PLACES_LOG];
        let mut bytes = [0_u16; 256];
        let (mut at, mut back, mut cost) = (0, 0, 0);
        while at + 8 <= part.len() {
            let these = first(at);
            let place = &mut places[(these.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - PLACES_LOG)) as usize];
            #[allow(clippy::cast_possible_truncation, reason = "a page has 4096 bytes")]
            let before = std::mem::replace(place, at as u16 + 1) as usize;
            if before == 0 || first(before - 1) != these {
                part[at..at + STEP].iter().for_each(|byte| bytes[usize::from(*byte)] += 1);
                at += STEP;
                continue;
            }
            let so_far = at - (before - 1);
            cost += if so_far == back { AGAIN_COSTS } else { MATCH_COSTS };
            back = so_far;
            at += MATCH;
            while at + 8 <= part.len() {
                let same = ((eight(at) ^ eight(at - back)).trailing_zeros() / 8) as usize;
                at += same;
                if same < 8 {
                    break;
                }
            }
        }
        part[at..].iter().for_each(|byte| bytes[usize::from(*byte)] += 1);
        let (mut all, mut each) = (0, 0);
        for n in bytes.map(usize::from) {
            all += n;
            each += self.logs[n];
            cost += if n > 0 { BYTE_COSTS } else { 0 };
        }
        cost + self.logs[all] - each.min(self.logs[all])
    }
}

/// How many bytes are that of the word before.
fn alike(part: &[u8], word: usize) -> usize {
    let same: u32 = part.iter().zip(&part[word..]).map(|(before, byte)| u32::from(before == byte)).sum();
    same as usize
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

    fn best(level: i32, page: &PageBytes) -> Option<(Word, PageBytes)> {
        Shuffler::of(level, Reach::Far).unwrap().best(page)
    }

    /// By zstd, with what of it codes what no match covers.
    fn packs_to(page: &PageBytes) -> usize {
        zstd::bulk::compress(page, 3).unwrap().len()
    }

    fn text() -> PageBytes {
        let words = ["page ", "guest ", "memory ", "of ", "the ", "link, ", "and ", "bytes "];
        let text: String = (0..PAGE_SIZE).map(|n| words[(n.wrapping_mul(0x9e37_79b9) >> 13) % words.len()]).collect();
        *text.as_bytes().first_chunk().unwrap()
    }

    #[test]
    fn a_page_table_goes_apart_and_text_as_it_is() {
        for level in [FROM_LEVEL, WHOLE_FROM_LEVEL] {
            let (word, laid) = best(level, &page_table()).unwrap();
            assert_eq!(word.together(&laid), page_table());
            let (plain, apart) = (packs_to(&page_table()), packs_to(&laid));
            assert!(apart * 10 < plain * 9, "{plain} as it lies, {apart} apart");
            assert!(best(level, &text()).is_none());
            assert!(best(level, &[7; PAGE_SIZE]).is_none());
        }
    }

    #[test]
    fn words_of_four_bytes_are_known_from_those_of_eight() {
        let mut page = [0; PAGE_SIZE];
        for (n, word) in page.chunks_exact_mut(4).enumerate() {
            let low = (n as u32).wrapping_mul(0x9e37_79b9) >> 16;
            word.copy_from_slice(&(0x5a81_0000 | low).to_le_bytes());
        }
        assert_eq!(best(FROM_LEVEL, &page).map(|(word, _)| word), Some(Word::Four));
        assert_eq!(best(FROM_LEVEL, &page_table()).map(|(word, _)| word), Some(Word::Eight));
    }

    #[test]
    fn the_middle_speaks_for_a_page_below_level_9() {
        let mut page = text();
        let middle = (PAGE_SIZE - SAMPLE) / 2..(PAGE_SIZE + SAMPLE) / 2;
        page[middle.clone()].copy_from_slice(&page_table()[middle]);
        assert!(best(FROM_LEVEL, &page).is_some() && best(WHOLE_FROM_LEVEL - 1, &page).is_some());
        assert!(best(WHOLE_FROM_LEVEL, &page).is_none(), "as a whole it is text");
    }

    #[test]
    fn who_has_no_time_to_look_far_back_has_none_for_this() {
        assert!(Shuffler::of(FROM_LEVEL, Reach::Near).is_none());
        assert!(Shuffler::of(FROM_LEVEL - 1, Reach::Far).is_none());
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
            for level in [FROM_LEVEL, WHOLE_FROM_LEVEL] {
                if let Some((word, laid)) = best(level, page) {
                    prop_assert_eq!(word.together(&laid), *page);
                }
            }
        }
    }
}
