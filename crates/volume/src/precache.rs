//! Keeps a replica at another site nearly equal to this one, for ever, behind the guest's back (xNBD+, section 3: pre-caching).
//!
//! ```text
//!   source                                   target
//!   Exchanging  <----------- Have ---------  its stamps, and the epoch that it holds
//!   Idle           (an epoch ends, and is durable here)
//!   Sending     ------ Data, Zeroes, ----->  in their places, or beside an image
//!               <----------- Ack ----------
//!   Ending      ------------ End --------->  data, fdatasync, then the epoch
//!   Idle        <--------- Complete -------
//! ```
//!
//! No guest's write waits for any of this, nor for its reading: [`crate::epoch`] has the little that happens under the guest's
//! lock, and stamps are compared a window at a time (`walk.rs`). Only epochs that have ended and are durable here are sent, so a stamp
//! that the target has seen is never given to other contents, and whatever either side loses, comparing stamps tells what has to travel.
//!
//! What the target says that it holds, its [`Complete`] epoch, means: each block that the source has not written since that
//! epoch's end is here, with the same stamp; and with an *image*, all of the volume is here as it was at that moment. The target's
//! order is data, fdatasync, then the epoch. A target that loses power in between forgets what it is not sure of, and says
//! before that that it holds no epoch.
//!
//! Messages come in order and without loss, as for [`crate::mirror`]; what they say is the same but for the two last. Blocks may go by
//! name here, too, where the target has them on other volumes; an epoch does not end before all names were answered, and what the
//! target could not get has gone in full.

use crate::ahead::held_by;
use crate::blocks::{BLOCK, BlockSet};
use crate::epoch::{Recorder, Subscriber};
use crate::flight::{Flight, How};
use crate::has::{Ends, Has};
use crate::journal::Journal;
use crate::library::{Library, Reader};
use crate::meta::{Complete, Moment};
use crate::mirror::{ACK, DATA, FORGET, KNOWN, MAX_MESSAGE, MOST_BLOCKS, MOST_MISSING, MirrorError, NAMED, ZEROES};
use crate::replica::{Replica, give_way, is_zero};
use crate::runs::{EPOCH, HAVE, parse_run, run_message};
use crate::stamp::{STAMP_BYTES, Stamp};
use crate::walk::{Comparing, Who};
use godwit_content::{choose, reply};
use godwit_units::{BitRate, Bytes};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What may be on its way without an answer, at first: more than most WANs hold, little enough to hold nobody up for long.
const WINDOW: u64 = 4 << 20;
/// The most of it, where the path is fast and long.
const MOST_WINDOW: u64 = 32 << 20;
/// So many runs in a row of which nothing is sent are read at a time.
const PASSED_BY: u32 = 256;
const END: u8 = 20;
const COMPLETE: u8 = 21;

/// Where a source stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// The target's stamps are awaited.
    Exchanging,
    /// Nothing to send: an epoch has to end.
    Idle,
    /// Blocks of an ended epoch go.
    Sending,
    /// The target makes the epoch durable.
    Ending,
}

/// Why blocks are looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Why {
    /// They are of the epoch.
    Differs,
    /// They went by name, and the target could not get them.
    Again,
}

/// The source's machine, for one secondary.
#[derive(Debug)]
pub struct Source {
    state: State,
    id: Subscriber,
    /// What the target says it has is compared with what is here.
    comparing: Option<Comparing>,
    cursor: u64,
    epoch: Option<Complete>,
    held: Option<Complete>,
    flight: Flight,
    /// Of this epoch: went by name, and the target could not get it.
    again: BlockSet,
    /// How fast the link is, if somebody said so.
    link: Option<BitRate>,
    /// What may be on its way.
    window: u64,
    digest: blake3::Hasher,
    sent_blocks: u64,
    #[cfg(test)]
    without_stamp_check: bool,
    #[cfg(test)]
    without_answers: bool,
}

