//! An application over a whole pass: what was answered and what was not, against the moves of its parts.

use super::axis::Axis;
use super::charts::{Chart, Plot, WIDTH, axis_of_time};
use super::svg::{Anchor, shorten};
use crate::report::{Application, ApplicationPoint, Mark};

/// Height of a row of the bars that show what moved.
const ROW: f64 = 16.0;
/// Longest text beside a bar.
const LABEL: usize = 28;

/// The charts of one application: requests a second, and how long they took.
pub(super) fn charts(seen: &Application, marks: &[Mark]) -> Vec<Chart> {
    let shown: Vec<ApplicationPoint> = seen.points.iter().copied().filter(|p| p.t_s.is_finite()).collect();
    let (Some(first), Some(last)) = (shown.first(), shown.last()) else { return vec![] };
    let time = axis_of_time((first.t_s, last.t_s + seen.interval_s));
    let stops: Vec<(f64, f64)> = marks.iter().filter_map(|mark| mark.stop_s.map(|[from, to]| (from, to))).collect();
    vec![requests(seen, &shown, time, &stops), latency(seen, &shown, time, &stops), moves(marks, time)]
        .into_iter()
        .flatten()
        .collect()
}

fn requests(seen: &Application, points: &[ApplicationPoint], time: Axis, stops: &[(f64, f64)]) -> Option<Chart> {
    let rate = |of: &dyn Fn(&ApplicationPoint) -> u32| -> Vec<(f64, f64)> {
        let steps = points.iter().flat_map(|point| {
            let rate = f64::from(of(point)) / seen.interval_s;
            [(point.t_s, rate), (point.t_s + seen.interval_s, rate)]
        });
        steps.collect()
    };
    let good = rate(&|p| p.good);
    let bad = rate(&|p| p.late + p.failed + p.wrong);
    let most = good.iter().chain(&bad).map(|p| p.1).fold(0.0, f64::max);
    if most <= 0.0 {
        return None;
    }
    let mut plot = Plot::over("requests a second", 170.0, time, stops, |px| Axis::from_zero(most, px), "a second");
    for (class, line) in [("l-read", &good), ("l-dirty", &bad)] {
        let line: Vec<_> = line.iter().map(|p| plot.point(*p)).collect();
        plot.svg.polyline(class, line);
    }
    let note = format!(
        "{} of {} sessions from {} to {}; late is after 2 s.",
        match seen.think_ms {
            0 => "One request after the other".to_owned(),
            ms => format!("A request {ms} ms after each answer"),
        },
        seen.sessions,
        seen.from,
        seen.vm
    );
    let legend = vec![("c-memory", "in time"), ("c-dirty", "late, failed or wrong")];
    let title = format!("Requests to {} through {} tiers{}", seen.vm, seen.tiers, seen.pass());
    Some(Chart { title, legend, note, svg: plot.svg.finish() })
}

fn latency(seen: &Application, points: &[ApplicationPoint], time: Axis, stops: &[(f64, f64)]) -> Option<Chart> {
    let middle = seen.interval_s / 2.0;
    let of = |value: &dyn Fn(&ApplicationPoint) -> Option<f64>| -> Vec<(f64, f64)> {
        points.iter().filter_map(|p| Some((p.t_s + middle, value(p)?))).filter(|p| p.1 > 0.0).collect()
    };
    let (median, longest) = (of(&|p| p.median_ms), of(&|p| p.longest_ms));
    let low = median.iter().map(|p| p.1).fold(f64::INFINITY, f64::min);
    let high = longest.iter().map(|p| p.1).fold(0.0, f64::max);
    if high <= 0.0 {
        return None;
    }
    let mut plot = Plot::over("time of requests", 150.0, time, stops, |px| Axis::log((low, high), px), "ms");
    for (class, line) in [("l-longest dot", &longest), ("l-median dot", &median)] {
        let line: Vec<_> = line.iter().map(|p| plot.point(*p)).collect();
        plot.svg.dots(class, line);
    }
    let legend = vec![("c-memory", "median"), ("c-dirty", "longest")];
    let note = "Of those that ended in each interval.".into();
    Some(Chart { title: "How long requests took".into(), legend, note, svg: plot.svg.finish() })
}

/// What moved when: a bar for each.
fn moves(marks: &[Mark], time: Axis) -> Option<Chart> {
    let mut marks: Vec<&Mark> = marks.iter().filter(|m| m.start_s.is_finite() && m.end_s.is_finite()).collect();
    if marks.is_empty() {
        return None;
    }
    marks.sort_by(|a, b| a.start_s.total_cmp(&b.start_s));
    let stops: Vec<(f64, f64)> = marks.iter().filter_map(|mark| mark.stop_s.map(|[from, to]| (from, to))).collect();
    let mut plot = Plot::rows("moves", ROW * marks.len() as f64, marks.len(), time, &stops);
    for (row, mark) in marks.iter().enumerate() {
        let ((from, top), (to, _)) = (plot.point((mark.start_s, row as f64)), plot.point((mark.end_s, row as f64)));
        let what = format!("{} to {}", mark.what, mark.to);
        plot.svg.rect("bar", (from, top + 3.0), ((to - from).max(2.0), ROW - 6.0), &what);
        let (at, anchor) = if to > WIDTH * 0.7 { (from - 5.0, Anchor::End) } else { (to + 5.0, Anchor::Start) };
        plot.svg.text("note halo", (at, top + ROW - 4.5), anchor, &shorten(&what, LABEL));
    }
    let note = "Guests stand still in the shaded stretches.".into();
    Some(Chart { title: "What moved".into(), legend: vec![], note, svg: plot.svg.finish() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_application_has_its_requests_its_times_and_what_moved_and_one_without_requests_has_nothing() {
        let point = |t_s: f64, good| ApplicationPoint {
            t_s,
            good,
            late: 1,
            median_ms: Some(12.0),
            longest_ms: Some(300.0),
            ..ApplicationPoint::default()
        };
        let points = vec![point(-0.5, 4), point(0.0, 8), ApplicationPoint { t_s: 0.5, ..ApplicationPoint::default() }];
        let seen = Application { vm: "web<".into(), tiers: 3, interval_s: 0.5, points, ..Application::default() };
        let mark = |what: &str, stop_s| Mark {
            what: what.into(),
            to: "texas".into(),
            start_s: 0.1,
            end_s: 0.4,
            stop_s,
            ..Mark::default()
        };
        let charts = charts(&seen, &[mark("web", Some([0.2, 0.3])), mark("fw1", None)]);
        let titles: Vec<_> = charts.iter().map(|chart| chart.title.as_str()).collect();
        assert_eq!(titles, ["Requests to web< through 3 tiers", "How long requests took", "What moved"]);
        assert!(charts[2].svg.contains("fw1 to texas"), "{}", charts[2].svg);
        assert!(charts.iter().all(|chart| chart.svg.contains("stopped") && !chart.svg.contains("NaN")));
        assert!(super::charts(&Application::default(), &[]).is_empty());
    }
}
