//! Wires between ports: which end is where, told from node to node, and the kernel made to follow.
//!
//! [`Rehoming`] decides; here is what it needs. Each wire that this host has, or had, an end of is a file; what others say is believed
//! as far as capabilities cover it ([`crate::covered::end`]); and what it says to be told is told until it has been answered, in the
//! background, at most every [`LONGEST_WAIT`] and with nobody's pause waiting for it. The controller is not needed for that.
//!
//! A guest that stands waits for no file. What its node will say at the stop is durable when its place is made at the destination
//! ([`Node::end_staged`]), a wire's lock is not held while its file is written, and where a guest is awaited the disk is left to the
//! records of its hand-off ([`give_way`]).
//!
//! An endpoint is *open* from the grant until its VM stops here. Whoever owns one says so by [`Node::end_opened`] and
//! [`Node::end_closed`], and takes its device away after [`Node::end_removed`]; VMs do by [`Node::activate`] and the like. It does
//! not matter whether it has a wire then: one that is connected later finds it open.
//!
//! # What can go wrong
//!
//! *The other end's node does not answer*: it is asked again, and what it misses is where frames go, not whether this end runs.
//! *A host that has no end any more does not answer*: it is asked again until the controller has told this host as much as it knows. The
//! ends find each other then, and that host may be gone for good.
//! *This host cannot read a wire's file*: it is set aside, what is in the kernel stays, and the controller tells the wire again. *A host that an
//! end has left is asked years later*: it keeps the wire until that is disconnected.
//! *This host was given an end, and gave it back*: whoever believes that it has the end believes nobody else; so it tells them.

mod greet;

use crate::covered;
use crate::durable;
use crate::node::{Node, network};
use crate::parts::{Moving, Parts, lock};
use crate::proto::{self, ProbeWire, Request};
use crate::spec;
use futures_util::future::join_all;
use godwit_api::host::{MoveRole, Ownership, PeerHost};
use godwit_api::wire::{Coming, EndView, LocalWire, OrderedEnd, WireOrder};
use godwit_api::{ApiError, Name, Problem};
use godwit_handoff::{Generation, Lineage, Record};
use godwit_trust::SignedCapability;
use godwit_wire::{
    Component, EndpointId, EndpointSpec, MacAddr, PortWire, Rehoming, Sequence, Side, Stamp, View, Vni, WireId,
};
use greet::Listening;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::sync::Notify;

/// How long another node may take to answer, besides what it was asked to wait.
const ANSWER: Duration = Duration::from_secs(5);
/// The first wait before a node that did not answer is told again: less than a guest notices.
const FIRST_WAIT: Duration = Duration::from_millis(100);
/// The longest: a node that comes back is told within this time, and one that does not is no work.
const LONGEST_WAIT: Duration = Duration::from_secs(5);
/// The longest that a guest is asked for on somebody's behalf.
const LONGEST_PROBE: Duration = Duration::from_secs(30);
/// The longest that files of wires wait for a guest that stands, and how often it is looked at: longer than a hand-off that goes well.
const GIVES_WAY: Duration = Duration::from_millis(250);
const LOOK: Duration = Duration::from_millis(5);
/// How long rules wait for those of other wires: much less than the grant takes, after which frames come from another host.
const GATHER: Duration = Duration::from_millis(2);
/// The most hosts that one wire's file names: two ends, each going somewhere, and where they came from. A bound for what is believed.
const MOST_HOSTS: usize = 64;

/// What a node knows of wires between ports.
#[derive(Debug)]
pub struct Wired {
    /// A file each.
    folder: PathBuf,
    table: Mutex<Table>,
    /// The endpoints that are open here, wired or not.
    open: Mutex<BTreeMap<u32, Opened>>,
    /// Who is being told of which wire; wakes whoever waits to tell again.
    telling: Mutex<BTreeMap<(u32, Name), Arc<Notify>>>,
    /// The wires whose rules are to follow, while somebody is at it.
    ruling: Mutex<Option<BTreeSet<u32>>>,
    /// Who listens for a greeting, by wire.
    listening: Mutex<BTreeMap<u32, Listening>>,
    /// Wires that are here and whose files cannot be read, and why: until the controller tells them again.
    unread: Mutex<BTreeMap<u32, String>>,
}

#[derive(Debug, Default)]
struct Table {
    wires: BTreeMap<u32, Arc<tokio::sync::Mutex<Held>>>,
    /// Endpoints' wires: each has one at the most.
    ends: BTreeMap<u32, (u32, Side)>,
}

/// An endpoint that is open here.
#[derive(Clone, Debug)]
struct Opened {
    sequence: Sequence,
    /// What shows others that it is.
    capability: Option<SignedCapability>,
}

/// A wire.
#[derive(Debug)]
struct Held {
    /// Its ends' views are the machine's, with what shows them.
    order: WireOrder,
    machine: Rehoming<Name>,
    hosts: BTreeMap<Name, PeerHost>,
    /// Where whatever has an end here goes when it stops: that is remembered before it is so, and told when it is.
    leaving: [Option<Coming>; 2],
    /// What its file holds, where that is known. Never waited for with the wire's own lock.
    file: Arc<tokio::sync::Mutex<Option<Vec<u8>>>>,
    /// The ends whose devices are here, or about to be: the wire is laid for them.
    placed: [bool; 2],
    /// The owners that the controller told of last, since this node started.
    ordered: Option<[Sequence; 2]>,
    /// It was disconnected while somebody waited for it.
    gone: bool,
}

/// What is remembered of a wire.
#[derive(Debug, Serialize, Deserialize)]
struct Kept {
    order: WireOrder,
    /// Where ends came from, and who has not heard yet that they went.
    #[serde(default)]
    before: Vec<PeerHost>,
}

fn stamp(view: &EndView) -> Stamp {
    let sequence = Sequence { lineage: view.lineage.0, generation: view.generation.0 };
    Stamp { sequence, step: view.step }
}

