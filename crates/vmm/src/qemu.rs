//! One running QEMU.

use crate::command::{RAM, command, pid_file, qmp_socket};
use crate::error::{VmmError, io_error};
use crate::monitor::{Monitor, ORDINARY};
use crate::process::Process;
use crate::spec::{Placement, Start, VmSpec};
use godwit_qmp::QmpError;
use godwit_units::Bytes;
use serde_json::{Value, json};
use std::fs::{DirBuilder, File};
use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// How long a QEMU may take to open its control socket.
pub(crate) const UP: Duration = Duration::from_secs(30);
/// How long an adoption waits for the monitor of a QEMU that runs. One that is well answers within milliseconds; one that does
/// not is adopted all the same, and a node with many of them starts none the later.
const ADOPTION: Duration = Duration::from_secs(2);
/// How long a QEMU may take to end when it is asked to.
const END: Duration = Duration::from_secs(5);
/// How long a migration that is cancelled may take to be so: QEMU has to get out of a write to its socket.
const CANCEL: Duration = Duration::from_secs(10);
/// How long a post-copy may take to see that its stream has broken off: it does so within a tenth of a second, or never.
const PAUSE: Duration = Duration::from_secs(10);
/// A pause that QEMU never expects to keep: pre-copy goes on until it is told otherwise. 0 would end it after one pass.
const KEEP_GOING_MS: u64 = 1;
/// By how much a guest's CPUs are slowed first, and by how much more each time, in percent. QEMU looks at every second round, and rounds
/// over a thin link are long: few steps.
const THROTTLE_FIRST: u8 = 40;
const THROTTLE_STEP: u8 = 25;
/// And from where on: where as much is dirtied as is sent, in percent of QEMU's bytes. Of those each page has a head, and a round some besides, so
/// that a guest which writes all of what it writes to in each round never comes to 100; QEMU's own 50 would slow one whose rounds get shorter.
const THROTTLE_FROM: u8 = 95;
/// A pause that QEMU always expects to keep: pre-copy ends. Its own maximum.
const STOP_NOW_MS: u64 = 2_000_000;
/// The least that QEMU can be told to send in a second: it counts in tenths, and 0 would be no limit at all. That is a page in each of them.
const TRICKLE: u64 = 10;
/// How a descriptor is called that QEMU keeps.
const HELD: &str = "godwit-held";
/// And one that it migrates into.
const OUTGOING: &str = "godwit-outgoing";
/// What QEMU may have sent that nobody has read yet, as the kernel counts it: about twice as much in contents. When a guest stops, all of it is
/// still to go; with the kernel's own measure that was 80 ms over 10 Mbit/s.
const UNREAD: usize = 32 << 10;
/// More than any socket carries, bytes a second: the link's back-pressure is the limit.
const UNLIMITED: u64 = 1 << 40;

/// What a QEMU does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// vCPUs run.
    Running,
    /// vCPUs stand still; a migration may be at its end.
    Stopped,
    /// A migration has ended here as the source: nothing but `cont` starts it again.
    Postmigrate,
    /// It waits for a migration, or reads one.
    Incoming,
}

/// Where a migration stands, by QEMU's `query-migrate`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MigrationStatus {
    /// None was begun.
    None,
    /// It goes on.
    Active,
    /// The guest has gone over, or is about to, and pages follow it.
    Postcopy,
    /// As that, and the stream broke off: it goes on through another one.
    Paused,
    /// It has ended well.
    Completed,
    /// It has failed.
    Failed,
    /// It was given up.
    Cancelled,
}

impl MigrationStatus {
    pub(crate) fn of(text: &str) -> Self {
        match text {
            "none" | "" => Self::None,
            "completed" => Self::Completed,
            "failed" => Self::Failed,
            "cancelled" => Self::Cancelled,
            "postcopy-device" | "postcopy-active" | "postcopy-recover" | "postcopy-recover-setup" => Self::Postcopy,
            "postcopy-paused" => Self::Paused,
            _ => Self::Active,
        }
    }
}

