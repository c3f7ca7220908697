//! Every codec gives back what went in, and says so when it cannot.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use common::{PAGE, Stream};
use godwit_memory::codec::{self, Codec, CodecError, Mechanisms};
use godwit_memory::{Blocks, Config, DEFAULT_WINDOW_LOG, Finder, Limits, PageBytes, Resends, Spot, SpotTable};
use proptest::prelude::*;
use std::sync::Arc;

const BLOCKS: &[(&str, u64)] = &[("pc.ram", 64), ("/rom@etc/acpi/tables", 8), ("pc.bios", 3)];
const LIMITS: Limits = Limits { max_ram: 1 << 30, window_log: DEFAULT_WINDOW_LOG, versions: 1 << 20 };

/// A disk in memory, and where its contents are.
#[derive(Clone)]
struct Disk(Arc<(Vec<u8>, SpotTable)>);

impl Disk {
    fn new(contents: Vec<u8>) -> Self {
        let mut table = SpotTable::new((contents.len() / PAGE) as u64, 1);
        table.learn(Spot::default(), &contents);
        Self(Arc::new((contents, table)))
    }
}

impl Blocks for Disk {
    fn read(&self, first: Spot, into: &mut [u8]) -> bool {
        let from = first.block as usize * PAGE;
        let found = self.0.0.get(from..from + into.len()).filter(|_| first.disk == 0);
        found.map(|found| into.copy_from_slice(found)).is_some()
    }
}

impl Finder for Disk {
    fn find(&self, content: &PageBytes) -> Option<Spot> {
        self.0.1.find(content)
    }
}

fn encode(codec: Codec, raw: &[u8], disk: Option<&Disk>, slots: u32, cut: usize) -> Vec<u8> {
    let config = Config { resends: Resends::Keep, max_ram: LIMITS.max_ram, ..Config::default() };
    let disk = disk.cloned().map(|disk| Box::new(disk) as Box<dyn Finder>);
    let mut encoder = codec::encoder(codec, config, disk, slots).unwrap();
    let mut wire = vec![];
    raw.chunks(cut).for_each(|piece| encoder.push(piece, &mut wire).unwrap());
    encoder.finish(&mut wire).unwrap();
    wire
}

fn decode(wire: &[u8], disk: Option<&Disk>, cut: usize) -> Result<Vec<u8>, CodecError> {
    let mut decoder = codec::decoder(LIMITS, disk.cloned().map(|disk| Box::new(disk) as Box<dyn Blocks>), None);
    let mut out = vec![];
    for piece in wire.chunks(cut) {
        decoder.push(piece, &mut out)?;
    }
    decoder.finish()?;
    Ok(out)
}

/// Pages of few contents, some a little different from the last.
fn contents() -> impl Strategy<Value = Vec<u8>> {
    let page = (1..5u8, proptest::collection::vec((0..PAGE, any::<u8>()), 0..6)).prop_map(|(fill, changes)| {
        let mut page = vec![fill; PAGE];
        changes.into_iter().for_each(|(at, byte)| page[at] = byte);
        page
    });
    proptest::collection::vec(page, 0..30).prop_map(|pages| pages.concat())
}

fn raw(parts: &[(u64, Vec<u8>)], pages: &[(usize, u64, Option<u8>)]) -> Vec<u8> {
    let mut stream = Stream::begin(BLOCKS);
    parts.iter().for_each(|(first, contents)| stream.part_of(*first, contents));
    stream.part(pages);
    stream.end(&[(1, 2, Some(1)), (0, 0, None)])
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn every_codec_gives_back_every_byte_at_any_cuts(
        parts in proptest::collection::vec((0..30u64, contents()), 0..5),
        pages in proptest::collection::vec((0..3usize, 0..3u64, proptest::option::of(1..4u8)), 0..20),
        disk in contents(),
        slots in prop_oneof![Just(1u32), 2..40u32, Just(1u32 << 20)],
        (cut, wire_cut) in (1..9000usize, 1..900usize),
    ) {
        let raw = raw(&parts, &pages);
        let disk = Disk::new(disk);
        for codec in Codec::ALL {
            let wire = encode(codec, &raw, Some(&disk), slots, cut);
            prop_assert!(decode(&wire, Some(&disk), wire_cut).unwrap() == raw, "{codec}");
        }
    }

    #[test]
    fn a_damaged_file_is_never_taken_for_what_went_in(at: prop::sample::Index, bit in 0..8u32, pick in 1..5usize) {
        let contents: Vec<u8> = (0..8 * PAGE).map(|n| (n / 300) as u8 + 1).collect();
        let raw = raw(&[(3, contents.clone()), (5, contents)], &[]);
        let mut wire = encode(Codec::ALL[pick], &raw, None, 64, usize::MAX);
        let at = at.index(wire.len());
        wire[at] ^= 1 << bit;
        prop_assert!(decode(&wire, None, 700).map_or(true, |out| out == raw));
    }
}

