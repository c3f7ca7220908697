use super::*;
use crate::blocks::BlockSet;
use crate::epoch::MOST_KEPT;
use crate::file::{Description, Media, Medium};
use crate::journal::Rule;
use crate::walk::AT_ONCE;
use godwit_units::{Epoch, Generation, Lineage, VolumeId};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

const BLOCKS: u64 = 48;
const REGION: u64 = 16;
const SECTOR: usize = 512;

/// A site's power: a fuse that ends it at any operation, and what of unsynced writes survives.
#[derive(Debug, Default)]
struct Power {
    fuse: Option<u32>,
    blown: bool,
}

/// A file that loses what was not synced, sector by sector, when its power goes.
#[derive(Clone, Debug)]
struct File {
    power: Arc<Mutex<Power>>,
    state: Arc<Mutex<Kept>>,
}

/// What it holds, what of that is durable, and what was written since the last sync.
type Kept = (Vec<u8>, Vec<u8>, Vec<(usize, Vec<u8>)>);

fn gone() -> io::Error {
    io::Error::other("the power is gone")
}

impl File {
    fn new(power: &Arc<Mutex<Power>>, size: usize) -> Self {
        Self { power: power.clone(), state: Arc::new(Mutex::new((vec![0; size], vec![0; size], vec![]))) }
    }

    /// Whether the operation is done; the one at which the fuse blows is done in half.
    fn spend(&self) -> Result<(), bool> {
        let mut power = self.power.lock().unwrap();
        if power.blown {
            return Err(false);
        }
        match &mut power.fuse {
            Some(0) => {
                power.blown = true;
                Err(true)
            }
            Some(left) => {
                *left -= 1;
                Ok(())
            }
            None => Ok(()),
        }
    }

    fn lose(&self, rng: &mut SmallRng, percent: u32) {
        let (now, durable, pending) = &mut *self.state.lock().unwrap();
        for (at, bytes) in pending.drain(..) {
            for (i, sector) in bytes.chunks(SECTOR).enumerate() {
                if rng.random_ratio(percent, 100) {
                    durable[at + i * SECTOR..][..sector.len()].copy_from_slice(sector);
                }
            }
        }
        now.clone_from(durable);
    }
}

impl Medium for File {
    fn read(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        let now = &self.state.lock().unwrap().0;
        let from = (at as usize).min(now.len());
        let to = (from + into.len()).min(now.len());
        into.fill(0);
        into[..to - from].copy_from_slice(&now[from..to]);
        Ok(())
    }

    fn write(&self, at: u64, bytes: &[u8]) -> io::Result<()> {
        let spent = self.spend();
        let done = match spent {
            Ok(()) => bytes.len(),
            Err(true) => bytes.len() / 2,
            Err(false) => return Err(gone()),
        };
        let (now, durable, pending) = &mut *self.state.lock().unwrap();
        let end = at as usize + bytes.len();
        if now.len() < end {
            now.resize(end, 0);
            durable.resize(end, 0);
        }
        now[at as usize..][..done].copy_from_slice(&bytes[..done]);
        pending.push((at as usize, bytes[..done].to_vec()));
        spent.map_err(|_| gone())
    }

    fn punch(&self, at: u64, length: u64) -> io::Result<()> {
        self.write(at, &vec![0; length as usize])
    }

    fn sync(&self) -> io::Result<()> {
        self.spend().map_err(|_| gone())?;
        let (_, durable, pending) = &mut *self.state.lock().unwrap();
        for (at, bytes) in pending.drain(..) {
            durable[at..][..bytes.len()].copy_from_slice(&bytes);
        }
        Ok(())
    }

    fn extents(&self, _at: u64, length: u64) -> io::Result<Vec<(u64, bool)>> {
        Ok(vec![(length, false)])
    }

    fn allocated(&self) -> u64 {
        0
    }
}

impl Description for File {
    fn load(&self) -> io::Result<Vec<u8>> {
        Ok(self.state.lock().unwrap().1.clone())
    }

    fn store(&self, bytes: &[u8]) -> io::Result<()> {
        let spent = self.spend();
        if spent != Err(false) {
            let (now, durable, _) = &mut *self.state.lock().unwrap();
            (*now, *durable) = (bytes.to_vec(), bytes.to_vec());
        }
        spent.map_err(|_| gone())
    }
}

/// A site's disk, and what runs on it.
struct Site {
    power: Arc<Mutex<Power>>,
    files: Vec<File>,
    replica: Option<Replica>,
}

impl Site {
    fn new() -> Self {
        let power = Arc::new(Mutex::new(Power::default()));
        let sizes =
            [(BLOCKS * BLOCK) as usize, (BLOCKS * 8) as usize, (BLOCKS / REGION) as usize, 0, 0, (BLOCKS * 8) as usize];
        let files = sizes.map(|size| File::new(&power, size)).to_vec();
        Replica::format(&files[3], VolumeId(1), Bytes(BLOCKS * BLOCK)).expect("formats");
        Self { power, files, replica: None }
    }

    fn media(&self) -> Media {
        let [data, stamps, hot, description] = [0, 1, 2, 3].map(|i| Box::new(self.files[i].clone()));
        let words = Box::new(self.files[5].clone());
        Media { data, stamps, hot, words, power: String::new(), description, region: REGION }
    }

