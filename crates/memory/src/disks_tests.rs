//! References to the VM's disks, both ends together: blocks change and are missing, answers are late, the ring is full.

#[path = "../tests/common/mod.rs"]
mod common;

use crate::disks::{NEIGHBOURS, PATIENCE, RING};
use crate::{
    Blocks, Config, Decoder, Encoder, Feedback, Finder, Limits, PAGE_SIZE, PageBytes, PageKey, Progress, Resends, Spot,
    SpotTable, StreamError, WireError, format,
};
use common::{PAGE, Stream, load};
use proptest::prelude::*;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Duration;

const WINDOW: u32 = 20;
const LIMITS: Limits = Limits { max_ram: 1 << 30, window_log: WINDOW, versions: 1 << 30 };
const RAM: &[(&str, u64)] = &[("pc.ram", 4096), ("pc.bios", 3)];

/// A disk: the contents of its blocks, `None` where it cannot be read.
#[derive(Clone)]
struct Disk(Arc<Mutex<Vec<Option<PageBytes>>>>);

impl Disk {
    fn new(blocks: impl IntoIterator<Item = Option<PageBytes>>) -> Self {
        Self(Arc::new(Mutex::new(blocks.into_iter().collect())))
    }

    /// Blocks that are filled with a byte each.
    fn filled(fills: &[Option<u8>]) -> Self {
        Self::new(fills.iter().map(|fill| fill.map(|fill| [fill; PAGE_SIZE])))
    }

    /// Blocks of noise.
    fn noise(blocks: u32) -> Self {
        Self::new((0..blocks).map(|n| Some(noise(n))))
    }

    fn set(&self, block: usize, content: Option<PageBytes>) {
        self.0.lock().unwrap()[block] = content;
    }
}

/// A page that does not compress.
fn noise(seed: u32) -> PageBytes {
    let mut page = [0; PAGE_SIZE];
    blake3::Hasher::new().update(&seed.to_le_bytes()).finalize_xof().fill(&mut page);
    page
}

impl Blocks for Disk {
    fn read(&self, first: Spot, into: &mut [u8]) -> bool {
        let blocks = self.0.lock().unwrap();
        first.disk == 0
            && (first.block as usize..).zip(into.chunks_exact_mut(PAGE_SIZE)).all(|(block, into)| {
                blocks.get(block).copied().flatten().map(|content| into.copy_from_slice(&content)).is_some()
            })
    }
}

/// A disk, and what somebody saw there once.
struct Seen(Disk, SpotTable);

impl Seen {
    fn of(disk: &Disk) -> Box<Self> {
        let blocks = disk.0.lock().unwrap();
        let mut table = SpotTable::new(blocks.len() as u64, 1);
        for (n, block) in blocks.iter().enumerate() {
            if let Some(content) = block {
                table.learn(Spot { disk: 0, block: n as u32 }, content);
            }
        }
        Box::new(Self(disk.clone(), table))
    }
}

impl Blocks for Seen {
    fn read(&self, first: Spot, into: &mut [u8]) -> bool {
        self.0.read(first, into)
    }
}

impl Finder for Seen {
    fn find(&self, content: &PageBytes) -> Option<Spot> {
        self.1.find(content)
    }
}

fn encoder(resends: Resends) -> Encoder {
    let config = Config { window_log: WINDOW, resends, key: PageKey([7; 32]), max_ram: 1 << 30, ..Config::default() };
    Encoder::new(config).unwrap()
}

fn decoder(disk: &Disk) -> Decoder {
    Decoder::new(LIMITS).unwrap().with_disks(Box::new(disk.clone()))
}

/// Both ends and the ways between them.
struct Pair {
    encoder: Encoder,
    decoder: Decoder,
    wire: VecDeque<u8>,
    back: VecDeque<Feedback>,
    out: Vec<u8>,
}

impl Pair {
    fn new(encoder: Encoder, decoder: Decoder) -> Self {
        Self { encoder, decoder, wire: VecDeque::new(), back: VecDeque::new(), out: vec![] }
    }

    fn sends(&mut self, what: impl FnOnce(&mut Encoder, &mut Vec<u8>) -> Result<(), StreamError>) {
        let mut wire = vec![];
        what(&mut self.encoder, &mut wire).unwrap();
        self.wire.extend(wire);
    }

    /// Eight pages at a time, each answered before the next go; how it stands at the end, which is exact.
    fn answers_all_of(&mut self, raw: &[u8]) -> Progress {
        self.answers_all_with(raw, |_| {})
    }

