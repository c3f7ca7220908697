//! Runs a scenario: builds it, makes its steps, measures, checks, takes it down.
//!
//! Each baseline (and each repeat) is a *pass*: fresh sites, fresh guests, the same steps. A pass that fails says why
//! and ends; what it had measured until then is kept.

use crate::fabric::Fabric;
use crate::guest::{self, Accel, ECHO_PORT, Guest, GuestSpec, Start};
use crate::images::GuestImage;
use crate::progress::Progress;
use crate::qemu_move::{self, Figures, Moved, Order};
use crate::report::{
    BaselineReport, EchoPoint, Host, Integrity, MoveReport, Outcome, Report, Series, WanBytes, WanFigures,
};
use crate::scenario::{Action, Alter, Baseline, Damage, DiskStrategy, Image, Move, Scenario};
use crate::truth;
use crate::watch::{Client, Sampler, wan_bytes};
use anyhow::{Context, Result, bail};
use godwit_load::protocol::{CorruptTarget, LoadSpec};
use godwit_units::Bytes;
use godwit_wan::Class;
use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Longest boot of a tiny guest; a debian guest gets ten times this.
const BOOT: Duration = Duration::from_secs(120);
/// How much of the clients' life before a move the curves show.
const LEAD: Duration = Duration::from_secs(3);
/// How long the clients are watched after a move that no `verify` follows.
const TRAIL: Duration = Duration::from_secs(3);

/// How long a client may take to hear from a moved guest: TCP waits at most 120 s between two tries.
const ANSWER: Duration = Duration::from_secs(130);

/// A client that had no answer for so long when it is looked at, seconds after the move, has lost its session.
const ALIVE: Duration = Duration::from_secs(1);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs all passes of a scenario in `work`.
///
/// # Errors
/// When a pass cannot be built or a step cannot be made. A move that fails is not an error: the report says so.
pub fn run(scenario: &Scenario, work: &Path, progress: &Arc<Progress>) -> Result<Report> {
    let accel = accel(progress)?;
    let mut report = Report {
        name: scenario.name.get_ref().clone(),
        started_unix_s: std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_secs()),
        host: host(accel),
        wan: wan_figures(scenario),
        moves: vec![],
        baselines: vec![],
        warnings: vec![],
    };
    if scenario.godwit {
        report.warnings.push("this build has no Godwit to move with: only the baselines were run".into());
    }
    if scenario.baseline.is_empty() {
        bail!(
            "scenario `{}` names no baseline, and this build has no Godwit to move with; add for example baseline = [\"qemu\"]",
            report.name
        );
    }
    for repeat in 0..scenario.repeat {
        for kind in &scenario.baseline {
            let of =
                if scenario.repeat > 1 { format!(" ({} of {})", repeat + 1, scenario.repeat) } else { String::new() };
            progress.title(&format!("{kind}{of}:"));
            let folder = work.join("pass");
            std::fs::create_dir_all(&folder)?;
            let mut pass = Pass::build(scenario, &folder, accel, progress)?;
            let script = pass.script(*kind);
            let (moves, warnings) = pass.finish();
            report.warnings.extend(warnings);
            report.baselines.extend(moves.into_iter().map(|figures| BaselineReport {
                name: *kind,
                stop_rule: qemu_move::stop_rule(*kind),
                figures,
            }));
            std::fs::remove_dir_all(&folder)?;
            script?;
        }
    }
    Ok(report)
}

/// Builds a scenario's sites and guests, says so, and keeps them until the process is ended. No steps are made.
///
/// # Errors
/// When something cannot be built.
pub fn hold(scenario: &Scenario, work: &Path, progress: &Arc<Progress>, ready: impl FnOnce(&Pass)) -> Result<()> {
    progress.title("up:");
    let pass = Pass::build(scenario, work, accel(progress)?, progress)?;
    ready(&pass);
    loop {
        std::thread::park();
    }
}

