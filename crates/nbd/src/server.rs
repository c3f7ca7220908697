//! One connection, as its server sees it.

use crate::flight::Flight;
use crate::handshake::{Agreed, Handshake, Step};
use crate::proto::*;
use bytes::{Buf, BufMut, Bytes, BytesMut};

/// A disk that clients may choose.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Export {
    /// Its name.
    pub name: String,
    /// Its size in bytes.
    pub size: u64,
    /// The size and alignment that requests had better have, in bytes. A power of two.
    pub preferred_block: u32,
    /// Whether writes are refused from the beginning.
    pub read_only: bool,
}

/// Names a request until it is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Cookie(pub u64);

/// What a client asks for. Offsets and lengths lie within the export; lengths are at most [`MAX_REQUEST`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// To be given with the answer.
    pub cookie: Cookie,
    /// What is asked.
    pub command: Command,
}

/// A command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// Read; answered by [`Reply::Data`] that covers exactly this.
    Read {
        /// Where.
        offset: u64,
        /// How much; more than 0.
        length: u32,
    },
    /// Write.
    Write {
        /// Where.
        offset: u64,
        /// What.
        data: Bytes,
        /// Durable before the answer.
        fua: bool,
    },
    /// All that was answered becomes durable.
    Flush,
    /// The contents do not matter any more.
    Trim {
        /// Where.
        offset: u64,
        /// How much.
        length: u32,
        /// Durable before the answer.
        fua: bool,
    },
    /// Zeroes.
    WriteZeroes {
        /// Where.
        offset: u64,
        /// How much.
        length: u32,
        /// Durable before the answer.
        fua: bool,
        /// The room has to stay allocated.
        no_hole: bool,
        /// Only if it is quicker than writing: else [`Errno::NotSupported`].
        fast: bool,
    },
    /// It will be read soon.
    Cache {
        /// Where.
        offset: u64,
        /// How much.
        length: u32,
    },
    /// Which parts are holes; answered by [`Reply::Status`] from `offset` on.
    BlockStatus {
        /// From where.
        offset: u64,
        /// How far at the most.
        length: u32,
        /// One extent is enough.
        one: bool,
    },
}

/// A part of a read's answer, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece {
    /// Contents.
    Data(Bytes),
    /// So many zero bytes.
    Hole(u32),
}

/// A part of the disk that is alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// How long.
    pub length: u32,
    /// Nothing is allocated there; it reads as zeroes.
    pub hole: bool,
}

/// The answer to a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// Done.
    Done,
    /// Could not be done.
    Error(Errno),
    /// What was read.
    Data(Vec<Piece>),
    /// What is where.
    Status(Vec<Extent>),
}

/// What became of [`Server::fill`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Filled {
    /// The read is answered.
    Done,
    /// A part of it is; the rest comes by further calls, or by [`Server::reply`].
    Part,
    /// Nothing has changed, and this is not answered yet.
    Not {
        /// Where it begins.
        offset: u64,
        /// How long it is; 0: there is no such request.
        length: u32,
    },
}

/// A write of which the header has come, and not yet all that is to be written; or what is left of it after [`Server::take_begun`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BegunWrite<'a> {
    /// Where what is left begins.
    pub offset: u64,
    /// How much is left.
    pub length: u32,
    /// Durable before the answer.
    pub fua: bool,
    /// What has come of that.
    pub come: &'a [u8],
}

/// A client that does not speak the protocol. The connection is of no use any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProtocolError {
    /// In the handshake.
    #[error("NBD handshake: {0}")]
    Handshake(&'static str),
    /// A request without its mark: the two sides are out of step.
    #[error("an NBD request does not begin with its mark")]
    OutOfStep,
    /// A request for more than [`MAX_REQUEST`].
    #[error("an NBD request for {0} bytes; the most are {MAX_REQUEST}")]
    TooLong(u32),
}

#[derive(Debug)]
enum Stage {
    Handshake(Handshake),
    /// The client waits for TLS to begin.
    Tls(Handshake),
    Transmission,
    Closed,
}