impl Source {
    /// A session that begins, for what [`Recorder::subscribe`] gave.
    #[must_use]
    pub fn new(id: Subscriber) -> Self {
        Self {
            state: State::Exchanging,
            id,
            comparing: None,
            cursor: 0,
            epoch: None,
            held: None,
            flight: Flight::new(),
            again: BlockSet::default(),
            link: None,
            window: WINDOW,
            digest: blake3::Hasher::new(),
            sent_blocks: 0,
            #[cfg(test)]
            without_stamp_check: false,
            #[cfg(test)]
            without_answers: false,
        }
    }

    /// Where it stands.
    #[must_use]
    pub const fn state(&self) -> State {
        self.state
    }

    /// Who it is to the recorder.
    #[must_use]
    pub const fn subscriber(&self) -> Subscriber {
        self.id
    }

    /// The epoch that the secondary holds, as it said last.
    #[must_use]
    pub const fn held(&self) -> Option<Complete> {
        self.held
    }

    /// Bytes of blocks that were sent, zeroes included.
    #[must_use]
    pub const fn sent(&self) -> Bytes {
        Bytes(self.sent_blocks * BLOCK)
    }

    /// Bytes of messages that are on their way.
    #[must_use]
    pub const fn in_flight(&self) -> Bytes {
        Bytes(self.flight.bytes())
    }

    /// Bytes of blocks that the target found by their names, and that did not travel.
    #[must_use]
    pub const fn named(&self) -> Bytes {
        let names = self.flight.names.figures();
        Bytes((names.named - names.missed) * BLOCK)
    }

    /// How fast this may go, and the path's round trip: what may be on its way follows from them, and over a link that is faster than digests are
    /// computed blocks go in full.
    pub fn path_is(&mut self, rate: BitRate, round_trip: Duration) {
        self.link = Some(rate);
        self.window = held_by(rate, round_trip, WINDOW..=MOST_WINDOW);
    }

    /// A message came from the target.
    ///
    /// # Errors
    /// When it makes no sense, or the replica cannot be read.
    pub fn handle(&mut self, message: &[u8], replica: &Replica, recorder: &Recorder) -> Result<(), MirrorError> {
        let (kind, body) = message.split_first().ok_or(MirrorError::Message("an empty message"))?;
        match *kind {
            HAVE if self.state == State::Exchanging => {
                self.have(body, replica, recorder)?;
                // What the guest writes meanwhile the recorder hears: this one has been a subscriber for long. All that was said is compared before
                // more of it is taken, or it would grow.
                let mut began = Instant::now();
                while self.compare(replica, recorder)? {
                    give_way(began);
                    began = Instant::now();
                }
                Ok(())
            }
            KNOWN => Ok(self.flight.names.greet(body)?),
            ACK => {
                for block in self.flight.acknowledged(body)? {
                    self.again.insert(block..block + 1);
                }
                Ok(())
            }
            COMPLETE if self.state == State::Ending => {
                if body != self.digest.finalize().as_bytes() {
                    return Err(MirrorError::Digest);
                }
                self.held = self.epoch.take();
                self.state = State::Idle;
                recorder.completed(self.id);
                Ok(())
            }
            _ => Err(MirrorError::Message("a message that does not belong here")),
        }
    }

    fn have(&mut self, body: &[u8], replica: &Replica, recorder: &Recorder) -> Result<(), MirrorError> {
        let malformed = MirrorError::Message("a malformed Have");
        let Some((kind, rest)) = body.split_first() else { return Err(malformed) };
        let last = *kind == EPOCH;
        let runs = if last { &[] } else { rest };
        self.begin_to_compare(replica, recorder)?.take(runs, replica.size().0 / BLOCK, last).ok_or(malformed)?;
        if last {
            self.held = serde_json::from_slice(rest).map_err(|_| MirrorError::Message("a malformed epoch"))?;
        }
        Ok(())
    }

