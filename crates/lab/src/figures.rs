//! What is measured on a move while it is made, by whichever means it is made.
//!
//! Moments are kept as moments, and become the report's seconds and milliseconds only at the end.

use crate::report::{Kept, MemorySample, Outcome, Phase, Round, WanBytes};
use crate::truth::Difference;
use serde_json::Value;
use std::time::{Duration, Instant};

/// What was measured on a move.
#[derive(Debug)]
pub struct Figures {
    /// The command's moment; all times count from here.
    pub began: Instant,
    /// How it ended.
    pub outcome: Outcome,
    /// Why not well.
    pub why: Option<String>,
    /// When it ended.
    pub ended: Instant,
    /// The source's STOP event.
    pub stopped: Option<Instant>,
    /// The destination's RESUME event.
    pub resumed: Option<Instant>,
    /// Whether the destination was told to run: from then on the source must not, whatever was heard of it.
    pub released: bool,
    /// For how long the lab held the guest.
    pub held: Duration,
    /// Phases.
    pub phases: Vec<Phase>,
    /// Rounds.
    pub rounds: Vec<Round>,
    /// Curve.
    pub memory: Vec<MemorySample>,
    /// Pages sent as zeroes.
    pub zero_pages: u64,
    /// What the destination had from before.
    pub kept: Kept,
    /// What its mover counted for this move alone.
    pub counted: Option<WanBytes>,
    /// Pages of any kind that were sent, in bytes, unreduced.
    pub page_bytes: u64,
    /// Disk bytes that the mirror went through, unreduced; as QEMU counts them.
    pub disk_bytes: u64,
    /// Disk bytes within the memory stream, by QEMU's count.
    pub disk_in_stream: Option<u64>,
    /// What the RAM comparison found.
    pub ram: Option<Difference>,
    /// What the reader of the integrity checks has to know beside them.
    pub notes: Vec<String>,
    /// What was foretold.
    pub predicted: Option<crate::report::Predicted>,
    /// What the scenario did to it.
    pub incidents: Vec<String>,
}

impl Default for Figures {
    fn default() -> Self {
        Self::new()
    }
}

impl Figures {
    /// Of a move that begins now, and has failed unless something better is said.
    #[must_use]
    pub fn new() -> Self {
        let now = Instant::now();
        Self {
            began: now,
            outcome: Outcome::Failed,
            why: None,
            ended: now,
            stopped: None,
            resumed: None,
            released: false,
            held: Duration::ZERO,
            phases: vec![],
            rounds: vec![],
            memory: vec![],
            zero_pages: 0,
            kept: Kept::default(),
            counted: None,
            page_bytes: 0,
            disk_bytes: 0,
            disk_in_stream: None,
            ram: None,
            notes: vec![],
            predicted: None,
            incidents: vec![],
        }
    }

    /// Takes QEMU's count of disk bytes within the stream, which it tells only while they flow.
    pub fn note_disk(&mut self, said: &Value) {
        let now = said["disk"]["transferred"].as_u64();
        self.disk_in_stream = self.disk_in_stream.max(now);
    }

    /// Seconds since the command.
    #[must_use]
    pub fn seconds(&self) -> f64 {
        self.began.elapsed().as_secs_f64()
    }

    /// Ends the phase under way and begins the next.
    pub fn phase(&mut self, name: &str) {
        let now = self.seconds();
        self.end_phase(now);
        self.phases.push(Phase { name: name.into(), start_s: now, end_s: now });
    }

    /// Ends the phase under way, `now` seconds after the command.
    pub fn end_phase(&mut self, now: f64) {
        if let Some(last) = self.phases.last_mut() {
            last.end_s = now;
        }
    }
}
