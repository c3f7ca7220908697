use super::*;
use crate::scrub::Mend;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

const BLOCKS: u64 = 2048;

/// A file that forgets what was not synced, wholly or in parts, when its power goes.
#[derive(Clone, Debug, Default)]
struct Volatile(Arc<Mutex<State>>);

#[derive(Clone, Debug, Default)]
struct State {
    durable: Vec<u8>,
    current: Vec<u8>,
    /// Since the last sync, in order.
    pending: Vec<(u64, Vec<u8>)>,
    /// There is room for a half of what is written.
    full: bool,
    /// Of what is punched a half becomes a hole.
    worn: bool,
    /// The next sync fails, and the system tells of that once.
    lost: bool,
}

impl Volatile {
    fn new(size: u64) -> Self {
        Self(Arc::new(Mutex::new(State {
            durable: vec![0; size as usize],
            current: vec![0; size as usize],
            pending: vec![],
            full: false,
            worn: false,
            lost: false,
        })))
    }

    fn put(&self, at: u64, from: &[u8]) {
        let mut state = self.0.lock().expect("one thread");
        state.pending.push((at, from.to_vec()));
        state.current[at as usize..][..from.len()].copy_from_slice(from);
    }

    /// What is found after a loss of power: of each 512 bytes that were not synced, some came through.
    fn lose_power(&self, rng: &mut SmallRng) {
        let mut state = self.0.lock().expect("one thread");
        for (at, bytes) in std::mem::take(&mut state.pending) {
            for (i, sector) in bytes.chunks(512).enumerate() {
                if rng.random_bool(0.5) {
                    let from = at as usize + i * 512;
                    state.durable[from..from + sector.len()].copy_from_slice(sector);
                }
            }
        }
        let state = &mut *state;
        state.current.clone_from(&state.durable);
    }
}

impl Medium for Volatile {
    fn read(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        into.copy_from_slice(&self.0.lock().expect("one thread").current[at as usize..][..into.len()]);
        Ok(())
    }

    fn write(&self, at: u64, from: &[u8]) -> io::Result<()> {
        let full = self.0.lock().expect("one thread").full;
        self.put(at, if full { &from[..from.len() / 2] } else { from });
        if full { Err(io::ErrorKind::StorageFull.into()) } else { Ok(()) }
    }

    fn punch(&self, at: u64, length: u64) -> io::Result<()> {
        let worn = self.0.lock().expect("one thread").worn;
        self.put(at, &vec![0; length as usize / if worn { 2 } else { 1 }]);
        if worn { Err(io::Error::other("worn out")) } else { Ok(()) }
    }

    fn sync(&self) -> io::Result<()> {
        let state = &mut *self.0.lock().expect("one thread");
        if std::mem::take(&mut state.lost) {
            return Err(io::Error::other("written in vain"));
        }
        for (at, bytes) in state.pending.drain(..) {
            state.durable[at as usize..][..bytes.len()].copy_from_slice(&bytes);
        }
        Ok(())
    }

    fn extents(&self, at: u64, length: u64) -> io::Result<Vec<(u64, bool)>> {
        let _ = at;
        Ok(vec![(length, false)])
    }

    fn allocated(&self) -> u64 {
        0
    }
}

/// These tests say themselves what a description held.
#[derive(Debug)]
struct Nowhere;

impl Description for Nowhere {
    fn load(&self) -> io::Result<Vec<u8>> {
        Ok(vec![])
    }

    fn store(&self, _bytes: &[u8]) -> io::Result<()> {
        Ok(())
    }
}

struct Host {
    data: Volatile,
    stamps: Volatile,
    hot: Volatile,
    epoch: u32,
    primary: bool,
}

impl Host {
    fn new(primary: bool) -> Self {
        let regions = BLOCKS.div_ceil(REGION);
        Self {
            data: Volatile::new(BLOCKS * BLOCK),
            stamps: Volatile::new(regions * REGION * 8),
            hot: Volatile::new(regions),
            epoch: 0,
            primary,
        }
    }

    fn boot(&mut self) -> Replica {
        self.try_boot().expect("opens")
    }

    fn try_boot(&mut self) -> Result<Replica, VolumeError> {
        let meta = Meta {
            primary: self.primary,
            owner: u32::from(self.primary),
            owners: vec![(Lineage(0), Generation(1))],
            // Durable before it is used.
            epoch: self.epoch,
            clean: false,
            ..Meta::fresh(VolumeId(1), Bytes(BLOCKS * BLOCK)).expect("a size")
        };
        let media = Media {
            data: Box::new(self.data.clone()),
            stamps: Box::new(self.stamps.clone()),
            hot: Box::new(self.hot.clone()),
            words: Box::new(Volatile::new(BLOCKS * 8)),
            power: String::new(),
            description: Box::new(Nowhere),
            region: REGION,
        };
        let (replica, _) = Replica::assemble(Path::new("test"), meta, media, None, Guards::ALL)?;
        self.epoch += 1;
        replica.lock().frozen = false;
        Ok(replica)
    }

    fn lose_power(&self, rng: &mut SmallRng) {
        [&self.data, &self.stamps, &self.hot].into_iter().for_each(|f| f.lose_power(rng));
    }
}

/// What another replica remembers: each block's stamp, and its contents then.
fn copy(replica: &Replica) -> Vec<(Option<Stamp>, Vec<u8>)> {
    (0..BLOCKS)
        .map(|block| {
            let mut bytes = vec![0; BLOCK as usize];
            replica.read(block * BLOCK, &mut bytes).expect("reads");
            (replica.stamp(block).expect("reads"), bytes)
        })
        .collect()
}

