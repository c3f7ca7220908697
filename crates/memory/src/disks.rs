//! Pages that the destination can copy out of the guest's own disks. A guest keeps files in its page cache, and file systems keep
//! files in blocks of a page's size: of a database server's pages two in three are somewhere on its disks as they are, and those
//! disks are at the destination before memory goes. So a page is sent as the number of a block, and runs of them as runs.
//!
//! ```text
//!   source                                            destination
//!   page -> Finder: a block that may equal it
//!   the block is read and compared, byte for byte
//!   group: up to 16 pages, blocks in runs, digest --> the blocks are copied out, then verified, then used
//!   Ring: keeps the group's contents        <-- Past: all groups before this one are done
//!                                           <-- Missing: this one is not what was meant
//!   answer: the group's contents            --> verified, used
//! ```
//!
//! It is about a VM's own volumes only, and what else both sides agree upon ([`NEIGHBOURS`]): whoever may have its memory may have its disks, and
//! nobody's bytes tell of anybody else's.
//!
//! # What can go wrong
//!
//! *The block is another by the time it is read*: the guest wrote it again, its copy at the destination lags behind, was never
//! there, or rots. The digest says so before anything of it is used, and the group is asked for. Meanwhile the decoder stands still at that
//! record, since QEMU's stream has an order: what comes over the wire waits, packed as it came, up to [`MAX_WAITING`]. The link is not
//! idle for it; it costs time only where nothing else is left to send.
//!
//! *The source cannot know which were wrong* before a round trip has passed. So it keeps the contents of all groups that the
//! decoder is not known to be past, in a ring of [`RING`] bytes. Where that is full pages go in full. Nothing waits for room
//! here; a shell that would rather wait a round trip asks [`Encoder::lacks_room`](crate::Encoder::lacks_room).
//!
//! *One stall follows another*, and each takes a round trip in which a fast link brings more than the decoder may keep. From what it asks for the
//! encoder knows how far it is behind, and lacks room from half of that on, until the decoder says that it has worked off what waited.
//!
//! *Nearly all are wrong*: the destination does not have the disks that it was thought to have. After [`PATIENCE`] such groups, if
//! they are more than one in eight, no more references are made; to the memory of neighbours, which is judged apart, if they are more than one
//! in 32. *A few are wrong, and the way is long*: the decoder stands still for a round trip each, one after the other. Whoever knows that tells
//! ([`Encoder::stalls_take`](crate::Encoder::stalls_take)), and no more are made where it would stand still for more than [`STANDS`] of the time.
//!
//! *The guest stands still.* Then nobody wants to wait for a round trip: [`Encoder::hurry`](crate::Encoder::hurry) is
//! called before the stop. What is under way at that moment may still have to be asked for; that is a few milliseconds' worth.
//!
//! *The guest forges blocks so that digests are equal.* They have 64 bits of BLAKE3 under a key that is random for every stream
//! and not known to the guest; it could only harm its own memory; and the digest of the whole stream would still tell.

use crate::record::{PAGE_SIZE, PageBytes};
use std::collections::VecDeque;
use std::time::Duration;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Contents of references that the decoder is not known to be past, in bytes, at the source: what a codec makes in a quarter of a second.
pub const RING: usize = 64 << 20;
/// Bytes of wire that wait at the decoder while it stands still, at most: what a link of 2.5 Gbit/s carries in 200 ms.
pub const MAX_WAITING: usize = 64 << 20;
/// Groups that may be wrong before it is asked whether it is worth it.
pub const PATIENCE: u64 = 64;
/// One in so many groups may be wrong for ever: of those that name disks only, and of those that name a neighbour's memory, which goes on being
/// written, or is gone with its guest. Each costs a round trip.
const TOLERATED: [u64; 2] = [8, 32];
/// The part of the time that a decoder may stand still for wrong references: what has come meanwhile it works off faster than more comes.
pub const STANDS: f64 = 0.25;
/// What it may stand still besides.
const LEEWAY: Duration = Duration::from_millis(500);
/// The decoder says how far it is after so many pages: often enough that a ring never fills for want of a word.
pub(crate) const TELL_EVERY: u64 = (RING / PAGE_SIZE / 16) as u64;
/// So many pages are referred to before they are made to leave the encoder, where they take next to no room: a reference ages.
pub(crate) const SEND_EVERY: u64 = 1024;
/// Bytes of a group's digest.
pub(crate) const CHECKSUM: usize = 8;

/// A spot's disks from this one on are no disks of the VM's, but whatever else both sides know by a number: the memory of guests of the same
/// trust domain that are at the destination already.
pub const NEIGHBOURS: u8 = 128;

