//! What of a file the page cache has.

use std::os::fd::{AsRawFd, BorrowedFd};

/// Bytes of a page.
const PAGE: u64 = 4096;

/// Its number, the same on every architecture; `libc` does not know it yet.
const CACHESTAT: libc::c_long = 451;

/// `struct cachestat_range`.
#[repr(C)]
struct Wanted {
    offset: u64,
    length: u64,
}

/// `struct cachestat`: counts of pages.
#[repr(C)]
#[derive(Default)]
struct Found {
    cached: u64,
    _dirty: u64,
    _writeback: u64,
    _evicted: u64,
    _recently_evicted: u64,
}

/// Whether all of this is in the page cache, or on its way there. Nothing is said by a kernel before 6.5, of a file that is not
/// there in pages, or of another's.
pub fn is_cached(file: BorrowedFd<'_>, offset: u64, length: u64) -> Option<bool> {
    if length == 0 {
        return Some(true);
    }
    let (wanted, mut found) = (Wanted { offset, length }, Found::default());
    // SAFETY: both are laid out as the kernel has them, and live until it returns.
    let failed = unsafe { libc::syscall(CACHESTAT, file.as_raw_fd(), &raw const wanted, &raw mut found, 0_u32) };
    let pages = (offset + length - 1) / PAGE - offset / PAGE + 1;
    (failed == 0).then_some(found.cached >= pages)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{Advice, fadvise};
    use std::os::fd::AsFd;
    use std::os::unix::fs::FileExt;

    #[test]
    fn what_was_written_is_cached_and_what_was_dropped_is_not() {
        // Not in memory, as /tmp may be.
        let file = tempfile::tempfile_in(env!("CARGO_MANIFEST_DIR")).expect("a file");
        file.write_all_at(&[1; 10 * PAGE as usize], 0).expect("writes");
        let cached = |offset, length| is_cached(file.as_fd(), offset, length);
        if cached(0, 1).is_none() {
            eprintln!("this kernel does not say what it has cached");
            return;
        }
        assert_eq!(cached(5, 10 * PAGE - 5), Some(true));
        file.sync_all().expect("syncs");
        fadvise(&file, 0, None, Advice::DontNeed).expect("drops");
        assert_eq!(cached(4 * PAGE - 1, 2), Some(false));
    }
}
