//! Hosts that are lost, operators that claim their VMs for the other side, and hosts that come back with what they
//! remember.
//!
//! Here, unlike in the worlds of [`Theme::Everything`](crate::Theme), a claim is an *order* that travels: it is lost, doubled
//! and late, and whoever ordered it asks again until it was done or they give up. Some orders are careless: without a word of
//! what keeps the other side down, or made while that is there for everybody to hear. Those must be refused, or two
//! sites own the VM.
//!
//! What the world vouches for is what an operator does: a host that was lost has no power until it comes back, and one that owned
//! the VM by itself (it would boot it without asking anybody) comes back only after its record was overwritten
//! ([`Record::overridden_by`]). Any other comes back as it was, and has to learn from its peer or from the controller that
//! it was outranked; in some worlds the controller has forgotten. What was sent to a host before it lost its power is not
//! delivered afterwards: sessions end with the processes that hold them.
//!
//! At the end the VM is moved to the side that lost, which must take it: over all that is stale on its disk.

use crate::check::Violation;
use crate::net::{Weather, fate};
use crate::site::{QemuState, Site};
use crate::world::{CALM, Happening, Place, Theme, VM, World, other};
use godwit_handoff::{
    Action, Destination, Event, Fenced, Lineage, Machine, MoveId, Peer, PeerHistory, Record, SourceState, Status,
    Verdict,
};
use rand::Rng;

/// How often an order is repeated before whoever gave it gives up.
const TRIES: u32 = 6;
/// How long they wait for it, in ticks.
const BETWEEN: u64 = 60;
/// How often the way back is tried: faults are over, but what the last of them left may refuse one.
const ATTEMPTS: u32 = 4;

/// More than any number that a move has before the end.
const UNUSED: u64 = 1 << 32;

/// An order to claim.
#[derive(Clone, Copy, Debug)]
pub struct ClaimOrder {
    /// Tells it from others.
    id: u64,
    /// Whether it says what was done to the other side.
    said: bool,
    /// What it says of the other side.
    history: PeerHistory,
    /// The newest lineage that it knows of.
    newest: Lineage,
    /// The process that it is sent to: its connection ends with that.
    process: u32,
}

/// What is known of claims.
#[derive(Clone, Debug, Default)]
pub struct Claims {
    /// Numbers orders.
    ordered: u64,
    /// Whether the controller tells who was outranked.
    forgetful: bool,
    /// What the test counts.
    pub counts: Counts,
}

/// What happened in a world, for a test that has to know that it did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Claims obeyed at a source.
    pub at_source: u32,
    /// Claims obeyed at a destination.
    pub at_destination: u32,
    /// Orders that were refused for lack of evidence.
    pub refused: u32,
    /// Orders that came when a newer claim had been made.
    pub too_old: u32,
    /// Hosts that came back as they were, to learn that they were outranked.
    pub came_back: u32,
    /// Hosts that came back with their records overwritten.
    pub overwritten: u32,
}

impl std::ops::Add for Counts {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            at_source: self.at_source + other.at_source,
            at_destination: self.at_destination + other.at_destination,
            refused: self.refused + other.refused,
            too_old: self.too_old + other.too_old,
            came_back: self.came_back + other.came_back,
            overwritten: self.overwritten + other.overwritten,
        }
    }
}

/// The newest lineage that stands in any record.
fn newest(sites: &[Site; 2]) -> Lineage {
    sites.iter().filter_map(|s| s.ledger.durable).map(|r| r.lineage()).max().unwrap_or(Lineage::FIRST)
}