#[test]
fn after_any_loss_of_power_equal_stamps_mean_equal_contents() {
    for seed in 0..60 {
        let mut rng = SmallRng::seed_from_u64(seed);
        let mut host = Host::new(true);
        // What other replicas were sent: they rely on stamps being true for ever.
        let mut sent: BTreeMap<(u64, Stamp), Vec<u8>> = BTreeMap::new();
        for _ in 0..4 {
            let replica = host.boot();
            for _ in 0..rng.random_range(1..12) {
                match rng.random_range(0..10) {
                    0 => replica.settle_after(rng.random_range(1..4)).expect("settles"),
                    1 => replica.commit().expect("settles"),
                    2 => replica.flush().expect("syncs"),
                    3 => {
                        // A mirror takes everything, and only then the epoch goes on.
                        for (block, (stamp, bytes)) in (0..).zip(copy(&replica)) {
                            if let Some(stamp) = stamp {
                                sent.insert((block, stamp), bytes);
                            }
                        }
                        replica.roll().expect("rolls");
                        host.epoch += 1;
                    }
                    4 => drop(replica.zero(rng.random_range(0..BLOCKS - 8) * BLOCK, 2 * BLOCK).expect("zeroes")),
                    _ => {
                        let at = rng.random_range(0..BLOCKS * 8 - 32) * 512;
                        let bytes = vec![rng.random(); 512 * rng.random_range(1..24)];
                        replica.write(at, &bytes).expect("writes");
                    }
                }
            }
            drop(replica);
            host.lose_power(&mut rng);
        }
        let replica = host.boot();
        for (block, (stamp, bytes)) in (0..).zip(copy(&replica)) {
            match stamp {
                Some(stamp) => {
                    if let Some(then) = sent.get(&(block, stamp)) {
                        assert!(*then == bytes, "seed {seed}: block {block} changed and its stamp {stamp:?} did not");
                    }
                }
                None => assert!(is_zero(&bytes), "seed {seed}: block {block} was written, and nobody knows"),
            }
        }
    }
}

#[test]
fn a_secondary_that_lost_its_power_believes_only_what_was_durable() {
    for seed in 0..60 {
        let mut rng = SmallRng::seed_from_u64(seed);
        let mut host = Host::new(false);
        let mut applied: BTreeMap<(u64, Stamp), u8> = BTreeMap::new();
        for round in 0..4 {
            let replica = host.boot();
            for i in 0..rng.random_range(1..20) {
                let stamp = Stamp { lineage: Lineage(0), generation: Generation(1), epoch: Epoch(round * 100 + i) };
                let (first, fill) = (rng.random_range(0..BLOCKS - 4), rng.random_range(1..=255));
                replica.apply(first, stamp, Contents::Data(&vec![fill; 3 * BLOCK as usize])).expect("applies");
                applied.extend((first..first + 3).map(|b| ((b, stamp), fill)));
                if rng.random_bool(0.1) {
                    replica.commit().expect("settles");
                }
            }
            drop(replica);
            host.lose_power(&mut rng);
        }
        let replica = host.boot();
        for (block, (stamp, bytes)) in (0..).zip(copy(&replica)) {
            match stamp {
                Some(stamp) => {
                    let fill = applied[&(block, stamp)];
                    assert!(bytes.iter().all(|b| *b == fill), "seed {seed}: block {block} is not what {stamp:?} says");
                }
                None => assert!(is_zero(&bytes), "seed {seed}: block {block} is believed absent and holds something"),
            }
        }
    }
}

#[test]
fn what_a_secondary_has_committed_survives_a_loss_of_power() {
    for seed in 0..60 {
        let mut rng = SmallRng::seed_from_u64(seed);
        let mut host = Host::new(false);
        let replica = host.boot();
        let stamp = Stamp { lineage: Lineage(0), generation: Generation(1), epoch: Epoch(7) };
        for first in [3, 900, 1500] {
            replica.apply(first, stamp, Contents::Data(&[9; BLOCK as usize])).expect("applies");
        }
        replica.commit().expect("settles");
        drop(replica);
        host.lose_power(&mut rng);
        let replica = host.boot();
        for block in [3, 900, 1500] {
            assert_eq!(replica.stamp(block).expect("reads"), Some(stamp), "seed {seed}: block {block}");
        }
    }
}

#[test]
fn what_a_primary_held_survives_a_loss_of_power_after_it_has_become_a_secondary() {
    for seed in 0..20 {
        let mut rng = SmallRng::seed_from_u64(seed);
        let mut host = Host::new(true);
        let replica = host.boot();
        for block in [3, 900, 1500] {
            replica.write(block * BLOCK, &[9; BLOCK as usize]).expect("writes");
        }
        replica.become_secondary().expect("yields");
        drop(replica);
        host.primary = false;
        host.lose_power(&mut rng);
        let replica = host.boot();
        for block in [3, 900, 1500] {
            let mut bytes = [0; BLOCK as usize];
            replica.read(block * BLOCK, &mut bytes).expect("reads");
            assert_eq!(bytes, [9; BLOCK as usize], "seed {seed}: block {block}");
        }
    }
}

