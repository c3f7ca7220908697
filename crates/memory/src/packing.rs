//! zstd's end of an [`Encoder`](crate::Encoder): by its caller's thread, or on one of its own beside it.
//!
//! On one of its own, a piece of operations is packed while the next one is being made: zstd is two fifths to
//! four fifths of an encoder's work. One piece is on its way at the most. What it becomes comes out when the next one goes in, or at once where that is asked for, so the
//! packed stream is the same however fast either is, and the same as without a thread.
//!
//! What is on its way is not counted as given out yet, a piece's worth; whoever wants to know what there is, and has nothing else to do, collects it or asks for a flush.

use crate::StreamError;
use crate::config::{Config, Reach};
use crate::meter::Clock;
use crate::record::PAGE_SIZE;
use std::io;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;
use zstd::stream::raw::{CParameter, InBuffer, Operation, OutBuffer};

/// zstd's level 1 has a table of 2^14 places and looks for 7 bytes. Memory has more that is alike than files have, in pointers and
/// records: with these, 256 KiB, which stay in a core's cache, 4.3 % fewer bytes for a tenth more time (a guest with PostgreSQL; `examples/ratio.rs`).
const HASH_LOG: u32 = 16;
const MIN_MATCH: u32 = 5;
/// Where it looks further than [`Reach::Near`] it has a second table of as many places, for 8 bytes (zstd's `dfast`), as its level 3 has: 2.1 % fewer
/// bytes of a kernel compile, 1.6 % of a database, for an eighth more of zstd's time.
const CHAIN_LOG: u32 = 16;
/// With a long window it looks for 4 bytes in the first of them, and over long distances for half of the 64 that zstd asks for: 1 % fewer bytes of a
/// database, 0.4 % of a kernel compile, in about the same time. Levels that look at more places by themselves
/// lose by the second: 1 % at level 7 and 9.
const MIN_MATCH_FAR: u32 = 4;
const LONG_MIN_MATCH: u32 = 32;
/// Level 9 looks for 5 bytes, too, and with 4 makes 0.3 % less in the same time.
const MIN_MATCH_AT_9: u32 = 4;

/// What is to be read at the other end once a piece is packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum After {
    /// As much as zstd gives out by itself.
    Some,
    /// All of it.
    All,
    /// All of it, and the frame is over.
    Frame,
}

/// What zstd has taken on a thread of its own ([`Config::beside`]), since the encoder began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Beside {
    /// By that thread.
    pub spent: Duration,
    /// What the encoder's caller has waited for it.
    pub waited: Duration,
}

/// A frame of zstd's.
struct Frame {
    zstd: zstd::stream::raw::Encoder<'static>,
    /// Whether zstd holds something back.
    holds: bool,
}

impl Frame {
    fn new(level: i32, reach: Reach, window_log: u32) -> Result<Self, StreamError> {
        let doing = |doing| move |source| StreamError::Zstd { doing, source };
        let mut zstd = zstd::stream::raw::Encoder::new(level).map_err(doing("begin"))?;
        if level == 1 {
            let min_match = if reach == Reach::Far { MIN_MATCH_FAR } else { MIN_MATCH };
            zstd.set_parameter(CParameter::HashLog(HASH_LOG)).map_err(doing("take a larger table"))?;
            zstd.set_parameter(CParameter::MinMatch(min_match)).map_err(doing("take shorter matches"))?;
            if reach != Reach::Near {
                let strategy = CParameter::Strategy(zstd::zstd_safe::Strategy::ZSTD_dfast);
                zstd.set_parameter(strategy).map_err(doing("look in two tables"))?;
                zstd.set_parameter(CParameter::ChainLog(CHAIN_LOG)).map_err(doing("take a second table"))?;
            }
        }
        if level == 9 {
            zstd.set_parameter(CParameter::MinMatch(MIN_MATCH_AT_9)).map_err(doing("take shorter matches"))?;
        }
        let (window_log, long) = (reach.window_log(window_log), reach == Reach::Far);
        zstd.set_parameter(CParameter::WindowLog(window_log)).map_err(doing("take the window's size"))?;
        zstd.set_parameter(CParameter::EnableLongDistanceMatching(long)).map_err(doing("match over long distances"))?;
        if long && level == 1 {
            zstd.set_parameter(CParameter::LdmMinMatch(LONG_MIN_MATCH)).map_err(doing("take shorter matches"))?;
        }
        Ok(Self { zstd, holds: false })
    }

