//! A move by QEMU's own means: what an operator has without Godwit, and what Godwit is measured against.
//!
//! The order is libvirt's, because it is the one that keeps the disk right:
//!
//! ```text
//! reserve   start the destination's QEMU (-S, -incoming), agree on capabilities, export its empty disks by NBD
//! disk      mirror every disk until the mirror has caught up           (not with migrate -b or a shared disk)
//! memory    pre-copy, until the stop rule says that the rest is small
//! stop      the guest stops (pause-before-switchover); the mirrors are ended cleanly; the rest of memory is sent
//! compare   both stand still: RAM is compared                           (the lab's own time, reported apart)
//! run       the destination runs and announces itself
//! release   the source's QEMU quits
//! ```
//!
//! Ending the mirrors while the guest is stopped is part of its pause, and it has to be: a mirror that is cancelled
//! while the guest still writes leaves the last writes behind.
//!
//! The mirror runs in QEMU's `write-blocking` mode (`virsh migrate --copy-storage-synchronous-writes`) at a granularity of
//! 4 KiB: each write of the guest waits until both disks have it. In the default mode a mirror has caught up only at a
//! moment when nothing at all is dirty, and over a WAN such a moment hardly comes: a guest that writes 4 KiB every 8 ms
//! dirties the next block before the last one has made its round trip. In a trial over 200 Mbit/s and 10 ms it took
//! three minutes and four times the disk's bytes to come. Nor does it come in `write-blocking` mode at the default
//! granularity of 64 KiB, because smaller writes leave their granule dirty.
//!
//! Until `run` every failure is undone: the migration is cancelled, the destination is killed, the source goes on.

use crate::disks;
use crate::fabric::{DISK_PORT, Fabric, MEMORY_PORT, Site};
use crate::figures::Figures;
use crate::guest::{Guest, Start};
use crate::progress::Progress;
use crate::report::{MemorySample, Outcome, Round};
use crate::scenario::{Baseline, Damage};
use crate::truth::{self, PAGE};
use anyhow::{Context, Result, bail};
use godwit_qmp::{EventMark, Qmp};
use godwit_units::Bytes;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How often the hypervisor is asked how far it is.
const POLL: Duration = Duration::from_millis(100);
/// Well above every link of the lab, so that the link sets the pace and not QEMU's default of 1 Gbit/s.
const MAX_BANDWIDTH: u64 = 10_000_000_000;
/// QEMU's own default, in ms.
const DOWNTIME_LIMIT_MS: u64 = 300;
/// Makes QEMU stop at the next opportunity: the largest value that it takes, in ms.
const STOP_NOW_MS: u64 = 2_000_000;
/// Bound on the steps that take no more than moments when all is well.
const STEP: Duration = Duration::from_secs(60);

/// When pre-copy ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StopRule {
    /// QEMU: the rest would take at most the downtime limit at the measured bandwidth.
    DowntimeLimit,
    /// Xen: fewer than 50 pages dirty, 29 rounds, or 3 times the RAM sent (Akoush et al., section II.B).
    Xen,
}

/// Xen's figures.
const XEN_FEW_PAGES: u64 = 50;
const XEN_ROUNDS: usize = 29;
const XEN_TIMES_RAM: u64 = 3;

/// What is particular to a baseline.
struct Means {
    rule: StopRule,
    /// Disk within the memory stream.
    block: bool,
    /// Migration capabilities beyond those that all have.
    capabilities: &'static [&'static str],
}

impl Means {
    fn of(kind: Baseline) -> Self {
        let plain = Self { rule: StopRule::DowntimeLimit, block: false, capabilities: &[] };
        match kind {
            Baseline::Qemu => plain,
            Baseline::QemuXen => Self { rule: StopRule::Xen, ..plain },
            Baseline::QemuBlock => Self { block: true, ..plain },
            Baseline::QemuXbzrle => Self { capabilities: &["xbzrle"], ..plain },
            Baseline::QemuMultifdZstd => Self { capabilities: &["multifd"], ..plain },
        }
    }
}

