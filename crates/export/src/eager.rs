//! Whether to look for a client's next request for a moment before sleeping until it comes.
//!
//! A client that asks one thing at a time asks the next within microseconds of its answer. To wake a processor that has gone to sleep meanwhile
//! takes longer than that, several times longer in a virtual machine, and costs more of it than looking. A client that takes longer is not worth
//! looking for. The kernel's hypervisor decides the same question for sleeping guests in the same way (`halt_poll_ns`).
//!
//! # What can go wrong
//!
//! *Looking keeps the client from the processor that both share.* Then it never succeeds; after a failure there is none for [`RESTS`] waits.
//! *The client is an idle guest*: as that.
//!
//! Pure: how long waits took in, how long to look out.

use std::time::Duration;

/// The longest look: what it costs to sleep and be woken, on the virtual machines where this was measured.
const LONGEST: Duration = Duration::from_micros(30);
/// Waits that pass without looking after one was in vain: at worst a part in a hundred is lost.
const RESTS: u32 = 100;

/// What a client's last requests say of its next.
#[derive(Clone, Copy, Debug, Default)]
pub struct Eager {
    /// It came so quickly that looking for it would have paid.
    quick: bool,
    rests: u32,
}

impl Eager {
    /// How long to look before sleeping; zero: not at all.
    pub fn look(&self) -> Duration {
        if self.quick && self.rests == 0 { LONGEST } else { Duration::ZERO }
    }

    /// The wait is over: it took so long, and looking was enough or not.
    pub fn waited(&mut self, took: Duration, looked: Duration, found: bool) {
        if !looked.is_zero() && !found {
            self.rests = RESTS;
        } else {
            self.rests = self.rests.saturating_sub(1);
        }
        // Being woken is part of what was measured.
        self.quick = took <= LONGEST * 4;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is lost by looking, of the time, with a client that takes so long whenever it is looked for or not.
    fn lost(client: Duration) -> f64 {
        let (mut eager, mut looking, mut all) = (Eager::default(), Duration::ZERO, Duration::ZERO);
        for _ in 0..10_000 {
            let look = eager.look();
            let found = client <= look;
            let took = if found { client } else { look + client };
            looking += if found { Duration::ZERO } else { look };
            all += took;
            eager.waited(took, look, found);
        }
        looking.as_secs_f64() / all.as_secs_f64()
    }

    #[test]
    fn a_quick_client_is_looked_for_and_a_slow_one_costs_next_to_nothing() {
        let mut eager = Eager::default();
        assert!(eager.look().is_zero(), "nothing is known of it yet");
        eager.waited(Duration::from_micros(60), Duration::ZERO, false);
        assert_eq!(eager.look(), LONGEST);
        for micros in [1, 10, 29] {
            assert!(lost(Duration::from_micros(micros)) == 0.0, "{micros}");
        }
        for micros in [31, 50, 100, 1000, 1_000_000] {
            assert!(lost(Duration::from_micros(micros)) < 0.011, "{micros}: {}", lost(Duration::from_micros(micros)));
        }
    }
}
