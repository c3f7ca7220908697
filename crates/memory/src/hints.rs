//! Hints: what lies where in the memory of guests that run at a move's destination, so that the source can refer to it as it refers to
//! blocks of disks ([`crate::disks`]).
//!
//! ```text
//!   destination: looks at those guests' RAM: a hash for each page that is not zero      Looked::look
//!                looks again, later: what is as it was is told, no contents twice ----> Looked::tell
//!   source:      keeps where which hash is; a page that has it is referred to           Hints
//! ```
//!
//! On the wire there are runs of pages: the guest, the first page, how many, and for each 40 bits of XXH3 under a seed of the source's. That is
//! little more than five bytes for a page of 4096, so it pays if one page in some hundred is found that would not have packed to
//! nothing. Fewer bits would be wrong too often: of 4 GiB that were told and as much that is looked up one page is taken for another by chance.
//!
//! # What can go wrong
//!
//! A hint is a guess, and what is made of it is verified as any reference is: a wrong one costs a round trip.
//!
//! *The guest goes on writing.* What it wrote between the two looks is not told. What two guests have in common is mostly code and files, which
//! nobody writes; where it is not, references to neighbours end by themselves. *A page is read while it is written*: then its
//! hash is of neither version, and the second look finds another. *The destination tells what it likes*: more guests or pages than it was
//! asked for are refused, and a page's number is only kept. *Somebody in a guest makes pages whose hashes are alike*: the seed is another for each
//! question, and no guest knows it; it could only have the guests of its own trust domain name less.

use crate::disks::Spot;
use crate::record::{PAGE_SIZE, PageBytes};
use crate::witness::data_from;
use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Bytes of a hash on the wire.
const HASH: usize = 5;
/// Bytes before a run's hashes: its guest, its first page, its length less one.
const HEAD: usize = 6;
/// Pages that are read at once, and told in one run, at most: what a byte counts.
const RUN: usize = 256;
/// What is told goes in pieces of so many bytes, or a little more.
const PIECE: usize = 64 << 10;

/// Zeroes have none: they are cheaper without.
fn hash(seed: u64, content: &PageBytes) -> Option<u64> {
    (*content != [0; PAGE_SIZE]).then(|| xxh3_64_with_seed(content, seed) & ((1 << (8 * HASH)) - 1))
}

/// What was seen of guests' RAM: 16 bytes for a page that is not zero.
#[derive(Debug)]
pub struct Looked {
    seed: u64,
    pages: Vec<Page>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Page {
    hash: u64,
    page: u32,
    guest: u8,
}

impl Page {
    fn is_before(&self, other: &Self) -> bool {
        self.guest == other.guest && self.page + 1 == other.page
    }
}

impl Looked {
    /// Reads what the RAM of some guests has in it, in their order (256 of them, and 16 TiB of each): `most` pages together. Each one's is asked
    /// for when its turn comes, and let go of behind it; of one that cannot be read there is what was read of it. Ends early, with what it has,
    /// when `goes_on` says so; it is asked for each mebibyte.
    #[must_use]
    pub fn look(
        seed: u64,
        guests: impl IntoIterator<Item = Option<Arc<File>>>,
        most: u64,
        goes_on: &dyn Fn() -> bool,
    ) -> Self {
        let (mut looked, mut left, mut buffer) = (Self { seed, pages: vec![] }, most, vec![0; RUN * PAGE_SIZE]);
        for (guest, ram) in (0..=u8::MAX).zip(guests) {
            let Some(ram) = ram else { continue };
            // What is wrong with one is nothing to the others.
            let _ = looked.look_at(guest, &ram, &mut buffer, &mut left, goes_on);
        }
        looked
    }

