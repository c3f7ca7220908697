//! Reports as text: the table that a run prints, and the aligned grid and the number formats that it shares with
//! sweeps and plots.
//!
//! The output is plain text without colour or control characters, so that it reads the same on a terminal, in a
//! log and in a pasted issue. What was not measured is a dash, never a zero. Repeats of the same move share a row of
//! medians, taken over the runs that completed: the figures of a cancelled run say how long somebody waited, not how
//! long a move takes.

use crate::report::{
    Application, CaptureReport, ComponentReport, ExtenderReport, Integrity, MoveReport, Outcome, Report, SpeedWindow,
};
use std::fmt::Write as _;

/// Stands where nothing was measured.
pub(crate) const NOTHING: &str = "-";

/// One move or baseline of a report, with the name of what made it.
#[derive(Clone, Debug)]
pub(crate) struct Subject<'a> {
    /// `godwit`, or the baseline's name.
    pub who: String,
    /// When a baseline stops the guest.
    pub stop_rule: Option<&'a str>,
    /// What was measured.
    pub figures: &'a MoveReport,
}

impl Subject<'_> {
    /// What two entries share when one repeats the other.
    fn identity(&self) -> (&str, &str, &str, &str, &str) {
        let MoveReport { vm, from, to, strategy, .. } = self.figures;
        (&self.who, vm, from, to, strategy)
    }

    fn completed(&self) -> bool {
        self.figures.outcome == Outcome::Completed
    }
}

/// Everything that moved in a report: Godwit's moves first, then the baselines, in the report's order.
pub(crate) fn subjects(report: &Report) -> Vec<Subject<'_>> {
    let moves = report.moves.iter().map(|m| Subject { who: "godwit".into(), stop_rule: None, figures: m });
    let baselines = report.baselines.iter().map(|b| Subject {
        who: b.name.to_string(),
        stop_rule: Some(&b.stop_rule),
        figures: &b.figures,
    });
    moves.chain(baselines).collect()
}

/// The table that a run prints: a row for each move and baseline (medians where a move was repeated), and below it what
/// the reader has to know beside the figures.
#[must_use]
pub fn comparison(report: &Report) -> String {
    let subjects = subjects(report);
    let groups = grouped(&subjects);
    if groups.is_empty() {
        return below(report, &subjects, "no move was made\n".to_owned());
    }
    let repeated = groups.iter().any(|g| g.len() > 1);
    let mut columns =
        vec![Column::left("who"), Column::left("vm"), Column::left("from -> to"), Column::left("outcome")];
    if repeated {
        columns.push(Column::right("n"));
    }
    for title in ["time s", "downtime ms", "outage ms", "memory MiB", "disk MiB", "other MiB", "rounds"] {
        columns.push(Column::right(title));
    }
    columns.push(Column::left("integrity"));
    let mut grid = Grid::new(columns);
    for group in &groups {
        grid.row(group_row(group, repeated));
    }
    let mut out = grid.terminal();
    for line in groups.iter().filter_map(|group| ratios(group, &groups)) {
        out.push_str(&line);
        out.push('\n');
    }
    if groups.iter().any(|g| g.iter().any(Subject::completed) && g.len() > 1) {
        out.push_str("Figures are medians over the completed runs; n counts all runs.\n");
    }
    below(report, &subjects, out)
}

/// Entries that repeat each other, together; groups stand in the order of their first entries.
fn grouped<'a>(subjects: &[Subject<'a>]) -> Vec<Vec<Subject<'a>>> {
    let mut groups: Vec<Vec<Subject<'a>>> = vec![];
    for subject in subjects {
        match groups.iter_mut().find(|g| g[0].identity() == subject.identity()) {
            Some(group) => group.push(subject.clone()),
            None => groups.push(vec![subject.clone()]),
        }
    }
    groups
}

