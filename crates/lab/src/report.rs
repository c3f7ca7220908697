//! What a run measured: the report, as JSON.
//!
//! Every figure is measured where it happens: bytes by the WAN emulator, the pause by the hypervisors' own events, the
//! outage by the client. What was not measured is `null`, never a default that looks like a result.

use crate::scenario::Baseline;
use serde::{Deserialize, Serialize};

/// One run of a scenario.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Report {
    /// The scenario's name.
    pub name: String,
    /// When the run began, seconds since 1970 (UTC).
    pub started_unix_s: u64,
    /// The machine and the programs that the figures belong to.
    pub host: Host,
    /// The WAN as the scenario asked for it (its default path).
    pub wan: WanFigures,
    /// Moves made by Godwit.
    pub moves: Vec<MoveReport>,
    /// The same moves without Godwit.
    pub baselines: Vec<BaselineReport>,
    /// What the reader has to know beside the figures.
    pub warnings: Vec<String>,
    /// Why it is not a whole run: a pass that could not be built, a step that could not be made, a guest that was lost or hurt outside of a move.
    /// What had been measured until then is here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub broken: Option<String>,
    /// What guests' own reads and writes took: the steps `io`.
    #[serde(default)]
    pub windows: Vec<IoWindow>,
    /// Moves of components, by Godwit's pass.
    #[serde(default)]
    pub components: Vec<ComponentReport>,
    /// What clients of applications saw, each during all of a pass.
    #[serde(default)]
    pub applications: Vec<Application>,
    /// What happened in passes: moves of VMs and of components.
    #[serde(default)]
    pub marks: Vec<Mark>,
    /// What VMs that moved in one order come to.
    #[serde(default)]
    pub together: Vec<TogetherReport>,
    /// How fast wires and other ways were.
    #[serde(default)]
    pub speeds: Vec<SpeedWindow>,
    /// What passed between sites that an extender joins, in Godwit's pass.
    #[serde(default)]
    pub extenders: Vec<ExtenderReport>,
    /// Frames that were recorded: the steps `capture`.
    #[serde(default)]
    pub captures: Vec<CaptureReport>,
    /// What guests of baselines were seen to write: the steps `profile`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub profiles: Vec<ProfileReport>,
    /// What flows had while something was killed or cut, in Godwit's pass; the first one is nothing, for comparison.
    #[serde(default)]
    pub incidents: Vec<IncidentReport>,
}

/// Which pages of a guest changed, watched from outside.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ProfileReport {
    /// The VM.
    pub vm: String,
    /// When it began, seconds from the first step.
    pub at_s: f64,
    /// Pages that changed in a second, on average.
    pub changed_per_s: f64,
    /// What all looks took together, seconds.
    pub looking_s: f64,
    /// The log of dirtied pages (`godwit_predict::log`), in hexadecimal.
    pub log: String,
}

/// What was killed and cut, and which VMs moved, from one step `whole` to the next.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct IncidentReport {
    /// What was done, in words; nothing, where flows went undisturbed.
    pub what: Vec<String>,
    /// When, seconds from the first step.
    pub at_s: f64,
    /// Until when flows were looked at: the next incident, or the end.
    pub until_s: f64,
    /// How long after the first deed all was well again, and stayed so: every tunnel up, every host answering, nothing that `godwit net check`
    /// finds. Seconds, to the end of the first look that found it so (a look takes about one), and not
    /// before the last number of a flow that was lost. Nothing where it did not come to that, or nobody waited for it.
    pub whole_s: Option<f64>,
    /// The flows.
    pub flows: Vec<FlowSeen>,
}

/// A flow in a stretch of time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FlowSeen {
    /// From where to where.
    pub flow: String,
    /// As what.
    pub kind: crate::scenario::FlowKind,
    /// Numbers whose answers were to come in it; of a session only those that came back.
    pub sent: u64,
    /// Those of them that never came back; nothing of a session, which sends again.
    pub lost: Option<u64>,
    /// Those of the lost that no pause of a guest's explains: sent neither while one stood still in a move, nor so shortly before that they or
    /// their answers were on their way when it stopped (the flow's usual time there and back).
    pub lost_awake: Option<u64>,
    /// The longest time without an answer, as far as it lies in the stretch, ms.
    pub silent_ms: f64,
    /// When that was over, seconds from the stretch's beginning; nothing where it never was.
    pub back_s: Option<f64>,
    /// How the session broke, by the end of the pass.
    pub broke: Option<String>,
}

