//! A move that is tried on a recorded guest: its memory as it was goes through a real encoder, over a link that is reckoned, until rules end it.
//!
//! It is a closed loop. What the encoder makes of a page takes the link so long, and making it took the processor so long; meanwhile the recorded
//! guest goes on, and what it writes has to go again. So a codec that packs better or works faster has less to send, as it has in a real move,
//! and every codec meets the same guest.
//!
//! The encoder may be ahead of the link by what a node's window holds beside the bytes of a round trip, which are on the wire or acknowledged. The guest stands
//! from when the rules say so until the last byte has arrived. A node that settles has next to nothing before the link then: it lets the guest run on until what waits has gone,
//! where the guest does not write as much meanwhile. What is not of memory (the hand-off's round trips, devices, disks) is not in it, and neither is a slow start: those are the same
//! for all. Rules are asked at the ends of rounds only: a deadline, which a node also looks at within one, ends none in the middle here.
//!
//! Each look of the recording shows a page once, however often it was written since the one before, and not at all if it was as before in the end. Rounds that are
//! shorter than the time between two looks see less than there was.

use crate::amount::{PAGE, Pages};
use crate::recorded::{Recorded, RecordedError};
use crate::rules::{Condition, Judge, Judged, Redirtied, Rules, Seen};
use crate::whole::{SETTLED, ahead, is_worth_settling};
use godwit_memory::codec::Encode;
use godwit_memory::levels::{self, Carried, Levels, Made, Now, Shown};
use godwit_memory::{Beside, Clock, StreamError};
use godwit_units::{BitRate, Bytes};
use std::io::Read;
use std::time::Duration;

/// Pages that are sent between two looks at what the guest has done.
const BATCH: usize = 64;
/// The name of the block of RAM that the stream has.
const BLOCK: &[u8] = b"pc.ram";

/// Where it is tried.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Road {
    /// What the link carries.
    pub rate: BitRate,
    /// There and back.
    pub round_trip: Duration,
}

/// What moves it.
pub struct Mover<'a> {
    /// Begins anew.
    pub encoder: &'a mut dyn Encode,
    /// Finds its level as it goes, as a node does, on a host with [`PROCESSORS`] that nothing else uses. `None`: it stays as it is.
    pub levels: Option<Levels>,
    /// What the calling thread has had of a processor; an encoder with a thread of zstd's has the same one.
    pub clock: Clock,
}

/// Of the host that it leaves: the encoder's, and one more, which zstd may have.
pub const PROCESSORS: u32 = 2;

/// When the guest stops.
#[derive(Clone, Debug)]
pub struct Stop {
    /// What ends pre-copy.
    pub rules: Rules,
    /// Whether what waits for the link goes first, as with a node.
    pub settles: bool,
}

/// Why it could not be tried.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReplayError {
    /// The recording is none.
    #[error(transparent)]
    Recorded(#[from] RecordedError),
    /// The encoder refused the stream.
    #[error("the encoder refuses the stream: {0}")]
    Stream(#[from] StreamError),
    /// The link carries nothing.
    #[error("nothing goes over a link of 0 Mbit/s")]
    NoLink,
    /// The recording ended before the move did.
    #[error("the recording ended after {recorded:?}, in round {round} of the move: record for longer")]
    TooShort {
        /// How long it is.
        recorded: Duration,
        /// The round that was begun, from 1.
        round: usize,
    },
    /// The rules end the move, and the guest stays.
    #[error("the move is given up after {rounds} rounds: its pause would be {} ms at least", least.as_millis())]
    GivesUp {
        /// The least that the pause would have been.
        least: Duration,
        /// Rounds that were made.
        rounds: usize,
    },
}

/// A pass over memory, or what was left at the stop.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Passed {
    /// Pages with contents that were sent.
    pub pages: Pages,
    /// Pages of zeroes that were.
    pub zeroes: Pages,
    /// Pages that were left to the next one, since the guest had written them again.
    pub skipped: Pages,
    /// What went over the link.
    pub wire: Bytes,
    /// What QEMU's own stream would have been.
    pub raw: Bytes,
}

