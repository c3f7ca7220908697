//! A running path: two packet sockets and two threads, one per direction.
//!
//! Nothing is decided here. A thread asks the clock and the kernel, offers what arrived to the [`Shaper`], keeps what is
//! under way in the [`Flight`], and writes what is due. It sleeps until the next departure, the next arrival or a change.
//!
//! ```text
//! loop:   send what is due (a batch)  ->  sleep  ->  changes from the owner  ->  read what arrived (a batch)
//! ```
//!
//! # Grain
//!
//! At 1 Gbit/s a full packet leaves every 12 us, and a thread that sleeps and wakes for each spends a core on sleeping and
//! waking. So a thread that has just sent waits [`GRAIN`] before it sends again; what gathers meanwhile goes in one batch.
//! Reading may wait longer, up to [`COARSEST_READING`]: thanks to the kernel's stamps it costs nothing to read a packet late as
//! long as it is read well before it is due. A packet that is alone is never held back: nothing was sent or read just before it.
//!
//! The opposite case is a packet that is alone: the processor may have gone to sleep, and in a virtual machine it takes
//! 50 to 100 us to return. So a long sleep ends [`EARLY`], and the thread watches the clock for the rest.
//!
//! # What can go wrong
//!
//! - **A thread is scheduled late.** Frames then leave late (counted as `late`), but nothing else is bent: arrivals carry
//!   the kernel's stamp, so the line is charged from when a frame came and not from when it was read. Otherwise a stall
//!   would waste capacity and then look like a burst that overflows the queue.
//! - **The system's clock is set.** Stamps are on that clock. An age that makes no sense (negative, or above
//!   [`OLDEST_STAMP`]) is ignored, and the frame counts as arriving when it is read.
//! - **An interface goes down or away.** What it does not take is counted as unsent. The path lives on, and works again if
//!   the interface comes up again.
//! - **Both directions change at once?** Nearly: `set`, `cut` and `restore` reach the two threads one after the other,
//!   microseconds apart, and return when both have taken effect.

use crate::alter::swap_words;
use crate::counters::{Counters, DirectionCells, DirectionCounters, Fate};
use crate::flight::Flight;
use crate::frame::FrameInfo;
use crate::packet_socket::{Arrival, BATCH, Packet, PacketSocket, ReceiveBuffers};
use crate::realtime::{self, Bell, Ready, Scheduling};
use crate::shaper::{Moment, Shaper, Verdict};
use crate::{Class, Classifier, PathSpec, WanError};
use godwit_units::Bytes;
use std::io;
use std::os::fd::AsFd;
use std::sync::mpsc::{self, Receiver, Sender, SyncSender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant, SystemTime};

/// A frame that leaves this much after its moment is counted as late.
pub const LATE: Duration = Duration::from_millis(1);

/// The least time between two batches of sending: by this much packets in a dense train may leave late.
/// Below what anybody measures on a WAN, and long enough to gather eight full packets at 1 Gbit/s.
pub const GRAIN: Duration = Duration::from_micros(100);

/// A sleep of this length or more may let the processor fall so deeply asleep that it takes [`EARLY`] to come back.
pub const LONG_SLEEP: Duration = Duration::from_millis(1);

/// How long before the departure a long sleep ends. What is left of it is spent spinning: a tenth of a core at the very most,
/// as sleeps shorter than [`LONG_SLEEP`] do without.
pub const EARLY: Duration = Duration::from_micros(100);

/// The most time between two batches of reading while frames arrive: an eighth of the one-way delay, within [`GRAIN`] and
/// this. It bounds how late a drop is counted.
pub const COARSEST_READING: Duration = Duration::from_millis(1);

/// The oldest arrival stamp that is believed: longer than any stall that a test could survive.
pub const OLDEST_STAMP: Duration = Duration::from_millis(500);

