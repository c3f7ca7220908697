//! The machine of a wire's end at the gateway: which host it points to, by the latest sequence.

use crate::Sequence;
use std::net::IpAddr;

/// Where a port stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PortState {
    /// No port.
    Absent,
    /// Frames go to this host.
    Attached(Sequence, IpAddr),
}

/// What the node wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PortOrder {
    /// Make the port and point it; on one that exists, as `Repoint`.
    Attach(Sequence, IpAddr),
    /// Point an existing port elsewhere.
    Repoint(Sequence, IpAddr),
    /// Remove it.
    Detach,
}

/// What is to be done, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PortAction {
    /// The VXLAN device exists and is a port.
    Make,
    /// Sequence and host are written on it; before the effect.
    Record(Sequence, IpAddr),
    /// The default entry leads to this host and, after that, to no other.
    Point(IpAddr),
    /// The device goes.
    Remove,
}

/// Why an order was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// A later owner has the wire, or the same one at another host.
    #[error("{given:?} for {host} does not supersede {last:?} at {at}")]
    Superseded {
        /// The order's.
        given: Sequence,
        /// The order's.
        host: IpAddr,
        /// The port's.
        last: Sequence,
        /// The port's.
        at: IpAddr,
    },
    /// Nothing to point.
    #[error("the wire is not attached")]
    NotAttached,
}

/// The machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Port {
    state: PortState,
}

impl Port {
    /// From what the kernel shows.
    #[must_use]
    pub const fn recover(state: PortState) -> Self {
        Self { state }
    }

    /// Where it stands once all actions are done.
    #[must_use]
    pub const fn state(&self) -> PortState {
        self.state
    }

    /// Takes an order and says what to do.
    ///
    /// # Errors
    /// [`Refused`]; nothing is to be done then.
    pub fn handle(&mut self, order: PortOrder) -> Result<Vec<PortAction>, Refused> {
        let (given, host, make) = match (order, self.state) {
            (PortOrder::Detach, _) => {
                self.state = PortState::Absent;
                return Ok(vec![PortAction::Remove]);
            }
            (PortOrder::Repoint(..), PortState::Absent) => return Err(Refused::NotAttached),
            (PortOrder::Attach(given, host), _) => (given, host, true),
            (PortOrder::Repoint(given, host), _) => (given, host, false),
        };
        if let PortState::Attached(last, at) = self.state
            && (given < last || (given == last && host != at))
        {
            return Err(Refused::Superseded { given, host, last, at });
        }
        self.state = PortState::Attached(given, host);
        let point = [PortAction::Record(given, host), PortAction::Point(host)];
        Ok(make.then_some(PortAction::Make).into_iter().chain(point).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stale_sequence_does_not_steal_the_wire_and_a_repetition_does_the_same_again() {
        let (a, b): (IpAddr, IpAddr) = ([10, 0, 0, 1].into(), [10, 0, 0, 2].into());
        let at = |generation| Sequence { lineage: 1, generation };
        let mut port = Port::recover(PortState::Absent);
        assert_eq!(port.handle(PortOrder::Repoint(at(1), a)), Err(Refused::NotAttached));
        port.handle(PortOrder::Attach(at(1), a)).unwrap();
        let done = port.handle(PortOrder::Repoint(at(2), b)).unwrap();
        assert_eq!(done, [PortAction::Record(at(2), b), PortAction::Point(b)]);
        assert_eq!(port.handle(PortOrder::Repoint(at(2), b)).unwrap(), done);
        for stale in [PortOrder::Repoint(at(1), a), PortOrder::Attach(at(1), a), PortOrder::Repoint(at(2), a)] {
            assert!(matches!(port.handle(stale), Err(Refused::Superseded { .. })), "{stale:?}");
        }
        assert_eq!(port.state(), PortState::Attached(at(2), b));
        let claim = Sequence { lineage: 2, generation: 0 };
        assert!(port.handle(PortOrder::Repoint(claim, a)).is_ok(), "a later lineage outranks any generation");
    }
}