/// A block of 4096 bytes of one of the VM's disks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Spot {
    /// Which disk, in the order of the VM's definition.
    pub disk: u8,
    /// Which block of it. What lies beyond 16 TiB is never referred to.
    pub block: u32,
}

impl Spot {
    /// The spot behind this one. Behind a disk's last block lies the next disk's first: a number, which nobody need find there.
    #[must_use]
    pub fn next(self) -> Self {
        Self::from_number(self.number() + 1)
    }

    /// All spots in a row, so that distances between them are small numbers.
    pub(crate) fn number(self) -> u64 {
        u64::from(self.disk) << 32 | u64::from(self.block)
    }

    /// The other way round; of a number that is too large the low 40 bits.
    pub(crate) fn from_number(number: u64) -> Self {
        Self { disk: (number >> 32) as u8, block: number as u32 }
    }
}

/// The VM's disks, as they are now on this side.
pub trait Blocks: Send {
    /// Copies whole blocks out, from this one on. `false`: they are not here, or cannot be read; `into` is then worth nothing.
    /// They need not be what anybody expects: who calls this verifies.
    fn read(&self, first: Spot, into: &mut [u8]) -> bool;
}

/// Knows where a page's contents may lie, on disks that the destination has as well.
pub trait Finder: Blocks {
    /// A block that had these contents when it was last looked at.
    fn find(&self, content: &PageBytes) -> Option<Spot>;

    /// Whether a block has these contents.
    fn holds(&self, spot: Spot, content: &PageBytes) -> bool {
        let mut block = [0; PAGE_SIZE];
        self.read(spot, &mut block) && block == *content
    }
}

/// Where which contents lie, as far as somebody looked: a hash for each block, never the contents. It has a fixed size, and where
/// it is full forgets some. What it says is a guess.
pub struct SpotTable {
    /// 24 bits of a hash, of which the lowest is set, and a spot. 0: nothing.
    slots: Vec<u64>,
    seed: u64,
}

/// Slots of a table, at most: 128 MiB, for some 48 GiB of blocks with contents.
const MOST_SLOTS: usize = 1 << 24;
/// Places where a block may be put: the next ones. At the load that a table is made for clusters are shorter.
const PROBES: usize = 32;
const SPOT_BITS: u32 = 40;

impl SpotTable {
    /// For so many blocks. The seed is to be random: then nobody in the guest can make a table that is full of nothing.
    #[must_use]
    pub fn new(blocks: u64, seed: u64) -> Self {
        let wanted = usize::try_from(blocks.saturating_mul(2)).unwrap_or(usize::MAX);
        Self { slots: vec![0; wanted.clamp(PROBES, MOST_SLOTS).next_power_of_two()], seed }
    }

    /// These blocks have these contents. Zeroes are left out: they are cheaper without.
    pub fn learn(&mut self, first: Spot, contents: &[u8]) {
        for (spot, content) in (first.number()..).zip(contents.chunks_exact(PAGE_SIZE)) {
            if content.iter().any(|byte| *byte != 0) {
                self.put(content, spot);
            }
        }
    }

    fn put(&mut self, content: &[u8], spot: u64) {
        let (hash, tag) = self.hash(content);
        let at = |n: usize| hash.wrapping_add(n) & (self.slots.len() - 1);
        // The newest of equal ones: the others may have been written since.
        let same = |n: &usize| matches!(self.slots[at(*n)] >> SPOT_BITS, found if found == 0 || found == tag);
        let slot = at((0..PROBES).find(same).unwrap_or(spot as usize % PROBES));
        self.slots[slot] = tag << SPOT_BITS | spot & ((1 << SPOT_BITS) - 1);
    }

    /// Where it may lie.
    #[must_use]
    pub fn find(&self, content: &PageBytes) -> Option<Spot> {
        let (hash, tag) = self.hash(content);
        let slots = (0..PROBES).map(|n| self.slots[hash.wrapping_add(n) & (self.slots.len() - 1)]);
        let found = slots.take_while(|slot| *slot != 0).find(|slot| slot >> SPOT_BITS == tag)?;
        Some(Spot::from_number(found & ((1 << SPOT_BITS) - 1)))
    }

    fn hash(&self, content: &[u8]) -> (usize, u64) {
        let hash = xxh3_64_with_seed(content, self.seed);
        (hash as usize, hash >> SPOT_BITS | 1)
    }
}

/// What the decoder has to say to the encoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Feedback {
    /// So many groups of references are done, from the first one on.
    Past(u64),
    /// The group with this number is to be sent in full.
    Missing(u64),
}