    fn look_at(
        &mut self,
        guest: u8,
        ram: &File,
        buffer: &mut [u8],
        left: &mut u64,
        goes_on: &dyn Fn() -> bool,
    ) -> io::Result<()> {
        // The page behind the last one has a number, too.
        let end = (ram.metadata()?.len() / PAGE_SIZE as u64).min(u64::from(u32::MAX - 1));
        let mut at = 0;
        while at < end {
            let (data, hole) = data_from(ram, at, end)?;
            at = data;
            while at < hole {
                if *left == 0 || !goes_on() {
                    return Ok(());
                }
                let n = (hole - at).min(*left).min(RUN as u64);
                let bytes = &mut buffer[..n as usize * PAGE_SIZE];
                ram.read_exact_at(bytes, at * PAGE_SIZE as u64)?;
                let (contents, _) = bytes.as_chunks::<PAGE_SIZE>();
                for (page, content) in (at as u32..).zip(contents) {
                    self.pages.extend(hash(self.seed, content).map(|hash| Page { hash, page, guest }));
                }
                at += n;
                *left -= n;
            }
        }
        Ok(())
    }

    /// Looks again at the same guests, whose RAM is asked for by their places and run by run, and hands on what a source is told, in pieces: where
    /// pages are as they were, and no contents twice. Of guests that are gone nothing, nor of what cannot be read. Ends early as [`Looked::look`]
    /// does. Returns how many pages were told.
    pub fn tell(
        &self,
        ram: &dyn Fn(u8) -> Option<Arc<File>>,
        goes_on: &dyn Fn() -> bool,
        mut to: impl FnMut(Vec<u8>),
    ) -> u64 {
        let (mut told, mut out, mut buffer) = (HashSet::new(), vec![], vec![0; RUN * PAGE_SIZE]);
        for run in self.pages.chunk_by(Page::is_before).flat_map(|run| run.chunks(RUN)) {
            if !goes_on() {
                break;
            }
            let Some(ram) = ram(run[0].guest) else { continue };
            let bytes = &mut buffer[..run.len() * PAGE_SIZE];
            // One that was restarted may have less.
            if ram.read_exact_at(bytes, u64::from(run[0].page) * PAGE_SIZE as u64).is_err() {
                continue;
            }
            let (contents, _) = bytes.as_chunks::<PAGE_SIZE>();
            let mut same = vec![];
            for (page, content) in run.iter().zip(contents) {
                if hash(self.seed, content) == Some(page.hash) && told.insert(page.hash) {
                    same.push(*page);
                }
            }
            same.chunk_by(Page::is_before).for_each(|run| put(run, &mut out));
            if out.len() >= PIECE {
                to(std::mem::take(&mut out));
            }
        }
        if !out.is_empty() {
            to(out);
        }
        told.len() as u64
    }
}

fn put(run: &[Page], out: &mut Vec<u8>) {
    out.push(run[0].guest);
    out.extend_from_slice(&run[0].page.to_le_bytes());
    out.push((run.len() - 1) as u8);
    run.iter().for_each(|page| out.extend_from_slice(&page.hash.to_le_bytes()[..HASH]));
}

/// What a destination told makes no sense.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HintsError {
    /// A guest that there cannot be.
    #[error("the destination tells of the memory of guest {0}, and was asked for fewer guests")]
    Guest(u8),
    /// Too much.
    #[error("the destination tells of more than the {0} pages of memory that it was asked for")]
    TooMany(u64),
    /// A page that there cannot be.
    #[error("the destination tells of a page of memory behind the last that there can be")]
    Page,
}

/// What a source was told, as it comes: some 35 bytes for a page.
pub struct Hints {
    seed: u64,
    first: u8,
    guests: u8,
    most: u64,
    told: u64,
    known: HashMap<u64, Spot>,
    rest: Vec<u8>,
}

impl Hints {
    /// Nothing yet. Guests' pages are spots on disks from `first` on, a disk for each of at most so many `guests`; of `most` pages is believed what
    /// comes. The seed is to be random.
    #[must_use]
    pub fn new(seed: u64, first: u8, guests: u8, most: u64) -> Self {
        Self { seed, first, guests, most, told: 0, known: HashMap::new(), rest: vec![] }
    }

