//! Processes that outlive the daemon which started them, and how the next daemon finds them again.
//!
//! Such a process writes its own number into a file, as QEMUs do, so a daemon that dies at the very start of it finds it later; and it
//! bears the file's path in its environment, so that another process which got its number, after a reboot, is not taken for it.

use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::os::fd::OwnedFd;
use std::path::Path;

/// The process that wrote `file` and bears it as the environment's variable `mark`; a descriptor of it, which no other process gets. It
/// may have ended.
#[must_use]
pub fn marked(file: &Path, mark: &str) -> Option<(Pid, OwnedFd)> {
    let pid = Pid::from_raw(std::fs::read_to_string(file).ok()?.trim().parse().ok()?)?;
    // First the process, then its mark: its number may be given to another one in between, but not this descriptor.
    let process = pidfd_open(pid, PidfdFlags::empty()).ok()?;
    let environment = std::fs::read(format!("/proc/{}/environ", pid.as_raw_nonzero())).ok()?;
    let mark = format!("{mark}={}", file.display());
    environment.split(|b| *b == 0).any(|line| line == mark.as_bytes()).then_some((pid, process))
}
