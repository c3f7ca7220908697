//! Numbers of the protocol, by its own names.

/// Longest request believed, in bytes: what QEMU and libnbd take for granted.
pub const MAX_REQUEST: u32 = 32 << 20;
/// Longest option believed, in bytes. An export's name has at most 4096, and a few queries follow it.
pub const MAX_OPTION: u32 = 16 << 10;
/// Requests that may wait for their answers on one connection. QEMU sends at most 16, libnbd's tools 64.
pub const MAX_IN_FLIGHT: usize = 128;
/// Bytes that one connection may hold before it takes no more: payloads of unanswered writes, what unanswered reads will
/// bring, and what waits for the socket. One largest request may come on top. QEMU's 16 requests have 2 MiB each as a
/// rule, so that it does not get here.
pub const MAX_HELD: usize = 64 << 20;
/// Longest export name, in bytes: the protocol's bound for any string.
pub const MAX_NAME: usize = 4096;
/// Pieces in which a client takes the answer to one read: [`MAX_REQUEST`] in sectors of 512 bytes. Without a bound, a
/// server could answer in pieces of one byte, each of which costs more to remember than to send.
pub const MAX_PIECES: usize = 65_536;
/// Extents in one answer that a client believes, as many as QEMU's server sends.
pub const MAX_EXTENTS: usize = 131_072;

pub(crate) const NBDMAGIC: u64 = 0x4e42_444d_4147_4943;
pub(crate) const IHAVEOPT: u64 = 0x4948_4156_454f_5054;
pub(crate) const OPTION_REPLY: u64 = 0x0003_e889_0455_65a9;
pub(crate) const REQUEST: u32 = 0x2560_9513;
pub(crate) const SIMPLE_REPLY: u32 = 0x6744_6698;
pub(crate) const STRUCTURED_REPLY: u32 = 0x668e_33ef;

/// Bytes of a simple reply before its data.
pub(crate) const SIMPLE_HEADER: usize = 16;
/// Bytes of a chunk before what it carries.
pub(crate) const CHUNK_HEADER: usize = 20;

pub(crate) const FLAG_FIXED_NEWSTYLE: u16 = 1;
pub(crate) const FLAG_NO_ZEROES: u16 = 2;

pub(crate) const OPT_EXPORT_NAME: u32 = 1;
pub(crate) const OPT_ABORT: u32 = 2;
pub(crate) const OPT_LIST: u32 = 3;
pub(crate) const OPT_STARTTLS: u32 = 5;
pub(crate) const OPT_INFO: u32 = 6;
pub(crate) const OPT_GO: u32 = 7;
pub(crate) const OPT_STRUCTURED_REPLY: u32 = 8;
pub(crate) const OPT_LIST_META_CONTEXT: u32 = 9;
pub(crate) const OPT_SET_META_CONTEXT: u32 = 10;

pub(crate) const REP_ACK: u32 = 1;
pub(crate) const REP_SERVER: u32 = 2;
pub(crate) const REP_INFO: u32 = 3;
pub(crate) const REP_META_CONTEXT: u32 = 4;
pub(crate) const REP_ERR_UNSUP: u32 = (1 << 31) | 1;
pub(crate) const REP_ERR_INVALID: u32 = (1 << 31) | 3;
pub(crate) const REP_ERR_TLS_REQD: u32 = (1 << 31) | 5;
pub(crate) const REP_ERR_UNKNOWN: u32 = (1 << 31) | 6;
pub(crate) const REP_ERR_TOO_BIG: u32 = (1 << 31) | 9;

pub(crate) const INFO_EXPORT: u16 = 0;
pub(crate) const INFO_NAME: u16 = 1;
pub(crate) const INFO_DESCRIPTION: u16 = 2;
pub(crate) const INFO_BLOCK_SIZE: u16 = 3;