    /// Takes what came, cut anywhere.
    ///
    /// # Errors
    /// It makes no sense, and neither does what would follow; what came before it stays.
    pub fn take(&mut self, bytes: &[u8]) -> Result<(), HintsError> {
        let mut all = std::mem::take(&mut self.rest);
        all.extend_from_slice(bytes);
        let mut rest = &all[..];
        while let Some((&[guest, page @ .., length], behind)) = rest.split_first_chunk::<HEAD>() {
            let Some((hashes, next)) = behind.split_at_checked((usize::from(length) + 1) * HASH) else { break };
            if guest >= self.guests {
                return Err(HintsError::Guest(guest));
            }
            let disk = self.first.checked_add(guest).ok_or(HintsError::Guest(guest))?;
            self.told += u64::from(length) + 1;
            if self.told > self.most {
                return Err(HintsError::TooMany(self.most));
            }
            let (hashes, _) = hashes.as_chunks::<HASH>();
            for (n, hash) in (0..).zip(hashes) {
                let block = u32::from_le_bytes(page).checked_add(n).ok_or(HintsError::Page)?;
                let mut wide = [0; 8];
                wide[..HASH].copy_from_slice(hash);
                self.known.insert(u64::from_le_bytes(wide), Spot { disk, block });
            }
            rest = next;
        }
        self.rest = rest.to_vec();
        Ok(())
    }

    /// Where a page has these contents, if the destination was right. Zeroes are nowhere.
    #[must_use]
    pub fn find(&self, content: &PageBytes) -> Option<Spot> {
        if self.known.is_empty() {
            return None;
        }
        self.known.get(&hash(self.seed, content)?).copied()
    }

    /// Different pages that are known of so far.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.known.len() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SEED: u64 = 7;
    const FIRST: u8 = 200;

    fn page(fill: u32) -> PageBytes {
        let mut page = [0; PAGE_SIZE];
        page[..4].copy_from_slice(&fill.to_le_bytes());
        page
    }

    /// RAM with these pages, zeroes left as holes.
    fn ram(pages: impl IntoIterator<Item = u32>) -> Arc<File> {
        let ram = tempfile::tempfile().expect("a file");
        let mut size = 0;
        for (n, fill) in (0..).zip(pages) {
            size = (n + 1) * PAGE_SIZE as u64;
            if fill != 0 {
                write(&ram, n, fill);
            }
        }
        ram.set_len(size).expect("grows");
        ram.into()
    }

    fn write(ram: &File, n: u64, fill: u32) {
        ram.write_all_at(&page(fill), n * PAGE_SIZE as u64).expect("writes");
    }

    fn told(looked: &Looked, guests: &[Option<Arc<File>>]) -> Vec<u8> {
        let mut wire = vec![];
        looked.tell(&|guest: u8| guests[usize::from(guest)].clone(), &|| true, |piece| wire.extend(piece));
        wire
    }

    #[test]
    fn a_page_of_a_guest_that_is_as_it_was_is_found_and_no_other() {
        const PAGES: u32 = 2000;
        let guests = [Some(ram((0..PAGES).map(|n| n * 2))), Some(ram([5, 0, 8, 4])), Some(ram([11, 13]))];
        let looked = Looked::look(SEED, guests.clone(), u64::MAX, &|| true);
        let [Some(first), Some(second), _] = &guests else { unreachable!() };
        // One changes, one becomes zero, one was zero; and a guest ends.
        write(first, 300, 9);
        write(first, 301, 0);
        write(second, 1, 15);
        let wire = told(&looked, &[guests[0].clone(), guests[1].clone(), None]);
        let known = PAGES as usize - 3 + 1;
        assert!(wire.len() < known * HASH + 30 * HEAD, "{} bytes", wire.len());
        for piece in [1, 7, wire.len()] {
            let mut hints = Hints::new(SEED, FIRST, 3, u64::from(PAGES));
            wire.chunks(piece).for_each(|piece| hints.take(piece).expect("makes sense"));
            assert_eq!(hints.pages(), known as u64, "no contents twice");
            let at = |disk, block| Some(Spot { disk: FIRST + disk, block });
            for n in (1..PAGES).filter(|n| *n != 300 && *n != 301) {
                assert_eq!(hints.find(&page(n * 2)), at(0, n));
            }
            assert_eq!(hints.find(&page(5)), at(1, 0));
            for fill in [0, 9, 600, 602, 11, 13, 15, 17] {
                assert_eq!(hints.find(&page(fill)), None, "{fill}");
            }
        }
    }

