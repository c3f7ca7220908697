//! Three sites and a guest that moves among them before its disk has followed: post-copy, in a world of its own.
//!
//! The replicas, the [`fet`](godwit_volume::fet) and the [`fetch`](godwit_volume::fetch) are the ones that the node runs, on disks that tear and
//! forget ([`media`](crate::media)). The hand-off is one durable record here, whoever owns the volume: how it becomes one is the
//! other world's business. Some moves copy the disk first ([`mirror`](godwit_volume::mirror)), where it is whole; the others begin while the last one's fill goes on; nodes and power fail in the middle of any operation, and
//! right after the grant; sessions break; sites whose copies are not needed any more throw them away. Every read of the guest is
//! checked against [`Model`], and in the end, when nothing fails any more, the fill has to end and the whole disk to be right.
//!
//! Between moves the owner pre-caches the volume at other sites, one or both ([`precache`](godwit_volume::precache)), at each with an interval of
//! its own; the next move goes to such a one, or to another. (What an epoch's word means is the business of `volume/src/precache_tests.rs`.)
//! In half of the worlds in which nothing goes by name some secondaries keep an image: whatever fails, and wherever the volume goes meanwhile, what such a
//! site has is the disk as it was when the epoch ended that it says it holds; and in the end, with all others gone, a guest can be started from it.
//!
//! In two worlds of three each site has another volume of the trust domain, of which the guest writes the same blocks, so that they go by name
//! ([`Library`]), and which somebody else overwrites at any time, so that names are wrong. (A mirror names nothing of a disk as small as this one.)
//!
//! What it keeps of the real things, and no more: QEMU survives the node's process and asks again for what was not
//! answered; it is drained before a hand-off; it dies with its power. A guest has no two requests under way that overlap.

use crate::media::{BLOCKS, SECTOR, SECTORS, Store};
use godwit_content::Key;
use godwit_units::{Bytes, Generation, Lineage, VolumeId};
use godwit_volume::epoch::Recorder;
use godwit_volume::fetch::{Lane, Requester, Server};
use godwit_volume::{
    BLOCK, BlockSet, Guards, Holder, Journal, Library, Replica, Stamp, VolumeError, fet, mirror, precache, touched,
};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Sites.
const SITES: usize = 3;
/// Requests that a guest has under way at most.
const DEPTH: usize = 4;
/// Ticks in which things go wrong.
const WILD: u64 = 260;
/// Ticks without faults in which the fill has to end.
const CALM: u64 = 1200;
/// What the guest and the neighbours write alike: no number that the guest counts up to.
const FAMILIAR: Range<u64> = 1 << 32..(1 << 32) + 8;
/// What a site can know of what lies there: more than it has.
const LIBRARY: Bytes = Bytes::kib(64);
/// What an owner keeps of an epoch that an image is to have, and that the guest overwrites.
const KEPT: Bytes = Bytes(6 * BLOCK);

/// What a guest may find in each sector.
#[derive(Clone, Debug)]
pub struct Model {
    sectors: Vec<Sector>,
}

#[derive(Clone, Debug)]
struct Sector {
    /// What is there for good: one of these, until somebody looks.
    base: Vec<u64>,
    /// Written since, in order.
    since: Vec<u64>,
    /// Writes that nobody has answered.
    tried: Vec<u64>,
}

impl Default for Model {
    fn default() -> Self {
        Self { sectors: vec![Sector { base: vec![0], since: vec![], tried: vec![] }; BLOCKS * SECTORS] }
    }
}

impl Model {
    fn wrote(&mut self, sectors: Range<usize>, value: u64) {
        for sector in &mut self.sectors[sectors] {
            sector.since.push(value);
            sector.tried.clear();
        }
    }

    fn tried(&mut self, sectors: Range<usize>, value: u64) {
        self.sectors[sectors].iter_mut().for_each(|sector| sector.tried.push(value));
    }

    fn flushed(&mut self) {
        for sector in &mut self.sectors {
            if let Some(last) = sector.since.last() {
                sector.base = vec![*last];
                sector.since.clear();
            }
        }
    }

    fn lost_power(&mut self) {
        for sector in &mut self.sectors {
            sector.base.append(&mut sector.since);
            sector.base.append(&mut sector.tried);
        }
    }

    /// A guest finds this. What it found stays.
    fn found(&mut self, sector: usize, value: u64) -> Result<(), String> {
        let known = &mut self.sectors[sector];
        let right = match known.since.last() {
            Some(last) => *last == value,
            None => known.base.contains(&value),
        };
        if !right {
            let expected = known.since.last().map_or_else(|| known.base.clone(), |last| vec![*last]);
            return Err(format!("sector {sector} (block {}) holds {value}, not one of {expected:?}", sector / SECTORS));
        }
        if known.since.is_empty() {
            known.base = vec![value];
        }
        Ok(())
    }
}

#[derive(Clone, Debug)]
enum Wish {
    Read(Range<usize>),
    Write(Range<usize>, u64),
    Zero(Range<usize>),
    Flush,
}

impl Wish {
    fn sectors(&self) -> Range<usize> {
        match self {
            Self::Read(sectors) | Self::Write(sectors, _) | Self::Zero(sectors) => sectors.clone(),
            Self::Flush => 0..0,
        }
    }
}

#[derive(Debug)]
struct Site {
    store: Store,
    replica: Option<Replica>,
    neighbour: Option<Neighbour>,
}

impl Site {
    /// The epoch whose image it says that it has.
    fn image(&self) -> Option<Stamp> {
        let held = self.replica.as_ref()?.complete()?;
        held.image.then_some(held.epoch)
    }
}

