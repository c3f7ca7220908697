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
//! # What can go wrong
//!
//! Rates are means. A link that is slower than said makes everything late in proportion; VMs near the deadline are the last in their lane,
//! [`Move::end_s`] shows how near.

use crate::amount::{Overheads, PageRate, Pages};
use crate::avg::Evenly;
use crate::rules::Rules;
use crate::simulate::{Link, simulate};
use godwit_units::{BitRate, Bytes};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
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
    /// Room for VMs' memory there, in GiB. None: enough.
    pub room_gib: Option<f64>,
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
    /// Its links.
    #[serde(default)]
    pub link: Vec<FleetLink>,
    /// Its VMs.
    #[serde(default)]
    pub vm: Vec<FleetVm>,
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
/// A guest that writes to its disks at more than this share of the link is never caught up with.
const MIRRORED_SHARE: f64 = 0.9;
/// Batches of a round of memory; more make the model no better where rates are means.
const BATCHES: u64 = 32;
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
    /// How.
    pub strategy: Strategy,
    /// When it is ordered, in seconds from the start.
    pub start_s: f64,
    /// When it is over: nothing of it is left at the site.
    pub end_s: f64,
    /// How long the guest stands.
    pub downtime_ms: f64,
    /// What it sends.
    pub bytes: u64,
    /// Whether it is over before the deadline.
    pub in_time: bool,
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
}

/// The plan.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Plan {
    /// The deadline, in seconds from the start.
    pub deadline_s: f64,
    /// VMs that are away before it.
    pub in_time: usize,
    /// VMs that are away later.
    pub late: usize,
    /// No plan has more VMs away in time.
    pub at_most: usize,
    /// When all are away.
    pub end_s: f64,
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
}

/// A VM's place.
#[derive(Clone, Copy, Debug)]
struct Place {
    lane: usize,
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
        let lanes = self.lanes(deadline)?;
        let costs = self.costs(&lanes);
        let mut packer = Packer { fleet: self, costs: &costs, lanes, places: vec![None; self.vm.len()], room: vec![] };
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
        }
        if self.vm.len() > MAX_VMS {
            return Err(FleetError::TooMany { what: "VMs", there: self.vm.len(), most: MAX_VMS });
        }
        let mut names = std::collections::HashSet::new();
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
        Ok(())
    }

    /// What moves take besides their bytes.
    fn overheads(&self, link: &FleetLink) -> (f64, f64) {
        (self.pre_s, (self.post_ms + 1.5 * link.rtt_ms) / 1e3)
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
            let lane = Lane { link, rate, room: deadline.as_secs_f64() - pre - post, load: 0.0 };
            std::iter::repeat_n(lane, lanes_of(known) as usize)
        });
        Ok(lanes.collect())
    }

    fn costs(&self, lanes: &[Lane]) -> Costs {
        let mut known = HashMap::new();
        let lanes_of = |link| lanes.iter().filter(|lane| lane.link == link).count().max(1) as f64;
        let rates: Vec<f64> = self.link.iter().enumerate().map(|(i, l)| l.rate_mbit * 1e6 / lanes_of(i)).collect();
        let of = |vm: &FleetVm, known: &mut HashMap<_, _>| {
            let each = self.link.iter().zip(&rates).map(|(link, rate)| {
                let may_go = vm.to.as_ref().is_none_or(|to| to.contains(&link.to));
                let way = |strategy| {
                    let fits = may_go && vm.strategies.contains(&strategy);
                    fits.then(|| self.cost(vm, link, *rate, strategy, known)).flatten()
                };
                Strategy::ALL.map({
                    let mut way = way;
                    move |strategy| way(strategy)
                })
            });
            each.collect::<Vec<_>>()
        };
        Costs(self.vm.iter().map(|vm| of(vm, &mut known)).collect())
    }

    /// What a VM costs at so many bits a second; none where it never ends.
    fn cost(
        &self,
        vm: &FleetVm,
        link: &FleetLink,
        rate: f64,
        strategy: Strategy,
        known: &mut HashMap<[u64; 4], Option<(f64, f64, f64)>>,
    ) -> Option<Cost> {
        let post = self.overheads(link).1;
        let rate = rate / 8.0;
        let disk = (vm.disk_gib - vm.held_gib).max(0.0) * (1_u64 << 30) as f64;
        let writes = if vm.disk_gib > 0.0 { vm.disk_kib_per_s * 1024.0 } else { 0.0 };
        let mut memory = |rate: f64| {
            let key =
                [vm.memory_mib, vm.working_set_mib.unwrap_or(u64::MAX), vm.dirty_pages_per_s.to_bits(), rate.to_bits()];
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
            Strategy::Cold => Some(Cost { seconds: disk / rate, downtime_s: self.boot_s + post, bytes: disk }),
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
    let moved = simulate(&mut guest, link, &rules).ok()?;
    Some((moved.total_s, moved.downtime_ms / 1e3, moved.bytes as f64))
}

/// Puts VMs into lanes.
struct Packer<'a> {
    fleet: &'a Fleet,
    costs: &'a Costs,
    lanes: Vec<Lane>,
    places: Vec<Option<Place>>,
    /// MiB of memory that are left at the end of each link.
    room: Vec<f64>,
}