/// The stop rule in words, for the report. After `patience` rounds an operator would lift the downtime limit, and so does the baseline: a
/// move that never ends compares with nothing.
#[must_use]
pub fn stop_rule(kind: Baseline, patience: u32) -> String {
    match Means::of(kind).rule {
        StopRule::DowntimeLimit => format!(
            "QEMU's: stop when the rest takes at most {DOWNTIME_LIMIT_MS} ms at the bandwidth that QEMU measures (downtime-limit), or after {patience} rounds"
        ),
        StopRule::Xen => format!(
            "Xen's, over QMP: stop when fewer than {XEN_FEW_PAGES} pages are dirty, after {XEN_ROUNDS} rounds, or when {XEN_TIMES_RAM} times the RAM was sent"
        ),
    }
}

/// A move's circumstances.
pub struct Order<'a> {
    /// The means.
    pub kind: Baseline,
    /// The sites.
    pub fabric: &'a Fabric,
    /// Where to.
    pub to: &'a Site,
    /// Whether the stopped guest is held to compare its RAM and disks at both ends.
    pub compare: bool,
    /// Which of the VM's QEMUs the destination's will be.
    pub life: u32,
    /// The VM's number, from which its ports follow.
    pub index: usize,
    /// Damage to do on purpose once everything has arrived.
    pub damage: Vec<Damage>,
    /// After this the move is given up.
    pub timeout: Duration,
    /// After so many rounds the guest is stopped whatever is left, where QEMU's own rule has not stopped it.
    pub patience: u32,
    /// Set from outside to give it up.
    pub cancel: &'a AtomicBool,
    /// Who is told how far it is.
    pub progress: &'a Progress,
}

/// What a move by QEMU brought.
pub struct Moved {
    /// The VM's QEMU now; `None` when the VM was lost.
    pub guest: Option<Guest>,
    /// The disks that it had at the source, as they were at the hand-off.
    pub old_disks: Vec<std::path::PathBuf>,
    /// What was measured.
    pub figures: Figures,
}

/// Moves `source`'s guest as `order` says. Whatever happens, the guest runs afterwards at exactly one place, or
/// [`Moved::guest`] is `None` and the figures say why.
pub fn run(order: &Order<'_>, source: Guest) -> Moved {
    let mut figures = Figures::new();
    let old_disks = source.disk_files.clone();
    let mut destination = None;
    let result = attempt(order, &source, &mut destination, &mut figures);
    let guest = match (result, destination) {
        (Ok(()), Some(destination)) => {
            figures.phase("release");
            let site = order.fabric.site(&source.site);
            source.quit(site);
            figures.outcome = Outcome::Completed;
            Some(destination)
        }
        (result, destination) => {
            let why = result.err().unwrap_or_else(|| anyhow::anyhow!("there is no destination"));
            let given_up = is_cancelled(order, &figures);
            let words = destination.as_ref().map(Guest::last_words).unwrap_or_default();
            let undone = undo(&source, destination, order, figures.released);
            figures.outcome = outcome(given_up, undone.is_ok());
            figures.why = Some(match &undone {
                Ok(_) => format!("{why:#}"),
                Err(lost) => format!("{why:#}; and the source does not run either: {lost:#}; {words}"),
            });
            undone.is_ok().then_some(source)
        }
    };
    figures.end_phase(figures.seconds());
    figures.ended = Instant::now();
    Moved { guest, old_disks, figures }
}

/// How a move ended that did not complete: one that loses its VM has failed, whoever gave it up.
fn outcome(given_up: bool, source_runs: bool) -> Outcome {
    if given_up && source_runs { Outcome::Cancelled } else { Outcome::Failed }
}

fn is_cancelled(order: &Order<'_>, figures: &Figures) -> bool {
    order.cancel.load(Ordering::Relaxed) || figures.began.elapsed() > order.timeout
}

