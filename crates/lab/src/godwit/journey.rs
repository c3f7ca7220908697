//! A move by Godwit: the user's command, followed to its end.
//!
//! ```text
//! order     `godwit move VM --to SITE --json`; what it prints is the curve and, at last, the figures
//! points    a node gets to a point that was armed: it is held, RAM is compared, incidents happen, it goes on
//! end       the command has ended. Where it could not see the move's end (its controller was killed), somebody asks again
//! place     the VM is looked for, and taken from where it is
//! ```
//!
//! The comparison needs both ends to stand still with everything there: so the destination's node is held at `started`,
//! after its last durable record and before the guest runs. The time for that is the lab's own (`held`). It is taken from
//! the moment at which the lab sees that the point was reached, so the pause is measured a few milliseconds too long, never
//! too short.
//!
//! What can go wrong: the command fails (the move has failed, with its words), the point is never reached (nothing was
//! compared, and the report says so), nobody knows how the move ended (it has failed, and where the VM is found is said).

use super::hosted::Hosted;
use super::incident::{self, Incident};
use super::{Installation, lock};
use crate::convoy::{Began, Convoy};
use crate::disks::{self, Pair};
use crate::fabric::Site;
use crate::figures::Figures;
use crate::progress::Progress;
use crate::report::{Kept, MemorySample, Outcome, Phase, Predicted, REFERENCES, Round, WanBytes};
use crate::scenario::{Damage, DiskStrategy, Point};
use crate::truth::{self, Difference, PAGE};
use anyhow::{Context, Result};
use godwit_api::progress::{MoveProgress, Outcome as Told, PhaseName};
use godwit_api::public;
use godwit_units::Policy;
use std::collections::BTreeSet;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::MetadataExt;
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How often the lab looks whether a point was reached: this is part of the pause that it measures.
const LOOK: Duration = Duration::from_millis(1);
/// How often the controller is asked for a move whose command has ended before it.
const ASK: Duration = Duration::from_millis(500);
/// For how long after its time limit a move that is being cancelled is still waited for.
const GRACE: Duration = Duration::from_secs(120);
/// How much of the disks may be compared while the guest is held, where its writes could not be recorded.
const COMPARED_WHILE_HELD: u64 = 1 << 30;

/// A move's circumstances.
pub struct Order<'a> {
    /// Where to.
    pub to: &'a Site,
    /// How the disks come along.
    pub disk: DiskStrategy,
    /// What the move is to spare.
    pub policy: Option<Policy>,
    /// By how much the guest's CPUs may be slowed, in percent.
    pub throttle: Option<u8>,
    /// Not to its end, but until this share of the blocks that follow the VM has come.
    pub leave_at: Option<f64>,
    /// Whether the guest is held to compare its RAM at both ends.
    pub compare: bool,
    /// Whether the source is to keep the guest's memory for the way back.
    pub keep_checkpoint: bool,
    /// Those that move in one order with it.
    pub(crate) convoy: Option<&'a Arc<Convoy>>,
    /// Damage to do on purpose once everything has arrived.
    pub damage: Vec<Damage>,
    /// What happens at points of the move; may grow while it runs.
    pub incidents: &'a Mutex<Vec<Incident>>,
    /// After this the move is cancelled.
    pub timeout: Duration,
    /// Set from outside to cancel it.
    pub cancel: &'a AtomicBool,
    /// Who is told how far it is.
    pub progress: &'a Progress,
}

/// What is known of the disks at both ends.
#[derive(Debug)]
pub enum Disks {
    /// Nothing; the notes say why.
    Unknown,
    /// They can be compared: what the guest writes is recorded since before it ran.
    Recorded(Vec<Pair>),
    /// They were compared while the guest was held.
    Compared(Vec<Difference>),
}

/// What a move by Godwit brought.
pub struct Moved {
    /// What was measured.
    pub figures: Figures,
    /// The disks.
    pub disks: Disks,
}

