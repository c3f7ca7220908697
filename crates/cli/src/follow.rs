//! Follows a move to its end: one live line on a terminal, else a line of JSON a second.
//!
//! Following is only looking: ^C, a closed terminal or a controller that restarts change nothing about the move.

use crate::failure::{Code, Failure};
use crate::show;
use crate::table::printable;
use godwit_api::host::{Ownership, RunState};
use godwit_api::progress::{MoveProgress, Outcome, PhaseName};
use godwit_api::public::{Move, Vm};
use godwit_api::{Problem, PublicClient};
use godwit_units::Bytes;
use indicatif::{ProgressBar, ProgressStyle};
use std::io::{ErrorKind, IsTerminal, Write};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::signal::unix::{SignalKind, signal};

/// How often the controller is asked.
const POLL: Duration = Duration::from_millis(250);

/// How often a line of JSON is written when no phase changes.
const LINE: Duration = Duration::from_secs(1);

/// How long the controller may be away before following it ends; the move goes on.
const PATIENCE: Duration = Duration::from_secs(60);

/// Where what is seen goes to.
enum Output {
    Terminal { bar: ProgressBar, phases_told: usize },
    Lines { last: Option<(Instant, PhaseName)> },
}

/// Follows `mv` to its end.
///
/// # Errors
/// By the outcome: failed, cancelled; unreachable when the controller is away for long.
pub async fn follow(client: &PublicClient, mut mv: Move, json: bool) -> Result<(), Failure> {
    let mut output = if json || !std::io::stdout().is_terminal() {
        Output::Lines { last: None }
    } else {
        let bar = ProgressBar::new_spinner();
        bar.set_style(ProgressStyle::with_template("{spinner} {msg}").expect("the template is a constant"));
        bar.enable_steady_tick(POLL);
        Output::Terminal { bar, phases_told: 0 }
    };
    let mut end = Predicted::default();
    let mut heard = Instant::now();
    // One for the whole time: a signal between two looks must not be lost.
    let mut interrupt = signal(SignalKind::interrupt())?;
    loop {
        mv.progress.predicted_end_unix_us = end.next(mv.progress.predicted_end_unix_us);
        output.show(&mv)?;
        match mv.progress.outcome {
            open if open.is_open() => {}
            Outcome::Failed | Outcome::Cancelled => {
                let vm = client.vm(&mv.vm).await.ok();
                return output.end(&mv, vm.as_ref());
            }
            _ => return output.end(&mv, None),
        }
        tokio::select! {
            () = tokio::time::sleep(POLL) => {}
            _ = interrupt.recv() => return Err(left(&mv)),
        }
        let answer = tokio::select! {
            answer = client.mv(mv.id) => answer,
            _ = interrupt.recv() => return Err(left(&mv)),
        };
        match answer {
            Ok(now) => {
                mv = now;
                heard = Instant::now();
            }
            Err(error) if error.problem == Problem::Unreachable && heard.elapsed() < PATIENCE => {
                mv.progress.error = Some(format!("{}; the move goes on", error.message));
            }
            Err(error) => return Err(error.into()),
        }
    }
}

fn left(mv: &Move) -> Failure {
    let (id, vm) = (mv.id.0, &mv.vm);
    let what = format!(
        "move {id} of `{vm}` goes on; `godwit move show {id}` shows it, `godwit move {vm} --cancel` takes it back"
    );
    Failure::new(Code::Interrupted, what)
}

/// The predicted end as it is shown: it never moves towards the present while the move runs, whatever the controller
/// says (another one may have taken over, and know less).
#[derive(Debug, Default)]
pub struct Predicted(Option<u64>);

impl Predicted {
    /// What to show when `told` is said.
    pub fn next(&mut self, told: Option<u64>) -> Option<u64> {
        self.0 = match (self.0, told) {
            (Some(shown), Some(told)) => Some(shown.max(told)),
            (shown, told) => told.or(shown),
        };
        told.and(self.0)
    }
}

