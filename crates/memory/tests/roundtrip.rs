//! Encoder and decoder together, on streams made by hand.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use common::{Stream, load};
use godwit_memory::{
    Clock, Config, Decoder, Encoder, Limits, PageKey, Reach, Resends, StreamError, Summary, WireError, Witness, format,
};
use proptest::prelude::*;
use std::os::unix::fs::FileExt;
use std::time::Duration;

const WINDOW: u32 = 20;
const LIMITS: Limits = Limits { max_ram: 1 << 30, window_log: WINDOW, versions: 1 << 20 };
const BLOCKS: &[(&str, u64)] = &[("pc.ram", 64), ("/rom@etc/acpi/tables", 8), ("pc.bios", 3)];

fn config(resends: Resends) -> Config {
    Config { window_log: WINDOW, resends, key: PageKey([7; 32]), max_ram: 1 << 30, ..Config::default() }
}

fn encode(raw: &[u8], resends: Resends, cuts: &[usize]) -> (Vec<u8>, Summary) {
    let mut encoder = Encoder::new(config(resends)).unwrap();
    let mut wire = vec![];
    for (i, piece) in pieces(raw, cuts).enumerate() {
        encoder.push(piece, &mut wire).unwrap();
        if i % 3 == 1 {
            encoder.flush(&mut wire).unwrap();
        }
    }
    let summary = encoder.finish(&mut wire).unwrap();
    assert_eq!(summary.progress.wire_bytes, wire.len() as u64);
    assert_eq!(summary.progress.raw_bytes, raw.len() as u64);
    (wire, summary)
}

fn decode(wire: &[u8], cuts: &[usize]) -> Vec<u8> {
    let mut decoder = Decoder::new(LIMITS).unwrap();
    let mut out = vec![];
    for piece in pieces(wire, cuts) {
        decoder.push(piece, &mut out).unwrap();
    }
    let end = decoder.decoded();
    assert!(end.complete);
    assert_eq!((end.verified_bytes, end.rebuilt_bytes), (out.len() as u64, out.len() as u64));
    out
}

/// `bytes` in pieces of these lengths, over and over.
fn pieces<'a>(mut bytes: &'a [u8], cuts: &'a [usize]) -> impl Iterator<Item = &'a [u8]> {
    let mut cuts = cuts.iter().cycle();
    std::iter::from_fn(move || {
        let n = (*cuts.next()?).min(bytes.len());
        let (front, rest) = bytes.split_at(n);
        bytes = rest;
        (n > 0).then_some(front)
    })
}

const WHOLE: &[usize] = &[usize::MAX];

/// So many pages of a page table's entries: frames that lie anywhere in 16 GiB, and the same flags.
fn page_tables(pages: u64) -> Vec<u8> {
    let frame = |n: u64| n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 42;
    (0..pages * 512).flat_map(|n| (1 << 63 | frame(n) << 12 | 0x867).to_le_bytes()).collect()
}

#[test]
fn words_bytes_are_laid_apart_until_the_guest_is_to_stand_still_by_who_looks_far_back() {
    let mut stream = Stream::begin(BLOCKS);
    stream.part_of(0, &page_tables(20));
    let raw = stream.end(&[(0, 20, Some(1)), (1, 0, None)]);
    let encode = |level, reach, hurries| {
        let mut encoder = Encoder::new(Config { level, reach, ..config(Resends::Keep) }).unwrap();
        if hurries {
            encoder.hurry();
        }
        let mut wire = vec![];
        encoder.push(&raw, &mut wire).unwrap();
        let summary = encoder.finish(&mut wire).unwrap();
        assert_eq!(decode(&wire, &[1000, 7]), raw);
        (summary.progress.shuffled_pages, wire.len())
    };
    for level in [1, 6, 9] {
        let ((apart, fewer), (in_a_hurry, more)) = (encode(level, Reach::Far, false), encode(level, Reach::Far, true));
        assert_eq!((apart, in_a_hurry), (20, 0), "level {level}");
        assert!(fewer * 10 < more * 9, "level {level}: {fewer} bytes apart, {more} as they lie");
    }
    let others = [encode(1, Reach::Middle, false).0, encode(1, Reach::Near, false).0, encode(-5, Reach::Far, false).0];
    assert_eq!(others, [20, 0, 0]);
}

