//! Components as objects: switches, routers, firewalls and gateways that users make, configure and move.
//!
//! The nodes are the truth here, too: who owns a component, and which file it has, is what its owner's node says. A record has what is
//! wanted and what was heard. A move is a record with an order in it: the order is sent until it is taken or refused, and then both nodes
//! are watched until one of them has the component for good. They end it without the controller; the next one on the same store looks how
//! it ended.

use crate::record::{Claim, Life};
use crate::rights::Caller;
use crate::state::{Controller, HostRecord, conflict, invalid, missing};
use crate::store::{Change, Counter, Kind};
use axum::Json;
use axum::extract::{Extension, Path, State};
use godwit_api::component::{
    ApplyConfig, ComponentDefinition, ComponentKind, ComponentMove, ComponentObject, ComponentOrder, ComponentPort,
    CreateComponent, LocalComponent, MoveComponent, NetworkProof,
};
use godwit_api::host::{OutrankVm, Ownership, PeerHost};
use godwit_api::progress::Outcome;
use godwit_api::{ApiError, Name, Problem, done};
use godwit_units::{Generation, Lineage, MoveId, VmId};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

type Answer<T> = Result<Json<T>, ApiError>;
type Shared = State<Arc<Controller>>;

/// Ports that one may have, as its file's reader has it.
const MOST_PORTS: u8 = 64;
/// The longest file, bytes, as its reader has it.
const LONGEST_CONFIG: usize = 256 << 10;
/// How often the nodes of a move are asked: it lasts some hundred milliseconds.
const WATCH: Duration = Duration::from_millis(100);
/// How long a component's new host may take to say whether the network leads there: it asks for ten seconds, and may be started again meanwhile.
const PROVING: Duration = Duration::from_secs(40);

/// A component.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ComponentRecord {
    /// What it is.
    pub definition: ComponentDefinition,
    /// The host that owns it, as last heard.
    pub host: Name,
    /// As last heard.
    pub lineage: Lineage,
    /// As last heard.
    pub generation: Generation,
    /// Whether it is wholly there.
    pub life: Life,
    /// Hosts that it has been on, or was on its way to: whoever deletes it asks them, too.
    #[serde(default)]
    pub left: BTreeSet<Name>,
    /// Its ports' MTUs, bytes.
    #[serde(default)]
    pub mtus: Vec<u16>,
    /// The order of the move under way.
    #[serde(default)]
    pub order: Option<ComponentOrder>,
    /// The last move, as it ended, or as it stood at its beginning.
    #[serde(default)]
    pub last_move: Option<ComponentMove>,
    /// Who has claimed it last for a host, and why.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub claimed: Option<Claim>,
}

pub(crate) fn put(record: &ComponentRecord) -> Change {
    Change::put(Kind::ComponentObject, record.definition.id.0, record)
}

/// All of them, by name.
///
/// # Errors
/// The store's.
pub fn records(c: &Controller) -> Result<Vec<ComponentRecord>, ApiError> {
    let mut all: Vec<ComponentRecord> = c.store.read_all(Kind::ComponentObject)?;
    all.sort_by(|a, b| a.definition.name.cmp(&b.definition.name));
    Ok(all)
}

/// Refuses a name that a component has: an end of a wire is an object's, by its name.
///
/// # Errors
/// [`Problem::Conflict`], or the store's.
pub fn check_name(c: &Controller, name: &Name) -> Result<(), ApiError> {
    if records(c)?.iter().any(|r| &r.definition.name == name) {
        return Err(conflict(format!("there is a component `{name}` already")));
    }
    Ok(())
}

pub(crate) fn sees(who: &Caller, record: &ComponentRecord) -> bool {
    who.domain().is_none_or(|mine| record.definition.domain.as_ref() == Some(mine))
}

pub(crate) fn find(c: &Controller, who: &Caller, name: &Name) -> Result<ComponentRecord, ApiError> {
    let found = records(c)?.into_iter().find(|r| &r.definition.name == name && sees(who, r));
    found.ok_or_else(|| missing("component", name))
}