    #[test]
    fn no_more_is_looked_at_than_was_asked_for_and_nothing_once_nobody_waits() {
        let guests = [Some(ram(1..=300)), Some(ram(1000..1300))];
        let pages = |most| Looked::look(SEED, guests.clone(), most, &|| true).pages.len();
        assert_eq!((pages(0), pages(10), pages(310), pages(u64::MAX)), (0, 10, 310, 600));
        assert!(Looked::look(SEED, guests.clone(), 600, &|| false).pages.is_empty());
        let looked = Looked::look(SEED, guests.clone(), 600, &|| true);
        assert_eq!(looked.tell(&|_| unreachable!(), &|| false, |_| unreachable!()), 0);
    }

    #[test]
    fn a_guest_that_has_less_than_it_had_keeps_nobody_from_hearing_of_the_others() {
        let guests = [Some(ram(1..=600)), Some(ram(1000..1003))];
        let looked = Looked::look(SEED, guests.clone(), u64::MAX, &|| true);
        let less = Some(ram(1..=256));
        let mut hints = Hints::new(SEED, FIRST, 2, 1000);
        hints.take(&told(&looked, &[less, guests[1].clone()])).expect("makes sense");
        let at = |disk, block| Some(Spot { disk: FIRST + disk, block });
        assert_eq!((hints.find(&page(1)), hints.find(&page(256))), (at(0, 0), at(0, 255)));
        assert_eq!((hints.find(&page(300)), hints.find(&page(1002))), (None, at(1, 2)));
    }

    #[test]
    fn memory_that_has_more_pages_than_there_are_numbers_is_looked_at_as_far_as_they_go() {
        let memory = rustix::fs::memfd_create("ram", rustix::fs::MemfdFlags::CLOEXEC).expect("memory");
        let memory = Arc::new(File::from(memory));
        let last = u32::MAX - 2;
        (0..5).for_each(|n| write(&memory, u64::from(last) + n, 7));
        let looked = Looked::look(SEED, [Some(memory.clone())], u64::MAX, &|| true);
        assert_eq!(looked.pages.iter().map(|page| page.page).collect::<Vec<_>>(), [last]);
        let mut hints = Hints::new(SEED, FIRST, 1, 9);
        hints.take(&told(&looked, &[Some(memory)])).expect("makes sense");
        assert_eq!(hints.find(&page(7)), Some(Spot { disk: FIRST, block: last }));
    }

    #[test]
    fn what_a_destination_was_not_asked_for_is_refused_and_what_came_before_it_stays() {
        let wire = |guest, page: u32, hashes: &[u8]| {
            let mut wire = [&[guest][..], &page.to_le_bytes(), &[hashes.len() as u8 - 1]].concat();
            hashes.iter().for_each(|hash| wire.extend([*hash; HASH]));
            wire
        };
        let mut hints = Hints::new(SEED, FIRST, 2, 5);
        hints.take(&wire(1, 9, &[1, 2])).expect("makes sense");
        assert_eq!(hints.take(&wire(2, 9, &[3])), Err(HintsError::Guest(2)));
        assert_eq!(hints.take(&wire(0, u32::MAX, &[3, 4])), Err(HintsError::Page));
        assert_eq!(hints.take(&wire(0, 9, &[5, 6])), Err(HintsError::TooMany(5)));
        assert_eq!(hints.pages(), 3);
        // What ends in the middle waits for the rest.
        let mut hints = Hints::new(SEED, FIRST, 1, 5);
        hints.take(&wire(0, 9, &[1, 2])[..12]).expect("makes sense so far");
        assert_eq!(hints.pages(), 0);
    }

    proptest! {
        #[test]
        fn whatever_comes_no_more_is_kept_than_was_asked_for(bytes: Vec<u8>, guests: u8, most in 0_u64..9) {
            let mut hints = Hints::new(SEED, FIRST, guests, most);
            for piece in bytes.chunks(5) {
                if hints.take(piece).is_err() {
                    break;
                }
            }
            prop_assert!(hints.pages() <= most && hints.rest.len() < HEAD + RUN * HASH);
        }
    }
}
