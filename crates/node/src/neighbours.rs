//! Memory that other guests of the trust domain have at the destination: guests that went there from this host a while ago, and guests that
//! run there wherever they came from (`resident`).
//!
//! Guests of one customer are often made from one image: the same kernel, the same libraries, the same initial RAM disk. A page that a guest
//! which went before has is named and copied out of that guest's RAM at the destination, by what names blocks of disks
//! (`godwit_memory::disks`): a spot whose disk is [`NEIGHBOURS`] or more is a page of another guest's memory.
//!
//! ```text
//!   source: a guest has left; a hash of each page of its RAM as it was --> Left
//!   source: the next one's page has such a hash -------- spot -----------> destination: that guest's RAM, read, verified, used
//! ```
//!
//! The first [`MOST`] such disks are guests that the source names itself, the next ones those that the destination has told it of.
//!
//! Only guests of the same trust domain, which the definition says that the controller has signed, and which the destination looks up
//! in its own: a guest of no domain shares with nobody. So nobody's bytes tell of anybody else's.
//!
//! # What can go wrong
//!
//! *The other guest runs on, and writes*: the digest says so before anything is used, and the pages are sent (a round trip). Where that is
//! often so nothing is named any more (`PATIENCE`). *It has gone on, or was never there*: the same, and its memory is let go of within a
//! second. *Two pages have one hash*: 128 bits under a key that is this node's alone, and the stream's digest would tell.
//!
//! What it costs: a guest that leaves is hashed only if another one of its domain is still here; at most 28 bytes for a page, of
//! [`MOST`] guests with [`MOST_PAGES`] together (235 MB), for [`LASTING`]. While it is hashed its RAM stays, which nobody uses any more: so
//! [`AT_ONCE`] are, and one that leaves meanwhile is not remembered.

pub(crate) mod resident;

use crate::disk_index::{DiskIndex, Replicas};
use crate::neighbours::resident::{Guest, Shown};
use crate::node::Node;
use crate::parts::{Parts, lock};
use godwit_api::Name;
use godwit_api::host::MoveRole;
use godwit_api::vm::VmDefinition;
use godwit_memory::{Blocks, Finder, NEIGHBOURS, PAGE_SIZE, PageBytes, Spot};
use godwit_units::VmId;
use hashbrown::HashTable;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::sync::Semaphore;

/// Guests that are remembered, and named in one move, at most: the last ones. And as many that the destination tells of.
pub(crate) const MOST: usize = 8;
/// Pages of all that are remembered, at most: 32 GiB of RAM.
const MOST_PAGES: usize = 8 << 20;
/// How long one is remembered: what has run elsewhere for so long has little of what it had.
const LASTING: Duration = Duration::from_secs(1800);

/// So many are hashed at once.
const AT_ONCE: usize = 2;

type Hash = u128;

/// A guest that has left: where its pages were, by their hashes.
#[derive(Debug)]
pub(crate) struct Left {
    vm: VmId,
    domain: Name,
    to: Name,
    since: Instant,
    key: [u8; 32],
    /// Each page's, as far as there are any; zero: of a page of zeroes.
    pages: Vec<Hash>,
    /// Where a hash stands in it: a place alone, or there would be each hash twice.
    places: HashTable<u32>,
}

/// What a table goes by: of a keyed hash, any bits do.
const fn bits(hash: Hash) -> u64 {
    hash as u64
}

fn hash(key: &[u8; 32], content: &[u8]) -> Hash {
    let hash = blake3::keyed_hash(key, content);
    Hash::from_le_bytes(*hash.as_bytes().first_chunk().expect("a hash has 32 bytes"))
}