fn ready(c: &Controller, who: &Caller, name: &Name) -> Result<ComponentRecord, ApiError> {
    let record = find(c, who, name)?;
    match record.life {
        Life::Ready if record.order.is_none() => Ok(record),
        Life::Ready => {
            Err(conflict(format!("`{name}` is being moved")).remedy(format!("see `godwit component show {name}`")))
        }
        Life::Creating => Err(conflict(format!("`{name}` is being created")).remedy("wait until that has ended")),
        Life::Deleting => {
            Err(conflict(format!("`{name}` is being deleted"))
                .remedy("see that its hosts can be reached; it ends then"))
        }
    }
}

/// A gateway's file names an interface of its host: that is the deployment's.
fn may_configure(who: &Caller, kind: ComponentKind) -> Result<(), ApiError> {
    if kind == ComponentKind::Gateway && who.domain().is_some() {
        let message = "a gateway is an interface of its host's network, which no trust domain has";
        return Err(ApiError::new(Problem::Forbidden, message).remedy("ask an admin of the deployment"));
    }
    Ok(())
}

fn short(config: &str) -> Result<(), ApiError> {
    if config.len() > LONGEST_CONFIG {
        return Err(invalid(format!("a configuration of {} bytes: {LONGEST_CONFIG} do", config.len())));
    }
    Ok(())
}

/// A component as people see it.
pub(crate) async fn shown(c: &Controller, record: ComponentRecord) -> Result<ComponentObject, ApiError> {
    let host: Option<HostRecord> = c.store.read(Kind::Host, &record.host)?;
    let local = match &host {
        Some(host) => c.node(host).component(record.definition.id).await.ok(),
        None => None,
    };
    let mut last_move = record.last_move;
    if let (Some(order), Some(local)) = (&record.order, &local)
        && let Some(leaving) = &local.leaving
        && leaving.id == order.id
    {
        // Whether it is over is for whoever watches both nodes to say.
        let outcome = if leaving.outcome.is_open() { leaving.outcome } else { Outcome::Running };
        last_move = Some(ComponentMove { outcome, ..leaving.clone() });
    }
    let ports = record.definition.endpoints.iter().zip(1..).map(|(endpoint, number)| ComponentPort {
        name: format!("p{number}").parse().expect("a letter and a number name a port"),
        endpoint: *endpoint,
    });
    Ok(ComponentObject {
        id: record.definition.id,
        ports: ports.collect(),
        name: record.definition.name,
        kind: record.definition.kind,
        site: host.map_or_else(|| record.host.clone(), |h| h.site),
        host: record.host,
        config: record.definition.config,
        lineage: record.lineage,
        generation: record.generation,
        ownership: local.map(|l| l.ownership),
        last_move,
    })
}

pub async fn list(State(c): Shared, Extension(who): Extension<Caller>) -> Answer<Vec<ComponentObject>> {
    let mut all = vec![];
    for record in records(&c)?.into_iter().filter(|r| sees(&who, r)) {
        all.push(shown(&c, record).await?);
    }
    Ok(Json(all))
}

pub async fn show(
    State(c): Shared,
    Extension(who): Extension<Caller>,
    Path(name): Path<Name>,
) -> Answer<ComponentObject> {
    Ok(Json(shown(&c, find(&c, &who, &name)?).await?))
}

