//! The world: time, faults, the controller, and the shell around each machine.

use crate::check::{Failure, Violation, at_every_instant, at_rest, survivor};
use crate::net::{OLDEST, Weather, fate};
use crate::site::{QemuState, Site};
use godwit_handoff::{
    Action, Destination, DestinationState, Event, Fenced, Guard, Guards, Lineage, Machine, Message, MoveId, Owner,
    PeerHistory, Record, Run, SourceState, Ticket, Verdict, VmId,
};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use std::collections::{BTreeMap, BTreeSet};

/// How long the world may take to come to rest after the last fault, in ticks: the oldest message, and a hundred
/// retransmissions.
pub const CALM: u64 = OLDEST + 2000;
/// The retransmission interval, in ticks.
const RETRANSMIT: u64 = 20;
/// The one VM.
const VM: VmId = VmId(1);
/// Past this many events a schedule does not end by itself: some machine chatters.
const MOST_EVENTS: u64 = 50_000;

/// Whether the story is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// No.
    Silent,
    /// Yes.
    Traced,
}

/// Which of the two sites.
type Place = usize;

const fn other(place: Place) -> Place {
    1 - place
}

/// Something that is going to happen.
#[derive(Clone, Debug)]
enum Happening {
    Arrives { to: Place, message: Message },
    EffectDone { at: Place, incarnation: u32 },
    Durable { at: Place, incarnation: u32 },
    TimerFires { at: Place, timer: u64 },
    GuestStops { at: Place, stream: (Ticket, u64) },
    StreamEnds { to: Place, stream: (Ticket, u64), ram: u64 },
    ReachesPostmigrate { at: Place, stream: (Ticket, u64) },
    NodeStarts { at: Place, incarnation: u32 },
    Begins { at: Place, mv: MoveId, ticket: Ticket },
    Cancels { at: Place },
    FenceLifted { at: Place },
    LinkHeals,
    ControllerActs,
}

/// One seed's world.
pub struct World {
    seed: u64,
    rng: SmallRng,
    guards: Guards,
    now: u64,
    agenda: BTreeMap<(u64, u64), Happening>,
    entries: u64,
    sites: [Site; 2],
    /// The volume: the number of the last acknowledged write.
    last_write: u64,
    weather: Weather,
    calm_from: u64,
    /// One fault in about so many events; none in calm.
    fault_every: u32,
    streams: u64,
    verified: BTreeSet<Ticket>,
    violation: Option<Violation>,
    trace: Option<Vec<String>>,
}

impl World {
    /// The beginning: the VM runs at the first site.
    #[must_use]
    pub fn new(seed: u64, guards: Guards, mode: Mode) -> Self {
        let mut rng = SmallRng::seed_from_u64(seed);
        let calm_from = rng.random_range(400..1600);
        let fault_every = [u32::MAX, 150, 50, 20][rng.random_range(0..4)];
        let weather = if rng.random_ratio(1, 4) { Weather::Fair } else { Weather::Bad };
        let mut it = Self {
            seed,
            rng,
            guards,
            now: 0,
            agenda: BTreeMap::new(),
            entries: 0,
            sites: [Site::new(), Site::new()],
            last_write: 0,
            weather,
            calm_from,
            fault_every,
            streams: 0,
            verified: BTreeSet::new(),
            violation: None,
            trace: (mode == Mode::Traced).then(Vec::new),
        };
        let owned = Record::Owned(Owner::first(VM));
        it.sites[0].ledger.durable = Some(owned);
        it.sites[0].qemu.state = QemuState::Running;
        it.adopt(0);
        it.plan(1, Happening::ControllerActs);
        it
    }

    /// Runs to the end; gives the number of events.
    ///
    /// # Errors
    /// The first violation.
    pub fn run(mut self) -> Result<u64, Box<Failure>> {
        match self.live() {
            Ok(events) => Ok(events),
            Err(violation) => {
                Err(Box::new(Failure { seed: self.seed, violation, trace: self.trace.unwrap_or_default() }))
            }
        }
    }

