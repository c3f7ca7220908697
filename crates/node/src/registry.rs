//! What a node remembers of a VM besides its ownership: definition, whether it is to be on, and who the peer of its last
//! hand-off was. One JSON file a VM, replaced by a rename after `fdatasync`.

use godwit_api::host::{MoveOrder, PeerHost};
use godwit_api::vm::VmDefinition;
use serde::{Deserialize, Serialize};
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Whether a VM is to be on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Power {
    /// Off until somebody starts it.
    #[default]
    Off,
    /// On: booted again when it dies.
    On,
}

/// The file's contents.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmFile {
    /// What it is.
    pub definition: VmDefinition,
    /// Whether it is to be on.
    #[serde(default)]
    pub power: Power,
    /// The other host of the last hand-off. A node that restarts in the middle of one has to find it again.
    #[serde(default)]
    pub peer: Option<PeerHost>,
    /// The order of the last move from here.
    #[serde(default)]
    pub order: Option<MoveOrder>,
}

/// Where a VM's file is.
#[must_use]
pub fn path(folder: &Path) -> PathBuf {
    folder.join("vm.json")
}

/// Reads a VM's file.
///
/// # Errors
/// When it cannot be read or makes no sense; the error names it.
pub fn load(folder: &Path) -> io::Result<VmFile> {
    let path = path(folder);
    let bytes = std::fs::read(&path).map_err(|e| io::Error::new(e.kind(), format!("{}: {e}", path.display())))?;
    serde_json::from_slice(&bytes).map_err(|e| io::Error::other(format!("{}: {e}", path.display())))
}

/// Replaces a VM's file, durably.
///
/// # Errors
/// When the medium fails; the old file is there then.
pub fn store(folder: &Path, file: &VmFile) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    let fresh = folder.join("vm.json.new");
    let mut out = OpenOptions::new().create(true).truncate(true).write(true).mode(0o600).open(&fresh)?;
    out.write_all(&serde_json::to_vec_pretty(file).map_err(io::Error::other)?)?;
    out.sync_data()?;
    std::fs::rename(&fresh, path(folder))?;
    File::open(folder)?.sync_all()
}
