//! What must be true in every world, and how a schedule is run, judged and replayed.

use crate::Rules;
use crate::media::{BLOCKS, SECTORS};
use crate::site::Site;
use crate::truth::Wrong;
use crate::world::{Mode, Theme, Told, World};
use godwit_handoff::{Machine, Record, SourceState, Status, Upkeep};
use std::fmt;

/// A broken invariant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Violation {
    /// The VM runs at both sites.
    TwoRun,
    /// Both sites' exports take writes.
    TwoExports,
    /// Both sites' endpoints are active.
    TwoEndpoints,
    /// A guest whose RAM does not know the last acknowledged write goes on writing.
    LostWrite,
    /// A VM runs at a site whose durable record does not allow it to.
    RunsUnlicensed,
    /// The node itself threw away RAM that was needed afterwards.
    RamDropped,
    /// The source is sealed although the destination never had everything.
    SealedTooEarly,
    /// The guest was made to run before its disk and network were open.
    RunsClosed,
    /// A guest finds a block that is not the one written last; or one that a flush had made durable is gone.
    WrongBlock(Wrong),
    /// Two replicas give a block the same stamp and different contents.
    StampLies {
        /// The block.
        block: usize,
        /// The stamp; none says that it was never written.
        stamp: Option<godwit_volume::Stamp>,
        /// What the sectors are at either site.
        contents: [Vec<u64>; 2],
    },
    /// The destination says that it has everything, and has not, or not durably.
    Incomplete,
    /// A replica took a guest's write although its node had closed it, or not opened it yet.
    WroteWhileClosed,
    /// A guest's write waited for the other side for longer than it may, in ticks.
    WriteStalled(u64),
    /// An endpoint that no frame passes is announced.
    AnnouncesNothing,
    /// An announcement does not outrank those before it.
    StaleAnnouncement,
    /// The gateway cannot be led to the owner.
    GatewayAstray,
    /// A replica failed although its medium did not.
    Volume(String),
    /// A mirror failed although neither link nor media did.
    Mirror(String),
    /// The world did not come to rest: nobody runs the VM, or something was left behind.
    NotConverged(String),
}

/// A schedule that broke an invariant.
#[derive(Clone, Debug)]
pub struct Failure {
    /// Replays it.
    pub seed: u64,
    /// What broke.
    pub violation: Violation,
    /// What happened, when traced.
    pub trace: Vec<String>,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for line in &self.trace {
            writeln!(f, "{line}")?;
        }
        write!(f, "{:?}; replay with SEED={}", self.violation, self.seed)
    }
}

/// Runs one schedule.
///
/// # Errors
/// The first violation, without a trace.
pub fn run(seed: u64, rules: impl Into<Rules>) -> Result<u64, Box<Failure>> {
    World::new(seed, rules.into(), Mode::Silent).run().map(|told| told.events)
}

/// Runs one schedule and keeps its story.
///
/// # Errors
/// The first violation, with the trace.
pub fn run_traced(seed: u64, rules: impl Into<Rules>) -> Result<u64, Box<Failure>> {
    World::new(seed, rules.into(), Mode::Traced).run().map(|told| told.events)
}

/// Runs one schedule of a theme.
///
/// # Errors
/// The first violation, without a trace.
pub fn run_about(theme: Theme, seed: u64, rules: impl Into<Rules>) -> Result<Told, Box<Failure>> {
    World::about(theme, seed, rules.into(), Mode::Silent).run()
}

/// Runs one schedule of a theme and keeps its story.
///
/// # Errors
/// The first violation, with the trace.
pub fn run_traced_about(theme: Theme, seed: u64, rules: impl Into<Rules>) -> Result<Told, Box<Failure>> {
    World::about(theme, seed, rules.into(), Mode::Traced).run()
}

/// What must hold at every instant.
///
/// # Errors
/// The first that does not.
pub fn at_every_instant(sites: &[Site; 2]) -> Result<(), Violation> {
    let [a, b] = sites;
    if a.runs() && b.runs() {
        return Err(Violation::TwoRun);
    }
    if a.disk.open && b.disk.open {
        return Err(Violation::TwoExports);
    }
    if a.nic.is_active() && b.nic.is_active() {
        return Err(Violation::TwoEndpoints);
    }
    for site in sites {
        let licensed = matches!(site.ledger.durable, Some(Record::Owned(_) | Record::Draining(_) | Record::Started(_)));
        if site.runs() && !licensed {
            return Err(Violation::RunsUnlicensed);
        }
        if site.nic.announces_nothing() {
            return Err(Violation::AnnouncesNothing);
        }
    }
    Ok(())
}

/// What must hold when everything has come to rest and both sites are there.
///
/// # Errors
/// When it does not.
pub fn at_rest(sites: &[Site; 2]) -> Result<(), Violation> {
    let [a, b] = sites;
    let (owner, other) = if a.runs() { (a, b) } else { (b, a) };
    let story = || {
        let tell = |s: &Site| s.machine.as_ref().map_or_else(|| "nothing".to_owned(), Machine::describe);
        Violation::NotConverged(format!(
            "{} (QEMU {:?}) and {} (QEMU {:?})",
            tell(a),
            a.qemu.state,
            tell(b),
            b.qemu.state
        ))
    };
    let owns = match &owner.machine {
        Some(Machine::Source(s)) => matches!(s.state(), SourceState::Owning { upkeep: Upkeep::Running, .. }),
        _ => false,
    };
    let gone = other.qemu.state == crate::site::QemuState::Dead && !other.disk.open && !other.nic.exists();
    if owner.runs() && owner.disk.open && owner.nic.is_active() && owns && gone { Ok(()) } else { Err(story()) }
}

/// Where both replicas are there and no mirror is between them: the same stamp means the same contents.
///
/// # Errors
/// The first block that is otherwise.
pub fn stamps_tell_the_truth(sites: &[Site; 2]) -> Result<(), Violation> {
    let [a, b] = sites;
    let (Some(one), Some(two)) = (&a.disk.replica, &b.disk.replica) else { return Ok(()) };
    let failed = |error: godwit_volume::VolumeError| Violation::Volume(error.to_string());
    let (ours, theirs) = (a.disk.store.contents(<[u64]>::to_vec), b.disk.store.contents(<[u64]>::to_vec));
    for block in 0..BLOCKS {
        let sectors = block * SECTORS..(block + 1) * SECTORS;
        let (here, there) = (&ours[sectors.clone()], &theirs[sectors]);
        if here == there {
            continue;
        }
        let stamp = one.stamp(block as u64).map_err(failed)?;
        if stamp == two.stamp(block as u64).map_err(failed)? {
            return Err(Violation::StampLies { block, stamp, contents: [here.to_vec(), there.to_vec()] });
        }
    }
    Ok(())
}

/// What must hold when the other site never came back: this one runs the VM, or says what it waits for.
///
/// # Errors
/// When it does not.
pub fn survivor(site: &Site) -> Result<(), Violation> {
    let status = match &site.machine {
        None => Status::NotHere,
        Some(Machine::Source(s)) => s.status(),
        Some(Machine::Destination(d)) => d.status(),
    };
    match (status, site.runs()) {
        (Status::Runs | Status::MemoryLost, true) | (Status::WaitsForPeer | Status::Lends | Status::NotHere, false) => {
            Ok(())
        }
        (status, runs) => Err(Violation::NotConverged(format!("alone, says {status:?}, runs: {runs}"))),
    }
}
