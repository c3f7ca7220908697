//! Brings to a shadow volume what is not here: what the guest asks for first, the rest behind its back (xNBD+, section 3.2; vMocity,
//! section 2.2.1).
//!
//! ```text
//!   destination (Requester)                     holder (Server)
//!     a read finds a block absent ---- Ask, demand --->
//!     the fill's next run         ---- Ask, fill ----->
//!     a read of what is asked for ---- Hurry --------->   it overtakes the fill
//!                                 <--- Data, Zeroes ---   contents with the stamp that was asked for
//!     what is found here by name  <--- Named ----------   of a fill, where this site's library has it
//!                                 <--- Lack -----------   this holder cannot: another is asked
//!     what is durable here        ---- Durable ------->   at nought it may let go
//! ```
//!
//! No sockets, no clock, and no requests of the guest: whoever serves it asks with [`Requester::demand`] for what a read or a part of a
//! block needs, and tries again when something has come. So nothing here grows with the guest's requests but a set of blocks,
//! and after a crash of either side the guest's requests themselves begin all again.
//!
//! # Who goes first
//!
//! A demand is asked at once, and answered before all fill that has not gone yet; the two lie on lanes of their own, so that a
//! link can let one overtake the other. The fill goes on all the same: after [`TURNS`] answers to demands one piece of it goes. A block is asked
//! for once; one that the fill has asked for is hurried, not asked for again: each byte travels once, but for what a
//! broken session swallowed.
//!
//! # Names
//!
//! Where this site holds other volumes of the trust domain, the holder is told their marks ([`crate::Library`]), a message with each piece of
//! the fill, so that no demand waits behind them. It names what it finds among them in the fill's answers, never in a demand's. What a name does not
//! lead to is asked for as if it were demanded, and comes in full.
//!
//! To look a block up costs a read of a disk and a digest, and to learn one a digest; so neither is done under the lock that the guest's writes
//! take ([`Opener::open`], then [`Requester::take`] under it, then [`Arrival::learn`]). The order holds by itself. *Open before take*: what is
//! found is copied out and compared with its name, and is the contents of the stamp that was asked for, whatever is written to where it
//! was found; that the guest has written to its place meanwhile is seen at the take, as with contents that were still on the link.
//! *Take before learn*: a library's word is a guess that whoever uses it compares, so a block that the guest overwrites in between is
//! not found, or found to be another; and what was refused is never learnt.
//!
//! # What can go wrong
//!
//! *The path is cut, or the holder's node dies.* [`Requester::disconnected`]: what was asked is forgotten, and asked again of whoever
//! is there, or comes back. What is here is served meanwhile. [`Requester::starving`] says for how long the guest has waited in
//! vain: beyond [`PAUSE_AFTER`] its processors are better stopped, so that its own timeouts do not run out.
//!
//! *This node dies.* What had come is here, what had not is absent: see [`crate::Replica`]'s words. The next process begins
//! with a new requester.
//!
//! *A holder cannot read what it has.* It says that it lacks just those blocks ([`Server::take_unreadable`] says why), so that the others come, and
//! another holder is asked. Where there is none nobody brings them ([`Requester::nowhere`]), and they are asked for again now and then
//! ([`Requester::ask_lacking_again`]): somebody may repair them there.
//!
//! *A holder sends what nobody asked for, or floods.* It is an error, which ends the session; queues have bounds on both
//! sides.

