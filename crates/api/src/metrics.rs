//! Figures for Prometheus: its text format, and what controller and node have to say of a move in the same words.
//!
//! # What can go wrong
//!
//! Too many series: a label that takes ever new values fills Prometheus' memory. So a move's series have its number, but are
//! there only while it goes on and for [`KEPT`] after its end; what counts for ever has only labels with few values.

use crate::Name;
use crate::progress::{MoveProgress, Outcome, PhaseName};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use godwit_units::MoveId;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;

/// The format's name in an answer.
pub const CONTENT: &str = "text/plain; version=0.0.4; charset=utf-8";

/// For how long an ended move is among the figures: long enough for a scrape every minute to see how it ended.
pub const KEPT: Duration = Duration::from_secs(300);

/// How many ended moves are among the figures at most.
pub const MOST_KEPT: usize = 64;

/// What a metric is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Type {
    /// Goes up and down.
    Gauge,
    /// Only goes up.
    Counter,
}

/// Metrics as they are written. Samples of one metric stand together, whatever the order in which they come.
#[derive(Debug, Default)]
pub struct Exposition {
    families: BTreeMap<&'static str, (&'static str, Type, Vec<String>)>,
}

impl Exposition {
    /// Adds a sample. A metric's help and type are those of its first sample.
    ///
    /// # Panics
    /// In debug builds, when a name is not one that Prometheus takes, or a counter's does not end in `_total`.
    pub fn add(&mut self, kind: Type, name: &'static str, help: &'static str, labels: &[(&str, &str)], value: f64) {
        debug_assert!(name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_'), "{name}");
        debug_assert_eq!(kind == Type::Counter, name.ends_with("_total"), "{name}");
        let mut line = name.to_owned();
        for (i, (label, value)) in labels.iter().enumerate() {
            let begin = if i == 0 { '{' } else { ',' };
            let value = value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
            let _ = write!(line, "{begin}{label}=\"{value}\"");
        }
        if !labels.is_empty() {
            line.push('}');
        }
        let _ = writeln!(line, " {value}");
        self.families.entry(name).or_insert((help, kind, vec![])).2.push(line);
    }

    /// Adds a gauge.
    pub fn gauge(&mut self, name: &'static str, help: &'static str, labels: &[(&str, &str)], value: f64) {
        self.add(Type::Gauge, name, help, labels, value);
    }

    /// Adds a counter.
    pub fn counter(&mut self, name: &'static str, help: &'static str, labels: &[(&str, &str)], value: f64) {
        self.add(Type::Counter, name, help, labels, value);
    }

    /// The text.
    #[must_use]
    pub fn text(&self) -> String {
        let mut out = String::new();
        for (name, (help, kind, lines)) in &self.families {
            let kind = if *kind == Type::Gauge { "gauge" } else { "counter" };
            let _ = write!(
                out,
                "# HELP {name} {}\n# TYPE {name} {kind}\n",
                help.replace('\\', "\\\\").replace('\n', "\\n")
            );
            lines.iter().for_each(|line| out.push_str(line));
        }
        out
    }
}

impl IntoResponse for Exposition {
    fn into_response(self) -> Response {
        ([(header::CONTENT_TYPE, CONTENT)], self.text()).into_response()
    }
}

/// A word of the API's own, such as `hand-off`.
#[must_use]
pub fn word(value: &impl serde::Serialize) -> String {
    serde_json::to_value(value).ok().and_then(|v| v.as_str().map(str::to_owned)).unwrap_or_default()
}

/// A move among the figures.
#[derive(Clone, Debug)]
pub struct OfMove<'a> {
    /// Its number.
    pub id: MoveId,
    /// The VM.
    pub vm: &'a Name,
    /// The host that it leaves, where it is known.
    pub from: &'a str,
    /// The host that it goes to, where it is known.
    pub to: &'a str,
    /// RAM and disks, where they are known.
    pub size: Option<u64>,
    /// How it stands.
    pub progress: &'a MoveProgress,
}

