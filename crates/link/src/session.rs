//! A session: what two nodes share, over whichever connections there are at the moment.

use crate::limiter::Limiter;
use crate::resume::MAX_CHUNK;
use crate::samples::{Path, Sampled};
use crate::stream::{Carrier, Shared, Stream};
use crate::trains::Shown;
use crate::transport::{FOR_BACKGROUND, FOR_BULK};
use crate::windows::Windows;
use crate::wire::{self, Attach, Kind, MAX_HELLO, MAX_STREAMS, code};
use crate::{Closed, Config, Counters, Lane, LaneCounters, Priority, RecvHalf, RequestError, SendHalf, StreamError};
use bytes::{Bytes, BytesMut};
use godwit_trust::Identity;
use godwit_units::{BitRate, Bytes as Amount};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::{Mutex as AsyncMutex, Semaphore, mpsc, watch};
use tokio_util::sync::CancellationToken;

/// The longest message, in bytes: one datagram on most paths.
pub const MAX_MESSAGE: usize = 1200;
/// The longest request, and the longest answer, in bytes.
pub const MAX_REQUEST: usize = 1 << 20;
/// Messages that wait for `recv_message`; more are dropped, as a full router would.
const MESSAGES: usize = 256;
/// Streams, and requests, that wait to be accepted; more wait in QUIC.
const BACKLOG: usize = 64;
/// How long the peer may take to say what a new QUIC stream is for.
const ATTACH_PATIENCE: Duration = Duration::from_secs(10);

/// Whether the lanes are connected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// All of them.
    Up,
    /// Not all of them; the initiator connects anew.
    Down {
        /// When the first was noticed to be gone.
        since: Instant,
    },
    /// For good.
    Closed(Closed),
}

/// Two nodes' session. Clones, streams and responders hold it; when the last is dropped, it closes at both sides.
#[derive(Clone, Debug)]
pub struct Session {
    handle: Arc<Handle>,
}

/// Closes the session when nobody holds it.
#[derive(Debug)]
pub struct Handle {
    inner: Arc<Inner>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.inner.close(Closed::Here);
    }
}

#[derive(Debug, Default)]
struct Slot {
    connection: watch::Sender<Option<quinn::Connection>>,
    past: Mutex<LaneCounters>,
}

impl Slot {
    /// Ends the connection, if there is one, with the session's last word.
    fn part(&self, why: &Closed) {
        let number = match why {
            Closed::Expired => code::EXPIRED,
            Closed::PeerRestarted => code::RESTARTED,
            _ => code::CLOSED,
        };
        if let Some(connection) = self.connection.send_replace(None) {
            connection.close(number.into(), why.to_string().as_bytes());
        }
    }
}

#[derive(Debug)]
struct Entry {
    shared: Arc<Shared>,
    /// To an accepted stream's task.
    carriers: Option<mpsc::Sender<Carrier>>,
}

