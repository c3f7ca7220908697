//! Wires between ports: connected, shown, and taken away.
//!
//! A wire is recorded before a node hears of it, and removed from the records when every host has forgotten it: what a crash or an
//! unreachable host has left half done, [`sweep`] finishes. Where the ends are the nodes tell each other; the controller tells them
//! the same whenever it knows of another owner than it told them before, for the sake of those who could not.
//!
//! What hosts have is held against the records as well. A wire that the host of an end does not know, as after its file was torn, is told it
//! again. One of which there is no record is taken away: it was connected by an order that was late, or its host was away, and no host any more,
//! when it was disconnected. And a host that waits for the answer of one that there is not any more is told where the ends are: then it need not.
//!
//! An end is found by [`find_end`]: whatever has ports is to be looked up there.

use crate::components::ComponentRecord;
use crate::record::VmRecord;
use crate::rights::Caller;
use crate::state::{Controller, HostRecord, conflict, invalid, missing};
use crate::store::{Change, Counter, Kind};
use crate::vms::{VNI_BITS, wire_number};
use axum::Json;
use axum::extract::{Extension, Path, State};
use futures_util::future::join_all;
use godwit_api::capture::{CaptureHere, CaptureWire, HostCapture, LONGEST_CAPTURE_MS, MOST_ALSO};
use godwit_api::host::PeerHost;
use godwit_api::vm::ETHERNET_MTU;
use godwit_api::wire::{
    ConnectWire, EndView, EndWord, LocalWire, MOST_REWIRED, OrderedEnd, PlacedEnd, PortWire, Rewire, WireEnd,
    WireOrder, WirePath, WireState,
};
use godwit_api::{ApiError, Name, Problem, done};
use godwit_units::{Generation, Lineage};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

type Answer<T> = Result<Json<T>, ApiError>;
type Shared = State<Arc<Controller>>;

/// A wire, as it is stored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WireRecord {
    /// Its number, for ever.
    pub id: u32,
    /// Its tunnel's, while it exists.
    pub vni: u32,
    /// What its interfaces carry, bytes.
    pub mtu: u16,
    /// Its ends, by name.
    pub ends: [WireEnd; 2],
    /// Their endpoint numbers.
    pub endpoints: [u32; 2],
    /// How far it has got.
    pub state: WireState,
    /// The owners that the hosts of its ends were told of last.
    #[serde(default)]
    pub told: Option<[(Name, Lineage, Generation); 2]>,
    /// Where these hosts were then.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hosts: Vec<PeerHost>,
}

/// A port that is there to be wired.
struct Port {
    endpoint: u32,
    mtu: u16,
    mac: Option<String>,
    ips: Vec<std::net::IpAddr>,
    host: Name,
    lineage: Lineage,
    generation: Generation,
    /// What it is wired to by its own object's specification.
    fixed: Option<Name>,
}

impl Port {
    fn owner(&self) -> (Name, Lineage, Generation) {
        (self.host.clone(), self.lineage, self.generation)
    }
}

/// The port that an end names, if it is the caller's to see.
fn find_end(c: &Controller, who: Option<&Caller>, end: &WireEnd) -> Result<Port, ApiError> {
    let components = crate::components::records(c)?;
    let mine = |component: &&ComponentRecord| {
        component.definition.name == end.object && who.is_none_or(|who| crate::components::sees(who, component))
    };
    if let Some(component) = components.iter().find(mine) {
        return component_port(component, end);
    }
    let vms = c.vm_records()?;
    let mine = |vm: &&VmRecord| vm.definition.name == end.object && who.is_none_or(|who| who.sees(vm));
    let vm = vms.iter().find(mine).ok_or_else(|| missing("VM", &end.object))?;
    let ports = vm.definition.spec.ports();
    let index = ports.iter().position(|port| port == &end.port).ok_or_else(|| {
        let has: Vec<String> = ports.iter().map(ToString::to_string).collect();
        let message = format!("`{}` has no port `{}`", end.object, end.port);
        ApiError::new(Problem::NotFound, message).remedy(format!("it has: {}", has.join(", ")))
    })?;
    let (nic, wire) = (&vm.definition.spec.nics[index], &vm.definition.wires[index]);
    Ok(Port {
        endpoint: wire.id,
        mtu: nic.mtu(),
        mac: Some(nic.mac.clone()),
        ips: nic.ips.clone(),
        host: vm.host.clone(),
        lineage: vm.lineage,
        generation: vm.generation,
        fixed: nic.component.clone(),
    })
}

