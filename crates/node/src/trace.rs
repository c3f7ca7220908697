//! What a move's trace and its log lines say: the states of the hand-off in words, and the span of a VM.
//!
//! Each line that the node logs about a move carries `move=` and `vm=`: whatever works on one does so inside [`span`].

use crate::parts::Parts;
use godwit_handoff::{Body, Event};
use std::future::Future;
use tokio::task::JoinHandle;
use tracing::{Instrument, Span};

/// The span of a VM: with the number of the move that it takes part in, if it does.
#[must_use]
pub fn span(parts: &Parts) -> Span {
    let open = parts.moving().filter(|moving| !moving.tracker.ended());
    match open {
        Some(moving) => tracing::info_span!("vm", "move" = moving.ticket.mv.0, vm = %parts.name),
        None => tracing::info_span!("vm", vm = %parts.name),
    }
}

/// Starts a task that logs as whoever starts it does.
pub fn spawn<T: Send + 'static>(task: impl Future<Output = T> + Send + 'static) -> JoinHandle<T> {
    tokio::spawn(task.in_current_span())
}

/// As [`spawn`], for work that blocks.
pub fn spawn_blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> JoinHandle<T> {
    let span = Span::current();
    tokio::task::spawn_blocking(move || span.in_scope(work))
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

/// What to note of an event that the seal of a stopped guest waits for; how it was closed is noted by what closes it.
#[must_use]
pub fn fact(before: &str, event: &Event) -> Option<&'static str> {
    match event {
        _ if word(before) != "stopped" => None,
        Event::Postmigrate => Some("QEMU cannot go on by itself any more"),
        Event::Message(message) if message.body == Body::Verified => Some("the destination has verified everything"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::VmFile;
    use godwit_api::host::MoveOrder;
    use serde_json::json;
    use std::io::Write;
    use std::sync::{Arc, Mutex};
    use tracing_subscriber::prelude::*;

    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);

    impl Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[tokio::test]
    async fn what_works_on_a_move_logs_its_number_and_its_vm_in_tasks_and_threads_too() {
        let lines = Lines::default();
        let to = lines.clone();
        let layer = tracing_subscriber::fmt::layer().json().with_writer(move || to.clone());
        // Of the whole process: what other tests log has no such span.
        tracing_subscriber::registry().with(layer).init();
        let folder = tempfile::tempdir().unwrap();
        let spec = json!({"memory": 4096});
        let definition = json!({"id": 7, "name": "web", "spec": spec, "volumes": [], "wires": []});
        let file: VmFile = serde_json::from_value(json!({"definition": definition})).unwrap();
        let parts = Parts::new(folder.path().into(), folder.path().into(), file);
        let link = json!({"control": "10.0.0.1:1", "disk": "10.0.0.1:2", "memory": "10.0.0.1:3"});
        let peer = json!({"name": "texas", "link": link, "underlay": "10.0.0.1"});
        let order = json!({"id": 3, "vm": 7, "to": peer, "disk": "mirror", "limit": null, "vcpus": null});
        let order: MoveOrder = serde_json::from_value(order).unwrap();
        let (lineage, generation) = (godwit_handoff::Lineage(0), godwit_handoff::Generation(2));
        let ticket = godwit_handoff::Ticket { vm: parts.id, lineage, generation, mv: order.id };
        span(&parts).in_scope(|| tracing::info!("before"));
        parts.begin_move(&order, ticket);
        let task = span(&parts).in_scope(|| {
            tracing::info!("here");
            spawn(async {
                tracing::info!("in a task");
                tokio::task::yield_now().await;
                spawn_blocking(Span::current).await.unwrap()
            })
        });
        let there = task.await.unwrap();
        assert!(!there.is_none(), "a thread has no span");
        there.in_scope(|| tracing::info!("in a thread"));
        let text = String::from_utf8(lines.0.lock().unwrap().clone()).unwrap();
        let said: Vec<serde_json::Value> = text.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
        let ours: Vec<_> = said.iter().filter(|l| l["span"]["vm"] == "web").collect();
        assert_eq!(ours.len(), 4, "{text}");
        assert!(ours[0]["span"].get("move").is_none(), "{text}");
        for line in &ours[1..] {
            assert_eq!((&line["span"]["move"], &line["span"]["vm"]), (&json!(3), &json!("web")), "{line}");
        }
    }

    #[test]
    fn what_the_seal_waits_for_is_noted_while_the_guest_stands() {
        let stopped = "Stopped { a: 1 }";
        assert!(fact(stopped, &Event::Postmigrate).is_some());
        assert_eq!(fact("Copying { a: 1 }", &Event::Postmigrate), None);
        assert_eq!(fact(stopped, &Event::Timer), None);
    }

    #[test]
    fn a_transition_is_noted_in_words_and_a_change_within_a_state_is_not() {
        assert_eq!(transition("Copying { ticket: 1 }", "Stopped { a: 2 }").as_deref(), Some("copying -> stopped"));
        assert_eq!(transition("Stopped { a: 1 }", "Stopped { a: 2 }"), None);
    }
}
