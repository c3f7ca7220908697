//! What is on this host that nobody looks after: found here, judged by the controller, removed when that says so.
//!
//! Of the network a node makes taps, tunnels, the ends of wires at gateways, and the rules about who may send into them; no
//! namespaces, and no veths. All carry its prefix.
//!
//! What can go wrong: what looks like nobody's is somebody's. A VM that is being made or has just come has its folders before
//! it is known; so what is found counts only after it was seen for a while, and is looked for again, under the lock that
//! makes VMs known, before it is removed. A VM that cannot be read has volumes and interfaces that nobody can name; so while one
//! is quarantined, nothing that may be its is called removable.

use crate::node::Node;
use crate::parts::lock;
use crate::precache::Mark;
use anyhow::Context as _;
use godwit_api::host::Ownership;
use godwit_api::orphan::{Orphan, OrphanKind};
use godwit_api::{ApiError, Problem};
use godwit_handoff::{Ledger, Record, VmId};
use godwit_units::{Bytes, Generation, Lineage, VolumeId};
use godwit_wire::{Vni, WireId};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// When each was first seen as nobody's.
#[derive(Debug, Default)]
pub struct FirstSeen(Mutex<HashMap<String, Instant>>);

/// What is on the host, as far as it matters here.
#[derive(Clone, Debug, Default)]
pub struct Found {
    /// VMs that are looked after, and what is theirs.
    pub known: BTreeMap<VmId, Known>,
    /// VMs that cannot be read, and why.
    pub quarantined: BTreeMap<VmId, String>,
    /// Folders for sockets, and whether a QEMU runs on each.
    pub running: BTreeMap<VmId, bool>,
    /// Volumes, and what they take up.
    pub volumes: BTreeMap<u64, Bytes>,
    /// Those of them that are other hosts' pre-caches.
    pub standbys: BTreeMap<u64, Mark>,
    /// Records.
    pub records: BTreeMap<VmId, Record>,
    /// Interfaces of wires: names and numbers.
    pub interfaces: BTreeMap<String, u32>,
    /// The ends of wires at gateways here: names and numbers.
    pub ports: BTreeMap<String, u32>,
    /// The numbers of wires that there are rules for, and no tunnel.
    pub rules: BTreeSet<u32>,
}

/// A VM that is looked after.
#[derive(Clone, Debug, Default)]
pub struct Known {
    /// Its volumes.
    pub volumes: BTreeSet<u64>,
    /// Its wires.
    pub wires: BTreeSet<u32>,
    /// It is another host's, and takes part in no hand-off: by what right it was here last, and what it takes up.
    pub elsewhere: Option<(Lineage, Generation, Bytes)>,
    /// Somebody is to fetch blocks of it from here.
    pub lent: bool,
}

/// By what right a VM is or was here, and whether its record says that the VM may be here still.
fn right(record: Record) -> ((Lineage, Generation), bool) {
    match record {
        Record::Owned(owner) => ((owner.lineage, owner.generation), true),
        Record::Sealed(t) | Record::Prepared(t) | Record::Granted(t) | Record::Draining(t) | Record::Started(t) => {
            ((t.lineage, t.generation), true)
        }
        Record::Staged(t) | Record::Released(t) | Record::Refused(t) | Record::Returned(t) => {
            ((t.lineage, t.generation), false)
        }
        Record::Outranked { lineage, .. } => ((lineage, Generation(0)), false),
    }
}

