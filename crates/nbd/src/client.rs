//! One connection, as its client sees it.
//!
//! The mirror image of [`Server`](crate::Server): the same [`Command`]s go in, the same [`Reply`]s come out, in whichever order
//! the server answers.
//!
//! # What can go wrong
//!
//! *The server answers with something else*: pieces outside the read, twice the same piece, a piece missing, an answer
//! to nothing. Nothing of it is handed on; the connection is of no use any more ([`ClientError`]).
//!
//! *The server names sizes*: every length is compared with what was asked, before anything is kept for it.
//!
//! *The connection ends*: what is in flight may have been done or not. The shell knows its cookies.

use crate::client_handshake::Handshake;
use crate::flight::Flight;
use crate::proto::*;
use crate::server::{Command, Cookie, Extent, Piece, Reply};
use bytes::{Buf, BufMut, Bytes, BytesMut};

/// Sizes of requests, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Blocks {
    /// Offsets and lengths are multiples of it; a power of two.
    pub minimum: u32,
    /// Smaller requests cost the server more than they need.
    pub preferred: u32,
    /// Longest read or write; at most [`MAX_REQUEST`].
    pub maximum: u32,
}

/// What the server said of the export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Remote {
    /// Its size in bytes, below 2^63.
    pub size: u64,
    /// How requests may be.
    pub blocks: Blocks,
    pub(crate) flags: u16,
    pub(crate) structured: bool,
    pub(crate) context: Option<u32>,
}

impl Remote {
    const fn has(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }

    /// Writes are refused.
    #[must_use]
    pub const fn is_read_only(&self) -> bool {
        self.has(TRANSMIT_READ_ONLY)
    }

    /// Block status may be asked for.
    #[must_use]
    pub const fn has_block_status(&self) -> bool {
        self.context.is_some()
    }

    /// Replies come in pieces, so that holes need not travel.
    #[must_use]
    pub const fn is_structured(&self) -> bool {
        self.structured
    }

    /// A flush on one connection covers what was answered on the others.
    #[must_use]
    pub const fn has_multi_conn(&self) -> bool {
        self.has(TRANSMIT_MULTI_CONN)
    }
}

/// What happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The handshake is done; requests are taken.
    Ready(Remote),
    /// A request was answered. A read's pieces are in order and cover it; extents are in order, from its offset on. A hole
    /// reads as zeroes for certain; what the server only calls unallocated is not called a hole.
    Answered(Cookie, Reply),
}

