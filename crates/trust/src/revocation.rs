//! Certificates that are not believed any more, though their CA signed them and they have not ended.
//!
//! A revocation names a holder and a moment: every certificate of that holder which began at that moment or before is
//! void. So nobody has to have kept a list of what was ever issued to whom, and a leaked copy that nobody knows of is
//! covered as well. A holder that is to be trusted again is issued a certificate that begins after the moment
//! ([`Revocations::earliest`]).

use crate::{Identity, PeerCertificate, PeerError, TrustError, Validity};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::{PoisonError, RwLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The most holders that a list may name: a node keeps it in memory and looks into it at every handshake. One holder has one
/// entry, however often it is revoked.
pub const MAX_REVOCATIONS: usize = 4096;

/// A list of revocations. Lists are whole and numbered: the greater number replaces the smaller. A number is no less than the second of its making:
/// what a controller revokes that was brought back from an older copy has a greater one than the lists that it does not know of any more.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Revocations {
    /// The list's number; 0 is the empty list that everybody begins with.
    pub version: u64,
    /// Each holder with the moment, seconds since 1970: what began then or before is void.
    pub holders: BTreeMap<Identity, u64>,
}

impl Revocations {
    /// The next list, in which every certificate of `identity` that was issued until now is void.
    ///
    /// # Errors
    /// [`TrustError::TooManyRevocations`].
    pub fn revoke(mut self, identity: Identity, now: SystemTime) -> Result<Self, TrustError> {
        // Rounded up: certificates begin at whole seconds.
        let moment = now.duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs() + 1);
        let before = self.holders.insert(identity.clone(), moment).unwrap_or(0);
        self.holders.insert(identity, moment.max(before));
        self.version = (self.version + 1).max(moment);
        self.check()?;
        Ok(self)
    }

    /// Refuses a list that is longer than any of ours.
    ///
    /// # Errors
    /// [`TrustError::TooManyRevocations`].
    pub fn check(&self) -> Result<(), TrustError> {
        match self.holders.len() {
            entries if entries > MAX_REVOCATIONS => {
                Err(TrustError::TooManyRevocations { entries, most: MAX_REVOCATIONS })
            }
            _ => Ok(()),
        }
    }

    /// A validity for a new certificate of `identity`: it begins after whatever was revoked.
    #[must_use]
    pub fn earliest(&self, identity: &Identity, validity: Validity) -> Validity {
        let after =
            self.holders.get(identity).map_or(UNIX_EPOCH, |moment| UNIX_EPOCH + Duration::from_secs(moment + 1));
        Validity { from: validity.from.max(after), ..validity }
    }

    /// Whether a certificate is void.
    #[must_use]
    pub fn covers(&self, certificate: &PeerCertificate) -> bool {
        let began = certificate.from.duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
        self.holders.get(&certificate.identity).is_some_and(|moment| began <= *moment)
    }
}

/// The list that a process goes by; shared by everything that checks certificates in it.
#[derive(Debug, Default)]
pub(crate) struct Current(RwLock<Revocations>);

impl Current {
    /// Takes a list that is newer than the one at hand. Whether it was.
    pub fn install(&self, list: Revocations) -> Result<bool, TrustError> {
        list.check()?;
        let mut now = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let newer = list.version > now.version;
        if newer {
            *now = list;
        }
        Ok(newer)
    }

    pub fn get(&self) -> Revocations {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub fn refuse(&self, certificate: &PeerCertificate) -> Result<(), PeerError> {
        if self.0.read().unwrap_or_else(PoisonError::into_inner).covers(certificate) {
            return Err(PeerError::Revoked { peer: certificate.identity.to_string() });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_that_is_made_after_a_restore_replaces_the_ones_that_are_not_known_any_more() {
        let second = |s: u64| UNIX_EPOCH + Duration::from_secs(s);
        let node = |name: &str| Identity::node(name).unwrap();
        let copy = Revocations::default().revoke(node("a"), second(100)).unwrap();
        let lost = copy.clone().revoke(node("b"), second(200)).unwrap().revoke(node("c"), second(200)).unwrap();
        let current = Current::default();
        assert!(current.install(lost.clone()).unwrap());
        assert!(!current.install(copy.clone()).unwrap());
        let next = copy.revoke(node("d"), second(300)).unwrap();
        assert!(current.install(next.clone()).unwrap());
        assert_eq!(current.get(), next);
        // A clock that was set back.
        let later = next.clone().revoke(node("e"), second(1)).unwrap();
        assert!(later.version > next.version && lost.version > 200);
    }
}
