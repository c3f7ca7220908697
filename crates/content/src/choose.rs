//! How to send: what the link's rate and the processor allow. Functions of figures that the caller has measured; no clock in here.
//!
//! Packing and sending go on side by side, so a stream moves as many plain bytes a second as the slower of the two: what a core packs, or two, or
//! what the link carries once it is packed. Where no core is free, sending takes what packing would. Of zstd's levels the cheapest is taken that comes within 3 % of the best, and it is kept
//! while it is within 5 %. Of memory, up to level 1, bytes count beside time. [`Level::Raw`] is always among them: by the figures nothing that is chosen is slower than plain by more.
//!
//! Contents that do not compress need no sampling of their own: on them zstd's level 1 runs at a third of the speed of copying
//! (`content_speed` in `make bench`); where that is too slow the cheapest level is chosen, since none brings anything.

use godwit_units::{BitRate, Bytes};
use std::time::Duration;

/// How hard zstd tries. Cheapest first. Speeds and sizes below are those of disks; on memory, with its long window, a level costs and
/// brings less beside the next one (see [`Chooser::for_memory`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// Not at all, but for long repetitions that it stumbles over: as good as raw, in zstd's format.
    Raw,
    /// Five times as fast as level 1 on what does not compress, twice on what does.
    Faster,
    /// A third faster than level 1.
    Fast,
    /// Level 1 of a stream of memory, without the matches over long distances and the second table that it has otherwise, and with pages as they lie.
    Near,
    /// Level 1 of a stream of memory, without the matches over long distances that it has otherwise: a twentieth more.
    Middle,
    /// zstd's level 1: several Gbit/s.
    One,
    /// Level 3: half as fast as 1, a tenth smaller. For disks.
    Three,
    /// Level 6: a sixth as fast as 1, a fifth smaller. On memory three fifths as fast, and a twentieth smaller.
    Six,
    /// Level 9, for memory: a third as fast as 1, a twelfth smaller. On a slow link, and for who wants the fewest bytes, whatever it takes.
    Nine,
}

/// A level, its speed, and how much of what level 1 spares it spares. What counts is how they compare; the absolute speed is measured
/// anew each time.
#[derive(Clone, Copy, Debug)]
struct Rung {
    level: Level,
    speed: f64,
    spares: f64,
    /// Of what is left then it spares such a part again where nearly all is spared, and less where less is.
    again: f64,
    /// Which part of its work zstd is, where that can be done beside the rest.
    zstd: f64,
}

const fn rung(level: Level, speed: f64, spares: f64) -> Rung {
    Rung { level, speed, spares, again: 0.0, zstd: 0.0 }
}

impl Rung {
    const fn again(self, again: f64) -> Self {
        Self { again, ..self }
    }

    const fn zstd(self, zstd: f64) -> Self {
        Self { zstd, ..self }
    }

    /// Work on a byte, in level 1's: all of it, and what is done one after the other where so much of what can be done at once is. `aside`: what comes
    /// to it at any level.
    fn work(&self, aside: f64, overlap: f64) -> (f64, f64) {
        let (zstd, rest) = (self.zstd / self.speed, (1.0 - self.zstd) / self.speed + aside);
        (zstd + rest, zstd + rest - overlap * zstd.min(rest))
    }

    /// Plain bytes a second over a link of so many, where all of level 1's work takes a second for `speed` of them, and it spares that part: what is
    /// slower, packing or the link. To send a byte that is left takes `wire` of level 1's work on one, for whoever packs.
    fn rate(&self, link: f64, speed: f64, (aside, overlap): (f64, f64), spared: f64, wire: f64) -> f64 {
        let left = self.left(spared);
        (link / left).min(speed / (self.work(aside, overlap).1 + wire * left))
    }

    /// What it leaves of contents of which level 1 spares that part.
    fn left(&self, spared: f64) -> f64 {
        ((1.0 - spared * self.spares) * (1.0 - spared * self.again)).max(0.001)
    }

    /// The opposite: what level 1 spares of contents of which this one leaves that part. Of contents that do not shrink at all nothing is spared at
    /// any level.
    fn spared(&self, left: f64) -> f64 {
        let (sum, product, all) = (self.spares + self.again, self.spares * self.again, 1.0 - left);
        let root = (sum * sum - 4.0 * product * all).max(0.0).sqrt();
        (2.0 * all / (sum + root)).clamp(0.0, 1.0)
    }
}

/// Measured on programs and libraries with a window of 8 MiB.
static DISKS: [Rung; 6] = [
    rung(Level::Raw, 5.0, 0.05),
    rung(Level::Faster, 1.95, 0.53),
    rung(Level::Fast, 1.35, 0.75),
    rung(Level::One, 1.0, 1.0),
    rung(Level::Three, 0.55, 1.07),
    rung(Level::Six, 0.16, 1.11),
];

