//! When a hypervisor ends pre-copy, as data.
//!
//! [`Rules`] are conditions, any of which ends pre-copy, and what the hypervisor does with a page that was dirtied again before
//! it was sent. [`Judge`] applies them, round by round; it is the same whether the rounds are simulated or real.
//!
//! - `xen` (section II-C of the paper): fewer than 50 pages in a round, 29 rounds, or more than 3 times the RAM sent. The first is
//!   what Xen counts, pages sent and skipped *in* the round; the paper's text says "dirtied during" it.
//! - `qemu`: what is left is estimated to take no longer than the limit of the downtime. Nothing else ends it.
//! - `smart-stop` (CloudNet, section 3.2.1): rounds are of use while more is sent than dirtied. From the first round on in which
//!   as much is dirtied as sent, the least of the last rounds is waited for: when no more is to be sent than at the start of any
//!   round in a sliding window, the guest is stopped. CloudNet says "less"; a guest that dirties at an even rate has
//!   rounds that are all alike and would be waited for in vain, so "no more" is what is asked for here. Few pages and Xen's number of
//!   rounds end it, too. The window's length is not in CloudNet's paper: 5 rounds.
//! - `godwit`: what Godwit's node does with its QEMU, by the very rule that it has ([`SmartStop`]).

use crate::amount::{PAGE, Pages};
use crate::bounds::copies_less_a_page;
use godwit_memory::smart_stop::{Ended, Look, MOST, SmartStop, Verdict};
use godwit_units::{BitRate, Bytes, Policy};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::fmt;
use std::time::Duration;

/// Pages that Xen reads, and sends, at a time.
pub const BATCH: u64 = 1024;

/// One reason to end pre-copy.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Condition {
    /// Fewer pages than this were sent and skipped in the round.
    FewerThan(Pages),
    /// So many rounds were made.
    Rounds(u32),
    /// More than so many times the RAM was sent.
    TimesRam(u32),
    /// What is left is estimated to take no longer.
    PauseWithin {
        /// The limit of the downtime.
        limit: Duration,
        /// What the hypervisor takes the link's rate to be; none: what it is.
        bandwidth: Option<BitRate>,
    },
    /// Pages dirtied have caught up with pages sent, and no more is left than at any start of the last rounds.
    LocalMinimum {
        /// How many rounds back.
        window: usize,
    },
    /// [`SmartStop`] says so, of a move that is to spare this.
    SmartStop(Policy),
}

impl fmt::Display for Condition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::FewerThan(pages) => write!(f, "a round had fewer than {pages}"),
            Self::Rounds(rounds) => write!(f, "{rounds} rounds were made"),
            Self::TimesRam(times) => write!(f, "more than {times} times the memory was sent"),
            Self::PauseWithin { limit, .. } => write!(f, "the rest takes no more than {} ms", limit.as_millis()),
            Self::LocalMinimum { window } => {
                write!(f, "no more is left than at the starts of the {window} rounds before")
            }
            Self::SmartStop(Policy::LeastBytes) => f.write_str("every further round would send pages again"),
            Self::SmartStop(Policy::LeastTotal) => {
                f.write_str("as much is dirtied as is sent, or the rest is short enough")
            }
            Self::SmartStop(_) => f.write_str("the rest is short enough, or gets no shorter"),
        }
    }
}

/// What becomes of a page that was dirtied again before its turn came.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Redirtied {
    /// It is left to the next round (Xen: "likely to be transferred in the next iteration").
    Skipped,
    /// It is sent, and in the next round again (QEMU).
    Sent,
}

/// When a hypervisor ends pre-copy.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rules {
    /// What they are called.
    pub name: String,
    /// Any of these ends it.
    pub conditions: Vec<Condition>,
    /// What becomes of a page that was dirtied again before its turn came.
    pub redirtied: Redirtied,
    /// Pages that are sent between two looks at what is dirty.
    pub batch: u64,
}

