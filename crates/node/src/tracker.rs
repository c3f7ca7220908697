//! Keeps how a move stands, for whoever asks; the tasks of the move write into it.

use godwit_api::host::MoveRole;
use godwit_api::progress::{DiskProgress, MoveProgress, NoteKind, Outcome, Phase, PhaseName, Round, Teller};
use godwit_units::{BitRate, Bytes};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Microseconds since 1970.
#[must_use]
pub fn unix_us(at: SystemTime) -> u64 {
    at.duration_since(UNIX_EPOCH).map_or(0, |d| u64::try_from(d.as_micros()).unwrap_or(u64::MAX))
}

/// Milliseconds since 1970: now.
#[must_use]
pub fn unix_ms() -> u64 {
    unix_us(SystemTime::now()) / 1000
}

/// Over how long the rate is averaged.
const RATE_OVER: Duration = Duration::from_secs(2);

/// Fills in what is counted elsewhere.
type Meter = Box<dyn Fn(&mut MoveProgress) + Send>;

/// A move's progress, shared by its tasks.
pub struct Tracker {
    inner: Mutex<Inner>,
}

impl std::fmt::Debug for Tracker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tracker").field("progress", &self.lock().progress).finish_non_exhaustive()
    }
}

struct Inner {
    progress: MoveProgress,
    /// Read when somebody asks, and once more when the move ends: a move may be shorter than any interval of ours.
    meters: Vec<Meter>,
    /// Bytes on the link, and when: for the rates. All, memory's, disks'.
    samples: Vec<(Instant, [u64; 3])>,
    /// Whether the link was down when it was last looked at.
    was_down: bool,
    stopped: Option<Instant>,
    started: Option<Instant>,
}

impl Default for Tracker {
    fn default() -> Self {
        Self::new()
    }
}

impl Tracker {
    /// A move that begins now.
    #[must_use]
    pub fn new() -> Self {
        let progress = MoveProgress {
            outcome: Outcome::Running,
            phase: PhaseName::Reserve,
            phases: vec![Phase {
                name: PhaseName::Reserve,
                started_unix_us: unix_us(SystemTime::now()),
                ended_unix_us: None,
            }],
            bytes: Default::default(),
            raw: Bytes(0),
            zero_pages: 0,
            held_memory: Bytes(0),
            neighbour_memory: Bytes(0),
            rounds: vec![],
            disk: DiskProgress::default(),
            memory_remaining: Bytes(0),
            dirty_rate: Bytes(0),
            rate: BitRate(0),
            predicted_end_unix_us: None,
            limit: None,
            stopped_unix_us: None,
            resumed_unix_us: None,
            downtime_ms: None,
            network_proved_ms: None,
            error: None,
            link_down_s: None,
            predicted_downtime_ms: None,
            memory_rate: BitRate(0),
            disk_rate: BitRate(0),
            trace: Default::default(),
        };
        Self::with(progress)
    }

    /// One that goes on, in a node that was restarted.
    #[must_use]
    pub fn resume(mut progress: MoveProgress) -> Self {
        (progress.outcome, progress.error) = (Outcome::Running, None);
        Self::with(progress)
    }

