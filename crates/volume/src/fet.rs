//! Says to the next owner of a volume what it has to hold, while a guest writes: the final epoch table (FET) of xNBD+, section
//! 3.2, in pieces.
//!
//! ```text
//!   source                                   target
//!   Exchanging  <----------- Have ---------  its stamps (CET)
//!   Telling     ------ Want, Forget ------>  words for what differs
//!               ------ Order ------------->  what guests read first
//!   Finishing   ----------- Final -------->  all of it durable
//!   Complete    <--------- Finished -------
//! ```
//!
//! No contents travel. What differs is said while the guest runs, what it writes meanwhile again, and a block that it writes
//! a second time in the same epoch not again: the stamp is what is said. So what is left at the stop is what was written since the
//! source was asked last, however large the volume is.
//!
//! # What can go wrong
//!
//! *Either side dies, or the stream breaks.* The attempt is over. The target forgets what it was told when the next one begins; the
//! guest has noticed nothing.
//!
//! *The source dies after its last word.* It made everything durable before it ([`Replica::settled`]), so that what it has bears the
//! stamps that it said.
//!
//! *The source is a shadow volume itself.* It says who has what is absent here, and says it again when it has come: its old holder
//! may let go of it then.
//!
//! Messages come in order and without loss, as a mirror's do.

use crate::blocks::{BLOCK, BlockSet};
use crate::error::VolumeError;
use crate::guards::Guard;
use crate::has::{Ends, Has};
use crate::order;
use crate::replica::Replica;
use crate::runs::{HAVE, LAST, MOST_RUNS, parse_run, run_message, words};
use crate::shadow::{Holder, LONGEST_HOLDER, MOST_HOLDERS};
use crate::stamp::{STAMP_BYTES, Stamp};
use crate::stamps::REGION;
use crate::walk::{self, Comparing, Who};
use godwit_units::{BlockIndex, Bytes, Lineage};
use std::collections::VecDeque;
use std::ops::Range;

/// Blocks that are looked at for one message: what is looked at under the guest's lock.
const MOST_LOOKED_AT: u64 = 4 * REGION;
/// Longest message believed, in bytes.
pub const MAX_MESSAGE: usize = MOST_RUNS * (16 + STAMP_BYTES) + MOST_HOLDERS * (LONGEST_HOLDER + 1) + 64;

const _: () = assert!(MAX_MESSAGE <= crate::mirror::MAX_MESSAGE, "they are packed as a mirror's are");

const WANT: u8 = 2;
const FORGET: u8 = 3;
const ORDER: u8 = 4;
const FINAL: u8 = 5;
const FINISHED: u8 = 6;

/// What came makes no sense, or cannot be done.
#[derive(Debug, thiserror::Error)]
pub enum FetError {
    /// Not a message, or not now.
    #[error("the other side of the hand-off says what makes no sense: {0}; the move is given up, try it again")]
    Message(&'static str),
    /// The target was told something else.
    #[error(
        "the digests of what the volume is to hold differ: something was lost or changed on the way; try the move again"
    )]
    Digest,
    /// The replica.
    #[error(transparent)]
    Volume(#[from] VolumeError),
}

/// Where a source stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// The target's stamps are awaited.
    Exchanging,
    /// What differs is said.
    Telling,
    /// The guest stands still; the last of it, and Final.
    Finishing,
    /// The target knows everything, durably.
    Complete,
}

/// The source's machine.
#[derive(Debug)]
pub struct Source {
    state: State,
    /// As whom the target will ask for what is here.
    me: Holder,
    lineage: Lineage,
    /// To be said.
    dirty: BlockSet,
    cursor: u64,
    /// What was ever to be said: the target has, or had, something else there.
    differed: BlockSet,
    /// Said with the stamp of writes at `said_at`: to say it again would say nothing.
    said: BlockSet,
    said_at: Option<Stamp>,
    /// What the target says it has is compared with what is here; what is written or comes here meanwhile is `dirty`.
    comparing: Option<Comparing>,
    /// Pieces of the order in which guests read, to be sent first.
    order: VecDeque<Vec<u8>>,
    final_sent: bool,
    digest: blake3::Hasher,
    figures: Figures,
}