/// Measured on recorded streams of two Debian guests (a database and a compiler; `examples/ratio.rs` of `memory`), all of an encoder's work
/// included: with a window of 256 MiB, matches over all of it and pages laid as they pack best from level 1 on, with 1 MiB and as they lie below.
///
/// Of the bytes that level 1 makes 6 leaves 0.95 and 0.96, and 9 0.91 and 0.93. Level 3 makes as much as 1, which has its two tables here; 5 leaves 0.97 and 7 a
/// hundredth less than 6, too near to be worth a rung. zstd's part of the work is that of both streams, in the mean.
static MEMORY: [Rung; 8] = [
    rung(Level::Raw, 4.4, 0.05).zstd(0.38),
    rung(Level::Faster, 3.3, 0.645).zstd(0.53),
    rung(Level::Fast, 2.8, 0.81).zstd(0.61),
    rung(Level::Near, 2.05, 0.956).zstd(0.7),
    rung(Level::Middle, 1.3, 0.985).zstd(0.58),
    rung(Level::One, 1.0, 1.0).zstd(0.68),
    rung(Level::Six, 0.6, 1.0).again(0.063).zstd(0.84),
    rung(Level::Nine, 0.37, 1.0).again(0.107).zstd(0.79),
];

/// What zstd's level `to` leaves of a guest's memory, beside what level `from` does: both by [`Level::number`], and of contents of which level 1 spares three
/// quarters, as it does of most guests'. `None` for what is no level here, or spares next to nothing.
#[must_use]
pub fn memory_share(from: i32, to: i32) -> Option<f64> {
    const SPARED: f64 = 0.75;
    // Three have the number 1, and leave as good as the same.
    let rung = |number| MEMORY.iter().rev().find(|rung| rung.level.number() == number && rung.level != Level::Raw);
    Some(rung(to)?.left(SPARED) / rung(from)?.left(SPARED))
}

/// Where nobody has a core to spare, to send a byte of memory and take it there, encrypted, holds packing up by so much of what level 1's work on a byte takes: moves
/// over 1000 Mbit/s between two hosts on two busy processors took both ends' processes 2.5 s by the lowest of zstd's levels, with 134 MiB on the wire, and 2.9 s raw, with 231.
const WIRE: f64 = 0.45;
/// Of a core that levels above 1 may take where none is free: guests run beside, and the last tenths of a byte are not worth their time.
const SHARE: f64 = 0.25;
/// Of cores that nobody uses they may take such a part beside what is taken already: the rest is left to guests that wake up.
const OF_FREE: f64 = 0.5;
/// And so much of a thread's time at the most: an encoder without a moment to spare holds up what comes in bursts.
const MOST: f64 = 0.7;
/// One that is in force, so much: a stretch that packs well keeps any level busy, and the window is worth more than the moments that it takes.
const STAYS: f64 = 0.9;
/// Where so many are free, with what is taken already, each of an encoder's two threads has one. Where fewer are, whoever sends, receives and runs guests beside them waits for it: over
/// 100 Mbit/s an idle guest's move at level 9 took 9.5 s for 8.7 at level 1 where two processors had all of both hosts to do.
/// A tenth of one is what any machine does by itself.
const BOTH: f64 = 1.9;
/// Where less of a core is free than that, half of what is taken is given back.
const CROWDED: f64 = 0.1;
/// What comes so near to the best is as good.
const NEAR: f64 = 0.97;
/// Of memory, up to level 1, what leaves a hundredth fewer bytes is as good as what is faster by so many: both ends handle what is sent, and somebody pays for
/// it. Where guests, codecs and both hosts had two processors between them a move by [`Level::Near`] took an eighth less time than one by level 1, for
/// an eighth more bytes.
const BYTES_COUNT: f64 = 1.5;
/// And by so many where the link is shown to carry less than [`SCARCE`]: it is what is scarce then, and a stream's beginning, which packs well, keeps the encoder busy for a moment.
const BYTES_COUNT_SCARCE: f64 = 3.0;
/// An encoder on a core of its own makes about as much of a guest's memory at level 1.
const SCARCE: BitRate = BitRate(200_000_000);
/// And another level has to be so much better than the one in force: it begins with an empty window.
const BETTER: f64 = 1.15;
/// The windows of those below level 1 are a sixteenth of its, and less: there is not much to be lost with them.
const BETTER_BELOW: f64 = 1.05;
/// As long as little is known of the link a level below the one in force has to be so much faster: it makes more bytes, and begins with an empty window.
const FIND_OUT: f64 = 1.05;
/// What is so near to the best, and takes so little of a core, is kept: another level begins with an empty window.
const KEEP: (f64, f64) = (0.95, 0.1);
/// Where more of the time was spent packing, the link was not what held it up, and may be faster than it looked.
const BUSY: f64 = 0.8;
/// And where no more was, it certainly was: flows that began over 500 and 1000 Mbit/s were packing for half of the time.
const HELD_UP: f64 = 0.35;
/// A link that carries so much more than it did when it was the one that was waited for has become another one.
const ANOTHER: f64 = 1.1;
/// Raw for so many figures on end, level 1 is tried once more: the contents may have changed.
const PROBE: u32 = 16;
/// What a processor digests in a second, in bits, if nobody has measured it: a third of what was measured.
const DIGESTS: BitRate = BitRate(5_000_000_000);