impl World {
    /// The controller and the operators of these worlds.
    pub(crate) fn control_claims(&mut self) {
        if self.now >= self.calm_from {
            return;
        }
        if self.claims.ordered == 0 {
            self.claims.forgetful = self.rng.random_ratio(1, 3);
        }
        let delay = self.rng.random_range(5..50);
        self.plan(delay, Happening::ControllerActs);
        let whole = !self.sites.iter().any(|s| s.fenced);
        // A host is lost while nobody knows whose the VM is, more often than at other times.
        let between = self.sites.iter().any(|s| {
            matches!(
                s.ledger.durable,
                Some(
                    Record::Sealed(_)
                        | Record::Prepared(_)
                        | Record::Granted(_)
                        | Record::Draining(_)
                        | Record::Started(_)
                        | Record::Returned(_)
                )
            )
        });
        if whole && self.rng.random_ratio(1, if between { 3 } else { 24 }) {
            let lost = self.rng.random_range(0..2);
            self.is_lost(lost);
            return;
        }
        match self.rng.random_range(0..12) {
            0..=7 => {
                self.order_move(0);
                self.order_move(1);
            }
            8 => {
                let at = self.rng.random_range(0..2);
                self.inform(at, Event::Cancel);
            }
            9..=10 => {
                // Nothing was done to anybody, and nothing is said; or much is said, and the other side is there.
                let (at, said) = (self.rng.random_range(0..2), self.rng.random_ratio(1, 2));
                let order = self.new_order(at, said);
                self.tell(|| format!("  a careless claim for site {at}: {order:?}"));
                self.send_claim(at, order);
            }
            _ => {}
        }
    }

    /// A host loses its power for a while; somebody claims its VM for the other one, sooner or later, or not at all.
    fn is_lost(&mut self, lost: Place) {
        self.forget_orders();
        self.fence(lost);
        let at = other(lost);
        let after = self.rng.random_range(5..200);
        if self.rng.random_ratio(7, 8) {
            let order = self.new_order(at, true);
            self.plan(after, Happening::ClaimIsPressed { at, order, tries: 0 });
        }
        let back = after + u64::from(TRIES) * BETWEEN + self.rng.random_range(1..200);
        self.plan(back, Happening::Returns { at: lost });
    }

    /// A claim that was made stands in a record. One that its node had taken up when it died was not.
    fn was_made(&self, order: ClaimOrder) -> bool {
        newest(&self.sites) > order.newest
    }

    /// Whoever ordered a claim while the other side was as it was until now waits for no answer any more: their connection is
    /// gone, and the order with it, unless it was made. Copies of those that were may come at any time.
    fn forget_orders(&mut self) {
        let newest = newest(&self.sites);
        self.agenda.retain(|_, h| !matches!(h, Happening::ClaimArrives { order, .. } if order.newest == newest));
    }

    fn new_order(&mut self, at: Place, said: bool) -> ClaimOrder {
        self.claims.ordered += 1;
        let site = &self.sites[at];
        let current = site.qemu.ram == self.last_write && self.truth.is_at(&site.disk.store);
        let history =
            if current && self.rng.random_ratio(1, 2) { PeerHistory::DidNotRun } else { PeerHistory::MayHaveRun };
        ClaimOrder { id: self.claims.ordered, said, history, newest: newest(&self.sites), process: site.incarnation }
    }

    fn send_claim(&mut self, at: Place, order: ClaimOrder) {
        if !self.sites[at].up {
            return;
        }
        for delay in fate(&mut self.rng, self.weather).into_iter().flatten() {
            self.plan(delay, Happening::ClaimArrives { at, order });
        }
    }

    pub(crate) fn press_claim(&mut self, at: Place, order: ClaimOrder, tries: u32) {
        if self.was_made(order) {
            let delay = self.rng.random_range(1..60);
            self.plan(delay, Happening::Returns { at: other(at) });
        }
        if tries >= TRIES || !self.sites[other(at)].fenced || self.was_made(order) {
            return;
        }
        // What is known now, under the number that it has.
        let order = ClaimOrder { id: order.id, ..self.new_order(at, true) };
        self.send_claim(at, order);
        self.plan(BETWEEN, Happening::ClaimIsPressed { at, order, tries: tries + 1 });
    }