    fn journal(&self) -> Journal {
        Journal::on(Box::new(self.files[4].clone()))
    }

    /// Starts the process, with no fuse; what it finds.
    fn open(&mut self) -> Result<(), VolumeError> {
        let (replica, _) = Replica::open_on(Path::new("site"), self.media())?;
        self.journal().recover(&replica)?;
        self.replica = Some(replica);
        Ok(())
    }

    /// Ends the process, and perhaps the power.
    fn end(&mut self, rng: &mut SmallRng) {
        self.replica = None;
        *self.power.lock().unwrap() = Power::default();
        if rng.random_bool(0.7) {
            let percent = [0, 30, 50, 90, 100][rng.random_range(0..5)];
            // Each file has a cache of its own: a write may come through that came after one that does not.
            self.files.iter().take(3).chain([&self.files[4]]).for_each(|file| file.lose(rng, percent));
        }
    }

    fn replica(&self) -> &Replica {
        self.replica.as_ref().expect("runs")
    }
}

use crate::error::VolumeError;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Broken {
    Nothing,
    Journal(Rule),
    /// A block that was torn by a write is sent all the same.
    StampAfterReading,
    /// A secondary that forgets blocks says first that it holds no epoch.
    UnsaidBeforeForgotten,
    /// An epoch is durable here before it is sent.
    DurableBeforeSent,
    /// What an image needs is kept before it is overwritten.
    KeptBeforeWritten,
    /// All names are answered before an epoch ends.
    AnsweredBeforeEnd,
    /// An epoch that begins is one that no later process can begin.
    EpochsSetAside,
    /// What the guest writes while a secondary is compared is heard, wherever the comparison is.
    HeardWhileCompared,
}

type Image = Vec<u8>;

/// Blocks with their stamps, as a primary had them when an epoch ended.
struct Ended {
    image: Image,
    stamps: Vec<Option<Stamp>>,
    /// Written, or tried to, since then.
    since: BlockSet,
}

struct World {
    rng: SmallRng,
    broken: Broken,
    image: bool,
    from: Site,
    to: Site,
    recorder: Recorder,
    source: Option<Source>,
    target: Option<Target>,
    library: Arc<Library>,
    there: VecDeque<Vec<u8>>,
    back: VecDeque<Vec<u8>>,
    /// Messages that were read before a write that came between their reading and their stamps.
    ended: HashMap<Stamp, Ended>,
    unsettled: bool,
    /// What is written now the recorder does not hear.
    unheard: bool,
    written: u64,
    completed: u64,
    now: Duration,
    generation: u64,
}

fn contents(replica: &Replica) -> Image {
    let mut all = vec![0; (BLOCKS * BLOCK) as usize];
    replica.read(0, &mut all).expect("reads");
    all
}

fn block(image: &Image, block: u64) -> &[u8] {
    &image[(block * BLOCK) as usize..][..BLOCK as usize]
}

impl World {
    fn new(seed: u64, image: bool, broken: Broken) -> Self {
        let mut it = Self {
            rng: SmallRng::seed_from_u64(seed),
            broken,
            image,
            from: Site::new(),
            to: Site::new(),
            recorder: Recorder::keeping(Bytes(8 * BLOCK)),
            source: None,
            target: None,
            library: Arc::new(Library::new(godwit_content::Key::new([9; 32]), Bytes::kib(64))),
            there: VecDeque::new(),
            back: VecDeque::new(),
            ended: HashMap::new(),
            unsettled: false,
            unheard: false,
            written: 0,
            completed: 0,
            now: Duration::ZERO,
            generation: 1,
        };
        crate::replica::FORGETS_SILENTLY.set(broken == Broken::UnsaidBeforeForgotten);
        crate::replica::ROLLS_FORGETFULLY.set(broken == Broken::EpochsSetAside);
        it.from.open().expect("opens");
        it.to.open().expect("opens");
        it.own();
        it
    }

    fn own(&mut self) {
        self.from.replica().become_primary(Lineage(0), Generation(self.generation)).expect("is ours");
    }

    fn connect(&mut self) -> Result<(), MirrorError> {
        self.recorder.clear();
        (self.source, self.target) = (None, None);
        self.there.clear();
        self.back.clear();
        let mut journal = self.to.journal();
        if let Broken::Journal(rule) = self.broken {
            journal.without = Some(rule);
        }
        let (target, has) =
            Target::with_library(self.to.replica(), self.image.then_some(journal), self.library.clone())?;
        let mut source = Source::new(self.recorder.subscribe(self.image));
        self.recorder.every(source.subscriber(), Duration::from_secs(1));
        source.without_answers = self.broken == Broken::AnsweredBeforeEnd;
        source.without_stamp_check = self.broken == Broken::StampAfterReading;
        self.target = Some(target);
        self.source = Some(source);
        let has = has.in_messages_of(self.rng.random_range(1..9));
        self.back = has.all(self.to.replica())?.into();
        Ok(())
    }

