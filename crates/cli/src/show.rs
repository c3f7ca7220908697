//! What the API answers, for people: tables and lists of facts.

use crate::table::{NOTHING, Table, printable};
use godwit_api::Name;
use godwit_api::host::{Ownership, RunState};
use godwit_api::orphan::JudgedOrphan;
use godwit_api::precache::{Precache, PrecacheFigures};
use godwit_api::progress::{Outcome, PhaseName, Round};
use godwit_api::public::{Component, DryRun, Host, Move, Site, Vm, Volume};
use godwit_api::vm::{ComponentSpec, OnCut};
use godwit_units::Bytes;
use std::fmt::Display;

/// A word of the API's own, such as `hand-off`.
pub fn word(value: &impl serde::Serialize) -> String {
    serde_json::to_value(value).ok().and_then(|v| v.as_str().map(str::to_owned)).unwrap_or_default()
}

fn or_nothing(value: Option<impl Display>) -> String {
    value.map_or_else(|| NOTHING.into(), |v| v.to_string())
}

pub fn sites(sites: &[Site]) -> String {
    let mut table = Table::new(&["NAME"]);
    for site in sites {
        table.row([site.name.to_string()]);
    }
    table.lines()
}

pub fn hosts(hosts: &[Host]) -> String {
    let mut table = Table::new(&["NAME", "SITE", "API", "STATE", "QEMU", "KVM", ">MEMORY FREE", ">DISK FREE"]);
    for host in hosts {
        let facts = host.facts.as_ref();
        table.row([
            host.name.to_string(),
            host.site.to_string(),
            host.api.to_string(),
            if facts.is_some() { "up".into() } else { "unreachable".into() },
            or_nothing(facts.map(|f| &f.qemu)),
            or_nothing(facts.map(|f| if f.kvm { "yes" } else { "no" })),
            or_nothing(facts.map(|f| f.memory_free)),
            or_nothing(facts.map(|f| f.disk_free)),
        ]);
    }
    table.lines()
}

pub fn orphans(orphans: &[JudgedOrphan]) -> String {
    let mut table = Table::new(&["HOST", "ORPHAN", "VM", ">SIZE", "MAY GO", "WHAT", "WHY"]);
    for found in orphans {
        table.row([
            found.host.to_string(),
            found.orphan.id.clone(),
            or_nothing(found.orphan.vm.map(|vm| vm.0)),
            or_nothing(found.orphan.bytes),
            if found.removable { "yes".into() } else { "no".into() },
            found.orphan.what.clone(),
            found.why.clone(),
        ]);
    }
    table.lines()
}

/// Names and values, one a line.
fn facts(pairs: &[(&str, String)]) -> String {
    let width = pairs.iter().map(|(name, _)| name.len()).max().unwrap_or(0) + 1;
    pairs.iter().map(|(name, value)| format!("{:<width$} {}\n", format!("{name}:"), printable(value))).collect()
}

pub fn host(host: &Host) -> String {
    let mut pairs =
        vec![("name", host.name.to_string()), ("site", host.site.to_string()), ("api", host.api.to_string())];
    if let Some(f) = &host.facts {
        pairs.extend([
            ("version", f.version.clone()),
            ("qemu", f.qemu.clone()),
            ("kvm", if f.kvm { "yes".into() } else { "no".into() }),
            ("memory free", f.memory_free.to_string()),
            ("disk free", f.disk_free.to_string()),
            ("underlay", f.underlay.to_string()),
            ("link", format!("control {}, disk {}, memory {}", f.link.control, f.link.disk, f.link.memory)),
            ("machines", f.machines.join(", ")),
        ]);
    }
    if let Some(error) = &host.error {
        pairs.push(("unreachable", error.clone()));
    }
    facts(&pairs)
}

pub fn components(components: &[Component]) -> String {
    let mut table = Table::new(&["NAME", "KIND", "HOST", "BRIDGE"]);
    for component in components {
        let (kind, host, bridge) = match &component.kind {
            ComponentSpec::Switch { bridge } => ("switch", NOTHING.to_owned(), bridge),
            ComponentSpec::Gateway { host, bridge, .. } => ("gateway", host.to_string(), bridge),
        };
        table.row([component.name.to_string(), kind.into(), host, bridge.clone()]);
    }
    table.lines()
}

