//! Truth checks: is what arrived what was sent?
//!
//! RAM is compared while both ends stand still: the source has stopped for good, the destination has everything and has
//! not begun. That holds the guest for the time of reading its RAM twice, which the report names (`held_ms`) and
//! takes out of the pause. Disks are too large for that: they are compared after the guest has gone on, and what
//! differs is held against the destination's own record (a dirty bitmap, begun before it ran) of what the guest has
//! written since. A difference that nobody wrote is an error.

use anyhow::{Context, Result};
use godwit_api::hex;
use rustix::fs::{SeekFrom, seek};
use std::collections::BTreeSet;
use std::fs::File;
use std::os::unix::fs::FileExt;

/// Bytes in a guest page.
pub const PAGE: usize = 4096;
/// Bytes in a granule of the disk comparison, QEMU's default granularity for dirty bitmaps.
pub const GRANULE: usize = 65_536;
/// What is read at once: small enough to stay in the processor's cache.
const CHUNK: usize = 256 << 10;
/// Readers at work at once; the pause is as long as they take.
const READERS: u64 = 2;
/// How many differing places are named; all are counted.
const NAMED: usize = 8;

/// Where two files differ, in units of a page or a granule.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Difference {
    /// Units compared.
    pub compared: u64,
    /// Numbers of the units that differ.
    pub units: BTreeSet<u64>,
}

impl Difference {
    /// The first few, for a message.
    #[must_use]
    pub fn named(&self) -> String {
        let first: Vec<_> = self.units.iter().take(NAMED).map(u64::to_string).collect();
        let more = if self.units.len() > NAMED { ", ..." } else { "" };
        format!("{} of {}: {}{more}", self.units.len(), self.compared, first.join(", "))
    }
}

/// What the first few differing pages hold at both ends, for whoever looks for the reason: where the runs of different
/// bytes are, and how they begin.
///
/// # Errors
/// When a file cannot be read.
pub fn describe_pages(difference: &Difference, one: &File, other: &File) -> Result<Vec<String>> {
    let mut said = vec![];
    for page in difference.units.iter().take(NAMED) {
        let (mut ours, mut theirs) = (vec![0; PAGE], vec![0; PAGE]);
        one.read_exact_at(&mut ours, page * PAGE as u64)?;
        other.read_exact_at(&mut theirs, page * PAGE as u64)?;
        let differs: Vec<usize> = (0..PAGE).filter(|i| ours[*i] != theirs[*i]).collect();
        let Some((first, last)) = differs.first().zip(differs.last()) else {
            said.push(format!("page {page} differed, and does not any more"));
            continue;
        };
        let start = first / 8 * 8;
        let shown = start..(start + 32).min(PAGE);
        said.push(format!(
            "page {page}: {} bytes differ, from {first:#x} to {last:#x}; at {start:#x} {} here and {} there; {} and {} bytes are not zero",
            differs.len(),
            hex::text(&ours[shown.clone()]),
            hex::text(&theirs[shown]),
            ours.iter().filter(|b| **b != 0).count(),
            theirs.iter().filter(|b| **b != 0).count(),
        ));
    }
    Ok(said)
}

/// Compares two stopped guests' RAM, page by page.
///
/// # Errors
/// When a file cannot be read to its end.
pub fn compare_ram(one: &File, other: &File, size: u64) -> Result<Difference> {
    let share = (size / READERS).next_multiple_of(CHUNK as u64);
    let parts: Vec<Result<BTreeSet<u64>>> = std::thread::scope(|scope| {
        let readers: Vec<_> = (0..READERS)
            .map(|i| scope.spawn(move || differing(one, other, i * share..size.min((i + 1) * share), PAGE)))
            .collect();
        readers.into_iter().map(|r| r.join().expect("a comparison does not panic")).collect()
    });
    let mut difference = Difference { compared: size / PAGE as u64, ..Difference::default() };
    for part in parts {
        difference.units.extend(part?);
    }
    Ok(difference)
}

/// Compares the RAM of a stopped source with what has arrived. With `altered`, a byte of the destination's last page is
/// damaged before and mended afterwards: the page which takes a comparison that goes to the very end.
///
/// # Errors
/// As [`compare_ram`].
pub fn compare_arrived(source: &File, destination: &File, size: u64, altered: bool) -> Result<Difference> {
    if !altered {
        return compare_ram(source, destination, size);
    }
    let mut byte = [0];
    destination.read_exact_at(&mut byte, size - 1)?;
    destination.write_all_at(&[!byte[0]], size - 1)?;
    let difference = compare_ram(source, destination, size);
    destination.write_all_at(&byte, size - 1)?;
    difference
}

/// Compares two disks of the same size, granule by granule, leaving out what is a hole in both.
///
/// # Errors
/// When a file cannot be read.
pub fn compare_disks(one: &File, other: &File) -> Result<Difference> {
    let size = one.metadata()?.len();
    let mut difference = Difference { compared: size.div_ceil(GRANULE as u64), ..Difference::default() };
    if other.metadata()?.len() != size {
        difference.units.insert(size.min(other.metadata()?.len()) / GRANULE as u64);
        return Ok(difference);
    }
    let mut at = 0;
    while let Some(extent) = next_data(one, other, at, size)? {
        difference.units.extend(differing(one, other, extent.clone(), GRANULE)?);
        at = extent.end;
    }
    Ok(difference)
}

