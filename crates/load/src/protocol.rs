//! What the host and the load program say to each other.
//!
//! One request is one line of JSON, answered by one line of JSON, over TCP. Lines are at most [`MAX_LINE_BYTES`]
//! long; the length is bounded before anything is parsed (see [`crate::wire`]). Every type refuses unknown fields:
//! a misspelt key in a scenario must be an error, not a load that silently runs with its default.
//!
//! [`LoadSpec`] is also, word for word, what the inline tables of `load = [...]` in a scenario file deserialise into.

use std::{fmt, net::SocketAddrV4, str::FromStr};

use serde::{Deserialize, Serialize};

/// Longest line that either side accepts, newline included. Every reply fits: lists of problems are cut at
/// [`MAX_LISTED`], and every text in them at [`MAX_TEXT_BYTES`].
pub const MAX_LINE_BYTES: usize = 64 * 1024;

/// How many problems a report lists in full; all of them are counted.
pub const MAX_LISTED: usize = 16;

/// Longest free text (an error, what was expected, what was found) inside a reply.
pub const MAX_TEXT_BYTES: usize = 384;

/// Most loads in one `Start`; each is a thread in a guest that often has one CPU.
pub const MAX_LOADS: usize = 16;

/// Bytes of a guest page that carry the proof (header and tail), and so are not available for `bytes_per_page`.
pub const PAGE_OVERHEAD_BYTES: u32 = 56;

/// Largest `bytes_per_page`: a page less its header and tail.
pub const MAX_BYTES_PER_PAGE: u32 = 4096 - PAGE_OVERHEAD_BYTES;

/// Largest working set of a load, 1 TiB, so that page and slot numbers fit in 32 bits.
pub const MAX_WORKING_SET_MIB: u32 = 1 << 20;

/// Largest `pages_per_s`; far above what a guest reaches, so that a slip of the keyboard is noticed.
pub const MAX_PAGES_PER_S: u32 = 10_000_000;

/// Largest `kib_per_s`, 16 GiB/s.
pub const MAX_KIB_PER_S: u32 = 16 << 20;

/// Most processes of a workload at a time (`jobs`, `clients`).
pub const MAX_PROCESSES: u32 = 64;

/// Largest `scale` of a database: 1.5 GiB.
pub const MAX_SCALE: u32 = 100;

/// Least `heap_mib` of a Java machine: its classes and a little stock.
pub const MIN_HEAP_MIB: u32 = 16;

/// Largest `heap_mib` of one, 64 GiB.
pub const MAX_HEAP_MIB: u32 = 64 << 10;

/// Longest `think_ms` of a tier's clients.
pub const MAX_THINK_MS: u32 = 60_000;

/// Longest `busy_s` and `rest_s` of a memory load, seconds.
pub const MAX_PHASE_S: u32 = 3600;

/// Largest `per_s` of an echo load.
pub const MAX_ECHO_PER_S: u32 = 10_000;

