//! CloudNet, section 4.8: four guests that are consolidated over one link.
//!
//! Godwit has one order for all of them: they go one after another, and share the dictionary of their trust domain. The plain moves are
//! ordered at the same moment and go at once, as the paper's do: the link is theirs together. Guests are equal, and their disks are copies of one image, as
//! machines of one environment's are. What that brings is told apart: by the same order for guests that are each in a trust domain of its own, and
//! so share nothing, and by what is named of others' memory.
//!
//! The paper has 1.7 GB of memory and 6 GB of disk a guest, 465 Mbit/s and 27 ms. Guests here are smaller, and so is the link.

use super::{Document, Drawing, Extent, Mover, PlanCell, Table, instead, remarks, report_of, unless_lost};
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

/// How the four go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// By Godwit, in one trust domain.
    Shared,
    /// By Godwit, each in a trust domain of its own.
    Apart,
    /// Plain.
    Plain,
}

impl Way {
    const ALL: [Self; 3] = [Self::Shared, Self::Plain, Self::Apart];

    fn mover(self) -> Mover {
        match self {
            Self::Shared | Self::Apart => Mover::Godwit,
            Self::Plain => Mover::Qemu,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Apart => "apart",
            way => way.mover().name(),
        }
    }

    fn shown(self) -> &'static str {
        match self {
            Self::Apart => "Godwit, no domain in common",
            way => way.mover().shown(),
        }
    }

    fn domain(self, vm: &str) -> String {
        if self == Self::Apart { format!("developers-{vm}") } else { "developers".to_owned() }
    }
}

fn name(work: Work, way: Way) -> String {
    format!("{}-{}", work.name(), way.name())
}

fn cell(work: Work, way: Way) -> PlanCell {
    let vm = |name: &str| {
        format!(
            "[[vm]]\nname = \"{name}\"\nsite = \"texas\"\ndomain = \"{}\"\n{}\nload = [\n  {}\n  {{ kind = \"echo\", from = \"california\", per_s = 20 }},\n]\n\n",
            way.domain(name),
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
        who = way.mover().lines(),
        rate = work.link_mbit(),
        named = named.join(", "),
    );
    PlanCell { name: name(work, way), scenario }
}

pub(super) fn cells(extent: Extent) -> Vec<PlanCell> {
    let works = if extent == Extent::Quick { &Work::ALL[..1] } else { &Work::ALL[..] };
    works.iter().flat_map(|work| Way::ALL.map(|way| cell(*work, way))).collect()
}

/// A run in which all have arrived: its moves in the order in which their guests ran, and what they come to.
struct Run<'a> {
    way: Way,
    moves: Vec<&'a MoveReport>,
    all: &'a TogetherReport,
}

impl<'a> Run<'a> {
    fn of(report: &'a Report, way: Way) -> Option<Self> {
        let mut moves = way.mover().moves(report);
        moves.sort_by(|a, b| a.total_s.total_cmp(&b.total_s));
        let arrived = moves.len() == VMS.len() && moves.iter().all(|m| m.outcome == Outcome::Completed);
        let all = report.together.last().filter(|_| arrived)?;
        Some(Self { way, moves, all })
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
            self.way.shown().into(),
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
                self.way.shown().into(),
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
        (self.way.shown().into(), self.all.curve.iter().map(|(t_s, bytes)| (*t_s, in_mib(*bytes))).collect())
    }
}

fn columns<const N: usize>(titles: [&str; N]) -> Vec<String> {
    titles.map(str::to_owned).into()
}

/// What references across guests saved: the same order, less by so much than where nobody had anything in common.
fn saved(work: Work, ours: &Run<'_>, apart: &Run<'_>) -> String {
    let less = |of: fn(&crate::report::WanBytes) -> u64| in_mib(of(&apart.all.bytes)) - in_mib(of(&ours.all.bytes));
    format!(
        "{}: references across guests saved {:.1} MiB of memory's bytes and {:.1} MiB of the disks' on the link.",
        work.name(),
        less(|bytes| bytes.memory),
        less(|bytes| bytes.disk)
    )
}

