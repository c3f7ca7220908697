//! Something for each of some regions of a volume: a guest's write looks there twice, so it is found by two indices and not by a search. Memory is
//! proportional to the GiBs of which there is something.

use std::ops::Range;

/// Regions of a page: 1 GiB of disk.
const PAGE: u64 = 256;

type Page<T> = Box<[Option<T>]>;

#[derive(Debug)]
pub(crate) struct PerRegion<T> {
    /// Up to the last one that there was something of; what is removed leaves its page.
    pages: Vec<Option<Page<T>>>,
    len: usize,
}

impl<T> Default for PerRegion<T> {
    fn default() -> Self {
        Self { pages: vec![], len: 0 }
    }
}

const fn place(region: u64) -> (usize, usize) {
    ((region / PAGE) as usize, (region % PAGE) as usize)
}

/// Where a region's is, or would be.
fn slot<T>(pages: &mut Vec<Option<Page<T>>>, region: u64) -> &mut Option<T> {
    let (page, within) = place(region);
    if page >= pages.len() {
        pages.resize_with(page + 1, || None);
    }
    let slots = pages[page].get_or_insert_with(|| (0..PAGE).map(|_| None).collect());
    &mut slots[within]
}

impl<T> PerRegion<T> {
    /// Of how many regions there is something.
    #[cfg(test)]
    pub const fn len(&self) -> usize {
        self.len
    }

    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub fn contains(&self, region: u64) -> bool {
        self.get(region).is_some()
    }

    pub fn get(&self, region: u64) -> Option<&T> {
        let (page, within) = place(region);
        self.pages.get(page)?.as_ref()?[within].as_ref()
    }

    pub fn get_mut(&mut self, region: u64) -> Option<&mut T> {
        let (page, within) = place(region);
        self.pages.get_mut(page)?.as_mut()?[within].as_mut()
    }

    /// What there is of a region; where there is nothing, what `make` makes.
    pub fn or_make<E>(&mut self, region: u64, make: impl FnOnce() -> Result<T, E>) -> Result<&mut T, E> {
        match slot(&mut self.pages, region) {
            Some(known) => Ok(known),
            empty => {
                let made = make()?;
                self.len += 1;
                Ok(empty.insert(made))
            }
        }
    }

    pub fn insert(&mut self, region: u64, value: T) {
        if slot(&mut self.pages, region).replace(value).is_none() {
            self.len += 1;
        }
    }

    pub fn remove(&mut self, region: u64) {
        let (page, within) = place(region);
        let slots = self.pages.get_mut(page).and_then(Option::as_mut);
        if slots.and_then(|slots| slots[within].take()).is_some() {
            self.len -= 1;
        }
    }

    /// What there is, in order.
    pub fn iter(&self) -> impl Iterator<Item = (u64, &T)> {
        self.range(0..u64::MAX)
    }

    /// What there is of these regions, in order.
    pub fn range(&self, regions: Range<u64>) -> impl Iterator<Item = (u64, &T)> {
        let first = self.pages.len().min(place(regions.start).0);
        let end = self.pages.len().min(place(regions.end).0 + 1).max(first);
        let pages = (first as u64..).zip(&self.pages[first..end]);
        let slots = pages.flat_map(|(page, slots)| (page * PAGE..).zip(slots.iter().flatten()));
        slots.filter_map(|(region, slot)| Some((region, slot.as_ref()?))).filter(move |(r, _)| regions.contains(r))
    }

    pub fn values_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.pages.iter_mut().flatten().flatten().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::{Rng, SeedableRng, rngs::SmallRng};
    use std::collections::BTreeMap;
    use std::convert::Infallible;

    #[test]
    fn it_is_a_map_in_order() {
        let mut rng = SmallRng::seed_from_u64(11);
        let (mut all, mut model) = (PerRegion::default(), BTreeMap::new());
        for step in 0..20_000_u64 {
            // Few pages, some of them far off.
            let region = rng.random_range(0..4_u64).pow(6) * PAGE + rng.random_range(0..20) * 13;
            match rng.random_range(0..5) {
                2 => {
                    all.insert(region, step);
                    model.insert(region, step);
                }
                0 => {
                    all.remove(region);
                    model.remove(&region);
                }
                1 => {
                    assert_eq!(all.or_make(region, || Err(step)).is_err(), !model.contains_key(&region));
                }
                _ => {
                    let made = *all.or_make(region, || Ok::<_, Infallible>(step)).unwrap();
                    assert_eq!(made, *model.entry(region).or_insert(step));
                }
            }
            assert_eq!((all.get(region), all.len()), (model.get(&region), model.len()));
            assert_eq!(all.get_mut(region).copied(), model.get(&region).copied());
            if step % 500 == 0 {
                assert!(all.iter().eq(model.iter().map(|(r, v)| (*r, v))));
                let (from, length) = (rng.random_range(0..5000), rng.random_range(0..1_000_000));
                let within = model.range(from..from + length).map(|(r, v)| (*r, v));
                assert!(all.range(from..from + length).eq(within));
            }
            if step % 1000 == 0 {
                all.values_mut().for_each(|value| *value += 1);
                model.values_mut().for_each(|value| *value += 1);
            }
        }
        assert!(!all.is_empty() && all.get(u64::MAX).is_none() && !all.contains(1 << 60));
    }
}
