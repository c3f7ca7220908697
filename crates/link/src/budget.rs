//! One bit rate shared by all lanes of all sessions with a peer: a token bucket that is drawn by priority.
//!
//! No clock and no tasks: time is a [`Duration`] since any fixed moment, and comes in with every call. A grant may
//! overdraw the bucket, which is then closed until the debt is paid: so a large piece needs no waiting for a large
//! bucket, and the rate holds over any time longer than a piece takes.
//!
//! What it counts is the application's bytes and [`OVERHEAD_PERCENT`] for QUIC, UDP and IP. Retransmissions are not
//! counted: under loss the wire carries that share more.

use crate::Priority;
use godwit_units::{BitRate, Bytes};
use std::collections::VecDeque;
use std::time::Duration;

/// What QUIC, UDP and IPv4 headers add to a full 1,452-byte datagram, rounded up.
pub const OVERHEAD_PERCENT: u64 = 5;

/// How much may go at once after a pause: small against the queues of routers.
pub const BURST: Duration = Duration::from_millis(20);

/// Every so many grants the longest waiting goes first, whatever its priority: nothing starves for ever.
pub const FAIR_EVERY: u64 = 16;

/// The largest piece granted, and the smallest that a low rate reduces it to.
const PIECE: (u64, u64) = (2 << 10, 64 << 10);

/// Names a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ticket(u64);

/// The bucket, and who waits for it.
#[derive(Debug)]
pub struct Budget {
    rate: Option<BitRate>,
    /// In bits and nanoseconds (bits times 10^9), so that nothing is rounded away; below zero: debt.
    tokens: i128,
    at: Duration,
    waiting: [VecDeque<(Ticket, u64)>; Priority::ALL.len()],
    tickets: u64,
    grants: u64,
}

impl Default for Budget {
    fn default() -> Self {
        Self::new()
    }
}

impl Budget {
    /// No limit.
    #[must_use]
    pub const fn new() -> Self {
        let waiting = [const { VecDeque::new() }; Priority::ALL.len()];
        Self { rate: None, tokens: 0, at: Duration::ZERO, waiting, tickets: 0, grants: 0 }
    }

    /// Another rate from now on; `None` lets everything go.
    pub fn set_rate(&mut self, now: Duration, rate: Option<BitRate>) {
        self.refill(now);
        self.rate = rate;
        // A debt from a high rate would close a low one for long.
        self.tokens = self.tokens.clamp(-self.burst(), self.burst());
    }

    /// The rate.
    #[must_use]
    pub const fn rate(&self) -> Option<BitRate> {
        self.rate
    }

    /// The largest piece to ask for: a [`BURST`], within bounds, so that low rates flow smoothly.
    #[must_use]
    pub fn piece(&self) -> usize {
        let bytes = self.rate.map_or(PIECE.1, |rate| rate.bytes_in(BURST).0.clamp(PIECE.0, PIECE.1));
        bytes as usize
    }

    /// Asks for `bytes`; [`poll`](Self::poll) tells when they are granted.
    pub fn request(&mut self, priority: Priority, bytes: Bytes) -> Ticket {
        self.tickets += 1;
        let ticket = Ticket(self.tickets);
        self.waiting[priority as usize].push_back((ticket, bytes.0));
        ticket
    }

    /// Gives up a wait; nothing happens when it was granted already.
    pub fn cancel(&mut self, ticket: Ticket) {
        for queue in &mut self.waiting {
            queue.retain(|(waiting, _)| *waiting != ticket);
        }
    }

    /// The next grant, if there is one now. To be polled dry.
    pub fn poll(&mut self, now: Duration) -> Option<Ticket> {
        self.refill(now);
        if let Some((ticket, _)) = self.waiting[Priority::Control as usize].pop_front() {
            return Some(ticket);
        }
        if self.rate.is_some() && self.tokens <= 0 {
            return None;
        }
        let heads = Priority::ALL.into_iter().filter_map(|p| Some((p, self.waiting[p as usize].front()?.0)));
        let next = if self.grants % FAIR_EVERY == FAIR_EVERY - 1 {
            heads.min_by_key(|(_, ticket)| *ticket)
        } else {
            heads.max_by_key(|(priority, _)| *priority)
        };
        let (priority, ticket) = next?;
        let (_, bytes) = self.waiting[priority as usize].pop_front()?;
        self.grants += 1;
        if self.rate.is_some() {
            self.tokens -= i128::from(bytes) * 8 * NANOS * i128::from(100 + OVERHEAD_PERCENT) / 100;
        }
        Some(ticket)
    }