    fn live(&mut self) -> Result<u64, Violation> {
        let mut events = self.until(self.calm_from)?;
        self.weather = Weather::Fair;
        self.fault_every = u32::MAX;
        self.tell(|| "---- calm ----".to_owned());
        let lost = self.rng.random_ratio(1, 6).then(|| self.rng.random_range(0..2));
        if let Some(lost) = lost
            && !self.sites.iter().any(|s| s.fenced)
        {
            let left = other(lost);
            self.fence(lost);
            events += self.until(self.calm_from + CALM)?;
            survivor(&self.sites[left])?;
            self.claim(left);
            events += self.until(self.calm_from + 2 * CALM)?;
            survivor(&self.sites[left])?;
            self.plan(0, Happening::FenceLifted { at: lost });
            events += self.until(self.calm_from + 3 * CALM)?;
        } else {
            events += self.until(self.calm_from + CALM)?;
        }
        at_rest(&self.sites)?;
        Ok(events)
    }

    fn until(&mut self, end: u64) -> Result<u64, Violation> {
        let mut events = 0;
        while let Some(entry) = self.agenda.first_entry() {
            if entry.key().0 > end {
                break;
            }
            let ((at, _), happening) = entry.remove_entry();
            self.now = at;
            events += 1;
            self.tell(|| format!("{happening:?}"));
            self.happen(happening);
            self.judge()?;
            self.guests_write();
            self.strike();
            self.judge()?;
            if events > MOST_EVENTS {
                return Err(Violation::NotConverged("the machines never stop talking".to_owned()));
            }
        }
        self.now = end;
        Ok(events)
    }

    fn judge(&mut self) -> Result<(), Violation> {
        if let Some(violation) = self.violation.take() {
            return Err(violation);
        }
        at_every_instant(&self.sites)
    }

    fn plan(&mut self, delay: u64, happening: Happening) {
        self.entries += 1;
        self.agenda.insert((self.now + delay, self.entries), happening);
    }

    /// How long a disk or a hypervisor takes: mostly little, sometimes long, which widens every window for a crash.
    fn slowness(&mut self) -> u64 {
        if self.rng.random_ratio(1, 8) { self.rng.random_range(10..60) } else { self.rng.random_range(1..10) }
    }

    fn tell(&mut self, line: impl FnOnce() -> String) {
        if let Some(trace) = &mut self.trace {
            trace.push(format!("{:>6}  {}", self.now, line()));
        }
    }

    fn happen(&mut self, happening: Happening) {
        match happening {
            Happening::Arrives { to, message } => self.inform(to, Event::Message(message)),
            Happening::EffectDone { at, incarnation } => {
                if self.sites[at].incarnation == incarnation {
                    self.finish_effect(at);
                }
            }
            Happening::Durable { at, incarnation } => {
                if self.sites[at].incarnation == incarnation {
                    self.finish_write(at);
                }
            }
            Happening::TimerFires { at, timer } => {
                if self.sites[at].timer == timer {
                    self.inform(at, Event::Timer);
                }
            }
            Happening::GuestStops { at, stream } => {
                let qemu = &mut self.sites[at].qemu;
                if qemu.stream == Some(stream) && qemu.state == QemuState::Running {
                    qemu.state = QemuState::Stopped;
                    let ram = qemu.ram;
                    let delay = self.rng.random_range(1..20);
                    self.plan(delay, Happening::StreamEnds { to: other(at), stream, ram });
                    self.inform(at, Event::VcpusStopped);
                }
            }
            Happening::StreamEnds { to, stream, ram } => {
                let qemu = &mut self.sites[to].qemu;
                let expected = qemu.stream.is_some_and(|(ticket, _)| ticket == stream.0);
                if self.weather != Weather::Cut && expected && qemu.state == QemuState::Incoming {
                    qemu.state = QemuState::Loaded;
                    qemu.ram = ram;
                    self.verified.insert(stream.0);
                    self.inform(to, Event::Loaded);
                }
            }
            Happening::ReachesPostmigrate { at, stream } => {
                let qemu = &mut self.sites[at].qemu;
                if qemu.stream == Some(stream) && qemu.state == QemuState::Stopped {
                    qemu.state = QemuState::Postmigrate;
                    self.inform(at, Event::Postmigrate);
                }
            }
            Happening::NodeStarts { at, incarnation } => {
                let site = &mut self.sites[at];
                if site.incarnation == incarnation && !site.fenced && !site.up {
                    site.up = true;
                    self.adopt(at);
                }
            }
            Happening::Begins { at, mv, ticket } => {
                if let Some(Machine::Source(source)) = &mut self.sites[at].machine
                    && source.next_ticket(mv) == Ok(ticket)
                {
                    source.begin(mv).expect("next_ticket said that it can begin");
                    self.obey(at);
                }
            }
            Happening::Cancels { at } => self.inform(at, Event::Cancel),
            Happening::FenceLifted { at } => self.lift_fence(at),
            Happening::LinkHeals => {
                if self.weather == Weather::Cut {
                    self.weather = Weather::Bad;
                }
            }
            Happening::ControllerActs => self.control(),
        }
    }

