//! Pre-caches of the volumes of this host at other hosts, and replicas here that are other hosts' pre-caches.
//!
//! The controller tells all that this node is to keep up, as often as it likes; the node writes that down and goes on by itself:
//! after cuts, after its own restarts, after those of the other side, for ever, with a pause between two tries that grows to
//! [`LONGEST_PAUSE`]. Nothing of it runs while its VM is being moved, or is not this host's.
//!
//! # What can go wrong
//!
//! *A move begins.* The mirror and a pre-cache would each tell the other side something else about the epoch of now, so a move ends the
//! volume's sessions under the lock that the guest's writes take ([`Disk::start_mirror`]); what the secondary has is found by the
//! mirror's comparison. At the other side the place that is made for the VM takes the replica over ([`Precaches::release`]).
//!
//! *Somebody was taken over.* The secondary's node takes blocks of a volume from whom the controller's signature names, for the owner
//! that it names, and from no older owner than it has seen; and never where the VM is this host's or about to be.
//!
//! *The secondary is slow, or full.* The session ends with what it says, and is tried again; the guest hears nothing of it.
//!
//! *A VM has several disks.* Those that have an image at one host have images of one moment there: [`crate::moments`].
//!
//! *Many volumes go to one host.* What a path has to spare it has once: all sessions with a host take turns at one pace ([`Precaches::share_to`]). A limit
//! is a session's own, and so is an interval: each has epochs as often as it was ordered to.

use crate::aside::Aside;
use crate::covered::VolumeRight;
use crate::disk::Disk;
use crate::durable::replace;
use crate::failpoint::{Point, reach_async};
use crate::moments::{Common, Moments};
use crate::node::Node;
use crate::parts::{Parts, lock};
use crate::proto::{self, Hello, Request};
use crate::tracker::unix_ms;
use anyhow::{Context, Result, anyhow, bail};
use godwit_api::host::Ownership;
use godwit_api::precache::{LocalPrecache, PrecacheFigures, PrecacheOrder, PrecacheState, digest};
use godwit_api::{ApiError, Name, Problem};
use godwit_link::pace::{Pace, Share};
use godwit_link::{Lane, Priority, SendHalf, Session, Stream};
use godwit_trust::SignedCapability;
use godwit_units::{BitRate, Bytes as Amount, Generation, Lineage, VmId, VolumeId};
use godwit_volume::epoch::{Stands, Subscriber};
use godwit_volume::mirror::MirrorError;
use godwit_volume::precache::{Source, State, Target};
use godwit_volume::{Complete, Journal, Moment, Packer, Replica, Stamp, Unpacker};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

/// The pauses between two tries.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// The longest: what a cut costs when it is over.
pub const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// Between two looks at whether the VM is here and at rest.
const LOOK: Duration = Duration::from_millis(500);
/// Where something has waited for its turn for so long, what was acknowledged meanwhile is what the path carries.
const WAITED: Duration = Duration::from_millis(700);
/// How often a session looks at the clock and at the path while something goes.
const TICK: Duration = Duration::from_millis(50);
/// Where nothing does it looks whether an epoch should end, so many times an interval: each look takes some of a guest's processor.
const LOOKS: u32 = 20;
/// But at least as often as this: it also looks whether it is wanted still.
const IDLE: Duration = Duration::from_millis(500);
/// How much lower than a guest's I/O the priority is of what reads and packs for a secondary. What compares, and counts, is mostly under locks that
/// the guest's writes take, and has theirs.
const NICE: i32 = 10;
/// How often it is counted how much a secondary has not been sent: that takes longer the more it is.
const COUNT: Duration = Duration::from_secs(1);
/// How long the other side may take to make a replica.
const STANDING_BY: Duration = Duration::from_secs(30);
/// How long something that holds a replica may take to let it go.
const LETTING_GO: Duration = Duration::from_secs(20);
/// Runs that are read and packed together at the most, and bytes of messages, about what the longest one has: what is all zeroes says little.
const GATHERED: (usize, usize) = (64, 256 << 10);
/// How long what has come waits for more: nobody waits for a pre-cache, and a thread is not woken for each packet.
const PATIENCE: Duration = Duration::from_millis(5);
/// Lots of messages that are taken from the link ahead of their being worked off.
const AHEAD: usize = 4;
/// How long a disk of which nobody knows yet what its secondary holds is waited for by the others of its VM.
const UNKNOWN: Duration = Duration::from_secs(60);
/// Pre-caches of one node, and replicas of others' that it keeps: what a host can have of volumes.
const MOST: usize = 1024;

const ORDERS: &str = "precaches.json";
const MARK: &str = "standby.json";

/// What a secondary's node has to know.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Standby {
    /// The VM.
    pub vm: VmId,
    /// The volume.
    pub volume: VolumeId,
    /// Its size.
    pub size: Amount,
    /// The owner's lineage.
    pub lineage: Lineage,
    /// The owner's generation.
    pub generation: Generation,
    /// Whether to keep the last complete epoch as an image.
    pub image: bool,
    /// The VM's trust domain.
    #[serde(default)]
    pub domain: Option<Name>,
    /// What shows that the controller has ordered it.
    pub capability: SignedCapability,
}

/// What is remembered beside a replica that is another host's pre-cache.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mark {
    /// The VM.
    pub vm: VmId,
    /// By what right it came here last.
    pub lineage: Lineage,
    /// As the lineage.
    pub generation: Generation,
    /// Whose it is.
    pub from: String,
}

/// The mark of a replica that is another host's pre-cache.
#[must_use]
pub fn mark(volume: &Path) -> Option<Mark> {
    serde_json::from_slice(&std::fs::read(volume.join(MARK)).ok()?).ok()
}

#[derive(Debug)]
struct Sending {
    order: PrecacheOrder,
    since: Instant,
    group: Arc<Group>,
    figures: Arc<Mutex<Told>>,
    over: CancellationToken,
}

/// The volumes whose images at one host are to be of one moment; none, where one is alone.
#[derive(Debug, Default)]
struct Group {
    volumes: Vec<VolumeId>,
    /// One ends their epochs at a time.
    ending: Mutex<()>,
}

/// How a session stands, for whoever asks.
#[derive(Debug, Default)]
struct Told {
    figures: PrecacheFigures,
    /// The epoch that is held ended then; and whether the guest has written since.
    held_unix_ms: Option<u64>,
    behind: bool,
    /// Whether the secondary holds an image; nobody knows before it has said so once.
    has_image: Option<bool>,
    /// The last epoch of which it said that it is one.
    image: Option<Stamp>,
    /// Why the last epoch was given up that was to become an image, as long as none has become one since.
    overwritten: Option<String>,
    /// The session that is there.
    live: Option<Live>,
}

