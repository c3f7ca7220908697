//! Drawings like the paper's figures 1 and 3: time and downtime over the dirty rate, the model as a line, what was measured as dots.
//!
//! Each is an SVG by itself, which loads nothing. What is no number is left out, never drawn somewhere.

use crate::amount::{PageRate, Pages};
use crate::avg::Sequential;
use crate::rules::Rules;
use crate::simulate::{Link, simulate};
use godwit_units::Bytes;
use std::fmt::Write as _;

/// A move, predicted or measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Point {
    /// Pages that its guest dirtied in a second.
    pub pages_per_s: f64,
    /// How long it took.
    pub total_s: f64,
    /// How long the guest stood.
    pub downtime_ms: f64,
}

/// What is drawn over the dirty rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quantity {
    /// The total time, in seconds.
    Total,
    /// The downtime, in milliseconds.
    Downtime,
}

impl Quantity {
    const fn of(self, point: &Point) -> f64 {
        match self {
            Self::Total => point.total_s,
            Self::Downtime => point.downtime_ms,
        }
    }

    const fn label(self) -> &'static str {
        match self {
            Self::Total => "total migration time (s)",
            Self::Downtime => "total downtime (ms)",
        }
    }

    /// Below this a logarithmic scale is nearly linear.
    const fn unit(self) -> f64 {
        match self {
            Self::Total => 1.0,
            Self::Downtime => 20.0,
        }
    }
}

/// How values become places.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    /// In proportion, as in the paper.
    Linear,
    /// By their magnitude, from zero on: for rates and pauses that lie decades apart.
    Magnitude,
}

/// Pages a second below which the magnitude of a rate hardly matters.
const RATE_UNIT: f64 = 100.0;

/// How points are drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mark {
    /// As a line: a model's mean.
    Line,
    /// As a broken line: another model's.
    Dashes,
    /// As dots: measurements.
    Dots,
}

/// Points that belong together.
#[derive(Clone, Debug, PartialEq)]
pub struct Series {
    /// What they are.
    pub name: String,
    /// How they are drawn.
    pub mark: Mark,
    /// Which colour they have: a model's and what it foretells have the same one.
    pub colour: usize,
    /// They, by rising rates.
    pub points: Vec<Point>,
}

/// AVG's curve: moves of a guest of `memory` that writes page after page, at `count + 1` rates from none to `fastest`. Moves that never
/// end are left out.
#[must_use]
pub fn curve(memory: Bytes, link: Link, rules: &Rules, fastest: PageRate, count: u32) -> Vec<Point> {
    let pages = Pages::of(memory);
    let at = |i: u32| {
        let pages_per_s = fastest.per_second() * f64::from(i) / f64::from(count.max(1));
        let mut guest = Sequential::new(pages, pages, PageRate::new(pages_per_s));
        let moved = simulate(&mut guest, link, rules).ok()?;
        Some(Point { pages_per_s, total_s: moved.total_s, downtime_ms: moved.downtime_ms })
    };
    (0..=count).filter_map(at).collect()
}

const WIDTH: f64 = 640.0;
const HEIGHT: f64 = 400.0;
const LEFT: f64 = 84.0;
const RIGHT: f64 = 20.0;
const TOP: f64 = 58.0;
const BOTTOM: f64 = 52.0;
/// The legend: rows, and what a letter takes.
const ROW: f64 = 18.0;
const LETTER: f64 = 6.6;
const COLOURS: [&str; 5] = ["#3b78c3", "#b7478f", "#2b8a84", "#e09a3e", "#5b6673"];