/// What was compared and said.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Figures {
    /// What differed when the target had said what it has: what has to be fetched, as known so far.
    pub differing: Bytes,
    /// What it had already.
    pub alike: Bytes,
    /// What had to be said after the stop.
    pub after_stop: Bytes,
}

impl Source {
    /// A hand-off that begins, in which this site is called `me`. `order`: runs as [`crate::order::FirstAccess`] recorded them.
    #[must_use]
    pub fn new(me: Holder, lineage: Lineage, order: &[Range<u64>]) -> Self {
        Self {
            state: State::Exchanging,
            me,
            lineage,
            dirty: BlockSet::default(),
            cursor: 0,
            differed: BlockSet::default(),
            said: BlockSet::default(),
            said_at: None,
            comparing: None,
            order: order::pieces(ORDER, order),
            final_sent: false,
            digest: blake3::Hasher::new(),
            figures: Figures::default(),
        }
    }

    /// Where it stands.
    #[must_use]
    pub const fn state(&self) -> State {
        self.state
    }

    /// Whether all that is known to differ has been said.
    #[must_use]
    pub fn is_level(&self) -> bool {
        self.state == State::Telling && self.dirty.is_empty() && self.order.is_empty()
    }

    /// What was compared and said so far.
    #[must_use]
    pub const fn figures(&self) -> Figures {
        self.figures
    }

    /// What is known to differ and has not been said.
    #[must_use]
    pub fn unsaid(&self) -> Bytes {
        Bytes(self.dirty.len() * BLOCK)
    }

    /// Whether the target may have what is here in this block: what it said that it has was compared, and the guest has not written since.
    #[must_use]
    pub fn is_there(&self, block: BlockIndex) -> bool {
        self.state != State::Exchanging && !self.differed.contains(block)
    }

    /// A message came from the target.
    ///
    /// # Errors
    /// When it makes no sense, or the replica cannot be read.
    pub fn handle(&mut self, message: &[u8], replica: &Replica) -> Result<(), FetError> {
        let (kind, body) = message.split_first().ok_or(FetError::Message("an empty message"))?;
        match *kind {
            HAVE if self.state == State::Exchanging => self.have(body, replica),
            FINISHED if self.state == State::Finishing && self.final_sent => {
                if body != self.digest.finalize().as_bytes() {
                    return Err(FetError::Digest);
                }
                self.state = State::Complete;
                Ok(())
            }
            _ => Err(FetError::Message("a message that does not belong here")),
        }
    }

    fn have(&mut self, body: &[u8], replica: &Replica) -> Result<(), FetError> {
        let malformed = FetError::Message("a malformed Have");
        let Some((last, runs)) = body.split_first() else { return Err(malformed) };
        walk::told(&mut self.comparing, Who::HandOff, (runs, *last == LAST), replica)?.ok_or(malformed)?;
        self.compare(replica)
    }

    /// A window of the comparison, where one is under way.
    fn compare(&mut self, replica: &Replica) -> Result<(), FetError> {
        if let Some(alike) = walk::compare(&mut self.comparing, &mut self.dirty, replica)? {
            self.differed = self.dirty.clone();
            self.figures.differing = self.unsaid();
            self.figures.alike = Bytes(alike * BLOCK);
            self.state = State::Telling;
        }
        Ok(())
    }

    /// Whether it compares what the target has said, a window with each [`Source::poll`]: who polls it lets the guest's writes through in between, need
    /// not wait for anything else, and does not give it more meanwhile, or it grows.
    #[must_use]
    pub fn is_comparing(&self) -> bool {
        self.comparing.as_ref().is_some_and(Comparing::may_step)
    }

    /// The guest has written these blocks.
    pub fn guest_wrote(&mut self, blocks: Range<u64>, replica: &Replica) {
        if self.state == State::Exchanging {
            // The comparison will see it, or has passed by.
            if self.comparing.is_some() {
                self.dirty.insert(blocks);
            }
            return;
        }
        self.at(replica.writing_stamp());
        for block in blocks {
            if !self.said.contains(BlockIndex(block)) {
                self.dirty.insert(block..block + 1);
                self.differed.insert(block..block + 1);
            }
        }
    }

