use super::*;
use crate::blocks::BLOCK;
use crate::fet;
use crate::has::{Ends, Has};
use crate::runs::LAST;
use crate::shadow::Holder;
use crate::shadow::tests::{SIZE, hand_off, source};
use crate::stamps::REGION;
use godwit_units::{Bytes, Generation, Lineage, VolumeId};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use std::path::Path;

fn empty(folder: &Path) -> Replica {
    Replica::create(folder, VolumeId(1), Bytes(SIZE)).expect("creates")
}

/// What a guest writes here and there: whole blocks.
fn write(replica: &Replica, rng: &mut SmallRng) {
    for _ in 0..rng.random_range(1..40) {
        let (block, count) = (rng.random_range(0..SIZE / BLOCK - 8), rng.random_range(1..8_u64));
        let fill: u8 = rng.random_range(1..=255);
        replica.write(block * BLOCK, &vec![fill; (count * BLOCK) as usize]).expect("writes");
        if rng.random_bool(0.2) {
            replica.roll().expect("rolls");
        }
    }
}

#[test]
fn a_table_that_is_read_in_windows_is_the_one_that_is_read_at_once() {
    for seed in 0..20 {
        let folder = tempfile::tempdir().expect("a folder");
        let replica = source(folder.path());
        write(&replica, &mut SmallRng::seed_from_u64(seed));
        let [windows, at_once] = [1, WINDOW as usize].map(|regions| {
            AT_ONCE.set(regions);
            replica.stamp_runs().expect("reads")
        });
        assert_eq!(windows, at_once, "seed {seed}");
    }
}

/// A hand-off that breaks when all is compared.
fn compare_in_vain(from: &Replica, to: &Replica) {
    let (_, first) = fet::Target::new(to).expect("begins");
    let mut source = fet::Source::new(Holder("in vain".into()), Lineage(0), &[]);
    first.all(to).expect("reads").iter().for_each(|message| source.handle(message, from).expect("takes"));
    while source.is_comparing() {
        source.poll(from).expect("reads");
    }
}

#[test]
fn a_comparison_in_windows_finds_what_one_at_once_does_of_a_whole_volume_and_of_one_that_is_not() {
    let (mut alike, mut differing) = (0, 0);
    for seed in 0..12 {
        let [windows, at_once] = [1, WINDOW as usize].map(|regions| {
            AT_ONCE.set(regions);
            let mut rng = SmallRng::seed_from_u64(seed);
            let folder = tempfile::tempdir().expect("a folder");
            let a = source(folder.path());
            let [b, c] = ["b", "c"].map(|name| empty(&folder.path().join(name)));
            write(&a, &mut rng);
            let first = hand_off(&a, &b, "a", 2).figures();
            a.become_secondary().expect("yields");
            write(&b, &mut rng);
            // What it has said by its stamps, and is written again, has others in the next one.
            compare_in_vain(&b, &c);
            write(&b, &mut rng);
            let second = hand_off(&b, &c, "b", 3).figures();
            b.become_secondary().expect("yields");
            write(&c, &mut rng);
            // The first site has much of it.
            let third = hand_off(&c, &a, "c", 4).figures();
            (first, second, third, a.wanted(0..SIZE / BLOCK).expect("reads"))
        });
        assert_eq!(windows, at_once, "seed {seed}");
        (alike, differing) = (alike + windows.2.alike.0, differing + windows.2.differing.0);
    }
    assert!(alike > 0 && differing > 0, "{alike} and {differing}: too little was tried");
}

#[test]
fn neither_side_holds_more_of_a_comparison_than_a_window_and_a_message() {
    AT_ONCE.set(1);
    const MESSAGE: usize = 64;
    let window = REGION as usize / 2;
    let folder = tempfile::tempdir().expect("a folder");
    let (from, to) = (source(folder.path()), empty(&folder.path().join("to")));
    // Every other block, so that each is a run, and not the same ones.
    for block in (0..SIZE / BLOCK).step_by(2) {
        from.write(block * BLOCK, &[1; BLOCK as usize]).expect("writes");
    }
    hand_off(&from, &to, "from", 2);
    for block in (1..SIZE / BLOCK).step_by(4) {
        to.zero(block * BLOCK, BLOCK).expect("writes");
    }
    from.become_secondary().expect("yields");
    let (regions, runs) = ((SIZE / BLOCK / REGION) as usize, (SIZE / BLOCK / 2) as usize);
    assert!(runs > 2 * window, "{runs} runs in {regions} regions: nothing is seen of so few");
    let mut has = Has::new(&from, Ends::Last).expect("begins").in_messages_of(MESSAGE);
    let mut comparing = Comparing::begin(Who::HandOff, &to).expect("begins");
    let (mut most, mut found) = ([0; 2], None);
    while let Some(message) = has.next(&from).expect("reads") {
        comparing.take(&message[2..], SIZE / BLOCK, message[1] == LAST).expect("it makes sense");
        while found.is_none() && comparing.may_step() {
            found = comparing.step(&to).expect("reads").map(|found| (found.differing.len(), found.alike));
            most = [most[0].max(comparing.held()), most[1].max(has.held())];
        }
    }
    assert!(most[0] <= 2 * window + MESSAGE && most[1] <= window + MESSAGE, "{most:?} runs of {runs}");
    assert!(most[0] > MESSAGE && most[1] > MESSAGE, "{most:?}: they hold what they read");
    assert_eq!(found, Some((SIZE / BLOCK / 4, SIZE / BLOCK / 2)));
}

