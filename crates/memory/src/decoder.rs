//! The destination's end: Godwit's stream in, QEMU's out.

use crate::checkpoint::{Checkpoint, CheckpointWriter};
use crate::config::Limits;
use crate::cursor::{Cursor, Stop};
use crate::delta;
use crate::disks::{self, Blocks, Feedback, MAX_WAITING, Spot, TELL_EVERY};
use crate::format::{self, Segment};
use crate::meter::{Clock, Meter, Stages};
use crate::record::{self, Block, MAX_BLOCKS, PAGE_SIZE, PageBytes, Place};
use crate::shuffle::Word;
use crate::stream;
use crate::versions::{Settling, Versions, watched};
use crate::witness::Witness;
use std::io;
use zstd::stream::raw::{DParameter, InBuffer, Operation, OutBuffer};

/// Decompressed operations that may wait. The longest operation, a table of [`MAX_BLOCKS`], has 68 KiB.
const PLAIN: usize = 256 << 10;
/// An answer's length, at most: its pages as zstd makes them if they do not compress, and a number.
const MAX_ANSWER: usize = format::MAX_DISK_RUN as usize * PAGE_SIZE + (8 << 10);
/// [`Decoder::push_some`] stops when it has made so much, or an operation more (64 KiB).
pub const ENOUGH: usize = 1 << 20;

/// Why what came over the wire cannot be rebuilt. None can come from a network that only loses or cuts.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WireError {
    /// Another format.
    #[error(
        "the memory stream begins with {found:02x?}, not with GWM7: both nodes must run the same version of godwit"
    )]
    NotGodwit {
        /// The first four bytes.
        found: [u8; 4],
    },
    /// zstd refused.
    #[error(
        "zstd cannot {doing}: {source}; the stream is damaged, or its window is larger than 2^{window_log} bytes, \
         the most that is allowed here"
    )]
    Zstd {
        /// What it was to do.
        doing: &'static str,
        /// The window allowed.
        window_log: u32,
        /// What it said.
        source: io::Error,
    },
    /// An operation that is none.
    #[error("the memory stream is damaged: {what}, behind byte {at} of what was rebuilt; move again")]
    Damaged {
        /// What is wrong.
        what: &'static str,
        /// How much was rebuilt.
        at: u64,
    },
    /// RAM beyond the limit.
    #[error(
        "the guest at the other end has {bytes} bytes of RAM or more, and {limit} are allowed here: raise the \
         limit, or start QEMU with the memory that was announced"
    )]
    TooLarge {
        /// What was announced.
        bytes: u64,
        /// The limit.
        limit: u64,
    },
    /// The rebuilt stream is not the source's.
    #[error(
        "the first {at} bytes that were rebuilt are not what the source sent: end the incoming QEMU and move again"
    )]
    Digest {
        /// Their number.
        at: u64,
    },
    /// A page that was to be here is not.
    #[error(
        "page {page} of `{block}` was kept by an earlier try, and cannot be read any more: {why}; move again, and it is sent"
    )]
    Checkpoint {
        /// The RAM block's name.
        block: String,
        /// The page's index in it.
        page: u64,
        /// What is wrong.
        why: String,
    },
    /// What a difference is to be applied to cannot be read.
    #[error(
        "page {page} of `{block}` came as a difference, and what it was cannot be read from the incoming guest's RAM: {source}; move again"
    )]
    Ram {
        /// The RAM block's name.
        block: String,
        /// The page's index in it.
        page: u64,
        /// Why.
        source: io::Error,
    },
    /// More would have to be kept than may be.
    #[error(
        "the source sends differences from {bytes} bytes of pages, and {limit} may be kept here: raise the limit, or start QEMU with memory \
         that can be read"
    )]
    Versions {
        /// What it said.
        bytes: u64,
        /// The limit.
        limit: u64,
    },
    /// The answer to a question is too long in coming.
    #[error(
        "the source did not say within {waiting} bytes what the blocks of a disk hold that are not here as it meant them; move again, with \
         a slower link or without references to disks"
    )]
    NoAnswer {
        /// What came meanwhile.
        waiting: usize,
    },
    /// It was used after an error.
    #[error("the decoder was used after an error: begin a new stream")]
    Spent,
}

