//! Takes a VM for this host from the images of its pre-caches, because the host that had it is lost.
//!
//! It is a claim as any other: evidence, a peer that is not heard, a new lineage ([`godwit_handoff::Fenced`]). What is different is what
//! it rests on. A claim after a hand-off asks the VM's record whether its disks are here; there is none for a VM that never was here.
//! So each disk has to have an *image*: a whole epoch, durable, in its place.
//!
//! The order: look at everything; let go of what the pre-caches receive by; look at the images again; write that a lineage is known here that is another
//! host's ([`Record::Outranked`]: runs nothing, may be claimed); then the VM's file; then the claim. A crash in between leaves a VM that is
//! elsewhere, and the order may come again.
//!
//! # What can go wrong
//!
//! *The host is not lost.* A node that hears it refuses, whatever the controller sees. When it comes back all the same, it is outranked, as
//! after any claim. *An epoch comes meanwhile*: the image is the next one then, or the one before; never a mixture. *The order comes twice*: the
//! second finds the VM here, and its images gone.

use crate::actor::Input;
use crate::check::{self, Purpose};
use crate::node::Node;
use crate::parts::Parts;
use crate::precache;
use godwit_api::host::{CheckVm, Ownership};
use godwit_api::promote::{LocalImage, LocalPromotion, PromoteVm};
use godwit_api::{ApiError, Problem};
use godwit_handoff::{Fenced, Ledger, Peer, PeerHistory, Record};
use godwit_units::Bytes;
use std::sync::Arc;
use std::time::Duration;

/// How long a keeper that has just begun may take to come to rest, and an image that is being written in its place to be there.
const SETTLING: Duration = Duration::from_secs(20);

fn conflict(what: String) -> ApiError {
    ApiError::new(Problem::Conflict, what)
}

/// Promotes, or says what would be.
///
/// # Errors
/// What is in the way.
pub async fn promote(node: &Arc<Node>, order: PromoteVm) -> Result<LocalPromotion, ApiError> {
    let vm = order.definition.id;
    let name = order.definition.name.clone();
    node.quarantine().check(vm)?;
    let known = node.vm(vm);
    if let Some(parts) = &known
        && (parts.view().ownership != Ownership::Elsewhere || parts.qemu().is_some())
    {
        return Err(conflict(format!("`{name}` is this host's already, or its QEMU is here"))
            .remedy(format!("`godwit vm show {name}` tells how it is")));
    }
    let found = LocalPromotion { vm, images: images(node, &order).await? };
    let asked = CheckVm { definition: order.definition.clone(), disk: Bytes(0), vcpus: None, place: vec![] };
    if let Some(first) = check::check(node, &asked, Purpose::Arrive).await.blockers.into_iter().next() {
        return Err(ApiError::new(Problem::Blocked, first.message).remedy(first.remedy));
    }
    let sight = if node.peers().hears(order.lost.as_str()) { Peer::Heard } else { Peer::Silent };
    if order.dry_run {
        return match sight {
            Peer::Silent => Ok(found),
            Peer::Heard => Err(heard(&name, &order)),
        };
    }
    if sight == Peer::Heard {
        return Err(heard(&name, &order));
    }
    let fenced = Fenced::vouched(&order.fenced, PeerHistory::MayHaveRun, order.newest, sight)
        .map_err(|why| conflict(format!("`{name}` cannot be promoted: {why}")))?;
    tracing::warn!(vm = %name, lost = %order.lost, fenced = order.fenced, images = ?found.images, "promoting");
    node.precaches().release(&order.definition.volumes).await;
    // Until now more may have come: another image, or a pre-cache that keeps none.
    images(node, &order).await?;
    let parts = take_in(node, &order).await?;
    // What had come when nobody could bring more any more counts.
    settle(node, &order).await?;
    let found = LocalPromotion { vm, images: images(node, &order).await? };
    let began = tokio::time::Instant::now();
    loop {
        let (claim, whole) = (fenced.clone(), true);
        match parts.keeper().ask(|reply| Input::Claim { fenced: claim, whole, reply }).await {
            // It is still closing what it does not own.
            Err(error) if error.problem == Problem::Conflict && began.elapsed() < SETTLING && is_busy(&parts) => {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            answer => return answer.map(|()| found),
        }
    }
}

fn heard(name: &godwit_api::Name, order: &PromoteVm) -> ApiError {
    conflict(format!("`{name}` cannot be promoted: its host `{}` is heard here, so it is not fenced", order.lost))
        .remedy("fence it first; or move the VM, since its host is there")
}

/// Whether the VM is still nobody's here.
fn is_busy(parts: &Parts) -> bool {
    parts.view().ownership == Ownership::Elsewhere
}

/// Brings images of one moment to their places, of which all has come.
async fn settle(node: &Arc<Node>, order: &PromoteVm) -> Result<(), ApiError> {
    let definition = &order.definition;
    for (volume, spec) in definition.volumes.iter().zip(&definition.spec.disks) {
        let disk = precache::holding(node, definition.id, *volume, spec.size).await?;
        let settled = precache::settle(node, definition.id, &disk).await;
        settled.map_err(|e| ApiError::new(Problem::Failed, format!("the image of `{}`: {e:#}", spec.volume)))?;
    }
    Ok(())
}

/// The image of each disk.
async fn images(node: &Arc<Node>, order: &PromoteVm) -> Result<Vec<LocalImage>, ApiError> {
    let definition = &order.definition;
    let mut found = vec![];
    for (volume, spec) in definition.volumes.iter().zip(&definition.spec.disks) {
        let disk = precache::holding(node, definition.id, *volume, spec.size).await?;
        let began = tokio::time::Instant::now();
        while disk.replica().redoes() {
            // As when the disk was full in the middle of it: an owner could not open it either.
            if began.elapsed() > SETTLING {
                return Err(conflict(format!(
                    "the image of `{}` at {} is half in its place",
                    spec.volume,
                    node.name()
                ))
                .remedy("make room on that host's disk, or see to it, start its node again, and promote again"));
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        let image = disk.replica().complete().filter(|held| held.image && !disk.replica().is_primary());
        let Some(image) = image else {
            return Err(conflict(format!("{} has no whole image of `{}`", node.name(), spec.volume)).remedy(
                "only `godwit volume precache --consistent` keeps one; use another site, or bring the host back",
            ));
        };
        found.push(LocalImage {
            volume: *volume,
            epoch: format!("{}.{}", image.epoch.generation.0, image.epoch.epoch.0),
            epoch_unix_ms: image.at_unix_ms,
            moment: image.moment.map(|moment| moment.id),
        });
    }
    Ok(found)
}

/// Makes the VM known here, as another host's.
async fn take_in(node: &Arc<Node>, order: &PromoteVm) -> Result<Arc<Parts>, ApiError> {
    let definition = order.definition.clone();
    let (vm, volumes) = (definition.id, definition.volumes.clone());
    node.precaches().release(&volumes).await;
    let (ledger, newest) = (node.clone(), order.newest);
    let written = tokio::task::spawn_blocking(move || {
        let mut records = ledger.ledger();
        match records.load(vm)? {
            Some(_) => Ok(()),
            None => records.store(vm, &Record::Outranked { vm, lineage: newest }),
        }
    });
    let failed = |e: &dyn std::fmt::Display| ApiError::new(Problem::Failed, e.to_string());
    written.await.map_err(|e| failed(&e))?.map_err(|e| failed(&e))?;
    let parts = node.adopt_definition(definition, None).await?;
    node.precaches().unmark(&volumes);
    Ok(parts)
}
