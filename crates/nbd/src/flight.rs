//! What is under way: requests that wait for their answers, found by number in constant time.
//!
//! A number is a slot and how often slots have been given out, so that an answer that comes twice, or to a number
//! that a peer made up, finds nothing rather than another request.

use crate::proto::MAX_IN_FLIGHT;

/// Low bits of a number that say which slot.
const SLOT_BITS: u32 = MAX_IN_FLIGHT.trailing_zeros();
const _: () = assert!(MAX_IN_FLIGHT.is_power_of_two());

/// At most [`MAX_IN_FLIGHT`] things by number.
#[derive(Debug)]
pub(crate) struct Flight<T> {
    slots: Vec<Option<(u64, T)>>,
    free: Vec<usize>,
    given: u64,
}

impl<T> Flight<T> {
    pub fn new() -> Self {
        Self { slots: vec![], free: vec![], given: 0 }
    }

    pub fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    pub fn is_full(&self) -> bool {
        self.len() == MAX_IN_FLIGHT
    }

    /// Takes it in; gives its number. Callers look at [`Flight::is_full`] first.
    pub fn insert(&mut self, thing: T) -> u64 {
        assert!(!self.is_full(), "more than {MAX_IN_FLIGHT} requests in flight");
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() - 1
        });
        let number = self.given << SLOT_BITS | slot as u64;
        self.given += 1;
        self.slots[slot] = Some((number, thing));
        number
    }

    fn slot(number: u64) -> usize {
        (number & (MAX_IN_FLIGHT as u64 - 1)) as usize
    }

    pub fn get_mut(&mut self, number: u64) -> Option<&mut T> {
        match self.slots.get_mut(Self::slot(number)) {
            Some(Some((held, thing))) if *held == number => Some(thing),
            _ => None,
        }
    }

    pub fn remove(&mut self, number: u64) -> Option<T> {
        self.get_mut(number)?;
        let slot = Self::slot(number);
        self.free.push(slot);
        self.slots[slot].take().map(|(_, thing)| thing)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_finds_its_own_thing_and_only_once() {
        let mut flight = Flight::new();
        let first = flight.insert('a');
        assert_eq!(flight.remove(first), Some('a'));
        let second = flight.insert('b');
        assert_eq!(Flight::<char>::slot(first), Flight::<char>::slot(second), "the slot is used again");
        assert_eq!(flight.remove(first), None, "but not by its old number");
        assert_eq!(flight.get_mut(second), Some(&mut 'b'));
        assert_eq!(flight.get_mut(77), None);
    }

    #[test]
    fn it_is_full_at_the_bound_and_not_before() {
        let mut flight = Flight::new();
        let numbers: Vec<u64> = (0..MAX_IN_FLIGHT).map(|i| flight.insert(i)).collect();
        assert!(flight.is_full());
        assert_eq!(flight.remove(numbers[5]), Some(5));
        assert!(!flight.is_full());
        assert_eq!(flight.len(), MAX_IN_FLIGHT - 1);
    }
}
