//! Extenders: which sites are joined, which hosts carry, and that all nodes know.
//!
//! A record says what is wanted and what was given out: numbers, ports, public keys. Each node of the sites is told all that it has to
//! know, every [`REFRESH`](crate::REFRESH) and whenever something changes, and answers with how it stands; so nothing here has steps,
//! and what a crash leaves out the next round does. Which tunnel frames take the nodes decide without asking ([`godwit_api::extender`]).
//!
//! What is to be so follows from the record, the hosts and their word alone: [`plan`].

mod plan;

use crate::rights::Caller;
use crate::state::{Controller, HostRecord, conflict, invalid, missing};
use crate::store::{Change, Counter, Kind};
use axum::Json;
use axum::extract::{Extension, Path, State};
use godwit_api::extender::{
    Carried, ConnectExtender, DisconnectExtender, Extender, ExtenderOffer, ExtenderOrders, ExtenderState, HostWay,
    LocalExtender, LocalExtenders, LocalTunnel,
};
use godwit_api::host::PeerHost;
use godwit_api::{ApiError, Name, Problem, done};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};
use tokio::task::JoinSet;

type Answer<T> = Result<Json<T>, ApiError>;
type Shared = State<Arc<Controller>>;

/// Times that hosts are told within one look: keys that some make others have to hear of.
const ROUNDS: usize = 3;

/// An extender, as it is stored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExtenderRecord {
    /// Its number, for ever.
    pub id: u32,
    /// Its sites, in order of their names.
    pub sites: [Name; 2],
    /// How far it has got.
    pub state: ExtenderState,
    /// All hosts of the deployment, as they were found last: one that is away is not forgotten.
    #[serde(default)]
    pub known: BTreeMap<Name, KnownHost>,
    /// The hosts of either site that carry, the preferred first.
    #[serde(default)]
    pub carriers: [Vec<Name>; 2],
    /// What was given out.
    #[serde(default)]
    pub tunnels: Vec<TunnelRecord>,
    /// When tunnels with new keys were ordered last, seconds since 1970.
    pub keys_unix_s: u64,
    /// New keys are wanted now.
    #[serde(default)]
    pub rotate: bool,
}

/// A host, as it was found last.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KnownHost {
    /// Its site.
    pub site: Name,
    /// Where its node is.
    pub peer: PeerHost,
    /// Whether it can carry.
    pub offer: Option<ExtenderOffer>,
}

/// A tunnel, as it is stored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TunnelRecord {
    /// Its number, for ever.
    pub id: u32,
    /// Counts those between the same hosts.
    pub epoch: u32,
    /// Its ends, in the sites' order.
    pub ends: [TunnelEnd; 2],
    /// Another one with new keys is wanted in its place, as soon as its hosts can make it.
    #[serde(default)]
    pub renew: bool,
}

/// A tunnel's end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TunnelEnd {
    /// Its host.
    pub host: Name,
    /// Which of the host's ports, counted from the one that it names.
    pub slot: u16,
    /// Its public key, once the host has made one.
    pub key: Option<String>,
}

