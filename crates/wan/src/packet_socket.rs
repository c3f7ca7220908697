//! Raw frames in and out of one network interface.
//!
//! An `AF_PACKET` socket sees every frame that arrives on its interface, whole, and can put frames on it. The options
//! that make it fit for forwarding, and what goes wrong without each:
//!
//! - `PACKET_VNET_HDR`: the kernel's note on checksums and segmentation travels with the frame. Without it, a frame whose
//!   checksum the sender left to "the hardware" arrives broken, and a super-frame cannot be sent at all (it exceeds the MTU).
//! - `PACKET_IGNORE_OUTGOING`: we do not read back what the other direction sends here. Without it, a loop.
//! - `PACKET_QDISC_BYPASS`: sending goes straight to the interface. Its queue would be a second one behind ours.
//! - `PACKET_AUXDATA`: a VLAN tag that the kernel took out of the frame (every modern one does) is handed over beside it;
//!   [`Arrival`] has it back in its place. Without it, tagged traffic would come out untagged.
//! - `SO_TIMESTAMPNS`: when the frame really arrived, however late this process reads it.
//! - `SO_RCVBUFFORCE`: room for what arrives while the thread is not scheduled; see [`RECEIVE_BUFFER`].
//!
//! The socket is opened with protocol 0 and bound last, so that it hears nothing before it is fully set up. It belongs to
//! the namespace of the thread that opened it and works from any thread afterwards.
//!
//! `unsafe` is here because these options have no safe wrapper, and because `recvmmsg` and `sendmmsg` take arrays of
//! pointers. Those arrays are built anew on the stack for each call, so no raw pointer outlives the borrow it came from.

use crate::WanError;
use crate::frame::{VlanTag, VnetHeader};
use std::ffi::CString;
use std::io;
use std::mem::{self, MaybeUninit};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::Duration;

/// Frames that one system call moves at most: enough to spread its cost, few enough to get back to the clock soon.
pub const BATCH: usize = 32;

/// The longest frame taken: what a stack without "BIG TCP" builds (64 KiB), and its link-layer headers.
pub const MAX_FRAME: usize = 65_536 + 64;

/// What the kernel keeps while a forwarding thread is not scheduled: a stall of 100 ms at 1 Gbit/s of small frames,
/// each of which occupies about 2 KiB there. The kernel doubles the figure for its own overhead.
pub const RECEIVE_BUFFER: usize = 64 << 20;

/// What may be handed to the interface and not yet be consumed by its receiver.
const SEND_BUFFER: usize = 16 << 20;

/// A frame and the kernel's note on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packet {
    /// The note.
    pub note: VnetHeader,
    /// The frame, from its destination address on, VLAN tags included.
    pub frame: Box<[u8]>,
}

impl AsRef<Packet> for Packet {
    fn as_ref(&self) -> &Packet {
        self
    }
}

/// A packet that came in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Arrival {
    /// The packet.
    pub packet: Packet,
    /// When the kernel received it, as time since the Unix epoch by the system's clock, if it says.
    pub stamp: Option<Duration>,
}

/// A raw socket bound to one interface.
#[derive(Debug)]
pub struct PacketSocket {
    fd: OwnedFd,
    interface: String,
}