    fn write(&mut self) -> Result<(), VolumeError> {
        let (sectors, most) = (BLOCKS * 8, 12);
        let (mut at, mut count) = (self.rng.random_range(0..sectors - most), self.rng.random_range(1..most));
        // Whole blocks, that others have as well.
        let alike = self.rng.random_bool(0.3);
        if alike {
            (at, count) = (at / 8 * 8, 8);
        }
        let replica = self.from.replica();
        let (offset, length) = (at * SECTOR as u64, count * SECTOR as u64);
        let blocks = crate::blocks::touched(offset, length);
        if self.broken != Broken::KeptBeforeWritten {
            self.recorder.before_write(blocks.clone(), replica)?;
        }
        self.written += 1;
        self.ended.values_mut().for_each(|ended| ended.since.insert(blocks.clone()));
        let tag = if alike { u64::MAX - self.written % 4 } else { self.written };
        let data: Vec<u8> =
            tag.to_le_bytes().into_iter().cycle().take(usize::try_from(length).expect("small")).collect();
        if self.rng.random_bool(0.1) { replica.zero(offset, length) } else { replica.write(offset, &data) }?;
        if !self.unheard {
            self.recorder.wrote(blocks);
        }
        Ok(())
    }

    fn roll(&mut self) -> Result<(), VolumeError> {
        self.now += Duration::from_secs(1);
        if self.unsettled || !self.recorder.is_due(self.now) {
            return Ok(());
        }
        let replica = self.from.replica();
        let epoch = self.recorder.roll(replica, self.now, self.now.as_millis() as u64)?;
        let stamps = (0..BLOCKS).map(|b| replica.stamp(b).expect("reads")).collect();
        self.ended.insert(epoch, Ended { image: contents(replica), stamps, since: BlockSet::default() });
        self.unsettled = true;
        Ok(())
    }

    fn settle(&mut self) -> Result<(), VolumeError> {
        if std::mem::take(&mut self.unsettled) {
            if self.broken != Broken::DurableBeforeSent {
                self.from.replica().flush()?;
            }
            self.recorder.settled();
        }
        Ok(())
    }

    fn send(&mut self) -> Result<(), MirrorError> {
        let Some(source) = &mut self.source else { return Ok(()) };
        let replica = self.from.replica();
        // As poll does it, with a write between the reading and the look at the stamps.
        if source.state == State::Sending
            && self.recorder.take_kept(source.id, 0).is_empty()
            && self.rng.random_bool(0.3)
            && let (Some(run), Some(epoch)) = (self.recorder.next_run(source.id, 0, 4), source.epoch)
            && self.recorder.overflown(source.id).is_none()
        {
            let mut data = vec![0; ((run.end - run.start) * BLOCK) as usize];
            replica.read(run.start * BLOCK, &mut data)?;
            let mut again = data.clone();
            self.write()?;
            self.from.replica().read(run.start * BLOCK, &mut again)?;
            // Half of it was read before, half after.
            data[SECTOR..].copy_from_slice(&again[SECTOR..]);
            let source = self.source.as_mut().expect("is there");
            let messages = source.looked_at(&run, &data, Why::Differs, epoch, self.from.replica(), &self.recorder)?;
            self.there.extend(messages);
            return Ok(());
        }
        let source = self.source.as_mut().expect("is there");
        let may = source.may_send(&self.recorder);
        let messages = source.poll(self.from.replica(), &self.recorder)?;
        assert!(may || messages.is_empty(), "nobody would have asked for them");
        self.there.extend(messages);
        Ok(())
    }

    fn deliver(&mut self) -> Result<(), MirrorError> {
        if let (Some(target), Some(message)) = (&mut self.target, self.there.pop_front()) {
            self.back.push_back(target.handle(&message, self.to.replica())?);
        }
        Ok(())
    }

    fn answer(&mut self) -> Result<(), MirrorError> {
        let Some(message) = self.back.pop_front() else { return Ok(()) };
        let Some(source) = &mut self.source else { return Ok(()) };
        let before = source.held();
        if source.state() == State::Exchanging
            && let Some(body) = message.strip_prefix(&[HAVE])
        {
            self.compare(body)?;
        } else {
            source.handle(&message, self.from.replica(), &self.recorder)?;
        }
        self.completed += u64::from(self.source.as_ref().is_some_and(|source| source.held() != before));
        Ok(())
    }

    /// As the source does it, with writes between two windows.
    fn compare(&mut self, said: &[u8]) -> Result<(), MirrorError> {
        let (replica, source) = (self.from.replica(), self.source.as_mut().expect("is there"));
        source.have(said, replica, &self.recorder)?;
        while self.source.as_mut().expect("is there").compare(self.from.replica(), &self.recorder)? {
            self.unheard = self.broken == Broken::HeardWhileCompared;
            let written = if self.rng.random_bool(0.7) { self.write() } else { Ok(()) };
            self.unheard = false;
            written?;
        }
        Ok(())
    }