fn plain(view: &EndView) -> View<Name> {
    let coming = view.coming.as_ref().map(|coming| coming.host.name.clone());
    View { stamp: stamp(view), host: view.host.name.clone(), coming }
}

fn views(order: &WireOrder) -> [View<Name>; 2] {
    [plain(&order.ends[0].view), plain(&order.ends[1].view)]
}

impl Held {
    fn new(me: &Name, kept: Kept) -> Self {
        let before: BTreeSet<Name> = kept.before.iter().map(|host| host.name.clone()).collect();
        let machine = Rehoming::new(me.clone(), views(&kept.order), before);
        let hosts = kept.before.into_iter().map(|host| (host.name.clone(), host)).collect();
        let (leaving, file) = (Default::default(), Default::default());
        let placed = [false; 2];
        let mut held = Self { order: kept.order, machine, hosts, leaving, file, placed, ordered: None, gone: false };
        held.note_hosts();
        held
    }

    /// What is to be remembered: what is known, and what will be said when a guest stops that is to leave. Forgetting that it was not
    /// said does no harm: whoever opens the end again says more.
    fn kept(&self) -> Kept {
        let before = self.machine.before().iter().filter_map(|name| self.hosts.get(name).cloned());
        let (mut machine, mut order) = (self.machine.clone(), self.order.clone());
        for (side, coming) in Side::BOTH.into_iter().zip(&self.leaving) {
            if let Some(coming) = coming {
                say_leaving(&mut machine, &mut order, side, coming);
            }
        }
        Kept { order, before: before.collect() }
    }

    /// Whatever has an end here stops, and goes there; whether that is news.
    fn left(&mut self, side: Side, coming: &Coming) -> bool {
        self.leaving[side.index()] = None;
        self.hosts.insert(coming.host.name.clone(), coming.host.clone());
        say_leaving(&mut self.machine, &mut self.order, side, coming)
    }

    /// Keeps the addresses of whoever may be told something, and of nobody else: ends may come round many hosts.
    fn note_hosts(&mut self) {
        let places = self.machine.places();
        self.hosts.retain(|name, _| places.contains(name));
        for end in &self.order.ends {
            for host in std::iter::once(&end.view.host).chain(end.view.coming.as_ref().map(|coming| &coming.host)) {
                if self.hosts.len() < MOST_HOSTS || self.hosts.contains_key(&host.name) {
                    self.hosts.insert(host.name.clone(), host.clone());
                }
            }
        }
    }

    /// What was given here, and had opened this end, was given back there.
    fn gave_back(&mut self, side: Side, there: &PeerHost) {
        self.machine.give_back(side, there.name.clone());
        let known = self.machine.views()[side.index()].stamp;
        let view = &mut self.order.ends[side.index()].view;
        if stamp(view) != known {
            // What it came with shows its source, too.
            view.generation = Generation(known.sequence.generation);
            (view.step, view.coming) = (known.step, None);
            view.host = there.clone();
        }
        self.note_hosts();
    }

    /// A host does not answer. Where the controller has told as much as is known here, whoever has an end has heard of the other one, or
    /// hears of it, and a host that has none need not.
    fn fell_silent(&mut self, host: &Name, goes_there: bool) {
        let is_told = |ordered: [Sequence; 2]| {
            ordered.iter().zip(self.machine.views()).all(|(ordered, view)| *ordered >= view.stamp.sequence)
        };
        if self.ordered.is_some_and(is_told) {
            if goes_there { self.machine.is_silent(host) } else { self.machine.forget(host) }
        }
    }

    /// Takes what somebody knows, as far as it is later.
    fn learn(&mut self, from: &Name, told: [EndView; 2], answered: bool) -> bool {
        let plain = [plain(&told[0]), plain(&told[1])];
        let news = if answered { self.machine.answered(from, &plain) } else { self.machine.heard(from, &plain) };
        for ((end, known), told) in self.order.ends.iter_mut().zip(self.machine.views()).zip(told) {
            if stamp(&told) == known.stamp && stamp(&end.view) != known.stamp {
                end.view = told;
            }
        }
        self.note_hosts();
        news
    }

    /// An end is open here.
    fn opened(&mut self, me: &PeerHost, side: Side, open: &Opened) -> Result<(), godwit_wire::Outdated> {
        self.machine.open(side, open.sequence)?;
        let known = &self.machine.views()[side.index()];
        let view = &mut self.order.ends[side.index()].view;
        if view.host.name != me.name || stamp(view).sequence != open.sequence {
            view.capability.clone_from(&open.capability);
        }
        view.host = me.clone();
        view.lineage = Lineage(open.sequence.lineage);
        view.generation = Generation(open.sequence.generation);
        view.step = known.stamp.step;
        view.coming = None;
        self.leaving[side.index()] = None;
        self.placed[side.index()] = true;
        Ok(())
    }

    /// How it is to be on this host.
    fn plan(&self) -> PortWire {
        let remotes = self.machine.remotes();
        let remotes = remotes.iter().filter_map(|name| self.hosts.get(name)).map(|host| host.underlay);
        let open = Side::BOTH.into_iter().filter(|side| self.machine.is_open(*side));
        PortWire {
            wire: WireId(self.order.id),
            vni: Vni(self.order.vni),
            port: spec::TUNNEL_PORT,
            mtu: self.order.mtu,
            devices: open.map(|side| spec::device(self.order.ends[side.index()].endpoint)).collect(),
            remotes: remotes.collect(),
        }
    }

    fn local(&self) -> LocalWire {
        let open = Side::BOTH.into_iter().filter(|side| self.machine.is_open(*side));
        LocalWire {
            wire: self.order.clone(),
            open: open.map(|side| self.order.ends[side.index()].endpoint).collect(),
            remotes: self.plan().remotes,
            untold: self.machine.due().into_iter().collect(),
        }
    }
}

