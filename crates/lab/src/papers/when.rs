//! When to move: a guest that writes for some seconds and then rests, as a build or a batch job does.
//!
//! It is watched for a minute. Then it is moved there and back: half of the times at the moment that `godwit predict --when` names, and
//! in between at moments that are spread evenly over its period, which are what somebody gets who does not ask. The bound is the mean of the ones
//! against the mean of the others.
//!
//! What can go wrong: the guest's clock and the host's part, so that a period does not begin when the log says; moves stop guests for less
//! than a second, and a period has [`PERIOD_S`]. So the lab holds it to compare its memory in the last move only.

use super::{Document, Extent, PlanCell, Table, instead, move_steps, remarks, report_of, unless_lost};
use crate::ledger::Entry;
use crate::report::{MoveReport, Outcome};
use crate::table::{figure, in_mib};

/// Half of it the guest writes, half of it it rests, seconds. It divides a day: the same time tomorrow is the same moment.
const PERIOD_S: u32 = 24;
/// Moments that are tried besides the best, in as many periods.
const SPREAD: u32 = 6;
const QUICK_SPREAD: u32 = 4;
const PAGES_PER_S: u32 = 3000;
/// MiB.
const WORKING_SET: u32 = 24;
const LINK_MBIT: u32 = 50;
const WATCHED_S: u32 = 60;

fn name(spread: u32) -> String {
    format!("{LINK_MBIT}mbit-{PAGES_PER_S}pages-{spread}moments")
}

/// The moments of a cell's moves, in their order; none: the one that is named as the best.
fn moments(spread: u32) -> Vec<Option<u32>> {
    (0..spread).flat_map(|i| [None, Some(i * PERIOD_S / spread)]).collect()
}

fn plan(spread: u32) -> PlanCell {
    let sites = ["b", "a"].into_iter().cycle();
    let moments = moments(spread);
    let last = moments.len() - 1;
    let steps = moments.iter().zip(sites).enumerate();
    let moves: String = steps.map(|(nth, (moment, to))| step(*moment, to, nth == last)).collect();
    let scenario = format!(
        r#"name = "figures-when"
godwit = true
warm_percent = 40
move_timeout_s = 300

[wan]
rate_mbit = {LINK_MBIT}
rtt_ms = 20

[[site]]
name = "a"
[[site]]
name = "b"

[[vm]]
name = "vm"
site = "a"
memory_mib = 128
disk_gib = 0.1
load = [
  {{ kind = "memory", pages_per_s = {PAGES_PER_S}, working_set_mib = {WORKING_SET}, bytes_per_page = 2048, busy_s = {half}, rest_s = {half} }},
]

[[step]]
after_s = 2
profile = {{ vm = "vm", s = {WATCHED_S}, interval_s = 0.25, to = "b" }}
{moves}[[step]]
verify = {{ vm = "vm" }}
"#,
        half = PERIOD_S / 2,
    );
    PlanCell { name: name(spread), scenario }
}

fn step(moment: Option<u32>, to: &str, compare: bool) -> String {
    let at = moment.map_or_else(String::new, |at| format!(", at_s = {at}"));
    let moment = format!("{{ period_s = {PERIOD_S}{at} }}");
    move_steps(&format!("{{ vm = \"vm\", to = \"{to}\", compare = {compare}, moment = {moment} }}"))
}

pub(super) fn cells(extent: Extent) -> Vec<PlanCell> {
    match extent {
        Extent::Quick => vec![plan(QUICK_SPREAD)],
        Extent::Full => vec![plan(QUICK_SPREAD), plan(SPREAD)],
    }
}

/// Means over moves that got there: of the time in seconds, of the pause in ms, of what crossed the link in bytes.
fn means<'a>(moves: impl Iterator<Item = &'a MoveReport>) -> Option<[f64; 3]> {
    let all: Vec<_> = moves.filter(|m| m.outcome == Outcome::Completed).collect();
    let mean = |of: fn(&MoveReport) -> f64| all.iter().map(|m| of(m)).sum::<f64>() / all.len() as f64;
    (!all.is_empty())
        .then(|| [mean(MoveReport::took_s), mean(|m| m.downtime_ms.unwrap_or(0.0)), mean(|m| m.bytes.total() as f64)])
}

