//! What a host keeps of the memory of a guest that has moved away, so that it need not all come again when the guest comes back
//! (`--keep-checkpoint`).
//!
//! ```text
//!   there   source: makes a key --- Memory { keep: key } --> destination: writes the key beside its file of the VM (`keys`)
//!           source, when the guest runs there: seals its RAM into `checkpoint` under the key, and forgets the key
//!   on      the owner tells the next one of all keys that it has (Memory { elsewhere }), and forgets them
//!   back    the owner says this host's key (Kept), and hears what it has under it (`kept`)
//! ```
//!
//! It is the pages of another try ([`kept`](crate::kept)) made by another hand: of as many bytes as the guest's RAM at the most, where the disk
//! has twice that free, for a day, noise without the key that the VM's owner has. It holds no device's state, so nothing can be started from it.
//!
//! # What can go wrong
//!
//! None of it is needed for a move. A node that ends before all is sealed leaves what is: each page has a seal of its own. One that is restarted
//! between the stop and the seal keeps nothing. A destination that is restarted before the guest has arrived has no keys then: what lies at
//! former hosts is opened by nobody, and expires. The RAM stays taken until it is sealed: a
//! second for a gigabyte.

use crate::kept;
use crate::keys::Keys;
use crate::parts::{Parts, lock};
use crate::proto::{KeptAt, Secret};
use godwit_api::host::MoveRole;
use godwit_api::name::Name;
use godwit_memory::{CheckpointKey, Layout, Witness};
use godwit_vmm::Qemu;
use std::io::ErrorKind;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::SystemTime;

/// One attempt's part in it.
#[derive(Debug, Default)]
pub(crate) struct Recycling {
    key: Mutex<Option<CheckpointKey>>,
    /// Destination: what others keep.
    elsewhere: Mutex<Vec<KeptAt>>,
    layout: OnceLock<Layout>,
}

impl Recycling {
    /// Source: it is wanted. What the destination is to be told.
    pub(crate) fn begin(&self) -> Secret {
        Secret(lock(&self.key).get_or_insert_with(CheckpointKey::random).0)
    }

    /// Destination: whether it is wanted, and what others than the source keep.
    pub(crate) fn is_wanted(&self, keep: Option<Secret>, elsewhere: Vec<KeptAt>) {
        *lock(&self.key) = keep.map(|secret| CheckpointKey(secret.0));
        *lock(&self.elsewhere) = elsewhere;
    }

    /// Source: how the guest's RAM is laid out.
    pub(crate) fn has_layout(&self, layout: Option<Layout>) {
        if let Some(layout) = layout {
            let _ = self.layout.set(layout);
        }
    }

    /// Destination: the guest is here, from that host, and whoever owns it has the keys.
    pub(crate) fn arrived(&self, parts: &Parts, from: &Name) {
        let (key, elsewhere) = (lock(&self.key).take(), std::mem::take(&mut *lock(&self.elsewhere)));
        if key.is_none() && elsewhere.is_empty() {
            return;
        }
        let now = SystemTime::now();
        let keys = Keys::told(elsewhere, now);
        let keys = match key {
            Some(key) => keys.with(from.clone(), Secret(key.0), now),
            None => keys,
        };
        if let Err(error) = keys.write(&parts.folder) {
            tracing::warn!(vm = parts.name, %error, "what its former hosts keep of its memory is lost: the keys cannot be written");
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
