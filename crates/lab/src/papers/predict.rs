//! Akoush et al., figure 3 and table II: moves as they were foretold beside moves as they were, over the dirty rate.
//!
//! Three links, two sizes of memory, guests from idle to far faster than the link, written in three patterns; and over one link guests that
//! serve pages, write and read files, work and rest, or compile (table III); by Godwit, which is watched for some
//! seconds and then moved three times, there and back and there: each move is foretold by the deployment itself, with what it knows by
//! then. And by QEMU alone, whose moves are foretold here, by AVG with QEMU's own rule, from what was asked of the load.
//!
//! What can go wrong: a guest that does not write as fast as asked (it is emulated) is foretold wrongly by AVG, not by a profile. A move that
//! does not complete says nothing, and is a row without figures.

use super::{Document, Drawing, Extent, PlanCell, Table, instead, move_steps, remarks, report_of};
use crate::ledger::Entry;
use crate::report::{MoveReport, Outcome, Predicted};
use crate::table::figure;
use godwit_predict::figure::{Mark, Point, Quantity, Series, draw};
use godwit_predict::{Cost, Evenly, Link, Overheads, PageRate, Pages, Rules, Sequential, Wire, simulate_on};
use godwit_units::{BitRate, Bytes};
use std::time::Duration;

/// Mbit/s.
const LINKS: [u32; 3] = [10, 50, 200];
const QUICK_LINKS: [u32; 3] = [10, 50, 200];
/// MiB.
const MEMORIES: [u32; 2] = [128, 256];
/// Pages a second.
const RATES: [u32; 5] = [0, 200, 1000, 5000, 20_000];
const QUICK_RATES: [u32; 2] = [0, 1000];
/// Table III's guests go over this link; and what a compilation needs.
const WORKS_LINK: u32 = 50;
const COMPILE_MIB: u32 = 448;
const PATTERNS: [&str; 3] = ["uniform", "sequential", "zipf"];
const WORKING_SET_MIB: u32 = 32;
const RTT_MS: u32 = 20;
const GIVEN_UP_S: u32 = 600;
/// What is asked of predictions: mean error of the time; of the downtime; that in ms; share inside the interval; its median width.
const TIME_ERROR: f64 = 0.04;
const DOWNTIME_ERROR: f64 = 0.10;
const DOWNTIME_ERROR_MS: f64 = 30.0;
const INSIDE: f64 = 0.9;
const WIDTH: f64 = 0.25;
/// QEMU's default limit of the downtime in the lab's baseline, and what its own stream and TCP add to a page.
const QEMU_LIMIT: Duration = Duration::from_millis(300);
const TCP: f64 = 0.95;

/// What a guest does: the paper's table III, and its figure 3.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Work {
    /// So many pages a second.
    Dirty(u32),
    /// Pages are asked for by clients.
    Web,
    /// Files are written and read.
    Files,
    /// It works for some seconds, and rests.
    Batch,
    /// A compilation.
    Compile,
}

impl Work {
    /// Of table III, those that a small guest does.
    const SMALL: [Self; 3] = [Self::Web, Self::Files, Self::Batch];

    fn rate(self) -> Option<u32> {
        match self {
            Self::Dirty(rate) => Some(rate),
            _ => None,
        }
    }
}

/// What a cell's name says.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Cell {
    link: u32,
    memory: u32,
    work: Work,
    by_qemu: bool,
}

impl Cell {
    fn name(self) -> String {
        let means = if self.by_qemu { "qemu" } else { "godwit" };
        let work = match self.work {
            Work::Dirty(rate) => format!("{rate}pages"),
            _ => self.does().to_owned(),
        };
        format!("{}mbit-{}mib-{work}-{means}", self.link, self.memory)
    }

