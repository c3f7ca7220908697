//! `godwit volume import` and `export` of volumes that a node holds: passed on to the volume's host, which does them.
//!
//! Nothing is kept here. Whoever asks needs no controller any more once the host has begun, and hears of the end from the next
//! controller. An export goes on where it began when its VM moves away meanwhile: so the other hosts that have a replica are asked, too.

use crate::precache::volume_called;
use crate::record::VmRecord;
use crate::rights::Caller;
use crate::state::{Controller, invalid, missing};
use axum::Json;
use axum::extract::{Extension, Path, State};
use godwit_api::image::{CopyImage, ImageCopy, ImageOrder, ImageState};
use godwit_api::public::Volume;
use godwit_api::{ApiError, Name, Problem};
use std::sync::Arc;

type Answer = Result<Json<ImageCopy>, ApiError>;

/// Longest path that is believed: the kernel's own bound.
const MOST_PATH: usize = 4095;

pub async fn copy(
    State(c): State<Arc<Controller>>,
    Extension(who): Extension<Caller>,
    Path(name): Path<Name>,
    Json(copy): Json<CopyImage>,
) -> Answer {
    if copy.path.is_empty() || copy.path.len() > MOST_PATH || copy.path.contains('\0') {
        return Err(invalid("path: name a file at the volume's host"));
    }
    let is_format = |f: &str| (1..=20).contains(&f.len()) && f.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-');
    if let Some(format) = copy.format.as_deref().filter(|format| !is_format(format)) {
        return Err(invalid(format!("format: `{}` is none", format.chars().take(40).collect::<String>()))
            .remedy("name it as qemu-img does: raw, qcow2, vmdk, vdi, vhdx, vpc"));
    }
    let (volume, vm) = volume_called(&c, &who, &name)?;
    let node = c.node_of(&vm.host)?;
    Ok(Json(node.copy_image(&ImageOrder { vm: vm.definition.id, volume: volume.id, copy }).await?))
}

pub async fn show(
    State(c): State<Arc<Controller>>,
    Extension(who): Extension<Caller>,
    Path(name): Path<Name>,
) -> Answer {
    let (volume, vm) = volume_called(&c, &who, &name)?;
    Ok(Json(latest(&c, &volume, &vm).await?))
}

pub async fn end(
    State(c): State<Arc<Controller>>,
    Extension(who): Extension<Caller>,
    Path(name): Path<Name>,
) -> Answer {
    let (volume, vm) = volume_called(&c, &who, &name)?;
    let host = latest(&c, &volume, &vm).await?.host;
    Ok(Json(c.node_of(&host)?.end_image(volume.id).await?))
}

/// The copy that is under way, or began last, wherever that is.
async fn latest(c: &Controller, volume: &Volume, vm: &VmRecord) -> Result<ImageCopy, ApiError> {
    let mut found = vec![];
    // Of a host that was left and is silent nobody can say anything; the VM's own host has the last word.
    for host in volume.replicas.iter().filter(|host| **host != vm.host) {
        let Ok(node) = c.node_of(host) else { continue };
        found.extend(node.image(volume.id).await.ok());
    }
    match c.node_of(&vm.host)?.image(volume.id).await {
        Ok(copy) => found.push(copy),
        Err(error) if found.iter().all(|copy| copy.state != ImageState::Copying) => {
            if error.problem != Problem::NotFound || found.is_empty() {
                return Err(error);
            }
        }
        Err(_) => {}
    }
    let at = |copy: &ImageCopy| (copy.state == ImageState::Copying, copy.began_unix_ms);
    found.into_iter().max_by_key(at).ok_or_else(|| missing("image of volume", &volume.name))
}