#[test]
fn a_replica_is_found_again_as_it_was_closed_and_a_second_process_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("r");
    let replica = Replica::create(&path, VolumeId(1), Bytes(64 << 20)).expect("creates");
    assert!(matches!(replica.write(0, &[1; 512]), Err(VolumeError::Frozen)), "it is nobody's yet");
    replica.become_primary(Lineage(0), Generation(1)).expect("is ours");
    replica.write(5000, &[1; 5000]).expect("writes");
    assert!(matches!(Replica::open(&path), Err(VolumeError::Locked(_))));
    let runs = replica.stamp_runs().expect("reads");
    assert_eq!(runs.iter().flat_map(|(r, _)| r.clone()).collect::<Vec<_>>(), [1, 2]);
    replica.close().expect("closes");
    let (replica, opened) = Replica::open(&path).expect("opens");
    assert_eq!(opened, Opened { clean: true, doubted: 0 });
    assert_eq!(replica.stamp_runs().expect("reads"), runs);
    let mut bytes = [0; 5000];
    replica.read(5000, &mut bytes).expect("reads");
    assert_eq!(bytes, [1; 5000]);
    // Not closed: what was hot is doubted, and no more.
    replica.become_primary(Lineage(0), Generation(1)).expect("is ours");
    replica.write(32 << 20, &[1; 512]).expect("writes");
    drop(replica);
    let (_, opened) = Replica::open(&path).expect("opens");
    assert_eq!(opened, Opened { clean: false, doubted: REGION });
}

#[test]
fn what_was_closed_under_those_who_hold_it_takes_nothing_more_and_a_loss_of_power_doubts_nothing_of_it() {
    for (seed, primary) in (0..10).flat_map(|seed| [(seed, true), (seed, false)]) {
        let mut rng = SmallRng::seed_from_u64(seed);
        let mut host = Host::new(primary);
        let replica = host.boot();
        let stamp = Stamp { lineage: Lineage(0), generation: Generation(1), epoch: Epoch(7) };
        for block in [3, 900, 1500] {
            if primary {
                replica.write(block * BLOCK, &[9; BLOCK as usize]).expect("writes");
            } else {
                replica.apply(block, stamp, Contents::Data(&[9; BLOCK as usize])).expect("applies");
            }
        }
        let before = copy(&replica);
        replica.end().expect("closes");
        // Whoever was late, and whoever believes that the volume changes hands.
        replica.thaw();
        assert!(matches!(replica.write(0, &[1; BLOCK as usize]), Err(VolumeError::Frozen)), "a guest's write waits");
        assert!(matches!(replica.zero(3 * BLOCK, BLOCK), Err(VolumeError::Frozen)));
        assert!(replica.apply(3, stamp, Contents::Zeroes(1)).is_err() && replica.forget(3..4).is_err());
        assert!(matches!(replica.become_primary(Lineage(0), Generation(2)), Err(VolumeError::Frozen)));
        replica.settle().expect("nothing is idle");
        replica.end().expect("is closed");
        assert!(replica.apply(3, stamp, Contents::Zeroes(1)).is_err() && replica.forget(3..4).is_err());
        assert!(copy(&replica) == before, "seed {seed}");
        drop(replica);
        host.lose_power(&mut rng);
        assert!(copy(&host.boot()) == before, "seed {seed}");
    }
}

#[test]
fn of_writes_that_come_while_it_is_closed_each_is_there_or_was_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("r");
    let replica = volume_of(4, &path);
    let begun = std::sync::Barrier::new(5);
    let at = |writer: u64| writer * REGION * BLOCK;
    let made: Vec<u64> = std::thread::scope(|scope| {
        let writers: Vec<_> = (0..4)
            .map(|writer| {
                let (replica, begun) = (&replica, &begun);
                scope.spawn(move || {
                    begun.wait();
                    let mut made = 0_u64;
                    loop {
                        match replica.write(at(writer), &(made + 1).to_le_bytes()) {
                            Ok(_) => made += 1,
                            Err(VolumeError::Frozen) => return made,
                            Err(error) => panic!("{error}"),
                        }
                        // The lock is not fair, and whoever closes wants it as well.
                        std::thread::yield_now();
                    }
                })
            })
            .collect();
        begun.wait();
        std::thread::sleep(Duration::from_millis(20));
        replica.end().expect("closes");
        writers.into_iter().map(|writer| writer.join().expect("writes")).collect()
    });
    let stamps = replica.stamp_runs().expect("reads");
    drop(replica);
    let (replica, opened) = Replica::open(&path).expect("opens");
    assert_eq!(opened, Opened { clean: true, doubted: 0 });
    assert_eq!(replica.stamp_runs().expect("reads"), stamps);
    for (writer, made) in (0..).zip(made) {
        let mut found = [0; 8];
        replica.read(at(writer), &mut found).expect("reads");
        assert_eq!(u64::from_le_bytes(found), made, "writer {writer}");
    }
}

#[test]
fn what_cannot_be_closed_is_found_as_a_crash_leaves_it() {
    let mut host = Host::new(true);
    let replica = host.boot();
    replica.write(0, &[1; BLOCK as usize]).expect("writes");
    let stamp = replica.stamp(0).expect("reads");
    host.data.0.lock().expect("one thread").lost = true;
    assert!(replica.end().is_err());
    {
        let inner = replica.lock();
        assert!(!inner.meta.clean && !inner.regions.is_empty());
    }
    // For good: what goes on beside it must not come behind another try.
    replica.thaw();
    assert!(matches!(replica.become_primary(Lineage(0), Generation(2)), Err(VolumeError::Frozen)));
    assert!(matches!(replica.write(0, &[2; BLOCK as usize]), Err(VolumeError::Frozen)));
    assert!(replica.end().is_err(), "a sync has failed");
    drop(replica);
    assert_ne!(host.boot().stamp(0).expect("reads"), stamp, "it may be another than was known by that stamp");
}