/// How far a [`Decoder`] is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Decoded {
    /// Bytes rebuilt since the beginning.
    pub rebuilt_bytes: u64,
    /// The first so many of them are verified: they are what the source meant. Behind RAM's END the source
    /// sends a digest with every flush, so this reaches `rebuilt_bytes` when all that the source's QEMU said has
    /// arrived.
    pub verified_bytes: u64,
    /// Whether the trailer came, and was right: nothing follows.
    pub complete: bool,
}

/// Rebuilds QEMU's migration stream.
///
/// Whoever drives it asks for [`Decoder::feedback`] after each push, and brings that to the encoder.
///
/// After an error it is spent, and what it appended to `out` in that call must not be used.
pub struct Decoder {
    limits: Limits,
    zstd: zstd::stream::raw::Decoder<'static>,
    magic: Vec<u8>,
    /// The head of a segment that has not come whole.
    head: Vec<u8>,
    /// The segment that is being read, and how much of it is to come.
    segment: Option<(Segment, usize)>,
    /// An answer that has not come whole.
    answer: Vec<u8>,
    /// Packed bytes that came while something was missing: `waiting[taken..]`.
    waiting: Vec<u8>,
    taken: usize,
    disks: References,
    /// Whether zstd's frame ended. Behind it comes nothing, or another one.
    frame_ended: bool,
    /// Whether zstd may have more to give without any input: it stopped for want of room.
    holds: bool,
    /// Decompressed, not carried out yet: `plain[at..]`.
    plain: Vec<u8>,
    at: usize,
    blocks: Vec<Block>,
    checkpoint: Option<Checkpoint>,
    /// The incoming guest's RAM.
    ram: Option<Witness>,
    /// How much the source keeps for differences.
    keeps: u64,
    before: Before,
    meter: Meter,
    /// The page behind the last one.
    expected: Option<Place>,
    hasher: blake3::Hasher,
    so_far: Decoded,
    spent: bool,
}

impl Decoder {
    /// # Errors
    /// [`WireError::Zstd`] when the window is out of zstd's bounds.
    pub fn new(limits: Limits) -> Result<Self, WireError> {
        Ok(Self {
            limits,
            zstd: unpacker(limits.window_log)?,
            magic: vec![],
            head: vec![],
            segment: None,
            answer: vec![],
            waiting: vec![],
            taken: 0,
            disks: References::default(),
            frame_ended: false,
            holds: false,
            plain: Vec::with_capacity(PLAIN),
            at: 0,
            blocks: vec![],
            checkpoint: None,
            ram: None,
            keeps: 0,
            before: Before::Nothing,
            meter: Meter::default(),
            expected: None,
            hasher: blake3::Hasher::new(),
            so_far: Decoded::default(),
            spent: false,
        })
    }

    /// Keeps what comes until the guest stands, and takes from there what the encoder was told is kept. To be called before the first push.
    #[must_use]
    pub fn with_checkpoint(mut self, checkpoint: Checkpoint) -> Self {
        self.checkpoint = Some(checkpoint);
        self
    }

    /// From now on pages are kept by whoever runs what is returned, and no push waits for the disk. To be called before the first push. `None`:
    /// nothing is kept, or somebody does that already.
    #[must_use]
    pub fn keep_beside(&mut self) -> Option<CheckpointWriter> {
        self.checkpoint.as_mut()?.beside()
    }

    /// What has come of the RAM of which nothing was kept is kept now, and what comes is from now on ([`Checkpoint::later`]).
    pub fn keep_now(&mut self) {
        if let Some(checkpoint) = &mut self.checkpoint {
            checkpoint.keep_now();
        }
    }

    /// Takes differences against the incoming guest's RAM itself, instead of keeping a copy of what came last. To be called before the first
    /// push, and then to be driven by [`Decoder::push_some`], whose output goes to QEMU through a socket of at most
    /// [`MOST_UNREAD`](crate::MOST_UNREAD) bytes before the next call.
    #[must_use]
    pub fn with_ram(mut self, ram: Witness) -> Self {
        self.ram = Some(ram);
        self
    }

    /// Measures where time goes.
    #[must_use]
    pub fn with_clock(mut self, clock: Clock) -> Self {
        self.meter.clock = Some(clock);
        self
    }