/// Draws series over the dirty rate.
#[must_use]
pub fn draw(title: &str, quantity: Quantity, scale: Scale, series: &[Series]) -> String {
    let finite = |point: &&Point| {
        point.pages_per_s.is_finite()
            && point.pages_per_s >= 0.0
            && quantity.of(point).is_finite()
            && quantity.of(point) >= 0.0
    };
    let points = || series.iter().flat_map(|s| &s.points).filter(finite);
    let legend = legend(series);
    let rows = legend.last().map_or(0.0, |(_, row)| *row);
    let top = TOP + rows * ROW;
    let axis = |most: f64, unit: f64, from: f64, to: f64| match scale {
        Scale::Linear => Axis::to(most, from, to),
        Scale::Magnitude => Axis::by_magnitude(most, unit, from, to),
    };
    let x = axis(points().map(|p| p.pages_per_s).fold(0.0, f64::max), RATE_UNIT, LEFT, WIDTH - RIGHT);
    let y = axis(points().map(|p| quantity.of(p)).fold(0.0, f64::max), quantity.unit(), HEIGHT - BOTTOM, top);
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{0}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"#ffffff\"/>\n\
         <text x=\"{LEFT}\" y=\"20\" font-size=\"14\">{0}</text>\n",
        escape(title)
    );
    // Writing to a String cannot fail.
    for (value, at) in x.ticks() {
        let _ = writeln!(
            out,
            "<line x1=\"{at:.1}\" y1=\"{top}\" x2=\"{at:.1}\" y2=\"{:.1}\" stroke=\"#e3e7eb\"/>",
            HEIGHT - BOTTOM
        );
        let below = HEIGHT - BOTTOM + 16.0;
        let _ = writeln!(out, "<text x=\"{at:.1}\" y=\"{below:.1}\" text-anchor=\"middle\">{value}</text>");
    }
    for (value, at) in y.ticks() {
        let _ = writeln!(
            out,
            "<line x1=\"{LEFT}\" y1=\"{at:.1}\" x2=\"{:.1}\" y2=\"{at:.1}\" stroke=\"#e3e7eb\"/>",
            WIDTH - RIGHT
        );
        let _ = writeln!(out, "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{value}</text>", LEFT - 8.0, at + 4.0);
    }
    let middle = (LEFT + WIDTH - RIGHT) / 2.0;
    let _ = writeln!(
        out,
        "<text x=\"{middle:.1}\" y=\"{:.1}\" text-anchor=\"middle\">pages dirtied in a second</text>",
        HEIGHT - 12.0
    );
    let across = (top + HEIGHT - BOTTOM) / 2.0;
    let label = quantity.label();
    let _ = writeln!(
        out,
        "<text transform=\"translate(16 {across:.1}) rotate(-90)\" text-anchor=\"middle\">{label}</text>"
    );
    for (series, (left, row)) in series.iter().zip(legend) {
        let colour = COLOURS[series.colour % COLOURS.len()];
        let middle = 38.0 + row * ROW;
        let places = series.points.iter().filter(finite).map(|p| (x.at(p.pages_per_s), y.at(quantity.of(p))));
        match series.mark {
            Mark::Line | Mark::Dashes => {
                let dashes = if series.mark == Mark::Dashes { " stroke-dasharray=\"6 4\"" } else { "" };
                let line = |d: &str| {
                    format!("<path d=\"M{d}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.8\"{dashes}/>")
                };
                let path: Vec<String> = places.map(|(x, y)| format!("{x:.1} {y:.1}")).collect();
                if !path.is_empty() {
                    let _ = writeln!(out, "{}", line(&path.join("L")));
                }
                let _ = writeln!(out, "{}", line(&format!("{left:.1} {middle:.1}L{:.1} {middle:.1}", left + 22.0)));
            }
            Mark::Dots => {
                for (x, y) in places {
                    let _ = writeln!(out, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"{colour}\"/>");
                }
                let dot = left + 11.0;
                let _ = writeln!(out, "<circle cx=\"{dot:.1}\" cy=\"{middle:.1}\" r=\"3\" fill=\"{colour}\"/>");
            }
        }
        let _ =
            writeln!(out, "<text x=\"{:.1}\" y=\"{:.1}\">{}</text>", left + 28.0, middle + 4.0, escape(&series.name));
    }
    out + "</svg>\n"
}

