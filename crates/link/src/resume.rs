//! The part of a stream that outlives connections: what was sent, what arrived, and where to go on.
//!
//! No sockets, clock or tasks. [`Outgoing`] keeps every byte until the other link layer has it; [`Incoming`] knows the
//! next byte it wants. A connection carries [`Frame`]s of both directions in order; when it dies, any suffix of what
//! was sent may be lost. On the next one each side tells its [`Incoming::received`], and the other goes on there
//! ([`Outgoing::resume`]). Data names its offset, so that a byte that comes twice is dropped and a gap is an error.
//!
//! An [`Ack`](Frame::Ack) says two things. *received*: our link layer has it, the sender may forget it. *consumed*: our
//! application has read it, the sender may send that much more. Were they one, either a slow reader would not bound the
//! sender, or `flush` would wait for an application that waits for us.
//!
//! The end of a stream counts as one more byte: whoever has acknowledged `end + 1` knows that it is complete.

use bytes::Bytes;
use std::collections::VecDeque;
use thiserror::Error;

/// The largest piece in one frame: small enough that an urgent frame behind it waits 5 ms at 100 Mbit/s.
pub const MAX_CHUNK: usize = 64 << 10;

/// After so many bytes an acknowledgement is due at once; for fewer it may wait a few milliseconds for company.
pub const ACK_EVERY: u64 = 64 << 10;

/// What travels on a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Frame {
    /// Bytes, from an offset on.
    Data {
        /// The first byte's place in the stream.
        offset: u64,
        /// At most [`MAX_CHUNK`].
        data: Bytes,
    },
    /// How far the other direction has come.
    Ack {
        /// Every byte before this has arrived.
        received: u64,
        /// Every byte before this has been read.
        consumed: u64,
    },
    /// The stream is so long.
    Fin {
        /// Its length.
        end: u64,
    },
    /// It was given up.
    Reset {
        /// Why: the application's own code.
        code: u32,
    },
}

/// The peer said what cannot be.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Violation {
    /// An acknowledgement, or a place to go on, of what was never sent or is forgotten.
    #[error("offset {offset} acknowledged; it may lie from {from} to {to}")]
    Offset {
        /// What it said.
        offset: u64,
        /// The least it could say.
        from: u64,
        /// The most it could say.
        to: u64,
    },
    /// Data from beyond what has arrived.
    #[error("data at {offset} where {expected} was next")]
    Gap {
        /// Where it lies.
        offset: u64,
        /// Where it should.
        expected: u64,
    },
    /// More unread data than a window.
    #[error("{unread} bytes unread, over the limit of {limit}")]
    Flood {
        /// What it would have been.
        unread: u64,
        /// The bound.
        limit: u64,
    },
    /// Data after the end, or two ends.
    #[error("the stream ended at {end}, then went on to {offset}")]
    AfterEnd {
        /// The length it said first.
        end: u64,
        /// What it said then.
        offset: u64,
    },
}

/// The sending direction.
#[derive(Debug)]
pub struct Outgoing {
    /// Unacknowledged pieces and where each starts.
    pieces: VecDeque<(u64, Bytes)>,
    /// The peer has everything before this; `end + 1` when it has the end, too.
    acked: u64,
    /// The peer's application has read everything before this.
    consumed: u64,
    /// What the present connection has been given, in the same counting.
    sent: u64,
    end: u64,
    finished: bool,
    window: u64,
}

impl Outgoing {
    /// Nothing sent. At most `window` bytes may be unread by the peer.
    #[must_use]
    pub const fn new(window: u64) -> Self {
        Self { pieces: VecDeque::new(), acked: 0, consumed: 0, sent: 0, end: 0, finished: false, window }
    }

    /// Another bound; what lies beyond a smaller one stays.
    pub const fn set_window(&mut self, window: u64) {
        self.window = window;
    }

    /// How many bytes may be written now.
    #[must_use]
    pub const fn room(&self) -> u64 {
        self.window.saturating_sub(self.end - self.consumed)
    }

