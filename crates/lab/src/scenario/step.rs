//! The steps of a scenario: what can be done, and with which keys.

use super::millis;
use godwit_load::protocol::LoadSpec;
use godwit_units::{BitRate, Policy};
use godwit_wan::PathSpec;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::time::Duration;
use toml::Spanned;

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
    /// Bring a component to another site, and wait until it is there.
    Component(ComponentStep),
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
    /// Keep a VM's volumes nearly equal at another site.
    Precache(Precache),
    /// Have a guest's memory watched, by the user's command.
    Profile(ProfileStep),
    /// Measure what a guest's own reads and writes take.
    Io(IoStep),
    /// Replace what a guest does.
    Load(LoadStep),
    /// Begin to record frames.
    Capture(CaptureStep),
    /// Wait until all of Godwit is well again after kills and cuts.
    Whole(Whole),
}

/// A step as it is written: one of the keys but `after_s`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawStep {
    #[serde(default)]
    after_s: f64,
    #[serde(default, rename = "move")]
    move_: Option<RawMove>,
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
    #[serde(default)]
    precache: Option<Precache>,
    #[serde(default)]
    profile: Option<ProfileStep>,
    #[serde(default)]
    io: Option<IoStep>,
    #[serde(default)]
    load: Option<LoadStep>,
    #[serde(default)]
    capture: Option<CaptureStep>,
    #[serde(default)]
    whole: Option<Whole>,
}

impl TryFrom<RawStep> for Step {
    type Error = String;

    fn try_from(raw: RawStep) -> Result<Self, String> {
        for (key, value) in [("after_s", raw.after_s), ("wait.s", raw.wait.as_ref().map_or(0.0, |wait| wait.s))] {
            if !(0.0..=86_400.0).contains(&value) {
                return Err(format!("`{key}` is {value}; it takes seconds from 0 to 86400"));
            }
        }
        let mut actions = [
            raw.move_.map(RawMove::understood).transpose()?,
            raw.verify.map(Action::Verify),
            raw.wait.map(Action::Wait),
            raw.cancel.map(Action::Cancel),
            raw.cut.map(Action::Cut),
            raw.restore.map(Action::Restore),
            raw.rate.map(Action::Rate),
            raw.alter.map(Action::Alter),
            raw.kill.map(Action::Kill),
            raw.expect.map(Action::Expect),
            raw.precache.map(Action::Precache),
            raw.profile.map(Action::Profile),
            raw.io.map(Action::Io),
            raw.load.map(Action::Load),
            raw.capture.map(Action::Capture),
            raw.whole.map(Action::Whole),
        ]
        .into_iter()
        .flatten();
        match (actions.next(), actions.next()) {
            (Some(action), None) => Ok(Self { after_s: raw.after_s, action }),
            (None, _) => Err(
                "a step needs one of: move, verify, wait, cancel, cut, restore, rate, alter, kill, expect, precache, profile, io, load, capture, whole"
                    .into(),
            ),
            (Some(_), Some(_)) => Err("a step does one thing: split it into two [[step]] tables".into()),
        }
    }
}

/// A move as it is written: of a VM, or of a component.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawMove {
    #[serde(default)]
    vm: Option<Spanned<String>>,
    #[serde(default)]
    vms: Option<Vec<Spanned<String>>>,
    #[serde(default)]
    component: Option<Spanned<String>>,
    to: Spanned<String>,
    #[serde(default)]
    disk: Option<DiskStrategy>,
    #[serde(default)]
    policy: Option<Policy>,
    #[serde(default)]
    throttle: Option<u8>,
    #[serde(default)]
    retry: bool,
    #[serde(default)]
    leave_at: Option<f64>,
    #[serde(default)]
    compare: Option<bool>,
    #[serde(default)]
    keep_checkpoint: bool,
    #[serde(default)]
    moment: Option<Moment>,
}

impl RawMove {
    fn understood(self) -> Result<Action, String> {
        let Self { vm, vms, component, to, disk, policy, throttle, retry, leave_at, compare, keep_checkpoint, moment } =
            self;
        if vms.is_some() && (retry || leave_at.is_some() || moment.is_some()) {
            return Err("`move` of several `vms` takes no `retry`, `leave_at` or `moment`: those are one VM's".into());
        }
        if vms.as_ref().is_some_and(|vms| vms.len() < 2) {
            return Err("`vms` are two or more, which go in one order; one alone is `vm`".into());
        }
        match (vm.map(|vm| vec![vm]), vms, component) {
            (Some(vms), None, None) | (None, Some(vms), None) => Ok(Action::Move(Move {
                vms,
                to,
                disk: disk.unwrap_or_default(),
                policy,
                throttle,
                retry,
                leave_at,
                compare: compare.unwrap_or(true),
                keep_checkpoint,
                moment,
            })),
            (None, None, Some(component)) => {
                let other =
                    disk.is_some() || policy.is_some() || throttle.is_some() || compare.is_some() || moment.is_some();
                if other || leave_at.is_some() || retry || keep_checkpoint {
                    return Err(
                        "`move` of a `component` takes `to`, and nothing else: it has no disk and no memory".into()
                    );
                }
                Ok(Action::Component(ComponentStep { component, to }))
            }
            _ => Err("`move` needs one of `vm`, `vms` and `component`".into()),
        }
    }
}

