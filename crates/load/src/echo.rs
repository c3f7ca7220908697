//! The echo client: proves that one TCP session lives through a move, and measures for how long it fell silent.
//!
//! It sends small numbered messages at a fixed rate on one session and expects each of them back, byte for byte and in
//! order. [`Session`] is the protocol, without sockets or clock; [`EchoClient`] drives it over a stream.
//!
//! While the VM is stopped nothing comes back and, if it lasts, the kernel's buffers fill. The client keeps to its
//! schedule: messages that find [`MAX_BACKLOG`] unsent before them, or [`MAX_AWAITING`] unanswered, are skipped and
//! counted, not queued. A message of which the kernel took only a part is completed before the next begins.

use std::{
    collections::VecDeque,
    io::{self, Read, Write},
    net::TcpStream,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use crate::pace::Pacer;

/// Bytes of a message: magic, sequence number, time of sending (ns), xxh3 of these three; little-endian.
pub const MESSAGE_BYTES: usize = 32;

/// Most messages waiting to be taken by the kernel.
pub const MAX_BACKLOG: usize = 64;

/// Most messages whose echo is outstanding: 10 minutes at 100 a second.
pub const MAX_AWAITING: usize = 60_000;

/// Most round trips that a log keeps, 16 MiB: almost three hours at 100 a second. Beyond it the oldest are dropped, so
/// that a window in the recent past stays right.
pub const MAX_SAMPLES: usize = 1 << 20;

/// How long the client waits for outstanding echoes once it is told to stop.
pub const DRAIN_LIMIT: Duration = Duration::from_secs(10);

/// Longest sleep, so that a stop is noticed.
const LONGEST_SLEEP: Duration = Duration::from_millis(20);

const MAGIC: u64 = u64::from_le_bytes(*b"gdwtECHO");

/// How a session broke.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EchoError {
    /// A byte came back changed, or bytes went missing within a message.
    #[error(
        "byte {byte} of the echo of message {sequence} is {found:#04x} instead of {expected:#04x}: \
         the stream was altered, or bytes of it are missing"
    )]
    Altered {
        /// The message.
        sequence: u64,
        /// Byte within it.
        byte: usize,
        /// What was sent.
        expected: u8,
        /// What came back.
        found: u8,
    },
    /// Whole messages went missing.
    #[error("echo of message {found} came where message {expected} was due: messages are missing from the stream")]
    Missing {
        /// What was due.
        expected: u64,
        /// What came.
        found: u64,
    },
    /// A message came back a second time.
    #[error("echo of message {found} came again where message {expected} was due: bytes were repeated")]
    Repeated {
        /// What was due.
        expected: u64,
        /// What came.
        found: u64,
    },
    /// Bytes came although every message was answered.
    #[error("{bytes} bytes came back although nothing was outstanding: bytes were repeated or made up")]
    Unasked {
        /// How many.
        bytes: usize,
    },
    /// The peer closed the session.
    #[error("the peer closed the session with {awaiting} messages unanswered")]
    Closed {
        /// Messages without an echo.
        awaiting: usize,
    },
    /// The session broke.
    #[error("the session broke: {kind} ({awaiting} messages unanswered)")]
    Broken {
        /// The system's word for it, such as "connection reset".
        kind: io::ErrorKind,
        /// Messages without an echo.
        awaiting: usize,
    },
    /// At the end, echoes were still outstanding.
    #[error("{awaiting} messages were still unanswered {} s after the last was sent", waited.as_secs_f64())]
    Unanswered {
        /// Messages without an echo.
        awaiting: usize,
        /// How long they were waited for.
        waited: Duration,
    },
}

/// One round trip; times in seconds from the caller's origin.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct EchoSample {
    /// When the message was handed to the session.
    pub sent_at_s: f64,
    /// When its echo was complete.
    pub received_at_s: f64,
}

/// What a session came to, so far or in the end.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EchoReport {
    /// Messages sent.
    pub sent: u64,
    /// Echoes that came back right.
    pub received: u64,
    /// Messages that the schedule wanted but the bounds did not allow.
    pub skipped: u64,
    /// Nothing was wrong (while it runs: so far).
    pub session_ok: bool,
    /// What was wrong.
    pub error: Option<String>,
    /// Round trips in order; the last [`MAX_SAMPLES`] of them.
    pub samples: Vec<EchoSample>,
    /// Round trips dropped from the front of `samples`.
    pub samples_dropped: u64,
}