    /// What must be true whenever both are there and nothing has been exchanged since they came up.
    fn check(&self) -> Result<(), String> {
        let (here, there) = (contents(self.from.replica()), contents(self.to.replica()));
        let stamp = |site: &Site, b| site.replica().stamp(b).expect("reads");
        for b in 0..BLOCKS {
            let (ours, theirs) = (stamp(&self.from, b), stamp(&self.to, b));
            let unsent = theirs.is_none() && ours.is_none();
            if (ours.is_some() && ours == theirs || unsent) && block(&here, b) != block(&there, b) {
                return Err(format!("block {b} has stamp {ours:?} at both sites, and other contents"));
            }
        }
        let Some(held) = self.to.replica().complete() else { return Ok(()) };
        let Some(ended) = self.ended.get(&held.epoch) else { return Err(format!("{held:?} never ended")) };
        if held.image && there != ended.image {
            return Err(format!("the image of {:?} is not what the primary had", held.epoch));
        }
        for b in 0..BLOCKS {
            let was = ended.stamps[b as usize];
            let untouched = !ended.since.contains(godwit_units::BlockIndex(b));
            if untouched && block(&here, b) != block(&ended.image, b) {
                return Err(format!("the primary has lost block {b} of {:?}, which the secondary holds", held.epoch));
            }
            if stamp(&self.from, b) == was && block(&there, b) != block(&ended.image, b) {
                return Err(format!("block {b} of {:?} is not held", held.epoch));
            }
        }
        Ok(())
    }

    fn step(&mut self) -> Result<(), bool> {
        let of_source = |e: MirrorError| matches!(e, MirrorError::Volume(_));
        let done = match self.rng.random_range(0..14) {
            0..3 => self.write().map_err(|_| false),
            3 => self.roll().map_err(|_| false),
            4 => self.settle().map_err(|_| false),
            5..8 => self.send().map_err(|e| {
                // Overflown: the session is over, nobody died.
                if !of_source(e) {
                    (self.source, self.target) = (None, None);
                }
                false
            }),
            8..11 => self.deliver().map_err(|_| true),
            11..13 => self.answer().map_err(|_| false),
            _ if self.rng.random_bool(0.1) => {
                self.library.lose();
                Ok(())
            }
            _ if self.rng.random_bool(0.2) => self.from.replica().settle().map_err(|_| false),
            _ => Ok(()),
        };
        match done {
            // An overflown session ended while both sites live.
            Err(_) if self.source.is_none() && !self.blown() => Ok(()),
            other => other,
        }
    }

    /// The guest writes to each of the first 40 blocks by itself.
    fn overwrites(&self, fill: u8) {
        for b in 0..40 {
            self.recorder.before_write(b..b + 1, self.from.replica()).unwrap();
            self.from.replica().write(b * BLOCK, &[fill; BLOCK as usize]).unwrap();
            self.recorder.wrote(b..b + 1);
        }
    }

    /// What there is goes, and is answered; epochs end meanwhile, or do not.
    fn travels(&mut self, epochs_end: bool) {
        for _ in 0..200 {
            if epochs_end {
                self.roll().unwrap();
                self.settle().unwrap();
            }
            let messages = self.source.as_mut().unwrap().poll(self.from.replica(), &self.recorder).unwrap();
            self.there.extend(messages);
            self.deliver().unwrap();
            self.answer().unwrap();
        }
    }

    fn blown(&self) -> bool {
        self.from.power.lock().unwrap().blown || self.to.power.lock().unwrap().blown
    }

    /// Ends one of the sites and brings it back, perhaps with a crash in its recovery too.
    fn crash(&mut self, target: bool) -> Result<(), String> {
        let had = self.to.replica().complete().is_some_and(|held| held.image);
        let Self { rng, from, to, .. } = self;
        let site = if target { to } else { from };
        loop {
            site.end(rng);
            if rng.random_bool(0.3) {
                site.power.lock().unwrap().fuse = Some(rng.random_range(0..12));
            }
            match site.open() {
                Ok(()) => {
                    site.power.lock().unwrap().fuse = None;
                    break;
                }
                Err(_) if site.power.lock().unwrap().blown => {}
                Err(error) => return Err(format!("cannot be opened: {error}")),
            }
        }
        if had && !self.to.replica().complete().is_some_and(|held| held.image) {
            return Err("the secondary had an image, and has none any more".into());
        }
        self.unsettled = false;
        if !target {
            self.own();
        }
        self.recorder.clear();
        (self.source, self.target) = (None, None);
        Ok(())
    }

