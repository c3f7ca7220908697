//! Wires to gateways, from both of their ends.
//!
//! At the VM's owner: whoever has been granted a VM points its wires' far ends at itself, over the link and without the
//! controller, since a hand-off has to end without it. That goes on in the background until the gateway has answered: a guest
//! runs whether its gateway can be reached or not, and the probe at the move's end says what is the matter. An undone
//! hand-off opens the VM at the source again, with a higher generation if it had been granted, and so points back. A gateway that has heard
//! of the destination believes that when the destination has said as well that it gave the VM back: so it says that, the same way
//! and for as long ([`let_go`]), and after a restart once more.
//!
//! At the gateway: the ports of its wires are kept in files, because the kernel forgets them at a reboot and nobody else would
//! notice. Which host a port leads to is decided by [`godwit_wire::Port`]: an older owner's order is refused whatever way it
//! comes, and one that the controller's capability does not cover is refused whoever it comes from ([`crate::covered`]).

use crate::covered;
use crate::durable;
use crate::node::{Node, network};
use crate::parts::{Parts, lock};
use crate::proto::{self, ProbeWire, Repoint, Request};
use crate::spec;
use godwit_api::host::{Blocker, GatewayPort, Ownership, PeerHost};
use godwit_api::vm::{ComponentSpec, VmDefinition, WireDefinition};
use godwit_api::{ApiError, Name, Problem};
use godwit_handoff::{Generation, Lineage, Record};
use godwit_wire::{EndpointSpec, MacAddr, Port, PortOrder, PortState, Refused, Sequence, Vni, WireId};
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::task::AbortHandle;

/// How long a gateway may take to answer, besides what it was asked to wait.
const ANSWER: Duration = Duration::from_secs(5);
/// The first wait before a gateway that did not answer is asked again: less than a client notices.
const FIRST_WAIT: Duration = Duration::from_millis(200);
/// The longest: a gateway that comes back is pointed within this time, and one that does not is no work.
const LONGEST_WAIT: Duration = Duration::from_secs(5);
/// The longest that a gateway asks for a guest on somebody's behalf.
const LONGEST_PROBE: Duration = Duration::from_secs(30);

/// What a node knows of gateways.
#[derive(Debug)]
pub struct Gateways {
    /// Where the ports of wires that end here are remembered, a file each.
    folder: PathBuf,
    /// Ports are changed one at a time: what is remembered and what the kernel does stay the same.
    changing: tokio::sync::Mutex<()>,
    /// The tasks that point wires here, one a wire; another one ends the one before.
    pointing: Mutex<BTreeMap<u32, AbortHandle>>,
}

impl Gateways {
    /// With nothing made yet.
    #[must_use]
    pub fn new(state: &Path) -> Self {
        Self { folder: state.join("gateways"), changing: tokio::sync::Mutex::default(), pointing: Mutex::default() }
    }

    fn path(&self, wire: u32) -> PathBuf {
        self.folder.join(format!("{wire}.json"))
    }

    fn load(&self, wire: u32) -> Result<Option<GatewayPort>, ApiError> {
        let path = self.path(wire);
        let failed = |why: String| ApiError::new(Problem::Failed, format!("{}: {why}", path.display()));
        match std::fs::read(&path) {
            Ok(bytes) => serde_json::from_slice(&bytes).map(Some).map_err(|e| failed(e.to_string())),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(failed(e.to_string())),
        }
    }

    fn store(&self, wire: u32, port: &GatewayPort) -> Result<(), ApiError> {
        let path = self.path(wire);
        durable::replace_json(&path, port)
            .map_err(|e| ApiError::new(Problem::Failed, format!("{}: {e}", path.display())))
    }

    fn forget(&self, wire: u32) -> Result<(), ApiError> {
        let path = self.path(wire);
        durable::remove(&path).map_err(|e| ApiError::new(Problem::Failed, format!("{}: {e}", path.display())))
    }

    /// The ports of wires that end here, by wire; one that cannot be read is left out.
    pub(crate) fn ports(&self) -> Vec<(u32, GatewayPort)> {
        self.known().into_iter().filter_map(|wire| Some((wire, self.load(wire).ok()??))).collect()
    }

    fn known(&self) -> Vec<u32> {
        let Ok(entries) = std::fs::read_dir(&self.folder) else { return vec![] };
        entries.filter_map(|e| e.ok()?.file_name().to_str()?.strip_suffix(".json")?.parse().ok()).collect()
    }
}

fn sequence(lineage: Lineage, generation: Generation) -> Sequence {
    Sequence { lineage: lineage.0, generation: generation.0 }
}

