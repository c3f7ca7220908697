//! One dictionary for each trust domain, and no way from one to another.

use std::sync::{Arc, Weak};

/// Who may see each other's contents: a customer.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct TrustDomain(pub String);

/// The dictionaries of a host, or what it keeps them in.
#[derive(Debug)]
pub struct Domains<D> {
    most: usize,
    /// The one that was asked for last stands last.
    held: Vec<(TrustDomain, Arc<D>)>,
    /// Those that had to go, for as long as somebody else holds them: there is never another one of the same domain beside them.
    gone: Vec<(TrustDomain, Weak<D>)>,
}

impl<D> Domains<D> {
    /// None yet. Of more than `most` the one goes that was not asked for longest: together they take that many times what one
    /// takes, and what those still take that are in use.
    #[must_use]
    pub const fn new(most: usize) -> Self {
        Self { most, held: vec![], gone: vec![] }
    }

    /// The dictionary of a domain; `new` makes it, with a random key of its own, where there is none yet.
    pub fn of(&mut self, domain: &TrustDomain, new: impl FnOnce() -> D) -> Arc<D> {
        let found = match self.held.iter().position(|(name, _)| name == domain) {
            Some(at) => self.held.remove(at),
            None => {
                let used = self.gone.iter().find(|(name, _)| name == domain).and_then(|(_, used)| used.upgrade());
                (domain.clone(), used.unwrap_or_else(|| Arc::new(new())))
            }
        };
        if self.held.len() >= self.most.max(1) {
            let (name, dictionary) = self.held.remove(0);
            self.gone.push((name, Arc::downgrade(&dictionary)));
        }
        self.gone.retain(|(name, used)| *name != found.0 && used.strong_count() > 0);
        let dictionary = found.1.clone();
        self.held.push(found);
        dictionary
    }

    /// Forgets a domain: nothing of it is here any more.
    pub fn forget(&mut self, domain: &TrustDomain) {
        self.held.retain(|(name, _)| name != domain);
        self.gone.retain(|(name, _)| name != domain);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dictionary::{Dictionary, Place};
    use crate::digest::{BLOCK, Key};
    use godwit_units::Bytes;
    use std::sync::Mutex;

    #[test]
    fn a_domain_finds_its_own_dictionary_again_and_never_anothers() {
        let mut domains = Domains::new(2);
        let key = |n| Key::new([n; 32]);
        let mut of = |name: &str, n| {
            let new = || Mutex::new(Dictionary::new(key(n), Bytes::kib(64)));
            (domains.of(&TrustDomain(name.to_owned()), new), domains.held.len())
        };
        let (a, _) = of("a", 1);
        a.lock().unwrap().learn(&[7; BLOCK], Place(5));
        let digest = a.lock().unwrap().key().digest(&[7; BLOCK]);

        let (b, _) = of("b", 2);
        assert_eq!(b.lock().unwrap().place(&digest), None, "not even by a name that leaked");
        assert_eq!(b.lock().unwrap().place(&key(2).digest(&[7; BLOCK])), None);
        assert_eq!(of("a", 9).0.lock().unwrap().place(&digest), Some(Place(5)));

        // A third takes the place of the one that was not asked for longest.
        assert_eq!(of("c", 3).1, 2);
        assert_eq!(of("a", 9).0.lock().unwrap().place(&digest), Some(Place(5)));
        // It is found again for as long as somebody uses it.
        assert!(Arc::ptr_eq(&of("b", 2).0, &b));
        assert_eq!((of("a", 9).1, of("c", 3).1), (2, 2));
        let gone = Arc::downgrade(&b);
        drop(b);
        assert!(gone.upgrade().is_none(), "nobody uses it, and it is held");
        assert_eq!(of("b", 2).1, 2);
        domains.forget(&TrustDomain("b".to_owned()));
        assert_eq!(domains.held.len(), 1);
    }
}