fn group_row(group: &[Subject<'_>], repeated: bool) -> Vec<String> {
    let first = &group[0];
    let counted = Counted::of(group.iter().map(|s| s.figures));
    let median_of = |figure: &dyn Fn(&MoveReport) -> Option<f64>| counted.median_of(figure);
    let mib = |bytes: &dyn Fn(&MoveReport) -> u64| figure(median_of(&|m| Some(in_mib(bytes(m)))), 1);
    let star = if group.iter().any(|s| s.figures.bytes.split_by_hypervisor) { "*" } else { "" };
    let mut row = vec![
        first.who.clone(),
        first.figures.vm.clone(),
        format!("{} -> {}", first.figures.from, first.figures.to),
        counted.outcomes(),
    ];
    if repeated {
        row.push(group.len().to_string());
    }
    row.extend([
        figure(median_of(&|m| Some(m.total_s)), 1),
        figure(median_of(&|m| m.downtime_ms), 0),
        figure(median_of(&|m| m.outage_ms), 0),
        mib(&|m| m.bytes.memory) + star,
        mib(&|m| m.bytes.disk) + star,
        mib(&|m| m.bytes.other),
        figure(median_of(&|m| Some(m.rounds.len() as f64)), 0),
        integrity_over(group.iter().map(|s| &s.figures.integrity)),
    ]);
    row
}

/// What the ratios of Godwit's moves are taken to: QEMU's plain pre-copy.
const YARDSTICK: &str = "qemu";

/// Godwit's figures over those of the same move by [`YARDSTICK`]; nothing for others, or where one of the two did not complete.
fn ratios(group: &[Subject<'_>], all: &[Vec<Subject<'_>>]) -> Option<String> {
    let (who, vm, from, to, _) = group[0].identity();
    if who != "godwit" {
        return None;
    }
    let same = |g: &&Vec<Subject<'_>>| {
        let (other, v, f, t, _) = g[0].identity();
        (other, v, f, t) == (YARDSTICK, vm, from, to)
    };
    let (ours, theirs) = (group, all.iter().find(same)?);
    if ![ours, theirs].iter().all(|g| g.iter().any(Subject::completed)) {
        return None;
    }
    let (ours, theirs) = (Counted::of(ours.iter().map(|s| s.figures)), Counted::of(theirs.iter().map(|s| s.figures)));
    let one = |name: &str, value: &dyn Fn(&MoveReport) -> Option<f64>| {
        let ratio = ours.median_of(value).zip(theirs.median_of(value)).map(|(a, b)| a / b);
        format!("{name} {}", figure(ratio, 2))
    };
    let figures = [
        one("time", &|m| Some(m.total_s)),
        one("downtime", &|m| m.downtime_ms),
        one("outage", &|m| m.outage_ms),
        one("memory", &|m| Some(m.bytes.memory as f64)),
        one("disk", &|m| Some(m.bytes.disk as f64)),
        one("other", &|m| Some(m.bytes.other as f64)),
    ];
    Some(printable(&format!("godwit / {YARDSTICK}: {vm} {from} -> {to}: {}", figures.join(", "))))
}

