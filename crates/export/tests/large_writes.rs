//! Large writes of clients on this host: they go from the socket to their file by a pipe, and however that ends, what was written is there.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use godwit_export::{Answers, Backend, Plain, Put, Tracked, Untaken, Wire, serve};
use godwit_nbd::{Command, Cookie, Errno, Export, Reply};
use godwit_units::{Bytes, VolumeId};
use godwit_volume::Replica;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

const SIZE: u64 = 16 << 20;
/// What is written at once, mostly.
const LARGE: usize = 128 << 10;
/// More than a pipe holds.
const LONG: usize = 1 << 20;

/// What becomes of large writes.
const TAKEN: u8 = 0;
const UNTAKEN: u8 = 1;
const FAIL: u8 = 2;

/// Counts what goes past it, and what comes through.
struct Counted {
    inner: Box<dyn Backend>,
    how: AtomicU8,
    past: AtomicU64,
    through: AtomicU64,
    failed: AtomicU64,
    read_only: File,
    /// Up to here what is read is in memory; what lies behind has to be waited for.
    warm: AtomicU64,
    /// Whoever flushes waits for this, or writes what is to be durable.
    flushes: Mutex<()>,
    /// And whoever stores a large write for this.
    stores: Mutex<()>,
}

impl Backend for Counted {
    fn export(&self) -> Export {
        self.inner.export()
    }

    fn read_now(&self, offset: u64, into: &mut [u8]) -> usize {
        if offset + into.len() as u64 > self.warm.load(Ordering::SeqCst) {
            return 0;
        }
        self.inner.read_now(offset, into)
    }

    fn file_of(&self, offset: u64, length: u64) -> Option<BorrowedFd<'_>> {
        if offset + length > self.warm.load(Ordering::SeqCst) {
            return None;
        }
        self.inner.file_of(offset, length)
    }

    fn write_by(
        &self,
        cookie: Cookie,
        offset: u64,
        length: u32,
        answers: &Answers,
        put: Put<'_>,
    ) -> Result<Option<Reply>, Untaken> {
        match self.how.load(Ordering::SeqCst) {
            UNTAKEN => return Err(Untaken),
            FAIL => {
                // Half of it goes nowhere, and nothing takes the rest.
                let failed: io::Result<()> = put(self.read_only.as_fd(), offset);
                assert!(failed.is_err(), "a file that takes no writes took one");
                self.failed.fetch_add(1, Ordering::SeqCst);
                return Ok(Some(Reply::Error(Errno::Io)));
            }
            _ => {}
        }
        self.past.fetch_add(1, Ordering::SeqCst);
        drop(self.stores.lock());
        self.inner.write_by(cookie, offset, length, answers, put)
    }

    fn warm(&self, offset: u64, length: u64) {
        self.warm.fetch_max(offset + length, Ordering::SeqCst);
        self.inner.warm(offset, length);
    }

    fn perform(&self, cookie: Cookie, command: Command, answers: &Answers) -> Option<Reply> {
        if matches!(command, Command::Write { .. }) {
            self.through.fetch_add(1, Ordering::SeqCst);
        }
        if matches!(command, Command::Flush | Command::Write { fua: true, .. }) {
            drop(self.flushes.lock());
        }
        if matches!(command, Command::Flush) {
            // A disk that is written to meanwhile may take any time for it.
            return Some(Reply::Done);
        }
        self.inner.perform(cookie, command, answers)
    }
}

struct Client {
    folder: tempfile::TempDir,
    backend: Arc<Counted>,
    socket: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
    handle: u64,
    /// What the disk should be.
    model: Vec<u8>,
}

