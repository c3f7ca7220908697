//! What the guests of a host do, all at once: what they write to their disks just now, and what they were seen to do before.
//!
//! For whoever plans many moves, and cannot ask for each VM by itself. QEMU counts what its guest has written; two looks, [`BETWEEN`]
//! apart, make a rate of it. A QEMU that does not answer within [`PATIENCE`] holds nobody up: of its VM nothing is said.

use crate::effects::on_qemu;
use crate::node::Node;
use crate::parts::Parts;
use futures_util::StreamExt;
use futures_util::stream;
use godwit_api::evacuation::Activity;
use godwit_api::profile::nearest;
use godwit_units::VmId;
use serde_json::json;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Between two looks at what a guest has written.
const BETWEEN: Duration = Duration::from_millis(250);
/// For one QEMU's answer.
const PATIENCE: Duration = Duration::from_secs(2);
/// QEMUs that are asked at a time: each takes a thread meanwhile.
const AT_ONCE: usize = 16;

/// Of every VM that is known here, also of one that has gone and left its profiles.
pub async fn all(node: &Arc<Node>, at_unix_s: u64) -> Vec<Activity> {
    let vms = node.vms();
    let before = written_by_all(&vms).await;
    tokio::time::sleep(BETWEEN).await;
    let after = written_by_all(&vms).await;
    let rate = |id: VmId| {
        let (earlier, since) = before.get(&id)?;
        let (later, now) = after.get(&id)?;
        let seconds = now.saturating_duration_since(*since).as_secs_f64();
        // A QEMU that was started anew meanwhile counts anew.
        Some(later.checked_sub(*earlier)? as f64 / seconds.max(1e-3))
    };
    let rates: Vec<Option<f64>> = vms.iter().map(|parts| rate(parts.id)).collect();
    // Many small files.
    let read = move || {
        let of = |(parts, written_per_s): (Arc<Parts>, Option<f64>)| Activity {
            vm: parts.id,
            written_per_s,
            profile: nearest(crate::profile::list(&parts), at_unix_s),
        };
        vms.into_iter().zip(rates).map(of).collect()
    };
    tokio::task::spawn_blocking(read).await.unwrap_or_default()
}

/// Bytes that each running guest has written since its QEMU was started, and when that was asked.
async fn written_by_all(vms: &[Arc<Parts>]) -> HashMap<VmId, (u64, Instant)> {
    let asked = stream::iter(vms.to_vec()).map(|parts| async move { Some((parts.id, written(&parts).await?)) });
    asked.buffer_unordered(AT_ONCE).filter_map(std::future::ready).collect().await
}

async fn written(parts: &Parts) -> Option<(u64, Instant)> {
    let qemu = parts.qemu()?;
    let ask = on_qemu(&qemu, |qemu| qemu.monitor(json!({"execute": "query-blockstats"})));
    let answer = tokio::time::timeout(PATIENCE, ask).await.ok()?.ok()?;
    let devices = answer.as_array()?;
    Some((devices.iter().filter_map(|device| device["stats"]["wr_bytes"].as_u64()).sum(), Instant::now()))
}
