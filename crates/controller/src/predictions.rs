//! What a move will take, said before it is made: by each way, as intervals ([`godwit_predict::whole`]).
//!
//! Everything is asked or looked up when somebody wants to know: the link's figures of the source's node, profiles of the hosts that the VM has
//! been on, overheads and past errors of the records of moves. A prediction that cannot be made holds up no move: [`PATIENCE`].
//!
//! # What can go wrong
//!
//! *Nothing is known of the VM*: it was never watched, nor moved. Whoever asks has it watched for [`SHORTLY`]; a move does not wait for
//! that: the guest is taken to be a quiet one, and the interval is wide ([`Basis::model`] says `assumed`). *Nothing is known of the link*:
//! it is measured, for about a second. *A replica lies at the destination and no pre-cache keeps it*: how much of it is old only a
//! comparison would tell; the interval reaches from nothing to all.

pub mod past;

use crate::record::{MoveRecord, Step, VmRecord};
use crate::rights::Caller;
use crate::state::{Controller, HostRecord, conflict, missing};
use crate::store::Kind;
use axum::Json;
use axum::extract::{Extension, Path, Query, State};
use godwit_api::host::{DiskStrategy, HostFacts, LocalVm, Packs, PeerHost, RunState};
use godwit_api::precache::PrecacheState;
use godwit_api::predict::{
    AskPath, Basis, Choice, Foretold, Likely, Moment, MovePrediction, PathFacts, WantedPrediction, When,
};
use godwit_api::profile::{Profile, ProfileState, StartProfile, nearest};
use godwit_api::progress::PhaseName;
use godwit_api::public::{StartMove, Volume};
use godwit_api::{ApiError, HostClient, Name};
use godwit_predict::whole::{
    self, AS_SEEN, Calibration, Disks, ENOUGH, Going, Made, Road, UNSEEN, Way, foretell, recommend, share,
};
use godwit_predict::{
    Cost, Evenly, Faster, Link, Log, NeverEnds, Overheads, PAGE, PageRate, Pages, Prediction, Replayed, Rules, Taken,
    Timeline, Wire, simulate_on,
};
use godwit_units::{BitRate, Bytes, Policy, Span, VmId};
use past::{FEWEST, HARD_WORK, Pair, WORK};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::time::timeout;

/// What a move waits for its prediction, at the most.
const PATIENCE: Duration = Duration::from_secs(4);
/// Goodput of moves that are older than this is measured anew, where nothing is under way.
pub(crate) const FRESH: Duration = Duration::from_secs(3600);
/// Between two looks at what the guest writes to its disks.
const WRITING: Duration = Duration::from_millis(250);
/// How a guest of which nothing is known is watched when somebody wants a prediction.
const SHORTLY: StartProfile = StartProfile { for_s: 3, interval_ms: 100 };
/// What is waited for that at the most: looking at a large guest takes longer.
const SHORTLY_PATIENCE: Duration = Duration::from_secs(10);
/// Moves from which on what is odd is no accident.
const FEW_MOVES: usize = 3;
/// Beginnings within a log that are simulated for one prediction; and so few of a guest of more than 16 GiB.
const STARTS: (u32, u32) = (5, 1);
/// Beginnings that are tried where the best is looked for, of all logs together.
const MOMENTS: usize = 96;
/// Logs that are looked through for it.
const MOST_LOGS: usize = 24;
/// What a reference, or a page equal to one before, takes on the wire: a guess between 4 and 40 bytes that does not matter.
const NAMED: f64 = 16.0;

pub(crate) fn now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

/// What links were measured to carry, from host to host: by whoever asked for a prediction. A move measures nothing, since its time and
/// its bytes are its user's.
#[derive(Debug, Default)]
pub struct Links(Mutex<HashMap<(Name, Name), (Instant, BitRate)>>);

impl Links {
    fn lock(&self) -> MutexGuard<'_, HashMap<(Name, Name), (Instant, BitRate)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One that is fresh. There are no more than pairs of hosts.
    pub(crate) fn get(&self, from: &Name, to: &Name) -> Option<BitRate> {
        self.lock().get(&(from.clone(), to.clone())).filter(|(at, _)| at.elapsed() < FRESH).map(|(_, rate)| *rate)
    }

    pub(crate) fn put(&self, from: &Name, to: &Name, rate: BitRate) {
        self.lock().insert((from.clone(), to.clone()), (Instant::now(), rate));
    }
}

/// Whether the link may be measured.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Measure {
    IfNeeded,
    Never,
}

/// Whom a move would lead from where to where.
struct Journey {
    vm: VmRecord,
    to: HostRecord,
    peer: PeerHost,
    local: Option<LocalVm>,
}

pub async fn show(
    State(c): State<Arc<Controller>>,
    Extension(who): Extension<Caller>,
    Path(name): Path<Name>,
    Query(wanted): Query<WantedPrediction>,
) -> Result<Json<MovePrediction>, ApiError> {
    who.find(&c, &name)?;
    let vm = c.vm_record(&name)?;
    let to = destination(&c, &vm, &wanted.to)?;
    let node = c.node_of(&vm.host)?;
    let (there, watched) = (c.node(&to), profile(&c, &vm, wanted.at_unix_s));
    let (facts, local, watched) = tokio::join!(there.facts(), node.vm(vm.definition.id), watched);
    let (facts, local) = (facts?, local.ok());
    let peer = PeerHost { name: to.name.clone(), link: facts.link, underlay: facts.underlay };
    let journey = Journey { vm, to, peer, local };
    let known = Known::gather(&c, &journey, &wanted, Measure::IfNeeded, watched).await?;
    let when = if wanted.when { Some(logs(&c, &journey.vm).await?) } else { None };
    // Simulations of large guests take a while.
    let answer = tokio::task::spawn_blocking(move || known.predict(&journey, &wanted, when.as_deref())).await;
    answer.map_err(|_| ApiError::new(godwit_api::Problem::Failed, "the prediction ended in a bug")).map(Json)
}

