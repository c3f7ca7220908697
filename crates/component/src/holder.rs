//! The process that keeps a component's namespace: it sleeps, and outlives the daemon.
//!
//! It is found again by its file and its mark ([`godwit_net::marked`]).

use godwit_net::{NetError, NetNs, marked};
use rustix::process::{Pid, Signal, WaitOptions, pidfd_send_signal, waitpid};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The variable that names it.
const MARK: &str = "GODWIT_COMPONENT";
/// How long a process may take to begin or to end.
const PATIENCE: Duration = Duration::from_secs(10);
const MOMENT: Duration = Duration::from_millis(2);
/// Its number is written whole before it sleeps.
const SCRIPT: &str = r#"echo $$ >"$1.new" && mv "$1.new" "$1" && exec sleep infinity"#;

/// A holder that runs.
#[derive(Debug)]
pub(crate) struct Holder {
    file: PathBuf,
    pid: Pid,
    process: OwnedFd,
}

fn failed(operation: &'static str, file: &Path) -> impl FnOnce(io::Error) -> NetError {
    let object = file.display().to_string();
    move |source| NetError::Kernel { operation, object, source }
}

impl Holder {
    /// The one that wrote `file`, if it runs.
    pub(crate) fn find(file: &Path) -> Option<Self> {
        let (pid, process) = marked(file, MARK)?;
        Some(Self { file: file.to_owned(), pid, process })
    }

    /// The one that wrote `file`, or a new one in a fresh namespace; and whether it is new.
    pub(crate) fn ensure(file: &Path) -> Result<(Self, bool), NetError> {
        if let Some(known) = Self::find(file) {
            return Ok((known, false));
        }
        let _ = std::fs::remove_file(file);
        let started = NetNs::fresh(|| {
            let mut command = Command::new("/bin/sh");
            command.args(["-c", SCRIPT, "godwit-component"]).arg(file).env_clear();
            command.env("PATH", "/usr/bin:/bin").env(MARK, file).current_dir("/").process_group(0);
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn()
        })?;
        started.map_err(failed("start the holder of", file))?;
        let end = Instant::now() + PATIENCE;
        while Instant::now() < end {
            if let Some(new) = Self::find(file) {
                return Ok((new, true));
            }
            std::thread::sleep(MOMENT);
        }
        Err(failed("wait for the holder of", file)(io::ErrorKind::TimedOut.into()))
    }

    /// Its namespace.
    pub(crate) fn namespace(&self) -> Result<NetNs, NetError> {
        NetNs::of_process(self.pid.as_raw_nonzero().get().unsigned_abs())
    }

    /// Ends it; its namespace goes with it.
    pub(crate) fn end(self) -> Result<(), NetError> {
        let refused = failed("end the holder of", &self.file);
        match pidfd_send_signal(&self.process, Signal::KILL) {
            Ok(()) | Err(rustix::io::Errno::SRCH) => {}
            Err(error) => return Err(refused(error.into())),
        }
        // Another daemon's child is its reaper's, or the system's.
        let end = Instant::now() + PATIENCE;
        while Self::find(&self.file).is_some() && Instant::now() < end {
            let _ = waitpid(Some(self.pid), WaitOptions::NOHANG);
            std::thread::sleep(MOMENT);
        }
        let _ = waitpid(Some(self.pid), WaitOptions::NOHANG);
        let _ = std::fs::remove_file(&self.file);
        Ok(())
    }
}