/// What tasks share.
#[derive(Debug)]
pub struct Inner {
    pub id: u128,
    pub peer: Identity,
    pub initiator: bool,
    pub began: Instant,
    pub peer_incarnation: AtomicU64,
    pub config: Config,
    pub over: CancellationToken,
    closed: OnceLock<Closed>,
    state: watch::Sender<State>,
    down_before: Mutex<Duration>,
    slots: [Slot; 3],
    windows: Arc<Windows>,
    /// What the background and bulk may have under way on each lane, bytes.
    room: [[Arc<Semaphore>; 2]; 3],
    streams: Mutex<HashMap<u64, Entry>>,
    next: AtomicU64,
    limiter: Arc<Limiter>,
    accept_in: mpsc::Sender<Arc<Shared>>,
    accept_out: AsyncMutex<mpsc::Receiver<Arc<Shared>>>,
    request_in: mpsc::Sender<Arc<Shared>>,
    request_out: AsyncMutex<mpsc::Receiver<Arc<Shared>>>,
    message_in: mpsc::Sender<Bytes>,
    message_out: AsyncMutex<mpsc::Receiver<Bytes>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Inner {
    pub fn new(
        id: u128,
        (peer, limiter): (Identity, Arc<Limiter>),
        initiator: bool,
        incarnation: u64,
        config: Config,
    ) -> Arc<Self> {
        let (accept_in, accept_out) = mpsc::channel(BACKLOG);
        let (request_in, request_out) = mpsc::channel(BACKLOG);
        let (message_in, message_out) = mpsc::channel(MESSAGES);
        Arc::new(Self {
            id,
            peer,
            initiator,
            began: Instant::now(),
            peer_incarnation: AtomicU64::new(incarnation),
            config,
            over: CancellationToken::new(),
            closed: OnceLock::new(),
            state: watch::Sender::new(State::Down { since: Instant::now() }),
            down_before: Mutex::default(),
            slots: Default::default(),
            windows: Arc::default(),
            room: Lane::ALL.map(|_| [FOR_BACKGROUND, FOR_BULK].map(|bytes| Arc::new(Semaphore::new(bytes)))),
            streams: Mutex::default(),
            next: AtomicU64::new(0),
            limiter,
            accept_in,
            accept_out: AsyncMutex::new(accept_out),
            request_in,
            request_out: AsyncMutex::new(request_out),
            message_in,
            message_out: AsyncMutex::new(message_out),
        })
    }

    /// A task that ends with the session.
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let over = self.over.clone();
        tokio::spawn(async move {
            tokio::select! {
                () = over.cancelled() => {}
                () = task => {}
            }
        });
    }

    pub fn limiter(&self) -> &Arc<Limiter> {
        &self.limiter
    }

    /// What a lane has room for of that priority; none where it is not bounded.
    pub fn room(&self, lane: Lane, priority: Priority) -> Option<&Arc<Semaphore>> {
        let [background, bulk] = &self.room[lane.index()];
        match priority {
            Priority::Background => Some(background),
            Priority::Bulk => Some(bulk),
            Priority::Mirrored | Priority::Interactive | Priority::Control => None,
        }
    }

    /// Whether it carries a stream.
    pub fn is_used(&self) -> bool {
        !lock(&self.streams).is_empty()
    }

    pub fn opens(&self, stream: u64) -> bool {
        stream.is_multiple_of(2) == self.initiator
    }

    pub fn is_up(&self) -> bool {
        *self.state.borrow() == State::Up
    }

    pub fn connections(&self, lane: Lane) -> watch::Receiver<Option<quinn::Connection>> {
        self.slots[lane.index()].connection.subscribe()
    }

    pub fn forget(&self, stream: u64) {
        lock(&self.streams).remove(&stream);
    }

    /// The streams of a lane that we opened.
    pub fn live(&self, lane: Lane) -> Vec<u64> {
        let streams = lock(&self.streams);
        streams.iter().filter(|(id, e)| e.shared.lane == lane && self.opens(**id)).map(|(id, _)| *id).collect()
    }

    /// Ends the session; the first reason stays.
    pub fn close(&self, why: Closed) {
        if self.declare_over(why) {
            self.end();
        }
    }

    /// From here on, who looks at the session sees that it is over. Whether it was not already; then [`end`](Self::end) is to follow.
    pub fn declare_over(&self, why: Closed) -> bool {
        let first = self.closed.set(why.clone()).is_ok();
        if first {
            self.state.send_replace(State::Closed(why));
        }
        first
    }

    /// Ends what hangs on the session. After [`declare_over`](Self::declare_over): whoever hears of the end from a stream finds the session
    /// closed.
    pub fn end(&self) {
        let why = self.closed();
        self.slots.iter().for_each(|slot| slot.part(&why));
        for (_, entry) in lock(&self.streams).drain() {
            entry.shared.fail(StreamError::of(why.clone()));
        }
        self.over.cancel();
    }

    fn refresh(&self) {
        // Looked at under the state's lock: of two lanes that change at once the one that comes last sees both.
        let up = || self.slots.iter().all(|slot| slot.connection.borrow().is_some());
        self.state.send_if_modified(|state| match (&*state, up()) {
            (State::Down { since }, true) => {
                *lock(&self.down_before) += since.elapsed();
                *state = State::Up;
                true
            }
            (State::Up, false) => {
                *state = State::Down { since: Instant::now() };
                true
            }
            _ => false,
        });
    }

