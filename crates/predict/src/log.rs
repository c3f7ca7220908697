//! Logs of dirtied pages: what the model HIST remembers of a guest.
//!
//! A log has, for each interval of a fixed length, the pages that were *written* (dirty bits) and, apart from them, those whose
//! *content* changed: of the pages that a guest dirties many become what they were, and a codec that knows the last copy need not
//! send those. Who watches from outside, by hashing, sees changes only; who asks the hypervisor sees writes only; [`Observed`] says.
//!
//! # Format
//!
//! Numbers are little-endian; a *varint* has seven bits a byte, the lowest first, the highest bit where more follow.
//!
//! ```text
//! header   "GWDL"  version u8 = 1  observed u8 (1 writes, 2 contents, 3 both)  page shift u8 = 12  0 u8
//!          pages u64   interval in ms u32   start in ms since 1970 u64 (UTC)
//! frame    length varint, then so many bytes:
//!          intervals since the frame before that nobody watched, varint
//!          form u8 (0: runs, 1: bitmap) + 4 * changed u8 (0: none of the written, 1: all, 2: bits follow)
//!          pages written, varint
//!          runs: (gap << 1 | 1) varint and (length - 2) varint, or gap << 1 for a single page; a gap counts from the run before
//!          bitmap: a bit for each page of the guest
//!          bits: a bit for each page written, in their order
//! ```
//!
//! The shorter form is taken. A log may be cut off at any byte, as by a power loss while it grew: the frame that is not whole is left
//! out ([`Log::torn`]); everything else that is not in order is an error, and nothing is believed before it was checked: no memory is taken for a
//! number that a log only *says*.
//!
//! # What it costs
//!
//! At one interval a second, a minute of 1 GiB takes at most 3.76 MiB, whatever the guest does, if both are watched; 16 MiB written
//! evenly at 1,000 pages a second with half of them changed 57 KiB; 5,000 pages a second over all of the GiB 413 KiB; a sequential
//! writer at any rate 1 KiB. (`tests/log_cost.rs` measures these.)

use crate::amount::{PAGE, Pages};
use crate::guest::WORD;
use std::ops::Range;
use std::time::Duration;

const MAGIC: &[u8; 4] = b"GWDL";
const VERSION: u8 = 1;
const HEADER: usize = 28;

/// The largest guest that has a log: 16 TiB, whose bitmap takes 512 MiB.
pub const MAX_PAGES: u64 = 1 << 32;
/// The longest interval: past an hour there is nothing to learn from it.
pub const MAX_INTERVAL: Duration = Duration::from_secs(3600);
/// The longest time that a log may stretch over, in intervals: more would be a number gone wrong, not a profile.
pub const MAX_INTERVALS: u64 = 1 << 32;

/// What a log has been told of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Observed {
    /// Writes only: nobody knows what changed.
    Writes,
    /// Changes only: what was written and stayed as it was is missing.
    Contents,
    /// Both.
    Both,
}

/// What pages are taken from a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Taken {
    /// Those written; in a log of contents only those changed, since it knows no others.
    Written,
    /// Those changed; in a log of writes only those written.
    Changed,
}

/// What a log says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// What was watched.
    pub observed: Observed,
    /// The guest's memory.
    pub pages: Pages,
    /// The length of an interval, in whole milliseconds.
    pub interval: Duration,
    /// When the first interval began: since 1970, UTC.
    pub start: Duration,
}

/// Why something is no log, or cannot become one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LogError {
    /// It is something else.
    #[error("this is no log of dirtied pages: it does not begin with GWDL")]
    NoLog,
    /// It is of another version.
    #[error(
        "this log has version {0}, and this Godwit reads version {VERSION}: use the version of Godwit that wrote it"
    )]
    Version(u8),
    /// A value that the header must not have.
    #[error("the log's header is broken: {0}; profile the VM anew")]
    Header(&'static str),
    /// A frame that is not in order.
    #[error("the log is broken at byte {at}: {what}; cut it off there, or profile the VM anew")]
    Frame {
        /// Where the frame begins.
        at: usize,
        /// What is wrong.
        what: &'static str,
    },
}

