//! Work that comes after guests: on a thread that this process's other threads go before.
//!
//! On a host whose processors are busy a thread that has just become ready waits for the one that runs, for a millisecond or three, unless that has
//! a lower priority: then it runs at once. What reads and packs for seconds on end is therefore not to have the same priority as what serves a
//! guest's disk. QEMU's own threads go before it, too, where the kernel sees them in one group with the node's: the QEMUs that a node starts are in its
//! session, and in its control group. (Those that it has found again are in an earlier node's session; under the packaged unit that is one control
//! group all the same.) It is no place for what takes a guest's locks for longer than moments: whoever holds one and may not run is waited
//! for.

use anyhow::{Context, Result};
use tokio::sync::oneshot;

type Work = Box<dyn FnOnce() + Send>;

/// A thread with a lower priority, until this is dropped and what it was given last is done.
#[derive(Debug)]
pub(crate) struct Aside(std::sync::mpsc::Sender<Work>);

impl Aside {
    /// `name`: at most 15 bytes. `nice`: how much lower, as in nice(2).
    pub(crate) fn new(name: &str, nice: i32) -> Result<Self> {
        let (work, given) = std::sync::mpsc::channel::<Work>();
        let run = move || {
            // It is this thread's alone.
            let _ = rustix::process::nice(nice);
            given.into_iter().for_each(|work| work());
        };
        std::thread::Builder::new().name(name.into()).spawn(run).with_context(|| format!("cannot begin `{name}`"))?;
        Ok(Self(work))
    }

    /// Does it there. Whoever does not wait for it any more does not stop it.
    ///
    /// # Errors
    /// When it ends in a panic, or one before it did.
    pub(crate) async fn run<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> Result<T> {
        let (done, result) = oneshot::channel();
        let work = Box::new(move || {
            let _ = done.send(work());
        });
        // Where the thread is gone `result` says so.
        let _ = self.0.send(work);
        result.await.context("what is done aside ended in a bug")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own_nice() -> i32 {
        rustix::process::nice(0).expect("a thread may ask for its own")
    }

    #[tokio::test]
    async fn work_has_a_lower_priority_than_who_waits_for_it_and_is_done_in_turn() {
        let aside = Aside::new("aside", 7).expect("begins");
        let (before, own) = (own_nice(), std::thread::current().id());
        let (nice, thread) = aside.run(|| (own_nice(), std::thread::current().id())).await.expect("is done");
        assert_eq!((nice, own_nice()), ((before + 7).min(19), before));
        assert_ne!(thread, own);
        assert_eq!(aside.run(|| std::thread::current().id()).await.expect("is done"), thread);
    }

    #[tokio::test]
    async fn a_bug_there_is_an_error_here() {
        let aside = Aside::new("aside", 0).expect("begins");
        assert!(aside.run(|| panic!("on purpose")).await.is_err());
        assert!(aside.run(|| ()).await.is_err(), "the thread is gone");
    }
}