pub(crate) const TRANSMIT_HAS_FLAGS: u16 = 1;
pub(crate) const TRANSMIT_READ_ONLY: u16 = 1 << 1;
pub(crate) const TRANSMIT_FLUSH: u16 = 1 << 2;
pub(crate) const TRANSMIT_FUA: u16 = 1 << 3;
pub(crate) const TRANSMIT_TRIM: u16 = 1 << 5;
pub(crate) const TRANSMIT_WRITE_ZEROES: u16 = 1 << 6;
pub(crate) const TRANSMIT_DF: u16 = 1 << 7;
pub(crate) const TRANSMIT_MULTI_CONN: u16 = 1 << 8;
pub(crate) const TRANSMIT_CACHE: u16 = 1 << 10;
pub(crate) const TRANSMIT_FAST_ZERO: u16 = 1 << 11;

pub(crate) const CMD_READ: u16 = 0;
pub(crate) const CMD_WRITE: u16 = 1;
pub(crate) const CMD_DISC: u16 = 2;
pub(crate) const CMD_FLUSH: u16 = 3;
pub(crate) const CMD_TRIM: u16 = 4;
pub(crate) const CMD_CACHE: u16 = 5;
pub(crate) const CMD_WRITE_ZEROES: u16 = 6;
pub(crate) const CMD_BLOCK_STATUS: u16 = 7;

pub(crate) const CMD_FLAG_FUA: u16 = 1;
pub(crate) const CMD_FLAG_NO_HOLE: u16 = 1 << 1;
pub(crate) const CMD_FLAG_DF: u16 = 1 << 2;
pub(crate) const CMD_FLAG_REQ_ONE: u16 = 1 << 3;
pub(crate) const CMD_FLAG_FAST_ZERO: u16 = 1 << 4;

pub(crate) const CHUNK_DONE: u16 = 1;
pub(crate) const CHUNK_NONE: u16 = 0;
pub(crate) const CHUNK_DATA: u16 = 1;
pub(crate) const CHUNK_HOLE: u16 = 2;
pub(crate) const CHUNK_STATUS: u16 = 5;
pub(crate) const CHUNK_ERROR: u16 = (1 << 15) | 1;

pub(crate) const STATE_HOLE: u32 = 1;
pub(crate) const STATE_ZERO: u32 = 2;

/// The one context that we have.
pub(crate) const ALLOCATION: &[u8] = b"base:allocation";
/// Its number in replies.
pub(crate) const ALLOCATION_ID: u32 = 1;

/// Errors that the protocol knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Errno {
    /// Not allowed.
    Perm,
    /// The medium failed.
    Io,
    /// Out of memory.
    NoMemory,
    /// The request makes no sense.
    Invalid,
    /// There is no room.
    NoSpace,
    /// The answer does not fit into one piece.
    Overflow,
    /// The server cannot do this.
    NotSupported,
    /// The server is ending.
    Shutdown,
}

impl Errno {
    /// What a medium's error is to a client: an emulator pauses its guest where there is no room, and has it see other errors.
    #[must_use]
    pub fn of(error: &std::io::Error) -> Self {
        use std::io::ErrorKind::{FileTooLarge, QuotaExceeded, StorageFull};
        if matches!(error.kind(), StorageFull | QuotaExceeded | FileTooLarge) { Self::NoSpace } else { Self::Io }
    }

    /// On the wire.
    #[must_use]
    pub const fn code(self) -> u32 {
        match self {
            Self::Perm => 1,
            Self::Io => 5,
            Self::NoMemory => 12,
            Self::Invalid => 22,
            Self::NoSpace => 28,
            Self::Overflow => 75,
            Self::NotSupported => 95,
            Self::Shutdown => 108,
        }
    }

    /// From the wire. What the protocol does not know counts as [`Errno::Invalid`], as it asks.
    #[must_use]
    pub const fn from_code(code: u32) -> Self {
        match code {
            1 => Self::Perm,
            5 => Self::Io,
            12 => Self::NoMemory,
            28 => Self::NoSpace,
            75 => Self::Overflow,
            95 => Self::NotSupported,
            108 => Self::Shutdown,
            _ => Self::Invalid,
        }
    }
}
