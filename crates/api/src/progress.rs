//! How a move stands, as the nodes tell it and people read it.

use godwit_units::{BitRate, Bytes};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The phases of a move, in their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum PhaseName {
    /// Checks and reservation on both sides; the destination stages replica, endpoints and QEMU.
    Reserve,
    /// Blocks are copied while the guest runs.
    CopyDisk,
    /// Memory goes in rounds; writes are mirrored.
    Memory,
    /// The vCPUs are stopped; the last pages, device state and blocks go.
    Stop,
    /// From everything verified to the destination's start.
    HandOff,
    /// The guest runs at the destination, and pages of its memory follow it (post-copy). The source's QEMU is needed.
    Drain,
    /// The guest runs at the destination; what is left at the source is cleared away, the network is proved.
    Release,
    /// The guest runs at the destination, and blocks of its disks follow it (post-copy). The hosts that have them are needed.
    Fill,
}

/// How a move ended, or that it has not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// It goes on.
    Running,
    /// The VM runs at the destination.
    Completed,
    /// Taken back on request: the VM stays at the source.
    Cancelled,
    /// The VM runs at the destination, and that its network leads there could not be shown.
    NetworkUnproved,
    /// Failed: the VM is at the source, or where the error says.
    Failed,
    /// The VM is at the destination, and memory that was to follow it is lost. It stands still until it is started from its disks, or was
    /// started from them already; the error says which.
    MemoryLost,
    /// Neither side can tell alone: the VM is paused until the other side is heard, or somebody claims it.
    WaitsForPeer,
}

/// One phase.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Phase {
    /// Which.
    pub name: PhaseName,
    /// When it began: microseconds since 1970, by the clock of the host that tells.
    pub started_unix_us: u64,
    /// When it ended, unless it goes on.
    pub ended_unix_us: Option<u64>,
}

/// One pass over the guest's memory.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Round {
    /// Pages that QEMU sent, zero pages included.
    pub pages: u64,
    /// Zero pages among them.
    pub zero: u64,
    /// Pages that were sent before with the same contents, and did not travel again.
    pub unchanged: u64,
    /// Pages that lie on the VM's disks at the destination: they were referred to, and did not travel.
    #[serde(default)]
    pub on_disk: u64,
    /// Pages that the guest had dirtied by the end of the round.
    pub dirtied: u64,
    /// What the round brought onto the link, after encoding.
    pub wire: Bytes,
    /// Of that, references to disks.
    #[serde(default)]
    pub references: Bytes,
    /// Of that, pages that had been referred to, were not found as they were, and travelled after all.
    #[serde(default)]
    pub resent: Bytes,
    /// How long it took.
    pub seconds: f64,
    /// zstd's level by which pages were packed at its end; below 0 the faster the lower. None: from a node of an earlier version, which does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub level: Option<i32>,
    /// How far back zstd looked for what is alike, at its end: level 1 has three windows, and the shorter are the faster. None: from a node of an
    /// earlier version, which does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub window: Option<Bytes>,
}

/// Bytes of a move by what they were for, as the link counted them: both directions, UDP payload.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct MoveBytes {
    /// Memory and device state.
    pub memory: Bytes,
    /// Disk blocks.
    pub disk: Bytes,
    /// The rest.
    pub control: Bytes,
}

/// Disk side of a move.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct DiskProgress {
    /// To be copied in all, as known so far.
    pub total: Bytes,
    /// Copied.
    pub copied: Bytes,
    /// Still different at the destination.
    pub remaining: Bytes,
    /// Whether the disks are equal but for what is on its way, and the guest's writes go to the destination as they are made.
    pub synchronous: bool,
    /// Blocks that the destination had from before, and that were not sent: from an earlier try, an earlier stay or a copy
    /// that is kept there.
    #[serde(default)]
    pub held: Bytes,
    /// What is not at the destination, and follows the VM there (post-copy).
    #[serde(default)]
    pub absent: Bytes,
}

