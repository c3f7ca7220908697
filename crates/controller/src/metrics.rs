//! `GET /metrics`: what the controller knows, for Prometheus.
//!
//! Behind mutual TLS like everything else (Prometheus takes a client's certificate in `tls_config`): names of VMs and hosts are
//! nobody else's business, and a second, plain listener would be one more door.

use crate::events::label;
use crate::record::MoveRecord;
use crate::state::Controller;
use axum::extract::State;
use godwit_api::ApiError;
use godwit_api::metrics::{ENDS, Exposition, OfMove, about, of_move, stages};
use std::sync::Arc;

fn of(record: &MoveRecord) -> OfMove<'_> {
    OfMove {
        id: record.id(),
        vm: &record.vm,
        from: record.from.as_str(),
        to: record.order.to.name.as_str(),
        size: Some((record.memory + record.disks).0),
        progress: &record.progress,
    }
}

#[allow(clippy::cast_precision_loss, reason = "figures for charts")]
pub async fn show(State(c): State<Arc<Controller>>) -> Result<Exposition, ApiError> {
    let mut out = Exposition::default();
    about(&mut out, "controller");
    let open = c.open_moves()?;
    stages(&mut out, open.iter().map(|m| &m.progress));
    let ended = c.events.ended();
    for record in open.iter().chain(&ended) {
        of_move(&mut out, &of(record));
    }
    let counted = c.events.outcomes();
    for outcome in ENDS.map(label) {
        let n = counted.get(outcome).copied().unwrap_or(0);
        out.counter(
            "godwit_vm_migrations_total",
            "Moves that have ended, by outcome.",
            &[("outcome", outcome)],
            n as f64,
        );
    }
    for (host, up) in c.events.hosts() {
        let labels = [("host", host.as_str())];
        out.gauge(
            "godwit_host_up",
            "1 while the host's node answers the controller.",
            &labels,
            f64::from(u8::from(up)),
        );
    }
    for ([a, b], up) in c.events.extenders() {
        let labels = [("a", a.as_str()), ("b", b.as_str())];
        out.gauge(
            "godwit_extender_up",
            "1 while a tunnel between the two sites is up.",
            &labels,
            f64::from(u8::from(up)),
        );
    }
    out.gauge("godwit_vms", "VMs that the controller knows.", &[], c.vm_records()?.len() as f64);
    out.counter("godwit_events_total", "Events told since the controller started.", &[], c.events.newest().1 as f64);
    out.gauge("godwit_event_readers", "Readers that follow the events.", &[], c.events.readers() as f64);
    Ok(out)
}