    fn run(mut self, steps: u32) -> Result<Self, String> {
        // One region of three.
        AT_ONCE.set(1);
        for _ in 0..steps {
            if self.source.is_none() {
                self.check()?;
                self.connect().map_err(|e| e.to_string())?;
            }
            if self.rng.random_bool(0.02) {
                let fuse = Some(self.rng.random_range(0..25));
                let site = if self.rng.random_bool(0.5) { &self.from } else { &self.to };
                site.power.lock().unwrap().fuse = fuse;
            }
            if let Err(target) = self.step() {
                let blown = self.to.power.lock().unwrap().blown;
                if target != blown && !self.blown() {
                    return Err("something failed with the power on".into());
                }
                self.crash(blown)?;
            } else if self.rng.random_bool(0.003) {
                let target = self.rng.random_bool(0.5);
                self.crash(target)?;
            } else if self.rng.random_bool(0.003) {
                // The session ends, and everybody lives.
                self.recorder.clear();
                (self.source, self.target) = (None, None);
            }
        }
        // Calm: everything becomes equal.
        for site in [&self.from, &self.to] {
            site.power.lock().unwrap().fuse = None;
        }
        if self.blown() {
            let target = self.to.power.lock().unwrap().blown;
            self.crash(target)?;
        }
        self.connect().map_err(|e| e.to_string())?;
        for _ in 0..10_000 {
            let all = |e: &dyn std::fmt::Display| e.to_string();
            self.roll().map_err(|e| all(&e))?;
            self.settle().map_err(|e| all(&e))?;
            let messages = self
                .source
                .as_mut()
                .expect("is there")
                .poll(self.from.replica(), &self.recorder)
                .map_err(|e| all(&e))?;
            self.there.extend(messages);
            self.deliver().map_err(|e| all(&e))?;
            self.answer().map_err(|e| all(&e))?;
        }
        let id = self.source.as_ref().expect("is there").subscriber();
        if self.recorder.backlog(id) != Bytes(0) || contents(self.from.replica()) != contents(self.to.replica()) {
            return Err("the secondary did not catch up".into());
        }
        self.check()?;
        Ok(self)
    }
}

fn seeds(image: bool, broken: Broken, seeds: Range<u64>) -> Result<u64, String> {
    let mut completed = 0;
    for seed in seeds {
        let done = World::new(seed, image, broken).run(1000);
        completed += done.map_err(|e| format!("seed {seed}: {e}"))?.completed;
    }
    Ok(completed)
}

#[test]
fn what_a_secondary_says_it_holds_it_holds_whatever_crashes_at_whichever_operation() {
    let most: u64 = std::env::var("GODWIT_SEEDS").ok().and_then(|s| s.parse().ok()).unwrap_or(150);
    let blocks = seeds(false, Broken::Nothing, 0..most).unwrap();
    let images = seeds(true, Broken::Nothing, 0..most).unwrap();
    assert!(blocks > 2 * most && images > 2 * most, "too little was completed: {blocks} and {images}");
    println!("{blocks} epochs of blocks and {images} images were completed");
}

#[test]
fn each_rule_matters_without_it_some_seed_fails() {
    let rules = [
        (false, Broken::StampAfterReading),
        (false, Broken::UnsaidBeforeForgotten),
        (false, Broken::AnsweredBeforeEnd),
        (false, Broken::EpochsSetAside),
        (false, Broken::HeardWhileCompared),
        (true, Broken::KeptBeforeWritten),
        (true, Broken::DurableBeforeSent),
        (true, Broken::Journal(Rule::DurableFirst)),
        (true, Broken::Journal(Rule::RedoSaid)),
        (true, Broken::Journal(Rule::CommitBeforeComplete)),
    ];
    for (image, broken) in rules {
        let failed = seeds(image, broken, 0..600);
        assert!(failed.is_err(), "{broken:?}: nothing fails without it");
        println!("{broken:?}: {}", failed.unwrap_err());
    }
}

#[test]
fn what_another_volume_of_the_domain_has_goes_by_name_and_no_more_where_there_is_an_image() {
    let travels = |world: &mut World| {
        let mut bytes = 0;
        for _ in 0..200 {
            world.roll().unwrap();
            world.settle().unwrap();
            let messages = world.source.as_mut().unwrap().poll(world.from.replica(), &world.recorder).unwrap();
            bytes += messages.iter().map(Vec::len).sum::<usize>() as u64;
            world.there.extend(messages);
            world.deliver().unwrap();
            world.answer().unwrap();
        }
        bytes
    };
    let fill = |world: &World, from: u8| {
        for b in 0..40_u64 {
            let block = [from + b as u8; BLOCK as usize];
            world.recorder.before_write(b..b + 1, world.from.replica()).unwrap();
            world.from.replica().write(b * BLOCK, &block).unwrap();
            world.recorder.wrote(b..b + 1);
        }
    };
    let mut first = World::new(1, true, Broken::Nothing);
    first.connect().unwrap();
    fill(&first, 1);
    assert!(travels(&mut first) > 40 * BLOCK);
    // A block is found where it came last, so that volume has to be there.
    let mut there = vec![];
    for (image, named, again) in [(false, 40, 5 * BLOCK), (true, 39, 41 * BLOCK)] {
        let mut second = World::new(2, image, Broken::Nothing);
        second.library = first.library.clone();
        second.connect().unwrap();
        fill(&second, 1);
        let bytes = travels(&mut second);
        assert!(bytes < 4 * BLOCK, "{bytes}");
        // The first volume's block, which the second one has overwritten since, is missed by the third.
        assert_eq!(second.source.as_ref().unwrap().named(), Bytes(named * BLOCK));
        assert_eq!(contents(second.from.replica()), contents(second.to.replica()));
        // What it has sent itself is named, too: but not into an image, whose next epoch is put aside.
        fill(&second, 2);
        let bytes = travels(&mut second);
        assert!(bytes < again && (!image || bytes > 40 * BLOCK), "{bytes}");
        assert_eq!(contents(second.from.replica()), contents(second.to.replica()));
        there.push(second);
    }
}