#[test]
fn where_the_encoder_is_waited_for_differences_begin_with_what_comes_again() {
    let mut stream = Stream::begin(BLOCKS);
    let mut content = page_tables(20);
    // The first one twice: what is not kept is known all the same.
    for round in [0, 0, 1, 2] {
        content.chunks_exact_mut(4096).for_each(|page| page[64] = round);
        stream.part_of(0, &content);
    }
    let raw = stream.end(&[]);
    let sent = |reach| {
        let mut encoder = Encoder::new(Config { reach, versions: LIMITS.versions, ..config(Resends::Elide) }).unwrap();
        let mut wire = vec![];
        encoder.push(&raw, &mut wire).unwrap();
        let progress = encoder.finish(&mut wire).unwrap().progress;
        assert_eq!(load(&decode(&wire, WHOLE)).0, load(&raw).0);
        [progress.data_pages, progress.delta_pages, progress.unchanged_pages]
    };
    assert_eq!([Reach::Far, Reach::Middle, Reach::Near].map(sent), [[20, 40, 20], [20, 40, 20], [40, 20, 20]]);
}

/// Pages of a stream: mostly few places and few contents, so that all sorts of re-sends happen.
fn pages() -> impl Strategy<Value = Vec<(usize, u64, Option<u8>)>> {
    let page = prop_oneof![
        (Just(0usize), 0..64u64, proptest::option::of(1..4u8)),
        (0..3usize, 0..3u64, proptest::option::of(1..3u8)),
    ];
    proptest::collection::vec(page, 0..60)
}

fn stream(parts: &[Vec<(usize, u64, Option<u8>)>], last: &[(usize, u64, Option<u8>)]) -> Vec<u8> {
    let mut stream = Stream::begin(BLOCKS);
    parts.iter().for_each(|p| stream.part(p));
    stream.end(last)
}

#[test]
fn a_thread_of_zstds_holds_nothing_back_at_a_flush_and_makes_the_same() {
    const PAGES: u64 = 4096;
    let mut stream = Stream::begin(&[("pc.ram", PAGES)]);
    stream.part_of(0, &page_tables(PAGES));
    let raw = stream.end(&[]);
    let made = [None, Some(no_clock as Clock)].map(|beside| {
        let mut encoder = Encoder::new(Config { beside, versions: LIMITS.versions, ..config(Resends::Keep) }).unwrap();
        assert_eq!(encoder.beside().is_some(), beside.is_some());
        let mut wire = vec![];
        let (first, rest) = raw.split_at(200 << 10);
        encoder.push(first, &mut wire).unwrap();
        assert_eq!(wire.is_empty(), beside.is_some(), "what is under way comes out with the next piece");
        for piece in rest.chunks(rest.len() / 3) {
            encoder.push(piece, &mut wire).unwrap();
            encoder.flush(&mut wire).unwrap();
            let (mut decoder, mut rebuilt) = (Decoder::new(LIMITS).unwrap(), vec![]);
            decoder.push(&wire, &mut rebuilt).unwrap();
            assert!(raw.starts_with(&rebuilt));
            assert!(rebuilt.len() + 2 * 4096 > encoder.progress().raw_bytes as usize, "all but a page that was cut");
        }
        encoder.finish(&mut wire).unwrap();
        assert_eq!(decode(&wire, WHOLE), raw);
        wire.len()
    });
    // Each push that brings something begins a segment.
    assert!(made[0].abs_diff(made[1]) < 64, "{made:?}");
}

