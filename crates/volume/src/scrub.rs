//! Scrub: whether what lies on the disks of a volume's holders is what was written there. Digests are compared, no contents travel.
//!
//! ```text
//!   Extents   digests of 1 MiB each, over the blocks' stamps and over their contents
//!      | both as here: alike            | one of them differs
//!      v                                v
//!   recorded                         Blocks   a stamp and a digest for each block, twice before anything is believed
//!                                       |
//!                                       v
//!                      alike: recorded | behind: lag, no rot | judged
//! ```
//!
//! Only blocks whose stamps are equal are compared: where they differ one holder is behind, and will be brought what it lacks. A
//! primary leaves out what it wrote in the epoch of now, and what a mirror may have passed on before the guest wrote it again:
//! there, equal stamps prove nothing ([`Replica::settled_stamp`]). That is counted: after a claim it is the whole volume, until a mirror or a pre-cache
//! has compared it.
//!
//! # Which one is rotten?
//!
//! Of two holders that differ neither is right for being the primary. What settles it, in this order:
//!
//! 1. *A record.* Where all holders agreed about a block once, its digest was written down with its stamp ([`Attested`]). As long
//!    as the stamp is the same, whoever has that digest is right. Writing digests down with each of the guest's writes would
//!    settle more, and cost each write a hash; so it is the first scrub after a block's last write that makes its record.
//! 2. *An error.* A disk that says that it cannot read a block has lost it; if all the others agree, they are right.
//! 3. *A majority* of at least two.
//!
//! Otherwise nobody can tell. That is what is said then, and nothing is repaired unless an operator names the holder that is to be believed.
//!
//! # What can go wrong
//!
//! *The guest writes meanwhile.* Stamps are read before the contents and after them, and a block whose stamp changed is left out and
//! looked at again. *A disk reads wrong once.* Rot is believed when two looks say the same. *The page cache hides it*: blocks are read past it,
//! which also leaves the guest's own cache alone ([`crate::Medium::read_past_cache`]). *A repair meets a write*: a block is mended
//! under the replica's lock, and only where stamp and rotten contents are still those that were judged ([`Replica::mend`]). It does not
//! mark the region hot: a primary would restamp it after a loss of power, and send a torn block to the holder that has the right one.
//! *A repair meets a reader*: a mirror's waits; a pre-cache that reads in the instant of the repair may send the block half mended, under its stamp,
//! as it may have sent it rotten before: the secondary's own comparison finds either.
//! *The record rots*: each of its entries has a check, and one that fails is none.

use crate::blocks::BLOCK;
use crate::error::{VolumeError, io_error};
use crate::file::{Disk, Medium};
use crate::replica::{Replica, give_way, is_zero};
use crate::stamp::Stamp;
use crate::stamps::{REGION, WINDOW, nobodys};
use godwit_units::VolumeId;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use std::path::Path;
use std::time::Instant;

/// Blocks of an extent: 1 MiB, which a disk reads in one go.
pub const EXTENT: u64 = 256;
/// Extents of one question: half a second of a disk at the default rate, and an answer of a few KiB.
pub const MOST_EXTENTS: usize = 16;
/// How often blocks that are being written are looked at before they are left for another time.
const LOOKS: u32 = 4;
/// Holders of one volume that are compared.
pub const MOST_HOLDERS: usize = 9;

/// 128 bits of a BLAKE3: nobody chooses contents to collide, since who can write a volume needs no collision to spoil it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Digest([u8; 16]);

impl Digest {
    fn of(hasher: &blake3::Hasher) -> Self {
        let hash = hasher.finalize();
        Self(std::array::from_fn(|i| hash.as_bytes()[i]))
    }
}

impl std::fmt::Display for Digest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|b| write!(f, "{b:02x}"))
    }
}

impl std::fmt::Debug for Digest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{self}")
    }
}

