//! The node's HTTP API, as `godwit_api::host` has it. Only the controller may ask.

use crate::actor::Input;
use crate::check::Purpose;
use crate::node::Node;
use crate::parts::Parts;
use axum::extract::{Path, Query, State};
use axum::routing::{delete, get, post, put};
use axum::{Json, Router};
use godwit_api::component::{ClaimOrder, ComponentDefinition, ComponentOrder, LocalComponent};
use godwit_api::extender::{ExtenderOrders, LocalExtenders};
use godwit_api::host::{
    CheckReport, CheckVm, ClaimVm, GatewayPort, HostFacts, LocalMove, LocalVm, MoveOrder, OutrankVm, Ownership, Packs,
    PlaceVolume, SetLimit, StopVm,
};
use godwit_api::image::{ImageCopy, ImageOrder};
use godwit_api::orphan::Orphan;
use godwit_api::precache::{LocalPrecache, PrecacheOrder};
use godwit_api::vm::VmDefinition;
use godwit_api::wire::{LocalWire, WireOrder};
use godwit_api::{ApiError, Problem};
use godwit_handoff::{Event, Fenced, MoveId, Peer, PeerHistory, VmId};
use godwit_units::VolumeId;
use serde_json::Value;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

type Answer<T> = Result<Json<T>, ApiError>;

/// The routes.
pub fn router(node: Arc<Node>) -> Router {
    Router::new()
        .route("/v1/host", get(host))
        .route("/v1/vms", get(vms))
        .route("/v1/vms/{id}", get(vm).put(define).delete(remove))
        .route("/v1/vms/{id}/start", post(start))
        .route("/v1/vms/{id}/stop", post(stop))
        .route("/v1/vms/{id}/monitor", post(monitor))
        .route("/v1/vms/{id}/claim", post(claim))
        .route("/v1/vms/{id}/promote", post(promote))
        .route("/v1/vms/{id}/outrank", post(outrank))
        .route("/v1/vms/{id}/departure", get(departure))
        .route("/v1/vms/{id}/packs", get(packs))
        .route("/v1/vms/{id}/profiles", get(profiles).post(start_profile))
        .route("/v1/vms/{id}/profiles/{start}", get(profile_log))
        .route("/v1/activity", get(activity))
        .route("/v1/path", post(path))
        .route("/v1/orphans", get(orphans))
        .route("/v1/network", get(network))
        .route("/v1/orphans/{id}", delete(remove_orphan))
        .route("/v1/check", post(check))
        .route("/v1/moves", post(begin))
        .route("/v1/moves/{id}", get(mv))
        .route("/v1/moves/{id}/cancel", post(cancel))
        .route("/v1/moves/{id}/limit", post(limit))
        .route("/v1/moves/{id}/stop", post(stop_now))
        .route("/v1/revocations", put(revoke))
        .route("/v1/precaches", put(precaches))
        .route("/v1/volumes/{id}/verify", post(verify))
        .route("/v1/volumes/{id}/place", put(place))
        .route("/v1/volumes/{id}/image", post(copy_image).get(image).delete(end_image))
        .route("/v1/components", get(components))
        .route("/v1/components/{id}", get(component).put(define_component).delete(remove_component))
        .route("/v1/components/{id}/move", post(move_component))
        .route("/v1/components/{id}/claim", post(claim_component))
        .route("/v1/components/{id}/outrank", post(outrank_component))
        .route("/v1/gateways/{wire}", put(attach).delete(detach))
        .route("/v1/extenders", get(extenders).put(order_extenders))
        .route("/v1/wires", get(wires))
        .route("/v1/wires/{wire}/capture", post(capture))
        .route("/v1/wires/{wire}", get(wire).put(connect).delete(disconnect))
        .with_state(node)
}

async fn host(State(node): State<Arc<Node>>) -> Answer<HostFacts> {
    Ok(Json(node.facts()))
}

async fn vms(State(node): State<Arc<Node>>) -> Answer<Vec<LocalVm>> {
    let mut found = vec![];
    for parts in node.vms() {
        found.push(node.local(&parts).await);
    }
    Ok(Json(found))
}

fn find(node: &Node, id: u64) -> Result<Arc<Parts>, ApiError> {
    // It is here: to say that it is not known would have its move end.
    node.quarantine().check(VmId(id))?;
    node.vm(VmId(id)).ok_or_else(|| ApiError::new(Problem::NotFound, format!("{} knows no VM {id}", node.name())))
}