/// What has to be known of a request until it is answered.
#[derive(Clone, Copy, Debug)]
struct Pending {
    /// The client's own name for it.
    handle: u64,
    /// What is not answered yet.
    offset: u64,
    length: u32,
    /// Its reads and statuses are in chunks.
    kind: u16,
    /// A read that must not be split.
    whole: bool,
    one: bool,
    /// Bytes that it holds or will bring, counted against [`MAX_HELD`].
    weight: usize,
    /// Calls of [`Server::reply`] before it is answered: one, and another for each part of a write that was taken before the last.
    awaited: u32,
    /// What became of the first of these parts that failed.
    failed: Option<Errno>,
}

/// What is still to come of a write that is taken in parts. It has no header any more.
#[derive(Clone, Copy, Debug)]
struct Rest {
    cookie: Cookie,
    offset: u64,
    /// More than 0.
    length: u32,
    fua: bool,
}

/// The machine of one connection.
///
/// Feed it with [`Server::receive`], take requests with [`Server::poll_request`], answer with [`Server::reply`] in any
/// order, and send what [`Server::transmit`] gives; then poll again, before waiting for anything. Stop reading while
/// [`Server::wants_input`] says no.
#[derive(Debug)]
pub struct Server {
    exports: Vec<Export>,
    stage: Stage,
    agreed: Agreed,
    chosen: Option<usize>,
    input: BytesMut,
    /// Where `input` begins, if it is in the middle of a write.
    rest: Option<Rest>,
    output: BytesMut,
    pending: Flight<Pending>,
    /// The weight of all that is pending.
    weight: usize,
}

impl Server {
    /// A client has connected. The greeting is ready to be sent.
    #[must_use]
    pub fn new(exports: Vec<Export>) -> Self {
        let mut output = BytesMut::new();
        let handshake = Handshake::new(&mut output);
        Self {
            exports,
            stage: Stage::Handshake(handshake),
            agreed: Agreed::default(),
            chosen: None,
            input: BytesMut::new(),
            rest: None,
            output,
            pending: Flight::new(),
            weight: 0,
        }
    }

    /// A client that has to begin TLS before it is told anything: see [`Server::wants_tls`].
    #[must_use]
    pub fn with_tls(exports: Vec<Export>) -> Self {
        let mut it = Self::new(exports);
        if let Stage::Handshake(handshake) = &mut it.stage {
            handshake.require_tls();
        }
        it
    }

    /// Whether TLS begins once [`Server::transmit`] was sent. What comes from then on is TLS's; the shell says
    /// [`Server::tls_started`] and goes on with what was in it.
    #[must_use]
    pub const fn wants_tls(&self) -> bool {
        matches!(self.stage, Stage::Tls(_))
    }

    /// TLS has begun.
    pub fn tls_started(&mut self) {
        self.stage = match std::mem::replace(&mut self.stage, Stage::Closed) {
            Stage::Tls(mut handshake) => {
                handshake.tls_started();
                Stage::Handshake(handshake)
            }
            other => other,
        };
    }

    /// Where the shell reads into: appended to what was not taken yet. Call [`Server::poll_request`] afterwards.
    pub fn input(&mut self) -> &mut BytesMut {
        &mut self.input
    }

    /// The same for bytes that lie elsewhere.
    pub fn receive(&mut self, bytes: &[u8]) {
        self.input.extend_from_slice(bytes);
    }

    /// Whether more input may be read now.
    #[must_use]
    pub fn wants_input(&self) -> bool {
        !self.is_full() && !self.is_closed()
    }

    fn is_full(&self) -> bool {
        self.pending.is_full() || self.weight + self.output.len() >= MAX_HELD
    }

    /// Bytes of a request that has come in part which are still to come. A shell that reads no more than these finds the next
    /// request at the beginning of its room, and a large write is never copied.
    #[must_use]
    pub fn rest_of_request(&self) -> usize {
        if let Some(rest) = self.rest {
            return (rest.length as usize).saturating_sub(self.input.len());
        }
        let head = self.head().filter(|_| matches!(self.stage, Stage::Transmission));
        head.map_or(0, |head| (Head::LENGTH + head.payload() as usize).saturating_sub(self.input.len()))
    }

    /// Of the next request; not in the middle of a write.
    fn head(&self) -> Option<Head> {
        Head::of(&self.input).filter(|head| head.mark == REQUEST)
    }

