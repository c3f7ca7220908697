//! The model AVG (section IV-A of the paper): a guest that dirties pages at one rate.
//!
//! The rate alone does not say *which* pages. [`Sequential`] is the paper's micro-benchmark, which writes one page after the other
//! and begins anew at the end. [`Evenly`] writes any page of its working set at any time: closer to a real guest, and so regular
//! that no bitmaps are needed: shares of pages say all, in a time that does not depend on the size of the memory much.

use crate::amount::{PageRate, Pages};
use crate::guest::{Batch, Bitmaps, Cleaned, Guest};
use crate::log::{Log, Taken};

/// Writes its working set page by page, round and round, as the paper's micro-benchmark does.
#[derive(Clone, Debug)]
pub struct Sequential {
    memory: Bitmaps,
    rate: PageRate,
    working_set: u64,
    /// Pages written since the beginning.
    written: u64,
}

impl Sequential {
    /// A guest of `memory` that writes the first `working_set` of it; more than there is means all.
    #[must_use]
    pub fn new(memory: Pages, working_set: Pages, rate: PageRate) -> Self {
        Self { memory: Bitmaps::new(memory.0), rate, working_set: working_set.0.min(memory.0), written: 0 }
    }
}

impl Guest for Sequential {
    fn pages(&self) -> u64 {
        self.memory.pages()
    }

    fn run_until(&mut self, seconds: f64) {
        // What is past 2^64 saturates.
        let written = (self.rate.per_second() * seconds) as u64;
        let new = written.saturating_sub(self.written).min(self.working_set);
        if new > 0 {
            let from = (written - new) % self.working_set;
            let before_the_end = new.min(self.working_set - from);
            self.memory.write_run(from, before_the_end);
            self.memory.write_run(0, new - before_the_end);
        }
        self.written = self.written.max(written);
    }

    fn batch(&mut self, most: u64, skip: bool) -> Option<Batch> {
        self.memory.batch(most, skip)
    }

    fn clean(&mut self) -> Cleaned {
        self.memory.clean()
    }

    fn lately(&self, seconds: f64) -> f64 {
        (self.rate.per_second() * seconds.max(0.0)).min(self.working_set as f64)
    }
}

/// Writes any page of its working set with the same probability at any time.
///
/// Its pages are as if scattered over the memory. Which of them are to be sent and which are dirty are independent of one another,
/// so the expected share of each at a time is all that there is to know.
#[derive(Clone, Debug)]
pub struct Evenly {
    pages: f64,
    working_set: f64,
    rate: PageRate,
    now: f64,
    cleaned: f64,
    /// The share of the working set that was to be sent when the round began, and the share of all else.
    inside: f64,
    outside: f64,
    /// How much of the memory this round has gone through.
    at: f64,
    /// The round before, if there was one.
    last: Option<LastRound>,
}

/// A round that is over.
#[derive(Clone, Copy, Debug)]
struct LastRound {
    begin: f64,
    end: f64,
    /// The share of the working set that it sent.
    inside: f64,
}

impl Evenly {
    /// A guest of `memory` that writes `working_set` of it, scattered; more than there is means all.
    #[must_use]
    pub fn new(memory: Pages, working_set: Pages, rate: PageRate) -> Self {
        Self {
            pages: memory.0 as f64,
            working_set: working_set.0.min(memory.0) as f64,
            rate,
            now: 0.0,
            cleaned: 0.0,
            inside: 1.0,
            outside: 1.0,
            at: 0.0,
            last: None,
        }
    }

    /// The guest that writes evenly what this log says on average: its rate, and how many pages it writes to at all.
    ///
    /// The latter are more than were seen, where it was not watched for long enough: of the pages of the log's first half the second has as
    /// large a share as it has of all (Lincoln and Petersen's estimate, as of fish that are caught, marked and caught again). Halves that have
    /// nothing in common say that it may be all of the memory.
    #[must_use]
    pub fn of(log: &Log, taken: Taken) -> Self {
        let memory = log.header().pages;
        let working_set = working_set(log, taken);
        let an_interval = log.mean(taken);
        // Nearly all of them in each interval says no more of how often they are written.
        let share = if working_set > 0.0 { (an_interval / working_set).min(HOTTEST) } else { 0.0 };
        let rate = working_set * -(-share).ln_1p() / log.header().interval.as_secs_f64();
        Self::new(memory, Pages::nearest(working_set), PageRate::new(rate))
    }

