//! What was last sent of pages, so that the next version of one goes as a difference ([`delta`](crate::delta)).
//!
//! The source has a [`Versions`], because its guest writes on. The destination need not: what the stream said of a page is in the incoming
//! guest's RAM, and nothing else writes that, so a difference is taken against the RAM itself ([`Settling`]). Where it cannot read that RAM
//! it keeps a [`Versions`] too, of the size that the source says; both have the same pages then, because both follow from the
//! operations alone: every page with content is [put](Versions::put), every zero page [cleared](Versions::clear), what the stream leaves out
//! is neither.
//!
//! Only pages of the largest RAM block are kept: the guest's memory. ROMs do not change, and a screen is small.
//!
//! # Which pages
//!
//! As many as there is room for, of those that the stream says are to be kept: all, or only what comes again, where the encoder is what it waits for and memory that nobody has touched yet
//! costs more than differences bring. Where there is no room left one that comes for the first time is not kept, and one that comes again takes the place of one that did
//! not come again since the hand was there last (a clock with second chances). So the first pass over a guest larger than the store
//! evicts nothing, and what is written in every round stays in.
//!
//! A page that the source has named by where it lies on a disk has a slot as any other, so that both sides have the same ones; but its contents are left
//! where they lie, and read again when the page comes again ([`Versions::recall`]). That is half of a guest's memory, as a rule.
//!
//! # What can go wrong
//!
//! *RAM is read before QEMU has loaded what it was given.* What was given lies in the socket and in QEMU's buffer, until QEMU reads on. So the
//! last [`SETTLING`] pages are kept beside RAM, and RAM is asked only for what was given before: more bytes ago than the socket and the
//! buffer hold. Who drives a decoder with RAM gives QEMU what was made before it has more made ([`Decoder::push_some`](crate::Decoder::push_some)),
//! through a socket of at most [`MOST_UNREAD`] bytes.
//!
//! *The two disagree all the same.* Then the stream's digest does not hold, as with any damage; the move fails before the guest is
//! stopped for good, and can be made again.

use crate::disks::Spot;
use crate::record::{Block, PAGE_SIZE, PageBytes, Place};
use memmap2::{Advice, MmapMut};
use std::alloc::Layout;
use std::collections::HashMap;

/// Pages beside RAM. Their records have 8 MiB and more.
pub(crate) const SETTLING: usize = 2048;
/// Bytes that the socket to the incoming QEMU may hold, at most, where differences are taken against its RAM: an eighth of what is kept
/// beside it, so that there is room for a piece of output ([`ENOUGH`](crate::ENOUGH)) and QEMU's own buffer (32 KiB).
pub const MOST_UNREAD: usize = 1 << 20;
const _: () = assert!(SETTLING * PAGE_SIZE >= 2 * (MOST_UNREAD + crate::decoder::ENOUGH));

/// Pages that room is taken for at once: 64 MiB, so that nearly all of it can lie in huge pages.
const CHUNK: usize = 16 << 10;

/// No page of it was ever said.
const NEVER: u32 = 0;
/// The page was said, and is not kept.
const GONE: u32 = 1;
/// From here on: a slot.
const FIRST: u32 = 2;

/// The block of which versions are kept: the largest, and of equal ones the first.
pub(crate) fn watched(blocks: &[Block]) -> Option<usize> {
    (0..blocks.len()).rev().max_by_key(|n| blocks[*n].pages)
}

struct Slot {
    page: u64,
    /// Whether it came again since the hand passed.
    again: bool,
    content: Content,
}

/// Where a slot's contents are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Content {
    /// Nowhere yet.
    Nowhere,
    /// In this place of [`Versions::contents`].
    Here(u32),
    /// Where they were seen last.
    OnDisk(Spot),
}

/// Pages as they were last sent. It has at most as many bytes as it is told, and 4 for each page of the block.
pub(crate) struct Versions {
    capacity: usize,
    block: usize,
    /// By page: [`NEVER`], [`GONE`], or its slot.
    index: Vec<u32>,
    slots: Vec<Slot>,
    /// Contents of slots, [`CHUNK`] of them each.
    contents: Vec<MmapMut>,
    /// How many places of it were ever used, and which of them nobody uses now.
    used: u32,
    unused: Vec<u32>,
    /// Slots that nobody uses now.
    free: Vec<u32>,
    hand: usize,
    /// Whether what comes for the first time is kept.
    firsts: bool,
}