/// The lines under the table.
fn below(report: &Report, subjects: &[Subject<'_>], mut out: String) -> String {
    let mut said: Vec<String> = vec![];
    let mut say = |line: String| {
        let line = printable(&line);
        if !said.contains(&line) {
            said.push(line);
        }
    };
    for s in subjects {
        if let Some(rule) = s.stop_rule {
            say(format!("stop rule: {}: {rule}", s.who));
        }
    }
    if subjects.iter().any(|s| s.figures.bytes.split_by_hypervisor) {
        say("* memory and disk shared a connection: the wire's bytes are split by the hypervisor's own count".into());
    }
    for s in subjects.iter().filter(|s| s.figures.held_ms > 0.0) {
        let held = figure(Some(s.figures.held_ms), 0);
        let what = "to compare its RAM: within the outage, not in the downtime";
        say(format!("held: {} of {}: the lab kept the stopped guest for {held} ms {what}", s.who, s.figures.vm));
    }
    for s in subjects {
        let MoveReport { vm, outcome, why, integrity, .. } = s.figures;
        for incident in &s.figures.incidents {
            say(format!("on purpose: {} of {vm}: {incident}", s.who));
        }
        match why {
            Some(why) => say(format!("{}: {} of {vm}: {why}", outcome_word(*outcome), s.who)),
            None if !s.completed() => say(format!("{}: {} of {vm}: no reason given", outcome_word(*outcome), s.who)),
            None => {}
        }
        for note in &integrity.notes {
            say(format!("integrity: {} of {vm}: {note}", s.who));
        }
    }
    for moved in &report.components {
        say(component(moved));
    }
    for seen in &report.applications {
        say(application(seen));
    }
    for window in &report.speeds {
        say(speed(window));
    }
    for extender in &report.extenders {
        say(extended(extender));
    }
    for recorded in &report.captures {
        say(captured(recorded));
    }
    for warning in &report.warnings {
        say(format!("warning: {warning}"));
    }
    if let Some(broken) = &report.broken {
        say(format!("BROKEN OFF: {broken}"));
    }
    for line in said {
        out.push_str(&line);
        out.push('\n');
    }
    out
}

/// What an extender carried, in a line.
fn extended(seen: &ExtenderReport) -> String {
    let ExtenderReport { between: [a, b], tunnel_packets, tunnel_bytes, clear_packets } = seen;
    let clear = if *clear_packets == 0 {
        "none of wires in clear".to_owned()
    } else {
        format!("{clear_packets} OF WIRES IN CLEAR")
    };
    format!("extender: {a} - {b}: {tunnel_packets} packets of tunnels, {tunnel_bytes} bytes; {clear}")
}

/// A recording, in a line.
fn captured(recorded: &CaptureReport) -> String {
    let CaptureReport { name, of, files, .. } = recorded;
    let frames: u64 = files.iter().map(|file| file.frames).sum();
    let folder = files.first().and_then(|first| first.file.rsplit_once('/')).map_or("", |(folder, _)| folder);
    format!("capture: {name}, of {of}: {frames} frames in {} files of {folder}", files.len())
}

/// A component's move, in a line.
fn component(moved: &ComponentReport) -> String {
    let ComponentReport { component, from, to, outcome, why, total_s, isolated_ms, stations, flows, .. } = moved;
    let way = format!("component: {component} from {from} to {to}: {}", outcome_word(*outcome));
    let why = why.as_ref().map_or_else(String::new, |why| format!(": {why}"));
    let isolated = isolated_ms.map_or_else(String::new, |ms| format!(", isolated for {ms:.0} ms"));
    format!("{way}{why} after {total_s:.1} s{isolated}; {stations} addresses and {flows} connections went along")
}

/// A window of a measurement of wires, in a line.
fn speed(window: &SpeedWindow) -> String {
    let SpeedWindow { way, links, chain, round, mbit, frames_per_s, cpu_us_per_frame, us } = window;
    let cpu = figure(*cpu_us_per_frame, 2);
    format!(
        "round {}: {way}, {links} links, chain of {chain}: {mbit:.0} Mbit/s of TCP, {frames_per_s:.0} frames/s of UDP at {cpu} us of CPU, \
         {us:.1} us there and back",
        round + 1
    )
}

/// What clients saw of an application, in a line.
fn application(seen: &Application) -> String {
    let Application { vm, from, sessions, tiers, good, late, failed, wrong, longest_s, first_error, .. } = seen;
    let why = first_error.as_ref().map_or_else(String::new, |why| format!("; first: {why}"));
    format!(
        "application: {sessions} sessions from {from} to {vm}{}, {tiers} tiers: {good} requests in time, {late} late, {failed} failed, \
         {wrong} wrong; the longest took {longest_s:.2} s{why}",
        seen.pass()
    )
}

/// Runs of one thing: which count, and how they ended.
pub(crate) struct Counted<'a> {
    all: Vec<&'a MoveReport>,
}

impl<'a> Counted<'a> {
    /// Counts `runs`.
    pub fn of(runs: impl IntoIterator<Item = &'a MoveReport>) -> Self {
        Self { all: runs.into_iter().collect() }
    }

    /// How many ended so.
    pub fn ended(&self, outcome: Outcome) -> usize {
        self.all.iter().filter(|m| m.outcome == outcome).count()
    }

    /// The median of a figure over the completed runs; over all runs where none completed (what they had cost when they
    /// ended is then all there is to say, and the outcome stands beside it).
    pub fn median_of(&self, figure: &dyn Fn(&MoveReport) -> Option<f64>) -> Option<f64> {
        let any = self.ended(Outcome::Completed) > 0;
        let counting = self.all.iter().filter(|m| !any || m.outcome == Outcome::Completed);
        median(counting.filter_map(|m| figure(m)))
    }

