//! The machine of a wire between two ports: which host either end is on, as one host knows it and tells it on.
//!
//! Both ends may move, at once and in either order, and nobody who could be asked is sure to be there. So each host that has to do
//! with a wire keeps a [`View`] of each end, and of two views of an end the later one counts, by whichever way it came: the owner's
//! [`Sequence`] orders them, then a step that the owner counts. Views only grow, so messages may be lost, doubled, late, or out of
//! order. A host that has an end goes on telling all that it knows to the host where it believes the other one to be, and to the one where
//! its own was before, until they have answered with nothing less ([`Rehoming::due`]). A host that an end has left keeps its views: it
//! is told by whoever has not heard yet, and answers with where the end went. One that gave an end back which it had been given tells that
//! itself ([`Rehoming::give_back`]), because nobody else is believed of it.
//!
//! What a host says of itself has to be durable before it is said: a host that forgot its own word would say another one of the same
//! time.
//!
//! # No frame lost
//!
//! When an end is stopped to be handed over, its host names the one that it goes to ([`Rehoming::leave`]). The other end's frames go to
//! both from then on, and are taken by whichever lets them in: after the grant the first frame finds its way, before anybody has heard
//! of the grant. What is lost is what came while the guest was on neither host, which is the pause.
//!
//! # What can go wrong
//!
//! *Both hosts that were left die for good before they told anybody*: then the two ends know each other's old hosts. The controller
//! tells them, in the same form.
//!
//! *An older owner speaks*: its view is older. *Somebody lies about an end that is open here*: the host that has it does not take
//! another's word for it. Whether a view of any other end is believed is decided before it gets here.

use crate::Sequence;
use std::collections::{BTreeMap, BTreeSet};

/// Which of a wire's two ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Side {
    /// The first.
    A,
    /// The second.
    B,
}

impl Side {
    /// Both.
    pub const BOTH: [Self; 2] = [Self::A, Self::B];

    /// As an index.
    #[must_use]
    pub const fn index(self) -> usize {
        match self {
            Self::A => 0,
            Self::B => 1,
        }
    }

    /// The other one.
    #[must_use]
    pub const fn other(self) -> Self {
        match self {
            Self::A => Self::B,
            Self::B => Self::A,
        }
    }
}

/// How late a view is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Stamp {
    /// Its owner's.
    pub sequence: Sequence,
    /// Counted by that owner.
    pub step: u32,
}

/// Where an end is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct View<H> {
    /// As of when.
    pub stamp: Stamp,
    /// Its owner's host.
    pub host: H,
    /// Where it is about to go.
    pub coming: Option<H>,
}

/// The end has had a later owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the end has had a later owner, {last:?}, than {given:?}")]
pub struct Outdated {
    /// As was ordered.
    pub given: Sequence,
    /// As is known.
    pub last: Sequence,
}

/// A guard that a test takes away, to see that it matters.
#[cfg(test)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Without {
    Nothing,
    LatestWins,
    TellingWhereItWas,
    Repetition,
    KeptFirst,
}

/// One host's knowledge of one wire.
#[derive(Clone, Debug)]
pub struct Rehoming<H> {
    me: H,
    views: [View<H>; 2],
    open: [bool; 2],
    /// A host that makes a place for an end: it is told, too, so that it knows where the other end is.
    staged: [Option<H>; 2],
    /// The owner after this host, of an end that it gave back.
    given_back: [Option<Sequence>; 2],
    /// Where ends were before they came here.
    before: BTreeSet<H>,
    /// What others are known to know.
    told: BTreeMap<H, [Stamp; 2]>,
    #[cfg(test)]
    without: Without,
}

impl<H: Clone + Ord> Rehoming<H> {
    /// As it was ordered, or is remembered: with the hosts that had not answered yet and that ends have come from.
    #[must_use]
    pub const fn new(me: H, views: [View<H>; 2], before: BTreeSet<H>) -> Self {
        Self {
            me,
            views,
            open: [false; 2],
            staged: [None, None],
            given_back: [None, None],
            before,
            told: BTreeMap::new(),
            #[cfg(test)]
            without: Without::Nothing,
        }
    }

    /// Where the ends are.
    #[must_use]
    pub const fn views(&self) -> &[View<H>; 2] {
        &self.views
    }

    /// Hosts that ends have come from and that have not answered yet: to be remembered with the views.
    #[must_use]
    pub const fn before(&self) -> &BTreeSet<H> {
        &self.before
    }

    /// Whether an end is here and its frames pass.
    #[must_use]
    pub const fn is_open(&self, side: Side) -> bool {
        self.open[side.index()]
    }

    /// The hosts that frames go to from here: those of each end that is not open here.
    #[must_use]
    pub fn remotes(&self) -> BTreeSet<H> {
        let away = self.views.iter().zip(self.open).filter(|(_, open)| !open).map(|(view, _)| view);
        let hosts = away.flat_map(|view| std::iter::once(&view.host).chain(&view.coming));
        hosts.filter(|host| **host != self.me).cloned().collect()
    }