/// Moves `vm` as `order` says. Afterwards `vm` is where it was found; that it runs there has to be checked.
pub fn run(order: &Order<'_>, vm: &mut Hosted) -> Moved {
    let installation = vm.installation().clone();
    let mut journey = Journey {
        order,
        installation: &installation,
        vm,
        figures: Figures::new(),
        disks: Disks::Unknown,
        armed: BTreeSet::new(),
        compare: order.compare,
        arrived_ram: None,
    };
    let result = journey.travel();
    journey.arrive(result);
    Moved { figures: journey.figures, disks: journey.disks }
}

/// The command, and what it has said so far.
struct Command {
    child: Child,
    said: Arc<Mutex<Said>>,
    readers: [JoinHandle<()>; 2],
}

#[derive(Default)]
struct Said {
    last: Option<public::Move>,
    memory: Vec<MemorySample>,
    /// What is not a move: errors.
    words: String,
}

impl Command {
    fn start(installation: &Installation, arguments: &[&str], began: Instant) -> Result<Self> {
        let mut child = installation.spawn(arguments, Stdio::null())?;
        let said: Arc<Mutex<Said>> = Arc::default();
        let (out, err) = (child.stdout.take().context("no output")?, child.stderr.take().context("no errors")?);
        let (told, complained) = (said.clone(), said.clone());
        let moves = std::thread::spawn(move || {
            for line in BufReader::new(out).lines().map_while(Result::ok) {
                lock(&told).line(&line, began);
            }
        });
        let errors = std::thread::spawn(move || {
            let mut text = vec![];
            let _ = BufReader::new(err).read_to_end(&mut text);
            lock(&complained).words += &String::from_utf8_lossy(&text);
        });
        Ok(Self { child, said, readers: [moves, errors] })
    }

    /// All that it has said, once it has ended.
    fn finish(mut self) -> Said {
        let _ = self.child.kill();
        let _ = self.child.wait();
        for reader in self.readers {
            let _ = reader.join();
        }
        std::mem::take(&mut *lock(&self.said))
    }
}

impl Said {
    fn line(&mut self, line: &str, began: Instant) {
        let Ok(told) = serde_json::from_str::<public::Move>(line) else {
            self.words += line;
            self.words.push('\n');
            return;
        };
        self.memory.extend(sample(&told.progress, began));
        self.last = Some(told);
    }
}

/// Where both ends are compared: the destination has everything, and the source does not know yet that it was taken. One
/// step later the source's QEMU ends, and on its way out its network cards still write to the guest's rings.
const COMPARE_AT: Point = Point::Granted;

struct Journey<'a> {
    order: &'a Order<'a>,
    installation: &'a Arc<Installation>,
    vm: &'a mut Hosted,
    figures: Figures,
    disks: Disks,
    /// Points at which a node is to be held.
    armed: BTreeSet<Point>,
    /// Whether RAM is to be compared at [`COMPARE_AT`].
    compare: bool,
    /// The destination's RAM, once it was seen.
    arrived_ram: Option<File>,
}