use crate::ahead::Ahead;
use crate::blocks::{BLOCK, BlockSet};
use crate::error::VolumeError;
use crate::flight::KNOWN_BLOCKS;
use crate::library::{Library, Reader};
use crate::mirror::MirrorError;
use crate::order::{FillOrder, Next};
use crate::replica::{Contents, Replica, is_zero};
use crate::runs::{parse_run, run_message, words};
use crate::shadow::{Holder, Version};
use crate::stamp::{STAMP_BYTES, Stamp};
use godwit_content::{ContentError, Sender, Taken, reply};
use godwit_units::{BlockIndex, Bytes};
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// Blocks of one question, and of one answer to a demand: 256 KiB, as a mirror's.
const MOST_BLOCKS: u64 = 64;
/// Blocks of one piece of the fill: 64 KiB, 5 ms at 100 Mbit/s, so that a demand does not wait long behind it.
const FILL_BLOCKS: u64 = 16;
/// Blocks that the fill asks for and has not got: at first 8 MiB, more than most WANs hold; at most 64 ([`Ahead`]). They wait at the holder,
/// where a demand overtakes them.
const FILL_WINDOW: u64 = (8 << 20) / BLOCK;
const MOST_FILL_WINDOW: u64 = (64 << 20) / BLOCK;
/// Questions of the fill that are not answered: of the first window all may be for single blocks.
const FILL_QUESTIONS: usize = FILL_WINDOW as usize;
/// Blocks that guests have asked for and not got. A larger read is asked for piece by piece.
const DEMAND_WINDOW: u64 = (16 << 20) / BLOCK;
/// Questions that a holder keeps. A requester that keeps to its bounds has fewer, even of single blocks.
const MOST_QUESTIONS: usize = FILL_QUESTIONS + DEMAND_WINDOW as usize + 64;
/// Answers to demands after which a piece of the fill has its turn, if there is one.
pub const TURNS: u32 = 16;
/// A guest that has waited for so long had better stand still: Linux gives a SCSI or ATA disk 30 seconds.
pub const PAUSE_AFTER: Duration = Duration::from_secs(5);
/// Longest message believed, in bytes.
pub const MAX_MESSAGE: usize = (MOST_BLOCKS * BLOCK) as usize + 64;

const ASK: u8 = 1;
const HURRY: u8 = 2;
const DATA: u8 = 3;
const ZEROES: u8 = 4;
const LACK: u8 = 5;
const DURABLE: u8 = 6;
const KNOWN: u8 = 7;
const NAMED: u8 = 8;
const FOUND: u8 = 9;

/// What came makes no sense, or cannot be done.
#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    /// Not a message, or not now.
    #[error("the other side of the fetch says what makes no sense: {0}; this session is over, another will be tried")]
    Message(&'static str),
    /// The replica.
    #[error(transparent)]
    Volume(#[from] VolumeError),
    /// Names.
    #[error(transparent)]
    Content(#[from] ContentError),
}

impl From<MirrorError> for FetchError {
    fn from(error: MirrorError) -> Self {
        match error {
            MirrorError::Message(what) => Self::Message(what),
            MirrorError::Over | MirrorError::Overwritten { .. } => Self::Message("the end of a pre-cache"),
            MirrorError::Digest => Self::Message("a digest that differs"),
            MirrorError::Volume(error) => Self::Volume(error),
            MirrorError::Content(error) => Self::Content(error),
        }
    }
}

/// Which of two queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lane {
    /// A guest waits.
    Demand,
    /// Nobody waits.
    Fill,
}

/// Something to send to a holder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Question {
    /// To whom.
    pub to: Holder,
    /// How urgent it is.
    pub lane: Lane,
    /// What.
    pub message: Vec<u8>,
}

/// What a requester has done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Found something to be asked.
    Ask(Question),
    /// Looked at a part of what is absent, and has to be asked again: whoever waits for it has a turn now.
    Looked,
    /// Nothing: nothing is to be asked now.
    Nothing,
}

/// Something to send back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// What it answers.
    pub kind: Lane,
    /// By which lane it goes.
    pub by: Lane,
    /// What.
    pub message: Vec<u8>,
}

#[derive(Debug, Default)]
struct Session {
    demand: BlockSet,
    fill: BlockSet,
    /// What this holder said that it has not got.
    lacks: BlockSet,
    told: Option<u64>,
    /// What it is not told yet of what is here.
    greetings: VecDeque<Vec<u8>>,
    greeted: bool,
}

impl Session {
    fn has(&self, block: u64) -> Option<Lane> {
        let block = BlockIndex(block);
        match (self.demand.contains(block), self.fill.contains(block)) {
            (true, _) => Some(Lane::Demand),
            (_, true) => Some(Lane::Fill),
            _ => None,
        }
    }
}

/// How far the fill asks ahead.
impl Default for Ahead {
    fn default() -> Self {
        Self::new(FILL_WINDOW..=MOST_FILL_WINDOW)
    }
}