impl Serialize for Digest {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Digest {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let parsed = (text.len() == 32 && text.is_ascii())
            .then(|| {
                let mut bytes = [0; 16];
                for (i, byte) in bytes.iter_mut().enumerate() {
                    *byte = u8::from_str_radix(text.get(2 * i..2 * i + 2)?, 16).ok()?;
                }
                Some(Self(bytes))
            })
            .flatten();
        parsed.ok_or_else(|| serde::de::Error::custom("a digest is 32 hexadecimal digits"))
    }
}

/// The digest of a block's contents. It is keyed by the volume, so that equal blocks of two volumes do not show as such.
#[must_use]
pub fn digest(volume: VolumeId, contents: &[u8]) -> Digest {
    let key = blake3::derive_key("godwit 2026 scrub of a volume's blocks", &volume.0.to_le_bytes());
    let mut hasher = blake3::Hasher::new_keyed(&key);
    hasher.update(contents);
    Digest::of(&hasher)
}

/// What one holder has of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockDigest {
    /// Which block.
    pub block: u64,
    /// The stamp that it had before and after it was read; none: it changed meanwhile, and is to be looked at again.
    pub stamp: Option<Stamp>,
    /// The digest of its contents; none: the disk says that it cannot read it.
    pub contents: Option<Digest>,
}

/// What this holder has of an extent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Looked {
    /// The blocks that can be compared.
    pub blocks: Vec<BlockDigest>,
    /// Those that were written, and of which equal stamps would prove nothing.
    pub unproven: Vec<u64>,
}

/// What one holder has of an extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExtentDigest {
    /// Over numbers and stamps of the blocks that can be compared.
    pub stamps: Digest,
    /// Over their contents; none: something of it could not be read.
    pub contents: Option<Digest>,
}

impl ExtentDigest {
    /// An extent of these blocks.
    #[must_use]
    pub fn of(blocks: &[BlockDigest]) -> Self {
        let (mut stamps, mut contents, mut readable) = (blake3::Hasher::new(), blake3::Hasher::new(), true);
        for block in blocks {
            let mut head = block.block.to_le_bytes().to_vec();
            if let Some(stamp) = block.stamp {
                stamp.encode(&mut head);
            }
            stamps.update(&head);
            match block.contents {
                Some(digest) => drop(contents.update(&digest.0)),
                None => readable = false,
            }
        }
        Self { stamps: Digest::of(&stamps), contents: readable.then(|| Digest::of(&contents)) }
    }
}

/// A buffer whose beginning lies at a block's border in memory: reads past the page cache need it.
pub(crate) fn aligned(length: usize) -> (Vec<u8>, Range<usize>) {
    let buffer = vec![0_u8; length + BLOCK as usize];
    let start = buffer.as_ptr().align_offset(BLOCK as usize).min(BLOCK as usize);
    (buffer, start..start + length)
}

impl Replica {
    /// The stamp of a block, where it proves what its contents are: not for what a primary wrote in the epoch of now, nor for what a mirror
    /// may have passed on before it was written again.
    ///
    /// # Errors
    /// When the medium fails, or not all of the volume is here.
    pub fn settled_stamp(&self, block: u64) -> Result<Option<Stamp>, VolumeError> {
        Ok(self.stamp_and_proof(block)?.and_then(|(stamp, proves)| proves.then_some(stamp)))
    }

    /// The stamp of a block, and whether it proves what its contents are.
    fn stamp_and_proof(&self, block: u64) -> Result<Option<(Stamp, bool)>, VolumeError> {
        let mut inner = self.lock();
        inner.refuse_shadow()?;
        if inner.meta.redo {
            return Err(inner.journal_waits());
        }
        let entry = inner.stamps.get(block).map_err(self.io("read the stamps of"))?;
        let settled = !inner.meta.primary || (entry < inner.entry() && entry < inner.meta.unsure);
        let proves = settled && entry != nobodys(entry);
        Ok(inner.stamp_of(entry).map(|stamp| (stamp, proves)))
    }

