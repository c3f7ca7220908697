//! Knows sites, hosts, VMs, volumes and wires, and runs moves.
//!
//! Never on the data path, nor inside a VM's pause: nodes do all the work, and their records are the truth. What stands
//! here is a copy of that, and the wishes of people. Killing the controller at any moment changes nothing but what can be
//! seen; the next one on the same store goes on with everything that was under way.

#![forbid(unsafe_code)]

mod allow;
mod components;
mod evacuation;
mod events;
mod extenders;
mod failpoint;
pub mod health;
mod image;
mod lost;
mod metrics;
mod moves;
mod netcheck;
mod orphans;
mod places;
mod placing;
mod precache;
mod predictions;
mod profiles;
mod promote;
mod record;
mod resolve;
mod rights;
#[cfg(test)]
mod routes_tests;
mod saga;
mod spec;
mod state;
mod store;
#[cfg(test)]
mod testing;
mod together;
mod tokens;
mod trust;
mod verify;
mod vms;
mod wires;

pub use state::Controller;
pub use store::{Change, Counter, FileStore, Kind, StateStore, StoreError};
pub use trust::{Issuer, Trust};

use anyhow::Context as _;
use axum::middleware::from_fn_with_state;
use axum::routing::{delete, get, post};
use axum::{Json, Router};
use godwit_trust::{Authority, Credentials, Role};
use std::future::Future;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;

/// How often the nodes are asked where the VMs are.
const REFRESH: Duration = Duration::from_secs(10);

/// What a controller is started with.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where its API listens.
    pub listen: SocketAddr,
    /// Its store's folder; made, and closed to others.
    pub state: PathBuf,
    /// Certificate, key and authority; for a controller.
    pub credentials: PathBuf,
    /// The folder of the CA, if it issues certificates.
    pub authority: Option<PathBuf>,
    /// How long the certificates last that it issues.
    pub certificate_life: Duration,
}

/// Runs a controller until `shutdown`; `up` is told when it listens. Moves under way go on without it.
///
/// # Errors
/// When it cannot start; each error says what is missing.
pub async fn run(
    config: Config,
    up: impl FnOnce(&Arc<Controller>),
    shutdown: impl Future<Output = ()>,
) -> anyhow::Result<()> {
    let credentials = Credentials::load(&config.credentials)?;
    godwit_api::require(credentials.identity(), Role::Controller)
        .with_context(|| format!("the credentials in {}", config.credentials.display()))?;
    let store = Box::new(FileStore::open(&config.state)?);
    let listener = godwit_api::listen(config.listen).await?;
    let controller = Controller::new(store, credentials);
    if let Some(dir) = config.authority {
        let authority = Authority::open(&dir)?;
        controller.trust().issue_with(Issuer {
            authority,
            life: config.certificate_life,
            credentials: config.credentials,
        });
    }
    up(&controller);
    serve(controller, listener, shutdown).await
}

/// As [`run`], with a controller and a listener at hand.
///
/// # Errors
/// The store's, at the start.
pub async fn serve(
    controller: Arc<Controller>,
    listener: TcpListener,
    shutdown: impl Future<Output = ()>,
) -> anyhow::Result<()> {
    tracing::info!(listen = %listener.local_addr()?, who = %controller.credentials().identity(), "the controller serves");
    trust::recall(&controller)?;
    moves::resume_all(&controller)?;
    components::resume(&controller)?;
    controller.spawn(tend(Arc::clone(&controller)));
    let credentials = controller.credentials().clone();
    let events = Arc::clone(&controller.events);
    let shutdown = async move {
        shutdown.await;
        // Those who follow would not end by themselves.
        events.close();
    };
    let served = godwit_api::serve_anybody(listener, router(Arc::clone(&controller)), &credentials, shutdown).await;
    controller.stop();
    Ok(served?)
}

/// Asks again and again which host has which VM. Apart from all else, which waits for each host that does not answer: a host that comes back with a
/// VM that is elsewhere by now is told so at once.
async fn refresh(controller: Arc<Controller>) {
    loop {
        tokio::time::sleep(REFRESH).await;
        looked_after(vms::refresh(&controller).await);
    }
}

fn looked_after(result: Result<(), godwit_api::ApiError>) {
    if let Err(error) = result {
        tracing::error!(%error, "cannot look after the records");
    }
}

