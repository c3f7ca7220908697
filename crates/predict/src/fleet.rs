//! Away with everything: the plan of a site's evacuation over its links, before a deadline.
//!
//! # What is planned
//!
//! For each VM: over which link, when, and with which [`Strategy`]; and who makes it in time. First as many VMs as
//! possible are to be away in time, then they are to be disturbed as little as possible, then things are to be over soon.
//!
//! # How moves share a link
//!
//! One after the other at the full rate, not side by side: a page that is sent in half the time is dirtied again half as
//! often, so the sum of the bytes is least that way, and half of the VMs are away at half time. Where one move cannot use a link
//! (its host's card, its codec), the link is several *lanes*. What a move takes besides its bytes overlaps with others' bytes: so there
//! are more moves under way than lanes, and [`LinkPlan::at_once`] says how many.
//!
//! # How far from the best
//!
//! Packing moves into lanes is NP-hard; this is best-fit decreasing over the moves that are shortest, then milder strategies where
//! there is room, then exchanges. Against the best of all plans of 4,000 small fleets (up to five VMs, two links, three strategies;
//! `tests/fleet.rs`) it had as many VMs away in time in each of them, and disturbed more than it had to in 83. For a large fleet
//! [`Plan::at_most`] is a number of VMs that no plan exceeds, to be compared with [`Plan::in_time`].
//!
//! # How sure it is
//!
//! A link that is slower than said makes everything on it late in proportion, so its rate is an interval where one is known. What the
//! model itself is off by ([`Fleet::error`]) differs from move to move and partly evens out: the errors of the moves in front of one add up as
//! independent ones do, by their squares. Both make [`Move::end_between_s`]; a VM is [surely](Move::surely) away in time when all of that lies before
//! the deadline.
//!
//! # What can go wrong
//!
//! Guests are known by their mean rates here, not by their logs: one with phases may meet a bad one. *The host that has a VM's blocks
//! fills up with others*: a VM that finds no room there is planned anew as if nobody had them.

mod room;

use crate::amount::{Overheads, PageRate, Pages};
use crate::avg::Evenly;
use crate::rules::Rules;
use crate::simulate::{Cost as PageCost, Link, Wire, simulate_on};
use godwit_units::{BitRate, Bytes, Span};
use room::{Homes, Rooms};
use serde::{Deserialize, Serialize};
use std::collections::{HashMap, HashSet};
use std::time::Duration;

/// How a VM is moved; the least disturbing first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Strategy {
    /// Its disks before it, mirrored until it stops.
    Mirror,
    /// Its disks after it: it reads over the link until all are there.
    Postcopy,
    /// Shut down, and booted at the destination from disks that come as they are read.
    Cold,
}

impl Strategy {
    const ALL: [Self; 3] = [Self::Mirror, Self::Postcopy, Self::Cold];

    /// What it is called.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Mirror => "mirror",
            Self::Postcopy => "postcopy",
            Self::Cold => "cold",
        }
    }

    /// How much it disturbs; a VM that is shut down is worse than any number that wait for reads.
    #[must_use]
    pub const fn disturbs(self) -> u64 {
        match self {
            Self::Mirror => 0,
            Self::Postcopy => 1,
            Self::Cold => 1_000_000,
        }
    }
}

/// A way out of the site.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FleetLink {
    /// The site that it leads to.
    pub to: String,
    /// Its goodput, in Mbit/s.
    pub rate_mbit: f64,
    /// Its round trip, in ms.
    #[serde(default)]
    pub rtt_ms: f64,
    /// The most that one move can use of it, in Mbit/s. None: all.
    pub per_move_mbit: Option<f64>,
    /// Room for VMs' memory there, in GiB. None: enough. Where hosts are listed, their room counts.
    pub room_gib: Option<f64>,
    /// The hosts there. None: one is as good as another.
    #[serde(default)]
    pub host: Vec<FleetHost>,
    /// The goodput at the least and at the most, in Mbit/s. None: as it likely is.
    pub rate_lower_mbit: Option<f64>,
    /// As above.
    pub rate_upper_mbit: Option<f64>,
    /// For how long moves that are under way will still take it, in seconds.
    #[serde(default)]
    pub busy_s: f64,
    /// As [`Fleet::pre_s`], where it was measured for this link.
    pub pre_s: Option<f64>,
    /// What a move over it takes after its last byte, in ms, round trips and all, where it was measured.
    pub pause_ms: Option<f64>,
}

impl FleetLink {
    /// A link of which no more is known.
    #[must_use]
    pub fn new(to: &str, rate_mbit: f64) -> Self {
        Self {
            to: to.into(),
            rate_mbit,
            rtt_ms: 0.0,
            per_move_mbit: None,
            room_gib: None,
            host: vec![],
            rate_lower_mbit: None,
            rate_upper_mbit: None,
            busy_s: 0.0,
            pre_s: None,
            pause_ms: None,
        }
    }

    /// How many times as long its bytes may take as they likely do, at the least and at the most.
    fn slower(&self) -> (f64, f64) {
        let times = |rate: Option<f64>| self.rate_mbit / rate.unwrap_or(self.rate_mbit);
        (times(self.rate_upper_mbit).min(1.0), times(self.rate_lower_mbit).max(1.0))
    }
}

/// A host at the end of a link.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FleetHost {
    /// Its name.
    pub name: String,
    /// Room for VMs' memory, in GiB. None: enough.
    pub memory_gib: Option<f64>,
    /// Room for their disks, in GiB. None: enough.
    pub disk_gib: Option<f64>,
    /// The machine types that it can run. None: any.
    pub machines: Option<Vec<String>>,
}

/// What a host has of a VM's disks.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Held {
    /// The host.
    pub host: String,
    /// How much, in GiB.
    pub gib: f64,
}