    /// The same, and what is done after each.
    fn answers_all_with(&mut self, raw: &[u8], then: impl Fn(&mut Encoder)) -> Progress {
        for piece in raw.chunks(8 * PAGE) {
            self.sends(|encoder, out| encoder.push(piece, out));
            self.sends(Encoder::flush);
            self.settle().unwrap();
            then(&mut self.encoder);
        }
        let progress = self.encoder.progress().clone();
        self.sends(|encoder, out| encoder.finish(out).map(drop));
        self.settle().unwrap();
        assert_eq!(self.out, raw);
        progress
    }

    /// So many bytes arrive.
    fn arrive(&mut self, bytes: usize) -> Result<(), WireError> {
        let piece: Vec<u8> = self.wire.drain(..bytes.min(self.wire.len())).collect();
        self.decoder.push(&piece, &mut self.out)?;
        self.back.extend(std::iter::from_fn(|| self.decoder.feedback()));
        Ok(())
    }

    /// What the decoder said first arrives.
    fn return_one(&mut self) {
        if let Some(feedback) = self.back.pop_front() {
            self.sends(|encoder, out| encoder.feedback(feedback, out));
        }
    }

    /// Everything arrives, in both directions.
    fn settle(&mut self) -> Result<(), WireError> {
        while !self.wire.is_empty() || !self.back.is_empty() {
            self.arrive(usize::MAX)?;
            self.return_one();
        }
        Ok(())
    }

    fn run(&mut self, raw: &[u8]) -> Result<Progress, WireError> {
        self.sends(|encoder, out| encoder.push(raw, out));
        self.sends(|encoder, out| encoder.finish(out).map(drop));
        self.settle()?;
        assert!(self.decoder.decoded().complete);
        Ok(self.encoder.progress().clone())
    }
}

/// A PART with noise on its pages from `first`, and what belongs around it.
fn raw(first: u64, pages: u32) -> Vec<u8> {
    let mut stream = Stream::begin(RAM);
    let contents: Vec<u8> = (0..pages).flat_map(noise).collect();
    stream.part_of(first, &contents);
    stream.end(&[(0, 9, None)])
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn whatever_the_disks_hold_and_however_late_anything_comes_the_stream_is_rebuilt(
        parts in proptest::collection::vec(proptest::collection::vec((0..2usize, 0..3u64, proptest::option::of(1..6u8)), 0..40), 1..5),
        rows in proptest::collection::vec((0..200u64, 1..6u8, 1..40u64), 0..6),
        disk in proptest::collection::vec(proptest::option::of(0..6u8), 0..40),
        changes in proptest::collection::vec((0..40usize, proptest::option::of(0..6u8), 0..400usize), 0..20),
        (keep, room) in (any::<bool>(), prop_oneof![Just(0), Just(PAGE_SIZE), Just(10 * PAGE_SIZE), Just(RING)]),
        schedule in proptest::collection::vec((0..5u8, 1..3000usize), 1..60),
    ) {
        let mut stream = Stream::begin(RAM);
        parts.iter().for_each(|part| stream.part(part));
        for (first, fill, length) in &rows {
            let pages: Vec<_> = (0..*length).map(|n| (0, first + n, Some((fill + n as u8) % 6 + 1))).collect();
            stream.part(&pages);
        }
        let raw = stream.end(&[(0, 1, Some(2))]);
        let (here, there) = (Disk::filled(&disk), Disk::filled(&disk));
        let resends = if keep { Resends::Keep } else { Resends::Elide };
        let mut pair = Pair::new(encoder(resends).with_disks_and_room(Seen::of(&here), room), decoder(&there));
        let (mut at, mut step) = (0, 0);
        while at < raw.len() {
            let (what, n) = schedule[step % schedule.len()];
            for (block, fill, _) in changes.iter().filter(|(block, _, when)| *when == step && *block < disk.len()) {
                // The destination's copy is ahead or behind; it does not matter.
                let content = fill.map(|fill| [fill; PAGE_SIZE]);
                (if step % 2 == 0 { &here } else { &there }).set(*block, content);
            }
            match what {
                0 => pair.arrive(n).unwrap(),
                1 => pair.return_one(),
                2 => pair.sends(Encoder::flush),
                _ => {
                    let end = (at + n).min(raw.len());
                    pair.sends(|encoder, out| encoder.push(&raw[at..end], out));
                    at = end;
                }
            }
            step += 1;
            if step > schedule.len() && schedule.iter().all(|(what, _)| *what < 3) {
                pair.sends(|encoder, out| encoder.push(&raw[at..], out));
                at = raw.len();
            }
        }
        pair.sends(|encoder, out| encoder.finish(out).map(drop));
        pair.settle().unwrap();
        let end = pair.decoder.decoded();
        prop_assert!(end.complete && end.verified_bytes == pair.out.len() as u64);
        if keep {
            prop_assert_eq!(&pair.out, &raw);
        }
        prop_assert!(load(&pair.out).0 == load(&raw).0);
        if room == 0 {
            prop_assert_eq!(pair.encoder.progress().disk_pages, 0);
        }
        prop_assert_eq!(pair.encoder.progress().pages(), load(&raw).1 as u64);
    }
}