/// The destination's machine.
#[derive(Debug, Default)]
pub struct Requester {
    order: FillOrder,
    ahead: Ahead,
    sessions: BTreeMap<Holder, Session>,
    /// To be asked for, in the order of the guest's requests.
    queue: VecDeque<Range<u64>>,
    /// What the guest waits for.
    demanded: BlockSet,
    hungry: Option<Duration>,
    /// The fill has nothing to ask for until something changes.
    idle: bool,
    fetched: [u64; 2],
    /// Where names are looked up.
    library: Option<Arc<Reader>>,
    /// Answers to names, and what holders are told of the library: small, or paid for by a piece of the fill each.
    due: VecDeque<Question>,
    named: u64,
}

impl Requester {
    /// A fill that begins, or begins again. `order`: of first accesses, as the source sent it ahead.
    #[must_use]
    pub fn new(order: Vec<Range<u64>>) -> Self {
        Self { order: FillOrder::new(order), ..Self::default() }
    }

    /// The same, of a volume of the trust domain that this library is for: blocks that are in it need not travel.
    #[must_use]
    pub fn with_library(order: Vec<Range<u64>>, replica: &Replica, library: Arc<Library>) -> Self {
        Self { library: Reader::new(library, replica).map(Arc::new), ..Self::new(order) }
    }

    /// What was found here by name, and did not travel.
    #[must_use]
    pub const fn named(&self) -> Bytes {
        Bytes(self.named * BLOCK)
    }

    /// What came on demand, and by the fill.
    #[must_use]
    pub const fn fetched(&self) -> (Bytes, Bytes) {
        (Bytes(self.fetched[0] * BLOCK), Bytes(self.fetched[1] * BLOCK))
    }

    /// For how long the guest has waited for what does not come; none: it waits for nothing.
    #[must_use]
    pub fn starving(&self, now: Duration) -> Option<Duration> {
        self.hungry.map(|since| now.saturating_sub(since))
    }

    /// A holder can be asked from now on.
    pub fn connected(&mut self, holder: Holder) {
        self.forget(&holder);
        self.sessions.insert(holder, Session::default());
        self.ask_again();
    }

    /// It cannot any more. Its answers do not come.
    pub fn disconnected(&mut self, holder: &Holder) {
        if self.forget(holder) {
            self.ask_again();
        }
    }

    /// What was asked of a holder is not answered.
    fn forget(&mut self, holder: &Holder) -> bool {
        self.due.retain(|question| question.to != *holder);
        let Some(session) = self.sessions.remove(holder) else { return false };
        self.ahead.forget(|block| session.has(block.0).is_some());
        true
    }

    fn ask_again(&mut self) {
        self.idle = false;
        let sessions = &self.sessions;
        let asked = |block| sessions.values().any(|s| s.has(block).is_some());
        // In order of address: which of them came first matters less than that one that is here is asked now.
        let mut queue: VecDeque<Range<u64>> = VecDeque::new();
        for block in self.demanded.runs().flatten().filter(|b| !asked(*b)) {
            match queue.back_mut() {
                Some(run) if run.end == block => run.end += 1,
                _ => queue.push_back(block..block + 1),
            }
        }
        self.queue = queue;
    }

    /// The guest needs these blocks. Those that are here are no matter.
    ///
    /// # Errors
    /// When the replica cannot be read.
    pub fn demand(&mut self, blocks: Range<u64>, now: Duration, replica: &Replica) -> Result<(), FetchError> {
        let mut any = false;
        for version in replica.wanted(blocks)? {
            for block in version.blocks {
                if !self.demanded.contains(BlockIndex(block)) {
                    any = true;
                    self.demanded.insert(block..block + 1);
                    match self.queue.back_mut() {
                        Some(run) if run.end == block => run.end += 1,
                        _ => self.queue.push_back(block..block + 1),
                    }
                }
            }
        }
        if any {
            self.hungry.get_or_insert(now);
        }
        Ok(())
    }

    /// The next question; none: nothing now. To be called when the link has room, and after each other call.
    ///
    /// # Errors
    /// When the replica cannot be read.
    pub fn poll(&mut self, now: Duration, replica: &Replica) -> Result<Option<Question>, FetchError> {
        loop {
            match self.step(now, replica)? {
                Step::Ask(question) => return Ok(Some(question)),
                Step::Looked => {}
                Step::Nothing => return Ok(None),
            }
        }
    }

