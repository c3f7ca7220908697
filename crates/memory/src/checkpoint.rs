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
//! *The disk is slower than the link.* A node's decoder waits for no write: what is to be kept goes through a queue of [`QUEUE`] bytes to a thread
//! that seals and writes it ([`CheckpointWriter`]). Where that is full no more is kept, as with a full disk. And where the guest stands nothing is,
//! and what is queued is dropped ([`Checkpoint::rest`]): its pause is not to share the disk with what is of no use once it has come.
//!
//! *It costs more than it is worth.* To seal and write what comes takes a seventh of a move over a fast link whose hosts' processors are busy, and most
//! moves are not cut short. So nothing is kept of a stream's beginning ([`Checkpoint::later`]) until the stream has gone on for a while
//! ([`Decoder::keep_now`](crate::Decoder::keep_now)) or breaks off: then the pages that came are read out of the incoming guest's RAM. What is there may
//! be older than what came, or half of it, where QEMU has yet to read that; then the next try finds that the guest has another page.
//!
//! *A page is named that is queued, or was not kept.* The encoder names only what was in the file when the stream began, and nothing of which it
//! has sent other contents since. So the slots that it names are none that this stream writes: reading one waits for no write. And a page that was
//! not kept leaves in its slot what lay there, under its own seal: the next try tells the mark of just that, and it is named only if the guest has
//! it again.
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
use std::collections::VecDeque;
use std::fmt;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

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
/// Bytes that wait for the thread that writes them, at most: a quarter of a second of a link of 1000 Mbit/s, as the kernel lets one who writes too
/// much wait for a fifth of one.
const QUEUE: usize = 32 << 20;
/// So many bytes are to be there before it is woken: not for each run.
const WAKE: usize = 256 << 10;
/// What of a stream's beginning is still read out of RAM, at most, once the stream has broken off: who tries again waits for it.
const LEFT: u64 = 256 << 20;

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
    file: Arc<File>,
    seal: LessSafeKey,
    marks: PageKey,
    blocks: Vec<Block>,
    /// Each block's first slot.
    firsts: Vec<u64>,
    to: To,
    trouble: Option<io::Error>,
    /// The guest stands: nothing more is kept.
    rests: bool,
    /// What comes of RAM now is kept later.
    later: Option<Later>,
    slot: Vec<u8>,
    run: Run,
}

/// Who seals pages and writes them.
#[derive(Debug)]
enum To {
    /// Whoever keeps them.
    Here(Box<Sealer>),
    /// Another thread.
    Beside(Arc<Queue>),
}

/// A guest's RAM, of which what has come is not kept yet.
#[derive(Debug)]
struct Later {
    ram: Witness,
    /// Which block of the stream it is; none before one has begun.
    block: Option<usize>,
    came: Came,
}

/// Pages of a block that came: a bit each.
#[derive(Debug, Default)]
struct Came(Vec<u64>);

impl Came {
    fn of(pages: u64) -> Self {
        Self(vec![0; usize::try_from(pages.div_ceil(64)).unwrap_or(0)])
    }

    fn add(&mut self, page: u64) {
        if let Some(word) = usize::try_from(page / 64).ok().and_then(|at| self.0.get_mut(at)) {
            *word |= 1 << (page % 64);
        }
    }

    /// Takes out up to 64 pages that are near each other, from this word on; none when there are no more.
    fn take(&mut self, from: &mut usize) -> Option<(u64, u64)> {
        let rest = self.0.get_mut(*from..)?;
        let skipped = rest.iter().position(|word| *word != 0)?;
        let word = std::mem::take(&mut rest[skipped]);
        *from += skipped;
        Some((*from as u64 * 64, word))
    }
}

/// Pages that came before they were kept, to be read where the guest has them.
#[derive(Debug)]
struct Earlier {
    ram: Witness,
    /// The slot of the block's first page.
    first: u64,
    came: Came,
    /// Where to go on.
    at: usize,
}

/// Slots one after another that are still to be sealed and written.
#[derive(Debug, Default)]
struct Run {
    /// The number of the first one.
    first: u64,
    slots: Vec<u8>,
}

impl Run {
    /// Whether the slot of this number is the next one of it.
    fn takes(&self, number: u64) -> bool {
        self.slots.len() < RUN * SLOT && number == self.first + (self.slots.len() / SLOT) as u64
    }