impl Header {
    fn check(self) -> Result<Self, LogError> {
        let bad = |what| Err(LogError::Header(what));
        match self {
            h if h.pages.0 == 0 => bad("it has no pages"),
            h if h.pages.0 > MAX_PAGES => bad("it has more pages than any guest"),
            h if h.interval.as_millis() == 0 => bad("its interval has no length"),
            h if h.interval > MAX_INTERVAL => bad("its interval is longer than an hour"),
            h if u64::try_from(h.start.as_millis()).is_err() => bad("it begins too late"),
            h => Ok(h),
        }
    }

    fn words(&self) -> usize {
        self.pages.0.div_ceil(WORD) as usize
    }
}

/// Writes a log: a header, and frames to append.
#[derive(Clone, Debug)]
pub struct LogWriter {
    header: Header,
    missed: u64,
}

impl LogWriter {
    /// Begins one; its first bytes.
    ///
    /// # Errors
    /// The header is not in order.
    pub fn new(header: Header) -> Result<(Self, Vec<u8>), LogError> {
        let header = header.check()?;
        let observed = match header.observed {
            Observed::Writes => 1,
            Observed::Contents => 2,
            Observed::Both => 3,
        };
        let mut out = MAGIC.to_vec();
        out.extend([VERSION, observed, PAGE.0.trailing_zeros() as u8, 0]);
        out.extend(header.pages.0.to_le_bytes());
        out.extend((header.interval.as_millis() as u32).to_le_bytes());
        out.extend((header.start.as_millis() as u64).to_le_bytes());
        Ok((Self { header, missed: 0 }, out))
    }

    /// Nobody watched during an interval.
    pub const fn miss(&mut self) {
        self.missed += 1;
    }

    /// An interval: bitmaps, a bit for each page from the lowest bit of the first word on, of what was written and of what changed.
    /// What changed was written. What only one was watched of is told as both. Bytes to append.
    ///
    /// # Panics
    /// A bitmap has not as many words as the guest's pages take.
    #[must_use]
    pub fn frame(&mut self, written: &[u64], changed: &[u64]) -> Vec<u8> {
        let words = self.header.words();
        assert!(written.len() == words && changed.len() == words, "a bit for each page");
        let pages = self.header.pages.0;
        let all = |i: usize| {
            let end = pages - i as u64 * WORD;
            (written[i] | changed[i]) & if end < WORD { (1 << end) - 1 } else { u64::MAX }
        };
        let (mut runs, mut count, mut end) = (vec![], 0, 0);
        let (mut bits, mut changes) = (Bits::default(), 0);
        for (i, changed) in changed.iter().enumerate() {
            let word = all(i);
            let mut rest = word;
            while rest != 0 {
                bits.push(changed >> rest.trailing_zeros() & 1 == 1);
                rest &= rest - 1;
            }
            count += u64::from(word.count_ones());
            changes += u64::from((changed & word).count_ones());
        }
        for_each_run((0..words).map(all), |run| {
            let (gap, length) = (run.start - end, run.end - run.start);
            varint(&mut runs, gap << 1 | u64::from(length > 1));
            if length > 1 {
                varint(&mut runs, length - 2);
            }
            end = run.end;
        });
        let bitmap = pages.div_ceil(8) as usize;
        let form = u8::from(bitmap < runs.len());
        let kind = if changes == 0 && count > 0 { 0 } else { 1 + u8::from(changes < count) };
        let mut body = vec![];
        varint(&mut body, std::mem::take(&mut self.missed));
        body.push(form | kind << 2);
        varint(&mut body, count);
        if form == 1 {
            let bytes = (0..words).flat_map(|i| all(i).to_le_bytes());
            body.extend(bytes.take(bitmap));
        } else {
            body.extend(runs);
        }
        if kind == 2 {
            body.extend(bits.bytes);
        }
        let mut frame = vec![];
        varint(&mut frame, body.len() as u64);
        frame.extend(body);
        frame
    }
}

/// Bits, the lowest of a byte first.
#[derive(Default)]
struct Bits {
    bytes: Vec<u8>,
    used: u32,
}

