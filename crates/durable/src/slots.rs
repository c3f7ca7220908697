//! Files with two slots, of which one holds the last contents and the other is written next.
//!
//! A loss of power on the way tears the slot that is written, which its checksum tells; the other still holds what was before. The slots have
//! pages of their own, so that no sector belongs to both. Once both have been written their blocks are allocated, and a store waits for
//! one `fdatasync` that has no more to write than the slot.
//!
//! What is read is not always durable. A process that was killed between a store's write and its sync, and a sync that failed, leave the new
//! contents where everybody reads them, and the old ones on the medium. Who builds on what is read makes sure of it first
//! ([`Layout::make_sure`]).

use crate::replaced::replace_with;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use xxhash_rust::xxh3::xxh3_128;

/// What a slot's length is a multiple of, and what is written of it is.
const PAGE: usize = 4096;
/// Mark, sequence, length, checksum.
const HEADER: usize = 8 + 8 + 8 + 16;

/// What the slots of a kind of file look like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// What each begins with: a mark, and the format's version.
    pub magic: [u8; 8],
    /// How long each is, in bytes: a multiple of 4,096.
    pub slot: usize,
}

/// An open file.
#[derive(Debug)]
pub struct Slots {
    layout: Layout,
    file: File,
    sequence: u64,
}

impl Layout {
    /// The longest contents, in bytes.
    #[must_use]
    pub const fn most(&self) -> usize {
        self.slot - HEADER
    }

    /// The newest whole contents of a file that was read, if there are any.
    #[must_use]
    pub fn newest<'a>(&self, file: &'a [u8]) -> Option<&'a [u8]> {
        self.last(file).map(|(_, contents)| contents)
    }

    fn last<'a>(&self, file: &'a [u8]) -> Option<(u64, &'a [u8])> {
        file.chunks(self.slot).take(2).filter_map(|slot| self.decode(slot)).max_by_key(|(sequence, _)| *sequence)
    }

    fn decode<'a>(&self, slot: &'a [u8]) -> Option<(u64, &'a [u8])> {
        let word = |at: usize| Some(u64::from_le_bytes(slot.get(at..at + 8)?.try_into().ok()?));
        if slot.get(..8)? != self.magic {
            return None;
        }
        let (sequence, length) = (word(8)?, usize::try_from(word(16)?).ok()?);
        let contents = slot.get(HEADER..HEADER.checked_add(length)?)?;
        (slot.get(24..HEADER)? == checksum(sequence, contents)).then_some((sequence, contents))
    }

    /// Of a slot as much as has to be written: whole pages.
    fn encode(&self, sequence: u64, contents: &[u8]) -> io::Result<Vec<u8>> {
        if contents.len() > self.most() {
            let why = format!("{} bytes do not fit into a slot, which takes {}", contents.len(), self.most());
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        let mut slot = Vec::with_capacity(HEADER + contents.len() + PAGE);
        slot.extend(self.magic);
        slot.extend(sequence.to_le_bytes());
        slot.extend((contents.len() as u64).to_le_bytes());
        slot.extend(checksum(sequence, contents));
        slot.extend(contents);
        slot.resize(slot.len().next_multiple_of(PAGE), 0);
        Ok(slot)
    }

    /// Where that one lies.
    const fn at(&self, sequence: u64) -> u64 {
        (sequence % 2) * self.slot as u64
    }

    /// Makes a file, or replaces whatever has that name; it appears whole or not at all. Durable when it returns.
    ///
    /// # Errors
    /// When the medium fails; [`io::ErrorKind::InvalidInput`] for contents that are too long.
    pub fn create(self, path: &Path, contents: &[u8]) -> io::Result<Slots> {
        let sequence = 1;
        let slot = self.encode(sequence, contents)?;
        let file = replace_with(path, 0o600, |file| {
            file.set_len(2 * self.slot as u64)?;
            file.write_all_at(&slot, self.at(sequence))?;
            // So that the next store has its blocks, too.
            file.write_all_at(&vec![0; slot.len()], self.at(sequence + 1))
        })?;
        Ok(Slots { layout: self, file, sequence })
    }

    /// Opens a file; none where neither slot is whole, so that nobody knows what it held.
    ///
    /// # Errors
    /// When there is no file, or it cannot be read.
    pub fn open(self, path: &Path) -> io::Result<Option<Slots>> {
        let Some((file, bytes)) = self.read(path)? else { return Ok(None) };
        let last = self.last(&bytes).map(|(sequence, _)| sequence);
        Ok(last.map(|sequence| Slots { layout: self, file, sequence }))
    }

    /// Makes the newest whole contents of a file durable, by writing them again where they are: a sync alone would not do, since the system
    /// takes what it failed to write for written. Whether there are any. Nobody else may store meanwhile.
    ///
    /// # Errors
    /// When there is no file, or the medium fails: what is read then may be gone after a loss of power.
    pub fn make_sure(self, path: &Path) -> io::Result<bool> {
        let Some((file, bytes)) = self.read(path)? else { return Ok(false) };
        let Some((sequence, contents)) = self.last(&bytes) else { return Ok(false) };
        file.write_all_at(&self.encode(sequence, contents)?, self.at(sequence))?;
        file.sync_data()?;
        Ok(true)
    }

    /// A file and both of its slots; none where it is shorter, and of another kind.
    fn read(self, path: &Path) -> io::Result<Option<(File, Vec<u8>)>> {
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        let mut bytes = vec![0; 2 * self.slot];
        match file.read_exact_at(&mut bytes, 0) {
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => Ok(None),
            read => read.map(|()| Some((file, bytes))),
        }
    }
}