/// An end goes there, as its host says it; whether that is news.
fn say_leaving(machine: &mut Rehoming<Name>, order: &mut WireOrder, side: Side, coming: &Coming) -> bool {
    machine.leave(side, coming.host.name.clone());
    let step = machine.views()[side.index()].stamp.step;
    let view = &mut order.ends[side.index()].view;
    let news = view.step != step;
    if news {
        (view.step, view.coming) = (step, Some(coming.clone()));
    }
    news
}

/// What a host's word on an end is worth, of which this much is believed: what is older is that all the same, so that it hears of what is
/// later.
fn as_said(said: EndView, believed: EndView) -> EndView {
    if stamp(&said) < stamp(&believed) { said } else { believed }
}

/// The same, of an answer. A host that was told of more than it answers does not believe it, and need not hear it again.
fn as_answered(told: &EndView, said: EndView, believed: EndView) -> EndView {
    if stamp(&said) < stamp(told) { told.clone() } else { as_said(said, believed) }
}

/// The guest at an end, as it is announced. A component's is nobody.
fn guest(end: &OrderedEnd, mtu: u16) -> Option<EndpointSpec> {
    let mac: MacAddr = end.mac.as_ref()?.parse().ok()?;
    Some(EndpointSpec {
        id: EndpointId(u64::from(end.endpoint)),
        tap: spec::device(end.endpoint),
        mac,
        mtu,
        component: Component::Nowhere,
        ips: end.ips.clone(),
    })
}

/// The move by which one of these VMs is coming here from `from` that has this endpoint. Once it is here, or the move is over, its former
/// source has no more of a say than anybody else.
fn brought(vms: &[Arc<Parts>], from: &str, endpoint: u32) -> Option<Arc<Moving>> {
    vms.iter().find_map(|parts| {
        let comes = |m: &Arc<Moving>| m.is_to_arrive() && m.peer.name.as_str() == from;
        let moving = parts.moving().filter(comes)?;
        parts.definition().wires.iter().any(|wire| wire.id == endpoint).then_some(moving)
    })
}

impl Wired {
    /// With nothing loaded yet.
    #[must_use]
    pub fn new(state: &Path) -> Self {
        Self {
            folder: state.join("wires"),
            table: Mutex::default(),
            open: Mutex::default(),
            telling: Mutex::default(),
            ruling: Mutex::default(),
            listening: Mutex::default(),
            unread: Mutex::default(),
        }
    }

    fn path(&self, wire: u32) -> PathBuf {
        self.folder.join(format!("{wire}.json"))
    }

    fn store(&self, wire: u32, bytes: &[u8]) -> Result<(), ApiError> {
        let path = self.path(wire);
        durable::replace(&path, bytes).map_err(|e| ApiError::new(Problem::Failed, format!("{}: {e}", path.display())))
    }

    fn forget(&self, wire: u32) -> Result<(), ApiError> {
        let path = self.path(wire);
        durable::remove(&path).map_err(|e| ApiError::new(Problem::Failed, format!("{}: {e}", path.display())))?;
        lock(&self.unread).remove(&wire);
        Ok(())
    }

    /// Whether there is such a wire, known or not.
    #[must_use]
    pub fn has(&self, wire: u32) -> bool {
        lock(&self.table).wires.contains_key(&wire) || lock(&self.unread).contains_key(&wire)
    }

    /// Wires that are here and cannot be read, and why.
    pub(crate) fn unread(&self) -> BTreeMap<u32, String> {
        lock(&self.unread).clone()
    }

    /// Takes in the wires that were here before, as `me` knew them.
    fn recover(&self, me: &Name) {
        let Ok(entries) = std::fs::read_dir(&self.folder) else { return };
        let files = entries.filter_map(|e| e.ok().map(|e| e.path()));
        for path in files.filter(|path| path.extension().is_some_and(|e| e == "json")) {
            let kept = std::fs::read(&path).map_err(|e| e.to_string());
            let kept = kept.and_then(|bytes| serde_json::from_slice::<Kept>(&bytes).map_err(|e| e.to_string()));
            let taken = kept.and_then(|kept| self.take_in(Held::new(me, kept)).map_err(|e| e.to_string()));
            if let Err(why) = taken {
                tracing::error!(path = %path.display(), why, "a wire cannot be read; the controller tells it again");
                let wire: Option<u32> = path.file_stem().and_then(|stem| stem.to_str()?.parse().ok());
                lock(&self.unread).extend(wire.map(|wire| (wire, why)));
            }
        }
    }

    fn get(&self, wire: u32) -> Option<Arc<tokio::sync::Mutex<Held>>> {
        lock(&self.table).wires.get(&wire).cloned()
    }

    fn all(&self) -> Vec<Arc<tokio::sync::Mutex<Held>>> {
        lock(&self.table).wires.values().cloned().collect()
    }

    /// The wire of an endpoint, and which of its ends that is.
    fn of(&self, endpoint: u32) -> Option<(Arc<tokio::sync::Mutex<Held>>, Side)> {
        let table = lock(&self.table);
        let (wire, side) = *table.ends.get(&endpoint)?;
        Some((table.wires.get(&wire)?.clone(), side))
    }

    /// Takes a wire in, unless one of its ends has another.
    fn take_in(&self, held: Held) -> Result<Arc<tokio::sync::Mutex<Held>>, ApiError> {
        let mut table = lock(&self.table);
        let (id, ends) = (held.order.id, [held.order.ends[0].endpoint, held.order.ends[1].endpoint]);
        if let Some((endpoint, (other, _))) = ends.iter().find_map(|end| Some((end, *table.ends.get(end)?))) {
            let message = format!("endpoint {endpoint} is an end of wire {other:08x}, and cannot be one of {id:08x}");
            return Err(ApiError::new(Problem::Conflict, message).remedy("disconnect that wire first"));
        }
        for (endpoint, side) in ends.into_iter().zip(Side::BOTH) {
            table.ends.insert(endpoint, (id, side));
        }
        let held = Arc::new(tokio::sync::Mutex::new(held));
        table.wires.insert(id, held.clone());
        lock(&self.unread).remove(&id);
        Ok(held)
    }
}

