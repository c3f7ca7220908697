//! The source's end of a memory stream: QEMU migrates into a local socket; what it says is made small and goes on the
//! link, what the destination's QEMU says on the return path comes back. Nothing here decides anything.
//!
//! ```text
//!   QEMU ==unix==> reader thread: Encoder ==channel==> task ==link==> destination
//!                                  |   ^
//!                           a thread of zstd's
//!        <==unix== task: ReturnPath without SHUT  <==link==
//!                     '-- what the decoder says ==> reader thread
//! ```
//!
//! The channel, the link's window and a piece at zstd's thread are all that lies between QEMU and the wire. Whatever is in them when the guest stops is part of its
//! pause, so nothing is taken from QEMU while more than the window is on its way, the channel's pieces included; and in the last rounds, while
//! more than a little is ([`Seen::bound`], [`crate::settle`]).

use crate::parts::Moving;
use crate::processors;
use anyhow::{Context, Result, bail};
use bytes::Bytes;
use godwit_api::progress::NoteKind;
use godwit_link::{Flow, Lane, Session};
use godwit_memory::levels::{self, Carried, Known, Level, Shown};
use godwit_memory::{Encoder, Levels, Progress, ReturnPath, StreamError};
use godwit_units::Bytes as Amount;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io::{ErrorKind, Read};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

/// What is read from QEMU at once. QEMU writes pages in vectors of up to 256 KiB.
const READ: usize = 256 << 10;
/// Encoded bytes that may wait between the encoder and the link, in pieces of at most [`READ`] each.
const PIECES: usize = 2;

/// The least that is read at once where little may be on its way: a few pages.
const LEAST_READ: u64 = 16 << 10;

/// What the reader has seen, for whoever asks; and what it is told.
#[derive(Debug)]
pub struct Seen {
    progress: Mutex<Progress>,
    stopping: AtomicBool,
    flow: Flow,
    session: Session,
    /// Bytes that may be on their way.
    most: AtomicU64,
    /// Whether that is little.
    little: AtomicBool,
    /// Nothing is taken from QEMU for now.
    held: AtomicBool,
    /// The level that is in force.
    level: Mutex<Level>,
}

impl Seen {
    /// Of a stream that goes on the link there, and is packed by that level at first.
    #[must_use]
    pub fn new(flow: Flow, session: Session, level: Level) -> Self {
        Self {
            progress: Mutex::default(),
            stopping: AtomicBool::new(false),
            flow,
            session,
            most: AtomicU64::new(u64::MAX),
            little: AtomicBool::new(false),
            held: AtomicBool::new(false),
            level: Mutex::new(level),
        }
    }

    /// Encoded bytes that the other host has not acknowledged.
    #[must_use]
    pub fn on_its_way(&self) -> u64 {
        let made = crate::parts::lock(&self.progress).wire_bytes;
        made.saturating_sub(self.flow.counters().acknowledged.0)
    }

    /// What the link has made of the stream so far.
    fn carried(&self) -> Carried {
        let shown = self.session.shown(Lane::Memory);
        Carried {
            arrived: self.flow.counters().acknowledged.0,
            round_trip: self.session.rtt().unwrap_or_default(),
            shown: shown.map(|shown| Shown { link: shown.rate, all: shown.spread }),
        }
    }

    /// How many of them there may be while more is taken from QEMU. Where that is `little`, what was taken goes at once, and does not wait for
    /// the encoder to have enough of it to pack well.
    pub fn bound(&self, most: Amount, little: bool) {
        self.most.store(most.0, Ordering::Release);
        self.little.store(little, Ordering::Release);
    }

    /// That bound, and whether it is little. A guest that stops ends it: everything that is left goes as fast as it can.
    fn bounded(&self) -> (Option<u64>, bool) {
        let most = self.most.load(Ordering::Acquire);
        let bound = (most != u64::MAX && !self.is_stopping()).then_some(most);
        (bound, bound.is_some() && self.little.load(Ordering::Acquire))
    }

