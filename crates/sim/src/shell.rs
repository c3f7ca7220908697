//! The shell around each machine, as a node's: effects in small steps, records, messages.

use crate::check::Violation;
use crate::net::fate;
use crate::site::{Moving, QemuState, Step};
use crate::world::{Happening, Place, RETRANSMIT, World, other};
use godwit_handoff::{Action, Event, Machine, Record, Run, Seen};
use godwit_wire::{Order, Sequence};
use rand::Rng;
use std::collections::VecDeque;

/// How long the last writes of a stopped guest may take, in ticks: ten seconds.
const DRAIN: u64 = 400;
/// How long a step that failed is left alone, in ticks.
const AGAIN: u64 = 40;

/// What became of a step.
enum Outcome {
    /// The next one.
    Next,
    /// The same again, later.
    Later(u64),
    /// The effect is over.
    Over(Option<Event>),
}

impl World {
    pub(crate) fn inform(&mut self, at: Place, event: Event) {
        let site = &mut self.sites[at];
        if !site.up || site.disk.store.is_blown() {
            return;
        }
        let Some(machine) = &mut site.machine else { return };
        let verdict = machine.handle(event);
        let line = || format!("  site {at}: {verdict:?}, {}", machine.describe());
        let line = line();
        self.tell(|| line);
        self.obey(at);
    }