/// Another volume at a site, and what the site knows of all its volumes. Its disk does not fail, and its guest is not watched.
#[derive(Debug)]
struct Neighbour {
    replica: Replica,
    key: Key,
    library: Arc<Library>,
    /// How far the site has looked at what lies there.
    looked: u64,
}

impl Neighbour {
    fn new(at: usize, rng: &mut SmallRng) -> Self {
        let store = Store::new();
        Replica::format(&store, VolumeId(2), Bytes(BLOCKS as u64 * BLOCK)).expect("an empty store takes a description");
        let (replica, _) = Replica::open_on_with(Path::new("neighbour"), store.media(), Guards::ALL)
            .expect("a store without a fuse opens");
        replica.become_primary(Lineage(0), Generation(1)).expect("it is nobody else's");
        let key = Key::new([at as u8 + 1; 32]);
        let library = Arc::new(Library::new(key.clone(), LIBRARY));
        let neighbour = Self { replica, key, library, looked: 0 };
        (0..BLOCKS as u64).for_each(|block| neighbour.overwrite(block, rng));
        neighbour
    }

    fn overwrite(&self, block: u64, rng: &mut SmallRng) {
        let mut bytes = [0; BLOCK as usize];
        bytes.as_chunks_mut::<8>().0.fill(rng.random_range(FAMILIAR).to_le_bytes());
        self.replica.write(block * BLOCK, &bytes).expect("a store without a fuse is written");
    }

    /// The node that knew has ended.
    fn forget(&mut self) {
        self.library = Arc::new(Library::new(self.key.clone(), LIBRARY));
        self.looked = 0;
    }

    fn look(&mut self) {
        let seen =
            self.library.look(&self.replica, self.looked, Bytes(8 * BLOCK)).expect("a store without a fuse is read");
        // From the beginning again: what was overwritten is found anew.
        self.looked = seen.map_or(0, |(end, _)| end);
    }
}

/// What the owner has with another site.
#[derive(Debug)]
struct Session {
    server: Server,
    there: VecDeque<Vec<u8>>,
    back: VecDeque<Vec<u8>>,
}

/// What the owner has with a site that it pre-caches the volume at.
#[derive(Debug)]
struct Following {
    source: precache::Source,
    target: precache::Target,
    there: VecDeque<Vec<u8>>,
    back: VecDeque<Vec<u8>>,
}

/// What a replica's failure is, and what is a bug.
#[derive(Debug)]
enum Trouble {
    Volume(VolumeError),
    Bug(String),
}

impl From<fet::FetError> for Trouble {
    fn from(error: fet::FetError) -> Self {
        match error {
            fet::FetError::Volume(error) => Self::Volume(error),
            other => Self::Bug(other.to_string()),
        }
    }
}

impl From<mirror::MirrorError> for Trouble {
    fn from(error: mirror::MirrorError) -> Self {
        match error {
            mirror::MirrorError::Volume(error) => Self::Volume(error),
            other => Self::Bug(other.to_string()),
        }
    }
}

/// How the disk is handed off.
#[derive(Debug)]
enum Way {
    /// It follows.
    PostCopy(Box<fet::Source>, Box<fet::Target>),
    /// It goes first.
    Mirror(Box<mirror::Source>, Box<mirror::Target>),
}

impl Way {
    fn source_takes(&mut self, message: &[u8], replica: &Replica) -> Result<(), Trouble> {
        match self {
            Self::PostCopy(source, _) => Ok(source.handle(message, replica)?),
            Self::Mirror(source, _) => Ok(source.handle(message, replica)?),
        }
    }

    fn target_takes(&mut self, message: &[u8], replica: &Replica) -> Result<Option<Vec<u8>>, Trouble> {
        match self {
            Self::PostCopy(_, target) => Ok(target.handle(message, replica)?),
            Self::Mirror(_, target) => Ok(Some(target.handle(message, replica)?)),
        }
    }

    /// The guest wrote: what to send at once. A mirrored write is not waited for here: the other world does.
    fn guest_wrote(&mut self, blocks: Range<u64>, now: Duration, replica: &Replica) -> Result<Vec<Vec<u8>>, Trouble> {
        match self {
            Self::PostCopy(source, _) => {
                source.guest_wrote(blocks, replica);
                Ok(vec![])
            }
            Self::Mirror(source, _) => Ok(source.guest_wrote(blocks, now, replica)?.map_or(vec![], |m| m.messages)),
        }
    }

    fn arrived(&mut self, blocks: &BlockSet, replica: &Replica) {
        if let Self::PostCopy(source, _) = self {
            source.arrived(blocks, replica);
        }
    }

    fn is_level(&self) -> bool {
        match self {
            Self::PostCopy(source, _) => source.is_level(),
            Self::Mirror(source, _) => source.state() == mirror::State::Mirroring,
        }
    }

    /// Whether what was written before the stop can be told from what is compared.
    fn can_stop(&self) -> bool {
        match self {
            Self::PostCopy(source, _) => source.state() == fet::State::Telling,
            Self::Mirror(source, _) => source.state() != mirror::State::Exchanging,
        }
    }

    fn stop(&mut self, replica: &Replica) -> Result<(), Trouble> {
        match self {
            Self::PostCopy(source, _) => Ok(source.stop(replica)?),
            Self::Mirror(source, _) => {
                source.let_go();
                source.stop();
                Ok(())
            }
        }
    }

    fn poll(&mut self, replica: &Replica) -> Result<Vec<Vec<u8>>, Trouble> {
        match self {
            Self::PostCopy(source, _) => Ok(source.poll(replica)?),
            Self::Mirror(source, _) => Ok(source.poll(replica)?),
        }
    }

