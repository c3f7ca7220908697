//! Pages of a guest's RAM that a destination keeps on its disk while they come in, so that a move that was cut short and
//! is tried again need not send them again; and, where it was wanted, of a guest that moved away, so that one that comes back need
//! bring only what it changed ([`Checkpoint::take`]). Nobody can start a guest from one: it has no device's state, and its key is with the guest.
//!
//! ```text
//!   first try    Decoder ---- every page ----> Checkpoint
//!   second try   Checkpoint -- Holding: a mark for each page that is kept --> Encoder
//!                Decoder <---- HELD: this page is as you keep it ------------ Encoder
//! ```
//!
//! # What can go wrong
//!
//! *Somebody reads the disk.* Every page is sealed (AES-256-GCM, bound to its place) under a key that only the VM's owner
//! keeps: the source says it again at each try, and forgets it when the VM has moved or does not want to any more. What is
//! left at the destination then is noise.
//!
//! *It dies in the middle of a write, or power is lost.* Nothing is ever made durable, no order is kept, and the pages of the last run are
//! still to be written: a page whose seal does not hold is not held. [`Checkpoint::holding`] opens every one before it says so.
//!
//! *A page rots between that and its use.* Then it does not open when it is named, the stream ends with
//! [`WireError::Checkpoint`](crate::WireError::Checkpoint), and whoever owns the checkpoint discards it. Were it opened and wrong, the
//! stream's digest would tell.
//!
//! *The disk is full.* No more is kept ([`Checkpoint::trouble`]); the move goes on. What the encoder sends in full it never
//! takes for held in the same stream.
//!
//! *Another guest of the same name, other RAM.* The table of RAM blocks is sealed as well; with another key or another table
//! all is dropped.

use crate::config::PageKey;
use crate::cursor::{Cursor, More};
use crate::format;
use crate::record::{Block, Layout, MAX_BLOCKS, PAGE_SIZE, PageBytes, Place, put_table};
use crate::witness::Witness;
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use rustix::fs::SeekFrom;
use std::fmt;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::{Mutex, PoisonError};

const TAG: usize = 16;
/// A sealed page: nonce, tag, content.
const SLOT: usize = NONCE_LEN + TAG + PAGE_SIZE;
/// Room for the sealed table, before the slots: 256 blocks with names of 255 bytes, and some.
const HEADER: u64 = 80 << 10;
/// What the table's seal is bound to; no page has that place.
const TABLE: u64 = u64::MAX;
/// Pages that one key seals in one stream, at most: with random nonces of 96 bits it stays far from where two could be equal
/// (2^32, NIST SP 800-38D).
const MOST_SEALS: u64 = 1 << 30;
/// Slots read at once.
const AT_ONCE: u64 = 64;
/// So many bytes are written between two looks at how much is free.
const LOOK_EVERY: u64 = 16 << 20;
/// Threads that look at what is kept, and the pages that one of them looks at before it asks whether that is still wanted.
const LOOKERS: usize = 4;
const PIECE: usize = 4096;
/// Neighbouring slots written at once, at most: pages come in the order of their places for the most part, and a call for each is dearer
/// than its sealing.
const RUN: usize = 16;

/// The key of a VM's checkpoints. Whoever owns the VM makes it, keeps it, and says it to the destination for a try.
#[derive(Clone, PartialEq, Eq)]
pub struct CheckpointKey(pub [u8; 32]);

impl CheckpointKey {
    /// From the kernel's generator.
    ///
    /// # Panics
    /// On a machine without one.
    #[must_use]
    pub fn random() -> Self {
        Self(PageKey::random().0)
    }

    /// The key of the marks by which both ends know a page.
    #[must_use]
    pub fn marks(&self) -> PageKey {
        PageKey(blake3::derive_key("godwit 2026 marks of pages in a checkpoint", &self.0))
    }

    fn seal(&self) -> LessSafeKey {
        let key = blake3::derive_key("godwit 2026 seals of pages in a checkpoint", &self.0);
        LessSafeKey::new(UnboundKey::new(&AES_256_GCM, &key).expect("AES-256 has keys of 32 bytes"))
    }
}

/// A key is not for logs.
impl fmt::Debug for CheckpointKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CheckpointKey(..)")
    }
}

/// A page's mark: the front of its keyed BLAKE3 hash. 0 is none.
///
/// 64 bits are enough: a page taken for another is found by the stream's digest, and nobody in the guest can make two of one
/// mark, because the key is not theirs. It would cost a second try, by a chance of 2^-64 a page.
pub(crate) type Mark = u64;

