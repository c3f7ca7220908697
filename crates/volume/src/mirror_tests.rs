use super::*;
use crate::lag::LEAST;
use crate::replica::Replica;
use crate::stamps::{REGION, WINDOW as WINDOW_OF_TABLE};
use crate::walk::AT_ONCE;
use godwit_units::{Generation, Lineage, VolumeId};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

const SIZE: u64 = 16 << 20;

fn primary(folder: &std::path::Path) -> Replica {
    let replica = Replica::create(folder, VolumeId(1), Bytes(SIZE)).expect("creates");
    replica.become_primary(Lineage(0), Generation(1)).expect("is ours");
    replica
}

fn library(memory: Bytes) -> Arc<Library> {
    Arc::new(Library::new(godwit_content::Key::new([9; 32]), memory))
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
    /// Guest's writes that wait: until when, and since when.
    waiting: Vec<(Place, Duration)>,
    longest: Duration,
    library: Arc<Library>,
    /// Bytes of messages to the target.
    bytes: u64,
}

impl World {
    fn new(source: Replica, target: Replica, seed: u64) -> Self {
        Self::with_library(source, target, seed, library(Bytes::kib(64)))
    }

    fn with_library(source: Replica, target: Replica, seed: u64, library: Arc<Library>) -> Self {
        let mut rng = SmallRng::seed_from_u64(seed);
        let (to, has) = Target::with_library(&target, library.clone()).expect("reads");
        let has = has.in_messages_of(rng.random_range(1..20));
        Self {
            back: has.all(&target).expect("reads").into(),
            rng,
            source,
            target,
            from: Source::new(),
            to,
            there: VecDeque::new(),
            now: Duration::ZERO,
            cut: false,
            waiting: vec![],
            longest: Duration::ZERO,
            library,
            bytes: 0,
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
                self.bytes += message.len() as u64;
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

    /// Until both sides are equal and the guest is kept in step.
    fn settle(&mut self) {
        for _ in 0..100_000 {
            if self.from.is_synchronous() {
                return;
            }
            self.step();
        }
        panic!("it does not settle: {:?}", self.from);
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
    let (mut fell_back, mut named, mut missed, mut ahead) = (0, 0, 0, 0);
    for seed in 0..60 {
        // Every other volume is compared in four windows, between which the guest writes.
        AT_ONCE.set(if seed % 2 == 0 { WINDOW_OF_TABLE as usize } else { 1 });
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
            if world.rng.random_bool(0.003) {
                world.library.lose();
            }
            let before = world.from.state();
            world.step();
            fell_back += u32::from(before == State::Mirroring && world.from.state() == State::Copying);
        }
        assert!(world.longest < Duration::from_secs(2), "seed {seed}: a write waited {:?}", world.longest);
        let mirrored = world.from.state() == State::Mirroring && world.there.iter().any(|message| message[0] == DATA);
        ahead += u32::from(mirrored && world.waiting.is_empty());
        world.finish();
        world.check();
        named += world.from.progress().named.0 / BLOCK;
        missed += world.from.flight.names.figures().missed;
    }
    assert!(named > 500 && missed > 100, "{named} named, {missed} missed: too little was tried");
    assert!(fell_back > 0, "no seed cut a link that a write waited for");
    assert!(ahead > 0, "no guest stopped that was told of a write which was on its way");
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
        // More than the target may be behind.
        let blocks = world.source.write(block * BLOCK, &vec![1; LEAST as usize * 2]).expect("writes").blocks;
        world.from.guest_wrote(blocks, world.now, &world.source).expect("reads").expect("is mirrored")
    };
    let (first, second) = (write(0), write(100));
    for message in &first.messages {
        let answer = world.to.handle(message, &world.target).expect("applies");
        world.from.handle(&answer, &world.source).expect("takes");
    }
    assert!(world.from.is_answered(first.until) && !world.from.is_answered(second.until));
    assert!(world.from.tick(world.now + PATIENCE), "nobody looks after the second");
    assert!(world.from.is_answered(second.until));
}

#[test]
fn what_the_guest_writes_while_stamps_are_compared_travels_though_the_comparison_has_passed_by() {
    AT_ONCE.set(1);
    let folder = tempfile::tempdir().expect("a folder");
    let source = primary(&folder.path().join("a"));
    let target = Replica::create(&folder.path().join("b"), VolumeId(1), Bytes(SIZE)).expect("creates");
    let regions = SIZE / BLOCK / REGION;
    for region in 0..regions {
        source.write(region * REGION * BLOCK, &[1; BLOCK as usize]).expect("writes");
    }
    let mut world = World::new(source, target, 16);
    world.finish();
    world.check();
    // Both are alike, and another mirror finds that.
    let World { source, target, .. } = world;
    source.thaw();
    let mut world = World::new(source, target, 17);
    // It waits for the target between any two regions, too.
    let (to, has) = Target::new(&world.target).expect("reads");
    (world.to, world.back) = (to, has.in_messages_of(1).all(&world.target).expect("reads").into());
    let mut windows = 0;
    loop {
        if world.from.is_comparing() {
            let messages = world.from.poll(&world.source).expect("reads");
            world.there.extend(messages);
        } else if let Some(message) = world.back.pop_front() {
            world.from.handle(&message, &world.source).expect("takes");
        } else {
            break;
        }
        windows += 1;
        if world.from.state() != State::Exchanging {
            continue;
        }
        // In the first region, and in the last.
        for block in [windows, SIZE / BLOCK - windows] {
            let blocks = world.source.write(block * BLOCK, &[9; BLOCK as usize]).expect("writes").blocks;
            assert!(world.from.guest_wrote(blocks, world.now, &world.source).expect("reads").is_none());
        }
    }
    assert_ne!(world.from.state(), State::Exchanging);
    assert!(windows >= 2 * regions - 1, "{windows}: the last of the one walk and the first of the other go together");
    assert_eq!(world.from.progress().held, Bytes(regions * BLOCK));
    world.finish();
    world.check();
}

#[test]
fn what_a_broken_mirror_has_passed_on_and_the_guest_wrote_again_travels_again() {
    for seed in 0..12 {
        AT_ONCE.set(if seed % 2 == 0 { WINDOW_OF_TABLE as usize } else { 1 });
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
fn what_guests_came_to_first_goes_ahead_and_a_guest_is_kept_in_step_when_it_is_there() {
    let folder = tempfile::tempdir().expect("a folder");
    let source = primary(&folder.path().join("a"));
    source.write(0, &[7; BLOCK as usize]).expect("writes");
    let target = Replica::create(&folder.path().join("b"), VolumeId(1), Bytes(SIZE)).expect("creates");
    // More than a message has, and more than goes.
    let order: Vec<Range<u64>> = (0..9000).map(|n| (9000 - n) * 3..(9000 - n) * 3 + 2).collect();
    let mut world = World::new(source, target, 14);
    world.from = Source::with_order(&order);
    while let Some(message) = world.back.pop_front() {
        world.from.handle(&message, &world.source).expect("takes");
    }
    let mut pieces = vec![];
    loop {
        let messages = world.from.poll(&world.source).expect("reads");
        let (ours, others): (Vec<_>, Vec<_>) = messages.into_iter().partition(|message| message[0] == ORDER);
        world.there.extend(others);
        if ours.is_empty() {
            break;
        }
        pieces.extend(ours);
    }
    assert!(pieces.len() > 1, "{} pieces", pieces.len());
    assert_eq!(world.from.state(), State::Copying, "its guest would wait behind what nobody waits for");
    for piece in &pieces {
        let answer = world.to.handle(piece, &world.target).expect("takes");
        world.from.handle(&answer, &world.source).expect("takes");
    }
    assert_eq!(world.to.order(), order[..MOST_ORDER]);
    world.settle();
    world.finish();
    world.check();
}

#[test]
fn a_target_that_does_not_say_that_it_takes_an_order_is_sent_none() {
    let folder = tempfile::tempdir().expect("a folder");
    let source = primary(&folder.path().join("a"));
    source.write(0, &[7; BLOCK as usize]).expect("writes");
    let target = Replica::create(&folder.path().join("b"), VolumeId(1), Bytes(SIZE)).expect("creates");
    let mut world = World::new(source, target, 15);
    world.from = Source::with_order(&[3..5, 9..10]);
    // As one of an earlier version.
    world.back.retain(|message| message[..2] != [HAVE, TAKES_ORDER]);
    for _ in 0..20 {
        world.step();
        assert!(world.there.iter().all(|message| message[0] != ORDER));
    }
    world.finish();
    world.check();
    assert!(world.to.order().is_empty());
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
            *kind %= 11;
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

/// Blocks that do not compress and are all different.
fn different(seed: u64, blocks: u64) -> Vec<u8> {
    let mut data = vec![0; (blocks * BLOCK) as usize];
    rand::RngCore::fill_bytes(&mut SmallRng::seed_from_u64(seed), &mut data);
    data
}

#[test]
fn what_another_volume_of_the_domain_has_at_the_target_goes_by_name() {
    let folder = tempfile::tempdir().expect("a folder");
    let (image, library) = (different(1, 1024), library(Bytes::mib(1)));
    // Two volumes made of one image; the second follows the first.
    let mut bytes = vec![];
    let mut kept = vec![];
    for n in 0..2 {
        let source = primary(&folder.path().join(format!("a{n}")));
        source.write(0, &image).expect("writes");
        source.write(2 * image.len() as u64, &different(10 + n, 16)).expect("writes");
        let target = Replica::create(&folder.path().join(format!("b{n}")), VolumeId(n), Bytes(SIZE)).expect("creates");
        let mut world = World::with_library(source, target, n, library.clone());
        world.settle();
        world.finish();
        world.check();
        bytes.push(world.bytes);
        kept.push(world);
    }
    assert!(bytes[0] > 4 << 20 && bytes[1] < NEARLY_CLEAN * BLOCK + 1024 * 24, "{bytes:?}");
    assert!(kept[1].from.progress().named >= Bytes(768 * BLOCK));
    // With the first volume closed nothing is where the library believes it, and all of it comes in full.
    let World { target, .. } = kept.remove(0);
    target.close().expect("closes");
    kept.clear();
    let source = primary(&folder.path().join("a2"));
    source.write(0, &image).expect("writes");
    let target = Replica::create(&folder.path().join("b2"), VolumeId(2), Bytes(SIZE)).expect("creates");
    let mut world = World::with_library(source, target, 2, library);
    world.settle();
    world.finish();
    world.check();
    assert_eq!(world.from.progress().named, Bytes(0), "{:?}", world.from.flight.names.figures());
    assert!(world.from.flight.names.figures().missed > 0);
}

#[test]
fn a_long_and_fast_path_is_filled_and_what_is_on_its_way_has_a_bound() {
    let folder = tempfile::tempdir().expect("a folder");
    let source = primary(&folder.path().join("a"));
    source.write(0, &different(1, SIZE / BLOCK)).expect("writes");
    let target = Replica::create(&folder.path().join("b"), VolumeId(1), Bytes(SIZE)).expect("creates");
    let (mut from, (_, has)) = (Source::new(), Target::new(&target).expect("reads"));
    has.all(&target).expect("reads").iter().for_each(|message| from.handle(message, &source).expect("takes"));
    let mut goes = |rate: f64, ms| {
        from.path_is(BitRate::from_mbit(rate), Duration::from_millis(ms));
        while !from.poll(&source).expect("reads").is_empty() {}
        from.flight.bytes()
    };
    assert!((WINDOW..WINDOW + MAX_MESSAGE as u64).contains(&goes(100.0, 100)));
    let more = goes(500.0, 50);
    assert!((12_500_000..12_500_000 + MAX_MESSAGE as u64).contains(&more), "{more}: four times what it holds");
}

#[test]
fn what_was_named_in_vain_goes_first_though_several_answers_say_so_at_once() {
    let folder = tempfile::tempdir().expect("a folder");
    let source = primary(&folder.path().join("a"));
    source.write(0, &different(1, 1024)).expect("writes");
    let target = Replica::create(&folder.path().join("b"), VolumeId(1), Bytes(SIZE)).expect("creates");
    let (mut from, (_, has)) = (Source::new(), Target::new(&target).expect("reads"));
    has.all(&target).expect("reads").iter().for_each(|message| from.handle(message, &source).expect("takes"));
    let next = |from: &mut Source, polls: usize| -> Vec<Range<u64>> {
        let messages = (0..polls).flat_map(|_| from.poll(&source).expect("reads"));
        messages.map(|message| parse_run(&message[1..]).expect("a run").0).collect()
    };
    assert_eq!(next(&mut from, 2), [0..64, 64..128]);
    [[3, 4], [100, 101], [60, 61]].iter().for_each(|missed| from.send_again(missed));
    assert_eq!(next(&mut from, 4), [3..5, 60..62, 100..102, 128..192]);
}

#[test]
fn what_a_volume_holds_twice_travels_once_however_far_apart() {
    let folder = tempfile::tempdir().expect("a folder");
    let source = primary(&folder.path().join("a"));
    let data = different(3, 1500);
    source.write(0, &data).expect("writes");
    source.write(8 << 20, &data).expect("writes");
    let target = Replica::create(&folder.path().join("b"), VolumeId(1), Bytes(SIZE)).expect("creates");
    let mut world = World::with_library(source, target, 3, library(Bytes::mib(1)));
    world.settle();
    world.finish();
    world.check();
    // But for the last blocks, which go while the guest is kept in step.
    let most = data.len() as u64 * 101 / 100 + NEARLY_CLEAN * BLOCK;
    assert!(world.bytes < most, "{} bytes for {}", world.bytes, data.len());
}

#[test]
fn what_lies_at_the_target_and_never_came_there_by_a_mirror_is_named_once_it_was_looked_at() {
    let folder = tempfile::tempdir().expect("a folder");
    let (image, library) = (different(1, 1024), library(Bytes::mib(1)));
    let source = primary(&folder.path().join("a"));
    source.write(0, &image).expect("writes");
    let target = Replica::create(&folder.path().join("b"), VolumeId(1), Bytes(SIZE)).expect("creates");
    // A guest's disk at the target's site, with a hole before what it has.
    let other = primary(&folder.path().join("other"));
    other.write(BLOCK * 100, &image).expect("writes");
    let (mut from, mut read) = (Some(0), 0);
    while let Some(at) = from {
        let looked = library.look(&other, at, Bytes::kib(64)).expect("reads");
        read += looked.map_or(0, |(_, read)| read.0);
        from = looked.map(|(next, _)| next);
    }
    assert_eq!((library.blocks(), read), (1024, 1024 * BLOCK));
    let mut world = World::with_library(source, target, 3, library);
    world.settle();
    world.finish();
    world.check();
    // All but the last mebibyte, and the run that went before the target had said what it holds.
    assert!(world.from.progress().named >= Bytes((768 - 64) * BLOCK), "{:?}", world.from.progress());
}

#[test]
fn a_library_of_another_domain_changes_no_byte_of_what_travels() {
    let folder = tempfile::tempdir().expect("a folder");
    let secret = different(4, 300);
    let mut seen = vec![];
    for (n, neighbour_has_it) in [false, true].into_iter().enumerate() {
        // The neighbour's volume at the same site, in a library of its own.
        let theirs = Replica::create(&folder.path().join(format!("n{n}")), VolumeId(7), Bytes(SIZE)).expect("creates");
        let held = primary(&folder.path().join(format!("m{n}")));
        held.write(0, if neighbour_has_it { &secret } else { &[5; 4096] }).expect("writes");
        let neighbours = Arc::new(Library::new(godwit_content::Key::new([1; 32]), Bytes::mib(1)));
        World::with_library(held, theirs, 1, neighbours.clone()).finish();
        assert!(neighbours.blocks() > 0);

        let source = primary(&folder.path().join(format!("a{n}")));
        source.write(0, &secret).expect("writes");
        let target = Replica::create(&folder.path().join(format!("b{n}")), VolumeId(1), Bytes(SIZE)).expect("creates");
        let mut world = World::with_library(source, target, 5, library(Bytes::mib(1)));
        world.settle();
        world.finish();
        seen.push((world.bytes, world.from.progress()));
    }
    assert_eq!(seen[0], seen[1]);
    assert!(seen[0].0 > secret.len() as u64);
}

/// A source that has the same blocks twice, and an empty target.
fn twice(folder: &std::path::Path, seed: u64, blocks: u64) -> World {
    let source = primary(&folder.join("a"));
    let data = different(seed, blocks);
    source.write(0, &data).expect("writes");
    source.write(4 << 20, &data).expect("writes");
    let target = Replica::create(&folder.join("b"), VolumeId(1), Bytes(SIZE)).expect("creates");
    World::new(source, target, seed)
}

#[test]
fn an_end_is_not_believed_while_a_named_block_is_missing() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut world = twice(folder.path(), 6, 512);
    while let Some(message) = world.back.pop_front() {
        world.from.handle(&message, &world.source).expect("takes");
    }
    // The last blocks are sent by name, the library is lost, and the guest stops before anybody has answered.
    while world.from.state() == State::Copying {
        world.there.extend(world.from.poll(&world.source).expect("reads"));
    }
    assert!(world.there.iter().any(|message| message[0] == NAMED));
    world.source.freeze();
    world.from.stop();
    while world.there.back().is_none_or(|message| message[0] != FINAL) {
        world.there.extend(world.from.poll(&world.source).expect("reads"));
    }
    let mut lost = false;
    while let Some(message) = world.there.pop_front() {
        if message[0] == NAMED && !lost {
            lost = true;
            world.library.lose();
        }
        world.back.push_back(world.to.handle(&message, &world.target).expect("applies"));
    }
    assert!(!world.to.is_complete() && world.from.state() == State::Finishing);
    world.finish();
    world.check();
}

#[test]
fn over_a_link_that_is_faster_than_digests_nothing_is_named() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut world = twice(folder.path(), 8, 256);
    world.from.path_is(BitRate::from_mbit(40_000.0), Duration::ZERO);
    world.settle();
    world.finish();
    world.check();
    assert_eq!(world.from.progress().named, Bytes(0));
}

#[test]
fn two_sides_are_not_in_step_while_names_are_under_way() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut world = twice(folder.path(), 6, 512);
    while let Some(message) = world.back.pop_front() {
        world.from.handle(&message, &world.source).expect("takes");
    }
    while world.from.state() != State::Mirroring || !world.from.dirty.is_empty() {
        world.there.extend(world.from.poll(&world.source).expect("reads"));
    }
    assert!(!world.from.is_synchronous(), "the target may not be able to get them");
    while let Some(message) = world.there.pop_front() {
        let answer = world.to.handle(&message, &world.target).expect("applies");
        world.from.handle(&answer, &world.source).expect("takes");
    }
    assert!(world.from.is_synchronous());
}

/// A link that carries so much and takes so long, each way, and a guest; time goes by in milliseconds.
struct Timed {
    source: Replica,
    target: Replica,
    from: Source,
    to: Target,
    now: u64,
    /// When the link is free again, in microseconds.
    free: u64,
    there: VecDeque<(u64, Vec<u8>)>,
    back: VecDeque<(u64, Vec<u8>)>,
    cut: bool,
    /// Writes, each with what the guest had written with it: those that wait, and those that the target does not have.
    waiting: VecDeque<(Place, u64)>,
    lacking: VecDeque<(Seq, u64)>,
    written: u64,
    told: u64,
    had: u64,
    /// The most that the guest was told of and the target did not have.
    behind: u64,
    _folder: tempfile::TempDir,
}

impl Timed {
    const RATE: BitRate = BitRate(40_000_000);
    const ONE_WAY: u64 = 20;

