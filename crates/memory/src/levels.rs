//! How hard zstd tries on memory: by what the link carried, the processor packed and nobody used of the machine so far in this move
//! ([`godwit_content::choose`]). On a slow link a core has time for level 6 or 9, which make a twentieth and a twelfth less of it
//! than level 1; on one that is faster than the encoder what it spares by not looking far back is worth more. No clock in here.
//!
//! Another level begins a new frame with an empty window, so what came before is not referred to any more: a look is taken early, when little
//! is lost, and [`CHANGES`] of them change something at the most. From the lowest levels that bound keeps a busy machine, too: what they leave to the
//! wire takes processors at both ends, of which a look at the encoder tells nothing. Back from those the way is open ([`RETURNS`]), and as what
//! was mistaken may have been that, down again once more.
//!
//! Who asks for the fewest bytes ([`Policy::LeastBytes`]) gets [`LEAST`] from the first byte to the last: there is no trade to be measured.

use crate::config::Reach;
use crate::encoder::Encoder;
use crate::packing::Beside;
use godwit_content::choose::{Chooser, Measured};
pub use godwit_content::choose::{Level, Now, Shown, memory_share};
use godwit_units::{BitRate, Bytes, Policy};
use std::collections::BTreeMap;
use std::time::Duration;

/// Bytes that zstd is given between two looks: some tenths of a second of a gigabit. What goes as a name, or not at all, is no part of it: of pages that
/// lie on a disk at the destination 16 MiB became half a megabyte there, in a moment that told nothing of the rest, and a database's move with its disk
/// pre-cached went to [`Level::Near`] and back twice, each time to an empty window.
const LOOK: u64 = 16 << 20;
/// Once zstd was given so much, a level above 1 is left for no higher one: what that spares of the rest, a twentieth, its empty window takes.
const EARLY: u64 = 64 << 20;
/// A window is worth more than a better level by the third time.
const CHANGES: u32 = 2;
/// And so many to a higher level from one below 1, whose window is short: where the encoder was what held the stream up at the first looks, nothing
/// was known of the link, and what was taken for it may turn out to be too fast by far. The last one is for good.
const RETURNS: u32 = 2;

/// An acknowledgement may be so much later than a round trip. Where more is on its way than arrives in both, the rest waits for the link, in
/// buffers that take some megabytes before anybody is made to wait: then it is not the encoder that holds the stream up, whatever it took.
const LATE: Duration = Duration::from_millis(50);

/// Where the link was waited for so much of the time, or is known, or shown to be scarce, a level below 1 is left for a higher one at once; otherwise where two looks on end say so. What the
/// first look takes for the link may be a flow that only begins, and pages that pack well make any level fast enough for a moment: idle guests of which one
/// look sent them back to level 1 took 4.5 s over 1000 Mbit/s, and others 3.0.
const HELD_UP: f64 = 0.5;

/// Where packing and waiting for the link take a smaller part of the time, QEMU is what the stream waits for, and nothing is learnt of the link.
const OURS: f64 = 0.5;

/// The level that makes the least of memory. Beside level 1 it takes three times as long for 7 to 9 %
/// fewer bytes; level 12 takes half as long again as 9 for another hundredth, 19 a hundred times for a sixth (recorded streams of a compiler's and a
/// database's guest).
const LEAST: Level = Level::Nine;

/// Measures a stream, and says when to go on with another level.
#[derive(Debug)]
pub struct Levels {
    /// The one that was asked for, whatever is measured.
    fixed: Option<Level>,
    chooser: Chooser,
    since: Now,
    /// What the encoder's caller has given it, and its thread had had then.
    packing: Duration,
    beside: Beside,
    waiting: Duration,
    given: u64,
    wire: u64,
    arrived: u64,
    left: u32,
    returns: u32,
    /// Whether the look before would have left level 1 or a higher one for a lower one, or one below it for a higher one.
    doubted: bool,
    /// Whether a look has told anything.
    looked: bool,
}