fn attempt(order: &Order<'_>, source: &Guest, slot: &mut Option<Guest>, figures: &mut Figures) -> Result<()> {
    let means = Means::of(order.kind);
    let mirrored = !means.block && source.spec.shared.is_none();
    let memory_port = MEMORY_PORT + u16::try_from(order.index)?;
    let disk_port = DISK_PORT + u16::try_from(order.index)?;
    let vm = &source.spec.name;

    figures.began = Instant::now();
    figures.phase("reserve");
    order.progress.phase(vm, "reserve");
    let destination = &*slot.insert(Guest::start(order.to, &source.spec, order.life, Start::Incoming)?);
    for guest in [source, destination] {
        prepare(guest, &means)?;
    }
    let disks = source.spec.disks.len();
    if mirrored {
        let address =
            json!({"type": "inet", "data": {"host": order.to.underlay.to_string(), "port": disk_port.to_string()}});
        destination.qmp("nbd-server-start", json!({"addr": address, "max-connections": 0}))?;
        for disk in 0..disks {
            let export = json!({"type": "nbd", "id": format!("export{disk}"), "node-name": format!("node{disk}"),
                "name": format!("disk{disk}"), "writable": true});
            destination.qmp("block-export-add", export)?;
        }
    }
    let address = format!("tcp:{}:{memory_port}", order.to.underlay);
    destination.qmp("migrate-incoming", json!({"uri": address}))?;

    if mirrored {
        figures.phase("disk");
        order.progress.phase(vm, "disk");
        let mark = source.qmp.mark();
        for disk in 0..disks {
            let target = json!({"driver": "nbd", "node-name": format!("remote{disk}"), "export": format!("disk{disk}"),
                "server": {"type": "inet", "host": order.to.underlay.to_string(), "port": disk_port.to_string()}});
            source.qmp("blockdev-add", target)?;
            source.qmp("blockdev-mirror", json!({"job-id": format!("mirror{disk}"), "device": format!("node{disk}"),
                "target": format!("remote{disk}"), "sync": "full", "copy-mode": "write-blocking", "granularity": 4096, "on-source-error": "report", "on-target-error": "report"}))?;
        }
        wait_mirrors(order, source, mark, disks, figures)?;
    }

    figures.phase("memory");
    order.progress.phase(vm, "memory");
    let mark = source.qmp.mark();
    source.qmp("migrate", json!({"uri": address, "blk": means.block && source.spec.shared.is_none()}))?;
    let stopped = precopy(order, source, mark, &means, figures)?;
    figures.stopped = Some(stopped);
    figures.phase("stop");
    order.progress.phase(vm, "stop");
    if mirrored {
        end_mirrors(order, source, mark, disks)?;
    }
    source.qmp("migrate-continue", json!({"state": "pre-switchover"}))?;
    let deadline = Instant::now() + order.timeout;
    for guest in [source, destination] {
        wait_status(&guest.qmp, deadline, "completed")
            .with_context(|| format!("the stop phase of `{vm}` in {}", guest.site))?;
    }
    close_round(figures, &source.qmp, Instant::now())?;

    figures.phase("compare");
    if order.compare {
        compare(order, source, destination, figures)?;
    } else {
        figures.notes.push("RAM and disks were not compared: the scenario asked for no hold".into());
    }

    figures.phase("run");
    order.progress.phase(vm, "run");
    if mirrored {
        destination.qmp("nbd-server-stop", Value::Null)?;
    }
    let mark = destination.qmp.mark();
    figures.released = true;
    destination.qmp("cont", Value::Null)?;
    let resumed = destination.qmp.wait_event(mark, Instant::now() + STEP, |e| e.name == "RESUME");
    figures.resumed = Some(resumed.context("the destination did not say RESUME")?.at);
    // QEMU's defaults, written out: five announcements, 50 ms apart and then further.
    destination.qmp("announce-self", json!({"initial": 50, "max": 550, "rounds": 5, "step": 50}))?;
    Ok(())
}

/// Capabilities and parameters, the same at both ends.
fn prepare(guest: &Guest, means: &Means) -> Result<()> {
    let mut on = vec!["events", "return-path", "pause-before-switchover"];
    on.extend(means.capabilities);
    let all = ["events", "return-path", "pause-before-switchover", "xbzrle", "multifd"];
    let list: Vec<_> = all.iter().map(|c| json!({"capability": c, "state": on.contains(c)})).collect();
    guest.qmp("migrate-set-capabilities", json!({"capabilities": list}))?;
    let limit = if means.rule == StopRule::Xen { 1 } else { DOWNTIME_LIMIT_MS };
    let mut parameters = json!({"max-bandwidth": MAX_BANDWIDTH, "downtime-limit": limit});
    if means.capabilities.contains(&"xbzrle") {
        // Room for every page: the baseline is not to suffer from a small cache.
        parameters["xbzrle-cache-size"] = guest.spec.memory.0.next_power_of_two().into();
    }
    if means.capabilities.contains(&"multifd") {
        parameters["multifd-channels"] = 2.into();
        parameters["multifd-compression"] = "zstd".into();
        parameters["multifd-zstd-level"] = 1.into();
    }
    guest.qmp("migrate-set-parameters", parameters)?;
    Ok(())
}