    fn is_complete(&self) -> bool {
        match self {
            Self::PostCopy(source, _) => source.state() == fet::State::Complete,
            Self::Mirror(source, _) => source.state() == mirror::State::Complete,
        }
    }
}

/// A hand-off under way.
#[derive(Debug)]
struct Attempt {
    to: usize,
    way: Way,
    /// The owner did not hold all of the volume when it began.
    unfinished: bool,
    /// The site held an epoch of this owner's.
    precached: bool,
    there: VecDeque<Vec<u8>>,
    back: VecDeque<Vec<u8>>,
    /// The guest begins nothing new.
    stopping: bool,
    frozen: bool,
}

/// The world.
#[derive(Debug)]
pub struct World {
    rng: SmallRng,
    guards: Guards,
    sites: Vec<Site>,
    /// The durable record: who owns the volume, as which generation.
    owner: usize,
    generation: u64,
    /// The owner's replica takes the guest's writes.
    open: bool,
    guest: VecDeque<Wish>,
    last: u64,
    model: Model,
    requester: Requester,
    sessions: Vec<Option<Session>>,
    /// What of the guest's writes secondaries have not been sent.
    recorder: Recorder,
    following: Vec<Option<Following>>,
    /// An epoch has ended and is not durable yet.
    unsettled: bool,
    /// Says which secondaries keep images, where some do.
    images: Option<SmallRng>,
    /// What each sector held when an epoch ended, where some do.
    ended: HashMap<Stamp, Vec<u64>>,
    attempt: Option<Attempt>,
    now: u64,
    calm: bool,
    /// One fault in about so many ticks.
    fault_every: u32,
    trace: Option<Vec<String>>,
    counts: Counts,
}

/// What happened in a world.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// The guest's reads and writes.
    pub operations: u64,
    /// Of those, how many had to wait for another site.
    pub waited: u64,
    /// Hand-offs.
    pub moves: u64,
    /// Of those, how many began at a volume that was not whole.
    pub unfinished: u64,
    /// And how many were mirrored.
    pub mirrored: u64,
    /// Nodes that died.
    pub crashes: u64,
    /// Losses of power.
    pub powers: u64,
    /// Copies thrown away.
    pub released: u64,
    /// Blocks that a fill found by name.
    pub named: u64,
    /// Blocks that a pre-cache found by name.
    pub named_ahead: u64,
    /// Epochs that secondaries held, of all secondaries together.
    pub epochs: u64,
    /// Hand-offs to a site that held an epoch of this owner's.
    pub precached: u64,
    /// Epochs that became images.
    pub images: u64,
    /// Images that were given up, because too much of their epoch was overwritten before it was sent.
    pub given_up: u64,
    /// Images from which a guest was started in the end.
    pub promoted: u64,
}

impl std::ops::AddAssign for Counts {
    fn add_assign(&mut self, other: Self) {
        self.operations += other.operations;
        self.waited += other.waited;
        self.moves += other.moves;
        self.unfinished += other.unfinished;
        self.mirrored += other.mirrored;
        self.crashes += other.crashes;
        self.powers += other.powers;
        self.released += other.released;
        self.named += other.named;
        self.named_ahead += other.named_ahead;
        self.epochs += other.epochs;
        self.precached += other.precached;
        self.images += other.images;
        self.given_up += other.given_up;
        self.promoted += other.promoted;
    }
}

fn name(site: usize) -> Holder {
    Holder(format!("site{site}"))
}

fn empty() -> Store {
    let store = Store::new();
    Replica::format(&store, VolumeId(1), Bytes(BLOCKS as u64 * BLOCK)).expect("an empty store takes a description");
    store
}

/// Runs one schedule.
///
/// # Errors
/// What went wrong, with its story if `trace`.
pub fn run(seed: u64, guards: Guards, trace: bool) -> Result<Counts, String> {
    let mut world = World::new(seed, guards, trace);
    match world.run() {
        Ok(()) => Ok(world.counts),
        Err(why) => {
            let story = world.trace.unwrap_or_default().join("\n");
            Err(format!("{story}\ntick {}: {why}; replay with POSTCOPY_SEED={seed}", world.now))
        }
    }
}

impl World {
    fn new(seed: u64, guards: Guards, trace: bool) -> Self {
        let mut rng = SmallRng::seed_from_u64(seed);
        let fault_every = [u32::MAX, 60, 25, 12][rng.random_range(0..4)];
        let names = rng.random_ratio(2, 3);
        let neighbours: Vec<_> = (0..SITES).map(|at| names.then(|| Neighbour::new(at, &mut rng))).collect();
        // Numbers of its own: the other worlds' stories are what they were.
        let images = (!names && seed.is_multiple_of(2)).then(|| SmallRng::seed_from_u64(!seed));
        Self {
            rng,
            guards,
            sites: neighbours.into_iter().map(|neighbour| Site { store: empty(), replica: None, neighbour }).collect(),
            owner: 0,
            generation: 1,
            open: false,
            guest: VecDeque::new(),
            last: 0,
            model: Model::default(),
            requester: Requester::default(),
            sessions: (0..SITES).map(|_| None).collect(),
            recorder: if images.is_some() { Recorder::keeping(KEPT) } else { Recorder::new() },
            images,
            ended: HashMap::new(),
            following: (0..SITES).map(|_| None).collect(),
            unsettled: false,
            attempt: None,
            now: 0,
            calm: false,
            fault_every,
            trace: trace.then(Vec::new),
            counts: Counts::default(),
        }
    }

