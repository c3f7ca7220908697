//! Carries out requests.
//!
//! `Start`, `Stop`, `Check`, `Warm` and `Corrupt` exclude one another; `Hello` and `Status` are answered at any time,
//! from counters that the loads publish.

use std::{
    hash::{BuildHasher, RandomState},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use crate::{
    activity::Recorder,
    arena::{Arena, Chooser},
    content::Prf,
    disk::{Access, DiskCounters, DiskError, DiskLoad, DiskPace, DiskPlace},
    meminfo::MemInfo,
    memory::{MemoryCounters, MemoryLoad, Phases},
    page::RunId,
    protocol::{
        Activity, Answer, BootId, CheckReport, CorruptReport, CorruptTarget, DiskCheck, HelloReport, LoadSpec,
        LoadStatus, MemoryCheck, PagePlace, Refusal, Reply, Request, StatusReport,
    },
    record::RecordFormat,
    tier::{Tier, TierSpec},
    warm::{Heap, warm},
    wire::refusal,
    worker::Worker,
    workload::{KERNEL, Workload},
};

/// What the program was started with.
#[derive(Debug, Clone, Default)]
pub struct Resources {
    /// Disks that loads may write to.
    pub disks: Vec<DiskPlace>,
    /// Directory with content to warm memory with.
    pub content: Option<PathBuf>,
    /// The kernel's sources; where the debian guest has them unless given.
    pub kernel: Option<PathBuf>,
}

/// The state behind all control connections.
pub struct Engine {
    boot_id: BootId,
    born: Instant,
    resources: Resources,
    recorder: Arc<Recorder>,
    /// Held for the whole of a request that changes or verifies.
    exclusive: Mutex<Exclusive>,
    /// What `Status` looks at; held for a moment only.
    running: Mutex<Arc<Running>>,
}

#[derive(Default)]
struct Exclusive {
    heap: Heap,
    /// How many times something was started; makes run ids.
    runs: u64,
}

struct Running {
    activity: Activity,
    loads: Arc<Vec<Load>>,
}

enum Load {
    Memory { worker: Worker, counters: Arc<MemoryCounters>, pages: u32 },
    Disk { worker: Worker, counters: Arc<DiskCounters>, access: Access },
    Echo,
    Work(Workload),
    Tier(Tier),
}

impl Load {
    fn worker(&self) -> Option<&Worker> {
        match self {
            Self::Memory { worker, .. } | Self::Disk { worker, .. } => Some(worker),
            Self::Echo | Self::Work(_) | Self::Tier(_) => None,
        }
    }

    fn work(&self) -> Option<&Workload> {
        match self {
            Self::Work(work) => Some(work),
            _ => None,
        }
    }

    fn status(&self) -> LoadStatus {
        match self {
            Self::Memory { counters, pages, .. } => LoadStatus::Memory(counters.status(*pages)),
            Self::Disk { counters, access, .. } => LoadStatus::Disk(counters.status(*access)),
            Self::Echo => LoadStatus::Echo,
            Self::Work(work) => LoadStatus::Work(work.status()),
            Self::Tier(tier) => LoadStatus::Tier(tier.status()),
        }
    }
}

/// A thread that panicked with the lock held has left nothing half-done that the next request would not replace.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Engine {
    /// With nothing running, and a fresh boot id.
    pub fn new(resources: Resources) -> Self {
        let born = Instant::now();
        let disks: Vec<_> = resources.disks.iter().map(|disk| disk.path.clone()).collect();
        Self {
            // The standard library seeds its hasher from the kernel's random numbers.
            boot_id: BootId(RandomState::new().hash_one(std::process::id())),
            born,
            resources,
            recorder: Recorder::start(&disks, born),
            exclusive: Mutex::default(),
            running: Mutex::new(Arc::new(Running { activity: Activity::Idle, loads: Arc::default() })),
        }
    }

    /// This life of the program.
    pub fn boot_id(&self) -> BootId {
        self.boot_id
    }

    /// Carries out one request. Blocks for as long as it takes.
    pub fn handle(&self, request: Request) -> Reply {
        let outcome = match request {
            Request::Hello {} => Ok(Answer::Hello(self.hello())),
            Request::Status {} => Ok(Answer::Status(self.status())),
            Request::Activity { from } => Ok(Answer::Activity(self.recorder.report(self.boot_id, from))),
            Request::Warm { free_percent_max } => self.warm(free_percent_max),
            Request::Start { loads, seed } => self.start(&loads, seed).map(|()| Answer::Started),
            Request::Check {} => self.check().map(|report| Answer::Check(Box::new(report))),
            Request::Stop {} => self.stop().map(|()| Answer::Stopped),
            Request::Corrupt { what } => self.corrupt(what).map(Answer::Corrupted),
        };
        match outcome {
            Ok(answer) => Reply::Ok(answer),
            Err(refusal) => Reply::Error(refusal),
        }
    }

    fn uptime_s(&self) -> f64 {
        self.born.elapsed().as_secs_f64()
    }

    fn hello(&self) -> HelloReport {
        HelloReport { version: env!("CARGO_PKG_VERSION").to_owned(), boot_id: self.boot_id, uptime_s: self.uptime_s() }
    }

    fn status(&self) -> StatusReport {
        let running = lock(&self.running).clone();
        StatusReport {
            boot_id: self.boot_id,
            uptime_s: self.uptime_s(),
            activity: running.activity,
            loads: running.loads.iter().map(Load::status).collect(),
        }
    }

    fn next_run(&self, exclusive: &mut Exclusive) -> RunId {
        exclusive.runs += 1;
        RunId(Prf::new(self.boot_id.0, exclusive.runs, 0).next_u64())
    }

    fn warm(&self, free_percent_max: u8) -> Result<Answer, Refusal> {
        if free_percent_max > 100 {
            return Err(refusal(format_args!("free_percent_max = {free_percent_max} is out of range; give 0 to 100")));
        }
        let mut exclusive = lock(&self.exclusive);
        let run = self.next_run(&mut exclusive);
        let content = self.resources.content.as_deref();
        // Seeded by the run: warming twice must not fill memory with two copies of the same pages.
        let report = warm(content, free_percent_max, run.0, run, &mut exclusive.heap, MemInfo::read);
        report.map(Answer::Warm).map_err(refusal)
    }

    fn start(&self, specs: &[LoadSpec], seed: u64) -> Result<(), Refusal> {
        LoadSpec::validate_all(specs).map_err(refusal)?;
        let mut exclusive = lock(&self.exclusive);
        // The loads before end here, and give their memory back before the new ones take theirs.
        self.publish(Activity::Idle, Arc::default());
        make_room(&mut exclusive.heap, specs)?;
        let run = self.next_run(&mut exclusive);
        let loads = specs.iter().enumerate().map(|(load, spec)| self.start_one(load, spec, seed, run));
        let loads: Vec<Load> = loads.collect::<Result<_, _>>()?;
        for worker in loads.iter().filter_map(Load::worker) {
            worker.resume()?;
        }
        self.publish(Activity::Running, Arc::new(loads));
        Ok(())
    }

    /// Builds a load, paused.
    fn start_one(&self, load: usize, spec: &LoadSpec, seed: u64, run: RunId) -> Result<Load, Refusal> {
        // Two loads of one kind must not do the same.
        let seed = Prf::new(seed, load as u64, 0).next_u64();
        match spec {
            LoadSpec::Memory { pages_per_s, pattern, working_set_mib, bytes_per_page, busy_s, rest_s } => {
                let arena = Arena::build(*working_set_mib, seed, run, *bytes_per_page)
                    .map_err(|_| refusal(format_args!("no address space for {working_set_mib} MiB of pages")))?;
                let (pages, counters) = (arena.len(), Arc::<MemoryCounters>::default());
                let chooser = Chooser::new(*pattern, pages, seed);
                let work = MemoryLoad {
                    load,
                    pages_per_s: *pages_per_s,
                    phases: Phases { busy_s: *busy_s, rest_s: *rest_s },
                    arena,
                    chooser,
                    damaged: None,
                    counters: counters.clone(),
                };
                let worker = Worker::spawn(format!("memory-{load}"), work, counters.clock.clone()).map_err(refusal)?;
                Ok(Load::Memory { worker, counters, pages })
            }
            LoadSpec::Disk { kib_per_s, working_set_mib, disk, read_kib_per_s, total_mib } => {
                let format = RecordFormat { seed, boot: self.boot_id, run };
                let pace = DiskPace { kib_per_s: *kib_per_s, read_kib_per_s: *read_kib_per_s, total_mib: *total_mib };
                let recorder = self.recorder.clone();
                let work = DiskLoad::open(&self.resources.disks, *disk, *working_set_mib, pace, format, recorder)
                    .map_err(refusal)?;
                let (counters, access) = (work.counters(), work.access());
                let worker = Worker::spawn(format!("disk-{load}"), work, counters.clock.clone()).map_err(refusal)?;
                Ok(Load::Disk { worker, counters, access })
            }
            LoadSpec::Echo { .. } => Ok(Load::Echo),
            LoadSpec::Tier { port, asks, times, answer_bytes, commits_to, transacts, .. } => {
                let disks = &self.resources.disks;
                let place = |disk: usize| {
                    disks.get(disk).cloned().ok_or(DiskError::NoSuchDisk { index: disk, have: disks.len() })
                };
                let commits_to = commits_to.map(place).transpose().map_err(refusal)?;
                let spec = TierSpec {
                    port: *port,
                    asks: *asks,
                    times: *times,
                    answer_bytes: *answer_bytes,
                    commits_to,
                    transacts: *transacts,
                };
                let failed = |error| refusal(format_args!("a tier cannot begin on port {port}: {error}"));
                Tier::start(spec, seed).map(Load::Tier).map_err(failed)
            }
            LoadSpec::KernelCompile { jobs } => {
                let tree = self.resources.kernel.as_deref().unwrap_or(Path::new(KERNEL));
                Workload::compile(tree, *jobs, self.recorder.clone()).map(Load::Work).map_err(refusal)
            }
            LoadSpec::Database { clients, scale } => {
                Workload::database(*clients, *scale, self.recorder.clone()).map(Load::Work).map_err(refusal)
            }
            LoadSpec::Java { threads, heap_mib } => {
                Workload::java(*threads, *heap_mib, self.recorder.clone()).map(Load::Work).map_err(refusal)
            }
        }
    }

    fn publish(&self, activity: Activity, loads: Arc<Vec<Load>>) {
        let before = std::mem::replace(&mut *lock(&self.running), Arc::new(Running { activity, loads }));
        // Dropped without the lock: ending loads takes a while, and `Status` must not wait for it.
        drop(before);
    }

    fn check(&self) -> Result<CheckReport, Refusal> {
        let exclusive = lock(&self.exclusive);
        let running = lock(&self.running).clone();
        let begun = Instant::now();
        let workers: Vec<&Worker> = running.loads.iter().filter_map(Load::worker).collect();
        let works: Vec<&Workload> = running.loads.iter().filter_map(Load::work).collect();
        if workers.is_empty() && works.is_empty() && exclusive.heap.is_empty() {
            return Err(refusal("there is nothing to check: send `start` with a load that can be checked first"));
        }
        for worker in &workers {
            worker.pause()?;
        }
        let (memory, disk) = (MemoryCheck::default(), DiskCheck::default());
        let mut report = CheckReport { memory, disk, work: vec![], seconds: 0.0 };
        for worker in &workers {
            report = worker.verify(report)?;
        }
        for block in &exclusive.heap {
            block.check(PagePlace::Heap {}, PagePlace::Heap {}, &mut report.memory);
        }
        if running.activity == Activity::Running {
            for worker in &workers {
                worker.resume()?;
            }
        }
        // They are not paused: that they go on is what is looked at.
        report.work = works.into_iter().map(Workload::check).collect();
        report.seconds = begun.elapsed().as_secs_f64();
        Ok(report)
    }

    fn stop(&self) -> Result<(), Refusal> {
        let _exclusive = lock(&self.exclusive);
        let running = lock(&self.running).clone();
        for worker in running.loads.iter().filter_map(Load::worker) {
            worker.settle()?;
        }
        running.loads.iter().filter_map(Load::work).for_each(Workload::end);
        self.publish(Activity::Stopped, running.loads.clone());
        Ok(())
    }

    fn corrupt(&self, what: CorruptTarget) -> Result<CorruptReport, Refusal> {
        let _exclusive = lock(&self.exclusive);
        let running = lock(&self.running).clone();
        let wanted = |load: &&Load| match what {
            CorruptTarget::MemoryPage => matches!(load, Load::Memory { .. }),
            CorruptTarget::DiskRecord => matches!(load, Load::Disk { .. }),
        };
        let worker = running.loads.iter().find(wanted).and_then(Load::worker);
        let worker = worker.ok_or_else(|| refusal("no load of that kind runs; send `start` with one first"))?;
        let outcome = worker.damage()?;
        if running.activity == Activity::Running {
            worker.resume()?;
        }
        outcome
    }
}

/// Sees to it that the memory loads fit, if need be by giving up the heap records.
fn make_room(heap: &mut Heap, specs: &[LoadSpec]) -> Result<(), Refusal> {
    let arena_bytes = |spec: &LoadSpec| match spec {
        LoadSpec::Memory { working_set_mib, .. } => Arena::bytes(*working_set_mib),
        _ => 0,
    };
    let need_kib = specs.iter().map(arena_bytes).sum::<u64>() / 1024;
    let fits = || MemInfo::read().map_or(true, |now| need_kib + now.floor_kib() <= now.available_kib);
    if need_kib == 0 || fits() {
        return Ok(());
    }
    *heap = Heap::new();
    if fits() {
        return Ok(());
    }
    Err(refusal(format_args!(
        "the memory loads want {} MiB, more than the guest can give without running out; \
         make the working sets smaller or the guest larger",
        need_kib / 1024
    )))
}
