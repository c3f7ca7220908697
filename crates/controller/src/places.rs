//! Sites, hosts and components: what VMs are placed on and wired to.

use crate::components::ComponentRecord;
use crate::record::{MoveRecord, Step, VmRecord};
use crate::state::{Controller, HostRecord, conflict, invalid, missing};
use crate::store::{Change, Kind};
use axum::Json;
use axum::extract::{Path, State};
use godwit_api::public::{AddHost, Component, Host, Site, Volume};
use godwit_api::vm::ComponentSpec;
use godwit_api::{ApiError, Name, done};
use serde_json::Value;
use std::sync::Arc;
use tokio::task::JoinSet;

type Answer<T> = Result<Json<T>, ApiError>;
type Shared = State<Arc<Controller>>;

/// Longest name of a network interface that Linux takes.
const LONGEST_INTERFACE: usize = 15;

pub async fn sites(State(c): Shared) -> Answer<Vec<Site>> {
    let mut sites: Vec<Site> = c.store.read_all(Kind::Site)?;
    sites.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(Json(sites))
}

pub async fn add_site(State(c): Shared, Json(site): Json<Site>) -> Answer<Site> {
    let _deciding = c.decide();
    if c.store.get(Kind::Site, site.name.as_str())?.is_some() {
        return Err(conflict(format!("there is a site `{}` already", site.name)));
    }
    if c.store.get(Kind::Host, site.name.as_str())?.is_some() {
        return Err(conflict(format!(
            "`{}` is a host's name: `--to {}` would have two meanings",
            site.name, site.name
        )));
    }
    c.store.commit(&[Change::put(Kind::Site, &site.name, &site)])?;
    Ok(Json(site))
}

pub async fn remove_site(State(c): Shared, Path(name): Path<Name>) -> Answer<Value> {
    let _deciding = c.decide();
    if c.store.get(Kind::Site, name.as_str())?.is_none() {
        return Err(missing("site", name));
    }
    if let Some(host) = c.hosts()?.into_iter().find(|h| h.site == name) {
        let remedy = format!("`godwit host rm {}` first", host.name);
        return Err(conflict(format!("site `{name}` still has the host `{}`", host.name)).remedy(remedy));
    }
    c.store.commit(&[Change::remove(Kind::Site, &name)])?;
    Ok(done())
}

async fn seen(c: Arc<Controller>, host: HostRecord) -> Host {
    let (facts, error) = match c.node(&host).facts().await {
        Ok(facts) => (Some(facts), None),
        Err(error) => (None, Some(error.to_string())),
    };
    Host { name: host.name, site: host.site, api: host.api, facts, error }
}

pub async fn hosts(State(c): Shared) -> Answer<Vec<Host>> {
    let mut asking = JoinSet::new();
    for host in c.hosts()? {
        asking.spawn(seen(Arc::clone(&c), host));
    }
    let mut hosts = asking.join_all().await;
    hosts.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(Json(hosts))
}

pub async fn host(State(c): Shared, Path(name): Path<Name>) -> Answer<Host> {
    let host = c.host(&name)?;
    Ok(Json(seen(c, host).await))
}

pub async fn add_host(State(c): Shared, Json(new): Json<AddHost>) -> Answer<Host> {
    let host = HostRecord { name: new.name, site: new.site, api: new.api };
    {
        let _deciding = c.decide();
        if c.store.get(Kind::Site, host.site.as_str())?.is_none() {
            return Err(missing("site", &host.site));
        }
        if c.store.get(Kind::Site, host.name.as_str())?.is_some() {
            return Err(conflict(format!(
                "`{}` is a site's name: `--to {}` would have two meanings",
                host.name, host.name
            )));
        }
        for other in c.hosts()? {
            if other.name == host.name {
                return Err(conflict(format!("there is a host `{}` already", host.name)));
            }
            if other.api == host.api {
                return Err(conflict(format!("{} is the address of the host `{}`", host.api, other.name)));
            }
        }
        c.store.commit(&[Change::put(Kind::Host, &host.name, &host)])?;
    }
    // Wires would not lead to it from sites with extenders before these know of it.
    crate::extenders::tend(&c).await?;
    // A host that does not answer yet is no error: the answer says so.
    Ok(Json(seen(c, host).await))
}