    fn say(&mut self, what: impl FnOnce() -> String) {
        if let Some(trace) = &mut self.trace {
            trace.push(format!("{:4} {}", self.now, what()));
        }
    }

    fn clock(&self) -> Duration {
        Duration::from_millis(self.now * 10)
    }

    fn run(&mut self) -> Result<(), String> {
        while self.now < WILD {
            self.tick()?;
        }
        self.calm = true;
        self.sites.iter().for_each(|site| site.store.disarm());
        for at in 0..SITES {
            if self.sites[at].store.is_blown() {
                self.kill(at, false);
            }
        }
        let until = self.now + CALM;
        while self.now < until && !self.rests() {
            self.tick()?;
        }
        if !self.rests() {
            let absent = self.sites[self.owner].replica.as_ref().map(Replica::absent);
            return Err(format!(
                "the fill does not end: {absent:?} at site {}, {} requests wait",
                self.owner,
                self.guest.len()
            ));
        }
        let mut bytes = vec![0; BLOCKS * BLOCK as usize];
        let replica = self.sites[self.owner].replica.as_ref().ok_or("nobody is there")?;
        replica.read(0, &mut bytes).map_err(|e| e.to_string())?;
        self.check(0..BLOCKS * SECTORS, &bytes)?;
        self.promote()
    }

    /// All other sites are gone: a guest is started from each image that there is.
    fn promote(&mut self) -> Result<(), String> {
        for at in (0..SITES).filter(|at| *at != self.owner) {
            let (Some(image), Some(replica)) = (self.sites[at].image(), &self.sites[at].replica) else { continue };
            let mut bytes = vec![0; BLOCKS * BLOCK as usize];
            let claimed = replica.become_primary(Lineage(1), Generation(self.generation + 1));
            claimed.and_then(|()| replica.read(0, &mut bytes)).map_err(|e| format!("a claim at site {at}: {e}"))?;
            let found = bytes.chunks(SECTOR).map(|sector| u64::from_le_bytes(std::array::from_fn(|i| sector[i])));
            if self.ended.get(&image).is_none_or(|ended| found.ne(ended.iter().copied())) {
                return Err(format!("a guest that is started at site {at} does not find {image:?}"));
            }
            self.counts.promoted += 1;
        }
        Ok(())
    }

    /// Whatever a site says that it has an image of, it has.
    fn check_images(&self) -> Result<(), String> {
        for at in (0..SITES).filter(|at| *at != self.owner) {
            let Some(image) = self.sites[at].image() else { continue };
            let Some(ended) = self.ended.get(&image) else {
                return Err(format!("site {at} says that it has an image of {image:?}, which never ended"));
            };
            let differs = |now: &[u64]| now.iter().zip(ended).position(|(now, ended)| now != ended);
            if let Some(sector) = self.sites[at].store.contents(differs) {
                return Err(format!("the image of {image:?} at site {at} is another in sector {sector}"));
            }
        }
        Ok(())
    }

    fn rests(&self) -> bool {
        let whole = self.sites[self.owner].replica.as_ref().is_some_and(|r| !r.is_shadow());
        self.open && whole && self.guest.is_empty() && self.attempt.is_none()
    }

    fn tick(&mut self) -> Result<(), String> {
        self.now += 1;
        if !self.calm && self.fault_every != u32::MAX && self.rng.random_ratio(1, self.fault_every) {
            self.fault();
        }
        for at in 0..SITES {
            if self.sites[at].replica.is_none() && (self.calm || self.rng.random_ratio(1, 4)) {
                self.boot(at)?;
            }
        }
        self.guest_acts()?;
        self.sessions_act()?;
        self.precaches_act()?;
        self.attempt_acts()?;
        self.upkeep()?;
        self.check_images()
    }

    fn fault(&mut self) {
        let at = self.rng.random_range(0..SITES);
        match self.rng.random_range(0..6) {
            0 => self.kill(at, false),
            1 => self.kill(at, true),
            2 => {
                self.say(|| format!("the session with site {at} breaks"));
                self.hang_up(at);
            }
            _ => {
                // The owner, mostly: it does most.
                let at = if self.rng.random_ratio(2, 3) { self.owner } else { at };
                let (operations, torn) = (self.rng.random_range(0..40), self.rng.random_range(0..64));
                self.sites[at].store.arm(operations, torn);
            }
        }
    }

    /// What a failure of a replica means: the end of its process, or its power's, if the fuse blew.
    fn failed(&mut self, at: usize, error: &VolumeError) -> Result<(), String> {
        if self.sites[at].store.is_blown() {
            let power = self.rng.random();
            self.kill(at, power);
            return Ok(());
        }
        Err(format!("site {at}: {error}"))
    }

    fn kill(&mut self, at: usize, power: bool) {
        self.say(|| format!("site {at} loses its {}", if power { "power" } else { "node" }));
        self.counts.crashes += u64::from(!power);
        self.counts.powers += u64::from(power);
        self.sites[at].replica = None;
        self.sites[at].neighbour.iter_mut().for_each(Neighbour::forget);
        if power {
            self.sites[at].store.lose_power(&mut self.rng);
        } else {
            self.sites[at].store.lose_process();
        }
        self.hang_up(at);
        self.unfollow(at);
        if at == self.owner {
            self.open = false;
            (0..SITES).for_each(|site| self.hang_up(site));
            self.end_precaches();
            if power {
                self.model.lost_power();
                self.guest.clear();
            }
        }
        if self.attempt.as_ref().is_some_and(|a| a.to == at || at == self.owner) {
            self.give_up();
        }
    }