    // ---- the shell around a machine -------------------------------------------------------------------------

    /// A node starts: it reads its ledger, looks at its QEMU, and goes on.
    fn adopt(&mut self, at: Place) {
        let site = &mut self.sites[at];
        site.machine = site.ledger.durable.map(|record| Machine::recover_with(record, site.seen(), self.guards));
        self.tell(|| format!("  site {at} starts"));
        self.obey(at);
    }

    fn inform(&mut self, at: Place, event: Event) {
        let site = &mut self.sites[at];
        if !site.up {
            return;
        }
        let Some(machine) = &mut site.machine else { return };
        let verdict = machine.handle(event);
        if self.trace.is_some() {
            let line = format!("  site {at}: {verdict:?}, {}", machine.describe());
            self.tell(|| line);
        }
        self.obey(at);
    }

    /// Does what the machine asks for.
    fn obey(&mut self, at: Place) {
        while let Some(action) = self.sites[at].machine.as_mut().and_then(Machine::poll_action) {
            self.tell(|| format!("  site {at} -> {action:?}"));
            let incarnation = self.sites[at].incarnation;
            match action {
                Action::Send(message) => {
                    for delay in fate(&mut self.rng, self.weather).into_iter().flatten() {
                        self.plan(delay, Happening::Arrives { to: other(at), message });
                    }
                }
                Action::SetTimer => {
                    self.sites[at].timer += 1;
                    let timer = self.sites[at].timer;
                    self.plan(RETRANSMIT, Happening::TimerFires { at, timer });
                }
                Action::Persist(record) => {
                    self.sites[at].ledger.pending.push_back(record);
                    if self.sites[at].ledger.pending.len() == 1 {
                        let delay = self.slowness();
                        self.plan(delay, Happening::Durable { at, incarnation });
                    }
                }
                effect => {
                    self.sites[at].effects.push_back(effect);
                    if self.sites[at].effects.len() == 1 {
                        let delay = self.slowness();
                        self.plan(delay, Happening::EffectDone { at, incarnation });
                    }
                }
            }
        }
        if self.sites[at].machine.as_ref().is_some_and(|m| m.settled().is_some()) {
            // The destination's part is over: its effects are finished, and the source's machine takes over.
            while let Some(effect) = self.sites[at].effects.pop_front() {
                self.carry_out(at, effect);
            }
            self.sites[at].incarnation += 1;
            self.adopt(at);
        }
    }

    fn finish_write(&mut self, at: Place) {
        let site = &mut self.sites[at];
        let Some(record) = site.ledger.pending.pop_front() else { return };
        self.make_durable(at, record);
        if !self.sites[at].ledger.pending.is_empty() {
            let delay = self.slowness();
            let incarnation = self.sites[at].incarnation;
            self.plan(delay, Happening::Durable { at, incarnation });
        }
        self.inform(at, Event::Persisted(record));
    }