    /// The same, and no longer at a time than a part of the table takes: for whoever has a guest that waits for this requester.
    ///
    /// # Errors
    /// When the replica cannot be read.
    pub fn step(&mut self, now: Duration, replica: &Replica) -> Result<Step, FetchError> {
        if let Some(question) = self.due.pop_front() {
            return Ok(Step::Ask(question));
        }
        while self.sessions.values().map(|s| s.demand.len()).sum::<u64>() < DEMAND_WINDOW
            && let Some(run) = self.queue.pop_front()
        {
            if let Some(question) = self.ask_on_demand(run, replica)? {
                return Ok(Step::Ask(question));
            }
        }
        let asked: u64 = self.sessions.values().map(|s| s.demand.len() + s.fill.len()).sum();
        let filling: u64 = self.sessions.values().map(|s| s.fill.len()).sum();
        let nothing = replica.absent().0 / BLOCK <= asked;
        let full = filling + FILL_BLOCKS > self.ahead.window() || self.ahead.questions() >= FILL_QUESTIONS;
        if self.idle || nothing || self.sessions.is_empty() || full {
            return Ok(Step::Nothing);
        }
        let sessions = &self.sessions;
        let free = |version: &Version, block: u64| {
            sessions.values().all(|s| s.has(block).is_none()) && choose(sessions, version, block).is_some()
        };
        let version = match self.order.next(replica, FILL_BLOCKS, free)? {
            Next::Bring(version) => version,
            Next::Looked => return Ok(Step::Looked),
            Next::Nothing => {
                self.idle = true;
                return Ok(Step::Nothing);
            }
        };
        let (Some(to), Some(stamp)) = (choose(&self.sessions, &version, version.blocks.start), version.stamp) else {
            return Ok(Step::Nothing);
        };
        // The holder may lack a part of them: then it says so.
        if let Some(session) = self.sessions.get_mut(&to) {
            if let (false, Some(library)) = (std::mem::replace(&mut session.greeted, true), &self.library) {
                session.greetings = library.greetings(replica).into();
            }
            if let Some(greeting) = session.greetings.pop_front() {
                let message = [&[KNOWN][..], &greeting].concat();
                self.due.push_back(Question { to: to.clone(), lane: Lane::Fill, message });
            }
            session.fill.insert(version.blocks.clone());
            self.ahead.asked(&version.blocks, now);
        }
        Ok(Step::Ask(Question { to, lane: Lane::Fill, message: ask(Lane::Fill, &version.blocks, stamp) }))
    }

    /// Asks for the first part of a run, and puts the rest back.
    fn ask_on_demand(&mut self, run: Range<u64>, replica: &Replica) -> Result<Option<Question>, FetchError> {
        let piece = run.start..run.end.min(run.start + MOST_BLOCKS);
        if piece.end < run.end {
            self.queue.push_front(piece.end..run.end);
        }
        let wanted = replica.wanted(piece.clone())?;
        let Some(version) = wanted.first() else {
            // All of it is here: the guest wrote it.
            self.no_more_demanded(piece, None);
            return Ok(None);
        };
        if version.blocks.start > piece.start {
            self.no_more_demanded(piece.start..version.blocks.start, None);
        }
        let first = version.blocks.start;
        let asked = |block: u64| self.sessions.iter().find_map(|(h, s)| s.has(block).map(|lane| (h.clone(), lane)));
        let state = (asked(first), choose(&self.sessions, version, first));
        let alike =
            version.blocks.clone().take_while(|b| (asked(*b), choose(&self.sessions, version, *b)) == state).count()
                as u64;
        let part = first..first + alike;
        if part.end < piece.end {
            self.queue.push_front(part.end..piece.end);
        }
        Ok(match (state, version.stamp) {
            ((Some((to, Lane::Fill)), _), _) => {
                if let Some(session) = self.sessions.get_mut(&to) {
                    session.fill.remove(part.clone());
                    session.demand.insert(part.clone());
                }
                let mut message = vec![HURRY];
                message.extend(part.start.to_le_bytes());
                message.extend((part.end - part.start).to_le_bytes());
                Some(Question { to, lane: Lane::Demand, message })
            }
            ((None, Some(to)), Some(stamp)) => {
                if let Some(session) = self.sessions.get_mut(&to) {
                    session.demand.insert(part.clone());
                }
                self.order.read(&part);
                self.idle = false;
                Some(Question { to, lane: Lane::Demand, message: ask(Lane::Demand, &part, stamp) })
            }
            // On its way; or nobody is there who has it: asked for again when somebody comes.
            _ => None,
        })
    }

