use super::*;
use crate::shadow::tests::{SIZE, hand_off, source};
use godwit_units::{Generation, VolumeId};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

#[test]
fn a_block_that_is_written_again_in_the_same_epoch_is_said_once() {
    let folder = tempfile::tempdir().expect("a folder");
    let from = source(folder.path());
    let to = Replica::create(&folder.path().join("to"), VolumeId(1), Bytes(SIZE)).expect("creates");
    let (mut target, first) = Target::new(&to).expect("begins");
    let mut source = Source::new(Holder("from".into()), Lineage(0), &[]);
    source.handle(&first.all(&to).expect("reads")[0], &from).expect("takes");
    let mut say = |source: &mut Source| {
        let messages = source.poll(&from).expect("reads");
        messages.iter().for_each(|m| assert!(target.handle(m, &to).expect("takes").is_none()));
        messages.len()
    };
    let write = |source: &mut Source| {
        let blocks = from.write(3 * BLOCK, &[1; BLOCK as usize]).expect("writes").blocks;
        source.guest_wrote(blocks, &from);
    };
    write(&mut source);
    assert_eq!(say(&mut source), 1);
    write(&mut source);
    assert_eq!(say(&mut source), 0, "its stamp is the same");
    from.roll().expect("rolls");
    write(&mut source);
    assert_eq!(say(&mut source), 1, "its stamp is another");
}

#[test]
fn the_target_has_a_block_as_it_is_here_if_it_did_not_differ_and_was_not_written_since() {
    let folder = tempfile::tempdir().expect("a folder");
    let from = source(folder.path());
    from.write(0, &[7; 8 * BLOCK as usize]).expect("writes");
    let to = Replica::create(&folder.path().join("to"), VolumeId(1), Bytes(SIZE)).expect("creates");
    let (_, first) = Target::new(&to).expect("begins");
    let mut source = Source::new(Holder("from".into()), Lineage(0), &[]);
    let there = |source: &Source| (0..12).filter(|block| source.is_there(BlockIndex(*block))).collect::<Vec<_>>();
    assert!(there(&source).is_empty(), "nothing is known of the target");
    source.handle(&first.all(&to).expect("reads")[0], &from).expect("takes");
    assert_eq!(there(&source), [8, 9, 10, 11]);
    let blocks = from.write(9 * BLOCK, &[1; BLOCK as usize]).expect("writes").blocks;
    source.guest_wrote(blocks, &from);
    assert_eq!(there(&source), [8, 10, 11]);
    while !source.poll(&from).expect("reads").is_empty() {}
    assert_eq!(there(&source), [8, 10, 11], "that it was said does not bring it there");
}

#[test]
fn what_the_guest_writes_while_stamps_are_compared_is_said_though_the_comparison_has_passed_by() {
    for waits in [false, true] {
        what_is_written_meanwhile_is_said(waits);
    }
}

/// Meanwhile is between two windows, or while the comparison `waits` for more of what the target has.
fn what_is_written_meanwhile_is_said(waits: bool) {
    walk::AT_ONCE.set(1);
    let folder = tempfile::tempdir().expect("a folder");
    let from = source(folder.path());
    for block in [0, 3 * REGION] {
        from.write(block * BLOCK, &[7; BLOCK as usize]).expect("writes");
    }
    let to = Replica::create(&folder.path().join("to"), VolumeId(1), Bytes(SIZE)).expect("creates");
    let (mut target, first) = Target::new(&to).expect("begins");
    let mut source = Source::new(Holder("from".into()), Lineage(0), &[]);
    let mut last = first.all(&to).expect("reads");
    if waits {
        let other = Stamp { lineage: Lineage(0), generation: Generation(1), epoch: godwit_units::Epoch(0) };
        let run = run_message(HAVE, &(3 * REGION..3 * REGION + 1), other, &[]);
        source.handle(&[&[HAVE, crate::runs::MORE], &run[1..]].concat(), &from).expect("takes");
        while source.is_comparing() {
            source.poll(&from).expect("reads");
        }
    } else {
        last.drain(..).for_each(|m| source.handle(&m, &from).expect("takes"));
        assert!(source.is_comparing(), "that was the first region");
    }
    assert_eq!(source.state(), State::Exchanging);
    for block in [5, 2 * REGION, 3 * REGION + 5] {
        let blocks = from.write(block * BLOCK, &[8; BLOCK as usize]).expect("writes").blocks;
        source.guest_wrote(blocks, &from);
    }
    last.iter().for_each(|m| source.handle(m, &from).expect("takes"));
    let mut say = |source: &mut Source| {
        for message in source.poll(&from).expect("reads") {
            if let Some(answer) = target.handle(&message, &to).expect("takes") {
                source.handle(&answer, &from).expect("takes");
            }
        }
    };
    while !source.is_level() {
        say(&mut source);
    }
    assert_eq!(source.figures().differing, Bytes(5 * BLOCK));
    assert!(!source.is_there(BlockIndex(5)) && source.is_there(BlockIndex(6)));
    from.freeze();
    source.stop(&from).expect("settles");
    while source.state() != State::Complete {
        say(&mut source);
    }
    to.become_primary(Lineage(0), Generation(2)).expect("takes over");
    assert_eq!(to.absent(), Bytes(5 * BLOCK));
}