/// How it went.
#[derive(Clone, Debug)]
pub struct Tried {
    /// From the first page until the last byte has arrived.
    pub total: Duration,
    /// Of that, how long the guest stood.
    pub pause: Duration,
    /// The rounds; the last one is what was left at the stop.
    pub rounds: Vec<Passed>,
    /// What ended pre-copy.
    pub ended_by: Condition,
    /// What the encoder took of a processor.
    pub encoding: Duration,
    /// What the encoder has counted, by name.
    pub counted: Vec<(&'static str, u64)>,
}

impl Tried {
    /// What went over the link.
    #[must_use]
    pub fn wire(&self) -> Bytes {
        Bytes(self.rounds.iter().map(|round| round.wire.0).sum())
    }
}

/// Writes what QEMU would.
#[derive(Default)]
struct Stream {
    bytes: Vec<u8>,
    named: bool,
}

impl Stream {
    /// Header, and the section that names RAM.
    fn begin(&mut self, ram: Pages) {
        self.bytes.extend_from_slice(b"QEVM\0\0\0\x03\x07\0\0\0\x0apc-q35-7.2\x01\0\0\0\x02\x03ram\0\0\0\0\0\0\0\x04");
        self.bytes.extend_from_slice(&(ram.bytes().0 | 4).to_be_bytes());
        self.block();
        self.bytes.extend_from_slice(&ram.bytes().0.to_be_bytes());
        self.close();
    }

    fn block(&mut self) {
        self.bytes.push(BLOCK.len() as u8);
        self.bytes.extend_from_slice(BLOCK);
    }

    fn open(&mut self, section: u8) {
        self.bytes.extend_from_slice(&[section, 0, 0, 0, 2]);
    }

    fn close(&mut self) {
        self.bytes.extend_from_slice(&0x10_u64.to_be_bytes());
        self.bytes.extend_from_slice(b"\x7e\0\0\0\x02");
    }

    /// Whether it is of zeroes.
    fn page(&mut self, page: u64, contents: &[u8]) -> bool {
        let zero = contents.iter().all(|byte| *byte == 0);
        let kind = if zero { 2 } else { 8 } | if self.named { 0x20 } else { 0 };
        self.bytes.extend_from_slice(&(page << 12 | kind).to_be_bytes());
        if !std::mem::replace(&mut self.named, true) {
            self.block();
        }
        if zero {
            self.bytes.push(0)
        } else {
            self.bytes.extend_from_slice(contents)
        }
        zero
    }

    /// No device, and the end.
    fn end(&mut self) {
        self.bytes.push(0);
    }
}

/// What the guest has written in a round.
struct Written {
    dirty: Vec<bool>,
    /// How many pages; one that was written twice counts once.
    left: u64,
}

impl Written {
    fn until<R: Read>(&mut self, guest: &mut Recorded<R>, time: Duration) -> Result<(), RecordedError> {
        guest.until(time, |page| {
            self.left += u64::from(!std::mem::replace(&mut self.dirty[page as usize], true));
        })
    }

    /// The pages, and none are.
    fn take(&mut self) -> Vec<u64> {
        self.left = 0;
        let dirty = self.dirty.iter_mut().enumerate();
        dirty.filter_map(|(page, dirty)| std::mem::take(dirty).then_some(page as u64)).collect()
    }
}

/// Encoder and link, and what time it is at both.
struct Way<'a> {
    mover: Mover<'a>,
    road: Road,
    stream: Stream,
    out: Vec<u8>,
    made: Made,
    /// When the encoder is done with what it was given, or with all of it but what its own thread has then; and that thread with what it had before.
    encoded: Duration,
    packed: Duration,
    /// When the link is.
    sent: Duration,
    /// By how much the first may be before the last.
    ahead: Duration,
    /// Of processors.
    encoding: Duration,
}