    fn no_more_demanded(&mut self, blocks: Range<u64>, progress: Option<Duration>) {
        let before = self.demanded.len();
        self.demanded.remove(blocks);
        if self.demanded.is_empty() {
            self.hungry = None;
        } else if let (true, Some(now)) = (self.demanded.len() < before, progress) {
            self.hungry = Some(now);
        }
    }

    /// What opens the messages that come for this requester.
    #[must_use]
    pub fn opener(&self) -> Opener {
        Opener(self.library.clone())
    }

    /// A message came from a holder: opened, taken and learnt at once, for whoever has no guest that waits.
    ///
    /// # Errors
    /// As [`Opener::open`] and [`Requester::take`].
    pub fn handle(
        &mut self,
        from: &Holder,
        message: &[u8],
        now: Duration,
        replica: &Replica,
    ) -> Result<BlockSet, FetchError> {
        let opener = self.opener();
        let arrival = opener.open(message, replica)?;
        let taken = self.take(from, &arrival, now, replica)?;
        arrival.learn();
        Ok(taken)
    }

    /// A message that was opened: what of it is here now and was not before. Whoever waits for it has to try again.
    ///
    /// # Errors
    /// When it makes no sense: the session is over; or the replica fails.
    pub fn take(
        &mut self,
        from: &Holder,
        arrival: &Arrival<'_>,
        now: Duration,
        replica: &Replica,
    ) -> Result<BlockSet, FetchError> {
        let Some(session) = self.sessions.get_mut(from) else {
            return Err(FetchError::Message("an answer in no session"));
        };
        let (kind, run, stamp, data) = (arrival.kind, arrival.run.clone(), arrival.stamp, arrival.data);
        let count = run.end - run.start;
        if run.clone().any(|b| session.has(b).is_none()) {
            return Err(FetchError::Message("an answer to no question"));
        }
        let contents = match kind {
            DATA if data.len() as u64 == count * BLOCK => Contents::Data(data),
            ZEROES if data.is_empty() => Contents::Zeroes(count),
            NAMED => return self.looked_up(from, arrival, now, replica),
            LACK if data.is_empty() => {
                session.demand.remove(run.clone());
                session.fill.remove(run.clone());
                self.ahead.answered(&run, None);
                session.lacks.insert(run);
                self.ask_again();
                return Ok(BlockSet::default());
            }
            _ => return Err(FetchError::Message("a message that does not belong here")),
        };
        let before = session.fill.len();
        session.demand.remove(run.clone());
        session.fill.remove(run.clone());
        self.fetched[1] += before - session.fill.len();
        self.fetched[0] += count - (before - session.fill.len());
        self.ahead.answered(&run, Some(now));
        self.arrived(&run, stamp, contents, now, replica)
    }

    /// Contents of blocks are there: into their places.
    fn arrived(
        &mut self,
        run: &Range<u64>,
        stamp: Stamp,
        contents: Contents<'_>,
        now: Duration,
        replica: &Replica,
    ) -> Result<BlockSet, FetchError> {
        let taken = replica.arrive(run.start, stamp, contents)?;
        self.no_more_demanded(run.clone(), Some(now));
        if !replica.wanted(run.clone())?.is_empty() {
            return Err(FetchError::Message("contents of another time"));
        }
        Ok(taken)
    }