impl PacketSocket {
    /// Opens a socket on `interface`, in the calling thread's network namespace. Non-blocking.
    ///
    /// # Errors
    ///
    /// [`WanError::NoInterface`], or [`WanError::Socket`] naming the step that failed (usually for want of privilege).
    pub fn open(interface: &str) -> Result<Self, WanError> {
        let no_interface = || WanError::NoInterface { interface: interface.to_owned() };
        let name = CString::new(interface).map_err(|_| no_interface())?;
        // SAFETY: `name` is a NUL-terminated string that lives through the call.
        let index = unsafe { libc::if_nametoindex(name.as_ptr()) };
        if index == 0 {
            return Err(no_interface());
        }
        let failed = |attempt| move |source| WanError::Socket { attempt, interface: interface.to_owned(), source };

        // SAFETY: `socket` takes no pointers.
        let raw =
            unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC, 0) };
        check(raw).map_err(failed("open a packet socket"))?;
        // SAFETY: `raw` is a descriptor that was just made and that nobody else owns.
        let fd = unsafe { OwnedFd::from_raw_fd(raw) };
        let socket = Self { fd, interface: interface.to_owned() };

        for (level, option, value, attempt) in [
            (libc::SOL_PACKET, libc::PACKET_VNET_HDR, 1, "set PACKET_VNET_HDR"),
            (libc::SOL_PACKET, libc::PACKET_IGNORE_OUTGOING, 1, "set PACKET_IGNORE_OUTGOING (Linux 4.20)"),
            (libc::SOL_PACKET, libc::PACKET_QDISC_BYPASS, 1, "set PACKET_QDISC_BYPASS"),
            (libc::SOL_PACKET, libc::PACKET_AUXDATA, 1, "set PACKET_AUXDATA"),
            (libc::SOL_SOCKET, libc::SO_TIMESTAMPNS, 1, "set SO_TIMESTAMPNS"),
            (libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, RECEIVE_BUFFER as libc::c_int, "set SO_RCVBUFFORCE"),
            (libc::SOL_SOCKET, libc::SO_SNDBUFFORCE, SEND_BUFFER as libc::c_int, "set SO_SNDBUFFORCE"),
        ] {
            socket.set_option(level, option, value).map_err(failed(attempt))?;
        }
        socket.bind(index).map_err(failed("bind a packet socket"))?;
        Ok(socket)
    }

    fn set_option(&self, level: libc::c_int, option: libc::c_int, value: libc::c_int) -> io::Result<()> {
        // SAFETY: the pointer and the length are those of `value`, which lives through the call.
        check(unsafe {
            libc::setsockopt(
                self.fd.as_raw_fd(),
                level,
                option,
                (&raw const value).cast(),
                size_of::<libc::c_int>() as libc::socklen_t,
            )
        })
    }

    fn bind(&self, index: libc::c_uint) -> io::Result<()> {
        // SAFETY: a `sockaddr_ll` is plain integers, for which zero is a value.
        let mut address: libc::sockaddr_ll = unsafe { mem::zeroed() };
        address.sll_family = libc::AF_PACKET as u16;
        address.sll_protocol = (libc::ETH_P_ALL as u16).to_be();
        address.sll_ifindex = index as libc::c_int;
        // SAFETY: the pointer and the length are those of `address`, which lives through the call.
        check(unsafe {
            libc::bind(
                self.fd.as_raw_fd(),
                (&raw const address).cast(),
                size_of::<libc::sockaddr_ll>() as libc::socklen_t,
            )
        })
    }

    /// The interface's name at the time of opening.
    #[must_use]
    pub fn interface(&self) -> &str {
        &self.interface
    }

    /// Reads up to [`BATCH`] frames without waiting and appends them to `arrivals`. Returns how many were dropped for being
    /// longer than [`MAX_FRAME`].
    ///
    /// # Errors
    ///
    /// The kernel's: `WouldBlock` when there is nothing to read, `ENETDOWN` once when the interface goes down (frames
    /// come again when it is up). Neither makes the socket unusable.
    pub fn receive(&self, buffers: &mut ReceiveBuffers, arrivals: &mut Vec<Arrival>) -> io::Result<u64> {
        let mut notes = [[0u8; VnetHeader::LEN]; BATCH];
        let mut vectors = [[EMPTY_VECTOR; 2]; BATCH];
        let mut ancillary = [Ancillary([0; ANCILLARY_LEN]); BATCH];
        let mut messages = no_messages();
        for (i, frame) in buffers.0.chunks_exact_mut(MAX_FRAME).enumerate() {
            vectors[i] = [vector(&mut notes[i]), vector(frame)];
            let header = &mut messages[i].msg_hdr;
            header.msg_iov = vectors[i].as_mut_ptr();
            header.msg_iovlen = 2 as _;
            header.msg_control = ancillary[i].0.as_mut_ptr().cast();
            header.msg_controllen = ANCILLARY_LEN as _;
        }
        // SAFETY: `messages` holds BATCH headers. Each points at two vectors and an ancillary buffer of its own, with
        // their true lengths, all of which live and are not otherwise touched until the call returns; the timeout may be null.
        let received = unsafe {
            libc::recvmmsg(
                self.fd.as_raw_fd(),
                messages.as_mut_ptr(),
                BATCH as libc::c_uint,
                libc::MSG_DONTWAIT as _,
                std::ptr::null_mut(),
            )
        };
        let received = usize::try_from(received).map_err(|_| io::Error::last_os_error())?;

        let mut oversized = 0;
        for (i, message) in messages[..received].iter().enumerate() {
            if message.msg_hdr.msg_flags & libc::MSG_TRUNC != 0 {
                oversized += 1;
                continue;
            }
            let len = (message.msg_len as usize).saturating_sub(VnetHeader::LEN).min(MAX_FRAME);
            let frame = &buffers.0[i * MAX_FRAME..][..len];
            let note = VnetHeader::from_bytes(notes[i]);
            let (tag, stamp) = read_ancillary(&message.msg_hdr);
            let packet = match tag {
                None => Packet { note, frame: frame.into() },
                Some(tag) => Packet { note: note.behind_a_vlan_tag(), frame: tag.insert_into(frame) },
            };
            arrivals.push(Arrival { packet, stamp });
        }
        Ok(oversized)
    }

    /// Writes packets to the interface, at most [`BATCH`], and reports each one's outcome, in order. Does not wait: what the
    /// interface does not take is reported as refused, and the next is tried.
    ///
    /// # Panics
    ///
    /// When given more than [`BATCH`] packets.
    pub fn send<P: AsRef<Packet>>(&self, packets: &[P], mut outcome: impl FnMut(&P, io::Result<()>)) {
        assert!(packets.len() <= BATCH, "the caller sends at most BATCH packets at once");
        let mut notes = [[0u8; VnetHeader::LEN]; BATCH];
        let mut vectors = [[EMPTY_VECTOR; 2]; BATCH];
        let mut messages = no_messages();
        for (i, packet) in packets.iter().map(AsRef::as_ref).enumerate() {
            notes[i] = packet.note.to_bytes();
            // The kernel only reads through these vectors; `iovec` has no form without `mut`.
            let frame = libc::iovec { iov_base: packet.frame.as_ptr().cast_mut().cast(), iov_len: packet.frame.len() };
            vectors[i] = [vector(&mut notes[i]), frame];
            messages[i].msg_hdr.msg_iov = vectors[i].as_mut_ptr();
            messages[i].msg_hdr.msg_iovlen = 2 as _;
        }
        let mut done = 0;
        while done < packets.len() {
            let rest = &mut messages[done..packets.len()];
            // SAFETY: `rest` holds that many headers, each pointing at two vectors of its own, which point at a note on
            // this stack and a frame borrowed by `packets`; all live through the call, which writes only `msg_len`.
            let sent = unsafe {
                libc::sendmmsg(
                    self.fd.as_raw_fd(),
                    rest.as_mut_ptr(),
                    rest.len() as libc::c_uint,
                    libc::MSG_DONTWAIT as _,
                )
            };
            match usize::try_from(sent) {
                Ok(sent) if sent > 0 => {
                    packets[done..done + sent].iter().for_each(|packet| outcome(packet, Ok(())));
                    done += sent;
                }
                // An error is reported only when not even the first could be sent.
                _ => {
                    outcome(&packets[done], Err(io::Error::last_os_error()));
                    done += 1;
                }
            }
        }
    }

    /// How many frames the kernel dropped since this was last asked, because [`RECEIVE_BUFFER`] was full. Zero if it does not say.
    #[must_use]
    pub fn take_missed(&self) -> u64 {
        let mut statistics = libc::tpacket_stats { tp_packets: 0, tp_drops: 0 };
        let mut len = size_of::<libc::tpacket_stats>() as libc::socklen_t;
        // SAFETY: the pointer and the length are those of `statistics`, which lives through the call.
        let answer = check(unsafe {
            libc::getsockopt(
                self.fd.as_raw_fd(),
                libc::SOL_PACKET,
                libc::PACKET_STATISTICS,
                (&raw mut statistics).cast(),
                &raw mut len,
            )
        });
        if answer.is_ok() { u64::from(statistics.tp_drops) } else { 0 }
    }
}