    /// The pattern in which it writes, or what it is.
    fn does(self) -> &'static str {
        match self.work {
            // Each pattern meets each link and each rate.
            Work::Dirty(rate) => {
                let n = LINKS.iter().position(|l| *l == self.link).unwrap_or(0)
                    + RATES.iter().position(|r| *r == rate).unwrap_or(0);
                PATTERNS[n % PATTERNS.len()]
            }
            Work::Web => "web",
            Work::Files => "files",
            Work::Batch => "batch",
            Work::Compile => "compile",
        }
    }

    fn load(self) -> String {
        match self.work {
            Work::Dirty(rate) => {
                let pattern = self.does();
                format!(
                    "{{ kind = \"memory\", pages_per_s = {rate}, pattern = \"{pattern}\", working_set_mib = {WORKING_SET_MIB}, bytes_per_page = 64 }}"
                )
            }
            Work::Web => {
                "{ kind = \"tier\", port = 80, answer_bytes = 8192, from = \"c\", sessions = 8, think_ms = 20 }".into()
            }
            Work::Files => {
                "{ kind = \"disk\", kib_per_s = 256, read_kib_per_s = 1024, working_set_mib = 32 }".into()
            }
            Work::Batch => {
                "{ kind = \"memory\", pages_per_s = 3000, working_set_mib = 24, bytes_per_page = 1024, busy_s = 4, rest_s = 4 }".into()
            }
            Work::Compile => "{ kind = \"kernel-compile\" }".into(),
        }
    }

    /// Its image and its disk.
    fn disk(self) -> &'static str {
        match self.work {
            Work::Compile => "image = \"debian\"\ndisk_gib = 6.1",
            Work::Files => "disk_gib = 0.2",
            _ => "disk_gib = 0.1",
        }
    }

    fn plan(self) -> PlanCell {
        let Self { link, memory, by_qemu, .. } = self;
        let who = if by_qemu { "godwit = false\nbaseline = [\"qemu\"]" } else { "godwit = true" };
        let profile = |s: u32, to: &str| {
            if by_qemu {
                String::new()
            } else {
                format!("[[step]]\nprofile = {{ vm = \"vm\", s = {s}, to = \"{to}\" }}\n")
            }
        };
        let mv = |to: &str| {
            // A guest that is held to compare its RAM teaches predictions a pause that is the lab's.
            move_steps(&format!("{{ vm = \"vm\", to = \"{to}\", compare = false }}"))
        };
        let moves = if by_qemu {
            mv("b")
        } else {
            [profile(12, "b"), mv("b"), profile(8, "a"), mv("a"), profile(8, "b"), mv("b")].concat()
        };
        let (disk, load) = (self.disk(), self.load());
        let scenario = format!(
            r#"name = "figures-predict"
{who}
warm_percent = 40
move_timeout_s = {GIVEN_UP_S}

[wan]
rate_mbit = {link}
rtt_ms = {RTT_MS}

[[site]]
name = "a"
[[site]]
name = "b"
[[site]]
name = "c"

[[vm]]
name = "vm"
site = "a"
memory_mib = {memory}
{disk}
load = [
  {load},
]

[[step]]
after_s = 3
wait = {{ s = 1 }}
{moves}[[step]]
verify = {{ vm = "vm" }}
"#
        );
        PlanCell { name: self.name(), scenario }
    }
}

fn all() -> Vec<Cell> {
    let mut cells = vec![];
    for memory in MEMORIES {
        for link in LINKS {
            for rate in RATES {
                for by_qemu in [false, true] {
                    cells.push(Cell { link, memory, work: Work::Dirty(rate), by_qemu });
                }
            }
        }
    }
    let link = WORKS_LINK;
    cells.extend(Work::SMALL.map(|work| Cell { link, memory: MEMORIES[0], work, by_qemu: false }));
    cells.push(Cell { link, memory: COMPILE_MIB, work: Work::Compile, by_qemu: false });
    cells
}