/// A VM that is to leave.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FleetVm {
    /// Its name.
    pub name: String,
    /// Its memory, in MiB.
    pub memory_mib: u64,
    /// Its disks, in GiB.
    #[serde(default)]
    pub disk_gib: f64,
    /// What the destinations have of them already, in GiB: a pre-cache's work.
    #[serde(default)]
    pub held_gib: f64,
    /// What single hosts have of them: it goes to the one that has most.
    #[serde(default)]
    pub held: Vec<Held>,
    /// Pages it dirties in a second.
    #[serde(default)]
    pub dirty_pages_per_s: f64,
    /// The memory that it writes to, in MiB. None: all.
    pub working_set_mib: Option<u64>,
    /// What it writes to its disks, in KiB a second.
    #[serde(default)]
    pub disk_kib_per_s: f64,
    /// How it may be moved.
    #[serde(default = "live")]
    pub strategies: Vec<Strategy>,
    /// Where to. None: anywhere.
    pub to: Option<Vec<String>>,
    /// The machine type that it needs. None: any host will do.
    pub machine: Option<String>,
    /// Whether it is off: only its disks travel then, whatever its `strategies`, and nobody waits for it.
    #[serde(default)]
    pub off: bool,
    /// Memory that it takes of its host, in MiB. None: its own.
    pub room_mib: Option<u64>,
    /// Bytes on the link for each byte of its disks. None: one.
    pub disk_bytes_a_byte: Option<f64>,
    /// Bytes on the link for each page of its memory, the first time. None: all of the page.
    pub first_bytes_a_page: Option<f64>,
    /// For each page that is sent again.
    pub again_bytes_a_page: Option<f64>,
}

impl FleetVm {
    /// A VM of which no more is known.
    #[must_use]
    pub fn new(name: &str, memory_mib: u64) -> Self {
        Self {
            name: name.into(),
            memory_mib,
            disk_gib: 0.0,
            held_gib: 0.0,
            held: vec![],
            dirty_pages_per_s: 0.0,
            working_set_mib: None,
            disk_kib_per_s: 0.0,
            strategies: live(),
            to: None,
            machine: None,
            off: false,
            room_mib: None,
            disk_bytes_a_byte: None,
            first_bytes_a_page: None,
            again_bytes_a_page: None,
        }
    }

    /// Memory that it takes of its host, in MiB.
    fn room(&self) -> f64 {
        self.room_mib.unwrap_or(self.memory_mib) as f64
    }

    fn wire(&self) -> Wire {
        let page = Wire::PAGES.first.bytes;
        let cost = |bytes: Option<f64>| PageCost { bytes: bytes.unwrap_or(page), seconds: 0.0 };
        // Who makes pages small names those that are there.
        let same = self.again_bytes_a_page.map(|bytes| bytes.min(NAMED));
        Wire { first: cost(self.first_bytes_a_page), again: cost(self.again_bytes_a_page), same: cost(same) }
    }
}

fn live() -> Vec<Strategy> {
    vec![Strategy::Mirror, Strategy::Postcopy]
}

/// A site that is to be left.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fleet {
    /// What a move takes before its first byte, in seconds.
    #[serde(default = "pre")]
    pub pre_s: f64,
    /// What it takes after its last one, in ms, besides one and a half round trips.
    #[serde(default = "post")]
    pub post_ms: f64,
    /// How long a VM takes to shut down and to boot, in seconds.
    #[serde(default = "boot")]
    pub boot_s: f64,
    /// How far moves are off from what is reckoned here, as past ones were.
    #[serde(default)]
    pub error: Errors,
    /// Its links.
    #[serde(default)]
    pub link: Vec<FleetLink>,
    /// Its VMs.
    #[serde(default)]
    pub vm: Vec<FleetVm>,
}

/// What moves took over what had been reckoned.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Errors {
    /// Of their time.
    pub total: Span,
    /// Of the time that guests stand.
    pub downtime: Span,
}

impl Default for Errors {
    fn default() -> Self {
        Self { total: crate::whole::UNPROVED, downtime: crate::whole::UNPROVED }
    }
}

impl Default for Fleet {
    fn default() -> Self {
        Self { pre_s: pre(), post_ms: post(), boot_s: boot(), error: Errors::default(), link: vec![], vm: vec![] }
    }
}

const fn pre() -> f64 {
    2.0
}

const fn post() -> f64 {
    100.0
}

const fn boot() -> f64 {
    60.0
}

/// The most VMs that are planned at once: a plan's work grows with VMs times lanes.
pub const MAX_VMS: usize = 100_000;
/// The most lanes of all links.
pub const MAX_LANES: usize = 1000;
/// The most hosts at the ends of all links.
pub const MAX_HOSTS: usize = 10_000;
/// The most machine types: what runs where is looked up for each.
const MAX_MACHINES: usize = 1000;
/// A guest that writes to its disks at more than this share of the link is never caught up with.
const MIRRORED_SHARE: f64 = 0.9;
/// Batches of a round of memory; more make the model no better where rates are means.
const BATCHES: u64 = 32;
/// What naming a page takes on a link.
const NAMED: f64 = 16.0;
/// Larger sets that are tried, after one that does not pack: a heuristic's failure is no proof.
const TRIES: usize = 64;

/// Exchanges of a VM that is in time for one that is not that are tried: some seconds' work.
const EXCHANGES: usize = 5_000_000;

/// Why there is no plan.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FleetError {
    /// A value that makes no sense.
    #[error("{what} of {whose} is {value}; {hint}")]
    Value {
        /// Which.
        what: &'static str,
        /// Of which link or VM.
        whose: String,
        /// What it is.
        value: String,
        /// What to write.
        hint: &'static str,
    },
    /// There is no way out.
    #[error("the site has no link: describe each as [[link]] with `to` and `rate_mbit`")]
    NoLink,
    /// A VM is to go where no link leads.
    #[error("VM `{vm}` is to go to `{to}`, where no link leads; links lead to: {known}")]
    NoSuchLink {
        /// Which VM.
        vm: String,
        /// Where to.
        to: String,
        /// Where links lead.
        known: String,
    },
    /// A name stands for two.
    #[error("there are two VMs called `{0}`: give each a name of its own")]
    Twice(String),
    /// It is too much.
    #[error("{there} {what} are more than the {most} that are planned at once: plan them in parts")]
    TooMany {
        /// Of what.
        what: &'static str,
        /// How many there are.
        there: usize,
        /// How many there may be.
        most: usize,
    },
}

