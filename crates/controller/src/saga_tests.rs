//! The saga by seed: a controller that dies between any two of its steps, two nodes that hand a VM over, fail, restart, forget
//! and fall silent. Whatever happens, the move ends, it ends as the VM's owner says, and the controller's record agrees.

use super::*;
use crate::testing::{local_move, local_vm};

/// splitmix64: small, and the same everywhere.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % sides
    }

    fn once_in(&mut self, n: u64) -> bool {
        self.roll(n) == 0
    }
}

const BEFORE: (Lineage, Generation) = (Lineage(0), Generation(1));

/// Where the hand-off is, in truth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Truth {
    Idle,
    Copying,
    Sealed,
    Taken,
    Released,
    /// Back at the source: from before the seal, or from after it, two generations on.
    Undone {
        generation: u64,
    },
    Claimed {
        at_source: bool,
    },
}

impl Truth {
    const fn is_there(self) -> bool {
        matches!(self, Self::Taken | Self::Released | Self::Claimed { at_source: false })
    }

    const fn is_decided(self) -> bool {
        !matches!(self, Self::Copying | Self::Sealed)
    }
}

/// The two nodes.
struct Nodes {
    truth: Truth,
    /// What the source says of the move, if it remembers it.
    source_move: Option<Outcome>,
    destination_move: Option<Outcome>,
    orders: u32,
}

impl Nodes {
    fn order(&mut self) {
        if self.source_move.is_none() && self.truth == Truth::Idle {
            (self.truth, self.source_move) = (Truth::Copying, Some(Outcome::Running));
            self.orders += 1;
        }
    }

    /// Something that nodes do by themselves.
    fn live(&mut self, dice: &mut Dice, calm: bool) {
        match (self.truth, dice.roll(10)) {
            (Truth::Copying, 0..3) => {
                (self.truth, self.destination_move) = (Truth::Sealed, Some(Outcome::Running));
            }
            (Truth::Copying, 3) => {
                (self.truth, self.source_move) = (Truth::Undone { generation: 1 }, Some(Outcome::Failed));
            }
            // The source restarts before the seal: it has forgotten the move, and has its VM.
            (Truth::Copying, 4) if !calm => (self.truth, self.source_move) = (Truth::Undone { generation: 1 }, None),
            (Truth::Sealed, 0..4) => self.truth = Truth::Taken,
            (Truth::Sealed, 4) => {
                (self.truth, self.source_move) = (Truth::Undone { generation: 3 }, Some(Outcome::Failed));
                self.destination_move = Some(Outcome::Failed);
            }
            (Truth::Sealed, 5) => self.source_move = Some(Outcome::WaitsForPeer),
            (Truth::Sealed, 6) if dice.once_in(4) && !calm => {
                let at_source = dice.once_in(2);
                self.truth = Truth::Claimed { at_source };
                let outcome = if at_source { &mut self.source_move } else { &mut self.destination_move };
                *outcome = Some(if at_source { Outcome::Failed } else { Outcome::NetworkUnproved });
            }
            (Truth::Taken, 0..4) => (self.truth, self.source_move) = (Truth::Released, Some(Outcome::Completed)),
            (Truth::Taken | Truth::Released, 4..7) => self.destination_move = Some(Outcome::Completed),
            // Either restarts, and may not remember what is over for it.
            (Truth::Released, 7) if !calm => self.source_move = None,
            _ => {}
        }
    }

    fn source_vm(&self) -> LocalVm {
        match self.truth {
            Truth::Idle => local_vm(Ownership::Here, 1),
            Truth::Copying => LocalVm { mv: Some(godwit_units::MoveId(1)), ..local_vm(Ownership::Here, 1) },
            Truth::Sealed | Truth::Taken => local_vm(Ownership::WaitsForPeer, 2),
            Truth::Released => local_vm(Ownership::Elsewhere, 2),
            Truth::Undone { generation } => local_vm(Ownership::Here, generation),
            Truth::Claimed { at_source: true } => LocalVm { lineage: Lineage(1), ..local_vm(Ownership::Here, 1) },
            Truth::Claimed { at_source: false } => local_vm(Ownership::WaitsForPeer, 2),
        }
    }