    fn give_up(&mut self) {
        let Some(attempt) = self.attempt.take() else { return };
        let to = attempt.to;
        self.say(|| format!("the move to site {to} is given up"));
        if attempt.frozen
            && let Some(replica) = &self.sites[self.owner].replica
        {
            replica.thaw();
            self.requester = self.new_requester();
        }
    }

    /// A site is not pre-cached at any more.
    fn unfollow(&mut self, at: usize) {
        if let Some(Following { source, .. }) = self.following[at].take() {
            self.recorder.unsubscribe(source.subscriber());
            self.counts.named_ahead += source.named().0 / BLOCK;
        }
    }

    /// A move begins, or the node has ended.
    fn end_precaches(&mut self) {
        (0..SITES).for_each(|at| self.unfollow(at));
        self.recorder.clear();
        self.unsettled = false;
    }

    /// Of the owner.
    fn new_requester(&self) -> Requester {
        let Site { replica, neighbour, .. } = &self.sites[self.owner];
        match (replica, neighbour) {
            (Some(replica), Some(here)) => Requester::with_library(vec![], replica, here.library.clone()),
            _ => Requester::default(),
        }
    }

    fn hang_up(&mut self, at: usize) {
        if self.sessions[at].take().is_some() {
            self.requester.disconnected(&name(at));
        }
    }

    fn boot(&mut self, at: usize) -> Result<(), String> {
        let media = self.sites[at].store.media();
        let result = Replica::open_on_with(Path::new("simulated"), media, self.guards);
        // As a replica in a folder does it, where there is a journal.
        let result = result.and_then(|(replica, opened)| {
            Journal::on(self.sites[at].store.journal()).recover(&replica)?;
            Ok((replica, opened))
        });
        match result {
            Ok((replica, opened)) => {
                self.say(|| format!("site {at} opens its replica: {opened:?}"));
                self.sites[at].replica = Some(replica);
                Ok(())
            }
            Err(error) => self.failed(at, &error),
        }
    }

    /// The owner opens the volume; others yield, sooner or later; what is dirty settles; what is durable is reported.
    fn upkeep(&mut self) -> Result<(), String> {
        let owner = self.owner;
        if !self.open
            && self.attempt.is_none()
            && self.sites[owner].replica.is_some()
            && (self.calm || self.rng.random_ratio(1, 2))
        {
            let generation = Generation(self.generation);
            let done = self.sites[owner].replica.as_ref().map(|r| r.become_primary(Lineage(0), generation));
            match done {
                Some(Ok(())) => {
                    self.open = true;
                    self.requester = self.new_requester();
                    self.sessions.iter_mut().for_each(|s| *s = None);
                    self.say(|| format!("site {owner} opens the volume as generation {generation:?}"));
                }
                Some(Err(error)) => self.failed(owner, &error)?,
                None => {}
            }
        }
        for neighbour in self.sites.iter_mut().filter_map(|site| site.neighbour.as_mut()) {
            match self.rng.random_range(0..8) {
                0 => neighbour.overwrite(self.rng.random_range(0..BLOCKS as u64), &mut self.rng),
                1 | 2 => neighbour.look(),
                _ => {}
            }
        }
        for at in 0..SITES {
            let kind = self.rng.random_range(0..30);
            let Some(replica) = &self.sites[at].replica else { continue };
            let done = match kind {
                0 | 1 => replica.settle(),
                // One that receives has yielded already.
                2 if at != owner && self.attempt.as_ref().is_none_or(|a| a.to != at) => replica.become_secondary(),
                // With secondaries, epochs end as they want them.
                3 if at == owner && self.open && !self.recorder.is_used() => replica.roll(),
                4 | 5 if at == owner && self.open && self.attempt.as_ref().is_none_or(|a| !a.frozen) => {
                    replica.end_wants().map(drop)
                }
                _ => Ok(()),
            };
            if let Err(error) = done {
                self.failed(at, &error)?;
            }
        }
        Ok(())
    }

    fn guest_acts(&mut self) -> Result<(), String> {
        let stopping = self.attempt.as_ref().is_some_and(|a| a.stopping);
        if self.open && !stopping && !self.calm {
            for _ in 0..self.rng.random_range(0..3) {
                self.wish();
            }
        }
        for _ in 0..self.guest.len() {
            if !self.open {
                return Ok(());
            }
            let Some(wish) = self.guest.pop_front() else { return Ok(()) };
            if !self.perform(&wish)? {
                self.guest.push_back(wish);
            }
        }
        Ok(())
    }

    fn wish(&mut self) {
        if self.guest.len() >= DEPTH {
            return;
        }
        let block = self.rng.random_range(0..BLOCKS - 3);
        let whole = block * SECTORS..(block + self.rng.random_range(1..=3)) * SECTORS;
        let first = self.rng.random_range(whole.clone());
        let part = first..self.rng.random_range(first + 1..=whole.end);
        self.last += 1;
        let familiar = self.sites[0].neighbour.is_some() && self.rng.random();
        let wish = match self.rng.random_range(0..20) {
            0..=4 => Wish::Read(part),
            5..=10 if familiar => Wish::Write(whole, self.rng.random_range(FAMILIAR)),
            5..=10 => Wish::Write(whole, self.last),
            11..=15 => Wish::Write(part, self.last),
            16 => Wish::Zero(whole),
            17 => Wish::Zero(part),
            _ => Wish::Flush,
        };
        let wanted = wish.sectors();
        if self.guest.iter().map(Wish::sectors).all(|s| s.end <= wanted.start || wanted.end <= s.start) {
            self.guest.push_back(wish);
        }
    }