/// What the link has made of the stream.
#[derive(Clone, Copy, Debug)]
pub struct Carried {
    /// Packed bytes that the other side has acknowledged.
    pub arrived: u64,
    /// How long one takes to be, where nothing waits.
    pub round_trip: Duration,
    /// What bursts show of the link, which nobody need have waited for.
    pub shown: Option<Shown>,
}

/// What an encoder has made of a stream so far.
#[derive(Clone, Copy, Debug, Default)]
pub struct Made {
    /// Bytes that zstd was given.
    pub given: u64,
    /// What became of them.
    pub wire: u64,
    /// What zstd took on a thread of its own.
    pub beside: Beside,
}

impl From<&Encoder> for Made {
    fn from(encoder: &Encoder) -> Self {
        let progress = encoder.progress();
        Self { given: progress.given_bytes, wire: progress.wire_bytes, beside: encoder.beside().unwrap_or_default() }
    }
}

/// How long it is of use to know how a stream to a host was packed: in an hour both the link and who has the processors may be others.
pub const REMEMBERED: Duration = Duration::from_secs(3600);

/// How long it counts for more than a lower figure what something that gives way was seen to have of a link: a pre-cache's epoch and a half.
const LATELY: Duration = Duration::from_secs(15);
/// And where it is less than such a part of what was known, it only began: epochs of a pre-cache that had little to send went at a three-hundredth of what the link
/// carried. A link that has become so slow is found out by the first stream that waits for it.
const BEGINS: u64 = 8;

/// What is known of streams to a host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Known {
    /// What the last one was packed by in the end.
    pub level: Option<Level>,
    /// What the link carries.
    pub link: Option<BitRate>,
}

/// What was found of streams to other hosts ([`Levels::found`]), and of the links to them: a host that is emptied moves one guest after the other. As many
/// entries as there are hosts.
#[derive(Debug, Default)]
pub struct Found(BTreeMap<String, Told>);

/// What of it was found when.
#[derive(Clone, Copy, Debug, Default)]
struct Told {
    level: Option<(Level, Duration)>,
    link: Option<(BitRate, Duration)>,
}

/// What was found not longer ago than that.
fn since<T>(found: Option<(T, Duration)>, now: Duration, ago: Duration) -> Option<T> {
    found.filter(|(_, at)| now.saturating_sub(*at) < ago).map(|(what, _)| what)
}

impl Found {
    /// That was found for that host, at `now` of a clock of the caller's; what it does not say stays as it was.
    pub fn keep(&mut self, host: &str, found: Known, now: Duration) {
        let told = self.0.entry(host.to_owned()).or_default();
        told.level = found.level.map(|level| (level, now)).or(told.level);
        told.link = found.link.map(|link| (link, now)).or(told.link);
    }

    /// Something that gives way to all others has had so much of the link to it. It has less where others want it, and while it begins: the most of the last
    /// moments counts, and what is a small part of what was known does not ([`BEGINS`]).
    pub fn carries(&mut self, host: &str, rate: BitRate, now: Duration) {
        let link = self.0.get(host).and_then(|told| told.link);
        let lately = since(link, now, LATELY).is_some_and(|lately| rate < lately);
        let begins = since(link, now, REMEMBERED).is_some_and(|known| rate.0 < known.0 / BEGINS);
        if !lately && !begins {
            self.keep(host, Known { level: None, link: Some(rate) }, now);
        }
    }

    /// The last that was found for it, as far as that is not longer ago than [`REMEMBERED`].
    #[must_use]
    pub fn of(&self, host: &str, now: Duration) -> Known {
        let Some(told) = self.0.get(host) else { return Known::default() };
        Known { level: since(told.level, now, REMEMBERED), link: since(told.link, now, REMEMBERED) }
    }
}

/// How far back such a level looks: where the encoder is what the stream waits for, not over long distances.
#[must_use]
pub fn reach(level: Level) -> Reach {
    match level {
        Level::Middle => Reach::Middle,
        level if level < Level::One => Reach::Near,
        _ => Reach::Far,
    }
}