/// What the nodes said last.
#[derive(Debug, Default)]
pub struct Said {
    local: Mutex<BTreeMap<Name, LocalExtenders>>,
    /// Hosts that were told of some, and have not been told of none since.
    told: Mutex<BTreeSet<Name>>,
    /// Hosts are told by one at a time, so what is told later is later.
    telling: tokio::sync::Mutex<()>,
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn now_unix_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

fn all(c: &Controller) -> Result<Vec<ExtenderRecord>, ApiError> {
    let mut all: Vec<ExtenderRecord> = c.store.read_all(Kind::Extender)?;
    all.sort_by_key(|record| record.id);
    Ok(all)
}

fn put(record: &ExtenderRecord) -> Change {
    Change::put(Kind::Extender, record.id, record)
}

fn pair(a: Name, b: Name) -> [Name; 2] {
    if a <= b { [a, b] } else { [b, a] }
}

fn find(c: &Controller, a: &Name, b: &Name) -> Result<ExtenderRecord, ApiError> {
    let sites = pair(a.clone(), b.clone());
    all(c)?.into_iter().find(|record| record.sites == sites).ok_or_else(|| {
        ApiError::new(Problem::NotFound, format!("`{a}` and `{b}` have no extender"))
            .remedy("`godwit extender ls` lists what there is")
    })
}

fn number(c: &Controller) -> Result<u32, ApiError> {
    u32::try_from(c.store.next(Counter::Extender)?)
        .map_err(|_| ApiError::new(Problem::Failed, "all numbers for extenders have been used"))
}

/// Joins two sites.
pub async fn connect(State(c): Shared, Json(new): Json<ConnectExtender>) -> Answer<Extender> {
    let sites = pair(new.a, new.b);
    if sites[0] == sites[1] {
        return Err(invalid(format!("`{}` needs no tunnel to itself", sites[0])));
    }
    let Found { known, .. } = look_at_hosts(&c).await?;
    let id = {
        let _deciding = c.decide();
        for site in &sites {
            if c.store.get(Kind::Site, site.as_str())?.is_none() {
                return Err(missing("site", site));
            }
        }
        if all(&c)?.iter().any(|record| record.sites == sites) {
            let [a, b] = &sites;
            return Err(conflict(format!("`{a}` and `{b}` have an extender already"))
                .remedy(format!("`godwit extender show {a} {b}` says how it stands")));
        }
        let record = ExtenderRecord {
            id: number(&c)?,
            sites,
            state: ExtenderState::Connecting,
            known,
            carriers: [vec![], vec![]],
            tunnels: vec![],
            keys_unix_s: now_unix_s(),
            rotate: false,
        };
        // Refused before anything is told: the frames of wires would have no way.
        if let Some(why) = plan::hindrance(&record) {
            return Err(conflict(why).remedy(
                "start nodes of both sites with `--extender IP:PORT`; behind an address translation, on one side, with `--extender outbound`",
            ));
        }
        c.store.commit(&[put(&record)])?;
        record.id
    };
    // Goes on when whoever asked hangs up.
    let task = {
        let c = Arc::clone(&c);
        tokio::spawn(async move { tend(&c).await })
    };
    task.await.map_err(|e| ApiError::new(Problem::Failed, format!("connecting broke off: {e}")))??;
    let record: Option<ExtenderRecord> = c.store.read(Kind::Extender, id)?;
    Ok(Json(shown(&c, &record.ok_or_else(|| missing("extender", id))?)))
}

/// Parts two sites.
pub async fn disconnect(
    State(c): Shared,
    Extension(who): Extension<Caller>,
    Path((a, b)): Path<(Name, Name)>,
    Json(how): Json<DisconnectExtender>,
) -> Answer<Value> {
    let id = {
        let _deciding = c.decide();
        let record = find(&c, &a, &b)?;
        if !how.clear
            && let Some(wire) = crate::wires::between(&c, &who, |host| site_of(&record, host), &record.sites)?
        {
            return Err(conflict(format!("{wire} would go in clear between `{a}` and `{b}` without the extender"))
                .remedy("disconnect the wire or move an end first, or say `--clear`"));
        }
        let record = ExtenderRecord { state: ExtenderState::Disconnecting, ..record };
        c.store.commit(&[put(&record)])?;
        record.id
    };
    tend(&c).await?;
    if c.store.get(Kind::Extender, &id.to_string())?.is_some() {
        return Err(ApiError::new(Problem::Unreachable, "not all hosts of the two sites have forgotten the extender")
            .remedy("see that they can be reached; it goes when they have"));
    }
    Ok(done())
}

/// New keys.
pub async fn rotate(State(c): Shared, Path((a, b)): Path<(Name, Name)>) -> Answer<Extender> {
    find(&c, &a, &b)?;
    // What was said at the last round is seconds old, and nothing was said to a controller that has just started.
    tend(&c).await?;
    {
        let _deciding = c.decide();
        let record = find(&c, &a, &b)?;
        if let Some(why) = hinders_rotation(&c, &record) {
            return Err(conflict(why).remedy("`godwit extender show` says how far it is, and which hosts are silent"));
        }
        c.store.commit(&[put(&ExtenderRecord { rotate: true, ..record })])?;
    }
    tend(&c).await?;
    Ok(Json(shown(&c, &find(&c, &a, &b)?)))
}

/// Why no two hosts can begin to make new keys.
fn hinders_rotation(c: &Controller, record: &ExtenderRecord) -> Option<&'static str> {
    let said = lock(&c.extenders.local);
    let says = |host: &Name, of: u32| tunnel(&said, host, record.id, of).cloned();
    let can = !record.rotate && plan::can_rotate(record, &says);
    let rotates = record.rotate || plan::is_rotating(record);
    let why = if rotates { "its keys are being rotated already" } else { "of none of its tunnels both hosts answer" };
    (!can).then_some(why)
}

