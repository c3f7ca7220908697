//! xNBD+, figure 12: the time of a move by how fast the guest writes into a working set, with as little memory dirtied as can be.
//!
//! The paper writes 1 to 69 MB/s into a file of 1 GB on a disk of 4, over what its TCP made of 1 Gbit/s. Here it is 0.25 to 16 MiB/s
//! into 64 MiB, over 50 Mbit/s: a sixteenth of the working set. Post-copy bounds the disk's part by the working set, however fast the
//! guest writes; QEMU's own mirror need not end.

use super::{Document, Drawing, Extent, Parts, PlanCell, Table, instead, move_of, remarks, report_of};
use crate::ledger::Entry;
use crate::table::{figure, in_mib};

const LINK_MBIT: f64 = 50.0;
const RTT_MS: u32 = 100;
const WORKING_SET_MIB: u32 = 64;
/// Written, KiB a second.
const SPEEDS: [u32; 7] = [256, 1024, 2048, 4096, 8192, 12_288, 16_384];
const QUICK: [u32; 3] = [256, 4096, 16_384];
/// Of QEMU alone only a few, and for so long.
const QEMUS: [u32; 3] = [1024, 4096, 16_384];
const GIVEN_UP_S: u32 = 240;
/// Above the working set's own time on the link: round trips, the link's own headers, what starts and ends a move.
const SLACK: f64 = 1.3;
const SLACK_S: f64 = 5.0;

fn name(speed: u32, means: &str) -> String {
    format!("{speed}kib-{means}")
}

fn cell(speed: u32, means: &str) -> PlanCell {
    let precached = means == "precache";
    let who = if precached { "godwit = true" } else { "godwit = false\nbaseline = [\"qemu\"]" };
    let before = if precached {
        format!(
            "[[step]]\nrate = {{ between = [\"a\", \"b\"], rate_mbit = 400, rtt_ms = 2 }}\n\
             [[step]]\nprecache = {{ vm = \"vm\", to = \"b\", interval_s = 10, lag_s = 25, timeout_s = 900 }}\n\
             [[step]]\nrate = {{ between = [\"a\", \"b\"], rate_mbit = {LINK_MBIT}, rtt_ms = {RTT_MS} }}\n"
        )
    } else {
        String::new()
    };
    let disk = if precached { "postcopy" } else { "mirror" };
    let scenario = format!(
        r#"name = "figures-writes"
{who}
warm_percent = 50
move_timeout_s = {GIVEN_UP_S}

[wan]
rate_mbit = {LINK_MBIT}
rtt_ms = {RTT_MS}
[[wan.path]]
between = ["a", "c"]
rtt_ms = 10

[[site]]
name = "a"
[[site]]
name = "b"
[[site]]
name = "c"

[[vm]]
name = "vm"
site = "a"
memory_mib = 128
disk_gib = 1
data_mib = 64
load = [
  {{ kind = "disk", kib_per_s = 64, working_set_mib = {WORKING_SET_MIB} }},
  {{ kind = "echo", from = "c", per_s = 20 }},
]

# It is pre-cached before it writes in earnest: a pre-cache that cannot keep up with that lags behind, and the move takes what is left.
{before}[[step]]
load = {{ vm = "vm", load = [{{ kind = "disk", kib_per_s = {speed}, working_set_mib = {WORKING_SET_MIB} }}] }}
[[step]]
io = {{ vm = "vm", s = 25, name = "writes" }}
[[step]]
move = {{ vm = "vm", to = "b", disk = "{disk}" }}
[[step]]
verify = {{ vm = "vm" }}
"#
    );
    PlanCell { name: name(speed, means), scenario }
}

pub(super) fn cells(extent: Extent) -> Vec<PlanCell> {
    let mut cells: Vec<PlanCell> = QUICK.iter().map(|speed| cell(*speed, "precache")).collect();
    if extent == Extent::Full {
        cells.extend(SPEEDS.iter().filter(|speed| !QUICK.contains(speed)).map(|speed| cell(*speed, "precache")));
        cells.extend(QEMUS.iter().map(|speed| cell(*speed, "qemu")));
    }
    cells
}

