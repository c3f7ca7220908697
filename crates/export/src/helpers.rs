//! Threads that wait for the disk in a client's stead.

use crate::backend::{Answer, Answers, Backend};
use godwit_nbd::{Command, Cookie};
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// Threads that wait for the disk for one client, at the most: what keeps the queue of a disk full, and what nbdkit has.
pub const MOST_HELPERS: usize = 16;

/// What has to wait for the disk.
#[derive(Debug)]
pub(crate) enum Job {
    /// A read's contents are to be in memory.
    Warm { offset: u64, length: u64 },
    /// It is to be done.
    Do(Command),
}

/// The threads of one client, made when they are needed. They end with it.
pub(crate) struct Helpers(Arc<Shared>);

struct Shared {
    backend: Arc<dyn Backend>,
    answers: Answers,
    state: Mutex<State>,
    more: Condvar,
}

#[derive(Default)]
struct State {
    queue: VecDeque<(Cookie, Job)>,
    threads: Vec<JoinHandle<()>>,
    idle: usize,
    over: bool,
}

impl Helpers {
    pub fn new(backend: Arc<dyn Backend>, answers: Answers) -> Self {
        Self(Arc::new(Shared { backend, answers, state: Mutex::default(), more: Condvar::new() }))
    }

    /// Has it done; the answer comes through [`Answers`].
    pub fn give(&self, cookie: Cookie, job: Job) {
        let mut state = self.0.lock();
        state.queue.push_back((cookie, job));
        if state.idle >= state.queue.len() {
            drop(state);
            self.0.more.notify_one();
        } else if state.threads.len() < MOST_HELPERS {
            let shared = self.0.clone();
            match std::thread::Builder::new().name("nbd-disk".into()).spawn(move || shared.work()) {
                Ok(thread) => state.threads.push(thread),
                Err(error) if !state.threads.is_empty() => tracing::warn!(%error, "no further thread for a disk"),
                Err(_) => {
                    // Nobody else would ever do it.
                    drop(state);
                    self.0.one();
                }
            }
        }
    }
}

impl Drop for Helpers {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.over = true;
        let threads = std::mem::take(&mut state.threads);
        drop(state);
        self.0.more.notify_all();
        // What is being done is done when the client counts as gone.
        threads.into_iter().for_each(|thread| drop(thread.join()));
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self) {
        loop {
            let mut state = self.lock();
            while state.queue.is_empty() {
                if state.over {
                    return;
                }
                state.idle += 1;
                state = self.more.wait(state).unwrap_or_else(PoisonError::into_inner);
                state.idle -= 1;
            }
            drop(state);
            self.one();
        }
    }

    /// Does the next one, if there is any.
    fn one(&self) {
        let Some((cookie, job)) = self.lock().queue.pop_front() else { return };
        match job {
            Job::Warm { offset, length } => {
                self.backend.warm(offset, length);
                self.answers.put(cookie, Answer::Warm);
            }
            Job::Do(command) => {
                if let Some(reply) = self.backend.perform(cookie, command, &self.answers) {
                    self.answers.send(cookie, reply);
                }
            }
        }
    }
}