impl EchoReport {
    /// See [`longest_gap`].
    pub fn longest_gap(&self, from_s: f64, to_s: f64) -> Gap {
        longest_gap(self.samples.iter(), from_s, to_s)
    }
}

/// An interval without an echo.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Gap {
    /// Its length, ms.
    pub gap_ms: f64,
    /// When it began, seconds from the origin.
    pub at_s: f64,
}

/// The longest interval without an echo within `from_s..to_s`: between consecutive echoes, or between one and an edge
/// of the window. Without any echo it is the whole window; the first of equals is given.
pub fn longest_gap<'a>(samples: impl Iterator<Item = &'a EchoSample>, from_s: f64, to_s: f64) -> Gap {
    let inside = samples.map(|sample| sample.received_at_s).filter(|at| (from_s..=to_s).contains(at));
    let mut longest = Gap { gap_ms: 0.0, at_s: from_s };
    let mut last = from_s;
    for at in inside.chain([to_s]) {
        if (at - last) * 1e3 > longest.gap_ms {
            longest = Gap { gap_ms: (at - last) * 1e3, at_s: last };
        }
        last = at;
    }
    longest
}

/// The protocol: what to send, and whether what comes back is right. Times count from the caller's origin.
#[derive(Debug, Default)]
pub struct Session {
    next: u64,
    outgoing: VecDeque<u8>,
    awaiting: VecDeque<(u64, Duration)>,
    incoming: Vec<u8>,
}

/// What became of a message that was due.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Queued {
    /// It is on its way.
    Sent,
    /// A bound was reached; it was not made.
    Skipped,
}

impl Session {
    /// Messages without an echo.
    pub fn awaiting(&self) -> usize {
        self.awaiting.len()
    }

    /// Bytes that the kernel should take, or a part of them; see [`Self::took`].
    pub fn outgoing(&self) -> &[u8] {
        self.outgoing.as_slices().0
    }

    /// A message is due.
    pub fn queue(&mut self, now: Duration) -> Queued {
        if self.outgoing.len() > (MAX_BACKLOG - 1) * MESSAGE_BYTES || self.awaiting.len() >= MAX_AWAITING {
            return Queued::Skipped;
        }
        self.outgoing.extend(encode(self.next, now));
        self.awaiting.push_back((self.next, now));
        self.next += 1;
        Queued::Sent
    }

    /// The kernel took `bytes` of [`Self::outgoing`].
    pub fn took(&mut self, bytes: usize) {
        self.outgoing.drain(..bytes);
    }

    /// Bytes came back; `on_echo` is called with the time of sending of each message they complete.
    ///
    /// # Errors
    /// The first thing that is wrong with them. The session is of no use afterwards.
    pub fn receive(&mut self, mut bytes: &[u8], mut on_echo: impl FnMut(Duration)) -> Result<(), EchoError> {
        while !bytes.is_empty() {
            let Some(&(sequence, sent_at)) = self.awaiting.front() else {
                return Err(EchoError::Unasked { bytes: bytes.len() });
            };
            let (head, rest) = bytes.split_at(bytes.len().min(MESSAGE_BYTES - self.incoming.len()));
            self.incoming.extend_from_slice(head);
            bytes = rest;
            if self.incoming.len() < MESSAGE_BYTES {
                return Ok(());
            }
            let expected = encode(sequence, sent_at);
            if self.incoming != expected {
                return Err(self.diagnose(sequence, &expected));
            }
            self.incoming.clear();
            self.awaiting.pop_front();
            on_echo(sent_at);
        }
        Ok(())
    }

    fn diagnose(&self, sequence: u64, expected: &[u8; MESSAGE_BYTES]) -> EchoError {
        match decode(&self.incoming) {
            Some(found) if found > sequence => EchoError::Missing { expected: sequence, found },
            Some(found) if found < sequence => EchoError::Repeated { expected: sequence, found },
            _ => {
                let differs = expected.iter().zip(&self.incoming).position(|(expected, found)| expected != found);
                let byte = differs.expect("receive() calls this only when the messages differ");
                EchoError::Altered { sequence, byte, expected: expected[byte], found: self.incoming[byte] }
            }
        }
    }
}

