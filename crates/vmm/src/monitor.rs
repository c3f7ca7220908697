//! A QEMU's monitor for as long as the QEMU lives, through connections that come and go.
//!
//! A connection ends for other reasons than its QEMU: what came was not QMP, an operator took the socket, a QEMU that was
//! stopped (or stops a guest) greets nobody for minutes. None of these says anything about the guest. So a thread of its own keeps
//! trying, at a bounded pace, until the *process* is gone, and whoever asks meanwhile is told why there is no answer.
//!
//! Events that fell into a gap are lost to QMP. What they would have said is asked for after each connection
//! (`query-status`, `query-migrate`), and told where it differs from what was told last ([`Told`]).

use crate::error::{VmmError, io_error};
use crate::process::Process;
use crate::qemu::{MigrationStatus, QemuEvent};
use godwit_qmp::{Event, EventMark, Qmp};
use serde_json::Value;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// How long an ordinary command may take.
pub(crate) const ORDINARY: Duration = Duration::from_secs(10);
/// How long a command waits for a connection that is being made again. A QEMU that is well greets within milliseconds.
const RELINK: Duration = Duration::from_secs(1);
/// How long a connection waits for QEMU's greeting. Longer than a stop takes as a rule: who hangs up loses their place.
const PATIENCE: Duration = Duration::from_secs(20);
/// The first wait between two connections.
const FIRST_PAUSE: Duration = Duration::from_millis(4);
/// The longest, and how long a connection has to last before the first is in order again.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// How often a wait looks whether the process is still there.
const LOOK: Duration = Duration::from_millis(10);
/// How long the answer to what was missed is waited for, and how long it is left before it is asked again: events wait meanwhile.
const ASK_AGAIN: Duration = Duration::from_secs(1);
/// A wait without end, in parts.
const LONG: Duration = Duration::from_secs(3600);

/// A QEMU's monitor. Clones share it; the last one closes it.
#[derive(Clone, Debug)]
pub(crate) struct Monitor {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    process: Process,
    link: Mutex<Link>,
    changed: Condvar,
}

#[derive(Debug)]
struct Link {
    qmp: Option<Qmp>,
    /// Connections so far.
    number: u64,
    /// Why there is none.
    why: String,
    /// No more are made.
    over: bool,
}

impl Shared {
    fn link(&self) -> MutexGuard<'_, Link> {
        self.link.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, change: impl FnOnce(&mut Link)) {
        change(&mut self.link());
        self.changed.notify_all();
    }
}

/// What the last clone leaves is a connection that its keeper waits on.
impl Drop for Shared {
    fn drop(&mut self) {
        if let Some(qmp) = &self.link.get_mut().unwrap_or_else(PoisonError::into_inner).qmp {
            qmp.hang_up();
        }
    }
}

impl Monitor {
    /// Begins to connect to a process's socket, and goes on until the process is gone.
    pub fn open(process: Process, socket: &Path) -> Result<Self, VmmError> {
        let link = Link { qmp: None, number: 0, why: "it has not answered yet".into(), over: false };
        let shared = Arc::new(Shared { process, link: Mutex::new(link), changed: Condvar::new() });
        let (weak, socket) = (Arc::downgrade(&shared), socket.to_owned());
        let path = socket.clone();
        let keeper = std::thread::Builder::new().name("qemu-monitor".into());
        keeper.spawn(move || keep(&weak, process, &socket)).map_err(io_error("watch", &path))?;
        Ok(Self { shared })
    }