/// One load of a scenario: `{ kind = "memory", pages_per_s = 2000, working_set_mib = 64 }`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum LoadSpec {
    /// Dirties guest pages, and knows for each of them which version it must hold.
    Memory {
        /// Pages touched per second. 0 builds the working set and leaves it alone: static memory, still checked.
        pages_per_s: u32,
        /// Which pages are touched.
        #[serde(default)]
        pattern: Pattern,
        /// Size of the arena, MiB; 1 to [`MAX_WORKING_SET_MIB`].
        working_set_mib: u32,
        /// Fresh bytes written per touch (besides version and checksum, 24 bytes); 1 to [`MAX_BYTES_PER_PAGE`].
        #[serde(default = "default_bytes_per_page")]
        bytes_per_page: u32,
        /// Writes for so many seconds and rests for `rest_s`, over and over, by the guest's clock: the first of a period begins at 1970.
        /// 1 to [`MAX_PHASE_S`] where it rests at all.
        #[serde(default)]
        busy_s: u32,
        /// 0, the default: it never rests.
        #[serde(default)]
        rest_s: u32,
    },
    /// Writes 4 KiB records to random slots of a disk, and knows which of them the disk has acknowledged.
    Disk {
        /// KiB written per second; 1 to [`MAX_KIB_PER_S`].
        kib_per_s: u32,
        /// Size of the region that is written, MiB; 1 to [`MAX_WORKING_SET_MIB`].
        working_set_mib: u32,
        /// Which of the program's `--disk` arguments, counted from 0.
        #[serde(default)]
        disk: usize,
        /// KiB a second of records that are read back and verified meanwhile, from random slots that were written; at most
        /// [`MAX_KIB_PER_S`].
        #[serde(default)]
        read_kib_per_s: u32,
        /// Not for ever: it ends when it has written so many MiB, one slot after the other and from the first one again. 0: for ever,
        /// at random.
        #[serde(default)]
        total_mib: u32,
    },
    /// Echoes over one TCP session. A client outside drives it; the guest only answers on its echo port.
    Echo {
        /// Site at which the client runs.
        from: String,
        /// Messages per second; 1 to [`MAX_ECHO_PER_S`].
        per_s: u32,
    },
    /// Compiles the kernel, over and over; only in a guest that has its sources.
    #[serde(rename = "kernel-compile")]
    KernelCompile {
        /// How many compilers at a time; 1 to [`MAX_PROCESSES`].
        #[serde(default = "one")]
        jobs: u32,
    },
    /// PostgreSQL under `pgbench`; only in a guest that has both.
    #[serde(rename = "database")]
    Database {
        /// Clients at a time; 1 to [`MAX_PROCESSES`].
        #[serde(default = "one")]
        clients: u32,
        /// Size: so many times 100000 accounts, 15 MiB; 1 to [`MAX_SCALE`].
        #[serde(default = "one")]
        scale: u32,
    },
    /// A business that keeps all of its data in a Java machine's memory; only in a guest that has one.
    #[serde(rename = "java")]
    Java {
        /// Warehouses, a thread each; 1 to [`MAX_PROCESSES`].
        #[serde(default = "one")]
        threads: u32,
        /// The Java machine's heap; [`MIN_HEAP_MIB`] to [`MAX_HEAP_MIB`].
        #[serde(default = "heap")]
        heap_mib: u32,
    },
    /// A tier of an application ([`crate::tier`]): it answers requests on its port, once the next tier has answered its own.
    Tier {
        /// Its TCP port.
        port: u16,
        /// The next tier's address and port; the last tier has none.
        #[serde(default)]
        asks: Option<SocketAddrV4>,
        /// How often it asks that for each request; 1 to [`MAX_PROCESSES`].
        #[serde(default = "one")]
        times: u32,
        /// Size of its answers; at most [`crate::tier::MAX_ANSWER_BYTES`].
        #[serde(default = "default_answer_bytes")]
        answer_bytes: u32,
        /// Which of the program's `--disk` arguments each request is written to, 4 KiB and flushed, before it is answered: what a
        /// database's commit does. None: nothing is written.
        #[serde(default)]
        commits_to: Option<usize>,
        /// Each request is a transaction of the guest's database before it is answered, TPC-B's as `pgbench` has it; only beside a `database` load.
        #[serde(default)]
        transacts: bool,
        /// Site from which clients outside ask; none: nobody but the tier before does.
        #[serde(default)]
        from: Option<String>,
        /// How many sessions they hold; 1 to [`crate::tier::MAX_SESSIONS`].
        #[serde(default = "one")]
        sessions: u32,
        /// Between an answer and the session's next request, ms.
        #[serde(default)]
        think_ms: u32,
    },
}

fn one() -> u32 {
    1
}

fn heap() -> u32 {
    192
}

fn default_answer_bytes() -> u32 {
    1024
}

fn default_bytes_per_page() -> u32 {
    64
}

/// Which pages a memory load touches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pattern {
    /// Every page equally often.
    #[default]
    Uniform,
    /// Rank k about 1/k as often as rank 1; ranks are scattered over the arena.
    Zipf,
    /// One after the other, from the first to the last and again.
    Sequential,
}

