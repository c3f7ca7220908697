//! A namespace with a thread that lives in it.
//!
//! A site is a network namespace and, so that a node sees only its own directory, a mount namespace. Neither gets a
//! name: they exist as long as the thread does and the processes that it started, so nothing is left in the machine
//! when the lab is killed. Work that has to happen inside (make a tap, open a socket, start QEMU) is sent to the
//! thread by [`Namespace::run`]. A socket keeps the namespace that it was opened in and may be used anywhere; a child
//! process inherits the thread's.

use anyhow::{Context, Result, bail};
use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_bind, mount_change};
use rustix::thread::{CpuSet, UnshareFlags, sched_setaffinity};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::thread::JoinHandle;

type Job = Box<dyn FnOnce() + Send>;

/// A network namespace, and a mount namespace where asked for, with a thread inside.
#[derive(Debug)]
pub struct Namespace {
    name: String,
    /// How other namespaces name this one to `ip link ... netns`.
    path: PathBuf,
    jobs: Option<mpsc::Sender<Job>>,
    thread: Option<JoinHandle<()>>,
}

impl Namespace {
    /// A fresh network namespace with `lo` up and IPv6 off (its neighbour discovery would be noise on the WAN).
    ///
    /// # Errors
    /// When the kernel refuses: not root, or no namespaces.
    pub fn new(name: &str) -> Result<Self> {
        Self::start(name, || Ok(()))
    }

    /// As [`Namespace::new`], and of `parent` only the folder `parent/own` can be seen inside, by the same path.
    /// Over the registry of runs lies a folder in memory that goes with the namespace: its path is short, as the paths of
    /// sockets have to be.
    ///
    /// # Errors
    /// When the kernel refuses, or the folder is not there.
    pub fn with_own_folder(name: &str, parent: &Path, own: &str) -> Result<Self> {
        let (parent, own) = (parent.to_owned(), own.to_owned());
        Self::start(name, move || hide_all_but(&parent, &own))
    }

    fn start(name: &str, set_up: impl FnOnce() -> Result<()> + Send + 'static) -> Result<Self> {
        let (jobs, queue) = mpsc::channel::<Job>();
        let (ready, started) = mpsc::channel();
        let thread = std::thread::Builder::new().name(format!("ns-{name}")).spawn(move || {
            let entered = enter_new(set_up);
            let fine = entered.is_ok();
            let _ = ready.send(entered);
            if fine {
                queue.into_iter().for_each(|job| job());
            }
        })?;
        let path =
            started.recv().context("the namespace's thread died")?.with_context(|| format!("namespace {name}"))?;
        let namespace = Self { name: name.to_owned(), path, jobs: Some(jobs), thread: Some(thread) };
        namespace.ip(["link set lo up"])?;
        Ok(namespace)
    }

    /// What it was called.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// A path that names this network namespace to `ip link add ... netns PATH`.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The number by which the machine knows this network namespace, whoever looks.
    ///
    /// # Errors
    /// When `/proc` is not there.
    pub fn number(&self) -> std::io::Result<u64> {
        Ok(std::fs::metadata(&self.path)?.ino())
    }

    /// Runs `job` inside and waits for its result.
    ///
    /// # Panics
    /// When `job` panics.
    pub fn run<T: Send + 'static>(&self, job: impl FnOnce() -> T + Send + 'static) -> T {
        let (done, result) = mpsc::channel();
        let jobs = self.jobs.as_ref().expect("the queue is there until the namespace is dropped");
        jobs.send(Box::new(move || drop(done.send(job())))).expect("the thread lives as long as its queue");
        result.recv().expect("a job in a namespace does not panic")
    }

    /// Runs a batch of `ip` commands, one a line, without the word `ip`.
    ///
    /// # Errors
    /// With `ip`'s own words, naming the first line that failed.
    pub fn ip<S: AsRef<str>>(&self, lines: impl IntoIterator<Item = S>) -> Result<()> {
        let batch: String = lines.into_iter().map(|l| l.as_ref().to_owned() + "\n").collect();
        self.pipe("ip", &["-batch", "-"], batch)
    }

    /// Runs a batch of `bridge` commands, as [`Namespace::ip`].
    ///
    /// # Errors
    /// As [`Namespace::ip`].
    pub fn bridge<S: AsRef<str>>(&self, lines: impl IntoIterator<Item = S>) -> Result<()> {
        let batch: String = lines.into_iter().map(|l| l.as_ref().to_owned() + "\n").collect();
        self.pipe("bridge", &["-batch", "-"], batch)
    }

    fn pipe(&self, program: &'static str, args: &'static [&'static str], input: String) -> Result<()> {
        let shown = input.clone();
        let output = self.run(move || -> std::io::Result<_> {
            let mut child = Command::new(program)
                .args(args)
                .stdin(Stdio::piped())
                .stdout(Stdio::null())
                .stderr(Stdio::piped())
                .spawn()?;
            let mut stdin = child.stdin.take().expect("stdin was asked for");
            std::io::Write::write_all(&mut stdin, input.as_bytes())?;
            drop(stdin);
            child.wait_with_output()
        });
        let output = output.with_context(|| format!("cannot run `{program}`; is iproute2 installed?"))?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr);
            bail!("`{program} -batch` failed in {}: {}\nthe batch was:\n{shown}", self.name, said.trim());
        }
        Ok(())
    }

    /// What is started inside from now on runs on this processor of the machine alone.
    ///
    /// # Errors
    /// When the machine has no such processor, or the lab may not use it.
    pub fn stay_on(&self, processor: usize) -> Result<()> {
        if processor >= CpuSet::MAX_CPU {
            bail!("site {}: processor {processor} is beyond the {} that Linux knows", self.name, CpuSet::MAX_CPU);
        }
        let mut set = CpuSet::new();
        set.set(processor);
        self.run(move || sched_setaffinity(None, &set))
            .with_context(|| format!("site {}: processor {processor} of this machine cannot be used", self.name))
    }

    /// Sets a sysctl of this network namespace; `key` with slashes, below `/proc/sys`.
    ///
    /// # Errors
    /// When the kernel has no such setting.
    pub fn sysctl(&self, key: &str, value: &str) -> Result<()> {
        let (path, value) = (Path::new("/proc/sys").join(key), value.to_owned());
        self.run(move || std::fs::write(&path, value).with_context(|| format!("cannot set {}", path.display())))
    }
}