/// What is said of how a stream is packed at such a level.
#[must_use]
pub fn told(level: Level) -> String {
    let reach = match reach(level) {
        Reach::Near => ", looking back a mebibyte",
        Reach::Middle => ", looking back 16 MiB",
        Reach::Far => "",
    };
    format!("memory is packed with zstd's level {}{reach}", level.number())
}

impl Levels {
    /// From now on. With level 1, but for a policy that says itself what is wanted.
    #[must_use]
    pub fn new(policy: Policy, now: Now) -> Self {
        let fixed = (policy == Policy::LeastBytes).then_some(LEAST);
        let chooser = Chooser::for_memory();
        Self {
            fixed,
            chooser: if policy == Policy::LeastTotal { chooser.hurrying() } else { chooser },
            since: now,
            packing: Duration::ZERO,
            beside: Beside::default(),
            waiting: Duration::ZERO,
            given: 0,
            wire: 0,
            arrived: 0,
            left: if fixed.is_some() { 0 } else { CHANGES },
            returns: if fixed.is_some() { 0 } else { RETURNS },
            doubted: false,
            looked: false,
        }
    }

    /// Begins with the level that another stream over the same link ended with not long ago, if that is below 1: the first looks of this one need not find
    /// that out again. What is higher has to be found worth its time anew, and so has [`Level::Raw`], which on a link that has become slow would cost most.
    ///
    /// What the link carries, where that is known, is what it carries as long as nothing else is seen.
    #[must_use]
    pub fn knowing(mut self, before: Known) -> Self {
        if let Some(level) = before.level.filter(|level| *level < Level::One) {
            self.chooser.keep(level.max(Level::Faster));
        }
        if let Some(link) = before.link {
            self.chooser.knows(link);
        }
        self
    }

    /// The level that is in force, if it is one that was measured, and what the link was seen to carry: what another stream may begin with
    /// ([`Levels::knowing`]).
    #[must_use]
    pub fn found(&self) -> Known {
        if self.looked { Known { level: Some(self.level()), link: self.chooser.link() } } else { Known::default() }
    }

    /// The level that is in force.
    #[must_use]
    pub fn level(&self) -> Level {
        self.fixed.unwrap_or(self.chooser.level())
    }

    /// So long it took to pack something, waits for the encoder's own thread included.
    pub fn packed(&mut self, time: Duration) {
        self.packing += time;
    }

    /// So long the link had no room for more. What reading takes, and waiting for QEMU, says nothing of the link: where that was counted as its
    /// time a gigabit looked like 200 Mbit/s to a source with busy processors.
    pub fn waited(&mut self, time: Duration) {
        self.waiting += time;
    }