fn encode(sequence: u64, sent_at: Duration) -> [u8; MESSAGE_BYTES] {
    let mut message = [0; MESSAGE_BYTES];
    message[..8].copy_from_slice(&MAGIC.to_le_bytes());
    message[8..16].copy_from_slice(&sequence.to_le_bytes());
    message[16..24].copy_from_slice(&(sent_at.as_nanos() as u64).to_le_bytes());
    let checksum = xxh3_64(&message[..24]);
    message[24..].copy_from_slice(&checksum.to_le_bytes());
    message
}

/// The sequence number of a message that is whole.
fn decode(message: &[u8]) -> Option<u64> {
    let word = |at: usize| Some(u64::from_le_bytes(message.get(at..at + 8)?.try_into().ok()?));
    (word(0)? == MAGIC && word(24)? == xxh3_64(&message[..24])).then(|| word(8))?
}

/// What a running client records; clones share it, so that it can be read meanwhile.
#[derive(Debug, Clone, Default)]
pub struct EchoLog(Arc<Mutex<Log>>);

#[derive(Debug, Default)]
struct Log {
    sent: u64,
    received: u64,
    skipped: u64,
    samples_dropped: u64,
    samples: VecDeque<EchoSample>,
    error: Option<EchoError>,
}

impl EchoLog {
    /// An empty log, for one session.
    pub fn new() -> Self {
        Self::default()
    }

    fn lock(&self) -> MutexGuard<'_, Log> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Everything so far. Copies the samples; [`Self::longest_gap`] does not.
    pub fn snapshot(&self) -> EchoReport {
        let log = self.lock();
        EchoReport {
            sent: log.sent,
            received: log.received,
            skipped: log.skipped,
            session_ok: log.error.is_none(),
            error: log.error.as_ref().map(ToString::to_string),
            samples: log.samples.iter().copied().collect(),
            samples_dropped: log.samples_dropped,
        }
    }

    /// See [`longest_gap`].
    pub fn longest_gap(&self, from_s: f64, to_s: f64) -> Gap {
        longest_gap(self.lock().samples.iter(), from_s, to_s)
    }

    /// When the last echo came, seconds from the origin.
    pub fn last_received_s(&self) -> Option<f64> {
        self.lock().samples.back().map(|sample| sample.received_at_s)
    }

    /// How the session broke, if it did.
    pub fn error(&self) -> Option<EchoError> {
        self.lock().error.clone()
    }

    fn note_queued(&self, queued: Queued) {
        let mut log = self.lock();
        match queued {
            Queued::Sent => log.sent += 1,
            Queued::Skipped => log.skipped += 1,
        }
    }

    fn note_echo(&self, sent_at: Duration, received_at: Duration) {
        let mut log = self.lock();
        log.received += 1;
        if log.samples.len() == MAX_SAMPLES {
            log.samples.pop_front();
            log.samples_dropped += 1;
        }
        log.samples
            .push_back(EchoSample { sent_at_s: sent_at.as_secs_f64(), received_at_s: received_at.as_secs_f64() });
    }
}

/// Sends echo messages at a rate until it is told to stop, or the session breaks.
#[derive(Debug, Clone, Copy)]
pub struct EchoClient {
    /// Messages per second.
    pub per_s: u32,
    /// How long to wait for outstanding echoes after the stop.
    pub drain_limit: Duration,
}

impl EchoClient {
    /// With [`DRAIN_LIMIT`].
    pub fn new(per_s: u32) -> Self {
        Self { per_s, drain_limit: DRAIN_LIMIT }
    }

    /// Runs in the calling thread. `origin` is the zero of all times; `log` can be read meanwhile and holds, in the
    /// end, what is returned. After `stop` is set, sends no more and waits for outstanding echoes, but no longer than
    /// `drain_limit`; echoes that are then still outstanding make the session not ok.
    pub fn run(&self, stream: TcpStream, origin: Instant, stop: &AtomicBool, log: &EchoLog) -> EchoReport {
        if let Err(error) = self.drive(&stream, origin, stop, log) {
            log.lock().error = Some(error);
        }
        log.snapshot()
    }

