//! Components on this host: their files, their records, and a keeper each.
//!
//! A component is owned as a VM is, by the same machines (`godwit_handoff`) and the same records, in a folder of its own. What differs is
//! what is handed over: there is no RAM and there are no disks, so there are no rounds either. The destination makes the component from
//! its file, isolated; the source isolates its ports, reads what the component has learnt and let through, and sends that; when it
//! is put in, the destination says VERIFIED, and from there on all goes as with VMs: SEALED, COMMIT, GRANTED, open, STARTED. Nobody
//! asks the controller meanwhile.
//!
//! The machine's words mean here: *Close*: all ports isolated. *Open*: the component is as its file says, and its ports may be taken by
//! wires. *Run*: it is as its file says; where its namespace was lost it begins with nothing learnt, as after a power failure. *Quit*:
//! nothing of it is left. `postmigrate` is reached at once, since there is no QEMU that could resume by itself.
//!
//! # What can go wrong
//!
//! *A node dies.* The namespace does not. An owner finds it; a destination that had everything still has it, and one that had not
//! refuses. *The host dies.* The owner makes it anew from its file. A destination between GRANTED and STARTED returns it.
//! *The way breaks while state is sent.* The source gives up after some seconds, opens its ports and goes on. *A host is lost for good.* An
//! operator claims the component for another one, which has its file and nothing learnt; the lost one, when it comes back, is outranked,
//! and nothing of the component is left there. *It cannot be made or opened*, since an interface that its file names is gone: it is tried
//! again every two seconds; between two tries it takes another file, a claim, or its end. *Its own file or its record cannot be read*: nothing is
//! done with it, and every question for it is answered with why, never with "not here". *Its removal breaks off*: it is not moved or changed any
//! more, and the next order to remove it goes on.

mod state;

use crate::durable;
use crate::failpoint::{Point, reach, reach_async};
use crate::incoming::PROOF;
use crate::keeping::{Timer, due, fatal, finished};
use crate::node::Node;
use crate::proto::{self, Note, Request};
use godwit_api::component::{
    ClaimOrder, ComponentDefinition, ComponentKind, ComponentMove, ComponentOrder, LocalComponent, NetworkProof,
};
use godwit_api::host::{Ownership, PeerHost};
use godwit_api::progress::Outcome;
use godwit_api::{ApiError, Problem};
use godwit_component::{Kind, Network, Place, Spec, State};
use godwit_handoff::{
    Action, Body, CannotBegin, Destination, DestinationState, Event, Fenced, FileLedger, Generation, Ledger, Lineage,
    Machine, Message, Owner, Peer, PeerHistory, Record, Seen, SourceState, Status, Ticket, Upkeep, Verdict, VmId, Why,
};
use godwit_trust::SignedCapability;
use serde::{Deserialize, Serialize};
use state::Coming;
use std::collections::{BTreeMap, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};
use tokio::task::{AbortHandle, JoinHandle};
use tokio::time::Instant;

/// Inputs that may wait for a keeper; messages are dropped when it is full, and said again.
const INBOX: usize = 64;
/// Between two tries to make or open a component that its owner's host does not take.
const RETRY: Duration = Duration::from_secs(2);
/// For a place at the destination, and for a part of the state.
const ANSWER: Duration = Duration::from_secs(20);
/// For a keeper that claims, to come to rest before and to have made the component afterwards.
const CLAIMING: Duration = Duration::from_secs(20);
/// For one that has gone to be cleared away.
const LETTING_GO: Duration = Duration::from_secs(3);
/// For a component that was just made to be up.
const COMING_UP: Duration = Duration::from_secs(5);

/// What nodes ask each other about components.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum ComponentAsk {
    /// Source: make a place for it.
    Stage {
        /// The attempt.
        ticket: Ticket,
        /// The component.
        definition: Box<ComponentDefinition>,
        /// Where the source is.
        source: PeerHost,
        /// What shows that the controller has ordered this.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        capability: Option<SignedCapability>,
    },
    /// Source: a part of its state; several are on their way at once, and may overtake each other. Answered when it is put in.
    State {
        /// The attempt.
        ticket: Ticket,
        /// Counted from 0.
        part: u32,
        /// Whether none has a higher number.
        last: bool,
        /// It.
        state: State,
    },
}

/// What is remembered of a component besides who owns it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Kept {
    definition: ComponentDefinition,
    /// The other host of the last hand-off.
    #[serde(default)]
    peer: Option<PeerHost>,
    /// The last order to leave.
    #[serde(default)]
    order: Option<ComponentOrder>,
    /// What it came with: it shows others that it is this host's.
    #[serde(default)]
    came: Option<SignedCapability>,
}

/// The components of a host.
#[derive(Debug)]
pub struct Components {
    place: Place,
    folder: PathBuf,
    ledger: Mutex<FileLedger>,
    keepers: Mutex<BTreeMap<VmId, Arc<Keeper>>>,
    /// Those whose file or record cannot be read, and why.
    unreadable: Mutex<BTreeMap<VmId, String>>,
    /// One at a time is made known.
    defining: tokio::sync::Mutex<()>,
}

/// What others see of a component.
#[derive(Clone, Debug)]
struct View {
    ownership: Ownership,
    owner: (Lineage, Generation),
    leaving: Option<ComponentMove>,
    removable: bool,
    standing: Standing,
    proof: Option<NetworkProof>,
}

/// How a component stands with the host that it came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Standing {
    /// It is coming, and may be given here.
    Comes,
    /// It was given here, and given back.
    GivenBack,
    /// There is nothing between the two.
    Settled,
}

impl Standing {
    const fn of(machine: Option<&Machine>) -> Self {
        let Some(Machine::Destination(it)) = machine else { return Self::Settled };
        match it.state() {
            DestinationState::Returning { .. } | DestinationState::Returned { .. } => Self::GivenBack,
            DestinationState::Refusing { .. }
            | DestinationState::Refused { .. }
            // There is no way back: it is this host's, though the source may not have heard.
            | DestinationState::Draining { .. }
            | DestinationState::Finishing { .. }
            | DestinationState::Abandoning { .. }
            | DestinationState::Started { .. }
            | DestinationState::Settling { .. }
            | DestinationState::Settled { .. }
            | DestinationState::Claiming { .. }
            | DestinationState::Yielding { .. }
            | DestinationState::Outranked { .. } => Self::Settled,
            _ => Self::Comes,
        }
    }
}

#[derive(Debug)]
struct Keeper {
    id: VmId,
    kept: Mutex<Kept>,
    view: Mutex<View>,
    inbox: mpsc::Sender<Input>,
    /// Whoever asks whether the network leads to it.
    proving: Mutex<Option<AbortHandle>>,
}

type Reply<T> = oneshot::Sender<Result<T, ApiError>>;

