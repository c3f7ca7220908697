//! The papers' own tables and figures, measured here: which runs they take, and what is made of them.
//!
//! A [`Paper`] is a list of [`PlanCell`]s, each a scenario of its own, written out as TOML; every run of one becomes an entry of the
//! [ledger](crate::ledger), so that an interrupted set goes on where it was, and the tables and drawings are made of whatever is there.
//! Guests are emulated and slow, and the machine is small: link, disk and memory are scaled together ([`Scale`]), and each document
//! says by how much.
//!
//! What can go wrong: a run cannot be made, or not all is well in it (its cell stays open, the others go on); a baseline's move does not end (the paper
//! has such cells too: `not finished`, with the time after which it was given up). A bound that one of Godwit's own moves does not live to see is not kept.

mod day;
mod document;
mod endpoints;
mod guest_io;
mod killed;
mod memory;
mod predict;
mod response;
mod three_tier;
mod vms;
mod way_back;
mod when;
mod wires;
mod writes;
mod xnbd;

pub use document::{Document, Drawing, Table};

use crate::ledger::Entry;
use crate::report::{MoveReport, Outcome, Report};
use clap::ValueEnum;
use std::fmt::Display;

/// A set of tables and figures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Paper {
    /// xNBD+, tables 1 and 2 and figure 13: idle, kernel compile and database, with a pre-cache, without, and by QEMU.
    Xnbd,
    /// xNBD+, figure 12: the time of a move by how fast the guest writes.
    Writes,
    /// The way back after writes to 1.5 % of a volume of 20 GiB.
    WayBack,
    /// The guest's own reads and writes with and without a pre-cache under way, in pairs.
    GuestIo,
    /// Akoush et al., figure 3: moves foretold and measured, over the dirty rate.
    Predict,
    /// A guest that writes and rests: the moment that HIST names beside all others.
    When,
    /// VirtualWire, section 5.3: three tiers and two firewalls, moved under load; split switches and a central one.
    ThreeTier,
    /// VirtualWire, figures 11 to 14: wires beside other ways between two hosts, many at once, and chains of switches.
    Wires,
    /// VirtualWire, table 1: what endpoints that move with their guest add to its pause.
    Endpoints,
    /// Two wired objects of two sites while extender, node and controller are killed and a site is cut off.
    Killed,
    /// CloudNet, section 4.8: four guests over one link, in one order and by four plain moves.
    Vms,
    /// There and back in a day, with the memory kept at home and without.
    Day,
    /// CloudNet, figure 8: what a database's client waits for its answers through a move, ours and a plain one.
    Response,
    /// CloudNet, table 1 and figures 12 and 13, live: memory by plain QEMU, by its several connections with zstd, and by Godwit, five times each.
    Memory,
}

/// How much of a set is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// Enough to see the bound that matters most.
    Quick,
    /// All of it.
    Full,
}

/// One run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlanCell {
    /// Its name in the ledger.
    pub name: String,
    /// The scenario.
    pub scenario: String,
}

impl Paper {
    /// Its name on the command line and, behind `figures-`, in the ledger.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Xnbd => "xnbd",
            Self::Writes => "writes",
            Self::WayBack => "way-back",
            Self::GuestIo => "guest-io",
            Self::Predict => "predict",
            Self::When => "when",
            Self::ThreeTier => "three-tier",
            Self::Wires => "wires",
            Self::Endpoints => "endpoints",
            Self::Killed => "killed",
            Self::Vms => "vms",
            Self::Day => "day",
            Self::Response => "response",
            Self::Memory => "memory",
        }
    }

    /// Its runs, those that show most first.
    #[must_use]
    pub fn cells(self, extent: Extent) -> Vec<PlanCell> {
        match self {
            Self::Xnbd => xnbd::cells(extent),
            Self::Writes => writes::cells(extent),
            Self::WayBack => way_back::cells(),
            Self::GuestIo => guest_io::cells(extent),
            Self::Predict => predict::cells(extent),
            Self::When => when::cells(extent),
            Self::ThreeTier => three_tier::cells(),
            Self::Wires => wires::cells(extent),
            Self::Endpoints => endpoints::cells(extent),
            Self::Killed => killed::cells(extent),
            Self::Vms => vms::cells(extent),
            Self::Day => day::cells(extent),
            Self::Response => response::cells(extent),
            Self::Memory => memory::cells(extent),
        }
    }

    /// What is made of the runs that are there, the last one of a cell counting.
    #[must_use]
    pub fn document(self, entries: &[Entry]) -> Document {
        match self {
            Self::Xnbd => xnbd::document(entries),
            Self::Writes => writes::document(entries),
            Self::WayBack => way_back::document(entries),
            Self::GuestIo => guest_io::document(entries),
            Self::Predict => predict::document(entries),
            Self::When => when::document(entries),
            Self::ThreeTier => three_tier::document(entries),
            Self::Wires => wires::document(entries),
            Self::Endpoints => endpoints::document(entries),
            Self::Killed => killed::document(entries),
            Self::Vms => vms::document(entries),
            Self::Day => day::document(entries),
            Self::Response => response::document(entries),
            Self::Memory => memory::document(entries),
        }
    }
}

