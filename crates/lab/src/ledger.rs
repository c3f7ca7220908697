//! The ledger of long measurements: one JSON line for each run, keyed by commit, scenario, cell and repeat.
//!
//! A sweep takes hours and gets interrupted. Each run is appended, in one write, and is on stable storage before the
//! next one starts; a sweep that starts again asks [`Ledger::has`] and goes on where it was. What can go wrong:
//!
//! - **A crash tears the last line.** A line is whole when it is JSON and ends in a newline. A last line that is not
//!   is cut off by [`Ledger::open`] and shown by [`Ledger::dropped`]; its run is made again. Anything else that cannot
//!   be read is an error, not a guess: cutting there would throw away good runs.
//! - **The disk fills up.** A failed append leaves a torn end, which the next append overwrites (each is written where
//!   the last whole line ends) and the next open cuts off.
//! - **Two sweeps write the same file.** The second one's open fails: the file is locked as long as a ledger is open.
//!   [`read`] takes no lock and changes nothing, so that a table can be printed while a sweep runs.

use crate::report::{Report, Series};
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};
use std::collections::HashSet;
use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Longest line, in bytes. A run has a line of some kilobytes; a thousand rounds still fit. Longer ones would be curves
/// that belong into the report's own file.
pub const MAX_LINE: usize = 1 << 20;

/// Most lines. A ledger is held in memory, and a sweep of this many runs would take years.
pub const MAX_LINES: usize = 100_000;

/// Names one run, for ever.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Key {
    /// The commit of the programs that were measured; with a mark where the tree was not clean.
    pub commit: String,
    /// The scenario's name.
    pub scenario: String,
    /// The cell of the sweep, as [`Cell::name`](crate::sweep::Cell::name) has it.
    pub cell: String,
    /// Which repeat, from 0.
    pub repeat: u32,
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} #{} at {}", self.scenario, self.cell, self.repeat, self.commit)
    }
}

/// One run.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// Which run.
    pub key: Key,
    /// When it was entered, seconds since 1970 (UTC).
    pub at_unix_s: u64,
    /// What was measured. [`Ledger::append`] leaves out the curves.
    pub report: Report,
}

/// Why a ledger cannot be opened, read or written.
#[derive(Debug, thiserror::Error)]
pub enum LedgerError {
    /// The file system refused.
    #[error("cannot {doing} the ledger {path}: {source}")]
    Io {
        /// What was tried.
        doing: &'static str,
        /// The file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// Somebody else has it open.
    #[error("the ledger {path} is in use by another run; wait for it, or give this one a ledger of its own")]
    InUse {
        /// The file.
        path: PathBuf,
    },
    /// A line that no crash of this program leaves behind.
    #[error("{path}:{line}: {what}; repair or remove the line by hand")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Line, from 1.
        line: usize,
        /// What is wrong with it.
        what: String,
    },
    /// More lines than a ledger holds.
    #[error("the ledger {path} has its {MAX_LINES} lines; start a new one")]
    Full {
        /// The file.
        path: PathBuf,
    },
    /// The run is there already: its figures would count twice.
    #[error("the ledger {path} has {key} already; ask `has` before a run")]
    AlreadyThere {
        /// The file.
        path: PathBuf,
        /// The run.
        key: Key,
    },
    /// A report too large for a line.
    #[error("{key} would take a line of {bytes} bytes in the ledger; the longest is {MAX_LINE}")]
    TooLong {
        /// The run.
        key: Key,
        /// The length that it would have.
        bytes: usize,
    },
}

/// An open ledger, locked against other writers until it is dropped.
#[derive(Debug)]
pub struct Ledger {
    path: PathBuf,
    file: File,
    /// Where the last whole line ends; the next one begins here.
    end: u64,
    entries: Vec<Entry>,
    keys: HashSet<Key>,
    dropped: Option<String>,
}