    /// Blocks of which some are named. What is not found is asked for again.
    fn looked_up(
        &mut self,
        from: &Holder,
        arrival: &Arrival<'_>,
        now: Duration,
        replica: &Replica,
    ) -> Result<BlockSet, FetchError> {
        let (run, stamp) = (&arrival.run, arrival.stamp);
        let Some(found) = &arrival.found else {
            return Err(FetchError::Message("names, for which it was given no key"));
        };
        let message = [&[FOUND][..], &reply(&found.missing)].concat();
        self.due.push_back(Question { to: from.clone(), lane: Lane::Fill, message });
        if let Some(session) = self.sessions.get_mut(from) {
            session.demand.remove(run.clone());
            session.fill.remove(run.clone());
        }
        self.ahead.answered(run, Some(now));
        let mut taken = BlockSet::default();
        for (at, data) in &found.present {
            let first = run.start + *at as u64;
            let part = first..first + data.len() as u64 / BLOCK;
            self.fetched[1] += part.end - part.start;
            taken.union(&self.arrived(&part, stamp, Contents::Data(data), now, replica)?);
        }
        self.named += found.named - found.missing.len() as u64;
        for at in &found.missing {
            let block = run.start + u64::from(*at);
            self.queue.push_back(block..block + 1);
        }
        Ok(taken)
    }

    /// What to tell the holders of what has become durable here: to be called after it has, now and then.
    ///
    /// # Errors
    /// When the replica cannot be read.
    pub fn report(&mut self, replica: &Replica) -> Result<Vec<Question>, FetchError> {
        let mut out = vec![];
        for (holder, session) in &mut self.sessions {
            let left = replica.left(holder)?;
            if left.is_some() && session.told != left {
                session.told = left;
                let message = [&[DURABLE][..], &left.unwrap_or(u64::MAX).to_le_bytes()].concat();
                out.push(Question { to: holder.clone(), lane: Lane::Demand, message });
            }
        }
        Ok(out)
    }

    /// Blocks that holders said they do not have, or cannot read.
    #[must_use]
    pub fn lacking(&self) -> u64 {
        self.sessions.values().map(|s| s.lacks.len()).sum()
    }

    /// Blocks that are absent, and that nobody who is there brings, because a holder has said so of them.
    ///
    /// # Errors
    /// When the replica cannot be read.
    pub fn nowhere(&self, replica: &Replica) -> Result<u64, FetchError> {
        let mut lacked = BlockSet::default();
        self.sessions.values().for_each(|session| lacked.union(&session.lacks));
        let mut found = 0;
        for run in lacked.runs() {
            for version in replica.wanted(run)? {
                found +=
                    version.blocks.clone().filter(|b| choose(&self.sessions, &version, *b).is_none()).count() as u64;
            }
        }
        Ok(found)
    }

    /// They may have them now.
    pub fn ask_lacking_again(&mut self) {
        if self.lacking() > 0 {
            self.sessions.values_mut().for_each(|session| session.lacks = BlockSet::default());
            self.ask_again();
        }
    }
}

/// Opens messages of holders, beside whatever the requester does: see the module's "Names".
#[derive(Clone, Debug)]
pub struct Opener(Option<Arc<Reader>>);

/// A holder's message, with what its names lead to at this site.
#[derive(Debug)]
pub struct Arrival<'a> {
    kind: u8,
    run: Range<u64>,
    stamp: Stamp,
    data: &'a [u8],
    found: Option<Taken>,
    library: Option<&'a Reader>,
}

impl Opener {
    /// Looks up what a message names: reads of other volumes, and digests.
    ///
    /// # Errors
    /// When it makes no sense: the session is over.
    pub fn open<'a>(&'a self, message: &'a [u8], replica: &Replica) -> Result<Arrival<'a>, FetchError> {
        let (kind, body) = message.split_first().ok_or(FetchError::Message("an empty message"))?;
        let Some((run, stamp, data)) = parse_run(body) else { return Err(FetchError::Message("a malformed run")) };
        if run.is_empty() || run.end - run.start > MOST_BLOCKS {
            return Err(FetchError::Message("an answer to no question"));
        }
        let library = self.0.as_deref();
        let found = match library.filter(|_| *kind == NAMED) {
            Some(library) => Some(library.take(&run, data, replica)?),
            None => None,
        };
        Ok(Arrival { kind: *kind, run, stamp, data, found, library })
    }
}

impl Arrival<'_> {
    /// What it brought can be found by others from now on: to be called when it was taken.
    pub fn learn(&self) {
        let Some(library) = self.library else { return };
        if self.kind == DATA {
            library.learn(self.run.start, self.data);
        }
        for (at, data) in self.found.iter().flat_map(|found| &found.present) {
            library.learn(self.run.start + *at as u64, data);
        }
    }
}

