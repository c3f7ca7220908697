use super::*;
use crate::file::{Media, SlottedFile};
use crate::replica::Contents;
use godwit_units::{Bytes, Generation, Lineage};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex};
use tempfile::TempDir;

const BLOCKS: u64 = 3 * EXTENT + 17;
const VOLUME: VolumeId = VolumeId(7);

/// A primary and its secondaries, and what was written.
struct World {
    folder: TempDir,
    holders: Vec<Replica>,
    truth: BTreeMap<u64, Vec<u8>>,
}

fn block_of(rng: &mut SmallRng) -> Vec<u8> {
    if rng.random_bool(0.1) { vec![0; BLOCK as usize] } else { vec![rng.random_range(1..=255); BLOCK as usize] }
}

impl World {
    fn new(holders: usize) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let make =
            |i: usize| Replica::create(&folder.path().join(i.to_string()), VOLUME, Bytes(BLOCKS * BLOCK)).unwrap();
        let holders: Vec<Replica> = (0..holders).map(make).collect();
        holders[0].become_primary(Lineage::FIRST, Generation::FIRST).unwrap();
        Self { folder, holders, truth: BTreeMap::new() }
    }

    fn write(&mut self, block: u64, contents: Vec<u8>) {
        self.holders[0].write(block * BLOCK, &contents).unwrap();
        self.truth.insert(block, contents);
    }

    /// Brings what the primary has to another holder, as a pre-cache does: of epochs that have ended.
    fn bring(&self, holder: usize, block: u64) {
        let Some(stamp) = self.holders[0].settled_stamp(block).unwrap() else { return };
        self.holders[holder].apply(block, stamp, Contents::Data(&self.truth[&block])).unwrap();
    }

    fn bring_all(&self) {
        self.holders[0].end_epoch().unwrap();
        for holder in 1..self.holders.len() {
            self.truth.keys().for_each(|block| self.bring(holder, *block));
        }
    }

    fn rot(&self, holder: usize, block: u64) {
        let file =
            std::fs::OpenOptions::new().write(true).read(true).open(self.folder.path().join(format!("{holder}/data")));
        let file = file.unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, block * BLOCK + 99).unwrap();
        file.write_all_at(&[byte[0] ^ (1 << holder)], block * BLOCK + 99).unwrap();
    }

    fn contents(&self, holder: usize, block: u64) -> Vec<u8> {
        let mut read = vec![0; BLOCK as usize];
        self.holders[holder].read(block * BLOCK, &mut read).unwrap();
        read
    }

    fn record(&self) -> Attested {
        Attested::open(&self.folder.path().join("0"), VOLUME).unwrap()
    }

    fn answer(&self, holder: usize, ask: &Ask) -> Answer {
        let look = |extent: &u64| self.holders[holder].look_at(VOLUME, *extent).unwrap();
        match ask {
            Ask::Extents(extents) if holder == 0 => Answer::Here(extents.iter().map(look).collect()),
            Ask::Extents(extents) => {
                Answer::Extents(extents.iter().map(|extent| ExtentDigest::of(&look(extent).blocks)).collect())
            }
            Ask::Blocks(extent) => Answer::Blocks(look(extent).blocks),
        }
    }

    /// A whole scrub; `meanwhile` is called between any two answers.
    fn scrub(&mut self, mut meanwhile: impl FnMut(&mut Self)) -> (Vec<Finding>, Totals) {
        let extents = self.holders[0].written_extents(0, usize::MAX).unwrap();
        let mut machine = Scrub::new(extents, self.holders.len());
        let record = self.record();
        while let Some(ask) = machine.poll() {
            for holder in 0..self.holders.len() {
                let answer = self.answer(holder, &ask);
                machine.answered(holder, answer, &|block, stamp| record.get(block, stamp));
                meanwhile(self);
            }
            record.put(&machine.agreed()).unwrap();
        }
        (machine.findings(), machine.totals())
    }

    fn repair(&self, findings: &[Finding], believed: Option<Holder>) {
        for finding in findings {
            let Some(Repair { giver, digest: wanted, takers }) = finding.repair(believed) else { continue };
            let contents = self.holders[giver].read_attested(VOLUME, finding.block, finding.stamp, wanted).unwrap();
            for (taker, was) in takers {
                let mend =
                    Mend { block: finding.block, stamp: finding.stamp, was, contents: &contents, digest: wanted };
                assert!(self.holders[taker].mend(VOLUME, &mend).unwrap());
            }
        }
    }
}

