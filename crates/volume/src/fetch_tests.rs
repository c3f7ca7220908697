use super::*;
use crate::scrub::tests::open_hooked;
use crate::shadow::tests::{SIZE, shadow_of, source};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

const NOW: Duration = Duration::from_secs(100);
const BOTH: [Lane; 2] = [Lane::Demand, Lane::Fill];

fn holder() -> Holder {
    Holder("source".into())
}

/// A shadow volume, where its blocks are, and the session between them.
struct Pair {
    from: Replica,
    to: Replica,
    requester: Requester,
    server: Server,
    /// Bytes of contents that came.
    came: u64,
    _folder: tempfile::TempDir,
}

impl Pair {
    fn new(blocks: u64) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let from = source(folder.path());
        for block in 0..blocks {
            from.write(block * BLOCK, &vec![block as u8 | 1; BLOCK as usize]).expect("writes");
        }
        let to = shadow_of(&from, folder.path(), &[]);
        let mut requester = Requester::new(vec![]);
        requester.connected(holder());
        Self { from, to, requester, server: Server::new(), came: 0, _folder: folder }
    }

    /// Where other volumes of the trust domain may be.
    fn beside(blocks: u64, library: &Arc<Library>) -> Self {
        let mut it = Self::new(blocks);
        it.requester = Requester::with_library(vec![], &it.to, library.clone());
        it.requester.connected(holder());
        it
    }

    fn is_equal(&self) -> bool {
        let (mut ours, mut theirs) = (vec![0; SIZE as usize], vec![1; SIZE as usize]);
        self.to.read(0, &mut ours).expect("reads");
        self.from.read(0, &mut theirs).expect("reads");
        self.to.absent() == Bytes(0) && ours == theirs
    }

    /// All questions that can be asked now are.
    fn ask(&mut self) -> Vec<Lane> {
        let mut lanes = vec![];
        while let Some(question) = self.requester.poll(NOW, &self.to).expect("reads") {
            lanes.push(question.lane);
            self.server.handle(&question.message).expect("makes sense");
        }
        lanes
    }

    /// One answer; which blocks came.
    fn answer(&mut self) -> Option<(Lane, Vec<u64>)> {
        let Answer { kind, message, .. } = self.server.poll(&self.from, &BOTH).expect("reads")?;
        assert!(message.len() <= MAX_MESSAGE);
        self.came += message.len() as u64 / BLOCK * BLOCK;
        let taken = self.requester.handle(&holder(), &message, NOW, &self.to).expect("makes sense");
        Some((kind, taken.runs().flatten().collect()))
    }

    fn finish(&mut self) {
        self.ask();
        while self.answer().is_some() {
            self.ask();
        }
    }
}

#[test]
fn a_read_of_512_bytes_brings_their_block_first_and_each_byte_once() {
    let mut pair = Pair::new(3000);
    pair.ask();
    // The fill's window is full of questions, and some of it has come.
    assert!(pair.answer().is_some_and(|(lane, _)| lane == Lane::Fill));
    // One block that the fill has asked for, and one that it has not.
    for block in [1500, 2900] {
        pair.requester.demand(block..block + 1, NOW, &pair.to).expect("reads");
    }
    assert_eq!(pair.ask().iter().filter(|l| **l == Lane::Demand).count(), 2);
    assert_eq!(pair.answer(), Some((Lane::Demand, vec![1500])));
    assert_eq!(pair.answer(), Some((Lane::Demand, vec![2900])));
    pair.finish();
    assert_eq!(pair.to.absent(), Bytes(0));
    assert_eq!(pair.came, 3000 * BLOCK, "no byte twice");
    let (demand, fill) = pair.requester.fetched();
    assert_eq!((demand, demand.0 + fill.0), (Bytes(2 * BLOCK), 3000 * BLOCK));
    let (mut ours, mut theirs) = (vec![0; SIZE as usize], vec![1; SIZE as usize]);
    pair.to.read(0, &mut ours).expect("reads");
    pair.from.read(0, &mut theirs).expect("reads");
    assert!(ours == theirs);
}

