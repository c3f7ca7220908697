//! The clock and the waiting around [`Budget`]: one task per session hands out its grants.

use crate::Priority;
use crate::budget::{Budget, Ticket};
use godwit_units::{BitRate, Bytes};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;
use tokio::sync::{Notify, oneshot};

/// Shared by all streams of a session.
#[derive(Debug)]
pub struct Limiter {
    inner: Mutex<Inner>,
    changed: Notify,
    start: Instant,
}

#[derive(Debug)]
struct Inner {
    budget: Budget,
    waiting: HashMap<Ticket, oneshot::Sender<()>>,
}

/// A wait for bytes; dropping it gives it up.
#[derive(Debug)]
pub struct Grant {
    limiter: Arc<Limiter>,
    ticket: Ticket,
    granted: oneshot::Receiver<()>,
    /// How many bytes were asked for.
    pub bytes: usize,
}

impl Grant {
    /// Waits; may be dropped and called again.
    pub async fn wait(&mut self) {
        // The sender lives in the limiter, which we hold: it can only be taken to send.
        let _ = (&mut self.granted).await;
    }
}

impl Drop for Grant {
    fn drop(&mut self) {
        let mut inner = self.limiter.lock();
        if inner.waiting.remove(&self.ticket).is_some() {
            inner.budget.cancel(self.ticket);
        }
    }
}

impl Limiter {
    pub fn new() -> Arc<Self> {
        let inner = Inner { budget: Budget::new(), waiting: HashMap::new() };
        Arc::new(Self { inner: Mutex::new(inner), changed: Notify::new(), start: Instant::now() })
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn set_rate(&self, rate: Option<BitRate>) {
        self.lock().budget.set_rate(self.start.elapsed(), rate);
        self.changed.notify_one();
    }

    /// Asks for up to `wanted` bytes; `None` where no limit applies.
    pub fn ask(self: &Arc<Self>, priority: Priority, wanted: usize) -> Option<Grant> {
        let mut inner = self.lock();
        if priority == Priority::Control || inner.budget.rate().is_none() {
            return None;
        }
        let bytes = wanted.min(inner.budget.piece());
        let ticket = inner.budget.request(priority, Bytes(bytes as u64));
        let (tell, granted) = oneshot::channel();
        inner.waiting.insert(ticket, tell);
        drop(inner);
        self.changed.notify_one();
        Some(Grant { limiter: Arc::clone(self), ticket, granted, bytes })
    }

    /// Hands out grants, for ever.
    pub async fn run(self: Arc<Self>) {
        loop {
            let wait = {
                let mut inner = self.lock();
                let now = self.start.elapsed();
                while let Some(ticket) = inner.budget.poll(now) {
                    if let Some(tell) = inner.waiting.remove(&ticket) {
                        let _ = tell.send(());
                    }
                }
                inner.budget.wait(now)
            };
            match wait {
                None => self.changed.notified().await,
                Some(time) => {
                    tokio::select! {
                        () = self.changed.notified() => {}
                        () = tokio::time::sleep(time) => {}
                    }
                }
            }
        }
    }
}