    /// Compares a window of what the target has said; whether there is another.
    fn compare(&mut self, replica: &Replica, recorder: &Recorder) -> Result<bool, MirrorError> {
        let Some(comparing) = self.comparing.as_mut().filter(|comparing| comparing.may_step()) else {
            return Ok(false);
        };
        if !recorder.knows(self.id) {
            return Err(MirrorError::Over);
        }
        if let Some(found) = comparing.step(replica)? {
            self.comparing = None;
            recorder.compared(self.id, found.differing, self.held);
            self.state = State::Idle;
        }
        Ok(self.comparing.as_ref().is_some_and(Comparing::may_step))
    }

    /// The comparison, which begins with the first that the target says.
    fn begin_to_compare(&mut self, replica: &Replica, recorder: &Recorder) -> Result<&mut Comparing, MirrorError> {
        match &mut self.comparing {
            Some(comparing) => Ok(comparing),
            begins => {
                if !recorder.make_sure(self.id, replica)? {
                    return Err(MirrorError::Over);
                }
                Ok(begins.insert(Comparing::begin(Who::Precache, replica)?))
            }
        }
    }

    /// Whether there may be something to send now: [`Source::poll`] reads the disk, and is not to be asked without need.
    #[must_use]
    pub fn may_send(&self, recorder: &Recorder) -> bool {
        match self.state {
            State::Idle => recorder.sendable(self.id).is_some(),
            State::Sending => self.flight.bytes() < self.window,
            State::Exchanging | State::Ending => false,
        }
    }

    /// The next messages to send; empty: nothing now. Not under the guest's lock: it reads the disk.
    ///
    /// # Errors
    /// When the replica cannot be read, or more was overwritten than is kept for an image: the session is over then, and another one begins
    /// with a comparison.
    pub fn poll(&mut self, replica: &Replica, recorder: &Recorder) -> Result<Vec<Vec<u8>>, MirrorError> {
        if self.state == State::Idle
            && let Some(epoch) = recorder.sendable(self.id)
        {
            (self.epoch, self.state, self.cursor) = (Some(epoch), State::Sending, 0);
        }
        let (State::Sending, Some(epoch)) = (self.state, self.epoch) else { return Ok(vec![]) };
        if self.flight.bytes() >= self.window {
            return Ok(vec![]);
        }
        if let Some(room) = recorder.overflown(self.id) {
            return Err(MirrorError::Overwritten { room });
        }
        let kept = recorder.take_kept(self.id, MOST_BLOCKS as usize);
        if !kept.is_empty() {
            return Ok(kept.into_iter().map(|(b, k)| self.message(b..b + 1, k.stamp, &k.data, How::InFull)).collect());
        }
        if let Some(run) = self.again.run_from(0, MOST_BLOCKS) {
            self.again.remove(run.clone());
            return self.read(&run, Why::Again, epoch, replica, recorder);
        }
        // Runs of which nothing is sent, since all of it has been written again, are passed by.
        for _ in 0..PASSED_BY {
            let Some(run) = recorder.next_run(self.id, self.cursor, MOST_BLOCKS) else { break };
            self.cursor = run.end;
            let messages = self.read(&run, Why::Differs, epoch, replica, recorder)?;
            if !messages.is_empty() {
                return Ok(messages);
            }
        }
        #[cfg(test)]
        let sure = self.flight.names.unsure() == 0 || self.without_answers;
        #[cfg(not(test))]
        let sure = self.flight.names.unsure() == 0;
        if recorder.is_sent(self.id) && sure {
            self.state = State::Ending;
            let mut message = vec![END];
            message.extend(self.digest.finalize().as_bytes());
            message.extend(serde_json::to_vec(&epoch).map_err(|_| MirrorError::Message("an epoch"))?);
            return Ok(vec![message]);
        }
        Ok(vec![])
    }

    /// Whether blocks may go by name. What is put aside for a later image cannot be found before it is in its place, and what was named in
    /// vain and overwritten meanwhile would cost the whole epoch: so not where there is an image already.
    fn may_name(&self, epoch: Complete) -> bool {
        let aside = epoch.image && self.held.is_some_and(|held| held.image);
        !aside && self.link.is_none_or(|link| choose::names_pay(link, None))
    }