#[test]
fn a_file_that_was_cut_is_refused() {
    let raw = raw(&[(3, vec![7; 4 * PAGE])], &[]);
    for codec in &Codec::ALL[1..] {
        let wire = encode(*codec, &raw, None, 64, usize::MAX);
        assert!(decode(&wire[..wire.len() - 1], None, 700).is_err(), "{codec}");
        assert!(decode(&wire[..3], None, 700).is_err(), "{codec}");
    }
    assert!(matches!(decode(b"neither", None, 2), Err(CodecError::Unknown { .. })));
}

#[test]
fn references_need_the_disk_as_it_was() {
    let contents: Vec<u8> = (0..40 * PAGE).map(|n| (n / PAGE) as u8 + 1).collect();
    let raw = raw(&[(3, contents.clone())], &[]);
    let disk = Disk::new(contents.clone());
    let wire = encode(Codec::Full, &raw, Some(&disk), 64, usize::MAX);
    assert_eq!(decode(&wire, Some(&disk), 700).unwrap(), raw);
    let mut other = contents;
    other[20 * PAGE] ^= 1;
    assert!(matches!(decode(&wire, Some(&Disk::new(other)), 700), Err(CodecError::Disks { group: 1 })));
    assert!(matches!(decode(&wire, None, 700), Err(CodecError::Disks { group: 0 })));
}

#[test]
fn cloudnets_scheme_sends_repeated_quarters_as_indexes_and_changed_ones_as_deltas() {
    let mut contents: Vec<u8> = (0..4 * PAGE).map(|n| (n % 251) as u8 ^ (n / 1024) as u8).collect();
    let once = encode(Codec::CloudNet, &raw(&[(0, contents.clone())], &[]), None, 1 << 10, usize::MAX).len();
    let twice =
        encode(Codec::CloudNet, &raw(&[(0, contents.clone()), (9, contents.clone())], &[]), None, 1 << 10, usize::MAX);
    assert!((1..=4 * 40).contains(&(twice.len() - once)), "indexes: {}", twice.len() - once);
    let again = contents.clone();
    (0..16).for_each(|quarter| contents[quarter * 1024 + 77] ^= 0x55);
    let changed = encode(Codec::CloudNet, &raw(&[(0, again), (0, contents)], &[]), None, 1 << 10, usize::MAX);
    assert!((1..=16 * 12 + 80).contains(&(changed.len() - once)), "deltas: {}", changed.len() - once);
}

#[test]
fn cloudnets_mechanisms_work_alone_and_whoever_decodes_need_not_know() {
    // Two pages alike, one of them again with a byte changed in each quarter, and at the end one whose quarters are alike.
    let contents: Vec<u8> = (0..PAGE).map(|n| (n * 7 % 251) as u8 ^ (n / 1024) as u8).collect();
    let mut changed = contents.clone();
    (0..4).for_each(|quarter| changed[quarter * 1024 + 77] ^= 0x55);
    let raw = raw(&[(0, contents.clone()), (9, contents), (0, changed)], &[]);
    let counted = |redundancy, deltas| {
        let mut encoder = codec::cloudnet(Mechanisms { redundancy, deltas }, 1 << 10, 1 << 40).unwrap();
        let mut wire = vec![];
        encoder.push(&raw, &mut wire).unwrap();
        let counted = encoder.finish(&mut wire).unwrap();
        assert_eq!(decode(&wire, None, 700).unwrap(), raw);
        ["quarters_by_index", "quarters_by_delta", "quarters_in_full"]
            .map(|name| counted.iter().find(|(it, _)| *it == name).unwrap().1)
    };
    assert_eq!(counted(false, false), [0, 0, 16]);
    assert_eq!(counted(true, false), [7, 0, 9]);
    assert_eq!(counted(false, true), [0, 4, 12]);
    assert_eq!(counted(true, true), [7, 4, 5]);
}