impl Client {
    fn new(tracked: bool) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk");
        File::create(&path).unwrap().set_len(SIZE).unwrap();
        let inner: Box<dyn Backend> =
            if tracked { Box::new(Tracked::open(&path).unwrap()) } else { Box::new(Plain::open(&path).unwrap()) };
        let read_only = File::open(&path).unwrap();
        let backend = Arc::new(Counted {
            inner,
            how: AtomicU8::new(TAKEN),
            past: AtomicU64::new(0),
            through: AtomicU64::new(0),
            failed: AtomicU64::new(0),
            read_only,
            warm: AtomicU64::new(SIZE),
            flushes: Mutex::default(),
            stores: Mutex::default(),
        });
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let served = backend.clone();
        let thread = std::thread::spawn(move || serve(Wire::new(ours.into()), served, None));
        // The greeting, and the export that has no name of its own: flags, the size, and more flags.
        theirs.read_exact(&mut [0; 18]).unwrap();
        theirs.write_all(&3_u32.to_be_bytes()).unwrap();
        let name = backend.export().name;
        theirs.write_all(&0x4948_4156_454f_5054_u64.to_be_bytes()).unwrap();
        theirs.write_all(&1_u32.to_be_bytes()).unwrap();
        theirs.write_all(&(name.len() as u32).to_be_bytes()).unwrap();
        theirs.write_all(name.as_bytes()).unwrap();
        theirs.read_exact(&mut [0; 10]).unwrap();
        let model = vec![0; SIZE as usize];
        Self { folder, backend, socket: Some(theirs), thread: Some(thread), handle: 0, model }
    }

    fn socket(&mut self) -> &mut UnixStream {
        self.socket.as_mut().unwrap()
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("disk")
    }

    fn head(&mut self, flags: u16, kind: u16, offset: u64, length: usize) -> Vec<u8> {
        self.handle += 1;
        let mut head = 0x2560_9513_u32.to_be_bytes().to_vec();
        head.extend(flags.to_be_bytes());
        head.extend(kind.to_be_bytes());
        head.extend(self.handle.to_be_bytes());
        head.extend(offset.to_be_bytes());
        head.extend((length as u32).to_be_bytes());
        head
    }

    /// The next answer: its error, and whose it is.
    fn answer(&mut self) -> (u32, u64) {
        let mut answer = [0; 16];
        self.socket().read_exact(&mut answer).unwrap();
        assert_eq!(answer[..4], 0x6744_6698_u32.to_be_bytes());
        let number = |bytes: &[u8]| bytes.iter().fold(0_u64, |n, byte| n << 8 | u64::from(*byte));
        (number(&answer[4..8]) as u32, number(&answer[8..]))
    }

    /// Whether neither an answer comes for a while, nor the end.
    fn hears_nothing(&mut self) -> bool {
        self.socket().set_read_timeout(Some(Duration::from_millis(200))).unwrap();
        let heard = self.socket().read(&mut [0]);
        self.socket().set_read_timeout(None).unwrap();
        heard.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
    }

    /// Writes in pieces of that many bytes; its error.
    fn write(&mut self, offset: u64, contents: &[u8], piece: usize) -> u32 {
        let mut all = self.head(0, 1, offset, contents.len());
        all.extend_from_slice(contents);
        for piece in all.chunks(piece) {
            self.socket().write_all(piece).unwrap();
        }
        let (error, whose) = self.answer();
        assert_eq!(whose, self.handle);
        if error == 0 {
            self.model[offset as usize..][..contents.len()].copy_from_slice(contents);
        }
        error
    }

    fn counts(&self) -> (u64, u64) {
        (self.backend.past.load(Ordering::SeqCst), self.backend.through.load(Ordering::SeqCst))
    }

    /// What is on the disk, as far as the model goes.
    fn found(&self) -> Vec<u8> {
        let mut found = vec![0; self.model.len()];
        File::open(self.path()).unwrap().read_exact_at(&mut found, 0).unwrap();
        found
    }

    fn is_as_written(&self) -> bool {
        self.found() == self.model
    }

    /// Closes the connection, and waits until the server has seen to all that came of it.
    fn leave(&mut self) {
        drop(self.socket.take());
        let Some(thread) = self.thread.take() else { return };
        let ended = thread.join();
        assert!(ended.is_ok() || std::thread::panicking());
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.leave();
    }
}

fn contents(seed: u32, length: usize) -> Vec<u8> {
    let mut x = seed | 1;
    let mut next = || {
        x ^= x << 13;
        x ^= x >> 17;
        x ^= x << 5;
        (x >> 8) as u8 | 1
    };
    (0..length).map(|_| next()).collect()
}