fn row(who: String, figures: [Option<f64>; 3]) -> Vec<String> {
    let [time, pause, bytes] = figures;
    vec![who, figure(time, 1), figure(pause, 0), figure(bytes.map(|b| in_mib(b as u64)), 1)]
}

pub(super) fn document(entries: &[Entry]) -> Document {
    let (mut rows, mut best, mut others) = (vec![], vec![], vec![]);
    for spread in [QUICK_SPREAD, SPREAD] {
        let Some(report) = report_of(entries, &name(spread)) else { continue };
        for (moment, figures) in moments(spread).into_iter().zip(&report.moves) {
            let who = moment.map_or_else(|| "the best, it was said".to_owned(), |at| format!("{at} s into the period"));
            let of = |value: f64| (figures.outcome == Outcome::Completed).then_some(value);
            let shown = [of(figures.took_s()), figures.downtime_ms.and_then(of), of(figures.bytes.total() as f64)];
            let mut row = row(who, shown);
            row.push(instead(Some(figures)));
            rows.push(row);
            if moment.is_none() { &mut best } else { &mut others }.push(figures);
        }
    }
    let all = [best.as_slice(), others.as_slice()].concat();
    let (best, others) = (means(best.into_iter()), means(others.into_iter()));
    for (who, means) in [("mean of the best moments", best), ("mean of the others", others)] {
        let mut row = row(who.into(), [0, 1, 2].map(|i| means.map(|m| m[i])));
        row.push(String::new());
        rows.push(row);
    }
    let beats = |i: usize| unless_lost(best.zip(others).map(|(best, others)| best[i] < others[i]), all.iter().copied());
    Document {
        title: "When to move".into(),
        tables: vec![Table {
            title: format!(
                "A guest that writes {PAGES_PER_S} pages a second for {half} s and rests for {half} s, over {LINK_MBIT} Mbit/s",
                half = PERIOD_S / 2
            ),
            columns: ["ordered", "total s", "pause ms", "MiB", ""].map(str::to_owned).into(),
            words: 1,
            rows,
        }],
        bounds: vec![
            ("the pause at the best moment is shorter than at the mean of all others".into(), beats(1)),
            ("the move at the best moment takes less time".into(), beats(0)),
        ],
        remarks: remarks(entries),
        ..Document::default()
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{entry, filled};
    use super::*;

    #[test]
    fn the_best_moments_are_judged_by_their_mean_against_the_others() {
        let took = |total_s, ms| MoveReport { total_s, downtime_ms: Some(ms), ..filled() };
        let [shorter, longer] = [took(5.0, 100.0), took(9.0, 300.0)];
        let judged = |one: &MoveReport, other: &MoveReport| {
            let moves = (0..QUICK_SPREAD).flat_map(|_| [one.clone(), other.clone()]).collect();
            document(&[entry(&name(QUICK_SPREAD), moves)]).bounds.into_iter().map(|bound| bound.1).collect::<Vec<_>>()
        };
        assert_eq!(judged(&shorter, &longer), [Some(true); 2]);
        assert_eq!(judged(&longer, &shorter), [Some(false); 2]);
        let late = MoveReport { outcome: Outcome::Cancelled, ..longer.clone() };
        assert_eq!(judged(&shorter, &late), [Some(false); 2]);
        assert_eq!(document(&[]).bounds[0].1, None);
    }

    #[test]
    fn every_other_move_is_at_the_best_moment_and_the_rest_is_spread_over_the_period() {
        assert_eq!(moments(2), [None, Some(0), None, Some(PERIOD_S / 2)]);
    }

    #[test]
    fn the_last_move_alone_is_held_and_that_is_not_its_time() {
        let scenario = plan(QUICK_SPREAD).scenario;
        let held: Vec<bool> = (scenario.lines())
            .filter(|line| line.starts_with("move = "))
            .map(|line| line.contains("compare = true"))
            .collect();
        assert_eq!(held.iter().position(|held| *held), Some(2 * QUICK_SPREAD as usize - 1));
        let moved = MoveReport { total_s: 6.0, held_ms: 1000.0, ..filled() };
        assert_eq!(means([&moved].into_iter()).map(|means| means[0]), Some(5.0));
    }
}