    /// Does what the guest wants, if it can be done now.
    fn perform(&mut self, wish: &Wish) -> Result<bool, String> {
        let owner = self.owner;
        let Some(replica) = &self.sites[owner].replica else { return Ok(false) };
        let sectors = wish.sectors();
        let (offset, length) = ((sectors.start * SECTOR) as u64, sectors.len() * SECTOR);
        let mut bytes = vec![0; length];
        let changes = matches!(wish, Wish::Write(..) | Wish::Zero(_));
        if changes && let Err(error) = self.recorder.before_write(touched(offset, length as u64), replica) {
            self.failed(owner, &error)?;
            return Ok(false);
        }
        let done = match wish {
            Wish::Read(_) => replica.read(offset, &mut bytes).map(|()| None),
            Wish::Write(_, value) => {
                bytes.as_chunks_mut::<8>().0.fill(value.to_le_bytes());
                replica.write(offset, &bytes).map(Some)
            }
            Wish::Zero(_) => replica.zero(offset, length as u64).map(Some),
            Wish::Flush => replica.flush().map(|()| None),
        };
        match done {
            Ok(written) => {
                self.counts.operations += 1;
                self.say(|| format!("guest: {wish:?}"));
                if let Some(written) = &written {
                    self.recorder.wrote(written.blocks.clone());
                }
                let clock = self.clock();
                let mut trouble = None;
                if let (Some(written), Some(attempt), Some(replica)) =
                    (written, &mut self.attempt, &self.sites[owner].replica)
                {
                    match attempt.way.guest_wrote(written.blocks, clock, replica) {
                        Ok(messages) => attempt.there.extend(messages),
                        Err(why) => trouble = Some(why),
                    }
                }
                match trouble {
                    None => {}
                    Some(Trouble::Volume(error)) => self.failed(owner, &error)?,
                    Some(Trouble::Bug(why)) => return Err(why),
                }
                match wish {
                    Wish::Read(_) => self.check(sectors, &bytes)?,
                    Wish::Write(_, value) => self.model.wrote(sectors, *value),
                    Wish::Zero(_) => self.model.wrote(sectors, 0),
                    Wish::Flush => self.model.flushed(),
                }
                Ok(true)
            }
            Err(VolumeError::Absent(run)) => {
                self.counts.waited += 1;
                // All that this request touches: a read of three blocks asks for them at once.
                let touched = (sectors.start / SECTORS) as u64..sectors.end.div_ceil(SECTORS) as u64;
                let blocks = if matches!(wish, Wish::Read(_)) { touched } else { run };
                let clock = self.clock();
                self.requester.demand(blocks, clock, replica).map_err(|e| e.to_string())?;
                Ok(false)
            }
            Err(error) => {
                match wish {
                    Wish::Write(_, value) => self.model.tried(sectors, *value),
                    Wish::Zero(_) => self.model.tried(sectors, 0),
                    _ => {}
                }
                self.failed(owner, &error)?;
                Ok(false)
            }
        }
    }

    fn check(&mut self, sectors: Range<usize>, bytes: &[u8]) -> Result<(), String> {
        for (sector, bytes) in sectors.zip(bytes.chunks(SECTOR)) {
            let word = u64::from_le_bytes(std::array::from_fn(|i| bytes[i]));
            self.model.found(sector, word)?;
        }
        Ok(())
    }

    /// The fetch: sessions between the owner and everybody else.
    fn sessions_act(&mut self) -> Result<(), String> {
        let owner = self.owner;
        if !self.open || self.attempt.as_ref().is_some_and(|a| a.frozen) {
            return Ok(());
        }
        for at in (0..SITES).filter(|at| *at != owner) {
            if self.sessions[at].is_none()
                && self.sites[at].replica.is_some()
                && (self.calm || self.rng.random_ratio(1, 3))
            {
                self.sessions[at] =
                    Some(Session { server: Server::new(), there: VecDeque::new(), back: VecDeque::new() });
                self.requester.connected(name(at));
            }
        }
        for _ in 0..self.rng.random_range(0..4) {
            let Some(replica) = &self.sites[owner].replica else { return Ok(()) };
            let Some(question) = self.requester.poll(self.clock(), replica).map_err(|e| e.to_string())? else { break };
            if let Some(session) = (0..SITES).find(|s| name(*s) == question.to).and_then(|s| self.sessions[s].as_mut())
            {
                session.there.push_back(question.message);
            }
        }
        if self.rng.random_ratio(1, 4)
            && let Some(replica) = &self.sites[owner].replica
        {
            for question in self.requester.report(replica).map_err(|e| e.to_string())? {
                let session = (0..SITES).find(|s| name(*s) == question.to).and_then(|s| self.sessions[s].as_mut());
                session.into_iter().for_each(|s| s.there.push_back(question.message.clone()));
            }
        }
        for at in 0..SITES {
            for _ in 0..self.rng.random_range(0..3) {
                self.deliver(at)?;
            }
        }
        Ok(())
    }

