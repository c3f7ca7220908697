use super::*;
use crate::replica::Replica;
use godwit_units::{Generation, Lineage, VolumeId};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

const SIZE: u64 = 16 << 20;

fn primary(folder: &std::path::Path) -> Replica {
    let replica = Replica::create(folder, VolumeId(1), Bytes(SIZE)).expect("creates");
    replica.become_primary(Lineage(0), Generation(1)).expect("is ours");
    replica
}

/// Two replicas, the link between them, and time.
struct World {
    rng: SmallRng,
    source: Replica,
    target: Replica,
    from: Source,
    to: Target,
    there: VecDeque<Vec<u8>>,
    back: VecDeque<Vec<u8>>,
    now: Duration,
    cut: bool,
    /// Guest's writes that wait: until which message, and since when.
    waiting: Vec<(Seq, Duration)>,
    longest: Duration,
}

impl World {
    fn new(source: Replica, target: Replica, seed: u64) -> Self {
        let (to, first) = Target::new(&target).expect("reads");
        Self {
            rng: SmallRng::seed_from_u64(seed),
            source,
            target,
            from: Source::new(),
            to,
            there: VecDeque::new(),
            back: first.into(),
            now: Duration::ZERO,
            cut: false,
            waiting: vec![],
            longest: Duration::ZERO,
        }
    }

    fn write(&mut self) {
        let offset = self.rng.random_range(0..SIZE / 512 - 64) * 512;
        let length = self.rng.random_range(1..64) * 512;
        let written = if self.rng.random_bool(0.2) {
            self.source.zero(offset, length)
        } else {
            let fill = if self.rng.random_bool(0.1) { 0 } else { self.rng.random_range(1..=255) };
            self.source.write(offset, &vec![fill; usize::try_from(length).expect("small")])
        };
        let blocks = written.expect("writes").blocks;
        if let Some(mirrored) = self.from.guest_wrote(blocks, self.now, &self.source).expect("reads") {
            self.there.extend(mirrored.messages);
            self.waiting.push((mirrored.until, self.now));
        }
    }

    fn step(&mut self) {
        self.now += Duration::from_millis(10);
        self.there.extend(self.from.poll(&self.source).expect("reads"));
        for _ in 0..self.rng.random_range(0..6) {
            if self.cut {
                break;
            }
            if let Some(message) = self.there.pop_front() {
                assert!(message.len() <= MAX_MESSAGE);
                self.back.push_back(self.to.handle(&message, &self.target).expect("applies"));
            }
            if let Some(message) = self.back.pop_front() {
                self.from.handle(&message, &self.source).expect("takes");
            }
        }
        self.from.tick(self.now);
        let (from, now, longest) = (&self.from, self.now, &mut self.longest);
        self.waiting.retain(|(seq, since)| {
            *longest = (*longest).max(now.saturating_sub(*since));
            !from.is_answered(*seq)
        });
    }

    fn finish(&mut self) {
        self.source.freeze();
        self.cut = false;
        for _ in 0..100_000 {
            if self.from.state() == State::Exchanging {
                self.step();
                continue;
            }
            self.from.stop();
            if self.from.state() == State::Complete {
                assert!(self.to.is_complete());
                return;
            }
            self.step();
        }
        panic!("the mirror does not end: {:?}", self.from);
    }

    fn check(&self) {
        let (mut ours, mut theirs) = (vec![0; SIZE as usize], vec![1; SIZE as usize]);
        self.source.read(0, &mut ours).expect("reads");
        self.target.read(0, &mut theirs).expect("reads");
        assert!(ours == theirs, "the contents differ");
        assert_eq!(self.source.stamp_runs().expect("reads"), self.target.stamp_runs().expect("reads"));
    }
}