impl Bits {
    fn push(&mut self, bit: bool) {
        if self.used == 0 {
            self.bytes.push(0);
        }
        *self.bytes.last_mut().expect("one was pushed") |= u8::from(bit) << self.used;
        self.used = (self.used + 1) % 8;
    }
}

/// Runs of bits that are set.
fn for_each_run(words: impl Iterator<Item = u64>, mut each: impl FnMut(Range<u64>)) {
    let mut open: Option<u64> = None;
    let mut base = 0;
    for word in words {
        let mut at = 0;
        while at < WORD {
            let rest = word >> at;
            let same = if open.is_some() { (!rest).trailing_zeros() } else { rest.trailing_zeros() };
            let same = u64::from(same).min(WORD - at);
            at += same;
            if at < WORD {
                match open.take() {
                    Some(from) => each(from..base + at),
                    None => open = Some(base + at),
                }
            }
        }
        base += WORD;
    }
    if let Some(from) = open {
        each(from..base);
    }
}

fn varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// A varint from the beginning of `from`; none where it does not end there or is larger than a u64.
fn take_varint(from: &mut &[u8]) -> Option<u64> {
    let mut value = 0_u64;
    for (i, byte) in from.iter().enumerate().take(10) {
        let bits = u64::from(byte & 0x7f);
        if i == 9 && bits > 1 {
            return None;
        }
        value |= bits << (7 * i);
        if byte & 0x80 == 0 {
            *from = &from[i + 1..];
            return Some(value);
        }
    }
    None
}

/// One interval that was watched.
#[derive(Clone, Debug)]
struct Frame {
    /// Which interval since the log's start.
    interval: u64,
    body: Range<usize>,
    written: u64,
    changed: u64,
}

/// The parts of a frame's body.
struct Body<'a> {
    missed: u64,
    is_bitmap: bool,
    /// 0: none, 1: all, 2: bits.
    kind: u8,
    count: u64,
    rest: &'a [u8],
}

fn parts(mut body: &[u8]) -> Option<Body<'_>> {
    let missed = take_varint(&mut body)?;
    let (form, rest) = body.split_first()?;
    body = rest;
    let count = take_varint(&mut body)?;
    (form & !0b1101 == 0 && form >> 2 <= 2).then_some(Body {
        missed,
        is_bitmap: form & 1 == 1,
        kind: form >> 2,
        count,
        rest: body,
    })
}

/// A log that was checked. It stays as small as it is stored; intervals are unpacked as they are used.
#[derive(Clone, Debug)]
pub struct Log {
    header: Header,
    bytes: Vec<u8>,
    frames: Vec<Frame>,
    torn: usize,
}

impl Log {
    /// Reads, and checks, all of it.
    ///
    /// # Errors
    /// What is not in order, and where.
    pub fn read(bytes: Vec<u8>) -> Result<Self, LogError> {
        let header = read_header(&bytes)?;
        let mut log = Self { header, bytes, frames: vec![], torn: 0 };
        let (mut at, mut interval) = (HEADER, 0_u64);
        while at < log.bytes.len() {
            let mut rest = &log.bytes[at..];
            let Some(length) = take_varint(&mut rest) else {
                // A length that goes on to the end is cut off; any other is none.
                if rest.len() < 10 && rest.iter().all(|b| b & 0x80 != 0) {
                    break;
                }
                return Err(LogError::Frame { at, what: "its length is no number" });
            };
            let begin = log.bytes.len() - rest.len();
            let Some(end) = usize::try_from(length).ok().and_then(|l| begin.checked_add(l)) else {
                return Err(LogError::Frame { at, what: "it is longer than any frame" });
            };
            if end > log.bytes.len() {
                break;
            }
            let frame = log.check(begin..end, interval).map_err(|what| LogError::Frame { at, what })?;
            interval = frame.interval + 1;
            log.frames.push(frame);
            at = end;
        }
        log.torn = log.bytes.len() - at;
        Ok(log)
    }

