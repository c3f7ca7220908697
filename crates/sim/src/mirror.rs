//! A move's streams, as both nodes serve them: the mirror of the disk, and what comes of QEMU's memory.
//!
//! Within a session messages come in order and none is lost: the link sees to that over cuts, too. A node that dies ends the
//! session, and with it every stream.

use crate::check::{Violation, stamps_tell_the_truth};
use crate::net::Weather;
use crate::site::{Moving, QemuState, Request, Wish};
use crate::world::{Happening, Place, TICK, Theme, World, other};
use godwit_handoff::{Event, Ticket};
use godwit_volume::mirror::{MirrorError, Source, State, Target};
use godwit_volume::{Replica, VolumeError};
use rand::Rng;
use std::collections::VecDeque;
use std::path::Path;

/// Between two looks at the clock of a mirror, in ticks.
const LOOK: u64 = 8;
/// How long a message that meets a cut waits before it is tried again, in ticks.
const CUT: u64 = 5;

/// A mirror's stream.
#[derive(Debug)]
pub struct Link {
    /// The move's number.
    pub id: u64,
    /// The attempt.
    pub ticket: Ticket,
    there: VecDeque<Vec<u8>>,
    back: VecDeque<Vec<u8>>,
    /// Whether a delivery is planned.
    busy: [bool; 2],
}

impl World {
    pub(crate) fn start_mirror(&mut self, at: Place, id: u64, ticket: Ticket) {
        if self.diskless {
            self.memory_goes(at);
            return;
        }
        self.sites[at].disk.source = Some(Source::new());
        let link = Link { id, ticket, there: VecDeque::new(), back: VecDeque::new(), busy: [false; 2] };
        self.links[at] = Some(link);
        let delay = self.rng.random_range(1..10);
        self.plan(delay, Happening::MirrorOpens { from: at, id });
        self.plan(LOOK, Happening::MirrorTicks { from: at, id });
    }

    fn link_is(&self, from: Place, id: u64) -> bool {
        self.links[from].as_ref().is_some_and(|l| l.id == id)
    }

    /// A stream is gone: each side that is still there notices, in its time.
    fn break_link(&mut self, from: Place) {
        let Some(link) = self.links[from].take() else { return };
        let session = self.session;
        let (here, there) = (self.rng.random_range(1..60), self.rng.random_range(1..60));
        self.plan(here, Happening::StreamFails { at: from, id: link.id });
        self.plan(there, Happening::ArrivalFails { at: other(from), ticket: link.ticket, session });
    }

    pub(crate) fn mirror_opens(&mut self, from: Place, id: u64) {
        if !self.link_is(from, id) {
            return;
        }
        if self.weather == Weather::Cut {
            self.plan(CUT, Happening::MirrorOpens { from, id });
            return;
        }
        let to = other(from);
        let ticket = self.links[from].as_ref().map(|l| l.ticket);
        let disk = &mut self.sites[to].disk;
        let (Some(replica), true) = (&disk.replica, disk.receiving == ticket && ticket.is_some()) else {
            self.break_link(from);
            return;
        };
        match Target::new(replica) {
            Ok((target, first)) => {
                disk.target = Some(target);
                match first.all(replica) {
                    Ok(first) => self.queue(from, true, first),
                    Err(error) => self.violated(Violation::Mirror(error.to_string())),
                }
            }
            Err(error) => self.violated(Violation::Mirror(error.to_string())),
        }
    }

    fn queue(&mut self, from: Place, back: bool, messages: impl IntoIterator<Item = Vec<u8>>) {
        let Some(link) = &mut self.links[from] else { return };
        let queue = if back { &mut link.back } else { &mut link.there };
        queue.extend(messages);
        if !queue.is_empty() && !link.busy[usize::from(back)] {
            link.busy[usize::from(back)] = true;
            let id = link.id;
            let delay = self.rng.random_range(1..10);
            self.plan(delay, Happening::MirrorDelivers { from, id, back });
        }
    }