#[test]
fn pages_that_lie_on_the_disk_in_a_row_cost_two_bytes_or_less() {
    let disk = Disk::noise(2000);
    let mut pair = Pair::new(encoder(Resends::Keep).with_disks(Seen::of(&disk)), decoder(&disk));
    let raw = raw(100, 2000);
    let progress = pair.run(&raw).unwrap();
    assert_eq!((progress.disk_pages, progress.data_pages, progress.missing_pages), (2000, 0, 0));
    assert!(progress.wire_bytes < 2 * 2000, "{progress:?}");
    assert!(progress.disk_bytes < 2 * 2000, "{progress:?}");
    // Levels go by what zstd is given, and that is none of it.
    assert!(progress.given_bytes < 3 * 2000, "{progress:?}");
    assert_eq!(pair.out, raw);
}

#[test]
fn a_block_that_is_another_at_the_destination_is_asked_for_and_without_verification_it_would_be_taken() {
    let (here, there) = (Disk::noise(64), Disk::noise(64));
    there.set(20, Some([1; PAGE_SIZE]));
    there.set(40, None);
    let raw = raw(0, 64);
    let mut pair = Pair::new(encoder(Resends::Keep).with_disks(Seen::of(&here)), decoder(&there));
    let progress = pair.run(&raw).unwrap();
    assert_eq!((progress.disk_pages, progress.missing_pages), (64, 32), "two groups of 16");
    assert_eq!(pair.out, raw);
    // The guard is what keeps the wrong block out: only the digest of the whole would be left, which mends nothing.
    there.set(40, Some(noise(40)));
    let mut blind = Pair::new(encoder(Resends::Keep).with_disks(Seen::of(&here)), decoder(&there).believing());
    assert!(matches!(blind.run(&raw), Err(WireError::Digest { .. })));
    assert_ne!(blind.out, raw);
}

#[test]
fn a_block_that_is_another_at_the_source_by_now_is_not_referred_to() {
    let disk = Disk::noise(64);
    let seen = Seen::of(&disk);
    disk.set(7, Some([1; PAGE_SIZE]));
    disk.set(9, None);
    let mut pair = Pair::new(encoder(Resends::Keep).with_disks(seen), decoder(&disk));
    let progress = pair.run(&raw(0, 64)).unwrap();
    assert_eq!((progress.disk_pages, progress.data_pages, progress.missing_pages), (62, 2, 0));
}

#[test]
fn a_named_page_that_comes_again_is_left_out_or_goes_as_a_difference_while_its_block_is_what_it_was() {
    let (here, there) = (Disk::noise(8), Disk::noise(8));
    let changed = |n: u32| {
        let mut page = noise(n);
        page[99] ^= 1;
        page
    };
    let mut stream = Stream::begin(RAM);
    stream.part_of(0, &(0..8).flat_map(noise).collect::<Vec<_>>());
    let first = stream.bytes.len();
    // As it was; changed a little; the same, and its block was written meanwhile, and cannot be read.
    stream.part_of(0, &[noise(0), changed(1), changed(2), changed(3)].concat());
    let second = stream.bytes.len();
    // And again, from what is kept by now.
    stream.part_of(0, &[changed(0), noise(1), noise(2), noise(3)].concat());
    let third = stream.bytes.len();
    let raw = stream.end(&[]);
    let mut pair = Pair::new(encoder(Resends::Elide).with_disks(Seen::of(&here)), decoder(&there));
    let sends = |pair: &mut Pair, bytes: std::ops::Range<usize>| {
        pair.sends(|encoder, out| encoder.push(&raw[bytes], out));
        let p = pair.encoder.progress();
        (p.disk_pages, p.unchanged_pages, p.delta_pages, p.data_pages)
    };
    assert_eq!(sends(&mut pair, 0..first), (8, 0, 0, 0));
    here.set(2, Some([1; PAGE_SIZE]));
    here.set(3, None);
    assert_eq!(sends(&mut pair, first..second), (8, 1, 1, 2));
    // The first is on its disk still, and the others are kept.
    assert_eq!(sends(&mut pair, second..third), (8, 1, 5, 2));
    pair.sends(|encoder, out| encoder.push(&raw[third..], out));
    pair.sends(|encoder, out| encoder.finish(out).map(drop));
    pair.settle().unwrap();
    assert!(pair.decoder.decoded().complete);
    assert!(load(&pair.out).0 == load(&raw).0);
}

