//! What goes on, what comes back and how fast, when an extender's program, a node or the controller is killed, or a site is cut off: a guest at one
//! site and a router at another, a wire between them, and a steady flow of datagrams and a session over it.
//!
//! Once with two carriers a site, each pair of them with a tunnel of its own, so that another tunnel takes over; and once with one, where
//! nothing can. The controller is at a third site. Nothing is asserted in seconds: what has to hold is what goes on without the one that
//! was killed.

use super::{Document, Extent, PlanCell, Table, remarks, report_of};
use crate::ledger::Entry;
use crate::report::{FlowSeen, IncidentReport, Report};
use crate::scenario::FlowKind;
use crate::table::figure;
use std::fmt::Write as _;

const CARRIERS: [(&str, u8); 2] = [("two-carriers", 2), ("one-carrier", 1)];
/// Numbers a second of each flow: silences are known to so many ms.
const PER_S: u32 = 100;
/// How long whoever was killed is away, and a site is cut off.
const AWAY_S: u32 = 5;
/// Between what was mended and the next incident: tunnels are left for better ones after five seconds.
const REST_S: u32 = 10;

/// What is done, each to a system that is well.
const INCIDENTS: [&[&str]; 5] = [
    &["kill = { what = \"extender\", site = \"a\" }"],
    &["kill = { what = \"node\", site = \"a\", restart_after_s = AWAY }"],
    &[
        "kill = { what = \"node\", site = \"a\", restart_after_s = AWAY }",
        "kill = { what = \"extender\", site = \"a\" }",
    ],
    &["kill = { what = \"controller\", restart_after_s = AWAY }"],
    &["cut = { between = [\"a\", \"b\"], for_s = AWAY }", "cut = { between = [\"a\", \"c\"], for_s = AWAY }"],
];

fn cell(name: &str, carriers: u8) -> PlanCell {
    let mut scenario = format!(
        "name = \"figures-killed-{name}\"\nnetwork = \"gateway\"\nwarm_percent = 0\n\n[wan]\nrate_mbit = 200\nrtt_ms = 10\n\n\
         [[site]]\nname = \"a\"\ncarriers = {carriers}\n[[site]]\nname = \"b\"\ncarriers = {carriers}\n[[site]]\nname = \"c\"\n\n\
         [[extender]]\nbetween = [\"a\", \"b\"]\n\n\
         [[vm]]\nname = \"vm\"\nsite = \"a\"\nmemory_mib = 128\ndisk_gib = 0.125\ndata_mib = 64\n\
         nic = [{{ address = \"10.20.1.2/24\", mtu = 1370 }}]\n\n\
         [[component]]\nname = \"router\"\nkind = \"router\"\nsite = \"b\"\nports = 1\nconfig = '''\n[[port]]\nnumber = 1\nmtu = 1370\n\
         addresses = [\"10.20.1.1/24\"]\n'''\n\n[[wire]]\nends = [\"vm:eth1\", \"router:p1\"]\n\n"
    );
    for kind in [FlowKind::Udp, FlowKind::Tcp] {
        // Writing to a String cannot fail.
        let _ =
            write!(scenario, "[[flow]]\nfrom = \"router\"\nto = \"vm:eth1\"\nkind = \"{kind}\"\nper_s = {PER_S}\n\n");
    }
    scenario += "[[step]]\nwhole = {}\n";
    for incident in INCIDENTS {
        let mut after_s = REST_S;
        for step in incident {
            let step = step.replace("AWAY", &AWAY_S.to_string());
            let _ = writeln!(scenario, "[[step]]\nafter_s = {after_s}\n{step}");
            after_s = 0;
        }
        scenario += "[[step]]\nwhole = {}\n";
    }
    let _ =
        writeln!(scenario, "[[step]]\nexpect = {{ vm = \"vm\", site = \"a\" }}\n[[step]]\nwait = {{ s = {REST_S} }}");
    PlanCell { name: name.into(), scenario }
}

pub(super) fn cells(extent: Extent) -> Vec<PlanCell> {
    let cells = CARRIERS.iter().map(|(name, carriers)| cell(name, *carriers));
    match extent {
        Extent::Quick => cells.take(1).collect(),
        Extent::Full => cells.collect(),
    }
}

/// The least time after which TCP sends again, in Linux: what is silent for less has lost nothing.
const RESENT_MS: f64 = 200.0;

fn flow(incident: &IncidentReport, kind: FlowKind) -> Option<&FlowSeen> {
    incident.flows.iter().find(|flow| flow.kind == kind)
}

/// Whether it was disturbed at all: its longest silence may be the machine's own, and when that ended says nothing.
fn was_away(flow: &FlowSeen) -> bool {
    flow.lost.map_or(flow.silent_ms >= RESENT_MS, |lost| lost > 0)
}

fn row(incident: &IncidentReport) -> Vec<String> {
    let (udp, tcp) = (flow(incident, FlowKind::Udp), flow(incident, FlowKind::Tcp));
    let count = |n: Option<u64>| n.map_or(String::new(), |n| n.to_string());
    let back = |flow: Option<&FlowSeen>| match flow {
        Some(flow) if flow.back_s.is_none() => "never".to_owned(),
        flow => figure(flow.filter(|flow| was_away(flow)).and_then(|flow| flow.back_s), 1),
    };
    let undisturbed = incident.what.is_empty();
    let what = if undisturbed { "nothing".to_owned() } else { incident.what.join("; ") };
    vec![
        what,
        figure(udp.map(|flow| flow.silent_ms), 0),
        count(udp.and_then(|flow| flow.lost)),
        count(udp.map(|flow| flow.sent)),
        if undisturbed { String::new() } else { back(udp) },
        figure(tcp.map(|flow| flow.silent_ms), 0),
        if undisturbed { String::new() } else { back(tcp) },
        if undisturbed { String::new() } else { figure(incident.whole_s, 1) },
    ]
}

