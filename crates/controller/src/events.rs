//! Sees what happens and tells it: the events of `GET /v1/events`, and what metrics count.
//!
//! What is durable is seen where it becomes so: [`Watched`] stands before the store and compares each record with the one
//! before, so no handler can forget to tell. What is not stored (a move's phase, whether a host answers) is told by who notes it.
//!
//! # What can go wrong
//!
//! Readers may be slow. There is no queue for each of them: all read one ring of the last [`KEPT`] events, each at its own
//! place, and one that has been overtaken is told how many it has lost. So a reader costs a number, and none holds up another,
//! nor what happens.
//!
//! Readers may be of different customers. Each event is kept with whom it is for ([`For`]), decided when it is told, by the
//! domain that its VM was in then; whoever reads for a domain is given that domain's, and what is everybody's. What nobody
//! has said otherwise of is the deployment's.

use crate::extenders::ExtenderRecord;
use crate::record::{Life, MoveRecord, Step, VmRecord};
use crate::rights::Caller;
use crate::state::{Controller, HostRecord, conflict};
use crate::store::{Change, Counter, Kind, StateStore, StoreError};
use axum::body::Body;
use axum::extract::{Extension, Query, State};
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse, Response};
use godwit_api::events::{Event, Happening};
use godwit_api::extender::{Extender, ExtenderState, HostWay, LocalWay};
use godwit_api::metrics::{ENDS, KEPT as MOVES_KEPT_FOR, MOST_KEPT};
use godwit_api::progress::{MoveProgress, Outcome, PhaseName};
use godwit_api::public::{Component, Site, Volume};
use godwit_api::{ApiError, Name};
use godwit_units::MoveId;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::convert::Infallible;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

/// Events that are kept for readers: a hundred moves with all their phases. Some hundred bytes each.
const KEPT: usize = 1024;

/// Readers at once; each holds a connection, of which the API has 256.
const MOST_READERS: usize = 64;

/// Readers of one domain at once: so that no customer takes all places.
const MOST_OF_A_DOMAIN: usize = 8;

/// Events that are written at once.
const BATCH: usize = 64;

/// How often a comment is sent where nothing happens: proxies close what is silent, and a reader learns that it still is connected.
const ALIVE: Duration = Duration::from_secs(10);

/// Tells and counts.
#[derive(Debug)]
pub struct Hub {
    inner: Mutex<Inner>,
    /// The number of the newest event; closed readers see `stop`.
    newest: watch::Sender<u64>,
    stop: watch::Sender<bool>,
    readers: Arc<Semaphore>,
}

/// Whom an event is for. The deployment's own people see all of them.
#[derive(Clone, Debug, PartialEq, Eq)]
enum For {
    /// Nobody else.
    Deployment,
    /// Everybody: what each domain may read of the deployment.
    Everybody,
    /// Those of a domain.
    Domain(Name),
}

impl For {
    fn is_for(&self, domain: Option<&Name>) -> bool {
        match (domain, self) {
            (None, _) | (Some(_), Self::Everybody) => true,
            (Some(mine), Self::Domain(theirs)) => mine == theirs,
            (Some(_), Self::Deployment) => false,
        }
    }
}

#[derive(Debug)]
struct Inner {
    ring: VecDeque<(Event, For)>,
    /// The domains of VMs that are in one.
    domains: HashMap<Name, Name>,
    /// How many of each domain read.
    reading: HashMap<Name, usize>,
    next: u64,
    /// The number before the first of this process.
    base: u64,
    /// What is known of moves that go on.
    phases: HashMap<MoveId, (PhaseName, Outcome)>,
    ended: VecDeque<(Instant, MoveRecord)>,
    outcomes: BTreeMap<&'static str, u64>,
    hosts: BTreeMap<Name, bool>,
    /// Whether each extender was up when it was last looked at.
    extenders: BTreeMap<u32, ([Name; 2], bool)>,
    /// Which way each host's frames took then.
    ways: BTreeMap<(u32, Name), Option<LocalWay>>,
}

