//! Sweeps: one scenario over several link rates, round-trip times and baselines, and the table that comes of it.
//!
//! A sweep file names the scenario and the values; a [`Cell`] is one combination. Every run of a cell becomes an entry of
//! the [ledger](crate::ledger), so a sweep that was interrupted goes on where it was. Cheap cells come first: a mistake
//! in the scenario shows after minutes, and an interrupted sweep has the most cells that its time could buy.

use crate::ledger::Entry;
use crate::report::Outcome;
use crate::scenario::{Baseline, Scenario, ScenarioError};
use crate::table::{Column, Counted, Grid, figure, in_mib, integrity_over};
use serde::Deserialize;
use std::cmp::Ordering;
use std::fmt::Write as _;
use std::ops::Range;
use std::path::{Path, PathBuf};
use toml::Spanned;

/// Most cells of one sweep. A cell takes minutes; more would be several sweeps.
pub const MAX_CELLS: usize = 512;

/// Most runs of a cell.
pub const MAX_REPEAT: u32 = 100;

/// A whole sweep, checked.
#[derive(Clone, Debug)]
pub struct SweepFile {
    /// The scenario's file. The sweep file names it relative to itself.
    pub scenario: PathBuf,
    /// Link rates in Mbit/s.
    pub rate_mbit: Vec<f64>,
    /// Round-trip times in ms.
    pub rtt_ms: Vec<f64>,
    /// Means of moving.
    pub baseline: Vec<Baseline>,
    /// Runs of each cell.
    pub repeat: u32,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawSweep {
    scenario: Spanned<String>,
    rate_mbit: Spanned<Vec<f64>>,
    rtt_ms: Spanned<Vec<f64>>,
    baseline: Spanned<Vec<Baseline>>,
    #[serde(default = "once")]
    repeat: Spanned<u32>,
}

fn once() -> Spanned<u32> {
    Spanned::new(0..0, 1)
}

impl SweepFile {
    /// Reads and checks a sweep file; the scenario that it names is not opened.
    ///
    /// # Errors
    /// [`ScenarioError`], with the line and the key.
    pub fn load(path: &Path) -> Result<Self, ScenarioError> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| ScenarioError::Read { path: path.display().to_string(), source })?;
        Self::parse(&text, path)
    }

    /// Checks a sweep's text; `path` is named in errors, and the scenario is found from its directory.
    ///
    /// # Errors
    /// [`ScenarioError`], with the line and the key.
    pub fn parse(text: &str, path: &Path) -> Result<Self, ScenarioError> {
        let shown = path.display().to_string();
        let raw: RawSweep = toml::from_str(text)
            .map_err(|e| ScenarioError::Syntax { path: shown.clone(), message: e.to_string().trim_end().to_owned() })?;
        let fail = |at: Range<usize>, key: &str, what: String| {
            let line = 1 + text[..at.start.min(text.len())].matches('\n').count();
            Err(ScenarioError::Meaning { path: shown.clone(), line, key: key.into(), what })
        };
        if raw.scenario.get_ref().is_empty() {
            return fail(raw.scenario.span(), "scenario", "is empty; it names a scenario file".into());
        }
        for (list, key, least, most) in
            [(&raw.rate_mbit, "rate_mbit", 0.1, 100_000.0), (&raw.rtt_ms, "rtt_ms", 0.0, 10_000.0)]
        {
            if let Some(bad) = list.get_ref().iter().find(|v| !(least..=most).contains(*v)) {
                return fail(list.span(), key, format!("has {bad}; each takes {least} to {most}"));
            }
            if let Some(twice) = repeated(list.get_ref()) {
                return fail(list.span(), key, format!("has {twice} twice; its cell would be one"));
            }
        }
        if let Some(twice) = repeated(raw.baseline.get_ref()) {
            return fail(raw.baseline.span(), "baseline", format!("has `{twice}` twice; its cell would be one"));
        }
        let empty = |key| format!("is empty; there would be no cell without a {key}");
        if raw.rate_mbit.get_ref().is_empty() {
            return fail(raw.rate_mbit.span(), "rate_mbit", empty("rate"));
        }
        if raw.rtt_ms.get_ref().is_empty() {
            return fail(raw.rtt_ms.span(), "rtt_ms", empty("round-trip time"));
        }
        if raw.baseline.get_ref().is_empty() {
            return fail(raw.baseline.span(), "baseline", empty("baseline"));
        }
        if !(1..=MAX_REPEAT).contains(raw.repeat.get_ref()) {
            let what = format!("is {}; it takes 1 to {MAX_REPEAT}", raw.repeat.get_ref());
            return fail(raw.repeat.span(), "repeat", what);
        }
        let cells = raw.rate_mbit.get_ref().len() * raw.rtt_ms.get_ref().len() * raw.baseline.get_ref().len();
        if cells > MAX_CELLS {
            return fail(raw.rate_mbit.span(), "rate_mbit", format!("makes {cells} cells; the most is {MAX_CELLS}"));
        }
        let directory = path.parent().unwrap_or(Path::new(""));
        Ok(Self {
            scenario: directory.join(raw.scenario.into_inner()),
            rate_mbit: raw.rate_mbit.into_inner(),
            rtt_ms: raw.rtt_ms.into_inner(),
            baseline: raw.baseline.into_inner(),
            repeat: raw.repeat.into_inner(),
        })
    }

    /// All cells, cheap ones first: the fastest link, then the shortest round trip; baselines in the file's order.
    #[must_use]
    pub fn cells(&self) -> Vec<Cell> {
        let mut cells: Vec<Cell> = vec![];
        for &rate_mbit in &self.rate_mbit {
            for &rtt_ms in &self.rtt_ms {
                cells.extend(self.baseline.iter().map(|&baseline| Cell { rate_mbit, rtt_ms, baseline }));
            }
        }
        // The sort is stable: what costs the same keeps the file's order.
        cells.sort_by(|a, b| b.rate_mbit.total_cmp(&a.rate_mbit).then(a.rtt_ms.total_cmp(&b.rtt_ms)));
        cells
    }

    /// Every run to be made: all cells once, then all of them again, so that an early end leaves a whole table.
    pub fn runs(&self) -> impl Iterator<Item = (u32, Cell)> {
        let cells = self.cells();
        (0..self.repeat).flat_map(move |repeat| cells.clone().into_iter().map(move |cell| (repeat, cell)))
    }
}