/// One VM's move.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Move {
    /// The VM.
    pub vm: String,
    /// Where to.
    pub to: String,
    /// To which host there, where hosts are known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// How.
    pub strategy: Strategy,
    /// The VM whose bytes the link carries before this one's, if any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub after: Option<String>,
    /// When it is ordered, in seconds from the start.
    pub start_s: f64,
    /// When it is over: nothing of it is left at the site.
    pub end_s: f64,
    /// The same at the earliest and at the latest.
    pub end_between_s: [f64; 2],
    /// How long the guest stands.
    pub downtime_ms: f64,
    /// The same at the least and at the most.
    pub downtime_between_ms: [f64; 2],
    /// What it sends.
    pub bytes: u64,
    /// Whether it is likely over before the deadline.
    pub in_time: bool,
    /// Whether it is over by then even at its latest.
    pub surely: bool,
}

/// A VM that no plan moves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Stranded {
    /// The VM.
    pub vm: String,
    /// Why.
    pub why: String,
}

/// What a link is used for.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LinkPlan {
    /// Where it leads.
    pub to: String,
    /// Moves over it.
    pub moves: usize,
    /// The most moves that are under way at once.
    pub at_once: usize,
    /// What they send.
    pub bytes: u64,
    /// When the last is over, in seconds.
    pub end_s: f64,
    /// The same at the earliest and at the latest.
    pub end_between_s: [f64; 2],
}

/// The plan.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Plan {
    /// The deadline, in seconds from the start.
    pub deadline_s: f64,
    /// VMs that are likely away before it.
    pub in_time: usize,
    /// Those of them that surely are.
    pub surely: usize,
    /// VMs that are away later.
    pub late: usize,
    /// No plan has more VMs away in time.
    pub at_most: usize,
    /// When all are away.
    pub end_s: f64,
    /// The same at the earliest and at the latest.
    pub end_between_s: [f64; 2],
    /// What is sent.
    pub bytes: u64,
    /// Links.
    pub links: Vec<LinkPlan>,
    /// Moves, by their starts.
    pub moves: Vec<Move>,
    /// VMs that cannot be moved.
    pub stranded: Vec<Stranded>,
}

/// What a way to move a VM over a lane costs.
#[derive(Clone, Copy, Debug)]
struct Cost {
    seconds: f64,
    downtime_s: f64,
    bytes: f64,
}

/// A lane of a link: one move's bytes at a time.
#[derive(Clone, Debug)]
struct Lane {
    link: usize,
    /// Its rate, in Mbit/s.
    rate: f64,
    /// How long its moves may take together.
    room: f64,
    load: f64,
    /// For how long others take it before.
    busy: f64,
}

/// A VM's place.
#[derive(Clone, Copy, Debug)]
struct Place {
    lane: usize,
    host: usize,
    strategy: Strategy,
}

/// What VMs cost: by VM, link and strategy.
struct Costs(Vec<Vec<[Option<Cost>; 3]>>);

impl Costs {
    fn get(&self, vm: usize, link: usize, strategy: Strategy) -> Option<Cost> {
        self.0[vm][link][strategy as usize]
    }

    /// The strategy that is over soonest on a link; among equals the least disturbing.
    fn shortest(&self, vm: usize, link: usize) -> Option<(Strategy, Cost)> {
        let ways = Strategy::ALL.into_iter().filter_map(|s| Some((s, self.get(vm, link, s)?)));
        ways.min_by(|a, b| a.1.seconds.total_cmp(&b.1.seconds))
    }

    fn mildest(&self, vm: usize, link: usize) -> Option<(Strategy, Cost)> {
        Strategy::ALL.into_iter().find_map(|s| Some((s, self.get(vm, link, s)?)))
    }
}

impl Fleet {
    /// Plans the evacuation.
    ///
    /// # Errors
    /// What makes no sense in the description.
    pub fn plan(&self, deadline: Duration) -> Result<Plan, FleetError> {
        self.check()?;
        let first = self.plan_once(deadline)?;
        // Whoever found no room at the host that has its blocks may go to another one, without them.
        let crowded: HashSet<&str> = first.stranded.iter().map(|s| s.vm.as_str()).collect();
        let mut freed = self.clone();
        let bound = |vm: &&mut FleetVm| crowded.contains(vm.name.as_str()) && !vm.held.is_empty();
        let count = freed.vm.iter_mut().filter(bound).map(|vm| vm.held.clear()).count();
        if count == 0 {
            return Ok(first);
        }
        let second = freed.plan_once(deadline)?;
        let merit = |plan: &Plan| (plan.in_time, plan.moves.len());
        Ok(if merit(&second) > merit(&first) { second } else { first })
    }

    fn plan_once(&self, deadline: Duration) -> Result<Plan, FleetError> {
        let lanes = self.lanes(deadline)?;
        let homes = Homes::of(self);
        let costs = self.costs(&lanes, &homes);
        let places = vec![None; self.vm.len()];
        let mut packer = Packer { fleet: self, costs: &costs, homes: &homes, lanes, places, rooms: Rooms::of(self) };
        packer.pack();
        Ok(packer.plan(deadline))
    }