/// How guests are to be executed: `$GODWIT_LAB_ACCEL`, else KVM where a guest boots under it, else TCG.
fn accel(progress: &Progress) -> Result<Accel> {
    match std::env::var("GODWIT_LAB_ACCEL").as_deref() {
        Ok("kvm") => Ok(Accel::Kvm),
        Ok("tcg") => Ok(Accel::Tcg),
        Ok(other) => bail!("GODWIT_LAB_ACCEL is `{other}`; it takes kvm or tcg"),
        Err(_) => {
            let usable = crate::kvm::usable(progress);
            if !usable {
                progress.note("no usable KVM here: guests run under TCG");
            }
            Ok(if usable { Accel::Kvm } else { Accel::Tcg })
        }
    }
}

fn host(accel: Accel) -> Host {
    let first_line = |program: &str, argument: &str| {
        let output = std::process::Command::new(program).arg(argument).output();
        output
            .ok()
            .and_then(|o| String::from_utf8_lossy(&o.stdout).lines().next().map(str::to_owned))
            .unwrap_or_default()
    };
    Host {
        kernel: first_line("uname", "-r"),
        qemu: first_line("qemu-system-x86_64", "--version"),
        accel: accel.to_string(),
        cpus: std::thread::available_parallelism().map_or(0, usize::from),
    }
}

fn wan_figures(scenario: &Scenario) -> WanFigures {
    let w = &scenario.wan;
    WanFigures {
        rate_mbit: *w.rate_mbit.get_ref(),
        rtt_ms: *w.rtt_ms.get_ref(),
        jitter_ms: *w.jitter_ms.get_ref(),
        loss: *w.loss.get_ref(),
        queue_ms: *w.queue_ms.get_ref(),
    }
}

/// One VM of a pass.
pub struct Vm {
    index: usize,
    name: String,
    spec: GuestSpec,
    /// Nobody's while it moves.
    guest: Mutex<Option<Guest>>,
    lives: AtomicU32,
    clients: Vec<Client>,
    /// Whether it has loads that check themselves.
    checkable: bool,
    /// Ordered for its next hand-off.
    damage: Mutex<Vec<Damage>>,
}

impl Vm {
    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Where it runs, unless it is on the move or lost.
    #[must_use]
    pub fn site(&self) -> Option<String> {
        lock(&self.guest).as_ref().map(|g| g.site.clone())
    }

    /// Its address on the guests' segment.
    #[must_use]
    pub fn address(&self) -> std::net::Ipv4Addr {
        self.spec.address
    }
}

/// A move that was begun.
struct Running {
    vm: String,
    thread: JoinHandle<()>,
    cancel: Arc<AtomicBool>,
}

/// A move that has ended, not yet looked at from the clients' side.
struct Ended {
    report: MoveReport,
    began: Instant,
    sampler: Sampler,
}

/// Sites and guests, up and loaded.
pub struct Pass {
    scenario: Scenario,
    vms: Vec<Arc<Vm>>,
    running: Vec<Running>,
    ended: Arc<Mutex<Vec<Ended>>>,
    done: Vec<MoveReport>,
    warnings: Vec<String>,
    progress: Arc<Progress>,
    fabric: Arc<Fabric>,
}