    fn destination_vm(&self) -> Said<LocalVm> {
        match self.truth {
            Truth::Idle | Truth::Copying => Said::Unknown,
            Truth::Sealed => Said::This(local_vm(Ownership::WaitsForPeer, 2)),
            Truth::Taken | Truth::Released => Said::This(local_vm(Ownership::Here, 2)),
            Truth::Undone { .. } | Truth::Claimed { at_source: true } => Said::This(local_vm(Ownership::Elsewhere, 2)),
            Truth::Claimed { at_source: false } => {
                Said::This(LocalVm { lineage: Lineage(1), ..local_vm(Ownership::Here, 1) })
            }
        }
    }

    fn seen(&self, dice: &mut Dice, calm: bool) -> Seen {
        let silent = |dice: &mut Dice| !calm && dice.once_in(3);
        let said = |outcome: Option<Outcome>| outcome.map_or(Said::Unknown, |o| Said::This(local_move(o)));
        let lost = matches!(self.truth, Truth::Claimed { .. });
        // Of a claim, the loser never answers again.
        let source = !(silent(dice) || lost && self.truth.is_there());
        let destination = !(silent(dice) || lost && !self.truth.is_there());
        let no = || Said::Silent("cut".into());
        Seen {
            source_move: if source { said(self.source_move) } else { no() },
            source_vm: if source { Said::This(self.source_vm()) } else { Said::Silent("cut".into()) },
            destination_move: if destination { said(self.destination_move) } else { no() },
            destination_vm: if destination { self.destination_vm() } else { Said::Silent("cut".into()) },
        }
    }
}

/// What the store holds.
#[derive(Clone, Debug)]
struct Stored {
    step: Step,
    at_destination: bool,
    outcome: Option<Outcome>,
}

/// One life of the controller: some steps, each of which it may not survive. True: the move has ended.
fn drive(stored: &mut Stored, nodes: &mut Nodes, dice: &mut Dice, calm: bool) -> bool {
    let dies = |dice: &mut Dice| !calm && dice.once_in(6);
    for _ in 0..200 {
        nodes.live(dice, calm);
        if stored.step == Step::Begin {
            if dies(dice) {
                return false;
            }
            nodes.order();
            // Its answer is lost, or the controller: the order is sent again.
            if dies(dice) {
                return false;
            }
            stored.step = Step::Observe;
            continue;
        }
        let seen = nodes.seen(dice, calm);
        if dies(dice) {
            return false;
        }
        match next(stored.step, BEFORE, false, &seen) {
            Next::Watch => {}
            Next::Settle(..) => {
                stored.at_destination = true;
                if dies(dice) {
                    return false;
                }
                stored.step = Step::Finish;
            }
            Next::End(outcome, _) => {
                assert!(nodes.truth.is_decided(), "ended as {outcome:?} while {:?}", nodes.truth);
                assert_eq!(outcome.has_arrived(), nodes.truth.is_there(), "ended as {outcome:?} in {:?}", nodes.truth);
                if dies(dice) {
                    return false;
                }
                (stored.step, stored.outcome) = (Step::Ended, Some(outcome));
                return true;
            }
        }
    }
    false
}

#[test]
fn a_move_ends_as_its_owner_says_whenever_the_controller_dies_and_whoever_is_silent() {
    let (mut arrived, mut undone, mut claimed, mut lives_of_all) = (0, 0, 0, 0);
    for seed in 0..20_000 {
        let mut dice = Dice(seed);
        let mut stored = Stored { step: Step::Begin, at_destination: false, outcome: None };
        let mut nodes = Nodes { truth: Truth::Idle, source_move: None, destination_move: None, orders: 0 };
        let mut lives = 0;
        while stored.step != Step::Ended {
            assert!(lives < 100, "seed {seed}: never ends: {stored:?}, {:?}", nodes.truth);
            let calm = lives >= 8;
            drive(&mut stored, &mut nodes, &mut dice, calm);
            lives += 1;
        }
        assert_eq!(stored.at_destination, nodes.truth.is_there(), "seed {seed}: {stored:?}, {:?}", nodes.truth);
        assert!(nodes.orders <= 1, "seed {seed}: ordered twice");
        lives_of_all += lives;
        match nodes.truth {
            Truth::Claimed { .. } => claimed += 1,
            truth if truth.is_there() => arrived += 1,
            _ => undone += 1,
        }
    }
    // Else nothing much was tried.
    assert!(arrived > 2000 && undone > 1000 && claimed > 100, "{arrived} arrived, {undone} undone, {claimed} claimed");
    assert!(lives_of_all > 40_000, "{lives_of_all} lives");
}