/// The host that is meant: of a site the first that the VM is not on.
fn destination(c: &Controller, vm: &VmRecord, to: &Name) -> Result<HostRecord, ApiError> {
    let found = match c.store.read(Kind::Host, to)? {
        Some(host) => Some(host),
        None if c.store.get(Kind::Site, to.as_str())?.is_none() => {
            return Err(missing("host", to).remedy("name a host or a site: `godwit host ls`, `godwit site ls`"));
        }
        None => c.hosts()?.into_iter().find(|h| &h.site == to && h.name != vm.host),
    };
    found
        .filter(|host| host.name != vm.host)
        .ok_or_else(|| conflict(format!("`{}` is there already, or `{to}` has no other host", vm.definition.name)))
}

/// What was found out of a move that is about to begin; at first nothing.
#[derive(Debug, Default)]
pub struct Ahead {
    /// What it takes, where that can be said in time.
    pub told: Option<Foretold>,
    /// It never ends, as far as can be foreseen: its guest writes faster to its disks than they are mirrored.
    pub never: bool,
}

impl Ahead {
    /// How long the move itself takes, in seconds. None where nobody knows, as of one that will be given up.
    #[must_use]
    pub fn own_s(&self) -> Option<f64> {
        if self.never { Some(f64::INFINITY) } else { self.told.as_ref().map(Foretold::own_s) }
    }
}

/// What is foretold of a move that is about to begin, by the way that was ordered.
pub async fn before(
    c: &Controller,
    vm: &VmRecord,
    (to, facts): (&HostRecord, &HostFacts),
    (local, watched): (&LocalVm, Option<&Watched>),
    order: &StartMove,
) -> Ahead {
    let peer = PeerHost { name: to.name.clone(), link: facts.link, underlay: facts.underlay };
    let journey = Journey { vm: vm.clone(), to: to.clone(), peer, local: Some(local.clone()) };
    let wanted = WantedPrediction {
        to: to.name.clone(),
        policy: judged_by(order.policy, order.throttle.is_some() || order.memory_postcopy.is_some()),
        limit: order.limit,
        at_unix_s: None,
        when: false,
    };
    let disk = order.disk;
    let work = async {
        let known = Known::gather(c, &journey, &wanted, Measure::Never, watched.cloned()).await.ok()?;
        tokio::task::spawn_blocking(move || known.ordered(disk, wanted.policy)).await.ok()
    };
    let found = timeout(PATIENCE, work).await.ok().flatten().unwrap_or_default();
    if found.told.is_none() {
        tracing::info!(vm = %vm.definition.name, "nothing could be foretold of this move");
    }
    found
}

/// By what a move's end is foretold. Where the guest may be slowed, or its memory may follow it, one with a bound on the pause is not given up as
/// its rounds alone would have it: it ends about as one that is to have the least.
fn judged_by(policy: Policy, has_means: bool) -> Policy {
    match policy {
        Policy::MaxDowntime(_) if has_means => Policy::LeastDowntime,
        other => other,
    }
}

/// What is foretold of moves that go one after another: each begins when the guest before it runs at its destination. Behind one of which
/// nothing could be said nobody knows when their turn comes.
pub fn one_after_another(told: &mut [Option<Foretold>]) {
    let mut begins = Some(Span::default());
    for (nth, each) in told.iter_mut().enumerate() {
        begins = match (each.take(), begins) {
            (Some(own), Some(begins)) => {
                let sum = |of: fn(&Span) -> f64| of(&own.total_s) + of(&begins);
                // The same link carries all of them: what is off with one is off with the next.
                let total_s = Span { lower: sum(|s| s.lower), likely: sum(|s| s.likely), upper: sum(|s| s.upper) };
                *each = Some(Foretold { total_s, begins_s: (nth > 0).then_some(begins), ..own });
                Some(total_s)
            }
            _ => None,
        };
    }
}

/// When a move that waits behind another will end, as that one stands: microseconds since 1970.
#[must_use]
pub fn end_behind(record: &MoveRecord, before: &MoveRecord, now_unix_us: u64) -> Option<u64> {
    let us = |seconds: f64| (seconds.clamp(0.0, 1e7) * 1e6) as u64;
    let said = || Some(before.ordered_unix_us + us(before.prediction.as_ref()?.total_s.likely));
    let turn = before.progress.predicted_end_unix_us.or_else(said)?.max(now_unix_us);
    Some(turn.saturating_add(us(record.prediction.as_ref()?.own_s())))
}

/// How the guest is known.
enum Guest {
    /// By what it was seen to do.
    Log(Box<Log>),
    /// By a rate, and what it writes to.
    Rate(PageRate, Pages),
}

/// All that a prediction goes by.
struct Known {
    memory: Pages,
    guest: Guest,
    faster: Span,
    wire: Wire,
    road: Road,
    disks: Disks,
    calibration: Calibration,
    basis: Basis,
    /// Bytes that other moves still have to send over the same link.
    others: Vec<f64>,
    has_precache: bool,
    /// Whether there is no guest to be moved.
    off: bool,
}