    /// The level to go on with, if it is another one. `seen` is asked for only where there is something to be learnt.
    pub fn look(&mut self, made: Made, seen: impl FnOnce() -> (Now, Carried)) -> Option<Level> {
        let may_return = self.returns > 0 && self.level() < Level::One;
        if (self.left == 0 && !may_return) || made.given - self.given < LOOK {
            return None;
        }
        let (now, carried) = seen();
        let time = now.at.saturating_sub(self.since.at);
        let zstd = made.beside.spent.saturating_sub(self.beside.spent);
        let rest = self.packing.saturating_sub(made.beside.waited.saturating_sub(self.beside.waited));
        let measured = Measured {
            plain: Bytes(made.given - self.given),
            packed: Bytes(made.wire - self.wire),
            packing: rest + zstd,
            zstd,
            longest: self.packing.min(rest + zstd),
            time: self.packing + self.waiting,
            free: now.free_since(self.since),
        };
        let on_its_way = made.wire.saturating_sub(carried.arrived);
        let carries = carried.arrived.saturating_sub(self.arrived) as f64 / time.as_secs_f64().max(0.001);
        let waits = on_its_way as f64 > carries * (carried.round_trip + LATE).as_secs_f64();
        (self.given, self.wire, self.beside, self.arrived) = (made.given, made.wire, made.beside, carried.arrived);
        let held_up = self.waiting.as_secs_f64() >= HELD_UP * measured.time.as_secs_f64();
        (self.packing, self.waiting, self.since) = (Duration::ZERO, Duration::ZERO, now);
        if measured.time.as_secs_f64() < OURS * time.as_secs_f64() {
            return None;
        }
        self.looked = true;
        let (before, chooser) = (self.chooser.level(), self.chooser.clone());
        self.chooser.shows(carried.shown);
        let now = self.chooser.measured(&measured);
        // On a stream that is short of what is raw for a while, a probe would only cost the window.
        if (waits && now < before) || (before == Level::Raw && self.left < CHANGES) {
            self.chooser = chooser;
            return None;
        }
        if now == before {
            self.doubted = false;
            return None;
        }
        // Zero-filled or often repeated contents make any level too slow for a moment, and the window is worth more than that. And the first look at
        // level 1 is at a flow that only begins.
        let leaves = now < before && before >= Level::One;
        let returns = now > before && before < Level::One;
        let climbs = now > before && before > Level::One && made.given > EARLY;
        // Where bursts show what there is, no second look is waited for.
        let unsure = (leaves && !self.chooser.is_ample())
            || (returns && !held_up && self.chooser.link().is_none() && !self.chooser.is_scarce());
        let doubts = unsure && !self.doubted;
        self.doubted = doubts;
        let left = if returns { &mut self.returns } else { &mut self.left };
        if climbs || doubts || *left == 0 {
            self.chooser.keep(before);
            return None;
        }
        *left -= 1;
        if returns && self.returns > 0 {
            self.left = self.left.max(1);
        }
        Some(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A stream on a machine.
    struct Stream {
        levels: Levels,
        made: Made,
        now: Now,
        /// What bursts show of the link.
        shown: Option<Shown>,
    }

    impl Stream {
        fn new() -> Self {
            Self::of(Policy::LeastDowntime)
        }

        fn of(policy: Policy) -> Self {
            let levels = Levels::new(policy, Now::default());
            Self { levels, made: Made::default(), now: Now::default(), shown: None }
        }

        /// 17 MB more, which became a quarter: packing them and waiting for the link took so long, and QEMU was waited for. Meanwhile so many
        /// processors were free.
        fn goes(&mut self, [packing, waiting, qemu]: [f64; 3], free: f64, on_its_way: u64) -> Option<Level> {
            let took = packing + waiting + qemu;
            self.looks([17e6, 17e6 / 4.0, took, packing, waiting, 0.0, 0.0], free, (on_its_way, 50))
        }

        /// A look: bytes that zstd was given since the one before and what became of them, seconds since then, of packing and of waiting for the link, and of
        /// zstd's thread and of waiting for it. Meanwhile so many processors were free; so much is on its way, and a round trip takes so many ms.
        fn looks(
            &mut self,
            [given, wire, time, packing, waiting, spent, waited]: [f64; 7],
            free: f64,
            (on_its_way, rtt_ms): (u64, u64),
        ) -> Option<Level> {
            let time = Duration::from_secs_f64(time);
            self.made.given += given as u64;
            self.made.wire += wire as u64;
            self.made.beside.spent += Duration::from_secs_f64(spent);
            self.made.beside.waited += Duration::from_secs_f64(waited);
            self.levels.packed(Duration::from_secs_f64(packing));
            self.levels.waited(Duration::from_secs_f64(waiting));
            self.now.at += time;
            self.now.idle += time.mul_f64(free);
            let (arrived, round_trip) = (self.made.wire - on_its_way, Duration::from_millis(rtt_ms));
            let carried = Carried { arrived, round_trip, shown: self.shown };
            self.levels.look(self.made, || (self.now, carried))
        }
    }

    /// A stream that level 1 packs at 250 MB/s, over a link of so many Mbit/s: the levels that are changed to. For each 17 MB QEMU is waited for
    /// so long, and so many processors are free.
    fn levels(mbit: f64, qemu: f64, free: f64) -> Vec<Level> {
        let (mut stream, mut changed) = (Stream::new(), vec![]);
        let mut packing = 17e6 / 250e6;
        for _ in 0..12 {
            let waiting = (17e6 / 4.0 * 8.0 / (mbit * 1e6) - packing).max(0.0);
            if let Some(level) = stream.goes([packing, waiting, qemu], free, 0) {
                packing *= if level > Level::One { 2.0 } else { 0.5 };
                changed.push(level);
            }
        }
        changed
    }

    #[test]
    fn what_bursts_show_of_a_link_is_not_found_out_by_lower_levels() {
        // Level 1 packs 17 MB into a seventh, and then as much into a quarter, and is what is waited for.
        let looks = |shown: Option<(u64, bool)>| {
            let shown = shown.map(|(mbit, all)| Shown { link: BitRate(mbit * 1_000_000), all });
            let mut stream = Stream { shown, ..Stream::new() };
            [2.4e6, 4e6].map(|wire| stream.looks([17e6, wire, 0.34, 0.3, 0.04, 0.27, 0.17], 0.0, (100_000, 20)))
        };
        let leaves = |level: Option<Level>| level.is_some_and(|level| level < Level::One);
        // That it carries no less than little says nothing.
        for shown in [None, Some((40, false))] {
            assert_eq!(looks(shown).map(leaves), [false, true], "{shown:?}");
        }
        assert_eq!(looks(Some((100, true))), [None, None]);
        assert!(leaves(looks(Some((400, false)))[0]) && leaves(looks(Some((900, true)))[0]));
        // Where level 1 makes two thirds of what it carries, who wants the shortest time packs less, and nobody else does.
        let slow = |policy| {
            let shown = Some(Shown { link: BitRate(100_000_000), all: true });
            let mut stream = Stream { shown, ..Stream::of(policy) };
            [(); 2].map(|()| stream.looks([17e6, 4.25e6, 0.53, 0.51, 0.01, 0.34, 0.34], 0.0, (100_000, 20)))
        };
        assert_eq!(slow(Policy::LeastDowntime), [None, None]);
        assert!(leaves(slow(Policy::LeastTotal)[1]), "{:?}", slow(Policy::LeastTotal));
        // A level with a short window is left at once for a scarce link.
        let returns = |shown| {
            let mut stream = Stream { shown, ..Stream::new() };
            stream.levels = Levels::new(Policy::LeastDowntime, Now::default())
                .knowing(Known { level: Some(Level::Near), link: None });
            stream.looks([17e6, 4.5e6, 0.38, 0.17, 0.2, 0.14, 0.1], 0.0, (100_000, 20))
        };
        let scarce = Shown { link: BitRate(100_000_000), all: true };
        assert_eq!(returns(Some(scarce)), Some(Level::One));
        assert!(leaves(returns(None)), "it may be a fast one");
    }

    #[test]
    fn what_lies_in_buffers_before_the_link_is_no_reason_to_pack_less() {
        let mut stream = Stream::new();
        assert_eq!(stream.goes([0.05, 0.0, 0.0], 0.0, 4_000_000), None, "nobody was made to wait yet");
        // The link is the one that is waited for, and the buffers stay full.
        for _ in 0..4 {
            let level = stream.goes([0.05, 0.22, 0.0], 0.0, 4_000_000);
            assert!(level.is_none_or(|level| level > Level::One), "{level:?}");
        }
        // The same where all of it arrives at once.
        let mut stream = Stream::new();
        let looks = [(); 2].map(|()| stream.goes([0.05, 0.0, 0.0], 0.0, 400_000));
        assert!(looks[0].is_none(), "{looks:?}: one look might be at a flow that begins");
        assert!(looks[1].is_some_and(|level| level < Level::One), "{looks:?}");
    }

    #[test]
    fn a_stream_begins_as_another_one_ended_and_is_not_bound_to_it() {
        let begins =
            |before| Levels::new(Policy::LeastTotal, Now::default()).knowing(Known { level: before, link: None });
        let at = |before| begins(Some(before)).level();
        assert_eq!([at(Level::Raw), at(Level::Faster), at(Level::Near)], [Level::Faster, Level::Faster, Level::Near]);
        assert_eq!([at(Level::One), at(Level::Six), begins(None).level()], [Level::One; 3]);
        let least =
            Levels::new(Policy::LeastBytes, Now::default()).knowing(Known { level: Some(Level::Faster), link: None });
        assert_eq!(least.level(), LEAST);
        // Nothing is waited for at the link: it stays one of those. Where the link is what is waited for, the first look says so.
        let mut stream = Stream::new();
        stream.levels = begins(Some(Level::Faster));
        assert_eq!(stream.levels.found(), Known::default(), "nothing was measured yet");
        for _ in 0..4 {
            stream.looks([17e6, 8e6, 0.05, 0.05, 0.0, 0.0, 0.0], 0.0, (0, 50));
            assert!(stream.levels.found().level.is_some_and(|level| level < Level::One), "{:?}", stream.levels.found());
        }
        let mut stream = Stream::new();
        stream.levels = begins(Some(Level::Faster));
        let level = stream.looks([17e6, 8e6, 1.0, 0.05, 0.95, 0.0, 0.0], 0.0, (0, 50));
        assert!(level.is_some_and(|level| level >= Level::One), "{level:?}");
    }

    #[test]
    fn what_was_found_is_that_hosts_and_forgotten_after_an_hour() {
        let (mut found, minutes) = (Found::default(), |n: u64| Duration::from_secs(60 * n));
        let level = |level| Known { level: Some(level), link: None };
        let link = |mbit| Known { level: None, link: Some(BitRate::from_mbit(mbit)) };
        found.keep("b", level(Level::Fast), minutes(1));
        found.keep("c", level(Level::Six), minutes(1));
        found.keep("b", level(Level::Faster), minutes(10));
        let none = Known::default();
        assert_eq!(
            ["b", "c", "d"].map(|host| found.of(host, minutes(60))),
            [level(Level::Faster), level(Level::Six), none]
        );
        assert_eq!(["b", "c"].map(|host| found.of(host, minutes(62))), [level(Level::Faster), none]);
        assert_eq!(found.of("b", minutes(70)), none);
        // What is found of one leaves the other.
        found.keep("c", link(100.0), minutes(62));
        found.keep("b", link(200.0), minutes(69));
        found.keep("c", level(Level::One), minutes(63));
        let both = Known { level: Some(Level::One), ..link(100.0) };
        assert_eq!(["b", "c"].map(|host| found.of(host, minutes(70))), [link(200.0), both]);
    }

    #[test]
    fn what_gives_way_has_had_of_a_link_what_the_most_of_the_last_moments_is() {
        let (mut found, seconds) = (Found::default(), Duration::from_secs);
        let mut carries = |mbit, at| {
            found.carries("b", BitRate::from_mbit(mbit), seconds(at));
            found.of("b", seconds(at)).link.map(BitRate::mbit)
        };
        let seen = [(400.0, 0), (90.0, 10), (90.0, 20), (40.0, 30), (95.0, 31), (20.0, 60), (2.0, 80), (2.0, 4000)];
        let told = seen.map(|(mbit, at)| carries(mbit, at));
        assert_eq!(told, [400.0, 400.0, 90.0, 90.0, 95.0, 20.0, 20.0, 2.0].map(Some));
    }

    #[test]
    fn a_slow_link_gets_a_higher_level_at_the_first_look_and_keeps_it() {
        assert_eq!(levels(60.0, 0.0, 0.0).first(), Some(&Level::Six));
        assert!(levels(60.0, 0.0, 0.0).len() <= CHANGES as usize);
    }

    #[test]
    fn where_a_processor_is_free_the_level_is_one_that_takes_more_of_it() {
        assert_eq!([levels(100.0, 0.0, 0.0).first(), levels(200.0, 0.0, 0.9).first()], [None, Some(&Level::Six)]);
        assert_eq!(levels(100.0, 0.0, 0.9).first(), Some(&Level::Nine));
        // What was idle before the stream began is not counted.
        let mut stream = Stream::new();
        let before = Now { at: Duration::from_secs(900), idle: Duration::from_secs(1800) };
        (stream.now, stream.levels) = (before, Levels::new(Policy::LeastTotal, before));
        assert_eq!(stream.goes([0.07, 0.27, 0.0], 0.0, 0), None);
    }

    #[test]
    fn a_moment_in_which_all_packs_well_is_no_reason_to_leave_a_level_and_two_are() {
        let higher = || {
            let mut stream = Stream::new();
            assert_eq!(stream.goes([0.07, 0.27, 0.0], 0.9, 0), Some(Level::Nine));
            stream
        };
        let mut stream = higher();
        let well = |stream: &mut Stream| {
            stream.made.wire -= 17_000_000 / 4 - 17_000_000 / 20;
            stream.goes([0.3, 0.0, 0.0], 0.0, 0)
        };
        assert_eq!(well(&mut stream), None);
        assert_eq!(stream.goes([0.1, 0.24, 0.0], 0.9, 0), None, "it has gone by");
        assert_eq!(well(&mut stream), None);
        assert_eq!(well(&mut stream), Some(Level::One));
    }

    #[test]
    fn a_level_above_1_is_left_for_a_higher_one_only_early_and_level_1_at_any_time() {
        // A moment in which the link is slow, once so many looks have gone by with what the first one chose.
        let slow = |mut packing: f64, free, looks| {
            let mut stream = Stream::new();
            let first = stream.goes([packing, 0.34 - packing, 0.0], free, 0);
            packing *= if first.is_some() { 1.5 } else { 1.0 };
            for _ in 0..looks {
                assert_eq!(stream.goes([packing, 0.34 - packing, 0.0], free, 0), None, "{first:?}");
            }
            (first, stream.goes([packing, 0.6, 0.0], 0.9, 0))
        };
        assert_eq!(slow(0.13, 0.9, 0), (Some(Level::Six), Some(Level::Nine)));
        assert_eq!(slow(0.13, 0.9, 4), (Some(Level::Six), None));
        assert_eq!(slow(0.07, 0.0, 8), (None, Some(Level::Nine)));
    }

    #[test]
    fn a_link_that_was_taken_for_a_faster_one_is_found_out_and_so_is_the_opposite() {
        let mut stream = Stream::new();
        let slow = |stream: &mut Stream| stream.goes([0.05, 0.75, 0.0], 0.0, 0);
        let busy = |stream: &mut Stream| Vec::from_iter((0..8).filter_map(|_| stream.goes([0.1, 0.0, 0.0], 0.0, 0)));
        let [first, second] = busy(&mut stream)[..] else { panic!("two changes") };
        assert!(first < Level::One && second < first, "{first:?}, {second:?}");
        // What it carries is less by far.
        assert_eq!(slow(&mut stream), Some(Level::One));
        // That was a moment, or this is one.
        let again = busy(&mut stream);
        assert!(matches!(again[..], [level] if level < Level::One), "{again:?}");
        assert_eq!(slow(&mut stream), Some(Level::One));
        assert_eq!((busy(&mut stream), slow(&mut stream)), (vec![], None), "there is an end to it");
    }

    #[test]
    fn a_link_that_is_known_takes_a_stream_back_at_once_and_one_that_is_not_needs_two_looks() {
        let looks = |link| {
            let mut stream = Stream::new();
            stream.levels = stream.levels.knowing(Known { level: Some(Level::Near), link });
            // It is waited for, though for less than half of the time.
            [(); 2].map(|()| stream.looks([17e6, 4.2e6, 0.34, 0.18, 0.16, 0.0, 0.0], 0.0, (0, 50)))
        };
        let back = |level: Option<Level>| level.is_some_and(|level| level > Level::Near);
        assert!(back(looks(Some(BitRate::from_mbit(100.0)))[0]));
        assert_eq!(looks(None).map(back), [false, true]);
    }

    #[test]
    fn a_flow_that_begins_slowly_is_not_taken_for_a_slow_link_because_of_pages_that_pack_well() {
        // Recorded of two idle guests over 500 and 1000 Mbit/s: a kernel's own pages, then many that were never used, then others.
        let first = [
            [16_841_533.0, 11_366_557.0, 0.441, 0.188, 0.090, 0.219, 0.134],
            [16_780_101.0, 11_363_817.0, 0.455, 0.117, 0.134, 0.146, 0.067],
        ];
        let second = [
            [16_805_844.0, 1_989_671.0, 0.079, 0.051, 0.0, 0.047, 0.031],
            [16_797_297.0, 1_908_464.0, 0.088, 0.068, 0.001, 0.052, 0.049],
        ];
        let others = [
            [16_814_748.0, 5_913_418.0, 0.171, 0.132, 0.002, 0.144, 0.105],
            [16_785_060.0, 4_964_410.0, 0.149, 0.109, 0.004, 0.116, 0.082],
        ];
        for (first, second) in first.into_iter().zip(second) {
            let mut stream = Stream::new();
            let levels = [first, second, others[0], others[1]].map(|mut look| {
                // All but the first was recorded at a level that takes half as long.
                if look != first && stream.levels.level() == Level::One {
                    look[2..].iter_mut().for_each(|time| *time *= 2.0);
                }
                stream.looks(look, 0.0, (300_000, 21))
            });
            assert!(stream.levels.level() < Level::One, "{levels:?}");
            assert!(levels.iter().flatten().all(|level| *level < Level::One), "{levels:?}");
        }
    }

    #[test]
    fn a_machine_that_is_busy_for_a_while_makes_the_link_no_faster() {
        let mut stream = Stream::new();
        assert_eq!(stream.goes([0.09, 0.25, 0.0], 0.0, 0), None);
        // Packing takes five times as long, so that nobody waits for the link.
        assert_eq!([(); 3].map(|()| stream.goes([0.45, 0.0, 0.0], 0.0, 0)), [None; 3]);
    }

    #[test]
    fn who_wants_the_fewest_bytes_gets_the_highest_level_on_any_link() {
        let mut stream = Stream::of(Policy::LeastBytes);
        assert_eq!((stream.levels.level(), reach(stream.levels.level())), (Level::Nine, Reach::Far));
        for _ in 0..4 {
            // A link that takes no time at all.
            assert_eq!(stream.goes([0.4, 0.0, 0.0], 0.0, 0), None);
        }
        assert_eq!(stream.levels.level(), Level::Nine);
        assert_eq!(Stream::of(Policy::LeastTotal).levels.level(), Level::One);
    }

    #[test]
    fn a_link_that_is_as_fast_as_level_1_keeps_it() {
        assert_eq!(levels(400.0, 0.0, 0.0), []);
    }

    #[test]
    fn where_the_encoder_is_waited_for_it_looks_near_and_reading_from_qemu_is_not_taken_for_the_link() {
        assert_eq!(levels(1200.0, 0.0, 0.0).first(), Some(&Level::Near));
        assert_eq!(levels(1200.0, 0.03, 0.0).first(), Some(&Level::Near));
        assert_eq!(reach(Level::Near), Reach::Near);
    }

    #[test]
    fn where_qemu_is_waited_for_the_level_stays() {
        assert_eq!(levels(1200.0, 0.1, 0.0), []);
    }
}
