//! Where clients come in, and how all of it ends.

use crate::backend::Backend;
use crate::connection::serve;
use crate::wire::{HangUp, Wire};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use rustls::ServerConfig;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

/// Clients at a time; each may hold [`godwit_nbd::MAX_HELD`] bytes and a few threads. Tools that copy open 4 to 16 connections.
pub const MOST_CLIENTS: usize = 64;
/// A client over TCP that says nothing for so long is asked so often, this far apart, whether it is there.
const ALIVE: (Duration, Duration, u32) = (Duration::from_secs(60), Duration::from_secs(15), 4);
/// How long nobody is accepted after somebody could not be.
const AGAIN: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
/// The first file descriptor that a service manager passes.
const FIRST_PASSED: i32 = 3;

/// A socket that listens.
#[derive(Debug)]
pub struct Listener {
    socket: OwnedFd,
    /// Ours to remove.
    path: Option<PathBuf>,
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Some(path) = &self.path {
            let _ = std::fs::remove_file(path);
        }
    }
}

impl Listener {
    /// At a unix socket, for this user only.
    ///
    /// # Errors
    /// When it cannot be made, or somebody listens there.
    pub fn unix(path: &Path) -> io::Result<Self> {
        if std::os::unix::net::UnixStream::connect(path).is_ok() {
            return Err(io::ErrorKind::AddrInUse.into());
        }
        // Left by somebody who was killed.
        if std::fs::symlink_metadata(path).is_ok_and(|m| std::os::unix::fs::FileTypeExt::is_socket(&m.file_type())) {
            std::fs::remove_file(path)?;
        }
        let listener = UnixListener::bind(path)?;
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
        Ok(Self { socket: listener.into(), path: Some(path.to_owned()) })
    }

    /// At a TCP port; and which, where it was 0.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn tcp(address: SocketAddr) -> io::Result<(Self, SocketAddr)> {
        let listener = TcpListener::bind(address)?;
        let address = listener.local_addr()?;
        Ok((Self { socket: listener.into(), path: None }, address))
    }

    /// The one that a service manager, or libnbd, has opened for this process: `LISTEN_PID` and `LISTEN_FDS` say so.
    /// To be called once, before anything else is opened.
    ///
    /// # Errors
    /// When more than one was passed.
    pub fn passed() -> io::Result<Option<Self>> {
        let number = |name| std::env::var(name).ok().and_then(|value| value.parse::<u32>().ok());
        if number("LISTEN_PID") != Some(std::process::id()) {
            return Ok(None);
        }
        match number("LISTEN_FDS") {
            None | Some(0) => Ok(None),
            Some(1) => {
                // SAFETY: whoever started this process opened the descriptor for it, and nothing else in it knows of it.
                let socket = unsafe { OwnedFd::from_raw_fd(FIRST_PASSED) };
                rustix::io::fcntl_setfd(&socket, rustix::io::FdFlags::CLOEXEC)?;
                Ok(Some(Self { socket, path: None }))
            }
            Some(many) => Err(io::Error::other(format!("LISTEN_FDS={many}: one socket can be listened at"))),
        }
    }

    fn accept(&self) -> Result<Wire, Errno> {
        use rustix::net::sockopt;
        let client = rustix::net::accept_with(&self.socket, rustix::net::SocketFlags::CLOEXEC)?;
        // Answers are sent when they are whole: to wait for more would only be late. A unix socket says that it cannot; nor does its other end
        // go without a word, as a host does that has lost its power.
        if sockopt::set_tcp_nodelay(&client, true).is_ok() {
            let (quiet, between, asked) = ALIVE;
            sockopt::set_socket_keepalive(&client, true)?;
            sockopt::set_tcp_keepidle(&client, quiet)?;
            sockopt::set_tcp_keepintvl(&client, between)?;
            sockopt::set_tcp_keepcnt(&client, asked)?;
        }
        Ok(Wire::new(client))
    }
}

/// Tells [`serve_all`] to end.
#[derive(Clone, Debug)]
pub struct Stop(Arc<OwnedFd>);

impl Stop {
    /// Not yet.
    ///
    /// # Errors
    /// When there are too many files open.
    pub fn new() -> io::Result<Self> {
        Ok(Self(Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)))
    }

    /// Now.
    pub fn now(&self) {
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }
}

/// Serves all who come, until it is told to stop. When it returns, nobody uses `backend` any more.
///
/// # Errors
/// When nobody can be accepted.
pub fn serve_all(
    listener: &Listener,
    backend: &Arc<dyn Backend>,
    tls: Option<&Arc<ServerConfig>>,
    stop: &Stop,
) -> io::Result<()> {
    let mut clients: Vec<(HangUp, JoinHandle<()>)> = vec![];
    let result = loop {
        let mut fds = [
            PollFd::from_borrowed_fd(stop.0.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(listener.socket.as_fd(), PollFlags::IN),
        ];
        if let Err(error) = rustix::io::retry_on_intr(|| poll(&mut fds, None)) {
            break Err(error.into());
        }
        if !fds[0].revents().is_empty() {
            break Ok(());
        }
        let wire = match listener.accept() {
            Ok(wire) => wire,
            // No listener: nobody can come any more.
            Err(error @ (Errno::BADF | Errno::INVAL | Errno::NOTSOCK | Errno::OPNOTSUPP)) => break Err(error.into()),
            // What a client did, or another process that listens here.
            Err(Errno::CONNABORTED | Errno::INTR | Errno::AGAIN) => continue,
            Err(error) => {
                // Files or memory are short, or the network is: those who are there are served on.
                tracing::warn!(%error, "a client could not be accepted");
                let mut fds = [PollFd::from_borrowed_fd(stop.0.as_fd(), PollFlags::IN)];
                let _ = poll(&mut fds, Some(&AGAIN));
                continue;
            }
        };
        clients.retain(|(_, thread)| !thread.is_finished());
        if clients.len() >= MOST_CLIENTS {
            tracing::warn!("{MOST_CLIENTS} clients are served already; another one was turned away");
            continue;
        }
        let (hang_up, backend, tls) = (wire.hang_up(), backend.clone(), tls.cloned());
        match std::thread::Builder::new().name("nbd-client".into()).spawn(move || serve(wire, backend, tls)) {
            Ok(thread) => clients.push((hang_up, thread)),
            Err(error) => tracing::warn!(%error, "no thread for a client; it was turned away"),
        }
    };
    for (hang_up, thread) in clients {
        drop(hang_up);
        // Requests under way are done.
        drop(thread.join());
    }
    result
}
