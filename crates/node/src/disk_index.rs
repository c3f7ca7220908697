//! Which contents lie where on the VM's disks, so that a move's memory need not carry what the destination has on its copies of them.
//!
//! A thread of the source's node reads from the beginning of a move on what the guest has used of the disks, in that order, and remembers a
//! hash for each block (`godwit_memory::disks` says how that is used, and what happens when a block has changed since). Only
//! disks that are at the destination are looked at: those that go before the VM, those that were pre-cached there, and those on storage
//! that it reaches as well ([`At`]).
//!
//! # What it costs
//!
//! Eight bytes of memory for a block of contents, up to 128 MiB for a VM, given back when memory has been read. Reading what the guest has ever read or
//! written of the disks, once, while the move goes on: its memory has files only from there. Where that is not all known
//! ([`godwit_volume::order::MOST_RUNS`]) the rest is read as well. It ends with the move's memory, or when it has read as much as it can
//! remember. What it has not read travels as it would without.
//!
//! # What can go wrong
//!
//! *The guest writes a block that was read.* Then the page that held its old contents is not found there any more, because what
//! is found is compared; the new contents are learnt some seconds after the last write, when the other side has them as well. On shared
//! storage nobody knows when that is, and a block that was written since the move began is not named at all.

use crate::disk::Disk;
use crate::parts::lock;
use godwit_memory::{Blocks, Finder, PageBytes, Spot, SpotTable};
use godwit_units::BlockIndex;
use godwit_volume::{BLOCK, BlockSet};
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// Blocks that are read at once: a mebibyte.
const AT_ONCE: u64 = 256;
/// Of a disk, so much is asked for holes at once.
const MAPPED: u64 = 1 << 30;
/// Blocks that it reads at most: more than the table remembers would be read for nothing.
const MOST: u64 = 12 << 20;
/// How long a block has to be left alone before it is worth learning, and how often it is looked.
const QUIET: Duration = Duration::from_secs(2);
/// Blocks written that wait to be learnt, of each disk; 4 GiB. More are forgotten: the guest writes faster than anybody could use.
const MOST_TOUCHED: u64 = 1 << 20;

/// Blocks that the guest wrote since somebody looked.
#[derive(Debug, Default)]
pub struct Touched(Mutex<BlockSet>);

impl Touched {
    /// The guest wrote these.
    pub fn add(&self, blocks: Range<u64>) {
        let mut touched = lock(&self.0);
        if touched.len() < MOST_TOUCHED {
            touched.insert(blocks);
        }
    }

    fn take(&self) -> BlockSet {
        std::mem::take(&mut lock(&self.0))
    }

    /// Whether this one may be among them. Where more were written than are kept, any may.
    fn may_have(&self, block: BlockIndex) -> bool {
        let touched = lock(&self.0);
        touched.len() >= MOST_TOUCHED || touched.contains(block)
    }
}

/// A VM's disks at one place of a move, in the order of its definition.
#[derive(Clone)]
pub struct Replicas(Vec<Arc<Disk>>);

impl Replicas {
    /// Of all disks of a VM.
    #[must_use]
    pub fn new(disks: Vec<Arc<Disk>>) -> Self {
        Self(disks)
    }
}

impl Blocks for Replicas {
    /// What is on shared storage is read there also where it is another host's still: whoever asks compares.
    fn read(&self, first: Spot, into: &mut [u8]) -> bool {
        let Some(disk) = self.0.get(usize::from(first.disk)) else { return false };
        let (replica, at) = (disk.replica(), u64::from(first.block) * BLOCK);
        match replica.is_detached() {
            true => replica.glance(at, into).is_ok(),
            false => replica.read(at, into).is_ok(),
        }
    }
}

/// What of a disk is at the destination while memory goes there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum At {
    /// All of it, and what the guest writes soon after.
    Mirrored,
    /// What it held when the move began, or nearly; what is written from then on follows the VM.
    Cached,
    /// It lies on storage that both reach, and what was durable when the move began is read there.
    Shared,
    /// Nothing that is known of.
    Nowhere,
}

