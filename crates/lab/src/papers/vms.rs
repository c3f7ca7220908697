//! CloudNet, section 4.8: four guests that are consolidated over one link.
//!
//! Godwit has one order for all of them: they go one after another, and share the dictionary of their trust domain. The plain moves are
//! ordered at the same moment and go at once, as the paper's do: the link is theirs together. Guests are equal, and their disks are copies of one image, as
//! machines of one environment's are; what that brings is told apart, by what is named of others' memory, and by what each move brought onto
//! the link against the first, before which nobody had come.
//!
//! The paper has 1.7 GB of memory and 6 GB of disk a guest, 465 Mbit/s and 27 ms. Guests here are smaller, and so is the link.

use super::{Document, Drawing, Extent, Mover, PlanCell, Table, instead, remarks, report_of};
use crate::ledger::Entry;
use crate::report::{MoveReport, Outcome, Report, TogetherReport};
use crate::table::{figure, in_mib};

const VMS: [&str; 4] = ["a", "b", "c", "d"];
const RTT_MS: u32 = 27;
/// Godwit brings at most this share of the bytes of plain moves.
const BOUND: f64 = 0.5;

/// What the guests do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Work {
    /// Memory and disk are written to, a little.
    Records,
    /// A compilation in each.
    Kernel,
}

impl Work {
    const ALL: [Self; 2] = [Self::Records, Self::Kernel];

    fn name(self) -> &'static str {
        match self {
            Self::Records => "records",
            Self::Kernel => "kernel",
        }
    }

    fn link_mbit(self) -> u32 {
        match self {
            Self::Records => 100,
            Self::Kernel => 200,
        }
    }

    fn guest(self) -> &'static str {
        match self {
            Self::Records => "memory_mib = 128\ndisk_gib = 0.2\ndata_mib = 64",
            Self::Kernel => "image = \"debian\"\nmemory_mib = 448\ndisk_gib = 6.1",
        }
    }

    fn load(self) -> &'static str {
        match self {
            Self::Records => {
                "{ kind = \"memory\", pages_per_s = 200, working_set_mib = 8 },\n  \
                 { kind = \"disk\", kib_per_s = 32, working_set_mib = 8 },"
            }
            Self::Kernel => "{ kind = \"kernel-compile\" },",
        }
    }
}

fn name(work: Work, mover: Mover) -> String {
    format!("{}-{}", work.name(), mover.name())
}

fn cell(work: Work, mover: Mover) -> PlanCell {
    let vm = |name: &str| {
        format!(
            "[[vm]]\nname = \"{name}\"\nsite = \"texas\"\ndomain = \"developers\"\n{}\nload = [\n  {}\n  {{ kind = \"echo\", from = \"california\", per_s = 20 }},\n]\n\n",
            work.guest(),
            work.load()
        )
    };
    let vms: String = VMS.iter().map(|name| vm(name)).collect();
    let verified: String = VMS.iter().map(|vm| format!("[[step]]\nverify = {{ vm = \"{vm}\" }}\n")).collect();
    let named: Vec<String> = VMS.iter().map(|vm| format!("\"{vm}\"")).collect();
    let scenario = format!(
        "name = \"figures-vms\"\n{who}\nwarm_percent = 80\nmove_timeout_s = 3600\n\n\
         [wan]\nrate_mbit = {rate}\nrtt_ms = {RTT_MS}\n\n\
         [[site]]\nname = \"texas\"\n[[site]]\nname = \"illinois\"\n[[site]]\nname = \"california\"\n\n\
         {vms}[[step]]\nafter_s = 5\nmove = {{ vms = [{named}], to = \"illinois\" }}\n\
         [[step]]\nwait = {{ moves = true }}\n{verified}",
        who = mover.lines(),
        rate = work.link_mbit(),
        named = named.join(", "),
    );
    PlanCell { name: name(work, mover), scenario }
}

pub(super) fn cells(extent: Extent) -> Vec<PlanCell> {
    let works = if extent == Extent::Quick { &Work::ALL[..1] } else { &Work::ALL[..] };
    works.iter().flat_map(|work| Mover::ALL.map(|mover| cell(*work, mover))).collect()
}

/// A run in which all have arrived: its moves in the order in which their guests ran, and what they come to.
struct Run<'a> {
    mover: Mover,
    moves: Vec<&'a MoveReport>,
    all: &'a TogetherReport,
}

impl<'a> Run<'a> {
    fn of(report: &'a Report, mover: Mover) -> Option<Self> {
        let mut moves = mover.moves(report);
        moves.sort_by(|a, b| a.total_s.total_cmp(&b.total_s));
        let arrived = moves.len() == VMS.len() && moves.iter().all(|m| m.outcome == Outcome::Completed);
        let all = report.together.last().filter(|_| arrived)?;
        Some(Self { mover, moves, all })
    }

