//! What past moves say: of the link between two hosts, of what a move takes besides its bytes, of a VM's pages, and of predictions.
//!
//! Nothing is kept for this: the records of moves have their phases, rounds and bytes.

use crate::record::MoveRecord;
use godwit_api::Name;
use godwit_api::host::DiskStrategy;
use godwit_api::progress::{MoveProgress, PhaseName, Round};
use godwit_predict::memory_share;
use godwit_predict::whole::{Calibration, ENOUGH, RECENT, ahead, queue, settled, under_way};
use godwit_units::{Bytes, Policy, Span, VmId};
use std::time::Duration;

/// The round trip of a move whose prediction does not tell it.
const RTT: Duration = Duration::from_millis(20);
/// A move of fewer bytes of QEMU's has not looked for a level: a node looks after each 16 MiB.
const ENOUGH_RAW: u64 = 32 << 20;
/// A round, or a copy, that brought less says nothing of the link.
const TELLING: u64 = 256 << 10;
/// What of the link's bytes is not QUIC's.
const PAYLOAD: f64 = 0.95;
/// How much wider than what was measured one move makes it; many make it no wider. And what it got of the link, which a whole move has shown: that
/// links are another way the next time is part of what predictions were off by ([`calibration`]).
const FEW: f64 = 0.3;
const FEW_RATES: f64 = 0.1;
/// A page's own work, for the node and QEMU, in seconds, where nothing was measured.
pub const WORK: f64 = 8e-6;
/// The same where the fewest bytes are wanted: what zstd's level 9, and reckoning how a page packs best, take for one that goes as
/// it is packed: of recorded streams, 0.09 ms on the processors that this was measured on, one after the other.
pub const HARD_WORK: f64 = 0.9e-4;
/// What is left then of the bytes that level 1 makes of pages: 0.91 to 0.93 of recorded streams.
pub const FEWEST: f64 = 0.92;

/// What one move has shown.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Measured {
    /// What it got of the link, bits a second; none where it had too little to send.
    pub goodput: Option<f64>,
    /// What it took besides its bytes while the guest ran, seconds.
    pub before: f64,
    /// And while it stood; none where a deadline has ended its last round: what was left then is a guess.
    pub pause: Option<f64>,
    /// Bytes on the wire for each byte of its disks that was copied.
    pub disk_wire: Option<f64>,
    /// How fast they went, bits a second.
    pub disk_speed: Option<f64>,
}

fn seconds(p: &MoveProgress, name: PhaseName) -> f64 {
    let of = |us: u64| us as f64 / 1e6;
    p.phases
        .iter()
        .filter(|phase| phase.name == name)
        .filter_map(|phase| Some(of(phase.ended_unix_us?.saturating_sub(phase.started_unix_us))))
        .sum()
}

/// From the order to the guest's running there.
fn total_s(record: &MoveRecord) -> Option<f64> {
    record.public().total_s()
}

/// When it was ordered; of one that waited behind others of the same order, when its turn came. Microseconds since 1970.
#[must_use]
pub fn began_unix_us(record: &MoveRecord) -> u64 {
    let first = record.progress.phases.first().filter(|_| record.after.is_some());
    first.map_or(record.ordered_unix_us, |phase| phase.started_unix_us.max(record.ordered_unix_us))
}

/// How long it waited behind others before it began.
fn waited_s(record: &MoveRecord) -> f64 {
    (began_unix_us(record) - record.ordered_unix_us) as f64 / 1e6
}

/// What a move took by itself, from its turn on.
fn own_s(record: &MoveRecord) -> Option<f64> {
    Some((total_s(record)? - waited_s(record)).max(0.0))
}

/// Whether a move was to have the fewest bytes: its encoder takes more of them away, and may be what its stream waits for.
fn is_packed_hard(record: &MoveRecord) -> bool {
    record.order.policy == Policy::LeastBytes
}

