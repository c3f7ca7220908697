//! A region's entries in memory: each different one once, and for each block a byte that says which. What was written in one go has one entry, and
//! few regions are written in more than [`FEW`] epochs since; those have eight bytes a block, as all have in the file. So the entries of a
//! disk's hot parts are in a processor's caches when a guest writes there.

use std::ops::Range;

/// Different entries that a byte can tell apart.
const FEW: usize = 1 << u8::BITS;

#[derive(Debug)]
pub(crate) struct Entries(Form);

#[derive(Debug)]
enum Form {
    Few {
        /// The latest that became one is the last. Some may be no block's any more.
        different: Vec<u64>,
        which: Box<[u8]>,
    },
    Many(Box<[u64]>),
}

impl Entries {
    /// As they are in the table's file.
    pub fn of_bytes(bytes: &[u8]) -> Self {
        Self::of(bytes.as_chunks::<8>().0.iter().map(|b| u64::from_le_bytes(*b)).collect())
    }

    fn of(all: Box<[u64]>) -> Self {
        let (mut different, mut which, mut last) = (vec![], Vec::with_capacity(all.len()), 0);
        for entry in &all {
            // Neighbours are alike as a rule.
            if different.get(last) != Some(entry) {
                last = match index(&mut different, *entry) {
                    Some(index) => index,
                    None => return Self(Form::Many(all)),
                };
            }
            which.push(last as u8);
        }
        different.shrink_to_fit();
        Self(Form::Few { different, which: which.into() })
    }

    pub fn bytes(&self) -> Vec<u8> {
        self.iter().flat_map(u64::to_le_bytes).collect()
    }

    pub fn get(&self, at: usize) -> u64 {
        match &self.0 {
            Form::Few { different, which } => different[usize::from(which[at])],
            Form::Many(all) => all[at],
        }
    }

    pub fn iter(&self) -> impl Iterator<Item = u64> {
        let blocks = match &self.0 {
            Form::Few { which, .. } => which.len(),
            Form::Many(all) => all.len(),
        };
        (0..blocks).map(|at| self.get(at))
    }

    /// How many are not 0.
    pub fn written(&self, blocks: Range<usize>) -> usize {
        blocks.filter(|at| self.get(*at) != 0).count()
    }

    pub fn fill(&mut self, blocks: Range<usize>, entry: u64) {
        match &mut self.0 {
            Form::Many(all) => all[blocks].fill(entry),
            Form::Few { different, which } => match index(different, entry) {
                Some(index) => which[blocks].fill(index as u8),
                None => {
                    // Without those that are no block's any more there may be few still.
                    let mut all: Box<[u64]> = self.iter().collect();
                    all[blocks].fill(entry);
                    *self = Self::of(all);
                }
            },
        }
    }
}

/// Where it is among the different ones, of which it is one from now on; nothing where they would be too many.
fn index(different: &mut Vec<u64>, entry: u64) -> Option<usize> {
    // What is written now has the latest, as a rule.
    let known = different.iter().rposition(|known| *known == entry);
    known.or_else(|| {
        let fresh = different.len();
        (fresh < FEW).then(|| different.push(entry)).map(|()| fresh)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::{Rng, SeedableRng, rngs::SmallRng};

    const BLOCKS: usize = 1024;

    fn are(entries: &Entries, model: &[u64]) {
        assert!(entries.iter().eq(model.iter().copied()));
        assert_eq!(entries.written(0..BLOCKS), model.iter().filter(|e| **e != 0).count());
        let again = Entries::of_bytes(&entries.bytes());
        assert!(again.iter().eq(model.iter().copied()), "the file has the same");
    }

    #[test]
    fn whatever_is_written_in_however_many_epochs_each_block_has_its_own_entry() {
        let mut rng = SmallRng::seed_from_u64(7);
        for longest in [1, 16, BLOCKS] {
            let (mut entries, mut model) = (Entries::of_bytes(&[0; BLOCKS * 8]), vec![0u64; BLOCKS]);
            for step in 0..4 * BLOCKS as u64 {
                let from = rng.random_range(0..BLOCKS);
                let to = (from + rng.random_range(1..=longest)).min(BLOCKS);
                // Now and then one of before, or none.
                let entry = if rng.random_range(0..4) == 0 { model[rng.random_range(0..BLOCKS)] } else { step / 2 };
                entries.fill(from..to, entry);
                model[from..to].fill(entry);
                assert_eq!(entries.get(from), entry);
                if step % 64 == 0 {
                    are(&entries, &model);
                }
            }
            are(&entries, &model);
        }
    }

    #[test]
    fn a_byte_is_enough_for_what_is_there_though_more_has_been() {
        let mut entries = Entries::of_bytes(&[0; BLOCKS * 8]);
        let few = |entries: &Entries| matches!(entries.0, Form::Few { .. });
        for epoch in 1..10_000 {
            entries.fill(0..BLOCKS / 2, epoch);
        }
        assert!(few(&entries), "two are there");
        for block in 0..FEW {
            entries.fill(block..block + 1, 20_000 + block as u64);
        }
        assert!(!few(&entries));
        // From the file, once they are few.
        entries.fill(0..BLOCKS, 1);
        assert!(few(&Entries::of_bytes(&entries.bytes())));
    }
}
