//! What a source has sent and its target has not acknowledged, and which of it went by name: for a mirror and a pre-cache alike.

use crate::mirror::{MirrorError, Seq};
use crate::runs::words;
use godwit_content::Sender;
use godwit_units::Bytes;
use std::collections::VecDeque;

/// Memory for what the target is known to hold: 8 GiB of blocks, twice what it tells at the most, so that next to none of that falls out.
pub(crate) const KNOWN_BLOCKS: Bytes = Bytes::mib(16);

/// How a message went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum How {
    /// Its blocks are in it.
    InFull,
    /// Some of them by name: its Ack says whether the target could get them.
    Named,
}

/// Messages on their way.
#[derive(Debug)]
pub(crate) struct Flight {
    sent: Seq,
    acked: Seq,
    /// Number, bytes, and how.
    under_way: VecDeque<(Seq, u64, How)>,
    bytes: u64,
    /// What the target is known to hold, and which names wait for their answers.
    pub names: Sender,
}

impl Flight {
    /// None yet.
    pub fn new() -> Self {
        Self { sent: 0, acked: 0, under_way: VecDeque::new(), bytes: 0, names: Sender::new(KNOWN_BLOCKS) }
    }

    /// The last message's number.
    pub const fn sent(&self) -> Seq {
        self.sent
    }

    /// The last one that was acknowledged.
    pub const fn acked(&self) -> Seq {
        self.acked
    }

    /// Bytes of messages that were not.
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// A message goes.
    pub fn push(&mut self, message: &[u8], how: How) {
        let bytes = message.len() as u64;
        self.sent += 1;
        self.bytes += bytes;
        self.under_way.push_back((self.sent, bytes, how));
    }

    /// An Ack came. The blocks that went by name and that the target could not get.
    ///
    /// # Errors
    /// When it makes no sense.
    pub fn acknowledged(&mut self, body: &[u8]) -> Result<Vec<u64>, MirrorError> {
        let Some(([seq], reply)) = words::<1>(body) else { return Err(MirrorError::Message("a malformed Ack")) };
        if seq > self.sent || seq < self.acked {
            return Err(MirrorError::Message("an Ack of what was not sent"));
        }
        self.acked = seq;
        let mut how = How::InFull;
        while let Some((_, bytes, last)) = self.under_way.front().copied().filter(|(s, ..)| *s <= seq) {
            self.under_way.pop_front();
            if how == How::Named {
                return Err(MirrorError::Message("an Ack that passes over names"));
            }
            self.bytes -= bytes;
            how = last;
        }
        match how {
            How::Named => Ok(self.names.handle(reply)?),
            How::InFull if reply.is_empty() => Ok(vec![]),
            How::InFull => Err(MirrorError::Message("an Ack that asks for what was not named")),
        }
    }
}