/// What a VM does, in a word or a few.
fn doing(vm: &Vm) -> String {
    match (vm.ownership, vm.run) {
        (Some(Ownership::WaitsForPeer), _) => "waits for its peer".into(),
        (
            _,
            Some(run @ (RunState::Off | RunState::Running | RunState::Paused | RunState::Incoming | RunState::Silent)),
        ) => word(&run),
        (_, None) => "unknown".into(),
    }
}

pub fn vms(vms: &[Vm]) -> String {
    let mut table = Table::new(&["NAME", "HOST", "SITE", "STATE", ">VCPUS", ">MEMORY", ">DISKS", ">MOVE"]);
    for vm in vms {
        table.row([
            vm.name.to_string(),
            vm.host.to_string(),
            vm.site.to_string(),
            doing(vm),
            vm.spec.vcpus.to_string(),
            vm.spec.memory.to_string(),
            vm.spec.disks.iter().map(|d| d.size).sum::<Bytes>().to_string(),
            or_nothing(vm.mv.map(|m| m.0)),
        ]);
    }
    table.lines()
}

pub fn vm(vm: &Vm) -> String {
    let mut pairs = vec![
        ("name", vm.name.to_string()),
        ("number", vm.id.0.to_string()),
        ("host", format!("{} ({})", vm.host, vm.site)),
        ("state", doing(vm)),
        (
            "owner",
            format!(
                "{}, lineage {}, generation {}",
                vm.ownership.as_ref().map_or_else(|| "unknown".into(), word),
                vm.lineage.0,
                vm.generation.0
            ),
        ),
        ("machine", format!("{}, {}, {}", vm.spec.machine, vm.spec.cpu, word(&vm.spec.accel))),
        ("vcpus", format!("{} of at most {}", vm.spec.vcpus, vm.spec.max_vcpus.max(vm.spec.vcpus))),
        ("memory", vm.spec.memory.to_string()),
    ];
    if vm.spec.on_cut == OnCut::Wait {
        pairs.push(("on a cut", "it runs on, and what waits in it for a block that is elsewhere waits".into()));
    }
    pairs.extend(vm.spec.disks.iter().map(|d| ("disk", format!("{} {}", d.volume, d.size))));
    pairs.extend(vm.spec.nics.iter().map(|n| {
        let ips: String = n.ips.iter().map(|ip| format!(" {ip}")).collect();
        let on = n.component.as_ref().map_or_else(String::new, |component| format!(" on {component}"));
        ("nic", format!("{}{on}{ips}", n.mac))
    }));
    if let Some(mv) = vm.mv {
        pairs.push(("move", mv.0.to_string()));
    }
    if vm.absent.0 > 0 {
        let holders: Vec<&str> = vm.holders.iter().map(Name::as_str).collect();
        pairs.push(("follows", format!("{} of its disks, from {}: needed until then", vm.absent, holders.join(", "))));
    }
    facts(&pairs)
}

pub fn volumes(volumes: &[Volume]) -> String {
    let mut table = Table::new(&[">ID", "NAME", ">SIZE", "VM", "REPLICAS"]);
    for v in volumes {
        let replicas: Vec<String> = v.replicas.iter().map(ToString::to_string).collect();
        table.row([v.id.0.to_string(), v.name.to_string(), v.size.to_string(), v.vm.to_string(), replicas.join(", ")]);
    }
    table.lines()
}

pub fn precaches(all: &[Precache]) -> String {
    let mut table =
        Table::new(&["VOLUME", "SITE", "HOST", "STATE", ">LAG", ">BACKLOG", "EPOCH", "IMAGE", ">RATE", ">LIMIT"]);
    for p in all {
        let none = PrecacheFigures::default();
        let f = p.figures.as_ref().unwrap_or(&none);
        let known = |text: String| if p.figures.is_some() { text } else { NOTHING.to_owned() };
        table.row([
            p.volume.to_string(),
            p.site.to_string(),
            p.to.to_string(),
            p.figures.as_ref().map_or("unknown", |f| f.state.as_str()).to_owned(),
            f.lag_s.map_or_else(|| NOTHING.to_owned(), |lag| format!("{lag:.1} s")),
            known(f.backlog.to_string()),
            f.epoch.clone().unwrap_or_else(|| NOTHING.to_owned()),
            if f.image { "yes" } else { NOTHING }.to_owned(),
            known(f.rate.to_string()),
            p.limit.map_or_else(|| NOTHING.to_owned(), |limit| limit.to_string()),
        ]);
    }
    let mut out = table.lines();
    for (p, error) in all.iter().filter_map(|p| Some((p, p.figures.as_ref()?.error.as_ref()?))) {
        out.push_str(&printable(&format!("{} at {}: {error}", p.volume, p.to)));
        out.push('\n');
    }
    out
}

