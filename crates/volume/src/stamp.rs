//! When a block was last written.

use godwit_units::{Epoch, Generation, Lineage};
use serde::{Deserialize, Serialize};

/// The interval of writes that a block's last write belongs to. Later stamps compare greater.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Stamp {
    /// The owner's lineage.
    pub lineage: Lineage,
    /// The owner's generation.
    pub generation: Generation,
    /// The interval within it.
    pub epoch: Epoch,
}

/// Bytes of a stamp on the wire.
pub(crate) const STAMP_BYTES: usize = 20;

impl Stamp {
    pub(crate) fn encode(self, out: &mut Vec<u8>) {
        out.extend(self.lineage.0.to_le_bytes());
        out.extend(self.generation.0.to_le_bytes());
        out.extend(self.epoch.0.to_le_bytes());
    }

    pub(crate) fn decode(bytes: &[u8; STAMP_BYTES]) -> Self {
        let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        Self {
            lineage: Lineage(word(0)),
            generation: Generation(word(8)),
            epoch: Epoch(u32::from_le_bytes(std::array::from_fn(|i| bytes[16 + i]))),
        }
    }
}