/// The next stretch from `at` that is not a hole in both files, widened to whole granules.
fn next_data(one: &File, other: &File, at: u64, size: u64) -> Result<Option<std::ops::Range<u64>>> {
    let granule = GRANULE as u64;
    let mut next: Option<std::ops::Range<u64>> = None;
    for file in [one, other] {
        let start = match seek(file, SeekFrom::Data(at)) {
            Ok(start) => start,
            Err(rustix::io::Errno::NXIO) => continue,
            Err(e) => return Err(e).context("cannot look for data"),
        };
        let end = seek(file, SeekFrom::Hole(start))?;
        if next.as_ref().is_none_or(|n| start < n.start) {
            next = Some(start / granule * granule..end.next_multiple_of(granule).min(size));
        }
    }
    Ok(next.map(|n| n.start.max(at)..n.end))
}

/// Numbers of the units in `range` (which starts at a whole unit) that differ.
fn differing(one: &File, other: &File, range: std::ops::Range<u64>, unit: usize) -> Result<BTreeSet<u64>> {
    let (mut ours, mut theirs) = (vec![0; CHUNK], vec![0; CHUNK]);
    let mut found = BTreeSet::new();
    let mut at = range.start;
    while at < range.end {
        let n = CHUNK.min((range.end - at) as usize);
        one.read_exact_at(&mut ours[..n], at).with_context(|| format!("cannot read byte {at} of the source"))?;
        other
            .read_exact_at(&mut theirs[..n], at)
            .with_context(|| format!("cannot read byte {at} of the destination"))?;
        if ours[..n] != theirs[..n] {
            let units = ours[..n].chunks(unit).zip(theirs[..n].chunks(unit)).enumerate();
            found.extend(units.filter(|(_, (a, b))| a != b).map(|(i, _)| at / unit as u64 + i as u64));
        }
        at += n as u64;
    }
    Ok(found)
}

/// The share of pages that are not all zero, 0 to 1. The guest may run; the answer is then of no single instant.
///
/// # Errors
/// When the file cannot be read.
pub fn nonzero_share(ram: &File, size: u64) -> Result<f64> {
    let mut chunk = vec![0; CHUNK];
    let mut nonzero = 0u64;
    let mut at = 0;
    while at < size {
        let n = CHUNK.min((size - at) as usize);
        ram.read_exact_at(&mut chunk[..n], at).with_context(|| format!("cannot read byte {at} of guest RAM"))?;
        nonzero += chunk[..n].chunks(PAGE).filter(|p| p.iter().any(|b| *b != 0)).count() as u64;
        at += n as u64;
    }
    Ok(nonzero as f64 * PAGE as f64 / size as f64)
}

/// Sums of guest RAM, one for each stretch of it: two of them that differ show that the guest has run in between.
///
/// # Errors
/// When the file cannot be read.
pub fn ram_sums(ram: &File, size: u64) -> Result<Vec<u64>> {
    let mut chunk = vec![0; CHUNK];
    let mut sums = vec![];
    let mut at = 0;
    while at < size {
        let n = CHUNK.min((size - at) as usize);
        ram.read_exact_at(&mut chunk[..n], at).with_context(|| format!("cannot read byte {at} of guest RAM"))?;
        let words = chunk[..n].chunks_exact(8).map(|w| u64::from_le_bytes(w.try_into().expect("eight bytes")));
        // Any odd factor makes a word's place count; nobody tries to deceive this sum.
        sums.push(words.fold(0u64, |sum, word| sum.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(word)));
        at += n as u64;
    }
    Ok(sums)
}