/// What has to be known of an image where its VM has more disks than the one.
pub fn moments(precache: &Precache, volumes: &[Volume]) -> Option<String> {
    let disks = volumes.iter().filter(|volume| volume.vm == precache.vm).count();
    (precache.consistent && disks > 1).then(|| {
        format!(
            "`{}` has {disks} disks; their images are of one moment if each of them is pre-cached with --consistent at the same host",
            precache.vm
        )
    })
}

/// What is in the way of a move.
pub fn dry_run(dry: &DryRun) -> String {
    if dry.blockers.is_empty() {
        return format!("{} can be moved from {} to {}\n", dry.vm, dry.from, dry.to);
    }
    let mut out = format!("{} cannot be moved from {} to {}:\n", dry.vm, dry.from, dry.to);
    for b in &dry.blockers {
        out += &format!("  {} ({}): {}; {}\n", b.host, printable(&b.kind), printable(&b.message), printable(&b.remedy));
    }
    out
}

/// How a phase is called in a sentence.
pub fn phase(name: PhaseName) -> &'static str {
    match name {
        PhaseName::Reserve => "reserve",
        PhaseName::CopyDisk => "copy disk",
        PhaseName::Memory => "memory",
        PhaseName::Stop => "stop",
        PhaseName::HandOff => "hand-off",
        PhaseName::Drain => "drain",
        PhaseName::Release => "release",
        PhaseName::Fill => "fill",
    }
}

/// Seconds from the order to the end of the last phase, if that has ended.
pub fn total_s(mv: &Move) -> Option<f64> {
    let first = mv.progress.phases.first()?.started_unix_us;
    let last = mv.progress.phases.last()?.ended_unix_us?;
    Some(last.saturating_sub(first) as f64 / 1e6)
}

fn seconds(value: Option<f64>) -> String {
    or_nothing(value.map(|s| format!("{s:.1} s")))
}

fn millis(value: Option<f64>) -> String {
    or_nothing(value.map(|ms| format!("{ms:.0} ms")))
}

pub fn moves(moves: &[Move]) -> String {
    let mut table = Table::new(&[">ID", "VM", "FROM", "TO", "OUTCOME", "PHASE", ">TIME", ">PAUSE", ">ON THE WIRE"]);
    for mv in moves {
        let p = &mv.progress;
        table.row([
            mv.id.0.to_string(),
            mv.vm.to_string(),
            mv.from.to_string(),
            mv.to.to_string(),
            if mv.after.is_some() { "waits".into() } else { word(&p.outcome) },
            if mv.after.is_some() { NOTHING } else { phase(p.phase) }.into(),
            seconds(total_s(mv)),
            millis(p.downtime_ms),
            (p.bytes.memory + p.bytes.disk + p.bytes.control).to_string(),
        ]);
    }
    table.lines()
}

/// What zstd's levels were at the ends of rounds.
fn levels(rounds: &[Round]) -> String {
    let mut levels: Vec<_> = rounds.iter().filter_map(|round| Some((round.level?, round.window))).collect();
    levels.dedup();
    let shown = |(level, window): &(i32, Option<Bytes>)| {
        // Below this one it is next to not at all.
        let level = if *level < -1000 { "none".to_owned() } else { level.to_string() };
        window.map_or_else(|| level.clone(), |window| format!("{level} over {window}"))
    };
    let levels: Vec<String> = levels.iter().map(shown).collect();
    if levels.is_empty() { String::new() } else { format!(", packed by zstd's level {}", levels.join(", then ")) }
}