/// The round trip, as it was when the move was foretold.
fn rtt(record: &MoveRecord) -> Duration {
    let ms = record.prediction.as_ref().and_then(|told| told.basis.rtt_ms);
    ms.map_or(RTT, |ms| Duration::from_secs_f64((ms / 1e3).clamp(0.0, 60.0)))
}

/// Bytes of the rounds that were still on their way when the guest stopped, as far as the node's window tells: it follows what the link carries,
/// which is what has arrived by then. And how much a second that is.
fn left_under_way(wire: u64, in_rounds: f64, rtt: Duration, stopped: f64) -> (u64, f64) {
    let seconds = in_rounds.max(0.1);
    let (mut left, mut rate) = (0, wire as f64 / seconds);
    for _ in 0..3 {
        let window = if stopped > rate * ahead(rtt).as_secs_f64() { under_way(rate, rtt) } else { settled(rate, rtt) };
        left = window.0.min(wire);
        rate = (wire - left) as f64 / seconds;
    }
    (left, rate)
}

/// What a move has shown that got there.
#[must_use]
pub fn measured(record: &MoveRecord) -> Option<Measured> {
    let (p, total) = (&record.progress, own_s(record)?);
    let downtime = p.downtime_ms? / 1e3;
    let (in_rounds, wire): (f64, u64) = p.rounds.iter().fold((0.0, 0), |(s, w), r| (s + r.seconds, w + r.wire.0));
    let stopped = p.rounds.last().map_or(0.0, |r| r.wire.0 as f64 / r.pages.max(1) as f64 * r.dirtied as f64);
    // What rounds have handed to the link, and what of it was still under way at the stop.
    let (under_way, rate) = left_under_way(wire, in_rounds, rtt(record), stopped);
    let by_rounds = (wire - under_way >= TELLING && in_rounds > 0.1).then_some(rate * 8.0);
    let copying = seconds(p, PhaseName::CopyDisk);
    let copied = p.bytes.disk.0 as f64;
    let by_copy = (p.bytes.disk.0 >= TELLING && copying > 0.1).then(|| copied * 8.0 / copying);
    // The disks' bytes are counted with QUIC's own. The last of them go while the first round begins: both together say what the link carries,
    // unless the disks were slower than it.
    let by_all = |rounds: f64| {
        let both = copied * PAYLOAD * 8.0 + rounds * in_rounds;
        if by_copy.is_some() { both / (copying + in_rounds) } else { rounds }
    };
    let goodput = by_rounds.map(|rate| rate.max(by_all(rate))).or(by_copy.map(|rate| rate * PAYLOAD));
    let at = |bytes: f64| goodput.map_or(0.0, |rate| bytes * 8.0 / rate);
    // A copy of next to nothing is what every move takes; one of more took its own time.
    let before = total - downtime - in_rounds - by_copy.map_or(0.0, |_| copying);
    let queued = goodput.map_or(0.0, |rate| {
        let rest = Duration::from_secs_f64((stopped * 8.0 / rate.max(1.0)).clamp(0.0, 1e6));
        queue(rate / 8.0, rtt(record), rest).as_secs_f64()
    });
    let pause = downtime - at(stopped) - queued;
    // Its own bytes took what they took; but not because of the link.
    let goodput = if is_packed_hard(record) { by_copy.map(|rate| rate * PAYLOAD) } else { goodput };
    let disk_wire = (p.disk.copied.0 >= TELLING).then(|| copied / p.disk.copied.0 as f64);
    // What the model explains more than all of is its error, and no time that goes backwards.
    Some(Measured {
        goodput,
        before: before.max(0.05),
        pause: (!is_last_cut(&p.rounds, record.memory)).then_some(pause.max(downtime.min(0.01))),
        disk_wire,
        disk_speed: by_copy,
    })
}

