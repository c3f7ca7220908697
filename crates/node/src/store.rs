//! What a volume's blocks lie on at this host: a file in the node's folder, unless somebody names something else before the volume is
//! first here.
//!
//! A *block device* ([`godwit_volume::device`]) becomes the volume's alone. What is mounted, or otherwise in use, the kernel refuses; a device that
//! carries the signature of something (a file system, a partition table, swap, a part of LVM or RAID: `wipefs` looks) is refused
//! unless somebody says that it may be lost; one of another volume of this node always.
//!
//! A volume that comes by a move lies on a device where whoever orders the move says so ([`crate::place`]).
//!
//! *Objects in a pool* of a Ceph cluster ([`godwit_volume::rados`]) are the volume's by their names; a node may have such a pool for all volumes
//! that are new to it ([`crate::Config::pool`]), those that come by a move included.
//!
//! A folder on *shared storage* ([`godwit_volume::shared`]) stands in the VM's definition, which the controller signs: a node that was taken over
//! cannot make another one open what it likes.

use crate::node::Node;
use anyhow::{Context, Result, anyhow, bail};
use godwit_api::vm::{DiskSpec, Store, VmDefinition};
use godwit_units::{Bytes, VolumeId};
use godwit_volume::device::{Before, is_taken};
use godwit_volume::{Replica, shared};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

/// Places the volumes of a VM that is new here.
///
/// # Errors
/// When one cannot lie where it is to.
pub async fn place_all(node: &Arc<Node>, definition: &VmDefinition, stores: Vec<Option<Store>>) -> Result<()> {
    for ((disk, volume), store) in definition.spec.disks.iter().zip(&definition.volumes).zip(stores) {
        let Some(store) = store else { continue };
        let (node, volume, size) = (node.clone(), *volume, disk.size);
        let placed = tokio::task::spawn_blocking(move || place(&node, volume, size, &store)).await;
        placed
            .map_err(|_| anyhow!("placing a volume ended in a bug"))?
            .with_context(|| format!("`{}`", disk.volume))?;
    }
    Ok(())
}

/// Makes the replica of a volume that is new here. Blocks: a device may have to be zeroed.
///
/// # Errors
/// When it cannot lie there.
pub fn place(node: &Node, volume: VolumeId, size: Bytes, store: &Store) -> Result<()> {
    let folder = crate::spec::volume_folder(node.config(), volume);
    if Replica::exists(&folder) {
        bail!(
            "there is a replica of volume {} here already; `godwit orphan ls` says whether it may be removed",
            volume.0
        );
    }
    match store {
        Store::Device { path, overwrite, zeroed } => {
            let before = may_take(&folder, Path::new(path), *overwrite, *zeroed)?;
            Ok(Replica::create_on(&folder, path.as_ref(), volume, size, before)?)
        }
        Store::Rados { pool } => Ok(Replica::create_in_pool(&folder, pool, volume, size)?),
        Store::Shared { path, device: None, .. } => Ok(Replica::create_shared(path.as_ref(), volume, size)?),
        Store::Shared { path, device: Some(device), overwrite, zeroed } => {
            let before = may_take(&folder, Path::new(device), *overwrite, *zeroed)?;
            let path = Path::new(path);
            if path.exists() {
                bail!("{} exists; name a folder that is to be made", path.display());
            }
            Ok(Replica::create_on(path, device.as_ref(), volume, size, before)?)
        }
    }
}

/// Whether a device may become a volume's, whose replica is to be in `folder`.
pub(crate) fn may_take(folder: &Path, device: &Path, overwrite: bool, zeroed: bool) -> Result<Before> {
    let volumes = folder.parent().context("the node's folder has no parent")?;
    if let Some(other) = is_taken(device, volumes) {
        bail!("{} holds the volume of {} already", device.display(), other.display());
    }
    if !overwrite && let Some(what) = signature(device)? {
        bail!("{} holds {what}; say overwrite if it may be lost", device.display());
    }
    Ok(if zeroed { Before::Zeroes } else { Before::Anything })
}

/// The folder of a VM, or of a replica, that is being removed has another name: half of one would be believed.
const GONE: &str = "gone-";

/// What a folder that is being removed is called meanwhile.
pub(crate) fn gone(folder: &Path) -> PathBuf {
    folder.with_file_name(format!("{GONE}{}", folder.file_name().unwrap_or_default().to_string_lossy()))
}

/// The number of the VM, or volume, whose folder was being removed under this name.
pub fn was_going(name: &str) -> Option<u64> {
    name.strip_prefix(GONE)?.parse().ok()
}

