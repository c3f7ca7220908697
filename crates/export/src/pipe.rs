//! Contents that go from the page cache to a socket without being copied: a pipe holds the cache's own pages.
//!
//! *What is first.* All that an answer needs is in the pipe before any of it is sent, so that an error of the disk is found while it
//! can still be told, or the answer be made otherwise. Then the pipe is thrown away with what is in it.
//!
//! *What is sent is what the page holds when the client takes it.* A client that writes to what it is reading is told no more by
//! the protocol either.

use rustix::pipe::{PipeFlags, SpliceFlags, fcntl_getpipe_size, fcntl_setpipe_size, pipe_with, splice};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// What a pipe is asked to hold, in bytes: a place for each page.
const ROOM: usize = 512 << 10;
/// Bytes of a page, as pipes count.
const PAGE: usize = 4096;

/// What may go before contents: it is copied, and has a page of its own.
pub const MOST_BEFORE: usize = PAGE;

/// A pipe, empty between any two calls of its owner's.
#[derive(Debug)]
pub struct Pipe {
    from: OwnedFd,
    to: OwnedFd,
    places: usize,
    holds: usize,
}

impl Pipe {
    pub fn new() -> io::Result<Self> {
        let (from, to) = pipe_with(PipeFlags::CLOEXEC)?;
        // A user may have only so many large ones; a small one does, too.
        let size = fcntl_setpipe_size(&to, ROOM).or_else(|_| fcntl_getpipe_size(&to))?;
        Ok(Self { from, to, places: size / PAGE, holds: 0 })
    }

    /// Bytes of contents that are sure to fit. They have half of the places: what goes before them takes one, and so do pages at
    /// both ends of which there is only a part.
    pub const fn most(&self) -> u32 {
        (self.places / 2 * PAGE) as u32
    }

    /// Puts `before` into it, at most [`MOST_BEFORE`] bytes, and `length` bytes of a file. On failure the pipe is of no use any more.
    pub fn load(&mut self, before: &[u8], file: BorrowedFd<'_>, mut offset: u64, length: u32) -> io::Result<()> {
        if rustix::io::write(&self.to, before)? != before.len() {
            return Err(io::ErrorKind::WriteZero.into());
        }
        let end = offset + u64::from(length);
        while offset < end {
            let left = usize::try_from(end - offset).unwrap_or(0);
            // Never waits for room: the caller has seen to it that there is some.
            let how = SpliceFlags::NONBLOCK;
            if rustix::io::retry_on_intr(|| splice(file, Some(&mut offset), &self.to, None, left, how))? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        self.holds = before.len() + length as usize;
        Ok(())
    }

    /// Sends what is in it.
    pub fn send(&mut self, socket: BorrowedFd<'_>) -> io::Result<()> {
        while self.holds > 0 {
            let how = SpliceFlags::empty();
            let sent = rustix::io::retry_on_intr(|| splice(self.from.as_fd(), None, socket, None, self.holds, how))?;
            if sent == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
            self.holds -= sent;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::os::unix::fs::FileExt;
    use std::os::unix::net::UnixStream;

    #[test]
    fn what_goes_before_and_all_of_the_contents_arrive_in_order_however_they_lie_in_pages() {
        let file = tempfile::tempfile().expect("a file");
        let contents: Vec<u8> = (0..1_000_000_u32).map(|i| (i.wrapping_mul(i) >> 7) as u8).collect();
        file.write_all_at(&contents, 0).expect("writes");
        let (ours, mut theirs) = UnixStream::pair().expect("sockets");
        let mut pipe = Pipe::new().expect("a pipe");
        let most = pipe.most();
        for (before, offset, length) in [(0, 0, most), (MOST_BEFORE, 4095, most), (28, 999_999, 1), (1, 77, 70_000)] {
            let before = vec![before as u8; before];
            pipe.load(&before, file.as_fd(), offset, length).expect("loads");
            let mut come = vec![0; before.len() + length as usize];
            std::thread::scope(|scope| {
                scope.spawn(|| pipe.send(ours.as_fd()).expect("sends"));
                theirs.read_exact(&mut come).expect("receives");
            });
            assert!(
                come.starts_with(&before) && come[before.len()..] == contents[offset as usize..][..length as usize]
            );
        }
    }

    #[test]
    fn a_file_that_has_become_too_short_is_found_before_anything_is_sent() {
        let file = tempfile::tempfile().expect("a file");
        file.set_len(10_000).expect("a size");
        let mut pipe = Pipe::new().expect("a pipe");
        assert!(pipe.load(b"before", file.as_fd(), 5000, 5001).is_err());
        let (ours, theirs) = UnixStream::pair().expect("sockets");
        pipe.send(ours.as_fd()).expect("has nothing to send");
        drop(ours);
        assert_eq!((&theirs).read(&mut [0]).expect("the end"), 0);
    }
}
