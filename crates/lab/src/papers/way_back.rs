//! The way back: a guest goes to another site, writes to 1.5 % of a sparse volume of 20 GiB there, and comes home. What crosses the WAN
//! for its disk on the way back is at most what it wrote.

use super::{Document, PlanCell, Table, remarks, report_of, unless_lost};
use crate::ledger::Entry;
use crate::table::{figure, in_mib};

/// Written at the other site: 1.5 % of 20 GiB, MiB.
const WRITTEN_MIB: u64 = 307;
const CELL: &str = "20gib-1.5percent";
/// The scenario; `godwit-lab run` takes it as well.
const SCENARIO: &str = include_str!("../../../../scenarios/way-back.toml");

pub(super) fn cells() -> Vec<PlanCell> {
    vec![PlanCell { name: CELL.into(), scenario: SCENARIO.into() }]
}

pub(super) fn document(entries: &[Entry]) -> Document {
    let moves = report_of(entries, CELL).map(|report| report.moves.as_slice()).unwrap_or_default();
    let row = |m: &crate::report::MoveReport| {
        let way = format!("{} -> {}", m.from, m.to);
        let mib = |bytes| figure(Some(in_mib(bytes)), 1);
        vec![way, figure(Some(m.total_s), 1), mib(m.bytes.disk), mib(m.precached_bytes), mib(m.raw_bytes)]
    };
    let back = moves.get(1).filter(|m| m.outcome == crate::report::Outcome::Completed);
    let kept = (moves.len() > 1).then(|| back.is_some_and(|m| m.bytes.disk <= WRITTEN_MIB << 20));
    let found = back.map_or(String::new(), |m| format!(" (it is {:.1} MiB)", in_mib(m.bytes.disk)));
    Document {
        title: "The way back".into(),
        tables: vec![Table {
            title: format!("A volume of 20 GiB, {WRITTEN_MIB} MiB of it written at the other site"),
            columns: ["way", "total s", "disk MiB", "was there MiB", "raw MiB"].map(str::to_owned).into(),
            words: 1,
            rows: moves.iter().map(row).collect(),
        }],
        bounds: vec![(
            format!("the disk's bytes on the way back are at most the {WRITTEN_MIB} MiB written{found}"),
            unless_lost(kept, moves),
        )],
        remarks: remarks(entries),
        ..Document::default()
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{entry, filled};
    use super::*;
    use crate::report::{MoveReport, Outcome, WanBytes};

    #[test]
    fn the_bound_is_what_the_guest_wrote() {
        let back = |disk| MoveReport { bytes: WanBytes { disk, ..WanBytes::default() }, ..filled() };
        let judged = |disk| document(&[entry(CELL, vec![filled(), back(disk)])]).bounds[0].1;
        assert_eq!(judged(307 << 20), Some(true));
        assert_eq!(judged((307 << 20) + 1), Some(false));
        let lost = MoveReport { outcome: Outcome::Failed, ..filled() };
        assert_eq!(document(&[entry(CELL, vec![lost])]).bounds[0].1, Some(false));
        assert_eq!(document(&[]).bounds[0].1, None);
    }
}
