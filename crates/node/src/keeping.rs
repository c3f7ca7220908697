//! What the keepers of VMs and of components share: each drives a hand-off's machine, one thing at a time.

use std::time::Duration;
use tokio::task::JoinHandle;
use tokio::time::Instant;

/// The first wait for an answer of the peer.
const FIRST: Duration = Duration::from_millis(400);
/// The longest.
const LONGEST: Duration = Duration::from_secs(2);

/// The timer that a machine sets. It waits longer each time that it goes off with nothing heard in between.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Timer {
    due: Option<Instant>,
    wait: Duration,
}

impl Timer {
    pub const fn new() -> Self {
        Self { due: None, wait: FIRST }
    }

    pub fn set(&mut self) {
        self.due = Some(Instant::now() + self.wait);
    }

    /// It has gone off, or what it was set for is over.
    pub const fn clear(&mut self) {
        self.due = None;
    }

    /// The machine has taken an event.
    pub fn taken(&mut self, event_was_timer: bool) {
        self.wait = if event_was_timer { (self.wait * 5 / 4).min(LONGEST) } else { FIRST };
    }

    /// Nothing was heard for long.
    pub fn is_slow(&self) -> bool {
        self.wait >= LONGEST
    }

    /// Resolves when it goes off; never while it is not set.
    pub async fn due(self) {
        due(self.due).await;
    }
}

/// Resolves then; never where there is no such time.
pub(crate) async fn due(when: Option<Instant>) {
    match when {
        Some(when) => tokio::time::sleep_until(when).await,
        None => std::future::pending().await,
    }
}

/// Does in the background what may block; at once where there are no tasks.
pub(crate) fn aside(work: impl FnOnce() + Send + 'static) {
    match tokio::runtime::Handle::try_current() {
        Ok(runtime) => drop(runtime.spawn_blocking(work)),
        Err(_) => work(),
    }
}

/// A task came to no end of its own: it ended with the runtime. Whoever asked ends with that, too, and does nothing until then; to be gone would
/// say something to others.
#[derive(Debug)]
pub(crate) struct RuntimeEnded;

/// Resolves when the task, if there is one, is done; its slot is empty then. None: it panicked.
pub(crate) async fn finished<T>(slot: &mut Option<JoinHandle<T>>) -> Result<Option<T>, RuntimeEnded> {
    match slot {
        Some(task) => {
            let result = task.await;
            *slot = None;
            match result {
                Ok(done) => Ok(Some(done)),
                Err(error) if error.is_cancelled() => Err(RuntimeEnded),
                Err(_) => Ok(None),
            }
        }
        None => std::future::pending().await,
    }
}

/// Ends the process at once: a restart recovers from what is durable.
pub fn fatal(why: &str) -> ! {
    tracing::error!("{why}; the node ends, and recovers when it is started again");
    std::process::exit(70)
}