    /// These blocks have come here from another site: they are here now.
    pub fn arrived(&mut self, blocks: &BlockSet, replica: &Replica) {
        let compared = self.state != State::Exchanging || self.comparing.is_some();
        if compared && replica.holds(Guard::ArrivalsToldAgain) {
            for run in blocks.runs() {
                self.said.remove(run.clone());
                self.dirty.insert(run);
            }
        }
    }

    fn at(&mut self, now: Option<Stamp>) {
        if self.said_at != now {
            self.said = BlockSet::default();
            self.said_at = now;
        }
    }

    /// The guest stands still, the replica is frozen, and nothing is fetched any more. Everything becomes durable, and the rest is said.
    ///
    /// # Errors
    /// When the medium fails.
    pub fn stop(&mut self, replica: &Replica) -> Result<(), FetError> {
        if self.state == State::Telling {
            replica.settled()?;
            self.figures.after_stop = self.unsaid();
            self.state = State::Finishing;
        }
        Ok(())
    }

    /// The next messages to send; empty: nothing now. To be called when there is room for them.
    ///
    /// # Errors
    /// When the replica cannot be read.
    pub fn poll(&mut self, replica: &Replica) -> Result<Vec<Vec<u8>>, FetError> {
        self.compare(replica)?;
        if matches!(self.state, State::Exchanging | State::Complete) || self.final_sent {
            return Ok(vec![]);
        }
        if self.state == State::Telling
            && let Some(piece) = self.order.pop_front()
        {
            return Ok(vec![piece]);
        }
        self.at(replica.writing_stamp());
        // Runs that are alike but for their stamps go together: (holders, runs); no holders: never written.
        let mut parts: Vec<(Vec<Holder>, Vec<u8>, usize)> = vec![];
        let (mut looked_at, mut runs) = (0, 0);
        while runs < MOST_RUNS && looked_at < MOST_LOOKED_AT {
            let Some(run) = self.dirty.run_from(self.cursor, REGION) else { break };
            self.cursor = run.end;
            self.dirty.remove(run.clone());
            looked_at += run.end - run.start;
            for version in replica.versions(run)? {
                let holders = match version.stamp {
                    None => vec![],
                    Some(_) if version.holders.is_empty() => vec![self.me.clone()],
                    Some(_) => version.holders,
                };
                if version.stamp.is_some() && version.stamp == self.said_at {
                    self.said.insert(version.blocks.clone());
                }
                if holders.len() > MOST_HOLDERS || holders.iter().any(|h| h.0.len() > LONGEST_HOLDER) {
                    return Err(FetError::Message("a holder's name that is too long, or too many holders"));
                }
                let stamp = version.stamp.unwrap_or_else(|| Stamp::decode(&[0; STAMP_BYTES]));
                let bytes = &run_message(0, &version.blocks, stamp, &[])[1..];
                runs += 1;
                match parts.last_mut() {
                    Some((h, out, count)) if *h == holders && *count < MOST_RUNS => {
                        out.extend(bytes);
                        *count += 1;
                    }
                    _ => parts.push((holders, bytes.to_vec(), 1)),
                }
            }
        }
        let messages: Vec<Vec<u8>> = parts.into_iter().map(|(holders, runs, _)| said(&holders, &runs)).collect();
        for message in &messages {
            self.digest.update(message);
        }
        if messages.is_empty() && self.state == State::Finishing {
            self.final_sent = true;
            self.digest.update(&self.lineage.0.to_le_bytes());
            let mut message = vec![FINAL];
            message.extend(self.lineage.0.to_le_bytes());
            message.extend(self.digest.finalize().as_bytes());
            return Ok(vec![message]);
        }
        Ok(messages)
    }
}