impl Rules {
    /// Xen's (3.3, which the paper measured).
    #[must_use]
    pub fn xen() -> Self {
        let conditions = vec![Condition::FewerThan(Pages(50)), Condition::Rounds(29), Condition::TimesRam(3)];
        Self { name: "xen".into(), conditions, redirtied: Redirtied::Skipped, batch: BATCH }
    }

    /// QEMU's, with its `downtime-limit`; what QEMU does not set itself is 300 ms.
    #[must_use]
    pub fn qemu(limit: Duration) -> Self {
        let conditions = vec![Condition::PauseWithin { limit, bandwidth: None }];
        Self { name: "qemu".into(), conditions, redirtied: Redirtied::Sent, batch: BATCH }
    }

    /// CloudNet's, on its hypervisor, Xen.
    #[must_use]
    pub fn smart_stop() -> Self {
        let conditions =
            vec![Condition::FewerThan(Pages(50)), Condition::Rounds(29), Condition::LocalMinimum { window: 5 }];
        Self { name: "smart-stop".into(), conditions, redirtied: Redirtied::Skipped, batch: BATCH }
    }

    /// So many pages a round leaves: QEMU looks for dirty pages as soon as what is left is within its limit, not at the end.
    #[must_use]
    pub(crate) fn leaves(&self, rate: BitRate) -> f64 {
        let leaves = |condition: &Condition| match condition {
            Condition::PauseWithin { limit, bandwidth } => {
                bandwidth.unwrap_or(rate).bytes_in(*limit).0 as f64 / PAGE.0 as f64
            }
            _ => 0.0,
        };
        self.conditions.iter().map(leaves).fold(0.0, f64::max)
    }

    /// Godwit's own, of the node, on QEMU, for a move that is to have the least downtime.
    #[must_use]
    pub fn godwit() -> Self {
        Self::godwit_to(Policy::default())
    }

    /// Godwit's own for a move that is to spare this.
    #[must_use]
    pub fn godwit_to(policy: Policy) -> Self {
        let conditions = vec![Condition::SmartStop(policy), Condition::Rounds(MOST as u32)];
        Self { name: "godwit".into(), conditions, redirtied: Redirtied::Sent, batch: BATCH }
    }

    /// What a move is to spare that is judged by these.
    fn policy(&self) -> Policy {
        let of = |condition: &Condition| match condition {
            Condition::SmartStop(policy) => Some(*policy),
            _ => None,
        };
        self.conditions.iter().find_map(of).unwrap_or_default()
    }

    /// The most that may be sent of `memory`, the last copy included; none where nothing bounds it.
    #[must_use]
    pub fn most_sent(&self, memory: Bytes) -> Option<Bytes> {
        let bound = |condition: &Condition| match condition {
            // At most the limit before the last round of pre-copy, that round, and the stop.
            Condition::TimesRam(times) => Some(copies_less_a_page(memory, u64::from(*times) + 2)),
            Condition::Rounds(rounds) => Some(Bytes(memory.0.saturating_mul(u64::from(*rounds) + 1))),
            _ => None,
        };
        self.conditions.iter().filter_map(bound).min()
    }
}

/// A round of pre-copy that is over. Models count in fractions of pages.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Seen {
    /// Sent in it.
    pub sent: f64,
    /// Left to the next one in it.
    pub skipped: f64,
    /// Dirtied during it.
    pub dirtied: f64,
    /// To be sent in the next one.
    pub left: f64,
    /// Sent in all rounds.
    pub all_sent: f64,
    /// All there are.
    pub ram: f64,
    /// How long what is left would take.
    pub rest: Duration,
    /// Pages that the guest is expected to write while that goes, by what it has written of late: the price of another round.
    pub again: f64,
    /// Since the first round began. A deadline among the rules is what of it is left then ([`Policy::sooner`]).
    pub elapsed: Duration,
}

/// What rules say of a round.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Judged {
    /// Another one.
    GoesOn,
    /// Pre-copy ends, for this.
    Ends(Condition),
    /// The move does: the pause would be longer than it may be ([`Policy::MaxDowntime`]). At the least it would have been this.
    GivesUp(Duration),
}

