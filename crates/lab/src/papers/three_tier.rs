//! VirtualWire, section 5.3: an application of three tiers with firewalls between them, moved tier by tier under load and back as a
//! whole; its networks split into a switch each, and all on one central switch.

use super::{Document, Drawing, PlanCell, Table, remarks, report_of};
use crate::ledger::Entry;
use crate::report::{Application, ApplicationPoint, Mark, Report};
use crate::table::{figure, median};
use std::collections::BTreeMap;

const SPLIT: &str = "split";
const CENTRAL: &str = "central";
/// The scenarios; `godwit-lab run` takes them as well.
const SCENARIOS: [(&str, &str); 2] = [
    (SPLIT, include_str!("../../../../scenarios/three-tier.toml")),
    (CENTRAL, include_str!("../../../../scenarios/three-tier-central.toml")),
];
/// The application's parts, of which both scenarios move the same in the same order; the rest are switches.
const PARTS: [&str; 5] = ["web", "fw1", "app", "fw2", "db"];
/// Where they are moved to, and back from.
const FAR: &str = "texas";
/// Stretches in which nothing moves count from this length on, seconds.
const QUIET_S: f64 = 2.0;

pub(super) fn cells() -> Vec<PlanCell> {
    SCENARIOS.iter().map(|(name, text)| PlanCell { name: (*name).into(), scenario: (*text).into() }).collect()
}

/// A stretch of a run, and what was moved last before it or is moved in it.
#[derive(Debug, PartialEq)]
struct Stretch {
    from_s: f64,
    to_s: f64,
    what: String,
    moves: bool,
}

/// The run in stretches with and without moves, in order.
fn stretches(marks: &[Mark], until_s: f64) -> Vec<Stretch> {
    let mut marks: Vec<&Mark> = marks.iter().collect();
    marks.sort_by(|a, b| a.start_s.total_cmp(&b.start_s));
    let mut found: Vec<Stretch> = vec![];
    let (mut at_s, mut last) = (0.0, "before any move".to_owned());
    for mark in marks {
        match found.last_mut().filter(|stretch| stretch.moves && mark.start_s < stretch.to_s + QUIET_S) {
            // With, or right after, the one before.
            Some(stretch) => {
                stretch.to_s = stretch.to_s.max(mark.end_s);
                let to = format!(" to {}", mark.to);
                stretch.what = format!("{}, {}{to}", stretch.what.trim_end_matches(&to), mark.what);
                last = format!("after {}", stretch.what);
                at_s = stretch.to_s;
            }
            None => {
                found.push(Stretch { from_s: at_s, to_s: mark.start_s, what: last, moves: false });
                let what = format!("{} to {}", mark.what, mark.to);
                last = format!("after {what}");
                found.push(Stretch { from_s: mark.start_s, to_s: mark.end_s, what, moves: true });
                at_s = mark.end_s;
            }
        }
    }
    found.push(Stretch { from_s: at_s, to_s: until_s, what: last, moves: false });
    found.retain(|stretch| stretch.moves || stretch.to_s - stretch.from_s >= QUIET_S);
    found
}

/// What clients had in a stretch.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Had {
    good_per_s: Option<f64>,
    median_ms: Option<f64>,
    longest_ms: Option<f64>,
    late: u64,
    failed: u64,
}

fn had(stretch: &Stretch, seen: &Application) -> Had {
    // Only whole intervals: a part of one would be counted for another stretch.
    let inside = |p: &&ApplicationPoint| p.t_s >= stretch.from_s && p.t_s + seen.interval_s <= stretch.to_s;
    let points: Vec<&ApplicationPoint> = seen.points.iter().filter(inside).collect();
    let seconds = points.len() as f64 * seen.interval_s;
    let sum = |of: fn(&ApplicationPoint) -> u32| points.iter().map(|p| u64::from(of(p))).sum::<u64>();
    Had {
        good_per_s: (seconds > 0.0).then(|| sum(|p| p.good) as f64 / seconds),
        median_ms: median(points.iter().filter_map(|p| p.median_ms)),
        longest_ms: points.iter().filter_map(|p| p.longest_ms).reduce(f64::max),
        late: sum(|p| p.late),
        failed: sum(|p| p.failed + p.wrong),
    }
}