fn unknown(node: &Node, wire: u32) -> ApiError {
    ApiError::new(Problem::NotFound, format!("{} knows no wire {wire:08x}", node.name()))
}

// As the controller and other nodes ask.
impl Node {
    /// Reads the wires that were here before; what is in the kernel stays as it is until a VM opens an end, or somebody is heard.
    pub(crate) async fn recover_wires(&self) {
        self.wired().recover(&self.config().name);
        for held in self.wired().all() {
            let mut held = held.lock().await;
            for side in Side::BOTH {
                let device = spec::device(held.order.ends[side.index()].endpoint);
                held.placed[side.index()] = self.wires().is_there(&device).await.unwrap_or(false);
            }
        }
    }

    /// The controller's word on a wire. Of where its ends are, what is known here of a later time stays.
    ///
    /// # Errors
    /// When an end has another wire, or the network or the medium refuses.
    pub async fn connect(self: &Arc<Self>, order: WireOrder) -> Result<LocalWire, ApiError> {
        let told = [order.ends[0].view.clone(), order.ends[1].view.clone()];
        let ordered = told.each_ref().map(|view| stamp(view).sequence);
        let wire = match self.wired().get(order.id) {
            Some(wire) => wire,
            None => self.wired().take_in(Held::new(&self.config().name, Kept { order, before: vec![] }))?,
        };
        let disconnected = || ApiError::new(Problem::Conflict, "the wire is being disconnected").remedy("try again");
        let mut held = wire.lock().await;
        if held.gone {
            return Err(disconnected());
        }
        held.learn(&self.config().name, told, false);
        held.ordered = Some(ordered);
        let me = self.as_peer();
        let mut fresh = vec![];
        for side in Side::BOTH {
            let open = lock(&self.wired().open).get(&held.order.ends[side.index()].endpoint).cloned();
            let Some(open) = open else { continue };
            if !held.machine.is_open(side) {
                fresh.push(side);
            }
            if let Err(why) = held.opened(&me, side, &open) {
                tracing::warn!(wire = held.order.id, %why, "an end that is open here is another host's");
            }
        }
        self.shape(&held).await?;
        drop(held);
        self.keep(&wire).await?;
        let held = wire.lock().await;
        if held.gone {
            return Err(disconnected());
        }
        for side in fresh.into_iter().filter(|side| held.machine.is_open(*side)) {
            self.announce_end(&held, side).await;
        }
        self.tell(&held);
        Ok(held.local())
    }

    /// The wire is not any more: its ends are isolated.
    ///
    /// # Errors
    /// When the network or the medium refuses; it may be repeated.
    pub async fn disconnect(self: &Arc<Self>, wire: u32) -> Result<(), ApiError> {
        let Some(held) = self.wired().get(wire) else {
            if self.wired().has(wire) {
                self.wires().take_up(WireId(wire)).await.map_err(network)?;
                self.forget_wire(wire).await?;
            }
            return Ok(());
        };
        // Nobody writes it any more once it is forgotten.
        let file = held.lock().await.file.clone();
        let _file = file.lock().await;
        let mut held = held.lock().await;
        held.gone = true;
        self.wires().take_up(WireId(wire)).await.map_err(network)?;
        self.forget_wire(wire).await?;
        let mut table = lock(&self.wired().table);
        table.wires.remove(&wire);
        table.ends.retain(|_, (of, _)| *of != wire);
        lock(&self.wired().telling).iter().filter(|((of, _), _)| *of == wire).for_each(|(_, wake)| wake.notify_one());
        Ok(())
    }

    async fn forget_wire(self: &Arc<Self>, wire: u32) -> Result<(), ApiError> {
        let node = self.clone();
        let forgotten = tokio::task::spawn_blocking(move || node.wired().forget(wire)).await;
        forgotten
            .unwrap_or_else(|_| Err(ApiError::new(Problem::Failed, "forgetting a wire ended in a bug of the node")))
    }

    /// A wire, as it is here.
    ///
    /// # Errors
    /// [`Problem::NotFound`].
    pub async fn local_wire(&self, wire: u32) -> Result<LocalWire, ApiError> {
        let held = self.wired().get(wire).ok_or_else(|| unknown(self, wire))?;
        Ok(held.lock().await.local())
    }

    /// All wires, as they are here.
    pub async fn local_wires(&self) -> Vec<LocalWire> {
        let mut found = vec![];
        for held in self.wired().all() {
            found.push(held.lock().await.local());
        }
        found
    }

    /// To whom this host gave back whatever has this endpoint, after it had been given it and may have opened the endpoint.
    fn given_back(&self, endpoint: u32) -> Option<PeerHost> {
        let vms = self.vms();
        let vm = vms.iter().find(|parts| parts.definition().wires.iter().any(|wire| wire.id == endpoint));
        match vm {
            Some(parts) if matches!(self.record(parts.id), Some(Record::Returned(_))) => parts.file().peer,
            Some(_) => None,
            None => self.components().given_back(endpoint),
        }
    }

    /// Whether what is coming here from `from` by a move has this endpoint.
    fn comes_from(&self, from: &str, endpoint: u32) -> bool {
        brought(&self.vms(), from, endpoint).is_some() || self.components().comes_from(from, endpoint)
    }

    /// Whether an end that another host tells of is this host's business: it is said to be here, or whatever has it is.
    fn is_ours(&self, end: &OrderedEnd) -> bool {
        let me = |host: &PeerHost| host.name == self.config().name;
        if me(&end.view.host) || end.view.coming.as_ref().is_some_and(|coming| me(&coming.host)) {
            return true;
        }
        let of_vm = |parts: &Arc<Parts>| {
            parts.view().ownership != Ownership::Elsewhere
                && parts.definition().wires.iter().any(|wire| wire.id == end.endpoint)
        };
        self.vms().iter().any(of_vm)
            || self.local_components().iter().any(|component| {
                component.ownership != Ownership::Elsewhere && component.definition.endpoints.contains(&end.endpoint)
            })
    }