/// Why a [`LoadSpec`] is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LoadSpecError {
    /// A number lies outside its bounds.
    #[error("{kind} load: {field} = {value} is out of range; give {least} to {most}")]
    OutOfRange {
        /// The load's kind as the scenario spells it.
        kind: &'static str,
        /// The offending field.
        field: &'static str,
        /// What was given.
        value: u64,
        /// Smallest accepted value.
        least: u64,
        /// Largest accepted value.
        most: u64,
    },
    /// Two tiers on one port.
    #[error("two tier loads on port {port}; give each its own")]
    PortUsedTwice {
        /// The port.
        port: u16,
    },
    /// An echo load does not say where its client runs.
    #[error("echo load: `from` is empty; name the site at which the client runs")]
    EchoFromNowhere,
    /// Two disk loads, or one and a tier that commits, would overwrite each other's records, and each would report the other's as foreign.
    #[error("two loads write to disk {disk}; give each its own disk, or make them one load")]
    DiskUsedTwice {
        /// The disk's index.
        disk: usize,
    },
    /// Two workloads of one kind would be in each other's files.
    #[error("two {kind} loads; a guest has one kernel tree, one database and one business: make them one load")]
    WorkTwice {
        /// The kind.
        kind: &'static str,
    },
    /// Transactions, and nothing to make them of.
    #[error("the tier on port {port} transacts, and its guest has no database; give it a `database` load, too")]
    NoDatabase {
        /// The tier's.
        port: u16,
    },
    /// More loads than [`MAX_LOADS`].
    #[error("{count} loads; at most {MAX_LOADS} can run in one guest")]
    TooMany {
        /// How many were given.
        count: usize,
    },
}