fn is_quick(cell: &Cell) -> bool {
    let shown = match cell.work {
        Work::Dirty(rate) => QUICK_LINKS.contains(&cell.link) && QUICK_RATES.contains(&rate),
        work => Work::SMALL.contains(&work),
    };
    shown && cell.memory == MEMORIES[0] && (!cell.by_qemu || cell.link == 50)
}

pub(super) fn cells(extent: Extent) -> Vec<PlanCell> {
    let quick = all().into_iter().filter(is_quick);
    let rest = all().into_iter().filter(|cell| extent == Extent::Full && !is_quick(cell));
    quick.chain(rest).map(Cell::plan).collect()
}

/// What AVG says of a move by QEMU alone, of a guest whose rate is known.
fn by_avg(cell: Cell, figures: &MoveReport) -> Option<Predicted> {
    let rate = PageRate::new(cell.work.rate()?.into());
    let pages = Pages::of(Bytes::mib(cell.memory.into()));
    let set = Pages::of(Bytes::mib(WORKING_SET_MIB.into()));
    let full = figures.nonzero_share.unwrap_or(0.5);
    let page = |bytes: f64| Cost { bytes, seconds: 4e-6 };
    // A zero page is a record of nine bytes, another one has eight more than its contents.
    let wire = Wire::plain(page(full * 4104.0 + (1.0 - full) * 9.0), page(4104.0));
    let overheads = Overheads { pre: Duration::from_millis(500), post: Duration::from_millis(60 + u64::from(RTT_MS)) };
    let link = Link { rate: BitRate::from_mbit(f64::from(cell.link) * TCP), overheads };
    let mut rules = Rules::qemu(QEMU_LIMIT);
    // The lab's patience with it.
    rules.conditions.push(godwit_predict::Condition::Rounds(30));
    let told = match cell.does() {
        "sequential" => simulate_on(&mut Sequential::new(pages, set, rate), link, &wire, &rules),
        _ => simulate_on(&mut Evenly::new(pages, set, rate), link, &wire, &rules),
    };
    let told = told.ok()?;
    // Its disk goes before its memory. Nothing writes to it, so that what went is what was there before the move.
    let disk = figures.bytes.disk;
    let total_s = told.total_s + disk as f64 * 8.0 / link.rate.0 as f64;
    let between = |value: f64, less: f64, more: f64| Some([value * less, value * more]);
    Some(Predicted {
        total_s,
        downtime_ms: told.downtime_ms,
        bytes: told.bytes + disk,
        total_between_s: between(total_s, 0.85, 1.2),
        downtime_between_ms: between(told.downtime_ms, 0.6, 1.8),
        model: Some("avg, from what was asked".into()),
        ..Predicted::default()
    })
}

/// One move beside what was foretold of it.
struct Compared<'a> {
    cell: Cell,
    nth: usize,
    figures: &'a MoveReport,
    told: Option<Predicted>,
}