impl Known {
    async fn gather(
        c: &Controller,
        journey: &Journey,
        wanted: &WantedPrediction,
        may: Measure,
        watched: Option<Watched>,
    ) -> Result<Self, ApiError> {
        let (vm, id) = (&journey.vm, journey.vm.definition.id);
        let moves = c.move_records()?;
        let between = |mv: &&MoveRecord| mv.from == vm.host && mv.order.to.name == journey.to.name;
        let past::Taught { pair, level, calibration } =
            past::taught(&moves, (&vm.host, &journey.to.name), wanted.policy);
        let anywhere = past::pair(moves.iter());
        let open: Vec<&MoveRecord> = moves
            .iter()
            .filter(|mv| mv.step != Step::Ended && mv.order.vm != id && mv.from == vm.host && between(mv))
            .collect();
        let stale = pair.last_unix_us / 1_000_000 + FRESH.as_secs() < now_s();
        let known = c.links.get(&vm.host, &journey.to.name).filter(|_| pair.goodput.is_none() || stale);
        let needed = known.is_none() && (pair.goodput.is_none() || stale);
        let measure = may == Measure::IfNeeded && open.is_empty() && needed;
        let node = c.node_of(&vm.host)?;
        let asked = AskPath { peer: journey.peer.clone(), measure };
        let has_disks = vm.definition.spec.disks.iter().any(|disk| disk.shared().is_none());
        let left = past::left(&moves, id, &journey.to.name, now_s());
        let asked = node.path(&asked).await;
        // Of a link of which not even the round trip is known nothing is kept with a move.
        let mut path = if may == Measure::Never { Some(asked?) } else { asked.ok() };
        let is_on = journey.local.as_ref().is_some_and(|local| local.run == RunState::Running);
        let profile = async {
            if watched.is_some() || may != Measure::IfNeeded || !is_on {
                return watched;
            }
            watch_shortly(&node, id).await;
            profile(c, vm, wanted.at_unix_s).await
        };
        let packs = async {
            let wanted = has_disks && left.is_none();
            if wanted { node.packs(id).await.ok().filter(|packs| packs.held.0 > 0) } else { None }
        };
        let (written, profile, packs) = tokio::join!(writes(&node, id, has_disks), profile, packs);
        if let Some(rate) = path.and_then(|path| path.goodput) {
            c.links.put(&vm.host, &journey.to.name, rate);
        } else if let Some(path) = &mut path {
            path.goodput = known;
        }
        let of_vm = past::pages(&moves, id);
        let memory = Pages::of(vm.definition.spec.memory);
        let mut basis = Basis {
            rtt_ms: path.map(|p| p.rtt_ms),
            loss: path.map(|p| p.loss),
            sharing: open.len() as u32,
            past_moves: pair.moves as u32,
            past_predictions: calibration.total.count() as u32,
            level,
            ..Basis::default()
        };
        let (goodput, by) = goodput(&pair, &anywhere, path.as_ref());
        basis.goodput_by = by.into();
        let limited = wanted.limit.map_or(f64::INFINITY, |limit| limit.0 as f64);
        let goodput = Span {
            lower: goodput.lower.min(limited),
            likely: goodput.likely.min(limited),
            upper: goodput.upper.min(limited),
        };
        let rtt = Duration::from_secs_f64(path.map_or(0.03, |p| (p.rtt_ms / 1e3).clamp(0.0, 60.0)));
        let (assumed_before, assumed_pause) = Road::assumed(rtt);
        let road = Road {
            goodput,
            rtt,
            before: overhead(pair.before.or(anywhere.before), assumed_before, anywhere.moves),
            pause: pause(if pair.pause.is_some() { &pair } else { &anywhere }, assumed_pause, anywhere.moves),
        };
        let (guest, faster) = guest(memory, profile.as_ref(), of_vm.as_ref(), &mut basis);
        let wire = wire(profile.as_ref().map(|(profile, _)| profile), of_vm.as_ref());
        let (disks, has_precache) =
            disks(c, journey, written, packs, if pair.disk_wire.is_some() { &pair } else { &anywhere }, left)?;
        (basis.first_bytes_a_page, basis.again_bytes_a_page) = (wire.first.bytes, wire.again.bytes);
        let others = open.iter().map(|mv| left_of(mv)).collect();
        let off = journey.local.as_ref().is_some_and(|local| local.run == RunState::Off);
        Ok(Self { memory, guest, faster, wire, road, disks, calibration, basis, others, has_precache, off })
    }

    /// The moves of the memory alone, in a move that takes so long besides.
    fn memory(&self, policy: Policy, rate: BitRate, faster: f64, besides: Duration) -> Result<Prediction, NeverEnds> {
        let (rules, wire) = (&Rules::godwit_to(policy.sooner(besides)), &packed(self.wire, policy, self.basis.level));
        let link = Link { rate, overheads: Overheads::default() };
        match &self.guest {
            Guest::Rate(dirties, working_set) => {
                let mut guest = Faster::new(Evenly::new(self.memory, *working_set, *dirties), faster);
                simulate_on(&mut guest, link, wire, rules)
            }
            Guest::Log(log) => {
                let timeline = Timeline::new(log, Taken::Changed);
                let count = if self.memory.bytes() > Bytes::gib(16) { STARTS.1 } else { STARTS.0 };
                let moved = (0..count).map(|i| {
                    let at = log.length().mul_f64(f64::from(i) / f64::from(count));
                    simulate_on(&mut Faster::new(Replayed::new(&timeline, at), faster), link, wire, rules)
                });
                let (ends, never): (Vec<_>, Vec<_>) = moved.partition(Result::is_ok);
                // One beginning that is given up says little of the others.
                if let Some(Err(why)) = never.into_iter().next()
                    && ends.len() * 2 < count as usize
                {
                    return Err(why);
                }
                let mut moved: Vec<Prediction> = ends.into_iter().flatten().collect();
                moved.sort_by(|a, b| a.downtime_ms.total_cmp(&b.downtime_ms));
                Ok(moved.swap_remove(moved.len() / 2))
            }
        }
    }

    /// With what others leave of the link.
    fn shared_road(&self, policy: Policy, way: Way) -> Road {
        if self.others.is_empty() {
            return self.road;
        }
        let goodput = self.road.goodput;
        let alone = foretell(
            way,
            &self.road,
            &self.disks,
            self.faster,
            &|rate, faster, besides| self.memory(policy, rate, faster, besides),
            &Calibration::default(),
        );
        let part = |rate: f64, bytes: f64| {
            let taken = share(BitRate(rate as u64), bytes, &self.others);
            if taken > 0.0 { bytes * 8.0 / taken } else { rate }
        };
        let of = |rate| part(rate, alone.bytes.likely.max(1.0));
        Road { goodput: Span::of([of(goodput.lower), of(goodput.likely), of(goodput.upper)]), ..self.road }
    }