/// By how much the papers' world was made smaller.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Scale(pub f64);

/// The steps of a move that nothing else goes on beside: `order` is its table.
fn move_steps(order: &str) -> String {
    format!("[[step]]\nmove = {order}\n[[step]]\nwait = {{ moves = true }}\n")
}

/// The step by which two sites' link is as that from then on.
fn link_step(between: [&str; 2], mbit: impl Display, rtt_ms: u32) -> String {
    let [a, b] = between;
    format!("[[step]]\nrate = {{ between = [\"{a}\", \"{b}\"], rate_mbit = {mbit}, rtt_ms = {rtt_ms} }}\n")
}

/// The steps by which the VM's disk goes ahead, over a fast link for the time's sake; then the link is as it is to be for what is measured.
fn ahead([from, to]: [&str; 2], timeout_s: u32, mbit: impl Display, rtt_ms: u32) -> String {
    let precache =
        format!("precache = {{ vm = \"vm\", to = \"{to}\", interval_s = 10, lag_s = 25, timeout_s = {timeout_s} }}");
    let (before, after) = (link_step([from, to], 400, 10), link_step([from, to], mbit, rtt_ms));
    format!("{before}[[step]]\n{precache}\n{after}")
}

/// The report of a cell.
fn report_of<'a>(entries: &'a [Entry], cell: &str) -> Option<&'a Report> {
    entries.iter().rfind(|entry| entry.key.cell == cell).map(|entry| &entry.report)
}

/// The only move of a cell, whoever made it.
fn move_of<'a>(entries: &'a [Entry], cell: &str) -> Option<&'a MoveReport> {
    let report = report_of(entries, cell)?;
    report.moves.last().or_else(|| report.baselines.last().map(|baseline| &baseline.figures))
}

/// How long a move took, and how much of it the disks: before the guest ran at the destination and after.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Parts {
    total_s: f64,
    memory_s: f64,
    disk_s: f64,
}

impl Parts {
    /// Of a move that has ended well.
    fn of(figures: &MoveReport) -> Option<Self> {
        if figures.outcome != Outcome::Completed {
            return None;
        }
        let disk = |name: &str| matches!(name, "copy-disk" | "disk" | "fill");
        let disk_s = figures.phases.iter().filter(|p| disk(&p.name)).map(|p| p.end_s - p.start_s).sum::<f64>();
        let total_s = figures.total_s;
        Some(Self { total_s, memory_s: (total_s - disk_s).max(0.0), disk_s: disk_s.min(total_s) })
    }
}

/// Those who move a guest of a figure: Godwit, and QEMU alone, plain or by several connections that pack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mover {
    Godwit,
    Qemu,
    Multifd,
}

impl Mover {
    const BOTH: [Self; 2] = [Self::Godwit, Self::Qemu];

    fn name(self) -> &'static str {
        match self {
            Self::Godwit => "godwit",
            Self::Qemu => "qemu",
            Self::Multifd => "multifd-zstd",
        }
    }

    fn shown(self) -> &'static str {
        match self {
            Self::Godwit => "Godwit",
            Self::Qemu => "QEMU, plain",
            Self::Multifd => "QEMU, multifd and zstd",
        }
    }

    /// The lines of a scenario that make it the only one who moves.
    fn lines(self) -> &'static str {
        match self {
            Self::Godwit => "godwit = true",
            Self::Qemu => "godwit = false\nbaseline = [\"qemu\"]",
            Self::Multifd => "godwit = false\nbaseline = [\"qemu-multifd-zstd\"]",
        }
    }

    /// Its moves in a report, in the order in which they were looked at.
    fn moves(self, report: &Report) -> Vec<&MoveReport> {
        match self {
            Self::Godwit => report.moves.iter().collect(),
            Self::Qemu | Self::Multifd => report.baselines.iter().map(|baseline| &baseline.figures).collect(),
        }
    }
}

/// How a move ended that has no figures.
fn instead(figures: Option<&MoveReport>) -> String {
    match figures {
        None => String::new(),
        Some(m) if m.outcome == Outcome::Cancelled => {
            format!("not finished in {:.0} s", m.ended_s.unwrap_or(m.total_s))
        }
        Some(m) if m.outcome == Outcome::Failed => "failed".into(),
        Some(_) => String::new(),
    }
}