const PHASES: [PhaseName; 6] = [
    PhaseName::Reserve,
    PhaseName::CopyDisk,
    PhaseName::Memory,
    PhaseName::Stop,
    PhaseName::HandOff,
    PhaseName::Release,
];

/// All that a move can end as.
pub const ENDS: [Outcome; 4] = [Outcome::Completed, Outcome::NetworkUnproved, Outcome::Failed, Outcome::Cancelled];

#[allow(clippy::cast_precision_loss, reason = "figures for charts; 2^53 bytes are 8 PiB")]
fn float(n: u64) -> f64 {
    n as f64
}

/// What is said of one move.
pub fn of_move(out: &mut Exposition, mv: &OfMove<'_>) {
    let p = mv.progress;
    let id = mv.id.0.to_string();
    let labels = [("move", id.as_str()), ("vm", mv.vm.as_str()), ("from", mv.from), ("to", mv.to)];
    let labels = labels.as_slice();
    let seconds = |us: u64| float(us) / 1e6;
    let remaining = p.memory_remaining.0 + p.disk.remaining.0;
    let carried = (p.bytes.memory + p.bytes.disk + p.bytes.control).0;
    out.gauge(
        "godwit_vm_migration_data_remaining_bytes",
        "Memory and disk that still differ at the destination.",
        labels,
        float(remaining),
    );
    out.gauge(
        "godwit_vm_migration_data_processed_bytes",
        "Memory and disk of the guest that were sent, before encoding.",
        labels,
        float(p.raw.0 + p.disk.copied.0),
    );
    if let Some(size) = mv.size {
        out.gauge("godwit_vm_migration_data_total_bytes", "Memory and disks of the guest.", labels, float(size));
    }
    out.gauge(
        "godwit_vm_migration_wire_bytes",
        "UDP payload that the move has put on the link, both directions.",
        labels,
        float(carried),
    );
    out.gauge(
        "godwit_vm_migration_dirty_memory_rate_bytes",
        "Memory that the guest dirties, in bytes a second.",
        labels,
        float(p.dirty_rate.0),
    );
    out.gauge(
        "godwit_vm_migration_memory_transfer_rate_bytes",
        "Memory's share of the link, in bytes a second.",
        labels,
        float(p.memory_rate.0) / 8.0,
    );
    out.gauge(
        "godwit_vm_migration_disk_transfer_rate_bytes",
        "The disks' share of the link, in bytes a second.",
        labels,
        float(p.disk_rate.0) / 8.0,
    );
    out.gauge(
        "godwit_vm_migration_rounds",
        "Rounds over the guest's memory so far.",
        labels,
        float(p.rounds.len() as u64),
    );
    if let Some(ms) = p.predicted_downtime_ms {
        out.gauge(
            "godwit_vm_migration_predicted_downtime_seconds",
            "The pause as it is expected, or was when the guest was stopped.",
            labels,
            ms / 1000.0,
        );
    }
    if let Some(ms) = p.downtime_ms {
        out.gauge(
            "godwit_vm_migration_downtime_seconds",
            "The pause of the guest's CPUs, as measured.",
            labels,
            ms / 1000.0,
        );
    }
    if let Some(us) = p.predicted_end_unix_us.filter(|_| p.outcome.is_open()) {
        out.gauge(
            "godwit_vm_migration_predicted_end_timestamp_seconds",
            "When the move is expected to end.",
            labels,
            seconds(us),
        );
    }
    if let Some(limit) = p.limit {
        out.gauge(
            "godwit_vm_migration_limit_bytes",
            "What the move may use of the link, in bytes a second.",
            labels,
            float(limit.0) / 8.0,
        );
    }
    out.gauge(
        "godwit_vm_migration_link_down_seconds",
        "For how long the move has not heard its peer; 0 while it does.",
        labels,
        p.link_down_s.unwrap_or(0.0),
    );
    let with = |name: &'static str, value: &str| -> Vec<(String, String)> {
        let own = labels.iter().map(|(n, v)| ((*n).to_owned(), (*v).to_owned()));
        own.chain([(name.to_owned(), value.to_owned())]).collect()
    };
    let mut add = |name: &'static str, help: &'static str, labels: &[(String, String)], value: f64| {
        let labels: Vec<(&str, &str)> = labels.iter().map(|(n, v)| (n.as_str(), v.as_str())).collect();
        out.gauge(name, help, &labels, value);
    };
    for phase in PHASES {
        let labels = with("phase", &word(&phase));
        let now = p.outcome.is_open() && p.phase == phase;
        add(
            "godwit_vm_migration_phase",
            "1 for the phase that the move is in, 0 for the others.",
            &labels,
            f64::from(u8::from(now)),
        );
        // A phase that was entered twice counts as the last time.
        if let Some(times) = p.phases.iter().rev().find(|times| times.name == phase) {
            add(
                "godwit_vm_migration_phase_start_timestamp_seconds",
                "When the phase began.",
                &labels,
                seconds(times.started_unix_us),
            );
            if let Some(end) = times.ended_unix_us {
                add("godwit_vm_migration_phase_end_timestamp_seconds", "When the phase ended.", &labels, seconds(end));
            }
        }
    }
    if !p.outcome.is_open() {
        let labels = with("outcome", &word(&p.outcome));
        let end = p.phases.last().and_then(|phase| phase.ended_unix_us).unwrap_or(0);
        add("godwit_vm_migration_end_timestamp_seconds", "When the move ended, and how.", &labels, seconds(end));
    }
}

