//! Pages that change and come again: as differences, whatever is kept of them, and against the incoming guest's RAM.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use common::{PAGE, Stream, load};
use godwit_memory::{Config, Decoder, Encoder, Limits, MOST_UNREAD, Progress, Resends, WireError, Witness};
use proptest::prelude::*;
use std::fs::File;
use std::os::unix::fs::FileExt;

const LIMITS: Limits = Limits { max_ram: 1 << 30, window_log: 20, versions: 64 << 20 };
const BLOCKS: &[(&str, u64)] = &[("pc.ram", 32), ("vga.vram", 8)];

fn encode(raw: &[u8], resends: Resends, versions: u64) -> (Vec<u8>, Progress) {
    let config = Config { window_log: 20, resends, max_ram: 1 << 30, versions, ..Config::default() };
    let mut encoder = Encoder::new(config).unwrap();
    let mut wire = vec![];
    for (n, piece) in raw.chunks(70_001).enumerate() {
        encoder.push(piece, &mut wire).unwrap();
        if n % 3 == 0 {
            encoder.flush(&mut wire).unwrap();
        }
    }
    let progress = encoder.finish(&mut wire).unwrap().progress;
    (wire, progress)
}

fn decode(wire: &[u8], limits: Limits) -> Result<Vec<u8>, WireError> {
    let mut decoder = Decoder::new(limits)?;
    let mut out = vec![];
    for piece in wire.chunks(997) {
        decoder.push(piece, &mut out)?;
    }
    assert!(decoder.decoded().complete);
    Ok(out)
}

/// Contents that no compressor finds anything in, of so many pages.
fn noise(pages: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    (0..pages * PAGE / 8).flat_map(|_| next().to_le_bytes()).collect()
}