    /// Blocks as messages.
    fn read(
        &mut self,
        run: &Range<u64>,
        why: Why,
        epoch: Complete,
        replica: &Replica,
        recorder: &Recorder,
    ) -> Result<Vec<Vec<u8>>, MirrorError> {
        let mut data = vec![0; ((run.end - run.start) * BLOCK) as usize];
        replica.read(run.start * BLOCK, &mut data)?;
        self.looked_at(run, &data, why, epoch, replica, recorder)
    }

    /// What was read, as messages. Stamps are looked at after the reading: a block that was written meanwhile, and may be torn, has a newer one.
    fn looked_at(
        &mut self,
        run: &Range<u64>,
        data: &[u8],
        why: Why,
        epoch: Complete,
        replica: &Replica,
        recorder: &Recorder,
    ) -> Result<Vec<Vec<u8>>, MirrorError> {
        let how = if why == Why::Differs && self.may_name(epoch) { How::Named } else { How::InFull };
        let mut messages = vec![];
        // The part that is being gathered: its blocks, stamp, and whether it is zero.
        let mut part: Option<(Range<u64>, Option<Stamp>, bool)> = None;
        let of = |blocks: &Range<u64>| {
            ((blocks.start - run.start) * BLOCK) as usize..((blocks.end - run.start) * BLOCK) as usize
        };
        for block in run.clone() {
            let stamp = replica.stamp(block)?;
            #[cfg(test)]
            let checked = !self.without_stamp_check;
            #[cfg(not(test))]
            let checked = true;
            if checked && stamp.is_some_and(|stamp| stamp > epoch.epoch) {
                if epoch.image && why == Why::Again {
                    // It counted as sent, so nobody kept it: there is no image of this epoch to be had.
                    return Err(MirrorError::Message(
                        "a block was overwritten that the secondary has to be sent again",
                    ));
                }
                // Comes with its own epoch; what it was is kept, if that is wanted.
                messages.extend(part.take().map(|(r, s, _)| self.message(r.clone(), s, &data[of(&r)], how)));
                continue;
            }
            let zero = is_zero(&data[of(&(block..block + 1))]);
            match &mut part {
                Some((r, s, z)) if *s == stamp && *z == zero && r.end == block => r.end = block + 1,
                _ => messages.extend(
                    part.replace((block..block + 1, stamp, zero))
                        .map(|(r, s, _)| self.message(r.clone(), s, &data[of(&r)], how)),
                ),
            }
        }
        messages.extend(part.take().map(|(r, s, _)| self.message(r.clone(), s, &data[of(&r)], how)));
        recorder.read(self.id, run.clone());
        Ok(messages)
    }

    fn message(&mut self, run: Range<u64>, stamp: Option<Stamp>, data: &[u8], how: How) -> Vec<u8> {
        let mut went = How::InFull;
        let message = match stamp {
            None => run_message(FORGET, &run, Stamp::decode(&[0; STAMP_BYTES]), &[]),
            Some(stamp) if is_zero(data) => run_message(ZEROES, &run, stamp, &[]),
            Some(stamp) => {
                let frame = if how == How::Named { self.flight.names.name(run.start, data) } else { None };
                match frame {
                    Some(frame) => {
                        went = How::Named;
                        run_message(NAMED, &run, stamp, &frame)
                    }
                    None => run_message(DATA, &run, stamp, data),
                }
            }
        };
        self.sent_blocks += run.end - run.start;
        self.digest.update(&message);
        self.flight.push(&message, went);
        message
    }
}

/// The target's machine.
#[derive(Debug)]
pub struct Target {
    digest: blake3::Hasher,
    seq: u64,
    /// Where what comes is put aside, where an image is kept.
    journal: Option<Journal>,
    /// The journal has begun to take an epoch.
    aside: bool,
    nonce: u64,
    /// Where names are looked up.
    library: Option<Reader>,
    /// Blocks that were named in vain and have not come since.
    missing: BlockSet,
    /// An epoch that has all come, and waits for those of other volumes that ended in its moment.
    sealed: Option<Complete>,
}