    /// Memory and disk.
    fn bytes(&self) -> u64 {
        self.all.bytes.memory + self.all.bytes.disk
    }

    fn pauses(&self) -> impl Iterator<Item = f64> {
        self.moves.iter().filter_map(|m| m.downtime_ms)
    }

    fn row(&self) -> Vec<String> {
        let mib = |bytes| figure(Some(in_mib(bytes)), 1);
        let pauses: Vec<f64> = self.pauses().collect();
        let mean = (!pauses.is_empty()).then(|| pauses.iter().sum::<f64>() / pauses.len() as f64);
        let raw: u64 = self.moves.iter().map(|m| m.raw_bytes).sum();
        vec![
            self.mover.shown().into(),
            mib(self.all.bytes.memory),
            mib(self.all.bytes.disk),
            mib(self.bytes()),
            mib(raw),
            figure(Some(self.all.total_s), 1),
            figure(mean, 0),
            figure(pauses.iter().copied().reduce(f64::max), 0),
        ]
    }

    /// A row for each guest. What Godwit counted is each move's own; of plain moves that go at once nobody can say which bytes were whose.
    fn guests(&self) -> Vec<Vec<String>> {
        let first = self.moves.first().and_then(|m| m.counted);
        let row = |(place, m): (usize, &&MoveReport)| {
            let mib = |bytes: Option<u64>| figure(bytes.map(in_mib), 1);
            let own = m.counted;
            let saved = first.zip(own).filter(|_| place > 0).map(|(first, own)| {
                let total = |b: crate::report::WanBytes| in_mib(b.memory + b.disk);
                total(first) - total(own)
            });
            vec![
                self.mover.shown().into(),
                m.vm.clone(),
                figure(Some(m.total_s), 1),
                figure(m.downtime_ms, 0),
                mib(own.map(|b| b.memory)),
                mib(own.map(|b| b.disk)),
                mib(own.map(|_| m.kept.of_others)),
                figure(saved, 1),
            ]
        };
        self.moves.iter().enumerate().map(row).collect()
    }

    /// What had crossed the path, by when.
    fn line(&self) -> (String, Vec<(f64, f64)>) {
        (self.mover.shown().into(), self.all.curve.iter().map(|(t_s, bytes)| (*t_s, in_mib(*bytes))).collect())
    }
}

fn columns<const N: usize>(titles: [&str; N]) -> Vec<String> {
    titles.map(str::to_owned).into()
}

pub(super) fn document(entries: &[Entry]) -> Document {
    let mut document = Document {
        title: "Four guests over one link (CloudNet, section 4.8)".into(),
        remarks: remarks(entries),
        ..Document::default()
    };
    for work in Work::ALL {
        let report = |mover| report_of(entries, &name(work, mover));
        let runs: Vec<Run<'_>> = Mover::ALL.iter().filter_map(|mover| Run::of(report(*mover)?, *mover)).collect();
        let [ours, plain] = Mover::ALL.map(|mover| runs.iter().find(|run| run.mover == mover));
        let share = ours.zip(plain).map(|(ours, plain)| ours.bytes() as f64 / plain.bytes().max(1) as f64);
        let found = share.map_or(String::new(), |share| format!(" (it is {share:.2})"));
        if work == Work::Records || !runs.is_empty() {
            document.bounds.push((
                format!(
                    "{}: memory and disks bring at most {BOUND} of the bytes of four plain moves{found}",
                    work.name()
                ),
                share.map(|share| share <= BOUND),
            ));
        }
        for mover in Mover::ALL {
            let unfinished = report(mover).filter(|report| Run::of(report, mover).is_none());
            let moves = unfinished.map(|report| mover.moves(report)).unwrap_or_default();
            let how = moves.iter().map(|m| format!("{} {}", m.vm, instead(Some(m))));
            if unfinished.is_some() {
                let how = how.collect::<Vec<_>>().join(", ");
                document.remarks.push(format!("{}: not all have arrived: {how}", name(work, mover)));
            }
        }
        if runs.is_empty() {
            continue;
        }
        document.tables.push(Table {
            title: format!("Four guests ({}) at {} Mbit/s and {RTT_MS} ms: all of them", work.name(), work.link_mbit()),
            columns: columns([
                "by",
                "memory MiB",
                "disk MiB",
                "both MiB",
                "raw MiB",
                "s",
                "mean pause ms",
                "longest ms",
            ]),
            words: 1,
            rows: runs.iter().map(Run::row).collect(),
        });
        document.tables.push(Table {
            title: "Each of them, in the order in which they ran there".into(),
            columns: columns([
                "by",
                "guest",
                "ran after s",
                "pause ms",
                "own memory MiB",
                "own disk MiB",
                "named of others' memory MiB",
                "less than the first MiB",
            ]),
            words: 2,
            rows: runs.iter().flat_map(Run::guests).collect(),
        });
        document.drawings.push(Drawing {
            name: format!("vms-{}", work.name()),
            title: format!("Four guests ({}): memory and disks over the link", work.name()),
            x: "seconds from the order".into(),
            y: "MiB".into(),
            lines: runs.iter().map(Run::line).collect(),
            drawn: None,
        });
    }
    document.remarks.extend([
        "Godwit's four go one after another, in one order; the plain ones go at once. Seconds are until the last guest runs, less what the lab \
         held guests to compare them; `ran after` has that in it."
            .into(),
        "The guests' disks are copies of one image with 16 MiB of their own. What references across guests saved: the memory that was \
         named of others', and, with the disks', what each brought less than the first, which is the like of it."
            .into(),
    ]);
    document
}

