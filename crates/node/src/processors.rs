//! What the machine's processors do.

use godwit_content::choose::Now;
use rustix::time::{ClockId, clock_gettime};
use std::time::Duration;

/// What /proc counts in, on every architecture that matters here.
const TICKS_A_SECOND: f64 = 100.0;

/// Time since any moment.
pub(crate) fn clock() -> Duration {
    Duration::try_from(clock_gettime(ClockId::Monotonic)).unwrap_or_default()
}

/// What time it is, and how long all of the machine's processors together have had nothing to do since it started. A machine that does not say has none
/// to spare.
pub(crate) fn now() -> Now {
    let stat = std::fs::read_to_string("/proc/stat").unwrap_or_default();
    Now { at: clock(), idle: idle(&stat).unwrap_or_default() }
}

/// One that waits for a disk has nothing to do, either.
fn idle(stat: &str) -> Option<Duration> {
    let line = stat.lines().find_map(|line| line.strip_prefix("cpu "))?;
    let mut ticks = line.split_whitespace().skip(3).map_while(|word| word.parse::<u64>().ok());
    let idle = ticks.next()? + ticks.next()?;
    Some(Duration::from_secs_f64(idle as f64 / TICKS_A_SECOND))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_is_what_no_process_had() {
        let stat = "cpu  10 20 30 4000 500 6 7 8 9 10\ncpu0 1 2 3 4 5 6 7 8 9 10\n";
        assert_eq!(idle(stat), Some(Duration::from_secs(45)));
        assert_eq!([idle(""), idle("cpu  1 2 3\n"), idle("cpu  1 2 3 four 5\n")], [None; 3]);
    }

    #[test]
    fn this_machine_says_it() {
        let (before, began) = (now(), std::time::Instant::now());
        std::thread::sleep(Duration::from_millis(30));
        let after = now();
        assert!(before.at < after.at && after.idle > Duration::ZERO);
        let most =
            (began.elapsed() + Duration::from_millis(20)) * std::thread::available_parallelism().unwrap().get() as u32;
        assert!(after.idle.saturating_sub(before.idle) <= most * 2, "{before:?} {after:?}");
    }
}