#[test]
fn what_is_written_between_a_look_in_the_library_and_the_take_changes_nothing_of_what_was_asked_for() {
    let library = Arc::new(Library::new(godwit_content::Key::new([9; 32]), Bytes::mib(1)));
    let mut first = Pair::beside(300, &library);
    first.finish();
    let mut second = Pair::beside(300, &library);
    second.ask();
    let opener = second.requester.opener();
    let mut held = vec![0; 300 * BLOCK as usize];
    second.from.read(0, &mut held).expect("reads");
    let (mut guests, mut looked) = (vec![], 0);
    while let Some(Answer { message, .. }) = second.server.poll(&second.from, &BOTH).expect("reads") {
        let arrival = opener.open(&message, &second.to).expect("makes sense");
        looked += arrival.found.as_ref().map_or(0, |found| found.present.len());
        // The guest overwrites one of its blocks; and where they were found they are no more.
        let block = arrival.run.start;
        second.to.write(block * BLOCK, &[0; BLOCK as usize]).expect("writes");
        first.to.zero(0, 300 * BLOCK).expect("writes");
        let taken = second.requester.take(&holder(), &arrival, NOW, &second.to).expect("makes sense");
        assert!(!taken.contains(BlockIndex(block)), "the guest's write is newer");
        arrival.learn();
        guests.push(block);
        first.to.write(0, &held).expect("writes");
        second.ask();
    }
    assert!(looked > 0, "something was found by name");
    for block in guests {
        held[(block * BLOCK) as usize..((block + 1) * BLOCK) as usize].fill(0);
    }
    let mut ours = vec![1; held.len()];
    second.to.read(0, &mut ours).expect("all is here");
    assert!(ours == held);
}

#[test]
fn what_another_volume_of_the_domain_has_here_is_found_by_name_and_what_is_not_comes_in_full() {
    let library = Arc::new(Library::new(godwit_content::Key::new([9; 32]), Bytes::mib(1)));
    // The same 128 blocks, again and again: they come once, but for what was asked for before the holder knew of them.
    let mut first = Pair::beside(3000, &library);
    first.finish();
    assert!(first.is_equal() && first.came < 400 * BLOCK, "{}", first.came);
    let mut second = Pair::beside(3000, &library);
    second.finish();
    assert!(second.is_equal() && second.came < 40 * BLOCK, "{}", second.came);
    assert!(second.requester.named() > Bytes(2900 * BLOCK));
    let (demand, fill) = second.requester.fetched();
    assert_eq!((demand, fill), (Bytes(0), Bytes(3000 * BLOCK)));

    // All is lost while the third one's names are under way; and a demand is answered in full, so that nobody waits twice.
    let mut third = Pair::beside(3000, &library);
    third.ask();
    for _ in 0..20 {
        third.answer();
        third.ask();
    }
    library.lose();
    third.requester.demand(2990..2991, NOW, &third.to).expect("reads");
    third.ask();
    let before = third.came;
    assert_eq!(third.answer(), Some((Lane::Demand, vec![2990])));
    assert_eq!(third.came - before, BLOCK);
    third.finish();
    assert!(third.is_equal() && third.came > 128 * BLOCK, "{}", third.came);
    assert!(third.requester.starving(NOW).is_none());
}

#[test]
fn demands_go_first_and_the_fill_goes_on_beside_any_number_of_them() {
    let mut pair = Pair::new(4000);
    pair.ask();
    let (mut demands, mut fills, mut longest, mut row) = (0, 0, 0, 0);
    for block in (2048..4000).rev().step_by(2) {
        pair.requester.demand(block..block + 1, NOW, &pair.to).expect("reads");
        pair.ask();
    }
    for _ in 0..900 {
        match pair.answer().expect("more is asked than answered").0 {
            Lane::Demand => {
                demands += 1;
                row += 1;
                longest = longest.max(row);
            }
            Lane::Fill => {
                fills += 1;
                row = 0;
            }
        }
    }
    assert!(longest <= TURNS && fills >= 900 / (TURNS + 1) && demands > 800, "{demands} {fills} {longest}");
}