#[test]
fn what_comes_in_large_writes_is_in_the_file_however_it_comes() {
    for tracked in [false, true] {
        let mut client = Client::new(tracked);
        for (n, piece) in (0_u32..).zip([LARGE * 2, LARGE * 2, 50_000, 7001, 28, 540, 29, 600, 4000]) {
            let length = LARGE + (n as usize % 3) * 1000;
            assert_eq!(client.write(u64::from(n) * 300_001, &contents(n, length), piece.max(28)), 0);
            // Something small is between them now and then.
            if n % 4 == 3 {
                assert_eq!(client.write(u64::from(n), &contents(n, 5000), 6000), 0);
            }
        }
        let (past, through) = client.counts();
        assert!(past >= 3, "{past} of 9 went past, {through} came through");
        assert!(client.is_as_written(), "tracked: {tracked}");
    }
}

#[test]
fn what_is_longer_than_a_pipe_is_stored_in_parts_however_it_comes() {
    for tracked in [false, true] {
        let mut client = Client::new(tracked);
        assert_eq!(client.write(0, &contents(1, LARGE), LARGE * 2), 0);
        let before = client.counts().0;
        for (n, piece) in (0_u32..).zip([LONG * 2, LONG * 2, 300_000, 7001, 50_000, LONG * 2, 540, LONG * 2]) {
            let length = LONG + (n as usize % 3) * 77_777;
            // On a block, and beside one.
            let offset = u64::from(n) * 1_200_000 / 4096 * 4096 + u64::from(n % 2) * 513;
            assert_eq!(client.write(offset, &contents(n, length), piece), 0);
            assert_eq!(client.write(u64::from(n), &contents(n, 5000), 6000), 0);
            assert_eq!(client.write(8192, &contents(n + 50, LARGE), LARGE * 2), 0, "what follows is large as well");
        }
        assert!(client.counts().0 - before >= 20, "{:?}", client.counts());
        assert!(client.is_as_written(), "tracked: {tracked}");
    }
}

#[test]
fn a_long_write_of_which_a_part_fails_fails_once() {
    let mut client = Client::new(false);
    assert_eq!(client.write(0, &contents(1, LARGE), LARGE * 2), 0);
    // The first parts go nowhere, the last one arrives.
    client.backend.how.store(FAIL, Ordering::SeqCst);
    let (mut head, written) = (client.head(0, 1, LONG as u64, LONG), contents(2, LONG));
    head.extend_from_slice(&written[..LONG / 2]);
    client.socket().write_all(&head).unwrap();
    while client.backend.failed.load(Ordering::SeqCst) == 0 {
        std::thread::yield_now();
    }
    client.backend.how.store(TAKEN, Ordering::SeqCst);
    client.socket().write_all(&written[LONG / 2..]).unwrap();
    assert_eq!(client.answer(), (5, client.handle));
    for n in 4..9 {
        assert_eq!(client.write(n * LONG as u64, &contents(n as u32, LONG), LONG * 2), 0, "the next one is another");
    }
    client.model.truncate(LONG);
    assert!(client.is_as_written(), "what was before it is as it was");
}

#[test]
fn who_leaves_in_the_middle_of_a_long_write_leaves_no_block_half_written() {
    let mut client = Client::new(true);
    let before = contents(1, LONG * 2);
    assert_eq!(client.write(0, &before[..LARGE], LARGE * 2), 0);
    assert_eq!(client.write(0, &before, LONG * 3), 0);
    // It begins in the middle of a block, as a client may that does not care.
    let (begin, written) = (10_000, contents(2, LONG));
    let mut all = client.head(0, 1, begin as u64, LONG);
    all.extend_from_slice(&written[..LONG - 100]);
    client.socket().write_all(&all).unwrap();
    client.leave();
    let (before, found) = (client.model.clone(), client.found());
    let mut after = before.clone();
    after[begin..begin + LONG].copy_from_slice(&written);
    let block = |of: &[u8], n: usize| of[n * 4096..][..4096].to_vec();
    let stored = (0..found.len() / 4096).filter(|n| block(&found, *n) != block(&before, *n)).collect::<Vec<_>>();
    assert!(stored.iter().all(|n| block(&found, *n) == block(&after, *n)), "a block is as before or as written");
    assert!(stored.contains(&2) && !stored.contains(&((begin + LONG - 1) / 4096)), "{stored:?}");
}

