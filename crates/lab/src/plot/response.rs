//! What clients waited for their answers through moves, one over the other: CloudNet's figure 8.
//!
//! All moves begin at zero. A line is the median of each half second, dots are its longest answers; the axis is logarithmic, because an answer
//! that met the pause takes a hundred times as long as others. Where a guest stood still is shaded, in its move's colour; a line marks where
//! the move ended.

use super::axis::Axis;
use super::lines::alone;
use super::svg::{Anchor, Svg};
use crate::report::RequestPoint;

/// One move, as its clients saw it; seconds from its beginning.
pub(crate) struct Curve<'a> {
    /// Who moved the guest.
    pub name: &'a str,
    /// The requests.
    pub requests: &'a [RequestPoint],
    /// From when until when the guest stood still.
    pub pause_s: Option<(f64, f64)>,
    /// When the move had ended.
    pub end_s: f64,
}

const WIDTH: f64 = 960.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 20.0;
const TOP: f64 = 64.0;
const FLOOR: f64 = 380.0;
/// Height of a line of words.
const ROW: f64 = 16.0;
/// Length of the intervals, seconds.
const INTERVAL_S: f64 = 0.5;
/// Curves that are told apart.
const COLOURS: usize = 2;

const CSS: &str = "
svg { background: #ffffff; font: 12px system-ui, 'DejaVu Sans', sans-serif; }
text { fill: #1c2128; } .tick, .unit { fill: #5b6673; font-size: 11px; } .title { font-size: 14px; font-weight: 600; }
.grid { stroke: #e3e7eb; } .axis { stroke: #9aa4af; } .begin { stroke: #1c2128; stroke-dasharray: 5 4; }
path { fill: none; stroke-width: 1.6; stroke-linejoin: round; } path.dot { stroke-width: 3; stroke-linecap: round; stroke-opacity: .55; }
.s0 { stroke: #2b6cb0; } .s1 { stroke: #c0392b; } line.s0, line.s1 { stroke-width: 1.4; stroke-dasharray: 2 3; }
.f0 { fill: #2b6cb0; fill-opacity: .22; } .f1 { fill: #c0392b; fill-opacity: .22; } .t0 { fill: #2b6cb0; } .t1 { fill: #c0392b; }
";

/// The median and the longest of each interval in which something was answered, at its middle.
fn intervals(requests: &[RequestPoint]) -> Vec<(f64, f64, f64)> {
    let number = |point: &RequestPoint| (point.t_s / INTERVAL_S).floor();
    let mut answered: Vec<&RequestPoint> =
        requests.iter().filter(|p| p.answered && p.t_s.is_finite() && p.ms.is_finite()).collect();
    answered.sort_by(|a, b| a.t_s.total_cmp(&b.t_s));
    let of_one = |points: &[&RequestPoint]| {
        let mut took: Vec<f64> = points.iter().map(|p| p.ms).collect();
        took.sort_by(f64::total_cmp);
        ((number(points[0]) + 0.5) * INTERVAL_S, took[took.len() / 2], took[took.len() - 1])
    };
    answered.chunk_by(|a, b| number(a) == number(b)).map(of_one).collect()
}

/// The drawing, with its style in it.
pub(crate) fn chart(title: &str, curves: &[Curve<'_>]) -> String {
    let found: Vec<Vec<(f64, f64, f64)>> = curves.iter().map(|curve| intervals(curve.requests)).collect();
    let all = || found.iter().flatten();
    let ends = curves.iter().map(|curve| curve.end_s).filter(|end| end.is_finite());
    let last = all().map(|p| p.0).chain(ends).fold(1.0, f64::max);
    let first = all().map(|p| p.0).fold(0.0, f64::min);
    let low = all().map(|p| p.1).filter(|ms| *ms > 0.0).fold(f64::INFINITY, f64::min);
    let high = all().map(|p| p.2).fold(0.0, f64::max);
    let across = Axis::linear((first, last), (LEFT, WIDTH - RIGHT));
    let up = Axis::log((low, high), (FLOOR, TOP));
    let mut svg = Svg::new(title, WIDTH, FLOOR + 44.0);
    svg.text("title", (LEFT, 20.0), Anchor::Start, title);
    for (number, curve) in curves.iter().enumerate() {
        if let Some((from, to)) = curve.pause_s {
            let (from, to) = (across.at(from), across.at(to));
            let hint = format!("{}: the guest stands still", curve.name);
            let colour = number % COLOURS;
            svg.rect(&format!("f{colour}"), (from, TOP), ((to - from).max(1.5), FLOOR - TOP), &hint);
            let row = FLOOR - 8.0 - ROW * number as f64;
            svg.text(&format!("t{colour}"), (from - 4.0, row), Anchor::End, "pause");
        }
    }
    for tick in up.ticks(4) {
        let at = up.at(tick.value);
        svg.line("grid", (LEFT, at), (WIDTH - RIGHT, at));
        svg.text("tick", (LEFT - 7.0, at + 4.0), Anchor::End, &tick.label);
    }
    for tick in across.ticks(10) {
        let at = across.at(tick.value);
        svg.text("tick", (at, FLOOR + 16.0), Anchor::Middle, &tick.label);
    }
    svg.line("axis", (LEFT, FLOOR), (WIDTH - RIGHT, FLOOR));
    svg.text("unit", (LEFT - 7.0, TOP - 8.0), Anchor::End, "ms");
    svg.text("unit", (f64::midpoint(LEFT, WIDTH - RIGHT), FLOOR + 34.0), Anchor::Middle, "seconds from the order");
    svg.line("begin", (across.at(0.0), TOP), (across.at(0.0), FLOOR));
    svg.text("tick", (across.at(0.0) + 4.0, TOP + 11.0), Anchor::Start, "begin");
    for (number, (curve, points)) in curves.iter().zip(&found).enumerate() {
        let colour = number % COLOURS;
        svg.polyline(&format!("s{colour}"), points.iter().map(|p| (across.at(p.0), up.at(p.1))));
        svg.dots(&format!("s{colour} dot"), points.iter().map(|p| (across.at(p.0), up.at(p.2))));
        if curve.end_s.is_finite() {
            let end = across.at(curve.end_s);
            svg.line(&format!("s{colour}"), (end, TOP), (end, FLOOR));
            svg.text(&format!("t{colour}"), (end + 4.0, TOP + 11.0 + ROW * number as f64), Anchor::Start, "end");
        }
        let at = 38.0 + ROW * number as f64;
        svg.polyline(&format!("s{colour}"), [(LEFT, at - 4.0), (LEFT + 22.0, at - 4.0)]);
        svg.text("label", (LEFT + 29.0, at), Anchor::Start, &said(curve));
    }
    alone(&svg.finish(), CSS)
}

/// A curve's name, and its moments in figures.
fn said(curve: &Curve<'_>) -> String {
    let pause = curve.pause_s.map_or_else(String::new, |(from, to)| {
        format!(", stands still from {from:.2} s for {:.0} ms", (to - from) * 1e3)
    });
    format!("{}: median (line) and longest (dots){pause}, ends after {:.1} s", curve.name, curve.end_s)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(t_s: f64, ms: f64) -> RequestPoint {
        RequestPoint { t_s, ms, answered: true }
    }

    #[test]
    fn an_interval_has_its_median_and_its_longest_and_silence_has_nothing() {
        let failed = RequestPoint { answered: false, ..point(0.2, 9000.0) };
        let found = intervals(&[point(0.4, 30.0), point(0.1, 10.0), point(0.2, 20.0), failed, point(1.1, 500.0)]);
        assert_eq!(found, [(0.25, 20.0, 30.0), (1.25, 500.0, 500.0)]);
    }

    #[test]
    fn both_curves_are_in_it_with_where_each_began_stood_still_and_ended() {
        let requests = [point(-1.0, 30.0), point(1.0, 35.0), point(f64::NAN, 1.0), point(3.0, 900.0)];
        let curve = |name, end_s| Curve { name, requests: &requests, pause_s: Some((2.0, 2.9)), end_s };
        let drawing = chart("<A>", &[curve("ours & theirs", 3.0), curve("plain", 5.0)]);
        assert!(drawing.starts_with("<svg xmlns") && !drawing.contains("NaN") && !drawing.contains("inf"));
        assert!(drawing.contains("&lt;A&gt;") && drawing.contains("ours &amp; theirs"));
        for class in ["s0 dot", "s1 dot", "f0", "f1", "begin"] {
            assert_eq!(drawing.matches(&format!("class=\"{class}\"")).count(), 1, "{class}");
        }
        assert_eq!((drawing.matches(">end<").count(), drawing.matches(">pause<").count()), (2, 2));
        assert!(drawing.contains("from 2.00 s for 900 ms"));
        assert!(chart("nothing", &[]).starts_with("<svg xmlns"));
    }
}