impl Level {
    /// zstd's number for it.
    #[must_use]
    pub const fn number(self) -> i32 {
        match self {
            Self::Raw => -(1 << 17),
            Self::Faster => -20,
            Self::Fast => -5,
            Self::Near | Self::Middle | Self::One => 1,
            Self::Three => 3,
            Self::Six => 6,
            Self::Nine => 9,
        }
    }
}

/// What time it is, and what it was used for.
#[derive(Clone, Copy, Debug, Default)]
pub struct Now {
    /// By any clock that goes on.
    pub at: Duration,
    /// How long processors of the machine have had nothing to do, all together.
    pub idle: Duration,
}

impl Now {
    /// Processors that nobody used since then, in the mean.
    #[must_use]
    pub fn free_since(self, before: Self) -> f64 {
        let time = self.at.saturating_sub(before.at);
        self.idle.saturating_sub(before.idle).as_secs_f64() / time.as_secs_f64().max(0.001)
    }
}

/// What was measured since the last time, with one level.
#[derive(Clone, Copy, Debug)]
pub struct Measured {
    /// Packed: what was given to zstd.
    pub plain: Bytes,
    /// What became of it, and was sent.
    pub packed: Bytes,
    /// How much work it was to pack.
    pub packing: Duration,
    /// What of it was zstd's, where that is known. Where it is a smaller part than a level's work has by itself, the rest was spent on something that any
    /// level leaves as it is: pages that are looked up, and named instead.
    pub zstd: Duration,
    /// How long that took: as long, or less where zstd worked beside the rest.
    pub longest: Duration,
    /// How long all of it took, while there was always something to send.
    pub time: Duration,
    /// Processors of the machine that nobody used meanwhile ([`Now::free_since`]).
    pub free: f64,
}

/// What bursts show of a link, for all that goes over it together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shown {
    /// It carries so much.
    pub link: BitRate,
    /// And no more.
    pub all: bool,
}

/// Chooses levels from one figure to the next.
#[derive(Clone, Debug)]
pub struct Chooser {
    ladder: &'static [Rung],
    /// What sending a byte takes beside level 1's work on one, where no core is free.
    wire: f64,
    /// Whether levels up to level 1 are held against each other by what they leave, too ([`BYTES_COUNT`]).
    weighs: bool,
    /// And for no more over a scarce one ([`BYTES_COUNT_SCARCE`]).
    hurries: bool,
    level: Level,
    /// What level 1 packs in a second of work, in bytes, and which part of them it spares, as far as is known.
    speed: f64,
    spared: f64,
    /// What comes to the work on each of these bytes at any level, in level 1's work on one.
    aside: f64,
    /// How much was done at once of what can be.
    overlap: f64,
    /// Whether these were measured: what comes next is as much like the last figures as like those before.
    learnt: bool,
    /// What the link carries in a second, in bytes, if it was waited for.
    link: Option<f64>,
    /// Whether that was known before, seen where the link was what held the stream up, or seen twice: a flow that only begins looks like a slow link.
    sure: bool,
    /// [`Chooser::shows`].
    shown: Option<Shown>,
    raw_for: u32,
}

impl Chooser {
    /// For a stream of disks' blocks.
    #[must_use]
    pub const fn for_disks() -> Self {
        Self::of(&DISKS, 0.0, false)
    }

    /// For a stream of a guest's memory.
    #[must_use]
    pub const fn for_memory() -> Self {
        Self::of(&MEMORY, WIRE, true)
    }

    const fn of(ladder: &'static [Rung], wire: f64, weighs: bool) -> Self {
        Self {
            ladder,
            wire,
            weighs,
            hurries: false,
            level: Level::One,
            speed: 300e6,
            spared: 0.5,
            aside: 0.0,
            overlap: 0.0,
            learnt: false,
            link: None,
            sure: false,
            shown: None,
            raw_for: 0,
        }
    }

    /// For who wants the shortest time above all: bytes count for no more over a scarce link than over others.
    #[must_use]
    pub const fn hurrying(self) -> Self {
        Self { hurries: true, ..self }
    }

    /// The level that is in force.
    #[must_use]
    pub const fn level(&self) -> Level {
        self.level
    }

    /// What was chosen is not done: that level stays in force.
    pub const fn keep(&mut self, level: Level) {
        self.level = level;
    }