    /// The extents in which anything was written, from one on, and at most so many. The table is read from there on, and no further than is
    /// needed; a guest's write waits for a window of it at the most.
    ///
    /// # Errors
    /// When the medium fails.
    pub fn written_extents(&self, from: u64, most: usize) -> Result<Vec<u64>, VolumeError> {
        let blocks = self.size().0 / BLOCK;
        let mut at = from.saturating_mul(EXTENT);
        let mut found: Vec<u64> = vec![];
        while at < blocks && found.len() < most {
            let end = blocks.min(at + WINDOW * REGION);
            let began = Instant::now();
            let written = self.lock().stamps.written(at..end).map_err(self.io("read the stamps of"))?;
            for run in written {
                let first = (run.start / EXTENT).max(found.last().map_or(0, |last| last + 1));
                let free = most - found.len();
                found.extend((first..run.end.div_ceil(EXTENT)).take(free));
            }
            at = end;
            give_way(began);
        }
        Ok(found)
    }

    /// The digests of an extent's blocks that can be compared, as they lie on the disk.
    ///
    /// # Errors
    /// Those of [`Replica::look_at`].
    pub fn digest_extent(&self, volume: VolumeId, extent: u64) -> Result<Vec<BlockDigest>, VolumeError> {
        Ok(self.look_at(volume, extent)?.blocks)
    }

    /// The same, and which blocks cannot be compared.
    ///
    /// # Errors
    /// When it lies outside, or the stamps cannot be read. A block that cannot be read is no error: it is what is being looked for.
    pub fn look_at(&self, volume: VolumeId, extent: u64) -> Result<Looked, VolumeError> {
        let last = self.size().0 / BLOCK;
        let blocks = extent.saturating_mul(EXTENT)..extent.saturating_add(1).saturating_mul(EXTENT).min(last);
        if blocks.is_empty() {
            return Err(VolumeError::Range(format!("extent {extent} lies outside of the volume")));
        }
        let (mut before, mut found) = (vec![], Looked::default());
        for block in blocks {
            match self.stamp_and_proof(block)? {
                Some((stamp, true)) => before.push((block, stamp)),
                Some((_, false)) => found.unproven.push(block),
                None => {}
            }
        }
        let (Some(first), Some(end)) = (before.first(), before.last()) else { return Ok(found) };
        let span = first.0..end.0 + 1;
        let (mut buffer, at) = aligned(((span.end - span.start) * BLOCK) as usize);
        let bytes = &mut buffer[at];
        let whole = self.data.read_past_cache(span.start * BLOCK, bytes).is_ok();
        for (block, stamp) in before {
            let within = ((block - span.start) * BLOCK) as usize;
            let contents = &mut bytes[within..within + BLOCK as usize];
            let read = whole || self.data.read_past_cache(block * BLOCK, contents).is_ok();
            let same = self.settled_stamp(block)? == Some(stamp);
            found.blocks.push(BlockDigest {
                block,
                stamp: same.then_some(stamp),
                contents: read.then(|| digest(volume, contents)),
            });
        }
        Ok(found)
    }

    /// A block as it lies on the disk, if it is the one that was meant: for a holder whose own is rotten.
    ///
    /// # Errors
    /// When it is another one by now, or cannot be read.
    pub fn read_attested(
        &self,
        volume: VolumeId,
        block: u64,
        stamp: Stamp,
        wanted: Digest,
    ) -> Result<Vec<u8>, VolumeError> {
        self.inside(block.saturating_mul(BLOCK), BLOCK)?;
        let (mut buffer, at) = aligned(BLOCK as usize);
        let same = self.settled_stamp(block)? == Some(stamp);
        self.data.read_past_cache(block * BLOCK, &mut buffer[at.clone()]).map_err(self.io("read"))?;
        let contents = &buffer[at];
        if !same || digest(volume, contents) != wanted || self.settled_stamp(block)? != Some(stamp) {
            return Err(VolumeError::Range(format!("block {block} is not what it was when it was looked at")));
        }
        Ok(contents.to_vec())
    }

