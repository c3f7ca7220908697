//! `godwit move A B C --to SITE`: several VMs in one order, followed to the last one's end, and a table of all.

use crate::args::MoveArgs;
use crate::failure::{Code, Failure};
use crate::follow::{print_text, write_json};
use crate::show;
use crate::table::Table;
use godwit_api::progress::Outcome;
use godwit_api::public::{Move, MoveTogether};
use godwit_api::{Name, Problem, PublicClient};
use godwit_units::Bytes;
use indicatif::{ProgressBar, ProgressStyle};
use std::io::IsTerminal;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::signal::unix::{SignalKind, signal};

/// How often the controller is asked.
const POLL: Duration = Duration::from_millis(500);
/// How long the controller may be away before following ends; the moves go on.
const PATIENCE: Duration = Duration::from_secs(60);

/// Carries an order of several VMs out.
///
/// # Errors
/// The controller's; or that not all have begun, or have arrived.
pub async fn run(client: &PublicClient, args: MoveArgs, json: bool) -> Result<(), Failure> {
    if args.vcpus.is_some() {
        return Err(Failure::usage("--vcpus is for one VM: move it by itself"));
    }
    if !args.place.is_empty() {
        return Err(Failure::usage("--place is for one VM: move it by itself"));
    }
    let to = args.to.ok_or_else(|| Failure::usage("where to? name a site or a host with --to"))?;
    let MoveArgs { vms, disk, limit, policy, throttle, memory_postcopy, keep_checkpoint, dry_run, .. } = args;
    let order = MoveTogether { vms, to, disk, limit, policy, throttle, memory_postcopy, keep_checkpoint, dry_run };
    if dry_run {
        let each = client.dry_run_together(&order).await?;
        match json {
            true => write_json(&each)?,
            false => each.iter().try_for_each(|dry| print_text(&show::dry_run(dry)))?,
        }
        let free = each.iter().all(|dry| dry.blockers.is_empty());
        return if free { Ok(()) } else { Err(Failure::new(Code::Blocked, "")) };
    }
    let mut moves = client.move_together(&order).await?;
    let missing = missing(&order.vms, &moves);
    if !json {
        for mv in &moves {
            eprintln!("{}: {}", mv.vm, crate::foretell::line(mv).unwrap_or_else(|| "nothing could be foretold".into()));
        }
    }
    if !args.detach {
        moves = follow(client, moves, json).await?;
    }
    match json {
        true => write_json(&moves)?,
        false => print_text(&table(&moves))?,
    }
    outcome(&missing, if args.detach { &[] } else { moves.as_slice() })
}

/// The VMs of an order that have no move in its answer.
fn missing(asked: &[Name], moves: &[Move]) -> Vec<String> {
    let has_none = |vm: &&Name| moves.iter().all(|mv| mv.vm != **vm);
    asked.iter().filter(has_none).map(|vm| format!("`{vm}`")).collect()
}

