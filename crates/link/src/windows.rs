//! What the lanes of a session know together of their path.
//!
//! Each lane is a connection with a congestion window of its own, and all of them go through one bottleneck. The memory of a guest begins
//! when the copy of its disk ends: at that moment the queue is full of blocks, memory loses packets in its first round trips, its window
//! is cut while it is small, and CUBIC takes seconds to make it large again on a path that nobody else uses any more. So a lane
//! that has more to send than its window allows takes the window of one that has just stopped: the two exchange theirs. What all of them
//! may have in flight stays what it was, and no window is larger than one that this path has carried moments ago.
//!
//! The idea is that of RFC 9040, which shares what one TCP connection has learnt with the next one.

use crate::Lane;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A lane has stopped when it has not been held back by its window for so many round trips.
const STOPPED: u32 = 2;
/// And what it knew of the path is not worth anything after so long.
const WORTH: Duration = Duration::from_secs(5);

/// One lane, as the others see it.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    /// When its window last held it back.
    busy: Option<Instant>,
    window: u64,
    /// The window that it got in exchange, which it does not know of yet.
    left: Option<u64>,
}

/// The windows of a session's lanes, in bytes.
#[derive(Debug, Default)]
pub struct Windows(Mutex<[Seen; Lane::ALL.len()]>);

impl Windows {
    fn lock(&self) -> MutexGuard<'_, [Seen; Lane::ALL.len()]> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A lane has a new connection.
    pub fn begin(&self, lane: Lane) {
        self.lock()[lane.index()] = Seen::default();
    }

    /// `lane` had more to send than its `window` allowed. Another lane's window, if that has just stopped and its is the larger one: it is
    /// `lane`'s from now on.
    pub fn busy(&self, lane: Lane, window: u64, rtt: Duration, now: Instant) -> Option<u64> {
        let mut seen = self.lock();
        let mine = &mut seen[lane.index()];
        mine.busy = Some(now);
        mine.window = window;
        let stopped = |s: &&mut Seen| {
            let quiet = s.busy.map(|at| now.saturating_duration_since(at));
            s.window > window && quiet.is_some_and(|quiet| quiet >= rtt * STOPPED && quiet <= WORTH)
        };
        let other = seen.iter_mut().filter(stopped).max_by_key(|s| s.window)?;
        let taken = other.window;
        *other = Seen { busy: None, window, left: Some(window) };
        seen[lane.index()].window = taken;
        Some(taken)
    }

    /// `lane` has lost something, and with it a part of its window.
    pub fn cut(&self, lane: Lane, window: u64) {
        self.lock()[lane.index()].window = window;
    }

    /// What another lane left to this one, which is to go on with that. Once.
    pub fn left(&self, lane: Lane) -> Option<u64> {
        self.lock()[lane.index()].left.take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RTT: Duration = Duration::from_millis(20);

    #[test]
    fn a_lane_that_begins_when_another_stops_goes_on_with_its_window() {
        let (windows, began) = (Windows::default(), Instant::now());
        let at = |ms: u64| began + Duration::from_millis(ms);
        assert_eq!(windows.busy(Lane::Disk, 500_000, RTT, at(0)), None);
        // The disk goes on: each keeps its own.
        assert_eq!(windows.busy(Lane::Memory, 90_000, RTT, at(10)), None);
        assert_eq!(windows.busy(Lane::Disk, 510_000, RTT, at(20)), None);
        assert_eq!(windows.busy(Lane::Memory, 91_000, RTT, at(59)), None);
        assert_eq!(windows.left(Lane::Disk), None);
        // The disk has stopped, and its last packets were too many. Nothing is had twice.
        windows.cut(Lane::Disk, 357_000);
        assert_eq!(windows.busy(Lane::Memory, 92_000, RTT, at(60)), Some(357_000));
        assert_eq!(windows.busy(Lane::Memory, 357_000, RTT, at(61)), None);
        assert_eq!(windows.left(Lane::Disk), Some(92_000));
        assert_eq!(windows.left(Lane::Disk), None);
        // The other way round.
        assert_eq!(windows.busy(Lane::Disk, 128_000, RTT, at(150)), Some(357_000));
        assert_eq!(windows.left(Lane::Memory), Some(128_000));
    }

    #[test]
    fn a_window_is_taken_neither_when_it_is_smaller_nor_when_it_is_old_nor_of_a_connection_before() {
        let (windows, began) = (Windows::default(), Instant::now());
        let at = |ms: u64| began + Duration::from_millis(ms);
        assert_eq!(windows.busy(Lane::Disk, 500_000, RTT, at(0)), None);
        assert_eq!(windows.busy(Lane::Memory, 500_000, RTT, at(100)), None);
        assert_eq!(windows.busy(Lane::Memory, 400_000, RTT, at(5_001)), None);
        assert_eq!(windows.busy(Lane::Disk, 500_000, RTT, at(6_000)), None);
        windows.begin(Lane::Disk);
        assert_eq!(windows.busy(Lane::Memory, 90_000, RTT, at(6_100)), None);
    }
}