fn row(stretch: &Stretch, seen: &Application) -> Vec<String> {
    let had = had(stretch, seen);
    vec![
        if stretch.moves { format!("{} (moving)", stretch.what) } else { stretch.what.clone() },
        figure(Some(stretch.to_s - stretch.from_s), 1),
        figure(had.good_per_s, 1),
        figure(had.median_ms, 1),
        figure(had.longest_ms, 0),
        had.late.to_string(),
        had.failed.to_string(),
    ]
}

/// How many moves of the application's parts are over, and which of these are at the other site then; of a stretch in which nothing moves.
fn stage(marks: &[Mark], stretch: &Stretch) -> (usize, String) {
    let over: Vec<&Mark> =
        marks.iter().filter(|m| PARTS.contains(&m.what.as_str()) && m.end_s <= stretch.from_s).collect();
    let latest = |part: &&&str| over.iter().filter(|m| m.what == **part).max_by(|a, b| a.end_s.total_cmp(&b.end_s));
    let away: Vec<&str> = PARTS.iter().filter(|part| latest(part).is_some_and(|m| m.to == FAR)).copied().collect();
    (over.len(), if away.is_empty() { "nothing".into() } else { away.join(", ") })
}

/// What clients had while nothing moved, by how many parts' moves were over; where a switch moved in between, after that.
fn stages(report: &Report) -> BTreeMap<usize, (String, Had)> {
    let Some(seen) = report.applications.first() else { return BTreeMap::new() };
    let until_s = seen.points.last().map_or(0.0, |p| p.t_s + seen.interval_s);
    let quiet = stretches(&report.marks, until_s).into_iter().filter(|stretch| !stretch.moves);
    let staged = quiet.map(|stretch| {
        let (over, away) = stage(&report.marks, &stretch);
        (over, (away, had(&stretch, seen)))
    });
    staged.collect()
}

/// The split switches beside the central one.
fn compared(split: &Report, central: &Report) -> Table {
    let central = stages(central);
    let rows = stages(split).into_iter().filter_map(|(over, (away, split))| {
        let (_, central) = central.get(&over)?;
        let ratio = split.good_per_s.zip(central.good_per_s).filter(|(_, b)| *b > 0.0).map(|(a, b)| a / b);
        let name = if over > PARTS.len() { format!("{away}, after all have moved back") } else { away };
        Some(vec![
            name,
            figure(split.good_per_s, 1),
            figure(central.good_per_s, 1),
            figure(ratio, 3),
            figure(split.median_ms, 1),
            figure(central.median_ms, 1),
        ])
    });
    Table {
        title: "Split switches beside a central one, while nothing moves".into(),
        columns: [
            "at the other site",
            "good a second: split",
            "central",
            "split of central",
            "median ms: split",
            "central",
        ]
        .map(str::to_owned)
        .into(),
        words: 1,
        rows: rows.collect(),
    }
}

fn table(name: &str, report: &Report) -> Option<Table> {
    let seen = report.applications.first()?;
    let until_s = seen.points.last().map_or(0.0, |p| p.t_s + seen.interval_s);
    Some(Table {
        title: format!("{name}: {} sessions from {} through {} tiers", seen.sessions, seen.from, seen.tiers),
        columns: ["stretch", "seconds", "good a second", "median ms", "longest ms", "late", "failed"]
            .map(str::to_owned)
            .into(),
        words: 1,
        rows: stretches(&report.marks, until_s).iter().map(|stretch| row(stretch, seen)).collect(),
    })
}