impl Told {
    /// The secondary holds this now, and that is in the way.
    fn holds(&mut self, held: Option<Complete>, waits: Option<String>) {
        let image = held.filter(|h| h.image).map(|h| h.epoch);
        if image.is_some() && image != self.image {
            (self.image, self.figures.given_up, self.overwritten) = (image, 0, None);
        }
        self.held_unix_ms = held.map(|h| h.at_unix_ms);
        self.figures.epoch = held.map(|h| format!("{}.{}", h.epoch.generation.0, h.epoch.epoch.0));
        (self.figures.epoch_unix_ms, self.figures.image) = (self.held_unix_ms, image.is_some());
        self.figures.error = waits.or_else(|| self.overwritten.clone());
    }

    /// A session is over.
    fn ended(&mut self, error: Option<&anyhow::Error>) {
        let why = error.map(|e| format!("{e:#}"));
        let overwritten =
            |e: &anyhow::Error| e.chain().any(|e| matches!(e.downcast_ref(), Some(MirrorError::Overwritten { .. })));
        if error.is_some_and(overwritten) {
            self.figures.given_up += 1;
            self.overwritten.clone_from(&why);
        }
        (self.figures.state, self.figures.rate) = (PrecacheState::Connecting, BitRate(0));
        (self.figures.error, self.behind) = (why, true);
    }
}

/// What ends an epoch has to know of a session.
#[derive(Debug)]
struct Live {
    disk: Weak<Disk>,
    id: Subscriber,
    /// What its epoch under way has in common with other disks'.
    common: Option<Common>,
}

/// Disks whose epochs end together.
#[derive(Debug)]
enum Together {
    /// Those for which it is time.
    Due(Vec<(Arc<Disk>, Subscriber)>),
    /// It is not yet, or somebody is busy.
    NotYet,
    /// The secondary of this one is away.
    Waits(VolumeId),
}

#[derive(Debug)]
struct Receiving {
    vm: VmId,
    from: String,
    image: bool,
    owner: (Lineage, Generation),
    disk: Weak<Disk>,
    /// Holds a replica open of which no VM is known here; the VM's parts do where one is.
    own: Option<Arc<Disk>>,
    over: CancellationToken,
}

/// A node's pre-caches.
#[derive(Debug)]
pub struct Precaches {
    file: PathBuf,
    volumes: PathBuf,
    sockets: PathBuf,
    sending: Mutex<BTreeMap<(VolumeId, Name), Sending>>,
    receiving: Mutex<BTreeMap<VolumeId, Receiving>>,
    /// To which host how fast.
    paces: Mutex<BTreeMap<Name, Pace>>,
    /// One asks at a time: making a replica takes a moment.
    standing_by: tokio::sync::Mutex<()>,
    /// One place is made at a time: a device may be zeroed for hours.
    placing: tokio::sync::Mutex<()>,
    moments: Arc<Moments>,
}

impl Precaches {
    /// None yet; what is written down is found by [`resume`].
    #[must_use]
    pub fn new(state: &Path, run: &Path) -> Self {
        Self {
            file: state.join(ORDERS),
            volumes: state.join("volumes"),
            sockets: run.join("standby"),
            sending: Mutex::default(),
            receiving: Mutex::default(),
            paces: Mutex::default(),
            standing_by: tokio::sync::Mutex::default(),
            placing: tokio::sync::Mutex::default(),
            moments: Arc::new(Moments::new(state)),
        }
    }

    /// What is known here of moments that images have in common.
    pub(crate) const fn moments(&self) -> &Arc<Moments> {
        &self.moments
    }

    /// Has a session's epochs end as they are ordered to; with which others' they do.
    fn as_ordered(&self, order: &PrecacheOrder, disk: &Disk, id: Subscriber) -> Arc<Group> {
        let key = (order.volume, order.to.name.clone());
        let group = lock(&self.sending).get(&key).map(|sending| sending.group.clone()).unwrap_or_default();
        disk.recorder().every(id, Duration::from_millis(order.interval_ms));
        disk.recorder().keeps(id, order.image_room);
        disk.recorder().together(id, !group.volumes.is_empty());
        group
    }

    /// How those volumes stand.
    fn together(&self, group: &Group, host: &Name) -> Together {
        let (mut unknown, mut live) = (None, vec![]);
        {
            let sending = lock(&self.sending);
            for volume in &group.volumes {
                let Some(sending) = sending.get(&(*volume, host.clone())) else { return Together::NotYet };
                let told = lock(&sending.figures);
                match (&told.live, told.has_image) {
                    (Some(session), _) => live.push((session.disk.clone(), session.id)),
                    (None, Some(true)) => return Together::Waits(*volume),
                    (None, None) if sending.since.elapsed() < UNKNOWN => return Together::NotYet,
                    (None, None) => unknown = Some(*volume),
                    (None, Some(false)) => {}
                }
            }
        }
        let (mut ready, mut moments) = (vec![], BTreeMap::new());
        let (mut all_over, mut news) = (true, false);
        // A disk may take its time to answer, and nobody else waits for that.
        for (disk, id) in live {
            let Some(disk) = disk.upgrade() else { return Together::NotYet };
            match disk.recorder().stands(id, disk.began.elapsed()) {
                None | Some(Stands::Busy) => return Together::NotYet,
                Some(Stands::Alone) => {}
                Some(Stands::Ready { over, news: has, moment }) => {
                    (all_over, news) = (all_over && over, news || has);
                    moments.insert(moment.map(|moment| moment.id), moment);
                    ready.push((disk, id));
                }
            }
        }
        // What theirs have in common with others may be with that one's.
        let more = |moment: &Moment| moment.volumes as usize > ready.len();
        if let Some(unknown) = unknown.filter(|_| moments.values().flatten().any(more)) {
            return Together::Waits(unknown);
        }
        // Where nothing was written since, either: so that it can be seen that they are.
        let apart = ready.len() > 1 && (moments.len() > 1 || moments.contains_key(&None));
        if all_over && (news || apart) { Together::Due(ready) } else { Together::NotYet }
    }

    /// Ends the epochs of a VM's disks in one moment, if it is time to, and nobody else does.
    fn end_together(&self, group: &Group, host: &Name) -> Result<()> {
        let Ok(_one) = group.ending.try_lock() else { return Ok(()) };
        let Together::Due(due) = self.together(group, host) else { return Ok(()) };
        let moment = match due.len() {
            1 => None,
            several => {
                let mut id = [0; 8];
                getrandom::fill(&mut id).map_err(|e| anyhow!("the kernel gives no random number: {e}"))?;
                Some(Moment { id: u64::from_le_bytes(id), volumes: u32::try_from(several)? })
            }
        };
        let common = Common { moment, given_up: CancellationToken::new() };
        let of_each = |change: &dyn Fn(&mut Option<Common>)| {
            for (disk, id) in &due {
                if let Some(sending) = lock(&self.sending).get(&(disk.id, host.clone()))
                    && let Some(live) = &mut lock(&sending.figures).live
                    && live.id == *id
                {
                    change(&mut live.common);
                }
            }
        };
        of_each(&|known| *known = Some(common.clone()));
        let ended = Disk::roll_together(&due, moment);
        match &ended {
            Ok(Some(true)) => {}
            // The guest has one of them just now.
            Ok(None) => of_each(&|known| drop(known.take_if(|known| known.moment == moment))),
            // One of them is not there any more, or failed: the others would wait at the secondary.
            Ok(Some(false)) | Err(_) => common.given_up.cancel(),
        }
        ended?;
        Ok(())
    }

