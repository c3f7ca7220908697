//! `godwit vm profile`: what a VM's guest does to its memory, as the hosts that it has been on have seen it.
//!
//! Nothing is kept here: each host keeps what it has watched, for as long as it knows the VM. A host that does not answer is left out.

use crate::rights::Caller;
use crate::state::{Controller, invalid, missing};
use axum::Json;
use axum::extract::{Extension, Path, State};
use futures_util::future::join_all;
use godwit_api::profile::{INTERVAL_MS, LONGEST_S, Profile, ProfileLog, StartProfile};
use godwit_api::{ApiError, Name};
use godwit_units::VmId;
use std::collections::BTreeSet;
use std::sync::Arc;

type Answer<T> = Result<Json<T>, ApiError>;

pub async fn start(
    State(c): State<Arc<Controller>>,
    Extension(who): Extension<Caller>,
    Path(name): Path<Name>,
    Json(wanted): Json<StartProfile>,
) -> Answer<Profile> {
    who.find(&c, &name)?;
    if !(1..=LONGEST_S).contains(&wanted.for_s) || !INTERVAL_MS.contains(&wanted.interval_ms) {
        let (least, most) = (INTERVAL_MS.start(), INTERVAL_MS.end());
        return Err(invalid(format!(
            "for_s: from 1 to {LONGEST_S} seconds; interval_ms: from {least} to {most} milliseconds"
        )));
    }
    let vm = c.vm_record(&name)?;
    Ok(Json(c.node_of(&vm.host)?.start_profile(vm.definition.id, wanted).await?))
}

pub async fn list(
    State(c): State<Arc<Controller>>,
    Extension(who): Extension<Caller>,
    Path(name): Path<Name>,
) -> Answer<Vec<Profile>> {
    who.find(&c, &name)?;
    let vm = c.vm_record(&name)?;
    Ok(Json(all(&c, vm.definition.id, &vm.host).await?))
}

pub async fn log(
    State(c): State<Arc<Controller>>,
    Extension(who): Extension<Caller>,
    Path((name, start)): Path<(Name, u64)>,
) -> Answer<ProfileLog> {
    who.find(&c, &name)?;
    let vm = c.vm_record(&name)?;
    let found = all(&c, vm.definition.id, &vm.host).await?.into_iter().find(|p| p.start_unix_ms == start);
    let profile = found.ok_or_else(|| {
        missing("profile", start).remedy(format!("`godwit vm profile {name} --ls` lists those that are kept"))
    })?;
    Ok(Json(c.node_of(&profile.host)?.profile_log(vm.definition.id, start).await?))
}

/// The profiles of a VM at each host that it has been on, the oldest first.
///
/// # Errors
/// The store's.
pub async fn all(c: &Controller, vm: VmId, host: &Name) -> Result<Vec<Profile>, ApiError> {
    let mut hosts: BTreeSet<Name> = [host.clone()].into();
    for mv in c.move_records()?.into_iter().filter(|mv| mv.order.vm == vm) {
        hosts.extend([mv.from, mv.order.to.name]);
    }
    let nodes = hosts.iter().filter_map(|host| c.node_of(host).ok());
    let told = join_all(nodes.map(|node| async move { node.profiles(vm).await.unwrap_or_default() })).await;
    let mut found: Vec<Profile> = told.into_iter().flatten().collect();
    found.sort_by_key(|profile| profile.start_unix_ms);
    Ok(found)
}
