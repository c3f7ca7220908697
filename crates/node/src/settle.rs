//! What lies between QEMU and the other host when a guest stops is part of its pause: up to a window of bytes, which is more than a round trip
//! of the link. So the last rounds, in which there is little to send anyway, go with next to nothing under way, and a guest that is to be
//! stopped runs on until what was sent before has arrived.
//!
//! A guest that has nothing dirty at the end of a round is not stopped by us but by QEMU, at once. So the end of a long round goes in the same
//! way, before anybody knows what it leaves.
//!
//! # What can go wrong
//!
//! *The guest writes as fast as the link carries*: what is under way is never little, and waiting for it makes nothing shorter. Then nothing is
//! waited for ([`Settling::round`]). *The guest begins to write meanwhile*: then what is left of the round is more than what is under way, the
//! window is as wide as ever, and a stop that was decided is decided anew. *The link stands*: nothing is waited for longer than
//! [`PATIENCE`] times what it should take.
//!
//! Pure: times and bytes in, a window and a moment out.

use crate::forecast::Goodput;
use godwit_predict::whole::{is_worth_settling, settled};
use godwit_units::Bytes;
use std::time::Duration;

/// Between two looks at what is under way, while that matters.
pub const LOOK: Duration = Duration::from_millis(5);
/// So many times as long as what is under way should take.
const PATIENCE: f64 = 2.0;
/// And so much longer.
const LONGER: Duration = Duration::from_millis(50);
/// The longest that the last rounds go with little under way: a guest that writes little but steadily would have the link stand idle.
const MOST: Duration = Duration::from_secs(2);
/// The end of a round, which goes with little under way once what was sent before has arrived. It may come sooner than the pace before says:
/// zero pages take no time.
const TAIL: Duration = Duration::from_secs(1);
/// A round that is shorter than this has none.
const LONG: Duration = Duration::from_secs(3);

/// The last rounds.
#[derive(Clone, Copy, Debug, Default)]
pub struct Settling {
    /// Until when little goes at a time.
    until: Option<Duration>,
    /// Whether that is for a round's end, of which nobody knows yet what it leaves.
    tail: bool,
    /// Until when a stop that was decided waits.
    stop_by: Option<Duration>,
}

impl Settling {
    /// A round has ended that took so long; what was dirtied in it takes `rest` to send.
    pub fn round(&mut self, now: Duration, took: Duration, rest: Duration, rtt: Duration) {
        if !is_worth_settling(took, rest, rtt) {
            *self = Self::default();
        } else if self.until.is_none() || self.tail {
            (self.until, self.tail) = (Some(now + MOST), false);
        }
    }

    /// A round that has lasted so long has so much left that it ends in `left`, unless the guest dirties what was read before; and what is on
    /// its way takes so long.
    pub fn nearly(&mut self, now: Duration, lasted: Duration, left: Duration, on_its_way: Duration) {
        if self.until.is_none() || self.tail {
            let near = left <= TAIL + on_its_way && lasted + left >= LONG;
            // Behind a run of zero pages it seems near, and is not.
            (self.until, self.tail) = (near.then_some(now + left + MOST), near);
        }
    }

    /// Whether little goes at a time.
    #[must_use]
    pub fn is_on(&self, now: Duration) -> bool {
        self.until.is_some_and(|until| now < until)
    }

    /// How many bytes may be on their way, if it is known what the link carries. `least`: a round trip when nothing waits for the link.
    #[must_use]
    pub fn window(&self, now: Duration, goodput: &Goodput, rtt: Duration, least: Duration) -> Option<Bytes> {
        if self.is_on(now) { Some(settled(goodput.rate()?, least)) } else { goodput.window(rtt) }
    }

    /// The guest is to be stopped, with so much before it that is on its way. False where it is to be done at once.
    pub fn waits(&mut self, now: Duration, on_its_way: Duration) -> bool {
        if self.is_on(now) {
            self.stop_by.get_or_insert(now + on_its_way.mul_f64(PATIENCE) + LONGER);
        }
        self.is_waiting()
    }

