//! Programs that people run: a kernel compile, a database, a business in Java. They stand for the papers' workloads, count what they get done, and prove
//! after a move that they went on and that what they made is what it should be.
//!
//! - **kernel-compile**: `make` in the kernel's sources, over and over. Its units are the objects that were compiled; the proof is that
//!   `make` never failed, that objects keep coming, and that the last ones are whole ELF files on the disk.
//! - **database**: PostgreSQL under `pgbench`. Its units are transactions; the proof is TPC-B's own invariant in one snapshot (the sums
//!   of accounts, branches, tellers and history are equal), and that the history holds every transaction that `pgbench` was told of.
//! - **java**: warehouses whose data are all in a Java machine's memory, after the manner of SPECjbb 2005 (`Warehouses.java`). Its units are transactions; the proof is
//!   that what customers have paid is what warehouses have taken, which the program looks at every second.
//!
//! A workload is a process group of its own, ended with its handle. What can go wrong: the guest has no such program (refused at the
//! start, with what the program said), the program ends (counted as an error, in its own words, and started again).

use std::{
    collections::VecDeque,
    fs::File,
    io::{BufRead, BufReader, Read, Seek, Write},
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process_group};

use crate::{
    activity::Recorder,
    protocol::{WorkCheck, WorkStatus},
    wire::bounded,
    worker::ErrorLog,
};

/// Where the debian guest has the kernel's sources.
pub const KERNEL: &str = "/usr/src/linux";

/// The database that belongs to the load; made anew at each start.
pub(crate) const DATABASE: &str = "godwit";

/// How long a check waits for the next unit: an emulated guest takes seconds for an object.
const GOES_ON: Duration = Duration::from_secs(180);

/// How long `make` may take to its first objects: it asks the compiler hundreds of questions before, and the guest is emulated.
const UNDER_WAY: Duration = Duration::from_secs(1500);

/// So many objects, and it is under way.
const FIRST: usize = 3;

/// How many of the last objects a check looks at.
const LOOKED_AT: usize = 64;

/// Pause before a program that has ended is started again.
const AGAIN: Duration = Duration::from_secs(1);

/// Lines of a program's output that are kept for the error that it may end with.
const WORDS: usize = 6;

/// A business that keeps all of its data in memory.
const WAREHOUSES: &str = include_str!("Warehouses.java");

/// Things in stock for each MiB of the heap: with what is ordered of them, a third of it.
const ITEMS_PER_MIB: u32 = 1000;

/// All of these are equal in a database that lost nothing; the last is how many transactions it holds.
const SUMS: &str = "select (select coalesce(sum(abalance),0) from pgbench_accounts), \
    (select coalesce(sum(bbalance),0) from pgbench_branches), (select coalesce(sum(tbalance),0) from pgbench_tellers), \
    (select coalesce(sum(delta),0) from pgbench_history), (select count(*) from pgbench_history)";

/// What is run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Work {
    /// `make` in a tree.
    Compile { tree: PathBuf, jobs: u32 },
    /// `pgbench`.
    Database { clients: u32 },
    /// [`WAREHOUSES`].
    Java { threads: u32, heap_mib: u32 },
}

/// Why a workload cannot start.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WorkloadError {
    /// Its program cannot be run.
    #[error("cannot run `{program}`: {source}; this workload needs the debian guest")]
    Run { program: String, source: std::io::Error },
    /// Its program failed.
    #[error("`{program}` failed ({status}): {said}")]
    Failed { program: String, status: std::process::ExitStatus, said: String },
    /// It did not get so far as to do something.
    #[error("the work did not get under way: {0}")]
    NotUnderWay(String),
    /// There are no sources.
    #[error("there are no kernel sources in {0}; this workload needs the debian guest")]
    NoSources(PathBuf),
}

impl Work {
    fn name(&self) -> &'static str {
        match self {
            Self::Compile { .. } => "kernel-compile",
            Self::Database { .. } => "database",
            Self::Java { .. } => "java",
        }
    }
}

