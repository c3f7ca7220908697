//! A sender and a receiver with everything between them that can be lost, from a seed.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use godwit_content::{
    BLOCK, Block, ContentSource, Dictionary, Digest, Domains, Key, Place, Sender, TrustDomain, fetch, is_zero, reply,
    take,
};
use godwit_units::Bytes;
use rand::rngs::SmallRng;
use rand::{Rng, RngCore, SeedableRng};
use std::collections::{BTreeSet, VecDeque};
use std::sync::Mutex;

const UNITS: usize = 96;
const MOST_RUN: usize = 12;
const MEMORY: Bytes = Bytes::kib(8);

/// Contents of few kinds, so that many are alike.
fn contents(n: u32) -> Block {
    let mut block = [0; BLOCK];
    if n > 0 {
        SmallRng::seed_from_u64(u64::from(n)).fill_bytes(&mut block);
    }
    block
}

fn key(seed: u64) -> Key {
    let mut bytes = [0; 32];
    SmallRng::seed_from_u64(seed).fill_bytes(&mut bytes);
    Key::new(bytes)
}

/// What the receiver's site has: the volume that is written, then another volume of the same customer's.
struct Site {
    blocks: Vec<Block>,
    dictionary: Dictionary,
}

impl ContentSource for Site {
    fn copy(&self, digest: &Digest, into: &mut Block) -> bool {
        self.dictionary.place(digest).is_some_and(|place| {
            *into = self.blocks[place.0 as usize];
            true
        })
    }
}

enum Message {
    Plain(usize, Vec<u8>),
    Frame(usize, Vec<u8>),
}

struct World {
    rng: SmallRng,
    source: Vec<Block>,
    dirty: BTreeSet<usize>,
    sender: Sender,
    site: Site,
    there: VecDeque<Message>,
    back: VecDeque<Vec<u8>>,
    /// Each unit's contents so far: nothing else may ever stand there.
    history: Vec<BTreeSet<Vec<u8>>>,
    bytes: usize,
    named: u64,
    missed: u64,
}

impl World {
    fn new(seed: u64) -> Self {
        let mut rng = SmallRng::seed_from_u64(seed);
        let other: Vec<Block> = (0..UNITS as u32).map(|_| contents(rng.random_range(0..40))).collect();
        let blocks = vec![[0; BLOCK]; UNITS].into_iter().chain(other).collect();
        let site = Site { blocks, dictionary: Dictionary::new(key(seed), MEMORY) };
        let mut world = Self {
            rng,
            source: vec![[0; BLOCK]; UNITS],
            dirty: BTreeSet::new(),
            sender: Sender::new(MEMORY),
            site,
            there: VecDeque::new(),
            back: VecDeque::new(),
            history: vec![BTreeSet::from([vec![0; BLOCK]]); UNITS],
            bytes: 0,
            named: 0,
            missed: 0,
        };
        for at in UNITS..2 * UNITS {
            let block = world.site.blocks[at];
            world.site.dictionary.learn(&block, Place(at as u64));
        }
        world.connect();
        world
    }

    /// A new session: what was on its way is gone, and units are compared.
    fn connect(&mut self) {
        self.named += self.sender.figures().named;
        self.missed += self.sender.figures().missed;
        self.there.clear();
        self.back.clear();
        self.sender = Sender::new(MEMORY);
        let most = if self.rng.random_bool(0.5) { 1000 } else { 0 };
        for message in self.site.dictionary.greetings(most) {
            self.sender.greet(&message).unwrap();
        }
        self.dirty = (0..UNITS).filter(|at| self.source[*at] != self.site.blocks[*at]).collect();
    }

    fn write(&mut self) {
        let at = self.rng.random_range(0..UNITS);
        let block = contents(self.rng.random_range(0..40));
        self.source[at] = block;
        self.history[at].insert(block.to_vec());
        self.dirty.insert(at);
    }

    fn send(&mut self) {
        let Some(first) = self.dirty.iter().nth(self.rng.random_range(0..UNITS) % self.dirty.len().max(1)).copied()
        else {
            return;
        };
        let run = (first..UNITS).take_while(|at| self.dirty.contains(at)).take(MOST_RUN).count();
        self.dirty.retain(|at| !(first..first + run).contains(at));
        let data = self.source[first..first + run].concat();
        self.there.push_back(match self.sender.name(first as u64, &data) {
            Some(frame) => Message::Frame(first, frame),
            None => Message::Plain(first, data),
        });
        self.bytes += match self.there.back() {
            Some(Message::Frame(_, bytes) | Message::Plain(_, bytes)) => bytes.len(),
            None => 0,
        };
    }