    /// Where its time went, if it was given a clock.
    #[must_use]
    pub fn stages(&self) -> Stages {
        self.meter.stages
    }

    /// Copies out of the VM's disks what the encoder refers to. To be called before the first push. Without, all of it is asked for.
    #[must_use]
    pub fn with_disks(mut self, disks: Box<dyn Blocks>) -> Self {
        self.disks.here = Some(disks);
        self
    }

    /// What the encoder has to know, if anything; to be asked for until there is nothing more. A [`Feedback::Missing`] is to get there at
    /// once: until it is answered nothing more is rebuilt.
    pub fn feedback(&mut self) -> Option<Feedback> {
        self.disks.feedback()
    }

    #[cfg(test)]
    pub(crate) fn believing(mut self) -> Self {
        self.disks.believes = true;
        self
    }

    /// Whether it waits for the encoder's answer.
    #[must_use]
    pub fn is_stalled(&self) -> bool {
        self.disks.missing.is_some()
    }

    /// Where pages are kept.
    #[must_use]
    pub fn checkpoint(&self) -> Option<&Checkpoint> {
        self.checkpoint.as_ref()
    }

    /// Takes bytes from the wire, cut anywhere; appends to `out` all of QEMU's stream that follows from them.
    ///
    /// A few bytes of wire can mean gigabytes of equal pages: who does not trust the other end, or is short of
    /// memory, calls [`Decoder::push_some`].
    ///
    /// # Errors
    /// When the stream is damaged.
    pub fn push(&mut self, mut wire: &[u8], out: &mut Vec<u8>) -> Result<Decoded, WireError> {
        while self.step(&mut wire, out, usize::MAX)? {}
        Ok(self.so_far)
    }

    /// As [`Decoder::push`], but takes only as much off the front of `wire` as makes about [`ENOUGH`], unless it waits for an answer. Returns
    /// whether to call again (take `out` away before): there is more to be made, even if `wire` is empty by now.
    ///
    /// # Errors
    /// When the stream is damaged.
    pub fn push_some(&mut self, wire: &mut &[u8], out: &mut Vec<u8>) -> Result<bool, WireError> {
        self.step(wire, out, ENOUGH)
    }

    /// How far it is.
    #[must_use]
    pub fn decoded(&self) -> Decoded {
        self.so_far
    }

    fn step(&mut self, wire: &mut &[u8], out: &mut Vec<u8>, enough: usize) -> Result<bool, WireError> {
        if self.spent {
            return Err(WireError::Spent);
        }
        let result = self.work(wire, out, enough);
        self.spent = result.is_err();
        if self.spent {
            self.keep_no_more();
        }
        result
    }

    fn work(&mut self, wire: &mut &[u8], out: &mut Vec<u8>, enough: usize) -> Result<bool, WireError> {
        let begin = out.len();
        let mut hashed = begin;
        if !self.magic(wire)? {
            return Ok(false);
        }
        let more = loop {
            self.operations(out, &mut hashed, begin.saturating_add(enough))?;
            if out.len() - begin >= enough {
                break true;
            }
            if !self.feed(wire, out)? {
                break false;
            }
        };
        self.hash(out, &mut hashed);
        Ok(more)
    }

    /// Bytes that are kept for what waits, or has waited.
    #[cfg(test)]
    pub(crate) const fn waits_in(&self) -> usize {
        self.waiting.len()
    }

    fn magic(&mut self, wire: &mut &[u8]) -> Result<bool, WireError> {
        let missing = format::MAGIC.len() - self.magic.len();
        let (front, rest) = wire.split_at(missing.min(wire.len()));
        self.magic.extend_from_slice(front);
        *wire = rest;
        match self.magic.first_chunk() {
            Some(&format::MAGIC) => Ok(true),
            Some(&found) => Err(WireError::NotGodwit { found }),
            None => Ok(false),
        }
    }