/// Figures of a migration under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MigrationInfo {
    /// Where it stands.
    pub status: MigrationStatus,
    /// RAM still to be sent, as known at the last synchronisation.
    pub remaining: Bytes,
    /// Bytes written to the socket.
    pub transferred: Bytes,
    /// How fast the guest dirties pages, pages a second.
    pub dirty_pages_per_s: u64,
    /// By how much the guest's CPUs are slowed, in percent.
    pub throttled: u8,
}

/// Something that a QEMU said of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QemuEvent {
    /// The vCPUs stopped.
    Stop {
        /// When it was heard.
        at: Instant,
        /// When it happened, by QEMU's clock: microseconds since 1970.
        unix_us: u64,
    },
    /// The vCPUs run.
    Resume {
        /// When it was heard.
        at: Instant,
        /// When it happened, by QEMU's clock: microseconds since 1970.
        unix_us: u64,
    },
    /// A migration came to this.
    Migration(MigrationStatus),
    /// Pass number so much over the memory begins.
    Pass(u64),
    /// A write found no room, and the guest stands still until it is made again ([`Qemu::cont`]).
    NoRoom,
    /// The guest powered itself off.
    PoweredOff,
    /// The process is gone. The last event.
    Gone,
}

/// What a migration may do besides.
#[derive(Clone, Copy, Debug, Default)]
struct Extras {
    /// Slow the guest's CPUs.
    throttle: bool,
    /// Let memory follow the guest.
    postcopy: bool,
}

/// Starts a QEMU that is nobody's: whoever started it may die at any moment. `None`: it has ended already.
///
/// It is no child of its node, but of the system's init, which waits for its end; and it has a process group of its own, so that what a terminal sends to
/// the node's does not reach it. A child in such a group would go on by itself when its node dies while it is stopped, or end: the kernel sends SIGHUP and
/// SIGCONT to a group that loses its last link to its session. It has no session of its own: the kernel shares processors out to sessions before it
/// looks at priorities (sched(7), autogroup), so that what the node does for a guest's disk would wait for the guest's own threads, and what it does
/// at a lower priority would not.
fn apart(mut command: Command) -> Result<Option<Process>, VmmError> {
    let program = Path::new(crate::command::PROGRAM);
    let failed = || io_error("start", program);
    let (mut told, tell) = std::io::pipe().map_err(failed())?;
    // SAFETY: these calls may be made between fork and exec (signal-safety(7)). clone without a stack or flags is fork, without what the C library
    // would do beside it, which is not needed: the one goes on to exec, and the other ends.
    unsafe {
        command.pre_exec(move || {
            match libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) {
                0 => {}
                -1 => return Err(std::io::Error::last_os_error()),
                _ => libc::_exit(0),
            }
            rustix::process::setpgid(None, None)?;
            rustix::io::write(&tell, &libc::getpid().to_ne_bytes())?;
            Ok(())
        });
    }
    let mut between = command.spawn().map_err(failed())?;
    between.wait().map_err(failed())?;
    // It has the other end: whoever is gone before it could tell is not waited for.
    drop(command);
    let mut pid = [0; 4];
    told.read_exact(&mut pid).map_err(failed())?;
    Ok(u32::try_from(i32::from_ne_bytes(pid)).ok().and_then(Process::now))
}

/// A QEMU. Dropping it leaves it running.
#[derive(Debug)]
pub struct Qemu {
    process: Process,
    monitor: Monitor,
    placement: Placement,
}

impl Qemu {
    /// Starts one. Blocks until its control socket answers.
    ///
    /// # Errors
    /// With the end of its log when it does not come up; nothing is left behind then.
    pub fn start(spec: &VmSpec, placement: &Placement, start: Start) -> Result<Self, VmmError> {
        for folder in [&placement.run, &placement.logs] {
            DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(io_error("make", folder))?;
        }
        let placement = &Placement { run: absolute(&placement.run)?, ..placement.clone() };
        if let Some(Process { pid, .. }) = Process::find(&pid_file(placement))? {
            return Err(VmmError::Already { pid });
        }
        let log = placement.logs.join("qemu.log");
        let socket = qmp_socket(placement);
        let _ = std::fs::remove_file(&socket);
        let out = File::options().create(true).append(true).open(&log).map_err(io_error("open", &log))?;
        let errors = out.try_clone().map_err(io_error("open", &log))?;
        let console = crate::console::path(&placement.logs);
        File::create(&console).map_err(io_error("empty", &console))?;
        let mut command = command(spec, placement, start);
        command.stdin(Stdio::null()).stdout(out).stderr(errors);
        let process = apart(command)?;
        let not_up = |why: String| VmmError::NotUp { why, log: tail(&log) };
        let process = process.ok_or_else(|| not_up("it ended at once".into()))?;
        let up = Monitor::open(process, &socket).and_then(|monitor| {
            let it = Self { process, monitor, placement: placement.clone() };
            it.monitor.wait_up(UP).map_err(|e| match e {
                VmmError::Unreachable { why, .. } => not_up(why),
                other => other,
            })?;
            it.prepare(start, Extras::default())?;
            Ok(it)
        });
        if up.is_err() {
            process.kill();
            process.wait_gone(END);
        }
        up
    }