    /// Looks a frame through that begins, but for what was missed, with this interval.
    fn check(&self, body: Range<usize>, interval: u64) -> Result<Frame, &'static str> {
        let Body { missed, is_bitmap, kind, count, mut rest } =
            parts(&self.bytes[body.clone()]).ok_or("it is cut short, or of no known form")?;
        let interval = interval.checked_add(missed).filter(|i| *i < MAX_INTERVALS);
        let interval = interval.ok_or("it says that more intervals were missed than a log can have")?;
        let pages = self.header.pages.0;
        if count > pages {
            return Err("it has more pages than the guest");
        }
        if is_bitmap {
            let (bitmap, after) = rest.split_at_checked(pages.div_ceil(8) as usize).ok_or("its bitmap is cut short")?;
            let set: u64 = bitmap.iter().map(|b| u64::from(b.count_ones())).sum();
            let past = !pages.is_multiple_of(8) && bitmap.last().is_some_and(|last| last >> (pages % 8) != 0);
            if set != count || past {
                return Err("its bitmap has other pages than it says");
            }
            rest = after;
        } else {
            let (mut seen, mut end) = (0, 0);
            while seen < count {
                let run = take_run(&mut rest, end).filter(|run| run.end <= pages);
                let run = run.filter(|run| end == 0 || run.start > end).ok_or("its runs of pages are not in order")?;
                seen += run.end - run.start;
                end = run.end;
            }
            if seen != count {
                return Err("its runs have other pages than it says");
            }
        }
        let changed = match kind {
            0 => 0,
            1 => count,
            _ => {
                let (bits, after) =
                    rest.split_at_checked(count.div_ceil(8) as usize).ok_or("its bits are cut short")?;
                if !count.is_multiple_of(8) && bits.last().is_some_and(|last| last >> (count % 8) != 0) {
                    return Err("it has bits of pages that were not written");
                }
                rest = after;
                bits.iter().map(|b| u64::from(b.count_ones())).sum()
            }
        };
        if rest.is_empty() { Ok(Frame { interval, body, written: count, changed }) } else { Err("it is too long") }
    }

    /// What it says of itself.
    #[must_use]
    pub const fn header(&self) -> &Header {
        &self.header
    }

    /// Bytes at its end that are no whole frame: it was cut off while it grew.
    #[must_use]
    pub const fn torn(&self) -> usize {
        self.torn
    }

    /// How many intervals it has been told of.
    #[must_use]
    pub fn watched(&self) -> usize {
        self.frames.len()
    }

    /// How many intervals it stretches over, those included that nobody watched.
    #[must_use]
    pub fn intervals(&self) -> u64 {
        self.frames.last().map_or(0, |frame| frame.interval + 1)
    }

    /// The time that it stretches over.
    #[must_use]
    pub fn length(&self) -> Duration {
        self.header.interval.saturating_mul(u32::try_from(self.intervals()).unwrap_or(u32::MAX))
    }

    /// Pages in an interval, on average over those watched.
    #[must_use]
    pub fn mean(&self, taken: Taken) -> f64 {
        let all: u64 = self.frames.iter().map(|frame| self.count(frame, taken)).sum();
        all as f64 / self.frames.len().max(1) as f64
    }

    /// Pages of each of the last intervals, at most so many, in order; of one that nobody watched those of the one watched before it.
    pub(crate) fn last_counts(&self, taken: Taken, most: u64) -> Vec<u64> {
        let from = self.intervals().saturating_sub(most);
        let mut counts = vec![];
        for (nth, frame) in self.frames.iter().enumerate() {
            // The first frame may stand behind intervals that nobody watched.
            let begins = if nth == 0 { 0 } else { frame.interval };
            let ends = self.frames.get(nth + 1).map_or(self.intervals(), |next| next.interval);
            counts.extend((begins.max(from)..ends).map(|_| self.count(frame, taken)));
        }
        counts
    }

    fn count(&self, frame: &Frame, taken: Taken) -> u64 {
        if self.takes_changes(taken) { frame.changed } else { frame.written }
    }

    fn takes_changes(&self, taken: Taken) -> bool {
        taken == Taken::Changed && self.header.observed != Observed::Writes
    }

    /// The pages of an interval, as words of a bitmap that are not empty, in order. An interval that nobody watched is like the one
    /// watched before it; past the end the log begins again.
    pub fn for_each_word(&self, interval: u64, taken: Taken, mut each: impl FnMut(usize, u64)) {
        let Some(interval) = interval.checked_rem(self.intervals()) else { return };
        // The first frame may stand behind intervals that nobody watched.
        let at = self.frames.partition_point(|frame| frame.interval <= interval).saturating_sub(1);
        let body = parts(&self.bytes[self.frames[at].body.clone()]).expect("each frame was checked");
        let changes = self.takes_changes(taken);
        if changes && body.kind == 0 {
            return;
        }
        // Where all of the written changed there is nothing to look up.
        let bits = (changes && body.kind == 2).then(|| {
            let bytes = body.count.div_ceil(8) as usize;
            &body.rest[body.rest.len() - bytes..]
        });
        let mut nth = 0;
        let mut emit = |word: usize, written: u64| {
            let mut word_bits = written;
            if let Some(bits) = bits {
                let mut rest = written;
                while rest != 0 {
                    if bits[nth / 8] >> (nth % 8) & 1 == 0 {
                        word_bits &= !(rest & rest.wrapping_neg());
                    }
                    nth += 1;
                    rest &= rest - 1;
                }
            }
            if word_bits != 0 {
                each(word, word_bits);
            }
        };
        if body.is_bitmap {
            let bitmap = &body.rest[..self.header.pages.0.div_ceil(8) as usize];
            for (word, bytes) in bitmap.chunks(8).enumerate() {
                let mut whole = [0; 8];
                whole[..bytes.len()].copy_from_slice(bytes);
                emit(word, u64::from_le_bytes(whole));
            }
            return;
        }
        let (mut rest, mut seen, mut end) = (body.rest, 0, 0);
        let (mut open, mut open_bits) = (0, 0);
        while seen < body.count {
            let run = take_run(&mut rest, end).expect("each frame was checked");
            (seen, end) = (seen + run.end - run.start, run.end);
            let mut at = run.start;
            while at < run.end {
                let (word, first) = ((at / WORD) as usize, at % WORD);
                let pages = (run.end - at).min(WORD - first);
                let mask = (u64::MAX >> (WORD - pages)) << first;
                if word != open && open_bits != 0 {
                    emit(open, std::mem::take(&mut open_bits));
                }
                (open, open_bits) = (word, open_bits | mask);
                at += pages;
            }
        }
        if open_bits != 0 {
            emit(open, open_bits);
        }
    }
}