async fn vm(State(node): State<Arc<Node>>, Path(id): Path<u64>) -> Answer<LocalVm> {
    let parts = find(&node, id)?;
    Ok(Json(node.local(&parts).await))
}

async fn define(
    State(node): State<Arc<Node>>,
    Path(id): Path<u64>,
    Json(definition): Json<VmDefinition>,
) -> Answer<LocalVm> {
    if definition.id != VmId(id) {
        return Err(ApiError::new(Problem::Invalid, format!("the path says VM {id}, the body {}", definition.id.0)));
    }
    let parts = node.define(definition).await?;
    Ok(Json(node.local(&parts).await))
}

async fn remove(State(node): State<Arc<Node>>, Path(id): Path<u64>) -> Answer<Value> {
    if node.defines(VmId(id)) {
        let message = format!("VM {id} is being made on {}", node.name());
        return Err(ApiError::new(Problem::Conflict, message).remedy("remove it when that has ended"));
    }
    let parts = find(&node, id)?;
    crate::image::end_all(&node, &parts).await;
    // One that is tried to be booted in vain is as good as off, and stays off now.
    if parts.view().ownership == Ownership::Here && parts.qemu().is_none() {
        power_off(&parts, false).await?;
    }
    parts.keeper().ask(Input::MayRemove).await?;
    node.remove(&parts).await?;
    Ok(Json(Value::Null))
}

async fn start(State(node): State<Arc<Node>>, Path(id): Path<u64>) -> Answer<Value> {
    find(&node, id)?.keeper().ask(Input::Start).await?;
    Ok(Json(Value::Null))
}

async fn stop(State(node): State<Arc<Node>>, Path(id): Path<u64>, Json(how): Json<StopVm>) -> Answer<Value> {
    let parts = find(&node, id)?;
    power_off(&parts, how.force).await?;
    Ok(Json(Value::Null))
}

/// Has a guest power itself off, or pulls its plug and waits until it is off.
async fn power_off(parts: &Parts, force: bool) -> Result<(), ApiError> {
    let stopped = parts.keeper().ask(|reply| Input::Stop { force, reply });
    tokio::time::timeout(OFF_WITHIN, stopped).await.unwrap_or_else(|_| {
        let message = format!("`{}` is being powered off, which has not ended within {OFF_WITHIN:?}", parts.name);
        Err(ApiError::new(Problem::Failed, message)
            .remedy("see its node's log for what holds it up; it goes on by itself"))
    })
}

/// What is waited for of a VM whose plug was pulled. QEMU is killed after 7 s of it.
const OFF_WITHIN: Duration = Duration::from_secs(40);

/// What of QMP people may use: it looks, or it exports blocks to look at. A `cont` past the node would make a VM run twice. A
/// trailing `*` stands for any end.
const HARMLESS: [&str; 6] =
    ["query-*", "qom-list", "qom-get", "block-dirty-bitmap-*", "block-export-*", "nbd-server-*"];

fn is_harmless(command: &str) -> bool {
    HARMLESS.iter().any(|allowed| match allowed.strip_suffix('*') {
        Some(beginning) => command.starts_with(beginning),
        None => command == *allowed,
    })
}

async fn monitor(State(node): State<Arc<Node>>, Path(id): Path<u64>, Json(command): Json<Value>) -> Answer<Value> {
    let name = command["execute"].as_str().unwrap_or_default();
    if !is_harmless(name) {
        let message = format!("`{name}` is not passed on to QEMU: the node alone starts, stops and moves guests");
        return Err(ApiError::new(Problem::Forbidden, message).remedy(format!("these are: {}", HARMLESS.join(", "))));
    }
    let parts = find(&node, id)?;
    let qemu = parts
        .qemu()
        .ok_or_else(|| ApiError::new(Problem::Conflict, format!("`{}` has no QEMU on {}", parts.name, node.name())))?;
    let answer = crate::effects::on_qemu(&qemu, move |q| q.monitor(command)).await?;
    Ok(Json(answer))
}

