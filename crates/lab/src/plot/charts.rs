//! The charts of one move. Those over time share their horizontal axis and margins, so that what happened at one moment
//! stands in one vertical line: the round that grew, the link that was full, the client that waited.

use super::axis::Axis;
use super::series::{self, Gap};
use super::svg::{Anchor, Svg, shorten};
use crate::report::{IoPoint, MoveReport, Phase, Round};
use std::fmt::Write as _;

/// Width of every drawing, in user units.
pub(super) const WIDTH: f64 = 960.0;
/// Room for the labels of the vertical axis and of the phases.
const LEFT: f64 = 84.0;
/// Room for the durations of the phases and a second vertical axis.
const RIGHT: f64 = 84.0;
const TOP: f64 = 22.0;
const BOTTOM: f64 = 24.0;

/// Bytes of a guest page, for comparing a dirty rate with the link.
const PAGE: f64 = 4096.0;

/// Most rows of the timeline; a move has about ten phases.
const MAX_PHASES: usize = 24;

/// Most bars of each colour in the chart of rounds; more share bars, which show the largest of their rounds.
const MAX_BARS: usize = 60;

/// CSS classes of the three classes of bytes, with their names.
pub(super) const CLASSES: [(&str, &str); 3] = [("c-memory", "memory"), ("c-disk", "disk"), ("c-other", "other")];

/// A chart with its title and what its colours mean.
pub(super) struct Chart {
    pub title: String,
    /// A class of the style sheet, and what has it.
    pub legend: Vec<(&'static str, &'static str)>,
    /// What one has to know to read it right; may be empty.
    pub note: String,
    pub svg: String,
}

/// The time that the charts of a move show.
pub(super) struct Span {
    axis: Axis,
    /// When the guest stood still.
    stops: Vec<(f64, f64)>,
    /// Whether there are samples outside.
    clipped: bool,
}

impl Span {
    /// From a little before the command to a little after the end, as far as there is anything to show.
    pub fn of(figures: &MoveReport) -> Self {
        let phases = figures.phases.iter().flat_map(|p| [p.start_s, p.end_s]);
        let end = phases.clone().chain([figures.total_s]).filter(|t| t.is_finite()).fold(0.0, f64::max);
        let start = phases.filter(|t| t.is_finite()).fold(0.0, f64::min);
        let series = &figures.series;
        let times = series.wan.iter().map(|s| s.t_s);
        let times = times.chain(series.memory.iter().map(|s| s.t_s)).chain(series.echo.iter().map(|s| s.t_s));
        let times = times.chain(series.io.iter().map(|s| s.t_s));
        let (first, last) = times
            .filter(|t| t.is_finite())
            .fold((start, end), |(first, last), t| (f64::min(first, t), f64::max(last, t)));
        let margin = ((end - start) * 0.1).max(2.0);
        let shown = (first.max(start - margin), last.min(end + margin));
        let stops = figures.phases.iter().filter(|p| is_stop(p)).map(|p| (p.start_s, p.end_s)).collect();
        let clipped = first < shown.0 || last > shown.1;
        Self { axis: Axis::linear(shown, (LEFT, WIDTH - RIGHT)), stops, clipped }
    }

    /// What the page says about samples that are not shown.
    pub fn note(&self) -> &'static str {
        if self.clipped { "Samples long before the command or long after the end are not drawn." } else { "" }
    }
}

/// The phases that have a beginning and an end.
fn drawable(phases: &[Phase]) -> impl Iterator<Item = &Phase> + Clone {
    phases.iter().filter(|p| p.start_s.is_finite() && p.end_s.is_finite())
}

/// Phases that are about disk or memory have the colours that these have everywhere.
fn phase_class(name: &str, row: usize) -> &'static str {
    match name {
        "stop" => "p-stop",
        n if n.contains("memory") => "c-memory",
        n if n.contains("disk") || n.contains("mirror") => "c-disk",
        _ => ["p0", "p1", "p2", "p3"][row % 4],
    }
}

fn is_stop(phase: &Phase) -> bool {
    phase.name == "stop"
}

/// A duration as people say it.
pub(super) fn duration(seconds: f64) -> String {
    match seconds {
        s if !s.is_finite() => "?".into(),
        s if s.abs() < 0.0995 => format!("{:.1} ms", s * 1e3),
        s if s.abs() < 0.9995 => format!("{:.0} ms", s * 1e3),
        s if s.abs() < 99.95 => format!("{s:.1} s"),
        s => format!("{s:.0} s"),
    }
}

