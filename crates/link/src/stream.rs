//! A stream's two halves, and the task that carries it over one connection after the other.

use crate::resume::{Frame, Incoming, Outgoing};
use crate::session::{Handle, Inner};
use crate::wire::{self, Attach, Head, Kind, ReadFailure};
use crate::{Lane, Priority, StreamCounters, StreamError};
use bytes::{Bytes, BytesMut};
use godwit_units::Bytes as Amount;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{Notify, OwnedSemaphorePermit, mpsc};
use tokio::time::Instant;

/// How long a small acknowledgement waits for company.
const ACK_DELAY: Duration = Duration::from_millis(10);

/// What of a stream that its opener has just attached for the first time goes before the peer has answered, in bytes: it can begin nowhere but at
/// its beginning. It goes with the attachment, before all else of the lane, so it is no more than a frame.
const EARLY: usize = crate::resume::MAX_CHUNK;

/// The code of a stream whose half was dropped before its end.
pub const ABANDONED: u32 = u32::MAX;

/// A byte pipe in both directions.
#[derive(Debug)]
pub struct Stream {
    /// Ours to the peer.
    pub send: SendHalf,
    /// The peer's to us.
    pub recv: RecvHalf,
}

impl Stream {
    pub(crate) fn new(handle: &Arc<Handle>, shared: &Arc<Shared>) -> Self {
        let send = SendHalf { shared: Arc::clone(shared), handle: Arc::clone(handle) };
        let recv = RecvHalf { shared: Arc::clone(shared), handle: Arc::clone(handle) };
        Self { send, recv }
    }

    /// The two halves, for two tasks.
    #[must_use]
    pub fn split(self) -> (SendHalf, RecvHalf) {
        (self.send, self.recv)
    }
}

/// The writing half. Dropped before [`finish`](Self::finish) it gives the whole stream up: what broke off must not look
/// complete.
#[derive(Debug)]
pub struct SendHalf {
    shared: Arc<Shared>,
    handle: Arc<Handle>,
}

/// The reading half. Dropped, it lets the peer go on writing into nothing.
#[derive(Debug)]
pub struct RecvHalf {
    shared: Arc<Shared>,
    handle: Arc<Handle>,
}

impl SendHalf {
    /// Writes all of `data`, waiting while a window of it is unread by the peer's application. If the wait is dropped,
    /// a part may have been written.
    ///
    /// # Errors
    /// The stream is over.
    pub async fn write(&mut self, mut data: Bytes) -> Result<(), StreamError> {
        while !data.is_empty() {
            {
                let mut core = self.shared.lock();
                core.check()?;
                if core.out.is_finished() {
                    return Err(StreamError::Finished);
                }
                let room = usize::try_from(core.out.room()).unwrap_or(usize::MAX).min(data.len());
                core.out.push(data.split_to(room));
                if room > 0 {
                    self.shared.driver.notify_one();
                    continue;
                }
            }
            self.shared.writer.notified().await;
        }
        Ok(())
    }

    /// Says that no more comes. Does not wait: [`flush`](Self::flush) does.
    ///
    /// # Errors
    /// The stream is over.
    pub fn finish(&mut self) -> Result<(), StreamError> {
        let mut core = self.shared.lock();
        core.check()?;
        core.out.finish();
        self.shared.driver.notify_one();
        Ok(())
    }

    /// Waits until the peer's link layer has everything written so far, and the end if that was said. Before the last
    /// holder of a session drops it, this is what makes sure that nothing is lost.
    ///
    /// # Errors
    /// The stream is over.
    pub async fn flush(&mut self) -> Result<(), StreamError> {
        loop {
            {
                let core = self.shared.lock();
                if core.out.is_flushed() {
                    return Ok(());
                }
                core.check()?;
            }
            self.shared.writer.notified().await;
        }
    }

    /// How many bytes may be unread by the peer's application: at least the bandwidth-delay product.
    pub fn set_window(&mut self, window: Amount) {
        self.flow().set_window(window);
    }

    /// What we send on it from now on, acknowledgements of what comes included, goes before or behind other streams in this way. What the peer
    /// sends stays as it is. A half that only answers may go first: what comes by the stream would wait for its acknowledgements.
    pub fn set_priority(&self, priority: Priority) {
        self.shared.lock().ours = priority;
        self.shared.driver.notify_one();
    }