impl Ledger {
    /// Opens a ledger, making an empty one where there is none, and cuts off a torn last line.
    ///
    /// # Errors
    /// [`LedgerError::InUse`], `Damaged`, `Full` or `Io`.
    pub fn open(path: &Path) -> Result<Self, LedgerError> {
        let io = |doing| move |source| LedgerError::Io { doing, path: path.into(), source };
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o644)
            .open(path)
            .map_err(io("open"))?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => return Err(LedgerError::InUse { path: path.into() }),
            Err(e) => return Err(io("lock")(e.into())),
        }
        sync_directory_of(path).map_err(io("make"))?;
        let found = scan(path, &file)?;
        if found.dropped.is_some() {
            file.set_len(found.end).and_then(|()| file.sync_data()).map_err(io("cut the torn last line off"))?;
        }
        let keys = found.entries.iter().map(|e| e.key.clone()).collect();
        let Found { entries, end, dropped } = found;
        Ok(Self { path: path.into(), file, end, entries, keys, dropped })
    }

    /// The beginning of the torn last line that [`Ledger::open`] cut off; its run has to be made again.
    #[must_use]
    pub fn dropped(&self) -> Option<&str> {
        self.dropped.as_deref()
    }

    /// Whether the run is there.
    #[must_use]
    pub fn has(&self, key: &Key) -> bool {
        self.keys.contains(key)
    }

    /// All runs, in the order in which they were entered.
    #[must_use]
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Enters a run, without its curves. When this returns, the line is on stable storage.
    ///
    /// # Errors
    /// [`LedgerError::AlreadyThere`], `TooLong`, `Full` or `Io`; the ledger is then as it was.
    pub fn append(&mut self, entry: &Entry) -> Result<(), LedgerError> {
        let key = &entry.key;
        if self.has(key) {
            return Err(LedgerError::AlreadyThere { path: self.path.clone(), key: key.clone() });
        }
        if self.entries.len() >= MAX_LINES {
            return Err(LedgerError::Full { path: self.path.clone() });
        }
        let entry = without_series(entry);
        let io = |doing, source| LedgerError::Io { doing, path: self.path.clone(), source };
        let mut line = serde_json::to_vec(&entry).map_err(|e| io("encode a line of", e.into()))?;
        line.push(b'\n');
        if line.len() > MAX_LINE {
            return Err(LedgerError::TooLong { key: entry.key, bytes: line.len() });
        }
        debug_assert!(!line[..line.len() - 1].contains(&b'\n'), "JSON escapes newlines within strings");
        let written = self.file.write_all_at(&line, self.end).and_then(|()| self.file.sync_data());
        written.map_err(|source| io("append to", source))?;
        self.end += line.len() as u64;
        self.keys.insert(entry.key.clone());
        self.entries.push(entry);
        Ok(())
    }
}

/// The runs of a ledger that may be in use; a line that is just being written is left out. Nothing is changed.
///
/// # Errors
/// [`LedgerError::Damaged`], `Full` or `Io` (also where there is no such file).
pub fn read(path: &Path) -> Result<Vec<Entry>, LedgerError> {
    let file = File::open(path).map_err(|source| LedgerError::Io { doing: "open", path: path.into(), source })?;
    Ok(scan(path, &file)?.entries)
}

fn without_series(entry: &Entry) -> Entry {
    let mut entry = entry.clone();
    let baselines = entry.report.baselines.iter_mut().map(|b| &mut b.figures);
    for figures in entry.report.moves.iter_mut().chain(baselines) {
        figures.series = Series::default();
    }
    entry
}

/// A name in a directory is durable once the directory is.
fn sync_directory_of(path: &Path) -> io::Result<()> {
    let directory = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    File::open(directory)?.sync_all()
}

struct Found {
    entries: Vec<Entry>,
    end: u64,
    dropped: Option<String>,
}

/// How much of a torn line is shown.
const SHOWN: usize = 120;