#[test]
fn what_is_said_after_the_stop_does_not_grow_with_the_volume() {
    let folder = tempfile::tempdir().expect("a folder");
    for megabytes in [1_usize, 12] {
        let from = source(&folder.path().join(format!("{megabytes}")));
        from.write(0, &vec![7; megabytes << 20]).expect("writes");
        let to =
            Replica::create(&folder.path().join(format!("to{megabytes}")), VolumeId(1), Bytes(SIZE)).expect("creates");
        let said = hand_off(&from, &to, "from", 2);
        let differing = Bytes((megabytes as u64) << 20);
        assert_eq!(said.figures(), Figures { differing, ..Figures::default() });
        assert_eq!(to.absent(), Bytes((megabytes as u64) << 20));
    }
}

#[test]
fn the_order_of_first_accesses_goes_ahead_and_a_holder_of_a_block_is_named_to_the_third_site() {
    let folder = tempfile::tempdir().expect("a folder");
    let a = source(folder.path());
    a.write(0, &vec![7; 8 * BLOCK as usize]).expect("writes");
    let [b, c] =
        ["b", "c"].map(|name| Replica::create(&folder.path().join(name), VolumeId(1), Bytes(SIZE)).expect("creates"));
    hand_off(&a, &b, "a", 2);
    a.become_secondary().expect("yields");
    b.write(2 * BLOCK, &[9; BLOCK as usize]).expect("writes");
    hand_off(&b, &c, "b", 3);
    b.become_secondary().expect("yields");
    let holders: Vec<_> = c.wanted(0..8).expect("reads").into_iter().map(|v| (v.blocks, v.holders)).collect();
    let of = |name: &str| vec![Holder(name.into())];
    assert_eq!(holders, [(0..2, of("a")), (2..3, of("b")), (3..8, of("a"))]);

    let mut source = Source::new(Holder("c".into()), Lineage(0), &[7..9, 1..2]);
    let (mut target, first) = Target::new(&a).expect("begins");
    first.all(&a).expect("reads").iter().for_each(|m| source.handle(m, &c).expect("takes"));
    for message in source.poll(&c).expect("reads") {
        target.handle(&message, &a).expect("takes");
    }
    assert_eq!(target.order(), [7..9, 1..2]);
}

#[test]
fn what_is_no_message_is_refused_by_both_sides_and_few_bytes_do_not_make_a_large_table() {
    let folder = tempfile::tempdir().expect("a folder");
    let from = source(folder.path());
    let to = Replica::create(&folder.path().join("to"), VolumeId(1), Bytes(1 << 40)).expect("creates");
    let mut rng = SmallRng::seed_from_u64(11);
    let (mut target, _) = Target::new(&to).expect("begins");
    for _ in 0..3000 {
        let mut message: Vec<u8> = (0..rng.random_range(0..80)).map(|_| rng.random()).collect();
        if let Some(kind) = message.first_mut() {
            *kind %= 8;
        }
        let _ = Source::new(Holder("from".into()), Lineage(0), &[]).handle(&message, &from);
        let _ = target.handle(&message, &to);
    }
    let stamp = Stamp { lineage: Lineage(0), generation: Generation(1), epoch: godwit_units::Epoch(1) };
    let want = |run: Range<u64>| said(&[Holder("x".into())], &run_message(0, &run, stamp, &[])[1..]);
    assert!(target.handle(&want(0..REGION), &to).is_ok());
    for run in [0..REGION + 1, u64::MAX - 1..u64::MAX, (1 << 28)..(1 << 28) + 1] {
        assert!(target.handle(&want(run), &to).is_err());
    }
    let (mut target, _) = Target::new(&to).expect("begins");
    let changed = [&[FINAL][..], &[0; 40]].concat();
    assert!(matches!(target.handle(&changed, &to), Err(FetError::Digest)));
    assert!(!target.is_complete());
}