    /// Gives the stream up, both directions. `u32::MAX` is what a dropped half says.
    pub fn reset(self, code: u32) {
        self.shared.abandon(code);
    }

    /// What was carried.
    #[must_use]
    pub fn counters(&self) -> StreamCounters {
        self.shared.counters()
    }

    /// The stream for whoever watches over it while somebody else writes.
    #[must_use]
    pub fn flow(&self) -> Flow {
        Flow(Arc::clone(&self.shared))
    }

    /// The session that it belongs to.
    #[must_use]
    pub fn session(&self) -> crate::Session {
        crate::Session::of(&self.handle)
    }
}

/// A stream's flow, to be watched and bounded while somebody else writes. Once the stream is over its counters stand still.
#[derive(Clone, Debug)]
pub struct Flow(Arc<Shared>);

impl Flow {
    /// What was carried.
    #[must_use]
    pub fn counters(&self) -> StreamCounters {
        self.0.counters()
    }

    /// As [`SendHalf::set_window`].
    pub fn set_window(&self, window: Amount) {
        self.0.lock().out.set_window(window.0);
        self.0.writer.notify_one();
    }
}

impl Drop for SendHalf {
    fn drop(&mut self) {
        if !self.shared.lock().out.is_finished() {
            self.shared.abandon(ABANDONED);
        }
    }
}

impl RecvHalf {
    /// The next bytes; `None` at the end. May be dropped and called again.
    ///
    /// # Errors
    /// The stream is over before its end.
    pub async fn read(&mut self) -> Result<Option<Bytes>, StreamError> {
        loop {
            {
                let mut core = self.shared.lock();
                if let Some(data) = core.queue.pop_front() {
                    core.inc.consume(data.len() as u64);
                    self.shared.driver.notify_one();
                    return Ok(Some(data));
                }
                if core.inc.is_done() {
                    return Ok(None);
                }
                core.check()?;
            }
            self.shared.reader.notified().await;
        }
    }

    /// The next bytes, gathered: at most about `most`, and fewer only when they have waited for `patience` or nothing follows. A reader that has to
    /// be woken for what it gets does so a thousand times a second then, not for each packet. `None` at the end. May be dropped and called again.
    ///
    /// # Errors
    /// The stream is over before its end.
    pub async fn read_gathered(&mut self, most: usize, patience: Duration) -> Result<Option<Bytes>, StreamError> {
        let mut waited = patience.is_zero();
        loop {
            let is_empty = {
                let mut core = self.shared.lock();
                let ends = core.inc.is_done() || core.error.is_some();
                if core.queue.is_empty() {
                    if core.inc.is_done() {
                        return Ok(None);
                    }
                    core.check()?;
                } else if waited || ends || core.has_waiting(most) {
                    let data = core.take_waiting(most);
                    core.inc.consume(data.len() as u64);
                    self.shared.driver.notify_one();
                    return Ok(Some(data));
                }
                core.queue.is_empty()
            };
            if is_empty {
                self.shared.reader.notified().await;
            } else {
                tokio::time::sleep(patience).await;
                waited = true;
            }
        }
    }

    /// Gives the stream up, both directions.
    pub fn reset(self, code: u32) {
        self.shared.abandon(code);
    }

    /// What was carried.
    #[must_use]
    pub fn counters(&self) -> StreamCounters {
        self.shared.counters()
    }

    /// The session that it belongs to.
    #[must_use]
    pub fn session(&self) -> crate::Session {
        crate::Session::of(&self.handle)
    }
}

impl Drop for RecvHalf {
    fn drop(&mut self) {
        let mut core = self.shared.lock();
        core.discard = true;
        let left: usize = core.queue.drain(..).map(|data| data.len()).sum();
        core.inc.consume(left as u64);
        self.shared.driver.notify_one();
    }
}

/// A stream as its halves and its task know it.
#[derive(Debug)]
pub struct Shared {
    pub id: u64,
    pub lane: Lane,
    pub kind: Kind,
    /// As it was opened.
    pub priority: Priority,
    pub hello: Bytes,
    core: Mutex<Core>,
    /// Wakes the task.
    driver: Notify,
    /// Wakes the half that writes, and the half that reads.
    writer: Notify,
    reader: Notify,
}