pub(super) fn document(entries: &[Entry]) -> Document {
    let runs: Vec<(&str, &Report)> =
        SCENARIOS.iter().filter_map(|(name, _)| Some((*name, report_of(entries, name)?))).collect();
    let line = |(name, report): &(&str, &Report)| {
        let seen = report.applications.first()?;
        let points = seen.points.iter().filter(|p| p.t_s >= 0.0);
        Some(((*name).to_owned(), points.map(|p| (p.t_s, f64::from(p.good) / seen.interval_s)).collect()))
    };
    let errors = |report: &Report| report.applications.iter().map(|seen| seen.failed + seen.wrong).sum::<u64>();
    let bound = |(name, _): &(&str, &str)| {
        let found = report_of(entries, name).filter(|report| !report.applications.is_empty()).map(errors);
        let counted = found.map_or(String::new(), |n| format!(" ({n})"));
        (format!("{name}: no request failed or was answered wrong{counted}"), found.map(|n| n == 0))
    };
    let mut tables: Vec<Table> = runs.iter().filter_map(|(name, report)| table(name, report)).collect();
    if let [(_, split), (_, central)] = runs.as_slice() {
        tables.push(compared(split, central));
    }
    let mut drawings = vec![Drawing {
        name: "three-tier-requests".into(),
        title: "Requests answered in time, tier by tier and as a whole".into(),
        x: "seconds".into(),
        y: "a second".into(),
        lines: runs.iter().filter_map(line).collect(),
        drawn: None,
    }];
    drawings.extend(runs.iter().flat_map(|(name, report)| crate::plot::application_drawings(name, report)));
    Document {
        title: "An application of three tiers on the move (VirtualWire, section 5.3)".into(),
        tables,
        drawings,
        bounds: SCENARIOS.iter().map(bound).collect(),
        remarks: remarks(entries),
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::entry;
    use super::*;

    fn mark(what: &str, to: &str, start_s: f64, end_s: f64) -> Mark {
        Mark { what: what.into(), to: to.into(), start_s, end_s, ..Mark::default() }
    }

    #[test]
    fn moves_that_follow_each_other_at_once_are_one_stretch_and_quiet_is_another() {
        let marks =
            [mark("web", "texas", 8.0, 18.0), mark("net1", "texas", 18.5, 19.0), mark("fw1", "texas", 25.0, 25.5)];
        let found = stretches(&marks, 40.0);
        let said: Vec<_> = found.iter().map(|s| (s.what.as_str(), s.from_s, s.to_s, s.moves)).collect();
        assert_eq!(
            said,
            [
                ("before any move", 0.0, 8.0, false),
                ("web, net1 to texas", 8.0, 19.0, true),
                ("after web, net1 to texas", 19.0, 25.0, false),
                ("fw1 to texas", 25.0, 25.5, true),
                ("after fw1 to texas", 25.5, 40.0, false),
            ]
        );
    }

    #[test]
    fn the_split_switches_are_compared_with_the_central_one_where_as_many_parts_have_moved() {
        let run = |marks: Vec<Mark>, good: u32| {
            let point = |n: u32| ApplicationPoint { t_s: f64::from(n) * 0.5, good, ..ApplicationPoint::default() };
            let points = (0..100).map(point).collect();
            let mut found = entry("any", vec![]).report;
            found.applications = vec![Application { interval_s: 0.5, points, ..Application::default() }];
            found.marks = marks;
            found
        };
        let split =
            run(vec![mark("web", FAR, 5.0, 8.0), mark("net1", FAR, 8.0, 8.5), mark("web", "illinois", 20.0, 23.0)], 30);
        let central = run(vec![mark("web", FAR, 6.0, 8.0), mark("sw", FAR, 12.0, 13.0)], 20);
        let rows = compared(&split, &central).rows;
        let said: Vec<Vec<&str>> = rows.iter().map(|row| row[..4].iter().map(String::as_str).collect()).collect();
        assert_eq!(said, [["nothing", "60.0", "40.0", "1.500"], ["web", "60.0", "40.0", "1.500"]]);
        assert_eq!(stages(&split)[&2].0, "nothing");
    }

    #[test]
    fn a_stretch_counts_its_own_intervals_and_a_failure_breaks_the_bound() {
        let point = |n: u32| ApplicationPoint {
            t_s: f64::from(n) * 0.5,
            good: n,
            failed: u32::from(n == 9),
            ..ApplicationPoint::default()
        };
        let seen =
            Application { interval_s: 0.5, failed: 1, points: (0..20).map(point).collect(), ..Application::default() };
        let stretch = Stretch { from_s: 1.0, to_s: 3.2, what: "x".into(), moves: false };
        assert_eq!(row(&stretch, &seen)[2], "7.0", "2 + 3 + 4 + 5 in 2 s");
        let mut found = entry(SPLIT, vec![]);
        found.report.applications = vec![seen];
        assert_eq!(document(&[found.clone()]).bounds[0].1, Some(false));
        found.report.applications[0].failed = 0;
        assert_eq!(document(&[found]).bounds[0].1, Some(true));
    }
}