/// Every seed: random writes, holders that lag, rot anywhere; before that, perhaps a scrub that records what all have.
#[test]
fn what_is_rotten_is_found_and_nothing_else_and_what_can_be_told_is_repaired() {
    let (mut told, mut untold) = (0, 0);
    for seed in 0..60 {
        let rng = &mut SmallRng::seed_from_u64(seed);
        let holders = rng.random_range(2..=4);
        let recorded = rng.random_bool(0.5);
        let mut world = World::new(holders);
        for _ in 0..rng.random_range(1..300) {
            let contents = block_of(rng);
            world.write(rng.random_range(0..BLOCKS), contents);
        }
        world.bring_all();
        if recorded {
            let (findings, totals) = world.scrub(|_| {});
            assert_eq!((findings, totals.alike), (vec![], world.truth.len() as u64), "seed {seed}");
        }
        // What is written later lags somewhere, and may be in an epoch that has not ended.
        let mut later = BTreeSet::new();
        for _ in 0..rng.random_range(0..60) {
            let block = rng.random_range(0..BLOCKS);
            let contents = block_of(rng);
            world.write(block, contents);
            later.insert(block);
        }
        if rng.random_bool(0.5) {
            world.holders[0].end_epoch().unwrap();
            for block in &later {
                if rng.random_bool(0.5) {
                    world.bring(rng.random_range(1..holders), *block);
                }
            }
        }
        // Of what lagged nobody speaks here: the rest rots at one holder, so that a majority is right.
        let old: Vec<u64> = world.truth.keys().filter(|b| !later.contains(b)).copied().collect();
        let mut rotten: BTreeMap<u64, usize> = BTreeMap::new();
        for block in &old {
            if rng.random_bool(0.1) {
                rotten.insert(*block, rng.random_range(0..holders));
            }
        }
        rotten.iter().for_each(|(block, holder)| world.rot(*holder, *block));

        let (findings, _) = world.scrub(|_| {});
        assert_eq!(
            findings.iter().map(|f| f.block).collect::<Vec<_>>(),
            rotten.keys().copied().collect::<Vec<_>>(),
            "seed {seed}"
        );
        for finding in &findings {
            let holder = rotten[&finding.block];
            if recorded || holders > 2 {
                told += 1;
                let settled = if recorded { Settled::Record } else { Settled::Majority };
                assert_eq!(finding.settled, settled, "seed {seed}");
                for (other, copy) in finding.copies.iter().enumerate() {
                    assert_eq!(matches!(copy, Held::Rotten(_)), other == holder, "seed {seed} {finding:?}");
                }
            } else {
                untold += 1;
                assert_eq!((finding.settled, finding.repair(None)), (Settled::Nothing, None), "seed {seed}");
                assert!(finding.copies.iter().all(|c| matches!(c, Held::Differs(_))), "seed {seed}");
            }
        }
        world.repair(&findings, Some(0));
        for (block, holder) in rotten.iter().filter(|(_, holder)| recorded || holders > 2 || **holder != 0) {
            assert_eq!(world.contents(*holder, *block), world.truth[block], "seed {seed} block {block}");
        }
        let (again, _) = world.scrub(|_| {});
        assert_eq!(again, vec![], "seed {seed}");
        assert!(old.iter().all(|b| world.contents(0, *b) == world.contents(1, *b)), "seed {seed}");
    }
    assert!(told > 100 && untold > 20, "{told} {untold}");
}

