//! Everything that a run makes goes when the run goes, however it goes.
//!
//! ```text
//! godwit-lab run            the supervisor: holds the lock, waits, removes the work folder
//!   └ init  (PID 1 of a new PID namespace)   ends when the engine ends or the lifeline closes
//!       └ engine            namespaces, emulator, guests, steps
//!           ├ qemu ...
//!           └ ...
//! ```
//!
//! Three things can be left behind, and each has its own cure:
//! - *Processes.* All of them live in a PID namespace of the run's own. When its PID 1 ends, the kernel kills every
//!   one of them, whatever they did to escape. PID 1 ends when the *lifeline* closes: a pipe whose writing end only the
//!   supervisor has, so that even SIGKILL of the supervisor closes it. Nothing is ever killed by name or by a
//!   number from a file, except the supervisor of `godwit-lab up`, which is known by the lock that it holds.
//! - *Namespaces, links, mounts.* They have no names (see `ns`) and go with the last process in them.
//! - *Files.* They are below one work folder, which the supervisor removes at the end. If it is killed, it cannot: so
//!   each run has a record below [`registry`], locked by the supervisor as long as it lives. A record that nobody
//!   locks names a folder that nobody needs; every later run, and `godwit-lab down`, removes those.
//!
//! A folder is only ever removed when it carries the marker file that [`WorkFolder::create`] put there.

use anyhow::{Context, Result, bail};
use rustix::fs::{FlockOperation, flock};
use rustix::process::{Pid, PidfdFlags, Signal, WaitOptions, pidfd_open, pidfd_send_signal, wait};
use rustix::thread::UnshareFlags;
use serde::{Deserialize, Serialize};
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Marks a folder that the lab made and may therefore remove.
const MARKER: &str = ".godwit-lab";

/// Where hosts' folders are in a work folder: `up` builds in that itself, `run` each pass in a folder of its own.
const SITES: [&str; 2] = ["sites", "pass/sites"];

/// Where runs are recorded: memory, because what it tells does not outlive a restart of the machine.
#[must_use]
pub fn registry() -> PathBuf {
    PathBuf::from("/run/godwit-lab")
}

/// What a run's record says.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Record {
    /// The supervisor's process id, in the namespace of whoever reads this.
    pub supervisor: u32,
    /// The run's work folder.
    pub work: PathBuf,
    /// The scenario's name.
    pub scenario: String,
    /// Whether `godwit-lab down` is meant to end it.
    pub up: bool,
}

/// A work folder with its record, both removed on drop.
#[derive(Debug)]
pub struct WorkFolder {
    record_path: PathBuf,
    record: Record,
    /// Locked while the run lives.
    _lock: File,
}

impl WorkFolder {
    /// Makes the folder (or takes an empty one) and its record. Without `at` it is a fresh one below `/var/tmp`.
    ///
    /// # Errors
    /// When the folder is not empty and not an abandoned one of ours, when another run uses it, or when it cannot be
    /// made.
    pub fn create(at: Option<&Path>, scenario: &str, up: bool) -> Result<Self> {
        let supervisor = std::process::id();
        let work = match at {
            Some(at) => std::path::absolute(at)?,
            None => PathBuf::from(format!("/var/tmp/godwit-lab/{supervisor}-{}", unix_seconds())),
        };
        let _registry = lock_registry()?;
        remove_unclaimed()?;
        std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&work)
            .with_context(|| format!("cannot make the work folder {}", work.display()))?;
        if std::fs::read_dir(&work)?.next().is_some() {
            bail!(
                "the work folder {} is not empty; give an empty one, or end the run that uses it with `godwit-lab down`",
                work.display()
            );
        }
        let record = Record { supervisor, work, scenario: scenario.to_owned(), up };
        let record_path = registry().join(format!("{supervisor}.json"));
        let mut lock = OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(&record_path)?;
        // Waits for a moment at most: whoever only looks whether we live holds it no longer.
        flock(&lock, FlockOperation::LockExclusive).context("cannot lock the run's record")?;
        lock.set_len(0)?;
        lock.write_all(&serde_json::to_vec(&record)?)?;
        // The record stands before the marker does: a folder with a marker always has a record that names it.
        std::fs::write(
            record.work.join(MARKER),
            "made by godwit-lab; removed by its next run or by `godwit-lab down`\n",
        )?;
        Ok(Self { record_path, record, _lock: lock })
    }

    /// The folder.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.record.work
    }
}

impl Drop for WorkFolder {
    fn drop(&mut self) {
        if let Err(e) = remove_work(&self.record.work) {
            eprintln!("godwit-lab: could not remove {}: {e:#}", self.record.work.display());
            return;
        }
        let _ = std::fs::remove_file(&self.record_path);
    }
}

