//! What the volumes of one trust domain at this site hold: where a mirror that comes in looks blocks up by name (CloudNet,
//! section 3.2.2, as a dictionary of places instead of a cache of contents).
//!
//! Contents stay where they are, on the replicas; the library knows which block lies where. It is filled as blocks come, and by looks at
//! what lies here already ([`Library::look`]). What it says is
//! a guess: a block may have been overwritten since, its volume closed or removed. Whoever uses a block has it copied out and compared
//! with its name first (`godwit_content::fetch`), so nothing has to be taken back here.
//!
//! One library is for one customer. Whoever puts volumes of two into one lets each of them find out what the other has.

use crate::blocks::BLOCK;
use crate::error::{VolumeError, io_error};
use crate::file::Medium;
use crate::mirror::MirrorError;
use crate::replica::Replica;
use crate::scrub::aligned;
use godwit_content::{Block, ContentSource, Dictionary, Digest, Key, Place, Taken, is_zero, take};
use godwit_units::Bytes;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// Bits of a place that say which block of its volume it is: 2^48 blocks are far more than a volume has.
const BLOCK_BITS: u32 = 48;
/// Blocks in which data are looked for at once: 1 GiB, whose extents are few enough.
const SPAN: u64 = 1 << 18;
/// Volumes of one library, so that their numbers fit into a place.
const MOST_VOLUMES: usize = 1 << (64 - BLOCK_BITS);
/// Marks that a source is told at most: 8 MiB on a way that carries little else, for 4 GiB of contents. Acks wait behind them for as
/// long as the mirror's window takes to travel the other way.
const MOST_TOLD: u64 = 1 << 20;

/// Which blocks the volumes of a trust domain hold. [`Dictionary::COST`] bytes for each block it knows.
#[derive(Debug)]
pub struct Library {
    key: Key,
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    dictionary: Dictionary,
    /// By their numbers. Those that are closed make room for others.
    volumes: Vec<Weak<dyn Medium>>,
}

/// A volume's number in a library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Shelf(u16);

impl Library {
    /// An empty one. The key is to be random; it never takes more than this much memory.
    #[must_use]
    pub fn new(key: Key, memory: Bytes) -> Self {
        let dictionary = Dictionary::new(key.clone(), memory);
        Self { key, inner: Mutex::new(Inner { dictionary, volumes: vec![] }) }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    const fn key(&self) -> &Key {
        &self.key
    }

    /// How many blocks it knows.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.lock().dictionary.len()
    }

    /// Blocks of this replica can be found from now on. `None`: there are too many volumes.
    fn join(&self, replica: &Replica) -> Option<Shelf> {
        let mut inner = self.lock();
        let medium = Arc::downgrade(&replica.data);
        let number = inner.volumes.iter().position(|held| held.ptr_eq(&medium));
        let number = number.or_else(|| inner.volumes.iter().position(|held| held.strong_count() == 0));
        let number = number.unwrap_or(inner.volumes.len());
        if number == inner.volumes.len() {
            if number == MOST_VOLUMES {
                return None;
            }
            inner.volumes.push(medium);
        } else {
            inner.volumes[number] = medium;
        }
        Some(Shelf(number as u16))
    }

    /// These contents lie there now.
    fn learn(&self, shelf: Shelf, first: u64, data: &[u8]) {
        // Digests take the time: not under the lock.
        let blocks = data.chunks_exact(BLOCK as usize).zip(first..).filter(|(block, _)| !is_zero(block));
        let found: Vec<_> = blocks.map(|(block, at)| (self.key.digest(block), at)).collect();
        let mut inner = self.lock();
        for (digest, at) in found {
            inner.dictionary.learn_digest(&digest, Place(u64::from(shelf.0) << BLOCK_BITS | at));
        }
    }