    /// It is known of the link that it carries so much: what is seen of it where packing is what is waited for is less.
    pub fn knows(&mut self, link: BitRate) {
        (self.link, self.sure) = (Some(link.0 as f64 / 8.0), true);
    }

    /// What the next figure's time showed of the link, if something did.
    pub const fn shows(&mut self, shown: Option<Shown>) {
        self.shown = shown;
    }

    /// Whether the link is shown to be what is scarce: bytes count for more then.
    #[must_use]
    pub fn is_scarce(&self) -> bool {
        self.shown.is_some_and(|shown| shown.all && shown.link < SCARCE)
    }

    /// Whether it is shown to be no such link.
    #[must_use]
    pub fn is_ample(&self) -> bool {
        self.shown.is_some_and(|shown| shown.link >= SCARCE)
    }

    /// What the link carries, if it is known, or was seen to hold the stream up.
    #[must_use]
    pub fn link(&self) -> Option<BitRate> {
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a rate that was measured")]
        self.link.filter(|_| self.sure).map(|bytes| BitRate((bytes * 8.0) as u64))
    }

    /// Takes what was measured with that level; the one to go on with.
    pub fn measured(&mut self, measured: &Measured) -> Level {
        let (plain, packed) = (measured.plain.0 as f64, measured.packed.0 as f64);
        let (packing, time) = (measured.packing.as_secs_f64(), measured.time.as_secs_f64());
        if plain < 1.0 || packed < 1.0 || packing <= 0.0 || time <= 0.0 {
            return self.level;
        }
        if let Some(rung) = self.ladder.iter().find(|rung| rung.level == self.level && self.level != Level::Raw) {
            let mean = |before: f64, now: f64| if self.learnt { f64::midpoint(before, now) } else { now };
            let zstd = measured.zstd.as_secs_f64().min(packing);
            // Of one whose work has no parts, or was not measured so, nothing is learnt of them.
            let own = if zstd > 0.0 && rung.zstd > 0.0 { packing.min(zstd / rung.zstd) } else { packing };
            let (spared, speed) = (rung.spared(packed / plain), plain / own / rung.speed);
            let side = zstd.min(packing - zstd);
            let at_once = packing - measured.longest.as_secs_f64();
            let overlap = if side > 0.0 { (at_once / side).clamp(0.0, 1.0) } else { self.overlap };
            (self.spared, self.speed) = (mean(self.spared, spared), mean(self.speed, speed));
            (self.aside, self.overlap) =
                (mean(self.aside, (packing - own) / plain * speed), mean(self.overlap, overlap));
            self.learnt = true;
        }
        let (seen, before, longest) = (packed / time, self.link, measured.longest.as_secs_f64());
        let waited = longest <= BUSY * time;
        self.link = if waited { Some(seen) } else { before.filter(|known| seen <= known * ANOTHER) };
        // A flow that only begins has more of the link from one look to the next. At the lowest levels what is seen twice may be what both ends can take.
        let again = |known: f64| waited && seen <= known * ANOTHER && known <= seen * ANOTHER;
        let held_up = longest <= HELD_UP * time || (self.level >= Level::Near && before.is_some_and(again));
        self.sure = self.link.is_some() && (self.sure || held_up);
        let shown = self.shown.map(|shown| shown.link.0 as f64 / 8.0);
        let guess = match shown {
            Some(shown) if self.is_scarce() => (seen * 2.0).min(shown.max(seen)),
            Some(shown) if self.is_ample() => shown.max(seen * 2.0),
            _ => seen * 2.0,
        };
        let link = self.link.unwrap_or(guess);
        let (free, taken) = (measured.free.max(0.0), packing / time);
        let (may, wire) = if free < CROWDED { (taken / 2.0, self.wire) } else { (taken + OF_FREE * free, 0.0) };
        self.level = self.best(link, may.max(SHARE), free + taken >= BOTH, wire);
        self.raw_for = if self.level == Level::Raw { self.raw_for + 1 } else { 0 };
        if self.raw_for >= PROBE {
            (self.level, self.raw_for) = (Level::One, 0);
        }
        self.level
    }