    fn deliver(&mut self, at: usize) -> Result<(), String> {
        let owner = self.owner;
        let receiving = self.attempt.as_ref().is_some_and(|a| a.to == at);
        let Some(session) = &mut self.sessions[at] else { return Ok(()) };
        let Some(replica) = &self.sites[at].replica else { return Ok(()) };
        if let Some(message) = session.there.pop_front() {
            session.server.handle(&message).map_err(|e| format!("site {at} as a holder: {e}"))?;
            if session.server.may_release() && !receiving && self.rng.random_ratio(1, 3) {
                self.say(|| format!("site {at} throws its copy away"));
                self.counts.released += 1;
                self.hang_up(at);
                self.unfollow(at);
                (self.sites[at].store, self.sites[at].replica) = (empty(), None);
                return Ok(());
            }
        }
        if let Some(answer) = session
            .server
            .poll(replica, &[Lane::Demand, Lane::Fill])
            .map_err(|e| format!("site {at} as a holder: {e}"))?
        {
            session.back.push_back(answer.message);
        }
        if !self.rng.random_ratio(1, 2) {
            return Ok(());
        }
        let (Some(message), Some(replica)) = (session.back.pop_front(), &self.sites[owner].replica) else {
            return Ok(());
        };
        let clock = Duration::from_millis(self.now * 10);
        let before = self.requester.named();
        match self.requester.handle(&name(at), &message, clock, replica) {
            Ok(taken) => {
                self.counts.named += (self.requester.named() - before).0 / BLOCK;
                if let Some(attempt) = &mut self.attempt {
                    attempt.way.arrived(&taken, replica);
                }
                if self.requester.lacking() > 0 {
                    return Err(format!("site {at} lacks what it was to have"));
                }
                Ok(())
            }
            Err(godwit_volume::fetch::FetchError::Volume(error)) => self.failed(owner, &error),
            Err(error) => Err(error.to_string()),
        }
    }

    /// Pre-caches: of a whole volume, while it is not moved.
    fn precaches_act(&mut self) -> Result<(), String> {
        let owner = self.owner;
        if !self.open || self.attempt.is_some() {
            return Ok(());
        }
        for at in (0..SITES).filter(|at| *at != owner) {
            if self.following[at].is_none() {
                let whole = self.sites[owner].replica.as_ref().is_some_and(|replica| !replica.is_shadow());
                if whole && !self.calm && self.rng.random_ratio(1, 8) {
                    self.follow(at)?;
                }
            } else if !self.calm && self.rng.random_ratio(1, 80) {
                self.say(|| format!("the pre-cache at site {at} breaks"));
                self.unfollow(at);
            }
            for _ in 0..self.rng.random_range(0..4) {
                let done = self.step_precache(at);
                match done {
                    Ok(true) => {}
                    Ok(false) => {
                        self.say(|| format!("the image at site {at} stays at an earlier epoch"));
                        self.counts.given_up += 1;
                        self.unfollow(at);
                    }
                    Err((at, Trouble::Volume(error))) => self.failed(at, &error)?,
                    Err((at, Trouble::Bug(why))) => return Err(format!("site {at} in a pre-cache: {why}")),
                }
            }
        }
        let (now, unix_ms) = (self.clock(), self.now);
        let Some(replica) = &self.sites[owner].replica else { return Ok(()) };
        let done = if self.unsettled {
            if !self.rng.random_ratio(1, 3) {
                return Ok(());
            }
            self.unsettled = false;
            replica.flush().map(|()| self.recorder.settled())
        } else if self.recorder.is_due(now) {
            self.unsettled = true;
            self.recorder.roll(replica, now, unix_ms).map(|epoch| {
                if self.images.is_some() {
                    self.ended.insert(epoch, self.sites[owner].store.contents(<[u64]>::to_vec));
                }
            })
        } else {
            Ok(())
        };
        done.or_else(|error| self.failed(owner, &error))
    }

    /// Begins a pre-cache at a site, if what it has allows that.
    fn follow(&mut self, at: usize) -> Result<(), String> {
        let image = self.images.as_mut().is_some_and(|rng| rng.random_ratio(2, 3));
        let Site { replica, neighbour, store } = &self.sites[at];
        let Some(replica) = replica else { return Ok(()) };
        let begin = || -> Result<_, mirror::MirrorError> {
            replica.become_secondary()?;
            let (target, has) = match neighbour {
                Some(there) => precache::Target::with_library(replica, None, there.library.clone())?,
                None => precache::Target::new(replica, image.then(|| Journal::on(store.journal())))?,
            };
            Ok((target, has.all(replica)?))
        };
        match begin() {
            Ok((target, first)) => {
                let source = precache::Source::new(self.recorder.subscribe(image));
                // Each site has its own interval.
                self.recorder.every(source.subscriber(), Duration::from_millis(25 << at));
                self.say(|| format!("a pre-cache at site {at} begins, with an image: {image}"));
                let (there, back) = (VecDeque::new(), first.into());
                self.following[at] = Some(Following { source, target, there, back });
                Ok(())
            }
            // It was told what to fetch by a move that was given up, and is no secondary before it forgets that.
            Err(mirror::MirrorError::Volume(VolumeError::Frozen)) => Ok(()),
            Err(mirror::MirrorError::Volume(error)) => self.failed(at, &error),
            Err(error) => Err(format!("site {at} in a pre-cache: {error}")),
        }
    }

    /// One message each way, and what the source has to send: at which site it went wrong, and how. False: the image of an epoch was given up, and
    /// the session with it.
    fn step_precache(&mut self, at: usize) -> Result<bool, (usize, Trouble)> {
        let owner = self.owner;
        let (Some(following), Some(here), Some(there)) =
            (&mut self.following[at], &self.sites[owner].replica, &self.sites[at].replica)
        else {
            return Ok(true);
        };
        let Following { source, target, there: sent, back } = following;
        if let Some(message) = back.pop_front() {
            let ending = source.state() == precache::State::Ending;
            source.handle(&message, here, &self.recorder).map_err(|error| (owner, error.into()))?;
            let ended = ending && source.state() == precache::State::Idle;
            self.counts.epochs += u64::from(ended);
            self.counts.images += u64::from(ended && there.complete().is_some_and(|held| held.image));
        }
        if let Some(message) = sent.pop_front() {
            back.push_back(target.handle(&message, there).map_err(|error| (at, error.into()))?);
        }
        match source.poll(here, &self.recorder) {
            Err(mirror::MirrorError::Overwritten { .. }) => return Ok(false),
            messages => sent.extend(messages.map_err(|error| (owner, error.into()))?),
        }
        Ok(true)
    }