#[test]
fn whatever_the_guest_and_the_link_do_both_replicas_end_equal_and_no_write_waits_for_two_seconds() {
    let mut fell_back = 0;
    for seed in 0..40 {
        let folder = tempfile::tempdir().expect("a folder");
        let source = primary(&folder.path().join("a"));
        let target = Replica::create(&folder.path().join("b"), VolumeId(1), Bytes(SIZE)).expect("creates");
        let mut world = World::new(source, target, seed);
        for _ in 0..world.rng.random_range(0..60) {
            world.write();
        }
        let mut left = world.rng.random_range(0..1500);
        while left > 0 {
            left -= 1;
            if world.rng.random_bool(0.3) {
                world.write();
            }
            if world.rng.random_bool(0.004) {
                world.cut = !world.cut;
            }
            let before = world.from.state();
            world.step();
            fell_back += u32::from(before == State::Mirroring && world.from.state() == State::Copying);
        }
        assert!(world.longest < Duration::from_secs(2), "seed {seed}: a write waited {:?}", world.longest);
        world.finish();
        world.check();
    }
    assert!(fell_back > 0, "no seed cut a link that a write waited for");
}

#[test]
fn a_write_waits_no_longer_than_its_patience_when_only_those_before_it_are_answered() {
    let folder = tempfile::tempdir().expect("a folder");
    let source = primary(&folder.path().join("a"));
    let target = Replica::create(&folder.path().join("b"), VolumeId(1), Bytes(SIZE)).expect("creates");
    let mut world = World::new(source, target, 12);
    while world.from.state() != State::Mirroring {
        world.step();
    }
    let mut write = |block: u64| {
        let blocks = world.source.write(block * BLOCK, &[1; 4096]).expect("writes").blocks;
        world.from.guest_wrote(blocks, world.now, &world.source).expect("reads").expect("is mirrored")
    };
    let (first, second) = (write(1), write(2));
    for message in &first.messages {
        let answer = world.to.handle(message, &world.target).expect("applies");
        world.from.handle(&answer, &world.source).expect("takes");
    }
    assert!(world.from.is_answered(first.until) && !world.from.is_answered(second.until));
    assert!(world.from.tick(world.now + PATIENCE), "nobody looks after the second");
    assert!(world.from.is_answered(second.until));
}

#[test]
fn what_a_broken_mirror_has_passed_on_and_the_guest_wrote_again_travels_again() {
    for seed in 0..12 {
        let folder = tempfile::tempdir().expect("a folder");
        let mut source = primary(&folder.path().join("a"));
        let mut target = Replica::create(&folder.path().join("b"), VolumeId(1), Bytes(SIZE)).expect("creates");
        for attempt in 0..3 {
            let mut world = World::new(source, target, seed * 3 + attempt);
            for _ in 0..20 {
                world.write();
                world.step();
            }
            if attempt == 2 {
                world.finish();
                world.check();
                break;
            }
            // It ends with messages under way, and the guest overwrites what was sent: no mirror is told.
            for block in 0..SIZE / BLOCK {
                world.source.write(block * BLOCK, &[200; 512]).expect("writes");
            }
            let World { source: a, target: b, .. } = world;
            (source, target) = (a, b);
        }
    }
}

#[test]
fn the_way_back_sends_what_was_written_since_and_nothing_else() {
    let folder = tempfile::tempdir().expect("a folder");
    let source = primary(&folder.path().join("a"));
    let target = Replica::create(&folder.path().join("b"), VolumeId(1), Bytes(SIZE)).expect("creates");
    let mut world = World::new(source, target, 7);
    (0..200).for_each(|_| world.write());
    world.finish();
    let there = world.from.progress();
    assert!(there.total.0 > 2 << 20);
    let World { source, target, .. } = world;
    source.become_secondary().expect("yields");
    target.become_primary(Lineage(0), Generation(2)).expect("takes over");
    let mut back = World::new(target, source, 8);
    (0..3).for_each(|_| back.write());
    back.finish();
    back.check();
    assert!(back.from.progress().total.0 <= 3 * 33 * 512 * 2, "{:?}", back.from.progress());
}