/// A server that does not speak the protocol, or not with us. The connection is of no use any more.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ClientError {
    /// The greeting is something else's.
    #[error("what listens there is no NBD server; check the address")]
    NotNbd,
    /// The handshake failed.
    #[error("NBD handshake: {0}; the server is too old, or broken")]
    Handshake(&'static str),
    /// The server does not give the export.
    #[error("the NBD server refuses the export `{export}` (error {code}): {said}")]
    Refused {
        /// The export.
        export: String,
        /// The protocol's number, without its highest bit.
        code: u32,
        /// The server's words; may be empty.
        said: String,
    },
    /// A reply without its mark, or to nothing: the two sides are out of step.
    #[error("an NBD reply belongs to no request")]
    OutOfStep,
    /// A reply that does not fit its request.
    #[error("an NBD reply does not fit its request: {0}")]
    Reply(&'static str),
}

/// A request that was not sent. The connection goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotSent {
    /// The handshake is not done, or the connection is over.
    #[error("the NBD connection takes no requests: not yet, or no more")]
    NotReady,
    /// [`MAX_IN_FLIGHT`] requests or [`MAX_HELD`] bytes wait: try again after the next answer, or when output was taken.
    #[error("too much is in flight on this NBD connection; wait for an answer")]
    Full,
    /// Past the end, of no length, longer than [`Blocks::maximum`], or not aligned to [`Blocks::minimum`].
    #[error("{length} bytes at {offset} are not a request that this NBD export takes")]
    Range {
        /// Where.
        offset: u64,
        /// How much.
        length: usize,
    },
    /// The server did not offer this.
    #[error("the NBD server does not offer {0}")]
    NotOffered(&'static str),
}

#[derive(Debug)]
enum Stage {
    Handshake(Box<Handshake>),
    Transmission(Remote),
    Closed,
}

/// What a request still waits for.
#[derive(Debug)]
struct Awaited {
    offset: u64,
    length: u32,
    kind: u16,
    weight: usize,
    /// What has come of a read.
    pieces: Vec<(u64, Piece)>,
    extents: Vec<Extent>,
    error: Option<Errno>,
}

/// The machine of one connection.
///
/// Feed it with [`Client::receive`], take what happened with [`Client::poll_event`], ask with [`Client::request`], send what
/// [`Client::transmit`] gives. Poll before sending: in the handshake it is the polling that gives something to send.
#[derive(Debug)]
pub struct Client {
    stage: Stage,
    want_structured: bool,
    input: BytesMut,
    output: BytesMut,
    awaited: Flight<Awaited>,
    /// Of reads and writes not answered yet, in bytes.
    weight: usize,
}

impl Client {
    /// Connected to a server. The empty name is its default export.
    ///
    /// # Panics
    /// When the name is longer than [`MAX_NAME`].
    #[must_use]
    pub fn new(export: &str) -> Self {
        assert!(export.len() <= MAX_NAME, "an NBD export's name has at most {MAX_NAME} bytes");
        Self {
            stage: Stage::Handshake(Box::new(Handshake::new(export))),
            want_structured: true,
            input: BytesMut::new(),
            output: BytesMut::new(),
            awaited: Flight::new(),
            weight: 0,
        }
    }

    /// The same without structured replies: for a server that is wrong about them.
    #[must_use]
    pub fn simple(export: &str) -> Self {
        Self { want_structured: false, ..Self::new(export) }
    }

    /// Where the shell reads into: appended to what was not taken yet. Call [`Client::poll_event`] afterwards, until `None`.
    pub fn input(&mut self) -> &mut BytesMut {
        &mut self.input
    }

    /// The same for bytes that lie elsewhere.
    pub fn receive(&mut self, bytes: &[u8]) {
        self.input.extend_from_slice(bytes);
    }

    /// What is to be sent; the shell takes it from the front.
    pub fn transmit(&mut self) -> &mut BytesMut {
        &mut self.output
    }

    /// The export, once the handshake is done.
    #[must_use]
    pub fn remote(&self) -> Option<&Remote> {
        if let Stage::Transmission(remote) = &self.stage { Some(remote) } else { None }
    }

    /// Requests not answered yet.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.awaited.len()
    }

    /// Whether a request may be sent now.
    #[must_use]
    pub fn wants_requests(&self) -> bool {
        self.remote().is_some() && !self.is_full()
    }

    fn is_full(&self) -> bool {
        self.awaited.is_full() || self.weight + self.output.len() >= MAX_HELD
    }

    /// Says goodbye: nothing can be asked any more, and what was not answered may not be.
    pub fn disconnect(&mut self) {
        if self.remote().is_some() {
            self.put_request(CMD_DISC, 0, 0, 0, 0);
        }
        self.stage = Stage::Closed;
    }

    /// Asks for something; the answer will come with this cookie.
    ///
    /// # Errors
    /// [`NotSent`], when nothing was sent and why.
    pub fn request(&mut self, command: Command) -> Result<Cookie, NotSent> {
        let remote = *self.remote().ok_or(NotSent::NotReady)?;
        if self.is_full() {
            return Err(NotSent::Full);
        }
        let (kind, flags, offset, length, data) = wire(&command, &remote)?;
        let weight = if matches!(kind, CMD_READ | CMD_WRITE) { length as usize } else { 0 };
        let (pieces, extents) = (vec![], vec![]);
        let awaited = Awaited { offset, length, kind, weight, pieces, extents, error: None };
        let cookie = self.awaited.insert(awaited);
        self.weight += weight;
        self.put_request(kind, flags, cookie, offset, length);
        self.output.put_slice(data);
        Ok(Cookie(cookie))
    }

    fn put_request(&mut self, kind: u16, flags: u16, cookie: u64, offset: u64, length: u32) {
        self.output.put_u32(REQUEST);
        self.output.put_u16(flags);
        self.output.put_u16(kind);
        self.output.put_u64(cookie);
        self.output.put_u64(offset);
        self.output.put_u32(length);
    }

    /// What happened next, if it has come whole.
    ///
    /// # Errors
    /// When the server does not speak the protocol. Nothing more comes then.
    pub fn poll_event(&mut self) -> Result<Option<Event>, ClientError> {
        self.advance().inspect_err(|_| self.stage = Stage::Closed)
    }

    fn advance(&mut self) -> Result<Option<Event>, ClientError> {
        let remote = match &mut self.stage {
            Stage::Closed => return Ok(None),
            Stage::Handshake(handshake) => {
                let done = handshake.advance(&mut self.input, &mut self.output, self.want_structured)?;
                if let Some(remote) = done {
                    self.stage = Stage::Transmission(remote);
                }
                return Ok(done.map(Event::Ready));
            }
            Stage::Transmission(remote) => *remote,
        };
        loop {
            let taken = match self.input.first_chunk::<4>().map(|m| u32::from_be_bytes(*m)) {
                None => return Ok(None),
                Some(SIMPLE_REPLY) => self.simple_reply(&remote)?,
                Some(STRUCTURED_REPLY) if remote.structured => self.chunk(&remote)?,
                Some(_) => return Err(ClientError::OutOfStep),
            };
            match taken {
                Taken::Nothing => return Ok(None),
                Taken::Part => {}
                Taken::Whole(cookie) => return self.answered(cookie).map(Some),
            }
        }
    }

    fn simple_reply(&mut self, remote: &Remote) -> Result<Taken, ClientError> {
        let Some(mut header) = self.input.get(4..16) else { return Ok(Taken::Nothing) };
        let (error, cookie) = (header.get_u32(), header.get_u64());
        let awaited = self.awaited.get_mut(cookie).ok_or(ClientError::OutOfStep)?;
        let reads = matches!(awaited.kind, CMD_READ | CMD_BLOCK_STATUS);
        if reads && remote.structured {
            return Err(ClientError::Reply("it should be structured"));
        }
        let data = if error == 0 && awaited.kind == CMD_READ { awaited.length as usize } else { 0 };
        if self.input.len() < 16 + data {
            self.input.reserve(16 + data - self.input.len());
            return Ok(Taken::Nothing);
        }
        self.input.advance(16);
        if error != 0 {
            awaited.error = Some(Errno::from_code(error));
        } else if data > 0 {
            awaited.pieces.push((awaited.offset, Piece::Data(self.input.split_to(data).freeze())));
        }
        Ok(Taken::Whole(cookie))
    }

    fn chunk(&mut self, remote: &Remote) -> Result<Taken, ClientError> {
        let Some(mut header) = self.input.get(4..20) else { return Ok(Taken::Nothing) };
        let (flags, kind, cookie, length) = (header.get_u16(), header.get_u16(), header.get_u64(), header.get_u32());
        let awaited = self.awaited.get_mut(cookie).ok_or(ClientError::OutOfStep)?;
        if length as usize > awaited.longest(kind) {
            return Err(ClientError::Reply("a chunk is too long"));
        }
        if self.input.len() < 20 + length as usize {
            self.input.reserve(20 + length as usize - self.input.len());
            return Ok(Taken::Nothing);
        }
        self.input.advance(20);
        awaited.take(kind, self.input.split_to(length as usize).freeze(), remote)?;
        if flags & CHUNK_DONE == 0 {
            return Ok(Taken::Part);
        }
        Ok(Taken::Whole(cookie))
    }

    fn answered(&mut self, cookie: u64) -> Result<Event, ClientError> {
        let awaited = self.awaited.remove(cookie).ok_or(ClientError::OutOfStep)?;
        self.weight -= awaited.weight;
        Ok(Event::Answered(Cookie(cookie), awaited.finish()?))
    }
}