/// A drawing with a plot area, its grid and its labels.
pub(super) struct Plot {
    pub svg: Svg,
    x: Axis,
    y: Axis,
}

/// Time across a drawing, for charts that are not one move's.
pub(super) fn axis_of_time(ends: (f64, f64)) -> Axis {
    Axis::linear(ends, (LEFT, WIDTH - RIGHT))
}

impl Plot {
    /// A plot over time whose rows have no scale; `inner` is the height of the plot area.
    pub fn rows(title: &str, inner: f64, rows: usize, x: Axis, stops: &[(f64, f64)]) -> Self {
        let y = Axis::linear((rows as f64, 0.0), (TOP + inner, TOP));
        let mut plot = Self { svg: Svg::new(title, WIDTH, TOP + inner + BOTTOM), x, y };
        plot.time_grid(stops);
        plot
    }

    /// An empty plot over time. `inner` is the height of the plot area.
    fn over_time(title: &str, inner: f64, span: &Span, y: impl FnOnce((f64, f64)) -> Axis, unit: &str) -> Self {
        Self::over(title, inner, span.axis, &span.stops, y, unit)
    }

    pub fn over(
        title: &str,
        inner: f64,
        x: Axis,
        stops: &[(f64, f64)],
        y: impl FnOnce((f64, f64)) -> Axis,
        unit: &str,
    ) -> Self {
        let mut plot = Self { svg: Svg::new(title, WIDTH, TOP + inner + BOTTOM), x, y: y((TOP + inner, TOP)) };
        plot.time_grid(stops);
        for tick in plot.y.ticks(4) {
            let at = plot.y.at(tick.value);
            plot.svg.line("grid", (LEFT, at), (WIDTH - RIGHT, at));
            plot.svg.text("tick", (LEFT - 7.0, at + 4.0), Anchor::End, &tick.label);
        }
        plot.svg.text("unit", (LEFT - 7.0, TOP - 9.0), Anchor::End, unit);
        plot
    }

    fn time_grid(&mut self, stops: &[(f64, f64)]) {
        let (bottom, top) = self.y.pixels();
        for stop in stops {
            let (from, to) = (self.x.at(stop.0), self.x.at(stop.1));
            self.svg.rect("stopped", (from, top), ((to - from).max(1.5), bottom - top), "the guest stands still");
        }
        for tick in self.x.ticks(10) {
            let at = self.x.at(tick.value);
            self.svg.line("grid", (at, top), (at, bottom));
            self.svg.text("tick", (at, bottom + 15.0), Anchor::Middle, &tick.label);
        }
        self.svg.line("axis", (LEFT, bottom), (WIDTH - RIGHT, bottom));
        self.svg.text("unit", (WIDTH - RIGHT + 10.0, bottom + 15.0), Anchor::Start, "seconds");
    }

    /// A horizontal line with its name above the right end.
    fn reference(&mut self, value: f64, name: &str) {
        let at = self.y.at(value);
        self.svg.line("reference", (LEFT, at), (WIDTH - RIGHT, at));
        self.svg.text("note halo", (WIDTH - RIGHT - 4.0, at - 5.0), Anchor::End, name);
    }

    pub fn point(&self, (t, v): (f64, f64)) -> (f64, f64) {
        (self.x.at(t), self.y.at(v))
    }

    /// Areas on top of each other; each step is `(from, to, values)`.
    fn stacked(&mut self, steps: &[(f64, f64, series::ByClass)]) {
        for class in (0..CLASSES.len()).rev() {
            if steps.iter().all(|(_, _, v)| v[class] <= 0.0) {
                continue;
            }
            let sum = |v: &series::ByClass| v[..=class].iter().sum::<f64>();
            let tops = steps.iter().flat_map(|(from, to, v)| [(*from, sum(v)), (*to, sum(v))]);
            let tops: Vec<(f64, f64)> = tops.map(|p| self.point(p)).collect();
            let floor = self.y.at(0.0);
            let ends = [(tops[tops.len() - 1].0, floor), (tops[0].0, floor)];
            self.svg.polygon(CLASSES[class].0, tops.into_iter().chain(ends));
        }
    }
}