pub(crate) fn mark(key: &PageKey, content: &PageBytes) -> Mark {
    let hash = blake3::keyed_hash(&key.0, content);
    u64::from_le_bytes(*hash.as_bytes().first_chunk().expect("a hash has 32 bytes"))
}

/// The destination's side: sealed pages in a file.
#[derive(Debug)]
pub struct Checkpoint {
    file: File,
    seal: LessSafeKey,
    marks: PageKey,
    blocks: Vec<Block>,
    /// Each block's first slot.
    firsts: Vec<u64>,
    sealed: u64,
    /// What the disk is to have free, and how much was written since that was looked at.
    floor: u64,
    unlooked: u64,
    trouble: Option<io::Error>,
    slot: Vec<u8>,
    run: Run,
    nonces: Nonces,
}

/// Slots one after another that are still to be written.
#[derive(Debug, Default)]
struct Run {
    /// Where the first one belongs in the file.
    at: u64,
    slots: Vec<u8>,
}

impl Run {
    /// Whether a slot that belongs there is the next one of it.
    fn takes(&self, offset: u64) -> bool {
        self.slots.len() < RUN * SLOT && offset == self.at + self.slots.len() as u64
    }
}

/// Nonces from the kernel's generator, which is asked for many at once.
#[derive(Debug)]
struct Nonces {
    drawn: [u8; NONCE_LEN * 64],
    used: usize,
}

impl Nonces {
    const fn new() -> Self {
        let drawn = [0; NONCE_LEN * 64];
        Self { used: drawn.len(), drawn }
    }

    /// One that was never given before.
    fn next(&mut self) -> io::Result<[u8; NONCE_LEN]> {
        if self.used == self.drawn.len() {
            getrandom::fill(&mut self.drawn).map_err(|e| io::Error::other(e.to_string()))?;
            self.used = 0;
        }
        let nonce = self.drawn[self.used..].first_chunk().expect("the block is of whole nonces");
        self.used += NONCE_LEN;
        Ok(*nonce)
    }
}

impl Checkpoint {
    /// Opens what is kept in a file, which nobody else uses; makes it if there is none. What was kept under another key is dropped.
    ///
    /// # Errors
    /// When the file cannot be opened, read or emptied.
    pub fn open(path: &Path, key: &CheckpointKey) -> io::Result<Self> {
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create(true).truncate(false).mode(0o600).open(path)?;
        let mut this = Self {
            file,
            seal: key.seal(),
            marks: key.marks(),
            blocks: vec![],
            firsts: vec![],
            sealed: 0,
            floor: 0,
            unlooked: 0,
            trouble: None,
            slot: vec![0; SLOT],
            run: Run::default(),
            nonces: Nonces::new(),
        };
        match this.read_table()? {
            Some(blocks) => this.lay_out(blocks),
            None => this.file.set_len(0)?,
        }
        Ok(this)
    }

    /// Nothing more is kept once the file's disk has less than `floor` bytes free ([`io::ErrorKind::QuotaExceeded`]): others need room as
    /// well, and may have seen the same.
    #[must_use]
    pub const fn leaving(mut self, floor: u64) -> Self {
        self.floor = floor;
        self
    }

    /// Nothing more is kept; what is can be read.
    #[must_use]
    pub fn read_only(mut self, why: io::Error) -> Self {
        self.note(Err(why));
        self
    }

    /// Why no more is kept, if that is so.
    #[must_use]
    pub fn trouble(&self) -> Option<&io::Error> {
        self.trouble.as_ref()
    }

