//! QEMU's reverse channel, from the destination to the source, split into messages.
//!
//! A node relays all of it but [`SHUT`]: that one ends the source's migration for good, so it is part of the
//! hand-off. What is relayed must go at once: the source may wait for it.

use crate::cursor::{Cursor, Stop};
use crate::disks::Feedback;

/// The destination has started, or failed: u32, 0 for success. The source's QEMU ends its migration on it.
pub const SHUT: u16 = 1;
/// Answer to a PING: u32.
pub const PONG: u16 = 2;
/// Post-copy asks for pages of the same block: u64 offset, u32 length.
pub const REQUEST_PAGES: u16 = 3;
/// Post-copy asks for pages: u64 offset, u32 length, name of the block.
pub const REQUEST_PAGES_OF: u16 = 4;
/// Which pages came before post-copy broke: the name of the block, then the only data without a length in its header.
pub const RECEIVED_BITMAP: u16 = 5;
/// Post-copy may go on: u32.
pub const RESUME_ACK: u16 = 6;
/// The destination is ready for the switch-over (QEMU 8.1 and newer).
pub const SWITCHOVER_ACK: u16 = 7;

/// Not QEMU's but the decoder's, on the same way back: so many groups of references are done. u64.
pub const FEEDBACK_PAST: u16 = 0xfd01;
/// The decoder's: this group is to be sent in full. u64.
pub const FEEDBACK_MISSING: u16 = 0xfd02;

/// Longest payload believed, in bytes: QEMU's own limit.
pub const MAX_PAYLOAD: u16 = 512;
/// Longest bitmap believed, in bytes: for a block of 1 TiB.
pub const MAX_BITMAP: u64 = 32 << 20;

/// A message of the return path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// One of the constants here, or what a newer QEMU invented.
    pub kind: u16,
    /// What its header counts.
    pub payload: Vec<u8>,
    /// What follows a [`RECEIVED_BITMAP`]: size, bitmap and end mark. Empty for all others.
    pub bitmap: Vec<u8>,
}

impl Message {
    /// Whether it ends the source's migration.
    #[must_use]
    pub fn is_shut(&self) -> bool {
        self.kind == SHUT
    }

    /// What a SHUT says: 0 is success. `None` for other messages.
    #[must_use]
    pub fn shut_value(&self) -> Option<u32> {
        let value = self.payload.first_chunk().map(|v| u32::from_be_bytes(*v));
        value.filter(|_| self.is_shut())
    }

    /// As the decoder says it.
    #[must_use]
    pub fn from_feedback(feedback: Feedback) -> Self {
        let (kind, number) = match feedback {
            Feedback::Past(groups) => (FEEDBACK_PAST, groups),
            Feedback::Missing(group) => (FEEDBACK_MISSING, group),
        };
        Self { kind, payload: number.to_be_bytes().to_vec(), bitmap: vec![] }
    }

    /// Whether the decoder says it, and not QEMU: then it is for the encoder. What QEMU says with such a number is not passed on.
    #[must_use]
    pub fn is_feedback(&self) -> bool {
        matches!(self.kind, FEEDBACK_PAST | FEEDBACK_MISSING)
    }

    /// What the decoder says. `None` for other messages, and for one that is none.
    #[must_use]
    pub fn feedback(&self) -> Option<Feedback> {
        let number = u64::from_be_bytes(self.payload.as_slice().try_into().ok()?);
        match self.kind {
            FEEDBACK_PAST => Some(Feedback::Past(number)),
            FEEDBACK_MISSING => Some(Feedback::Missing(number)),
            _ => None,
        }
    }

    /// Appends it as QEMU reads it.
    ///
    /// # Panics
    /// With a payload longer than [`MAX_PAYLOAD`].
    pub fn encode(&self, out: &mut Vec<u8>) {
        assert!(
            self.payload.len() <= usize::from(MAX_PAYLOAD),
            "QEMU reads no payload of {} bytes",
            self.payload.len()
        );
        out.extend_from_slice(&self.kind.to_be_bytes());
        out.extend_from_slice(&(self.payload.len() as u16).to_be_bytes());
        out.extend_from_slice(&self.payload);
        out.extend_from_slice(&self.bitmap);
    }
}

/// What comes back is not a return path.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum ReturnPathError {
    /// Longer than any message of QEMU's.
    #[error(
        "a message of kind {kind} and {len} bytes on QEMU's return path, where {limit} are the most: this is not a \
         return path, or QEMU is newer than what is known here"
    )]
    TooLong {
        /// Its kind.
        kind: u16,
        /// Its length.
        len: u64,
        /// The bound.
        limit: u64,
    },
}

/// The splitter: bytes in, messages out.
#[derive(Debug, Default)]
pub struct ReturnPath {
    buffer: Vec<u8>,
    at: usize,
}

impl ReturnPath {
    /// At the beginning of a return path.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The SHUT of success, for a node that tells it in its QEMU's place.
    #[must_use]
    pub const fn shut_frame() -> [u8; 8] {
        [0, 1, 0, 4, 0, 0, 0, 0]
    }

