//! One move of a pass, in a thread of its own: by QEMU or by Godwit; then its report.

use crate::convoy::Convoy;
use crate::disks::{self, Pair};
use crate::fabric::Fabric;
use crate::figures::Figures;
use crate::godwit::hosted::Hosted;
use crate::godwit::journey::{self, Disks};
use crate::guest::Guest;
use crate::guest_io::GuestWatch;
use crate::machine::Machine;
use crate::pass::{Means, Vm, lock};
use crate::processors::Watch;
use crate::progress::Progress;
use crate::qemu_move::{self, Moved};
use crate::report::{Integrity, MoveReport, Outcome, Series, WanBytes};
use crate::scenario::{Baseline, DiskStrategy};
use crate::steps::merge;
use crate::truth::Difference;
use crate::watch::{Sampler, wan_bytes};
use anyhow::{Context, Result};
use godwit_units::{Bytes, Policy};
use std::fs::File;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A move that was begun.
pub(crate) struct Running {
    pub vm: String,
    pub thread: JoinHandle<()>,
    pub cancel: Arc<AtomicBool>,
}

/// A move that has ended, not yet looked at from the clients' side.
pub(crate) struct Ended {
    pub report: MoveReport,
    pub began: Instant,
    pub sampler: Sampler,
    pub watch: Option<GuestWatch>,
}

/// A thread that makes one move.
pub(crate) struct MoveThread {
    pub means: Means,
    pub disk: DiskStrategy,
    pub leave_at: Option<f64>,
    /// Whether RAM is compared at both ends.
    pub compare: bool,
    /// What it is to spare.
    pub policy: Option<Policy>,
    /// By how much the guest's CPUs may be slowed.
    pub throttle: Option<u8>,
    /// Whether the source is to keep the guest's memory.
    pub keep_checkpoint: bool,
    /// Those that move in one order with it.
    pub convoy: Option<Arc<Convoy>>,
    pub vm: Arc<Vm>,
    pub from: String,
    pub to: String,
    pub fabric: Arc<Fabric>,
    pub progress: Arc<Progress>,
    pub cancel: Arc<AtomicBool>,
    pub timeout: Duration,
    /// Rounds after which a baseline is told to stop its guest.
    pub patience: u32,
    pub ended: Arc<Mutex<Vec<Ended>>>,
    /// Asks the guest how its disks do.
    pub watch: Option<GuestWatch>,
}

impl MoveThread {
    /// Moves `machine`, gives it back to its VM, and hands in what was measured.
    pub fn run(mut self, machine: Machine) {
        let watch = self.watch.take();
        let before = self.fabric.counters(&self.from, &self.to).unwrap_or_default();
        let sampler = Sampler::start(self.fabric.clone(), self.from.clone(), self.to.clone(), before);
        let carried = || wan_bytes(&self.fabric.counters(&self.from, &self.to).unwrap_or_default().since(&before));
        let processors = Watch::start(&self.fabric, [&self.from, &self.to]);
        let (machine, mut report, began) = match (machine, self.means) {
            (Machine::Qemu(guest), Means::Baseline(kind)) => self.by_qemu(kind, guest, carried),
            (Machine::Godwit(vm), _) => self.by_godwit(vm, carried),
            (Machine::Qemu(_), Means::Godwit) => unreachable!("a pass by Godwit has only guests of Godwit's"),
        };
        // Without it the move is what it is.
        report.processes = processors.map_or_else(|_| vec![], Watch::finish);
        let says = match (&report.why, report.downtime_ms) {
            (Some(why), _) => why.clone(),
            (None, Some(ms)) => format!("paused for {ms:.0} ms"),
            (None, None) => String::new(),
        };
        let outcome = crate::table::outcome_word(report.outcome);
        if let Some(convoy) = &self.convoy {
            convoy.ended(&report);
        }
        self.progress.note(&format!("{}: {outcome} after {:.1} s; {says}", report.vm, report.total_s));
        *lock(&self.vm.guest) = machine;
        lock(&self.ended).push(Ended { report, began, sampler: sampler.rebased(began), watch });
    }

    fn by_qemu(
        &self,
        kind: Baseline,
        source: Guest,
        carried: impl Fn() -> WanBytes,
    ) -> (Option<Machine>, MoveReport, Instant) {
        let order = qemu_move::Order {
            kind,
            fabric: &self.fabric,
            to: self.fabric.site(&self.to),
            compare: self.compare,
            life: self.vm.lives.fetch_add(1, Ordering::Relaxed),
            index: self.vm.index,
            damage: std::mem::take(&mut *lock(&self.vm.damage)),
            timeout: self.timeout,
            patience: self.patience,
            cancel: &self.cancel,
            progress: &self.progress,
        };
        let Moved { guest, old_disks, figures } = qemu_move::run(&order, source);
        let strategy = if self.vm.spec.shared.is_some() { DiskStrategy::Shared } else { DiskStrategy::Mirror };
        let mut report = self.report(&figures, carried(), strategy);
        if let (Outcome::Completed, Some(guest)) = (figures.outcome, &guest)
            && strategy != DiskStrategy::Shared
        {
            if !self.compare {
                self.judge_carried(&mut report);
                old_disks.iter().for_each(|file| drop(std::fs::remove_file(file)));
            } else {
                let found = pairs(&old_disks, &guest.disk_files)
                    .and_then(|pairs| disks::compare(guest, self.fabric.site(&self.to), &guest.disk_nodes(), &pairs));
                self.judge_disks(found, &mut report);
                old_disks.iter().for_each(|file| drop(std::fs::remove_file(file)));
            }
        }
        (guest.map(Machine::Qemu), report, figures.began)
    }