    /// Another node says where a wire's ends are; the answer is what is known here then, and durable.
    ///
    /// # Errors
    /// [`Problem::NotFound`] where this host has nothing to do with the wire; [`Problem::Forbidden`] for what is not covered.
    pub(crate) async fn told(self: &Arc<Self>, from: &str, told: WireOrder) -> Result<[EndView; 2], ApiError> {
        let comes = [0, 1].map(|i| self.comes_from(from, told.ends[i].endpoint));
        let id = told.id;
        let wire = match self.wired().get(id) {
            Some(wire) => wire,
            // Its source tells of the wires of a VM that it brings: to others' ports, but to none of this host's, which knows its wires.
            None if comes.contains(&true) => {
                if let Some((end, _)) = told.ends.iter().zip(comes).find(|(end, comes)| !comes && self.is_ours(end)) {
                    let why =
                        format!("{}, of which the controller has said nothing here, is {}'s", end.name, self.name());
                    return Err(covered::forbidden(from, &format!("make wire {id:08x}"), &why));
                }
                let kept = Kept { order: told.clone(), before: vec![] };
                self.wired().take_in(Held::new(&self.config().name, kept))?
            }
            None => return Err(unknown(self, id)),
        };
        let mut held = wire.lock().await;
        if held.gone || (0..2).any(|i| held.order.ends[i].endpoint != told.ends[i].endpoint) {
            return Err(unknown(self, id));
        }
        let name: Name = from.parse().map_err(|_| unknown(self, id))?;
        let mut believed = [held.order.ends[0].view.clone(), held.order.ends[1].view.clone()];
        for ((known, end), comes_along) in believed.iter_mut().zip(told.ends).zip(comes) {
            if comes_along {
                *known = end.view;
                continue;
            }
            let given_back = || self.given_back(end.endpoint);
            match covered::end(self.credentials(), from, &end, known, given_back) {
                Ok(view) => *known = as_said(end.view, view),
                // What it brings comes all the same; where the other end is, that end's own host shows.
                Err(_) if comes.contains(&true) => {}
                Err(error) => return Err(error),
            }
        }
        let news = held.learn(&name, believed, false);
        let mut placed = false;
        for (known, comes) in held.placed.iter_mut().zip(comes) {
            placed |= comes && !*known;
            *known |= comes;
        }
        if news || placed {
            self.shape(&held).await?;
        }
        for (view, end) in held.machine.views().iter().zip(&held.order.ends) {
            if view.coming.as_ref() == Some(&self.config().name)
                && let Some(moving) = brought(&self.vms(), from, end.endpoint)
            {
                // That is said when its guest stops.
                moving.stands();
            }
        }
        drop(held);
        let known = self.keep(&wire).await?;
        let held = wire.lock().await;
        if held.gone {
            return Err(unknown(self, id));
        }
        self.tell(&held);
        Ok(known.ends.map(|end| end.view))
    }

    /// What is known is durable then: that is what it gives. Whoever opens or closes an end does not wait for the disk meanwhile.
    ///
    /// # Errors
    /// When the medium refuses, or the wire is gone.
    async fn keep(self: &Arc<Self>, wire: &tokio::sync::Mutex<Held>) -> Result<WireOrder, ApiError> {
        let file = wire.lock().await.file.clone();
        let mut file = file.lock().await;
        let (known, bytes) = self.to_keep(wire).await?;
        if file.as_ref() == Some(&bytes) {
            return Ok(known);
        }
        give_way(self).await;
        let (known, bytes) = self.to_keep(wire).await?;
        // Nobody knows which it is while it is written, nor when that failed.
        *file = None;
        let (node, id) = (self.clone(), known.id);
        let stored = tokio::task::spawn_blocking(move || node.wired().store(id, &bytes).map(|()| bytes)).await;
        let stored = stored
            .unwrap_or_else(|_| Err(ApiError::new(Problem::Failed, "writing a wire ended in a bug of the node")))?;
        *file = Some(stored);
        Ok(known)
    }

    /// What is known of a wire, and what its file is to hold.
    async fn to_keep(&self, wire: &tokio::sync::Mutex<Held>) -> Result<(WireOrder, Vec<u8>), ApiError> {
        let held = wire.lock().await;
        if held.gone {
            return Err(unknown(self, held.order.id));
        }
        let bytes = serde_json::to_vec_pretty(&held.kept())
            .map_err(|e| ApiError::new(Problem::Failed, format!("a wire cannot be written down: {e}")))?;
        Ok((held.order.clone(), bytes))
    }

    /// The kernel follows.
    async fn shape(self: &Arc<Self>, held: &Held) -> Result<(), ApiError> {
        if !held.placed.contains(&true) {
            return Ok(());
        }
        let plan = held.plan();
        if self.wires().lay(&plan).await.map_err(network)? {
            self.rule(held.order.id);
        }
        Ok(())
    }

    /// Has the rules of a wire follow, in the background: no guest waits for this. Wires that change within a moment, as those of one
    /// guest do, are ruled together.
    fn rule(self: &Arc<Self>, wire: u32) {
        let mut ruling = lock(&self.wired().ruling);
        match ruling.as_mut() {
            Some(due) => drop(due.insert(wire)),
            None => {
                *ruling = Some([wire].into());
                tokio::spawn(rule(self.clone()));
            }
        }
    }

    async fn announce_end(&self, held: &Held, side: Side) {
        let Some(guest) = guest(&held.order.ends[side.index()], held.order.mtu) else { return };
        if let Err(error) = self.wires().announce_on(WireId(held.order.id), &guest).await {
            tracing::warn!(wire = held.order.id, %error, "a guest could not be announced");
        }
    }

    /// Begins to tell whoever has to hear; with the wire's lock held.
    fn tell(self: &Arc<Self>, held: &Held) {
        for host in held.machine.due() {
            let mut telling = lock(&self.wired().telling);
            let key = (held.order.id, host);
            if let Some(wake) = telling.get(&key) {
                wake.notify_one();
                continue;
            }
            let wake = Arc::new(Notify::new());
            telling.insert(key.clone(), wake.clone());
            crate::trace::spawn(tell(self.clone(), key.0, key.1, wake));
        }
    }
}

