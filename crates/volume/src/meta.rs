//! What a replica is: one JSON file, replaced whole.

use crate::blocks::BLOCK;
use crate::error::{VolumeError, io_error};
use crate::file::Description;
use crate::shadow::{Holder, MOST_SETS};
use crate::stamp::Stamp;
use godwit_units::{Bytes, Generation, Lineage, VolumeId};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// The format that this code reads and writes.
pub(crate) const FORMAT: u32 = 1;
/// The format of a replica of which not everything may be here: a program that knows nothing of that must not open it.
pub(crate) const SHADOW_FORMAT: u32 = 2;
/// Largest volume: what a signed 64-bit file offset and its table can hold, with room to spare.
const MOST_BYTES: u64 = 1 << 50;
/// No entry is unsure.
pub(crate) const SURE: u64 = u64::MAX;
/// Owners that stamps can name. One is added by each hand-off.
pub(crate) const MOST_OWNERS: usize = 60_000;

/// An epoch of a primary that has ended, and of which a secondary has everything: the CET of xNBD+.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Complete {
    /// The last stamp that was given in it.
    pub epoch: Stamp,
    /// When it ended, milliseconds since 1970 by the primary's clock.
    pub at_unix_ms: u64,
    /// Whether the replica is the volume's whole image as it was then, rather than some blocks of it and some later ones.
    pub image: bool,
    /// Which other volumes' epochs ended in the same moment.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub moment: Option<Moment>,
}

/// The moment in which epochs of several volumes of one VM ended, with no write of the guest's between two of them: their images are what one loss of
/// power would have left.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Moment {
    /// No two moments have the same; a random number.
    pub id: u64,
    /// How many volumes have it in common; at least two.
    pub volumes: u32,
}

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
    /// Entries of the table of stamps from this one on may be known at another site with other contents: a mirror passed them on,
    /// and the guest wrote again. An older description does not say; all are doubted then.
    #[serde(default)]
    pub unsure: u64,
    /// What it is to hold and does not, when there is such: see [`crate::shadow`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wants: Option<Wants>,
    /// The power that was on when it was opened last.
    #[serde(default)]
    pub power: String,
    /// A secondary: the last epoch that it holds.
    #[serde(default)]
    pub complete: Option<Complete>,
    /// A secondary: blocks of a journal are being written in their places. After a crash they are written again, and nothing is
    /// doubted for it.
    #[serde(default)]
    pub redo: bool,
    /// A secondary: it was the volume's owner before all of that was here, and has not been brought all since.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub gaps: bool,
    /// Whether it was closed properly.
    pub clean: bool,
}

/// What the table of words means.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Wants {
    /// Whether all of it was told. Half of it is nothing.
    pub complete: bool,
    /// The lineage of the owner who told it: a claim is of another, and begins with what is here.
    pub lineage: Lineage,
    /// Sets of holders, as words name them, from 1.
    pub holders: Vec<Vec<Holder>>,
}

impl Meta {
    /// A replica that holds zeroes and belongs to nobody.
    pub fn fresh(volume: VolumeId, size: Bytes) -> Result<Self, VolumeError> {
        if size.0 == 0 || !size.0.is_multiple_of(BLOCK) || size.0 > MOST_BYTES {
            return Err(VolumeError::Range(format!(
                "a volume of {} bytes cannot be: give a multiple of {BLOCK}, at most {MOST_BYTES}",
                size.0
            )));
        }
        Ok(Self {
            format: FORMAT,
            volume,
            size,
            primary: false,
            owner: 0,
            owners: vec![],
            epoch: 0,
            unsure: SURE,
            wants: None,
            power: String::new(),
            complete: None,
            redo: false,
            gaps: false,
            clean: true,
        })
    }

    pub fn load(from: &dyn Description, path: &Path) -> Result<Self, VolumeError> {
        let bytes = from.load().map_err(io_error("read", path))?;
        let meta: Self = serde_json::from_slice(&bytes)
            .map_err(|e| VolumeError::Damaged { path: path.to_owned(), why: e.to_string() })?;
        let why = if meta.format != FORMAT && meta.format != SHADOW_FORMAT {
            format!("its format is {}, this program knows {FORMAT} and {SHADOW_FORMAT}", meta.format)
        } else if meta.owner as usize > meta.owners.len() || meta.owners.len() > MOST_OWNERS {
            "its table of owners makes no sense".into()
        } else if meta.wants.as_ref().is_some_and(|wants| wants.holders.len() > MOST_SETS) {
            "its holders make no sense".into()
        } else {
            return Ok(meta);
        };
        Err(VolumeError::Damaged { path: path.to_owned(), why })
    }

    /// Durable when it returns.
    pub fn store(&self, to: &dyn Description, path: &Path) -> Result<(), VolumeError> {
        let format = if self.wants.is_some() { SHADOW_FORMAT } else { FORMAT };
        let bytes =
            serde_json::to_vec(&Self { format, ..self.clone() }).map_err(|e| io_error("encode", path)(e.into()))?;
        to.store(&bytes).map_err(io_error("write", path))
    }
}