    /// Reads on: into `plain`, or, while something is missing, until that has come. Whether there is more to do.
    fn feed(&mut self, wire: &mut &[u8], out: &mut Vec<u8>) -> Result<bool, WireError> {
        if self.disks.missing.is_none() && self.taken < self.waiting.len() {
            let waiting = std::mem::take(&mut self.waiting);
            let mut rest = &waiting[self.taken..];
            let fed = self.decompress(&mut rest);
            self.taken = waiting.len() - rest.len();
            self.waiting = waiting;
            if self.taken == self.waiting.len() {
                // Not only emptied: a stall may have made it large.
                (self.waiting, self.taken) = (vec![], 0);
                self.disks.caught_up = true;
            }
            return fed;
        }
        let (kind, left) = match self.segment {
            Some(open) => open,
            None => {
                let (front, rest) = wire.split_at((format::SEGMENT_HEAD - self.head.len()).min(wire.len()));
                self.head.extend_from_slice(front);
                *wire = rest;
                let Some(head) = self.head.first_chunk() else {
                    return if self.disks.missing.is_none() { self.decompress(&mut &[][..]) } else { Ok(false) };
                };
                let open = format::parse_segment(*head);
                self.head.clear();
                self.begin(open)?;
                self.segment = Some(open);
                open
            }
        };
        let mut piece = &wire[..left.min(wire.len())];
        let had = piece.len();
        let more = match kind {
            Segment::Packed if self.disks.missing.is_none() => self.decompress(&mut piece)?,
            Segment::Packed => {
                let waiting = self.waiting.len() - self.taken + piece.len();
                if waiting > MAX_WAITING {
                    return Err(WireError::NoAnswer { waiting });
                }
                if self.taken > 0 && self.taken >= self.waiting.len() / 2 {
                    // One stall may follow another before all was taken.
                    self.waiting.drain(..self.taken);
                    self.taken = 0;
                }
                self.waiting.extend_from_slice(piece);
                piece = &[];
                had > 0
            }
            Segment::Answer => {
                self.answer.extend_from_slice(piece);
                piece = &[];
                had > 0
            }
        };
        let taken = had - piece.len();
        *wire = &wire[taken..];
        self.segment = Some((kind, left - taken)).filter(|(_, left)| *left > 0);
        if kind == Segment::Answer && self.segment.is_none() {
            self.answered(out)?;
        }
        Ok(more)
    }

    fn begin(&self, (kind, length): (Segment, usize)) -> Result<(), WireError> {
        match kind {
            _ if length == 0 => Err(self.damaged("an empty segment")),
            Segment::Packed => Ok(()),
            Segment::Answer if self.disks.missing.is_none() => Err(self.damaged("an answer to no question")),
            Segment::Answer if length > MAX_ANSWER => Err(self.damaged("an overlong answer")),
            Segment::Answer => Ok(()),
        }
    }

    /// What was missing has come.
    fn answered(&mut self, out: &mut Vec<u8>) -> Result<(), WireError> {
        let answer = std::mem::take(&mut self.answer);
        let Some(missing) = self.disks.missing.take() else { return Err(self.damaged("an answer to no question")) };
        let mut c = Cursor::new(&answer);
        let group = format::get(&mut c).ok().flatten();
        let length = missing.count as usize * PAGE_SIZE;
        let contents = zstd::bulk::decompress(&answer[c.at()..], length).ok().filter(|it| it.len() == length);
        match contents {
            Some(contents) if group == Some(self.disks.past) && self.disks.is_right(&contents, &missing.checksum) => {
                self.write_pages(&missing, &contents, out);
                self.disks.caught_up = self.taken == self.waiting.len();
                Ok(())
            }
            _ => Err(self.damaged("an answer to another question")),
        }
    }

    /// Fills `plain` from `packed`; whether anything came.
    fn decompress(&mut self, packed: &mut &[u8]) -> Result<bool, WireError> {
        if self.frame_ended {
            if packed.is_empty() {
                return Ok(false);
            }
            if self.so_far.complete {
                return Err(self.damaged("it goes on behind its end"));
            }
            // With another level. One that looked further back would go on to use all of its window, which is memory that nobody has touched yet.
            self.zstd = unpacker(self.limits.window_log)?;
            self.frame_ended = false;
        }
        self.plain.drain(..self.at);
        self.at = 0;
        // zstd takes it for an error to be asked for more than nothing sixteen times.
        if packed.is_empty() && !self.holds {
            return Ok(false);
        }
        let end = self.plain.len();
        let then = self.meter.now();
        let mut input = InBuffer::around(packed);
        let hint = {
            let mut output = OutBuffer::around_pos(&mut self.plain, end);
            self.zstd.run(&mut input, &mut output).map_err(|source| WireError::Zstd {
                doing: "decompress",
                window_log: self.limits.window_log,
                source,
            })?
        };
        let taken = input.pos();
        self.meter.stages.zstd += self.meter.since(then);
        *packed = &packed[taken..];
        self.holds = self.plain.len() == self.plain.capacity();
        self.frame_ended = hint == 0;
        Ok(taken > 0 || self.plain.len() > end || self.frame_ended)
    }