    fn add(&mut self, content: &PageBytes) {
        let slot = self.slots.len();
        self.slots.resize(slot + NONCE_LEN + TAG, 0);
        self.slots.extend_from_slice(content);
    }
}

/// What is to be written.
#[derive(Debug)]
enum Piece {
    /// The table of a stream's blocks: what was kept of others goes.
    Table(Vec<u8>),
    /// Pages.
    Pages(Run),
    /// Pages that came before. They are written while nothing else is to be.
    Earlier(Box<Earlier>),
}

impl Piece {
    fn bytes(&self) -> usize {
        match self {
            Self::Table(table) => table.len(),
            Self::Pages(run) => run.slots.len(),
            // They are in the guest's RAM.
            Self::Earlier(_) => 0,
        }
    }
}

/// Seals and writes.
#[derive(Debug)]
struct Sealer {
    file: Arc<File>,
    seal: LessSafeKey,
    nonces: Nonces,
    sealed: u64,
    /// What the disk is to have free, and how much was written since that was looked at.
    floor: u64,
    unlooked: u64,
}

impl Sealer {
    fn write(&mut self, piece: &mut Piece) -> io::Result<()> {
        match piece {
            Piece::Table(table) => self.table(table),
            Piece::Pages(run) => self.pages(run),
            Piece::Earlier(earlier) => {
                while self.some(earlier)?.is_some() {}
                Ok(())
            }
        }
    }

    /// Some of the pages that came before, as they are now, and how many bytes that were; none: there are no more. Zeroes are not kept.
    fn some(&mut self, Earlier { ram, first, came, at }: &mut Earlier) -> io::Result<Option<u64>> {
        let Some((from, bits)) = came.take(at) else { return Ok(None) };
        let (mut run, mut page, mut bytes) = (Run::default(), [0; PAGE_SIZE], 0);
        for number in (0..64).filter(|bit| bits & (1 << bit) != 0).map(|bit| from + bit) {
            ram.read(number, &mut page)?;
            if page.iter().all(|byte| *byte == 0) {
                continue;
            }
            if !run.takes(*first + number) {
                self.pages(&mut run)?;
                run = Run { first: *first + number, slots: vec![] };
            }
            run.add(&page);
            bytes += SLOT as u64;
        }
        self.pages(&mut run)?;
        Ok(Some(bytes))
    }

    fn table(&mut self, table: &mut [u8]) -> io::Result<()> {
        let mut header = self.seal_bytes(TABLE, table)?.to_vec();
        header.extend_from_slice(&(table.len() as u32).to_le_bytes());
        header.extend_from_slice(table);
        self.file.set_len(0)?;
        self.file.write_all_at(&header, 0)
    }

    /// Nothing of a run is written unless all of it could be sealed.
    fn pages(&mut self, run: &mut Run) -> io::Result<()> {
        for (number, slot) in (run.first..).zip(run.slots.chunks_exact_mut(SLOT)) {
            let (sealed, content) = slot.split_at_mut(NONCE_LEN + TAG);
            sealed.copy_from_slice(&self.seal_bytes(number, content)?);
        }
        self.file.write_all_at(&run.slots, slot_at(run.first))?;
        self.unlooked += run.slots.len() as u64;
        if self.floor > 0 && self.unlooked >= LOOK_EVERY {
            self.unlooked = 0;
            let free = rustix::fs::fstatvfs(&*self.file).map_or(0, |s| s.f_bavail.saturating_mul(s.f_frsize));
            if free < self.floor {
                return Err(io::ErrorKind::QuotaExceeded.into());
            }
        }
        Ok(())
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
}

/// Pages on their way to the thread that writes them.
#[derive(Debug, Default)]
struct Queue {
    queued: Mutex<Queued>,
    come: Condvar,
}

#[derive(Debug, Default)]
struct Queued {
    pieces: VecDeque<Piece>,
    /// Of the pieces, and of the one that is being written.
    bytes: usize,
    /// Whether the writer waits for more.
    waits: bool,
    /// Nobody wants what came before.
    dropped: bool,
    /// Nothing more comes, or nothing more is taken.
    ended: bool,
    /// Why that is so, until somebody has heard of it.
    trouble: Option<io::Error>,
}

impl Queue {
    fn queued(&self) -> MutexGuard<'_, Queued> {
        self.queued.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Never waits for the disk.
    fn push(&self, piece: Piece) -> io::Result<()> {
        let mut queued = self.queued();
        if queued.ended {
            return Err(queued.trouble.take().unwrap_or_else(|| io::ErrorKind::BrokenPipe.into()));
        }
        let bytes = queued.bytes + piece.bytes();
        if bytes > QUEUE {
            return Err(io::Error::other("the disk takes less than comes"));
        }
        queued.bytes = bytes;
        queued.pieces.push_back(piece);
        if queued.waits && bytes >= WAKE {
            queued.waits = false;
            self.come.notify_one();
        }
        Ok(())
    }

