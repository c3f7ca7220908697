//! What a link carries that nobody waits for, by packets that were sent close together: its slowest part spreads them out to its own rate (packet
//! trains; Dovrolis, Ramanathan and Moore 2001 tell what such trains show of a path).
//!
//! A sender that packs as it goes sends in bursts, and waits for nothing as long as buffers take them: how fast it sends says little of the link then,
//! and how much arrives in half a second no more. A burst says it, on its way. Of each train the rate is what the longer of two times gives, that which it
//! took to be sent and that which it took to arrive (the delivery rate of BBR): answers that come late, and then all at once, show nothing that was never
//! sent. And a window's growth, or a sender that has no more, sets the pace of both: of such trains none is spread, and they show only what the link carries
//! at least.

use godwit_units::BitRate;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// A train takes at least so long to arrive: several of the moments for which a busy host's threads wait for a processor.
const LONG: Duration = Duration::from_millis(8);
/// And is so many bytes: a score of packets.
const LEAST: u64 = 30_000;
/// One that took so much longer to arrive than to be sent was spread out.
const SPREAD: f64 = 1.3;
/// Trains of so long count, and no more than there can be of them.
const KEPT: Duration = Duration::from_secs(1);
const MOST: usize = 128;
/// Fewer show nothing.
const ENOUGH: usize = 8;
/// And where a smaller part of them was spread, a host that was not there for some milliseconds did it. Over 1000 Mbit/s between two busy hosts at most
/// 0.14 were, over 100 at least 0.18 and mostly two fifths.
const PART: f64 = 1.0 / 6.0;
/// Most go over a gap between two bursts, or begin while a window grows. The rate that one in ten exceeds was 12.0 to 13.1 MB/s over 100 Mbit/s at any look at two busy
/// hosts' streams, over 1000 at least 28.9.
const FEW: f64 = 0.9;

/// Packets that were acknowledged one after the other, but for the first one, whose way is no part of it.
#[derive(Debug)]
struct Train {
    sent: Instant,
    heard: Instant,
    bytes: u64,
}

/// What trains of a connection's last second show of the link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shown {
    /// It carries so much.
    pub rate: BitRate,
    /// And no more: it spread them out. Else they arrived as they were sent.
    pub spread: bool,
}

/// What became of one.
#[derive(Debug)]
struct Ended {
    at: Instant,
    /// Bytes a second.
    rate: f64,
    spread: bool,
}

/// The last trains of a connection.
#[derive(Debug, Default)]
pub struct Trains {
    now: Option<Train>,
    ended: VecDeque<Ended>,
}

impl Trains {
    /// A packet of so many bytes was acknowledged.
    pub fn put(&mut self, now: Instant, sent: Instant, bytes: u64) {
        let next = Train { sent, heard: now, bytes: 0 };
        let Some(train) = &mut self.now else {
            self.now = Some(next);
            return;
        };
        train.bytes += bytes;
        let took = now.saturating_duration_since(train.heard);
        if took < LONG || train.bytes < LEAST {
            return;
        }
        let left = sent.saturating_duration_since(train.sent);
        let rate = train.bytes as f64 / took.max(left).as_secs_f64();
        self.ended.push_back(Ended { at: now, rate, spread: took.as_secs_f64() >= SPREAD * left.as_secs_f64() });
        if self.ended.len() > MOST {
            self.ended.pop_front();
        }
        self.now = Some(next);
    }