fn give_up_if_told(order: &Order<'_>, figures: &Figures) -> Result<()> {
    if order.cancel.load(Ordering::Relaxed) {
        bail!("cancelled on request");
    }
    if figures.began.elapsed() > order.timeout {
        bail!("did not converge within {} s", order.timeout.as_secs());
    }
    Ok(())
}

/// Waits until every mirror has caught up.
fn wait_mirrors(order: &Order<'_>, source: &Guest, mark: EventMark, disks: usize, figures: &mut Figures) -> Result<()> {
    loop {
        give_up_if_told(order, figures)?;
        let events = source.qmp.events_since(mark);
        if let Some(e) = events
            .iter()
            .find(|e| matches!(e.name.as_str(), "BLOCK_JOB_ERROR" | "BLOCK_JOB_COMPLETED" | "BLOCK_JOB_CANCELLED"))
        {
            bail!("a disk mirror ended early: {} {}", e.name, e.data);
        }
        let ready = events.iter().filter(|e| e.name == "BLOCK_JOB_READY").count();
        let jobs = source.qmp("query-block-jobs", Value::Null)?;
        let sum = |key: &str| jobs.as_array().into_iter().flatten().filter_map(|j| j[key].as_u64()).sum::<u64>();
        // Holes and zeroes count too: the mirror looked at them.
        figures.disk_bytes = sum("offset");
        order.progress.amount(&source.spec.name, Bytes(sum("offset")), Some(Bytes(sum("len"))), "");
        if ready == disks {
            return Ok(());
        }
        std::thread::sleep(POLL);
    }
}

/// Ends the mirrors with both sides equal; the guest is stopped.
fn end_mirrors(order: &Order<'_>, source: &Guest, mark: EventMark, disks: usize) -> Result<()> {
    for disk in 0..disks {
        source.qmp("block-job-cancel", json!({"device": format!("mirror{disk}")}))?;
    }
    let deadline = Instant::now() + order.timeout;
    for disk in 0..disks {
        let job = format!("mirror{disk}");
        let ended = source.qmp.wait_event(mark, deadline, |e| {
            e.data["device"] == job.as_str() && matches!(e.name.as_str(), "BLOCK_JOB_COMPLETED" | "BLOCK_JOB_CANCELLED")
        });
        let ended = ended.with_context(|| format!("{job} did not end"))?;
        if ended.name != "BLOCK_JOB_COMPLETED" || ended.data.get("error").is_some() {
            bail!("{job} ended without having caught up: {} {}", ended.name, ended.data);
        }
        source.qmp("blockdev-del", json!({"node-name": format!("remote{disk}")}))?;
    }
    Ok(())
}

/// Holds the stopped guest while its RAM is compared at both ends, and has its writes recorded from then on.
fn compare(order: &Order<'_>, source: &Guest, destination: &Guest, figures: &mut Figures) -> Result<()> {
    let held = Instant::now();
    if order.damage.contains(&Damage::Block) {
        disks::damage(&destination.disk_files[0], &source.spec.layout)?;
    }
    let altered = order.damage.contains(&Damage::Page);
    figures.ram = Some(truth::compare_arrived(&source.ram, &destination.ram, source.spec.memory.0, altered)?);
    disks::begin_record(destination, &destination.disk_nodes())?;
    figures.held = held.elapsed();
    Ok(())
}