pub async fn create(
    State(c): Shared,
    Extension(who): Extension<Caller>,
    Json(new): Json<CreateComponent>,
) -> Answer<ComponentObject> {
    may_configure(&who, new.kind)?;
    short(&new.config)?;
    if !(1..=MOST_PORTS).contains(&new.ports) {
        return Err(invalid(format!("{} ports: 1 to {MOST_PORTS} do", new.ports)));
    }
    let host = crate::vms::place(&c, &new.at).await?;
    let (record, in_hand) = {
        let _deciding = c.decide();
        check_name(&c, &new.name)?;
        if c.vm_records()?.iter().any(|vm| vm.definition.name == new.name) {
            return Err(conflict(format!("there is a VM `{}` already", new.name)));
        }
        if c.store.get(Kind::Component, new.name.as_str())?.is_some() {
            return Err(conflict(format!("there is a component `{}` already", new.name)));
        }
        c.host(&host.name)?;
        let id = VmId(c.store.next(Counter::Vm)?);
        let endpoints = (0..new.ports).map(|_| crate::vms::wire_number(&c)).collect::<Result<_, _>>()?;
        let CreateComponent { name, kind, config, .. } = new;
        let definition = ComponentDefinition { id, name, kind, endpoints, config, domain: who.domain().cloned() };
        let record = ComponentRecord {
            definition,
            host: host.name.clone(),
            lineage: Lineage::FIRST,
            generation: Generation::FIRST,
            life: Life::Creating,
            left: BTreeSet::new(),
            mtus: vec![],
            order: None,
            last_move: None,
            claimed: None,
        };
        let in_hand = c.take_in_hand(id);
        c.store.commit(&[put(&record)])?;
        (record, in_hand)
    };
    // Whoever asks may go away; what was begun ends all the same.
    let task = tokio::spawn(async move {
        let _in_hand = in_hand;
        let made = c.node(&host).define_component(&record.definition).await;
        match made {
            Ok(local) => {
                let record = ComponentRecord { life: Life::Ready, mtus: local.mtus, ..record };
                c.store.commit(&[put(&record)])?;
                shown(&c, record).await
            }
            Err(refusal) => {
                let record = ComponentRecord { life: Life::Deleting, ..record };
                c.store.commit(&[put(&record)])?;
                if let Err(error) = dismantle(&c, &record).await {
                    tracing::warn!(component = %record.definition.name, %error, "cannot take it back yet; trying again later");
                }
                Err(refusal)
            }
        }
    });
    Ok(Json(task.await.map_err(|e| ApiError::new(Problem::Failed, format!("the creation broke off: {e}")))??))
}

/// Takes it away from every host that it ever had to do with.
async fn dismantle(c: &Controller, record: &ComponentRecord) -> Result<(), ApiError> {
    let id = record.definition.id;
    for name in record.left.iter().chain([&record.host]) {
        // A host that was removed took what it had along.
        if let Some(host) = c.store.read::<HostRecord>(Kind::Host, name)? {
            match c.node(&host).remove_component(id).await {
                Err(error) if error.problem != Problem::NotFound => return Err(error),
                _ => {}
            }
        }
    }
    Ok(c.store.commit(&[Change::remove(Kind::ComponentObject, id.0)])?)
}

pub async fn remove(State(c): Shared, Extension(who): Extension<Caller>, Path(name): Path<Name>) -> Answer<Value> {
    let (record, in_hand) = {
        let _deciding = c.decide();
        let mut record = ready(&c, &who, &name)?;
        crate::wires::refuse_removal(&c, &name)?;
        record.life = Life::Deleting;
        c.store.commit(&[put(&record)])?;
        let in_hand = c.take_in_hand(record.definition.id);
        (record, in_hand)
    };
    let task = tokio::spawn(async move {
        let _in_hand = in_hand;
        dismantle(&c, &record).await
    });
    task.await.map_err(|e| ApiError::new(Problem::Failed, format!("the deletion broke off: {e}")))??;
    Ok(done())
}

pub async fn apply(
    State(c): Shared,
    Extension(who): Extension<Caller>,
    Path(name): Path<Name>,
    Json(new): Json<ApplyConfig>,
) -> Answer<ComponentObject> {
    let record = ready(&c, &who, &name)?;
    may_configure(&who, record.definition.kind)?;
    short(&new.config)?;
    let definition = ComponentDefinition { config: new.config, ..record.definition };
    // The node's file is the truth: one that it has taken, and we have not stored, is heard of at the next look.
    let local = c.node_of(&record.host)?.define_component(&definition).await?;
    let record = {
        let _deciding = c.decide();
        let mut now = find(&c, &who, &name)?;
        now.definition.config = local.definition.config;
        now.mtus = local.mtus;
        c.store.commit(&[put(&now)])?;
        now
    };
    Ok(Json(shown(&c, record).await?))
}