enum Taken {
    Nothing,
    Part,
    Whole(u64),
}

impl Awaited {
    /// The longest chunk that can be an answer to this.
    fn longest(&self, kind: u16) -> usize {
        match kind {
            CHUNK_NONE => 0,
            CHUNK_DATA => 8 + self.length as usize,
            CHUNK_HOLE => 12,
            CHUNK_STATUS => 4 + 8 * MAX_EXTENTS,
            // An error: its number, a message, and where.
            _ => 6 + MAX_NAME + 8,
        }
    }

    fn take(&mut self, kind: u16, mut data: Bytes, remote: &Remote) -> Result<(), ClientError> {
        match (kind, self.kind) {
            (CHUNK_NONE, _) => {}
            (CHUNK_DATA, CMD_READ) if data.len() > 8 => {
                let at = data.get_u64();
                self.piece(at, Piece::Data(data))?;
            }
            (CHUNK_HOLE, CMD_READ) if data.len() == 12 => {
                let at = data.get_u64();
                self.piece(at, Piece::Hole(data.get_u32()))?;
            }
            (CHUNK_STATUS, CMD_BLOCK_STATUS) if data.len() >= 12 && data.len() % 8 == 4 => {
                if Some(data.get_u32()) != remote.context {
                    return Err(ClientError::Reply("block status of a context that was not asked for"));
                }
                if !self.extents.is_empty() {
                    return Err(ClientError::Reply("block status comes twice"));
                }
                self.status(data)?;
            }
            (kind, _) if kind >> 15 == 1 => {
                let code = data.try_get_u32().map_err(|_| ClientError::Reply("an error without its number"))?;
                // The first is the cause of the others.
                self.error.get_or_insert(Errno::from_code(code));
            }
            _ => return Err(ClientError::Reply("a chunk of the wrong kind or length")),
        }
        Ok(())
    }