#[derive(Debug)]
enum Input {
    Event(Event),
    Message {
        from: String,
        message: Message,
    },
    Apply {
        definition: ComponentDefinition,
        reply: Reply<()>,
    },
    Begin {
        order: ComponentOrder,
        reply: Reply<()>,
    },
    Reserved {
        ticket: Ticket,
        result: Result<(), ApiError>,
    },
    Stage {
        ticket: Ticket,
        kept: Box<Kept>,
        reply: Reply<()>,
    },
    State {
        from: String,
        ticket: Ticket,
        part: u32,
        last: bool,
        state: State,
        reply: Reply<()>,
    },
    Claim {
        definition: ComponentDefinition,
        fenced: Fenced,
        /// Whether it is claimed; else it is to be asked again.
        reply: Reply<bool>,
    },
    /// A claim elsewhere began this lineage.
    Outrank {
        lineage: Lineage,
        reply: Reply<()>,
    },
    /// An effect for the peer's sake has succeeded: whoever waits for it may know.
    Answer(Result<(), ApiError>),
    Remove(Reply<()>),
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    crate::parts::lock(mutex)
}

fn failed(what: impl std::fmt::Display) -> ApiError {
    ApiError::new(Problem::Failed, what.to_string())
}

fn refused(error: godwit_component::ComponentError) -> ApiError {
    match error {
        godwit_component::ComponentError::Config(_) => {
            ApiError::new(Problem::Invalid, error.to_string()).remedy("correct the file; the lines are counted in it")
        }
        godwit_component::ComponentError::Net { .. }
        | godwit_component::ComponentError::Wire { .. }
        | godwit_component::ComponentError::Absent(_) => ApiError::new(Problem::Failed, error.to_string()),
    }
}

const fn kind(kind: ComponentKind) -> Kind {
    match kind {
        ComponentKind::Switch => Kind::Switch,
        ComponentKind::Router => Kind::Router,
        ComponentKind::Firewall => Kind::Firewall,
        ComponentKind::Gateway => Kind::Gateway,
    }
}

fn spec(definition: &ComponentDefinition) -> Result<Spec, ApiError> {
    Spec::read(definition.id.0, kind(definition.kind), definition.endpoints.clone(), &definition.config)
        .map_err(refused)
}

/// The host's bridge that a gateway leads to, and with which MTU, bytes.
pub(crate) fn leads_to(definition: &ComponentDefinition) -> Option<(String, u16)> {
    let outside = spec(definition).ok()?.config.outside?;
    match outside.network {
        Network::Bridge(name) => Some((name, outside.mtu)),
        Network::Device(_) => None,
    }
}

impl Components {
    /// With nothing taken up yet.
    ///
    /// # Errors
    /// The folder, or netlink.
    pub fn new(state: &Path, run: &Path, wires: &godwit_wire::Wires) -> anyhow::Result<Self> {
        let folder = state.join("components");
        let ledger = FileLedger::open(&folder.join("records"))?;
        let place = Place::new(wires.clone(), crate::spec::PREFIX, &run.join("components"))?;
        Ok(Self {
            place,
            folder,
            ledger: Mutex::new(ledger),
            keepers: Mutex::default(),
            unreadable: Mutex::default(),
            defining: tokio::sync::Mutex::default(),
        })
    }

    /// The components whose namespaces are here, known or not; but for those that cannot be read, whose namespaces are to stay.
    pub(crate) fn namespaces(&self) -> Vec<u64> {
        let unreadable = lock(&self.unreadable);
        self.place.list().into_iter().filter(|id| !unreadable.contains_key(&VmId(*id))).collect()
    }

    /// That it is none that cannot be read.
    fn check(&self, id: VmId) -> Result<(), ApiError> {
        match lock(&self.unreadable).get(&id) {
            None => Ok(()),
            Some(why) => {
                Err(ApiError::new(Problem::Failed, format!("component {} is here and cannot be read: {why}", id.0))
                    .remedy("mend what is said to be broken, or bring it back from a copy, and restart the node"))
            }
        }
    }

    fn path(&self, id: VmId) -> PathBuf {
        self.folder.join(format!("{}.json", id.0))
    }

    fn store(&self, kept: &Kept) -> Result<(), ApiError> {
        let path = self.path(kept.definition.id);
        durable::replace_json(&path, kept).map_err(|e| failed(format!("{}: {e}", path.display())))
    }

    fn forget(&self, id: VmId) -> Result<(), ApiError> {
        let path = self.path(id);
        durable::remove(&path).map_err(|e| failed(format!("{}: {e}", path.display())))?;
        lock(&self.ledger).forget(id).map_err(failed)
    }

    fn keeper(&self, id: VmId) -> Option<Arc<Keeper>> {
        lock(&self.keepers).get(&id).cloned()
    }

    /// Whether the component that has this endpoint is coming here from `from`.
    pub(crate) fn comes_from(&self, from: &str, endpoint: u32) -> bool {
        let peer = self.other_host(endpoint, Standing::Comes);
        peer.is_some_and(|peer| peer.name.as_str() == from)
    }

    /// To whom this host gave back the component that has this endpoint.
    pub(crate) fn given_back(&self, endpoint: u32) -> Option<PeerHost> {
        self.other_host(endpoint, Standing::GivenBack)
    }

    /// The other host of the move by which the component that has this endpoint stands here as that.
    fn other_host(&self, endpoint: u32, standing: Standing) -> Option<PeerHost> {
        lock(&self.keepers).values().find_map(|keeper| {
            let kept = lock(&keeper.kept);
            let its = kept.definition.endpoints.contains(&endpoint) && lock(&keeper.view).standing == standing;
            if its { kept.peer.clone() } else { None }
        })
    }

    fn known(&self) -> Vec<VmId> {
        let Ok(entries) = std::fs::read_dir(&self.folder) else { return vec![] };
        entries.filter_map(|e| e.ok()?.file_name().to_str()?.strip_suffix(".json")?.parse().ok().map(VmId)).collect()
    }
}

impl Keeper {
    async fn tell(&self, input: Input) {
        let _ = self.inbox.send(input).await;
    }

    async fn ask<T>(&self, input: impl FnOnce(Reply<T>) -> Input) -> Result<T, ApiError> {
        let (reply, answer) = oneshot::channel();
        self.tell(input(reply)).await;
        answer.await.unwrap_or_else(|_| {
            Err(ApiError::new(Problem::Conflict, "the component is being removed here, or its keeper has ended")
                .remedy("remove it again if that has failed, or restart the node"))
        })
    }

    /// Whether it is this host's by a later lineage.
    fn is_owned_since(&self, newest: Lineage) -> bool {
        let view = lock(&self.view);
        view.ownership == Ownership::Here && view.owner.0 > newest
    }

    /// Whether it is this host's, and stays: then only its own coming up keeps it from being moved.
    fn comes_up(&self) -> bool {
        let view = lock(&self.view);
        let leaves = view.leaving.as_ref().is_some_and(|mv| mv.outcome == Outcome::Running);
        view.ownership == Ownership::Here && !leaves
    }