/// Applies rules to rounds.
#[derive(Clone, Debug)]
pub struct Judge<'a> {
    rules: &'a Rules,
    rounds: u32,
    caught_up: bool,
    /// What there was to send at the starts of rounds, the newest last.
    starts: VecDeque<f64>,
    smart: SmartStop,
}

impl<'a> Judge<'a> {
    /// Before the first round, in which all of `ram` is to be sent.
    #[must_use]
    pub fn new(rules: &'a Rules, ram: Pages) -> Self {
        let (starts, smart) = (VecDeque::from([ram.0 as f64]), SmartStop::new(rules.policy()));
        Self { rules, rounds: 0, caught_up: false, starts, smart }
    }

    /// Whether pre-copy ends in the middle of a round, by which of the rules: what is left would take `rest` if the guest were stopped now, so
    /// long after the first round began.
    pub fn look(&mut self, rest: Duration, elapsed: Duration) -> Option<Condition> {
        let goes_by_it = |condition: &&Condition| matches!(condition, Condition::SmartStop(_));
        let condition = self.rules.conditions.iter().find(goes_by_it)?;
        self.smart.look(&Look { left: rest, elapsed }).map(|_| *condition)
    }

    /// A round is over.
    pub fn round(&mut self, seen: &Seen) -> Judged {
        self.rounds += 1;
        self.caught_up |= seen.dirtied >= seen.sent;
        let (sent, dirtied) = (Pages::nearest(seen.sent).0, Pages::nearest(seen.left).0);
        let Seen { rest: left, elapsed, .. } = *seen;
        let again = Some(Pages::nearest(seen.again).0);
        let round = Ended { sent, dirtied, left, elapsed, can_slow: false, follows: false, again };
        let smart = self.smart.round(&round);
        let holds = |condition: &&Condition| self.holds(condition, seen, smart != Verdict::GoOn);
        let judged = match (smart, self.rules.conditions.iter().find(holds)) {
            (Verdict::GiveUp(least), Some(Condition::SmartStop(_))) => Judged::GivesUp(least),
            (_, Some(condition)) => Judged::Ends(*condition),
            (_, None) => Judged::GoesOn,
        };
        self.starts.push_back(seen.left);
        let window = self.rules.conditions.iter().filter_map(|c| match c {
            Condition::LocalMinimum { window } => Some(*window),
            _ => None,
        });
        let longest = window.max().unwrap_or(0);
        while self.starts.len() > longest {
            self.starts.pop_front();
        }
        judged
    }

