//! What was gathered becomes a [`Fleet`], and its plan an [`Evacuation`]. Pure: nobody is asked, and no clock is looked at.
//!
//! Everything that is looked up for a VM is put in order once before: with thousands of VMs and of past moves, a search for each among all
//! would be millions of steps.
//!
//! # What is assumed
//!
//! All moves between two sites share one link, whichever hosts they join. What a move gets of it is what all of them get together. A disk that is
//! held elsewhere in part is held evenly: of a VM with several disks each counts by its size.

use crate::predictions::past::{self, Pair};
use crate::predictions::{goodput, left_of, overhead, packed, rate, wire};
use crate::record::{Life, MoveRecord, Step, VmRecord};
use crate::state::{HostRecord, conflict, invalid};
use godwit_api::evacuation::{
    Activity, Evacuation, EvacuationLink, EvacuationMove, FORMAT, InTime, LeftOut, PlanEvacuation, SilentHost, VERSION,
};
use godwit_api::host::{DiskStrategy, HostFacts, LocalVm, Ownership, QEMU_MEMORY, RunState};
use godwit_api::precache::{PrecacheFigures, PrecacheState};
use godwit_api::predict::PathFacts;
use godwit_api::profile::{Profile, nearest};
use godwit_api::public::Volume;
use godwit_api::{ApiError, Name};
use godwit_predict::Pages;
use godwit_predict::fleet::{Errors, Fleet, FleetHost, FleetLink, FleetVm, Held, Move, Plan, Strategy};
use godwit_predict::whole::{BOOT, Road, queue};
use godwit_units::{Bytes, Policy, Span, VmId, VolumeId};
use std::collections::{HashMap, HashSet};
use std::time::Duration;

const MIB: f64 = (1_u64 << 20) as f64;
const GIB: f64 = (1_u64 << 30) as f64;
/// What a guest writes to its disks where nobody knows, bytes a second.
const WRITES: f64 = 16e3;
/// What is missing of a replica that nothing keeps up, as a part of it: a guess.
const STALE: f64 = 0.05;

/// All that a plan is made of.
pub(super) struct Seen {
    /// The site that is to be left.
    pub site: Name,
    /// The site of each host.
    pub sites: HashMap<Name, Name>,
    /// The hosts that VMs may go to.
    pub to: Vec<HostRecord>,
    /// The VMs that are to leave.
    pub vms: Vec<VmRecord>,
    /// What hosts say of their VMs.
    pub local: HashMap<(Name, VmId), LocalVm>,
    /// And of themselves.
    pub facts: HashMap<Name, HostFacts>,
    /// And of what guests do.
    pub activity: Vec<(Name, Vec<Activity>)>,
    /// The newest first.
    pub moves: Vec<MoveRecord>,
    pub volumes: Vec<Volume>,
    pub precaches: HashMap<(VolumeId, Name), PrecacheFigures>,
    /// By site.
    pub paths: HashMap<Name, PathFacts>,
    pub silent: Vec<SilentHost>,
    pub now_s: u64,
    /// When it begins.
    pub at_unix_s: u64,
}

/// Moves between hosts of two sites, in either direction.
pub(super) fn between<'a>(
    moves: &'a [MoveRecord],
    here: &HashSet<&Name>,
    there: &HashSet<&Name>,
) -> Vec<&'a MoveRecord> {
    let is = |mv: &&MoveRecord| {
        let (from, to) = (&mv.from, &mv.order.to.name);
        (here.contains(from) && there.contains(to)) || (there.contains(from) && here.contains(to))
    };
    moves.iter().filter(is).collect()
}

/// What is looked up for each VM, in order.
struct Index<'a> {
    moves: HashMap<VmId, Vec<&'a MoveRecord>>,
    volumes: HashMap<VolumeId, &'a Volume>,
    /// What it writes, and the profile that tells most.
    activity: HashMap<VmId, (Option<f64>, Option<Profile>)>,
}

