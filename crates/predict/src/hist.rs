//! The model HIST (section IV-B of the paper): a guest that dirties the pages that it was seen to dirty before.
//!
//! A log says which pages were dirtied within an interval, not when, nor how often: they are spread over it in sixteen parts. Neighbouring
//! words of the bitmap come at different times, so that every batch of 1,024 pages, sixteen words, sees the same share of what has
//! been dirtied so far.
//!
//! A guest that writes the same pages again and again dirties most of them early in an interval, and dirties them again after a round has
//! ended within it; one that goes through its memory page by page does neither. The two are told apart by how many of an interval's pages
//! the next one has, too (`Timeline::hot`): of pages that are chosen at random from a set that is the share of the set that an interval has,
//! and the share that any part of the interval has follows from it (`early`).
//!
//! # Speed
//!
//! A [`Timeline`] keeps what it has unpacked, for the next simulation of the same log, and unions of 4, 16, 64, ... intervals. A
//! round that lasts for hundreds of intervals is simulated by such unions, at least 16 of them a round, each spread over its time as
//! an interval is; what is dirty at the *end* of a round is exact to the sixteenth of an interval all the same.
//!
//! # What it cannot know
//!
//! How often a page is written within an interval. What is said above is right for pages that are written at random and for those that are
//! written in turn; pages that are written once in each interval, and the same ones in each, are taken to be written more often. Where a
//! move outlasts the log, the log begins again, or, where the guest works by turns, its last turns do: [`Replayed::repeats`].

use crate::amount::Pages;
use crate::guest::{Batch, Bitmaps, Cleaned, Guest};
use crate::log::{Log, Taken};
use crate::turns;
use std::cell::RefCell;
use std::cmp::Ordering;
use std::collections::HashMap;
use std::rc::Rc;
use std::time::Duration;

/// Parts of an interval. A power of two, so that strides by any odd number visit each.
const PARTS: u64 = 16;
/// Blocks of the next level in one.
const FAN: u64 = 4;
/// The largest blocks: of 4^6 intervals. A round of more than 16 of those lasts for a day.
const LEVELS: u32 = 6;
/// Blocks of a round, at the least: a block's pages are that much out of place in time.
const BLOCKS_A_ROUND: f64 = 16.0;
/// More than this share of an interval's pages in the next one says no more of how often they are written.
const HOTTEST: f64 = 0.98;
/// What a timeline keeps unpacked, in words: 512 MiB. Past that it forgets, and unpacks again.
const KEPT_WORDS: usize = (512 << 20) / size_of::<Dirty>();

/// A word of a bitmap that is not empty.
#[derive(Clone, Copy, Debug)]
struct Dirty {
    word: u32,
    // In halves, so that it takes 12 bytes and not 16.
    bits: [u32; 2],
}

impl Dirty {
    const fn new(word: u32, bits: u64) -> Self {
        Self { word, bits: [bits as u32, (bits >> 32) as u32] }
    }

    const fn bits(self) -> u64 {
        self.bits[0] as u64 | (self.bits[1] as u64) << 32
    }
}

/// The pages of some intervals, in sixteen parts by their words.
#[derive(Debug)]
struct Block {
    parts: [Vec<Dirty>; PARTS as usize],
    pages: u64,
}

impl Block {
    fn new(parts: [Vec<Dirty>; PARTS as usize]) -> Self {
        let pages = parts.iter().flatten().map(|dirty| u64::from(dirty.bits().count_ones())).sum();
        Self { parts, pages }
    }

    fn words(&self) -> usize {
        self.parts.iter().map(Vec::len).sum()
    }

    /// The pages of both; each part is in the order of its words.
    fn union(a: &Self, b: &Self) -> Self {
        let parts = std::array::from_fn(|part| {
            let (mut a, mut b) = (&a.parts[part][..], &b.parts[part][..]);
            let mut all = Vec::with_capacity(a.len().max(b.len()));
            while let (Some((x, after_x)), Some((y, after_y))) = (a.split_first(), b.split_first()) {
                match x.word.cmp(&y.word) {
                    Ordering::Less => (a, _) = (after_x, all.push(*x)),
                    Ordering::Greater => (b, _) = (after_y, all.push(*y)),
                    Ordering::Equal => {
                        all.push(Dirty::new(x.word, x.bits() | y.bits()));
                        (a, b) = (after_x, after_y);
                    }
                }
            }
            all.extend_from_slice(a);
            all.extend_from_slice(b);
            all
        });
        Self::new(parts)
    }
}