    pub(crate) fn claim_arrives(&mut self, at: Place, order: ClaimOrder) {
        let (site, peer) = (&self.sites[at], &self.sites[other(at)]);
        let copy = self.was_made(order);
        // A node has a session with a peer only where there is, or was lately, something to say.
        let in_touch = !copy || self.rng.random_ratio(1, 2);
        let heard = peer.up && self.weather != Weather::Cut && in_touch;
        if order.said && !peer.fenced && !heard && !copy {
            // Whoever says so lies, and what follows is theirs.
            return;
        }
        if !site.up || site.disk.store.is_blown() || site.incarnation != order.process {
            return;
        }
        let said = if order.said { "the simulator took the power away" } else { "" };
        let sight = if heard { Peer::Heard } else { Peer::Silent };
        let fenced = match Fenced::vouched_with(said, order.history, order.newest, sight, self.rules.handoff) {
            Ok(fenced) => fenced,
            Err(why) => {
                self.claims.counts.refused += 1;
                self.tell(|| format!("  site {at} refuses a claim: {why}"));
                return;
            }
        };
        let has_volume = self.truth.is_at(&site.disk.store);
        let Some(machine) = &mut self.sites[at].machine else { return };
        let role = matches!(machine, Machine::Source(_));
        match machine.handle(Event::Claim(fenced)) {
            Verdict::Taken => {
                if self.rng.random_ratio(1, 2) {
                    // Whoever has no answer asks again, and that takes its time.
                    let delay = self.rng.random_range(50..1000);
                    self.plan(delay, Happening::ClaimArrives { at, order });
                }
                if role {
                    self.claims.counts.at_source += 1;
                } else {
                    self.claims.counts.at_destination += 1;
                }
                self.sites[at].may_drop_ram = true;
                if !has_volume && self.truth.home != at {
                    // The operator prefers what this site has to nothing.
                    self.truth.reset_at(at);
                }
                self.tell(|| format!("  site {at} claims: {order:?}"));
            }
            Verdict::Ignored(why) => {
                if why == godwit_handoff::Why::ClaimTooOld {
                    self.claims.counts.too_old += 1;
                }
                self.tell(|| format!("  site {at} does not claim: {why}"));
            }
        }
        self.obey(at);
    }

    /// The lost host has power again.
    pub(crate) fn returns(&mut self, at: Place) {
        if !self.sites[at].fenced {
            return;
        }
        let winner = &self.sites[other(at)];
        let claiming = match &winner.machine {
            Some(Machine::Source(s)) => matches!(s.state(), SourceState::Claiming { .. }),
            Some(Machine::Destination(d)) => matches!(d.state(), godwit_handoff::DestinationState::Claiming { .. }),
            None => false,
        };
        if claiming || !winner.ledger.pending.is_empty() {
            self.plan(10, Happening::Returns { at });
            return;
        }
        self.forget_orders();
        let (site, newest) = (&self.sites[at], newest(&self.sites));
        let older = site.ledger.durable.is_some_and(|record| record.overridden_by(VM, newest).is_some());
        let runs_by_itself =
            matches!(site.ledger.durable, Some(Record::Owned(_) | Record::Draining(_) | Record::Started(_)));
        if older && (runs_by_itself || self.rng.random_ratio(1, 4)) {
            self.claims.counts.overwritten += 1;
            self.lift_fence(at);
            return;
        }
        if older {
            self.claims.counts.came_back += 1;
            self.agenda.retain(|_, h| !matches!(h, Happening::Arrives { to, .. } if *to == at));
        }
        self.tell(|| format!("  site {at} comes back as it was, outranked: {older}"));
        self.sites[at].fenced = false;
        let incarnation = self.sites[at].incarnation;
        self.plan(1, Happening::NodeStarts { at, incarnation });
        if !self.claims.forgetful {
            self.plan(BETWEEN, Happening::OutrankIsPressed { at });
        }
    }