impl Versions {
    /// For so many bytes of pages of a stream with these blocks.
    pub(crate) fn new(bytes: u64, blocks: &[Block]) -> Self {
        let block = watched(blocks);
        let pages = block.map_or(0, |block| blocks[block].pages);
        let most = (bytes / PAGE_SIZE as u64).min(pages).min(u64::from(u32::MAX - FIRST));
        Self {
            capacity: most as usize,
            block: block.unwrap_or(0),
            index: if most == 0 { vec![] } else { vec![NEVER; pages as usize] },
            slots: vec![],
            contents: vec![],
            used: 0,
            unused: vec![],
            free: vec![],
            hand: 0,
            firsts: true,
        }
    }

    /// Whether what comes of a page for the first time is kept, from now on. Whether that makes a difference: where nothing is kept at all, as before the
    /// table of blocks, it does not.
    pub(crate) fn keep_firsts(&mut self, firsts: bool) -> bool {
        std::mem::replace(&mut self.firsts, firsts) != firsts && self.capacity > 0
    }

    fn entry(&mut self, place: Place) -> Option<&mut u32> {
        if place.block == self.block { self.index.get_mut(place.page as usize) } else { None }
    }

    /// The slot of a page that is kept.
    fn slot(&self, place: Place) -> Option<usize> {
        let entry = self.index.get(place.page as usize).filter(|_| place.block == self.block)?;
        entry.checked_sub(FIRST).map(|slot| slot as usize)
    }

    /// What was last sent, if it is kept here.
    pub(crate) fn get(&self, place: Place) -> Option<&PageBytes> {
        match self.slots[self.slot(place)?].content {
            Content::Here(at) => self.contents[at as usize / CHUNK].as_chunks().0.get(at as usize % CHUNK),
            Content::Nowhere | Content::OnDisk(_) => None,
        }
    }

    /// Where what was last sent lay, if that is all that is kept of it.
    pub(crate) fn on_disk(&self, place: Place) -> Option<Spot> {
        match self.slots[self.slot(place)?].content {
            Content::OnDisk(spot) => Some(spot),
            Content::Nowhere | Content::Here(_) => None,
        }
    }

    /// This was sent. Whether it is kept; `gone` is told what is not any more because of it.
    pub(crate) fn put(&mut self, place: Place, content: &PageBytes, gone: impl FnOnce(u64, &PageBytes)) -> bool {
        let Some(slot) = self.take(place, gone) else { return false };
        self.fill(slot, content);
        true
    }

    /// This was sent, and lies there. As [`Versions::put`]; of what lies on a disk as well `gone` is not told.
    pub(crate) fn put_on_disk(&mut self, place: Place, spot: Spot, gone: impl FnOnce(u64, &PageBytes)) -> bool {
        let Some(slot) = self.take(place, gone) else { return false };
        if let Content::Here(at) = std::mem::replace(&mut self.slots[slot].content, Content::OnDisk(spot)) {
            self.unused.push(at);
        }
        true
    }

    /// What was left on a disk is kept here from now on. Nothing for a page that has no slot.
    pub(crate) fn recall(&mut self, place: Place, content: &PageBytes) {
        if let Some(slot) = self.slot(place) {
            self.fill(slot, content);
        }
    }

    /// A slot for what is sent of a page.
    fn take(&mut self, place: Place, gone: impl FnOnce(u64, &PageBytes)) -> Option<usize> {
        let &mut entry = self.entry(place)?;
        if let Some(slot) = entry.checked_sub(FIRST) {
            self.slots[slot as usize].again = true;
            return Some(slot as usize);
        }
        if entry == NEVER && !self.firsts {
            self.index[place.page as usize] = GONE;
            return None;
        }
        let slot = if let Some(slot) = self.free.pop() {
            slot
        } else if self.slots.len() < self.capacity {
            self.slots.push(Slot { page: place.page, again: false, content: Content::Nowhere });
            self.slots.len() as u32 - 1
        } else if entry == NEVER {
            self.index[place.page as usize] = GONE;
            return None;
        } else {
            let slot = self.victim();
            let Slot { page, content, .. } = self.slots[slot as usize];
            if let Content::Here(at) = content {
                gone(page, self.content(at));
            }
            self.index[page as usize] = GONE;
            slot
        };
        let taken = &mut self.slots[slot as usize];
        (taken.page, taken.again) = (place.page, false);
        self.index[place.page as usize] = slot + FIRST;
        Some(slot as usize)
    }

    fn fill(&mut self, slot: usize, content: &PageBytes) {
        let at = match self.slots[slot].content {
            Content::Here(at) => at,
            Content::Nowhere | Content::OnDisk(_) => {
                let at = self.unused.pop().unwrap_or_else(|| self.another());
                self.slots[slot].content = Content::Here(at);
                at
            }
        };
        self.content(at).copy_from_slice(content);
    }