    /// A lane has a new connection, and the peer has told which of its streams it still has.
    pub fn install(self: &Arc<Self>, lane: Lane, connection: quinn::Connection, live: &[u64]) {
        let gone: Vec<Arc<Shared>> = {
            let streams = lock(&self.streams);
            let theirs = streams.iter().filter(|(id, e)| e.shared.lane == lane && !self.opens(**id));
            theirs.filter(|(id, _)| !live.contains(id)).map(|(_, e)| Arc::clone(&e.shared)).collect()
        };
        for shared in gone {
            self.forget(shared.id);
            shared.forgotten();
        }
        if let Some(samples) = Sampled::of(&connection) {
            samples.join(&self.windows, lane);
        }
        let slot = &self.slots[lane.index()];
        lock(&slot.past).connections += 1;
        if let Some(old) = slot.connection.send_replace(Some(connection.clone())) {
            old.close(code::REPLACED.into(), b"a newer connection came");
        }
        if let Some(why) = self.closed.get() {
            // `end` may have emptied the slot before.
            slot.part(why);
        }
        self.refresh();
        let inner = Arc::clone(self);
        tokio::spawn(async move { inner.serve(lane, connection).await });
    }

    /// Serves what the peer starts on a connection, until that ends.
    async fn serve(self: Arc<Self>, lane: Lane, connection: quinn::Connection) {
        let ended = loop {
            tokio::select! {
                pair = connection.accept_bi() => match pair {
                    Ok((send, recv)) => self.spawn(Arc::clone(&self).attached(lane, send, recv)),
                    Err(e) => break e,
                },
                message = connection.read_datagram(), if lane == Lane::Control => match message {
                    Ok(message) => drop(self.message_in.try_send(message)),
                    Err(e) => break e,
                },
                stream = connection.accept_uni(), if lane == Lane::Control => match stream {
                    Ok(mut stream) => {
                        let to = self.message_in.clone();
                        self.spawn(async move {
                            if let Ok(message) = stream.read_to_end(MAX_MESSAGE).await {
                                drop(to.try_send(message.into()));
                            }
                        });
                    }
                    Err(e) => break e,
                },
            }
        };
        tracing::debug!(peer = %self.peer, lane = wire::name(lane), %ended, "a connection ended");
        let stats = connection.stats();
        let slot = &self.slots[lane.index()];
        {
            let mut past = lock(&slot.past);
            past.sent += Amount(stats.udp_tx.bytes);
            past.received += Amount(stats.udp_rx.bytes);
        }
        let id = connection.stable_id();
        slot.connection.send_if_modified(|now| now.take_if(|c| c.stable_id() == id).is_some());
        self.refresh();
        if let Some(why) = final_word(&ended) {
            self.close(why);
        }
    }

    /// The peer attached one of its streams, new or known.
    async fn attached(self: Arc<Self>, lane: Lane, mut send: quinn::SendStream, mut recv: quinn::RecvStream) {
        let Ok(Ok(attach)) = tokio::time::timeout(ATTACH_PATIENCE, Attach::read(&mut recv)).await else {
            let _ = send.reset(code::PROTOCOL.into());
            return;
        };
        let Attach { id, kind, priority, received, hello } = attach;
        let (to_task, new) = {
            let mut streams = lock(&self.streams);
            // Under the lock: `end` fails every stream that is in the table, after the reason has been set.
            if self.opens(id) || self.closed.get().is_some() {
                let _ = send.reset(code::PROTOCOL.into());
                return;
            }
            if let Some(entry) = streams.get(&id) {
                (entry.carriers.clone(), None)
            } else {
                if streams.keys().filter(|id| !self.opens(**id)).count() >= MAX_STREAMS {
                    let _ = send.reset(code::BUSY.into());
                    return;
                }
                let (window, limit) = (self.config.window.0, self.config.receive_limit.0);
                let limit = if kind == Kind::Request { (MAX_REQUEST + MAX_CHUNK) as u64 } else { limit };
                let shared = Shared::new(id, lane, (kind, priority, hello), window, limit);
                // One waits while another is carried: a peer attaches a stream once a connection.
                let (carriers, waiting) = mpsc::channel(2);
                streams.insert(id, Entry { shared: Arc::clone(&shared), carriers: Some(carriers.clone()) });
                self.spawn(Arc::clone(&shared).drive_accepted(Arc::clone(&self), waiting));
                (Some(carriers), Some(shared))
            }
        };
        if let Some(to_task) = to_task {
            let _ = to_task.send((send, recv, received)).await;
        }
        if let Some(shared) = new {
            let queue = if kind == Kind::Request { &self.request_in } else { &self.accept_in };
            let _ = queue.send(shared).await;
        }
    }

