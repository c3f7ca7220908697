//! Which way a host's frames take to another site.
//!
//! A site has up to two hosts that carry an extender, and each of them a tunnel of its own to each of the other site's. A host that
//! carries sends by one of its tunnels; any other host gives its frames to one that carries. Each host decides for itself, from
//! what it hears: a carrier probes its tunnels, and tells the others of its site whether one of them is up.
//!
//! # Why nobody has to be the only one
//!
//! Whatever comes by any tunnel is taken, and what a carrier is given by a host of its own site goes into a tunnel of its own or
//! nowhere. So two hosts that decide differently do no harm: nothing is doubled, and nothing goes in a circle. There is no role
//! that could be held twice, and none that has to be fenced; a carrier *serves* when others choose it.
//!
//! # Steadiness
//!
//! What works is not left ([`Ways::choose`]), except for a newer tunnel to the same peer, which has newer keys, and for a tunnel of the
//! host's own; and for these only once they have been answered for [`STEADY`]. When nothing is known to work, the way stays as it was:
//! the tunnels may do their work without the nodes that would say so.
//!
//! # What can go wrong
//!
//! *Probes are lost, not the tunnel*: it counts as down after [`SILENCE`], and if another one is up that is taken, which loses
//! nothing. *All tunnels are down*: frames are lost, and never sent any other way.

use std::collections::BTreeMap;
use std::time::Duration;

/// How often a tunnel is probed, and others are told.
pub const PROBE_EVERY: Duration = Duration::from_millis(500);
/// A tunnel that has not answered for so long, or a carrier that has not said that it has one, is not chosen: three probes and a
/// WAN's round trip.
pub const SILENCE: Duration = Duration::from_millis(2000);
/// How long something better has to have worked before what works is left for it.
pub const STEADY: Duration = Duration::from_secs(5);

/// A tunnel's number, which no other tunnel of the deployment ever has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TunnelId(pub u32);

/// How a tunnel of this host is to be preferred.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Preference {
    /// Its other end's place among the other site's carriers; the lowest first.
    pub rank: u32,
    /// Counts the tunnels between the same two hosts; the highest has the newest keys.
    pub epoch: u32,
}

/// Which way frames take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Way<H> {
    /// Into this tunnel, which ends here.
    Tunnel(TunnelId),
    /// To this host of the same site.
    Carrier(H),
}

/// A guard that a test takes away, to see that it matters.
#[cfg(test)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Without {
    Nothing,
    StayingWithWhatWorks,
    KeepingTheLast,
    Freshness,
    Steadiness,
}

#[derive(Clone, Copy, Debug)]
struct Tunnel {
    preference: Preference,
    /// When it answered last.
    heard: Option<Duration>,
    /// Since when it has answered without a silence.
    since: Duration,
}

/// One host's choice for one other site. Times are since any one moment.
#[derive(Clone, Debug)]
pub struct Ways<H> {
    tunnels: BTreeMap<TunnelId, Tunnel>,
    carriers: Vec<H>,
    said: BTreeMap<H, Duration>,
    way: Option<Way<H>>,
    #[cfg(test)]
    pub(crate) without: Without,
}

impl<H: Clone + Ord> Default for Ways<H> {
    fn default() -> Self {
        Self {
            tunnels: BTreeMap::new(),
            carriers: vec![],
            said: BTreeMap::new(),
            way: None,
            #[cfg(test)]
            without: Without::Nothing,
        }
    }
}

impl<H: Clone + Ord> Ways<H> {
    /// These tunnels end here, and these other hosts of the site carry, the preferred first. What is known of those that stay, stays.
    pub fn order(&mut self, tunnels: &[(TunnelId, Preference)], carriers: Vec<H>) {
        let mut known = std::mem::take(&mut self.tunnels);
        for (id, preference) in tunnels {
            let before = known.remove(id);
            let tunnel = before.unwrap_or(Tunnel { preference: *preference, heard: None, since: Duration::ZERO });
            self.tunnels.insert(*id, Tunnel { preference: *preference, ..tunnel });
        }
        self.said.retain(|host, _| carriers.contains(host));
        self.carriers = carriers;
        let there = match &self.way {
            Some(Way::Tunnel(id)) => self.tunnels.contains_key(id),
            Some(Way::Carrier(host)) => self.carriers.contains(host),
            None => true,
        };
        if !there {
            self.way = None;
        }
    }

    /// A tunnel has answered a probe.
    pub fn answered(&mut self, id: TunnelId, now: Duration) {
        if let Some(tunnel) = self.tunnels.get_mut(&id) {
            if tunnel.heard.is_none_or(|heard| now > heard + SILENCE) {
                tunnel.since = now;
            }
            tunnel.heard = Some(now);
        }
    }

