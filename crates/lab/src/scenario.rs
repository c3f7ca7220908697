//! Scenario files: what a lab run builds, does and checks.
//!
//! A scenario is TOML and an interface: keys may be added, never renamed. Reading one has two halves. Serde
//! refuses unknown keys, wrong types and unknown words; [`Scenario::parse`] then refuses what only makes sense
//! together: a step that names a VM that is not there, a disk too small for its data. Both kinds of error carry
//! the line and the key, because a scenario that is half understood measures something nobody asked for.

use godwit_load::protocol::LoadSpec;
use godwit_units::{BitRate, Bytes};
use godwit_wan::PathSpec;
use serde::{Deserialize, Serialize};
use std::collections::HashSet;
use std::fmt;
use std::ops::Range;
use std::path::Path;
use std::time::Duration;
use toml::Spanned;

/// Data sets (MiB of files, records and random bytes) for which the set-up makes an image.
pub const DATA_SETS_MIB: [u32; 3] = [64, 256, 1024];

/// Most sites in a scenario: every pair is joined by a path with two forwarding threads of its own.
pub const MAX_SITES: usize = 8;

/// Most VMs in a scenario; the guests share the machine's memory.
pub const MAX_VMS: usize = 16;

/// A whole scenario, checked: every name that it uses exists.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scenario {
    /// Names the run in reports and ledgers.
    pub name: Spanned<String>,
    /// The same moves again without Godwit, once for each of these.
    #[serde(default)]
    pub baseline: Vec<Baseline>,
    /// Whether Godwit itself makes the moves (the report's `moves`); `false` runs the baselines only.
    #[serde(default = "yes")]
    pub godwit: bool,
    /// How many times everything is run; each time from fresh sites and guests.
    #[serde(default = "one")]
    pub repeat: u32,
    /// Seeds the loss and jitter of the WAN and the guests' loads.
    #[serde(default = "default_seed")]
    pub seed: u64,
    /// The share of guest memory, in percent, that is non-zero before the first step. DESIGN: 85.
    #[serde(default = "default_warm")]
    pub warm_percent: Spanned<u8>,
    /// Seconds after which a move that has not ended is cancelled.
    #[serde(default = "default_move_timeout")]
    pub move_timeout_s: u64,
    /// The WAN between the sites.
    pub wan: Wan,
    /// Clouds, regions or data centres; one host each.
    pub site: Vec<Site>,
    /// The guests.
    #[serde(default)]
    pub vm: Vec<Vm>,
    /// What happens, in order.
    #[serde(skip)]
    pub step: Vec<Step>,
    /// The steps as they were written. [`Scenario::parse`] makes [`Self::step`] of them, because only there an error
    /// about a whole step still knows its line.
    #[serde(default, rename = "step")]
    raw_step: Vec<Spanned<RawStep>>,
}

/// How a move is made without Godwit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Baseline {
    /// Plain pre-copy, the disk by an NBD mirror.
    Qemu,
    /// Plain pre-copy under Xen's stop rule, the disk by an NBD mirror.
    QemuXen,
    /// QEMU's old block migration (`migrate -b`): disk and memory in one stream.
    QemuBlock,
    /// Pre-copy with the XBZRLE delta cache, the disk by an NBD mirror.
    QemuXbzrle,
    /// Pre-copy over several connections, each compressed with zstd, the disk by an NBD mirror.
    QemuMultifdZstd,
}

impl fmt::Display for Baseline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Qemu => "qemu",
            Self::QemuXen => "qemu-xen",
            Self::QemuBlock => "qemu-block",
            Self::QemuXbzrle => "qemu-xbzrle",
            Self::QemuMultifdZstd => "qemu-multifd-zstd",
        })
    }
}

/// The WAN between every two sites, with exceptions by path.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Wan {
    /// Bit rate of each direction, in Mbit/s.
    pub rate_mbit: Spanned<f64>,
    /// Round-trip time in ms; each direction gets half.
    pub rtt_ms: Spanned<f64>,
    /// Additional delay, uniform between zero and this, in ms, a direction.
    #[serde(default = "zero")]
    pub jitter_ms: Spanned<f64>,
    /// Probability that a packet is lost, 0 to 1, a direction.
    #[serde(default = "zero")]
    pub loss: Spanned<f64>,
    /// Length of the drop-tail queue, in ms at the rate.
    #[serde(default = "default_queue")]
    pub queue_ms: Spanned<f64>,
    /// Exceptions: paths with figures of their own.
    #[serde(default)]
    pub path: Vec<PathChange>,
}

