//! When the next bytes of what gives way may go: by the rate of a [`Scavenger`], a few milliseconds' worth at once.
//!
//! What a path has to spare it has once, however many streams would like to have it: were the rate each one's own, a hundred of them would never
//! fall below a hundred times the least. So all that gives way to others on the way to one peer shares a [`Pace`], and takes turns.
//!
//! At a low rate a few milliseconds' worth is a packet or two, and each piece wakes threads at both ends and is acknowledged by itself.
//! Where the rate is low because there is no more to
//! send, and not because the path carries no more, larger pieces make no queue either. Which of them it is no one says, so it is tried:
//! pieces grow while nothing is a sign of a queue ([`Pieces`]), and a sign makes them small again.
//!
//! # Turns
//!
//! Who has something to send is given the time from when to when a piece of it goes, behind all others' ([`Turns`]), and asks for the next one when it has
//! sent. So each that waits has a piece in every round. Nobody waits for one that has something else to do when its time comes: that one is
//! late, and the others' times are what they are. Where all are late, because the machine stood still, they do not make up for it at once: a piece of one that is
//! late takes as long as any, and what waits comes behind it ([`LATE`]). Where the rate changes, or one who waits leaves, all times that have not come are given out anew, in
//! the same order. Whoever has a limit of its own asks for a turn when that allows one.

use crate::samples::Path;
use crate::scavenger::{self, LEAST_SIGNAL, QUIET, Scavenger};
use godwit_units::BitRate;
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// What leaves at once is what the rate carries in this time, little more than a timer's step. It waits for itself on a path that carries little more than
/// the rate, and [`LEAST_SIGNAL`] is to be more than that: of 50 Mbit/s beside one busy processor of two, the scavenger had 43 % with 4 ms and 78 % with 2 ms.
const PIECE: Duration = Duration::from_millis(2);
/// At least and at most so much of it, bytes. At least two packets: the second has the first one's acknowledgement sent at once.
const PIECES: (usize, usize) = (2800, 128 << 10);
/// What pieces grow to, bytes: 2.6 ms of 50 Mbit/s.
const LARGEST: usize = 16 << 10;
/// So many pieces of a size have gone, for at least so long, before twice as much is tried.
const TRIED: (u32, Duration) = (8, Duration::from_secs(1));
/// After a sign pieces are small for as long, and only half of what they were for as long.
const SMALL: (Duration, Duration) = (QUIET, Duration::from_secs(60));

/// What arrives is counted over this: longer than most round trips.
const ARRIVALS: Duration = Duration::from_millis(200);
/// The part of the rate that has to arrive for the rate to grow: it grows while a round trip is under way.
const USED: f64 = 0.7;
/// Between two looks at the path, whoever looks: two at once would take one tremble for a queue that stays.
const LOOK: Duration = Duration::from_millis(40);
/// The longest that somebody who waits does not look whether its time is another one by now.
const NAP: Duration = Duration::from_millis(50);
/// By how much a piece may be late, as timers are, and still count as on time: so much of the rate may go at once.
const LATE: Duration = Duration::from_millis(8);
/// Connections to a peer of which is known what they had counted: some are replaced, and two may be up for a while.
const CONNECTIONS: usize = 8;

/// How much goes at once, whatever the rate. No clock: time comes in.
#[derive(Debug)]
struct Pieces {
    size: usize,
    /// Of this size have gone.
    gone: u32,
    /// When the next size may be tried, and what it may be until then.
    next: Duration,
    most: (usize, Duration),
    /// The last sign that was seen.
    sign: Duration,
}

impl Pieces {
    const fn new() -> Self {
        Self { size: PIECES.0, gone: 0, next: TRIED.1, most: (LARGEST, Duration::ZERO), sign: Duration::ZERO }
    }

    fn sent(&mut self, bytes: usize) {
        self.gone += u32::from(bytes >= self.size);
    }