fn unix_us() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| u64::try_from(d.as_micros()).unwrap_or(u64::MAX))
}

/// An outcome as a label.
pub fn label(outcome: Outcome) -> &'static str {
    match outcome {
        Outcome::Completed => "completed",
        Outcome::Cancelled => "cancelled",
        Outcome::NetworkUnproved => "network-unproved",
        Outcome::Failed => "failed",
        Outcome::MemoryLost => "memory-lost",
        Outcome::Running | Outcome::WaitsForPeer => "open",
    }
}

/// What a reader gets next.
#[derive(Debug, PartialEq)]
pub struct Read {
    /// The events.
    pub events: Vec<Event>,
    /// Where to go on.
    pub after: u64,
}

impl Hub {
    /// Numbers begin after `now`, in seconds, shifted: so a controller that is restarted goes on with greater ones, and
    /// all stay exact in JavaScript.
    pub fn new(now_unix_s: u64) -> Self {
        let base = now_unix_s << 20;
        let inner = Inner {
            ring: VecDeque::new(),
            domains: HashMap::new(),
            reading: HashMap::new(),
            next: base + 1,
            base,
            phases: HashMap::new(),
            ended: VecDeque::new(),
            outcomes: BTreeMap::new(),
            hosts: BTreeMap::new(),
            extenders: BTreeMap::new(),
            ways: BTreeMap::new(),
        };
        Self {
            inner: Mutex::new(inner),
            newest: watch::Sender::new(base),
            stop: watch::Sender::new(false),
            readers: Arc::new(Semaphore::new(MOST_READERS)),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells whom it concerns.
    pub fn tell(&self, what: Happening) {
        let mut inner = self.lock();
        let of = |vm: &Name| inner.domains.get(vm).cloned().map_or(For::Deployment, For::Domain);
        let whose = match &what {
            Happening::VmCreated { vm, .. }
            | Happening::VmMoved { vm, .. }
            | Happening::VmChanged { vm }
            | Happening::VmRemoved { vm }
            | Happening::VolumeCreated { vm, .. }
            | Happening::MoveOrdered { vm, .. }
            | Happening::MovePhase { vm, .. }
            | Happening::MoveWaits { vm, .. }
            | Happening::MoveCancelled { vm, .. }
            | Happening::MoveEnded { vm, .. } => of(vm),
            Happening::SiteAdded { .. }
            | Happening::SiteRemoved { .. }
            | Happening::ComponentAdded { .. }
            | Happening::ComponentRemoved { .. } => For::Everybody,
            // Their VMs are not in them; `tell_of` says whose they are.
            Happening::VolumeChanged { .. } | Happening::VolumeRemoved { .. } => For::Deployment,
            Happening::HostAdded { .. }
            | Happening::HostRemoved { .. }
            | Happening::HostReachable { .. }
            | Happening::HostUnreachable { .. }
            | Happening::ExtenderConnected { .. }
            | Happening::ExtenderDisconnected { .. }
            | Happening::ExtenderUp { .. }
            | Happening::ExtenderDown { .. }
            | Happening::ExtenderWayChanged { .. }
            | Happening::Lost { .. } => For::Deployment,
            #[allow(unreachable_patterns, reason = "what is new is the deployment's until somebody says otherwise")]
            _ => For::Deployment,
        };
        self.keep(&mut inner, what, whose);
    }

    /// Tells what belongs to a VM that is not named in it.
    fn tell_of(&self, vm: &Name, what: Happening) {
        let mut inner = self.lock();
        let whose = inner.domains.get(vm).cloned().map_or(For::Deployment, For::Domain);
        self.keep(&mut inner, what, whose);
    }

    fn keep(&self, inner: &mut Inner, what: Happening, whose: For) {
        let id = inner.next;
        inner.next += 1;
        if inner.ring.len() == KEPT {
            inner.ring.pop_front();
        }
        inner.ring.push_back((Event { id, at_unix_us: unix_us(), what }, whose));
        self.newest.send_replace(id);
    }

    /// The number of the newest event, and how many were told by this process.
    pub fn newest(&self) -> (u64, u64) {
        let inner = self.lock();
        (inner.next - 1, inner.next - 1 - inner.base)
    }

    /// How many readers there are.
    pub fn readers(&self) -> usize {
        MOST_READERS - self.readers.available_permits()
    }

    /// Ends all readers.
    pub fn close(&self) {
        self.stop.send_replace(true);
    }

    /// A place for a reader of a domain, until that is dropped.
    fn place_of(self: &Arc<Self>, domain: &Name) -> Option<Place> {
        let mut inner = self.lock();
        let reading = inner.reading.entry(domain.clone()).or_default();
        if *reading >= MOST_OF_A_DOMAIN {
            return None;
        }
        *reading += 1;
        Some(Place { hub: Arc::clone(self), domain: domain.clone() })
    }

    /// What there is for a domain among the next `most` after `after`; none: for the deployment. 0: from the oldest that is
    /// kept on.
    pub fn read(&self, after: u64, most: usize, domain: Option<&Name>) -> Read {
        let inner = self.lock();
        let oldest = inner.next - inner.ring.len() as u64;
        let (mut events, mut from) = (vec![], after + 1);
        if after == 0 {
            from = oldest;
        } else if after < inner.base || after >= inner.next {
            // A number of another process: what that one had told since is not known here.
            events.push(Event { id: oldest - 1, at_unix_us: unix_us(), what: Happening::Lost { count: None } });
            from = oldest;
        } else if from < oldest {
            // How many of them were theirs is not known any more.
            let count = domain.is_none().then_some(oldest - from);
            events.push(Event { id: oldest - 1, at_unix_us: unix_us(), what: Happening::Lost { count } });
            from = oldest;
        }
        let skip = usize::try_from(from - oldest).unwrap_or(usize::MAX);
        let read = inner.ring.iter().skip(skip).take(most);
        let after = read.clone().next_back().map_or(from - 1, |(event, _)| event.id);
        events.extend(read.filter(|(_, whose)| whose.is_for(domain)).map(|(event, _)| event.clone()));
        Read { events, after }
    }

    /// How a move under way stands: tells of a new phase, and when it begins to wait for its peer.
    pub fn note_progress(&self, id: MoveId, vm: &Name, progress: &MoveProgress) {
        let (phase, outcome) = (progress.phase, progress.outcome);
        let before = self.lock().phases.insert(id, (phase, outcome));
        if before.is_none_or(|(known, _)| known != phase) {
            self.tell(Happening::MovePhase { mv: id, vm: vm.clone(), phase });
        }
        if outcome == Outcome::WaitsForPeer && before.is_none_or(|(_, known)| known != outcome) {
            self.tell(Happening::MoveWaits { mv: id, vm: vm.clone() });
        }
    }

    /// Whether a host answers, as it was found just now.
    pub fn note_host(&self, host: &Name, error: Option<&ApiError>) {
        let before = self.lock().hosts.insert(host.clone(), error.is_none());
        match error {
            None if before != Some(true) => self.tell(Happening::HostReachable { host: host.clone() }),
            Some(error) if before != Some(false) => {
                self.tell(Happening::HostUnreachable { host: host.clone(), error: error.message.clone() });
            }
            _ => {}
        }
    }

    /// How an extender stands, as its hosts said just now. Where a host's frames went at first is nobody's news.
    pub fn note_extender(&self, seen: &Extender) {
        let (mut news, sites) = (vec![], &seen.sites);
        let mut inner = self.lock();
        let was_up = inner.extenders.insert(seen.id, (sites.clone(), seen.up)).is_some_and(|(_, up)| up);
        match (was_up, seen.up) {
            (false, true) => news.push(Happening::ExtenderUp { sites: sites.clone() }),
            (true, false) => news.push(Happening::ExtenderDown { sites: sites.clone() }),
            _ => {}
        }
        for HostWay { host, way, .. } in &seen.ways {
            let before = inner.ways.insert((seen.id, host.clone()), way.clone());
            if before.is_some_and(|before| before.is_some() && before != *way) {
                let (sites, host, way) = (sites.clone(), host.clone(), way.clone());
                news.push(Happening::ExtenderWayChanged { sites, host, way });
            }
        }
        drop(inner);
        news.into_iter().for_each(|what| self.tell(what));
    }

    /// Whether each extender was up when it was last looked at.
    pub fn extenders(&self) -> Vec<([Name; 2], bool)> {
        self.lock().extenders.values().cloned().collect()
    }

    fn compare_extenders(&self, before: Option<ExtenderRecord>, after: Option<ExtenderRecord>) {
        let connected = |record: &ExtenderRecord| record.state == ExtenderState::Connected;
        match (before, after) {
            (before, Some(new)) if connected(&new) && !before.as_ref().is_some_and(connected) => {
                self.tell(Happening::ExtenderConnected { sites: new.sites });
            }
            (Some(old), None) => {
                let mut inner = self.lock();
                inner.extenders.remove(&old.id);
                inner.ways.retain(|(id, _), _| *id != old.id);
                drop(inner);
                self.tell(Happening::ExtenderDisconnected { sites: old.sites });
            }
            _ => {}
        }
    }

    /// Whether each host answered when it was last asked.
    pub fn hosts(&self) -> BTreeMap<Name, bool> {
        self.lock().hosts.clone()
    }

    /// How many moves ended how: of all that the store knows, so that it goes on over a restart.
    pub fn outcomes(&self) -> BTreeMap<&'static str, u64> {
        self.lock().outcomes.clone()
    }

    /// Moves that have ended lately.
    pub fn ended(&self) -> Vec<MoveRecord> {
        let mut inner = self.lock();
        inner.ended.retain(|(at, _)| at.elapsed() < MOVES_KEPT_FOR);
        inner.ended.iter().map(|(_, record)| record.clone()).collect()
    }

    /// So many moves more had ended, and their records are gone.
    fn count_forgotten(&self, outcome: &str, count: u64) {
        if let Some(outcome) = ENDS.map(label).into_iter().find(|known| *known == outcome) {
            *self.lock().outcomes.entry(outcome).or_default() += count;
        }
    }

    fn count(&self, record: &MoveRecord, lately: bool) {
        let mut inner = self.lock();
        *inner.outcomes.entry(label(record.progress.outcome)).or_default() += 1;
        inner.phases.remove(&record.id());
        if lately {
            inner.ended.push_back((Instant::now(), record.clone()));
            if inner.ended.len() > MOST_KEPT {
                inner.ended.pop_front();
            }
        }
    }

    /// What a change of a record means to people.
    fn compare(&self, kind: Kind, before: Option<&[u8]>, after: Option<&[u8]>) {
        match kind {
            Kind::Site => match (read::<Site>(before), read::<Site>(after)) {
                (None, Some(new)) => self.tell(Happening::SiteAdded { site: new.name }),
                (Some(old), None) => self.tell(Happening::SiteRemoved { site: old.name }),
                _ => {}
            },
            Kind::Host => match (read::<HostRecord>(before), read::<HostRecord>(after)) {
                (None, Some(new)) => self.tell(Happening::HostAdded { host: new.name, site: new.site }),
                (Some(old), None) => {
                    self.lock().hosts.remove(&old.name);
                    self.tell(Happening::HostRemoved { host: old.name });
                }
                _ => {}
            },
            Kind::Component => match (read::<Component>(before), read::<Component>(after)) {
                (None, Some(new)) => self.tell(Happening::ComponentAdded { component: new.name }),
                (Some(old), None) => self.tell(Happening::ComponentRemoved { component: old.name }),
                _ => {}
            },
            Kind::Vm => self.compare_vms(read(before), read(after)),
            Kind::Volume => match (read::<Volume>(before), read::<Volume>(after)) {
                (None, Some(v)) => self.tell(Happening::VolumeCreated { volume: v.name, vm: v.vm, size: v.size }),
                (Some(old), None) => self.tell_of(&old.vm, Happening::VolumeRemoved { volume: old.name }),
                (Some(old), Some(v)) if old.replicas != v.replicas => {
                    self.tell_of(&v.vm, Happening::VolumeChanged { volume: v.name, replicas: v.replicas });
                }
                _ => {}
            },
            Kind::Move => self.compare_moves(read(before), read(after)),
            Kind::Extender => self.compare_extenders(read(before), read(after)),
            // What else is stored is nobody's event.
            #[allow(unreachable_patterns, reason = "a new kind of record need not be told of")]
            _ => {}
        }
    }

    /// Notes which domain a VM is in. A VM that goes is forgotten when all that goes with it was told.
    fn note_domain(&self, vm: &VmRecord) {
        let (name, domain) = (vm.definition.name.clone(), vm.domain.clone());
        let domains = &mut self.lock().domains;
        match domain {
            Some(domain) => domains.insert(name, domain),
            None => domains.remove(&name),
        };
    }

    fn compare_vms(&self, before: Option<VmRecord>, after: Option<VmRecord>) {
        let was_ready = before.as_ref().is_some_and(|vm| vm.life == Life::Ready);
        match (before, after) {
            (_, Some(new)) if !was_ready && new.life == Life::Ready => {
                self.tell(Happening::VmCreated { vm: new.definition.name, host: new.host });
            }
            (Some(old), Some(new)) if was_ready => {
                let (vm, changed) = (new.definition.name.clone(), old.definition != new.definition);
                if (old.lineage, old.generation, &old.host) != (new.lineage, new.generation, &new.host) {
                    self.tell(Happening::VmMoved { vm: vm.clone(), host: new.host, generation: new.generation });
                }
                if changed {
                    self.tell(Happening::VmChanged { vm });
                }
            }
            (Some(old), None) => self.tell(Happening::VmRemoved { vm: old.definition.name }),
            _ => {}
        }
    }

    fn compare_moves(&self, before: Option<MoveRecord>, after: Option<MoveRecord>) {
        let Some(now) = after else { return };
        let (mv, vm) = (now.id(), now.vm.clone());
        if before.is_none() {
            let (from, to) = (now.from.clone(), now.order.to.name.clone());
            self.tell(Happening::MoveOrdered { mv, vm: vm.clone(), from, to });
        }
        if now.cancel && !before.as_ref().is_some_and(|m| m.cancel) {
            self.tell(Happening::MoveCancelled { mv, vm: vm.clone() });
        }
        if now.step == Step::Ended && !before.is_some_and(|m| m.step == Step::Ended) {
            self.count(&now, true);
            let MoveProgress { outcome, downtime_ms, error, .. } = now.progress;
            self.tell(Happening::MoveEnded { mv, vm, outcome, downtime_ms, error });
        }
    }
}

/// A record, unless it is another version's: then nothing is told of it.
fn read<T: DeserializeOwned>(bytes: Option<&[u8]>) -> Option<T> {
    serde_json::from_slice(bytes?).ok()
}

/// A store whose changes are told.
pub struct Watched {
    store: Box<dyn StateStore>,
    hub: Arc<Hub>,
}

impl Watched {
    /// Before `store`. Moves that had ended before are counted.
    pub fn new(store: Box<dyn StateStore>, hub: Arc<Hub>) -> Self {
        // A record that cannot be read here is an error for whoever needs it.
        for (_, bytes) in store.list(Kind::Move).unwrap_or_default() {
            if let Some(record) = read::<MoveRecord>(Some(&bytes)).filter(|record| record.step == Step::Ended) {
                hub.count(&record, false);
            }
        }
        for (outcome, bytes) in store.list(Kind::Forgotten).unwrap_or_default() {
            hub.count_forgotten(&outcome, read(Some(&bytes)).unwrap_or_default());
        }
        for (_, bytes) in store.list(Kind::Vm).unwrap_or_default() {
            if let Some(vm) = read::<VmRecord>(Some(&bytes)) {
                hub.note_domain(&vm);
            }
        }
        Self { store, hub }
    }
}

impl StateStore for Watched {
    fn get(&self, kind: Kind, key: &str) -> Result<Option<Vec<u8>>, StoreError> {
        self.store.get(kind, key)
    }

