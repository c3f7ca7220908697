//! A whole move, disks and overheads included, as an interval: what it will take, at the least, likely, and at the most.
//!
//! Three moves are simulated: a *likely* one, a *kind* one in which the link is as fast as it ever was and the guest as quiet, and an
//! *unkind* one. That is how far what is known of link and guest may be off. How far the *model* is off is taken from past moves
//! ([`Calibration`]): their measured times over what had been predicted, a ratio each. The interval holds both.
//!
//! What is not known is assumed, and the assumption is wide: [`Road::assumed`], [`Calibration::default`].
//!
//! # While a move runs
//!
//! Guests are seen to dirty more while they are moved than before (two to three times was reported), and links change. [`Going`] is a move
//! under way: what its rounds have shown outweighs what had been thought.
//!
//! # What can go wrong
//!
//! *Past moves were of another kind*: of idle guests, say, or over a link that is busy today. The newest ones count, [`RECENT`] of
//! them, and a bias is only believed whole from [`ENOUGH`] on. *A guest writes to its disk faster than the link carries*: no mirror ever
//! catches up, and [`Foretold::never`] says so; there is no number for it.

use crate::amount::{PAGE, PageRate, Pages};
use crate::avg::Evenly;
use crate::rules::Rules;
use crate::simulate::{Cost, Link, NeverEnds, Prediction, Unending, Wire, simulate_on};
use godwit_units::{BitRate, Bytes, Policy, Span};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Past moves that count.
pub const RECENT: usize = 20;
/// Past moves from which on a bias is believed, and not chance.
pub const ENOUGH: usize = 4;
/// A guest that writes to its disks at more than this share of the link is never caught up with.
const MIRRORED_SHARE: f64 = 0.9;
/// So many moves' worth is the guess of the noise.
const THOUGHT: f64 = 3.0;
/// Standard deviations that nine of ten are within.
const NINE_OF_TEN: f64 = 1.645;
/// How far past moves may correct a prediction: more is another guest or another link, not a bias.
const MOST_BIAS: f64 = 3.0;

/// The way between two hosts, as moves get it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Road {
    /// What a move gets of the link, bits a second.
    pub goodput: Span,
    /// There and back.
    pub rtt: Duration,
    /// What a move takes besides its bytes while the guest runs, in seconds.
    pub before: Span,
    /// What it takes besides while the guest stands, in seconds.
    pub pause: Span,
}

impl Road {
    /// What is assumed of a move's overheads where nobody has measured them. While the guest runs: a look at what it writes, a QEMU to be
    /// started, three durable records, and five or six questions to the other host. In the pause: the devices' state, a durable record
    /// at each end, and two questions; the likely values are those of idle guests in the lab.
    #[must_use]
    pub fn assumed(rtt: Duration) -> (Span, Span) {
        let trips = rtt.as_secs_f64();
        let before = Span { lower: 0.3 + 2.0 * trips, likely: 0.5 + 6.0 * trips, upper: 4.0 + 12.0 * trips };
        let pause = Span { lower: 0.015 + 1.5 * trips, likely: 0.03 + 2.0 * trips, upper: 0.6 + 6.0 * trips };
        (before, pause)
    }
}

/// The least that a node lets be on its way: what is acknowledged at once; and the most: what a peer takes unread, and 1 Gbit/s times 180 ms.
const WINDOWS: (u64, u64) = (64 << 10, 24 << 20);
/// What it lets be on its way beside the bytes of a round trip, so that a sender that comes late leaves no gap.
const SPARE: Duration = Duration::from_millis(30);

/// How long the link is busy with what is on its way: a round trip and a quarter, and some spare time.
#[must_use]
pub fn ahead(rtt: Duration) -> Duration {
    rtt.mul_f64(1.25) + SPARE
}

/// How many bytes of a guest's memory a node lets be on their way: those of [`ahead`]. Nodes go by this when they move, and predictions when
/// they foretell it.
#[must_use]
pub fn under_way(bytes_per_s: f64, rtt: Duration) -> Bytes {
    let bytes = bytes_per_s * ahead(rtt).as_secs_f64();
    Bytes((bytes as u64).clamp(WINDOWS.0, WINDOWS.1))
}