    fn with(progress: MoveProgress) -> Self {
        let inner = Inner { progress, meters: vec![], samples: vec![], was_down: false, stopped: None, started: None };
        Self { inner: Mutex::new(inner) }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// As it stands.
    #[must_use]
    pub fn get(&self) -> MoveProgress {
        let mut inner = self.lock();
        inner.measure();
        inner.predict();
        inner.progress.clone()
    }

    /// Has `meter` fill in its figures whenever they are asked for, until the move ends; it must not block.
    pub fn metered(&self, meter: impl Fn(&mut MoveProgress) + Send + 'static) {
        self.lock().meters.push(Box::new(meter));
    }

    /// Changes something.
    pub fn update(&self, change: impl FnOnce(&mut MoveProgress)) {
        change(&mut self.lock().progress);
    }

    /// Where it is.
    #[must_use]
    pub fn phase(&self) -> PhaseName {
        self.lock().progress.phase
    }

    /// The move enters a phase. Going back is possible: a phase may be listed twice.
    pub fn enter(&self, phase: PhaseName) {
        let mut inner = self.lock();
        if inner.progress.phase == phase {
            return;
        }
        let now = unix_us(SystemTime::now());
        if let Some(last) = inner.progress.phases.last_mut() {
            last.ended_unix_us.get_or_insert(now);
        }
        inner.progress.phase = phase;
        inner.progress.phases.push(Phase { name: phase, started_unix_us: now, ended_unix_us: None });
    }

    /// The vCPUs stopped.
    pub fn stopped(&self, at: Instant, unix: u64) {
        let mut inner = self.lock();
        inner.stopped = Some(at);
        inner.progress.stopped_unix_us = Some(unix);
    }

    /// The source heard that the guest runs at the destination, `one_way` after that was so.
    pub fn running_there(&self, heard: Instant, one_way: Duration, resumed_unix_us: Option<u64>) {
        let mut inner = self.lock();
        if let (Some(stopped), None) = (inner.stopped, inner.started) {
            inner.started = Some(heard);
            let pause = heard.saturating_duration_since(stopped).saturating_sub(one_way);
            inner.progress.downtime_ms = Some(pause.as_secs_f64() * 1000.0);
        }
        if resumed_unix_us.is_some() {
            inner.progress.resumed_unix_us = resumed_unix_us;
        }
        let by_clocks = inner.progress.pause_by_clocks_ms();
        inner.progress.downtime_ms = inner.progress.downtime_ms.or(by_clocks);
    }

    /// The move is over.
    pub fn end(&self, outcome: Outcome, error: Option<String>) {
        let mut inner = self.lock();
        if !inner.progress.outcome.is_open() {
            return;
        }
        inner.measure();
        inner.meters.clear();
        let now = unix_us(SystemTime::now());
        if let Some(last) = inner.progress.phases.last_mut() {
            last.ended_unix_us.get_or_insert(now);
        }
        inner.progress.outcome = outcome;
        inner.progress.predicted_end_unix_us = None;
        let p = &mut inner.progress;
        (p.rate, p.memory_rate, p.disk_rate) = (BitRate(0), BitRate(0), BitRate(0));
        if error.is_some() {
            inner.progress.error = error;
        }
    }

    /// Whether it is over.
    #[must_use]
    pub fn ended(&self) -> bool {
        !self.lock().progress.outcome.is_open()
    }

    /// Takes the rate from what the link has carried so far, on all lanes.
    pub fn sample(&self) {
        let mut inner = self.lock();
        inner.measure();
        let bytes = &inner.progress.bytes;
        let total = [(bytes.control + bytes.disk + bytes.memory).0, bytes.memory.0, bytes.disk.0];
        let now = Instant::now();
        inner.samples.push((now, total));
        inner.samples.retain(|(at, _)| now.saturating_duration_since(*at) <= RATE_OVER);
        let (then, before) = inner.samples[0];
        let seconds = now.saturating_duration_since(then).as_secs_f64();
        if seconds > 0.1 {
            #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss)]
            let rate = |i: usize| BitRate((total[i].saturating_sub(before[i]) as f64 * 8.0 / seconds) as u64);
            let p = &mut inner.progress;
            (p.rate, p.memory_rate, p.disk_rate) = (rate(0), rate(1), rate(2));
        }
        inner.note_link();
    }

    /// Writes something into the move's trace.
    pub fn note(&self, role: MoveRole, kind: NoteKind, text: impl Into<String>) {
        let by = match role {
            MoveRole::Source => Teller::Source,
            MoveRole::Destination => Teller::Destination,
        };
        self.lock().progress.trace.note(unix_us(SystemTime::now()), by, kind, text);
    }

    /// A round over the memory ended.
    pub fn round(&self, round: Round) {
        self.lock().progress.rounds.push(round);
    }
}

impl Inner {
    /// Notes that the link broke, or came back; only a source looks at its link all the time.
    fn note_link(&mut self) {
        let is_down = self.progress.link_down_s.is_some();
        if is_down == self.was_down {
            return;
        }
        self.was_down = is_down;
        let text = if is_down {
            "the link is down: what travels waits"
        } else {
            "the link is back: streams go on where they were"
        };
        self.progress.trace.note(unix_us(SystemTime::now()), Teller::Source, NoteKind::Link, text);
    }