    fn foretold(&self, way: Way, policy: Policy, calibration: &Calibration) -> whole::Foretold {
        let road = self.shared_road(policy, way);
        let memory = |rate, faster, besides| self.memory(policy, rate, faster, besides);
        foretell(way, &road, &self.disks, self.faster, &memory, calibration)
    }

    /// Of the way that was ordered.
    fn ordered(self, disk: DiskStrategy, policy: Policy) -> Ahead {
        let way = match disk {
            DiskStrategy::Mirror if self.disks.shared => Way::Shared,
            DiskStrategy::Mirror => Way::Mirror,
            DiskStrategy::Postcopy => Way::Postcopy,
            DiskStrategy::Shared => Way::Shared,
        };
        let told = self.foretold(way, policy, &self.calibration);
        if told.never.is_some() {
            return Ahead { told: None, never: !told.given_up };
        }
        let plain = self.foretold(way, policy, &Calibration::default());
        let found = Foretold {
            total_s: told.total_s,
            begins_s: None,
            downtime_ms: told.downtime_ms,
            bytes: told.bytes,
            uncorrected: Likely {
                total_s: plain.total_s.likely,
                downtime_ms: plain.downtime_ms.likely,
                bytes: plain.bytes.likely,
            },
            basis: self.told_basis(),
        };
        Ahead { told: Some(found), never: false }
    }

    fn told_basis(&self) -> Basis {
        let scaled =
            |span: Span, by: f64| Span { lower: span.lower * by, likely: span.likely * by, upper: span.upper * by };
        Basis {
            goodput_mbit: scaled(self.road.goodput, 1e-6),
            before_s: scaled(self.road.before, 1.0),
            pause_ms: scaled(self.road.pause, 1e3),
            ..self.basis.clone()
        }
    }

    fn predict(&self, journey: &Journey, wanted: &WantedPrediction, logs: Option<&[Log]>) -> MovePrediction {
        let spec = &journey.vm.definition.spec;
        let has_disks = !spec.disks.is_empty();
        let applies = |way: &Way| match way {
            _ if self.off => *way == Way::Cold,
            Way::Shared => self.disks.shared,
            Way::Mirror => !self.disks.shared,
            Way::Precache | Way::Postcopy => has_disks && !self.disks.shared,
            Way::Cold => true,
        };
        let can = |way: Way| match way {
            Way::Precache => self.has_precache,
            Way::Cold => false,
            Way::Mirror | Way::Postcopy | Way::Shared => true,
        };
        let told: Vec<whole::Foretold> = Way::ALL
            .into_iter()
            .filter(applies)
            .map(|way| self.foretold(way, wanted.policy, &self.calibration))
            // Nobody waits for a guest that is off.
            .map(|told| if self.off { whole::Foretold { downtime_ms: Span::default(), ..told } } else { told })
            .collect();
        let best = recommend(&told, can, wanted.policy);
        let (name, from) = (&journey.vm.definition.name, &journey.vm.host);
        let choices = told.iter().map(|f| choice(f, can(f.way), (name, self.off), &spec.disks)).collect();
        let (recommended, why) = match best {
            Some((i, why)) => (Some(told[i].way.name().to_owned()), why),
            None if self.off => (None, format!("`{name}` is off, and `godwit move` takes a VM that runs")),
            None => (None, "no way that is possible now ends by itself".into()),
        };
        MovePrediction {
            vm: name.clone(),
            from: from.clone(),
            to: journey.to.name.clone(),
            at_unix_s: wanted.at_unix_s.unwrap_or_else(now_s),
            choices,
            recommended,
            why,
            basis: self.told_basis(),
            when: logs.and_then(|logs| self.best_moment(logs, wanted.policy)),
        }
    }

    /// The coming 24 hours, as far as profiles tell of their times of day.
    fn best_moment(&self, logs: &[Log], policy: Policy) -> Option<When> {
        let rate = BitRate(self.road.goodput.likely as u64);
        let link = Link { rate, overheads: Overheads::default() };
        let begins = Duration::from_secs_f64(self.road.before.likely.max(0.0));
        // What of the disks goes before memory is in a deadline too.
        let copies = self.road.goodput.likely.min(self.disks.speed.unwrap_or(f64::INFINITY)).max(1.0);
        let besides = self.road.before.likely + self.road.pause.likely + self.disks.missing.likely * 8.0 / copies;
        let besides = Duration::try_from_secs_f64(besides).unwrap_or(Duration::MAX);
        let (rules, wire) = (Rules::godwit_to(policy.sooner(besides)), packed(self.wire, policy, self.basis.level));
        let each = (MOMENTS / logs.len().max(1)).max(1) as u32;
        let mut tried = vec![];
        for log in logs {
            let timeline = Timeline::new(log, Taken::Changed);
            for i in 0..each {
                let at = log.length().mul_f64(f64::from(i) / f64::from(each));
                let Ok(moved) = simulate_on(&mut Replayed::new(&timeline, at), link, &wire, &rules) else {
                    continue;
                };
                tried.push(Moment {
                    // When to order it: the guest's pages follow what every move begins with.
                    at_unix_s: next_time((log.header().start + at).saturating_sub(begins), now_s()),
                    total_s: moved.total_s + self.road.before.likely + self.road.pause.likely,
                    downtime_ms: moved.downtime_ms + self.road.pause.likely * 1e3,
                    bytes: moved.bytes as f64,
                });
            }
        }
        let merit = |m: &Moment| match policy {
            Policy::LeastTotal | Policy::Deadline(_) => m.total_s,
            Policy::LeastBytes => m.bytes,
            Policy::LeastDowntime | Policy::MaxDowntime(_) => m.downtime_ms.round() * 1e6 + m.total_s,
        };
        tried.sort_by(|a, b| merit(a).total_cmp(&merit(b)));
        let mean = |of: fn(&Moment) -> f64| tried.iter().map(of).sum::<f64>() / tried.len().max(1) as f64;
        Some(When {
            tried: tried.len() as u32,
            best: *tried.first()?,
            mean: Moment {
                at_unix_s: 0,
                total_s: mean(|m| m.total_s),
                downtime_ms: mean(|m| m.downtime_ms),
                bytes: mean(|m| m.bytes),
            },
            worst: *tried.last()?,
        })
    }
}