fn repeated<T: PartialEq>(values: &[T]) -> Option<&T> {
    values.iter().enumerate().find(|(i, v)| values[..*i].contains(v)).map(|(_, v)| v)
}

/// One combination of a sweep.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cell {
    /// Link rate in Mbit/s, each direction.
    pub rate_mbit: f64,
    /// Round-trip time in ms.
    pub rtt_ms: f64,
    /// Means of moving.
    pub baseline: Baseline,
}

impl Cell {
    /// Names the cell in the ledger: `100mbit-27ms-qemu`.
    #[must_use]
    pub fn name(&self) -> String {
        format!("{}mbit-{}ms-{}", self.rate_mbit, self.rtt_ms, self.baseline)
    }

    /// The cell of a name; nothing where the name is not one.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        let (rate, rest) = name.split_once("mbit-")?;
        let (rtt, baseline) = rest.split_once("ms-")?;
        let baseline = <Baseline as Deserialize>::deserialize(serde::de::value::StrDeserializer::<
            serde::de::value::Error,
        >::new(baseline))
        .ok()?;
        let cell = Self { rate_mbit: rate.parse().ok()?, rtt_ms: rtt.parse().ok()?, baseline };
        (cell.name() == name).then_some(cell)
    }

    /// Makes a scenario this cell: its rate and round-trip time for every path without an exception of its own, its
    /// baseline and no other, no move by Godwit, and a single repeat (the sweep counts them).
    pub fn apply(&self, scenario: &mut Scenario) {
        let in_place = |old: &Spanned<f64>, new: f64| Spanned::new(old.span(), new);
        scenario.wan.rate_mbit = in_place(&scenario.wan.rate_mbit, self.rate_mbit);
        scenario.wan.rtt_ms = in_place(&scenario.wan.rtt_ms, self.rtt_ms);
        scenario.baseline = vec![self.baseline];
        scenario.godwit = false;
        scenario.repeat = 1;
    }

    /// The order of the table: slow links first, as papers have it.
    fn table_order(&self, other: &Self) -> Ordering {
        let rates = self.rate_mbit.total_cmp(&other.rate_mbit);
        rates.then(self.rtt_ms.total_cmp(&other.rtt_ms)).then((self.baseline as u8).cmp(&(other.baseline as u8)))
    }
}