/// Whether the last rounds go with little on their way: after one that took so long, what the guest has dirtied in it takes `rest` to send. A guest
/// that dirties more than half of what the link carries would dirty as much as arrives while it is waited for; so little that it is chance does not count.
#[must_use]
pub fn is_worth_settling(took: Duration, rest: Duration, rtt: Duration) -> bool {
    rest <= ahead(rtt) && rest <= took.mul_f64(QUIET).max(LITTLE)
}

/// The part of what the link carries that a guest which is waited for may dirty.
const QUIET: f64 = 0.5;
/// So little is chance.
const LITTLE: Duration = Duration::from_millis(10);
/// How long what is on its way in the last rounds waits for the link: they have little to send.
pub const SETTLED: Duration = Duration::from_millis(5);
/// The least of it: less is many small messages.
const LEAST_SETTLED: u64 = 16 << 10;

/// How many bytes a node lets be on their way in the last rounds: those of a round trip, which are on the wire or acknowledged, and next to
/// nothing that waits for the link. That is what a guest's last pages would have to wait for when it stops.
#[must_use]
pub fn settled(bytes_per_s: f64, rtt: Duration) -> Bytes {
    let bytes = bytes_per_s * (rtt + SETTLED).as_secs_f64();
    Bytes((bytes as u64).clamp(LEAST_SETTLED, WINDOWS.1))
}

/// For how long the last pages of a guest that stops wait for those that were sent before them. `rest`: what they take themselves. Where that is
/// little, little is on its way either: a guest is stopped only then.
#[must_use]
pub fn queue(bytes_per_s: f64, rtt: Duration, rest: Duration) -> Duration {
    let rate = bytes_per_s.max(1.0);
    let takes = |bytes: Bytes| Duration::from_secs_f64(bytes.0 as f64 / rate);
    if rest > ahead(rtt) { takes(under_way(rate, rtt)) } else { SETTLED.max(takes(Bytes(LEAST_SETTLED))) }
}

/// What of the disks has to travel.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Disks {
    /// What the destination does not have of them, in bytes on the wire.
    pub missing: Span,
    /// What the guest writes, bytes a second.
    pub written: Span,
    /// What a copy of them was seen to reach, bits a second, where that is known: reading and writing blocks may be slower than the link.
    pub speed: Option<f64>,
    /// Whether they lie on storage that both hosts reach.
    pub shared: bool,
}

/// How a VM comes there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Way {
    /// Its disks before it, mirrored until it stops.
    Mirror,
    /// The same once a pre-cache has caught up: its work is not part of the move.
    Precache,
    /// Its disks after it.
    Postcopy,
    /// Its disks not at all.
    Shared,
    /// Shut down, and booted there.
    Cold,
}

impl Way {
    /// All, those that disturb least first.
    pub const ALL: [Self; 5] = [Self::Shared, Self::Precache, Self::Mirror, Self::Postcopy, Self::Cold];

    /// What it is called.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Mirror => "mirror",
            Self::Precache => "precache",
            Self::Postcopy => "postcopy",
            Self::Shared => "shared",
            Self::Cold => "cold",
        }
    }
}

/// A move, foretold.
#[derive(Clone, Debug, PartialEq)]
pub struct Foretold {
    /// How.
    pub way: Way,
    /// From the order to the guest's running there, seconds: what a deadline is held against. Blocks that follow it are not in it.
    pub total_s: Span,
    /// While the guest stands, milliseconds.
    pub downtime_ms: Span,
    /// On the wire.
    pub bytes: Span,
    /// For how long the guest's reads or writes wait longer than they did, seconds.
    pub slowed_s: Span,
    /// How much longer each waits, milliseconds.
    pub slowed_by_ms: f64,
    /// Why it never ends, if it does not: the figures are of no use then.
    pub never: Option<String>,
    /// Whether that is because it would be given up: it ends, with the guest where it was.
    pub given_up: bool,
    /// The likely move of the memory.
    pub memory: Option<Prediction>,
}

/// The moves of the memory alone: at a rate, by a guest that is so many times as fast as it was seen to be; and how much the whole move takes
/// besides, which a deadline of the whole move leaves less for its memory ([`Policy::sooner`]).
pub type Memory<'a> = dyn Fn(BitRate, f64, Duration) -> Result<Prediction, NeverEnds> + 'a;

/// How many times as fast as it was seen the guest may be while it is moved.
pub const AS_SEEN: Span = Span { lower: 0.85, likely: 1.0, upper: 1.4 };
/// The same of a guest that nobody has watched.
pub const UNSEEN: Span = Span { lower: 0.2, likely: 1.0, upper: 4.0 };

