//! Whether a guest feels that its disk is pre-cached: the 99th percentile of its own reads and writes with a pre-cache under way and
//! without, in pairs that take turns, and the upper 95 % bound of their ratio.
//!
//! Each site has a processor of its own, since a secondary is on another host than the guest: on shared ones the guest would wait for what the
//! secondary does. Windows are short, and pairs many: the machine's moods last longer than a pair.

use super::{Document, Extent, PlanCell, Table, remarks, report_of};
use crate::ledger::Entry;
use crate::report::IoWindow;
use crate::table::figure;
use std::fmt::Write as _;

/// The upper bound of the ratio may be so much.
const BOUND: f64 = 1.05;
const WITH: &str = "with";
const WITHOUT: &str = "without";
const QUICK_PAIRS: usize = 20;
const FULL_PAIRS: usize = 120;
/// How long a window is.
const WINDOW_S: u32 = 4;
/// How often pairs are drawn again for the bound.
const DRAWS: usize = 10_000;

fn cell(pairs: usize) -> PlanCell {
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

[[step]]
precache = { vm = "vm", to = "b", interval_s = 1, lag_s = 10, timeout_s = 900 }
[[step]]
precache = { vm = "vm", to = "b", stop = true }
"#
    .to_owned();
    for pair in 0..pairs {
        let with = format!(
            "[[step]]\nprecache = {{ vm = \"vm\", to = \"b\", interval_s = 1, lag_s = 10, timeout_s = 900 }}\n[[step]]\nafter_s = 1\n\
             io = {{ vm = \"vm\", s = {WINDOW_S}, name = \"{WITH}\" }}\n\
             [[step]]\nprecache = {{ vm = \"vm\", to = \"b\", stop = true }}\n"
        );
        let without = format!("[[step]]\nafter_s = 1\nio = {{ vm = \"vm\", s = {WINDOW_S}, name = \"{WITHOUT}\" }}\n");
        // Whoever is first has another machine than whoever is second: they take turns.
        let (first, second) = if pair % 2 == 0 { (&with, &without) } else { (&without, &with) };
        // Writing to a String cannot fail.
        let _ = write!(scenario, "{first}{second}");
    }
    // What was timed was also right.
    scenario.push_str("[[step]]\nverify = { vm = \"vm\" }\n");
    PlanCell { name: name(pairs), scenario }
}

fn name(pairs: usize) -> String {
    format!("{pairs}-pairs-apart")
}

pub(super) fn cells(extent: Extent) -> Vec<PlanCell> {
    let quick = cell(QUICK_PAIRS);
    match extent {
        Extent::Quick => vec![quick],
        Extent::Full => vec![quick, cell(FULL_PAIRS)],
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
    for pairs in [QUICK_PAIRS, FULL_PAIRS] {
        let Some(report) = report_of(entries, &name(pairs)) else { continue };
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
            title: format!("Windows of {WINDOW_S} s, in turn"),
            columns: columns.map(str::to_owned).into(),
            words: 0,
            rows: windows.chunks_exact(2).enumerate().map(row).collect(),
        });
        let bound = |what: &str, of| {
            let found = upper_bound(&ratios(windows, of));
            let said =
                found.map_or(String::new(), |(mean, upper)| format!(" (mean {mean:.3}, upper bound {upper:.3})"));
            (
                format!("{what} with a pre-cache, of that without: upper 95 % bound at most {BOUND}{said}"),
                found.map(|f| f.1 <= BOUND),
            )
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
