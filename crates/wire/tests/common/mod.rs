//! A guest's end of a tap.

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

/// Whether `frame` asks by ARP for `address`.
pub fn asks_for(frame: &[u8], address: [u8; 4]) -> bool {
    frame.len() >= 42 && frame[12..14] == [8, 6] && frame[20..22] == [0, 1] && frame[38..42] == address
}

/// What `mac` answers to the question in `frame`.
pub fn arp_answer(frame: &[u8], mac: [u8; 6]) -> Vec<u8> {
    let mut answer =
        [&frame[6..12], &mac, &[8, 6, 0, 1, 8, 0, 6, 4, 0, 2], &mac, &frame[38..42], &frame[22..32]].concat();
    answer.resize(60, 0);
    answer
}
