//! What link layers say to each other, and the bounds of it. Integers are big-endian.
//!
//! The first QUIC stream of a connection carries [`Hello`] and its answer [`Welcome`]. Every further bidirectional one
//! attaches a stream: [`Attach`], its answer, then frames in both directions.

use crate::resume::{Frame, MAX_CHUNK};
use crate::{Lane, Priority};
use bytes::{Buf, BufMut, Bytes, BytesMut};
use quinn::{ReadExactError, RecvStream};
use thiserror::Error;

/// Agreed on in the handshake: a peer of another version fails there.
pub const ALPN: &[u8] = b"godwit-link/1";

/// The longest greeting of a stream, in bytes.
pub const MAX_HELLO: usize = 64 << 10;

/// How many streams and requests a session may have open, of each side. What a node does at once is tens.
pub const MAX_STREAMS: usize = 1024;

/// Why a connection was closed, on the wire.
pub mod code {
    /// The session is closed.
    pub const CLOSED: u32 = 1;
    /// The process that you mean is gone.
    pub const RESTARTED: u32 = 2;
    /// The session was kept, but not so long.
    pub const EXPIRED: u32 = 3;
    /// You are not a node.
    pub const ROLE: u32 = 4;
    /// You broke the protocol.
    pub const PROTOCOL: u32 = 5;
    /// A newer connection took this one's place.
    pub const REPLACED: u32 = 6;
    /// No room for another session.
    pub const BUSY: u32 = 7;
}

/// What could not be read.
#[derive(Debug, Error)]
pub enum ReadFailure {
    /// The connection, or the QUIC stream, ended.
    #[error("{0}")]
    Lost(String),
    /// The peer said what is not in the protocol.
    #[error("{0}")]
    Bad(String),
}

impl From<ReadExactError> for ReadFailure {
    fn from(e: ReadExactError) -> Self {
        Self::Lost(e.to_string())
    }
}

/// Where words come from: a QUIC stream; in tests, bytes that nobody sent.
pub trait Source {
    /// Fills `buffer`.
    async fn fill(&mut self, buffer: &mut [u8]) -> Result<(), ReadExactError>;
}

impl Source for RecvStream {
    async fn fill(&mut self, buffer: &mut [u8]) -> Result<(), ReadExactError> {
        self.read_exact(buffer).await
    }
}

impl Source for &[u8] {
    async fn fill(&mut self, buffer: &mut [u8]) -> Result<(), ReadExactError> {
        let Some((front, rest)) = self.split_at_checked(buffer.len()) else {
            return Err(ReadExactError::FinishedEarly(self.len()));
        };
        buffer.copy_from_slice(front);
        *self = rest;
        Ok(())
    }
}

/// Reads what a peer may have sent at each of the places where it speaks first; what was understood is written again. For the
/// tests that feed it bytes that no peer would send.
#[doc(hidden)]
pub async fn read_anything(bytes: &[u8]) -> Vec<Bytes> {
    let mut understood = vec![];
    understood.extend(Hello::read(&mut &*bytes).await.map(|hello| hello.encode()));
    understood.extend(Welcome::read(&mut &*bytes).await.map(|welcome| welcome.encode()));
    understood.extend(Attach::read(&mut &*bytes).await.map(|attach| attach.encode()));
    let mut rest = bytes;
    while let Ok(Some(read)) = read_head(&mut rest).await {
        understood.push(match read {
            Head::Whole(frame) => head(&frame),
            Head::Data { length, .. } => {
                let Some((data, behind)) = rest.split_at_checked(length) else { break };
                rest = behind;
                Bytes::copy_from_slice(data)
            }
        });
    }
    understood
}

async fn exact<const N: usize>(from: &mut impl Source) -> Result<[u8; N], ReadFailure> {
    let mut buffer = [0; N];
    from.fill(&mut buffer).await?;
    Ok(buffer)
}

fn bad<T>(why: impl Into<String>) -> Result<T, ReadFailure> {
    Err(ReadFailure::Bad(why.into()))
}

/// The initiator's first words on every connection.
#[derive(Debug)]
pub struct Hello {
    pub session: u128,
    pub incarnation: u64,
    /// The peer's incarnation where it is known; 0 for a new session.
    pub peer: u64,
    /// The streams of this lane that the initiator opened and still has.
    pub live: Vec<u64>,
}

/// The acceptor's answer.
#[derive(Debug)]
pub struct Welcome {
    pub incarnation: u64,
    /// As in [`Hello`].
    pub live: Vec<u64>,
}

fn put_ids(out: &mut BytesMut, ids: &[u64]) {
    out.put_u32(ids.len() as u32);
    ids.iter().for_each(|id| out.put_u64(*id));
}

async fn read_ids(from: &mut impl Source) -> Result<Vec<u64>, ReadFailure> {
    let count = u32::from_be_bytes(exact(from).await?) as usize;
    if count > MAX_STREAMS {
        return bad(format!("{count} open streams, over {MAX_STREAMS}"));
    }
    let mut ids = Vec::with_capacity(count);
    for _ in 0..count {
        ids.push(u64::from_be_bytes(exact(from).await?));
    }
    Ok(ids)
}