    /// The controller sees an older lineage at a host, and tells it.
    pub(crate) fn press_outrank(&mut self, at: Place) {
        let lineage = newest(&self.sites);
        let Some(record) = self.sites[at].ledger.durable else { return };
        if record.overridden_by(VM, lineage).is_none() {
            return;
        }
        // As `contradicts` in the controller: who cannot run it is left alone.
        let idle = self.sites[at].machine.as_ref().is_none_or(|m| m.status() == Status::NotHere);
        if self.sites[at].up && !idle {
            for delay in fate(&mut self.rng, self.weather).into_iter().flatten() {
                self.plan(delay, Happening::OutrankArrives { at, lineage });
            }
        }
        self.plan(BETWEEN, Happening::OutrankIsPressed { at });
    }

    /// As the node's keeper does it: what is here stands still, and is kept.
    pub(crate) fn outranked(&mut self, at: Place, lineage: Lineage) {
        let site = &mut self.sites[at];
        if !site.up || site.disk.store.is_blown() || !site.ledger.pending.is_empty() {
            return;
        }
        let Some(over) = site.ledger.durable.and_then(|record| record.overridden_by(VM, lineage)) else { return };
        site.machine = None;
        site.timer += 1;
        // What is under way is finished first.
        let under_way = usize::from(site.steps.is_some());
        site.effects.truncate(under_way);
        site.effects.push_back(Action::Close);
        if site.qemu.state == QemuState::Running {
            (site.qemu.state, site.qemu.stream) = (QemuState::Stopped, None);
        }
        let incarnation = site.incarnation;
        site.ledger.pending.push_back(over);
        self.tell(|| format!("  site {at} is told that it is outranked by {lineage:?}"));
        let delay = self.slowness();
        self.plan(delay, Happening::Durable { at, incarnation });
        if under_way == 0 {
            let delay = self.slowness();
            self.plan(delay, Happening::EffectAdvances { at, incarnation });
        }
    }

    /// Calm, and no host lost any more.
    pub(crate) fn until_all_are_back(&mut self) -> Result<u64, Violation> {
        let mut events = 0;
        for _ in 0..4 {
            if !self.sites.iter().any(|s| s.fenced) {
                break;
            }
            events += self.until(self.now + CALM)?;
        }
        events += self.until(self.now + CALM)?;
        // Who lost knows it, or can never again be the one that runs the VM.
        for site in &self.sites {
            let waits = site.machine.as_ref().is_some_and(|m| m.status() != Status::NotHere);
            if waits && !site.runs() {
                let state = site.machine.as_ref().map(Machine::describe);
                return Err(Violation::NotConverged(format!("it was never told that it lost: {state:?}")));
            }
        }
        Ok(events)
    }

    /// The VM moves to the other side, and runs there.
    pub(crate) fn way_back(&mut self) -> Result<u64, Violation> {
        debug_assert_eq!(self.theme, Theme::Claims);
        let from = usize::from(!self.sites[0].runs());
        let mut events = 0;
        for attempt in 0..ATTEMPTS {
            let Some(Machine::Source(source)) = &self.sites[from].machine else { break };
            // A number that nobody has heard.
            let mv = MoveId(UNUSED + u64::from(attempt));
            let Ok(ticket) = source.next_ticket(mv) else { break };
            let to = &mut self.sites[other(from)];
            match Destination::stage_with(to.ledger.durable, ticket, self.rules.handoff) {
                Ok(destination) => {
                    to.timer += 1;
                    to.disk.receiving = None;
                    to.machine = Some(Machine::Destination(destination));
                    self.tell(|| format!("  the way back: stage {ticket} at site {}", other(from)));
                    self.obey(other(from));
                }
                Err(why) => return Err(Violation::NotConverged(format!("the way back is refused: {why:?}"))),
            }
            self.sites[from].reserving = Some(ticket);
            self.plan(1, Happening::Begins { at: from, mv, ticket });
            events += self.until(self.now + CALM)?;
            if self.sites[other(from)].runs() {
                return Ok(events);
            }
        }
        let told = self.sites[from].machine.as_ref().map(Machine::describe);
        Err(Violation::NotConverged(format!("the VM cannot be moved back: {told:?}")))
    }

    /// What happened so far.
    #[must_use]
    pub const fn counts(&self) -> Counts {
        self.claims.counts
    }
}
