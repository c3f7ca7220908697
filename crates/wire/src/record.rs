//! The sequence on an interface's alias: as durable as the interface, which is as long as it matters.

use crate::{Sequence, State};
use std::net::IpAddr;

pub(crate) fn write(sequence: Sequence, remote: Option<IpAddr>) -> String {
    let text = format!("godwit {} {}", sequence.lineage, sequence.generation);
    remote.map_or_else(|| text.clone(), |remote| format!("{text} {remote}"))
}

pub(crate) fn read(alias: Option<&str>) -> Option<(Sequence, Option<IpAddr>)> {
    let mut words = alias?.strip_prefix("godwit ")?.split(' ');
    let lineage = words.next()?.parse().ok()?;
    let generation = words.next()?.parse().ok()?;
    Some((Sequence { lineage, generation }, words.next().and_then(|w| w.parse().ok())))
}

/// What an endpoint is, from what the kernel shows of its tap: the sequence on its alias, and whether it has joined its bridge.
#[must_use]
pub const fn state(last: Option<Sequence>, joined: bool) -> State {
    match (last, joined) {
        (Some(sequence), true) => State::Active(sequence),
        (Some(sequence), false) => State::Isolated(sequence),
        // A tap that somebody else put on a bridge: penned by the next staging.
        (None, _) => State::Staged,
    }
}