impl Compared<'_> {
    fn is_whole(&self) -> bool {
        self.figures.outcome == Outcome::Completed && self.told.is_some() && self.figures.downtime_ms.is_some()
    }

    /// Relative errors of time and downtime, and whether each lay inside.
    fn errors(&self) -> Option<[f64; 2]> {
        let (told, downtime) = (self.told.as_ref()?, self.figures.downtime_ms?);
        let of = |told: f64, measured: f64| (told - measured).abs() / measured.max(1e-9);
        Some([of(told.total_s, self.figures.total_s), of(told.downtime_ms, downtime)])
    }

    fn inside(&self) -> Option<[bool; 2]> {
        let (told, downtime) = (self.told.as_ref()?, self.figures.downtime_ms?);
        let has = |span: Option<[f64; 2]>, value: f64| span.is_some_and(|[from, to]| (from..=to).contains(&value));
        Some([has(told.total_between_s, self.figures.total_s), has(told.downtime_between_ms, downtime)])
    }

    /// The time interval's width, of what is likely.
    fn width(&self) -> Option<f64> {
        let told = self.told.as_ref()?;
        told.total_between_s.map(|[from, to]| (to - from) / told.total_s.max(1e-9))
    }

    fn row(&self) -> Vec<String> {
        let (cell, figures) = (self.cell, self.figures);
        let mut row = vec![
            if cell.by_qemu { "QEMU" } else { "Godwit" }.to_owned(),
            cell.does().to_owned(),
            cell.link.to_string(),
            cell.memory.to_string(),
            cell.work.rate().map_or_else(String::new, |rate| rate.to_string()),
            self.nth.to_string(),
        ];
        let (Some(told), Some([time, pause]), Some(inside)) = (&self.told, self.errors(), self.inside()) else {
            let why = instead(Some(figures));
            row.push(if why.is_empty() { "not foretold".into() } else { why });
            row.extend(vec![String::new(); 10]);
            return row;
        };
        let between = |span: Option<[f64; 2]>, digits: usize| {
            span.map_or_else(String::new, |[from, to]| {
                format!("{} - {}", figure(Some(from), digits), figure(Some(to), digits))
            })
        };
        let word = |is: bool| if is { "yes" } else { "no" }.to_owned();
        row.extend([
            figure(Some(told.total_s), 1),
            between(told.total_between_s, 1),
            figure(Some(figures.total_s), 1),
            figure(Some(time * 100.0), 1),
            word(inside[0]),
            figure(Some(told.downtime_ms), 0),
            between(told.downtime_between_ms, 0),
            figure(figures.downtime_ms, 0),
            figure(Some(pause * 100.0), 1),
            word(inside[1]),
            figure(Some(told.bytes as f64 / figures.bytes.total().max(1) as f64), 2),
        ]);
        row
    }
}

fn compared(entries: &[Entry]) -> Vec<Compared<'_>> {
    let mut found = vec![];
    for cell in all() {
        let Some(report) = report_of(entries, &cell.name()) else { continue };
        if cell.by_qemu {
            let figures = report.baselines.iter().map(|baseline| &baseline.figures);
            found.extend(figures.enumerate().map(|(i, figures)| Compared {
                cell,
                nth: i + 1,
                figures,
                told: by_avg(cell, figures),
            }));
        } else {
            let figures = report.moves.iter().enumerate();
            found.extend(figures.map(|(i, figures)| Compared {
                cell,
                nth: i + 1,
                figures,
                told: figures.predicted.clone(),
            }));
        }
    }
    found
}

/// Sums over moves: how many, mean errors of time and downtime, the latter also in milliseconds, downtimes that are good enough, moves inside,
/// median width.
struct Sum {
    count: usize,
    time: f64,
    downtime: f64,
    downtime_ms: f64,
    downtime_good: f64,
    /// Of the downtimes: their mean, and by how much those of one guest over one link differ, milliseconds.
    pause: f64,
    spread: f64,
    inside: [f64; 2],
    width: f64,
}

/// By how much repeats differ: the standard deviation of each cell's, and of these the mean. Zero where nothing was repeated.
fn spread(values: impl Iterator<Item = (Cell, f64)>) -> f64 {
    let mut cells: Vec<(Cell, Vec<f64>)> = vec![];
    for (cell, value) in values {
        match cells.last_mut() {
            Some((last, values)) if *last == cell => values.push(value),
            _ => cells.push((cell, vec![value])),
        }
    }
    let deviations = cells.iter().filter(|(_, values)| values.len() > 1).map(|(_, values)| {
        let n = values.len() as f64;
        let mean = values.iter().sum::<f64>() / n;
        (values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / (n - 1.0)).sqrt()
    });
    let deviations: Vec<f64> = deviations.collect();
    deviations.iter().fold(0.0, |sum, one| sum + one) / deviations.len().max(1) as f64
}