/// The phases as bars: a row for each name, in the order in which they began.
pub(super) fn phases(figures: &MoveReport, span: &Span) -> Option<Chart> {
    let mut rows: Vec<(&str, Vec<&Phase>)> = vec![];
    for phase in drawable(&figures.phases) {
        match rows.iter_mut().find(|(name, _)| *name == phase.name) {
            Some((_, all)) => all.push(phase),
            None => rows.push((&phase.name, vec![phase])),
        }
    }
    if rows.is_empty() {
        return None;
    }
    let left_out = rows.len().saturating_sub(MAX_PHASES);
    rows.truncate(MAX_PHASES);
    const ROW: f64 = 22.0;
    let inner = ROW * rows.len() as f64;
    let mut plot = Plot::rows("phases", inner, rows.len(), span.axis, &span.stops);
    for (row, (name, all)) in rows.iter().enumerate() {
        let top = TOP + ROW * row as f64;
        plot.svg.text("tick", (LEFT - 7.0, top + 15.0), Anchor::End, &shorten(name, 12));
        let mut end = LEFT;
        for phase in all {
            let (from, to) = (plot.x.at(phase.start_s), plot.x.at(phase.end_s));
            let class = format!("phase {}", phase_class(name, row));
            let hint = format!("{name}: {} from {:.3} s", duration(phase.end_s - phase.start_s), phase.start_s);
            plot.svg.rect(&class, (from, top + 3.0), ((to - from).max(2.0), ROW - 6.0), &hint);
            end = end.max(to).max(from + 2.0);
        }
        let total: f64 = all.iter().map(|p| p.end_s - p.start_s).sum();
        let times = if all.len() > 1 { format!(" in {}", all.len()) } else { String::new() };
        plot.svg.text("note halo", (end + 6.0, top + 15.0), Anchor::Start, &(duration(total) + &times));
    }
    let mut note = "Time counts from the command. ".to_owned();
    if left_out > 0 {
        let _ = write!(note, "{left_out} more phases are in the report's JSON. ");
    }
    if !span.stops.is_empty() {
        note.push_str("The shaded stretch, here and below: the guest stands still.");
    }
    Some(Chart { title: "Phases".into(), legend: vec![], note, svg: plot.svg.finish() })
}

/// Rates on the WAN, by class, and the link's own.
pub(super) fn throughput(figures: &MoveReport, span: &Span, link_mbit: f64) -> Option<Chart> {
    let intervals = series::throughput(&figures.series.wan, span.axis.ends());
    let first = intervals.first()?;
    let average = duration(first.to_s - first.from_s);
    let peak = intervals.iter().map(|i| i.mbit.iter().sum()).fold(0.0, f64::max);
    let top = peak.max(link_mbit * 1.02);
    let mut plot = Plot::over_time("throughput", 150.0, span, |px| Axis::from_zero(top, px), "Mbit/s");
    let steps: Vec<_> = intervals.iter().map(|i| (i.from_s, i.to_s, i.mbit)).collect();
    plot.stacked(&steps);
    plot.reference(link_mbit, &format!("link, each direction: {link_mbit} Mbit/s"));
    let note = format!("Both directions together, averaged over {average}.");
    Some(Chart { title: "On the WAN".into(), legend: legend_of(&intervals), note, svg: plot.svg.finish() })
}

fn legend_of(intervals: &[series::Interval]) -> Vec<(&'static str, &'static str)> {
    let seen = |class: usize| intervals.iter().any(|i| i.mbit[class] > 0.0);
    CLASSES.into_iter().enumerate().filter(|(i, _)| seen(*i)).map(|(_, c)| c).collect()
}

/// Bytes on the WAN since the command, by class.
pub(super) fn bytes(figures: &MoveReport, span: &Span) -> Option<Chart> {
    let curve = series::cumulative(&figures.series.wan, span.axis.ends());
    let total = curve.last()?.1.iter().sum::<f64>();
    let (unit, size) = byte_unit(total);
    let steps: Vec<_> = curve.iter().map(|(t, v)| (*t, *t, v.map(|b| b / size))).collect();
    let mut plot = Plot::over_time("bytes", 120.0, span, |px| Axis::from_zero(total / size, px), unit);
    plot.stacked(&steps);
    let seen = |class: usize| curve.iter().any(|(_, v)| v[class] > 0.0);
    let legend = CLASSES.into_iter().enumerate().filter(|(i, _)| seen(*i)).map(|(_, c)| c).collect();
    Some(Chart { title: "Bytes since the command".into(), legend, note: String::new(), svg: plot.svg.finish() })
}

