//! A scenario's steps: what is done to a pass, in order, and what is looked at afterwards.

use crate::application;
use crate::convoy::Convoy;
use crate::godwit::hosted::Hosted;
use crate::godwit::incident::{self, Deed, Incident};
use crate::guest_io::GuestWatch;
use crate::machine::Machine;
use crate::moves::{Ended, MoveThread, Running};
use crate::pass::{Means, Pass, Vm, lock};
use crate::reboot;
use crate::report::{EchoPoint, Integrity, Mark, MoveReport};
use crate::scenario::{Action, Alter, Cut, Damage, DiskStrategy, Expect, Kill, LoadStep, Moment, Move, Runs};
use crate::watch::Client;
use anyhow::{Context, Result, bail};
use godwit_api::predict::MovePrediction;
use godwit_load::protocol::{CorruptTarget, LoadSpec, LoadStatus, WorkCheck};
use godwit_wan::Class;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// How much of the clients' life before a move the curves show.
const LEAD: Duration = Duration::from_secs(3);
/// How long the clients are watched after a move that no `verify` follows.
pub(crate) const TRAIL: Duration = Duration::from_secs(3);

/// How long loads with an end may take to come to it.
const LOADED: Duration = Duration::from_secs(3600);

/// How long a client may take to hear from a moved guest: TCP waits at most 120 s between two tries.
const ANSWER: Duration = Duration::from_secs(130);

/// A client that had no answer for so long when it is looked at, seconds after the move, has lost its session.
const ALIVE: Duration = Duration::from_secs(1);

impl Pass {
    /// Makes the steps; a step that cannot be made ends them.
    ///
    /// # Errors
    /// When a step cannot be made.
    pub fn script(&mut self) -> Result<()> {
        self.zero = Instant::now();
        for step in self.scenario.step.clone() {
            std::thread::sleep(Duration::from_secs_f64(step.after_s));
            match step.action {
                Action::Move(order) => self.begin_move(&order)?,
                Action::Component(step) => self.move_component(&step)?,
                Action::Verify(v) => self.verify(v.vm.get_ref()),
                Action::Wait(wait) => {
                    if wait.moves {
                        self.join(|_| true);
                    }
                    std::thread::sleep(Duration::from_secs_f64(wait.s));
                }
                Action::Cancel(v) => {
                    let running = self.running.iter().filter(|r| &r.vm == v.vm.get_ref());
                    running.for_each(|r| r.cancel.store(true, Ordering::Relaxed));
                }
                Action::Cut(cut) => self.cut(&cut)?,
                Action::Kill(kill) => self.kill(&kill)?,
                Action::Expect(expect) => self.expect(&expect),
                Action::Restore(b) => {
                    let [one, other] = b.between.get_ref();
                    self.progress.note(&format!("restoring {one} - {other}"));
                    self.fabric.path(one, other)?.restore()?;
                }
                Action::Rate(change) => self.fabric.change(&change)?,
                Action::Alter(alter) => self.alter(&alter)?,
                Action::Precache(step) => self.precache(&step)?,
                Action::Profile(step) => self.profile(&step)?,
                Action::Io(step) => self.io(&step)?,
                Action::Load(step) => self.load(&step)?,
                Action::Capture(step) => self.capture(&step)?,
                Action::Whole(step) => self.whole(&step),
            }
        }
        self.join(|_| true);
        Ok(())
    }