pub(super) fn document(entries: &[Entry]) -> Document {
    let mut document = Document {
        title: "Four guests over one link (CloudNet, section 4.8)".into(),
        remarks: remarks(entries),
        ..Document::default()
    };
    for work in Work::ALL {
        let report = |way| report_of(entries, &name(work, way));
        let runs: Vec<Run<'_>> = Way::ALL.iter().filter_map(|way| Run::of(report(*way)?, *way)).collect();
        let [ours, plain, apart] = Way::ALL.map(|way| runs.iter().find(|run| run.way == way));
        let share = ours.zip(plain).map(|(ours, plain)| ours.bytes() as f64 / plain.bytes().max(1) as f64);
        let found = share.map_or(String::new(), |share| format!(" (it is {share:.2})"));
        document.remarks.extend(ours.zip(apart).map(|(ours, apart)| saved(work, ours, apart)));
        if work == Work::Records || Way::ALL.iter().any(|way| report(*way).is_some()) {
            document.bounds.push((
                format!(
                    "{}: memory and disks bring at most {BOUND} of the bytes of four plain moves{found}",
                    work.name()
                ),
                unless_lost(
                    share.map(|share| share <= BOUND),
                    report(Way::Shared).into_iter().flat_map(|report| &report.moves),
                ),
            ));
        }
        for way in Way::ALL {
            if let Some(report) = report(way).filter(|report| Run::of(report, way).is_none()) {
                let moves = way.mover().moves(report);
                let how: Vec<String> = moves.iter().map(|m| format!("{} {}", m.vm, instead(Some(m)))).collect();
                document.remarks.push(format!("{}: not all have arrived: {}", name(work, way), how.join(", ")));
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
        "The guests' disks are copies of one image with 16 MiB of their own, on which nobody else has anything.".into(),
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
        let mut godwit = entry(&name(Work::Records, Way::Shared), VMS.iter().enumerate().map(moved).rev().collect());
        godwit.report.together = vec![all("godwit", ours, 10)];
        let mut qemu = entry(&name(Work::Records, Way::Plain), vec![]);
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
        assert_eq!((of(0), of(1)), (("a", "0.0", "-"), ("b", "7.0", "40.0")));
        // Nobody counted a plain move's own bytes.
        assert_eq!(of(4), ("a", "-", "-"));
    }

    #[test]
    fn what_was_saved_is_the_difference_to_guests_that_share_nothing() {
        let mut all = runs(50).to_vec();
        assert!(!document(&all).remarks.iter().any(|said| said.contains("saved")));
        let mut apart = all[0].clone();
        apart.key.cell = name(Work::Records, Way::Apart);
        apart.report.together[0].bytes = bytes(120, 95);
        all.push(apart);
        let said = document(&all).remarks;
        let said = said.iter().find(|said| said.contains("saved")).unwrap();
        assert!(said.contains("70.0 MiB of memory's") && said.contains("85.0 MiB of the disks'"), "{said}");
    }

    #[test]
    fn guests_of_one_domain_share_and_the_others_have_a_domain_each() {
        let domains = |way| {
            let cell = cell(Work::Records, way);
            let scenario = Scenario::parse(&cell.scenario, &cell.name).unwrap();
            let all = scenario.vm.iter().map(|vm| vm.domain.as_ref().unwrap().get_ref().clone());
            all.collect::<std::collections::HashSet<_>>().len()
        };
        assert_eq!([domains(Way::Shared), domains(Way::Apart)], [1, 4]);
    }

    #[test]
    fn one_that_did_not_arrive_leaves_no_figures() {
        let mut runs = runs(50);
        runs[0].report.moves[2].outcome = Outcome::Failed;
        let document = document(&runs);
        assert_eq!(document.bounds[0].1, Some(false), "it is Godwit's");
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