    /// Whether a stop was decided and waits.
    #[must_use]
    pub const fn is_waiting(&self) -> bool {
        self.stop_by.is_some()
    }

    /// Whether what a stop waited for is over.
    #[must_use]
    pub fn may_stop(&self, now: Duration, on_its_way: u64, goodput: &Goodput, least: Duration) -> bool {
        let Some(by) = self.stop_by else { return false };
        now >= by || goodput.rate().is_none_or(|rate| on_its_way <= settled(rate, least).0)
    }

    /// The guest stops: what is left goes as fast as it can.
    pub fn over(&mut self) {
        *self = Self::default();
    }
}

/// How fast a round gets on, by what is left of it from look to look.
#[derive(Clone, Copy, Debug, Default)]
pub struct Pages(Option<(Duration, u64)>);

impl Pages {
    /// So many bytes of the guest's memory are left at that time: how long they take at the pace since the look before. None where there was
    /// none, or another round has begun.
    pub fn left(&mut self, now: Duration, bytes: u64) -> Option<Duration> {
        let (then, before) = self.0.replace((now, bytes))?;
        let went = before.checked_sub(bytes).filter(|went| *went > 0)?;
        Some((now - then).mul_f64(bytes as f64 / went as f64))
    }
}

/// So many pages may lie between QEMU and the encoder when a round ends.
const AT_HAND: u64 = 1024;

/// What a round has to send. A QEMU that slows its guest looks every few seconds, in the middle of a long round, at what was dirtied (since 9.2),
/// and says so as it does of a round's end.
#[derive(Debug, Default)]
pub struct Due(u64);

impl Due {
    /// A round begins, with so many pages. Of the first nobody knows.
    pub const fn begins(&mut self, pages: u64) {
        self.0 = pages;
    }