#[test]
fn a_guest_that_writes_during_a_scrub_makes_no_rot() {
    for seed in 0..30 {
        let mut rng = SmallRng::seed_from_u64(seed);
        let mut world = World::new(2);
        for block in 0..BLOCKS {
            let contents = block_of(&mut rng);
            world.write(block, contents);
        }
        world.bring_all();
        world.rot(1, 300);
        let (findings, totals) = world.scrub(|world| {
            for _ in 0..rng.random_range(0..40) {
                let block = rng.random_range(0..290);
                let contents = block_of(&mut rng);
                world.write(block, contents);
                match rng.random_range(0..10) {
                    0 => drop(world.holders[0].end_epoch().unwrap()),
                    1..=5 => world.bring(1, block),
                    _ => {}
                }
            }
        });
        assert_eq!(findings.iter().map(|f| f.block).collect::<Vec<_>>(), [300], "seed {seed}");
        assert!(totals.alike > 400, "{totals:?}");
    }
}

/// A disk with bad sectors, and with somebody who writes to the replica while it is being read for its digests.
#[derive(Debug)]
struct Hooked(Disk, Arc<Hook>);

/// What is done once, and the blocks that cannot be read.
#[derive(Default)]
pub(crate) struct Hook(Mutex<Option<Box<dyn FnOnce() + Send>>>, pub Mutex<Vec<u64>>);

impl std::fmt::Debug for Hook {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Hook")
    }
}

impl Medium for Hooked {
    fn read(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        let bad = |block: &u64| (at..at + into.len() as u64).contains(&(block * BLOCK));
        if self.1.1.lock().unwrap().iter().any(bad) {
            return Err(io::Error::other("a bad sector"));
        }
        self.0.read(at, into)
    }
    fn read_past_cache(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        self.read(at, into)?;
        if let Some(hook) = self.1.0.lock().unwrap().take() {
            hook();
        }
        Ok(())
    }
    fn write(&self, at: u64, from: &[u8]) -> io::Result<()> {
        // The drive gives it another sector.
        self.1.1.lock().unwrap().retain(|block| !(at..at + from.len() as u64).contains(&(block * BLOCK)));
        self.0.write(at, from)
    }
    fn punch(&self, at: u64, length: u64) -> io::Result<()> {
        self.0.punch(at, length)
    }
    fn sync(&self) -> io::Result<()> {
        self.0.sync()
    }
    fn extents(&self, at: u64, length: u64) -> io::Result<Vec<(u64, bool)>> {
        self.0.extents(at, length)
    }
    fn allocated(&self) -> u64 {
        self.0.allocated()
    }
}

/// Opens the replica of a folder on such a disk.
pub(crate) fn open_hooked(folder: &Path, size: Bytes) -> (Replica, Arc<Hook>) {
    let regions = (size.0 / BLOCK).div_ceil(REGION);
    let hook = Arc::new(Hook::default());
    let open = |name: &str, size: u64| Box::new(Disk::open(&folder.join(name), size).unwrap());
    let media = Media {
        data: Box::new(Hooked(Disk::open(&folder.join("data"), size.0).unwrap(), hook.clone())),
        stamps: open("stamps", regions * REGION * 8),
        hot: open("hot", regions),
        words: open("words", regions * REGION * 8),
        power: "one".into(),
        description: Box::new(SlottedFile::new(folder.join("meta"))),
        region: REGION,
    };
    (Replica::open_on(folder, media).unwrap().0, hook)
}

fn hooked(folder: &Path) -> (Arc<Replica>, Arc<Hook>) {
    let size = Bytes(EXTENT * BLOCK);
    Replica::create_beside(folder, VOLUME, size).unwrap();
    let (replica, hook) = open_hooked(folder, size);
    replica.become_primary(Lineage::FIRST, Generation::FIRST).unwrap();
    replica.write(0, &vec![1; 4 * BLOCK as usize]).unwrap();
    replica.end_epoch().unwrap();
    (Arc::new(replica), hook)
}

