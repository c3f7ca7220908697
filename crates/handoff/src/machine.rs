//! Whichever of the two machines a node has for a VM at present.

use crate::destination::{Destination, DestinationState};
use crate::guards::Guards;
use crate::io::{Action, Event, Seen, Status, Verdict};
use crate::record::Record;
use crate::source::Source;

/// The hand-off's machine that a node has for the VM at present.
#[derive(Clone, Debug)]
pub enum Machine {
    /// It owns the VM, or owned it last.
    Source(Source),
    /// It receives the VM, or refused it last.
    Destination(Destination),
}

impl Machine {
    /// The machine for a record, whichever role it belongs to.
    #[must_use]
    pub fn recover(record: Record, seen: Seen) -> Self {
        Self::recover_guarded(record, seen, Guards::ALL)
    }

    #[cfg(feature = "sabotage")]
    #[doc(hidden)]
    #[must_use]
    pub fn recover_with(record: Record, seen: Seen, guards: Guards) -> Self {
        Self::recover_guarded(record, seen, guards)
    }

    fn recover_guarded(record: Record, seen: Seen, guards: Guards) -> Self {
        match Source::recover_guarded(record, seen, guards) {
            Ok(source) => Self::Source(source),
            Err(_) => Self::Destination(
                Destination::recover_guarded(record, seen, guards)
                    .expect("every record belongs to one of the two roles"),
            ),
        }
    }

    /// Whether the VM runs here, in words for an operator.
    #[must_use]
    pub const fn status(&self) -> Status {
        match self {
            Self::Source(source) => source.status(),
            Self::Destination(destination) => destination.status(),
        }
    }

    /// Passes an event on.
    pub fn handle(&mut self, event: Event) -> Verdict {
        match self {
            Self::Source(source) => source.handle(event),
            Self::Destination(destination) => destination.handle(event),
        }
    }

    /// The next action.
    pub fn poll_action(&mut self) -> Option<Action> {
        match self {
            Self::Source(source) => source.poll_action(),
            Self::Destination(destination) => destination.poll_action(),
        }
    }

    /// The state, for a trace.
    #[must_use]
    pub fn describe(&self) -> String {
        match self {
            Self::Source(source) => format!("{:?}", source.state()),
            Self::Destination(destination) => format!("{:?}", destination.state()),
        }
    }

    /// Whether a destination's part has ended in ownership, so that a source has to take over.
    #[must_use]
    pub fn settled(&self) -> Option<Record> {
        match self {
            Self::Destination(d) => match d.state() {
                DestinationState::Settled { owner } => Some(Record::Owned(*owner)),
                _ => None,
            },
            Self::Source(_) => None,
        }
    }
}