fn no_clock() -> Duration {
    Duration::ZERO
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn with_resends_kept_the_stream_is_rebuilt_byte_for_byte_at_any_cuts(
        parts in proptest::collection::vec(pages(), 0..4),
        last in pages(),
        cuts in proptest::collection::vec(1..9000usize, 1..8),
        wire_cuts in proptest::collection::vec(1..300usize, 1..8),
    ) {
        let raw = stream(&parts, &last);
        let (wire, summary) = encode(&raw, Resends::Keep, &cuts);
        prop_assert_eq!(&decode(&wire, &wire_cuts), &raw);
        prop_assert_eq!(summary.progress.rebuilt_bytes, raw.len() as u64);
        prop_assert_eq!(summary.progress.unchanged_pages, 0);
    }

    #[test]
    fn levels_change_anywhere_and_every_byte_comes_out(
        parts in proptest::collection::vec(pages(), 1..4),
        words in 0..4u64,
        levels in proptest::collection::vec(proptest::option::of((-20..10i32, 0..3usize)), 1..6),
        beside in any::<bool>(),
        room in 0..40u64,
        cuts in proptest::collection::vec(1..9000usize, 1..8),
        wire_cuts in proptest::collection::vec(1..300usize, 1..8),
    ) {
        let mut raw = Stream::begin(BLOCKS);
        raw.part_of(0, &page_tables(words));
        parts.iter().for_each(|pages| raw.part(pages));
        raw.part_of(0, &page_tables(words + 1));
        let raw = raw.end(&[(0, 1, Some(7))]);
        let beside = beside.then_some(no_clock as Clock);
        let versions = room * 4096;
        let mut encoder = Encoder::new(Config { beside, versions, ..config(Resends::Keep) }).unwrap();
        let mut wire = vec![];
        for (piece, level) in pieces(&raw, &cuts).zip(levels.iter().cycle()) {
            encoder.push(piece, &mut wire).unwrap();
            if let Some((level, reach)) = level {
                let reach = [Reach::Far, Reach::Middle, Reach::Near][*reach];
                encoder.set_level(*level, reach, &mut wire).unwrap();
            } else {
                encoder.collect(&mut wire).unwrap();
            }
        }
        encoder.finish(&mut wire).unwrap();
        prop_assert_eq!(encoder.progress().wire_bytes, wire.len() as u64);
        prop_assert_eq!(&decode(&wire, &wire_cuts), &raw);
        let mut decoder = Decoder::new(LIMITS).unwrap();
        decoder.push(&wire, &mut vec![]).unwrap();
        prop_assert!(decoder.push(b"\x05\0\0\0more.", &mut vec![]).is_err(), "something behind the end");
    }

    #[test]
    fn with_resends_elided_the_destination_ends_with_the_same_ram_and_the_same_rest(
        parts in proptest::collection::vec(pages(), 0..4),
        last in pages(),
        cuts in proptest::collection::vec(1..9000usize, 1..8),
    ) {
        let raw = stream(&parts, &last);
        let (wire, summary) = encode(&raw, Resends::Elide, &cuts);
        let rebuilt = decode(&wire, WHOLE);
        let (expected, sent) = load(&raw);
        let (ram, loaded) = load(&rebuilt);
        prop_assert_eq!(ram, expected);
        prop_assert_eq!(sent as u64, summary.progress.pages());
        prop_assert_eq!((sent - loaded) as u64, summary.progress.unchanged_pages);
        let tail = raw.windows(6).rposition(|w| w == b"\x05timer").unwrap();
        prop_assert!(rebuilt.ends_with(&raw[tail..]));
    }

    #[test]
    fn with_a_witness_the_destination_has_the_guests_ram_whatever_qemu_overlooked(
        parts in proptest::collection::vec(pages(), 0..4),
        last in pages(),
        overlooked in proptest::collection::vec((0..64u64, 0..3u8), 0..8),
        cuts in proptest::collection::vec(1..9000usize, 1..8),
        keep: bool,
    ) {
        let raw = stream(&parts, &last);
        let (mut expected, _) = load(&raw);
        let memory = tempfile::tempfile().unwrap();
        memory.set_len(64 * 4096).unwrap();
        for (page, fill) in &overlooked {
            let page = expected.entry(("pc.ram".to_owned(), *page)).or_insert_with(|| vec![0; 4096]);
            page[100] = *fill;
        }
        for ((block, page), content) in &expected {
            if block == "pc.ram" {
                memory.write_all_at(content, page * 4096).unwrap();
            }
        }
        let resends = if keep { Resends::Keep } else { Resends::Elide };
        let mut encoder = Encoder::new(config(resends)).unwrap().with_witness(Witness::new("pc.ram", memory));
        let mut wire = vec![];
        for piece in pieces(&raw, &cuts) {
            encoder.push(piece, &mut wire).unwrap();
        }
        let summary = encoder.finish(&mut wire).unwrap();
        let (mut ram, _) = load(&decode(&wire, WHOLE));
        // What was never sent is zero.
        for place in expected.keys() {
            ram.entry(place.clone()).or_insert_with(|| vec![0; 4096]);
        }
        prop_assert!(ram == expected);
        prop_assert!(summary.progress.overlooked_pages <= overlooked.len() as u64);
    }

    #[test]
    fn no_bytes_make_the_encoder_panic(
        flips in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in 1..5000usize,
    ) {
        let mut raw = stream(&[vec![(0, 0, Some(1)), (1, 3, None), (0, 1, Some(2))]], &[(2, 1, Some(3))]);
        for (at, byte) in flips {
            // Where lengths and flags are, not in the content of pages.
            let at = at.index(raw.len());
            raw[at] = byte;
        }
        let mut encoder = Encoder::new(config(Resends::Elide)).unwrap();
        let mut wire = vec![];
        for piece in raw.chunks(cut) {
            if encoder.push(piece, &mut wire).is_err() {
                prop_assert!(matches!(encoder.push(b"", &mut wire), Err(StreamError::Spent)));
                return Ok(());
            }
        }
        let _ = encoder.finish(&mut wire);
    }

    #[test]
    fn damage_on_the_wire_is_never_taken_for_the_stream(at: prop::sample::Index, bit in 0..8u32, cut in 1..5000usize) {
        let raw = stream(&[vec![(0, 0, Some(1)), (1, 3, None), (0, 1, Some(2))]], &[(2, 1, Some(3))]);
        let (mut wire, _) = encode(&raw, Resends::Elide, WHOLE);
        let good = decode(&wire, WHOLE);
        let at = at.index(wire.len());
        wire[at] ^= 1 << bit;
        let mut decoder = Decoder::new(LIMITS).unwrap();
        let mut out = vec![];
        let failed = wire.chunks(cut).any(|piece| decoder.push(piece, &mut out).is_err());
        prop_assert!(failed || !decoder.decoded().complete || out == good, "damage at {at} went through");
    }

    /// Operations at random, well compressed: they get past zstd to what must judge them.
    #[test]
    fn no_operations_make_the_decoder_panic_or_write_without_bound(
        ops in proptest::collection::vec(prop_oneof![
            Just(vec![0x21, 2, 1, b'a', 0x80, 0x20, 1, b'b', 9]),
            Just(vec![0x25, 0x80, 0x80, 4, 0x21, 2, 1, b'a', 0x80, 0x20, 1, b'b', 9]),
            (0..9u8).prop_map(|page| [vec![20, 0, page * 2, 1, 3, 1], vec![5; 8]].concat()),
            Just([vec![0x24], vec![7; 32]].concat()),
            Just([vec![13, 0, 2, 1, 8, 16], vec![7; 8]].concat()),
            (0..32u8, 0..3u8, any::<u8>(), any::<u8>()).prop_map(|(op, block, a, b)| vec![op, block, a, b, 0x7f]),
            Just([vec![4, 0, 0], vec![9; 4096]].concat()),
            Just(vec![5, 0, 0, 0x80, 0x20]),
            Just([vec![0x20, 3], vec![1; 3]].concat()),
            proptest::collection::vec(any::<u8>(), 1..40),
        ], 1..60),
    ) {
        let packed = zstd::encode_all(&*ops.concat(), 1).unwrap();
        let mut wire = format::MAGIC.to_vec();
        wire.extend(format::segment(format::Segment::Packed, packed.len()));
        wire.extend(packed);
        let mut decoder = Decoder::new(LIMITS).unwrap();
        let mut out = vec![];
        let mut rest = &wire[..];
        let mut going = Ok(true);
        while matches!(going, Ok(true)) {
            out.clear();
            going = decoder.push_some(&mut rest, &mut out);
            prop_assert!(out.len() <= godwit_memory::ENOUGH + (64 << 10));
        }
        prop_assert!(!decoder.decoded().complete);
    }
}