    /// Puts right what is rotten, where the block is still the one that was judged: the same stamp, and the contents with the digest `was`
    /// (none: it could not be read). Durable after [`Replica::flush`]. Whether anything had to be done.
    ///
    /// # Errors
    /// When it was written meanwhile, what is to replace it is not what it should be, or the medium fails.
    pub fn mend(&self, volume: VolumeId, mend: &Mend<'_>) -> Result<bool, VolumeError> {
        let Mend { block, stamp, was, contents, digest: wanted } = *mend;
        let refuse = |why: &str| Err(VolumeError::Range(format!("block {block} is not mended: {why}")));
        self.inside(block.saturating_mul(BLOCK), BLOCK)?;
        if contents.len() as u64 != BLOCK || digest(volume, contents) != wanted {
            return refuse("what came does not have the digest that it should");
        }
        if self.settled_stamp(block)? != Some(stamp) {
            return refuse("it was written since");
        }
        // No write comes in between: they take this lock.
        let mut inner = self.lock();
        if inner.closed {
            return refuse("this process ends");
        }
        let entry = inner.stamps.get(block).map_err(self.io("read the stamps of"))?;
        if inner.stamp_of(entry) != Some(stamp) {
            return refuse("it was written since");
        }
        let (mut buffer, at) = aligned(BLOCK as usize);
        let now = self.data.read_past_cache(block * BLOCK, &mut buffer[at.clone()]);
        let now = now.ok().map(|()| digest(volume, &buffer[at]));
        if now == Some(wanted) {
            return Ok(false);
        }
        if now != was {
            return refuse("it is not what it was when it was judged");
        }
        let at = block * BLOCK;
        let done = if is_zero(contents) { self.data.punch(at, BLOCK) } else { self.data.write(at, contents) };
        done.map_err(self.io("mend"))?;
        Ok(true)
    }
}

/// What [`Replica::mend`] is to do.
#[derive(Clone, Copy, Debug)]
pub struct Mend<'a> {
    /// The block.
    pub block: u64,
    /// Its stamp.
    pub stamp: Stamp,
    /// What it is now; none: it cannot be read.
    pub was: Option<Digest>,
    /// What it should be.
    pub contents: &'a [u8],
    /// Its digest.
    pub digest: Digest,
}

const ENTRY: u64 = 32;

/// Digests about which all holders agreed: beside a replica, 32 bytes for each block that was looked at. Never synced: what a loss of power
/// tears fails its check.
#[derive(Debug)]
pub struct Attested {
    volume: VolumeId,
    medium: Disk,
}

impl Attested {
    /// That of the replica in a folder.
    ///
    /// # Errors
    /// When it cannot be had.
    pub fn open(folder: &Path, volume: VolumeId) -> Result<Self, VolumeError> {
        let path = folder.join("attested");
        Ok(Self { volume, medium: Disk::open(&path, 0).map_err(io_error("open", &path))? })
    }

    fn entry(&self, block: u64, stamp: Stamp, contents: Digest) -> [u8; ENTRY as usize] {
        let mut bytes = block.to_le_bytes().to_vec();
        stamp.encode(&mut bytes);
        let stamp = digest(self.volume, &bytes);
        let check = digest(self.volume, &[&bytes[..], &contents.0].concat());
        let mut entry = [0; ENTRY as usize];
        entry[..8].copy_from_slice(&stamp.0[..8]);
        entry[8..24].copy_from_slice(&contents.0);
        entry[24..].copy_from_slice(&check.0[..8]);
        entry
    }

