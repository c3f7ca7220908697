//! CloudNet, table 1 and figures 12 and 13, live: memory of three guests and of one that rests, by plain QEMU, by its several connections with zstd, and by
//! Godwit. The [replay](crate::replays) has the paper's mechanisms on the same guests.
//!
//! Disks are on storage that all sites reach: memory alone travels, and Godwit names what of it lies there. For the table a guest goes on and on,
//! each time to a site that has never seen it; and once more by Godwit to sites that its disk was brought to before, as it is without such storage. For the
//! figures it goes there and back between two, over one link after the other: nothing is kept of a guest that has left, which is looked at.

use super::{Document, Drawing, Extent, Mover, PlanCell, Table, ahead, link_step, remarks, report_of, unless_lost};
use crate::ledger::Entry;
use crate::replays::{MBIT, RATES, ROUND_TRIPS, RTT_MS};
use crate::report::{MoveReport, Outcome, REFERENCES};
use crate::table::{figure, in_mib, median};
use godwit_predict::PAGE;

/// Where every guest is tried by everyone: the replay's links.
const HERE: Link = Link { mbit: MBIT, rtt_ms: RTT_MS };
/// Moves of a guest for the table, and over each of the other links.
const MOVES: usize = 5;
const MOVES_BY_LINK: usize = 3;
/// Before the first move, seconds: loads warm up.
const WARM_S: u32 = 60;
/// Between two, seconds.
const REST_S: u32 = 10;
/// The most that Godwit's bytes and pause may be of plain QEMU's, its bytes of those of several connections, and its time of plain QEMU's on any link.
const BYTES: f64 = 0.2;
const PAUSE: f64 = 0.4;
const BYTES_OF_MULTIFD: f64 = 0.8;
const TIME: f64 = 1.05;

/// A link between every two sites.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Link {
    mbit: u32,
    rtt_ms: u32,
}

/// What a guest does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Guest {
    Compile,
    Database,
    Java,
    Idle,
}

impl Guest {
    /// Those of the paper.
    const BUSY: [Self; 3] = [Self::Compile, Self::Database, Self::Java];
    /// Those that are moved over other links, too: one that works, and one that leaves the processors to the codec.
    const SWEPT: [Self; 2] = [Self::Database, Self::Idle];

    fn name(self) -> &'static str {
        match self {
            Self::Compile => "kernel-compile",
            Self::Database => "database",
            Self::Java => "java",
            Self::Idle => "idle",
        }
    }

    fn load(self) -> &'static str {
        match self {
            Self::Compile => "{ kind = \"kernel-compile\" },",
            Self::Database => "{ kind = \"database\", clients = 2 },",
            Self::Java => "{ kind = \"java\", heap_mib = 160 },",
            Self::Idle => "",
        }
    }
}

/// Who moves it, and where its disk is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum By {
    /// On storage that all reach.
    Memory(Mover),
    /// The same by Godwit with [`FEWEST`].
    Fewest,
    /// Godwit: the disk was pre-cached where the guest goes.
    Precached,
    /// The same with [`FEWEST`].
    PrecachedFewest,
}

/// The policy of who pays for bytes.
const FEWEST: &str = "least-bytes";

impl By {
    /// For the table.
    const ALL: [Self; 6] = [
        Self::Memory(Mover::Qemu),
        Self::Memory(Mover::Multifd),
        Self::Memory(Mover::Godwit),
        Self::Fewest,
        Self::Precached,
        Self::PrecachedFewest,
    ];
    /// Those that are held against the others.
    const OURS: [Self; 4] = [Self::Memory(Mover::Godwit), Self::Fewest, Self::Precached, Self::PrecachedFewest];

    fn mover(self) -> Mover {
        match self {
            Self::Memory(mover) => mover,
            Self::Fewest | Self::Precached | Self::PrecachedFewest => Mover::Godwit,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Memory(mover) => mover.name(),
            Self::Fewest => "godwit-fewest",
            Self::Precached => "godwit-precached",
            Self::PrecachedFewest => "godwit-precached-fewest",
        }
    }

