//! `godwit events`: follows what happens, over breaks of the connection and restarts of the controller.

use crate::args::EventsArgs;
use crate::failure::Failure;
use crate::follow::{print_text, write_json};
use crate::table::printable;
use crate::timeline::clock;
use godwit_api::events::{Event, Happening};
use godwit_api::{Problem, PublicClient};
use std::time::{Duration, Instant};

/// Between two tries to reach a controller that is away.
const AGAIN: Duration = Duration::from_millis(500);

/// How long the controller may be away before following ends.
const PATIENCE: Duration = Duration::from_secs(60);

/// The longest kind's length.
const KIND: usize = "extender-disconnected".len();

/// Prints events until the end of the world, or with `--no-follow` of what is there.
///
/// # Errors
/// The controller's; unreachable when it is away for long.
pub async fn follow(api: &PublicClient, args: &EventsArgs, json: bool) -> Result<(), Failure> {
    let mut after = args.after;
    let mut heard = Instant::now();
    loop {
        let went_on = match api.events(after, !args.no_follow).await {
            Err(error) => Err(error),
            Ok(mut stream) => loop {
                match stream.next().await {
                    Ok(Some(event)) => {
                        heard = Instant::now();
                        after = Some(event.id);
                        if json { write_json(&event)? } else { print_text(&(line(&event) + "\n"))? }
                    }
                    Ok(None) => break Ok(()),
                    Err(error) => break Err(error),
                }
            },
        };
        match went_on {
            Ok(()) if args.no_follow => return Ok(()),
            Err(error) if error.problem != Problem::Unreachable || heard.elapsed() > PATIENCE => {
                return Err(error.into());
            }
            Err(error) if args.no_follow => return Err(error.into()),
            // It was restarted, or the connection broke; what was missed comes, or is said to be lost.
            _ => tokio::time::sleep(AGAIN).await,
        }
    }
}

/// An event in a line.
fn line(event: &Event) -> String {
    use Happening as H;
    let text = match &event.what {
        H::SiteAdded { site } => format!("site {site}"),
        H::SiteRemoved { site } => format!("site {site}"),
        H::HostAdded { host, site } => format!("host {host} in {site}"),
        H::HostRemoved { host } | H::HostReachable { host } => format!("host {host}"),
        H::HostUnreachable { host, error } => format!("host {host}: {error}"),
        H::ComponentAdded { component } | H::ComponentRemoved { component } => format!("component {component}"),
        H::VmCreated { vm, host } => format!("VM {vm} on {host}"),
        H::VmMoved { vm, host, generation } => format!("VM {vm} is on {host} now, generation {}", generation.0),
        H::VmChanged { vm } | H::VmRemoved { vm } => format!("VM {vm}"),
        H::VolumeCreated { volume, vm, size } => format!("volume {volume} of {vm}, {size}"),
        H::VolumeChanged { volume, replicas } => {
            let names: Vec<String> = replicas.iter().map(ToString::to_string).collect();
            format!("volume {volume} is on {}", names.join(", "))
        }
        H::VolumeRemoved { volume } => format!("volume {volume}"),
        H::MoveOrdered { mv, vm, from, to } => format!("move {} of {vm} from {from} to {to}", mv.0),
        H::MovePhase { mv, vm, phase } => format!("move {} of {vm}: {}", mv.0, crate::show::phase(*phase)),
        H::MoveWaits { mv, vm } => {
            format!("move {} of {vm}: paused until its peer is heard, or one side is claimed", mv.0)
        }
        H::MoveCancelled { mv, vm } => format!("move {} of {vm}", mv.0),
        H::MoveEnded { mv, vm, outcome, downtime_ms, error } => {
            let pause = downtime_ms.map_or(String::new(), |ms| format!(", pause {ms:.0} ms"));
            let why = error.as_ref().map_or(String::new(), |why| format!(": {why}"));
            format!("move {} of {vm}: {}{pause}{why}", mv.0, crate::show::word(outcome))
        }
        H::ExtenderConnected { sites: [a, b] }
        | H::ExtenderDisconnected { sites: [a, b] }
        | H::ExtenderUp { sites: [a, b] }
        | H::ExtenderDown { sites: [a, b] } => format!("extender {a} to {b}"),
        H::ExtenderWayChanged { sites: [a, b], host, way } => {
            format!("extender {a} to {b}: frames of {host} go {}", crate::extender::leads(way.as_ref()))
        }
        H::Lost { count: Some(count) } => format!("{count} events before this one are not kept any more"),
        H::Lost { count: None } => "the controller was restarted: what it told in between is not known".into(),
    };
    format!("{}  {:<KIND$} {}", clock(event.at_unix_us), event.what.kind(), printable(&text))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn an_event_is_a_line_with_its_time_its_kind_and_what_it_is_about() {
        let ended = json!({
            "id": 1, "at_unix_us": 3_723_004_000_u64, "kind": "move-ended", "move": 3, "vm": "web", "outcome": "failed",
            "downtime_ms": 12.4, "error": "no\nroom",
        });
        let event: Event = serde_json::from_value(ended).unwrap();
        assert_eq!(line(&event), "01:02:03.004  move-ended            move 3 of web: failed, pause 12 ms: no room");
    }

    #[test]
    fn the_longest_kind_fits_its_column() {
        let gone = json!({"id": 1, "at_unix_us": 0, "kind": "extender-disconnected", "sites": ["a", "b"]});
        let event: Event = serde_json::from_value(gone).unwrap();
        assert_eq!(event.what.kind().len(), KIND);
        assert_eq!(line(&event), "00:00:00.000  extender-disconnected extender a to b");
    }
}