/// A path between two interfaces. Dropping it stops it; frames in flight are then lost.
#[derive(Debug)]
pub struct Path {
    name: String,
    state: Mutex<State>,
    a_to_b: Direction,
    b_to_a: Direction,
}

#[derive(Clone, Copy, Debug)]
struct State {
    spec: PathSpec,
    line: LineState,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LineState {
    Up,
    Cut,
}

impl Path {
    /// Joins `iface_a` and `iface_b`, which must exist in the calling thread's network namespace; the path works on when
    /// that thread moves to another or ends. `seed` makes loss and jitter repeatable for a given order of frames.
    ///
    /// # Errors
    ///
    /// [`WanError::InvalidSpec`], [`WanError::NoInterface`], [`WanError::Socket`] or [`WanError::Start`]; nothing is left behind.
    pub fn start(
        name: &str,
        iface_a: &str,
        iface_b: &str,
        spec: PathSpec,
        rules: Classifier,
        seed: u64,
    ) -> Result<Self, WanError> {
        // Two different constants keep the two directions' dice apart.
        const A_TO_B_STREAM: u64 = 0xa2b0;
        const B_TO_A_STREAM: u64 = 0xb2a0;
        spec.validate()?;
        let a = Arc::new(PacketSocket::open(iface_a)?);
        let b = Arc::new(PacketSocket::open(iface_b)?);
        let failed = |source| WanError::Start { path: name.to_owned(), source };
        let start = |from: &Arc<PacketSocket>, to: &Arc<PacketSocket>, arrow, stream: u64| {
            let shaper = Shaper::new(spec, seed.rotate_left(32) ^ stream);
            Direction::start(&format!("{name}{arrow}"), from, to, shaper, rules.clone()).map_err(failed)
        };
        let a_to_b = start(&a, &b, ">", A_TO_B_STREAM)?;
        let b_to_a = start(&b, &a, "<", B_TO_A_STREAM)?;
        let state = Mutex::new(State { spec, line: LineState::Up });
        Ok(Self { name: name.to_owned(), state, a_to_b, b_to_a })
    }

    /// The name it was given.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Puts another spec in force; see [`shaper`](crate::shaper) for what becomes of frames under way. A path that is cut stays cut.
    ///
    /// # Errors
    ///
    /// [`WanError::InvalidSpec`], and nothing has changed; or [`WanError::Dead`].
    pub fn set(&self, spec: PathSpec) -> Result<(), WanError> {
        spec.validate()?;
        let mut state = self.lock();
        self.tell(Change::Set(spec))?;
        state.spec = spec;
        Ok(())
    }

    /// Cuts the path: frames in flight are lost, and so is all that arrives. When this returns, nothing passes any more.
    ///
    /// # Errors
    ///
    /// [`WanError::Dead`].
    pub fn cut(&self) -> Result<(), WanError> {
        let mut state = self.lock();
        self.tell(Change::Cut)?;
        state.line = LineState::Cut;
        Ok(())
    }

    /// Ends a cut. What arrived before stays lost. Does nothing on a path that is up.
    ///
    /// # Errors
    ///
    /// [`WanError::Dead`].
    pub fn restore(&self) -> Result<(), WanError> {
        let mut state = self.lock();
        self.tell(Change::Restore)?;
        state.line = LineState::Up;
        Ok(())
    }

    /// Damages the next segment of `class` from the first interface to the second, behind every checksum's back; see
    /// [`alter`](crate::alter). In one direction only: an echo that is damaged twice is whole again.
    ///
    /// # Errors
    ///
    /// [`WanError::Dead`].
    pub fn alter_next_segment(&self, class: Class) -> Result<(), WanError> {
        self.a_to_b.tell(Change::AlterNext(class)).map_err(|_| WanError::Dead { path: self.name.clone() })
    }

    /// The spec in force (which a cut does not change).
    #[must_use]
    pub fn spec(&self) -> PathSpec {
        self.lock().spec
    }

