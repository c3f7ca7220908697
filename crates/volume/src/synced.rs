//! A medium whose syncs all hear of a failure.
//!
//! Linux tells of a write that it could not make once for each description of a file: of two syncs that wait for the same write one is told,
//! and the other one is not. Whoever was not told must not say that something is durable: so one sync runs at a time, those that came
//! meanwhile share the next one, and after one that has failed there is none that succeeds before the medium is opened again.

use crate::file::{Media, Medium};
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// How syncs stand: they are counted.
#[derive(Debug, Default)]
struct Syncs {
    begun: u64,
    /// Up to this one all that have ended have succeeded.
    ended: u64,
    runs: bool,
    failed: bool,
}

/// A medium that is used by several threads, and is otherwise what it was.
///
/// One sync runs at a time, and after one that failed each [`Medium::sync`] fails, with words of its own, until the medium is opened again:
/// what is to be durable is synced through one of these, and through nothing beside it.
#[derive(Debug)]
pub struct Synced {
    medium: Box<dyn Medium>,
    syncs: Mutex<Syncs>,
    changed: Condvar,
}

impl Synced {
    /// None of its syncs has failed yet: it has just been opened.
    #[must_use]
    pub fn new(medium: Box<dyn Medium>) -> Self {
        Self { medium, syncs: Mutex::default(), changed: Condvar::new() }
    }

    /// All that a replica lies on.
    pub(crate) fn all(media: Media) -> Media {
        let Media { data, stamps, hot, words, power, description, region } = media;
        let synced = |medium| -> Box<dyn Medium> { Box::new(Self::new(medium)) };
        let (data, stamps, hot, words) = (synced(data), synced(stamps), synced(hot), synced(words));
        Media { data, stamps, hot, words, power, description, region }
    }

    fn lock(&self) -> MutexGuard<'_, Syncs> {
        self.syncs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Medium for Synced {
    fn read(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        self.medium.read(at, into)
    }

    fn read_now(&self, at: u64, into: &mut [u8]) -> usize {
        self.medium.read_now(at, into)
    }

    fn file(&self) -> Option<BorrowedFd<'_>> {
        self.medium.file()
    }

    fn read_past_cache(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        self.medium.read_past_cache(at, into)
    }

    fn warm(&self, at: u64, length: u64) {
        self.medium.warm(at, length);
    }

    fn write(&self, at: u64, from: &[u8]) -> io::Result<()> {
        self.medium.write(at, from)
    }

    fn punch(&self, at: u64, length: u64) -> io::Result<()> {
        self.medium.punch(at, length)
    }

    fn write_zeroes(&self, at: u64, length: u64) -> io::Result<()> {
        self.medium.write_zeroes(at, length)
    }

    fn sync(&self) -> io::Result<()> {
        let mut syncs = self.lock();
        // One that runs already may have passed by what the caller means.
        let wanted = syncs.begun + 1;
        loop {
            if syncs.failed {
                return Err(io::Error::other(
                    "a sync has failed, and what was written before it may be lost: see to the disk, and open it again",
                ));
            }
            if syncs.ended >= wanted {
                return Ok(());
            }
            if syncs.runs {
                syncs = self.changed.wait(syncs).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            (syncs.runs, syncs.begun) = (true, syncs.begun + 1);
            let this = syncs.begun;
            drop(syncs);
            let done = self.medium.sync();
            syncs = self.lock();
            syncs.runs = false;
            match &done {
                Ok(()) => syncs.ended = this,
                Err(_) => syncs.failed = true,
            }
            self.changed.notify_all();
            done?;
        }
    }

    fn extents(&self, at: u64, length: u64) -> io::Result<Vec<(u64, bool)>> {
        self.medium.extents(at, length)
    }

    fn knows_holes(&self) -> bool {
        self.medium.knows_holes()
    }

    fn allocated(&self) -> u64 {
        self.medium.allocated()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::time::Duration;

    /// Each sync says that it has begun, and waits for what it is to end with.
    #[derive(Debug)]
    struct Waits {
        begun: Mutex<Sender<()>>,
        ends: Mutex<Receiver<bool>>,
        syncs: Arc<AtomicU64>,
    }

    impl Medium for Waits {
        fn read(&self, _: u64, _: &mut [u8]) -> io::Result<()> {
            Ok(())
        }
        fn write(&self, _: u64, _: &[u8]) -> io::Result<()> {
            Ok(())
        }
        fn punch(&self, _: u64, _: u64) -> io::Result<()> {
            Ok(())
        }
        fn sync(&self) -> io::Result<()> {
            self.syncs.fetch_add(1, Ordering::Relaxed);
            self.begun.lock().unwrap().send(()).unwrap();
            if self.ends.lock().unwrap().recv().unwrap() { Ok(()) } else { Err(io::ErrorKind::StorageFull.into()) }
        }
        fn extents(&self, _: u64, _: u64) -> io::Result<Vec<(u64, bool)>> {
            Ok(vec![])
        }
        fn allocated(&self) -> u64 {
            0
        }
    }

    /// Whether each of four syncs succeeded, of which three came while the first one ran, and how many the medium saw.
    fn four(ends: [bool; 2]) -> (Vec<bool>, u64) {
        let ((begun, begins), (end, ended), syncs) = (channel(), channel(), Arc::new(AtomicU64::new(0)));
        let medium = Waits { begun: Mutex::new(begun), ends: Mutex::new(ended), syncs: syncs.clone() };
        let synced = Synced::new(Box::new(medium));
        let coming = AtomicU64::new(0);
        let done = std::thread::scope(|scope| {
            let first = scope.spawn(|| synced.sync().is_ok());
            begins.recv().unwrap();
            let come = || {
                coming.fetch_add(1, Ordering::Relaxed);
                synced.sync().is_ok()
            };
            let others: Vec<_> = (0..3).map(|_| scope.spawn(come)).collect();
            while coming.load(Ordering::Relaxed) < 3 {
                std::thread::yield_now();
            }
            // They wait: what runs is not theirs.
            assert!(begins.recv_timeout(Duration::from_millis(100)).is_err(), "two syncs at once");
            ends.iter().for_each(|well| end.send(*well).unwrap());
            // Another one would fail, and not wait for ever.
            drop(end);
            let others = others.into_iter().map(|other| other.join().unwrap());
            std::iter::once(first.join().unwrap()).chain(others).collect()
        });
        (done, syncs.load(Ordering::Relaxed))
    }

    #[test]
    fn those_that_come_meanwhile_share_the_next_one() {
        let (done, syncs) = four([true, true]);
        assert_eq!(done, [true; 4]);
        assert_eq!(syncs, 2);
    }

    #[test]
    fn whoever_waits_beside_one_that_fails_hears_of_it_though_the_system_tells_only_that_one() {
        assert_eq!(four([false, true]), (vec![false; 4], 1));
        assert_eq!(four([true, false]).0.into_iter().filter(|well| *well).count(), 1);
    }
}
