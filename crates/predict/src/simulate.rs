//! Algorithm 1 of the paper: pre-copy, round by round and batch by batch.
//!
//! # Errata
//!
//! The algorithm is meant to be what Xen does (`xc_domain_save.c` of Xen 3.3), and as printed it is not. What stands here is
//! what Xen does:
//!
//! - Its `continue` skips `N++`, so the first page that is not to be sent is looked at for ever. In Xen the increment is the loop's
//!   own (`for (...; N++)`).
//! - `sent_this_iteration` and `skip_this_iteration` are set to 0 for each batch, and the former is set to the batch, not increased by
//!   it: the rule of 50 pages would look at the last batch only, and end pre-copy after almost any first round. In Xen both
//!   count a round.
//! - The bounds are off by one: `N <= p2m_size` looks at a page past the end, `batch <= MAX_BATCH_SIZE` makes batches of 1,025 pages.
//! - `batch_set` is never emptied, so each batch would be sent again with all after it; and it is a set of pages that is divided by
//!   a speed and added to a count: its number of pages is meant, in the division times the page's size.
//! - `for (condition)` has no beginning and no step: it is a `while`.
//! - The text (section II-C) has "less than 50 pages were dirtied during the last pre-copy iteration"; algorithm and Xen count the pages
//!   sent and skipped in it: those dirtied during the one before. So one more round is made.
//!
//! # What is simplified
//!
//! Looking through memory takes no time, only sending does: as the paper has it. A round in which all is skipped takes none.

use crate::amount::{Overheads, PAGE, Pages};
use crate::guest::Guest;
use crate::rules::{Condition, Judge, Judged, Redirtied, Rules, Seen};
use godwit_memory::smart_stop::{BETWEEN_LOOKS, beside};
use godwit_units::BitRate;
use serde::Serialize;
use std::fmt;
use std::time::Duration;

/// Rounds after which no rule will end it: QEMU's never does where a guest is faster than the link.
const MOST_ROUNDS: usize = 1000;

/// The way that memory takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Link {
    /// What a move gets of it: goodput.
    pub rate: BitRate,
    /// What a move takes besides.
    pub overheads: Overheads,
}

/// What a page costs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cost {
    /// Bytes on the wire.
    pub bytes: f64,
    /// The least time that it takes, however fast the link: to be read, made small and rebuilt.
    pub seconds: f64,
}

/// What a hypervisor, or a codec, makes of pages.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Wire {
    /// Of a page in the first round, on average over all of the memory.
    pub first: Cost,
    /// Of one that is sent again.
    pub again: Cost,
    /// Of one that is sent again though the other end has it as it is: it was dirtied in the last round before its turn came in it. A hypervisor
    /// sends all of it, a codec next to nothing.
    pub same: Cost,
}

impl Wire {
    /// Every page as it is: the paper's.
    pub const PAGES: Self = {
        let page = Cost { bytes: PAGE.0 as f64, seconds: 0.0 };
        Self { first: page, again: page, same: page }
    };

    /// All pages that are sent again cost the same.
    #[must_use]
    pub const fn plain(first: Cost, again: Cost) -> Self {
        Self { first, again, same: again }
    }
}

/// A round of the copy; the last one is made while the guest stands.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Round {
    /// Pages sent.
    pub sent: Pages,
    /// Pages left to the next round, since they had been dirtied again.
    pub skipped: Pages,
    /// Pages dirtied meanwhile.
    pub dirtied: Pages,
    /// How long it takes.
    pub seconds: f64,
}

/// A move, as it will be.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Prediction {
    /// From the order to the guest's running at the destination, in seconds (equation 1 of the paper).
    pub total_s: f64,
    /// While the guest stands, in milliseconds (equation 2).
    pub downtime_ms: f64,
    /// What crosses the wire.
    pub bytes: u64,
    /// Rounds; the last one is the stop.
    pub rounds: Vec<Round>,
    /// What ends pre-copy.
    #[serde(skip)]
    pub ended_by: Condition,
}

/// Pre-copy does not end by itself, or ends with the guest where it was.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error(
    "by the rules `{rules}` this move {how}: after {rounds} rounds there are still {left} to send, {rest_ms} ms of the \
     link; give it a faster link or a longer limit of the downtime, or slow the guest down"
)]
pub struct NeverEnds {
    /// The rules' name.
    pub rules: String,
    /// Rounds that were simulated.
    pub rounds: usize,
    /// What is left after them.
    pub left: Pages,
    /// How long that would take; where the move is given up, the least that it would have taken after any round.
    pub rest_ms: u128,
    /// Which of them.
    pub how: Unending,
}

/// How pre-copy does without a stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unending {
    /// It goes on and on.
    Never,
    /// It ends, and the guest stays, since its pause would be longer than it may be.
    GivenUp,
}

impl fmt::Display for Unending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Never => "never ends",
            Self::GivenUp => "is given up",
        })
    }
}