/// A port of a component that Godwit makes. Nobody is announced there: what is behind it speaks for itself.
fn component_port(component: &ComponentRecord, end: &WireEnd) -> Result<Port, ApiError> {
    let endpoints = &component.definition.endpoints;
    let number = end.port.as_str().strip_prefix('p').and_then(|number| number.parse::<usize>().ok());
    let index = number.and_then(|number| number.checked_sub(1)).filter(|index| *index < endpoints.len());
    let index = index.ok_or_else(|| {
        let message = format!("`{}` has no port `{}`", end.object, end.port);
        ApiError::new(Problem::NotFound, message).remedy(format!("it has: p1 to p{}", endpoints.len()))
    })?;
    Ok(Port {
        endpoint: endpoints[index],
        mtu: component.mtus.get(index).copied().unwrap_or(ETHERNET_MTU),
        mac: None,
        ips: vec![],
        host: component.host.clone(),
        lineage: component.lineage,
        generation: component.generation,
        fixed: None,
    })
}

fn records(c: &Controller) -> Result<Vec<WireRecord>, ApiError> {
    let mut wires: Vec<WireRecord> = c.store.read_all(Kind::Wire)?;
    wires.sort_by_key(|wire| wire.id);
    Ok(wires)
}

/// The wire of that number, if both its ends are the caller's to see.
fn find(c: &Controller, who: &Caller, id: u32) -> Result<WireRecord, ApiError> {
    let record: Option<WireRecord> = c.store.read(Kind::Wire, id)?;
    record.filter(|record| sees(c, who, record)).ok_or_else(|| missing("wire", id))
}

fn sees(c: &Controller, who: &Caller, record: &WireRecord) -> bool {
    who.domain().is_none() || record.ends.iter().all(|end| find_end(c, Some(who), end).is_ok())
}

/// A number for a wire's tunnel that no other has, nor one of `fresh`: of those that wires to gateways use, too.
fn tunnel_number(c: &Controller, id: u32, fresh: &[WireRecord]) -> Result<u32, ApiError> {
    let mut taken: BTreeSet<u32> = records(c)?.iter().chain(fresh).map(|wire| wire.vni).collect();
    for vm in c.vm_records()? {
        taken.extend(vm.definition.wires.iter().filter(|w| w.gateway.is_some()).map(|w| w.id & VNI_BITS));
    }
    let first = id & VNI_BITS;
    let free = (first..=VNI_BITS).chain(1..first).find(|vni| *vni != 0 && !taken.contains(vni));
    free.ok_or_else(|| conflict("all numbers for tunnels are in use"))
}

/// The record of a wire that may be made when those of `going` are gone. `fresh` are recorded together with it.
fn admit(
    c: &Controller,
    who: &Caller,
    wanted: ConnectWire,
    going: &BTreeSet<u32>,
    fresh: &[WireRecord],
) -> Result<WireRecord, ApiError> {
    let ends = [wanted.a, wanted.b];
    if ends[0] == ends[1] {
        return Err(invalid(format!("`{}` cannot be wired to itself", ends[0])));
    }
    let ports = [find_end(c, Some(who), &ends[0])?, find_end(c, Some(who), &ends[1])?];
    let stored = records(c)?;
    for (end, port) in ends.iter().zip(&ports) {
        if let Some(component) = &port.fixed {
            return Err(conflict(format!("`{end}` is wired to `{component}`"))
                .remedy("wires take interfaces that were created without a component"));
        }
        let mut others = stored.iter().filter(|wire| !going.contains(&wire.id)).chain(fresh);
        if let Some(wire) = others.find(|wire| wire.endpoints.contains(&port.endpoint)) {
            return Err(conflict(format!("`{end}` is wired already: {} to {}", wire.ends[0], wire.ends[1]))
                .remedy(format!("`godwit wire disconnect {} {}` first", wire.ends[0], wire.ends[1])));
        }
    }
    if ports[0].mtu != ports[1].mtu {
        let (a, b) = (ports[0].mtu, ports[1].mtu);
        let message = format!("`{}` has an MTU of {a}, `{}` of {b}: what is too large would be lost", ends[0], ends[1]);
        return Err(conflict(message).remedy("give both the same MTU"));
    }
    let id = wire_number(c)?;
    Ok(WireRecord {
        id,
        vni: tunnel_number(c, id, fresh)?,
        mtu: ports[0].mtu,
        endpoints: [ports[0].endpoint, ports[1].endpoint],
        ends,
        state: WireState::Connecting,
        told: None,
        hosts: vec![],
    })
}