#[derive(Debug, Default)]
struct Counters {
    units: AtomicU64,
    /// By how much the units may be too many, in thousandths: figures that they were read from were rounded.
    excess: AtomicU64,
    runs: AtomicU64,
    errors: ErrorLog,
    recent: Mutex<VecDeque<PathBuf>>,
}

#[derive(Debug, Default)]
struct Life {
    stop: AtomicBool,
    group: Mutex<Option<Pid>>,
}

/// A running workload.
#[derive(Debug)]
pub(crate) struct Workload {
    work: Work,
    begun: Instant,
    counters: Arc<Counters>,
    life: Arc<Life>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Workload {
    /// A compile in `tree`; returns when it is under way.
    pub fn compile(tree: &Path, jobs: u32, recorder: Arc<Recorder>) -> Result<Self, WorkloadError> {
        if !tree.join("Makefile").is_file() {
            return Err(WorkloadError::NoSources(tree.to_owned()));
        }
        let load = Self::run(Work::Compile { tree: tree.to_owned(), jobs }, recorder)?;
        load.under_way(|load| lock(&load.counters.recent).len() >= FIRST || load.counters.runs.load(Relaxed) > 0)
    }

    /// Warehouses in so much memory; returns when they are open.
    pub fn java(threads: u32, heap_mib: u32, recorder: Arc<Recorder>) -> Result<Self, WorkloadError> {
        let load = Self::run(Work::Java { threads, heap_mib }, recorder)?;
        load.under_way(|load| load.counters.units.load(Relaxed) > 0)
    }

    /// Waits until it is.
    fn under_way(self, is_under_way: impl Fn(&Self) -> bool) -> Result<Self, WorkloadError> {
        let deadline = Instant::now() + UNDER_WAY;
        while !is_under_way(&self) {
            if let Some(said) = self.counters.errors.first() {
                return Err(WorkloadError::NotUnderWay(said));
            }
            if Instant::now() > deadline {
                return Err(WorkloadError::NotUnderWay(format!("nothing done after {} s", UNDER_WAY.as_secs())));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(self)
    }

    /// A database of `scale` times 100000 accounts; returns when it is filled.
    pub fn database(clients: u32, scale: u32, recorder: Arc<Recorder>) -> Result<Self, WorkloadError> {
        output(&mut as_postgres(["dropdb", "--if-exists", DATABASE]))?;
        output(&mut as_postgres(["createdb", DATABASE]))?;
        output(&mut as_postgres(["pgbench", "-i", "-q", "-s", &scale.to_string(), DATABASE]))?;
        Self::run(Work::Database { clients }, recorder)
    }

    fn run(work: Work, recorder: Arc<Recorder>) -> Result<Self, WorkloadError> {
        let (counters, life) = (Arc::<Counters>::default(), Arc::<Life>::default());
        let driver = Driver { work: work.clone(), counters: counters.clone(), life: life.clone(), recorder };
        let thread = std::thread::Builder::new().name(work.name().to_owned()).spawn(move || driver.drive());
        let thread = thread.map_err(|source| WorkloadError::Run { program: "a thread".into(), source })?;
        Ok(Self { work, begun: Instant::now(), counters, life, thread: Mutex::new(Some(thread)) })
    }

    /// Ends it; what it did can still be checked, but for its going on.
    pub fn end(&self) {
        self.life.stop.store(true, Relaxed);
        // Taken out of the lock first: the driver wants it.
        let group = *lock(&self.life.group);
        if let Some(group) = group {
            let _ = kill_process_group(group, Signal::KILL);
        }
        if let Some(thread) = lock(&self.thread).take() {
            let _ = thread.join();
        }
    }

    pub fn status(&self) -> WorkStatus {
        let units = self.counters.units.load(Relaxed);
        WorkStatus {
            what: self.work.name().to_owned(),
            units,
            per_s: units as f64 / self.begun.elapsed().as_secs_f64().max(1e-3),
            runs: self.counters.runs.load(Relaxed),
            errors: self.counters.errors.count(),
            first_error: self.counters.errors.first(),
        }
    }

    /// Waits until it has done something more, and looks at what it has made.
    pub fn check(&self) -> WorkCheck {
        let before = self.counters.units.load(Relaxed);
        let ended = self.life.stop.load(Relaxed);
        let deadline = Instant::now() + GOES_ON;
        let units = || self.counters.units.load(Relaxed);
        while !ended && units() == before && self.counters.errors.count() == 0 && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(20));
        }
        let mut problems = vec![];
        if !ended && units() == before && self.counters.errors.count() == 0 {
            problems.push(format!("it has done nothing more for {} s", GOES_ON.as_secs()));
        }
        if let Some(first) = self.counters.errors.first() {
            problems.push(format!("{} errors, the first: {first}", self.counters.errors.count()));
        }
        let looked_at = match &self.work {
            Work::Compile { tree, .. } => self.look_at_objects(tree, &mut problems),
            Work::Database { .. } => self.look_at_sums(&mut problems),
            // It ends, with an error, when its own sums differ.
            Work::Java { .. } => units(),
        };
        let problems = problems.into_iter().take(4).map(bounded).collect();
        WorkCheck { what: self.work.name().to_owned(), units: units(), looked_at, problems }
    }

    /// The last objects are on the disk, and are objects. The very last ones may still be in the making.
    fn look_at_objects(&self, tree: &Path, problems: &mut Vec<String>) -> u64 {
        let recent: Vec<PathBuf> = lock(&self.counters.recent).iter().cloned().collect();
        let jobs = if let Work::Compile { jobs, .. } = self.work { jobs as usize } else { 0 };
        let whole = &recent[..recent.len().saturating_sub(jobs + 1)];
        for object in whole {
            let mut head = [0; 4];
            match File::open(tree.join(object)).and_then(|mut file| file.read_exact(&mut head)) {
                Ok(()) if &head == b"\x7fELF" => {}
                Ok(()) => problems.push(format!("{} is no object file: it begins with {head:02x?}", object.display())),
                Err(e) => problems.push(format!("{} cannot be read: {e}", object.display())),
            }
        }
        whole.len() as u64
    }

    fn look_at_sums(&self, problems: &mut Vec<String>) -> u64 {
        let told = self.counters.units.load(Relaxed);
        let rounded = self.counters.excess.load(Relaxed).div_ceil(1000);
        let said = output(&mut as_postgres(["psql", "-X", "-A", "-t", "-d", DATABASE, "-c", SUMS]));
        match said.map(|said| judge_sums(&said, told.saturating_sub(rounded))) {
            Ok(Ok(held)) => held,
            Ok(Err(problem)) => {
                problems.push(problem);
                0
            }
            Err(e) => {
                problems.push(e.to_string());
                0
            }
        }
    }
}

impl Drop for Workload {
    fn drop(&mut self) {
        self.end();
    }
}

/// How many transactions the database holds, if it is whole.
fn judge_sums(said: &str, at_least: u64) -> Result<u64, String> {
    let numbers: Option<Vec<i64>> = said.trim().split('|').map(|n| n.trim().parse().ok()).collect();
    match numbers.as_deref() {
        Some(&[accounts, branches, tellers, history, held]) => {
            if [branches, tellers, history] != [accounts; 3] {
                Err(format!(
                    "the sums differ: accounts {accounts}, branches {branches}, tellers {tellers}, history {history}"
                ))
            } else if (held as u64) < at_least {
                Err(format!("the history holds {held} transactions, and pgbench was told of {at_least}"))
            } else {
                Ok(held as u64)
            }
        }
        _ => Err(format!("the sums are not understood: {said}")),
    }
}

/// A program as the database's own user.
pub(crate) fn as_postgres<const N: usize>(words: [&str; N]) -> Command {
    let mut command = Command::new("runuser");
    command.args(["-u", "postgres", "--"]).args(words).current_dir("/").stdin(Stdio::null());
    command
}

/// A Java machine that is given the warehouses' text.
fn warehouses(threads: u32, heap_mib: u32) -> Result<Command, WorkloadError> {
    let failed = |source| WorkloadError::Run { program: "java".into(), source };
    let text = rustix::fs::memfd_create("warehouses", rustix::fs::MemfdFlags::CLOEXEC);
    let mut text = File::from(text.map_err(|errno| failed(errno.into()))?);
    text.write_all(WAREHOUSES.as_bytes()).and_then(|()| text.rewind()).map_err(failed)?;
    let mut command = Command::new("java");
    command.args([format!("-Xms{heap_mib}m"), format!("-Xmx{heap_mib}m")]);
    command.args(["-XX:+UseSerialGC", "--source", "17", "/dev/stdin"]);
    command.args([threads, heap_mib * ITEMS_PER_MIB / threads].map(|n| n.to_string())).stdin(text);
    Ok(command)
}

fn output(command: &mut Command) -> Result<String, WorkloadError> {
    let program = shown(command);
    let output = command.output().map_err(|source| WorkloadError::Run { program: program.clone(), source })?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let said = bounded(String::from_utf8_lossy(&output.stderr).trim().to_owned());
    Err(WorkloadError::Failed { program, status: output.status, said })
}

fn shown(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
}

/// What the thread of a workload has.
struct Driver {
    work: Work,
    counters: Arc<Counters>,
    life: Arc<Life>,
    recorder: Arc<Recorder>,
}

impl Driver {
    fn drive(self) {
        while !self.life.stop.load(Relaxed) {
            let outcome = match &self.work {
                Work::Compile { tree, jobs } => self.compile_once(tree, *jobs),
                Work::Database { clients } => {
                    let clients = clients.to_string();
                    let bench =
                        ["pgbench", "-n", "-T", "1000000", "-P", "1", "--progress-timestamp", "-c", &clients, DATABASE];
                    self.follow(as_postgres(bench))
                }
                Work::Java { threads, heap_mib } => warehouses(*threads, *heap_mib).and_then(|java| self.follow(java)),
            };
            if self.life.stop.load(Relaxed) {
                return;
            }
            match outcome {
                Ok(()) => drop(self.counters.runs.fetch_add(1, Relaxed)),
                Err(e) => {
                    self.counters.errors.note(e);
                    std::thread::sleep(AGAIN);
                }
            }
        }
    }

