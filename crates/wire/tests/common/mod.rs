//! A guest's end of a tap.

#![allow(dead_code, reason = "each test uses a part")]

pub mod place;

use std::fs::File;
use std::os::fd::AsRawFd;

/// Holds the tap open; frames are read and written, one at a time.
pub fn tap(name: &str) -> File {
    let tun = File::options().read(true).write(true).open("/dev/net/tun").unwrap();
    // SAFETY: all-zero bytes are a valid `ifreq`.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    request.ifr_ifru.ifru_flags = (libc::IFF_TAP | libc::IFF_NO_PI) as libc::c_short;
    // SAFETY: the descriptor is open and `request` outlives the call.
    assert_eq!(unsafe { libc::ioctl(tun.as_raw_fd(), libc::TUNSETIFF, &raw mut request) }, 0);
    tun
}

#[allow(dead_code, reason = "not every test has a guest that answers")]
/// Whether `frame` asks by ARP for `address`.
pub fn asks_for(frame: &[u8], address: [u8; 4]) -> bool {
    frame.len() >= 42 && frame[12..14] == [8, 6] && frame[20..22] == [0, 1] && frame[38..42] == address
}

#[allow(dead_code, reason = "not every test has a guest that answers")]
/// What `mac` answers to the question in `frame`.
pub fn arp_answer(frame: &[u8], mac: [u8; 6]) -> Vec<u8> {
    let mut answer =
        [&frame[6..12], &mac, &[8, 6, 0, 1, 8, 0, 6, 4, 0, 2], &mac, &frame[38..42], &frame[22..32]].concat();
    answer.resize(60, 0);
    answer
}

/// An IPv4 packet of `total` bytes that nobody answers: an experimental protocol's.
#[allow(dead_code, reason = "not every test sends such")]
pub fn ipv4(from: [u8; 4], to: [u8; 4], total: u16, may_be_cut: bool) -> Vec<u8> {
    let mut head = vec![0x45, 0];
    head.extend(total.to_be_bytes());
    head.extend([0, 1, if may_be_cut { 0 } else { 0x40 }, 0, 64, 253, 0, 0]);
    head.extend(from);
    head.extend(to);
    let sum: u32 = head.chunks(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
    let sum = !(((sum & 0xffff) + (sum >> 16)) as u16);
    head[10..12].copy_from_slice(&sum.to_be_bytes());
    head.resize(usize::from(total), 0x77);
    head
}

/// An IPv6 packet of `total` bytes that nobody answers, either. Nobody under way may cut one.
pub fn ipv6(from: [u8; 16], to: [u8; 16], total: u16) -> Vec<u8> {
    let mut head = vec![0x60, 0, 0, 0];
    head.extend((total - 40).to_be_bytes());
    head.extend([253, 64]);
    head.extend(from);
    head.extend(to);
    head.resize(usize::from(total), 0x77);
    head
}

/// The size that fits, where the frame is the answer to a packet that was too large: "fragmentation needed", or IPv6's "packet too big".
pub fn too_large(frame: &[u8]) -> Option<u32> {
    let at = |from: usize, n: usize| frame.get(from..from + n);
    match at(12, 2)? {
        [8, 0] if at(23, 1)? == [1] && at(34, 2)? == [3, 4] => {
            Some(u16::from_be_bytes(at(40, 2)?.try_into().ok()?).into())
        }
        [0x86, 0xdd] if at(20, 1)? == [58] && at(54, 2)? == [2, 0] => {
            Some(u32::from_be_bytes(at(58, 4)?.try_into().ok()?))
        }
        _ => None,
    }
}