#[test]
fn where_only_one_lane_has_room_only_what_may_go_there_goes_and_the_fills_turn_goes_among_demands() {
    let mut pair = Pair::new(4000);
    pair.ask();
    assert_eq!(pair.server.poll(&pair.from, &[Lane::Demand]).expect("reads"), None, "nobody demands anything");
    for block in 1200..1300 {
        pair.requester.demand(block * 2..block * 2 + 1, NOW, &pair.to).expect("reads");
    }
    pair.ask();
    let answer = pair.server.poll(&pair.from, &[Lane::Fill]).expect("reads").expect("is asked");
    assert_eq!((answer.kind, answer.by), (Lane::Fill, Lane::Fill));
    let mut kinds = vec![];
    for _ in 0..=TURNS {
        let answer = pair.server.poll(&pair.from, &[Lane::Demand]).expect("reads").expect("is asked");
        assert_eq!(answer.by, Lane::Demand);
        kinds.push(answer.kind);
    }
    assert_eq!(kinds.iter().filter(|k| **k == Lane::Fill).count(), 1, "{kinds:?}");
    assert_eq!(pair.server.poll(&pair.from, &[]).expect("reads"), None);
}

#[test]
fn a_cut_starves_only_what_is_absent_and_what_was_asked_is_asked_again() {
    let mut pair = Pair::new(100);
    pair.requester.demand(7..9, NOW, &pair.to).expect("reads");
    pair.ask();
    pair.requester.disconnected(&holder());
    pair.server = Server::new();
    assert_eq!(pair.requester.starving(NOW + PAUSE_AFTER), Some(PAUSE_AFTER));
    pair.to.write(50 * BLOCK, &[9; BLOCK as usize]).expect("needs nobody");
    assert!(pair.ask().is_empty(), "nobody is there");
    pair.requester.connected(holder());
    assert_eq!(pair.ask()[0], Lane::Demand);
    assert_eq!(pair.answer(), Some((Lane::Demand, vec![7, 8])));
    assert_eq!(pair.requester.starving(NOW + PAUSE_AFTER), None);
    pair.finish();
    assert_eq!(pair.to.absent(), Bytes(0));
}

#[test]
fn a_block_that_the_guest_writes_while_it_is_on_its_way_stays_as_the_guest_wrote_it() {
    let mut pair = Pair::new(4);
    pair.requester.demand(1..2, NOW, &pair.to).expect("reads");
    pair.ask();
    pair.to.write(BLOCK, &[99; BLOCK as usize]).expect("writes");
    assert_eq!(pair.answer(), Some((Lane::Demand, vec![])));
    let mut block = [0; BLOCK as usize];
    pair.to.read(BLOCK, &mut block).expect("is here");
    assert_eq!(block, [99; BLOCK as usize]);
}

#[test]
fn what_is_on_its_way_when_the_guest_has_written_all_of_it_is_thrown_away() {
    let mut pair = Pair::new(1);
    pair.requester.demand(0..1, NOW, &pair.to).expect("reads");
    pair.ask();
    pair.to.write(0, &[99; BLOCK as usize]).expect("writes");
    assert!(pair.to.end_wants().expect("settles"));
    assert_eq!(pair.answer(), Some((Lane::Demand, vec![])));
    let mut block = [0; BLOCK as usize];
    pair.to.read(0, &mut block).expect("is here");
    assert_eq!(block, [99; BLOCK as usize]);
}

#[test]
fn a_holder_hears_that_it_may_let_go_when_all_is_durable_and_not_before() {
    let mut pair = Pair::new(40);
    let tell = |pair: &mut Pair| {
        for question in pair.requester.report(&pair.to).expect("reads") {
            pair.server.handle(&question.message).expect("makes sense");
        }
        (pair.server.left(), pair.server.may_release())
    };
    assert_eq!(tell(&mut pair), (Some(40), false));
    pair.finish();
    assert_eq!(tell(&mut pair), (Some(40), false), "it has come, but not for good");
    pair.to.flush().expect("syncs");
    assert_eq!(tell(&mut pair), (Some(0), true));
    pair.to.freeze();
    assert!(pair.requester.report(&pair.to).expect("reads").is_empty(), "the next owner will say it");
}

