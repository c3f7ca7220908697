//! What a path promises: the numbers a user writes down, and the limits within which they make sense.

use crate::WanError;
use crate::flight::MAX_IN_FLIGHT;
use godwit_units::{BitRate, Bytes};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// The properties of a path, the same in both directions (each direction has a line and a queue of its own).
///
/// Durations serialise as serde's `{ "secs", "nanos" }`, the rate as bit/s.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PathSpec {
    /// The line's rate, counted in bits of layer 1: every packet is charged its Ethernet frame plus 24 bytes of framing. Above zero.
    pub rate: BitRate,
    /// The round trip of a small packet on an idle path; half of it is spent in each direction, after the line.
    pub rtt: Duration,
    /// Each packet is delayed by a further time drawn uniformly from zero to this, per direction. It reorders packets.
    pub jitter: Duration,
    /// The probability that a packet is lost, each independently of the others, per direction: 0.0 to 1.0.
    pub loss: f64,
    /// How long the queue in front of the line may get, as the time it takes to drain. What comes later is dropped.
    /// Zero means that a frame is taken only by an idle line.
    pub queue: Duration,
}

impl PathSpec {
    /// Checks every field against its range, and that what can be under way at once fits [`MAX_IN_FLIGHT`].
    ///
    /// # Errors
    ///
    /// [`WanError::InvalidSpec`] naming the first field that does not hold.
    pub fn validate(&self) -> Result<(), WanError> {
        let refuse = |field, value: String, rule| Err(WanError::InvalidSpec { field, value, rule });
        if self.rate.0 == 0 {
            return refuse("rate", self.rate.to_string(), "it must be above zero (use cut() to stop a path)");
        }
        // Written so that NaN is refused too.
        if !(0.0..=1.0).contains(&self.loss) {
            return refuse("loss", self.loss.to_string(), "it is a probability, from 0.0 to 1.0");
        }
        if self.in_flight_bound() > MAX_IN_FLIGHT {
            return refuse(
                "rate x (queue + rtt/2 + jitter)",
                self.in_flight_bound().to_string(),
                "the emulator holds at most 256 MiB in each direction: lower the rate, the queue or the delay",
            );
        }
        Ok(())
    }

    /// The delay that the path adds in one direction, without queue and jitter.
    #[must_use]
    pub fn one_way_delay(&self) -> Duration {
        self.rtt / 2
    }

    /// How much one direction holds at most: the line fills the queue, the delay and the jitter, and no more.
    #[must_use]
    pub fn in_flight_bound(&self) -> Bytes {
        let held_for = self.queue.saturating_add(self.one_way_delay()).saturating_add(self.jitter);
        self.rate.bytes_in(held_for)
    }

    /// True when packets have to arrive one by one for this path to be honest: with loss or jitter, a super-frame
    /// would be lost or delayed as a lump. See [`set_segmentation`](crate::set_segmentation).
    #[must_use]
    pub fn needs_single_packets(&self) -> bool {
        self.loss > 0.0 || !self.jitter.is_zero()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec() -> PathSpec {
        PathSpec {
            rate: BitRate::from_mbit(100.0),
            rtt: Duration::from_millis(27),
            jitter: Duration::ZERO,
            loss: 0.0,
            queue: Duration::from_millis(50),
        }
    }

    #[test]
    fn values_outside_their_range_are_refused_by_name() {
        let refused = |spec: PathSpec| spec.validate().unwrap_err().to_string();
        assert!(spec().validate().is_ok());
        assert!(PathSpec { loss: 1.0, ..spec() }.validate().is_ok());
        assert!(refused(PathSpec { rate: BitRate(0), ..spec() }).contains("rate"));
        assert!(refused(PathSpec { loss: 1.01, ..spec() }).contains("loss"));
        assert!(refused(PathSpec { loss: -0.01, ..spec() }).contains("loss"));
        assert!(refused(PathSpec { loss: f64::NAN, ..spec() }).contains("loss"));
        assert!(refused(PathSpec { queue: Duration::MAX, ..spec() }).contains("256 MiB"));
    }

    #[test]
    fn what_is_in_flight_follows_from_rate_and_holding_time() {
        let spec = PathSpec { rtt: Duration::from_millis(20), jitter: Duration::from_millis(40), ..spec() };
        assert_eq!(spec.in_flight_bound(), Bytes(1_250_000));
    }

    #[test]
    fn single_packets_are_needed_when_a_lump_would_share_one_fate() {
        assert!(!spec().needs_single_packets());
        assert!(PathSpec { loss: 0.01, ..spec() }.needs_single_packets());
        assert!(PathSpec { jitter: Duration::from_millis(1), ..spec() }.needs_single_packets());
    }
}
