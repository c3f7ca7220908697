//! An Ethernet address.

use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};

/// An Ethernet address; written `02:00:00:00:00:01`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct MacAddr(pub [u8; 6]);

impl MacAddr {
    /// To everybody.
    pub const BROADCAST: Self = Self([0xff; 6]);
    /// The default entry of a VXLAN device's table.
    pub const ZERO: Self = Self([0; 6]);

    /// The host's end of a guest's interface: another address than the guest's, and so high that a bridge, which takes
    /// the lowest of its ports' addresses, never takes it.
    #[must_use]
    pub const fn of_tap(self) -> Self {
        let m = self.0;
        // A guest whose address begins with fe already needs another one here, or the bridge would take its frames.
        Self([if m[0] == 0xfe { 0xfa } else { 0xfe }, m[1], m[2], m[3], m[4], m[5]])
    }
}

/// Text that is no Ethernet address.
#[derive(Debug, thiserror::Error)]
#[error("`{0}` is no MAC address; write six bytes in hexadecimal as in 02:00:00:00:00:01")]
pub struct BadMac(String);

impl FromStr for MacAddr {
    type Err = BadMac;

    fn from_str(text: &str) -> Result<Self, BadMac> {
        let bad = || BadMac(text.to_owned());
        let mut bytes = [0; 6];
        let mut parts = text.split(':');
        for byte in &mut bytes {
            let part = parts.next().filter(|p| p.len() == 2 && !p.starts_with('+')).ok_or_else(bad)?;
            *byte = u8::from_str_radix(part, 16).map_err(|_| bad())?;
        }
        parts.next().is_none().then_some(Self(bytes)).ok_or_else(bad)
    }
}

impl TryFrom<String> for MacAddr {
    type Error = BadMac;
    fn try_from(text: String) -> Result<Self, BadMac> {
        text.parse()
    }
}

impl From<MacAddr> for String {
    fn from(mac: MacAddr) -> Self {
        mac.to_string()
    }
}

impl fmt::Display for MacAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_reads_back_as_written_and_nothing_else_is_one() {
        let mac: MacAddr = "02:ab:00:00:00:01".parse().unwrap();
        assert_eq!(mac.to_string(), "02:ab:00:00:00:01");
        for bad in ["", "02:ab:00:00:00", "02:ab:00:00:00:01:02", "2:ab:00:00:00:01", "+2:ab:00:00:00:01"] {
            assert!(bad.parse::<MacAddr>().is_err(), "{bad}");
        }
    }
}
