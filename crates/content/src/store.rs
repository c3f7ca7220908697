//! Contents kept in memory: a dictionary for what lies nowhere else.

use crate::dictionary::{ContentSource, Dictionary, Place};
use crate::digest::{BLOCK, Block, Digest, Key, Mark, is_zero};
use godwit_units::Bytes;

/// The latest blocks, first in, first out (CloudNet's cache), within a bound of memory.
#[derive(Debug)]
pub struct Store {
    dictionary: Dictionary,
    /// Grows to `most` blocks; then the oldest is overwritten.
    blocks: Vec<Block>,
    /// Of each of them.
    marks: Vec<Mark>,
    most: usize,
    next: usize,
}

impl Store {
    /// Bytes that a block costs: itself, its mark, and two entries of the dictionary. Two, because with twice as many places as
    /// there are blocks next to none falls out of the dictionary before it falls out of the store.
    pub const COST: usize = BLOCK + size_of::<Mark>() + 2 * Dictionary::COST;

    /// An empty one, that never takes more than this (but for the least, one block).
    #[must_use]
    pub fn new(key: Key, memory: Bytes) -> Self {
        let most = (usize::try_from(memory.0).unwrap_or(usize::MAX) / Self::COST).max(1);
        let dictionary = Dictionary::new(key, Bytes((most * 2 * Dictionary::COST) as u64));
        Self { dictionary, blocks: vec![], marks: vec![], most, next: 0 }
    }

    /// The dictionary to it.
    #[must_use]
    pub const fn dictionary(&self) -> &Dictionary {
        &self.dictionary
    }

    /// How many blocks it can keep.
    #[must_use]
    pub const fn places(&self) -> usize {
        self.most
    }

    /// Keeps a block, if it is not zero and not here yet.
    pub fn keep(&mut self, block: &Block) {
        if is_zero(block) {
            return;
        }
        let digest = self.dictionary.key().digest(block);
        if self.at(&digest).is_some_and(|held| held == block) {
            return;
        }
        if self.blocks.len() < self.most {
            if self.blocks.len() == self.blocks.capacity() {
                // By a quarter, and to the bound exactly: doubling would take up to twice the bound.
                let more = (self.blocks.len() / 4).clamp(16, 1 << 14).min(self.most - self.blocks.len());
                self.blocks.reserve_exact(more);
                self.marks.reserve_exact(more);
            }
            self.blocks.push(*block);
            self.marks.push(digest.mark());
        } else {
            self.dictionary.forget(self.marks[self.next], Place(self.next as u64));
            (self.blocks[self.next], self.marks[self.next]) = (*block, digest.mark());
        }
        self.dictionary.learn_digest(&digest, Place(self.next as u64));
        self.next = (self.next + 1) % self.most;
    }

    fn at(&self, digest: &Digest) -> Option<&Block> {
        let place = self.dictionary.place(digest)?;
        self.blocks.get(usize::try_from(place.0).ok()?)
    }
}

impl ContentSource for Store {
    fn copy(&self, digest: &Digest, into: &mut Block) -> bool {
        self.at(digest).map(|held| *into = *held).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dictionary::fetch;

    fn block(n: u32) -> Block {
        std::array::from_fn(|i| (n.wrapping_mul(0x9e37_79b9).rotate_left(i as u32) >> (i % 3)) as u8 | 1)
    }

    #[test]
    fn it_keeps_the_latest_within_its_bound_and_gives_nothing_else_for_a_name() {
        let key = Key::new([3; 32]);
        let mut store = Store::new(key.clone(), Bytes((100 * Store::COST) as u64));
        assert_eq!((store.places(), Store::COST), (100, 4136));
        for n in 0..250 {
            store.keep(&block(n));
            store.keep(&block(n));
            store.keep(&[0; BLOCK]);
        }
        let found = |n| fetch(&store, &key, &key.digest(&block(n)));
        // Those that have fallen out lead nowhere.
        assert_eq!((0..150).filter(|n| found(*n).is_some()).count(), 0);
        let kept = (150..250).filter(|n| found(*n).is_some_and(|held| *held == block(*n))).count();
        assert!(kept >= 95, "{kept}");
        assert!(fetch(&store, &key, &key.digest(&[0; BLOCK])).is_none());
        assert!(
            store.blocks.capacity() <= 100 && store.dictionary.places() * Dictionary::COST <= 200 * Dictionary::COST
        );
    }

    #[test]
    fn what_changes_after_it_was_named_is_not_used() {
        struct Rots(Block);
        impl ContentSource for Rots {
            fn copy(&self, _: &Digest, into: &mut Block) -> bool {
                *into = self.0;
                true
            }
        }
        let key = Key::new([3; 32]);
        let mut source = Rots(block(1));
        let digest = key.digest(&block(1));
        assert_eq!(*fetch(&source, &key, &digest).expect("it is sound"), block(1));
        source.0[100] ^= 1;
        assert!(fetch(&source, &key, &digest).is_none());
        source.0[100] ^= 1;
        assert!(fetch(&source, &Key::new([4; 32]), &digest).is_none(), "another domain's name");
    }
}