    pub(crate) fn mirror_sends(&mut self, from: Place, messages: Vec<Vec<u8>>) {
        self.queue(from, false, messages);
    }

    pub(crate) fn mirror_delivers(&mut self, from: Place, id: u64, back: bool) {
        if !self.link_is(from, id) {
            return;
        }
        if self.weather == Weather::Cut {
            self.plan(CUT, Happening::MirrorDelivers { from, id, back });
            return;
        }
        let most = if self.rng.random_ratio(1, 2) { 64 } else { self.rng.random_range(1..4) };
        for _ in 0..most {
            let Some(link) = &mut self.links[from] else { return };
            let queue = if back { &mut link.back } else { &mut link.there };
            let Some(message) = queue.pop_front() else { break };
            if back {
                self.source_hears(from, &message);
            } else {
                self.target_hears(from, &message);
            }
        }
        let Some(link) = &mut self.links[from] else { return };
        let queue = if back { &link.back } else { &link.there };
        let more = !queue.is_empty();
        link.busy[usize::from(back)] = more;
        if more {
            let delay = self.rng.random_range(1..5);
            self.plan(delay, Happening::MirrorDelivers { from, id, back });
        }
    }

    fn target_hears(&mut self, from: Place, message: &[u8]) {
        let to = other(from);
        let disk = &mut self.sites[to].disk;
        let ticket = self.links[from].as_ref().map(|l| l.ticket);
        let (Some(replica), Some(target), true) = (&disk.replica, &mut disk.target, disk.receiving == ticket) else {
            self.break_link(from);
            return;
        };
        match target.handle(message, replica) {
            Ok(answer) => {
                let complete = target.is_complete();
                self.queue(from, true, [answer]);
                if let (true, Some(ticket)) = (complete, ticket) {
                    self.sites[to].disk.complete = Some(ticket);
                    // The node goes on when the source has closed the stream.
                    let delay = self.rng.random_range(2..12);
                    self.plan(delay, Happening::MirrorCloses { to, ticket });
                }
            }
            Err(error) => self.mirror_failed(from, to, &error),
        }
    }

    fn source_hears(&mut self, from: Place, message: &[u8]) {
        let disk = &mut self.sites[from].disk;
        let (Some(replica), Some(source)) = (&disk.replica, &mut disk.source) else { return };
        let before = source.state();
        match source.handle(message, replica) {
            Ok(()) => {
                if before == State::Exchanging && source.state() != before {
                    self.check_stamps();
                }
                self.mirror_goes_on(from);
            }
            Err(error) => self.mirror_failed(from, from, &error),
        }
    }

    /// What was just compared was compared by stamps, so they have to be right.
    fn check_stamps(&mut self) {
        if let Err(violation) = stamps_tell_the_truth(&self.sites) {
            self.violated(violation);
        }
    }

    fn mirror_failed(&mut self, from: Place, at: Place, error: &MirrorError) {
        if self.sites[at].disk.store.is_blown() {
            return;
        }
        match error {
            // It became a primary meanwhile.
            MirrorError::Volume(VolumeError::Frozen) => self.break_link(from),
            error => self.violated(Violation::Mirror(error.to_string())),
        }
    }

    pub(crate) fn mirror_ticks(&mut self, from: Place, id: u64) {
        let site = &self.sites[from];
        let ended = site.disk.source.as_ref().is_none_or(|s| s.state() == State::Complete);
        if ended || site.moving.is_none_or(|m| m.id != id) {
            return;
        }
        self.mirror_goes_on(from);
        self.plan(LOOK, Happening::MirrorTicks { from, id });
    }