impl LoadSpec {
    /// The load's kind as a scenario spells it.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Memory { .. } => "memory",
            Self::Disk { .. } => "disk",
            Self::Echo { .. } => "echo",
            Self::KernelCompile { .. } => "kernel-compile",
            Self::Database { .. } => "database",
            Self::Java { .. } => "java",
            Self::Tier { .. } => "tier",
        }
    }

    /// Whether it is a program that people run, which the tiny guest does not have.
    #[must_use]
    pub const fn is_work(&self) -> bool {
        matches!(self, Self::KernelCompile { .. } | Self::Database { .. } | Self::Java { .. })
    }

    /// Checks the bounds that the types cannot express.
    ///
    /// # Errors
    /// The first bound that does not hold.
    pub fn validate(&self) -> Result<(), LoadSpecError> {
        let within = |field: &'static str, value: u32, least: u32, most: u32| match value {
            v if (least..=most).contains(&v) => Ok(()),
            v => Err(LoadSpecError::OutOfRange {
                kind: self.kind(),
                field,
                value: v.into(),
                least: least.into(),
                most: most.into(),
            }),
        };
        match self {
            Self::Memory { pages_per_s, pattern: _, working_set_mib, bytes_per_page, busy_s, rest_s } => {
                within("rest_s", *rest_s, 0, MAX_PHASE_S)?;
                within("busy_s", *busy_s, u32::from(*rest_s > 0), MAX_PHASE_S)?;
                within("pages_per_s", *pages_per_s, 0, MAX_PAGES_PER_S)?;
                within("working_set_mib", *working_set_mib, 1, MAX_WORKING_SET_MIB)?;
                within("bytes_per_page", *bytes_per_page, 1, MAX_BYTES_PER_PAGE)
            }
            Self::Disk { kib_per_s, working_set_mib, disk: _, read_kib_per_s, total_mib } => {
                within("total_mib", *total_mib, 0, MAX_WORKING_SET_MIB)?;
                within("kib_per_s", *kib_per_s, 1, MAX_KIB_PER_S)?;
                within("read_kib_per_s", *read_kib_per_s, 0, MAX_KIB_PER_S)?;
                within("working_set_mib", *working_set_mib, 1, MAX_WORKING_SET_MIB)
            }
            Self::Echo { from, per_s } => {
                if from.trim().is_empty() {
                    return Err(LoadSpecError::EchoFromNowhere);
                }
                within("per_s", *per_s, 1, MAX_ECHO_PER_S)
            }
            Self::KernelCompile { jobs } => within("jobs", *jobs, 1, MAX_PROCESSES),
            Self::Database { clients, scale } => {
                within("clients", *clients, 1, MAX_PROCESSES)?;
                within("scale", *scale, 1, MAX_SCALE)
            }
            Self::Java { threads, heap_mib } => {
                within("threads", *threads, 1, MAX_PROCESSES)?;
                within("heap_mib", *heap_mib, MIN_HEAP_MIB, MAX_HEAP_MIB)
            }
            Self::Tier {
                port,
                asks: _,
                times,
                answer_bytes,
                commits_to: _,
                transacts: _,
                from: _,
                sessions,
                think_ms,
            } => {
                within("port", (*port).into(), 1, u16::MAX.into())?;
                within("times", *times, 1, MAX_PROCESSES)?;
                within("answer_bytes", *answer_bytes, 0, crate::tier::MAX_ANSWER_BYTES)?;
                within("sessions", *sessions, 1, crate::tier::MAX_SESSIONS)?;
                within("think_ms", *think_ms, 0, MAX_THINK_MS)
            }
        }
    }

    /// Checks that it has beside it, in the same guest, what it needs there.
    ///
    /// # Errors
    /// What it lacks.
    pub fn validate_beside<'a>(&self, others: impl IntoIterator<Item = &'a Self>) -> Result<(), LoadSpecError> {
        match self {
            Self::Tier { port, transacts: true, .. }
                if !others.into_iter().any(|load| matches!(load, Self::Database { .. })) =>
            {
                Err(LoadSpecError::NoDatabase { port: *port })
            }
            _ => Ok(()),
        }
    }

    /// Checks each load, and that they can run side by side.
    ///
    /// # Errors
    /// The first bound that does not hold.
    pub fn validate_all(loads: &[Self]) -> Result<(), LoadSpecError> {
        if loads.len() > MAX_LOADS {
            return Err(LoadSpecError::TooMany { count: loads.len() });
        }
        let mut disks = std::collections::BTreeSet::new();
        let mut works = std::collections::BTreeSet::new();
        let mut ports = std::collections::BTreeSet::new();
        for load in loads {
            load.validate()?;
            match load {
                Self::Disk { disk, .. } | Self::Tier { commits_to: Some(disk), .. } if !disks.insert(*disk) => {
                    return Err(LoadSpecError::DiskUsedTwice { disk: *disk });
                }
                _ if load.is_work() && !works.insert(load.kind()) => {
                    return Err(LoadSpecError::WorkTwice { kind: load.kind() });
                }
                _ => {}
            }
            if let Self::Tier { port, .. } = load
                && !ports.insert(*port)
            {
                return Err(LoadSpecError::PortUsedTwice { port: *port });
            }
        }
        loads.iter().try_for_each(|load| load.validate_beside(loads))
    }
}

/// What the host asks for. Variants without data are written with braces so that unknown fields are refused there too.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    /// Who is there; answered with [`Answer::Hello`].
    Hello {},
    /// Fill free memory with real content; answered with [`Answer::Warm`] when done, which can take
    /// [`crate::warm::TIME_LIMIT`].
    Warm {
        /// Stop once MemFree is at most this share of MemTotal; 0 to 100.
        free_percent_max: u8,
    },
    /// Replace whatever load there is by these; answered with [`Answer::Started`] once all of them run. Loads that are
    /// out of bounds are refused and change nothing; after any other refusal nothing runs.
    Start {
        /// The loads; at most [`MAX_LOADS`]. Empty frees the memory of the loads before.
        loads: Vec<LoadSpec>,
        /// Determines content and order of access.
        seed: u64,
    },
    /// Counters so far; answered with [`Answer::Status`], at once even during a check.
    Status {},
    /// What the guest saw of its disks and its work, interval by interval, from interval number `from` on; answered with
    /// [`Answer::Activity`], at once even during a check.
    Activity {
        /// 0, or `next` of the answer before.
        from: u64,
    },
    /// Pause the loads, verify everything, resume; answered with [`Answer::Check`].
    Check {},
    /// Pause the loads until the next `Start`. What they wrote stays, and can still be checked.
    Stop {},
    /// Self-test hook: damage something behind the load's back, so that the host can show that a check then fails.
    /// The damage stays until the next `Start`: the load leaves a damaged record alone so that it cannot heal it, and
    /// asking again only reports it again.
    Corrupt {
        /// What to damage.
        what: CorruptTarget,
    },
}