    /// `sign`: when a queue was last seen.
    fn looked(&mut self, now: Duration, sign: Duration) {
        if sign > self.sign {
            // Perhaps it was this.
            if self.size > PIECES.0 {
                self.most = ((self.size / 2).max(PIECES.0), now + SMALL.1);
            }
            *self = Self { next: now + SMALL.0, most: self.most, sign, ..Self::new() };
        } else if now >= self.next && self.gone >= TRIED.0 {
            let most = if now < self.most.1 { self.most.0 } else { LARGEST };
            (self.size, self.gone, self.next) = ((self.size * 2).min(most), 0, now + TRIED.1);
        }
    }
}

/// When a queue was last seen. The scavenger overlooks what is little beside the queues that the path has shown; a piece that waits as long for
/// itself is too large on any path.
fn sign(scavenger: &Scavenger, now: Duration, rtt: Option<Duration>) -> Duration {
    if rtt.is_some_and(|rtt| scavenger.queue(rtt) > LEAST_SIGNAL) { now } else { scavenger.last_sign() }
}

/// What connections have counted since somebody looked at them first. Each counts from nought, and those to one peer are looked at in turns.
#[derive(Debug, Default)]
struct Counts {
    /// Which, packets lost, bytes acknowledged; the one that was looked at last is the last.
    known: VecDeque<(usize, u64, u64)>,
    lost: u64,
    acknowledged: u64,
}

impl Counts {
    fn looked(&mut self, path: &Path) {
        let at = self.known.iter().position(|(connection, ..)| *connection == path.connection);
        if let Some((_, lost, acknowledged)) = at.and_then(|at| self.known.remove(at)) {
            self.lost += path.lost.saturating_sub(lost);
            self.acknowledged += path.acknowledged.saturating_sub(acknowledged);
        } else if self.known.len() == CONNECTIONS {
            self.known.pop_front();
        }
        self.known.push_back((path.connection, path.lost, path.acknowledged));
    }
}

/// How long so many bytes take.
fn lasts(bytes: usize, rate: BitRate) -> Duration {
    Duration::from_secs_f64(bytes as f64 * 8.0 / rate.0.max(1) as f64)
}

/// When a piece goes.
#[derive(Clone, Copy, Debug)]
struct Turn {
    from: Duration,
    to: Duration,
    bytes: usize,
}

/// Whose turn it is. No clock: time comes in.
#[derive(Debug, Default)]
struct Turns {
    /// Of those who wait, in their order.
    given: BTreeMap<u64, Turn>,
    last: u64,
    /// Until when what has gone takes.
    taken: Duration,
}

impl Turns {
    /// A turn behind all others.
    fn give(&mut self, now: Duration, bytes: usize, rate: BitRate) -> u64 {
        let before = self.given.last_key_value().map_or(self.taken, |(_, turn)| turn.to);
        let from = now.max(self.taken).max(before);
        self.last += 1;
        self.given.insert(self.last, Turn { from, to: from + lasts(bytes, rate), bytes });
        self.last
    }

    /// Takes a turn, if its time has come: how many bytes go; or how long it is until then.
    fn take(&mut self, now: Duration, which: u64) -> Result<usize, Duration> {
        let Some(turn) = self.given.get(&which).copied() else { return Ok(0) };
        if turn.from > now {
            return Err(turn.from - now);
        }
        if self.taken > now + LATE {
            // Somebody who was late went, in this one's time.
            return Err(self.taken - now);
        }
        self.given.remove(&which);
        if now - turn.from > LATE {
            self.taken = self.taken.max(now) + (turn.to - turn.from);
            self.put_off(now);
        } else {
            self.taken = self.taken.max(turn.to);
        }
        Ok(turn.bytes)
    }

    /// Puts the times that have not come behind what has gone, in the same order.
    fn put_off(&mut self, now: Duration) {
        let mut at = self.taken;
        for turn in self.given.values_mut().filter(|turn| turn.from > now) {
            if turn.from >= at {
                break;
            }
            (turn.from, turn.to) = (at, at + (turn.to - turn.from));
            at = turn.to;
        }
    }

