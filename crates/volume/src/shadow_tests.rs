use super::*;
use crate::fet::{Source, State, Target};
use crate::file::{Description, SlottedFile};
use crate::replica::is_zero;
use crate::walk::Who;
use godwit_units::{Generation, VolumeId};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use std::path::Path;

pub(crate) const SIZE: u64 = 16 << 20;

/// A primary that the tests write to.
pub(crate) fn source(folder: &Path) -> Replica {
    let replica = Replica::create(&folder.join("source"), VolumeId(1), Bytes(SIZE)).expect("creates");
    replica.become_primary(Lineage(0), Generation(1)).expect("is ours");
    replica
}

/// Hands a volume off; `to` becomes its owner.
pub(crate) fn hand_off(from: &Replica, to: &Replica, me: &str, generation: u64) -> Source {
    to.become_secondary().expect("yields");
    let mut source = Source::new(Holder(me.into()), Lineage(0), &[]);
    let (mut target, first) = Target::new(to).expect("begins");
    for message in first.all(to).expect("reads") {
        source.handle(&message, from).expect("takes");
    }
    let mut pump = |source: &mut Source| {
        loop {
            let messages = source.poll(from).expect("reads");
            if messages.is_empty() && !source.is_comparing() {
                break;
            }
            for message in messages {
                assert!(message.len() <= crate::fet::MAX_MESSAGE);
                if let Some(answer) = target.handle(&message, to).expect("takes") {
                    source.handle(&answer, from).expect("takes");
                }
            }
        }
    };
    pump(&mut source);
    from.freeze();
    source.stop(from).expect("settles");
    pump(&mut source);
    assert_eq!(source.state(), State::Complete);
    to.become_primary(Lineage(0), Generation(generation)).expect("takes over");
    source
}

/// A shadow volume of `from`, which yields. `_others`: sites that nobody asks.
pub(crate) fn shadow_of(from: &Replica, folder: &Path, _others: &[Holder]) -> Replica {
    let to = Replica::create(&folder.join("shadow"), VolumeId(1), Bytes(SIZE)).expect("creates");
    hand_off(from, &to, "source", 2);
    from.become_secondary().expect("yields");
    to
}

/// A source with so many blocks of sevens, and a shadow volume of it that has none of them yet.
fn of_sevens(folder: &Path, blocks: u64) -> (Replica, Replica) {
    let from = source(folder);
    from.write(0, &vec![7; (blocks * BLOCK) as usize]).expect("writes");
    let to = shadow_of(&from, folder, &[]);
    (from, to)
}

#[test]
fn what_is_absent_is_refused_what_is_written_whole_is_here_and_no_hole_is_where_something_is_to_come() {
    let folder = tempfile::tempdir().expect("a folder");
    let from = source(folder.path());
    from.write(8 * BLOCK, &vec![7; 4 * BLOCK as usize]).expect("writes");
    let to = shadow_of(&from, folder.path(), &[]);
    assert_eq!(to.absent(), Bytes(4 * BLOCK));
    let mut bytes = [1; 512];
    to.read(0, &mut bytes).expect("was never written, and is zero everywhere");
    assert!(is_zero(&bytes));
    assert!(matches!(to.read(9 * BLOCK + 512, &mut bytes), Err(VolumeError::Absent(run)) if run == (9..10)));
    assert!(matches!(to.write(8 * BLOCK + 512, &[1; 512]), Err(VolumeError::Absent(run)) if run == (8..9)));
    assert!(matches!(to.zero(10 * BLOCK, BLOCK + 512), Err(VolumeError::Absent(run)) if run == (11..12)));
    to.write(9 * BLOCK, &[9; BLOCK as usize]).expect("needs nothing of the old contents");
    to.read(9 * BLOCK + 512, &mut bytes).expect("is here");
    assert_eq!(bytes, [9; 512]);
    assert_eq!(to.absent(), Bytes(3 * BLOCK));
    let extents = to.extents(0, 16 * BLOCK).expect("maps");
    assert_eq!(extents, [(8 * BLOCK, true), (4 * BLOCK, false), (4 * BLOCK, true)]);
    assert!(matches!(to.runs_to_compare(), Err(VolumeError::Shadow(3))), "a mirror would need all of it");
}

