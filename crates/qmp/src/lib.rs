//! A small client for QMP, QEMU's control protocol.
//!
//! QMP is JSON objects, one a line: a greeting, then replies in the order of the commands, with events in between at
//! any time. The [`Session`] is the protocol without I/O: bytes go in, replies and events come out. [`Qmp`] is the
//! blocking shell around it for a unix socket, with a reader thread of its own, because an event (STOP!) has to be
//! stamped with the time at which it arrived even while a command hangs: QEMU answers nothing during the last phase
//! of a migration, for seconds on a slow link, yet still sends events.
//!
//! What can go wrong: QEMU exits (every waiting command gets [`QmpError::Closed`]), a command is refused
//! ([`QmpError::Refused`], with QEMU's own words), a reply does not come in time ([`QmpError::Timeout`]; the session
//! stays usable and drops the late reply), an answer longer than [`MAX_LINE`] (skipped, whoever waits for it gets
//! [`QmpError::TooLong`], the session goes on), a QEMU that takes no commands (bounded by [`MAX_OUTSTANDING`], so that no
//! write blocks), a socket on which too many wait already (tried again, never waited for inside the kernel).

#![forbid(unsafe_code)]

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use serde_json::{Map, Value, json};
use std::collections::{HashMap, HashSet, VecDeque};
use std::io::{IoSlice, Read, Write};
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Longest line kept, in bytes. The longest that the node asks QEMU 7.2 for is `query-qmp-schema`'s 180 KiB; what an operator
/// asks for by hand may be longer, and is skipped.
pub const MAX_LINE: usize = 4 << 20;

/// Events kept for a reader that does not come; the oldest go first. A migration makes a few a second.
pub const MAX_EVENTS: usize = 65_536;

/// Commands that may be unanswered at a time, those given up included. A QEMU that hangs is asked every few seconds; this
/// many short lines fit its socket's buffer, so that a write never blocks.
pub const MAX_OUTSTANDING: usize = 128;

/// How a QEMU is to listen at a socket: what follows `unix:PATH` in `-qmp`. It waits for its first client there before it does anything else, and
/// that client is to come. One that comes while QEMU begins to listen finds two of its threads at the door (until 10.2), of which one then
/// waits for a second client for ever, and no command is answered.
pub const LISTENS: &str = ",server=on,wait=on";

/// How much of a line that is too long is looked at, to tell a reply from an event: QEMU begins with `return` or `timestamp`.
const HEAD: usize = 32;

/// What can go wrong with a command.
#[derive(Debug, thiserror::Error)]
pub enum QmpError {
    /// No connection to QEMU's socket.
    #[error("cannot connect to QEMU at {path}: {source}; is it running, and was it started with this -qmp socket?")]
    Connect {
        /// The socket.
        path: String,
        /// Why not.
        source: std::io::Error,
    },
    /// QEMU refused the command.
    #[error("QEMU refused `{command}`: {class}: {desc}")]
    Refused {
        /// The command.
        command: String,
        /// QMP error class.
        class: String,
        /// QEMU's words.
        desc: String,
    },
    /// QEMU closed the connection, by exiting as a rule.
    #[error("QEMU closed its control socket while `{command}` waited; look at its log for why it exited")]
    Closed {
        /// The command that waited.
        command: String,
    },
    /// No answer in time.
    #[error("QEMU did not answer `{command}` within {seconds:.1} s")]
    Timeout {
        /// The command.
        command: String,
        /// How long was waited.
        seconds: f64,
    },
    /// The answer was longer than is kept.
    #[error("QEMU's answer to `{command}` has {bytes} bytes, and at most {MAX_LINE} are kept; ask for less")]
    TooLong {
        /// The command.
        command: String,
        /// How long the answer was.
        bytes: usize,
    },
    /// QEMU has not answered for long, and is not asked any more until it does.
    #[error("QEMU owes {outstanding} answers and was not asked `{command}`; it hangs, or is stopped")]
    Busy {
        /// The command.
        command: String,
        /// Commands without an answer.
        outstanding: usize,
    },
    /// What came is not QMP.
    #[error("not QMP: {0}")]
    Protocol(String),
}

