//! The destination's end: Godwit's stream in, QEMU's out.

use crate::checkpoint::Checkpoint;
use crate::config::Limits;
use crate::cursor::{Cursor, Stop};
use crate::format;
use crate::record::{self, Block, MAX_BLOCKS, PAGE_SIZE, PageBytes, Place};
use std::io;
use zstd::stream::raw::{DParameter, InBuffer, Operation, OutBuffer};

/// Decompressed operations that may wait. The longest operation, a table of [`MAX_BLOCKS`], has 68 KiB.
const PLAIN: usize = 256 << 10;
/// [`Decoder::push_some`] stops when it has made so much, or an operation more (64 KiB).
pub const ENOUGH: usize = 1 << 20;

/// Why what came over the wire cannot be rebuilt. None can come from a network that only loses or cuts.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WireError {
    /// Another format.
    #[error(
        "the memory stream begins with {found:02x?}, not with GWM2: both nodes must run the same version of godwit"
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
/// After an error it is spent, and what it appended to `out` in that call must not be used.
pub struct Decoder {
    limits: Limits,
    zstd: zstd::stream::raw::Decoder<'static>,
    magic: Vec<u8>,
    /// Whether zstd's frame ended.
    frame_ended: bool,
    /// Whether zstd may have more to give without any input: it stopped for want of room.
    holds: bool,
    /// Decompressed, not carried out yet: `plain[at..]`.
    plain: Vec<u8>,
    at: usize,
    blocks: Vec<Block>,
    checkpoint: Option<Checkpoint>,
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
        let bad = |doing| move |source| WireError::Zstd { doing, window_log: limits.window_log, source };
        let mut zstd = zstd::stream::raw::Decoder::new().map_err(bad("begin"))?;
        zstd.set_parameter(DParameter::WindowLogMax(limits.window_log)).map_err(bad("bound its window"))?;
        Ok(Self {
            limits,
            zstd,
            magic: vec![],
            frame_ended: false,
            holds: false,
            plain: Vec::with_capacity(PLAIN),
            at: 0,
            blocks: vec![],
            checkpoint: None,
            expected: None,
            hasher: blake3::Hasher::new(),
            so_far: Decoded::default(),
            spent: false,
        })
    }

    /// Keeps what comes, and takes from there what the encoder was told is kept. To be called before the first push.
    #[must_use]
    pub fn with_checkpoint(mut self, checkpoint: Checkpoint) -> Self {
        self.checkpoint = Some(checkpoint);
        self
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

    /// As [`Decoder::push`], but takes only as much off the front of `wire` as makes about [`ENOUGH`]. Returns
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
            if !self.decompress(wire)? {
                break false;
            }
        };
        self.hash(out, &mut hashed);
        Ok(more)
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

    /// Fills `plain` from `wire`; whether anything came.
    fn decompress(&mut self, wire: &mut &[u8]) -> Result<bool, WireError> {
        if self.frame_ended {
            if !self.so_far.complete {
                return Err(self.damaged("it ends without its trailer"));
            }
            if !wire.is_empty() {
                return Err(self.damaged("it goes on behind its end"));
            }
            return Ok(false);
        }
        self.plain.drain(..self.at);
        self.at = 0;
        // zstd takes it for an error to be asked for more than nothing sixteen times.
        if wire.is_empty() && !self.holds {
            return Ok(false);
        }
        let end = self.plain.len();
        let mut input = InBuffer::around(wire);
        let hint = {
            let mut output = OutBuffer::around_pos(&mut self.plain, end);
            self.zstd.run(&mut input, &mut output).map_err(|source| WireError::Zstd {
                doing: "decompress",
                window_log: self.limits.window_log,
                source,
            })?
        };
        let taken = input.pos();
        *wire = &wire[taken..];
        self.holds = self.plain.len() == self.plain.capacity();
        self.frame_ended = hint == 0;
        Ok(taken > 0 || self.plain.len() > end || self.frame_ended)
    }

    fn damaged(&self, what: &'static str) -> WireError {
        WireError::Damaged { what, at: self.so_far.rebuilt_bytes }
    }

    fn hash(&mut self, out: &[u8], hashed: &mut usize) {
        self.hasher.update(&out[*hashed..]);
        self.so_far.rebuilt_bytes += (out.len() - *hashed) as u64;
        *hashed = out.len();
    }

    fn operations(&mut self, out: &mut Vec<u8>, hashed: &mut usize, until: usize) -> Result<(), WireError> {
        let plain = std::mem::take(&mut self.plain);
        let result = loop {
            if out.len() >= until || self.at == plain.len() {
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
                out.extend_from_slice(c.take(len as usize)?);
            }
            format::BLOCKS => self.read_blocks(&mut c)?,
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
        let (content, count) = match op & (format::ZERO | format::HELD) {
            0 => (Some(c.array::<PAGE_SIZE>()?), 1),
            format::ZERO => (None, self.number(c, format::MAX_RUN, "an overlong run")?),
            format::HELD => (None, self.number(c, format::MAX_HELD_RUN, "an overlong run")?),
            _ => return Err(Stop::Bad(self.damaged("a page that is zero and held"))),
        };
        let Some(block) = self.blocks.get(place.block) else {
            return Err(Stop::Bad(self.damaged("an unknown RAM block")));
        };
        let end = place.page.checked_add(count).filter(|end| *end <= block.pages);
        let Some(end) = end else { return Err(Stop::Bad(self.damaged("a page outside its RAM block"))) };
        let mut name = (op & format::NAMED != 0).then_some(&*block.name);
        for page in place.page..end {
            if op & format::HELD != 0 {
                let held = Self::held(self.checkpoint.as_mut(), block, Place { page, ..place }).map_err(Stop::Bad)?;
                record::write(out, page, name.take(), Some(&held));
            } else {
                record::write(out, page, name.take(), content);
            }
        }
        if let (Some(checkpoint), Some(content)) = (&mut self.checkpoint, content) {
            checkpoint.keep(place, content);
        }
        self.expected = Some(Place { page: end, ..place });
        Ok(())
    }
}