#[test]
fn several_under_way_are_answered_each_and_the_last_one_to_come_is_what_stays() {
    let mut client = Client::new(true);
    let mut all = vec![];
    for n in 0..40_u32 {
        let (offset, contents) = (u64::from(n % 8) * LARGE as u64, contents(n + 1, LARGE));
        all.extend(client.head(0, 1, offset, LARGE));
        all.extend_from_slice(&contents);
        client.model[offset as usize..][..LARGE].copy_from_slice(&contents);
    }
    let mut socket = client.socket().try_clone().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(move || socket.write_all(&all).unwrap());
        let mut answered: Vec<u64> = (0..40)
            .map(|_| {
                let (error, whose) = client.answer();
                assert_eq!(error, 0);
                whose
            })
            .collect();
        answered.sort_unstable();
        assert_eq!(answered, (1..=40).collect::<Vec<_>>());
    });
    assert!(client.is_as_written());
    assert!(client.counts().0 > 10, "{:?}", client.counts());
}

#[test]
fn what_comes_behind_a_large_write_is_done_after_it() {
    let mut client = Client::new(true);
    assert_eq!(client.write(0, &contents(1, LARGE), LARGE * 2), 0);
    for n in 2..30_u32 {
        // Both at once, and the second overwrites a part of the first.
        let (first, second) = (contents(n, LARGE), contents(n + 100, 4096));
        let mut all = client.head(0, 1, 0, LARGE);
        all.extend_from_slice(&first);
        all.extend(client.head(0, 1, 8192, 4096));
        all.extend_from_slice(&second);
        client.socket().write_all(&all).unwrap();
        assert_eq!((client.answer().0, client.answer().0), (0, 0));
        client.model[..LARGE].copy_from_slice(&first);
        client.model[8192..][..4096].copy_from_slice(&second);
        assert!(client.is_as_written(), "{n}");
        assert_eq!(client.write(400_000, &contents(n, LARGE), LARGE * 2), 0);
    }
    assert!(client.counts().0 > 10, "{:?}", client.counts());
}

#[test]
fn zeroes_are_seen_and_leave_holes() {
    let mut client = Client::new(true);
    for n in 0..4 {
        assert_eq!(client.write(n * LARGE as u64, &contents(n as u32, LARGE), LARGE * 2), 0);
    }
    let blocks = || std::fs::metadata(client.path()).unwrap().blocks();
    let before = blocks();
    for n in 0..4 {
        assert_eq!(client.write((n + 32) * LARGE as u64, &vec![0; LARGE], LARGE * 2), 0);
    }
    assert_eq!(std::fs::metadata(client.path()).unwrap().blocks(), before, "holes take no room");
    assert!(client.is_as_written());
}

#[test]
fn what_is_not_taken_comes_with_its_contents() {
    let mut client = Client::new(false);
    assert_eq!(client.write(0, &contents(1, LARGE), LARGE * 2), 0);
    client.backend.how.store(UNTAKEN, Ordering::SeqCst);
    for n in 1..5 {
        assert_eq!(client.write(n * 200_000, &contents(n as u32, LARGE), LARGE * 2), 0);
    }
    assert_eq!(client.counts(), (0, 5));
    assert!(client.is_as_written());
}

#[test]
fn after_a_write_that_failed_the_next_ones_are_what_they_are() {
    let mut client = Client::new(false);
    assert_eq!(client.write(0, &contents(1, LARGE), LARGE * 2), 0);
    client.backend.how.store(FAIL, Ordering::SeqCst);
    assert_eq!(client.write(0, &contents(2, LARGE), LARGE * 2), 5);
    assert_eq!(client.write(0, &contents(3, LARGE), LARGE * 2), 5);
    client.backend.how.store(TAKEN, Ordering::SeqCst);
    for n in 1..5 {
        assert_eq!(client.write(n * 200_000, &contents(n as u32 + 3, LARGE), LARGE * 2), 0);
    }
    assert!(client.counts().0 >= 3, "{:?}", client.counts());
    assert!(client.is_as_written());
}

#[test]
fn what_comes_in_too_many_pieces_for_a_pipe_is_copied() {
    let mut client = Client::new(false);
    assert_eq!(client.write(0, &contents(1, LARGE), LARGE * 2), 0);
    for n in 1..4 {
        assert_eq!(client.write(n * 200_000, &contents(n as u32, LARGE), 100), 0);
    }
    assert!(client.is_as_written());
    assert_eq!(client.write(SIZE - LARGE as u64, &contents(9, LARGE), LARGE * 2), 0);
    assert!(client.is_as_written());
}