fn table(name: &str, report: &Report) -> Table {
    Table {
        title: format!(
            "{}: {PER_S} datagrams and {PER_S} numbers of a TCP session a second, there and back",
            name.replace('-', " ")
        ),
        columns: [
            "what was done",
            "UDP silent ms",
            "lost",
            "of",
            "back after s",
            "TCP silent ms",
            "back after s",
            "whole after s",
        ]
        .map(str::to_owned)
        .into(),
        words: 1,
        rows: report.incidents.iter().map(row).collect(),
    }
}

/// Whether in those incidents that are nothing but `which` no datagram was lost.
fn none_lost(name: &str, report: &Report, who: &str) -> (String, Option<bool>) {
    let killed = |incident: &&IncidentReport| matches!(incident.what.as_slice(), [one] if one.starts_with(who));
    let lost = report.incidents.iter().find(killed).and_then(|incident| flow(incident, FlowKind::Udp)?.lost);
    let counted = lost.map_or(String::new(), |n| format!(" ({n})"));
    (format!("{name}: no datagram is lost while {who} is away{counted}"), lost.map(|n| n == 0))
}

/// What has to hold in a run.
fn bounds(name: &str, report: &Report) -> Vec<(String, Option<bool>)> {
    let flows = || report.incidents.iter().flat_map(|incident| &incident.flows);
    let any = !report.incidents.is_empty();
    let clear: u64 = report.extenders.iter().map(|extender| extender.clear_packets).sum();
    vec![
        none_lost(name, report, "the node"),
        none_lost(name, report, "the controller"),
        (
            format!("{name}: everything comes back, and the session lives"),
            any.then(|| flows().all(|flow| flow.back_s.is_some() && flow.broke.is_none())),
        ),
        (
            format!("{name}: no packet of a wire is in clear between the sites ({clear})"),
            (!report.extenders.is_empty()).then_some(clear == 0),
        ),
    ]
}

pub(super) fn document(entries: &[Entry]) -> Document {
    let runs: Vec<(&str, &Report)> =
        CARRIERS.iter().filter_map(|(name, _)| Some((*name, report_of(entries, name)?))).collect();
    Document {
        title: "Killed: extender, node, controller; a site cut off and healed".into(),
        tables: runs.iter().map(|(name, report)| table(name, report)).collect(),
        bounds: runs.iter().flat_map(|(name, report)| bounds(name, report)).collect(),
        remarks: remarks(entries),
        ..Document::default()
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::entry;
    use super::*;
    use crate::report::ExtenderReport;

    fn incident(what: &[&str], lost: u64, back_s: Option<f64>) -> IncidentReport {
        let seen = |kind, lost| FlowSeen {
            flow: "router to vm:eth1".into(),
            kind,
            sent: 1500,
            lost,
            lost_awake: lost,
            silent_ms: 12.4,
            back_s,
            broke: None,
        };
        IncidentReport {
            what: what.iter().map(|what| (*what).to_owned()).collect(),
            at_s: 1.0,
            until_s: 16.0,
            whole_s: Some(1.25),
            flows: vec![seen(FlowKind::Udp, Some(lost)), seen(FlowKind::Tcp, None)],
        }
    }

    #[test]
    fn a_loss_without_a_node_or_a_controller_breaks_a_bound_and_so_does_what_does_not_come_back() {
        let judged = |node: u64, controller: u64, back_s: Option<f64>, clear_packets: u64| {
            let mut found = entry("two-carriers", vec![]);
            found.report.incidents = vec![
                incident(&[], 0, Some(0.1)),
                incident(&["the extender's program of a killed"], 30, back_s),
                incident(&["the node of a killed"], node, Some(0.1)),
                incident(&["the node of a killed", "the extender's program of a killed"], 300, Some(0.1)),
                incident(&["the controller killed"], controller, Some(0.1)),
            ];
            let between = ["a".to_owned(), "b".to_owned()];
            found.report.extenders =
                vec![ExtenderReport { between, tunnel_packets: 9, tunnel_bytes: 900, clear_packets }];
            let document = document(&[found]);
            let rows = &document.tables[0].rows;
            assert_eq!(rows[1][..4], ["the extender's program of a killed", "12", "30", "1500"]);
            assert_eq!(rows[1][4], back_s.map_or("never", |_| "0.3"), "what was lost was away until then");
            assert_eq!(rows[3][4], "0.1");
            assert_eq!(rows[3][6], "-", "twelve milliseconds are nobody's silence");
            document.bounds.into_iter().map(|(_, kept)| kept.unwrap()).collect::<Vec<_>>()
        };
        assert_eq!(judged(0, 0, Some(0.3), 0), [true; 4]);
        assert_eq!(judged(1, 0, Some(0.3), 0), [false, true, true, true]);
        assert_eq!(judged(0, 1, Some(0.3), 0), [true, false, true, true]);
        assert_eq!(judged(0, 0, None, 1), [true, true, false, false]);
    }
}
