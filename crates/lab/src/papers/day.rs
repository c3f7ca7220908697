//! There and back in a day: a guest goes to another site, works there for a while, and comes home. Once its old host keeps its memory
//! meanwhile (`move --keep-checkpoint`), once it does not. Its disk it has in both: what is compared is the memory of the way back.

use super::{Document, Extent, PlanCell, Table, instead, remarks, report_of, unless_lost};
use crate::ledger::Entry;
use crate::report::{MoveReport, Outcome, Report};
use crate::table::{figure, in_mib};

const LINK_MBIT: u32 = 100;
const RTT_MS: u32 = 27;

/// A day: how much memory the guest has, and how long it works at the other site.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Day {
    memory_mib: u32,
    works_s: u32,
}

const DAYS: [Day; 2] = [Day { memory_mib: 192, works_s: 30 }, Day { memory_mib: 512, works_s: 300 }];

/// Whether the old host keeps the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Keeps {
    Checkpoint,
    Nothing,
}

impl Keeps {
    const ALL: [Self; 2] = [Self::Checkpoint, Self::Nothing];

    fn name(self) -> &'static str {
        match self {
            Self::Checkpoint => "checkpoint",
            Self::Nothing => "nothing",
        }
    }
}

fn name(day: Day, keeps: Keeps) -> String {
    format!("{}mib-{}s-{}", day.memory_mib, day.works_s, keeps.name())
}

fn cell(day: Day, keeps: Keeps) -> PlanCell {
    let scenario = format!(
        r#"name = "figures-day"
warm_percent = 85

[wan]
rate_mbit = {LINK_MBIT}
rtt_ms = {RTT_MS}

[[site]]
name = "home"
[[site]]
name = "away"
[[site]]
name = "clients"

[[vm]]
name = "vm"
site = "home"
memory_mib = {memory}
disk_gib = 0.25
data_mib = 64
load = [
  {{ kind = "memory", pages_per_s = 300, working_set_mib = 16 }},
  {{ kind = "disk", kib_per_s = 64, working_set_mib = 16 }},
  {{ kind = "echo", from = "clients", per_s = 50 }},
]

[[step]]
after_s = 5
move = {{ vm = "vm", to = "away", keep_checkpoint = {keeps} }}
[[step]]
verify = {{ vm = "vm" }}
[[step]]
wait = {{ s = {works} }}
[[step]]
move = {{ vm = "vm", to = "home" }}
[[step]]
verify = {{ vm = "vm" }}
"#,
        memory = day.memory_mib,
        works = day.works_s,
        keeps = keeps == Keeps::Checkpoint,
    );
    PlanCell { name: name(day, keeps), scenario }
}

pub(super) fn cells(extent: Extent) -> Vec<PlanCell> {
    let days = if extent == Extent::Quick { &DAYS[..1] } else { &DAYS[..] };
    days.iter().flat_map(|day| Keeps::ALL.map(|keeps| cell(*day, keeps))).collect()
}

/// The way back, if the guest came home.
fn back(report: Option<&Report>) -> Option<&MoveReport> {
    report?.moves.get(1).filter(|m| m.outcome == Outcome::Completed)
}

fn row(keeps: Keeps, m: &MoveReport) -> Vec<String> {
    let mib = |bytes| figure(Some(in_mib(bytes)), 1);
    let kept = match keeps {
        Keeps::Checkpoint => "with",
        Keeps::Nothing => "without",
    };
    vec![
        kept.into(),
        format!("{} -> {}", m.from, m.to),
        mib(m.bytes.memory),
        mib(m.bytes.disk),
        mib(m.kept.memory),
        figure(Some(m.total_s - m.held_ms / 1e3), 1),
        figure(m.downtime_ms, 0),
        instead(Some(m)),
    ]
}

pub(super) fn document(entries: &[Entry]) -> Document {
    let mut document = Document {
        title: "There and back in a day, with a checkpoint and without".into(),
        remarks: remarks(entries),
        ..Document::default()
    };
    for day in DAYS {
        let of = |keeps| report_of(entries, &name(day, keeps));
        let rows: Vec<_> = (Keeps::ALL.iter())
            .flat_map(|keeps| of(*keeps).into_iter().flat_map(|report| report.moves.iter().map(|m| row(*keeps, m))))
            .collect();
        let both = back(of(Keeps::Checkpoint)).zip(back(of(Keeps::Nothing)));
        if day == DAYS[0] || !rows.is_empty() {
            let found = both.map_or(String::new(), |(with, without)| {
                format!(" ({:.1} and {:.1} MiB)", in_mib(with.bytes.memory), in_mib(without.bytes.memory))
            });
            document.bounds.push((
                format!(
                    "{} MiB: memory's bytes of the way back are less with a checkpoint than without{found}",
                    day.memory_mib
                ),
                unless_lost(
                    both.map(|(with, without)| with.bytes.memory < without.bytes.memory),
                    Keeps::ALL.into_iter().filter_map(of).flat_map(|report| &report.moves),
                ),
            ));
        }
        if !rows.is_empty() {
            document.tables.push(Table {
                title: format!(
                    "{} MiB of memory, {} s of work away, at {LINK_MBIT} Mbit/s and {RTT_MS} ms",
                    day.memory_mib, day.works_s
                ),
                columns: [
                    "checkpoint",
                    "way",
                    "memory MiB",
                    "disk MiB",
                    "memory that was there MiB",
                    "s",
                    "pause ms",
                    "",
                ]
                .map(str::to_owned)
                .into(),
                words: 2,
                rows,
            });
        }
    }
    document.remarks.push("Seconds are until the guest runs, less what the lab held it to compare its memory.".into());
    document
}

#[cfg(test)]
mod tests {
    use super::super::tests::{entry, filled};
    use super::*;
    use crate::report::WanBytes;
    use crate::scenario::{Action, Scenario};

    #[test]
    fn the_ways_back_are_compared_and_one_that_failed_breaks_the_bound() {
        let moved = |memory| MoveReport { bytes: WanBytes { memory, ..WanBytes::default() }, ..filled() };
        let day = |keeps, memory| entry(&name(DAYS[0], keeps), vec![moved(900), moved(memory)]);
        let judged =
            |with, without| document(&[day(Keeps::Checkpoint, with), day(Keeps::Nothing, without)]).bounds[0].1;
        assert_eq!((judged(10, 11), judged(11, 11)), (Some(true), Some(false)));
        let mut stays = day(Keeps::Checkpoint, 10);
        stays.report.moves[1].outcome = Outcome::Failed;
        assert_eq!(document(&[stays, day(Keeps::Nothing, 11)]).bounds[0].1, Some(false));
        assert_eq!(document(&[]).bounds[0].1, None);
    }

    #[test]
    fn only_one_of_the_two_keeps_its_memory_and_only_on_the_way_there() {
        let asks = |cell: &PlanCell| -> Vec<bool> {
            let steps = Scenario::parse(&cell.scenario, &cell.name).unwrap().step;
            let keeps = steps.iter().filter_map(|step| match &step.action {
                Action::Move(order) => Some(order.keep_checkpoint),
                _ => None,
            });
            keeps.collect()
        };
        let cells = cells(Extent::Quick);
        assert_eq!([asks(&cells[0]), asks(&cells[1])], [[true, false], [false, false]]);
    }
}
