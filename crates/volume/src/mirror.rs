//! Makes the replica at another site equal to this one, while a guest writes (CloudNet, section 3.2.1; `mirror` in our terms).
//!
//! ```text
//!   source                                   target
//!   Exchanging  <----------- Have ---------  its stamps
//!   Copying     ------ Order ------------->  what guests came to first
//!               ------ Data, Zeroes, ----->  applies what is newer
//!               <----------- Ack ----------
//!   Mirroring   --- the guest's writes --->  at once; the guest waits for what is far behind
//!   Finishing   ----------- Final -------->  everything durable
//!   Complete    <--------- Finished -------
//! ```
//!
//! Both machines are fed messages that come in order and without loss: the link sees to that, over cuts too. What they decide
//! is *which* blocks go; the shell reads them, under the lock that the guest's writes take, so that no block is torn while it
//! is read, and a block's contents and its stamp belong together. Stamps are compared a window at a time, and the guest writes in between (`walk.rs`).
//!
//! What the target can find in its [`Library`] goes by name while the disk is copied behind the guest's back: it says its key and what it
//! holds beside its stamps (Known), the source sends names (Named), and the Ack says which of those blocks the target could
//! not get. They differ again then, and go in full, as they are by that time. Nothing waits for that: blocks that come after are
//! applied, and an end is not believed while one is missing. Mirrored writes and the last blocks go in full, since a name
//! that leads nowhere costs a round trip.
//!
//! The guest's writes wait for the target only in `Mirroring`, and there only while it is further behind than a bound
//! (`lag.rs`), for at most [`PATIENCE`]: then everybody is let go, and the mirror copies behind the guest's back again until little is
//! left and the target answers.
//!
//! What guests came to first (Order) goes ahead of the blocks, for whoever has to bring the volume by [`crate::fetch`] later. It is a hint, and in
//! no digest, and of a long one only the beginning goes. A target says that it takes one with a piece of its stamps that has no runs: to a source of an earlier version that is what it is, and
//! a target of one says nothing of the kind and is sent none. The guest is kept in step when the order has arrived, so that none of its
//! writes waits behind it.
//!
//! That a guest was told of a write says nothing of the target, then. Nobody takes it to: until the hand-off the source's replica is the
//! volume, and a target has everything when it has believed an end, whose digest is over all that came before of blocks.

use crate::ahead::held_by;
use crate::blocks::{BLOCK, BlockSet};
use crate::error::VolumeError;
use crate::flight::{Flight, How};
use crate::has::{Ends, Has};
use crate::lag::Lag;
pub use crate::lag::Place;
use crate::library::{Library, Reader};
use crate::order;
use crate::replica::{Contents, Replica, is_zero};
use crate::runs::{HAVE, LAST, parse_run, run_message};
use crate::stamp::{STAMP_BYTES, Stamp};
use crate::walk::{self, Comparing, Who};
use godwit_content::{ContentError, choose, reply};
use godwit_units::{BitRate, BlockIndex, Bytes};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// The longest that a guest's write waits for the other side.
pub const PATIENCE: Duration = Duration::from_millis(1500);
/// Blocks of one message: 256 KiB, so that a mirrored write does not wait long behind it.
pub(crate) const MOST_BLOCKS: u64 = 64;
/// What may be on its way without an answer, beside mirrored writes: plain bytes of what goes in full. The link bounds it as well.
const WINDOW: u64 = 8 << 20;
/// The most of it, where the path is fast and long: more is read and packed ahead than a guest's write should find before it.
const MOST_WINDOW: u64 = 64 << 20;
/// When so little is left, the guest's writes are mirrored.
const NEARLY_CLEAN: u64 = (1 << 20) / BLOCK;
/// Longest message believed, in bytes.
pub const MAX_MESSAGE: usize = (MOST_BLOCKS * BLOCK) as usize + 64;
const _: () = assert!(MAX_MESSAGE <= godwit_content::LONGEST, "a message has to fit into its stream");