    /// What a block with this stamp has to be; none if nobody knows.
    #[must_use]
    pub fn get(&self, block: u64, stamp: Stamp) -> Option<Digest> {
        let mut entry = [0; ENTRY as usize];
        self.medium.read(block * ENTRY, &mut entry).ok()?;
        let contents = Digest(std::array::from_fn(|i| entry[8 + i]));
        (entry == self.entry(block, stamp, contents)).then_some(contents)
    }

    /// All holders agree about these blocks.
    ///
    /// # Errors
    /// When the medium fails.
    pub fn put(&self, blocks: &[BlockDigest]) -> Result<(), VolumeError> {
        let mut at = 0;
        let entries: Vec<(u64, [u8; ENTRY as usize])> =
            blocks.iter().filter_map(|b| Some((b.block, self.entry(b.block, b.stamp?, b.contents?)))).collect();
        while at < entries.len() {
            let first = entries[at].0;
            let run = (0_u64..).zip(&entries[at..]).take_while(|(i, (block, _))| *block == first + i).count();
            let bytes: Vec<u8> = entries[at..at + run].iter().flat_map(|(_, entry)| *entry).collect();
            self.medium.write(first * ENTRY, &bytes).map_err(io_error("write", Path::new("attested")))?;
            at += run;
        }
        Ok(())
    }
}

/// A holder of the volume: 0 is where the machine runs.
pub type Holder = usize;

/// What to ask every holder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ask {
    /// Digests of these extents.
    Extents(Vec<u64>),
    /// Digests of an extent's blocks.
    Blocks(u64),
}

/// What a holder answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// To [`Ask::Extents`], in that order; from another holder.
    Extents(Vec<ExtentDigest>),
    /// The same from here: what they are made of.
    Here(Vec<Looked>),
    /// To [`Ask::Blocks`].
    Blocks(Vec<BlockDigest>),
    /// It cannot be asked: it is left out from now on.
    Failed,
}

/// What a holder has of a block that is judged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Held {
    /// What was written.
    Right(Digest),
    /// Something else.
    Rotten(Digest),
    /// The disk cannot read it.
    Unreadable,
    /// Nobody can tell.
    Differs(Digest),
    /// An earlier or a later state of the block, or none: no rot.
    Other,
}

/// What settled which copy is right.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Settled {
    /// Its digest was written down when all agreed.
    Record,
    /// All that can be read are the same.
    Readable,
    /// Most are the same, and at least two.
    Majority,
    /// Nothing does.
    Nothing,
}

/// A block whose copies should be equal, and are not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The block.
    pub block: u64,
    /// The stamp of the copies that are compared.
    pub stamp: Stamp,
    /// Each holder's copy.
    pub copies: Vec<Held>,
    /// What settles which is right.
    pub settled: Settled,
}

impl Finding {
    /// Who can give the right contents, what they are, and who needs them. An operator's word counts only where nothing settles it.
    #[must_use]
    pub fn repair(&self, believed: Option<Holder>) -> Option<Repair> {
        let digest_of = |copy: &Held| match copy {
            Held::Right(d) | Held::Rotten(d) | Held::Differs(d) => Some(*d),
            Held::Unreadable | Held::Other => None,
        };
        let right = self.copies.iter().position(|c| matches!(c, Held::Right(_)));
        let giver = right.or_else(|| {
            let believed = believed?;
            let differs = matches!(self.copies.get(believed), Some(Held::Differs(_) | Held::Rotten(_)));
            (self.settled == Settled::Nothing && differs).then_some(believed)
        })?;
        let wanted = digest_of(&self.copies[giver])?;
        let takers = self.copies.iter().enumerate();
        let takers = takers
            .filter(|(_, c)| **c != Held::Other && digest_of(c) != Some(wanted))
            .map(|(holder, c)| (holder, digest_of(c)));
        Some(Repair { giver, digest: wanted, takers: takers.collect() })
    }
}

/// How a finding is repaired.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Repair {
    /// Who gives the right contents.
    pub giver: Holder,
    /// Their digest.
    pub digest: Digest,
    /// Who needs them, and what each has now.
    pub takers: Vec<(Holder, Option<Digest>)>,
}