pub async fn start_move(
    State(c): Shared,
    Extension(who): Extension<Caller>,
    Path(name): Path<Name>,
    Json(wanted): Json<MoveComponent>,
) -> Answer<ComponentObject> {
    let record = ready(&c, &who, &name)?;
    let host = crate::vms::place(&c, &wanted.to).await?;
    if host.name == record.host {
        return Err(conflict(format!("`{name}` is on `{}` already", host.name)).remedy("name another host or site"));
    }
    let (facts, local) =
        (c.node(&host).facts().await?, c.node_of(&record.host)?.component(record.definition.id).await?);
    if local.ownership != Ownership::Here {
        return Err(conflict(format!("`{}` does not own `{name}` now", record.host))
            .remedy(format!("see `godwit component show {name}`, and wait for its owner")));
    }
    let to = PeerHost { name: host.name.clone(), link: facts.link, underlay: facts.underlay };
    let record = {
        let _deciding = c.decide();
        let mut record = ready(&c, &who, &name)?;
        // A move that was taken back has left it in a later generation; what is signed has to fit what its node has.
        let owner = (local.lineage, local.generation);
        (record.lineage, record.generation) = owner.max((record.lineage, record.generation));
        record.definition.config = local.definition.config;
        let id = MoveId(c.store.next(Counter::Move)?);
        record.last_move = Some(ComponentMove {
            id,
            from: record.host.clone(),
            to: to.name.clone(),
            outcome: Outcome::Running,
            isolated_ms: None,
            stations: 0,
            flows: 0,
            error: None,
        });
        record.left.insert(to.name.clone());
        record.order = Some(ComponentOrder { id, to, capability: None });
        c.store.commit(&[put(&record)])?;
        record
    };
    c.spawn(drive(Arc::clone(&c), record.definition.id));
    Ok(Json(shown(&c, record).await?))
}

/// Goes on with every move that has not ended; for a controller that starts.
///
/// # Errors
/// The store's.
pub fn resume(c: &Arc<Controller>) -> Result<(), ApiError> {
    for record in records(c)?.into_iter().filter(|r| r.order.is_some()) {
        c.spawn(drive(Arc::clone(c), record.definition.id));
    }
    Ok(())
}

/// What a controller has seen of a move since it looks after it.
#[derive(Debug, Default)]
struct Watched {
    /// The source has the order.
    taken: bool,
    /// Since when it has been its destination's.
    arrived: Option<Instant>,
}

async fn drive(c: Arc<Controller>, id: VmId) {
    let mut watched = Watched::default();
    loop {
        match step(&c, id, &mut watched).await {
            Ok(true) => return,
            Ok(false) => {}
            Err(error) => tracing::warn!(component = id.0, %error, "its move cannot be looked after now; trying again"),
        }
        tokio::time::sleep(WATCH).await;
    }
}

/// What follows from what both nodes say. Nothing follows from silence.
#[derive(Clone, Debug, PartialEq)]
enum Next {
    Watch,
    /// It is there, the source's figures, and whether the network leads there as well.
    Arrived((Lineage, Generation), Option<ComponentMove>, Option<NetworkProof>),
    Failed(String),
}

fn next(
    mv: MoveId,
    before: (Lineage, Generation),
    source: &Result<LocalComponent, ApiError>,
    destination: &Result<LocalComponent, ApiError>,
) -> Next {
    let leaving = source.as_ref().ok().and_then(|l| l.leaving.clone()).filter(|l| l.id == mv);
    if let Ok(there) = destination
        && there.ownership == Ownership::Here
        && (there.lineage, there.generation) > before
    {
        // The source has the figures, and may not have heard yet that it is over.
        return match leaving {
            Some(leaving) if leaving.outcome.is_open() => Next::Watch,
            figures => Next::Arrived((there.lineage, there.generation), figures, there.proof.clone()),
        };
    }
    match (source, leaving) {
        (Ok(here), _) if here.ownership == Ownership::Here && here.lineage > before.0 => {
            Next::Failed("it was claimed for the source".into())
        }
        (Ok(here), Some(leaving)) if here.ownership == Ownership::Here && leaving.outcome == Outcome::Failed => {
            Next::Failed(leaving.error.unwrap_or_else(|| "the source took it back".into()))
        }
        (Ok(here), None) if here.ownership == Ownership::Here => {
            Next::Failed("the source's node was restarted, and took it back".into())
        }
        _ => Next::Watch,
    }
}