/// How many moves are how far: the words of KubeVirt's `kubevirt_vmi_migrations_in_*`.
pub fn stages<'a>(out: &mut Exposition, open: impl Iterator<Item = &'a MoveProgress>) {
    let (mut pending, mut scheduling, mut running, mut waiting) = (0, 0, 0, 0);
    for p in open.filter(|p| p.outcome.is_open()) {
        match (p.outcome, p.phase) {
            (Outcome::WaitsForPeer, _) => waiting += 1,
            // Nothing was heard of it yet, or not even that.
            (_, PhaseName::Reserve) if p.error.is_some() => pending += 1,
            (_, PhaseName::Reserve) => scheduling += 1,
            _ => running += 1,
        }
    }
    out.gauge(
        "godwit_vm_migrations_in_pending_phase",
        "Moves whose order could not be given yet.",
        &[],
        float(pending),
    );
    out.gauge(
        "godwit_vm_migrations_in_scheduling_phase",
        "Moves that are being checked and reserved for.",
        &[],
        float(scheduling),
    );
    out.gauge("godwit_vm_migrations_in_running_phase", "Moves that carry data, or hand over.", &[], float(running));
    out.gauge(
        "godwit_vm_migrations_in_waiting_phase",
        "Moves whose VM is paused until the peer is heard, or one side is claimed.",
        &[],
        float(waiting),
    );
}

/// Who says all this.
pub fn about(out: &mut Exposition, component: &str) {
    let labels = [("component", component), ("version", env!("CARGO_PKG_VERSION"))];
    out.gauge("godwit_build_info", "1, with what runs.", &labels, 1.0);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_of_one_metric_stand_together_and_labels_are_escaped() {
        let mut out = Exposition::default();
        out.gauge("b", "B \\ b", &[("x", "a\"\\\n")], 1.5);
        out.counter("a_total", "A", &[], 3.0);
        out.gauge("b", "B", &[("x", "c"), ("y", "d")], 2.0);
        let wanted = "# HELP a_total A\n# TYPE a_total counter\na_total 3\n\
            # HELP b B \\\\ b\n# TYPE b gauge\nb{x=\"a\\\"\\\\\\n\"} 1.5\nb{x=\"c\",y=\"d\"} 2\n";
        assert_eq!(out.text(), wanted);
    }
}
