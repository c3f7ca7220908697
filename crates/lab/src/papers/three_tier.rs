//! VirtualWire, section 5.3: an application of three tiers with firewalls between them, moved tier by tier under load and back as a
//! whole; its networks split into a switch each, and all on one central switch.

use super::{Document, Drawing, PlanCell, Table, remarks, report_of};
use crate::ledger::Entry;
use crate::report::{Application, ApplicationPoint, Mark, Report};
use crate::table::{figure, median};

const SPLIT: &str = "split";
const CENTRAL: &str = "central";
/// The scenarios; `godwit-lab run` takes them as well.
const SCENARIOS: [(&str, &str); 2] = [
    (SPLIT, include_str!("../../../../scenarios/three-tier.toml")),
    (CENTRAL, include_str!("../../../../scenarios/three-tier-central.toml")),
];
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

fn row(stretch: &Stretch, seen: &Application) -> Vec<String> {
    // Only whole intervals: a part of one would be counted for another stretch.
    let inside = |p: &&ApplicationPoint| p.t_s >= stretch.from_s && p.t_s + seen.interval_s <= stretch.to_s;
    let points: Vec<&ApplicationPoint> = seen.points.iter().filter(inside).collect();
    let seconds = points.len() as f64 * seen.interval_s;
    let sum = |of: fn(&ApplicationPoint) -> u32| points.iter().map(|p| u64::from(of(p))).sum::<u64>();
    let rate = (seconds > 0.0).then(|| sum(|p| p.good) as f64 / seconds);
    let longest =
        points.iter().filter_map(|p| p.longest_ms).fold(None, |a: Option<f64>, b| Some(a.map_or(b, |a| a.max(b))));
    vec![
        if stretch.moves { format!("{} (moving)", stretch.what) } else { stretch.what.clone() },
        figure(Some(stretch.to_s - stretch.from_s), 1),
        figure(rate, 1),
        figure(median(points.iter().filter_map(|p| p.median_ms)), 1),
        figure(longest, 0),
        sum(|p| p.late).to_string(),
        sum(|p| p.failed + p.wrong).to_string(),
    ]
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
        tables: runs.iter().filter_map(|(name, report)| table(name, report)).collect(),
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
        Mark { what: what.into(), to: to.into(), start_s, end_s, stop_s: None }
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