#[test]
fn a_block_that_is_written_while_it_is_read_is_left_out_and_looked_at_again() {
    let folder = tempfile::tempdir().unwrap();
    let (replica, hook) = hooked(&folder.path().join("0"));
    let writer = replica.clone();
    *hook.0.lock().unwrap() = Some(Box::new(move || {
        writer.write(2 * BLOCK, &[9; 100]).unwrap();
    }));
    let found = replica.digest_extent(VOLUME, 0).unwrap();
    assert_eq!(found.iter().map(|b| b.stamp.is_some()).collect::<Vec<_>>(), [true, true, false, true]);
    // Then it is of the epoch of now: equal stamps would prove nothing.
    assert_eq!(replica.digest_extent(VOLUME, 0).unwrap().iter().map(|b| b.block).collect::<Vec<_>>(), [0, 1, 3]);
}

#[test]
fn what_a_disk_cannot_read_is_repaired_from_who_can() {
    let folder = tempfile::tempdir().unwrap();
    let (replica, hook) = hooked(&folder.path().join("0"));
    hook.1.lock().unwrap().push(1);
    let found = replica.digest_extent(VOLUME, 0).unwrap();
    assert_eq!(found.iter().map(|b| b.contents.is_some()).collect::<Vec<_>>(), [true, false, true, true]);
    let right = vec![1; BLOCK as usize];
    let copies = [(0, None), (1, Some(digest(VOLUME, &right)))];
    assert_eq!(judge(&copies, None), (copies[1].1, Settled::Readable));
    let stamp = found[1].stamp.unwrap();
    let mend = Mend { block: 1, stamp, was: None, contents: &right, digest: digest(VOLUME, &right) };
    assert!(replica.mend(VOLUME, &mend).unwrap());
    assert!(!replica.mend(VOLUME, &mend).unwrap(), "twice");
    assert!(replica.digest_extent(VOLUME, 0).unwrap()[1].contents == mend.digest.into());
}

#[test]
fn a_block_that_was_written_since_it_was_judged_is_not_mended() {
    let mut world = World::new(2);
    world.write(5, vec![1; BLOCK as usize]);
    world.bring_all();
    world.rot(0, 5);
    let (findings, _) = world.scrub(|_| {});
    let Repair { digest: wanted, takers, .. } = findings[0].repair(Some(1)).unwrap();
    let old = world.truth[&5].clone();
    world.write(5, vec![2; BLOCK as usize]);
    let mend = Mend { block: 5, stamp: findings[0].stamp, was: takers[0].1, contents: &old, digest: wanted };
    assert!(world.holders[0].mend(VOLUME, &mend).is_err());
    assert_eq!(world.contents(0, 5), world.truth[&5]);
    // Nor with anything but what was judged to be right.
    world.bring_all();
    let other = Mend { contents: &[7; BLOCK as usize], ..mend };
    assert!(world.holders[1].mend(VOLUME, &other).is_err());
}

#[test]
fn rot_is_believed_when_two_looks_say_the_same() {
    let stamp = Stamp { lineage: Lineage::FIRST, generation: Generation::FIRST, epoch: godwit_units::Epoch(1) };
    let of = |byte: u8| BlockDigest { block: 3, stamp: Some(stamp), contents: Some(digest(VOLUME, &[byte])) };
    let run = |at_once: bool, second: u8| {
        let mut machine = Scrub::new(vec![0], 2);
        machine.believes_at_once = at_once;
        let mut looks = 0;
        while let Some(ask) = machine.poll() {
            let (here, there) = match ask {
                Ask::Extents(_) => {
                    let here = Looked { blocks: vec![of(1)], unproven: vec![] };
                    (Answer::Here(vec![here]), Answer::Extents(vec![ExtentDigest::of(&[of(2)])]))
                }
                Ask::Blocks(_) => {
                    looks += 1;
                    (Answer::Blocks(vec![of(1)]), Answer::Blocks(vec![of(if looks == 1 { 2 } else { second })]))
                }
            };
            machine.answered(0, here, &|_, _| None);
            machine.answered(1, there, &|_, _| None);
        }
        machine.findings().len()
    };
    assert_eq!((run(false, 1), run(false, 2)), (0, 1));
    assert_eq!(run(true, 1), 1, "without the rule one wrong read is rot");
}