/// Pages that are in both; each is in the order of its words.
fn in_both(mut a: &[Dirty], mut b: &[Dirty]) -> u64 {
    let mut count = 0;
    while let (Some((x, after_x)), Some((y, after_y))) = (a.split_first(), b.split_first()) {
        match x.word.cmp(&y.word) {
            Ordering::Less => a = after_x,
            Ordering::Greater => b = after_y,
            Ordering::Equal => {
                count += u64::from((x.bits() & y.bits()).count_ones());
                (a, b) = (after_x, after_y);
            }
        }
    }
    count
}

/// A log, made ready to be replayed any number of times. After its end it goes on as after the moment that is like it, where the guest works by
/// turns; else from its beginning.
#[derive(Debug)]
pub struct Timeline<'a> {
    log: &'a Log,
    taken: Taken,
    /// The last intervals, which come again after the log's end.
    again: u64,
    turns: bool,
    kept: RefCell<Kept>,
}

#[derive(Debug, Default)]
struct Kept {
    /// By level and number.
    blocks: HashMap<(u32, u64), Rc<Block>>,
    words: usize,
    hot: HashMap<u64, f64>,
}

impl<'a> Timeline<'a> {
    /// Of `log`; `taken` is what the codec elides or the hypervisor sends.
    #[must_use]
    pub fn new(log: &'a Log, taken: Taken) -> Self {
        let turns = turns::turns(&log.last_counts(taken, turns::MOST)).and_then(|turns| u64::try_from(turns).ok());
        let again = turns.unwrap_or_else(|| log.intervals()).max(1);
        Self { log, taken, again, turns: turns.is_some(), kept: RefCell::default() }
    }

    /// When the log ends, counted from its start, if it is known what the guest does then: it works by turns, and has been seen in this place
    /// of one before.
    #[must_use]
    pub fn known_end(&self) -> Option<Duration> {
        self.turns.then(|| self.log.length())
    }

    /// The interval that was watched, for any from the log's start on.
    fn watched(&self, number: u64) -> u64 {
        let count = self.log.intervals();
        if number < count { number } else { count.saturating_sub(self.again) + (number - count) % self.again }
    }

    fn block(&self, level: u32, number: u64) -> Rc<Block> {
        let number = if level == 0 { self.watched(number) } else { number };
        if let Some(known) = self.kept.borrow().blocks.get(&(level, number)) {
            return Rc::clone(known);
        }
        let block = Rc::new(if level == 0 {
            let mut parts: [Vec<Dirty>; PARTS as usize] = std::array::from_fn(|_| vec![]);
            self.log.for_each_word(number, self.taken, |word, bits| {
                // A guest has at most 2^32 pages, 2^26 words.
                parts[word.wrapping_mul(7) % PARTS as usize].push(Dirty::new(word as u32, bits));
            });
            Block::new(parts)
        } else {
            let [a, b, c, d] = std::array::from_fn(|i| self.block(level - 1, number * FAN + i as u64));
            Block::union(&Block::union(&a, &b), &Block::union(&c, &d))
        });
        let mut kept = self.kept.borrow_mut();
        let words = block.words();
        if kept.words + words > KEPT_WORDS {
            // Unions are worth more: what they are made of is unpacked again from the log.
            kept.blocks.retain(|(level, _), _| *level > 0);
            kept.words = kept.blocks.values().map(|block| block.words()).sum();
            if kept.words + words > KEPT_WORDS {
                *kept = Kept::default();
            }
        }
        kept.words += words;
        kept.blocks.insert((level, number), Rc::clone(&block));
        block
    }