pub(crate) const DATA: u8 = 2;
pub(crate) const ZEROES: u8 = 3;
pub(crate) const FORGET: u8 = 4;
const FINAL: u8 = 5;
pub(crate) const ACK: u8 = 6;
const FINISHED: u8 = 7;
pub(crate) const KNOWN: u8 = 8;
pub(crate) const NAMED: u8 = 9;
const ORDER: u8 = 10;
/// Runs of an Order, 128 KiB: a guest is kept in step only when it has arrived, and the first ones are what a boot reads.
const MOST_ORDER: usize = 8192;
/// Second byte of a message about what the target has, with no runs: more follow, and it takes an Order.
const TAKES_ORDER: u8 = 3;
/// Blocks that a source may have named in vain and not sent yet; it sends those first.
pub(crate) const MOST_MISSING: u64 = 64 << 10;

/// What came makes no sense, or cannot be done.
#[derive(Debug, thiserror::Error)]
pub enum MirrorError {
    /// Not a message, or not now.
    #[error("the other side of the mirror says what makes no sense: {0}")]
    Message(&'static str),
    /// A move has begun, which ends every pre-cache.
    #[error("a move has begun")]
    Over,
    /// An epoch that was to become an image was given up.
    #[error(
        "the guest overwrote more than {room} of an epoch before it was sent, so the image stays at the one before; \
         more room for that (`--image-room`), a higher limit or a faster path helps"
    )]
    Overwritten {
        /// What may be kept here until it is sent.
        room: Bytes,
    },
    /// The target has not got what the source sent.
    #[error("the mirror's digests differ: something was lost or changed on the way")]
    Digest,
    /// The replica.
    #[error(transparent)]
    Volume(#[from] VolumeError),
    /// Names.
    #[error(transparent)]
    Content(#[from] ContentError),
}

/// Where a source stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// The target's stamps are awaited.
    Exchanging,
    /// Blocks are copied; the guest's writes are answered at once.
    Copying,
    /// The guest's writes are sent as they are made, and answered while the target is not far behind.
    Mirroring,
    /// The guest stands still; the last blocks go, and Final.
    Finishing,
    /// The target has everything, durably.
    Complete,
}

/// The number of a message, by which it is acknowledged.
pub type Seq = u64;

/// A guest's write that goes to the target at once.
#[derive(Debug)]
pub struct Mirrored {
    /// Wait until [`Source::is_answered`] says so of this; it may say so at once.
    pub until: Place,
    /// To be sent, in order.
    pub messages: Vec<Vec<u8>>,
}

/// The source's machine.
#[derive(Debug)]
pub struct Source {
    state: State,
    dirty: BlockSet,
    /// Those of them that were named in vain: they go before others.
    again: BlockSet,
    /// Where the copy goes on.
    cursor: u64,
    /// What the target says it has is compared with what is here; what the guest writes meanwhile is `dirty`.
    comparing: Option<Comparing>,
    /// Pieces of the order in which guests came to their blocks, to be sent first.
    order: VecDeque<Vec<u8>>,
    /// Whether the target has said that it takes them.
    takes_order: bool,
    /// Sent and not acknowledged.
    flight: Flight,
    /// What may be on its way.
    window: u64,
    /// How fast the link is, if somebody said so.
    link: Option<BitRate>,
    /// How much of the guest's writes the target does not have yet.
    lag: Lag,
    /// The guest is kept in step when messages up to this one have arrived: nobody waits for them, now or any more.
    released: Seq,
    /// Mirrored writes that wait, and since when, oldest first. Bounded by what a guest may have under way.
    waiting: VecDeque<(Place, Duration)>,
    final_sent: bool,
    digest: blake3::Hasher,
    total: u64,
    copied: u64,
    elided: u64,
    held: u64,
}

impl Default for Source {
    fn default() -> Self {
        Self::new()
    }
}

impl Source {
    /// A mirror that begins.
    #[must_use]
    pub fn new() -> Self {
        Self::with_order(&[])
    }

    /// The same, which tells the target what guests came to first: runs as [`order::FirstAccess`] recorded them, of which the first 8192 go.
    #[must_use]
    pub fn with_order(order: &[Range<u64>]) -> Self {
        Self {
            state: State::Exchanging,
            dirty: BlockSet::default(),
            again: BlockSet::default(),
            cursor: 0,
            comparing: None,
            order: order::pieces(ORDER, &order[..order.len().min(MOST_ORDER)]),
            takes_order: false,
            flight: Flight::new(),
            window: WINDOW,
            link: None,
            lag: Lag::new(),
            released: 0,
            waiting: VecDeque::new(),
            final_sent: false,
            digest: blake3::Hasher::new(),
            total: 0,
            copied: 0,
            elided: 0,
            held: 0,
        }
    }