    fn damaged(&self, what: &'static str) -> WireError {
        WireError::Damaged { what, at: self.so_far.rebuilt_bytes }
    }

    fn hash(&mut self, out: &[u8], hashed: &mut usize) {
        let then = self.meter.now();
        self.hasher.update(&out[*hashed..]);
        self.meter.stages.digest += self.meter.since(then);
        self.so_far.rebuilt_bytes += (out.len() - *hashed) as u64;
        *hashed = out.len();
    }

    fn operations(&mut self, out: &mut Vec<u8>, hashed: &mut usize, until: usize) -> Result<(), WireError> {
        let plain = std::mem::take(&mut self.plain);
        let result = loop {
            if out.len() >= until || self.at == plain.len() || self.disks.missing.is_some() {
                break Ok(());
            }
            match self.operation(&plain[self.at..], out, hashed) {
                Ok(n) => self.at += n,
                Err(Stop::More) => break Ok(()),
                Err(Stop::Bad(e)) => break Err(e),
            }
        };
        self.plain = plain;
        result
    }

    fn operation(&mut self, plain: &[u8], out: &mut Vec<u8>, hashed: &mut usize) -> Result<usize, Stop<WireError>> {
        let mut c = Cursor::new(plain);
        let op = c.u8()?;
        if self.so_far.complete {
            return Err(Stop::Bad(self.damaged("an operation follows the trailer")));
        }
        match op {
            0..=format::LAST_PAGE_OP => self.pages(op, &mut c, out)?,
            format::VERBATIM => {
                let len = self.number(&mut c, format::MAX_VERBATIM as u64, "an overlong piece")?;
                let bytes = c.take(len as usize)?;
                if stream::stands_from(bytes) {
                    self.keep_no_more();
                }
                out.extend_from_slice(bytes);
            }
            format::BLOCKS => self.read_blocks(&mut c)?,
            format::DISKS => self.disks.key = Some(*c.array()?),
            format::DELTAS => self.keeps = self.number(&mut c, u64::MAX, "no size")?,
            format::FIRSTS => {
                let [firsts @ (0 | 1)] = *c.array()? else { return Err(Stop::Bad(self.damaged("neither yes nor no"))) };
                if let Before::Kept(versions) = &mut self.before {
                    versions.keep_firsts(firsts == 1);
                }
            }
            format::CHECK => {
                let digest = c.array()?;
                self.hash(out, hashed);
                self.check(digest)?;
            }
            format::END => {
                let length = self.number(&mut c, u64::MAX, "no length")?;
                let digest = c.array()?;
                self.hash(out, hashed);
                self.check(digest)?;
                if length != self.so_far.rebuilt_bytes {
                    return Err(Stop::Bad(WireError::Digest { at: self.so_far.rebuilt_bytes }));
                }
                self.so_far.complete = true;
            }
            _ => return Err(Stop::Bad(self.damaged("an unknown operation"))),
        }
        Ok(c.at())
    }

    fn keep_no_more(&mut self) {
        if let Some(checkpoint) = &mut self.checkpoint {
            checkpoint.rest();
        }
    }

    fn check(&mut self, digest: &[u8; format::DIGEST]) -> Result<(), Stop<WireError>> {
        let at = self.so_far.rebuilt_bytes;
        if self.hasher.finalize() != *digest {
            return Err(Stop::Bad(WireError::Digest { at }));
        }
        self.so_far.verified_bytes = at;
        Ok(())
    }