/// A move in full: the summary at its end, too.
pub fn summary(mv: &Move) -> String {
    let p = &mv.progress;
    let wire = p.bytes.memory + p.bytes.disk + p.bytes.control;
    let ratio = match p.raw.0 {
        0 => String::new(),
        raw => format!(" ({:.0} % of the raw {})", 100.0 * p.bytes.memory.0 as f64 / raw as f64, p.raw),
    };
    let mut pairs = vec![
        ("move", format!("{}: {} from {} to {}", mv.id.0, mv.vm, mv.from, mv.to)),
        (
            "outcome",
            mv.after.map_or_else(|| word(&p.outcome), |before| format!("waits for its turn, behind move {}", before.0)),
        ),
        ("time", seconds(total_s(mv))),
        ("pause", millis(p.downtime_ms)),
        ("network proved", millis(p.network_proved_ms)),
        ("on the wire", wire.to_string()),
        ("  memory", format!("{}{ratio}", p.bytes.memory)),
        ("  disk", format!("{} ({} of disks)", p.bytes.disk, mv.disks)),
        ("  control", p.bytes.control.to_string()),
        ("zero pages", p.zero_pages.to_string()),
        ("rounds", format!("{}{}", p.rounds.len(), levels(&p.rounds))),
    ];
    if p.held_memory.0 + p.disk.held.0 > 0 {
        let held = format!("{} of memory, {} of disks: not sent again", p.held_memory, p.disk.held);
        pairs.insert(8, ("was there", held));
    }
    pairs.extend(crate::foretell::against(mv));
    // None has begun of one that waits.
    for part in p.phases.iter().filter(|_| mv.after.is_none()) {
        let took = part.ended_unix_us.map(|end| end.saturating_sub(part.started_unix_us) as f64 / 1e6);
        let text = took.map_or_else(|| "under way".into(), |s| format!("{s:.2} s"));
        pairs.push(("phase", format!("{:<9} {text}", phase(part.name))));
    }
    if let Some(error) = &p.error {
        pairs.push((if p.outcome == Outcome::Running { "waits" } else { "why" }, error.clone()));
    }
    facts(&pairs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_wants_images_of_a_vm_with_several_disks_is_told_when_they_are_of_one_moment() {
        let volume = |name: &str, vm: &str| -> Volume {
            serde_json::from_value(serde_json::json!({"id": 1, "name": name, "size": 1, "vm": vm, "replicas": ["a"]}))
                .unwrap()
        };
        let mut precache: Precache = serde_json::from_value(serde_json::json!({
            "volume": "root", "vm": "web", "from": "a", "to": "b", "site": "west", "limit": null, "interval_ms": 1000,
            "consistent": true, "follow": false, "figures": null
        }))
        .unwrap();
        let mut volumes = vec![volume("root", "web"), volume("mail", "post")];
        assert_eq!(moments(&precache, &volumes), None, "the other one is another's");
        volumes.push(volume("data", "web"));
        let told = moments(&precache, &volumes);
        assert!(told.is_some_and(|told| told.contains("`web` has 2 disks")));
        precache.consistent = false;
        assert_eq!(moments(&precache, &volumes), None, "there will be no image");
    }

    #[test]
    fn a_move_that_waits_its_turn_is_not_shown_as_one_that_runs() {
        let mut mv: Move = serde_json::from_value(serde_json::json!({
            "id": 2, "vm": "web", "from": "a", "to": "b", "disk": "mirror", "ordered_unix_us": 1, "memory": 1, "disks": 1,
            "progress": {
                "outcome": "running", "phase": "reserve",
                "phases": [{"name": "reserve", "started_unix_us": 1, "ended_unix_us": null}],
                "bytes": {"memory": 0, "disk": 0, "control": 0}, "raw": 0, "zero_pages": 0, "rounds": [],
                "disk": {"total": 0, "copied": 0, "remaining": 0, "synchronous": true},
                "memory_remaining": 0, "dirty_rate": 0, "rate": 0
            },
            "after": 1
        }))
        .unwrap();
        let (listed, shown) = (moves(std::slice::from_ref(&mv)), summary(&mv));
        assert!(listed.contains("waits") && !listed.contains("reserve") && !listed.contains("running"), "{listed}");
        assert!(shown.contains("behind move 1") && !shown.contains("under way"), "{shown}");
        mv.after = None;
        let (listed, shown) = (moves(std::slice::from_ref(&mv)), summary(&mv));
        assert!(listed.contains("running") && listed.contains("reserve"), "{listed}");
        assert!(shown.contains("running") && shown.contains("under way"), "{shown}");
    }

    #[test]
    fn levels_are_told_where_nodes_say_them() {
        let round = |level| Round { level, ..Round::default() };
        assert_eq!(levels(&[round(None)]), "");
        assert_eq!(levels(&[round(Some(1))]), ", packed by zstd's level 1");
        let all = [1, 9, 9, 6].map(|level| round(Some(level)));
        assert_eq!(levels(&all), ", packed by zstd's level 1, then 9, then 6");
        let one = [20, 20, 28].map(|log| Round { window: Some(Bytes(1 << log)), ..round(Some(1)) });
        assert_eq!(levels(&one), ", packed by zstd's level 1 over 1.0 MiB, then 1 over 256.0 MiB");
    }
}