fn remove_work(work: &Path) -> Result<()> {
    if !work.join(MARKER).exists() {
        return Ok(());
    }
    std::fs::remove_dir_all(work).with_context(|| format!("cannot remove {}", work.display()))
}

fn unix_seconds() -> u64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

/// Keeps other processes from making or removing records meanwhile.
fn lock_registry() -> Result<File> {
    std::fs::create_dir_all(registry())
        .with_context(|| format!("cannot make {}; the lab needs root", registry().display()))?;
    let lock = OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .mode(0o600)
        .open(registry().join("lock"))
        .context("cannot open the registry of runs; the lab needs root")?;
    flock(&lock, FlockOperation::LockExclusive)?;
    Ok(lock)
}

/// A run's record, where it could be read.
#[derive(Debug)]
pub struct Found {
    /// Its file.
    pub path: PathBuf,
    /// What it says; none while it is being written, or when its writer was killed at that.
    pub record: Option<Record>,
    /// Whether the supervisor lives.
    pub alive: bool,
}

/// The records of runs.
///
/// # Errors
/// When one cannot be read.
pub fn records() -> Result<Vec<Found>> {
    let mut found = vec![];
    let Ok(entries) = std::fs::read_dir(registry()) else { return Ok(found) };
    for entry in entries {
        let path = entry?.path();
        if path.extension().is_none_or(|e| e != "json") {
            continue;
        }
        let Ok(mut file) = OpenOptions::new().read(true).write(true).open(&path) else { continue };
        let alive = flock(&file, FlockOperation::NonBlockingLockExclusive).is_err();
        let mut text = String::new();
        file.read_to_string(&mut text)?;
        found.push(Found { path, record: serde_json::from_str(&text).ok(), alive });
    }
    Ok(found)
}

/// Removes what killed runs left; says how many there were.
///
/// # Errors
/// When a folder cannot be removed.
pub fn remove_abandoned() -> Result<usize> {
    let _registry = lock_registry()?;
    remove_unclaimed()
}

fn remove_unclaimed() -> Result<usize> {
    let mut removed = 0;
    for dead in records()?.into_iter().filter(|f| !f.alive) {
        if let Some(record) = &dead.record
            && let Err(error) = remove_work(&record.work)
        {
            // Its processes may be dying, and write: it is tried again at the next run.
            eprintln!("godwit-lab: what a killed run left stays for now: {error:#}");
            continue;
        }
        let _ = std::fs::remove_file(dead.path);
        removed += 1;
    }
    Ok(removed)
}

/// Ends the runs that `godwit-lab up` left running (all, or those of one scenario), waits until they are gone, and
/// removes what killed runs left. Returns the scenarios ended.
///
/// # Errors
/// When a run does not end within a minute.
pub fn down(scenario: Option<&str>) -> Result<Vec<String>> {
    let mut ended = vec![];
    for Found { path, record, alive } in records()? {
        let Some(record) = record.filter(|r| alive && r.up && scenario.is_none_or(|s| s == r.scenario)) else {
            continue;
        };
        let pid = Pid::from_raw(i32::try_from(record.supervisor)?).context("a record without a process")?;
        let process = pidfd_open(pid, PidfdFlags::empty())?;
        // The lock is still held now that the process is pinned: so this number is still the supervisor's.
        if records()?.iter().any(|f| f.alive && f.path == path) {
            pidfd_send_signal(&process, Signal::TERM)?;
        }
        let deadline = Instant::now() + Duration::from_secs(60);
        while path.exists() {
            if Instant::now() > deadline {
                bail!(
                    "the run of `{}` (process {}) does not end; look at it, then kill it and run `godwit-lab down` again",
                    record.scenario,
                    record.supervisor
                );
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        ended.push(record.scenario);
    }
    remove_abandoned()?;
    Ok(ended)
}

/// A running sandbox: a PID namespace whose PID 1 is `godwit-lab __init`.
#[derive(Debug)]
pub struct Sandbox {
    init: Child,
}

impl Sandbox {
    /// Starts `godwit-lab __init CONFIG` as PID 1 of a new PID namespace.
    ///
    /// # Errors
    /// When the kernel refuses namespaces.
    pub fn start(config: &Path) -> Result<Self> {
        let mut command = Command::new("/proc/self/exe");
        // Not the terminal's ^C: the supervisor hears it and ends the run in order.
        command.arg("__init").arg(config).stdin(Stdio::piped()).process_group(0);
        // A thread's children go to one PID namespace once and for all, so each sandbox takes a thread of its own.
        let started = std::thread::spawn(move || -> Result<Child> {
            // SAFETY: the flags do not include FILES, so descriptors stay shared with the other threads.
            unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWPID) }
                .context("cannot make a PID namespace; the lab needs root")?;
            command.spawn().context("cannot start the lab's init process")
        });
        let init = started.join().expect("starting a process does not panic")?;
        Ok(Self { init })
    }

    /// Whether it has ended, and how.
    ///
    /// # Errors
    /// When the kernel cannot tell, which does not happen to a child of ours.
    pub fn poll(&mut self) -> Result<Option<ExitStatus>> {
        Ok(self.init.try_wait()?)
    }
}