    fn make_durable(&mut self, at: Place, record: Record) {
        self.sites[at].ledger.durable = Some(record);
        if let Record::Sealed(ticket) = record
            && !self.verified.contains(&ticket)
        {
            self.violation = Some(Violation::SealedTooEarly);
        }
    }

    fn finish_effect(&mut self, at: Place) {
        let Some(effect) = self.sites[at].effects.pop_front() else { return };
        if !self.sites[at].effects.is_empty() {
            let delay = self.slowness();
            let incarnation = self.sites[at].incarnation;
            self.plan(delay, Happening::EffectDone { at, incarnation });
        }
        if let Some(report) = self.carry_out(at, effect) {
            self.inform(at, report);
        }
    }

    /// What an effect does to the world, and what is reported of it.
    fn carry_out(&mut self, at: Place, effect: Action) -> Option<Event> {
        self.tell(|| format!("  site {at} did {effect:?}"));
        let last_write = self.last_write;
        let site = &mut self.sites[at];
        match effect {
            Action::Open(..) => {
                site.export_open = true;
                site.endpoint_active = true;
                Some(Event::Opened)
            }
            Action::Close => {
                site.export_open = false;
                site.endpoint_active = false;
                Some(Event::Closed)
            }
            Action::Run(run) => {
                if !site.export_open {
                    self.violation = Some(Violation::RunsClosed);
                }
                match (run, site.qemu.state) {
                    (Run::Cont, QemuState::Dead) => return None,
                    // A QEMU continued on half a stream runs on garbage, which remembers nothing.
                    (Run::Cont, QemuState::Incoming) => site.qemu.ram = 0,
                    (Run::Cont, _) => {}
                    (Run::Boot, _) => {
                        if site.qemu.quit && !site.may_drop_ram {
                            self.violation = Some(Violation::RamDropped);
                        }
                        site.qemu.ram = last_write;
                    }
                }
                site.qemu.state = QemuState::Running;
                site.qemu.stream = None;
                site.qemu.quit = false;
                site.may_drop_ram = false;
                Some(Event::Ran)
            }
            Action::Quit => {
                site.qemu.quit |= site.qemu.state != QemuState::Dead;
                site.qemu.state = QemuState::Dead;
                site.qemu.stream = None;
                None
            }
            Action::Migrate(ticket) => {
                self.streams += 1;
                let stream = (ticket, self.streams);
                site.qemu.stream = Some(stream);
                let delay = self.rng.random_range(10..80);
                self.plan(delay, Happening::GuestStops { at, stream });
                None
            }
            Action::AnswerShut => {
                if let Some(stream) = site.qemu.stream {
                    let delay = self.rng.random_range(1..10);
                    self.plan(delay, Happening::ReachesPostmigrate { at, stream });
                }
                None
            }
            Action::AbortMigration => {
                site.qemu.stream = None;
                None
            }
            Action::Receive(ticket) => {
                self.streams += 1;
                site.qemu.state = QemuState::Incoming;
                site.qemu.stream = Some((ticket, self.streams));
                site.qemu.quit = false;
                None
            }
            Action::Persist(_) | Action::Send(_) | Action::SetTimer => None,
        }
    }

    // ---- the guest ----------------------------------------------------------------------------------------

    fn guests_write(&mut self) {
        for site in &mut self.sites {
            if site.runs() && site.export_open {
                if site.qemu.ram != self.last_write {
                    self.violation = Some(Violation::LostWrite);
                }
                self.last_write += 1;
                site.qemu.ram = self.last_write;
            }
        }
    }

    // ---- what goes wrong ------------------------------------------------------------------------------------

    fn strike(&mut self) {
        if self.fault_every == u32::MAX {
            return;
        }
        // Aimed at what is under way: a node dies while a record is being written or an effect carried out.
        let busy = |s: &Site| !s.ledger.pending.is_empty() || !s.effects.is_empty();
        if let Some(at) = self.sites.iter().position(busy)
            && self.rng.random_ratio(1, self.fault_every)
        {
            self.kill_node(at);
        }
        if !self.rng.random_ratio(1, self.fault_every) {
            return;
        }
        let at = self.rng.random_range(0..2);
        match self.rng.random_range(0..10) {
            0..=3 => self.kill_node(at),
            4..=5 => self.lose_power(at),
            6 => self.kill_qemu(at),
            7..=8 => self.break_socket(at),
            _ => {
                self.tell(|| "! the link is cut".to_owned());
                self.weather = Weather::Cut;
                let delay = self.rng.random_range(20..200);
                self.plan(delay, Happening::LinkHeals);
            }
        }
    }