/// When the same time of day comes next.
fn next_time(since_1970: Duration, now_s: u64) -> u64 {
    const DAY: u64 = 86_400;
    now_s + (since_1970.as_secs() % DAY + DAY - now_s % DAY) % DAY
}

fn choice(
    told: &whole::Foretold,
    possible: bool,
    (vm, off): (&Name, bool),
    disks: &[godwit_api::vm::DiskSpec],
) -> Choice {
    let some = |span: Span| told.never.is_none().then_some(span);
    let volume = disks.first().map_or("VOLUME", |disk| disk.volume.as_str());
    let note = told.never.clone().or(match told.way {
        Way::Precache if !possible => {
            Some(format!("first `godwit volume precache {volume} --to SITE`, for each disk; then as mirror"))
        }
        Way::Cold if off => Some(format!("`godwit vm start {vm}` first: a VM that runs can be moved")),
        Way::Cold => Some(
            "no command does this yet, `godwit move` takes a VM that runs; its time to shut down and to boot is a guess"
                .into(),
        ),
        _ => None,
    });
    Choice {
        strategy: told.way.name().into(),
        possible: possible && told.never.is_none(),
        note,
        total_s: some(told.total_s),
        downtime_ms: some(told.downtime_ms),
        bytes: some(told.bytes),
        slowed_s: some(told.slowed_s),
        slowed_by_ms: told.slowed_by_ms,
    }
}

/// What moves get of the link, bits a second, and how that is known.
pub(crate) fn goodput(pair: &Pair, anywhere: &Pair, path: Option<&PathFacts>) -> (Span, &'static str) {
    if let Some(measured) = path.and_then(|p| p.goodput) {
        let likely = measured.0.max(1000) as f64;
        // A second of it says less than a move.
        return (Span { lower: likely * 0.7, likely, upper: likely * 1.3 }, "measured now");
    }
    if let Some(seen) = pair.goodput {
        return (seen, "past moves");
    }
    match anywhere.goodput {
        Some(seen) => {
            (Span { lower: seen.lower / 2.0, upper: seen.upper * 2.0, ..seen }, "past moves between other hosts")
        }
        None => (Span { lower: 1e7, likely: 1e8, upper: 1e9 }, "assumed"),
    }
}

/// What moves take besides their bytes. A single one that took far longer than any should was held up by something else, and is believed when
/// others have taken as long.
pub(crate) fn overhead(seen: Option<Span>, assumed: Span, moves: usize) -> Span {
    let Some(seen) = seen else { return assumed };
    if moves >= FEW_MOVES || seen.likely <= assumed.upper {
        return seen;
    }
    Span { upper: assumed.upper.max(seen.upper), ..assumed }
}

/// The same of the pause. One differs from the next by what QEMU and the guest did at that moment, so a few are not believed alone: what is
/// assumed counts as another one.
pub(crate) fn pause(of: &Pair, assumed: Span, moves: usize) -> Span {
    let seen = overhead(of.pause, assumed, moves);
    if of.moves >= ENOUGH || of.pause.is_none() {
        return seen;
    }
    let n = of.moves as f64;
    let likely = (assumed.likely + n * seen.likely) / (1.0 + n);
    Span::holding(likely, seen.lower, seen.upper)
}

/// What was watched of a guest, and what it did then.
pub type Watched = (Profile, Log);

/// As [`profile`], of now; none where it takes too long. Each host that the guest has been on is asked: who foretells a move has that begun before
/// it is known where the guest is to go.
pub async fn watched(c: &Controller, vm: &VmRecord) -> Option<Watched> {
    timeout(PATIENCE, profile(c, vm, None)).await.ok().flatten()
}

/// The profile that is nearest to a time of day, now if none is given, of those the newest, with its log.
async fn profile(c: &Controller, vm: &VmRecord, at_unix_s: Option<u64>) -> Option<Watched> {
    let all = crate::profiles::all(c, vm.definition.id, &vm.host).await.ok()?;
    let best = nearest(all, at_unix_s.unwrap_or_else(now_s))?;
    let log = log(c, vm.definition.id, &best).await?;
    Some((best, log))
}

/// Watches a guest that nobody has watched yet. If that cannot be, it stays unknown.
async fn watch_shortly(node: &HostClient, vm: VmId) {
    let Ok(begun) = node.start_profile(vm, SHORTLY).await else { return };
    let watching = async {
        loop {
            tokio::time::sleep(WRITING).await;
            let now = node
                .profiles(vm)
                .await
                .unwrap_or_default()
                .into_iter()
                .find(|p| p.start_unix_ms == begun.start_unix_ms);
            if now.is_none_or(|now| now.state != ProfileState::Watching) {
                return;
            }
        }
    };
    let _ = timeout(SHORTLY_PATIENCE, watching).await;
}

async fn log(c: &Controller, vm: VmId, profile: &Profile) -> Option<Log> {
    let told = c.node_of(&profile.host).ok()?.profile_log(vm, profile.start_unix_ms).await.ok()?;
    Log::read(told.bytes()?).inspect_err(|error| tracing::warn!(%error, "a profile's log is of no use")).ok()
}

/// The newest logs of a VM.
async fn logs(c: &Controller, vm: &VmRecord) -> Result<Vec<Log>, ApiError> {
    let id = vm.definition.id;
    let mut found = vec![];
    let all = crate::profiles::all(c, id, &vm.host).await?;
    for profile in all.iter().rev().filter(|p| p.state != ProfileState::Watching && p.looks >= 2).take(MOST_LOGS) {
        found.extend(log(c, id, profile).await);
    }
    Ok(found)
}