/// Asks the machine whether the order may be carried out.
fn allowed(known: Option<&GatewayPort>, order: PortOrder) -> Result<(), Refused> {
    let state = known
        .map_or(PortState::Absent, |port| PortState::Attached(sequence(port.lineage, port.generation), port.remote));
    Port::recover(state).handle(order).map(drop)
}

// At the gateway.
impl Node {
    /// Reads or writes files of ports, away from the tasks.
    async fn on_ports<T: Send + 'static>(
        self: &Arc<Self>,
        what: impl FnOnce(&Gateways) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let node = self.clone();
        let done = tokio::task::spawn_blocking(move || what(node.gateways())).await;
        done.unwrap_or_else(|_| {
            Err(ApiError::new(Problem::Failed, "a wire's end on a gateway ended in a bug of the node"))
        })
    }

    /// Makes the ports again that were here before.
    pub(crate) async fn recover_gateways(self: &Arc<Self>) {
        let gateways = self.gateways();
        let _one = gateways.changing.lock().await;
        for wire in gateways.known() {
            let result = match self.on_ports(move |gateways| gateways.load(wire)).await {
                Ok(Some(port)) => self.apply(wire, &port).await,
                Ok(None) => Ok(()),
                Err(error) => Err(error),
            };
            if let Err(error) = result {
                tracing::error!(wire, %error, "a wire's end on this gateway could not be made again");
            }
        }
    }

    async fn apply(&self, wire: u32, port: &GatewayPort) -> Result<(), ApiError> {
        let spec = godwit_wire::GatewayPort {
            wire: WireId(wire),
            vni: Vni(port.vni),
            port: spec::TUNNEL_PORT,
            bridge: port.bridge.clone(),
            mtu: port.mtu,
        };
        self.wires().gateway_ensure(&port.bridge).await.map_err(network)?;
        let order = (port.remote, sequence(port.lineage, port.generation));
        self.wires().gateway_attach(&spec, order.0, order.1).await.map_err(network)
    }

    /// The controller's order: a wire ends on a bridge here, and leads to a host. From an older owner's time it is passed over.
    ///
    /// # Errors
    /// When the network or the medium refuses.
    pub async fn attach(self: &Arc<Self>, wire: u32, port: &GatewayPort) -> Result<(), ApiError> {
        let _one = self.gateways().changing.lock().await;
        let known = self.on_ports(move |gateways| gateways.load(wire)).await?;
        let order = PortOrder::Attach(sequence(port.lineage, port.generation), port.remote);
        if let Err(why) = allowed(known.as_ref(), order) {
            tracing::info!(wire, %why, "an order of the controller comes late");
            return Ok(());
        }
        self.keep_port(wire, port.clone()).await?;
        self.apply(wire, port).await
    }

    /// Removes a wire's end on a gateway here.
    ///
    /// # Errors
    /// When the network or the medium refuses.
    pub async fn detach(self: &Arc<Self>, wire: u32) -> Result<(), ApiError> {
        let _one = self.gateways().changing.lock().await;
        self.wires().gateway_detach(WireId(wire)).await.map_err(network)?;
        self.on_ports(move |gateways| gateways.forget(wire)).await
    }

    async fn keep_port(self: &Arc<Self>, wire: u32, port: GatewayPort) -> Result<(), ApiError> {
        self.on_ports(move |gateways| gateways.store(wire, &port)).await
    }

    /// The order of a VM's owner: a wire that ends here leads to it from now on. Or the word of whoever was given a VM that it gave it back:
    /// then its source may order that, as the owner that it says this source is.
    ///
    /// # Errors
    /// [`Problem::NotFound`] when it does not end here, [`Problem::Conflict`] when there was a later owner; those are final.
    pub(crate) async fn repoint(self: &Arc<Self>, from: &str, order: &Repoint) -> Result<(), ApiError> {
        let _one = self.gateways().changing.lock().await;
        let wire = order.wire;
        let known = self.on_ports(move |gateways| gateways.load(wire)).await?;
        let wanted = PortOrder::Repoint(sequence(order.lineage, order.generation), order.remote);
        allowed(known.as_ref(), wanted).map_err(|why| {
            let problem = if why == Refused::NotAttached { Problem::NotFound } else { Problem::Conflict };
            ApiError::new(problem, format!("{} does not point wire {wire} as {from} says: {why}", self.name()))
        })?;
        let Some(known) = known else { return Ok(()) };
        let port = covered::repoint(self.credentials(), from, order, &known)?;
        self.keep_port(wire, port.clone()).await?;
        self.apply(wire, &port).await?;
        let owner = port.host.as_ref().map_or("", Name::as_str);
        tracing::info!(wire, from, owner, to = %port.remote, "wire pointed");
        Ok(())
    }

    /// Asks for a guest behind a wire that ends here, for the host that the wire leads to.
    ///
    /// # Errors
    /// When no answer came, or somebody else asks.
    pub(crate) async fn probe_wire(self: &Arc<Self>, from: &str, asked: &ProbeWire) -> Result<(), ApiError> {
        let wire = asked.wire;
        if self.wired().has(wire) {
            return self.probe_wired(from, asked).await;
        }
        let port = self
            .on_ports(move |gateways| gateways.load(wire))
            .await?
            .ok_or_else(|| ApiError::new(Problem::NotFound, format!("wire {wire} does not end at {}", self.name())))?;
        if port.host.as_ref().is_none_or(|host| host.as_str() != from) {
            let message = format!("wire {} does not lead to {from}, who asks what is behind it", asked.wire);
            return Err(ApiError::new(Problem::Forbidden, message));
        }
        let mac: MacAddr =
            asked.mac.parse().map_err(|e| ApiError::new(Problem::Invalid, format!("`{}`: {e}", asked.mac)))?;
        let within = Duration::from_millis(asked.within_ms).min(LONGEST_PROBE);
        let guest = (mac, asked.ips.as_slice());
        self.wires().gateway_probe(&port.bridge, WireId(asked.wire), guest, within).await.map(drop).map_err(network)
    }
}

