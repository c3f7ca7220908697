//! Contents that go from the page cache to a socket without being copied: a pipe holds the cache's own pages. And contents that go from
//! a socket into the page cache with one copy instead of two: a pipe holds what the socket held.
//!
//! *What is first.* All that an answer needs is in the pipe before any of it is sent, so that an error of the disk is found while it
//! can still be told, or the answer be made otherwise. Then the pipe is thrown away with what is in it.
//!
//! *What is sent is what the page holds when the client takes it.* A client that writes to what it is reading is told no more by
//! the protocol either.
//!
//! *What comes lies in more pieces than a pipe has places.* The pipe is emptied by a copy, and the rest received as ever.

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
        self.put(before)?;
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

    /// Bytes in it.
    pub const fn holds(&self) -> usize {
        self.holds
    }

    /// Puts the beginning of what follows into it, at most [`MOST_BEFORE`] bytes, when it is empty.
    pub fn begin(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.put(bytes)?;
        self.holds = bytes.len();
        Ok(())
    }

    fn put(&self, bytes: &[u8]) -> io::Result<()> {
        let all = rustix::io::write(&self.to, bytes)? == bytes.len();
        all.then_some(()).ok_or_else(|| io::ErrorKind::WriteZero.into())
    }

    /// Takes what a socket has, at most so much, and waits for nothing: how many bytes, 0 at its end. None: it has nothing, or there is no
    /// room.
    pub fn take(&mut self, socket: BorrowedFd<'_>, most: usize) -> io::Result<Option<usize>> {
        match rustix::io::retry_on_intr(|| splice(socket, None, &self.to, None, most, SpliceFlags::NONBLOCK)) {
            Ok(taken) => {
                self.holds += taken;
                Ok(Some(taken))
            }
            Err(rustix::io::Errno::AGAIN) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Writes all of it into a file. On failure the pipe is of no use any more.
    pub fn store(&mut self, file: BorrowedFd<'_>, mut offset: u64) -> io::Result<()> {
        while self.holds > 0 {
            let (how, from) = (SpliceFlags::empty(), self.from.as_fd());
            let stored = rustix::io::retry_on_intr(|| splice(from, None, file, Some(&mut offset), self.holds, how))?;
            if stored == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
            self.holds -= stored;
        }
        Ok(())
    }

    /// Empties it: a copy of all that was in it.
    pub fn spill(&mut self) -> io::Result<Vec<u8>> {
        let (mut all, mut filled) = (vec![0; self.holds], 0);
        while filled < all.len() {
            let read = rustix::io::retry_on_intr(|| rustix::io::read(&self.from, &mut all[filled..]))?;
            if read == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            filled += read;
        }
        self.holds = 0;
        Ok(all)
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
    use std::io::{Read, Write};
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
    fn what_a_socket_has_is_stored_in_a_file_however_it_came() {
        let contents: Vec<u8> = (0..200_000_u32).map(|i| (i.wrapping_mul(i) >> 7) as u8).collect();
        let file = tempfile::tempfile().expect("a file");
        let (ours, mut theirs) = UnixStream::pair().expect("sockets");
        let mut pipe = Pipe::new().expect("a pipe");
        for (begun, piece, offset) in [(0, 65_536, 0), (512, 7001, 4095), (MOST_BEFORE, 50_000, 1 << 20)] {
            pipe.begin(&contents[..begun]).expect("begins");
            assert!(pipe.take(ours.as_fd(), 1).expect("asks").is_none(), "nothing has come");
            for piece in contents[begun..].chunks(piece) {
                theirs.write_all(piece).expect("sends");
                let mut left = piece.len();
                while left > 0 {
                    left -= pipe.take(ours.as_fd(), left).expect("takes").expect("there is something");
                }
            }
            assert_eq!(pipe.holds(), contents.len());
            pipe.store(file.as_fd(), offset).expect("stores");
            let mut stored = vec![0; contents.len()];
            file.read_exact_at(&mut stored, offset).expect("reads");
            assert!(stored == contents && pipe.holds() == 0);
        }
        drop(theirs);
        assert_eq!(pipe.take(ours.as_fd(), 1).expect("asks"), Some(0), "the end");
    }

    #[test]
    fn what_comes_in_more_pieces_than_there_are_places_is_spilled() {
        let (ours, mut theirs) = UnixStream::pair().expect("sockets");
        let mut pipe = Pipe::new().expect("a pipe");
        let mut sent = vec![];
        // Each message of its own, of which a socket holds some hundreds.
        while sent.len() < 10_000 {
            let one = [sent.len() as u8; 3];
            theirs.write_all(&one).expect("sends");
            sent.extend(one);
            if pipe.take(ours.as_fd(), 3).expect("takes").is_none() {
                break;
            }
        }
        assert!(sent.len() < 10_000, "no pipe is that large");
        assert_eq!(pipe.spill().expect("reads"), sent[..sent.len() - 3]);
        assert_eq!(pipe.take(ours.as_fd(), 3).expect("takes"), Some(3), "there is room again");
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