    /// The level for a link of so many bytes a second; those above 1 may take so many cores, and two at once if there are `two`. Sending a byte
    /// holds up packing by so much (`wire`).
    fn best(&self, link: f64, cores: f64, two: bool, wire: f64) -> Level {
        let (speed, aside, overlap) = (self.speed, self.aside, self.overlap);
        let at_once = if two { overlap } else { 0.0 };
        // Plain bytes a second, and the cores that they take.
        let rate = |rung: &Rung| {
            let rate = rung.rate(link, speed, (aside, overlap), self.spared, wire);
            (rate, rate / speed * rung.work(aside, 0.0).0)
        };
        let may = |rung: &&Rung| {
            let (rate, takes) = rate(rung);
            let most = if rung.level == self.level { STAYS } else { MOST };
            rung.level <= Level::One || (takes <= cores && rate / speed * rung.work(aside, at_once).1 <= most)
        };
        let ladder = || self.ladder.iter().filter(may);
        let most = ladder().map(|rung| rate(rung).0).fold(0.0, f64::max);
        let kept = ladder().find(|rung| rung.level == self.level).map(rate);
        if kept.is_some_and(|(kept, takes)| kept >= KEEP.0 * most && takes <= KEEP.1) {
            return self.level;
        }
        let chosen = ladder().find(|rung| rate(rung).0 >= NEAR * most).map_or(Level::One, |rung| rung.level);
        if !self.weighs || chosen > Level::One {
            return chosen;
        }
        if !self.sure && !self.is_scarce() {
            // Packing less finds out more of the link, where it brings something.
            let stays = self.level <= Level::One && kept.is_some_and(|(kept, _)| kept * FIND_OUT >= most);
            return if stays { self.level } else { chosen };
        }
        let plain = self.ladder.first().map_or(0.0, |raw| rate(raw).0);
        let better = if self.level < Level::One { BETTER_BELOW } else { BETTER };
        let bytes_count = if self.is_scarce() && !self.hurries { BYTES_COUNT_SCARCE } else { BYTES_COUNT };
        let worth = |rung: &Rung| {
            let stays = if rung.level == self.level { better } else { 1.0 };
            stays * rate(rung).0 / rung.left(self.spared).powf(bytes_count)
        };
        let up_to_one = self.ladder.iter().filter(|rung| rung.level <= Level::One && rate(rung).0 >= KEEP.0 * plain);
        up_to_one.max_by(|a, b| worth(a).total_cmp(&worth(b))).map_or(chosen, |rung| rung.level)
    }
}