    /// Whether what QEMU says is no round's end: it has sent `so_far`, and `remaining` are dirty now.
    pub const fn is_in_the_middle(&mut self, so_far: u64, remaining: u64) -> bool {
        let in_the_middle = so_far + AT_HAND < self.0;
        if in_the_middle {
            self.0 = so_far + remaining;
        }
        in_the_middle
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RTT: Duration = Duration::from_millis(20);
    /// The same behind what waits for the link.
    const QUEUED: Duration = Duration::from_millis(70);
    const RATE: u64 = 1_000_000;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn goodput() -> Goodput {
        let mut goodput = Goodput::default();
        goodput.seen(Duration::ZERO, 0);
        goodput.seen(ms(1000), RATE);
        goodput
    }

    /// A round of 100 ms left so much.
    fn after(rest: Duration) -> Settling {
        let mut settling = Settling::default();
        settling.round(ms(1000), ms(100), rest, RTT);
        settling
    }

    #[test]
    fn the_last_rounds_go_with_little_under_way_and_a_stop_waits_until_it_is_little() {
        let (goodput, mut settling) = (goodput(), after(ms(10)));
        let little = settling.window(ms(1000), &goodput, QUEUED, RTT).unwrap().0;
        assert!(little <= 25_000, "{little}");
        assert!(settling.waits(ms(1000), ms(80)));
        assert!(!settling.may_stop(ms(1010), 70_000, &goodput, RTT));
        assert!(settling.may_stop(ms(1060), little, &goodput, RTT));
        // What is left goes as fast as it can.
        settling.over();
        assert_eq!(settling.window(ms(1060), &goodput, RTT, RTT), goodput.window(RTT));
        assert!(!settling.may_stop(ms(1060), 0, &goodput, RTT), "a guest is stopped once");
    }

    #[test]
    fn a_guest_that_writes_much_is_stopped_at_once() {
        // More than a window; or as much as arrives.
        for rest in [ms(400), ms(54)] {
            let mut settling = after(rest);
            assert!(!settling.waits(ms(1000), ms(80)), "{rest:?}");
            assert_eq!(settling.window(ms(1000), &goodput(), RTT, RTT), goodput().window(RTT));
        }
    }

    #[test]
    fn a_guest_that_begins_to_write_is_not_stopped_for_what_it_was_before() {
        let mut settling = after(ms(10));
        assert!(settling.waits(ms(1000), ms(80)));
        settling.round(ms(1020), ms(20), ms(300), RTT);
        assert!(!settling.is_waiting() && !settling.may_stop(ms(9000), 0, &goodput(), RTT));
    }

    #[test]
    fn the_end_of_a_long_round_goes_with_little_under_way() {
        let (goodput, mut settling, mut pages) = (goodput(), Settling::default(), Pages::default());
        let looks = [(2000, 5000), (2250, 4000), (2500, 3000), (2750, 2500)].map(|(at, left)| pages.left(ms(at), left));
        assert_eq!(looks, [None, Some(ms(1000)), Some(ms(750)), Some(ms(1250))]);
        assert_eq!(pages.left(ms(3000), 9000), None, "another round");
        settling.nearly(ms(2500), ms(2500), ms(1401), ms(400));
        assert!(!settling.is_on(ms(2500)), "there is more than an end left");
        settling.nearly(ms(2000), ms(2000), ms(900), ms(400));
        assert!(!settling.is_on(ms(2000)), "a short round has no end");
        settling.nearly(ms(2500), ms(2500), ms(600), ms(400));
        settling.nearly(ms(2500), ms(2500), ms(5000), ms(400));
        assert!(!settling.is_on(ms(2500)), "zero pages made it seem near");
        settling.nearly(ms(2500), ms(2500), ms(1400), ms(400));
        assert!(settling.window(ms(2500), &goodput, QUEUED, RTT).unwrap().0 <= 25_000);
        // It left little: the rounds behind it have as long as after any.
        let mut quiet = settling;
        quiet.round(ms(3200), ms(3200), ms(10), RTT);
        assert!(quiet.is_on(ms(5100)) && !quiet.is_on(ms(5200)));
        // It left much.
        settling.round(ms(3200), ms(3200), ms(400), RTT);
        assert!(!settling.is_on(ms(3200)));
    }

    #[test]
    fn a_round_whose_end_does_not_come_has_the_link_again() {
        let mut settling = Settling::default();
        settling.nearly(ms(3000), ms(3000), ms(500), ms(0));
        assert!(settling.is_on(ms(5400)) && !settling.is_on(ms(5500)));
    }

    #[test]
    fn over_a_link_that_stands_nothing_is_waited_for_long() {
        let mut settling = after(ms(10));
        assert!(settling.waits(ms(1000), ms(80)));
        // Said again, it does not wait longer.
        assert!(settling.waits(ms(1100), ms(80)));
        assert!(!settling.may_stop(ms(1200), 80_000, &goodput(), RTT));
        assert!(settling.may_stop(ms(1210), 80_000, &goodput(), RTT));
    }

    #[test]
    fn a_guest_that_goes_on_writing_little_has_the_link_again_after_a_while() {
        let mut settling = after(ms(10));
        for at in [1500, 2500, 2990] {
            settling.round(ms(at), ms(100), ms(10), RTT);
            assert!(settling.is_on(ms(at)), "{at}");
        }
        settling.round(ms(3000), ms(100), ms(10), RTT);
        assert_eq!(settling.window(ms(3000), &goodput(), RTT, RTT), goodput().window(RTT));
        // A stop is not put off any more.
        assert!(!settling.waits(ms(3000), ms(80)));
    }

    #[test]
    fn what_a_qemu_says_in_the_middle_of_a_round_is_not_taken_for_its_end() {
        let mut due = Due::default();
        assert!(!due.is_in_the_middle(130_000, 52_000), "of the first round nobody knows");
        due.begins(52_000);
        assert!(due.is_in_the_middle(15_000, 50_000));
        // What was dirtied meanwhile is to be sent as well.
        assert!(due.is_in_the_middle(60_000, 6_000));
        assert!(!due.is_in_the_middle(65_900, 9_000), "some of it lies between QEMU and the encoder");
        due.begins(9_000);
        assert!(!due.is_in_the_middle(8_900, 100));
        due.begins(100);
        assert!(!due.is_in_the_middle(0, 100), "so little is no round that is looked into");
    }
}