/// Joins two ports.
pub async fn connect(
    State(c): Shared,
    Extension(who): Extension<Caller>,
    Json(new): Json<ConnectWire>,
) -> Answer<PortWire> {
    let record = {
        let _deciding = c.decide();
        let record = admit(&c, &who, new, &BTreeSet::new(), &[])?;
        c.store.commit(&[Change::put(Kind::Wire, record.id, &record)])?;
        record
    };
    // Goes on when whoever asked hangs up.
    let id = record.id;
    let task = {
        let c = Arc::clone(&c);
        tokio::spawn(async move { make(&c, &record).await })
    };
    if let Err(error) = task.await {
        tracing::error!(wire = id, %error, "connecting broke off");
    }
    let record = find(&c, &who, id)?;
    Ok(Json(shown(&c, &record, BTreeMap::new())?))
}

/// Tells of a new wire; whom it does not reach now, [`sweep`] does.
async fn make(c: &Controller, record: &WireRecord) {
    if let Err(error) = tell(c, record, &BTreeSet::new()).await {
        tracing::warn!(wire = record.id, %error, "not all hosts know the wire yet; trying again later");
    }
}

/// Makes wires and takes others away. Recorded in one transaction, so a controller that dies has all of it before it, or nothing.
pub async fn rewire(
    State(c): Shared,
    Extension(who): Extension<Caller>,
    Json(change): Json<Rewire>,
) -> Answer<Vec<PortWire>> {
    if change.connect.len().max(change.disconnect.len()) > MOST_REWIRED {
        return Err(invalid(format!("more than {MOST_REWIRED} wires at once"))
            .remedy(format!("change {MOST_REWIRED} at a time")));
    }
    let (going, fresh) = {
        let _deciding = c.decide();
        let numbers: BTreeSet<u32> = change.disconnect.into_iter().collect();
        let going = numbers.iter().map(|id| find(&c, &who, *id)).collect::<Result<Vec<_>, _>>()?;
        if let Some(pair) = &change.unless_joined {
            let joins = |wire: &&WireRecord| pair.iter().all(|name| wire.ends.iter().any(|end| &end.object == name));
            if let Some(wire) = records(&c)?.iter().filter(|wire| !numbers.contains(&wire.id)).find(joins) {
                let (a, b) = (&wire.ends[0], &wire.ends[1]);
                return Err(conflict(format!("`{}` and `{}` are joined already: {a} to {b}", pair[0], pair[1]))
                    .remedy("look at what there is now, and ask again"));
            }
        }
        let mut fresh = vec![];
        for wanted in change.connect {
            fresh.push(admit(&c, &who, wanted, &numbers, &fresh)?);
        }
        let going: Vec<WireRecord> =
            going.into_iter().map(|wire| WireRecord { state: WireState::Disconnecting, ..wire }).collect();
        let changes: Vec<Change> =
            going.iter().chain(&fresh).map(|wire| Change::put(Kind::Wire, wire.id, wire)).collect();
        c.store.commit(&changes)?;
        (going, fresh)
    };
    let made: Vec<u32> = fresh.iter().map(|wire| wire.id).collect();
    let task = {
        let c = Arc::clone(&c);
        tokio::spawn(async move { exchange(&c, &going, &fresh).await })
    };
    if let Err(error) = task.await {
        tracing::error!(%error, "rewiring broke off");
    }
    let shown = |id: u32| shown(&c, &find(&c, &who, id)?, BTreeMap::new());
    made.into_iter().map(shown).collect::<Result<Vec<_>, ApiError>>().map(Json)
}