#[test]
fn what_was_here_already_is_not_absent_and_the_stop_says_only_what_was_written_since() {
    let folder = tempfile::tempdir().expect("a folder");
    let from = source(folder.path());
    from.write(0, &vec![7; 1 << 20]).expect("writes");
    let to = shadow_of(&from, folder.path(), &[]);
    // All of it comes, and one block is written here.
    for version in to.wanted(0..SIZE / BLOCK).expect("reads") {
        let stamp = version.stamp.expect("was written");
        let data = from.held(version.blocks.clone(), stamp).expect("reads").expect("has it");
        to.arrive(version.blocks.start, stamp, Contents::Data(&data)).expect("takes it");
    }
    assert!(to.end_wants().expect("settles"));
    to.write(5 * BLOCK, &[8; BLOCK as usize]).expect("writes");
    // The way back: only that one differs.
    let back = hand_off(&to, &from, "shadow", 3);
    assert_eq!((back.figures().differing, back.figures().after_stop), (Bytes(BLOCK), Bytes(0)));
    assert_eq!(from.absent(), Bytes(BLOCK));
    let wanted = from.wanted(0..SIZE / BLOCK).expect("reads");
    assert_eq!((wanted[0].blocks.clone(), &wanted[0].holders[..]), (5..6, &[Holder("shadow".into())][..]));
}

#[test]
fn half_of_what_is_wanted_is_nothing_and_a_claim_begins_with_what_is_here() {
    let folder = tempfile::tempdir().expect("a folder");
    let stamp = Stamp { lineage: Lineage(0), generation: Generation(1), epoch: godwit_units::Epoch(3) };
    for complete in [false, true] {
        let path = folder.path().join(format!("{complete}"));
        let to = Replica::create(&path, VolumeId(1), Bytes(SIZE)).expect("creates");
        to.begin_wants().expect("begins");
        to.want(3..5, stamp, &[Holder("gone".into())]).expect("notes it");
        if complete {
            to.finish_wants(Lineage(0)).expect("finishes");
        }
        drop(to);
        let (to, _) = Replica::open(&path).expect("opens");
        let lineage = if complete { Lineage(1) } else { Lineage(0) };
        to.become_primary(lineage, Generation(2)).expect("takes over");
        assert_eq!(to.absent(), Bytes(0));
        to.read(3 * BLOCK, &mut [0; 512]).expect("is what is here");
    }
}

#[test]
fn a_shadow_volume_is_found_again_as_it_was_and_ends_when_all_is_here() {
    let folder = tempfile::tempdir().expect("a folder");
    let (from, to) = of_sevens(folder.path(), 8);
    to.write(2 * BLOCK, &[9; BLOCK as usize]).expect("writes");
    drop(to);
    let (to, _) = Replica::open(&folder.path().join("shadow")).expect("opens");
    to.become_primary(Lineage(0), Generation(2)).expect("is ours");
    assert_eq!((to.absent(), to.holders()), (Bytes(7 * BLOCK), vec![Holder("source".into())]));
    let mut block = [0; BLOCK as usize];
    to.read(2 * BLOCK, &mut block).expect("the process died, not the power");
    assert_eq!(block, [9; BLOCK as usize]);
    for version in to.wanted(0..8).expect("reads") {
        let stamp = version.stamp.expect("was written");
        let data = from.held(version.blocks.clone(), stamp).expect("reads").expect("has it");
        to.arrive(version.blocks.start, stamp, Contents::Data(&data)).expect("takes it");
    }
    assert!(to.left(&Holder("source".into())).expect("reads") > Some(0), "it has come, but not durably");
    assert!(to.end_wants().expect("settles"));
    assert_eq!(to.left(&Holder("source".into())).expect("reads"), Some(0));
    assert!(to.runs_to_compare().is_ok(), "it is a volume as any other");
}

#[test]
fn a_program_that_knows_no_shadow_volumes_refuses_one() {
    let folder = tempfile::tempdir().expect("a folder");
    let from = source(folder.path());
    let format = |name: &str| {
        let text = SlottedFile::new(folder.path().join(name).join("meta")).load().expect("reads");
        serde_json::from_slice::<serde_json::Value>(&text).expect("is JSON")["format"].clone()
    };
    from.write(0, &[7; 4096]).expect("writes");
    let to = shadow_of(&from, folder.path(), &[]);
    assert_eq!((format("source"), format("shadow")), (1.into(), 2.into()));
    to.write(0, &[8; 4096]).expect("writes");
    assert!(to.end_wants().expect("settles"));
    assert_eq!(format("shadow"), 1);
}