impl Way<'_> {
    /// What has been written goes; the bytes on the link and of QEMU's.
    fn go(&mut self) -> Result<(Bytes, Bytes), ReplayError> {
        let begun = (self.mover.clock)();
        self.mover.encoder.push(&self.stream.bytes, &mut self.out)?;
        let raw = Bytes(self.stream.bytes.len() as u64);
        self.stream.bytes.clear();
        self.made.given = self.mover.encoder.given().unwrap_or(self.made.given + raw.0);
        let wire = self.went(begun);
        Ok((wire + self.level()?, raw))
    }

    /// Another level, if that is better; what it took on the link.
    fn level(&mut self) -> Result<Bytes, ReplayError> {
        let waits = self.road.rate.bytes_in(self.sent.saturating_sub(self.encoded));
        let arrived = self.made.wire.saturating_sub(waits.0);
        // A real stream goes in bursts, which show it.
        let shown = Some(Shown { link: self.road.rate, all: true });
        let carried = Carried { arrived, round_trip: self.road.round_trip, shown };
        let now = Now { at: self.encoded, idle: (self.encoded * PROCESSORS).saturating_sub(self.encoding) };
        let other = self.mover.levels.as_mut().and_then(|levels| levels.look(self.made, || (now, carried)));
        let Some(level) = other else { return Ok(Bytes(0)) };
        let begun = (self.mover.clock)();
        self.mover.encoder.set_level(level.number(), levels::reach(level), &mut self.out)?;
        Ok(self.went(begun))
    }

    fn went(&mut self, begun: Duration) -> Bytes {
        let took = (self.mover.clock)().saturating_sub(begun);
        // The thread had it since the encoder was done with it, and the encoder waits for it before it gives it more.
        let spent = self.mover.encoder.beside().unwrap_or_default().spent;
        let zstd = spent.saturating_sub(self.made.beside.spent);
        let had = self.encoded;
        self.encoded += took;
        self.packed = if zstd.is_zero() { self.encoded } else { self.packed.max(had) + zstd };
        let waited = self.packed.saturating_sub(self.encoded);
        self.encoded += waited;
        self.made.beside = Beside { spent, waited: self.made.beside.waited + waited };
        let wire = Bytes(self.out.len() as u64);
        self.out.clear();
        self.made.wire += wire.0;
        if let Some(levels) = &mut self.mover.levels {
            levels.packed(took + waited);
        }
        self.encoding += took + zstd;
        self.sent = self.sent.max(self.packed) + self.road.rate.time_for(wire);
        self.wait();
        wire
    }

    /// The encoder goes on once the link has come near enough.
    fn wait(&mut self) {
        let until = self.encoded.max(self.sent.saturating_sub(self.ahead));
        if let Some(levels) = &mut self.mover.levels {
            levels.waited(until - self.encoded);
        }
        self.encoded = until;
    }
}