#[test]
fn what_is_written_and_cannot_be_compared_is_counted_once() {
    let mut world = World::new(3);
    let all = EXTENT + 20;
    for block in 0..all {
        world.write(block, vec![1; BLOCK as usize]);
    }
    let totals = |alike, behind, unsettled| Totals { alike, behind, unsettled };
    assert_eq!(world.scrub(|_| {}), (vec![], totals(0, 0, all)), "of an epoch that has not ended");
    world.bring_all();
    assert_eq!(world.scrub(|_| {}), (vec![], totals(all, 0, 0)));
    // What one of the others still has of a block that was written since is no lag of the rest.
    world.write(3, vec![2; BLOCK as usize]);
    world.holders[2].forget(3..4).unwrap();
    assert_eq!(world.scrub(|_| {}), (vec![], totals(all - 1, 0, 1)));
    // Another one is promoted: it cannot say of any block that the same stamp means the same contents.
    world.holders.swap(0, 1);
    world.holders[0].become_primary(Lineage(Lineage::FIRST.0 + 1), Generation::FIRST).unwrap();
    assert_eq!(world.scrub(|_| {}), (vec![], totals(0, 0, all)));
}

#[test]
fn what_nobody_can_trust_here_is_not_compared() {
    let mut world = World::new(2);
    world.write(5, vec![1; BLOCK as usize]);
    world.bring_all();
    let stamp = world.holders[0].settled_stamp(5).unwrap().unwrap();
    let nobodys = Stamp { epoch: godwit_units::Epoch(0), ..stamp };
    world.holders[1].apply(5, nobodys, Contents::Data(&[9; BLOCK as usize])).unwrap();
    let of = &world.holders[1];
    assert_eq!((of.stamp(5).unwrap(), of.settled_stamp(5).unwrap()), (Some(nobodys), None));
    assert_eq!(world.scrub(|_| {}), (vec![], Totals { alike: 0, behind: 1, unsettled: 0 }));
}

#[test]
fn who_ends_in_the_middle_knows_what_is_done_and_what_is_left() {
    let mut world = World::new(2);
    for block in 0..3 * EXTENT {
        world.write(block, vec![1; BLOCK as usize]);
    }
    world.bring_all();
    world.rot(1, EXTENT + 5);
    let mut machine = Scrub::new(vec![0, 1, 2], 2);
    assert_eq!(machine.first_left(), Some(0));
    let mut left = vec![];
    while let Some(ask) = machine.poll() {
        for holder in 0..2 {
            machine.answered(holder, world.answer(holder, &ask), &|_, _| None);
        }
        left.push(machine.first_left());
        assert_eq!(machine.totals_before(1).alike, EXTENT);
    }
    // The second one is looked at twice.
    assert_eq!(left, [Some(1), Some(1), None]);
    assert_eq!((machine.totals_before(2).alike, machine.totals().alike), (2 * EXTENT - 1, 3 * EXTENT - 1));
}

