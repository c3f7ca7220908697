//! `GET /metrics`: what the node knows, for Prometheus. Behind mutual TLS like the rest of its API, for certificates of
//! people and programs (`admin`, `operator`); they may ask a node nothing else.

use crate::node::Node;
use axum::Router;
use axum::extract::State;
use axum::routing::get;
use godwit_api::extender::{ExtenderOrder, LocalExtender, LocalTunnel};
use godwit_api::host::{MoveRole, Ownership};
use godwit_api::metrics::{Exposition, OfMove, about, of_move, stages};
use godwit_link::Lane;
use godwit_trust::{Access, Role};
use std::sync::Arc;
use std::time::UNIX_EPOCH;

/// The route, for those who may look.
pub fn router(node: Arc<Node>) -> Router {
    let router = Router::new().route("/metrics", get(show)).with_state(node);
    godwit_api::only(router, Role::Client(Access::Operator))
}

const LANES: [(Lane, &str); 3] = [(Lane::Control, "control"), (Lane::Disk, "disk"), (Lane::Memory, "memory")];

#[allow(clippy::cast_precision_loss, reason = "figures for charts")]
fn float(n: u64) -> f64 {
    n as f64
}

async fn show(State(node): State<Arc<Node>>) -> Exposition {
    let mut out = Exposition::default();
    about(&mut out, "node");
    let facts = node.facts();
    out.gauge(
        "godwit_host_memory_free_bytes",
        "Memory that could be given to guests.",
        &[],
        float(facts.memory_free.0),
    );
    out.gauge("godwit_host_disk_free_bytes", "Room for replicas.", &[], float(facts.disk_free.0));
    let expires = node.certificate_expires().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    out.gauge("godwit_certificate_expiry_timestamp_seconds", "When the node's certificate ends.", &[], float(expires));
    vms(&mut out, &node);
    precaches(&mut out, &node);
    links(&mut out, &node);
    for (order, local) in node.seen_extenders().await {
        extender(&mut out, &order, &local);
    }
    out
}

fn vms(out: &mut Exposition, node: &Node) {
    let (mut here, mut waiting, mut elsewhere) = (0, 0, 0);
    let mut open = vec![];
    for parts in node.vms() {
        match parts.view().ownership {
            Ownership::Here => here += 1,
            Ownership::Pausing | Ownership::WaitsForPeer => waiting += 1,
            Ownership::Elsewhere => elsewhere += 1,
        }
        let definition = parts.definition();
        // The last move of each VM: as many as VMs, so it may stay until the next one.
        let moving = parts.moving();
        if let Some(moving) = &moving {
            let local = moving.local();
            let (from, to) = match moving.role {
                MoveRole::Source => (node.name(), moving.peer.name.as_str()),
                MoveRole::Destination => (moving.peer.name.as_str(), node.name()),
            };
            let disks = definition.spec.disks.iter().map(|d| d.size.0).sum::<u64>();
            let size = Some(definition.spec.memory.0 + disks);
            of_move(out, &OfMove { id: local.id, vm: &definition.name, from, to, size, progress: &local.progress });
            open.push(local.progress);
        }
        let leaving = moving.is_some_and(|m| m.role == MoveRole::Source && !m.tracker.ended());
        for disk in parts.disks() {
            let labels = [("vm", parts.name.as_str()), ("volume", disk.name.as_str())];
            out.gauge(
                "godwit_volume_allocated_bytes",
                "What the replica takes up on this host.",
                &labels,
                float(disk.allocated().0),
            );
            if leaving {
                let (progress, behind) = (disk.progress(), disk.behind_for());
                out.gauge(
                    "godwit_volume_backlog_bytes",
                    "What of the volume still differs at the destination.",
                    &labels,
                    float(progress.remaining.0),
                );
                out.gauge(
                    "godwit_volume_lag_seconds",
                    "For how long the destination's replica has been behind, looked at four times a second.",
                    &labels,
                    behind.as_secs_f64(),
                );
                out.gauge(
                    "godwit_volume_synchronous",
                    "1 while the guest's writes go to the destination as they are made.",
                    &labels,
                    f64::from(u8::from(progress.synchronous)),
                );
            }
        }
    }
    for (state, n) in [("here", here), ("waiting", waiting), ("elsewhere", elsewhere)] {
        out.gauge("godwit_vms", "VMs that this host knows, by whose they are.", &[("ownership", state)], float(n));
    }
    stages(out, open.iter());
}

