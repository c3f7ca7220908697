use super::*;
use crate::shadow::Holder;
use crate::shadow::tests::{SIZE, shadow_of, source};

fn runs_of(order: &mut FillOrder, replica: &Replica) -> Vec<Range<u64>> {
    let mut taken = BlockSet::default();
    let mut runs = vec![];
    loop {
        match order.next(replica, 16, |_, b| !taken.contains(BlockIndex(b))).expect("reads") {
            Next::Bring(version) => {
                taken.insert(version.blocks.clone());
                runs.push(version.blocks);
            }
            Next::Looked => {}
            Next::Nothing => return runs,
        }
    }
}

#[test]
fn a_fill_follows_the_recorded_order_then_what_lies_beside_recent_reads_then_what_was_written_longest_ago() {
    let folder = tempfile::tempdir().expect("a folder");
    let from = source(folder.path());
    for (blocks, epoch) in [(1000..1004_u64, 0), (2000..2004, 1), (400..404, 2), (800..804, 3), (50..54, 4)] {
        for _ in 0..epoch {
            from.roll().expect("rolls");
        }
        from.write(blocks.start * BLOCK, &vec![7; 4 * BLOCK as usize]).expect("writes");
    }
    let to = shadow_of(&from, folder.path(), &[]);
    let mut order = FillOrder::new(vec![400..402, 3000..3004, 50..51]);
    // A read that ended before 800..804.
    order.read(&(700..799));
    assert_eq!(
        runs_of(&mut order, &to),
        [400..402, 50..51, 800..804, 1000..1004, 2000..2004, 402..404, 51..54],
        "recorded; beside; by age"
    );
}

#[test]
fn what_was_written_longest_ago_is_found_in_windows_as_at_once_and_others_have_a_turn_in_between() {
    let folder = tempfile::tempdir().expect("a folder");
    let from = source(folder.path());
    let regions = SIZE / BLOCK / crate::stamps::REGION;
    // Later ones at the beginning, and one that is written again.
    for n in (0..regions).rev().chain([regions / 2]) {
        from.write((n * crate::stamps::REGION + n) * BLOCK, &vec![7; 3 * BLOCK as usize]).expect("writes");
        from.roll().expect("rolls");
    }
    let to = shadow_of(&from, folder.path(), &[]);
    let at_once = runs_of(&mut FillOrder::default(), &to);
    assert_eq!(at_once.len() as u64, regions);
    assert!(at_once[0].start > at_once[1].start);
    crate::walk::AT_ONCE.set(1);
    let mut order = FillOrder::default();
    let looks = (0..).take_while(|_| order.next(&to, 16, |_, _| true).expect("reads") == Next::Looked).count();
    assert_eq!(looks as u64, regions - 1);
    assert_eq!(runs_of(&mut FillOrder::default(), &to), at_once);
}

#[test]
fn first_accesses_are_recorded_once_kept_with_the_volume_and_bounded() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut first = FirstAccess::load(folder.path());
    for blocks in [9..12, 3..4, 4..5, 10..14, 3..5] {
        first.touched(blocks);
    }
    assert_eq!(first.runs(), [9..12, 3..5, 12..14]);
    first.take_fresh().expect("something was added").store(folder.path()).expect("writes");
    assert!(first.take_fresh().is_none());
    assert_eq!(FirstAccess::load(folder.path()).runs(), first.runs());
    assert!(first.is_whole());
    // What the next host recorded comes behind it, and is to be stored.
    let mut next = FirstAccess::default();
    next.touched(11..16);
    let mut both = next.after(FirstAccess::load(folder.path()));
    assert_eq!(both.runs(), [9..12, 3..5, 12..16]);
    assert!(both.take_fresh().is_some());
    assert!(FirstAccess::default().after(FirstAccess::load(folder.path())).take_fresh().is_none(), "nothing is new");
    for block in 0..MOST_RUNS as u64 + 10 {
        first.touched(block * 2 + 100..block * 2 + 101);
    }
    assert_eq!(first.runs().len(), MOST_RUNS);
    assert!(!first.is_whole(), "there was no room for all");
    std::fs::write(folder.path().join("order"), [255; 100]).expect("writes");
    assert!(FirstAccess::load(folder.path()).runs().is_empty(), "what makes no sense is no order");
}

#[test]
fn an_order_that_names_blocks_behind_the_end_harms_nobody() {
    let folder = tempfile::tempdir().expect("a folder");
    let from = source(folder.path());
    from.write(0, &[7; BLOCK as usize]).expect("writes");
    let to = shadow_of(&from, folder.path(), &[Holder("elsewhere".into())]);
    let mut order = FillOrder::new(vec![SIZE / BLOCK - 1..u64::MAX, u64::MAX - 1..u64::MAX]);
    order.read(&(u64::MAX - 2..u64::MAX));
    let found: Vec<u64> = runs_of(&mut order, &to).into_iter().flatten().collect();
    assert_eq!(found, [0]);
}

#[test]
fn an_order_from_another_site_takes_no_more_memory_than_its_length() {
    let told = FirstAccess::told(vec![0..1 << 60, 5..6, 9..9 + crate::stamps::REGION, 0..crate::stamps::REGION + 1]);
    assert_eq!(told.runs(), [5..6, 9..9 + crate::stamps::REGION]);
}