    fn check(&self) -> Result<(), FleetError> {
        let number = |what, whose: &str, value: f64, least: f64, hint| {
            if value.is_finite() && value >= least && value <= 1e12 {
                Ok(())
            } else {
                Err(FleetError::Value { what, whose: whose.into(), value: value.to_string(), hint })
            }
        };
        let (zero, positive) = ("write 0 or more", "write more than 0");
        number("pre_s", "the fleet", self.pre_s, 0.0, zero)?;
        number("post_ms", "the fleet", self.post_ms, 0.0, zero)?;
        number("boot_s", "the fleet", self.boot_s, 0.0, zero)?;
        if self.link.is_empty() {
            return Err(FleetError::NoLink);
        }
        for link in &self.link {
            let whose = format!("the link to `{}`", link.to);
            number("rate_mbit", &whose, link.rate_mbit, 1e-3, positive)?;
            number("rtt_ms", &whose, link.rtt_ms, 0.0, zero)?;
            number("per_move_mbit", &whose, link.per_move_mbit.unwrap_or(1.0), 1e-3, positive)?;
            number("room_gib", &whose, link.room_gib.unwrap_or(0.0), 0.0, zero)?;
            number("busy_s", &whose, link.busy_s, 0.0, zero)?;
            number("pre_s", &whose, link.pre_s.unwrap_or(0.0), 0.0, zero)?;
            number("pause_ms", &whose, link.pause_ms.unwrap_or(0.0), 0.0, zero)?;
            number("rate_lower_mbit", &whose, link.rate_lower_mbit.unwrap_or(1.0), 1e-3, positive)?;
            number("rate_upper_mbit", &whose, link.rate_upper_mbit.unwrap_or(1.0), 1e-3, positive)?;
            for host in &link.host {
                let whose = format!("host `{}`", host.name);
                number("memory_gib", &whose, host.memory_gib.unwrap_or(0.0), 0.0, zero)?;
                number("disk_gib", &whose, host.disk_gib.unwrap_or(0.0), 0.0, zero)?;
            }
        }
        for (what, span) in [("error.total", self.error.total), ("error.downtime", self.error.downtime)] {
            for end in [span.lower, span.likely, span.upper] {
                number(what, "the fleet", end, 1e-3, positive)?;
            }
        }
        let hosts = self.link.iter().map(|link| link.host.len()).sum();
        if hosts > MAX_HOSTS {
            return Err(FleetError::TooMany { what: "hosts", there: hosts, most: MAX_HOSTS });
        }
        if self.vm.len() > MAX_VMS {
            return Err(FleetError::TooMany { what: "VMs", there: self.vm.len(), most: MAX_VMS });
        }
        let mut names = HashSet::new();
        for vm in &self.vm {
            let whose = format!("VM `{}`", vm.name);
            if !names.insert(&vm.name) {
                return Err(FleetError::Twice(vm.name.clone()));
            }
            number("memory_mib", &whose, vm.memory_mib as f64, 1.0, positive)?;
            number("disk_gib", &whose, vm.disk_gib, 0.0, zero)?;
            number("held_gib", &whose, vm.held_gib, 0.0, zero)?;
            number("dirty_pages_per_s", &whose, vm.dirty_pages_per_s, 0.0, zero)?;
            number("disk_kib_per_s", &whose, vm.disk_kib_per_s, 0.0, zero)?;
            number("first_bytes_a_page", &whose, vm.first_bytes_a_page.unwrap_or(0.0), 0.0, zero)?;
            number("disk_bytes_a_byte", &whose, vm.disk_bytes_a_byte.unwrap_or(0.0), 0.0, zero)?;
            number("again_bytes_a_page", &whose, vm.again_bytes_a_page.unwrap_or(0.0), 0.0, zero)?;
            for held in &vm.held {
                number("gib held", &whose, held.gib, 0.0, zero)?;
            }
            if vm.strategies.is_empty() {
                let hint = "name at least one of mirror, postcopy and cold";
                return Err(FleetError::Value { what: "strategies", whose, value: "empty".into(), hint });
            }
            for to in vm.to.iter().flatten() {
                if !self.link.iter().any(|link| link.to == *to) {
                    let known = self.link.iter().map(|l| l.to.as_str()).collect::<Vec<_>>().join(", ");
                    return Err(FleetError::NoSuchLink { vm: vm.name.clone(), to: to.clone(), known });
                }
            }
        }
        let machines: HashSet<_> = self.vm.iter().map(|vm| &vm.machine).collect();
        if machines.len() > MAX_MACHINES {
            return Err(FleetError::TooMany { what: "machine types", there: machines.len(), most: MAX_MACHINES });
        }
        Ok(())
    }

    /// What moves take besides their bytes.
    fn overheads(&self, link: &FleetLink) -> (f64, f64) {
        let pause = link.pause_ms.unwrap_or(self.post_ms + 1.5 * link.rtt_ms);
        (link.pre_s.unwrap_or(self.pre_s), pause / 1e3)
    }

    fn lanes(&self, deadline: Duration) -> Result<Vec<Lane>, FleetError> {
        let lanes_of =
            |link: &FleetLink| link.per_move_mbit.map_or(1.0, |most| (link.rate_mbit / most).ceil().max(1.0));
        let there: f64 = self.link.iter().map(lanes_of).sum();
        if there > MAX_LANES as f64 {
            return Err(FleetError::TooMany { what: "lanes of links", there: there as usize, most: MAX_LANES });
        }
        let lanes = self.link.iter().enumerate().flat_map(|(link, known)| {
            let (pre, post) = self.overheads(known);
            let rate = known.rate_mbit / lanes_of(known);
            let room = deadline.as_secs_f64() - pre - post - known.busy_s;
            let lane = Lane { link, rate, room, load: 0.0, busy: known.busy_s };
            std::iter::repeat_n(lane, lanes_of(known) as usize)
        });
        Ok(lanes.collect())
    }

    fn costs(&self, lanes: &[Lane], homes: &Homes) -> Costs {
        let mut known = HashMap::new();
        let lanes_of = |link| lanes.iter().filter(|lane| lane.link == link).count().max(1) as f64;
        let rates: Vec<f64> = self.link.iter().enumerate().map(|(i, l)| l.rate_mbit * 1e6 / lanes_of(i)).collect();
        let of = |(i, vm): (usize, &FleetVm), known: &mut HashMap<_, _>| {
            let each = self.link.iter().zip(&rates).enumerate().map(|(at, (link, rate))| {
                let may_go = vm.to.as_ref().is_none_or(|to| to.contains(&link.to)) && homes.may_run(i, at);
                let held = homes.held(vm, i, at);
                let way = |strategy| {
                    let may = if vm.off { strategy == Strategy::Cold } else { vm.strategies.contains(&strategy) };
                    let fits = may_go && may;
                    fits.then(|| self.cost((vm, held), link, *rate, strategy, known)).flatten()
                };
                Strategy::ALL.map({
                    let mut way = way;
                    move |strategy| way(strategy)
                })
            });
            each.collect::<Vec<_>>()
        };
        Costs(self.vm.iter().enumerate().map(|vm| of(vm, &mut known)).collect())
    }

    /// What a VM costs at so many bits a second, so many GiB of whose disks are there; none where it never ends.
    fn cost(
        &self,
        (vm, held): (&FleetVm, f64),
        link: &FleetLink,
        rate: f64,
        strategy: Strategy,
        known: &mut HashMap<[u64; 6], Option<(f64, f64, f64)>>,
    ) -> Option<Cost> {
        // What past moves took more than was reckoned is reckoned with.
        let cost = self.unproved_cost((vm, held), link, rate, strategy, known)?;
        let (total, downtime) = (self.error.total.likely, self.error.downtime.likely);
        Some(Cost { seconds: cost.seconds * total, downtime_s: cost.downtime_s * downtime, ..cost })
    }

