//! One move of a pass, in a thread of its own: by QEMU or by Godwit; then its report.

use crate::convoy::Convoy;
use crate::disks::{self, Pair};
use crate::fabric::Fabric;
use crate::figures::Figures;
use crate::godwit::hosted::Hosted;
use crate::godwit::journey::{self, Disks};
use crate::guest::Guest;
use crate::guest_io::GuestWatch;
use crate::images::FRESH_RANDOM;
use crate::machine::Machine;
use crate::pass::{Means, Vm, lock};
use crate::processors::Watch;
use crate::progress::Progress;
use crate::qemu_move::{self, Moved};
use crate::report::{Integrity, MoveReport, Outcome, ProcessTime, Series, WanBytes};
use crate::scenario::{Baseline, DiskStrategy};
use crate::steps::merge;
use crate::truth::{self, Difference};
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

/// What a move took, from its order to its end.
struct Took {
    bytes: WanBytes,
    processes: Vec<ProcessTime>,
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
        // Before the order: it takes processors, and is the lab's.
        let nonzero_share = truth::nonzero_share(machine.ram(), self.vm.spec.memory.0).ok();
        let before = self.fabric.counters(&self.from, &self.to).unwrap_or_default();
        let sampler = Sampler::start(self.fabric.clone(), self.from.clone(), self.to.clone(), before);
        let processors = Watch::start(&self.fabric, [&self.from, &self.to]);
        let took = || Took {
            bytes: wan_bytes(&self.fabric.counters(&self.from, &self.to).unwrap_or_default().since(&before)),
            // Without them the move is what it is.
            processes: processors.map_or_else(|_| vec![], Watch::finish),
        };
        let (machine, mut report, began) = match (machine, self.means) {
            (Machine::Qemu(guest), Means::Baseline(kind)) => self.by_qemu(kind, guest, took),
            (Machine::Godwit(vm), _) => self.by_godwit(vm, took),
            (Machine::Qemu(_), Means::Godwit) => unreachable!("a pass by Godwit has only guests of Godwit's"),
        };
        report.nonzero_share = nonzero_share;
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
        took: impl FnOnce() -> Took,
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
        let took = took();
        let strategy = if self.vm.spec.shared.is_some() { DiskStrategy::Shared } else { DiskStrategy::Mirror };
        let mut report = self.report(&figures, took, strategy);
        if let (Outcome::Completed, Some(guest)) = (figures.outcome, &guest)
            && strategy != DiskStrategy::Shared
        {
            // QEMU's own block migration has the disk in memory's stream.
            self.judge_carried(kind != Baseline::QemuBlock, &mut report);
            if self.compare {
                let found = pairs(&old_disks, &guest.disk_files)
                    .and_then(|pairs| disks::compare(guest, self.fabric.site(&self.to), &guest.disk_nodes(), &pairs));
                judge_disks(found, &mut report);
            }
            old_disks.iter().for_each(|file| drop(std::fs::remove_file(file)));
        }
        (guest.map(Machine::Qemu), report, figures.began)
    }

    fn by_godwit(&self, mut vm: Hosted, took: impl FnOnce() -> Took) -> (Option<Machine>, MoveReport, Instant) {
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
        let was_whole = !vm.unfinished;
        let journey::Moved { figures, disks } = journey::run(&order, &mut vm);
        let took = took();
        let mut report = self.report(&figures, took, self.disk);
        if figures.outcome == Outcome::Completed && self.disk != DiskStrategy::Shared {
            // Blocks come from wherever they are, and a node that was killed has forgotten which it did not have to send.
            if was_whole && !vm.unfinished && figures.incidents.is_empty() {
                self.judge_carried(true, &mut report);
            } else {
                let why = "what crossed the WAN for the disk was not judged: it is not all of one path, or the move was disturbed";
                report.integrity.notes.push(why.into());
            }
            match disks {
                Disks::Unknown => {}
                Disks::Compared(found) => judge_disks(Ok(found), &mut report),
                Disks::Recorded(pairs) => {
                    let (monitor, site) = (vm.monitor_in(&self.to), self.fabric.site(&self.to));
                    judge_disks(disks::compare(&monitor, site, &vm.disk_nodes(), &pairs), &mut report);
                }
            }
        }
        (Some(Machine::Godwit(vm)), report, figures.began)
    }

    fn report(&self, figures: &Figures, Took { mut bytes, processes }: Took, strategy: DiskStrategy) -> MoveReport {
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
        let timed_out = figures.outcome == Outcome::Cancelled && !self.cancel.load(Ordering::Relaxed);
        let late = || format!("it had not ended after {} s, its time limit", self.timeout.as_secs());
        if figures.outcome == Outcome::Completed && strategy == DiskStrategy::Shared {
            integrity.notes.push("the disk is shared: there is no copy to compare".into());
        }
        MoveReport {
            vm: self.vm.name.clone(),
            from: self.from.clone(),
            to: self.to.clone(),
            strategy: strategy.to_string(),
            outcome: figures.outcome,
            why: figures.why.clone().or_else(|| timed_out.then(late)),
            timed_out,
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
            nonzero_share: None,
            rounds: figures.rounds.clone(),
            phases: figures.phases.clone(),
            predicted: figures.predicted.clone(),
            incidents: figures.incidents.clone(),
            requests: vec![],
            processes,
            integrity,
            series: Series { memory: figures.memory.clone(), ..Series::default() },
        }
    }

    /// Whether as much crossed the WAN as nothing can compress away, but for what was there from before. `apart`: whether the disk's bytes are known
    /// from memory's.
    fn judge_carried(&self, apart: bool, report: &mut MoveReport) {
        let missing = missing_bytes(report.bytes, Bytes(report.kept.disk), self.vm.spec.layout.incompressible, apart);
        let mut found = Integrity { wan_carried_disk: Some(missing.is_none()), ..Integrity::default() };
        found.notes.extend(missing);
        merge(&mut report.integrity, found);
    }
}