/// Whether it pays to name blocks over a link of this rate: computing digests must not be what holds it up. `digests`: how much this
/// processor digests in a second, where that was measured. Half of it, because it reads and copies the blocks as well.
#[must_use]
pub fn names_pay(link: BitRate, digests: Option<BitRate>) -> bool {
    link.0 <= digests.unwrap_or(DIGESTS).0 / 2
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A link of so many Mbit/s, contents of which level 1 spares a part, a processor on which it packs so many MB a second: what is
    /// chosen in the end.
    fn settled(mut chooser: Chooser, mbit: f64, spared: f64, speed: f64) -> Level {
        for _ in 0..12 {
            chooser.measured(&figures(&chooser, mbit, spared, speed));
        }
        chooser.level()
    }

    fn figures(chooser: &Chooser, mbit: f64, spared: f64, speed: f64) -> Measured {
        let rung = chooser.ladder.iter().find(|rung| rung.level == chooser.level()).expect("its own");
        let (plain, packed) = (64e6, 64e6 * rung.left(spared));
        let packing = plain / (speed * 1e6 * rung.speed);
        let time = packing.max(packed * 8.0 / (mbit * 1e6));
        Measured {
            plain: Bytes(plain as u64),
            packed: Bytes(packed as u64),
            packing: Duration::from_secs_f64(packing),
            zstd: Duration::from_secs_f64(packing * rung.zstd),
            longest: Duration::from_secs_f64(packing),
            time: Duration::from_secs_f64(time),
            free: 0.0,
        }
    }

    #[test]
    fn a_slow_link_is_worth_a_higher_level_a_fast_one_none_at_all() {
        assert_eq!(settled(Chooser::for_disks(), 20.0, 0.63, 438.0), Level::Six);
        assert_eq!(settled(Chooser::for_disks(), 100.0, 0.63, 438.0), Level::Three);
        assert_eq!(settled(Chooser::for_disks(), 1000.0, 0.63, 438.0), Level::One);
        assert_eq!(settled(Chooser::for_disks(), 10_000.0, 0.63, 438.0), Level::Raw);
        // A machine that is busy with guests, or slow.
        assert_eq!(settled(Chooser::for_disks(), 1000.0, 0.63, 40.0), Level::Raw);
    }

    #[test]
    fn what_a_level_leaves_tells_what_another_one_would() {
        let near = |from, to, share: f64| memory_share(from, to).is_some_and(|a| (a - share).abs() < 0.01);
        // Of recorded streams 0.91 to 0.93, and 0.945 to 0.96.
        assert!([(9, 0.92), (6, 0.953), (1, 1.0)].into_iter().all(|(to, share)| near(1, to, share)));
        assert!(near(9, 6, 0.953 / 0.92) && near(6, 6, 1.0));
        assert!(memory_share(1, -5).is_some_and(|share| (1.2..1.6).contains(&share)), "{:?}", memory_share(1, -5));
        assert_eq!([memory_share(Level::Raw.number(), 1), memory_share(1, 3)], [None, None]);
    }

    #[test]
    fn memory_looks_over_long_distances_where_the_link_gives_the_time_for_it() {
        let first = |mbit| {
            let mut chooser = Chooser::for_memory();
            chooser.measured(&figures(&chooser, mbit, 0.75, 180.0))
        };
        assert_eq!([40.0, 100.0, 200.0].map(first), [Level::Six, Level::One, Level::One]);
        assert_eq!([400.0, 600.0, 1000.0].map(first), [Level::Near; 3]);
    }

    #[test]
    fn memory_goes_raw_over_a_link_that_is_no_bottleneck_where_there_are_processors_to_send_it() {
        let settled = |spared, free| {
            let mut chooser = Chooser::for_memory();
            for _ in 0..8 {
                let figures = figures(&chooser, 10_000.0, spared, 180.0);
                chooser.measured(&Measured { free, ..figures });
            }
            chooser.level()
        };
        assert_eq!(settled(0.75, 1.0), Level::Raw);
        assert!((Level::Faster..=Level::Fast).contains(&settled(0.75, 0.0)), "{:?}", settled(0.75, 0.0));
        // Of contents that hardly shrink there is as much to send at any level.
        assert_eq!(settled(0.1, 0.0), Level::Raw);
    }

    /// What is chosen at the first look, where level 1 packs 200 MB a second.
    fn first(mut chooser: Chooser, mbit: f64, free: f64) -> Level {
        let figures = figures(&chooser, mbit, 0.78, 200.0);
        chooser.measured(&Measured { free, ..figures })
    }

    #[test]
    fn processors_that_nobody_uses_are_used() {
        let links = |free| [10.0, 40.0, 100.0, 200.0, 2000.0].map(|mbit| first(Chooser::for_memory(), mbit, free));
        let none = [Level::Nine, Level::Six, Level::One, Level::One, Level::Near];
        assert_eq!([links(0.0), links(0.3)], [none; 2]);
        let some = [Level::Nine, Level::Nine, Level::Six, Level::One, Level::Near];
        assert_eq!([links(1.0), links(16.0)], [some; 2], "a thread has no more time than there is");
        let disks = |free| first(Chooser::for_disks(), 20.0, free);
        assert_eq!([disks(0.0), disks(1.2), disks(30.0)], [Level::Three, Level::Six, Level::Six]);
    }

    #[test]
    fn where_zstd_works_beside_the_rest_more_of_it_is_had_where_there_are_processors_for_both() {
        let beside = |mbit: f64, free, overlap| {
            let mut chooser = Chooser::for_memory();
            let figures = figures(&chooser, mbit, 0.78, 200.0);
            let one = MEMORY.iter().find(|rung| rung.level == Level::One).expect("it is there");
            let longest = figures.packing.mul_f64(one.work(0.0, overlap).1);
            // What the link takes, or what has to be done one after the other.
            let link = Duration::from_secs_f64(figures.packed.0 as f64 * 8.0 / (mbit * 1e6));
            chooser.measured(&Measured { longest, time: link.max(longest), free, ..figures })
        };
        let mbit = [10.0, 50.0, 100.0, 200.0, 2000.0];
        let links = |free| mbit.map(|mbit| beside(mbit, free, 1.0));
        // No more of them is taken where fewer are free.
        for free in [0.0, 1.3] {
            assert_eq!(links(free), mbit.map(|mbit| first(Chooser::for_memory(), mbit, free)), "{free}");
        }
        assert_eq!(links(2.5), [Level::Nine, Level::Nine, Level::Nine, Level::One, Level::Near]);
        // Where others want the processors, too, one waits for the other.
        assert_eq!(beside(100.0, 2.5, 0.1), Level::Six);
    }

    /// A stream of which a second's work at level 1 is 40 MB where others want the processors, too, and as much again or more is spent beside that; what
    /// is chosen where it is known of the link that it carries 100 Mbit/s, or nothing is.
    fn waited_for(aside: f64, known: bool) -> Level {
        let mut chooser = Chooser::for_memory();
        if known {
            chooser.knows(BitRate::from_mbit(100.0));
        }
        let (plain, own) = (16e6, 16e6 / 40e6);
        let packing = Duration::from_secs_f64(own * (1.0 + aside));
        chooser.measured(&Measured {
            plain: Bytes(plain as u64),
            packed: Bytes((plain * 0.22) as u64),
            packing,
            zstd: Duration::from_secs_f64(own * 0.68),
            longest: packing,
            time: packing.mul_f64(1.05),
            free: 0.3,
        })
    }

    #[test]
    fn where_the_encoder_is_waited_for_a_link_that_is_known_is_not_taken_for_a_faster_one() {
        assert_eq!([waited_for(0.0, false), waited_for(0.0, true)], [Level::Near, Level::Middle]);
    }

    #[test]
    fn where_the_link_is_shown_to_be_what_is_scarce_bytes_count_for_more() {
        // Level 1 packs what has that part to be spared so fast, on a host that others keep busy, and is what is waited for.
        let chosen = |spared, speed, shown: Option<u64>| {
            let mut chooser = Chooser::for_memory();
            chooser.shows(shown.map(|mbit| Shown { link: BitRate(mbit * 1_000_000), all: true }));
            let figures = figures(&chooser, 1000.0, spared, speed);
            chooser.measured(&figures)
        };
        // A guest's first pages, which pack to a seventh, and others to a quarter: 8.4 and 8.1 MB/s of packed bytes.
        for (spared, speed) in [(0.86, 60.0), (0.75, 32.5)] {
            let levels = [None, Some(1000), Some(100), Some(50)].map(|shown| chosen(spared, speed, shown));
            assert!(levels[..2].iter().all(|level| *level < Level::One), "{levels:?}");
            assert_eq!(levels[2..], [Level::One; 2]);
        }
        // Where it makes a third of what the link carries, what is faster is better all the same.
        assert!(chosen(0.75, 16.0, Some(100)) < Level::One);
    }

    #[test]
    fn time_that_any_level_takes_is_no_reason_for_another_one() {
        // Most of it went into pages that were looked up, and named.
        assert_eq!([waited_for(0.0, true), waited_for(2.0, true)], [Level::Middle, Level::One]);
    }

    #[test]
    fn of_levels_that_are_as_fast_the_one_that_leaves_less_is_kept() {
        let mut chooser = Chooser::for_memory();
        // Enough for level 1, and one below it would be within 3 %.
        let mut look = || {
            let figures = figures(&chooser, 150.0, 0.75, 180.0);
            chooser.measured(&figures)
        };
        assert_eq!([look(), look()], [Level::One; 2]);
    }

    #[test]
    fn a_level_is_not_left_for_what_is_as_fast_and_leaves_more_before_the_link_is_known() {
        // A database's first look over 100 Mbit/s: it packed badly, and for half of the time.
        let looks = |mbit, spared, speed| {
            let mut chooser = Chooser::for_memory();
            let level = chooser.measured(&figures(&chooser, mbit, spared, speed));
            assert_eq!(chooser.link(), None, "nothing is known yet");
            level
        };
        assert_eq!(looks(95.0, 0.63, 70.0), Level::One);
        assert!(looks(95.0, 0.63, 20.0) < Level::One, "one that is slower is left");
    }

    #[test]
    fn a_link_that_is_seen_twice_is_known_and_one_that_is_found_faster_is_not() {
        let sees = |mbit: [f64; 2]| {
            let mut chooser = Chooser::for_memory();
            for mbit in mbit {
                // Half of the time goes into packing.
                let figures = figures(&chooser, mbit, 0.63, 0.6 * mbit);
                chooser.measured(&figures);
                assert_eq!(chooser.level(), Level::One);
            }
            chooser.link().map(|link| link.0.div_ceil(1_000_000))
        };
        assert_eq!([sees([95.0, 100.0]), sees([60.0, 100.0]), sees([100.0, 60.0])], [Some(100), None, None]);
    }

    #[test]
    fn a_link_that_a_level_with_a_short_window_sees_twice_is_known_and_worth_the_long_one() {
        let sees = |level, speed| {
            let mut chooser = Chooser::for_memory();
            let chosen = [(); 2].map(|()| {
                chooser.keep(level);
                let figures = figures(&chooser, 110.0, 0.8, speed);
                chooser.measured(&figures)
            });
            (chooser.link().is_some(), chosen[1])
        };
        assert_eq!([Level::Near, Level::Middle].map(|level| sees(level, 70.0)), [(true, Level::One); 2]);
        // Of the lowest ones that may be what both ends can take.
        assert!(!sees(Level::Fast, 30.0).0);
    }

    #[test]
    fn a_processor_is_given_back_where_others_want_it() {
        let mut chooser = Chooser::for_memory();
        let mut look = |free| {
            let figures = figures(&chooser, 100.0, 0.78, 200.0);
            chooser.measured(&Measured { free, ..figures })
        };
        assert_eq!([look(1.0), look(0.5), look(0.0), look(0.0)], [Level::Six, Level::Six, Level::One, Level::One]);
    }

    #[test]
    fn a_level_in_force_stays_where_it_would_not_be_begun() {
        let mut chooser = Chooser::for_memory();
        let mut look = |spared| {
            let figures = figures(&chooser, 50.0, spared, 110.0);
            chooser.measured(&Measured { free: 1.0, ..figures })
        };
        assert_eq!([0.7, 0.78, 0.9].map(&mut look), [Level::Nine, Level::Nine, Level::Six]);
        let mut anew = Chooser::for_memory();
        let figures = figures(&anew, 50.0, 0.78, 110.0);
        assert_eq!(anew.measured(&Measured { free: 1.0, ..figures }), Level::Six);
    }

    #[test]
    fn a_level_that_takes_its_time_is_no_sign_of_a_faster_link() {
        let mut chooser = Chooser::for_memory();
        let mut look = |mbit, spared| {
            let figures = figures(&chooser, mbit, spared, 110.0);
            chooser.measured(&Measured { free: 1.0, ..figures })
        };
        // What comes then packs well, and keeps the encoder busy.
        let levels = [look(50.0, 0.71), look(50.0, 0.93), look(50.0, 0.71)];
        assert_eq!(levels, [Level::Nine, Level::Six, Level::Six]);
        // A link that is faster is one all the same.
        assert!((0..4).any(|_| look(1000.0, 0.75) < Level::One));
    }

    #[test]
    fn what_was_spared_is_read_off_what_any_level_left() {
        for rung in MEMORY.iter().chain(&DISKS) {
            for spared in [0.0, 0.1, 0.5, 0.8] {
                let found = rung.spared(rung.left(spared));
                assert!((found - spared).abs() < 1e-9, "{rung:?}: {found} for {spared}");
            }
        }
        assert_eq!(MEMORY[7].spared(1.2), 0.0);
    }

    #[test]
    fn what_does_not_compress_goes_as_it_is_where_anything_else_would_cost() {
        for mbit in [2000.0, 10_000.0, 100_000.0] {
            assert_eq!(settled(Chooser::for_disks(), mbit, 0.0, 1500.0), Level::Raw, "{mbit}");
        }
        assert_eq!(settled(Chooser::for_disks(), 100.0, 0.0, 1500.0), Level::One, "a hundredth of a core");
    }

    #[test]
    fn contents_that_compress_again_are_noticed() {
        let mut chooser = Chooser::for_disks();
        for _ in 0..3 {
            chooser.measured(&figures(&chooser, 5000.0, 0.0, 1500.0));
        }
        assert_eq!(chooser.level(), Level::Raw);
        let mut after = 0;
        while chooser.level() != Level::Three {
            chooser.measured(&figures(&chooser, 100.0, 0.63, 438.0));
            after += 1;
            assert!(after <= PROBE + 2, "{chooser:?}");
        }
    }

    #[test]
    fn names_are_left_out_where_the_link_is_as_fast_as_digests() {
        assert!(names_pay(BitRate::from_mbit(1000.0), None));
        assert!(!names_pay(BitRate::from_mbit(10_000.0), None));
        assert!(names_pay(BitRate::from_mbit(10_000.0), Some(BitRate::from_mbit(40_000.0))));
    }

    proptest! {
        #[test]
        fn by_the_figures_nothing_that_is_chosen_is_slower_than_plain(
            link in 1e5f64..1e10, speed in 1e6f64..1e10, spared in 0.0f64..1.0, cores in SHARE..2.0,
            now in 0usize..9, memory in any::<bool>(), overlap in 0.0f64..1.0, two in any::<bool>(),
            wire in 0.0f64..1.0, aside in 0.0f64..10.0,
        ) {
            let mut chooser = if memory { Chooser::for_memory() } else { Chooser::for_disks() };
            let ladder = chooser.ladder;
            (chooser.level, chooser.speed, chooser.spared) = (ladder[now % ladder.len()].level, speed, spared);
            (chooser.aside, chooser.overlap) = (aside, overlap);
            let chosen = chooser.best(link, cores, two, wire);
            let rung = ladder.iter().find(|rung| rung.level == chosen).expect("one of its own");
            let of = |rung: &Rung| rung.rate(link, speed, (aside, overlap), spared, wire);
            let (rate, plain) = (of(rung), of(&ladder[0]));
            prop_assert!(rate >= KEEP.0 * plain, "{rate} < {plain}");
            let takes = rate / speed * rung.work(aside, 0.0).0;
            prop_assert!(chosen <= Level::One || takes <= cores, "{chosen:?} takes {takes} of {cores} cores");
            let busy = rate / speed * rung.work(aside, if two { overlap } else { 0.0 }).1;
            let most = if chosen == ladder[now % ladder.len()].level { STAYS } else { MOST };
            prop_assert!(chosen <= Level::One || busy <= most, "{chosen:?} takes {busy} of a thread");
        }

        #[test]
        fn any_figures_are_taken(
            plain in any::<u64>(), packed in any::<u64>(), times in any::<[u64; 4]>(), free in any::<f64>(),
            memory in any::<bool>(),
        ) {
            let mut chooser = if memory { Chooser::for_memory() } else { Chooser::for_disks() };
            let [packing, zstd, longest, time] = times.map(Duration::from_nanos);
            for _ in 0..3 {
                chooser.measured(&Measured { plain: Bytes(plain), packed: Bytes(packed), packing, zstd, longest, time, free });
            }
        }
    }
}