#[test]
fn what_was_ended_is_not_repaired_either() {
    let (right, rotten) = ([9; BLOCK as usize], [8; BLOCK as usize]);
    let stamp = Stamp { lineage: Lineage(0), generation: Generation(1), epoch: Epoch(7) };
    for ended in [false, true] {
        let mut host = Host::new(false);
        let replica = host.boot();
        replica.apply(3, stamp, Contents::Data(&right)).expect("applies");
        host.data.put(3 * BLOCK, &rotten);
        if ended {
            replica.end().expect("closes");
        }
        let digest = |contents: &[u8]| crate::scrub::digest(VolumeId(1), contents);
        let mend = Mend { block: 3, stamp, was: Some(digest(&rotten)), contents: &right, digest: digest(&right) };
        assert_eq!(replica.mend(VolumeId(1), &mend).is_err(), ended);
        let mut found = [0; BLOCK as usize];
        replica.read(3 * BLOCK, &mut found).expect("reads");
        assert_eq!(found, if ended { rotten } else { right });
    }
}

#[test]
fn a_write_that_ended_in_a_bug_is_doubted_though_its_replica_was_to_be_closed() {
    let mut host = Host::new(true);
    let replica = host.boot();
    replica.write(0, &[1; BLOCK as usize]).expect("writes");
    let stamp = replica.stamp(0).expect("reads");
    let half = || replica.write_by(0, BLOCK, || panic!("in the middle of it"));
    assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(half)).is_err());
    assert!(replica.end().is_err());
    {
        let inner = replica.lock();
        assert!(!inner.meta.clean && !inner.regions.is_empty());
    }
    assert!(matches!(replica.write(0, &[2; BLOCK as usize]), Err(VolumeError::Frozen)));
    drop(replica);
    assert_ne!(host.boot().stamp(0).expect("reads"), stamp, "it may be another than was known by that stamp");
}

#[test]
fn what_rests_is_closed_without_a_wait_for_its_data() {
    let mut host = Host::new(true);
    let replica = host.boot();
    replica.write(0, &[1; BLOCK as usize]).expect("writes");
    replica.commit().expect("settles");
    // The next sync of either would fail.
    [&host.data, &host.stamps].into_iter().for_each(|medium| medium.0.lock().expect("one thread").lost = true);
    replica.end().expect("closes");
    assert!(replica.lock().meta.clean);
}

/// A whole volume of so many regions, on real files.
fn volume_of(regions: u64, folder: &Path) -> Replica {
    let replica = Replica::create(folder, VolumeId(1), Bytes(regions * REGION * BLOCK)).expect("creates");
    replica.become_primary(Lineage(0), Generation(1)).expect("is ours");
    replica
}

#[test]
fn a_region_stays_hot_until_nobody_has_written_to_it_for_as_long_as_was_asked() {
    let folder = tempfile::tempdir().expect("a folder");
    let replica = volume_of(8, &folder.path().join("r"));
    let hot = || replica.lock().regions.iter().map(|(region, _)| region).collect::<Vec<_>>();
    replica.write(0, &[1; 512]).expect("writes");
    for _ in 0..3 {
        replica.settle_after(3).expect("settles");
        assert_eq!(hot(), [0]);
    }
    replica.write(0, &[2; 512]).expect("writes");
    for _ in 0..3 {
        replica.settle_after(3).expect("settles");
        assert_eq!(hot(), [0], "it was written again");
    }
    replica.settle_after(3).expect("settles");
    assert_eq!(hot(), [0; 0]);
}

#[test]
fn a_secondary_is_settled_with_each_call_after_its_writes() {
    let folder = tempfile::tempdir().expect("a folder");
    let replica = Replica::create(&folder.path().join("r"), VolumeId(1), Bytes(REGION * BLOCK)).expect("creates");
    let stamp = Stamp { lineage: Lineage(0), generation: Generation(1), epoch: Epoch(7) };
    replica.apply(0, stamp, Contents::Data(&[9; BLOCK as usize])).expect("applies");
    replica.settle_after(LINGERING).expect("settles");
    replica.settle_after(LINGERING).expect("settles");
    assert!(replica.lock().regions.is_empty());
}

#[test]
fn no_more_regions_linger_than_a_crash_may_make_travel_and_those_idle_for_longest_go_first() {
    let folder = tempfile::tempdir().expect("a folder");
    let many = MOST_LINGERING as u64 + 100;
    let replica = volume_of(many, &folder.path().join("r"));
    let write = |regions: Range<u64>| {
        for region in regions {
            replica.write(region * REGION * BLOCK, &[1; 512]).expect("writes");
        }
    };
    // The later ones first, so that order among equals does not help.
    write(200..many);
    replica.settle_after(LINGERING).expect("settles");
    write(0..200);
    replica.settle_after(LINGERING).expect("settles");
    let hot = replica.lock().regions.iter().map(|(region, _)| region).collect::<BTreeSet<_>>();
    assert_eq!(hot.len() as u64, many, "what was written since the last settling does not linger");
    replica.settle_after(LINGERING).expect("settles");
    let hot = replica.lock().regions.iter().map(|(region, _)| region).collect::<BTreeSet<_>>();
    assert_eq!(hot.len(), MOST_LINGERING);
    assert!((0..200).all(|r| hot.contains(&r)), "these were written last");
}

