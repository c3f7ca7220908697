//! The destination's end of a memory stream: what comes over the link is rebuilt and given to the incoming QEMU; what that
//! says on the return path goes back, its SHUT excepted.

use anyhow::{Context, Result};
use bytes::Bytes;
use godwit_memory::{Checkpoint, Decoder, Feedback};
use std::io::{ErrorKind, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::mpsc;

/// How much the decoder is given at once, and how long that may wait for more: its thread is woken for each.
pub const PIECE: usize = 64 << 10;
/// As [`PIECE`].
pub const GATHER: Duration = Duration::from_millis(1);
/// Pieces from the link that may wait for the decoder.
pub const PIECES: usize = 4;
/// What the decoder says that may wait for its way back. It says little, and what it asks for stops it.
pub const FEEDBACKS: usize = 16;

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
/// `back`.
///
/// # Errors
/// When the stream is damaged, or QEMU stops reading.
pub fn write(
    qemu: &UnixStream,
    mut decoder: Decoder,
    delivered: &Delivered,
    mut from: mpsc::Receiver<Bytes>,
    back: &mpsc::Sender<Feedback>,
) -> Result<()> {
    let mut out = Vec::with_capacity(1 << 20);
    let mut told = false;
    while let Some(piece) = from.blocking_recv() {
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
