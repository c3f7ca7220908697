//! The receiver's side: where contents lie, and how they are used.

use crate::digest::{BLOCK, Block, Digest, Key, Mark, is_zero};
use crate::frame;
use crate::table::Table;
use godwit_units::Bytes;

/// Where some contents lie, in the words of who keeps them: for volumes, which volume and which block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Place(pub u64);

/// Gives contents by their name.
pub trait ContentSource {
    /// Copies what may be the contents of this name to `into`; `false`: it has none. It need not be sure: [`fetch`] verifies.
    fn copy(&self, digest: &Digest, into: &mut Block) -> bool;
}

/// Contents that were compared with their name, in memory that nobody else writes to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verified(Box<Block>);

impl std::ops::Deref for Verified {
    type Target = Block;

    fn deref(&self) -> &Block {
        &self.0
    }
}

/// What a name stands for: copied out, then verified. `None` where the source does not have it, or has something else.
#[must_use]
pub fn fetch(source: &dyn ContentSource, key: &Key, digest: &Digest) -> Option<Verified> {
    let mut copy = Box::new([0; BLOCK]);
    (source.copy(digest, &mut copy) && key.digest(&copy[..]) == *digest).then_some(Verified(copy))
}

/// Which contents lie where, in one trust domain. It has no contents, so it costs 16 bytes for a block of 4096: 4 MiB for
/// each GiB that it knows.
#[derive(Debug)]
pub struct Dictionary {
    key: Key,
    places: Table<u64>,
}

impl Dictionary {
    /// Bytes of memory that an entry takes.
    pub const COST: usize = Table::<u64>::COST;

    /// An empty one, under a new random key, that never takes more memory than this (but for the least, 128 bytes).
    #[must_use]
    pub fn new(key: Key, memory: Bytes) -> Self {
        Self { key, places: Table::new(usize::try_from(memory.0).unwrap_or(usize::MAX)) }
    }

    /// The key of its names.
    #[must_use]
    pub const fn key(&self) -> &Key {
        &self.key
    }

    /// How many blocks it can know; of the latest so many it knows about 71 in 100.
    #[must_use]
    pub fn places(&self) -> usize {
        self.places.places()
    }

    /// How many blocks it knows.
    #[must_use]
    pub fn len(&self) -> usize {
        self.places.len()
    }

    /// Whether it knows none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A block with these contents lies there now. Zeroes are not taken note of.
    pub fn learn(&mut self, block: &[u8], place: Place) {
        if block.len() == BLOCK && !is_zero(block) {
            let digest = self.key.digest(block);
            self.learn_digest(&digest, place);
        }
    }

    /// The same, where the digest is known.
    pub fn learn_digest(&mut self, digest: &Digest, place: Place) {
        self.places.insert(digest.mark(), place.0);
    }

    /// Where a block of this name may lie.
    #[must_use]
    pub fn place(&self, digest: &Digest) -> Option<Place> {
        self.places.get(digest.mark()).map(Place)
    }

    /// What has this mark does not lie there any more.
    pub(crate) fn forget(&mut self, mark: Mark, place: Place) {
        if self.places.get(mark) == Some(place.0) {
            self.places.remove(mark);
        }
    }

    /// What to tell a sender first: the key, and of what is held, the latest first, so many marks at the most.
    #[must_use]
    pub fn greetings(&self, most: usize) -> Vec<Vec<u8>> {
        let marks: Vec<Mark> = self.places.latest_first().take(most).collect();
        frame::greetings(&self.key, &marks)
    }
}