/// A medium that counts how often it is read and synced.
#[derive(Debug)]
struct Counting {
    medium: Volatile,
    counts: Arc<Counts>,
    knows_holes: bool,
}

#[derive(Debug, Default)]
struct Counts {
    reads: AtomicU64,
    syncs: AtomicU64,
    written: AtomicU64,
}

impl Medium for Counting {
    fn read(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        self.counts.reads.fetch_add(1, Ordering::Relaxed);
        self.medium.read(at, into)
    }

    fn write(&self, at: u64, from: &[u8]) -> io::Result<()> {
        self.counts.written.fetch_add(from.len() as u64, Ordering::Relaxed);
        self.medium.write(at, from)
    }

    fn punch(&self, at: u64, length: u64) -> io::Result<()> {
        self.medium.punch(at, length)
    }

    fn sync(&self) -> io::Result<()> {
        self.counts.syncs.fetch_add(1, Ordering::Relaxed);
        self.medium.sync()
    }

    fn extents(&self, at: u64, length: u64) -> io::Result<Vec<(u64, bool)>> {
        self.medium.extents(at, length)
    }

    fn knows_holes(&self) -> bool {
        self.knows_holes
    }

    fn allocated(&self) -> u64 {
        0
    }
}

#[test]
fn what_is_written_and_read_while_the_guest_stands_still_does_not_grow_with_what_follows_it() {
    /// Blocks, and bytes of the table, of a region; and the regions of which a guest may have to wait at the last word.
    const EACH: u64 = 2;
    const TABLE: u64 = EACH * 8;
    const MOST: u64 = 256;
    for regions in [300, 3000, 30_000] {
        let meta = Meta { clean: true, ..Meta::fresh(VolumeId(1), Bytes(regions * EACH * BLOCK)).expect("a size") };
        let counts = Arc::new(Counts::default());
        let media = Media {
            data: Box::new(Volatile::new(BLOCK)),
            stamps: Box::new(Volatile::new(regions * TABLE)),
            hot: Box::new(Volatile::new(regions)),
            words: Box::new(Counting {
                medium: Volatile::new(regions * TABLE),
                counts: counts.clone(),
                knows_holes: true,
            }),
            power: String::new(),
            description: Box::new(Nowhere),
            region: EACH,
        };
        let (replica, _) = Replica::assemble(Path::new("test"), meta, media, None, Guards::ALL).expect("opens");
        let holders = [crate::shadow::Holder("from".into())];
        replica.begin_wants().expect("begins");
        for region in 0..regions {
            let stamp = Stamp { lineage: Lineage(0), generation: Generation(1), epoch: Epoch(1) };
            replica.want(region * EACH..(region + 1) * EACH, stamp, &holders).expect("is told");
            replica.save_wants().expect("saves");
        }
        let told = counts.written.swap(0, Ordering::Relaxed);
        assert!(told >= (regions - MOST) * TABLE, "{told} bytes of {regions} regions were brought to the disk before");
        counts.reads.store(0, Ordering::Relaxed);
        replica.finish_wants(Lineage(0)).expect("knows everything");
        let (written, read) = (counts.written.load(Ordering::Relaxed), counts.reads.load(Ordering::Relaxed));
        assert!((1..=MOST * TABLE).contains(&written) && read == 0, "{regions} regions: {written} bytes, {read} reads");
        replica.become_primary(Lineage(0), Generation(2)).expect("takes over");
        assert_eq!(replica.absent(), Bytes(regions * EACH * BLOCK));
    }
}

#[test]
fn a_guest_that_writes_here_and_there_waits_for_few_marks_and_for_none_when_it_comes_back_within_the_minute() {
    const REGIONS: u64 = MOST_LINGERING as u64;
    let meta = Meta {
        primary: true,
        owner: 1,
        owners: vec![(Lineage(0), Generation(1))],
        clean: true,
        ..Meta::fresh(VolumeId(1), Bytes(REGIONS * 2 * BLOCK)).expect("a size")
    };
    let counts = Arc::new(Counts::default());
    let media = Media {
        data: Box::new(Volatile::new(REGIONS * 2 * BLOCK)),
        stamps: Box::new(Volatile::new(REGIONS * 2 * 8)),
        hot: Box::new(Counting { medium: Volatile::new(REGIONS), counts: counts.clone(), knows_holes: true }),
        words: Box::new(Volatile::new(REGIONS * 2 * 8)),
        power: String::new(),
        description: Box::new(Nowhere),
        region: 2,
    };
    let (replica, _) = Replica::assemble(Path::new("test"), meta, media, None, Guards::ALL).expect("opens");
    replica.lock().frozen = false;
    let mut rng = SmallRng::seed_from_u64(1);
    let mut round = || {
        for _ in 0..2000 {
            replica.write(rng.random_range(0..REGIONS) * 2 * BLOCK, &[1; 512]).expect("writes");
        }
        counts.syncs.swap(0, Ordering::Relaxed)
    };
    // 1, 2, 4, ... 64 at once, and most of the 8 groups of 64 in parts.
    let first = round();
    assert!((8..=16).contains(&first), "{first} waits");
    for _ in 1..LINGERING {
        replica.settle_after(LINGERING).expect("settles");
    }
    assert_eq!(round(), 0);
}