/// What a link is used for: from when to when each of its moves lasts, and their bytes.
#[derive(Clone, Debug, Default)]
struct Used {
    spans: Vec<(f64, f64)>,
    bytes: u64,
}

/// A packing, to come back to.
type Kept = (Vec<Lane>, Vec<Option<Place>>, Vec<f64>);

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
        self.room = self.fleet.link.iter().map(|l| l.room_gib.map_or(f64::INFINITY, |gib| gib * 1024.0)).collect();
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

    fn put(&mut self, vm: usize, place: Place, seconds: f64) {
        self.lanes[place.lane].load += seconds;
        self.room[self.lanes[place.lane].link] -= self.fleet.vm[vm].memory_mib as f64;
        self.places[vm] = Some(place);
    }

    fn take(&mut self, vm: usize) -> Option<Place> {
        let place = self.places[vm].take()?;
        let link = self.lanes[place.lane].link;
        self.lanes[place.lane].load -= self.costs.get(vm, link, place.strategy).map_or(0.0, |cost| cost.seconds);
        self.room[link] += self.fleet.vm[vm].memory_mib as f64;
        Some(place)
    }

    /// The lane in which least is left over behind a VM.
    fn fits_best(&self, vm: usize, with: With) -> Option<(Place, f64)> {
        let memory = self.fleet.vm[vm].memory_mib as f64;
        let mut best: Option<(f64, Place, f64)> = None;
        for (i, lane) in self.lanes.iter().enumerate() {
            let Some((strategy, cost)) = self.way(vm, lane.link, with) else { continue };
            let over = lane.room - lane.load - cost.seconds;
            // Between links the faster one counts, too: it takes less of its time.
            let score = over / lane.room.max(1e-9) + 4.0 * cost.seconds / lane.room.max(1e-9);
            if over >= 0.0 && self.room[lane.link] >= memory && best.is_none_or(|(s, ..)| score < s) {
                best = Some((score, Place { lane: i, strategy }, cost.seconds));
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
            (self.lanes, self.places, self.room) = kept;
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
        (self.lanes.clone(), self.places.clone(), self.room.clone())
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
                        found = self.fits_with(other, strategy).map(|(lane, seconds)| (other, lane, strategy, seconds));
                        if found.is_some() {
                            break 'found;
                        }
                    }
                }
            }
            let seconds = |p: Place| self.costs.get(vm, self.lanes[p.lane].link, p.strategy).map_or(0.0, |c| c.seconds);
            match found {
                Some((other, lane, strategy, seconds)) => self.put(other, Place { lane, strategy }, seconds),
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
            let memory = self.fleet.vm[vm].memory_mib as f64;
            let ends = |(i, lane): (usize, &Lane)| {
                let seconds = self.costs.get(vm, lane.link, strategy)?.seconds;
                let end = lane.load + seconds;
                (end <= lane.room && self.room[lane.link] >= memory).then_some((end, i, seconds))
            };
            match self.lanes.iter().enumerate().filter_map(ends).min_by(|a, b| a.0.total_cmp(&b.0)) {
                Some((_, lane, seconds)) => self.put(vm, Place { lane, strategy }, seconds),
                None => {
                    (self.lanes, self.places, self.room) = before;
                    return;
                }
            }
        }
        let last = |lanes: &[Lane]| lanes.iter().map(|lane| lane.load).fold(0.0, f64::max);
        if last(&self.lanes) > last(&before.0) {
            (self.lanes, self.places, self.room) = before;
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
            Some((lane, seconds)) => self.put(vm, Place { lane, strategy }, seconds),
            None => {
                let link = self.lanes[before.lane].link;
                let seconds = self.costs.get(vm, link, before.strategy).map_or(0.0, |cost| cost.seconds);
                self.put(vm, before, seconds);
            }
        }
    }

    /// The lane in which least is left over behind a VM that is moved so, and how long it takes there.
    fn fits_with(&self, vm: usize, strategy: Strategy) -> Option<(usize, f64)> {
        let memory = self.fleet.vm[vm].memory_mib as f64;
        let over = |lane: &Lane| {
            let cost = self.costs.get(vm, lane.link, strategy)?;
            let over = lane.room - lane.load - cost.seconds;
            (over >= 0.0 && self.room[lane.link] >= memory).then_some((over, cost.seconds))
        };
        let ways = self.lanes.iter().enumerate().filter_map(|(i, lane)| Some((i, over(lane)?)));
        ways.min_by(|a, b| a.1.0.total_cmp(&b.1.0)).map(|(lane, (_, seconds))| (lane, seconds))
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
            let memory = self.fleet.vm[vm].memory_mib as f64;
            let known = &self.fleet.vm[vm];
            let ends = |(i, lane): (usize, &Lane)| {
                let (strategy, cost) = self.costs.mildest(vm, lane.link)?;
                let fits = self.room[lane.link] >= memory;
                fits.then_some((lane.load + cost.seconds, Place { lane: i, strategy }, cost.seconds))
            };
            match self.lanes.iter().enumerate().filter_map(ends).min_by(|a, b| a.0.total_cmp(&b.0)) {
                Some((_, place, seconds)) => {
                    self.put(vm, place, seconds);
                    late.push((vm, place));
                }
                None => {
                    let moves_at_all = (0..self.fleet.link.len()).any(|link| self.costs.mildest(vm, link).is_some());
                    let why = if moves_at_all {
                        "there is no room for its memory where it may go".to_owned()
                    } else {
                        "it writes to its disks faster than its links carry: allow it `postcopy` or `cold`".to_owned()
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
                let mut mine: Vec<(usize, Strategy, Cost)> = moves_of
                    .iter()
                    .filter(|(_, place)| place.lane == i)
                    .filter_map(|(vm, p)| Some((*vm, p.strategy, self.costs.get(*vm, lane.link, p.strategy)?)))
                    .collect();
                // The shortest first: more are away sooner.
                if by_length {
                    mine.sort_by(|a, b| a.2.seconds.total_cmp(&b.2.seconds).then(a.0.cmp(&b.0)));
                }
                mine
            };
            let all: Vec<_> = of_lane(&in_time, true).into_iter().chain(of_lane(&late, false)).collect();
            let mut begin = pre;
            for (vm, strategy, cost) in all {
                let (start_s, end_s) = (begin - pre, begin + cost.seconds + post);
                begin += cost.seconds;
                links[lane.link].spans.push((start_s, end_s));
                links[lane.link].bytes += cost.bytes as u64;
                moves.push(Move {
                    vm: self.fleet.vm[vm].name.clone(),
                    to: link.to.clone(),
                    strategy,
                    start_s,
                    end_s,
                    downtime_ms: cost.downtime_s * 1e3,
                    bytes: cost.bytes as u64,
                    in_time: end_s <= deadline.as_secs_f64() + 1e-6,
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
        };
        let links: Vec<LinkPlan> = self.fleet.link.iter().zip(&links).map(of_link).collect();
        let in_time = moves.iter().filter(|m| m.in_time).count();
        Plan {
            deadline_s: deadline.as_secs_f64(),
            in_time,
            late: moves.len() - in_time,
            at_most,
            end_s: links.iter().map(|link| link.end_s).fold(0.0, f64::max),
            bytes: moves.iter().map(|m| m.bytes).sum(),
            links,
            moves,
            stranded,
        }
    }
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