/// First wires that take nobody's place, then each of those that do, and last what nothing takes the place of: where two switches are joined,
/// frames pass between them as long as there is something on the other one.
async fn exchange(c: &Controller, going: &[WireRecord], fresh: &[WireRecord]) {
    let gives_way = |old: &WireRecord, new: &WireRecord| old.endpoints.iter().any(|end| new.endpoints.contains(end));
    let (replacing, first): (Vec<_>, Vec<_>) =
        fresh.iter().partition(|new| going.iter().any(|old| gives_way(old, new)));
    for new in first {
        make(c, new).await;
    }
    for new in replacing {
        // Where the new one's ends are, so that the guest is without a wire for no longer than that takes.
        let hosts: BTreeSet<Name> =
            new.ends.iter().filter_map(|end| find_end(c, None, end).ok()).map(|port| port.host).collect();
        for old in going.iter().filter(|old| gives_way(old, new)) {
            let nodes = hosts.iter().filter_map(|host| c.node_of(host).ok());
            // What is not heard there is said again below.
            join_all(nodes.map(|node| async move { node.disconnect(old.id).await })).await;
        }
        make(c, new).await;
    }
    for old in going {
        if let Err(error) = take_away(c, old).await {
            tracing::warn!(wire = old.id, %error, "not all hosts have forgotten the wire yet; trying again later");
        }
    }
}

/// Isolates both ends.
pub async fn disconnect(State(c): Shared, Extension(who): Extension<Caller>, Path(id): Path<u32>) -> Answer<Value> {
    let record = {
        let _deciding = c.decide();
        let record = WireRecord { state: WireState::Disconnecting, ..find(&c, &who, id)? };
        c.store.commit(&[Change::put(Kind::Wire, id, &record)])?;
        record
    };
    let task = {
        let c = Arc::clone(&c);
        tokio::spawn(async move { take_away(&c, &record).await })
    };
    task.await.map_err(|e| ApiError::new(Problem::Failed, format!("disconnecting broke off: {e}")))??;
    Ok(done())
}

/// All wires between ports.
pub async fn list(State(c): Shared, Extension(who): Extension<Caller>) -> Answer<Vec<PortWire>> {
    let mine = records(&c)?.into_iter().filter(|record| sees(&c, &who, record));
    let wires: Result<Vec<PortWire>, ApiError> = mine.map(|record| shown(&c, &record, BTreeMap::new())).collect();
    Ok(Json(wires?))
}

/// One of them, with what the hosts of its ends say.
pub async fn show(State(c): Shared, Extension(who): Extension<Caller>, Path(id): Path<u32>) -> Answer<PortWire> {
    let record = find(&c, &who, id)?;
    // Whether its extender works is asked, too.
    crate::extenders::tend(&c).await?;
    let mut said = BTreeMap::new();
    for end in &record.ends {
        if let Ok(port) = find_end(&c, None, end)
            && let Ok(node) = c.node_of(&port.host)
            && let Ok(local) = node.wire(id).await
        {
            said.insert(port.host, local);
        }
    }
    Ok(Json(shown(&c, &record, said)?))
}

/// Records what passes it, at the hosts of its ends at the same time: once where that is one host; and where ends may come meanwhile.
pub async fn capture(
    State(c): Shared,
    Extension(who): Extension<Caller>,
    Path(id): Path<u32>,
    Json(asked): Json<CaptureWire>,
) -> Answer<Vec<HostCapture>> {
    let record = find(&c, &who, id)?;
    if !(1..=LONGEST_CAPTURE_MS).contains(&asked.for_ms) {
        return Err(invalid(format!("`for_ms` is {}; it takes 1 to {LONGEST_CAPTURE_MS}", asked.for_ms)));
    }
    if asked.also.len() > MOST_ALSO {
        return Err(invalid(format!("`also` has {} hosts; {MOST_ALSO} are the most", asked.also.len())));
    }
    let mut hosts: Vec<Name> = vec![];
    for end in &record.ends {
        let host = find_end(&c, None, end)?.host;
        if !hosts.contains(&host) {
            hosts.push(host);
        }
    }
    let now = hosts.len();
    for host in asked.also {
        if !hosts.contains(&host) {
            hosts.push(host);
        }
    }
    let nodes = hosts.iter().map(|host| c.node_of(host)).collect::<Result<Vec<_>, _>>()?;
    let for_ms = asked.for_ms;
    let asking = nodes
        .iter()
        .enumerate()
        .map(|(i, node)| async move { node.capture_wire(id, &CaptureHere { for_ms, awaits: i >= now }).await });
    let answers = join_all(asking).await;
    let with_host = |(host, answer): (Name, Result<_, ApiError>)| Ok(HostCapture { host, capture: answer? });
    hosts.into_iter().zip(answers).map(with_host).collect::<Result<_, ApiError>>().map(Json)
}