fn byte_unit(most: f64) -> (&'static str, f64) {
    match most {
        m if m >= f64::from(1 << 30) * 2.0 => ("GiB", f64::from(1 << 30)),
        m if m >= f64::from(1 << 20) => ("MiB", f64::from(1 << 20)),
        _ => ("KiB", 1024.0),
    }
}

/// How fast the guest dirties pages, against what the link could carry of them.
pub(super) fn dirty_rate(figures: &MoveReport, span: &Span, link_mbit: f64) -> Option<Chart> {
    let samples: Vec<(f64, f64)> = figures.series.memory.iter().map(|s| (s.t_s, s.dirty_pages_per_s)).collect();
    let line = series::thinned(&samples, span.axis.ends());
    let most = line.iter().map(|p| p.1).fold(0.0, f64::max);
    line.first()?;
    let link_pages = link_mbit * 1e6 / 8.0 / PAGE;
    // A link far above the rate would press the curve to the ground; then it is said in words.
    let far = link_pages > 4.0 * most.max(1.0);
    let top = if far { most } else { most.max(link_pages * 1.05) };
    let mut plot = Plot::over_time("dirty rate", 110.0, span, |px| Axis::from_zero(top, px), "pages/s");
    let mbit = |pages: f64| pages * PAGE * 8.0 / 1e6;
    let (bottom_px, top_px) = plot.y.pixels();
    let right = Axis::linear((0.0, mbit(plot.y.ends().1)), (bottom_px, top_px));
    for tick in right.ticks(4) {
        let at = right.at(tick.value);
        plot.svg.line("axis", (WIDTH - RIGHT, at), (WIDTH - RIGHT + 4.0, at));
        plot.svg.text("tick", (WIDTH - RIGHT + 8.0, at + 4.0), Anchor::Start, &tick.label);
    }
    plot.svg.text("unit", (WIDTH - RIGHT + 8.0, top_px - 9.0), Anchor::Start, "Mbit/s");
    let points: Vec<_> = line.iter().map(|p| plot.point(*p)).collect();
    plot.svg.polyline("l-dirty", points);
    let mut note = "As the hypervisor estimates it; on the right, whole pages of 4 KiB as a bit rate.".to_owned();
    if far {
        let _ = write!(note, " The link carries {link_pages:.0} of them a second, far above this chart.");
    } else {
        plot.reference(link_pages, "what the link carries");
    }
    Some(Chart { title: "Pages dirtied".into(), legend: vec![], note, svg: plot.svg.finish() })
}

/// What was left to send of the memory.
pub(super) fn remaining(figures: &MoveReport, span: &Span) -> Option<Chart> {
    let samples: Vec<(f64, f64)> = figures.series.memory.iter().map(|s| (s.t_s, s.remaining as f64)).collect();
    let line = series::thinned(&samples, span.axis.ends());
    let most = line.iter().map(|p| p.1).fold(0.0, f64::max);
    line.first()?;
    let (unit, size) = byte_unit(most);
    let mut plot = Plot::over_time("remaining", 100.0, span, |px| Axis::from_zero(most / size, px), unit);
    let points: Vec<_> = line.iter().map(|(t, v)| plot.point((*t, v / size))).collect();
    plot.svg.polyline("l-remaining", points);
    Some(Chart { title: "Memory still to send".into(), legend: vec![], note: String::new(), svg: plot.svg.finish() })
}