    /// `completed`, or how many ended how: `2 completed, 1 failed`.
    pub fn outcomes(&self) -> String {
        let kinds = [Outcome::Completed, Outcome::Cancelled, Outcome::Failed].map(|o| (o, self.ended(o)));
        let words: Vec<String> = match kinds.iter().filter(|(_, n)| *n > 0).count() {
            1 => kinds.iter().filter(|(_, n)| *n > 0).map(|(o, _)| outcome_word(*o).to_owned()).collect(),
            _ => kinds.iter().filter(|(_, n)| *n > 0).map(|(o, n)| format!("{n} {}", outcome_word(*o))).collect(),
        };
        words.join(", ")
    }
}

/// The middle value, or the mean of the two in the middle; nothing of nothing. Values that are no numbers are left out.
#[must_use]
pub fn median(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<f64> = values.into_iter().filter(|v| v.is_finite()).collect();
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => None,
        n if n % 2 == 1 => Some(values[middle]),
        _ => Some(f64::midpoint(values[middle - 1], values[middle])),
    }
}

/// The outcome as a report spells it.
pub(crate) fn outcome_word(outcome: Outcome) -> &'static str {
    match outcome {
        Outcome::Completed => "completed",
        Outcome::Cancelled => "cancelled",
        Outcome::Failed => "failed",
    }
}

/// Of [`checks`], those that every move is to have.
const COUNTED: usize = 5;

/// The truth checks by name, in the report's order.
pub(crate) fn checks(integrity: &Integrity) -> [(&'static str, Option<bool>); 7] {
    [
        ("memory", integrity.memory_ok),
        ("disk", integrity.disk_ok),
        ("tcp", integrity.tcp_ok),
        ("ram", integrity.ram_equal),
        ("wan", integrity.wan_carried_disk),
        ("place", integrity.one_place),
        ("work", integrity.work_ok),
    ]
}

/// `intact`, or what failed, and what nobody checked: `FAILED: disk, tcp; unchecked: ram`.
#[must_use]
pub fn integrity(integrity: &Integrity) -> String {
    integrity_over([integrity])
}

/// As [`integrity`], over several runs: a check that failed once has failed.
pub(crate) fn integrity_over<'a>(runs: impl IntoIterator<Item = &'a Integrity>) -> String {
    let runs: Vec<_> = runs.into_iter().map(checks).collect();
    let mut failed = vec![];
    let mut unchecked = vec![];
    for (i, (name, _)) in checks(&Integrity::default()).into_iter().enumerate() {
        let times = runs.iter().filter(|run| run[i].1 == Some(false)).count();
        match times {
            // Where a VM runs is looked at only where a scenario asks for it, and not every guest has a workload.
            0 if !matches!(name, "place" | "work") && runs.iter().any(|run| run[i].1.is_none()) => unchecked.push(name),
            0 => {}
            1 if runs.len() == 1 => failed.push(name.to_owned()),
            _ => failed.push(format!("{name} ({times} of {})", runs.len())),
        }
    }
    let verdict = match (failed.is_empty(), unchecked.len()) {
        (false, _) => format!("FAILED: {}", failed.join(", ")),
        (true, n) if n == COUNTED => return "nothing checked".into(),
        (true, _) => "intact".into(),
    };
    if unchecked.is_empty() { verdict } else { format!("{verdict}; unchecked: {}", unchecked.join(", ")) }
}

/// Bytes in MiB.
pub(crate) fn in_mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// A figure with so many decimals, or a dash.
pub(crate) fn figure(value: Option<f64>, decimals: usize) -> String {
    match value {
        Some(v) if v.is_finite() => format!("{v:.decimals$}"),
        _ => NOTHING.into(),
    }
}

/// `text` without what would move a terminal's cursor or break a row.
fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// Which side a column's cells lean to.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Lean {
    Left,
    Right,
}

/// A column's title and how its cells stand.
pub(crate) struct Column {
    title: String,
    lean: Lean,
}

impl Column {
    /// Words.
    pub fn left(title: impl Into<String>) -> Self {
        Self { title: title.into(), lean: Lean::Left }
    }

    /// Figures.
    pub fn right(title: impl Into<String>) -> Self {
        Self { title: title.into(), lean: Lean::Right }
    }
}

/// Rows under titled columns, aligned. Widths count characters, which is right for the names and figures of a report.
pub(crate) struct Grid {
    columns: Vec<Column>,
    rows: Vec<Vec<String>>,
}

impl Grid {
    /// An empty grid.
    pub fn new(columns: Vec<Column>) -> Self {
        Self { columns, rows: vec![] }
    }