/// How a move stands, told by one of its two nodes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct MoveProgress {
    /// How it ended, or that it has not.
    pub outcome: Outcome,
    /// Where it is.
    pub phase: PhaseName,
    /// The phases so far.
    pub phases: Vec<Phase>,
    /// Bytes on the link so far.
    pub bytes: MoveBytes,
    /// QEMU's own stream so far: what would have travelled without Godwit.
    pub raw: Bytes,
    /// Zero pages so far.
    pub zero_pages: u64,
    /// Memory that the destination had from an earlier try, and that was not sent.
    #[serde(default)]
    pub held_memory: Bytes,
    /// Memory that other VMs of the trust domain had at the destination: named, not sent.
    #[serde(default)]
    pub neighbour_memory: Bytes,
    /// The rounds so far; the last one may be going on.
    pub rounds: Vec<Round>,
    /// The disks, all together.
    pub disk: DiskProgress,
    /// What QEMU says is left of memory.
    pub memory_remaining: Bytes,
    /// How fast the guest dirties memory, bytes a second.
    pub dirty_rate: Bytes,
    /// How fast bytes leave now.
    pub rate: BitRate,
    /// When the move is expected to end: microseconds since 1970. Never earlier than now; revised only with reason.
    pub predicted_end_unix_us: Option<u64>,
    /// The limit in force.
    pub limit: Option<BitRate>,
    /// When the vCPUs stopped at the source (QEMU's STOP event).
    pub stopped_unix_us: Option<u64>,
    /// When they ran at the destination (QEMU's RESUME event).
    pub resumed_unix_us: Option<u64>,
    /// The pause as the source measured it by its own clock, half a round trip taken off: independent of the hosts' clocks.
    /// Only where the source's node was restarted within the pause, the difference of the two times above.
    pub downtime_ms: Option<f64>,
    /// How long after the start the network was proved to lead to the new place.
    pub network_proved_ms: Option<f64>,
    /// What went wrong, or is waited for.
    pub error: Option<String>,
    /// The link: seconds since the peer was last heard, while it is down.
    pub link_down_s: Option<f64>,
    /// The pause as it was expected when the guest was stopped, or, before, if it were stopped now.
    #[serde(default)]
    pub predicted_downtime_ms: Option<f64>,
    /// How fast memory's bytes leave now.
    #[serde(default)]
    pub memory_rate: BitRate,
    /// How fast the disks' bytes leave now.
    #[serde(default)]
    pub disk_rate: BitRate,
    /// What was decided, tried again and met with, in order of time.
    #[serde(default)]
    pub trace: Trace,
}

/// Who tells of something in a [`Trace`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Teller {
    /// The controller.
    Controller,
    /// The source's node.
    Source,
    /// The destination's node.
    Destination,
}

/// What a line of a [`Trace`] is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum NoteKind {
    /// Something was decided, with its reason.
    Decision,
    /// Something is tried again.
    Retry,
    /// The link broke, or came back.
    Link,
    /// The hand-off went from one state to another.
    HandOff,
}

/// One line of a [`Trace`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Note {
    /// When: microseconds since 1970, by the clock of who tells.
    pub at_unix_us: u64,
    /// Who tells.
    pub by: Teller,
    /// What it is about.
    pub kind: NoteKind,
    /// What.
    pub text: String,
}

/// What happened in a move, in order of time, in bounded form.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Trace {
    /// The notes.
    pub notes: Vec<Note>,
    /// Notes that were left out of the middle, because there were too many.
    pub left_out: u64,
}

impl Trace {
    /// Notes of one teller that are kept: a move has some twenty, one whose link comes and goes as many as it likes.
    pub const MOST: usize = 96;
    /// Longest text of a note, in characters: a reason, not a log.
    pub const LONGEST: usize = 240;
    /// How many of the first notes are always kept: how a move began explains most of what comes later.
    const FIRST: usize = 32;