    fn local(&self) -> LocalComponent {
        let view = lock(&self.view).clone();
        let definition = lock(&self.kept).definition.clone();
        let (lineage, generation) = view.owner;
        let mtus = spec(&definition).map_or_else(|_| vec![], |s| s.config.ports.iter().map(|port| port.mtu).collect());
        let View { ownership, leaving, proof, .. } = view;
        LocalComponent { definition, ownership, lineage, generation, leaving, mtus, proof }
    }

    /// Its ports were opened: asks over their wires, in the background, whether the network leads here. Nothing waits for it but whoever wants
    /// to know.
    fn prove(self: &Arc<Self>, node: &Arc<Node>, endpoints: Vec<u32>) {
        self.disprove(Some(NetworkProof::Asking));
        let (node, me) = (node.clone(), self.clone());
        let proving = tokio::spawn(async move {
            let asking = endpoints.iter().map(|endpoint| node.greet_end(*endpoint, PROOF));
            let answers = futures_util::future::join_all(asking).await;
            let against: Vec<String> =
                answers.into_iter().filter_map(|answer| Some(answer.err()?.to_string())).collect();
            let proof = if against.is_empty() {
                NetworkProof::Proved
            } else {
                tracing::warn!(component = me.id.0, against = against.join("; "), "the network does not lead here");
                NetworkProof::Unproved(against.join("; "))
            };
            lock(&me.view).proof = Some(proof);
        });
        *lock(&self.proving) = Some(proving.abort_handle());
    }

    /// What was found does not hold any more, nor what may be found yet.
    fn disprove(&self, proof: Option<NetworkProof>) {
        if let Some(proving) = lock(&self.proving).take() {
            proving.abort();
        }
        lock(&self.view).proof = proof;
    }
}

impl Node {
    /// Takes up the components that were here before. What cannot be read is left as it is, said, and remembered.
    pub(crate) fn recover_components(self: &Arc<Self>) {
        for id in self.components().known() {
            let load = || -> Result<(Kept, Option<Record>), ApiError> {
                let path = self.components().path(id);
                let bytes = std::fs::read(&path).map_err(|e| failed(format!("{}: {e}", path.display())))?;
                let kept: Kept =
                    serde_json::from_slice(&bytes).map_err(|e| failed(format!("{}: {e}", path.display())))?;
                Ok((kept, lock(&self.components().ledger).load(id).map_err(failed)?))
            };
            match load() {
                // A definition without a record: the node died before it owned it, and the controller asks again.
                Ok((kept, record)) => drop(Actor::spawn(self.clone(), kept, record)),
                Err(error) => {
                    tracing::error!(component = id.0, %error, "nothing is done with it until it is mended and the node restarted");
                    lock(&self.components().unreadable).insert(id, error.to_string());
                }
            }
        }
    }

    fn find_component(&self, id: VmId) -> Result<Arc<Keeper>, ApiError> {
        self.components().check(id)?;
        self.components()
            .keeper(id)
            .ok_or_else(|| ApiError::new(Problem::NotFound, format!("{} knows no component {}", self.name(), id.0)))
    }

    /// What the controller asks: all.
    pub(crate) fn local_components(&self) -> Vec<LocalComponent> {
        lock(&self.components().keepers).values().map(|keeper| keeper.local()).collect()
    }

    /// What the controller asks: one.
    pub(crate) fn local_component(&self, id: VmId) -> Result<LocalComponent, ApiError> {
        Ok(self.find_component(id)?.local())
    }

    /// The controller's order: the component is to be here, as this says. Tried before anything is changed.
    pub(crate) async fn define_component(
        self: &Arc<Self>,
        definition: ComponentDefinition,
    ) -> Result<LocalComponent, ApiError> {
        let _one = self.components().defining.lock().await;
        let id = definition.id;
        self.components().check(id)?;
        let wanted = spec(&definition)?;
        self.components().place.rehearse(&wanted).await.map_err(refused)?;
        if let Some(keeper) = self.components().keeper(id) {
            keeper.ask(|reply| Input::Apply { definition, reply }).await?;
            return Ok(keeper.local());
        }
        self.components().place.stage(&wanted).await.map_err(refused)?;
        let kept = Kept { definition, peer: None, order: None, came: None };
        self.components().store(&kept)?;
        let record = Record::Owned(Owner::first(id));
        lock(&self.components().ledger).store(id, &record).map_err(failed)?;
        Ok(Actor::spawn(self.clone(), kept, Some(record)).local())
    }

    /// The controller's order: nothing of it is to be left here. May be given again where that has failed.
    pub(crate) async fn remove_component(self: &Arc<Self>, id: VmId) -> Result<(), ApiError> {
        let node = self.clone();
        // Whoever asks may go away; what was begun ends all the same.
        let removing = crate::trace::spawn(async move { node.take_component_away(id).await });
        removing.await.unwrap_or_else(|e| Err(failed(format!("the removal of component {} broke off: {e}", id.0))))
    }

    async fn take_component_away(self: &Arc<Self>, id: VmId) -> Result<(), ApiError> {
        let _one = self.components().defining.lock().await;
        self.components().check(id)?;
        let Some(keeper) = self.components().keeper(id) else { return Ok(()) };
        // One whose keeper has ended was being removed already.
        if !keeper.inbox.is_closed() {
            keeper.ask(Input::Remove).await?;
        }
        let endpoints = lock(&keeper.kept).definition.endpoints.clone();
        for endpoint in &endpoints {
            self.end_removed(*endpoint).await?;
        }
        self.components().place.remove(id.0, &endpoints).await.map_err(refused)?;
        self.components().forget(id)?;
        lock(&self.components().keepers).remove(&id);
        Ok(())
    }