// As the owners of endpoints ask.
impl Node {
    /// An endpoint is open here from now on, as of this owner. Its device exists.
    ///
    /// # Errors
    /// When the network refuses.
    pub(crate) async fn end_opened(
        self: &Arc<Self>,
        endpoint: u32,
        sequence: Sequence,
        capability: Option<SignedCapability>,
    ) -> Result<(), ApiError> {
        let open = Opened { sequence, capability };
        lock(&self.wired().open).insert(endpoint, open.clone());
        let Some((held, side)) = self.wired().of(endpoint) else { return Ok(()) };
        let mut held = held.lock().await;
        if held.gone {
            return Ok(());
        }
        if let Err(why) = held.opened(&self.as_peer(), side, &open) {
            tracing::error!(wire = held.order.id, %why, "an end is opened here that is another host's");
            return Ok(());
        }
        self.shape(&held).await?;
        self.announce_end(&held, side).await;
        // A guest waits: it is made durable by whoever tells it first, and whoever crashes now opens it again.
        self.tell(&held);
        Ok(())
    }

    /// An endpoint is not open here any more; its device is in the pen.
    ///
    /// # Errors
    /// When the network refuses.
    pub(crate) async fn end_closed(self: &Arc<Self>, endpoint: u32) -> Result<(), ApiError> {
        lock(&self.wired().open).remove(&endpoint);
        let Some((held, side)) = self.wired().of(endpoint) else { return Ok(()) };
        let mut held = held.lock().await;
        if held.gone {
            return Ok(());
        }
        held.machine.close(side);
        // Whoever laid the wire meanwhile, as for its other end, may have joined to it what had been isolated.
        self.wires().pen_device(&spec::device(endpoint)).await.map_err(network)?;
        // The other end's frames go to wherever this one goes.
        if held.machine.is_open(Side::A) || held.machine.is_open(Side::B) { self.shape(&held).await } else { Ok(()) }
    }

    /// An endpoint's device goes from here.
    ///
    /// # Errors
    /// When the network refuses.
    pub(crate) async fn end_removed(self: &Arc<Self>, endpoint: u32) -> Result<(), ApiError> {
        lock(&self.wired().open).remove(&endpoint);
        let Some((held, side)) = self.wired().of(endpoint) else { return Ok(()) };
        let given_back = self.given_back(endpoint);
        let mut held = held.lock().await;
        if held.gone {
            return Ok(());
        }
        held.machine.close(side);
        held.placed[side.index()] = false;
        if let Some(source) = given_back {
            held.gave_back(side, &source);
            self.tell(&held);
        }
        if held.placed.contains(&true) {
            return self.shape(&held).await;
        }
        self.wires().take_up(WireId(held.order.id)).await.map_err(network)
    }

    /// A place is made at `there` for whatever has this endpoint, which `capability` covers: that host is told of the wire, and
    /// answers. What [`Node::end_leaves`] will say is durable then.
    ///
    /// # Errors
    /// When it does not.
    pub(crate) async fn end_staged(
        self: &Arc<Self>,
        endpoint: u32,
        there: &PeerHost,
        capability: Option<SignedCapability>,
    ) -> Result<(), ApiError> {
        let Some((wire, side)) = self.wired().of(endpoint) else { return Ok(()) };
        {
            let mut held = wire.lock().await;
            held.hosts.insert(there.name.clone(), there.clone());
            held.machine.stage(side, there.name.clone());
            held.leaving[side.index()] = Some(Coming { host: there.clone(), capability });
        }
        let known = self.keep(&wire).await?;
        let said = ask(self, there, &known).await?;
        answered(self, &wire, &there.name, &known, said).await;
        Ok(())
    }

    /// Whatever has this endpoint stops, and goes there: the other end's frames go there, too, from now on.
    pub(crate) async fn end_leaves(
        self: &Arc<Self>,
        endpoint: u32,
        there: &PeerHost,
        capability: Option<SignedCapability>,
    ) {
        let Some((held, side)) = self.wired().of(endpoint) else { return };
        let mut held = held.lock().await;
        if held.left(side, &Coming { host: there.clone(), capability }) {
            self.tell(&held);
        }
    }
}

/// Rules the wires that are due, until none is.
async fn rule(node: Arc<Node>) {
    let mut wait = GATHER;
    loop {
        tokio::time::sleep(wait).await;
        let due = {
            let mut ruling = lock(&node.wired().ruling);
            let due = ruling.take().unwrap_or_default();
            if due.is_empty() {
                return;
            }
            *ruling = Some(BTreeSet::new());
            due
        };
        // Whoever changes or disconnects one waits until its rules are written. Nobody else takes the locks of two.
        let mut held = vec![];
        for wire in due.into_iter().filter_map(|wire| node.wired().get(wire)) {
            held.push(wire.lock_owned().await);
        }
        let plans: Vec<PortWire> = held.iter().filter(|held| !held.gone).map(|held| held.plan()).collect();
        let ruled = node.wires().rule(&plans).await;
        drop(held);
        match ruled {
            Ok(()) => wait = GATHER,
            Err(error) => {
                if wait == GATHER {
                    tracing::error!(%error, "who may send into wires cannot be changed: new hosts are kept out; trying again");
                }
                wait = (wait * 2).clamp(FIRST_WAIT, LONGEST_WAIT);
                let again = plans.iter().map(|plan| plan.wire.0);
                lock(&node.wired().ruling).get_or_insert_default().extend(again);
            }
        }
    }
}