    /// Looks at every page that is kept, and tells those whose seals hold. Reads the whole file, by [`LOOKERS`] at once: a second for a few
    /// gigabytes, if the disk can. `None`: the answer is not `wanted` any more, which is asked every 16 MiB.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn holding(&mut self, wanted: &(dyn Fn() -> bool + Sync)) -> io::Result<Option<Holding>> {
        self.write_run();
        let this = &*self;
        let mut marks: Vec<Vec<Mark>> = this.blocks.iter().map(|b| vec![0; b.pages as usize]).collect();
        let mut pieces = vec![];
        for (block, marks) in marks.iter_mut().enumerate() {
            pieces.extend((0..).step_by(PIECE).zip(marks.chunks_mut(PIECE)).map(|(page, marks)| (block, page, marks)));
        }
        let left = Mutex::new(pieces);
        let look = || {
            let mut buffer = vec![0; AT_ONCE as usize * SLOT];
            while wanted() {
                let next = left.lock().unwrap_or_else(PoisonError::into_inner).pop();
                let Some((block, page, marks)) = next else { return Ok(true) };
                this.look(Place { block, page }, marks, &mut buffer)?;
            }
            io::Result::Ok(false)
        };
        let all = std::thread::scope(|scope| {
            let lookers: Vec<_> = (0..LOOKERS).map(|_| scope.spawn(look)).collect();
            lookers
                .into_iter()
                .try_fold(true, |all, looker| Ok::<_, io::Error>(looker.join().expect("no look panics")? && all))
        })?;
        drop(left);
        Ok(all.then(|| Holding { blocks: self.blocks.clone(), marks }))
    }

    /// The marks of the pages from this one on.
    fn look(&self, from: Place, marks: &mut [Mark], buffer: &mut [u8]) -> io::Result<()> {
        let (mut at, pages) = (0, marks.len() as u64);
        loop {
            at = at.max(self.data_from(from.block, from.page + at)?.saturating_sub(from.page));
            let count = AT_ONCE.min(pages.saturating_sub(at));
            if count == 0 {
                return Ok(());
            }
            let bytes = &mut buffer[..count as usize * SLOT];
            // What lies behind the end of the file was never kept.
            let n = read_up_to(&self.file, bytes, self.offset(Place { page: from.page + at, ..from }))?;
            for (i, slot) in bytes[..n].chunks_exact_mut(SLOT).enumerate() {
                let place = Place { page: from.page + at + i as u64, ..from };
                if let Some(content) = self.unseal(place, slot) {
                    marks[at as usize + i] = mark(&self.marks, content);
                }
            }
            at += count;
        }
    }

    /// Keeps all of a guest's RAM as it stands still, for when it comes back: a stream of the guest's had this layout. How many pages; zeroes
    /// are not kept, and nor is anything that could be started: no device's state. Once it is not `wanted` any more it ends with
    /// [`io::ErrorKind::Interrupted`], and what is there by then is kept.
    ///
    /// # Errors
    /// When RAM cannot be read, or the file not be written: then there is no checkpoint.
    pub fn take(&mut self, layout: &Layout, ram: &Witness, wanted: &dyn Fn() -> bool) -> io::Result<u64> {
        let Some(block) = layout.0.iter().position(|block| ram.is_of(&block.name)) else {
            return Err(io::Error::new(
                io::ErrorKind::NotFound,
                format!("the guest has no RAM block `{}`", ram.block()),
            ));
        };
        // Laid out anew: what an earlier stream left here is older than what is kept now.
        self.lay_out(vec![]);
        self.begin(&layout.0);
        let mut kept = 0;
        ram.each(layout.0[block].pages, |page, content| {
            if content.iter().any(|byte| *byte != 0) {
                self.keep(Place { block, page }, content);
                kept += 1;
            }
            if !wanted() {
                self.write_run();
                return Err(io::ErrorKind::Interrupted.into());
            }
            self.trouble.take().map_or(Ok(()), Err)
        })?;
        self.write_run();
        self.trouble.take().map_or(Ok(kept), Err)
    }

    /// A stream with these blocks begins: what is kept of others is dropped.
    pub(crate) fn begin(&mut self, blocks: &[Block]) {
        if self.blocks == blocks {
            return;
        }
        self.lay_out(blocks.to_vec());
        self.run.slots.clear();
        let mut table = vec![];
        put_table(&mut table, blocks);
        let result = self.seal_bytes(TABLE, &mut table).and_then(|sealed| {
            let mut header = sealed.to_vec();
            header.extend_from_slice(&(table.len() as u32).to_le_bytes());
            header.extend_from_slice(&table);
            self.file.set_len(0)?;
            self.file.write_all_at(&header, 0)
        });
        self.note(result);
    }

    /// Keeps a page. It is in the file when its run is written: when one comes that is not its neighbour, or something is read, or at the end.
    pub(crate) fn keep(&mut self, place: Place, content: &PageBytes) {
        if self.trouble.is_some() {
            return;
        }
        let offset = self.offset(place);
        if !self.run.takes(offset) {
            self.write_run();
            self.run.at = offset;
        }
        let mut slots = std::mem::take(&mut self.run.slots);
        let slot = slots.len();
        slots.resize(slot + NONCE_LEN + TAG, 0);
        slots.extend_from_slice(content);
        let sealed = self.seal_bytes(self.number(place), &mut slots[slot + NONCE_LEN + TAG..]);
        match sealed {
            Ok(sealed) => slots[slot..][..sealed.len()].copy_from_slice(&sealed),
            Err(_) => slots.truncate(slot),
        }
        self.run.slots = slots;
        self.note(sealed.map(drop));
    }

    fn write_run(&mut self) {
        if self.run.slots.is_empty() {
            return;
        }
        let written = self.file.write_all_at(&self.run.slots, self.run.at);
        self.unlooked += self.run.slots.len() as u64;
        self.run.slots.clear();
        self.note(written);
        if self.floor > 0 && self.unlooked >= LOOK_EVERY {
            self.unlooked = 0;
            let free = rustix::fs::fstatvfs(&self.file).map_or(0, |s| s.f_bavail.saturating_mul(s.f_frsize));
            if free < self.floor {
                self.note(Err(io::ErrorKind::QuotaExceeded.into()));
            }
        }
    }

    /// A page that is kept; `None` if its seal does not hold.
    pub(crate) fn page(&mut self, place: Place) -> io::Result<Option<PageBytes>> {
        self.write_run();
        let mut slot = std::mem::take(&mut self.slot);
        let result = read_up_to(&self.file, &mut slot, self.offset(place));
        let content = match result {
            Ok(SLOT) => self.unseal(place, &mut slot).copied(),
            _ => None,
        };
        self.slot = slot;
        result.map(|_| content)
    }

    fn note(&mut self, result: io::Result<()>) {
        if let Err(error) = result {
            self.trouble.get_or_insert(error);
        }
    }

    fn lay_out(&mut self, blocks: Vec<Block>) {
        self.firsts = blocks
            .iter()
            .scan(0, |next, block| {
                let first = *next;
                *next += block.pages;
                Some(first)
            })
            .collect();
        self.blocks = blocks;
    }

    fn number(&self, place: Place) -> u64 {
        self.firsts[place.block] + place.page
    }

    fn offset(&self, place: Place) -> u64 {
        HEADER + self.number(place) * SLOT as u64
    }

    /// The first page from this one on whose slot is not in a hole of the file.
    fn data_from(&self, block: usize, page: u64) -> io::Result<u64> {
        let at = self.offset(Place { block, page });
        match rustix::fs::seek(&self.file, SeekFrom::Data(at)) {
            Ok(data) => Ok(page + (data - at) / SLOT as u64),
            Err(rustix::io::Errno::NXIO) => Ok(self.blocks[block].pages),
            Err(e) => Err(e.into()),
        }
    }

    fn read_table(&self) -> io::Result<Option<Vec<Block>>> {
        let mut header = vec![0; HEADER as usize];
        let n = read_up_to(&self.file, &mut header, 0)?;
        header.truncate(n);
        let Some((sealed, rest)) = header.split_at_mut_checked(NONCE_LEN + TAG) else { return Ok(None) };
        let Some((length, rest)) = rest.split_first_chunk_mut::<4>() else { return Ok(None) };
        let Some(table) = rest.get_mut(..u32::from_le_bytes(*length) as usize) else { return Ok(None) };
        if !self.opens(TABLE, sealed, table) {
            return Ok(None);
        }
        Ok(table_of(&mut Cursor::new(table), u64::MAX).ok().flatten())
    }

    /// Encrypts in place; nonce and tag.
    fn seal_bytes(&mut self, number: u64, content: &mut [u8]) -> io::Result<[u8; NONCE_LEN + TAG]> {
        self.sealed += 1;
        if self.sealed > MOST_SEALS {
            return Err(io::Error::other("its key has sealed as many pages as a key may"));
        }
        let mut sealed = [0; NONCE_LEN + TAG];
        let (nonce, tag) = sealed.split_first_chunk_mut::<NONCE_LEN>().expect("it is longer than a nonce");
        *nonce = self.nonces.next()?;
        let aad = Aad::from(number.to_le_bytes());
        let made = self.seal.seal_in_place_separate_tag(Nonce::assume_unique_for_key(*nonce), aad, content);
        tag.copy_from_slice(made.map_err(|_| io::Error::other("a page cannot be sealed"))?.as_ref());
        Ok(sealed)
    }

    fn opens(&self, number: u64, sealed: &[u8], content: &mut [u8]) -> bool {
        let (Some(nonce), Some(tag)) = (sealed.first_chunk::<NONCE_LEN>(), sealed.last_chunk::<TAG>()) else {
            return false;
        };
        let aad = Aad::from(number.to_le_bytes());
        let nonce = Nonce::assume_unique_for_key(*nonce);
        // The never written are zeroes, and need no trial.
        tag != &[0; TAG] && self.seal.open_in_place_separate_tag(nonce, aad, (*tag).into(), content, 0..).is_ok()
    }

    fn unseal<'a>(&self, place: Place, slot: &'a mut [u8]) -> Option<&'a PageBytes> {
        let (sealed, content) = slot.split_at_mut(NONCE_LEN + TAG);
        self.opens(self.number(place), sealed, content).then(|| content.first_chunk())?
    }
}

