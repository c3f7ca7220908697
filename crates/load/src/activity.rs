//! What the guest itself sees of its disks and of its work, interval by interval: throughput and latency through a move.
//!
//! Every [`EVERY`] of the guest's own clock the kernel's counters (`/proc/diskstats`) and the loads' own counts are read, and what was
//! added becomes a [`Sample`]. The guest's clock stands still while the guest does: a pause is no long interval but a gap between two,
//! which only the host's clock can show; so a report carries the moment at which it was made, and the host compares.
//!
//! What can go wrong: nobody asks for a long time, and the oldest samples are gone ([`KEPT`]); `/proc/diskstats` does not know the disk
//! (a file, in tests), and its counts stay zero.

use std::{
    collections::VecDeque,
    fs,
    path::PathBuf,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU32, AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};

use crate::protocol::BootId;

/// Length of an interval by the guest's clock.
pub const EVERY: Duration = Duration::from_millis(250);

/// Samples that are kept: a quarter of an hour, some hundred kilobytes.
pub const KEPT: usize = 4096;

/// Most samples in one reply.
pub const MOST: usize = 64;

/// Most entries of latency histograms in one reply, so that it stays below the longest line ([`crate::protocol::MAX_LINE_BYTES`]).
pub const MOST_ENTRIES: usize = 3000;

/// Steps of the latency scale for each doubling: neighbours differ by 2.2 %.
const STEPS: f64 = 32.0;

/// Length of the latency scale: 2^30 µs is 18 minutes.
const BUCKETS: usize = 30 * STEPS as usize + 1;

/// One interval.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sample {
    /// When it ended, seconds since the program's start by the guest's clock.
    pub at_s: f64,
    /// How long it was by that clock.
    pub seconds: f64,
    /// Reads that the disks finished.
    pub reads: u64,
    /// KiB that they read.
    pub read_kib: u64,
    /// Milliseconds that these reads took, together.
    pub read_ms: u64,
    /// Writes that the disks finished.
    pub writes: u64,
    /// KiB that they wrote.
    pub write_kib: u64,
    /// Milliseconds that these writes took, together.
    pub write_ms: u64,
    /// What workloads have finished: objects compiled, transactions.
    pub units: u64,
    /// Reads and writes of disk loads by how long they took: step of the scale (see [`step_us`]) and count.
    #[serde(default)]
    pub latency: Vec<(u16, u32)>,
}

/// Samples from a number on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ActivityReport {
    /// This life of the load program.
    pub boot_id: BootId,
    /// When this was said, seconds since the program's start by the guest's clock.
    pub uptime_s: f64,
    /// The samples, oldest first; fewer than there are where a reply would be too long.
    pub samples: Vec<Sample>,
    /// The number to ask from next.
    pub next: u64,
}

/// The longest latency that falls into a step of the scale, µs.
#[must_use]
pub fn step_us(step: u16) -> f64 {
    (f64::from(step) / STEPS).exp2()
}

fn step_of(took: Duration) -> usize {
    let us = took.as_secs_f64() * 1e6;
    if us <= 1.0 { 0 } else { ((us.log2() * STEPS).ceil() as usize).min(BUCKETS - 1) }
}

/// The latency, µs, that so large a share (0 to 1) of the operations in `entries` did not exceed; `None` without any.
#[must_use]
pub fn quantile_us(entries: impl IntoIterator<Item = (u16, u32)>, share: f64) -> Option<f64> {
    let mut all = vec![0u64; BUCKETS];
    for (step, count) in entries {
        all[usize::from(step).min(BUCKETS - 1)] += u64::from(count);
    }
    let total: u64 = all.iter().sum();
    let wanted = ((total as f64 * share).ceil() as u64).max(1);
    let mut seen = 0;
    let found = all.iter().position(|count| {
        seen += count;
        seen >= wanted
    });
    found.filter(|_| total > 0).map(|step| step_us(step as u16))
}