    /// A place that was never used.
    fn another(&mut self) -> u32 {
        let at = self.used;
        if at as usize == self.contents.len() * CHUNK {
            // Never more than there are slots.
            self.contents.push(room(CHUNK.min(self.capacity - at as usize)));
        }
        self.used += 1;
        at
    }

    fn content(&mut self, at: u32) -> &mut PageBytes {
        &mut self.contents[at as usize / CHUNK].as_chunks_mut().0[at as usize % CHUNK]
    }

    /// A slot whose page did not come again. All are taken: there is one, at the latest when the hand has been everywhere.
    fn victim(&mut self) -> u32 {
        loop {
            let at = self.hand;
            self.hand = (at + 1) % self.slots.len();
            if !std::mem::take(&mut self.slots[at].again) {
                return at as u32;
            }
        }
    }

    /// It was sent as zeroes: nothing is against those.
    pub(crate) fn clear(&mut self, place: Place) {
        let Some(entry) = self.entry(place) else { return };
        if let Some(slot) = std::mem::replace(entry, GONE).checked_sub(FIRST) {
            self.free.push(slot);
        }
    }
}

/// Room for so many pages, in huge pages where the kernel has them: a fault for each page of a guest was a tenth of an encoder's time.
fn room(pages: usize) -> MmapMut {
    let bytes = pages * PAGE_SIZE;
    // Nothing can be done without memory; the same as any allocation.
    let room = MmapMut::map_anon(bytes).unwrap_or_else(|_| {
        std::alloc::handle_alloc_error(Layout::array::<PageBytes>(pages).unwrap_or(Layout::new::<PageBytes>()))
    });
    // Only a wish.
    let _ = room.advise(Advice::HugePage);
    room
}

/// The last pages that were given to a QEMU that may not have read them yet.
pub(crate) struct Settling {
    slots: Vec<(u64, Box<PageBytes>)>,
    at: usize,
    newest: HashMap<u64, usize>,
}

impl Settling {
    pub(crate) fn new() -> Self {
        Self { slots: vec![], at: 0, newest: HashMap::new() }
    }

    pub(crate) fn get(&self, page: u64) -> Option<&PageBytes> {
        self.newest.get(&page).map(|slot| &*self.slots[*slot].1)
    }