    /// Whether to take nothing from QEMU for now: as long as it can write nothing, it does not come to the end of a round, and does not stop the
    /// guest by itself.
    pub fn hold(&self, held: bool) {
        self.held.store(held, Ordering::Release);
    }

    fn is_held(&self) -> bool {
        self.held.load(Ordering::Acquire) && !self.is_stopping()
    }

    /// The encoder's counters.
    #[must_use]
    pub fn progress(&self) -> Progress {
        crate::parts::lock(&self.progress).clone()
    }

    /// The level that is in force.
    #[must_use]
    pub fn level(&self) -> Level {
        *crate::parts::lock(&self.level)
    }

    /// The guest is about to be stopped: from now on nothing is sent that the destination might have to ask about.
    pub fn stopping(&self) {
        self.stopping.store(true, Ordering::Release);
    }

    fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }
}

/// Reads QEMU's stream until it ends, on a thread of its own. Ends early, and by that closes the socket, when the receiver is dropped.
/// Out of `heard` comes what the decoder says, as messages of a return path.
///
/// Answers how the stream was packed in the end, and what the link carried, as far as that was measured.
///
/// # Errors
/// When the stream cannot be read or parsed.
pub(crate) fn read(
    mut qemu: UnixStream,
    heard: UnixStream,
    seen: &Seen,
    moving: &Moving,
    (mut encoder, mut levels): (Encoder, Levels),
    out: &mpsc::Sender<Bytes>,
) -> Result<Known> {
    // QEMU pauses between its chunks; then what was said so far has to become readable at the other end.
    qemu.set_nonblocking(true).context("cannot read without waiting")?;
    heard.set_nonblocking(true).context("cannot listen without waiting")?;
    let mut hearing = Hearing { socket: heard, path: ReturnPath::new(), ended: false, asked: false };
    let mut input = vec![0; READ];
    let mut wire = Vec::with_capacity(READ);
    let (mut flushed, mut quiet) = (true, false);
    let began = Instant::now();
    loop {
        hearing.hear(&mut encoder, &mut wire)?;
        if hearing.asked {
            encoder.stalls_take(seen.carried().round_trip, began.elapsed());
        }
        hearing.answer(out, &mut wire)?;
        if seen.is_stopping() {
            encoder.hurry();
        }
        if encoder.lacks_room() {
            packing(&mut levels, || encoder.flush(&mut wire))?;
            send(out, &mut wire)?;
            let until = Instant::now() + ROOM_PATIENCE;
            while encoder.lacks_room() && !hearing.ended && (!seen.is_stopping() || encoder.holds_up()) {
                let left = until.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    break;
                }
                wait(&[&hearing.socket], left)?;
                hearing.hear(&mut encoder, &mut wire)?;
                hearing.answer(out, &mut wire)?;
            }
        }
        let (bound, little) = seen.bounded();
        let held = seen.is_held();
        if held || bound.is_some_and(|most| seen.on_its_way() > most) {
            if (little || held) && !flushed {
                packing(&mut levels, || encoder.flush(&mut wire))?;
                flushed = true;
            }
            packing(&mut levels, || encoder.collect(&mut wire))?;
            crate::parts::lock(&seen.progress).clone_from(encoder.progress());
            if !wire.is_empty() {
                send(out, &mut wire)?;
            } else if out.is_closed() {
                bail!("the migration was given up");
            }
            let began = Instant::now();
            hearing.wait(ACKNOWLEDGED)?;
            if !held {
                levels.waited(began.elapsed());
            }
            continue;
        }
        match qemu.read(&mut input[..at_once(bound)]) {
            Ok(0) => break,
            Ok(n) => {
                quiet = false;
                packing(&mut levels, || encoder.push(&input[..n], &mut wire))?;
                flushed = false;
                // What goes while the guest is about to stand still, or while somebody waits for a page, tells nothing of the link.
                let measures = !little && !held && !encoder.progress().follows && !seen.is_stopping();
                let looked = measures.then(|| levels.look((&encoder).into(), || (processors::now(), seen.carried())));
                if let Some(level) = looked.flatten() {
                    let reach = levels::reach(level);
                    packing(&mut levels, || encoder.set_level(level.number(), reach, &mut wire))?;
                    *crate::parts::lock(&seen.level) = level;
                    let text = format!("{}: that is what the link and the processors allow", levels::told(level));
                    moving.note(NoteKind::Decision, text);
                }
                let progress = encoder.progress();
                if progress.handed && !moving.handed.is_cancelled() {
                    tracing::info!(pages = progress.following_pages, "the devices' state is through; pages follow");
                    moving.handed.cancel();
                }
                if progress.ram_ended && !moving.ram_ended.is_cancelled() {
                    moving.ram_ended.cancel();
                    moving.recycling.has_layout(encoder.layout());
                    if progress.overlooked_pages > 0 {
                        tracing::warn!(pages = progress.overlooked_pages, "{OVERLOOKED}");
                    }
                }
            }
            Err(e) if e.kind() == ErrorKind::WouldBlock => {
                if !flushed && !quiet && !seen.is_stopping() {
                    wait(&[&qemu], PAUSE)?;
                    quiet = true;
                } else if !flushed {
                    packing(&mut levels, || encoder.flush(&mut wire))?;
                    flushed = true;
                } else {
                    if out.is_closed() {
                        bail!("the migration was given up");
                    }
                    let heard = [&qemu, &hearing.socket];
                    wait(if hearing.ended { &heard[..1] } else { &heard }, LOOK)?;
                }
            }
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(e).context("QEMU's migration socket broke"),
        }
        if (encoder.progress().follows || little) && !flushed {
            // Somebody waits for some page of this, and nobody knows which; or what is not on its way would wait for the guest's stop.
            packing(&mut levels, || encoder.flush(&mut wire))?;
            flushed = true;
        }
        crate::parts::lock(&seen.progress).clone_from(encoder.progress());
        if wire.len() >= at_once(bound).min(READ / 4) || (flushed && !wire.is_empty()) {
            let began = Instant::now();
            send(out, &mut wire)?;
            levels.waited(began.elapsed());
        }
    }
    encoder.finish(&mut wire)?;
    let p = encoder.progress();
    crate::parts::lock(&seen.progress).clone_from(p);
    let (zero, full, changed, on_disk) = (p.zero_pages, p.data_pages, p.delta_pages, p.disk_pages);
    tracing::info!(
        zero,
        full,
        changed,
        on_disk,
        unchanged = p.unchanged_pages,
        wire = p.wire_bytes,
        "memory is through"
    );
    send(out, &mut wire)?;
    Ok(levels.found())
}