impl Target {
    /// A session that begins, and what to send first: what this replica has. `journal`: keep the last epoch as an image; no journal: blocks go to their
    /// places as they come. What an earlier session had put aside is dropped, and comes again.
    ///
    /// # Errors
    /// When the replica cannot be read, or is a shadow volume, or is told what it will have to fetch.
    pub fn new(replica: &Replica, journal: Option<Journal>) -> Result<(Self, Has), MirrorError> {
        replica.refuse_strange()?;
        let has = Has::new(replica, Ends::Epoch)?;
        let it = Self {
            digest: blake3::Hasher::new(),
            seq: 0,
            journal,
            aside: false,
            nonce: 0,
            library: None,
            missing: BlockSet::default(),
            sealed: None,
        };
        Ok((it, has))
    }

    /// The same, of a volume of the trust domain that this library is for: blocks that are in it need not travel. What it holds is told
    /// where the replica holds nothing complete; afterwards what comes is news.
    ///
    /// # Errors
    /// As [`Target::new`].
    pub fn with_library(
        replica: &Replica,
        journal: Option<Journal>,
        library: Arc<Library>,
    ) -> Result<(Self, Has), MirrorError> {
        let (mut target, has) = Self::new(replica, journal)?;
        let Some(library) = Reader::new(library, replica) else { return Ok((target, has)) };
        let most = if replica.complete().is_none() { usize::MAX } else { 1 };
        let known = library.greetings(replica).into_iter().map(|greeting| [&[KNOWN][..], &greeting].concat());
        // Before the stamps, with which the copy begins: nobody waits for that.
        let has = has.first(known.take(most));
        target.library = Some(library);
        Ok((target, has))
    }

    /// A message came from the source; what to answer. Nothing, where [`Target::sealed`] says for what that has to wait.
    ///
    /// # Errors
    /// When it makes no sense, or the replica fails: this session is over then.
    pub fn handle(&mut self, message: &[u8], replica: &Replica) -> Result<Vec<u8>, MirrorError> {
        let (kind, body) = message.split_first().ok_or(MirrorError::Message("an empty message"))?;
        if self.sealed.is_some() {
            return Err(MirrorError::Message("a message behind the end of an epoch"));
        }
        // A hand-off may have begun since.
        replica.refuse_strange()?;
        if *kind == END {
            return self.end(body, replica);
        }
        let Some((run, stamp, data)) = parse_run(body) else { return Err(MirrorError::Message("a malformed run")) };
        let blocks = run.end.saturating_sub(run.start);
        let sensible = match *kind {
            DATA => data.len() as u64 == blocks.saturating_mul(BLOCK) && blocks > 0,
            ZEROES | FORGET => data.is_empty(),
            NAMED => blocks > 0,
            _ => false,
        };
        // A journal is written in its place later, when nobody is there to be told.
        if !sensible || blocks > MOST_BLOCKS || run.end > replica.size().0 / BLOCK || message.len() > MAX_MESSAGE {
            return Err(MirrorError::Message("a run that cannot be"));
        }
        self.missing.remove(run.clone());
        let mut missing = vec![];
        if *kind == NAMED {
            let library = self.library.as_ref();
            let library = library.ok_or(MirrorError::Message("names, for which it was given no key"))?;
            let taken = library.take(&run, data, replica)?;
            for (at, data) in &taken.present {
                let first = run.start + *at as u64;
                let blocks = first..first + data.len() as u64 / BLOCK;
                self.keep(&run_message(DATA, &blocks, stamp, data), replica)?;
            }
            for at in &taken.missing {
                let block = run.start + u64::from(*at);
                self.missing.insert(block..block + 1);
            }
            if self.missing.len() > MOST_MISSING {
                return Err(MirrorError::Message("more names that lead nowhere than a source has on its way"));
            }
            missing = taken.missing;
        } else {
            self.keep(message, replica)?;
        }
        self.digest.update(message);
        self.seq += 1;
        let mut answer = vec![ACK];
        answer.extend(self.seq.to_le_bytes());
        answer.extend(reply(&missing));
        Ok(answer)
    }

