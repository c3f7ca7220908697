//! The world: time, faults, the controller, and the shell around each machine.

use crate::check::{Failure, Violation, at_every_instant, at_rest, stamps_tell_the_truth, survivor};
use crate::claims::{ClaimOrder, Claims, Counts};
use crate::mirror::Link;
use crate::net::{OLDEST, Weather, fate};
use crate::nic::Gateway;
use crate::site::{Death, QemuState, Site};
use crate::truth::Truth;
use crate::{Profile, Rules};
use godwit_handoff::{
    Action, Body, Destination, DestinationState, Event, Fenced, Guard, Lineage, Machine, Message, MoveId, Owner, Peer,
    PeerHistory, Record, SourceState, Ticket, Verdict, VmId,
};
use godwit_volume::mirror::{MirrorError, Source, Target};
use godwit_wire::Sequence;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// How long the world may take to come to rest after the last fault, in ticks: the oldest message, and a hundred
/// retransmissions.
pub const CALM: u64 = OLDEST + 2000;
/// A tick, as the mirror's clock has it: the hand-off's timers are half a second then.
pub const TICK: Duration = Duration::from_millis(25);
/// The retransmission interval, in ticks.
pub(crate) const RETRANSMIT: u64 = 20;
/// The one VM.
pub(crate) const VM: VmId = VmId(1);
/// Past this many events a schedule does not end by itself: some machine chatters.
const MOST_EVENTS: u64 = 50_000;

/// A number for a record's kind.
const fn kind(record: &Record) -> usize {
    match record {
        Record::Owned(_) => 0,
        Record::Sealed(_) => 1,
        Record::Released(_) => 2,
        Record::Staged(_) => 3,
        Record::Granted(_) => 4,
        Record::Started(_) => 5,
        Record::Refused(_) => 6,
        Record::Returned(_) => 7,
        Record::Outranked { .. } => 8,
        Record::Prepared(_) => 9,
        Record::Draining(_) => 10,
    }
}

/// Whether the story is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// No.
    Silent,
    /// Yes.
    Traced,
}

/// What a world is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Theme {
    /// Everything that may go wrong.
    Everything,
    /// Hosts that are lost, claims of their VMs, and their return; see [`crate::claims`].
    Claims,
    /// As everything, and memory follows most guests; see [`crate::pages`].
    Pages,
}

/// What became of a world in which nothing was violated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Told {
    /// How many things happened.
    pub events: u64,
    /// Claims and what became of them, in worlds of that theme.
    pub counts: Counts,
    /// Memory that followed its guest, in worlds of that theme.
    pub pages: crate::pages::Counts,
}

/// Which of the two sites.
pub(crate) type Place = usize;

pub(crate) const fn other(place: Place) -> Place {
    1 - place
}

/// Something that is going to happen.
#[derive(Clone, Debug)]
pub(crate) enum Happening {
    Arrives {
        to: Place,
        message: Message,
    },
    EffectAdvances {
        at: Place,
        incarnation: u32,
    },
    Durable {
        at: Place,
        incarnation: u32,
    },
    TimerFires {
        at: Place,
        timer: u64,
    },
    GuestStops {
        at: Place,
        stream: (Ticket, u64),
    },
    /// The shell has seen that QEMU's post-copy has begun.
    Serves {
        at: Place,
        stream: (Ticket, u64),
    },
    /// Pages may come to a guest that runs without them.
    Drains {
        to: Place,
        ticket: Ticket,
    },
    /// Somebody looks whether a guest's memory is lost, and gives it up; or does so without a look.
    GivesUp {
        at: Place,
    },
    RamEnds {
        at: Place,
        stream: (Ticket, u64),
    },
    StreamEnds {
        to: Place,
        stream: (Ticket, u64),
        ram: u64,
        session: u64,
        /// Whether pages are still to come.
        owed: bool,
    },
    ReachesPostmigrate {
        at: Place,
        stream: (Ticket, u64),
    },
    MirrorOpens {
        from: Place,
        id: u64,
    },
    MirrorDelivers {
        from: Place,
        id: u64,
        back: bool,
    },
    MirrorTicks {
        from: Place,
        id: u64,
    },
    /// The mirror's stream was closed by its source: the destination looks whether it has everything.
    MirrorCloses {
        to: Place,
        ticket: Ticket,
    },
    /// A stream of a move from here broke.
    StreamFails {
        at: Place,
        id: u64,
    },
    /// A stream of a move to here broke.
    ArrivalFails {
        at: Place,
        ticket: Ticket,
        session: u64,
    },
    Settles {
        at: Place,
        incarnation: u32,
    },
    NodeStarts {
        at: Place,
        incarnation: u32,
    },
    Begins {
        at: Place,
        mv: MoveId,
        ticket: Ticket,
    },
    Cancels {
        at: Place,
    },
    Orders {
        from: Place,
    },
    FenceLifted {
        at: Place,
    },
    Attaches {
        sequence: Sequence,
        site: Place,
    },
    LinkHeals,
    ControllerActs,
    /// An order to claim, or a copy of it.
    ClaimArrives {
        at: Place,
        order: ClaimOrder,
    },
    /// Whoever claims sees whether it was done, and orders it again, or gives up.
    ClaimIsPressed {
        at: Place,
        order: ClaimOrder,
        tries: u32,
    },
    /// The lost host comes back.
    Returns {
        at: Place,
    },
    /// The controller tells who lost to a claim.
    OutrankArrives {
        at: Place,
        lineage: Lineage,
    },
    /// The controller looks whether that was heard.
    OutrankIsPressed {
        at: Place,
    },
}