/// What moves between two hosts have shown.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Pair {
    /// What moves got of the link, bits a second.
    pub goodput: Option<Span>,
    /// When the last of them was ordered, microseconds since 1970.
    pub last_unix_us: u64,
    /// Besides bytes, seconds.
    pub before: Option<Span>,
    /// In the pause.
    pub pause: Option<Span>,
    /// Bytes on the wire for each byte of a disk.
    pub disk_wire: Option<Span>,
    /// The median of how fast disks went, bits a second.
    pub disk_speed: Option<f64>,
    /// How many.
    pub moves: usize,
}

/// Of moves that are listed the newest first.
#[must_use]
pub fn pair<'a>(moves: impl Iterator<Item = &'a MoveRecord>) -> Pair {
    let found: Vec<(u64, Measured)> =
        moves.filter_map(|mv| Some((mv.ordered_unix_us, measured(mv)?))).take(RECENT).collect();
    let of_few = |what: &dyn Fn(&Measured) -> Option<f64>, most: usize, few: f64| {
        let values: Vec<f64> = found.iter().filter_map(|(_, m)| what(m)).take(most).collect();
        // A few have not shown all that there is.
        Span::measured(&values).map(|span| span.wider(few / (values.len() as f64).sqrt()))
    };
    let of = |what: &dyn Fn(&Measured) -> Option<f64>, most: usize| of_few(what, most, FEW);
    Pair {
        // A link may be another one than it was: only the last few count.
        goodput: of_few(&|m| m.goodput, 5, FEW_RATES),
        last_unix_us: found.iter().filter(|(_, m)| m.goodput.is_some()).map(|(at, _)| *at).max().unwrap_or(0),
        before: of(&|m| Some(m.before), RECENT),
        pause: of(&|m| m.pause, RECENT),
        disk_wire: of(&|m| m.disk_wire, RECENT),
        disk_speed: of(&|m| m.disk_speed, 5).map(|span| span.likely),
        moves: found.len(),
    }
}

/// zstd's level at which the newest of moves ended, of those that had enough to send to find one, and none prescribed: over the same link, with the same
/// processors, the next one will presumably, too. Of levels below 1 what they leave says too little of what another one would.
pub fn level<'a>(moves: impl IntoIterator<Item = &'a MoveRecord>) -> Option<i32> {
    let found = |mv: &MoveRecord| {
        let is_one = total_s(mv).is_some() && mv.progress.raw.0 >= ENOUGH_RAW && !is_packed_hard(mv);
        mv.progress.rounds.last().filter(|_| is_one)?.level
    };
    moves.into_iter().find_map(found).filter(|level| *level >= 1)
}

/// How far predictions were off: of moves between these hosts if there are enough, else of all. Moves are listed the newest first.
///
/// `informed`: of those that knew what moves between their hosts take, else of those that assumed it. What the latter were off by is known by
/// now, and would be taken away twice. How far what is thought of an encoder that tries hard is off is nothing to moves by another policy than
/// [`Policy::LeastBytes`]. `leveled`: only of those for which zstd's level was known beforehand, or was not: what the others were off by for that is known by
/// now, too.
#[must_use]
pub fn calibration(
    moves: &[MoveRecord],
    informed: bool,
    leveled: Option<bool>,
    policy: Policy,
    same: impl Fn(&MoveRecord) -> bool,
) -> Calibration {
    let knew = |mv: &MoveRecord| {
        let told = mv.prediction.as_ref().filter(|told| leveled.is_none_or(|is| told.basis.level.is_some() == is));
        told.map(|told| told.basis.past_moves > 0)
    };
    let is_alike = |mv: &MoveRecord| policy == Policy::LeastBytes || !is_packed_hard(mv);
    let ended: Vec<&MoveRecord> =
        (moves.iter()).filter(|mv| knew(mv) == Some(informed) && is_alike(mv) && total_s(mv).is_some()).collect();
    let these: Vec<&MoveRecord> = ended.iter().copied().filter(|mv| same(mv)).collect();
    let counted = if these.len() >= ENOUGH { these } else { ended };
    let mut found = Calibration::new(informed);
    for mv in counted.into_iter().take(RECENT).rev() {
        let (Some(told), Some(total)) = (&mv.prediction, own_s(mv)) else { continue };
        let likely = told.uncorrected;
        found.total.add(likely.total_s, total);
        found.downtime.add(likely.downtime_ms, mv.progress.downtime_ms.unwrap_or(0.0));
        found.bytes.add(likely.bytes, mv.public().total_bytes());
    }
    found
}

