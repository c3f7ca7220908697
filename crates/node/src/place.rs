//! Block devices for volumes that a move is about to bring.
//!
//! The controller orders each place before it orders the move, from this node and by no way of the source's: a node that was taken over cannot
//! make another one overwrite a device. The replica is made like one of a pre-cache, with the same mark, so that everybody knows that it is
//! nobody's truth; and the move, or a pre-cache, goes on with what it finds. A move that fails leaves it for the next try; nobody removes
//! it but whoever removes the mark's orphan (`godwit orphan ls`). What the device holds stays.
//!
//! # What can go wrong
//!
//! *Zeroing takes long*, longer than the controller waits for an answer. It goes on when whoever asked has gone; who asks again waits for its
//! end, and finds the place made. *This node dies meanwhile.* There is no replica until the device is zeroed; what is left of its folder is
//! made anew.

use crate::node::Node;
use crate::precache::Mark;
use godwit_api::host::PlaceVolume;
use godwit_api::vm::{Placement, Store};
use godwit_api::{ApiError, Problem};
use godwit_units::{Bytes, VolumeId};
use godwit_volume::Replica;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// What somebody does who was refused a place.
const REMEDY: &str = "name another device of that host, or move without a place";

/// What keeps a volume from lying on a device here, and what to do. Blocks: the device is looked at.
#[must_use]
pub fn in_the_way(node: &Node, volume: VolumeId, size: Bytes, place: &Placement) -> Option<(String, &'static str)> {
    let folder = crate::spec::volume_folder(node.config(), volume);
    let (device, host, name) = (Path::new(&place.device), node.name(), &place.volume);
    if let Some(lies) = lies_on(&folder) {
        let message = format!("{host} has a replica of `{name}` already, at {}", lies.display());
        let remedy = "move it without a place, which goes on with that one; or remove that first: `godwit orphan ls`";
        return (lies != device).then_some((message, remedy));
    }
    let looked = godwit_volume::device::look_at(device, size).map_err(Into::into);
    let looked = looked.and_then(|()| crate::store::may_take(&folder, device, place.overwrite, place.zeroed));
    looked.err().map(|why| (format!("{host}: `{name}`: {why:#}"), REMEDY))
}

/// What the blocks of a replica that is here lie on.
fn lies_on(folder: &Path) -> Option<PathBuf> {
    let data = folder.join("data");
    Replica::exists(folder).then(|| std::fs::read_link(&data).unwrap_or(data))
}

/// Makes the replica of a volume that is about to come, on the device that is named.
///
/// # Errors
/// What is in the way.
pub async fn make(node: &Arc<Node>, order: PlaceVolume) -> Result<(), ApiError> {
    let node = node.clone();
    let made = tokio::spawn(async move {
        let _one = node.precaches().placing().await;
        node.quarantine().check(order.vm)?;
        let here = node.clone();
        match tokio::task::spawn_blocking(move || make_now(&here, &order)).await {
            Ok(made) => made,
            Err(_) => Err(ApiError::new(Problem::Failed, "placing a volume ended in a bug")),
        }
    });
    made.await.unwrap_or_else(|_| Err(ApiError::new(Problem::Failed, "placing a volume ended in a bug")))
}

fn make_now(node: &Node, order: &PlaceVolume) -> Result<(), ApiError> {
    let PlaceVolume { vm, volume, size, from, lineage, generation, place } = order;
    if let Some((message, remedy)) = in_the_way(node, *volume, *size, place) {
        return Err(ApiError::new(Problem::Blocked, message).remedy(remedy));
    }
    let folder = crate::spec::volume_folder(node.config(), *volume);
    if lies_on(&folder).is_some() {
        return Ok(());
    }
    let mark = Mark { vm: *vm, lineage: *lineage, generation: *generation, from: from.to_string() };
    let Placement { volume: name, device, overwrite, zeroed } = place.clone();
    tracing::info!(volume = %name, device, "a place is made for a volume that is to come");
    let store = Store::Device { path: device, overwrite, zeroed };
    let made = crate::precache::make_mark(&folder, &mark).and_then(|()| {
        // Of a try that was cut off.
        let link = folder.join("data");
        if link.is_symlink() {
            std::fs::remove_file(&link)?;
        }
        crate::store::place(node, *volume, *size, &store)
    });
    made.map_err(|why| {
        if !Replica::exists(&folder) {
            let _ = std::fs::remove_dir_all(&folder);
        }
        ApiError::new(Problem::Failed, format!("{}: `{name}`: {why:#}", node.name())).remedy(REMEDY)
    })
}