async fn claim(State(node): State<Arc<Node>>, Path(id): Path<u64>, Json(claim): Json<ClaimVm>) -> Answer<Value> {
    let peer = if claim.peer_did_not_run { PeerHistory::DidNotRun } else { PeerHistory::MayHaveRun };
    let parts = find(&node, id)?;
    // What the controller does not reach may well be heard here. After a restart the file tells who took part.
    let peer_host = parts.moving().map(|moving| moving.peer.clone()).or_else(|| parts.file().peer);
    let heard = peer_host.is_some_and(|host| node.peers().hears(host.name.as_str()));
    let sight = if heard { Peer::Heard } else { Peer::Silent };
    let fenced = Fenced::vouched(&claim.fenced, peer, claim.newest, sight)
        .map_err(|why| ApiError::new(Problem::Conflict, format!("`{}` cannot be claimed: {why}", parts.name)))?;
    parts.keeper().ask(|reply| Input::Claim { fenced, whole: false, reply }).await?;
    Ok(Json(Value::Null))
}

async fn promote(
    State(node): State<Arc<Node>>,
    Path(id): Path<u64>,
    Json(order): Json<godwit_api::promote::PromoteVm>,
) -> Answer<godwit_api::promote::LocalPromotion> {
    if order.definition.id != VmId(id) {
        return Err(ApiError::new(
            Problem::Invalid,
            format!("the path says VM {id}, the body {}", order.definition.id.0),
        ));
    }
    Ok(Json(crate::promote::promote(&node, order).await?))
}

async fn outrank(State(node): State<Arc<Node>>, Path(id): Path<u64>, Json(by): Json<OutrankVm>) -> Answer<Value> {
    find(&node, id)?.keeper().ask(|reply| Input::Outrank { lineage: by.lineage, reply }).await?;
    Ok(Json(Value::Null))
}

async fn path(
    State(node): State<Arc<Node>>,
    Json(asked): Json<godwit_api::predict::AskPath>,
) -> Answer<godwit_api::predict::PathFacts> {
    Ok(Json(crate::path::ask(&node, asked).await?))
}

/// What is asked of all VMs at once.
#[derive(serde::Deserialize)]
struct AskActivity {
    at_unix_s: u64,
}

async fn activity(
    State(node): State<Arc<Node>>,
    Query(asked): Query<AskActivity>,
) -> Answer<Vec<godwit_api::evacuation::Activity>> {
    Ok(Json(crate::activity::all(&node, asked.at_unix_s).await))
}

async fn profiles(State(node): State<Arc<Node>>, Path(id): Path<u64>) -> Answer<Vec<godwit_api::profile::Profile>> {
    Ok(Json(crate::profile::list(&*find(&node, id)?)))
}

async fn start_profile(
    State(node): State<Arc<Node>>,
    Path(id): Path<u64>,
    Json(wanted): Json<godwit_api::profile::StartProfile>,
) -> Answer<godwit_api::profile::Profile> {
    let parts = find(&node, id)?;
    Ok(Json(crate::profile::start(&node, &parts, wanted).await?))
}

async fn profile_log(
    State(node): State<Arc<Node>>,
    Path((id, start)): Path<(u64, u64)>,
) -> Answer<godwit_api::profile::ProfileLog> {
    Ok(Json(crate::profile::log(&*find(&node, id)?, start)?))
}

async fn orphans(State(node): State<Arc<Node>>) -> Answer<Vec<Orphan>> {
    Ok(Json(node.orphans().await?))
}

async fn capture(
    State(node): State<Arc<Node>>,
    Path(wire): Path<u32>,
    Json(asked): Json<godwit_api::capture::CaptureHere>,
) -> Answer<godwit_api::capture::Capture> {
    Ok(Json(crate::capture::capture(&node, wire, asked).await?))
}

async fn network(State(node): State<Arc<Node>>) -> Answer<Vec<godwit_api::network::NetFinding>> {
    Ok(Json(crate::netcheck::check(&node).await?))
}

async fn remove_orphan(State(node): State<Arc<Node>>, Path(id): Path<String>) -> Answer<Value> {
    node.remove_orphan(&id).await?;
    Ok(Json(Value::Null))
}

async fn departure(State(node): State<Arc<Node>>, Path(id): Path<u64>) -> Answer<CheckReport> {
    let parts = find(&node, id)?;
    Ok(Json(crate::check::departure(&node, &parts).await))
}

async fn packs(State(node): State<Arc<Node>>, Path(id): Path<u64>) -> Answer<Packs> {
    let parts = find(&node, id)?;
    Ok(Json(crate::packs::ask(&parts).await?))
}