    /// Takes bytes to send; the caller has asked for [`room`](Self::room).
    ///
    /// # Panics
    /// After [`finish`](Self::finish): the application's error is the shell's to report.
    pub fn push(&mut self, data: Bytes) {
        assert!(!self.finished, "pushed after the end");
        if !data.is_empty() {
            let start = self.end;
            self.end += data.len() as u64;
            self.pieces.push_back((start, data));
        }
    }

    /// No more will be written.
    pub const fn finish(&mut self) {
        self.finished = true;
    }

    /// Whether the end was declared.
    #[must_use]
    pub const fn is_finished(&self) -> bool {
        self.finished
    }

    /// Where everything, the end included, is acknowledged.
    const fn last(&self) -> u64 {
        self.end + self.finished as u64
    }

    /// Bytes that wait to be sent.
    #[must_use]
    pub const fn unsent(&self) -> u64 {
        self.end.saturating_sub(self.sent)
    }

    /// Bytes written, and of these acknowledged.
    #[must_use]
    pub const fn progress(&self) -> (u64, u64) {
        (self.end, if self.acked < self.end { self.acked } else { self.end })
    }

    /// The next frame: data of at most `max` bytes, or the end.
    pub fn next(&mut self, max: usize) -> Option<Frame> {
        if self.sent < self.end {
            if max == 0 {
                return None;
            }
            let at = self.pieces.partition_point(|(start, _)| *start <= self.sent) - 1;
            let (start, piece) = &self.pieces[at];
            let skip = (self.sent - start) as usize;
            let data = piece.slice(skip..piece.len().min(skip + max.min(MAX_CHUNK)));
            let offset = self.sent;
            self.sent += data.len() as u64;
            return Some(Frame::Data { offset, data });
        }
        (self.finished && self.sent == self.end).then(|| {
            self.sent += 1;
            Frame::Fin { end: self.end }
        })
    }

    /// The peer has, and has read, so much.
    ///
    /// # Errors
    /// It claims what was not sent to it. Less than before is no error: an old frame may come late.
    pub fn acknowledge(&mut self, received: u64, consumed: u64) -> Result<(), Violation> {
        // Against all that was ever written, not against this connection's part: before the cut more had been sent.
        if received > self.last() || consumed > received {
            return Err(Violation::Offset { offset: received.max(consumed), from: 0, to: self.last() });
        }
        self.acked = self.acked.max(received);
        self.consumed = self.consumed.max(consumed.min(self.end));
        self.sent = self.sent.max(self.acked);
        while self.pieces.front().is_some_and(|(start, piece)| start + piece.len() as u64 <= self.acked) {
            self.pieces.pop_front();
        }
        Ok(())
    }

    /// A new connection: the peer wants the stream from `received` on.
    ///
    /// # Errors
    /// It wants what we have forgotten because it had acknowledged it, or what was never written.
    pub fn resume(&mut self, received: u64) -> Result<(), Violation> {
        if received < self.acked || received > self.last() {
            return Err(Violation::Offset { offset: received, from: self.acked, to: self.last() });
        }
        self.sent = received;
        self.acknowledge(received, self.consumed)
    }

    /// Whether the peer has all that was written so far.
    #[must_use]
    pub const fn is_flushed(&self) -> bool {
        self.acked >= self.last()
    }

    /// Whether the peer has everything and the end.
    #[must_use]
    pub const fn is_done(&self) -> bool {
        self.finished && self.is_flushed()
    }
}

/// The receiving direction. The bytes themselves go to the application; this counts them.
#[derive(Debug)]
pub struct Incoming {
    received: u64,
    consumed: u64,
    told: (u64, u64),
    end: Option<u64>,
    limit: u64,
}

impl Incoming {
    /// Nothing received. A peer that sends more than `limit` bytes that were not read is cut off.
    #[must_use]
    pub const fn new(limit: u64) -> Self {
        Self { received: 0, consumed: 0, told: (0, 0), end: None, limit }
    }

    /// Where the peer must go on: the end counts as one more byte.
    #[must_use]
    pub const fn received(&self) -> u64 {
        self.received
    }