/// What `wanted` says comes.
fn fetch(from: &Replica, to: &Replica, blocks: Range<u64>) {
    for version in to.wanted(blocks).expect("reads") {
        let stamp = version.stamp.expect("was written");
        let data = from.held(version.blocks.clone(), stamp).expect("reads").expect("has it");
        to.arrive(version.blocks.start, stamp, Contents::Data(&data)).expect("takes it");
    }
}

#[test]
fn a_read_that_takes_no_lock_finds_nothing_of_what_is_absent_and_all_of_what_has_come() {
    let folder = tempfile::tempdir().expect("a folder");
    let from = source(folder.path());
    from.write(0, &vec![7; 4 * BLOCK as usize]).expect("writes");
    assert!(!from.is_partial(), "nothing can be absent at whoever made it");
    let to = shadow_of(&from, folder.path(), &[]);
    let mut bytes = vec![1; 512];
    // Where the file has something of its own, so that it would be found.
    to.data.write(BLOCK, &[3; BLOCK as usize]).expect("writes");
    assert_eq!((to.is_partial(), to.read_now(BLOCK, &mut bytes)), (true, 0));
    assert_eq!(bytes, [1; 512], "nothing was read");
    fetch(&from, &to, 1..2);
    assert_eq!((to.read_now(BLOCK, &mut bytes), &bytes[..]), (512, &[7; 512][..]));
    let mut edge = vec![1; BLOCK as usize];
    assert_eq!(to.read_now(BLOCK + 512, &mut edge), 0, "its end is absent");
    {
        let _a_write = to.lock();
        assert_eq!(to.read_now(BLOCK, &mut bytes), 0, "nobody waits for a write");
    }
    fetch(&from, &to, 0..4);
    assert!(to.is_partial(), "until it has said that all is here");
    assert!(to.end_wants().expect("settles"));
    assert!(!to.is_partial());
    let _a_write = to.lock();
    to.read(3 * BLOCK, &mut bytes).expect("waits for no lock");
    assert_eq!((to.read_now(2 * BLOCK, &mut bytes), &bytes[..]), (512, &[7; 512][..]));
}

#[test]
fn what_a_whole_volume_lacks_is_told_while_somebody_writes() {
    let folder = tempfile::tempdir().expect("a folder");
    let (from, to) = of_sevens(folder.path(), 4);
    assert_eq!((to.absent(), to.holders()), (Bytes(4 * BLOCK), vec![Holder("source".into())]));
    fetch(&from, &to, 0..4);
    assert_eq!((to.absent(), to.holders()), (Bytes(0), vec![Holder("source".into())]), "it has come, but not durably");
    assert!(to.end_wants().expect("settles"));
    for whole in [&from, &to] {
        let _a_write = whole.lock();
        assert_eq!((whole.absent(), whole.holders()), (Bytes(0), vec![]));
    }
}

#[test]
fn something_may_be_absent_from_the_grant_on_also_after_a_restart_and_not_at_a_secondary() {
    let folder = tempfile::tempdir().expect("a folder");
    let (_from, to) = of_sevens(folder.path(), 4);
    drop(to);
    let (to, _) = Replica::open(&folder.path().join("shadow")).expect("opens");
    assert!(to.is_partial());
    assert!(matches!(to.read(0, &mut [0; 512]), Err(VolumeError::Absent(_))));
    to.become_primary(Lineage(0), Generation(2)).expect("is ours");
    assert!(to.is_partial());
    to.become_secondary().expect("yields");
    assert!(!to.is_partial());
}

#[test]
fn settling_keeps_what_is_here_before_any_region_is_cold_and_a_holder_is_not_needed_then() {
    let folder = tempfile::tempdir().expect("a folder");
    let (from, to) = of_sevens(folder.path(), 4);
    let holder = Holder("source".into());
    to.settle().expect("settles");
    fetch(&from, &to, 0..4);
    to.settle().expect("settles");
    assert_eq!(to.left(&holder).expect("reads"), Some(4), "it was written a moment ago");
    to.settle().expect("settles");
    assert_eq!(to.left(&holder).expect("reads"), Some(0));
}

#[test]
fn what_was_here_of_an_earlier_hand_off_says_nothing_of_a_later_one() {
    let folder = tempfile::tempdir().expect("a folder");
    let from = source(folder.path());
    from.write(0, &[7; BLOCK as usize]).expect("writes");
    let to = shadow_of(&from, folder.path(), &[]);
    fetch(&from, &to, 0..1);
    // A flush that takes very long: there and back is quicker.
    let taken = to.lock().shadow.taken();
    assert!(to.end_wants().expect("settles"));
    hand_off(&to, &from, "shadow", 3);
    to.become_secondary().expect("yields");
    from.write(0, &[8; BLOCK as usize]).expect("writes");
    hand_off(&from, &to, "source", 4);
    fetch(&from, &to, 0..1);
    to.lock().shadow.keep(&taken).expect("is a word");
    assert_eq!(to.left(&Holder("source".into())).expect("reads"), Some(1), "its contents are not durable yet");
}

