//! Newtypes for the quantities that Godwit counts, so that two of them can never be swapped by accident.
//!
//! Nothing here does I/O or keeps state. Each type prints the way operators read it (`1.5 MiB`, `100 Mbit/s`) and
//! serialises as the bare number, so that reports stay easy to read by other programs.

#![forbid(unsafe_code)]

mod ids;
mod policy;
mod pool;
mod span;

pub use ids::{BlockIndex, Epoch, Generation, Lineage, MoveId, VmId, VolumeId};
pub use policy::{MaxDrain, Policy};
pub use pool::RadosPool;
pub use span::Span;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::ops::{Add, AddAssign, Sub};
use std::time::Duration;

/// A count of bytes: a size, an offset or an amount moved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(transparent)]
pub struct Bytes(pub u64);

impl Bytes {
    /// No bytes at all.
    pub const ZERO: Self = Self(0);

    /// `n` KiB (2^10 bytes).
    #[must_use]
    pub const fn kib(n: u64) -> Self {
        Self(n << 10)
    }

    /// `n` MiB (2^20 bytes).
    #[must_use]
    pub const fn mib(n: u64) -> Self {
        Self(n << 20)
    }

    /// `n` GiB (2^30 bytes).
    #[must_use]
    pub const fn gib(n: u64) -> Self {
        Self(n << 30)
    }

    /// The difference, or zero where `other` is larger.
    #[must_use]
    pub const fn saturating_sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }
}

impl Add for Bytes {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self(self.0 + other.0)
    }
}

impl AddAssign for Bytes {
    fn add_assign(&mut self, other: Self) {
        self.0 += other.0;
    }
}

/// Panics in debug builds when `other` is larger; use [`Bytes::saturating_sub`] where that can happen.
impl Sub for Bytes {
    type Output = Self;
    fn sub(self, other: Self) -> Self {
        Self(self.0 - other.0)
    }
}

impl std::iter::Sum for Bytes {
    fn sum<I: Iterator<Item = Self>>(iter: I) -> Self {
        iter.fold(Self::ZERO, Add::add)
    }
}

/// Binary units with one decimal from KiB upwards: `512 B`, `1.5 MiB`.
impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
        if self.0 < 1024 {
            return f.pad(&format!("{} B", self.0));
        }
        let mut value = self.0 as f64 / 1024.0;
        let mut unit = 0;
        while value >= 1023.95 && unit + 1 < UNITS.len() {
            value /= 1024.0;
            unit += 1;
        }
        f.pad(&format!("{value:.1} {}", UNITS[unit]))
    }
}

/// A bit rate, in bits per second. Networks are sold in powers of ten, so 1 Mbit/s is 10^6 bit/s.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(transparent)]
pub struct BitRate(pub u64);

impl BitRate {
    /// A rate given in Mbit/s (10^6 bit/s). Negative and non-finite values become zero.
    #[must_use]
    pub fn from_mbit(mbit: f64) -> Self {
        Self((mbit * 1e6).round() as u64)
    }

    /// The rate in Mbit/s.
    #[must_use]
    pub fn mbit(self) -> f64 {
        self.0 as f64 / 1e6
    }

    /// How long `bytes` occupy a line of this rate, rounded up to a nanosecond; `Duration::MAX` at rate zero.
    #[must_use]
    pub fn time_for(self, bytes: Bytes) -> Duration {
        if self.0 == 0 {
            return Duration::MAX;
        }
        let nanos = (u128::from(bytes.0) * 8 * 1_000_000_000).div_ceil(u128::from(self.0));
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }

    /// How many whole bytes pass in `time` at this rate, saturating.
    #[must_use]
    pub fn bytes_in(self, time: Duration) -> Bytes {
        let bytes = u128::from(self.0).saturating_mul(time.as_nanos()) / 8_000_000_000;
        Bytes(u64::try_from(bytes).unwrap_or(u64::MAX))
    }
}

/// Decimal units: `30 Mbit/s`, `2.5 Gbit/s`, `800 kbit/s`.
impl fmt::Display for BitRate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (value, unit) = match self.0 {
            n if n >= 1_000_000_000 => (n as f64 / 1e9, "Gbit/s"),
            n if n >= 1_000_000 => (n as f64 / 1e6, "Mbit/s"),
            n if n >= 1_000 => (n as f64 / 1e3, "kbit/s"),
            n => (n as f64, "bit/s"),
        };
        let digits = format!("{value:.2}");
        f.pad(&format!("{} {unit}", digits.trim_end_matches('0').trim_end_matches('.')))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_print_in_the_unit_a_reader_expects() {
        assert_eq!(Bytes(0).to_string(), "0 B");
        assert_eq!(Bytes(1023).to_string(), "1023 B");
        assert_eq!(Bytes::kib(1).to_string(), "1.0 KiB");
        assert_eq!(Bytes(1024 * 1024 - 1).to_string(), "1.0 MiB");
        assert_eq!(Bytes(1_610_612_736).to_string(), "1.5 GiB");
        assert_eq!(format!("{:>10}", Bytes::mib(3)), "   3.0 MiB");
    }

    #[test]
    fn rates_print_without_idle_digits() {
        assert_eq!(BitRate::from_mbit(100.0).to_string(), "100 Mbit/s");
        assert_eq!(BitRate(2_500_000_000).to_string(), "2.5 Gbit/s");
        assert_eq!(BitRate(999).to_string(), "999 bit/s");
    }

    #[test]
    fn time_and_bytes_are_inverse_up_to_rounding() {
        let rate = BitRate::from_mbit(100.0);
        assert_eq!(rate.time_for(Bytes(12_500_000)), Duration::from_secs(1));
        assert_eq!(rate.bytes_in(Duration::from_secs(1)), Bytes(12_500_000));
        assert_eq!(BitRate(0).time_for(Bytes(1)), Duration::MAX);
        assert_eq!(BitRate(u64::MAX).bytes_in(Duration::MAX), Bytes(u64::MAX));
    }
}
