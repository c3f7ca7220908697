//! `godwit volume verify`: which host leads a slice of a scrub, and what the others need to hear to answer it.
//!
//! The volume's own host leads while it answers, else another holder does. Nothing is kept here: a controller that dies takes no scrub
//! with it but the slice that somebody waits for, and that may be asked for again.

use crate::precache::volume_called;
use crate::rights::Caller;
use crate::state::{Controller, HostRecord, conflict, invalid};
use axum::Json;
use axum::extract::{Extension, Path, State};
use godwit_api::host::PeerHost;
use godwit_api::public::Volume;
use godwit_api::verify::{LEAST_RATE, Verified, VerifiedHolder, VerifyOrder, VerifyPeer, VerifyVolume, digest};
use godwit_api::{ApiError, Name, Problem};
use std::sync::Arc;
use std::time::Duration;

/// How long a slice may take, hours away from what it takes.
const VALID: Duration = Duration::from_secs(600);

pub async fn verify(
    State(c): State<Arc<Controller>>,
    Extension(who): Extension<Caller>,
    Path(name): Path<Name>,
    Json(wanted): Json<VerifyVolume>,
) -> Result<Json<Verified>, ApiError> {
    if wanted.rate < LEAST_RATE {
        return Err(invalid(format!("rate: at least {LEAST_RATE} in a second")));
    }
    if wanted.believe.is_some() && !wanted.repair {
        return Err(invalid("who is to be believed matters for a repair only").remedy("say `--repair`, too"));
    }
    let (volume, vm) = volume_called(&c, &who, &name)?;
    let all: Vec<HostRecord> =
        c.hosts()?.into_iter().filter(|h| h.name == vm.host || volume.replicas.contains(&h.name)).collect();
    let of = |place: &Name, host: &HostRecord| place == &host.name || place == &host.site;
    let believe = match &wanted.believe {
        Some(place) => Some(one(&all, place, &volume)?),
        None => None,
    };
    if let Some(site) = &wanted.site
        && !all.iter().any(|host| of(site, host))
    {
        return Err(no_replica(site, &volume));
    }
    // The owner's first: it leads if it is there.
    let mut hosts = all;
    hosts.sort_by_key(|host| (host.name != vm.host, host.name.clone()));
    let (mut here, mut silent, mut last) = (vec![], vec![], None);
    for host in hosts {
        match c.node(&host).facts().await {
            Ok(facts) => {
                here.push((PeerHost { name: host.name.clone(), link: facts.link, underlay: facts.underlay }, host))
            }
            Err(error) => {
                silent.push(VerifiedHolder { host: host.name.clone(), error: Some(error.to_string()) });
                last = Some(error);
            }
        }
    }
    if here.is_empty() {
        let nobody = || conflict(format!("nobody holds `{}`", volume.name));
        return Err(last.unwrap_or_else(nobody));
    }
    let (_, leader) = here.remove(0);
    // Where the leader is of the site itself, all others are compared with it.
    here.retain(|(_, host)| wanted.site.as_ref().is_none_or(|site| of(site, &leader) || of(site, host)));
    let mut others = vec![];
    for (peer, _) in here {
        let digest = digest(volume.id, volume.size);
        let capability = crate::allow::volume(&c, &vm, volume.id, digest, &leader.name, &peer, VALID)?;
        others.push(VerifyPeer { peer, capability });
    }
    let order = VerifyOrder {
        vm: vm.definition.id,
        lineage: vm.lineage,
        generation: vm.generation,
        volume: volume.id,
        size: volume.size,
        others,
        from: wanted.from,
        repair: wanted.repair,
        believe,
        rate: wanted.rate,
    };
    let mut verified = c.node(&leader).verify(&order).await?;
    verified.holders.extend(silent);
    Ok(Json(verified))
}

fn no_replica(place: &Name, volume: &Volume) -> ApiError {
    ApiError::new(Problem::NotFound, format!("`{place}` has no replica of `{}`", volume.name))
        .remedy("`godwit volume ls` lists who has one")
}

/// The one holder that a place means.
fn one(all: &[HostRecord], place: &Name, volume: &Volume) -> Result<Name, ApiError> {
    let mut found = all.iter().filter(|host| &host.name == place || &host.site == place);
    match (found.next(), found.next()) {
        (Some(host), None) => Ok(host.name.clone()),
        (Some(_), Some(_)) => Err(invalid(format!("`{place}` has more than one replica")).remedy("name the host")),
        (None, _) => Err(no_replica(place, volume)),
    }
}
