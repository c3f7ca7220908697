//! VirtualWire, table 1: what endpoints that move with their guest add to its pause. Three guests take turns, there and back: one on a
//! switch that is there at both sites, one with four more interfaces, and one with four more whose wires lead to a third site.
//!
//! And what its peers see of such a move: datagrams and a session between a guest and a router at the third site, over a wire, through
//! moves there and back. A datagram that is lost while the guest stands, or that was on its way when it stopped, is the pause's; any other
//! would be re-homing's.
//!
//! The paper had the same guest twice, its interface on a bridged network and on a connector. The guest in the middle is for that: what it
//! stands longer than the first is what the hypervisor takes for four more devices, and what the last stands longer than it is the wires'.

use super::guest_io::upper_bound;
use super::{Document, Extent, PlanCell, Table, remarks, report_of, unless_lost};
use crate::ledger::Entry;
use crate::report::{IncidentReport, MoveReport, Outcome, Report};
use crate::scenario::FlowKind;
use crate::table::{figure, median};
use std::fmt::Write as _;

/// What the paper found: 1.3 s instead of 1.0.
const PAPER: f64 = 1.3;
const WITH: &str = "with";
const INTERFACES: &str = "interfaces";
const WITHOUT: &str = "without";
const GUESTS: [&str; 3] = [WITH, INTERFACES, WITHOUT];
const WIRES: usize = 4;
/// Each guest is first, second and last as often as the others, both ways.
const QUICK_PAIRS: usize = 6;
const FULL_PAIRS: usize = 18;

/// The run with flows, and how often its guest moves.
const FLOWS: &str = "flows";
const FLOWS_MOVES: usize = 6;

fn name(pairs: usize) -> String {
    format!("{pairs}-pairs")
}

fn vm(name: &str, nics: &str) -> String {
    format!(
        "[[vm]]\nname = \"{name}\"\nsite = \"a\"\nmemory_mib = 128\ndisk_gib = 0.125\ndata_mib = 64\nnic = [{nics}]\nload = [\n  \
         {{ kind = \"memory\", pages_per_s = 200, working_set_mib = 8 }},\n  {{ kind = \"echo\", from = \"c\", per_s = 50 }},\n]\n\n"
    )
}

fn cell(pairs: usize) -> PlanCell {
    let mut scenario = format!(
        "name = \"figures-endpoints-{pairs}\"\nwarm_percent = 30\n\n[wan]\nrate_mbit = 200\nrtt_ms = 10\n\n[[site]]\nname = \"a\"\n\
         [[site]]\nname = \"b\"\n[[site]]\nname = \"c\"\n\n"
    );
    let nics = |net: u8| {
        let nics: Vec<String> = (1..=WIRES).map(|n| format!("{{ address = \"10.{net}.{n}.1/24\" }}")).collect();
        nics.join(", ")
    };
    scenario += &vm(WITH, &nics(20));
    scenario += &vm(INTERFACES, &nics(30));
    scenario += &vm(WITHOUT, "");
    // Writing to a String cannot fail.
    let _ = write!(scenario, "[[component]]\nname = \"sw\"\nkind = \"switch\"\nsite = \"c\"\nports = {WIRES}\n\n");
    for n in 1..=WIRES {
        let _ = writeln!(scenario, "[[wire]]\nends = [\"{WITH}:eth{n}\", \"sw:p{n}\"]");
    }
    for pair in 0..pairs {
        let to = if pair % 2 == 0 { "b" } else { "a" };
        // Whoever is first has another machine than whoever is second: they take turns.
        let mut order = GUESTS;
        order.rotate_left(pair / 2 % GUESTS.len());
        for vm in order {
            let _ = write!(
                scenario,
                "\n[[step]]\nmove = {{ vm = \"{vm}\", to = \"{to}\" }}\n[[step]]\nwait = {{ moves = true, s = 1 }}\n"
            );
        }
    }
    PlanCell { name: name(pairs), scenario }
}

fn flows_cell() -> PlanCell {
    let mut scenario = String::from(
        "name = \"figures-endpoints-flows\"\nwarm_percent = 30\n\n[wan]\nrate_mbit = 200\nrtt_ms = 10\n\n[[site]]\nname = \"a\"\n\
         [[site]]\nname = \"b\"\n[[site]]\nname = \"c\"\n\n",
    );
    scenario += &vm(WITH, "{ address = \"10.20.1.2/24\" }");
    scenario += "[[component]]\nname = \"router\"\nkind = \"router\"\nsite = \"c\"\nports = 1\n\
                 config = '''\n[[port]]\nnumber = 1\naddresses = [\"10.20.1.1/24\"]\n'''\n\n";
    // Writing to a String cannot fail.
    let _ = write!(scenario, "[[wire]]\nends = [\"{WITH}:eth1\", \"router:p1\"]\n\n");
    for kind in [FlowKind::Udp, FlowKind::Tcp] {
        let _ =
            write!(scenario, "[[flow]]\nfrom = \"router\"\nto = \"{WITH}:eth1\"\nkind = \"{kind}\"\nper_s = 200\n\n");
    }
    for n in 0..FLOWS_MOVES {
        let to = if n % 2 == 0 { "b" } else { "a" };
        // Nobody holds the guest to compare its memory: its peers would see that. In the other runs each move is compared.
        let _ = write!(
            scenario,
            "[[step]]\nafter_s = 5\nmove = {{ vm = \"{WITH}\", to = \"{to}\", compare = false }}\n\
             [[step]]\nwait = {{ moves = true }}\n[[step]]\nwhole = {{}}\n"
        );
    }
    PlanCell { name: FLOWS.into(), scenario }
}