/// What is left of these pages, in order, when each was sent in a section of its own.
fn left_of(pages: &[(usize, u64, Option<u8>)]) -> usize {
    let parts: Vec<_> = pages.iter().map(|p| vec![*p]).collect();
    let raw = stream(&parts, &[]);
    let rebuilt = decode(&encode(&raw, Resends::Elide, WHOLE).0, WHOLE);
    assert_eq!(load(&rebuilt).0, load(&raw).0);
    load(&rebuilt).1
}

#[test]
fn only_what_was_last_sent_counts_not_what_was_ever_sent() {
    assert_eq!(left_of(&[(0, 5, Some(1)), (0, 5, Some(1))]), 1, "the same again");
    assert_eq!(left_of(&[(0, 5, None), (0, 5, None)]), 1, "zero again");
    assert_eq!(left_of(&[(0, 5, Some(1)), (0, 5, None), (0, 5, Some(1))]), 3, "zero in between");
    assert_eq!(left_of(&[(0, 5, Some(1)), (0, 5, Some(2)), (0, 5, Some(1))]), 3, "something else in between");
    assert_eq!(left_of(&[(0, 5, None), (1, 5, None), (0, 6, None)]), 3, "zeroes of other pages");
    assert_eq!(left_of(&[(0, 5, Some(0)), (0, 5, None)]), 2, "zeroes that came as content are not known as zeroes");
}