#[test]
fn where_the_ring_is_full_pages_go_in_full_until_the_decoder_says_that_it_is_past_some() {
    let disk = Disk::noise(512);
    let encoder = encoder(Resends::Keep).with_disks_and_room(Seen::of(&disk), 100 * PAGE_SIZE);
    let mut pair = Pair::new(encoder, decoder(&disk));
    let mut stream = Stream::begin(RAM);
    stream.part_of(0, &(0..200).flat_map(noise).collect::<Vec<_>>());
    let first = stream.bytes.len();
    stream.part_of(200, &(200..300).flat_map(noise).collect::<Vec<_>>());
    let raw = stream.end(&[]);
    pair.sends(|encoder, out| encoder.push(&raw[..first], out));
    let progress = pair.encoder.progress();
    assert_eq!((progress.disk_pages, progress.data_pages, progress.crowded_pages), (100, 100, 100));
    assert!(pair.encoder.lacks_room());
    pair.sends(Encoder::flush);
    pair.arrive(usize::MAX).unwrap();
    // The decoder says it by itself only once a great many are done; so here it is said for it.
    pair.sends(|encoder, out| encoder.feedback(Feedback::Past(7), out));
    pair.sends(|encoder, out| encoder.push(&raw[first..], out));
    assert_eq!(pair.encoder.progress().disk_pages, 200);
    pair.sends(|encoder, out| encoder.finish(out).map(drop));
    pair.settle().unwrap();
    assert_eq!(pair.out, raw);
}

#[test]
fn the_decoder_says_how_far_it_is_before_a_ring_can_be_full() {
    let disk = Disk::noise(2048);
    let mut pair = Pair::new(encoder(Resends::Keep).with_disks(Seen::of(&disk)), decoder(&disk));
    let raw = raw(0, 2048);
    pair.sends(|encoder, out| encoder.push(&raw, out));
    pair.sends(Encoder::flush);
    pair.arrive(usize::MAX).unwrap();
    assert!(matches!(pair.back.back(), Some(Feedback::Past(groups)) if *groups >= 64), "{:?}", pair.back);
    pair.settle().unwrap();
    assert!(!pair.encoder.lacks_room());
}

#[test]
fn references_do_not_wait_in_the_encoder_until_they_are_old() {
    let disk = Disk::noise(2048);
    let mut pair = Pair::new(encoder(Resends::Keep).with_disks(Seen::of(&disk)), decoder(&disk));
    let raw = raw(0, 2048);
    pair.sends(|encoder, out| encoder.push(&raw[..raw.len() / 2 + 9 * PAGE], out));
    pair.arrive(usize::MAX).unwrap();
    assert!(pair.out.len() > raw.len() / 2 - 20 * PAGE, "{} of {}", pair.out.len(), raw.len());
}

#[test]
fn once_told_to_stop_the_encoder_refers_to_nothing() {
    let disk = Disk::noise(64);
    let mut pair = Pair::new(encoder(Resends::Keep).with_disks(Seen::of(&disk)), decoder(&disk));
    pair.encoder.hurry();
    let progress = pair.run(&raw(0, 64)).unwrap();
    assert_eq!((progress.disk_pages, progress.data_pages), (0, 64));
}

#[test]
fn a_destination_without_the_disks_is_found_out_after_some_round_trips() {
    let disk = Disk::noise(4000);
    let mut pair = Pair::new(encoder(Resends::Keep).with_disks(Seen::of(&disk)), Decoder::new(LIMITS).unwrap());
    let progress = pair.answers_all_of(&raw(0, 4000));
    assert!((PATIENCE * 8..PATIENCE * 20).contains(&progress.missing_pages), "{progress:?}");
    assert_eq!(progress.disk_pages, progress.missing_pages);
}

