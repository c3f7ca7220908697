//! What a move's trace and its log lines say: the states of the hand-off in words, and the span of a VM.
//!
//! Each line that the node logs about a move carries `move=` and `vm=`: whatever works on one does so inside [`span`].

use crate::parts::Parts;
use tracing::Span;

/// The span of a VM: with the number of the move that it takes part in, if it does.
#[must_use]
pub fn span(parts: &Parts) -> Span {
    let open = parts.moving().filter(|moving| !moving.tracker.ended());
    match open {
        Some(moving) => tracing::info_span!("vm", "move" = moving.ticket.mv.0, vm = %parts.name),
        None => tracing::info_span!("vm", vm = %parts.name),
    }
}

/// A state without its members: `Copying { ticket: .. }` is `copying`.
fn word(state: &str) -> String {
    state.split(|c: char| !c.is_alphanumeric()).next().unwrap_or_default().to_lowercase()
}

/// What to note where the machine went from one state to another; nothing while it stays in one.
#[must_use]
pub fn transition(before: &str, after: &str) -> Option<String> {
    let (before, after) = (word(before), word(after));
    (before != after).then(|| format!("{before} -> {after}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_transition_is_noted_in_words_and_a_change_within_a_state_is_not() {
        assert_eq!(transition("Copying { ticket: 1 }", "Stopped { a: 2 }").as_deref(), Some("copying -> stopped"));
        assert_eq!(transition("Stopped { a: 1 }", "Stopped { a: 2 }"), None);
    }
}