/// What [`Request::Corrupt`] damages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CorruptTarget {
    /// One bit of a page of the first memory load.
    MemoryPage,
    /// One bit of an acknowledged record of the first disk load.
    DiskRecord,
}

/// The answer to a request, or why there is none.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Reply {
    /// Done.
    Ok(Answer),
    /// Not done.
    Error(Refusal),
}

/// Why a request was not carried out: what was tried, on what, and what to do about it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(deny_unknown_fields)]
#[error("{message}")]
pub struct Refusal {
    /// The whole story in one line.
    pub message: String,
}

/// What a request yields.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "snake_case")]
pub enum Answer {
    /// To [`Request::Hello`].
    Hello(HelloReport),
    /// To [`Request::Warm`].
    Warm(WarmReport),
    /// To [`Request::Start`].
    Started,
    /// To [`Request::Status`].
    Status(StatusReport),
    /// To [`Request::Activity`].
    Activity(crate::activity::ActivityReport),
    /// To [`Request::Check`].
    Check(Box<CheckReport>),
    /// To [`Request::Stop`].
    Stopped,
    /// To [`Request::Corrupt`].
    Corrupted(CorruptReport),
}

/// One life of the load program: random, drawn when it starts. A different one after a move means that the guest was
/// restarted, not moved. Written as 16 hexadecimal digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct BootId(pub u64);

impl fmt::Display for BootId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// Text that is not a [`BootId`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("boot id is not 16 hexadecimal digits")]
pub struct BadBootId;

impl FromStr for BootId {
    type Err = BadBootId;

    fn from_str(text: &str) -> Result<Self, BadBootId> {
        if text.len() != 16 || !text.bytes().all(|b| b.is_ascii_hexdigit()) {
            return Err(BadBootId);
        }
        u64::from_str_radix(text, 16).map(Self).map_err(|_| BadBootId)
    }
}

impl TryFrom<String> for BootId {
    type Error = BadBootId;

    fn try_from(text: String) -> Result<Self, BadBootId> {
        text.parse()
    }
}

impl From<BootId> for String {
    fn from(id: BootId) -> Self {
        id.to_string()
    }
}

/// Who answers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HelloReport {
    /// Version of the load program.
    pub version: String,
    /// This life of the load program.
    pub boot_id: BootId,
    /// Seconds since the load program started, by the guest's monotonic clock.
    pub uptime_s: f64,
}

/// What warming did.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WarmReport {
    /// Files read into the page cache.
    pub files_read: u64,
    /// Bytes read from them.
    pub bytes_read: u64,
    /// Files or directories that could not be read; they are skipped.
    pub unreadable: u64,
    /// MiB of heap records held after warming; they are verified by every check.
    pub heap_mib: u64,
    /// MemTotal, KiB.
    pub mem_total_kib: u64,
    /// MemFree afterwards, KiB.
    pub mem_free_kib: u64,
    /// Why it ended.
    pub ended: WarmEnd,
    /// How long it took.
    pub seconds: f64,
}

/// Why warming ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WarmEnd {
    /// MemFree is at most the share that was asked for.
    Reached,
    /// More heap would have put the guest in danger of running out of memory.
    MemoryFloor,
    /// Heap grew but MemFree did not fall: the kernel gives up page cache for it, so more would undo the warming.
    NoProgress,
    /// The time limit.
    TimeLimit,
}

/// Counters of the loads.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StatusReport {
    /// This life of the load program.
    pub boot_id: BootId,
    /// Seconds since the load program started.
    pub uptime_s: f64,
    /// What the loads are doing.
    pub activity: Activity,
    /// One entry for each load of the last `Start`, in its order.
    pub loads: Vec<LoadStatus>,
}

/// What the loads are doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Activity {
    /// Nothing was started yet.
    Idle,
    /// Running, or paused for a check.
    Running,
    /// Stopped; can still be checked.
    Stopped,
}