    fn unproved_cost(
        &self,
        (vm, held): (&FleetVm, f64),
        link: &FleetLink,
        rate: f64,
        strategy: Strategy,
        known: &mut HashMap<[u64; 6], Option<(f64, f64, f64)>>,
    ) -> Option<Cost> {
        let post = self.overheads(link).1;
        let rate = rate / 8.0;
        let disk = (vm.disk_gib - held).max(0.0) * (1_u64 << 30) as f64 * vm.disk_bytes_a_byte.unwrap_or(1.0);
        let writes = if vm.disk_gib > 0.0 { vm.disk_kib_per_s * 1024.0 } else { 0.0 };
        let mut memory = |rate: f64| {
            let wire = vm.wire();
            let key = [
                vm.memory_mib,
                vm.working_set_mib.unwrap_or(u64::MAX),
                vm.dirty_pages_per_s.to_bits(),
                rate.to_bits(),
                wire.first.bytes.to_bits(),
                wire.again.bytes.to_bits(),
            ];
            *known.entry(key).or_insert_with(|| memory(vm, rate))
        };
        match strategy {
            Strategy::Mirror => {
                if writes > MIRRORED_SHARE * rate {
                    return None;
                }
                // What the guest writes travels, too, as long as it is at the source.
                let free = rate - writes;
                let before = disk / free;
                let (seconds, stop, _) = memory(free)?;
                let seconds = before + seconds;
                Some(Cost { seconds, downtime_s: stop + post, bytes: seconds * rate })
            }
            Strategy::Postcopy => {
                let (seconds, stop, bytes) = memory(rate)?;
                Some(Cost { seconds: seconds + disk / rate, downtime_s: stop + post, bytes: bytes + disk })
            }
            Strategy::Cold => {
                let downtime_s = if vm.off { 0.0 } else { self.boot_s + post };
                Some(Cost { seconds: disk / rate, downtime_s, bytes: disk })
            }
        }
    }
}

/// The seconds of a copy of memory at so many bytes a second, those of the stop, and its bytes.
fn memory(vm: &FleetVm, rate: f64) -> Option<(f64, f64, f64)> {
    let pages = Pages::of(Bytes::mib(vm.memory_mib));
    let working_set = vm.working_set_mib.map_or(pages, |mib| Pages::of(Bytes::mib(mib.min(vm.memory_mib))));
    let mut guest = Evenly::new(pages, working_set, PageRate::new(vm.dirty_pages_per_s));
    let link = Link { rate: BitRate((rate * 8.0) as u64), overheads: Overheads::default() };
    let rules = Rules { batch: (pages.0 / BATCHES).max(1), ..Rules::godwit() };
    let moved = simulate_on(&mut guest, link, &vm.wire(), &rules).ok()?;
    Some((moved.total_s, moved.downtime_ms / 1e3, moved.bytes as f64))
}

/// Puts VMs into lanes.
struct Packer<'a> {
    fleet: &'a Fleet,
    costs: &'a Costs,
    homes: &'a Homes,
    lanes: Vec<Lane>,
    places: Vec<Option<Place>>,
    rooms: Rooms,
}

/// What a link is used for: from when to when each of its moves lasts, when the last is over at the earliest and the latest, and their bytes.
#[derive(Clone, Debug, Default)]
struct Used {
    spans: Vec<(f64, f64)>,
    ends: [f64; 2],
    bytes: u64,
}

/// A packing, to come back to.
type Kept = (Vec<Lane>, Vec<Option<Place>>, Rooms);

/// Which strategy VMs are packed with.
#[derive(Clone, Copy)]
enum With {
    Shortest,
    Mildest,
}

