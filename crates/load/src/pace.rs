//! How much is due by now.
//!
//! A load that was stopped with its VM must not make up for the lost time in one burst when it wakes on the other
//! side: that burst would be an artefact of the move, counted as the guest's own. So at most [`CATCH_UP`] worth of
//! work is ever owed.

use std::time::Duration;

/// The most that a late load makes up for.
pub const CATCH_UP: Duration = Duration::from_millis(100);

/// Turns elapsed time into units of work. Knows no clock: the caller says what time it is, counted from any origin.
#[derive(Debug)]
pub struct Pacer {
    per_s: f64,
    owed: f64,
    last: Duration,
}

impl Pacer {
    /// Owes nothing at `now`.
    pub fn new(per_s: f64, now: Duration) -> Self {
        Self { per_s, owed: 0.0, last: now }
    }

    /// Forgets the time up to `now`: it was not the load's own.
    pub fn skip_to(&mut self, now: Duration) {
        self.last = now;
    }

    /// Takes what is due at `now`, at most `most`; the rest stays owed.
    pub fn take(&mut self, now: Duration, most: u64) -> u64 {
        let elapsed = now.saturating_sub(self.last).as_secs_f64();
        self.last = self.last.max(now);
        // A slow load must be able to save up for a whole unit.
        let limit = (self.per_s * CATCH_UP.as_secs_f64()).max(1.0);
        self.owed = (self.owed + elapsed * self.per_s).min(limit);
        let units = (self.owed as u64).min(most);
        self.owed -= units as f64;
        units
    }

    /// Whether a unit is still owed after the last [`Self::take`].
    pub fn is_behind(&self) -> bool {
        self.owed >= 1.0
    }

    /// Time from the last [`Self::take`] until the next unit is due; `None` if none ever is.
    pub fn until_next(&self) -> Option<Duration> {
        (self.per_s > 0.0).then(|| Duration::from_secs_f64(((1.0 - self.owed) / self.per_s).max(0.0)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    #[test]
    fn the_rate_is_met_over_time() {
        for per_s in [3.0, 150.0, 2000.0, 123_456.0] {
            let mut pacer = Pacer::new(per_s, ms(0));
            let done: u64 = (1..=10_000).map(|tick| pacer.take(ms(tick), u64::MAX)).sum();
            assert!((done as f64 - per_s * 10.0).abs() <= 2.0, "{done} of {}", per_s * 10.0);
        }
    }

    #[test]
    fn a_stopped_load_does_not_make_up_for_the_stop() {
        let mut pacer = Pacer::new(2000.0, ms(0));
        pacer.take(ms(10), u64::MAX);
        assert_eq!(pacer.take(ms(60_010), u64::MAX), 200);
    }

    #[test]
    fn what_is_not_taken_stays_owed() {
        let mut pacer = Pacer::new(1000.0, ms(0));
        assert_eq!(pacer.take(ms(50), 30), 30);
        assert!(pacer.is_behind());
        assert_eq!(pacer.take(ms(50), 30), 20);
        assert!(!pacer.is_behind());
        assert_eq!(pacer.until_next(), Some(ms(1)));
        assert_eq!(Pacer::new(0.0, ms(0)).until_next(), None);
    }

    #[test]
    fn time_that_runs_backwards_owes_nothing() {
        let mut pacer = Pacer::new(1000.0, ms(100));
        assert_eq!(pacer.take(ms(50), u64::MAX), 0);
        assert_eq!(pacer.take(ms(101), u64::MAX), 1);
    }
}