/// The table of a sweep, as Markdown whose source is aligned: a row for each cell with medians over its completed runs.
///
/// A cell in which no run completed shows no figures, and says in its last column how its runs ended. Entries whose
/// cell has no name of the form of [`Cell::name`] are left out, and counted below the table.
#[must_use]
pub fn table(entries: &[Entry]) -> String {
    let mut cells: Vec<(Cell, Vec<&Entry>)> = vec![];
    let mut strangers = 0;
    for entry in entries {
        let Some(cell) = Cell::from_name(&entry.key.cell) else {
            strangers += 1;
            continue;
        };
        match cells.iter_mut().find(|(c, _)| *c == cell) {
            Some((_, runs)) => runs.push(entry),
            None => cells.push((cell, vec![entry])),
        }
    }
    cells.sort_by(|(a, _), (b, _)| a.table_order(b));
    let mut columns =
        vec![Column::right("Mbit/s"), Column::right("RTT ms"), Column::left("means"), Column::right("runs")];
    for title in ["time s", "downtime ms", "outage ms", "memory MiB", "disk MiB", "total MiB"] {
        columns.push(Column::right(title));
    }
    columns.push(Column::left("result"));
    let mut grid = Grid::new(columns);
    for (cell, runs) in &cells {
        grid.row(row(cell, runs));
    }
    let mut out = grid.markdown();
    out.push_str("\nMedians over the completed runs; `runs` is completed of made, where they differ.");
    let mut commits: Vec<&str> = entries.iter().map(|e| e.key.commit.as_str()).collect();
    commits.sort_unstable();
    commits.dedup();
    // Writing to a String cannot fail.
    let _ = match commits.as_slice() {
        [] => writeln!(out, " No runs yet."),
        [one] => writeln!(out, " Commit {one}."),
        many => writeln!(out, " Several commits: {}.", many.join(", ")),
    };
    if entries.iter().flat_map(|e| &e.report.baselines).any(|b| b.figures.bytes.split_by_hypervisor) {
        out.push_str("\\* Memory and disk shared a connection; the hypervisor's own count tells them apart.\n");
    }
    if strangers > 0 {
        let _ = writeln!(out, "{strangers} entries of the ledger are no cells of a sweep and are not shown.");
    }
    out
}

