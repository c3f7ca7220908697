//! What a replica is: one JSON file, replaced whole.

use crate::error::{VolumeError, io_error};
use godwit_units::{Bytes, Generation, Lineage, VolumeId};
use serde::{Deserialize, Serialize};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// The format that this code reads and writes.
pub(crate) const FORMAT: u32 = 1;
/// Owners that stamps can name. One is added by each hand-off.
pub(crate) const MOST_OWNERS: usize = 60_000;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Meta {
    pub format: u32,
    pub volume: VolumeId,
    pub size: Bytes,
    /// Whether this replica takes the guest's writes, or another one's.
    pub primary: bool,
    /// The owner whose writes are stamped now: an index into `owners`, from 1.
    pub owner: u32,
    pub owners: Vec<(Lineage, Generation)>,
    /// The epoch of writes now. Never used by an earlier process.
    pub epoch: u32,
    /// Whether it was closed properly.
    pub clean: bool,
}

impl Meta {
    pub fn load(path: &Path) -> Result<Self, VolumeError> {
        let bytes = std::fs::read(path).map_err(io_error("read", path))?;
        let meta: Self = serde_json::from_slice(&bytes)
            .map_err(|e| VolumeError::Damaged { path: path.to_owned(), why: e.to_string() })?;
        let why = if meta.format != FORMAT {
            format!("its format is {}, this program knows {FORMAT}", meta.format)
        } else if meta.owner as usize > meta.owners.len() || meta.owners.len() > MOST_OWNERS {
            "its table of owners makes no sense".into()
        } else {
            return Ok(meta);
        };
        Err(VolumeError::Damaged { path: path.to_owned(), why })
    }

    /// Durable when it returns.
    pub fn store(&self, path: &Path) -> Result<(), VolumeError> {
        let fresh = path.with_extension("new");
        let write = || {
            let mut file = OpenOptions::new().create(true).truncate(true).write(true).mode(0o600).open(&fresh)?;
            file.write_all(&serde_json::to_vec(self)?)?;
            file.sync_data()?;
            std::fs::rename(&fresh, path)?;
            match path.parent() {
                Some(folder) => File::open(folder)?.sync_all(),
                None => Ok(()),
            }
        };
        write().map_err(io_error("write", path))
    }
}