impl Pass {
    fn build(scenario: &Scenario, work: &Path, accel: Accel, progress: &Arc<Progress>) -> Result<Self> {
        progress.note("building sites");
        let fabric = Arc::new(Fabric::build(scenario, work)?);
        let mut pass = Self {
            scenario: scenario.clone(),
            vms: vec![],
            running: vec![],
            ended: Arc::default(),
            done: vec![],
            warnings: vec![],
            progress: progress.clone(),
            fabric,
        };
        let mut images: HashMap<u8, (GuestImage, PathBuf)> = HashMap::new();
        let mut booting = vec![];
        for (index, vm) in scenario.vm.iter().enumerate() {
            let (image, initrd) = match images.entry(vm.image as u8) {
                std::collections::hash_map::Entry::Occupied(known) => known.get().clone(),
                std::collections::hash_map::Entry::Vacant(free) => {
                    let image = GuestImage::find(vm.image)?;
                    let initrd = work.join(format!("{}.initrd", vm.image));
                    image.make_initrd(&initrd)?;
                    free.insert((image, initrd)).clone()
                }
            };
            let shared = scenario.shares_disks(vm.name.get_ref()).then(|| work.join("shared"));
            if let Some(folder) = &shared {
                std::fs::create_dir_all(folder)?;
            }
            let spec = GuestSpec::new(index, vm, &image, initrd, shared, accel)?;
            let site = pass.fabric.site(vm.site.get_ref());
            image.make_disks(vm, |disk| spec.disk_file(site, 0, disk))?;
            progress.note(&format!("booting {} in {}", spec.name, site.name));
            let guest = Guest::start(site, &spec, 0, Start::Boot)?;
            booting.push((index, vm.clone(), spec, guest));
        }
        for (index, vm, spec, mut guest) in booting {
            let site = pass.fabric.site(vm.site.get_ref());
            let boot = if vm.image == Image::Debian { BOOT * 10 } else { BOOT };
            let control = guest.wait_ready(site, boot)?;
            pass.load_and_warm(&vm, &spec, &guest, control)?;
            let clients = pass.clients(&vm, &spec)?;
            pass.vms.push(Arc::new(Vm {
                index,
                name: spec.name.clone(),
                spec,
                guest: Mutex::new(Some(guest)),
                lives: AtomicU32::new(1),
                clients,
                checkable: vm.load.iter().any(|l| !matches!(l.get_ref(), LoadSpec::Echo { .. })),
                damage: Mutex::default(),
            }));
        }
        Ok(pass)
    }

    fn load_and_warm(
        &mut self,
        vm: &crate::scenario::Vm,
        spec: &GuestSpec,
        guest: &Guest,
        mut control: godwit_load::control::Control,
    ) -> Result<()> {
        let loads: Vec<LoadSpec> = vm.load.iter().map(|l| l.get_ref().clone()).collect();
        control.start(&loads, self.scenario.seed.wrapping_add(u64::from(spec.address.octets()[3])))?;
        let wanted = f64::from(*self.scenario.warm_percent.get_ref()) / 100.0;
        self.progress.note(&format!("warming {}", spec.name));
        let mut share = truth::nonzero_share(&guest.ram, spec.memory.0)?;
        // Not all that the kernel holds as used is non-zero: so ask for less and less free memory.
        for free_percent in [12, 8, 5, 3] {
            if share >= wanted {
                break;
            }
            control.warm(free_percent)?;
            share = truth::nonzero_share(&guest.ram, spec.memory.0)?;
        }
        self.progress.note(&format!("{} is warm: {:.0} % of its memory is not zero", spec.name, share * 100.0));
        if share < wanted {
            self.warnings.push(format!(
                "VM `{}` could only be warmed to {:.0} % non-zero memory ({:.0} % asked for); give it more data or larger loads",
                spec.name, share * 100.0, wanted * 100.0
            ));
        }
        Ok(())
    }

    fn clients(&self, vm: &crate::scenario::Vm, spec: &GuestSpec) -> Result<Vec<Client>> {
        let start = |(from, per_s): (&str, u32)| -> Result<Client> {
            let stream = guest::connect(self.fabric.site(from), SocketAddr::from((spec.address, ECHO_PORT)))
                .with_context(|| format!("the client in {from} cannot reach `{}`", spec.name))?;
            Client::start(from, stream, per_s)
        };
        vm.echoes().map(start).collect()
    }

    /// The VMs.
    #[must_use]
    pub fn vms(&self) -> &[Arc<Vm>] {
        &self.vms
    }

    /// The sites and their paths.
    #[must_use]
    pub fn fabric(&self) -> &Arc<Fabric> {
        &self.fabric
    }

    fn script(&mut self, kind: Baseline) -> Result<()> {
        for step in self.scenario.step.clone() {
            std::thread::sleep(Duration::from_secs_f64(step.after_s));
            match step.action {
                Action::Move(order) => self.begin_move(kind, &order)?,
                Action::Verify(v) => self.verify(v.vm.get_ref())?,
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
                Action::Cut(b) => {
                    let [one, other] = b.between.get_ref();
                    self.progress.note(&format!("cutting {one} - {other}"));
                    self.fabric.path(one, other)?.cut()?;
                }
                Action::Restore(b) => {
                    let [one, other] = b.between.get_ref();
                    self.progress.note(&format!("restoring {one} - {other}"));
                    self.fabric.path(one, other)?.restore()?;
                }
                Action::Rate(change) => self.fabric.change(&change)?,
                Action::Alter(alter) => self.alter(&alter)?,
            }
        }
        self.join(|_| true);
        Ok(())
    }