    /// An end is this host's, as of `sequence`: frames pass, and others are to hear of it.
    ///
    /// # Errors
    /// [`Outdated`]; nothing has changed then.
    pub fn open(&mut self, side: Side, sequence: Sequence) -> Result<(), Outdated> {
        let view = &mut self.views[side.index()];
        let last = view.stamp.sequence;
        if sequence < last {
            return Err(Outdated { given: sequence, last });
        }
        if sequence == last && view.host == self.me {
            // It stays after all, or its guest was booted anew.
            if view.coming.take().is_some() {
                view.stamp.step += 1;
            }
        } else {
            if view.host != self.me {
                self.before.insert(view.host.clone());
            }
            *view = View { stamp: Stamp { sequence, step: 0 }, host: self.me.clone(), coming: None };
        }
        self.open[side.index()] = true;
        self.staged[side.index()] = None;
        Ok(())
    }

    /// No frame passes any more.
    pub fn close(&mut self, side: Side) {
        self.open[side.index()] = false;
    }

    /// A place is being made for an end of this host's, there.
    pub fn stage(&mut self, side: Side, there: H) {
        self.staged[side.index()] = Some(there);
    }

    /// An end of this host's is about to go there.
    pub fn leave(&mut self, side: Side, there: H) {
        let view = &mut self.views[side.index()];
        if view.host == self.me && view.coming.as_ref() != Some(&there) && there != self.me {
            view.coming = Some(there);
            view.stamp.step += 1;
        }
    }

    /// An end that this host had been given was given back there, from where it had come. That is told until everybody has answered, or there
    /// is a later owner; again where it was known already, as after a restart.
    pub fn give_back(&mut self, side: Side, there: H) {
        let view = &mut self.views[side.index()];
        if view.host == self.me && there != self.me {
            let last = view.stamp.sequence;
            let sequence = Sequence { generation: last.generation.saturating_add(1), ..last };
            *view = View { stamp: Stamp { sequence, step: 0 }, host: there, coming: None };
            self.given_back[side.index()] = Some(sequence);
        } else if view.host == there {
            self.given_back[side.index()] = Some(view.stamp.sequence);
        }
    }

    /// What `from` knows; whether anything of it is news.
    pub fn heard(&mut self, from: &H, views: &[View<H>; 2]) -> bool {
        let mut news = false;
        for (side, view) in Side::BOTH.into_iter().zip(views) {
            let known = &mut self.views[side.index()];
            let own_word = self.open[side.index()];
            let later = view.stamp > known.stamp;
            #[cfg(test)]
            let later = later || (self.without == Without::LatestWins && view != known);
            if later && !own_word {
                *known = view.clone();
                news = true;
            }
        }
        let knows = [views[0].stamp, views[1].stamp];
        let told = self.told.entry(from.clone()).or_insert(knows);
        *told = [told[0].max(knows[0]), told[1].max(knows[1])];
        // Of whoever is not to be told anything, what it knows does not matter; a wire may outlive many hosts.
        let places = self.places();
        self.told.retain(|host, _| host == from || places.contains(host));
        news
    }

    /// What a host answered, who may have lost what it knew before: that alone counts.
    pub fn answered(&mut self, from: &H, views: &[View<H>; 2]) -> bool {
        let news = self.heard(from, views);
        self.told.insert(from.clone(), [views[0].stamp, views[1].stamp]);
        if self.knows(from) {
            self.before.remove(from);
        }
        news
    }

    /// A host from which an end came does not answer, and need not be told any more. One to which an end may be going is told all the same.
    pub fn is_silent(&mut self, host: &H) {
        self.before.remove(host);
    }

    /// A host that need not be told any more: it has nothing to do with the wire.
    pub fn forget(&mut self, host: &H) {
        self.before.remove(host);
        self.staged.iter_mut().filter(|staged| staged.as_ref() == Some(host)).for_each(|staged| *staged = None);
    }

    fn knows(&self, host: &H) -> bool {
        let mine = [self.views[0].stamp, self.views[1].stamp];
        self.told.get(host).is_some_and(|told| told[0] >= mine[0] && told[1] >= mine[1])
    }

    /// The hosts that may be told something, this one perhaps among them: where the ends are and go, and where they came from.
    #[must_use]
    pub fn places(&self) -> BTreeSet<H> {
        let ends = self.views.iter().flat_map(|view| std::iter::once(&view.host).chain(&view.coming));
        ends.chain(self.staged.iter().flatten()).chain(&self.before).cloned().collect()
    }

    /// The hosts that are to be told what is known here, and have not answered yet that they know it.
    #[must_use]
    pub fn due(&self) -> BTreeSet<H> {
        // Whoever has no end is asked; what it could tell, the ends' hosts tell.
        let mut ends = self.views.iter().zip(self.given_back);
        if ends.all(|(view, given_back)| view.host != self.me && given_back != Some(view.stamp.sequence)) {
            return BTreeSet::new();
        }
        let mut due = self.places();
        #[cfg(test)]
        if self.without == Without::TellingWhereItWas {
            due.retain(|host| !self.before.contains(host));
        }
        due.retain(|host| *host != self.me && !self.knows(host));
        due
    }
}

#[cfg(test)]
#[path = "rehome_tests.rs"]
mod tests;