async fn check(State(node): State<Arc<Node>>, Json(check): Json<CheckVm>) -> Answer<CheckReport> {
    Ok(Json(crate::check::check(&node, &check, Purpose::Arrive).await))
}

async fn begin(State(node): State<Arc<Node>>, Json(order): Json<MoveOrder>) -> Answer<LocalMove> {
    let parts = find(&node, order.vm.0)?;
    let id = order.id;
    if let Some(known) = parts.moving_as(id) {
        // The order again: its first answer was lost.
        return Ok(Json(known.local()));
    }
    parts.keeper().ask(|reply| Input::Begin { order: Box::new(order), reply }).await?;
    Ok(Json(find_move(&node, id.0)?.1.local()))
}

fn find_move(node: &Node, id: u64) -> Result<(Arc<Parts>, Arc<crate::parts::Moving>), ApiError> {
    let found = node.vms().into_iter().find_map(|p| p.moving_as(MoveId(id)).map(|m| (p, m)));
    found.ok_or_else(|| ApiError::new(Problem::NotFound, format!("{} knows no move {id}", node.name())))
}

async fn mv(State(node): State<Arc<Node>>, Path(id): Path<u64>) -> Answer<LocalMove> {
    Ok(Json(find_move(&node, id)?.1.local()))
}

async fn cancel(State(node): State<Arc<Node>>, Path(id): Path<u64>) -> Answer<LocalMove> {
    let (parts, moving) = find_move(&node, id)?;
    moving.cancelled.store(true, Ordering::Relaxed);
    parts.keeper().tell(Input::Event(Event::Cancel)).await;
    Ok(Json(moving.local()))
}

async fn limit(State(node): State<Arc<Node>>, Path(id): Path<u64>, Json(limit): Json<SetLimit>) -> Answer<LocalMove> {
    let (_, moving) = find_move(&node, id)?;
    node.limit(&moving, limit.limit);
    Ok(Json(moving.local()))
}

async fn stop_now(State(node): State<Arc<Node>>, Path(id): Path<u64>) -> Answer<LocalMove> {
    let (_, moving) = find_move(&node, id)?;
    moving.stop_now.notify_one();
    Ok(Json(moving.local()))
}

async fn attach(State(node): State<Arc<Node>>, Path(wire): Path<u32>, Json(port): Json<GatewayPort>) -> Answer<Value> {
    node.attach(wire, &port).await?;
    Ok(Json(Value::Null))
}

async fn components(State(node): State<Arc<Node>>) -> Answer<Vec<LocalComponent>> {
    Ok(Json(node.local_components()))
}

async fn component(State(node): State<Arc<Node>>, Path(id): Path<u64>) -> Answer<LocalComponent> {
    Ok(Json(node.local_component(VmId(id))?))
}

async fn define_component(
    State(node): State<Arc<Node>>,
    Path(id): Path<u64>,
    Json(definition): Json<ComponentDefinition>,
) -> Answer<LocalComponent> {
    is_for(id, &definition)?;
    Ok(Json(node.define_component(definition).await?))
}

fn is_for(id: u64, definition: &ComponentDefinition) -> Result<(), ApiError> {
    let message = || format!("the path says component {id}, the body {}", definition.id.0);
    if definition.id == VmId(id) { Ok(()) } else { Err(ApiError::new(Problem::Invalid, message())) }
}

async fn claim_component(
    State(node): State<Arc<Node>>,
    Path(id): Path<u64>,
    Json(order): Json<ClaimOrder>,
) -> Answer<LocalComponent> {
    is_for(id, &order.definition)?;
    Ok(Json(node.claim_component(order).await?))
}

async fn outrank_component(
    State(node): State<Arc<Node>>,
    Path(id): Path<u64>,
    Json(by): Json<OutrankVm>,
) -> Answer<Value> {
    node.outrank_component(VmId(id), by.lineage).await?;
    Ok(Json(Value::Null))
}

async fn remove_component(State(node): State<Arc<Node>>, Path(id): Path<u64>) -> Answer<Value> {
    node.remove_component(VmId(id)).await?;
    Ok(Json(Value::Null))
}

