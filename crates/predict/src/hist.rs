//! The model HIST (section IV-B of the paper): a guest that dirties the pages that it was seen to dirty before.
//!
//! A log says which pages were dirtied within an interval, not when: they are spread over it, a sixteenth of them in each sixteenth
//! of its time. Neighbouring words of the bitmap come at different times, so that every batch of 1,024 pages, sixteen words, sees the same
//! share of what has been dirtied so far.
//!
//! # What it cannot know
//!
//! A page that is written many times within an interval is written once here. So rounds much shorter than an interval (those before
//! a short pause) see too few of such pages: watch at intervals no longer than the pause that is asked about. Where a move outlasts
//! the log, the log begins again: [`Replayed::repeats`].

use crate::amount::Pages;
use crate::guest::{Batch, Bitmaps, Cleaned, Guest};
use crate::log::{Log, Taken};
use std::time::Duration;

/// Parts of an interval. A power of two, so that strides by any odd number visit each.
const PARTS: usize = 16;

/// A guest that does again what its log says.
#[derive(Clone, Debug)]
pub struct Replayed<'a> {
    log: &'a Log,
    taken: Taken,
    memory: Bitmaps,
    /// Where in the log the move begins, in intervals.
    begin: f64,
    /// The part that is applied next, counted from the log's start.
    next: u64,
    /// The words of the interval of `next`, by their part.
    parts: [Vec<(usize, u64)>; PARTS],
    unpacked: Option<u64>,
    repeats: bool,
}

impl<'a> Replayed<'a> {
    /// A guest of which `log` was kept, moved at a time after the log's start. What its codec elides or its hypervisor sends is
    /// `taken`.
    #[must_use]
    pub fn new(log: &'a Log, taken: Taken, at: Duration) -> Self {
        let begin = at.as_secs_f64() / log.header().interval.as_secs_f64();
        Self {
            log,
            taken,
            memory: Bitmaps::new(log.header().pages.0),
            begin,
            next: (begin * PARTS as f64) as u64,
            parts: std::array::from_fn(|_| vec![]),
            unpacked: None,
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
        self.log.header().pages
    }

    fn unpack(&mut self, interval: u64) {
        self.parts.iter_mut().for_each(Vec::clear);
        let parts = &mut self.parts;
        // Another order in each interval, so that the same page is not always early.
        let turn = interval.wrapping_mul(5) as usize;
        self.log.for_each_word(interval, self.taken, |word, bits| {
            parts[(word.wrapping_mul(7).wrapping_add(turn)) % PARTS].push((word, bits));
        });
        self.unpacked = Some(interval);
        self.repeats |= interval >= self.log.intervals();
    }
}

impl Guest for Replayed<'_> {
    fn pages(&self) -> u64 {
        self.memory.pages()
    }

    fn run_until(&mut self, seconds: f64) {
        let intervals = self.begin + seconds / self.log.header().interval.as_secs_f64();
        let until = (intervals * PARTS as f64) as u64;
        // Once through all of the log is as good as many times.
        let once = self.log.intervals().saturating_mul(PARTS as u64);
        if until.saturating_sub(self.next) > once {
            self.repeats = true;
            self.next = until - once;
        }
        while self.next < until {
            // Nothing more can become dirty in this round.
            if self.memory.is_all_dirty() {
                self.repeats |= (until - 1) / PARTS as u64 >= self.log.intervals();
                self.next = until;
                return;
            }
            let interval = self.next / PARTS as u64;
            if self.unpacked != Some(interval) {
                self.unpack(interval);
            }
            for (word, bits) in &self.parts[(self.next % PARTS as u64) as usize] {
                self.memory.write_word(*word, *bits);
            }
            self.next += 1;
        }
    }

    fn batch(&mut self, most: u64, skip: bool) -> Option<Batch> {
        self.memory.batch(most, skip)
    }

    fn clean(&mut self) -> Cleaned {
        self.memory.clean()
    }
}
