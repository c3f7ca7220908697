//! A guest, as far as it matters to a copy of its memory: which pages are to be sent, and which it has dirtied.
//!
//! Algorithm 1 asks two questions, `sim_peek` (which pages are dirty by now?) and `sim_clean` (the same, and forget them). A peek is
//! only ever used for the pages of the next batch, so here both are one thing's work: [`Guest::batch`] peeks, at its start,
//! and takes the next pages. [`Bitmaps`] keeps a bit a page, as Xen does; [`Evenly`](crate::Evenly) only shares.

/// Some pages were looked at, in the order of their addresses.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Batch {
    /// So many are sent now.
    pub sent: f64,
    /// So many were to be sent, but have been dirtied again.
    pub skipped: f64,
    /// So many of those that are sent were not written since they were sent before: dirtied in the last round, before their turn came in it.
    /// The other end has them as they are.
    pub same: f64,
}

/// A round is over.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cleaned {
    /// Pages dirtied during it.
    pub dirtied: f64,
    /// Pages to be sent in the next one: those, and what the round left behind.
    pub left: f64,
}

/// A guest whose memory is copied while it runs. At first everything is to be sent and nothing is dirty.
pub trait Guest {
    /// Its memory, in pages.
    fn pages(&self) -> u64;

    /// It has run until `seconds` after the first page was sent. Time never goes back.
    fn run_until(&mut self, seconds: f64);

    /// The next `most` pages of this round that are to be sent, at most; with `skip`, but for those that are dirty by now
    /// (`sim_peek`). None at the end of the round.
    fn batch(&mut self, most: u64, skip: bool) -> Option<Batch>;

    /// Ends the round: what was dirtied is to be sent in the next one, and nothing is dirty (`sim_clean`).
    fn clean(&mut self) -> Cleaned;

    /// Pages that it has written within the last so many seconds, each counted once: what two looks at its memory would find, so long apart.
    fn lately(&self, seconds: f64) -> f64;
}

/// A guest whose time goes by faster: one that does all that it does so many times as often.
#[derive(Clone, Debug)]
pub struct Faster<G> {
    guest: G,
    times: f64,
}

impl<G> Faster<G> {
    /// `times` as fast; what is no positive number means as fast as it is.
    #[must_use]
    pub fn new(guest: G, times: f64) -> Self {
        Self { guest, times: if times.is_finite() && times > 0.0 { times } else { 1.0 } }
    }
}

impl<G: Guest> Guest for Faster<G> {
    fn pages(&self) -> u64 {
        self.guest.pages()
    }

    fn run_until(&mut self, seconds: f64) {
        self.guest.run_until(seconds * self.times);
    }

    fn batch(&mut self, most: u64, skip: bool) -> Option<Batch> {
        self.guest.batch(most, skip)
    }

    fn clean(&mut self) -> Cleaned {
        self.guest.clean()
    }

    fn lately(&self, seconds: f64) -> f64 {
        self.guest.lately(seconds * self.times)
    }
}

/// A bit for each page: to be sent, and dirty.
///
/// A round that is broken off goes on, in the next one, at the word of the bitmap where it was, as QEMU does; a whole one ends
/// where it began.
#[derive(Clone, Debug)]
pub struct Bitmaps {
    pages: u64,
    to_send: Vec<u64>,
    dirty: Vec<u64>,
    /// Written since they were sent, or never sent.
    stale: Vec<u64>,
    dirtied: u64,
    /// The next word of this round, and the first bit of it that was not looked at.
    word: usize,
    bit: u64,
    words_left: usize,
}

/// Pages of a word of a bitmap.
pub(crate) const WORD: u64 = 64;

impl Bitmaps {
    /// All is to be sent.
    #[must_use]
    pub fn new(pages: u64) -> Self {
        let words = usize::try_from(pages.div_ceil(WORD)).expect("there is memory for a bit a page");
        let mut to_send = vec![u64::MAX; words];
        if let (Some(last), part @ 1..) = (to_send.last_mut(), pages % WORD) {
            *last = (1 << part) - 1;
        }
        let stale = vec![u64::MAX; words];
        Self { pages, to_send, dirty: vec![0; words], stale, dirtied: 0, word: 0, bit: 0, words_left: words }
    }