    fn compile_once(&self, tree: &Path, jobs: u32) -> Result<(), WorkloadError> {
        let make = |words: &[&str]| {
            let mut command = Command::new("make");
            command.arg("-C").arg(tree).args(words).env("LC_ALL", "C").stdin(Stdio::null());
            command
        };
        if self.counters.runs.load(Relaxed) > 0 {
            lock(&self.counters.recent).clear();
            self.follow(make(&["clean"]))?;
        }
        self.follow(make(&[&format!("-j{jobs}")]))
    }

    /// Runs a program to its end in a group of its own, and counts what it says.
    fn follow(&self, mut command: Command) -> Result<(), WorkloadError> {
        let program = shown(&command);
        let failed = |source| WorkloadError::Run { program: program.clone(), source };
        let (reader, writer) = std::io::pipe().map_err(failed)?;
        command.stdout(writer.try_clone().map_err(failed)?).stderr(writer).process_group(0);
        let mut child = {
            let mut group = lock(&self.life.group);
            if self.life.stop.load(Relaxed) {
                return Ok(());
            }
            let child = command.spawn().map_err(failed)?;
            *group = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
            child
        };
        // It holds the pipe's other end as long as it lives.
        drop(command);
        let mut words = VecDeque::new();
        let mut told = Told::default();
        for line in BufReader::new(reader).split(b'\n') {
            let Ok(line) = line else { break };
            let line = String::from_utf8_lossy(&line);
            if !self.count(&line, &mut told) {
                if words.len() == WORDS {
                    words.pop_front();
                }
                words.push_back(bounded(line.trim_end().to_owned()));
            }
        }
        let status = child.wait().map_err(failed)?;
        *lock(&self.life.group) = None;
        if status.success() {
            return Ok(());
        }
        let said = bounded(Vec::from(words).join(" / "));
        Err(WorkloadError::Failed { program, status, said })
    }