/// Tries a move.
///
/// # Errors
/// What is wrong with the recording or the stream, or that the guest was not recorded for long enough.
pub fn replay<R: Read>(
    guest: &mut Recorded<R>,
    mover: Mover<'_>,
    stop: &Stop,
    road: Road,
) -> Result<Tried, ReplayError> {
    if road.rate.mbit() <= 0.0 {
        return Err(ReplayError::NoLink);
    }
    let ram = guest.pages();
    let rules = &stop.rules;
    let mut judge = Judge::new(rules, ram);
    let queued = ahead(road.round_trip).saturating_sub(road.round_trip);
    let mut written = Written { dirty: vec![false; ram.0 as usize], left: 0 };
    let mut way = Way {
        mover,
        road,
        stream: Stream::default(),
        out: vec![],
        made: Made::default(),
        encoded: Duration::ZERO,
        packed: Duration::ZERO,
        sent: Duration::ZERO,
        ahead: queued,
        encoding: Duration::ZERO,
    };
    way.stream.begin(ram);
    let mut rounds: Vec<Passed> = vec![];
    let mut due: Vec<u64> = (0..ram.0).collect();
    let mut all_sent = 0.0;
    let ended_by = loop {
        let mut round = Passed::default();
        let begun = way.encoded;
        way.stream.open(2);
        for batch in due.chunks(BATCH) {
            written.until(guest, way.encoded)?;
            if guest.is_over() {
                return Err(ReplayError::TooShort { recorded: way.encoded, round: rounds.len() + 1 });
            }
            for page in batch {
                if rules.redirtied == Redirtied::Skipped && written.dirty[*page as usize] {
                    round.skipped.0 += 1;
                    continue;
                }
                let zero = way.stream.page(*page, guest.page(*page));
                if zero { round.zeroes.0 += 1 } else { round.pages.0 += 1 }
            }
            let (wire, raw) = way.go()?;
            (round.wire.0, round.raw.0) = (round.wire.0 + wire.0, round.raw.0 + raw.0);
        }
        way.stream.close();
        // The last pages' time counts, too.
        written.until(guest, way.encoded)?;
        let sent = (round.pages.0 + round.zeroes.0) as f64;
        all_sent += sent;
        let each = if sent > 0.0 { round.wire.0 as f64 / sent } else { PAGE.0 as f64 };
        let takes = |left: u64| Duration::from_secs_f64(each * left as f64 * 8.0 / (road.rate.mbit() * 1e6));
        let rest = takes(written.left);
        let seen = Seen {
            sent,
            skipped: round.skipped.0 as f64,
            dirtied: written.left as f64,
            left: written.left as f64,
            all_sent,
            ram: ram.0 as f64,
            rest,
            again: guest.pace() * rest.as_secs_f64(),
            elapsed: way.encoded,
        };
        rounds.push(round);
        let settles = stop.settles && is_worth_settling(way.encoded - begun, seen.rest, road.round_trip);
        way.ahead = if settles { SETTLED } else { queued };
        let ends = match judge.round(&seen) {
            Judged::Ends(why) => Some(why),
            Judged::GoesOn => None,
            Judged::GivesUp(least) => return Err(ReplayError::GivesUp { least, rounds: rounds.len() }),
        };
        if let Some(why) = ends {
            // What waits goes while the guest runs on; where it writes too much meanwhile, the stop is decided anew.
            way.wait();
            written.until(guest, way.encoded)?;
            if !settles || takes(written.left) <= ahead(road.round_trip) {
                due = written.take();
                break why;
            }
        }
        due = written.take();
    };
    let stopped = way.encoded;
    // Another level would begin with an empty window, while the guest stands.
    way.mover.levels = None;
    way.mover.encoder.hurry();
    let mut rest = Passed::default();
    way.stream.open(3);
    for batch in due.chunks(BATCH) {
        for page in batch {
            let zero = way.stream.page(*page, guest.page(*page));
            if zero { rest.zeroes.0 += 1 } else { rest.pages.0 += 1 }
        }
        let (wire, raw) = way.go()?;
        (rest.wire.0, rest.raw.0) = (rest.wire.0 + wire.0, rest.raw.0 + raw.0);
    }
    way.stream.close();
    way.stream.end();
    let (wire, raw) = way.go()?;
    let begun = (way.mover.clock)();
    let counted = way.mover.encoder.finish(&mut way.out)?;
    rest.wire.0 += wire.0 + way.went(begun).0;
    rest.raw.0 += raw.0;
    rounds.push(rest);
    let total = way.sent + road.round_trip / 2;
    Ok(Tried { total, pause: total - stopped, rounds, ended_by, encoding: way.encoding, counted })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recorded::tests::recording;
    use godwit_memory::Config;
    use godwit_memory::Reach;
    use godwit_memory::codec::{Codec, encoder};
    use godwit_units::Policy;
    use std::cell::Cell;

    const SLOW: Road = Road { rate: BitRate(8_000_000), round_trip: Duration::from_millis(20) };

    thread_local! {
        static HAS_HAD: Cell<Duration> = const { Cell::new(Duration::ZERO) };
        static TAKES: Cell<Duration> = const { Cell::new(Duration::ZERO) };
    }

    /// Each look at it takes a while of a processor.
    fn clock() -> Duration {
        HAS_HAD.set(HAS_HAD.get() + TAKES.get());
        HAS_HAD.get()
    }

    /// 1024 pages of as many contents, of which 256 are written anew each second for a minute.
    fn guest() -> Vec<u8> {
        let mut looks = vec![(0, (0..1024).map(|page| (page, 1 + (page % 251) as u8)).collect::<Vec<_>>())];
        looks.extend((1..=60).map(|s| (s * 1000, (0..256).map(|page| (page, (s % 251) as u8)).collect())));
        recording(2048, &looks)
    }

    fn by(encoder: &mut dyn Encode) -> Mover<'_> {
        Mover { encoder, levels: None, clock }
    }

    fn at_once(rules: &Rules) -> Stop {
        Stop { rules: rules.clone(), settles: false }
    }

    fn tried(codec: Codec, rules: &Rules, takes: Duration) -> Result<Tried, ReplayError> {
        TAKES.set(takes);
        let bytes = guest();
        let mut encoder = encoder(codec, Config::default(), None, 1024).unwrap();
        replay(&mut Recorded::open(&bytes[..]).unwrap(), by(&mut *encoder), &at_once(rules), SLOW)
    }

    #[test]
    fn a_plain_move_takes_what_its_bytes_take_and_the_guest_stands_for_the_last_of_them() {
        let rules = Rules { conditions: vec![Condition::Rounds(3)], ..Rules::qemu(Duration::ZERO) };
        let went = tried(Codec::Plain, &rules, Duration::ZERO).unwrap();
        // 4 MiB at a MB/s take 4.2 s, of which 256 pages are written again and again.
        let first = went.rounds[0];
        assert_eq!((first.pages, first.zeroes, went.rounds.len()), (Pages(1024), Pages(1024), 4));
        assert_eq!(went.rounds[1].pages, Pages(256), "all of them were written in 4 s");
        let link = went.wire().0 as f64 / 1e6;
        assert!((went.total.as_secs_f64() - link - 0.01).abs() < 1e-3, "{:?} for {link} s", went.total);
        let last = went.rounds[3];
        assert!((200..=256).contains(&last.pages.0), "in the second that 256 pages take: {last:?}");
        let most = last.wire.0 as f64 / 1e6 + 0.055 + 0.011;
        assert!((most - 0.056..=most).contains(&went.pause.as_secs_f64()), "{:?} of {most}", went.pause);
        assert_eq!(went.ended_by, Condition::Rounds(3));
    }

    #[test]
    fn another_round_that_costs_few_bytes_is_had_of_a_guest_that_is_seen_to_write_little() {
        TAKES.set(Duration::ZERO);
        let rules = Rules::godwit_to(Policy::LeastBytes);
        // From the third second on it writes so many each second.
        let rounds = |then: u32| {
            let mut looks = vec![(0, (0..1024).map(|page| (page, 1 + (page % 251) as u8)).collect::<Vec<_>>())];
            let writes = |s: u64| if s < 3 { 256 } else { then };
            looks.extend((1..=60).map(|s| (s * 1000, (0..writes(s)).map(|page| (page, s as u8)).collect())));
            let (bytes, mut encoder) =
                (recording(2048, &looks), encoder(Codec::Plain, Config::default(), None, 1024).unwrap());
            let mut guest = Recorded::open(&bytes[..]).unwrap();
            replay(&mut guest, by(&mut *encoder), &at_once(&rules), SLOW).unwrap()
        };
        let (much, little) = (rounds(512), rounds(4));
        assert_eq!((much.rounds.len(), little.rounds.len()), (2, 3), "with the stop: {little:?}");
        assert!(little.pause * 5 < much.pause, "{:?} {:?}", little.pause, much.pause);
    }

    #[test]
    fn who_packs_better_has_less_to_send_again_and_who_is_slower_more() {
        let rules = Rules { conditions: vec![Condition::Rounds(2)], ..Rules::qemu(Duration::ZERO) };
        let plain = tried(Codec::Plain, &rules, Duration::ZERO).unwrap();
        let packed = tried(Codec::Zstd, &rules, Duration::ZERO).unwrap();
        let slow = tried(Codec::Zstd, &rules, Duration::from_millis(20)).unwrap();
        let again = |tried: &Tried| tried.rounds[1..].iter().map(|round| round.pages.0).sum::<u64>();
        assert!(packed.total < plain.total / 10 && again(&packed) * 4 < again(&plain), "{packed:?}\n{plain:?}");
        assert!(slow.total > packed.total * 2 && again(&slow) > again(&packed), "{slow:?}\n{packed:?}");
    }

    /// Leaves a fifth of everything, and remembers what it was told.
    #[derive(Default)]
    struct Fifth(Vec<i32>);

    impl Encode for Fifth {
        fn push(&mut self, input: &[u8], out: &mut Vec<u8>) -> Result<(), StreamError> {
            out.extend_from_slice(&input[..input.len() / 5]);
            Ok(())
        }

        fn finish(&mut self, _: &mut Vec<u8>) -> Result<Vec<(&'static str, u64)>, StreamError> {
            Ok(vec![])
        }

        fn set_level(&mut self, level: i32, _: Reach, _: &mut Vec<u8>) -> Result<(), StreamError> {
            self.0.push(level);
            Ok(())
        }
    }

    #[test]
    fn a_level_is_found_by_what_the_link_and_the_processor_took_in_this_move() {
        // 64 MiB, of which each 256 KiB take a millisecond.
        let looks = [(0, (0..16384).map(|page| (page, 7)).collect::<Vec<_>>()), (600_000, vec![])];
        let bytes = recording(16384, &looks);
        let rules = Rules { conditions: vec![Condition::Rounds(1)], ..Rules::qemu(Duration::ZERO) };
        let found = |mbit: f64, levels: Option<Levels>| {
            TAKES.set(Duration::from_millis(1));
            let mut encoder = Fifth::default();
            let road = Road { rate: BitRate::from_mbit(mbit), ..SLOW };
            let mover = Mover { levels, ..by(&mut encoder) };
            replay(&mut Recorded::open(&bytes[..]).unwrap(), mover, &at_once(&rules), road).unwrap();
            encoder.0
        };
        let levels = || Some(Levels::new(Policy::LeastTotal, Now::default()));
        assert!(found(20.0, None).is_empty());
        assert_eq!(found(20.0, levels()), [9]);
        assert_eq!(found(100.0, levels()).first(), Some(&6));
        assert!(found(10_000.0, levels()).iter().all(|level| *level <= 1));
    }

    #[test]
    fn xen_leaves_pages_that_are_written_again_to_the_next_round() {
        let rules = Rules { conditions: vec![Condition::Rounds(2)], ..Rules::xen() };
        let went = tried(Codec::Plain, &rules, Duration::ZERO).unwrap();
        let (first, second) = (went.rounds[0], went.rounds[1]);
        // In the first round the first of them are sent before they are written.
        assert!(first.skipped.0 > 0 && first.pages.0 + first.zeroes.0 + first.skipped.0 == 2048, "{first:?}");
        assert!(second.skipped.0 > 0 && second.pages.0 < 256, "{second:?}");
    }

    #[test]
    fn smart_stop_goes_on_while_fewer_pages_are_written_than_sent_however_often_each_is() {
        // In the four seconds of the first round 64 pages of 2048 are written, two hundred times each: they have not caught up.
        let mut looks = vec![(0, (0..1024).map(|page| (page, 1 + (page % 251) as u8)).collect::<Vec<_>>())];
        looks.extend((1..300).map(|n| (n * 20, (0..64).map(|page| (page, (n % 251) as u8)).collect())));
        let bytes = recording(2048, &looks);
        TAKES.set(Duration::ZERO);
        let mut encoder = encoder(Codec::Plain, Config::default(), None, 1).unwrap();
        let mut guest = Recorded::open(&bytes[..]).unwrap();
        let went = replay(&mut guest, by(&mut *encoder), &at_once(&Rules::smart_stop()), SLOW).unwrap();
        assert!(matches!(went.ended_by, Condition::LocalMinimum { .. }), "{went:?}");
        assert_eq!(went.rounds.len(), 3, "two, and what was left: {went:?}");
    }

    #[test]
    fn a_guest_that_is_waited_for_stands_for_its_last_pages_alone_unless_it_writes_meanwhile() {
        // 1024 pages take 4.2 s; in the second of them 8 are written.
        let first = (0..1024).map(|page| (page, 1 + (page % 251) as u8)).collect::<Vec<_>>();
        let pages = |n: u32, salt: u8| (0..n).map(|page| (page, salt)).collect::<Vec<_>>();
        let try_it = |settles, late: u32| {
            let looks =
                [(0, first.clone()), (2000, pages(8, 252)), (4175, vec![]), (4190, pages(late, 253)), (9000, vec![])];
            let bytes = recording(1024, &looks);
            TAKES.set(Duration::ZERO);
            let mut encoder = encoder(Codec::Plain, Config::default(), None, 1).unwrap();
            let rules = Rules { conditions: vec![Condition::Rounds(1)], ..Rules::qemu(Duration::ZERO) };
            replay(&mut Recorded::open(&bytes[..]).unwrap(), by(&mut *encoder), &Stop { rules, settles }, SLOW).unwrap()
        };
        // 8 pages, what waits before them, and half a round trip.
        let link = 8.0 * 4.105;
        for (settles, before) in [(false, 35.0), (true, 5.0)] {
            let pause = try_it(settles, 1).pause.as_secs_f64() * 1e3;
            assert!((pause - link - before - 10.0).abs() < 1.0, "{settles}: {pause} ms");
        }
        assert_eq!(try_it(true, 1).rounds.len(), 2);
        assert_eq!(try_it(true, 900).rounds.len(), 3, "it is decided anew");
    }

    #[test]
    fn a_recording_that_ends_before_the_move_is_no_guest_that_rests() {
        let rules = Rules { conditions: vec![Condition::Rounds(200)], ..Rules::qemu(Duration::ZERO) };
        assert!(matches!(tried(Codec::Plain, &rules, Duration::ZERO), Err(ReplayError::TooShort { .. })));
    }
}
