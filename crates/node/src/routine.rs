//! Guests that are watched as a matter of course, so that a move can be foretold before anybody thought of one, and so that there is
//! something to tell a quiet time of day by.
//!
//! Every so often each guest that runs here is profiled for some seconds ([`crate::profile`]), one after another. A profile that somebody
//! asked for counts. On a host with more guests than fit into the time, each is watched less often: always the one whose last profile
//! is the oldest.
//!
//! # What can go wrong
//!
//! *A guest cannot be watched* (it has just left, it is profiled by somebody, its RAM cannot be seen): it is tried again when the others have
//! had their turn. *The node ends*: as for every profile.

use crate::node::Node;
use crate::parts::{Parts, lock};
use crate::profile;
use crate::tracker::unix_ms;
use godwit_api::host::RunState;
use godwit_api::profile::StartProfile;
use godwit_units::VmId;
use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// How long a guest is watched, and how often it is looked at meanwhile. A look that takes long is made less often.
const WATCHED: StartProfile = StartProfile { for_s: 10, interval_ms: 250 };
/// What a guest is left alone for at first: what it does while it boots it does not do again.
const SETTLES: Duration = Duration::from_secs(120);
/// Between two looks for a guest whose turn has come.
const LOOK: Duration = Duration::from_secs(15);

/// A guest that runs here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Guest {
    vm: VmId,
    /// When the newest profile of it began, milliseconds since 1970.
    profiled: Option<u64>,
    /// When it was first seen to run here.
    seen: u64,
    /// When it was last tried to watch it.
    tried: Option<u64>,
}

impl Guest {
    /// When it had its last turn, whatever came of it.
    fn last(&self) -> Option<u64> {
        self.profiled.max(self.tried)
    }
}

/// The one whose turn it is.
fn next(guests: impl IntoIterator<Item = Guest>, now: u64, every: Duration) -> Option<VmId> {
    let ms = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    let has_settled = |guest: &Guest| now.saturating_sub(guest.seen) >= ms(SETTLES.min(every));
    let is_due = |guest: &Guest| guest.last().is_none_or(|at| now.saturating_sub(at) >= ms(every));
    let due = guests.into_iter().filter(|guest| has_settled(guest) && is_due(guest));
    due.min_by_key(|guest| (guest.last(), guest.vm)).map(|guest| guest.vm)
}

/// Watches until the node is gone.
pub async fn watch(node: Weak<Node>, every: Duration) {
    // By VM: when it was first seen to run, and when it was last tried.
    let mut known: HashMap<VmId, (u64, Option<u64>)> = HashMap::new();
    loop {
        tokio::time::sleep(LOOK.min(every)).await;
        let Some(node) = node.upgrade() else { return };
        let mut running = vec![];
        for parts in node.vms() {
            if node.local(&parts).await.run == RunState::Running {
                running.push(parts);
            }
        }
        let now = unix_ms();
        known.retain(|vm, _| running.iter().any(|parts| parts.id == *vm));
        let guests = running.iter().map(|parts| {
            let (seen, tried) = *known.entry(parts.id).or_insert((now, None));
            Guest { vm: parts.id, profiled: profile::newest(parts), seen, tried }
        });
        let Some(vm) = next(guests.collect::<Vec<_>>(), now, every) else { continue };
        if let Some((_, tried)) = known.get_mut(&vm) {
            *tried = Some(now);
        }
        if let Some(parts) = running.iter().find(|parts| parts.id == vm) {
            one(&node, parts).await;
        }
    }
}

async fn one(node: &Arc<Node>, parts: &Arc<Parts>) {
    if let Err(error) = profile::start(node, parts, WATCHED).await {
        tracing::debug!(vm = parts.name, %error, "not watched this time");
        return;
    }
    while lock(&parts.watched).is_some() {
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);
    const MS: u64 = 3_600_000;

    const fn guest(vm: u64, profiled: Option<u64>) -> Guest {
        Guest { vm: VmId(vm), profiled, seen: 0, tried: None }
    }

    #[test]
    fn the_guest_that_was_watched_the_longest_ago_is_next_and_none_before_its_time() {
        let now = 10 * MS;
        let just = now - MS + 1;
        assert_eq!(next([guest(1, Some(just))], now, HOUR), None);
        assert_eq!(next([guest(1, Some(just - 1))], now, HOUR), Some(VmId(1)));
        let many = [guest(1, Some(3 * MS)), guest(2, Some(2 * MS)), guest(3, Some(just))];
        assert_eq!(next(many, now, HOUR), Some(VmId(2)));
        // Never watched comes before long ago.
        assert_eq!(next(many.into_iter().chain([guest(4, None)]), now, HOUR), Some(VmId(4)));
    }

    #[test]
    fn one_that_has_just_booted_is_left_alone_and_one_that_cannot_be_watched_holds_up_nobody() {
        let now = 10 * MS;
        let young = Guest { seen: now - 119_000, ..guest(1, None) };
        assert_eq!(next([young], now, HOUR), None);
        assert_eq!(next([Guest { seen: now - 120_000, ..young }], now, HOUR), Some(VmId(1)));
        let failed = Guest { tried: Some(now - 15_000), ..guest(1, None) };
        assert_eq!(next([failed, guest(2, Some(MS))], now, HOUR), Some(VmId(2)));
        assert_eq!(next([Guest { tried: Some(now - MS), ..failed }], now, HOUR), Some(VmId(1)));
    }
}
