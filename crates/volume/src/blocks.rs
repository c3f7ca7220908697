//! Blocks, and sets of them.

use godwit_units::BlockIndex;
use std::collections::BTreeMap;
use std::ops::Range;

/// Bytes of a block: a page, and what file systems write at least.
pub const BLOCK: u64 = 4096;
/// Blocks of a chunk of a set.
const CHUNK: u64 = 64 * 16;

/// The blocks that bytes `offset..offset + length` touch.
#[must_use]
pub fn touched(offset: u64, length: u64) -> Range<u64> {
    if length == 0 { offset / BLOCK..offset / BLOCK } else { offset / BLOCK..(offset + length - 1) / BLOCK + 1 }
}

/// A set of blocks that takes memory for what is in it, not for the volume.
#[derive(Clone, Debug, Default)]
pub struct BlockSet {
    chunks: BTreeMap<u64, Box<[u64; 16]>>,
    len: u64,
}

impl BlockSet {
    /// How many blocks are in it.
    #[must_use]
    pub const fn len(&self) -> u64 {
        self.len
    }

    /// Whether none is.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Adds blocks.
    pub fn insert(&mut self, blocks: Range<u64>) {
        for block in blocks {
            let chunk = self.chunks.entry(block / CHUNK).or_default();
            let (word, bit) = ((block % CHUNK / 64) as usize, 1 << (block % 64));
            if chunk[word] & bit == 0 {
                chunk[word] |= bit;
                self.len += 1;
            }
        }
    }

    /// Adds another set's.
    pub fn union(&mut self, other: &Self) {
        for (index, theirs) in &other.chunks {
            let chunk = self.chunks.entry(*index).or_default();
            for (word, bits) in chunk.iter_mut().zip(theirs.iter()) {
                self.len += u64::from((bits & !*word).count_ones());
                *word |= bits;
            }
        }
    }

    /// How many blocks are in any of these sets, from a chunk on, of so many chunks at the most; and with which chunk to go on, if there are more.
    pub(crate) fn count_any<const N: usize>(sets: [&Self; N], from: u64, most: usize) -> (u64, Option<u64>) {
        let mut rest = sets.map(|set| set.chunks.range(from..).peekable());
        let (mut found, mut counted) = (0, 0);
        loop {
            let next = rest.iter_mut().filter_map(|chunks| chunks.peek().map(|(index, _)| **index)).min();
            let Some(index) = next.filter(|_| counted < most) else { return (found, next) };
            counted += 1;
            let mut any = [0_u64; 16];
            for chunks in &mut rest {
                if let Some((_, chunk)) = chunks.next_if(|(at, _)| **at == index) {
                    any.iter_mut().zip(chunk.iter()).for_each(|(any, word)| *any |= word);
                }
            }
            found += any.iter().map(|word| u64::from(word.count_ones())).sum::<u64>();
        }
    }

    /// Removes blocks.
    pub fn remove(&mut self, blocks: Range<u64>) {
        for block in blocks {
            let Some(chunk) = self.chunks.get_mut(&(block / CHUNK)) else { continue };
            let (word, bit) = ((block % CHUNK / 64) as usize, 1 << (block % 64));
            if chunk[word] & bit != 0 {
                chunk[word] &= !bit;
                self.len -= 1;
                if chunk.iter().all(|w| *w == 0) {
                    self.chunks.remove(&(block / CHUNK));
                }
            }
        }
    }

    /// Whether a block is in it.
    #[must_use]
    pub fn contains(&self, BlockIndex(block): BlockIndex) -> bool {
        self.chunks.get(&(block / CHUNK)).is_some_and(|c| c[(block % CHUNK / 64) as usize] & (1 << (block % 64)) != 0)
    }

    /// The first run at or after `from`, at most `most` blocks of it; from the beginning again when there is none.
    #[must_use]
    pub fn run_from(&self, from: u64, most: u64) -> Option<Range<u64>> {
        let first = self.first_from(from).or_else(|| self.first_from(0))?;
        let mut end = first + 1;
        while end - first < most && self.contains(BlockIndex(end)) {
            end += 1;
        }
        Some(first..end)
    }

    /// The first run at or after `from`, at most `most` blocks of it.
    #[must_use]
    pub fn run_after(&self, from: u64, most: u64) -> Option<Range<u64>> {
        self.first_from(from).and_then(|first| self.run_from(first, most))
    }

    /// All runs, in order.
    pub fn runs(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        let mut from = 0;
        std::iter::from_fn(move || {
            let run = self.run_after(from, u64::MAX)?;
            from = run.end;
            Some(run)
        })
    }

    fn first_from(&self, from: u64) -> Option<u64> {
        for (index, chunk) in self.chunks.range(from / CHUNK..) {
            let start = if *index == from / CHUNK { from % CHUNK } else { 0 };
            for word in start / 64..16 {
                let mask = if word == start / 64 { u64::MAX << (start % 64) } else { u64::MAX };
                let bits = chunk[word as usize] & mask;
                if bits != 0 {
                    return Some(index * CHUNK + word * 64 + u64::from(bits.trailing_zeros()));
                }
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    proptest::proptest! {
        #[test]
        fn a_set_holds_what_was_put_in_and_not_taken_out(steps in proptest::collection::vec((0_u64..5000, 1_u64..200, proptest::bool::ANY), 1..60), from in 0_u64..5200) {
            let (mut set, mut model) = (BlockSet::default(), BTreeSet::new());
            for (first, count, put) in steps {
                if put {
                    set.insert(first..first + count);
                    model.extend(first..first + count);
                } else {
                    set.remove(first..first + count);
                    model.retain(|b| !(first..first + count).contains(b));
                }
            }
            let mut both = BlockSet::default();
            both.insert(0..70);
            both.union(&set);
            proptest::prop_assert_eq!(both.len(), model.iter().filter(|b| **b >= 70).count() as u64 + 70);
            proptest::prop_assert_eq!(set.len(), model.len() as u64);
            proptest::prop_assert_eq!(set.runs().flatten().collect::<BTreeSet<_>>(), model.clone());
            let first = model.range(from..).next().or_else(|| model.first()).copied();
            proptest::prop_assert_eq!(set.run_from(from, 64).map(|r| r.start), first);
            if let Some(run) = set.run_from(from, 64) {
                proptest::prop_assert!(run.clone().all(|b| model.contains(&b)));
                proptest::prop_assert!(run.end - run.start == 64 || !model.contains(&run.end));
            }
        }
    }

    proptest::proptest! {
        #[test]
        fn what_is_in_any_of_several_sets_is_counted_once_however_many_chunks_are_looked_at_together(runs in proptest::collection::vec((0_u64..40_000, 1_u64..3000, 0_usize..3), 0..12), most in 1_usize..50) {
            let mut sets = [(); 3].map(|()| BlockSet::default());
            for (first, count, set) in runs {
                sets[set].insert(first..first + count);
            }
            let mut all = BlockSet::default();
            sets.iter().for_each(|set| all.union(set));
            let (mut found, mut from) = (0, Some(0));
            while let Some(at) = from {
                let (more, next) = BlockSet::count_any([&sets[0], &sets[1], &sets[2]], at, most);
                proptest::prop_assert!(next.is_none_or(|next| next > at));
                (found, from) = (found + more, next);
            }
            proptest::prop_assert_eq!(found, all.len());
        }
    }

    #[test]
    fn bytes_touch_the_blocks_that_they_lie_in() {
        assert_eq!(touched(0, 4096), 0..1);
        assert_eq!(touched(4095, 2), 0..2);
        assert_eq!(touched(4096, 0), 1..1);
    }
}