    fn shown(self) -> &'static str {
        match self {
            Self::Memory(mover) => mover.shown(),
            Self::Fewest => "Godwit, least-bytes",
            Self::Precached => "Godwit, disk pre-cached",
            Self::PrecachedFewest => "Godwit, disk pre-cached, least-bytes",
        }
    }

    fn is_precached(self) -> bool {
        matches!(self, Self::Precached | Self::PrecachedFewest)
    }

    /// As a step of a scenario says it.
    fn policy(self) -> String {
        match self {
            Self::Fewest | Self::PrecachedFewest => format!(", policy = \"{FEWEST}\""),
            Self::Memory(_) | Self::Precached => String::new(),
        }
    }
}

/// Who moves it over other links.
const SWEPT: [Mover; 2] = [Mover::Qemu, Mover::Godwit];

fn name(guest: Guest, by: By) -> String {
    format!("{}-{}", guest.name(), by.name())
}

fn swept_name(guest: Guest, by: Mover) -> String {
    format!("{}-links", name(guest, By::Memory(by)))
}

fn scenario(guest: Guest, by: Mover, sites: usize, steps: &str) -> String {
    let sites: String = (0..sites).map(|n| format!("[[site]]\nname = \"s{n}\"\n")).collect();
    format!(
        r#"name = "figures-memory"
{who}

[wan]
rate_mbit = {mbit}
rtt_ms = {rtt_ms}

{sites}[[site]]
name = "clients"

[[vm]]
name = "vm"
site = "s0"
image = "debian"
memory_mib = 332
disk_gib = 6.1
load = [
  {load}
  {{ kind = "echo", from = "clients", per_s = 20 }},
]

{steps}"#,
        who = by.lines(),
        mbit = HERE.mbit,
        rtt_ms = HERE.rtt_ms,
        load = guest.load(),
    )
}

fn move_to(site: usize, after_s: u32, disk: &str, policy: &str) -> String {
    format!(
        "[[step]]\nafter_s = {after_s}\nmove = {{ vm = \"vm\", to = \"s{site}\", disk = \"{disk}\"{policy} }}\n[[step]]\nverify = {{ vm = \"vm\" }}\n"
    )
}

fn cell(guest: Guest, by: By) -> PlanCell {
    let step = |to: usize| {
        let after_s = if to == 1 { WARM_S } else { REST_S };
        if !by.is_precached() {
            return move_to(to, after_s, "shared", &by.policy());
        }
        let between = [format!("s{}", to - 1), format!("s{to}")];
        ahead(between.each_ref().map(String::as_str), 900, HERE.mbit, HERE.rtt_ms)
            + &move_to(to, after_s, "postcopy", &by.policy())
    };
    let steps: String = (1..=MOVES).map(step).collect();
    PlanCell { name: name(guest, by), scenario: scenario(guest, by.mover(), MOVES + 1, &steps) }
}

/// The links of the figures, each once.
fn links() -> Vec<Link> {
    let rates = RATES.map(|mbit| Link { mbit, ..HERE });
    let round_trips = ROUND_TRIPS.map(|rtt_ms| Link { rtt_ms, ..HERE });
    rates.into_iter().chain(round_trips.into_iter().filter(|link| *link != HERE)).collect()
}

fn sweep(guest: Guest, by: Mover) -> PlanCell {
    let mut steps = format!("[[step]]\nwait = {{ s = {WARM_S} }}\n");
    let mut made = 0;
    for link in links() {
        steps += &link_step(["s0", "s1"], link.mbit, link.rtt_ms);
        for _ in 0..MOVES_BY_LINK {
            made += 1;
            steps += &move_to(made % 2, REST_S, "shared", "");
        }
    }
    PlanCell { name: swept_name(guest, by), scenario: scenario(guest, by, 2, &steps) }
}

pub(super) fn cells(extent: Extent) -> Vec<PlanCell> {
    let mut cells: Vec<_> = Guest::BUSY.into_iter().flat_map(|guest| By::ALL.map(|by| cell(guest, by))).collect();
    if extent == Extent::Full {
        cells.extend(Guest::SWEPT.into_iter().flat_map(|guest| SWEPT.map(|by| sweep(guest, by))));
    }
    cells
}

/// Of a move.
type Figure = fn(&MoveReport) -> Option<f64>;

