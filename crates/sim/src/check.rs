//! What must be true in every world, and how a schedule is run, judged and replayed.

use crate::site::Site;
use crate::world::{Mode, World};
use godwit_handoff::{Guards, Machine, Record, SourceState, Status, Upkeep};
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
pub fn run(seed: u64, guards: Guards) -> Result<u64, Box<Failure>> {
    World::new(seed, guards, Mode::Silent).run()
}

/// Runs one schedule and keeps its story.
///
/// # Errors
/// The first violation, with the trace.
pub fn run_traced(seed: u64, guards: Guards) -> Result<u64, Box<Failure>> {
    World::new(seed, guards, Mode::Traced).run()
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
    if a.export_open && b.export_open {
        return Err(Violation::TwoExports);
    }
    if a.endpoint_active && b.endpoint_active {
        return Err(Violation::TwoEndpoints);
    }
    for site in sites {
        let licensed = matches!(site.ledger.durable, Some(Record::Owned(_) | Record::Started(_)));
        if site.runs() && !licensed {
            return Err(Violation::RunsUnlicensed);
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
    let gone = other.seen() == godwit_handoff::Seen::Gone && other.qemu.state == crate::site::QemuState::Dead;
    if owner.runs() && owner.export_open && owner.endpoint_active && owns && gone { Ok(()) } else { Err(story()) }
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
        (Status::Runs, true) | (Status::WaitsForPeer | Status::NotHere, false) => Ok(()),
        (status, runs) => Err(Violation::NotConverged(format!("alone, says {status:?}, runs: {runs}"))),
    }
}