/// The VM's wires that lead to gateways, and where those are.
fn wires(definition: &VmDefinition) -> impl Iterator<Item = (&WireDefinition, &PeerHost)> {
    definition.wires.iter().filter_map(|wire| {
        if !matches!(wire.component, Some(ComponentSpec::Gateway { .. })) {
            return None;
        }
        if wire.gateway.is_none() {
            tracing::error!(
                wire = wire.id,
                "it is not known where its gateway's node is: the controller has to point it"
            );
        }
        Some((wire, wire.gateway.as_ref()?))
    })
}

pub(crate) async fn ask(node: &Node, gateway: &PeerHost, request: &Request, within: Duration) -> Result<(), ApiError> {
    let name = &gateway.name;
    let asking = async {
        let session = node.peers().session(gateway).await?;
        let failed = |problem, e: &dyn std::fmt::Display| ApiError::new(problem, format!("the gateway {name}: {e}"));
        let answer = session.request(proto::encode(request), within).await;
        let answer = answer.map_err(|e| failed(Problem::Unreachable, &e))?;
        proto::decode::<proto::Answer>(&answer).unwrap_or_else(|e| Err(failed(Problem::Failed, &e)))
    };
    tokio::time::timeout(within, asking).await.unwrap_or_else(|_| {
        Err(ApiError::new(Problem::Unreachable, format!("the gateway {name} has not answered within {within:?}")))
    })
}

/// What keeps this host from being wired to the VM's gateways.
pub async fn check(node: &Node, definition: &VmDefinition) -> Vec<Blocker> {
    let mut found = vec![];
    for (wire, gateway) in wires(definition).filter(|(_, gateway)| gateway.name.as_str() != node.name()) {
        // The session is kept, and found at the grant.
        let error = match tokio::time::timeout(ANSWER, node.peers().session(gateway)).await {
            Ok(Ok(_)) => continue,
            Ok(Err(error)) => error.message,
            Err(_) => format!("no answer within {ANSWER:?}"),
        };
        found.push(Blocker {
            host: node.config().name.clone(),
            kind: "gateway".into(),
            message: format!("{} cannot reach {}, where wire {} ends: {error}", node.name(), gateway.name, wire.id),
            remedy: "see that the gateway's node runs, and that its UDP ports are open to this host".into(),
        });
    }
    found
}

/// Points the far ends of the VM's wires here: begins, and goes on until the gateways have answered.
pub fn point_here(node: &Arc<Node>, parts: &Arc<Parts>, lineage: Lineage, generation: Generation) {
    begin(node, parts, |wire| {
        let capability = covered::held(node.credentials(), parts, lineage, generation);
        Repoint { wire, remote: node.config().address, lineage, generation, capability }
    });
}

/// The VM is not here any more, or stands: its gateways are not told otherwise. Where this host had been granted it and gave it back, they are
/// told that: its source is the next owner.
pub fn let_go(node: &Arc<Node>, definition: &VmDefinition) {
    for wire in &definition.wires {
        if let Some(task) = lock(&node.gateways().pointing).remove(&wire.id) {
            task.abort();
        }
    }
    // A guest that stands waits for no record.
    let elsewhere = node.vm(definition.id).filter(|parts| parts.view().ownership == Ownership::Elsewhere);
    if let Some(parts) = elsewhere
        && let Some(Record::Returned(ticket)) = node.record(parts.id)
        && let Some(source) = parts.file().peer
    {
        begin(node, &parts, |wire| {
            let (lineage, generation) = (ticket.lineage, ticket.generation.next());
            let capability = covered::held(node.credentials(), &parts, lineage, ticket.generation);
            Repoint { wire, remote: source.underlay, lineage, generation, capability }
        });
    }
}