#[derive(Debug)]
struct Core {
    /// Of what we send.
    ours: Priority,
    out: Outgoing,
    inc: Incoming,
    /// What may go still before the peer has answered the first attachment. None: it has, or this is not the first one.
    early: Option<usize>,
    /// What of the lane's room this connection has taken: each part until the peer has the stream up to there.
    under_way: VecDeque<(u64, OwnedSemaphorePermit)>,
    /// Received, not yet read; bounded by `inc`'s limit.
    queue: VecDeque<Bytes>,
    error: Option<StreamError>,
    /// To be told to the peer.
    reset: Option<u32>,
    discard: bool,
}

impl Core {
    fn check(&self) -> Result<(), StreamError> {
        self.error.clone().map_or(Ok(()), Err)
    }

    /// Whether so many bytes wait for the reader.
    fn has_waiting(&self, bytes: usize) -> bool {
        let sums = self.queue.iter().scan(0, |sum, data| {
            *sum += data.len();
            Some(*sum)
        });
        sums.into_iter().any(|sum| sum >= bytes)
    }

    /// What waits for the reader, until it is so many bytes or more; at least one piece.
    fn take_waiting(&mut self, bytes: usize) -> Bytes {
        let Some(first) = self.queue.pop_front() else { return Bytes::new() };
        if first.len() >= bytes || self.queue.is_empty() {
            return first;
        }
        let mut all = BytesMut::with_capacity(bytes + first.len());
        all.extend_from_slice(&first);
        while all.len() < bytes
            && let Some(next) = self.queue.pop_front()
        {
            all.extend_from_slice(&next);
        }
        all.freeze()
    }

    /// The peer has everything before `received`.
    fn arrived(&mut self, received: u64) {
        while self.under_way.front().is_some_and(|(end, _)| *end <= received) {
            self.under_way.pop_front();
        }
    }

    /// Bytes that wait to be sent and may be.
    fn may_send(&self) -> usize {
        let unsent = usize::try_from(self.out.unsent()).unwrap_or(usize::MAX);
        self.early.map_or(unsent, |left| unsent.min(left))
    }

    /// The next frame of data of at most `most` bytes, if it may be sent.
    fn next_data(&mut self, most: usize) -> Option<(u64, Bytes)> {
        let most = most.min(self.may_send());
        match (most > 0).then(|| self.out.next(most)).flatten() {
            Some(Frame::Data { offset, data }) => {
                self.early = self.early.map(|left| left - data.len());
                Some((offset, data))
            }
            _ => None,
        }
    }

    fn is_complete(&self) -> bool {
        self.out.is_done() && self.inc.is_done() && self.inc.is_told()
    }
}

/// A QUIC stream that carries ours, and where the peer wants it to go on.
pub type Carrier = (quinn::SendStream, quinn::RecvStream, u64);

/// How a stream's time on one connection ended.
enum Ended {
    /// With the connection.
    Lost,
    /// For good.
    Over,
}

/// What the task does next.
enum Step {
    Write(Vec<Frame>),
    Data(usize),
    AckSoon,
    Idle,
    Complete,
    Dead,
}

/// Waits for a moment; for ever, if there is none.
async fn at(moment: Option<Instant>) {
    match moment {
        Some(moment) => tokio::time::sleep_until(moment).await,
        None => std::future::pending().await,
    }
}

impl Shared {
    pub fn new(id: u64, lane: Lane, attach: (Kind, Priority, Bytes), window: u64, limit: u64) -> Arc<Self> {
        let (kind, priority, hello) = attach;
        let (out, inc) = (Outgoing::new(window), Incoming::new(limit));
        let (under_way, queue) = (VecDeque::new(), VecDeque::new());
        let core =
            Core { ours: priority, out, inc, early: None, under_way, queue, error: None, reset: None, discard: false };
        let (core, driver, writer, reader) = (Mutex::new(core), Notify::new(), Notify::new(), Notify::new());
        Arc::new(Self { id, lane, kind, priority, hello, core, driver, writer, reader })
    }

    fn lock(&self) -> MutexGuard<'_, Core> {
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn counters(&self) -> StreamCounters {
        let core = self.lock();
        let (written, acknowledged) = core.out.progress();
        let received = Amount(core.inc.bytes());
        StreamCounters { written: Amount(written), acknowledged: Amount(acknowledged), received }
    }

    /// Ends it with an error, unless it is over already.
    pub fn fail(&self, error: StreamError) {
        self.lock().error.get_or_insert(error);
        self.driver.notify_one();
        self.writer.notify_one();
        self.reader.notify_one();
    }

