//! Persistent taps that no process owns: QEMU opens them by name, and a node's restart loses nothing.

use crate::NetError;
use std::fs::OpenOptions;
use std::os::fd::AsRawFd;

/// Creates the persistent tap `name`, with room for offload headers as QEMU wants it.
///
/// Does nothing when a tap of that name is held by QEMU. Use it only for a name that is free or a tap's.
///
/// # Errors
/// [`NetError::Kernel`]: rights, no `/dev/net/tun`, or a name of another kind of device.
pub fn ensure_tap(name: &str) -> Result<(), NetError> {
    crate::net::check_name(name)?;
    let failed = |source| NetError::Kernel { operation: "create tap", object: name.to_owned(), source };
    let tun = OpenOptions::new().read(true).write(true).open("/dev/net/tun").map_err(failed)?;
    // SAFETY: all-zero bytes are a valid `ifreq`: it is made of integers and unions of integers and a pointer never read.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    request.ifr_ifru.ifru_flags = (libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR) as libc::c_short;
    // SAFETY: the descriptor is open, and `request` is an `ifreq` that outlives the call.
    if unsafe { libc::ioctl(tun.as_raw_fd(), libc::TUNSETIFF, &raw mut request) } < 0 {
        let source = std::io::Error::last_os_error();
        // Somebody has it open: it exists already.
        return if source.raw_os_error() == Some(libc::EBUSY) { Ok(()) } else { Err(failed(source)) };
    }
    // SAFETY: the descriptor is open and attached to a tap; this call takes an integer.
    if unsafe { libc::ioctl(tun.as_raw_fd(), libc::TUNSETPERSIST, 1_i32) } < 0 {
        return Err(failed(std::io::Error::last_os_error()));
    }
    Ok(())
}
