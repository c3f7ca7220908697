//! Akoush et al., figure 3 and table II: moves as they were foretold beside moves as they were, over the dirty rate.
//!
//! Three links, two sizes of memory, guests from idle to far faster than the link, written in three patterns; and over one link guests that
//! serve pages, write and read files, work and rest, or compile (table III); by Godwit, which is watched for some
//! seconds and then moved three times, there and back and there: each move is foretold by the deployment itself, with what it knows by
//! then. And by QEMU alone, whose moves are foretold here, by AVG and by HIST with QEMU's own rule, from what the very guest was seen to
//! write before it moved: the lab watches it for some seconds, since an emulated guest does not write as fast as it is asked to.
//!
//! What QEMU gets of a link, what its disks take and what a move takes besides are measured, as in the paper, on a move of an idle guest: the
//! smaller one's over each link ([`Measured`]), whose own row has no prediction and counts in no sum. No other move is looked at before it is
//! foretold, but for the share of its memory that is not zero, which is known before it begins.
//!
//! A guest that is faster than the link never converges, so each QEMU gets [`PATIENCE_ROUNDS`] rounds and then stops its guest: a rule that the
//! models know.
//!
//! What can go wrong: *a guest is watched for too short a time* to be seen writing all that it writes to, so [`Cell::watched_s`] follows from its
//! rate. *A link has no idle move yet*: its moves are not foretold. *A move does not complete*: it says nothing, and is a row without figures.

use super::{Document, Drawing, Extent, PlanCell, Table, instead, move_steps, remarks, report_of, unless_lost};
use crate::ledger::Entry;
use crate::report::{MoveReport, Outcome, Predicted, Round};
use crate::table::figure;
use godwit_predict::figure::{Mark, Point, Quantity, Scale, Series, draw};
use godwit_predict::{
    Condition, Cost, Evenly, Guest, Link, Log, Overheads, PAGE, Prediction, Replayed, Rules, Taken, Timeline, Wire,
    simulate_on,
};
use godwit_units::BitRate;
use std::time::Duration;

/// Mbit/s.
const LINKS: [u32; 3] = [10, 50, 200];
const QUICK_LINKS: [u32; 3] = [10, 50, 200];
/// MiB.
const MEMORIES: [u32; 2] = [128, 256];
/// Pages a second.
const RATES: [u32; 5] = [0, 200, 1000, 5000, 20_000];
const QUICK_RATES: [u32; 2] = [0, 1000];
/// Of the larger guest: idle, near the slower links' rates, and above all of them. Over 10 Mbit/s each takes five minutes.
const LARGER_RATES: [u32; 3] = [0, 1000, 20_000];
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
/// And of how many moves.
const MOVES: usize = 60;
/// QEMU's default limit of the downtime in the lab's baseline, and after how many rounds it is told to stop its guest.
const QEMU_LIMIT: Duration = Duration::from_millis(300);
const PATIENCE_ROUNDS: u32 = 6;
/// A record of its stream: of a page, with eight bytes before it, and of one that is zero.
const PAGE_RECORD: f64 = PAGE.0 as f64 + 8.0;
const ZERO_RECORD: f64 = 9.0;
/// What the paper's models were off by at 100 Mbit/s (tables II and IV), the most of each: the intervals that are said of QEMU's moves, besides
/// its looks ([`Measured::looks_every`]).
const QEMU_TIME_WITHIN: f64 = 0.10;
const QEMU_PAUSE_WITHIN: f64 = 0.21;
/// Between two looks at what is left QEMU sends for so long at least, and so many pages (`ram_save_iterate`).
const QEMU_SENDS_FOR: Duration = Duration::from_millis(50);
const QEMU_SENDS_PAGES: f64 = 64.0;
/// Moments at which HIST has a move begin: of what was seen, or, of a guest that works by turns, around the one that comes; the median is told.
const STARTS: u32 = 9;

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
    /// Of those, what leaves the disk as it is: what that takes QEMU is known from the idle guest.
    const BY_QEMU: [Self; 2] = [Self::Web, Self::Batch];

    fn rate(self) -> Option<u32> {
        match self {
            Self::Dirty(rate) => Some(rate),
            _ => None,
        }
    }
}