    /// The peer no longer has it: it was complete there, or given up.
    pub fn forgotten(&self) {
        self.fail(StreamError::Reset { code: ABANDONED });
    }

    fn abandon(&self, code: u32) {
        {
            let mut core = self.lock();
            if core.error.is_some() || core.is_complete() {
                return;
            }
            core.reset = Some(code);
        }
        self.fail(StreamError::Reset { code });
    }

    fn violation(&self, why: impl std::fmt::Display) -> Ended {
        self.fail(StreamError::Protocol(why.to_string()));
        Ended::Over
    }

    /// The opener's task: attaches to every connection of the lane, until the stream is over.
    pub async fn drive_opened(self: Arc<Self>, link: Arc<Inner>) {
        let mut connections = link.connections(self.lane);
        let mut is_known = false;
        loop {
            let Ok(now) = connections.wait_for(Option::is_some).await.map(|now| now.clone()) else { break };
            let Some(connection) = now else { continue };
            let ended = match self.attach(&connection).await {
                Ok(carrier) if !std::mem::replace(&mut is_known, true) => {
                    self.lock().early = Some(EARLY);
                    self.carry(&link, carrier, 0).await
                }
                Ok((send, mut recv)) => match self.answer(&mut recv).await {
                    Ok(received) => self.carry(&link, (send, recv), received).await,
                    Err(ended) => ended,
                },
                Err(ended) => ended,
            };
            if matches!(ended, Ended::Over) {
                break;
            }
            // Wait for another connection than this one; nobody can be told of a stream that is over meanwhile.
            let id = connection.stable_id();
            let other = connections.wait_for(|now| now.as_ref().is_none_or(|c| c.stable_id() != id));
            if other.await.is_err() || self.lock().error.is_some() {
                break;
            }
        }
        link.forget(self.id);
    }

    async fn attach(&self, connection: &quinn::Connection) -> Result<(quinn::SendStream, quinn::RecvStream), Ended> {
        let (mut send, recv) = connection.open_bi().await.map_err(|_| Ended::Lost)?;
        // Before everything else: with a later QUIC stream of more urgency the peer sees this one, too, and waits for the greeting no longer than
        // its patience. `transmit` gives it its own priority.
        let _ = send.set_priority(Priority::Control as i32);
        let received = self.lock().inc.resume();
        let (id, kind, priority, hello) = (self.id, self.kind, self.priority, self.hello.clone());
        let attach = Attach { id, kind, priority, received, hello };
        send.write_chunk(attach.encode()).await.map_err(|_| Ended::Lost)?;
        Ok((send, recv))
    }

    /// The peer's answer to an attachment: where it wants the stream to go on.
    async fn answer(&self, recv: &mut quinn::RecvStream) -> Result<u64, Ended> {
        let mut answer = [0; 8];
        match recv.read_exact(&mut answer).await {
            Ok(()) => Ok(u64::from_be_bytes(answer)),
            Err(quinn::ReadExactError::ReadError(quinn::ReadError::Reset(_))) => {
                self.fail(StreamError::Protocol("the peer refused the stream".into()));
                Err(Ended::Over)
            }
            Err(_) => Err(Ended::Lost),
        }
    }

    /// The acceptor's task: carries it over whatever the opener attaches.
    pub async fn drive_accepted(self: Arc<Self>, link: Arc<Inner>, mut carriers: mpsc::Receiver<Carrier>) {
        while let Some((mut send, recv, received)) = carriers.recv().await {
            let _ = send.set_priority(self.lock().ours as i32);
            let ours = self.lock().inc.resume();
            let ended = match send.write_all(&ours.to_be_bytes()).await {
                Ok(()) => self.carry(&link, (send, recv), received).await,
                Err(_) => Ended::Lost,
            };
            if matches!(ended, Ended::Over) {
                break;
            }
        }
        link.forget(self.id);
    }