    /// Gives the times that have not come out anew; nobody sends more at once than `most`.
    fn arrange(&mut self, now: Duration, rate: BitRate, most: usize) {
        let mut at = now.max(self.taken);
        for turn in self.given.values_mut() {
            turn.bytes = turn.bytes.min(most);
            if turn.from <= now {
                at = at.max(turn.to);
            } else {
                turn.from = at;
                at += lasts(turn.bytes, rate);
                turn.to = at;
            }
        }
    }
}

/// What is one's own of those who share a pace.
#[derive(Debug, Default)]
struct Own {
    limit: Option<BitRate>,
    /// When it asked for its last turn, and of how many bytes.
    asked: (Duration, usize),
    /// The turn that it waits for.
    turn: Option<u64>,
}

impl Own {
    /// When the limit, as it is now, allows another turn. From when the last one was asked for: that it had to wait for others is no reason to be slower
    /// than it may be.
    fn next(&self) -> Duration {
        self.asked.0 + self.limit.map_or(Duration::ZERO, |limit| lasts(self.asked.1, limit))
    }
}

/// What is shared. No clock: time comes in, since it began.
#[derive(Debug)]
struct Shared {
    scavenger: Scavenger,
    pieces: Pieces,
    turns: Turns,
    counts: Counts,
    /// When the path was looked at last.
    looked: Option<Duration>,
    /// Bytes that had been acknowledged then, and bits a second that were lately.
    acknowledged: (Duration, u64),
    arrives: f64,
    sharers: usize,
}

impl Shared {
    fn new() -> Self {
        Self {
            scavenger: Scavenger::new(scavenger::Config::default()),
            pieces: Pieces::new(),
            turns: Turns::default(),
            counts: Counts::default(),
            looked: None,
            acknowledged: (Duration::ZERO, 0),
            arrives: 0.0,
            sharers: 0,
        }
    }

    /// What goes at once, bytes.
    fn piece(&self, limit: Option<BitRate>) -> usize {
        let rate = self.scavenger.rate();
        let bytes = limit.map_or(rate, |limit| limit.min(rate)).bytes_in(PIECE).0;
        usize::try_from(bytes).unwrap_or(0).clamp(self.pieces.size, PIECES.1)
    }

    /// How many of so many bytes one may send now; or how long it waits, as far as is known now.
    fn turn(&mut self, now: Duration, own: &mut Own, waiting: usize) -> Result<usize, Duration> {
        let which = match own.turn {
            Some(which) => which,
            None if own.next() > now => return Err(own.next() - now),
            None => {
                let bytes = self.piece(own.limit).min(waiting);
                own.asked = (now, bytes);
                *own.turn.insert(self.turns.give(now, bytes, self.scavenger.rate()))
            }
        };
        let bytes = self.turns.take(now, which)?.min(waiting);
        own.turn = None;
        self.pieces.sent(bytes);
        Ok(bytes)
    }

    /// The path was measured. `busy`: whoever did it would send more.
    fn look(&mut self, now: Duration, path: &Path, busy: bool) {
        if self.looked.is_some_and(|at| now.saturating_sub(at) < LOOK) {
            return;
        }
        self.looked = Some(now);
        self.counts.looked(path);
        let passed = now.saturating_sub(self.acknowledged.0);
        if passed >= ARRIVALS {
            let bytes = self.counts.acknowledged - self.acknowledged.1;
            self.arrives = bytes as f64 * 8.0 / passed.as_secs_f64();
            self.acknowledged = (now, self.counts.acknowledged);
        }
        // QUIC's own window may hold it back: what does not arrive is no reason to send more, and a cut of what is not used cuts nothing.
        let used = self.arrives > self.scavenger.rate().0 as f64 * USED;
        let busy = busy || !self.turns.given.is_empty();
        self.scavenger.measured(now, path.rtt, self.counts.lost, busy && used);
        self.pieces.looked(now, sign(&self.scavenger, now, path.rtt));
        self.arrange(now);
    }

