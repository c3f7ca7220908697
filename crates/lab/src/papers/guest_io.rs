//! Whether a guest feels that its disk is pre-cached: the 99th percentile of its own reads and writes with a pre-cache under way and
//! without, in pairs that take turns, and the upper 95 % bound of their ratio.
//!
//! Each site has a processor of its own, since a secondary is on another host than the guest: on shared ones the guest would wait for what the
//! secondary does. The WAN is emulated on the secondary's, and in real time: it is on no host at all. Windows are short, and pairs many:
//! the machine's moods last longer than a pair.
//!
//! Once with epochs that end as often as they do where nobody says otherwise, and a window has at least one end of an epoch in it; once with
//! ten times as many.

use super::{Document, Extent, PlanCell, Table, remarks, report_of};
use crate::ledger::Entry;
use crate::report::IoWindow;
use crate::table::figure;
use godwit_api::precache::INTERVAL_MS;
use std::fmt::Write as _;

/// The upper bound of the ratio may be so much.
const BOUND: f64 = 1.05;
const WITH: &str = "with";
const WITHOUT: &str = "without";

/// Windows of a kind.
struct Kind {
    name: &'static str,
    pairs: usize,
    /// How long each is.
    window_s: u32,
    /// How often an epoch ends.
    interval_s: u32,
}

const QUICK: Kind = Kind { name: "20-pairs-apart", pairs: 20, window_s: 4, interval_s: 1 };
const SHORT_EPOCHS: Kind = Kind { name: "120-pairs-apart", pairs: 120, ..QUICK };
const USUAL_EPOCHS: Kind = Kind { name: "60-pairs-of-usual-epochs", pairs: 60, window_s: 12, interval_s: USUAL_S };
/// Where nobody says otherwise.
#[allow(clippy::cast_possible_truncation, reason = "it is ten")]
const USUAL_S: u32 = (INTERVAL_MS / 1000) as u32;

fn cell(kind: &Kind) -> PlanCell {
    let s = kind.interval_s;
    let precache =
        format!("[[step]]\nprecache = {{ vm = \"vm\", to = \"b\", interval_s = {s}, lag_s = 10, timeout_s = 900 }}\n");
    let stop = "[[step]]\nprecache = { vm = \"vm\", to = \"b\", stop = true }\n";
    let mut scenario = r#"name = "figures-guest-io"
warm_percent = 50

[wan]
rate_mbit = 50
rtt_ms = 50
processor = 1

[[site]]
name = "a"
processor = 0
[[site]]
name = "b"
processor = 1

[[vm]]
name = "vm"
site = "a"
memory_mib = 128
disk_gib = 1
data_mib = 64
load = [{ kind = "disk", kib_per_s = 400, read_kib_per_s = 400, working_set_mib = 32 }]

"#
    .to_owned();
    scenario.push_str(&precache);
    scenario.push_str(stop);
    for pair in 0..kind.pairs {
        let window = |name: &str| {
            let s = kind.window_s;
            format!("[[step]]\nafter_s = 1\nio = {{ vm = \"vm\", s = {s}, name = \"{name}\" }}\n")
        };
        let (with, without) = (format!("{precache}{}{stop}", window(WITH)), window(WITHOUT));
        // Whoever is first has another machine than whoever is second: they take turns.
        let (first, second) = if pair % 2 == 0 { (&with, &without) } else { (&without, &with) };
        // Writing to a String cannot fail.
        let _ = write!(scenario, "{first}{second}");
    }
    // What was timed was also right.
    scenario.push_str("[[step]]\nverify = { vm = \"vm\" }\n");
    PlanCell { name: kind.name.into(), scenario }
}

pub(super) fn cells(extent: Extent) -> Vec<PlanCell> {
    match extent {
        Extent::Quick => vec![cell(&QUICK)],
        Extent::Full => vec![cell(&QUICK), cell(&SHORT_EPOCHS), cell(&USUAL_EPOCHS)],
    }
}

/// The ratios of the pairs, in their order, of one figure of the windows.
fn ratios(windows: &[IoWindow], of: fn(&IoWindow) -> Option<f64>) -> Vec<f64> {
    let pairs = windows.chunks_exact(2);
    let ratio = |pair: &[IoWindow]| {
        let figure = |name: &str| pair.iter().find(|w| w.name == name).and_then(of).filter(|v| *v > 0.0);
        Some(figure(WITH)? / figure(WITHOUT)?)
    };
    pairs.filter_map(ratio).collect()
}

/// The geometric mean of ratios, and what it is not above, with 95 % certainty: by Student's t of their logarithms, which holds for few pairs
/// as well. Less than three do not say how far they spread.
pub(super) fn upper_bound(ratios: &[f64]) -> Option<(f64, f64)> {
    if ratios.len() < 3 {
        return None;
    }
    let n = ratios.len() as f64;
    let logs = || ratios.iter().map(|ratio| ratio.ln());
    let mean = logs().sum::<f64>() / n;
    let variance = logs().map(|log| (log - mean).powi(2)).sum::<f64>() / (n - 1.0);
    let above = t_95(ratios.len() - 1) * (variance / n).sqrt();
    Some((mean.exp(), (mean + above).exp()))
}