    /// The write that comes next, if it has come in part and will be given as it is: for a shell that brings the rest of it to the
    /// disk by itself, and says so by [`Server::take_begun`]. Whatever else is to be said of it is said by [`Server::poll_request`]
    /// when it has come.
    #[must_use]
    pub fn begun_write(&self) -> Option<BegunWrite<'_>> {
        if !matches!(self.stage, Stage::Transmission) || self.is_full() {
            return None;
        }
        let (before, offset, length, fua) = match self.rest {
            Some(Rest { offset, length, fua, .. }) => (0, offset, length, fua),
            None => {
                let head = self.head().filter(|head| head.payload() <= MAX_REQUEST)?;
                let Ok(Command::Write { offset, fua, .. }) = self.understand(head, Bytes::new()) else { return None };
                (Head::LENGTH, offset, head.length, fua)
            }
        };
        let come = self.input.get(before..).filter(|come| come.len() < length as usize)?;
        Some(BegunWrite { offset, length, fua, come })
    }

    /// The first `length` bytes of [`Server::begun_write`] are in the shell's hands: what had come of them here, and what had not and never
    /// will. If that is all of it, the next request is to follow; else its rest is, as another begun write, or from
    /// [`Server::poll_request`], under the same cookie. Each of these parts is answered as if it were a request, and the client
    /// is told of the first error, or of none, once all are. `None`, and nothing has changed: there is no such part, or more than that has
    /// come.
    pub fn take_begun(&mut self, length: u32) -> Option<Cookie> {
        let write = self
            .begun_write()
            .filter(|write| (write.come.len()..=write.length as usize).contains(&(length as usize)))?;
        let BegunWrite { offset, length: all, fua, .. } = write;
        let cookie = match self.rest.take() {
            Some(rest) => rest.cookie,
            None => {
                let head = self.head()?;
                self.insert(head)
            }
        };
        self.input.clear();
        if length < all {
            let (offset, length) = (offset + u64::from(length), all - length);
            self.rest = Some(Rest { cookie, offset, length, fua });
            if let Some(pending) = self.pending.get_mut(cookie.0) {
                pending.awaited += 1;
            }
        }
        Some(cookie)
    }

    /// Nothing more comes from the client, though it has not said so: [`Server::is_closed`] from now on. What has come in part is never given;
    /// a write of which a part was taken fails with [`Errno::Shutdown`].
    pub fn input_ended(&mut self) {
        self.stage = Stage::Closed;
        if let Some(Rest { cookie, .. }) = self.rest.take() {
            self.reply(cookie, Reply::Error(Errno::Shutdown));
        }
    }

    /// Whether the client is done, by its word or because it sends no more: nothing more comes from it. What it asked for before is still
    /// to be answered, as the protocol has it.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        matches!(self.stage, Stage::Closed)
    }

    /// The export that the client chose, once it has.
    #[must_use]
    pub fn chosen(&self) -> Option<&Export> {
        self.chosen.map(|i| &self.exports[i])
    }

    /// Requests not answered yet.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.pending.len()
    }

    /// What is to be sent; the shell takes it from the front.
    pub fn transmit(&mut self) -> &mut BytesMut {
        &mut self.output
    }

    /// The next request, if one has come whole and there is room for its answer. So `None` means "not before something
    /// happens": poll again when bytes came, when a request was answered, **and when output was taken**: requests that came
    /// long ago may have waited for that alone, with a client that sends nothing more.
    ///
    /// # Errors
    /// When the client does not speak the protocol. The connection is closed then.
    pub fn poll_request(&mut self) -> Result<Option<Request>, ProtocolError> {
        self.advance().inspect_err(|_| self.stage = Stage::Closed)
    }

    fn advance(&mut self) -> Result<Option<Request>, ProtocolError> {
        loop {
            match &mut self.stage {
                Stage::Closed | Stage::Tls(_) => return Ok(None),
                Stage::Handshake(handshake) => {
                    match handshake.advance(&mut self.input, &self.exports, &mut self.output)? {
                        Step::More => return Ok(None),
                        Step::Abort => self.stage = Stage::Closed,
                        // Whoever stands in between could have put it there, to be taken for the client's own.
                        Step::StartTls if !self.input.is_empty() => {
                            return Err(ProtocolError::Handshake("the client sent more before TLS had begun"));
                        }
                        Step::StartTls => {
                            self.stage = match std::mem::replace(&mut self.stage, Stage::Closed) {
                                Stage::Handshake(handshake) => Stage::Tls(handshake),
                                other => other,
                            };
                        }
                        Step::Go(index) => {
                            self.agreed = handshake.agreed.clone();
                            self.chosen = Some(index);
                            self.stage = Stage::Transmission;
                        }
                    }
                }
                Stage::Transmission => {
                    if self.is_full() {
                        return Ok(None);
                    }
                    match self.request()? {
                        Taken::Nothing => return Ok(None),
                        Taken::Answered => {}
                        Taken::Request(request) => return Ok(Some(request)),
                    }
                }
            }
        }
    }

    fn request(&mut self) -> Result<Taken, ProtocolError> {
        if let Some(Rest { cookie, offset, length, fua }) = self.rest {
            if self.input.len() < length as usize {
                return Ok(Taken::Nothing);
            }
            self.rest = None;
            let data = self.input.split_to(length as usize).freeze();
            return Ok(Taken::Request(Request { cookie, command: Command::Write { offset, data, fua } }));
        }
        let Some(head) = Head::of(&self.input) else { return Ok(Taken::Nothing) };
        if head.mark != REQUEST {
            return Err(ProtocolError::OutOfStep);
        }
        let payload = head.payload() as usize;
        if head.payload() > MAX_REQUEST {
            return Err(ProtocolError::TooLong(head.length));
        }
        if self.input.len() < Head::LENGTH + payload {
            // Grown once, not by doubling: the rest of a large write is on its way.
            self.input.reserve(Head::LENGTH + payload - self.input.len());
            return Ok(Taken::Nothing);
        }
        self.input.advance(Head::LENGTH);
        let data = self.input.split_to(payload).freeze();
        if head.kind == CMD_DISC {
            self.stage = Stage::Closed;
            return Ok(Taken::Answered);
        }
        let understood = self.understand(head, data);
        let cookie = self.insert(head);
        match understood {
            Ok(command) => Ok(Taken::Request(Request { cookie, command })),
            Err(errno) => {
                self.reply(cookie, Reply::Error(errno));
                Ok(Taken::Answered)
            }
        }
    }

    /// It is under way from now on.
    fn insert(&mut self, head: Head) -> Cookie {
        let Head { flags, kind, handle, offset, length, .. } = head;
        let weight = if kind == CMD_READ { length.min(MAX_REQUEST) } else { head.payload() } as usize;
        self.weight += weight;
        let (whole, one) = (flags & CMD_FLAG_DF != 0, flags & CMD_FLAG_REQ_ONE != 0);
        Cookie(self.pending.insert(Pending {
            handle,
            offset,
            length,
            kind,
            whole,
            one,
            weight,
            awaited: 1,
            failed: None,
        }))
    }

    fn understand(&self, head: Head, data: Bytes) -> Result<Command, Errno> {
        let Head { flags, kind, offset, length, .. } = head;
        let export = self.chosen().ok_or(Errno::Invalid)?;
        if flags & !self.flags_of(kind) != 0 {
            return Err(Errno::Invalid);
        }
        let writes = matches!(kind, CMD_WRITE | CMD_TRIM | CMD_WRITE_ZEROES);
        let inside = offset.checked_add(u64::from(length)).is_some_and(|end| end <= export.size);
        if writes && export.read_only {
            return Err(Errno::Perm);
        }
        if kind != CMD_FLUSH {
            if !inside {
                // A trim needs no room.
                return Err(if writes && kind != CMD_TRIM { Errno::NoSpace } else { Errno::Invalid });
            }
            if length == 0 || (length > MAX_REQUEST && matches!(kind, CMD_READ)) {
                return Err(Errno::Invalid);
            }
        }
        let fua = flags & CMD_FLAG_FUA != 0;
        Ok(match kind {
            CMD_READ => Command::Read { offset, length },
            CMD_WRITE => Command::Write { offset, data, fua },
            CMD_FLUSH => Command::Flush,
            CMD_TRIM => Command::Trim { offset, length, fua },
            CMD_WRITE_ZEROES => Command::WriteZeroes {
                offset,
                length,
                fua,
                no_hole: flags & CMD_FLAG_NO_HOLE != 0,
                fast: flags & CMD_FLAG_FAST_ZERO != 0,
            },
            CMD_CACHE => Command::Cache { offset, length },
            CMD_BLOCK_STATUS if self.agreed.allocation.is_some_and(|e| self.chosen == Some(e)) => {
                Command::BlockStatus { offset, length, one: flags & CMD_FLAG_REQ_ONE != 0 }
            }
            _ => return Err(Errno::Invalid),
        })
    }

    /// The flags that a command may carry. FUA is taken with any, and means nothing where nothing is written.
    fn flags_of(&self, kind: u16) -> u16 {
        CMD_FLAG_FUA
            | match kind {
                CMD_READ if self.agreed.structured => CMD_FLAG_DF,
                CMD_WRITE_ZEROES => CMD_FLAG_NO_HOLE | CMD_FLAG_FAST_ZERO,
                CMD_BLOCK_STATUS => CMD_FLAG_REQ_ONE,
                _ => 0,
            }
    }

    /// Answers a request. An answer that does not fit the request becomes [`Errno::Io`]: better no contents than wrong ones.
    pub fn reply(&mut self, cookie: Cookie, reply: Reply) {
        // An answer to what is not pending is a bug of the shell, and there is nobody to send it to.
        let Some(pending) = self.pending.get_mut(cookie.0) else { return };
        if let Reply::Error(errno) = reply {
            pending.failed.get_or_insert(errno);
        }
        pending.awaited -= 1;
        if pending.awaited > 0 {
            return;
        }
        let Some(pending) = self.pending.remove(cookie.0) else { return };
        self.weight -= pending.weight;
        let reply = fit(pending.failed.map_or(reply, Reply::Error), &pending);
        if self.agreed.structured && matches!(pending.kind, CMD_READ | CMD_BLOCK_STATUS) {
            self.structured(&pending, reply);
        } else {
            self.simple(&pending, reply);
        }
    }

    /// Answers a read, or its next part, with contents put where they are sent from: no copy of them is made. `put` is
    /// given where to read, and room for at most `most` bytes, and says how many it has put there; 0: it cannot now.
    ///
    /// An answer that the client cannot take in parts is given room for all of it, whatever `most` says, and nothing is
    /// sent when it was not filled.
    pub fn fill(&mut self, cookie: Cookie, most: u32, put: impl FnOnce(u64, &mut [u8]) -> usize) -> Filled {
        let Some((pending, room, whole)) = self.next_part(cookie, most) else {
            return Filled::Not { offset: 0, length: 0 };
        };
        let start = self.output.len();
        let header = self.read_header();
        self.output.resize(start + header + room as usize, 0);
        let put = put(pending.offset, &mut self.output[start + header..]).min(room as usize);
        if put == 0 || (whole && put < room as usize) {
            self.output.truncate(start);
            return Filled::Not { offset: pending.offset, length: pending.length };
        }
        self.output.truncate(start + header + put);
        // At most `room`, which is one.
        let length = put as u32;
        self.put_read_header(start, &pending, length);
        self.answered(cookie, length)
    }

    /// As [`Server::fill`], with contents that the shell sends itself, from where they lie: `send` is given where that is, how
    /// much, and all that goes before it. Either it has taken charge of both, in this order, and nothing of them is in
    /// [`Server::transmit`] any more; or it says no, and nothing has changed.
    pub fn pass(&mut self, cookie: Cookie, most: u32, send: impl FnOnce(u64, u32, &[u8]) -> bool) -> Filled {
        let Some((pending, length, _)) = self.next_part(cookie, most) else {
            return Filled::Not { offset: 0, length: 0 };
        };
        let start = self.output.len();
        let not = Filled::Not { offset: pending.offset, length: pending.length };
        if length > most {
            return not;
        }
        self.output.resize(start + self.read_header(), 0);
        self.put_read_header(start, &pending, length);
        if !send(pending.offset, length, &self.output) {
            self.output.truncate(start);
            return not;
        }
        self.output.clear();
        self.answered(cookie, length)
    }

    /// What is not answered yet of a read: where it begins, and its length.
    #[must_use]
    pub fn rest_of(&mut self, cookie: Cookie) -> Option<(u64, u32)> {
        self.next_part(cookie, u32::MAX).map(|(pending, ..)| (pending.offset, pending.length))
    }

    /// A read, how much of it is answered next, and whether no less will do.
    fn next_part(&mut self, cookie: Cookie, most: u32) -> Option<(Pending, u32, bool)> {
        let structured = self.agreed.structured;
        let pending = *self.pending.get_mut(cookie.0).filter(|p| p.kind == CMD_READ)?;
        let whole = !structured || pending.whole;
        Some((pending, if whole { pending.length } else { pending.length.min(most.max(1)) }, whole))
    }

    const fn read_header(&self) -> usize {
        if self.agreed.structured { CHUNK_HEADER + 8 } else { SIMPLE_HEADER }
    }

    /// Into the room that was made for it.
    fn put_read_header(&mut self, start: usize, pending: &Pending, length: u32) {
        let header = self.read_header();
        let mut out = &mut self.output[start..start + header];
        if self.agreed.structured {
            let done = if length == pending.length { CHUNK_DONE } else { 0 };
            chunk(&mut out, pending.handle, done, CHUNK_DATA, 8 + length);
            out.put_u64(pending.offset);
        } else {
            out.put_u32(SIMPLE_REPLY);
            out.put_u32(0);
            out.put_u64(pending.handle);
        }
    }

    /// So much of a read has been answered.
    fn answered(&mut self, cookie: Cookie, length: u32) -> Filled {
        let Some(pending) = self.pending.get_mut(cookie.0) else { return Filled::Done };
        pending.offset += u64::from(length);
        pending.length -= length;
        pending.weight -= length as usize;
        self.weight -= length as usize;
        if pending.length > 0 {
            return Filled::Part;
        }
        self.pending.remove(cookie.0);
        Filled::Done
    }

    fn simple(&mut self, pending: &Pending, reply: Reply) {
        self.output.put_u32(SIMPLE_REPLY);
        self.output.put_u32(if let Reply::Error(errno) = reply { errno.code() } else { 0 });
        self.output.put_u64(pending.handle);
        if let Reply::Data(pieces) = reply {
            for piece in pieces {
                match piece {
                    Piece::Data(data) => self.output.put_slice(&data),
                    Piece::Hole(length) => self.output.put_bytes(0, length as usize),
                }
            }
        }
    }

    fn structured(&mut self, pending: &Pending, reply: Reply) {
        match reply {
            Reply::Done => self.chunk(pending, CHUNK_DONE, CHUNK_NONE, 0),
            Reply::Error(errno) => {
                self.chunk(pending, CHUNK_DONE, CHUNK_ERROR, 6);
                self.output.put_u32(errno.code());
                self.output.put_u16(0);
            }
            Reply::Data(pieces) => {
                let mut at = pending.offset;
                let last = pieces.len().saturating_sub(1);
                for (i, piece) in pieces.into_iter().enumerate() {
                    let done = if i == last { CHUNK_DONE } else { 0 };
                    match piece {
                        Piece::Data(data) => {
                            let length = u32::try_from(data.len()).unwrap_or(u32::MAX);
                            self.chunk(pending, done, CHUNK_DATA, 8 + length);
                            self.output.put_u64(at);
                            self.output.put_slice(&data);
                            at += u64::from(length);
                        }
                        Piece::Hole(length) => {
                            self.chunk(pending, done, CHUNK_HOLE, 12);
                            self.output.put_u64(at);
                            self.output.put_u32(length);
                            at += u64::from(length);
                        }
                    }
                }
            }
            Reply::Status(extents) => {
                let length = u32::try_from(4 + 8 * extents.len()).unwrap_or(u32::MAX);
                self.chunk(pending, CHUNK_DONE, CHUNK_STATUS, length);
                self.output.put_u32(ALLOCATION_ID);
                for extent in extents {
                    self.output.put_u32(extent.length);
                    self.output.put_u32(if extent.hole { STATE_HOLE | STATE_ZERO } else { 0 });
                }
            }
        }
    }

    fn chunk(&mut self, pending: &Pending, flags: u16, kind: u16, length: u32) {
        chunk(&mut self.output, pending.handle, flags, kind, length);
    }
}

