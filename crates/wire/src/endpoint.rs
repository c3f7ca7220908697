//! An endpoint's machine: orders in, actions out.

use crate::Sequence;

/// Where an endpoint stands on this host.
///
/// ```text
///         Stage            Activate(s)            Isolate
/// Absent -------> Staged -------------> Active(s) -------> Isolated(s)
///                                          ^                   |
///                                          +-- Activate(>= s) -+       Remove leads back to Absent from everywhere.
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// No tap.
    Absent,
    /// Wired, in the pen, never active.
    Staged,
    /// Frames pass.
    Active(Sequence),
    /// In the pen, after having been active.
    Isolated(Sequence),
}

/// What the node wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Tap and wiring exist. Never changes whether frames pass.
    Stage,
    /// Frames pass, and the network hears of it.
    Activate(Sequence),
    /// No frame passes.
    Isolate,
    /// Nothing is left.
    Remove,
}

/// What is to be done, in this order; each step may be repeated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// The tap exists and is in the pen.
    MakeTap,
    /// The tunnel and its bridge exist, if the component needs them.
    MakeTunnel,
    /// The state's sequence is written on the tap: before the effect, so that no crash leaves an effect without its record.
    Record,
    /// The tap joins its component's bridge.
    Join,
    /// Announcements begin.
    Announce,
    /// Announcements have ended for good.
    Hush,
    /// The tap goes to the pen.
    Pen,
    /// The tap goes.
    RemoveTap,
    /// The tunnel goes.
    RemoveTunnel,
}

/// Why an order was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Stale {
    /// It was activated by a later owner.
    #[error("{given:?} is older than {last:?}, by which it was last activated")]
    Older {
        /// The order's.
        given: Sequence,
        /// The endpoint's.
        last: Sequence,
    },
    /// There is no tap to activate.
    #[error("it was not staged")]
    NotStaged,
}

/// The machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Endpoint {
    state: State,
}

impl Endpoint {
    /// From what the kernel shows.
    #[must_use]
    pub const fn recover(state: State) -> Self {
        Self { state }
    }

    /// Where it stands once all actions are done.
    #[must_use]
    pub const fn state(&self) -> State {
        self.state
    }

    /// Takes an order and says what to do.
    ///
    /// # Errors
    /// [`Stale`]; nothing is to be done then.
    pub fn handle(&mut self, order: Order) -> Result<&'static [Action], Stale> {
        use Action::{Announce, Hush, Join, MakeTap, MakeTunnel, Pen, Record, RemoveTap, RemoveTunnel};
        let (next, actions): (State, &'static [Action]) = match (order, self.state) {
            (Order::Stage, State::Absent) => (State::Staged, &[MakeTap, MakeTunnel]),
            (Order::Stage, State::Active(_)) => (self.state, &[MakeTunnel]),
            (Order::Stage, State::Staged | State::Isolated(_)) => (self.state, &[MakeTap, MakeTunnel]),
            (Order::Activate(_), State::Absent) => return Err(Stale::NotStaged),
            (Order::Activate(given), State::Active(last) | State::Isolated(last)) if given < last => {
                return Err(Stale::Older { given, last });
            }
            (Order::Activate(given), _) => (State::Active(given), &[Record, Join, Announce]),
            (Order::Isolate, State::Absent) => (State::Absent, &[Hush]),
            (Order::Isolate, State::Staged) => (State::Staged, &[Hush, Pen]),
            (Order::Isolate, State::Active(last) | State::Isolated(last)) => (State::Isolated(last), &[Hush, Pen]),
            (Order::Remove, _) => (State::Absent, &[Hush, RemoveTap, RemoveTunnel]),
        };
        self.state = next;
        Ok(actions)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn order() -> impl Strategy<Value = Order> {
        prop_oneof![
            Just(Order::Stage),
            (0..2u64, 0..3u64).prop_map(|(lineage, generation)| Order::Activate(Sequence { lineage, generation })),
            Just(Order::Isolate),
            Just(Order::Remove),
        ]
    }

    proptest! {
        #[test]
        fn only_activation_joins_and_never_with_an_older_sequence(orders in prop::collection::vec(order(), 0..40)) {
            let mut it = Endpoint::recover(State::Absent);
            let mut last: Option<Sequence> = None;
            for order in orders {
                let before = it.state();
                match (order, it.handle(order)) {
                    (Order::Activate(given), Ok(actions)) => {
                        prop_assert!(before != State::Absent && last.is_none_or(|last| given >= last));
                        prop_assert_eq!(actions, &[Action::Record, Action::Join, Action::Announce]);
                        last = Some(given);
                    }
                    (Order::Activate(given), Err(_)) => {
                        prop_assert!(before == State::Absent || last.is_some_and(|last| given < last));
                        prop_assert_eq!(it.state(), before);
                    }
                    (_, result) => {
                        let actions = result.unwrap();
                        prop_assert!(!actions.contains(&Action::Join) && !actions.contains(&Action::Announce));
                        if order == Order::Remove { last = None; }
                    }
                }
                let settled = it.state();
                let _ = it.handle(order);
                prop_assert_eq!(it.state(), settled, "repeating {:?} changes nothing", order);
            }
        }
    }
}