/// Until the guest ran there, less what the lab held it to compare its memory.
fn seconds(m: &MoveReport) -> Option<f64> {
    Some(m.took_s())
}

fn memory(m: &MoveReport) -> Option<f64> {
    Some(in_mib(m.bytes.memory))
}

fn pause(m: &MoveReport) -> Option<f64> {
    m.downtime_ms
}

/// Pages that went as zeroes, whoever looked for them.
fn zero(m: &MoveReport) -> Option<f64> {
    Some(in_mib(m.zero_pages * PAGE.0))
}

/// Memory that lies on disks where the guest goes, and went as references to them.
fn referred(m: &MoveReport) -> Option<f64> {
    (m.kept.on_disks > 0).then(|| in_mib(m.kept.on_disks))
}

/// What these references took, of memory's bytes, in KiB.
fn references(m: &MoveReport) -> Option<f64> {
    let bytes: u64 = m.rounds.iter().filter_map(|round| round.bytes_by_encoding.get(REFERENCES)).sum();
    referred(m).map(|_| in_mib(bytes) * 1024.0)
}

/// QEMU, as the kernel calls it.
const QEMU: &str = "qemu-system-x86";

/// What a program has had of a processor at the site that the guest left, or went to.
fn processor(m: &MoveReport, site: &str, program: &str) -> Option<f64> {
    m.processes.iter().find(|time| time.site == site && time.program == program).map(|time| time.s)
}

/// The moves of a cell.
#[derive(Default)]
struct Moves<'a>(Vec<&'a MoveReport>);

impl<'a> Moves<'a> {
    /// For the table.
    fn of(entries: &'a [Entry], guest: Guest, by: By) -> Option<Self> {
        let moves = by.mover().moves(report_of(entries, &name(guest, by))?);
        (!moves.is_empty()).then_some(Self(moves))
    }

    /// Over a link.
    fn over(entries: &'a [Entry], guest: Guest, by: Mover, link: Link) -> Option<Self> {
        let nth = links().iter().position(|it| *it == link)?;
        let moves = by.moves(report_of(entries, &swept_name(guest, by))?);
        Some(Self(moves.chunks(MOVES_BY_LINK).nth(nth)?.to_vec()))
    }

    fn ended(&self) -> impl Iterator<Item = &MoveReport> {
        self.0.iter().copied().filter(|m| m.outcome == Outcome::Completed)
    }

    /// The middle one's of those that ended well.
    fn median(&self, figure: impl Fn(&MoveReport) -> Option<f64>) -> Option<f64> {
        median(self.ended().filter_map(figure))
    }

    /// The middle one, and from the least to the most.
    fn spread(&self, of: Figure, decimals: usize) -> String {
        let mut values: Vec<f64> = self.ended().filter_map(of).collect();
        values.sort_by(f64::total_cmp);
        match (values.first(), values.last()) {
            (Some(least), Some(most)) if values.len() > 1 => format!(
                "{} ({}–{})",
                figure(self.median(of), decimals),
                figure(Some(*least), decimals),
                figure(Some(*most), decimals)
            ),
            _ => figure(self.median(of), decimals),
        }
    }

    fn row(&self, guest: Guest, by: By) -> Vec<String> {
        let rounds: Figure = |m| Some(m.rounds.len() as f64);
        let of = |side: fn(&MoveReport) -> &str, program| figure(self.median(|m| processor(m, side(m), program)), 1);
        vec![
            guest.name().into(),
            by.shown().into(),
            format!("{} of {}", self.ended().count(), self.0.len()),
            self.spread(memory, 1),
            figure(self.median(zero), 1),
            figure(self.median(referred), 1),
            figure(self.median(references), 1),
            self.spread(seconds, 1),
            self.spread(pause, 0),
            figure(self.median(rounds), 0),
            of(|m| &m.from, QEMU),
            of(|m| &m.from, "godwit"),
            of(|m| &m.to, QEMU),
            of(|m| &m.to, "godwit"),
        ]
    }
}

/// How much of the other's a figure of ours is.
fn share(ours: &Moves<'_>, other: &Moves<'_>, figure: Figure) -> Option<f64> {
    Some(ours.median(figure)? / other.median(figure)?)
}