/// Something that QEMU sent.
#[derive(Clone, Debug, PartialEq)]
pub enum Message {
    /// The greeting, with version and capabilities.
    Greeting(Value),
    /// The answer to the command with this id.
    Reply {
        /// The id that the command carried.
        id: u64,
        /// `return`, or class and description of the error.
        result: Result<Value, (String, String)>,
    },
    /// An event.
    Event {
        /// Its name: `STOP`, `MIGRATION`, ...
        name: String,
        /// Its data, an empty object where QEMU sent none.
        data: Value,
        /// When it happened, by QEMU's clock: microseconds since 1970; 0 where QEMU did not say.
        unix_us: u64,
    },
    /// The answer to the oldest command without one was longer than [`MAX_LINE`], and was skipped.
    Oversized {
        /// How long it was.
        bytes: usize,
    },
}

/// The protocol without I/O.
///
/// `handle_*` takes what arrived; `poll_message` yields what it meant, until `None`.
#[derive(Debug, Default)]
pub struct Session {
    buffer: Vec<u8>,
    /// How much of `buffer` is known to hold no newline, so that a long line is not scanned over and over.
    scanned: usize,
    /// A line that is too long: how much of it was thrown away, and whether it is a reply.
    skipping: Option<(usize, bool)>,
    next_id: u64,
}

impl Session {
    /// The line to send for a command, and the id under which its reply will come.
    pub fn command(&mut self, name: &str, arguments: Value) -> (u64, Vec<u8>) {
        self.next_id += 1;
        let mut object = Map::new();
        object.insert("execute".into(), name.into());
        if !arguments.is_null() {
            object.insert("arguments".into(), arguments);
        }
        object.insert("id".into(), self.next_id.into());
        let mut line = Value::Object(object).to_string().into_bytes();
        line.push(b'\n');
        (self.next_id, line)
    }