/// Where each series stands in the legend: its left end, and its row.
fn legend(series: &[Series]) -> Vec<(f64, f64)> {
    let (mut left, mut row) = (LEFT, 0.0);
    let place = |series: &Series| {
        let width = 44.0 + LETTER * series.name.chars().count() as f64;
        if left > LEFT && left + width > WIDTH {
            (left, row) = (LEFT, row + 1.0);
        }
        left += width;
        (left - width, row)
    };
    series.iter().map(place).collect()
}

/// From zero to a round number, along pixels.
struct Axis {
    /// Between two ticks; of one by magnitude where it is no more linear.
    step: f64,
    top: f64,
    from: f64,
    to: f64,
    by_magnitude: bool,
}

impl Axis {
    fn to(most: f64, from: f64, to: f64) -> Self {
        let most = if most > 0.0 { most } else { 1.0 };
        let power = 10_f64.powf((most / 5.0).log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0].map(|n| n * power).into_iter().find(|step| step * 5.0 >= most).unwrap_or(most);
        Self { step, top: (most / step).ceil() * step, from, to, by_magnitude: false }
    }

    fn by_magnitude(most: f64, unit: f64, from: f64, to: f64) -> Self {
        let top = Self::marks(unit).find(|mark| *mark >= most).unwrap_or(unit);
        Self { step: unit, top, from, to, by_magnitude: true }
    }

    /// One, two and five times each power of ten from `unit` on, which is one of them.
    fn marks(unit: f64) -> impl Iterator<Item = f64> {
        let power = 10_f64.powf(unit.log10().floor());
        (0..20)
            .flat_map(move |n| [1.0, 2.0, 5.0].map(|m| m * power * 10_f64.powi(n)))
            .filter(move |m| *m >= unit * 0.999)
    }

    fn at(&self, value: f64) -> f64 {
        let share = if self.by_magnitude {
            (value / self.step).ln_1p() / (self.top / self.step).ln_1p()
        } else {
            value / self.top
        };
        self.from + (self.to - self.from) * share
    }

    fn ticks(&self) -> Vec<(String, f64)> {
        if self.by_magnitude {
            let marks = Self::marks(self.step).take_while(|mark| *mark <= self.top * 1.001);
            return [0.0].into_iter().chain(marks).map(|mark| (format!("{mark:.0}"), self.at(mark))).collect();
        }
        let count = (self.top / self.step).round() as u32;
        let digits = if self.step < 1.0 { (-self.step.log10()).ceil() as usize } else { 0 };
        let tick = |i: u32| {
            let value = self.step * f64::from(i);
            (format!("{value:.digits$}"), self.at(value))
        };
        (0..=count).map(tick).collect()
    }
}

