//! The difference between two versions of a page: which of its 512 words of eight bytes differ, in runs, and their XOR.
//!
//! ```text
//!   number of runs | for each: equal words before it, its length | the XOR of all words that differ, 8 bytes each
//! ```
//!
//! Numbers are LEB128, and few of them have more than one byte. A counter that went up, or a pointer into the same arena, leaves words
//! of which most bytes are zero: zstd, which is behind this, makes little of them. Words and not bytes, because what guests write
//! are words: half as many runs, and comparing is one instruction for four words. Two equal pages differ by one byte: no runs.
//!
//! This is the only place with unsafe code in the crate, for AVX2 where the processor has it: 64 bytes of each page are compared at once, and
//! what the compiler makes of the portable form is three times slower (`cargo run --release --example ratio`).
//! `both_ways_of_comparing_find_the_same` holds one against the other.

use crate::cursor::{Cursor, Stop};
use crate::format;
use crate::record::{PAGE_SIZE, PageBytes};

/// Bytes of a word.
const WORD: usize = 8;
/// Words of a page.
pub(crate) const WORDS: usize = PAGE_SIZE / WORD;
/// Runs of a difference, at most: every other word.
const MOST_RUNS: u64 = WORDS as u64 / 2;

/// Which words of a page differ: a bit for each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Differing([u64; WORDS / 64]);

impl Differing {
    /// Compares two versions.
    pub(crate) fn between(old: &PageBytes, new: &PageBytes) -> Self {
        #[cfg(target_arch = "x86_64")]
        if std::arch::is_x86_feature_detected!("avx2") {
            // SAFETY: the processor has AVX2; it was just asked, and a processor does not lose it.
            #[allow(unsafe_code, reason = "measured to pay; argued above")]
            return Self(unsafe { avx2::compare(old, new) });
        }
        Self(compare(old, new))
    }

    /// How many differ.
    pub(crate) fn words(&self) -> usize {
        self.0.iter().map(|bits| bits.count_ones() as usize).sum()
    }

    /// The first word from this one on that differs, or that does not; [`WORDS`] if there is none.
    fn next(&self, from: usize, differs: bool) -> usize {
        let mut at = from;
        while at < WORDS {
            let bits = if differs { self.0[at / 64] } else { !self.0[at / 64] };
            let rest = bits >> (at % 64);
            if rest != 0 {
                return at + rest.trailing_zeros() as usize;
            }
            at = (at / 64 + 1) * 64;
        }
        WORDS
    }

    /// Runs of words that differ: where each begins and ends.
    fn runs(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        let mut at = 0;
        std::iter::from_fn(move || {
            let begin = self.next(at, true);
            let end = self.next(begin, false);
            at = end;
            (begin < WORDS).then_some((begin, end))
        })
    }

    /// Writes what leads from `old` to `new`, of which it is the difference.
    pub(crate) fn write(&self, old: &PageBytes, new: &PageBytes, out: &mut Vec<u8>) {
        format::put(out, self.runs().count() as u64);
        let mut at = 0;
        for (begin, end) in self.runs() {
            format::put(out, (begin - at) as u64);
            format::put(out, (end - begin) as u64);
            at = end;
        }
        for (begin, end) in self.runs() {
            let words = begin * WORD..end * WORD;
            out.extend(old[words.clone()].iter().zip(&new[words]).map(|(old, new)| old ^ new));
        }
    }
}

/// Makes of the old version the new one. Reads all of it before anything is changed: it may be cut.
pub(crate) fn apply(page: &mut PageBytes, c: &mut Cursor<'_>) -> Result<(), Stop<&'static str>> {
    const BAD: Stop<&'static str> = Stop::Bad("a difference of more than a page");
    let number = |c: &mut Cursor<'_>| match format::get(c)? {
        Some(n) if n <= WORDS as u64 => Ok(n as usize),
        _ => Err(BAD),
    };
    let count = format::get(c)?.filter(|count| *count <= MOST_RUNS).ok_or(BAD)?;
    let mut runs = [(0, 0); MOST_RUNS as usize];
    let (mut at, mut words) = (0, 0);
    for run in &mut runs[..count as usize] {
        let begin = at + number(c)?;
        let end = begin + number(c)?;
        if begin == end || end > WORDS {
            return Err(BAD);
        }
        (*run, at) = ((begin, end), end);
        words += end - begin;
    }
    let mut xor = c.take(words * WORD)?;
    for (begin, end) in &runs[..count as usize] {
        let (these, rest) = xor.split_at((end - begin) * WORD);
        page[begin * WORD..end * WORD].iter_mut().zip(these).for_each(|(byte, xor)| *byte ^= xor);
        xor = rest;
    }
    Ok(())
}

