//! Lines over a number, as a drawing of its own: what papers have as a figure.

use super::axis::Axis;
use super::svg::{Anchor, Svg};

/// One line: a name and its points.
pub(crate) struct Line<'a> {
    /// What it is of.
    pub name: &'a str,
    /// Its points, in any order.
    pub points: &'a [(f64, f64)],
}

const WIDTH: f64 = 640.0;
const HEIGHT: f64 = 380.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 20.0;
const TOP: f64 = 40.0;
const BOTTOM: f64 = 48.0;
/// Height of a line of the legend.
const ROW: f64 = 16.0;
/// Colours that are told apart on paper and by those who do not see all of them; more lines begin again.
const COLOURS: usize = 5;

/// The style goes along: the drawing stands for itself.
const CSS: &str = "
svg { background: #ffffff; font: 12px system-ui, 'DejaVu Sans', sans-serif; }
text { fill: #1c2128; } .tick, .unit { fill: #5b6673; font-size: 11px; } .title { font-size: 14px; font-weight: 600; }
.grid { stroke: #e3e7eb; } .axis { stroke: #9aa4af; }
path { fill: none; stroke-width: 2; stroke-linejoin: round; } path.dot { stroke-width: 7; stroke-linecap: round; }
.s0 { stroke: #c0392b; } .s1 { stroke: #e09a3e; } .s2 { stroke: #3b78c3; } .s3 { stroke: #2b8a84; } .s4 { stroke: #8a63b8; }
";

/// The drawing, with its style in it.
pub(crate) fn chart(title: &str, x: &str, y: &str, lines: &[Line<'_>]) -> String {
    let all =
        || lines.iter().flat_map(|line| line.points.iter().copied()).filter(|p| p.0.is_finite() && p.1.is_finite());
    let right = all().map(|p| p.0).fold(0.0, f64::max);
    let top = all().map(|p| p.1).fold(0.0, f64::max);
    let floor = HEIGHT - BOTTOM;
    let across = Axis::from_zero(right, (LEFT, WIDTH - RIGHT));
    // Room for the legend above the highest point.
    let legend = ROW * lines.len() as f64;
    let up = Axis::from_zero(top * (floor - TOP) / (floor - TOP - legend).max(1.0), (floor, TOP));
    let mut svg = Svg::new(title, WIDTH, HEIGHT);
    svg.text("title", (LEFT, 20.0), Anchor::Start, title);
    for tick in up.ticks(6) {
        let at = up.at(tick.value);
        svg.line("grid", (LEFT, at), (WIDTH - RIGHT, at));
        svg.text("tick", (LEFT - 7.0, at + 4.0), Anchor::End, &tick.label);
    }
    for tick in across.ticks(8) {
        let at = across.at(tick.value);
        svg.line("grid", (at, TOP), (at, floor));
        svg.text("tick", (at, floor + 16.0), Anchor::Middle, &tick.label);
    }
    svg.line("axis", (LEFT, floor), (WIDTH - RIGHT, floor));
    svg.text("unit", (f64::midpoint(LEFT, WIDTH - RIGHT), HEIGHT - 10.0), Anchor::Middle, x);
    svg.text("unit", (LEFT - 7.0, TOP - 8.0), Anchor::End, y);
    for (number, line) in lines.iter().enumerate() {
        let class = format!("s{}", number % COLOURS);
        let mut points: Vec<(f64, f64)> =
            line.points.iter().copied().filter(|p| p.0.is_finite() && p.1.is_finite()).collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        let points: Vec<_> = points.into_iter().map(|p| (across.at(p.0), up.at(p.1))).collect();
        svg.polyline(&class, points.iter().copied());
        svg.dots(&format!("{class} dot"), points);
        let at = TOP + 12.0 + ROW * number as f64;
        svg.polyline(&class, [(LEFT + 12.0, at - 4.0), (LEFT + 34.0, at - 4.0)]);
        svg.text("label", (LEFT + 41.0, at), Anchor::Start, line.name);
    }
    alone(&svg.finish(), CSS)
}

/// A drawing that stands for itself: with its style in it, and its name space.
pub(crate) fn alone(drawing: &str, css: &str) -> String {
    let (head, body) = drawing.split_once('\n').expect("a drawing begins with its own line");
    let head = head.replacen("<svg ", "<svg xmlns=\"http://www.w3.org/2000/svg\" ", 1);
    format!("{head}\n<style>{css}</style>\n{body}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_drawing_holds_each_line_and_nothing_that_is_no_number() {
        let points = [(10.0, 5.0), (0.0, 1.0), (f64::NAN, 2.0)];
        let drawing =
            chart("A & B", "ms", "s", &[Line { name: "<one>", points: &points }, Line { name: "two", points: &[] }]);
        assert!(drawing.contains("A &amp; B") && drawing.contains("&lt;one&gt;") && !drawing.contains("NaN"));
        assert_eq!(drawing.matches("class=\"s0 dot\"").count(), 1);
    }
}