/// A component's move.
#[derive(Clone, Debug)]
pub struct ComponentStep {
    /// Which.
    pub component: Spanned<String>,
    /// To which site.
    pub to: Spanned<String>,
}

/// A move, as the scenario asks for it.
#[derive(Clone, Debug)]
pub struct Move {
    /// Which VM; or which, in one order. There is at least one.
    pub vms: Vec<Spanned<String>>,
    /// To which site.
    pub to: Spanned<String>,
    /// How the disk comes along.
    pub disk: DiskStrategy,
    /// What the move is to spare, as `godwit move --policy` has it. Baselines know only their own stop rule and ignore it.
    pub policy: Option<Policy>,
    /// By how much the guest's CPUs may be slowed, as `godwit move --throttle` has it, in percent.
    pub throttle: Option<u8>,
    /// Whether this is a second try: then a VM that is there already is left alone, rather than being an error.
    pub retry: bool,
    /// With `postcopy`: goes on with the next step when this share of the blocks that follow has come; the move is over then, and the
    /// fill is not.
    pub leave_at: Option<f64>,
    /// Whether Godwit's move is held for a moment to compare the guest's RAM at both ends. What Godwit learns of such a move has the moment in
    /// it: not where later ones are foretold from it.
    pub compare: bool,
    /// Whether the host that it leaves is to keep its memory for the way back. Baselines have nothing of the kind.
    pub keep_checkpoint: bool,
    /// When it is ordered; else at once.
    pub moment: Option<Moment>,
}

/// A moment within a guest's own period, such as a load has that writes and rests (`busy_s`, `rest_s`).
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Moment {
    /// How long the period is, seconds; the first one began at 1970. Divides a day, so that the same time of another day is the same
    /// moment.
    pub period_s: u32,
    /// So many seconds after a period's beginning; none: at the moment that `godwit predict --when` names.
    pub at_s: Option<f64>,
}

impl Moment {
    /// What is wrong with it.
    #[must_use]
    pub fn problem(&self) -> Option<&'static str> {
        const DAY: u32 = 86_400;
        if !(1..=3600).contains(&self.period_s) || !DAY.is_multiple_of(self.period_s) {
            return Some("`period_s` is from 1 to 3600 seconds and divides a day, such as 20 or 60");
        }
        let within = self.at_s.is_none_or(|at| (0.0..f64::from(self.period_s)).contains(&at));
        (!within).then_some("`at_s` is at least 0 and less than `period_s`")
    }

    /// How long it is from `since_1970` until `at_s` seconds after a period's beginning come next.
    #[must_use]
    pub fn wait(&self, since_1970: Duration, at_s: f64) -> Duration {
        let period = f64::from(self.period_s);
        Duration::from_secs_f64((at_s - since_1970.as_secs_f64()).rem_euclid(period))
    }
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
    /// Not at the beginning of `copy-disk`, `memory` or `fill`, but when this share of the disks or of RAM has gone.
    #[serde(default)]
    pub share: Option<f64>,
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
    /// Not at the beginning of `copy-disk`, `memory` or `fill`, but when this share of the disks or of RAM has gone.
    #[serde(default)]
    pub share: Option<f64>,
    /// Seconds after which a killed daemon is started again. A QEMU is not; an extender's program is by its node, at once.
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
    /// What carries a site's tunnels to other sites: the programs, or the kernel's devices where it has WireGuard.
    Extender,
}

/// Points of a move at which a node of Godwit's can be held, in their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Point {
    /// Source: the order was taken, the destination was not asked yet.
    Reserve,
    /// Destination: STAGED is written, the source has no answer yet.
    Staged,
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
    /// Destination: the guest runs, nothing was proved yet.
    Proving,
    /// Source: STARTED was heard, RELEASED is not written.
    Releasing,
    /// Destination: the source has let go, OWNED is not written.
    Settling,
    /// Destination: the guest runs, and blocks of its disks are still elsewhere. Held, it fetches them all the same.
    Fill,
}