/// Counters of one load since its start.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum LoadStatus {
    /// A memory load.
    Memory(MemoryStatus),
    /// A disk load.
    Disk(DiskStatus),
    /// An echo load; the client outside counts.
    Echo,
    /// A workload: kernel compile or database.
    Work(WorkStatus),
    /// A tier of an application.
    Tier(TierStatus),
}

/// Counters of a tier.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TierStatus {
    /// Requests answered, those that failed too.
    pub answered: u64,
    /// Sessions that are open now, those to the next tier too.
    pub sessions: u64,
    /// Requests that failed, because the next tier did.
    pub errors: u64,
    /// The first of them, in words.
    pub first_error: Option<String>,
}

/// Counters of a workload.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WorkStatus {
    /// Which: the kind of its load.
    pub what: String,
    /// Units done: objects compiled, transactions.
    pub units: u64,
    /// Units a second since its start.
    pub per_s: f64,
    /// How often its program has come to its end.
    pub runs: u64,
    /// How often it failed.
    pub errors: u64,
    /// The first failure, in words.
    pub first_error: Option<String>,
}

/// Counters of a memory load.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemoryStatus {
    /// Pages in the arena.
    pub pages: u64,
    /// Touches so far.
    pub pages_dirtied: u64,
    /// Touches per second of the time the load ran (pauses for checks not counted).
    pub pages_per_s: f64,
    /// Longest time between two batches of touches, ms; near 10 when nothing holds the load up.
    pub max_gap_ms: f64,
    /// Problems that touches ran into (a touch verifies a page before it writes it).
    pub errors: u64,
    /// The first of them, in words.
    pub first_error: Option<String>,
}

/// Counters of a disk load.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskStatus {
    /// KiB written.
    pub kib_written: u64,
    /// KiB per second of the time the load ran.
    pub kib_per_s: f64,
    /// Sequence number of the last record written; they count up from 1.
    pub issued_sequence: u64,
    /// Every record up to this sequence number was flushed, unless its write or its flush failed.
    pub acknowledged_sequence: u64,
    /// Longest single write or flush, ms.
    pub max_stall_ms: f64,
    /// Whether the disk is open with O_DIRECT. If not (tmpfs), checks may read the page cache instead of the disk.
    pub direct: bool,
    /// Writes and flushes that failed.
    pub errors: u64,
    /// The first of them, in words.
    pub first_error: Option<String>,
}

/// What a check found.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CheckReport {
    /// Memory, all memory loads and the heap records of warming together.
    pub memory: MemoryCheck,
    /// Disks, all disk loads together.
    pub disk: DiskCheck,
    /// Workloads, one by one.
    #[serde(default)]
    pub work: Vec<WorkCheck>,
    /// How long the loads were paused.
    pub seconds: f64,
}

impl CheckReport {
    /// Whether everything is as it must be, including what touches and writes saw between checks.
    pub fn is_clean(&self) -> bool {
        self.memory.bad_count == 0
            && self.memory.touch_errors == 0
            && self.disk.bad_count == 0
            && self.disk.io_errors == 0
            && self.work.iter().all(|work| work.problems.is_empty())
    }
}

/// What a check found of a workload.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WorkCheck {
    /// Which: the kind of its load.
    pub what: String,
    /// Units done by now; at least one of them was done during the check.
    pub units: u64,
    /// What was looked at: objects on the disk, transactions in the history.
    pub looked_at: u64,
    /// What is wrong, in words; at most four.
    pub problems: Vec<String>,
}

/// What a check found in memory.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemoryCheck {
    /// Pages verified in full.
    pub pages_checked: u64,
    /// Pages found wrong.
    pub bad_count: u64,
    /// The first [`MAX_LISTED`] of them.
    pub bad: Vec<BadPage>,
    /// Problems that touches ran into since the start.
    pub touch_errors: u64,
}

/// What a check found on disks.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskCheck {
    /// Slots read back and verified: every one that was ever written since the start.
    pub records_checked: u64,
    /// Slots found wrong.
    pub bad_count: u64,
    /// The first [`MAX_LISTED`] of them.
    pub bad: Vec<BadRecord>,
    /// Slots of which the last write failed, so that anything may be in them; not verified.
    pub in_doubt: u64,
    /// Writes, flushes and reads that failed since the start.
    pub io_errors: u64,
}