/// Pages in a row, a few of whose bytes change from part to part.
fn parts() -> impl Strategy<Value = Vec<(u64, Vec<u8>)>> {
    let change = (0..8usize, 0..PAGE, any::<u8>());
    let part = (0..20u64, proptest::collection::vec(change, 0..20));
    proptest::collection::vec(part, 1..8).prop_map(|parts| {
        let mut contents = noise(8, 7);
        let mut made = vec![];
        for (first, changes) in parts {
            changes.into_iter().for_each(|(page, at, byte)| contents[page * PAGE + at] = byte);
            made.push((first, contents.clone()));
        }
        made
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn whatever_is_kept_of_what_was_sent_the_same_bytes_come_out(
        parts in parts(),
        zeroes in proptest::collection::vec((0..2usize, 0..8u64, proptest::option::of(1..3u8)), 0..12),
        room in 0..40u64,
        keep: bool,
    ) {
        let mut stream = Stream::begin(BLOCKS);
        for (first, contents) in &parts {
            stream.part_of(*first, contents);
            stream.part(&zeroes);
        }
        let raw = stream.end(&zeroes);
        let (wire, progress) = encode(&raw, if keep { Resends::Keep } else { Resends::Elide }, room * PAGE as u64);
        let made = decode(&wire, LIMITS).unwrap();
        if keep {
            prop_assert!(made == raw);
        } else {
            let (expected, sent) = load(&raw);
            prop_assert_eq!(load(&made).0, expected);
            prop_assert_eq!(progress.pages(), sent as u64);
        }
        if room == 0 {
            prop_assert_eq!(progress.delta_pages, 0);
        }
    }

}

proptest! {
    // Tens of megabytes each.
    #![proptest_config(ProptestConfig::with_cases(4))]

    /// The incoming QEMU reads what it is given as late as it may.
    #[test]
    fn against_the_incoming_guests_ram_the_same_bytes_come_out_however_late_it_reads(
        lag in prop_oneof![Just(0), Just(MOST_UNREAD), 0..MOST_UNREAD],
        rounds in proptest::collection::vec((0..2000usize, 1..2600usize, any::<u64>()), 2..5),
    ) {
        let (raw, pages) = rounds_of(&rounds);
        let (wire, progress) = encode(&raw, Resends::Keep, LIMITS.versions);
        prop_assert!(progress.delta_pages > 0);
        let mut qemu = Loader::new(pages);
        let decoder = Decoder::new(Limits { versions: 0, ..LIMITS }).unwrap();
        let mut decoder = decoder.with_ram(Witness::new("pc.ram", qemu.ram.try_clone().unwrap()));
        let mut made = vec![];
        for piece in wire.chunks(60_000) {
            let (mut rest, mut more) = (piece, true);
            while more || !rest.is_empty() {
                more = decoder.push_some(&mut rest, &mut made).unwrap();
                qemu.load(&made[..made.len().saturating_sub(lag)]);
                // `push_some` appends: what is given stays, to be compared.
            }
        }
        prop_assert!(decoder.decoded().complete);
        prop_assert!(made == raw);
    }
}

/// A first pass over all of RAM, and rounds in which some pages change a little: more than is kept beside RAM.
fn rounds_of(rounds: &[(usize, usize, u64)]) -> (Vec<u8>, u64) {
    const PAGES: usize = 4600;
    let mut contents = noise(PAGES, 3);
    let mut stream = Stream::begin(&[("pc.ram", PAGES as u64), ("pc.bios", 1)]);
    stream.part_of(0, &contents);
    for (first, count, word) in rounds {
        let pages = &mut contents[first * PAGE..(first + count) * PAGE];
        pages.chunks_exact_mut(PAGE).for_each(|page| page[800..808].copy_from_slice(&word.to_le_bytes()));
        stream.part_of(*first as u64, pages);
    }
    (stream.end(&[]), PAGES as u64)
}

/// A QEMU that loads pages of its first block, as far as it was given them.
struct Loader {
    ram: File,
    at: Option<usize>,
}

impl Loader {
    fn new(pages: u64) -> Self {
        let ram = tempfile::tempfile().unwrap();
        ram.set_len(pages * PAGE as u64).unwrap();
        Self { ram, at: None }
    }

    fn load(&mut self, given: &[u8]) {
        // Behind RAM's START comes the first part; sections' ends and heads have 13 and 5 + 5 bytes.
        let begin = || given.windows(5).position(|w| w == b"\x02\0\0\0\x02").map(|at| at + 5);
        let Some(mut at) = self.at.or_else(begin) else { return };
        loop {
            self.at = Some(at);
            let Some(word) = given.get(at..at + 8).map(|w| u64::from_be_bytes(w.try_into().unwrap())) else { return };
            let (page, flags) = (word >> 12, word & 0xfff);
            let head = match flags {
                8 => 9 + usize::from(*given.get(at + 8).unwrap_or(&0)),
                0x28 => 8,
                0x10 if given.get(at + 13).is_none_or(|kind| !matches!(kind, 2 | 3)) => return,
                0x10 => {
                    at += 18;
                    continue;
                }
                other => panic!("a record with flags {other:#x}"),
            };
            let Some(content) = given.get(at + head..at + head + PAGE) else { return };
            self.ram.write_all_at(content, page * PAGE as u64).unwrap();
            at += head + PAGE;
        }
    }
}

#[test]
fn an_unchanged_page_that_is_sent_again_costs_a_few_bytes() {
    let contents = noise(30, 5);
    let stream = |times: usize| {
        let mut stream = Stream::begin(BLOCKS);
        (0..times).for_each(|_| stream.part_of(0, &contents));
        stream.end(&[])
    };
    let (once, _) = encode(&stream(1), Resends::Keep, LIMITS.versions);
    let (again, progress) = encode(&stream(11), Resends::Keep, LIMITS.versions);
    assert_eq!((progress.data_pages, progress.delta_pages, progress.delta_bytes), (30, 300, 300));
    assert!(again.len() - once.len() < 300, "{} bytes for 300 pages", again.len() - once.len());
    assert_eq!(decode(&again, LIMITS).unwrap(), stream(11));
}

#[test]
fn a_word_that_changed_costs_its_eight_bytes_and_some_more() {
    let mut contents = noise(30, 5);
    let mut stream = Stream::begin(BLOCKS);
    stream.part_of(0, &contents);
    contents.chunks_exact_mut(PAGE).for_each(|page| page[1000..1008].fill(3));
    stream.part_of(0, &contents);
    let raw = stream.end(&[]);
    let (wire, progress) = encode(&raw, Resends::Elide, LIMITS.versions);
    // How many runs; how many words before it, its length; the word.
    assert_eq!((progress.delta_pages, progress.delta_bytes), (30, 30 * (1 + 1 + 1 + 8)));
    assert_eq!(load(&decode(&wire, LIMITS).unwrap()), load(&raw));
}

#[test]
fn more_than_may_be_kept_here_is_refused_unless_ram_can_be_read() {
    let mut stream = Stream::begin(BLOCKS);
    stream.part_of(0, &noise(2, 5));
    let raw = stream.end(&[]);
    let (wire, _) = encode(&raw, Resends::Keep, 1 << 30);
    let enough = Limits { versions: 32 * PAGE as u64, ..LIMITS };
    assert_eq!(decode(&wire, enough).unwrap(), raw, "no more than the guest has");
    let short = Limits { versions: 31 * PAGE as u64, ..LIMITS };
    assert!(matches!(decode(&wire, short), Err(WireError::Versions { .. })));
}

/// What the pages beside RAM are for, and what holds if they are too few.
#[test]
fn a_qemu_that_reads_later_than_its_socket_can_make_it_is_found_out_by_the_digest() {
    let (raw, pages) = rounds_of(&[(0, 2500, 1), (0, 2500, 2), (0, 2500, 3)]);
    let (wire, _) = encode(&raw, Resends::Keep, LIMITS.versions);
    let outcome = |lag: usize| {
        let mut qemu = Loader::new(pages);
        let mut decoder = Decoder::new(LIMITS)?.with_ram(Witness::new("pc.ram", qemu.ram.try_clone().unwrap()));
        let mut made = vec![];
        for piece in wire.chunks(60_000) {
            let (mut rest, mut more) = (piece, true);
            while more || !rest.is_empty() {
                more = decoder.push_some(&mut rest, &mut made)?;
                qemu.load(&made[..made.len().saturating_sub(lag)]);
            }
        }
        Ok(made == raw)
    };
    assert!(matches!(outcome(MOST_UNREAD), Ok(true)));
    assert!(matches!(outcome(12 * MOST_UNREAD), Err(WireError::Digest { .. })));
}