/// Keeps the records true, and finishes what was left half done.
async fn tend(controller: Arc<Controller>) {
    // What the hosts say, before anything is taken for left over.
    looked_after(vms::refresh(&controller).await);
    controller.spawn(refresh(Arc::clone(&controller)));
    loop {
        looked_after(vms::sweep(&controller).await);
        looked_after(wires::sweep(&controller).await);
        looked_after(orphans::sweep(&controller).await);
        if let Err(error) = precache::tend(&controller).await {
            tracing::error!(%error, "cannot look after pre-caches");
        }
        if let Err(error) = extenders::tend(&controller).await {
            tracing::error!(%error, "cannot look after extenders");
        }
        if let Err(error) = components::tend(&controller).await {
            tracing::error!(%error, "cannot look after components");
        }
        trust::tend(&controller).await;
        tokio::time::sleep(REFRESH).await;
    }
}

/// The routes of `godwit_api::public`.
fn router(controller: Arc<Controller>) -> Router {
    Router::new()
        .route("/v1/sites", get(places::sites).post(places::add_site))
        .route("/v1/sites/{site}", delete(places::remove_site))
        .route("/v1/sites/{site}/evacuation-plan", post(evacuation::plan))
        .route("/v1/hosts", get(places::hosts).post(places::add_host))
        .route("/v1/hosts/{host}", get(places::host).delete(places::remove_host))
        .route("/v1/components", get(places::components).post(places::add_component))
        .route("/v1/components/{component}", delete(places::remove_component))
        .route("/v1/components/objects", get(components::list).post(components::create))
        .route("/v1/components/objects/{component}", get(components::show).delete(components::remove))
        .route("/v1/components/objects/{component}/config", post(components::apply))
        .route("/v1/components/objects/{component}/move", post(components::start_move))
        .route("/v1/components/objects/{component}/claim", post(lost::claim))
        .route("/v1/vms", get(vms::list).post(vms::create))
        .route("/v1/vms/{vm}", get(vms::show).delete(vms::remove))
        .route("/v1/vms/{vm}/start", post(vms::start))
        .route("/v1/vms/{vm}/stop", post(vms::stop))
        .route("/v1/vms/{vm}/monitor", post(vms::monitor))
        .route("/v1/vms/{vm}/prediction", get(predictions::show))
        .route("/v1/vms/{vm}/profiles", get(profiles::list).post(profiles::start))
        .route("/v1/vms/{vm}/profiles/{start}", get(profiles::log))
        .route("/v1/volumes", get(vms::volumes))
        .route("/v1/volumes/{volume}/verify", post(verify::verify))
        .route("/v1/volumes/{volume}/image", post(image::copy).get(image::show).delete(image::end))
        .route("/v1/volumes/{volume}/promote", post(promote::promote))
        .route("/v1/precaches", get(precache::list).post(precache::start))
        .route("/v1/precaches/{volume}/{to}", delete(precache::stop))
        .route("/v1/wires", get(vms::wires))
        .route("/v1/port-wires", get(wires::list).post(wires::connect))
        .route("/v1/port-wires/rewire", post(wires::rewire))
        .route("/v1/port-wires/{wire}", get(wires::show).delete(wires::disconnect))
        .route("/v1/extenders", get(extenders::list).post(extenders::connect))
        .route("/v1/extenders/{a}/{b}", get(extenders::show))
        .route("/v1/extenders/{a}/{b}/rotate", post(extenders::rotate))
        .route("/v1/extenders/{a}/{b}/disconnect", post(extenders::disconnect))
        .route("/v1/port-wires/{wire}/capture", post(wires::capture))
        .route("/v1/network", get(netcheck::list))
        .route("/v1/orphans", get(orphans::list))
        .route("/v1/orphans/{host}/{orphan}", delete(orphans::remove))
        .route("/v1/moves", get(moves::list).post(moves::start))
        .route("/v1/moves/together", post(together::start))
        .route("/v1/moves/{id}", get(moves::show))
        .route("/v1/moves/{id}/cancel", post(moves::cancel))
        .route("/v1/moves/{id}/limit", post(moves::limit))
        .route("/v1/events", get(events::follow))
        .route("/metrics", get(metrics::show))
        .route("/v1/openapi.json", get(|| async { Json(godwit_api::openapi::document()) }))
        .route("/v1/hosts/{host}/token", post(trust::token))
        .route("/v1/hosts/{host}/revoke", post(trust::revoke_host))
        .route("/v1/enrolment", post(trust::enrol))
        .route("/v1/renewal", post(trust::renew))
        .route("/v1/revocations", get(trust::revocations).post(trust::revoke))
        .route("/v1/moves/{id}/retry", post(resolve::retry))
        .route("/v1/moves/{id}/resolve", post(resolve::resolve))
        .route("/v1/tokens", get(tokens::list).post(tokens::create))
        .route("/v1/tokens/{token}", delete(tokens::remove))
        .with_state(Arc::clone(&controller))
        .layer(from_fn_with_state(controller, rights::guard))
}