    /// How many there are.
    #[must_use]
    pub const fn pages(&self) -> u64 {
        self.pages
    }

    /// Nothing that a guest writes makes a difference any more.
    #[must_use]
    pub const fn is_all_dirty(&self) -> bool {
        self.dirtied == self.pages
    }

    /// These pages are written. Those past the end are not there.
    pub fn write_run(&mut self, from: u64, pages: u64) {
        let end = from.saturating_add(pages).min(self.pages);
        let mut at = from;
        while at < end {
            let (word, first) = (at / WORD, at % WORD);
            let bits = (end - at).min(WORD - first);
            self.write_word(word as usize, (u64::MAX >> (WORD - bits)) << first);
            at += bits;
        }
    }

    /// Pages of one word are written; bits past the end must be clear.
    pub(crate) fn write_word(&mut self, word: usize, bits: u64) {
        self.dirtied += u64::from((bits & !self.dirty[word]).count_ones());
        self.dirty[word] |= bits;
        self.stale[word] |= bits;
    }

    /// Pages of one word are sent; how many the other end has as they are.
    fn send_word(&mut self, word: usize, bits: u64) -> u64 {
        let same = bits & !self.stale[word];
        self.to_send[word] &= !bits;
        self.stale[word] &= !bits;
        u64::from(same.count_ones())
    }

    /// As [`Guest::batch`].
    pub fn batch(&mut self, most: u64, skip: bool) -> Option<Batch> {
        if self.words_left == 0 {
            return None;
        }
        let (mut sent, mut skipped, mut same) = (0, 0, 0);
        while self.words_left > 0 && sent < most {
            let wanted = self.to_send[self.word] & (u64::MAX << self.bit);
            let again = if skip { wanted & self.dirty[self.word] } else { 0 };
            let now = wanted & !again;
            if u64::from(now.count_ones()) > most - sent {
                let now = lowest(now, most - sent);
                let last = now.ilog2();
                same += self.send_word(self.word, now);
                skipped += u64::from((again & (u64::MAX >> (63 - last))).count_ones());
                sent = most;
                // Not the last bit: there are more.
                self.bit = u64::from(last) + 1;
                break;
            }
            same += self.send_word(self.word, now);
            sent += u64::from(now.count_ones());
            skipped += u64::from(again.count_ones());
            self.word = if self.word + 1 == self.to_send.len() { 0 } else { self.word + 1 };
            self.bit = 0;
            self.words_left -= 1;
        }
        Some(Batch { sent: sent as f64, skipped: skipped as f64, same: same as f64 })
    }

    /// As [`Guest::clean`].
    pub fn clean(&mut self) -> Cleaned {
        let mut left = 0;
        for (to_send, dirty) in self.to_send.iter_mut().zip(&mut self.dirty) {
            *to_send |= std::mem::take(dirty);
            left += u64::from(to_send.count_ones());
        }
        self.bit = 0;
        self.words_left = self.to_send.len();
        Cleaned { dirtied: std::mem::take(&mut self.dirtied) as f64, left: left as f64 }
    }
}