/// A disk, and a guest that was at the destination and is gone: every other 64 pages are thought to be in its memory.
struct Neighbour(Box<Seen>);

/// Where they are thought to be.
fn thought(block: u32) -> u8 {
    if (block / 64).is_multiple_of(2) { 0 } else { NEIGHBOURS }
}

impl Blocks for Neighbour {
    fn read(&self, first: Spot, into: &mut [u8]) -> bool {
        first.disk == thought(first.block) && self.0.read(Spot { disk: 0, ..first }, into)
    }
}

impl Finder for Neighbour {
    fn find(&self, content: &PageBytes) -> Option<Spot> {
        let found = self.0.find(content)?;
        Some(Spot { disk: thought(found.block), ..found })
    }
}

#[test]
fn a_neighbour_that_is_gone_does_not_keep_the_disks_from_being_referred_to() {
    let disk = Disk::noise(4096);
    let finder = Box::new(Neighbour(Seen::of(&disk)));
    let mut pair = Pair::new(encoder(Resends::Keep).with_disks(finder), decoder(&disk));
    let progress = pair.answers_all_of(&raw(0, 4096));
    assert!((PATIENCE * 8..PATIENCE * 20).contains(&progress.missing_pages), "{progress:?}");
    assert!(progress.disk_pages - progress.missing_pages > 1900, "{progress:?}");
}

#[test]
fn while_something_is_missing_the_rest_waits_and_that_has_a_bound() {
    let (here, there) = (Disk::noise(64), Disk::noise(64));
    there.set(5, None);
    let mut pair = Pair::new(encoder(Resends::Keep).with_disks(Seen::of(&here)), decoder(&there));
    let raw = raw(0, 64);
    pair.sends(|encoder, out| encoder.push(&raw, out));
    pair.sends(Encoder::flush);
    pair.arrive(usize::MAX).unwrap();
    assert!(pair.decoder.is_stalled() && pair.out.len() < raw.len());
    let length = pair.out.len();
    // Whatever comes now is not even looked at before the answer.
    let mut junk = format::segment(format::Segment::Packed, 1 << 20).to_vec();
    junk.resize(junk.len() + (1 << 20), 0xaa);
    let failed = (0..65).find_map(|_| pair.decoder.push(&junk, &mut pair.out).err());
    assert!(matches!(failed, Some(WireError::NoAnswer { .. })), "{failed:?}");
    assert_eq!(pair.out.len(), length);
}

#[test]
fn an_encoder_lacks_room_while_much_waits_behind_what_is_missing_until_that_is_worked_off() {
    let (here, there) = (Disk::noise(64), Disk::noise(64));
    there.set(5, None);
    let mut pair = Pair::new(encoder(Resends::Keep).with_disks(Seen::of(&here)), decoder(&there));
    let mut stream = Stream::begin(&[("pc.ram", 16384)]);
    stream.part_of(0, &(0..64).flat_map(noise).collect::<Vec<_>>());
    let first = stream.bytes.len();
    stream.part_of(64, &(1000..10_000).flat_map(noise).collect::<Vec<_>>());
    let raw = stream.end(&[]);
    pair.sends(|encoder, out| encoder.push(&raw[..first], out));
    pair.sends(Encoder::flush);
    pair.arrive(usize::MAX).unwrap();
    assert!(pair.decoder.is_stalled());
    // A link that brings 35 MiB in a round trip, of which more than half may wait.
    pair.sends(|encoder, out| encoder.push(&raw[first..], out));
    pair.sends(Encoder::flush);
    assert!(!pair.encoder.lacks_room(), "it cannot know yet");
    pair.return_one();
    assert!(pair.encoder.lacks_room());
    pair.arrive(usize::MAX).unwrap();
    pair.return_one();
    assert!(!pair.encoder.lacks_room(), "all that waited is worked off: {:?}", pair.back);
    pair.sends(|encoder, out| encoder.finish(out).map(drop));
    pair.settle().unwrap();
    assert_eq!(pair.out, raw);
}