/// A message about runs that the same holders have; none: that nobody has written.
fn said(holders: &[Holder], runs: &[u8]) -> Vec<u8> {
    if holders.is_empty() {
        return [&[FORGET][..], runs].concat();
    }
    let mut out = vec![WANT, u8::try_from(holders.len()).unwrap_or(u8::MAX)];
    for Holder(name) in holders {
        out.push(u8::try_from(name.len()).unwrap_or(u8::MAX));
        out.extend(name.as_bytes());
    }
    out.extend(runs);
    out
}

/// The target's machine.
#[derive(Debug, Default)]
pub struct Target {
    digest: blake3::Hasher,
    complete: bool,
    order: order::Coming,
}

impl Target {
    /// A hand-off that begins. What to send first: what this replica has.
    ///
    /// # Errors
    /// When the replica is not a secondary, or cannot be read.
    pub fn new(replica: &Replica) -> Result<(Self, Has), FetError> {
        replica.begin_wants()?;
        Ok((Self::default(), Has::new(replica, Ends::Last)?))
    }

    /// Whether all of it is here, durably.
    #[must_use]
    pub const fn is_complete(&self) -> bool {
        self.complete
    }

    /// The order in which guests read, as the source recorded it.
    #[must_use]
    pub fn order(&self) -> Vec<Range<u64>> {
        self.order.runs()
    }

    /// A message came from the source; what to answer, if anything.
    ///
    /// # Errors
    /// When it makes no sense, or the replica fails: the attempt is over then.
    pub fn handle(&mut self, message: &[u8], replica: &Replica) -> Result<Option<Vec<u8>>, FetError> {
        let (kind, body) = message.split_first().ok_or(FetError::Message("an empty message"))?;
        if self.complete {
            return Err(FetError::Message("a message after the last"));
        }
        match *kind {
            WANT => {
                self.digest.update(message);
                let (holders, mut rest) = parse_holders(body).ok_or(FetError::Message("a malformed Want"))?;
                while !rest.is_empty() {
                    let (run, stamp, tail) = bounded_run(rest)?;
                    replica.want(run, stamp, &holders)?;
                    rest = tail;
                }
                replica.save_wants()?;
                Ok(None)
            }
            FORGET => {
                self.digest.update(message);
                let mut rest = body;
                while !rest.is_empty() {
                    let (run, _, tail) = bounded_run(rest)?;
                    replica.want_nothing(run)?;
                    rest = tail;
                }
                replica.save_wants()?;
                Ok(None)
            }
            ORDER => {
                self.order.push(body);
                Ok(None)
            }
            FINAL => {
                let Some(([lineage], digest)) = words::<1>(body) else {
                    return Err(FetError::Message("a malformed Final"));
                };
                self.digest.update(&lineage.to_le_bytes());
                let ours = self.digest.finalize();
                if digest != ours.as_bytes() {
                    return Err(FetError::Digest);
                }
                replica.finish_wants(Lineage(lineage))?;
                self.complete = true;
                Ok(Some([&[FINISHED][..], ours.as_bytes()].concat()))
            }
            _ => Err(FetError::Message("a message that does not belong here")),
        }
    }
}

/// A run of no more blocks than a source says at once: few bytes on the wire must not be a large table here.
fn bounded_run(bytes: &[u8]) -> Result<(Range<u64>, Stamp, &[u8]), FetError> {
    match parse_run(bytes) {
        Some((run, stamp, rest)) if run.end - run.start <= REGION => Ok((run, stamp, rest)),
        _ => Err(FetError::Message("a malformed run")),
    }
}

fn parse_holders(bytes: &[u8]) -> Option<(Vec<Holder>, &[u8])> {
    let (count, mut rest) = bytes.split_first()?;
    let mut holders = vec![];
    if usize::from(*count) > MOST_HOLDERS || *count == 0 {
        return None;
    }
    for _ in 0..*count {
        let (length, tail) = rest.split_first()?;
        let (name, tail) = tail.split_at_checked(usize::from(*length))?;
        holders.push(Holder(String::from_utf8(name.to_vec()).ok()?));
        rest = tail;
    }
    Some((holders, rest))
}

#[cfg(test)]
#[path = "fet_tests.rs"]
mod tests;