/// How a page or a record is wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Problem {
    /// Nothing of ours is there: zeros, or bytes that are no page or record at all.
    Lost,
    /// Whole, but older than it must be: an update (for a disk, an acknowledged write) was lost.
    Stale,
    /// Not whole: parts of different versions, or bytes changed.
    Torn,
    /// Whole, but not what belongs here: another page's or slot's, another run's, or newer than was ever written.
    Foreign,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Lost => "lost",
            Self::Stale => "stale",
            Self::Torn => "torn",
            Self::Foreign => "foreign",
        })
    }
}

/// Where a bad page is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum PagePlace {
    /// In the arena of this load (index into `Start`'s list).
    Arena {
        /// The load.
        load: usize,
    },
    /// In the table of expected versions of this load.
    Table {
        /// The load.
        load: usize,
    },
    /// In the heap records of warming.
    Heap {},
}

/// One wrong page.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BadPage {
    /// What is wrong.
    pub kind: Problem,
    /// Which region.
    pub place: PagePlace,
    /// Page number in that region.
    pub page: u64,
    /// What was expected, in words.
    pub expected: String,
    /// What was found, in words.
    pub found: String,
}

/// One wrong record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BadRecord {
    /// What is wrong.
    pub kind: Problem,
    /// Index of the disk.
    pub disk: usize,
    /// Slot number; the slot starts `slot * 4096` bytes after the disk's offset.
    pub slot: u64,
    /// What was expected, in words.
    pub expected: String,
    /// What was found, in words.
    pub found: String,
}

/// What was damaged on purpose.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CorruptReport {
    /// What.
    pub what: CorruptTarget,
    /// Page or slot number.
    pub index: u64,
    /// Byte within it of which a bit was flipped.
    pub byte: usize,
}