async fn move_component(
    State(node): State<Arc<Node>>,
    Path(id): Path<u64>,
    Json(order): Json<ComponentOrder>,
) -> Answer<LocalComponent> {
    Ok(Json(node.move_component(VmId(id), order).await?))
}

async fn extenders(State(node): State<Arc<Node>>) -> Answer<LocalExtenders> {
    Ok(Json(node.local_extenders().await))
}

async fn order_extenders(State(node): State<Arc<Node>>, Json(orders): Json<ExtenderOrders>) -> Answer<LocalExtenders> {
    Ok(Json(node.order_extenders(orders).await?))
}

async fn wires(State(node): State<Arc<Node>>) -> Answer<Vec<LocalWire>> {
    Ok(Json(node.local_wires().await))
}

async fn wire(State(node): State<Arc<Node>>, Path(wire): Path<u32>) -> Answer<LocalWire> {
    Ok(Json(node.local_wire(wire).await?))
}

async fn connect(
    State(node): State<Arc<Node>>,
    Path(wire): Path<u32>,
    Json(order): Json<WireOrder>,
) -> Answer<LocalWire> {
    if order.id != wire {
        return Err(ApiError::new(Problem::Invalid, format!("the path says wire {wire}, the body {}", order.id)));
    }
    Ok(Json(node.connect(order).await?))
}

async fn disconnect(State(node): State<Arc<Node>>, Path(wire): Path<u32>) -> Answer<Value> {
    node.disconnect(wire).await?;
    Ok(Json(Value::Null))
}

async fn precaches(
    State(node): State<Arc<Node>>,
    Json(orders): Json<Vec<PrecacheOrder>>,
) -> Answer<Vec<LocalPrecache>> {
    Ok(Json(crate::precache::order(&node, orders)?))
}

async fn verify(
    State(node): State<Arc<Node>>,
    Path(id): Path<u64>,
    Json(order): Json<godwit_api::verify::VerifyOrder>,
) -> Answer<godwit_api::verify::Verified> {
    if order.volume.0 != id {
        return Err(ApiError::new(Problem::Invalid, format!("the path says volume {id}, the body {}", order.volume.0)));
    }
    Ok(Json(crate::scrub::verify(&node, &order).await?))
}

async fn place(State(node): State<Arc<Node>>, Path(id): Path<u64>, Json(order): Json<PlaceVolume>) -> Answer<Value> {
    if order.volume.0 != id {
        return Err(ApiError::new(Problem::Invalid, format!("the path says volume {id}, the body {}", order.volume.0)));
    }
    crate::place::make(&node, order).await?;
    Ok(Json(Value::Null))
}

async fn copy_image(
    State(node): State<Arc<Node>>,
    Path(id): Path<u64>,
    Json(order): Json<ImageOrder>,
) -> Answer<ImageCopy> {
    if order.volume.0 != id {
        return Err(ApiError::new(Problem::Invalid, format!("the path says volume {id}, the body {}", order.volume.0)));
    }
    let parts = find(&node, order.vm.0)?;
    Ok(Json(crate::image::begin(&node, &parts, order).await?))
}

async fn image(State(node): State<Arc<Node>>, Path(id): Path<u64>) -> Answer<ImageCopy> {
    Ok(Json(crate::image::show(&node, VolumeId(id))?))
}

async fn end_image(State(node): State<Arc<Node>>, Path(id): Path<u64>) -> Answer<ImageCopy> {
    Ok(Json(crate::image::end(&node, VolumeId(id)).await?))
}

async fn revoke(State(node): State<Arc<Node>>, Json(list): Json<godwit_trust::Revocations>) -> Answer<Value> {
    node.revoke(&list)?;
    Ok(Json(Value::Null))
}

async fn detach(State(node): State<Arc<Node>>, Path(wire): Path<u32>) -> Answer<Value> {
    node.detach(wire).await?;
    Ok(Json(Value::Null))
}

#[cfg(test)]
mod tests {
    use super::is_harmless;

    #[test]
    fn nobody_makes_a_guest_run_past_its_node() {
        for no in
            ["cont", "stop", "quit", "migrate", "device_add", "human-monitor-command", "qom-set", "", "blockdev-add"]
        {
            assert!(!is_harmless(no), "{no}");
        }
        for yes in ["query-status", "query-migrate", "qom-list", "block-dirty-bitmap-add", "nbd-server-start"] {
            assert!(is_harmless(yes), "{yes}");
        }
    }
}