/// What 95 % of Student's t with so many degrees of freedom are below. Beyond the table what is said of it is 0.002 too little at most.
fn t_95(freedom: usize) -> f64 {
    const TABLE: [f64; 30] = [
        6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812, 1.796, 1.782, 1.771, 1.761, 1.753, 1.746,
        1.740, 1.734, 1.729, 1.725, 1.721, 1.717, 1.714, 1.711, 1.708, 1.706, 1.703, 1.701, 1.699, 1.697,
    ];
    TABLE.get(freedom.saturating_sub(1)).copied().unwrap_or_else(|| 1.645 + 1.52 / freedom as f64)
}

pub(super) fn document(entries: &[Entry]) -> Document {
    let (mut tables, mut bounds) = (vec![], vec![]);
    for kind in [QUICK, SHORT_EPOCHS, USUAL_EPOCHS] {
        let Some(report) = report_of(entries, kind.name) else { continue };
        let epochs = kind.interval_s;
        let windows = &report.windows;
        let columns = [
            "pair",
            "with: p50 ms",
            "p95 ms",
            "p99 ms",
            "operations",
            "without: p50 ms",
            "p95 ms",
            "p99 ms",
            "operations",
            "p99 ratio",
        ];
        let row = |(i, pair): (usize, &[IoWindow])| {
            let mut row = vec![(i + 1).to_string()];
            for name in [WITH, WITHOUT] {
                let window = pair.iter().find(|w| w.name == name);
                let of: [fn(&IoWindow) -> Option<f64>; 3] = [|w| w.p50_ms, |w| w.p95_ms, |w| w.p99_ms];
                row.extend(of.map(|of| figure(window.and_then(of), 2)));
                row.push(window.map_or(String::new(), |w| w.operations.to_string()));
            }
            row.push(figure(ratios(pair, |w| w.p99_ms).first().copied(), 3));
            row
        };
        tables.push(Table {
            title: format!("Windows of {} s, in turn; epochs of {epochs} s", kind.window_s),
            columns: columns.map(str::to_owned).into(),
            words: 0,
            rows: windows.chunks_exact(2).enumerate().map(row).collect(),
        });
        let bound = |what: &str, of| {
            let found = upper_bound(&ratios(windows, of));
            let said =
                found.map_or(String::new(), |(mean, upper)| format!(" (mean {mean:.3}, upper bound {upper:.3})"));
            let what = format!("{what} with a pre-cache with epochs of {epochs} s, of that without");
            (format!("{what}: upper 95 % bound at most {BOUND}{said}"), found.map(|f| f.1 <= BOUND))
        };
        bounds.push(bound("p99", |w: &IoWindow| w.p99_ms));
        bounds.push(bound("p95", |w: &IoWindow| w.p95_ms));
        bounds.push(bound("p90", |w: &IoWindow| w.p90_ms));
        bounds.push(bound("p50", |w: &IoWindow| w.p50_ms));
    }
    Document {
        title: "A guest's own I/O beside a pre-cache".into(),
        tables,
        bounds,
        remarks: remarks(entries),
        ..Document::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bound_lies_above_the_mean_and_nearer_with_more_pairs() {
        let few: Vec<f64> = (0..8).map(|i| 1.0 + 0.02 * f64::from(i % 3)).collect();
        let many: Vec<f64> = (0..80).map(|i| 1.0 + 0.02 * f64::from(i % 3)).collect();
        let (a, b) = (upper_bound(&few).unwrap(), upper_bound(&many).unwrap());
        assert!(a.0 > 1.0 && a.1 > a.0 && a.1 < 1.04, "{a:?}");
        assert!(b.1 - b.0 < a.1 - a.0, "{a:?} {b:?}");
        assert_eq!((upper_bound(&[1.0]), upper_bound(&[1.0, 1.01])), (None, None));
    }

    #[test]
    fn the_bound_of_few_pairs_is_students() {
        // Logarithms 0, 0.1 and 0.2: their mean, and 2.920 standard errors of 0.1 / sqrt(3).
        let ratios = [1.0, 0.1_f64.exp(), 0.2_f64.exp()];
        let (mean, most) = upper_bound(&ratios).unwrap();
        assert!((mean.ln() - 0.1).abs() < 1e-9 && (most.ln() - 0.268_586).abs() < 1e-5, "{mean} {most}");
        // What tables have beyond ours.
        for (freedom, t) in [(1, 6.314), (30, 1.697), (40, 1.684), (60, 1.671), (120, 1.658), (1000, 1.646)] {
            assert!((t_95(freedom) - t).abs() < 0.002, "{freedom}");
        }
    }

    #[test]
    fn a_pair_counts_whichever_window_came_first() {
        let window = |name: &str, p99| IoWindow { name: name.into(), p99_ms: Some(p99), ..IoWindow::default() };
        let windows = [window(WITH, 2.0), window(WITHOUT, 1.0), window(WITHOUT, 2.0), window(WITH, 1.0)];
        assert_eq!(ratios(&windows, |w| w.p99_ms), [2.0, 0.5]);
    }
}
