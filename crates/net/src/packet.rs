//! Raw frames on one interface.

use crate::{LinkIndex, NetError};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use tokio::io::unix::AsyncFd;

/// Sends and receives whole frames on one interface. What this host itself sends is not received.
#[derive(Debug)]
pub struct PacketSocket(AsyncFd<OwnedFd>);

/// What becomes of frames that this host sends.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Outgoing {
    Ignored,
    Received,
}

impl PacketSocket {
    /// Opens one on the interface `index`; within a tokio runtime.
    ///
    /// # Errors
    /// [`NetError::Kernel`]: rights (CAP_NET_RAW), or the interface is gone.
    pub fn open(index: LinkIndex) -> Result<Self, NetError> {
        Self::open_for(index, Outgoing::Ignored)
    }

    /// As [`PacketSocket::open`], and receives what this host sends there, too.
    ///
    /// # Errors
    /// As [`PacketSocket::open`].
    pub fn open_for_both_ways(index: LinkIndex) -> Result<Self, NetError> {
        Self::open_for(index, Outgoing::Received)
    }

    fn open_for(index: LinkIndex, outgoing: Outgoing) -> Result<Self, NetError> {
        let failed =
            |source| NetError::Kernel { operation: "open raw socket on", object: format!("#{}", index.0), source };
        // Protocol 0: nothing arrives before the socket is bound, so nothing of another interface ever does.
        let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        // SAFETY: takes integers only.
        let raw = unsafe { libc::socket(libc::AF_PACKET, kind, 0) };
        if raw < 0 {
            return Err(failed(io::Error::last_os_error()));
        }
        // SAFETY: `raw` was just opened and belongs to nobody else.
        let fd = unsafe { OwnedFd::from_raw_fd(raw) };
        // SAFETY: all-zero bytes are a valid `sockaddr_ll`, which is made of integers.
        let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
        address.sll_family = libc::AF_PACKET as u16;
        address.sll_protocol = (libc::ETH_P_ALL as u16).to_be();
        address.sll_ifindex = index.0 as i32;
        let ignore = libc::c_int::from(outgoing == Outgoing::Ignored);
        // SAFETY: the pointer and the length describe `ignore`, which outlives the call.
        let set = unsafe {
            let value = (&raw const ignore).cast();
            libc::setsockopt(raw, libc::SOL_PACKET, libc::PACKET_IGNORE_OUTGOING, value, size_of_val(&ignore) as u32)
        };
        // SAFETY: the pointer and the length describe `address`, which outlives the call.
        if set < 0 || unsafe { libc::bind(raw, (&raw const address).cast(), size_of_val(&address) as u32) } < 0 {
            return Err(failed(io::Error::last_os_error()));
        }
        // SAFETY: an `OwnedFd` keeps its descriptor open, and the same one, until it is dropped with the `AsyncFd`.
        unsafe { AsyncFd::register(fd) }.map(Self).map_err(|e| failed(e.into()))
    }

    /// Sends a frame at once; never waits.
    ///
    /// # Errors
    /// The kernel's, as ENETDOWN.
    pub fn send(&self, frame: &[u8]) -> io::Result<()> {
        // SAFETY: the pointer and the length describe `frame`.
        let sent = unsafe { libc::send(self.0.as_raw_fd(), frame.as_ptr().cast(), frame.len(), 0) };
        if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Receives one frame, cut at the buffer's end; gives the length that it had, which may be more than the buffer's.
    ///
    /// # Errors
    /// The kernel's.
    pub async fn receive(&self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            let mut ready = self.0.readable().await?;
            let received = ready.try_io(|fd| {
                // SAFETY: the pointer and the length describe `buffer`.
                let got =
                    unsafe { libc::recv(fd.as_raw_fd(), buffer.as_mut_ptr().cast(), buffer.len(), libc::MSG_TRUNC) };
                usize::try_from(got).map_err(|_| io::Error::last_os_error())
            });
            if let Ok(result) = received {
                return result;
            }
        }
    }
}
