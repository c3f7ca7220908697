//! The daemon of a host: the data path of a move.

pub mod activity;
pub mod actor;
mod aside;
mod boot_files;
pub mod capture;
pub mod check;
pub mod claim;
pub mod components;
pub mod covered;
pub mod disk;
mod disk_index;
mod drain;
mod durable;
pub mod effects;
pub mod ending;
pub mod extenders;
pub mod failpoint;
pub mod fill;
mod forecast;
pub mod gateways;
pub mod health;
pub mod image;
pub mod incoming;
mod keeping;
mod kept;
mod keys;
mod leaving;
pub mod lend;
mod libraries;
pub mod membership;
pub mod memory_in;
pub mod memory_out;
pub mod metrics;
pub mod moments;
mod neighbours;
mod netcheck;
pub mod node;
pub mod orphans;
pub mod outgoing;
mod pace;
pub mod packs;
pub mod parts;
pub mod path;
pub mod peers;
pub mod place;
pub mod precache;
mod processors;
pub mod profile;
pub mod promote;
pub mod proto;
pub mod quarantine;
mod recycle;
pub mod registry;
pub mod routes;
mod routine;
pub mod scrub;
mod seen;
mod settle;
mod snapshot;
pub mod spec;
pub mod store;
pub mod trace;
pub mod tracker;
pub mod wired;

use godwit_api::Name;
use std::future::Future;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// What a node is started with.
#[derive(Clone, Debug)]
pub struct Config {
    /// Its name, as in its certificate.
    pub name: Name,
    /// What has to survive a reboot: records, replicas.
    pub state: PathBuf,
    /// What has not: sockets, process ids. In memory, and kept while guests run.
    pub run: PathBuf,
    /// The Ceph pool that volumes lie in that are new here; else files in the state folder.
    pub pool: Option<godwit_units::RadosPool>,
    /// Boot files that guests may use.
    pub images: PathBuf,
    /// Certificate, key and authority.
    pub credentials: PathBuf,
    /// The address that it listens on and that tunnels end at.
    pub address: IpAddr,
    /// TCP port of its API.
    pub api_port: u16,
    /// UDP port of the link's control lane.
    pub control_port: u16,
    /// UDP port of the link's disk lane.
    pub disk_port: u16,
    /// UDP port of the link's memory lane.
    pub memory_port: u16,
    /// That it can carry extenders, and where other sites reach it.
    pub extender: Option<godwit_api::extender::ExtenderOffer>,
    /// How often each guest is profiled without being asked for; none: never.
    pub watch_every: Option<Duration>,
}

/// Runs a node until `shutdown`; `up` is told when it serves. Guests go on without it, and are served until what is returned has ended.
///
/// # Errors
/// When it cannot start; each error says what is missing.
pub async fn run(
    config: Config,
    up: impl FnOnce(&Arc<node::Node>),
    shutdown: impl Future<Output = ()>,
) -> anyhow::Result<ending::Ending> {
    let address = (config.address, config.api_port).into();
    let node = node::Node::start(config).await?;
    let listener = godwit_api::server::listen(address).await?;
    tracing::info!(%address, name = node.name(), "node up");
    up(&node);
    if let Some(every) = node.config().watch_every {
        tokio::spawn(routine::watch(Arc::downgrade(&node), every));
    }
    let router = godwit_api::server::only(routes::router(node.clone()), godwit_trust::Role::Controller);
    let router = router.merge(metrics::router(node.clone()));
    godwit_api::server::serve(listener, router, node.credentials(), shutdown).await?;
    Ok(ending::Ending::begin(node).await)
}