/// Whom to ask for a block: the first that is there and has not said that it lacks it.
fn choose(sessions: &BTreeMap<Holder, Session>, version: &Version, block: u64) -> Option<Holder> {
    let can = |h: &&Holder| sessions.get(h).is_some_and(|s| !s.lacks.contains(BlockIndex(block)));
    version.holders.iter().find(can).cloned()
}

fn ask(lane: Lane, blocks: &Range<u64>, stamp: Stamp) -> Vec<u8> {
    run_message(ASK, blocks, stamp, &[u8::from(lane == Lane::Fill)])
}

/// The holder's machine, for one session.
#[derive(Debug, Default)]
pub struct Server {
    demand: VecDeque<(Range<u64>, Stamp)>,
    fill: VecDeque<(Range<u64>, Stamp)>,
    /// Answers to demands since the fill had its turn.
    turns: u32,
    left: Option<u64>,
    /// What the other site holds, where it has said so.
    names: Option<Box<Sender>>,
    /// What could not be read, and has not been told.
    unreadable: Option<(u64, VolumeError)>,
}

impl Server {
    /// A session that begins.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Blocks that the other site still needs from here, as it said last.
    #[must_use]
    pub const fn left(&self) -> Option<u64> {
        self.left
    }

    /// The last block that could not be read here since this was asked, and why. It was said to be lacking.
    #[must_use]
    pub const fn take_unreadable(&mut self) -> Option<(u64, VolumeError)> {
        self.unreadable.take()
    }

    /// Whether all that is wanted from here is durable elsewhere: then this copy may go.
    #[must_use]
    pub fn may_release(&self) -> bool {
        self.left == Some(0)
    }

    /// A message came from the other site.
    ///
    /// # Errors
    /// When it makes no sense: the session is over.
    pub fn handle(&mut self, message: &[u8]) -> Result<(), FetchError> {
        let (kind, body) = message.split_first().ok_or(FetchError::Message("an empty message"))?;
        match *kind {
            ASK => {
                let Some((run, stamp, &[lane])) = parse_run(body) else {
                    return Err(FetchError::Message("a malformed question"));
                };
                if run.is_empty() || run.end - run.start > MOST_BLOCKS {
                    return Err(FetchError::Message("a question about more blocks than an answer has"));
                }
                if self.demand.len() + self.fill.len() >= MOST_QUESTIONS {
                    return Err(FetchError::Message("more questions than fit"));
                }
                let queue = if lane == 0 { &mut self.demand } else { &mut self.fill };
                queue.push_back((run, stamp));
                Ok(())
            }
            HURRY => {
                let Some(([first, count], [])) = words::<2>(body) else {
                    return Err(FetchError::Message("a malformed Hurry"));
                };
                if count > MOST_BLOCKS || self.demand.len() + self.fill.len() >= MOST_QUESTIONS {
                    return Err(FetchError::Message("more to hurry than fits"));
                }
                self.hurry(&(first..first.saturating_add(count)));
                Ok(())
            }
            DURABLE => {
                let Some(([left], [])) = words::<1>(body) else {
                    return Err(FetchError::Message("a malformed Durable"));
                };
                self.left = Some(left);
                Ok(())
            }
            KNOWN => Ok(self.names.get_or_insert_with(|| Box::new(Sender::new(KNOWN_BLOCKS))).greet(body)?),
            FOUND => {
                let names = self.names.as_mut().ok_or(FetchError::Message("an answer to names that were not given"))?;
                // Whoever missed something asks for it.
                names.handle(body)?;
                Ok(())
            }
            _ => Err(FetchError::Message("a message that does not belong here")),
        }
    }

    /// What of these blocks waits as fill is answered as a demand; what has gone is on its way.
    fn hurry(&mut self, blocks: &Range<u64>) {
        let mut rest = VecDeque::with_capacity(self.fill.len());
        for (run, stamp) in self.fill.drain(..) {
            let hurried = run.start.max(blocks.start)..run.end.min(blocks.end);
            if hurried.is_empty() {
                rest.push_back((run, stamp));
                continue;
            }
            for part in [run.start..hurried.start, hurried.end..run.end] {
                if !part.is_empty() {
                    rest.push_back((part, stamp));
                }
            }
            self.demand.push_back((hurried, stamp));
        }
        self.fill = rest;
    }

