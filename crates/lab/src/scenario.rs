//! Scenario files: what a lab run builds, does and checks.
//!
//! A scenario is TOML and an interface: keys may be added, never renamed. Reading one has two halves. Serde
//! refuses unknown keys, wrong types and unknown words; [`Scenario::parse`] then refuses what only makes sense
//! together: a step that names a VM that is not there, a disk too small for its data. Both kinds of error carry
//! the line and the key, because a scenario that is half understood measures something nobody asked for.

mod check;
mod network;
mod step;

use check::Checker;
use godwit_api::vm::OnCut;
use godwit_load::protocol::LoadSpec;
use godwit_units::{BitRate, Bytes};
use godwit_wan::PathSpec;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;
use step::RawStep;
use toml::Spanned;

pub use network::{Component, End, Extender, Flow, FlowKind, Nic, Wire, route};
pub use step::{
    Action, Alter, Between, CaptureStep, ComponentStep, Cut, Damage, DiskStrategy, Expect, IoStep, Kill, LoadStep,
    Moment, Move, PathChange, Point, Precache, ProfileStep, Runs, Step, Verify, Victim, Wait, Whole,
};

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
    pub move_timeout_s: Spanned<u64>,
    /// Rounds after which a baseline that has not converged is told to stop its guest.
    #[serde(default = "default_patience")]
    pub patience_rounds: Spanned<u32>,
    /// The WAN between the sites.
    pub wan: Wan,
    /// How guests and clients reach each other.
    #[serde(default)]
    pub network: Network,
    /// Clouds, regions or data centres; one host each that guests run on.
    pub site: Vec<Site>,
    /// The guests.
    #[serde(default)]
    pub vm: Vec<Vm>,
    /// Switches, routers, firewalls and gateways that Godwit makes.
    #[serde(default)]
    pub component: Vec<Component>,
    /// Instead of guests and steps: how fast wires are, beside other ways between the two sites, which a veth joins then.
    #[serde(default)]
    pub speed: Option<Spanned<crate::speed::Speed>>,
    /// What joins ports of components and of guests, from the beginning on.
    #[serde(default)]
    pub wire: Vec<Wire>,
    /// Pairs of sites that encrypted tunnels join, from the beginning on.
    #[serde(default)]
    pub extender: Vec<Extender>,
    /// What flows over the wires, from before the first step on.
    #[serde(default)]
    pub flow: Vec<Flow>,
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

/// How guests and clients reach each other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Network {
    /// One segment, stretched over all sites beforehand: guests are wired to a switch of the site that they are in.
    #[default]
    Switch,
    /// Each site has a segment of its own. Guests are wired to a gateway in the last site, where their clients are, and
    /// Godwit carries the wires there.
    Gateway,
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
    /// What carries packets between sites does so on this processor of the machine, from 0: it is on no site's host. Without, on any.
    pub processor: Option<usize>,
    /// Exceptions: paths with figures of their own.
    #[serde(default)]
    pub path: Vec<PathChange>,
}

/// A site: a host in a network and a mount namespace of its own, and perhaps a second one that only carries its extenders.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Site {
    /// Lower-case letters, digits and `-`; at most 24 characters (it becomes part of file names).
    pub name: Spanned<String>,
    /// Folder with another `qemu-system-x86_64` than the machine's, which Godwit's guests in this site run on.
    pub qemu: Option<Spanned<PathBuf>>,
    /// How many of its hosts carry its extenders: 1, or 2, the most that Godwit has; the second runs nothing else.
    #[serde(default = "one_carrier")]
    pub carriers: Spanned<u8>,
    /// All that runs on the site's first host runs on this processor of the machine, from 0, as on a host of its own; without, on any.
    pub processor: Option<usize>,
}

impl Site {
    /// The name of its second host, if it has one.
    #[must_use]
    pub fn second(&self) -> Option<String> {
        (*self.carriers.get_ref() == 2).then(|| format!("{}-2", self.name.get_ref()))
    }
}

/// A guest.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Vm {
    /// Lower-case letters, digits and `-`; at most 24 characters.
    pub name: Spanned<String>,
    /// Where it runs at first.
    pub site: Spanned<String>,
    /// The trust domain that it is made in, by a token of that domain's; none: the deployment's own.
    #[serde(default)]
    pub domain: Option<Spanned<String>>,
    /// What becomes of Godwit's VM while a block of a disk that follows it does not come.
    #[serde(default)]
    pub on_cut: OnCut,
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
    /// Its interfaces besides `eth0`, by which the lab reaches it: ports for wires.
    #[serde(default)]
    pub nic: Vec<Nic>,
    /// Routes by these: `"10.20.2.0/24 via 10.20.1.1"`.
    #[serde(default)]
    pub routes: Vec<Spanned<String>>,
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
        self.step.iter().any(|step| {
            matches!(&step.action, Action::Move(m)
                if m.disk == DiskStrategy::Shared && m.vms.iter().any(|name| name.get_ref() == vm))
        })
    }

    /// Whether a site's host carries an extender.
    #[must_use]
    pub fn carries(&self, site: &str) -> bool {
        self.extender.iter().any(|extender| extender.between.get_ref().iter().any(|name| name == site))
    }

    /// The address that a flow goes to; none where that is no guest's interface.
    #[must_use]
    pub fn flow_target(&self, flow: &Flow) -> Option<std::net::Ipv4Addr> {
        let end = End::of(flow.to.get_ref())?;
        let vm = self.vm.iter().find(|vm| vm.name.get_ref() == &end.object)?;
        vm.nic.iter().enumerate().find(|(index, nic)| nic.port(*index) == end.port)?.1.ip()
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

    /// The tiers with clients of their own: their site, the port, how many sessions, and ms between an answer and the next request.
    pub fn asked(&self) -> impl Iterator<Item = (&str, u16, u32, u32)> {
        self.load.iter().filter_map(|l| match l.get_ref() {
            LoadSpec::Tier { from: Some(from), port, sessions, think_ms, .. } => {
                Some((from.as_str(), *port, *sessions, *think_ms))
            }
            _ => None,
        })
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

fn default_move_timeout() -> Spanned<u64> {
    Spanned::new(0..0, 1800)
}

fn default_patience() -> Spanned<u32> {
    Spanned::new(0..0, 30)
}

fn one_carrier() -> Spanned<u8> {
    Spanned::new(0..0, 1)
}

fn zero() -> Spanned<f64> {
    Spanned::new(0..0, 0.0)
}

fn default_queue() -> Spanned<f64> {
    Spanned::new(0..0, 50.0)
}