    fn list(&self, kind: Kind) -> Result<Vec<(String, Vec<u8>)>, StoreError> {
        self.store.list(kind)
    }

    fn commit(&self, changes: &[Change]) -> Result<(), StoreError> {
        let mut before = vec![];
        for change in changes {
            let (Change::Put(kind, key, _) | Change::Remove(kind, key)) = change;
            before.push(self.store.get(*kind, key)?);
        }
        self.store.commit(changes)?;
        // Whose a VM is, before anything is told of what comes with it.
        for change in changes {
            if let Change::Put(Kind::Vm, _, vm) = change
                && let Some(vm) = read::<VmRecord>(Some(vm))
            {
                self.hub.note_domain(&vm);
            }
        }
        let mut gone = vec![];
        for (change, before) in changes.iter().zip(before) {
            if let Change::Remove(Kind::Vm, _) = change {
                gone.extend(read::<VmRecord>(before.as_deref()).map(|vm| vm.definition.name));
            }
            match change {
                Change::Put(kind, _, after) => self.hub.compare(*kind, before.as_deref(), Some(after)),
                Change::Remove(kind, _) => self.hub.compare(*kind, before.as_deref(), None),
            }
        }
        let domains = &mut self.hub.lock().domains;
        gone.iter().for_each(|vm| drop(domains.remove(vm)));
        Ok(())
    }