/// Watches pre-copy until the guest has stopped and QEMU waits before the switch-over; returns the STOP event's moment.
fn precopy(
    order: &Order<'_>,
    source: &Guest,
    mark: EventMark,
    means: &Means,
    figures: &mut Figures,
) -> Result<Instant> {
    let mut passes = 0;
    let mut told_to_stop = false;
    loop {
        give_up_if_told(order, figures)?;
        let seen = passes;
        let fresh = |e: &godwit_qmp::Event| match e.name.as_str() {
            "MIGRATION_PASS" => e.data["pass"].as_u64().unwrap_or(0) as usize > seen,
            "MIGRATION" => matches!(e.data["status"].as_str(), Some("pre-switchover" | "failed" | "cancelled")),
            _ => false,
        };
        let event = source.qmp.wait_event(mark, Instant::now() + POLL, fresh);
        match event.as_ref().map(|e| (e.name.as_str(), &e.data)) {
            Some(("MIGRATION", data)) if data["status"] == "pre-switchover" => {
                let stop = source.qmp.events_since(mark).into_iter().find(|e| e.name == "STOP");
                return Ok(stop.context("QEMU reached the switch-over without STOP")?.at);
            }
            Some(("MIGRATION", _)) => {
                let said = source.qmp("query-migrate", Value::Null)?;
                bail!("the migration failed: {}", said["error-desc"].as_str().unwrap_or("QEMU does not say why"));
            }
            Some((_, data)) => {
                passes = data["pass"].as_u64().unwrap_or(0) as usize;
                // The first pass only says that the first synchronisation was done.
                if passes > 1 {
                    let at = event.as_ref().map_or_else(Instant::now, |e| e.at);
                    close_round(figures, &source.qmp, at)?;
                }
            }
            None => {}
        }
        let said = source.qmp("query-migrate", Value::Null)?;
        figures.note_disk(&said);
        let Some(ram) = said.get("ram") else { continue };
        let number = |key: &str| ram[key].as_u64().unwrap_or(0);
        figures.memory.push(MemorySample {
            t_s: figures.seconds(),
            remaining: number("remaining"),
            dirty_pages_per_s: ram["dirty-pages-rate"].as_f64().unwrap_or(0.0),
        });
        order.progress.amount(
            &source.spec.name,
            Bytes(number("transferred")),
            None,
            &format!("round {}, {} left", passes.max(1), Bytes(number("remaining"))),
        );
        if !told_to_stop
            && is_time_to_stop(means.rule, order.patience, &figures.rounds, number("transferred"), source.spec.memory)
        {
            source.qmp("migrate-set-parameters", json!({"downtime-limit": STOP_NOW_MS}))?;
            told_to_stop = true;
        }
    }
}

/// Whether pre-copy is to be ended from outside. `sent` is in bytes.
fn is_time_to_stop(rule: StopRule, patience: u32, rounds: &[Round], sent: u64, ram: Bytes) -> bool {
    match rule {
        StopRule::DowntimeLimit => rounds.len() >= patience as usize,
        StopRule::Xen => {
            rounds.last().is_some_and(|r| r.dirtied < XEN_FEW_PAGES)
                || rounds.len() >= XEN_ROUNDS
                || sent > XEN_TIMES_RAM * ram.0
        }
    }
}

/// Adds the round that has just ended, as the difference to those before.
fn close_round(figures: &mut Figures, qmp: &Qmp, at: Instant) -> Result<()> {
    let said = qmp.execute("query-migrate", Value::Null)?;
    let ram = &said["ram"];
    let number = |key: &str| ram[key].as_u64().unwrap_or(0);
    let mut total = BTreeMap::from([
        ("page", number("normal-bytes")),
        ("multifd", number("multifd-bytes")),
        ("xbzrle", said["xbzrle-cache"]["bytes"].as_u64().unwrap_or(0)),
    ]);
    let known: u64 = total.values().sum();
    // With multifd the pages count as normal although their bytes travel, compressed, on other connections.
    if total["multifd"] > 0 {
        total.insert("page", 0);
    }
    total.insert("zero and headers", number("transferred").saturating_sub(known.min(number("transferred"))));
    let xbzrle_pages = said["xbzrle-cache"]["pages"].as_u64().unwrap_or(0);
    let pages = number("normal") + number("duplicate") + xbzrle_pages;

    let before = |key: &str| figures.rounds.iter().filter_map(|r| r.bytes_by_encoding.get(key)).sum::<u64>();
    let bytes_by_encoding =
        total.iter().map(|(k, v)| ((*k).to_owned(), v.saturating_sub(before(k)))).filter(|(_, v)| *v > 0).collect();
    let started = figures.phases.iter().find(|p| p.name == "memory").map_or(0.0, |p| p.start_s);
    let spent: f64 = figures.rounds.iter().map(|r| r.seconds).sum();
    let sent_before: u64 = figures.rounds.iter().map(|r| r.sent).sum();
    figures.rounds.push(Round {
        sent: pages.saturating_sub(sent_before),
        dirtied: number("remaining") / PAGE as u64,
        bytes_by_encoding,
        seconds: (at.saturating_duration_since(figures.began).as_secs_f64() - started - spent).max(0.0),
        level: None,
        window: None,
    });
    figures.zero_pages = number("duplicate");
    figures.note_disk(&said);
    figures.page_bytes = pages * PAGE as u64;
    Ok(())
}