struct Outcome {
    total: f64,
    downtime: f64,
    bytes: f64,
    slowed: f64,
    memory: Prediction,
}

/// One of the three moves.
struct Case {
    goodput: f64,
    faster: f64,
    before: f64,
    pause: f64,
    missing: f64,
    written: f64,
    speed: f64,
}

impl Case {
    /// Else why it never ends, and whether it is given up.
    fn outcome(&self, way: Way, road: &Road, memory: &Memory<'_>) -> Result<Outcome, (String, bool)> {
        let rate = |bits: f64| BitRate(bits.max(1.0) as u64);
        let copied = match way {
            Way::Mirror => self.missing,
            // What the last epoch brought.
            Way::Precache => self.missing.min(self.written * 10.0),
            Way::Postcopy | Way::Shared | Way::Cold => 0.0,
        };
        let mirrors = matches!(way, Way::Mirror | Way::Precache);
        let writes = if mirrors { self.written * 8.0 } else { 0.0 };
        if writes > self.goodput * MIRRORED_SHARE {
            let why = format!(
                "the guest writes {}/s to its disks, and the link carries {}: no mirror catches up",
                Bytes(self.written as u64),
                rate(self.goodput)
            );
            return Err((why, false));
        }
        let left_over = self.goodput - writes;
        let copying = copied * 8.0 / left_over.min(self.speed);
        let besides = Duration::try_from_secs_f64(self.before + copying + self.pause).unwrap_or(Duration::MAX);
        let moved = memory(rate(left_over), self.faster, besides)
            .map_err(|why| (why.to_string(), why.how == Unending::GivenUp))?;
        // What was handed to the link before the last pages: the copy's time has it, and the pause has it too.
        let rest = Duration::from_secs_f64((moved.downtime_ms / 1e3).clamp(0.0, 1e9));
        let all = moved.bytes as f64 * 8.0 / self.goodput;
        let queued = queue(self.goodput / 8.0, road.rtt, rest).as_secs_f64().min(all);
        // Moves of memory alone have no overheads of their own.
        let downtime = moved.downtime_ms / 1e3 + queued + self.pause;
        let total = self.before + copying + moved.total_s.max(queued) + self.pause;
        let mirrored = self.written * (copying + moved.total_s);
        let (slowed, later) = match way {
            // The guest's writes wait for the other site only where they are more than the link carries.
            Way::Mirror | Way::Precache => (0.0, mirrored),
            // Fetched while others' blocks are written.
            Way::Postcopy => (self.missing * 8.0 / self.goodput, self.missing),
            Way::Cold => (self.missing * 8.0 / self.goodput, self.missing),
            Way::Shared => (0.0, 0.0),
        };
        let bytes = moved.bytes as f64 + copied + later;
        Ok(Outcome { total, downtime, bytes, slowed, memory: moved })
    }
}

/// What a cold move takes beside its blocks: to shut down and to boot, where nobody has measured it. Seconds.
pub const BOOT: Span = Span { lower: 5.0, likely: 40.0, upper: 180.0 };