fn shown(c: &Controller, record: &WireRecord, said: BTreeMap<Name, LocalWire>) -> Result<PortWire, ApiError> {
    let placed = |i: usize| -> Result<PlacedEnd, ApiError> {
        let host = find_end(c, None, &record.ends[i])?.host;
        let endpoint = record.endpoints[i];
        let local = said.get(&host).map(|said| EndWord {
            open: said.open.contains(&endpoint),
            remotes: said.remotes.clone(),
            untold: said.untold.clone(),
        });
        Ok(PlacedEnd { end: record.ends[i].clone(), endpoint, host, local })
    };
    let ends = [placed(0)?, placed(1)?];
    let path = if ends[0].host == ends[1].host { WirePath::Collapsed } else { WirePath::Tunnel };
    let extender = crate::extenders::carried(c, [&ends[0].host, &ends[1].host])?;
    Ok(PortWire { id: record.id, vni: record.vni, mtu: record.mtu, state: record.state, path, extender, ends })
}

/// Whether a wire is, and stays.
fn stands(c: &Controller, id: u32) -> Result<bool, ApiError> {
    let record: Option<WireRecord> = c.store.read(Kind::Wire, id)?;
    Ok(record.is_some_and(|record| record.state != WireState::Disconnecting))
}

/// Tells the hosts of a wire's ends where these are, and some others, as far as is known here; later word of theirs stays.
async fn tell(c: &Controller, record: &WireRecord, others: &BTreeSet<Name>) -> Result<(), ApiError> {
    let ports = [find_end(c, None, &record.ends[0])?, find_end(c, None, &record.ends[1])?];
    let mut peers: BTreeMap<&Name, PeerHost> = BTreeMap::new();
    let mut hosts: BTreeSet<&Name> = others.iter().collect();
    // One that is away does not keep the other from hearing.
    let mut outcome = Ok(());
    for port in &ports {
        match c.node_of(&port.host)?.facts().await {
            Ok(facts) => {
                let peer = PeerHost { name: port.host.clone(), link: facts.link, underlay: facts.underlay };
                peers.insert(&port.host, peer);
                hosts.insert(&port.host);
            }
            Err(error) => {
                let was = record.hosts.iter().find(|host| host.name == port.host);
                peers.insert(&port.host, was.ok_or_else(|| error.clone())?.clone());
                outcome = Err(error);
            }
        }
    }
    let end = |i: usize| OrderedEnd {
        endpoint: ports[i].endpoint,
        name: record.ends[i].clone(),
        mac: ports[i].mac.clone(),
        ips: ports[i].ips.clone(),
        view: EndView {
            host: peers[&ports[i].host].clone(),
            lineage: ports[i].lineage,
            generation: ports[i].generation,
            step: 0,
            coming: None,
            capability: None,
        },
    };
    let order = WireOrder { id: record.id, vni: record.vni, mtu: record.mtu, ends: [end(0), end(1)] };
    for host in hosts {
        // It may have been disconnected meanwhile. What is under way then is found by `sweep`.
        if !stands(c, record.id)? {
            return Ok(());
        }
        outcome = outcome.and(c.node_of(host)?.connect(&order).await.map(drop));
    }
    outcome?;
    let _deciding = c.decide();
    if let Some(mut now) = c.store.read::<WireRecord>(Kind::Wire, record.id)?
        && now.state != WireState::Disconnecting
    {
        now.state = WireState::Connected;
        now.told = Some([ports[0].owner(), ports[1].owner()]);
        now.hosts = peers.into_values().collect();
        if now != *record {
            c.store.commit(&[Change::put(Kind::Wire, record.id, &now)])?;
        }
    }
    Ok(())
}