/// A site: one host in a network and a mount namespace of its own.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Site {
    /// Lower-case letters, digits and `-`; at most 24 characters (it becomes part of file names).
    pub name: Spanned<String>,
}

/// A guest.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Vm {
    /// Lower-case letters, digits and `-`; at most 24 characters.
    pub name: Spanned<String>,
    /// Where it runs at first.
    pub site: Spanned<String>,
    /// What it boots.
    #[serde(default)]
    pub image: Image,
    /// RAM in MiB. Under TCG 8 KiB are added (see `guest`).
    pub memory_mib: Spanned<u32>,
    /// Virtual CPUs.
    #[serde(default = "one")]
    pub vcpus: u32,
    /// Size of its only disk in GiB.
    #[serde(default)]
    pub disk_gib: Option<Spanned<f64>>,
    /// Sizes of its disks in GiB, where it has several; the first carries the data.
    #[serde(default)]
    pub disks_gib: Option<Spanned<Vec<f64>>>,
    /// MiB of real content on the first disk: one of [`DATA_SETS_MIB`]. Default: the largest that takes at most
    /// half of the disk. A `debian` guest's content is its root file system, and the key is refused.
    #[serde(default)]
    pub data_mib: Option<Spanned<u32>>,
    /// What the guest does.
    #[serde(skip)]
    pub load: Vec<Spanned<LoadSpec>>,
    /// The loads as they were written; see [`Scenario`]. A tagged table is read twice, and loses its line on the way.
    #[serde(default, rename = "load")]
    raw_load: Vec<Spanned<toml::Value>>,
}

/// What a guest boots.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Image {
    /// Debian's cloud kernel, busybox and the load program; boots in seconds.
    #[default]
    Tiny,
    /// A full Debian guest with PostgreSQL, a compiler and a JVM.
    Debian,
}

impl fmt::Display for Image {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Tiny => "tiny",
            Self::Debian => "debian",
        })
    }
}

/// One step: an action, after a while.
///
/// A `move` starts and the script goes on; `verify`, another `move` of the same VM, `wait = { moves = true }` and the
/// end of the script wait until it has ended. So several VMs move at once, and a path can be cut under a move.
#[derive(Clone, Debug)]
pub struct Step {
    /// Seconds between the end of the step before and this one.
    pub after_s: f64,
    /// What is done.
    pub action: Action,
}

/// What a step does.
#[derive(Clone, Debug)]
pub enum Action {
    /// Bring a VM to another site.
    Move(Move),
    /// Wait for the VM's move, then check its memory, its disks and its clients' session.
    Verify(Verify),
    /// Let time pass, or moves end.
    Wait(Wait),
    /// Give up a running move.
    Cancel(Verify),
    /// Nothing passes a path any more.
    Cut(Cut),
    /// A cut path carries again.
    Restore(Between),
    /// Change a path's figures.
    Rate(PathChange),
    /// Damage something on purpose, to see that a check finds it.
    Alter(Alter),
    /// Kill a process of Godwit's, or a guest's hypervisor.
    Kill(Kill),
    /// Look, once all has settled, whether a VM runs where it should, and nowhere else.
    Expect(Expect),
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawStep {
    #[serde(default)]
    after_s: f64,
    #[serde(default, rename = "move")]
    move_: Option<Move>,
    #[serde(default)]
    verify: Option<Verify>,
    #[serde(default)]
    wait: Option<Wait>,
    #[serde(default)]
    cancel: Option<Verify>,
    #[serde(default)]
    cut: Option<Cut>,
    #[serde(default)]
    restore: Option<Between>,
    #[serde(default)]
    rate: Option<PathChange>,
    #[serde(default)]
    alter: Option<Alter>,
    #[serde(default)]
    kill: Option<Kill>,
    #[serde(default)]
    expect: Option<Expect>,
}

impl TryFrom<RawStep> for Step {
    type Error = String;