    fn next(&self, counter: Counter) -> Result<u64, StoreError> {
        self.store.next(counter)
    }

    fn last(&self, counter: Counter) -> Result<u64, StoreError> {
        self.store.last(counter)
    }
}

/// Where to begin, and whether to go on.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Wanted {
    after: Option<u64>,
    follow: Option<bool>,
}

/// One of a domain's places.
#[derive(Debug)]
struct Place {
    hub: Arc<Hub>,
    domain: Name,
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut inner = self.hub.lock();
        if let Some(reading) = inner.reading.get_mut(&self.domain) {
            *reading -= 1;
            if *reading == 0 {
                inner.reading.remove(&self.domain);
            }
        }
    }
}

/// A reader's place.
struct Reader {
    c: Arc<Controller>,
    who: Caller,
    hub: Arc<Hub>,
    after: u64,
    follow: bool,
    newest: watch::Receiver<u64>,
    stop: watch::Receiver<bool>,
    greeted: bool,
    _place: OwnedSemaphorePermit,
    _of_domain: Option<Place>,
}

impl Reader {
    /// The next piece of text; none at the end.
    async fn piece(&mut self) -> Option<String> {
        if !self.greeted {
            // So that a reader knows at once that it is connected.
            self.greeted = true;
            return Some(": godwit\n\n".into());
        }
        loop {
            // A token that has ended, or was removed, gives nothing more to whoever was reading with it.
            if !self.who.is_good(&self.c) {
                return None;
            }
            self.newest.mark_unchanged();
            let read = self.hub.read(self.after, BATCH, self.who.domain());
            let went_on = read.after != self.after;
            self.after = read.after;
            if !read.events.is_empty() {
                return Some(read.events.iter().map(Event::to_frame).collect());
            }
            if went_on {
                // There were others', and may be more.
                continue;
            }
            if !self.follow {
                return None;
            }
            tokio::select! {
                changed = self.newest.changed() => changed.ok()?,
                _ = self.stop.wait_for(|stop| *stop) => return None,
                () = tokio::time::sleep(ALIVE) => return Some(":\n\n".into()),
            }
        }
    }
}