    fn arrange(&mut self, now: Duration) {
        self.turns.arrange(now, self.scavenger.rate(), self.piece(None));
    }

    /// One of those who share it is over.
    fn leave(&mut self, now: Duration, own: &Own) {
        self.sharers -= 1;
        if let Some(which) = own.turn {
            self.turns.given.remove(&which);
            self.arrange(now);
        }
    }
}

/// How fast what gives way may go to a peer, all of it together. A clone is the same one.
#[derive(Clone, Debug)]
pub struct Pace {
    shared: Arc<Mutex<Shared>>,
    began: Instant,
}

impl Default for Pace {
    fn default() -> Self {
        Self::new()
    }
}

impl Pace {
    /// Begins at the least rate; nobody shares it.
    #[must_use]
    pub fn new() -> Self {
        Self { shared: Arc::new(Mutex::new(Shared::new())), began: Instant::now() }
    }

    /// For one more who sends.
    #[must_use]
    pub fn share(&self) -> Share {
        self.lock().0.sharers += 1;
        Share { pace: self.clone(), own: Own::default(), window: (Instant::now(), 0), rate: BitRate(0) }
    }

    /// How many share it.
    #[must_use]
    pub fn sharers(&self) -> usize {
        self.lock().0.sharers
    }

    /// What is shared, and what time it is: no earlier than for whoever had it before.
    fn lock(&self) -> (MutexGuard<'_, Shared>, Duration) {
        let shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        (shared, self.began.elapsed())
    }
}

/// One's part of a [`Pace`].
#[derive(Debug)]
pub struct Share {
    pace: Pace,
    own: Own,
    /// Bytes since then, for the figure.
    window: (Instant, u64),
    rate: BitRate,
}

impl Share {
    /// Waits until something may go, of so many bytes that wait: how many of them, which are to go at once. Where this is given up before, and
    /// asked again, its place among the others is the same.
    pub async fn turn(&mut self, waiting: usize) -> usize {
        loop {
            let turn = {
                let (mut shared, now) = self.pace.lock();
                shared.turn(now, &mut self.own, waiting)
            };
            match turn {
                Ok(bytes) => {
                    self.window.1 += bytes as u64;
                    return bytes;
                }
                Err(wait) => tokio::time::sleep(wait.min(NAP)).await,
            }
        }
    }

    /// The path was measured, as [`crate::Session::path`] says. `limit`: this one's own, from now on. `busy`: something of it waits for its turn.
    pub fn measured(&mut self, path: Path, limit: Option<BitRate>, busy: bool) {
        self.own.limit = limit;
        let (mut shared, now) = self.pace.lock();
        // Who waits for its own limit wants no more of the path.
        shared.look(now, &path, busy && self.own.next() <= now);
        drop(shared);
        let passed = self.window.0.elapsed();
        if passed > Duration::from_secs(1) {
            self.rate = BitRate((self.window.1 as f64 * 8.0 / passed.as_secs_f64()) as u64);
            self.window = (Instant::now(), 0);
        }
    }

    /// How fast its bytes have gone lately.
    #[must_use]
    pub const fn carried(&self) -> BitRate {
        self.rate
    }