    fn try_from(raw: RawStep) -> Result<Self, String> {
        if !(0.0..=86_400.0).contains(&raw.after_s) {
            return Err(format!("`after_s` is {}; it takes seconds from 0 to 86400", raw.after_s));
        }
        let mut actions = [
            raw.move_.map(Action::Move),
            raw.verify.map(Action::Verify),
            raw.wait.map(Action::Wait),
            raw.cancel.map(Action::Cancel),
            raw.cut.map(Action::Cut),
            raw.restore.map(Action::Restore),
            raw.rate.map(Action::Rate),
            raw.alter.map(Action::Alter),
            raw.kill.map(Action::Kill),
            raw.expect.map(Action::Expect),
        ]
        .into_iter()
        .flatten();
        match (actions.next(), actions.next()) {
            (Some(action), None) => Ok(Self { after_s: raw.after_s, action }),
            (None, _) => Err("a step needs one of: move, verify, wait, cancel, cut, restore, rate, alter, kill, expect".into()),
            (Some(_), Some(_)) => Err("a step does one thing: split it into two [[step]] tables".into()),
        }
    }
}

/// A move, as the scenario asks for it.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Move {
    /// Which VM.
    pub vm: Spanned<String>,
    /// To which site.
    pub to: Spanned<String>,
    /// How the disk comes along.
    #[serde(default)]
    pub disk: DiskStrategy,
    /// What the move is to keep small. Baselines know only their own stop rule and ignore it.
    #[serde(default)]
    pub policy: Option<Policy>,
    /// Whether this is a second try: then a VM that is there already is left alone, rather than being an error.
    #[serde(default)]
    pub retry: bool,
}

/// How a move brings the disks along.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DiskStrategy {
    /// Copied while the guest runs, then kept equal until the hand-off (CloudNet).
    #[default]
    Mirror,
    /// Copied ahead, epoch by epoch (xNBD+).
    Precache,
    /// Fetched after the hand-off.
    Postcopy,
    /// Relocated: shut down, booted at once elsewhere (vMocity).
    Cold,
    /// Both sites reach the same storage; only memory travels.
    Shared,
}

impl fmt::Display for DiskStrategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Mirror => "mirror",
            Self::Precache => "precache",
            Self::Postcopy => "postcopy",
            Self::Cold => "cold",
            Self::Shared => "shared",
        })
    }
}

/// What a move keeps small.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Policy {
    /// The guest's pause.
    LeastDowntime,
    /// The whole duration.
    LeastTotal,
    /// The bytes on the WAN.
    LeastBytes,
}

/// Names one VM.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Verify {
    /// Which VM.
    pub vm: Spanned<String>,
}

/// Damage, on purpose: a check that was never seen to fail proves nothing.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Alter {
    /// Whose.
    pub vm: Spanned<String>,
    /// What.
    pub what: Damage,
}

/// What an [`Alter`] damages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Damage {
    /// A page of RAM at the destination, after it has arrived in the next move. Mended after the comparison, so that the
    /// guest lives.
    Page,
    /// A block of the first disk at the destination, after it has arrived in the next move.
    Block,
    /// A page of the guest's memory load, at once.
    GuestPage,
    /// A record of the guest's disk load, at once.
    GuestRecord,
    /// A TCP segment on its way from or to a client, at once.
    Segment,
}

/// What to wait for.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Wait {
    /// Seconds to let pass.
    #[serde(default)]
    pub s: f64,
    /// Whether to wait for every running move first.
    #[serde(default)]
    pub moves: bool,
}

/// Names one path by its two sites, in either order.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Between {
    /// The two sites.
    pub between: Spanned<[String; 2]>,
}

/// Cuts one path, at once or at a point of a move.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cut {
    /// The two sites.
    pub between: Spanned<[String; 2]>,
    /// Not now, but when the move of [`Cut::vm`] gets there: the one under way, else its next.
    #[serde(default)]
    pub at: Option<Point>,
    /// Whose move; goes with `at`.
    #[serde(default)]
    pub vm: Option<Spanned<String>>,
    /// Seconds after which the path is restored by itself; else a step `restore` does that.
    #[serde(default)]
    pub for_s: Option<f64>,
}

