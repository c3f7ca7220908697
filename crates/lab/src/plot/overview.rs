//! The bars that compare a report's entries: time, downtime, outage and bytes side by side, each with a scale of its own.

use super::charts::{CLASSES, Chart, WIDTH, duration};
use super::svg::{Anchor, Svg, shorten};
use crate::report::{MoveReport, Outcome};
use crate::table::{Subject, outcome_word};
use godwit_units::Bytes;

const LABELS: f64 = 200.0;
const HEADER: f64 = 26.0;
const ROW: f64 = 30.0;
/// Room beside the longest bar for its figure.
const FIGURE: f64 = 68.0;

/// What a column of bars shows: its title, the figure, and how the figure reads.
struct Measure {
    title: &'static str,
    value: fn(&MoveReport) -> Option<f64>,
    show: fn(f64) -> String,
}

const MEASURES: [Measure; 4] = [
    Measure { title: "time", value: |m| Some(m.total_s), show: duration },
    Measure { title: "downtime", value: |m| m.downtime_ms, show: |ms| duration(ms / 1e3) },
    Measure { title: "client's outage", value: |m| m.outage_ms, show: |ms| duration(ms / 1e3) },
    Measure {
        title: "bytes on the WAN",
        value: |m| Some(m.bytes.total() as f64),
        show: |b| Bytes(b as u64).to_string(),
    },
];

/// The chart, where there is more than one entry to compare. `labels` name them.
pub(super) fn bars(subjects: &[Subject<'_>], labels: &[String]) -> Option<Chart> {
    if subjects.len() < 2 {
        return None;
    }
    let mut svg = Svg::new("comparison", WIDTH, HEADER + ROW * subjects.len() as f64 + 4.0);
    for (row, (subject, label)) in subjects.iter().zip(labels).enumerate() {
        let top = HEADER + ROW * row as f64;
        svg.line("grid", (0.0, top), (WIDTH, top));
        let outcome = subject.figures.outcome;
        if outcome == Outcome::Completed {
            svg.text("label", (0.0, top + 20.0), Anchor::Start, &shorten(label, 28));
        } else {
            svg.text("label", (0.0, top + 14.0), Anchor::Start, &shorten(label, 28));
            svg.text("bad", (0.0, top + 26.0), Anchor::Start, outcome_word(outcome));
        }
    }
    let column = (WIDTH - LABELS) / MEASURES.len() as f64;
    for (i, measure) in MEASURES.iter().enumerate() {
        let left = LABELS + column * i as f64;
        svg.text("unit", (left, HEADER - 9.0), Anchor::Start, measure.title);
        let values: Vec<Option<f64>> = subjects.iter().map(|s| (measure.value)(s.figures)).collect();
        let most =
            values.iter().flatten().copied().filter(|v| v.is_finite()).fold(0.0, f64::max).max(f64::MIN_POSITIVE);
        let length = |v: f64| (v / most).clamp(0.0, 1.0) * (column - FIGURE - 8.0);
        for (row, (subject, value)) in subjects.iter().zip(&values).enumerate() {
            let top = HEADER + ROW * row as f64;
            let Some(value) = value.filter(|v| v.is_finite()) else {
                svg.text("note", (left, top + 20.0), Anchor::Start, "not measured");
                continue;
            };
            let split = if i + 1 == MEASURES.len() { by_class(subject.figures) } else { vec![("bar", value, "")] };
            let dim = if subject.figures.outcome == Outcome::Completed { "" } else { " dim" };
            let mut at = left;
            for (class, part, name) in split {
                let hint = if name.is_empty() { String::new() } else { format!("{name}: {}", Bytes(part as u64)) };
                svg.rect(&format!("{class}{dim}"), (at, top + 7.0), (length(part).max(0.5), ROW - 14.0), &hint);
                at += length(part);
            }
            svg.text("value", (at.max(left + 1.0) + 5.0, top + 19.0), Anchor::Start, &(measure.show)(value));
        }
    }
    let note = "Each column has a scale of its own. Pale bars: the move did not complete.".into();
    Some(Chart { title: "Side by side".into(), legend: CLASSES.to_vec(), note, svg: svg.finish() })
}

fn by_class(figures: &MoveReport) -> Vec<(&'static str, f64, &'static str)> {
    let bytes = [figures.bytes.memory, figures.bytes.disk, figures.bytes.other];
    CLASSES.iter().zip(bytes).map(|((class, name), bytes)| (*class, bytes as f64, *name)).collect()
}
