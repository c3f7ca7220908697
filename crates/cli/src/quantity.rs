//! Sizes and rates as people write them.

use godwit_units::{BitRate, Bytes};
use std::time::Duration;

/// The number at the beginning of `text`, and what follows it.
fn split(text: &str) -> Option<(f64, &str)> {
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let number: f64 = text[..end].parse().ok()?;
    Some((number, text[end..].trim_start()))
}

/// `number * unit` in whole units of one, if it fits.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "checked: not negative, and below 2^63")]
fn whole(number: f64, unit: f64) -> Option<u64> {
    let value = (number * unit).round();
    (value < 9.2e18).then_some(value as u64)
}

/// A time: `90d`, `12h`, `15m`, `30s`.
///
/// # Errors
/// What is wrong with the text, and what to write instead.
pub fn time(text: &str) -> Result<Duration, String> {
    let bad = || format!("`{text}` is no time: write a number with s, m, h or d, such as 12h");
    let (number, unit) = split(text.trim()).ok_or_else(bad)?;
    let unit = match unit {
        "s" => 1.0,
        "m" => 60.0,
        "h" => 3600.0,
        "d" => 86_400.0,
        _ => return Err(bad()),
    };
    // More than a CA itself lasts is a mistake.
    match whole(number, unit) {
        Some(seconds @ 1..=315_360_000) => Ok(Duration::from_secs(seconds)),
        _ => Err(bad()),
    }
}

/// A size: `4G`, `512 MiB`, `1.5G`, `4096`. Units are powers of 1024.
///
/// # Errors
/// What is wrong with the text, and what to write instead.
pub fn size(text: &str) -> Result<Bytes, String> {
    let bad =
        || format!("`{text}` is no size: write bytes, or a number with K, M, G or T (powers of 1024), such as 512M");
    let (number, unit) = split(text.trim()).ok_or_else(bad)?;
    let unit = match unit {
        "" | "B" => 1.0,
        "K" | "k" | "KiB" => 1024.0,
        "M" | "MiB" => 1024.0 * 1024.0,
        "G" | "GiB" => 1024.0 * 1024.0 * 1024.0,
        "T" | "TiB" => 1024.0 * 1024.0 * 1024.0 * 1024.0,
        _ => return Err(bad()),
    };
    whole(number, unit).map(Bytes).ok_or_else(bad)
}

/// A rate in bits a second: `50M`, `100Mbit/s`, `1.5 Gbit/s`, `800k`. Units are powers of 1000.
///
/// # Errors
/// What is wrong with the text, and what to write instead.
pub fn rate(text: &str) -> Result<BitRate, String> {
    let bad = || {
        format!("`{text}` is no rate: write bits a second with k, M or G (powers of 1000), such as 50M or 100Mbit/s")
    };
    let (number, unit) = split(text.trim()).ok_or_else(bad)?;
    let prefix = ["bit/s", "bits/s", "bps", "bit"].iter().find_map(|end| unit.strip_suffix(end)).unwrap_or(unit);
    let unit = match prefix {
        "" => 1.0,
        "k" | "K" => 1e3,
        "M" => 1e6,
        "G" => 1e9,
        _ => return Err(bad()),
    };
    match whole(number, unit) {
        None | Some(0) => Err(bad()),
        Some(rate) => Ok(BitRate(rate)),
    }
}

/// A rate, or `none`.
///
/// # Errors
/// As [`rate`].
pub fn rate_or_none(text: &str) -> Result<Option<BitRate>, String> {
    if text == "none" { Ok(None) } else { rate(text).map(Some) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_powers_of_1024() {
        for (text, bytes) in [
            ("4096", 4096),
            ("4K", 4096),
            ("512M", 512 << 20),
            ("1.5G", 3 << 29),
            ("2 GiB", 2 << 30),
            ("1T", 1 << 40),
            ("0", 0),
        ] {
            assert_eq!(size(text), Ok(Bytes(bytes)), "{text}");
        }
        for text in ["", "M", "4X", "-1", "1e9", "4 MB/s", "99999999999T"] {
            assert!(size(text).is_err(), "{text}");
        }
    }

    #[test]
    fn rates_are_powers_of_1000_and_never_bytes() {
        for (text, bits) in [
            ("50M", 50_000_000),
            ("100Mbit/s", 100_000_000),
            ("100 Mbit/s", 100_000_000),
            ("1.5Gbit/s", 1_500_000_000),
            ("800kbps", 800_000),
            ("1000000", 1_000_000),
        ] {
            assert_eq!(rate(text), Ok(BitRate(bits)), "{text}");
        }
        for text in ["", "0", "50MB/s", "50MiB", "fast", "none", "-5M"] {
            assert!(rate(text).is_err(), "{text}");
        }
        assert_eq!(rate_or_none("none"), Ok(None));
        assert_eq!(rate_or_none("1M"), Ok(Some(BitRate(1_000_000))));
    }
}
