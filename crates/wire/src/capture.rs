//! Frames as they pass a wire's port, for whoever looks for where they are lost.

use crate::wires::net;
use crate::{WireError, Wires};
use godwit_net::{NetError, PacketSocket};
use std::time::{Duration, SystemTime};
use tokio::time::{Instant, timeout_at};

/// How much is kept.
#[derive(Clone, Copy, Debug)]
pub struct CaptureBounds {
    /// For how long.
    pub lasting: Duration,
    /// Bytes of all frames together; what comes later is counted only.
    pub bytes: usize,
    /// Bytes of each frame, from its beginning.
    pub each: usize,
}

/// What passed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Captured {
    /// Frames, in their order.
    pub frames: Vec<CapturedFrame>,
    /// How many more there were.
    pub not_kept: u64,
}

/// A frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CapturedFrame {
    /// When it passed.
    pub at: SystemTime,
    /// How long it was, bytes. More than an MTU: the kernel had not cut it up yet.
    pub length: usize,
    /// Its beginning.
    pub head: Vec<u8>,
}

impl Captured {
    /// Bytes of all that is kept.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.frames.iter().map(|frame| frame.head.len()).sum()
    }

    /// What passed later.
    pub fn append(&mut self, later: Self) {
        self.frames.extend(later.frames);
        self.not_kept += later.not_kept;
    }
}

impl Wires {
    /// Records frames of both directions at `device`, a wire's port. It ends early when that is taken down or away.
    ///
    /// # Errors
    /// [`WireError::Net`], when there is no such interface.
    pub async fn capture(&self, device: &str, bounds: CaptureBounds) -> Result<Captured, WireError> {
        let failed = || net("capture at", device);
        let kernel = |source| NetError::Kernel { operation: "read frames of", object: device.to_owned(), source };
        let link = self.net().get(device).await.map_err(failed())?;
        let socket = PacketSocket::open_for_both_ways(link.index).map_err(failed())?;
        let end = Instant::now() + bounds.lasting;
        let (mut captured, mut bytes) = (Captured::default(), 0);
        let mut buffer = vec![0; bounds.each];
        while let Ok(got) = timeout_at(end, socket.receive(&mut buffer)).await {
            let length = match got {
                Ok(length) => length,
                Err(e) if e.kind() == std::io::ErrorKind::NetworkDown => break,
                Err(e) => return Err(failed()(kernel(e))),
            };
            let head = &buffer[..length.min(bounds.each)];
            bytes += head.len();
            if bytes > bounds.bytes {
                captured.not_kept += 1;
            } else {
                captured.frames.push(CapturedFrame { at: SystemTime::now(), length, head: head.to_vec() });
            }
            // A busy wire has always a frame more.
            if Instant::now() >= end {
                break;
            }
        }
        Ok(captured)
    }
}