    /// In step, and the link known.
    fn mirroring() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let source = primary(&folder.path().join("a"));
        let target = Replica::create(&folder.path().join("b"), VolumeId(1), Bytes(SIZE)).expect("creates");
        let (to, first) = Target::new(&target).expect("reads");
        let mut from = Source::new();
        for message in &first.all(&target).expect("reads") {
            from.handle(message, &source).expect("takes");
        }
        assert!(from.poll(&source).expect("reads").is_empty());
        assert_eq!(from.state(), State::Mirroring);
        from.path_is(Self::RATE, Duration::from_millis(2 * Self::ONE_WAY));
        Self {
            source,
            target,
            from,
            to,
            now: 0,
            free: 0,
            there: VecDeque::new(),
            back: VecDeque::new(),
            cut: false,
            waiting: VecDeque::new(),
            lacking: VecDeque::new(),
            written: 0,
            told: 0,
            had: 0,
            behind: 0,
            _folder: folder,
        }
    }

    fn send(&mut self, messages: Vec<Vec<u8>>) {
        for message in messages {
            self.free = self.free.max(self.now * 1000) + message.len() as u64 * 8_000_000 / Self::RATE.0;
            self.there.push_back((self.free + Self::ONE_WAY * 1000, message));
        }
    }

    /// The guest writes so many bytes. Whether it was told at once.
    fn write(&mut self, bytes: u64) -> bool {
        let at = self.written % (SIZE - bytes) / BLOCK * BLOCK;
        let blocks = self.source.write(at, &different(self.written, bytes / BLOCK)).expect("writes").blocks;
        self.written += bytes;
        let now = Duration::from_millis(self.now);
        let Some(mirrored) = self.from.guest_wrote(blocks, now, &self.source).expect("reads") else {
            self.told = self.written;
            return true;
        };
        self.send(mirrored.messages);
        self.lacking.push_back((self.from.flight.sent(), self.written));
        self.waiting.push_back((mirrored.until, self.written));
        self.tell();
        self.waiting.is_empty()
    }