    /// Whether the path is cut.
    #[must_use]
    pub fn is_cut(&self) -> bool {
        self.lock().line == LineState::Cut
    }

    /// What has passed so far, and what has not. Cheap; see [`counters`](crate::counters) for how exact it is while traffic flows.
    #[must_use]
    pub fn counters(&self) -> Counters {
        Counters { a_to_b: self.a_to_b.counters(), b_to_a: self.b_to_a.counters() }
    }

    /// Whether both threads run as they should for exact delays.
    #[must_use]
    pub fn scheduling(&self) -> Scheduling {
        match (self.a_to_b.scheduling, self.b_to_a.scheduling) {
            (Scheduling::RealTime, Scheduling::RealTime) => Scheduling::RealTime,
            _ => Scheduling::Ordinary,
        }
    }

    /// The processor time that the two threads have used. It includes the receiving stack's work on the frames that they
    /// send: the kernel does that within the sending call.
    #[must_use]
    pub fn cpu_time(&self) -> Duration {
        realtime::cpu_time_of(self.a_to_b.thread_id) + realtime::cpu_time_of(self.b_to_a.thread_id)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // The state is two values that are assigned whole: a panic elsewhere cannot have left it half done.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tell(&self, change: Change) -> Result<(), WanError> {
        let dead = |_| WanError::Dead { path: self.name.clone() };
        self.a_to_b.tell(change).map_err(dead)?;
        self.b_to_a.tell(change).map_err(dead)
    }
}

/// What the owner wants of a thread.
#[derive(Clone, Copy, Debug)]
enum Change {
    Set(PathSpec),
    Cut,
    Restore,
    AlterNext(Class),
}

struct Order {
    change: Change,
    done: SyncSender<()>,
}

/// The thread has ended although nobody stopped it.
struct ThreadDied;

/// The owner's end of a direction. Orders go through a channel that the bell announces; dropping the channel is the order to end.
#[derive(Debug)]
struct Direction {
    orders: Option<Sender<Order>>,
    bell: Arc<Bell>,
    cells: Arc<DirectionCells>,
    input: Arc<PacketSocket>,
    thread: Option<JoinHandle<()>>,
    thread_id: u32,
    scheduling: Scheduling,
}

impl Direction {
    fn start(
        name: &str,
        input: &Arc<PacketSocket>,
        output: &Arc<PacketSocket>,
        shaper: Shaper,
        rules: Classifier,
    ) -> io::Result<Self> {
        let (orders, inbox) = mpsc::channel();
        let bell = Arc::new(Bell::new()?);
        let cells = Arc::new(DirectionCells::default());
        let forwarder = Forwarder {
            input: input.clone(),
            output: output.clone(),
            bell: bell.clone(),
            inbox,
            cells: cells.clone(),
            rules,
            shaper,
            flight: Flight::new(),
            to_alter: None,
            clock: Clock::start(),
            may_send: Moment::ZERO,
            may_read: Moment::ZERO,
            arrivals: Vec::with_capacity(BATCH),
            departures: Vec::with_capacity(BATCH),
        };
        let (ready, started) = mpsc::sync_channel(1);
        let thread = thread::Builder::new().name(format!("wan:{name}")).spawn(move || {
            let scheduling = realtime::prefer_this_thread();
            // The starter waits for this; if it does not, the path is not wanted any more, and the closed inbox says so.
            let _ = ready.send((realtime::thread_id(), scheduling));
            forwarder.run();
        })?;
        let (thread_id, scheduling) = started.recv().map_err(io::Error::other)?;
        Ok(Self {
            orders: Some(orders),
            bell,
            cells,
            input: input.clone(),
            thread: Some(thread),
            thread_id,
            scheduling,
        })
    }

    fn tell(&self, change: Change) -> Result<(), ThreadDied> {
        let (done, taken) = mpsc::sync_channel(1);
        let orders = self.orders.as_ref().ok_or(ThreadDied)?;
        orders.send(Order { change, done }).map_err(|_| ThreadDied)?;
        self.bell.ring();
        taken.recv().map_err(|_| ThreadDied)
    }