#[test]
fn what_was_written_where_nobody_knows_holes_is_counted_once_and_kept_right_and_nobody_waits_for_a_write_to_hear_it() {
    const REGIONS: u64 = 3 * WINDOW;
    let meta = Meta {
        owners: vec![(Lineage(0), Generation(1))],
        ..Meta::fresh(VolumeId(1), Bytes(REGIONS * 2 * BLOCK)).expect("a size")
    };
    let (data, stamps) = (Volatile::new(REGIONS * 2 * BLOCK), Volatile::new(REGIONS * 2 * 8));
    let (hot, counts) = (Volatile::new(REGIONS), Arc::new(Counts::default()));
    let plain = |medium: &Volatile, counts: &Arc<Counts>| {
        Box::new(Counting { medium: medium.clone(), counts: counts.clone(), knows_holes: false })
    };
    let open = || {
        let media = Media {
            data: plain(&data, &Arc::default()),
            stamps: plain(&stamps, &counts),
            hot: Box::new(hot.clone()),
            words: Box::new(Volatile::new(REGIONS * 2 * 8)),
            power: String::new(),
            description: Box::new(Nowhere),
            region: 2,
        };
        Replica::assemble(Path::new("test"), meta.clone(), media, None, Guards::ALL).expect("opens").0
    };
    let stamp = Stamp { lineage: Lineage(0), generation: Generation(1), epoch: Epoch(7) };
    let apply = |replica: &Replica, blocks: Range<u64>| {
        let bytes = vec![9; ((blocks.end - blocks.start) * BLOCK) as usize];
        replica.apply(blocks.start, stamp, Contents::Data(&bytes)).expect("applies");
    };
    let takes = |replica: &Replica, blocks: u64| assert_eq!(replica.allocated(), Bytes(blocks * BLOCK));
    let last = REGIONS * 2 - 1;
    let replica = open();
    [1, 3, WINDOW * 2, last].into_iter().for_each(|block| apply(&replica, block..block + 1));
    takes(&replica, 4);
    replica.commit().expect("settles");
    drop(replica);

    let replica = open();
    counts.reads.store(0, Ordering::Relaxed);
    takes(&replica, 4);
    assert_eq!(counts.reads.swap(0, Ordering::Relaxed), REGIONS, "it knows no holes");
    takes(&replica, 4);
    assert_eq!((counts.reads.load(Ordering::Relaxed), replica.lock().stamps.in_memory()), (0, 0));
    // 0 to 3, of which two were written.
    apply(&replica, 0..4);
    takes(&replica, 6);
    replica.forget(1..3).expect("zeroes");
    replica.forget(4..9).expect("was never written");
    takes(&replica, 4);
    replica.become_primary(Lineage(0), Generation(1)).expect("is ours");
    replica.write(3 * BLOCK, &vec![1; 2 * BLOCK as usize]).expect("writes");
    takes(&replica, 5);
    {
        let _a_write = replica.lock();
        takes(&replica, 5);
    }
    replica.commit().expect("settles");
    drop(replica);

    // Between two windows.
    let replica = open();
    assert_eq!(replica.lock().stamps.count_on(WINDOW).expect("reads"), None);
    apply(&replica, 7..8);
    apply(&replica, last - 1..last);
    takes(&replica, 7);
}

#[test]
fn a_sparse_volume_of_4_tib_costs_what_was_written() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut figures = vec![];
    for (name, size) in [("small", 1_u64 << 30), ("large", 4 << 40)] {
        let replica = Replica::create(&folder.path().join(name), VolumeId(1), Bytes(size)).expect("creates");
        replica.become_primary(Lineage(0), Generation(1)).expect("is ours");
        for i in 0..64 {
            replica.write((i * (size / 64)) & !0xfff, &[7; 4096]).expect("writes");
        }
        replica.commit().expect("settles");
        assert_eq!(replica.stamp_runs().expect("reads").len(), 64);
        figures.push((replica.allocated(), replica.lock().stamps.in_memory()));
    }
    assert_eq!(figures[0], figures[1]);
}

/// A description that can be written so many times more before its disk is full, and how often it was.
#[derive(Clone, Debug)]
struct Written(Arc<Mutex<(Vec<u8>, u32, u32)>>);

impl Description for Written {
    fn load(&self) -> io::Result<Vec<u8>> {
        Ok(self.0.lock().expect("one thread").0.clone())
    }

    fn store(&self, bytes: &[u8]) -> io::Result<()> {
        let (stored, times, room) = &mut *self.0.lock().expect("one thread");
        *room = room.checked_sub(1).ok_or(io::ErrorKind::StorageFull)?;
        (*stored, *times) = (bytes.to_vec(), *times + 1);
        Ok(())
    }
}