impl Left {
    /// Hashes a guest's RAM, the first [`MOST_PAGES`] of it. Reads the file as far as it has data in it.
    fn look(vm: VmId, domain: Name, to: Name, key: [u8; 32], ram: &File) -> std::io::Result<Self> {
        let size = ram.metadata()?.len().min((MOST_PAGES * PAGE_SIZE) as u64);
        // Of which the system gives what is written to.
        let mut pages: Vec<Hash> = Vec::with_capacity(size as usize / PAGE_SIZE);
        let mut buffer = vec![0; 256 * PAGE_SIZE];
        let mut at = 0;
        while at < size {
            let data = match rustix::fs::seek(ram, rustix::fs::SeekFrom::Data(at)) {
                Ok(data) => data / PAGE_SIZE as u64 * PAGE_SIZE as u64,
                Err(rustix::io::Errno::NXIO) => break,
                Err(error) => return Err(error.into()),
            };
            if data >= size {
                break;
            }
            let n = (size - data).min(buffer.len() as u64) as usize;
            ram.read_exact_at(&mut buffer[..n], data)?;
            for (page, content) in (data / PAGE_SIZE as u64..).zip(buffer[..n].chunks_exact(PAGE_SIZE)) {
                if content.iter().any(|byte| *byte != 0) {
                    let hash = hash(&key, content);
                    pages.resize(page as usize, 0);
                    pages.push(hash);
                }
            }
            at = data + n as u64;
        }
        pages.shrink_to_fit();
        let mut places = HashTable::with_capacity(pages.iter().filter(|hash| **hash != 0).count());
        for (page, hash) in pages.iter().enumerate().filter(|(_, hash)| **hash != 0) {
            let (same, of) =
                (|known: &u32| pages[*known as usize] == *hash, |known: &u32| bits(pages[*known as usize]));
            places.entry(bits(*hash), same, of).or_insert(page as u32);
        }
        Ok(Self { vm, domain, to, since: Instant::now(), key, pages, places })
    }

    /// A page with this hash.
    fn place(&self, hash: Hash) -> Option<u32> {
        self.places.find(bits(hash), |known| self.pages[*known as usize] == hash).copied()
    }
}

/// The guests that have left this host.
#[derive(Debug)]
pub(crate) struct Neighbours {
    key: [u8; 32],
    left: Mutex<Vec<Arc<Left>>>,
    looking: Arc<Semaphore>,
    /// Of looks at guests that run here. Apart: whoever is told of them may be slow.
    telling: Arc<Semaphore>,
    /// Pages of all, at most.
    room: usize,
}

impl Default for Neighbours {
    fn default() -> Self {
        let mut key = [0; 32];
        getrandom::fill(&mut key).expect("the kernel gives random bytes once it has booted");
        let turns = || Arc::new(Semaphore::new(AT_ONCE));
        Self { key, left: Mutex::default(), looking: turns(), telling: turns(), room: MOST_PAGES }
    }
}

impl Neighbours {
    fn add(&self, left: Left) {
        let mut all = lock(&self.left);
        all.retain(|other| other.vm != left.vm);
        all.push(Arc::new(left));
        let pages = |all: &[Arc<Left>]| all.iter().map(|left| left.pages.len()).sum::<usize>();
        while all.len() > MOST || pages(&all) > self.room {
            all.remove(0);
        }
    }

    /// Lets go of those that left too long ago.
    fn expire(&self) {
        lock(&self.left).retain(|left| left.since.elapsed() < LASTING);
    }

    /// Those of a VM's domain that are at its destination, for all that is known.
    pub(crate) fn of(&self, vm: VmId, domain: Option<&Name>, to: &Name) -> Vec<Arc<Left>> {
        self.expire();
        let all = lock(&self.left);
        let theirs = |left: &&Arc<Left>| left.vm != vm && Some(&left.domain) == domain && left.to == *to;
        all.iter().filter(theirs).cloned().collect()
    }
}

/// What a guest leaves behind whose QEMU is about to end.
pub(crate) struct Leaving {
    ram: File,
    domain: Name,
    to: Name,
}

/// Source: takes hold of the RAM of a guest that runs elsewhere, if another one of its domain may follow it.
pub(crate) fn leaving(node: &Node, parts: &Parts) -> Option<Leaving> {
    let moving = parts.moving().filter(|moving| moving.role == MoveRole::Source)?;
    let domain = parts.definition().domain.clone()?;
    let follows = |other: &Arc<Parts>| {
        other.id != parts.id && other.definition().domain.as_ref() == Some(&domain) && other.qemu().is_some()
    };
    if !node.vms().iter().any(follows) {
        return None;
    }
    let ram = parts.qemu()?.ram(parts.definition().spec.memory).ok()?;
    Some(Leaving { ram, domain, to: moving.peer.name.clone() })
}