impl AsFd for PacketSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Where [`PacketSocket::receive`] lets the kernel write: room for [`BATCH`] frames, to be used again and again.
#[derive(Debug)]
pub struct ReceiveBuffers(Box<[u8]>);

impl ReceiveBuffers {
    /// Allocates them: 2 MiB, of which a path without super-frames touches little.
    #[must_use]
    pub fn new() -> Self {
        Self(vec![0; BATCH * MAX_FRAME].into_boxed_slice())
    }
}

impl Default for ReceiveBuffers {
    fn default() -> Self {
        Self::new()
    }
}

/// Room for the two control messages that are asked for: auxiliary data (36 bytes with its header) and a stamp (32).
const ANCILLARY_LEN: usize = 128;

#[derive(Clone, Copy)]
#[repr(align(8))]
struct Ancillary([u8; ANCILLARY_LEN]);

const EMPTY_VECTOR: libc::iovec = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };

fn vector(bytes: &mut [u8]) -> libc::iovec {
    libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() }
}

fn no_messages() -> [libc::mmsghdr; BATCH] {
    // SAFETY: a `mmsghdr` is integers and raw pointers, for which all zeroes is a value: "nothing".
    unsafe { MaybeUninit::zeroed().assume_init() }
}

/// The VLAN tag and the arrival stamp that came beside a frame. `header` is one that `recvmmsg` has filled in, and its
/// ancillary buffer still lives: both hold within [`PacketSocket::receive`], the only caller.
fn read_ancillary(header: &libc::msghdr) -> (Option<VlanTag>, Option<Duration>) {
    let (mut tag, mut stamp) = (None, None);
    // SAFETY: `msg_control` points at a live buffer aligned for `cmsghdr`, of which the kernel has filled `msg_controllen` bytes.
    let mut next = unsafe { libc::CMSG_FIRSTHDR(header) };
    // SAFETY: CMSG_FIRSTHDR and CMSG_NXTHDR give null or a pointer to a whole, aligned `cmsghdr` within that buffer.
    while let Some(message) = unsafe { next.as_ref() } {
        match (message.cmsg_level, message.cmsg_type) {
            (libc::SOL_PACKET, libc::PACKET_AUXDATA) => {
                // SAFETY: the kernel puts a whole `tpacket_auxdata` (plain integers) into a message of this type;
                // `read_unaligned` asks for no alignment.
                let data = unsafe { libc::CMSG_DATA(next).cast::<libc::tpacket_auxdata>().read_unaligned() };
                tag = vlan_tag(&data);
            }
            (libc::SOL_SOCKET, libc::SCM_TIMESTAMPNS) => {
                // SAFETY: as above, with a `timespec`.
                let time = unsafe { libc::CMSG_DATA(next).cast::<libc::timespec>().read_unaligned() };
                stamp = u64::try_from(time.tv_sec).ok().map(|secs| Duration::new(secs, time.tv_nsec as u32));
            }
            _ => {}
        }
        // SAFETY: `header` is the one that `next` came from, unchanged since.
        next = unsafe { libc::CMSG_NXTHDR(header, next) };
    }
    (tag, stamp)
}

fn vlan_tag(data: &libc::tpacket_auxdata) -> Option<VlanTag> {
    const PLAIN_VLAN: u16 = 0x8100;
    if data.tp_status & libc::TP_STATUS_VLAN_VALID == 0 {
        return None;
    }
    let named = data.tp_status & libc::TP_STATUS_VLAN_TPID_VALID != 0;
    Some(VlanTag { protocol: if named { data.tp_vlan_tpid } else { PLAIN_VLAN }, control: data.tp_vlan_tci })
}

fn check(answer: libc::c_int) -> io::Result<()> {
    if answer < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