    fn number(&self, c: &mut Cursor<'_>, most: u64, what: &'static str) -> Result<u64, Stop<WireError>> {
        match format::get(c)? {
            Some(n) if n <= most => Ok(n),
            _ => Err(Stop::Bad(self.damaged(what))),
        }
    }

    fn read_blocks(&mut self, c: &mut Cursor<'_>) -> Result<(), Stop<WireError>> {
        let count = self.number(c, MAX_BLOCKS as u64, "too many RAM blocks")?;
        let most = self.limits.max_ram.div_ceil(PAGE_SIZE as u64).saturating_add(count);
        let mut blocks = Vec::with_capacity(count as usize);
        let mut sum = 0u64;
        for _ in 0..count {
            let name = c.counted()?.to_vec();
            let pages = self.number(c, u64::MAX, "a RAM block without length")?;
            sum = sum.saturating_add(pages);
            if sum > most {
                let bytes = sum.saturating_mul(PAGE_SIZE as u64);
                return Err(Stop::Bad(WireError::TooLarge { bytes, limit: self.limits.max_ram }));
            }
            blocks.push(Block { name, pages });
        }
        if let Some(checkpoint) = &mut self.checkpoint {
            checkpoint.begin(&blocks);
        }
        self.before = self.before(&blocks)?;
        self.blocks = blocks;
        self.expected = None;
        Ok(())
    }

    fn held(checkpoint: Option<&mut Checkpoint>, block: &Block, place: Place) -> Result<PageBytes, WireError> {
        let why = match checkpoint.map(|kept| kept.page(place)) {
            Some(Ok(Some(content))) => return Ok(content),
            Some(Ok(None)) => "its seal does not hold".into(),
            Some(Err(error)) => error.to_string(),
            None => "nothing is kept here".into(),
        };
        Err(WireError::Checkpoint { block: block.name.escape_ascii().to_string(), page: place.page, why })
    }

    fn pages(&mut self, op: u8, c: &mut Cursor<'_>, out: &mut Vec<u8>) -> Result<(), Stop<WireError>> {
        let place = if op & format::SEEK != 0 {
            let block = self.number(c, self.blocks.len() as u64, "an unknown RAM block")? as usize;
            let from = self.expected.filter(|e| e.block == block).map_or(0, |e| e.page);
            Place { block, page: format::travel(from, self.number(c, u64::MAX, "a page that is no number")?) }
        } else {
            self.expected.ok_or_else(|| Stop::Bad(self.damaged("a page follows none")))?
        };
        let kind = op & (format::ZERO | format::HELD | format::DELTA);
        let made;
        let (mut content, mut spots, mut checksum) = (None, vec![], [0; disks::CHECKSUM]);
        let count = match kind {
            format::ZERO => self.number(c, format::MAX_RUN, "an overlong run")?,
            format::HELD => self.number(c, format::MAX_HELD_RUN, "an overlong run")?,
            format::DISK => {
                spots = self.spots(c)?;
                checksum = *c.array()?;
                spots.iter().map(|(_, length)| length).sum()
            }
            // Before the guest's RAM is read at that place.
            format::DELTA if self.blocks.get(place.block).is_none_or(|block| place.page >= block.pages) => {
                return Err(Stop::Bad(self.damaged("a page outside its RAM block")));
            }
            format::DELTA => {
                made = self.changed(place, c)?;
                content = Some(&made);
                1
            }
            0 => {
                content = Some(c.array::<PAGE_SIZE>()?);
                1
            }
            _ => {
                let word = Word::of(kind).ok_or_else(|| Stop::Bad(self.damaged("an unknown operation")))?;
                made = word.together(c.array()?);
                content = Some(&made);
                1
            }
        };
        let Some(block) = self.blocks.get(place.block) else {
            return Err(Stop::Bad(self.damaged("an unknown RAM block")));
        };
        let end = place.page.checked_add(count).filter(|end| *end <= block.pages);
        let Some(end) = end else { return Err(Stop::Bad(self.damaged("a page outside its RAM block"))) };
        let named = op & format::NAMED != 0;
        self.expected = Some(Place { page: end, ..place });
        if kind == format::DISK {
            self.copy(spots, Pending { place, count, named, checksum }, out);
            return Ok(());
        }
        let mut name = named.then_some(&*block.name);
        for page in place.page..end {
            let place = Place { page, ..place };
            if kind == format::HELD {
                let held = Self::held(self.checkpoint.as_mut(), block, place).map_err(Stop::Bad)?;
                record::write(out, page, name.take(), Some(&held));
                self.before.put(place, Some(&held), &mut self.meter);
            } else {
                record::write(out, page, name.take(), content);
                self.before.put(place, content, &mut self.meter);
            }
        }
        if let (Some(checkpoint), Some(content)) = (&mut self.checkpoint, content) {
            checkpoint.keep(place, content);
        }
        Ok(())
    }