#[test]
fn answers_that_nobody_asked_for_and_questions_about_nothing_are_refused() {
    let (here, there) = (Disk::noise(64), Disk::noise(64));
    there.set(5, None);
    let mut pair = Pair::new(encoder(Resends::Keep).with_disks(Seen::of(&here)), decoder(&there));
    let mut wire = vec![];
    assert!(matches!(pair.encoder.feedback(Feedback::Past(1), &mut wire), Err(StreamError::Feedback { group: 1 })));
    pair.encoder = encoder(Resends::Keep).with_disks(Seen::of(&here));
    pair.sends(|encoder, out| encoder.push(&raw(0, 64), out));
    pair.sends(Encoder::flush);
    pair.arrive(usize::MAX).unwrap();
    let Some(Feedback::Missing(0)) = pair.back.pop_front() else { panic!("{:?}", pair.back) };
    pair.encoder.feedback(Feedback::Missing(0), &mut wire).unwrap();
    // Another group's number; other contents; then the right one twice.
    let mut other = wire.clone();
    other[format::SEGMENT_HEAD] = 1;
    let refused = |answer: &[u8]| {
        let mut pair = Pair::new(encoder(Resends::Keep).with_disks(Seen::of(&here)), decoder(&there));
        pair.sends(|encoder, out| encoder.push(&raw(0, 64), out));
        pair.sends(Encoder::flush);
        pair.arrive(usize::MAX).unwrap();
        pair.decoder.push(answer, &mut pair.out).is_err()
    };
    assert!(refused(&other));
    assert!(!refused(&wire));
    pair.decoder.push(&wire, &mut pair.out).unwrap();
    assert!(matches!(pair.decoder.push(&wire, &mut pair.out), Err(WireError::Damaged { .. })));
    // Who asks again and again would be answered in full each time.
    let mut again = encoder(Resends::Keep).with_disks(Seen::of(&here));
    again.push(&raw(0, 64), &mut wire).unwrap();
    again.feedback(Feedback::Missing(0), &mut wire).unwrap();
    again.feedback(Feedback::Past(1), &mut wire).unwrap();
    assert!(matches!(again.feedback(Feedback::Missing(0), &mut wire), Err(StreamError::Feedback { group: 0 })));
    assert!(matches!(pair.encoder.feedback(Feedback::Missing(4), &mut wire), Err(StreamError::Feedback { group: 4 })));
}

#[test]
fn what_waited_for_one_answer_is_not_kept_until_there_is_no_other_to_wait_for() {
    // The destination lacks a block of each part, and hears of the next part before it has the last one's answer.
    const PART: u32 = 256;
    const PARTS: u32 = 12;
    let (here, there) = (Disk::noise(PART * PARTS), Disk::noise(PART * PARTS));
    (0..PARTS).for_each(|part| there.set((part * PART + 5) as usize, None));
    let mut pair = Pair::new(encoder(Resends::Keep).with_disks(Seen::of(&here)), decoder(&there));
    let mut stream = Stream::begin(RAM);
    let (mut sent, mut most) = (0, 0);
    for part in 0..PARTS {
        let contents: Vec<u8> = (part * PART..(part + 1) * PART).flat_map(noise).collect();
        stream.part_of((part * PART).into(), &contents);
        // What no disk has makes it a mebibyte.
        let fresh: Vec<u8> = (0..PART).flat_map(|n| noise(1_000_000 + part * PART + n)).collect();
        stream.part_of((PART * PARTS).into(), &fresh);
        pair.sends(|encoder, out| encoder.push(&stream.bytes[sent..], out));
        sent = stream.bytes.len();
        pair.sends(Encoder::flush);
        pair.arrive(usize::MAX).unwrap();
        if part > 0 {
            pair.return_one();
        }
        most = most.max(pair.decoder.waits_in());
    }
    assert_eq!(pair.encoder.progress().missing_pages, u64::from(16 * (PARTS - 1)), "each part was waited for");
    assert!((1 << 20..5 << 20).contains(&most), "{most} bytes for parts of a mebibyte");
}

#[test]
fn wrong_references_over_a_long_way_are_given_up_before_they_are_many() {
    let raw = raw(0, 4000);
    let missing = |round_trip: u64, elapsed: u64| {
        let encoder = encoder(Resends::Keep).with_disks(Seen::of(&Disk::noise(4000)));
        let mut pair = Pair::new(encoder, Decoder::new(LIMITS).unwrap());
        let (stall, elapsed) = (Duration::from_millis(round_trip), Duration::from_millis(elapsed));
        pair.answers_all_with(&raw, |encoder| encoder.stalls_take(stall, elapsed)).missing_pages.div_ceil(8)
    };
    // Half a second at first; then a quarter of the time.
    assert_eq!((missing(100, 0), missing(100, 2_000)), (6, 11));
    // Where a stall takes next to nothing it is the share that counts.
    assert!(missing(1, 0) > PATIENCE);
}