impl Journey<'_> {
    /// Whether an incident happened: then nobody can say beforehand where the VM ends.
    fn is_eventful(&self) -> bool {
        !self.figures.incidents.is_empty()
    }

    fn note(&mut self, text: impl Into<String>) {
        self.figures.notes.push(text.into());
    }

    /// Orders the move and follows it to its end; yields what is known of it then.
    fn travel(&mut self) -> Result<public::Move> {
        let (last, began) = match self.order.convoy {
            Some(convoy) => self.go_along(convoy)?,
            None => self.go_alone()?,
        };
        self.take_figures(&last, began.unix_us);
        Ok(last)
    }

    /// What `godwit move` is told beside the VM's name.
    fn options(&self) -> Vec<String> {
        let Order { to, disk, policy, throttle, keep_checkpoint, .. } = self.order;
        let mut options = vec!["--to".to_owned(), to.name.clone(), "--disk".to_owned(), disk.to_string()];
        options.extend(policy.iter().flat_map(|policy| ["--policy".to_owned(), policy.to_string()]));
        options.extend(throttle.iter().flat_map(|percent| ["--throttle".to_owned(), percent.to_string()]));
        options.extend(keep_checkpoint.then(|| "--keep-checkpoint".to_owned()));
        options
    }

    /// Orders the move together with the others, and follows this VM's to its end.
    fn go_along(&mut self, convoy: &Arc<Convoy>) -> Result<(public::Move, Began)> {
        // The others wait for this one: so it does not fail before the order.
        if self.compare
            && let Err(e) = self.arm(COMPARE_AT)
        {
            self.note(format!("{e:#}"));
        }
        self.look();
        let options = self.options();
        let options: Vec<&str> = options.iter().map(String::as_str).collect();
        let began = convoy.order(self.installation, &options)?;
        self.figures.began = began.at;
        let name = self.vm.spec.name.clone();
        let deadline = began.at + self.order.timeout + GRACE;
        let (mut asked, mut next) = (None, Instant::now());
        loop {
            self.look();
            if Instant::now() >= next {
                let told = convoy.said(&name).context("Godwit took the order, and not for this VM")?;
                self.figures.ended = Instant::now();
                if is_over(&told.progress) {
                    return Ok((told, began));
                }
                self.figures.memory.extend(sample(&told.progress, began.at));
                self.show(&told);
                self.look_at_shares(&told.progress);
                next = Instant::now() + ASK;
            }
            self.cancel_if_told(&name, &mut asked);
            if Instant::now() > deadline {
                anyhow::bail!("the move has no end");
            }
            std::thread::sleep(LOOK);
        }
    }

    /// Orders the move of this VM, and follows it to its end.
    fn go_alone(&mut self) -> Result<(public::Move, Began)> {
        if self.compare {
            self.arm(COMPARE_AT)?;
        }
        self.look();
        let name = self.vm.spec.name.clone();
        let options = self.options();
        let mut arguments = vec!["move", &name, "--json"];
        arguments.extend(options.iter().map(String::as_str));
        let began = Began::now();
        self.figures.began = began.at;
        let mut command = Command::start(self.installation, &arguments, began.at)?;
        let (mut asked, mut left) = (None, false);
        let status = loop {
            self.look();
            if let Some(status) = command.child.try_wait()? {
                break Some(status);
            }
            let told = lock(&command.said).last.clone();
            if let Some(told) = &told {
                self.show(told);
                if self.may_leave(&told.progress) {
                    left = true;
                    break None;
                }
                self.look_at_shares(&told.progress);
            }
            self.cancel_if_told(&name, &mut asked);
            if self.figures.began.elapsed() > self.order.timeout + GRACE {
                break None;
            }
            std::thread::sleep(LOOK);
        };
        self.figures.ended = Instant::now();
        let said = command.finish();
        self.figures.memory = said.memory;
        let last = match said.last {
            Some(last) if is_over(&last.progress) => last,
            Some(mut last) if left => {
                // Its VM has arrived; the disks are not all there to be compared, now or when it moves on.
                last.progress.outcome = Told::Completed;
                self.disks = Disks::Unknown;
                self.vm.unfinished = true;
                self.note(format!("left while {} of the disks were to follow", last.progress.disk.remaining));
                last
            }
            last => {
                let words = said.words.trim().to_owned();
                let after = self.follow(&name, last, began.unix_us);
                self.figures.ended = Instant::now();
                after.with_context(|| match status {
                    Some(status) => format!("`godwit move` ended ({status}): {words}"),
                    None => format!("`godwit move` did not end: {words}"),
                })?
            }
        };
        Ok((last, began))
    }

    fn may_leave(&self, told: &MoveProgress) -> bool {
        let Some(share) = self.order.leave_at else { return false };
        has_gone(Point::Fill, told, 0) >= share && told.network_proved_ms.is_some()
    }

    fn show(&self, told: &public::Move) {
        let p = &told.progress;
        let name = told.vm.as_str();
        let phase = phase_name(p.phase);
        self.order.progress.enter(name, &phase);
        let (done, of, more) = match p.phase {
            PhaseName::CopyDisk | PhaseName::Fill => (p.disk.copied, Some(p.disk.total), String::new()),
            _ => (p.bytes.memory, None, format!("round {}, {} left", p.rounds.len().max(1), p.memory_remaining)),
        };
        self.order.progress.amount(name, done, of, &more);
    }

    fn cancel_if_told(&mut self, name: &str, asked: &mut Option<Instant>) {
        let late = self.figures.began.elapsed() > self.order.timeout;
        if !late && !self.order.cancel.load(Ordering::Relaxed) {
            return;
        }
        // Again and again: the first order may come before the move is known, or while the controller is away.
        if asked.is_none_or(|at: Instant| at.elapsed() > Duration::from_secs(1)) {
            let refused = self.installation.command(["move", name, "--cancel"]).err();
            if let (None, Some(e)) = (&asked, refused) {
                self.note(format!("the first try to cancel: {e:#}"));
            }
            *asked = Some(Instant::now());
        }
    }

    /// Asks for the end of a move whose command has ended before it.
    fn follow(&mut self, name: &str, mut last: Option<public::Move>, began_unix_us: u64) -> Result<public::Move> {
        let deadline = match last {
            Some(_) => self.figures.began + self.order.timeout + GRACE,
            // Refused, as a rule: then there is no move. But the controller may have died just after it took the order.
            None => Instant::now() + Duration::from_secs(if self.is_eventful() { 60 } else { 0 }),
        };
        let mut next = Instant::now();
        loop {
            self.look();
            if Instant::now() >= next {
                match self.installation.json::<public::Move>(&["move", "show", name]) {
                    Ok(known) if known.ordered_unix_us >= began_unix_us => {
                        if is_over(&known.progress) {
                            return Ok(known);
                        }
                        last = Some(known);
                    }
                    Ok(_) if last.is_none() => anyhow::bail!("no move was begun"),
                    Err(e) if Instant::now() > deadline => return Err(e),
                    _ => {}
                }
                next = Instant::now() + ASK;
            }
            if Instant::now() > deadline {
                let stands = last.map(|m| format!(": {:?} in {:?}", m.progress.outcome, m.progress.phase));
                anyhow::bail!("the move has no end{}", stands.unwrap_or_default());
            }
            std::thread::sleep(LOOK);
        }
    }

    fn site_of(&self, point: Point) -> &str {
        if point.is_at_source() { &self.vm.site } else { &self.order.to.name }
    }

    fn arm(&mut self, point: Point) -> Result<()> {
        self.installation.failpoints(self.site_of(point)).arm(point, self.vm.id)?;
        self.armed.insert(point);
        Ok(())
    }

    /// Arms what was ordered, and does what is to be done where a node is held.
    fn look(&mut self) {
        let ordered: BTreeSet<_> =
            lock(self.order.incidents).iter().filter(|i| i.share.is_none()).map(|i| i.at).collect();
        for point in ordered {
            if !self.armed.contains(&point)
                && let Err(e) = self.arm(point)
            {
                self.note(format!("{e:#}"));
            }
        }
        for point in self.armed.clone() {
            if self.installation.failpoints(self.site_of(point)).reached(point, self.vm.id) {
                self.reached(point);
            }
        }
    }

    /// A node is held at `point`. Everything else waits for this.
    fn reached(&mut self, point: Point) {
        let held = Instant::now();
        if point == COMPARE_AT && self.compare {
            self.compare = false;
            if let Err(e) = self.compare_both_ends() {
                self.note(format!("the two ends could not be compared: {e:#}"));
            }
        }
        let now = self.take_incidents(|i| i.at == point && i.share.is_none());
        self.let_happen(now);
        let site = self.site_of(point).to_owned();
        self.installation.failpoints(&site).release(point, self.vm.id);
        self.armed.remove(&point);
        // Elsewhere the guest ran while its node was held.
        if point.is_in_the_pause() {
            self.figures.held += held.elapsed();
        }
    }

    fn take_incidents(&self, due: impl Fn(&Incident) -> bool) -> Vec<Incident> {
        let mut incidents = lock(self.order.incidents);
        let (now, later) = incidents.drain(..).partition(due);
        *incidents = later;
        now
    }

    fn let_happen(&mut self, incidents: Vec<Incident>) {
        for Incident { at, share, deed } in incidents {
            let share = share.map_or_else(String::new, |share| format!(" {:.0} %", share * 100.0));
            let said = format!("at {}{share}: {deed}", at.name());
            self.order.progress.note(&format!("{}: {said}", self.vm.spec.name));
            let site = self.site_of(at).to_owned();
            match incident::perform(self.installation, &deed, Some(&site), Some(self.vm)) {
                Ok(()) => self.figures.incidents.push(said),
                Err(e) => self.note(format!("{said}: {e:#}")),
            }
        }
    }

    /// Does what was to be done when so much had gone.
    fn look_at_shares(&mut self, progress: &MoveProgress) {
        if lock(self.order.incidents).iter().all(|i| i.share.is_none()) {
            return;
        }
        let ram = self.vm.spec.memory.0;
        let due = self.take_incidents(|i| i.share.is_some_and(|share| has_gone(i.at, progress, ram) >= share));
        self.let_happen(due);
    }

    /// The guest stands still, and all of it is at both ends.
    fn compare_both_ends(&mut self) -> Result<()> {
        let vm = &*self.vm;
        let to = &self.order.to.name;
        let size = vm.spec.memory;
        let ram = vm.place(to)?.ram(size)?;
        let altered = self.order.damage.contains(&Damage::Page);
        // Where a QEMU was killed on purpose, Godwit has started another since, which has the guest that moved. One that has died
        // after it gave all away has left what is known of it.
        let now = vm.place(&vm.site).and_then(|place| place.ram(size)).ok();
        let here = now.as_ref().unwrap_or(&vm.ram);
        let difference = truth::compare_arrived(here, &ram, size.0, altered)?;
        let described = if altered { vec![] } else { truth::describe_pages(&difference, here, &ram)? };
        let (old, new) = (vm.replicas(&vm.site), vm.replicas(to));
        if self.order.damage.contains(&Damage::Block)
            && let Some(first) = new.first()
        {
            disks::damage(first, &vm.spec.layout)?;
        }
        let open = |path: &std::path::PathBuf| {
            File::open(path).with_context(|| format!("cannot open the replica {}", path.display()))
        };
        let pairs = old.iter().zip(&new).map(|(old, new)| Ok(Pair { old: open(old)?, new: open(new)? }));
        let pairs = pairs.collect::<Result<Vec<_>>>();
        let (unfinished, shared) = (vm.unfinished, vm.spec.shared.is_some());
        let recorded = if shared { Ok(()) } else { disks::begin_record(&vm.monitor_in(to), &vm.disk_nodes()) };
        if !self.installation.failpoints(to).is_armed(COMPARE_AT, vm.id) {
            anyhow::bail!("the node was let go meanwhile");
        }
        self.figures.ram = Some(difference);
        if !described.is_empty() {
            // Whether the source's QEMU is known to have lost pages of this guest.
            let log = std::fs::read_to_string(self.installation.fabric().site(&self.vm.site).folder.join("node.log"));
            let log = log.unwrap_or_default();
            let said = |line: &&str| line.contains("lost track of writes");
            self.figures.notes.extend(log.lines().rfind(said).map(str::to_owned));
        }
        self.figures.notes.extend(described);
        self.arrived_ram = Some(ram);
        match (pairs, recorded) {
            _ if shared => {}
            _ if unfinished => self.note("the disks were not compared: the source's had not all come when it went on"),
            (Ok(pairs), Ok(())) => self.disks = Disks::Recorded(pairs),
            (Ok(pairs), Err(e)) => self.compare_now(&pairs, &e)?,
            (Err(e), _) => self.note(format!("the disks were not compared: {e:#}")),
        }
        Ok(())
    }

    /// Compares the disks while the guest is held, because its writes cannot be recorded.
    fn compare_now(&mut self, pairs: &[Pair], why: &anyhow::Error) -> Result<()> {
        if self.order.disk == DiskStrategy::Postcopy {
            // Nothing of them is there yet.
            self.note(format!("the disks were not compared: the guest's writes could not be recorded: {why:#}"));
            return Ok(());
        }
        let allocated =
            pairs.iter().flat_map(|p| [&p.old, &p.new]).map(|f| f.metadata().map_or(0, |m| m.blocks() * 512));
        let allocated: u64 = allocated.sum();
        if allocated > COMPARED_WHILE_HELD {
            self.note(format!("the disks were not compared: the guest's writes could not be recorded: {why:#}"));
            return Ok(());
        }
        self.note(format!("the disks were compared while the guest was held: {why:#}"));
        let found = pairs.iter().map(|pair| truth::compare_disks(&pair.old, &pair.new));
        self.disks = Disks::Compared(found.collect::<Result<_>>()?);
        Ok(())
    }

    fn take_figures(&mut self, told: &public::Move, began_unix_us: u64) {
        let p = &told.progress;
        let figures = &mut self.figures;
        let seconds = |unix_us: u64| (unix_us as f64 - began_unix_us as f64) / 1e6;
        let moment = |unix_us: u64| figures.began + Duration::from_micros(unix_us.saturating_sub(began_unix_us));
        figures.stopped = p.stopped_unix_us.map(moment);
        figures.resumed = p.resumed_unix_us.map(moment);
        if let (None, Some(stopped), Some(ms)) = (figures.resumed, figures.stopped, p.downtime_ms) {
            figures.resumed = Some(stopped + Duration::from_secs_f64(ms.max(0.0) / 1e3));
            figures
                .notes
                .push("the pause is the source's node's own figure: the destination's moment is not known".into());
        }
        figures.phases = (p.phases.iter())
            .map(|phase| Phase {
                name: phase_name(phase.name),
                start_s: seconds(phase.started_unix_us),
                end_s: phase.ended_unix_us.map_or_else(|| figures.began.elapsed().as_secs_f64(), seconds),
            })
            .collect();
        figures.rounds = (p.rounds.iter())
            .map(|round| Round {
                sent: round.pages,
                dirtied: round.dirtied,
                bytes_by_encoding: [
                    ("wire".to_owned(), round.wire.0.saturating_sub(round.references.0 + round.resent.0)),
                    (REFERENCES.to_owned(), round.references.0),
                    ("resent".to_owned(), round.resent.0),
                ]
                .into(),
                seconds: round.seconds,
                level: round.level,
                window: round.window.map(|window| window.0),
            })
            .collect();
        figures.predicted = told.prediction.as_ref().map(|told| Predicted {
            total_s: told.total_s.likely,
            downtime_ms: told.downtime_ms.likely,
            bytes: told.bytes.likely as u64,
            total_between_s: Some([told.total_s.lower, told.total_s.upper]),
            downtime_between_ms: Some([told.downtime_ms.lower, told.downtime_ms.upper]),
            model: Some(told.basis.model.clone()),
            corrected_by: told.basis.past_predictions,
            uncorrected_s: Some(told.uncorrected.total_s),
            goodput_mbit: Some(told.basis.goodput_mbit.likely),
            before_s: Some(told.basis.before_s.likely),
        });
        figures.zero_pages = p.zero_pages;
        let referred: u64 = p.rounds.iter().map(|round| round.on_disk * PAGE as u64).sum();
        figures.kept = Kept {
            memory: p.held_memory.0,
            disk: p.disk.held.0,
            on_disks: referred.saturating_sub(p.neighbour_memory.0),
            of_others: p.neighbour_memory.0,
        };
        let counted = p.bytes;
        figures.counted = Some(WanBytes {
            memory: counted.memory.0,
            disk: counted.disk.0,
            other: counted.control.0,
            ..WanBytes::default()
        });
        let pages: u64 = p.rounds.iter().map(|round| round.pages).sum();
        figures.page_bytes = (pages * PAGE as u64).max(p.raw.0);
        figures.disk_bytes = p.disk.copied.0;
        (figures.outcome, figures.why) = match p.outcome {
            // Whether its network leads there is judged by the lab's own client.
            Told::Completed | Told::NetworkUnproved => (Outcome::Completed, p.error.clone()),
            Told::Cancelled => (Outcome::Cancelled, p.error.clone()),
            other => (Outcome::Failed, Some(p.error.clone().unwrap_or_else(|| format!("Godwit says only: {other:?}")))),
        };
    }

    /// Whatever became of the move: nothing is held any more, all that mends itself has, and the VM is looked for.
    fn arrive(&mut self, result: Result<public::Move>) {
        for point in std::mem::take(&mut self.armed) {
            self.installation.failpoints(self.site_of(point)).release(point, self.vm.id);
        }
        for missed in std::mem::take(&mut *lock(self.order.incidents)) {
            self.note(format!("{} was never reached: {} did not happen", missed.at.name(), missed.deed));
        }
        if self.compare {
            self.note("RAM and disks were not compared: the destination did not get as far as `started`");
        }
        self.installation.later.wait();
        match result {
            Ok(told) if is_over(&told.progress) && told.progress.disk.remaining.0 == 0 => self.vm.unfinished = false,
            Ok(_) => {}
            Err(e) => self.figures.why = Some(format!("{e:#}")),
        }
        let completed = self.figures.outcome == Outcome::Completed;
        let found = if self.is_eventful() && !completed {
            self.vm.await_owner()
        } else {
            Ok(if completed { self.order.to.name.clone() } else { self.vm.site.clone() })
        };
        match found.and_then(|site| self.vm.settle_in(&site)) {
            Ok(()) => {}
            Err(e) if completed => {
                // The RAM that was seen is better than none, and the guest is asked there.
                if let Some(ram) = self.arrived_ram.take() {
                    self.vm.ram = ram;
                }
                self.vm.site.clone_from(&self.order.to.name);
                self.note(format!("{e:#}"));
            }
            Err(e) => self.note(format!("{e:#}")),
        }
    }
}