fn scan(path: &Path, file: &File) -> Result<Found, LedgerError> {
    let io = |source| LedgerError::Io { doing: "read", path: path.into(), source };
    let damaged = |line, what: String| LedgerError::Damaged { path: path.into(), line, what };
    let mut reader = BufReader::new(file);
    let mut found = Found { entries: vec![], end: 0, dropped: None };
    let mut seen: std::collections::HashMap<Key, usize> = std::collections::HashMap::new();
    for number in 1.. {
        let mut line = vec![];
        reader.by_ref().take(MAX_LINE as u64).read_until(b'\n', &mut line).map_err(io)?;
        if line.is_empty() {
            break;
        }
        let last = reader.fill_buf().map_err(io)?.is_empty();
        let whole = line.ends_with(b"\n");
        if !whole && !last {
            return Err(damaged(number, format!("is longer than {MAX_LINE} bytes")));
        }
        if number > MAX_LINES {
            return Err(LedgerError::Full { path: path.into() });
        }
        // Two questions, so that a line of a newer format is an error and not taken for a torn one.
        let value: serde_json::Value = match serde_json::from_slice(&line) {
            Ok(value) if whole => value,
            _ if last => {
                found.dropped = Some(String::from_utf8_lossy(&line).chars().take(SHOWN).collect());
                break;
            }
            Err(e) => return Err(damaged(number, format!("is not JSON: {e}"))),
            Ok(_) => unreachable!("a line that is not the last one is whole"),
        };
        let entry: Entry =
            serde_json::from_value(value).map_err(|e| damaged(number, format!("is not an entry: {e}")))?;
        if let Some(before) = seen.insert(entry.key.clone(), number) {
            return Err(damaged(number, format!("repeats the key of line {before} ({})", entry.key)));
        }
        found.end += line.len() as u64;
        found.entries.push(entry);
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::EchoPoint;
    use crate::scenario::Baseline;
    use crate::table::tests::{a_baseline, a_move, a_report};
    use std::os::unix::fs::PermissionsExt;

    fn key(repeat: u32) -> Key {
        Key { commit: "abc123".into(), scenario: "burst".into(), cell: "100mbit-27ms-qemu".into(), repeat }
    }

    fn entry(repeat: u32) -> Entry {
        let mut figures = a_move();
        figures.why = Some("two\nlines".into());
        figures.series.echo = vec![EchoPoint { t_s: 1.0, rtt_ms: 27.0 }; 50_000];
        Entry { key: key(repeat), at_unix_s: 7, report: a_report(vec![], vec![a_baseline(Baseline::Qemu, figures)]) }
    }

    fn in_a_directory() -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ledger.jsonl");
        (dir, path)
    }

    #[test]
    fn runs_are_there_after_opening_again_without_their_curves() {
        let (_dir, path) = in_a_directory();
        let mut ledger = Ledger::open(&path).unwrap();
        assert!(!ledger.has(&key(0)));
        ledger.append(&entry(0)).unwrap();
        ledger.append(&entry(1)).unwrap();
        assert!(matches!(ledger.append(&entry(1)), Err(LedgerError::AlreadyThere { .. })));
        drop(ledger);
        let ledger = Ledger::open(&path).unwrap();
        assert!(ledger.has(&key(0)) && ledger.has(&key(1)) && !ledger.has(&key(2)));
        assert_eq!(ledger.dropped(), None);
        let figures = &ledger.entries()[1].report.baselines[0].figures;
        assert_eq!((figures.total_s, figures.why.as_deref()), (130.25, Some("two\nlines")));
        assert!(figures.series.echo.is_empty());
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.lines().count() == 2 && text.len() < 4096, "{} bytes", text.len());
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o400, 0o400);
    }

    #[test]
    fn a_line_torn_anywhere_is_dropped_and_said_and_the_rest_kept() {
        let (_dir, path) = in_a_directory();
        let mut ledger = Ledger::open(&path).unwrap();
        ledger.append(&entry(0)).unwrap();
        let whole = ledger.end as usize;
        ledger.append(&entry(1)).unwrap();
        drop(ledger);
        let full = std::fs::read(&path).unwrap();
        for cut in whole + 1..full.len() {
            std::fs::write(&path, &full[..cut]).unwrap();
            assert_eq!(read(&path).unwrap().len(), 1);
            let mut ledger = Ledger::open(&path).unwrap();
            assert!(ledger.dropped().is_some_and(|d| d.starts_with('{') && d.len() <= SHOWN), "cut at {cut}");
            assert!(ledger.has(&key(0)) && !ledger.has(&key(1)));
            if cut % 97 == 0 {
                ledger.append(&entry(1)).unwrap();
                assert_eq!(std::fs::read(&path).unwrap(), full);
            }
        }
    }

    #[test]
    fn a_last_line_whose_first_block_was_lost_is_torn_too() {
        let (_dir, path) = in_a_directory();
        Ledger::open(&path).unwrap().append(&entry(0)).unwrap();
        let mut bytes = std::fs::read(&path).unwrap();
        let whole = bytes.len();
        bytes.extend(vec![0; 4096]);
        bytes.extend(b"\"notes\":[]}}\n");
        std::fs::write(&path, bytes).unwrap();
        let ledger = Ledger::open(&path).unwrap();
        assert!(ledger.dropped().is_some());
        assert_eq!(std::fs::metadata(&path).unwrap().len(), whole as u64);
    }

    #[test]
    fn what_no_crash_leaves_behind_is_an_error_with_its_line() {
        let (_dir, path) = in_a_directory();
        let mut ledger = Ledger::open(&path).unwrap();
        ledger.append(&entry(0)).unwrap();
        ledger.append(&entry(1)).unwrap();
        drop(ledger);
        let good = std::fs::read_to_string(&path).unwrap();
        let (first, second) = good.split_once('\n').unwrap();
        let refused = |text: String| {
            std::fs::write(&path, &text).unwrap();
            let error = Ledger::open(&path).unwrap_err().to_string();
            assert_eq!(std::fs::read_to_string(&path).unwrap(), text, "nothing was cut off");
            error
        };
        assert!(refused(format!("{}\n{second}", &first[..40])).contains("ledger.jsonl:1: is not JSON"));
        assert!(refused(format!("{first}\n{{\"key\":1}}\n")).contains("ledger.jsonl:2: is not an entry"));
        assert!(refused(format!("{good}{first}\n")).contains("ledger.jsonl:3: repeats the key of line 1"));
        assert!(refused(format!("{}\n{good}", "x".repeat(MAX_LINE))).contains("ledger.jsonl:1: is longer than"));
    }

    #[test]
    fn a_second_writer_is_refused_and_a_reader_is_not() {
        let (_dir, path) = in_a_directory();
        let mut ledger = Ledger::open(&path).unwrap();
        assert!(matches!(Ledger::open(&path), Err(LedgerError::InUse { .. })));
        ledger.append(&entry(0)).unwrap();
        assert_eq!(read(&path).unwrap().len(), 1);
        drop(ledger);
        assert!(Ledger::open(&path).is_ok());
    }

    #[test]
    fn a_report_too_large_for_a_line_is_refused_and_nothing_is_written() {
        let (_dir, path) = in_a_directory();
        let mut ledger = Ledger::open(&path).unwrap();
        let mut large = entry(0);
        large.report.warnings.push("x".repeat(MAX_LINE));
        assert!(matches!(ledger.append(&large), Err(LedgerError::TooLong { .. })));
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 0);
        ledger.append(&entry(0)).unwrap();
    }

    #[test]
    fn an_append_writes_over_what_a_failed_one_left() {
        let (_dir, path) = in_a_directory();
        let mut ledger = Ledger::open(&path).unwrap();
        ledger.append(&entry(0)).unwrap();
        ledger.file.write_all_at(b"{\"key\":{\"commit\":", ledger.end).unwrap();
        ledger.append(&entry(1)).unwrap();
        drop(ledger);
        assert_eq!(Ledger::open(&path).unwrap().entries().len(), 2);
    }
}
