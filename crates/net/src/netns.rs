//! Network namespaces: those of other processes, and fresh ones.
//!
//! A namespace is a thread's, and a netlink socket keeps the one that it was opened in. So what has to happen inside another
//! namespace happens on a thread of its own that enters it and ends there: no thread of a runtime's pool is ever left in the
//! wrong one. What can go wrong: rights (`CAP_SYS_ADMIN`, beside `CAP_NET_ADMIN`), or the process that held it is gone.

use crate::{LinkIndex, Net, NetError, PacketSocket};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

/// A network namespace, which lives at least as long as this.
#[derive(Clone, Debug)]
pub struct NetNs(Arc<File>);

fn failed(operation: &'static str, object: String) -> impl FnOnce(io::Error) -> NetError {
    move |source| NetError::Kernel { operation, object, source }
}

impl NetNs {
    /// That of a process.
    ///
    /// # Errors
    /// [`NetError::Kernel`]: there is no such process, or rights.
    pub fn of_process(pid: u32) -> Result<Self, NetError> {
        Self::open(&format!("/proc/{pid}/ns/net"))
    }

    /// That of the calling thread.
    ///
    /// # Errors
    /// [`NetError::Kernel`].
    pub fn current() -> Result<Self, NetError> {
        Self::open("/proc/thread-self/ns/net")
    }

    fn open(path: &str) -> Result<Self, NetError> {
        let file = File::open(path).map_err(failed("open network namespace", path.to_owned()))?;
        Ok(Self(Arc::new(file)))
    }

    /// Whether both are the same.
    #[must_use]
    pub fn is(&self, other: &Self) -> bool {
        let of = |ns: &Self| ns.0.metadata().map(|m| (m.dev(), m.ino())).ok();
        of(self).is_some() && of(self) == of(other)
    }

    /// Does `work` inside, on a thread of its own. Processes that it starts are inside, too.
    ///
    /// # Errors
    /// [`NetError::Kernel`] when it cannot be entered.
    pub fn within<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T, NetError> {
        on_a_thread("enter network namespace", || {
            // SAFETY: takes a descriptor, which is open, and a flag; it changes this thread's namespace alone.
            let entered = unsafe { libc::setns(self.0.as_raw_fd(), libc::CLONE_NEWNET) };
            if entered < 0 { Err(io::Error::last_os_error()) } else { Ok(work()) }
        })
    }

    /// Does `work` inside a fresh namespace. It goes with all that is in it, unless something that was begun there stays.
    ///
    /// # Errors
    /// [`NetError::Kernel`]: rights.
    pub fn fresh<T: Send>(work: impl FnOnce() -> T + Send) -> Result<T, NetError> {
        on_a_thread("make network namespace", || {
            // SAFETY: takes flags only, and changes this thread's namespace alone.
            let made = unsafe { libc::unshare(libc::CLONE_NEWNET) };
            if made < 0 { Err(io::Error::last_os_error()) } else { Ok(work()) }
        })
    }

    /// A netlink connection inside; within a tokio runtime.
    ///
    /// # Errors
    /// [`NetError::Kernel`].
    pub fn net(&self) -> Result<Net, NetError> {
        let runtime = tokio::runtime::Handle::current();
        self.within(|| {
            let _in = runtime.enter();
            Net::open()
        })?
    }

    /// A raw socket on an interface inside; within a tokio runtime.
    ///
    /// # Errors
    /// [`NetError::Kernel`].
    pub fn packet_socket(&self, on: LinkIndex) -> Result<PacketSocket, NetError> {
        let runtime = tokio::runtime::Handle::current();
        self.within(|| {
            let _in = runtime.enter();
            PacketSocket::open(on)
        })?
    }

    /// Writes settings below `/proc/sys/net` of this namespace, such as `ipv4/ip_forward`.
    ///
    /// # Errors
    /// [`NetError::Kernel`], naming the first that cannot be written.
    pub fn set(&self, settings: &[(&str, &str)]) -> Result<(), NetError> {
        self.within(|| {
            for (name, value) in settings {
                std::fs::write(format!("/proc/sys/net/{name}"), value)
                    .map_err(failed("write setting", (*name).to_owned()))?;
            }
            Ok(())
        })?
    }
}

impl AsFd for NetNs {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

fn on_a_thread<T: Send>(operation: &'static str, work: impl FnOnce() -> io::Result<T> + Send) -> Result<T, NetError> {
    std::thread::scope(|scope| match scope.spawn(work).join() {
        Ok(done) => done.map_err(failed(operation, "of a thread".into())),
        Err(panic) => std::panic::resume_unwind(panic),
    })
}