/// Whether a spot is on a disk, or in a neighbour's memory.
fn kind(spot: Spot) -> usize {
    usize::from(spot.disk >= NEIGHBOURS)
}

/// The key of a stream's digests, and what they are.
pub(crate) fn checksum(key: &[u8; 32], contents: &[u8]) -> [u8; CHECKSUM] {
    let hash = blake3::keyed_hash(key, contents);
    *hash.as_bytes().first_chunk().expect("a hash has 32 bytes")
}

/// The source's part: what is referred to.
pub(crate) struct Referring {
    finder: Box<dyn Finder>,
    key: [u8; 32],
    /// Whether disks are referred to, and neighbours.
    on: [bool; 2],
    open: Group,
    /// The spot behind the last one that was referred to.
    next: Spot,
    /// Groups before these are done.
    past: u64,
    ring: VecDeque<Sent>,
    ring_bytes: usize,
    /// As many bytes as it may have.
    room: usize,
    /// Groups of each kind that were made, and were wrong.
    judged: [(u64, u64); 2],
    /// How much had gone over the wire before the group at which the decoder stood still last; none: it has caught up since.
    stood: Option<u64>,
}

/// A group that the decoder is not known to be past.
struct Sent {
    contents: Vec<u8>,
    kind: usize,
    /// How much had gone over the wire before it.
    behind: u64,
}

/// Blocks that stand for pages in a row.
#[derive(Default)]
struct Group {
    /// First block and length.
    runs: Vec<(Spot, u64)>,
    contents: Vec<u8>,
    /// Where the distance to the first run is counted from.
    from: u64,
}

/// What the decoder says of a group that was never made, or is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Unknown(pub(crate) u64);

impl Referring {
    pub(crate) fn new(finder: Box<dyn Finder>, key: [u8; 32], room: usize) -> Self {
        Self {
            finder,
            key,
            on: [true; 2],
            open: Group::default(),
            next: Spot::from_number(0),
            past: 0,
            ring: VecDeque::new(),
            ring_bytes: 0,
            room,
            judged: [(0, 0); 2],
            stood: None,
        }
    }

    /// What lies there now, on this side.
    pub(crate) fn read(&self, spot: Spot, into: &mut PageBytes) -> bool {
        self.finder.read(spot, into)
    }

    pub(crate) fn key(&self) -> &[u8; 32] {
        &self.key
    }

    pub(crate) fn stop(&mut self) {
        self.on = [false; 2];
    }

    /// Whether it refers to anything any more.
    pub(crate) fn is_on(&self) -> bool {
        self.on != [false; 2]
    }

    /// Whether `bytes` more would be too many.
    pub(crate) fn lacks(&self, bytes: usize) -> bool {
        self.ring_bytes + self.open.contents.len() + bytes > self.room
    }

    /// A block that has these contents: compared, not guessed. The one behind the last is preferred, because a longer run costs
    /// less than another one.
    pub(crate) fn find(&mut self, content: &PageBytes) -> Option<Spot> {
        if !self.is_on() {
            return None;
        }
        let found = self.finder.find(content)?;
        let next = Some(self.next).filter(|next| *next != found);
        let on = |spot: &Spot| self.on[kind(*spot)];
        next.into_iter().chain([found]).filter(on).find(|spot| self.finder.holds(*spot, content))
    }

    /// The next page of the open group.
    pub(crate) fn add(&mut self, spot: Spot, content: &PageBytes) {
        if self.open.runs.is_empty() {
            self.open.from = self.next.number();
        }
        match self.open.runs.last_mut() {
            Some((_, length)) if spot == self.next => *length += 1,
            _ => self.open.runs.push((spot, 1)),
        }
        self.open.contents.extend_from_slice(content);
        self.next = spot.next();
    }

    /// The open group is to be sent, behind so much that went over the wire: writes what the decoder reads behind the page operation's head.
    pub(crate) fn close(&mut self, behind: u64, ops: &mut Vec<u8>) {
        let group = std::mem::take(&mut self.open);
        let mut from = group.from;
        crate::format::put(ops, group.runs.len() as u64);
        for (first, length) in &group.runs {
            crate::format::put(ops, crate::format::distance(from, first.number()));
            crate::format::put(ops, *length);
            from = first.number() + length;
        }
        ops.extend_from_slice(&checksum(&self.key, &group.contents));
        self.ring_bytes += group.contents.len();
        let kind = group.runs.iter().map(|(first, _)| kind(*first)).max().unwrap_or(0);
        self.judged[kind].0 += 1;
        self.ring.push_back(Sent { contents: group.contents, kind, behind });
    }