/// What past moves teach of the next one from a host to another.
#[derive(Clone, Debug)]
pub struct Taught {
    /// Of moves both ways: hosts and link are the same.
    pub pair: Pair,
    /// Of moves this way: it is the host that packs which has the processors.
    pub level: Option<i32>,
    /// How far predictions were off that knew as much as this one will.
    pub calibration: Calibration,
}

/// Of moves that are listed the newest first.
pub fn taught(moves: &[MoveRecord], (from, to): (&Name, &Name), policy: Policy) -> Taught {
    let there = |mv: &MoveRecord| &mv.from == from && &mv.order.to.name == to;
    let either = |mv: &MoveRecord| there(mv) || (&mv.from == to && &mv.order.to.name == from);
    let pair = pair(moves.iter().filter(|mv| either(mv)));
    let level = level(moves.iter().filter(|mv| there(mv)));
    let calibration = calibration(moves, pair.moves > 0, Some(level.is_some()), policy, either);
    Taught { pair, level, calibration }
}

/// How a VM left a host with its disks whole there.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Left {
    /// How long ago, seconds.
    pub ago_s: f64,
    /// Whether it has been on one host since: its QEMU there has counted all that it has written.
    pub straight: bool,
}

/// How a VM left a host, the newest move being the first, if it did so last by a move that mirrored its disks.
#[must_use]
pub fn left<'a>(moves: impl IntoIterator<Item = &'a MoveRecord>, vm: VmId, host: &Name, now_s: u64) -> Option<Left> {
    let mut made = moves.into_iter().filter(|mv| mv.order.vm == vm && total_s(mv).is_some()).enumerate();
    let (later, left) = made.find(|(_, mv)| &mv.from == host)?;
    let at = left.progress.resumed_unix_us.filter(|_| left.order.disk == DiskStrategy::Mirror)?;
    Some(Left { ago_s: now_s.saturating_sub(at / 1_000_000) as f64, straight: later == 0 })
}

/// What a VM's own moves say of its pages.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pages {
    /// Bytes on the wire for a page, in the first round, as zstd's level 1 would presumably have made them.
    pub first: f64,
    /// For one that is sent again and has changed since; none where none was.
    pub again: Option<f64>,
    /// Of the first round's pages, those that lay on the VM's disks at the destination.
    pub on_disk: f64,
    /// Pages dirtied in a second, at the least: a page counts once in a round.
    pub dirtied_per_s: f64,
    /// The most pages that were dirtied in a round.
    pub working_set: u64,
}

/// Bytes on the wire for a page at another of zstd's levels than that at which it has so many. What levels below 1 leave goes by the contents, and is not
/// told from another one's.
pub fn by_level(bytes: f64, from: i32, to: i32) -> f64 {
    if from < 1 || to < 1 { bytes } else { bytes * memory_share(from, to).unwrap_or(1.0) }
}

/// So many pages may lie between QEMU and the node when a round ends.
const AT_HAND: u64 = 1024;

/// Whether a deadline ended the round of this place before it had sent all that it was to: most of what is dirty behind it was not dirtied in it.
fn is_cut(rounds: &[Round], nth: usize, memory: Bytes) -> bool {
    let due = if nth == 0 { memory.0 / 4096 } else { rounds[nth - 1].dirtied };
    rounds[nth].pages + AT_HAND < due
}

/// Whether it so ended the last round that there is: no other follows such a one.
pub(super) fn is_last_cut(rounds: &[Round], memory: Bytes) -> bool {
    rounds.len().checked_sub(1).is_some_and(|last| is_cut(rounds, last, memory))
}