/// What passed between two sites that an extender joins, from when it was up. The WAN emulator has counted, which all of it passes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ExtenderReport {
    /// The sites.
    pub between: [String; 2],
    /// Packets of tunnels, both directions.
    pub tunnel_packets: u64,
    /// Their bytes.
    pub tunnel_bytes: u64,
    /// Packets of wires that were to be seen outside tunnels, whether they arrived or not: none, if all is well.
    pub clear_packets: u64,
}

/// A recording of what passed wires.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CaptureReport {
    /// What the scenario calls it.
    pub name: String,
    /// The VM or component.
    pub of: String,
    /// When the command was given, seconds from the first step.
    pub at_s: f64,
    /// For how long, seconds.
    pub s: u32,
    /// The files, a wire's and a host's each.
    pub files: Vec<CaptureFile>,
}

/// A file of a recording, for tcpdump and Wireshark.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CaptureFile {
    /// Where it is.
    pub file: String,
    /// The wire's number.
    pub wire: u32,
    /// The host that recorded it.
    pub host: String,
    /// Frames in it.
    pub frames: u64,
    /// Bytes that these had.
    pub bytes: u64,
    /// When the first one passed, and the last, seconds from the first step.
    pub seen_s: Option<[f64; 2]>,
}

/// A window of a measurement of wires.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SpeedWindow {
    /// What was measured.
    pub way: String,
    /// Links side by side.
    pub links: u8,
    /// Switches between the ends, where it is a chain.
    pub chain: u8,
    /// Which round; its windows are compared with each other.
    pub round: u32,
    /// TCP over all links at once, Mbit/s.
    pub mbit: f64,
    /// Frames of UDP with 1400 bytes each over one link.
    pub frames_per_s: f64,
    /// What the whole machine did besides being idle, for each frame, us.
    pub cpu_us_per_frame: Option<f64>,
    /// A packet there and back over one idle link, the median, us.
    pub us: f64,
}

/// A component's move.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ComponentReport {
    /// Which.
    pub component: String,
    /// Its site before.
    pub from: String,
    /// Where it was to go.
    pub to: String,
    /// How it ended.
    pub outcome: Outcome,
    /// Why it did not complete.
    pub why: Option<String>,
    /// When the command was given, seconds from the first step.
    pub at_s: f64,
    /// Until the command had ended, seconds.
    pub total_s: f64,
    /// For how long its ports were isolated on both hosts, ms, as its source saw it.
    pub isolated_ms: Option<f64>,
    /// Addresses that it had learnt, and that went along.
    pub stations: u64,
    /// Tracked connections that went along.
    pub flows: u64,
}

/// What clients saw of an application.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Application {
    /// In whose pass: `godwit`, or a baseline's name. Older reports do not say; theirs are Godwit's.
    #[serde(default)]
    pub by: String,
    /// In which repeat, from 0.
    #[serde(default)]
    pub repeat: u32,
    /// The VM that they ask.
    pub vm: String,
    /// The site that they are in.
    pub from: String,
    /// How many there are, each with one request under way.
    pub sessions: u32,
    /// Between an answer and the next request, ms.
    pub think_ms: u32,
    /// How many tiers made the answers.
    pub tiers: u32,
    /// Requests answered right within two seconds.
    pub good: u64,
    /// Requests answered right after that.
    pub late: u64,
    /// Requests that were not answered.
    pub failed: u64,
    /// Requests answered with something else than before, or altered.
    pub wrong: u64,
    /// The first of these, in words.
    pub first_error: Option<String>,
    /// The longest that a request took, seconds.
    pub longest_s: f64,
    /// Length of the points' intervals, seconds.
    pub interval_s: f64,
    /// Interval by interval.
    pub points: Vec<ApplicationPoint>,
}

impl Application {
    /// Whether it was seen in Godwit's pass.
    #[must_use]
    pub fn is_godwits(&self) -> bool {
        matches!(self.by.as_str(), "" | "godwit")
    }