    /// The process dies. Any prefix of what was being written or done has happened.
    fn kill_node(&mut self, at: Place) {
        if !self.sites[at].up {
            return;
        }
        self.tell(|| format!("! site {at}: the node is killed"));
        self.lose_process(at);
        let done = self.rng.random_range(0..=self.sites[at].effects.len());
        for _ in 0..done {
            if let Some(effect) = self.sites[at].effects.pop_front() {
                self.carry_out(at, effect);
            }
        }
        self.sites[at].effects.clear();
        let site = &mut self.sites[at];
        site.export_open = false;
        match site.qemu.state {
            QemuState::Stopped if site.qemu.stream.is_some() => site.qemu.state = QemuState::Running,
            QemuState::Incoming => site.qemu.state = QemuState::Dead,
            _ => {}
        }
        if site.qemu.state != QemuState::Loaded {
            site.qemu.stream = None;
        }
    }

    fn lose_power(&mut self, at: Place) {
        if self.sites[at].fenced {
            return;
        }
        self.tell(|| format!("! site {at}: power is lost"));
        self.lose_process(at);
        let site = &mut self.sites[at];
        site.effects.clear();
        site.export_open = false;
        site.endpoint_active = false;
        if site.qemu.state != QemuState::Dead {
            site.qemu.state = QemuState::Dead;
            site.qemu.quit = false;
        }
        site.qemu.stream = None;
    }

    fn lose_process(&mut self, at: Place) {
        let kept = self.rng.random_range(0..=self.sites[at].ledger.pending.len());
        for _ in 0..kept {
            if let Some(record) = self.sites[at].ledger.pending.pop_front() {
                self.make_durable(at, record);
            }
        }
        let site = &mut self.sites[at];
        site.ledger.pending.clear();
        site.machine = None;
        site.up = false;
        site.incarnation += 1;
        site.timer += 1;
        let incarnation = site.incarnation;
        let delay = self.rng.random_range(5..80);
        self.plan(delay, Happening::NodeStarts { at, incarnation });
    }

    fn kill_qemu(&mut self, at: Place) {
        let qemu = &mut self.sites[at].qemu;
        if qemu.state == QemuState::Dead {
            return;
        }
        qemu.state = QemuState::Dead;
        qemu.quit = false;
        qemu.stream = None;
        self.tell(|| format!("! site {at}: QEMU dies"));
        self.inform(at, Event::QemuDied);
    }

    fn break_socket(&mut self, at: Place) {
        let site = &mut self.sites[at];
        match site.qemu.state {
            QemuState::Incoming => self.kill_qemu(at),
            QemuState::Running | QemuState::Stopped if site.qemu.stream.is_some() => {
                site.qemu.state = QemuState::Running;
                site.qemu.stream = None;
                self.tell(|| format!("! site {at}: the migration socket breaks"));
                self.inform(at, Event::MigrationFailed);
            }
            _ => {}
        }
    }

    // ---- the controller and the operator ---------------------------------------------------------------------

    fn control(&mut self) {
        if self.now >= self.calm_from {
            return;
        }
        let delay = self.rng.random_range(10..80);
        self.plan(delay, Happening::ControllerActs);
        let at = self.rng.random_range(0..2);
        match self.rng.random_range(0..16) {
            0..=9 => {
                self.order_move(0);
                self.order_move(1);
            }
            10..=13 => {
                self.tell(|| format!("  cancel at site {at}"));
                self.inform(at, Event::Cancel);
            }
            14 if !self.sites.iter().any(|s| s.fenced) && self.rng.random_ratio(1, 2) => {
                self.fence(other(at));
                self.claim(at);
                let delay = self.rng.random_range(50..200);
                self.plan(delay, Happening::FenceLifted { at: other(at) });
            }
            _ => {}
        }
    }