    /// A hand-off: begun, gone on with, given up, or done.
    fn attempt_acts(&mut self) -> Result<(), String> {
        let owner = self.owner;
        if self.attempt.is_none() {
            let to = (owner + self.rng.random_range(1..SITES)) % SITES;
            if self.calm || !self.open || !self.rng.random_ratio(1, 25) {
                return Ok(());
            }
            let (Some(replica), Some(source)) = (&self.sites[to].replica, &self.sites[owner].replica) else {
                return Ok(());
            };
            let mirrored = !source.is_shadow() && self.rng.random_ratio(1, 3);
            let library = self.sites[to].neighbour.as_ref().map(|there| there.library.clone());
            let unfinished = source.absent() > Bytes(0);
            let begin = || -> Result<(Way, Vec<Vec<u8>>), Trouble> {
                replica.become_secondary().map_err(Trouble::Volume)?;
                // From here on it is no image of any epoch.
                replica.set_complete(None).map_err(Trouble::Volume)?;
                let (way, has) = if mirrored {
                    let (target, has) = match library {
                        Some(library) => mirror::Target::with_library(replica, library)?,
                        None => mirror::Target::new(replica)?,
                    };
                    (Way::Mirror(Box::default(), Box::new(target)), has)
                } else {
                    let (target, has) = fet::Target::new(replica)?;
                    (Way::PostCopy(Box::new(fet::Source::new(name(owner), Lineage(0), &[])), Box::new(target)), has)
                };
                Ok((way, has.all(replica).map_err(Trouble::Volume)?))
            };
            match begin() {
                Ok((way, first)) => {
                    self.say(|| format!("a move from site {owner} to site {to} begins, mirrored: {mirrored}"));
                    let precached = self.following[to].as_ref().is_some_and(|f| f.source.held().is_some());
                    self.end_precaches();
                    self.attempt = Some(Attempt {
                        to,
                        way,
                        unfinished,
                        precached,
                        there: VecDeque::new(),
                        back: first.into(),
                        stopping: false,
                        frozen: false,
                    });
                }
                Err(Trouble::Volume(error)) => self.failed(to, &error)?,
                Err(Trouble::Bug(why)) => return Err(why),
            }
            return Ok(());
        }
        if !self.calm && self.rng.random_ratio(1, 60) {
            self.give_up();
            return Ok(());
        }
        for _ in 0..self.rng.random_range(1..4) {
            self.advance()?;
        }
        Ok(())
    }

    fn advance(&mut self) -> Result<(), String> {
        let owner = self.owner;
        let Some(attempt) = &mut self.attempt else { return Ok(()) };
        let to = attempt.to;
        let (Some(source), Some(target)) = (&self.sites[owner].replica, &self.sites[to].replica) else { return Ok(()) };
        let result = 'step: {
            if let Some(message) = attempt.back.pop_front()
                && let Err(error) = attempt.way.source_takes(&message, source)
            {
                break 'step Err((owner, error));
            }
            if let Some(message) = attempt.there.pop_front() {
                match attempt.way.target_takes(&message, target) {
                    Ok(answer) => attempt.back.extend(answer),
                    Err(error) => break 'step Err((to, error)),
                }
            }
            if attempt.way.is_level() && !attempt.stopping && self.rng.random_ratio(1, 6) {
                attempt.stopping = true;
            }
            if attempt.stopping && !attempt.frozen && self.guest.is_empty() && attempt.way.can_stop() {
                attempt.frozen = true;
                source.freeze();
                if let Err(error) = attempt.way.stop(source) {
                    break 'step Err((owner, error));
                }
            }
            match attempt.way.poll(source) {
                Ok(messages) => attempt.there.extend(messages),
                Err(error) => break 'step Err((owner, error)),
            }
            Ok(attempt.way.is_complete())
        };
        match result {
            Ok(false) => {
                if self.attempt.as_ref().is_some_and(|a| a.frozen) {
                    (0..SITES).for_each(|site| self.hang_up(site));
                }
                Ok(())
            }
            Ok(true) => {
                self.say(|| format!("site {to} is granted the volume"));
                self.counts.moves += 1;
                if let Some(attempt) = self.attempt.take() {
                    self.counts.unfinished += u64::from(attempt.unfinished);
                    self.counts.precached += u64::from(attempt.precached);
                    self.counts.mirrored += u64::from(matches!(attempt.way, Way::Mirror(..)));
                }
                self.open = false;
                (0..SITES).for_each(|site| self.hang_up(site));
                self.owner = to;
                self.generation += 1;
                // The grant is repeated until somebody takes it: the destination may have lost its power in between.
                if !self.calm && self.fault_every != u32::MAX {
                    for at in [to, owner] {
                        if self.rng.random_ratio(1, 6) {
                            let power = self.rng.random();
                            // Its guest stands still at the source and has nothing to lose there.
                            let model = self.model.clone();
                            self.kill(at, power);
                            self.model = model;
                        }
                    }
                }
                Ok(())
            }
            Err((at, Trouble::Volume(error))) => {
                self.failed(at, &error)?;
                self.give_up();
                Ok(())
            }
            Err((at, Trouble::Bug(why))) => Err(format!("site {at} in a hand-off: {why}")),
        }
    }
}