/// The client's round trips, and its longest wait; a second chart shows the wait from near.
pub(super) fn round_trips(figures: &MoveReport, span: &Span) -> Vec<Chart> {
    let shown = |t: f64| span.axis.holds(t);
    let echo: Vec<_> = figures
        .series
        .echo
        .iter()
        .copied()
        .filter(|e| shown(e.t_s) && e.rtt_ms.is_finite() && e.rtt_ms > 0.0)
        .collect();
    if echo.is_empty() {
        return vec![];
    }
    let (least, most) = echo.iter().fold((f64::MAX, 0.0), |(l, m), e| (f64::min(l, e.rtt_ms), f64::max(m, e.rtt_ms)));
    let gap = series::longest_gap(&echo, figures.total_s.min(span.axis.ends().1));
    let draw = |title: &str, x: Axis| {
        let mut plot = Plot::over(title, 150.0, x, &span.stops, |px| Axis::log((least, most), px), "ms");
        if let Some(gap) = gap {
            mark_gap(&mut plot, gap);
        }
        let within = echo.iter().filter(|e| x.holds(e.t_s)).map(|e| (e.t_s, e.rtt_ms));
        let dots = series::distinct(within.map(|p| plot.point(p)).collect::<Vec<_>>());
        plot.svg.dots("l-echo", dots);
        plot
    };
    let mut note = "A dot for each answer, where it came back.".to_owned();
    if let Some(outage) = figures.outage_ms {
        let _ = write!(note, " The client's own longest wait: {}.", duration(outage / 1e3));
    }
    let plot = draw("round trips", span.axis);
    let title = "Client's round trips".into();
    let mut charts = vec![Chart { title, legend: vec![("gap", "longest gap")], note, svg: plot.svg.finish() }];
    let (lo, hi) = span.axis.ends();
    if let Some(gap) = gap.filter(|g| g.ms() < 0.1 * (hi - lo) * 1e3 && g.ended) {
        // As much before and after as the gap is long, twice, but never less than half a second.
        let around = (2.0 * (gap.to_s - gap.from_s)).max(0.5);
        let near = Axis::linear((gap.from_s - around, gap.to_s + around), span.axis.pixels());
        let svg = draw("round trips around the longest gap", near).svg.finish();
        let title = "The longest gap, from near (an axis of its own)".into();
        charts.push(Chart { title, legend: vec![], note: String::new(), svg });
    }
    charts
}

fn mark_gap(plot: &mut Plot, gap: Gap) {
    let (bottom, top) = plot.y.pixels();
    let (from, to) = (plot.x.at(gap.from_s), plot.x.at(gap.to_s));
    plot.svg.rect("gap", (from, top), ((to - from).max(1.5), bottom - top), "no answer");
    let text = if gap.ended { "no answer for" } else { "no answer any more, for" };
    let text = format!("{text} {}", duration(gap.ms() / 1e3));
    let y = top + 13.0;
    if to - from > 190.0 {
        plot.svg.text("note halo", (f64::midpoint(from, to), y), Anchor::Middle, &text);
    } else if from > WIDTH / 2.0 {
        plot.svg.text("note halo", (from - 5.0, y), Anchor::End, &text);
    } else {
        plot.svg.text("note halo", (to + 5.0, y), Anchor::Start, &text);
    }
}

/// Most of these: a day and a half.
const MOST_STRETCHES: usize = 1 << 16;

/// Seconds over which a workload's rate is averaged.
const WORK_S: f64 = 2.0;

/// Between two intervals of the guest's: less is the unrest of two clocks.
const STILL_S: f64 = 0.1;

/// Moments of a move that the guest's own I/O is read against, each with a name.
fn marks(figures: &MoveReport) -> Vec<(f64, &'static str)> {
    let phase = |name: &str| figures.phases.iter().find(|p| p.name == name);
    let mut marks = vec![];
    if let Some(stop) = phase("stop") {
        marks.push((stop.start_s, "stops"));
        let arrived = phase("hand-off").map_or(stop.end_s, |hand_off| hand_off.end_s);
        marks.push((arrived, "runs at the destination"));
    }
    if let Some(fill) = phase("fill") {
        marks.push((fill.end_s, "all blocks are there"));
    }
    marks.retain(|(at, _)| at.is_finite());
    marks
}

/// Draws the marks, their names on lines of their own where they would run into each other.
fn draw_marks(plot: &mut Plot, marks: &[(f64, &str)]) {
    let (bottom, top) = plot.y.pixels();
    for (row, (at, name)) in marks.iter().enumerate() {
        let x = plot.x.at(*at);
        plot.svg.line("reference", (x, top), (x, bottom));
        let y = top + 12.0 + 14.0 * row as f64;
        let (at, anchor) = if x > WIDTH * 0.75 { (x - 5.0, Anchor::End) } else { (x + 5.0, Anchor::Start) };
        plot.svg.text("note halo", (at, y), anchor, name);
    }
}