    fn tell(&mut self) {
        while let Some((_, written)) = self.waiting.pop_front_if(|(place, _)| self.from.is_answered(*place)) {
            self.told = written;
        }
        self.behind = self.behind.max(self.told.saturating_sub(self.had));
    }

    fn millisecond(&mut self) {
        self.now += 1;
        let messages = self.from.poll(&self.source).expect("reads");
        self.send(messages);
        let now = self.now * 1000;
        while !self.cut
            && let Some((_, message)) = self.there.pop_front_if(|(at, _)| *at <= now)
        {
            let answer = self.to.handle(&message, &self.target).expect("applies");
            self.back.push_back((now + Self::ONE_WAY * 1000, answer));
        }
        while !self.cut
            && let Some((_, answer)) = self.back.pop_front_if(|(at, _)| *at <= now)
        {
            self.from.handle(&answer, &self.source).expect("takes");
        }
        let acked = self.from.flight.acked();
        while let Some((_, written)) = self.lacking.pop_front_if(|(seq, _)| *seq <= acked) {
            self.had = written;
        }
        self.from.tick(Duration::from_millis(self.now));
        self.tell();
    }

    /// For so long: a write whenever fewer than `depth` wait and the guest has not written more than `bytes_per_ms` of it. How many were
    /// not told at once.
    fn run(&mut self, ms: u64, size: u64, bytes_per_ms: u64, depth: usize) -> usize {
        let (began, before, mut waited) = (self.now, self.written, 0);
        while self.now < began + ms {
            self.millisecond();
            while self.waiting.len() < depth && self.written - before + size <= (self.now - began) * bytes_per_ms {
                waited += usize::from(!self.write(size));
            }
        }
        waited
    }

