//! What travels: greetings, frames, replies.
//!
//! ```text
//! greeting   1, key (32 bytes)  |  2, marks (8 bytes each)
//! frame      number of blocks (2 bytes), what each of them is (1 byte each), then for each its digest (16 bytes) or contents
//! reply      which blocks of the frame could not be got (2 bytes each, ascending); nothing: all is here
//! ```

use crate::dictionary::{ContentSource, fetch};
use crate::digest::{BLOCK, Digest, Key, Mark};
use crate::error::ContentError;

/// Blocks of a frame: 256 KiB, so that few bytes never ask for more than that.
pub const MOST_BLOCKS: usize = 64;
/// Marks of one greeting: 64 KiB.
const MARKS: usize = 8192;

const KEY: u8 = 1;
const SOME: u8 = 2;

pub(crate) const ZERO: u8 = 0;
pub(crate) const NAMED: u8 = 1;
pub(crate) const FULL: u8 = 2;

/// What a receiver says of its dictionary.
#[derive(Debug)]
pub enum Greeting {
    /// Its key. Comes before marks, and ends what was said before.
    Key(Key),
    /// Some of what it holds.
    Marks(Vec<Mark>),
}

pub(crate) fn greetings(key: &Key, marks: &[Mark]) -> Vec<Vec<u8>> {
    let mut all = vec![[&[KEY][..], &key.0].concat()];
    for some in marks.chunks(MARKS) {
        let mut message = Vec::with_capacity(1 + some.len() * 8);
        message.push(SOME);
        message.extend(some.iter().flat_map(|mark| mark.bits().to_le_bytes()));
        all.push(message);
    }
    all
}

/// Reads a greeting.
///
/// # Errors
/// When it is none.
pub fn parse_greeting(message: &[u8]) -> Result<Greeting, ContentError> {
    match message.split_first() {
        Some((&KEY, key)) => {
            let key = key.try_into().map_err(|_| ContentError::Greeting("a key of another length"))?;
            Ok(Greeting::Key(Key(key)))
        }
        Some((&SOME, marks)) if marks.len().is_multiple_of(8) && marks.len() <= MARKS * 8 => {
            let (marks, _) = marks.as_chunks::<8>();
            Ok(Greeting::Marks(marks.iter().map(|bits| Mark::new(u64::from_le_bytes(*bits))).collect()))
        }
        _ => Err(ContentError::Greeting("neither a key nor marks")),
    }
}

/// A frame's blocks. Those that are missing are not in it at all, so that nobody uses them by accident.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Taken {
    /// How many blocks the frame has.
    pub blocks: usize,
    /// The first block of each stretch that is here, and the contents.
    pub present: Vec<(usize, Vec<u8>)>,
    /// How many of them were named.
    pub named: u64,
    /// What could not be got, ascending: to be asked for by [`reply`].
    pub missing: Vec<u16>,
}

impl Taken {
    fn push(&mut self, at: usize, block: &[u8]) {
        match self.present.last_mut() {
            Some((first, run)) if *first + run.len() / BLOCK == at => run.extend_from_slice(block),
            _ => self.present.push((at, block.to_vec())),
        }
    }
}

/// Reads a frame; names are looked up, copied and verified.
///
/// # Errors
/// When it is no frame.
pub fn take(frame: &[u8], key: &Key, source: &dyn ContentSource) -> Result<Taken, ContentError> {
    let (count, rest) = frame.split_first_chunk::<2>().ok_or(ContentError::Frame("it has no length"))?;
    let count = usize::from(u16::from_le_bytes(*count));
    if count == 0 || count > MOST_BLOCKS {
        return Err(ContentError::Frame("a number of blocks that no frame has"));
    }
    let (kinds, mut rest) = rest.split_at_checked(count).ok_or(ContentError::Frame("it ends too soon"))?;
    let mut taken = Taken { blocks: count, ..Taken::default() };
    // What came in full in this frame is in no dictionary yet, and its sender names it all the same. Digests are computed when one is missed.
    let mut full: Vec<(Option<Digest>, &[u8])> = vec![];
    for (at, kind) in kinds.iter().enumerate() {
        match *kind {
            ZERO => taken.push(at, &[0; BLOCK]),
            NAMED => {
                let (digest, tail) = rest.split_first_chunk::<16>().ok_or(ContentError::Frame("a name is cut off"))?;
                rest = tail;
                taken.named += 1;
                match fetch(source, key, &Digest(*digest)) {
                    Some(block) => taken.push(at, &block[..]),
                    None => {
                        let digest = Digest(*digest);
                        let is = |(known, block): &mut (Option<Digest>, &[u8])| {
                            *known.get_or_insert_with(|| key.digest(block)) == digest
                        };
                        match full.iter_mut().position(is).map(|n| full[n].1) {
                            Some(block) => taken.push(at, block),
                            None => taken.missing.push(at as u16),
                        }
                    }
                }
            }
            FULL => {
                let (block, tail) = rest.split_at_checked(BLOCK).ok_or(ContentError::Frame("a block is cut off"))?;
                rest = tail;
                full.push((None, block));
                taken.push(at, block);
            }
            _ => return Err(ContentError::Frame("a block that is neither zero, named nor in full")),
        }
    }
    if rest.is_empty() { Ok(taken) } else { Err(ContentError::Frame("more than its blocks")) }
}

/// What to answer to a frame.
#[must_use]
pub fn reply(missing: &[u16]) -> Vec<u8> {
    missing.iter().flat_map(|at| at.to_le_bytes()).collect()
}