/// Source: remembers it.
pub(crate) fn remember(node: &Arc<Node>, parts: &Parts, leaving: Leaving) {
    let Ok(turn) = node.neighbours().looking.clone().try_acquire_owned() else {
        tracing::debug!(vm = %parts.name, "its memory is not named to its neighbours: others that left are being looked at");
        return;
    };
    let (node, vm, name, then) = (node.clone(), parts.id, parts.name.clone(), Arc::downgrade(node));
    let looking = crate::trace::spawn_blocking(move || {
        let (Leaving { ram, domain, to }, _turn) = (leaving, turn);
        match Left::look(vm, domain, to, node.neighbours().key, &ram) {
            Ok(left) => {
                tracing::debug!(vm = %name, pages = left.places.len(), "its memory may be named to its neighbours");
                node.neighbours().add(left);
            }
            Err(error) => tracing::warn!(vm = %name, %error, "its memory cannot be named to its neighbours"),
        }
    });
    crate::trace::spawn(async move {
        let _ = looking.await;
        tokio::time::sleep(LASTING).await;
        if let Some(node) = then.upgrade() {
            node.neighbours().expire();
        }
    });
}

/// Source: the disks that a destination has, the guests that went there before, and those that it tells of.
pub(crate) struct Known {
    disks: DiskIndex,
    left: Vec<Arc<Left>>,
    told: Option<resident::Told>,
}

impl Known {
    pub(crate) fn new(disks: DiskIndex, left: Vec<Arc<Left>>, told: Option<resident::Told>) -> Self {
        Self { disks, left, told }
    }

    /// Whom the destination has to be told of: their places are the numbers in spots.
    pub(crate) fn vms(&self) -> Vec<VmId> {
        self.left.iter().map(|left| left.vm).collect()
    }

    fn told(&self, content: &PageBytes) -> Option<Spot> {
        lock(self.told.as_ref()?).find(content)
    }
}

impl Blocks for Known {
    fn read(&self, first: Spot, into: &mut [u8]) -> bool {
        first.disk < NEIGHBOURS && self.disks.read(first, into)
    }
}

impl Finder for Known {
    fn find(&self, content: &PageBytes) -> Option<Spot> {
        let (on_disk, told) = (self.disks.find(content), self.told(content));
        // Whoever asks compares: what is read here as well is read twice.
        if told.is_none() && self.left.is_empty() {
            return on_disk;
        }
        // The disks' word is a guess: one that is wrong must not hide what is known.
        if let Some(spot) = on_disk.filter(|spot| self.disks.holds(*spot, content)) {
            return Some(spot);
        }
        // What was looked at a moment ago before what has run on since it left.
        if told.is_some() {
            return told;
        }
        let hash = hash(&self.left.first()?.key, content);
        let found = self.left.iter().zip(NEIGHBOURS..).find_map(|(left, n)| Some((n, left.place(hash)?)));
        found.map(|(disk, block)| Spot { disk, block })
    }

    /// Of a guest that has left there are hashes only: as good as its bytes. Of one that the destination tells of there is its word, which it
    /// gives for one page of all that are equal.
    fn holds(&self, spot: Spot, content: &PageBytes) -> bool {
        if spot.disk >= resident::FIRST {
            return self.told(content) == Some(spot);
        }
        let Some(n) = spot.disk.checked_sub(NEIGHBOURS) else { return self.disks.holds(spot, content) };
        let Some(left) = self.left.get(usize::from(n)) else { return false };
        left.pages.get(spot.block as usize).is_some_and(|known| *known == hash(&left.key, content))
    }
}

/// Destination: the VM's disks, and the RAM of the guests that the source has named, and of those that it was told of, for as long as they are here.
pub(crate) struct Here {
    disks: Replicas,
    named: Arc<Shown>,
    told: Arc<Shown>,
}

impl Here {
    pub(crate) fn new(disks: Replicas, named: Arc<Shown>, told: Arc<Shown>) -> Self {
        Self { disks, named, told }
    }
}

impl Blocks for Here {
    fn read(&self, first: Spot, into: &mut [u8]) -> bool {
        if let Some(n) = first.disk.checked_sub(resident::FIRST) {
            return self.told.read(usize::from(n), first.block, into);
        }
        let Some(n) = first.disk.checked_sub(NEIGHBOURS) else { return self.disks.read(first, into) };
        self.named.read(usize::from(n), first.block, into)
    }
}

