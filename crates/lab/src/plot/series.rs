//! From samples to what is worth drawing: rates out of cumulative counts, long series made short, the longest gap.
//!
//! A run of two minutes has ten thousand echoes and thousands of samples. A chart has some hundred columns of pixels.
//! What is thrown away here never shows on a screen; peaks, troughs and the gap always stay.

use crate::report::{EchoPoint, WanSample};

/// Most points of a line, as pairs of a lowest and a highest value; the plot is not twice as many pixels wide.
const COLUMNS: usize = 400;

/// Most intervals over which a rate is averaged. Narrower ones would show single packets.
const INTERVALS: usize = 260;

/// Bytes of the three classes: memory, disk, other. Also their rates.
pub(super) type ByClass = [f64; 3];

/// Rates between two times.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Interval {
    pub from_s: f64,
    pub to_s: f64,
    pub mbit: ByClass,
}

fn by_class(sample: &WanSample) -> ByClass {
    [sample.memory as f64, sample.disk as f64, sample.other as f64]
}

/// Samples in order of time, without those that have none.
fn ordered(samples: &[WanSample]) -> Vec<(f64, ByClass)> {
    let mut points: Vec<(f64, ByClass)> =
        samples.iter().filter(|s| s.t_s.is_finite()).map(|s| (s.t_s, by_class(s))).collect();
    points.sort_by(|a, b| a.0.total_cmp(&b.0));
    points
}

/// The count at a time, on the straight line between the two samples around it.
fn at(points: &[(f64, ByClass)], t: f64) -> ByClass {
    let after = points.partition_point(|p| p.0 < t);
    match (after.checked_sub(1).map(|i| points[i]), points.get(after)) {
        (None, None) => [0.0; 3],
        (None, Some(first)) => first.1,
        (Some(last), None) => last.1,
        (Some(a), Some(b)) => {
            let share = if b.0 > a.0 { (t - a.0) / (b.0 - a.0) } else { 1.0 };
            std::array::from_fn(|i| a.1[i] + share * (b.1[i] - a.1[i]))
        }
    }
}

/// Mbit/s by class from cumulative bytes. The intervals are equal, and no shorter than the samples' own distance.
/// Counters that run backwards (an emulator that was restarted) count as silence.
pub(super) fn throughput(samples: &[WanSample], (lo, hi): (f64, f64)) -> Vec<Interval> {
    let points = ordered(samples);
    let (Some(first), Some(last)) = (points.first(), points.last()) else {
        return vec![];
    };
    let (lo, hi) = (first.0.max(lo), last.0.min(hi));
    if hi <= lo {
        return vec![];
    }
    let mut distances: Vec<f64> = points.windows(2).map(|w| w[1].0 - w[0].0).filter(|d| *d > 0.0).collect();
    distances.sort_by(f64::total_cmp);
    let usual = distances.get(distances.len() / 2).copied().unwrap_or(hi - lo);
    let count = (((hi - lo) / usual).round() as usize).clamp(1, INTERVALS);
    let width = (hi - lo) / count as f64;
    let interval = |i: usize| {
        let (from_s, to_s) = (lo + i as f64 * width, lo + (i + 1) as f64 * width);
        let (before, after) = (at(&points, from_s), at(&points, to_s));
        let mbit = std::array::from_fn(|c| (after[c] - before[c]).max(0.0) * 8.0 / 1e6 / width);
        Interval { from_s, to_s, mbit }
    };
    (0..count).map(interval).collect()
}

/// Cumulative bytes by class since the command (time zero, or the first sample where that came later).
pub(super) fn cumulative(samples: &[WanSample], (lo, hi): (f64, f64)) -> Vec<(f64, ByClass)> {
    let points = ordered(samples);
    let (Some(first), Some(last)) = (points.first(), points.last()) else {
        return vec![];
    };
    let (lo, hi) = (first.0.max(lo).max(0.0), last.0.min(hi));
    if hi <= lo {
        return vec![];
    }
    let base = at(&points, lo);
    let count = points.len().clamp(2, INTERVALS);
    let times = (0..=count).map(|i| lo + (hi - lo) * i as f64 / count as f64);
    times.map(|t| (t, std::array::from_fn(|c| (at(&points, t)[c] - base[c]).max(0.0)))).collect()
}

/// A line with as few points as look the same: in each column its first, lowest, highest and last one.
pub(super) fn thinned(points: &[(f64, f64)], (lo, hi): (f64, f64)) -> Vec<(f64, f64)> {
    let mut points: Vec<(f64, f64)> =
        points.iter().copied().filter(|p| p.1.is_finite() && (lo..=hi).contains(&p.0)).collect();
    points.sort_by(|a, b| a.0.total_cmp(&b.0));
    if points.len() <= 2 * COLUMNS {
        return points;
    }
    let column = |t: f64| ((t - lo) / (hi - lo) * COLUMNS as f64) as usize;
    let mut thin = vec![];
    for chunk in points.chunk_by(|a, b| column(a.0) == column(b.0)) {
        let index = |better: fn(f64, f64) -> bool| {
            (1..chunk.len()).fold(0, |best, i| if better(chunk[i].1, chunk[best].1) { i } else { best })
        };
        let mut keep = [0, index(|a, b| a < b), index(|a, b| a > b), chunk.len() - 1];
        keep.sort_unstable();
        thin.extend(keep.iter().enumerate().filter(|(i, k)| *i == 0 || keep[*i - 1] != **k).map(|(_, k)| chunk[*k]));
    }
    thin
}