/// One seed's world.
pub struct World {
    seed: u64,
    pub(crate) rng: SmallRng,
    pub(crate) rules: Rules,
    pub(crate) now: u64,
    pub(crate) agenda: BTreeMap<(u64, u64), Happening>,
    entries: u64,
    pub(crate) sites: [Site; 2],
    /// What the guest must find on its disk.
    pub(crate) truth: Truth,
    /// The number of the last write that a guest made.
    pub(crate) last_write: u64,
    pub(crate) weather: Weather,
    /// The weather when there is no cut.
    climate: Weather,
    pub(crate) calm_from: u64,
    pub(crate) profile: Profile,
    pub(crate) theme: Theme,
    /// What is known of the claims so far.
    pub(crate) claims: Claims,
    /// What became of memory that followed.
    pub(crate) pages: crate::pages::Counts,
    /// The kind of record that nodes die at, where they do.
    victim: usize,
    /// A VM without disks.
    pub(crate) diskless: bool,
    /// One fault in about so many events; none in calm.
    fault_every: u32,
    pub(crate) streams: u64,
    /// Counts the sessions between the nodes: what is under way in one does not arrive in the next.
    pub(crate) session: u64,
    /// The mirrors under way, by their source.
    pub(crate) links: [Option<Link>; 2],
    /// What the volume was when a source took the last write of an attempt.
    pub(crate) frozen: BTreeMap<Ticket, Vec<u64>>,
    pub(crate) verified: BTreeSet<Ticket>,
    /// Whether nodes remember over a restart what was verified.
    remembers: bool,
    /// The highest sequence ever announced, and by whom.
    pub(crate) announced: Option<(Sequence, Place)>,
    gateway: Gateway,
    pub(crate) violation: Option<Violation>,
    pub(crate) trace: Option<Vec<String>>,
}

impl World {
    /// The beginning: the VM runs at the first site.
    #[must_use]
    pub fn new(seed: u64, rules: Rules, mode: Mode) -> Self {
        Self::about(Theme::Everything, seed, rules, mode)
    }

