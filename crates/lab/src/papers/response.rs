//! CloudNet, figure 8: what the clients of a database wait for their answers while its guest moves; by Godwit, and by a plain move.
//!
//! The guest answers requests from a third site. Of the database's each is a transaction of PostgreSQL (TPC-B's), beside which `pgbench` makes others;
//! smaller guests write each to their disk, flushed, before they answer, as a commit does. So whatever a move does to writes, their clients see. Plain QEMU keeps the copy equal at both sites from the first block on (`write-blocking`): an answer
//! waits for the link as well. Godwit's guest waits only while the other site is far behind, which this one's does not bring about.
//!
//! The paper's guest has 1.7 GB and TPC-W, over 85 Mbit/s and 27 ms; there the clients' answers take 2.5 times as long during the
//! memory's part, which CloudNet makes 45 % shorter. Nobody holds the stopped guest to compare its memory: the clients would see that. So the smallest
//! guest goes once more, is held, and only whether it is whole counts of that.

use super::{Document, Drawing, Extent, Mover, PlanCell, Table, instead, remarks, report_of, unless_lost};
use crate::ledger::Entry;
use crate::plot::response::{Curve, chart};
use crate::report::{MoveReport, Outcome, RequestPoint};
use crate::table::figure;

const LINK_MBIT: u32 = 85;
const RTT_MS: u32 = 27;
/// What is seen before the move and after it, seconds.
const QUIET_S: u32 = 20;

/// Whose clients wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Guest {
    /// Each request is a page on the disk; of so much memory, MiB.
    Commits(u32),
    /// Each request is PostgreSQL's.
    Database,
}

impl Guest {
    /// The smallest, which is compared, too.
    const SMALL: Self = Self::Commits(192);
    const ALL: [Self; 3] = [Self::SMALL, Self::Commits(768), Self::Database];
    const QUICK: [Self; 2] = [Self::SMALL, Self::Database];

    fn name(self) -> String {
        match self {
            Self::Commits(mib) => format!("{mib}mib"),
            Self::Database => "database".into(),
        }
    }

    fn shown(self) -> String {
        match self {
            Self::Commits(mib) => format!("{mib} MiB"),
            Self::Database => "PostgreSQL".into(),
        }
    }

    fn what(self) -> String {
        match self {
            Self::Commits(mib) => format!("A guest of {mib} MiB that commits each request"),
            Self::Database => "PostgreSQL, each request a transaction".into(),
        }
    }

    /// The lines of a scenario about it.
    fn lines(self) -> String {
        let clients = r#"from = "california", sessions = 4, think_ms = 50"#;
        match self {
            Self::Commits(mib) => format!(
                r#"memory_mib = {mib}
disks_gib = [{disk}, 0.0625]
data_mib = {data}
load = [
  {{ kind = "tier", port = 5432, commits_to = 1, answer_bytes = 4096, {clients} }},
  {{ kind = "memory", pages_per_s = 400, working_set_mib = 24 }},
  {{ kind = "disk", kib_per_s = 32, working_set_mib = 8 }},
]"#,
                disk = if self == Self::SMALL { 0.2 } else { 0.6 },
                data = if self == Self::SMALL { 64 } else { 256 },
            ),
            Self::Database => format!(
                r#"image = "debian"
memory_mib = 332
disk_gib = 6.1
load = [
  {{ kind = "database", clients = 1 }},
  {{ kind = "tier", port = 8080, transacts = true, answer_bytes = 4096, {clients} }},
]"#
            ),
        }
    }

    /// What is seen before the move, seconds: programs warm up.
    const fn quiet_s(self) -> u32 {
        match self {
            Self::Commits(_) => QUIET_S,
            Self::Database => 3 * QUIET_S,
        }
    }
}

fn name(guest: Guest, mover: Mover) -> String {
    format!("{}-{}", guest.name(), mover.name())
}

fn compared_name(mover: Mover) -> String {
    format!("{}-compared", name(Guest::SMALL, mover))
}

fn cell(guest: Guest, mover: Mover) -> PlanCell {
    PlanCell { name: name(guest, mover), scenario: scenario(guest, mover, false) }
}