    /// Whether an answer waits for room on this lane.
    #[must_use]
    pub fn wants(&self, lane: Lane) -> bool {
        match lane {
            Lane::Demand => !self.demand.is_empty(),
            Lane::Fill => !self.fill.is_empty(),
        }
    }

    /// The next answer that fits where there is `room`; none: nothing is asked that does. A piece of the fill that has its turn goes
    /// among the demands: on a lane of its own they would hold it up for ever.
    ///
    /// # Errors
    /// When the replica cannot be read.
    pub fn poll(&mut self, replica: &Replica, room: &[Lane]) -> Result<Option<Answer>, FetchError> {
        let goes = |lane| room.contains(&lane);
        let turn = !self.fill.is_empty() && self.turns >= TURNS;
        let (kind, by) = match () {
            () if goes(Lane::Demand) && !self.demand.is_empty() && turn => (Lane::Fill, Lane::Demand),
            () if goes(Lane::Demand) && !self.demand.is_empty() => (Lane::Demand, Lane::Demand),
            () if goes(Lane::Fill) => (Lane::Fill, Lane::Fill),
            () => return Ok(None),
        };
        let (queue, most) = match kind {
            Lane::Fill => (&mut self.fill, FILL_BLOCKS),
            Lane::Demand => (&mut self.demand, MOST_BLOCKS),
        };
        self.turns = if kind == Lane::Fill { 0 } else { self.turns.saturating_add(1) };
        let Some((run, stamp)) = queue.pop_front() else { return Ok(None) };
        let blocks = replica.size().0 / BLOCK;
        if run.end > blocks {
            return Err(FetchError::Message("a question about blocks behind the end"));
        }
        let piece = run.start..run.end.min(run.start + most);
        // The first part that is alike: here or not, zero or not.
        let has = |v: &Version| v.stamp == Some(stamp) && v.holders.is_empty();
        let versions = replica.versions(piece.clone())?;
        let here = versions.first().is_some_and(has);
        let mut end = versions.iter().take_while(|v| has(v) == here).last().map_or(piece.end, |v| v.blocks.end);
        let mut held = if here { replica.held(piece.start..end, stamp) } else { Ok(None) };
        if end - piece.start > 1 && matches!(held, Err(VolumeError::Io { .. })) {
            // One of them cannot be read: one by one, which does not keep the others from those who need them.
            end = piece.start + 1;
            held = replica.held(piece.start..end, stamp);
        }
        if let Err(error @ VolumeError::Io { .. }) = held {
            self.unreadable = Some((piece.start, error));
            held = Ok(None);
        }
        let message = match held? {
            // It was here a moment ago, or never was, or cannot be read.
            None => run_message(LACK, &(piece.start..end), stamp, &[]),
            Some(data) => {
                let (parts, _) = data.as_chunks::<{ BLOCK as usize }>();
                let zero = parts.first().is_some_and(|part| is_zero(part));
                let alike = parts.iter().take_while(|part| is_zero(*part) == zero).count();
                end = piece.start + alike as u64;
                match zero {
                    true => run_message(ZEROES, &(piece.start..end), stamp, &[]),
                    false => {
                        let data = &data[..alike * BLOCK as usize];
                        // What goes among the demands would overtake what goes behind them, and answers to names come in the order of their
                        // frames.
                        let names = self.names.as_mut().filter(|_| (kind, by) == (Lane::Fill, Lane::Fill));
                        match names.and_then(|names| names.name(piece.start, data)) {
                            Some(frame) => run_message(NAMED, &(piece.start..end), stamp, &frame),
                            None => run_message(DATA, &(piece.start..end), stamp, data),
                        }
                    }
                }
            }
        };
        if end < run.end {
            queue.push_front((end..run.end, stamp));
        }
        Ok(Some(Answer { kind, by, message }))
    }
}

const _: () = assert!(STAMP_BYTES + 16 < 64, "a message's head fits what MAX_MESSAGE leaves for it");

#[cfg(test)]
#[path = "fetch_tests.rs"]
mod tests;