/// Looks at all of them until the last has ended; on a terminal with a live line.
async fn follow(client: &PublicClient, mut moves: Vec<Move>, json: bool) -> Result<Vec<Move>, Failure> {
    let bar = (!json && std::io::stdout().is_terminal()).then(|| {
        let bar = ProgressBar::new_spinner();
        bar.set_style(ProgressStyle::with_template("{spinner} {msg}").expect("the template is a constant"));
        bar.enable_steady_tick(POLL / 2);
        bar
    });
    let mut heard = Instant::now();
    // One for the whole time: a signal between two looks must not be lost.
    let mut interrupt = signal(SignalKind::interrupt())?;
    while moves.iter().any(|mv| mv.progress.outcome.is_open()) {
        if let Some(bar) = &bar {
            bar.set_message(line(&moves));
        }
        tokio::select! {
            () = tokio::time::sleep(POLL) => {}
            _ = interrupt.recv() => return Err(left()),
        }
        for mv in moves.iter_mut().filter(|mv| mv.progress.outcome.is_open()) {
            let answer = tokio::select! {
                answer = client.mv(mv.id) => answer,
                _ = interrupt.recv() => return Err(left()),
            };
            match answer {
                Ok(now) => (*mv, heard) = (now, Instant::now()),
                Err(error) if error.problem == Problem::Unreachable && heard.elapsed() < PATIENCE => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
    if let Some(bar) = bar {
        bar.finish_and_clear();
    }
    Ok(moves)
}

fn left() -> Failure {
    let what = "the moves go on; `godwit move ls` lists them, `godwit move NAME --cancel` takes one back";
    Failure::new(Code::Interrupted, what)
}

/// What is under way now.
fn line(moves: &[Move]) -> String {
    let over = moves.iter().filter(|mv| !mv.progress.outcome.is_open()).count();
    let mut parts = vec![format!("{over} of {}", moves.len())];
    for mv in moves.iter().filter(|mv| mv.progress.outcome.is_open() && mv.after.is_none()) {
        parts.push(format!("{}: {}, {}", mv.vm, show::phase(mv.progress.phase), mv.progress.rate));
    }
    let waiting = moves.iter().filter(|mv| mv.after.is_some()).count();
    if waiting > 0 {
        parts.push(format!("{waiting} waiting"));
    }
    let ends = moves.iter().filter_map(|mv| mv.progress.predicted_end_unix_us);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    if let Some(end) = ends.max() {
        let left = Duration::from_micros(end).saturating_sub(now);
        parts.push(format!("all there in {} s", left.as_secs()));
    }
    parts.join("; ")
}

/// All of them, and what they come to.
fn table(moves: &[Move]) -> String {
    let mut table = Table::new(&[
        "VM",
        "TO",
        "OUTCOME",
        ">PREDICTED",
        ">TIME",
        ">PAUSE",
        ">MEMORY",
        ">RAW",
        ">DISK",
        ">THERE",
        ">OF OTHERS",
    ]);
    let time = |mv: &Move| show::total_s(mv).map_or_else(|| "-".into(), |s| format!("{s:.1} s"));
    let predicted =
        |mv: &Move| mv.prediction.as_ref().map_or_else(|| "-".into(), |told| format!("{:.1} s", told.total_s.likely));
    let row = |all: &[Move]| {
        let sum = |of: fn(&Move) -> Bytes| all.iter().map(of).sum::<Bytes>().to_string();
        let not_sent = |mv: &Move| {
            let pages: u64 = mv.progress.rounds.iter().map(|round| round.on_disk).sum();
            mv.progress.held_memory + Bytes(pages * 4096).saturating_sub(mv.progress.neighbour_memory)
        };
        [
            sum(|mv| mv.progress.bytes.memory),
            sum(|mv| mv.progress.raw),
            sum(|mv| mv.progress.bytes.disk),
            sum(not_sent),
            sum(|mv| mv.progress.neighbour_memory),
        ]
    };
    for mv in moves {
        let pause = mv.progress.downtime_ms.map_or_else(|| "-".into(), |ms| format!("{ms:.0} ms"));
        let [memory, raw, disk, not_sent, others] = row(std::slice::from_ref(mv));
        let outcome = if mv.after.is_some() { "waits".into() } else { show::word(&mv.progress.outcome) };
        table.row([
            mv.vm.to_string(),
            mv.to.to_string(),
            outcome,
            predicted(mv),
            time(mv),
            pause,
            memory,
            raw,
            disk,
            not_sent,
            others,
        ]);
    }
    let [memory, raw, disk, not_sent, others] = row(moves);
    let begin = moves.iter().map(|mv| mv.ordered_unix_us).min();
    let end = moves.iter().filter_map(|mv| mv.progress.phases.last()?.ended_unix_us).max();
    let took = begin
        .zip(end)
        .map_or_else(|| "-".into(), |(begin, end)| format!("{:.1} s", end.saturating_sub(begin) as f64 / 1e6));
    let all = format!("{} VMs", moves.len());
    table.row([
        all,
        String::new(),
        String::new(),
        String::new(),
        took,
        String::new(),
        memory,
        raw,
        disk,
        not_sent,
        others,
    ]);
    table.lines()
}

/// Whether all have begun, and have arrived as they should.
fn outcome(missing: &[String], moves: &[Move]) -> Result<(), Failure> {
    let mut parts = vec![];
    if !missing.is_empty() {
        parts.push(format!("not begun: {}; `godwit move ls` lists what was", missing.join(", ")));
    }
    let not: Vec<&Move> = moves.iter().filter(|mv| mv.progress.outcome != Outcome::Completed).collect();
    // Those that are there all the same do not stay where they were.
    let (ill, stayed): (Vec<&Move>, Vec<&Move>) = not.iter().copied().partition(|mv| mv.progress.outcome.has_arrived());
    let why =
        |mv: &Move| crate::table::printable(mv.progress.error.as_deref().unwrap_or("`godwit move show` tells more"));
    if let Some(first) = stayed.first() {
        let names: Vec<String> = stayed.iter().map(|mv| format!("`{}`", mv.vm)).collect();
        parts.push(format!("not moved: {}; {}", names.join(", "), why(first)));
    }
    if let Some(first) = ill.first() {
        let names: Vec<String> =
            ill.iter().map(|mv| format!("`{}` ({})", mv.vm, show::word(&mv.progress.outcome))).collect();
        parts.push(format!("arrived, and not well: {}; {}", names.join(", "), why(first)));
    }
    if parts.is_empty() {
        return Ok(());
    }
    let cancelled = missing.is_empty() && not.iter().all(|mv| mv.progress.outcome == Outcome::Cancelled);
    Err(Failure::new(if cancelled { Code::Cancelled } else { Code::Failed }, parts.join("; ")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn a_move(vm: &str, outcome: Outcome, error: &str) -> Move {
        serde_json::from_value(json!({
            "id": 1, "vm": vm, "from": "a", "to": "b", "disk": "mirror", "ordered_unix_us": 1, "memory": 1, "disks": 1,
            "progress": {
                "outcome": outcome, "phase": "release", "phases": [], "bytes": {"memory": 0, "disk": 0, "control": 0},
                "raw": 0, "zero_pages": 0, "rounds": [], "disk": {"total": 0, "copied": 0, "remaining": 0, "synchronous": true},
                "memory_remaining": 0, "dirty_rate": 0, "rate": 0, "error": error
            }
        }))
        .unwrap()
    }

    #[test]
    fn only_what_is_not_at_its_destination_is_said_not_to_have_moved() {
        let moves = [
            a_move("web", Outcome::Completed, ""),
            a_move("db", Outcome::NetworkUnproved, "nobody answers"),
            a_move("app", Outcome::Failed, "no room"),
        ];
        assert!(outcome(&[], &moves[..1]).is_ok());
        let failed = outcome(&[], &moves).unwrap_err();
        assert_eq!(failed.code, Code::Failed);
        let said = "not moved: `app`; no room; arrived, and not well: `db` (network-unproved); nobody answers";
        assert_eq!(failed.message, said);
        let cancelled = [a_move("web", Outcome::Cancelled, "cancelled"), a_move("db", Outcome::Completed, "")];
        assert_eq!(outcome(&[], &cancelled).unwrap_err().code, Code::Cancelled);
    }

    #[test]
    fn a_vm_that_was_asked_for_and_has_no_move_is_named() {
        let asked: Vec<Name> = ["web", "db"].iter().map(|vm| vm.parse().unwrap()).collect();
        let moves = [a_move("web", Outcome::Completed, "")];
        assert!(missing(&asked[..1], &moves).is_empty());
        let failed = outcome(&missing(&asked, &moves), &moves).unwrap_err();
        assert_eq!(failed.code, Code::Failed);
        assert!(failed.message.starts_with("not begun: `db`;"), "{}", failed.message);
    }
}
