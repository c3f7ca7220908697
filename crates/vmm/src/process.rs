//! A process that is not ours for long: known by its id and its start time, so that a later process with the same id is not
//! taken for it.
//!
//! It is found again by its command line, which names its process id file: QEMU itself writes that, so there is nothing that the
//! node would have to write after the start, and no moment at which a node that is killed leaves a QEMU that nobody finds. The
//! file may be missing (QEMU has not come that far), or be of a QEMU that is gone, or of before a reboot: what counts is that the
//! process it names has this very file on its command line. Where none has, all processes are looked at. A node in another mount
//! name space may use the same path for another folder: what the process finds at it has to be our folder.

use crate::error::{VmmError, io_error};
use rustix::process::{Pid, Signal, kill_process};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

/// A process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Process {
    /// Its id.
    pub pid: u32,
    /// When it was started, in clock ticks since boot: field 22 of its `stat`.
    pub started: u64,
}

/// What its process id file is called.
pub(crate) const PID_NAME: &str = "qemu.pid";

/// How long a killed process may take to go: the kernel takes its memory back first.
const GONE: Duration = Duration::from_secs(10);

/// QEMU's option for its process id file.
pub(crate) const PID_FILE: &str = "-pidfile";

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
        self.wait_gone_looking(within, Duration::from_millis(2))
    }

    /// Waits until it is gone, and looks so often; false at the deadline.
    pub fn wait_gone_looking(self, within: Duration, often: Duration) -> bool {
        let deadline = Instant::now() + within;
        while self.is_alive() {
            if Instant::now() > deadline {
                return false;
            }
            std::thread::sleep(often);
        }
        true
    }

    /// The process that was started with this process id file, if it still is.
    ///
    /// # Errors
    /// When the processes cannot be listed: then nobody knows.
    pub fn find(pid_file: &Path) -> Result<Option<Self>, VmmError> {
        let named = std::fs::read_to_string(pid_file).ok().and_then(|text| text.trim().parse().ok());
        if let Some(process) = named.and_then(|pid| Self::started_with(pid, pid_file)) {
            return Ok(Some(process));
        }
        let all = Path::new("/proc");
        let pids = std::fs::read_dir(all).map_err(io_error("list the processes in", all))?;
        let pids = pids.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
        // A process that is just starting another has its command line for a moment: the elder one is meant.
        Ok(pids.filter_map(|pid| Self::started_with(pid, pid_file)).min_by_key(|p| p.started))
    }

    /// The process with this id, if it is ours and has this process id file on its command line.
    fn started_with(pid: u32, pid_file: &Path) -> Option<Self> {
        let before = Self::now(pid)?;
        let folder = format!("/proc/{pid}");
        let ours = std::fs::metadata(&folder).ok()?.uid() == rustix::process::geteuid().as_raw();
        let line = std::fs::read(format!("{folder}/cmdline")).ok()?;
        let arguments: Vec<_> = line.split(|byte| *byte == 0).map(OsStr::from_bytes).collect();
        let named = arguments.windows(2).any(|two| two[0] == PID_FILE && Path::new(two[1]) == pid_file);
        // The id may have gone to another in between.
        (ours && named && same_folder(&folder, pid_file) && before.is_alive()).then_some(before)
    }
}

/// Whether a QEMU runs that has its sockets in this folder.
///
/// # Errors
/// When nobody can know.
pub fn is_running(run: &Path) -> Result<bool, VmmError> {
    Ok(Process::find(&run.join(PID_NAME))?.is_some())
}

/// Kills the QEMU that has its sockets in this folder, if one runs, and waits until it is gone.
///
/// # Errors
/// When nobody can know whether one runs, or it does not go.
pub fn end(run: &Path) -> Result<(), VmmError> {
    let Some(process) = Process::find(&run.join(PID_NAME))? else { return Ok(()) };
    process.kill();
    if process.wait_gone(GONE) {
        return Ok(());
    }
    Err(VmmError::State { what: "end", state: "alive after a SIGKILL".into() })
}

/// Whether the folder of this file is the same to us and to the process of this `/proc` folder.
fn same_folder(process: &str, file: &Path) -> bool {
    let Some(folder) = file.parent().and_then(|f| f.strip_prefix("/").ok()) else { return false };
    let identity = |path: &Path| std::fs::metadata(path).map(|m| (m.dev(), m.ino()));
    let Ok(ours) = identity(&Path::new("/").join(folder)) else { return false };
    match identity(&Path::new(process).join("root").join(folder)) {
        Ok(theirs) => ours == theirs,
        // Not for us to see. Its command line is the evidence then: a VM is not given up for that.
        Err(error) => error.kind() == std::io::ErrorKind::PermissionDenied,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

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
        assert!(process.wait_gone(Duration::from_secs(60)), "a zombie counts as gone");
        child.wait().expect("ends");
    }

    #[test]
    fn a_process_is_found_by_its_command_line_whatever_its_file_says() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("a.pid");
        let stand = |file: &Path| {
            let mut command = std::process::Command::new("sh");
            command.args(["-c", "echo; read _", "qemu", PID_FILE]).arg(file);
            let piped = std::process::Stdio::piped;
            let mut child = command.stdin(piped()).stdout(piped()).spawn().expect("sh runs");
            // One that has only just become what it is has no command line yet.
            child.stdout.as_mut().expect("it is ours").read_exact(&mut [0]).expect("it is up");
            child
        };
        let (mut meant, mut other) = (stand(&file), stand(&folder.path().join("b.pid")));
        let process = Process::now(meant.id());
        // No file; one of an earlier QEMU whose id another has now; one that holds nothing yet; its own.
        let own = meant.id().to_string();
        let found = [None, Some(other.id().to_string()), Some(String::new()), Some(own.clone())].map(|text| {
            let _ = text.map(|text| std::fs::write(&file, text));
            Process::find(&file).expect("can be looked for")
        });
        for child in [&mut meant, &mut other] {
            child.kill().expect("was there");
            child.wait().expect("ends");
        }
        assert_eq!(found, [process; 4]);
        assert_eq!(Process::find(&file).expect("can be looked for"), None, "its file still names it: {own}");
    }

    #[test]
    fn a_process_for_which_the_same_path_is_another_folder_is_another_nodes() {
        if !rustix::process::geteuid().is_root() {
            eprintln!("not root: no mount name space can be made");
            return;
        }
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("a.pid");
        let stand = |mount: &str| {
            let script = format!("{mount} && exec sh -c 'read _' qemu {PID_FILE} '{}'", file.display());
            let mut command = std::process::Command::new("unshare");
            command.args(["--mount", "sh", "-c", &script]).stdin(std::process::Stdio::piped());
            let child = command.spawn().expect("unshare runs");
            let is_there = || {
                let line = std::fs::read(format!("/proc/{}/cmdline", child.id())).unwrap_or_default();
                line.split(|b| *b == 0).any(|argument| argument == PID_FILE.as_bytes())
            };
            let deadline = Instant::now() + Duration::from_secs(60);
            while !is_there() && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(2));
            }
            assert!(is_there(), "it becomes what it stands for");
            child
        };
        let mut others = stand(&format!("mount -t tmpfs none '{}'", folder.path().display()));
        let none = Process::find(&file);
        let mut own = stand("true");
        let found = Process::find(&file);
        let meant = Process::now(own.id());
        for child in [&mut others, &mut own] {
            child.kill().expect("was there");
            child.wait().expect("ends");
        }
        assert_eq!(none.expect("can be looked for"), None);
        assert_eq!(found.expect("can be looked for"), meant);
    }
}
