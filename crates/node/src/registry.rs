//! What a node remembers of a VM besides its ownership: definition, whether it is to be on, and who the peer of its last
//! hand-off was. One JSON file a VM, replaced by a rename after `fdatasync`.

use godwit_api::host::{MoveOrder, PeerHost};
use godwit_api::progress::MoveProgress;
use godwit_api::vm::VmDefinition;
use godwit_handoff::Ticket;
use godwit_units::{Generation, Lineage, VolumeId};
use serde::{Deserialize, Serialize};
use std::fs::OpenOptions;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
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
    /// CPUs that it is to have as soon as it runs here, and has not been given yet.
    #[serde(default)]
    pub plug: Option<u32>,
    /// Hosts that have blocks of its disks that were not here when it came, and have not heard that they are.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub holders: Vec<PeerHost>,
    /// Volumes that went from here before their blocks did, and whose owner has not said that it has all of them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub lent: Vec<VolumeId>,
    /// The newest owner that this host kept a replica of the disks for, while the VM was known here and another host's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub served: Option<(Lineage, Generation)>,
    /// A volume that an image is being copied into, or was when that broke off: it holds half of it, and the VM does not start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub importing: Option<VolumeId>,
}

impl VmFile {
    /// What is remembered of a VM that is new here.
    #[must_use]
    pub const fn new(definition: VmDefinition, power: Power) -> Self {
        Self {
            definition,
            power,
            peer: None,
            order: None,
            plug: None,
            holders: vec![],
            lent: vec![],
            served: None,
            importing: None,
        }
    }
}

/// How a move stood when its guest stopped or ran again: what a node that is restarted within the pause has to know
/// for the figures. Nothing else rests on it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Noted {
    /// The attempt.
    pub ticket: Ticket,
    /// How it stood.
    pub progress: MoveProgress,
}

/// Notes how a move stands. Not made durable: that would be part of the pause, and is only figures.
///
/// # Errors
/// When the medium fails.
pub fn note(folder: &Path, noted: &Noted) -> io::Result<()> {
    let fresh = folder.join("move.json.new");
    let mut out = OpenOptions::new().create(true).truncate(true).write(true).mode(0o600).open(&fresh)?;
    out.write_all(&serde_json::to_vec(noted).map_err(io::Error::other)?)?;
    std::fs::rename(&fresh, folder.join("move.json"))
}

/// How this attempt stood when it was last noted.
#[must_use]
pub fn noted(folder: &Path, ticket: Ticket) -> Option<MoveProgress> {
    last_noted(folder).filter(|noted| noted.ticket == ticket).map(|noted| noted.progress)
}

/// How its last move stood when that was last noted.
#[must_use]
pub fn last_noted(folder: &Path) -> Option<Noted> {
    serde_json::from_slice(&std::fs::read(folder.join("move.json")).ok()?).ok()
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
    crate::durable::replace_json(&path(folder), file)
}