#[test]
fn zero_blocks_do_not_travel_and_the_target_stays_sparse() {
    let folder = tempfile::tempdir().expect("a folder");
    let source = primary(&folder.path().join("a"));
    source.write(0, &vec![7; 1 << 20]).expect("writes");
    source.write(1 << 20, &vec![0; 4 << 20]).expect("writes");
    let target = Replica::create(&folder.path().join("b"), VolumeId(1), Bytes(SIZE)).expect("creates");
    let mut world = World::new(source, target, 9);
    world.finish();
    world.check();
    assert_eq!(world.from.progress().elided, Bytes(4 << 20));
    assert_eq!(world.target.allocated(), world.source.allocated());
}

#[test]
fn a_message_that_was_changed_on_the_way_is_found_at_the_end() {
    let folder = tempfile::tempdir().expect("a folder");
    let source = primary(&folder.path().join("a"));
    source.write(0, &vec![7; 8192]).expect("writes");
    let target = Replica::create(&folder.path().join("b"), VolumeId(1), Bytes(SIZE)).expect("creates");
    let mut world = World::new(source, target, 10);
    while let Some(message) = world.back.pop_front() {
        world.from.handle(&message, &world.source).expect("takes");
    }
    world.there.extend(world.from.poll(&world.source).expect("reads"));
    let last = world.there[0].len() - 1;
    world.there[0][last] ^= 1;
    world.source.freeze();
    world.from.stop();
    let mut refused = None;
    for _ in 0..10 {
        world.there.extend(world.from.poll(&world.source).expect("reads"));
        while let Some(message) = world.there.pop_front() {
            match world.to.handle(&message, &world.target) {
                Ok(answer) => world.from.handle(&answer, &world.source).expect("takes"),
                Err(error) => refused = Some(error),
            }
        }
    }
    assert!(matches!(refused, Some(MirrorError::Digest)), "{refused:?}");
    assert!(!world.to.is_complete());
}

#[test]
fn what_is_no_message_is_refused_by_both_sides() {
    let folder = tempfile::tempdir().expect("a folder");
    let source = primary(&folder.path().join("a"));
    let target = Replica::create(&folder.path().join("b"), VolumeId(1), Bytes(SIZE)).expect("creates");
    let mut rng = SmallRng::seed_from_u64(11);
    for _ in 0..3000 {
        let mut message: Vec<u8> = (0..rng.random_range(0..80)).map(|_| rng.random()).collect();
        if let Some(kind) = message.first_mut() {
            *kind %= 9;
        }
        let (mut from, mut to) = (Source::new(), Target::new(&target).expect("reads").0);
        let _ = from.handle(&message, &source);
        let _ = to.handle(&message, &target);
    }
    // Ranges beyond the end, and ones that overflow.
    for (first, count) in [(u64::MAX, 1), (SIZE / BLOCK, 1), (0, u64::MAX), (1, u64::MAX / BLOCK)] {
        for kind in [ZEROES, FORGET] {
            let mut message = vec![kind];
            message.extend(first.to_le_bytes());
            message.extend(u64::to_le_bytes(count));
            message.extend([0; STAMP_BYTES]);
            assert!(Target::new(&target).expect("reads").0.handle(&message, &target).is_err());
        }
    }
}

#[test]
fn a_message_about_more_blocks_than_a_message_has_is_refused_before_anything_is_kept_for_it() {
    let folder = tempfile::tempdir().expect("a folder");
    let target = Replica::create(folder.path(), VolumeId(1), Bytes(1 << 40)).expect("creates");
    let stamp = Stamp { lineage: Lineage(0), generation: Generation(1), epoch: godwit_units::Epoch(1) };
    for kind in [ZEROES, FORGET] {
        let (mut to, _) = Target::new(&target).expect("reads");
        to.handle(&run_message(kind, &(0..MOST_BLOCKS), stamp, &[]), &target).expect("as long as it may be");
        let refused = to.handle(&run_message(kind, &(0..MOST_BLOCKS + 1), stamp, &[]), &target);
        assert!(matches!(refused, Err(MirrorError::Message(_))), "{refused:?}");
    }
}