/// Where loads count what the samples are made of.
#[derive(Debug)]
pub struct Recorder {
    born: Instant,
    devices: Vec<String>,
    units: AtomicU64,
    latency: Vec<AtomicU32>,
    kept: Mutex<Kept>,
}

#[derive(Debug, Default)]
struct Kept {
    samples: VecDeque<Sample>,
    /// How many were ever taken; the number of the next.
    taken: u64,
}

impl Recorder {
    /// Watches these disks; times count from `born`. The thread that takes the samples ends with the last handle.
    #[must_use]
    pub fn start(disks: &[PathBuf], born: Instant) -> Arc<Self> {
        let devices = disks.iter().filter_map(|path| path.strip_prefix("/dev").ok()?.to_str().map(str::to_owned));
        let recorder = Arc::new(Self {
            born,
            devices: devices.collect(),
            units: AtomicU64::new(0),
            latency: (0..BUCKETS).map(|_| AtomicU32::new(0)).collect(),
            kept: Mutex::default(),
        });
        let weak = Arc::downgrade(&recorder);
        let (mut before, mut last) = (recorder.counters(), Instant::now());
        // Without the thread there are no samples, and nothing else is amiss.
        let _ = std::thread::Builder::new().name("activity".to_owned()).spawn(move || {
            loop {
                std::thread::sleep(EVERY);
                let Some(recorder) = weak.upgrade() else { return };
                let (now, counters) = (Instant::now(), recorder.counters());
                recorder.take(now, now - last, &before, &counters);
                (before, last) = (counters, now);
            }
        });
        recorder
    }

    /// A workload has finished so many units.
    pub fn finished(&self, units: u64) {
        self.units.fetch_add(units, Relaxed);
    }

    /// A disk load's read or write took so long.
    pub fn took(&self, time: Duration) {
        self.latency[step_of(time)].fetch_add(1, Relaxed);
    }

    /// The samples from number `from` on.
    #[must_use]
    pub fn report(&self, boot_id: BootId, from: u64) -> ActivityReport {
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let oldest = kept.taken - kept.samples.len() as u64;
        let first = from.clamp(oldest, kept.taken);
        let (mut samples, mut entries) = (vec![], 0);
        for sample in kept.samples.iter().skip((first - oldest) as usize).take(MOST) {
            entries += sample.latency.len();
            if entries > MOST_ENTRIES && !samples.is_empty() {
                break;
            }
            samples.push(sample.clone());
        }
        let next = first + samples.len() as u64;
        ActivityReport { boot_id, uptime_s: self.born.elapsed().as_secs_f64(), samples, next }
    }

    fn counters(&self) -> DiskStats {
        let text = if self.devices.is_empty() {
            String::new()
        } else {
            fs::read_to_string("/proc/diskstats").unwrap_or_default()
        };
        DiskStats::parse(&text, &self.devices)
    }

    fn take(&self, now: Instant, length: Duration, before: &DiskStats, counters: &DiskStats) {
        let latency = (self.latency.iter().enumerate())
            .filter_map(|(step, count)| match count.swap(0, Relaxed) {
                0 => None,
                count => Some((step as u16, count)),
            })
            .collect();
        let since = |now: u64, before: u64| now.saturating_sub(before);
        let sample = Sample {
            at_s: now.saturating_duration_since(self.born).as_secs_f64(),
            seconds: length.as_secs_f64(),
            reads: since(counters.reads, before.reads),
            read_kib: since(counters.read_sectors, before.read_sectors) / 2,
            read_ms: since(counters.read_ms, before.read_ms),
            writes: since(counters.writes, before.writes),
            write_kib: since(counters.written_sectors, before.written_sectors) / 2,
            write_ms: since(counters.write_ms, before.write_ms),
            units: self.units.swap(0, Relaxed),
            latency,
        };
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.samples.len() == KEPT {
            kept.samples.pop_front();
        }
        kept.samples.push_back(sample);
        kept.taken += 1;
    }
}

/// The kernel's counters, over all watched disks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct DiskStats {
    reads: u64,
    read_sectors: u64,
    read_ms: u64,
    writes: u64,
    written_sectors: u64,
    write_ms: u64,
}

