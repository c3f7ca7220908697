//! A move that is cut short and tried again, with a destination that keeps pages in between.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use common::{Stream, load};
use godwit_memory::{
    Checkpoint, CheckpointKey, Config, Decoder, Encoder, Holding, Limits, Progress, Resends, WireError,
};
use proptest::prelude::*;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};

const LIMITS: Limits = Limits { max_ram: 1 << 30, window_log: 20, versions: 1 << 20 };
const BLOCKS: &[(&str, u64)] = &[("pc.ram", 64), ("/rom@etc/acpi/tables", 8)];
const KEY: CheckpointKey = CheckpointKey([3; 32]);

type Page = (usize, u64, Option<u8>);

fn stream(blocks: &[(&'static str, u64)], pages: &[Page]) -> Vec<u8> {
    let mut stream = Stream::begin(blocks);
    stream.part(pages);
    stream.end(&[])
}

/// What a destination does at the beginning of a try, over the wire.
fn holding(path: &Path) -> Holding {
    let held = Checkpoint::open(path, &KEY).unwrap().holding(&|| true).unwrap().unwrap();
    let encoded = held.encode();
    assert!(encoded.len() as u64 <= Holding::longest(72 << 12));
    assert_eq!(Holding::decode(&encoded, 1 << 20).unwrap(), held);
    held
}

/// One try, of which `wire` bytes arrive in pieces of 777; `None`: all. What was rebuilt, and the encoder's counters.
fn attempt(raw: &[u8], path: &Path, resends: Resends, arrive: Option<usize>) -> (Vec<u8>, Progress) {
    let config = Config { window_log: 20, resends, max_ram: 1 << 30, ..Config::default() };
    let mut encoder = Encoder::new(config).unwrap().with_holding(holding(path), &KEY);
    let mut wire = vec![];
    for piece in raw.chunks(5000) {
        encoder.push(piece, &mut wire).unwrap();
        encoder.flush(&mut wire).unwrap();
    }
    let summary = encoder.finish(&mut wire).unwrap();
    let checkpoint = Checkpoint::open(path, &KEY).unwrap();
    let mut decoder = Decoder::new(LIMITS).unwrap().with_checkpoint(checkpoint);
    let mut out = vec![];
    for piece in wire[..arrive.unwrap_or(wire.len()).min(wire.len())].chunks(777) {
        decoder.push(piece, &mut out).unwrap();
    }
    assert!(arrive.is_some() || decoder.decoded().complete);
    assert!(decoder.checkpoint().unwrap().trouble().is_none());
    (out, summary.progress)
}

fn place() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("checkpoint");
    (dir, path)
}

/// Pages 0 to 39 with content of their own.
fn filled() -> Vec<Page> {
    (0..40).map(|page| (0, page, Some(page as u8 + 1))).collect()
}

fn pages() -> impl Strategy<Value = Vec<Page>> {
    proptest::collection::vec(
        prop_oneof![
            (Just(0usize), 0..64u64, proptest::option::of(1..4u8)),
            (0..2usize, 0..8u64, proptest::option::of(1..4u8))
        ],
        0..60,
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn whatever_came_of_earlier_tries_the_last_one_brings_the_guests_ram(
        tries in proptest::collection::vec((pages(), 0..20_000usize), 0..4),
        last in pages(),
        keep: bool,
    ) {
        let (_dir, path) = place();
        let resends = if keep { Resends::Keep } else { Resends::Elide };
        for (pages, arrive) in &tries {
            attempt(&stream(BLOCKS, pages), &path, resends, Some(*arrive));
        }
        let raw = stream(BLOCKS, &last);
        let (rebuilt, progress) = attempt(&raw, &path, resends, None);
        prop_assert_eq!(load(&rebuilt).0, load(&raw).0);
        prop_assert_eq!(progress.pages(), last.len() as u64);
        prop_assert!(!keep || rebuilt == raw);
    }

    #[test]
    fn what_a_destination_says_it_holds_is_never_believed_beyond_the_guests_ram(
        flips in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
        cut: prop::sample::Index,
    ) {
        let (_dir, path) = place();
        attempt(&stream(BLOCKS, &filled()), &path, Resends::Elide, None);
        let mut bytes = holding(&path).encode();
        for (at, byte) in flips {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        bytes.truncate(cut.index(bytes.len() + 1));
        if let Ok(holding) = Holding::decode(&bytes, 72 << 12) {
            prop_assert!(holding.pages() <= 74);
        }
    }
}

#[test]
fn a_second_try_names_what_the_first_one_brought_and_sends_what_was_written_since() {
    let (_dir, path) = place();
    let (_, first) = attempt(&stream(BLOCKS, &filled()), &path, Resends::Elide, None);
    assert_eq!((first.data_pages, first.held_pages), (40, 0));
    let mut now = filled();
    now[7].2 = Some(99);
    now[8].2 = None;
    let (rebuilt, second) = attempt(&stream(BLOCKS, &now), &path, Resends::Elide, None);
    assert_eq!((second.data_pages, second.held_pages, second.zero_pages), (1, 38, 1));
    assert!(second.wire_bytes < 1000, "{} bytes", second.wire_bytes);
    assert_eq!(load(&rebuilt).0, load(&stream(BLOCKS, &now)).0);
    let (_, third) = attempt(&stream(BLOCKS, &now), &path, Resends::Elide, None);
    assert_eq!((third.data_pages, third.held_pages), (0, 39), "what the second one brought is kept as well");
}

#[test]
fn a_page_that_was_sent_in_full_is_not_taken_for_held_in_the_same_stream() {
    let (_dir, path) = place();
    attempt(&stream(BLOCKS, &filled()), &path, Resends::Elide, None);
    let mut raw = Stream::begin(BLOCKS);
    raw.part(&[(0, 5, Some(77))]);
    raw.part(&[(0, 5, Some(6))]);
    let raw = raw.end(&[]);
    let (rebuilt, progress) = attempt(&raw, &path, Resends::Elide, None);
    assert_eq!((progress.data_pages, progress.held_pages), (2, 0));
    assert_eq!(load(&rebuilt).0, load(&raw).0);
}

#[test]
fn what_is_kept_can_only_be_read_with_its_key_and_another_key_drops_it() {
    let (_dir, path) = place();
    attempt(&stream(BLOCKS, &filled()), &path, Resends::Elide, None);
    let bytes = std::fs::read(&path).unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    for fill in 1..=40u8 {
        assert!(!bytes.windows(32).any(|w| w == [fill; 32]), "content lies on the disk");
    }
    assert!(!bytes.windows(6).any(|w| w == b"pc.ram"));
    assert_eq!(holding(&path).pages(), 40);
    let other = Checkpoint::open(&path, &CheckpointKey([4; 32])).unwrap().holding(&|| true).unwrap().unwrap();
    assert_eq!(other.pages(), 0);
    assert_eq!(holding(&path).pages(), 0);
}

#[test]
fn other_ram_blocks_drop_what_is_kept() {
    let (_dir, path) = place();
    attempt(&stream(BLOCKS, &filled()), &path, Resends::Elide, None);
    let raw = stream(&[("pc.ram", 128)], &filled());
    let (rebuilt, progress) = attempt(&raw, &path, Resends::Elide, None);
    assert_eq!((progress.data_pages, progress.held_pages), (40, 0));
    assert_eq!(load(&rebuilt).0, load(&raw).0);
    assert_eq!(holding(&path).pages(), 40, "of the new ones");
}

#[test]
fn a_page_that_has_rotted_or_lies_elsewhere_is_not_held() {
    let (_dir, path) = place();
    attempt(&stream(BLOCKS, &filled()), &path, Resends::Elide, None);
    let file = std::fs::File::options().read(true).write(true).open(&path).unwrap();
    let slot = |page: u64| (80 << 10) + page * (4096 + 28);
    let mut byte = [0];
    file.read_exact_at(&mut byte, slot(3) + 2000).unwrap();
    file.write_all_at(&[byte[0] ^ 1], slot(3) + 2000).unwrap();
    let mut moved = vec![0; 4096 + 28];
    file.read_exact_at(&mut moved, slot(10)).unwrap();
    file.write_all_at(&moved, slot(11)).unwrap();
    assert_eq!(holding(&path).pages(), 38);
    let (_, progress) = attempt(&stream(BLOCKS, &filled()), &path, Resends::Elide, None);
    assert_eq!((progress.data_pages, progress.held_pages), (2, 38));
}

#[test]
fn a_page_that_rots_after_it_was_offered_ends_the_stream_by_its_name() {
    let (_dir, path) = place();
    let raw = stream(BLOCKS, &filled());
    attempt(&raw, &path, Resends::Elide, None);
    let config = Config { window_log: 20, max_ram: 1 << 30, ..Config::default() };
    let mut encoder = Encoder::new(config).unwrap().with_holding(holding(&path), &KEY);
    let mut wire = vec![];
    encoder.push(&raw, &mut wire).unwrap();
    encoder.finish(&mut wire).unwrap();
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    file.set_len((80 << 10) + 20 * (4096 + 28) + 5).unwrap();
    let checkpoint = Checkpoint::open(&path, &KEY).unwrap();
    let error = Decoder::new(LIMITS).unwrap().with_checkpoint(checkpoint).push(&wire, &mut vec![]).unwrap_err();
    assert!(matches!(&error, WireError::Checkpoint { block, page: 20, .. } if block == "pc.ram"), "{error}");
    // And without any, as a destination that has dropped it meanwhile.
    let error = Decoder::new(LIMITS).unwrap().push(&wire, &mut vec![]).unwrap_err();
    assert!(matches!(error, WireError::Checkpoint { page: 0, .. }), "{error}");
}

#[test]
fn a_stream_needs_no_page_of_its_own_in_the_file_and_the_next_try_does_without_what_is_not() {
    let (_dir, path) = place();
    attempt(&stream(BLOCKS, &filled()), &path, Resends::Elide, None);
    let mut now = filled();
    now[7].2 = Some(99);
    now.push((0, 50, Some(98)));
    // Once more, as it was before: in full.
    let mut raw = Stream::begin(BLOCKS);
    raw.part(&now);
    raw.part(&[(0, 7, Some(8))]);
    let raw = raw.end(&[]);
    let config = Config { window_log: 20, max_ram: 1 << 30, ..Config::default() };
    let mut encoder = Encoder::new(config).unwrap().with_holding(holding(&path), &KEY);
    let mut wire = vec![];
    encoder.push(&raw, &mut wire).unwrap();
    encoder.finish(&mut wire).unwrap();
    let mut decoder = Decoder::new(LIMITS).unwrap().with_checkpoint(Checkpoint::open(&path, &KEY).unwrap());
    // Whoever writes gets to nothing before the end.
    let writer = decoder.keep_beside().unwrap();
    assert!(decoder.keep_beside().is_none());
    let mut out = vec![];
    assert!(decoder.push(&wire, &mut out).unwrap().complete);
    assert!(decoder.checkpoint().unwrap().trouble().is_none());
    drop(decoder);
    writer.run();
    assert_eq!(load(&out).0, load(&raw).0);
    let raw = stream(BLOCKS, &now);
    let (rebuilt, progress) = attempt(&raw, &path, Resends::Elide, None);
    assert_eq!((progress.data_pages, progress.held_pages), (2, 39));
    assert_eq!(load(&rebuilt).0, load(&raw).0);
}

#[test]
fn what_comes_once_the_guest_stands_is_not_kept() {
    let (_dir, path) = place();
    let mut raw = Stream::begin(BLOCKS);
    raw.part(&filled());
    attempt(&raw.end(&[(0, 50, Some(9)), (0, 3, Some(9))]), &path, Resends::Elide, None);
    assert_eq!(holding(&path).pages(), 40);
    let (_, progress) = attempt(&stream(BLOCKS, &filled()), &path, Resends::Elide, None);
    assert_eq!((progress.data_pages, progress.held_pages), (0, 40), "page 3 lies there as it was before");
}

#[test]
fn what_comes_before_the_devices_state_of_a_guest_that_its_memory_follows_is_not_kept() {
    let (_dir, path) = place();
    let mut raw = Stream::begin(BLOCKS);
    raw.part(&filled());
    raw.discard(&[(5, 2)]);
    raw.part(&[(0, 50, Some(9))]);
    let (raw, _) = raw.hand_over(b"devices", &[(0, 5, Some(6)), (0, 6, Some(7))]);
    attempt(&raw, &path, Resends::Elide, None);
    assert_eq!(holding(&path).pages(), 40);
}

#[test]
fn a_full_disk_ends_the_keeping_and_not_the_move() {
    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
    let full = memfd_create("full", MemfdFlags::ALLOW_SEALING).unwrap();
    fcntl_add_seals(&full, SealFlags::GROW).unwrap();
    let path = PathBuf::from(format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&full)));
    let raw = stream(BLOCKS, &filled());
    let mut encoder = Encoder::new(Config { window_log: 20, max_ram: 1 << 30, ..Config::default() }).unwrap();
    let mut wire = vec![];
    encoder.push(&raw, &mut wire).unwrap();
    encoder.finish(&mut wire).unwrap();
    let mut decoder = Decoder::new(LIMITS).unwrap().with_checkpoint(Checkpoint::open(&path, &KEY).unwrap());
    let mut out = vec![];
    assert!(decoder.push(&wire, &mut out).unwrap().complete);
    assert!(decoder.checkpoint().unwrap().trouble().is_some());
    assert_eq!(load(&out).0, load(&raw).0);
}