impl<'a> Index<'a> {
    fn of(seen: &'a Seen) -> Self {
        let mut moves: HashMap<VmId, Vec<&MoveRecord>> = HashMap::new();
        for mv in &seen.moves {
            moves.entry(mv.order.vm).or_default().push(mv);
        }
        let host_of: HashMap<VmId, &Name> = seen.vms.iter().map(|vm| (vm.definition.id, &vm.host)).collect();
        let mut activity: HashMap<VmId, (Option<f64>, Option<Profile>)> = HashMap::new();
        for (host, told) in &seen.activity {
            for one in told {
                let known = activity.entry(one.vm).or_default();
                if host_of.get(&one.vm) == Some(&host) {
                    known.0 = one.written_per_s;
                }
                known.1 = nearest(known.1.take().into_iter().chain(one.profile.clone()), seen.at_unix_s);
            }
        }
        Self { moves, volumes: seen.volumes.iter().map(|volume| (volume.id, volume)).collect(), activity }
    }

    fn moves_of(&self, vm: VmId) -> &[&'a MoveRecord] {
        self.moves.get(&vm).map(Vec::as_slice).unwrap_or_default()
    }
}

/// A VM of the plan, with what the fleet does not know of it.
struct Known<'a> {
    record: &'a VmRecord,
    fleet: FleetVm,
    model: &'static str,
    shared: bool,
}

/// A link of the plan, with what the fleet does not know of it.
struct Way {
    site: Name,
    goodput: Span,
    by: &'static str,
    rtt_ms: Option<f64>,
    fleet: FleetLink,
}

/// Makes the plan.
///
/// # Errors
/// What the fleet's description makes no sense for.
pub(super) fn plan(seen: Seen, wanted: &PlanEvacuation) -> Result<Evacuation, ApiError> {
    let index = Index::of(&seen);
    let ways = ways(&seen, wanted);
    if ways.is_empty() {
        return Err(conflict("no host outside of the site answers").remedy("`godwit host ls` says why"));
    }
    let copied = past::pair(seen.moves.iter());
    let (mut vms, mut left_out) = (vec![], vec![]);
    for record in &seen.vms {
        match known(&seen, &index, &copied, record, wanted) {
            Ok(vm) => vms.push(vm),
            Err(why) => {
                let (vm, host) = (record.definition.name.clone(), record.host.clone());
                left_out.push(LeftOut { vm, host, why });
            }
        }
    }
    let here: HashSet<&Name> =
        seen.sites.iter().filter(|(_, site)| **site == seen.site).map(|(host, _)| host).collect();
    let past = past::calibration(&seen.moves, copied.moves > 0, None, Policy::default(), |mv| here.contains(&mv.from));
    let fleet = Fleet {
        boot_s: BOOT.likely,
        error: Errors { total: past.total.error(), downtime: past.downtime.error() },
        link: ways.iter().map(|way| way.fleet.clone()).collect(),
        vm: vms.iter().map(|vm| vm.fleet.clone()).collect(),
        ..Fleet::default()
    };
    let planned = fleet.plan(Duration::from_secs_f64(wanted.deadline_s)).map_err(|error| invalid(error.to_string()))?;
    let known = vms.iter().map(|vm| (vm.record.definition.name.as_str(), vm)).collect();
    Ok(told(&seen, &ways, &known, planned, left_out))
}