    /// Adds a note; where there are too many, the oldest but the first ones goes.
    pub fn note(&mut self, at_unix_us: u64, by: Teller, kind: NoteKind, text: impl Into<String>) {
        let mut text: String = text.into();
        if let Some((end, _)) = text.char_indices().nth(Self::LONGEST) {
            text.truncate(end);
        }
        self.notes.push(Note { at_unix_us, by, kind, text });
        if self.notes.len() > Self::MOST {
            self.notes.remove(Self::FIRST);
            self.left_out += 1;
        }
    }

    /// What is told now, and what was told `before` by those who tell nothing now, or had told before they were restarted; in order
    /// of time.
    #[must_use]
    pub fn merge(before: &Self, told: &[&Self]) -> Self {
        let firsts: Vec<&Note> = told.iter().filter_map(|t| t.notes.first()).collect();
        let is_old = |n: &&Note| firsts.iter().all(|first| first.by != n.by || n.at_unix_us < first.at_unix_us);
        let kept = before.notes.iter().filter(is_old);
        let mut notes: Vec<Note> = kept.chain(told.iter().flat_map(|t| &t.notes)).cloned().collect();
        notes.sort_by_key(|n| n.at_unix_us);
        let left_out = told.iter().map(|t| t.left_out).sum::<u64>().max(before.left_out);
        Self { notes, left_out }
    }
}

impl Outcome {
    /// Whether the move has not ended.
    #[must_use]
    pub const fn is_open(self) -> bool {
        matches!(self, Self::Running | Self::WaitsForPeer)
    }

    /// Whether the VM is at the destination.
    #[must_use]
    pub const fn has_arrived(self) -> bool {
        matches!(self, Self::Completed | Self::NetworkUnproved | Self::MemoryLost)
    }
}

impl MoveProgress {
    /// The pause by the two hosts' clocks, for where the source could not measure it by its own.
    #[must_use]
    pub fn pause_by_clocks_ms(&self) -> Option<f64> {
        let (stopped, resumed) = (self.stopped_unix_us?, self.resumed_unix_us?);
        #[allow(clippy::cast_precision_loss, reason = "a pause has less than 2^52 microseconds")]
        resumed.checked_sub(stopped).map(|us| us as f64 / 1000.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_is_bounded_and_keeps_its_beginning_and_its_end() {
        let mut trace = Trace::default();
        for n in 0..1000 {
            trace.note(n, Teller::Source, NoteKind::Link, format!("{n} {}", "ä".repeat(1000)));
        }
        assert_eq!(trace.notes.len(), Trace::MOST);
        assert_eq!(trace.left_out, 1000 - Trace::MOST as u64);
        assert!(trace.notes.iter().all(|n| n.text.chars().count() <= Trace::LONGEST));
        assert_eq!((trace.notes[0].at_unix_us, trace.notes[31].at_unix_us), (0, 31));
        assert_eq!(trace.notes.last().map(|n| n.at_unix_us), Some(999));
    }

    #[test]
    fn what_is_told_again_is_not_there_twice_and_who_is_silent_is_not_forgotten() {
        let (mut source, mut there) = (Trace::default(), Trace::default());
        source.note(1, Teller::Source, NoteKind::Decision, "a");
        there.note(2, Teller::Destination, NoteKind::HandOff, "b");
        let both = Trace::merge(&Trace::default(), &[&source, &there]);
        assert_eq!(Trace::merge(&both, &[&source, &there]), both);
        source.note(3, Teller::Source, NoteKind::Decision, "c");
        let texts: Vec<String> = Trace::merge(&both, &[&source]).notes.into_iter().map(|n| n.text).collect();
        assert_eq!(texts, ["a", "b", "c"]);
        let mut restarted = Trace::default();
        restarted.note(5, Teller::Destination, NoteKind::HandOff, "d");
        let texts: Vec<String> = Trace::merge(&both, &[&restarted]).notes.into_iter().map(|n| n.text).collect();
        assert_eq!(texts, ["a", "b", "d"]);
    }
}