    /// Bytes arrived. What they mean is to be polled for before the next ones are handed in: that is what bounds the memory.
    pub fn handle_bytes(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// The next message, if a whole one is there.
    ///
    /// # Errors
    /// [`QmpError::Protocol`] for a line that is not a QMP object.
    pub fn poll_message(&mut self) -> Result<Option<Message>, QmpError> {
        loop {
            let Some(end) = self.buffer[self.scanned..].iter().position(|b| *b == b'\n') else {
                self.scanned = self.buffer.len();
                if self.skipping.is_some() || self.buffer.len() > MAX_LINE {
                    self.skip(self.scanned);
                }
                return Ok(None);
            };
            let end = self.scanned + end + 1;
            if self.skipping.is_some() || end > MAX_LINE {
                self.skip(end);
                // An event is lost, as one is that falls into a reconnection; QEMU has none of this length.
                if let Some((bytes, true)) = self.skipping.take() {
                    return Ok(Some(Message::Oversized { bytes }));
                }
                continue;
            }
            let line: Vec<u8> = self.buffer.drain(..end).collect();
            self.scanned = 0;
            if !line.iter().all(u8::is_ascii_whitespace) {
                return parse(&line).map(Some);
            }
        }
    }

    /// Throws away so many bytes of a line that is too long.
    fn skip(&mut self, bytes: usize) {
        let head = &self.buffer[..bytes.min(HEAD)];
        let (skipped, is_reply) = self.skipping.unwrap_or((0, !head.windows(11).any(|w| w == b"\"timestamp\"")));
        self.skipping = Some((skipped + bytes, is_reply));
        self.buffer.drain(..bytes);
        self.scanned = 0;
    }
}

fn parse(line: &[u8]) -> Result<Message, QmpError> {
    let value: Value = serde_json::from_slice(line).map_err(|e| QmpError::Protocol(e.to_string()))?;
    let text = |v: &Value, key: &str| v.get(key).and_then(Value::as_str).unwrap_or_default().to_owned();
    if let Some(greeting) = value.get("QMP") {
        return Ok(Message::Greeting(greeting.clone()));
    }
    if let Some(name) = value.get("event").and_then(Value::as_str) {
        let data = value.get("data").cloned().unwrap_or_else(|| json!({}));
        let part = |key: &str| value["timestamp"][key].as_u64().unwrap_or(0);
        let unix_us = part("seconds").saturating_mul(1_000_000).saturating_add(part("microseconds"));
        return Ok(Message::Event { name: name.to_owned(), data, unix_us });
    }
    // Replies to lines that QEMU could not parse carry no id; 0 is never used for a command.
    let id = value.get("id").and_then(Value::as_u64).unwrap_or(0);
    if let Some(error) = value.get("error") {
        return Ok(Message::Reply { id, result: Err((text(error, "class"), text(error, "desc"))) });
    }
    match value.get("return") {
        Some(result) => Ok(Message::Reply { id, result: Ok(result.clone()) }),
        None => {
            Err(QmpError::Protocol(format!("neither reply nor event: {}", String::from_utf8_lossy(line).trim_end())))
        }
    }
}

/// An event and when it arrived.
#[derive(Clone, Debug)]
pub struct Event {
    /// When its bytes were read.
    pub at: Instant,
    /// Its name.
    pub name: String,
    /// Its data.
    pub data: Value,
    /// When it happened, by QEMU's clock: microseconds since 1970.
    pub unix_us: u64,
}

/// A blocking connection to one QEMU.
///
/// Clones share the connection; commands of several threads may be under way at once.
#[derive(Clone, Debug)]
pub struct Qmp {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    writer: Mutex<(Session, UnixStream)>,
    inbox: Mutex<Inbox>,
    arrived: Condvar,
}

#[derive(Debug, Default)]
struct Inbox {
    replies: HashMap<u64, Answer>,
    /// Commands that QEMU has not answered, in the order in which it will.
    outstanding: VecDeque<u64>,
    /// Commands that somebody waits for; a reply to any other id is late and dropped.
    awaited: HashSet<u64>,
    events: Vec<Event>,
    /// Events dropped from the front, so that [`EventMark`]s stay true.
    dropped: usize,
    closed: bool,
}

/// What became of a command.
#[derive(Debug)]
enum Answer {
    Is(Result<Value, (String, String)>),
    TooLong { bytes: usize },
}

/// A position in the stream of events: "from now on".
#[derive(Clone, Copy, Debug)]
pub struct EventMark(usize);

impl EventMark {
    /// Where a connection's stream of events begins.
    pub const BEGINNING: Self = Self(0);
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Qmp {
    /// Connects to a QMP unix socket and negotiates capabilities, trying until `timeout` has passed (QEMU may be
    /// just starting).
    ///
    /// # Errors
    /// [`QmpError::Connect`] when nobody listens, [`QmpError::Timeout`] or [`QmpError::Closed`] when no greeting came.
    pub fn connect(path: &Path, timeout: Duration) -> Result<Self, QmpError> {
        let deadline = Instant::now() + timeout;
        loop {
            match open(path) {
                Ok(stream) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    return Self::start(stream, left.max(Duration::from_secs(1)));
                }
                Err(source) if Instant::now() >= deadline => return Err(refused(path, source)),
                Err(_) => std::thread::sleep(Duration::from_millis(10)),
            }
        }
    }

    /// Connects if somebody listens now, and waits up to `patience` for their greeting: QEMU takes one client at a time, and
    /// greets the next one when the last has left.
    ///
    /// # Errors
    /// As [`Qmp::connect`].
    pub fn connect_once(path: &Path, patience: Duration) -> Result<Self, QmpError> {
        Self::start(open(path).map_err(|source| refused(path, source))?, patience)
    }

