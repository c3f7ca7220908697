//! The destination's end of a memory stream: what comes over the link is rebuilt and given to the incoming QEMU; what that
//! says on the return path goes back, its SHUT excepted.

use anyhow::{Context, Result};
use bytes::Bytes;
use godwit_memory::{Checkpoint, Decoder, Feedback};
use std::io::{ErrorKind, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

/// How much the decoder is given at once, and how long that may wait for more: its thread is woken for each.
pub const PIECE: usize = 64 << 10;
/// As [`PIECE`].
pub const GATHER: Duration = Duration::from_millis(1);
/// Pieces from the link that may wait for the decoder.
pub const PIECES: usize = 4;
/// What the decoder says that may wait for its way back. It says little, and what it asks for stops it.
pub const FEEDBACKS: usize = 16;

/// For how long of a stream nothing is kept for another try, unless it breaks off: that costs a move over a fast link a seventh of its time where
/// processors are few, and a try after this process was killed brings it again in as long.
const KEPT_AFTER: Duration = Duration::from_secs(5);

/// How much of the rebuilt stream was given to QEMU, and how much of that was verified against the source's digest.
#[derive(Debug, Default)]
pub struct Delivered {
    given: AtomicU64,
    verified: AtomicU64,
}

impl Delivered {
    /// How much QEMU was given.
    #[must_use]
    pub fn given(&self) -> u64 {
        self.given.load(Ordering::Acquire)
    }

    /// Whether the first so many bytes are what the source meant.
    #[must_use]
    pub fn is_verified_to(&self, bytes: u64) -> bool {
        self.verified.load(Ordering::Acquire) >= bytes
    }

    /// Whether every byte that QEMU was given is what the source meant. Not before the first.
    #[must_use]
    pub fn is_verified(&self) -> bool {
        let given = self.given.load(Ordering::Acquire);
        given > 0 && given == self.verified.load(Ordering::Acquire)
    }
}

/// Rebuilds the stream for QEMU until the link's side ends; on a thread of its own. What the decoder has to say to the encoder goes to
/// `back`. Pages are kept for another try by yet another thread, which has ended when this returns, however it does: whoever calls keeps others
/// from the file until then.
///
/// # Errors
/// When the stream is damaged, or QEMU stops reading.
pub fn write(
    qemu: &UnixStream,
    mut decoder: Decoder,
    delivered: &Delivered,
    from: mpsc::Receiver<Bytes>,
    back: &mpsc::Sender<Feedback>,
) -> Result<()> {
    let writer = decoder.keep_beside();
    std::thread::scope(|scope| {
        let beside = writer.map(|writer| {
            let thread = std::thread::Builder::new().name("kept pages".into());
            // A writer that is not run keeps nothing, and the decoder hears so.
            thread.spawn_scoped(scope, move || writer.run())
        });
        // With the decoder goes what the writer waits for.
        let result = rebuild(qemu, decoder, delivered, from, back);
        if let Some(Ok(thread)) = beside
            && thread.join().is_err()
        {
            tracing::error!("what writes pages for another try panicked");
        }
        result
    })
}

fn rebuild(
    qemu: &UnixStream,
    mut decoder: Decoder,
    delivered: &Delivered,
    mut from: mpsc::Receiver<Bytes>,
    back: &mpsc::Sender<Feedback>,
) -> Result<()> {
    let mut out = Vec::with_capacity(1 << 20);
    let (mut told, mut began) = (false, None);
    while let Some(piece) = from.blocking_recv() {
        if began.get_or_insert_with(Instant::now).elapsed() >= KEPT_AFTER {
            decoder.keep_now();
        }
        let mut rest = &piece[..];
        let mut more = true;
        // A few bytes may mean a great many pages: no more is made at once than QEMU takes at once.
        while more || !rest.is_empty() {
            more = decoder.push_some(&mut rest, &mut out)?;
            while let Some(feedback) = decoder.feedback() {
                // Nobody takes it any more: the move ends.
                let _ = back.blocking_send(feedback);
            }
            let decoded = decoder.decoded();
            // Counted before QEMU can act upon it: it may finish loading at once.
            delivered.given.store(decoded.rebuilt_bytes, Ordering::Release);
            delivered.verified.store(decoded.verified_bytes, Ordering::Release);
            write_all(qemu, &out).context("the incoming QEMU does not read its stream any more")?;
            out.clear();
        }
        if let Some(error) = decoder.checkpoint().and_then(Checkpoint::trouble).filter(|_| !told) {
            tracing::warn!(%error, "no more pages are kept for another try");
            told = true;
        }
    }
    Ok(())
}

/// The socket does not block, because its other direction is a task's; so this waits for room itself.
fn write_all(mut socket: &UnixStream, mut bytes: &[u8]) -> std::io::Result<()> {
    use rustix::event::{PollFd, PollFlags, poll};
    while !bytes.is_empty() {
        match socket.write(bytes) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(n) => bytes = &bytes[n..],
            Err(e) if e.kind() == ErrorKind::WouldBlock => {
                match poll(&mut [PollFd::new(&socket, PollFlags::OUT)], None) {
                    Ok(_) | Err(rustix::io::Errno::INTR) => {}
                    Err(e) => return Err(e.into()),
                }
            }
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use godwit_memory::{CheckpointKey, Config, Encoder, Limits, PAGE_SIZE};

    const PAGES: u64 = 40;

    /// The beginning of a migration stream: RAM's blocks, and a section with pages.
    fn stream() -> Vec<u8> {
        let mut raw = b"QEVM\0\0\0\x03\x01\0\0\0\x02\x03ram\0\0\0\0\0\0\0\x04".to_vec();
        let (size, end) = (PAGES * PAGE_SIZE as u64, b"\0\0\0\0\0\0\0\x10\x7e\0\0\0\x02");
        raw.extend_from_slice(&(size | 4).to_be_bytes());
        raw.extend_from_slice(b"\x03ram");
        raw.extend_from_slice(&size.to_be_bytes());
        raw.extend_from_slice(end);
        raw.extend_from_slice(b"\x02\0\0\0\x02");
        for page in 0..PAGES {
            raw.extend_from_slice(&(page << 12 | 8).to_be_bytes());
            raw.extend_from_slice(b"\x03ram");
            raw.extend_from_slice(&[page as u8 + 1; PAGE_SIZE]);
        }
        raw.extend_from_slice(end);
        raw
    }

    #[test]
    fn what_came_of_a_stream_that_broke_off_is_in_the_file_when_its_writer_is_done() {
        let folder = tempfile::tempdir().expect("a folder");
        let (path, key) = (folder.path().join("checkpoint"), CheckpointKey([3; 32]));
        let limits = Limits { window_log: 20, max_ram: 1 << 30, ..Limits::default() };
        let mut encoder =
            Encoder::new(Config { window_log: 20, max_ram: 1 << 30, ..Config::default() }).expect("begins");
        let mut wire = vec![];
        encoder.push(&stream(), &mut wire).expect("takes it");
        encoder.flush(&mut wire).expect("flushes");
        let (ours, mut theirs) = UnixStream::pair().expect("sockets");
        let qemu = std::thread::spawn(move || std::io::copy(&mut theirs, &mut std::io::sink()).expect("reads"));
        let (sender, from) = mpsc::channel::<Bytes>(1);
        sender.blocking_send(wire.into()).expect("there is room");
        drop(sender);
        let checkpoint = Checkpoint::open(&path, &key).expect("opens");
        let decoder = Decoder::new(limits).expect("begins").with_checkpoint(checkpoint);
        let delivered = Delivered::default();
        write(&ours, decoder, &delivered, from, &mpsc::channel(FEEDBACKS).0).expect("is in order");
        let held = Checkpoint::open(&path, &key).expect("opens").holding(&|| true).expect("reads").expect("is wanted");
        assert_eq!(held.pages(), PAGES);
        drop(ours);
        assert_eq!(qemu.join().expect("ends"), delivered.given());
    }
}