    /// For as long as this is held nobody else makes a place for a volume that is to come.
    pub(crate) async fn placing(&self) -> tokio::sync::MutexGuard<'_, ()> {
        self.placing.lock().await
    }

    /// A share of the pace of all that goes to a host.
    fn share_to(&self, host: &Name) -> Share {
        let mut paces = lock(&self.paces);
        // Where nobody has sent for a while, what was learnt of the path is old.
        paces.retain(|_, pace| pace.sharers() > 0);
        paces.entry(host.clone()).or_default().share()
    }

    /// How those from here stand.
    #[must_use]
    pub fn told(&self) -> Vec<LocalPrecache> {
        let now = unix_ms();
        let sending = lock(&self.sending);
        let all = sending.iter().map(|((volume, to), sending)| {
            let told = lock(&sending.figures);
            let mut figures = told.figures.clone();
            #[allow(clippy::cast_precision_loss, reason = "a lag has less than 2^52 milliseconds")]
            let lag = told.held_unix_ms.map(|held| now.saturating_sub(held) as f64 / 1000.0);
            figures.lag_s = if told.behind { lag } else { lag.map(|_| 0.0) };
            LocalPrecache { volume: *volume, to: to.clone(), figures }
        });
        all.collect()
    }

    /// Whether a host has what the disk held a moment ago, or nearly: what it has not makes no hundredth.
    #[must_use]
    pub fn nearly_has(&self, disk: &Disk, host: &Name) -> bool {
        let sending = lock(&self.sending);
        sending.get(&(disk.id, host.clone())).is_some_and(|sending| {
            let told = lock(&sending.figures);
            told.figures.epoch.is_some() && told.figures.backlog.0 <= disk.allocated().0 / 100
        })
    }

    /// Ends what is being received of these volumes, and waits until nothing holds them: a place is about to be made for their VM, or
    /// they are about to go.
    pub async fn release(&self, volumes: &[VolumeId]) {
        let _nobody_else = self.standing_by.lock().await;
        self.release_alone(volumes).await;
    }

    /// Removes a volume's replica, whatever is being received of it: before another session can open that, it has another name.
    ///
    /// # Errors
    /// When it cannot be removed.
    pub async fn remove(&self, volume: VolumeId) -> Result<()> {
        let folder = self.volumes.join(volume.0.to_string());
        let off_the_runtime = async |what: fn(&Path) -> Result<()>| {
            let folder = folder.clone();
            let done = tokio::task::spawn_blocking(move || what(&folder)).await;
            done.context("removing a replica ended in a bug of the node")?
        };
        {
            let _nobody_else = self.standing_by.lock().await;
            self.release_alone(&[volume]).await;
            off_the_runtime(crate::store::put_away).await?;
        }
        off_the_runtime(crate::store::finish).await
    }

    /// The VMs of which a replica here is another host's pre-cache.
    fn marks(&self) -> std::io::Result<BTreeSet<VmId>> {
        let mut vms = BTreeSet::new();
        for folder in std::fs::read_dir(&self.volumes)? {
            match std::fs::read(folder?.path().join(MARK)) {
                Ok(bytes) => drop(vms.insert(serde_json::from_slice::<Mark>(&bytes)?.vm)),
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        Ok(vms)
    }

    async fn release_alone(&self, volumes: &[VolumeId]) {
        for volume in volumes {
            let Some(receiving) = lock(&self.receiving).remove(volume) else { continue };
            receiving.over.cancel();
            let weak = receiving.disk.clone();
            let Some(own) = receiving.own else { continue };
            let began = Instant::now();
            let wait = || began.elapsed() < LETTING_GO;
            while Arc::strong_count(&own) > 1 && wait() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            // What is not settled when it is opened again is doubted, and what is doubted is taken for absent: it would travel once more, and
            // memory could not refer to it.
            if let Err(error) = blocking(&own, |disk| disk.replica().commit()).await {
                tracing::warn!(volume = volume.0, %error, "what a pre-cache brought last could not be settled; it travels again");
            }
            drop(own);
            while weak.strong_count() > 0 && wait() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
    }

    /// The mark of a volume's replica is of no use any more: its VM is known here.
    pub fn unmark(&self, volumes: &[VolumeId]) {
        for volume in volumes {
            let _ = std::fs::remove_file(self.volumes.join(volume.0.to_string()).join(MARK));
        }
    }
}

/// How those from here stand.
#[must_use]
pub fn told(node: &Node) -> Vec<LocalPrecache> {
    node.precaches().told()
}

/// Begins what is written down.
pub fn resume(node: &Arc<Node>) {
    let precaches = node.precaches();
    // Of VMs that are nowhere here any more. What cannot be looked at is left for the next time.
    if let Ok(marks) = precaches.marks() {
        let quarantined = node.quarantine().all();
        let is_here = |vm: &VmId| node.vm(*vm).is_some() || marks.contains(vm) || quarantined.contains_key(vm);
        precaches.moments.of().into_iter().filter(|vm| !is_here(vm)).for_each(|vm| precaches.moments.forget(vm));
    }
    let known = std::fs::read(&node.precaches().file).ok();
    let orders: Vec<PrecacheOrder> = match known.map(|bytes| serde_json::from_slice(&bytes)) {
        Some(Ok(orders)) => orders,
        Some(Err(error)) => {
            tracing::error!(%error, "what is to be pre-cached cannot be read; the controller will tell it again");
            return;
        }
        None => return,
    };
    accept(node, orders);
}

/// What this node is to keep up from now on: all of it.
///
/// # Errors
/// When it cannot be written down, or is too much.
pub fn order(node: &Arc<Node>, orders: Vec<PrecacheOrder>) -> Result<Vec<LocalPrecache>, ApiError> {
    if orders.len() > MOST {
        return Err(ApiError::new(Problem::Invalid, format!("a node keeps up {MOST} pre-caches, not more")));
    }
    let precaches = node.precaches();
    // Capabilities are signed anew each time: what is written down need not be the last one.
    let plain = |order: &PrecacheOrder| PrecacheOrder { capability: orders[0].capability.clone(), ..order.clone() };
    let known: Vec<PrecacheOrder> = lock(&precaches.sending).values().map(|s| s.order.clone()).collect();
    let same = orders.len() == known.len() && orders.iter().all(|o| known.iter().any(|k| plain(k) == plain(o)));
    let old = std::fs::metadata(&precaches.file).and_then(|m| m.modified()).ok();
    let stale = old.and_then(|at| at.elapsed().ok()).is_none_or(|age| age > Duration::from_secs(3600));
    if !same || (stale && !orders.is_empty()) {
        let bytes = serde_json::to_vec_pretty(&orders).map_err(|e| ApiError::new(Problem::Failed, e.to_string()))?;
        replace(&precaches.file, &bytes)
            .map_err(|e| ApiError::new(Problem::Failed, format!("cannot write {}: {e}", precaches.file.display())))?;
    }
    accept(node, orders);
    Ok(precaches.told())
}

fn accept(node: &Arc<Node>, orders: Vec<PrecacheOrder>) {
    let mut sending = lock(&node.precaches().sending);
    let wanted: BTreeMap<(VolumeId, Name), PrecacheOrder> =
        orders.into_iter().map(|o| ((o.volume, o.to.name.clone()), o)).collect();
    sending.retain(|key, known| {
        let kept = wanted.get(key).is_some_and(|o| o.consistent == known.order.consistent);
        if !kept {
            known.over.cancel();
        }
        kept
    });
    for (key, order) in wanted {
        match sending.get_mut(&key) {
            // A limit, an interval, an owner or an address are looked at when they are used.
            Some(known) => known.order = order,
            None => {
                let (figures, over) = (Arc::default(), CancellationToken::new());
                let new = Sending { order, since: Instant::now(), group: Arc::default(), figures, over };
                let (node, figures, over) = (Arc::downgrade(node), new.figures.clone(), new.over.clone());
                sending.insert(key.clone(), new);
                tokio::spawn(async move {
                    tokio::select! {
                        () = keep_up(&node, &key, &figures) => {}
                        () = over.cancelled() => {}
                    }
                });
            }
        }
    }
    let mut volumes = BTreeMap::<(VmId, Name), Vec<VolumeId>>::new();
    for ((volume, host), known) in sending.iter().filter(|(_, known)| known.order.consistent) {
        volumes.entry((known.order.vm, host.clone())).or_default().push(*volume);
    }
    volumes.retain(|_, volumes| volumes.len() > 1);
    let mut groups = BTreeMap::<(VmId, Name), Arc<Group>>::new();
    for ((_, host), known) in sending.iter_mut() {
        let key = (known.order.vm, host.clone());
        let Some(volumes) = volumes.get(&key).filter(|_| known.order.consistent) else {
            known.group = Arc::default();
            continue;
        };
        if known.group.volumes != *volumes {
            let new = || Arc::new(Group { volumes: volumes.clone(), ending: Mutex::default() });
            known.group = groups.entry(key).or_insert_with(new).clone();
        } else {
            groups.entry(key).or_insert_with(|| known.group.clone());
        }
    }
}

fn current(node: &Node, key: &(VolumeId, Name)) -> Option<PrecacheOrder> {
    lock(&node.precaches().sending).get(key).map(|s| s.order.clone())
}

/// The VM of a volume, where it is this host's and nothing happens to it.
fn at_rest(node: &Node, order: &PrecacheOrder) -> Option<(Arc<Parts>, Arc<Disk>)> {
    let parts = node.vm(order.vm)?;
    let moving = parts.moving().is_some_and(|m| !m.tracker.ended() && !m.over.is_cancelled());
    let disk = parts.disks().into_iter().find(|d| d.id == order.volume)?;
    // One that is not whole has nothing to pass on yet.
    let at_rest = !moving && disk.replica().is_primary() && !disk.is_shadow();
    (at_rest && parts.view().ownership == Ownership::Here).then_some((parts, disk))
}

/// One session after the other, for ever.
async fn keep_up(node: &Weak<Node>, key: &(VolumeId, Name), figures: &Arc<Mutex<Told>>) {
    let mut pause = FIRST_PAUSE;
    loop {
        let Some(node) = node.upgrade() else { return };
        let Some(order) = current(&node, key) else { return };
        let Some((parts, disk)) = at_rest(&node, &order) else {
            set(figures, |t| (t.figures.state, t.figures.rate) = (PrecacheState::Waiting, BitRate(0)));
            drop(node);
            tokio::time::sleep(LOOK).await;
            continue;
        };
        let began = Instant::now();
        let result = session(&node, key, &order, &parts, &disk, figures).await;
        let error = result.err();
        if let Some(error) = &error {
            let error = format!("{error:#}");
            tracing::info!(volume = disk.name, to = %key.1, error, "a pre-cache ended; it is begun again");
        }
        set(figures, |t| t.ended(error.as_ref()));
        drop((node, parts, disk));
        // One that has worked for a while has earned a quick return.
        pause = if began.elapsed() > LONGEST_PAUSE { FIRST_PAUSE } else { pause };
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

fn set(figures: &Mutex<Told>, change: impl FnOnce(&mut Told)) {
    change(&mut lock(figures));
}

async fn session(
    node: &Arc<Node>,
    key: &(VolumeId, Name),
    order: &PrecacheOrder,
    parts: &Arc<Parts>,
    disk: &Arc<Disk>,
    figures: &Arc<Mutex<Told>>,
) -> Result<()> {
    set(figures, |t| t.figures.state = PrecacheState::Connecting);
    let link = node.peers().session(&order.to).await.map_err(|e| anyhow!("{e}"))?;
    let (lineage, generation) = parts.view().owner;
    let standby = Standby {
        vm: order.vm,
        volume: order.volume,
        size: disk.size(),
        lineage: Lineage(lineage),
        generation: Generation(generation),
        image: order.consistent,
        domain: order.domain.clone(),
        capability: order.capability.clone(),
    };
    let request = Request::StandBy(Box::new(standby));
    let answer = link.request(proto::encode(&request), STANDING_BY).await?;
    proto::decode::<proto::Answer>(&answer)
        .with_context(|| format!("{} answers what we do not know", key.1))?
        .map_err(|e| anyhow!("{e}"))?;
    let hello = Hello::Precache { volume: order.volume };
    let stream = link.open_stream(Lane::Disk, Priority::Background, proto::encode(&hello)).await?;
    tokio::select! {
        result = send(node, key, disk, &link, stream, order.consistent, figures) => result,
        // Only who began the link connects it anew: had the secondary, and died, nothing would tell so for long.
        never = node.peers().look_after(&order.to, &link) => match never {},
    }
}

/// Ends with the session: nothing is recorded for it any more, and what it had in common with others is given up.
struct Subscription<'a>(&'a Disk, Subscriber, &'a Mutex<Told>);

impl Drop for Subscription<'_> {
    fn drop(&mut self) {
        self.0.recorder().unsubscribe(self.1);
        let common = lock(self.2).live.take().and_then(|live| live.common);
        if let Some(common) = common {
            common.given_up.cancel();
        }
    }
}

async fn send(
    node: &Arc<Node>,
    key: &(VolumeId, Name),
    disk: &Arc<Disk>,
    link: &Session,
    stream: Stream,
    image: bool,
    figures: &Arc<Mutex<Told>>,
) -> Result<()> {
    let id = disk.subscribe(image).context("the VM is being moved")?;
    let _subscription = Subscription(disk, id, figures);
    if let Some(order) = current(node, key) {
        // Before it can be ready for an epoch.
        node.precaches().as_ordered(&order, disk, id);
    }
    set(figures, |t| {
        t.figures.state = PrecacheState::Comparing;
        t.figures.sessions += 1;
        t.live = Some(Live { disk: Arc::downgrade(disk), id, common: None });
    });
    let (mut out, back) = stream.split();
    let (arrived, mut messages) = mpsc::channel(AHEAD);
    let receiving = async {
        crate::disk::hear(back, arrived).await?;
        bail!("the secondary closed the session")
    };
    let aside = Aside::new("precache", NICE)?;
    let driving = async {
        let mut machine = Source::new(id);
        let mut packer = Packer::new()?;
        let mut pace = node.precaches().share_to(&key.1);
        let (mut looked, mut pause) = (tokio::time::Instant::now(), TICK);
        let before = lock(figures).figures.clone();
        // Whether there may be something to send; and what is packed and waits for its turn: a piece at a time, or each message would be
        // a burst, and its own queue a sign of others.
        let (mut eager, mut waiting) = (true, bytes::BytesMut::new());
        // What the secondary has not been sent, as it was counted last: when, and whether it was being compared then.
        let (mut backlog, mut counted) = (Amount(0), None::<(Instant, bool)>);
        let mut carries = Waiting::default();
        loop {
            let several = tokio::select! {
                several = messages.recv() => Some(several.context("the secondary closed the session")?),
                () = tokio::time::sleep_until(looked + pause) => None,
                bytes = pace.turn(waiting.len()), if !waiting.is_empty() => {
                    out.write(waiting.split_to(bytes).freeze()).await?;
                    continue;
                }
                () = std::future::ready(()), if eager && waiting.is_empty() => {
                    // Reading and packing take milliseconds: neither holds up whoever shares the runtime, or the processor.
                    let own = disk.clone();
                    let ready = aside.run(move || {
                        let wire = gather(&mut machine, &mut packer, &own)?;
                        anyhow::Ok((machine, packer, wire))
                    });
                    let wire;
                    (machine, packer, wire) = match ready.await {
                        Ok(ready) => ready?,
                        Err(_) => crate::keeping::fatal("a pre-cache ended in a bug"),
                    };
                    eager = !wire.is_empty();
                    waiting.extend(wire);
                    continue;
                }
            };
            if !disk.recorder().knows(id) {
                bail!("a move has begun");
            }
            if let Some(several) = several {
                // Only a comparison takes long.
                machine = match machine.state() {
                    State::Exchanging => blocking(disk, move |disk| heard(machine, &several, disk)).await?,
                    _ => heard(machine, &several, disk)?,
                };
                eager = machine.may_send(disk.recorder());
                continue;
            }
            looked = tokio::time::Instant::now();
            let Some(order) = current(node, key) else { return Ok(()) };
            if at_rest(node, &order).is_none() {
                bail!("the VM is being moved, or is not this host's any more");
            }
            let path = link.path(Lane::Disk);
            if let Some(path) = path {
                pace.measured(path, order.limit, !waiting.is_empty());
                if let Some(rate) = carries.seen(Instant::now(), path.acknowledged, !waiting.is_empty()) {
                    node.peers().found().carries(key.1.as_str(), rate, crate::processors::clock());
                }
            }
            machine.path_is(pace.allowed(), path.and_then(|path| path.least).unwrap_or_default());
            let group = node.precaches().as_ordered(&order, disk, id);
            disk.roll().await?;
            let stand = node.precaches().together(&group, &key.1);
            if let Together::Due(_) = stand {
                let (node, host) = (node.clone(), key.1.clone());
                blocking(disk, move |_| node.precaches().end_together(&group, &host)).await?;
            }
            let (held, compares) = (machine.held(), machine.state() == State::Exchanging);
            if given_up(figures, held) {
                bail!("an epoch that ended in one moment with another disk's was given up with that");
            }
            let waits = match stand {
                Together::Waits(volume) if volume != key.0 => Some(waits_for(node, order.vm, volume)),
                _ => None,
            };
            let behind = disk.recorder().is_behind(id);
            if !behind {
                (backlog, counted) = (Amount(0), None);
            } else if counted.is_none_or(|(at, compared)| compared != compares || at.elapsed() >= COUNT) {
                backlog = blocking(disk, move |disk| disk.recorder().backlog(id)).await;
                counted = Some((Instant::now(), compares));
            }
            set(figures, |t| {
                t.holds(held, waits);
                let f = &mut t.figures;
                f.state = match (machine.state(), held) {
                    (State::Exchanging, _) => PrecacheState::Comparing,
                    (_, None) => PrecacheState::Copying,
                    (_, Some(_)) => PrecacheState::Following,
                };
                f.backlog = backlog;
                f.rate = pace.carried();
                f.sent = Amount(before.sent.0 + machine.sent().0);
                f.named = Amount(before.named.0 + machine.named().0);
                if !compares {
                    t.has_image = Some(f.image);
                }
                t.behind = behind || machine.state() != State::Idle;
            });
            eager = machine.may_send(disk.recorder());
            let idle = machine.state() == State::Idle && !eager && waiting.is_empty();
            pause = if idle { idles(Duration::from_millis(order.interval_ms)) } else { TICK };
        }
    };
    tokio::select! {
        result = receiving => result,
        result = driving => result,
    }
}

/// What a path carries while something waits to go all the time.
#[derive(Default)]
struct Waiting(Option<(Instant, u64)>);

impl Waiting {
    /// So many bytes were acknowledged by then, and something waits, or nothing does: what the path carries, if that can be told.
    fn seen(&mut self, now: Instant, acknowledged: u64, waits: bool) -> Option<BitRate> {
        self.0 = waits.then(|| self.0.unwrap_or((now, acknowledged)));
        let (since, before) = self.0?;
        let passed = Some(now.duration_since(since)).filter(|passed| *passed >= WAITED)?;
        self.0 = Some((now, acknowledged));
        // Another connection counts from nought.
        let bytes = acknowledged.checked_sub(before)?;
        Some(BitRate((bytes as f64 * 8.0 / passed.as_secs_f64()) as u64))
    }
}

/// Has the machine take what came.
fn heard(mut machine: Source, several: &[Vec<u8>], disk: &Disk) -> Result<Source> {
    for message in several {
        machine.handle(message, disk.replica(), disk.recorder())?;
    }
    Ok(machine)
}

/// How long it is until the next look whether an epoch should end, where nothing goes.
fn idles(interval: Duration) -> Duration {
    (interval / LOOKS).clamp(TICK, IDLE)
}

/// Whether what a session's epoch has in common with other disks' will never be. Once it holds the epoch, nothing is.
fn given_up(figures: &Mutex<Told>, held: Option<Complete>) -> bool {
    let mut told = lock(figures);
    let Some(live) = &mut told.live else { return false };
    live.common.take_if(|common| common.moment.is_some() && held.is_some_and(|held| held.moment == common.moment));
    live.common.as_ref().is_some_and(|common| common.given_up.is_cancelled())
}

fn waits_for(node: &Node, vm: VmId, volume: VolumeId) -> String {
    let disks = node.vm(vm).map(|parts| parts.disks()).unwrap_or_default();
    let name = disks.into_iter().find(|d| d.id == volume).map_or_else(|| volume.0.to_string(), |d| d.name.clone());
    format!("the images of its VM's disks are of one moment, and `{name}` cannot be brought there now")
}

/// What may be sent now, packed; nothing: nothing may. A guest writes here and there: runs are short, and each by itself would cost both
/// ends as much as a long one.
fn gather(machine: &mut Source, packer: &mut Packer, disk: &Disk) -> Result<Vec<u8>> {
    let (mut wire, mut gathered) = (vec![], 0);
    for _ in 0..GATHERED.0 {
        let ready = machine.poll(disk.replica(), disk.recorder())?;
        for message in &ready {
            packer.push(message, &mut wire)?;
            gathered += message.len();
        }
        if ready.is_empty() || gathered >= GATHERED.1 {
            break;
        }
    }
    packer.flush(&mut wire)?;
    Ok(wire)
}

async fn blocking<T: Send + 'static>(disk: &Arc<Disk>, what: impl FnOnce(&Disk) -> T + Send + 'static) -> T {
    disk.clone().blocking(what).await
}

/// The newest owner of a volume that this host knows of: of its VM, or one that it kept a replica for. An earlier one has no say any more.
pub(crate) fn newest(node: &Node, vm: VmId, volume: VolumeId) -> Option<(Lineage, Generation)> {
    let marked = mark(&node.precaches().volumes.join(volume.0.to_string())).map(|m| (m.lineage, m.generation));
    let parts = node.vm(vm);
    let here = parts.as_ref().map(|parts| parts.view().newest).map(|(l, g)| (Lineage(l), Generation(g)));
    let served = parts.and_then(|parts| parts.file().served);
    marked.into_iter().chain(here).chain(served).max()
}

/// The replica of a volume that this host holds, its VM's or another host's pre-cache: to look at it.
///
/// # Errors
/// When there is none, or it is another one.
pub(crate) async fn holding(node: &Arc<Node>, vm: VmId, volume: VolumeId, size: Amount) -> Result<Arc<Disk>, ApiError> {
    let found = match node.vm(vm) {
        Some(parts) => parts.disks().into_iter().find(|d| d.id == volume),
        None => standing(node, vm, volume, size).await?,
    };
    let none = || ApiError::new(Problem::NotFound, format!("{} has no replica of volume {}", node.name(), volume.0));
    let disk = found.ok_or_else(none)?;
    if disk.size() != size {
        let what = format!("the replica of volume {} at {} has {}", volume.0, node.name(), disk.size());
        return Err(ApiError::new(Problem::Conflict, what));
    }
    Ok(disk)
}

/// The replica of a pre-cache here. One that nobody has asked for since this node was started is opened, and stays so until somebody does.
async fn standing(node: &Arc<Node>, vm: VmId, volume: VolumeId, size: Amount) -> Result<Option<Arc<Disk>>, ApiError> {
    let precaches = node.precaches();
    let _one = precaches.standing_by.lock().await;
    if let Some(known) = lock(&precaches.receiving).get(&volume) {
        return Ok(known.disk.upgrade());
    }
    let folder = precaches.volumes.join(volume.0.to_string());
    let Some(mark) = mark(&folder).filter(|mark| mark.vm == vm && Replica::exists(&folder)) else { return Ok(None) };
    let disk = opened(node, &folder, volume, size)?;
    // Nothing is received by it: whoever sends has to ask first.
    let over = CancellationToken::new();
    over.cancel();
    let receiving = Receiving {
        vm,
        from: mark.from,
        image: disk.replica().complete().is_some_and(|held| held.image),
        owner: (mark.lineage, mark.generation),
        disk: Arc::downgrade(&disk),
        own: Some(disk.clone()),
        over,
    };
    lock(&precaches.receiving).insert(volume, receiving);
    // What was decided before this node was started.
    settle(node, vm, &disk).await.map_err(|e| ApiError::new(Problem::Failed, format!("volume {}: {e:#}", volume.0)))?;
    Ok(Some(disk))
}

/// Another node asks to keep a replica here.
///
/// # Errors
/// What is in the way.
pub async fn stand_by(node: &Arc<Node>, from: &str, asked: Standby) -> Result<(), ApiError> {
    covered(node, from, &asked)?;
    let precaches = node.precaches();
    let _one = precaches.standing_by.lock().await;
    node.quarantine().check(asked.vm)?;
    let conflict = |what: String| Err(ApiError::new(Problem::Conflict, what));
    let owner = (asked.lineage, asked.generation);
    let folder = precaches.volumes.join(asked.volume.0.to_string());
    let known = node.vm(asked.vm);
    if let Some(newest) = newest(node, asked.vm, asked.volume).filter(|newest| *newest > owner) {
        return conflict(format!("volume {} has had a later owner: {newest:?}", asked.volume.0));
    }
    let before = lock(&precaches.receiving).remove(&asked.volume);
    if let Some(before) = &before {
        before.over.cancel();
    }
    let (disk, own) = if let Some(parts) = &known {
        let moving = parts.moving().is_some_and(|m| !m.tracker.ended() && !m.over.is_cancelled());
        if parts.view().ownership != Ownership::Elsewhere || moving || parts.qemu().is_some() {
            return conflict(format!("`{}` is this host's, or about to be", parts.name));
        }
        let disk = parts.disks().into_iter().find(|d| d.id == asked.volume);
        let Some(disk) = disk else { return conflict(format!("`{}` has no volume {}", parts.name, asked.volume.0)) };
        if disk.has_snapshot() {
            return conflict(format!(
                "`{}` is still being exported at {} as it was before its VM left; this goes on when that has ended",
                disk.name,
                node.name()
            ));
        }
        if parts.file().served.is_none_or(|served| served < owner) {
            parts.change(|file| file.served = Some(owner)).map_err(|e| unwritten(&asked, &e))?;
        }
        (disk, None)
    } else if let Some(own) = before.and_then(|b| b.own) {
        make_mark(&folder, &marked(&asked, from)).map_err(|e| unwritten(&asked, &format!("{e:#}")))?;
        (own.clone(), Some(own))
    } else {
        if lock(&precaches.receiving).len() >= MOST {
            return conflict(format!("{} keeps {MOST} pre-caches of others already", node.name()));
        }
        let own = open(node, &folder, from, &asked)?;
        (own.clone(), Some(own))
    };
    if disk.size() != asked.size {
        return conflict(format!("the replica of volume {} here has {}", asked.volume.0, disk.size()));
    }
    if let Some(shelf) = node.libraries().shelf(asked.vm, asked.domain.as_ref()) {
        disk.look_up_in(shelf);
    }
    if disk.replica().is_primary() {
        return conflict(format!(
            "the replica of volume {} here was a primary's, and was not given up",
            asked.volume.0
        ));
    }
    let receiving = Receiving {
        vm: asked.vm,
        from: from.to_owned(),
        image: asked.image,
        owner,
        disk: Arc::downgrade(&disk),
        own,
        over: CancellationToken::new(),
    };
    lock(&precaches.receiving).insert(asked.volume, receiving);
    Ok(())
}

fn unwritten(asked: &Standby, why: &dyn std::fmt::Display) -> ApiError {
    ApiError::new(
        Problem::Failed,
        format!("cannot write down whose replica of volume {} is kept: {why}", asked.volume.0),
    )
}

fn marked(asked: &Standby, from: &str) -> Mark {
    Mark { vm: asked.vm, lineage: asked.lineage, generation: asked.generation, from: from.to_owned() }
}

/// A replica of which no VM is known here.
fn open(node: &Arc<Node>, folder: &Path, from: &str, asked: &Standby) -> Result<Arc<Disk>, ApiError> {
    use std::os::unix::fs::DirBuilderExt;
    let failed = |e: &dyn std::fmt::Display| ApiError::new(Problem::Failed, format!("volume {}: {e}", asked.volume.0));
    let sockets = &node.precaches().sockets;
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(sockets).map_err(|e| failed(&e))?;
    // First: a volume without it is nobody's.
    make_mark(folder, &marked(asked, from)).map_err(|e| failed(&format!("{e:#}")))?;
    opened(node, folder, asked.volume, asked.size)
}

/// Makes the folder of a replica that is to be another host's, with its mark.
pub(crate) fn make_mark(folder: &Path, mark: &Mark) -> Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    Ok(replace(&folder.join(MARK), &serde_json::to_vec(mark)?)?)
}

fn opened(node: &Arc<Node>, folder: &Path, volume: VolumeId, size: Amount) -> Result<Arc<Disk>, ApiError> {
    use std::os::unix::fs::DirBuilderExt;
    let failed = |e: &dyn std::fmt::Display| ApiError::new(Problem::Failed, format!("volume {}: {e}", volume.0));
    let sockets = &node.precaches().sockets;
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(sockets).map_err(|e| failed(&e))?;
    let socket = sockets.join(format!("{}.sock", volume.0));
    let pool = node.config().pool.as_ref();
    let disk = Disk::open_or_create(folder, pool, socket, volume, &format!("volume {}", volume.0), size)
        .map_err(|e| failed(&format!("{e:#}")))?;
    node.has_opened(&disk);
    Ok(disk)
}

/// Whether the controller lets `from` keep a replica here.
fn covered(node: &Node, from: &str, asked: &Standby) -> Result<(), ApiError> {
    let right = VolumeRight {
        vm: asked.vm,
        volume: asked.volume,
        lineage: asked.lineage,
        generation: asked.generation,
        digest: digest(asked.volume, asked.size, asked.domain.as_ref()),
        capability: &asked.capability,
    };
    crate::covered::volume(node.credentials(), from, &right).map_err(|why| {
        tracing::warn!(peer = from, %why, "a node wants to keep a replica here that it was not given");
        ApiError::new(Problem::Forbidden, format!("{from} may not keep volume {} here: {why}", asked.volume.0))
            .remedy("only `godwit volume precache` allows this; if nobody ordered it, look after that host")
    })
}

/// The stream of a pre-cache came.
pub fn streamed(node: &Node, from: &str, volume: VolumeId, stream: Stream) {
    let found = {
        let receiving = lock(&node.precaches().receiving);
        receiving
            .get(&volume)
            .filter(|r| r.from == from && !r.over.is_cancelled())
            .and_then(|r| Some((r.disk.upgrade()?, r.vm, r.image, r.owner, r.over.clone())))
    };
    let Some((disk, vm, image, owner, over)) = found else {
        tracing::warn!(from, volume = volume.0, "a pre-cache that was not asked for");
        return;
    };
    let (from, moments) = (from.to_owned(), node.precaches().moments().clone());
    tokio::spawn(async move {
        let result = tokio::select! {
            result = receive(&disk, stream, image, &over, (&moments, vm)) => result,
            () = over.cancelled() => Ok(()),
        };
        if let Err(error) = result {
            tracing::info!(volume = volume.0, from, ?owner, error = format!("{error:#}"), "a pre-cache ended here");
        }
    });
}

async fn receive(
    disk: &Arc<Disk>,
    stream: Stream,
    image: bool,
    over: &CancellationToken,
    (moments, vm): (&Arc<Moments>, VmId),
) -> Result<()> {
    let (mut out, mut back) = stream.split();
    let known = moments.clone();
    // Short answers, which a copy that goes the same way must not hold up.
    out.set_priority(Priority::Interactive);
    let wanted = over.clone();
    let begin = move |disk: &Disk| {
        still_wanted(&wanted)?;
        let open = || Journal::open(disk.replica().folder());
        // An earlier session could not bring all of its epoch to its place.
        known.settle(vm, disk.id, disk.replica())?;
        if !image {
            // As large as the longest epoch was.
            Journal::remove(disk.replica())?;
        }
        let journal = image.then(open).transpose()?;
        anyhow::Ok(match disk.library() {
            Some(library) => Target::with_library(disk.replica(), journal, library)?,
            None => Target::new(disk.replica(), journal)?,
        })
    };
    // An earlier session may be putting its epoch in its place.
    let begun = blocking(disk, move |disk| disk.unless_received(|| begin(disk)));
    let (mut target, has) = begun.await?;
    let wanted = over.clone();
    let held = move |disk: &Disk, say: &mut dyn FnMut() -> Result<Vec<u8>>| {
        disk.unless_received(|| {
            still_wanted(&wanted)?;
            say()
        })
    };
    let mut packer = crate::disk::tell(disk, &mut out, has, held).await?;
    let mut unpacker = Unpacker::new()?;
    while let Some(several) = crate::disk::several(&mut unpacker, &mut back, PATIENCE).await? {
        let (wanted, known) = (over.clone(), moments.clone());
        (target, packer) = answered(disk, &mut out, (target, packer), move |disk, target, answers| {
            for message in several {
                still_wanted(&wanted)?;
                let answer = target.handle(&message, disk.replica())?;
                match target.sealed() {
                    Some(moment) => known.seal(vm, disk.id, moment)?,
                    None => answers.push(answer),
                }
            }
            Ok(())
        })
        .await?;
        let Some(moment) = target.sealed() else { continue };
        tokio::select! {
            // First: what is decided is brought to its place, also where the source is gone.
            biased;
            decided = moments.until_decided(vm, disk.id, moment) => decided?,
            more = crate::disk::several(&mut unpacker, &mut back, PATIENCE) => match more? {
                Some(_) => bail!("the source says more before the end of an epoch is answered"),
                None => break,
            },
        }
        reach_async(Point::Moment, vm).await;
        let wanted = over.clone();
        (target, packer) = answered(disk, &mut out, (target, packer), move |disk, target, answers| {
            still_wanted(&wanted)?;
            answers.push(target.decided(disk.replica())?);
            Ok(())
        })
        .await?;
    }
    bail!("the source closed the session")
}

/// Has the target do something while no attempt of a move begins to receive the replica, and sends what it answers.
async fn answered(
    disk: &Arc<Disk>,
    out: &mut SendHalf,
    (mut target, mut packer): (Target, Packer),
    what: impl FnOnce(&Disk, &mut Target, &mut Vec<Vec<u8>>) -> Result<()> + Send + 'static,
) -> Result<(Target, Packer)> {
    let done = blocking(disk, move |disk| {
        disk.unless_received(|| {
            let (mut answers, mut wire) = (vec![], vec![]);
            what(disk, &mut target, &mut answers)?;
            for answer in &answers {
                packer.push(answer, &mut wire)?;
            }
            packer.flush(&mut wire)?;
            anyhow::Ok((target, packer, wire))
        })
    });
    let (target, packer, wire) = done.await?;
    out.write(wire.into()).await?;
    Ok((target, packer))
}

/// Another session may have begun, or a move.
fn still_wanted(over: &CancellationToken) -> Result<()> {
    if over.is_cancelled() {
        bail!("the replica is wanted otherwise");
    }
    Ok(())
}

/// Brings what was decided of images of one moment to its place: before anybody starts from them.
///
/// # Errors
/// When the medium fails.
pub(crate) async fn settle(node: &Arc<Node>, vm: VmId, disk: &Arc<Disk>) -> Result<()> {
    let moments = node.precaches().moments().clone();
    blocking(disk, move |disk| disk.unless_received(|| moments.settle(vm, disk.id, disk.replica()))).await
}

#[cfg(test)]
mod tests {
    use super::*;
    use godwit_units::Epoch;

    #[test]
    fn where_nothing_goes_an_epoch_ends_a_twentieth_of_its_interval_late_at_the_most() {
        let late = |s: f64| idles(Duration::from_secs_f64(s)).as_millis();
        assert_eq!([1.0, 4.0, 10.0, 3600.0].map(late), [50, 200, 500, 500]);
    }

    #[test]
    fn what_a_path_carries_is_told_only_of_a_time_in_which_something_waited() {
        let (mut waiting, began) = (Waiting::default(), Instant::now());
        let mut seen =
            |ms, bytes, waits| waiting.seen(began + Duration::from_millis(ms), bytes, waits).map(BitRate::mbit);
        // An epoch that is short, and one that goes on.
        let short = [(0, 0, true), (500, 5_000_000, true), (600, 5_100_000, false)];
        let long = [(5000, 5_100_000, true), (5500, 11_350_000, true), (5800, 15_100_000, true)];
        assert_eq!(short.map(|(ms, bytes, waits)| seen(ms, bytes, waits)), [None; 3]);
        assert_eq!(long.map(|(ms, bytes, waits)| seen(ms, bytes, waits)), [None, None, Some(100.0)]);
        // From there on anew; and another connection counts from nought.
        assert_eq!(seen(6800, 40_100_000, true), Some(200.0));
        assert_eq!(seen(7800, 1000, true), None);
    }

    #[test]
    fn why_images_are_given_up_is_said_until_there_is_a_newer_one() {
        let complete = |epoch, image| {
            let epoch = Stamp { lineage: Lineage::FIRST, generation: Generation::FIRST, epoch: Epoch(epoch) };
            Some(Complete { epoch, at_unix_ms: 1000, image, moment: None })
        };
        let overwritten = || anyhow::Error::new(MirrorError::Overwritten { room: Amount::mib(64) }).context("sending");
        let mut told = Told::default();
        let is_said = |told: &Told| told.figures.error.as_ref().is_some_and(|e| e.contains("--image-room"));
        told.holds(complete(1, true), None);
        for times in 1..=2 {
            told.ended(Some(&overwritten()));
            assert!(is_said(&told) && told.figures.given_up == times, "{told:?}");
            // In the next session, too, which does not know at first what the secondary holds, and then that it is what it was.
            for held in [None, complete(1, true)] {
                told.holds(held, None);
                assert!(is_said(&told) && told.figures.given_up == times, "{told:?}");
            }
        }
        // What ends a session otherwise is said, and forgotten.
        told.ended(Some(&anyhow!("the link was cut")));
        assert!(!is_said(&told));
        told.holds(complete(1, true), None);
        assert!(is_said(&told));
        told.holds(complete(2, true), None);
        assert_eq!((told.figures.error.clone(), told.figures.given_up), (None, 0));
        told.holds(complete(2, true), Some("another disk".into()));
        assert_eq!(told.figures.error.as_deref(), Some("another disk"));
    }

    #[test]
    fn all_that_goes_to_one_host_shares_a_pace_which_is_forgotten_with_the_last() {
        let precaches = Precaches::new(Path::new("/nowhere"), Path::new("/nowhere"));
        let host = |name: &str| name.parse::<Name>().expect("a name");
        let sharers = |name: &str| lock(&precaches.paces).get(&host(name)).map(Pace::sharers);
        let [one, other, third] = ["b", "b", "c"].map(|name| precaches.share_to(&host(name)));
        assert_eq!((sharers("b"), sharers("c")), (Some(2), Some(1)));
        drop((one, other));
        let fourth = precaches.share_to(&host("c"));
        assert_eq!((sharers("b"), sharers("c")), (None, Some(2)));
        drop((third, fourth));
        assert_eq!(sharers("c"), Some(0));
    }
}
