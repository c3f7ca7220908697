//! `godwit predict VM --to SITE`: what a move would take by each way, as the controller foretells it; and how far such predictions were off.

use crate::failure::Failure;
use crate::follow::{print_text, write_json};
use crate::predict::PredictArgs;
use crate::table::Table;
use godwit_api::PublicClient;
use godwit_api::predict::{Moment, MovePrediction, Span, WantedPrediction};
use godwit_api::public::Move;
use godwit_units::Bytes;
use serde_json::{Value, json};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// What is said of a move whose memory may follow its guest.
pub(crate) const NOT_OF_POSTCOPY: &str = "what is foretold of a move is foretold without post-copy: whether the guest's memory follows it, and for \
                                          how long, is decided when the rounds of memory are seen; `godwit move show` says it then";

/// Asks the controller.
///
/// # Errors
/// The controller's.
pub async fn run(api: &PublicClient, args: &PredictArgs, json: bool) -> Result<(), Failure> {
    if args.accuracy {
        let accuracy = Accuracy::of(&api.moves().await?);
        return if json { write_json(&accuracy.json()) } else { print_text(&accuracy.show()) };
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let at_unix_s = (args.at > Duration::ZERO).then(|| (now + args.at).as_secs());
    if let Some(site) = &args.site {
        return crate::evacuation::run(api, args, site, at_unix_s, json).await;
    }
    let (Some(vm), [to]) = (&args.vm, args.to.as_slice()) else {
        return Err(Failure::usage("where to? name a site or a host with --to"));
    };
    let wanted =
        WantedPrediction { to: to.clone(), policy: args.policy, limit: args.limit, at_unix_s, when: args.when };
    let told = api.predict(vm, &wanted).await?;
    if json { write_json(&told) } else { print_text(&show(&told, now.as_secs())) }
}

pub(crate) fn between(span: &Span, one: impl Fn(f64) -> String) -> String {
    format!("{} ({} - {})", one(span.likely), one(span.lower), one(span.upper))
}

pub(crate) fn seconds(value: f64) -> String {
    format!("{value:.1} s")
}

pub(crate) fn ms(value: f64) -> String {
    if value < 10_000.0 { format!("{value:.0} ms") } else { seconds(value / 1e3) }
}

fn bytes(value: f64) -> String {
    Bytes(value.max(0.0) as u64).to_string()
}

/// What was foretold of a move, in one line; none where nothing was.
#[must_use]
pub fn line(mv: &Move) -> Option<String> {
    let told = mv.prediction.as_ref()?;
    let begins = told.begins_s.map_or_else(String::new, |at| format!(", its turn comes after {}", seconds(at.likely)));
    Some(format!(
        "predicted: {}{begins}, the guest stands for {}, {} on the link",
        between(&told.total_s, seconds),
        between(&told.downtime_ms, ms),
        between(&told.bytes, bytes)
    ))
}

/// What was foretold beside what was measured, of a move that got there; pairs for its summary.
#[must_use]
pub fn against(mv: &Move) -> Vec<(&'static str, String)> {
    let Some(told) = &mv.prediction else { return vec![] };
    let measured = |span: &Span, now: Option<f64>, one: &dyn Fn(f64) -> String| match now {
        Some(now) => {
            let place = if span.has(now) { "inside" } else { "outside" };
            format!("{}; measured {}, {place}", between(span, one), one(now))
        }
        None => between(span, one),
    };
    let arrived = mv.total_s();
    vec![
        ("predicted", measured(&told.total_s, arrived, &seconds)),
        ("pause predicted", measured(&told.downtime_ms, mv.progress.downtime_ms.filter(|_| arrived.is_some()), &ms)),
        ("bytes predicted", measured(&told.bytes, arrived.map(|_| mv.total_bytes()), &bytes)),
    ]
}

/// For how long, and by how much, the guest's reads and writes take longer.
fn slowed(span: &Span, by_ms: f64) -> String {
    if span.upper < 0.05 { "-".into() } else { format!("{} by {}", between(span, seconds), ms(by_ms)) }
}

fn show(told: &MovePrediction, now_s: u64) -> String {
    let mut table = Table::new(&["STRATEGY", ">TOTAL", ">DOWNTIME", ">SENT", ">SLOWED", "POSSIBLE"]);
    let cell =
        |span: &Option<Span>, one: &dyn Fn(f64) -> String| span.as_ref().map_or_else(String::new, |s| between(s, one));
    let mut notes = String::new();
    for choice in &told.choices {
        let is_best = told.recommended.as_ref() == Some(&choice.strategy);
        let slowed = choice.slowed_s.as_ref().map_or_else(String::new, |span| slowed(span, choice.slowed_by_ms));
        table.row([
            format!("{}{}", choice.strategy, if is_best { " *" } else { "" }),
            cell(&choice.total_s, &seconds),
            cell(&choice.downtime_ms, &ms),
            cell(&choice.bytes, &bytes),
            slowed,
            if choice.possible { "yes" } else { "no" }.into(),
        ]);
        if let Some(note) = &choice.note {
            notes += &format!("{}: {note}\n", choice.strategy);
        }
    }
    let best = match &told.recommended {
        Some(best) => format!("* {best}: {}\n", told.why),
        None => format!("{}\n", told.why),
    };
    let b = &told.basis;
    let rtt = b.rtt_ms.map_or_else(|| "unknown".into(), |rtt| format!("{rtt:.1} ms"));
    let loss = b.loss.map_or_else(|| "unknown".into(), |loss| format!("{:.2} %", loss * 100.0));
    let sharing = if b.sharing > 0 { format!(", shared with {} moves", b.sharing) } else { String::new() };
    let basis = format!(
        "link: {} ({}){sharing}, round trip {rtt}, loss {loss}\nguest: {} pages change in a second ({})\nmove: {} besides, {} in the pause, by {} past moves; intervals by {} past predictions\n",
        between(&b.goodput_mbit, |v| format!("{v:.1} Mbit/s")),
        b.goodput_by,
        b.changed_per_s.round(),
        b.model,
        between(&b.before_s, seconds),
        between(&b.pause_ms, ms),
        b.past_moves,
        b.past_predictions
    );
    let mut text = format!("{} from {} to {}\n{}\n{best}{notes}{basis}", told.vm, told.from, told.to, table.lines());
    if let Some(when) = &told.when {
        let mut table = Table::new(&["START", ">IN", ">TOTAL", ">DOWNTIME", ">SENT"]);
        let mut row = |name: &str, m: &Moment| {
            let at = if m.at_unix_s == 0 { String::new() } else { seconds(m.at_unix_s.saturating_sub(now_s) as f64) };
            table.row([name.into(), at, seconds(m.total_s), ms(m.downtime_ms), bytes(m.bytes)]);
        };
        row("best", &when.best);
        row("mean", &when.mean);
        row("worst", &when.worst);
        text += &format!("\n{}of {} moments that profiles tell of\n", table.lines(), when.tried);
    }
    text
}

/// A move beside what was foretold of it.
struct Compared {
    name: String,
    /// Told, its span, and measured: seconds, milliseconds, bytes.
    total: (Span, f64),
    downtime: (Span, f64),
    bytes: (Span, f64),
}

/// Which of its figures.
type Figure = fn(&Compared) -> &(Span, f64);

/// How far predictions were off.
struct Accuracy(Vec<Compared>);

fn error((span, measured): &(Span, f64)) -> f64 {
    if *measured > 0.0 { (span.likely - measured).abs() / measured } else { 0.0 }
}

impl Accuracy {
    fn of(moves: &[Move]) -> Self {
        let compared = moves.iter().rev().filter_map(|mv| {
            let told = mv.prediction.as_ref()?;
            Some(Compared {
                name: format!("{} {} from {} to {}", mv.id.0, mv.vm, mv.from, mv.to),
                total: (told.total_s, mv.total_s()?),
                downtime: (told.downtime_ms, mv.progress.downtime_ms?),
                bytes: (told.bytes, mv.total_bytes()),
            })
        });
        Self(compared.collect())
    }

    /// Mean error, share inside the interval, and the interval's median width.
    fn sum(&self, of: Figure) -> (f64, f64, f64) {
        let n = self.0.len().max(1) as f64;
        let mean = self.0.iter().map(|c| error(of(c))).sum::<f64>() / n;
        let inside = self.0.iter().filter(|c| of(c).0.has(of(c).1)).count() as f64 / n;
        let width = |c: &Compared| (of(c).0.upper - of(c).0.lower) / of(c).0.likely.max(1e-9);
        let mut widths: Vec<f64> = self.0.iter().map(width).collect();
        widths.sort_by(f64::total_cmp);
        (mean, inside, widths.get(widths.len() / 2).copied().unwrap_or(0.0))
    }

    fn json(&self) -> Value {
        let one = |of: Figure| {
            let (error, inside, width) = self.sum(of);
            json!({"mean_error": error, "inside": inside, "median_width": width})
        };
        let moves: Vec<Value> = self
            .0
            .iter()
            .map(|c| {
                let pair = |(span, measured): &(Span, f64)| json!({"predicted": span, "measured": measured});
                json!({"move": c.name, "total_s": pair(&c.total), "downtime_ms": pair(&c.downtime), "bytes": pair(&c.bytes)})
            })
            .collect();
        json!({
            "moves": self.0.len(), "total_s": one(|c| &c.total), "downtime_ms": one(|c| &c.downtime),
            "bytes": one(|c| &c.bytes), "each": moves,
        })
    }

    fn show(&self) -> String {
        if self.0.is_empty() {
            return "no move that was predicted has ended yet\n".into();
        }
        let mut table = Table::new(&["MOVE", ">TOTAL", ">MEASURED", ">DOWNTIME", ">MEASURED", "INSIDE"]);
        for c in &self.0 {
            let inside = [c.total.0.has(c.total.1), c.downtime.0.has(c.downtime.1)];
            table.row([
                c.name.clone(),
                between(&c.total.0, seconds),
                seconds(c.total.1),
                between(&c.downtime.0, ms),
                ms(c.downtime.1),
                match inside {
                    [true, true] => "both",
                    [true, false] => "total",
                    [false, true] => "downtime",
                    [false, false] => "neither",
                }
                .into(),
            ]);
        }
        let mut sums = Table::new(&["OF", ">MEAN ERROR", ">INSIDE", ">MEDIAN WIDTH"]);
        let all: [(&str, Figure); 3] =
            [("total", |c| &c.total), ("downtime", |c| &c.downtime), ("bytes", |c| &c.bytes)];
        for (name, of) in all {
            let (error, inside, width) = self.sum(of);
            let percent = |share: f64| format!("{:.1} %", share * 100.0);
            sums.row([name.into(), percent(error), percent(inside), percent(width)]);
        }
        format!("{}\n{}of {} moves\n", table.lines(), sums.lines(), self.0.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn a_move(id: u64, told: f64, took_s: u64, downtime_ms: f64) -> Move {
        let span = |likely: f64| json!({"lower": likely * 0.9, "likely": likely, "upper": likely * 1.1});
        let basis = godwit_api::predict::Basis::default();
        serde_json::from_value(json!({
            "id": id, "vm": "web", "from": "a", "to": "b", "disk": "mirror", "ordered_unix_us": 1_000_000, "memory": 1, "disks": 1,
            "progress": {
                "outcome": "completed", "phase": "release", "phases": [], "bytes": {"memory": 100, "disk": 0, "control": 0},
                "raw": 0, "zero_pages": 0, "rounds": [], "disk": {"total": 0, "copied": 0, "remaining": 0, "synchronous": true},
                "memory_remaining": 0, "dirty_rate": 0, "rate": 0, "downtime_ms": downtime_ms,
                "resumed_unix_us": 1_000_000 + took_s * 1_000_000
            },
            "prediction": {
                "total_s": span(told), "downtime_ms": span(100.0), "bytes": span(100.0), "basis": basis, "uncorrected": godwit_api::predict::Likely::default()
            }
        }))
        .unwrap()
    }

    #[test]
    fn accuracy_is_the_mean_error_of_moves_that_arrived_and_who_was_inside() {
        let lost = Move { prediction: None, ..a_move(3, 1.0, 1, 1.0) };
        let accuracy = Accuracy::of(&[a_move(2, 10.0, 10, 105.0), a_move(1, 10.0, 20, 100.0), lost]);
        let json = accuracy.json();
        assert_eq!((json["moves"].as_u64(), json["total_s"]["inside"].as_f64()), (Some(2), Some(0.5)));
        assert_eq!(json["total_s"]["mean_error"].as_f64(), Some(0.25));
        assert_eq!(json["downtime_ms"]["inside"].as_f64(), Some(1.0));
        let text = accuracy.show();
        assert!(text.contains("25.0 %") && text.contains("of 2 moves") && text.contains("downtime"), "{text}");
        assert!(Accuracy::of(&[]).show().contains("no move"));
    }

    #[test]
    fn for_how_long_a_guest_is_slowed_has_an_interval_as_all_else() {
        let span = Span { lower: 2.0, likely: 3.5, upper: 7.0 };
        assert_eq!(slowed(&span, 24.0), "3.5 s (2.0 s - 7.0 s) by 24 ms");
        assert_eq!(slowed(&Span::default(), 24.0), "-");
    }

    #[test]
    fn a_moves_summary_sets_what_was_foretold_beside_what_was_measured() {
        let told = against(&a_move(1, 10.0, 20, 100.0));
        assert_eq!(told[0].1, "10.0 s (9.0 s - 11.0 s); measured 20.0 s, outside");
        assert!(told[1].1.ends_with("measured 100 ms, inside"), "{told:?}");
        assert!(line(&a_move(1, 10.0, 20, 100.0)).unwrap().starts_with("predicted: 10.0 s"));
    }
}