impl DiskStats {
    /// Understands `/proc/diskstats` (Documentation/admin-guide/iostats.rst); lines that it does not understand count as nothing.
    fn parse(text: &str, devices: &[String]) -> Self {
        let mut sum = Self::default();
        for line in text.lines() {
            let mut fields = line.split_ascii_whitespace().skip(2);
            if !fields.next().is_some_and(|name| devices.iter().any(|device| device == name)) {
                continue;
            }
            let mut next = || fields.next().and_then(|field| field.parse::<u64>().ok()).unwrap_or(0);
            let (reads, _, read_sectors, read_ms) = (next(), next(), next(), next());
            let (writes, _, written_sectors, write_ms) = (next(), next(), next(), next());
            sum.reads += reads;
            sum.read_sectors += read_sectors;
            sum.read_ms += read_ms;
            sum.writes += writes;
            sum.written_sectors += written_sectors;
            sum.write_ms += write_ms;
        }
        sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_counters_are_those_of_the_watched_disks() {
        let text = "\
   8       0 sda 1 2 3 4 5 6 7 8 0 9 10\n \
254       0 vda 10 20 30 40 50 60 70 80 0 9 10 0 0 0 0\n \
254       1 vda1 1 1 1 1 1 1 1 1 0 0 0\n \
254      16 vdb 100 0 100 0 100 0 100 0 0 0 0\n";
        let stats = DiskStats::parse(text, &["vda".to_owned(), "vdb".to_owned()]);
        assert_eq!(
            stats,
            DiskStats { reads: 110, read_sectors: 130, read_ms: 40, writes: 150, written_sectors: 170, write_ms: 80 }
        );
        assert_eq!(DiskStats::parse(text, &[]), DiskStats::default());
    }

    #[test]
    fn a_quantile_is_not_below_what_was_measured_and_at_most_three_percent_above() {
        let times = (1..=1000u64).map(|us| (step_of(Duration::from_micros(us)) as u16, 1));
        for (share, truth) in [(0.01, 10.0), (0.5, 500.0), (0.99, 990.0), (1.0, 1000.0)] {
            let told = quantile_us(times.clone(), share).unwrap();
            assert!((truth..truth * 1.03).contains(&told), "{share}: {told} for {truth}");
        }
        assert_eq!(quantile_us([], 0.5), None);
        assert_eq!(step_of(Duration::from_secs(100_000)), BUCKETS - 1);
    }

    #[test]
    fn samples_are_numbered_bounded_and_told_once() {
        let recorder = Recorder::start(&[], Instant::now());
        let nothing = DiskStats::default();
        for i in 0..KEPT as u64 + 10 {
            recorder.finished(i);
            recorder.take(Instant::now(), EVERY, &nothing, &DiskStats { reads: i, ..nothing });
        }
        let first = recorder.report(BootId(1), 0);
        assert_eq!(first.samples.len(), MOST);
        assert!(first.samples[0].reads >= 10, "the oldest ten are gone");
        let second = recorder.report(BootId(1), first.next);
        assert_eq!(second.samples[0].reads, first.samples[MOST - 1].reads + 1);
        assert_eq!(recorder.report(BootId(1), u64::MAX).samples, []);
    }

    #[test]
    fn the_longest_reply_fits_into_a_line() {
        let recorder = Recorder::start(&[], Instant::now());
        for _ in 0..MOST {
            for step in &recorder.latency {
                step.store(4_000_000, Relaxed);
            }
            let many = DiskStats { reads: 1 << 40, read_sectors: 1 << 50, read_ms: 1 << 40, ..DiskStats::default() };
            recorder.take(Instant::now(), EVERY, &DiskStats::default(), &many);
        }
        let report = recorder.report(BootId(1), 0);
        assert!(report.samples.len() >= 3);
        let mut out = vec![];
        let reply = crate::protocol::Reply::Ok(crate::protocol::Answer::Activity(report));
        crate::wire::write_line(&mut out, &reply).unwrap();
    }
}