    /// Takes over a connected stream: starts the reader and leaves negotiation mode.
    ///
    /// # Errors
    /// As [`Qmp::connect`].
    pub fn start(stream: UnixStream, timeout: Duration) -> Result<Self, QmpError> {
        let refuse = |source| QmpError::Connect { path: "(an open socket)".into(), source };
        let reader = stream.try_clone().map_err(refuse)?;
        let shared = Arc::new(Shared {
            writer: Mutex::new((Session::default(), stream)),
            inbox: Mutex::default(),
            arrived: Condvar::new(),
        });
        let weak = Arc::downgrade(&shared);
        std::thread::Builder::new()
            .name("qmp-reader".into())
            .spawn(move || {
                let mut reader = reader;
                let mut session = Session::default();
                let mut chunk = [0; 16_384];
                loop {
                    let read = reader.read(&mut chunk);
                    let at = Instant::now();
                    let Some(shared) = weak.upgrade() else { return };
                    let fine = matches!(read, Ok(n) if n > 0 && shared.take_in(&mut session, &chunk[..n], at));
                    if !fine {
                        lock(&shared.inbox).closed = true;
                        shared.arrived.notify_all();
                        return;
                    }
                    shared.arrived.notify_all();
                }
            })
            .map_err(refuse)?;
        let qmp = Self { shared };
        // QEMU takes commands only after its greeting, but queues what was sent before: no need to wait for it.
        qmp.execute_within("qmp_capabilities", Value::Null, timeout)?;
        Ok(qmp)
    }

    /// Runs a command, waiting up to 60 s for its answer.
    ///
    /// # Errors
    /// [`QmpError`], naming the command.
    pub fn execute(&self, command: &str, arguments: Value) -> Result<Value, QmpError> {
        self.execute_within(command, arguments, Duration::from_secs(60))
    }

    /// Runs a command, waiting up to `timeout` for its answer.
    ///
    /// # Errors
    /// [`QmpError`], naming the command.
    pub fn execute_within(&self, command: &str, arguments: Value, timeout: Duration) -> Result<Value, QmpError> {
        self.execute_passing(command, arguments, None, timeout)
    }