#[test]
fn a_name_that_was_left_out_with_its_page_is_given_to_the_next_one() {
    // The middle record names block 1 and is left out; the one after it continues block 1.
    let mut s = Stream::begin(BLOCKS);
    s.part(&[(1, 0, Some(1)), (0, 0, Some(1))]);
    s.part(&[(1, 0, Some(1)), (1, 1, Some(2)), (0, 1, Some(3))]);
    let raw = s.end(&[]);
    let rebuilt = decode(&encode(&raw, Resends::Elide, WHOLE).0, WHOLE);
    assert_eq!(load(&rebuilt), {
        let (ram, n) = load(&raw);
        (ram, n - 1)
    });
}

#[test]
fn a_flush_makes_everything_so_far_readable_and_behind_ram_verifiable() {
    let raw = stream(&[vec![(0, 0, Some(1)), (0, 1, None), (0, 2, None)]], &[(0, 1, Some(4))]);
    let mut encoder = Encoder::new(config(Resends::Keep)).unwrap();
    let mut decoder = Decoder::new(LIMITS).unwrap();
    let (mut wire, mut out) = (vec![], vec![]);
    let middle = raw.windows(5).position(|w| w == b"\x03\0\0\0\x02").unwrap();
    encoder.push(&raw[..middle], &mut wire).unwrap();
    encoder.flush(&mut wire).unwrap();
    assert!(!encoder.progress().ram_ended);
    decoder.push(&wire, &mut out).unwrap();
    assert_eq!(out, raw[..middle]);
    let n = wire.len();
    encoder.flush(&mut wire).unwrap();
    assert_eq!(wire.len(), n, "nothing new costs nothing");

    encoder.push(&raw[middle..], &mut wire).unwrap();
    encoder.flush(&mut wire).unwrap();
    assert!(encoder.progress().ram_ended);
    let decoded = decoder.push(&wire[n..], &mut out).unwrap();
    assert_eq!(out, raw);
    assert_eq!(decoded.verified_bytes, raw.len() as u64, "before the stream ends: QEMU keeps it open until SHUT");
    assert!(!decoded.complete);
}

