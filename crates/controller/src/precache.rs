//! Pre-caches: who wants which, and that the nodes know.
//!
//! A record says what is wanted; each node is told all that its volumes' owners are to keep up, every [`REFRESH`](crate::REFRESH) and
//! whenever something of it changes, with capabilities that are signed anew. A node that hears nothing goes on with what it was told
//! last. So nothing here has steps: whatever a crash leaves out, the next round does.
//!
//! A pre-cache follows its volume: after a move the new owner's node keeps it up. Where the VM has moved to the very host
//! that it led to, it is turned around if that was asked for, or has done its work and ends. Where it has come there by a claim or a promotion, it
//! ends, whatever was asked for: the host that has lost the VM may have what was written after the last image, and keeps it until somebody
//! removes it.

use crate::record::{Life, VmRecord};
use crate::rights::Caller;
use crate::state::{Controller, HostRecord, conflict, invalid, missing, ready};
use crate::store::{Change, Kind};
use axum::Json;
use axum::extract::{Extension, Path, State};
use godwit_api::host::PeerHost;
use godwit_api::precache::{
    IMAGE_ROOM, INTERVAL_MS, LEAST_IMAGE_ROOM, LEAST_INTERVAL_MS, MOST_IMAGE_ROOM, Precache, PrecacheFigures,
    PrecacheOrder, StartPrecache, digest, image_room,
};
use godwit_api::public::Volume;
use godwit_api::{ApiError, Name, Problem, done};
use godwit_units::{BitRate, Bytes, Lineage, VolumeId};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::task::JoinSet;

type Answer<T> = Result<Json<T>, ApiError>;
type Shared = State<Arc<Controller>>;

/// How long a node may begin sessions under what it was told last: the controller may be gone for that long.
const VALID: Duration = Duration::from_secs(30 * 24 * 3600);
/// Less would not even carry comparisons.
const LEAST_LIMIT: BitRate = BitRate(100_000);
/// The longest interval between two epochs.
const MOST_INTERVAL_MS: u64 = 3_600_000;
/// Secondaries of one volume: each keeps a set of what it has not been sent.
const MOST: usize = 8;

/// A pre-cache, as it is wanted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PrecacheRecord {
    /// The volume.
    pub volume: VolumeId,
    /// The host that is to hold it, too.
    pub to: Name,
    /// At most so much.
    pub limit: Option<BitRate>,
    /// How often an epoch ends.
    pub interval_ms: u64,
    /// Whether the secondary keeps an image.
    pub consistent: bool,
    /// For an image: what overwritten blocks may take at the volume's host.
    #[serde(default = "image_room")]
    pub image_room: Bytes,
    /// Whether it is turned around after a move to its host.
    pub follow: bool,
    /// It is over; kept until the hosts of the volume have heard so, or one of them would take it up again with the VM.
    #[serde(default)]
    pub ending: bool,
    /// Where that host's node was when it was heard last. None: it was not, and no node was told of this.
    #[serde(default)]
    pub peer: Option<PeerHost>,
    /// The VM's, when it was seen last while it was not at that host.
    #[serde(default = "first")]
    pub lineage: Lineage,
}

/// For records of earlier versions.
const fn first() -> Lineage {
    Lineage::FIRST
}

impl PrecacheRecord {
    fn key(volume: VolumeId, to: &Name) -> String {
        format!("{}:{to}", volume.0)
    }

    fn put(&self) -> Change {
        Change::put(Kind::Precache, Self::key(self.volume, &self.to), self)
    }
}