fn guest(
    memory: Pages,
    profile: Option<&(Profile, Log)>,
    of_vm: Option<&past::Pages>,
    basis: &mut Basis,
) -> (Guest, Span) {
    if let Some((profile, log)) = profile.filter(|(_, log)| log.header().pages == memory) {
        basis.model = "hist".into();
        basis.profile_unix_ms = Some(profile.start_unix_ms);
        basis.changed_per_s = profile.changed_per_s;
        basis.working_set_pages = Pages::of(profile.working_set).0;
        return (Guest::Log(Box::new(log.clone())), AS_SEEN);
    }
    let (rate, working_set) = rate(memory, of_vm);
    let faster = if of_vm.is_some() { Span { lower: 0.4, likely: 1.0, upper: 2.5 } } else { UNSEEN };
    basis.model = if of_vm.is_some() { "avg" } else { "assumed" }.into();
    basis.changed_per_s = rate;
    basis.working_set_pages = working_set.0;
    (Guest::Rate(PageRate::new(rate), working_set), faster)
}

/// Pages that a guest dirties in a second, and of how many: by its last move, else as a quiet one.
pub(crate) fn rate(memory: Pages, of_vm: Option<&past::Pages>) -> (f64, Pages) {
    match of_vm {
        Some(seen) => (seen.dirtied_per_s, Pages(seen.working_set.max(64) * 2)),
        None => (200.0, Pages((memory.0 / 16).max(64))),
    }
}

/// What the codec makes of the guest's pages: by its profile, else as in its last move, else by a guess.
pub(crate) fn wire(profile: Option<&Profile>, of_vm: Option<&past::Pages>) -> Wire {
    let page = PAGE.0 as f64;
    let cost = |bytes: f64| Cost { bytes, seconds: WORK };
    let of = |first: f64, again: f64| Wire { first: cost(first), again: cost(again), same: cost(again.min(NAMED)) };
    let Some(profile) = profile else {
        return match of_vm {
            Some(seen) => of(seen.first, seen.again.unwrap_or(seen.first.max(page / 8.0))),
            None => of(page * 0.25, page * 0.25),
        };
    };
    let c = &profile.contents;
    let on_disk = of_vm.map_or(0.0, |seen| seen.on_disk);
    let rest = (1.0 - c.zero - c.duplicate - on_disk).max(0.0);
    let first = rest * c.packed.unwrap_or(0.4) * page + (c.duplicate + on_disk) * NAMED;
    let again = c.again.or(c.packed).unwrap_or(0.4) * page * (1.0 - c.zeroed) + NAMED;
    of(first, again)
}

/// The same of a move by this policy: with [`Policy::LeastBytes`] nodes pack memory as small as they can. What a page's work is then goes by what it
/// is on the wire, of a quarter of a page on: zero pages and references take none. By another policy they go by that level, if any is known, for
/// which they have the time.
pub(crate) fn packed(wire: Wire, policy: Policy, level: Option<i32>) -> Wire {
    let harder = |cost: Cost| {
        let share = (cost.bytes / (PAGE.0 as f64 / 4.0)).clamp(0.0, 1.0);
        let seconds = cost.seconds.max(HARD_WORK * share);
        Cost { bytes: cost.bytes * FEWEST, seconds }
    };
    match policy {
        Policy::LeastBytes => Wire { first: harder(wire.first), again: harder(wire.again), ..wire },
        _ => {
            let by =
                |cost: Cost| Cost { bytes: level.map_or(cost.bytes, |to| past::by_level(cost.bytes, 1, to)), ..cost };
            Wire { first: by(wire.first), again: by(wire.again), ..wire }
        }
    }
}

/// What the guest has written to its disks, as its QEMU counts; none where it does not say.
async fn written(node: &HostClient, vm: VmId) -> Option<u64> {
    let answer = node.monitor(vm, &serde_json::json!({"execute": "query-blockstats"})).await.ok()?;
    let devices = answer.as_array()?;
    Some(devices.iter().filter_map(|device| device["stats"]["wr_bytes"].as_u64()).sum())
}

/// What the guest writes to its disks.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Writes {
    /// In all since its QEMU began here, bytes.
    all: f64,
    /// Now, bytes a second.
    rate: f64,
}

async fn writes(node: &HostClient, vm: VmId, has_disks: bool) -> Option<Writes> {
    if !has_disks {
        return Some(Writes::default());
    }
    let (before, began) = (written(node, vm).await?, tokio::time::Instant::now());
    tokio::time::sleep(WRITING).await;
    let after = written(node, vm).await?;
    let rate = after.saturating_sub(before) as f64 / began.elapsed().as_secs_f64();
    Some(Writes { all: after as f64, rate })
}

/// What is not at the destination of a disk that was whole there when the VM left, and what is written to it while it moves, bytes a second. What
/// its QEMU has counted since is written once or often. A guest that builds something writes in bursts: a look at this moment says little of
/// the time since, and less than that time says of the next minute.
fn behind(written: Option<Writes>, left: past::Left, whole: f64, wire: f64) -> (Span, Span) {
    let counted = written.filter(|_| left.straight);
    let rate = written.map_or(64e3, |written| written.rate);
    let usual = counted.map_or(rate, |written| written.all / left.ago_s.max(1.0));
    let since = (counted.map_or(rate * left.ago_s, |written| written.all) * wire).min(whole);
    let most = if counted.is_some() { 1.25 } else { 3.0 };
    let missing = Span { lower: 0.0, likely: since, upper: (since * most + 1e6).min(whole) };
    (missing, Span { lower: rate.min(usual) * 0.5, likely: usual, upper: rate.max(usual) * 1.5 })
}

