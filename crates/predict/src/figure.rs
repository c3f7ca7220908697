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
}

/// How points are drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mark {
    /// As a line: a model's mean.
    Line,
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
/// A line and dots of one place have the same colour.
const COLOURS: [&str; 5] = ["#3b78c3", "#b7478f", "#2b8a84", "#e09a3e", "#5b6673"];

/// Draws series over the dirty rate.
#[must_use]
pub fn draw(title: &str, quantity: Quantity, series: &[Series]) -> String {
    let finite = |point: &&Point| {
        point.pages_per_s.is_finite()
            && point.pages_per_s >= 0.0
            && quantity.of(point).is_finite()
            && quantity.of(point) >= 0.0
    };
    let points = || series.iter().flat_map(|s| &s.points).filter(finite);
    let x = Axis::to(points().map(|p| p.pages_per_s).fold(0.0, f64::max), LEFT, WIDTH - RIGHT);
    let y = Axis::to(points().map(|p| quantity.of(p)).fold(0.0, f64::max), HEIGHT - BOTTOM, TOP);
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
            "<line x1=\"{at:.1}\" y1=\"{TOP}\" x2=\"{at:.1}\" y2=\"{:.1}\" stroke=\"#e3e7eb\"/>",
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
    let across = (TOP + HEIGHT - BOTTOM) / 2.0;
    let label = quantity.label();
    let _ = writeln!(
        out,
        "<text transform=\"translate(16 {across:.1}) rotate(-90)\" text-anchor=\"middle\">{label}</text>"
    );
    let mut legend = LEFT;
    for (series, colour) in series.iter().zip(COLOURS.iter().cycle()) {
        let places = series.points.iter().filter(finite).map(|p| (x.at(p.pages_per_s), y.at(quantity.of(p))));
        match series.mark {
            Mark::Line => {
                let path: Vec<String> = places.map(|(x, y)| format!("{x:.1} {y:.1}")).collect();
                if !path.is_empty() {
                    let d = path.join("L");
                    let _ = writeln!(out, "<path d=\"M{d}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.8\"/>");
                }
            }
            Mark::Dots => {
                for (x, y) in places {
                    let _ = writeln!(out, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"{colour}\"/>");
                }
            }
        }
        let _ = writeln!(out, "<rect x=\"{legend:.1}\" y=\"32\" width=\"12\" height=\"12\" fill=\"{colour}\"/>");
        let _ = writeln!(out, "<text x=\"{:.1}\" y=\"42\">{}</text>", legend + 17.0, escape(&series.name));
        legend += 40.0 + 7.0 * series.name.chars().count() as f64;
    }
    out + "</svg>\n"
}

/// From zero to a round number, along pixels.
struct Axis {
    step: f64,
    top: f64,
    from: f64,
    to: f64,
}

impl Axis {
    fn to(most: f64, from: f64, to: f64) -> Self {
        let most = if most > 0.0 { most } else { 1.0 };
        let power = 10_f64.powf((most / 5.0).log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0].map(|n| n * power).into_iter().find(|step| step * 5.0 >= most).unwrap_or(most);
        Self { step, top: (most / step).ceil() * step, from, to }
    }

    fn at(&self, value: f64) -> f64 {
        self.from + (self.to - self.from) * value / self.top
    }

    fn ticks(&self) -> Vec<(String, f64)> {
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
        Series { name: name.into(), mark, points: points.iter().map(point).collect() }
    }

    #[test]
    fn a_line_and_dots_stand_where_their_values_are() {
        let all =
            [series("AVG", Mark::Line, &[(0.0, 0.0), (100.0, 50.0)]), series("measured", Mark::Dots, &[(50.0, 25.0)])];
        let svg = draw("t", Quantity::Total, &all);
        assert!(svg.contains("M84.0 348.0L620.0 58.0"), "{svg}");
        assert!(svg.contains("cx=\"352.0\" cy=\"203.0\""), "{svg}");
        assert!(svg.contains(">AVG<") && svg.contains(">measured<") && svg.contains("total migration time (s)"));
        // Twice as high, in a drawing that goes twice as far: at the same place.
        assert!(draw("t", Quantity::Downtime, &all).contains("M84.0 348.0L620.0 58.0"));
    }

    #[test]
    fn what_is_no_number_is_left_out_and_nothing_draws_nothing() {
        let odd = series("<&\">", Mark::Line, &[(f64::NAN, 1.0), (1.0, f64::INFINITY), (-1.0, 1.0), (2.0, -3.0)]);
        let svg = draw("\"><script>", Quantity::Total, &[odd]);
        assert!(
            !svg.contains("NaN") && !svg.contains("inf") && !svg.contains("<path") && !svg.contains("<script"),
            "{svg}"
        );
        assert!(svg.contains("&lt;&amp;&quot;&gt;"));
        assert!(draw("", Quantity::Downtime, &[]).ends_with("</svg>\n"));
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
    fn a_curve_rises_and_leaves_out_what_never_ends() {
        let link = Link { rate: godwit_units::BitRate::from_mbit(100.0), overheads: crate::Overheads::default() };
        let limit = std::time::Duration::from_millis(300);
        let at = |rules: &Rules| curve(Bytes::mib(64), link, rules, PageRate::new(10_000.0), 10);
        let (xen, qemu) = (at(&Rules::xen()), at(&Rules::qemu(limit)));
        assert_eq!((xen.len(), xen[10].pages_per_s), (11, 10_000.0));
        assert!(xen[3].total_s > xen[0].total_s && qemu.len() < 6, "{}", qemu.len());
    }
}
