//! `godwit move A B C --to SITE`: several VMs in one order, followed to the last one's end, and a table of all.

use crate::args::MoveArgs;
use crate::failure::{Code, Failure};
use crate::follow::{print_text, write_json};
use crate::show;
use crate::table::Table;
use godwit_api::progress::Outcome;
use godwit_api::public::{Move, MoveTogether};
use godwit_api::{Problem, PublicClient};
use godwit_units::Bytes;
use indicatif::{ProgressBar, ProgressStyle};
use std::io::IsTerminal;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// How often the controller is asked.
const POLL: Duration = Duration::from_millis(500);
/// How long the controller may be away before following ends; the moves go on.
const PATIENCE: Duration = Duration::from_secs(60);

/// Carries an order of several VMs out.
///
/// # Errors
/// The controller's; or that not all have arrived.
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
    if args.detach { Ok(()) } else { outcome(&moves) }
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
    while moves.iter().any(|mv| mv.progress.outcome.is_open()) {
        if let Some(bar) = &bar {
            bar.set_message(line(&moves));
        }
        tokio::select! {
            () = tokio::time::sleep(POLL) => {}
            _ = tokio::signal::ctrl_c() => {
                let what = "the moves go on; `godwit move ls` lists them, `godwit move NAME --cancel` takes one back";
                return Err(Failure::new(Code::Interrupted, what));
            }
        }
        for mv in moves.iter_mut().filter(|mv| mv.progress.outcome.is_open()) {
            match client.mv(mv.id).await {
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

/// Whether all have arrived.
fn outcome(moves: &[Move]) -> Result<(), Failure> {
    let not: Vec<&Move> = moves.iter().filter(|mv| mv.progress.outcome != Outcome::Completed).collect();
    let Some(first) = not.first() else { return Ok(()) };
    let why = first.progress.error.as_deref().unwrap_or("`godwit move show` tells more");
    let cancelled = not.iter().all(|mv| mv.progress.outcome == Outcome::Cancelled);
    let names: Vec<String> = not.iter().map(|mv| format!("`{}`", mv.vm)).collect();
    let what = format!("not moved: {}; {}", names.join(", "), crate::table::printable(why));
    Err(Failure::new(if cancelled { Code::Cancelled } else { Code::Failed }, what))
}