#[test]
fn extents_that_are_written_are_found_from_any_place_on_and_no_more_of_the_table_is_read_than_that_needs() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("volume");
    let replica = Replica::create(&path, VOLUME, Bytes(4 << 30)).unwrap();
    replica.become_primary(Lineage::FIRST, Generation::FIRST).unwrap();
    // Windows of 1024 extents, wherever they begin.
    let written: Vec<u64> = (0..400).step_by(4).chain([1022, 1023, 1024, 2047, 4095]).collect();
    for extent in &written {
        replica.write(extent * EXTENT * BLOCK, &[1; 512]).unwrap();
    }
    // Across two extents, and the end of a window.
    replica.write(1535 * EXTENT * BLOCK, &vec![1; 2 * (EXTENT * BLOCK) as usize]).unwrap();
    let written: BTreeSet<u64> = written.into_iter().chain([1535, 1536]).collect();
    for from in [0, 1, 396, 397, 511, 512, 1023, 1024, 1535, 1536, 1537, 2048, 4095, 4096, u64::MAX] {
        for most in [0, 1, 2, 5, usize::MAX] {
            let expected: Vec<u64> = written.range(from..).copied().take(most).collect();
            assert_eq!(replica.written_extents(from, most).unwrap(), expected, "{most} from {from}");
        }
    }
    replica.close().unwrap();
    let (replica, _) = Replica::open(&path).unwrap();
    assert_eq!(replica.written_extents(3000, 1).unwrap(), [4095]);
    let in_memory = replica.lock().stamps.in_memory();
    assert!(in_memory < 50, "{in_memory} regions were read for one");
}

#[test]
fn a_holder_that_answers_what_cannot_be_is_left_out() {
    let mut machine = Scrub::new(vec![0, 1], 3);
    assert_eq!(machine.poll(), Some(Ask::Extents(vec![0, 1])));
    machine.answered(1, Answer::Extents(vec![]), &|_, _| None);
    machine.answered(2, Answer::Failed, &|_, _| None);
    assert!(machine.is_out(1) && machine.is_out(2));
    machine.answered(0, Answer::Here(vec![Looked::default(), Looked::default()]), &|_, _| None);
    assert_eq!(machine.poll(), None);
}

#[test]
fn a_record_that_nobody_matches_makes_nobody_right() {
    let (a, b) = (digest(VOLUME, &[1]), digest(VOLUME, &[2]));
    assert_eq!(judge(&[(0, Some(a)), (1, Some(a))], Some(b)), (None, Settled::Nothing));
    assert_eq!(judge(&[(0, Some(a)), (1, Some(b))], Some(b)), (Some(b), Settled::Record));
    assert_eq!(judge(&[(0, Some(a)), (1, Some(b)), (2, Some(b))], None), (Some(b), Settled::Majority));
    assert_eq!(judge(&[(0, Some(a)), (1, Some(b))], None), (None, Settled::Nothing));
    assert_eq!(judge(&[(0, Some(a)), (1, None)], None), (Some(a), Settled::Readable));
    assert_eq!(judge(&[(0, None), (1, None)], None), (None, Settled::Nothing));
}

#[test]
fn a_record_counts_for_its_stamp_only_and_not_when_it_has_rotted_itself() {
    let folder = tempfile::tempdir().unwrap();
    let record = Attested::open(folder.path(), VOLUME).unwrap();
    let stamp =
        |epoch| Stamp { lineage: Lineage::FIRST, generation: Generation::FIRST, epoch: godwit_units::Epoch(epoch) };
    let contents = digest(VOLUME, &[1]);
    let blocks: Vec<_> =
        [4, 5, 9].map(|block| BlockDigest { block, stamp: Some(stamp(1)), contents: Some(contents) }).into();
    record.put(&blocks).unwrap();
    for block in [4, 5, 9] {
        assert_eq!((record.get(block, stamp(1)), record.get(block, stamp(2))), (Some(contents), None));
    }
    assert_eq!(record.get(6, stamp(1)), None);
    let file = std::fs::OpenOptions::new().write(true).open(folder.path().join("attested")).unwrap();
    file.write_all_at(&[0xff], 5 * ENTRY + 12).unwrap();
    assert_eq!((record.get(4, stamp(1)), record.get(5, stamp(1))), (Some(contents), None));
}

#[test]
fn a_digest_is_itself_after_a_journey_as_text() {
    let one = digest(VOLUME, &[1]);
    let text = serde_json::to_string(&one).unwrap();
    assert_eq!(serde_json::from_str::<Digest>(&text).unwrap(), one);
    assert!(serde_json::from_str::<Digest>("\"zz\"").is_err());
    assert_ne!(digest(VolumeId(8), &[1]), one);
}