fn bounds(entries: &[Entry]) -> Vec<(String, Option<bool>)> {
    let mut bounds = vec![];
    let mut bound = |text: String, share: Option<f64>, ours: &Moves<'_>, most: f64| {
        let kept = unless_lost(share.map(|share| share <= most), ours.0.iter().copied());
        bounds.push((format!("{text} ({})", figure(share, 2)), kept));
    };
    for guest in Guest::BUSY {
        for by in By::OURS {
            let moves = |by| Moves::of(entries, guest, by).unwrap_or_default();
            let ours = moves(by);
            let of = |other, figure| share(&ours, &moves(By::Memory(other)), figure);
            let name = format!("{}: {}", guest.name(), by.shown());
            bound(format!("{name}: bytes are at most {BYTES} of plain QEMU's"), of(Mover::Qemu, memory), &ours, BYTES);
            bound(
                format!("{name}: bytes are at most {BYTES_OF_MULTIFD} of those of multifd with zstd"),
                of(Mover::Multifd, memory),
                &ours,
                BYTES_OF_MULTIFD,
            );
            let text = format!("{name}: the pause is at most {PAUSE} of plain QEMU's");
            bound(text, of(Mover::Qemu, pause), &ours, PAUSE);
        }
    }
    for guest in Guest::SWEPT {
        let over = |by, link| Moves::over(entries, guest, by, link).unwrap_or_default();
        let shares =
            links().into_iter().filter_map(|link| share(&over(Mover::Godwit, link), &over(Mover::Qemu, link), seconds));
        let most = shares.reduce(f64::max);
        let ours = report_of(entries, &swept_name(guest, Mover::Godwit)).map(|report| Mover::Godwit.moves(report));
        let ours = Moves(ours.unwrap_or_default());
        if most.is_some() || ours.ended().count() < ours.0.len() {
            let text = format!("{}: Godwit's time is at most {TIME} of plain QEMU's on every link", guest.name());
            bound(text, most, &ours, TIME);
        }
    }
    let ours = entries.iter().flat_map(|entry| &entry.report.moves);
    let kept = ours.map(|m| m.kept.memory).max();
    bounds.push(("Godwit finds nothing of the guest where it goes".into(), kept.map(|kept| kept == 0)));
    bounds
}

/// Figures 12 and 13 of a guest.
fn swept(entries: &[Entry], guest: Guest, document: &mut Document) {
    let over = |by, link| Moves::over(entries, guest, by, link);
    let row = |link: Link, by| {
        let row = over(by, link)?.row(guest, By::Memory(by));
        Some([vec![link.mbit.to_string(), link.rtt_ms.to_string()], row[1..].to_vec()].concat())
    };
    let rows: Vec<_> =
        links().into_iter().flat_map(|link| SWEPT.into_iter().filter_map(move |by| row(link, by))).collect();
    if rows.is_empty() {
        return;
    }
    document.tables.push(Table {
        title: format!("{} by link (CloudNet's figures 12 and 13)", guest.name()),
        columns: ["Mbit/s", "RTT ms"].into_iter().chain(COLUMNS[1..].iter().copied()).map(str::to_owned).collect(),
        words: 3,
        rows,
    });
    let figures: [(&str, &str, Figure); 3] = [("time", "s", seconds), ("pause", "ms", pause), ("data", "MiB", memory)];
    for (x, unit, links) in [
        ("bandwidth", "Mbit/s", RATES.map(|mbit| Link { mbit, ..HERE })),
        ("latency", "ms", ROUND_TRIPS.map(|rtt_ms| Link { rtt_ms, ..HERE })),
    ] {
        let at = |link: Link| f64::from(if x == "latency" { link.rtt_ms } else { link.mbit });
        for (what, in_unit, of) in figures {
            let line = |by: Mover| {
                let point = |link: &Link| Some((at(*link), over(by, *link)?.median(of)?));
                (by.shown().to_owned(), links.iter().filter_map(point).collect())
            };
            document.drawings.push(Drawing {
                name: format!("memory-{what}-{x}-{}", guest.name()),
                title: format!("{}: {what} by {x}", guest.name()),
                x: format!("{x}, {unit}"),
                y: format!("{what}, {in_unit}"),
                lines: SWEPT.map(line).into(),
                drawn: None,
            });
        }
    }
}