/// `text` for the content and the quoted attributes of XML. Characters that XML forbids become U+FFFD.
#[must_use]
pub fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            '\n' | '\t' => out.push(c),
            c if c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}') => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn series(name: &str, mark: Mark, points: &[(f64, f64)]) -> Series {
        let point =
            |(rate, total): &(f64, f64)| Point { pages_per_s: *rate, total_s: *total, downtime_ms: total * 2.0 };
        Series { name: name.into(), mark, colour: 0, points: points.iter().map(point).collect() }
    }

    #[test]
    fn a_line_and_dots_stand_where_their_values_are() {
        let all =
            [series("AVG", Mark::Line, &[(0.0, 0.0), (100.0, 50.0)]), series("measured", Mark::Dots, &[(50.0, 25.0)])];
        let svg = draw("t", Quantity::Total, Scale::Linear, &all);
        assert!(svg.contains("M84.0 348.0L620.0 58.0"), "{svg}");
        assert!(svg.contains("cx=\"352.0\" cy=\"203.0\""), "{svg}");
        assert!(svg.contains(">AVG<") && svg.contains(">measured<") && svg.contains("total migration time (s)"));
        // Twice as high, in a drawing that goes twice as far: at the same place.
        assert!(draw("t", Quantity::Downtime, Scale::Linear, &all).contains("M84.0 348.0L620.0 58.0"));
    }

    #[test]
    fn what_is_no_number_is_left_out_and_nothing_draws_nothing() {
        // Its name stays in the legend.
        let odd = series("<&\">", Mark::Line, &[(f64::NAN, 1.0), (1.0, f64::INFINITY), (-1.0, 1.0), (2.0, -3.0)]);
        let svg = draw("\"><script>", Quantity::Total, Scale::Linear, &[odd]);
        assert!(
            !svg.contains("NaN")
                && !svg.contains("inf")
                && svg.matches("<path").count() == 1
                && !svg.contains("<script"),
            "{svg}"
        );
        assert!(svg.contains("&lt;&amp;&quot;&gt;"));
        assert!(draw("", Quantity::Downtime, Scale::Magnitude, &[]).ends_with("</svg>\n"));
    }

    #[test]
    fn ticks_are_round_numbers_that_reach_the_top() {
        let labels = |most| Axis::to(most, 0.0, 1.0).ticks().into_iter().map(|(label, _)| label).collect::<Vec<_>>();
        assert_eq!(labels(300_000.0), ["0", "100000", "200000", "300000"]);
        assert_eq!(labels(9.0), ["0", "2", "4", "6", "8", "10"]);
        assert_eq!(labels(0.07), ["0.00", "0.02", "0.04", "0.06", "0.08"]);
        assert_eq!(labels(0.0).len(), 6);
    }

    #[test]
    fn magnitudes_begin_at_zero_and_are_as_far_apart_as_their_ratios() {
        let axis = Axis::by_magnitude(18_000.0, 100.0, 0.0, 1.0);
        let labels: Vec<_> = axis.ticks().into_iter().map(|(label, _)| label).collect();
        assert_eq!(labels, ["0", "100", "200", "500", "1000", "2000", "5000", "10000", "20000"]);
        assert!(axis.at(0.0).abs() < 1e-9 && (axis.at(20_000.0) - 1.0).abs() < 1e-9);
        let step = |from: f64, to: f64| axis.at(to) - axis.at(from);
        assert!((step(2000.0, 4000.0) / step(10_000.0, 20_000.0) - 1.0).abs() < 0.05);
        assert_eq!(Axis::by_magnitude(0.0, 20.0, 0.0, 1.0).ticks().len(), 2);
    }

    #[test]
    fn what_is_foretold_and_what_it_came_to_have_one_colour_and_no_name_leaves_the_drawing() {
        let name = "a mover with a name of some length, foretold";
        let mut all: Vec<_> = (0..5).map(|_| series(name, Mark::Dashes, &[(1.0, 1.0)])).collect();
        all[4].mark = Mark::Dots;
        let svg = draw("t", Quantity::Total, Scale::Magnitude, &all);
        assert_eq!(svg.matches("stroke-dasharray").count(), 8);
        assert_eq!(svg.matches(COLOURS[0]).count(), 10, "a line and dots, each with its place in the legend");
        for (left, row) in legend(&all) {
            assert!(left + 44.0 + LETTER * name.len() as f64 <= WIDTH && row < 5.0, "{left} {row}");
        }
    }

    #[test]
    fn a_curve_rises_and_leaves_out_what_never_ends() {
        let link = Link { rate: godwit_units::BitRate::from_mbit(100.0), overheads: crate::Overheads::default() };
        let limit = std::time::Duration::from_millis(300);
        let at = |rules: &Rules| curve(Bytes::mib(64), link, rules, PageRate::new(10_000.0), 10);
        let (xen, qemu) = (at(&Rules::xen()), at(&Rules::qemu(limit)));
        assert_eq!((xen.len(), xen[10].pages_per_s), (11, 10_000.0));
        assert!(xen[3].total_s > xen[0].total_s && qemu.len() < 6, "{}", qemu.len());
    }
}