/// What of it is nobody's.
#[must_use]
pub fn find(found: &Found) -> Vec<Orphan> {
    let looked_after = |vm: VmId| found.known.contains_key(&vm) || found.quarantined.contains_key(&vm);
    let anybodys = found
        .quarantined
        .keys()
        .next()
        .map(|vm| format!("VM {} is quarantined here, and nobody can say whether this is its", vm.0));
    let mut orphans = vec![];
    let mut add = |id: String, kind, vm, what: String, bytes, owner, may_be_truth| {
        orphans.push(Orphan { id, kind, vm, number: None, what, bytes, owner, lent: false, seen_s: 0, may_be_truth });
    };
    for (vm, why) in &found.quarantined {
        let truth = Some("it is a VM of this host that cannot be read".to_owned());
        let owner = found.records.get(vm).map(|record| right(*record).0);
        add(format!("quarantined-{}", vm.0), OrphanKind::Quarantined, Some(*vm), why.clone(), None, owner, truth);
    }
    for vm in found.running.iter().filter(|(vm, runs)| **runs && !looked_after(**vm)).map(|(vm, _)| vm) {
        let record = found.records.get(vm).map(|record| right(*record));
        let truth = match record {
            Some((_, true)) => Some("a record here says that the VM may be this host's".into()),
            _ => None,
        };
        let what = "a QEMU runs, and its VM is not known here".into();
        let owner = record.map(|r| r.0);
        add(format!("qemu-{}", vm.0), OrphanKind::Qemu, Some(*vm), what, None, owner, truth);
    }
    for (volume, mark) in &found.standbys {
        let (what, bytes) = ("a pre-cache of another host's volume".into(), found.volumes.get(volume).copied());
        let owner = Some((mark.lineage, mark.generation));
        add(format!("standby-{volume}"), OrphanKind::Replica, Some(mark.vm), what, bytes, owner, None);
    }
    for (volume, bytes) in found.volumes.iter().filter(|(volume, _)| !found.standbys.contains_key(volume)) {
        if found.known.values().all(|vm| !vm.volumes.contains(volume)) {
            let what = "a volume of no VM that is known here".into();
            add(format!("volume-{volume}"), OrphanKind::Volume, None, what, Some(*bytes), None, anybodys.clone());
        }
    }
    for (name, wire) in &found.interfaces {
        if found.known.values().all(|vm| !vm.wires.contains(wire)) {
            let what = format!("an interface of wire {wire}, which no VM that is known here has");
            add(format!("interface-{name}"), OrphanKind::Interface, None, what, None, None, anybodys.clone());
        }
    }
    for (name, wire) in &found.ports {
        let what = format!("the gateway's end of wire {wire}");
        add(format!("port-{name}"), OrphanKind::Port, None, what, None, None, None);
    }
    for wire in &found.rules {
        if found.known.values().all(|vm| !vm.wires.contains(wire)) {
            let what = format!("rules about who may send into wire {wire}, which has no tunnel here");
            add(format!("rules-{wire}"), OrphanKind::Rules, None, what, None, None, anybodys.clone());
        }
    }
    for (vm, record) in found.records.iter().filter(|(vm, _)| !looked_after(**vm)) {
        let (owner, may_be_here) = right(*record);
        let truth = may_be_here.then(|| "it says that the VM may be this host's".to_owned());
        let what = format!("a record without a VM: {record:?}");
        add(format!("record-{}", vm.0), OrphanKind::Record, Some(*vm), what, None, Some(owner), truth);
    }
    for (vm, known) in &found.known {
        if let Some((lineage, generation, bytes)) = known.elsewhere {
            let what = "replicas of a VM that is another host's; the way back needs less with them".into();
            let owner = Some((lineage, generation));
            add(format!("replica-{}", vm.0), OrphanKind::Replica, Some(*vm), what, Some(bytes), owner, None);
        }
    }
    for orphan in &mut orphans {
        orphan.lent = orphan.vm.and_then(|vm| found.known.get(&vm)).is_some_and(|known| known.lent);
        orphan.number = match orphan.kind {
            OrphanKind::Volume => orphan.id.trim_start_matches("volume-").parse().ok(),
            OrphanKind::Interface => {
                found.interfaces.get(orphan.id.trim_start_matches("interface-")).map(|wire| u64::from(*wire))
            }
            OrphanKind::Port => found.ports.get(orphan.id.trim_start_matches("port-")).map(|wire| u64::from(*wire)),
            OrphanKind::Rules => orphan.id.trim_start_matches("rules-").parse().ok(),
            _ => None,
        };
    }
    orphans
}