#[test]
fn an_epoch_that_cannot_be_set_aside_does_not_begin() {
    let description = Written(Arc::new(Mutex::new((vec![], 0, u32::MAX))));
    Replica::format(&description, VolumeId(1), Bytes(BLOCKS * BLOCK)).expect("formats");
    let media = || Media {
        data: Box::new(Volatile::new(BLOCKS * BLOCK)),
        stamps: Box::new(Volatile::new(BLOCKS * 8)),
        hot: Box::new(Volatile::new(BLOCKS)),
        words: Box::new(Volatile::new(BLOCKS * 8)),
        power: String::new(),
        description: Box::new(description.clone()),
        region: 2,
    };
    let open = || {
        let (replica, _) = Replica::open_on(Path::new("test"), media()).expect("opens");
        replica.become_primary(Lineage(0), Generation(1)).expect("is ours");
        replica
    };
    let times = || description.0.lock().expect("one thread").1;
    let room = |room: u32| description.0.lock().expect("one thread").2 = room;
    let write = |replica: &Replica| {
        replica.write(0, &[1; BLOCK as usize]).expect("writes");
        replica.stamp(0).expect("reads").expect("was written")
    };
    let replica = open();
    let before = times();
    let mut last = replica.end_epoch().expect("ends");
    for _ in 1..2 * EPOCHS_AHEAD {
        let ended = replica.end_epoch().expect("ends");
        assert!(ended > last, "{ended:?} after {last:?}");
        last = ended;
    }
    assert_eq!(times() - before, 2, "the description is written once in {EPOCHS_AHEAD} epochs");
    room(0);
    // The epoch goes on, and so do its writes; as soon as there is room it ends.
    for _ in 0..2 {
        assert!(replica.end_epoch().is_err() && replica.roll().is_err());
        write(&replica);
    }
    room(u32::MAX);
    let going_on = replica.stamp(0).expect("reads").expect("was written");
    assert!(going_on > last);
    assert_eq!(replica.end_epoch().expect("ends"), going_on);
    // A process that dies has taken them with it.
    drop(replica);
    let replica = open();
    let later = write(&replica);
    assert!(later.epoch.0 > going_on.epoch.0 + EPOCHS_AHEAD - 1, "{later:?} after {going_on:?}");
    // What a process has given while nothing could be written down, the next one does not give.
    room(0);
    for _ in 0..4 {
        assert!(replica.end_epoch().is_err() && replica.runs_to_compare().is_err());
    }
    room(1);
    // The first of its two epochs can be written down.
    assert!(replica.runs_to_compare().is_err());
    let last = write(&replica);
    assert_eq!(last.epoch.0, later.epoch.0 + 1);
    drop(replica);
    room(u32::MAX);
    let next = write(&open());
    assert!(next > last, "{next:?} after {last:?}");
}

#[test]
fn what_was_stored_in_part_has_not_the_stamp_of_what_was_there_before() {
    let mut primary = Host::new(true);
    let replica = primary.boot();
    replica.write(0, &vec![1; 4 * BLOCK as usize]).expect("writes");
    let before = replica.stamp(1).expect("reads").expect("was written");
    replica.end_epoch().expect("ends");
    primary.data.0.lock().expect("one thread").full = true;
    let failed = replica.write(0, &vec![2; 2 * BLOCK as usize]);
    assert!(matches!(failed, Err(VolumeError::Io { .. })), "{failed:?}");
    for block in 0..2 {
        assert!(
            replica.stamp(block).expect("reads").expect("was written") > before,
            "block {block} may be another now"
        );
    }
    assert_eq!(replica.stamp(2).expect("reads"), Some(before));

    // Another's block that could be stored in part only is as one that never came.
    let mut secondary = Host::new(false);
    let other = secondary.boot();
    let data = vec![1; BLOCK as usize];
    other.apply(0, before, Contents::Data(&data)).expect("applies");
    secondary.data.0.lock().expect("one thread").full = true;
    let stamp = Stamp { epoch: Epoch(before.epoch.0 + 1), ..before };
    assert!(other.apply(0, stamp, Contents::Data(&[2; BLOCK as usize])).is_err());
    let mut found = vec![3; BLOCK as usize];
    other.read(0, &mut found).expect("reads");
    assert!(other.stamp(0).expect("reads").is_none() && is_zero(&found));
}

#[test]
fn what_could_not_be_zeroed_does_not_pass_for_what_was_never_written() {
    let mut host = Host::new(false);
    let replica = host.boot();
    let stamp = Stamp { lineage: Lineage(0), generation: Generation(1), epoch: Epoch(7) };
    replica.apply(0, stamp, Contents::Data(&[9; 4 * BLOCK as usize])).expect("applies");
    let worn = |worn: bool| host.data.0.lock().expect("one thread").worn = worn;
    worn(true);
    assert!(replica.forget(0..6).is_err());
    let nobodys = Stamp { epoch: Epoch(0), ..stamp };
    let stamps = |replica: &Replica| (0..6).map(|b| replica.stamp(b).expect("reads")).collect::<Vec<_>>();
    let found = [Some(nobodys), Some(nobodys), Some(nobodys), Some(nobodys), None, None];
    assert_eq!(stamps(&replica), found, "a source that never wrote them, or has what was here, would find them alike");
    // Also when the region is cold, and the process another.
    replica.commit().expect("settles");
    drop(replica);
    worn(false);
    let replica = host.boot();
    assert_eq!(stamps(&replica), found);
    // It comes again.
    replica.forget(0..6).expect("zeroes");
    assert_eq!(stamps(&replica), [None; 6]);
    let mut bytes = vec![1; 6 * BLOCK as usize];
    replica.read(0, &mut bytes).expect("reads");
    assert!(is_zero(&bytes));

    // Blocks that are stored in part, and cannot be zeroed after that.
    host.data.0.lock().expect("one thread").full = true;
    host.data.0.lock().expect("one thread").worn = true;
    assert!(replica.apply(2, stamp, Contents::Data(&[8; 2 * BLOCK as usize])).is_err());
    assert_eq!(stamps(&replica), [None, None, Some(nobodys), Some(nobodys), None, None]);
}

