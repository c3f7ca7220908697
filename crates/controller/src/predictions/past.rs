//! What past moves say: of the link between two hosts, of what a move takes besides its bytes, of a VM's pages, and of predictions.
//!
//! Nothing is kept for this: the records of moves have their phases, rounds and bytes.

use crate::record::MoveRecord;
use godwit_api::progress::{MoveProgress, PhaseName, Round};
use godwit_predict::whole::{Calibration, ENOUGH, RECENT, Span};
use godwit_units::VmId;

/// Bytes of the memory stream that may be on their way when the guest stops: the node's window.
pub const UNDER_WAY: u64 = 1 << 20;
/// A round, or a copy, that brought less says nothing of the link.
const TELLING: u64 = 256 << 10;
/// A page's own work, for the node and QEMU, in seconds, where nothing was measured.
pub const WORK: f64 = 8e-6;

/// What one move has shown.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Measured {
    /// What it got of the link, bits a second; none where it had too little to send.
    pub goodput: Option<f64>,
    /// What it took besides its bytes while the guest ran, seconds.
    pub before: f64,
    /// And while it stood.
    pub pause: f64,
    /// Bytes on the wire for each byte of its disks that was copied.
    pub disk_wire: Option<f64>,
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

/// What a move has shown that got there.
#[must_use]
pub fn measured(record: &MoveRecord) -> Option<Measured> {
    let (p, total) = (&record.progress, total_s(record)?);
    let downtime = p.downtime_ms? / 1e3;
    let by_rounds = p.rounds.iter().filter(|r| r.wire.0 >= TELLING && r.seconds > 0.05);
    let rates = by_rounds.map(|r| r.wire.0 as f64 * 8.0 / r.seconds);
    let copying = seconds(p, PhaseName::CopyDisk);
    let copied = p.bytes.disk.0 as f64;
    let by_copy = (p.bytes.disk.0 >= 4 * TELLING && copying > 0.2).then(|| copied * 8.0 / copying);
    let goodput = rates.chain(by_copy).max_by(f64::total_cmp);
    let at = |bytes: f64| goodput.map_or(0.0, |rate| bytes * 8.0 / rate);
    let (in_rounds, wire): (f64, u64) = p.rounds.iter().fold((0.0, 0), |(s, w), r| (s + r.seconds, w + r.wire.0));
    let before = total - downtime - in_rounds - at(copied).min(copying);
    let last = p.rounds.last().map_or(0, |round| round.wire.0.min(UNDER_WAY));
    let stopped = p.bytes.memory.0.saturating_sub(wire) as f64;
    let pause = downtime - at(stopped) - at(last as f64);
    let disk_wire = (p.disk.copied.0 >= TELLING).then(|| copied / p.disk.copied.0 as f64);
    // What the model explains more than all of is its error, and no time that goes backwards.
    Some(Measured { goodput, before: before.max(0.05), pause: pause.max(downtime.min(0.01)), disk_wire })
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
    /// How many.
    pub moves: usize,
}

/// Of moves that are listed the newest first.
#[must_use]
pub fn pair<'a>(moves: impl Iterator<Item = &'a MoveRecord>) -> Pair {
    let found: Vec<(u64, Measured)> =
        moves.filter_map(|mv| Some((mv.ordered_unix_us, measured(mv)?))).take(RECENT).collect();
    let of = |what: &dyn Fn(&Measured) -> Option<f64>, most: usize| {
        let values: Vec<f64> = found.iter().filter_map(|(_, m)| what(m)).take(most).collect();
        Span::measured(&values)
    };
    Pair {
        // A link may be another one than it was: only the last few count.
        goodput: of(&|m| m.goodput, 5),
        last_unix_us: found.iter().filter(|(_, m)| m.goodput.is_some()).map(|(at, _)| *at).max().unwrap_or(0),
        before: of(&|m| Some(m.before), RECENT),
        pause: of(&|m| Some(m.pause), RECENT),
        disk_wire: of(&|m| m.disk_wire, RECENT),
        moves: found.len(),
    }
}

/// How far predictions were off: of moves between these hosts if there are enough, else of all. Moves are listed the newest first.
#[must_use]
pub fn calibration(moves: &[MoveRecord], same: impl Fn(&MoveRecord) -> bool) -> Calibration {
    let ended: Vec<&MoveRecord> = moves.iter().filter(|mv| mv.prediction.is_some() && total_s(mv).is_some()).collect();
    let these: Vec<&MoveRecord> = ended.iter().copied().filter(|mv| same(mv)).collect();
    let counted = if these.len() >= ENOUGH { these } else { ended };
    let mut found = Calibration::default();
    for mv in counted.into_iter().take(RECENT).rev() {
        let (Some(told), Some(total)) = (&mv.prediction, total_s(mv)) else { continue };
        let [total_told, downtime_told, bytes_told] = told.uncorrected;
        found.total.add(total_told, total);
        found.downtime.add(downtime_told, mv.progress.downtime_ms.unwrap_or(0.0));
        found.bytes.add(bytes_told, mv.public().total_bytes());
    }
    found
}

/// What a VM's own moves say of its pages.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pages {
    /// Bytes on the wire for a page, in the first round.
    pub first: f64,
    /// For one that is sent again; none where none was.
    pub again: Option<f64>,
    /// Of the first round's pages, those that lay on the VM's disks at the destination.
    pub on_disk: f64,
    /// Pages dirtied in a second, at the least: a page counts once in a round.
    pub dirtied_per_s: f64,
    /// The most pages that were dirtied in a round.
    pub working_set: u64,
}

/// By its newest move that has rounds.
#[must_use]
pub fn pages(moves: &[MoveRecord], vm: VmId) -> Option<Pages> {
    let mv = moves.iter().find(|mv| mv.order.vm == vm && mv.progress.rounds.first().is_some_and(|r| r.pages > 0))?;
    let (first, rest) = mv.progress.rounds.split_first()?;
    // The one that goes on is not whole.
    let later: Vec<&Round> = rest.iter().filter(|round| round.pages >= 64).collect();
    let (pages, wire) = later.iter().fold((0, 0), |(p, w), r| (p + r.pages, w + r.wire.0));
    let rates = mv.progress.rounds.iter().filter(|r| r.seconds > 0.05).map(|r| r.dirtied as f64 / r.seconds);
    Some(Pages {
        first: first.wire.0 as f64 / first.pages as f64,
        again: (pages > 0).then(|| wire as f64 / pages as f64),
        on_disk: first.on_disk as f64 / first.pages as f64,
        dirtied_per_s: rates.fold(0.0, f64::max),
        working_set: mv.progress.rounds.iter().map(|r| r.dirtied).max().unwrap_or(0),
    })
}