/// Moves `guest` over `link`, every page as it is. At a rate of nothing all takes for ever, which is `f64::INFINITY`.
///
/// # Errors
/// The rules never end it.
pub fn simulate(guest: &mut impl Guest, link: Link, rules: &Rules) -> Result<Prediction, NeverEnds> {
    simulate_on(guest, link, &Wire::PAGES, rules)
}

/// Nothing takes no time, even where a page takes for ever.
fn times(count: f64, each: f64) -> f64 {
    if count > 0.0 { count * each } else { 0.0 }
}

/// What cannot be told lasts as long as anything can.
fn span(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
}

/// As [`simulate`], by a codec. Rules count pages, and time as it is with that codec.
///
/// # Errors
/// The rules never end it.
pub fn simulate_on(guest: &mut impl Guest, link: Link, wire: &Wire, rules: &Rules) -> Result<Prediction, NeverEnds> {
    let ram = guest.pages() as f64;
    let seconds_of = |cost: &Cost| cost.seconds.max(cost.bytes * 8.0 / link.rate.0 as f64);
    let (first, again, same) = (seconds_of(&wire.first), seconds_of(&wire.again), seconds_of(&wire.same));
    let skip = rules.redirtied == Redirtied::Skipped;
    let leaves = rules.leaves(link.rate);
    let mut judge = Judge::new(rules, Pages(guest.pages()));
    let (mut clock, mut all_sent, mut left) = (0.0, 0.0, ram);
    let mut bytes = 0.0;
    let mut rounds = vec![];
    let mut ended_by = None;
    // Pages dirtied in a second of the last round, and the most that a round has left; and whether all of memory was sent once: in the first round
    // nobody knows the one, and a round that a deadline ends leaves the other.
    let (mut dirties, mut most_left, mut fresh) = (0.0, 0.0, true);
    loop {
        let begin = clock;
        let (mut sent, mut skipped, mut unchanged) = (0.0, 0.0, 0.0);
        let changed_page = if fresh { first } else { again };
        let stopped = ended_by.is_some();
        loop {
            let mut most = rules.batch;
            if !stopped && leaves > 0.0 {
                let until_looked = left - sent - leaves;
                if until_looked <= 0.0 {
                    break;
                }
                most = most.min(until_looked.ceil() as u64);
            }
            let Some(batch) = guest.batch(most, skip && !stopped) else { break };
            sent += batch.sent;
            skipped += batch.skipped;
            unchanged += batch.same;
            clock = begin + times(sent - unchanged, changed_page) + times(unchanged, same);
            if !stopped {
                guest.run_until(clock);
                let unsent = left - sent;
                let dirtied = beside(unsent, dirties * (clock - begin), most_left);
                let rest = times(unsent, changed_page) + times(dirtied, again);
                ended_by = judge.look(span(rest), span(clock));
                if ended_by.is_some() {
                    break;
                }
            }
        }
        all_sent += sent;
        let changed_bytes = if fresh { wire.first.bytes } else { wire.again.bytes };
        bytes += (sent - unchanged) * changed_bytes + unchanged * wire.same.bytes;
        let lately = guest.lately(BETWEEN_LOOKS.as_secs_f64());
        let cleaned = guest.clean();
        rounds.push(Round {
            sent: Pages::nearest(sent),
            skipped: Pages::nearest(skipped),
            dirtied: Pages::nearest(if stopped { 0.0 } else { cleaned.dirtied }),
            seconds: clock - begin,
        });
        if let Some(ended_by) = ended_by.filter(|_| stopped) {
            let Overheads { pre, post } = link.overheads;
            return Ok(Prediction {
                total_s: pre.as_secs_f64() + clock + post.as_secs_f64(),
                downtime_ms: (clock - begin + post.as_secs_f64()) * 1e3,
                bytes: bytes.round() as u64,
                rounds,
                ended_by,
            });
        }
        left = cleaned.left;
        if ended_by.is_some() {
            continue;
        }
        (fresh, most_left) = (false, left.max(most_left));
        dirties = if clock > begin { cleaned.dirtied / (clock - begin) } else { 0.0 };
        // A node takes what is left to be as costly as what it has just sent again.
        let each = if rounds.len() > 1 && sent > 0.0 { (clock - begin) / sent } else { again };
        let (rest, elapsed) = (span(left * each), span(clock));
        let rewritten = times(lately / BETWEEN_LOOKS.as_secs_f64(), left * each);
        let dirtied = cleaned.dirtied;
        let seen = Seen { sent, skipped, dirtied, left, all_sent, ram, rest, again: rewritten, elapsed };
        let never = |rest: Duration, how| NeverEnds {
            rules: rules.name.clone(),
            rounds: rounds.len(),
            left: Pages::nearest(left),
            rest_ms: rest.as_millis(),
            how,
        };
        match judge.round(&seen) {
            Judged::Ends(why) => ended_by = Some(why),
            Judged::GivesUp(least) => return Err(never(least, Unending::GivenUp)),
            Judged::GoesOn if rounds.len() >= MOST_ROUNDS => return Err(never(rest, Unending::Never)),
            Judged::GoesOn => {}
        }
    }
}