fn read_header(bytes: &[u8]) -> Result<Header, LogError> {
    if bytes.get(..4) != Some(MAGIC) {
        return Err(LogError::NoLog);
    }
    match bytes.get(4) {
        Some(&VERSION) => {}
        Some(other) => return Err(LogError::Version(*other)),
        None => return Err(LogError::Header("it is cut short")),
    }
    let Some((header, _)) = bytes.split_first_chunk::<HEADER>() else {
        return Err(LogError::Header("it is cut short"));
    };
    let observed = match header[5] {
        1 => Observed::Writes,
        2 => Observed::Contents,
        3 => Observed::Both,
        _ => return Err(LogError::Header("it says nothing known of what was watched")),
    };
    if u64::from(header[6]) != u64::from(PAGE.0.trailing_zeros()) {
        return Err(LogError::Header("its pages are not of 4 KiB"));
    }
    if header[7] != 0 {
        return Err(LogError::Header("a byte is set that has no meaning"));
    }
    let u64_at = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| header[at + i]));
    let interval = u32::from_le_bytes(std::array::from_fn(|i| header[16 + i]));
    let header = Header {
        observed,
        pages: Pages(u64_at(8)),
        interval: Duration::from_millis(u64::from(interval)),
        start: Duration::from_millis(u64_at(20)),
    };
    header.check()
}

/// A run of pages behind `end`; none where it is cut short or overflows.
fn take_run(from: &mut &[u8], end: u64) -> Option<Range<u64>> {
    let gap = take_varint(from)?;
    let start = end.checked_add(gap >> 1)?;
    let more = if gap & 1 == 1 { take_varint(from)?.checked_add(1)? } else { 0 };
    Some(start..start.checked_add(more)?.checked_add(1)?)
}