    /// What is to be written next, once so much is written of what was taken before. Where there is nothing somebody who has `else_to_do` does not
    /// wait for it.
    fn take(&self, written: usize, else_to_do: bool) -> Next {
        let mut queued = self.queued();
        queued.bytes -= written;
        loop {
            if let Some(piece) = queued.pieces.pop_front() {
                return Next::Piece(piece);
            }
            if else_to_do && !queued.dropped {
                return Next::Else { ended: queued.ended };
            }
            if queued.ended {
                return Next::Nothing;
            }
            queued.waits = true;
            queued = self.come.wait(queued).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Nothing more comes: what is there is still written.
    fn end(&self) {
        self.queued().ended = true;
        self.come.notify_one();
    }

    /// Nobody wants what is there.
    fn drop_all(&self) {
        let mut queued = self.queued();
        let dropped: usize = queued.pieces.drain(..).map(|piece| piece.bytes()).sum();
        queued.bytes -= dropped;
        queued.dropped = true;
    }
}

/// What is to be done next by whoever writes.
enum Next {
    Piece(Piece),
    /// What came before. Whether nothing more comes.
    Else {
        ended: bool,
    },
    /// There is no more.
    Nothing,
}

/// Seals and writes what a [`Decoder`](crate::Decoder) keeps, on a thread of its own. Nothing is kept unless it runs.
#[derive(Debug)]
#[must_use]
pub struct CheckpointWriter {
    sealer: Box<Sealer>,
    queue: Arc<Queue>,
}

impl CheckpointWriter {
    /// Until the decoder is dropped and what it has kept is written, or that fails, which the decoder hears of. Who reads the file or removes it
    /// waits for this first.
    pub fn run(mut self) {
        let (mut written, mut earlier, mut left) = (0, None::<Box<Earlier>>, LEFT);
        loop {
            let next = self.queue.take(std::mem::take(&mut written), earlier.is_some());
            let done = match (next, &mut earlier) {
                (Next::Piece(Piece::Earlier(pages)), _) => {
                    earlier = Some(pages);
                    Ok(())
                }
                (Next::Piece(mut piece), _) => {
                    written = piece.bytes();
                    self.sealer.write(&mut piece)
                }
                (Next::Else { ended }, Some(pages)) if left > 0 => self.sealer.some(pages).map(|some| match some {
                    Some(bytes) if ended => left = left.saturating_sub(bytes),
                    Some(_) => {}
                    None => earlier = None,
                }),
                (Next::Else { .. } | Next::Nothing, _) => return,
            };
            if let Err(error) = done {
                self.queue.queued().trouble = Some(error);
                return;
            }
        }
    }
}

/// Also of one that never ran, or panicked.
impl Drop for CheckpointWriter {
    fn drop(&mut self) {
        self.queue.end();
        self.queue.drop_all();
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
        let (file, seal) = (Arc::new(file), key.seal());
        let sealer =
            Sealer { file: file.clone(), seal: seal.clone(), nonces: Nonces::new(), sealed: 0, floor: 0, unlooked: 0 };
        let mut this = Self {
            file,
            seal,
            marks: key.marks(),
            blocks: vec![],
            firsts: vec![],
            to: To::Here(Box::new(sealer)),
            trouble: None,
            rests: false,
            later: None,
            slot: vec![0; SLOT],
            run: Run::default(),
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
    pub fn leaving(mut self, floor: u64) -> Self {
        if let To::Here(sealer) = &mut self.to {
            sealer.floor = floor;
        }
        self
    }

    /// Nothing more is kept; what is can be read.
    #[must_use]
    pub fn read_only(mut self, why: io::Error) -> Self {
        self.note(Err(why));
        self
    }

    /// What comes of this RAM of the incoming guest is kept when [`Checkpoint::keep_now`] is called, or what feeds this breaks off.
    #[must_use]
    pub fn later(mut self, ram: Witness) -> Self {
        self.later = Some(Later { ram, block: None, came: Came::default() });
        self
    }

    /// What has come by now of the RAM of which nothing was kept is, and what comes is from now on.
    pub(crate) fn keep_now(&mut self) {
        let Some(Later { ram, block, came }) = self.later.take() else { return };
        let Some(block) = block.filter(|_| self.trouble.is_none() && !self.rests) else { return };
        let earlier = Piece::Earlier(Box::new(Earlier { ram, first: self.firsts[block], came, at: 0 }));
        let result = match (&mut self.to, earlier) {
            (To::Here(sealer), mut earlier) => sealer.write(&mut earlier),
            (To::Beside(queue), earlier) => queue.push(earlier),
        };
        self.note(result);
    }

    /// From now on what is kept is sealed and written by whoever runs what is returned. `None`: somebody does already.
    pub(crate) fn beside(&mut self) -> Option<CheckpointWriter> {
        self.write_run();
        let queue = Arc::new(Queue::default());
        match std::mem::replace(&mut self.to, To::Beside(queue.clone())) {
            To::Here(sealer) => Some(CheckpointWriter { sealer, queue }),
            beside @ To::Beside(_) => {
                self.to = beside;
                None
            }
        }
    }

    /// Why no more is kept, if that is so. Of what is written beside it is known when more comes.
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
        if let Some(later) = &mut self.later {
            later.block = blocks.iter().position(|block| later.ram.is_of(&block.name));
            later.came = Came::of(later.block.map_or(0, |at| blocks[at].pages));
        }
        if self.blocks == blocks {
            return;
        }
        self.lay_out(blocks.to_vec());
        self.run.slots.clear();
        let mut table = vec![];
        put_table(&mut table, blocks);
        let result = match &mut self.to {
            To::Here(sealer) => sealer.table(&mut table),
            To::Beside(queue) => queue.push(Piece::Table(table)),
        };
        self.note(result);
    }

    /// Keeps a page. It is in the file when its run is written: when one comes that is not its neighbour, or something is read, or at the end.
    /// With a writer beside it is then on its way there.
    pub(crate) fn keep(&mut self, place: Place, content: &PageBytes) {
        if self.trouble.is_some() || self.rests {
            return;
        }
        if let Some(later) = self.later.as_mut().filter(|later| later.block == Some(place.block)) {
            return later.came.add(place.page);
        }
        let number = self.number(place);
        if !self.run.takes(number) {
            self.write_run();
            self.run.first = number;
        }
        self.run.add(content);
    }

    fn write_run(&mut self) {
        if self.run.slots.is_empty() {
            return;
        }
        let written = match &mut self.to {
            To::Here(sealer) => sealer.pages(&mut self.run),
            To::Beside(queue) => queue.push(Piece::Pages(std::mem::take(&mut self.run))),
        };
        self.run.slots.clear();
        self.note(written);
    }

    /// Nothing more is kept of this stream: the guest stands, or what came is damaged. What a writer beside has not written by now is dropped:
    /// another try brings it again.
    pub(crate) fn rest(&mut self) {
        (self.rests, self.later) = (true, None);
        match &self.to {
            To::Here(_) => self.write_run(),
            To::Beside(queue) => {
                self.run.slots.clear();
                queue.drop_all();
            }
        }
    }

    /// A page that is kept; `None` if its seal does not hold. With a writer beside, as it was when the stream began, or since: nobody who keeps to
    /// the format asks for one that the stream has brought.
    pub(crate) fn page(&mut self, place: Place) -> io::Result<Option<PageBytes>> {
        if matches!(self.to, To::Here(_)) {
            self.write_run();
        }
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
        slot_at(self.number(place))
    }

    /// The first page from this one on whose slot is not in a hole of the file.
    fn data_from(&self, block: usize, page: u64) -> io::Result<u64> {
        let at = self.offset(Place { block, page });
        match rustix::fs::seek(&*self.file, SeekFrom::Data(at)) {
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
        self.keep_now();
        if let To::Beside(queue) = &self.to {
            queue.end();
        }
    }
}

/// Where the slot of this number lies in the file.
const fn slot_at(number: u64) -> u64 {
    HEADER + number * SLOT as u64
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
    fn a_disk_that_takes_nothing_holds_nobody_up_and_what_found_room_is_kept_all_the_same() {
        let folder = tempfile::tempdir().unwrap();
        let (path, key) = (folder.path().join("checkpoint"), CheckpointKey::random());
        let pages = (QUEUE / SLOT) as u64 + 1000;
        let mut checkpoint = Checkpoint::open(&path, &key).unwrap();
        let writer = checkpoint.beside().unwrap();
        assert!(checkpoint.beside().is_none());
        checkpoint.begin(&[Block { name: b"a".to_vec(), pages }]);
        for page in 0..pages {
            checkpoint.keep(Place { block: 0, page }, &[1; PAGE_SIZE]);
            assert!(writer.queue.queued().bytes <= QUEUE, "{page}");
        }
        assert!(checkpoint.trouble().is_some());
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 0, "nothing was written by whoever keeps");
        drop(checkpoint);
        writer.run();
        let held = Checkpoint::open(&path, &key).unwrap().holding(&|| true).unwrap().unwrap().pages();
        assert!(held < pages && held >= pages - 1000 - RUN as u64, "{held} of {pages}");
    }

    #[test]
    fn what_cannot_be_written_beside_is_heard_of_and_nothing_gathers_for_a_writer_that_is_gone() {
        let folder = tempfile::tempdir().unwrap();
        let key = CheckpointKey::random();
        let keep = |checkpoint: &mut Checkpoint, pages: std::ops::Range<u64>| {
            pages.for_each(|page| checkpoint.keep(Place { block: 0, page }, &[1; PAGE_SIZE]));
        };
        for fails in [true, false] {
            let path = folder.path().join(fails.to_string());
            let mut checkpoint = Checkpoint::open(&path, &key).unwrap();
            let mut writer = checkpoint.beside().unwrap();
            checkpoint.begin(&[Block { name: b"a".to_vec(), pages: 1000 }]);
            keep(&mut checkpoint, 0..100);
            let queue = writer.queue.clone();
            if fails {
                // As a medium that takes no more.
                writer.sealer.file = Arc::new(File::open(&path).unwrap());
                writer.run();
            } else {
                drop(writer);
            }
            keep(&mut checkpoint, 100..200);
            assert!(checkpoint.trouble().is_some());
            assert!(queue.queued().pieces.is_empty());
        }
    }

    #[test]
    fn what_the_writer_has_not_taken_when_the_guest_stands_is_dropped_and_what_lay_there_stays() {
        let folder = tempfile::tempdir().unwrap();
        let (path, key) = (folder.path().join("checkpoint"), CheckpointKey::random());
        let blocks = [Block { name: b"a".to_vec(), pages: 100 }];
        let mut checkpoint = Checkpoint::open(&path, &key).unwrap();
        checkpoint.begin(&blocks);
        (0..50).for_each(|page| checkpoint.keep(Place { block: 0, page }, &content(page + 1)));
        drop(checkpoint);
        let mut checkpoint = Checkpoint::open(&path, &key).unwrap();
        let writer = checkpoint.beside().unwrap();
        checkpoint.begin(&blocks);
        (20..100).for_each(|page| checkpoint.keep(Place { block: 0, page }, &content(1000)));
        // As it was, and without waiting for what is queued.
        assert_eq!(checkpoint.page(Place { block: 0, page: 49 }).unwrap(), Some(content(50)));
        checkpoint.rest();
        checkpoint.keep(Place { block: 0, page: 3 }, &content(1000));
        assert!(checkpoint.trouble().is_none());
        drop(checkpoint);
        writer.run();
        let mut checkpoint = Checkpoint::open(&path, &key).unwrap();
        for page in 0..100 {
            let lay = (page < 50).then(|| content(page + 1));
            assert_eq!(checkpoint.page(Place { block: 0, page }).unwrap(), lay, "{page}");
        }
    }

    #[test]
    fn what_came_before_it_was_kept_is_read_out_of_ram_once_it_is_to_be_or_the_stream_breaks_off_and_not_when_the_guest_stands()
     {
        const PAGES: u64 = 1000;
        let folder = tempfile::tempdir().unwrap();
        let key = CheckpointKey::random();
        let blocks = [Block { name: b"rom".to_vec(), pages: 10 }, Block { name: b"ram0".to_vec(), pages: PAGES }];
        let (rom, ram) = (|page| Place { block: 0, page }, |page| Place { block: 1, page });
        #[derive(Clone, Copy, Debug, PartialEq)]
        enum Then {
            Kept,
            BrokenOff,
            Stands,
        }
        let ways = [(false, Then::Kept), (true, Then::Kept), (true, Then::BrokenOff), (true, Then::Stands)];
        for (n, (beside, then)) in ways.into_iter().enumerate() {
            let (path, memory) = (folder.path().join(n.to_string()), folder.path().join(format!("ram{n}")));
            let guest = File::options().create_new(true).read(true).write(true).open(&memory).unwrap();
            guest.set_len(PAGES * PAGE_SIZE as u64).unwrap();
            let has = |page: u64, n: u64| guest.write_all_at(&content(n), page * PAGE_SIZE as u64).unwrap();
            // Page 700 is in RAM, and of no stream; of what an earlier one brought, page 300 stays.
            has(700, 1);
            let mut before = Checkpoint::open(&path, &key).unwrap();
            before.begin(&blocks);
            before.keep(ram(300), &content(77));
            before.keep(ram(5), &content(77));
            drop(before);
            let witness = Witness::new("ram0", File::open(&memory).unwrap());
            let mut checkpoint = Checkpoint::open(&path, &key).unwrap().later(witness);
            let writer = beside.then(|| checkpoint.beside().unwrap());
            checkpoint.begin(&blocks);
            checkpoint.keep(rom(3), &content(3));
            // Page 8 comes as something else again, page 9 as zeroes, and page 990 is not in RAM yet.
            for page in (0..200).chain([8, 990]) {
                checkpoint.keep(ram(page), &content(page + 1));
                has(page, page + 10);
            }
            has(9, 0);
            has(990, 0);
            assert_eq!(checkpoint.page(ram(5)).unwrap(), Some(content(77)), "nothing is kept yet");
            match then {
                Then::Kept => {
                    checkpoint.keep_now();
                    checkpoint.keep(ram(500), &content(500));
                }
                Then::BrokenOff => {}
                Then::Stands => checkpoint.rest(),
            }
            assert!(checkpoint.trouble().is_none());
            drop(checkpoint);
            if let Some(writer) = writer {
                writer.run();
            }
            let mut checkpoint = Checkpoint::open(&path, &key).unwrap();
            let kept: BTreeSet<u64> =
                (0..PAGES).filter(|page| checkpoint.page(ram(*page)).unwrap().is_some()).collect();
            let mut expected: BTreeSet<u64> = [5, 300].into();
            if then != Then::Stands {
                expected.extend((0..200).filter(|page| *page != 9));
            }
            if then == Then::Kept {
                expected.insert(500);
            }
            assert_eq!(kept, expected, "{beside} {then:?}");
            let five = if then == Then::Stands { 77 } else { 15 };
            assert_eq!(checkpoint.page(ram(5)).unwrap(), Some(content(five)), "{beside} {then:?}");
            assert_eq!(checkpoint.page(rom(3)).unwrap().is_some(), then != Then::Stands, "{beside} {then:?}");
        }
    }

    #[test]
    fn no_more_than_some_of_what_came_is_read_out_of_ram_once_the_stream_has_broken_off() {
        let folder = tempfile::tempdir().unwrap();
        let (path, memory) = (folder.path().join("checkpoint"), folder.path().join("ram"));
        let pages = LEFT / SLOT as u64 + 5000;
        let guest = File::create_new(&memory).unwrap();
        let same = vec![7; 1000 * PAGE_SIZE];
        (0..pages.div_ceil(1000)).for_each(|n| guest.write_all_at(&same, n * same.len() as u64).unwrap());
        let witness = Witness::new("ram0", File::open(&memory).unwrap());
        let mut checkpoint = Checkpoint::open(&path, &CheckpointKey::random()).unwrap().later(witness);
        let writer = checkpoint.beside().unwrap();
        checkpoint.begin(&[Block { name: b"ram0".to_vec(), pages }]);
        (0..pages).for_each(|page| checkpoint.keep(Place { block: 0, page }, &content(1)));
        drop(checkpoint);
        writer.run();
        let written = std::fs::metadata(&path).unwrap().len();
        assert!((LEFT..LEFT + (1 << 20)).contains(&written), "{written}");
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