fn numbered(folder: &Path) -> Vec<u64> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok);
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

/// The replicas in a folder, and what is left of those whose removal broke off.
fn replicas(folder: &Path) -> BTreeMap<u64, Bytes> {
    let mut found = BTreeMap::new();
    for entry in std::fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok) {
        let name = entry.file_name();
        let volume = name.to_str().and_then(|name| name.parse().ok().or_else(|| crate::store::was_going(name)));
        if let Some(volume) = volume {
            found.entry(volume).or_insert(Bytes(0)).0 += allocated(&entry.path()).0;
        }
    }
    found
}

fn allocated(folder: &Path) -> Bytes {
    use std::os::unix::fs::MetadataExt;
    let files = std::fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok);
    Bytes(files.filter_map(|file| Some(file.metadata().ok()?.blocks() * 512)).sum())
}

impl Node {
    async fn remove_replica(&self, number: &str) -> anyhow::Result<()> {
        let volume = VolumeId(number.parse().context("it has no number")?);
        self.precaches().remove(volume).await
    }

    async fn look_around(&self) -> Result<Found, ApiError> {
        let failed = |e: &dyn std::fmt::Display| ApiError::new(Problem::Failed, e.to_string());
        // Before what is known: what comes to be known in between is not taken for nobody's.
        let config = self.config();
        let mut found = Found {
            quarantined: self.quarantine().all(),
            volumes: replicas(&config.state.join("volumes")),
            ..Found::default()
        };
        let marked = found.volumes.keys().filter_map(|volume| {
            Some((*volume, crate::precache::mark(&config.state.join("volumes").join(volume.to_string()))?))
        });
        found.standbys = marked.collect();
        for vm in numbered(&config.run.join("vms")) {
            let run = config.run.join("vms").join(vm.to_string());
            let runs = tokio::task::spawn_blocking(move || godwit_vmm::is_running(&run)).await;
            found.running.insert(VmId(vm), runs.map_err(|e| failed(&e))?.map_err(|e| failed(&e))?);
        }
        {
            let ledger = self.ledger();
            for vm in ledger.vms().map_err(|e| failed(&e))? {
                // One that cannot be read is its VM's quarantine's business.
                if let Ok(Some(record)) = ledger.load(vm) {
                    found.records.insert(vm, record);
                }
            }
        }
        for link in self.wires().list().await.map_err(crate::node::network)? {
            use godwit_wire::FoundState;
            let wire = match link.state {
                // Between ports: the controller's to disconnect.
                FoundState::Tunnel(wire) if self.wired().has(wire.0) => continue,
                FoundState::Tunnel(wire) => Some(wire.0),
                FoundState::Endpoint(_) => {
                    link.name.strip_prefix(&format!("{}t", crate::spec::PREFIX)).and_then(|n| n.parse().ok())
                }
                FoundState::Port(wire, _) => {
                    found.ports.insert(link.name, wire.0);
                    continue;
                }
                FoundState::Other => None,
            };
            found.interfaces.extend(wire.map(|wire| (link.name, wire)));
        }
        // A wire's number is its tunnel's.
        let rules = self.wires().stale_rules().await.map_err(crate::node::network)?;
        found.rules.extend(rules.into_iter().map(|vni| vni.0));
        for parts in self.vms() {
            let (definition, view) = (parts.definition(), parts.view());
            // The QEMU of one that a claim elsewhere has stands still, and goes with the rest.
            let outranked = matches!(found.records.get(&parts.id), Some(Record::Outranked { .. }));
            let still = parts.qemu().is_none() || outranked;
            let idle = view.ownership == Ownership::Elsewhere && view.ticket.is_none() && still;
            let bytes = Bytes(parts.disks().iter().map(|d| d.allocated().0).sum());
            let known = Known {
                volumes: definition.volumes.iter().map(|v| v.0).collect(),
                wires: definition.wires.iter().map(|w| w.id).collect(),
                elsewhere: idle.then_some((Lineage(view.owner.0), Generation(view.owner.1), bytes)),
                lent: !parts.file().lent.is_empty(),
            };
            found.known.insert(parts.id, known);
        }
        Ok(found)
    }