fn chunk(out: &mut impl BufMut, handle: u64, flags: u16, kind: u16, length: u32) {
    out.put_u32(STRUCTURED_REPLY);
    out.put_u16(flags);
    out.put_u16(kind);
    out.put_u64(handle);
    out.put_u32(length);
}

/// What a request begins with.
#[derive(Clone, Copy, Debug)]
struct Head {
    mark: u32,
    flags: u16,
    kind: u16,
    handle: u64,
    offset: u64,
    length: u32,
}

impl Head {
    const LENGTH: usize = 28;

    /// At the beginning of what has come.
    fn of(input: &[u8]) -> Option<Self> {
        let mut from = input.get(..Self::LENGTH)?;
        Some(Self {
            mark: from.get_u32(),
            flags: from.get_u16(),
            kind: from.get_u16(),
            handle: from.get_u64(),
            offset: from.get_u64(),
            length: from.get_u32(),
        })
    }

    /// Bytes that come with it.
    const fn payload(&self) -> u32 {
        if self.kind == CMD_WRITE { self.length } else { 0 }
    }
}

enum Taken {
    Nothing,
    Answered,
    Request(Request),
}

/// Makes an answer fit its request, or an error of it.
fn fit(reply: Reply, pending: &Pending) -> Reply {
    match (pending.kind, reply) {
        (_, Reply::Error(errno)) => Reply::Error(errno),
        (CMD_READ, Reply::Data(pieces)) => {
            let total: u64 = pieces
                .iter()
                .map(|p| match p {
                    Piece::Data(data) => data.len() as u64,
                    Piece::Hole(length) => u64::from(*length),
                })
                .sum();
            if total != u64::from(pending.length) {
                return Reply::Error(Errno::Io);
            }
            let pieces = merged(pieces);
            if pending.whole && pieces.len() > 1 {
                Reply::Data(vec![Piece::Data(joined(&pieces))])
            } else {
                Reply::Data(pieces)
            }
        }
        (CMD_BLOCK_STATUS, Reply::Status(extents)) => {
            let mut extents = clipped(extents, pending.length);
            extents.truncate(if pending.one { 1 } else { MAX_EXTENTS });
            if extents.is_empty() { Reply::Error(Errno::Io) } else { Reply::Status(extents) }
        }
        (CMD_READ | CMD_BLOCK_STATUS, _) => Reply::Error(Errno::Io),
        (_, _) => Reply::Done,
    }
}