    /// Takes operations, and leaves none. `next` goes on in its place, behind the last ones of this frame.
    fn pack(
        &mut self,
        ops: &mut Vec<u8>,
        after: After,
        next: Option<Self>,
        out: &mut Vec<u8>,
    ) -> Result<(), StreamError> {
        let result = self.run(ops, after, out);
        ops.clear();
        if let Some(next) = next {
            *self = next;
        }
        result
    }

    fn run(&mut self, ops: &[u8], after: After, out: &mut Vec<u8>) -> Result<(), StreamError> {
        let doing = |doing| move |source| StreamError::Zstd { doing, source };
        let mut input = InBuffer::around(ops);
        while input.pos() < ops.len() {
            self.holds = true;
            append(out, |out| self.zstd.run(&mut input, out)).map_err(doing("compress"))?;
        }
        match after {
            After::Some => {}
            After::All => {
                while self.holds {
                    self.holds = append(out, |out| self.zstd.flush(out)).map_err(doing("flush"))? > 0;
                }
            }
            After::Frame => {
                while append(out, |out| self.zstd.finish(out, true)).map_err(doing("end"))? > 0 {}
                self.holds = false;
            }
        }
        Ok(())
    }
}

/// Lets zstd write behind `out`'s end.
fn append<T>(out: &mut Vec<u8>, f: impl FnOnce(&mut OutBuffer<'_, Vec<u8>>) -> io::Result<T>) -> io::Result<T> {
    out.reserve(PAGE_SIZE * 8);
    let end = out.len();
    f(&mut OutBuffer::around_pos(out, end))
}

/// A piece on its way to the thread, with room for what it becomes; and the frame that begins behind it.
struct Job {
    ops: Vec<u8>,
    out: Vec<u8>,
    after: After,
    next: Option<Frame>,
}

/// What became of it.
struct Done {
    ops: Vec<u8>,
    out: Vec<u8>,
    result: Result<(), StreamError>,
    spent: Duration,
}

/// The thread, and what is known of it.
struct Thread {
    /// None: it is to end.
    jobs: Option<SyncSender<Job>>,
    done: Receiver<Done>,
    thread: Option<JoinHandle<()>>,
    under_way: bool,
    /// Whether zstd holds nothing back.
    clean: bool,
    /// Memory to be used again.
    ops: Vec<u8>,
    out: Vec<u8>,
    clock: Clock,
    beside: Beside,
}

impl Thread {
    /// Gives the frame back where there can be no thread.
    fn new(frame: Frame, clock: Clock) -> Result<Self, Frame> {
        let (jobs, taken) = sync_channel::<Job>(1);
        // One is on its way at the most: neither end ever waits for room.
        let (made, done) = sync_channel(1);
        // The frame goes to the thread once there is one, and stays here where there is none.
        let (first, begins) = sync_channel::<Frame>(1);
        let run = move || {
            let Ok(mut frame) = begins.recv() else { return };
            for Job { mut ops, mut out, after, next } in taken {
                let begun = clock();
                let result = frame.pack(&mut ops, after, next, &mut out);
                let spent = clock().saturating_sub(begun);
                if made.send(Done { ops, out, result, spent }).is_err() {
                    return;
                }
            }
        };
        match std::thread::Builder::new().name("zstd".into()).spawn(run) {
            Ok(thread) => {
                let _ = first.send(frame);
                let (jobs, thread) = (Some(jobs), Some(thread));
                let (ops, out) = (vec![], vec![]);
                Ok(Self {
                    jobs,
                    done,
                    thread,
                    under_way: false,
                    clean: true,
                    ops,
                    out,
                    clock,
                    beside: Beside::default(),
                })
            }
            Err(_) => Err(frame),
        }
    }

    /// What is under way, once it is there.
    fn collect(&mut self, out: &mut Vec<u8>) -> Result<(), StreamError> {
        if !std::mem::take(&mut self.under_way) {
            return Ok(());
        }
        let begun = (self.clock)();
        let done = self.done.recv().map_err(|_| ended())?;
        self.beside.waited += (self.clock)().saturating_sub(begun);
        self.beside.spent += done.spent;
        (self.ops, self.out) = (done.ops, done.out);
        out.extend_from_slice(&self.out);
        self.out.clear();
        done.result
    }

    fn pack(
        &mut self,
        ops: &mut Vec<u8>,
        after: After,
        next: Option<Frame>,
        out: &mut Vec<u8>,
    ) -> Result<(), StreamError> {
        self.collect(out)?;
        if self.clean && ops.is_empty() && after != After::Frame {
            return Ok(());
        }
        self.clean = after != After::Some;
        let ops = std::mem::replace(ops, std::mem::take(&mut self.ops));
        let job = Job { ops, out: std::mem::take(&mut self.out), after, next };
        let jobs = self.jobs.as_ref().ok_or_else(ended)?;
        jobs.send(job).map_err(|_| ended())?;
        self.under_way = true;
        if after == After::Some { Ok(()) } else { self.collect(out) }
    }
}

fn ended() -> StreamError {
    StreamError::Zstd { doing: "go on", source: io::Error::other("its thread has ended") }
}

impl Drop for Thread {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

enum Place {
    Here(Frame),
    Beside(Thread),
}

/// Packs operations.
pub(crate) struct Packing {
    place: Place,
    window_log: u32,
    given: u64,
}

impl Packing {
    /// # Errors
    /// [`StreamError::Zstd`] when a parameter is out of bounds.
    pub(crate) fn new(config: &Config) -> Result<Self, StreamError> {
        let frame = Frame::new(config.level, config.reach, config.window_log)?;
        let place = match config.beside {
            Some(clock) => Thread::new(frame, clock).map_or_else(Place::Here, Place::Beside),
            None => Place::Here(frame),
        };
        Ok(Self { place, window_log: config.window_log, given: 0 })
    }

    /// Takes operations, and leaves none; what is packed is appended to `out`.
    pub(crate) fn pack(&mut self, ops: &mut Vec<u8>, after: After, out: &mut Vec<u8>) -> Result<(), StreamError> {
        self.take(ops, after, None, out)
    }

    /// The same with the frame's last ones: another one begins.
    pub(crate) fn pack_last(
        &mut self,
        ops: &mut Vec<u8>,
        (level, reach): (i32, Reach),
        out: &mut Vec<u8>,
    ) -> Result<(), StreamError> {
        let next = Frame::new(level, reach, self.window_log)?;
        self.take(ops, After::Frame, Some(next), out)
    }

    fn take(
        &mut self,
        ops: &mut Vec<u8>,
        after: After,
        next: Option<Frame>,
        out: &mut Vec<u8>,
    ) -> Result<(), StreamError> {
        self.given += ops.len() as u64;
        match &mut self.place {
            Place::Here(frame) => frame.pack(ops, after, next, out),
            Place::Beside(thread) => thread.pack(ops, after, next, out),
        }
    }

    /// Appends what is under way to `out`, once it is there.
    pub(crate) fn collect(&mut self, out: &mut Vec<u8>) -> Result<(), StreamError> {
        match &mut self.place {
            Place::Here(_) => Ok(()),
            Place::Beside(thread) => thread.collect(out),
        }
    }

    /// Bytes of operations so far.
    pub(crate) const fn given(&self) -> u64 {
        self.given
    }

    /// What its thread took; none where it has none.
    pub(crate) fn beside(&self) -> Option<Beside> {
        match &self.place {
            Place::Here(_) => None,
            Place::Beside(thread) => Some(thread.beside),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn clock() -> Duration {
        Duration::ZERO
    }

    fn config(beside: Option<Clock>) -> Config {
        Config { window_log: 20, beside, ..Config::default() }
    }

    /// What pieces of some text become, and how much of it was there after each.
    fn packed(beside: Option<Clock>, after: impl Fn(usize) -> After) -> (Vec<u8>, Vec<usize>) {
        let (mut packing, mut out, mut ops) = (Packing::new(&config(beside)).unwrap(), vec![], vec![]);
        let sizes = (0..40_usize)
            .map(|n| {
                ops.extend((0..50_000_usize).map(|i| ((i * i * (n + 1)) >> 7) as u8 & 31));
                match n {
                    20 => packing.pack_last(&mut ops, (3, Reach::Near), &mut out).unwrap(),
                    _ => packing.pack(&mut ops, after(n), &mut out).unwrap(),
                }
                assert!(ops.is_empty());
                out.len()
            })
            .collect();
        packing.pack(&mut ops, After::Frame, &mut out).unwrap();
        (out, sizes)
    }

    #[test]
    fn a_thread_makes_the_same_and_all_of_it_where_that_is_asked_for() {
        let after = |n: usize| if n % 7 == 3 { After::All } else { After::Some };
        let ((here, sizes), (beside, late)) = (packed(None, after), packed(Some(clock), after));
        assert!(here == beside, "{} and {} bytes", here.len(), beside.len());
        for (n, (size, late)) in sizes.iter().zip(&late).enumerate() {
            let all = after(n) == After::All || n == 20;
            assert!(if all { size == late } else { late <= size }, "piece {n}: {late} of {size}");
        }
        assert!(sizes != late, "one piece is under way");
    }

    #[test]
    fn what_is_under_way_can_be_had_without_more_and_without_a_flush() {
        let (mut packing, mut out) = (Packing::new(&config(Some(clock))).unwrap(), vec![]);
        let piece: Vec<u8> = (0..400_000_u32).flat_map(|i| i.wrapping_mul(2_654_435_761).to_le_bytes()).collect();
        packing.pack(&mut piece.clone(), After::Some, &mut out).unwrap();
        assert!(out.is_empty());
        packing.collect(&mut out).unwrap();
        let (had, mut here) = (out.len(), vec![]);
        Packing::new(&config(None)).unwrap().pack(&mut piece.clone(), After::Some, &mut here).unwrap();
        assert!(had > 0 && out == here);
        packing.collect(&mut out).unwrap();
        assert_eq!(out.len(), had, "there is no more");
        packing.pack(&mut vec![], After::All, &mut out).unwrap();
        assert!(out.len() > had, "zstd has held something back");
    }

    #[test]
    fn one_that_is_given_up_ends_with_what_it_does_and_one_whose_thread_is_gone_says_so() {
        let mut packing = Packing::new(&config(Some(clock))).unwrap();
        packing.pack(&mut vec![1; 1 << 20], After::Some, &mut vec![]).unwrap();
        assert!(packing.beside().is_some());
        drop(packing);

        let mut packing = Packing::new(&config(Some(clock))).unwrap();
        let Place::Beside(thread) = &mut packing.place else { panic!("it has a thread") };
        thread.jobs = None;
        let error = packing.pack(&mut vec![1; 10], After::All, &mut vec![]).unwrap_err();
        assert!(error.to_string().contains("its thread has ended"), "{error}");
    }

    #[test]
    fn what_zstd_refuses_is_refused_before_anything_is_under_way() {
        for beside in [None, Some(clock as Clock)] {
            let bad = Config { window_log: 99, ..config(beside) };
            assert!(matches!(Packing::new(&bad), Err(StreamError::Zstd { .. })));
        }
    }
}