    fn alter(&self, alter: &Alter) -> Result<()> {
        let vm = self.vm(alter.vm.get_ref());
        let target = match alter.what {
            Damage::Page | Damage::Block => {
                lock(&vm.damage).push(alter.what);
                return Ok(());
            }
            Damage::Segment => {
                let client = vm.clients.first().context("there is no client whose segment could be altered")?;
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
        guest.control(self.fabric.site(&guest.site))?.corrupt(target)?;
        Ok(())
    }

    fn vm(&self, name: &str) -> Arc<Vm> {
        self.vms.iter().find(|vm| vm.name == name).expect("a checked scenario names only VMs that exist").clone()
    }

    /// Waits for running moves of the VMs that `which` accepts.
    fn join(&mut self, which: impl Fn(&str) -> bool) {
        let (wanted, rest): (Vec<_>, Vec<_>) = self.running.drain(..).partition(|r| which(&r.vm));
        self.running = rest;
        for running in wanted {
            if running.thread.join().is_err() {
                self.warnings
                    .push(format!("the move of `{}` ended in a bug of the lab (a panic; see above)", running.vm));
            }
        }
    }

    fn begin_move(&mut self, kind: Baseline, order: &Move) -> Result<()> {
        let name = order.vm.get_ref().clone();
        self.join(|vm| vm == name);
        self.settle(&name, TRAIL);
        let vm = self.vm(&name);
        let Some(source) = lock(&vm.guest).take() else { bail!("VM `{name}` was lost and cannot move") };
        let (from, to) = (source.site.clone(), order.to.get_ref().clone());
        if from == to {
            *lock(&vm.guest) = Some(source);
            bail!("VM `{name}` is in {to} already");
        }
        if !matches!(order.disk, DiskStrategy::Mirror | DiskStrategy::Shared) {
            self.warnings.push(format!("{kind}: QEMU has no `{}` for disks; they were mirrored", order.disk));
        }
        let cancel = Arc::new(AtomicBool::new(false));
        let running = MoveThread {
            kind,
            vm,
            from,
            to,
            fabric: self.fabric.clone(),
            progress: self.progress.clone(),
            cancel: cancel.clone(),
            timeout: Duration::from_secs(self.scenario.move_timeout_s),
            ended: self.ended.clone(),
        };
        let thread = std::thread::Builder::new().name(format!("move-{name}")).spawn(move || running.run(source))?;
        self.running.push(Running { vm: name, thread, cancel });
        Ok(())
    }

    /// Looks at the ended moves of `vm` from the clients' side, and lets go of what was kept for that.
    fn settle(&mut self, vm: &str, trail: Duration) {
        let (mine, rest): (Vec<_>, Vec<_>) = lock(&self.ended).drain(..).partition(|e| e.report.vm == vm);
        *lock(&self.ended) = rest;
        if mine.is_empty() {
            return;
        }
        self.await_answers(vm);
        std::thread::sleep(trail);
        let now = Instant::now();
        for mut ended in mine {
            look_from_clients(&mut ended, &self.vm(vm).clients, now);
            ended.report.series.wan = ended.sampler.finish();
            self.done.push(ended.report);
        }
    }

    /// Waits until every client of `vm` has an answer from now on. After a long pause TCP tries again only after a while
    /// that has doubled with each try, up to as long again as the pause: so silence at first is no lost session yet.
    fn await_answers(&self, vm: &str) {
        let deadline = Instant::now() + ANSWER;
        for client in &self.vm(vm).clients {
            let now = client.began.elapsed().as_secs_f64();
            let answered = || client.log.last_received_s().is_some_and(|last| last > now);
            while !answered() && client.log.error().is_none() && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(20));
            }
        }
    }