fn disks(
    c: &Controller,
    journey: &Journey,
    written: Option<Writes>,
    packs: Option<Packs>,
    copied: &Pair,
    left: Option<past::Left>,
) -> Result<(Disks, bool), ApiError> {
    let spec = &journey.vm.definition.spec;
    let own = spec.disks.iter().filter(|disk| disk.shared().is_none()).count();
    if own == 0 {
        return Ok((Disks { shared: !spec.disks.is_empty(), ..Disks::default() }, false));
    }
    let size: Bytes = spec.disks.iter().map(|d| d.size).sum();
    let whole = journey.local.as_ref().map_or(size, |local| local.allocated.min(size)).0 as f64;
    let volumes: Vec<Volume> = c.store.read_all(Kind::Volume)?;
    let (mut kept, mut backlog, mut held) = (0, 0.0, 0);
    for volume in volumes.iter().filter(|v| journey.vm.definition.volumes.contains(&v.id)) {
        let figures = crate::precache::figures(c, volume.id, &journey.to.name);
        if let Some(figures) = figures.filter(|f| matches!(f.state, PrecacheState::Following | PrecacheState::Copying))
        {
            (kept, backlog) = (kept + 1, backlog + figures.backlog.0 as f64);
        }
        held += usize::from(volume.replicas.contains(&journey.to.name));
    }
    let wire = copied.disk_wire.unwrap_or(Span { lower: 0.5, likely: 1.0, upper: 1.1 });
    // What this VM's disks say of themselves is more than what others' did. Some of it may be there already, which pieces of it do not show.
    let packed = packs.map(|packs| packs.wire.0 as f64 / packs.held.0 as f64);
    let of_all = packed.map_or(wire, |share| Span { lower: share * 0.6, likely: share, upper: (share * 1.2).min(1.1) });
    let now = match written {
        Some(Writes { rate, .. }) => Span { lower: rate * 0.5, likely: rate, upper: rate * 1.5 },
        None => Span { lower: 0.0, likely: 16e3, upper: 64e3 },
    };
    let (missing, written) = match left {
        _ if kept == own => (Span { lower: 0.0, likely: backlog, upper: backlog * 1.5 + 1e6 }, now),
        Some(left) if held >= own => behind(written, left, whole, wire.likely),
        None if held >= own => (Span { lower: 0.0, likely: whole * 0.05, upper: whole }, now),
        _ => (Span { lower: whole * of_all.lower, likely: whole * of_all.likely, upper: whole * of_all.upper }, now),
    };
    Ok((Disks { missing, written, speed: copied.disk_speed, shared: false }, kept == own))
}

/// Bytes that a move still has to send, as far as it says; of one that has not begun, what was foretold.
pub(crate) fn left_of(mv: &MoveRecord) -> f64 {
    let p = &mv.progress;
    let told = mv.prediction.as_ref().filter(|_| p.phase == PhaseName::Reserve);
    let shrink = if p.raw.0 == 0 { 0.3 } else { (p.bytes.memory.0 as f64 / p.raw.0 as f64).min(1.0) };
    let whole = if p.phase < PhaseName::Memory { mv.memory } else { Bytes(0) };
    let memory = whole.max(p.memory_remaining);
    let said = p.disk.remaining.0 as f64 + memory.0 as f64 * shrink;
    told.map_or(said, |told| told.bytes.likely.max(said))
}

/// When a move under way will end, by what its rounds have shown: in place of what remains at the present rate. Never earlier than was said.
pub fn revise(record: &mut MoveRecord, now_unix_us: u64) {
    let Some(told) = &record.prediction else { return };
    let p = &record.progress;
    // The guest is being stopped, and what such a round has left says nothing of what it dirties.
    if past::is_last_cut(&p.rounds, record.memory) {
        return;
    }
    let goodput = p.rate.0.max((told.basis.goodput_mbit.likely * 1e6 / 2.0) as u64);
    let memory_total = Pages::of(record.memory);
    let cost = |bytes| Cost { bytes, seconds: WORK };
    let (first, again) = (cost(told.basis.first_bytes_a_page), cost(told.basis.again_bytes_a_page));
    let level = p.rounds.last().and_then(|round| round.level).or(told.basis.level);
    let left = match p.phase {
        PhaseName::Reserve | PhaseName::CopyDisk => memory_total,
        PhaseName::Memory => Pages::of(p.memory_remaining),
        _ => return,
    };
    let going = Going {
        memory: memory_total,
        working_set: Pages(told.basis.working_set_pages.min(memory_total.0)),
        before: PageRate::new(told.basis.changed_per_s),
        left,
        rounds: p.rounds.iter().map(made).collect(),
        wire: packed(Wire { first, again, same: cost(NAMED) }, record.order.policy, level),
        goodput: BitRate(goodput),
    };
    let has_means = record.order.throttle.is_some() || record.order.memory_postcopy.is_some();
    let besides = p.disk.remaining.0 as f64 * 8.0 / goodput.max(1) as f64 + told.basis.pause_ms.likely / 1e3;
    // A deadline counts from when it was ordered, or its turn came.
    let gone = now_unix_us.saturating_sub(past::began_unix_us(record)) as f64 / 1e6;
    let used = Duration::try_from_secs_f64(gone + besides).unwrap_or(Duration::MAX);
    let policy = judged_by(record.order.policy, has_means).sooner(used);
    let Ok(rest) = going.rest(&Rules::godwit_to(policy)) else { return };
    let seconds = rest.total_s + besides;
    let end = now_unix_us.saturating_add((seconds.clamp(0.0, 1e7) * 1e6) as u64);
    let before = record.progress.predicted_end_unix_us;
    record.progress.predicted_end_unix_us = Some(before.map_or(end, |before| before.max(end)));
}