    /// As [`World::new`]; the same seed is another story in another theme.
    #[must_use]
    pub fn about(theme: Theme, seed: u64, rules: Rules, mode: Mode) -> Self {
        let mut rng = SmallRng::seed_from_u64(seed);
        let calm_from = rng.random_range(400..1600);
        let profile = Profile::ALL[rng.random_range(0..Profile::ALL.len())];
        let fault_every = profile.fault_every(&mut rng);
        let weather = profile.weather(&mut rng);
        let remembers = rng.random_ratio(if profile == Profile::Cancels { 3 } else { 2 }, 4);
        let mut victim = rng.random_range(0..9);
        if theme == Theme::Pages && rng.random_ratio(1, 3) {
            victim = rng.random_range(9..11);
        }
        let diskless = rng.random_ratio(1, 10);
        let mut it = Self {
            seed,
            rng,
            rules,
            now: 0,
            agenda: BTreeMap::new(),
            entries: 0,
            sites: [Site::new(), Site::new()],
            truth: Truth::new(0),
            last_write: 0,
            weather,
            climate: if weather == Weather::Fair { Weather::Bad } else { weather },
            calm_from,
            profile,
            theme,
            claims: Claims::default(),
            pages: crate::pages::Counts::default(),
            victim,
            diskless,
            fault_every,
            streams: 0,
            session: 0,
            links: [None, None],
            frozen: BTreeMap::new(),
            verified: BTreeSet::new(),
            remembers,
            announced: None,
            gateway: Gateway::new(),
            violation: None,
            trace: (mode == Mode::Traced).then(Vec::new),
        };
        it.tell(|| format!("{profile:?}, one fault in {fault_every}, {weather:?}, without disks: {diskless}"));
        it.sites[0].ledger.durable = Some(Record::Owned(Owner::first(VM)));
        it.adopt(0);
        it.adopt(1);
        it.plan(1, Happening::ControllerActs);
        if theme == Theme::Pages {
            it.plan(7, Happening::GivesUp { at: 0 });
            it.plan(11, Happening::GivesUp { at: 1 });
        }
        it
    }

    /// Runs to the end; gives the number of events, and what there was of claims.
    ///
    /// # Errors
    /// The first violation.
    pub fn run(mut self) -> Result<Told, Box<Failure>> {
        match self.live() {
            Ok(events) => Ok(Told { events, counts: self.counts(), pages: self.pages }),
            Err(violation) => {
                let trace = self.trace.take().unwrap_or_default();
                Err(Box::new(Failure { seed: self.seed, violation, trace }))
            }
        }
    }

    fn live(&mut self) -> Result<u64, Violation> {
        let mut events = self.until(self.calm_from)?;
        self.weather = Weather::Fair;
        self.fault_every = u32::MAX;
        self.sites.iter().for_each(|s| s.disk.store.disarm());
        self.tell(|| "---- calm ----".to_owned());
        let lost = self.rng.random_ratio(1, 6).then(|| self.rng.random_range(0..2));
        if let Some(lost) = lost
            && self.theme != Theme::Claims
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
        if self.theme == Theme::Claims {
            events += self.until_all_are_back()?;
            at_rest(&self.sites)?;
            events += self.way_back()?;
        }
        at_rest(&self.sites)?;
        self.compare()?;
        self.reconcile()?;
        Ok(events)
    }

    /// At rest a mirror that began would miss no difference.
    fn compare(&mut self) -> Result<(), Violation> {
        let owner = usize::from(!self.sites[0].runs());
        let (Some(ours), Some(theirs)) = (&self.sites[owner].disk.replica, &self.sites[other(owner)].disk.replica)
        else {
            return Ok(());
        };
        let failed = |error: MirrorError| Violation::Mirror(error.to_string());
        let mut source = Source::new();
        let (_, has) = Target::new(theirs).map_err(failed)?;
        for message in has.all(theirs).map_err(|error| failed(error.into()))? {
            source.handle(&message, ours).map_err(failed)?;
        }
        stamps_tell_the_truth(&self.sites)
    }

    /// At rest the controller asks the owner as what it owns the VM, and points the gateway there.
    fn reconcile(&mut self) -> Result<(), Violation> {
        let owner = usize::from(!self.sites[0].runs());
        let Some(sequence) = self.sites[owner].nic.sequence() else {
            return Err(Violation::NotConverged("the owner's endpoint has no sequence".to_owned()));
        };
        if self.gateway.attach(sequence, owner) && self.gateway.leads_to(owner) {
            return Ok(());
        }
        Err(Violation::GatewayAstray)
    }