    /// How long from now until [`poll`](Self::poll) may have a grant; `None` when nobody waits, or the rate is zero.
    #[must_use]
    pub fn wait(&self, now: Duration) -> Option<Duration> {
        if self.waiting.iter().all(VecDeque::is_empty) {
            return None;
        }
        let Some(rate) = self.rate else { return Some(Duration::ZERO) };
        if self.tokens > 0 {
            return Some(Duration::ZERO);
        }
        if rate.0 == 0 {
            return None;
        }
        let nanos = (-self.tokens) / i128::from(rate.0) + 1;
        let due = self.at + Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX));
        Some(due.saturating_sub(now))
    }

    fn burst(&self) -> i128 {
        self.rate.map_or(0, |rate| i128::from(rate.0) * BURST.as_nanos() as i128)
    }

    fn refill(&mut self, now: Duration) {
        let passed = now.saturating_sub(self.at).as_nanos() as i128;
        self.at = self.at.max(now);
        if let Some(rate) = self.rate {
            self.tokens = (self.tokens + i128::from(rate.0) * passed).min(self.burst());
        }
    }
}

const NANOS: i128 = 1_000_000_000;

#[cfg(test)]
mod tests {
    use super::*;

    /// Draws pieces of `size` at each of `priorities` for `time`; what each got.
    fn draw(budget: &mut Budget, from: Duration, time: Duration, size: u64, priorities: &[Priority]) -> Vec<u64> {
        let mut now = from;
        let mut got = vec![0; priorities.len()];
        let mut held: Vec<Ticket> = priorities.iter().map(|p| budget.request(*p, Bytes(size))).collect();
        while now < from + time {
            while let Some(ticket) = budget.poll(now) {
                let at = held.iter().position(|t| *t == ticket).unwrap();
                got[at] += size;
                held[at] = budget.request(priorities[at], Bytes(size));
            }
            now += budget.wait(now).unwrap().max(Duration::from_micros(1));
        }
        held.into_iter().for_each(|ticket| budget.cancel(ticket));
        got
    }

    #[test]
    fn the_rate_holds_within_two_percent_and_can_be_changed() {
        let mut budget = Budget::new();
        let mut now = Duration::ZERO;
        for mbit in [8.0, 100.0, 1.0, 900.0] {
            budget.set_rate(now, Some(BitRate::from_mbit(mbit)));
            let size = budget.piece() as u64;
            let time = Duration::from_secs(10);
            let got = draw(&mut budget, now, time, size, &[Priority::Bulk])[0] as f64;
            let wire = got * (1.0 + OVERHEAD_PERCENT as f64 / 100.0) * 8.0 / 10.0 / 1e6;
            assert!((wire / mbit - 1.0).abs() < 0.02, "{wire} of {mbit} Mbit/s");
            now += time;
        }
    }

    #[test]
    fn the_urgent_goes_first_and_the_background_is_not_starved() {
        let mut budget = Budget::new();
        budget.set_rate(Duration::ZERO, Some(BitRate::from_mbit(80.0)));
        let who = [Priority::Background, Priority::Bulk, Priority::Mirrored, Priority::Interactive];
        let got = draw(&mut budget, Duration::ZERO, Duration::from_secs(10), 10_000, &who);
        let all: u64 = got.iter().sum();
        assert!(got[3] * 100 > all * 85, "interactive got {} of {all}", got[3]);
        assert!(got[..3].iter().all(|got| *got > 0), "somebody starved: {got:?}");
    }

    #[test]
    fn control_never_waits() {
        let mut budget = Budget::new();
        budget.set_rate(Duration::ZERO, Some(BitRate(0)));
        budget.request(Priority::Interactive, Bytes(1));
        let ticket = budget.request(Priority::Control, Bytes::mib(1));
        assert_eq!(budget.poll(Duration::ZERO), Some(ticket));
        assert_eq!(budget.poll(Duration::from_secs(100)), None);
    }
}
