//! What a host keeps of the memory of a guest that has moved away, so that it need not all come again when the guest comes back
//! (`--keep-checkpoint`).
//!
//! ```text
//!   there   source: makes a key --- Memory { keep: key } --> destination: writes the key beside its file of the VM
//!           source, when the guest runs there: seals its RAM into `checkpoint` under the key, and forgets the key
//!   back    the other way round: the owner says the key (Kept), and hears what this host has under it (`kept`)
//! ```
//!
//! It is the pages of another try ([`kept`](crate::kept)) made by another hand: of as many bytes as the guest's RAM at the most, where the disk
//! has twice that free, for a day, noise without the key that the VM's owner has. It holds no device's state, so nothing can be started from it.
//!
//! # What can go wrong
//!
//! None of it is needed for a move. A node that ends before all is sealed leaves what is: each page has a seal of its own. One that is restarted
//! between the stop and the seal keeps nothing, and neither does a destination that is restarted before the guest has arrived: it has
//! no key then, makes another, and what lies at the old host opens with it no more, and expires. The RAM stays taken until it is sealed: a
//! second for a gigabyte.

use crate::kept;
use crate::parts::{Parts, lock};
use crate::proto::Secret;
use godwit_api::host::MoveRole;
use godwit_memory::{CheckpointKey, Layout, Witness};
use godwit_vmm::Qemu;
use std::io::ErrorKind;
use std::sync::{Arc, Mutex, OnceLock};

/// One attempt's part in it.
#[derive(Debug, Default)]
pub(crate) struct Recycling {
    key: Mutex<Option<CheckpointKey>>,
    layout: OnceLock<Layout>,
}

impl Recycling {
    /// Source: it is wanted. What the destination is to be told.
    pub(crate) fn begin(&self) -> Secret {
        Secret(lock(&self.key).get_or_insert_with(CheckpointKey::random).0)
    }

    /// Destination: whether it is wanted.
    pub(crate) fn is_wanted(&self, keep: Option<Secret>) {
        *lock(&self.key) = keep.map(|secret| CheckpointKey(secret.0));
    }

    /// Source: how the guest's RAM is laid out.
    pub(crate) fn has_layout(&self, layout: Option<Layout>) {
        if let Some(layout) = layout {
            let _ = self.layout.set(layout);
        }
    }

    /// Destination: the guest is here, and whoever owns it has the key.
    pub(crate) fn arrived(&self, parts: &Parts) {
        let Some(key) = lock(&self.key).take() else { return };
        if let Err(error) = kept::put_key(&parts.folder, &key) {
            tracing::warn!(vm = parts.name, %error, "what the old host keeps of its memory is lost: its key cannot be written");
        }
    }
}

/// What is needed of a guest whose QEMU is about to end.
pub(crate) struct Leaving {
    ram: Witness,
    layout: Layout,
    key: CheckpointKey,
}

/// Source: takes hold of the RAM of a guest that stands still here and runs elsewhere, if it is to be kept.
pub(crate) fn leaving(parts: &Parts) -> Option<Leaving> {
    let moving = parts.moving().filter(|moving| moving.role == MoveRole::Source)?;
    let key = lock(&moving.recycling.key).take()?;
    let layout = moving.recycling.layout.get()?.clone();
    let ram = parts.qemu()?.ram(parts.definition().spec.memory);
    let ram = ram.inspect_err(|error| tracing::warn!(vm = parts.name, %error, "its memory is not kept")).ok()?;
    Some(Leaving { ram: Witness::new(Qemu::RAM, ram), layout, key })
}

/// Source: seals it, beside whatever the node does next.
pub(crate) fn take(parts: &Arc<Parts>, leaving: Leaving) {
    let parts = parts.clone();
    // A guest that comes back at once has what is sealed by then.
    let sealing = parts.look();
    crate::trace::spawn(async move {
        let held = parts.keeping.clone().lock_owned().await;
        let of = parts.clone();
        let taken = tokio::task::spawn_blocking(move || {
            let _held = held;
            let mut checkpoint = kept::open(&of, &leaving.key)?;
            let taken = checkpoint.take(&leaving.layout, &leaving.ram, &|| !sealing.is_cancelled());
            match taken {
                Ok(pages) => tracing::info!(vm = of.name, pages, "its memory is kept for its way back"),
                Err(error) if error.kind() == ErrorKind::Interrupted => {
                    tracing::info!(vm = of.name, "it comes back already: what was sealed of its memory is kept");
                }
                Err(error) if error.kind() == ErrorKind::QuotaExceeded => {
                    tracing::info!(
                        vm = of.name,
                        "others need the room: what was sealed of its memory is kept, and no more"
                    );
                }
                Err(error) => {
                    tracing::warn!(vm = of.name, %error, "its memory is not kept for its way back");
                    kept::drop_pages(&of);
                }
            }
            Some(())
        });
        let _ = taken.await;
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_destination_is_told_one_key_however_often_it_is_asked_for() {
        let recycling = Recycling::default();
        let (first, second) = (recycling.begin(), recycling.begin());
        assert_eq!(first.0, second.0);
        assert_ne!(first.0, Recycling::default().begin().0);
    }
}