fn sum(moves: &[&Compared<'_>]) -> Option<Sum> {
    let moves: Vec<&&Compared<'_>> = moves.iter().filter(|m| m.is_whole()).collect();
    let n = moves.len();
    let mean = |of: &dyn Fn(&Compared<'_>) -> f64| moves.iter().map(|m| of(m)).sum::<f64>() / n.max(1) as f64;
    let mut widths: Vec<f64> = moves.iter().filter_map(|m| m.width()).collect();
    widths.sort_by(f64::total_cmp);
    let good = |m: &Compared<'_>| {
        let (told, seen) = (m.told.as_ref().map_or(0.0, |t| t.downtime_ms), m.figures.downtime_ms.unwrap_or(0.0));
        f64::from(u8::from((told - seen).abs() <= (seen * DOWNTIME_ERROR).max(DOWNTIME_ERROR_MS)))
    };
    let share = |i: usize| mean(&|m| f64::from(u8::from(m.inside().is_some_and(|inside| inside[i]))));
    let pause = |m: &Compared<'_>| m.figures.downtime_ms.unwrap_or(0.0);
    (n > 0).then(|| Sum {
        count: n,
        time: mean(&|m| m.errors().map_or(0.0, |e| e[0])),
        downtime: mean(&|m| m.errors().map_or(0.0, |e| e[1])),
        downtime_ms: mean(&|m| m.errors().map_or(0.0, |e| e[1]) * pause(m)),
        pause: mean(&pause),
        spread: spread(moves.iter().map(|m| (m.cell, pause(m)))),
        downtime_good: mean(&good),
        inside: [share(0), share(1)],
        width: widths.get(widths.len() / 2).copied().unwrap_or(0.0),
    })
}

fn sums(found: &[Compared<'_>]) -> (Table, Vec<(String, Option<bool>)>) {
    type Which<'a> = &'a dyn Fn(&Compared<'_>) -> bool;
    let groups: [(&str, Which<'_>); 4] = [
        ("Godwit, all", &|m| !m.cell.by_qemu),
        ("Godwit, first moves of a pair of hosts", &|m| !m.cell.by_qemu && m.nth == 1),
        ("Godwit, later moves", &|m| !m.cell.by_qemu && m.nth > 1),
        ("QEMU alone, AVG", &|m| m.cell.by_qemu),
    ];
    let percent = |share: f64| figure(Some(share * 100.0), 1);
    let mut rows = vec![];
    for (name, which) in groups {
        let these: Vec<&Compared<'_>> = found.iter().filter(|m| which(m)).collect();
        if let Some(s) = sum(&these) {
            rows.push(vec![
                name.to_owned(),
                s.count.to_string(),
                percent(s.time),
                percent(s.downtime),
                figure(Some(s.downtime_ms), 0),
                figure(Some(s.spread), 0),
                percent(s.downtime_good),
                percent(s.inside[0]),
                percent(s.inside[1]),
                percent(s.width),
            ]);
        }
    }
    let later: Vec<&Compared<'_>> = found.iter().filter(|m| groups[2].1(m)).collect();
    let of = |is: fn(&Sum) -> bool| sum(&later).map(|s| is(&s));
    let bounds = vec![
        (
            format!("later moves: mean error of the time at most {:.0} %", TIME_ERROR * 100.0),
            of(|s| s.time <= TIME_ERROR),
        ),
        (
            format!(
                "later moves: mean error of the downtime at most the larger of {:.0} %, {DOWNTIME_ERROR_MS:.0} ms and the spread of repeats",
                DOWNTIME_ERROR * 100.0
            ),
            of(|s| s.downtime_ms <= (s.pause * DOWNTIME_ERROR).max(DOWNTIME_ERROR_MS).max(s.spread)),
        ),
        (format!("later moves: {:.0} % of times inside the interval", INSIDE * 100.0), of(|s| s.inside[0] >= INSIDE)),
        (format!("later moves: the interval's median width at most {:.0} %", WIDTH * 100.0), of(|s| s.width <= WIDTH)),
    ];
    let columns = [
        "moves",
        "count",
        "time error %",
        "downtime error %",
        "downtime error ms",
        "spread of repeats ms",
        "good %",
        "time inside %",
        "downtime inside %",
        "width %",
    ];
    let table = Table { title: "Errors".into(), columns: columns.map(str::to_owned).into(), words: 1, rows };
    (table, bounds)
}

fn drawings(found: &[Compared<'_>]) -> Vec<Drawing> {
    let mut all = vec![];
    for link in LINKS {
        for (name, quantity) in [("time", Quantity::Total), ("downtime", Quantity::Downtime)] {
            let mut series = vec![];
            for (who, by_qemu) in [("Godwit", false), ("QEMU", true)] {
                let of = |m: &&Compared<'_>| {
                    m.is_whole() && m.cell.link == link && m.cell.by_qemu == by_qemu && m.cell.memory == MEMORIES[0]
                };
                let point = |m: &Compared<'_>, total_s: f64, downtime_ms: f64| {
                    let pages_per_s = m.cell.work.rate()?.into();
                    Some(Point { pages_per_s, total_s, downtime_ms })
                };
                let last = found.iter().filter(of).filter(|m| by_qemu || m.nth > 1);
                let told = last
                    .filter_map(|m| m.told.as_ref().and_then(|told| point(m, told.total_s, told.downtime_ms)))
                    .collect();
                let measured = found
                    .iter()
                    .filter(of)
                    .filter_map(|m| point(m, m.figures.total_s, m.figures.downtime_ms.unwrap_or(0.0)))
                    .collect();
                series.push(Series { name: format!("{who}, foretold"), mark: Mark::Line, points: told });
                series.push(Series { name: format!("{who}, measured"), mark: Mark::Dots, points: measured });
            }
            series.retain(|s| !s.points.is_empty());
            if series.is_empty() {
                continue;
            }
            let title = format!("{name} over the dirty rate, {link} Mbit/s, {} MiB", MEMORIES[0]);
            let drawn = Some(draw(&title, quantity, &series));
            all.push(Drawing { name: format!("{name}-{link}mbit"), title, drawn, ..Drawing::default() });
        }
    }
    all
}

pub(super) fn document(entries: &[Entry]) -> Document {
    let found = compared(entries);
    let columns = [
        "by",
        "what",
        "Mbit/s",
        "MiB",
        "pages/s",
        "move",
        "time foretold s",
        "between s",
        "time s",
        "error %",
        "inside",
        "downtime foretold ms",
        "between ms",
        "downtime ms",
        "error % ",
        "inside ",
        "bytes foretold/measured",
    ];
    let each = Table {
        title: "Each move".into(),
        columns: columns.map(str::to_owned).into(),
        words: 2,
        rows: found.iter().map(Compared::row).collect(),
    };
    let (errors, bounds) = sums(&found);
    let mut notes = vec![
        "Godwit's guest is watched for some seconds before each move; the first move between two hosts knows nothing of what moves between them take.".to_owned(),
    ];
    notes.extend(remarks(entries));
    Document {
        title: "Moves foretold and measured".into(),
        tables: vec![errors, each],
        drawings: drawings(&found),
        bounds,
        remarks: notes,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeats_differ_by_their_standard_deviation_within_each_cell() {
        let cell = |link| Cell { link, memory: 128, work: Work::Web, by_qemu: false };
        let values = [(cell(10), 100.0), (cell(10), 120.0), (cell(50), 300.0), (cell(50), 300.0), (cell(200), 7.0)];
        // 14.1 and 0; what was measured once says nothing.
        assert!((spread(values.into_iter()) - 200_f64.sqrt() / 2.0).abs() < 1e-9);
        assert!(spread(std::iter::empty()).abs() < 1e-9);
    }
}