const COLUMNS: [&str; 14] = [
    "guest",
    "by",
    "moved",
    "memory MiB",
    "zero MiB",
    "as references MiB",
    "references KiB",
    "s",
    "pause ms",
    "rounds",
    "QEMU from, s",
    "Godwit from, s",
    "QEMU to, s",
    "Godwit to, s",
];

pub(super) fn document(entries: &[Entry]) -> Document {
    let rows = Guest::BUSY.into_iter().flat_map(|guest| {
        By::ALL.into_iter().filter_map(move |by| Some(Moves::of(entries, guest, by)?.row(guest, by)))
    });
    let mut document = Document {
        title: "Memory over a thin, long link (CloudNet, table 1 and figures 12 and 13, live)".into(),
        tables: vec![Table {
            title: format!("At {} Mbit/s and {} ms (CloudNet's table 1)", HERE.mbit, HERE.rtt_ms),
            columns: COLUMNS.map(str::to_owned).into(),
            words: 2,
            rows: rows.collect(),
        }],
        bounds: bounds(entries),
        remarks: remarks(entries),
        drawings: vec![],
    };
    for guest in Guest::SWEPT {
        swept(entries, guest, &mut document);
    }
    let mut rules: Vec<&str> = (entries.iter())
        .flat_map(|entry| entry.report.baselines.iter().map(|baseline| baseline.stop_rule.as_str()))
        .collect();
    rules.sort_unstable();
    rules.dedup();
    document.remarks.extend(rules.iter().map(|rule| format!("QEMU's stop rule: {rule}.")));
    document.remarks.push(format!(
        "Medians of {MOVES} moves, each to a site that has not seen the guest, and from the least to the most; by link of {MOVES_BY_LINK}, there and back. Seconds are until the guest runs, less what the lab held it to \
         compare its memory. Zero: pages that went as zeroes, over all rounds. As references: memory that lies on disks where the guest goes, and was referred to; what that took is of memory's bytes. The last four columns: time on a processor, by program and side; a QEMU's has its emulated guest in it."
    ));
    document
}

#[cfg(test)]
mod tests {
    use super::super::tests::{entry, filled};
    use super::*;
    use crate::report::{BaselineReport, ProcessTime, Round, WanBytes};
    use crate::scenario::{Action, Baseline, Scenario};
    use std::collections::HashSet;

    fn moved(memory: u64, ms: f64, s: f64) -> MoveReport {
        MoveReport {
            bytes: WanBytes { memory: memory << 20, ..WanBytes::default() },
            downtime_ms: Some(ms),
            total_s: s + 1.0,
            held_ms: 1000.0,
            ..filled()
        }
    }

    fn ran(cell: &str, by: Mover, moves: Vec<MoveReport>) -> Entry {
        if by == Mover::Godwit {
            return entry(cell, moves);
        }
        let mut entry = entry(cell, vec![]);
        let baseline = |figures| BaselineReport { name: Baseline::Qemu, stop_rule: "after a while".into(), figures };
        entry.report.baselines = moves.into_iter().map(baseline).collect();
        entry
    }

    #[test]
    fn the_middle_move_is_held_against_the_others_and_one_of_ours_that_failed_breaks_the_bounds() {
        let mut lost = moved(1, 1.0, 1.0);
        lost.outcome = Outcome::Failed;
        let ours = |most| vec![moved(10, 40.0, 5.0), moved(most, 40.0, 5.0), moved(80, 90.0, 9.0)];
        let judged = |ours: Vec<MoveReport>| -> Vec<Option<bool>> {
            let of = |by, moves| ran(&name(Guest::Compile, By::Memory(by)), by, moves);
            let entries = [
                of(Mover::Godwit, ours),
                of(Mover::Qemu, vec![moved(100, 100.0, 20.0), lost.clone()]),
                of(Mover::Multifd, vec![moved(30, 100.0, 20.0)]),
            ];
            document(&entries).bounds[..3].iter().map(|bound| bound.1).collect()
        };
        assert_eq!(judged(ours(20)), [Some(true); 3]);
        assert_eq!(judged(ours(25)), [Some(false), Some(false), Some(true)]);
        assert_eq!(judged([ours(20), vec![lost.clone()]].concat()), [Some(false); 3]);
        assert!(document(&[]).bounds.iter().all(|bound| bound.1.is_none()));
    }

