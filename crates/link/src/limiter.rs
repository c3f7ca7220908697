//! The clock and the waiting around [`Budget`]: one task per peer hands out its grants, to the streams of all sessions with that.

use crate::Priority;
use crate::budget::{Budget, Ticket};
use godwit_units::{BitRate, Bytes};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};
use tokio::sync::{Notify, oneshot};

/// Shared by all streams of all sessions with a peer.
#[derive(Debug)]
pub struct Limiter {
    inner: Mutex<Inner>,
    changed: Arc<Notify>,
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
    /// Within a tokio runtime.
    pub fn new() -> Arc<Self> {
        let inner = Inner { budget: Budget::new(), waiting: HashMap::new() };
        let changed = Arc::new(Notify::new());
        let this = Arc::new(Self { inner: Mutex::new(inner), changed: Arc::clone(&changed), start: Instant::now() });
        tokio::spawn(hand_out(Arc::downgrade(&this), changed));
        this
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

    /// Hands out what there is; how long until there is more, where that is known.
    fn grant(&self) -> Option<Duration> {
        let mut inner = self.lock();
        let now = self.start.elapsed();
        while let Some(ticket) = inner.budget.poll(now) {
            if let Some(tell) = inner.waiting.remove(&ticket) {
                let _ = tell.send(());
            }
        }
        inner.budget.wait(now)
    }
}

impl Drop for Limiter {
    fn drop(&mut self) {
        self.changed.notify_one();
    }
}

/// Hands out grants for as long as the limiter is there.
async fn hand_out(limiter: Weak<Limiter>, changed: Arc<Notify>) {
    while let Some(wait) = limiter.upgrade().map(|limiter| limiter.grant()) {
        match wait {
            None => changed.notified().await,
            Some(time) => {
                tokio::select! {
                    () = changed.notified() => {}
                    () = tokio::time::sleep(time) => {}
                }
            }
        }
    }
}