fn row(cell: &Cell, runs: &[&Entry]) -> Vec<String> {
    let figures = || runs.iter().flat_map(|e| &e.report.baselines).map(|b| &b.figures);
    let counted = Counted::of(figures());
    let (made, completed) = (figures().count(), counted.ended(Outcome::Completed));
    let median = |of: &dyn Fn(&crate::report::MoveReport) -> Option<f64>, decimals| {
        figure(counted.median_of(of).filter(|_| completed > 0), decimals)
    };
    let star = if completed > 0 && figures().any(|m| m.bytes.split_by_hypervisor) { "\\*" } else { "" };
    let result = match (made, completed) {
        (0, _) => "no move was made".to_owned(),
        (_, 0) => format!("**{}**", how_it_ended(&counted, runs)),
        (made, completed) => {
            let checked = figures().filter(|m| m.outcome == Outcome::Completed).map(|m| &m.integrity);
            let checked = integrity_over(checked);
            let checked = if checked.starts_with("FAILED") { format!("**{checked}**") } else { checked };
            if made == completed { checked } else { format!("{checked}; **{}**", how_it_ended(&counted, runs)) }
        }
    };
    vec![
        cell.rate_mbit.to_string(),
        cell.rtt_ms.to_string(),
        cell.baseline.to_string(),
        if made == completed { made.to_string() } else { format!("{completed}/{made}") },
        median(&|m| Some(m.total_s), 1),
        median(&|m| m.downtime_ms, 0),
        median(&|m| m.outage_ms, 0),
        median(&|m| Some(in_mib(m.bytes.memory)), 1) + star,
        median(&|m| Some(in_mib(m.bytes.disk)), 1) + star,
        median(&|m| Some(in_mib(m.bytes.total())), 1),
        result,
    ]
}