/// Where the guest has ever read or written a disk.
struct Used {
    runs: Vec<Range<u64>>,
    /// Whether that is all, as far as anybody can know.
    is_all: bool,
    /// How many blocks there are to be read.
    blocks: u64,
}

impl Used {
    fn of(disk: &Disk) -> Self {
        let (runs, is_all) = disk.all_accesses();
        let blocks = match is_all {
            true => runs.iter().map(|run| run.end - run.start).sum(),
            false => disk.allocated().0 / BLOCK,
        };
        Self { runs, is_all, blocks }
    }
}

/// What is known so far; shared with the thread that reads.
#[derive(Clone)]
pub struct DiskIndex {
    disks: Replicas,
    /// What was written since to disks on storage that both reach, and their places.
    written: Vec<(u8, Arc<Touched>)>,
    table: Arc<Mutex<SpotTable>>,
    /// Cancelled when the disks have been read once.
    ready: CancellationToken,
}

impl Blocks for DiskIndex {
    fn read(&self, first: Spot, into: &mut [u8]) -> bool {
        self.disks.read(first, into)
    }
}

impl Finder for DiskIndex {
    fn find(&self, content: &PageBytes) -> Option<Spot> {
        lock(&self.table).find(content)
    }

    fn holds(&self, spot: Spot, content: &PageBytes) -> bool {
        let mut block = [0; BLOCK as usize];
        // A reference to what is not there costs the other side a round trip, in which it can do nothing else.
        self.is_there(spot) && self.read(spot, &mut block) && block == *content
    }
}

impl DiskIndex {
    /// Whether the destination may have this block as it is here.
    fn is_there(&self, spot: Spot) -> bool {
        let block = BlockIndex(u64::from(spot.block));
        let Some(disk) = self.disks.0.get(usize::from(spot.disk)) else { return false };
        match self.written.iter().find(|(n, _)| *n == spot.disk) {
            Some((_, written)) => !written.may_have(block),
            None => disk.is_there(block),
        }
    }

    /// Begins to read `disks`, but for those that are [`At::Nowhere`]; until one of `ends`.
    #[must_use]
    pub fn start(disks: Vec<Arc<Disk>>, at: impl Fn(&Disk) -> At, ends: [CancellationToken; 2]) -> Self {
        let mut seed = [0; 8];
        getrandom::fill(&mut seed).expect("the kernel gives random bytes once it has booted");
        let places = disks.iter().enumerate().map(|(n, disk)| (n, disk, at(disk)));
        let read: Vec<_> = places
            .filter(|(.., at)| *at != At::Nowhere)
            .filter_map(|(n, disk, at)| Some((u8::try_from(n).ok()?, disk.clone(), Arc::new(Touched::default()), at)))
            .collect();
        let seed = u64::from_le_bytes(seed);
        // What follows the VM is not learnt after it was written; what is on shared storage is not named any more.
        for (_, disk, touched, _) in read.iter().filter(|(.., at)| *at != At::Cached) {
            disk.watch(touched.clone());
        }
        let shared = read.iter().filter(|(.., at)| *at == At::Shared);
        let index = Self {
            disks: Replicas::new(disks),
            written: shared.map(|(n, _, touched, _)| (*n, touched.clone())).collect(),
            table: Arc::new(Mutex::new(SpotTable::new(0, seed))),
            ready: CancellationToken::new(),
        };
        let reading = index.clone();
        let is_over = move || ends.iter().any(CancellationToken::is_cancelled);
        crate::trace::spawn_blocking(move || {
            let used: Vec<_> = read.iter().map(|(_, disk, ..)| Used::of(disk)).collect();
            *lock(&reading.table) = SpotTable::new(used.iter().map(|used| used.blocks).sum::<u64>().min(MOST), seed);
            let mut left = MOST;
            for ((n, disk, _, at), used) in read.iter().zip(used) {
                // What this host's kernel has of it nobody else can read.
                if *at == At::Shared
                    && let Err(error) = disk.replica().flush()
                {
                    tracing::warn!(volume = disk.name, %error, "no memory is named from it");
                    continue;
                }
                reading.all(*n, disk, used, &mut left, &is_over);
            }
            reading.ready.cancel();
            let mut before: Vec<_> = read.iter().map(|_| BlockSet::default()).collect();
            let learns = |at: At| at == At::Mirrored;
            while !is_over() {
                std::thread::sleep(QUIET);
                for ((n, disk, touched, _), before) in read.iter().zip(&mut before).filter(|((.., at), _)| learns(*at))
                {
                    let now = touched.take();
                    for run in before.runs() {
                        // Written again: not yet.
                        reading.learn_unless(*n, disk, run, &now, &is_over);
                    }
                    *before = now;
                }
            }
            for (_, disk, touched, _) in &read {
                disk.unwatch(touched);
            }
        });
        index
    }