    fn holds(&self, condition: &Condition, seen: &Seen, smart: bool) -> bool {
        match condition {
            Condition::FewerThan(pages) => seen.sent + seen.skipped < pages.0 as f64,
            Condition::Rounds(rounds) => self.rounds >= *rounds,
            Condition::TimesRam(times) => seen.all_sent > seen.ram * f64::from(*times),
            Condition::PauseWithin { limit, bandwidth: None } => seen.rest <= *limit,
            Condition::PauseWithin { limit, bandwidth: Some(rate) } => {
                rate.time_for(Pages::nearest(seen.left).bytes()) <= *limit
            }
            Condition::SmartStop(_) => smart,
            Condition::LocalMinimum { window } => {
                self.caught_up && self.starts.iter().rev().take(*window).all(|start| seen.left <= *start)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(sent: f64, dirtied: f64) -> Seen {
        let elapsed = Duration::ZERO;
        Seen {
            sent,
            skipped: 0.0,
            dirtied,
            left: dirtied,
            all_sent: sent,
            ram: 1e6,
            rest: Duration::from_secs(1),
            again: f64::INFINITY,
            elapsed,
        }
    }

    /// The round that ends it, and why, of rounds that have so many pages to send each.
    fn ends(rules: &Rules, pages: &[f64]) -> Option<(usize, Condition)> {
        let mut judge = Judge::new(rules, Pages(1_000_000));
        let mut rounds = pages.windows(2).enumerate();
        rounds.find_map(|(i, pair)| match judge.round(&seen(pair[0], pair[1])) {
            Judged::Ends(why) => Some((i + 1, why)),
            _ => None,
        })
    }

    #[test]
    fn xen_goes_on_with_50_pages_and_stops_with_49() {
        let why = Condition::FewerThan(Pages(50));
        assert_eq!(ends(&Rules::xen(), &[1e6, 50.0, 49.0, 0.0]), Some((3, why)));
    }

    #[test]
    fn xen_counts_what_it_skipped_among_the_few_pages() {
        let rules = Rules::xen();
        let skipping = Seen { skipped: 25.0, ..seen(25.0, 0.0) };
        assert_eq!(Judge::new(&rules, Pages(1)).round(&skipping), Judged::GoesOn);
        let fewer = Seen { skipped: 24.0, ..seen(25.0, 0.0) };
        assert_ne!(Judge::new(&rules, Pages(1)).round(&fewer), Judged::GoesOn);
    }

    #[test]
    fn xen_goes_on_at_three_times_the_memory_and_stops_past_it() {
        let rules = Rules::xen();
        let at = |all_sent| Judge::new(&rules, Pages(1)).round(&Seen { all_sent, ..seen(1000.0, 1000.0) });
        assert_eq!((at(3e6), at(3e6 + 1.0)), (Judged::GoesOn, Judged::Ends(Condition::TimesRam(3))));
    }

    #[test]
    fn xen_makes_29_rounds() {
        let rules = Rules { conditions: vec![Condition::Rounds(29)], ..Rules::xen() };
        assert_eq!(ends(&rules, &[100.0; 40]), Some((29, Condition::Rounds(29))));
    }

    #[test]
    fn smart_stop_waits_until_dirtied_pages_have_caught_up_and_then_for_the_least_in_its_window() {
        // Fewer each time, but more is sent than dirtied: there is still something to win.
        let falling = [1e6, 9e5, 8e5, 7e5, 6e5, 5e5, 4e5];
        assert_eq!(ends(&Rules::smart_stop(), &falling), None);
        // Caught up in the fourth round, and the least of the last five at the end of the sixth.
        let wavy = [1e6, 3e5, 2e5, 1e5, 1.5e5, 1.2e5, 0.9e5, 0.8e5];
        assert_eq!(ends(&Rules::smart_stop(), &wavy), Some((6, Condition::LocalMinimum { window: 5 })));
        // What is older than the window does not count.
        let risen = [1e6, 1e4, 2e5, 2.1e5, 2.2e5, 2.1e5, 2.3e5, 2.0e5, 1.9e5];
        assert_eq!(ends(&Rules::smart_stop(), &risen).map(|(round, _)| round), Some(7));
    }

    #[test]
    fn smart_stop_does_not_wait_for_a_wave_of_a_guest_that_has_none() {
        let even = [1e6, 5e5, 5e5, 5e5, 5e5];
        assert_eq!(ends(&Rules::smart_stop(), &even).map(|(round, _)| round), Some(2));
    }

    #[test]
    fn godwit_goes_on_while_rounds_get_shorter_and_ends_once_they_do_not_or_are_short_enough() {
        let after = |rest: &dyn Fn(usize) -> u64| {
            let rules = Rules::godwit();
            let mut judge = Judge::new(&rules, Pages(1));
            let pages = |n| rest(n) as f64;
            let ms = |n: usize| Seen {
                rest: Duration::from_millis(rest(n)),
                ..seen(if n == 1 { 1e6 } else { pages(n - 1) }, pages(n))
            };
            (1..).find(|n| judge.round(&ms(*n)) != Judged::GoesOn).unwrap_or(0)
        };
        assert_eq!(after(&|n| [5000, 900, 200, 20][(n - 1).min(3)]), 4);
        assert_eq!(after(&|_| 500), 3);
        assert_eq!(after(&|n| 100_000 / n as u64), 30);
        assert_eq!(after(&|n| 1000 + n as u64 * 100), 8);
    }

    #[test]
    fn a_move_is_judged_by_what_it_is_to_spare() {
        let (ms, s) = (Duration::from_millis, Duration::from_secs);
        // Rounds that leave ever less, of which each takes as long as it says, and then no less any more.
        let rests = [5000, 1500, 900, 600, 600, 600, 600, 600, 600, 600, 600, 600];
        let ends = |policy| {
            let rules = Rules::godwit_to(policy);
            let (mut judge, mut elapsed) = (Judge::new(&rules, Pages(1)), Duration::ZERO);
            let judged = rests.windows(2).map(|pair| {
                elapsed += ms(pair[0]);
                let rest = ms(pair[1]);
                judge.round(&Seen { rest, elapsed, ..seen(pair[0] as f64, pair[1] as f64) })
            });
            judged.enumerate().find(|(_, judged)| *judged != Judged::GoesOn).map(|(i, judged)| (i + 1, judged))
        };
        let stops = |round, policy| Some((round, Judged::Ends(Condition::SmartStop(policy))));
        for (round, policy) in [
            (1, Policy::LeastBytes),
            (4, Policy::LeastTotal),
            (4, Policy::LeastDowntime),
            (2, Policy::MaxDowntime(s(1))),
            (1, Policy::Deadline(ms(6500))),
        ] {
            assert_eq!(ends(policy), stops(round, policy), "{policy}");
        }
        let too_short = ends(Policy::MaxDowntime(ms(300)));
        assert!(matches!(too_short, Some((_, Judged::GivesUp(least))) if least == ms(600)), "{too_short:?}");
    }

    #[test]
    fn another_round_that_costs_little_is_had_where_the_fewest_bytes_are_wanted_and_no_more_than_two() {
        let round = |sent, dirtied, again| Seen { again, ..seen(sent, dirtied) };
        let rules = Rules::godwit_to(Policy::LeastBytes);
        let first = |again| Judge::new(&rules, Pages(85_000)).round(&round(85_000.0, 16_000.0, again));
        let ends = Judged::Ends(Condition::SmartStop(Policy::LeastBytes));
        assert_eq!([first(500.0), first(6800.0), first(6900.0)], [Judged::GoesOn, Judged::GoesOn, ends]);
        let mut judge = Judge::new(&rules, Pages(85_000));
        let mut next = |sent, dirtied| judge.round(&round(sent, dirtied, 500.0));
        assert_eq!(
            [next(85_000.0, 16_000.0), next(16_000.0, 4000.0), next(4000.0, 2000.0)],
            [Judged::GoesOn, Judged::GoesOn, ends]
        );
    }

    #[test]
    fn only_a_deadline_ends_pre_copy_in_the_middle_of_a_round() {
        let s = Duration::from_secs;
        let policy = Policy::Deadline(s(60));
        let looks = |rules: &Rules| {
            let mut judge = Judge::new(rules, Pages(1));
            [20, 42].map(|rest| judge.look(s(rest), s(17)))
        };
        assert_eq!(looks(&Rules::godwit_to(policy)), [None, Some(Condition::SmartStop(policy))]);
        for rules in [Rules::godwit(), Rules::xen(), Rules::qemu(s(1))] {
            assert_eq!(looks(&rules), [None; 2], "{}", rules.name);
        }
    }

    #[test]
    fn qemu_believes_the_bandwidth_that_it_was_given() {
        let limit = Duration::from_millis(300);
        let with =
            |bandwidth| Rules { conditions: vec![Condition::PauseWithin { limit, bandwidth }], ..Rules::qemu(limit) };
        // 100 pages, 3.3 Mbit: 33 s, 0.33 s and 0.033 s.
        for (mbit, is_enough) in [(0.1, false), (10.0, false), (100.0, true)] {
            let rules = with(Some(BitRate::from_mbit(mbit)));
            assert_eq!(ends(&rules, &[1e6, 100.0]).is_some(), is_enough, "{mbit}");
        }
        assert_eq!(ends(&with(None), &[1e6, 100.0]), None, "by the link itself it takes 1 s");
    }
}