impl Hello {
    pub fn encode(&self) -> Bytes {
        let mut out = BytesMut::new();
        out.put_u128(self.session);
        out.put_u64(self.incarnation);
        out.put_u64(self.peer);
        put_ids(&mut out, &self.live);
        out.freeze()
    }

    pub async fn read(from: &mut impl Source) -> Result<Self, ReadFailure> {
        let mut head = &exact::<32>(from).await?[..];
        let (session, incarnation, peer) = (head.get_u128(), head.get_u64(), head.get_u64());
        Ok(Self { session, incarnation, peer, live: read_ids(from).await? })
    }
}

impl Welcome {
    pub fn encode(&self) -> Bytes {
        let mut out = BytesMut::new();
        out.put_u64(self.incarnation);
        put_ids(&mut out, &self.live);
        out.freeze()
    }

    pub async fn read(from: &mut impl Source) -> Result<Self, ReadFailure> {
        Ok(Self { incarnation: u64::from_be_bytes(exact(from).await?), live: read_ids(from).await? })
    }
}

/// What a stream is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The application's.
    Stream,
    /// A request and its answer.
    Request,
}

/// The opener's first words on every QUIC stream that carries a stream of ours.
#[derive(Debug)]
pub struct Attach {
    pub id: u64,
    pub kind: Kind,
    pub priority: Priority,
    /// Where the opener's incoming direction goes on.
    pub received: u64,
    pub hello: Bytes,
}

impl Attach {
    pub fn encode(&self) -> Bytes {
        let mut out = BytesMut::with_capacity(22 + self.hello.len());
        out.put_u64(self.id);
        out.put_u8(matches!(self.kind, Kind::Request).into());
        out.put_u8(self.priority.number());
        out.put_u64(self.received);
        out.put_u32(self.hello.len() as u32);
        out.put_slice(&self.hello);
        out.freeze()
    }

    pub async fn read(from: &mut impl Source) -> Result<Self, ReadFailure> {
        let mut head = &exact::<22>(from).await?[..];
        let id = head.get_u64();
        let kind = match head.get_u8() {
            0 => Kind::Stream,
            1 => Kind::Request,
            other => return bad(format!("stream of kind {other}")),
        };
        let priority = head.get_u8();
        let Some(priority) = Priority::ALL.into_iter().find(|p| p.number() == priority) else {
            return bad(format!("priority {priority}"));
        };
        let received = head.get_u64();
        let length = head.get_u32() as usize;
        if length > MAX_HELLO {
            return bad(format!("a hello of {length} bytes, over {MAX_HELLO}"));
        }
        let mut hello = vec![0; length];
        from.fill(&mut hello).await?;
        Ok(Self { id, kind, priority, received, hello: hello.into() })
    }
}

const DATA: u8 = 1;
const ACK: u8 = 2;
const FIN: u8 = 3;
const RESET: u8 = 4;

/// A frame's head; the bytes of data follow it on the wire and need no copy.
pub fn head(frame: &Frame) -> Bytes {
    let mut out = BytesMut::with_capacity(17);
    match frame {
        Frame::Data { offset, data } => {
            out.put_u8(DATA);
            out.put_u64(*offset);
            out.put_u32(data.len() as u32);
        }
        Frame::Ack { received, consumed } => {
            out.put_u8(ACK);
            out.put_u64(*received);
            out.put_u64(*consumed);
        }
        Frame::Fin { end } => {
            out.put_u8(FIN);
            out.put_u64(*end);
        }
        Frame::Reset { code } => {
            out.put_u8(RESET);
            out.put_u32(*code);
        }
    }
    out.freeze()
}

/// What a frame's head says.
#[derive(Debug)]
pub enum Head {
    /// So many bytes follow.
    Data { offset: u64, length: usize },
    /// The whole frame.
    Whole(Frame),
}

/// Reads a frame's head; `None` at the end of the QUIC stream.
pub async fn read_head(from: &mut impl Source) -> Result<Option<Head>, ReadFailure> {
    let mut kind = [0];
    match from.fill(&mut kind).await {
        Err(ReadExactError::FinishedEarly(_)) => return Ok(None),
        other => other?,
    }
    Ok(Some(match kind[0] {
        DATA => {
            let mut head = &exact::<12>(from).await?[..];
            let (offset, length) = (head.get_u64(), head.get_u32() as usize);
            if length > MAX_CHUNK {
                return bad(format!("a frame of {length} bytes, over {MAX_CHUNK}"));
            }
            Head::Data { offset, length }
        }
        ACK => {
            let mut head = &exact::<16>(from).await?[..];
            Head::Whole(Frame::Ack { received: head.get_u64(), consumed: head.get_u64() })
        }
        FIN => Head::Whole(Frame::Fin { end: u64::from_be_bytes(exact(from).await?) }),
        RESET => Head::Whole(Frame::Reset { code: u32::from_be_bytes(exact(from).await?) }),
        other => return bad(format!("frame of type {other}")),
    }))
}

/// The lane's number, for logs.
pub const fn name(lane: Lane) -> &'static str {
    match lane {
        Lane::Control => "control",
        Lane::Disk => "disk",
        Lane::Memory => "memory",
    }
}