pub(super) fn cells(extent: Extent) -> Vec<PlanCell> {
    match extent {
        Extent::Quick => vec![cell(QUICK_PAIRS), flows_cell()],
        Extent::Full => vec![cell(QUICK_PAIRS), flows_cell(), cell(FULL_PAIRS)],
    }
}

/// What flows had in each stretch of their run.
fn flows_table(report: &Report) -> Table {
    let count = |n: Option<u64>| n.map_or(String::new(), |n| n.to_string());
    let mut moves = moves(report, WITH);
    let row = |incident: &IncidentReport| {
        let of = |kind: FlowKind| incident.flows.iter().find(|flow| flow.kind == kind);
        let (udp, tcp) = (of(FlowKind::Udp), of(FlowKind::Tcp));
        let moved = (!incident.what.is_empty()).then(|| moves.next()).flatten();
        vec![
            if incident.what.is_empty() { "nothing".to_owned() } else { incident.what.join("; ") },
            figure(moved.and_then(|m| m.downtime_ms), 0),
            figure(udp.map(|flow| flow.silent_ms), 0),
            count(udp.map(|flow| flow.sent)),
            count(udp.and_then(|flow| flow.lost)),
            count(udp.and_then(|flow| flow.lost_awake)),
            figure(tcp.map(|flow| flow.silent_ms), 0),
        ]
    };
    Table {
        title: "200 datagrams and 200 numbers of a TCP session a second over a wire, there and back".into(),
        columns: [
            "what was done",
            "pause ms",
            "UDP silent ms",
            "sent",
            "lost",
            "of these not in the pause",
            "TCP silent ms",
        ]
        .map(str::to_owned)
        .into(),
        words: 1,
        rows: report.incidents.iter().map(row).collect(),
    }
}

/// Whether re-homing loses nothing, and sessions live.
fn flows_bound(report: &Report) -> (String, Option<bool>) {
    let flows = || report.incidents.iter().flat_map(|incident| &incident.flows);
    let lost: u64 = flows().filter_map(|flow| flow.lost_awake).sum();
    let lives = flows().all(|flow| flow.broke.is_none());
    let text = format!("no datagram is lost but in the pauses ({lost}), and the session lives");
    (text, unless_lost((!report.incidents.is_empty()).then_some(lost == 0 && lives), &report.moves))
}

/// A guest's moves that ended well, in order.
fn moves<'a>(report: &'a Report, vm: &'a str) -> impl Iterator<Item = &'a MoveReport> {
    report.moves.iter().filter(move |m| m.vm == vm && m.outcome == Outcome::Completed)
}

/// The pairs' ratios of pauses, of the guest with wires to another's.
fn ratios(report: &Report, other: &str) -> Vec<f64> {
    let pause = |m: &MoveReport| m.downtime_ms.filter(|ms| *ms > 0.0);
    let pairs = moves(report, WITH).zip(moves(report, other));
    pairs.filter_map(|(with, other)| Some(pause(with)? / pause(other)?)).collect()
}

/// Whether the pause with wires is within the paper's, beside that of `other`, which `title` says.
fn bound(report: &Report, pairs: usize, other: &str, title: &str) -> (String, Option<bool>) {
    let found = upper_bound(&ratios(report, other));
    let text = found.map_or(String::new(), |(mean, most)| format!(" ({mean:.3}, 95 % bound {most:.3})"));
    let title = format!("{pairs} pairs: the pause with four wires is less than {PAPER} of {title}{text}");
    (title, unless_lost(found.map(|(_, most)| most < PAPER), &report.moves))
}

fn row(report: &Report, vm: &str, title: &str) -> Vec<String> {
    let of = |what: fn(&MoveReport) -> Option<f64>| median(moves(report, vm).filter_map(what));
    vec![
        title.to_owned(),
        moves(report, vm).count().to_string(),
        figure(of(|m| m.downtime_ms), 0),
        figure(of(|m| m.outage_ms.map(|ms| ms - m.held_ms)), 0),
        figure(of(|m| Some(m.total_s)), 1),
        figure(of(|m| m.ended_s), 1),
    ]
}