/// The guest's own disk I/O and work, interval by interval, with the moments of the move.
pub(super) fn guest_io(figures: &MoveReport, span: &Span) -> Vec<Chart> {
    let shown = |t: f64| span.axis.holds(t);
    let mut points: Vec<_> = figures.series.io.iter().copied().filter(|p| shown(p.t_s) && p.seconds > 0.0).collect();
    points.sort_by(|a, b| a.t_s.total_cmp(&b.t_s));
    if points.is_empty() {
        return vec![];
    }
    let marks = marks(figures);
    let mut charts = vec![];
    // A guest that stands still has no intervals: the line falls to zero there.
    let steps = |of: &dyn Fn(&IoPoint) -> f64| {
        let mut line: Vec<(f64, f64)> = vec![];
        for point in &points {
            let (from, rate) = (point.t_s - point.seconds, of(point) / point.seconds);
            let from = match line.last().copied() {
                Some((last, _)) if from > last + STILL_S => {
                    line.extend([(last, 0.0), (from, 0.0)]);
                    from
                }
                Some((last, _)) => last,
                None => from,
            };
            line.extend([(from, rate), (point.t_s, rate)]);
        }
        line
    };
    let mib = |kib: u64| kib as f64 / 1024.0;
    let (reads, writes) = (steps(&|p| mib(p.read_kib)), steps(&|p| mib(p.write_kib)));
    let most = reads.iter().chain(&writes).map(|p| p.1).fold(0.0, f64::max);
    if most > 0.0 {
        let mut plot =
            Plot::over_time("disk throughput in the guest", 150.0, span, |px| Axis::from_zero(most, px), "MiB/s");
        for (class, line) in [("l-write", &writes), ("l-read", &reads)] {
            let line: Vec<_> = series::thinned(line, span.axis.ends()).into_iter().map(|p| plot.point(p)).collect();
            plot.svg.polyline(class, line);
        }
        draw_marks(&mut plot, &marks);
        let note = "As the guest's kernel counts it.".to_owned();
        let legend = vec![("c-read", "read"), ("c-write", "written")];
        charts.push(Chart { title: "The guest's own disk I/O".into(), legend, note, svg: plot.svg.finish() });
    }
    charts.extend(guest_latency(&points, span, &marks));
    let work = rate_of_work(&points);
    let most = work.iter().map(|p| p.1).fold(0.0, f64::max);
    if most > 0.0 {
        let mut plot = Plot::over_time("work in the guest", 100.0, span, |px| Axis::from_zero(most, px), "a second");
        let line: Vec<_> = series::thinned(&work, span.axis.ends()).into_iter().map(|p| plot.point(p)).collect();
        plot.svg.polyline("l-work", line);
        draw_marks(&mut plot, &marks);
        let note = format!("Objects compiled, or transactions; averaged over {}.", duration(WORK_S));
        charts.push(Chart { title: "The guest's work".into(), legend: vec![], note, svg: plot.svg.finish() });
    }
    charts
}

/// Units a second over stretches of [`WORK_S`], by the host's clock: what a workload says of itself comes in lumps.
fn rate_of_work(points: &[IoPoint]) -> Vec<(f64, f64)> {
    let (Some(first), Some(last)) = (points.first(), points.last()) else { return vec![] };
    let from = first.t_s - first.seconds;
    let stretch = |t: f64| ((t - from) / WORK_S).ceil().max(1.0) as usize - 1;
    if stretch(last.t_s) > MOST_STRETCHES {
        return vec![];
    }
    let mut units = vec![0u64; stretch(last.t_s) + 1];
    points.iter().for_each(|p| units[stretch(p.t_s)] += p.units);
    // The last one is not whole.
    units.pop();
    let at = |i: usize| from + i as f64 * WORK_S;
    units.iter().enumerate().flat_map(|(i, units)| [i, i + 1].map(|i| (at(i), *units as f64 / WORK_S))).collect()
}

