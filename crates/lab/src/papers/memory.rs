//! CloudNet, table 1 and figures 12 and 13, live: memory of three guests and of one that rests, by plain QEMU, by its several connections with zstd, and by
//! Godwit. The [replay](crate::replays) has the paper's mechanisms on the same guests.
//!
//! Disks are on storage that all sites reach: memory alone travels. A cell is one guest that goes on and on, each time to a site that has never seen
//! it, so that nobody finds there what an earlier move has left. All sites have the same link between them.

use super::{Document, Drawing, Extent, Mover, PlanCell, Table, remarks, report_of};
use crate::ledger::Entry;
use crate::report::{MoveReport, Outcome, Report};
use crate::table::{figure, in_mib, median};

/// Where every guest is tried by everyone.
const HERE: Link = Link { mbit: 100, rtt_ms: 20 };
/// Figures 12 and 13.
const RATES: [u32; 5] = [50, 100, 200, 500, 1000];
const ROUND_TRIPS: [u32; 5] = [10, 20, 60, 120, 180];
/// Moves of a cell.
const MOVES: usize = 5;
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
    const ALL: [Self; 4] = [Self::Compile, Self::Database, Self::Java, Self::Idle];
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

/// Who moves it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum By {
    Plain,
    Multifd,
    Godwit,
}

impl By {
    const ALL: [Self; 3] = [Self::Plain, Self::Multifd, Self::Godwit];
    /// Who is tried over other links.
    const SWEPT: [Self; 2] = [Self::Plain, Self::Godwit];

    fn mover(self) -> Mover {
        if self == Self::Godwit { Mover::Godwit } else { Mover::Qemu }
    }

    fn name(self) -> &'static str {
        if self == Self::Multifd { "multifd-zstd" } else { self.mover().name() }
    }

    fn shown(self) -> &'static str {
        if self == Self::Multifd { "QEMU, multifd and zstd" } else { self.mover().shown() }
    }

    fn lines(self) -> &'static str {
        match self {
            Self::Multifd => "godwit = false\nbaseline = [\"qemu-multifd-zstd\"]",
            by => by.mover().lines(),
        }
    }
}

fn name(guest: Guest, by: By, link: Link) -> String {
    format!("{}-{}-{}mbit-{}ms", guest.name(), by.name(), link.mbit, link.rtt_ms)
}

fn cell(guest: Guest, by: By, link: Link) -> PlanCell {
    let sites: String = (0..=MOVES).map(|n| format!("[[site]]\nname = \"s{n}\"\n")).collect();
    let step = |n: usize| {
        let after = if n == 1 { WARM_S } else { REST_S };
        format!(
            "[[step]]\nafter_s = {after}\nmove = {{ vm = \"vm\", to = \"s{n}\", disk = \"shared\" }}\n[[step]]\nverify = {{ vm = \"vm\" }}\n"
        )
    };
    let scenario = format!(
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
        mbit = link.mbit,
        rtt_ms = link.rtt_ms,
        load = guest.load(),
        steps = (1..=MOVES).map(step).collect::<String>(),
    );
    PlanCell { name: name(guest, by, link), scenario }
}

/// The links that are not [`HERE`].
fn others() -> impl Iterator<Item = Link> {
    let rates = RATES.into_iter().map(|mbit| Link { mbit, ..HERE });
    let round_trips = ROUND_TRIPS.into_iter().map(|rtt_ms| Link { rtt_ms, ..HERE });
    rates.chain(round_trips).filter(|link| *link != HERE)
}

pub(super) fn cells(extent: Extent) -> Vec<PlanCell> {
    let here = Guest::BUSY.into_iter().flat_map(|guest| By::ALL.map(|by| cell(guest, by, HERE)));
    let mut cells: Vec<_> = here.collect();
    if extent == Extent::Full {
        cells.extend(By::SWEPT.map(|by| cell(Guest::Idle, by, HERE)));
        for guest in Guest::SWEPT {
            cells.extend(others().flat_map(|link| By::SWEPT.map(|by| cell(guest, by, link))));
        }
    }
    cells
}

/// Of a move.
type Figure = fn(&MoveReport) -> Option<f64>;

/// Until the guest ran there, less what the lab held it to compare its memory.
fn seconds(m: &MoveReport) -> Option<f64> {
    Some(m.total_s - m.held_ms / 1e3)
}

fn memory(m: &MoveReport) -> Option<f64> {
    Some(in_mib(m.bytes.memory))
}

fn pause(m: &MoveReport) -> Option<f64> {
    m.downtime_ms
}

/// What a program has had of a processor at the site that the guest left, or went to.
fn processor(m: &MoveReport, site: &str, program: &str) -> Option<f64> {
    m.processes.iter().find(|time| time.site == site && time.program.starts_with(program)).map(|time| time.s)
}