    /// Carries the stream over one QUIC stream.
    async fn carry(&self, link: &Inner, carrier: (quinn::SendStream, quinn::RecvStream), received: u64) -> Ended {
        let (mut send, mut recv) = carrier;
        // A stream that was given up may have been given up by a peer that forgot it: only the reset matters then.
        let resumed = {
            let mut core = self.lock();
            if core.error.is_some() { Ok(()) } else { core.out.resume(received) }
        };
        if let Err(violation) = resumed {
            let _ = send.reset(wire::code::PROTOCOL.into());
            return self.violation(violation);
        }
        self.writer.notify_one();
        let ended = tokio::select! {
            biased;
            // First, since it knows why: a peer that refuses the stream takes nothing of it, either.
            ended = self.receive(&mut recv) => ended,
            ended = self.transmit(link, &mut send) => ended,
        };
        {
            let mut core = self.lock();
            core.under_way.clear();
            core.early = None;
        }
        if let (Ended::Over, Some(StreamError::Protocol(_))) = (&ended, &self.lock().error) {
            let _ = send.reset(wire::code::PROTOCOL.into());
        }
        ended
    }

    fn step(&self) -> Step {
        let mut core = self.lock();
        if core.error.is_some() {
            return core.reset.take().map_or(Step::Dead, |code| Step::Write(vec![Frame::Reset { code }]));
        }
        if core.is_complete() {
            return Step::Complete;
        }
        if core.inc.is_urgent() {
            return Step::Write(core.inc.ack().into_iter().collect());
        }
        match core.may_send() {
            0 => {}
            bytes => return Step::Data(bytes),
        }
        if let Some(fin) = core.out.next(0) {
            return Step::Write(vec![fin]);
        }
        if core.inc.has_news() { Step::AckSoon } else { Step::Idle }
    }

    async fn transmit(&self, link: &Inner, send: &mut quinn::SendStream) -> Ended {
        let mut grant = None;
        let mut room: Option<OwnedSemaphorePermit> = None;
        // By when what has come is to be acknowledged.
        let mut ack_by = None;
        let mut priority = None;
        loop {
            let (ours, is_early) = {
                let core = self.lock();
                (core.ours, core.early.is_some())
            };
            // What goes early goes as the attachment does.
            if !is_early && priority.replace(ours) != Some(ours) {
                let _ = send.set_priority(ours as i32);
            }
            let step = self.step();
            if !matches!(step, Step::Data(_)) {
                room = None;
            }
            let frames = match step {
                Step::Write(frames) => frames,
                Step::Data(unsent) => {
                    let mut left = unsent.min(crate::resume::MAX_CHUNK);
                    if room.is_none()
                        && let Some(of_lane) = link.room(self.lane, ours)
                    {
                        let due = self.ack_due(&mut ack_by);
                        let taken = Arc::clone(of_lane).acquire_many_owned(left as u32);
                        tokio::select! {
                            biased;
                            // Nobody closes this semaphore.
                            taken = taken => room = taken.ok(),
                            () = at(due) => left = 0,
                            // As below.
                            () = self.driver.notified() => continue,
                        }
                    }
                    left = room.as_ref().map_or(left, |room| left.min(room.num_permits()));
                    if grant.is_none() && left > 0 && self.lane != Lane::Control {
                        grant = link.limiter().ask(ours, left);
                    }
                    if let Some(waiting) = &mut grant
                        && left > 0
                    {
                        let due = self.ack_due(&mut ack_by);
                        left = tokio::select! {
                            () = waiting.wait() => waiting.bytes.min(left),
                            () = at(due) => 0,
                            // An acknowledgement may be due, or the stream over.
                            () = self.driver.notified() => continue,
                        };
                    }
                    // What goes without data is an acknowledgement: the wait goes on.
                    grant = grant.filter(|_| left == 0);
                    let mut core = self.lock();
                    let mut frames: Vec<Frame> = core.inc.ack().into_iter().collect();
                    let (most, mut end) = (left, 0);
                    while let Some((offset, data)) = core.next_data(left) {
                        left -= data.len();
                        end = offset + data.len() as u64;
                        frames.push(Frame::Data { offset, data });
                    }
                    if left < most
                        && let Some(part) = room.take().and_then(|mut room| room.split(most - left))
                    {
                        core.under_way.push_back((end, part));
                    }
                    frames
                }
                Step::AckSoon => {
                    let due = self.ack_due(&mut ack_by);
                    tokio::select! {
                        () = at(due) => self.lock().inc.ack().into_iter().collect(),
                        () = self.driver.notified() => continue,
                    }
                }
                Step::Idle => {
                    self.driver.notified().await;
                    continue;
                }
                // A peer that has not answered yet would find nobody to answer, and might wait for another connection then.
                Step::Dead if is_early => {
                    self.driver.notified().await;
                    continue;
                }
                Step::Complete | Step::Dead => {
                    let _ = send.finish();
                    // The opener may go: what it wrote still arrives. The acceptor waits, in `receive`, for the
                    // opener's end, which says that our last acknowledgement came.
                    if self.is_ours(link) {
                        return Ended::Over;
                    }
                    std::future::pending().await
                }
            };
            let mut pieces = Vec::with_capacity(2 * frames.len());
            for frame in frames {
                if matches!(frame, Frame::Ack { .. }) {
                    ack_by = None;
                }
                pieces.push(wire::head(&frame));
                if let Frame::Data { data, .. } = frame {
                    pieces.push(data);
                }
            }
            if let Err(error) = send.write_all_chunks(&mut pieces).await {
                return self.broken(&error.to_string(), matches!(error, quinn::WriteError::ConnectionLost(_)));
            }
        }
    }

