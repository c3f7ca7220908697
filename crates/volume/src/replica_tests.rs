use super::*;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
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
}

impl Volatile {
    fn new(size: u64) -> Self {
        Self(Arc::new(Mutex::new(State {
            durable: vec![0; size as usize],
            current: vec![0; size as usize],
            pending: vec![],
        })))
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
        let mut state = self.0.lock().expect("one thread");
        state.pending.push((at, from.to_vec()));
        state.current[at as usize..][..from.len()].copy_from_slice(from);
        Ok(())
    }

    fn punch(&self, at: u64, length: u64) -> io::Result<()> {
        self.write(at, &vec![0; length as usize])
    }

    fn sync(&self) -> io::Result<()> {
        let state = &mut *self.0.lock().expect("one thread");
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
        let (replica, _) = Replica::assemble(Path::new("test"), meta, media, None, Guards::ALL).expect("opens");
        self.epoch += 1;
        replica.lock().frozen = false;
        replica
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
                    0 => replica.settle().expect("settles"),
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