/// How long the guest's reads and writes took. Where its disk load timed each one, those; else the kernel's averages.
fn guest_latency(points: &[IoPoint], span: &Span, marks: &[(f64, &str)]) -> Option<Chart> {
    let timed = points.iter().any(|p| p.longest_ms.is_some());
    type Of = fn(&IoPoint) -> Option<f64>;
    let lines: [(&str, &str, Of); 2] = if timed {
        [("l-longest", "longest", |p| p.longest_ms), ("l-median", "median", |p| p.p50_ms)]
    } else {
        [("l-write", "write, average", |p| p.write_ms), ("l-read", "read, average", |p| p.read_ms)]
    };
    let values =
        |of: Of| points.iter().filter_map(move |p| Some((p.t_s, of(p).filter(|ms| ms.is_finite())?.max(0.01))));
    let all = || lines.iter().flat_map(|line| values(line.2)).map(|p| p.1);
    let (least, most) = all().fold((f64::MAX, 0.0), |(l, m), v| (f64::min(l, v), f64::max(m, v)));
    all().next()?;
    let mut plot = Plot::over_time("disk latency in the guest", 130.0, span, |px| Axis::log((least, most), px), "ms");
    for (class, _, of) in lines {
        let dots: Vec<_> = values(of).map(|p| plot.point(p)).collect();
        plot.svg.dots(&format!("{class} dot"), series::distinct(dots));
    }
    draw_marks(&mut plot, marks);
    let keys = if timed {
        [("c-dirty", "longest"), ("c-read", "median")]
    } else {
        [("c-write", "write, average"), ("c-read", "read, average")]
    };
    let note = if timed {
        "Of the disk load's reads and writes, each interval, by the guest's clock: a pause is not in them.".to_owned()
    } else {
        "As the guest's kernel counts it, each interval, by its own clock: a pause is not in them.".to_owned()
    };
    Some(Chart { title: "What a read or write takes".into(), legend: keys.to_vec(), note, svg: plot.svg.finish() })
}

/// Pages sent and dirtied in each round.
pub(super) fn rounds(rounds: &[Round]) -> Option<Chart> {
    if rounds.is_empty() {
        return None;
    }
    let each = rounds.len().div_ceil(MAX_BARS);
    let bars: Vec<(usize, u64, u64)> = (rounds.chunks(each).enumerate())
        .map(|(i, chunk)| {
            let most = |pages: fn(&Round) -> u64| chunk.iter().map(pages).max().unwrap_or(0);
            (i * each + 1, most(|r| r.sent), most(|r| r.dirtied))
        })
        .collect();
    const INNER: f64 = 140.0;
    let most = bars.iter().map(|b| b.1.max(b.2)).max().unwrap_or(0) as f64;
    let y = Axis::from_zero(most, (TOP + INNER, TOP));
    let mut svg = Svg::new("rounds", WIDTH, TOP + INNER + BOTTOM);
    for tick in y.ticks(4) {
        let at = y.at(tick.value);
        svg.line("grid", (LEFT, at), (WIDTH - RIGHT, at));
        svg.text("tick", (LEFT - 7.0, at + 4.0), Anchor::End, &tick.label);
    }
    svg.text("unit", (LEFT - 7.0, TOP - 9.0), Anchor::End, "pages");
    let slot = (WIDTH - LEFT - RIGHT) / bars.len() as f64;
    let width = (slot * 0.36).min(34.0);
    // A label needs some 30 units, figures above a bar some 40.
    let every = (30.0 / slot).ceil().max(1.0) as usize;
    for (i, (number, sent, dirtied)) in bars.iter().enumerate() {
        let middle = LEFT + slot * (i as f64 + 0.5);
        for (class, left, pages, what) in
            [("c-memory", middle - width - 1.0, *sent, "sent"), ("c-dirty", middle + 1.0, *dirtied, "dirtied")]
        {
            let top = y.at(pages as f64);
            svg.rect(class, (left, top), (width, TOP + INNER - top), &format!("round {number}: {pages} pages {what}"));
            if width >= 30.0 {
                let at = (left + width / 2.0, top - 4.0);
                svg.text("value halo", at, Anchor::Middle, &grouped(pages));
            }
        }
        if i % every == 0 {
            svg.text("tick", (middle, TOP + INNER + 15.0), Anchor::Middle, &number.to_string());
        }
    }
    svg.line("axis", (LEFT, TOP + INNER), (WIDTH - RIGHT, TOP + INNER));
    svg.text("unit", (WIDTH - RIGHT + 10.0, TOP + INNER + 15.0), Anchor::Start, "round");
    let note = if each > 1 { format!("Each bar is the largest of {each} rounds.") } else { String::new() };
    let legend = vec![("c-memory", "sent"), ("c-dirty", "dirtied meanwhile")];
    Some(Chart { title: "Rounds".into(), legend, note, svg: svg.finish() })
}

/// A whole number with thin spaces between its thousands.
pub(super) fn grouped(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push('\u{202f}');
        }
        out.push(digit);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_durations_read_well() {
        assert_eq!(grouped(1_234_567), "1\u{202f}234\u{202f}567");
        assert_eq!(
            [0.0004, 0.812, 0.9999, 12.34, 130.0].map(duration),
            ["0.4 ms", "812 ms", "1.0 s", "12.3 s", "130 s"]
        );
    }
}