    /// Takes bytes, cut anywhere. To be polled dry after each.
    ///
    /// # Errors
    /// [`ReturnPathError::TooLong`], when more than one message can have was pushed and never polled.
    pub fn push(&mut self, bytes: &[u8]) -> Result<(), ReturnPathError> {
        self.buffer.drain(..self.at);
        self.at = 0;
        let len = (self.buffer.len() + bytes.len()) as u64;
        let limit = 2 * MAX_BITMAP;
        if len > limit {
            return Err(ReturnPathError::TooLong { kind: 0, len, limit });
        }
        self.buffer.extend_from_slice(bytes);
        Ok(())
    }

    /// What has come for the source's QEMU, as it is sent: not the decoder's words, which are for the source's node, and not SHUT, which
    /// that one says itself. Polls dry.
    ///
    /// # Errors
    /// As [`Self::poll`].
    pub fn for_source(&mut self) -> Result<Vec<u8>, ReturnPathError> {
        let mut out = vec![];
        while let Some(message) = self.poll()? {
            if !message.is_shut() && !message.is_feedback() {
                message.encode(&mut out);
            }
        }
        Ok(out)
    }

    /// The next whole message.
    ///
    /// # Errors
    /// [`ReturnPathError::TooLong`] for a message that cannot be QEMU's.
    pub fn poll(&mut self) -> Result<Option<Message>, ReturnPathError> {
        match message(&self.buffer[self.at..]) {
            Ok((message, n)) => {
                self.at += n;
                Ok(Some(message))
            }
            Err(Stop::More) => Ok(None),
            Err(Stop::Bad(e)) => Err(e),
        }
    }
}

fn message(bytes: &[u8]) -> Result<(Message, usize), Stop<ReturnPathError>> {
    let mut c = Cursor::new(bytes);
    let (kind, len) = (c.u16()?, c.u16()?);
    if len > MAX_PAYLOAD {
        let (len, limit) = (u64::from(len), u64::from(MAX_PAYLOAD));
        return Err(Stop::Bad(ReturnPathError::TooLong { kind, len, limit }));
    }
    let payload = c.take(usize::from(len))?.to_vec();
    let before = c.at();
    if kind == RECEIVED_BITMAP {
        let len = c.u64()?;
        if len > MAX_BITMAP {
            return Err(Stop::Bad(ReturnPathError::TooLong { kind, len, limit: MAX_BITMAP }));
        }
        c.take(len as usize)?;
        c.u64()?;
    }
    let bitmap = c.seen()[before..].to_vec();
    Ok((Message { kind, payload, bitmap }, c.at()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(bytes: &[u8], cut: usize) -> Vec<Message> {
        let mut path = ReturnPath::new();
        let mut messages = vec![];
        for piece in bytes.chunks(cut) {
            path.push(piece).unwrap();
            while let Some(message) = path.poll().unwrap() {
                messages.push(message);
            }
        }
        messages
    }

    #[test]
    fn messages_are_found_at_any_cut_and_encode_to_what_they_were() {
        let mut bytes = vec![0, 2, 0, 4, 0, 0, 0, 9];
        bytes.extend_from_slice(&[0, 5, 0, 4, 3, b'r', b'a', b'm', 0, 0, 0, 0, 0, 0, 0, 8]);
        bytes.extend_from_slice(&[0xa5; 16]);
        bytes.extend_from_slice(&ReturnPath::shut_frame());
        for cut in 1..bytes.len() {
            let messages = split(&bytes, cut);
            assert_eq!(messages.iter().map(|m| m.kind).collect::<Vec<_>>(), [PONG, RECEIVED_BITMAP, SHUT]);
            assert_eq!(messages[2].shut_value(), Some(0));
            assert_eq!(messages[0].shut_value(), None);
            let mut again = vec![];
            messages.iter().for_each(|m| m.encode(&mut again));
            assert_eq!(again, bytes);
        }
    }

    #[test]
    fn what_the_decoder_says_comes_through_between_qemus_messages() {
        let said = [Feedback::Past(7), Feedback::Missing(u64::MAX)];
        let mut bytes = vec![0, 2, 0, 4, 0, 0, 0, 9];
        said.iter().for_each(|feedback| Message::from_feedback(*feedback).encode(&mut bytes));
        let messages = split(&bytes, 5);
        assert_eq!(messages.iter().map(Message::is_feedback).collect::<Vec<_>>(), [false, true, true]);
        assert_eq!(messages.iter().filter_map(Message::feedback).collect::<Vec<_>>(), said);
        let short = Message { kind: FEEDBACK_PAST, payload: vec![1], bitmap: vec![] };
        assert!(short.is_feedback() && short.feedback().is_none());
    }

    #[test]
    fn lengths_beyond_qemus_are_refused_before_anything_is_kept_for_them() {
        let mut path = ReturnPath::new();
        path.push(&[0, 2, 2, 1]).unwrap();
        assert_eq!(path.poll(), Err(ReturnPathError::TooLong { kind: PONG, len: 513, limit: 512 }));
        let mut path = ReturnPath::new();
        path.push(&[0, 5, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]).unwrap();
        assert!(path.poll().is_err());
    }
}