/// Takes a wire away at every host, then its record: whoever had an end of it once still knows it.
async fn take_away(c: &Controller, record: &WireRecord) -> Result<(), ApiError> {
    let nodes: Vec<_> = c.hosts()?.iter().map(|host| c.node(host)).collect();
    // At once: one that is away does not keep the others from hearing.
    for answer in join_all(nodes.iter().map(|node| node.disconnect(record.id))).await {
        match answer {
            Err(error) if error.problem != Problem::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(c.store.commit(&[Change::remove(Kind::Wire, record.id)])?)
}

/// A wire between two sites, in words, if there is one.
///
/// # Errors
/// The store's.
pub fn between(
    c: &Controller,
    who: &Caller,
    site: impl Fn(&Name) -> Option<Name>,
    sites: &[Name; 2],
) -> Result<Option<String>, ApiError> {
    for record in records(c)? {
        let hosts = record.ends.each_ref().map(|end| find_end(c, None, end).map(|port| port.host));
        let [Ok(a), Ok(b)] = hosts else { continue };
        let [Some(a), Some(b)] = [site(&a), site(&b)] else { continue };
        if a != b && sites.contains(&a) && sites.contains(&b) && sees(c, who, &record) {
            return Ok(Some(format!("the wire {} to {}", record.ends[0], record.ends[1])));
        }
    }
    Ok(None)
}

/// The wires of an object, by its name: it is not removed while it has any.
///
/// # Errors
/// [`Problem::Conflict`] when there is one; the store's.
pub fn refuse_removal(c: &Controller, object: &Name) -> Result<(), ApiError> {
    let wires = records(c)?;
    let Some(wire) = wires.iter().find(|wire| wire.ends.iter().any(|end| &end.object == object)) else {
        return Ok(());
    };
    let (a, b) = (&wire.ends[0], &wire.ends[1]);
    Err(conflict(format!("`{object}` is wired: {a} to {b}")).remedy(format!("`godwit wire disconnect {a} {b}` first")))
}

/// What hosts have of wires.
struct Found {
    hosts: Vec<HostRecord>,
    /// Of those that answer.
    wires: BTreeMap<Name, Vec<LocalWire>>,
}

impl Found {
    async fn at_hosts(c: &Controller) -> Result<Self, ApiError> {
        let hosts = c.hosts()?;
        let nodes: Vec<_> = hosts.iter().map(|host| c.node(host)).collect();
        let answers = join_all(nodes.iter().map(|node| node.wires())).await;
        let answers = hosts.iter().zip(answers).filter_map(|(host, wires)| Some((host.name.clone(), wires.ok()?)));
        let wires = answers.collect();
        Ok(Self { hosts, wires })
    }

    /// Whether this host says that it does not have it.
    fn lacks(&self, host: &Name, id: u32) -> bool {
        self.wires.get(host).is_some_and(|wires| wires.iter().all(|local| local.wire.id != id))
    }

    /// The hosts that wait for one that there is not any more to know it.
    fn waiting(&self, id: u32) -> BTreeSet<Name> {
        let is_gone = |host: &Name| self.hosts.iter().all(|known| &known.name != host);
        let waits = |local: &LocalWire| local.wire.id == id && local.untold.iter().any(is_gone);
        let waiting = self.wires.iter().filter(|(_, wires)| wires.iter().any(waits));
        waiting.map(|(host, _)| host.clone()).collect()
    }
}

/// Goes on with what was left half done, tells of owners that nobody was told of, and holds what hosts have against the records.
///
/// # Errors
/// The store's.
pub async fn sweep(c: &Arc<Controller>) -> Result<(), ApiError> {
    let found = Found::at_hosts(c).await?;
    // After the hosts were asked: a wire is recorded before any hears of it.
    let records = records(c)?;
    forget(c, &found, &records).await?;
    for record in records {
        let done = if record.state == WireState::Disconnecting {
            take_away(c, &record).await
        } else {
            let now = find_end(c, None, &record.ends[0])
                .and_then(|a| Ok([a.owner(), find_end(c, None, &record.ends[1])?.owner()]));
            let waiting = found.waiting(record.id);
            match now {
                Ok(now)
                    if record.told.as_ref() == Some(&now)
                        && record.state == WireState::Connected
                        && waiting.is_empty()
                        && !now.iter().any(|(host, ..)| found.lacks(host, record.id)) =>
                {
                    Ok(())
                }
                Ok(_) => tell(c, &record, &waiting).await,
                Err(error) => Err(error),
            }
        };
        if let Err(error) = done {
            tracing::warn!(wire = record.id, %error, "a wire is not as it should be yet; trying again later");
        }
    }
    Ok(())
}

/// Takes away what hosts have of wires that there are not any more. A number that this store never gave is another store's.
async fn forget(c: &Controller, found: &Found, records: &[WireRecord]) -> Result<(), ApiError> {
    let last = c.store.last(Counter::Wire)?;
    let gone = |id: &u32| u64::from(*id) <= last && records.iter().all(|record| record.id != *id);
    for host in &found.hosts {
        let has = found.wires.get(&host.name).into_iter().flatten().map(|local| local.wire.id);
        for id in has.filter(gone).collect::<Vec<_>>() {
            let taken = c.node(host).disconnect(id).await.err();
            tracing::warn!(host = %host.name, wire = id, error = ?taken, "it had a wire that there is not any more");
        }
    }
    Ok(())
}