/// Whether less crossed the WAN than the disk holds that nothing can compress, in words: noise, which may be in memory too, and then be named; and what
/// was drawn for this disk, which the guest never reads, so that memory's bytes bring none of it. `kept` was there before.
fn missing_bytes(bytes: WanBytes, kept: Bytes, incompressible: Bytes, apart: bool) -> Option<String> {
    let drawn = (FRESH_RANDOM, Bytes(bytes.disk), " as the disk's");
    let all = (incompressible, Bytes(bytes.disk + bytes.memory), "");
    let (holds, carried, which) =
        [all].into_iter().chain(apart.then_some(drawn)).find(|(holds, carried, _)| *carried + kept < *holds)?;
    Some(format!(
        "the disk holds {holds} that nothing can compress, but only {carried} crossed the WAN{which}, and {kept} is said to have been there"
    ))
}

/// What the replicas' comparison found. One that broke off has failed, but where a hypervisor may have been killed on purpose.
fn judge_disks(compared: Result<Vec<Difference>>, report: &mut MoveReport) {
    let mut found = Integrity::default();
    match compared {
        Ok(differences) => {
            found.disk_ok = Some(differences.iter().all(|d| d.units.is_empty()));
            let wrong = differences.iter().enumerate().filter(|(_, d)| !d.units.is_empty());
            found.notes.extend(wrong.map(|(disk, d)| format!("disk {disk} differs in 64 KiB granules {}", d.named())));
        }
        Err(e) => {
            found.disk_ok = report.incidents.is_empty().then_some(false);
            found.notes.push(format!("the disks could not be compared: {e:#}"));
        }
    }
    merge(&mut report.integrity, found);
}

fn pairs(old: &[PathBuf], new: &[PathBuf]) -> Result<Vec<Pair>> {
    let open = |path: &PathBuf| File::open(path).with_context(|| format!("cannot open {}", path.display()));
    old.iter().zip(new).map(|(old, new)| Ok(Pair { old: open(old)?, new: open(new)? })).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::tests::a_move;

    #[test]
    fn memorys_bytes_do_not_stand_for_the_disks() {
        let missing = |disk_mib: u64, memory_mib: u64, kept_mib: u64, apart: bool| {
            let bytes = WanBytes { disk: disk_mib << 20, memory: memory_mib << 20, ..WanBytes::default() };
            missing_bytes(bytes, Bytes::mib(kept_mib), Bytes::mib(24), apart)
        };
        let said = missing(1, 500, 0, true).unwrap();
        assert!(said.contains("16.0 MiB") && said.contains("as the disk's"), "{said}");
        assert!(missing(1, 500, 14, true).is_some() && missing(1, 500, 15, true).is_none(), "what was there counts");
        assert!(missing(16, 8, 0, true).is_none());
        // What all of it comes to has to be enough as well; and in one stream nothing else can be told.
        assert!(missing(16, 7, 0, true).is_some() && missing(0, 24, 0, false).is_none());
        assert!(missing(0, 23, 0, false).is_some());
    }

    #[test]
    fn a_comparison_that_broke_off_is_not_hidden_by_the_guests_own_check() {
        let judged = |incidents: Vec<String>| {
            let mut report = MoveReport { incidents, integrity: Integrity::default(), ..a_move() };
            judge_disks(Err(anyhow::anyhow!("no qemu-img")), &mut report);
            merge(&mut report.integrity, Integrity { disk_ok: Some(true), ..Integrity::default() });
            (report.integrity.disk_ok, report.integrity.notes.len())
        };
        assert_eq!(judged(vec![]), (Some(false), 1));
        assert_eq!(judged(vec!["at granted: killing the QEMU".into()]), (Some(true), 1));
    }
}