    fn measure(&mut self) {
        for meter in &self.meters {
            meter(&mut self.progress);
        }
    }

    /// What is left at the present rate. Told only while there is something to divide by; never moved towards the present.
    fn predict(&mut self) {
        let p = &mut self.progress;
        if p.outcome != Outcome::Running || p.rate.0 < 1000 {
            return;
        }
        let shrink = match p.raw.0 {
            0 => 1.0,
            raw => (p.bytes.memory.0 as f64 / raw as f64).min(1.0),
        };
        let left = p.disk.remaining.0 as f64 + p.memory_remaining.0 as f64 * shrink;
        let seconds = left * 8.0 / p.rate.0 as f64 + 0.5;
        let end = unix_us(SystemTime::now() + Duration::from_secs_f64(seconds.min(1e7)));
        p.predicted_end_unix_us = Some(p.predicted_end_unix_us.map_or(end, |known| known.max(end)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phases_follow_each_other_without_a_gap_and_the_last_one_ends_with_the_move() {
        let tracker = Tracker::new();
        tracker.enter(PhaseName::CopyDisk);
        tracker.enter(PhaseName::Memory);
        tracker.enter(PhaseName::Memory);
        tracker.end(Outcome::Completed, None);
        let progress = tracker.get();
        assert_eq!(progress.phases.len(), 3);
        for pair in progress.phases.windows(2) {
            assert_eq!(pair[0].ended_unix_us, Some(pair[1].started_unix_us));
        }
        assert!(progress.phases[2].ended_unix_us.is_some());
        assert_eq!(progress.outcome, Outcome::Completed);
    }

    #[test]
    fn a_move_shorter_than_any_interval_ends_with_its_figures_and_keeps_them() {
        let carried = std::sync::Arc::new(std::sync::atomic::AtomicU64::new(0));
        let read = carried.clone();
        let tracker = Tracker::new();
        tracker.metered(move |p| p.bytes.disk = Bytes(read.load(std::sync::atomic::Ordering::Relaxed)));
        carried.store(7, std::sync::atomic::Ordering::Relaxed);
        assert_eq!(tracker.get().bytes.disk, Bytes(7));
        carried.store(9, std::sync::atomic::Ordering::Relaxed);
        tracker.end(Outcome::Completed, None);
        // The session may carry another move by now.
        carried.store(11, std::sync::atomic::Ordering::Relaxed);
        assert_eq!(tracker.get().bytes.disk, Bytes(9));
    }

    #[test]
    fn a_cut_of_the_link_is_in_the_trace_once_and_so_is_its_end() {
        let tracker = Tracker::new();
        for down in [None, Some(0.1), Some(0.4), None, None, Some(0.2)] {
            tracker.update(|p| p.link_down_s = down);
            tracker.sample();
        }
        let kinds: Vec<(Teller, String)> = tracker.get().trace.notes.into_iter().map(|n| (n.by, n.text)).collect();
        assert_eq!(kinds.len(), 3, "{kinds:?}");
        assert!(kinds[0].1.contains("down") && kinds[1].1.contains("back") && kinds[2].1.contains("down"));
    }

    #[test]
    fn a_node_that_was_restarted_within_the_pause_takes_it_from_the_clocks() {
        let before = Tracker::new();
        before.stopped(Instant::now(), 1_000_000);
        let after = Tracker::resume(before.get());
        after.running_there(Instant::now(), Duration::ZERO, Some(4_500_000));
        assert_eq!(after.get().downtime_ms, Some(3500.0));
    }

    #[test]
    fn the_pause_is_taken_by_the_sources_clock_less_the_way_of_the_news() {
        let tracker = Tracker::new();
        let stop = Instant::now();
        tracker.stopped(stop, 1);
        tracker.running_there(stop + Duration::from_millis(300), Duration::from_millis(50), Some(2));
        tracker.running_there(stop + Duration::from_millis(900), Duration::from_millis(50), None);
        assert_eq!(tracker.get().downtime_ms, Some(250.0));
        assert_eq!(tracker.get().resumed_unix_us, Some(2));
    }
}