#[test]
fn a_window_beyond_the_limit_is_refused() {
    let config = Config { window_log: 22, ..config(Resends::Keep) };
    let mut encoder = Encoder::new(config).unwrap();
    let mut wire = vec![];
    encoder.push(&Stream::begin(BLOCKS).bytes, &mut wire).unwrap();
    encoder.flush(&mut wire).unwrap();
    let mut decoder = Decoder::new(LIMITS).unwrap();
    assert!(matches!(decoder.push(&wire, &mut vec![]), Err(WireError::Zstd { .. })));
}

#[test]
fn ram_beyond_the_limit_is_refused_at_both_ends() {
    let big = Stream::begin(&[("pc.ram", 1 << 18), ("more", 1)]).bytes;
    let mut encoder = Encoder::new(config(Resends::Elide)).unwrap();
    assert!(matches!(encoder.push(&big, &mut vec![]), Err(StreamError::TooLarge { .. })));
    let mut encoder = Encoder::new(Config { max_ram: 2 << 30, ..config(Resends::Elide) }).unwrap();
    let mut wire = vec![];
    encoder.push(&big, &mut wire).unwrap();
    encoder.flush(&mut wire).unwrap();
    let small = Limits { max_ram: 1 << 29, ..LIMITS };
    assert!(matches!(Decoder::new(small).unwrap().push(&wire, &mut vec![]), Err(WireError::TooLarge { .. })));
}

/// What the encoder says to `tail` behind a good beginning.
fn refusal(tail: &[u8]) -> String {
    let mut bytes = Stream::begin(BLOCKS).bytes;
    bytes.extend_from_slice(tail);
    let mut encoder = Encoder::new(config(Resends::Elide)).unwrap();
    encoder.push(&bytes, &mut vec![]).unwrap_err().to_string()
}

#[test]
fn what_cannot_be_carried_is_refused_by_name() {
    let record = |flags: u64| [b"\x02\0\0\0\x02".as_slice(), &flags.to_be_bytes()].concat();
    for (tail, word) in [
        (b"\x01\0\0\0\x09\x04vfio\0\0\0\0\0\0\0\x01".to_vec(), "vfio"),
        (b"\x04\0\0\0\x09\x0avirtio-mem\0\0\0\0\0\0\0\x01".to_vec(), "virtio-mem"),
        (b"\x08\0\x04\0\0".to_vec(), "postcopy-ram"),
        (b"\x08\0\x09\0\0".to_vec(), "postcopy-ram"),
        (record(0x40), "xbzrle"),
        (record(0x100), "compress"),
        (record(0x200), "multifd"),
        (record(0x80), "rdma"),
        (record(0x28), "never named"),
    ] {
        let said = refusal(&tail);
        assert!(said.contains(word), "{word}: {said}");
    }
}

#[test]
fn a_stream_that_ends_before_the_devices_state_is_an_error() {
    let mut encoder = Encoder::new(config(Resends::Elide)).unwrap();
    encoder.push(&Stream::begin(BLOCKS).bytes, &mut vec![]).unwrap();
    assert!(matches!(encoder.finish(&mut vec![]), Err(StreamError::Truncated { .. })));
}