/// Whether it is over.
async fn step(c: &Arc<Controller>, id: VmId, watched: &mut Watched) -> Result<bool, ApiError> {
    let Some(record) = c.store.read::<ComponentRecord>(Kind::ComponentObject, id.0)? else { return Ok(true) };
    let Some(order) = record.order.clone() else { return Ok(true) };
    let from = record.last_move.as_ref().map_or(&record.host, |mv| &mv.from);
    let (source, destination) = (c.node_of(from)?, c.node_of(&order.to.name)?);
    if !watched.taken {
        let order = crate::allow::component(c, &record, &order)?;
        match source.move_component(id, &order).await {
            Ok(_) => watched.taken = true,
            Err(error) if error.problem == Problem::Unreachable => {}
            // It may have left already, by this very order, before a controller died.
            Err(error) => {
                watched.taken = true;
                let (here, there) = tokio::join!(source.component(id), destination.component(id));
                let known = here.as_ref().is_ok_and(|l| l.leaving.as_ref().is_some_and(|mv| mv.id == order.id));
                let owns = here.is_ok_and(|l| l.ownership == Ownership::Here);
                if owns && !known && !there.is_ok_and(|l| l.ownership != Ownership::Elsewhere) {
                    return end(c, id, order.id, Err(error.to_string()));
                }
            }
        }
    }
    let (source, destination) = tokio::join!(source.component(id), destination.component(id));
    match next(order.id, (record.lineage, record.generation), &source, &destination) {
        Next::Watch => Ok(false),
        Next::Arrived(owner, figures, proof) => {
            let since = *watched.arrived.get_or_insert_with(Instant::now);
            let unproved = match proof {
                Some(NetworkProof::Proved) => None,
                Some(NetworkProof::Unproved(why)) => Some(why),
                Some(NetworkProof::Asking) | None if since.elapsed() < PROVING => return Ok(false),
                Some(NetworkProof::Asking) | None => Some(format!("`{}` does not say whether it does", order.to.name)),
            };
            end(c, id, order.id, Ok(Arrival { owner, figures, unproved }))
        }
        // The order was not taken yet.
        Next::Failed(_) if !watched.taken => Ok(false),
        Next::Failed(why) => end(c, id, order.id, Err(why)),
    }
}

/// A component is its destination's.
struct Arrival {
    owner: (Lineage, Generation),
    figures: Option<ComponentMove>,
    /// Why it is not known that the network leads there.
    unproved: Option<String>,
}

type Ended = Result<Arrival, String>;

fn end(c: &Controller, id: VmId, mv: MoveId, how: Ended) -> Result<bool, ApiError> {
    let _deciding = c.decide();
    let Some(mut record) = c.store.read::<ComponentRecord>(Kind::ComponentObject, id.0)? else { return Ok(true) };
    let Some(order) = record.order.take_if(|order| order.id == mv) else { return Ok(true) };
    match how {
        Ok(Arrival { owner: (lineage, generation), figures, unproved }) => {
            record.left.insert(std::mem::replace(&mut record.host, order.to.name));
            let before = std::mem::replace(&mut record.lineage, lineage);
            record.generation = generation;
            let ended = figures.or(record.last_move);
            let claimed = (lineage > before).then(|| "it was claimed for the destination".to_owned());
            let error = claimed.or(unproved);
            let outcome = if error.is_some() { Outcome::NetworkUnproved } else { Outcome::Completed };
            record.last_move = ended.map(|mv| ComponentMove { outcome, error, ..mv });
        }
        Err(why) => {
            if let Some(mv) = &mut record.last_move {
                mv.outcome = Outcome::Failed;
                mv.error = Some(why);
            }
        }
    }
    c.store.commit(&[put(&record)])?;
    Ok(true)
}

/// A host that was lost is back, and takes a component for its own that was claimed for another one meanwhile.
async fn outrank(node: &godwit_api::HostClient, record: &ComponentRecord, host: &Name) {
    let (id, lineage) = (record.definition.id, record.lineage);
    match node.outrank_component(id, OutrankVm { lineage }).await {
        Ok(()) => {
            tracing::warn!(component = %record.definition.name, %host, "it was claimed elsewhere, and is gone there")
        }
        Err(error) => {
            tracing::error!(component = %record.definition.name, %host, %error, "it was claimed elsewhere, and is there still")
        }
    }
}