fn compared_cell(mover: Mover) -> PlanCell {
    PlanCell { name: compared_name(mover), scenario: scenario(Guest::SMALL, mover, true) }
}

fn scenario(guest: Guest, mover: Mover, compare: bool) -> String {
    format!(
        r#"name = "figures-response"
{who}
warm_percent = 85

[wan]
rate_mbit = {LINK_MBIT}
rtt_ms = {RTT_MS}

[[site]]
name = "illinois"
[[site]]
name = "texas"
[[site]]
name = "california"

[[vm]]
name = "db"
site = "illinois"
{lines}

[[step]]
after_s = {quiet_s}
move = {{ vm = "db", to = "texas", compare = {compare} }}
[[step]]
wait = {{ moves = true, s = {QUIET_S} }}
[[step]]
verify = {{ vm = "db" }}
"#,
        who = mover.lines(),
        lines = guest.lines(),
        quiet_s = guest.quiet_s(),
    )
}

pub(super) fn cells(extent: Extent) -> Vec<PlanCell> {
    let guests = if extent == Extent::Quick { &Guest::QUICK[..] } else { &Guest::ALL[..] };
    let measured = guests.iter().flat_map(|guest| Mover::BOTH.map(|mover| cell(*guest, mover)));
    measured.chain(Mover::BOTH.map(compared_cell)).collect()
}

/// A stretch of a move, seconds from its order.
#[derive(Clone, Debug, PartialEq)]
struct Stretch {
    name: &'static str,
    from_s: f64,
    to_s: f64,
}

/// Before, while the disk was copied, from the memory's beginning until the guest ran, both of these, and after.
fn stretches(m: &MoveReport) -> Vec<Stretch> {
    let memory_s = m.phases.iter().find(|phase| phase.name == "memory").map_or(0.0, |phase| phase.start_s);
    let stretch = |name, from_s, to_s| Stretch { name, from_s, to_s };
    vec![
        stretch("before", f64::NEG_INFINITY, 0.0),
        stretch("the disk is copied", 0.0, memory_s),
        stretch("memory, until it runs there", memory_s, m.total_s),
        stretch("the whole move", 0.0, m.total_s),
        stretch("after", m.total_s, f64::INFINITY),
    ]
}

/// A request belongs to every stretch in which it was under way; to the quiet ones only if it was in no other.
fn within(point: &RequestPoint, stretch: &Stretch) -> bool {
    let asked_s = point.t_s - point.ms / 1e3;
    match stretch.name {
        "before" => point.t_s < stretch.to_s,
        "after" => asked_s >= stretch.from_s,
        _ => asked_s < stretch.to_s && point.t_s >= stretch.from_s,
    }
}

/// What so large a share of sorted values is not above.
fn quantile(sorted: &[f64], share: f64) -> Option<f64> {
    let place = (share * sorted.len() as f64).ceil() as usize;
    sorted.get(place.max(1) - 1).copied()
}

fn row(mover: Mover, m: &MoveReport, stretch: &Stretch) -> Vec<String> {
    let seen: Vec<&RequestPoint> = m.requests.iter().filter(|point| within(point, stretch)).collect();
    let mut took: Vec<f64> = seen.iter().filter(|point| point.answered).map(|point| point.ms).collect();
    took.sort_by(f64::total_cmp);
    let seconds = stretch.to_s - stretch.from_s;
    vec![
        mover.shown().into(),
        stretch.name.into(),
        figure(Some(seconds).filter(|s| s.is_finite()), 1),
        took.len().to_string(),
        figure(quantile(&took, 0.5), 1),
        figure(quantile(&took, 0.99), 1),
        figure(took.last().copied(), 0),
        (seen.len() - took.len()).to_string(),
    ]
}

/// From when until when the guest stood still, seconds from the order.
fn pause(m: &MoveReport) -> Option<(f64, f64)> {
    Some((m.total_s - (m.downtime_ms? + m.held_ms) / 1e3, m.total_s))
}

fn curve(mover: Mover, m: &MoveReport) -> Curve<'_> {
    Curve { name: mover.shown(), requests: &m.requests, pause_s: pause(m), end_s: m.ended_s.unwrap_or(m.total_s) }
}