impl Packer<'_> {
    fn clear(&mut self) {
        self.lanes.iter_mut().for_each(|lane| lane.load = 0.0);
        self.places.iter_mut().for_each(|place| *place = None);
        self.rooms = Rooms::of(self.fleet);
    }

    fn way(&self, vm: usize, link: usize, with: With) -> Option<(Strategy, Cost)> {
        match with {
            With::Shortest => self.costs.shortest(vm, link),
            With::Mildest => self.costs.mildest(vm, link),
        }
    }

    /// The share of its lane's time that a VM takes at the least.
    fn least(&self, vm: usize, with: With) -> f64 {
        let shares = self.lanes.iter().filter_map(|lane| {
            let share = self.way(vm, lane.link, with)?.1.seconds / lane.room;
            (lane.room > 0.0 && share <= 1.0).then_some(share)
        });
        shares.fold(f64::INFINITY, f64::min)
    }

    /// The host that a VM would go to over a link now.
    fn host(&self, vm: usize, link: usize) -> Option<usize> {
        self.homes.host(&self.rooms, &self.fleet.vm[vm], vm, link)
    }

    fn put(&mut self, vm: usize, place: Place, seconds: f64) {
        let (link, known) = (self.lanes[place.lane].link, &self.fleet.vm[vm]);
        self.lanes[place.lane].load += seconds;
        self.rooms.take(link, place.host, known, self.homes.held(known, vm, link));
        self.places[vm] = Some(place);
    }

    fn take(&mut self, vm: usize) -> Option<Place> {
        let place = self.places[vm].take()?;
        let link = self.lanes[place.lane].link;
        self.lanes[place.lane].load -= self.costs.get(vm, link, place.strategy).map_or(0.0, |cost| cost.seconds);
        let known = &self.fleet.vm[vm];
        self.rooms.give_back(link, place.host, known, self.homes.held(known, vm, link));
        Some(place)
    }

    /// The lane in which least is left over behind a VM.
    fn fits_best(&self, vm: usize, with: With) -> Option<(Place, f64)> {
        let mut best: Option<(f64, Place, f64)> = None;
        for (i, lane) in self.lanes.iter().enumerate() {
            let Some((strategy, cost)) = self.way(vm, lane.link, with) else { continue };
            let over = lane.room - lane.load - cost.seconds;
            // Between links the faster one counts, too: it takes less of its time.
            let score = over / lane.room.max(1e-9) + 4.0 * cost.seconds / lane.room.max(1e-9);
            if over < 0.0 || best.is_some_and(|(least, ..)| score >= least) {
                continue;
            }
            if let Some(host) = self.host(vm, lane.link) {
                best = Some((score, Place { lane: i, host, strategy }, cost.seconds));
            }
        }
        best.map(|(_, place, seconds)| (place, seconds))
    }

    /// Packs these, the longest first. Those that do not fit are left out; how many fit.
    fn try_all(&mut self, vms: &[usize], with: With) -> usize {
        self.clear();
        let mut fit = 0;
        for vm in vms.iter().rev() {
            if let Some((place, seconds)) = self.fits_best(*vm, with) {
                self.put(*vm, place, seconds);
                fit += 1;
            }
        }
        fit
    }

    /// VMs that may be in time, those that take least first.
    fn by_length(&self, with: With) -> Vec<usize> {
        let mut vms: Vec<(f64, usize)> = (0..self.places.len()).map(|vm| (self.least(vm, with), vm)).collect();
        vms.retain(|(share, _)| share.is_finite());
        vms.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        vms.into_iter().map(|(_, vm)| vm).collect()
    }

    /// No plan has more VMs in time: as if moves could be cut to pieces, and each took the lane that costs it least.
    ///
    /// A lane's time is worth as much as any other's, or as much as its rate: each gives a bound, and the lower one holds.
    fn at_most(&self) -> usize {
        let bound = |worth: &dyn Fn(&Lane) -> f64| {
            let usable = |lane: &&Lane| lane.room > 0.0;
            let mut there: f64 = self.lanes.iter().filter(usable).map(|lane| worth(lane) * lane.room).sum();
            there *= 1.0 + 1e-12;
            let least = |vm: usize| {
                let ways = self.lanes.iter().filter(usable).filter_map(|lane| {
                    let seconds = self.costs.shortest(vm, lane.link)?.1.seconds;
                    (seconds <= lane.room).then_some(worth(lane) * seconds)
                });
                ways.fold(f64::INFINITY, f64::min)
            };
            let mut all: Vec<f64> = (0..self.places.len()).map(least).filter(|least| least.is_finite()).collect();
            all.sort_by(f64::total_cmp);
            let fits = |least: &&f64| {
                there -= **least;
                there >= 0.0
            };
            all.iter().take_while(fits).count()
        };
        bound(&|lane| 1.0 / lane.room).min(bound(&|lane| lane.rate))
    }

    fn pack(&mut self) {
        // All of them, and gently: there is nothing to choose then.
        let mildly = self.by_length(With::Mildest);
        if mildly.len() == self.places.len() && self.try_all(&mildly, With::Mildest) == mildly.len() {
            self.balance();
            return;
        }
        let vms = self.by_length(With::Shortest);
        let most = self.at_most();
        // As many of the shortest as fit; then, what room there is for others.
        let mut best = (0, 0);
        let (mut low, mut high) = (0, most);
        while low < high {
            let middle = (low + high).div_ceil(2);
            if self.try_all(&vms[..middle], With::Shortest) == middle { low = middle } else { high = middle - 1 }
        }
        for set in (low..=most).take(TRIES) {
            let fit = self.try_all(&vms[..set], With::Shortest);
            if fit > best.0 {
                best = (fit, set);
            }
        }
        // From the shortest ways to milder ones; or from the mildest, and what does not fit in the shortest.
        let mut found: Option<((usize, u64), Kept)> = None;
        for with in [With::Shortest, With::Mildest] {
            for order in [&vms, &mildly] {
                self.try_all(&order[..best.1.min(order.len())], with);
                self.fill(&vms);
                self.upgrade();
                self.exchange();
                self.upgrade();
                let placed = self.places.iter().flatten();
                let disturbs: u64 = placed.clone().map(|place| place.strategy.disturbs()).sum();
                // Fewer late ones first.
                let score = (self.places.len() - placed.count(), disturbs);
                if found.as_ref().is_none_or(|(least, _)| score < *least) {
                    found = Some((score, self.keep()));
                }
            }
        }
        if let Some((_, kept)) = found {
            (self.lanes, self.places, self.rooms) = kept;
        }
        self.balance();
    }

    /// Whoever fits in somewhere, by the shortest ways.
    fn fill(&mut self, vms: &[usize]) {
        for vm in vms {
            if self.places[*vm].is_none()
                && let Some((place, seconds)) = self.fits_best(*vm, With::Shortest)
            {
                self.put(*vm, place, seconds);
            }
        }
    }

    fn keep(&self) -> Kept {
        (self.lanes.clone(), self.places.clone(), self.rooms.clone())
    }

    /// Somebody who is disturbed stays behind if somebody else fits in who is disturbed less: as many are in time.
    fn exchange(&mut self) {
        let mut tries = 0;
        let mut disturbed: Vec<usize> = (0..self.places.len()).collect();
        disturbed.retain(|vm| self.places[*vm].is_some_and(|place| place.strategy > Strategy::Mirror));
        disturbed.sort_by_key(|vm| std::cmp::Reverse(self.places[*vm].map(|place| place.strategy)));
        for vm in disturbed {
            let Some(before) = self.take(vm) else { continue };
            let milder = Strategy::ALL.into_iter().filter(|s| *s < before.strategy);
            let mut found = None;
            'found: for strategy in milder {
                for other in 0..self.places.len() {
                    tries += 1;
                    if other != vm && self.places[other].is_none() && tries < EXCHANGES {
                        found = self.fits_with(other, strategy).map(|(place, seconds)| (other, place, seconds));
                        if found.is_some() {
                            break 'found;
                        }
                    }
                }
            }
            let seconds = |p: Place| self.costs.get(vm, self.lanes[p.lane].link, p.strategy).map_or(0.0, |c| c.seconds);
            match found {
                Some((other, place, seconds)) => self.put(other, place, seconds),
                None => self.put(vm, before, seconds(before)),
            }
        }
    }

    /// The same VMs with the same strategies over all lanes alike, if they fit that way: then all is over sooner.
    fn balance(&mut self) {
        let before = self.keep();
        let seconds = |p: Place, vm: usize, lanes: &[Lane]| self.costs.get(vm, lanes[p.lane].link, p.strategy);
        let mut all: Vec<(f64, usize, Strategy)> = vec![];
        for (vm, place) in self.places.iter().enumerate() {
            if let Some((place, cost)) = place.and_then(|p| Some((p, seconds(p, vm, &self.lanes)?))) {
                all.push((cost.seconds, vm, place.strategy));
            }
        }
        all.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        self.clear();
        for (_, vm, strategy) in all {
            let hosts = self.hosts(vm);
            let ends = |(lane, known): (usize, &Lane)| {
                let seconds = self.costs.get(vm, known.link, strategy)?.seconds;
                let end = known.load + seconds;
                let place = Place { lane, host: hosts[known.link]?, strategy };
                (end <= known.room).then_some((end + known.busy, place, seconds))
            };
            match self.lanes.iter().enumerate().filter_map(ends).min_by(|a, b| a.0.total_cmp(&b.0)) {
                Some((_, place, seconds)) => self.put(vm, place, seconds),
                None => {
                    (self.lanes, self.places, self.rooms) = before;
                    return;
                }
            }
        }
        let last = |lanes: &[Lane]| lanes.iter().map(|lane| lane.load + lane.busy).fold(0.0, f64::max);
        if last(&self.lanes) > last(&before.0) {
            (self.lanes, self.places, self.rooms) = before;
        }
    }

    /// Milder strategies where there is room for them: first for those whose relief costs least.
    fn upgrade(&mut self) {
        for worst in [Strategy::Cold, Strategy::Postcopy] {
            let mut wishes = vec![];
            for vm in 0..self.places.len() {
                let Some(place) = self.places[vm].filter(|place| place.strategy == worst) else { continue };
                let link = self.lanes[place.lane].link;
                let now = self.costs.get(vm, link, worst).map_or(0.0, |cost| cost.seconds);
                let milder = Strategy::ALL.into_iter().filter(|s| *s < worst);
                for strategy in milder {
                    let links = (0..self.fleet.link.len()).filter_map(|l| self.costs.get(vm, l, strategy));
                    let least = links.map(|cost| cost.seconds).fold(f64::INFINITY, f64::min);
                    if least.is_finite() {
                        wishes.push((least - now, vm, strategy));
                    }
                }
            }
            wishes.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)).then(a.2.cmp(&b.2)));
            for (_, vm, strategy) in wishes {
                if self.places[vm].is_some_and(|place| place.strategy > strategy) {
                    self.place_with(vm, strategy);
                }
            }
        }
    }

    /// Gives a VM another strategy, wherever there is room.
    fn place_with(&mut self, vm: usize, strategy: Strategy) {
        let Some(before) = self.take(vm) else { return };
        match self.fits_with(vm, strategy) {
            Some((place, seconds)) => self.put(vm, place, seconds),
            None => {
                let link = self.lanes[before.lane].link;
                let seconds = self.costs.get(vm, link, before.strategy).map_or(0.0, |cost| cost.seconds);
                self.put(vm, before, seconds);
            }
        }
    }

    /// The lane in which least is left over behind a VM that is moved so, and how long it takes there.
    fn fits_with(&self, vm: usize, strategy: Strategy) -> Option<(Place, f64)> {
        let mut best: Option<(f64, Place, f64)> = None;
        for (i, lane) in self.lanes.iter().enumerate() {
            let Some(cost) = self.costs.get(vm, lane.link, strategy) else { continue };
            let over = lane.room - lane.load - cost.seconds;
            if over < 0.0 || best.is_some_and(|(least, ..)| over >= least) {
                continue;
            }
            if let Some(host) = self.host(vm, lane.link) {
                best = Some((over, Place { lane: i, host, strategy }, cost.seconds));
            }
        }
        best.map(|(_, place, seconds)| (place, seconds))
    }

    /// By link, the host that a VM would go to now.
    fn hosts(&self, vm: usize) -> Vec<Option<usize>> {
        (0..self.fleet.link.len()).map(|link| self.host(vm, link)).collect()
    }

    /// Those that are late go where they are away soonest, in the mildest way; what is left cannot go.
    fn put_late(&mut self) -> (Vec<(usize, Place)>, Vec<Stranded>) {
        let (mut late, mut stranded) = (vec![], vec![]);
        let mut rest: Vec<usize> = (0..self.places.len()).filter(|vm| self.places[*vm].is_none()).collect();
        let soonest = |vm: usize| {
            let ways = (0..self.fleet.link.len()).filter_map(|link| self.costs.mildest(vm, link));
            ways.map(|(_, cost)| cost.seconds).fold(f64::INFINITY, f64::min)
        };
        rest.sort_by(|a, b| soonest(*a).total_cmp(&soonest(*b)).then(a.cmp(b)));
        for vm in rest {
            let known = &self.fleet.vm[vm];
            let hosts = self.hosts(vm);
            let ends = |(lane, known): (usize, &Lane)| {
                let (strategy, cost) = self.costs.mildest(vm, known.link)?;
                let place = Place { lane, host: hosts[known.link]?, strategy };
                Some((known.busy + known.load + cost.seconds, place, cost.seconds))
            };
            match self.lanes.iter().enumerate().filter_map(ends).min_by(|a, b| a.0.total_cmp(&b.0)) {
                Some((_, place, seconds)) => {
                    self.put(vm, place, seconds);
                    late.push((vm, place));
                }
                None => {
                    let moves_at_all = (0..self.fleet.link.len()).any(|link| self.costs.mildest(vm, link).is_some());
                    let runs = (0..self.fleet.link.len()).any(|link| self.homes.may_run(vm, link));
                    let why = match &known.machine {
                        Some(machine) if !runs => format!("no host where it may go runs its machine type `{machine}`"),
                        _ if moves_at_all => "there is no room for its memory and disks where it may go".to_owned(),
                        _ => "it writes to its disks faster than its links carry: allow it `postcopy` or `cold`"
                            .to_owned(),
                    };
                    stranded.push(Stranded { vm: known.name.clone(), why });
                }
            }
        }
        (late, stranded)
    }

    fn plan(&mut self, deadline: Duration) -> Plan {
        let at_most = self.at_most();
        let in_time: Vec<(usize, Place)> =
            self.places.iter().enumerate().filter_map(|(vm, place)| Some((vm, (*place)?))).collect();
        let (late, stranded) = self.put_late();
        let mut moves = vec![];
        let mut links: Vec<Used> = vec![Used::default(); self.fleet.link.len()];
        for (i, lane) in self.lanes.iter().enumerate() {
            let link = &self.fleet.link[lane.link];
            let (pre, post) = self.fleet.overheads(link);
            let of_lane = |moves_of: &[(usize, Place)], by_length: bool| {
                let mut mine: Vec<(usize, Place, Cost)> = moves_of
                    .iter()
                    .filter(|(_, place)| place.lane == i)
                    .filter_map(|(vm, p)| Some((*vm, *p, self.costs.get(*vm, lane.link, p.strategy)?)))
                    .collect();
                // The shortest first: more are away sooner.
                if by_length {
                    mine.sort_by(|a, b| a.2.seconds.total_cmp(&b.2.seconds).then(a.0.cmp(&b.0)));
                }
                mine
            };
            let all: Vec<_> = of_lane(&in_time, true).into_iter().chain(of_lane(&late, false)).collect();
            let mut queue = Queue::new(link, self.fleet.error, lane.busy);
            let mut after = None;
            for (vm, place, cost) in all {
                let start_s = queue.seconds;
                queue.add(cost.seconds);
                let end_s = pre + queue.seconds + post;
                let end_between_s = queue.between().map(|seconds| pre + seconds + post);
                let used = &mut links[lane.link];
                used.spans.push((start_s, end_s));
                used.bytes += cost.bytes as u64;
                used.ends = [0, 1].map(|n| used.ends[n].max(end_between_s[n]));
                let name = self.fleet.vm[vm].name.clone();
                moves.push(Move {
                    vm: name.clone(),
                    to: link.to.clone(),
                    host: link.host.get(place.host).map(|host| host.name.clone()),
                    strategy: place.strategy,
                    after: after.replace(name),
                    start_s,
                    end_s,
                    end_between_s,
                    downtime_ms: cost.downtime_s * 1e3,
                    downtime_between_ms: pause_between(cost.downtime_s, post, link, self.fleet.error)
                        .map(|seconds| seconds * 1e3),
                    bytes: cost.bytes as u64,
                    in_time: end_s <= deadline.as_secs_f64() + 1e-6,
                    surely: end_between_s[1] <= deadline.as_secs_f64() + 1e-6,
                });
            }
        }
        moves.sort_by(|a, b| a.start_s.total_cmp(&b.start_s).then_with(|| a.vm.cmp(&b.vm)));
        let of_link = |(link, used): (&FleetLink, &Used)| LinkPlan {
            to: link.to.clone(),
            moves: used.spans.len(),
            at_once: at_once(&used.spans),
            bytes: used.bytes,
            end_s: used.spans.iter().map(|span| span.1).fold(0.0, f64::max),
            end_between_s: used.ends,
        };
        let links: Vec<LinkPlan> = self.fleet.link.iter().zip(&links).map(of_link).collect();
        let in_time = moves.iter().filter(|m| m.in_time).count();
        let last = |of: &dyn Fn(&LinkPlan) -> f64| links.iter().map(of).fold(0.0, f64::max);
        Plan {
            deadline_s: deadline.as_secs_f64(),
            in_time,
            surely: moves.iter().filter(|m| m.surely).count(),
            late: moves.len() - in_time,
            at_most,
            end_s: last(&|link| link.end_s),
            end_between_s: [last(&|link| link.end_between_s[0]), last(&|link| link.end_between_s[1])],
            bytes: moves.iter().map(|m| m.bytes).sum(),
            links,
            moves,
            stranded,
        }
    }
}