/// Begins to say this to the gateway of each of the VM's wires that has one.
fn begin(node: &Arc<Node>, parts: &Arc<Parts>, order: impl Fn(u32) -> Repoint) {
    for (wire, gateway) in wires(&parts.definition()) {
        let task = crate::trace::spawn(point(node.clone(), parts.clone(), gateway.clone(), order(wire.id)));
        if let Some(before) = lock(&node.gateways().pointing).insert(wire.id, task.abort_handle()) {
            before.abort();
        }
    }
}

async fn point(node: Arc<Node>, parts: Arc<Parts>, gateway: PeerHost, order: Repoint) {
    let mut wait = FIRST_WAIT;
    loop {
        let answer = if gateway.name.as_str() == node.name() {
            node.repoint(node.name(), &order).await
        } else {
            ask(&node, &gateway, &Request::Repoint(order.clone()), ANSWER).await
        };
        match answer {
            Ok(()) => break,
            // One of an earlier version does not take the word of who gave it back: its source's is later.
            Err(error) if error.problem == Problem::Forbidden && order.remote != node.config().address => return,
            Err(error) if matches!(error.problem, Problem::NotFound | Problem::Conflict | Problem::Invalid) => {
                tracing::warn!(vm = parts.name, wire = order.wire, %error, "its gateway does not follow");
                return;
            }
            Err(error) => {
                tracing::warn!(vm = parts.name, wire = order.wire, %error, "its gateway is not pointed yet; trying again");
            }
        }
        tokio::time::sleep(wait).await;
        wait = (wait * 2).min(LONGEST_WAIT);
    }
    // What was announced before has been lost on the way.
    for endpoint in spec::endpoints(&parts.definition()).unwrap_or_default() {
        if endpoint.id.0 == u64::from(order.wire)
            && let Err(error) = node.wires().announce_again(&endpoint).await
        {
            tracing::warn!(vm = parts.name, %error, "the guest could not be announced");
        }
    }
}

/// Proves that a wire leads to the guest here, from wherever its other end is.
///
/// # Errors
/// When no proof came in time.
pub async fn probe(
    node: &Node,
    definition: &VmDefinition,
    endpoint: &EndpointSpec,
    within: Duration,
) -> Result<(), ApiError> {
    let far = wires(definition)
        .find(|(wire, gateway)| u64::from(wire.id) == endpoint.id.0 && gateway.name.as_str() != node.name());
    let Some((wire, gateway)) = far else {
        return node.wires().probe(endpoint, within).await.map(drop).map_err(network);
    };
    let end = Instant::now() + within;
    loop {
        let left = end.saturating_duration_since(Instant::now());
        let within_ms = u64::try_from(left.as_millis()).unwrap_or(u64::MAX);
        let asked = ProbeWire { wire: wire.id, mac: endpoint.mac.to_string(), ips: endpoint.ips.clone(), within_ms };
        match ask(node, gateway, &Request::ProbeWire(asked), Duration::from_millis(within_ms) + ANSWER).await {
            // Its node may be starting, or the path be cut; or it has not heard yet that the wire leads here.
            Err(error)
                if matches!(error.problem, Problem::Unreachable | Problem::Forbidden)
                    && Instant::now() + FIRST_WAIT < end =>
            {
                tracing::debug!(wire = wire.id, %error, "its gateway cannot be asked yet");
            }
            answer => return answer,
        }
        tokio::time::sleep(FIRST_WAIT).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_is_remembered_and_an_older_owners_order_is_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let gateways = Gateways::new(folder.path());
        let port = |generation, n: u8| GatewayPort {
            bridge: "clients".into(),
            remote: [10, 0, 0, n].into(),
            host: None,
            vni: 7,
            mtu: 1500,
            lineage: Lineage::FIRST,
            generation: Generation(generation),
        };
        let order = |p: &GatewayPort| PortOrder::Repoint(sequence(p.lineage, p.generation), p.remote);
        assert_eq!(allowed(None, order(&port(1, 1))), Err(Refused::NotAttached));
        gateways.store(7, &port(2, 1)).expect("writes");
        let known = Gateways::new(folder.path()).load(7).expect("reads");
        assert_eq!((known.as_ref(), Gateways::new(folder.path()).known()), (Some(&port(2, 1)), vec![7]));
        assert_eq!(allowed(known.as_ref(), order(&port(3, 2))), Ok(()));
        assert!(matches!(allowed(known.as_ref(), order(&port(1, 2))), Err(Refused::Superseded { .. })));
        gateways.forget(7).expect("removes");
        gateways.forget(7).expect("is gone already");
        assert_eq!(gateways.load(7).expect("reads"), None);
    }
}