/// Which copies of a block are right. `copies`: of the holders that have it with the same stamp, what each holds; none: unreadable.
fn judge(copies: &[(Holder, Option<Digest>)], record: Option<Digest>) -> (Option<Digest>, Settled) {
    let read: Vec<Digest> = copies.iter().filter_map(|(_, d)| *d).collect();
    if let Some(record) = record.filter(|record| read.contains(record)) {
        return (Some(record), Settled::Record);
    }
    let Some(first) = read.first() else { return (None, Settled::Nothing) };
    // With a record that none has, none is right: not even those that agree because a rotten block was copied.
    if record.is_some() {
        return (None, Settled::Nothing);
    }
    if read.len() < copies.len() && read.iter().all(|d| d == first) {
        return (Some(*first), Settled::Readable);
    }
    let most = read.iter().map(|d| (read.iter().filter(|o| *o == d).count(), *d)).max();
    match most {
        Some((count, digest)) if count >= 2 && 2 * count > copies.len() => (Some(digest), Settled::Majority),
        _ => (None, Settled::Nothing),
    }
}

/// Totals of a scrub.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Blocks that at least two holders have, and about which all of those agree.
    pub alike: u64,
    /// Blocks of here that no other holder has with the same stamp: lag. Without a record nothing is known of them.
    pub behind: u64,
    /// Blocks that could not be compared: they were written each time they were looked at, or their stamps prove nothing ([`Looked::unproven`]).
    pub unsettled: u64,
}

impl std::ops::AddAssign for Totals {
    fn add_assign(&mut self, other: Self) {
        self.alike += other.alike;
        self.behind += other.behind;
        self.unsettled += other.unsettled;
    }
}

/// An extent in which something differs.
#[derive(Debug)]
struct Differing {
    extent: u64,
    /// How often it was looked at.
    looks: u32,
    /// What was suspect the last time.
    suspected: BTreeMap<u64, Finding>,
    /// Those of here that could not be compared when it was asked for.
    unproven: Vec<u64>,
}

/// The machine that compares. It asks all holders the same, and judges what they answer.
#[derive(Debug)]
pub struct Scrub {
    left: VecDeque<u64>,
    blocks: VecDeque<Differing>,
    asked: Option<Ask>,
    answers: Vec<Option<Answer>>,
    out: BTreeSet<Holder>,
    /// By extent.
    totals: BTreeMap<u64, Totals>,
    agreed: Vec<BlockDigest>,
    findings: Vec<Finding>,
    #[cfg(test)]
    believes_at_once: bool,
}

/// What a block had to be, as far as somebody wrote it down.
pub type Record<'a> = &'a dyn Fn(u64, Stamp) -> Option<Digest>;

impl Scrub {
    /// Compares these extents at so many holders, this one included.
    #[must_use]
    pub fn new(extents: Vec<u64>, holders: usize) -> Self {
        Self {
            left: extents.into(),
            blocks: VecDeque::new(),
            asked: None,
            answers: vec![None; holders],
            out: BTreeSet::new(),
            totals: BTreeMap::new(),
            agreed: vec![],
            findings: vec![],
            #[cfg(test)]
            believes_at_once: false,
        }
    }

    /// What to ask every holder that is not out; nothing more, when all is compared. The same again until all have answered.
    pub fn poll(&mut self) -> Option<Ask> {
        if self.asked.is_none() {
            self.asked = match self.blocks.front() {
                Some(differing) => Some(Ask::Blocks(differing.extent)),
                None if self.left.is_empty() => None,
                None => Some(Ask::Extents(self.left.drain(..self.left.len().min(MOST_EXTENTS)).collect())),
            };
        }
        self.asked.clone()
    }

    /// Whether a holder is left out.
    #[must_use]
    pub fn is_out(&self, holder: Holder) -> bool {
        self.out.contains(&holder)
    }