    fn drive(&self, stream: &TcpStream, origin: Instant, stop: &AtomicBool, log: &EchoLog) -> Result<(), EchoError> {
        let mut session = Session::default();
        let broken = |error: io::Error, awaiting| EchoError::Broken { kind: error.kind(), awaiting };
        stream.set_nonblocking(true).map_err(|error| broken(error, 0))?;
        // Without it echoes are late, which the samples show.
        let _ = stream.set_nodelay(true);
        let mut pacer = Pacer::new(self.per_s.into(), origin.elapsed());
        let mut stopped_at = None;
        loop {
            let now = origin.elapsed();
            if stopped_at.is_none() && stop.load(Relaxed) {
                stopped_at = Some(now);
            }
            let sleep = match stopped_at {
                None => {
                    (0..pacer.take(now, u64::MAX)).for_each(|_| log.note_queued(session.queue(now)));
                    pacer.until_next().unwrap_or(LONGEST_SLEEP).min(LONGEST_SLEEP)
                }
                Some(_) if session.awaiting() == 0 => return Ok(()),
                Some(at) if now.saturating_sub(at) >= self.drain_limit => {
                    return Err(EchoError::Unanswered { awaiting: session.awaiting(), waited: now - at });
                }
                Some(_) => LONGEST_SLEEP,
            };
            let awaiting = session.awaiting();
            send(stream, &mut session).map_err(|error| broken(error, awaiting))?;
            wait(stream, &session, sleep).map_err(|error| broken(error, awaiting))?;
            receive(stream, &mut session, origin, log)?;
        }
    }
}

