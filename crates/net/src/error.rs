//! What failed, on which object, and what to do.

/// Why an operation on the network failed.
#[derive(Debug, thiserror::Error)]
pub enum NetError {
    /// The kernel refused.
    #[error("{operation} `{object}`: {source}; {hint}", hint = hint(source))]
    Kernel {
        /// What was tried.
        operation: &'static str,
        /// On which interface.
        object: String,
        /// The kernel's answer.
        source: std::io::Error,
    },
    /// There is no such interface.
    #[error("{operation} `{object}`: no such interface in this network namespace; create it, or correct the name")]
    Missing {
        /// What was tried.
        operation: &'static str,
        /// On which interface.
        object: String,
    },
    /// The name belongs to a device of another kind.
    #[error("`{object}` exists, but is no {wanted}; remove it or choose another name")]
    OtherKind {
        /// The interface.
        object: String,
        /// What it should have been.
        wanted: &'static str,
    },
    /// Not a name that the kernel takes.
    #[error("`{0}` cannot name an interface: 1 to 15 bytes without `/`, `%` or white space are needed")]
    BadName(String),
}

fn hint(source: &std::io::Error) -> &'static str {
    match source.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => "run as root or with CAP_NET_ADMIN and CAP_NET_RAW",
        Some(libc::EOPNOTSUPP | libc::ENOENT) => "check that the kernel has tun, bridge and vxlan",
        Some(libc::EBUSY) => "another process holds it, or it is part of another bridge",
        Some(libc::EEXIST) => "the name, or the VNI and port, are in use",
        Some(libc::ENETDOWN) => "set the interface up",
        _ => "see `ip -d link`",
    }
}