/// The line that the program prints on its standard output once it listens.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Listening {
    /// Address of the control port.
    pub control: std::net::SocketAddr,
    /// Address of the echo port.
    pub echo: std::net::SocketAddr,
    /// This life of the load program.
    pub boot_id: BootId,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Deserialize)]
    struct Vm {
        load: Vec<LoadSpec>,
    }

    fn scenario(text: &str) -> Result<Vec<LoadSpec>, toml::de::Error> {
        toml::from_str::<Vm>(text).map(|vm| vm.load)
    }

    fn memory(
        pattern: Pattern,
        pages_per_s: u32,
        working_set_mib: u32,
        bytes_per_page: u32,
        [busy_s, rest_s]: [u32; 2],
    ) -> LoadSpec {
        LoadSpec::Memory { pages_per_s, pattern, working_set_mib, bytes_per_page, busy_s, rest_s }
    }

    #[test]
    fn the_load_tables_of_a_scenario_are_load_specs() {
        let loads = scenario(
            r#"load = [
              { kind = "memory", pages_per_s = 2000, pattern = "zipf", working_set_mib = 64, bytes_per_page = 32 },
              { kind = "memory", pages_per_s = 1, working_set_mib = 1 },
              { kind = "disk", kib_per_s = 512, working_set_mib = 256 },
              { kind = "echo", from = "california", per_s = 100 },
              { kind = "kernel-compile", jobs = 2 },
              { kind = "database" },
              { kind = "java", threads = 2 },
            ]"#,
        )
        .unwrap();
        LoadSpec::validate_all(&loads).unwrap();
        assert_eq!(
            loads,
            [
                memory(Pattern::Zipf, 2000, 64, 32, [0, 0]),
                memory(Pattern::Uniform, 1, 1, 64, [0, 0]),
                LoadSpec::Disk { kib_per_s: 512, working_set_mib: 256, disk: 0, read_kib_per_s: 0, total_mib: 0 },
                LoadSpec::Echo { from: "california".into(), per_s: 100 },
                LoadSpec::KernelCompile { jobs: 2 },
                LoadSpec::Database { clients: 1, scale: 1 },
                LoadSpec::Java { threads: 2, heap_mib: 192 },
            ]
        );
    }

    #[test]
    fn unknown_keys_kinds_and_patterns_are_refused() {
        for bad in [
            r#"load = [{ kind = "memory", pages_per_s = 1, working_set_mib = 1, patern = "zipf" }]"#,
            r#"load = [{ kind = "memory", pages_per_s = 1, working_set_mib = 1, pattern = "random" }]"#,
            r#"load = [{ kind = "disk", kib_per_s = 1, working_set_mib = 1, pages_per_s = 1 }]"#,
            r#"load = [{ kind = "cpu" }]"#,
            r#"load = [{ kind = "echo", from = "x", per_s = -1 }]"#,
        ] {
            assert!(scenario(bad).is_err(), "{bad}");
        }
        for bad in [
            r#"{"request":"hello","extra":1}"#,
            r#"{"request":"status","loads":[]}"#,
            r#"{"request":"start","loads":[],"seed":1,"speed":2}"#,
            r#"{"request":"corrupt","what":"everything"}"#,
        ] {
            assert!(serde_json::from_str::<Request>(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn bounds_are_checked_and_the_message_says_which() {
        let uniform = |pages_per_s, working_set_mib, bytes_per_page| {
            memory(Pattern::Uniform, pages_per_s, working_set_mib, bytes_per_page, [0, 0])
        };
        uniform(0, 1, MAX_BYTES_PER_PAGE).validate().unwrap();
        let refused = uniform(1, 1, MAX_BYTES_PER_PAGE + 1).validate().unwrap_err().to_string();
        assert_eq!(refused, "memory load: bytes_per_page = 4041 is out of range; give 1 to 4040");
        for bad in [
            uniform(MAX_PAGES_PER_S + 1, 1, 1),
            uniform(1, 0, 1),
            uniform(1, 1, 0),
            uniform(1, u32::MAX, 1),
            memory(Pattern::Uniform, 1, 1, 64, [0, 1]),
            LoadSpec::Disk { kib_per_s: 0, working_set_mib: 1, disk: 0, read_kib_per_s: 0, total_mib: 0 },
            LoadSpec::KernelCompile { jobs: 0 },
            LoadSpec::Database { clients: 1, scale: MAX_SCALE + 1 },
            LoadSpec::Java { threads: 0, heap_mib: 192 },
            LoadSpec::Java { threads: 1, heap_mib: MIN_HEAP_MIB - 1 },
            LoadSpec::Echo { from: " ".into(), per_s: 1 },
            LoadSpec::Echo { from: "x".into(), per_s: 0 },
        ] {
            assert!(bad.validate().is_err(), "{bad:?}");
        }
        let compile = LoadSpec::KernelCompile { jobs: 1 };
        let twice = LoadSpec::validate_all(&[compile.clone(), compile]);
        assert_eq!(twice, Err(LoadSpecError::WorkTwice { kind: "kernel-compile" }));
        let disk = |disk| LoadSpec::Disk { kib_per_s: 1, working_set_mib: 1, disk, read_kib_per_s: 0, total_mib: 0 };
        LoadSpec::validate_all(&[disk(0), disk(1)]).unwrap();
        assert_eq!(LoadSpec::validate_all(&[disk(1), disk(1)]), Err(LoadSpecError::DiskUsedTwice { disk: 1 }));
    }

    #[test]
    fn a_request_and_a_reply_look_as_documented() {
        assert_eq!(serde_json::to_string(&Request::Hello {}).unwrap(), r#"{"request":"hello"}"#);
        let hello = HelloReport { version: "0.1.0".into(), boot_id: BootId(0xabc), uptime_s: 1.5 };
        let line = serde_json::to_string(&Reply::Ok(Answer::Hello(hello))).unwrap();
        assert_eq!(line, r#"{"ok":{"answer":"hello","version":"0.1.0","boot_id":"0000000000000abc","uptime_s":1.5}}"#);
        assert!(serde_json::from_str::<Reply>(&line).is_ok());
        assert!(serde_json::from_str::<BootId>(r#""+00000000000abc""#).is_err());
    }
}