#[test]
fn a_secondary_that_cannot_zero_what_it_doubts_is_not_opened_and_doubts_it_still_when_it_can() {
    let mut host = Host::new(false);
    let replica = host.boot();
    let stamp = Stamp { lineage: Lineage(0), generation: Generation(1), epoch: Epoch(7) };
    replica.apply(0, stamp, Contents::Data(&[9; 2 * BLOCK as usize])).expect("applies");
    host.data.0.lock().expect("one thread").worn = true;
    assert!(replica.forget(0..1).is_err());
    drop(replica);
    assert!(host.try_boot().is_err());
    host.data.0.lock().expect("one thread").worn = false;
    let replica = host.boot();
    let mut bytes = vec![1; 2 * BLOCK as usize];
    replica.read(0, &mut bytes).expect("reads");
    assert!(is_zero(&bytes));
    assert_eq!([0, 1].map(|block| replica.stamp(block).expect("reads")), [None; 2]);
}

#[test]
fn after_a_sync_that_failed_nothing_counts_as_durable_until_all_that_is_hot_was_doubted() {
    let mut host = Host::new(true);
    let replica = host.boot();
    replica.write(0, &[1; BLOCK as usize]).expect("writes");
    let stamp = replica.stamp(0).expect("reads");
    host.data.0.lock().expect("one thread").lost = true;
    // Whoever syncs by the way is the only one whom the system tells.
    replica.settle().expect("nothing is idle");
    assert!(replica.settle().is_err());
    assert!(replica.flush().is_err(), "the guest was told that what is lost is durable");
    assert!(replica.settle().is_err() && replica.commit().is_err());
    assert!(!replica.lock().regions.is_empty(), "what is not doubted is believed");
    drop(replica);
    let replica = host.boot();
    replica.flush().expect("the disk is well again");
    assert_ne!(replica.stamp(0).expect("reads"), stamp, "it may be another than was known by that stamp");
}

#[test]
fn a_primary_forgets_nothing_that_somebody_tells_it_to() {
    let mut host = Host::new(true);
    let replica = host.boot();
    replica.write(0, &[1; BLOCK as usize]).expect("writes");
    assert!(matches!(replica.forget(0..1), Err(VolumeError::Frozen)));
    let mut bytes = [0; BLOCK as usize];
    replica.read(0, &mut bytes).expect("reads");
    assert_eq!(bytes, [1; BLOCK as usize]);
}

#[test]
fn what_a_removal_that_broke_off_has_left_of_a_replica_is_not_believed() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path().join("1");
    let make = || Replica::create(&place, VolumeId(1), Bytes(BLOCKS * BLOCK)).unwrap();
    let written = |replica: &Replica| {
        replica.become_primary(Lineage(1), Generation(1)).unwrap();
        replica.write(0, &[7; BLOCK as usize]).unwrap();
        replica.commit().unwrap();
    };
    written(&make());
    // Its blocks went first.
    std::fs::remove_file(place.join("data")).unwrap();
    let error = Replica::open(&place).unwrap_err();
    assert!(matches!(&error, VolumeError::Damaged { .. }) && error.to_string().contains("it is missing"), "{error}");
    assert!(!place.join("data").exists(), "it is not made anew");
    // Its description went first, and a new one comes in its place.
    std::fs::remove_file(place.join("meta")).unwrap();
    written(&make());
    std::fs::remove_file(place.join("meta")).unwrap();
    let replica = make();
    assert_eq!(replica.stamp_runs().unwrap(), []);
    replica.become_primary(Lineage(1), Generation(1)).unwrap();
    assert_eq!(replica.stamp_runs().unwrap(), [], "its owner has the same number as the one before");
    let mut read = vec![1; BLOCK as usize];
    replica.read(0, &mut read).unwrap();
    assert!(read.iter().all(|byte| *byte == 0));
}

#[test]
fn a_file_that_was_cut_short_is_an_error_and_no_zeroes_whether_the_replica_is_open_or_not() {
    let folder = tempfile::tempdir().expect("a folder");
    let replica = Replica::create(folder.path(), VolumeId(1), Bytes(BLOCKS * BLOCK)).expect("creates");
    replica.become_primary(Lineage::FIRST, Generation(1)).expect("is ours");
    replica.write(0, &[7; 3 * BLOCK as usize]).expect("writes");
    replica.commit().expect("settles");
    let data = folder.path().join("data");
    let cut = |length| std::fs::File::options().write(true).open(&data).expect("opens").set_len(length).expect("cuts");
    cut(BLOCK);
    let mut blocks = [9; 2 * BLOCK as usize];
    let read = replica.read(0, &mut blocks);
    assert!(read.as_ref().is_err_and(|error| error.to_string().contains("cut it short")), "{read:?}");
    replica.read(0, &mut blocks[..BLOCK as usize]).expect("is there");
    drop(replica);
    let opened = Replica::open(folder.path());
    assert!(matches!(&opened, Err(VolumeError::Damaged { path, .. }) if *path == data), "{opened:?}");
    // One that was never written to, and whose length did not survive a loss of power, is in order.
    let fresh = tempfile::tempdir().expect("a folder");
    drop(Replica::create(fresh.path(), VolumeId(1), Bytes(BLOCKS * BLOCK)).expect("creates"));
    std::fs::write(fresh.path().join("data"), b"").expect("cuts");
    let (replica, _) = Replica::open(fresh.path()).expect("opens");
    replica.read(0, &mut blocks).expect("reads");
    assert!(is_zero(&blocks));
}