    /// Which share of an interval's pages the next one has, too; at the log's end the one before. 0 where each has pages of its own, near 1 where
    /// they are always the same.
    fn hot(&self, number: u64) -> f64 {
        let count = self.log.intervals();
        if count < 2 {
            return 0.0;
        }
        let number = self.watched(number);
        if let Some(hot) = self.kept.borrow().hot.get(&number) {
            return *hot;
        }
        let next = if number + 1 < count { number + 1 } else { number - 1 };
        let (this, next) = (self.block(0, number), self.block(0, next));
        let both: u64 = this.parts.iter().zip(&next.parts).map(|(a, b)| in_both(a, b)).sum();
        let hot = if this.pages == 0 { 0.0 } else { (both as f64 / this.pages as f64).min(HOTTEST) };
        self.kept.borrow_mut().hot.insert(number, hot);
        hot
    }

    /// Pages that are written in a part of an interval, or in so many that are like it.
    fn lately(&self, number: u64, part: f64) -> f64 {
        self.block(0, number).pages as f64 * early(self.hot(number), part)
    }

    fn interval(&self, number: u64, since: u64) -> Open {
        let first = (since + number.wrapping_mul(5)) % PARTS;
        Open { block: self.block(0, number), level: 0, number, hot: self.hot(number), since, first, applied: 0 }
    }
}

/// A block that is being applied, part by part.
#[derive(Debug)]
struct Open {
    block: Rc<Block>,
    level: u32,
    number: u64,
    /// Of an interval: which share of what is written there it has; the tick of it at which the round began, or 0.
    hot: f64,
    since: u64,
    /// The part that came first, and how many have come.
    first: u64,
    applied: u64,
}

impl Open {
    /// The round ends at a tick of this interval: what comes after it is written anew.
    fn begin_again(&mut self, tick: u64) {
        self.first = (self.first + self.applied) % PARTS;
        (self.since, self.applied) = (tick, 0);
    }

    /// How many parts have come by a tick.
    fn due(&self, tick: u64) -> u64 {
        let part = (tick - self.since) as f64 / PARTS as f64;
        ((early(self.hot, part) * PARTS as f64).round() as u64).min(PARTS)
    }
}

/// Which share of an interval's pages a part of it has, if the interval has the share `hot` of a set: 1 - (1 - hot)^part of the set, as pages
/// that are chosen at random.
fn early(hot: f64, part: f64) -> f64 {
    if hot < 1e-3 { part } else { (1.0 - (1.0 - hot).powf(part)) / hot }
}

/// A guest that does again what its log says.
#[derive(Debug)]
pub struct Replayed<'a> {
    timeline: &'a Timeline<'a>,
    memory: Bitmaps,
    /// Where in the log the move begins, in ticks: a sixteenth of an interval.
    begin: f64,
    /// The tick that is applied next, and the one at which the round began, counted from the log's start.
    next: u64,
    round: u64,
    /// The tick that it is.
    now: u64,
    open: Option<Open>,
    /// Pages that were to be sent at the start of this round; sent in all; seconds that this took.
    to_send: f64,
    sent: f64,
    seconds: f64,
    repeats: bool,
}

/// The ticks of a block.
const fn ticks(level: u32) -> u64 {
    PARTS * FAN.pow(level)
}

impl<'a> Replayed<'a> {
    /// A guest that is moved at a time after its log's start.
    #[must_use]
    pub fn new(timeline: &'a Timeline<'a>, at: Duration) -> Self {
        let header = timeline.log.header();
        let begin = at.as_secs_f64() / header.interval.as_secs_f64() * PARTS as f64;
        Self {
            timeline,
            memory: Bitmaps::new(header.pages.0),
            begin,
            next: begin as u64,
            round: begin as u64,
            now: begin as u64,
            open: None,
            to_send: header.pages.0 as f64,
            sent: 0.0,
            seconds: 0.0,
            repeats: false,
        }
    }

    /// Whether the log was at its end, and began again.
    #[must_use]
    pub const fn repeats(&self) -> bool {
        self.repeats
    }

    /// The guest's memory.
    #[must_use]
    pub const fn memory(&self) -> Pages {
        self.timeline.log.header().pages
    }

    /// The largest level of which this round has blocks enough.
    fn level(&self) -> u32 {
        if self.sent == 0.0 {
            return 0;
        }
        let lasts = self.to_send * self.seconds / self.sent / self.timeline.log.header().interval.as_secs_f64();
        let intervals = lasts / BLOCKS_A_ROUND;
        (1..=LEVELS).take_while(|level| FAN.pow(*level) as f64 <= intervals).last().unwrap_or(0)
    }