/// The moves of a cell.
struct Moves<'a>(Vec<&'a MoveReport>);

impl<'a> Moves<'a> {
    fn of(report: &'a Report, by: By) -> Self {
        Self(by.mover().moves(report))
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
            self.spread(seconds, 1),
            self.spread(pause, 0),
            figure(self.median(rounds), 0),
            of(|m| &m.from, "qemu"),
            of(|m| &m.from, "godwit"),
            of(|m| &m.to, "qemu"),
            of(|m| &m.to, "godwit"),
        ]
    }
}

fn moves(entries: &[Entry], guest: Guest, by: By, link: Link) -> Option<Moves<'_>> {
    Some(Moves::of(report_of(entries, &name(guest, by, link))?, by)).filter(|moves| !moves.0.is_empty())
}

/// How much of the other's a figure of Godwit's is.
fn share(entries: &[Entry], guest: Guest, of: By, link: Link, figure: Figure) -> Option<f64> {
    let [ours, other] = [By::Godwit, of].map(|by| moves(entries, guest, by, link)?.median(figure));
    Some(ours? / other?)
}

fn bounds(entries: &[Entry]) -> Vec<(String, Option<bool>)> {
    let mut bounds = vec![];
    let mut bound = |text: String, share: Option<f64>, most: f64| {
        bounds.push((format!("{text} ({})", figure(share, 2)), share.map(|share| share <= most)));
    };
    for guest in Guest::BUSY {
        let name = guest.name();
        let of = |by, figure| share(entries, guest, by, HERE, figure);
        bound(format!("{name}: Godwit's bytes are at most {BYTES} of plain QEMU's"), of(By::Plain, memory), BYTES);
        bound(
            format!("{name}: Godwit's bytes are at most {BYTES_OF_MULTIFD} of those of multifd with zstd"),
            of(By::Multifd, memory),
            BYTES_OF_MULTIFD,
        );
        bound(format!("{name}: Godwit's pause is at most {PAUSE} of plain QEMU's"), of(By::Plain, pause), PAUSE);
    }
    for guest in Guest::SWEPT {
        let shares = others().filter_map(|link| share(entries, guest, By::Plain, link, seconds));
        let most = shares.reduce(f64::max);
        if most.is_some() {
            bound(
                format!("{}: Godwit's time is at most {TIME} of plain QEMU's on every other link", guest.name()),
                most,
                TIME,
            );
        }
    }
    bounds
}

/// Figures 12 and 13 of a guest.
fn swept(entries: &[Entry], guest: Guest, document: &mut Document) {
    let links: Vec<Link> = others().collect();
    if !links.iter().any(|link| By::SWEPT.iter().any(|by| moves(entries, guest, *by, *link).is_some())) {
        return;
    }
    let rows = [HERE].into_iter().chain(links).flat_map(|link| {
        By::SWEPT.into_iter().filter_map(move |by| {
            let row = moves(entries, guest, by, link)?.row(guest, by);
            Some([vec![link.mbit.to_string(), link.rtt_ms.to_string()], row[1..].to_vec()].concat())
        })
    });
    document.tables.push(Table {
        title: format!("{} by link (CloudNet's figures 12 and 13)", guest.name()),
        columns: ["Mbit/s", "RTT ms"].into_iter().chain(COLUMNS[1..].iter().copied()).map(str::to_owned).collect(),
        words: 3,
        rows: rows.collect(),
    });
    let figures: [(&str, &str, Figure); 3] = [("time", "s", seconds), ("pause", "ms", pause), ("data", "MiB", memory)];
    for (x, unit, links) in [
        ("bandwidth", "Mbit/s", RATES.map(|mbit| Link { mbit, ..HERE })),
        ("latency", "ms", ROUND_TRIPS.map(|rtt_ms| Link { rtt_ms, ..HERE })),
    ] {
        let at = |link: Link| f64::from(if x == "latency" { link.rtt_ms } else { link.mbit });
        for (what, in_unit, of) in figures {
            let line = |by: By| {
                let point = |link: &Link| Some((at(*link), moves(entries, guest, by, *link)?.median(of)?));
                (by.shown().to_owned(), links.iter().filter_map(point).collect())
            };
            document.drawings.push(Drawing {
                name: format!("memory-{what}-{x}-{}", guest.name()),
                title: format!("{}: {what} by {x}", guest.name()),
                x: format!("{x}, {unit}"),
                y: format!("{what}, {in_unit}"),
                lines: By::SWEPT.map(line).into(),
                drawn: None,
            });
        }
    }
}