#[test]
fn an_image_that_cannot_keep_up_is_given_up_and_the_one_before_stands() {
    let mut world = World::new(1, true, Broken::Nothing);
    world.connect().unwrap();
    world.from.replica().write(0, &[1; 40 * BLOCK as usize]).unwrap();
    world.recorder.wrote(0..40);
    world.travels(true);
    let held = world.to.replica().complete().unwrap();
    assert!(held.image);
    // All of it again, and again while it is being sent: more than the eight blocks that this recorder keeps.
    for fill in [2, 3] {
        world.overwrites(fill);
        assert!(world.recorder.kept() <= Bytes(8 * BLOCK));
        if fill == 2 {
            world.roll().unwrap();
            world.settle().unwrap();
        }
    }
    let ended = world.source.as_mut().unwrap().poll(world.from.replica(), &world.recorder);
    assert!(matches!(ended, Err(MirrorError::Overwritten { room: Bytes(bytes) }) if bytes == 8 * BLOCK), "{ended:?}");
    assert_eq!(world.to.replica().complete(), Some(held));
    let mut first = [0; 1];
    world.to.replica().read(0, &mut first).unwrap();
    assert_eq!(first, [1]);
    // With the next session the image comes up to date.
    world.connect().unwrap();
    world.travels(true);
    assert_eq!(contents(world.from.replica()), contents(world.to.replica()));
    assert!(world.to.replica().complete().unwrap().epoch > held.epoch);
}

#[test]
fn with_more_room_an_image_keeps_up_with_what_is_overwritten_meanwhile() {
    let mut world = World::new(1, true, Broken::Nothing);
    world.connect().unwrap();
    world.overwrites(1);
    world.travels(true);
    let held = world.to.replica().complete().unwrap();
    // Five times what this recorder keeps by itself is overwritten before any of it was sent.
    let id = world.source.as_ref().unwrap().id;
    world.recorder.keeps(id, Bytes(40 * BLOCK));
    world.overwrites(2);
    world.roll().unwrap();
    world.settle().unwrap();
    world.overwrites(3);
    assert_eq!(world.recorder.kept(), Bytes(40 * BLOCK));
    world.travels(false);
    assert!(world.to.replica().complete().unwrap().epoch > held.epoch);
    let mut there = vec![0; 40 * BLOCK as usize];
    world.to.replica().read(0, &mut there).unwrap();
    assert!(there.iter().all(|byte| *byte == 2), "the image is of the moment at which its epoch ended");
}

#[test]
fn a_block_that_is_written_all_the_time_travels_once_an_epoch_and_holds_no_epoch_up() {
    let mut world = World::new(2, false, Broken::Nothing);
    world.connect().unwrap();
    let mut travelled: BTreeMap<u64, u64> = BTreeMap::new();
    for round in 0..50_u64 {
        for b in [0, 1 + round % 40] {
            world.from.replica().write(b * BLOCK, &round.to_le_bytes()).unwrap();
            world.recorder.wrote(b..b + 1);
        }
        if round % 5 == 0 {
            world.roll().unwrap();
            world.settle().unwrap();
        }
        let messages = world.source.as_mut().unwrap().poll(world.from.replica(), &world.recorder).unwrap();
        for message in &messages {
            if let Some((run, ..)) = parse_run(&message[1..]).filter(|_| message[0] == DATA) {
                run.for_each(|b| *travelled.entry(b).or_default() += 1);
            }
        }
        world.there.extend(messages);
        while !world.there.is_empty() || !world.back.is_empty() {
            world.deliver().unwrap();
            world.answer().unwrap();
        }
    }
    assert!(world.completed >= 8, "{}", world.completed);
    assert!((5..=11).contains(&travelled[&0]), "{travelled:?}");
}

#[test]
fn the_guest_keeps_no_more_in_memory_than_is_named() {
    assert_eq!(MOST_KEPT, Bytes::mib(64));
    let recorder = Recorder::new();
    assert!(!recorder.is_used());
    let id = recorder.subscribe(false);
    recorder.wrote(0..1);
    assert_eq!(recorder.backlog(id), Bytes(BLOCK));
    recorder.unsubscribe(id);
    recorder.wrote(0..1);
    assert_eq!((recorder.backlog(id), recorder.is_used()), (Bytes(0), false));
}

#[test]
fn each_block_of_a_backlog_counts_once_in_whichever_epochs_it_was_written_and_however_large_that_is() {
    let mut site = Site::new();
    site.open().unwrap();
    let replica = site.replica();
    replica.become_primary(Lineage(0), Generation(1)).unwrap();
    let recorder = Recorder::new();
    let id = recorder.subscribe(false);
    recorder.compared(id, BlockSet::default(), Some(held(1)));
    assert!(!recorder.is_behind(id));
    // One of each chunk of sets, of more than are counted at once: of the epoch under way, of one that waits, and of that of now.
    for (n, writes) in [0..3000_u64, 1000..4000, 2000..5000].into_iter().enumerate() {
        writes.for_each(|chunk| recorder.wrote(chunk * 1024..chunk * 1024 + 1));
        if n < 2 {
            recorder.roll(replica, Duration::from_secs(n as u64), 0).unwrap();
        }
    }
    assert_eq!((recorder.backlog(id), recorder.is_behind(id)), (Bytes(5000 * BLOCK), true));
    recorder.read(id, 0..1500 * 1024);
    assert_eq!(recorder.backlog(id), Bytes(4000 * BLOCK), "those from 1000 on were written again");
    recorder.clear();
    assert_eq!((recorder.backlog(id), recorder.is_behind(id)), (Bytes(0), false));
}