    /// The QEMU that an earlier node started there, if it still runs. Waits for its monitor for two seconds at most: one that
    /// does not answer is adopted all the same, and its monitor tried for as long as it runs ([`Qemu::unreachable`]).
    ///
    /// # Errors
    /// When nobody can know whether it runs.
    pub fn adopt(placement: &Placement) -> Result<Option<Self>, VmmError> {
        let placement = Placement { run: absolute(&placement.run)?, ..placement.clone() };
        let Some(process) = Process::find(&pid_file(&placement))? else { return Ok(None) };
        let monitor = Monitor::open(process, &qmp_socket(&placement))?;
        if let Err(error) = monitor.wait_up(ADOPTION) {
            tracing::warn!(run = %placement.run.display(), %error, "adopted without its monitor");
        }
        Ok(Some(Self { process, monitor, placement }))
    }

    /// Why its monitor cannot be reached now, where it cannot.
    #[must_use]
    pub fn unreachable(&self) -> Option<String> {
        self.monitor.unreachable()
    }

    /// Sets what a move needs, and takes back what does not go with it: the node reads the plain stream, from one socket. Whoever
    /// has a hand on the monitor may have set anything. Does nothing where all is as it should be.
    fn prepare(&self, start: Start, extras: Extras) -> Result<(), VmmError> {
        // The same on both sides: QEMU compares them.
        let mut wanted = vec!["events", "return-path"];
        if start == Start::Incoming {
            wanted.push("late-block-activate");
        }
        if extras.throttle {
            wanted.push("auto-converge");
        }
        if extras.postcopy {
            wanted.push("postcopy-ram");
        }
        let answer = self.execute("query-migrate-capabilities", Value::Null)?;
        let mut change = vec![];
        for capability in answer.as_array().into_iter().flatten() {
            let name = capability["capability"].as_str().unwrap_or_default();
            if name == "late-block-activate" && start == Start::Boot {
                // Means something to a destination only, which this one may have been.
                continue;
            }
            let want = wanted.contains(&name);
            if capability["state"] != want {
                if !want {
                    tracing::warn!(run = %self.placement.run.display(), capability = name, "somebody set it; a move needs it off");
                }
                change.push(json!({"capability": name, "state": want}));
            }
            wanted.retain(|w| *w != name);
        }
        if let Some(lacking) = wanted.first() {
            return Err(VmmError::Spec(format!(
                "this QEMU has no migration capability `{lacking}`; install 7.2 or newer"
            )));
        }
        if !change.is_empty() {
            self.execute("migrate-set-capabilities", json!({"capabilities": change}))?;
        }
        Ok(())
    }

    /// Parameters that change the stream, or when it ends: those that are set and should not be.
    fn stray_parameters(&self) -> Result<Value, VmmError> {
        let answer = self.execute("query-migrate-parameters", Value::Null)?;
        let mut stray = json!({});
        for text in ["tls-creds", "tls-hostname", "tls-authz"] {
            if answer[text].as_str().is_some_and(|t| !t.is_empty()) {
                stray[text] = "".into();
            }
        }
        if answer["avail-switchover-bandwidth"].as_u64().is_some_and(|b| b > 0) {
            stray["avail-switchover-bandwidth"] = 0.into();
        }
        Ok(stray)
    }