/// The granules that `qemu-img map` of an exported dirty bitmap shows as written.
///
/// # Errors
/// When the text is not that command's JSON.
pub fn written_granules(map: &str) -> Result<BTreeSet<u64>> {
    #[derive(serde::Deserialize)]
    struct Extent {
        start: u64,
        length: u64,
        data: bool,
    }
    let extents: Vec<Extent> = serde_json::from_str(map).context("`qemu-img map` did not print what was expected")?;
    // With x-dirty-bitmap qemu-img shows *clean* extents as data, and dirty ones as holes.
    let dirty = extents.iter().filter(|e| !e.data && e.length > 0);
    Ok(dirty.flat_map(|e| e.start / GRANULE as u64..=(e.start + e.length - 1) / GRANULE as u64).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn file(size: u64) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(size).unwrap();
        file
    }

    fn pair(size: u64) -> (tempfile::NamedTempFile, tempfile::NamedTempFile) {
        let (mut one, mut other) = (file(0), file(0));
        let body: Vec<u8> = (0..size).map(|i| (i % 251) as u8).collect();
        one.write_all(&body).unwrap();
        other.write_all(&body).unwrap();
        (one, other)
    }

    #[test]
    fn one_altered_byte_of_ram_is_found_and_its_page_named() {
        // An odd size, as guests under TCG have.
        let size = (3 << 20) + 8192;
        let (one, other) = pair(size);
        assert!(compare_ram(one.as_file(), other.as_file(), size).unwrap().units.is_empty());
        for page in [0, 1, 64, 700, size / 4096 - 1] {
            let at = page * 4096 + 4095;
            let mut byte = [0];
            other.as_file().read_exact_at(&mut byte, at).unwrap();
            other.as_file().write_all_at(&[!byte[0]], at).unwrap();
            let found = compare_ram(one.as_file(), other.as_file(), size).unwrap();
            assert_eq!(found.units, BTreeSet::from([page]));
            other.as_file().write_all_at(&byte, at).unwrap();
        }
    }

    #[test]
    fn a_page_that_differs_is_described_at_both_ends() {
        let (one, other) = pair(1 << 20);
        other.as_file().write_all_at(&[7, 8], 5 * PAGE as u64 + 0x123).unwrap();
        let difference = compare_ram(one.as_file(), other.as_file(), 1 << 20).unwrap();
        let said = describe_pages(&difference, one.as_file(), other.as_file()).unwrap();
        assert_eq!(said.len(), 1);
        assert!(said[0].starts_with("page 5: 2 bytes differ, from 0x123 to 0x124; at 0x120 "), "{said:?}");
        assert!(said[0].contains(" babbbcbdbe") && said[0].contains(" babbbc0708"), "{said:?}");
    }

    #[test]
    fn a_file_that_is_too_short_is_an_error_and_not_equal() {
        let (one, other) = pair(1 << 20);
        other.as_file().set_len(1 << 19).unwrap();
        assert!(compare_ram(one.as_file(), other.as_file(), 1 << 20).is_err());
    }

    #[test]
    fn one_altered_block_of_a_sparse_disk_is_found_wherever_the_holes_are() {
        let size = 64 << 20;
        let (one, other) = (file(size), file(size));
        for disk in [&one, &other] {
            disk.as_file().write_all_at(b"same", 5 << 20).unwrap();
        }
        assert_eq!(compare_disks(one.as_file(), other.as_file()).unwrap().units, BTreeSet::new());
        // Data only in the second, only in the first, in both but different, at the very end.
        other.as_file().write_all_at(b"x", 1 << 20).unwrap();
        one.as_file().write_all_at(b"x", 9 << 20).unwrap();
        one.as_file().write_all_at(b"other", 5 << 20).unwrap();
        other.as_file().write_all_at(b"x", size - 1).unwrap();
        let found = compare_disks(one.as_file(), other.as_file()).unwrap();
        assert_eq!(found.units, BTreeSet::from([16, 80, 144, 1023]));
        assert_eq!(found.named(), "4 of 1024: 16, 80, 144, 1023");
    }

    #[test]
    fn explicit_zeroes_equal_a_hole() {
        let (one, other) = (file(1 << 20), file(1 << 20));
        one.as_file().write_all_at(&[0; GRANULE], 0).unwrap();
        assert_eq!(compare_disks(one.as_file(), other.as_file()).unwrap().units, BTreeSet::new());
    }

    #[test]
    fn disks_of_different_sizes_differ() {
        let (one, other) = (file(1 << 20), file(2 << 20));
        assert_eq!(compare_disks(one.as_file(), other.as_file()).unwrap().units.len(), 1);
    }

    #[test]
    fn the_share_of_nonzero_pages_counts_pages_and_not_bytes() {
        let ram = file(8 * 4096);
        ram.as_file().write_all_at(&[1], 4096 * 2 + 7).unwrap();
        ram.as_file().write_all_at(&[1; 4096], 4096 * 5).unwrap();
        assert!((nonzero_share(ram.as_file(), 8 * 4096).unwrap() - 0.25).abs() < 1e-9);
    }

    #[test]
    fn one_byte_written_to_ram_changes_its_sums_and_nothing_else_does() {
        let size = (1 << 20) + 8192;
        let (ram, _) = pair(size);
        let before = ram_sums(ram.as_file(), size).unwrap();
        assert_eq!(ram_sums(ram.as_file(), size).unwrap(), before);
        ram.as_file().write_all_at(&[0xff], size - 1).unwrap();
        let after = ram_sums(ram.as_file(), size).unwrap();
        assert_eq!(after.iter().zip(&before).filter(|(a, b)| a != b).count(), 1);
    }

    #[test]
    fn a_bitmaps_map_yields_the_granules_written() {
        let map = r#"[{"start": 0, "length": 65536, "depth": 0, "present": true, "zero": false, "data": true},
                      {"start": 65536, "length": 131072, "depth": 0, "present": true, "zero": true, "data": false}]"#;
        assert_eq!(written_granules(map).unwrap(), BTreeSet::from([1, 2]));
        assert!(written_granules("no").is_err());
    }
}