impl Point {
    /// As the node calls it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Reserve => "reserve",
            Self::Staged => "staged",
            Self::CopyDisk => "copy-disk",
            Self::Memory => "memory",
            Self::Stopped => "stopped",
            Self::Sealing => "sealing",
            Self::Sealed => "sealed",
            Self::Commit => "commit",
            Self::Granted => "granted",
            Self::Started => "started",
            Self::Proving => "proving",
            Self::Releasing => "releasing",
            Self::Settling => "settling",
            Self::Fill => "fill",
        }
    }

    /// Whether the source's node gets there, and not the destination's.
    #[must_use]
    pub fn is_at_source(self) -> bool {
        !matches!(
            self,
            Self::Staged | Self::Commit | Self::Granted | Self::Started | Self::Proving | Self::Settling | Self::Fill
        )
    }

    /// Whether the guest stands still while a node is held there.
    #[must_use]
    pub fn is_in_the_pause(self) -> bool {
        (Self::Stopped..=Self::Started).contains(&self)
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
    /// Whether its guest was to be restarted: its QEMU was killed while that held its only RAM. Then there must be another life
    /// of the load program, and the disk must hold all that it held when QEMU died. Without it, a restart is a failure.
    #[serde(default)]
    pub rebooted: bool,
}

/// A pre-cache of all of a VM's volumes, and how near it has to come before the script goes on.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Precache {
    /// Which VM.
    pub vm: Spanned<String>,
    /// At which site.
    pub to: Spanned<String>,
    /// The lag that is good enough, seconds.
    #[serde(default = "two")]
    pub lag_s: f64,
    /// How long that may take, seconds.
    #[serde(default = "minutes")]
    pub timeout_s: f64,
    /// How often an epoch ends, seconds.
    #[serde(default = "one")]
    pub interval_s: u32,
    /// Whether the secondary keeps an image.
    #[serde(default)]
    pub consistent: bool,
    /// Whether it is turned around after a move there.
    #[serde(default)]
    pub follow: bool,
    /// At most so much, as the command takes it.
    #[serde(default)]
    pub limit: Option<String>,
    /// End it instead.
    #[serde(default)]
    pub stop: bool,
}

/// Other loads for a guest, in the place of those that it has; none of them an echo.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LoadStep {
    /// Which VM.
    pub vm: Spanned<String>,
    /// The loads.
    pub load: Vec<LoadSpec>,
    /// Goes on when every disk load with `total_mib` has written that; after an hour it is an error.
    #[serde(default)]
    pub until_done: bool,
}

/// Whose frames are recorded, for how long, and what that is called. The script goes on meanwhile.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CaptureStep {
    /// A VM or a component; all wires that its frames may pass are recorded.
    pub of: Spanned<String>,
    /// Seconds.
    pub s: u32,
    /// The folder of its files; the object's name if not said.
    #[serde(default)]
    pub name: Option<Spanned<String>>,
}

impl CaptureStep {
    /// What it is called.
    #[must_use]
    pub fn name(&self) -> &Spanned<String> {
        self.name.as_ref().unwrap_or(&self.of)
    }
}

/// Ends an incident: what was killed and cut since the last one is mended.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Whole {
    /// How long that may take, seconds.
    #[serde(default = "minutes")]
    pub timeout_s: f64,
}

/// For how long a guest's memory is watched.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProfileStep {
    /// Which VM.
    pub vm: Spanned<String>,
    /// Seconds.
    pub s: u32,
    /// Then its move there is foretold, as a user does: which has the link measured where no move has.
    #[serde(default)]
    pub to: Option<Spanned<String>>,
    /// Between two looks, seconds.
    #[serde(default = "quarter")]
    pub interval_s: f64,
}

fn quarter() -> f64 {
    0.25
}

/// How long a guest's reads and writes are timed, and what that is called.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IoStep {
    /// Which VM; it has a disk load.
    pub vm: Spanned<String>,
    /// Seconds.
    pub s: f64,
    /// Its name in the report; windows of one name belong together.
    pub name: String,
}

const fn one() -> u32 {
    1
}

fn minutes() -> f64 {
    300.0
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

fn two() -> f64 {
    2.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_moment_of_a_period_comes_within_one_period() {
        let moment = Moment { period_s: 20, at_s: None };
        let wait = |now: f64, at_s: f64| moment.wait(Duration::from_secs_f64(now), at_s).as_secs_f64();
        assert!((wait(100.0, 5.0) - 5.0).abs() < 1e-6 && (wait(107.0, 5.0) - 18.0).abs() < 1e-6);
        assert!(wait(105.0, 5.0).abs() < 1e-6);
        let problem = |period_s, at_s| Moment { period_s, at_s }.problem().is_some();
        assert!(
            problem(0, None)
                && problem(7, None)
                && problem(7200, None)
                && problem(20, Some(20.0))
                && problem(20, Some(-1.0))
        );
        assert!(!problem(20, Some(0.0)) && !problem(3600, None));
    }
}