fn ways(seen: &Seen, wanted: &PlanEvacuation) -> Vec<Way> {
    let here: HashSet<&Name> =
        seen.sites.iter().filter(|(_, site)| **site == seen.site).map(|(host, _)| host).collect();
    let anywhere = past::pair(seen.moves.iter());
    let mut sites: Vec<&Name> = seen.to.iter().map(|host| &host.site).collect();
    sites.sort_unstable();
    sites.dedup();
    let of = |site: &Name| {
        let hosts: Vec<&HostRecord> =
            seen.to.iter().filter(|host| &host.site == site && seen.facts.contains_key(&host.name)).collect();
        if hosts.is_empty() {
            return None;
        }
        let there: HashSet<&Name> = seen.sites.iter().filter(|(_, of)| *of == site).map(|(host, _)| host).collect();
        let links = between(&seen.moves, &here, &there);
        let path = seen.paths.get(site);
        let pair = past::pair(links.iter().copied());
        let (goodput, by) = goodput(&pair, &anywhere, path);
        let most = wanted.limit.map_or(f64::INFINITY, |limit| limit.0 as f64);
        let goodput =
            Span { lower: goodput.lower.min(most), likely: goodput.likely.min(most), upper: goodput.upper.min(most) };
        let (before, pause) = overheads(&pair, &anywhere, rtt(path));
        let rtt = rtt(path);
        let draining = queue(goodput.likely / 8.0, rtt, Duration::ZERO).as_secs_f64();
        let open = links.iter().filter(|mv| mv.step != Step::Ended && here.contains(&mv.from));
        let busy = open.fold(0.0, |busy, mv| busy + left_of(mv) * 8.0 / goodput.likely.max(1.0));
        let host = |host: &&HostRecord| {
            let facts = &seen.facts[&host.name];
            let (memory, disk) = coming(seen, &host.name);
            FleetHost {
                name: host.name.to_string(),
                memory_gib: Some(facts.memory_free.0.saturating_sub(memory) as f64 / GIB),
                disk_gib: Some(facts.disk_free.0.saturating_sub(disk) as f64 / GIB),
                machines: Some(facts.machines.clone()),
            }
        };
        Some(Way {
            site: site.clone(),
            goodput,
            by,
            rtt_ms: path.map(|path| path.rtt_ms),
            fleet: FleetLink {
                rtt_ms: path.map_or(0.0, |path| path.rtt_ms.max(0.0)),
                host: hosts.iter().map(host).collect(),
                rate_lower_mbit: Some(goodput.lower.max(1e3) / 1e6),
                rate_upper_mbit: Some(goodput.upper.max(1e3) / 1e6),
                busy_s: busy,
                pre_s: Some(before),
                pause_ms: Some((pause + draining) * 1e3),
                ..FleetLink::new(site.as_str(), goodput.likely.max(1e3) / 1e6)
            },
        })
    };
    sites.into_iter().filter_map(of).collect()
}

/// Memory and disk that VMs will take of a host that are on their way to it, or wait for their turn. A move's memory counts whole until its guest
/// runs there: what has come of it, the host may count as taken already.
fn coming(seen: &Seen, host: &Name) -> (u64, u64) {
    let open = seen.moves.iter().filter(|mv| mv.step != Step::Ended && !mv.superseded && &mv.order.to.name == host);
    let each = open.map(|mv| {
        let memory = if mv.progress.resumed_unix_us.is_none() { mv.memory.0 + QEMU_MEMORY.0 } else { 0 };
        let begun = mv.progress.disk.total.0 > 0;
        let waiting = || seen.local.get(&(mv.from.clone(), mv.order.vm)).map_or(0, |local| local.allocated.0);
        (memory, if begun { mv.progress.disk.remaining.0 } else { waiting() })
    });
    each.fold((0, 0), |(m, d), (memory, disk)| (m + memory, d + disk))
}

fn rtt(path: Option<&PathFacts>) -> Duration {
    Duration::from_secs_f64(path.map_or(0.03, |path| (path.rtt_ms / 1e3).clamp(0.0, 60.0)))
}

/// What moves take besides their bytes, before and in the pause, in seconds.
fn overheads(pair: &Pair, anywhere: &Pair, rtt: Duration) -> (f64, f64) {
    let (before, pause) = Road::assumed(rtt);
    let seen = |of: fn(&Pair) -> Option<Span>, assumed| overhead(of(pair).or(of(anywhere)), assumed, anywhere.moves);
    (seen(|p| p.before, before).likely, seen(|p| p.pause, pause).likely)
}

