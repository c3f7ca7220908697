//! What both machines share: the queue of actions, and the comparison of tickets.

use crate::guards::{Guard, Guards};
use crate::ids::Ticket;
use crate::io::Action;
use std::collections::VecDeque;

/// More actions than one event can cause. The caller polls after every event, so the queue never holds more.
const ACTIONS_PER_EVENT: usize = 8;

/// Actions in the order in which they are to be done.
#[derive(Clone, Debug, Default)]
pub(crate) struct Outbox(VecDeque<Action>);

impl Outbox {
    pub(crate) fn push(&mut self, action: Action) {
        debug_assert!(self.0.len() < ACTIONS_PER_EVENT, "actions were not polled after an event: {:?}", self.0);
        self.0.push_back(action);
    }

    pub(crate) fn pop(&mut self) -> Option<Action> {
        self.0.pop_front()
    }
}

/// Whether two tickets are the same attempt.
pub(crate) fn same(guards: Guards, a: Ticket, b: Ticket) -> bool {
    a.vm == b.vm
        && (a.lineage == b.lineage || !guards.hold(Guard::CheckLineage))
        && (a.generation == b.generation || !guards.hold(Guard::CheckGeneration))
        && (a.mv == b.mv || !guards.hold(Guard::CheckMove))
}