    /// What differences from pages of these blocks are against.
    fn before(&mut self, blocks: &[Block]) -> Result<Before, Stop<WireError>> {
        let Some(block) = watched(blocks).filter(|_| self.keeps > 0) else { return Ok(Before::Nothing) };
        match self.ram.take() {
            Some(ram) if ram.is_of(&blocks[block].name) => Ok(Before::Ram { block, ram, settling: Settling::new() }),
            _ if self.keeps.min(blocks[block].pages.saturating_mul(PAGE_SIZE as u64)) > self.limits.versions => {
                Err(Stop::Bad(WireError::Versions { bytes: self.keeps, limit: self.limits.versions }))
            }
            _ => Ok(Before::Kept(Versions::new(self.keeps, blocks))),
        }
    }

    /// A page that came as a difference.
    fn changed(&mut self, place: Place, c: &mut Cursor<'_>) -> Result<PageBytes, Stop<WireError>> {
        let then = self.meter.now();
        let read = self.before.get(place);
        let mut page = match read {
            Ok(Some(page)) => page,
            Ok(None) => return Err(Stop::Bad(self.damaged("a difference from nothing"))),
            Err(source) => {
                let block = self.blocks[place.block].name.escape_ascii().to_string();
                return Err(Stop::Bad(WireError::Ram { block, page: place.page, source }));
            }
        };
        delta::apply(&mut page, c).map_err(|stop| match stop {
            Stop::More => Stop::More,
            Stop::Bad(what) => Stop::Bad(self.damaged(what)),
        })?;
        self.meter.stages.deltas += self.meter.since(then);
        Ok(page)
    }

    /// Which blocks a group's pages are.
    fn spots(&self, c: &mut Cursor<'_>) -> Result<Vec<(Spot, u64)>, Stop<WireError>> {
        if self.disks.key.is_none() {
            return Err(Stop::Bad(self.damaged("a reference before its key")));
        }
        let runs = self.number(c, format::MAX_DISK_RUN, "too many runs of blocks")?;
        let (mut spots, mut from, mut sum) = (Vec::with_capacity(runs as usize), self.disks.next.number(), 0);
        for _ in 0..runs {
            let first = format::travel(from, self.number(c, u64::MAX, "a block that is no number")?);
            let length = self.number(c, format::MAX_DISK_RUN, "an overlong run of blocks")?;
            sum += length;
            if length == 0 || sum > format::MAX_DISK_RUN {
                return Err(Stop::Bad(self.damaged("an overlong run of blocks")));
            }
            from = first.wrapping_add(length);
            spots.push((Spot::from_number(first), length));
        }
        if spots.is_empty() {
            return Err(Stop::Bad(self.damaged("a reference to nothing")));
        }
        Ok(spots)
    }

    /// Copies a group's blocks out, compares them with what was meant, and only then uses them.
    fn copy(&mut self, spots: Vec<(Spot, u64)>, pending: Pending, out: &mut Vec<u8>) {
        let (last, length) = *spots.last().expect("no group is empty");
        self.disks.next = Spot::from_number(last.number() + length);
        let mut contents = vec![0; pending.count as usize * PAGE_SIZE];
        let mut rest = &mut contents[..];
        let read = self.disks.here.as_ref().is_some_and(|disks| {
            spots.iter().all(|(first, length)| {
                let (piece, behind) = std::mem::take(&mut rest).split_at_mut(*length as usize * PAGE_SIZE);
                rest = behind;
                disks.read(*first, piece)
            })
        });
        if read && self.disks.is_right(&contents, &pending.checksum) {
            self.write_pages(&pending, &contents, out);
        } else {
            self.disks.missing = Some(pending);
            self.disks.asked = false;
        }
    }

