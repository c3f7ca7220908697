//! Memory that follows its guest: who gives pages, who waits for them, and who gives them up.
//!
//! A guest that runs without all of its pages waits for one at every second step or so. While the other side's QEMU has them, both nodes
//! are there and the link is not cut, they come in the end. When that QEMU is gone the guest waits for ever, and somebody gives its memory
//! up: as it should be, or carelessly.
//!
//! Until then the source's QEMU has all of the guest's memory, and has to give the guest back where the move is undone. QEMU 7.2 does not make
//! that easy: what a node has to do, and to leave alone, so that it always can is a [`ShellGuard`] each.

use crate::check::Violation;
use crate::net::Weather;
use crate::profile::ShellGuard;
use crate::site::QemuState;
use crate::world::{Happening, Place, World, other};
use godwit_handoff::{DestinationState, Event, Machine, Record, Status, Ticket};
use rand::Rng;

/// Between two looks whether pages come, in ticks.
const LOOK: u64 = 20;
/// Between two looks of an operator, in ticks.
const OPERATOR: u64 = 60;

/// What became of memory that followed its guest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Guests that were made to run without all of their pages.
    pub begun: u32,
    /// Of those, the ones whose last page came.
    pub drained: u32,
    /// Those whose memory somebody gave up, because it was lost.
    pub given_up: u32,
}

impl std::ops::Add for Counts {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            begun: self.begun + other.begun,
            drained: self.drained + other.drained,
            given_up: self.given_up + other.given_up,
        }
    }
}

impl World {
    /// Whether the other side's QEMU has what this guest lacks.
    fn are_given(&self, to: Place, ticket: Ticket) -> bool {
        let giver = &self.sites[other(to)].qemu;
        giver.state == QemuState::Serving && giver.stream.is_some_and(|(t, _)| t == ticket)
    }

    /// Whether a guest that runs stands still because of what it lacks.
    pub(crate) fn waits_for_pages(&mut self, at: Place) -> bool {
        let Some(ticket) = self.sites[at].qemu.owed else { return false };
        !self.are_given(at, ticket) || self.rng.random_ratio(1, 2)
    }

    /// The shell has seen that post-copy has begun, and has seen to it that QEMU stays so whatever becomes of the shell.
    pub(crate) fn serves(&mut self, at: Place, stream: (Ticket, u64)) {
        let qemu = &mut self.sites[at].qemu;
        if qemu.stream == Some(stream) && qemu.state == QemuState::Serving {
            qemu.held = true;
            self.inform(at, Event::Postmigrate);
        }
    }

    /// Whose stream is gone gives pages through another one, once the guest has gone; carelessly, as soon as it is sealed.
    pub(crate) fn breaks_off(&mut self, at: Place) {
        let careless = !self.rules.shell.hold(ShellGuard::ResumesOnlyGone);
        let site = &mut self.sites[at];
        if careless && site.qemu.state == QemuState::Serving && matches!(site.ledger.durable, Some(Record::Sealed(_))) {
            site.qemu.stuck = self.rng.random_ratio(1, 4);
            site.qemu.broken_off = true;
        }
    }

    /// Whether a source whose post-copy has begun, and whose guest is to go on, can do that: as QEMU 7.2 can.
    fn can_go_back(&mut self, at: Place) -> bool {
        let shell = self.rules.shell;
        let (stuck, broken_off) = (self.sites[at].qemu.stuck, self.sites[at].qemu.broken_off);
        let sent_all = !shell.hold(ShellGuard::TricklesUntilGone) && self.rng.random_ratio(1, 8);
        let spoilt = !shell.hold(ShellGuard::EndsByItsOwnStream) && (broken_off || self.rng.random_ratio(1, 8));
        !stuck && !sent_all && !spoilt
    }

    /// A source whose post-copy has begun gets its guest back; as the node, where it cannot: what is left is a boot.
    pub(crate) fn goes_back(&mut self, at: Place) {
        if self.can_go_back(at) {
            return;
        }
        if !self.sites[at].may_drop_ram {
            self.violated(Violation::RamDropped);
        }
        self.sites[at].qemu.die(true);
        self.sites[at].qemu.ram = self.last_write;
    }

    /// Pages come, perhaps the last; when they have, the machine is told until it has written it down.
    pub(crate) fn drains(&mut self, to: Place, ticket: Ticket) {
        let site = &self.sites[to];
        let ours = site.qemu.owed.is_none_or(|owed| owed == ticket);
        if !site.runs() || !ours || matches!(site.ledger.durable, Some(Record::Owned(_) | Record::Started(_))) {
            return;
        }
        let talk = site.up && self.sites[other(to)].up && self.weather != Weather::Cut;
        if talk && self.are_given(to, ticket) && self.rng.random_ratio(1, 3) {
            self.sites[to].qemu.owed = None;
            self.pages.drained += 1;
        }
        if self.sites[to].qemu.owed.is_none() {
            self.inform(to, Event::Drained);
        }
        self.plan(LOOK, Happening::Drains { to, ticket });
    }

    /// What is about to end here is needed over there, or was here, and nobody has given it up.
    pub(crate) fn look_who_needs_it(&mut self, at: Place) {
        let (site, peer) = (&self.sites[at], &self.sites[other(at)]);
        let ours = site.qemu.stream.map(|(ticket, _)| ticket);
        let needed = site.qemu.state == QemuState::Serving
            && ours.is_some()
            && peer.qemu.owed == ours
            && peer.qemu.state == QemuState::Running;
        let lacking = site.qemu.owed.filter(|_| site.qemu.state == QemuState::Running);
        let in_vain = lacking.is_some_and(|ticket| self.are_given(at, ticket));
        if (needed && !peer.fenced || in_vain) && !site.may_drop_ram {
            self.violated(Violation::RamDropped);
        }
    }

    /// Somebody gives memory up: that is lost, or, carelessly, any.
    pub(crate) fn gives_up(&mut self, at: Place) {
        let lost = self.sites[at].machine.as_ref().is_some_and(|m| m.status() == Status::MemoryLost);
        let drains = matches!(&self.sites[at].machine, Some(Machine::Destination(d))
            if matches!(d.state(), DestinationState::Draining { .. }));
        if lost || (drains && self.rng.random_ratio(1, 4)) {
            self.tell(|| format!("  somebody gives up the memory at site {at}, lost: {lost}"));
            self.pages.given_up += u32::from(lost);
            self.inform(at, Event::Abandon);
        }
        self.plan(OPERATOR, Happening::GivesUp { at });
    }
}