    /// Does not ask a holder: before anything is asked.
    pub fn leave_out(&mut self, holder: Holder) {
        self.out.insert(holder);
    }

    /// A holder has answered. What makes no sense counts as no answer.
    pub fn answered(&mut self, holder: Holder, answer: Answer, record: Record<'_>) {
        let fits = match (&self.asked, &answer) {
            (Some(Ask::Extents(e)), Answer::Extents(a)) => a.len() == e.len() && holder != 0,
            (Some(Ask::Extents(e)), Answer::Here(a)) => a.len() == e.len() && holder == 0,
            (Some(Ask::Blocks(extent)), Answer::Blocks(blocks)) => {
                blocks.windows(2).all(|w| w[0].block < w[1].block) && blocks.iter().all(|b| b.block / EXTENT == *extent)
            }
            _ => false,
        };
        let Some(place) = self.answers.get_mut(holder) else { return };
        if fits {
            *place = Some(answer);
        } else {
            self.out.insert(holder);
        }
        let out = &self.out;
        if self.answers.iter().enumerate().any(|(h, a)| a.is_none() && !out.contains(&h)) {
            return;
        }
        let answers: Vec<Option<Answer>> = self.answers.iter_mut().map(Option::take).collect();
        match self.asked.take() {
            Some(Ask::Extents(extents)) => self.extents(&extents, answers, record),
            Some(Ask::Blocks(_)) => self.looked(answers, record),
            None => {}
        }
    }

    fn extents(&mut self, extents: &[u64], answers: Vec<Option<Answer>>, record: Record<'_>) {
        let mut answers = answers.into_iter();
        let Some(Some(Answer::Here(here))) = answers.next() else { return };
        let others: Vec<Vec<ExtentDigest>> =
            answers.filter_map(|a| if let Some(Answer::Extents(extents)) = a { Some(extents) } else { None }).collect();
        for (i, (extent, Looked { blocks, unproven })) in extents.iter().zip(here).enumerate() {
            let ours = ExtentDigest::of(&blocks);
            let alike = ours.contents.is_some()
                && blocks.iter().all(|b| b.stamp.is_some())
                && !others.is_empty()
                && others.iter().all(|o| o[i] == ours);
            // What all agree about may still not be what they agreed about before.
            let as_recorded =
                |b: &BlockDigest| b.stamp.and_then(|s| record(b.block, s)).is_none_or(|r| Some(r) == b.contents);
            if blocks.is_empty() || (alike && blocks.iter().all(as_recorded)) {
                let (alike, unsettled) = (blocks.len() as u64, unproven.len() as u64);
                *self.totals.entry(*extent).or_default() += Totals { alike, behind: 0, unsettled };
                self.agreed.extend(blocks);
            } else {
                self.blocks.push_back(Differing { extent: *extent, looks: 0, suspected: BTreeMap::new(), unproven });
            }
        }
    }