/// `GET /v1/events`.
pub async fn follow(
    State(c): State<Arc<Controller>>,
    Extension(who): Extension<Caller>,
    Query(wanted): Query<Wanted>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let hub = Arc::clone(&c.events);
    let place = Arc::clone(&hub.readers).try_acquire_owned().map_err(|_| {
        conflict(format!("{MOST_READERS} readers follow the events already"))
            .remedy("end one of them, or ask with `follow=false` from time to time")
    })?;
    let of_domain = match who.domain() {
        Some(domain) => Some(hub.place_of(domain).ok_or_else(|| {
            conflict(format!("{MOST_OF_A_DOMAIN} readers of `{domain}` follow the events already"))
                .remedy("end one of them, or ask with `follow=false` from time to time")
        })?),
        None => None,
    };
    let resumed = headers.get("last-event-id").and_then(|id| id.to_str().ok()?.parse().ok());
    let follow = wanted.follow.unwrap_or(true);
    let after = wanted.after.or(resumed).unwrap_or_else(|| hub.newest().0);
    let (newest, stop) = (hub.newest.subscribe(), hub.stop.subscribe());
    let reader =
        Reader { c, who, hub, after, follow, newest, stop, greeted: false, _place: place, _of_domain: of_domain };
    let pieces = futures_util::stream::unfold(reader, |mut reader| async {
        let piece = reader.piece().await?;
        Some((Ok::<_, Infallible>(piece), reader))
    });
    let headers = [(header::CONTENT_TYPE, "text/event-stream"), (header::CACHE_CONTROL, "no-store")];
    Ok((headers, Body::from_stream(pieces)).into_response())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(hub: &Hub, n: u64) {
        for _ in 0..n {
            hub.tell(Happening::SiteAdded { site: "east".parse().unwrap() });
        }
    }

    fn lost(read: &Read) -> Option<&Option<u64>> {
        match &read.events.first()?.what {
            Happening::Lost { count } => Some(count),
            _ => None,
        }
    }

    #[test]
    fn events_are_numbered_without_a_gap_and_read_in_order() {
        let hub = Hub::new(1000);
        told(&hub, 100);
        let first = hub.read(0, 64, None);
        let second = hub.read(first.after, 64, None);
        let ids: Vec<u64> = first.events.iter().chain(&second.events).map(|e| e.id).collect();
        let begin = (1000 << 20) + 1;
        assert_eq!(ids, (begin..begin + 100).collect::<Vec<_>>());
        assert_eq!(hub.read(second.after, 64, None), Read { events: vec![], after: second.after });
    }

    #[test]
    fn an_extender_is_told_of_when_it_goes_up_or_down_and_when_a_hosts_frames_take_another_way() {
        let hub = Hub::new(1000);
        let seen = |up: bool, way: serde_json::Value| -> Extender {
            let ways = serde_json::json!([{"host": "e1", "way": way, "good": up}]);
            serde_json::from_value(serde_json::json!({
                "id": 1, "sites": ["east", "west"], "state": "connected", "up": up, "problems": [],
                "carriers": [[], []], "tunnels": [], "ways": ways, "keys_unix_s": 0,
            }))
            .unwrap()
        };
        let tunnel = |id: u32| serde_json::json!({"tunnel": id});
        let both = [(false, tunnel(1)), (true, tunnel(1)), (true, tunnel(1)), (true, tunnel(2)), (false, tunnel(2))];
        both.into_iter().for_each(|(up, way)| hub.note_extender(&seen(up, way)));
        let kinds: Vec<String> = hub.read(0, 64, None).events.iter().map(|event| event.what.kind()).collect();
        assert_eq!(kinds, ["extender-up", "extender-way-changed", "extender-down"]);
        assert_eq!(hub.extenders(), [(["east", "west"].map(|site| site.parse().unwrap()), false)]);
        assert_eq!(hub.read(0, 64, Some(&"acme".parse().unwrap())).events, [], "they are the deployment's");
    }

    #[test]
    fn a_slow_reader_is_told_how_many_it_lost_and_goes_on_with_the_oldest_that_is_kept() {
        let hub = Hub::new(1000);
        told(&hub, 1);
        let mine = hub.newest().0;
        told(&hub, KEPT as u64 + 5);
        let read = hub.read(mine, 10, None);
        assert_eq!(lost(&read), Some(&Some(5)));
        assert_eq!(read.events[1].id, mine + 6);
        assert_eq!(read.events[0].id, mine + 5, "whoever resumes after the hole loses nothing more");
        assert_eq!(lost(&hub.read(read.after, 10, None)), None);
        assert_eq!(hub.lock().ring.len(), KEPT);
    }

    #[test]
    fn a_reader_of_a_controller_before_this_one_is_told_that_it_may_have_lost_some() {
        let before = Hub::new(1000);
        told(&before, 3);
        let hub = Hub::new(1001);
        told(&hub, 2);
        let read = hub.read(before.newest().0, 10, None);
        assert_eq!(lost(&read), Some(&None));
        assert_eq!(read.events.len(), 3);
        let future = hub.read(u64::MAX - 1, 10, None);
        assert_eq!((lost(&future), future.events.len()), (Some(&None), 3));
        assert_eq!(lost(&hub.read(0, 10, None)), None, "0 asks for what is kept");
    }

    #[test]
    fn a_hub_without_events_can_be_read_from_anywhere() {
        let hub = Hub::new(1000);
        assert_eq!(hub.read(0, 10, None).events, vec![]);
        assert_eq!(hub.read(hub.newest().0, 10, None).events, vec![]);
        assert_eq!(lost(&hub.read(7, 10, None)), Some(&None));
        let after = hub.read(7, 10, None).after;
        assert_eq!(hub.read(after, 10, None).events, vec![]);
    }

    #[test]
    fn a_domain_reads_its_own_events_and_what_is_everybodys_and_its_place_goes_on_over_others() {
        let hub = Hub::new(1000);
        let (acme, beta): (Name, Name) = ("acme".parse().unwrap(), "beta".parse().unwrap());
        hub.lock().domains.insert("web".parse().unwrap(), acme.clone());
        let vm = |name: &str| name.parse::<Name>().unwrap();
        hub.tell(Happening::VmChanged { vm: vm("web") });
        hub.tell(Happening::VmChanged { vm: vm("ours") });
        hub.tell(Happening::HostReachable { host: vm("ohio") });
        told(&hub, 1);
        hub.tell_of(&vm("web"), Happening::VolumeRemoved { volume: vm("root") });
        let kinds = |domain| hub.read(0, 64, domain).events.iter().map(|e| e.what.kind()).collect::<Vec<_>>();
        assert_eq!(kinds(Some(&acme)), ["vm-changed", "site-added", "volume-removed"]);
        assert_eq!(kinds(Some(&beta)), ["site-added"]);
        assert_eq!(kinds(None).len(), 5);
        let after = hub.read(0, 64, Some(&beta)).after;
        assert_eq!(after, hub.newest().0, "what was not for it is behind it");
        told(&hub, KEPT as u64 + 5);
        assert_eq!(lost(&hub.read(after, 10, Some(&beta))), Some(&None), "how many others had is not told");
        let hub = Arc::new(hub);
        let places: Vec<Place> = std::iter::from_fn(|| hub.place_of(&acme)).collect();
        assert_eq!(places.len(), MOST_OF_A_DOMAIN);
        assert!(hub.place_of(&beta).is_some());
        drop(places);
        assert!(hub.lock().reading.is_empty() && hub.place_of(&acme).is_some());
    }
}