    fn write_pages(&mut self, group: &Pending, contents: &[u8], out: &mut Vec<u8>) {
        let block = &self.blocks[group.place.block];
        let mut name = group.named.then_some(&*block.name);
        for (page, content) in (group.place.page..).zip(contents.chunks_exact(PAGE_SIZE)) {
            let content: &PageBytes = content.first_chunk().expect("a chunk has a page");
            record::write(out, page, name.take(), Some(content));
            self.before.put(Place { page, ..group.place }, Some(content), &mut self.meter);
            if let Some(checkpoint) = &mut self.checkpoint {
                checkpoint.keep(Place { page, ..group.place }, content);
            }
        }
        self.disks.past += 1;
        self.disks.untold += group.count;
    }
}

/// What differences are against.
enum Before {
    /// There are none.
    Nothing,
    /// What was given to QEMU last, and its RAM for what was before.
    Ram { block: usize, ram: Witness, settling: Settling },
    /// As the source has it.
    Kept(Versions),
}

impl Before {
    /// What was last said of a page; `None` if that is not known.
    fn get(&self, place: Place) -> io::Result<Option<PageBytes>> {
        match self {
            Self::Ram { block, ram, settling } if *block == place.block => match settling.get(place.page) {
                Some(page) => Ok(Some(*page)),
                None => {
                    let mut page = [0; PAGE_SIZE];
                    ram.read(place.page, &mut page).map(|()| Some(page))
                }
            },
            Self::Kept(versions) => Ok(versions.get(place).copied()),
            _ => Ok(None),
        }
    }

    /// This is said of a page now; `None`: zeroes.
    fn put(&mut self, place: Place, content: Option<&PageBytes>, meter: &mut Meter) {
        let then = meter.now();
        match (self, content) {
            (Self::Ram { block, settling, .. }, Some(content)) if *block == place.block => {
                settling.put(place.page, content);
            }
            (Self::Kept(versions), Some(content)) => {
                versions.put(place, content, |_, _| {});
            }
            (Self::Kept(versions), None) => versions.clear(place),
            _ => return,
        }
        meter.stages.deltas += meter.since(then);
    }
}

/// For one frame.
fn unpacker(window_log: u32) -> Result<zstd::stream::raw::Decoder<'static>, WireError> {
    let bad = |doing| move |source| WireError::Zstd { doing, window_log, source };
    let mut zstd = zstd::stream::raw::Decoder::new().map_err(bad("begin"))?;
    zstd.set_parameter(DParameter::WindowLogMax(window_log)).map_err(bad("bound its window"))?;
    Ok(zstd)
}

/// A group of pages that lie on disks.
struct Pending {
    place: Place,
    count: u64,
    named: bool,
    checksum: [u8; disks::CHECKSUM],
}

/// What a decoder knows of references.
#[derive(Default)]
struct References {
    here: Option<Box<dyn Blocks>>,
    key: Option<[u8; 32]>,
    /// The spot behind the last one.
    next: Spot,
    /// Groups that are done.
    past: u64,
    /// Pages of groups that are done, and of which the encoder has not heard.
    untold: u64,
    /// What waited for a missing group is worked off, and the encoder has not heard of it.
    caught_up: bool,
    /// The group that is not here as it was meant.
    missing: Option<Pending>,
    /// Whether it was asked for.
    asked: bool,
    /// A test's: to show what it is for.
    #[cfg(test)]
    believes: bool,
}

impl References {
    fn feedback(&mut self) -> Option<Feedback> {
        let stands = self.missing.is_some();
        if stands && !self.asked {
            self.asked = true;
            (self.untold, self.caught_up) = (0, false);
            return Some(Feedback::Missing(self.past));
        }
        if !stands && (self.untold >= TELL_EVERY || self.caught_up) {
            (self.untold, self.caught_up) = (0, false);
            return Some(Feedback::Past(self.past));
        }
        None
    }

    fn is_right(&self, contents: &[u8], meant: &[u8; disks::CHECKSUM]) -> bool {
        #[cfg(test)]
        if self.believes {
            return true;
        }
        self.key.is_some_and(|key| disks::checksum(&key, contents) == *meant)
    }
}