    /// How long it takes from the guest's stop until the target has everything, milliseconds.
    fn stop(&mut self) -> u64 {
        let began = self.now;
        self.from.let_go();
        self.tell();
        assert!(self.waiting.is_empty());
        self.source.freeze();
        self.from.stop();
        while self.from.state() != State::Complete {
            self.millisecond();
            assert!(self.now < began + 10_000, "{:?}", self.from);
        }
        let (mut ours, mut theirs) = (vec![0; SIZE as usize], vec![1; SIZE as usize]);
        self.source.read(0, &mut ours).expect("reads");
        self.target.read(0, &mut theirs).expect("reads");
        assert!(ours == theirs && self.to.is_complete(), "what the guest was told is not there");
        self.now - began
    }
}

/// Of [`Timed::RATE`].
fn bytes_per_ms(share: f64) -> u64 {
    (Timed::RATE.bytes_in(Duration::from_millis(1)).0 as f64 * share) as u64
}

#[test]
fn a_guest_that_writes_slower_than_the_link_waits_for_no_write_and_nothing_is_lost_when_it_stops() {
    for size in [BLOCK, 4 * BLOCK, 16 * BLOCK] {
        let mut timed = Timed::mirroring();
        assert_eq!(timed.run(1000, size, bytes_per_ms(0.9), 1), 0, "writes of {size} bytes wait");
        assert!(timed.behind > 0, "no write was told of before the target had it");
        timed.stop();
    }
}