/// How a guest was modelled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Model {
    /// By the rate at which it was seen to write.
    Avg,
    /// By the pages that it was seen to write.
    Hist,
    /// As the deployment does by itself.
    Deployments,
    /// Not at all: others are foretold from it.
    MeasuredOn,
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

    /// The smaller idle guest, by whose move by QEMU a link is measured.
    fn measures_link(self) -> bool {
        self.by_qemu && self.memory == MEMORIES[0] && self.work == Work::Dirty(0)
    }

    /// For how long QEMU's guest is watched: until one that writes at random has come to 95 % of what it writes to, within a minute, and one that
    /// rests has worked three times. In a trial HIST was 8 % short of a guest that had been watched until it had come to three quarters.
    fn watched_s(self) -> u32 {
        let around = match self.work {
            Work::Dirty(rate @ 1..) => (WORKING_SET_MIB * 256 * 3).div_ceil(rate),
            Work::Batch => 24,
            _ => 0,
        };
        around.clamp(12, 60)
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
            // What the lab sees goes into the ledger: fewer looks.
            let how = if by_qemu { "interval_s = 1".to_owned() } else { format!("to = \"{to}\"") };
            format!("[[step]]\nprofile = {{ vm = \"vm\", s = {s}, {how} }}\n")
        };
        // A guest that is held to compare its RAM teaches predictions a pause that is the lab's. The last move teaches nobody, nor do QEMU's.
        let mv =
            |to: &str, compare: bool| move_steps(&format!("{{ vm = \"vm\", to = \"{to}\", compare = {compare} }}"));
        let moves = if by_qemu {
            [profile(self.watched_s(), "b"), mv("b", true)].concat()
        } else {
            [profile(12, "b"), mv("b", false), profile(8, "a"), mv("a", false), profile(8, "b"), mv("b", true)].concat()
        };
        let (disk, load) = (self.disk(), self.load());
        let scenario = format!(
            r#"name = "figures-predict"
{who}
warm_percent = 40
move_timeout_s = {GIVEN_UP_S}
patience_rounds = {PATIENCE_ROUNDS}

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
            let larger = memory != MEMORIES[0];
            for rate in RATES.into_iter().filter(|rate| !larger || LARGER_RATES.contains(rate)) {
                for by_qemu in [false, true] {
                    cells.push(Cell { link, memory, work: Work::Dirty(rate), by_qemu });
                }
            }
        }
    }
    let link = WORKS_LINK;
    cells.extend(Work::SMALL.map(|work| Cell { link, memory: MEMORIES[0], work, by_qemu: false }));
    cells.extend(Work::BY_QEMU.map(|work| Cell { link, memory: MEMORIES[0], work, by_qemu: true }));
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

/// What a move of an idle guest by QEMU says of a link (section IV-A of the paper).
#[derive(Clone, Copy, Debug, PartialEq)]
struct Measured {
    /// What the stream of memory gets of it.
    goodput: BitRate,
    overheads: Overheads,
    /// The disk goes before the memory. Nothing writes to it, so that each guest's is the same.
    disk: Duration,
    disk_bytes: u64,
    /// Bytes on the WAN for a byte of the stream.
    carried: f64,
}

impl Measured {
    fn of(idle: &MoveReport) -> Option<Self> {
        let (stop, rounds) = idle.rounds.split_last().filter(|_| idle.outcome == Outcome::Completed)?;
        let stream = |round: &Round| round.bytes_by_encoding.values().sum::<u64>() as f64;
        let (sent, seconds) = (rounds.iter().map(stream).sum::<f64>(), rounds.iter().map(|r| r.seconds).sum::<f64>());
        let goodput = BitRate::from_mbit(sent * 8e-6 / seconds);
        if seconds <= 0.0 || goodput == BitRate(0) {
            return None;
        }
        let pause = idle.downtime_ms? / 1e3;
        let disk = idle.phases.iter().filter(|p| p.name == "disk").map(|p| p.end_s - p.start_s).sum::<f64>();
        let span = |seconds: f64| Duration::try_from_secs_f64(seconds.max(0.0)).ok();
        let overheads = Overheads {
            pre: span(idle.took_s() - disk - seconds - pause)?,
            post: span(pause - stream(stop) * 8.0 / goodput.0 as f64)?,
        };
        let carried = idle.bytes.memory as f64 / (sent + stream(stop));
        Some(Self { goodput, overheads, disk: span(disk)?, disk_bytes: idle.bytes.disk, carried })
    }