    /// How fast they may go now, where nobody else has any.
    #[must_use]
    pub fn allowed(&self) -> BitRate {
        let rate = self.pace.lock().0.scavenger.rate();
        self.own.limit.map_or(rate, |limit| limit.min(rate))
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        let (mut shared, now) = self.pace.lock();
        shared.leave(now, &self.own);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    /// A second of pieces as large as they may be, so many.
    fn second(pieces: &mut Pieces, now: u64, many: u32, sign: Duration) -> usize {
        (0..many).for_each(|_| pieces.sent(pieces.size));
        pieces.looked(s(now), sign);
        pieces.size
    }

    #[test]
    fn a_piece_that_waits_for_itself_is_a_sign_however_long_the_paths_queues_were() {
        let mut scavenger = Scavenger::new(scavenger::Config::default());
        let ms = Duration::from_millis;
        let mut now = Duration::ZERO;
        for (rtt, ticks) in [(50, 100), (300, 40), (50, 400)] {
            for _ in 0..ticks {
                now += ms(50);
                scavenger.measured(now, Some(ms(rtt)), 0, true);
            }
        }
        let last = scavenger.last_sign();
        assert!(last < now, "the queue is gone");
        // Little beside 250 ms, for the scavenger; the fifth of twelve packets at 3 Mbit/s.
        now += ms(50);
        scavenger.measured(now, Some(ms(69)), 0, true);
        assert_eq!(scavenger.last_sign(), last);
        assert_eq!(sign(&scavenger, now, Some(ms(69))), now);
        assert_eq!(sign(&scavenger, now, Some(ms(51))), last);
    }

    #[test]
    fn pieces_grow_while_they_go_and_make_no_queue_and_no_further_than_they_may() {
        let mut pieces = Pieces::new();
        let sizes: Vec<usize> = (1..=6).map(|now| second(&mut pieces, now, 8, s(0))).collect();
        assert_eq!(sizes, [5600, 11_200, LARGEST, LARGEST, LARGEST, LARGEST]);
        // Who sends little, or less than a piece, has tried nothing.
        let mut pieces = Pieces::new();
        assert_eq!(second(&mut pieces, 1, 7, s(0)), PIECES.0);
        (0..100).for_each(|_| pieces.sent(PIECES.0 - 1));
        pieces.looked(s(2), s(0));
        assert_eq!(pieces.size, PIECES.0);
        assert_eq!(second(&mut pieces, 3, 1, s(0)), 2 * PIECES.0);
    }

    #[test]
    fn a_sign_makes_them_small_and_half_of_what_made_it_is_the_most_for_a_minute() {
        let mut pieces = Pieces::new();
        (1..=3).for_each(|now| _ = second(&mut pieces, now, 8, s(0)));
        assert_eq!(pieces.size, LARGEST);
        assert_eq!(second(&mut pieces, 4, 100, s(4)), PIECES.0);
        let sizes: Vec<usize> = (5..64).map(|now| second(&mut pieces, now, 8, s(4))).collect();
        assert_eq!(sizes[..5], [PIECES.0; 5], "for six seconds after it");
        assert_eq!(*sizes.iter().max().unwrap(), LARGEST / 2);
        assert_eq!(second(&mut pieces, 64, 8, s(4)), LARGEST);
        // One that comes while they are small says nothing of them.
        assert_eq!(second(&mut pieces, 65, 8, s(65)), PIECES.0);
        assert_eq!(second(&mut pieces, 66, 8, s(66)), PIECES.0);
        assert_eq!(pieces.most.0, LARGEST / 2);
    }

    #[test]
    fn a_fast_rate_has_its_milliseconds_and_a_slow_one_what_is_tried() {
        let mut shared = Shared::new();
        assert_eq!(shared.piece(None), PIECES.0);
        shared.pieces.size = LARGEST;
        assert_eq!(shared.piece(None), LARGEST);
        shared.scavenger = at_least(100_000_000);
        assert_eq!(shared.piece(None), 25_000);
        assert_eq!(shared.piece(Some(BitRate(80_000_000))), 20_000);
        assert_eq!(shared.piece(Some(BitRate(1_000_000))), LARGEST);
    }

    fn ms(milliseconds: u64) -> Duration {
        Duration::from_millis(milliseconds)
    }

    fn at_least(rate: u64) -> Scavenger {
        Scavenger::new(scavenger::Config { least: BitRate(rate), ..scavenger::Config::default() })
    }

    /// Some who share a pace, and have more to send than goes.
    struct World {
        shared: Shared,
        all: Vec<Own>,
        /// What each has sent, bytes.
        sent: Vec<u64>,
        now: u64,
    }

    impl World {
        fn new(sharers: usize) -> Self {
            let all = (0..sharers).map(|_| Own::default()).collect();
            let mut shared = Shared::new();
            shared.sharers = sharers;
            Self { shared, all, sent: vec![0; sharers], now: 0 }
        }

        /// So many milliseconds, in which the path's round trip is so long, if anybody looks, and all arrives; what all have sent in them.
        fn run(&mut self, milliseconds: u64, rtt: Option<u64>) -> u64 {
            let before = self.total();
            for _ in 0..milliseconds {
                self.now += 1;
                if let Some(rtt) = rtt.filter(|_| self.now.is_multiple_of(50)) {
                    let path = Path { rtt: Some(ms(rtt)), acknowledged: self.total(), ..Path::default() };
                    // Each of them does.
                    self.all.iter().for_each(|_| self.shared.look(ms(self.now), &path, true));
                }
                for (own, sent) in self.all.iter_mut().zip(&mut self.sent) {
                    if let Ok(bytes) = self.shared.turn(ms(self.now), own, 1 << 20) {
                        *sent += bytes as u64;
                    }
                }
            }
            self.total() - before
        }

        fn total(&self) -> u64 {
            self.sent.iter().sum()
        }

        fn apart(&self) -> u64 {
            self.sent.iter().max().unwrap() - self.sent.iter().min().unwrap()
        }
    }

    /// What goes in so many seconds at the least rate.
    const fn least(seconds: u64) -> u64 {
        256_000 / 8 * seconds
    }

    #[test]
    fn a_hundred_who_share_a_pace_fall_to_the_least_rate_of_one_and_each_has_as_much_of_it() {
        let mut world = World::new(100);
        let sent = world.run(60_000, None);
        assert!((least(59)..=least(60) + PIECES.0 as u64).contains(&sent), "{sent}");
        assert!(world.apart() <= PIECES.0 as u64, "{:?}", world.sent);
        // On a path that carries more than they send they are faster; then somebody else wants it.
        assert!(world.run(6_000, Some(40)) > least(6) * 2);
        world.run(2_000, Some(80));
        assert_eq!(world.shared.scavenger.rate(), scavenger::Config::default().least);
        world.sent.fill(0);
        let sent = world.run(20_000, Some(80));
        assert!((least(19)..=least(20) + PIECES.0 as u64).contains(&sent), "{sent}");
        assert!(world.apart() <= PIECES.0 as u64, "{:?}", world.sent);
    }

    #[test]
    fn a_rate_that_falls_holds_for_those_who_wait_already_and_one_that_rises_too() {
        let mut world = World::new(50);
        world.shared.scavenger = at_least(200_000_000);
        world.run(1_000, None);
        let most = |world: &World| world.shared.turns.given.values().map(|turn| turn.bytes).max();
        assert_eq!(most(&world), Some(50_000));
        // A round was given out: of pieces as large it would take minutes at the least rate.
        world.shared.scavenger = at_least(256_000);
        world.shared.arrange(ms(world.now));
        assert_eq!(most(&world), Some(PIECES.0));
        let sent = world.run(5_000, None);
        assert!((least(4)..=least(5) + 2 * PIECES.0 as u64).contains(&sent), "{sent}");
        world.shared.scavenger = at_least(10_000_000);
        world.shared.arrange(ms(world.now));
        let sent = world.run(1_000, None);
        assert!((1_100_000..=1_260_000).contains(&sent), "{sent}");
    }

    #[test]
    fn a_limit_is_ones_own_and_what_it_leaves_is_the_others() {
        let mut world = World::new(2);
        world.shared.scavenger = at_least(10_000_000);
        world.all[0].limit = Some(BitRate(1_000_000));
        let sent = world.run(10_000, None);
        assert!((1_000_000..=1_253_000).contains(&world.sent[0]), "{:?}", world.sent);
        assert!((12_300_000..=12_510_000).contains(&sent), "{sent}");
    }

    #[test]
    fn what_was_given_to_those_who_leave_is_the_others_and_one_who_is_late_holds_nobody_up() {
        let mut world = World::new(1000);
        world.run(1, None);
        // A round takes a minute and a half; the last one's turn comes when all others are gone.
        let mut last = world.all.pop().unwrap();
        assert!(world.shared.turn(ms(2), &mut last, 1 << 20).is_err_and(|wait| wait > s(80)));
        world.all.iter().for_each(|own| world.shared.leave(ms(2), own));
        assert!(world.shared.turn(ms(2), &mut last, 1 << 20).is_err_and(|wait| wait < ms(100)));
        assert_eq!(world.shared.sharers, 1);

        // The first has its turn, and does something else.
        let mut world = World::new(3);
        let mut late = world.all.remove(0);
        assert!(world.shared.turn(ms(0), &mut late, 1 << 20).is_ok());
        assert!(world.shared.turn(ms(0), &mut late, 1 << 20).is_err());
        let sent = world.run(10_000, None);
        assert!((least(9)..=least(10)).contains(&sent), "{sent}");
    }

    #[test]
    fn what_could_not_go_while_the_machine_stood_still_does_not_go_at_once() {
        let mut world = World::new(50);
        world.run(10_000, None);
        // Longer than a round: the time of each has come, and gone.
        world.now += 6_000;
        let sent = world.run(1_000, None);
        assert!((least(1) - PIECES.0 as u64..=least(1) + 2 * PIECES.0 as u64).contains(&sent), "{sent}");
        // Nobody has lost its place by that, and one that sends nothing holds up nobody.
        world.run(20_000, None);
        assert!(world.apart() <= 2 * PIECES.0 as u64, "{:?}", world.sent);
        world.all.truncate(25);
        world.now += 6_000;
        let sent = world.run(10_000, None);
        assert!((least(9)..=least(10) + 2 * PIECES.0 as u64).contains(&sent), "{sent}");
    }

    #[test]
    fn a_limit_that_changes_holds_at_once() {
        let (mut shared, mut own) = (Shared::new(), Own { limit: Some(BitRate(8)), ..Own::default() });
        assert!(shared.turn(ms(1), &mut own, 1000).is_ok());
        // A thousand bytes at one a second.
        assert!(shared.turn(s(10), &mut own, 1000).is_err_and(|wait| wait > s(900)));
        own.limit = Some(BitRate(8000));
        assert!(shared.turn(s(10), &mut own, 1000).is_ok());
    }

    #[test]
    fn what_two_connections_have_counted_is_told_apart() {
        let mut shared = Shared::new();
        let path = |connection: usize, lost: u64, acknowledged: u64| Path {
            rtt: Some(ms(40)),
            lost,
            acknowledged,
            connection,
            ..Path::default()
        };
        for n in 0..100_u64 {
            // Each has lost something before, and carries 1000 bytes in a tenth of a second.
            let of = [path(1, 5, 1000 * n), path(2, 50, 70_000 + 1000 * n)];
            shared.look(ms(100 * n), &of[0], true);
            // At once: it does not count.
            shared.look(ms(100 * n), &of[0], true);
            shared.look(ms(100 * n + 50), &of[1], true);
        }
        assert_eq!((shared.scavenger.last_sign(), shared.counts.lost), (Duration::ZERO, 0));
        assert_eq!(shared.counts.acknowledged, 2 * 99_000);
        assert!((150_000.0..170_000.0).contains(&shared.arrives), "{}", shared.arrives);
        shared.look(ms(20_000), &path(1, 6, 100_000), true);
        assert_eq!(shared.scavenger.last_sign(), ms(20_000));
        // Of many connections some are forgotten.
        (10..100).for_each(|n| shared.look(ms(20_000 + 50 * n), &path(n as usize, 9, 0), true));
        assert_eq!((shared.counts.known.len(), shared.counts.lost), (CONNECTIONS, 1));
    }
}
