//! Knows sites, hosts, VMs, volumes and wires, and runs moves.
//!
//! Never on the data path, nor inside a VM's pause: nodes do all the work, and their records are the truth. What stands
//! here is a copy of that, and the wishes of people. Killing the controller at any moment changes nothing but what can be
//! seen; the next one on the same store goes on with everything that was under way.

#![forbid(unsafe_code)]

mod failpoint;
mod moves;
mod orphans;
mod places;
mod record;
mod resolve;
mod saga;
mod spec;
mod state;
mod store;
#[cfg(test)]
mod testing;
mod vms;

pub use state::Controller;
pub use store::{Change, Counter, FileStore, Kind, StateStore, StoreError};

use anyhow::Context as _;
use axum::Router;
use axum::extract::{Extension, Request};
use axum::http::Method;
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post};
use godwit_api::{ApiError, Problem};
use godwit_trust::{Access, Credentials, Identity, Role};
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
}

/// Runs a controller until `shutdown`. Moves under way go on without it.
///
/// # Errors
/// When it cannot start; each error says what is missing.
pub async fn run(config: Config, shutdown: impl Future<Output = ()>) -> anyhow::Result<()> {
    let credentials = Credentials::load(&config.credentials)?;
    godwit_api::require(credentials.identity(), Role::Controller)
        .with_context(|| format!("the credentials in {}", config.credentials.display()))?;
    let store = Box::new(FileStore::open(&config.state)?);
    let listener = godwit_api::listen(config.listen).await?;
    serve(Controller::new(store, credentials), listener, shutdown).await
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
    moves::resume_all(&controller)?;
    controller.spawn(tend(Arc::clone(&controller)));
    let credentials = controller.credentials().clone();
    let served = godwit_api::serve(listener, router(Arc::clone(&controller)), &credentials, shutdown).await;
    controller.stop();
    Ok(served?)
}

/// Keeps the records true, and finishes what was left half done.
async fn tend(controller: Arc<Controller>) {
    loop {
        let looked_after =
            [vms::refresh(&controller).await, vms::sweep(&controller).await, orphans::sweep(&controller).await];
        for result in looked_after {
            if let Err(error) = result {
                tracing::error!(%error, "cannot look after the records");
            }
        }
        tokio::time::sleep(REFRESH).await;
    }
}

/// The routes of `godwit_api::public`.
fn router(controller: Arc<Controller>) -> Router {
    Router::new()
        .route("/v1/sites", get(places::sites).post(places::add_site))
        .route("/v1/sites/{site}", delete(places::remove_site))
        .route("/v1/hosts", get(places::hosts).post(places::add_host))
        .route("/v1/hosts/{host}", get(places::host).delete(places::remove_host))
        .route("/v1/components", get(places::components).post(places::add_component))
        .route("/v1/components/{component}", delete(places::remove_component))
        .route("/v1/vms", get(vms::list).post(vms::create))
        .route("/v1/vms/{vm}", get(vms::show).delete(vms::remove))
        .route("/v1/vms/{vm}/start", post(vms::start))
        .route("/v1/vms/{vm}/stop", post(vms::stop))
        .route("/v1/vms/{vm}/monitor", post(vms::monitor))
        .route("/v1/volumes", get(vms::volumes))
        .route("/v1/wires", get(vms::wires))
        .route("/v1/orphans", get(orphans::list))
        .route("/v1/orphans/{host}/{id}", delete(orphans::remove))
        .route("/v1/moves", get(moves::list).post(moves::start))
        .route("/v1/moves/{id}", get(moves::show))
        .route("/v1/moves/{id}/cancel", post(moves::cancel))
        .route("/v1/moves/{id}/limit", post(moves::limit))
        .route("/v1/moves/{id}/retry", post(resolve::retry))
        .route("/v1/moves/{id}/resolve", post(resolve::resolve))
        .with_state(controller)
        .layer(from_fn(guard))
}

/// Clients only; operators may read and move, admins everything.
async fn guard(Extension(who): Extension<Identity>, request: Request, next: Next) -> Response {
    let operators = request.method() == Method::GET || request.uri().path().starts_with("/v1/moves");
    match who.role() {
        Role::Client(Access::Admin) => next.run(request).await,
        Role::Client(Access::Operator) if operators => next.run(request).await,
        Role::Client(Access::Operator) => {
            ApiError::new(Problem::Forbidden, format!("{who} may read and move, nothing else"))
                .remedy("ask with a certificate of the role admin")
                .into_response()
        }
        Role::Controller | Role::Node => ApiError::new(Problem::Forbidden, format!("{who} may not ask a controller"))
            .remedy("ask with a certificate of the role admin or operator")
            .into_response(),
    }
}