fn wait_status(qmp: &Qmp, deadline: Instant, wanted: &str) -> Result<()> {
    loop {
        let said = qmp.execute("query-migrate", Value::Null)?;
        match said["status"].as_str() {
            Some(status) if status == wanted => return Ok(()),
            Some("failed" | "cancelled") => {
                bail!("the migration failed: {}", said["error-desc"].as_str().unwrap_or("QEMU does not say why"))
            }
            _ if Instant::now() > deadline => bail!("the migration does not end: {}", said["status"]),
            _ => std::thread::sleep(Duration::from_millis(2)),
        }
    }
}

/// Ends the attempt so that the source runs. Fails when it does not.
fn undo(source: &Guest, destination: Option<Guest>, order: &Order<'_>, released: bool) -> Result<()> {
    if released {
        bail!("the destination was told to run and is not to be trusted; nothing is started a second time");
    }
    let _ = source.qmp.execute("migrate_cancel", Value::Null);
    for disk in 0..source.spec.disks.len() {
        let _ = source.qmp.execute("block-job-cancel", json!({"device": format!("mirror{disk}"), "force": true}));
    }
    if let Some(destination) = destination {
        let files = destination.disk_files.clone();
        destination.quit(order.to);
        if source.spec.shared.is_none() {
            files.iter().for_each(|f| drop(std::fs::remove_file(f)));
        }
    }
    let deadline = Instant::now() + STEP;
    loop {
        let migrating = source.qmp("query-migrate", Value::Null)?;
        let jobs = source.qmp("query-block-jobs", Value::Null)?;
        let idle = !matches!(
            migrating["status"].as_str(),
            Some("setup" | "active" | "pre-switchover" | "device" | "cancelling")
        );
        if idle && jobs.as_array().is_none_or(Vec::is_empty) {
            break;
        }
        if Instant::now() > deadline {
            bail!("QEMU does not give the migration up: {migrating} {jobs}");
        }
        std::thread::sleep(POLL);
    }
    for disk in 0..source.spec.disks.len() {
        let _ = source.qmp.execute("blockdev-del", json!({"node-name": format!("remote{disk}")}));
    }
    if source.qmp("query-status", Value::Null)?["running"] != true {
        source.qmp("cont", Value::Null)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_move_that_was_given_up_and_lost_its_vm_has_failed() {
        assert_eq!(outcome(true, true), Outcome::Cancelled);
        assert_eq!([outcome(true, false), outcome(false, true)], [Outcome::Failed; 2]);
    }

    fn rounds(dirtied: &[u64]) -> Vec<Round> {
        dirtied.iter().map(|d| Round { dirtied: *d, ..Round::default() }).collect()
    }

    #[test]
    fn xens_rule_stops_at_few_pages_at_29_rounds_and_at_three_times_the_ram() {
        let ram = Bytes::mib(512);
        let stops = |dirtied: &[u64], sent| is_time_to_stop(StopRule::Xen, 1, &rounds(dirtied), sent, ram);
        assert!(!stops(&[], 0));
        assert!(!stops(&[900, 50], 0));
        assert!(stops(&[900, 49], 0));
        assert!(!stops(&[900; 28], 0));
        assert!(stops(&[900; 29], 0));
        assert!(!stops(&[900], 3 * ram.0));
        assert!(stops(&[900], 3 * ram.0 + 1));
    }

    #[test]
    fn a_baseline_that_does_not_converge_is_stopped_when_patience_ends() {
        let stops =
            |patience, n| is_time_to_stop(StopRule::DowntimeLimit, patience, &rounds(&vec![1; n]), u64::MAX, Bytes(1));
        assert!(!stops(30, 29) && stops(30, 30));
        assert!(!stops(6, 5) && stops(6, 6));
        assert!(stop_rule(Baseline::Qemu, 6).ends_with("after 6 rounds"));
    }
}