    /// Where it stands.
    #[must_use]
    pub const fn state(&self) -> State {
        self.state
    }

    /// Whether nothing differs but what is on its way. A block that went by name may not arrive.
    #[must_use]
    pub fn is_synchronous(&self) -> bool {
        self.state == State::Mirroring && self.dirty.is_empty() && self.flight.names.unsure() == 0
    }

    /// What the link carries, and its round trip without a queue: how far the target may be behind follows from them, and what may be on its way.
    /// Over a link that is faster than digests are computed blocks go in full.
    pub fn path_is(&mut self, rate: BitRate, round_trip: Duration) {
        self.link = Some(rate);
        self.window = held_by(rate, round_trip, WINDOW..=MOST_WINDOW);
        self.lag.path_is(rate, round_trip);
        self.look_who_waits();
    }

    /// Messages that the target has acknowledged.
    #[must_use]
    pub const fn acknowledged(&self) -> Seq {
        self.flight.acked()
    }

    /// How far it is.
    #[must_use]
    pub const fn progress(&self) -> Progress {
        Progress {
            total: Bytes(self.total * BLOCK),
            copied: Bytes(self.copied * BLOCK),
            remaining: Bytes(self.dirty.len() * BLOCK),
            elided: Bytes(self.elided * BLOCK),
            held: Bytes(self.held * BLOCK),
            named: {
                let names = self.flight.names.figures();
                Bytes((names.named - names.missed) * BLOCK)
            },
        }
    }

    /// A message came from the target.
    ///
    /// # Errors
    /// When it makes no sense, or the replica cannot be read.
    pub fn handle(&mut self, message: &[u8], replica: &Replica) -> Result<(), MirrorError> {
        let (kind, body) = message.split_first().ok_or(MirrorError::Message("an empty message"))?;
        match *kind {
            HAVE if self.state == State::Exchanging => self.have(body, replica),
            KNOWN => Ok(self.flight.names.greet(body)?),
            ACK => {
                let again = self.flight.acknowledged(body)?;
                self.send_again(&again);
                self.lag.acknowledged(self.flight.acked());
                self.look_who_waits();
                Ok(())
            }
            FINISHED if self.state == State::Finishing && self.final_sent => {
                if body == self.digest.finalize().as_bytes() {
                    self.state = State::Complete;
                    Ok(())
                } else {
                    Err(MirrorError::Digest)
                }
            }
            _ => Err(MirrorError::Message("a message that does not belong here")),
        }
    }

    fn look_who_waits(&mut self) {
        while self.waiting.front().is_some_and(|(place, _)| self.lag.is_within(*place)) {
            self.waiting.pop_front();
        }
    }

    /// Blocks that went by name, and that the target could not get.
    fn send_again(&mut self, blocks: &[u64]) {
        if blocks.is_empty() {
            return;
        }
        for block in blocks {
            self.copied -= u64::from(!self.dirty.contains(BlockIndex(*block)));
            self.dirty.insert(*block..block + 1);
            self.again.insert(*block..block + 1);
        }
        // The target did not believe the end that was sent meanwhile.
        self.final_sent = false;
    }

    fn have(&mut self, body: &[u8], replica: &Replica) -> Result<(), MirrorError> {
        let malformed = MirrorError::Message("a malformed Have");
        let Some((last, runs)) = body.split_first() else { return Err(malformed) };
        walk::told(&mut self.comparing, Who::Mirror, (runs, *last == LAST), replica)?.ok_or(malformed)?;
        self.takes_order |= *last == TAKES_ORDER;
        if *last == LAST && !self.takes_order {
            self.order.clear();
        }
        self.compare(replica)
    }

    /// A window of the comparison, where one is under way.
    fn compare(&mut self, replica: &Replica) -> Result<(), MirrorError> {
        if let Some(alike) = walk::compare(&mut self.comparing, &mut self.dirty, replica)? {
            self.held = alike;
            self.total = self.dirty.len();
            self.state = State::Copying;
        }
        Ok(())
    }

    /// Whether it compares what the target has said, a window with each [`Source::poll`]: who polls it lets the guest's writes through in between, need
    /// not wait for anything else, and does not give it more meanwhile, or it grows.
    #[must_use]
    pub fn is_comparing(&self) -> bool {
        self.comparing.as_ref().is_some_and(Comparing::may_step)
    }