#[test]
fn what_was_unsure_has_a_new_stamp_whatever_the_guest_writes_meanwhile_and_what_is_broken_off_stays_unsure() {
    AT_ONCE.set(1);
    let folder = tempfile::tempdir().expect("a folder");
    let replica = source(folder.path());
    let write = |block: u64| replica.write(block * BLOCK, &[1; BLOCK as usize]).expect("writes");
    let stamps = || -> Vec<_> { (0..4).map(|region| replica.stamp(region * REGION).expect("reads")).collect() };
    // A mirror began, and the guest wrote: who knows what was passed on.
    replica.runs_to_compare().expect("reads");
    (0..4).for_each(|region| _ = write(region * REGION));
    let unsure = |replica: &Replica| replica.lock().meta.unsure;
    let before = (unsure(&replica), stamps());
    assert_ne!(before.0, SURE);

    let begin = || replica.begin_sure(Who::Precache).expect("begins").expect("there is something unsure");
    let mut broken = begin();
    assert!(replica.sure_on(&mut broken).expect("stamps"), "that was one window of four");
    assert_eq!(unsure(&replica), before.0);
    let mut sure = begin();
    while replica.sure_on(&mut sure).expect("stamps") {
        // Where it has been, and where it comes to.
        [7, 3 * REGION + 7].into_iter().for_each(|block| _ = write(block));
    }
    replica.sync_sure(&mut sure).expect("syncs");
    assert_eq!(unsure(&replica), before.0);
    replica.end_sure(&sure).expect("is sure");
    let after = stamps();
    assert!(after.iter().zip(&before.1).all(|(after, before)| after > before), "{after:?} after {before:?}");
    assert_eq!(unsure(&replica), SURE);
    assert!(replica.begin_sure(Who::Precache).expect("looks").is_none(), "nothing is unsure any more");
    assert!(replica.sure_on(&mut broken).is_err(), "it goes on with what somebody else has done");
    // They are there for good, and what the guest writes now has other ones.
    let last = after[0];
    write(0);
    assert!(replica.stamp(0).expect("reads") > last);
    let (runs, at) = (replica.stamp_runs().expect("reads"), folder.path().join("source"));
    replica.close().expect("closes");
    let (replica, _) = Replica::open(&at).expect("opens");
    assert_eq!((replica.stamp_runs().expect("reads"), unsure(&replica)), (runs, SURE));
}

#[test]
fn a_volume_that_changes_hands_is_not_made_sure_by_whom_it_was() {
    AT_ONCE.set(1);
    let folder = tempfile::tempdir().expect("a folder");
    let replica = source(folder.path());
    (0..4).for_each(|region| _ = replica.write(region * REGION * BLOCK, &[1; 512]).expect("writes"));
    replica.runs_to_compare().expect("reads");
    let mut sure = replica.begin_sure(Who::Precache).expect("begins").expect("there is something unsure");
    assert!(replica.sure_on(&mut sure).is_ok());
    replica.become_secondary().expect("yields");
    assert!(matches!(replica.sure_on(&mut sure), Err(VolumeError::Frozen)));
    replica.become_primary(Lineage(1), Generation(1)).expect("claims it");
    assert!(matches!(replica.end_sure(&sure), Err(VolumeError::Frozen)));
    assert_ne!(replica.lock().meta.unsure, SURE);
}

#[test]
fn nothing_is_compared_of_a_volume_that_changes_hands_though_it_comes_back() {
    AT_ONCE.set(1);
    for who in [Who::Mirror, Who::HandOff, Who::Precache] {
        let folder = tempfile::tempdir().expect("a folder");
        let replica = source(folder.path());
        (0..4).for_each(|region| _ = replica.write(region * REGION * BLOCK, &[1; 512]).expect("writes"));
        let mut comparing = Comparing::begin(who, &replica).expect("begins");
        comparing.take(&[], SIZE / BLOCK, true).expect("it has nothing");
        assert!(comparing.step(&replica).expect("reads").is_none(), "{who:?}: that was the first region");
        // What a move that was given up does in between changes nothing of that.
        replica.freeze();
        assert!(comparing.step(&replica).expect("reads").is_none());
        replica.become_secondary().expect("yields");
        assert!(matches!(comparing.step(&replica), Err(VolumeError::Frozen)), "{who:?}");
        if who == Who::Precache {
            assert!(matches!(replica.begin_sure(who), Err(VolumeError::Frozen)));
            assert!(Comparing::begin(who, &replica).is_err());
        }
        replica.become_primary(Lineage(0), Generation(3)).expect("comes back");
        assert!(matches!(comparing.step(&replica), Err(VolumeError::Frozen)), "{who:?}");
    }
}

/// Blocks of three regions and a part of a fourth: the last window is no whole one, and neither is its last region.
#[test]
fn a_volume_that_is_no_multiple_of_a_region_is_compared_to_its_end() {
    AT_ONCE.set(2);
    let blocks = 3 * REGION + 5;
    let folder = tempfile::tempdir().expect("a folder");
    let [a, b] = ["a", "b"]
        .map(|name| Replica::create(&folder.path().join(name), VolumeId(1), Bytes(blocks * BLOCK)).expect("creates"));
    a.become_primary(Lineage(0), Generation(1)).expect("is ours");
    let last = |replica: &Replica, fill: u8| {
        replica.write((blocks - 1) * BLOCK, &[fill; BLOCK as usize]).expect("writes");
    };
    // Over the end of the first window, and at the very end.
    a.write((2 * REGION - 3) * BLOCK, &[1; 6 * BLOCK as usize]).expect("writes");
    last(&a, 1);
    let first = hand_off(&a, &b, "a", 2).figures();
    a.become_secondary().expect("yields");
    assert_eq!((first.differing, first.alike), (Bytes(7 * BLOCK), Bytes(0)));
    last(&b, 2);
    let back = hand_off(&b, &a, "b", 3).figures();
    assert_eq!((back.differing, back.alike), (Bytes(BLOCK), Bytes(6 * BLOCK)));
}