/// What a VM is to the fleet; else why it stays.
fn known<'a>(
    seen: &Seen,
    index: &Index<'_>,
    copied: &Pair,
    record: &'a VmRecord,
    wanted: &PlanEvacuation,
) -> Result<Known<'a>, String> {
    let (id, spec) = (record.definition.id, &record.definition.spec);
    if record.life != Life::Ready {
        return Err("it is being made, or taken away".into());
    }
    let own_moves = index.moves_of(id);
    if let Some(open) = own_moves.iter().find(|mv| mv.step != Step::Ended) {
        return Err(format!("it is being moved to `{}` already (move {})", open.order.to.name, open.id().0));
    }
    let Some(local) = seen.local.get(&(record.host.clone(), id)) else {
        return Err(format!("`{}` says nothing of it", record.host));
    };
    if local.ownership != Ownership::Here {
        return Err(format!("`{}` does not own it now: see `godwit vm show {}`", record.host, record.definition.name));
    }
    let off = match local.run {
        RunState::Running => false,
        RunState::Off => true,
        _ => return Err(format!("it neither runs nor is off: see `godwit vm show {}`", record.definition.name)),
    };
    let memory = Pages::of(spec.memory);
    let (written, profile) = index.activity.get(&id).cloned().unwrap_or_default();
    let profile = profile.filter(|profile| Pages::of(profile.memory) == memory);
    let of_vm = past::pages(own_moves.iter().copied(), id);
    let (model, (dirtied, working_set)) = match (&profile, &of_vm) {
        (_, _) if off => ("off", (0.0, memory)),
        (Some(profile), _) => ("profile", (profile.changed_per_s, Pages::of(profile.working_set))),
        (None, Some(_)) => ("moves", rate(memory, of_vm.as_ref())),
        (None, None) => ("assumed", rate(memory, None)),
    };
    // As it went the last time: which link it will take is what the plan is to say.
    let wire =
        packed(wire(profile.as_ref(), of_vm.as_ref()), Policy::default(), past::level(own_moves.iter().copied()));
    let own = spec.disks.iter().filter(|disk| disk.shared().is_none()).count();
    let size: Bytes = spec.disks.iter().filter(|disk| disk.shared().is_none()).map(|disk| disk.size).sum();
    let on_link = copied.disk_wire.map_or(1.0, |span| span.likely).max(1e-3);
    let whole = local.allocated.min(size).0 as f64;
    let written = written.unwrap_or(if off || own == 0 { 0.0 } else { WRITES });
    // For one that runs; of one that is off the fleet knows that it goes cold.
    let mut strategies = if own == 0 { vec![Strategy::Mirror] } else { vec![Strategy::Mirror, Strategy::Postcopy] };
    if wanted.cold {
        strategies.push(Strategy::Cold);
    }
    let fleet = FleetVm {
        disk_gib: whole / GIB,
        // What a copy makes of a disk, past copies have shown.
        disk_bytes_a_byte: Some(on_link),
        room_mib: Some(((spec.memory.0 + QEMU_MEMORY.0) as f64 / MIB).ceil() as u64),
        held: held(seen, index, record, whole, written),
        dirty_pages_per_s: dirtied,
        working_set_mib: Some((working_set.bytes().0 as f64 / MIB).ceil().max(1.0) as u64),
        disk_kib_per_s: written / 1024.0,
        strategies,
        // Options behind a comma are the machine's own.
        machine: spec.machine.split(',').next().map(str::to_owned),
        off,
        first_bytes_a_page: Some(wire.first.bytes),
        again_bytes_a_page: Some(wire.again.bytes),
        ..FleetVm::new(record.definition.name.as_str(), (spec.memory.0 as f64 / MIB).ceil().max(1.0) as u64)
    };
    Ok(Known { record, fleet, model, shared: own == 0 && !spec.disks.is_empty() })
}

/// What hosts have of a VM's disks, so many bytes in all, which it writes at a rate.
fn held(seen: &Seen, index: &Index<'_>, record: &VmRecord, whole: f64, written: f64) -> Vec<Held> {
    let volumes: Vec<&Volume> =
        record.definition.volumes.iter().filter_map(|id| index.volumes.get(id).copied()).collect();
    let size: f64 = volumes.iter().map(|volume| volume.size.0 as f64).sum();
    let mut hosts: Vec<&Name> = volumes.iter().flat_map(|volume| &volume.replicas).collect();
    hosts.retain(|host| **host != record.host);
    hosts.sort_unstable();
    hosts.dedup();
    let on = |host: &Name| {
        let moves = index.moves_of(record.definition.id).iter().copied();
        let left = past::left(moves, record.definition.id, host, seen.now_s);
        let of_volume = |volume: &&Volume| {
            let mine = whole * volume.size.0 as f64 / size.max(1.0);
            let figures = seen.precaches.get(&(volume.id, host.clone()));
            let kept = figures.filter(|f| matches!(f.state, PrecacheState::Following | PrecacheState::Copying));
            let missing = match (kept, left) {
                (Some(figures), _) => figures.backlog.0 as f64,
                (None, _) if !volume.replicas.contains(host) => mine,
                // It was whole when the VM left it.
                (None, Some(left)) => written * left.ago_s,
                (None, None) => mine * STALE,
            };
            (mine - missing).max(0.0)
        };
        volumes.iter().map(of_volume).sum::<f64>()
    };
    let found = hosts.into_iter().map(|host| Held { host: host.to_string(), gib: on(host) / GIB });
    found.filter(|held| held.gib > 0.0).collect()
}