#[cfg(test)]
mod tests {
    use super::super::tests::{entry, filled};
    use super::*;
    use crate::report::{BaselineReport, Kept, WanBytes};
    use crate::scenario::{Baseline, Scenario};

    fn bytes(memory: u64, disk: u64) -> WanBytes {
        WanBytes { memory: memory << 20, disk: disk << 20, ..WanBytes::default() }
    }

    fn all(by: &str, memory: u64, disk: u64) -> TogetherReport {
        TogetherReport {
            by: by.into(),
            vms: VMS.map(str::to_owned).into(),
            from: "texas".into(),
            to: "illinois".into(),
            total_s: 40.0,
            bytes: bytes(memory, disk),
            curve: vec![(0.0, 0), (40.0, 1 << 20)],
        }
    }

    fn runs(ours: u64) -> [Entry; 2] {
        let moved = |(n, vm): (usize, &&str)| MoveReport {
            vm: (*vm).into(),
            total_s: 10.0 * (n + 1) as f64,
            counted: Some(if n == 0 { bytes(20, 30) } else { bytes(9, 1) }),
            kept: Kept { of_others: if n == 0 { 0 } else { 7 << 20 }, ..Kept::default() },
            ..filled()
        };
        let mut godwit = entry(&name(Work::Records, Mover::Godwit), VMS.iter().enumerate().map(moved).rev().collect());
        godwit.report.together = vec![all("godwit", ours, 10)];
        let mut qemu = entry(&name(Work::Records, Mover::Qemu), vec![]);
        let plain = |vm: &&str| MoveReport { vm: (*vm).into(), ..filled() };
        qemu.report.baselines = (VMS.iter().map(plain))
            .map(|figures| BaselineReport { name: Baseline::Qemu, stop_rule: String::new(), figures })
            .collect();
        qemu.report.together = vec![all("qemu", 100, 100)];
        [godwit, qemu]
    }

    #[test]
    fn the_bound_is_half_of_what_plain_moves_bring_and_needs_both() {
        let judged = |ours| document(&runs(ours)).bounds[0].1;
        assert_eq!((judged(90), judged(91)), (Some(true), Some(false)));
        assert_eq!(document(&runs(1)[..1]).bounds[0].1, None);
        assert_eq!(document(&[]).bounds[0].1, None);
    }

    #[test]
    fn a_guest_is_held_against_the_first_that_ran() {
        let guests = &document(&runs(50)).tables[1];
        let of =
            |row: usize| (guests.rows[row][1].as_str(), guests.rows[row][6].as_str(), guests.rows[row][7].as_str());
        assert_eq!((of(0), of(1)), (("a", "0.0", ""), ("b", "7.0", "40.0")));
        // Nobody counted a plain move's own bytes.
        assert_eq!(of(4), ("a", "", ""));
    }

    #[test]
    fn one_that_did_not_arrive_leaves_no_figures() {
        let mut runs = runs(50);
        runs[0].report.moves[2].outcome = Outcome::Failed;
        let document = document(&runs);
        assert_eq!(document.bounds[0].1, None);
        assert!(document.remarks.iter().any(|said| said.contains("not all have arrived")), "{:?}", document.remarks);
    }

    #[test]
    fn all_four_are_in_one_order() {
        for cell in cells(Extent::Full) {
            let scenario = Scenario::parse(&cell.scenario, &cell.name).unwrap();
            let orders = scenario.step.iter().filter_map(|step| match &step.action {
                crate::scenario::Action::Move(order) => Some(order.vms.len()),
                _ => None,
            });
            assert_eq!(orders.collect::<Vec<_>>(), [4]);
        }
    }
}