    /// One that is on its way already: so many pages are still to be sent, those that it writes to first.
    #[must_use]
    pub fn under_way(self, left: Pages) -> Self {
        let left = left.0 as f64;
        let outside = self.pages - self.working_set;
        Self {
            inside: if self.working_set > 0.0 { (left / self.working_set).min(1.0) } else { 0.0 },
            outside: if outside > 0.0 { ((left - self.working_set) / outside).clamp(0.0, 1.0) } else { 0.0 },
            ..self
        }
    }

    /// The share of the working set that is dirty by now.
    fn dirty(&self) -> f64 {
        self.written_within(self.now - self.cleaned)
    }

    /// The chance that a page of the working set is written within so many seconds.
    fn written_within(&self, seconds: f64) -> f64 {
        if self.working_set == 0.0 {
            return 0.0;
        }
        -(-self.rate.per_second() * seconds.max(0.0) / self.working_set).exp_m1()
    }

    /// Of the working set's pages that are sent now, the share that was not written since it was sent in the last round: dirtied there before its
    /// turn, and neither after it nor in this one. Each round comes to a page after the same part of its time.
    fn same(&self) -> f64 {
        let Some(last) = self.last.filter(|_| self.working_set > 0.0 && self.inside > 0.0) else { return 0.0 };
        let turn = last.begin + (last.end - last.begin) * (self.at / self.pages);
        let before = self.written_within(turn - last.begin);
        let after = 1.0 - self.written_within(self.now - turn);
        (last.inside * before * after / self.inside).clamp(0.0, 1.0)
    }
}

/// More than this share of the working set in an interval is taken to be this one.
const HOTTEST: f64 = 0.98;

/// How many pages the guest of a log writes to.
fn working_set(log: &Log, taken: Taken) -> f64 {
    let words = usize::try_from(log.header().pages.0.div_ceil(64)).expect("there is memory for a bit a page");
    let half = log.intervals() / 2;
    let union = |intervals: std::ops::Range<u64>| {
        let mut all = vec![0_u64; words];
        intervals.for_each(|interval| log.for_each_word(interval, taken, |word, bits| all[word] |= bits));
        all
    };
    let (early, late) = (union(0..half), union(half..log.intervals()));
    let count = |word: fn(u64, u64) -> u64| {
        early.iter().zip(&late).map(|(a, b)| f64::from(word(*a, *b).count_ones())).sum::<f64>()
    };
    let (first, second, both, seen) = (count(|a, _| a), count(|_, b| b), count(|a, b| a & b), count(|a, b| a | b));
    let all = log.header().pages.0 as f64;
    match (half, seen) {
        (0, _) | (_, 0.0) => seen,
        _ if both > 0.0 => (first * second / both).clamp(seen, all),
        _ => all,
    }
}

impl Guest for Evenly {
    fn pages(&self) -> u64 {
        Pages::nearest(self.pages).0
    }

    fn run_until(&mut self, seconds: f64) {
        self.now = self.now.max(seconds);
    }

    fn batch(&mut self, most: u64, skip: bool) -> Option<Batch> {
        if self.at >= self.pages {
            return None;
        }
        let again = if skip { self.working_set * self.inside * self.dirty() / self.pages } else { 0.0 };
        let wanted = (self.working_set * self.inside + (self.pages - self.working_set) * self.outside) / self.pages;
        let now = (wanted - again).max(0.0);
        let there_are = self.pages - self.at;
        let looked_at = if now * there_are <= most as f64 { there_are } else { most as f64 / now };
        // What is skipped was written, and is none of these.
        let same = looked_at * (self.working_set * self.inside / self.pages) * self.same();
        self.at += looked_at;
        // Rounding leaves slivers of pages.
        if self.pages - self.at < 1e-3 {
            self.at = self.pages;
        }
        let sent = looked_at * now;
        Some(Batch { sent, skipped: looked_at * again, same: same.min(sent) })
    }

    fn clean(&mut self) -> Cleaned {
        let dirty = self.dirty();
        let not_reached = if self.pages > 0.0 { 1.0 - self.at / self.pages } else { 0.0 };
        self.last = Some(LastRound { begin: self.cleaned, end: self.now, inside: self.inside * (1.0 - not_reached) });
        self.inside = dirty + (1.0 - dirty) * self.inside * not_reached;
        self.outside *= not_reached;
        self.at = 0.0;
        self.cleaned = self.now;
        let left = self.working_set * self.inside + (self.pages - self.working_set) * self.outside;
        Cleaned { dirtied: self.working_set * dirty, left }
    }

    fn lately(&self, seconds: f64) -> f64 {
        self.working_set * self.written_within(seconds)
    }
}