    fn piece(&mut self, at: u64, piece: Piece) -> Result<(), ClientError> {
        let length = size(&piece);
        let end = self.offset + u64::from(self.length);
        if length == 0 || at < self.offset || at > end || length > end - at {
            return Err(ClientError::Reply("a piece lies outside the read"));
        }
        if self.pieces.len() == MAX_PIECES {
            return Err(ClientError::Reply("a read comes in too many pieces"));
        }
        self.pieces.push((at, piece));
        Ok(())
    }

    fn status(&mut self, mut data: Bytes) -> Result<(), ClientError> {
        let mut left = self.length;
        while data.has_remaining() {
            let (length, state) = (data.get_u32(), data.get_u32());
            if length == 0 || left == 0 {
                return Err(ClientError::Reply("an extent is empty, or lies past what was asked for"));
            }
            // The last may reach further than was asked.
            let length = length.min(left);
            left -= length;
            self.extents.push(Extent { length, hole: state & STATE_ZERO != 0 });
        }
        Ok(())
    }

    fn finish(mut self) -> Result<Reply, ClientError> {
        if let Some(errno) = self.error {
            return Ok(Reply::Error(errno));
        }
        match self.kind {
            CMD_READ => {
                // In any order, but each byte once.
                self.pieces.sort_by_key(|(at, _)| *at);
                let mut next = self.offset;
                for (at, piece) in &self.pieces {
                    if *at != next {
                        return Err(ClientError::Reply("pieces of a read overlap, or one is missing"));
                    }
                    next += size(piece);
                }
                if next != self.offset + u64::from(self.length) {
                    return Err(ClientError::Reply("the end of a read is missing"));
                }
                Ok(Reply::Data(self.pieces.into_iter().map(|(_, piece)| piece).collect()))
            }
            CMD_BLOCK_STATUS if self.extents.is_empty() => Err(ClientError::Reply("block status without an extent")),
            CMD_BLOCK_STATUS => Ok(Reply::Status(self.extents)),
            _ => Ok(Reply::Done),
        }
    }
}

