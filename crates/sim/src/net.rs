//! The network between the sites: what becomes of a message.

use rand::Rng;
use rand::rngs::SmallRng;

/// A message may be this old when it arrives, in ticks: older than several whole attempts.
pub const OLDEST: u64 = 600;

/// How the network treats messages at present.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weather {
    /// Loss, doubles, long delays.
    Bad,
    /// As bad, and much of it comes when nobody thinks of it any more.
    Stale,
    /// Nothing passes.
    Cut,
    /// Everything passes, soon.
    Fair,
}

/// The delays after which copies of a message arrive: none, one or two.
pub fn fate(rng: &mut SmallRng, weather: Weather) -> [Option<u64>; 2] {
    match weather {
        Weather::Cut => [None, None],
        Weather::Fair => [Some(rng.random_range(1..=5)), None],
        Weather::Bad | Weather::Stale => {
            let (late, oldest) = match weather {
                Weather::Stale if rng.random_ratio(1, 2) => (60, 120),
                Weather::Stale => (60, OLDEST),
                _ => (25, OLDEST),
            };
            let first = (!rng.random_ratio(15, 100)).then(|| delay(rng, late, oldest));
            let second = rng.random_ratio(20, 100).then(|| delay(rng, late, oldest));
            [first, second]
        }
    }
}

fn delay(rng: &mut SmallRng, late: u32, oldest: u64) -> u64 {
    if rng.random_ratio(late, 100) { rng.random_range(30..=oldest) } else { rng.random_range(1..=20) }
}