    /// As [`Qmp::execute_within`], and passes a file descriptor along, as `getfd` wants it.
    ///
    /// # Errors
    /// As there.
    pub fn execute_passing(
        &self,
        command: &str,
        arguments: Value,
        passed: Option<BorrowedFd<'_>>,
        timeout: Duration,
    ) -> Result<Value, QmpError> {
        let closed = || QmpError::Closed { command: command.to_owned() };
        let id = {
            let mut writer = lock(&self.shared.writer);
            let (id, line) = writer.0.command(command, arguments);
            {
                let mut inbox = lock(&self.shared.inbox);
                let outstanding = inbox.outstanding.len();
                if outstanding >= MAX_OUTSTANDING {
                    return Err(QmpError::Busy { command: command.to_owned(), outstanding });
                }
                inbox.awaited.insert(id);
                inbox.outstanding.push_back(id);
            }
            let sent = send_with(&writer.1, &line, passed).map_err(|_| closed())?;
            writer.1.write_all(&line[sent..]).map_err(|_| closed())?;
            id
        };
        let deadline = Instant::now() + timeout;
        let mut inbox = lock(&self.shared.inbox);
        loop {
            let command = || command.to_owned();
            match inbox.replies.remove(&id) {
                Some(Answer::Is(result)) => {
                    return result.map_err(|(class, desc)| QmpError::Refused { command: command(), class, desc });
                }
                Some(Answer::TooLong { bytes }) => return Err(QmpError::TooLong { command: command(), bytes }),
                None => {}
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if inbox.closed || left.is_zero() {
                inbox.awaited.remove(&id);
                return Err(match inbox.closed {
                    true => closed(),
                    false => QmpError::Timeout { command: command(), seconds: timeout.as_secs_f64() },
                });
            }
            inbox = self.shared.arrived.wait_timeout(inbox, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// The present position in the stream of events.
    #[must_use]
    pub fn mark(&self) -> EventMark {
        let inbox = lock(&self.shared.inbox);
        EventMark(inbox.dropped + inbox.events.len())
    }

    /// All events since `mark` that are still kept, oldest first.
    #[must_use]
    pub fn events_since(&self, mark: EventMark) -> Vec<Event> {
        let inbox = lock(&self.shared.inbox);
        inbox.events[mark.0.saturating_sub(inbox.dropped).min(inbox.events.len())..].to_vec()
    }

    /// All events since `mark` that are still kept, oldest first, and the position behind them: none is missed between two calls.
    #[must_use]
    pub fn take_since(&self, mark: EventMark) -> (Vec<Event>, EventMark) {
        let inbox = lock(&self.shared.inbox);
        let from = mark.0.saturating_sub(inbox.dropped).min(inbox.events.len());
        (inbox.events[from..].to_vec(), EventMark(inbox.dropped + inbox.events.len()))
    }

    /// Waits for the first event since `mark` that `wanted` accepts; `None` at the deadline or when QEMU is gone.
    pub fn wait_event(
        &self,
        mark: EventMark,
        deadline: Instant,
        mut wanted: impl FnMut(&Event) -> bool,
    ) -> Option<Event> {
        let mut next = mark.0;
        let mut inbox = lock(&self.shared.inbox);
        loop {
            let from = next.saturating_sub(inbox.dropped).min(inbox.events.len());
            if let Some(found) = inbox.events[from..].iter().find(|e| wanted(e)) {
                return Some(found.clone());
            }
            next = inbox.dropped + inbox.events.len();
            let left = deadline.saturating_duration_since(Instant::now());
            if inbox.closed || left.is_zero() {
                return None;
            }
            inbox = self.shared.arrived.wait_timeout(inbox, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Ends the connection, for all its clones: QEMU takes another client then.
    pub fn hang_up(&self) {
        // Where it is closed already there is nothing to do.
        let _ = lock(&self.shared.writer).1.shutdown(std::net::Shutdown::Both);
    }

    /// Whether QEMU has closed the connection.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        lock(&self.shared.inbox).closed
    }
}

/// Connects without waiting. A blocking connect to a QEMU that hangs would wait inside the kernel, for as long as it
/// hangs, once its queue of clients is full.
/// Sends the beginning of `line` together with the descriptor, if there is one: how much of it went.
fn send_with(stream: &UnixStream, line: &[u8], passed: Option<BorrowedFd<'_>>) -> std::io::Result<usize> {
    let Some(passed) = passed else { return Ok(0) };
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let fds = [passed];
    ancillary.push(SendAncillaryMessage::ScmRights(&fds));
    Ok(rustix::net::sendmsg(stream, &[IoSlice::new(line)], &mut ancillary, SendFlags::NOSIGNAL)?)
}

fn open(path: &Path) -> std::io::Result<UnixStream> {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    let stream = UnixStream::from(socket);
    stream.set_nonblocking(false)?;
    Ok(stream)
}

fn refused(path: &Path, source: std::io::Error) -> QmpError {
    QmpError::Connect { path: path.display().to_string(), source }
}

impl Inbox {
    fn answered(&mut self, id: u64, answer: Answer) {
        self.outstanding.retain(|o| *o != id);
        if self.awaited.remove(&id) {
            self.replies.insert(id, answer);
        }
    }
}

impl Shared {
    /// Sorts in what arrived; false when it is not QMP.
    fn take_in(&self, session: &mut Session, bytes: &[u8], at: Instant) -> bool {
        session.handle_bytes(bytes);
        let mut inbox = lock(&self.inbox);
        loop {
            match session.poll_message() {
                Ok(None) => return true,
                Ok(Some(Message::Greeting(_))) => {}
                Ok(Some(Message::Reply { id, result })) => {
                    inbox.answered(id, Answer::Is(result));
                }
                Ok(Some(Message::Oversized { bytes })) => {
                    if let Some(oldest) = inbox.outstanding.front().copied() {
                        inbox.answered(oldest, Answer::TooLong { bytes });
                    }
                }
                Ok(Some(Message::Event { name, data, unix_us })) => {
                    if inbox.events.len() == MAX_EVENTS {
                        inbox.events.drain(..MAX_EVENTS / 2);
                        inbox.dropped += MAX_EVENTS / 2;
                    }
                    inbox.events.push(Event { at, name, data, unix_us });
                }
                Err(_) => return false,
            }
        }
    }
}

/// Closing the last clone ends the connection and, with it, the reader thread.
impl Drop for Shared {
    fn drop(&mut self) {
        let writer = self.writer.get_mut().unwrap_or_else(PoisonError::into_inner);
        // An error means that it is closed already.
        let _ = writer.1.shutdown(std::net::Shutdown::Both);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::io::{BufRead, BufReader};

    fn collect(session: &mut Session) -> Vec<Message> {
        std::iter::from_fn(|| session.poll_message().unwrap()).collect()
    }

    #[test]
    fn messages_come_out_whole_however_the_bytes_arrive() {
        let text = b"{\"QMP\": {\"version\": 1}}\r\n{\"return\": {}, \"id\": 1}\r\n\
            {\"timestamp\": {\"seconds\": 1}, \"event\": \"STOP\"}\r\n\
            {\"id\": 2, \"error\": {\"class\": \"GenericError\", \"desc\": \"no\"}}\r\n";
        let mut whole = Session::default();
        whole.handle_bytes(text);
        let expected = collect(&mut whole);
        assert_eq!(expected.len(), 4);
        let stop = Message::Event { name: "STOP".into(), data: json!({}), unix_us: 1_000_000 };
        assert_eq!(expected[2], stop);
        assert_eq!(expected[3], Message::Reply { id: 2, result: Err(("GenericError".into(), "no".into())) });

        let mut bytewise = Session::default();
        let mut got = vec![];
        for byte in text {
            bytewise.handle_bytes(&[*byte]);
            got.extend(collect(&mut bytewise));
        }
        assert_eq!(got, expected);
    }

    #[test]
    fn a_line_that_is_too_long_is_skipped_within_bounded_memory_and_the_next_one_is_read() {
        let mut session = Session::default();
        let chunk = vec![b'x'; 16_384];
        session.handle_bytes(b"{\"return\": \"");
        let mut fed = 12;
        while fed < 3 * MAX_LINE {
            session.handle_bytes(&chunk);
            fed += chunk.len();
            assert_eq!(session.poll_message().unwrap(), None);
            assert!(session.buffer.len() <= MAX_LINE + chunk.len());
        }
        session.handle_bytes(b"\"}\n{\"return\": 7, \"id\": 2}\n");
        let next = Message::Reply { id: 2, result: Ok(7.into()) };
        assert_eq!(collect(&mut session), [Message::Oversized { bytes: fed + 3 }, next]);
    }

    #[test]
    fn an_answer_that_is_too_long_fails_its_own_command_and_the_session_goes_on() {
        let qmp = Qmp::start(
            fake(|command, stream| match command["execute"].as_str().unwrap() {
                "late" => {}
                "big" => {
                    let big = "x".repeat(MAX_LINE);
                    // The one that was given up is answered first, as QEMU does.
                    writeln!(stream, "{}", json!({"return": {}, "id": 2})).unwrap();
                    writeln!(stream, "{}", json!({"return": big, "id": command["id"]})).unwrap();
                }
                _ => reply(command, stream),
            }),
            Duration::from_secs(60),
        )
        .unwrap();
        let late = qmp.execute_within("late", Value::Null, Duration::from_millis(20));
        assert!(matches!(late, Err(QmpError::Timeout { .. })));
        assert!(matches!(qmp.execute("big", Value::Null), Err(QmpError::TooLong { .. })));
        assert_eq!(qmp.execute("cont", Value::Null).unwrap()["did"], "cont");
        assert!(!qmp.is_closed());
    }

    #[test]
    fn a_qemu_that_answers_nothing_is_not_asked_without_bound() {
        let qmp = Qmp::start(
            fake(|command, stream| {
                if command["execute"] == "qmp_capabilities" {
                    reply(command, stream);
                }
            }),
            Duration::from_secs(60),
        )
        .unwrap();
        for _ in 0..MAX_OUTSTANDING {
            let hanging = qmp.execute_within("query-status", Value::Null, Duration::ZERO);
            assert!(matches!(hanging, Err(QmpError::Timeout { .. })));
        }
        assert!(matches!(qmp.execute("query-status", Value::Null), Err(QmpError::Busy { .. })));
    }

    #[test]
    fn a_full_queue_of_clients_does_not_hold_the_next_one_up() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("qmp.sock");
        let listener =
            rustix::net::socket(rustix::net::AddressFamily::UNIX, rustix::net::SocketType::STREAM, None).unwrap();
        rustix::net::bind(&listener, &rustix::net::SocketAddrUnix::new(&path).unwrap()).unwrap();
        // As QEMU's.
        rustix::net::listen(&listener, 1).unwrap();
        let began = Instant::now();
        let mut clients = vec![];
        let full = loop {
            match open(&path) {
                Ok(client) => clients.push(client),
                Err(error) => break error,
            }
        };
        assert_eq!(full.kind(), std::io::ErrorKind::WouldBlock);
        assert!(matches!(Qmp::connect_once(&path, Duration::from_secs(120)), Err(QmpError::Connect { .. })));
        assert!(began.elapsed() < Duration::from_secs(60), "it was waited for");
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..4096)) {
            let mut session = Session::default();
            session.handle_bytes(&bytes);
            while let Ok(Some(_)) = session.poll_message() {}
        }
    }

    /// A QEMU of a few lines: answers each command by `answer`.
    fn fake(answer: impl Fn(&Value, &mut UnixStream) + Send + 'static) -> UnixStream {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        std::thread::spawn(move || {
            theirs.write_all(b"{\"QMP\": {}}\r\n").unwrap();
            let reader = BufReader::new(theirs.try_clone().unwrap());
            for line in reader.lines().map_while(Result::ok) {
                answer(&serde_json::from_str(&line).unwrap(), &mut theirs);
            }
        });
        ours
    }

    fn reply(to: &Value, stream: &mut UnixStream) {
        writeln!(stream, "{}", json!({"return": {"did": to["execute"]}, "id": to["id"]})).unwrap();
    }

    #[test]
    fn events_are_stamped_while_a_command_hangs() {
        let qmp = Qmp::start(
            fake(|command, stream| match command["execute"].as_str().unwrap() {
                "query-migrate" => writeln!(stream, "{{\"event\": \"STOP\"}}").unwrap(),
                _ => reply(command, stream),
            }),
            Duration::from_secs(60),
        )
        .unwrap();
        let mark = qmp.mark();
        let hanging = qmp.execute_within("query-migrate", Value::Null, Duration::from_millis(50));
        assert!(matches!(hanging, Err(QmpError::Timeout { .. })));
        let stop = qmp.wait_event(mark, Instant::now() + Duration::from_secs(60), |e| e.name == "STOP");
        assert!(stop.is_some());
        assert_eq!(qmp.execute("cont", Value::Null).unwrap()["did"], "cont");
    }

    #[test]
    fn a_dead_qemu_ends_every_wait() {
        let qmp = Qmp::start(
            fake(|command, stream| match command["execute"].as_str().unwrap() {
                "quit" => stream.shutdown(std::net::Shutdown::Both).unwrap(),
                _ => reply(command, stream),
            }),
            Duration::from_secs(60),
        )
        .unwrap();
        let mark = qmp.mark();
        assert!(matches!(qmp.execute("quit", Value::Null), Err(QmpError::Closed { .. })));
        assert!(qmp.wait_event(mark, Instant::now() + Duration::from_secs(60), |_| true).is_none());
        assert!(qmp.is_closed());
    }

    #[test]
    fn a_refusal_carries_qemus_own_words() {
        let qmp = Qmp::start(
            fake(|command, stream| match command["execute"].as_str().unwrap() {
                "migrate" => {
                    let error = json!({"class": "GenericError", "desc": "disk is busy"});
                    writeln!(stream, "{}", json!({"error": error, "id": command["id"]})).unwrap();
                }
                _ => reply(command, stream),
            }),
            Duration::from_secs(60),
        )
        .unwrap();
        let error = qmp.execute("migrate", json!({"uri": "x"})).unwrap_err();
        assert_eq!(error.to_string(), "QEMU refused `migrate`: GenericError: disk is busy");
    }
}