/// Foretells a move. `faster`: [`AS_SEEN`], or how far the guest may be off from what `memory` does.
#[must_use]
pub fn foretell(
    way: Way,
    road: &Road,
    disks: &Disks,
    faster: Span,
    memory: &Memory<'_>,
    past: &Calibration,
) -> Foretold {
    let case = |of: fn(&Span) -> f64, against: fn(&Span) -> f64| Case {
        goodput: against(&road.goodput),
        faster: of(&faster),
        before: of(&road.before),
        pause: of(&road.pause),
        missing: of(&disks.missing),
        written: of(&disks.written),
        speed: disks.speed.unwrap_or(f64::INFINITY).max(1.0),
    };
    type End = fn(&Span) -> f64;
    let (lower, likely, upper): (End, End, End) = (|s| s.lower, |s| s.likely, |s| s.upper);
    let slowed_by_ms = match way {
        Way::Shared | Way::Mirror | Way::Precache => 0.0,
        Way::Postcopy | Way::Cold => road.rtt.as_secs_f64() * 1e3 + PAGE.0 as f64 * 8e3 / road.goodput.likely.max(1.0),
    };
    if way == Way::Cold {
        return cold(road, disks, slowed_by_ms);
    }
    let nothing = |(why, given_up)| Foretold {
        way,
        total_s: Span::default(),
        downtime_ms: Span::default(),
        bytes: Span::default(),
        slowed_s: Span::default(),
        slowed_by_ms,
        never: Some(why),
        given_up,
        memory: None,
    };
    let likely = match case(likely, likely).outcome(way, road, memory) {
        Ok(outcome) => outcome,
        Err(why) => return nothing(why),
    };
    let kind = case(lower, upper).outcome(way, road, memory);
    let unkind = case(upper, lower).outcome(way, road, memory);
    let span = |of: fn(&Outcome) -> f64| {
        let middle = of(&likely);
        // Where the unkind one never ends: as bad as anything that ends.
        let ends = |outcome: &Result<Outcome, _>, else_: f64| outcome.as_ref().map_or(else_, of);
        let (a, b) = (ends(&kind, middle), ends(&unkind, middle * 3.0));
        Span::holding(middle, a.min(b), a.max(b))
    };
    Foretold {
        way,
        total_s: past.total.apply(span(|o| o.total)),
        downtime_ms: past.downtime.apply(span(|o| o.downtime * 1e3)),
        bytes: past.bytes.apply(span(|o| o.bytes)),
        slowed_s: span(|o| o.slowed),
        slowed_by_ms,
        never: None,
        given_up: false,
        memory: Some(likely.memory),
    }
}

fn cold(road: &Road, disks: &Disks, slowed_by_ms: f64) -> Foretold {
    let total = Span::of([0, 1, 2].map(|i| {
        let of = |s: &Span| [s.lower, s.likely, s.upper][i];
        of(&BOOT) + of(&road.before)
    }));
    let fill = |of: f64, goodput: f64| of * 8.0 / goodput.max(1.0);
    let (missing, goodput) = (disks.missing, road.goodput);
    Foretold {
        way: Way::Cold,
        total_s: total,
        downtime_ms: Span { lower: total.lower * 1e3, likely: total.likely * 1e3, upper: total.upper * 1e3 },
        bytes: missing,
        slowed_s: Span::of([
            fill(missing.lower, goodput.upper),
            fill(missing.likely, goodput.likely),
            fill(missing.upper, goodput.lower),
        ]),
        slowed_by_ms,
        never: None,
        given_up: false,
        memory: None,
    }
}

/// What moves may take over what was predicted, where none has been measured: a quarter less, or half as much again.
pub const UNPROVED: Span = Span { lower: 0.75, likely: 1.0, upper: 1.5 };

/// How far off a model is thought to be before moves have shown it, as standard deviations of the ratios' logarithms. What moves say counts as
/// soon as there are any.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Doubt {
    /// Always the same way.
    pub bias: f64,
    /// From one move to the next.
    pub noise: f64,
}

/// What past moves say of the model: what was measured over what had been predicted.
#[derive(Clone, Debug, PartialEq)]
pub struct Calibration {
    /// Of the time.
    pub total: Ratios,
    /// Of the downtime.
    pub downtime: Ratios,
    /// Of the bytes.
    pub bytes: Ratios,
}

impl Calibration {
    /// Of predictions for hosts between which moves were made, if `informed`; else of those that assume what such moves take. Pauses differ from
    /// one move to the next more than times do. The doubt in informed times is what such moves in the lab were off by, 0.035 in all, and
    /// somewhat more.
    #[must_use]
    pub fn new(informed: bool) -> Self {
        let (total, downtime) = if informed { (0.04, 0.1) } else { (0.2, 0.3) };
        let of = |bias, noise| Ratios::new(Doubt { bias, noise });
        Self { total: of(total, 0.04), downtime: of(downtime, 0.3), bytes: of(total, 0.04) }
    }
}

impl Default for Calibration {
    /// Of those that assume.
    fn default() -> Self {
        Self::new(false)
    }
}

/// Measured over predicted, the newest last. Those that make no sense are left out.
#[derive(Clone, Debug, PartialEq)]
pub struct Ratios {
    seen: Vec<f64>,
    doubt: Doubt,
}

impl Ratios {
    /// None yet.
    #[must_use]
    pub const fn new(doubt: Doubt) -> Self {
        Self { seen: vec![], doubt }
    }