/// What the log says of pages that a [`Witness`](godwit_memory::Witness) has sent.
const OVERLOOKED: &str = "QEMU had lost track of writes to the guest's RAM; the pages were sent";

/// How much is read from QEMU at once, where so much may be on its way: several times in what the link carries meanwhile.
fn at_once(bound: Option<u64>) -> usize {
    bound.map_or(READ, |most| (most / 4).clamp(LEAST_READ, READ as u64) as usize)
}

/// Levels go by how long the encoder's work takes.
fn packing(levels: &mut Levels, work: impl FnOnce() -> Result<(), StreamError>) -> Result<(), StreamError> {
    let began = Instant::now();
    let result = work();
    levels.packed(began.elapsed());
    result
}

fn send(out: &mpsc::Sender<Bytes>, wire: &mut Vec<u8>) -> Result<()> {
    if out.blocking_send(Bytes::from(std::mem::replace(wire, Vec::with_capacity(READ)))).is_err() {
        bail!("the migration was given up");
    }
    Ok(())
}

/// Where QEMU says nothing for so long, what it said goes: it looks for pages between two writes, and what ends with each of them packs badly.
const PAUSE: Duration = Duration::from_millis(1);
/// How long a wait for QEMU lasts at most before it is looked whether anybody still wants the stream.
const LOOK: Duration = Duration::from_millis(500);
/// Between two looks at what was acknowledged.
const ACKNOWLEDGED: Duration = Duration::from_millis(2);
/// How long the reader waits for the decoder's word rather than send in full what it could refer to: a long round trip. While something
/// lies between here and the decoder the link is busy meanwhile.
const ROOM_PATIENCE: Duration = Duration::from_millis(200);

