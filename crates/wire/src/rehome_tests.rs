//! Two ends that move about, over a network that loses, doubles and reorders, between hosts that crash.

use super::*;

type Host = u8;

const HOSTS: usize = 5;

/// A small generator, so that a seed is a whole run.
struct Seed(u64);

impl Seed {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 >> 33).unwrap() % bound
    }
}

#[derive(Clone)]
struct Message {
    from: Host,
    to: Host,
    views: [View<Host>; 2],
    answer: bool,
}

/// Where a hand-off stands, as the ledgers know it.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Move {
    None,
    Staged(Host),
    Left(Host),
}

/// An end, as the ledgers know it.
#[derive(Clone, Copy)]
struct Truth {
    owner: Host,
    generation: u64,
    mv: Move,
}

type Kept = ([View<Host>; 2], BTreeSet<Host>);

struct World {
    seed: Seed,
    without: Without,
    hosts: Vec<Option<Rehoming<Host>>>,
    /// What each host has made durable: before it answered.
    kept: Vec<Option<Kept>>,
    truth: [Truth; 2],
    messages: Vec<Message>,
    /// Hosts whose repetition has been used up, with that guard away.
    once: BTreeSet<(Host, Host, [Stamp; 2])>,
}

fn at(generation: u64) -> Sequence {
    Sequence { lineage: 0, generation }
}

fn view(generation: u64, host: Host) -> View<Host> {
    View { stamp: Stamp { sequence: at(generation), step: 0 }, host, coming: None }
}