    /// A move that has ended.
    pub fn add(&mut self, predicted: f64, measured: f64) {
        let ratio = measured / predicted;
        if ratio.is_finite() && ratio > 0.0 && predicted > 0.0 {
            self.seen.push(ratio);
            if self.seen.len() > RECENT {
                self.seen.remove(0);
            }
        }
    }

    /// How many there are.
    #[must_use]
    pub fn count(&self) -> usize {
        self.seen.len()
    }

    /// What a move takes over what is predicted: likely the bias, and around it what nine moves of ten are within.
    ///
    /// Before moves are seen the model is thought to be as far off as [`Doubt`] says. One move says more of the bias than that guess does,
    /// though not all; from [`ENOUGH`] on what they say is believed as it is.
    #[must_use]
    pub fn error(&self) -> Span {
        let Doubt { bias, noise } = self.doubt;
        let seen = Span::measured(&self.seen);
        let (count, middle) = (self.seen.len() as f64, seen.map_or(0.0, |span| span.likely.ln()));
        let squares: f64 = self.seen.iter().map(|ratio| (ratio.ln() - middle).clamp(-1.0, 1.0).powi(2)).sum();
        let variance = (THOUGHT * noise.powi(2) + squares) / (THOUGHT + (count - 1.0).max(0.0));
        let of_bias = 1.0 / (bias.powi(-2) + count / variance);
        let trust = if self.seen.len() >= ENOUGH { 1.0 } else { of_bias * count / variance };
        let likely = (middle * trust).exp().clamp(1.0 / MOST_BIAS, MOST_BIAS);
        let reach = (NINE_OF_TEN * (variance + of_bias).sqrt()).exp();
        Span { lower: likely / reach, likely, upper: likely * reach }
    }

    /// What past moves make of a prediction: its bias taken away, and as wide as they were off and as link and guest may be.
    #[must_use]
    pub fn apply(&self, span: Span) -> Span {
        let error = self.error();
        let likely = span.likely * error.likely;
        let (least, most) = (span.likely * error.lower, span.likely * error.upper);
        // What the three moves say of link and guest counts half of its way: their extremes at once are rare. And it has nothing to do with what
        // the model is off by, so the two add up by their squares.
        let towards = |end: f64| (end - span.likely).abs() * error.likely * 0.5;
        let less = (likely - least).hypot(towards(span.lower));
        let more = (most - likely).hypot(towards(span.upper));
        Span::holding(likely, (likely - less).max(0.0), likely + more)
    }
}

/// What is best for a policy, and why; the place of it. None where nothing of this can be done, or ends.
#[must_use]
pub fn recommend(choices: &[Foretold], can: impl Fn(Way) -> bool, policy: Policy) -> Option<(usize, String)> {
    let open = || choices.iter().enumerate().filter(|(_, c)| c.never.is_none() && can(c.way));
    let least = |of: &dyn Fn(&Foretold) -> f64, among: &dyn Fn(&Foretold) -> bool| {
        open().filter(|(_, c)| among(c)).min_by(|a, b| of(a.1).total_cmp(&of(b.1))).map(|(i, _)| i)
    };
    let any = |_: &Foretold| true;
    // A few milliseconds are no reason to take much longer: what is as good is told apart by the rest.
    // A guest whose reads wait for another site suffers more than one that is moved later, and depends on two sites meanwhile: that is
    // not worth a few hundredths of the time.
    let disturbed = |c: &Foretold| match c.way {
        Way::Postcopy => c.slowed_s.likely * 10.0 + c.total_s.likely * 0.05 + 0.5,
        _ => c.slowed_s.likely,
    };
    let downtime = |c: &Foretold| (c.downtime_ms.likely / 20.0).round() * 1e6 + c.total_s.likely + disturbed(c);
    let total = |c: &Foretold| c.total_s.likely;
    let (best, why) = match policy {
        Policy::LeastDowntime => (least(&downtime, &any)?, "the guest stands for the shortest time".to_owned()),
        Policy::LeastTotal => (least(&total, &any)?, "the guest runs there soonest".to_owned()),
        Policy::LeastBytes => (least(&|c| c.bytes.likely, &any)?, "the least crosses the link".to_owned()),
        Policy::MaxDowntime(most) => {
            let most = most.as_secs_f64() * 1e3;
            match least(&total, &|c| c.downtime_ms.upper <= most) {
                Some(i) => (i, format!("it is the soonest that keeps the guest's pause within {most:.0} ms")),
                None => (
                    least(&downtime, &any)?,
                    format!("none surely keeps to a pause of {most:.0} ms; this one comes nearest"),
                ),
            }
        }
        Policy::Deadline(by) => {
            let by = by.as_secs_f64();
            match least(&downtime, &|c| c.total_s.upper <= by) {
                Some(i) => (
                    i,
                    format!("of those that are surely done within {by:.0} s the guest stands for the shortest time"),
                ),
                None => (least(&total, &any)?, format!("none is surely done within {by:.0} s; this one is soonest")),
            }
        }
    };
    Some((best, why))
}