fn size(piece: &Piece) -> u64 {
    match piece {
        Piece::Data(data) => data.len() as u64,
        Piece::Hole(length) => u64::from(*length),
    }
}

type Wire<'a> = (u16, u16, u64, u32, &'a [u8]);

/// A command as it is sent, if the server takes it: kind, flags, offset, length, payload.
fn wire<'a>(command: &'a Command, remote: &Remote) -> Result<Wire<'a>, NotSent> {
    let offered = |flag, what| if remote.has(flag) { Ok(()) } else { Err(NotSent::NotOffered(what)) };
    let writable = || if remote.is_read_only() { Err(NotSent::NotOffered("writing")) } else { Ok(()) };
    let fua = |wanted: bool| {
        if wanted { offered(TRANSMIT_FUA, "FUA").map(|()| CMD_FLAG_FUA) } else { Ok(0) }
    };
    let flag = |wanted: bool, flag| if wanted { flag } else { 0 };
    let (kind, flags, offset, length, data): (u16, u16, u64, usize, &[u8]) = match command {
        Command::Read { offset, length } => (CMD_READ, 0, *offset, *length as usize, &[]),
        Command::Write { offset, data, fua: durable } => {
            writable()?;
            (CMD_WRITE, fua(*durable)?, *offset, data.len(), data)
        }
        Command::Flush => {
            offered(TRANSMIT_FLUSH, "flushing")?;
            return Ok((CMD_FLUSH, 0, 0, 0, &[]));
        }
        Command::Trim { offset, length, fua: durable } => {
            writable()?;
            offered(TRANSMIT_TRIM, "trimming")?;
            (CMD_TRIM, fua(*durable)?, *offset, *length as usize, &[])
        }
        Command::WriteZeroes { offset, length, fua: durable, no_hole, fast } => {
            writable()?;
            offered(TRANSMIT_WRITE_ZEROES, "writing zeroes")?;
            if *fast {
                offered(TRANSMIT_FAST_ZERO, "fast zeroes")?;
            }
            let how = flag(*no_hole, CMD_FLAG_NO_HOLE) | flag(*fast, CMD_FLAG_FAST_ZERO);
            (CMD_WRITE_ZEROES, fua(*durable)? | how, *offset, *length as usize, &[])
        }
        Command::Cache { offset, length } => {
            offered(TRANSMIT_CACHE, "caching")?;
            (CMD_CACHE, 0, *offset, *length as usize, &[])
        }
        Command::BlockStatus { offset, length, one } => {
            if !remote.has_block_status() {
                return Err(NotSent::NotOffered("block status"));
            }
            (CMD_BLOCK_STATUS, flag(*one, CMD_FLAG_REQ_ONE), *offset, *length as usize, &[])
        }
    };
    let range = NotSent::Range { offset, length };
    let wire_length = u32::try_from(length).map_err(|_| range)?;
    let inside = offset.checked_add(length as u64).is_some_and(|end| end <= remote.size);
    let aligned = (offset | length as u64).is_multiple_of(u64::from(remote.blocks.minimum));
    let short = wire_length <= remote.blocks.maximum || !matches!(kind, CMD_READ | CMD_WRITE);
    if inside && aligned && short && length > 0 { Ok((kind, flags, offset, wire_length, data)) } else { Err(range) }
}