    fn closed(&self) -> Closed {
        self.closed.get().cloned().unwrap_or(Closed::Here)
    }

    /// The next of a queue, until the session is over.
    async fn next<T>(&self, queue: &AsyncMutex<mpsc::Receiver<T>>) -> Result<T, Closed> {
        tokio::select! {
            biased;
            () = self.over.cancelled() => Err(self.closed()),
            item = async { queue.lock().await.recv().await } => item.ok_or_else(|| self.closed()),
        }
    }
}

/// Whether the peer said, with its last word, that the session is over.
pub fn final_word(ended: &quinn::ConnectionError) -> Option<Closed> {
    let quinn::ConnectionError::ApplicationClosed(close) = ended else { return None };
    match u32::try_from(close.error_code.into_inner()).unwrap_or(0) {
        code::CLOSED => Some(Closed::ByPeer),
        code::RESTARTED => Some(Closed::PeerRestarted),
        code::EXPIRED => Some(Closed::Expired),
        _ => None,
    }
}

impl Session {
    pub(crate) fn new(inner: Arc<Inner>) -> Self {
        Self { handle: Arc::new(Handle { inner }) }
    }

    pub(crate) fn of(handle: &Arc<Handle>) -> Self {
        Self { handle: Arc::clone(handle) }
    }

    fn inner(&self) -> &Arc<Inner> {
        &self.handle.inner
    }

    /// How many hold it: clones, streams and responders. It may change at once.
    #[must_use]
    pub fn holders(&self) -> usize {
        Arc::strong_count(&self.handle)
    }

    /// Who is at the other end, from its certificate.
    #[must_use]
    pub fn peer(&self) -> &Identity {
        &self.inner().peer
    }

    /// Whether it is connected; a receiver sees every change that lasts until it looks.
    #[must_use]
    pub fn state(&self) -> watch::Receiver<State> {
        self.inner().state.subscribe()
    }

    /// For how long it has been down; `None` while it is up or closed.
    #[must_use]
    pub fn down_for(&self) -> Option<Duration> {
        match &*self.inner().state.borrow() {
            State::Down { since } => Some(since.elapsed()),
            _ => None,
        }
    }

    /// How long it was down in all, the first connecting included.
    #[must_use]
    pub fn down_time(&self) -> Duration {
        // One after the other: `refresh` takes the second lock within the first.
        let now = self.down_for().unwrap_or_default();
        let before = *lock(&self.inner().down_before);
        before + now
    }

    /// QUIC's estimate of the control lane's round trip; `None` while that is down.
    #[must_use]
    pub fn rtt(&self) -> Option<Duration> {
        self.inner().slots[0].connection.borrow().as_ref().map(quinn::Connection::rtt)
    }

    /// A lane's path as its last acknowledgements tell; `None` while it is down.
    #[must_use]
    pub fn path(&self, lane: Lane) -> Option<Path> {
        let connection = self.inner().slots[lane.index()].connection.borrow();
        let connection = connection.as_ref()?;
        let path = Sampled::of(connection)?.path(Instant::now(), connection.stats().path.lost_packets);
        Some(Path { connection: connection.stable_id(), ..path })
    }