/// Hears where components are, and goes on with what was left half done.
///
/// # Errors
/// The store's.
pub async fn tend(c: &Arc<Controller>) -> Result<(), ApiError> {
    for record in records(c)? {
        let id = record.definition.id;
        if c.is_in_hand(id) || record.order.is_some() {
            continue;
        }
        if record.life != Life::Ready {
            let _in_hand = c.take_in_hand(id);
            let record = ComponentRecord { life: Life::Deleting, ..record };
            c.store.commit(&[put(&record)])?;
            if let Err(error) = dismantle(c, &record).await {
                tracing::warn!(component = %record.definition.name, %error, "cannot delete it yet; trying again later");
            }
            continue;
        }
        for name in record.left.iter().chain([&record.host]) {
            let Ok(node) = c.node_of(name) else { continue };
            let Ok(local) = node.component(id).await else { continue };
            let (owner, known) = ((local.lineage, local.generation), (record.lineage, record.generation));
            if crate::resolve::contradicts(local.ownership, local.lineage, record.lineage) {
                outrank(&node, &record, name).await;
            }
            if local.ownership != Ownership::Here || owner < known {
                continue;
            }
            let _deciding = c.decide();
            let Some(mut now) = c.store.read::<ComponentRecord>(Kind::ComponentObject, id.0)? else { break };
            let stands = now.order.is_none() && now.life == Life::Ready && !c.is_in_hand(id);
            if stands && (owner, name, &local.definition.config) != (known, &now.host, &now.definition.config) {
                now.definition.config = local.definition.config;
                now.mtus = local.mtus;
                if *name != now.host {
                    now.left.insert(std::mem::replace(&mut now.host, name.clone()));
                }
                (now.lineage, now.generation) = owner;
                c.store.commit(&[put(&now)])?;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const BEFORE: (Lineage, Generation) = (Lineage(0), Generation(1));

    fn local(ownership: Ownership, generation: u64, leaving: Option<Outcome>) -> Result<LocalComponent, ApiError> {
        let name: Name = "a".parse().unwrap();
        let definition = ComponentDefinition {
            id: VmId(1),
            name: name.clone(),
            kind: ComponentKind::Switch,
            endpoints: vec![1],
            config: String::new(),
            domain: None,
        };
        let leaving = leaving.map(|outcome| ComponentMove {
            id: MoveId(7),
            from: name.clone(),
            to: name,
            outcome,
            isolated_ms: None,
            stations: 0,
            flows: 0,
            error: Some("why".into()),
        });
        Ok(LocalComponent {
            definition,
            ownership,
            lineage: Lineage(0),
            generation: Generation(generation),
            leaving,
            mtus: vec![],
            proof: Some(NetworkProof::Asking),
        })
    }

    fn silent() -> Result<LocalComponent, ApiError> {
        Err(ApiError::new(Problem::Unreachable, "cut"))
    }

    #[test]
    fn a_newer_generation_at_the_destination_is_an_arrival_and_nothing_follows_from_silence() {
        let look = |source, destination| next(MoveId(7), BEFORE, &source, &destination);
        assert_eq!(look(silent(), silent()), Next::Watch);
        assert!(matches!(look(silent(), local(Ownership::Here, 2, None)), Next::Arrived(..)));
        assert_eq!(look(silent(), local(Ownership::Here, 1, None)), Next::Watch);
        assert_eq!(look(silent(), local(Ownership::Elsewhere, 2, None)), Next::Watch);
        let sealed = || local(Ownership::WaitsForPeer, 2, Some(Outcome::Running));
        assert_eq!(look(sealed(), local(Ownership::Here, 2, None)), Next::Watch);
        assert_eq!(look(sealed(), silent()), Next::Watch);
        let failed = local(Ownership::Here, 1, Some(Outcome::Failed));
        assert_eq!(look(failed, silent()), Next::Failed("why".into()));
        assert!(matches!(look(local(Ownership::Here, 1, None), silent()), Next::Failed(_)));
        let claimed = |leaving| local(Ownership::Here, 1, leaving).map(|l| LocalComponent { lineage: Lineage(1), ..l });
        assert!(matches!(look(claimed(Some(Outcome::WaitsForPeer)), silent()), Next::Failed(_)), "at the source");
        assert!(matches!(look(silent(), claimed(None)), Next::Arrived((Lineage(1), _), None, _)), "at the destination");
    }
}