#[test]
fn a_volume_that_is_not_whole_is_neither_cached_elsewhere_nor_stamped_anew_nor_is_it_anybodys_cache() {
    let folder = tempfile::tempdir().expect("a folder");
    let (from, to) = of_sevens(folder.path(), 4);
    assert!(matches!(to.begin_sure(Who::Precache), Err(VolumeError::Shadow(4))));
    assert!(matches!(to.restamp_all(), Err(VolumeError::Shadow(4))));
    let shadow = crate::mirror::MirrorError::Volume(VolumeError::Shadow(4)).to_string();
    let refused = crate::precache::Target::new(&to, None).expect_err("is refused");
    assert_eq!(refused.to_string(), shadow);
    fetch(&from, &to, 0..4);
    assert!(to.end_wants().expect("settles"));
    assert!(to.begin_sure(Who::Precache).is_ok() && to.restamp_all().is_ok());
}

#[test]
fn a_cache_that_is_told_what_it_will_have_to_fetch_is_an_image_no_more_and_takes_no_more_blocks_as_one() {
    let folder = tempfile::tempdir().expect("a folder");
    let from = source(folder.path());
    from.write(0, &[7; BLOCK as usize]).expect("writes");
    let to = Replica::create(&folder.path().join("shadow"), VolumeId(1), Bytes(SIZE)).expect("creates");
    let (mut session, _) = crate::precache::Target::new(&to, None).expect("begins");
    let epoch = from.stamp(0).expect("reads").expect("was written");
    to.set_complete(Some(crate::Complete { epoch, at_unix_ms: 1, image: true, moment: None })).expect("is one");
    to.begin_wants().expect("begins");
    assert_eq!(to.complete(), None);
    let mut zeroes = vec![crate::mirror::ZEROES];
    zeroes.extend([0_u64.to_le_bytes(), 1_u64.to_le_bytes()].concat());
    epoch.encode(&mut zeroes);
    let refused = session.handle(&zeroes, &to).expect_err("is refused");
    assert!(matches!(refused, crate::mirror::MirrorError::Volume(VolumeError::Frozen)), "{refused}");
    drop(to);
    let (to, _) = Replica::open(&folder.path().join("shadow")).expect("opens");
    assert_eq!(to.complete(), None, "durably");
}

#[test]
fn a_write_that_fails_over_what_is_absent_leaves_it_to_come_as_it_was() {
    let folder = tempfile::tempdir().expect("a folder");
    let (_from, to) = of_sevens(folder.path(), 4);
    to.write(0, &[8; BLOCK as usize]).expect("writes");
    let (here, there) = (to.stamp(0).expect("reads"), to.stamp(1).expect("reads"));
    to.end_epoch().expect("ends");
    let failed = to.write_by(0, 2 * BLOCK, || Err(io::ErrorKind::StorageFull.into()));
    assert!(matches!(failed, Err(VolumeError::Io { .. })), "{failed:?}");
    assert!(to.stamp(0).expect("reads") > here, "it may be another now");
    assert_eq!(to.stamp(1).expect("reads"), there);
    assert_eq!(to.absent(), Bytes(3 * BLOCK));
}

#[test]
fn a_replica_that_lacks_something_is_not_whole_whoever_owns_it_and_until_it_was_brought_all() {
    let folder = tempfile::tempdir().expect("a folder");
    let from = source(folder.path());
    from.write(0, &vec![7; 4 * BLOCK as usize]).expect("writes");
    let stamp = from.stamp(0).expect("reads").expect("was written");
    let told = Replica::create(&folder.path().join("told"), VolumeId(1), Bytes(SIZE)).expect("creates");
    told.begin_wants().expect("begins");
    assert!(told.is_whole(), "half of what is wanted is nothing");
    told.want(0..4, stamp, &[Holder("source".into())]).expect("is told");
    told.finish_wants(Lineage(0)).expect("is told");
    assert!(!told.is_whole(), "it would begin with what it had");

    let to = shadow_of(&from, folder.path(), &[]);
    assert!(from.is_whole() && !to.is_whole());
    to.become_secondary().expect("yields");
    assert!(!to.is_whole(), "what it never had is not here for being the next one's to fetch");
    to.close().expect("closes");
    let (to, _) = Replica::open(&folder.path().join("shadow")).expect("opens");
    assert!(!to.is_whole());
    let (mut target, first) = crate::mirror::Target::new(&to).expect("begins");
    let mut mirror = crate::mirror::Source::default();
    from.become_primary(Lineage(0), Generation(3)).expect("takes it back");
    first.all(&to).expect("reads").iter().for_each(|message| mirror.handle(message, &from).expect("takes"));
    for last in [false, true] {
        if last {
            from.freeze();
            mirror.stop();
        }
        loop {
            let messages = mirror.poll(&from).expect("reads");
            if messages.is_empty() {
                break;
            }
            for message in messages {
                mirror.handle(&target.handle(&message, &to).expect("takes"), &from).expect("takes");
            }
        }
    }
    assert_eq!(mirror.state(), crate::mirror::State::Complete);
    assert!(to.is_whole());
}