/// Kills the sandbox and all that lives in it, and waits until it is gone.
impl Drop for Sandbox {
    fn drop(&mut self) {
        let _ = self.init.kill();
        let _ = self.init.wait();
    }
}

/// PID 1 of a sandbox: starts `godwit-lab __engine CONFIG`, reaps, and ends with it or with the lifeline. Never returns.
///
/// # Errors
/// When it cannot be set up.
pub fn run_init(config: &Path) -> Result<std::convert::Infallible> {
    if std::process::id() != 1 {
        bail!("`__init` is started by `godwit-lab run`, not by hand");
    }
    // SAFETY: the flags do not include FILES, and no other thread exists yet.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS) }.context("cannot make a mount namespace")?;
    use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change};
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC).context("cannot detach mounts")?;
    // /proc of the new PID namespace, so that process ids seen there are the ones that processes here have.
    mount("proc", "/proc", "proc", MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC, None)
        .context("cannot mount /proc")?;
    std::thread::Builder::new().name("lifeline".into()).spawn(|| {
        let mut nothing = [0; 64];
        while matches!(std::io::stdin().read(&mut nothing), Ok(n) if n > 0) {}
        std::process::exit(137)
    })?;
    let engine = Command::new("/proc/self/exe")
        .arg("__engine")
        .arg(config)
        .stdin(Stdio::null())
        .spawn()
        .context("cannot start the engine")?;
    let engine = Pid::from_child(&engine);
    loop {
        match wait(WaitOptions::empty()) {
            Ok(Some((pid, status))) if pid == engine => {
                let status = ExitStatus::from_raw(status.as_raw());
                std::process::exit(status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0)));
            }
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(e) => bail!("cannot wait for the engine: {e}"),
        }
    }
}

/// A command inside a site of a running lab, as seen from outside: to look around, and to use Godwit there. `scenario` says
/// which lab, if several have such a site. Without it, labs that were brought up to be entered go before those that measure.
///
/// # Errors
/// When no run has this site, naming those that there are, and when several have: a command in somebody else's lab would spoil what it measures.
pub fn enter(site: &str, scenario: Option<&str>, command: &[std::ffi::OsString]) -> Result<std::convert::Infallible> {
    let alive = records()?.into_iter().filter(|f| f.alive).filter_map(|f| f.record);
    let asked: Vec<_> = alive.filter(|r| scenario.is_none_or(|s| s == r.scenario)).collect();
    let there: Vec<_> = asked.iter().filter_map(sites_of).collect();
    let found: Vec<_> = asked.into_iter().filter_map(|r| site_thread(&r, site).map(|thread| (r, thread))).collect();
    let (record, thread) = the_one_meant(&found, site, &there)?;
    let mut nsenter = Command::new("nsenter");
    nsenter.arg(format!("--net={thread}/ns/net")).arg(format!("--mount={thread}/ns/mnt"));
    nsenter.envs(environment(&record.work, site));
    Err(nsenter.arg("--").args(command).exec()).context("cannot run nsenter (util-linux)")
}

/// Of the labs that have this site; `there` are the sites of all, for whoever named none of them.
fn the_one_meant<'a, T>(found: &'a [(Record, T)], site: &str, there: &[String]) -> Result<&'a (Record, T)> {
    let up: Vec<_> = found.iter().filter(|(record, _)| record.up).collect();
    match (found, up.as_slice()) {
        ([one], _) => Ok(one),
        (_, [one]) => Ok(one),
        ([], _) if there.is_empty() => bail!("no lab runs that has sites; `godwit-lab up SCENARIO` brings sites up"),
        ([], _) => bail!("no running lab has a site `{site}`; there are: {}", there.join("; ")),
        (several, _) => {
            let names: Vec<_> = several.iter().map(|(record, _)| record.scenario.as_str()).collect();
            bail!(
                "{} running labs have a site `{site}` ({}); say which with --scenario",
                several.len(),
                names.join(", ")
            )
        }
    }
}