    /// Whether a line told of units; `told` is what the lines before did.
    fn count(&self, line: &str, told: &mut Told) -> bool {
        let units = match &self.work {
            Work::Compile { .. } => {
                let Some(object) = compiled(line) else { return false };
                if object.extension().is_some_and(|extension| extension == "o") && !line.contains("HOST") {
                    let mut recent = lock(&self.counters.recent);
                    if recent.len() == LOOKED_AT {
                        recent.pop_front();
                    }
                    recent.push_back(object);
                }
                1
            }
            Work::Database { .. } => {
                let Some((now_s, per_s)) = progress(line) else { return false };
                let (units, excess) = told.since(now_s, per_s);
                self.counters.excess.fetch_add(excess, Relaxed);
                units
            }
            Work::Java { .. } => {
                let Some(units) = line.strip_prefix("transactions: ").and_then(|n| n.trim().parse().ok()) else {
                    return false;
                };
                units
            }
        };
        self.counters.units.fetch_add(units, Relaxed);
        self.recorder.finished(units);
        true
    }
}

/// What a line of the kernel's `make` says was compiled: `  CC      lib/ctype.o`.
fn compiled(line: &str) -> Option<PathBuf> {
    let mut words = line.split_ascii_whitespace();
    let what = words.next()?;
    let object = words.next()?;
    (line.starts_with("  ") && matches!(what, "CC" | "AS" | "HOSTCC")).then(|| PathBuf::from(object))
}

/// What `pgbench` has said so far: rates, of which whole transactions are made.
#[derive(Debug, Default)]
struct Told {
    at_s: Option<f64>,
    /// Part of a transaction that was not counted yet.
    rest: f64,
}

impl Told {
    /// The transactions since the line before, and by how much they may be too many, in thousandths. The first line's are not counted:
    /// nobody knows when they began.
    fn since(&mut self, now_s: f64, per_s: f64) -> (u64, u64) {
        let Some(before) = self.at_s.replace(now_s) else { return (0, 0) };
        let seconds = (now_s - before).max(0.0);
        self.rest += per_s * seconds;
        let units = self.rest.floor();
        self.rest -= units;
        // The rate has one decimal, and the two times have three.
        (units as u64, ((0.05 * seconds + 0.001 * per_s) * 1e3).ceil() as u64)
    }
}

/// When pgbench says something, seconds, and how many transactions a second there were since it last did:
/// `progress: 1763770000.123 s, 23.4 tps, lat 85.1 ms stddev 9.1, 0 failed`.
fn progress(line: &str) -> Option<(f64, f64)> {
    let rest = line.strip_prefix("progress: ")?;
    let (at, rest) = rest.split_once(" s, ")?;
    let (per_s, _) = rest.split_once(" tps")?;
    Some((at.parse().ok()?, per_s.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recorder() -> Arc<Recorder> {
        Recorder::start(&[], Instant::now())
    }

    #[test]
    fn the_lines_that_tell_of_work_are_understood_and_others_are_not() {
        assert_eq!(compiled("  CC      lib/ctype.o"), Some("lib/ctype.o".into()));
        assert_eq!(compiled("  HOSTCC  scripts/basic/fixdep"), Some("scripts/basic/fixdep".into()));
        for other in ["", "  CALL    scripts/checksyscalls.sh", "CC lib/ctype.o", "make: *** [Makefile:1: all] Error 2"]
        {
            assert_eq!(compiled(other), None, "{other}");
        }
        assert_eq!(progress("progress: 5.0 s, 23.4 tps, lat 85.1 ms stddev 9.1, 0 failed"), Some((5.0, 23.4)));
        let mut told = Told::default();
        assert_eq!(told.since(100.0, 50.0), (0, 0));
        assert_eq!(told.since(101.0, 2.5), (2, 53));
        assert_eq!(told.since(102.0, 2.5).0, 3, "halves add up");
        assert_eq!(told.since(101.0, 2.5).0, 0, "a clock that runs backwards");
        assert_eq!(progress("progress: x s, 1 tps"), None);
        assert_eq!(progress("pgbench: error: connection lost"), None);
    }

    #[test]
    fn a_database_is_whole_when_its_sums_agree_and_its_history_holds_what_was_acknowledged() {
        assert_eq!(judge_sums("-5|-5|-5|-5|10\n", 10), Ok(10));
        assert!(judge_sums("-5|-5|-5|-5|9", 10).unwrap_err().contains("9 transactions"));
        assert!(judge_sums("-5|-5|-4|-5|10", 10).unwrap_err().contains("differ"));
        assert!(judge_sums("ERROR", 0).is_err());
    }

    /// A tree in which `make` says what a kernel's says, and makes files that look like objects, ten a second.
    fn tree(body: &str) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let objects: String = (0..20).map(|i| format!(" o{i}.o")).collect();
        let text = format!(
            ".SILENT:\n.PHONY: all clean\nall:{objects}\n%.o:\n\tsleep 0.05; printf '  CC      $@\\n'; printf '{body}' >$@\nclean:\n\trm -f *.o\n"
        );
        std::fs::write(dir.path().join("Makefile"), text).unwrap();
        dir
    }

    fn after_units(load: &Workload, units: u64) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while load.status().units < units {
            assert!(Instant::now() < deadline, "{:?}", load.status());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    #[test]
    fn a_compile_counts_its_objects_begins_again_and_ends_with_its_handle() {
        let tree = tree("\\177ELF");
        let recorder = recorder();
        let load = Workload::compile(tree.path(), 2, recorder.clone()).unwrap();
        after_units(&load, 25);
        let check = load.check();
        assert_eq!(check.problems, [] as [String; 0]);
        assert!(check.units > 25, "{check:?}");
        let status = load.status();
        assert!(status.runs >= 1 && status.errors == 0 && status.what == "kernel-compile", "{status:?}");
        let group = *lock(&load.life.group);
        drop(load);
        if let Some(group) = group {
            // The dead are reaped by whoever inherited them.
            let deadline = Instant::now() + Duration::from_secs(30);
            while kill_process_group(group, Signal::KILL).is_ok() {
                assert!(Instant::now() < deadline, "its processes are still there");
                std::thread::sleep(Duration::from_millis(10));
            }
        }
    }

    #[test]
    fn an_object_that_is_none_and_a_make_that_fails_are_found() {
        let dir = tree("junk");
        let load = Workload::compile(dir.path(), 1, recorder()).unwrap();
        after_units(&load, 5);
        assert!(load.check().problems[0].contains("no object file"), "{:?}", load.check());
        // A tree that is damaged while it compiles.
        std::fs::write(dir.path().join("Makefile"), "all:\n\t@echo bad source; exit 3\nclean:\n").unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        while load.status().errors == 0 {
            assert!(Instant::now() < deadline, "{:?}", load.status());
            std::thread::sleep(Duration::from_millis(10));
        }
        let problems = load.check().problems.join("; ");
        assert!(problems.contains("bad source"), "{problems}");
        drop(load);

        std::fs::write(dir.path().join("Makefile"), "all:\n\t@echo bad source; exit 3\n").unwrap();
        let refused = Workload::compile(dir.path(), 1, recorder()).unwrap_err().to_string();
        assert!(refused.contains("under way") && refused.contains("bad source"), "{refused}");
    }

    #[test]
    fn warehouses_open_and_go_on_until_their_handle_ends() {
        if Command::new("java").arg("-version").output().is_err() {
            println!("not tested: there is no java");
            return;
        }
        let load = Workload::java(2, 32, recorder()).unwrap();
        let check = load.check();
        assert_eq!(check.problems, [] as [String; 0]);
        assert!(check.units > 0 && check.looked_at > 0, "{check:?}");
        load.end();
        assert_eq!((load.status().errors, load.status().what.as_str()), (0, "java"));
        // A heap in which nothing fits.
        let refused = Workload::java(1, 1, recorder()).unwrap_err().to_string();
        assert!(refused.contains("java"), "{refused}");
    }

    #[test]
    fn a_guest_without_sources_refuses_to_compile() {
        let dir = tempfile::tempdir().unwrap();
        let refused = Workload::compile(dir.path(), 1, recorder()).unwrap_err().to_string();
        assert!(refused.contains("debian guest"), "{refused}");
    }
}