fn told(
    seen: &Seen,
    ways: &[Way],
    known: &HashMap<&str, &Known<'_>>,
    planned: Plan,
    mut left_out: Vec<LeftOut>,
) -> Evacuation {
    let between = |likely: f64, [lower, upper]: [f64; 2]| Span::holding(likely, lower, upper);
    for stranded in &planned.stranded {
        let Some(vm) = known.get(stranded.vm.as_str()) else { continue };
        let (name, host) = (vm.record.definition.name.clone(), vm.record.host.clone());
        left_out.push(LeftOut { vm: name, host, why: stranded.why.clone() });
    }
    left_out.sort_by(|a, b| a.vm.cmp(&b.vm));
    let links = ways.iter().zip(&planned.links).map(|(way, link)| EvacuationLink {
        to: way.site.clone(),
        goodput_mbit: Span {
            lower: way.goodput.lower / 1e6,
            likely: way.goodput.likely / 1e6,
            upper: way.goodput.upper / 1e6,
        },
        goodput_by: way.by.into(),
        rtt_ms: way.rtt_ms,
        busy_s: way.fleet.busy_s,
        moves: link.moves,
        at_once: link.at_once,
        bytes: Bytes(link.bytes),
        end_s: between(link.end_s, link.end_between_s),
    });
    Evacuation {
        format: FORMAT.into(),
        version: VERSION,
        site: seen.site.clone(),
        made_unix_s: seen.now_s,
        begins_unix_s: seen.at_unix_s,
        deadline_s: planned.deadline_s,
        vms: seen.vms.len(),
        surely: planned.surely,
        in_time: planned.in_time,
        late: planned.late,
        at_most: planned.at_most,
        end_s: between(planned.end_s, planned.end_between_s),
        bytes: Bytes(planned.bytes),
        links: links.collect(),
        moves: planned.moves.iter().filter_map(|mv| told_move(known, mv)).collect(),
        left_out,
        silent: seen.silent.clone(),
    }
}

/// Names came as text and go as text through the fleet: each is one that was put in.
fn told_move(known: &HashMap<&str, &Known<'_>>, mv: &Move) -> Option<EvacuationMove> {
    let vm = known.get(mv.vm.as_str())?;
    let (strategy, disk) = match mv.strategy {
        Strategy::Mirror if vm.shared => ("shared", Some(DiskStrategy::Shared)),
        Strategy::Mirror => ("mirror", Some(DiskStrategy::Mirror)),
        Strategy::Postcopy => ("postcopy", Some(DiskStrategy::Postcopy)),
        Strategy::Cold => ("cold", None),
    };
    let note = match (mv.strategy, vm.fleet.off) {
        (Strategy::Cold, true) => Some(format!("it is off: `godwit vm start {}` first, and it can be moved", mv.vm)),
        (Strategy::Cold, false) => Some("it is shut down for it, which no single order does yet".into()),
        _ => None,
    };
    Some(EvacuationMove {
        vm: vm.record.definition.name.clone(),
        from: vm.record.host.clone(),
        to: mv.host.as_ref()?.parse().ok()?,
        site: mv.to.parse().ok()?,
        strategy: strategy.into(),
        disk,
        after: mv.after.as_ref().and_then(|name| name.parse().ok()),
        start_s: mv.start_s,
        end_s: Span::holding(mv.end_s, mv.end_between_s[0], mv.end_between_s[1]),
        downtime_ms: Span::holding(mv.downtime_ms, mv.downtime_between_ms[0], mv.downtime_between_ms[1]),
        bytes: Bytes(mv.bytes),
        in_time: match (mv.surely, mv.in_time) {
            (true, _) => InTime::Surely,
            (false, true) => InTime::Likely,
            (false, false) => InTime::Late,
        },
        model: vm.model.into(),
        note,
    })
}

#[cfg(test)]
#[path = "fleet_tests.rs"]
mod tests;