    /// Adds a row: one cell for each column.
    pub fn row(&mut self, cells: Vec<String>) {
        assert_eq!(cells.len(), self.columns.len(), "a row has a cell for each column");
        self.rows.push(cells.iter().map(|c| printable(c)).collect());
    }

    /// For a terminal: two spaces between columns, a rule under the titles.
    pub fn terminal(&self) -> String {
        let widths = self.widths(&self.rows);
        let rule: Vec<String> = widths.iter().map(|w| "-".repeat(*w)).collect();
        let mut out = String::new();
        for cells in [self.titles(), rule].iter().chain(&self.rows) {
            let padded: Vec<String> = self.pad(cells, &widths);
            out.push_str(padded.join("  ").trim_end());
            out.push('\n');
        }
        out
    }

    /// As a Markdown table whose source is aligned too.
    pub fn markdown(&self) -> String {
        let rows: Vec<Vec<String>> =
            self.rows.iter().map(|r| r.iter().map(|c| c.replace('|', "\\|")).collect()).collect();
        let widths: Vec<usize> = self.widths(&rows).into_iter().map(|w| w.max(3)).collect();
        let rule: Vec<String> = (self.columns.iter().zip(&widths))
            .map(|(column, width)| match column.lean {
                Lean::Left => "-".repeat(*width),
                Lean::Right => format!("{}:", "-".repeat(width - 1)),
            })
            .collect();
        let mut out = String::new();
        for cells in [self.titles(), rule].iter().chain(&rows) {
            // Writing to a String cannot fail.
            let _ = writeln!(out, "| {} |", self.pad(cells, &widths).join(" | "));
        }
        out
    }

    fn titles(&self) -> Vec<String> {
        self.columns.iter().map(|c| c.title.clone()).collect()
    }

    fn widths(&self, rows: &[Vec<String>]) -> Vec<usize> {
        let width = |i: usize, title: &str| {
            rows.iter().map(|r| r[i].chars().count()).chain([title.chars().count()]).max().unwrap_or(0)
        };
        self.columns.iter().enumerate().map(|(i, c)| width(i, &c.title)).collect()
    }