/// All of them.
pub async fn list(State(c): Shared) -> Answer<Vec<Extender>> {
    // What was said at the last round is seconds old; ask.
    tend(&c).await?;
    Ok(Json(all(&c)?.iter().map(|record| shown(&c, record)).collect()))
}

/// One of them.
pub async fn show(State(c): Shared, Path((a, b)): Path<(Name, Name)>) -> Answer<Extender> {
    find(&c, &a, &b)?;
    tend(&c).await?;
    Ok(Json(shown(&c, &find(&c, &a, &b)?)))
}

fn site_of(record: &ExtenderRecord, host: &Name) -> Option<Name> {
    record.known.get(host).map(|known| known.site.clone())
}

/// The extender that carries what two hosts send to each other.
///
/// # Errors
/// The store's.
pub fn carried(c: &Controller, hosts: [&Name; 2]) -> Result<Option<Carried>, ApiError> {
    for record in all(c)?.into_iter().filter(|record| record.state != ExtenderState::Disconnecting) {
        let [Some(a), Some(b)] = hosts.map(|host| site_of(&record, host)) else { continue };
        if a != b && record.sites == pair(a, b) {
            let said = lock(&c.extenders.local);
            let up = hosts.iter().all(|host| local(&said, host, record.id).is_some_and(|local| local.good));
            return Ok(Some(Carried { sites: record.sites, up }));
        }
    }
    Ok(None)
}

fn local<'a>(said: &'a BTreeMap<Name, LocalExtenders>, host: &Name, id: u32) -> Option<&'a LocalExtender> {
    said.get(host)?.extenders.iter().find(|local| local.id == id)
}

fn tunnel<'a>(said: &'a BTreeMap<Name, LocalExtenders>, host: &Name, id: u32, tunnel: u32) -> Option<&'a LocalTunnel> {
    local(said, host, id)?.tunnels.iter().find(|local| local.id == tunnel)
}

fn shown(c: &Controller, record: &ExtenderRecord) -> Extender {
    let said = lock(&c.extenders.local);
    let tunnels = plan::tunnels(record, |host, id| tunnel(&said, host, record.id, id).cloned());
    let mine = record.known.iter().filter(|(_, known)| record.sites.contains(&known.site)).map(|(host, _)| host);
    let ways = mine.filter_map(|host| {
        let local = local(&said, host, record.id)?;
        let LocalExtender { way, good, since_unix_s, changes, .. } = local.clone();
        Some(HostWay { host: host.clone(), way, good, since_unix_s, changes })
    });
    Extender {
        id: record.id,
        sites: record.sites.clone(),
        state: record.state,
        up: tunnels.iter().any(plan::is_up),
        problems: plan::problems(record, &tunnels, |host| {
            local(&said, host, record.id).map(|local| local.error.clone())
        }),
        carriers: record.carriers.clone(),
        ways: ways.collect(),
        keys_unix_s: record.keys_unix_s,
        tunnels,
    }
}

/// Hosts, as they are found.
struct Found {
    /// Those that answer, and what is remembered of those that do not.
    known: BTreeMap<Name, KnownHost>,
    /// Why some do not.
    silent: BTreeMap<Name, ApiError>,
}

async fn look_at_hosts(c: &Arc<Controller>) -> Result<Found, ApiError> {
    let mut asking = JoinSet::new();
    let hosts = c.hosts()?;
    for host in hosts.clone() {
        let node = c.node(&host);
        asking.spawn(async move { (host, node.facts().await) });
    }
    let mut known = BTreeMap::new();
    for record in all(c)? {
        known.extend(record.known);
    }
    known.retain(|name, _| hosts.iter().any(|host| &host.name == name));
    let mut silent = BTreeMap::new();
    for (host, facts) in asking.join_all().await {
        match facts {
            Ok(facts) => {
                let peer = PeerHost { name: host.name.clone(), link: facts.link, underlay: facts.underlay };
                known.insert(host.name, KnownHost { site: host.site, peer, offer: facts.extender });
            }
            Err(error) => {
                silent.insert(host.name, error);
            }
        }
    }
    Ok(Found { known, silent })
}

