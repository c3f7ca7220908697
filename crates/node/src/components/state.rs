//! A component's state on its way: cut into parts at the source, put in part by part at the destination.
//!
//! A round trip for each part would make a pause of minutes of a busy firewall, so several are on their way at once. They may come in any
//! order: what was learnt and let through is a set. The place that they are put into is isolated, and goes with all that is in it when the
//! attempt comes to nothing, so nothing has to be kept until all is there. Each part that is put in shows the source that the destination is
//! heard, which it waits for ([`Event::Flowing`]).
//!
//! # What can go wrong
//!
//! *More than a request takes*: a part is bounded in bytes, whatever it is of. *A source that sends without end*: what waits to be put in, what is put
//! in altogether, and each tracked connection have a bound. *A part that is refused, or cannot be put in*: the attempt ends on both hosts, and
//! the source opens its ports again.

use super::{ComponentAsk, Done, Input, Keeper, Reply, ask_peer, failed, lock, refused, spec};
use crate::node::Node;
use futures_util::StreamExt;
use futures_util::stream;
use godwit_api::{ApiError, Problem};
use godwit_component::State;
use godwit_handoff::{Event, Ticket};
use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;

/// Bytes of JSON in a part: an eighth of what the link takes in one request.
const PART: usize = 128 << 10;
/// Parts that are on their way at once: 2 MiB, 160 Mbit/s over 100 ms; and over 2 Mbit/s they get there before the source gives up.
const AT_ONCE: usize = 16;
/// Parts that wait to be put in.
const WAITING: usize = 2 * AT_ONCE;
/// Parts of one component: some more than the largest needs.
const MOST_PARTS: u32 = 1 << 14;
/// Addresses of one component, and tracked connections: of these the kernel's own bound, unless somebody raises it.
const MOST: usize = 262_144;
/// Of an address in a part, bytes at most: `{"port":255,"mac":"02:00:00:00:00:aa","vlan":4094},`.
const STATION: usize = 64;

/// In parts of a bounded size; one at least.
fn cut(state: State) -> Vec<State> {
    let (mut parts, mut filled) = (vec![State::default()], 0);
    for station in state.stations {
        with_room(&mut parts, &mut filled, STATION).stations.push(station);
    }
    for flow in state.flows {
        // Its names and its family; and `255,` for a byte.
        with_room(&mut parts, &mut filled, 32 + 4 * flow.size()).flows.push(flow);
    }
    parts
}

/// The part that has room for so many bytes: the last one, or a new one.
fn with_room<'a>(parts: &'a mut Vec<State>, filled: &mut usize, bytes: usize) -> &'a mut State {
    if *filled + bytes > PART {
        parts.push(State::default());
        *filled = 0;
    }
    *filled += bytes;
    parts.last_mut().expect("there is one from the beginning")
}

/// Sends what the component has learnt and let through; it is isolated.
pub(super) async fn send(node: &Arc<Node>, me: &Keeper, ticket: Ticket) -> Result<(), ApiError> {
    match send_parts(node, me, ticket, AT_ONCE).await {
        // An earlier version takes one after the other, and begins anew with the first.
        Err(error) if error.problem == Problem::Conflict => send_parts(node, me, ticket, 1).await,
        sent => sent,
    }
}

async fn send_parts(node: &Arc<Node>, me: &Keeper, ticket: Ticket, at_once: usize) -> Result<(), ApiError> {
    let (definition, peer) = {
        let kept = lock(&me.kept);
        (kept.definition.clone(), kept.peer.clone())
    };
    let peer = peer.ok_or_else(|| failed("nobody knows where it goes"))?;
    let state = node.components().place.state(&spec(&definition)?).await.map_err(refused)?;
    if let Some(mv) = &mut lock(&me.view).leaving {
        (mv.stations, mv.flows) = (state.stations.len(), state.flows.len());
    }
    let parts = cut(state);
    let count = parts.len();
    let asked = parts.into_iter().zip(0_u32..).map(|(state, part)| {
        let last = part as usize + 1 == count;
        ask_peer(node, &peer, ComponentAsk::State { ticket, part, last, state })
    });
    let mut answers = stream::iter(asked).buffer_unordered(at_once);
    while let Some(answer) = answers.next().await {
        answer?;
        me.tell(Input::Event(Event::Flowing)).await;
    }
    Ok(())
}