pub async fn remove_host(State(c): Shared, Path(name): Path<Name>) -> Answer<Value> {
    let in_use = |what: String, remedy: &str| Err(conflict(format!("host `{name}` is in use: {what}")).remedy(remedy));
    // One that is lost for good does not answer, and what it lent is lost with it.
    let there = c.node_of(&name)?.vms().await.unwrap_or_default();
    if let Some(vm) = there.iter().find(|vm| !vm.lent.is_empty()) {
        let what = format!("blocks of the disks of `{}` are fetched from there", vm.definition.name);
        return in_use(what, "wait until all have come: `godwit vm show` says what is left");
    }
    let _deciding = c.decide();
    c.host(&name)?;
    if let Some(vm) = c.vm_records()?.into_iter().find(|vm| vm.host == name) {
        return in_use(format!("the VM `{}` is there", vm.definition.name), "move or delete it first");
    }
    let is_there = |component: &ComponentRecord| {
        component.host == name || component.order.as_ref().is_some_and(|order| order.to.name == name)
    };
    if let Some(component) = crate::components::records(&c)?.into_iter().find(is_there) {
        return in_use(
            format!("the component `{}` is there, or on its way", component.definition.name),
            "move or delete it first",
        );
    }
    for component in c.store.read_all::<Component>(Kind::Component)? {
        if matches!(&component.kind, ComponentSpec::Gateway { host, .. } if host == &name) {
            return in_use(format!("the gateway `{}` is there", component.name), "delete the component first");
        }
    }
    let moves: Vec<MoveRecord> = c.store.read_all(Kind::Move)?;
    if let Some(mv) = moves.iter().find(|m| m.step != Step::Ended && (m.from == name || m.order.to.name == name)) {
        return in_use(format!("move {} of `{}` is under way", mv.id().0, mv.vm), "wait for its end, or cancel it");
    }
    // Secondary replicas do not hold a host back: nothing depends on them.
    let mut changes = vec![Change::remove(Kind::Host, &name)];
    for mut volume in c.store.read_all::<Volume>(Kind::Volume)? {
        if volume.replicas.contains(&name) {
            volume.replicas.retain(|host| host != &name);
            changes.push(Change::put(Kind::Volume, volume.id.0, &volume));
        }
    }
    c.store.commit(&changes)?;
    c.forget_client(&name);
    Ok(done())
}

pub async fn components(State(c): Shared) -> Answer<Vec<Component>> {
    let mut components: Vec<Component> = c.store.read_all(Kind::Component)?;
    components.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(Json(components))
}

pub async fn add_component(State(c): Shared, Json(mut component): Json<Component>) -> Answer<Component> {
    let _deciding = c.decide();
    if c.store.get(Kind::Component, component.name.as_str())?.is_some() {
        return Err(conflict(format!("there is a component `{}` already", component.name)));
    }
    crate::components::check_name(&c, &component.name)?;
    if component.name.as_str() == "objects" {
        // It could not be told from where components as objects are.
        return Err(invalid("`objects` cannot be a component's name").remedy("choose another one"));
    }
    let bridge = match &mut component.kind {
        ComponentSpec::Switch { bridge } => bridge,
        ComponentSpec::Gateway { host, bridge, underlay } => {
            c.host(host)?;
            // The node's own word counts, at the time that a wire is made.
            *underlay = None;
            bridge
        }
    };
    let good = (1..=LONGEST_INTERFACE).contains(&bridge.len())
        && bridge.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
        && !matches!(bridge.as_str(), "." | "..");
    if !good {
        return Err(invalid(format!("`{bridge}` is no name of a bridge"))
            .remedy("use 1 to 15 letters, digits, `-`, `_` and `.`"));
    }
    c.store.commit(&[Change::put(Kind::Component, &component.name, &component)])?;
    Ok(Json(component))
}

pub async fn remove_component(State(c): Shared, Path(name): Path<Name>) -> Answer<Value> {
    let _deciding = c.decide();
    if c.store.get(Kind::Component, name.as_str())?.is_none() {
        return Err(missing("component", name));
    }
    let wired = |vm: &VmRecord| vm.definition.spec.nics.iter().any(|nic| nic.component.as_ref() == Some(&name));
    if let Some(vm) = c.vm_records()?.into_iter().find(wired) {
        let vm = vm.definition.name;
        return Err(conflict(format!("`{vm}` is wired to `{name}`")).remedy(format!("`godwit vm rm {vm}` first")));
    }
    c.store.commit(&[Change::remove(Kind::Component, &name)])?;
    Ok(done())
}