/// Whether what one VM has in memory may be told to a host that has the other: they are of one trust domain, as the definitions say that the
/// controller has signed.
fn are_neighbours(one: &VmDefinition, other: &VmDefinition) -> bool {
    one.id != other.id && one.domain.is_some() && one.domain == other.domain
}

/// Destination: the RAM of those guests, as far as they are of the VM's own domain and here, and for as long.
pub(crate) fn here(node: &Node, parts: &Parts, named: &[VmId]) -> Arc<Shown> {
    let own = parts.definition();
    let guest = |vm: &VmId| {
        let other = node.vm(*vm).filter(|other| are_neighbours(&own, &other.definition()))?;
        Guest::of(other)
    };
    let guests: Vec<Option<Guest>> = named.iter().take(MOST).map(guest).collect();
    let ram = guests.iter().map(|guest| guest.as_ref()?.ram()).collect();
    let shown = Arc::new(Shown::of(ram));
    if !guests.is_empty() {
        let is_here = move |n: usize| matches!(guests.get(n), Some(Some(guest)) if guest.is_here());
        crate::trace::spawn(resident::let_go(Arc::downgrade(&shown), is_here));
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;
    use godwit_memory::{Hints, Looked};

    fn page(fill: u8) -> PageBytes {
        [fill; PAGE_SIZE]
    }

    fn left(vm: u64, domain: &str, to: &str, pages: &[u8]) -> Left {
        let ram = tempfile::tempfile().expect("a file");
        ram.set_len(64 * PAGE_SIZE as u64).expect("grows");
        for (n, fill) in pages.iter().enumerate() {
            ram.write_all_at(&page(*fill), 3 * n as u64 * PAGE_SIZE as u64).expect("writes");
        }
        let name = |name: &str| name.parse::<Name>().expect("a name");
        Left::look(VmId(vm), name(domain), name(to), [7; 32], &ram).expect("reads")
    }

    fn known(left: Vec<Left>) -> Known {
        let over = tokio_util::sync::CancellationToken::new();
        over.cancel();
        let disks = DiskIndex::start(vec![], |_| crate::disk_index::At::Mirrored, [over.clone(), over]);
        Known::new(disks, left.into_iter().map(Arc::new).collect(), None)
    }

    #[tokio::test]
    async fn a_page_of_a_guest_that_left_is_found_where_it_was_and_zeroes_nowhere() {
        let known = known(vec![left(1, "ann", "b", &[5, 0, 6]), left(2, "ann", "b", &[8])]);
        assert_eq!(known.vms(), [VmId(1), VmId(2)]);
        let at = |disk, block| Some(Spot { disk, block });
        assert_eq!(known.find(&page(5)), at(NEIGHBOURS, 0));
        assert_eq!(known.find(&page(6)), at(NEIGHBOURS, 6));
        assert_eq!(known.find(&page(8)), at(NEIGHBOURS + 1, 0));
        assert_eq!((known.find(&page(0)), known.find(&page(9))), (None, None));
        assert!(known.holds(Spot { disk: NEIGHBOURS, block: 6 }, &page(6)));
        for (disk, block, fill) in [(NEIGHBOURS, 6, 5), (NEIGHBOURS, 60, 6), (NEIGHBOURS + 2, 0, 8), (0, 0, 5)] {
            assert!(!known.holds(Spot { disk, block }, &page(fill)));
        }
    }

    /// What a destination tells of a guest with these pages.
    fn told(pages: &[u8]) -> resident::Told {
        let ram = tempfile::tempfile().expect("a file");
        for (n, fill) in (0..).zip(pages) {
            ram.write_all_at(&page(*fill), n * PAGE_SIZE as u64).expect("writes");
        }
        let ram = Some(Arc::new(ram));
        let looked = Looked::look(3, [ram.clone()], 99, &|| true);
        let mut hints = Hints::new(3, resident::FIRST, 1, 99);
        looked.tell(&|_| ram.clone(), &|| true, |piece| hints.take(&piece).expect("makes sense"));
        Arc::new(Mutex::new(hints))
    }

    #[tokio::test]
    async fn what_the_destination_tells_of_is_found_there_and_the_rest_in_what_has_left() {
        let mut known = known(vec![left(1, "ann", "b", &[5, 6])]);
        known.told = Some(told(&[0, 5, 7]));
        assert_eq!(known.vms(), [VmId(1)], "the others it knows itself");
        let at = |disk, block| Some(Spot { disk, block });
        assert_eq!(known.find(&page(5)), at(resident::FIRST, 1));
        assert_eq!(known.find(&page(7)), at(resident::FIRST, 2));
        assert_eq!(known.find(&page(6)), at(NEIGHBOURS, 3));
        assert_eq!((known.find(&page(0)), known.find(&page(9))), (None, None));
        assert!(known.holds(Spot { disk: resident::FIRST, block: 2 }, &page(7)));
        for (disk, block, fill) in [(resident::FIRST, 1, 7), (resident::FIRST + 1, 1, 5), (resident::FIRST, 0, 0)] {
            assert!(!known.holds(Spot { disk, block }, &page(fill)));
        }
        known.left.clear();
        assert_eq!((known.find(&page(7)), known.find(&page(6))), (at(resident::FIRST, 2), None));
    }

    #[test]
    fn of_another_domain_or_of_none_nobody_is_told_and_of_itself_neither() {
        let of = |vm: u64, domain: Option<&str>| -> VmDefinition {
            let definition = serde_json::json!({
                "id": vm, "name": "web", "volumes": [], "wires": [], "spec": {"memory": 4096}, "domain": domain,
            });
            serde_json::from_value(definition).expect("a definition")
        };
        assert!(are_neighbours(&of(1, Some("ann")), &of(2, Some("ann"))));
        for (one, other) in [
            (of(1, Some("ann")), of(2, Some("bob"))),
            (of(1, Some("ann")), of(2, None)),
            (of(1, None), of(2, Some("ann"))),
            (of(1, None), of(2, None)),
            (of(1, Some("ann")), of(1, Some("ann"))),
        ] {
            assert!(!are_neighbours(&one, &other), "{:?} and {:?}", one.domain, other.domain);
        }
    }

    #[test]
    fn nobody_is_a_neighbour_but_who_is_of_the_same_domain_and_went_to_the_same_host() {
        let all = Neighbours::default();
        for (vm, domain, to) in [(1, "ann", "b"), (2, "bob", "b"), (3, "ann", "c"), (4, "ann", "b")] {
            all.add(left(vm, domain, to, &[5]));
        }
        let name = |name: &str| name.parse::<Name>().expect("a name");
        let of = |vm, domain: Option<&str>| -> Vec<u64> {
            let domain = domain.map(name);
            all.of(VmId(vm), domain.as_ref(), &name("b")).iter().map(|left| left.vm.0).collect()
        };
        assert_eq!(of(9, Some("ann")), [1, 4]);
        assert_eq!(of(4, Some("ann")), [1], "not itself, as it was when it left");
        assert_eq!(of(9, Some("bob")), [2]);
        assert_eq!(of(9, None), [0; 0], "a guest of no domain has no neighbours");
        for vm in 10..30 {
            all.add(left(vm, "ann", "b", &[]));
        }
        assert_eq!(of(9, Some("ann")).len(), MOST);
        let few = Neighbours { room: 9, ..Neighbours::default() };
        let pages = |n: u64| left(n, "ann", "b", &[5, 6]);
        (1..=3).for_each(|n| few.add(pages(n)));
        assert_eq!(few.of(VmId(9), Some(&name("ann")), &name("b")).len(), 2, "the first one's pages are too many");
    }

    #[test]
    fn what_another_guest_has_is_read_from_its_ram_and_from_nowhere_else() {
        let ram = tempfile::tempfile().expect("a file");
        ram.write_all_at(&page(4), PAGE_SIZE as u64).expect("writes");
        let named = Shown::of(vec![None, Some(Arc::new(ram))]);
        let here = Here::new(Replicas::new(vec![]), named.into(), Arc::default());
        let mut content = page(0);
        assert!(here.read(Spot { disk: NEIGHBOURS + 1, block: 1 }, &mut content) && content == page(4));
        for (disk, block) in [(NEIGHBOURS, 1), (NEIGHBOURS + 1, 2), (NEIGHBOURS + 2, 1), (1, 1)] {
            assert!(!here.read(Spot { disk, block }, &mut content));
        }
    }
}