    /// The block that the next tick is in: the largest that begins there, or the interval.
    fn enter(&mut self) {
        let most = if self.next.is_multiple_of(PARTS) { self.level() } else { 0 };
        // Where the log is repeated, unions would have to be made anew each time: they only pay where they are kept.
        let end = self.timeline.log.intervals().saturating_mul(PARTS);
        let fits = |l: &u32| self.next.is_multiple_of(ticks(*l)) && self.next + ticks(*l) <= end;
        let level = (1..=most).rev().find(fits).unwrap_or(0);
        let number = self.next / ticks(level);
        self.open = Some(match level {
            0 => self.timeline.interval(number, self.next % PARTS),
            _ => Open {
                block: self.timeline.block(level, number),
                level,
                number,
                hot: 0.0,
                since: 0,
                // Another order in each, so that the same page is not always early.
                first: number.wrapping_mul(5) % PARTS,
                applied: 0,
            },
        });
    }

    fn write(memory: &mut Bitmaps, part: &[Dirty]) {
        for dirty in part {
            memory.write_word(dirty.word as usize, dirty.bits());
        }
    }

    /// One tick of the block that is open, and past it; whether that can be before `until`.
    fn step(&mut self, until: u64) -> bool {
        if self.open.is_none() {
            self.enter();
        }
        let Some(open) = &mut self.open else { return false };
        let tick = FAN.pow(open.level);
        if self.next + tick > until {
            return false;
        }
        self.next += tick;
        let due = open.due(self.next / tick - open.number * PARTS);
        while open.applied < due {
            let which = (open.first + open.applied) % PARTS;
            Self::write(&mut self.memory, &open.block.parts[which as usize]);
            open.applied += 1;
        }
        if self.next.is_multiple_of(ticks(open.level)) {
            self.open = None;
        }
        true
    }

    /// What a union has not brought yet though its time has come, in its intervals' own time.
    fn settle(&mut self) {
        let Some(Open { level: level @ 1.., number, .. }) = self.open else { return };
        self.open = None;
        let mut at = number * ticks(level);
        loop {
            let fits = |l: &u32| at.is_multiple_of(ticks(*l)) && at + ticks(*l) <= self.now;
            let Some(level) = (0..level).rev().find(fits) else { break };
            let block = self.timeline.block(level, at / ticks(level));
            block.parts.iter().for_each(|part| Self::write(&mut self.memory, part));
            at += ticks(level);
        }
        self.next = at;
        self.open = Some(self.timeline.interval(at / PARTS, 0));
        while self.step(self.now) {}
    }
}

impl Guest for Replayed<'_> {
    fn pages(&self) -> u64 {
        self.memory.pages()
    }

    fn run_until(&mut self, seconds: f64) {
        self.seconds = seconds;
        let interval = self.timeline.log.header().interval.as_secs_f64();
        let until = (self.begin + seconds / interval * PARTS as f64) as u64;
        self.now = until;
        self.repeats |= until > self.timeline.log.intervals().saturating_mul(PARTS);
        // Once through all of the log is as good as many times, and nothing can be more than dirty.
        let all = self.timeline.log.intervals().saturating_mul(PARTS);
        while self.next < until {
            if self.memory.is_all_dirty() || self.next - self.round >= all + PARTS {
                self.next = until;
                self.open = None;
                return;
            }
            if !self.step(until) {
                return;
            }
        }
    }

    fn batch(&mut self, most: u64, skip: bool) -> Option<Batch> {
        let batch = self.memory.batch(most, skip);
        self.sent += batch.map_or(0.0, |batch| batch.sent);
        batch
    }

    fn clean(&mut self) -> Cleaned {
        self.settle();
        let cleaned = self.memory.clean();
        self.to_send = cleaned.left;
        self.round = self.next;
        if let Some(open) = &mut self.open {
            open.begin_again(self.next - open.number * PARTS);
        }
        cleaned
    }

    fn lately(&self, seconds: f64) -> f64 {
        let interval = self.timeline.log.header().interval.as_secs_f64();
        self.timeline.lately(self.now.saturating_sub(1) / PARTS, seconds / interval)
    }
}