/// Moves of a lane, one behind the other, and how far what is reckoned of them may be off.
struct Queue {
    /// What they take together, and others before them.
    seconds: f64,
    /// How many times as long the link may take, and what a single move may be off.
    slower: (f64, f64),
    error: Span,
    /// The squares of what single moves may be shorter and longer.
    squares: (f64, f64),
}

impl Queue {
    fn new(link: &FleetLink, error: Errors, busy: f64) -> Self {
        Self { seconds: busy, slower: link.slower(), error: error.total, squares: (0.0, 0.0) }
    }

    fn add(&mut self, seconds: f64) {
        let (less, more) = beyond(self.error);
        self.seconds += seconds;
        self.squares.0 += (seconds * less).powi(2);
        self.squares.1 += (seconds * more).powi(2);
    }

    /// When the last one added is over, at the earliest and at the latest.
    fn between(&self) -> [f64; 2] {
        let less = (self.squares.0 + (self.seconds * (1.0 - self.slower.0)).powi(2)).sqrt();
        let more = (self.squares.1 + (self.seconds * (self.slower.1 - 1.0)).powi(2)).sqrt();
        [(self.seconds - less).max(0.0), self.seconds + more]
    }
}

/// By which part of what is likely moves were shorter and longer.
fn beyond(error: Span) -> (f64, f64) {
    ((1.0 - error.lower / error.likely).max(0.0), (error.upper / error.likely - 1.0).max(0.0))
}

/// A pause at the least and at the most, so much of which is not the link's, in seconds.
fn pause_between(pause: f64, post: f64, link: &FleetLink, errors: Errors) -> [f64; 2] {
    let ((less, more), (fast, slow)) = (beyond(errors.downtime), link.slower());
    let of_link = (pause - post).max(0.0);
    let less = ((pause * less).powi(2) + (of_link * (1.0 - fast)).powi(2)).sqrt();
    let more = ((pause * more).powi(2) + (of_link * (slow - 1.0)).powi(2)).sqrt();
    [(pause - less).max(0.0), pause + more]
}

/// The most spans that overlap.
fn at_once(spans: &[(f64, f64)]) -> usize {
    let mut edges: Vec<(f64, i32)> = spans.iter().flat_map(|(from, to)| [(*from, 1), (*to, -1)]).collect();
    // Who ends makes room for who begins.
    edges.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    let (mut now, mut most) = (0, 0);
    for (_, change) in edges {
        now += change;
        most = most.max(now);
    }
    most as usize
}