    /// Looks at some of what lies on a replica here, so that it is known: what came before there was a library, and what a guest or an
    /// image brought. From block `from` on, `most` bytes at the most, past the page cache. How far it got, and how many bytes were read; none:
    /// there is nothing behind it, or there is no room for more.
    ///
    /// # Errors
    /// When the replica cannot be read.
    pub fn look(&self, replica: &Replica, from: u64, most: Bytes) -> Result<Option<(u64, Bytes)>, VolumeError> {
        let blocks = replica.size().0 / BLOCK;
        let full = {
            let inner = self.lock();
            // Beyond this what comes pushes out what is there.
            inner.dictionary.len() >= inner.dictionary.places() / 4 * 3
        };
        let (false, Some(shelf)) = (full || from >= blocks, self.join(replica)) else { return Ok(None) };
        let failed = |e| io_error("read", replica.folder())(e);
        let (mut at, end) = (from * BLOCK, (from + SPAN).min(blocks) * BLOCK);
        for (length, hole) in replica.data.extents(at, end - at).map_err(failed)? {
            if hole {
                at += length;
                continue;
            }
            let first = at / BLOCK;
            let last = (at + length.min(most.0)).div_ceil(BLOCK).min(blocks);
            let (mut buffer, bytes) = aligned(((last - first) * BLOCK) as usize);
            let bytes = &mut buffer[bytes];
            replica.data.read_past_cache(first * BLOCK, bytes).map_err(failed)?;
            self.learn(shelf, first, bytes);
            return Ok(Some((last, Bytes(bytes.len() as u64))));
        }
        Ok(Some((end / BLOCK, Bytes(0))))
    }

    /// Forgets everything, and tells nobody.
    #[cfg(test)]
    pub(crate) fn lose(&self) {
        self.lock().dictionary = Dictionary::new(self.key.clone(), Bytes::kib(64));
    }

    /// What a source is told first, of a volume of so many blocks: it has no use for more marks than that.
    fn greetings(&self, blocks: u64) -> Vec<Vec<u8>> {
        self.lock().dictionary.greetings(MOST_TOLD.min(blocks) as usize)
    }
}

/// A target's part in a library: it looks up what a source names, and what comes is found by others.
#[derive(Debug)]
pub(crate) struct Reader {
    library: Arc<Library>,
    shelf: Shelf,
}

impl Reader {
    /// `None`: the library has no room for another volume.
    pub fn new(library: Arc<Library>, replica: &Replica) -> Option<Self> {
        let shelf = library.join(replica)?;
        Some(Self { library, shelf })
    }

    /// What the source is told first.
    pub fn greetings(&self, replica: &Replica) -> Vec<Vec<u8>> {
        self.library.greetings(replica.size().0 / BLOCK)
    }

    /// These contents lie in the volume now.
    pub fn learn(&self, first: u64, data: &[u8]) {
        self.library.learn(self.shelf, first, data);
    }

    /// A frame for these blocks: what it says, and finds.
    ///
    /// # Errors
    /// When it is none, or of other blocks.
    pub fn take(&self, run: &Range<u64>, frame: &[u8], replica: &Replica) -> Result<Taken, MirrorError> {
        let taken = take(frame, self.library.key(), &*self.library)?;
        if taken.blocks as u64 != run.end - run.start || run.end > replica.size().0 / BLOCK {
            return Err(MirrorError::Message("a frame whose blocks are not those of its run"));
        }
        Ok(taken)
    }
}

impl ContentSource for Library {
    fn copy(&self, digest: &Digest, into: &mut Block) -> bool {
        let found = {
            let inner = self.lock();
            let Some(Place(place)) = inner.dictionary.place(digest) else { return false };
            let volume = inner.volumes.get((place >> BLOCK_BITS) as usize).and_then(Weak::upgrade);
            volume.map(|volume| (volume, place & ((1 << BLOCK_BITS) - 1)))
        };
        found.is_some_and(|(volume, block)| volume.read(block * BLOCK, into).is_ok())
    }
}