fn made(round: &godwit_api::progress::Round) -> Made {
    Made { sent: round.pages, dirtied: round.dirtied, wire: round.wire, seconds: round.seconds }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_time_of_day_is_within_a_day_and_never_past() {
        let day = 86_400;
        assert_eq!(next_time(Duration::from_secs(100), 10 * day + 50), 10 * day + 100);
        assert_eq!(next_time(Duration::from_secs(7 * day + 100), 10 * day + 150), 11 * day + 100);
        assert_eq!(next_time(Duration::from_secs(100), 100), 100);
    }

    fn told(total: f64) -> Option<Foretold> {
        Some(Foretold {
            total_s: Span { lower: total - 1.0, likely: total, upper: total + 2.0 },
            begins_s: None,
            downtime_ms: Span::default(),
            bytes: Span::default(),
            basis: Basis::default(),
            uncorrected: Likely { total_s: total, ..Likely::default() },
        })
    }

    #[test]
    fn moves_in_a_row_begin_when_those_before_them_are_there_and_behind_one_nobody_knows_of_nothing_is_said() {
        let mut row = [told(5.0), told(10.0), told(20.0)];
        one_after_another(&mut row);
        let seen: Vec<_> = row.iter().flatten().map(|t| (t.begins_s.map(|b| b.likely), t.total_s, t.own_s())).collect();
        let span = |lower, likely, upper| Span { lower, likely, upper };
        assert_eq!(seen[0], (None, span(4.0, 5.0, 7.0), 5.0));
        assert_eq!(seen[1], (Some(5.0), span(13.0, 15.0, 19.0), 10.0));
        assert_eq!(seen[2], (Some(15.0), span(32.0, 35.0, 41.0), 20.0));
        // What they learn from is their own time.
        assert!(row.iter().flatten().all(|t| t.uncorrected.total_s == t.own_s()));
        let mut torn = [told(5.0), None, told(20.0)];
        one_after_another(&mut torn);
        assert_eq!(torn.each_ref().map(Option::is_some), [true, false, false]);
    }

    #[test]
    fn what_a_guest_has_written_since_it_came_is_counted_and_not_guessed_from_a_moment() {
        let left = |straight| past::Left { ago_s: 20.0, straight };
        // It has written 6 MB in 20 s, and just now writes 2 MB a second.
        let burst = Some(Writes { all: 6e6, rate: 2e6 });
        let (missing, written) = behind(burst, left(true), 1e9, 0.5);
        assert_eq!((missing.likely, written.likely, written.upper), (3e6, 3e5, 3e6));
        assert!(missing.upper < 5e6, "{missing:?}");
        // Elsewhere meanwhile, it has written more than its QEMU here has seen.
        let (missing, written) = behind(burst, left(false), 1e9, 0.5);
        assert_eq!((missing.likely, missing.upper, written.likely), (2e7, 6.1e7, 2e6));
        assert_eq!(behind(burst, left(false), 1e7, 0.5).0.upper, 1e7, "no more than there is");
    }

    #[test]
    fn who_wants_the_fewest_bytes_has_fewer_and_an_encoder_that_takes_longer_for_what_is_packed() {
        let plain = wire(None, None);
        let hard = packed(plain, Policy::LeastBytes, None);
        assert_eq!(packed(plain, Policy::LeastTotal, None), plain);
        assert!(hard.first.bytes < plain.first.bytes && hard.again.bytes < plain.again.bytes, "{hard:?}");
        assert_eq!((hard.first.seconds, hard.same), (HARD_WORK, plain.same));
        // What others go by on the same link is nothing to it; to them it is.
        assert_eq!(packed(plain, Policy::LeastBytes, Some(1)), hard);
        let nine = packed(plain, Policy::LeastTotal, Some(9));
        assert!(nine.first.bytes < plain.first.bytes && nine.first.seconds == plain.first.seconds, "{nine:?}");
        // All but zero pages, which take no more than they did.
        let zeroes = Wire { first: Cost { bytes: 2.0, seconds: WORK }, ..plain };
        assert_eq!(packed(zeroes, Policy::LeastBytes, None).first.seconds, WORK);
    }

    #[test]
    fn one_that_never_ends_takes_for_ever_and_of_one_that_is_given_up_nobody_knows() {
        assert_eq!(Ahead { told: None, never: true }.own_s(), Some(f64::INFINITY));
        assert_eq!(Ahead::default().own_s(), None);
        assert_eq!(Ahead { told: told(5.0), never: false }.own_s(), Some(5.0));
    }

    #[test]
    fn a_single_move_that_was_held_up_makes_the_interval_wider_and_no_more() {
        let assumed = Span { lower: 0.1, likely: 0.2, upper: 1.0 };
        assert_eq!(overhead(None, assumed, 0), assumed);
        assert_eq!(overhead(Some(Span::exactly(0.5)), assumed, 1), Span::exactly(0.5));
        assert_eq!(overhead(Some(Span::exactly(7.0)), assumed, 1), Span { upper: 7.0, ..assumed });
        assert_eq!(overhead(Some(Span::exactly(7.0)), assumed, 3), Span::exactly(7.0));
    }

    #[test]
    fn a_few_pauses_are_chance_and_many_are_not() {
        let assumed = Span { lower: 0.05, likely: 0.07, upper: 0.7 };
        let of = |moves, seen| Pair { moves, pause: Some(Span::exactly(seen)), ..Pair::default() };
        assert_eq!(pause(&Pair::default(), assumed, 0), assumed);
        assert!((pause(&of(1, 0.15), assumed, 1).likely - 0.11).abs() < 1e-9);
        assert!((pause(&of(3, 0.15), assumed, 3).likely - 0.13).abs() < 1e-9);
        assert_eq!(pause(&of(4, 0.15), assumed, 4), Span::exactly(0.15));
        // The interval is as wide as what was seen, and holds what is likely.
        assert_eq!(pause(&of(1, 0.15), assumed, 1).upper, 0.15);
    }

    #[test]
    fn a_link_that_was_measured_outweighs_moves_of_long_ago_and_nothing_known_is_a_wide_guess() {
        let seen = Pair { goodput: Some(Span::exactly(5e7)), ..Pair::default() };
        let path = PathFacts { rtt_ms: 1.0, loss: 0.0, goodput: Some(BitRate(20_000_000)) };
        assert_eq!(goodput(&seen, &seen, Some(&path)).1, "measured now");
        assert_eq!(goodput(&seen, &Pair::default(), None).0, Span::exactly(5e7));
        assert!(goodput(&Pair::default(), &seen, None).0.width() > 1.0);
        assert_eq!(goodput(&Pair::default(), &Pair::default(), None).1, "assumed");
    }
}