    /// Until the disks have been read once, but not for longer than this.
    pub async fn ready(&self, patience: Duration) {
        let _ = tokio::time::timeout(patience, self.ready.cancelled()).await;
    }

    /// What the guest has used; and the rest of the disk, where nobody knows all of that.
    fn all(&self, n: u8, disk: &Disk, used: Used, left: &mut u64, is_over: &dyn Fn() -> bool) {
        let blocks = disk.size().0 / BLOCK;
        for run in used.runs {
            self.run(n, disk, run.start..run.end.min(blocks), left, is_over);
        }
        if used.is_all {
            return;
        }
        let mut at = 0;
        while at < disk.size().0 && *left > 0 && !is_over() {
            let piece = MAPPED.min(disk.size().0 - at);
            let Ok(extents) = disk.replica().extents(at, piece) else { return };
            for (length, hole) in extents {
                if !hole {
                    self.run(n, disk, at / BLOCK..(at + length).div_ceil(BLOCK).min(blocks), left, is_over);
                }
                at += length;
            }
        }
    }

    fn run(&self, n: u8, disk: &Disk, run: Range<u64>, left: &mut u64, is_over: &dyn Fn() -> bool) {
        let mut buffer = vec![];
        let mut first = run.start;
        while first < run.end && *left > 0 && !is_over() {
            let count = AT_ONCE.min(run.end - first).min(*left);
            buffer.resize((count * BLOCK) as usize, 0);
            if let (Ok(block), Ok(())) = (u32::try_from(first), disk.replica().read(first * BLOCK, &mut buffer)) {
                lock(&self.table).learn(Spot { disk: n, block }, &buffer);
            }
            first += count;
            *left -= count;
        }
    }