    /// The guest has written these blocks here. What to send, and for what to wait, if the write is mirrored. To be called under the lock that the write was made under.
    ///
    /// # Errors
    /// When the replica cannot be read.
    pub fn guest_wrote(
        &mut self,
        blocks: Range<u64>,
        now: Duration,
        replica: &Replica,
    ) -> Result<Option<Mirrored>, MirrorError> {
        match self.state {
            State::Exchanging => {
                // The comparison will see it, or has passed by.
                if self.comparing.is_some() {
                    self.dirty.insert(blocks);
                }
                Ok(None)
            }
            State::Mirroring => {
                self.dirty.remove(blocks.clone());
                self.again.remove(blocks.clone());
                let before = self.flight.sent();
                let mut messages = vec![];
                let mut at = blocks.start;
                while at < blocks.end {
                    let end = (at + MOST_BLOCKS).min(blocks.end);
                    messages.extend(self.read(at..end, replica)?);
                    at = end;
                }
                for (seq, message) in (before + 1..).zip(&messages) {
                    self.lag.push(seq, message);
                }
                let until = self.lag.sent();
                if !self.lag.is_within(until) {
                    self.waiting.push_back((until, now));
                }
                Ok(Some(Mirrored { until, messages }))
            }
            State::Copying | State::Finishing | State::Complete => {
                let before = self.dirty.len();
                self.dirty.insert(blocks);
                self.total += self.dirty.len() - before;
                Ok(None)
            }
        }
    }

    /// Whether a guest's write may be answered.
    #[must_use]
    pub fn is_answered(&self, write: Place) -> bool {
        self.state != State::Mirroring || self.lag.is_within(write)
    }

    /// The next messages to send, read from the replica; empty: nothing now. To be called under the guest's lock.
    ///
    /// # Errors
    /// When the replica cannot be read.
    pub fn poll(&mut self, replica: &Replica) -> Result<Vec<Vec<u8>>, MirrorError> {
        self.compare(replica)?;
        if self.state == State::Copying
            && let Some(piece) = self.order.pop_front()
        {
            self.flight.push(&piece, How::InFull);
            self.released = self.flight.sent();
            return Ok(vec![piece]);
        }
        let keeps_up = self.flight.bytes() < self.window / 2 && self.flight.acked() >= self.released;
        if self.state == State::Copying && self.dirty.len() <= NEARLY_CLEAN && keeps_up {
            // From here on nothing new is left behind, and the rest goes while the guest is kept in step.
            self.state = State::Mirroring;
        }
        if matches!(self.state, State::Exchanging | State::Complete) || self.flight.bytes() >= self.window {
            return Ok(vec![]);
        }
        // What was named in vain first: the target takes note of each until it is there, and of so many only.
        let again = self.again.run_from(0, MOST_BLOCKS);
        let run = again.clone().or_else(|| self.dirty.run_from(self.cursor, MOST_BLOCKS));
        if let Some(run) = run {
            if again.is_none() {
                self.cursor = run.end;
            }
            self.dirty.remove(run.clone());
            self.again.remove(run.clone());
            self.copied += run.end - run.start;
            return self.read(run, replica);
        }
        if self.state == State::Finishing && !self.final_sent {
            self.final_sent = true;
            let mut message = vec![FINAL];
            message.extend(self.digest.finalize().as_bytes());
            return Ok(vec![message]);
        }
        Ok(vec![])
    }

    /// Blocks as messages: one for each part that is alike.
    fn read(&mut self, blocks: Range<u64>, replica: &Replica) -> Result<Vec<Vec<u8>>, MirrorError> {
        let mut data = vec![0; usize::try_from((blocks.end - blocks.start) * BLOCK).unwrap_or(0)];
        replica.read(blocks.start * BLOCK, &mut data)?;
        let mut messages: Vec<Vec<u8>> = vec![];
        // The part that is being gathered: its blocks, stamp, and whether it is zero.
        let mut part: Option<(Range<u64>, Option<Stamp>, bool)> = None;
        for block in blocks.clone() {
            let at = ((block - blocks.start) * BLOCK) as usize;
            let zero = is_zero(&data[at..at + BLOCK as usize]);
            let stamp = replica.stamp(block)?;
            match &mut part {
                Some((run, s, z)) if *s == stamp && *z == zero => run.end = block + 1,
                _ => {
                    messages.extend(
                        part.replace((block..block + 1, stamp, zero)).map(|p| self.message(&p, blocks.start, &data)),
                    );
                }
            }
        }
        messages.extend(part.map(|p| self.message(&p, blocks.start, &data)));
        Ok(messages)
    }