    /// By the idle move over this link, if it was made.
    fn over(entries: &[Entry], link: u32) -> Option<Self> {
        let idle = Cell { link, memory: MEMORIES[0], work: Work::Dirty(0), by_qemu: true };
        let report = report_of(entries, &idle.name())?;
        Self::of(&report.baselines.last()?.figures)
    }

    /// How often QEMU looks at what is left: it counts pages, and asks for the time at every 64th.
    fn looks_every(&self) -> Duration {
        let pages = Duration::from_secs_f64(QEMU_SENDS_PAGES * PAGE_RECORD * 8.0 / self.goodput.0 as f64);
        pages * (QEMU_SENDS_FOR.as_secs_f64() / pages.as_secs_f64()).ceil().max(1.0) as u32
    }

    /// A move by QEMU of a guest so much of whose memory is not zero.
    fn simulate(&self, guest: &mut impl Guest, full: f64) -> Option<Prediction> {
        let page = |bytes: f64| Cost { bytes, seconds: 0.0 };
        let wire = Wire::plain(page(full * PAGE_RECORD + (1.0 - full) * ZERO_RECORD), page(PAGE_RECORD));
        let link = Link { rate: self.goodput, overheads: self.overheads };
        // The rest is little enough from some moment between two looks on, and goes on being sent until the second.
        let mut rules = Rules::qemu(QEMU_LIMIT.saturating_sub(self.looks_every() / 2));
        rules.conditions.push(Condition::Rounds(PATIENCE_ROUNDS));
        simulate_on(guest, link, &wire, &rules).ok()
    }

    /// What is said of a move, of which these were simulated.
    fn foretell(&self, mut moved: Vec<Prediction>, model: &str) -> Option<Predicted> {
        moved.sort_by(|a, b| a.downtime_ms.total_cmp(&b.downtime_ms));
        let ends = |of: fn(&Prediction) -> f64| {
            let all = || moved.iter().map(of);
            [all().fold(f64::INFINITY, f64::min), all().fold(0.0, f64::max)]
        };
        let ([shortest, longest], [least, most]) = (ends(|m| m.total_s), ends(|m| m.downtime_ms));
        let disk = self.disk.as_secs_f64();
        let within = |from: f64, to: f64, share: f64| [from * (1.0 - share), to * (1.0 + share)];
        let pause = within(least, most, QEMU_PAUSE_WITHIN);
        let looks = self.looks_every().as_secs_f64() * 1e3 / 2.0;
        let median = moved.get(moved.len() / 2)?;
        Some(Predicted {
            total_s: median.total_s + disk,
            downtime_ms: median.downtime_ms,
            bytes: (median.bytes as f64 * self.carried) as u64 + self.disk_bytes,
            total_between_s: Some(within(shortest + disk, longest + disk, QEMU_TIME_WITHIN)),
            downtime_between_ms: Some([(pause[0] - looks).max(0.0), pause[1] + looks]),
            model: Some(model.into()),
            goodput_mbit: Some(self.goodput.mbit()),
            ..Predicted::default()
        })
    }
}

/// What both models say of a move by QEMU alone whose guest was watched before.
fn by_qemu(measured: Option<Measured>, seen: Option<&Log>, figures: &MoveReport) -> [(Model, Option<Predicted>); 2] {
    let told = |model: Model| {
        let (measured, log, full) = (measured?, seen?, figures.nonzero_share?);
        if model == Model::Avg {
            let moved = measured.simulate(&mut Evenly::of(log, Taken::Written), full)?;
            return measured.foretell(vec![moved], "avg");
        }
        let timeline = Timeline::new(log, Taken::Written);
        let at = |i: u32| match timeline.known_end() {
            // It is moved as soon as it was watched, and its memory goes after its disk: an interval earlier, or later.
            Some(end) => {
                let interval = log.header().interval;
                (end + measured.overheads.pre + measured.disk + interval * 2 * i / (STARTS - 1))
                    .saturating_sub(interval)
            }
            None => log.length() * i / STARTS,
        };
        let moved = (0..STARTS).map(|i| measured.simulate(&mut Replayed::new(&timeline, at(i)), full));
        measured.foretell(moved.collect::<Option<_>>()?, "hist")
    };
    [Model::Avg, Model::Hist].map(|model| (model, told(model)))
}