    fn order_move(&mut self, from: Place) {
        let Some(Machine::Source(source)) = &self.sites[from].machine else { return };
        let SourceState::Owning { owner, .. } = source.state() else { return };
        // A controller that forgot what it ordered uses old ids again.
        let fresh = MoveId(owner.last.map_or(1, |last| last.0 + 1));
        let mv = if self.rng.random_ratio(1, 3) { MoveId(self.rng.random_range(1..4)) } else { fresh };
        let Ok(ticket) = source.next_ticket(mv) else { return };
        let to = &mut self.sites[other(from)];
        if to.up && to.effects.is_empty() && to.ledger.pending.is_empty() {
            if let Ok(destination) = Destination::stage_with(to.ledger.durable, ticket, self.guards) {
                to.machine = Some(Machine::Destination(destination));
                self.tell(|| format!("  stage {ticket} at site {}", other(from)));
                self.obey(other(from));
            } else if !self.rng.random_ratio(1, 4) {
                return;
            }
        }
        // Sometimes the controller dies between the two orders.
        if !self.rng.random_ratio(1, 8) {
            let delay = self.rng.random_range(1..40);
            self.plan(delay, Happening::Begins { at: from, mv, ticket });
            // An impatient user: about when the seal is written.
            if self.rng.random_ratio(1, 3) {
                let at = if self.rng.random_ratio(1, 3) { other(from) } else { from };
                let delay = self.rng.random_range(40..200);
                self.plan(delay, Happening::Cancels { at });
            }
        }
    }

    /// Powers a site off and keeps it so.
    fn fence(&mut self, at: Place) {
        self.lose_power(at);
        self.sites[at].fenced = true;
        self.tell(|| format!("  site {at} is fenced"));
    }

    fn claim(&mut self, at: Place) {
        let (site, peer) = (&self.sites[at], &self.sites[other(at)]);
        debug_assert!(peer.fenced && !peer.runs(), "a claim is made on evidence");
        let current = site.qemu.ram == self.last_write;
        let history =
            if current && self.rng.random_ratio(1, 2) { PeerHistory::DidNotRun } else { PeerHistory::MayHaveRun };
        let newest =
            self.sites.iter().filter_map(|s| s.ledger.durable).map(|r| r.lineage()).max().unwrap_or(Lineage::FIRST);
        if !self.sites[at].up {
            return;
        }
        let Some(machine) = &mut self.sites[at].machine else { return };
        let fenced = Fenced { statement: "the simulator took the power away".to_owned(), peer: history, newest };
        if machine.handle(Event::Claim(fenced)) == Verdict::Taken {
            self.sites[at].may_drop_ram = true;
            self.tell(|| format!("  site {at} claims, peer {history:?}"));
        }
        self.obey(at);
    }

    fn lift_fence(&mut self, at: Place) {
        let winner = &self.sites[other(at)];
        let claiming = match &winner.machine {
            Some(Machine::Source(s)) => matches!(s.state(), SourceState::Claiming { .. }),
            Some(Machine::Destination(d)) => matches!(d.state(), DestinationState::Claiming { .. }),
            None => false,
        };
        if claiming {
            self.plan(10, Happening::FenceLifted { at });
            return;
        }
        let newest = winner.ledger.durable.map(|record| record.lineage());
        let site = &mut self.sites[at];
        if let (Some(lineage), Some(record)) = (newest, site.ledger.durable)
            && let Some(overriding) = record.overridden_by(VM, lineage)
            && self.guards.hold(Guard::FenceOverwrites)
        {
            site.ledger.durable = Some(overriding);
        }
        site.fenced = false;
        self.tell(|| format!("  the fence around site {at} is lifted"));
        let incarnation = self.sites[at].incarnation;
        self.plan(1, Happening::NodeStarts { at, incarnation });
    }
}