/// Tells the nodes of all sites with extenders what they have to know, and hears how that stands.
///
/// # Errors
/// The store's.
pub async fn tend(c: &Arc<Controller>) -> Result<(), ApiError> {
    let _one = c.extenders.telling.lock().await;
    if all(c)?.is_empty() && lock(&c.extenders.told).is_empty() {
        return Ok(());
    }
    for _ in 0..ROUNDS {
        if !round(c).await? {
            break;
        }
    }
    for record in all(c)?.iter().filter(|record| record.state != ExtenderState::Disconnecting) {
        c.events.note_extender(&shown(c, record));
    }
    Ok(())
}

/// As [`tend`], once; whether something has changed that others have to hear.
async fn round(c: &Arc<Controller>) -> Result<bool, ApiError> {
    let Found { known, mut silent } = look_at_hosts(c).await?;
    let records = settle(c, &known)?;
    let sites: BTreeSet<&Name> = records.iter().flat_map(|record| &record.sites).collect();
    let told = lock(&c.extenders.told).clone();
    let mut telling = JoinSet::new();
    for host in c.hosts()?.into_iter().filter(|host| sites.contains(&host.site) || told.contains(&host.name)) {
        let orders = plan::orders(&host.name, &host.site, &records, &known);
        lock(&c.extenders.told).insert(host.name.clone());
        let (node, silent) = (c.node(&host), silent.remove(&host.name));
        telling.spawn(async move {
            // An order may take long where there is much to do; so whoever does not even say what it is, is not waited for.
            let answer = match silent {
                Some(error) => Err(error),
                None => node.order_extenders(&orders).await,
            };
            (host, orders, answer)
        });
    }
    let answers = telling.join_all().await;
    hear(c, &answers);
    take_in(c, &answers)
}

/// The records as they are to be now.
fn settle(c: &Controller, known: &BTreeMap<Name, KnownHost>) -> Result<Vec<ExtenderRecord>, ApiError> {
    let _deciding = c.decide();
    let said = lock(&c.extenders.local).clone();
    let mut records = all(c)?;
    for i in 0..records.len() {
        let (mut record, used) = (records[i].clone(), plan::slots(&records));
        let id = record.id;
        let says = |host: &Name, of: u32| tunnel(&said, host, id, of).cloned();
        plan::settle(&mut record, known, &says, used, now_unix_s(), &mut || number(c))?;
        if record != records[i] {
            c.store.commit(&[put(&record)])?;
            records[i] = record;
        }
    }
    Ok(records)
}

type Told = (HostRecord, ExtenderOrders, Result<LocalExtenders, ApiError>);

/// Remembers what the hosts said; of those that did not, nothing.
fn hear(c: &Controller, answers: &[Told]) {
    let (mut said, mut told) = (lock(&c.extenders.local), lock(&c.extenders.told));
    for (host, orders, answer) in answers {
        match answer {
            Ok(local) => {
                said.insert(host.name.clone(), local.clone());
                if orders.extenders.is_empty() {
                    told.remove(&host.name);
                    said.remove(&host.name);
                }
            }
            Err(error) => {
                tracing::warn!(host = %host.name, %error, "it cannot be told of extenders yet; trying again later");
                said.remove(&host.name);
            }
        }
    }
}

/// Writes down the keys that hosts have made, and how far each extender has got. Whether there are new keys.
fn take_in(c: &Controller, answers: &[Told]) -> Result<bool, ApiError> {
    let _deciding = c.decide();
    let (mut changes, mut news) = (vec![], false);
    for record in all(c)? {
        let mut now = record.clone();
        for (host, _, answer) in answers {
            let Ok(local) = answer else { continue };
            let mine = local.extenders.iter().filter(|local| local.id == record.id).flat_map(|local| &local.tunnels);
            for said in mine {
                let tunnel = now.tunnels.iter_mut().find(|tunnel| tunnel.id == said.id);
                let end = tunnel.and_then(|tunnel| tunnel.ends.iter_mut().find(|end| end.host == host.name));
                if let Some(end) = end
                    && end.key.as_ref() != Some(&said.key)
                {
                    end.key = Some(said.key.clone());
                    news = true;
                }
            }
        }
        let mut of_sites = answers.iter().filter(|(host, ..)| record.sites.contains(&host.site));
        let heard = of_sites.all(|(.., answer)| answer.is_ok());
        match record.state {
            ExtenderState::Disconnecting if heard => {
                changes.push(Change::remove(Kind::Extender, record.id));
                continue;
            }
            ExtenderState::Connecting if heard => now.state = ExtenderState::Connected,
            _ => {}
        }
        if now != record {
            changes.push(put(&now));
        }
    }
    if !changes.is_empty() {
        c.store.commit(&changes)?;
    }
    Ok(news)
}