    /// Does what the machine asks for.
    pub(crate) fn obey(&mut self, at: Place) {
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
                        self.plan(delay, Happening::EffectAdvances { at, incarnation });
                    }
                }
            }
        }
        if let Some(record) = self.sites[at].machine.as_ref().and_then(Machine::settled) {
            // The destination's part is over, and the source's machine takes over.
            let site = &mut self.sites[at];
            let claimed = site.may_drop_ram;
            let seen = if claimed { site.seen(true) } else { Seen::Running };
            site.machine = Some(Machine::recover_with(record, seen, self.rules.handoff));
            self.obey(at);
        }
    }

    pub(crate) fn finish_write(&mut self, at: Place) {
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

    pub(crate) fn make_durable(&mut self, at: Place, record: Record) {
        let ledger = &mut self.sites[at].ledger;
        (ledger.durable, ledger.beneath) = (Some(record), None);
        if let Record::Sealed(ticket) = record
            && !self.verified.contains(&ticket)
        {
            self.violated(Violation::SealedTooEarly);
        }
        if matches!(record, Record::Sealed(_)) {
            self.regret(at);
        }
    }

    /// Some steps of the effect under way; when it is over, its report.
    pub(crate) fn advance_effect(&mut self, at: Place) {
        let most = if self.rng.random_ratio(1, 2) { 16 } else { self.rng.random_range(1..4) };
        for _ in 0..most {
            match self.step(at) {
                None => return,
                Some(Outcome::Next) => {}
                Some(Outcome::Later(delay)) => {
                    let incarnation = self.sites[at].incarnation;
                    self.plan(delay, Happening::EffectAdvances { at, incarnation });
                    return;
                }
                Some(Outcome::Over(report)) => {
                    let site = &mut self.sites[at];
                    site.steps = None;
                    site.effects.pop_front();
                    if !site.effects.is_empty() {
                        let incarnation = site.incarnation;
                        let delay = self.slowness();
                        self.plan(delay, Happening::EffectAdvances { at, incarnation });
                    }
                    if let Some(report) = report {
                        self.inform(at, report);
                    }
                    return;
                }
            }
        }
        let delay = self.slowness();
        let incarnation = self.sites[at].incarnation;
        self.plan(delay, Happening::EffectAdvances { at, incarnation });
    }

    /// What a process that is about to die still gets done of its effect: a `cont` may sit in a socket already.
    pub(crate) fn do_a_little_more(&mut self, at: Place, steps: usize) {
        for _ in 0..steps {
            if self.sites[at].disk.store.is_blown() || !matches!(self.step(at), Some(Outcome::Next)) {
                return;
            }
        }
    }

    fn expand(&self, at: Place, effect: Action) -> VecDeque<Step> {
        let site = &self.sites[at];
        let steps = match effect {
            Action::Open(lineage, generation) => {
                let sequence = Sequence { lineage: lineage.0, generation: generation.0 };
                vec![
                    Step::Look,
                    // The disks first: a guest that is announced is spoken to.
                    Step::OpenDisk(lineage, generation),
                    Step::Endpoint(Order::Stage),
                    Step::Endpoint(Order::Activate(sequence)),
                    Step::Report(Event::Opened),
                ]
            }
            Action::Close => vec![
                Step::Endpoint(Order::Isolate),
                Step::LetGo,
                Step::Drained(self.now + DRAIN),
                Step::Freeze,
                Step::Report(Event::Closed),
            ],
            Action::Run(Run::Cont) if site.qemu.state != QemuState::Dead => {
                vec![Step::Cont, Step::Report(Event::Ran)]
            }
            Action::Run(_) => {
                vec![Step::MakeRoom, Step::Endpoint(Order::Stage), Step::Boot, Step::Report(Event::Ran)]
            }
            Action::Quit => vec![Step::EndQemu, Step::Endpoint(Order::Remove), Step::Rest],
            Action::Migrate(ticket) => vec![Step::Migrate(ticket)],
            Action::AnswerShut => vec![Step::Shut],
            Action::AbortMigration => vec![Step::Abort],
            Action::Receive(ticket) => {
                vec![Step::EndQemu, Step::Endpoint(Order::Stage), Step::ReceiveDisk(ticket), Step::Incoming(ticket)]
            }
            Action::Persist(_) | Action::Send(_) | Action::SetTimer => vec![],
        };
        steps.into()
    }

    fn step(&mut self, at: Place) -> Option<Outcome> {
        let effect = *self.sites[at].effects.front()?;
        if self.sites[at].steps.is_none() {
            self.sites[at].steps = Some(self.expand(at, effect));
        }
        let Some(step) = self.sites[at].steps.as_mut().and_then(VecDeque::pop_front) else {
            return Some(Outcome::Over(None));
        };
        self.tell(|| format!("  site {at} does {step:?}"));
        let outcome = self.perform(at, &step);
        if let Outcome::Later(_) = outcome
            && let Some(steps) = &mut self.sites[at].steps
        {
            steps.push_front(step);
        }
        Some(outcome)
    }

    fn perform(&mut self, at: Place, step: &Step) -> Outcome {
        let now = self.now;
        let site = &mut self.sites[at];
        match step {
            Step::Look => {
                let granted = matches!(site.ledger.durable, Some(Record::Granted(_)));
                let arriving = matches!(site.machine, Some(Machine::Destination(_)));
                let prepared = matches!(site.ledger.durable, Some(Record::Prepared(_)));
                let lacking = (granted && site.qemu.state != QemuState::Loaded)
                    || (prepared && site.qemu.state != QemuState::Fetching);
                if arriving && lacking {
                    return Outcome::Over(Some(Event::QemuDied));
                }
                Outcome::Next
            }
            Step::OpenDisk(lineage, generation) => {
                let Some(replica) = &site.disk.replica else { return Outcome::Later(AGAIN) };
                match replica.become_primary(*lineage, *generation) {
                    Ok(()) => {
                        site.disk.open = true;
                        Outcome::Next
                    }
                    Err(error) => self.disk_failed(at, &error),
                }
            }
            Step::Endpoint(order) => match site.nic.order(*order) {
                Ok(actions) => {
                    if let Some(steps) = &mut site.steps {
                        for (action, state) in actions.into_iter().rev() {
                            steps.push_front(Step::Kernel(action, state));
                        }
                    }
                    Outcome::Next
                }
                // As the node: it tries for ever, which the world finds at rest.
                Err(stale) => {
                    self.tell(|| format!("  site {at}: {stale}"));
                    Outcome::Later(AGAIN)
                }
            },
            Step::Kernel(action, state) => {
                site.nic.perform(*action, *state);
                if let (godwit_wire::Action::Announce, godwit_wire::State::Active(sequence)) = (action, state) {
                    self.announces(at, *sequence);
                }
                Outcome::Next
            }
            Step::LetGo => {
                if let Some(source) = &mut site.disk.source {
                    source.let_go();
                }
                self.answer(at);
                Outcome::Next
            }
            Step::Drained(until) => {
                if site.moving.is_some_and(|m| !m.ram_ended) && now < *until {
                    return Outcome::Later(3);
                }
                Outcome::Next
            }
            Step::Freeze => {
                self.freeze(at);
                Outcome::Next
            }
            Step::EndQemu => {
                self.look_who_needs_it(at);
                self.sites[at].qemu.die(true);
                Outcome::Next
            }
            Step::MakeRoom => {
                self.look_who_needs_it(at);
                let site = &mut self.sites[at];
                let quit = site.qemu.quit;
                site.qemu.die(true);
                site.qemu.quit = quit;
                Outcome::Next
            }
            Step::Cont => {
                match site.qemu.state {
                    QemuState::Dead => return Outcome::Next,
                    QemuState::Running => return Outcome::Next,
                    // A QEMU continued on half a stream runs on garbage, which remembers nothing.
                    QemuState::Incoming => site.qemu.ram = u64::MAX,
                    QemuState::Serving => self.goes_back(at),
                    _ => {}
                }
                self.runs(at);
                Outcome::Next
            }
            Step::Boot => {
                if site.qemu.quit && !site.may_drop_ram {
                    self.violated(Violation::RamDropped);
                }
                self.sites[at].qemu.ram = self.last_write;
                self.runs(at);
                Outcome::Next
            }
            Step::Rest => {
                site.disk.source = None;
                let ours = matches!(site.ledger.durable, Some(Record::Owned(_)));
                self.links[at] = None;
                self.rests(at, !ours)
            }
            Step::ReceiveDisk(ticket) => {
                site.disk.complete = None;
                site.disk.target = None;
                match self.rests(at, true) {
                    Outcome::Next => {
                        self.sites[at].disk.receiving = Some(*ticket);
                        Outcome::Next
                    }
                    outcome => outcome,
                }
            }
            Step::Incoming(ticket) => {
                self.streams += 1;
                site.qemu.state = QemuState::Incoming;
                site.qemu.stream = Some((*ticket, self.streams));
                site.qemu.quit = false;
                Outcome::Next
            }
            Step::Migrate(ticket) => {
                self.streams += 1;
                site.moving =
                    Some(Moving { id: self.streams, ticket: *ticket, memory: false, ram_ended: false, follows: false });
                self.start_mirror(at, self.streams, *ticket);
                Outcome::Next
            }
            Step::Shut => {
                if let Some(stream) = site.qemu.stream {
                    let delay = self.rng.random_range(1..10);
                    self.plan(delay, Happening::ReachesPostmigrate { at, stream });
                }
                Outcome::Next
            }
            Step::Abort => {
                self.abort(at);
                Outcome::Next
            }
            Step::Report(event) => Outcome::Over(Some(event.clone())),
        }
    }

    fn rests(&mut self, at: Place, lost: bool) -> Outcome {
        let disk = &mut self.sites[at].disk;
        disk.open &= !lost;
        let Some(replica) = &disk.replica else { return Outcome::Later(AGAIN) };
        match if lost { replica.become_secondary() } else { replica.commit() } {
            Ok(()) => Outcome::Next,
            Err(error) => self.disk_failed(at, &error),
        }
    }

    fn disk_failed(&mut self, at: Place, error: &godwit_volume::VolumeError) -> Outcome {
        if !self.sites[at].disk.store.is_blown() {
            self.violated(Violation::Volume(error.to_string()));
        }
        Outcome::Later(AGAIN)
    }

    /// Whoever announces last must outrank everybody who did before: switches and routers go by that.
    fn announces(&mut self, at: Place, sequence: Sequence) {
        if let Some((highest, by)) = self.announced
            && (sequence < highest || (sequence == highest && by != at))
        {
            self.violated(Violation::StaleAnnouncement);
        }
        self.announced = Some((sequence, at));
        self.report_activation(sequence, at);
    }

    /// A guest begins to run, or goes on.
    fn runs(&mut self, at: Place) {
        let site = &mut self.sites[at];
        if !site.disk.open || !site.nic.is_active() {
            self.violated(Violation::RunsClosed);
        }
        let site = &mut self.sites[at];
        if site.qemu.state == QemuState::Fetching
            && let Some(ticket) = site.qemu.owed
        {
            self.pages.begun += 1;
            self.plan(1, Happening::Drains { to: at, ticket });
        }
        let site = &mut self.sites[at];
        site.qemu.state = QemuState::Running;
        site.qemu.stream = None;
        site.qemu.quit = false;
        (site.qemu.held, site.qemu.broken_off, site.qemu.stuck, site.qemu.lost) = (false, false, false, false);
        site.may_drop_ram = false;
        self.sites[other(at)].qemu.lost = false;
        let site = &self.sites[at];
        if let Err(wrong) = self.truth.begins_at(at, &site.disk.store) {
            self.violated(Violation::WrongBlock(wrong));
        }
    }
}