#[test]
fn contents_that_were_written_again_at_the_holder_are_not_taken_for_those_wanted() {
    let mut pair = Pair::new(4);
    pair.requester.demand(1..2, NOW, &pair.to).expect("reads");
    pair.from.become_primary(godwit_units::Lineage(0), godwit_units::Generation(9)).expect("goes wrong");
    pair.from.write(BLOCK, &[5; BLOCK as usize]).expect("goes wrong");
    pair.ask();
    while pair.answer().is_some() {}
    assert_eq!((pair.requester.lacking(), pair.to.absent()), (1, Bytes(BLOCK)));
}

#[test]
fn a_block_that_cannot_be_read_at_its_holder_keeps_no_other_back_and_is_asked_for_again_when_it_may_have_been_repaired()
{
    let mut pair = Pair::new(40);
    let (from, disk) = open_hooked(&pair._folder.path().join("source"), Bytes(SIZE));
    pair.from = from;
    disk.1.lock().expect("one thread").extend(30..33);
    // The guest waits for what cannot be read, for what lies around it, and for another one.
    for blocks in [28..36, 20..21] {
        pair.requester.demand(blocks, NOW, &pair.to).expect("reads");
    }
    pair.finish();
    assert_eq!(pair.to.absent(), Bytes(3 * BLOCK), "all others came");
    let (block, error) = pair.server.take_unreadable().expect("it is said which");
    assert!((30..33).contains(&block) && error.to_string().contains("a bad sector"), "{block}: {error}");
    assert_eq!(pair.requester.nowhere(&pair.to).expect("reads"), 3);
    assert!(pair.requester.starving(NOW + PAUSE_AFTER).is_some(), "the guest waits");
    pair.requester.ask_lacking_again();
    pair.finish();
    assert_eq!(pair.requester.nowhere(&pair.to).expect("reads"), 3, "still");

    disk.1.lock().expect("one thread").clear();
    pair.requester.ask_lacking_again();
    pair.finish();
    assert_eq!(pair.requester.nowhere(&pair.to).expect("reads"), 0);
    assert!(pair.is_equal() && pair.requester.starving(NOW + PAUSE_AFTER).is_none());
}

#[test]
fn what_is_no_message_is_refused_by_both_sides_and_nothing_that_was_not_asked_for_is_taken() {
    let mut pair = Pair::new(4);
    let mut rng = SmallRng::seed_from_u64(3);
    for _ in 0..3000 {
        let mut message: Vec<u8> = (0..rng.random_range(0..80)).map(|_| rng.random()).collect();
        if let Some(kind) = message.first_mut() {
            *kind %= 8;
        }
        let mut server = Server::new();
        let _ = server.handle(&message);
        let _ = server.poll(&pair.from, &BOTH);
        assert!(pair.requester.handle(&holder(), &message, NOW, &pair.to).is_err());
    }
    let stamp = pair.to.wanted(0..1).expect("reads")[0].stamp.expect("was written");
    for run in [0..1, SIZE / BLOCK..SIZE / BLOCK + 1, u64::MAX - 1..u64::MAX, 5..5] {
        let message = run_message(ZEROES, &run, stamp, &[]);
        assert!(pair.requester.handle(&holder(), &message, NOW, &pair.to).is_err(), "{run:?}");
    }
    assert_eq!(pair.to.absent(), Bytes(4 * BLOCK));
}

#[test]
fn a_requester_that_asks_without_end_is_cut_off() {
    let mut pair = Pair::new(1);
    let stamp = pair.to.wanted(0..1).expect("reads")[0].stamp.expect("was written");
    let question = ask(Lane::Fill, &(0..1), stamp);
    let taken = (0..2 * MOST_QUESTIONS).take_while(|_| pair.server.handle(&question).is_ok()).count();
    assert_eq!(taken, MOST_QUESTIONS);
    assert!(Server::new().handle(&ask(Lane::Fill, &(0..MOST_BLOCKS + 1), stamp)).is_err());
}