    fn counters(&self) -> DirectionCounters {
        self.cells.missed.add(self.input.take_missed());
        self.cells.snapshot()
    }
}

impl Drop for Direction {
    fn drop(&mut self) {
        self.orders = None;
        self.bell.ring();
        if let Some(thread) = self.thread.take() {
            // If it panicked, its message has been printed; there is nothing to add.
            let _ = thread.join();
        }
    }
}

/// Ends the loop of a forwarder.
struct OwnerGone;

/// A direction's thread.
struct Forwarder {
    input: Arc<PacketSocket>,
    output: Arc<PacketSocket>,
    bell: Arc<Bell>,
    inbox: Receiver<Order>,
    cells: Arc<DirectionCells>,
    rules: Classifier,
    shaper: Shaper,
    flight: Flight<Traveller>,
    /// The class of which the next segment is to be damaged.
    to_alter: Option<Class>,
    clock: Clock,
    /// When the next batch may be sent, and read.
    may_send: Moment,
    may_read: Moment,
    /// Used again for every batch, as is the next.
    arrivals: Vec<Arrival>,
    departures: Vec<Traveller>,
}

/// A packet under way.
struct Traveller {
    packet: Packet,
    info: FrameInfo,
    class: Class,
}

impl AsRef<Packet> for Traveller {
    fn as_ref(&self) -> &Packet {
        &self.packet
    }
}

impl Forwarder {
    fn run(mut self) {
        let mut buffers = ReceiveBuffers::new();
        loop {
            self.send_what_is_due();
            let ready = self.sleep();
            if ready.bell && self.take_orders().is_err() {
                return;
            }
            if ready.input {
                self.take_arrivals(&mut buffers);
            }
        }
    }

    fn send_what_is_due(&mut self) {
        let now = self.clock.now();
        if now < self.may_send {
            return;
        }
        while self.departures.len() < BATCH {
            let Some((due, traveller)) = self.flight.pop_due(now) else {
                break;
            };
            if now.since(due) > LATE {
                self.cells.late.add(1);
            }
            self.departures.push(traveller);
        }
        self.may_send = next_turn(now, self.departures.len(), GRAIN);
        let cells = &self.cells;
        self.output.send(&self.departures, |traveller, outcome| {
            let fate = if outcome.is_ok() { Fate::Delivered } else { Fate::Unsent };
            cells.count(traveller.class, fate, &traveller.info);
        });
        self.departures.clear();
    }

    fn sleep(&self) -> Ready {
        let now = self.clock.now();
        let next_sending = self.flight.next_departure().map(|due| due.max(self.may_send));
        if now < self.may_read {
            let wake = next_sending.map_or(self.may_read, |sending| sending.min(self.may_read));
            return realtime::wait(None, &self.bell, Some(wake.since(now)));
        }
        let input = Some(self.input.as_fd());
        match next_sending {
            Some(sending) if sending.since(now) >= LONG_SLEEP => {
                let ready = realtime::wait(input, &self.bell, Some(sending.since(now) - EARLY));
                while ready == Ready::NOTHING && self.clock.now() < sending {
                    std::hint::spin_loop();
                }
                ready
            }
            _ => realtime::wait(input, &self.bell, next_sending.map(|sending| sending.since(now))),
        }
    }

    fn take_orders(&mut self) -> Result<(), OwnerGone> {
        self.bell.silence();
        loop {
            let order = match self.inbox.try_recv() {
                Ok(order) => order,
                Err(mpsc::TryRecvError::Empty) => return Ok(()),
                Err(mpsc::TryRecvError::Disconnected) => return Err(OwnerGone),
            };
            match order.change {
                Change::Set(spec) => self.shaper.set(spec),
                Change::Cut => {
                    self.shaper.cut();
                    for traveller in self.flight.drain() {
                        self.cells.count(traveller.class, Fate::Cut, &traveller.info);
                    }
                }
                Change::Restore => self.shaper.restore(self.clock.now()),
                Change::AlterNext(class) => self.to_alter = Some(class),
            }
            // Whoever gave the order waits for this, unless it was interrupted by a panic.
            let _ = order.done.send(());
        }
    }