#[test]
fn each_secondary_has_epochs_at_its_own_interval_and_in_each_all_that_was_written_since_its_last() {
    for seed in 0..10 {
        let mut rng = SmallRng::seed_from_u64(seed);
        let mut site = Site::new();
        site.open().unwrap();
        let replica = site.replica();
        replica.become_primary(Lineage(0), Generation(1)).unwrap();
        let recorder = Recorder::new();
        let all = [1_u64, 7, 60].map(|interval| {
            let id = recorder.subscribe(false);
            recorder.every(id, Duration::from_secs(interval));
            recorder.compared(id, BlockSet::default(), Some(held(1)));
            (id, interval)
        });
        let mut owed = [(); 3].map(|()| BTreeSet::new());
        let (mut last, mut epochs) = ([None::<(u64, Stamp)>; 3], [0; 3]);
        for now in 0..600_u64 {
            for _ in 0..rng.random_range(0..3) {
                let block = rng.random_range(0..BLOCKS);
                replica.write(block * BLOCK, &now.to_le_bytes()).unwrap();
                recorder.wrote(block..block + 1);
                owed.iter_mut().for_each(|owed| _ = owed.insert(block));
            }
            if recorder.is_due(Duration::from_secs(now)) {
                recorder.roll(replica, Duration::from_secs(now), now).unwrap();
                recorder.settled();
            }
            for (n, (id, interval)) in all.into_iter().enumerate() {
                assert_eq!(recorder.is_behind(id), recorder.backlog(id) > Bytes(0));
                let Some(epoch) = recorder.sendable(id) else { continue };
                if epoch.at_unix_ms == now {
                    if let Some((before, stamp)) = last[n] {
                        assert!(now / interval > before / interval, "seed {seed}: {before} and {now} for {interval}");
                        assert!(epoch.epoch > stamp, "seed {seed}");
                    }
                    (last[n], epochs[n]) = (Some((now, epoch.epoch)), epochs[n] + 1);
                    let mut sent = BTreeSet::new();
                    while let Some(run) = recorder.next_run(id, 0, BLOCKS) {
                        sent.extend(run.clone());
                        recorder.read(id, run);
                    }
                    assert_eq!(sent, std::mem::take(&mut owed[n]), "seed {seed}: at {now} for {interval}");
                }
                if rng.random_bool(0.7) {
                    recorder.completed(id);
                }
            }
        }
        for ((id, _), owed) in all.into_iter().zip(&owed) {
            assert_eq!(recorder.backlog(id), Bytes(owed.len() as u64 * BLOCK));
        }
        // Nobody waits for one with a longer interval, either.
        assert!(epochs[0] > 200 && (50..=86).contains(&epochs[1]) && (8..=10).contains(&epochs[2]), "{epochs:?}");
    }
}

#[test]
fn secondaries_of_one_interval_have_the_same_epochs_whenever_they_came() {
    let mut site = Site::new();
    site.open().unwrap();
    let replica = site.replica();
    replica.become_primary(Lineage(0), Generation(1)).unwrap();
    let recorder = Recorder::new();
    let mut all = vec![];
    let (mut rolls, mut epochs) = (0, 0);
    for ms in (0..61_000_u64).step_by(50) {
        // The first one at 0.3 s, the others some tenths after it.
        if [300, 650, 1150].contains(&ms) {
            let id = recorder.subscribe(false);
            recorder.every(id, Duration::from_secs(1));
            recorder.compared(id, BlockSet::default(), Some(held(1)));
            all.push(id);
        }
        recorder.wrote(0..1);
        let now = Duration::from_millis(ms);
        if recorder.is_due(now) {
            recorder.roll(replica, now, ms).unwrap();
            recorder.settled();
            rolls += 1;
        }
        for id in all.iter().filter(|id| recorder.sendable(**id).is_some()) {
            recorder.read(*id, 0..1);
            recorder.completed(*id);
            epochs += 1;
        }
    }
    // One a second for all three, and one more for each that came in between.
    assert!((60..=63).contains(&rolls), "{rolls}");
    assert!((178..=183).contains(&epochs), "{epochs}");
}

/// A comparison that is late, of a session that a move has ended, would take for sure what the move's mirror passes on.
#[test]
fn what_a_secondary_says_after_a_move_has_begun_makes_nothing_sure() {
    let mut world = World::new(1, false, Broken::Nothing);
    world.write().unwrap();
    world.connect().unwrap();
    let source = world.source.as_mut().unwrap();
    world.recorder.clear();
    let runs = world.from.replica().runs_to_compare().unwrap();
    let late = loop {
        let message = world.back.pop_front().expect("the last one compares");
        if let Err(error) = source.handle(&message, world.from.replica(), &world.recorder) {
            break error;
        }
    };
    assert!(matches!(late, MirrorError::Over), "{late}");
    // The mirror's own next comparison restamps what has been written since the first: nothing was made sure.
    world.write().unwrap();
    let before = world.from.replica().stamp_runs().unwrap();
    assert_ne!(before, runs);
    assert_ne!(world.from.replica().runs_to_compare().unwrap(), before, "what it may have passed on has another stamp");
}