    fn learn_unless(&self, n: u8, disk: &Disk, run: Range<u64>, now: &BlockSet, is_over: &dyn Fn() -> bool) {
        for block in run.filter(|block| !now.contains(BlockIndex(*block))) {
            self.run(n, disk, block..block + 1, &mut 1, is_over);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use godwit_handoff::{Generation, Lineage, Ticket};
    use godwit_units::{Bytes, MoveId, VmId, VolumeId};

    fn page(fill: u64) -> PageBytes {
        let mut page = [0; 4096];
        page[..8].copy_from_slice(&fill.to_le_bytes());
        page
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn every_block_of_a_disk_that_goes_before_its_vm_is_found_and_none_of_one_that_follows_it() {
        const BLOCKS: u64 = 3000;
        let folder = tempfile::tempdir().expect("a folder");
        let mut disks = vec![];
        for n in 0..2 {
            let replica = folder.path().join(format!("replica{n}"));
            let socket = folder.path().join(format!("disk{n}.sock"));
            let size = Bytes(2 * BLOCKS * BLOCK);
            let disk = Disk::open_or_create(&replica, None, socket, VolumeId(1 + n), "root", size).expect("opens");
            disk.open(Lineage::FIRST, Generation(1)).await.expect("opens");
            for block in 0..BLOCKS {
                // With holes between.
                disk.replica().write(2 * block * BLOCK, &page(1 + block + n * BLOCKS)).expect("writes");
            }
            disks.push(disk);
        }
        let over = CancellationToken::new();
        let _ends = over.clone().drop_guard();
        let places = [At::Mirrored, At::Nowhere];
        let index = DiskIndex::start(disks, |disk| places[disk.id.0 as usize - 1], [over.clone(), over.clone()]);
        index.ready(Duration::from_secs(60)).await;
        let mut read = [0; 4096];
        for block in 0..BLOCKS {
            let spot = index.find(&page(1 + block));
            assert_eq!(spot, Some(Spot { disk: 0, block: 2 * block as u32 }), "of {BLOCKS}");
            assert!(index.read(spot.expect("was found"), &mut read) && read == page(1 + block));
            assert_eq!(index.find(&page(1 + block + BLOCKS)), None);
        }
        assert!(!index.read(Spot { disk: 7, block: 0 }, &mut read), "a disk that there is not");
        assert!(!index.read(Spot { disk: 0, block: u32::MAX }, &mut read), "a block that there is not");
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn what_the_guest_writes_is_found_once_it_has_been_left_alone() {
        let folder = tempfile::tempdir().expect("a folder");
        let (replica, socket) = (folder.path().join("replica"), folder.path().join("disk.sock"));
        let disk = Disk::open_or_create(&replica, None, socket, VolumeId(1), "root", Bytes(64 * BLOCK)).expect("opens");
        disk.open(Lineage::FIRST, Generation(1)).await.expect("opens");
        let over = CancellationToken::new();
        let _ends = over.clone().drop_guard();
        let index = DiskIndex::start(vec![disk.clone()], |_| At::Mirrored, [over.clone(), over.clone()]);
        index.ready(Duration::from_secs(60)).await;
        disk.replica().write(5 * BLOCK, &page(9)).expect("writes");
        disk.touched(5..6);
        assert_eq!(index.find(&page(9)), None, "the other side may not have it yet");
        let begin = std::time::Instant::now();
        while index.find(&page(9)).is_none() {
            assert!(begin.elapsed() < Duration::from_secs(60), "it is never learnt");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        assert!(begin.elapsed() >= QUIET, "after {:?}", begin.elapsed());
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn of_a_disk_that_was_pre_cached_only_what_it_held_at_the_beginning_is_found() {
        let folder = tempfile::tempdir().expect("a folder");
        let (replica, socket) = (folder.path().join("replica"), folder.path().join("disk.sock"));
        let disk = Disk::open_or_create(&replica, None, socket, VolumeId(1), "root", Bytes(64 * BLOCK)).expect("opens");
        disk.open(Lineage::FIRST, Generation(1)).await.expect("opens");
        disk.replica().write(3 * BLOCK, &page(7)).expect("writes");
        let over = CancellationToken::new();
        let _ends = over.clone().drop_guard();
        let index = DiskIndex::start(vec![disk.clone()], |_| At::Cached, [over.clone(), over.clone()]);
        index.ready(Duration::from_secs(60)).await;
        assert_eq!(index.find(&page(7)), Some(Spot { disk: 0, block: 3 }));
        disk.replica().write(5 * BLOCK, &page(9)).expect("writes");
        disk.touched(5..6);
        tokio::time::sleep(3 * QUIET).await;
        assert_eq!(index.find(&page(9)), None, "it follows the VM, and is not there yet");
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn where_all_that_the_guest_has_used_is_known_nothing_else_is_read() {
        const BLOCKS: u64 = 1000;
        let folder = tempfile::tempdir().expect("a folder");
        let (replica, socket) = (folder.path().join("replica"), folder.path().join("disk.sock"));
        let disk =
            Disk::open_or_create(&replica, None, socket, VolumeId(1), "root", Bytes(BLOCKS * BLOCK)).expect("opens");
        disk.open(Lineage::FIRST, Generation(1)).await.expect("opens");
        for block in 0..BLOCKS {
            disk.replica().write(block * BLOCK, &page(1 + block)).expect("writes");
        }
        disk.read(7 * BLOCK, 100 * BLOCK as u32).expect("reads");
        disk.read(700 * BLOCK, BLOCK as u32).expect("reads");
        let over = CancellationToken::new();
        let _ends = over.clone().drop_guard();
        let index = DiskIndex::start(vec![disk.clone()], |_| At::Mirrored, [over.clone(), over.clone()]);
        index.ready(Duration::from_secs(60)).await;
        for block in 0..BLOCKS {
            let is_used = (7..107).contains(&block) || block == 700;
            assert_eq!(index.find(&page(1 + block)).is_some(), is_used, "block {block}");
        }
    }

    /// A volume on storage that two hosts reach, as each of them sees it; it is the first one's.
    async fn shared(folder: &std::path::Path) -> [Arc<Disk>; 2] {
        let (place, size) = (folder.join("shared"), Bytes(64 * BLOCK));
        godwit_volume::Replica::create_shared(&place, VolumeId(1), size).expect("creates");
        let disks = ["a", "b"].map(|host| {
            let (own, socket) = (folder.join(host), folder.join(format!("{host}.sock")));
            Disk::open_shared(&place, &own, socket, VolumeId(1), "root", size, host).expect("opens")
        });
        disks[0].open(Lineage::FIRST, Generation(1)).await.expect("opens");
        disks
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn what_lay_on_shared_storage_is_named_and_read_by_the_other_host_and_what_was_written_since_is_not() {
        let folder = tempfile::tempdir().expect("a folder");
        let [here, there] = shared(folder.path()).await;
        for block in [3, 4, 5] {
            here.replica().write(block * BLOCK, &page(block)).expect("writes");
        }
        let over = CancellationToken::new();
        let _ends = over.clone().drop_guard();
        let index = DiskIndex::start(vec![here.clone()], |_| At::Shared, [over.clone(), over.clone()]);
        index.ready(Duration::from_secs(60)).await;
        let (there, mut read) = (Replicas::new(vec![there]), [0; 4096]);
        for block in [3, 4, 5] {
            let spot = Spot { disk: 0, block };
            assert_eq!(index.find(&page(block.into())), Some(spot));
            assert!(index.holds(spot, &page(block.into())));
            assert!(there.read(spot, &mut read) && read == page(block.into()));
        }
        // The same contents, written once more: nobody knows when the other host reads them.
        here.touched(4..5);
        assert!(!index.holds(Spot { disk: 0, block: 4 }, &page(4)));
        assert!(index.holds(Spot { disk: 0, block: 3 }, &page(3)));
        tokio::time::sleep(3 * QUIET).await;
        assert!(!index.holds(Spot { disk: 0, block: 4 }, &page(4)), "however long ago");
        assert!(!there.read(Spot { disk: 0, block: 64 }, &mut read), "behind its end");
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn what_a_guest_has_used_of_shared_storage_is_known_wherever_it_used_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let [one, other] = shared(folder.path()).await;
        one.read(9 * BLOCK, 2 * BLOCK as u32).expect("reads");
        let used = |disk: &Arc<Disk>| disk.all_accesses().0;
        let stored = || godwit_volume::order::FirstAccess::load(&folder.path().join("shared")).runs().to_vec();
        while stored().first() != Some(&(9..11)) {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        one.freeze().await.expect("lets go");
        let (lineage, generation) = (Lineage::FIRST, Generation(2));
        let ticket = Ticket { vm: VmId(1), lineage, generation, mv: MoveId(1) };
        other.receive(ticket).await.expect("waits");
        assert!(used(&other).is_empty(), "not before it is its own");
        other.open(Lineage::FIRST, Generation(2)).await.expect("opens");
        other.read(3 * BLOCK, BLOCK as u32).expect("reads");
        assert_eq!(used(&other), [9..11, 3..4]);
        while stored() != [9..11, 3..4] {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        // And back.
        other.freeze().await.expect("lets go");
        one.open(Lineage::FIRST, Generation(3)).await.expect("opens");
        assert_eq!(used(&one), [9..11, 3..4]);
    }
}