/// Without empty pieces, and holes beside each other as one.
fn merged(pieces: Vec<Piece>) -> Vec<Piece> {
    let mut out: Vec<Piece> = Vec::with_capacity(pieces.len());
    for piece in pieces {
        match (out.last_mut(), piece) {
            (_, Piece::Hole(0)) => {}
            (_, Piece::Data(data)) if data.is_empty() => {}
            (Some(Piece::Hole(before)), Piece::Hole(length)) => *before += length,
            (_, piece) => out.push(piece),
        }
    }
    out
}

/// Without empty extents, those alike beside each other as one, and no further than was asked.
fn clipped(extents: Vec<Extent>, length: u32) -> Vec<Extent> {
    let mut left = length;
    let mut out: Vec<Extent> = vec![];
    for extent in extents {
        let length = extent.length.min(left);
        left -= length;
        match out.last_mut() {
            _ if length == 0 => {}
            Some(before) if before.hole == extent.hole => before.length += length,
            _ => out.push(Extent { length, ..extent }),
        }
    }
    out
}

fn joined(pieces: &[Piece]) -> Bytes {
    let mut all = BytesMut::new();
    for piece in pieces {
        match piece {
            Piece::Data(data) => all.put_slice(data),
            Piece::Hole(length) => all.put_bytes(0, *length as usize),
        }
    }
    all.freeze()
}