    /// One turn of a mirror's source: the clock, what is to be sent, who may be answered, whether memory may go.
    pub(crate) fn mirror_goes_on(&mut self, at: Place) {
        let now = TICK * u32::try_from(self.now).unwrap_or(u32::MAX);
        let disk = &mut self.sites[at].disk;
        let (Some(replica), Some(source)) = (&disk.replica, &mut disk.source) else { return };
        let let_go = source.tick(now);
        let mut ready = vec![];
        loop {
            match source.poll(replica) {
                Ok(messages) if messages.is_empty() => break,
                Ok(messages) => ready.extend(messages),
                Err(error) => {
                    self.violated(Violation::Mirror(error.to_string()));
                    return;
                }
            }
        }
        let synchronous = source.is_synchronous();
        let state = source.state();
        self.tell(|| {
            format!("  site {at}: mirror {state:?}, sends {}, synchronous {synchronous}, let go {let_go}", ready.len())
        });
        self.queue(at, false, ready);
        self.answer(at);
        if synchronous {
            self.memory_goes(at);
        }
    }

    /// The disks are in step: QEMU migrates.
    fn memory_goes(&mut self, at: Place) {
        let site = &mut self.sites[at];
        if let Some(moving) = &mut site.moving
            && !moving.memory
            && site.qemu.state == QemuState::Running
        {
            moving.memory = true;
            let stream = (moving.ticket, moving.id);
            site.qemu.stream = Some(stream);
            let delay = self.rng.random_range(10..80);
            self.plan(delay, Happening::GuestStops { at, stream });
        }
    }

    /// The last round: vCPUs stop. QEMU still has requests of the guest, and flushes its disks.
    pub(crate) fn guest_stops(&mut self, at: Place, stream: (Ticket, u64)) {
        let qemu = &mut self.sites[at].qemu;
        if qemu.stream == Some(stream) && qemu.state == QemuState::Running {
            qemu.state = QemuState::Stopped;
            if self.theme == Theme::Pages && self.rng.random_ratio(3, 4) {
                self.sites[at].moving = self.sites[at].moving.map(|moving| Moving { follows: true, ..moving });
            }
            let qemu = &mut self.sites[at].qemu;
            qemu.requests.push_back(Request { wish: Wish::Flush, taken: None });
            let delay = self.rng.random_range(1..20);
            self.plan(delay, Happening::RamEnds { at, stream });
            self.inform(at, Event::VcpusStopped);
        }
    }

    /// The end of RAM comes when every request of the guest was answered.
    pub(crate) fn ram_ends(&mut self, at: Place, stream: (Ticket, u64)) {
        let site = &mut self.sites[at];
        if site.qemu.stream != Some(stream) || site.qemu.state != QemuState::Stopped {
            return;
        }
        if !site.qemu.requests.is_empty() {
            self.plan(3, Happening::RamEnds { at, stream });
            return;
        }
        let Some(moving) = site.moving.as_mut().filter(|m| m.id == stream.1) else { return };
        moving.ram_ended = true;
        let owed = moving.follows;
        let (ram, session) = (site.qemu.ram, self.session);
        if owed {
            site.qemu.state = QemuState::Serving;
            let delay = self.rng.random_range(1..10);
            self.plan(delay, Happening::Serves { at, stream });
        }
        let delay = self.rng.random_range(1..20);
        self.plan(delay, Happening::StreamEnds { to: other(at), stream, ram, session, owed });
    }

    pub(crate) fn stream_ends(&mut self, to: Place, stream: (Ticket, u64), ram: u64, session: u64, owed: bool) {
        if session != self.session {
            return;
        }
        if self.weather == Weather::Cut {
            self.plan(CUT, Happening::StreamEnds { to, stream, ram, session, owed });
            return;
        }
        let qemu = &mut self.sites[to].qemu;
        let expected = qemu.stream.is_some_and(|(ticket, _)| ticket == stream.0);
        if expected && qemu.state == QemuState::Incoming {
            qemu.state = if owed { QemuState::Fetching } else { QemuState::Loaded };
            qemu.owed = owed.then_some(stream.0);
            qemu.ram = ram;
            self.look_whether_all_is_here(to);
        }
    }