/// The sites of a lab, in words; nothing before it has any.
fn sites_of(lab: &Record) -> Option<String> {
    let entries = SITES.iter().flat_map(|sites| std::fs::read_dir(lab.work.join(sites)).into_iter().flatten());
    let mut names: Vec<String> = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect();
    names.sort();
    (!names.is_empty()).then(|| format!("{} in `{}`", names.join(", "), lab.scenario))
}

/// The folder in `/proc` of a thread of a lab that lives in one of its sites.
fn site_thread(lab: &Record, site: &str) -> Option<String> {
    let file = |sites: &&str| lab.work.join(sites).join(site).join(crate::fabric::NAMESPACE);
    let namespace: u64 = SITES.iter().find_map(|sites| std::fs::read_to_string(file(sites)).ok())?.parse().ok()?;
    let mut engines = children(lab.supervisor).into_iter().flat_map(children);
    engines.find_map(|engine| thread_within(engine, namespace))
}

/// The folder in `/proc` of a thread of a process that lives in a network namespace.
fn thread_within(process: u32, namespace: u64) -> Option<String> {
    let tasks = numbers(Path::new(&format!("/proc/{process}/task")));
    let mut threads = tasks.into_iter().map(|task| format!("/proc/{process}/task/{task}"));
    threads.find(|thread| std::fs::metadata(format!("{thread}/ns/net")).is_ok_and(|ns| ns.ino() == namespace))
}

/// What a site's commands need to know to use Godwit there: the lines of its file, if the run has Godwit. Search paths are put
/// before one's own.
fn environment(work: &Path, site: &str) -> Vec<(String, std::ffi::OsString)> {
    let files = SITES.map(|sites| work.join(sites).join(site).join(crate::godwit::ENVIRONMENT));
    let text: String = files.iter().filter_map(|f| std::fs::read_to_string(f).ok()).collect();
    let one = |line: &str| {
        let (name, value) = line.split_once('=')?;
        let mut value = std::ffi::OsString::from(value);
        if name == "PATH"
            && let Some(known) = std::env::var_os(name)
        {
            value.push(":");
            value.push(known);
        }
        Some((name.to_owned(), value))
    };
    text.lines().filter_map(one).collect()
}

/// The processes that a process has started.
fn children(process: u32) -> Vec<u32> {
    let tasks = numbers(Path::new(&format!("/proc/{process}/task")));
    let lists = tasks.into_iter().map(|task| format!("/proc/{process}/task/{task}/children"));
    let texts: String = lists.filter_map(|list| std::fs::read_to_string(list).ok()).collect();
    texts.split_whitespace().filter_map(|id| id.parse().ok()).collect()
}

/// The entries of a folder that are numbers.
fn numbers(folder: &Path) -> Vec<u32> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok);
    entries.filter_map(|e| e.file_name().to_str()?.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lab(scenario: &str, up: bool) -> (Record, ()) {
        (Record { supervisor: 1, work: "/w".into(), scenario: scenario.into(), up }, ())
    }

    #[test]
    fn nobody_enters_a_lab_that_was_not_meant() {
        let there = ["b, c in `mine`".to_owned()];
        let meant = |labs: &[(Record, ())]| the_one_meant(labs, "a", &there).map(|(r, ())| r.scenario.clone());
        assert!(meant(&[]).unwrap_err().to_string().contains("there are: b, c in `mine`"));
        assert_eq!(meant(&[lab("measures", false)]).unwrap(), "measures");
        assert_eq!(meant(&[lab("measures", false), lab("mine", true), lab("other", false)]).unwrap(), "mine");
        for ambiguous in [[lab("one", false), lab("two", false)], [lab("one", true), lab("two", true)]] {
            let said = meant(&ambiguous).unwrap_err().to_string();
            assert!(said.contains("one, two") && said.contains("--scenario"), "{said}");
        }
    }

    /// Needs root, as all of the lab does.
    #[test]
    fn a_site_is_told_from_another_whose_name_begins_as_its_own() {
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: a namespace needs root");
            return;
        }
        let names = ["a-site-in-the-far-north", "a-site-in-the-far-south", "wan"];
        let sites = names.map(|name| crate::ns::Namespace::new(name).unwrap());
        for site in &sites {
            let found = thread_within(std::process::id(), site.number().unwrap()).unwrap();
            let inside = site.run(rustix::thread::gettid).as_raw_nonzero();
            assert!(found.ends_with(&format!("/task/{inside}")), "{found}");
        }
        assert_eq!(thread_within(std::process::id(), 0), None);
    }
}