    /// What the link carries of these packets, if there were enough trains in the last second.
    pub fn shown(&self, now: Instant) -> Option<Shown> {
        let lately = self.ended.iter().rev().take_while(|train| now.saturating_duration_since(train.at) <= KEPT);
        let (mut rates, mut spread) = (Vec::new(), 0);
        for train in lately {
            rates.push(train.rate);
            spread += usize::from(train.spread);
        }
        if rates.len() < ENOUGH {
            return None;
        }
        let spread = spread as f64 >= PART * rates.len() as f64;
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a hundred")]
        let few = (rates.len() as f64 * FEW) as usize;
        let (_, rate, _) = rates.select_nth_unstable_by(few, f64::total_cmp);
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a rate that was measured")]
        Some(Shown { rate: BitRate((*rate * 8.0) as u64), spread })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bursts of so many bytes, one each so many ms, as fast as a host sends (400 MB/s), over a link of so many Mbit/s and 20 ms. What one packet in so many
    /// is late by, as the host that hears of it has other things to do: what comes after it is heard of with it.
    fn shown(mbit: f64, (burst, each_ms): (u64, u64), late: Option<(usize, Duration)>) -> Option<Shown> {
        const PACKET: u64 = 1400;
        let (began, mut trains, mut free, mut heard, mut n) = (Instant::now(), Trains::default(), 0.0, 0.0, 0);
        for at in (0..1000).step_by(each_ms as usize) {
            for packet in 0..burst / PACKET {
                let sent = at as f64 / 1e3 + (packet * PACKET) as f64 / 400e6;
                free = f64::max(free, sent) + PACKET as f64 * 8.0 / (mbit * 1e6);
                n += 1;
                let waits = late.filter(|(of, _)| n % of == 0).map_or(0.0, |(_, late)| late.as_secs_f64());
                // Every eighth is answered.
                if n % 8 == 0 {
                    heard = f64::max(heard, free + 0.02 + waits);
                    let at = |seconds: f64| began + Duration::from_secs_f64(seconds);
                    trains.put(at(heard), at(sent), 8 * PACKET);
                }
            }
        }
        trains.shown(began + Duration::from_secs_f64(heard))
    }

    #[test]
    fn bursts_tell_what_a_link_carries_that_is_never_waited_for() {
        // Of 100 Mbit/s these take two thirds and a half, of 50 three quarters.
        // Every two hundredth answer comes 6 ms late, and what follows it with it.
        let late = Some((1600, Duration::from_millis(6)));
        for (mbit, burst) in [(100.0, (256 << 10, 32)), (100.0, (256 << 10, 40)), (50.0, (256 << 10, 56))] {
            for late in [None, late] {
                let seen = shown(mbit, burst, late);
                let right = seen.is_some_and(|seen| seen.spread && (0.9..1.1).contains(&(seen.rate.mbit() / mbit)));
                assert!(right, "{mbit} with {burst:?} and {late:?}: {seen:?}");
            }
        }
    }

    #[test]
    fn a_link_that_carries_a_burst_at_once_is_shown_to_carry_so_much_at_least() {
        // Bursts of 64 KiB within 5 ms: 13 MB/s, and nothing of more.
        for mbit in [1000.0, 10_000.0] {
            // Or every hundredth answer comes 10 ms late, and what follows it with it.
            for late in [None, Some((800, Duration::from_millis(10)))] {
                let seen = shown(mbit, (64 << 10, 5), late);
                assert!(seen.is_some_and(|seen| !seen.spread && (90.0..120.0).contains(&seen.rate.mbit())), "{seen:?}");
            }
            // And as much within 1.
            let seen = shown(mbit, (64 << 10, 1), None);
            assert!(seen.is_some_and(|seen| !seen.spread && seen.rate.mbit() > 450.0), "{mbit}: {seen:?}");
        }
    }

    #[test]
    fn a_sender_that_has_no_more_does_not_make_its_link_a_slow_one() {
        // Two packets each ms.
        let seen = shown(100.0, (3 << 10, 1), None);
        assert!(seen.is_some_and(|seen| !seen.spread && seen.rate.mbit() < 30.0), "{seen:?}");
    }

    #[test]
    fn what_was_seen_a_second_ago_is_not_known_any_more() {
        let (began, mut trains) = (Instant::now(), Trains::default());
        let at = |ms: u64| began + Duration::from_millis(ms);
        for n in 0..60 {
            // 12 KB each ms, that all were sent at once.
            trains.put(at(20 + n * 2), at(0), 24_000);
        }
        assert_eq!(trains.shown(at(140)), Some(Shown { rate: BitRate(96_000_000), spread: true }));
        assert_eq!(trains.shown(at(1200)), None);
    }
}