/// The lowest `n` of the bits that are set; there are more.
const fn lowest(bits: u64, n: u64) -> u64 {
    let mut above = bits;
    let mut i = 0;
    while i < n {
        above &= above - 1;
        i += 1;
    }
    bits & !above
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A page at a time, as Xen's loop has it.
    struct Plain {
        to_send: Vec<bool>,
        dirty: Vec<bool>,
        start: usize,
        looked_at: usize,
    }

    impl Plain {
        fn batch(&mut self, most: u64, skip: bool) -> Option<Batch> {
            if self.looked_at == self.dirty.len() {
                return None;
            }
            let mut found = Batch::default();
            while self.looked_at < self.dirty.len() && found.sent < most as f64 {
                let n = (self.start + self.looked_at) % self.dirty.len();
                self.looked_at += 1;
                if self.to_send[n] && self.dirty[n] && skip {
                    found.skipped += 1.0;
                } else if self.to_send[n] {
                    self.to_send[n] = false;
                    found.sent += 1.0;
                }
            }
            Some(found)
        }

        fn clean(&mut self) -> Cleaned {
            let dirtied = self.dirty.iter().filter(|d| **d).count();
            for (to_send, dirty) in self.to_send.iter_mut().zip(&mut self.dirty) {
                *to_send |= std::mem::take(dirty);
            }
            self.start = (self.start + self.looked_at) % self.dirty.len() / 64 * 64;
            self.looked_at = 0;
            Cleaned { dirtied: dirtied as f64, left: self.to_send.iter().filter(|s| **s).count() as f64 }
        }
    }

    proptest! {
        #[test]
        fn words_of_bits_behave_as_pages_one_by_one(
            pages in 1_u64..400,
            skip: bool,
            steps in prop::collection::vec((0_u64..400, 0_u64..200, 1_u64..150, 0..6), 1..60),
        ) {
            let mut fast = Bitmaps::new(pages);
            let size = pages as usize;
            let mut plain = Plain { to_send: vec![true; size], dirty: vec![false; size], start: 0, looked_at: 0 };
            for (from, run, most, kind) in steps {
                match kind {
                    0 => {
                        prop_assert_eq!(fast.clean(), plain.clean());
                        // Where both are alike but for empty words behind the last page sent.
                        plain.start = fast.word * 64;
                    }
                    1 | 2 => {
                        fast.write_run(from, run);
                        plain.dirty.iter_mut().skip(from as usize).take(run as usize).for_each(|d| *d = true);
                        prop_assert_eq!(fast.is_all_dirty(), plain.dirty.iter().all(|d| *d));
                    }
                    _ => {
                        let (ours, theirs) = (fast.batch(most, skip), plain.batch(most, skip));
                        // What lies between the last page sent and the next word may be skipped by this batch or by the next.
                        let sent = |batch: Option<Batch>| batch.unwrap_or_default().sent;
                        prop_assert_eq!(sent(ours), sent(theirs));
                    }
                }
            }
        }

        #[test]
        fn the_other_end_has_a_page_as_it_is_if_nobody_wrote_to_it_since_it_was_sent(
            steps in prop::collection::vec((0_u64..100, 1_u64..30, 1_u64..60, 0..5), 1..60),
        ) {
            let mut fast = Bitmaps::new(100);
            // What each page holds, and what the other end has of it.
            let (mut here, mut there) = (vec![1_u32; 100], vec![0_u32; 100]);
            let mut to_send = [true; 100];
            let mut dirty = vec![false; 100];
            let mut at = 0;
            for (from, run, most, kind) in steps {
                match kind {
                    0 => {
                        fast.clean();
                        // A round that is broken off goes on at the word where it was.
                        at = fast.word * 64;
                        to_send.iter_mut().zip(&mut dirty).for_each(|(send, dirty)| *send |= std::mem::take(dirty));
                    }
                    1 | 2 => {
                        fast.write_run(from, run);
                        for page in (from..from + run).map(|page| page as usize).filter(|page| *page < 100) {
                            (here[page], dirty[page]) = (here[page] + 1, true);
                        }
                    }
                    _ => {
                        let Some(batch) = fast.batch(most, false) else { continue };
                        let (mut sent, mut same) = (0, 0);
                        for page in (0..100).map(|n| (at + n) % 100).filter(|page| to_send[*page]).take(batch.sent as usize).collect::<Vec<_>>() {
                            (sent, same) = (sent + 1, same + u32::from(here[page] == there[page]));
                            (there[page], to_send[page]) = (here[page], false);
                        }
                        prop_assert_eq!((batch.sent, batch.same), (f64::from(sent), f64::from(same)));
                    }
                }
            }
        }

        #[test]
        fn what_is_skipped_in_a_round_is_counted_once(
            writes in prop::collection::vec((0_u64..400, 0_u64..80), 0..8),
            most in 1_u64..150,
        ) {
            let mut fast = Bitmaps::new(400);
            for (from, run) in writes {
                fast.write_run(from, run);
            }
            let dirty = fast.dirtied as f64;
            let (mut sent, mut skipped) = (0.0, 0.0);
            while let Some(batch) = fast.batch(most, true) {
                (sent, skipped) = (sent + batch.sent, skipped + batch.skipped);
            }
            prop_assert_eq!((sent, skipped), (400.0 - dirty, dirty));
            prop_assert_eq!(fast.clean(), Cleaned { dirtied: dirty, left: dirty });
        }
    }
}