/// One move beside what was foretold of it.
struct Compared<'a> {
    cell: Cell,
    model: Model,
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
        Some([of(told.total_s, self.figures.took_s()), of(told.downtime_ms, downtime)])
    }

    fn inside(&self) -> Option<[bool; 2]> {
        let (told, downtime) = (self.told.as_ref()?, self.figures.downtime_ms?);
        let has = |span: Option<[f64; 2]>, value: f64| span.is_some_and(|[from, to]| (from..=to).contains(&value));
        Some([has(told.total_between_s, self.figures.took_s()), has(told.downtime_between_ms, downtime)])
    }

    /// The time interval's width, of what is likely.
    fn width(&self) -> Option<f64> {
        let told = self.told.as_ref()?;
        told.total_between_s.map(|[from, to]| (to - from) / told.total_s.max(1e-9))
    }

    /// The model, by its name.
    fn by(&self) -> &str {
        match self.model {
            Model::Avg => "AVG",
            Model::Hist => "HIST",
            Model::MeasuredOn => "measures the link",
            Model::Deployments => match self.told.as_ref().and_then(|told| told.model.as_deref()) {
                Some("hist") => "HIST",
                Some("avg") => "AVG",
                other => other.unwrap_or_default(),
            },
        }
    }

    /// What there is where there are no errors.
    fn instead(&self) -> Vec<String> {
        let why = instead(Some(self.figures));
        let mut cells = vec![String::new(); 11];
        match self.model {
            Model::MeasuredOn if why.is_empty() => {
                cells[2] = figure(Some(self.figures.took_s()), 1);
                cells[7] = figure(self.figures.downtime_ms, 0);
            }
            _ => cells[0] = if why.is_empty() { "not foretold".into() } else { why },
        }
        cells
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
            self.by().to_owned(),
        ];
        let (Some(told), Some([time, pause]), Some(inside)) = (&self.told, self.errors(), self.inside()) else {
            row.extend(self.instead());
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
            figure(Some(figures.took_s()), 1),
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
        let measured = Measured::over(entries, cell.link);
        let seen = report.profiles.last().and_then(|profile| Log::read(profile.bytes()?).ok());
        let seen = seen.filter(|log| log.watched() > 0);
        for (i, figures) in report.baselines.iter().map(|baseline| &baseline.figures).enumerate() {
            let told = if cell.measures_link() {
                vec![(Model::MeasuredOn, None)]
            } else {
                by_qemu(measured, seen.as_ref(), figures).into()
            };
            found.extend(told.into_iter().map(|(model, told)| Compared { cell, model, nth: i + 1, figures, told }));
        }
        let moves = report.moves.iter().enumerate();
        found.extend(moves.map(|(i, figures)| Compared {
            cell,
            model: Model::Deployments,
            nth: i + 1,
            figures,
            told: figures.predicted.clone(),
        }));
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
    let groups: [(&str, Which<'_>); 5] = [
        ("Godwit, first moves of a pair of hosts", &|m| !m.cell.by_qemu && m.nth == 1),
        ("Godwit, all", &|m| !m.cell.by_qemu),
        ("Godwit, later moves", &|m| !m.cell.by_qemu && m.nth > 1),
        ("QEMU alone, AVG", &|m| m.model == Model::Avg),
        ("QEMU alone, HIST", &|m| m.model == Model::Hist),
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
    // A move that two models foretell is one move.
    let whole = found.iter().filter(|m| m.is_whole() && m.model != Model::Avg).count();
    let mut bounds = vec![(format!("at least {MOVES} moves"), (whole > 0).then_some(whole >= MOVES))];
    // A first move is foretold from nothing, and counts among all.
    for (name, which) in &groups[1..] {
        let these: Vec<&Compared<'_>> = found.iter().filter(|m| which(m)).collect();
        let ours = || these.iter().filter(|m| !m.cell.by_qemu).map(|m| m.figures);
        let of = |is: fn(&Sum) -> bool| unless_lost(sum(&these).map(|s| is(&s)), ours());
        let time = format!("{name}: mean error of the time at most {:.0} %", TIME_ERROR * 100.0);
        let downtime = format!(
            "{name}: mean error of the downtime at most the larger of {:.0} %, {DOWNTIME_ERROR_MS:.0} ms and the spread of repeats",
            DOWNTIME_ERROR * 100.0
        );
        bounds.extend([
            (time, of(|s| s.time <= TIME_ERROR)),
            (downtime, of(|s| s.downtime_ms <= (s.pause * DOWNTIME_ERROR).max(DOWNTIME_ERROR_MS).max(s.spread))),
            (format!("{name}: {:.0} % of times inside the interval", INSIDE * 100.0), of(|s| s.inside[0] >= INSIDE)),
            (format!("{name}: the interval's median width at most {:.0} %", WIDTH * 100.0), of(|s| s.width <= WIDTH)),
        ]);
    }
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

/// A line through what was foretold: the mean of each rate's moves.
fn line(moves: &[&Compared<'_>]) -> Vec<Point> {
    let told = |rate: u32| {
        let these = moves.iter().filter(|m| m.cell.work == Work::Dirty(rate)).filter_map(|m| m.told.as_ref());
        let (total, downtime): (Vec<f64>, Vec<f64>) = these.map(|told| (told.total_s, told.downtime_ms)).unzip();
        let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
        let point = || Point { pages_per_s: rate.into(), total_s: mean(&total), downtime_ms: mean(&downtime) };
        (!total.is_empty()).then(point)
    };
    RATES.into_iter().filter_map(told).collect()
}

/// What was measured, each move a dot.
fn dots(moves: &[&Compared<'_>]) -> Vec<Point> {
    let point = |m: &&Compared<'_>| {
        let (rate, downtime_ms) = (m.cell.work.rate()?, m.figures.downtime_ms?);
        let ended = m.figures.outcome == Outcome::Completed;
        ended.then_some(Point { pages_per_s: rate.into(), total_s: m.figures.took_s(), downtime_ms })
    };
    moves.iter().filter_map(point).collect()
}

/// What is drawn of one guest's size over one link.
fn series(found: &[Compared<'_>], link: u32, memory: u32) -> Vec<Series> {
    let of = |model: Model| -> Vec<&Compared<'_>> {
        let these = found.iter().filter(|m| (m.cell.link, m.cell.memory, m.model) == (link, memory, model));
        // The first move between two hosts is foretold from nothing.
        these.filter(|m| m.cell.by_qemu || m.nth > 1).collect()
    };
    let (ours, avg, hist, idle) = (of(Model::Deployments), of(Model::Avg), of(Model::Hist), of(Model::MeasuredOn));
    let measured = [idle.clone(), hist.clone()].concat();
    let one = |name: &str, mark, colour, points| Series { name: name.into(), mark, colour, points };
    let mut all = vec![
        one("Godwit, HIST", Mark::Line, 0, line(&ours)),
        one("Godwit, measured", Mark::Dots, 0, dots(&ours)),
        one("QEMU, AVG", Mark::Dashes, 1, line(&avg)),
        one("QEMU, HIST", Mark::Line, 1, line(&hist)),
        one("QEMU, measured", Mark::Dots, 1, dots(&measured)),
    ];
    all.retain(|series| !series.points.is_empty());
    all
}

fn drawings(found: &[Compared<'_>]) -> Vec<Drawing> {
    let mut all = vec![];
    for (memory, link) in MEMORIES.into_iter().flat_map(|memory| LINKS.map(|link| (memory, link))) {
        let series = series(found, link, memory);
        if series.is_empty() {
            continue;
        }
        let size = if memory == MEMORIES[0] { String::new() } else { format!("-{memory}mib") };
        for (name, quantity) in [("time", Quantity::Total), ("downtime", Quantity::Downtime)] {
            let title = format!("{name} over the dirty rate, {link} Mbit/s, {memory} MiB");
            let drawn = Some(draw(&title, quantity, Scale::Magnitude, &series));
            all.push(Drawing { name: format!("{name}-{link}mbit{size}"), title, drawn, ..Drawing::default() });
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
        "by the model",
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
        "Godwit's guest is watched for some seconds before each move; the first move between two hosts knows nothing of what moves between them take. The deployment foretells its moves by HIST wherever a guest was watched.".to_owned(),
        format!(
            "QEMU's guest is watched for 12 to 60 s, and its move foretold by both models from that. Over each link the idle guest of {} MiB says what QEMU gets of it and what a move takes besides. QEMU stops a guest when the rest takes {} ms, or after {PATIENCE_ROUNDS} rounds.",
            MEMORIES[0],
            QEMU_LIMIT.as_millis()
        ),
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
    use super::super::tests::entry;
    use super::*;
    use crate::report::{BaselineReport, Phase, ProfileReport, WanBytes};
    use crate::scenario::{Action, Baseline, Scenario};
    use crate::table::tests::a_move;
    use godwit_predict::log::Header;
    use godwit_predict::{LogWriter, Observed, Pages};
    use godwit_units::Bytes;
    use std::collections::BTreeMap;

    /// A move by QEMU as one of an idle guest was over 50 Mbit/s: bytes and seconds of its rounds, the last one at the stop.
    fn idle() -> MoveReport {
        let round = |bytes, seconds| Round {
            bytes_by_encoding: BTreeMap::from([("page".into(), bytes)]),
            seconds,
            ..Round::default()
        };
        let phase = |name: &str, start_s, end_s| Phase { name: name.into(), start_s, end_s };
        MoveReport {
            outcome: Outcome::Completed,
            total_s: 24.576,
            downtime_ms: Some(434.1),
            nonzero_share: Some(0.894),
            rounds: vec![round(120_074_473, 20.725), round(604_369, 0.111), round(837_513, 0.433)],
            phases: vec![phase("reserve", 0.0, 0.049), phase("disk", 0.049, 3.306), phase("memory", 3.306, 24.166)],
            bytes: WanBytes { memory: 129_119_385, disk: 17_787_890, ..WanBytes::default() },
            ..a_move()
        }
    }

    /// The log of a guest that writes so many of its first 8,192 pages in each of twelve seconds, in turn.
    fn log(pages_per_s: u64) -> Vec<u8> {
        let pages = Pages::of(Bytes::mib(128));
        let header =
            Header { observed: Observed::Contents, pages, interval: Duration::from_secs(1), start: Duration::ZERO };
        let (mut writer, mut bytes) = LogWriter::new(header).unwrap();
        for second in 0..12 {
            let mut words = vec![0_u64; pages.0.div_ceil(64) as usize];
            for nth in second * pages_per_s..(second + 1) * pages_per_s {
                words[(nth % 8192 / 64) as usize] |= 1 << (nth % 64);
            }
            bytes.extend(writer.frame(&words, &words));
        }
        bytes
    }

    fn by_qemu_entry(cell: Cell, figures: MoveReport, log: Option<Vec<u8>>) -> Entry {
        let mut entry = entry(&cell.name(), vec![]);
        entry.report.baselines = vec![BaselineReport { name: Baseline::Qemu, stop_rule: String::new(), figures }];
        entry.report.profiles.extend(log.map(|log| ProfileReport::new("vm", &log)));
        entry
    }

    fn cell(rate: u32) -> Cell {
        Cell { link: 50, memory: MEMORIES[0], work: Work::Dirty(rate), by_qemu: true }
    }

    #[test]
    fn repeats_differ_by_their_standard_deviation_within_each_cell() {
        let cell = |link| Cell { link, memory: 128, work: Work::Web, by_qemu: false };
        let values = [(cell(10), 100.0), (cell(10), 120.0), (cell(50), 300.0), (cell(50), 300.0), (cell(200), 7.0)];
        // 14.1 and 0; what was measured once says nothing.
        assert!((spread(values.into_iter()) - 200_f64.sqrt() / 2.0).abs() < 1e-9);
        assert!(spread(std::iter::empty()).abs() < 1e-9);
    }

    #[test]
    fn an_idle_move_says_what_the_link_carries_and_what_a_move_takes_besides() {
        let measured = Measured::of(&idle()).unwrap();
        assert!((measured.goodput.mbit() - 46.34).abs() < 0.05, "{measured:?}");
        // 145 ms of the pause are its last pages.
        let post = measured.overheads.post.as_secs_f64();
        assert!((post - 0.2895).abs() < 0.001, "{measured:?}");
        assert!((measured.disk.as_secs_f64() - 3.257).abs() < 1e-6 && measured.disk_bytes == 17_787_890);
        assert!((measured.carried - 1.0626).abs() < 0.001, "{measured:?}");
        // All of them together are the move.
        let rounds = idle().rounds.iter().take(2).map(|r| r.seconds).sum::<f64>();
        let all = measured.overheads.pre.as_secs_f64() + measured.disk.as_secs_f64() + rounds + 0.4341;
        assert!((all - 24.576).abs() < 1e-6, "{all}");
        for nothing in [
            MoveReport { outcome: Outcome::Cancelled, ..idle() },
            MoveReport { rounds: vec![], ..idle() },
            MoveReport { rounds: idle().rounds.split_off(2), ..idle() },
            MoveReport { downtime_ms: None, ..idle() },
        ] {
            assert_eq!(Measured::of(&nothing), None);
        }
    }

    #[test]
    fn qemus_moves_are_foretold_by_both_models_from_what_its_guest_was_seen_to_write() {
        let measured = Measured::of(&idle());
        let told = |pages_per_s| {
            let log = Log::read(log(pages_per_s)).unwrap();
            by_qemu(measured, Some(&log), &idle()).map(|(_, told)| told.unwrap())
        };
        // Nobody writes: the idle move itself, and QEMU stops when it sees that the rest takes no longer than it may.
        let looks_ms = measured.unwrap().looks_every().as_secs_f64() * 1e3;
        assert!((looks_ms - 2.0 * 64.0 * PAGE_RECORD * 8.0 / 46.34e3).abs() < 0.1, "two times 64 pages: {looks_ms}");
        for told in told(0) {
            assert!((told.total_s / 24.3 - 1.0).abs() < 0.02, "{told:?}");
            assert!((told.downtime_ms - 300.0 + looks_ms / 2.0 - 289.5).abs() < 5.0, "{told:?}");
            assert!((told.bytes as f64 / 146e6 - 1.0).abs() < 0.02, "{told:?}");
        }
        // Far faster than the link: six rounds, and all that it writes to while it stands.
        let set_s = 8192.0 * PAGE_RECORD * 8.0 / measured.unwrap().goodput.0 as f64;
        for told in told(8000) {
            let expected = 24.3 + set_s * f64::from(PATIENCE_ROUNDS);
            assert!((told.total_s / expected - 1.0).abs() < 0.05, "{expected} {told:?}");
            assert!((told.downtime_ms / 1e3 / (set_s + 0.29) - 1.0).abs() < 0.05, "{set_s} {told:?}");
            let [from, to] = told.total_between_s.unwrap();
            assert!(from < told.total_s && told.total_s < to);
        }
        assert_eq!(told(1000).map(|told| told.model.unwrap()), ["avg", "hist"]);
    }

    #[test]
    fn an_idle_move_is_measured_on_and_not_judged_and_without_it_or_a_log_nothing_is_foretold() {
        let busy = || by_qemu_entry(cell(1000), idle(), Some(log(1000)));
        let models = |entries: &[Entry]| -> Vec<(Model, bool)> {
            compared(entries).iter().map(|m| (m.model, m.told.is_some())).collect()
        };
        let all = [by_qemu_entry(cell(0), idle(), Some(log(0))), busy()];
        assert_eq!(models(&all), [(Model::MeasuredOn, false), (Model::Avg, true), (Model::Hist, true)]);
        let (errors, bounds) = sums(&compared(&all));
        let rows: Vec<_> = errors.rows.iter().map(|row| (row[0].as_str(), row[1].as_str())).collect();
        assert_eq!(rows, [("QEMU alone, AVG", "1"), ("QEMU alone, HIST", "1")]);
        // One move, though two models foretold it.
        assert_eq!(bounds[0], ("at least 60 moves".to_owned(), Some(false)));
        assert_eq!(bounds.len(), 1 + 4 * 4);
        for nothing in [vec![busy()], vec![all[0].clone(), by_qemu_entry(cell(1000), idle(), None)]] {
            let found = compared(&nothing);
            let last = found.last().unwrap();
            assert!(last.told.is_none() && last.row().contains(&"not foretold".to_owned()));
        }
        let row = compared(&all)[0].row();
        assert_eq!([&row[6], &row[9], &row[14]], ["measures the link", "24.6", "434"], "{row:?}");
        assert!(document(&all).text().contains("measures the link"));
        let drawn = drawings(&compared(&all));
        let names: Vec<_> = drawn.iter().map(|drawing| drawing.name.as_str()).collect();
        assert_eq!(names, ["time-50mbit", "downtime-50mbit"]);
        for name in ["QEMU, AVG", "QEMU, HIST", "QEMU, measured"] {
            assert!(drawn[0].svg().contains(name));
        }
        assert!(!drawn[0].svg().contains("Godwit"));
    }

    #[test]
    fn a_move_of_godwits_that_did_not_get_there_breaks_the_bounds_of_its_kind() {
        let told = Predicted {
            total_s: 24.576,
            downtime_ms: 434.1,
            total_between_s: Some([24.0, 25.0]),
            ..Predicted::default()
        };
        let moved = |outcome| MoveReport { outcome, predicted: Some(told.clone()), ..idle() };
        let judged = |last: Outcome| -> Vec<Option<bool>> {
            let moves = [Outcome::Completed, Outcome::Completed, last].map(moved);
            let entries = [entry(&Cell { by_qemu: false, ..cell(1000) }.name(), moves.into())];
            sums(&compared(&entries)).1[1..9].iter().map(|bound| bound.1).collect()
        };
        assert_eq!(judged(Outcome::Completed), [Some(true); 8]);
        assert_eq!(judged(Outcome::Cancelled), [Some(false); 8]);
    }

    #[test]
    fn a_guest_is_held_where_no_later_move_is_foretold_from_it_and_that_is_not_the_moves_time() {
        for cell in all() {
            let scenario = Scenario::parse(&cell.plan().scenario, &cell.name()).unwrap();
            let held: Vec<bool> = (scenario.step.iter())
                .filter_map(|step| match &step.action {
                    Action::Move(order) => Some(order.compare),
                    _ => None,
                })
                .collect();
            assert_eq!(held, if cell.by_qemu { vec![true] } else { vec![false, false, true] }, "{}", cell.name());
        }
        let held = MoveReport { total_s: 25.576, held_ms: 1000.0, ..idle() };
        let (one, other) = (Measured::of(&held).unwrap(), Measured::of(&idle()).unwrap());
        assert!((one.overheads.pre.as_secs_f64() - other.overheads.pre.as_secs_f64()).abs() < 1e-6, "{one:?}");
        let told = Predicted { total_s: 24.576, ..Predicted::default() };
        let (cell, model) = (cell(1000), Model::Deployments);
        let compared = Compared { cell, model, nth: 1, figures: &held, told: Some(told) };
        assert!(compared.errors().unwrap()[0] < 1e-6);
    }

    #[test]
    fn a_guest_is_watched_until_it_has_come_to_what_it_writes_to() {
        let seconds = RATES.map(|rate| cell(rate).watched_s());
        assert_eq!(seconds, [12, 60, 25, 12, 12]);
        for (rate, seconds) in RATES.into_iter().zip(seconds).filter(|(rate, _)| *rate > 0) {
            assert!(rate * seconds > WORKING_SET_MIB * 256, "{rate}");
        }
    }
}