    /// When an acknowledgement is due, if one is: [`ACK_DELAY`] after the first byte that it is for, whatever comes meanwhile.
    fn ack_due(&self, by: &mut Option<Instant>) -> Option<Instant> {
        if self.lock().inc.has_news() {
            by.get_or_insert_with(|| Instant::now() + ACK_DELAY);
        } else {
            *by = None;
        }
        *by
    }

    fn is_ours(&self, link: &Inner) -> bool {
        link.opens(self.id)
    }

    /// The QUIC stream ended: with its connection, or because the peer ended it.
    fn broken(&self, why: &str, with_connection: bool) -> Ended {
        let over = {
            let core = self.lock();
            core.error.is_some() || core.is_complete()
        };
        match (with_connection, over) {
            (true, _) => Ended::Lost,
            (false, true) => Ended::Over,
            (false, false) => self.violation(format!("its QUIC stream ended early: {why}")),
        }
    }

    async fn receive(&self, recv: &mut quinn::RecvStream) -> Ended {
        if self.lock().early.is_some() {
            match self.answer(recv).await {
                Ok(0) => {}
                Ok(other) => return self.violation(format!("a stream that has just begun is to go on at {other}")),
                Err(ended) => return ended,
            }
            self.lock().early = None;
            self.driver.notify_one();
        }
        loop {
            match self.receive_frame(recv).await {
                Ok(true) => {}
                Ok(false) => return self.broken("no more frames", false),
                Err(ReadFailure::Bad(why)) => return self.violation(why),
                Err(ReadFailure::Lost(why)) => {
                    // quinn tells a reset QUIC stream from a lost connection; `closed early` is neither.
                    return self.broken(&why, why.contains("connection lost"));
                }
            }
        }
    }

    async fn receive_frame(&self, recv: &mut quinn::RecvStream) -> Result<bool, ReadFailure> {
        let bad = |violation: crate::resume::Violation| ReadFailure::Bad(violation.to_string());
        match wire::read_head(recv).await? {
            None => return Ok(false),
            Some(Head::Data { mut offset, mut length }) => {
                while length > 0 {
                    let chunk = recv.read_chunk(length, true).await.map_err(|e| ReadFailure::Lost(e.to_string()))?;
                    let Some(chunk) = chunk else { return Ok(false) };
                    let data = chunk.bytes;
                    length -= data.len();
                    let at = offset;
                    offset = offset.saturating_add(data.len() as u64);
                    let mut core = self.lock();
                    let new = core.inc.data(at, data).map_err(bad)?;
                    if core.discard {
                        core.inc.consume(new.len() as u64);
                    } else if !new.is_empty() {
                        core.queue.push_back(new);
                    }
                    drop(core);
                    self.reader.notify_one();
                }
            }
            Some(Head::Whole(Frame::Ack { received, consumed })) => {
                let mut core = self.lock();
                core.out.acknowledge(received, consumed).map_err(bad)?;
                core.arrived(received);
                drop(core);
                self.writer.notify_one();
            }
            Some(Head::Whole(Frame::Fin { end })) => {
                self.lock().inc.fin(end).map_err(bad)?;
                self.reader.notify_one();
            }
            Some(Head::Whole(Frame::Reset { code })) => self.fail(StreamError::Reset { code }),
            Some(Head::Whole(Frame::Data { .. })) => unreachable!("heads of data have a variant of their own"),
        }
        self.driver.notify_one();
        Ok(true)
    }
}