impl Drop for Checkpoint {
    fn drop(&mut self) {
        self.write_run();
    }
}

/// Reads until the buffer is full or the file ends.
fn read_up_to(file: &File, mut into: &mut [u8], mut at: u64) -> io::Result<usize> {
    let whole = into.len();
    while !into.is_empty() {
        match file.read_at(into, at) {
            Ok(0) => break,
            Ok(n) => {
                into = &mut into[n..];
                at += n as u64;
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(whole - into.len())
}

/// What a destination has kept of an earlier try: for every page its mark.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Holding {
    blocks: Vec<Block>,
    marks: Vec<Vec<Mark>>,
}

/// What a peer says it holds makes no sense.
#[derive(Debug, thiserror::Error)]
#[error("the destination says of the pages that it has kept what makes no sense: {0}")]
pub struct HoldingError(&'static str);

impl Holding {
    /// Its longest form for a guest with this much RAM, in bytes.
    #[must_use]
    pub const fn longest(ram: u64) -> u64 {
        HEADER + ram / PAGE_SIZE as u64 * 24
    }

    /// Pages.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.marks.iter().flatten().filter(|m| **m != 0).count() as u64
    }

    /// For the wire: the table, then runs of pages: distance from the end of the last, length, marks.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut out = vec![];
        put_table(&mut out, &self.blocks);
        for marks in &self.marks {
            let mut rest = &marks[..];
            while let Some(gap) = rest.iter().position(|m| *m != 0) {
                rest = &rest[gap..];
                let run = rest.iter().position(|m| *m == 0).unwrap_or(rest.len());
                format::put(&mut out, run as u64);
                format::put(&mut out, gap as u64);
                rest[..run].iter().for_each(|m| out.extend_from_slice(&m.to_le_bytes()));
                rest = &rest[run..];
            }
            format::put(&mut out, 0);
        }
        out
    }

    /// From the wire; `max_ram` bounds what is believed.
    ///
    /// # Errors
    /// When it makes no sense.
    pub fn decode(bytes: &[u8], max_ram: u64) -> Result<Self, HoldingError> {
        let mut c = Cursor::new(bytes);
        let this = Self::read(&mut c, max_ram).map_err(|More| HoldingError("it ends in the middle"))?;
        this.ok_or(HoldingError("pages that no guest has")).and_then(|this| {
            if c.at() == bytes.len() { Ok(this) } else { Err(HoldingError("it goes on behind its end")) }
        })
    }

    fn read(c: &mut Cursor<'_>, max_ram: u64) -> Result<Option<Self>, More> {
        let Some(blocks) = table_of(c, max_ram)? else { return Ok(None) };
        let mut marks = Vec::with_capacity(blocks.len());
        for block in &blocks {
            let mut of_block = vec![0; block.pages as usize];
            let mut at = 0u64;
            loop {
                let Some(run) = format::get(c)? else { return Ok(None) };
                if run == 0 {
                    break;
                }
                let Some(gap) = format::get(c)? else { return Ok(None) };
                let Some(from) = at.checked_add(gap) else { return Ok(None) };
                let Some(end) = from.checked_add(run).filter(|end| *end <= block.pages) else { return Ok(None) };
                for mark in &mut of_block[from as usize..end as usize] {
                    *mark = u64::from_le_bytes(*c.array()?);
                }
                at = end;
            }
            marks.push(of_block);
        }
        Ok(Some(Self { blocks, marks }))
    }

    /// The marks, if they are of these blocks.
    pub(crate) fn of(self, blocks: &[Block]) -> Option<Vec<Vec<Mark>>> {
        (self.blocks == blocks).then_some(self.marks)
    }
}

/// A table as [`put_table`] writes it; `None` if it is longer than any, or has more RAM than is believed.
fn table_of(c: &mut Cursor<'_>, max_ram: u64) -> Result<Option<Vec<Block>>, More> {
    let Some(count) = format::get(c)?.filter(|n| *n <= MAX_BLOCKS as u64) else { return Ok(None) };
    let most = max_ram.div_ceil(PAGE_SIZE as u64).saturating_add(count);
    let (mut blocks, mut sum) = (Vec::with_capacity(count as usize), 0u64);
    for _ in 0..count {
        let name = c.counted()?.to_vec();
        let Some(pages) = format::get(c)? else { return Ok(None) };
        sum = sum.saturating_add(pages);
        if sum > most {
            return Ok(None);
        }
        blocks.push(Block { name, pages });
    }
    Ok(Some(blocks))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::{BTreeMap, BTreeSet};

    fn content(n: u64) -> PageBytes {
        let mut content = [0; PAGE_SIZE];
        content.chunks_exact_mut(8).for_each(|word| word.copy_from_slice(&n.to_le_bytes()));
        content
    }

    #[test]
    fn what_was_kept_last_is_there_in_whatever_order_it_came_and_whoever_reads_it() {
        let folder = tempfile::tempdir().unwrap();
        let (path, key) = (folder.path().join("checkpoint"), CheckpointKey::random());
        let blocks = [Block { name: b"a".to_vec(), pages: 40 }, Block { name: b"b".to_vec(), pages: 100 }];
        let mut checkpoint = Checkpoint::open(&path, &key).unwrap();
        checkpoint.begin(&blocks);
        // Longer than a run, across the end of a block, one twice, backwards, and by leaps.
        let places = (0..40).map(|page| (0, page)).chain([(1, 0), (1, 1), (0, 39), (0, 39), (0, 38)]);
        let places = places.chain((50..60).map(|page| (1, page))).chain([(1, 99), (1, 51), (1, 98), (1, 60)]);
        let mut last = BTreeMap::new();
        for (n, (block, page)) in (1..).zip(places) {
            checkpoint.keep(Place { block, page }, &content(n));
            last.insert((block, page), n);
            if n % 7 == 0 {
                assert_eq!(checkpoint.page(Place { block, page }).unwrap(), Some(content(n)), "{block} {page}");
            }
        }
        let pages = |checkpoint: &mut Checkpoint| checkpoint.holding(&|| true).unwrap().unwrap().pages();
        assert_eq!(pages(&mut checkpoint), last.len() as u64);
        assert_eq!(checkpoint.holding(&|| false).unwrap(), None);
        checkpoint.keep(Place { block: 1, page: 70 }, &content(1000));
        last.insert((1, 70), 1000);
        drop(checkpoint);
        let mut checkpoint = Checkpoint::open(&path, &key).unwrap();
        assert_eq!(pages(&mut checkpoint), last.len() as u64);
        for ((block, page), n) in last {
            assert_eq!(checkpoint.page(Place { block, page }).unwrap(), Some(content(n)), "{block} {page}");
        }
        assert_eq!(checkpoint.page(Place { block: 1, page: 80 }).unwrap(), None);
        assert!(checkpoint.trouble().is_none());
    }

    #[test]
    fn no_nonce_is_used_twice() {
        let mut nonces = Nonces::new();
        let drawn: BTreeSet<_> = (0..1000).map(|_| nonces.next().unwrap()).collect();
        assert_eq!(drawn.len(), 1000);
    }

    #[test]
    fn nothing_more_is_kept_once_the_disk_has_less_free_than_others_need() {
        let folder = tempfile::tempdir().unwrap();
        let pages = LOOK_EVERY / SLOT as u64 + 100;
        for (floor, kept) in [(1, true), (u64::MAX, false)] {
            let path = folder.path().join(floor.to_string());
            let mut checkpoint = Checkpoint::open(&path, &CheckpointKey::random()).unwrap().leaving(floor);
            checkpoint.begin(&[Block { name: b"a".to_vec(), pages }]);
            (0..pages).for_each(|page| checkpoint.keep(Place { block: 0, page }, &content(1)));
            assert_eq!(checkpoint.trouble().is_none(), kept);
            // What is there already is of use.
            assert!(checkpoint.page(Place { block: 0, page: 0 }).unwrap().is_some());
        }
    }
}