/// Hands the kernel what it takes without waiting.
fn send(mut stream: &TcpStream, session: &mut Session) -> io::Result<()> {
    while !session.outgoing().is_empty() {
        match stream.write(session.outgoing()) {
            Ok(taken) => session.took(taken),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Until an echo can be read, room to write (if that is wanted), or the time is over.
fn wait(stream: &TcpStream, session: &Session, sleep: Duration) -> io::Result<()> {
    let mut flags = PollFlags::IN;
    if !session.outgoing().is_empty() {
        flags |= PollFlags::OUT;
    }
    let timeout = Timespec { tv_sec: sleep.as_secs() as i64, tv_nsec: i64::from(sleep.subsec_nanos()) };
    match poll(&mut [PollFd::new(stream, flags)], Some(&timeout)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Verifies what has come, without waiting.
fn receive(mut stream: &TcpStream, session: &mut Session, origin: Instant, log: &EchoLog) -> Result<(), EchoError> {
    let mut buffer = [0; 4096];
    loop {
        match stream.read(&mut buffer) {
            Ok(0) => {
                return Err(EchoError::Closed { awaiting: session.awaiting() });
            }
            Ok(read) => {
                let now = origin.elapsed();
                session.receive(&buffer[..read], |sent_at| log.note_echo(sent_at, now))?;
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => {
                return Err(EchoError::Broken { kind: error.kind(), awaiting: session.awaiting() });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn sample(received_at_s: f64) -> EchoSample {
        EchoSample { sent_at_s: received_at_s - 0.01, received_at_s }
    }

    fn gap(at: &[f64], from_s: f64, to_s: f64) -> (f64, f64) {
        let samples: Vec<_> = at.iter().copied().map(sample).collect();
        let gap = longest_gap(samples.iter(), from_s, to_s);
        ((gap.gap_ms * 1e3).round() / 1e3, gap.at_s)
    }

    #[test]
    fn the_longest_gap_lies_between_echoes_or_at_an_edge() {
        let at = [1.0, 1.1, 1.9, 2.0];
        assert_eq!(gap(&at, 1.0, 2.0), (800.0, 1.1));
        assert_eq!(gap(&at, 0.0, 2.0), (1000.0, 0.0));
        assert_eq!(gap(&at, 1.0, 5.0), (3000.0, 2.0));
        assert_eq!(gap(&at, 1.2, 1.8), (600.0, 1.2), "no echo within");
        assert_eq!(gap(&at, 1.05, 1.5), (400.0, 1.1));
        assert_eq!(gap(&[], 3.0, 4.0), (1000.0, 3.0));
        assert_eq!(gap(&[0.0, 0.1, 0.2], 0.0, 0.2), (100.0, 0.0), "the first of equals");
        assert_eq!(gap(&at, 2.0, 1.0), (0.0, 2.0), "an empty window");
    }

    /// A session with `count` messages sent, and the bytes on the wire.
    fn sent(count: u64) -> (Session, Vec<u8>) {
        let mut session = Session::default();
        let mut wire = Vec::new();
        for number in 0..count {
            assert_eq!(session.queue(Duration::from_millis(number)), Queued::Sent);
            while !session.outgoing().is_empty() {
                let part = session.outgoing().len().div_ceil(2);
                wire.extend_from_slice(&session.outgoing()[..part]);
                session.took(part);
            }
        }
        (session, wire)
    }

    #[test]
    fn lost_and_repeated_messages_are_told_apart() {
        let (mut session, mut wire) = sent(5);
        wire.drain(MESSAGE_BYTES..3 * MESSAGE_BYTES);
        assert_eq!(session.receive(&wire, |_| {}), Err(EchoError::Missing { expected: 1, found: 3 }));
        let (mut session, mut wire) = sent(5);
        wire.splice(64..64, wire[..32].to_vec());
        assert_eq!(session.receive(&wire, |_| {}), Err(EchoError::Repeated { expected: 2, found: 0 }));
        let (mut session, mut wire) = sent(5);
        wire.extend_from_within(..10);
        assert_eq!(session.receive(&wire, |_| {}), Err(EchoError::Unasked { bytes: 10 }));
    }

    #[test]
    fn a_closed_window_makes_messages_skip_and_not_queue() {
        let mut session = Session::default();
        let queued: Vec<_> = (0..1000).map(|n| session.queue(Duration::from_millis(n))).collect();
        assert_eq!(queued.iter().filter(|&&queued| queued == Queued::Sent).count(), MAX_BACKLOG);
        assert_eq!(session.outgoing.len(), MAX_BACKLOG * MESSAGE_BYTES);
    }

    proptest! {
        #[test]
        fn a_clean_stream_is_accepted_however_it_is_cut(pieces in proptest::collection::vec(1..100usize, 1..50)) {
            let (mut session, wire) = sent(20);
            let mut rest = &wire[..];
            let mut echoes = 0;
            for piece in pieces.iter().cycle() {
                let (head, tail) = rest.split_at((*piece).min(rest.len()));
                session.receive(head, |_| echoes += 1).unwrap();
                rest = tail;
                if rest.is_empty() {
                    break;
                }
            }
            prop_assert_eq!((echoes, session.awaiting()), (20, 0));
        }

        #[test]
        fn any_altered_byte_is_found(byte in 0..640usize, change in 1..=255u8) {
            let (mut session, mut wire) = sent(20);
            wire[byte] ^= change;
            let verdict = session.receive(&wire, |_| {});
            let is_altered = matches!(
                verdict,
                Err(EchoError::Altered { sequence, byte: at, .. }) if sequence as usize * 32 + at == byte
            );
            prop_assert!(is_altered, "{verdict:?}");
        }

        #[test]
        fn removed_or_repeated_bytes_are_found(at in 0..640usize, length in 1..100usize) {
            let (mut session, mut wire) = sent(20);
            let end = (at + length).min(wire.len());
            let cut = wire.drain(at..end).collect::<Vec<_>>();
            let verdict = session.receive(&wire, |_| {});
            let is_noticed = verdict.is_err() || session.awaiting() > 0;
            prop_assert!(is_noticed);
            let (mut session, mut wire) = sent(20);
            wire.splice(at..at, cut);
            let verdict = session.receive(&wire, |_| {});
            prop_assert!(verdict.is_err());
        }

        #[test]
        fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let (mut session, _) = sent(3);
            let _ = session.receive(&bytes, |_| {});
        }
    }
}