#[test]
fn a_guest_that_writes_faster_than_the_link_is_held_to_it_and_the_target_is_behind_by_no_more_than_the_bound() {
    for (size, depth) in [(BLOCK, 1), (BLOCK, 32), (64 * BLOCK, 2)] {
        let mut timed = Timed::mirroring();
        let bound = Timed::RATE.bytes_in(Duration::from_millis(2 * Timed::ONE_WAY + 15)).0;
        timed.run(500, size, u64::MAX >> 20, depth);
        let before = timed.told;
        timed.run(1000, size, u64::MAX >> 20, depth);
        let (rate, most) = (timed.told - before, 1000 * bytes_per_ms(1.0));
        assert!(rate <= most && rate >= most * 9 / 10, "{size}, {depth}: {rate} of {most} bytes a second");
        assert!(timed.behind <= bound, "{size}, {depth}: {} bytes behind of {bound}", timed.behind);
        // What it was not told of is on its way as well, and so is the end's answer.
        let under_way = bound + depth as u64 * size;
        let drained = under_way / bytes_per_ms(1.0) + 2 * Timed::ONE_WAY;
        let took = timed.stop();
        assert!(took <= drained + 5, "{size}, {depth}: {took} ms of {drained}");
    }
}

#[test]
fn a_target_that_is_silent_holds_a_guest_for_its_patience_and_comes_back_in_step() {
    let mut timed = Timed::mirroring();
    timed.run(200, 4 * BLOCK, bytes_per_ms(0.5), 8);
    timed.cut = true;
    let longest = PATIENCE.as_millis() as u64;
    timed.run(longest - 100, 4 * BLOCK, bytes_per_ms(0.5), 8);
    assert!(timed.from.state() == State::Mirroring && timed.waiting.len() == 8);
    timed.run(300, 4 * BLOCK, bytes_per_ms(0.5), 8);
    assert!(timed.from.state() == State::Copying && timed.waiting.is_empty(), "{:?}", timed.from.state());
    timed.cut = false;
    timed.run(2000, BLOCK, bytes_per_ms(0.1), 1);
    assert_eq!(timed.from.state(), State::Mirroring);
    timed.stop();
}

#[test]
fn nobody_waits_for_the_target_once_the_guest_is_stopping() {
    let mut timed = Timed::mirroring();
    timed.cut = true;
    timed.run(300, 4 * BLOCK, bytes_per_ms(1.0), 8);
    assert_eq!(timed.waiting.len(), 8);
    timed.from.let_go();
    timed.tell();
    assert!(timed.waiting.is_empty());
    // What its QEMU had kept for itself until now.
    assert!((0..20).all(|_| timed.write(4 * BLOCK)), "the guest's last writes wait for the link");
    timed.cut = false;
    timed.stop();
}

#[test]
fn a_mirror_stays_in_step_however_long_ago_a_write_waited_that_was_answered() {
    let mut timed = Timed::mirroring();
    assert!(timed.run(100, 64 * BLOCK, bytes_per_ms(4.0), 1) > 0, "none waited");
    for _ in 0..2 * PATIENCE.as_millis() {
        timed.millisecond();
        assert_eq!(timed.from.state(), State::Mirroring, "after {} ms", timed.now);
    }
}