#[test]
fn a_client_may_leave_in_the_middle_and_one_that_wants_it_durable_is_heard() {
    let mut client = Client::new(true);
    assert_eq!(client.write(0, &contents(1, LARGE), LARGE * 2), 0);
    // FUA: done by somebody who waits for the disk.
    let mut all = client.head(1, 1, 400_000, LARGE);
    let durable = contents(2, LARGE);
    all.extend_from_slice(&durable);
    client.socket().write_all(&all).unwrap();
    assert_eq!(client.answer().0, 0);
    client.model[400_000..][..LARGE].copy_from_slice(&durable);
    assert_eq!(client.counts(), (0, 2));
    // One that came whole, and half of another.
    let (whole, mut all) = (contents(4, LARGE), client.head(0, 1, 600_000, LARGE));
    all.extend_from_slice(&whole);
    client.model[600_000..][..LARGE].copy_from_slice(&whole);
    all.extend(client.head(0, 1, 800_000, LARGE));
    all.extend(contents(3, LARGE / 2));
    client.socket().write_all(&all).unwrap();
    client.leave();
    assert!(client.is_as_written(), "half a write is none");
}

#[test]
fn what_came_whole_is_stored_though_nobody_takes_the_answers() {
    // Two of them fit into a socket.
    const LENGTH: usize = 70 << 10;
    let mut client = Client::new(true);
    assert_eq!(client.write(0, &contents(1, LARGE), LARGE * 2), 0);
    let mut all = vec![];
    for n in 1..3_u32 {
        let (offset, contents) = (u64::from(n) * LARGE as u64, contents(n, LENGTH));
        all.extend(client.head(0, 1, offset, LENGTH));
        all.extend_from_slice(&contents);
        client.model[offset as usize..][..LENGTH].copy_from_slice(&contents);
    }
    let (backend, before) = (client.backend.clone(), client.counts().0);
    let held = backend.stores.lock().unwrap();
    client.socket().write_all(&all).unwrap();
    // The first is being stored, so the second was taken.
    while client.counts().0 == before {
        std::thread::yield_now();
    }
    drop(client.socket.take());
    drop(held);
    client.leave();
    assert!(client.is_as_written());
}

#[test]
fn who_writes_without_a_break_hears_of_its_flush_all_the_same() {
    const WRITES: usize = 300;
    let mut client = Client::new(true);
    assert_eq!(client.write(0, &contents(1, LARGE), LARGE * 2), 0);
    let backend = client.backend.clone();
    let held = backend.flushes.lock().unwrap();
    let flush = client.head(0, 3, 0, 0);
    let flushed = client.handle;
    client.socket().write_all(&flush).unwrap();
    let (one, heads) = (contents(2, LONG), (0..WRITES).map(|_| client.head(0, 1, 0, LONG)).collect::<Vec<_>>());
    let mut socket = client.socket().try_clone().unwrap();
    // More than the server stores while the client makes the next one. For root alone it is so much.
    let _ = rustix::net::sockopt::set_socket_send_buffer_size_force(&socket, 8 << 20);
    std::thread::scope(|scope| {
        scope.spawn(move || {
            for head in heads {
                socket.write_all(&[&head[..], &one].concat()).unwrap();
            }
        });
        let before = (0..20).map(|_| client.answer().1).collect::<Vec<_>>();
        assert!(!before.contains(&flushed), "nobody has flushed yet");
        drop(held);
        let after = (20..=WRITES).map(|_| client.answer().1).collect::<Vec<_>>();
        let when = after.iter().position(|whose| *whose == flushed).unwrap();
        assert!(when < WRITES - 50, "it was the {when}th of {} answers", after.len());
    });
}