    /// Waits for a connection.
    ///
    /// # Errors
    /// Why there is none.
    pub fn wait_up(&self, within: Duration) -> Result<Qmp, VmmError> {
        let deadline = Instant::now() + within;
        let mut link = self.shared.link();
        loop {
            if let Some(qmp) = link.qmp.as_ref().filter(|q| !q.is_closed()) {
                return Ok(qmp.clone());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if link.over || left.is_zero() {
                return Err(VmmError::Unreachable { pid: self.shared.process.pid, why: link.why.clone() });
            }
            link = self.shared.changed.wait_timeout(link, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Why there is no connection, where there is none.
    pub fn unreachable(&self) -> Option<String> {
        let link = self.shared.link();
        link.qmp.as_ref().is_none_or(Qmp::is_closed).then(|| link.why.clone())
    }

    pub fn execute_within(&self, command: &str, arguments: Value, within: Duration) -> Result<Value, VmmError> {
        Ok(self.wait_up(within.min(RELINK))?.execute_within(command, arguments, within)?)
    }

    /// As [`Monitor::execute_within`], and passes a descriptor along.
    pub fn execute_passing(
        &self,
        command: &str,
        arguments: Value,
        passed: BorrowedFd<'_>,
        within: Duration,
    ) -> Result<Value, VmmError> {
        Ok(self.wait_up(within.min(RELINK))?.execute_passing(command, arguments, Some(passed), within)?)
    }

    /// Ends the connection, and makes no other.
    pub fn hang_up(&self) {
        let qmp = self.shared.link().qmp.clone();
        self.shared.change(|link| {
            link.over = true;
            link.why = "this node has let go of it".into();
        });
        if let Some(qmp) = qmp {
            qmp.hang_up();
        }
    }

    /// The connection after this one, when there is one; `None` when there will be none.
    fn after(&self, number: u64) -> Option<(u64, Qmp)> {
        let mut link = self.shared.link();
        loop {
            if let Some(qmp) = link.qmp.as_ref().filter(|_| link.number > number) {
                return Some((link.number, qmp.clone()));
            }
            if link.over {
                return None;
            }
            link = self.shared.changed.wait(link).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Tells what the QEMU says of itself, and has said over the present connection, in a thread of its own, which ends with the process.
    pub fn watch(&self, on: impl FnMut(QemuEvent) + Send + 'static) {
        let monitor = self.clone();
        let now = {
            let link = self.shared.link();
            link.qmp.clone().map(|qmp| (link.number, qmp))
        };
        std::thread::spawn(move || {
            let (mut told, mut on) = (Told::default(), on);
            let mut number = 0;
            if let Some((first, qmp)) = now {
                number = first;
                pump(&qmp, Missed::Nothing, &mut told, &mut on);
            }
            // Nobody keeps the connection open but the monitor.
            while let Some((next, qmp)) = monitor.after(number) {
                number = next;
                pump(&qmp, Missed::Perhaps, &mut told, &mut on);
            }
            // A guest is not killed for a monitor that was let go; without one it can run, and be told nothing.
            while !monitor.shared.process.wait_gone(LONG) {}
            on(QemuEvent::Gone);
        });
    }
}

fn keep(weak: &Weak<Shared>, process: Process, socket: &Path) {
    let mut pause = FIRST_PAUSE;
    loop {
        let Some(shared) = weak.upgrade().filter(|s| !s.link().over) else { return };
        if !process.is_alive() {
            shared.change(|link| {
                link.why = "its process has ended".into();
                link.over = true;
            });
            return;
        }
        // Whoever drops the last handle while this waits is not kept waiting.
        drop(shared);
        let connected = Qmp::connect_once(socket, PATIENCE);
        let Some(shared) = weak.upgrade() else { return };
        let why = match connected {
            Ok(qmp) => {
                let since = Instant::now();
                let mut refused = false;
                shared.change(|link| {
                    refused = link.over;
                    link.number += 1;
                    link.qmp = (!refused).then(|| qmp.clone());
                });
                drop(shared);
                if refused {
                    return;
                }
                // Its end closes the connection as a rule; the process is what counts.
                while !qmp.is_closed() && process.is_alive() {
                    let _ = qmp.wait_event(qmp.mark(), Instant::now() + LONGEST_PAUSE, |_| false);
                }
                // What was not QMP is not closed by QEMU.
                qmp.hang_up();
                if since.elapsed() > LONGEST_PAUSE {
                    pause = FIRST_PAUSE;
                }
                "its monitor closed the connection".to_owned()
            }
            Err(error) => {
                drop(shared);
                error.to_string()
            }
        };
        let Some(shared) = weak.upgrade() else { return };
        shared.change(|link| {
            link.qmp = None;
            if !link.over {
                link.why = why;
            }
        });
        drop(shared);
        process.wait_gone_looking(pause, LOOK.min(pause));
        pause = (pause * 5 / 4).min(LONGEST_PAUSE);
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Missed {
    Nothing,
    Perhaps,
}

/// What was told of a QEMU.
#[derive(Default)]
struct Told {
    running: Option<bool>,
    migration: Option<MigrationStatus>,
    /// Events that arrived before are known from what was asked then.
    asked: Option<Instant>,
}

/// Tells what a connection says, until it is closed.
fn pump(qmp: &Qmp, mut missed: Missed, told: &mut Told, on: &mut impl FnMut(QemuEvent)) {
    let mut mark = EventMark::BEGINNING;
    loop {
        if missed == Missed::Perhaps && told.catch_up(qmp, on).is_some() {
            missed = Missed::Nothing;
        }
        let wait = if missed == Missed::Perhaps { ASK_AGAIN } else { LONG };
        let _ = qmp.wait_event(mark, Instant::now() + wait, |_| true);
        // Asked before the events are taken: what came before the end is told before it.
        let closed = qmp.is_closed();
        let (events, behind) = qmp.take_since(mark);
        mark = behind;
        events.iter().filter_map(|e| told.event(e)).for_each(&mut *on);
        if closed {
            return;
        }
    }
}

impl Told {
    /// Asks what may have been missed, and tells it; `None` without an answer.
    fn catch_up(&mut self, qmp: &Qmp, on: &mut impl FnMut(QemuEvent)) -> Option<()> {
        let status = qmp.execute_within("query-status", Value::Null, ASK_AGAIN).ok()?;
        let migration = qmp.execute_within("query-migrate", Value::Null, ASK_AGAIN).ok()?;
        let (at, unix_us) = (Instant::now(), unix_us());
        let running = status["status"] == "running";
        if self.running != Some(running) {
            on(if running { QemuEvent::Resume { at, unix_us } } else { QemuEvent::Stop { at, unix_us } });
        }
        let migration = MigrationStatus::of(migration["status"].as_str().unwrap_or_default());
        if self.migration.unwrap_or(MigrationStatus::None) != migration {
            on(QemuEvent::Migration(migration));
        }
        *self = Self { running: Some(running), migration: Some(migration), asked: Some(at) };
        Some(())
    }

    /// An event, unless what it says was told already.
    fn event(&mut self, event: &Event) -> Option<QemuEvent> {
        let (at, unix_us) = (event.at, event.unix_us);
        let known = self.asked.is_some_and(|asked| at <= asked);
        Some(match event.name.as_str() {
            name @ ("STOP" | "RESUME") => {
                let running = name == "RESUME";
                if self.running.replace(running) == Some(running) && known {
                    return None;
                }
                if running { QemuEvent::Resume { at, unix_us } } else { QemuEvent::Stop { at, unix_us } }
            }
            "MIGRATION" => {
                let status = MigrationStatus::of(event.data["status"].as_str().unwrap_or_default());
                if self.migration.replace(status) == Some(status) && known {
                    return None;
                }
                QemuEvent::Migration(status)
            }
            "MIGRATION_PASS" => QemuEvent::Pass(event.data["pass"].as_u64().unwrap_or(0)),
            "BLOCK_IO_ERROR" if event.data["action"] == "stop" => QemuEvent::NoRoom,
            "SHUTDOWN" if event.data["guest"] == true => QemuEvent::PoweredOff,
            _ => return None,
        })
    }
}

fn unix_us() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::io::{BufRead, BufReader, Write};
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::process::{Child, Command};
    use std::sync::mpsc;

    const SOON: Duration = Duration::from_secs(60);

    /// A process that stands for a QEMU, and ends with the test.
    struct Stand(Child);

    impl Stand {
        fn new() -> (Self, Process) {
            let child = Command::new("sleep").arg("100").spawn().expect("sleep runs");
            let process = Process::now(child.id()).expect("is there");
            (Self(child), process)
        }
    }

    impl Drop for Stand {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    /// Serves one client: its state is `status`; ends when the client asks to `break`, by saying what is not QMP.
    fn serve(listener: &UnixListener, status: &str, events: &[&str]) -> UnixStream {
        let mut client = listener.accept().expect("a client").0;
        client.write_all(b"{\"QMP\": {}}\n").expect("greets");
        let reader = BufReader::new(client.try_clone().expect("clones"));
        for line in reader.lines().map_while(Result::ok) {
            let command: Value = serde_json::from_str(&line).expect("a command");
            let said = match command["execute"].as_str().expect("a name") {
                "query-status" => json!({"status": status}),
                "break" => {
                    client.write_all(b"this is not QMP\n").expect("says");
                    return client;
                }
                _ => json!({}),
            };
            if command["execute"] == "qmp_capabilities" {
                for event in events {
                    writeln!(client, "{}", json!({"event": event})).expect("says");
                }
            }
            writeln!(client, "{}", json!({"return": said, "id": command["id"]})).expect("answers");
        }
        client
    }

    #[test]
    fn a_monitor_that_breaks_is_connected_again_and_what_was_missed_is_made_up_for() {
        let folder = tempfile::tempdir().expect("a folder");
        let socket = folder.path().join("qmp.sock");
        let listener = UnixListener::bind(&socket).expect("binds");
        let server = std::thread::spawn(move || {
            // Nobody hangs up on the first client: what ends it is that it makes no sense.
            let kept = serve(&listener, "running", &[]);
            // A STOP in the gap, and one that comes while its consequence is asked for.
            serve(&listener, "postmigrate", &["STOP"]);
            drop(kept);
            listener
        });
        let (stand, process) = Stand::new();
        let monitor = Monitor::open(process, &socket).expect("opens");
        monitor.wait_up(SOON).expect("comes up");
        let (sender, told) = mpsc::channel();
        monitor.watch(move |event| sender.send(event).expect("is heard"));
        assert!(monitor.execute_within("break", Value::Null, SOON).is_err());
        let stop = told.recv_timeout(SOON).expect("what was missed is told");
        assert!(matches!(stop, QemuEvent::Stop { unix_us: 1.., .. }), "{stop:?}");
        assert_eq!(monitor.execute_within("query-status", Value::Null, SOON).expect("works")["status"], "postmigrate");
        drop(stand);
        assert_eq!(told.recv_timeout(SOON), Ok(QemuEvent::Gone), "the STOP is told once, and then the end");
        assert!(server.join().is_ok());
    }

    #[test]
    fn what_was_said_before_somebody_listened_is_told() {
        let folder = tempfile::tempdir().expect("a folder");
        let socket = folder.path().join("qmp.sock");
        let listener = UnixListener::bind(&socket).expect("binds");
        std::thread::spawn(move || serve(&listener, "paused", &["STOP"]));
        let (_stand, process) = Stand::new();
        let monitor = Monitor::open(process, &socket).expect("opens");
        // Asked behind the event, and so answered behind it.
        monitor.execute_within("query-status", Value::Null, SOON).expect("answers");
        let (sender, told) = mpsc::channel();
        monitor.watch(move |event| sender.send(event).expect("is heard"));
        assert!(matches!(told.recv_timeout(SOON), Ok(QemuEvent::Stop { .. })));
    }

    #[test]
    fn a_silent_monitor_is_waited_for_within_bounds_and_answers_when_it_can() {
        let folder = tempfile::tempdir().expect("a folder");
        let socket = folder.path().join("qmp.sock");
        let listener = UnixListener::bind(&socket).expect("binds");
        let (_stand, process) = Stand::new();
        let monitor = Monitor::open(process, &socket).expect("opens");
        let began = Instant::now();
        let error = monitor.execute_within("query-status", Value::Null, SOON).expect_err("nobody answers");
        assert!(matches!(error, VmmError::Unreachable { .. }), "{error}");
        assert!(monitor.unreachable().is_some());
        assert!(
            began.elapsed() < SOON,
            "it is the way there that is waited for, not the answer: {:?}",
            began.elapsed()
        );
        std::thread::spawn(move || serve(&listener, "running", &[]));
        monitor.wait_up(SOON).expect("it is tried for as long as the process is there");
        assert_eq!(monitor.unreachable(), None);
    }
}
