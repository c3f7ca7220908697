//! The program that stands in for the kernel's WireGuard: one process a device, which outlives the node.
//!
//! It is found again by its file and its mark ([`godwit_net::marked`]).

use godwit_net::marked;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, WaitOptions, pidfd_send_signal, waitpid};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Where it makes its sockets; only there does `wg` look for them.
const SOCKETS: &str = "/var/run/wireguard";
/// The variable that names it.
pub(crate) const MARK: &str = "GODWIT_EXTENDER";
/// How long it may take to begin or to end.
const PATIENCE: Duration = Duration::from_secs(10);
const MOMENT: Duration = Duration::from_millis(5);
/// Its number is written whole before it is the program.
const SCRIPT: &str = r#"echo $$ >"$1.new" && mv "$1.new" "$1" && exec "$2" -f "$3""#;

/// One that runs.
#[derive(Debug)]
pub struct Engine {
    file: PathBuf,
    device: String,
    pid: Pid,
    process: OwnedFd,
}

impl Engine {
    /// The program. Debian has it as the package of the same name.
    pub const PROGRAM: &str = "wireguard-go";

    /// The one that wrote `file`, if it runs.
    #[must_use]
    pub fn find(file: &Path, device: &str) -> Option<Self> {
        let (pid, process) = marked(file, MARK)?;
        let found = Self { file: file.to_owned(), device: device.to_owned(), pid, process };
        found.is_alive().then_some(found)
    }

    /// The one that wrote `file`, or a new one, whose device and socket are there then.
    ///
    /// # Errors
    /// It is not installed, or ends at once: what it said is in the file beside, with the ending `log`.
    pub fn ensure(file: &Path, device: &str) -> io::Result<Self> {
        let _ = std::fs::create_dir_all(SOCKETS);
        let socket = Path::new(SOCKETS).join(format!("{device}.sock"));
        if let Some(known) = Self::find(file, device).filter(|_| socket.exists()) {
            return Ok(known);
        }
        reap(file);
        // One that was killed leaves a socket that nobody hears.
        Self::forget(file, device);
        let log = file.with_extension("log");
        let out = std::fs::File::create(&log)?;
        let mut command = Command::new("/bin/sh");
        command.args(["-c", SCRIPT, "godwit-extender"]).arg(file).args([Self::PROGRAM, device]).env_clear();
        command.env("PATH", "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin").env(MARK, file).env("LOG_LEVEL", "error");
        command.current_dir("/").process_group(0);
        let mut child = command.stdin(Stdio::null()).stdout(out.try_clone()?).stderr(out).spawn()?;
        let end = Instant::now() + PATIENCE;
        while Instant::now() < end {
            if let Some(status) = child.try_wait()? {
                let said = std::fs::read_to_string(&log).unwrap_or_default();
                let said = said.lines().last().unwrap_or_default();
                return Err(io::Error::other(format!("{} ended with {status}: {said}", Self::PROGRAM)));
            }
            if socket.exists()
                && let Some(new) = Self::find(file, device)
            {
                return Ok(new);
            }
            std::thread::sleep(MOMENT);
        }
        Err(io::ErrorKind::TimedOut.into())
    }

    /// Whether it still runs.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        // As soon as it has ended its descriptor can be read, whoever reaps it.
        let mut ended = [PollFd::new(&self.process, PollFlags::IN)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let alive = matches!(poll(&mut ended, Some(&now)), Ok(0));
        if !alive {
            let _ = waitpid(Some(self.pid), WaitOptions::NOHANG);
        }
        alive
    }

    /// Its number.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.pid.as_raw_nonzero().get().unsigned_abs()
    }

    /// Ends it; its device goes with it.
    ///
    /// # Errors
    /// The kernel's.
    pub fn end(self) -> io::Result<()> {
        match pidfd_send_signal(&self.process, Signal::TERM) {
            Ok(()) | Err(rustix::io::Errno::SRCH) => {}
            Err(error) => return Err(error.into()),
        }
        let end = Instant::now() + PATIENCE;
        while self.is_alive() {
            if Instant::now() > end {
                let _ = pidfd_send_signal(&self.process, Signal::KILL);
            }
            std::thread::sleep(MOMENT);
        }
        Self::forget(&self.file, &self.device);
        Ok(())
    }

    /// Removes the files of one that has ended.
    pub fn forget(file: &Path, device: &str) {
        let socket = Path::new(SOCKETS).join(format!("{device}.sock"));
        for left in [file.to_owned(), file.with_extension("log"), socket] {
            let _ = std::fs::remove_file(left);
        }
    }
}

/// Where one that has ended was this process's child, it is not kept any more.
fn reap(file: &Path) {
    let said = std::fs::read_to_string(file).unwrap_or_default();
    if let Some(pid) = said.trim().parse().ok().and_then(Pid::from_raw) {
        let _ = waitpid(Some(pid), WaitOptions::NOHANG);
    }
}