    pub(crate) fn put(&mut self, page: u64, content: &PageBytes) {
        if self.slots.len() < SETTLING {
            self.slots.push((page, Box::new(*content)));
        } else {
            let (old, into) = &mut self.slots[self.at];
            if self.newest.get(old) == Some(&self.at) {
                self.newest.remove(old);
            }
            *old = page;
            into.copy_from_slice(content);
        }
        self.newest.insert(page, self.at);
        self.at = (self.at + 1) % SETTLING;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PAGES: u64 = 12;

    fn blocks() -> Vec<Block> {
        vec![Block { name: b"rom".to_vec(), pages: 3 }, Block { name: b"ram".to_vec(), pages: PAGES }]
    }

    fn at(page: u64) -> Place {
        Place { block: 1, page }
    }

    #[test]
    fn what_is_written_in_every_round_stays_in_a_store_that_is_too_small_for_all() {
        let mut versions = Versions::new(4 * PAGE_SIZE as u64, &blocks());
        let none = |page, _: &PageBytes| panic!("page {page} is evicted by a first pass");
        for page in 0..PAGES {
            assert_eq!(versions.put(at(page), &[1; PAGE_SIZE], none), page < 4);
        }
        let mut hits = 0;
        for round in 2..12u8 {
            for page in [9, 10, 11] {
                hits += usize::from(versions.get(at(page)).is_some());
                assert!(versions.put(at(page), &[round; PAGE_SIZE], |_, _| {}));
            }
            // And one other each time.
            versions.put(at(u64::from(round) % 9), &[round; PAGE_SIZE], |_, _| {});
        }
        assert_eq!(hits, 9 * 3);
    }

    #[test]
    fn what_comes_for_the_first_time_is_kept_or_not_and_what_comes_again_is() {
        let mut versions = Versions::new(u64::MAX, &blocks());
        let mut put = |page, firsts| {
            versions.keep_firsts(firsts);
            versions.put(at(page), &[1; PAGE_SIZE], |_, _| panic!("there is room for all"))
        };
        assert_eq!([put(0, false), put(1, true), put(2, false)], [false, true, false]);
        assert_eq!([put(0, false), put(1, false), put(2, true)], [true; 3]);
    }

    #[test]
    fn what_lies_behind_the_end_of_a_piece_of_room_is_kept_as_well() {
        let pages = CHUNK as u64 + 2;
        let mut versions = Versions::new(u64::MAX, &[Block { name: b"ram".to_vec(), pages }]);
        let at = |page| Place { block: 0, page };
        let content = |page: u64| std::array::from_fn(|i| (page >> (8 * (i % 3))) as u8);
        for page in 0..pages {
            assert!(versions.put(at(page), &content(page), |_, _| panic!("there is room for all")));
        }
        assert_eq!(versions.contents.len(), 2);
        for page in [0, 1, CHUNK as u64 - 1, CHUNK as u64, pages - 1] {
            assert_eq!(versions.get(at(page)), Some(&content(page)), "{page}");
        }
        assert_eq!(versions.get(at(pages)), None);
    }

    proptest! {
        /// What the source leaves on disks has a slot as at a destination that keeps all, and no more memory than there are slots.
        #[test]
        fn what_is_left_on_disks_is_kept_where_it_is_kept_at_the_other_end(
            room in 0..14u64,
            sent in proptest::collection::vec((0..PAGES, 0..5u8), 0..200),
        ) {
            let bytes = room * PAGE_SIZE as u64;
            let (mut here, mut there) = (Versions::new(bytes, &blocks()), Versions::new(bytes, &blocks()));
            let mut said = [0; PAGES as usize];
            for (n, (page, what)) in sent.into_iter().enumerate() {
                let (place, fill) = (at(page), n as u8);
                let content = [fill; PAGE_SIZE];
                let spot = Spot { disk: 0, block: n as u32 };
                match what {
                    0 => {
                        here.clear(place);
                        there.clear(place);
                    }
                    1 | 2 => {
                        let kept = here.put_on_disk(place, spot, |page, was| assert_eq!(was[7], said[page as usize]));
                        prop_assert_eq!(kept, there.put(place, &content, |_, _| {}));
                        prop_assert_eq!(here.on_disk(place), kept.then_some(spot));
                    }
                    // It lies there still, and is kept here from now on.
                    3 if here.on_disk(place).is_some() => {
                        here.recall(place, &[said[page as usize]; PAGE_SIZE]);
                        prop_assert!(here.get(place) == there.get(place));
                        continue;
                    }
                    _ => {
                        let kept = here.put(place, &content, |page, was| assert_eq!(was[7], said[page as usize]));
                        prop_assert_eq!(kept, there.put(place, &content, |_, _| {}));
                    }
                }
                said[page as usize] = fill;
                for page in (0..PAGES).map(at) {
                    prop_assert_eq!(here.get(page).is_some() || here.on_disk(page).is_some(), there.get(page).is_some());
                    prop_assert!(here.get(page).is_none_or(|content| Some(content) == there.get(page)));
                }
                prop_assert!(u64::from(here.used) <= room);
            }
        }

        /// Against a map of everything: what is kept is what was last put, and what is not kept any more was said.
        #[test]
        fn what_is_kept_is_what_was_last_sent(
            room in 0..14u64,
            sent in proptest::collection::vec((0..2usize, 0..PAGES, proptest::option::of(any::<u8>())), 0..200),
        ) {
            let mut versions = Versions::new(room * PAGE_SIZE as u64, &blocks());
            let mut kept = std::collections::BTreeMap::new();
            for (block, page, fill) in sent {
                let place = Place { block, page };
                match fill {
                    Some(fill) => {
                        let mut evicted = None;
                        if versions.put(place, &[fill; PAGE_SIZE], |page, was| evicted = Some((page, was[0]))) {
                            kept.insert(page, fill);
                        } else {
                            prop_assert!(block == 0 || !kept.contains_key(&page));
                        }
                        if let Some((page, was)) = evicted {
                            prop_assert_eq!(kept.remove(&page), Some(was));
                        }
                    }
                    None => {
                        versions.clear(place);
                        if block == 1 {
                            kept.remove(&page);
                        }
                    }
                }
                prop_assert!(kept.len() as u64 <= room);
                for page in 0..PAGES {
                    prop_assert_eq!(versions.get(at(page)).map(|content| content[5]), kept.get(&page).copied());
                    let other = versions.get(Place { block: 0, page });
                    prop_assert!(other.is_none());
                }
            }
        }

        #[test]
        fn the_newest_of_the_last_pages_is_what_settles(pages in proptest::collection::vec(0..3000u64, 0..6000)) {
            let mut settling = Settling::new();
            for (n, page) in pages.iter().enumerate() {
                let mut content = [0; PAGE_SIZE];
                content[..8].copy_from_slice(&(n as u64).to_le_bytes());
                settling.put(*page, &content);
            }
            for page in 0..3000 {
                let newest = pages.iter().rposition(|p| *p == page).filter(|n| pages.len() - n <= SETTLING);
                let kept = settling.get(page).map(|c| u64::from_le_bytes(*c.first_chunk().unwrap()) as usize);
                prop_assert_eq!(kept, newest);
            }
        }
    }
}
