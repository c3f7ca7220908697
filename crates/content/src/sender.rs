//! The sender's side: which blocks are named, which go in full.
//!
//! It remembers marks, not contents: what the receiver could not get is read again by whoever sends, as it is then, and goes in full. So a
//! sender needs no copies of what is on its way, and a resend is never older than what it replaces.
//!
//! A mark is remembered when its block is sent, before it has arrived: frames come in order, so whatever names the block
//! comes after it.

use crate::digest::{BLOCK, Digest, Key, Mark, is_zero};
use crate::error::ContentError;
use crate::frame::{FULL, Greeting, MOST_BLOCKS, NAMED, ZERO, parse_greeting};
use crate::table::Table;
use godwit_units::Bytes;
use std::collections::VecDeque;

/// Names on their way that were not answered: 64 MiB of blocks. If the receiver has lost all of them, so much comes a second time; it is
/// more than any path holds of names that are worth it.
const MOST_UNSURE: usize = 16 << 10;
/// After so many answered names it is looked at whether they are worth it.
const LOOK: usize = 256;

/// What was sent, and how.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Figures {
    /// Blocks that went by name.
    pub named: u64,
    /// Of those, blocks that the receiver could not get.
    pub missed: u64,
    /// How often all marks were forgotten, because too many were of no use.
    pub forgotten: u64,
}

/// A frame on its way: its first block, and the names in it.
#[derive(Debug)]
struct Flight {
    first: u64,
    names: Vec<(u16, Mark)>,
}

/// A session's sender.
#[derive(Debug)]
pub struct Sender {
    key: Option<Key>,
    memory: usize,
    known: Table<()>,
    flight: VecDeque<Flight>,
    unsure: usize,
    /// Answered since the last look, and of these missed.
    answered: usize,
    missed: usize,
    figures: Figures,
}

impl Sender {
    /// Bytes of memory for each block that is known to be there.
    pub const COST: usize = Table::<()>::COST;

    /// A session that begins. Its marks take this much memory at the most; it names nothing before the receiver has told its key.
    #[must_use]
    pub fn new(memory: Bytes) -> Self {
        Self {
            key: None,
            memory: usize::try_from(memory.0).unwrap_or(usize::MAX),
            // Nothing is known before the receiver has told its key.
            known: Table::new(0),
            flight: VecDeque::new(),
            unsure: 0,
            answered: 0,
            missed: 0,
            figures: Figures::default(),
        }
    }

    /// Whether the receiver has told its key, so that blocks can be named.
    #[must_use]
    pub const fn is_ready(&self) -> bool {
        self.key.is_some()
    }

    /// Names on their way that were not answered yet.
    #[must_use]
    pub const fn unsure(&self) -> usize {
        self.unsure
    }

    /// How it went so far.
    #[must_use]
    pub const fn figures(&self) -> Figures {
        self.figures
    }

    /// The receiver says what it holds.
    ///
    /// # Errors
    /// When that makes no sense.
    pub fn greet(&mut self, message: &[u8]) -> Result<(), ContentError> {
        match parse_greeting(message)? {
            Greeting::Key(key) => {
                // The old one goes before there is a new one: twice the memory was not granted.
                self.known = Table::new(0);
                self.known = Table::new(self.memory);
                self.key = Some(key);
            }
            Greeting::Marks(_) if self.key.is_none() => {
                return Err(ContentError::Greeting("marks before their key"));
            }
            Greeting::Marks(marks) => {
                // They come latest first; the latest is to be the last that falls out.
                marks.iter().rev().for_each(|mark| self.known.insert(*mark, ()));
            }
        }
        Ok(())
    }

    /// A run of blocks is to be sent, which begins at `first` in the words of whoever sends. `Some`: as this frame, to which a reply will come.
    /// `None`: the receiver has nothing of it, as far as is known; it goes as it always did, and without a reply. It has to be sent,
    /// and in order: the receiver is believed to have it from now on.
    ///
    /// # Panics
    /// In debug builds, for a run that no frame has room for.
    pub fn name(&mut self, first: u64, blocks: &[u8]) -> Option<Vec<u8>> {
        debug_assert!(blocks.len().is_multiple_of(BLOCK) && blocks.len() <= MOST_BLOCKS * BLOCK, "no frame's run");
        let key = self.key.as_ref()?;
        let count = blocks.len() / BLOCK;
        let mut names: Vec<(u16, Mark)> = vec![];
        let mut parts: Vec<(u8, Option<Digest>)> = Vec::with_capacity(count);
        for (at, block) in blocks.chunks_exact(BLOCK).enumerate() {
            if is_zero(block) {
                parts.push((ZERO, None));
                continue;
            }
            let digest = key.digest(block);
            let mark = digest.mark();
            if self.known.get(mark).is_some() && self.unsure + names.len() < MOST_UNSURE {
                names.push((at as u16, mark));
                parts.push((NAMED, Some(digest)));
            } else {
                parts.push((FULL, None));
            }
            self.known.insert(mark, ());
        }
        if names.is_empty() {
            return None;
        }
        let mut frame = Vec::with_capacity(2 + count + names.len() * 16 + (count - names.len()) * BLOCK);
        frame.extend((count as u16).to_le_bytes());
        frame.extend(parts.iter().map(|(kind, _)| kind));
        for ((kind, digest), block) in parts.iter().zip(blocks.chunks_exact(BLOCK)) {
            match digest {
                Some(digest) => frame.extend(digest.0),
                None if *kind == FULL => frame.extend(block),
                None => {}
            }
        }
        self.figures.named += names.len() as u64;
        self.unsure += names.len();
        self.flight.push_back(Flight { first, names });
        Some(frame)
    }

    /// The reply to the oldest frame that has none yet. The blocks that have to be sent again, ascending, as they are now: they
    /// are not known any more, and go in full.
    ///
    /// # Errors
    /// When it is no reply, or to nothing.
    pub fn handle(&mut self, reply: &[u8]) -> Result<Vec<u64>, ContentError> {
        let flight = self.flight.pop_front().ok_or(ContentError::Reply("to a frame that was not sent"))?;
        self.unsure -= flight.names.len();
        self.answered += flight.names.len();
        let (missing, rest) = reply.as_chunks::<2>();
        if !rest.is_empty() {
            return Err(ContentError::Reply("half a number"));
        }
        let mut names = flight.names.iter();
        let mut again = Vec::with_capacity(missing.len());
        for at in missing {
            let at = u16::from_le_bytes(*at);
            let Some((_, mark)) = names.find(|(name, _)| *name == at) else {
                return Err(ContentError::Reply("blocks that were not named, or not in order"));
            };
            self.known.remove(*mark);
            again.push(flight.first + u64::from(at));
        }
        self.missed += again.len();
        self.figures.missed += again.len() as u64;
        if self.answered >= LOOK {
            if self.missed * 4 > self.answered {
                // It has lost what it had: better to begin anew than to find out name by name.
                self.known.clear();
                self.figures.forgotten += 1;
            }
            (self.answered, self.missed) = (0, 0);
        }
        Ok(again)
    }
}