    fn by_godwit(&self, mut vm: Hosted, carried: impl Fn() -> WanBytes) -> (Option<Machine>, MoveReport, Instant) {
        let order = journey::Order {
            to: self.fabric.site(&self.to),
            disk: self.disk,
            policy: self.policy,
            throttle: self.throttle,
            leave_at: self.leave_at,
            compare: self.compare,
            keep_checkpoint: self.keep_checkpoint,
            convoy: self.convoy.as_ref(),
            damage: std::mem::take(&mut *lock(&self.vm.damage)),
            incidents: &self.vm.incidents,
            timeout: self.timeout,
            cancel: &self.cancel,
            progress: &self.progress,
        };
        let journey::Moved { figures, disks } = journey::run(&order, &mut vm);
        let mut report = self.report(&figures, carried(), self.disk);
        if figures.outcome == Outcome::Completed && self.disk != DiskStrategy::Shared {
            let found = match disks {
                Disks::Unknown => None,
                Disks::Compared(found) => Some(Ok(found)),
                Disks::Recorded(pairs) => {
                    let (monitor, site) = (vm.monitor_in(&self.to), self.fabric.site(&self.to));
                    Some(disks::compare(&monitor, site, &vm.disk_nodes(), &pairs))
                }
            };
            match found {
                Some(found) => self.judge_disks(found, &mut report),
                None => self.judge_carried(&mut report),
            }
        }
        (Some(Machine::Godwit(vm)), report, figures.began)
    }

    fn report(&self, figures: &Figures, mut bytes: WanBytes, strategy: DiskStrategy) -> MoveReport {
        if let Some(disk) = figures.disk_in_stream {
            bytes = WanBytes { disk, memory: bytes.memory.saturating_sub(disk), split_by_hypervisor: true, ..bytes };
        }
        let pause = figures.stopped.zip(figures.resumed).map(|(stop, resume)| resume.saturating_duration_since(stop));
        let since_began = |t: Instant| t.saturating_duration_since(figures.began).as_secs_f64();
        let mut integrity = Integrity { notes: figures.notes.clone(), ..Integrity::default() };
        if let Some(ram) = &figures.ram {
            integrity.ram_equal = Some(ram.units.is_empty());
            if !ram.units.is_empty() {
                integrity.notes.push(format!("RAM differs in pages {}", ram.named()));
            }
        }
        if figures.outcome == Outcome::Completed && strategy == DiskStrategy::Shared {
            integrity.notes.push("the disk is shared: there is no copy to compare".into());
        }
        MoveReport {
            vm: self.vm.name.clone(),
            from: self.from.clone(),
            to: self.to.clone(),
            strategy: strategy.to_string(),
            outcome: figures.outcome,
            why: figures.why.clone(),
            // A host that has blocks of a VM cannot be left yet.
            total_s: since_began(
                figures.resumed.filter(|_| strategy != DiskStrategy::Postcopy).unwrap_or(figures.ended),
            ),
            ended_s: Some(since_began(figures.ended)),
            downtime_ms: pause.map(|p| p.saturating_sub(figures.held).as_secs_f64() * 1e3),
            held_ms: figures.held.as_secs_f64() * 1e3,
            outage_ms: None,
            bytes,
            counted: figures.counted,
            precached_bytes: figures.kept.disk,
            raw_bytes: figures.page_bytes + figures.disk_bytes + figures.disk_in_stream.unwrap_or(0),
            zero_pages: figures.zero_pages,
            kept: figures.kept,
            nonzero_share: figures.nonzero_share,
            rounds: figures.rounds.clone(),
            phases: figures.phases.clone(),
            predicted: figures.predicted.clone(),
            incidents: figures.incidents.clone(),
            requests: vec![],
            processes: vec![],
            integrity,
            series: Series { memory: figures.memory.clone(), ..Series::default() },
        }
    }

    /// Whether as much crossed the WAN as nothing can compress away, but for what was there from before.
    fn judge_carried(&self, report: &mut MoveReport) {
        let incompressible = self.vm.spec.layout.incompressible;
        let carried = Bytes(report.bytes.disk + report.bytes.memory);
        let kept = Bytes(report.kept.disk);
        let enough = carried + kept >= incompressible;
        let mut found = Integrity { wan_carried_disk: Some(enough), ..Integrity::default() };
        if !enough {
            found.notes.push(format!(
                "the disk holds {incompressible} that nothing can compress, but only {carried} crossed the WAN, and {kept} \
                 is said to have been there"
            ));
        }
        merge(&mut report.integrity, found);
    }

    fn judge_disks(&self, compared: Result<Vec<Difference>>, report: &mut MoveReport) {
        self.judge_carried(report);
        let mut found = Integrity::default();
        match compared {
            Ok(differences) => {
                found.disk_ok = Some(differences.iter().all(|d| d.units.is_empty()));
                let wrong = differences.iter().enumerate().filter(|(_, d)| !d.units.is_empty());
                found
                    .notes
                    .extend(wrong.map(|(disk, d)| format!("disk {disk} differs in 64 KiB granules {}", d.named())));
            }
            Err(e) => found.notes.push(format!("the disks could not be compared: {e:#}")),
        }
        merge(&mut report.integrity, found);
    }
}

fn pairs(old: &[PathBuf], new: &[PathBuf]) -> Result<Vec<Pair>> {
    let open = |path: &PathBuf| File::open(path).with_context(|| format!("cannot open {}", path.display()));
    old.iter().zip(new).map(|(old, new)| Ok(Pair { old: open(old)?, new: open(new)? })).collect()
}