    /// Whether blocks may go by name now: a name that leads nowhere costs a round trip, and here nobody waits for that, or there is
    /// so much left that it is worth it.
    fn may_name(&self) -> bool {
        let waited_for = match self.state {
            State::Copying => false,
            State::Finishing => self.dirty.len() <= NEARLY_CLEAN,
            State::Exchanging | State::Mirroring | State::Complete => true,
        };
        !waited_for && self.link.is_none_or(|link| choose::names_pay(link, None))
    }

    fn message(&mut self, (run, stamp, zero): &(Range<u64>, Option<Stamp>, bool), from: u64, data: &[u8]) -> Vec<u8> {
        let at = ((run.start - from) * BLOCK) as usize..((run.end - from) * BLOCK) as usize;
        let mut how = How::InFull;
        let message = match (stamp, zero) {
            (None, _) => run_message(FORGET, run, Stamp::decode(&[0; STAMP_BYTES]), &[]),
            (Some(stamp), true) => {
                self.elided += run.end - run.start;
                run_message(ZEROES, run, *stamp, &[])
            }
            (Some(stamp), false) => {
                let frame = if self.may_name() { self.flight.names.name(run.start, &data[at.clone()]) } else { None };
                match frame {
                    Some(frame) => {
                        how = How::Named;
                        run_message(NAMED, run, *stamp, &frame)
                    }
                    None => run_message(DATA, run, *stamp, &data[at]),
                }
            }
        };
        self.digest.update(&message);
        self.flight.push(&message, how);
        message
    }

    /// Time passes. Whether writes were let go because the target does not answer: whoever waits has to look again.
    pub fn tick(&mut self, now: Duration) -> bool {
        match self.waiting.front() {
            Some((_, since)) if self.state == State::Mirroring && now.saturating_sub(*since) >= PATIENCE => {
                // What is on its way arrives when the link is back: nothing has to be sent twice.
                self.released = self.flight.sent();
                self.waiting.clear();
                self.state = State::Copying;
                true
            }
            _ => false,
        }
    }

    /// Nobody waits for the target any more, now or later: the guest is stopping. What is on its way arrives all the same.
    pub fn let_go(&mut self) {
        self.lag.let_go();
        self.waiting.clear();
    }

    /// The guest stands still and writes no more. What is left goes now.
    pub fn stop(&mut self) {
        if matches!(self.state, State::Copying | State::Mirroring) {
            self.state = State::Finishing;
        }
    }
}

/// A mirror's figures.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// To be copied in all, as known so far.
    pub total: Bytes,
    /// Copied.
    pub copied: Bytes,
    /// Still different.
    pub remaining: Bytes,
    /// Zeroes that did not travel.
    pub elided: Bytes,
    /// Blocks that were written, and that the target had already when the mirror began.
    pub held: Bytes,
    /// Blocks that the target found by their names, and that did not travel.
    pub named: Bytes,
}

/// The target's machine.
#[derive(Debug, Default)]
pub struct Target {
    digest: blake3::Hasher,
    seq: Seq,
    complete: bool,
    /// Where names are looked up, and this volume's place in it.
    library: Option<Reader>,
    /// Blocks that were named in vain and have not come since.
    missing: BlockSet,
    order: order::Coming,
}

impl Target {
    /// A mirror that begins. What to send first: what this replica has.
    ///
    /// # Errors
    /// When the replica cannot be read.
    pub fn new(replica: &Replica) -> Result<(Self, Has), MirrorError> {
        Ok((Self::default(), Has::new(replica, Ends::Last)?.first([vec![HAVE, TAKES_ORDER]])))
    }