    fn take_arrivals(&mut self, buffers: &mut ReceiveBuffers) {
        let mut arrivals = std::mem::take(&mut self.arrivals);
        // An error is "nothing there after all", or "interface down", which the socket survives: either way, wait again.
        if let Ok(oversized) = self.input.receive(buffers, &mut arrivals) {
            self.cells.oversized.add(oversized);
        }
        let reading = self.clock.read();
        let grain = (self.shaper.spec().one_way_delay() / 8).clamp(GRAIN, COARSEST_READING);
        self.may_read = next_turn(reading.now, arrivals.len(), grain);
        for Arrival { packet, stamp } in arrivals.drain(..) {
            self.admit(reading.moment_of(stamp), packet);
        }
        self.arrivals = arrivals;
    }

    fn admit(&mut self, arrived: Moment, mut packet: Packet) {
        let info = FrameInfo::of(&packet.frame, &packet.note);
        let class = self.rules.classify(info.ports);
        if info.is_super_frame() && self.shaper.spec().needs_single_packets() {
            self.cells.superframes_under_loss.add(1);
        }
        if self.to_alter == Some(class) && swap_words(&mut packet.frame) {
            self.to_alter = None;
        }
        let size = Bytes(packet.frame.len() as u64);
        if !self.flight.has_room(size) {
            self.cells.count(class, Fate::Overflow, &info);
            return;
        }
        match self.shaper.offer(arrived, info.wire_bytes) {
            Verdict::Depart { at } => self.flight.push(at, size, Traveller { packet, info, class }),
            Verdict::DropQueue => self.cells.count(class, Fate::Queue, &info),
            Verdict::DropLoss => self.cells.count(class, Fate::Loss, &info),
            Verdict::DropCut => self.cells.count(class, Fate::Cut, &info),
        }
    }
}

/// When to do again what was just done to a batch of `len`: later, unless nothing was done or more is waiting.
fn next_turn(now: Moment, len: usize, grain: Duration) -> Moment {
    if len == 0 || len == BATCH { now } else { now.after(grain) }
}

/// The time since the direction began, on the monotonic clock.
#[derive(Clone, Copy, Debug)]
struct Clock(Instant);

impl Clock {
    fn start() -> Self {
        Self(Instant::now())
    }

    fn now(&self) -> Moment {
        Moment(self.0.elapsed())
    }

    fn read(&self) -> Reading {
        let system = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        Reading { now: self.now(), system }
    }
}

/// Both clocks at once, to turn the kernel's stamps into moments.
#[derive(Clone, Copy, Debug)]
struct Reading {
    now: Moment,
    system: Duration,
}

impl Reading {
    fn moment_of(self, stamp: Option<Duration>) -> Moment {
        match stamp.and_then(|stamp| self.system.checked_sub(stamp)) {
            Some(age) if age <= OLDEST_STAMP => Moment(self.now.0.saturating_sub(age)),
            _ => self.now,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stamp_is_believed_only_when_its_age_makes_sense() {
        let now = Moment(Duration::from_secs(10));
        let reading = Reading { now, system: Duration::from_secs(1_000) };
        let read = |millis| reading.moment_of(Some(Duration::from_millis(millis)));
        assert_eq!(read(1_000_000 - 30), Moment(Duration::from_millis(9_970)));
        assert_eq!(read(1_000_000 + 1), now, "from the future: the clock was set back");
        assert_eq!(read(1_000_000 - 3_600_000 / 4), now, "from long ago: the clock was set forward");
        assert_eq!(reading.moment_of(None), now);
    }
}