fn precaches(out: &mut Exposition, node: &Node) {
    for told in node.precaches().told() {
        let volume = told.volume.0.to_string();
        let labels = [("volume", volume.as_str()), ("to", told.to.as_str())];
        if let Some(lag) = told.figures.lag_s {
            out.gauge("godwit_precache_lag_seconds", "How old what the secondary holds is.", &labels, lag);
        }
        let backlog = float(told.figures.backlog.0);
        out.gauge("godwit_precache_backlog_bytes", "What the secondary has not been sent.", &labels, backlog);
        let sent = float(told.figures.sent.0);
        out.counter("godwit_precache_sent_bytes_total", "Blocks that were sent to the secondary.", &labels, sent);
        let up = matches!(told.figures.state, godwit_api::precache::PrecacheState::Following);
        let help = "1 while the secondary holds a complete epoch and gets the next ones.";
        out.gauge("godwit_precache_following", help, &labels, f64::from(u8::from(up)));
    }
}

fn links(out: &mut Exposition, node: &Node) {
    for (peer, session) in node.peers().sessions() {
        let labels = [("peer", peer.as_str())];
        let up = session.down_for().is_none();
        out.gauge(
            "godwit_link_up",
            "1 while all lanes of the link to the peer are connected.",
            &labels,
            f64::from(u8::from(up)),
        );
        if let Some(rtt) = session.rtt() {
            out.gauge(
                "godwit_link_rtt_seconds",
                "Round trip to the peer, as QUIC estimates it.",
                &labels,
                rtt.as_secs_f64(),
            );
        }
        let down = session.down_time().as_secs_f64();
        out.counter(
            "godwit_link_down_seconds_total",
            "For how long the link was down in all, the first connecting included.",
            &labels,
            down,
        );
        let counters = session.counters();
        for (lane, name) in LANES {
            let labels = [("peer", peer.as_str()), ("lane", name)];
            let detail = counters.detail(lane);
            out.counter("godwit_link_sent_bytes_total", "UDP payload sent.", &labels, float(detail.sent.0));
            out.counter("godwit_link_received_bytes_total", "UDP payload received.", &labels, float(detail.received.0));
            out.counter(
                "godwit_link_connections_total",
                "How often the lane was connected.",
                &labels,
                float(detail.connections),
            );
        }
    }
}

fn extender(out: &mut Exposition, order: &ExtenderOrder, local: &LocalExtender) {
    let labels = [("site", order.site.as_str())];
    let is = |yes: bool| f64::from(u8::from(yes));
    let help = "1 while the way that this host's frames take to the site is known to work.";
    out.gauge("godwit_extender_way_up", help, &labels, is(local.good));
    let help = "How often this host's frames have gone over to another tunnel or carrier.";
    out.counter("godwit_extender_way_changes_total", help, &labels, float(local.changes));
    for (order, tunnel) in order.tunnels.iter().filter_map(|order| Some((order, of(local, order.id)?))) {
        let id = tunnel.id.to_string();
        let labels = [labels[0], ("peer", order.peer.as_str()), ("tunnel", id.as_str())];
        out.gauge("godwit_extender_tunnel_up", "1 while the other end answers.", &labels, is(tunnel.up));
        out.gauge("godwit_extender_tunnel_in_use", "1 while frames are sent into it.", &labels, is(tunnel.in_use));
        if let Some(at) = tunnel.handshake_unix_s {
            let help = "When the two ends agreed on session keys last; more than three minutes ago: it is silent.";
            out.gauge("godwit_extender_tunnel_last_handshake_timestamp_seconds", help, &labels, float(at));
        }
        if let Some(ms) = tunnel.rtt_ms {
            out.gauge("godwit_extender_tunnel_rtt_seconds", "There and back, as measured last.", &labels, ms / 1e3);
        }
        let (sent, received) = (float(tunnel.sent.0), float(tunnel.received.0));
        out.counter("godwit_extender_tunnel_sent_bytes_total", "Sent, from 0 after a silence.", &labels, sent);
        out.counter(
            "godwit_extender_tunnel_received_bytes_total",
            "Received, from 0 after a silence.",
            &labels,
            received,
        );
    }
}

fn of(local: &LocalExtender, id: u32) -> Option<&LocalTunnel> {
    local.tunnels.iter().find(|tunnel| tunnel.id == id)
}