    fn verify(&mut self, name: &str) -> Result<()> {
        self.join(|vm| vm == name);
        // The session has to prove itself on the moved guest, not only to have survived the pause.
        self.settle(name, Duration::from_secs(2));
        let vm = self.vm(name);
        let guest = lock(&vm.guest);
        let Some(guest) = guest.as_ref() else {
            self.warnings.push(format!("VM `{name}` was lost: nothing to verify"));
            return Ok(());
        };
        self.progress.note(&format!("verifying {name}"));
        let mut found = Integrity::default();
        if !vm.checkable {
            found.notes.push("the guest has no memory or disk load that could be checked".into());
            return self.found(name, found);
        }
        let checked = guest.control(self.fabric.site(&guest.site)).and_then(|mut c| Ok(c.check()?));
        match checked {
            Ok(check) => {
                found.memory_ok = Some(check.memory.bad_count == 0 && check.memory.touch_errors == 0);
                found.disk_ok = Some(check.disk.bad_count == 0 && check.disk.io_errors == 0);
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
    fn found(&mut self, name: &str, found: Integrity) -> Result<()> {
        match self.done.iter_mut().rev().find(|m| m.vm == name) {
            Some(report) => merge(&mut report.integrity, found),
            None if !found.intact() => {
                self.warnings.push(format!("VM `{name}`, before any move: {}", found.notes.join("; ")))
            }
            None => {}
        }
        Ok(())
    }

    /// Takes everything down; yields the moves and what is to be said beside them.
    fn finish(mut self) -> (Vec<MoveReport>, Vec<String>) {
        self.running.iter().for_each(|r| r.cancel.store(true, Ordering::Relaxed));
        self.join(|_| true);
        for vm in self.vms.clone() {
            self.settle(&vm.name, TRAIL);
        }
        for (one, other, path) in self.fabric.paths() {
            let counters = path.counters();
            if counters.superframes_under_loss() > 0 {
                self.warnings.push(format!(
                    "{one} - {other}: super-frames met loss or jitter as a lump; the figures are not a WAN's"
                ));
            }
            let missed = counters.a_to_b.missed + counters.b_to_a.missed;
            if missed > 0 {
                self.warnings
                    .push(format!("{one} - {other}: the emulator missed {missed} frames; the machine was too busy"));
            }
        }
        (std::mem::take(&mut self.done), std::mem::take(&mut self.warnings))
    }
}

/// Later findings add to earlier ones: one failure is enough, and what was not checked before may be now.
fn merge(into: &mut Integrity, found: Integrity) {
    let both = |a: Option<bool>, b: Option<bool>| match (a, b) {
        (Some(a), Some(b)) => Some(a && b),
        (a, b) => a.or(b),
    };
    into.memory_ok = both(into.memory_ok, found.memory_ok);
    into.disk_ok = both(into.disk_ok, found.disk_ok);
    into.tcp_ok = both(into.tcp_ok, found.tcp_ok);
    into.ram_equal = both(into.ram_equal, found.ram_equal);
    into.wan_carried_disk = both(into.wan_carried_disk, found.wan_carried_disk);
    into.notes.extend(found.notes);
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

/// A thread that makes one move.
struct MoveThread {
    kind: Baseline,
    vm: Arc<Vm>,
    from: String,
    to: String,
    fabric: Arc<Fabric>,
    progress: Arc<Progress>,
    cancel: Arc<AtomicBool>,
    timeout: Duration,
    ended: Arc<Mutex<Vec<Ended>>>,
}

impl MoveThread {
    fn run(self, source: Guest) {
        let before = self.fabric.counters(&self.from, &self.to).unwrap_or_default();
        let sampler = Sampler::start(self.fabric.clone(), self.from.clone(), self.to.clone(), before);
        let life = self.vm.lives.fetch_add(1, Ordering::Relaxed);
        let Moved { guest, old_disks, figures } = qemu_move::run(
            &Order {
                kind: self.kind,
                fabric: &self.fabric,
                to: self.fabric.site(&self.to),
                life,
                index: self.vm.index,
                damage: std::mem::take(&mut *lock(&self.vm.damage)),
                timeout: self.timeout,
                cancel: &self.cancel,
                progress: &self.progress,
            },
            source,
        );
        let counters = self.fabric.counters(&self.from, &self.to).unwrap_or_default().since(&before);
        let mut report = self.report(&figures, wan_bytes(&counters));
        if let (Outcome::Completed, Some(guest)) = (figures.outcome, &guest) {
            self.check_disks(guest, &old_disks, &mut report);
        }
        let says = match (&report.why, report.downtime_ms) {
            (Some(why), _) => why.clone(),
            (None, Some(ms)) => format!("paused for {ms:.0} ms"),
            (None, None) => String::new(),
        };
        let outcome = serde_json::to_value(report.outcome).unwrap_or_default();
        self.progress.note(&format!(
            "{}: {} after {:.1} s; {says}",
            report.vm,
            outcome.as_str().unwrap_or(""),
            report.total_s
        ));
        *lock(&self.vm.guest) = guest;
        lock(&self.ended).push(Ended { report, began: figures.began, sampler: sampler.rebased(figures.began) });
    }

    fn report(&self, figures: &Figures, mut bytes: WanBytes) -> MoveReport {
        if let Some(disk) = figures.disk_in_stream {
            bytes = WanBytes { disk, memory: bytes.memory.saturating_sub(disk), split_by_hypervisor: true, ..bytes };
        }
        let pause = figures.stopped.zip(figures.resumed).map(|(stop, resume)| resume.saturating_duration_since(stop));
        let mut integrity = Integrity::default();
        if let Some(ram) = &figures.ram {
            integrity.ram_equal = Some(ram.units.is_empty());
            if !ram.units.is_empty() {
                integrity.notes.push(format!("RAM differs in pages {}", ram.named()));
            }
        }
        MoveReport {
            vm: self.vm.name.clone(),
            from: self.from.clone(),
            to: self.to.clone(),
            strategy: if self.vm.spec.shared.is_some() { "shared" } else { "mirror" }.into(),
            outcome: figures.outcome,
            why: figures.why.clone(),
            total_s: figures.ended.saturating_duration_since(figures.began).as_secs_f64(),
            downtime_ms: pause.map(|p| p.saturating_sub(figures.held).as_secs_f64() * 1e3),
            held_ms: figures.held.as_secs_f64() * 1e3,
            outage_ms: None,
            bytes,
            precached_bytes: 0,
            raw_bytes: figures.page_bytes + figures.disk_bytes + figures.disk_in_stream.unwrap_or(0),
            zero_pages: figures.zero_pages,
            nonzero_share: figures.nonzero_share,
            rounds: figures.rounds.clone(),
            phases: figures.phases.clone(),
            predicted: None,
            integrity,
            series: Series { memory: figures.memory.clone(), ..Series::default() },
        }
    }

    fn check_disks(&self, guest: &Guest, old: &[PathBuf], report: &mut MoveReport) {
        if self.vm.spec.shared.is_some() {
            report.integrity.notes.push("the disk is shared: there is no copy to compare".into());
            return;
        }
        let incompressible = self.vm.spec.layout.incompressible;
        let carried = Bytes(report.bytes.disk + report.bytes.memory);
        let mut found = Integrity { wan_carried_disk: Some(carried >= incompressible), ..Integrity::default() };
        if carried < incompressible {
            found.notes.push(format!(
                "the disk holds {incompressible} that nothing can compress, but only {carried} crossed the WAN"
            ));
        }
        match qemu_move::compare_disks(guest, self.fabric.site(&self.to), old) {
            Ok(differences) => {
                found.disk_ok = Some(differences.iter().all(|d| d.units.is_empty()));
                let wrong = differences.iter().enumerate().filter(|(_, d)| !d.units.is_empty());
                found
                    .notes
                    .extend(wrong.map(|(disk, d)| format!("disk {disk} differs in 64 KiB granules {}", d.named())));
            }
            Err(e) => found.notes.push(format!("the disks could not be compared: {e:#}")),
        }
        old.iter().for_each(|file| drop(std::fs::remove_file(file)));
        merge(&mut report.integrity, found);
    }
}