/// What comes of a component's state, for the attempt that there is a place for.
#[derive(Debug, Default)]
pub(super) struct Coming {
    /// The parts that have come.
    seen: BTreeSet<u32>,
    /// How many there are, once the last one has come.
    count: Option<u32>,
    stations: usize,
    flows: usize,
    /// Those that are to be put in, and who waits for that.
    parts: VecDeque<(State, Reply<()>)>,
}

/// A part to be put in, who waits for that, and whether it is all then.
pub(super) type Part = (State, Reply<()>, bool);

impl Coming {
    /// A part has come.
    pub(super) fn take(&mut self, part: u32, last: bool, state: State, reply: Reply<()>) {
        match self.admit(part, last, &state) {
            Ok(()) => self.parts.push_back((state, reply)),
            Err(error) => drop(reply.send(Err(error))),
        }
    }

    fn admit(&mut self, part: u32, last: bool, state: &State) -> Result<(), ApiError> {
        let (stations, flows) = (self.stations + state.stations.len(), self.flows + state.flows.len());
        if stations > MOST || flows > MOST {
            let message = format!("more than {MOST} addresses or {MOST} tracked connections of one component");
            return Err(ApiError::new(Problem::Invalid, message));
        }
        let beyond = part >= MOST_PARTS || self.count.is_some_and(|count| last || part >= count);
        let not_last = last && self.seen.last().is_some_and(|other| *other > part);
        if beyond || not_last || self.seen.contains(&part) || self.parts.len() >= WAITING {
            let message = format!("part {part} of the state does not fit to the others");
            return Err(ApiError::new(Problem::Invalid, message));
        }
        self.seen.insert(part);
        self.count = self.count.or(last.then_some(part + 1));
        (self.stations, self.flows) = (stations, flows);
        Ok(())
    }

    /// The next one to be put in.
    pub(super) fn pop(&mut self) -> Option<Part> {
        let (state, reply) = self.parts.pop_front()?;
        let all = self.parts.is_empty() && self.count.is_some_and(|count| self.seen.len() == count as usize);
        Some((state, reply, all))
    }

    /// The attempt is over, or all of it is here.
    pub(super) fn end(&mut self) {
        for (_, reply) in std::mem::take(self).parts {
            let _ = reply.send(Err(ApiError::new(Problem::Conflict, "the attempt is over")));
        }
    }
}

