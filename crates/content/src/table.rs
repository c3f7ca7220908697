//! A table of marks that takes a fixed amount of memory, and forgets.
//!
//! Buckets of [`WAYS`] places; a mark's bits choose its bucket, in which the latest stands first. So an entry costs what it is, 8 bytes
//! and its value; nothing is ever moved to grow; and what the system gives is zeroes that take no memory until they are used. A hash
//! map with a queue costs three to four times as much for an entry, and twice that while it grows.
//!
//! From a bucket that is full falls one of those behind the [`SAFE`] latest, as good as by chance. The oldest would be wrong here: a
//! second volume made of the same image brings the same blocks in the same order, and where they do not all fit, each would fall out shortly before it
//! is wanted. Of so many marks as there are places, which come again in the same order, 70 in 100 are found (46 if the oldest fell), of
//! twice as many 15 (1). The price: of the latest n a table of n places knows 71 in 100 (86).

use crate::digest::Mark;

/// Places of a bucket: 64 bytes of marks, a line of a processor's cache.
const WAYS: usize = 8;
/// The latest of a bucket, which do not fall out.
const SAFE: usize = 2;

#[derive(Debug)]
pub(crate) struct Table<V> {
    marks: Vec<u64>,
    values: Vec<V>,
    held: usize,
}

impl<V: Copy + Default> Table<V> {
    /// Bytes of an entry.
    pub(crate) const COST: usize = size_of::<u64>() + size_of::<V>();

    /// As many places as so many bytes have room for; at least one bucket.
    pub(crate) fn new(bytes: usize) -> Self {
        let places = (bytes / Self::COST / WAYS).max(1) * WAYS;
        Self { marks: vec![0; places], values: vec![V::default(); places], held: 0 }
    }

    pub(crate) fn places(&self) -> usize {
        self.marks.len()
    }

    pub(crate) fn len(&self) -> usize {
        self.held
    }

    fn bucket(&self, mark: Mark) -> std::ops::Range<usize> {
        // The upper bits choose, by multiplication: the number of buckets need not be a power of two.
        let buckets = (self.marks.len() / WAYS) as u128;
        let n = ((u128::from(mark.bits()) * buckets) >> 64) as usize;
        n * WAYS..(n + 1) * WAYS
    }

    fn find(&self, mark: Mark) -> Option<usize> {
        self.bucket(mark).find(|at| self.marks[*at] == mark.bits())
    }

    pub(crate) fn get(&self, mark: Mark) -> Option<V> {
        self.find(mark).map(|at| self.values[at])
    }

    pub(crate) fn insert(&mut self, mark: Mark, value: V) {
        let bucket = self.bucket(mark);
        // Its own place, else the first that is free, else one that its lower bits choose; the upper ones chose the bucket.
        let falls = bucket.start + SAFE + (mark.bits() % (WAYS - SAFE) as u64) as usize;
        let at = self.find(mark).or_else(|| bucket.clone().find(|at| self.marks[*at] == 0)).unwrap_or(falls);
        self.held += usize::from(self.marks[at] == 0);
        self.marks.copy_within(bucket.start..at, bucket.start + 1);
        self.values.copy_within(bucket.start..at, bucket.start + 1);
        (self.marks[bucket.start], self.values[bucket.start]) = (mark.bits(), value);
    }

    pub(crate) fn remove(&mut self, mark: Mark) -> Option<V> {
        let at = self.find(mark)?;
        let value = self.values[at];
        let end = self.bucket(mark).end;
        self.marks.copy_within(at + 1..end, at);
        self.values.copy_within(at + 1..end, at);
        (self.marks[end - 1], self.values[end - 1]) = (0, V::default());
        self.held -= 1;
        Some(value)
    }

    pub(crate) fn clear(&mut self) {
        self.marks.fill(0);
        self.values.fill(V::default());
        self.held = 0;
    }

    /// All marks, each bucket's latest before any bucket's second.
    pub(crate) fn latest_first(&self) -> impl Iterator<Item = Mark> + '_ {
        (0..WAYS)
            .flat_map(|way| self.marks.iter().skip(way).step_by(WAYS))
            .filter(|bits| **bits != 0)
            .map(|bits| Mark::new(*bits))
            // Not through what is empty behind the last of them.
            .take(self.held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    fn spread(n: u64) -> Mark {
        Mark::new(n.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (n << 40))
    }

    proptest! {
        #[test]
        fn what_it_finds_is_what_was_put_last_and_it_counts_what_it_holds(
            steps in prop::collection::vec((0u64..40, any::<u32>(), any::<bool>()), 0..400),
        ) {
            let (mut table, mut model) = (Table::<u32>::new(200), HashMap::new());
            prop_assert_eq!(table.places(), 16);
            for (n, value, put) in steps {
                if put {
                    table.insert(spread(n), value);
                    model.insert(n, value);
                    prop_assert_eq!(table.get(spread(n)), Some(value), "the latest is always there");
                } else {
                    let found = table.remove(spread(n));
                    prop_assert!(found.is_none() || found == model.get(&n).copied());
                    model.remove(&n);
                    prop_assert_eq!(table.get(spread(n)), None);
                }
                for (n, value) in &model {
                    prop_assert!(table.get(spread(*n)).is_none_or(|found| found == *value));
                }
                prop_assert_eq!(table.len(), table.latest_first().count());
                prop_assert!(table.len() <= table.places());
            }
        }
    }

    #[test]
    fn of_the_latest_as_many_as_it_has_places_it_keeps_two_thirds_and_finds_as_many_that_come_again_in_the_same_order()
    {
        let mut table = Table::<()>::new(8 * 10_000);
        assert_eq!((table.places(), Table::<()>::COST, Table::<u64>::COST), (10_000, 8, 16));
        let mark = |n: u64| {
            Mark::new(blake3::hash(&n.to_le_bytes()).as_bytes()[..8].iter().fold(0, |a, b| a << 8 | u64::from(*b)))
        };
        for n in 0..30_000 {
            table.insert(mark(n), ());
        }
        let kept = (20_000..30_000).filter(|n| table.get(mark(*n)).is_some()).count();
        assert!((6_700..8_000).contains(&kept), "{kept}");
        for (count, least) in [(5_000, 4_600), (10_000, 6_700), (20_000, 2_000)] {
            let mut table = Table::<()>::new(8 * 10_000);
            let mut pass = || {
                let found = |n: &u64| {
                    let found = table.get(mark(*n)).is_some();
                    table.insert(mark(*n), ());
                    found
                };
                (0..count).filter(found).count()
            };
            assert_eq!(pass(), 0);
            let (second, third) = (pass(), pass());
            assert!(second >= least && third >= least, "{second} and {third} of {count}");
        }
    }

    #[test]
    fn what_is_used_again_outlives_what_is_not() {
        let mut table = Table::<()>::new(8 * WAYS);
        table.insert(Mark::new(1), ());
        for n in 2..100 {
            table.insert(Mark::new(n), ());
            table.insert(Mark::new(1), ());
        }
        assert_eq!(table.latest_first().take(2).collect::<Vec<_>>(), [1, 99].map(Mark::new));
        assert_eq!(table.len(), WAYS);
    }
}