    /// The pass that it was seen in, to be put behind its name; nothing where the report does not say.
    #[must_use]
    pub fn pass(&self) -> String {
        match (self.by.as_str(), self.repeat) {
            ("", _) => String::new(),
            (by, 0) => format!(" by {by}"),
            (by, repeat) => format!(" by {by} #{}", repeat + 1),
        }
    }
}

/// An interval.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ApplicationPoint {
    /// When it began, seconds from the first step.
    pub t_s: f64,
    /// Requests that ended in it, by how they did.
    pub good: u32,
    /// As in [`Application`].
    pub late: u32,
    /// As in [`Application`].
    pub failed: u32,
    /// As in [`Application`].
    pub wrong: u32,
    /// How long they took, the median, ms; nothing where none ended.
    pub median_ms: Option<f64>,
    /// And the longest, ms.
    pub longest_ms: Option<f64>,
}

/// A stretch of a pass in which something moved; seconds from the first step.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Mark {
    /// As in [`Application`].
    #[serde(default)]
    pub by: String,
    /// As in [`Application`].
    #[serde(default)]
    pub repeat: u32,
    /// The VM or component.
    pub what: String,
    /// Where it went.
    pub to: String,
    /// When it began.
    pub start_s: f64,
    /// When it was there.
    pub end_s: f64,
    /// When a VM stood still, from and until.
    #[serde(default)]
    pub stop_s: Option<[f64; 2]>,
}

/// VMs that moved in one order; each has its [`MoveReport`] besides.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TogetherReport {
    /// By which means: `godwit`, or a baseline's name.
    pub by: String,
    /// The VMs, as they were named.
    pub vms: Vec<String>,
    /// Their site before.
    pub from: String,
    /// Where they were to go.
    pub to: String,
    /// From the order until the last of them ran at the destination, less what the lab held guests to compare them, seconds.
    pub total_s: f64,
    /// Bytes on the path between the two sites, from before the order until the last move had ended.
    pub bytes: WanBytes,
    /// How these came: seconds from the order, and bytes of memory and disks by then; some dozens of points.
    #[serde(default)]
    pub curve: Vec<(f64, u64)>,
}

impl Report {
    /// Whether it is whole, and nothing is wrong that the scenario did not ask for. A baseline need not end, and its clients may wait.
    #[must_use]
    pub fn is_well(&self) -> bool {
        let moves = || self.moves.iter().chain(self.baselines.iter().map(|baseline| &baseline.figures));
        let disturbed = moves().any(|figures| !figures.incidents.is_empty());
        self.broken.is_none()
            && moves().all(MoveReport::is_well)
            && self.moves.iter().all(|figures| !figures.timed_out || figures.may_fail())
            && self.components.iter().all(|moved| moved.outcome == Outcome::Completed)
            && self.extenders.iter().all(|extender| extender.clear_packets == 0)
            && self.incidents.iter().all(|incident| incident.flows.iter().all(|flow| flow.broke.is_none()))
            && (self.applications.iter().filter(|seen| seen.is_godwits()))
                .all(|seen| seen.wrong == 0 && (disturbed || seen.failed == 0))
    }
}

/// The machine that the figures belong to.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Host {
    /// `uname -r`.
    pub kernel: String,
    /// First line of the hypervisor's `--version`.
    pub qemu: String,
    /// `kvm` or `tcg`.
    pub accel: String,
    /// Logical processors.
    pub cpus: usize,
}

/// Figures of a WAN path.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct WanFigures {
    /// Mbit/s, each direction.
    pub rate_mbit: f64,
    /// ms.
    pub rtt_ms: f64,
    /// ms.
    pub jitter_ms: f64,
    /// 0 to 1.
    pub loss: f64,
    /// ms.
    pub queue_ms: f64,
}

/// How a move ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// The VM runs at the destination.
    Completed,
    /// Given up on request or at the time limit; the VM runs at the source.
    Cancelled,
    /// Something broke; `why` says what, and where the VM is.
    Failed,
}