async fn ask(node: &Arc<Node>, host: &PeerHost, order: &WireOrder) -> Result<[EndView; 2], ApiError> {
    let request = proto::encode(&Request::Wire(Box::new(order.clone())));
    let asking = async {
        let answer = node.peers().request(host, request, ANSWER).await?;
        proto::decode::<Result<[EndView; 2], ApiError>>(&answer).unwrap_or_else(|e| {
            Err(ApiError::new(Problem::Failed, format!("{} answers what we do not know: {e}", host.name)))
        })
    };
    tokio::time::timeout(ANSWER, asking).await.unwrap_or_else(|_| {
        Err(ApiError::new(Problem::Unreachable, format!("{} has not answered within {ANSWER:?}", host.name)))
    })
}

/// What a host answered that was told this.
async fn answered(
    node: &Arc<Node>,
    wire: &tokio::sync::Mutex<Held>,
    host: &Name,
    told: &WireOrder,
    said: [EndView; 2],
) {
    let mut held = wire.lock().await;
    if held.gone {
        return;
    }
    let mut believed = [held.order.ends[0].view.clone(), held.order.ends[1].view.clone()];
    for ((known, said), told) in believed.iter_mut().zip(said).zip(&told.ends) {
        let given_back = || node.given_back(told.endpoint);
        let end = OrderedEnd { view: said, ..told.clone() };
        match covered::end(node.credentials(), host.as_str(), &end, known, given_back) {
            Ok(view) => *known = as_answered(&told.view, end.view, view),
            Err(error) => {
                tracing::warn!(wire = held.order.id, %error, "an answer is not believed");
                known.clone_from(&told.view);
            }
        }
    }
    if held.learn(host, believed, true) {
        if let Err(error) = node.shape(&held).await {
            tracing::error!(wire = held.order.id, %error, "a wire does not lead where it should");
        }
        node.tell(&held);
    }
    // What was announced before was lost on the way.
    for side in Side::BOTH.into_iter().filter(|side| held.machine.is_open(*side)) {
        let guest = guest(&held.order.ends[side.index()], held.order.mtu);
        if let Some(guest) = guest
            && let Err(error) = node.wires().announce_on_again(WireId(held.order.id), &guest).await
        {
            tracing::debug!(wire = held.order.id, %error, "a guest could not be announced");
        }
    }
    let id = held.order.id;
    drop(held);
    // Who has answered need not be told after a crash.
    match node.keep(wire).await {
        Err(error) if error.problem != Problem::NotFound => {
            tracing::error!(wire = id, %error, "a wire cannot be remembered");
        }
        _ => {}
    }
}

/// Waits while a guest that comes here stands, or is about to: the records of its hand-off have the disk to themselves. What waits is
/// said, or answered, that much later, and where frames go does not hang on it: the guest's source has said where it goes.
async fn give_way(node: &Node) {
    let end = Instant::now() + GIVES_WAY;
    let is_awaited = |parts: &Arc<Parts>| parts.moving().is_some_and(|moving| moving.is_awaited());
    while node.vms().iter().any(is_awaited) && Instant::now() < end {
        tokio::time::sleep(LOOK).await;
    }
}

/// Tells a host of a wire until it has answered, or need not hear.
async fn tell(node: Arc<Node>, wire: u32, host: Name, wake: Arc<Notify>) {
    let mut wait = FIRST_WAIT;
    loop {
        let held = node.wired().get(wire);
        let known = match &held {
            Some(held) => Some(node.keep(held).await),
            None => None,
        };
        let (order, peer) = {
            let locked = match &held {
                Some(held) => Some(held.lock().await),
                None => None,
            };
            let due = locked.as_ref().filter(|held| !held.gone && held.machine.due().contains(&host));
            let asked = due.and_then(|due| {
                let order = match known? {
                    Ok(order) => order,
                    Err(error) => {
                        tracing::error!(wire, %error, "a wire cannot be remembered, and is told all the same");
                        due.order.clone()
                    }
                };
                Some((order, due.hosts.get(&host)?.clone()))
            });
            let Some(asked) = asked else {
                // With the wire's lock held: whoever finds it due next begins anew.
                lock(&node.wired().telling).remove(&(wire, host));
                return;
            };
            asked
        };
        match (ask(&node, &peer, &order).await, held) {
            (Ok(said), Some(held)) => {
                answered(&node, &held, &host, &order, said).await;
                wait = FIRST_WAIT;
            }
            (Err(error), Some(held)) if error.problem == Problem::NotFound => {
                held.lock().await.machine.forget(&host);
            }
            (Err(error), held) => {
                if error.problem == Problem::Unreachable
                    && let Some(held) = held
                {
                    // One to which something is under way is told all the same.
                    let goes_there = node.vms().iter().any(|parts| {
                        parts.moving().is_some_and(|moving| !moving.tracker.ended() && moving.peer.name == host)
                    });
                    held.lock().await.fell_silent(&host, goes_there);
                }
                tracing::warn!(wire, %host, %error, "it is not told yet where the wire's ends are; trying again");
            }
            (Ok(_), None) => {}
        }
        tokio::select! {
            () = tokio::time::sleep(wait) => wait = (wait * 2).min(LONGEST_WAIT),
            () = wake.notified() => wait = FIRST_WAIT,
        }
    }
}

/// The ends of a VM that wires between ports may have.
fn ports(parts: &Parts) -> Vec<u32> {
    parts.definition().wires.iter().filter(|wire| wire.component.is_none()).map(|wire| wire.id).collect()
}

/// A VM's endpoints are open here.
///
/// # Errors
/// When the network refuses.
pub async fn opened(node: &Arc<Node>, parts: &Parts, lineage: Lineage, generation: Generation) -> Result<(), ApiError> {
    let ports = ports(parts);
    if ports.is_empty() {
        return Ok(());
    }
    let capability = covered::held(node.credentials(), parts, lineage, generation);
    let sequence = Sequence { lineage: lineage.0, generation: generation.0 };
    let opening = ports.into_iter().map(|endpoint| node.end_opened(endpoint, sequence, capability.clone()));
    all(opening).await
}

/// Each is done, whatever becomes of the others, and at once: a guest waits for the slowest and not for their sum.
async fn all(doing: impl Iterator<Item = impl Future<Output = Result<(), ApiError>>>) -> Result<(), ApiError> {
    join_all(doing).await.into_iter().collect()
}