/// How long bytes take over a link that other moves share equally as long as they have some left: `others`, in bytes.
#[must_use]
pub fn share(goodput: BitRate, mine: f64, others: &[f64]) -> f64 {
    let mut left: Vec<f64> = others.iter().copied().filter(|left| *left > 0.0).collect();
    left.sort_by(|a, b| b.total_cmp(a));
    let bytes_per_s = goodput.0 as f64 / 8.0;
    let (mut mine, mut gone, mut time) = (mine.max(0.0), 0.0, 0.0);
    // Each other in turn is the next to end.
    while let Some(next) = left.pop() {
        let (step, sharers) = (next - gone, left.len() as f64 + 2.0);
        if mine <= step {
            return time + mine * sharers / bytes_per_s;
        }
        time += step * sharers / bytes_per_s;
        (mine, gone) = (mine - step, next);
    }
    time + mine / bytes_per_s
}

/// A round that was made.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Made {
    /// Pages that it sent.
    pub sent: u64,
    /// Pages dirtied meanwhile.
    pub dirtied: u64,
    /// What it brought onto the wire.
    pub wire: Bytes,
    /// How long it took.
    pub seconds: f64,
}

/// A move whose memory is under way.
#[derive(Clone, Debug, PartialEq)]
pub struct Going {
    /// The guest's memory.
    pub memory: Pages,
    /// What it writes to, as far as is known.
    pub working_set: Pages,
    /// Pages that it dirtied in a second before the move.
    pub before: PageRate,
    /// What is still to be sent in this round.
    pub left: Pages,
    /// The rounds that have ended.
    pub rounds: Vec<Made>,
    /// What was thought of the codec.
    pub wire: Wire,
    /// What the link carries now.
    pub goodput: BitRate,
}

impl Going {
    /// The rate at which the guest dirties pages as far as its rounds show it: a page that is dirtied twice in a round counts once there.
    #[must_use]
    pub fn rate(&self) -> PageRate {
        let (size, last) = (self.working_set.0.max(1) as f64, self.rounds.iter().rev().take(3));
        let rates: Vec<f64> = last
            .filter(|round| round.seconds > 0.05)
            .map(|round| {
                let share = (round.dirtied as f64 / size).min(0.98);
                -size / round.seconds * (-share).ln_1p()
            })
            .collect();
        match Span::measured(&rates) {
            // One round alone may be chance.
            Some(seen) if rates.len() > 1 => PageRate::new(seen.likely),
            Some(seen) => PageRate::new(seen.likely.max(self.before.per_second())),
            None => self.before,
        }
    }

    /// How the rest of it will go: of the memory alone, the pause included.
    ///
    /// # Errors
    /// It never ends at this rate.
    pub fn rest(&self, rules: &Rules) -> Result<Prediction, NeverEnds> {
        let again = self.rounds.iter().skip(1).filter(|round| round.sent >= 64);
        let (pages, bytes) = again.fold((0, 0), |(p, b), round| (p + round.sent, b + round.wire.0));
        let again =
            if pages > 0 { Cost { bytes: bytes as f64 / pages as f64, ..self.wire.again } } else { self.wire.again };
        let first = if self.rounds.is_empty() { self.wire.first } else { again };
        let working_set = self.rounds.iter().map(|r| r.dirtied).fold(self.working_set.0, u64::max);
        let mut guest = Evenly::new(self.memory, Pages(working_set), self.rate()).under_way(self.left);
        let link = Link { rate: self.goodput, overheads: crate::amount::Overheads::default() };
        // What was measured has pages that were there already among the others.
        let same = if pages > 0 { again } else { self.wire.same };
        simulate_on(&mut guest, link, &Wire { first, again, same }, rules)
    }
}