/// Kills, at once or at a point of a move.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Kill {
    /// What is killed (SIGKILL).
    pub what: Spanned<Victim>,
    /// In which site. With `at` it may be left out: then it is the site where that point is.
    #[serde(default)]
    pub site: Option<Spanned<String>>,
    /// Whose QEMU, and whose move `at` is about.
    #[serde(default)]
    pub vm: Option<Spanned<String>>,
    /// Not now, but when the move of [`Kill::vm`] gets there: the one under way, else its next.
    #[serde(default)]
    pub at: Option<Point>,
    /// Seconds after which a killed daemon is started again. A QEMU is not.
    #[serde(default = "two")]
    pub restart_after_s: f64,
}

/// What a [`Kill`] kills.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Victim {
    /// A site's node.
    Node,
    /// A VM's QEMU.
    Qemu,
    /// The controller.
    Controller,
}

/// Points of a move at which a node of Godwit's can be held, in their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Point {
    /// Source: the disks are being copied.
    CopyDisk,
    /// Source: memory goes in rounds.
    Memory,
    /// Source: the vCPUs are stopped.
    Stopped,
    /// Source: everything is verified, SEALED is not written.
    Sealing,
    /// Source: SEALED is written, COMMIT was not sent.
    Sealed,
    /// Destination: COMMIT was heard, GRANTED is not written.
    Commit,
    /// Destination: GRANTED is written, STARTED is not.
    Granted,
    /// Destination: STARTED is written, the guest was not told to run.
    Started,
}

impl Point {
    /// As the node calls it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::CopyDisk => "copy-disk",
            Self::Memory => "memory",
            Self::Stopped => "stopped",
            Self::Sealing => "sealing",
            Self::Sealed => "sealed",
            Self::Commit => "commit",
            Self::Granted => "granted",
            Self::Started => "started",
        }
    }

    /// Whether the source's node gets there, and not the destination's.
    #[must_use]
    pub fn is_at_source(self) -> bool {
        !matches!(self, Self::Commit | Self::Granted | Self::Started)
    }
}

/// Where a VM has to run.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Expect {
    /// Which VM.
    pub vm: Spanned<String>,
    /// In how many places.
    #[serde(default)]
    pub runs: Runs,
    /// The one place, if it has to be this one.
    #[serde(default)]
    pub site: Option<Spanned<String>>,
}

/// In how many places a VM has to run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Runs {
    /// In exactly one.
    #[default]
    One,
    /// Nowhere: its QEMU was killed.
    None,
}

/// Figures of one path, other than it has (in a step) or than all have (in `[[wan.path]]`); what is not named stays.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PathChange {
    /// The two sites.
    pub between: Spanned<[String; 2]>,
    /// Bit rate in Mbit/s.
    #[serde(default)]
    pub rate_mbit: Option<f64>,
    /// Round-trip time in ms.
    #[serde(default)]
    pub rtt_ms: Option<f64>,
    /// Additional delay in ms.
    #[serde(default)]
    pub jitter_ms: Option<f64>,
    /// Probability of loss.
    #[serde(default)]
    pub loss: Option<f64>,
    /// Queue in ms.
    #[serde(default)]
    pub queue_ms: Option<f64>,
}

impl PathChange {
    /// `spec` with this change applied.
    #[must_use]
    pub fn apply(&self, spec: PathSpec) -> PathSpec {
        PathSpec {
            rate: self.rate_mbit.map_or(spec.rate, BitRate::from_mbit),
            rtt: self.rtt_ms.map_or(spec.rtt, millis),
            jitter: self.jitter_ms.map_or(spec.jitter, millis),
            loss: self.loss.unwrap_or(spec.loss),
            queue: self.queue_ms.map_or(spec.queue, millis),
        }
    }
}

/// What is wrong with a scenario file, and where.
#[derive(Debug, thiserror::Error)]
pub enum ScenarioError {
    /// The file cannot be read.
    #[error("cannot read the scenario {path}: {source}")]
    Read {
        /// The file.
        path: String,
        /// Why not.
        source: std::io::Error,
    },
    /// The text is not TOML, has an unknown key, or a value of the wrong kind.
    #[error("{path}: {message}")]
    Syntax {
        /// The file.
        path: String,
        /// TOML's own message, with line, column and the line itself.
        message: String,
    },
    /// The keys are fine by themselves but do not make sense together.
    #[error("{path}:{line}: `{key}`: {what}")]
    Meaning {
        /// The file.
        path: String,
        /// Line, from 1.
        line: usize,
        /// The key, with the tables that it stands in: `step.move.to`.
        key: String,
        /// What is wrong and what would be right.
        what: String,
    },
}

