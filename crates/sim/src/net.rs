//! The network between the sites: what becomes of a message.

use rand::Rng;
use rand::rngs::SmallRng;

/// A message may be this old when it arrives, in ticks: older than several whole attempts.
pub const OLDEST: u64 = 400;

/// How the network treats messages at present.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weather {
    /// Loss, doubles, long delays.
    Bad,
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
        Weather::Bad => {
            let first = (!rng.random_ratio(15, 100)).then(|| delay(rng));
            let second = rng.random_ratio(20, 100).then(|| delay(rng));
            [first, second]
        }
    }
}

fn delay(rng: &mut SmallRng) -> u64 {
    if rng.random_ratio(1, 4) { rng.random_range(30..=OLDEST) } else { rng.random_range(1..=20) }
}
