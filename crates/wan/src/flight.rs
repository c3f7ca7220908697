//! What is under way in one direction: packets that have a moment of departure and wait for it.
//!
//! A binary heap by departure, then by order of arrival: jitter and changes of delay make departures differ from
//! arrivals, and two packets due at the same nanosecond must not swap.
//!
//! # The bound
//!
//! A line of rate R holds a packet for at most queue + delay + jitter, so at most R x (queue + delay + jitter) bytes
//! are in flight; a spec for which that exceeds [`MAX_IN_FLIGHT`] is refused. The heap enforces the same cap again in
//! real memory, bookkeeping included, because small packets cost more memory than they occupy of the line and because a
//! changed spec adds its packets to those of the old one. What does not fit is dropped and counted by a name of its own
//! (`overflow`): it is the emulator that was too small, not the path.

use crate::Moment;
use godwit_units::Bytes;
use std::cmp::Ordering;
use std::collections::BinaryHeap;

/// The most that one direction holds: 1 Gbit/s for two seconds, which no sensible path exceeds, and small enough that
/// a dozen paths fit a laptop.
pub const MAX_IN_FLIGHT: Bytes = Bytes::mib(256);

/// What a packet costs beyond its bytes: heap entry and allocation, rounded up.
pub const PACKET_OVERHEAD: Bytes = Bytes(160);

/// Items ordered by departure, within [`MAX_IN_FLIGHT`].
#[derive(Debug)]
pub struct Flight<T> {
    heap: BinaryHeap<Entry<T>>,
    next_sequence: u64,
    held: Bytes,
}

#[derive(Debug)]
struct Entry<T> {
    at: Moment,
    sequence: u64,
    weight: Bytes,
    item: T,
}

impl<T> Flight<T> {
    /// Nothing in flight.
    #[must_use]
    pub fn new() -> Self {
        Self { heap: BinaryHeap::new(), next_sequence: 0, held: Bytes::ZERO }
    }

    /// True when an item of `size` bytes fits.
    #[must_use]
    pub fn has_room(&self, size: Bytes) -> bool {
        self.held + size + PACKET_OVERHEAD <= MAX_IN_FLIGHT
    }

    /// Adds an item that departs at `at`. The caller has asked [`has_room`](Self::has_room).
    pub fn push(&mut self, at: Moment, size: Bytes, item: T) {
        debug_assert!(self.has_room(size), "the caller asks for room first");
        let weight = size + PACKET_OVERHEAD;
        self.held += weight;
        self.heap.push(Entry { at, sequence: self.next_sequence, weight, item });
        self.next_sequence += 1;
    }

    /// When the next item departs.
    #[must_use]
    pub fn next_departure(&self) -> Option<Moment> {
        self.heap.peek().map(|entry| entry.at)
    }

    /// Takes the next item that is due at `now`, with the moment at which it was due.
    pub fn pop_due(&mut self, now: Moment) -> Option<(Moment, T)> {
        if self.next_departure()? > now {
            return None;
        }
        let entry = self.heap.pop()?;
        self.held = self.held - entry.weight;
        Some((entry.at, entry.item))
    }

    /// Takes everything, in no particular order.
    pub fn drain(&mut self) -> impl Iterator<Item = T> {
        self.held = Bytes::ZERO;
        self.heap.drain().map(|entry| entry.item)
    }

    /// The memory that the items cost.
    #[must_use]
    pub fn held(&self) -> Bytes {
        self.held
    }
}

impl<T> Default for Flight<T> {
    fn default() -> Self {
        Self::new()
    }
}

/// Reversed, because `BinaryHeap` yields the greatest and the earliest is wanted.
impl<T> Ord for Entry<T> {
    fn cmp(&self, other: &Self) -> Ordering {
        (other.at, other.sequence).cmp(&(self.at, self.sequence))
    }
}

impl<T> PartialOrd for Entry<T> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<T> PartialEq for Entry<T> {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl<T> Eq for Entry<T> {}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::time::Duration;

    fn at(ns: u64) -> Moment {
        Moment(Duration::from_nanos(ns))
    }

    #[test]
    fn nothing_leaves_before_it_is_due() {
        let mut flight = Flight::new();
        flight.push(at(10), Bytes(1), 'x');
        assert_eq!(flight.pop_due(at(9)), None);
        assert_eq!(flight.pop_due(at(10)), Some((at(10), 'x')));
        assert_eq!(flight.next_departure(), None);
    }

    #[test]
    fn a_full_flight_has_no_room_until_something_leaves() {
        let mut flight = Flight::new();
        let half = Bytes(MAX_IN_FLIGHT.0 / 2) - PACKET_OVERHEAD;
        flight.push(at(1), half, ());
        flight.push(at(2), half, ());
        assert_eq!(flight.held(), MAX_IN_FLIGHT);
        assert!(!flight.has_room(Bytes::ZERO));
        flight.pop_due(at(1));
        assert!(flight.has_room(half));
        assert_eq!(flight.drain().count(), 1);
        assert_eq!(flight.held(), Bytes::ZERO);
    }

    proptest! {
        #[test]
        fn departures_are_in_order_and_ties_keep_their_order_of_arrival(
            moments in prop::collection::vec(0u64..20, 0..200),
        ) {
            let mut flight = Flight::new();
            for (arrival, &moment) in moments.iter().enumerate() {
                flight.push(at(moment), Bytes(1), arrival);
            }
            let mut expected: Vec<(Moment, usize)> = moments.iter().enumerate().map(|(i, &m)| (at(m), i)).collect();
            expected.sort();
            let left: Vec<_> = std::iter::from_fn(|| flight.pop_due(at(20))).collect();
            prop_assert_eq!(left, expected);
            prop_assert_eq!(flight.held(), Bytes::ZERO);
        }
    }
}