impl Scenario {
    /// Reads and checks a scenario file.
    ///
    /// # Errors
    /// [`ScenarioError`], with the line and the key.
    pub fn load(path: &Path) -> Result<Self, ScenarioError> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| ScenarioError::Read { path: path.display().to_string(), source })?;
        Self::parse(&text, &path.display().to_string())
    }

    /// Checks a scenario's text; `path` is only named in errors.
    ///
    /// # Errors
    /// [`ScenarioError`], with the line and the key.
    pub fn parse(text: &str, path: &str) -> Result<Self, ScenarioError> {
        let mut scenario: Self = toml::from_str(text)
            .map_err(|e| ScenarioError::Syntax { path: path.into(), message: e.to_string().trim_end().to_owned() })?;
        let checker = Checker { text, path, godwit: scenario.godwit };
        for raw in std::mem::take(&mut scenario.raw_step) {
            let at = raw.span();
            let step = Step::try_from(raw.into_inner());
            scenario.step.push(step.or_else(|e| checker.fail(at, "step", e))?);
        }
        for vm in &mut scenario.vm {
            for raw in std::mem::take(&mut vm.raw_load) {
                let at = raw.span();
                let load = raw.into_inner().try_into::<LoadSpec>();
                let load = load.or_else(|e| checker.fail(at.clone(), "vm.load", e.to_string().trim_end()))?;
                vm.load.push(Spanned::new(at, load));
            }
        }
        checker.scenario(&scenario)?;
        Ok(scenario)
    }

    /// Whether this VM's disks are on storage that all sites reach: it has a move with `disk = "shared"`.
    #[must_use]
    pub fn shares_disks(&self, vm: &str) -> bool {
        self.step.iter().any(
            |step| matches!(&step.action, Action::Move(m) if m.vm.get_ref() == vm && m.disk == DiskStrategy::Shared),
        )
    }

    /// What the WAN does between two sites at the start.
    #[must_use]
    pub fn path_spec(&self, a: &str, b: &str) -> PathSpec {
        let base = PathSpec {
            rate: BitRate::from_mbit(*self.wan.rate_mbit.get_ref()),
            rtt: millis(*self.wan.rtt_ms.get_ref()),
            jitter: millis(*self.wan.jitter_ms.get_ref()),
            loss: *self.wan.loss.get_ref(),
            queue: millis(*self.wan.queue_ms.get_ref()),
        };
        let exception = self.wan.path.iter().find(|p| same_pair(p.between.get_ref(), a, b));
        exception.map_or(base, |change| change.apply(base))
    }
}

impl Vm {
    /// Sizes of the disks, the first one first.
    #[must_use]
    pub fn disks(&self) -> Vec<Bytes> {
        let gib = |g: f64| Bytes((g * f64::from(1 << 30)) as u64 & !0xfff);
        match (&self.disk_gib, &self.disks_gib) {
            (Some(one), _) => vec![gib(*one.get_ref())],
            (None, Some(several)) => several.get_ref().iter().copied().map(gib).collect(),
            (None, None) => vec![],
        }
    }

    /// MiB of content on the first disk; none without a disk or where no data set fits.
    #[must_use]
    pub fn data_set_mib(&self) -> Option<u32> {
        let disk = *self.disks().first()?;
        match &self.data_mib {
            Some(asked) => Some(*asked.get_ref()),
            None => DATA_SETS_MIB.into_iter().rev().find(|mib| Bytes::mib(u64::from(*mib) * 2) <= disk),
        }
    }

    /// The echo loads: the client's site and its messages a second.
    pub fn echoes(&self) -> impl Iterator<Item = (&str, u32)> {
        self.load.iter().filter_map(|l| match l.get_ref() {
            LoadSpec::Echo { from, per_s } => Some((from.as_str(), *per_s)),
            _ => None,
        })
    }
}

/// Whether `pair` names the sites `a` and `b`, in either order.
#[must_use]
pub fn same_pair(pair: &[String; 2], a: &str, b: &str) -> bool {
    (pair[0] == a && pair[1] == b) || (pair[0] == b && pair[1] == a)
}