    /// What is nobody's here.
    ///
    /// # Errors
    /// When the host cannot be looked at.
    pub async fn orphans(&self) -> Result<Vec<Orphan>, ApiError> {
        let mut orphans = find(&self.look_around().await?);
        let mut seen = lock(&self.first_seen().0);
        seen.retain(|id, _| orphans.iter().any(|orphan| &orphan.id == id));
        for orphan in &mut orphans {
            orphan.seen_s = seen.entry(orphan.id.clone()).or_insert_with(Instant::now).elapsed().as_secs();
        }
        Ok(orphans)
    }

    /// Removes one of them.
    ///
    /// # Errors
    /// When it is not nobody's any more, may be the truth, or cannot be removed.
    pub async fn remove_orphan(self: &Arc<Self>, id: &str) -> Result<(), ApiError> {
        let found = self.orphans().await?.into_iter().find(|orphan| orphan.id == id);
        let orphan = found.ok_or_else(|| {
            ApiError::new(Problem::NotFound, format!("{} has no orphan `{id}`", self.name()))
                .remedy("`godwit orphan ls` lists what there is")
        })?;
        if let Some(why) = &orphan.may_be_truth {
            return Err(ApiError::new(Problem::Conflict, format!("`{id}` may be the truth: {why}"))
                .remedy("find out which host has the VM, and resolve that first"));
        }
        tracing::warn!(orphan = id, what = orphan.what, "removed");
        let result = match (orphan.kind, orphan.vm) {
            (OrphanKind::Qemu, Some(vm)) => {
                let run = self.config().run.join("vms").join(vm.0.to_string());
                let ended = tokio::task::spawn_blocking(move || {
                    godwit_vmm::end(&run)?;
                    let _ = std::fs::remove_dir_all(&run);
                    Ok::<_, anyhow::Error>(())
                });
                ended.await.context("ending a QEMU ended in a bug of the node").and_then(|r| r)
            }
            (OrphanKind::Volume, _) => self.remove_replica(id.trim_start_matches("volume-")).await,
            (OrphanKind::Replica, Some(_)) if id.starts_with("standby-") => {
                self.remove_replica(id.trim_start_matches("standby-")).await
            }
            (OrphanKind::Interface, _) => {
                self.wires().discard(id.trim_start_matches("interface-")).await.map_err(Into::into)
            }
            (OrphanKind::Port, _) => match orphan.number.and_then(|wire| u32::try_from(wire).ok()) {
                Some(wire) => self.wires().gateway_detach(WireId(wire)).await.map_err(Into::into),
                None => Err(anyhow::anyhow!("it has no number")),
            },
            (OrphanKind::Rules, _) => match orphan.number.and_then(|vni| u32::try_from(vni).ok()) {
                Some(vni) => self.wires().discard_rules(Vni(vni)).await.map_err(Into::into),
                None => Err(anyhow::anyhow!("they have no number")),
            },
            (OrphanKind::Record, Some(vm)) => self.ledger().forget(vm).map_err(Into::into),
            (OrphanKind::Replica, Some(vm)) => {
                let parts = self.vm(vm).ok_or_else(|| ApiError::new(Problem::NotFound, "it is gone already"))?;
                parts.keeper().ask(crate::actor::Input::MayRemove).await?;
                return self.remove(&parts).await;
            }
            _ => Err(anyhow::anyhow!("nothing can be done about it from here")),
        };
        result.map_err(|e| ApiError::new(Problem::Failed, format!("`{id}`: {e:#}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use godwit_handoff::{MoveId, Owner, Ticket};

    fn ids(found: &Found) -> Vec<(String, bool)> {
        find(found).into_iter().map(|o| (o.id, o.may_be_truth.is_none())).collect()
    }

    fn host() -> Found {
        let known = Known { volumes: [1].into(), wires: [1].into(), ..Known::default() };
        Found {
            known: [(VmId(1), known)].into(),
            running: [(VmId(1), true)].into(),
            volumes: [(1, Bytes(5))].into(),
            records: [(VmId(1), Record::Owned(Owner::first(VmId(1))))].into(),
            interfaces: [("gwt1".into(), 1)].into(),
            ..Found::default()
        }
    }

    #[test]
    fn a_host_in_order_has_no_orphans() {
        assert_eq!(find(&host()), []);
    }

    #[test]
    fn what_belongs_to_no_vm_of_the_host_is_found_each_with_its_name() {
        let mut found = host();
        found.running.extend([(VmId(7), true), (VmId(8), false)]);
        found.volumes.insert(9, Bytes(4096));
        found.interfaces.insert("gwt12".into(), 12);
        found.ports.insert("gw-g00000001".into(), 1);
        found.rules.extend([1, 14]);
        let ticket = Ticket { vm: VmId(7), lineage: Lineage(0), generation: Generation(2), mv: MoveId(1) };
        found.records.insert(VmId(7), Record::Refused(ticket));
        let wanted = ["qemu-7", "volume-9", "interface-gwt12", "port-gw-g00000001", "rules-14", "record-7"];
        assert_eq!(ids(&found), wanted.map(|id| (id.to_owned(), true)));
        let numbers: Vec<_> = find(&found).into_iter().map(|orphan| orphan.number).collect();
        assert_eq!(numbers, [None, Some(9), Some(12), Some(1), Some(14), None]);
    }

    #[test]
    fn a_record_that_may_be_the_truth_protects_itself_and_its_qemu() {
        let ticket = Ticket { vm: VmId(7), lineage: Lineage(0), generation: Generation(2), mv: MoveId(1) };
        for (record, free) in [
            (Record::Owned(Owner::first(VmId(7))), false),
            (Record::Sealed(ticket), false),
            (Record::Granted(ticket), false),
            (Record::Started(ticket), false),
            (Record::Released(ticket), true),
            (Record::Staged(ticket), true),
        ] {
            let mut found = host();
            found.running.insert(VmId(7), true);
            found.records.insert(VmId(7), record);
            assert_eq!(ids(&found), [("qemu-7".to_owned(), free), ("record-7".to_owned(), free)], "{record:?}");
        }
    }

    #[test]
    fn while_a_vm_cannot_be_read_whatever_may_be_its_is_kept() {
        let mut found = host();
        found.quarantined.insert(VmId(3), "vm.json is torn".into());
        found.running.insert(VmId(3), true);
        found.volumes.insert(9, Bytes(4096));
        found.interfaces.insert("gwt12".into(), 12);
        found.rules.insert(12);
        found.records.insert(VmId(3), Record::Owned(Owner::first(VmId(3))));
        assert!(find(&found).iter().all(|orphan| orphan.may_be_truth.is_some()), "{:#?}", find(&found));
        assert_eq!(find(&found).len(), 4, "its own record and QEMU are looked after by being left alone");
    }

    #[test]
    fn a_vm_that_has_moved_on_is_shown_as_a_replica_with_the_right_that_it_had() {
        let mut found = host();
        found.known.get_mut(&VmId(1)).expect("known").elsewhere = Some((Lineage(0), Generation(4), Bytes(77)));
        let orphan = find(&found).remove(0);
        assert_eq!((orphan.id.as_str(), orphan.bytes), ("replica-1", Some(Bytes(77))));
        assert_eq!((orphan.owner, orphan.lent), (Some((Lineage(0), Generation(4))), false));
        found.known.get_mut(&VmId(1)).expect("known").lent = true;
        assert!(find(&found).remove(0).lent);
    }
}