    fn store(&mut self, first: usize, data: &[u8]) {
        for (n, block) in data.chunks_exact(BLOCK).enumerate() {
            assert!(self.history[first + n].contains(block), "unit {} never had these contents", first + n);
            self.site.blocks[first + n].copy_from_slice(block);
            self.site.dictionary.learn(block, Place((first + n) as u64));
        }
    }

    fn arrive(&mut self) {
        match self.there.pop_front() {
            Some(Message::Plain(first, data)) => self.store(first, &data),
            Some(Message::Frame(first, frame)) => {
                let taken = take(&frame, self.site.dictionary.key(), &self.site).unwrap();
                for (at, data) in &taken.present {
                    self.store(first + at, data);
                }
                self.back.push_back(reply(&taken.missing));
            }
            None => {}
        }
    }

    fn answered(&mut self) {
        if let Some(reply) = self.back.pop_front() {
            self.dirty.extend(self.sender.handle(&reply).unwrap().into_iter().map(|unit| unit as usize));
        }
    }

    /// Something fails at the receiver.
    fn fail(&mut self) {
        match self.rng.random_range(0..4) {
            // The dictionary is lost: under the same key, so that the session goes on.
            0 => self.site.dictionary = Dictionary::new(self.site.dictionary.key().clone(), MEMORY),
            // The other volume is written to.
            1 => {
                for at in UNITS..2 * UNITS {
                    self.site.blocks[at] = contents(self.rng.random_range(0..40));
                }
            }
            // Entries that lead to something else.
            2 => {
                for n in 0..40 {
                    let digest = self.site.dictionary.key().digest(&contents(n));
                    self.site.dictionary.learn_digest(&digest, Place(self.rng.random_range(0..2 * UNITS as u64)));
                }
            }
            _ => self.connect(),
        }
    }

    fn finish(&mut self) {
        for _ in 0..10_000 {
            if self.dirty.is_empty() && self.there.is_empty() && self.back.is_empty() {
                return;
            }
            self.send();
            self.arrive();
            self.answered();
        }
        panic!("it does not end");
    }
}

#[test]
fn whatever_is_lost_the_receiver_has_the_senders_blocks_and_never_anything_else() {
    let (mut named, mut missed) = (0, 0);
    for seed in 0..150 {
        let mut world = World::new(seed);
        for _ in 0..400 {
            match world.rng.random_range(0..100) {
                0..35 => world.write(),
                35..60 => world.send(),
                60..78 => world.arrive(),
                78..96 => world.answered(),
                _ => world.fail(),
            }
        }
        world.finish();
        assert!(world.source == world.site.blocks[..UNITS], "seed {seed}");
        named += world.named + world.sender.figures().named;
        missed += world.missed + world.sender.figures().missed;
    }
    assert!(missed > 1000 && named > 2 * missed, "{named} named, {missed} missed: too little was tried");
}

#[test]
fn what_the_site_holds_in_another_volume_goes_by_name() {
    let mut world = World::new(1);
    for message in world.site.dictionary.greetings(1000) {
        world.sender.greet(&message).unwrap();
    }
    world.source.clone_from_slice(&world.site.blocks[UNITS..]);
    for (at, block) in world.source.iter().enumerate() {
        world.history[at].insert(block.to_vec());
    }
    world.dirty = (0..UNITS).collect();
    world.finish();
    assert!(world.source == world.site.blocks[..UNITS]);
    assert_eq!(world.sender.figures().missed, 0);
    assert!(world.bytes < UNITS * 24, "{} bytes for {UNITS} blocks that were there", world.bytes);
}

#[test]
fn a_block_that_a_frame_has_twice_is_in_it_once_and_nothing_is_missed() {
    let mut world = World::new(2);
    let none = Dictionary::new(key(2), MEMORY);
    for message in none.greetings(0) {
        world.sender.greet(&message).unwrap();
    }
    let run: Vec<u8> = [7, 7, 8, 7].iter().flat_map(|n| contents(*n)).collect();
    let frame = world.sender.name(0, &run).unwrap();
    assert!(frame.len() < 2 * BLOCK + 64, "{}", frame.len());
    let taken = take(&frame, &key(2), &Site { blocks: vec![], dictionary: none }).unwrap();
    assert_eq!((taken.named, &taken.missing[..], &taken.present), (2, &[][..], &vec![(0, run)]));
}