/// For every processor.
fn compare(old: &PageBytes, new: &PageBytes) -> [u64; WORDS / 64] {
    let mut found = [0; WORDS / 64];
    for ((found, old), new) in found.iter_mut().zip(old.chunks_exact(64 * WORD)).zip(new.chunks_exact(64 * WORD)) {
        for (n, (old, new)) in old.chunks_exact(WORD).zip(new.chunks_exact(WORD)).enumerate() {
            *found |= u64::from(old != new) << n;
        }
    }
    found
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use super::{PageBytes, WORDS};
    use std::arch::x86_64::{__m256i, _mm256_castsi256_pd, _mm256_cmpeq_epi64, _mm256_loadu_si256, _mm256_movemask_pd};

    /// Bytes compared by one instruction, and the words that are in them.
    const LANE: usize = 32;

    /// As [`super::compare`].
    #[target_feature(enable = "avx2")]
    pub(super) fn compare(old: &PageBytes, new: &PageBytes) -> [u64; WORDS / 64] {
        let mut found = [0; WORDS / 64];
        for (n, (old, new)) in old.chunks_exact(LANE).zip(new.chunks_exact(LANE)).enumerate() {
            // Four bits: which of four words are equal.
            let equal = _mm256_movemask_pd(_mm256_castsi256_pd(_mm256_cmpeq_epi64(load(old), load(new))));
            found[n / 16] |= u64::from(!equal as u8 & 0xf) << (n % 16 * 4);
        }
        found
    }

    #[target_feature(enable = "avx2")]
    #[allow(unsafe_code, reason = "the one load that there is; argued below")]
    fn load(from: &[u8]) -> __m256i {
        let from: &[u8; LANE] = from.first_chunk().expect("a lane has 32 bytes");
        // SAFETY: 32 bytes are borrowed, and that load asks for no alignment.
        unsafe { _mm256_loadu_si256(from.as_ptr().cast()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn changed(fill: u8, changes: &[(usize, u8)]) -> PageBytes {
        let mut page = [fill; PAGE_SIZE];
        changes.iter().for_each(|(at, byte)| page[*at] = *byte);
        page
    }

    fn changes() -> impl Strategy<Value = Vec<(usize, u8)>> {
        prop_oneof![
            proptest::collection::vec((0..PAGE_SIZE, any::<u8>()), 0..40),
            proptest::collection::vec((0..PAGE_SIZE, any::<u8>()), 0..3000),
        ]
    }

    proptest! {
        #[test]
        fn a_delta_leads_from_the_old_version_to_the_new_one(fill: u8, changes in changes()) {
            let (old, new) = ([fill; PAGE_SIZE], changed(fill, &changes));
            let differing = Differing::between(&old, &new);
            let mut delta = vec![];
            differing.write(&old, &new, &mut delta);
            prop_assert_eq!(delta == [0], old == new);
            prop_assert_eq!(differing.words() == 0, old == new);
            let (mut made, mut c) = (old, Cursor::new(&delta));
            prop_assert!(apply(&mut made, &mut c).is_ok());
            prop_assert_eq!(c.at(), delta.len());
            prop_assert!(made == new);
            // Cut anywhere it asks for more, and changes nothing.
            for cut in [0, delta.len() / 2, delta.len() - 1] {
                let mut page = old;
                prop_assert!(matches!(apply(&mut page, &mut Cursor::new(&delta[..cut])), Err(Stop::More)));
                prop_assert!(page == old);
            }
        }

        #[test]
        fn both_ways_of_comparing_find_the_same(fill: u8, changes in changes()) {
            let (old, new) = ([fill; PAGE_SIZE], changed(fill, &changes));
            prop_assert_eq!(Differing::between(&old, &new).0, compare(&old, &new));
        }

        #[test]
        fn no_bytes_make_a_delta_panic(delta in proptest::collection::vec(any::<u8>(), 0..60)) {
            let _ = apply(&mut [0; PAGE_SIZE], &mut Cursor::new(&delta));
        }
    }
}