#[test]
fn requests_behind_all_that_may_be_under_way_are_not_forgotten_when_these_are_answered_at_once() {
    let mut client = Client::new(false);
    client.socket().set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    client.backend.warm.store(0, Ordering::SeqCst);
    // In order, so that no other thread waits for the disk.
    let (reads, length) = (godwit_nbd::MAX_IN_FLIGHT + 2, 64 << 10);
    let all = (0..reads).flat_map(|n| client.head(0, 0, (n * length) as u64, length)).collect::<Vec<_>>();
    client.socket().write_all(&all).unwrap();
    for n in 1..=reads as u64 {
        assert_eq!(client.answer(), (0, n));
        client.socket().read_exact(&mut vec![0; length]).unwrap();
    }
}

#[test]
fn who_takes_his_leave_is_answered_first() {
    let mut client = Client::new(true);
    assert_eq!(client.write(0, &contents(1, LARGE), LARGE * 2), 0, "the next one is large as well, and goes by a pipe");
    let backend = client.backend.clone();
    let disk = backend.flushes.lock().unwrap();
    let new = contents(2, LARGE);
    let mut all = client.head(0, 3, 0, 0);
    all.extend(client.head(0, 1, 0, LARGE));
    all.extend(&new);
    all.extend(client.head(0, 2, 0, 0));
    client.socket().write_all(&all).unwrap();
    assert_eq!(client.answer(), (0, 3), "the write, which waits for nothing");
    drop(disk);
    assert_eq!(client.answer(), (0, 2), "the flush");
    assert_eq!(client.socket().read(&mut [0]).unwrap(), 0, "and then the end");
    client.model[..LARGE].copy_from_slice(&new);
    assert!(client.is_as_written());
}

#[test]
fn who_says_that_no_more_comes_is_answered_while_it_listens() {
    let mut client = Client::new(false);
    let backend = client.backend.clone();
    let disk = backend.flushes.lock().unwrap();
    let flush = client.head(0, 3, 0, 0);
    client.socket().write_all(&flush).unwrap();
    client.socket().shutdown(std::net::Shutdown::Write).unwrap();
    assert!(client.hears_nothing(), "it is let go of with its flush under way");
    drop(disk);
    assert_eq!(client.answer(), (0, 1));
    assert_eq!(client.socket().read(&mut [0]).unwrap(), 0, "and then the end");
}

#[test]
fn who_is_cut_off_sees_the_end_when_what_it_wrote_is_there() {
    let mut client = Client::new(false);
    let backend = client.backend.clone();
    let disk = backend.flushes.lock().unwrap();
    // A write that somebody else makes, and behind it what is no request.
    let new = contents(1, 4096);
    let mut all = client.head(1, 1, 0, new.len());
    all.extend(&new);
    all.extend([7; 28]);
    client.socket().write_all(&all).unwrap();
    assert!(client.hears_nothing(), "it could write the same place by another connection now");
    drop(disk);
    assert_eq!(client.socket().read(&mut [0]).unwrap(), 0, "the end");
    client.model[..new.len()].copy_from_slice(&new);
    assert!(client.is_as_written());
}

#[test]
fn a_raw_file_whose_first_stamping_was_interrupted_is_stamped_by_the_next() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk");
    std::fs::write(&path, contents(1, 64 << 10)).unwrap();
    let beside = Tracked::folder_beside(&path);
    let stamped = || {
        let (replica, _) = Replica::open_beside(&beside, &path).unwrap();
        replica.stamp_runs().unwrap().iter().map(|(run, _)| run.end - run.start).sum::<u64>()
    };
    // Killed as soon as it had made its folder, and before that when it was opened again.
    Replica::create_beside(&beside, VolumeId(0), Bytes(64 << 10)).unwrap();
    drop(Replica::open_beside(&beside, &path).unwrap());
    assert_eq!(stamped(), 0);
    Tracked::open(&path).unwrap().close().unwrap();
    assert_eq!(stamped(), 16);

    // Killed while it stamped a file that another program had written to since.
    let note = beside.join("seen");
    assert!(note.exists());
    let before = {
        let (replica, _) = Replica::open_beside(&beside, &path).unwrap();
        let before = replica.stamp_runs().unwrap();
        replica.close().unwrap();
        before
    };
    std::fs::remove_file(&note).unwrap();
    drop(Replica::open_beside(&beside, &path).unwrap());
    Tracked::open(&path).unwrap().close().unwrap();
    let (replica, _) = Replica::open_beside(&beside, &path).unwrap();
    assert_ne!(replica.stamp_runs().unwrap(), before, "all of it has another stamp");
}