impl Slots {
    /// Replaces the contents. Durable when it returns.
    ///
    /// # Errors
    /// When the medium fails: nobody knows then which of the two are there. [`io::ErrorKind::InvalidInput`], and nothing is done, for contents
    /// that are too long.
    pub fn store(&mut self, contents: &[u8]) -> io::Result<()> {
        let sequence = self.sequence + 1;
        let slot = self.layout.encode(sequence, contents)?;
        self.file.write_all_at(&slot, self.layout.at(sequence))?;
        self.file.sync_data()?;
        self.sequence = sequence;
        Ok(())
    }
}

fn checksum(sequence: u64, contents: &[u8]) -> [u8; 16] {
    let mut all = sequence.to_le_bytes().to_vec();
    all.extend(contents);
    xxh3_128(&all).to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAYOUT: Layout = Layout { magic: *b"GWTEST\0\x01", slot: 2 * PAGE };

    fn newest(path: &Path) -> Vec<u8> {
        LAYOUT.newest(&std::fs::read(path).expect("reads")).expect("whole contents").to_vec()
    }

    #[test]
    fn the_last_contents_are_found_again_and_the_next_process_goes_on() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("it");
        let mut slots = LAYOUT.create(&path, b"0").expect("makes");
        for round in 0..3 {
            for text in [format!("{round}"), "x".repeat(PAGE), String::new()] {
                slots.store(text.as_bytes()).expect("stores");
                assert_eq!(newest(&path), text.as_bytes());
            }
            slots = LAYOUT.open(&path).expect("opens").expect("is whole");
        }
        assert_eq!(std::fs::metadata(&path).expect("is there").len(), 4 * PAGE as u64);
    }

    #[test]
    fn what_is_too_long_changes_nothing() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("it");
        let mut slots = LAYOUT.create(&path, b"short").expect("makes");
        let error = slots.store(&vec![1; LAYOUT.most() + 1]).expect_err("does not fit");
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
        assert_eq!(newest(&path), b"short");
        slots.store(&vec![1; LAYOUT.most()]).expect("fits");
        assert_eq!(newest(&path), vec![1; LAYOUT.most()]);
    }

    #[test]
    fn a_store_that_is_torn_anywhere_leaves_the_contents_before_or_the_new_ones() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("it");
        let mut slots = LAYOUT.create(&path, b"staged").expect("makes");
        slots.store(b"granted").expect("stores");
        let before = std::fs::read(&path).expect("reads");
        slots.store(b"started").expect("stores");
        let after = std::fs::read(&path).expect("reads");
        let differ: Vec<_> = (0..before.len()).filter(|i| before[*i] != after[*i]).collect();
        assert!(differ.len() > 16);
        for from in 0..differ.len() {
            for to in from..=differ.len() {
                let mut torn = before.clone();
                differ[from..to].iter().for_each(|i| torn[*i] = after[*i]);
                let whole = to - from == differ.len();
                let found = LAYOUT.newest(&torn).expect("whole contents");
                assert_eq!(found, if whole { b"started" } else { b"granted" });
            }
        }
    }

    #[test]
    fn what_has_no_whole_slot_is_not_opened() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("it");
        assert_eq!(LAYOUT.open(&path).expect_err("is not there").kind(), io::ErrorKind::NotFound);
        for bytes in [vec![], b"{\"of\": \"another kind\"}".to_vec(), vec![0; 4 * PAGE], vec![0xff; 4 * PAGE]] {
            std::fs::write(&path, bytes).expect("writes");
            assert!(LAYOUT.open(&path).expect("opens").is_none());
        }
        LAYOUT.create(&path, b"again").expect("replaces it");
        assert_eq!(newest(&path), b"again");
    }

    #[test]
    fn what_is_made_sure_is_written_where_it_is_and_nothing_else_changes() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("it");
        assert_eq!(LAYOUT.make_sure(&path).expect_err("is not there").kind(), io::ErrorKind::NotFound);
        let long = vec![7; LAYOUT.most()];
        let mut slots = LAYOUT.create(&path, &long).expect("makes");
        for text in [b"one".as_slice(), b"two".as_slice(), long.as_slice()] {
            slots.store(text).expect("stores");
            let before = std::fs::read(&path).expect("reads");
            let long_ago = std::time::SystemTime::UNIX_EPOCH;
            slots.file.set_modified(long_ago).expect("has a time");
            assert!(LAYOUT.make_sure(&path).expect("makes sure"));
            let written = slots.file.metadata().and_then(|file| file.modified()).expect("has a time");
            assert!(written > long_ago, "nothing was written");
            assert!(std::fs::read(&path).expect("reads") == before, "something changed");
        }
        for bytes in [vec![], vec![0; 4 * PAGE]] {
            std::fs::write(&path, &bytes).expect("writes");
            assert!(!LAYOUT.make_sure(&path).expect("looks"));
            assert_eq!(std::fs::read(&path).expect("reads"), bytes);
        }
    }
}