    /// Blocks came, all of them in the message: into their places, or aside.
    fn keep(&mut self, message: &[u8], replica: &Replica) -> Result<(), MirrorError> {
        let image = replica.complete().is_some_and(|held| held.image);
        match &mut self.journal {
            // Only where there is an image is there something to spare.
            Some(journal) if image => {
                if !std::mem::replace(&mut self.aside, true) {
                    begin(journal, &mut self.nonce, replica)?;
                }
                journal.append(message)?;
            }
            _ => {
                if image {
                    // It is none any more with the first block of the next.
                    replica.set_complete(replica.complete().map(|held| Complete { image: false, ..held }))?;
                }
                crate::journal::apply(message, replica)?;
                if let (Some(library), Some((&DATA, body))) = (&self.library, message.split_first())
                    && let Some((run, _, data)) = parse_run(body)
                {
                    library.learn(run.start, data);
                }
            }
        }
        Ok(())
    }

    fn end(&mut self, body: &[u8], replica: &Replica) -> Result<Vec<u8>, MirrorError> {
        let malformed = MirrorError::Message("a malformed End");
        let Some((digest, json)) = body.split_first_chunk::<32>() else { return Err(malformed) };
        let epoch: Complete = serde_json::from_slice(json).map_err(|_| malformed)?;
        let ours = self.digest.finalize();
        if digest != ours.as_bytes() {
            return Err(MirrorError::Digest);
        }
        // A block that was overwritten since comes with its own epoch; an image has to have it as it was.
        if !std::mem::take(&mut self.missing).is_empty() && epoch.image {
            return Err(MirrorError::Message("an image without blocks that were asked for"));
        }
        let image = replica.complete().is_some_and(|held| held.image);
        match &mut self.journal {
            Some(journal) if image && epoch.image && epoch.moment.is_some() => {
                // Also where nothing was written to this volume: the moment is all of theirs.
                if !std::mem::take(&mut self.aside) {
                    begin(journal, &mut self.nonce, replica)?;
                }
                journal.seal(epoch)?;
                self.sealed = Some(epoch);
                return Ok(vec![]);
            }
            Some(journal) if self.aside => journal.finish(epoch, replica)?,
            _ => {
                replica.commit()?;
                // An image of a source that keeps none is not one.
                let image = epoch.image && self.journal.is_some();
                replica.set_complete(Some(Complete { image, ..epoch }))?;
            }
        }
        self.aside = false;
        Ok(self.completed())
    }

    /// The moment whose other volumes' epochs have to be here before this one's can count.
    #[must_use]
    pub fn sealed(&self) -> Option<Moment> {
        self.sealed.and_then(|epoch| epoch.moment)
    }

    /// It was decided, durably, that all epochs of the moment are here: this one becomes the image. What to answer.
    ///
    /// # Errors
    /// When the replica fails, or nothing waits for that.
    pub fn decided(&mut self, replica: &Replica) -> Result<Vec<u8>, MirrorError> {
        let nothing = MirrorError::Message("a decision about nothing");
        let (Some(epoch), Some(journal)) = (self.sealed, &mut self.journal) else { return Err(nothing) };
        replica.refuse_strange()?;
        journal.redo(epoch, replica)?;
        self.sealed = None;
        Ok(self.completed())
    }

    fn completed(&self) -> Vec<u8> {
        let mut answer = vec![COMPLETE];
        answer.extend(self.digest.finalize().as_bytes());
        answer
    }
}

/// Begins a journal for what comes after what is held.
fn begin(journal: &mut Journal, nonce: &mut u64, replica: &Replica) -> Result<(), MirrorError> {
    *nonce += 1;
    let held = serde_json::to_vec(&(replica.complete(), *nonce)).unwrap_or_default();
    let nonce = blake3::hash(&held);
    Ok(journal.begin(std::array::from_fn(|i| nonce.as_bytes()[i]))?)
}

#[cfg(test)]
#[path = "precache_tests.rs"]
mod tests;