/// What the nodes said last.
#[derive(Debug, Default)]
pub struct Said {
    figures: Mutex<HashMap<(VolumeId, Name), PrecacheFigures>>,
    /// Where hosts were found, for when they are away.
    peers: Mutex<HashMap<Name, PeerHost>>,
    /// Hosts that were told of some, and have not been told of none since.
    told: Mutex<HashSet<Name>>,
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn all(c: &Controller) -> Result<Vec<PrecacheRecord>, ApiError> {
    let mut all: Vec<PrecacheRecord> = c.store.read_all(Kind::Precache)?;
    all.sort_by(|a, b| (a.volume, &a.to).cmp(&(b.volume, &b.to)));
    Ok(all)
}

pub(crate) fn volume_called(c: &Controller, who: &Caller, name: &Name) -> Result<(Volume, VmRecord), ApiError> {
    let volumes: Vec<Volume> = c.store.read_all(Kind::Volume)?;
    let volume = volumes.into_iter().find(|v| &v.name == name).ok_or_else(|| missing("volume", name))?;
    let seen = |vm: &VmRecord| vm.definition.name == volume.vm && who.sees(vm);
    let vm = c.vm_records()?.into_iter().find(seen).ok_or_else(|| missing("volume", name))?;
    Ok((volume, ready(vm)?))
}

/// Where a host's node is, as it says now or said last.
async fn peer(c: &Controller, host: &HostRecord) -> Result<PeerHost, ApiError> {
    match c.node(host).facts().await {
        Ok(facts) => {
            let peer = PeerHost { name: host.name.clone(), link: facts.link, underlay: facts.underlay };
            lock(&c.precaches.peers).insert(host.name.clone(), peer.clone());
            Ok(peer)
        }
        Err(error) => lock(&c.precaches.peers).get(&host.name).cloned().ok_or(error),
    }
}

/// The host called `to`, or the first of that site that answers and is not where the VM is.
async fn place(c: &Controller, to: &Name, vm: &VmRecord) -> Result<HostRecord, ApiError> {
    let elsewhere = || conflict(format!("`{}` is on `{}` already", vm.definition.name, vm.host));
    if let Some(host) = c.store.read::<HostRecord>(Kind::Host, to)? {
        return if host.name == vm.host { Err(elsewhere().remedy("name another host")) } else { Ok(host) };
    }
    if c.store.get(Kind::Site, to.as_str())?.is_none() {
        return Err(missing("host", to).remedy("name a host or a site: `godwit host ls`, `godwit site ls`"));
    }
    let mut last = elsewhere().remedy("name another site, or add a host to this one");
    for host in c.hosts()?.into_iter().filter(|h| &h.site == to && h.name != vm.host) {
        match peer(c, &host).await {
            Ok(_) => return Ok(host),
            Err(error) => last = error,
        }
    }
    Err(last)
}

pub async fn start(
    State(c): Shared,
    Extension(who): Extension<Caller>,
    Json(wanted): Json<StartPrecache>,
) -> Answer<Precache> {
    if wanted.interval_ms.is_some_and(|ms| !(LEAST_INTERVAL_MS..=MOST_INTERVAL_MS).contains(&ms)) {
        return Err(invalid(format!("interval: {LEAST_INTERVAL_MS} ms to an hour")));
    }
    if wanted.image_room.is_some_and(|room| !(LEAST_IMAGE_ROOM..=MOST_IMAGE_ROOM).contains(&room)) {
        return Err(invalid(format!("image room: {LEAST_IMAGE_ROOM} to {MOST_IMAGE_ROOM}")));
    }
    if wanted.limit.is_some_and(|limit| limit < LEAST_LIMIT) {
        return Err(invalid(format!("limit: at least {LEAST_LIMIT}")));
    }
    if wanted.limit.is_some() && wanted.unlimited {
        return Err(invalid("limit: one is named, and none is wanted"));
    }
    let (volume, vm) = volume_called(&c, &who, &wanted.volume)?;
    let host = place(&c, &wanted.to, &vm).await?;
    let record = {
        let _deciding = c.decide();
        let (mut volume, now) = volume_called(&c, &who, &wanted.volume)?;
        let others = all(&c)?.iter().filter(|p| p.volume == volume.id && p.to != host.name).count();
        if others >= MOST {
            return Err(conflict(format!("`{}` has {MOST} pre-caches already", volume.name))
                .remedy(format!("end one: `godwit volume precache {} --to HOST --stop`", volume.name)));
        }
        let before: Option<PrecacheRecord> =
            c.store.read(Kind::Precache, PrecacheRecord::key(volume.id, &host.name))?;
        let fresh = PrecacheRecord {
            volume: volume.id,
            to: host.name.clone(),
            limit: None,
            interval_ms: INTERVAL_MS,
            consistent: false,
            image_room: IMAGE_ROOM,
            follow: false,
            ending: false,
            peer: before.as_ref().and_then(|before| before.peer.clone()),
            lineage: now.lineage,
        };
        // What is not said stays as it is.
        let known = before.filter(|before| !before.ending).unwrap_or(fresh);
        let record = PrecacheRecord {
            limit: if wanted.unlimited { None } else { wanted.limit.or(known.limit) },
            interval_ms: wanted.interval_ms.unwrap_or(known.interval_ms),
            consistent: wanted.consistent.unwrap_or(known.consistent),
            image_room: wanted.image_room.unwrap_or(known.image_room),
            follow: wanted.follow.unwrap_or(known.follow),
            lineage: now.lineage,
            ..known
        };
        if wanted.image_room.is_some() && !record.consistent {
            return Err(invalid("image room: it is an image's, and none is kept").remedy("keep one: `--consistent`"));
        }
        let mut changes = vec![record.put()];
        if !volume.replicas.contains(&host.name) {
            // Whoever deletes the VM has to find it.
            volume.replicas.push(host.name.clone());
            changes.push(Change::put(Kind::Volume, volume.id.0, &volume));
        }
        c.store.commit(&changes)?;
        record
    };
    tend(&c).await?;
    Ok(Json(shown(&c, &record, &volume, &vm)?))
}

pub async fn stop(
    State(c): Shared,
    Extension(who): Extension<Caller>,
    Path((volume, to)): Path<(Name, Name)>,
) -> Answer<Value> {
    let (volume, _) = volume_called(&c, &who, &volume)?;
    {
        let _deciding = c.decide();
        let hosts = c.hosts()?;
        let of_site = |name: &Name| hosts.iter().any(|h| &h.name == name && h.site == to);
        let ending: Vec<PrecacheRecord> = all(&c)?
            .into_iter()
            .filter(|p| !p.ending && p.volume == volume.id && (p.to == to || of_site(&p.to)))
            .collect();
        if ending.is_empty() {
            return Err(ApiError::new(Problem::NotFound, format!("`{}` is not pre-cached at `{to}`", volume.name))
                .remedy("`godwit volume status` lists what is"));
        }
        let changes: Vec<Change> = ending.into_iter().map(|p| PrecacheRecord { ending: true, ..p }.put()).collect();
        c.store.commit(&changes)?;
    }
    tend(&c).await?;
    Ok(done())
}

/// What was last said of a pre-cache, if there is one.
pub fn figures(c: &Controller, volume: VolumeId, to: &Name) -> Option<PrecacheFigures> {
    lock(&c.precaches.figures).get(&(volume, to.clone())).cloned()
}

/// What was last said of all pre-caches.
pub(crate) fn all_figures(c: &Controller) -> HashMap<(VolumeId, Name), PrecacheFigures> {
    lock(&c.precaches.figures).clone()
}

pub async fn list(State(c): Shared, Extension(who): Extension<Caller>) -> Answer<Vec<Precache>> {
    // What was said at the last round is seconds old; ask.
    tend(&c).await?;
    let volumes: Vec<Volume> = c.store.read_all(Kind::Volume)?;
    let vms: Vec<VmRecord> = c.vm_records()?;
    let mut found = vec![];
    for record in all(&c)?.into_iter().filter(|record| !record.ending) {
        let Some(volume) = volumes.iter().find(|v| v.id == record.volume) else { continue };
        let Some(vm) = vms.iter().find(|vm| vm.definition.name == volume.vm && who.sees(vm)) else { continue };
        found.push(shown(&c, &record, volume, vm)?);
    }
    Ok(Json(found))
}

fn shown(c: &Controller, record: &PrecacheRecord, volume: &Volume, vm: &VmRecord) -> Result<Precache, ApiError> {
    let host: Option<HostRecord> = c.store.read(Kind::Host, &record.to)?;
    Ok(Precache {
        volume: volume.name.clone(),
        vm: volume.vm.clone(),
        from: vm.host.clone(),
        to: record.to.clone(),
        site: host.map_or_else(|| record.to.clone(), |h| h.site),
        limit: record.limit,
        interval_ms: record.interval_ms,
        consistent: record.consistent,
        image_room: record.image_room,
        follow: record.follow,
        figures: lock(&c.precaches.figures).get(&(record.volume, record.to.clone())).cloned(),
    })
}

fn order(
    c: &Controller,
    record: &PrecacheRecord,
    vm: &VmRecord,
    size: Bytes,
    to: PeerHost,
) -> Result<PrecacheOrder, ApiError> {
    let domain = vm.definition.domain.clone();
    let digest = digest(record.volume, size, domain.as_ref());
    let capability = crate::allow::volume(c, vm, record.volume, digest, &vm.host, &to, VALID)?;
    Ok(PrecacheOrder {
        vm: vm.definition.id,
        lineage: vm.lineage,
        generation: vm.generation,
        volume: record.volume,
        to,
        limit: record.limit,
        interval_ms: record.interval_ms,
        consistent: record.consistent,
        image_room: record.image_room,
        domain,
        capability,
    })
}

/// What is kept up, what is to be heard of as over, and where.
#[derive(Default)]
struct Wanted {
    kept: Vec<(PrecacheRecord, Volume, VmRecord)>,
    ending: Vec<(PrecacheRecord, Volume)>,
}

/// Ends what has no volume any more, and turns around what its VM has moved to. A host that had been removed, and is back, holds what is kept
/// there again.
fn settle(c: &Controller) -> Result<Wanted, ApiError> {
    let _deciding = c.decide();
    let records = all(c)?;
    if records.is_empty() {
        return Ok(Wanted::default());
    }
    let mut volumes: BTreeMap<VolumeId, Volume> =
        c.store.read_all::<Volume>(Kind::Volume)?.into_iter().map(|v| (v.id, v)).collect();
    let vms = c.vm_records()?;
    let hosts = c.hosts()?;
    let (mut changes, mut wanted) = (vec![], Wanted::default());
    for mut record in records {
        let vm = volumes.get_mut(&record.volume).and_then(|v| {
            let vm = vms.iter().find(|vm| vm.definition.name == v.vm && vm.life != Life::Deleting)?;
            Some((v, vm))
        });
        let key = PrecacheRecord::key(record.volume, &record.to);
        let Some((volume, vm)) = vm else {
            changes.push(Change::remove(Kind::Precache, key));
            continue;
        };
        if record.to == vm.host && !record.ending {
            let moved = record.lineage == vm.lineage;
            if record.follow && !moved {
                tracing::warn!(volume = %volume.name, at = %vm.host, "its VM was claimed or promoted there: this pre-cache ends, and what the host before has is kept");
            }
            // The host that it has come from is the second holder: the first is the owner.
            match volume.replicas.iter().find(|h| **h != vm.host).filter(|_| record.follow && moved) {
                Some(back) => {
                    changes.push(Change::remove(Kind::Precache, key));
                    (record.to, record.peer) = (back.clone(), None);
                }
                None => record.ending = true,
            }
            changes.push(record.put());
        } else if record.lineage != vm.lineage && !record.ending {
            record.lineage = vm.lineage;
            changes.push(record.put());
        }
        if record.ending {
            wanted.ending.push((record, volume.clone()));
            continue;
        }
        if !volume.replicas.contains(&record.to) && hosts.iter().any(|host| host.name == record.to) {
            volume.replicas.push(record.to.clone());
            changes.push(Change::put(Kind::Volume, volume.id.0, volume));
        }
        wanted.kept.push((record, volume.clone(), vm.clone()));
    }
    if !changes.is_empty() {
        c.store.commit(&changes)?;
    }
    Ok(wanted)
}

/// Tells the nodes of all hosts that hold a volume what they are to keep up, and hears how that stands.
///
/// # Errors
/// The store's.
pub async fn tend(c: &Arc<Controller>) -> Result<(), ApiError> {
    let Wanted { mut kept, ending } = settle(c)?;
    find(c, &mut kept).await?;
    let mut concerned: BTreeSet<Name> = lock(&c.precaches.told).iter().cloned().collect();
    for (volume, vm) in
        kept.iter().map(|(_, v, vm)| (v, Some(vm))).chain(ending.iter().map(|(_, volume)| (volume, None)))
    {
        concerned.extend(volume.replicas.iter().chain(vm.map(|vm| &vm.host)).cloned());
    }
    let mut telling = JoinSet::new();
    for host in c.hosts()?.into_iter().filter(|host| concerned.contains(&host.name)) {
        let theirs: Vec<_> = kept.iter().filter(|(_, _, vm)| vm.host == host.name).cloned().collect();
        let c = Arc::clone(c);
        telling.spawn(async move {
            let heard = tell(&c, &host, theirs).await;
            (host.name, heard)
        });
    }
    let silent: BTreeSet<Name> = telling.join_all().await.into_iter().filter(|(_, ok)| !ok).map(|(h, _)| h).collect();
    let over: Vec<Change> = ending
        .iter()
        .filter(|(_, volume)| volume.replicas.iter().all(|host| !silent.contains(host)))
        .map(|(record, _)| Change::remove(Kind::Precache, PrecacheRecord::key(record.volume, &record.to)))
        .collect();
    if !over.is_empty() {
        let _deciding = c.decide();
        // Wanted again meanwhile, it stays.
        let again = |change: &Change| {
            let Change::Remove(_, key) = change else { return Ok(false) };
            Ok::<_, ApiError>(c.store.read::<PrecacheRecord>(Kind::Precache, key)?.is_some_and(|r| !r.ending))
        };
        let mut still = vec![];
        for change in over {
            if !again(&change)? {
                still.push(change);
            }
        }
        c.store.commit(&still)?;
    }
    lock(&c.precaches.figures).retain(|(volume, to), _| kept.iter().any(|(r, ..)| (r.volume, &r.to) == (*volume, to)));
    Ok(())
}

/// Looks where the hosts are that things are pre-cached at, and remembers it: one that is away keeps nobody from hearing of the others.
async fn find(c: &Arc<Controller>, kept: &mut [(PrecacheRecord, Volume, VmRecord)]) -> Result<(), ApiError> {
    let names: BTreeSet<Name> = kept.iter().map(|(record, ..)| record.to.clone()).collect();
    let mut asking = JoinSet::new();
    for host in c.hosts()?.into_iter().filter(|host| names.contains(&host.name)) {
        let c = Arc::clone(c);
        asking.spawn(async move { peer(&c, &host).await.map(|peer| (host.name, peer)) });
    }
    let heard: HashMap<Name, PeerHost> = asking.join_all().await.into_iter().filter_map(Result::ok).collect();
    let _deciding = c.decide();
    let mut changes = vec![];
    for (record, ..) in kept {
        let Some(peer) = heard.get(&record.to).filter(|peer| record.peer.as_ref() != Some(*peer)) else { continue };
        record.peer = Some(peer.clone());
        let key = PrecacheRecord::key(record.volume, &record.to);
        // As it is by now: it may have been changed, or ended.
        if let Some(mut now) = c.store.read::<PrecacheRecord>(Kind::Precache, &key)? {
            now.peer = Some(peer.clone());
            changes.push(now.put());
        }
    }
    if !changes.is_empty() {
        c.store.commit(&changes)?;
    }
    Ok(())
}

/// Tells one host of all of its; whether it has heard.
async fn tell(c: &Arc<Controller>, host: &HostRecord, theirs: Vec<(PrecacheRecord, Volume, VmRecord)>) -> bool {
    let mut orders = vec![];
    for (record, volume, vm) in &theirs {
        let Some(peer) = record.peer.clone().filter(|_| c.host(&record.to).is_ok()) else {
            tracing::debug!(volume = %volume.name, to = %record.to, "a pre-cache is not ordered before its host was heard");
            continue;
        };
        match order(c, record, vm, volume.size, peer) {
            Ok(order) => orders.push(order),
            // Told without it, the node would end it: better nothing is told.
            Err(error) => {
                tracing::warn!(volume = %volume.name, to = %record.to, %error, "cannot order a pre-cache yet");
                return false;
            }
        }
    }
    match c.node(host).precache(&orders).await {
        Ok(said) => {
            let mut told = lock(&c.precaches.told);
            let _ = if orders.is_empty() { told.remove(&host.name) } else { told.insert(host.name.clone()) };
            drop(told);
            let mut figures = lock(&c.precaches.figures);
            figures.extend(said.into_iter().map(|local| ((local.volume, local.to), local.figures)));
            true
        }
        Err(error) => {
            let mut figures = lock(&c.precaches.figures);
            theirs.iter().for_each(|(r, ..)| drop(figures.remove(&(r.volume, r.to.clone()))));
            if !theirs.is_empty() {
                tracing::debug!(host = %host.name, %error, "a node cannot be told of its pre-caches");
            }
            false
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{controller, local_vm};
    use godwit_api::host::Ownership;
    use godwit_units::Generation;
    use std::net::SocketAddr;

    fn name(text: &str) -> Name {
        text.parse().unwrap()
    }

    /// `web` on `a`, whose volume is pre-cached at `b`, to be turned around when it moves there.
    fn precached() -> (tempfile::TempDir, Arc<Controller>) {
        let (folder, c) = controller();
        let record = PrecacheRecord {
            volume: VolumeId(1),
            to: name("b"),
            limit: None,
            interval_ms: 1000,
            consistent: true,
            image_room: image_room(),
            follow: true,
            ending: false,
            peer: None,
            lineage: Lineage::FIRST,
        };
        c.store.commit(&[record.put()]).unwrap();
        for (host, port) in [("a", 1), ("b", 2), ("c", 3)] {
            let api = SocketAddr::from(([127, 0, 0, 1], port));
            let record = HostRecord { name: name(host), site: name("west"), api };
            c.store.commit(&[Change::put(Kind::Host, host, &record)]).unwrap();
        }
        is_at(&c, 0, &["a", "b"]);
        (folder, c)
    }

    /// `web` is the first holder's now.
    fn is_at(c: &Controller, lineage: u64, holders: &[&str]) {
        let replicas: Vec<Name> = holders.iter().map(|host| name(host)).collect();
        let vm = VmRecord {
            definition: local_vm(Ownership::Here, 1).definition,
            host: replicas[0].clone(),
            lineage: Lineage(lineage),
            generation: Generation::FIRST,
            life: Life::Ready,
            gateways_due: false,
            start_due: false,
            domain: None,
            promoted: None,
        };
        let volume = Volume { id: VolumeId(1), name: name("root"), size: Bytes::mib(1), vm: name("web"), replicas };
        c.store.commit(&[Change::put(Kind::Vm, 1, &vm), Change::put(Kind::Volume, 1, &volume)]).unwrap();
    }

    /// Where a round keeps it up, and where it ends.
    fn round(c: &Controller) -> (Vec<String>, Vec<String>) {
        let wanted = settle(c).unwrap();
        let to = |record: &PrecacheRecord| record.to.to_string();
        (
            wanted.kept.iter().map(|(record, ..)| to(record)).collect(),
            wanted.ending.iter().map(|(record, _)| to(record)).collect(),
        )
    }

    #[test]
    fn a_pre_cache_is_turned_around_after_a_move_and_ends_where_its_vm_has_come_by_a_claim() {
        let only = |host: &str| (vec![host.to_owned()], Vec::<String>::new());
        let (_folder, moved) = precached();
        assert_eq!(round(&moved), only("b"));
        is_at(&moved, 0, &["b", "a"]);
        assert_eq!(round(&moved), only("a"));

        let (_folder, promoted) = precached();
        is_at(&promoted, 1, &["b", "a"]);
        assert_eq!(round(&promoted), (vec![], vec!["b".to_owned()]), "`a` keeps what it wrote after the image");

        // Promoted elsewhere, it has moved on since.
        let (_folder, later) = precached();
        is_at(&later, 1, &["c", "a", "b"]);
        assert_eq!(round(&later), only("b"));
        is_at(&later, 1, &["b", "c", "a"]);
        assert_eq!(round(&later), only("c"));
    }

    #[test]
    fn a_host_that_was_removed_and_is_back_holds_what_is_pre_cached_there_again() {
        let (_folder, c) = precached();
        let holders = || c.store.read::<Volume>(Kind::Volume, 1).unwrap().unwrap().replicas;
        let record: HostRecord = c.host(&name("b")).unwrap();
        is_at(&c, 0, &["a"]);
        c.store.commit(&[Change::remove(Kind::Host, "b")]).unwrap();
        round(&c);
        assert_eq!(holders(), [name("a")], "it is not back yet");
        c.store.commit(&[Change::put(Kind::Host, "b", &record)]).unwrap();
        round(&c);
        assert_eq!(holders(), [name("a"), name("b")]);
    }
}