    /// When memory and disk are here, the machine is told.
    pub(crate) fn look_whether_all_is_here(&mut self, at: Place) {
        let site = &self.sites[at];
        let expected = site.disk.receiving.filter(|t| self.diskless || site.disk.complete == Some(*t));
        let Some(ticket) = expected else { return };
        let event = match site.qemu.state {
            QemuState::Loaded => Event::Loaded,
            QemuState::Fetching => Event::Listens,
            _ => return,
        };
        if site.qemu.stream.is_none_or(|(t, _)| t != ticket) {
            return;
        }
        let promised = self.frozen.get(&ticket).map_or(&[][..], Vec::as_slice);
        let here = site.disk.store.contents(|found| found == promised);
        // Nor would it have less if it lost its power now.
        let dark = site.disk.store.without_power();
        let opened = Replica::open_on_with(Path::new("dark"), dark.media(), self.rules.volume);
        if self.diskless {
            // Nothing was promised.
        } else if !here || opened.is_err() || !dark.contents(|found| found == promised) {
            self.violated(Violation::Incomplete);
        }
        self.verified.insert(ticket);
        self.regret(other(at));
        self.inform(at, event);
    }

    /// No write is taken any more; what the volume is now is what the destination must have.
    pub(crate) fn freeze(&mut self, at: Place) {
        let disk = &mut self.sites[at].disk;
        disk.open = false;
        if let Some(replica) = &disk.replica {
            replica.freeze();
        }
        if let Some(source) = &mut disk.source {
            source.stop();
        }
        if let Some(moving) = self.sites[at].moving {
            let now = self.truth.now();
            self.frozen.insert(moving.ticket, now);
        }
        self.mirror_goes_on(at);
    }

    /// A stream of a move from here broke: no more mirror, and the machine is told.
    pub(crate) fn stream_fails(&mut self, at: Place, id: u64) {
        if self.sites[at].moving.is_some_and(|m| m.id == id) {
            self.breaks_off(at);
            self.sites[at].disk.source = None;
            self.answer(at);
            self.inform(at, Event::MigrationFailed);
        }
    }

    pub(crate) fn abort(&mut self, at: Place) {
        let site = &mut self.sites[at];
        site.moving = None;
        site.qemu.stream = None;
        site.disk.source = None;
        self.answer(at);
        self.break_link(at);
    }

    /// A node's process ends, and every stream with it.
    pub(crate) fn end_session(&mut self, at: Place) {
        let left = other(at);
        let moving = self.sites[left].moving;
        let receiving = self.sites[left].disk.receiving;
        self.session += 1;
        self.links = [None, None];
        let delay = self.rng.random_range(1..80);
        let session = self.session;
        if let Some(moving) = moving {
            self.plan(delay, Happening::StreamFails { at: left, id: moving.id });
        }
        if let Some(ticket) = receiving {
            self.plan(delay, Happening::ArrivalFails { at: left, ticket, session });
        }
    }

    /// What came so far is worth nothing without the rest. Means nothing any more once the VM is granted.
    pub(crate) fn arrival_fails(&mut self, at: Place, ticket: Ticket, session: u64) {
        let site = &mut self.sites[at];
        if site.disk.receiving != Some(ticket) || session != self.session {
            return;
        }
        let in_qemu = matches!(site.qemu.state, QemuState::Loaded | QemuState::Fetching);
        if (self.diskless || site.disk.complete == Some(ticket)) && in_qemu {
            self.look_whether_all_is_here(at);
            return;
        }
        site.disk.target = None;
        self.inform(at, Event::Cancel);
    }

    pub(crate) fn settles(&mut self, at: Place, incarnation: u32) {
        let site = &mut self.sites[at];
        if site.incarnation != incarnation {
            return;
        }
        if let Some(replica) = &site.disk.replica
            && let Err(error) = replica.settle()
            && !site.disk.store.is_blown()
        {
            self.violated(Violation::Volume(error.to_string()));
        }
        let delay = self.rng.random_range(20..300);
        self.plan(delay, Happening::Settles { at, incarnation });
    }
}