    fn pad(&self, cells: &[String], widths: &[usize]) -> Vec<String> {
        (self.columns.iter().zip(cells).zip(widths))
            .map(|((column, cell), width)| match column.lean {
                Lean::Left => format!("{cell:<width$}"),
                Lean::Right => format!("{cell:>width$}"),
            })
            .collect()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::report::{BaselineReport, Host, Series, WanBytes, WanFigures};
    use crate::scenario::Baseline;

    /// A completed move on which every check passed.
    pub(crate) fn a_move() -> MoveReport {
        MoveReport {
            vm: "web".into(),
            from: "illinois".into(),
            to: "texas".into(),
            strategy: "mirror".into(),
            outcome: Outcome::Completed,
            why: None,
            timed_out: false,
            total_s: 130.25,
            ended_s: Some(130.5),
            downtime_ms: Some(412.0),
            held_ms: 0.0,
            outage_ms: Some(655.0),
            bytes: WanBytes { memory: 500 << 20, disk: 1100 << 20, other: 3 << 20, split_by_hypervisor: false },
            counted: None,
            precached_bytes: 0,
            raw_bytes: 5 << 30,
            zero_pages: 19_000,
            kept: crate::report::Kept::default(),
            nonzero_share: Some(0.86),
            rounds: vec![],
            phases: vec![],
            predicted: None,
            integrity: Integrity {
                memory_ok: Some(true),
                disk_ok: Some(true),
                tcp_ok: Some(true),
                ram_equal: Some(true),
                wan_carried_disk: Some(true),
                one_place: None,
                work_ok: None,
                notes: vec![],
            },
            incidents: vec![],
            requests: vec![],
            processes: vec![],
            series: Series::default(),
        }
    }

    /// A baseline made of a move.
    pub(crate) fn a_baseline(name: Baseline, figures: MoveReport) -> BaselineReport {
        BaselineReport { name, stop_rule: "expected downtime under 300 ms".into(), figures }
    }

    /// A report with these entries.
    pub(crate) fn a_report(moves: Vec<MoveReport>, baselines: Vec<BaselineReport>) -> Report {
        Report {
            name: "burst".into(),
            started_unix_s: 1_795_233_600,
            host: Host::default(),
            wan: WanFigures { rate_mbit: 100.0, rtt_ms: 27.0, queue_ms: 50.0, ..WanFigures::default() },
            moves,
            baselines,
            warnings: vec![],
            broken: None,
            windows: vec![],
            components: vec![],
            applications: vec![],
            marks: vec![],
            together: vec![],
            speeds: vec![],
            extenders: vec![],
            captures: vec![],
            profiles: vec![],
            incidents: vec![],
        }
    }

    #[test]
    fn the_median_of_none_is_nothing_and_of_two_lies_between_them() {
        assert_eq!(median([]), None);
        assert_eq!(median([f64::NAN]), None);
        assert_eq!(median([3.0]), Some(3.0));
        assert_eq!(median([4.0, 1.0]), Some(2.5));
        assert_eq!(median([9.0, 1.0, 5.0]), Some(5.0));
    }

    #[test]
    fn every_line_of_the_table_is_as_wide_as_its_columns() {
        let mut long = a_move();
        long.vm = "a-name-of-24-characters-".into();
        long.downtime_ms = None;
        let text = comparison(&a_report(vec![a_move()], vec![a_baseline(Baseline::QemuMultifdZstd, long)]));
        let lines: Vec<&str> = text.lines().take(4).collect();
        let column = lines[0].find("integrity").unwrap();
        assert_eq!(lines[2].find("intact"), Some(column), "{text}");
        assert_eq!(lines[3].find("intact"), Some(column), "{text}");
        let time_ends = lines[0].find("time s").unwrap() + "time s".len();
        assert!(lines[2][..time_ends].ends_with("130.2") || lines[2][..time_ends].ends_with("130.3"), "{text}");
        assert!(lines[3].contains("  -  "), "an unmeasured pause is a dash: {text}");
        assert!(text.contains("stop rule: qemu-multifd-zstd: expected downtime under 300 ms"), "{text}");
    }

    #[test]
    fn repeats_share_a_row_of_medians_over_the_completed_runs() {
        let run = |downtime| MoveReport { downtime_ms: Some(downtime), ..a_move() };
        let failed = MoveReport {
            outcome: Outcome::Failed,
            why: Some("the stream\x1b[31m broke".into()),
            total_s: 1e6,
            ..run(9.0)
        };
        let runs = [run(100.0), run(700.0), run(300.0), failed];
        let text = comparison(&a_report(vec![], runs.into_iter().map(|m| a_baseline(Baseline::Qemu, m)).collect()));
        let row = text.lines().nth(2).unwrap();
        assert!(row.contains("3 completed, 1 failed  4  "), "{text}");
        assert!(row.contains("  300  "), "{text}");
        assert!(text.contains("failed: qemu of web: the stream [31m broke\n"), "{text}");
        assert_eq!(text.matches("stop rule").count(), 1, "{text}");
    }

    #[test]
    fn godwits_figures_are_set_against_plain_qemus_for_the_same_move() {
        let ours = MoveReport { total_s: 30.0, downtime_ms: Some(100.0), outage_ms: None, ..a_move() };
        let theirs = MoveReport { total_s: 120.0, downtime_ms: Some(400.0), ..a_move() };
        let back = MoveReport { from: "texas".into(), to: "illinois".into(), ..a_move() };
        let baselines =
            vec![a_baseline(Baseline::QemuXbzrle, back.clone()), a_baseline(Baseline::Qemu, theirs.clone())];
        let text = comparison(&a_report(vec![ours.clone(), back.clone()], baselines));
        let said: Vec<_> = text.lines().filter(|l| l.starts_with("godwit / ")).collect();
        let expected = "godwit / qemu: web illinois -> texas: time 0.25, downtime 0.25, outage -, memory 1.00, disk 1.00, other 1.00";
        assert_eq!(said, [expected], "nothing is said of a way that qemu did not go");
        let failed = MoveReport { outcome: Outcome::Failed, ..ours };
        let text = comparison(&a_report(vec![failed], vec![a_baseline(Baseline::Qemu, theirs)]));
        assert!(!text.contains("godwit / "), "a move that failed is not quicker: {text}");
    }

    #[test]
    fn a_move_may_fail_only_if_something_was_done_to_it_and_its_vm_was_found_in_one_place() {
        let failed = MoveReport { outcome: Outcome::Failed, ..a_move() };
        assert!(a_move().is_well() && !failed.is_well());
        let mut provoked = MoveReport { incidents: vec!["at memory: killing the node".into()], ..failed.clone() };
        assert!(!provoked.is_well(), "nobody looked where the VM is");
        provoked.integrity.one_place = Some(true);
        assert!(provoked.is_well());
        provoked.integrity.disk_ok = Some(false);
        assert!(!provoked.is_well(), "a guest may never be hurt");
        let mut unprovoked = failed;
        unprovoked.integrity.one_place = Some(true);
        assert!(!unprovoked.is_well(), "it failed by itself");
    }

    #[test]
    fn godwits_moves_end_in_time_and_a_baselines_need_not() {
        let given_up = MoveReport { outcome: Outcome::Cancelled, ..a_move() };
        let late = MoveReport { timed_out: true, ..given_up.clone() };
        let by_godwit = |figures: &MoveReport| a_report(vec![figures.clone()], vec![]).is_well();
        assert!(by_godwit(&given_up) && !by_godwit(&late));
        assert!(a_report(vec![], vec![a_baseline(Baseline::Qemu, late.clone())]).is_well());
        let mut provoked = MoveReport { incidents: vec!["at memory: cutting a - b".into()], ..late };
        assert!(!by_godwit(&provoked), "nobody looked where the VM is");
        provoked.integrity.one_place = Some(true);
        assert!(by_godwit(&provoked));
    }

    #[test]
    fn clients_of_a_baseline_may_wait_and_a_run_that_broke_off_is_not_well() {
        let mut report = a_report(vec![], vec![]);
        let seen = |by: &str, failed| Application { by: by.into(), failed, ..Application::default() };
        report.applications = vec![seen("godwit", 0), seen("qemu", 3)];
        assert!(report.is_well());
        for ours in ["godwit", ""] {
            report.applications[0] = seen(ours, 1);
            assert!(!report.is_well(), "{ours}");
        }
        let mut report = a_report(vec![a_move()], vec![]);
        report.broken = Some("qemu: VM `vm` is in b already".into());
        assert!(!report.is_well() && comparison(&report).contains("BROKEN OFF: qemu: VM"));
    }

    #[test]
    fn a_report_of_before_a_pass_was_named_is_read() {
        let mut report = a_report(vec![a_move()], vec![]);
        report.applications = vec![Application::default()];
        report.marks = vec![crate::report::Mark::default()];
        report.windows = vec![crate::report::IoWindow::default()];
        let mut old = serde_json::to_value(&report).unwrap();
        for list in ["applications", "marks", "windows"] {
            let entry = old[list][0].as_object_mut().unwrap();
            assert!(entry.remove("by").is_some() && entry.remove("repeat").is_some(), "{list}");
        }
        assert!(old["moves"][0].as_object_mut().unwrap().remove("timed_out").is_some());
        let read: Report = serde_json::from_value(old).unwrap();
        assert!(read.applications[0].is_godwits() && read.broken.is_none() && !read.moves[0].timed_out);
    }

    #[test]
    fn a_report_without_moves_says_so_and_still_warns() {
        let mut report = a_report(vec![], vec![]);
        report.warnings.push("no KVM here".into());
        assert_eq!(comparison(&report), "no move was made\nwarning: no KVM here\n");
    }

    #[test]
    fn what_nobody_checked_is_never_called_intact() {
        let mut some = a_move().integrity;
        assert_eq!(integrity(&some), "intact");
        some.ram_equal = None;
        assert_eq!(integrity(&some), "intact; unchecked: ram");
        some.one_place = Some(false);
        assert_eq!(integrity(&some), "FAILED: place; unchecked: ram");
        some.one_place = None;
        some.disk_ok = Some(false);
        some.tcp_ok = Some(false);
        assert_eq!(integrity(&some), "FAILED: disk, tcp; unchecked: ram");
        assert_eq!(integrity(&Integrity::default()), "nothing checked");
        assert_eq!(integrity_over([&some, &a_move().integrity]), "FAILED: disk (1 of 2), tcp (1 of 2); unchecked: ram");
    }

    #[test]
    fn markdown_cells_cannot_break_their_row() {
        let mut grid = Grid::new(vec![Column::left("a"), Column::right("b")]);
        grid.row(vec!["x|y\nz".into(), "1".into()]);
        assert_eq!(grid.markdown(), "| a      |   b |\n| ------ | --: |\n| x\\|y z |   1 |\n");
    }
}
