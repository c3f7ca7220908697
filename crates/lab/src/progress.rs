//! Says how far a run is while it runs, on standard error.
//!
//! On a terminal the last line is rewritten in place; elsewhere (CI logs) a line appears when a phase begins and
//! then at most every [`QUIET`].

use godwit_units::Bytes;
use std::collections::HashMap;
use std::io::{IsTerminal, Write};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Least time between two lines about the same VM off a terminal.
const QUIET: Duration = Duration::from_secs(10);
/// Least time between two rewrites on a terminal.
const BLINK: Duration = Duration::from_millis(200);

/// Where progress is written.
#[derive(Debug)]
pub struct Progress {
    began: Instant,
    terminal: bool,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// What is being run: a baseline's name, or `godwit`.
    title: String,
    phases: HashMap<String, String>,
    last: HashMap<String, (Instant, Bytes)>,
    /// Whether the cursor stands behind a line that may be overwritten.
    open: bool,
}

impl Default for Progress {
    fn default() -> Self {
        Self { began: Instant::now(), terminal: std::io::stderr().is_terminal(), state: Mutex::default() }
    }
}

impl Progress {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets what is being run.
    pub fn title(&self, title: &str) {
        self.state().title = title.to_owned();
    }

    /// A line that stays.
    pub fn note(&self, text: &str) {
        self.write(&mut self.state(), text, true);
    }

    /// A VM's move enters a phase.
    pub fn phase(&self, vm: &str, phase: &str) {
        let mut state = self.state();
        state.phases.insert(vm.to_owned(), phase.to_owned());
        state.last.remove(vm);
        self.write(&mut state, &format!("{vm}: {phase}"), true);
    }

    /// As [`Progress::phase`], said only if it is another one than before.
    pub fn enter(&self, vm: &str, phase: &str) {
        let known = self.state().phases.get(vm).is_some_and(|p| p == phase);
        if !known {
            self.phase(vm, phase);
        }
    }

    /// How much of the phase is done; `more` says anything else.
    pub fn amount(&self, vm: &str, done: Bytes, of: Option<Bytes>, more: &str) {
        let mut state = self.state();
        let now = Instant::now();
        let pause = if self.terminal { BLINK } else { QUIET };
        let before = state.last.get(vm).copied();
        if before.is_none() {
            state.last.insert(vm.to_owned(), (now, done));
            return;
        }
        let Some((then, was)) = before.filter(|(then, _)| now - *then >= pause) else { return };
        state.last.insert(vm.to_owned(), (now, done));
        let rate = done.saturating_sub(was).0 as f64 * 8e-6 / (now - then).as_secs_f64();
        let of = of.map_or_else(String::new, |of| format!(" of {of}"));
        let comma = if more.is_empty() { "" } else { ", " };
        let phase = state.phases.get(vm).cloned().unwrap_or_default();
        self.write(&mut state, &format!("{vm}: {phase} {done}{of}, {rate:.0} Mbit/s{comma}{more}"), false);
    }

    fn write(&self, state: &mut State, text: &str, stays: bool) {
        let at = self.began.elapsed().as_secs_f64();
        let title = if state.title.is_empty() { String::new() } else { format!("{} ", state.title) };
        let clear = if state.open { "\r\x1b[K" } else { "" };
        let end = if stays || !self.terminal { "\n" } else { "" };
        state.open = end.is_empty();
        // A closed standard error is no reason to fail a run.
        let _ = write!(std::io::stderr(), "{clear}[{at:6.1} s] {title}{text}{end}");
        let _ = std::io::stderr().flush();
    }
}