fn millis(ms: f64) -> Duration {
    Duration::from_secs_f64(ms.max(0.0) / 1e3)
}

/// The checks that need more than one key, with the text at hand to name lines.
struct Checker<'a> {
    text: &'a str,
    path: &'a str,
    godwit: bool,
}

impl Checker<'_> {
    fn fail<T>(&self, at: Range<usize>, key: &str, what: impl Into<String>) -> Result<T, ScenarioError> {
        let line = 1 + self.text[..at.start.min(self.text.len())].matches('\n').count();
        Err(ScenarioError::Meaning { path: self.path.into(), line, key: key.into(), what: what.into() })
    }

    fn scenario(&self, s: &Scenario) -> Result<(), ScenarioError> {
        if s.name.get_ref().is_empty() {
            return self.fail(s.name.span(), "name", "is empty; reports and ledgers need it");
        }
        if s.repeat == 0 {
            return self.fail(s.name.span(), "repeat", "is 0; nothing would run");
        }
        if *s.warm_percent.get_ref() > 95 {
            return self.fail(s.warm_percent.span(), "warm_percent", "is above 95; a guest keeps some free memory");
        }
        self.sites(s)?;
        self.wan(s)?;
        self.vms(s)?;
        self.steps(s)
    }

    fn name(&self, name: &Spanned<String>, key: &str, seen: &mut HashSet<String>) -> Result<(), ScenarioError> {
        let text = name.get_ref();
        let fits = (1..=24).contains(&text.len())
            && text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
            && !text.starts_with('-');
        let fits_godwit = text.starts_with(|c: char| c.is_ascii_lowercase()) && !text.ends_with('-');
        if !fits {
            let what =
                format!("`{text}`: use 1 to 24 of a-z, 0-9 and `-` (it becomes part of file and interface names)");
            return self.fail(name.span(), key, what);
        }
        if self.godwit && !fits_godwit {
            let what = format!("`{text}`: Godwit's names begin with a letter and do not end with `-`");
            return self.fail(name.span(), key, what);
        }
        if !seen.insert(text.clone()) {
            return self.fail(name.span(), key, format!("`{text}` is there twice"));
        }
        Ok(())
    }

    fn sites(&self, s: &Scenario) -> Result<(), ScenarioError> {
        let mut seen = HashSet::new();
        for site in &s.site {
            self.name(&site.name, "site.name", &mut seen)?;
        }
        if s.site.len() < 2 || s.site.len() > MAX_SITES {
            let what = format!("{} sites; a scenario has 2 to {MAX_SITES} [[site]] tables", s.site.len());
            return self.fail(s.name.span(), "site", what);
        }
        Ok(())
    }

    fn known_site(&self, s: &Scenario, name: &str, at: Range<usize>, key: &str) -> Result<(), ScenarioError> {
        if s.site.iter().any(|site| site.name.get_ref() == name) {
            return Ok(());
        }
        let known: Vec<_> = s.site.iter().map(|site| site.name.get_ref().as_str()).collect();
        self.fail(at, key, format!("there is no site `{name}`; there are: {}", known.join(", ")))
    }

    fn known_pair(&self, s: &Scenario, pair: &Spanned<[String; 2]>, key: &str) -> Result<(), ScenarioError> {
        let [a, b] = pair.get_ref();
        self.known_site(s, a, pair.span(), key)?;
        self.known_site(s, b, pair.span(), key)?;
        if a == b {
            return self.fail(pair.span(), key, format!("`{a}` twice; a path joins two different sites"));
        }
        Ok(())
    }

    fn path_figures(&self, spec: &PathSpec, at: Range<usize>, key: &str) -> Result<(), ScenarioError> {
        match spec.validate() {
            Ok(()) => Ok(()),
            Err(e) => self.fail(at, key, e.to_string()),
        }
    }

    fn wan(&self, s: &Scenario) -> Result<(), ScenarioError> {
        let w = &s.wan;
        for (figure, key, most) in [
            (&w.rate_mbit, "wan.rate_mbit", 100_000.0),
            (&w.rtt_ms, "wan.rtt_ms", 10_000.0),
            (&w.jitter_ms, "wan.jitter_ms", 10_000.0),
            (&w.loss, "wan.loss", 1.0),
            (&w.queue_ms, "wan.queue_ms", 10_000.0),
        ] {
            let value = *figure.get_ref();
            if !(0.0..=most).contains(&value) {
                return self.fail(figure.span(), key, format!("is {value}; it takes 0 to {most}"));
            }
        }
        if *w.rate_mbit.get_ref() < 0.1 {
            return self.fail(w.rate_mbit.span(), "wan.rate_mbit", "is below 0.1; nothing would ever arrive");
        }
        for path in &w.path {
            self.known_pair(s, &path.between, "wan.path.between")?;
            let [a, b] = path.between.get_ref();
            self.path_figures(&s.path_spec(a, b), path.between.span(), "wan.path")?;
        }
        Ok(())
    }

    fn vms(&self, s: &Scenario) -> Result<(), ScenarioError> {
        let mut seen = HashSet::new();
        if s.vm.len() > MAX_VMS {
            return self.fail(s.name.span(), "vm", format!("{} VMs; the most is {MAX_VMS}", s.vm.len()));
        }
        for vm in &s.vm {
            self.name(&vm.name, "vm.name", &mut seen)?;
            self.known_site(s, vm.site.get_ref(), vm.site.span(), "vm.site")?;
            if !(96..=16_384).contains(vm.memory_mib.get_ref()) {
                let what = format!("is {}; a guest takes 96 to 16384", vm.memory_mib.get_ref());
                return self.fail(vm.memory_mib.span(), "vm.memory_mib", what);
            }
            if !(1..=8).contains(&vm.vcpus) {
                return self.fail(vm.name.span(), "vm.vcpus", format!("is {}; a guest takes 1 to 8", vm.vcpus));
            }
            self.disks(vm)?;
            for load in &vm.load {
                if let Err(e) = load.get_ref().validate() {
                    return self.fail(load.span(), "vm.load", e.to_string());
                }
                if let LoadSpec::Echo { from, .. } = load.get_ref() {
                    self.known_site(s, from, load.span(), "vm.load.from")?;
                }
            }
        }
        Ok(())
    }

    fn disks(&self, vm: &Vm) -> Result<(), ScenarioError> {
        let at = match (&vm.disk_gib, &vm.disks_gib) {
            (Some(_), Some(several)) => {
                return self.fail(several.span(), "vm.disks_gib", "stands beside `disk_gib`; keep one of the two");
            }
            (Some(one), None) => one.span(),
            (None, Some(several)) => several.span(),
            (None, None) => return self.fail(vm.name.span(), "vm.disk_gib", "is missing (or `disks_gib = [...]`)"),
        };
        let disks = vm.disks();
        if disks.is_empty() || disks.len() > 8 || disks.iter().any(|d| *d < Bytes::mib(16) || *d > Bytes::gib(16_384)) {
            return self.fail(at, "vm.disks_gib", "takes 1 to 8 disks of 0.016 to 16384 GiB");
        }
        let Some(data) = &vm.data_mib else { return Ok(()) };
        if vm.image == Image::Debian {
            return self.fail(data.span(), "vm.data_mib", "a `debian` guest's data is its root file system");
        }
        if !DATA_SETS_MIB.contains(data.get_ref()) {
            let what = format!("is {}; data sets are made of {DATA_SETS_MIB:?} MiB", data.get_ref());
            return self.fail(data.span(), "vm.data_mib", what);
        }
        if Bytes::mib(u64::from(*data.get_ref()) * 5 / 4) > disks[0] {
            return self.fail(data.span(), "vm.data_mib", format!("does not fit a first disk of {}", disks[0]));
        }
        Ok(())
    }

    fn steps(&self, s: &Scenario) -> Result<(), ScenarioError> {
        for step in &s.step {
            match &step.action {
                Action::Move(m) => {
                    self.known_vm(s, &m.vm, "step.move.vm")?;
                    self.known_site(s, m.to.get_ref(), m.to.span(), "step.move.to")?;
                    if (m.disk == DiskStrategy::Shared) != s.shares_disks(m.vm.get_ref()) {
                        let what = format!(
                            "`{}` moves once with a shared disk and once without; a disk is one or the other",
                            m.vm.get_ref()
                        );
                        return self.fail(m.vm.span(), "step.move.disk", what);
                    }
                }
                Action::Verify(v) => self.known_vm(s, &v.vm, "step.verify.vm")?,
                Action::Cancel(v) => self.known_vm(s, &v.vm, "step.cancel.vm")?,
                Action::Alter(a) => self.known_vm(s, &a.vm, "step.alter.vm")?,
                Action::Wait(_) => {}
                Action::Cut(cut) => {
                    self.known_pair(s, &cut.between, "step.cut.between")?;
                    self.seconds(cut.for_s.unwrap_or(0.0), cut.between.span(), "step.cut.for_s")?;
                    self.moment(s, cut.at, cut.vm.as_ref(), cut.between.span(), "step.cut")?;
                }
                Action::Kill(kill) => self.kill(s, kill)?,
                Action::Expect(e) => {
                    self.known_vm(s, &e.vm, "step.expect.vm")?;
                    if let Some(site) = &e.site {
                        self.known_site(s, site.get_ref(), site.span(), "step.expect.site")?;
                    }
                }
                Action::Restore(b) => self.known_pair(s, &b.between, "step.restore.between")?,
                Action::Rate(c) => {
                    self.known_pair(s, &c.between, "step.rate.between")?;
                    let [a, b] = c.between.get_ref();
                    self.path_figures(&c.apply(s.path_spec(a, b)), c.between.span(), "step.rate")?;
                }
            }
        }
        Ok(())
    }

    fn kill(&self, s: &Scenario, kill: &Kill) -> Result<(), ScenarioError> {
        let at = kill.what.span();
        self.seconds(kill.restart_after_s, at.clone(), "step.kill.restart_after_s")?;
        self.moment(s, kill.at, kill.vm.as_ref(), at.clone(), "step.kill")?;
        if let Some(site) = &kill.site {
            self.known_site(s, site.get_ref(), site.span(), "step.kill.site")?;
        }
        match kill.what.get_ref() {
            Victim::Node if kill.site.is_none() && kill.at.is_none() => {
                self.fail(at, "step.kill.site", "is missing: say which site's node, or `at` which point of a move")
            }
            Victim::Qemu if kill.vm.is_none() => self.fail(at, "step.kill.vm", "is missing: say whose QEMU"),
            Victim::Controller if kill.site.is_some() => {
                self.fail(at, "step.kill.site", "goes with a node or a QEMU; there is one controller")
            }
            _ => Ok(()),
        }
    }

    /// `at` and `vm` of a step that waits for a point of a move.
    fn moment(
        &self,
        s: &Scenario,
        at: Option<Point>,
        vm: Option<&Spanned<String>>,
        step: Range<usize>,
        key: &str,
    ) -> Result<(), ScenarioError> {
        match (at, vm) {
            (Some(_), None) => self.fail(step, &format!("{key}.vm"), "is missing: say on whose move `at` is"),
            (_, Some(vm)) => self.known_vm(s, vm, &format!("{key}.vm")),
            (None, None) => Ok(()),
        }
    }

    fn seconds(&self, value: f64, at: Range<usize>, key: &str) -> Result<(), ScenarioError> {
        if (0.0..=86_400.0).contains(&value) {
            return Ok(());
        }
        self.fail(at, key, format!("is {value}; it takes seconds from 0 to 86400"))
    }

    fn known_vm(&self, s: &Scenario, name: &Spanned<String>, key: &str) -> Result<(), ScenarioError> {
        if s.vm.iter().any(|vm| vm.name.get_ref() == name.get_ref()) {
            return Ok(());
        }
        let known: Vec<_> = s.vm.iter().map(|vm| vm.name.get_ref().as_str()).collect();
        self.fail(name.span(), key, format!("there is no VM `{}`; there are: {}", name.get_ref(), known.join(", ")))
    }
}

fn yes() -> bool {
    true
}

fn one() -> u32 {
    1
}

fn default_seed() -> u64 {
    1
}

fn default_warm() -> Spanned<u8> {
    Spanned::new(0..0, 85)
}

fn default_move_timeout() -> u64 {
    1800
}

fn two() -> f64 {
    2.0
}

fn zero() -> Spanned<f64> {
    Spanned::new(0..0, 0.0)
}

fn default_queue() -> Spanned<f64> {
    Spanned::new(0..0, 50.0)
}