    /// What the link carries of a lane's packets, as far as those of the last second show it that were sent close together; `None` where there were too few, and
    /// while the lane is down.
    #[must_use]
    pub fn shown(&self, lane: Lane) -> Option<Shown> {
        let connection = self.inner().slots[lane.index()].connection.borrow();
        Sampled::of(connection.as_ref()?)?.shown(Instant::now())
    }

    /// What was carried so far.
    #[must_use]
    pub fn counters(&self) -> Counters {
        let mut counters = Counters::default();
        for (sum, slot) in counters.lanes.iter_mut().zip(&self.inner().slots) {
            *sum = *lock(&slot.past);
            if let Some(connection) = &*slot.connection.borrow() {
                let stats = connection.stats();
                sum.sent += Amount(stats.udp_tx.bytes);
                sum.received += Amount(stats.udp_rx.bytes);
            }
        }
        counters
    }

    /// Limits what *we* send to this peer on the disk and memory lanes of all sessions together, from now on; `None` lifts it. Counts
    /// as [`budget`](crate::budget) says.
    pub fn set_limit(&self, rate: Option<BitRate>) {
        self.inner().limiter.set_rate(rate);
    }

    /// Ends it for both sides. What was not acknowledged is lost.
    pub fn close(&self) {
        self.inner().close(Closed::Here);
    }

    /// Opens a stream with the window of the configuration. Does not wait for the peer: `hello` (at most
    /// [`MAX_HELLO`] bytes) and what is written go when there is a connection.
    ///
    /// # Errors
    /// The session is over, too many streams are open, or `hello` is too long.
    pub async fn open_stream(&self, lane: Lane, priority: Priority, hello: Bytes) -> Result<Stream, StreamError> {
        self.open_stream_with(lane, priority, hello, self.inner().config.window).await
    }

    /// As [`open_stream`](Self::open_stream), with a window for our direction. More than the peer's
    /// [`Config::receive_limit`] would have it cut off.
    ///
    /// # Errors
    /// As [`open_stream`](Self::open_stream).
    #[allow(clippy::unused_async, reason = "callers need not change when opening has to wait for room")]
    pub async fn open_stream_with(
        &self,
        lane: Lane,
        priority: Priority,
        hello: Bytes,
        window: Amount,
    ) -> Result<Stream, StreamError> {
        let shared = self.open(lane, (Kind::Stream, priority, hello), window)?;
        Ok(Stream::new(&self.handle, &shared))
    }

    fn open(&self, lane: Lane, attach: (Kind, Priority, Bytes), window: Amount) -> Result<Arc<Shared>, StreamError> {
        let inner = self.inner();
        if attach.2.len() > MAX_HELLO {
            return Err(StreamError::HelloTooLong { size: attach.2.len() });
        }
        let id = 2 * inner.next.fetch_add(1, Ordering::Relaxed) + u64::from(!inner.initiator);
        let shared = Shared::new(id, lane, attach, window.0, inner.config.receive_limit.0);
        {
            let mut streams = lock(&inner.streams);
            // Under the lock: `close` fails every stream that is in the table, after it has set its reason.
            if let Some(why) = inner.closed.get() {
                return Err(StreamError::of(why.clone()));
            }
            if streams.keys().filter(|id| inner.opens(**id)).count() >= MAX_STREAMS {
                return Err(StreamError::TooMany);
            }
            streams.insert(id, Entry { shared: Arc::clone(&shared), carriers: None });
        }
        inner.spawn(Arc::clone(&shared).drive_opened(Arc::clone(inner)));
        Ok(shared)
    }

    /// The next stream that the peer opened: its lane, its greeting, and itself.
    ///
    /// # Errors
    /// The session is over.
    pub async fn accept_stream(&self) -> Result<(Lane, Bytes, Stream), StreamError> {
        let shared = self.inner().next(&self.inner().accept_out).await.map_err(StreamError::of)?;
        Ok((shared.lane, shared.hello.clone(), Stream::new(&self.handle, &shared)))
    }