/// By its newest move that has a whole round, as its pages are where nobody wants the fewest bytes: of a move that did, what it made of them tells
/// that less surely, and another one is taken if there is any.
#[must_use]
pub fn pages<'a>(moves: impl IntoIterator<Item = &'a MoveRecord>, vm: VmId) -> Option<Pages> {
    let has_one = |mv: &MoveRecord| {
        let rounds = &mv.progress.rounds;
        rounds.first().is_some_and(|r| r.pages > 0) && !is_cut(rounds, 0, mv.memory)
    };
    let mut those = moves.into_iter().filter(|mv| mv.order.vm == vm && has_one(mv));
    let newest = those.next()?;
    let mv = if is_packed_hard(newest) { those.find(|mv| !is_packed_hard(mv)).unwrap_or(newest) } else { newest };
    let rounds = &mv.progress.rounds;
    // Where no round says its level, it was an earlier version's: 1 as a rule, and 9 for who wanted the fewest bytes.
    let plain = |round: &Round, bytes: f64| match round.level {
        Some(level) => by_level(bytes, level, 1),
        None if is_packed_hard(mv) => bytes / FEWEST,
        None => bytes,
    };
    let whole = rounds.iter().enumerate().filter(|(nth, _)| !is_cut(rounds, *nth, mv.memory));
    let whole: Vec<&Round> = whole.map(|(_, round)| round).collect();
    let (first, rest) = rounds.split_first()?;
    // The one that goes on is not whole.
    let later: Vec<&Round> = rest.iter().filter(|round| round.pages >= 64).collect();
    let (pages, wire) = later.iter().fold((0, 0), |(p, w), r| (p + r.pages.saturating_sub(r.unchanged), w + r.wire.0));
    let rates = whole.iter().filter(|r| r.seconds > 0.05).map(|r| r.dirtied as f64 / r.seconds);
    Some(Pages {
        first: plain(first, first.wire.0 as f64 / first.pages as f64),
        again: later.last().filter(|_| pages > 0).map(|last| plain(last, wire as f64 / pages as f64)),
        on_disk: first.on_disk as f64 / first.pages as f64,
        dirtied_per_s: rates.fold(0.0, f64::max),
        working_set: whole.iter().map(|r| r.dirtied).max().unwrap_or(0),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Step;
    use crate::testing::{ended_move, progress};
    use godwit_api::progress::{Outcome, Phase};

    /// What a node lets be on its way in the last rounds over 8 Mbit/s: a round trip of 20 ms, and 5 ms.
    const UNDER_WAY: u64 = 25_000;

    /// A move of 9 s over 8 Mbit/s: 1 s of its own, 1 MB of disk in 2 s, 4 MB of memory in rounds of 4 s, and what is under way in the pause of 2 s.
    fn record(id: u64) -> MoveRecord {
        let mut p = progress(Outcome::Completed);
        let phase = |name, from: u64, to: u64| Phase {
            name,
            started_unix_us: from * 1_000_000,
            ended_unix_us: Some(to * 1_000_000),
        };
        p.phases =
            vec![phase(PhaseName::Reserve, 0, 1), phase(PhaseName::CopyDisk, 1, 3), phase(PhaseName::Memory, 3, 7)];
        p.resumed_unix_us = Some(9_000_000);
        p.downtime_ms = Some(2000.0);
        (p.bytes.disk, p.bytes.memory, p.disk.copied) = (Bytes(1_000_000), Bytes(4_100_000), Bytes(2_000_000));
        let round =
            |pages, dirtied, wire, seconds| Round { pages, dirtied, wire: Bytes(wire), seconds, ..Round::default() };
        p.rounds = vec![round(10_000, 100, 3_900_000 + UNDER_WAY, 3.9), round(100, 10, 100_000, 0.1)];
        ended_move(id, (1, "web"), ("a", "b"), &p)
    }

    fn foretold(total: f64) -> godwit_api::predict::Foretold {
        godwit_api::predict::Foretold {
            total_s: Default::default(),
            begins_s: None,
            downtime_ms: Default::default(),
            bytes: Default::default(),
            basis: Default::default(),
            uncorrected: godwit_api::predict::Likely { total_s: total, downtime_ms: 1000.0, bytes: 5_100_000.0 },
        }
    }

    #[test]
    fn what_a_move_takes_besides_its_bytes_is_what_they_do_not_explain() {
        let measured = measured(&record(1)).unwrap();
        assert!((measured.goodput.unwrap() - 8e6).abs() < 1.0, "{measured:?}");
        // 9 s less the pause, the rounds and the 2 s of the disk.
        assert!((measured.before - 1.0).abs() < 1e-6, "{measured:?}");
        assert_eq!(measured.disk_speed, Some(4e6));
        // 2 s less 0.01 s for ten pages and 0.016 s for what they waited for.
        assert!((measured.pause.unwrap() - 1.973_616).abs() < 1e-6, "{measured:?}");
        assert_eq!(measured.disk_wire, Some(0.5));
        let mut failed = record(1);
        failed.progress.outcome = Outcome::Failed;
        assert_eq!(super::measured(&failed), None);
    }

    #[test]
    fn what_the_first_round_shared_with_the_end_of_the_disk_does_not_make_the_link_slower() {
        let mut mv = record(1);
        // 8 Mbit/s all the time: half a second's worth of the disk went while memory did.
        mv.progress.bytes.disk = Bytes((2.5 * 1e6 / PAYLOAD) as u64);
        mv.progress.rounds[0].wire = Bytes(3_400_000 + UNDER_WAY);
        let measured = measured(&mv).unwrap();
        assert!((measured.goodput.unwrap() - 8e6).abs() < 0.05e6, "{measured:?}");
    }

    #[test]
    fn a_move_that_waited_its_turn_has_shown_what_it_took_from_then_on() {
        let mut waited = MoveRecord { prediction: Some(foretold(9.0)), step: Step::Ended, ..record(2) };
        // Ordered 5 s before it began.
        let later = |us: &mut u64| *us += 5_000_000;
        for phase in &mut waited.progress.phases {
            later(&mut phase.started_unix_us);
            phase.ended_unix_us.iter_mut().for_each(later);
        }
        waited.progress.resumed_unix_us.iter_mut().for_each(later);
        waited.after = Some(godwit_units::MoveId(1));
        let alone = measured(&record(1)).unwrap();
        let behind = measured(&waited).unwrap();
        assert!((alone.before - behind.before).abs() < 1e-9, "{alone:?} {behind:?}");
        let found = calibration(&vec![waited; ENOUGH], false, None, Policy::default(), |_| true);
        let found = found.total.apply(Span::exactly(10.0));
        assert!((found.likely - 10.0).abs() < 1e-9, "{found:?}");
    }

    #[test]
    fn a_replica_that_the_vm_left_is_as_old_as_its_move() {
        let (moves, a, b) = ([record(1)], "a".parse().unwrap(), "b".parse().unwrap());
        assert_eq!(left(&moves, VmId(1), &a, 109), Some(Left { ago_s: 100.0, straight: true }));
        assert_eq!(left(&moves, VmId(1), &b, 108), None);
        let mut behind = record(2);
        behind.order.disk = DiskStrategy::Postcopy;
        assert_eq!(left(&[behind, record(1)], VmId(1), &a, 108), None);
        // And on from there.
        let mut on = record(2);
        on.from = b;
        assert_eq!(left(&[on, record(1)], VmId(1), &a, 109), Some(Left { ago_s: 100.0, straight: false }));
    }

    #[test]
    fn a_single_move_says_what_the_link_carries_and_less_of_what_else_moves_take() {
        let [one, four] = [1, 4].map(|count| (1..=count).map(record).collect::<Vec<_>>());
        let width = |moves: &[MoveRecord]| {
            let pair = pair(moves.iter());
            [pair.goodput, pair.before].map(|span| span.unwrap().width())
        };
        let [link, before] = width(&one);
        assert!((link - 0.2).abs() < 1e-9 && (before - 0.6).abs() < 1e-9, "{link} {before}");
        let [link, before] = width(&four);
        assert!((link - 0.1).abs() < 1e-9 && (before - 0.3).abs() < 1e-9, "{link} {before}");
    }

    #[test]
    fn a_vms_pages_cost_what_its_last_move_says() {
        let pages = pages(&[record(2), record(1)], VmId(1)).unwrap();
        assert_eq!((pages.first, pages.again, pages.working_set), (392.5, Some(1000.0), 100));
        assert_eq!(super::pages(&[record(1)], VmId(2)), None);
    }

    #[test]
    fn what_a_round_that_a_deadline_ended_has_left_was_not_dirtied_in_it() {
        let mut cut = record(2);
        cut.progress.rounds[0].dirtied = 5000;
        (cut.progress.rounds[1].pages, cut.progress.rounds[1].dirtied) = (2000, 8000);
        assert_eq!(pages(std::slice::from_ref(&cut), VmId(1)).unwrap().working_set, 5000);
        // And what the guest stood for is a guess.
        let (cut_pause, all) = (measured(&cut).unwrap(), measured(&record(1)).unwrap());
        assert!(cut_pause.pause.is_none() && cut_pause.goodput.is_some() && all.pause.is_some(), "{cut_pause:?}");
        assert_eq!(pair([cut.clone(), record(1)].iter()).pause, pair([record(1)].iter()).pause);
        // Of one whose first round was ended nothing is known.
        cut.memory = Bytes(20_000 * 4096);
        assert_eq!(pages(&[cut, record(1)], VmId(1)), pages(&[record(1)], VmId(1)));
    }

    #[test]
    fn pages_are_as_by_level_1_whatever_they_went_by_and_the_next_move_goes_by_what_the_last_one_did() {
        let at = |id: u64, level: i32, share: f64| {
            let mut mv = record(id);
            for round in &mut mv.progress.rounds {
                (round.level, round.wire) = (Some(level), Bytes((round.wire.0 as f64 * share) as u64));
            }
            mv.progress.raw = Bytes(64 << 20);
            mv
        };
        let told = |mv: &MoveRecord| pages(std::slice::from_ref(mv), VmId(1)).unwrap();
        let (one, nine) = (told(&at(1, 1, 1.0)), told(&at(1, 9, 0.92)));
        assert_eq!(one, told(&record(1)), "an earlier version's");
        assert!((nine.first / one.first - 1.0).abs() < 0.03, "{} and {}", nine.first, one.first);
        assert!((nine.again.unwrap() / one.again.unwrap() - 1.0).abs() < 0.05, "{nine:?} and {one:?}");
        // A level that is none, from whatever node, changes nothing.
        assert_eq!(told(&at(1, 77, 1.0)), one);
        // Who wanted the fewest bytes has no say in it.
        let mut hard = at(9, 9, 0.92);
        hard.order.policy = Policy::LeastBytes;
        let mut little = at(8, 1, 1.0);
        little.progress.raw = Bytes(1 << 20);
        let moves = [hard, little, record(8), at(7, 6, 0.95), at(6, 1, 1.0)];
        assert_eq!(level(&moves), Some(6));
        assert_eq!(level(&moves[..3]), None);
        // Below 1 nothing is told from it.
        assert_eq!((level(&[at(1, -20, 2.0)]), told(&at(1, -20, 1.0))), (None, one));
        // What was foretold without a level was off by that, too.
        let known = |level| {
            let mut mv = MoveRecord { prediction: Some(foretold(4.5)), ..record(1) };
            mv.prediction.as_mut().unwrap().basis.level = level;
            mv
        };
        let moves = [known(None), known(Some(9)), known(Some(6))];
        let counts = |leveled| calibration(&moves, false, leveled, Policy::default(), |_| true).total.count();
        assert_eq!([None, Some(false), Some(true)].map(counts), [3, 1, 2]);
    }

    #[test]
    fn what_was_packed_hard_says_nothing_of_the_link_and_little_of_the_pages() {
        let hard = |id| {
            let mut mv = MoveRecord { prediction: Some(foretold(4.5)), ..record(id) };
            mv.order.policy = Policy::LeastBytes;
            mv
        };
        let (one, other) = (measured(&hard(2)).unwrap(), measured(&record(1)).unwrap());
        // What the copy of the disk says.
        assert_eq!(one.goodput, Some(4e6 * PAYLOAD));
        assert_eq!((one.before, one.pause), (other.before, other.pause));
        let mut without = hard(2);
        (without.progress.bytes.disk, without.progress.disk.copied) = (Bytes(0), Bytes(0));
        assert_eq!(measured(&without).unwrap().goodput, None);

        let plain = pages(&[record(1)], VmId(1));
        assert_eq!(pages(&[hard(3), hard(2), record(1)], VmId(1)), plain);
        let (told, plain) = (pages(&[hard(2)], VmId(1)).unwrap(), plain.unwrap());
        assert!((told.first - plain.first / FEWEST).abs() < 1e-9 && told.again > plain.again, "{told:?}");

        let moves = [hard(3), MoveRecord { prediction: Some(foretold(9.0)), ..record(2) }];
        let counts = |policy| calibration(&moves, false, Some(false), policy, |_| true).total.count();
        assert_eq!([Policy::LeastDowntime, Policy::LeastBytes].map(counts), [1, 2]);
    }

    #[test]
    fn a_prediction_learns_of_those_that_knew_of_a_level_if_it_does() {
        let at = |id, level: Option<i32>| {
            let mut mv = MoveRecord { prediction: Some(foretold(4.5)), ..record(id) };
            mv.progress.raw = Bytes(64 << 20);
            mv.progress.rounds.iter_mut().for_each(|round| round.level = level);
            let basis = &mut mv.prediction.as_mut().unwrap().basis;
            (basis.past_moves, basis.level) = (1, level);
            mv
        };
        let (a, b): (Name, Name) = ("a".parse().unwrap(), "b".parse().unwrap());
        let of = |moves: &[MoveRecord], way| {
            let found = taught(moves, way, Policy::default());
            (found.pair.moves, found.level, found.calibration.total.count())
        };
        let moves = [at(3, Some(6)), at(2, Some(9)), at(1, None)];
        assert_eq!(of(&moves, (&a, &b)), (3, Some(6), 2));
        // No move was made the other way, of which a level would be known.
        assert_eq!(of(&moves, (&b, &a)), (3, None, 1));
        assert_eq!(of(&moves[2..], (&a, &b)), (1, None, 1));
    }

    #[test]
    fn moves_between_other_hosts_count_only_where_there_are_not_enough_between_these() {
        let told = |id, total, to: &str| {
            let mut record = MoveRecord { prediction: Some(foretold(total)), step: Step::Ended, ..record(id) };
            record.order.to.name = to.parse().unwrap();
            record
        };
        let here = |mv: &MoveRecord| mv.order.to.name.as_str() == "b";
        let mut moves = vec![told(9, 4.0, "c"), told(8, 9.0, "b")];
        let policy = Policy::default();
        assert_eq!(calibration(&moves, false, None, policy, here).total.count(), 2);
        assert_eq!(calibration(&moves, true, None, policy, here).total.count(), 0, "none of them knew what moves take");
        moves.extend((0..ENOUGH as u64).map(|id| told(id, 9.0, "b")));
        let found = calibration(&moves, false, None, policy, here);
        assert_eq!(found.total.count(), ENOUGH + 1);
        // All were right about the time, and said half of the pause.
        let seconds = found.total.apply(Span::exactly(10.0));
        assert!((seconds.likely - 10.0).abs() < 1e-9, "{seconds:?}");
        assert!((found.downtime.apply(Span::exactly(10.0)).likely - 20.0).abs() < 1e-9);
    }
}
