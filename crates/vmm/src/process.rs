//! A process that is not ours for long: known by its id and its start time, so that a later process with the same id is not
//! taken for it.

use crate::error::{VmmError, io_error};
use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};
use std::path::Path;
use std::time::{Duration, Instant};

/// A process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Process {
    /// Its id.
    pub pid: u32,
    /// When it was started, in clock ticks since boot: field 22 of its `stat`.
    pub started: u64,
}

impl Process {
    /// The process that has this id now.
    pub fn now(pid: u32) -> Option<Self> {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The second field is the name in parentheses, and may hold anything.
        let mut fields = stat[stat.rfind(')')? + 1..].split_ascii_whitespace();
        let dead = matches!(fields.next()?, "Z" | "X");
        let started = fields.nth(18)?.parse().ok()?;
        (!dead).then_some(Self { pid, started })
    }

    /// Whether it still is.
    pub fn is_alive(self) -> bool {
        Self::now(self.pid) == Some(self)
    }

    /// Kills it, if it still is.
    pub fn kill(self) {
        if self.is_alive()
            && let Some(pid) = i32::try_from(self.pid).ok().and_then(Pid::from_raw)
        {
            // It may have ended meanwhile, which is as well.
            let _ = kill_process(pid, Signal::KILL);
        }
    }

    /// Waits until it is gone; false at the deadline.
    pub fn wait_gone(self, within: Duration) -> bool {
        let deadline = Instant::now() + within;
        while self.is_alive() {
            if Instant::now() > deadline {
                return false;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        true
    }

    pub fn save(self, path: &Path) -> Result<(), VmmError> {
        std::fs::write(path, format!("{}\n{}\n", self.pid, self.started)).map_err(io_error("write", path))
    }

    /// The process that a file names, whether it still is or not.
    pub fn load(path: &Path) -> Option<Self> {
        let text = std::fs::read_to_string(path).ok()?;
        let mut lines = text.lines();
        Some(Self { pid: lines.next()?.parse().ok()?, started: lines.next()?.parse().ok()? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_known_again_and_another_one_with_its_id_is_not_taken_for_it() {
        let mut child = std::process::Command::new("sleep").arg("100").spawn().expect("sleep runs");
        let process = Process::now(child.id()).expect("is there");
        assert!(process.is_alive());
        let other = Process { started: process.started + 1, ..process };
        assert!(!other.is_alive());
        other.kill();
        assert!(process.is_alive(), "only what is meant is killed");
        process.kill();
        assert!(process.wait_gone(Duration::from_secs(5)), "a zombie counts as gone");
        child.wait().expect("ends");
    }
}