/// A point of the curve, while memory goes.
fn sample(told: &MoveProgress, began: Instant) -> Option<MemorySample> {
    (told.phase == PhaseName::Memory).then(|| MemorySample {
        t_s: began.elapsed().as_secs_f64(),
        remaining: told.memory_remaining.0,
        dirty_pages_per_s: told.dirty_rate.0 as f64 / PAGE as f64,
    })
}

fn is_over(progress: &MoveProgress) -> bool {
    !matches!(progress.outcome, Told::Running | Told::WaitsForPeer)
}

/// A phase as Godwit's JSON spells it.
/// Which share has gone of what goes at a point: of the disks, or of RAM in the first round.
fn has_gone(at: Point, progress: &MoveProgress, ram: u64) -> f64 {
    let share = |done: u64, of: u64| if of == 0 { 0.0 } else { done as f64 / of as f64 };
    match (at, progress.phase) {
        (Point::CopyDisk, PhaseName::CopyDisk) => share(progress.disk.copied.0, progress.disk.total.0),
        (Point::CopyDisk, phase) if phase > PhaseName::CopyDisk => 1.0,
        (Point::Memory, PhaseName::Memory) => share(progress.raw.0 + progress.zero_pages * PAGE as u64, ram),
        (Point::Memory, phase) if phase > PhaseName::Memory => 1.0,
        (Point::Fill, PhaseName::Fill) => share(progress.disk.copied.0, progress.disk.total.0),
        _ => 0.0,
    }
}

fn phase_name(phase: PhaseName) -> String {
    serde_json::to_value(phase).ok().and_then(|v| v.as_str().map(str::to_owned)).unwrap_or_default()
}