    pub(crate) fn until(&mut self, end: u64) -> Result<u64, Violation> {
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
            self.blow();
            self.judge()?;
            self.guests_act();
            self.blow();
            self.strike();
            self.blow();
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

    pub(crate) fn plan(&mut self, delay: u64, happening: Happening) {
        self.entries += 1;
        self.agenda.insert((self.now + delay, self.entries), happening);
    }

    /// How long a disk or a hypervisor takes: mostly little, sometimes long, which widens every window for a crash.
    pub(crate) fn slowness(&mut self) -> u64 {
        if self.rng.random_ratio(1, 8) { self.rng.random_range(10..60) } else { self.rng.random_range(1..10) }
    }

    pub(crate) fn tell(&mut self, line: impl FnOnce() -> String) {
        if let Some(trace) = &mut self.trace {
            trace.push(format!("{:>6}  {}", self.now, line()));
        }
    }

    /// The first violation counts.
    pub(crate) fn violated(&mut self, violation: Violation) {
        self.violation.get_or_insert(violation);
    }

    fn happen(&mut self, happening: Happening) {
        match happening {
            Happening::Arrives { to, message } => {
                // The place that a node asked for, and does mean: its machine learns of it when the place is ready.
                let reserved = message.body == Body::Pending && self.sites[to].reserving == Some(message.ticket);
                if !reserved {
                    self.inform(to, Event::Message(message));
                }
            }
            Happening::EffectAdvances { at, incarnation } => {
                if self.sites[at].incarnation == incarnation {
                    self.advance_effect(at);
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
            Happening::GuestStops { at, stream } => self.guest_stops(at, stream),
            Happening::RamEnds { at, stream } => self.ram_ends(at, stream),
            Happening::StreamEnds { to, stream, ram, session, owed } => {
                self.stream_ends(to, stream, ram, session, owed);
            }
            Happening::Serves { at, stream } => self.serves(at, stream),
            Happening::Drains { to, ticket } => self.drains(to, ticket),
            Happening::GivesUp { at } => self.gives_up(at),
            Happening::ReachesPostmigrate { at, stream } => {
                let qemu = &mut self.sites[at].qemu;
                if qemu.stream == Some(stream) && qemu.state == QemuState::Stopped {
                    qemu.state = QemuState::Postmigrate;
                    self.inform(at, Event::Postmigrate);
                }
            }
            Happening::MirrorOpens { from, id } => self.mirror_opens(from, id),
            Happening::MirrorDelivers { from, id, back } => self.mirror_delivers(from, id, back),
            Happening::MirrorTicks { from, id } => self.mirror_ticks(from, id),
            Happening::MirrorCloses { to, ticket } => {
                if self.sites[to].disk.complete == Some(ticket) {
                    self.look_whether_all_is_here(to);
                }
            }
            Happening::StreamFails { at, id } => self.stream_fails(at, id),
            Happening::ArrivalFails { at, ticket, session } => self.arrival_fails(at, ticket, session),
            Happening::Settles { at, incarnation } => self.settles(at, incarnation),
            Happening::NodeStarts { at, incarnation } => {
                let site = &mut self.sites[at];
                if site.incarnation == incarnation && !site.fenced && !site.up {
                    site.up = true;
                    self.adopt(at);
                }
            }
            Happening::Begins { at, mv, ticket } => {
                self.sites[at].reserving = None;
                if let Some(Machine::Source(source)) = &mut self.sites[at].machine
                    && source.next_ticket(mv) == Ok(ticket)
                {
                    // The node begins when the destination has answered that its place is ready.
                    let preparing = matches!(&self.sites[other(at)].machine, Some(Machine::Destination(d))
                        if matches!(d.state(), DestinationState::Staging { ticket: t } | DestinationState::Staged { ticket: t } if *t == ticket))
                        && self.sites[other(at)].disk.receiving != Some(ticket);
                    if preparing {
                        self.sites[at].reserving = Some(ticket);
                        self.plan(5, Happening::Begins { at, mv, ticket });
                        return;
                    }
                    if let Some(Machine::Source(source)) = &mut self.sites[at].machine {
                        source.begin(mv).expect("next_ticket said that it can begin");
                    }
                    self.obey(at);
                }
            }
            Happening::Orders { from } => self.order_move(from),
            Happening::Cancels { at } => self.inform(at, Event::Cancel),
            Happening::FenceLifted { at } => self.lift_fence(at),
            Happening::Attaches { sequence, site } => {
                self.gateway.attach(sequence, site);
            }
            Happening::LinkHeals => {
                if self.weather == Weather::Cut {
                    self.weather = self.climate;
                }
            }
            Happening::ControllerActs if self.theme == Theme::Claims => self.control_claims(),
            Happening::ControllerActs => self.control(),
            Happening::ClaimArrives { at, order } => self.claim_arrives(at, order),
            Happening::ClaimIsPressed { at, order, tries } => self.press_claim(at, order, tries),
            Happening::Returns { at } => self.returns(at),
            Happening::OutrankArrives { at, lineage } => self.outranked(at, lineage),
            Happening::OutrankIsPressed { at } => self.press_outrank(at),
        }
    }

    /// A node starts: it reads its ledger, opens its disk, looks at its QEMU, and goes on.
    pub(crate) fn adopt(&mut self, at: Place) {
        let rules = self.rules;
        self.tell(|| format!("  site {at} starts"));
        let site = &mut self.sites[at];
        if rules.records_made_sure {
            site.ledger.beneath = None;
        }
        if let Err(error) = site.disk.start(rules.volume) {
            if !site.disk.store.is_blown() {
                self.violated(Violation::Volume(error.to_string()));
            }
            return;
        }
        let site = &mut self.sites[at];
        let verified = match site.ledger.durable {
            Some(Record::Staged(ticket)) => self.remembers && self.verified.contains(&ticket),
            _ => false,
        };
        let seen = site.seen(verified);
        self.breaks_off(at);
        let site = &mut self.sites[at];
        site.machine = site.ledger.durable.map(|record| Machine::recover_with(record, seen, rules.handoff));
        let incarnation = site.incarnation;
        let delay = self.rng.random_range(20..200);
        self.plan(delay, Happening::Settles { at, incarnation });
        self.obey(at);
    }

    /// The controller is told of an activation; or not, or late.
    pub(crate) fn report_activation(&mut self, sequence: Sequence, site: Place) {
        for delay in fate(&mut self.rng, self.weather).into_iter().flatten() {
            self.plan(delay, Happening::Attaches { sequence, site });
        }
    }

    // ---- what goes wrong ------------------------------------------------------------------------------------

    fn strike(&mut self) {
        if self.fault_every == u32::MAX {
            return;
        }
        self.aim();
        if !self.rng.random_ratio(1, self.fault_every) {
            return;
        }
        let at = self.rng.random_range(0..2);
        if self.profile == Profile::InTheMiddle || self.rng.random_ratio(1, 8) {
            let power = self.rng.random_ratio(1, 2);
            self.sites[at].fuse = if power { Death::Power } else { Death::Process };
            let (operations, torn) = (self.rng.random_range(0..16), self.rng.random_range(0..64));
            self.sites[at].disk.store.arm(operations, torn);
            self.tell(|| format!("! site {at}: a fuse of {operations} operations, power: {power}"));
            return;
        }
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

    /// A fault where it hurts most, by what the world is about.
    fn aim(&mut self) {
        let every = self.fault_every;
        for at in 0..2 {
            let site = &self.sites[at];
            // Only where the rule is missing that it is made durable first.
            if site.up && site.ledger.beneath.is_some() && self.rng.random_ratio(1, 20) {
                self.lose_power(at);
                continue;
            }
            let refusing = site.ledger.pending.iter().any(|r| matches!(r, Record::Refused(_)));
            let arriving = matches!(site.machine, Some(Machine::Destination(_)));
            let quitting = arriving && site.effects.front() == Some(&Action::Quit);
            let busy = !site.ledger.pending.is_empty() || !site.effects.is_empty();
            let one_in = match self.profile {
                Profile::AtRecords if site.ledger.pending.iter().any(|r| kind(r) == self.victim) => 3,
                Profile::Cancels if refusing || quitting => 3,
                _ if busy => every,
                _ => continue,
            };
            if self.rng.random_ratio(1, one_in) {
                if self.profile == Profile::Cancels && (refusing || quitting) {
                    // Nothing of it has reached the disk, or QEMU.
                    self.sites[at].ledger.pending.clear();
                    self.sites[at].effects.clear();
                }
                self.kill_node(at);
            }
        }
        if self.profile == Profile::QemusDie {
            for at in 0..2 {
                let taken = matches!(&self.sites[at].machine, Some(Machine::Destination(d)) if matches!(
                    d.state(),
                    DestinationState::Prepared { .. }
                        | DestinationState::Granted { .. }
                        | DestinationState::Starting { .. }
                        | DestinationState::Draining { .. }
                        | DestinationState::Started { .. }
                )) || matches!(&self.sites[at].machine, Some(Machine::Source(s)) if matches!(
                    s.state(),
                    SourceState::Draining { .. }
                ));
                if taken && self.rng.random_ratio(1, 10) {
                    self.kill_qemu(at);
                }
            }
        }
    }

    /// Somebody changes their mind just when it is too late, or nearly, where the world is about that; and again.
    pub(crate) fn regret(&mut self, source: Place) {
        if self.profile == Profile::Cancels && self.now < self.calm_from && self.rng.random_ratio(3, 4) {
            let at = if self.rng.random_ratio(1, 2) { other(source) } else { source };
            let delay = self.rng.random_range(1..8);
            self.plan(delay, Happening::Cancels { at });
            let delay = delay + self.rng.random_range(1..40);
            self.plan(delay, Happening::Orders { from: source });
        }
    }

    /// Whose fuse blew is dead.
    fn blow(&mut self) {
        for at in 0..2 {
            if self.sites[at].disk.store.is_blown() {
                match self.sites[at].fuse {
                    Death::Process => self.kill_node(at),
                    Death::Power => self.lose_power(at),
                }
                self.sites[at].disk.store.lose_process();
            }
        }
    }

    /// The process dies. Any prefix of what was being written or done has happened.
    fn kill_node(&mut self, at: Place) {
        if !self.sites[at].up {
            return;
        }
        self.tell(|| format!("! site {at}: the node is killed"));
        let done = self.rng.random_range(0..4);
        self.do_a_little_more(at, done);
        self.lose_process(at);
        let site = &mut self.sites[at];
        site.disk.store.lose_process();
        match site.qemu.state {
            QemuState::Stopped if site.qemu.stream.is_some() => site.qemu.state = QemuState::Running,
            QemuState::Incoming => site.qemu.die(false),
            QemuState::Serving => site.qemu.broken_off |= !site.qemu.held,
            _ => {}
        }
        if !matches!(site.qemu.state, QemuState::Loaded | QemuState::Fetching | QemuState::Serving) {
            site.qemu.stream = None;
        }
        // QEMU asks again for what was not answered, once somebody answers.
        site.qemu.requests.iter_mut().for_each(|r| r.taken = None);
    }

    fn lose_power(&mut self, at: Place) {
        if self.sites[at].fenced {
            return;
        }
        self.tell(|| format!("! site {at}: power is lost"));
        let site = &mut self.sites[at];
        // Of a site that is down nothing has come of what is lost: as well it may have died by this.
        if site.up
            && let Some(beneath) = site.ledger.beneath
        {
            site.ledger.durable = beneath;
        }
        self.lose_process(at);
        let site = &mut self.sites[at];
        site.ledger.beneath = None;
        site.nic.lose_power();
        site.disk.store.lose_power(&mut self.rng);
        site.qemu.die(false);
        self.truth.lost_power(at);
    }

    fn lose_process(&mut self, at: Place) {
        let ledger = &self.sites[at].ledger;
        let beneath = ledger.beneath.unwrap_or(ledger.durable);
        let kept = self.rng.random_range(0..=ledger.pending.len());
        for _ in 0..kept {
            if let Some(record) = self.sites[at].ledger.pending.pop_front() {
                self.make_durable(at, record);
            }
        }
        if kept > 0 {
            self.sites[at].ledger.beneath = Some(beneath);
        }
        self.end_session(at);
        let site = &mut self.sites[at];
        site.ledger.pending.clear();
        site.effects.clear();
        site.steps = None;
        site.moving = None;
        site.reserving = None;
        site.disk.lose_process();
        site.nic.lose_process();
        site.machine = None;
        site.up = false;
        site.incarnation += 1;
        site.timer += 1;
        let incarnation = site.incarnation;
        let longest = if self.profile == Profile::Cancels { 20 } else { 80 };
        let delay = self.rng.random_range(5..longest);
        self.plan(delay, Happening::NodeStarts { at, incarnation });
    }

    fn kill_qemu(&mut self, at: Place) {
        let qemu = &mut self.sites[at].qemu;
        if qemu.state == QemuState::Dead {
            return;
        }
        qemu.die(false);
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

    pub(crate) fn control(&mut self) {
        if self.now >= self.calm_from {
            return;
        }
        let delay = self.rng.random_range(10..80);
        self.plan(delay, Happening::ControllerActs);
        let at = self.rng.random_range(0..2);
        if self.profile == Profile::Claims && self.rng.random_ratio(1, 12) && !self.sites.iter().any(|s| s.fenced) {
            self.fence_and_claim(at);
            return;
        }
        match self.rng.random_range(0..16) {
            0..=9 => {
                self.order_move(0);
                self.order_move(1);
            }
            10..=11 => {
                self.tell(|| format!("  cancel at site {at}"));
                self.inform(at, Event::Cancel);
            }
            14 if !self.sites.iter().any(|s| s.fenced) && self.rng.random_ratio(1, 2) => self.fence_and_claim(at),
            _ => {}
        }
    }

    fn fence_and_claim(&mut self, at: Place) {
        self.fence(other(at));
        self.claim(at);
        let longest = if self.profile == Profile::Claims { 60 } else { 200 };
        let delay = self.rng.random_range(10..longest);
        self.plan(delay, Happening::FenceLifted { at: other(at) });
    }

    pub(crate) fn order_move(&mut self, from: Place) {
        let Some(Machine::Source(source)) = &self.sites[from].machine else { return };
        let SourceState::Owning { owner, .. } = source.state() else { return };
        // A controller that forgot what it ordered uses old ids again.
        let fresh = MoveId(owner.last.map_or(1, |last| last.0 + 1));
        let mv = if self.rng.random_ratio(1, 3) { MoveId(self.rng.random_range(1..3)) } else { fresh };
        let Ok(ticket) = source.next_ticket(mv) else { return };
        let to = &mut self.sites[other(from)];
        if to.up && to.ledger.pending.is_empty() {
            if let Ok(destination) = Destination::stage_with(to.ledger.durable, ticket, self.rules.handoff) {
                to.timer += 1;
                to.disk.receiving = None;
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
            self.sites[from].reserving = Some(ticket);
            self.plan(delay, Happening::Begins { at: from, mv, ticket });
            // An impatient user: about when the seal is written.
            if self.rng.random_ratio(1, 4) {
                let at = if self.rng.random_ratio(1, 3) { other(from) } else { from };
                let delay = self.rng.random_range(40..280);
                self.plan(delay, Happening::Cancels { at });
            }
        }
    }

    /// Powers a site off and keeps it so.
    pub(crate) fn fence(&mut self, at: Place) {
        self.lose_power(at);
        self.sites[at].fenced = true;
        self.tell(|| format!("  site {at} is fenced"));
    }

    fn claim(&mut self, at: Place) {
        let (site, peer) = (&self.sites[at], &self.sites[other(at)]);
        debug_assert!(peer.fenced && !peer.runs(), "a claim is made on evidence");
        let has_volume = self.truth.is_at(&site.disk.store);
        let current = site.qemu.ram == self.last_write && has_volume;
        let history =
            if current && self.rng.random_ratio(1, 2) { PeerHistory::DidNotRun } else { PeerHistory::MayHaveRun };
        let newest =
            self.sites.iter().filter_map(|s| s.ledger.durable).map(|r| r.lineage()).max().unwrap_or(Lineage::FIRST);
        if !self.sites[at].up {
            return;
        }
        let Some(machine) = &mut self.sites[at].machine else { return };
        let said = "the simulator took the power away";
        let Ok(fenced) = Fenced::vouched_with(said, history, newest, Peer::Silent, self.rules.handoff) else { return };
        if machine.handle(Event::Claim(fenced)) == Verdict::Taken {
            self.sites[at].may_drop_ram = true;
            if !has_volume && self.truth.home != at {
                // The operator prefers what this site has to nothing.
                self.truth.reset_at(at);
            }
            self.tell(|| format!("  site {at} claims, peer {history:?}"));
        }
        self.obey(at);
    }

    pub(crate) fn lift_fence(&mut self, at: Place) {
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
            && self.rules.handoff.hold(Guard::FenceOverwrites)
        {
            (site.ledger.durable, site.ledger.beneath) = (Some(overriding), None);
        }
        site.fenced = false;
        self.tell(|| format!("  the fence around site {at} is lifted"));
        let incarnation = self.sites[at].incarnation;
        self.plan(1, Happening::NodeStarts { at, incarnation });
    }
}