fn held(epoch: u32) -> Complete {
    let epoch = Stamp { lineage: Lineage::FIRST, generation: Generation::FIRST, epoch: Epoch(epoch) };
    Complete { epoch, at_unix_ms: 0, image: true, moment: None }
}

#[test]
fn a_journal_that_is_read_otherwise_than_it_was_written_makes_no_image() {
    for rotten in [false, true] {
        let mut site = Site::new();
        site.open().unwrap();
        let replica = site.replica();
        replica.set_complete(Some(held(1))).unwrap();
        let mut journal = site.journal();
        journal.begin([1; 16]).unwrap();
        for block in 0..4 {
            let run = block..block + 1;
            journal.append(&run_message(DATA, &run, held(2).epoch, &[7; BLOCK as usize])).unwrap();
        }
        if rotten {
            site.files[4].state.lock().unwrap().0[2 * BLOCK as usize] ^= 1;
        }
        let done = journal.finish(held(2), replica);
        assert_eq!(matches!(done, Err(VolumeError::Damaged { .. })), rotten, "{done:?}");
        // Part of the epoch is in its place, under its own stamps: the next session brings the rest.
        assert_eq!(replica.complete(), (!rotten).then(|| held(2)));
        assert!(!replica.redoes());
        assert_eq!(replica.stamp(0).unwrap(), Some(held(2).epoch));
        assert_eq!(replica.stamp(3).unwrap().is_some(), !rotten);
    }
}

#[test]
fn what_could_not_be_stored_of_an_epoch_is_not_believed_and_is_stored_at_the_next_try() {
    let mut site = Site::new();
    site.open().unwrap();
    let replica = site.replica();
    replica.set_complete(Some(held(1))).unwrap();
    site.power.lock().unwrap().blown = true;
    assert!(replica.set_complete(None).is_err());
    assert_eq!(replica.complete(), Some(held(1)), "what is stored says so, and a restart would find it");
    site.power.lock().unwrap().blown = false;
    replica.set_complete(None).unwrap();
    let (again, _) = Replica::open_on(Path::new("site"), site.media()).unwrap();
    assert_eq!(again.complete(), None);
}

#[test]
fn an_image_of_which_nobody_knows_whether_it_was_stored_is_given_up_before_it_is_written_to() {
    let mut site = Site::new();
    site.open().unwrap();
    let replica = site.replica();
    // The store fails, and is done all the same.
    site.power.lock().unwrap().fuse = Some(0);
    assert!(replica.set_complete(Some(held(1))).is_err());
    *site.power.lock().unwrap() = Power::default();
    replica.set_complete(None).unwrap();
    let (again, _) = Replica::open_on(Path::new("site"), site.media()).unwrap();
    assert_eq!(again.complete(), None, "what is written over it is no image");
}

#[test]
fn what_an_earlier_session_left_of_a_journal_is_given_back() {
    use std::os::unix::fs::MetadataExt as _;
    let folder = tempfile::tempdir().unwrap();
    let taken = || std::fs::metadata(folder.path().join("journal")).unwrap().blocks() * 512;
    let mut journal = Journal::open(folder.path()).unwrap();
    journal.begin([1; 16]).unwrap();
    (0..64).for_each(|_| journal.append(&[b'x'; 60_000]).unwrap());
    assert!(taken() > 3_000_000);
    drop(journal);
    Journal::open(folder.path()).unwrap().begin([2; 16]).unwrap();
    assert!(taken() < 100_000, "{}", taken());
}

#[test]
fn what_is_on_its_way_has_a_bound_that_follows_from_the_path() {
    let mut world = World::new(2, false, Broken::Nothing);
    world.connect().unwrap();
    world.roll().unwrap();
    for b in 0..BLOCKS {
        world.from.replica().write(b * BLOCK, &[b as u8 | 1; BLOCK as usize]).unwrap();
        world.recorder.wrote(b..b + 1);
    }
    while !world.there.is_empty() || !world.back.is_empty() {
        world.deliver().unwrap();
        world.answer().unwrap();
    }
    world.roll().unwrap();
    world.settle().unwrap();
    let source = world.source.as_mut().unwrap();
    source.window = 1;
    assert!(!source.poll(world.from.replica(), &world.recorder).unwrap().is_empty(), "nothing is under way");
    assert_eq!(source.poll(world.from.replica(), &world.recorder).unwrap(), Vec::<Vec<u8>>::new());
    let ms = Duration::from_millis;
    for (mbit, round_trip, window) in
        [(100.0, ms(20), WINDOW), (500.0, ms(50), 12_500_000), (1e5, ms(100), MOST_WINDOW)]
    {
        source.path_is(BitRate::from_mbit(mbit), round_trip);
        assert_eq!(source.window, window, "{mbit} Mbit/s, {round_trip:?}");
    }
}

#[path = "moments_tests.rs"]
mod moments;