    #[test]
    fn the_worst_link_counts_and_what_was_there_before_would_be_seen() {
        let judged = |s, kept| {
            // The moves over the fourth link take so long, all others half as long as plain ones.
            let move_of = |n: usize| {
                let mut m = moved(1, 1.0, if n / MOVES_BY_LINK == 3 { s } else { 5.0 });
                m.kept.memory = kept;
                m
            };
            let all = links().len() * MOVES_BY_LINK;
            let entries = [
                ran(&swept_name(Guest::Idle, Mover::Godwit), Mover::Godwit, (0..all).map(move_of).collect()),
                ran(&swept_name(Guest::Idle, Mover::Qemu), Mover::Qemu, vec![moved(1, 1.0, 10.0); all]),
            ];
            let document = document(&entries);
            assert_eq!(document.drawings.len(), 6);
            assert!(document.drawings.iter().all(|drawing| drawing.lines.iter().all(|line| line.1.len() == 5)));
            document.bounds[document.bounds.len() - 2..].iter().map(|bound| bound.1.unwrap()).collect::<Vec<_>>()
        };
        assert_eq!(judged(10.4, 0), [true, true]);
        assert_eq!(judged(10.6, 1), [false, false]);
    }

    #[test]
    fn processors_are_counted_on_the_side_that_they_worked_for() {
        let time = |site: &str, program: &str, s| ProcessTime { site: site.into(), program: program.into(), s };
        let mut m = moved(1, 1.0, 1.0);
        (m.from, m.to) = ("s0".into(), "s1".into());
        m.processes = vec![
            time("s0", "godwit", 1.5),
            time("s0", "qemu-img", 0.5),
            time("s0", "qemu-system-x86", 9.0),
            time("s1", "godwit", 2.5),
        ];
        let row = Moves(vec![&m]).row(Guest::Idle, By::Memory(Mover::Godwit));
        assert_eq!(row[10..], ["9.0", "1.5", "-", "2.5"]);
    }

    #[test]
    fn zeroes_and_references_stand_apart_from_what_travelled() {
        let mut m = moved(10, 1.0, 1.0);
        m.zero_pages = 512;
        let shown = |m: &MoveReport| Moves(vec![m]).row(Guest::Java, By::Precached)[3..7].to_vec();
        assert_eq!(shown(&m), ["10.0", "2.0", "-", "-"], "of no disks nothing is said");
        m.kept.on_disks = 3 << 20;
        let round = |bytes| Round { bytes_by_encoding: [(REFERENCES.to_owned(), bytes)].into(), ..Round::default() };
        m.rounds = vec![round(1024), Round::default(), round(512)];
        assert_eq!(shown(&m), ["10.0", "2.0", "3.0", "1.5"]);
    }

    /// Where a cell's guest goes.
    fn way(cell: &PlanCell) -> Vec<String> {
        let scenario = Scenario::parse(&cell.scenario, &cell.name).unwrap();
        let to = scenario.step.iter().filter_map(|step| match &step.action {
            Action::Move(order) => Some(order.to.get_ref().clone()),
            _ => None,
        });
        [scenario.vm[0].site.get_ref().clone()].into_iter().chain(to).collect()
    }

    #[test]
    fn for_the_table_it_goes_where_it_has_not_been_and_for_the_figures_there_and_back_over_every_link() {
        for cell in cells(Extent::Full) {
            let way = way(&cell);
            assert_eq!(cell.scenario.contains(FEWEST), cell.name.ends_with("-fewest"), "{}", cell.name);
            if cell.name.ends_with("-links") {
                assert_eq!(way.len(), 1 + 9 * MOVES_BY_LINK);
                assert!(way.windows(2).all(|two| two[0] != two[1]), "{way:?}");
                assert_eq!(cell.scenario.matches("rate = {").count(), 9);
            } else {
                assert_eq!((way.len(), way.iter().collect::<HashSet<_>>().len()), (MOVES + 1, MOVES + 1), "{way:?}");
            }
        }
    }
}