/// Until one of them has something to read, or so long.
fn wait(sockets: &[&UnixStream], most: Duration) -> Result<()> {
    let mut fds: Vec<_> = sockets.iter().map(|socket| PollFd::new(*socket, PollFlags::IN)).collect();
    let wait = Timespec { tv_sec: most.as_secs() as i64, tv_nsec: i64::from(most.subsec_nanos()) };
    match poll(&mut fds, Some(&wait)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(e) => Err(e).context("cannot wait for QEMU"),
    }
}

/// What the decoder says.
struct Hearing {
    socket: UnixStream,
    path: ReturnPath,
    /// Whether nothing more will come.
    ended: bool,
    /// Whether an answer waits to be sent.
    asked: bool,
}

impl Hearing {
    /// Until something is heard, or so long.
    fn wait(&self, most: Duration) -> Result<()> {
        if self.ended { wait(&[], most) } else { wait(&[&self.socket], most) }
    }

    /// Sends what was asked for, with all that lies before it. Before anything is waited for: the decoder stands still until it has it.
    fn answer(&mut self, out: &mpsc::Sender<Bytes>, wire: &mut Vec<u8>) -> Result<()> {
        if std::mem::take(&mut self.asked) { send(out, wire) } else { Ok(()) }
    }

    /// Gives the encoder what was heard since the last time.
    fn hear(&mut self, encoder: &mut Encoder, wire: &mut Vec<u8>) -> Result<()> {
        let mut buffer = [0; 1024];
        while !self.ended {
            match self.socket.read(&mut buffer) {
                Ok(0) => self.ended = true,
                Ok(n) => self.path.push(&buffer[..n])?,
                Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(_) => self.ended = true,
            }
            while let Some(message) = self.path.poll()? {
                if let Some(feedback) = message.feedback() {
                    let before = wire.len();
                    encoder.feedback(feedback, wire)?;
                    self.asked |= wire.len() > before;
                }
            }
        }
        Ok(())
    }
}

/// A channel of the right size between [`read`] and the link.
#[must_use]
pub fn channel() -> (mpsc::Sender<Bytes>, mpsc::Receiver<Bytes>) {
    mpsc::channel(PIECES)
}

/// Passes the destination's return path on to the source's QEMU, without its SHUT: that one the node says itself, when the
/// hand-off has come so far.
pub struct Returning {
    path: ReturnPath,
}

impl Default for Returning {
    fn default() -> Self {
        Self { path: ReturnPath::new() }
    }
}

impl Returning {
    /// What of `bytes` the source's QEMU may read now, and what is for the encoder.
    ///
    /// # Errors
    /// When the bytes are no return path.
    pub fn pass(&mut self, bytes: &[u8]) -> Result<(Vec<u8>, Vec<u8>)> {
        self.path.push(bytes)?;
        let (mut out, mut feedback) = (vec![], vec![]);
        while let Some(message) = self.path.poll()? {
            if message.is_feedback() {
                message.encode(&mut feedback);
            } else if !message.is_shut() {
                message.encode(&mut out);
            }
        }
        Ok((out, feedback))
    }
}

/// For tests and tasks: the counters, shared.
pub type SharedSeen = Arc<Seen>;