/// One move.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct MoveReport {
    /// The VM.
    pub vm: String,
    /// Its site before.
    pub from: String,
    /// Its site after.
    pub to: String,
    /// How the disk came along, as asked (`mirror`, ...).
    pub strategy: String,
    /// How it ended.
    pub outcome: Outcome,
    /// Why it did not complete, or what was amiss although it did.
    pub why: Option<String>,
    /// Whether it was cancelled and no step of the scenario had asked for that: at the time limit.
    #[serde(default)]
    pub timed_out: bool,
    /// From the command to the VM's running at the destination (its RESUME event), in seconds; of a move that did not get so
    /// far, to its end. Contains `held_ms`.
    pub total_s: f64,
    /// From the command to the end of the move, with the source cleared away, in seconds.
    #[serde(default)]
    pub ended_s: Option<f64>,
    /// vCPUs stopped, in ms: from the source's STOP event to the destination's RESUME event, less `held_ms`.
    pub downtime_ms: Option<f64>,
    /// How long the lab itself held the stopped guest to compare its RAM at both ends, in ms. Not part of
    /// `downtime_ms`, but within `outage_ms`.
    pub held_ms: f64,
    /// Longest time without an answer at the client, in ms; over all clients of the VM.
    pub outage_ms: Option<f64>,
    /// Bytes on the WAN between the two sites: with what others brought meanwhile over the same path.
    pub bytes: WanBytes,
    /// What Godwit itself counted for this move alone, from its own end of the link: UDP payload. Nothing of a baseline's.
    #[serde(default)]
    pub counted: Option<WanBytes>,
    /// Sent before the move began.
    pub precached_bytes: u64,
    /// What a sender without any reduction would have sent: pages (zero ones too) and disk blocks, in bytes.
    pub raw_bytes: u64,
    /// Pages sent as zeroes, over all rounds.
    pub zero_pages: u64,
    /// What did not have to be sent, because the destination had it from an earlier try or stay, as Godwit says.
    #[serde(default)]
    pub kept: Kept,
    /// Share of non-zero guest pages just before the move, 0 to 1.
    pub nonzero_share: Option<f64>,
    /// Pre-copy rounds.
    pub rounds: Vec<Round>,
    /// What happened when, in seconds from the command.
    pub phases: Vec<Phase>,
    /// What was foretold; nothing where nobody foretold.
    pub predicted: Option<Predicted>,
    /// The truth checks.
    pub integrity: Integrity,
    /// What the scenario did to it on purpose, and where: `at sealed: killing the node`.
    #[serde(default)]
    pub incidents: Vec<String>,
    /// What clients of the application on this VM saw, one by one, from 20 s before the command on. Ledgers keep it.
    #[serde(default)]
    pub requests: Vec<RequestPoint>,
    /// What the processes of both sites have had of the processors, from the command to the move's end.
    #[serde(default)]
    pub processes: Vec<ProcessTime>,
    /// Curves for the plot.
    #[serde(default)]
    pub series: Series,
}

impl MoveReport {
    /// `total_s` less what the lab held the guest: what the move itself took, in seconds.
    #[must_use]
    pub fn took_s(&self) -> f64 {
        self.total_s - self.held_ms / 1e3
    }

    /// Whether its VM is unhurt, and it did not fail or might. That it was given up at its time limit is another question.
    #[must_use]
    pub fn is_well(&self) -> bool {
        self.integrity.intact() && (self.outcome != Outcome::Failed || self.may_fail())
    }

    /// A move may fail to which something was done on purpose, if it was looked at afterwards that its VM runs where it should.
    fn may_fail(&self) -> bool {
        !self.incidents.is_empty() && self.integrity.one_place == Some(true)
    }
}

/// Time on a processor of all processes of a site that run one program. A QEMU's has in it what its guest does where that is emulated.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ProcessTime {
    /// The site.
    pub site: String,
    /// What the kernel calls it: at most 15 characters.
    pub program: String,
    /// Seconds, user and system.
    pub s: f64,
}

/// A move made without Godwit.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct BaselineReport {
    /// Which means.
    pub name: Baseline,
    /// When it stops the guest.
    pub stop_rule: String,
    /// The rest.
    #[serde(flatten)]
    pub figures: MoveReport,
}