pub(super) fn document(entries: &[Entry]) -> Document {
    let mut document = Document {
        title: "Response times through a move (CloudNet, figure 8)".into(),
        remarks: remarks(entries),
        ..Document::default()
    };
    for guest in Guest::ALL {
        let last = |mover: Mover| mover.moves(report_of(entries, &name(guest, mover))?).last().copied();
        let ended: Vec<(Mover, &MoveReport)> =
            Mover::BOTH.into_iter().filter_map(|mover| Some((mover, last(mover)?))).collect();
        document.remarks.extend(
            (ended.iter().filter(|(_, m)| m.outcome != Outcome::Completed))
                .map(|(mover, m)| format!("{}: {}", name(guest, *mover), instead(Some(*m)))),
        );
        let runs: Vec<_> = ended.into_iter().filter(|(_, m)| m.outcome == Outcome::Completed).collect();
        let ours = last(Mover::Godwit);
        if guest == Guest::SMALL || !runs.is_empty() || ours.is_some() {
            let bounds = bounds(guest, &runs).into_iter();
            document.bounds.extend(bounds.map(|(text, kept)| (text, unless_lost(kept, ours))));
        }
        if runs.is_empty() {
            continue;
        }
        document.tables.push(Table {
            title: format!("{}, at {LINK_MBIT} Mbit/s and {RTT_MS} ms", guest.what()),
            columns: ["by", "stretch", "s", "answers", "p50 ms", "p99 ms", "longest ms", "not answered"]
                .map(str::to_owned)
                .into(),
            words: 2,
            rows: runs.iter().flat_map(|(mover, m)| stretches(m).into_iter().map(|s| row(*mover, m, &s))).collect(),
        });
        let title = format!("Response times through a move, {}", guest.shown());
        let curves: Vec<Curve<'_>> = runs.iter().map(|(mover, m)| curve(*mover, m)).collect();
        document.drawings.push(Drawing {
            name: format!("response-{}", guest.name()),
            drawn: Some(chart(&title, &curves)),
            title,
            ..Drawing::default()
        });
    }
    for mover in Mover::BOTH {
        let Some(report) = report_of(entries, &compared_name(mover)) else { continue };
        let Some(m) = mover.moves(report).last().copied() else { continue };
        let small = Guest::SMALL.shown();
        let text = format!("{small}, held once all is there: RAM is equal at both ends, by {}", mover.shown());
        document.bounds.push((text, unless_lost(m.integrity.ram_equal, (mover == Mover::Godwit).then_some(m))));
    }
    document.remarks.push(
        "An answer counts for each stretch of the move in which it was under way, and else for before or after.".into(),
    );
    document
}

