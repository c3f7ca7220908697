//! Whether to look for a client's next request for a moment before sleeping until it comes.
//!
//! A client that asks one thing at a time asks the next within microseconds of its answer. To wake a processor that has gone to sleep meanwhile
//! takes longer than that, several times longer in a virtual machine, and costs more of it than looking. A client that takes longer is not worth
//! looking for. The kernel's hypervisor decides the same question for sleeping guests in the same way (`halt_poll_ns`).
//!
//! # What can go wrong
//!
//! *Looking keeps the client from the processor that both share.* Then it never succeeds; after each failure in a row there is none for twice
//! as many waits, from [`RESTS`] to [`MOST_RESTS`].
//! *The client is an idle guest*: as that.
//!
//! Pure: how long waits took in, how long to look out.

use std::time::Duration;

/// The longest look. The client's processor sleeps, too, and has to be woken by the answer: on the virtual machine where this was measured,
/// 30 microseconds were no better than none (17 900 reads a second at depth 1), these 1.6 times as fast (28 500), and a request took no more
/// of the processor (25.8 and 26.6 microseconds).
const LONGEST: Duration = Duration::from_micros(80);
/// Waits that pass without looking after one was in vain: a client that was found before is soon looked for again. With 100, a client that is
/// found 299 times of 300 was not looked for in a quarter of its waits.
const RESTS: u32 = 16;
/// The most after several in a row: half a second of a client that shares the processor and asks every 15 microseconds, which loses a part in
/// three thousand.
const MOST_RESTS: u32 = RESTS << 11;

/// What a client's last requests say of its next.
#[derive(Clone, Copy, Debug, Default)]
pub struct Eager {
    /// It came so quickly that looking for it would have paid.
    quick: bool,
    rests: u32,
    /// How many there were the last time, since it was found last.
    rested: u32,
}

impl Eager {
    /// How long to look before sleeping; zero: not at all.
    pub fn look(&self) -> Duration {
        if self.quick && self.rests == 0 { LONGEST } else { Duration::ZERO }
    }

    /// The wait is over: it took so long, and looking was enough or not.
    pub fn waited(&mut self, took: Duration, looked: Duration, found: bool) {
        if !looked.is_zero() && !found {
            self.rested = (self.rested * 2).clamp(RESTS, MOST_RESTS);
            self.rests = self.rested;
        } else {
            self.rests = self.rests.saturating_sub(1);
        }
        if found {
            self.rested = 0;
        }
        // Being woken is part of what was measured.
        self.quick = took <= LONGEST * 2;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is lost by looking, of the time, with a client that takes so long; if it shares the processor, it does nothing meanwhile.
    fn lost(client: Duration, shares: bool) -> f64 {
        let (mut eager, mut looking, mut all) = (Eager::default(), Duration::ZERO, Duration::ZERO);
        for _ in 0..1_000_000 {
            let look = eager.look();
            let found = client <= look && !shares;
            let took = match (found, shares) {
                (true, _) => client,
                (false, true) => look + client,
                (false, false) => client.max(look),
            };
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
        for micros in [1, 10, 79] {
            assert!(lost(Duration::from_micros(micros), false) == 0.0, "{micros}");
        }
        for micros in [81, 120, 500, 1000, 1_000_000] {
            let lost = lost(Duration::from_micros(micros), false);
            assert!(lost < 0.001, "{micros}: {lost}");
        }
    }

    #[test]
    fn a_client_that_shares_the_processor_is_hardly_kept_from_it_and_one_that_no_longer_does_is_looked_for_soon() {
        for micros in [5, 10, 60] {
            let lost = lost(Duration::from_micros(micros), true);
            assert!(lost < 0.002, "{micros}: {lost}");
        }
        let mut eager = Eager::default();
        let mut waits = |found, until: &dyn Fn(&Eager) -> bool| {
            for n in 0.. {
                eager.waited(Duration::from_micros(10), eager.look(), found && !eager.look().is_zero());
                if until(&eager) {
                    return n;
                }
            }
            0
        };
        waits(false, &|eager| eager.rested == MOST_RESTS);
        assert!(waits(true, &|eager| eager.rested == 0) <= MOST_RESTS, "it is looked for again, and found");
        waits(false, &|eager| eager.rested > 0);
        assert!(waits(true, &|eager| eager.rested == 0) <= RESTS, "once found, it is not forgotten for long");
    }

    #[test]
    fn one_look_in_vain_now_and_then_leaves_few_waits_without() {
        let (mut eager, mut looks, mut without) = (Eager::default(), 0, 0);
        for _ in 0..100_000 {
            let look = eager.look();
            if look.is_zero() {
                without += 1;
            } else {
                looks += 1;
            }
            eager.waited(Duration::from_micros(30), look, !look.is_zero() && looks % 300 != 0);
        }
        assert!(without < 6_000, "{without} of 100,000");
    }
}