/// Bytes that crossed the WAN between the two sites during the move, both directions, as the emulator counted them:
/// layer 2, without preamble and gap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WanBytes {
    /// The memory stream.
    pub memory: u64,
    /// Disk blocks.
    pub disk: u64,
    /// All else: control, clients, ARP.
    pub other: u64,
    /// Whether memory and disk shared one connection, so that only the hypervisor's own count could tell them apart.
    #[serde(default)]
    pub split_by_hypervisor: bool,
}

impl WanBytes {
    /// All of it.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.memory + self.disk + self.other
    }
}

/// Bytes of guest and disks that the destination had already.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Kept {
    /// Memory.
    pub memory: u64,
    /// Disk blocks.
    pub disk: u64,
    /// Memory that lies on disks there, and was referred to.
    #[serde(default)]
    pub on_disks: u64,
    /// Memory that other VMs, which had moved before, had brought.
    #[serde(default)]
    pub of_others: u64,
}

/// In [`Round::bytes_by_encoding`]: references to pages that lie on disks at the destination.
pub const REFERENCES: &str = "disk references";

/// One pre-copy round.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Round {
    /// Pages sent in this round.
    pub sent: u64,
    /// Pages dirtied during this round, found at its end.
    pub dirtied: u64,
    /// Bytes handed to the network, by encoding (`normal`, `zero`, `xbzrle`, `zstd`, ...).
    pub bytes_by_encoding: std::collections::BTreeMap<String, u64>,
    /// How long it took.
    pub seconds: f64,
    /// zstd's level by which Godwit packed pages at its end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub level: Option<i32>,
    /// How many bytes zstd looked back over at its end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub window: Option<u64>,
}

/// A named stretch of a move.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Phase {
    /// `reserve`, `disk`, `memory`, `stop`, `run`, ...
    pub name: String,
    /// Seconds from the command.
    pub start_s: f64,
    /// Seconds from the command.
    pub end_s: f64,
}

/// A prediction, kept for comparing.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Predicted {
    /// Seconds.
    pub total_s: f64,
    /// ms.
    pub downtime_ms: f64,
    /// On the WAN.
    pub bytes: u64,
    /// Between which times the first of them was said to lie.
    #[serde(default)]
    pub total_between_s: Option<[f64; 2]>,
    /// The same of the pause.
    #[serde(default)]
    pub downtime_between_ms: Option<[f64; 2]>,
    /// How the guest was modelled.
    #[serde(default)]
    pub model: Option<String>,
    /// How many past predictions had corrected it.
    #[serde(default)]
    pub corrected_by: u32,
    /// The time as it was before these did.
    #[serde(default)]
    pub uncorrected_s: Option<f64>,
    /// What it took the link to carry.
    #[serde(default)]
    pub goodput_mbit: Option<f64>,
    /// What it took a move to need besides its bytes, while the guest runs.
    #[serde(default)]
    pub before_s: Option<f64>,
}

/// The truth checks; `null` is "not checked", with the reason in `notes`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Integrity {
    /// The guest's own check of every page of its memory load.
    pub memory_ok: Option<bool>,
    /// The guest's own check of every acknowledged record, and the replicas' comparison; one that broke off has failed, unless
    /// something was done to the move on purpose.
    pub disk_ok: Option<bool>,
    /// Every echo came back unaltered, in order, on one session.
    pub tcp_ok: Option<bool>,
    /// RAM at the destination equals the stopped source's, page for page.
    pub ram_equal: Option<bool>,
    /// Incompressible data on the disk appeared as the disk's WAN bytes, or was there before: nothing travelled beside the WAN.
    pub wan_carried_disk: Option<bool>,
    /// Seen from outside, the VM runs in exactly one place, or in none where that was expected; a step `expect` looks.
    #[serde(default)]
    pub one_place: Option<bool>,
    /// Workloads (compile, database) went on after the move, and what they made is what it should be; `null` where there is none.
    #[serde(default)]
    pub work_ok: Option<bool>,
    /// What was found, and what could not be checked and why.
    pub notes: Vec<String>,
}