    /// Whether so much has gone over the wire since the decoder stood still that it may not bear much more. As long as it says that it stands
    /// still again, it has not caught up.
    pub(crate) fn holds_up(&self, wire_bytes: u64) -> bool {
        self.stood.is_some_and(|stood| wire_bytes.saturating_sub(stood) > MAX_WAITING as u64 / 2)
    }

    /// The decoder says that it is past these, so it goes on.
    pub(crate) fn goes_on(&mut self, groups: u64) -> Result<(), Unknown> {
        self.stood = None;
        self.past(groups)
    }

    /// Groups so far.
    fn made(&self) -> u64 {
        self.past + self.ring.len() as u64
    }

    /// Nobody will ask for any of them.
    pub(crate) fn forget(&mut self) {
        let made = self.made();
        self.past(made).expect("as many were made");
    }

    fn past(&mut self, groups: u64) -> Result<(), Unknown> {
        if groups > self.made() {
            return Err(Unknown(groups));
        }
        while self.past < groups {
            let done = self.ring.pop_front().expect("as many are kept as are made and not done");
            self.ring_bytes -= done.contents.len();
            self.past += 1;
        }
        Ok(())
    }

    /// A stall takes so long, and the stream has gone on for so long.
    pub(crate) fn stalls_take(&mut self, stall: Duration, elapsed: Duration) {
        let most = LEEWAY + elapsed.mul_f64(STANDS);
        for kind in 0..self.on.len() {
            if stall.as_secs_f64() * self.judged[kind].1 as f64 > most.as_secs_f64() {
                self.refers_no_more(kind);
            }
        }
    }

    fn refers_no_more(&mut self, kind: usize) {
        self.on[kind] = false;
        // Where there are no neighbours nothing need be looked for any more.
        self.on[1] &= self.judged[1].0 > 0;
    }

    /// The contents of a group that the decoder could not find. All before it are done, and it is, too: nobody asks twice.
    pub(crate) fn missing(&mut self, group: u64) -> Result<Vec<u8>, Unknown> {
        if group < self.past || group >= self.made() {
            return Err(Unknown(group));
        }
        self.past(group)?;
        let Sent { contents, kind, behind } = self.ring.pop_front().expect("it was just seen to be among them");
        let (made, missing) = &mut self.judged[kind];
        *missing += 1;
        if *missing > PATIENCE && *missing * TOLERATED[kind] > *made {
            self.refers_no_more(kind);
        }
        self.ring_bytes -= contents.len();
        self.past += 1;
        self.stood = Some(behind);
        Ok(contents)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn page(fill: u64) -> PageBytes {
        let mut page = [0; PAGE_SIZE];
        page[..8].copy_from_slice(&fill.to_le_bytes());
        page
    }

    #[test]
    fn what_was_learnt_is_found_where_it_was_last_seen_and_zeroes_nowhere() {
        let mut table = SpotTable::new(100, 7);
        let contents: Vec<u8> = (0..50).flat_map(page).collect();
        table.learn(Spot { disk: 3, block: 10 }, &contents);
        for n in 1..50u32 {
            assert_eq!(table.find(&page(n.into())), Some(Spot { disk: 3, block: 10 + n }));
        }
        assert_eq!(table.find(&page(0)), None, "zeroes");
        assert_eq!(table.find(&page(99)), None, "never seen");
        table.learn(Spot { disk: 0, block: 5 }, &page(7));
        assert_eq!(table.find(&page(7)), Some(Spot { disk: 0, block: 5 }));
    }

    #[test]
    fn a_table_that_is_full_forgets_some_and_takes_no_more_memory() {
        let mut table = SpotTable::new(1000, 7);
        let slots = table.slots.len();
        for n in 1..=100_000u32 {
            table.learn(Spot { disk: 0, block: n }, &page(n.into()));
        }
        assert_eq!(table.slots.len(), slots);
        let known = (1..=100_000u32).filter(|n| table.find(&page((*n).into())) == Some(Spot { disk: 0, block: *n }));
        assert!((slots / 2..=slots).contains(&known.count()));
    }

    proptest! {
        #[test]
        fn spots_have_numbers_of_their_own(disk: u8, block: u32) {
            let spot = Spot { disk, block };
            prop_assert_eq!(Spot::from_number(spot.number()), spot);
            if block < u32::MAX {
                prop_assert_eq!(spot.next(), Spot { disk, block: block + 1 });
            }
        }
    }
}