/// No request is lost; and the memory's part, in which CloudNet's clients waited longest, is shorter than a plain move's.
fn bounds(guest: Guest, runs: &[(Mover, &MoveReport)]) -> Vec<(String, Option<bool>)> {
    let guest = guest.shown();
    let of = |mover| runs.iter().find(|run| run.0 == mover).map(|run| run.1);
    let ours = of(Mover::Godwit).filter(|m| !m.requests.is_empty());
    let lost = ours.map(|m| m.requests.iter().filter(|point| !point.answered).count());
    let memory_s = |m: &MoveReport| {
        let stretch = &stretches(m)[2];
        stretch.to_s - stretch.from_s
    };
    let parts = of(Mover::Godwit).map(memory_s).zip(of(Mover::Qemu).map(memory_s));
    let found = parts.map_or(String::new(), |(ours, plain)| format!(" ({ours:.1} and {plain:.1} s)"));
    vec![
        (format!("{guest}: Godwit leaves no request unanswered"), lost.map(|lost| lost == 0)),
        (
            format!("{guest}: the memory's part takes Godwit less time than a plain move{found}"),
            parts.map(|(ours, plain)| ours < plain),
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::super::tests::{entry, filled};
    use super::*;
    use crate::report::{BaselineReport, Phase};
    use crate::scenario::Baseline;

    fn point(t_s: f64, ms: f64) -> RequestPoint {
        RequestPoint { t_s, ms, answered: true }
    }

    /// The memory's part from 4 s on; the guest runs there after `total_s`, having stood still for 500 ms.
    fn moved(total_s: f64, requests: Vec<RequestPoint>) -> MoveReport {
        let phase = |name: &str, start_s, end_s| Phase { name: name.into(), start_s, end_s };
        MoveReport {
            total_s,
            ended_s: Some(total_s + 1.0),
            downtime_ms: Some(500.0),
            phases: vec![phase("disk", 0.1, 4.0), phase("memory", 4.0, total_s - 0.5)],
            requests,
            ..filled()
        }
    }

    fn runs(ours: MoveReport, plain: MoveReport) -> [Entry; 2] {
        let godwit = entry(&name(Guest::SMALL, Mover::Godwit), vec![ours]);
        let mut qemu = entry(&name(Guest::SMALL, Mover::Qemu), vec![]);
        qemu.report.baselines = vec![BaselineReport { name: Baseline::Qemu, stop_rule: String::new(), figures: plain }];
        [godwit, qemu]
    }

    #[test]
    fn an_answer_that_met_the_pause_is_the_memorys_and_not_what_came_after() {
        let requests =
            vec![point(-1.0, 30.0), point(2.0, 40.0), point(6.0, 50.0), point(8.2, 900.0), point(12.0, 20.0)];
        let table = &document(&runs(moved(8.0, requests), moved(10.0, vec![]))).tables[0];
        let longest: Vec<_> =
            table.rows[..5].iter().map(|row| (row[1].as_str(), row[3].as_str(), row[6].as_str())).collect();
        assert_eq!(
            longest,
            [
                ("before", "1", "30"),
                ("the disk is copied", "1", "40"),
                ("memory, until it runs there", "2", "900"),
                ("the whole move", "3", "900"),
                ("after", "1", "20")
            ]
        );
    }

    #[test]
    fn quantiles_are_values_that_were_seen() {
        let values: Vec<f64> = (1..=200).map(f64::from).collect();
        assert_eq!((quantile(&values, 0.5), quantile(&values, 0.99)), (Some(100.0), Some(198.0)));
        assert_eq!((quantile(&values[..1], 0.99), quantile(&[], 0.5)), (Some(1.0), None));
    }

    #[test]
    fn a_lost_request_and_a_longer_memory_part_break_the_bounds() {
        let judged =
            |ours, plain| document(&runs(ours, plain)).bounds.into_iter().map(|bound| bound.1).collect::<Vec<_>>();
        let plain = || moved(10.0, vec![]);
        assert_eq!(judged(moved(8.0, vec![point(1.0, 1.0)]), plain()), [Some(true), Some(true)]);
        let failed = RequestPoint { answered: false, ..point(1.0, 1.0) };
        assert_eq!(judged(moved(11.0, vec![failed]), plain()), [Some(false), Some(false)]);
        assert_eq!(judged(moved(8.0, vec![]), plain())[0], None);
        let late = MoveReport { outcome: Outcome::Cancelled, ..moved(8.0, vec![point(1.0, 1.0)]) };
        assert_eq!(judged(late, plain()), [Some(false), Some(false)]);
    }

    #[test]
    fn the_move_whose_guest_is_held_says_only_whether_its_memory_is_equal() {
        let judged = |ram_equal| {
            let mut held = moved(8.0, vec![point(1.0, 900.0)]);
            held.integrity.ram_equal = ram_equal;
            let document = document(&[entry(&compared_name(Mover::Godwit), vec![held])]);
            assert!(document.tables.is_empty() && document.drawings.is_empty());
            document.bounds.last().unwrap().1
        };
        assert_eq!([Some(true), Some(false), None].map(judged), [Some(true), Some(false), None]);
        let held = |cell: PlanCell| cell.scenario.contains("compare = true");
        assert!(held(compared_cell(Mover::Qemu)) && !held(cell(Guest::SMALL, Mover::Qemu)));
    }

    #[test]
    fn both_moves_are_in_one_drawing_with_their_pauses() {
        let document = document(&runs(moved(8.0, vec![point(1.0, 30.0)]), moved(10.0, vec![point(1.0, 60.0)])));
        let drawing = document.drawings[0].svg();
        assert!(drawing.contains("from 7.50 s for 500 ms") && drawing.contains("from 9.50 s for 500 ms"), "{drawing}");
        assert!(document.html().contains("Response times"));
    }
}
