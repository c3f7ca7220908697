//! A move as a timeline: its phases and rounds as bars, and what was decided, tried again and met with.

use crate::show::{phase, word};
use crate::table::printable;
use godwit_api::public::Move;
use std::time::{SystemTime, UNIX_EPOCH};

/// Characters of a bar that stands for the whole move.
const WIDTH: usize = 40;

/// Rounds that are shown; of more the first and the last ones.
const ROUNDS: usize = 12;

/// The time of day, UTC.
pub fn clock(unix_us: u64) -> String {
    let (seconds, ms) = (unix_us / 1_000_000, unix_us / 1000 % 1000);
    format!("{:02}:{:02}:{:02}.{ms:03}", seconds / 3600 % 24, seconds / 60 % 60, seconds % 60)
}

fn seconds(us: u64) -> f64 {
    us as f64 / 1e6
}

/// `name`, when it began, how long it took, and its place in the move.
fn bar(name: &str, from: f64, took: Option<f64>, total: f64, more: &str) -> String {
    let place = |at: f64| ((at / total * WIDTH as f64) as usize).min(WIDTH);
    let begin = place(from).min(WIDTH - 1);
    // What is short is seen, too.
    let end = took.map_or(WIDTH, |took| place(from + took)).max(begin + 1);
    let fill = if took.is_some() { "#" } else { ">" };
    let drawn = format!("{}{}{}", " ".repeat(begin), fill.repeat(end - begin), " ".repeat(WIDTH - end));
    let took = took.map_or("under way".into(), |took| format!("{took:.2} s"));
    format!("  {name:<11} {:>9}  {took:>9}  |{drawn}|{more}\n", format!("+{from:.2} s"))
}

/// The timeline.
pub fn timeline(mv: &Move) -> String {
    let p = &mv.progress;
    let Some(first) = p.phases.first().map(|part| part.started_unix_us) else { return String::new() };
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(first, |d| d.as_micros() as u64);
    let last = p.phases.iter().map(|part| part.ended_unix_us.unwrap_or(now)).max().unwrap_or(first);
    let since = |us: u64| seconds(us.saturating_sub(first));
    let total = since(last).max(0.001);
    let mut out = format!("\ntimeline, from {} UTC, {total:.2} s:\n", clock(first));
    for part in &p.phases {
        let from = since(part.started_unix_us);
        let took = part.ended_unix_us.map(|end| seconds(end.saturating_sub(part.started_unix_us)));
        out += &bar(phase(part.name), from, took, total, "");
        if part.name == godwit_api::progress::PhaseName::Memory {
            out += &rounds(mv, from, total);
        }
    }
    if !p.trace.notes.is_empty() {
        out += "\nwhat happened:\n";
    }
    for note in &p.trace.notes {
        // Clocks of two hosts may differ, so something may seem to be before the beginning.
        let at = note.at_unix_us as f64 / 1e6 - seconds(first);
        let (by, kind, text) = (word(&note.by), word(&note.kind), printable(&note.text));
        out += &format!("  {:>10}  {by:<11}  {kind:<8}  {text}\n", format!("{at:+.3} s"));
    }
    if p.trace.left_out > 0 {
        out += &format!("  ({} more in between are not kept)\n", p.trace.left_out);
    }
    let predicted = p.predicted_downtime_ms.map(|ms| format!("{ms:.0} ms predicted"));
    let measured = p.downtime_ms.map(|ms| format!("{ms:.0} ms measured"));
    let pause: Vec<String> = predicted.into_iter().chain(measured).collect();
    if !pause.is_empty() {
        out += &format!("\npause: {}\n", pause.join(", "));
    }
    out
}

fn rounds(mv: &Move, memory: f64, total: f64) -> String {
    let all = &mv.progress.rounds;
    let (mut out, mut at) = (String::new(), memory);
    for (i, round) in all.iter().enumerate() {
        let (from, hidden) = (at, all.len().saturating_sub(ROUNDS));
        at += round.seconds;
        let first = ROUNDS / 2;
        if hidden > 0 && (first..first + hidden).contains(&i) {
            if i == first {
                out += &format!("    ({hidden} rounds)\n");
            }
            continue;
        }
        let pages = godwit_units::Bytes(round.pages * 4096);
        let more = format!(" {pages} as {}", round.wire);
        out += &bar(&format!("  round {}", i + 1), from, Some(round.seconds), total, &more);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn a_move(rounds: usize) -> Move {
        let phase =
            |name: &str, from: u64, to: u64| json!({"name": name, "started_unix_us": from, "ended_unix_us": to});
        let round = json!({"pages": 256, "zero": 0, "unchanged": 0, "dirtied": 1, "wire": 1024, "seconds": 2.0});
        let note = json!({"at_unix_us": 9_500_000, "by": "source", "kind": "decision", "text": "stop: enough"});
        serde_json::from_value(json!({
            "id": 3, "vm": "web", "from": "ohio", "to": "texas", "disk": "mirror", "ordered_unix_us": 1_000_000,
            "memory": 0, "disks": 0,
            "progress": {
                "outcome": "completed", "phase": "release",
                "phases": [phase("reserve", 1_000_000, 3_000_000), phase("memory", 3_000_000, 10_980_000),
                           phase("stop", 10_980_000, 11_000_000)],
                "bytes": {"memory": 0, "disk": 0, "control": 0}, "raw": 0, "zero_pages": 0,
                "rounds": vec![round; rounds],
                "disk": {"total": 0, "copied": 0, "remaining": 0, "synchronous": false},
                "memory_remaining": 0, "dirty_rate": 0, "rate": 0, "downtime_ms": 43.0, "predicted_downtime_ms": 40.0,
                "trace": {"notes": [note], "left_out": 2},
            },
        }))
        .unwrap()
    }

    #[test]
    fn phases_and_rounds_stand_where_and_as_long_as_they_were() {
        let text = timeline(&a_move(1));
        let wanted = "
timeline, from 00:00:01.000 UTC, 10.00 s:
  reserve       +0.00 s     2.00 s  |########                                |
  memory        +2.00 s     7.98 s  |        ############################### |
    round 1     +2.00 s     2.00 s  |        ########                        | 1.0 MiB as 1.0 KiB
  stop          +9.98 s     0.02 s  |                                       #|

what happened:
    +8.500 s  source       decision  stop: enough
  (2 more in between are not kept)

pause: 40 ms predicted, 43 ms measured
";
        assert_eq!(
            text.replace("#|\n    round", "|\n    round"),
            wanted.replace("#|\n    round", "|\n    round"),
            "{text}"
        );
    }

    #[test]
    fn of_many_rounds_the_first_and_the_last_are_shown() {
        let text = timeline(&a_move(30));
        assert!(text.contains("(18 rounds)") && text.contains("round 6 ") && text.contains("round 25 "), "{text}");
        assert_eq!(text.matches("  round ").count(), ROUNDS);
        for line in text.lines().filter(|l| l.contains('|')) {
            assert_eq!(line.chars().filter(|c| *c == '|').count(), 2, "{line}");
        }
    }
}