impl Output {
    fn show(&mut self, mv: &Move) -> Result<(), Failure> {
        match self {
            Self::Terminal { bar, phases_told } => {
                let phases = &mv.progress.phases;
                for phase in phases.iter().skip(*phases_told) {
                    let Some(ended) = phase.ended_unix_us else { break };
                    let seconds = ended.saturating_sub(phase.started_unix_us) as f64 / 1e6;
                    bar.println(format!("  {:<9} {seconds:.2} s", show::phase(phase.name)));
                    *phases_told += 1;
                }
                bar.set_message(line(mv, unix_us()));
                Ok(())
            }
            Self::Lines { last } => {
                let ended = !mv.progress.outcome.is_open();
                let due = last.is_none_or(|(at, phase)| at.elapsed() >= LINE || phase != mv.progress.phase);
                if due || ended {
                    *last = Some((Instant::now(), mv.progress.phase));
                    write_json(mv)?;
                }
                Ok(())
            }
        }
    }

    fn end(self, mv: &Move, vm: Option<&Vm>) -> Result<(), Failure> {
        let on_terminal = matches!(self, Self::Terminal { .. });
        if let Self::Terminal { bar, .. } = self {
            bar.finish_and_clear();
            print_text(&show::summary(mv))?;
        }
        outcome(mv, vm, on_terminal)
    }
}

/// One object on a line of its own.
///
/// # Errors
/// As [`print_text`].
pub fn write_json(value: &impl serde::Serialize) -> Result<(), Failure> {
    let text = serde_json::to_string(value).map_err(|e| Failure::new(Code::Failed, e.to_string()))?;
    print_text(&(text + "\n"))
}

/// Writes to standard output.
///
/// # Errors
/// It cannot be written. That nobody reads it any more (`| head`) is not worth a message.
pub fn print_text(text: &str) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(|e| match e.kind() {
        ErrorKind::BrokenPipe => Failure::new(Code::Failed, ""),
        _ => Failure::new(Code::Failed, format!("cannot write to standard output: {e}")),
    })
}

/// Where a VM is whose move came to nothing: as its host says now, for its guest may have powered off, or somebody has claimed it elsewhere.
fn whereabouts(mv: &Move, vm: Option<&Vm>) -> String {
    let owned = vm.filter(|vm| matches!(vm.ownership, Some(Ownership::Here | Ownership::Pausing)));
    match owned.map(|vm| (&vm.host, vm.run)) {
        // One that stands still is about to be made to run again.
        Some((host, Some(RunState::Running | RunState::Paused))) => format!("it runs at {host}"),
        Some((host, Some(RunState::Off))) => format!("it is off, at {host}"),
        _ => format!("`godwit vm show {}` tells where it is", mv.vm),
    }
}

/// The exit code that a move's outcome stands for. `vm`: as it is now.
fn outcome(mv: &Move, vm: Option<&Vm>, said: bool) -> Result<(), Failure> {
    let here = whereabouts(mv, vm);
    let why = mv.progress.error.as_deref().unwrap_or("no reason given");
    let message = |what: String| if said { String::new() } else { what };
    let vm = &mv.vm;
    match mv.progress.outcome {
        Outcome::Failed => {
            let text = format!("the move of `{vm}` failed: {}; {here}", printable(why));
            Err(Failure::new(Code::Failed, message(text)))
        }
        Outcome::NetworkUnproved => {
            let text =
                format!("`{vm}` runs at {}, but its network was not shown to lead there: {}", mv.to, printable(why));
            Err(Failure::new(Code::Failed, message(text)))
        }
        Outcome::MemoryLost => {
            let text = format!("`{vm}` is at {}, and its memory is lost: {}", mv.to, printable(why));
            Err(Failure::new(Code::Failed, message(text)))
        }
        Outcome::Cancelled => {
            Err(Failure::new(Code::Cancelled, message(format!("the move of `{vm}` was cancelled; {here}"))))
        }
        Outcome::Completed | Outcome::Running | Outcome::WaitsForPeer => Ok(()),
    }
}

