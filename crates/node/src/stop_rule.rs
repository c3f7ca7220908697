//! When to end pre-copy: after which round over the memory the guest is stopped.
//!
//! A round sends what was dirtied during the one before. While rounds get shorter, another one makes the pause shorter; once they
//! do not, it only costs bytes. CloudNet's Smart Stop goes further (its section 3.2.2); this is the floor.

use std::fmt;
use std::time::Duration;

/// A pause that nobody notices against the round trips of the hand-off: no need to go on below it.
const GOOD_ENOUGH: Duration = Duration::from_millis(30);
/// Rounds before improvement is judged: the first one sends everything, the second what the first left behind.
const LEAST: usize = 3;
/// Rounds without a new minimum that are waited for.
const PATIENCE: usize = 3;
/// Rounds after which it is over whatever they look like.
const MOST: usize = 30;

/// Why pre-copy ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// What is left takes so little time that another round would gain nothing.
    GoodEnough(Duration),
    /// Rounds get no shorter; this is what is left, and the least that there was.
    NoShorter(Duration, Duration),
    /// There were too many rounds.
    TooMany(Duration),
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::GoodEnough(left) => {
                let (left, good) = (left.as_millis(), GOOD_ENOUGH.as_millis());
                write!(f, "stop: the rest is predicted to take {left} ms, at most {good} ms is short enough")
            }
            Self::NoShorter(left, best) => {
                let (left, best) = (left.as_millis(), best.as_millis());
                write!(
                    f,
                    "stop: rounds get no shorter, the rest is predicted to take {left} ms, at best it was {best} ms"
                )
            }
            Self::TooMany(left) => {
                write!(f, "stop: {MOST} rounds are enough, the rest is predicted to take {} ms", left.as_millis())
            }
        }
    }
}

/// The rule, fed at the end of each round.
#[derive(Clone, Debug, Default)]
pub struct StopRule {
    rounds: usize,
    best: Option<Duration>,
    since_best: usize,
}

impl StopRule {
    /// A round ended, and the pages dirtied meanwhile are expected to take `left` on the link. Why to stop now, if so.
    pub fn round(&mut self, left: Duration) -> Option<Reason> {
        self.rounds += 1;
        // The first round's remainder is what the guest dirtied during minutes: nothing to compare with.
        if self.rounds >= 2 {
            match self.best {
                Some(best) if left >= best.mul_f64(0.95) => self.since_best += 1,
                _ => {
                    self.best = Some(left);
                    self.since_best = 0;
                }
            }
        }
        if self.rounds >= 2 && left <= GOOD_ENOUGH {
            return Some(Reason::GoodEnough(left));
        }
        if self.rounds >= MOST {
            return Some(Reason::TooMany(left));
        }
        // Having waited, stop at a round that is as good as the best one, or when that does not come any more.
        let stop = self.rounds >= LEAST
            && self.since_best >= PATIENCE
            && (self.best.is_none_or(|best| left <= best.mul_f64(1.1)) || self.since_best >= 2 * PATIENCE);
        stop.then(|| Reason::NoShorter(left, self.best.unwrap_or(left)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stops_after(left: impl Fn(usize) -> u64) -> usize {
        let mut rule = StopRule::default();
        (1..).find(|n| rule.round(Duration::from_millis(left(*n))).is_some()).unwrap_or(0)
    }

    #[test]
    fn a_guest_that_dirties_little_is_stopped_as_soon_as_its_pause_would_be_short() {
        assert_eq!(stops_after(|n| [5000, 900, 200, 20][(n - 1).min(3)]), 4);
    }

    #[test]
    fn a_guest_whose_rounds_get_no_shorter_is_stopped_once_that_is_clear() {
        assert!((5..=9).contains(&stops_after(|_| 500)));
    }

    #[test]
    fn rounds_that_get_shorter_are_let_go_on() {
        assert!(stops_after(|n| 100_000 / n as u64) >= 20);
    }

    #[test]
    fn it_ends_even_when_each_round_is_longer() {
        assert!(stops_after(|n| 1000 + n as u64 * 100) <= MOST);
    }

    #[test]
    fn the_reason_says_what_was_predicted() {
        let ms = Duration::from_millis;
        let mut rule = StopRule::default();
        assert_eq!(rule.round(ms(900)), None);
        let reason = rule.round(ms(20)).unwrap();
        assert_eq!(reason, Reason::GoodEnough(ms(20)));
        assert!(reason.to_string().contains("predicted to take 20 ms, at most 30 ms"), "{reason}");
    }
}