/// Of the runs that did not complete: `1 failed, 2 cancelled after 600 s`.
fn how_it_ended(counted: &Counted<'_>, runs: &[&Entry]) -> String {
    let mut words = vec![];
    match counted.ended(Outcome::Failed) {
        0 => {}
        n => words.push(format!("{n} failed")),
    }
    match counted.ended(Outcome::Cancelled) {
        0 => {}
        n => {
            let cancelled = runs.iter().flat_map(|e| &e.report.baselines).map(|b| &b.figures);
            let after = cancelled.filter(|m| m.outcome == Outcome::Cancelled).map(|m| m.total_s);
            let after = figure(crate::table::median(after), 0);
            words.push(format!("{n} cancelled after {after} s"));
        }
    }
    words.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::Key;
    use crate::report::MoveReport;
    use crate::table::tests::{a_baseline, a_move, a_report};
    use proptest::prelude::*;

    const GOOD: &str = "\
scenario = \"../scenarios/burst.toml\"
rate_mbit = [30, 100, 200.5]
rtt_ms = [100, 10]
baseline = [\"qemu\", \"qemu-block\"]
repeat = 2
";

    fn parse(text: &str) -> Result<SweepFile, ScenarioError> {
        SweepFile::parse(text, Path::new("bench/table.toml"))
    }

    fn refused(text: &str) -> String {
        parse(text).unwrap_err().to_string()
    }

    #[test]
    fn cells_come_fast_links_first_and_by_their_names() {
        let sweep = parse(GOOD).unwrap();
        assert_eq!(sweep.scenario, Path::new("bench/../scenarios/burst.toml"));
        let names: Vec<String> = sweep.cells().iter().map(Cell::name).collect();
        assert_eq!(names.len(), 12);
        assert_eq!(
            names[..4],
            ["200.5mbit-10ms-qemu", "200.5mbit-10ms-qemu-block", "200.5mbit-100ms-qemu", "200.5mbit-100ms-qemu-block"]
        );
        assert_eq!(names[11], "30mbit-100ms-qemu-block");
        let runs: Vec<(u32, Cell)> = sweep.runs().collect();
        assert_eq!((runs.len(), runs[11].0, runs[12].0), (24, 0, 1));
        assert_eq!(runs[12].1, sweep.cells()[0]);
        for cell in sweep.cells() {
            assert_eq!(Cell::from_name(&cell.name()), Some(cell));
        }
    }

    #[test]
    fn a_mistake_is_named_with_its_line_and_key() {
        let at = |error: String, line: &str, key: &str| assert!(error.contains(line) && error.contains(key), "{error}");
        at(refused(&GOOD.replace("rtt_ms", "rtt")), "line 3", "rtt");
        at(refused(&GOOD.replace("\"qemu-block\"", "\"xen\"")), "line 4", "xen");
        at(refused(&GOOD.replace("repeat = 2", "repeat = \"2\"")), "line 5", "repeat");
        at(refused(&GOOD.replace("repeat = 2", "repeat = 0")), "table.toml:5:", "`repeat`");
        at(refused(&GOOD.replace("30, 100", "30, 0")), "table.toml:2:", "`rate_mbit`");
        at(refused(&GOOD.replace("30, 100", "30, nan")), "table.toml:2:", "`rate_mbit`");
        at(refused(&GOOD.replace("100, 10]", "10, 10]")), "table.toml:3:", "`rtt_ms`");
        at(refused(&GOOD.replace("[100, 10]", "[]")), "table.toml:3:", "`rtt_ms`");
        at(refused(&GOOD.replace("qemu-block", "qemu")), "table.toml:4:", "`baseline`");
        at(refused(&GOOD.replace("../scenarios/burst.toml", "")), "table.toml:1:", "`scenario`");
    }

    #[test]
    fn a_cell_leaves_one_baseline_and_its_own_link() {
        let text = "name = \"x\"\nbaseline = [\"qemu\", \"qemu-xen\"]\nrepeat = 3\n[wan]\nrate_mbit = 1\nrtt_ms = 1\n\
                    [[site]]\nname = \"a\"\n[[site]]\nname = \"b\"\n";
        let mut scenario = Scenario::parse(text, "x.toml").unwrap();
        let cell = Cell { rate_mbit: 200.0, rtt_ms: 10.0, baseline: Baseline::QemuBlock };
        cell.apply(&mut scenario);
        assert_eq!(scenario.baseline, [Baseline::QemuBlock]);
        assert_eq!((scenario.repeat, scenario.godwit), (1, false));
        let path = scenario.path_spec("a", "b");
        assert_eq!((path.rate.mbit(), path.rtt.as_millis()), (200.0, 10));
    }

    fn entry(cell: &str, repeat: u32, figures: MoveReport) -> Entry {
        let baseline = Cell::from_name(cell).map_or(Baseline::Qemu, |c| c.baseline);
        let key = Key { commit: "abc123".into(), scenario: "burst".into(), cell: cell.into(), repeat };
        Entry { key, at_unix_s: 0, report: a_report(vec![], vec![a_baseline(baseline, figures)]) }
    }

    #[test]
    fn the_table_has_medians_of_completed_runs_and_marks_the_others() {
        let run = |s| MoveReport { total_s: s, ..a_move() };
        let cancelled = MoveReport { outcome: Outcome::Cancelled, ..run(600.0) };
        let failed = MoveReport { outcome: Outcome::Failed, ..run(3.0) };
        let mut torn = run(50.0);
        torn.integrity.ram_equal = Some(false);
        let entries = [
            entry("200mbit-10ms-qemu", 0, torn),
            entry("30mbit-100ms-qemu-block", 0, cancelled.clone()),
            entry("30mbit-10ms-qemu", 0, run(400.0)),
            entry("30mbit-10ms-qemu", 1, run(200.0)),
            entry("30mbit-10ms-qemu", 2, failed),
            entry("by hand", 0, run(1.0)),
        ];
        let text = table(&entries);
        let rows: Vec<&str> = text.lines().collect();
        assert!(rows[2].contains("| qemu       |  2/3 |  300.0 |"), "{text}");
        assert!(rows[2].contains("| intact; **1 failed** "), "{text}");
        assert!(rows[3].contains("|  0/1 |      - |"), "{text}");
        assert!(rows[3].contains("**1 cancelled after 600 s**"), "{text}");
        assert!(rows[4].contains("| **FAILED: ram** "), "{text}");
        assert!(rows[..5].iter().all(|r| r.len() == rows[0].len()), "{text}");
        assert!(text.contains("Commit abc123."), "{text}");
        assert!(text.contains("1 entries of the ledger are no cells"), "{text}");
        assert!(table(&[]).contains("No runs yet."));
    }

    proptest! {
        #[test]
        fn no_text_makes_the_parser_panic(text in ".{0,200}") {
            let _ = parse(&text);
            let _ = Cell::from_name(&text);
        }
    }
}