/// The thread ends, and with it the namespace unless a process still lives in it.
impl Drop for Namespace {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn enter_new(set_up: impl FnOnce() -> Result<()>) -> Result<PathBuf> {
    // SAFETY: the flags do not include FILES, so descriptors stay shared with the other threads.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET | UnshareFlags::NEWNS) }
        .context("cannot make a namespace; the lab needs root")?;
    // Without this, mounts made here would spread to the machine's own namespace.
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC).context("cannot detach mounts")?;
    // A sysfs belongs to the network namespace that it is mounted from: without this, whoever looks for an interface in
    // /sys/class/net would see the machine's.
    mount("sysfs", "/sys", "sysfs", MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC, None)
        .context("cannot mount /sys")?;
    for (key, value) in [("all", "1"), ("default", "1")] {
        std::fs::write(format!("/proc/sys/net/ipv6/conf/{key}/disable_ipv6"), value)
            .context("cannot switch IPv6 off")?;
    }
    set_up()?;
    let task = rustix::thread::gettid().as_raw_nonzero();
    Ok(PathBuf::from(format!("/proc/{}/task/{task}/ns/net", std::process::id())))
}

fn hide_all_but(parent: &Path, own: &str) -> Result<()> {
    let folder = parent.join(own);
    // The folder stays reachable through this descriptor while its parent is covered.
    let kept = std::fs::File::open(&folder).with_context(|| format!("cannot open {}", folder.display()))?;
    let tmpfs = |at: &Path, size: &std::ffi::CStr| {
        mount("tmpfs", at, "tmpfs", MountFlags::NOSUID | MountFlags::NODEV, Some(size))
            .with_context(|| format!("cannot mount over {}", at.display()))
    };
    tmpfs(parent, c"size=64k,mode=0755")?;
    std::fs::create_dir(&folder)?;
    mount_bind(format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&kept)), &folder)
        .with_context(|| format!("cannot bind {}", folder.display()))?;
    tmpfs(&crate::sandbox::registry(), c"mode=0700")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Needs root, as all of the lab does.
    #[test]
    fn what_is_started_inside_stays_on_the_processor_that_it_was_given() {
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: a namespace needs root");
            return;
        }
        let allowed = rustix::thread::sched_getaffinity(None).unwrap();
        let last = (0..CpuSet::MAX_CPU).rev().find(|cpu| allowed.is_set(*cpu)).unwrap();
        let inside = Namespace::new("affinity").unwrap();
        inside.stay_on(last).unwrap();
        let status = inside.run(|| Command::new("cat").arg("/proc/self/status").output().unwrap()).stdout;
        let status = String::from_utf8_lossy(&status).into_owned();
        assert!(status.contains(&format!("Cpus_allowed_list:\t{last}\n")), "{status}");
        for absent in [CpuSet::MAX_CPU - 1, CpuSet::MAX_CPU, usize::MAX] {
            let said = format!("{:#}", inside.stay_on(absent).unwrap_err());
            assert!(said.contains("affinity") && said.contains(&absent.to_string()), "{said}");
        }
        assert_eq!(rustix::thread::sched_getaffinity(None).unwrap(), allowed, "the lab itself was bound");
    }
}