    /// A tunnel's device is not there: nothing that it answered before counts.
    pub fn gone(&mut self, id: TunnelId) {
        if let Some(tunnel) = self.tunnels.get_mut(&id) {
            tunnel.heard = None;
        }
    }

    /// Another host of the site says whether it has a tunnel that is up; gives whether that is the loss of one. Who acts on a loss tells its
    /// own state to others: if it did so as often as it heard of none, two hosts without a tunnel would never be silent.
    pub fn said(&mut self, carrier: &H, up: bool, now: Duration) -> bool {
        if up {
            self.said.insert(carrier.clone(), now);
            return false;
        }
        self.said.remove(carrier).is_some()
    }

    /// Whether a tunnel has answered lately.
    #[must_use]
    pub fn is_up(&self, id: TunnelId, now: Duration) -> bool {
        self.tunnels.get(&id).is_some_and(|tunnel| tunnel.heard.is_some_and(|heard| now <= heard + SILENCE))
    }

    /// Whether one of the tunnels that end here is up: what others of the site are told.
    #[must_use]
    pub fn carries(&self, now: Duration) -> bool {
        self.tunnels.keys().any(|id| self.is_up(*id, now))
    }

    fn is_steady(&self, id: TunnelId, now: Duration) -> bool {
        #[cfg(test)]
        if self.without == Without::Steadiness {
            return self.is_up(id, now);
        }
        self.is_up(id, now) && self.tunnels.get(&id).is_some_and(|tunnel| now >= tunnel.since + STEADY)
    }

    fn is_fresh(&self, carrier: &H, now: Duration) -> bool {
        #[cfg(test)]
        if self.without == Without::Freshness {
            return self.said.contains_key(carrier);
        }
        self.said.get(carrier).is_some_and(|said| now <= *said + SILENCE)
    }

    /// Whether what is chosen is known to work.
    #[must_use]
    pub fn is_good(&self, now: Duration) -> bool {
        match &self.way {
            Some(Way::Tunnel(id)) => self.is_up(*id, now),
            Some(Way::Carrier(host)) => self.is_fresh(host, now),
            None => false,
        }
    }

    /// The way that was chosen last.
    #[must_use]
    pub const fn way(&self) -> Option<&Way<H>> {
        self.way.as_ref()
    }

    /// The best of the tunnels that pass: the first peer's, and to it the newest.
    fn best(&self, passes: impl Fn(TunnelId) -> bool) -> Option<TunnelId> {
        let those = self.tunnels.iter().filter(|(id, _)| passes(**id));
        let first =
            those.min_by_key(|(id, tunnel)| (tunnel.preference.rank, std::cmp::Reverse(tunnel.preference.epoch), **id));
        first.map(|(id, _)| *id)
    }

    /// The tunnel that takes what other hosts of the site give to this one: never another host, whatever is chosen for its own.
    #[must_use]
    pub fn takes(&self, now: Duration) -> Option<TunnelId> {
        match &self.way {
            Some(Way::Tunnel(id)) => Some(*id),
            _ => self.best(|id| self.is_up(id, now)).or_else(|| self.best(|_| true)),
        }
    }

    /// Something better than a way that works, which has worked long enough.
    fn better(&self, now: Duration) -> Option<TunnelId> {
        match &self.way {
            Some(Way::Tunnel(id)) => {
                let now_used = self.tunnels.get(id)?.preference;
                let newer = |other: Preference| other.rank == now_used.rank && other.epoch > now_used.epoch;
                self.best(|id| newer(self.tunnels[&id].preference) && self.is_steady(id, now))
            }
            Some(Way::Carrier(_)) => self.best(|id| self.is_steady(id, now)),
            None => None,
        }
    }

    /// Chooses, and gives what is chosen. To be asked every [`PROBE_EVERY`], and when something was said.
    pub fn choose(&mut self, now: Duration) -> Option<&Way<H>> {
        let stays = self.is_good(now);
        #[cfg(test)]
        let stays = stays && self.without != Without::StayingWithWhatWorks;
        let chosen = if stays {
            self.better(now).map(Way::Tunnel)
        } else {
            let own = self.best(|id| self.is_up(id, now)).map(Way::Tunnel);
            own.or_else(|| self.carriers.iter().find(|host| self.is_fresh(host, now)).cloned().map(Way::Carrier))
        };
        #[cfg(test)]
        if chosen.is_none() && !stays && self.without == Without::KeepingTheLast {
            self.way = None;
        }
        // When nobody says that something works, what was chosen last may still do.
        if chosen.is_some() {
            self.way = chosen;
        } else if self.way.is_none() {
            self.way =
                self.best(|_| true).map(Way::Tunnel).or_else(|| self.carriers.first().cloned().map(Way::Carrier));
            #[cfg(test)]
            if self.without == Without::KeepingTheLast {
                self.way = None;
            }
        }
        self.way.as_ref()
    }
}

#[cfg(test)]
#[path = "ways_tests.rs"]
mod tests;