#[test]
fn a_pre_cache_begins_at_no_replica_whose_image_is_not_in_its_place_yet() {
    let folder = tempfile::tempdir().expect("a folder");
    let to = Replica::create(folder.path(), VolumeId(1), Bytes(SIZE)).expect("creates");
    to.begin_redo().expect("begins");
    assert!(to.redoes() && crate::precache::Target::new(&to, None).is_err(), "the journal would be overwritten");
}

#[test]
fn what_comes_to_a_shadow_volume_that_was_ended_is_not_taken() {
    let folder = tempfile::tempdir().expect("a folder");
    let (from, to) = of_sevens(folder.path(), 4);
    let version = to.wanted(0..4).expect("reads").remove(0);
    let stamp = version.stamp.expect("was written");
    let data = from.held(version.blocks.clone(), stamp).expect("reads").expect("has it");
    for _ in 0..2 {
        to.end().expect("closes");
        assert!(to.arrive(version.blocks.start, stamp, Contents::Data(&data)).is_err());
    }
    assert_eq!(to.absent(), Bytes(4 * BLOCK));
    drop(to);
    let (to, opened) = Replica::open(&folder.path().join("shadow")).expect("opens");
    assert_eq!((opened.clean, opened.doubted, to.absent()), (true, 0, Bytes(4 * BLOCK)));
}

#[test]
fn what_is_told_again_and_taken_back_is_counted_as_it_is_found_after_a_restart() {
    let folder = tempfile::tempdir().expect("a folder");
    let (place, blocks) = (folder.path().join("to"), SIZE / BLOCK);
    let holders = ["a", "b", "c"].map(|name| Holder(name.into()));
    for seed in 0..4 {
        let mut rng = SmallRng::seed_from_u64(seed);
        let to = Replica::create(&place, VolumeId(1), Bytes(SIZE)).expect("creates");
        to.begin_wants().expect("begins");
        for _ in 0..500 {
            let from = rng.random_range(0..blocks);
            let run = from..(from + rng.random_range(1..200)).min(blocks);
            if rng.random_range(0..4) == 0 {
                to.want_nothing(run).expect("is told");
            } else {
                let epoch = godwit_units::Epoch(rng.random_range(1..4));
                let stamp = Stamp { lineage: Lineage(0), generation: Generation(1), epoch };
                let first = rng.random_range(0..3);
                to.want(run, stamp, &holders[first..=rng.random_range(first..3)]).expect("is told");
            }
        }
        to.finish_wants(Lineage(0)).expect("knows everything");
        to.become_primary(Lineage(0), Generation(2)).expect("takes over");
        let counts = |to: &Replica| {
            let wanted = to.wanted(0..blocks).expect("reads");
            let of = |holder: Option<&Holder>| {
                let named = wanted.iter().filter(|v| holder.is_none_or(|holder| v.holders.contains(holder)));
                named.map(|v| v.blocks.end - v.blocks.start).sum::<u64>()
            };
            assert_eq!(to.absent(), Bytes(of(None) * BLOCK));
            let left = holders.each_ref().map(|holder| to.left(holder).expect("reads"));
            assert_eq!(left, holders.each_ref().map(|holder| Some(of(Some(holder)))));
            (to.absent(), left)
        };
        let before = counts(&to);
        assert!(before.0 > Bytes(0));
        drop(to);
        let (to, _) = Replica::open(&place).expect("opens");
        to.resume().expect("is its owner's");
        assert_eq!(counts(&to), before);
        drop(to);
        std::fs::remove_dir_all(&place).expect("removes");
    }
}
