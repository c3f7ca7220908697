//! How far a mirror's target may be behind what the guest was told is written.
//!
//! If each mirrored write waited for the target, each flush of the guest's would take a round trip, and on top of it the queue that the
//! move's own bytes make before the link. That buys nothing: until the hand-off the source's replica is the volume, and before it
//! nothing at the target is believed without the end that counts every message. So a write goes to the target at once, and is answered while
//! what was sent of the guest's writes and not acknowledged, itself with it, is within a *bound*. What does wait is the guest that writes faster
//! than the link carries; otherwise the move would never end, or its pause would have no bound.
//!
//! The bound is what keeps the link busy, its rate times its round trip, and [`LEEWAY`] more:
//!
//! - a guest that writes slower than the link does not reach it, so it waits for no round trip;
//! - one that writes faster is held to what the link carries, and not to less;
//! - who stops the guest finds a round trip and [`LEEWAY`] of what it was told on the way at the most; what it was not told is bounded by the
//!   requests that it may have under way.
//!
//! A write that is larger than the bound waits until all but so much of it is there. A message counts as a block at least: a range of zeroes
//! is a few bytes on the wire, and work at the target. What the copy sends is not counted: it is bounded by its own window, and a guest need
//! not wait for what it has not written.

use crate::blocks::BLOCK;
use crate::mirror::Seq;
use godwit_units::BitRate;
use std::collections::VecDeque;
use std::time::Duration;

/// What the target may be behind, beside what fills the link: so much longer is a pause at the most.
const LEEWAY: Duration = Duration::from_millis(15);
/// However slow the link, and before anybody knows it: a small commit of a database or a file system.
pub(crate) const LEAST: u64 = 8 * BLOCK;
/// However fast the link, in bytes of memory.
const MOST: u64 = 8 << 20;

/// A place in all that a mirror has sent of a guest's writes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place(u64);

/// The guest's writes that were sent, and how much of them the target has.
#[derive(Debug)]
pub(crate) struct Lag {
    bound: u64,
    sent: Place,
    acked: Place,
    /// Nobody waits, however far the target is behind.
    let_go: bool,
    /// Messages that are not acknowledged, each with the place behind it.
    under_way: VecDeque<(Seq, Place)>,
}

impl Lag {
    /// Nothing sent yet, over a link that nobody knows.
    pub fn new() -> Self {
        let zero = Place::default();
        Self { bound: LEAST, sent: zero, acked: zero, let_go: false, under_way: VecDeque::new() }
    }

    /// What the link carries, and its round trip without a queue.
    pub fn path_is(&mut self, rate: BitRate, round_trip: Duration) {
        self.bound = rate.bytes_in(round_trip + LEEWAY).0.clamp(LEAST, MOST);
    }

    /// A message of a guest's write goes.
    pub fn push(&mut self, seq: Seq, message: &[u8]) {
        self.sent.0 += (message.len() as u64).max(BLOCK);
        self.under_way.push_back((seq, self.sent));
    }

    /// The place behind all that was sent.
    pub const fn sent(&self) -> Place {
        self.sent
    }

    /// The target has everything up to this message.
    pub fn acknowledged(&mut self, seq: Seq) {
        while let Some((_, place)) = self.under_way.front().copied().filter(|(s, _)| *s <= seq) {
            self.under_way.pop_front();
            self.acked = place;
        }
    }

    /// Whether whoever wrote up to here may be told.
    pub fn is_within(&self, place: Place) -> bool {
        self.let_go || place.0 <= self.acked.0 + self.bound
    }

    /// Nobody waits any more, nor will.
    pub const fn let_go(&mut self) {
        self.let_go = true;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bound_is_a_round_trip_and_a_leeway_of_the_link_and_never_nothing_nor_all_of_memory() {
        let bound = |mbit: f64, ms: u64| {
            let mut lag = Lag::new();
            lag.path_is(BitRate::from_mbit(mbit), Duration::from_millis(ms));
            lag.bound
        };
        assert_eq!(bound(80.0, 25), 400_000);
        assert_eq!((bound(0.1, 300), bound(40_000.0, 50)), (LEAST, MOST));
        assert_eq!(Lag::new().bound, LEAST);
    }

    #[test]
    fn zeroes_count_as_the_work_that_they_are() {
        let mut lag = Lag::new();
        for seq in 1..=LEAST / BLOCK {
            lag.push(seq, &[0; 50]);
            assert!(lag.is_within(lag.sent()), "{seq}");
        }
        lag.push(100, &[0; 50]);
        assert!(!lag.is_within(lag.sent()), "any number of trims would be on its way");
    }

    #[test]
    fn a_write_larger_than_the_bound_waits_until_all_but_the_bound_is_there() {
        let mut lag = Lag::new();
        let message = vec![0; LEAST as usize];
        (1..=3).for_each(|seq| lag.push(seq, &message));
        let write = lag.sent();
        lag.acknowledged(1);
        assert!(!lag.is_within(write));
        lag.acknowledged(2);
        assert!(lag.is_within(write));
    }
}