pub(super) fn document(entries: &[Entry]) -> Document {
    let (mut tables, mut bounds) = (vec![], vec![]);
    for pairs in [QUICK_PAIRS, FULL_PAIRS] {
        let Some(report) = report_of(entries, &name(pairs)) else { continue };
        tables.push(Table {
            title: format!("{pairs} pairs of moves, medians"),
            columns: ["interfaces", "moves", "pause ms", "client's silence ms", "until it runs s", "until the end s"]
                .map(str::to_owned)
                .into(),
            words: 1,
            rows: vec![
                row(report, WITHOUT, "one, on a switch that is there at both sites"),
                row(report, INTERFACES, "four more, without wires"),
                row(report, WITH, "four more, with wires to a third site"),
            ],
        });
        bounds.push(bound(report, pairs, WITHOUT, "that without"));
        bounds.push(bound(report, pairs, INTERFACES, "that of the same interfaces without wires"));
    }
    if let Some(report) = report_of(entries, FLOWS) {
        tables.push(flows_table(report));
        bounds.push(flows_bound(report));
    }
    if bounds.is_empty() {
        bounds.push((format!("the pause with four wires is less than {PAPER} of that without"), None));
    }
    Document {
        title: "Endpoints that move with their guest (VirtualWire, table 1)".into(),
        tables,
        bounds,
        remarks: remarks(entries),
        ..Document::default()
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{entry, filled};
    use super::*;
    use crate::report::FlowSeen;

    #[test]
    fn the_pauses_of_pairs_are_compared_also_with_those_of_as_many_interfaces() {
        let moved = |vm: &str, ms: f64| MoveReport { vm: vm.into(), downtime_ms: Some(ms), ..filled() };
        let entries = |with: f64| {
            let round = |n: u32| {
                let n = f64::from(n);
                [moved(WITH, with + n), moved(INTERFACES, 125.0 + n), moved(WITHOUT, 100.0 + n)]
            };
            vec![entry(&name(QUICK_PAIRS), (0..6).flat_map(round).collect())]
        };
        let judged = |with| document(&entries(with)).bounds.into_iter().map(|(_, held)| held).collect::<Vec<_>>();
        assert_eq!(judged(103.0), [Some(true), Some(true)]);
        assert_eq!(judged(140.0), [Some(false), Some(true)]);
        assert_eq!(judged(170.0), [Some(false), Some(false)]);
        // Without it the others would not be pairs any more.
        let mut lost = entries(103.0);
        lost[0].report.moves[0].outcome = Outcome::Failed;
        assert!(document(&lost).bounds.iter().all(|(_, held)| *held == Some(false)));
        assert_eq!(document(&[]).bounds[0].1, None);
    }

    #[test]
    fn a_datagram_that_is_lost_outside_of_a_pause_breaks_the_bound() {
        let judged = |lost_awake: u64, broke: Option<&str>| {
            let seen = |kind, lost: Option<u64>| FlowSeen {
                flow: "router to with:eth1".into(),
                kind,
                sent: 1000,
                lost,
                lost_awake: lost.map(|_| lost_awake),
                silent_ms: 130.0,
                back_s: Some(1.0),
                broke: broke.map(str::to_owned),
            };
            let mut found = entry(FLOWS, vec![MoveReport { vm: WITH.into(), ..filled() }]);
            let incident = |what: &[&str]| IncidentReport {
                what: what.iter().map(|what| (*what).to_owned()).collect(),
                at_s: 5.0,
                until_s: 10.0,
                whole_s: Some(2.0),
                flows: vec![seen(FlowKind::Udp, Some(22)), seen(FlowKind::Tcp, None)],
            };
            found.report.incidents = vec![incident(&["with moved to b"])];
            let document = document(&[found]);
            assert_eq!(document.tables[0].rows[0][2..5], ["130", "1000", "22"]);
            document.bounds[0].1
        };
        assert_eq!(
            (judged(0, None), judged(1, None), judged(0, Some("closed"))),
            (Some(true), Some(false), Some(false))
        );
    }

    #[test]
    fn each_guest_is_first_second_and_last_as_often_as_the_others_both_ways() {
        for pairs in [QUICK_PAIRS, FULL_PAIRS] {
            let scenario = cell(pairs).scenario;
            let orders = scenario.lines().filter_map(|line| line.strip_prefix("move = "));
            let mut seen = std::collections::BTreeMap::new();
            for (at, order) in orders.enumerate() {
                *seen.entry((at % GUESTS.len(), order.to_owned())).or_insert(0) += 1;
            }
            assert_eq!(seen.len(), GUESTS.len() * GUESTS.len() * 2, "{seen:?}");
            assert!(seen.values().all(|times| *times == pairs / (2 * GUESTS.len())), "{seen:?}");
        }
    }
}