    pub(crate) fn execute(&self, command: &str, arguments: Value) -> Result<Value, VmmError> {
        self.monitor.execute_within(command, arguments, ORDINARY)
    }

    /// Its process id.
    #[must_use]
    pub const fn pid(&self) -> u32 {
        self.process.pid
    }

    /// What a migration stream calls the guest's RAM.
    pub const RAM: &str = RAM;

    /// The guest's RAM, of `size`, to be read: it is memory that is shared with whoever may look into the process.
    ///
    /// # Errors
    /// When the process is gone, or has no such memory.
    pub fn ram(&self, size: Bytes) -> std::io::Result<File> {
        let missing = |what: String| std::io::Error::new(std::io::ErrorKind::NotFound, what);
        for entry in std::fs::read_dir(format!("/proc/{}/fd", self.pid()))? {
            let path = entry?.path();
            let is_memory = std::fs::read_link(&path).is_ok_and(|link| link.to_string_lossy().contains("memfd:"));
            if is_memory && std::fs::metadata(&path).is_ok_and(|m| m.len() == size.0) {
                let ram = File::open(path)?;
                // The id may be another process's by now, with another guest's memory.
                return if self.is_alive() { Ok(ram) } else { Err(missing("QEMU is gone".into())) };
            }
        }
        Err(missing(format!("QEMU has no shared memory of {size}")))
    }