/// A VM's endpoints are in the pen.
///
/// # Errors
/// When the network refuses.
pub async fn closed(node: &Arc<Node>, parts: &Parts) -> Result<(), ApiError> {
    all(ports(parts).into_iter().map(|endpoint| node.end_closed(endpoint))).await
}

/// A VM's endpoints go from here.
///
/// # Errors
/// When the network refuses.
pub async fn removed(node: &Arc<Node>, parts: &Parts) -> Result<(), ApiError> {
    all(ports(parts).into_iter().map(|endpoint| node.end_removed(endpoint))).await
}

/// A place was made for a VM: whoever made it is told of its wires, and lays them.
///
/// # Errors
/// When it cannot be told.
pub async fn staged(
    node: &Arc<Node>,
    parts: &Parts,
    there: &PeerHost,
    capability: Option<&SignedCapability>,
) -> Result<(), ApiError> {
    all(ports(parts).into_iter().map(|endpoint| node.end_staged(endpoint, there, capability.cloned()))).await
}

/// A VM stops, to be handed over, if it does.
pub async fn leaves(node: &Arc<Node>, parts: &Parts) {
    let Some(moving) = parts.moving().filter(|m| m.role == MoveRole::Source && !m.over.is_cancelled()) else { return };
    let capability = parts.file().order.and_then(|order| order.capability);
    let leaving = ports(parts).into_iter().map(|endpoint| node.end_leaves(endpoint, &moving.peer, capability.clone()));
    join_all(leaving).await;
}

/// Proves that a guest is reachable on its wire, here and from the other end's host. One without a wire is reachable from nowhere,
/// which is as it should be; nor is there anybody to reach it from where the other end is not open.
///
/// # Errors
/// When no proof came in time.
pub async fn probe(node: &Arc<Node>, endpoint: &EndpointSpec, within: Duration) -> Result<(), ApiError> {
    let number = u32::try_from(endpoint.id.0).unwrap_or_default();
    let Some((held, side)) = node.wired().of(number) else { return Ok(()) };
    let wire = held.lock().await.order.id;
    let began = Instant::now();
    node.wires().probe_on(WireId(wire), endpoint, within).await.map_err(network)?;
    let left = within.saturating_sub(began.elapsed());
    if !endpoint.ips.iter().any(IpAddr::is_ipv4) {
        // Nobody asks it from there; the way to it is proved.
        return node.greet_end(number, left).await;
    }
    from_other_end(node, &held, side, left, |other, left| async move {
        let within_ms = u64::try_from(left.as_millis()).unwrap_or(u64::MAX);
        let asked = ProbeWire { wire, mac: endpoint.mac.to_string(), ips: endpoint.ips.clone(), within_ms };
        crate::gateways::ask(node, &other, &Request::ProbeWire(asked), left + ANSWER).await
    })
    .await
}

/// Asks the host of a wire's other end, with the time that is left; again while it may not know yet. That host may be this one: then there is
/// nobody to ask.
async fn from_other_end<F: Future<Output = Result<(), ApiError>>>(
    node: &Arc<Node>,
    held: &tokio::sync::Mutex<Held>,
    side: Side,
    within: Duration,
    ask: impl Fn(PeerHost, Duration) -> F,
) -> Result<(), ApiError> {
    let end = Instant::now() + within;
    loop {
        let (other, untold) = {
            let held = held.lock().await;
            let other = held.order.ends[1 - side.index()].view.host.clone();
            let untold = held.machine.due().contains(&other.name);
            (other, untold)
        };
        if other.name.as_str() == node.name() {
            return Ok(());
        }
        if untold && Instant::now() + FIRST_WAIT < end {
            // It is being told that the end is here; before that it would not ask.
            tokio::time::sleep(LOOK).await;
            continue;
        }
        match ask(other, end.saturating_duration_since(Instant::now())).await {
            // Its node may be starting, or has not heard yet that the end is here, or the other end has gone elsewhere.
            Err(error)
                if matches!(error.problem, Problem::Unreachable | Problem::Forbidden | Problem::NotFound)
                    && Instant::now() + FIRST_WAIT < end =>
            {
                tracing::debug!(%error, "the wire's other end cannot be asked yet");
            }
            answer => return answer,
        }
        tokio::time::sleep(FIRST_WAIT).await;
    }
}

impl Node {
    /// Asks for a guest behind a wire that has an end here, for the host that its other end is on.
    ///
    /// # Errors
    /// When no answer came, or somebody else asks.
    pub(crate) async fn probe_wired(&self, from: &str, asked: &ProbeWire) -> Result<(), ApiError> {
        let held = self.wired().get(asked.wire).ok_or_else(|| unknown(self, asked.wire))?;
        let (wire, guest) = {
            let held = held.lock().await;
            let theirs = held.order.ends.iter().find(|end| end.mac.as_deref() == Some(asked.mac.as_str()));
            let Some(end) = theirs.filter(|end| end.view.host.name.as_str() == from) else {
                let message = format!("wire {:08x} does not lead to {from}, who asks what is behind it", asked.wire);
                return Err(ApiError::new(Problem::Forbidden, message));
            };
            if !Side::BOTH.into_iter().any(|side| held.machine.is_open(side)) {
                let other = held.order.ends.iter().find(|other| other.endpoint != end.endpoint);
                // It has gone, and its new host is to be asked; or it does not run.
                return match other {
                    Some(other) if other.view.host.name.as_str() != self.name() => Err(unknown(self, asked.wire)),
                    _ => Ok(()),
                };
            }
            (WireId(held.order.id), guest(end, held.order.mtu))
        };
        let Some(guest) = guest else { return Ok(()) };
        let within = Duration::from_millis(asked.within_ms).min(LONGEST_PROBE);
        self.wires().probe_on(wire, &guest, within).await.map(drop).map_err(network)
    }
}

#[cfg(test)]
#[path = "wired_tests.rs"]
mod tests;