const COLUMNS: [&str; 11] = [
    "guest",
    "by",
    "moved",
    "memory MiB",
    "s",
    "pause ms",
    "rounds",
    "QEMU from, s",
    "Godwit from, s",
    "QEMU to, s",
    "Godwit to, s",
];

pub(super) fn document(entries: &[Entry]) -> Document {
    let rows = Guest::ALL.into_iter().flat_map(|guest| {
        By::ALL.into_iter().filter_map(move |by| Some(moves(entries, guest, by, HERE)?.row(guest, by)))
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
        "Medians of {MOVES} moves, each to a site that has not seen the guest, and from the least to the most. Seconds are until the guest runs, less what the lab held it to \
         compare its memory. The last four columns: time on a processor, by program and side; a QEMU's has its emulated guest in it."
    ));
    document
}

#[cfg(test)]
mod tests {
    use super::super::tests::{entry, filled};
    use super::*;
    use crate::report::{BaselineReport, ProcessTime, WanBytes};
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

    fn ran(guest: Guest, by: By, link: Link, moves: Vec<MoveReport>) -> Entry {
        if by == By::Godwit {
            return entry(&name(guest, by, link), moves);
        }
        let mut entry = entry(&name(guest, by, link), vec![]);
        let baseline = |figures| BaselineReport { name: Baseline::Qemu, stop_rule: "after a while".into(), figures };
        entry.report.baselines = moves.into_iter().map(baseline).collect();
        entry
    }

    #[test]
    fn the_middle_move_is_held_against_the_others_and_a_failed_one_is_none() {
        let mut lost = moved(1, 1.0, 1.0);
        lost.outcome = Outcome::Failed;
        let ours = |most| vec![moved(10, 40.0, 5.0), moved(most, 40.0, 5.0), moved(80, 90.0, 9.0), lost.clone()];
        let judged = |most| -> Vec<Option<bool>> {
            let entries = [
                ran(Guest::Compile, By::Godwit, HERE, ours(most)),
                ran(Guest::Compile, By::Plain, HERE, vec![moved(100, 100.0, 20.0)]),
                ran(Guest::Compile, By::Multifd, HERE, vec![moved(30, 100.0, 20.0)]),
            ];
            document(&entries).bounds[..3].iter().map(|bound| bound.1).collect()
        };
        assert_eq!(judged(20), [Some(true); 3]);
        assert_eq!(judged(25), [Some(false), Some(false), Some(true)]);
        assert!(document(&[]).bounds.iter().all(|bound| bound.1.is_none()));
    }

    #[test]
    fn the_worst_link_counts() {
        let slow = Link { mbit: 1000, ..HERE };
        let far = Link { rtt_ms: 180, ..HERE };
        let judged = |s| {
            let entries = [
                ran(Guest::Idle, By::Godwit, far, vec![moved(1, 1.0, 5.0)]),
                ran(Guest::Idle, By::Plain, far, vec![moved(1, 1.0, 10.0)]),
                ran(Guest::Idle, By::Godwit, slow, vec![moved(1, 1.0, s)]),
                ran(Guest::Idle, By::Plain, slow, vec![moved(1, 1.0, 10.0)]),
            ];
            let document = document(&entries);
            assert_eq!(document.drawings.len(), 6);
            document.bounds.last().unwrap().1
        };
        assert_eq!((judged(10.4), judged(10.6)), (Some(true), Some(false)));
    }

    #[test]
    fn processors_are_counted_on_the_side_that_they_worked_for() {
        let time = |site: &str, program: &str, s| ProcessTime { site: site.into(), program: program.into(), s };
        let mut m = moved(1, 1.0, 1.0);
        (m.from, m.to) = ("s0".into(), "s1".into());
        m.processes = vec![time("s0", "godwit", 1.5), time("s0", "qemu-system-x86", 9.0), time("s1", "godwit", 2.5)];
        let row = Moves(vec![&m]).row(Guest::Idle, By::Godwit);
        assert_eq!(row[7..], ["9.0", "1.5", "", "2.5"]);
    }

    #[test]
    fn every_move_goes_to_a_site_that_has_not_seen_the_guest() {
        for cell in cells(Extent::Full) {
            let scenario = Scenario::parse(&cell.scenario, &cell.name).unwrap();
            let to: Vec<String> = (scenario.step.iter())
                .filter_map(|step| match &step.action {
                    Action::Move(order) => Some(order.to.get_ref().clone()),
                    _ => None,
                })
                .collect();
            assert_eq!(to.len(), MOVES);
            assert_eq!(to.iter().collect::<HashSet<_>>().len(), MOVES, "{to:?}");
            assert!(!to.contains(scenario.vm[0].site.get_ref()));
        }
    }
}