    /// Gives a guest other loads, and waits until those with an end have come to it.
    fn load(&mut self, step: &LoadStep) -> Result<()> {
        let name = step.vm.get_ref();
        self.join(|vm| vm == name);
        self.settle(name, TRAIL);
        let vm = self.vm(name);
        let guest = lock(&vm.guest);
        let guest = guest.as_ref().with_context(|| format!("VM `{name}` was lost"))?;
        let mut control = guest.control(&self.fabric)?.with_patience(LOADED);
        control.start(&step.load, self.scenario.seed)?;
        self.progress.note(&format!("{name} has other loads"));
        if !step.until_done {
            return Ok(());
        }
        let deadline = Instant::now() + LOADED;
        loop {
            let loads = control.status()?.loads;
            let unfinished = |(spec, load): (&LoadSpec, &LoadStatus)| match (spec, load) {
                (LoadSpec::Disk { total_mib, .. }, LoadStatus::Disk(disk)) => {
                    disk.kib_written < u64::from(*total_mib) << 10
                }
                _ => false,
            };
            if !step.load.iter().zip(&loads).any(unfinished) {
                return Ok(());
            }
            if Instant::now() > deadline {
                bail!("the loads of `{name}` do not come to their end: {loads:?}");
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    fn alter(&self, alter: &Alter) -> Result<()> {
        let vm = self.vm(alter.vm.get_ref());
        let target = match alter.what {
            Damage::Page | Damage::Block => {
                lock(&vm.damage).push(alter.what);
                return Ok(());
            }
            Damage::Segment => {
                let clients = lock(&vm.clients);
                let client = clients.first().context("there is no client whose segment could be altered")?;
                let site = vm.site().with_context(|| format!("VM `{}` is on the move", vm.name))?;
                self.progress.note(&format!("altering a segment between {site} and {}", client.site));
                self.fabric.path(&site, &client.site)?.alter_next_segment(Class::Client)?;
                return Ok(());
            }
            Damage::GuestPage => CorruptTarget::MemoryPage,
            Damage::GuestRecord => CorruptTarget::DiskRecord,
        };
        let guest = lock(&vm.guest);
        let guest = guest.as_ref().with_context(|| format!("VM `{}` is on the move", vm.name))?;
        guest.control(&self.fabric)?.corrupt(target)?;
        Ok(())
    }

    fn cut(&mut self, cut: &Cut) -> Result<()> {
        let restored_after = cut.for_s.map(Duration::from_secs_f64);
        if let (Some(at), Some(vm)) = (cut.at, &cut.vm) {
            let deed = Deed::Cut { between: cut.between.get_ref().clone(), restored_after };
            self.order_incident(vm.get_ref(), Incident { at, share: cut.share, deed });
            return Ok(());
        }
        let [one, other] = cut.between.get_ref();
        self.progress.note(&format!("cutting {one} - {other}"));
        let lasts = restored_after.map_or(String::new(), |lasts| format!(" for {} s", lasts.as_secs_f64()));
        self.note_incident(format!("the path {one} - {other} cut{lasts}"));
        incident::cut(&self.fabric, &self.later, cut.between.get_ref(), restored_after)
    }

    fn kill(&mut self, kill: &Kill) -> Result<()> {
        let deed = Deed::Kill {
            what: *kill.what.get_ref(),
            site: kill.site.as_ref().map(|s| s.get_ref().clone()),
            restart_after: Duration::from_secs_f64(kill.restart_after_s),
        };
        if let (Some(at), Some(vm)) = (kill.at, &kill.vm) {
            self.order_incident(vm.get_ref(), Incident { at, share: kill.share, deed });
            return Ok(());
        }
        let Some(installation) = self.installation.clone() else {
            self.leave_out("kill");
            return Ok(());
        };
        self.progress.note(&deed.to_string());
        self.note_incident(deed.told());
        let vm = kill.vm.as_ref().map(|vm| self.vm(vm.get_ref()));
        let guest = vm.as_ref().map(|vm| lock(&vm.guest));
        let hosted = guest.as_ref().and_then(|guest| match guest.as_ref() {
            Some(Machine::Godwit(hosted)) => Some(hosted),
            _ => None,
        });
        incident::perform(&installation, &deed, None, hosted)
    }

    fn order_incident(&mut self, vm: &str, incident: Incident) {
        if self.installation.is_none() {
            return self.leave_out("at");
        }
        lock(&self.vm(vm).incidents).push(incident);
    }

    /// A baseline has nothing that the step could be about.
    pub(crate) fn leave_out(&mut self, step: &str) {
        self.warnings.push(format!("{}: steps with `{step}` are about Godwit, and were left out", self.means));
    }

    /// Waits until all has settled, and looks where the VM runs.
    fn expect(&mut self, expect: &Expect) {
        let name = expect.vm.get_ref();
        self.join(|vm| vm == name);
        if expect.rebooted {
            // Its clients' sessions died with it.
            lock(&self.vm(name).clients).clear();
        }
        self.settle(name, TRAIL);
        let vm = self.vm(name);
        let mut guest = lock(&vm.guest);
        let hosted = match guest.as_mut() {
            Some(Machine::Godwit(hosted)) => hosted,
            // A baseline's guest is a process of the lab's own: that there is one is how the lab is built.
            Some(Machine::Qemu(_)) => return,
            None => return self.is_missing(name),
        };
        self.progress.note(&format!("looking where {name} runs"));
        hosted.installation().later.wait();
        let seen = match expect.runs {
            Runs::One => runs_in_one_place(hosted, expect.site.as_ref().map(|s| s.get_ref().as_str())),
            Runs::None => match hosted.places().as_slice() {
                [] => Ok(()),
                places => Err(anyhow::anyhow!("`{name}` was to run nowhere, and has QEMUs: {places:?}")),
            },
        };
        let mut found = Integrity { one_place: Some(seen.is_ok()), ..Integrity::default() };
        found.notes.extend(seen.err().map(|e| format!("{e:#}")));
        if expect.rebooted && found.one_place == Some(true) && expect.runs == Runs::One {
            match reboot::look(hosted) {
                Ok(note) => found.notes.push(note),
                Err(e) => {
                    found.disk_ok = Some(false);
                    found.notes.push(format!("{e:#}"));
                }
            }
        }
        drop(guest);
        if expect.rebooted
            && found.intact()
            && let Err(e) = self.load_again(&vm)
        {
            found.memory_ok = Some(false);
            found.notes.push(format!("the restarted guest could not be loaded: {e:#}"));
        }
        self.found(name, found);
    }

    /// A guest that was restarted has forgotten its loads, and its clients' sessions.
    fn load_again(&mut self, vm: &Arc<Vm>) -> Result<()> {
        let guest = lock(&vm.guest);
        let guest = guest.as_ref().context("the VM is lost")?;
        self.load_and_warm(&vm.described, &vm.spec, guest)?;
        *lock(&vm.clients) = self.clients(&vm.described, &vm.spec)?;
        Ok(())
    }

    /// Waits for running moves of the VMs that `which` accepts.
    pub(crate) fn join(&mut self, which: impl Fn(&str) -> bool) {
        let (wanted, rest): (Vec<_>, Vec<_>) = self.running.drain(..).partition(|r| which(&r.vm));
        self.running = rest;
        for running in wanted {
            if running.thread.join().is_err() {
                self.broke(format!("the move of `{}` ended in a bug of the lab (a panic; see above)", running.vm));
            }
        }
    }

    /// The run is worth less than it looks from now on; the first reason is told.
    fn broke(&mut self, why: String) {
        self.broken.get_or_insert(why);
    }

    /// There is nothing to look at. A baseline's VM was lost in its move, and the report of that says so.
    fn is_missing(&mut self, name: &str) {
        let why = format!("VM `{name}` was lost: there is nothing to look at");
        match self.means {
            Means::Godwit => self.broke(why),
            Means::Baseline(_) => self.warnings.push(why),
        }
    }

    /// Waits for the moment at which a move is to be ordered.
    fn await_moment(&self, name: &str, to: &str, moment: &Moment) -> Result<()> {
        let at_s = match moment.at_s {
            Some(at_s) => at_s,
            None => {
                let guest = self.vm(name);
                let installation = match lock(&guest.guest).as_ref() {
                    Some(Machine::Godwit(hosted)) => hosted.installation().clone(),
                    _ => bail!("`moment` without `at_s` asks Godwit for it: leave out the baselines"),
                };
                let told: MovePrediction = installation.json(&["predict", name, "--to", to, "--when"])?;
                let best = told.when.context("no profile of the guest tells of a moment: `profile` it first")?.best;
                self.progress.note(&format!(
                    "{name}: the best moment takes {:.1} s and a pause of {:.0} ms, it is said",
                    best.total_s, best.downtime_ms
                ));
                (best.at_unix_s % u64::from(moment.period_s)) as f64
            }
        };
        let now = SystemTime::now().duration_since(UNIX_EPOCH)?;
        std::thread::sleep(moment.wait(now, at_s));
        self.progress.note(&format!("{name}: it is {at_s} s after the beginning of its period"));
        Ok(())
    }

    fn begin_move(&mut self, order: &Move) -> Result<()> {
        let names: Vec<String> = order.vms.iter().map(|vm| vm.get_ref().clone()).collect();
        self.join(|vm| names.iter().any(|name| name == vm));
        names.iter().for_each(|name| self.settle(name, TRAIL));
        if !self.flows.is_empty() {
            self.note_incident(format!("{} moved to {}", names.join(", "), order.to.get_ref()));
        }
        let [name] = names.as_slice() else { return self.begin_together(order, names) };
        if let Some(moment) = &order.moment {
            self.await_moment(name, order.to.get_ref(), moment)?;
        }
        self.begin_one(order, name, None)
    }

    /// Begins the moves of several VMs: by Godwit in one order, by a baseline all at once.
    fn begin_together(&mut self, order: &Move, names: Vec<String>) -> Result<()> {
        let to = order.to.get_ref();
        let mut sites = vec![];
        for name in &names {
            // Before anything moves: nobody waits for one that will never come.
            sites.push(self.vm(name).site().with_context(|| format!("VM `{name}` was lost and cannot move"))?);
        }
        if let Some(other) = sites.iter().find(|site| **site != sites[0]) {
            bail!("VMs of one order are in one site: there are some in {} and in {other}", sites[0]);
        }
        if sites[0] == *to {
            bail!("they are in {to} already");
        }
        let convoy = Arc::new(Convoy::new(self.means, names.clone(), &sites[0], to, &self.fabric));
        self.convoys.push(convoy.clone());
        names.iter().try_for_each(|name| self.begin_one(order, name, Some(&convoy)))
    }

    fn begin_one(&mut self, order: &Move, name: &str, convoy: Option<&Arc<Convoy>>) -> Result<()> {
        let vm = self.vm(name);
        let Some(source) = lock(&vm.guest).take() else { bail!("VM `{name}` was lost and cannot move") };
        let (from, to) = (source.site().to_owned(), order.to.get_ref().clone());
        if from == to {
            *lock(&vm.guest) = Some(source);
            if order.retry {
                self.progress.note(&format!("{name} is in {to} already: nothing to try again"));
                return Ok(());
            }
            bail!("VM `{name}` is in {to} already");
        }
        let by_qemu = self.means != Means::Godwit;
        if by_qemu && !matches!(order.disk, DiskStrategy::Mirror | DiskStrategy::Shared) {
            self.warnings.push(format!("{}: QEMU has no `{}` for disks; they were mirrored", self.means, order.disk));
        }
        // Without a curve of the guest's own the move is what it is.
        let watch = match GuestWatch::start(&source, &self.fabric) {
            Ok(watch) => Some(watch),
            Err(e) => {
                self.warnings.push(format!("VM `{name}` could not be asked for its own disk I/O: {e:#}"));
                None
            }
        };
        let cancel = Arc::new(AtomicBool::new(false));
        let running = MoveThread {
            watch,
            means: self.means,
            disk: order.disk,
            leave_at: order.leave_at,
            compare: order.compare,
            policy: order.policy,
            throttle: order.throttle,
            keep_checkpoint: order.keep_checkpoint,
            convoy: convoy.cloned(),
            vm,
            from,
            to,
            fabric: self.fabric.clone(),
            progress: self.progress.clone(),
            cancel: cancel.clone(),
            timeout: Duration::from_secs(*self.scenario.move_timeout_s.get_ref()),
            patience: *self.scenario.patience_rounds.get_ref(),
            ended: self.ended.clone(),
        };
        let thread = std::thread::Builder::new().name(format!("move-{name}")).spawn(move || running.run(source))?;
        self.running.push(Running { vm: name.to_owned(), thread, cancel });
        Ok(())
    }

    /// Looks at the ended moves of `vm` from the clients' side, and lets go of what was kept for that.
    pub(crate) fn settle(&mut self, vm: &str, trail: Duration) {
        let (mine, rest): (Vec<_>, Vec<_>) = lock(&self.ended).drain(..).partition(|e| e.report.vm == vm);
        *lock(&self.ended) = rest;
        if mine.is_empty() {
            return;
        }
        self.await_answers(vm);
        std::thread::sleep(trail);
        // On a busy machine an answer may take longer than a silent session is given: the look comes right after one.
        self.await_answers(vm);
        let now = Instant::now();
        for mut ended in mine {
            look_from_clients(&mut ended, &lock(&self.vm(vm).clients), now);
            ended.report.series.wan = ended.sampler.finish();
            ended.report.requests = application::requests(&self.applications, vm, ended.began, now);
            let stop = ended.report.phases.iter().find(|phase| phase.name == "stop").map(|phase| phase.start_s);
            let mark = self.mark(&ended.report, ended.began);
            self.marks.push(mark);
            if let Some(watch) = ended.watch {
                ended.report.series.io = watch.curve(ended.began, stop);
            }
            self.done.push(ended.report);
        }
    }

    /// When a VM's move was, and when its guest stood still.
    fn mark(&self, report: &MoveReport, began: Instant) -> Mark {
        let start_s = self.seconds(began);
        let phase = |name: &str| report.phases.iter().find(|phase| phase.name == name);
        let stop_s = phase("stop").map(|stop| {
            let until = phase("hand-off").map_or(stop.end_s, |hand_off| hand_off.end_s);
            [start_s + stop.start_s, start_s + until]
        });
        let end_s = start_s + report.ended_s.unwrap_or(report.total_s);
        Mark { what: report.vm.clone(), to: report.to.clone(), start_s, end_s, stop_s, ..Mark::default() }
    }

    /// Waits until every client of `vm` has an answer from now on. After a long pause TCP tries again only after a while
    /// that has doubled with each try, up to as long again as the pause: so silence at first is no lost session yet.
    fn await_answers(&self, vm: &str) {
        let deadline = Instant::now() + ANSWER;
        for client in lock(&self.vm(vm).clients).iter() {
            let now = client.began.elapsed().as_secs_f64();
            let answered = || client.log.last_received_s().is_some_and(|last| last > now);
            while !answered() && client.log.error().is_none() && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    }

    fn verify(&mut self, name: &str) {
        self.join(|vm| vm == name);
        // The session has to prove itself on the moved guest, not only to have survived the pause.
        self.settle(name, Duration::from_secs(2));
        let vm = self.vm(name);
        let guest = lock(&vm.guest);
        let Some(guest) = guest.as_ref() else { return self.is_missing(name) };
        self.progress.note(&format!("verifying {name}"));
        let mut found = Integrity::default();
        if !vm.checkable {
            found.notes.push("the guest has no memory or disk load that could be checked".into());
            return self.found(name, found);
        }
        let checked = guest.control(&self.fabric).and_then(|mut c| Ok(c.check()?));
        match checked {
            Ok(check) => {
                let (memory, disk) = (&check.memory, &check.disk);
                found.memory_ok = judge(memory.pages_checked, memory.bad_count + memory.touch_errors);
                found.disk_ok = judge(disk.records_checked, disk.bad_count + disk.io_errors);
                judge_work(&check.work, &mut found);
                found.notes.push(format!(
                    "the guest checked {} pages and {} records",
                    check.memory.pages_checked, check.disk.records_checked
                ));
                found.notes.extend(
                    check
                        .memory
                        .bad
                        .iter()
                        .map(|b| format!("page {} is {}: expected {}, found {}", b.page, b.kind, b.expected, b.found)),
                );
                found.notes.extend(
                    check.disk.bad.iter().map(|b| {
                        format!("record {} is {}: expected {}, found {}", b.slot, b.kind, b.expected, b.found)
                    }),
                );
            }
            Err(e) => {
                // A guest that does not answer after a move is a guest that was hurt.
                (found.memory_ok, found.disk_ok) = (Some(false), Some(false));
                found.notes.push(format!("the guest did not answer: {e:#}; {}", guest.last_words()));
            }
        }
        self.found(name, found)
    }

    /// Adds findings to the last move of `name`.
    fn found(&mut self, name: &str, found: Integrity) {
        match self.done.iter_mut().rev().find(|m| m.vm == name) {
            Some(report) => merge(&mut report.integrity, found),
            None if !found.intact() => self.broke(format!("VM `{name}`, before any move: {}", found.notes.join("; "))),
            None => {}
        }
    }
}

/// What a check says that looked at so many pages or records: of none, only that something has failed.
fn judge(looked_at: u64, failures: u64) -> Option<bool> {
    (looked_at + failures > 0).then_some(failures == 0)
}

/// Later findings add to earlier ones: one failure is enough, and what was not checked before may be now.
pub(crate) fn merge(into: &mut Integrity, found: Integrity) {
    let both = |a: Option<bool>, b: Option<bool>| match (a, b) {
        (Some(a), Some(b)) => Some(a && b),
        (a, b) => a.or(b),
    };
    into.memory_ok = both(into.memory_ok, found.memory_ok);
    into.disk_ok = both(into.disk_ok, found.disk_ok);
    into.tcp_ok = both(into.tcp_ok, found.tcp_ok);
    into.ram_equal = both(into.ram_equal, found.ram_equal);
    into.wan_carried_disk = both(into.wan_carried_disk, found.wan_carried_disk);
    into.one_place = both(into.one_place, found.one_place);
    into.work_ok = both(into.work_ok, found.work_ok);
    into.notes.extend(found.notes);
}

/// The VM runs in one place and nowhere else; it is taken from there.
fn runs_in_one_place(vm: &mut Hosted, expected: Option<&str>) -> Result<()> {
    let site = vm.await_one_place()?;
    let name = &vm.spec.name;
    // Godwit's word alone does not count.
    if !vm.place(&site)?.runs(vm.spec.memory)? {
        bail!("Godwit says that `{name}` runs in {site}, but its memory stands still");
    }
    if let Some(expected) = expected.filter(|e| *e != site) {
        bail!("`{name}` runs in {site}, and was to run in {expected}");
    }
    vm.await_no_taps_but_in(&site)?;
    vm.settle_in(&site)
}

fn judge_work(works: &[WorkCheck], found: &mut Integrity) {
    for work in works {
        let well = work.problems.is_empty();
        found.work_ok = Some(found.work_ok.unwrap_or(true) && well);
        let (units, objects) = match work.what.as_str() {
            "database" => ("transactions", "transactions are in the history"),
            "java" => ("transactions", "were looked at by the program itself"),
            _ => ("objects", "of the last objects are whole"),
        };
        found.notes.push(format!("{}: {} {units}, and goes on; {} {objects}", work.what, work.units, work.looked_at));
        found.notes.extend(work.problems.iter().map(|problem| format!("{}: {problem}", work.what)));
    }
}

fn look_from_clients(ended: &mut Ended, clients: &[Client], now: Instant) {
    let report = &mut ended.report;
    let mut outage: Option<f64> = None;
    for client in clients {
        let seen = client.log.snapshot();
        // The clients' clocks count from their own start.
        let offset = ended.began.saturating_duration_since(client.began).as_secs_f64();
        let until = now.saturating_duration_since(client.began).as_secs_f64();
        outage = Some(outage.unwrap_or(0.0).max(seen.longest_gap(offset, until).gap_ms));
        let from = offset - LEAD.as_secs_f64();
        let points = seen.samples.iter().filter(|s| s.received_at_s >= from && s.received_at_s <= until);
        report.series.echo.extend(
            points.map(|s| EchoPoint { t_s: s.received_at_s - offset, rtt_ms: (s.received_at_s - s.sent_at_s) * 1e3 }),
        );
        // A session that is not broken but silent has not followed the guest.
        let last = seen.samples.last().map_or(0.0, |s| s.received_at_s);
        let alive = until - last < ALIVE.as_secs_f64();
        if !alive && seen.session_ok {
            report.integrity.notes.push(format!("a client has had no answer for {:.1} s", until - last));
        }
        merge(&mut report.integrity, Integrity { tcp_ok: Some(seen.session_ok && alive), ..Integrity::default() });
        report.integrity.notes.extend(seen.error.iter().map(|e| format!("the client's session: {e}")));
    }
    if clients.is_empty() {
        report.integrity.notes.push("no client was there to check a session".into());
    }
    report.outage_ms = outage;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_check_that_looked_at_nothing_says_nothing_unless_something_failed() {
        assert_eq!((judge(0, 0), judge(7, 0)), (None, Some(true)));
        assert_eq!((judge(0, 1), judge(7, 1)), (Some(false), Some(false)));
    }
}
