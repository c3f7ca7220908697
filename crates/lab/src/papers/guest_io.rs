//! Whether a guest feels that its disk is pre-cached: the 99th percentile of its own reads and writes with a pre-cache under way and
//! without, in pairs that take turns, and the upper 95 % bound of their ratio.
//!
//! Each site has a processor of its own, since a secondary is on another host than the guest: on shared ones the guest would wait for what the
//! secondary does. Windows are short, and pairs many: the machine's moods last longer than a pair.
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
/// How often pairs are drawn again for the bound.
const DRAWS: usize = 10_000;

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

/// The geometric mean of ratios, and the upper end of its 95 % interval: pairs drawn again, with replacement.
pub(super) fn upper_bound(ratios: &[f64]) -> Option<(f64, f64)> {
    if ratios.len() < 2 {
        return None;
    }
    let logs: Vec<f64> = ratios.iter().map(|ratio| ratio.ln()).collect();
    let mean = |draw: &mut dyn FnMut(usize) -> f64| ((0..logs.len()).map(draw).sum::<f64>() / logs.len() as f64).exp();
    let whole = mean(&mut |i| logs[i]);
    // The same bound for the same figures.
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize
    };
    let mut means: Vec<f64> = (0..DRAWS).map(|_| mean(&mut |_| logs[next() % logs.len()])).collect();
    means.sort_by(f64::total_cmp);
    Some((whole, means[DRAWS * 95 / 100]))
}

pub(super) fn document(entries: &[Entry]) -> Document {
    let (mut tables, mut bounds) = (vec![], vec![]);
    for kind in [QUICK, SHORT_EPOCHS, USUAL_EPOCHS] {
        let Some(report) = report_of(entries, kind.name) else { continue };
        let epochs = kind.interval_s;
        let windows = &report.windows;
        let columns =
            ["pair", "with: p50 ms", "p99 ms", "operations", "without: p50 ms", "p99 ms", "operations", "p99 ratio"];
        let row = |(i, pair): (usize, &[IoWindow])| {
            let mut row = vec![(i + 1).to_string()];
            for name in [WITH, WITHOUT] {
                let window = pair.iter().find(|w| w.name == name);
                row.extend([figure(window.and_then(|w| w.p50_ms), 2), figure(window.and_then(|w| w.p99_ms), 2)]);
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
        assert_eq!(upper_bound(&[1.0]), None);
    }

    #[test]
    fn a_pair_counts_whichever_window_came_first() {
        let window = |name: &str, p99| IoWindow { name: name.into(), p99_ms: Some(p99), ..IoWindow::default() };
        let windows = [window(WITH, 2.0), window(WITHOUT, 1.0), window(WITHOUT, 2.0), window(WITH, 1.0)];
        assert_eq!(ratios(&windows, |w| w.p99_ms), [2.0, 0.5]);
    }
}