impl World {
    fn new(seed: u64, without: Without) -> Self {
        let mut seed = Seed(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        seed.below(1);
        let owners = [seed.below(HOSTS) as Host, seed.below(HOSTS) as Host];
        let truth = owners.map(|owner| Truth { owner, generation: 1, mv: Move::None });
        let mut world = Self {
            seed,
            without,
            hosts: vec![None; HOSTS],
            kept: vec![None; HOSTS],
            truth,
            messages: vec![],
            once: BTreeSet::new(),
        };
        for side in Side::BOTH {
            let owner = owners[side.index()];
            world.make(owner, ([view(1, owners[0]), view(1, owners[1])], BTreeSet::new()));
            world.at(owner).open(side, at(1)).unwrap();
        }
        world
    }

    fn make(&mut self, host: Host, (views, before): Kept) {
        let slot = &mut self.hosts[usize::from(host)];
        match slot {
            Some(machine) => {
                machine.heard(&host, &views);
            }
            None => *slot = Some(Rehoming { without: self.without, ..Rehoming::new(host, views, before) }),
        }
        self.keep(host);
    }

    fn at(&mut self, host: Host) -> &mut Rehoming<Host> {
        self.hosts[usize::from(host)].as_mut().unwrap()
    }

    fn keep(&mut self, host: Host) {
        let machine = self.at(host);
        let kept = (machine.views().clone(), machine.before().clone());
        self.kept[usize::from(host)] = Some(kept);
    }

    /// An end makes its next step.
    fn step(&mut self, side: Side) {
        let truth = self.truth[side.index()];
        match truth.mv {
            Move::None => {
                let to = self.seed.below(HOSTS) as Host;
                if to == truth.owner {
                    return;
                }
                let source = self.at(truth.owner);
                source.stage(side, to);
                let views = source.views().clone();
                if self.without != Without::KeptFirst {
                    self.keep(truth.owner);
                }
                self.make(to, (views, BTreeSet::new()));
                self.truth[side.index()].mv = Move::Staged(to);
            }
            Move::Staged(to) => {
                let source = self.at(truth.owner);
                source.leave(side, to);
                source.close(side);
                self.truth[side.index()].mv = Move::Left(to);
            }
            Move::Left(to) if self.seed.below(4) > 0 => {
                self.truth[side.index()] = Truth { owner: to, generation: truth.generation + 1, mv: Move::None };
                self.at(to).open(side, at(truth.generation + 1)).unwrap();
            }
            // Undone: before the seal, or taken back after it.
            Move::Left(_) => {
                let generation = truth.generation + if self.seed.below(2) == 0 { 0 } else { 2 };
                self.truth[side.index()] = Truth { generation, mv: Move::None, ..truth };
                self.at(truth.owner).open(side, at(generation)).unwrap();
            }
        }
    }

    /// A host loses what it did not make durable; its ledger opens again what is its own.
    fn crash(&mut self, host: Host) {
        let Some(kept) = self.kept[usize::from(host)].clone() else { return };
        self.hosts[usize::from(host)] = None;
        self.make(host, kept);
        for side in Side::BOTH {
            let truth = self.truth[side.index()];
            if truth.owner == host && !matches!(truth.mv, Move::Left(_)) {
                self.at(host).open(side, at(truth.generation)).unwrap();
            }
        }
    }

    fn tell(&mut self) {
        for host in 0..HOSTS as Host {
            if self.hosts[usize::from(host)].is_none() {
                continue;
            }
            if self.without != Without::KeptFirst {
                self.keep(host);
            }
            let machine = self.at(host);
            let views = machine.views().clone();
            for to in machine.due() {
                let stamps = [views[0].stamp, views[1].stamp];
                if self.without == Without::Repetition && !self.once.insert((host, to, stamps)) {
                    continue;
                }
                self.messages.push(Message { from: host, to, views: views.clone(), answer: false });
            }
        }
    }

    /// One of the messages, whichever; `fair`: none is lost or doubled.
    fn deliver(&mut self, fair: bool) {
        if self.messages.is_empty() {
            return;
        }
        let which = self.seed.below(self.messages.len());
        let fate = if fair { 9 } else { self.seed.below(10) };
        let message = if fate < 2 { self.messages[which].clone() } else { self.messages.swap_remove(which) };
        if (2..5).contains(&fate) {
            return;
        }
        // Who never had to do with the wire says so, and is asked again.
        if self.hosts[usize::from(message.to)].is_none() {
            return;
        }
        let machine = self.at(message.to);
        if message.answer {
            machine.answered(&message.from, &message.views);
        } else {
            machine.heard(&message.from, &message.views);
        }
        let views = machine.views().clone();
        self.keep(message.to);
        if !message.answer {
            self.messages.push(Message { from: message.to, to: message.from, views, answer: true });
        }
    }

    fn run(&mut self) -> Result<(), String> {
        for _ in 0..self.seed.below(120) {
            match self.seed.below(12) {
                0..2 => self.step(Side::A),
                2..4 => self.step(Side::B),
                4..6 => {
                    let host = self.seed.below(HOSTS) as Host;
                    self.crash(host);
                }
                6..8 => self.tell(),
                _ => self.deliver(false),
            }
            self.is_safe()?;
        }
        // The moves end; then the network is fair.
        for side in Side::BOTH {
            while self.truth[side.index()].mv != Move::None {
                self.step(side);
            }
        }
        for _ in 0..40 {
            self.tell();
            while !self.messages.is_empty() {
                self.deliver(true);
                self.is_safe()?;
            }
        }
        self.is_settled()
    }

    /// Each end is open where its owner is, and that host's view of it is the latest of all.
    fn is_safe(&self) -> Result<(), String> {
        for side in Side::BOTH {
            let truth = self.truth[side.index()];
            let owner = self.hosts[usize::from(truth.owner)].as_ref().ok_or("its owner knows the wire")?;
            if truth.mv == Move::None && owner.views()[side.index()].host != truth.owner {
                return Err(format!("{side:?}: its own host believes it elsewhere"));
            }
        }
        Ok(())
    }

    /// Frames of each end go where the other one is, and nowhere else; nobody has anything left to say.
    fn is_settled(&self) -> Result<(), String> {
        for (side, other) in [(Side::A, Side::B), (Side::B, Side::A)] {
            let (here, there) = (self.truth[side.index()].owner, self.truth[other.index()].owner);
            let machine = self.hosts[usize::from(here)].as_ref().ok_or("its owner knows the wire")?;
            let wanted: BTreeSet<Host> = [there].into_iter().filter(|host| *host != here).collect();
            if machine.remotes() != wanted {
                return Err(format!("{side:?} at {here}: frames go to {:?}, not {wanted:?}", machine.remotes()));
            }
            if !machine.due().is_empty() {
                return Err(format!("{side:?} at {here}: {:?} are told for ever", machine.due()));
            }
        }
        Ok(())
    }
}

const SEEDS: u64 = 3000;

#[test]
fn wherever_the_ends_move_and_whatever_is_lost_each_ends_frames_go_to_the_other_in_the_end() {
    for seed in 0..SEEDS {
        World::new(seed, Without::Nothing).run().unwrap_or_else(|why| panic!("seed {seed}: {why}"));
    }
}

#[test]
fn without_any_one_of_its_guards_a_seed_fails() {
    for without in [Without::LatestWins, Without::TellingWhereItWas, Without::Repetition, Without::KeptFirst] {
        let failed = (0..10 * SEEDS).find(|seed| World::new(*seed, without).run().is_err());
        assert!(failed.is_some(), "{without:?} does not matter");
    }
}

#[test]
fn both_ends_move_at_once_and_each_finds_the_other_by_the_hosts_that_they_left() {
    // A: 0 to 2, B: 1 to 3. Both places are made before either end has moved.
    let old = [view(1, 0), view(1, 1)];
    let mut hosts: Vec<_> = (0..4).map(|host| Rehoming::new(host, old.clone(), BTreeSet::new())).collect();
    hosts[2].open(Side::A, at(2)).unwrap();
    hosts[3].open(Side::B, at(2)).unwrap();
    let mut told = 0;
    while let Some((from, to)) =
        hosts.iter().find_map(|h| h.due().first().map(|to| (usize::from(h.me), usize::from(*to))))
    {
        told += 1;
        assert!(told < 20, "they tell each other for ever");
        let views = hosts[from].views().clone();
        hosts[to].heard(&(from as Host), &views);
        let answer = hosts[to].views().clone();
        hosts[from].answered(&(to as Host), &answer);
    }
    assert_eq!(hosts[2].remotes(), BTreeSet::from([3]));
    assert_eq!(hosts[3].remotes(), BTreeSet::from([2]));
}

#[test]
fn frames_go_to_both_hosts_while_an_end_is_on_its_way_and_to_one_when_it_stays() {
    let mut source = Rehoming::new(0, [view(1, 0), view(1, 1)], BTreeSet::new());
    let mut peer = Rehoming::new(1, [view(1, 0), view(1, 1)], BTreeSet::new());
    source.open(Side::A, at(1)).unwrap();
    peer.open(Side::B, at(1)).unwrap();
    source.leave(Side::A, 2);
    source.close(Side::A);
    assert!(peer.heard(&0, source.views()));
    assert_eq!(peer.remotes(), BTreeSet::from([0, 2]));
    let late = source.views().clone();
    source.open(Side::A, at(1)).unwrap();
    assert!(peer.heard(&0, source.views()));
    assert_eq!(peer.remotes(), BTreeSet::from([0]));
    assert!(!peer.heard(&0, &late), "a late message changes nothing");
    assert_eq!(source.open(Side::A, at(0)), Err(Outdated { given: at(0), last: at(1) }));
}

#[test]
fn an_end_that_comes_round_many_hosts_leaves_nothing_of_them_with_the_other() {
    let mut host = Rehoming::new(0, [view(1, 0), view(1, 1)], BTreeSet::new());
    host.open(Side::A, at(1)).unwrap();
    for n in 1..100 {
        host.answered(&n, &[view(1, 0), view(u64::from(n), n)]);
    }
    assert_eq!(host.places(), BTreeSet::from([0, 99]));
    assert_eq!(host.told.keys().copied().collect::<Vec<_>>(), [99]);
}

#[test]
fn a_wire_collapses_when_both_ends_are_open_here_and_leads_out_when_one_parts() {
    let mut host = Rehoming::new(1, [view(1, 0), view(1, 1)], BTreeSet::new());
    host.open(Side::B, at(1)).unwrap();
    assert_eq!(host.remotes(), BTreeSet::from([0]));
    host.open(Side::A, at(2)).unwrap();
    assert_eq!(host.remotes(), BTreeSet::new());
    host.leave(Side::B, 3);
    host.close(Side::B);
    assert_eq!(host.remotes(), BTreeSet::from([3]), "before anybody has heard from there");
    assert_eq!(host.due(), BTreeSet::from([0, 3]), "the host that the other end came from, and the next");
}

#[test]
fn a_host_that_gave_an_end_back_says_so_until_it_is_known_and_not_when_there_is_news() {
    // A went from 0 to 2, which has told 1, where B is, and gives A back.
    let mut host = Rehoming::new(2, [view(1, 0), view(1, 1)], BTreeSet::new());
    host.open(Side::A, at(2)).unwrap();
    for other in [0, 1] {
        host.answered(&other, &[view(2, 2), view(1, 1)]);
    }
    host.close(Side::A);
    assert_eq!(host.due(), BTreeSet::new());
    host.give_back(Side::A, 0);
    let known = [view(3, 0), view(1, 1)];
    assert_eq!((host.views(), host.due()), (&known, BTreeSet::from([0, 1])));
    assert!(!host.heard(&0, &known) && !host.answered(&1, &known));
    assert_eq!(host.due(), BTreeSet::new());
    // After a restart nobody knows whom it has told.
    let mut again = Rehoming::new(2, known.clone(), BTreeSet::new());
    assert_eq!(again.due(), BTreeSet::new());
    again.give_back(Side::A, 0);
    assert_eq!((again.views(), again.due()), (&known, BTreeSet::from([0, 1])));
    assert!(again.heard(&0, &[view(4, 3), view(1, 1)]));
    assert_eq!(again.due(), BTreeSet::new(), "its owners say where it has gone since");
}

#[test]
fn the_host_that_has_an_end_takes_nobody_elses_word_for_it_until_it_lets_go() {
    let mut host = Rehoming::new(0, [view(1, 0), view(1, 1)], BTreeSet::new());
    host.open(Side::A, at(1)).unwrap();
    // A destination that was ordered to take it, and did not get it.
    let claim = [view(2, 4), view(1, 1)];
    assert!(!host.heard(&4, &claim));
    assert_eq!(host.views()[0].host, 0);
    host.close(Side::A);
    assert!(host.heard(&4, &claim));
    assert_eq!(host.views()[0].host, 4);
}