/// What a bound comes to that these moves of Godwit's are for: those that got there say nothing for the others.
fn unless_lost<'a>(kept: Option<bool>, ours: impl IntoIterator<Item = &'a MoveReport>) -> Option<bool> {
    let lost = ours.into_iter().any(|figures| figures.outcome != Outcome::Completed);
    if lost { Some(false) } else { kept }
}

/// What a reader has to know of all runs: the versions they belong to, and what was amiss.
fn remarks(entries: &[Entry]) -> Vec<String> {
    let mut commits: Vec<&str> = entries.iter().map(|e| e.key.commit.as_str()).collect();
    commits.sort_unstable();
    commits.dedup();
    let mut remarks = vec![];
    if let Some(entry) = entries.last() {
        let host = &entry.report.host;
        remarks.push(format!(
            "Commit {}; {}, {} CPUs, guests under {}.",
            commits.join(", "),
            host.qemu,
            host.cpus,
            host.accel
        ));
    } else {
        remarks.push("No runs yet.".into());
    }
    for entry in entries {
        let baselines = entry.report.baselines.iter().map(|baseline| &baseline.figures);
        for figures in entry.report.moves.iter().chain(baselines) {
            if !figures.integrity.intact() {
                let found = crate::table::integrity(&figures.integrity);
                remarks.push(format!("{}: integrity {found}: {}", entry.key.cell, figures.integrity.notes.join("; ")));
            }
            if let Some(why) = figures.why.as_ref().filter(|_| figures.outcome == Outcome::Failed) {
                remarks.push(format!("{}: failed: {why}", entry.key.cell));
            }
        }
    }
    remarks
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::Key;
    use crate::report::Phase;
    use crate::scenario::Scenario;
    use crate::table::tests::{a_move, a_report};
    use std::collections::HashSet;

    const ALL: [Paper; 14] = [
        Paper::Xnbd,
        Paper::Writes,
        Paper::WayBack,
        Paper::GuestIo,
        Paper::Predict,
        Paper::When,
        Paper::ThreeTier,
        Paper::Wires,
        Paper::Endpoints,
        Paper::Killed,
        Paper::Vms,
        Paper::Day,
        Paper::Response,
        Paper::Memory,
    ];

    pub(super) fn entry(cell: &str, moves: Vec<MoveReport>) -> Entry {
        let key = Key { commit: "abc".into(), scenario: "figures".into(), cell: cell.into(), repeat: 0 };
        Entry { key, at_unix_s: 1, report: a_report(moves, vec![]) }
    }

    /// A move with a fill: 10 s until the guest runs, then 2 s of blocks.
    pub(super) fn filled() -> MoveReport {
        let phase = |name: &str, start_s, end_s| Phase { name: name.into(), start_s, end_s };
        MoveReport { total_s: 12.0, phases: vec![phase("memory", 0.0, 10.0), phase("fill", 10.0, 12.0)], ..a_move() }
    }

    #[test]
    fn every_cell_is_a_scenario_with_a_name_of_its_own() {
        for paper in ALL {
            for extent in [Extent::Quick, Extent::Full] {
                let mut names = HashSet::new();
                let cells = paper.cells(extent);
                assert!(!cells.is_empty());
                for cell in cells {
                    Scenario::parse(&cell.scenario, &cell.name).unwrap_or_else(|e| panic!("{e}\n{}", cell.scenario));
                    assert!(names.insert(cell.name.clone()), "{} is there twice", cell.name);
                }
            }
            let all: HashSet<String> = paper.cells(Extent::Full).into_iter().map(|cell| cell.name).collect();
            assert!(paper.cells(Extent::Quick).iter().all(|cell| all.contains(&cell.name)), "{paper:?}");
        }
    }

    #[test]
    fn a_document_without_runs_says_so_and_one_with_them_has_their_figures() {
        for paper in ALL {
            let empty = paper.document(&[]);
            assert!(empty.text().contains("No runs yet"), "{}", empty.text());
            for cell in paper.cells(Extent::Full) {
                let document = paper.document(&[entry(&cell.name, vec![filled(), filled()])]);
                assert!(document.json().is_object() && document.html().contains("<h1>"));
                document.drawings.iter().for_each(|drawing| assert!(drawing.svg().starts_with("<svg xmlns")));
            }
        }
    }

    #[test]
    fn the_disks_part_is_what_was_copied_before_and_what_followed() {
        assert_eq!(Parts::of(&filled()), Some(Parts { total_s: 12.0, memory_s: 10.0, disk_s: 2.0 }));
        assert_eq!(Parts::of(&MoveReport { outcome: Outcome::Cancelled, ..filled() }), None);
        let late = MoveReport { outcome: Outcome::Cancelled, ended_s: Some(900.0), ..filled() };
        assert_eq!(instead(Some(&late)), "not finished in 900 s");
    }
}