#[test]
fn a_decoder_that_is_given_nothing_many_times_goes_on() {
    let raw = stream(&[vec![(0, 0, Some(1)), (0, 1, None)]], &[(0, 2, Some(2))]);
    let (wire, _) = encode(&raw, Resends::Keep, WHOLE);
    let mut decoder = Decoder::new(LIMITS).unwrap();
    let mut out = vec![];
    for piece in [&wire[..wire.len() / 2], &wire[wire.len() / 2..]] {
        decoder.push(piece, &mut out).unwrap();
        for _ in 0..100 {
            decoder.push(&[], &mut out).unwrap();
        }
    }
    assert!(decoder.decoded().complete && out == raw);
}

#[test]
fn where_memory_follows_its_guest_every_page_that_was_thrown_away_comes_again_and_what_qemu_overlooked_goes_before() {
    let memory = tempfile::tempfile().unwrap();
    memory.set_len(64 * 4096).unwrap();
    let is = |page: u64, fill: u8| memory.write_all_at(&[fill; 4096], page * 4096).unwrap();
    let mut stream = Stream::begin(BLOCKS);
    stream.part(&[(0, 3, Some(1)), (0, 4, Some(1)), (0, 5, Some(1)), (0, 9, Some(1))]);
    (3..6).for_each(|page| is(page, 1));
    // 4 and 5 follow; 5 has not changed. 7 was overlooked, as was 9.
    is(4, 2);
    is(7, 3);
    is(9, 4);
    stream.discard(&[(4, 1), (5, 1)]);
    stream.discard(&[(20, 2)]);
    let (raw, package) = stream.hand_over(b"what devices say", &[(0, 4, Some(2)), (0, 5, Some(1))]);
    for cut in [&[1usize][..], &[7, 4000], WHOLE] {
        let ram = std::fs::File::open(format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&memory))).unwrap();
        let mut encoder = Encoder::new(config(Resends::Elide)).unwrap().with_witness(Witness::new("pc.ram", ram));
        let (mut wire, mut handed) = (vec![], None);
        let mut pushed = 0;
        for piece in pieces(&raw, cut) {
            encoder.push(piece, &mut wire).unwrap();
            encoder.flush(&mut wire).unwrap();
            pushed += piece.len();
            let progress = encoder.progress();
            assert_eq!(progress.follows, progress.ram_ended);
            if progress.handed {
                handed.get_or_insert(pushed);
            }
        }
        let summary = encoder.finish(&mut wire).unwrap().progress;
        assert_eq!((summary.following_pages, summary.overlooked_pages), (4, 2));
        let state = package + 9 + b"what devices say".len() + 9;
        assert!(handed.is_some_and(|handed| handed >= state), "{handed:?} and {state}");
        if cut == [1] {
            assert_eq!(handed, Some(state));
        }
        let rebuilt = decode(&wire, cut);
        let ahead = rebuilt.len() - raw.len();
        assert_eq!(rebuilt[..package], raw[..package]);
        assert_eq!(rebuilt[package + ahead..], raw[package..], "from the devices' state on byte for byte");
        let mut section = vec![2, 0, 0, 0, 2];
        for (page, fill) in [(7u64, 3u8), (9, 4)] {
            section.extend_from_slice(&(page << 12 | 0x28).to_be_bytes());
            section.extend_from_slice(&[fill; 4096]);
        }
        section.extend_from_slice(b"\0\0\0\0\0\0\0\x10\x7e\0\0\0\x02");
        assert_eq!(rebuilt[package..package + ahead], section);
    }
}

#[test]
fn pages_that_do_not_exist_are_not_thrown_away() {
    for runs in [&[(60u64, 5u64)][..], &[(u64::MAX >> 12, 1)], &[(0, 1), (64, 1)]] {
        let mut stream = Stream::begin(BLOCKS);
        stream.discard(runs);
        let error = Encoder::new(config(Resends::Elide)).unwrap().push(&stream.bytes, &mut vec![]).unwrap_err();
        assert!(matches!(error, StreamError::Discard { .. }), "{error}");
    }
}