    /// Sends a message, at most [`MAX_MESSAGE`] bytes. It may be lost, and while the control lane is down it is;
    /// messages may overtake each other.
    ///
    /// # Errors
    /// It is too long, or the session is over.
    pub fn send_message(&self, message: Bytes) -> Result<(), RequestError> {
        check_size("a message", message.len(), MAX_MESSAGE)?;
        if let Some(why) = self.inner().closed.get() {
            return Err(StreamError::of(why.clone()).into());
        }
        let Some(connection) = self.inner().slots[0].connection.borrow().clone() else { return Ok(()) };
        if let Err(quinn::SendDatagramError::TooLarge) = connection.send_datagram(message.clone()) {
            // Before MTU discovery is done a datagram carries less than a message.
            self.inner().spawn(async move {
                if let Ok(mut stream) = connection.open_uni().await {
                    let _ = stream.write_chunk(message).await;
                    let _ = stream.finish();
                }
            });
        }
        Ok(())
    }

    /// The next message.
    ///
    /// # Errors
    /// The session is over.
    pub async fn recv_message(&self) -> Result<Bytes, StreamError> {
        self.inner().next(&self.inner().message_out).await.map_err(StreamError::of)
    }

    /// Asks, and waits for the answer. Over cuts it goes on, within `timeout`; it is never carried twice.
    ///
    /// # Errors
    /// No answer in time, the request or its answer is over [`MAX_REQUEST`], or the peer dropped it.
    pub async fn request(&self, request: Bytes, timeout: Duration) -> Result<Bytes, RequestError> {
        check_size("a request", request.len(), MAX_REQUEST)?;
        let attach = (Kind::Request, Priority::Control, Bytes::new());
        let shared = self.open(Lane::Control, attach, Amount(MAX_REQUEST as u64))?;
        let (mut send, mut recv) = Stream::new(&self.handle, &shared).split();
        let exchange = async {
            send.write(request).await?;
            send.finish()?;
            collect(&mut recv, "an answer").await
        };
        match tokio::time::timeout(timeout, exchange).await {
            Ok(answer) => answer,
            Err(_) => {
                recv.reset(crate::stream::ABANDONED);
                Err(RequestError::TimedOut(timeout))
            }
        }
    }

    /// The next request that has begun to come. It is read elsewhere ([`Asked::whole`]), so that one whose end a cut holds up holds up no other.
    ///
    /// # Errors
    /// The session is over.
    pub async fn accept_request(&self) -> Result<Asked, StreamError> {
        let shared = self.inner().next(&self.inner().request_out).await.map_err(StreamError::of)?;
        Ok(Asked(Stream::new(&self.handle, &shared)))
    }
}

/// A request that comes. Dropped, it tells the asker so.
#[derive(Debug)]
pub struct Asked(Stream);

impl Asked {
    /// All of it, and who answers it. It waits over cuts, until the asker gives up.
    ///
    /// # Errors
    /// It is over [`MAX_REQUEST`], or the asker or the session has ended.
    pub async fn whole(self) -> Result<(Bytes, Responder), RequestError> {
        let (send, mut recv) = self.0.split();
        let request = collect(&mut recv, "a request").await?;
        Ok((request, Responder { send }))
    }
}

/// Answers one request. Dropped, it tells the asker so.
#[derive(Debug)]
pub struct Responder {
    send: SendHalf,
}

impl Responder {
    /// Answers, and waits until the peer's link layer has the answer.
    ///
    /// # Errors
    /// It is over [`MAX_REQUEST`], or the asker has given up.
    pub async fn respond(mut self, answer: Bytes) -> Result<(), RequestError> {
        check_size("an answer", answer.len(), MAX_REQUEST)?;
        self.send.write(answer).await?;
        self.send.finish()?;
        Ok(self.send.flush().await?)
    }
}

fn check_size(what: &'static str, size: usize, limit: usize) -> Result<(), RequestError> {
    if size > limit { Err(RequestError::TooLong { what, size, limit }) } else { Ok(()) }
}

async fn collect(recv: &mut RecvHalf, what: &'static str) -> Result<Bytes, RequestError> {
    let mut all = BytesMut::new();
    while let Some(data) = recv.read().await? {
        check_size(what, all.len() + data.len(), MAX_REQUEST)?;
        all.extend_from_slice(&data);
    }
    Ok(all.freeze())
}
