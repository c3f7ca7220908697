//! Fills a guest's free memory with real content before a measurement.
//!
//! A freshly booted guest is mostly zero pages, and a migration that skips zero pages would look fast for the wrong
//! reason. Two things fill it: reading files (page cache, as in a guest that has been up for a while), then heap
//! records, which are checked pages that nobody touches: every check verifies them too.
//!
//! What can go wrong: on a small guest the page cache evicts its own older part, so reading on would never end, and
//! heap pushes out page cache or gets the program killed. Hence one pass over the content, a floor of available
//! memory, an end when growth no longer lowers MemFree, and [`TIME_LIMIT`].

use std::{
    fs::{self, File},
    io::{self, Read},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use crate::{
    arena::Arena,
    meminfo::MemInfo,
    page::RunId,
    protocol::{WarmEnd, WarmReport},
};

/// Longest that warming takes.
pub const TIME_LIMIT: Duration = Duration::from_secs(300);

/// Most that MemFree may stay where it is while heap grows.
const PATIENCE_MIB: u64 = 32;

/// Most directories waiting to be read: a guard against file systems that are not trees.
const MAX_DIRECTORIES: usize = 100_000;

const READ_BYTES: usize = 256 * 1024;

/// Why memory could not be warmed.
#[derive(Debug, thiserror::Error)]
pub enum WarmError {
    /// There is no telling how much memory is free.
    #[error("cannot read /proc/meminfo: {0}; mount /proc in the guest")]
    MemInfo(#[from] io::Error),
}

/// Heap records, 1 MiB each.
pub(crate) type Heap = Vec<Arena>;

/// Warms until MemFree is at most `free_percent_max` of MemTotal, or nothing more helps; adds to `heap`.
pub(crate) fn warm(
    content: Option<&Path>,
    free_percent_max: u8,
    seed: u64,
    run: RunId,
    heap: &mut Heap,
    mut meminfo: impl FnMut() -> io::Result<MemInfo>,
) -> Result<WarmReport, WarmError> {
    let begun = Instant::now();
    let mut pass = ContentPass::default();
    let mut reached = meminfo()?.free_is_at_most(free_percent_max);
    let in_time = || begun.elapsed() < TIME_LIMIT;
    if let Some(root) = content {
        pass.pending.push(root.to_owned());
    }
    let mut buffer = vec![0; READ_BYTES];
    while !reached && in_time() && pass.step(&mut buffer) {
        reached = meminfo()?.free_is_at_most(free_percent_max);
    }
    let ended = fill_heap(heap, seed, run, free_percent_max, in_time, &mut meminfo)?;
    let after = meminfo()?;
    Ok(WarmReport {
        files_read: pass.files,
        bytes_read: pass.bytes,
        unreadable: pass.unreadable,
        heap_mib: heap.len() as u64,
        mem_total_kib: after.total_kib,
        mem_free_kib: after.free_kib,
        ended,
        seconds: begun.elapsed().as_secs_f64(),
    })
}

fn fill_heap(
    heap: &mut Heap,
    seed: u64,
    run: RunId,
    free_percent_max: u8,
    in_time: impl Fn() -> bool,
    meminfo: &mut impl FnMut() -> io::Result<MemInfo>,
) -> Result<WarmEnd, WarmError> {
    let mut least_free_kib = u64::MAX;
    let mut grown_in_vain = 0;
    loop {
        let now = meminfo()?;
        if now.free_is_at_most(free_percent_max) {
            return Ok(WarmEnd::Reached);
        }
        if !in_time() {
            return Ok(WarmEnd::TimeLimit);
        }
        if now.available_kib < now.floor_kib() + 1024 {
            return Ok(WarmEnd::MemoryFloor);
        }
        if now.free_kib < least_free_kib {
            (least_free_kib, grown_in_vain) = (now.free_kib, 0);
        } else if grown_in_vain == PATIENCE_MIB {
            return Ok(WarmEnd::NoProgress);
        }
        grown_in_vain += 1;
        // Each block has content of its own, or they would all be copies of one.
        match Arena::build(1, seed ^ (heap.len() as u64 + 1), run, 64) {
            Ok(block) => heap.push(block),
            Err(_) => return Ok(WarmEnd::MemoryFloor),
        }
    }
}

/// One pass over the files below a directory, in steps of one buffer.
#[derive(Default)]
struct ContentPass {
    pending: Vec<PathBuf>,
    open: Option<File>,
    files: u64,
    bytes: u64,
    unreadable: u64,
}

impl ContentPass {
    /// Reads a buffer full, or lists a directory; `false` when the pass is over.
    fn step(&mut self, buffer: &mut [u8]) -> bool {
        if let Some(file) = &mut self.open {
            match file.read(buffer) {
                Ok(0) => {
                    self.files += 1;
                    self.open = None;
                }
                Ok(read) => self.bytes += read as u64,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => {
                    self.unreadable += 1;
                    self.open = None;
                }
            }
            return true;
        }
        let Some(path) = self.pending.pop() else { return false };
        if self.enter(&path).is_err() {
            self.unreadable += 1;
        }
        true
    }

    /// Regular files are opened, directories listed; links, devices and pipes are not content.
    fn enter(&mut self, path: &Path) -> io::Result<()> {
        let kind = fs::symlink_metadata(path)?.file_type();
        if kind.is_file() {
            self.open = Some(File::open(path)?);
        } else if kind.is_dir() {
            for entry in fs::read_dir(path)? {
                if self.pending.len() == MAX_DIRECTORIES {
                    self.unreadable += 1;
                    break;
                }
                self.pending.push(entry?.path());
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::{MemoryCheck, PagePlace};

    /// A guest of 100 MiB in which each look finds `step_kib` less free and available memory.
    fn shrinking(step_kib: u64) -> impl FnMut() -> io::Result<MemInfo> {
        let mut free = 60 * 1024;
        move || {
            free = u64::saturating_sub(free, step_kib);
            Ok(MemInfo { total_kib: 100 * 1024, free_kib: free, available_kib: free + 10 * 1024 })
        }
    }

    fn run(content: Option<&Path>, percent: u8, step_kib: u64) -> (WarmReport, Heap) {
        let mut heap = Heap::new();
        let report = warm(content, percent, 1, RunId(1), &mut heap, shrinking(step_kib)).unwrap();
        (report, heap)
    }

    #[test]
    fn heap_grows_until_the_share_is_reached_and_can_be_checked() {
        let (report, heap) = run(None, 50, 1024);
        assert_eq!((report.ended, report.heap_mib), (WarmEnd::Reached, 8));
        let mut check = MemoryCheck::default();
        heap.iter().for_each(|block| block.check(PagePlace::Heap {}, PagePlace::Heap {}, &mut check));
        assert_eq!((check.bad_count, check.pages_checked), (0, 8 * 257));
    }

    #[test]
    fn heap_ends_at_the_floor_of_available_memory() {
        let (report, _) = run(None, 0, 4096);
        assert_eq!(report.ended, WarmEnd::MemoryFloor);
    }

    #[test]
    fn heap_ends_when_it_only_displaces_page_cache() {
        let (report, _) = run(None, 10, 0);
        assert_eq!((report.ended, report.heap_mib), (WarmEnd::NoProgress, PATIENCE_MIB));
    }

    #[test]
    fn content_is_read_once_and_links_are_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("sub")).unwrap();
        fs::write(dir.path().join("a"), vec![1; READ_BYTES + 5]).unwrap();
        fs::write(dir.path().join("sub/b"), b"content").unwrap();
        std::os::unix::fs::symlink(dir.path(), dir.path().join("sub/loop")).unwrap();
        let (report, _) = run(Some(dir.path()), 0, 1024);
        assert_eq!((report.files_read, report.bytes_read, report.unreadable), (2, READ_BYTES as u64 + 12, 0));
        let (report, _) = run(Some(&dir.path().join("missing")), 100, 0);
        assert_eq!((report.files_read, report.ended), (0, WarmEnd::Reached));
        let (report, _) = run(Some(&dir.path().join("missing")), 50, 4096);
        assert_eq!(report.unreadable, 1);
    }
}