/// Puts a part in; what is to be told the machine of it.
pub(super) async fn put_in(node: &Arc<Node>, me: &Keeper, (state, reply, all): Part) -> Done {
    let definition = lock(&me.kept).definition.clone();
    let put_in = async {
        let wanted = spec(&definition)?;
        node.components().place.load(&wanted, state).await.map_err(refused)
    };
    let (answer, event) = match put_in.await {
        Ok(loaded) => {
            tracing::debug!(component = me.id.0, ?loaded, all, "a part of its state has come");
            (Ok(()), all.then_some(Event::Loaded))
        }
        Err(error) => (Err(error), Some(Event::QemuDied)),
    };
    let _ = reply.send(answer);
    Ok(event)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use tokio::sync::oneshot;

    /// So many of each, as long as they may be.
    fn state(stations: usize, flows: usize) -> State {
        let station = json!({"port": 255, "mac": "02:00:00:00:00:aa", "vlan": 4094});
        let flow = json!({"family": 255, "attributes": vec![255; 1024]});
        serde_json::from_value(json!({"stations": vec![station; stations], "flows": vec![flow; flows]})).unwrap()
    }

    #[test]
    fn whatever_a_component_knows_goes_in_parts_that_the_link_takes() {
        for (stations, flows) in [(0, 0), (1, 0), (0, 1), (30_000, 0), (0, 400), (3000, 100)] {
            let parts = cut(state(stations, flows));
            let sum = |of: fn(&State) -> usize| parts.iter().map(of).sum::<usize>();
            assert_eq!((sum(|part| part.stations.len()), sum(|part| part.flows.len())), (stations, flows));
            for part in &parts {
                let bytes = serde_json::to_vec(part).unwrap().len();
                // What is around it in a request is some hundred bytes.
                assert!(bytes < PART + 64 && PART < godwit_link::MAX_REQUEST / 2, "{bytes}");
                assert!(parts.len() == 1 || !(part.stations.is_empty() && part.flows.is_empty()));
            }
        }
        assert!(cut(state(30_000, 0)).len() > 8);
    }

    /// Takes a part; why it is refused, if it is.
    fn take(coming: &mut Coming, part: u32, last: bool, state: State) -> Option<ApiError> {
        let (reply, mut answer) = oneshot::channel();
        coming.take(part, last, state, reply);
        answer.try_recv().ok()?.err()
    }

    #[test]
    fn parts_are_all_there_when_the_last_of_them_is_put_in_in_whichever_order_they_come() {
        for order in [[0, 1, 2], [2, 1, 0], [1, 2, 0], [2, 0, 1]] {
            let mut coming = Coming::default();
            let mut all = vec![];
            for part in order {
                assert_eq!(take(&mut coming, part, part == 2, state(1, 1)), None, "{order:?}");
                all.push(coming.pop().unwrap().2);
            }
            assert_eq!(all, [false, false, true], "{order:?}");
            // All have come before the first is put in.
            let mut coming = Coming::default();
            for part in order {
                assert_eq!(take(&mut coming, part, part == 2, state(1, 1)), None, "{order:?}");
            }
            let all: Vec<bool> = std::iter::from_fn(|| coming.pop()).map(|part| part.2).collect();
            assert_eq!(all, [false, false, true], "{order:?}");
        }
    }

    #[test]
    fn a_source_that_sends_what_does_not_fit_or_too_much_is_refused() {
        let refused = |parts: &[(u32, bool)]| {
            let mut coming = Coming::default();
            parts.iter().filter_map(|(part, last)| take(&mut coming, *part, *last, State::default())).count()
        };
        assert_eq!(refused(&[(0, false), (2, true), (1, false)]), 0);
        for parts in [
            &[(0, false), (0, false)][..],
            &[(2, true), (3, false)],
            &[(2, true), (1, true)],
            &[(3, false), (2, true)],
            &[(MOST_PARTS, false)],
            &[(u32::MAX, true)],
        ] {
            assert_eq!(refused(parts), 1, "{parts:?}");
        }
        // What waits is bounded, and goes on when it has been put in.
        let mut coming = Coming::default();
        let mut part = 0..;
        let mut next = |coming: &mut Coming| take(coming, part.next().unwrap(), false, State::default());
        assert_eq!((0..WAITING).filter_map(|_| next(&mut coming)).count(), 0);
        assert!(next(&mut coming).is_some());
        coming.pop().unwrap();
        assert!(next(&mut coming).is_none());
        // So is what there is altogether.
        for (stations, flows) in [(MOST, 0), (0, MOST)] {
            let mut coming = Coming { stations, flows, ..Coming::default() };
            assert!(take(&mut coming, 0, false, state(stations / MOST, flows / MOST)).is_some());
            assert_eq!(take(&mut coming, 0, false, state(flows / MOST, stations / MOST)), None);
        }
    }

    #[test]
    fn whoever_waits_for_a_part_hears_that_the_attempt_is_over() {
        let mut coming = Coming::default();
        let (reply, mut answer) = oneshot::channel();
        coming.take(0, false, State::default(), reply);
        coming.end();
        assert_eq!(answer.try_recv().unwrap().unwrap_err().problem, Problem::Conflict);
        assert_eq!(take(&mut coming, 0, true, State::default()), None, "it is the same for the next attempt");
    }
}
