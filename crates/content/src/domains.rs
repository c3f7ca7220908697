//! One dictionary for each trust domain, and no way from one to another.

use crate::dictionary::Dictionary;
use crate::digest::Key;
use godwit_units::Bytes;
use std::sync::{Arc, Mutex};

/// Who may see each other's contents: a customer.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct TrustDomain(pub String);

/// The dictionaries of a host.
#[derive(Debug)]
pub struct Domains {
    each: Bytes,
    most: usize,
    /// The one that was asked for last stands last.
    held: Vec<(TrustDomain, Arc<Mutex<Dictionary>>)>,
}

impl Domains {
    /// None yet; each may take so much memory. Of more than `most` the one goes that was not asked for longest: together
    /// they take `each` times `most`.
    #[must_use]
    pub const fn new(each: Bytes, most: usize) -> Self {
        Self { each, most, held: vec![] }
    }

    /// The dictionary of a domain; a new one takes this key, which has to be random.
    pub fn of(&mut self, domain: &TrustDomain, key: Key) -> Arc<Mutex<Dictionary>> {
        let found = match self.held.iter().position(|(name, _)| name == domain) {
            Some(at) => self.held.remove(at),
            None => (domain.clone(), Arc::new(Mutex::new(Dictionary::new(key, self.each)))),
        };
        if self.held.len() >= self.most.max(1) {
            self.held.remove(0);
        }
        let dictionary = found.1.clone();
        self.held.push(found);
        dictionary
    }

    /// Forgets a domain: nothing of it is here any more.
    pub fn forget(&mut self, domain: &TrustDomain) {
        self.held.retain(|(name, _)| name != domain);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dictionary::Place;
    use crate::digest::BLOCK;

    #[test]
    fn a_domain_finds_its_own_dictionary_again_and_never_anothers() {
        let mut domains = Domains::new(Bytes::kib(64), 2);
        let name = |n: &str| TrustDomain(n.to_owned());
        let key = |n| Key::new([n; 32]);
        let a = domains.of(&name("a"), key(1));
        a.lock().unwrap().learn(&[7; BLOCK], Place(5));
        let digest = a.lock().unwrap().key().digest(&[7; BLOCK]);

        let b = domains.of(&name("b"), key(2));
        assert_eq!(b.lock().unwrap().place(&digest), None, "not even by a name that leaked");
        assert_eq!(b.lock().unwrap().place(&key(2).digest(&[7; BLOCK])), None);
        assert_eq!(domains.of(&name("a"), key(9)).lock().unwrap().place(&digest), Some(Place(5)));

        // A third takes the place of the one that was not asked for longest.
        domains.of(&name("c"), key(3));
        assert_eq!(domains.held.len(), 2);
        assert_eq!(domains.of(&name("a"), key(9)).lock().unwrap().place(&digest), Some(Place(5)));
        assert!(!Arc::ptr_eq(&domains.of(&name("b"), key(2)), &b));
        domains.forget(&name("b"));
        assert_eq!(domains.held.len(), 1);
    }
}