    /// The same, of a volume of the trust domain that this library is for: blocks that are in it need not travel.
    ///
    /// # Errors
    /// When the replica cannot be read.
    pub fn with_library(replica: &Replica, library: Arc<Library>) -> Result<(Self, Has), MirrorError> {
        let (mut target, has) = Self::new(replica)?;
        let Some(library) = Reader::new(library, replica) else { return Ok((target, has)) };
        let mut known = library.greetings(replica).into_iter().map(|greeting| [&[KNOWN][..], &greeting].concat());
        // The key, the stamps, and then the marks: the copy need not wait for all of them.
        let has = has.first(known.next()).then(known);
        target.library = Some(library);
        Ok((target, has))
    }

    /// Whether everything is here, durably.
    #[must_use]
    pub const fn is_complete(&self) -> bool {
        self.complete
    }

    /// What guests came to first, as the source recorded it; nothing, where it said nothing.
    #[must_use]
    pub fn order(&self) -> Vec<Range<u64>> {
        self.order.runs()
    }

    /// A message came from the source; what to answer.
    ///
    /// # Errors
    /// When it makes no sense, or the replica fails: this mirror is over then.
    pub fn handle(&mut self, message: &[u8], replica: &Replica) -> Result<Vec<u8>, MirrorError> {
        let (kind, body) = message.split_first().ok_or(MirrorError::Message("an empty message"))?;
        if self.complete {
            return Err(MirrorError::Message("a message after the last"));
        }
        if *kind == FINAL {
            let digest = self.digest.finalize();
            if body != digest.as_bytes() {
                return Err(MirrorError::Digest);
            }
            if !self.missing.is_empty() {
                // The source has been told, will send them, and then end once more.
                return Ok(self.ack());
            }
            replica.commit()?;
            replica.has_all()?;
            self.complete = true;
            let mut answer = vec![FINISHED];
            answer.extend(digest.as_bytes());
            return Ok(answer);
        }
        if *kind == ORDER {
            self.order.push(body);
            self.seq += 1;
            return Ok(self.ack());
        }
        let Some((run, stamp, data)) = parse_run(body) else { return Err(MirrorError::Message("a malformed run")) };
        // Zeroes for a whole volume are a few bytes on the wire, and a table of all its blocks here.
        if run.end - run.start > MOST_BLOCKS {
            return Err(MirrorError::Message("a run of more blocks than a message has"));
        }
        self.missing.remove(run.clone());
        let mut missing = vec![];
        match *kind {
            DATA if !data.is_empty() && data.len() as u64 == (run.end - run.start).saturating_mul(BLOCK) => {
                self.apply(run.start, stamp, data, replica)?;
            }
            NAMED => missing = self.named(&run, stamp, data, replica)?,
            ZEROES if data.is_empty() => replica.apply(run.start, stamp, Contents::Zeroes(run.end - run.start))?,
            FORGET if data.is_empty() => replica.forget(run)?,
            _ => return Err(MirrorError::Message("a message that does not belong here")),
        }
        self.digest.update(message);
        self.seq += 1;
        let mut answer = self.ack();
        answer.extend(reply(&missing));
        Ok(answer)
    }

    fn ack(&self) -> Vec<u8> {
        let mut answer = vec![ACK];
        answer.extend(self.seq.to_le_bytes());
        answer
    }

    fn apply(&self, first: u64, stamp: Stamp, data: &[u8], replica: &Replica) -> Result<(), MirrorError> {
        replica.apply(first, stamp, Contents::Data(data))?;
        if let Some(library) = &self.library {
            library.learn(first, data);
        }
        Ok(())
    }

    /// Blocks of which some are named; those that are not in the library.
    fn named(
        &mut self,
        run: &Range<u64>,
        stamp: Stamp,
        frame: &[u8],
        replica: &Replica,
    ) -> Result<Vec<u16>, MirrorError> {
        let Some(library) = &self.library else {
            return Err(MirrorError::Message("names, for which it was given no key"));
        };
        let taken = library.take(run, frame, replica)?;
        for (at, data) in &taken.present {
            self.apply(run.start + *at as u64, stamp, data, replica)?;
        }
        for at in &taken.missing {
            let block = run.start + u64::from(*at);
            self.missing.insert(block..block + 1);
        }
        if self.missing.len() > MOST_MISSING {
            return Err(MirrorError::Message("more names that lead nowhere than a source has on its way"));
        }
        Ok(taken.missing)
    }
}

#[cfg(test)]
#[path = "mirror_tests.rs"]
mod tests;