    fn looked(&mut self, answers: Vec<Option<Answer>>, record: Record<'_>) {
        let Some(at) = self.blocks.pop_front() else { return };
        let by_holder: Vec<BTreeMap<u64, BlockDigest>> = answers
            .into_iter()
            .map(|a| {
                if let Some(Answer::Blocks(b)) = a {
                    b.into_iter().map(|b| (b.block, b)).collect()
                } else {
                    BTreeMap::new()
                }
            })
            .collect();
        let blocks: BTreeSet<u64> = by_holder.iter().flat_map(|of| of.keys().copied()).collect();
        let (mut totals, mut agreed, mut suspects) = (Totals::default(), vec![], BTreeMap::new());
        // Those that are not counted as anything else.
        let mut unproven: BTreeSet<u64> = at.unproven.iter().copied().collect();
        for block in blocks {
            let copies: Vec<Option<BlockDigest>> = by_holder.iter().map(|of| of.get(&block).copied()).collect();
            let was_unproven = unproven.remove(&block);
            if copies.iter().flatten().any(|c| c.stamp.is_none()) {
                totals.unsettled += 1;
                continue;
            }
            // Those with the same stamp, the largest group of them first.
            let mut groups: BTreeMap<Stamp, Vec<(Holder, Option<Digest>)>> = BTreeMap::new();
            for (holder, copy) in copies.iter().enumerate() {
                if let Some(BlockDigest { stamp: Some(stamp), contents, .. }) = copy {
                    groups.entry(*stamp).or_default().push((holder, *contents));
                }
            }
            let Some((stamp, group)) = groups.into_iter().max_by_key(|(stamp, group)| (group.len(), *stamp)) else {
                continue;
            };
            let known = record(block, stamp);
            let same = group.iter().all(|(_, d)| d.is_some() && *d == group[0].1);
            if same && known.is_none_or(|known| Some(known) == group[0].1) {
                if group.len() > 1 {
                    totals.alike += 1;
                    agreed.push(BlockDigest { block, stamp: Some(stamp), contents: group[0].1 });
                } else if was_unproven && copies[0].is_none() {
                    // What another one has of it says nothing of what is here.
                    unproven.insert(block);
                } else {
                    totals.behind += 1;
                }
                continue;
            }
            let (right, settled) = judge(&group, known);
            let mut all = vec![Held::Other; copies.len()];
            for (holder, contents) in group {
                all[holder] = match (contents, right) {
                    (None, _) => Held::Unreadable,
                    (Some(d), Some(right)) if d == right => Held::Right(d),
                    (Some(d), Some(_)) => Held::Rotten(d),
                    // A record that nobody has: all of them are rotten, and what is right is lost.
                    (Some(d), None) if known.is_some() => Held::Rotten(d),
                    (Some(d), None) => Held::Differs(d),
                };
            }
            suspects.insert(block, Finding { block, stamp, copies: all, settled });
        }
        let looks = at.looks + 1;
        let confirmed = suspects.iter().all(|(block, finding)| at.suspected.get(block) == Some(finding));
        #[cfg(test)]
        let confirmed = confirmed || self.believes_at_once;
        if looks < LOOKS && (totals.unsettled > 0 || !confirmed) {
            self.blocks.push_front(Differing { looks, suspected: suspects, ..at });
            return;
        }
        for (block, finding) in suspects {
            #[cfg(test)]
            let at_once = self.believes_at_once;
            #[cfg(not(test))]
            let at_once = false;
            if at_once || at.suspected.get(&block) == Some(&finding) {
                self.findings.push(finding);
            } else {
                totals.unsettled += 1;
            }
        }
        totals.unsettled += unproven.len() as u64;
        *self.totals.entry(at.extent).or_default() += totals;
        self.agreed.extend(agreed);
    }

    /// The first extent that is not compared yet, between a question's last answer and the next question: for whoever has no more time.
    #[must_use]
    pub fn first_left(&self) -> Option<u64> {
        self.blocks.front().map(|differing| differing.extent).or_else(|| self.left.front().copied())
    }

    /// What has been compared so far.
    #[must_use]
    pub fn totals(&self) -> Totals {
        self.totals_before(u64::MAX)
    }

    /// The same, of the extents before this one.
    #[must_use]
    pub fn totals_before(&self, extent: u64) -> Totals {
        let mut all = Totals::default();
        self.totals.range(..extent).for_each(|(_, of)| all += *of);
        all
    }

    /// Blocks about which all agreed, since the last time: to be written down.
    pub fn agreed(&mut self) -> Vec<BlockDigest> {
        std::mem::take(&mut self.agreed)
    }

    /// What is rotten, since the last time.
    pub fn findings(&mut self) -> Vec<Finding> {
        std::mem::take(&mut self.findings)
    }
}

#[cfg(test)]
#[path = "scrub_tests.rs"]
pub(crate) mod tests;