    /// Whether the process still is.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        self.process.is_alive()
    }

    /// Calls `on` for each event, in order, on a thread of its own, from now on until the process is gone. What a broken monitor
    /// missed is asked for when it works again, and told then.
    pub fn watch(&self, on: impl FnMut(QemuEvent) + Send + 'static) {
        self.monitor.watch(on);
    }

    /// What it does.
    ///
    /// # Errors
    /// When its monitor does not answer.
    pub fn state(&self) -> Result<State, VmmError> {
        Ok(match self.run_state()?.as_str() {
            "running" => State::Running,
            "postmigrate" => State::Postmigrate,
            "inmigrate" => State::Incoming,
            _ => State::Stopped,
        })
    }

    /// As QEMU calls it.
    fn run_state(&self) -> Result<String, VmmError> {
        let said = self.execute("query-status", Value::Null)?;
        Ok(said["status"].as_str().unwrap_or_default().to_owned())
    }

    /// Whether it made the guest stand still because a write found no room ([`QemuEvent::NoRoom`]).
    ///
    /// # Errors
    /// When its monitor does not answer.
    pub fn is_stalled(&self) -> Result<bool, VmmError> {
        Ok(self.execute("query-status", Value::Null)?["status"] == "io-error")
    }

    /// Figures of the migration.
    ///
    /// # Errors
    /// When its monitor does not answer.
    pub fn migration(&self) -> Result<MigrationInfo, VmmError> {
        let said = self.execute("query-migrate", Value::Null)?;
        let number = |key: &str| said["ram"][key].as_u64().unwrap_or(0);
        Ok(MigrationInfo {
            status: MigrationStatus::of(said["status"].as_str().unwrap_or_default()),
            remaining: Bytes(number("remaining")),
            transferred: Bytes(number("transferred")),
            dirty_pages_per_s: number("dirty-pages-rate"),
            throttled: said["cpu-throttle-percentage"].as_u64().map_or(0, |percent| percent.min(99) as u8),
        })
    }

    /// Begins to migrate, and goes on over memory until [`Qemu::stop_now`]: the other end of its socket. The stream is the plain one,
    /// whatever was set on this QEMU before. With `throttle` it slows the guest's CPUs, in steps and by at most so many percent, while
    /// as much is dirtied as is sent. With `postcopy` memory may follow the guest; the other side has to know that, too
    /// ([`Qemu::allow_postcopy`]).
    ///
    /// # Errors
    /// When QEMU refuses; a device that cannot be migrated is named.
    pub fn migrate(&self, throttle: Option<u8>, postcopy: bool) -> Result<UnixStream, VmmError> {
        self.prepare(Start::Boot, Extras { throttle: throttle.is_some(), postcopy })?;
        let mut parameters = self.stray_parameters()?;
        if let Some(most) = throttle {
            // Where CloudNet sees the crossover, and not before.
            parameters["throttle-trigger-threshold"] = THROTTLE_FROM.into();
            parameters["cpu-throttle-initial"] = THROTTLE_FIRST.min(most).into();
            parameters["cpu-throttle-increment"] = THROTTLE_STEP.into();
            parameters["max-cpu-throttle"] = most.into();
        }
        parameters["max-bandwidth"] = UNLIMITED.into();
        parameters["downtime-limit"] = KEEP_GOING_MS.into();
        self.execute("migrate-set-parameters", parameters)?;
        let (ours, theirs) = outgoing().map_err(io_error("make the socket", Path::new(OUTGOING)))?;
        self.pass(OUTGOING, theirs.as_fd())?;
        self.execute("migrate", json!({"uri": format!("fd:{OUTGOING}")}))?;
        Ok(ours)
    }

    /// Ends pre-copy: the guest stops within some ten milliseconds.
    ///
    /// # Errors
    /// When its monitor does not answer.
    pub fn stop_now(&self) -> Result<(), VmmError> {
        self.execute("migrate-set-parameters", json!({"downtime-limit": STOP_NOW_MS})).map(drop)
    }

    /// An incoming one: memory may follow its guest. QEMU tries what that needs of its host, which is `userfaultfd`.
    ///
    /// # Errors
    /// When QEMU, or its host, cannot.
    pub fn allow_postcopy(&self) -> Result<(), VmmError> {
        let on = json!({"capabilities": [{"capability": "postcopy-ram", "state": true}]});
        self.execute("migrate-set-capabilities", on).map(drop)
    }

    /// Ends pre-copy by post-copy: the guest stops within some ten milliseconds, and what it has dirtied is to follow it. Of what nobody waits
    /// for ten pages go in a second until [`Qemu::follow`]: who has sent the last one cannot go back ([`Qemu::go_back`]).
    ///
    /// # Errors
    /// When QEMU refuses, as it does where [`Qemu::migrate_to`] was not told that this may be.
    pub fn start_postcopy(&self) -> Result<(), VmmError> {
        self.execute("migrate-set-parameters", json!({"max-postcopy-bandwidth": TRICKLE}))?;
        self.execute("migrate-start-postcopy", Value::Null).map(drop)
    }

    /// The guest has gone: of the pages that nobody waits for at most so much goes in a second, so that one that somebody waits for finds the
    /// way free. None: as much as the link carries.
    ///
    /// # Errors
    /// When its monitor does not answer.
    pub fn follow(&self, behind: Option<Bytes>) -> Result<(), VmmError> {
        let behind = behind.map_or(0, |most| most.0.max(TRICKLE));
        self.execute("migrate-set-parameters", json!({"max-postcopy-bandwidth": behind})).map(drop)
    }

    /// Gives QEMU the other end of its own migration socket to keep, so that post-copy does not break off when this process ends: what
    /// follows can be decided by another. Only once all of the devices' state was read: while it writes that it answers nobody.
    ///
    /// # Errors
    /// When its monitor does not answer.
    pub fn hold(&self, socket: BorrowedFd<'_>) -> Result<(), VmmError> {
        self.pass(HELD, socket)
    }

    /// Gives QEMU a descriptor under a name; one that it had by that name is closed.
    pub(crate) fn pass(&self, name: &str, descriptor: BorrowedFd<'_>) -> Result<(), VmmError> {
        self.monitor.execute_passing("getfd", json!({"fdname": name}), descriptor, ORDINARY).map(drop)
    }

    /// Takes that back. Nothing where it has none.
    pub fn let_go(&self) {
        let _ = self.execute("closefd", json!({"fdname": HELD}));
    }

    /// Source: breaks a post-copy off, so that it can go on through another stream.
    ///
    /// # Errors
    /// [`VmmError::Stuck`] where QEMU can do neither: it has sent its last page, or was about to agree with the other side over what had come,
    /// when its stream broke off.
    pub fn pause_postcopy(&self) -> Result<(), VmmError> {
        let deadline = Instant::now() + PAUSE;
        loop {
            match self.migration()?.status {
                MigrationStatus::Paused => return Ok(()),
                MigrationStatus::Postcopy if Instant::now() < deadline => {
                    // It refuses while it is at it.
                    let _ = self.execute("migrate-pause", Value::Null);
                    std::thread::sleep(Duration::from_millis(20));
                }
                MigrationStatus::Postcopy => return Err(VmmError::Stuck),
                other => {
                    return Err(VmmError::State { what: "go on with its post-copy", state: format!("{other:?}") });
                }
            }
        }
    }

    /// Source: goes on with a post-copy that broke off, through another socket.
    ///
    /// # Errors
    /// When QEMU refuses.
    pub fn resume_postcopy(&self, socket: &Path) -> Result<(), VmmError> {
        self.execute("migrate", json!({"uri": format!("unix:{}", socket.display()), "resume": true})).map(drop)
    }

    /// Destination: listens for the rest of a post-copy that broke off.
    ///
    /// # Errors
    /// When QEMU refuses.
    pub fn recover_postcopy(&self, socket: &Path) -> Result<(), VmmError> {
        self.execute("migrate-recover", json!({"uri": format!("unix:{}", socket.display())})).map(drop)
    }

    /// Listens for a migration at a unix socket.
    ///
    /// # Errors
    /// When QEMU refuses.
    pub fn migrate_incoming(&self, socket: &Path) -> Result<(), VmmError> {
        self.execute("migrate-incoming", json!({"uri": format!("unix:{}", socket.display())})).map(drop)
    }

    /// Gives a pre-copy up, if one goes on, and waits until it is over. The guest is as it was: running, unless it had
    /// stopped for the last pages. A post-copy is not given up like this: see [`Qemu::go_back`].
    ///
    /// A QEMU that is told, or whose stream breaks, while it comes to the end lets go of the disks for the destination, and has the guest run on
    /// without them (7.2): the guest's next write, or its next move, is QEMU's end then. So a guest that runs stands meanwhile, and `cont` takes
    /// the disks back in any case. Of one that QEMU had stopped already that may be a moment after it goes on.
    ///
    /// # Errors
    /// When QEMU does not.
    pub fn migrate_cancel(&self) -> Result<(), VmmError> {
        let deadline = Instant::now() + CANCEL;
        let mut ran = false;
        loop {
            let (status, state) = (self.migration()?.status, self.run_state()?);
            // One that has failed takes a moment until it lets the guest go.
            let is_over = status == MigrationStatus::Completed || state != "finish-migrate";
            if status != MigrationStatus::Active && is_over {
                // One that has ended well is not to run here by itself.
                if status != MigrationStatus::Completed && (ran || state == "running") {
                    self.execute("cont", Value::Null)?;
                }
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(VmmError::State { what: "give its migration up", state: "migrating".into() });
            }
            if state == "running" {
                ran = true;
                self.execute("stop", Value::Null)?;
            }
            self.execute("migrate_cancel", Value::Null)?;
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Makes the vCPUs run, with their disks, whatever a migration did to them. Where they run it only takes the disks back, if a migration that
    /// broke off has let go of them.
    ///
    /// # Errors
    /// When it is still waiting for a migration, or does not answer; [`VmmError::Stuck`].
    pub fn cont(&self) -> Result<(), VmmError> {
        match self.state()? {
            State::Running => return self.execute("cont", Value::Null).map(drop),
            State::Incoming => return Err(VmmError::State { what: "run", state: "inmigrate".into() }),
            State::Stopped | State::Postmigrate => {}
        }
        // A destination's post-copy is not given up: its guest goes on while pages come.
        if !self.is_arriving()? {
            self.go_back()?;
            self.let_go();
        }
        self.execute("cont", Value::Null).map(drop)
    }

    /// Whether it is the destination of a post-copy that is not over.
    ///
    /// # Errors
    /// When its monitor does not answer.
    pub fn is_arriving(&self) -> Result<bool, VmmError> {
        let said = self.execute("query-migrate", Value::Null)?;
        let status = MigrationStatus::of(said["status"].as_str().unwrap_or_default());
        // A source tells of its RAM.
        Ok(matches!(status, MigrationStatus::Postcopy | MigrationStatus::Paused) && said.get("ram").is_none())
    }

    /// Has the guest's network cards announce themselves (RARP), a few times.
    ///
    /// # Errors
    /// When its monitor does not answer.
    pub fn announce_self(&self) -> Result<(), VmmError> {
        self.execute("announce-self", json!({"initial": 50, "max": 550, "rounds": 5, "step": 100})).map(drop)
    }

    /// Plugs CPUs in until there are `wanted`.
    ///
    /// # Errors
    /// When there is no room for so many.
    pub fn plug_vcpus(&self, wanted: u32) -> Result<(), VmmError> {
        let answer = self.execute("query-hotpluggable-cpus", Value::Null)?;
        let slots: Vec<&Value> = answer.as_array().into_iter().flatten().collect();
        let have = slots.iter().filter(|s| s.get("qom-path").is_some()).count();
        let missing = (wanted as usize).saturating_sub(have);
        // The list is from the last to the first.
        let free: Vec<_> = slots.iter().rev().filter(|s| s.get("qom-path").is_none()).take(missing).collect();
        if free.len() < missing {
            return Err(VmmError::Spec(format!(
                "{wanted} CPUs are wanted and {} fit; give --max-vcpus at creation",
                have + free.len()
            )));
        }
        for (i, slot) in free.into_iter().enumerate() {
            let mut device = slot["props"].as_object().cloned().unwrap_or_default();
            device.insert("driver".into(), slot["type"].clone());
            device.insert("id".into(), format!("cpu{}", have + i).into());
            self.execute("device_add", Value::Object(device))?;
        }
        Ok(())
    }

    /// The types of its devices, for a check against what can be moved.
    ///
    /// # Errors
    /// When its monitor does not answer.
    pub fn devices(&self) -> Result<Vec<String>, VmmError> {
        let mut found = vec![];
        for path in ["/machine/peripheral", "/machine/peripheral-anon"] {
            let list = self.execute("qom-list", json!({"path": path}))?;
            let types = list.as_array().into_iter().flatten().filter_map(|p| p["type"].as_str());
            found.extend(types.filter_map(|t| t.strip_prefix("child<")?.strip_suffix('>').map(str::to_owned)));
        }
        Ok(found)
    }

    /// Any QMP command, for operators: `{"execute": ..., "arguments": ...}`.
    ///
    /// # Errors
    /// What QEMU says.
    pub fn monitor(&self, command: Value) -> Result<Value, VmmError> {
        let name =
            command["execute"].as_str().ok_or_else(|| VmmError::Spec("a QMP command has a field `execute`".into()))?;
        self.execute(name, command.get("arguments").cloned().unwrap_or(Value::Null))
    }

    /// Ends it. Returns when the process is gone.
    pub fn quit(&self) {
        let asked = self.monitor.execute_within("quit", Value::Null, Duration::from_secs(2));
        if !matches!(asked, Ok(_) | Err(VmmError::Qmp(QmpError::Closed { .. }))) || !self.process.wait_gone(END) {
            self.process.kill();
            self.process.wait_gone(END);
        }
        let _ = std::fs::remove_file(pid_file(&self.placement));
        let _ = std::fs::remove_file(qmp_socket(&self.placement));
    }

    /// Lets go of its monitor, which takes one client at a time. Nothing but [`Qemu::kill`] works through this handle then.
    pub fn hang_up(&self) {
        self.monitor.hang_up();
    }

    /// Kills it, as a fault would.
    pub fn kill(&self) {
        self.process.kill();
        self.process.wait_gone(END);
    }
}

/// A path that means the same to QEMU, to this node and to the next one.
fn absolute(path: &Path) -> Result<PathBuf, VmmError> {
    std::path::absolute(path).map_err(io_error("find", path))
}

/// The last lines of a log.
fn tail(path: &Path) -> String {
    let bytes = std::fs::read(path).unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes[bytes.len().saturating_sub(1500)..]).into_owned();
    let lines: Vec<_> = text.lines().filter(|l| !l.trim().is_empty()).collect();
    lines[lines.len().saturating_sub(6)..].join("; ")
}

/// A socket for a migration: our end, and QEMU's.
fn outgoing() -> std::io::Result<(UnixStream, UnixStream)> {
    let (ours, theirs) = UnixStream::pair()?;
    rustix::net::sockopt::set_socket_send_buffer_size(&theirs, UNREAD)?;
    Ok((ours, theirs))
}
