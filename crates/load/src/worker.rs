//! The thread of one load: paced work between commands.
//!
//! A load's data belongs to its thread. Whoever wants it checked or damaged sends a command, and waits: between two
//! batches there is no half-done touch or write to lock out. All loads are paused before the first of them is
//! verified, so that a check costs every load the same pause and sees one moment.

use std::{
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
        mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use crate::{
    pace::Pacer,
    protocol::{CheckReport, CorruptReport, Refusal},
    wire::{bounded, refusal},
};

/// Time between two batches of a load that keeps up.
pub(crate) const TICK: Duration = Duration::from_millis(10);

/// Most units of work between two looks at the commands: bounds how long a check waits for a load that cannot keep up.
const MAX_BATCH: u64 = 1024;

/// What a load does; runs in its own thread.
pub(crate) trait Work: Send + 'static {
    /// Units of work per second.
    fn per_s(&self) -> f64;
    /// Does `units`. Called at least every [`TICK`], also with 0.
    fn step(&mut self, units: u64);
    /// A batch started `gap` after the one before.
    fn note_gap(&mut self, _gap: Duration) {}
    /// Brings the work to a rest, for a stop.
    fn settle(&mut self) {}
    /// Verifies everything and adds it to `report`.
    fn verify(&mut self, report: &mut CheckReport);
    /// Damages something on purpose.
    fn damage(&mut self) -> Result<CorruptReport, Refusal>;
}

enum Command {
    /// Stop working; answered when stopped.
    Pause(SyncSender<()>),
    /// Work on.
    Resume,
    /// Flush what is under way; answered when done.
    Settle(SyncSender<()>),
    /// Verify; the report travels there and back.
    Verify(CheckReport, SyncSender<CheckReport>),
    /// Damage something.
    Damage(SyncSender<Result<CorruptReport, Refusal>>),
}

/// The thread ended without being told to: it panicked, most likely over damaged memory.
#[derive(Debug, thiserror::Error)]
#[error(
    "the load's thread has died, most likely over damaged guest memory; see the guest's console for its last words"
)]
pub(crate) struct Died;

/// Handle of a running load. Dropping it ends the thread.
pub(crate) struct Worker {
    commands: Option<SyncSender<Command>>,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    /// A thread for `work`, paused. `clock` counts the time that it runs.
    pub fn spawn(name: String, mut work: impl Work, clock: std::sync::Arc<RunClock>) -> Result<Self, std::io::Error> {
        let (commands, inbox) = sync_channel(1);
        let thread = std::thread::Builder::new().name(name).spawn(move || run(&mut work, &inbox, &clock))?;
        Ok(Self { commands: Some(commands), thread: Some(thread) })
    }

    fn ask<T>(&self, command: impl FnOnce(SyncSender<T>) -> Command) -> Result<T, Died> {
        let (answer, answered) = sync_channel(1);
        self.send(command(answer))?;
        answered.recv().map_err(|_| Died)
    }

    fn send(&self, command: Command) -> Result<(), Died> {
        self.commands.as_ref().ok_or(Died)?.send(command).map_err(|_| Died)
    }

    pub fn pause(&self) -> Result<(), Died> {
        self.ask(Command::Pause)
    }

    pub fn resume(&self) -> Result<(), Died> {
        self.send(Command::Resume)
    }

    pub fn settle(&self) -> Result<(), Died> {
        self.ask(Command::Settle)
    }

    pub fn verify(&self, report: CheckReport) -> Result<CheckReport, Died> {
        self.ask(|answer| Command::Verify(report, answer))
    }

    pub fn damage(&self) -> Result<Result<CorruptReport, Refusal>, Died> {
        self.ask(Command::Damage)
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.commands = None;
        if let Some(thread) = self.thread.take() {
            // A panic was already reported on standard error, and to whoever sent a command.
            let _ = thread.join();
        }
    }
}

fn run(work: &mut impl Work, inbox: &Receiver<Command>, clock: &RunClock) {
    let origin = Instant::now();
    let mut pacer = Pacer::new(work.per_s(), Duration::ZERO);
    let mut last_step = Duration::ZERO;
    let mut state = State::Paused;
    loop {
        if state == State::Paused {
            match inbox.recv() {
                Ok(command) => state = obey(work, command),
                Err(_) => return,
            }
            last_step = origin.elapsed();
            pacer.skip_to(last_step);
            continue;
        }
        let wait = if pacer.is_behind() { Duration::ZERO } else { (last_step + TICK).saturating_sub(origin.elapsed()) };
        match inbox.recv_timeout(wait) {
            Err(RecvTimeoutError::Disconnected) => return,
            Err(RecvTimeoutError::Timeout) => {
                let now = origin.elapsed();
                let gap = now.saturating_sub(last_step);
                work.note_gap(gap);
                clock.add(gap);
                last_step = now;
                work.step(pacer.take(now, MAX_BATCH));
            }
            Ok(command) => {
                clock.add(origin.elapsed().saturating_sub(last_step));
                state = obey(work, command);
            }
        }
    }
}

#[derive(PartialEq, Eq)]
enum State {
    Running,
    Paused,
}

/// Carries out a command; every one but `Resume` leaves the load paused. An asker who went away misses nothing.
fn obey(work: &mut impl Work, command: Command) -> State {
    match command {
        Command::Resume => return State::Running,
        Command::Pause(done) => drop(done.send(())),
        Command::Settle(done) => {
            work.settle();
            let _ = done.send(());
        }
        Command::Verify(mut report, done) => {
            work.verify(&mut report);
            let _ = done.send(report);
        }
        Command::Damage(done) => drop(done.send(work.damage())),
    }
    State::Paused
}

/// For how long a load has been running, pauses not counted.
#[derive(Debug, Default)]
pub(crate) struct RunClock(AtomicU64);

impl RunClock {
    fn add(&self, time: Duration) {
        self.0.fetch_add(time.as_nanos() as u64, Relaxed);
    }

    /// `count` per second of running.
    pub fn rate(&self, count: u64) -> f64 {
        let seconds = Duration::from_nanos(self.0.load(Relaxed)).as_secs_f64();
        if seconds > 0.0 { count as f64 / seconds } else { 0.0 }
    }
}

/// Counts errors, and keeps the first in words.
#[derive(Debug, Default)]
pub(crate) struct ErrorLog {
    count: AtomicU64,
    first: Mutex<Option<String>>,
}

impl ErrorLog {
    pub fn note(&self, what: impl std::fmt::Display) {
        if self.count.fetch_add(1, Relaxed) == 0 {
            *self.first.lock().unwrap_or_else(PoisonError::into_inner) = Some(bounded(what.to_string()));
        }
    }

    pub fn count(&self) -> u64 {
        self.count.load(Relaxed)
    }

    pub fn first(&self) -> Option<String> {
        self.first.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Longest of the durations noted.
#[derive(Debug, Default)]
pub(crate) struct Longest(AtomicU64);

impl Longest {
    pub fn note(&self, time: Duration) {
        self.0.fetch_max(time.as_nanos() as u64, Relaxed);
    }

    pub fn ms(&self) -> f64 {
        self.0.load(Relaxed) as f64 / 1e6
    }
}

impl From<Died> for Refusal {
    fn from(died: Died) -> Self {
        refusal(died)
    }
}