/// Begins to remove a volume's replica, quickly: from now on there is none here. Blocks.
///
/// # Errors
/// When it cannot, or what an earlier removal left cannot be removed.
pub fn put_away(folder: &Path) -> Result<()> {
    finish(folder)?;
    match std::fs::rename(folder, gone(folder)) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            Err(e).with_context(|| format!("cannot remove {}", folder.display()))
        }
        _ => Ok(()),
    }
}

/// Removes what was put away, with what it has outside its folder; not what has come there since. Blocks: a cluster may have to be asked.
///
/// # Errors
/// When it cannot; what is left is an orphan, and can be removed later.
pub fn finish(folder: &Path) -> Result<()> {
    let gone = gone(folder);
    godwit_volume::rados::remove(&gone)?;
    match std::fs::remove_dir_all(&gone) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            Err(e).with_context(|| format!("cannot remove {}", gone.display()))
        }
        _ => Ok(()),
    }
}

/// Goes on with removals that an earlier process of this node had begun. Blocks.
pub fn finish_all(node: &Node) {
    let volumes = node.config().state.join("volumes");
    for entry in std::fs::read_dir(&volumes).into_iter().flatten().filter_map(Result::ok) {
        if let Some(volume) = entry.file_name().to_str().and_then(was_going)
            && let Err(error) = finish(&volumes.join(volume.to_string()))
        {
            tracing::error!(error = format!("{error:#}"), "a replica cannot be removed; it is an orphan now");
        }
    }
}

/// What stays of a store in the VM's definition: what is the same at every host.
#[must_use]
pub fn kept(store: Option<Store>) -> Option<Store> {
    match store {
        Some(Store::Shared { path, .. }) => Some(Store::Shared { path, device: None, overwrite: false, zeroed: false }),
        _ => None,
    }
}

/// Whether a volume is where it was when its VM was this host's.
#[must_use]
pub fn is_there(node: &Node, disk: &DiskSpec, volume: VolumeId) -> Option<PathBuf> {
    let folder = disk.shared().map_or_else(|| crate::spec::volume_folder(node.config(), volume), Path::to_owned);
    (!Replica::exists(&folder)).then_some(folder)
}

/// Removes what a VM has on shared storage, where this host had it last.
pub fn remove_shared(node: &Node, definition: &VmDefinition) {
    for (disk, volume) in definition.spec.disks.iter().zip(&definition.volumes) {
        let Some(place) = disk.shared() else { continue };
        let ours = shared::having(place).is_ok_and(|had| had.is_none_or(|had| had.who == node.name()));
        let same = shared::what_is_in(place).is_ok_and(|(there, _)| there == *volume);
        if ours
            && same
            && let Err(error) = std::fs::remove_dir_all(place)
        {
            tracing::error!(place = %place.display(), %error, "a shared volume cannot be removed");
        }
    }
}

/// What a device carries the signature of, if it does.
fn signature(device: &Path) -> Result<Option<String>> {
    let output = Command::new("wipefs").args(["--no-act", "--json"]).arg(device).stdin(Stdio::null()).output();
    let output = output.context("cannot run wipefs, which comes with util-linux")?;
    if !output.status.success() {
        bail!("wipefs: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    if output.stdout.trim_ascii().is_empty() {
        return Ok(None);
    }
    let said: Value = serde_json::from_slice(&output.stdout).context("wipefs says what is no JSON")?;
    let found = said["signatures"].as_array().into_iter().flatten();
    let found: Vec<&str> = found.filter_map(|one| one["type"].as_str()).collect();
    Ok((!found.is_empty()).then(|| found.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{create_dir, read_dir, write};

    #[test]
    fn a_replica_that_is_being_removed_has_no_longer_its_name_and_one_that_broke_off_is_gone_on_with() {
        let volumes = tempfile::tempdir().unwrap();
        let folder = volumes.path().join("7");
        let names = || -> Vec<String> {
            let names = read_dir(volumes.path()).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
            names.collect()
        };
        let make = || {
            create_dir(&folder).unwrap();
            write(folder.join("meta"), b"one").unwrap();
        };
        make();
        put_away(&folder).unwrap();
        assert!(!Replica::exists(&folder));
        assert_eq!(names().iter().map(|name| was_going(name)).collect::<Vec<_>>(), [Some(7)]);
        // Another one came meanwhile: it is not what was put away.
        make();
        finish(&folder).unwrap();
        assert_eq!(names(), ["7"]);
        put_away(&folder).unwrap();
        make();
        put_away(&folder).unwrap();
        finish(&folder).unwrap();
        assert_eq!(names(), Vec::<String>::new());
        finish(&folder).unwrap();
    }
}