#[test]
fn a_receiver_that_has_nothing_of_what_it_promised_costs_a_bounded_number_of_names() {
    // It tells marks and then has none of it; the sender learns soon.
    let mut world = World::new(2);
    world.source = (0..UNITS as u32).map(|n| contents(n + 1)).collect();
    let lying = {
        let mut dictionary = Dictionary::new(world.site.dictionary.key().clone(), MEMORY);
        world.source.iter().for_each(|block| dictionary.learn(block, Place(0)));
        dictionary.greetings(1000)
    };
    for _ in 0..20 {
        world.site.dictionary = Dictionary::new(world.site.dictionary.key().clone(), Bytes(1));
        for message in &lying[1..] {
            world.sender.greet(message).unwrap();
        }
        world.site.blocks[..UNITS].fill([0; BLOCK]);
        for (at, block) in world.source.iter().enumerate() {
            world.history[at].insert(block.to_vec());
        }
        world.dirty = (0..UNITS).collect();
        world.bytes = 0;
        world.finish();
        assert!(world.source == world.site.blocks[..UNITS]);
        assert!(world.bytes <= UNITS * (BLOCK + 16 + 4), "{} bytes", world.bytes);
    }
    assert!(world.sender.figures().forgotten > 0, "{:?}", world.sender.figures());
}

/// Bytes both ways when a sender of `domain` sends a block of which it guesses that a neighbour holds it.
fn guess(neighbour_holds: Option<&Block>, guessed: &Block) -> (usize, usize) {
    let mut domains = Domains::new(8);
    let mut of =
        |name: &str, n| domains.of(&TrustDomain(name.into()), || Mutex::new(Dictionary::new(key(n), Bytes::kib(64))));
    let mut places: Vec<Block> = vec![];
    let neighbour = of("neighbour", 1);
    for at in 0..50 {
        places.push(contents(1000 + at));
        neighbour.lock().unwrap().learn(&contents(1000 + at), Place(u64::from(at)));
    }
    if let Some(block) = neighbour_holds {
        places[7] = *block;
        neighbour.lock().unwrap().learn(block, Place(7));
    }
    let own = of("own", 2);
    let dictionary = std::mem::replace(&mut *own.lock().unwrap(), Dictionary::new(key(3), Bytes(1)));
    let site = Site { blocks: places, dictionary };
    let mut sender = Sender::new(Bytes::kib(64));
    let (mut there, mut back) = (0, 0);
    for message in site.dictionary.greetings(1000) {
        back += message.len();
        sender.greet(&message).unwrap();
    }
    match sender.name(0, guessed) {
        Some(frame) => {
            there += frame.len();
            back += reply(&take(&frame, site.dictionary.key(), &site).unwrap().missing).len();
        }
        None => there += guessed.len(),
    }
    // Nor does a name fetch it, under the own key or, if that had leaked, under the neighbour's.
    for key in [key(1), key(2)] {
        assert!(fetch(&site, &key, &key.digest(guessed)).is_none());
    }
    (there, back)
}

#[test]
fn a_neighbour_that_guesses_contents_sees_equal_byte_counts_whether_or_not_they_are_held() {
    for n in 0..20 {
        let secret = contents(n + 1);
        let (held, not) = (guess(Some(&secret), &secret), guess(None, &secret));
        assert_eq!(held, not);
        assert_eq!(held.0, BLOCK, "it went in full");
    }
    assert!(is_zero(&contents(0)));
}

#[test]
fn what_makes_no_sense_is_refused_by_both_sides() {
    let key = key(5);
    let site = Site { blocks: vec![contents(1)], dictionary: Dictionary::new(key.clone(), MEMORY) };
    let bad: [&[u8]; 8] = [&[], &[1], &[0, 0], &[65, 0], &[1, 0], &[1, 0, 3], &[1, 0, 1, 9, 9], &[1, 0, 0, 0]];
    for frame in bad {
        assert!(take(frame, &key, &site).is_err(), "{frame:?}");
    }
    let mut sender = Sender::new(MEMORY);
    assert!(sender.greet(&[2, 0, 0, 0, 0, 0, 0, 0, 1]).is_err(), "marks before the key");
    for greeting in [&[][..], &[1, 2], &[2, 1], &[3], &vec![2; 1 + 8 * 8193]] {
        assert!(sender.greet(greeting).is_err(), "{}", greeting.len());
    }
    assert!(sender.handle(&[]).is_err(), "a reply to nothing");
    for message in site.dictionary.greetings(10) {
        sender.greet(&message).unwrap();
    }
    for reply in [&[0, 0][..], &[1, 0, 1, 0], &[2, 0, 1, 0], &[1]] {
        let data = [contents(2), contents(1), contents(1)].concat();
        sender.name(0, &contents(1));
        assert!(sender.name(0, &data).is_some());
        assert!(sender.handle(reply).is_err() != (reply == [2, 0]), "{reply:?}");
    }
}