    /// Whether all has arrived, the end included.
    #[must_use]
    pub const fn is_done(&self) -> bool {
        matches!(self.end, Some(end) if self.received > end)
    }

    /// Bytes that arrived, the end not counted.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.received - self.is_done() as u64
    }

    /// Takes data; gives what of it is new, perhaps nothing.
    ///
    /// # Errors
    /// A gap, data after the end, or more than the limit unread.
    pub fn data(&mut self, offset: u64, mut data: Bytes) -> Result<Bytes, Violation> {
        if offset > self.received {
            return Err(Violation::Gap { offset, expected: self.received });
        }
        let last = offset.saturating_add(data.len() as u64);
        if let Some(end) = self.end
            && last > end
        {
            return Err(Violation::AfterEnd { end, offset: last });
        }
        if last <= self.received {
            return Ok(Bytes::new());
        }
        let unread = last - self.consumed;
        if unread > self.limit {
            return Err(Violation::Flood { unread, limit: self.limit });
        }
        let new = data.split_off((self.received - offset) as usize);
        self.received = last;
        Ok(new)
    }

    /// Takes the end.
    ///
    /// # Errors
    /// It lies elsewhere than where the data ended.
    pub const fn fin(&mut self, end: u64) -> Result<(), Violation> {
        match self.end {
            Some(known) if known != end => return Err(Violation::AfterEnd { end: known, offset: end }),
            Some(_) => return Ok(()),
            None if end != self.received => return Err(Violation::Gap { offset: end, expected: self.received }),
            None => {}
        }
        self.end = Some(end);
        self.received = end + 1;
        Ok(())
    }

    /// The application has read `n` bytes.
    pub const fn consume(&mut self, n: u64) {
        self.consumed += n;
    }

    /// Whether there is something to acknowledge at all.
    #[must_use]
    pub const fn has_news(&self) -> bool {
        self.told.0 != self.received || self.told.1 != self.consumed
    }

    /// Whether an acknowledgement should go at once.
    #[must_use]
    pub const fn is_urgent(&self) -> bool {
        self.received - self.told.0 >= ACK_EVERY
            || self.consumed - self.told.1 >= ACK_EVERY
            || (self.is_done() && self.told.0 < self.received)
    }

    /// Whether the peer was told, on this connection, of all that arrived.
    #[must_use]
    pub const fn is_told(&self) -> bool {
        self.told.0 == self.received
    }

    /// The acknowledgement, if there is anything to tell.
    pub fn ack(&mut self) -> Option<Frame> {
        self.has_news().then(|| {
            self.told = (self.received, self.consumed);
            Frame::Ack { received: self.received, consumed: self.consumed }
        })
    }

    /// A new connection: whatever was told may be lost, so it is told again. Returns [`received`](Self::received).
    pub const fn resume(&mut self) -> u64 {
        self.told = (0, 0);
        self.received
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::{Rng, SeedableRng, rngs::SmallRng};

    /// One direction of a stream over connections that are cut anywhere.
    struct World {
        rng: SmallRng,
        out: Outgoing,
        inc: Incoming,
        forth: VecDeque<Frame>,
        back: VecDeque<Frame>,
        source: Vec<u8>,
        written: usize,
        got: Vec<u8>,
        unread: usize,
        cuts: u32,
    }

    const WINDOW: u64 = 500;

    impl World {
        fn new(seed: u64) -> Self {
            let mut rng = SmallRng::seed_from_u64(seed);
            let length = rng.random_range(0..5_000);
            let source = (0..length).map(|_| rng.random()).collect();
            let (out, inc) = (Outgoing::new(WINDOW), Incoming::new(WINDOW));
            let (forth, back) = (VecDeque::new(), VecDeque::new());
            Self { rng, out, inc, forth, back, source, written: 0, got: Vec::new(), unread: 0, cuts: 0 }
        }

        fn deliver(&mut self, frame: Frame) {
            match frame {
                Frame::Data { offset, data } => {
                    let new = self.inc.data(offset, data).unwrap();
                    self.unread += new.len();
                    self.got.extend_from_slice(&new);
                }
                Frame::Fin { end } => self.inc.fin(end).unwrap(),
                Frame::Ack { received, consumed } => self.out.acknowledge(received, consumed).unwrap(),
                Frame::Reset { .. } => unreachable!("nobody resets here"),
            }
        }

        fn step(&mut self) {
            match self.rng.random_range(0..100) {
                0..20 if !self.out.is_finished() => {
                    let left = self.source.len() - self.written;
                    let n = (self.out.room() as usize).min(left).min(self.rng.random_range(0..200));
                    self.out.push(Bytes::copy_from_slice(&self.source[self.written..self.written + n]));
                    self.written += n;
                    if self.written == self.source.len() {
                        self.out.finish();
                    }
                }
                0..45 => self.forth.extend(self.out.next(self.rng.random_range(1..150))),
                45..65 => {
                    if let Some(frame) = self.forth.pop_front() {
                        // A frame that comes twice changes nothing.
                        if self.rng.random_bool(0.1) {
                            self.deliver(frame.clone());
                        }
                        self.deliver(frame);
                    }
                }
                65..75 => self.back.extend(self.inc.ack()),
                75..85 => {
                    if let Some(frame) = self.back.pop_front() {
                        self.deliver(frame);
                    }
                }
                85..96 => {
                    let n = self.rng.random_range(0..=self.unread);
                    self.unread -= n;
                    self.inc.consume(n as u64);
                }
                _ => {
                    self.forth.clear();
                    self.back.clear();
                    self.out.resume(self.inc.resume()).unwrap();
                    self.cuts += 1;
                }
            }
            assert!(self.got.len() <= self.written);
            assert!(self.unread as u64 <= WINDOW);
        }
    }

    #[test]
    fn every_byte_arrives_once_and_in_order_over_any_cuts() {
        let mut cuts = 0;
        for seed in 0..2_000 {
            let mut world = World::new(seed);
            let mut steps = 0;
            while !(world.out.is_done() && world.inc.is_done()) {
                world.step();
                steps += 1;
                assert!(steps < 100_000, "seed {seed} is stuck");
            }
            assert_eq!(world.got, world.source, "seed {seed}");
            assert!(world.out.pieces.is_empty(), "seed {seed} keeps what was acknowledged");
            cuts += world.cuts;
        }
        assert!(cuts > 2_000, "only {cuts} cuts: the simulation tests nothing");
    }

    #[test]
    fn a_slow_reader_bounds_the_sender() {
        let mut out = Outgoing::new(100);
        out.push(Bytes::from(vec![0; 100]));
        assert_eq!(out.room(), 0);
        out.next(1000);
        out.acknowledge(100, 0).unwrap();
        assert_eq!(out.room(), 0);
        assert!(out.is_flushed());
        out.acknowledge(100, 40).unwrap();
        assert_eq!(out.room(), 40);
    }

    #[test]
    fn lies_about_offsets_are_refused() {
        let mut out = Outgoing::new(100);
        out.push(Bytes::from(vec![0; 50]));
        assert!(out.acknowledge(51, 0).is_err());
        assert!(out.acknowledge(10, 11).is_err());
        out.acknowledge(20, 0).unwrap();
        assert!(out.resume(19).is_err());
        assert!(out.resume(51).is_err());
        let mut inc = Incoming::new(100);
        assert!(matches!(inc.data(1, Bytes::from_static(b"x")), Err(Violation::Gap { .. })));
        assert!(matches!(inc.data(0, Bytes::from(vec![0; 101])), Err(Violation::Flood { .. })));
        inc.data(0, Bytes::from_static(b"abc")).unwrap();
        assert!(inc.fin(2).is_err());
        inc.fin(3).unwrap();
        assert!(matches!(inc.data(3, Bytes::from_static(b"x")), Err(Violation::AfterEnd { .. })));
        assert!(matches!(inc.data(u64::MAX, Bytes::from_static(b"x")), Err(Violation::Gap { .. })));
    }
}