impl Integrity {
    /// Whether no check failed. What was not checked does not count.
    #[must_use]
    pub fn intact(&self) -> bool {
        [self.memory_ok, self.disk_ok, self.tcp_ok, self.ram_equal, self.wan_carried_disk, self.one_place, self.work_ok]
            .into_iter()
            .all(|check| check != Some(false))
    }
}

/// Curves over time; `t_s` counts from the move's command and may be negative.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Series {
    /// Cumulative bytes on the path between the two sites, both directions.
    pub wan: Vec<WanSample>,
    /// What the hypervisor said of the memory stream.
    pub memory: Vec<MemorySample>,
    /// Round trips seen by the client.
    pub echo: Vec<EchoPoint>,
    /// The guest's own disk I/O and work.
    #[serde(default)]
    pub io: Vec<IoPoint>,
}

/// A request of a client; as `[t_s, ms, answered]`, since there are thousands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(from = "(f64, f64, bool)", into = "(f64, f64, bool)")]
pub struct RequestPoint {
    /// When it ended, seconds from the command.
    pub t_s: f64,
    /// How long it took, ms.
    pub ms: f64,
    /// Whether it was answered, and right.
    pub answered: bool,
}

impl From<(f64, f64, bool)> for RequestPoint {
    fn from((t_s, ms, answered): (f64, f64, bool)) -> Self {
        Self { t_s, ms, answered }
    }
}

impl From<RequestPoint> for (f64, f64, bool) {
    /// To the tenth of a millisecond.
    fn from(point: RequestPoint) -> Self {
        ((point.t_s * 1e4).round() / 1e4, (point.ms * 10.0).round() / 10.0, point.answered)
    }
}

/// An interval of the guest's own clock: what its disks did, as its kernel counts it, and what its loads did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct IoPoint {
    /// When it ended, seconds from the command.
    pub t_s: f64,
    /// How long it was by the guest's clock.
    pub seconds: f64,
    /// KiB read.
    pub read_kib: u64,
    /// KiB written.
    pub write_kib: u64,
    /// What a read took, on average, ms; nothing where none ended.
    pub read_ms: Option<f64>,
    /// What a write took, on average, ms.
    pub write_ms: Option<f64>,
    /// What workloads got done: objects compiled, transactions.
    pub units: u64,
    /// Of the disk load's own reads and writes, the median, ms.
    pub p50_ms: Option<f64>,
    /// And the longest, ms.
    pub longest_ms: Option<f64>,
}

/// What a guest's disk load saw over a while.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct IoWindow {
    /// As in [`Application`].
    #[serde(default)]
    pub by: String,
    /// As in [`Application`].
    #[serde(default)]
    pub repeat: u32,
    /// The VM.
    pub vm: String,
    /// What the scenario calls it.
    pub name: String,
    /// How long it was by the guest's clock.
    pub seconds: f64,
    /// Reads and writes of the load.
    pub operations: u64,
    /// KiB that the disks read.
    pub read_kib: u64,
    /// KiB that the disks wrote.
    pub write_kib: u64,
    /// What workloads got done.
    pub units: u64,
    /// The median of the load's reads and writes, ms.
    pub p50_ms: Option<f64>,
    /// 90 % of them took no longer, ms.
    pub p90_ms: Option<f64>,
    /// 95 %, ms.
    pub p95_ms: Option<f64>,
    /// 99 %, ms.
    pub p99_ms: Option<f64>,
    /// 99.9 %, ms.
    pub p999_ms: Option<f64>,
    /// The longest, ms.
    pub longest_ms: Option<f64>,
}

/// Cumulative bytes by class.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct WanSample {
    /// Seconds from the command.
    pub t_s: f64,
    /// Memory stream.
    pub memory: u64,
    /// Disk blocks.
    pub disk: u64,
    /// All else on the path.
    pub other: u64,
}

/// The memory stream at one moment.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct MemorySample {
    /// Seconds from the command.
    pub t_s: f64,
    /// Bytes still to send in this round.
    pub remaining: u64,
    /// Pages a second that the guest dirties, as the hypervisor estimates.
    pub dirty_pages_per_s: f64,
}

/// One echo.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct EchoPoint {
    /// When it came back, seconds from the command.
    pub t_s: f64,
    /// Its round trip in ms.
    pub rtt_ms: f64,
}