/// The time that the working set alone takes on the link, with its slack.
fn ceiling_s(memory_s: f64) -> f64 {
    memory_s + f64::from(WORKING_SET_MIB) * 8.388_608 / LINK_MBIT * SLACK + SLACK_S
}

/// What the guest wrote before its move, MiB a second.
fn written(entries: &[Entry], cell: &str) -> Option<f64> {
    let window = report_of(entries, cell)?.windows.first().filter(|window| window.seconds > 0.0)?;
    Some(window.write_kib as f64 / 1024.0 / window.seconds)
}

pub(super) fn document(entries: &[Entry]) -> Document {
    let columns = [
        "asked MiB/s",
        "written MiB/s",
        "means",
        "total s",
        "memory s",
        "disk s",
        "ceiling s",
        "precached MiB",
        "disk MiB",
    ]
    .map(str::to_owned);
    let mut rows = vec![];
    let (mut total, mut memory, mut qemus) = (vec![], vec![], vec![]);
    let mut bounded: Option<bool> = None;
    for speed in SPEEDS {
        for means in ["precache", "qemu"] {
            let Some(figures) = move_of(entries, &name(speed, means)) else { continue };
            let parts = Parts::of(figures);
            let asked = f64::from(speed) / 1024.0;
            let mib_s = written(entries, &name(speed, means)).unwrap_or(asked);
            let mut row = vec![figure(Some(asked), 2), figure(Some(mib_s), 2), means.to_owned()];
            match parts {
                Some(parts) => {
                    row.extend([parts.total_s, parts.memory_s, parts.disk_s].map(|s| figure(Some(s), 1)));
                    if means == "precache" {
                        total.push((mib_s, parts.total_s));
                        memory.push((mib_s, parts.memory_s));
                        row.push(figure(Some(ceiling_s(parts.memory_s)), 1));
                    } else {
                        qemus.push((mib_s, parts.total_s));
                        row.push(String::new());
                    }
                }
                None => row.extend([instead(Some(figures)), String::new(), String::new(), String::new()]),
            }
            if means == "precache" {
                let kept = parts.is_some_and(|parts| parts.total_s <= ceiling_s(parts.memory_s));
                bounded = Some(bounded.unwrap_or(true) && kept);
            }
            row.extend([figures.precached_bytes, figures.bytes.disk].map(|bytes| figure(Some(in_mib(bytes)), 1)));
            rows.push(row);
        }
    }
    let lines = [("pre-cached, total", total), ("pre-cached, memory", memory), ("QEMU, mirror", qemus)];
    let drawing = Drawing {
        name: "figure-12".into(),
        title: "Figure 12: time of a move by write speed".into(),
        x: "written, MiB/s".into(),
        y: "seconds".into(),
        lines: lines.into_iter().filter(|(_, points)| !points.is_empty()).map(|(n, p)| (n.to_owned(), p)).collect(),
        drawn: None,
    };
    let bound = format!(
        "every pre-cached move ends, within its memory's time and the working set's ({WORKING_SET_MIB} MiB at {LINK_MBIT:.0} Mbit/s, \
         {SLACK} of it and {SLACK_S:.0} s)"
    );
    let mut notes = vec![
        "What was written is what the guest's kernel counted just before the move; an emulated guest may not write what it was asked to. QEMU mirrors in its write-blocking mode, which holds the \
         guest's writes to the link: without it the mirror does not end (see docs/baselines.md)."
            .to_owned(),
    ];
    notes.extend(remarks(entries));
    Document {
        title: "xNBD+: moves of a guest that writes".into(),
        tables: vec![Table {
            title: format!("Figure 12, {LINK_MBIT:.0} Mbit/s and {RTT_MS} ms"),
            columns: columns.into(),
            words: 0,
            rows,
        }],
        drawings: vec![drawing],
        bounds: vec![(bound, bounded)],
        remarks: notes,
    }
}