/// One dot for each pixel, where several would cover each other.
pub(super) fn distinct(points: impl IntoIterator<Item = (f64, f64)>) -> Vec<(f64, f64)> {
    let mut cells: Vec<(i64, i64)> = points.into_iter().map(|(x, y)| (x.round() as i64, y.round() as i64)).collect();
    cells.sort_unstable();
    cells.dedup();
    cells.into_iter().map(|(x, y)| (x as f64, y as f64)).collect()
}

/// A time without an answer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Gap {
    pub from_s: f64,
    pub to_s: f64,
    /// Whether an answer ended it.
    pub ended: bool,
}

impl Gap {
    /// Its length.
    pub fn ms(&self) -> f64 {
        (self.to_s - self.from_s) * 1e3
    }
}

/// The longest time between two answers; also the time from the last answer to `until_s`, where the client heard
/// nothing any more.
pub(super) fn longest_gap(echo: &[EchoPoint], until_s: f64) -> Option<Gap> {
    let mut times: Vec<f64> = echo.iter().map(|e| e.t_s).filter(|t| t.is_finite()).collect();
    times.sort_by(f64::total_cmp);
    let between = times.windows(2).map(|w| Gap { from_s: w[0], to_s: w[1], ended: true });
    let silence = times.last().filter(|t| until_s > **t).map(|t| Gap { from_s: *t, to_s: until_s, ended: false });
    between.chain(silence).max_by(|a, b| a.ms().total_cmp(&b.ms()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sample(t_s: f64, memory: u64) -> WanSample {
        WanSample { t_s, memory, disk: 0, other: 0 }
    }

    #[test]
    fn rates_add_up_to_the_bytes_that_were_sent() {
        let samples: Vec<WanSample> = (0..=5000).map(|i| sample(i as f64 * 0.02, i * i)).collect();
        let intervals = throughput(&samples, (-10.0, 200.0));
        assert!(intervals.len() <= INTERVALS);
        let bits: f64 = intervals.iter().map(|i| i.mbit[0] * 1e6 * (i.to_s - i.from_s)).sum();
        assert!((bits / 8.0 - 25e6).abs() < 1.0, "{bits}");
    }

    #[test]
    fn a_counter_that_runs_backwards_is_silence() {
        let rates = throughput(&[sample(0.0, 1000), sample(1.0, 0), sample(2.0, 125_000)], (0.0, 2.0));
        assert_eq!(rates.iter().map(|i| i.mbit[0]).collect::<Vec<_>>(), [0.0, 1.0]);
    }

    #[test]
    fn bytes_count_from_the_command() {
        let curve = cumulative(&[sample(-2.0, 500), sample(0.0, 900), sample(2.0, 1900)], (-2.0, 2.0));
        assert_eq!((curve[0], curve[curve.len() - 1]), ((0.0, [0.0; 3]), (2.0, [1000.0, 0.0, 0.0])));
    }

    #[test]
    fn the_longest_gap_is_found_and_a_client_that_hears_nothing_more_too() {
        let echo: Vec<EchoPoint> = [0.0, 1.0, 4.0, 5.0].map(|t_s| EchoPoint { t_s, rtt_ms: 1.0 }).into();
        assert_eq!(longest_gap(&echo, 6.0), Some(Gap { from_s: 1.0, to_s: 4.0, ended: true }));
        assert_eq!(longest_gap(&echo, 60.0), Some(Gap { from_s: 5.0, to_s: 60.0, ended: false }));
        assert_eq!(longest_gap(&[], 6.0), None);
    }

    proptest! {
        #[test]
        fn thinning_keeps_order_and_extremes(values in prop::collection::vec(-1e6..1e6f64, 0..5000)) {
            let points: Vec<(f64, f64)> = values.iter().enumerate().map(|(i, v)| (i as f64, *v)).collect();
            let thin = thinned(&points, (0.0, points.len() as f64));
            prop_assert!(thin.len() <= 4 * (COLUMNS + 1));
            prop_assert!(thin.windows(2).all(|w| w[0].0 < w[1].0));
            let extremes = |p: &[(f64, f64)]| p.iter().fold((f64::MAX, f64::MIN), |(l, h), q| (l.min(q.1), h.max(q.1)));
            prop_assert_eq!(extremes(&points), extremes(&thin));
        }
    }
}