fn unix_us() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| u64::try_from(d.as_micros()).unwrap_or(u64::MAX))
}

/// What of a phase is done, and of how much, where that is known.
fn done_of(mv: &Move) -> Option<(Bytes, Bytes)> {
    let p = &mv.progress;
    match p.phase {
        PhaseName::CopyDisk | PhaseName::Fill => Some((p.disk.copied, p.disk.total)),
        PhaseName::Memory | PhaseName::Stop => Some((mv.memory.saturating_sub(p.memory_remaining), mv.memory)),
        _ => None,
    }
}

/// The live line.
fn line(mv: &Move, now_unix_us: u64) -> String {
    let p: &MoveProgress = &mv.progress;
    let mut parts = vec![format!("{} to {}: {}", mv.vm, mv.to, show::phase(p.phase))];
    if let Some((done, total)) = done_of(mv) {
        parts.push(format!("{done} of {total}"));
    }
    parts.push(p.rate.to_string());
    if (PhaseName::Memory..PhaseName::Fill).contains(&p.phase) {
        parts.push(format!("round {}", p.rounds.len()));
    }
    if p.dirty_rate.0 > 0 {
        parts.push(format!("dirties {}/s", p.dirty_rate));
    }
    if let Some(end) = p.predicted_end_unix_us {
        parts.push(format!("done in {} s", end.saturating_sub(now_unix_us).div_ceil(1_000_000)));
    }
    if let Some(down) = p.link_down_s {
        parts.push(format!("link down for {down:.0} s"));
    }
    if p.outcome == Outcome::WaitsForPeer {
        parts.push("waits for its peer".into());
    }
    if let Some(error) = &p.error {
        parts.push(printable(error));
    }
    parts.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_predicted_end_never_moves_towards_the_present() {
        let mut end = Predicted::default();
        let shown: Vec<_> = [None, Some(10), Some(8), None, Some(9), Some(12)].map(|told| end.next(told)).into();
        assert_eq!(shown, [None, Some(10), Some(10), None, Some(10), Some(12)]);
    }

    #[test]
    fn a_vm_whose_move_failed_is_said_to_run_only_where_it_does() {
        let failed: Move = serde_json::from_value(serde_json::json!({
            "id": 1, "vm": "web", "from": "a", "to": "b", "disk": "mirror", "ordered_unix_us": 1, "memory": 1, "disks": 1,
            "progress": {
                "outcome": "failed", "phase": "memory", "phases": [], "bytes": {"memory": 0, "disk": 0, "control": 0},
                "raw": 0, "zero_pages": 0, "rounds": [], "disk": {"total": 0, "copied": 0, "remaining": 0, "synchronous": true},
                "memory_remaining": 0, "dirty_rate": 0, "rate": 0, "error": "the guest powered off"
            }
        }))
        .unwrap();
        let stands = |host: &str, run: Option<&str>, ownership: Option<&str>| -> String {
            let vm: Vm = serde_json::from_value(serde_json::json!({
                "id": 1, "name": "web", "host": host, "site": "s", "spec": {"memory": 4096}, "run": run,
                "ownership": ownership, "lineage": 0, "generation": 1, "mv": null
            }))
            .unwrap();
            outcome(&failed, Some(&vm), false).unwrap_err().message
        };
        let ends = |said: String, end: &str| assert!(said.ends_with(end), "{said}");
        ends(stands("a", Some("running"), Some("here")), "; it runs at a");
        ends(stands("a", Some("off"), Some("here")), "; it is off, at a");
        ends(stands("b", Some("running"), Some("here")), "; it runs at b");
        ends(stands("a", Some("paused"), Some("elsewhere")), "`godwit vm show web` tells where it is");
        ends(outcome(&failed, None, false).unwrap_err().message, "`godwit vm show web` tells where it is");
    }
}