    /// The controller's order: it is to go.
    pub(crate) async fn move_component(&self, id: VmId, order: ComponentOrder) -> Result<LocalComponent, ApiError> {
        let keeper = self.find_component(id)?;
        let began = Instant::now();
        loop {
            match keeper.ask(|reply| Input::Begin { order: order.clone(), reply }).await {
                // Whoever has it made and then moved need not ask twice.
                Err(error)
                    if error.problem == Problem::Conflict && keeper.comes_up() && began.elapsed() < COMING_UP =>
                {
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
                answer => return answer.map(|()| keeper.local()),
            }
        }
    }

    /// The controller's order: it is this host's from now on, because whoever may own it is lost. Answers when it is made.
    pub(crate) async fn claim_component(self: &Arc<Self>, order: ClaimOrder) -> Result<LocalComponent, ApiError> {
        let ClaimOrder { definition, lost, fenced, newest } = order;
        let (id, name) = (definition.id, definition.name.clone());
        let conflict = |why: String| ApiError::new(Problem::Conflict, format!("`{name}` cannot be claimed: {why}"));
        // What the controller does not reach may well be heard here.
        let sight = if lost.iter().any(|host| self.peers().hears(host.as_str())) { Peer::Heard } else { Peer::Silent };
        let fenced = Fenced::vouched(&fenced, PeerHistory::MayHaveRun, newest, sight)
            .map_err(|why| conflict(why.to_string()))?;
        let keeper = {
            let _one = self.components().defining.lock().await;
            self.components().check(id)?;
            self.components().place.rehearse(&spec(&definition)?).await.map_err(refused)?;
            match self.components().keeper(id) {
                Some(keeper) => keeper,
                None => self.take_in_component(&definition, newest)?,
            }
        };
        let began = Instant::now();
        loop {
            let (definition, fenced) = (definition.clone(), fenced.clone());
            let claimed = keeper.ask(|reply| Input::Claim { definition, fenced, reply }).await?;
            if claimed && keeper.is_owned_since(newest) {
                return Ok(keeper.local());
            }
            if began.elapsed() >= CLAIMING {
                let how = if claimed { "claimed, and not made yet" } else { "busy with something else" };
                return Err(failed(format!("`{name}` is {how} on {}", self.name()))
                    .remedy("ask again; its node's log says why"));
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Makes a component known here as another host's: it runs nothing, and may be claimed.
    fn take_in_component(
        self: &Arc<Self>,
        definition: &ComponentDefinition,
        newest: Lineage,
    ) -> Result<Arc<Keeper>, ApiError> {
        let id = definition.id;
        let kept = Kept { definition: definition.clone(), peer: None, order: None, came: None };
        self.components().store(&kept)?;
        let record = Record::Outranked { vm: id, lineage: newest };
        lock(&self.components().ledger).store(id, &record).map_err(failed)?;
        Ok(Actor::spawn(self.clone(), kept, Some(record)))
    }

    /// The controller's order: it was claimed elsewhere, in this lineage. Nothing of it is left here but the word of that.
    pub(crate) async fn outrank_component(&self, id: VmId, lineage: Lineage) -> Result<(), ApiError> {
        self.find_component(id)?.ask(|reply| Input::Outrank { lineage, reply }).await
    }

    /// Another node's message of a hand-off.
    pub(crate) fn heard_of_component(&self, from: &str, message: Message) {
        if let Some(keeper) = self.components().keeper(message.ticket.vm) {
            let _ = keeper.inbox.try_send(Input::Message { from: from.to_owned(), message });
        }
    }

    /// Another node asks something about a component.
    pub(crate) async fn asked_of_component(self: &Arc<Self>, from: &str, ask: ComponentAsk) -> Result<(), ApiError> {
        match ask {
            ComponentAsk::Stage { ticket, definition, source, capability } => {
                crate::covered::component(self.credentials(), from, &ticket, &definition, capability.as_ref())?;
                if source.name.as_str() != from {
                    return Err(ApiError::new(Problem::Forbidden, format!("{from} says that it is {}", source.name)));
                }
                let kept;
                let keeper = {
                    let _one = self.components().defining.lock().await;
                    let id = definition.id;
                    self.components().check(id)?;
                    self.components().place.rehearse(&spec(&definition)?).await.map_err(refused)?;
                    kept =
                        Box::new(Kept { definition: *definition, peer: Some(source), order: None, came: capability });
                    self.components().keeper(id).unwrap_or_else(|| Actor::spawn(self.clone(), (*kept).clone(), None))
                };
                let began = Instant::now();
                loop {
                    let kept = kept.clone();
                    match keeper.ask(|reply| Input::Stage { ticket, kept, reply }).await {
                        // Whoever moves it to and fro need not wait until it has been cleared away here.
                        Err(error) if error.problem == Problem::Conflict && began.elapsed() < LETTING_GO => {
                            tokio::time::sleep(Duration::from_millis(50)).await;
                        }
                        answer => return answer,
                    }
                }
            }
            ComponentAsk::State { ticket, part, last, state } => {
                let keeper = self.find_component(ticket.vm)?;
                let from = from.to_owned();
                keeper.ask(|reply| Input::State { from, ticket, part, last, state, reply }).await
            }
        }
    }
}

/// A component's keeper: the shell around its hand-off machine. Records and effects are two queues, one of each under way.
struct Actor {
    node: Arc<Node>,
    me: Arc<Keeper>,
    inbox: mpsc::Receiver<Input>,
    machine: Option<Machine>,
    record: Option<Record>,
    records: VecDeque<Record>,
    writing: Option<JoinHandle<Record>>,
    effects: VecDeque<Action>,
    doing: Option<JoinHandle<Done>>,
    /// The effect that is being tried, while it is wanted.
    trying: Option<Action>,
    /// When the next try of the first of the effects is due, which failed.
    again: Option<Instant>,
    /// Why it failed.
    trouble: Option<String>,
    timer: Timer,
    /// The order that a place is being looked for.
    reserving: Option<(Ticket, ComponentOrder)>,
    /// Whoever waits for a place.
    waiting: Option<Reply<()>>,
    /// Its state, while it comes.
    coming: Coming,
    /// Ends the sending of an attempt that was given up.
    sending: Option<JoinHandle<()>>,
    /// When the ports were isolated.
    isolated: Option<Instant>,
    /// It was claimed as a destination, which had it or had it not.
    claimed: Option<Seen>,
}

impl Actor {
    fn spawn(node: Arc<Node>, kept: Kept, record: Option<Record>) -> Arc<Keeper> {
        let (sender, inbox) = mpsc::channel(INBOX);
        let id = kept.definition.id;
        let here = node.components().place.namespace(id.0).is_some();
        let view = View {
            ownership: Ownership::Elsewhere,
            owner: (Lineage::FIRST, Generation(0)),
            leaving: None,
            removable: true,
            standing: Standing::Settled,
            proof: None,
        };
        let proving = Mutex::default();
        let me = Arc::new(Keeper { id, kept: Mutex::new(kept), view: Mutex::new(view), inbox: sender, proving });
        let machine = record.map(|record| {
            let seen = match record {
                _ if !here => Seen::Gone,
                Record::Owned(_) => Seen::Running,
                // What it was given went with the node.
                Record::Staged(_) => Seen::Gone,
                Record::Granted(_) | Record::Started(_) => Seen::Loaded,
                _ => Seen::Stopped,
            };
            Machine::recover(record, seen)
        });
        lock(&node.components().keepers).insert(id, me.clone());
        let mut actor = Self {
            node,
            me: me.clone(),
            inbox,
            machine,
            record,
            records: VecDeque::new(),
            writing: None,
            effects: VecDeque::new(),
            doing: None,
            trying: None,
            again: None,
            trouble: None,
            timer: Timer::new(),
            reserving: None,
            waiting: None,
            coming: Coming::default(),
            sending: None,
            isolated: None,
            claimed: None,
        };
        actor.publish();
        tokio::spawn(async move {
            actor.poll();
            actor.live().await;
        });
        me
    }

    async fn live(&mut self) {
        loop {
            self.publish();
            let (timer, again) = (self.timer, self.again);
            let input = tokio::select! {
                biased;
                written = finished(&mut self.writing) => {
                    let Ok(written) = written else { return std::future::pending().await };
                    let Some(record) = written else { fatal("the writer of a component's records panicked") };
                    self.record = Some(record);
                    self.feed(Event::Persisted(record));
                    continue;
                }
                done = finished(&mut self.doing) => {
                    let Ok(done) = done else { return std::future::pending().await };
                    let Some(done) = done else { fatal("an effect on a component panicked") };
                    self.done(done);
                    continue;
                }
                () = due(again) => {
                    self.again = None;
                    self.work();
                    continue;
                }
                () = timer.due() => {
                    self.timer.clear();
                    self.feed(Event::Timer);
                    continue;
                }
                input = self.inbox.recv() => input,
            };
            match input {
                // Its namespace and its records go now.
                Some(Input::Remove(reply)) => {
                    let answer = self.may_remove();
                    let over = answer.is_ok();
                    if over {
                        // Before that is said: whoever orders it again finds it so.
                        self.inbox.close();
                    }
                    let _ = reply.send(answer);
                    if over {
                        return;
                    }
                }
                Some(input) => self.hear(input),
                None => return,
            }
        }
    }

    fn hear(&mut self, input: Input) {
        match input {
            Input::Event(event) => self.feed(event),
            Input::Message { from, message } => {
                let reserving = self.reserving.as_ref().is_some_and(|(ticket, _)| *ticket == message.ticket);
                let peer = lock(&self.me.kept).peer.as_ref().is_some_and(|peer| peer.name.as_str() == from);
                if reserving && message.body == Body::Pending {
                    // The place that we asked for, and do mean.
                } else if peer {
                    self.feed(Event::Message(message));
                } else {
                    tracing::warn!(
                        component = self.me.id.0,
                        from,
                        ?message,
                        "a host that has no part in it speaks of it"
                    );
                }
            }
            Input::Apply { definition, reply } => {
                let answer = self.apply(&definition);
                match answer {
                    Ok(wanted) => {
                        let node = self.node.clone();
                        let before = lock(&self.me.kept).definition.clone();
                        let me = self.me.clone();
                        // One that could not be made or opened is opened when it is made.
                        let is_open = self.again.take().is_none();
                        // As an effect: nothing else is done with it meanwhile.
                        self.doing = Some(tokio::spawn(async move {
                            let place = &node.components().place;
                            let take = async |spec: &Spec| {
                                place.stage(spec).await?;
                                if is_open { place.open(spec).await } else { Ok(()) }
                            };
                            let done = take(&wanted).await.map_err(refused);
                            if done.is_err()
                                && let Ok(before) = spec(&before)
                                && let Err(error) = take(&before).await
                            {
                                tracing::error!(component = me.id.0, %error, "neither the new file nor the old one is taken");
                            }
                            let _ = reply.send(done.and_then(|()| me.redefine(&node, definition)));
                            Ok(None)
                        }));
                    }
                    Err(error) => drop(reply.send(Err(error))),
                }
            }
            Input::Begin { order, reply } => {
                let _ = reply.send(self.begin(order));
            }
            Input::Reserved { ticket, result } => self.reserved(ticket, result),
            Input::Stage { ticket, kept, reply } => self.stage(ticket, *kept, reply),
            Input::State { from, ticket, part, last, state, reply } => {
                self.receive(&from, ticket, (part, last), state, reply)
            }
            Input::Claim { definition, fenced, reply } => {
                let _ = reply.send(self.claim(definition, fenced));
            }
            Input::Outrank { lineage, reply } => {
                let _ = reply.send(self.outrank(lineage));
            }
            Input::Answer(result) => self.answer(result),
            Input::Remove(_) => {}
        }
    }

    fn answer(&mut self, result: Result<(), ApiError>) {
        if let Some(reply) = self.waiting.take() {
            let _ = reply.send(result);
        }
    }

    /// Nothing is under way, but perhaps the wait for the next try of what has failed.
    fn rests(&self) -> bool {
        let nothing_is_done = self.doing.is_none() && (self.effects.is_empty() || self.again.is_some());
        self.writing.is_none() && self.records.is_empty() && nothing_is_done
    }

    fn idle(&self) -> bool {
        self.rests() && self.effects.is_empty()
    }

    fn busy(&self) -> ApiError {
        let (name, host) = (lock(&self.me.kept).definition.name.clone(), self.node.name());
        if let Some(why) = &self.trouble {
            let message = format!("`{name}` is not as it should be on {host}, and is tried again and again: {why}");
            return ApiError::new(Problem::Conflict, message)
                .remedy("mend that, give it another file (`godwit component apply`), or delete it; and ask again");
        }
        ApiError::new(Problem::Conflict, format!("`{name}` is being made, moved or changed on {host}"))
            .remedy("wait until that has ended, and ask again")
    }

    /// What was to be done is not wanted any more. What is tried just now is not tried again.
    fn drop_effects(&mut self) {
        self.effects.clear();
        (self.trying, self.again, self.trouble) = (None, None, None);
    }

    fn may_remove(&self) -> Result<(), ApiError> {
        let removable = match &self.machine {
            None => true,
            Some(Machine::Source(s)) => {
                matches!(
                    s.state(),
                    SourceState::Owning { .. } | SourceState::Released { .. } | SourceState::Outranked { .. }
                )
            }
            Some(Machine::Destination(d)) => {
                matches!(
                    d.state(),
                    DestinationState::Refused { .. }
                        | DestinationState::Returned { .. }
                        | DestinationState::Outranked { .. }
                )
            }
        };
        if removable && self.reserving.is_none() && self.rests() { Ok(()) } else { Err(self.busy()) }
    }

    /// Takes it although nobody has handed it over. Once taken, the same order changes nothing.
    fn claim(&mut self, definition: ComponentDefinition, fenced: Fenced) -> Result<bool, ApiError> {
        if matches!(self.record, Some(Record::Owned(owner)) if owner.lineage > fenced.newest) {
            return Ok(true);
        }
        if !self.rests() || self.reserving.is_some() {
            return Ok(false);
        }
        let here = self.node.components().place.namespace(self.me.id.0).is_some();
        let Some(machine) = &mut self.machine else {
            // The node died before it owned what it had been told to make.
            let nothing = Record::Outranked { vm: self.me.id, lineage: fenced.newest };
            self.machine = Some(Machine::recover(nothing, Seen::Gone));
            self.records.push_back(nothing);
            self.poll();
            return Ok(false);
        };
        let seen = match machine {
            Machine::Destination(d) if here && matches!(d.state(), DestinationState::Started { .. }) => Seen::Running,
            _ => Seen::Gone,
        };
        let statement = fenced.statement.clone();
        match machine.handle(Event::Claim(fenced)) {
            Verdict::Taken => {}
            Verdict::Ignored(Why::Busy) => return Ok(false),
            Verdict::Ignored(why) => {
                let message = format!("`{}` cannot be claimed: {why}", definition.name);
                return Err(ApiError::new(Problem::Conflict, message));
            }
        }
        tracing::warn!(component = %definition.name, fenced = statement, "claimed for this host");
        self.claimed = matches!(machine, Machine::Destination(_)).then_some(seen);
        self.drop_effects();
        // Before it is made. Where this fails, whoever claimed is told, and gives it its file by hand.
        let redefined = self.me.redefine(&self.node, definition);
        self.poll();
        self.settle();
        redefined.map(|()| true)
    }

    /// A claim elsewhere has the component.
    fn outrank(&mut self, lineage: Lineage) -> Result<(), ApiError> {
        if self.writing.is_some() || !self.records.is_empty() {
            return Err(self.busy());
        }
        let over = self.record.and_then(|record| record.overridden_by(self.me.id, lineage));
        let Some(over) = over else {
            let message = format!("component {} is not of an older lineage than {} here", self.me.id.0, lineage.0);
            return Err(ApiError::new(Problem::Conflict, message));
        };
        tracing::warn!(component = self.me.id.0, lineage = lineage.0, "claimed elsewhere: nothing of it stays here");
        // What the next machine begins with: all ports isolated, and nothing left.
        self.machine = Some(Machine::recover(over, Seen::Stopped));
        self.reserving = None;
        self.answer(Err(ApiError::new(Problem::Conflict, "it was claimed elsewhere")));
        if let Some(sending) = self.sending.take() {
            sending.abort();
        }
        self.timer.clear();
        self.drop_effects();
        self.records.push_back(over);
        self.poll();
        Ok(())
    }

    fn apply(&self, definition: &ComponentDefinition) -> Result<Spec, ApiError> {
        let kept = lock(&self.me.kept).clone();
        let may = match &self.machine {
            Some(Machine::Source(s)) => match s.state() {
                SourceState::Owning { upkeep: Upkeep::Running, .. } => self.idle(),
                // What cannot be made or opened by its old file may be by another one.
                SourceState::Owning { .. } => self.rests(),
                _ => false,
            },
            _ => false,
        };
        if !may || self.reserving.is_some() {
            return Err(self.busy());
        }
        let same = ComponentDefinition { config: definition.config.clone(), ..kept.definition };
        if same != *definition {
            let message = "nothing of a component changes but its file";
            return Err(ApiError::new(Problem::Conflict, message));
        }
        spec(definition)
    }

    fn begin(&mut self, order: ComponentOrder) -> Result<(), ApiError> {
        if lock(&self.me.kept).order.as_ref().is_some_and(|known| known.id == order.id) {
            // Again: its first answer was lost.
            return Ok(());
        }
        let (Some(Machine::Source(source)), None) = (&self.machine, &self.reserving) else { return Err(self.busy()) };
        let ticket = source.next_ticket(order.id).map_err(|why| match why {
            CannotBegin::Busy => self.busy(),
            CannotBegin::NotOwner | CannotBegin::UsedTicket { .. } => ApiError::new(Problem::Conflict, why.to_string()),
        })?;
        // It would go with the file that it is about to have no more.
        if !self.idle() {
            return Err(self.busy());
        }
        let definition = {
            let mut kept = lock(&self.me.kept);
            kept.peer = Some(order.to.clone());
            kept.order = Some(order.clone());
            self.node.components().store(&kept)?;
            kept.definition.clone()
        };
        self.leaving(|_| {}, Some(&order));
        let endpoints = definition.endpoints.clone();
        let (node, me) = (self.node.clone(), self.me.clone());
        self.reserving = Some((ticket, order.clone()));
        tokio::spawn(async move {
            reach_async(Point::Reserve, me.id).await;
            let (source, capability) = (node.as_peer(), order.capability.clone());
            let definition = Box::new(definition);
            let shows = capability.clone();
            let ask = ComponentAsk::Stage { ticket, definition, source, capability };
            let mut result = ask_peer(&node, &order.to, ask).await;
            for endpoint in endpoints {
                if result.is_ok() {
                    result = node.end_staged(endpoint, &order.to, shows.clone()).await;
                }
            }
            me.tell(Input::Reserved { ticket, result }).await;
        });
        Ok(())
    }

    fn reserved(&mut self, ticket: Ticket, result: Result<(), ApiError>) {
        let Some((_, order)) = self.reserving.take_if(|(t, _)| *t == ticket) else { return };
        let begun = result.and_then(|()| match &mut self.machine {
            Some(Machine::Source(source)) => match source.begin(order.id) {
                Ok(got) if got == ticket => Ok(()),
                Ok(_) => Err(ApiError::new(Problem::Conflict, "it changed hands meanwhile")),
                Err(error) => Err(ApiError::new(Problem::Conflict, error.to_string())),
            },
            _ => Err(ApiError::new(Problem::Conflict, "it changed hands meanwhile")),
        });
        match begun {
            Ok(()) => self.poll(),
            Err(error) => self.leaving(
                |mv| {
                    mv.outcome = Outcome::Failed;
                    mv.error = Some(error.to_string());
                },
                None,
            ),
        }
    }

    /// Notes how the component's leaving stands.
    fn leaving(&self, change: impl FnOnce(&mut ComponentMove), fresh: Option<&ComponentOrder>) {
        let mut view = lock(&self.me.view);
        if let Some(order) = fresh {
            view.leaving = Some(ComponentMove {
                id: order.id,
                from: self.node.config().name.clone(),
                to: order.to.name.clone(),
                outcome: Outcome::Running,
                isolated_ms: None,
                stations: 0,
                flows: 0,
                error: None,
            });
        }
        if let Some(mv) = &mut view.leaving {
            change(mv);
        }
    }

    fn stage(&mut self, ticket: Ticket, kept: Kept, reply: Reply<()>) {
        let idle = self.idle() && self.reserving.is_none();
        let staged = match Destination::stage(self.record, ticket) {
            Ok(staged) if idle => staged,
            Ok(_) => return drop(reply.send(Err(self.busy()))),
            Err(error) => return drop(reply.send(Err(ApiError::new(Problem::Conflict, error.to_string())))),
        };
        if let Err(error) = self.node.components().store(&kept) {
            return drop(reply.send(Err(error)));
        }
        *lock(&self.me.kept) = kept;
        self.answer(Err(ApiError::new(Problem::Conflict, "another attempt has begun")));
        self.waiting = Some(reply);
        self.machine = Some(Machine::Destination(staged));
        self.timer.clear();
        self.poll();
    }

    fn receive(&mut self, from: &str, ticket: Ticket, (part, last): (u32, bool), state: State, reply: Reply<()>) {
        let peer = lock(&self.me.kept).peer.as_ref().is_some_and(|peer| peer.name.as_str() == from);
        let mine = matches!(&self.machine, Some(Machine::Destination(d))
            if matches!(d.state(), DestinationState::Staged { ticket: t } if *t == ticket));
        if !peer || !mine {
            let error = ApiError::new(Problem::Conflict, format!("{} has no place for {ticket}", self.node.name()));
            return drop(reply.send(Err(error)));
        }
        self.coming.take(part, last, state, reply);
        self.work();
    }

    /// What was begun has ended: what has failed is tried again, unless nobody wants it any more.
    fn done(&mut self, done: Done) {
        let tried = self.trying.take();
        match done {
            Ok(event) => {
                if tried.is_some() {
                    self.trouble = None;
                }
                if tried == Some(Action::Close)
                    && let Some(ticket) = self.stands_for()
                {
                    self.follow(ticket);
                }
                match event {
                    Some(event) => self.feed(event),
                    None => self.work(),
                }
            }
            Err(error) => {
                tracing::error!(component = self.me.id.0, ?tried, %error, "failed");
                if let Some(action) = tried {
                    self.effects.push_front(action);
                    self.again = Some(Instant::now() + RETRY);
                    self.trouble = Some(error.to_string());
                }
                self.work();
            }
        }
    }

    /// The attempt that it stands still for, as its source.
    fn stands_for(&self) -> Option<Ticket> {
        match &self.machine {
            Some(Machine::Source(s)) => match *s.state() {
                SourceState::Stopped { ticket, .. } => Some(ticket),
                _ => None,
            },
            _ => None,
        }
    }

    /// It is isolated: what it has learnt and let through follows, for the attempt that it is isolated for.
    fn follow(&mut self, ticket: Ticket) {
        let (node, me) = (self.node.clone(), self.me.clone());
        self.sending = Some(tokio::spawn(async move {
            reach_async(Point::Stopped, me.id).await;
            if let Err(error) = state::send(&node, &me, ticket).await {
                tracing::warn!(component = me.id.0, %error, "its state did not get there");
                if let Some(mv) = &mut lock(&me.view).leaving {
                    mv.error = Some(error.to_string());
                }
                me.tell(Input::Event(Event::MigrationFailed)).await;
            }
        }));
    }

    fn feed(&mut self, event: Event) {
        let Some(machine) = &mut self.machine else { return };
        let timer = matches!(event, Event::Timer);
        let (said, before) = (format!("{event:?}"), machine.describe());
        let verdict = machine.handle(event);
        tracing::debug!(
            component = self.me.id.0,
            event = said,
            before,
            after = machine.describe(),
            ?verdict,
            "hand-off"
        );
        if verdict == Verdict::Taken {
            self.timer.taken(timer);
        }
        self.poll();
        self.settle();
    }

    /// A destination that has become the owner is a source from then on.
    fn settle(&mut self) {
        if let Some(record) = self.machine.as_ref().and_then(Machine::settled) {
            let seen = self.claimed.take().unwrap_or(Seen::Running);
            self.machine = Some(Machine::recover(record, seen));
            self.poll();
        }
    }

    fn poll(&mut self) {
        while let Some(action) = self.machine.as_mut().and_then(Machine::poll_action) {
            match action {
                Action::Persist(record) => self.records.push_back(record),
                Action::Send(message) => {
                    if let Some(peer) = lock(&self.me.kept).peer.clone() {
                        self.node.peers().say(&self.node, peer, proto::encode(&Note::Component(message)));
                    }
                }
                Action::SetTimer => self.timer.set(),
                Action::AbortMigration => {
                    if let Some(sending) = self.sending.take() {
                        sending.abort();
                    }
                }
                effect => self.effects.push_back(effect),
            }
        }
        self.work();
        self.note();
    }

    /// What the machine's state says about the move.
    fn note(&mut self) {
        let Some(Machine::Source(source)) = &self.machine else { return };
        let state = *source.state();
        let isolated = self.isolated.map(|at| at.elapsed().as_secs_f64() * 1000.0);
        let reserving = self.reserving.is_some();
        self.leaving(
            |mv| match state {
                SourceState::Releasing { .. } | SourceState::Released { .. } if mv.outcome.is_open() => {
                    mv.isolated_ms = mv.isolated_ms.or(isolated);
                    mv.error = None;
                    mv.outcome = Outcome::Completed;
                }
                SourceState::Owning { .. } if !reserving && mv.outcome.is_open() => {
                    mv.outcome = Outcome::Failed;
                    mv.error.get_or_insert("the destination gave it up, or did not answer in time".into());
                }
                SourceState::Sealed { .. } if isolated.is_some_and(|ms| ms > 5000.0) => {
                    mv.outcome = Outcome::WaitsForPeer;
                    mv.error = Some("sealed, and the destination is not heard".into());
                }
                _ => {}
            },
            None,
        );
    }

    /// Begins the next record and the next effect, where none is under way.
    fn work(&mut self) {
        let arriving = matches!(self.machine, Some(Machine::Destination(_)));
        let id = self.me.id;
        if self.writing.is_none()
            && let Some(record) = self.records.pop_front()
        {
            let node = self.node.clone();
            self.writing = Some(tokio::task::spawn_blocking(move || {
                match record {
                    Record::Sealed(_) => reach(Point::Sealing, id),
                    Record::Granted(_) => reach(Point::Commit, id),
                    Record::Released(_) => reach(Point::Releasing, id),
                    Record::Owned(_) if arriving => reach(Point::Settling, id),
                    _ => {}
                }
                if let Err(error) = lock(&node.components().ledger).store(id, &record) {
                    fatal(&format!("a record of the hand-off cannot be written: {error}"));
                }
                match record {
                    Record::Staged(_) => reach(Point::Staged, id),
                    Record::Sealed(_) => reach(Point::Sealed, id),
                    Record::Granted(_) => reach(Point::Granted, id),
                    Record::Started(_) => reach(Point::Started, id),
                    _ => {}
                }
                record
            }));
        }
        let destination = match &self.machine {
            Some(Machine::Destination(d)) => Some(*d.state()),
            _ => None,
        };
        if !matches!(destination, Some(DestinationState::Staged { .. })) {
            self.coming.end();
        }
        if self.doing.is_some() || self.again.is_some() {
            return;
        }
        let (node, me) = (self.node.clone(), self.me.clone());
        if let Some(action) = self.effects.pop_front() {
            if action == Action::Close && self.isolated.is_none() {
                self.isolated = Some(Instant::now());
            }
            if matches!(action, Action::Open(..)) {
                self.isolated = None;
            }
            let to = self.stands_for().and_then(|_| {
                let kept = lock(&self.me.kept);
                Some((kept.peer.clone()?, kept.order.as_ref().and_then(|order| order.capability.clone())))
            });
            let granted = matches!(destination, Some(DestinationState::Granted { .. }));
            self.trying = Some(action);
            self.doing = Some(tokio::spawn(async move { perform(&node, &me, action, granted, to).await }));
        } else if let Some(part) = self.coming.pop() {
            self.doing = Some(tokio::spawn(async move { state::put_in(&node, &me, part).await }));
        }
    }

    /// Lets others see where the machine stands.
    fn publish(&self) {
        let ownership = match self.machine.as_ref().map(Machine::status) {
            Some(Status::Runs) => Ownership::Here,
            Some(Status::Pausing) => Ownership::Pausing,
            // A component has no memory to follow it.
            Some(Status::WaitsForPeer | Status::Lends | Status::MemoryLost) => Ownership::WaitsForPeer,
            Some(Status::NotHere) | None => Ownership::Elsewhere,
        };
        let owner = match self.record {
            Some(Record::Owned(owner)) => (owner.lineage, owner.generation),
            Some(
                Record::Sealed(t)
                | Record::Released(t)
                | Record::Staged(t)
                | Record::Prepared(t)
                | Record::Granted(t)
                | Record::Draining(t)
                | Record::Started(t)
                | Record::Refused(t)
                | Record::Returned(t),
            ) => (t.lineage, t.generation),
            Some(Record::Outranked { lineage, .. }) => (lineage, Generation(0)),
            None => (Lineage::FIRST, Generation(0)),
        };
        let mut view = lock(&self.me.view);
        (view.ownership, view.owner, view.removable) = (ownership, owner, self.may_remove().is_ok());
        view.standing = Standing::of(self.machine.as_ref());
    }
}

impl Keeper {
    /// Its new file is the one that it has from now on.
    fn redefine(&self, node: &Node, definition: ComponentDefinition) -> Result<(), ApiError> {
        let kept = Kept { definition, ..lock(&self.kept).clone() };
        node.components().store(&kept)?;
        *lock(&self.kept) = kept;
        Ok(())
    }
}

async fn ask_peer(node: &Arc<Node>, peer: &PeerHost, ask: ComponentAsk) -> Result<(), ApiError> {
    let request = proto::encode(&Request::Component(Box::new(ask)));
    let answer = node.peers().request(peer, request, ANSWER).await?;
    proto::decode::<proto::Answer>(&answer).unwrap_or_else(|e| Err(failed(format!("{}: {e}", peer.name))))
}

/// What its ports' wires hear.
enum Wiring {
    /// They may take its ports, as of this owner, whom this shows.
    Opened(godwit_wire::Sequence, Option<SignedCapability>),
    /// They may not.
    Closed,
    /// The ports' devices go.
    Removed,
}

/// Tells the wires of all its ports. One that does not follow is repaired by those who look after wires; the component
/// does not wait for it.
async fn wires(node: &Arc<Node>, definition: &ComponentDefinition, what: &Wiring) {
    // At once: each is some changes in the kernel, and the component is isolated meanwhile.
    let all = definition.endpoints.iter().map(|endpoint| async move {
        let done = match what {
            Wiring::Opened(sequence, shows) => node.end_opened(*endpoint, *sequence, shows.clone()).await,
            Wiring::Closed => node.end_closed(*endpoint).await,
            Wiring::Removed => node.end_removed(*endpoint).await,
        };
        if let Err(error) = done {
            tracing::error!(component = definition.id.0, endpoint, %error, host = node.name(), "its wire does not follow");
        }
    });
    futures_util::future::join_all(all).await;
}

/// Where a component goes that stops, and what shows that it may.
type Leaving = Option<(PeerHost, Option<SignedCapability>)>;

/// What came of what was begun: what is to be told the machine of it, or why it has to be tried again.
type Done = Result<Option<Event>, ApiError>;

/// Tries to carry out an effect. `granted`: it was given here, and is not started yet.
async fn perform(node: &Arc<Node>, me: &Arc<Keeper>, action: Action, granted: bool, leaving: Leaving) -> Done {
    let place = &node.components().place;
    let definition = lock(&me.kept).definition.clone();
    match action {
        // There is nothing to copy before it is isolated.
        Action::Migrate(_) => Ok(Some(Event::VcpusStopped)),
        Action::AnswerShut => Ok(Some(Event::Postmigrate)),
        Action::Close => {
            if let Some((to, capability)) = &leaving {
                for endpoint in &definition.endpoints {
                    node.end_leaves(*endpoint, to, capability.clone()).await;
                }
            }
            me.disprove(None);
            // Before its ports are isolated: a wire that is laid afterwards would take them out again.
            wires(node, &definition, &Wiring::Closed).await;
            let wanted = spec(&definition)?;
            place.close(&wanted).await.map(|()| Some(Event::Closed)).map_err(refused)
        }
        Action::Quit => {
            wires(node, &definition, &Wiring::Removed).await;
            place.remove(definition.id.0, &definition.endpoints).await.map(|()| None).map_err(refused)
        }
        Action::Receive(_) => {
            let staged = stage(place, &definition).await;
            let event = staged.is_err().then_some(Event::QemuDied);
            me.tell(Input::Answer(staged)).await;
            Ok(event)
        }
        Action::Open(lineage, generation) => {
            match open(node, me, &definition, (lineage, generation), granted).await {
                // The source has it still.
                Err(error) if granted => {
                    tracing::error!(component = me.id.0, %error, "it cannot be opened, and is given back");
                    Ok(Some(Event::QemuDied))
                }
                opened => opened.map(|()| Some(Event::Opened)),
            }
        }
        Action::Run(_) => stage(place, &definition).await.map(|()| Some(Event::Ran)),
        Action::Persist(_) | Action::Send(_) | Action::SetTimer | Action::AbortMigration => Ok(None),
    }
}

/// The component is here as its file says.
async fn stage(place: &Place, definition: &ComponentDefinition) -> Result<(), ApiError> {
    // It was read before it was taken; another version of Godwit may be stricter.
    let wanted = spec(definition)?;
    place.stage(&wanted).await.map_err(refused)
}

/// As [`stage`], and its ports may be taken by wires, as of this owner.
async fn open(
    node: &Arc<Node>,
    me: &Arc<Keeper>,
    definition: &ComponentDefinition,
    (lineage, generation): (Lineage, Generation),
    granted: bool,
) -> Result<(), ApiError> {
    let place = &node.components().place;
    // One that has just come was made when its place was; the peers wait now.
    if !granted || place.namespace(definition.id.0).is_none() {
        stage(place, definition).await?;
    }
    let sequence = godwit_wire::Sequence { lineage: lineage.0, generation: generation.0 };
    let both = {
        let kept = lock(&me.kept);
        [kept.came.clone(), kept.order.as_ref().and_then(|order| order.capability.clone())]
    };
    let shows = crate::covered::held_among(node.credentials(), both, lineage, generation);
    wires(node, definition, &Wiring::Opened(sequence, shows)).await;
    // Last: what it announces goes into its wires.
    let wanted = spec(definition)?;
    place.open(&wanted).await.map_err(refused)?;
    me.prove(node, definition.endpoints.clone());
    Ok(())
}
