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
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

/// Clients at a time; each may hold [`godwit_nbd::MAX_HELD`] bytes and a few threads. Tools that copy open 4 to 16 connections.
pub const MOST_CLIENTS: usize = 64;
/// A client over TCP that says nothing for so long is asked so often, this far apart, whether it is there.
const ALIVE: (Duration, Duration, u32) = (Duration::from_secs(60), Duration::from_secs(15), 4);
/// How long nobody is accepted after somebody could not be.
const AGAIN: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
/// How long clients may take, when all of it ends, until they have the answers to what they have asked for. One that takes none would hold
/// up whoever stops the process, and whatever is to be durable after it.
const LAST_ANSWERS: Duration = Duration::from_secs(5);
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

    /// The TCP address that it listens at; none: it is another kind of socket.
    ///
    /// # Errors
    /// When it is no socket: whoever passed it did not look.
    pub fn address(&self) -> io::Result<Option<SocketAddr>> {
        Ok(SocketAddr::try_from(rustix::net::getsockname(&self.socket)?).ok())
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

/// Serves all who come, until it is told to stop; what is under way then is done, and answered to whoever takes answers. When it returns,
/// nobody uses `backend` any more.
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
    // Nothing is ever sent: whoever is served holds one end.
    let (here, gone) = mpsc::channel::<()>();
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
        let (hang_up, backend, tls, here) = (wire.hang_up(), backend.clone(), tls.cloned(), here.clone());
        let served = move || {
            let _here = here;
            serve(wire, backend, tls);
        };
        match std::thread::Builder::new().name("nbd-client".into()).spawn(served) {
            Ok(thread) => clients.push((hang_up, thread)),
            Err(error) => tracing::warn!(%error, "no thread for a client; it was turned away"),
        }
    };
    drop(here);
    let_go(clients, &gone, LAST_ANSWERS);
    result
}

/// Ends all connections. Requests under way are done, and answered to whoever takes the answers in time.
fn let_go(clients: Vec<(HangUp, JoinHandle<()>)>, gone: &mpsc::Receiver<()>, patience: Duration) {
    clients.iter().for_each(|(hang_up, _)| hang_up.take_no_more());
    // At once when the last one has ended.
    let _ = gone.recv_timeout(patience);
    for (hang_up, thread) in clients {
        drop(hang_up);
        // Also where a disk takes longer than that: requests under way are done, only not answered.
        drop(thread.join());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::Answers;
    use godwit_nbd::{Command, Cookie, Export, Reply};
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;
    use std::sync::Mutex;
    use std::time::Instant;

    /// More than a socket holds.
    const SIZE: u32 = 8 << 20;
    const READ: u16 = 0;
    const FLUSH: u16 = 3;
    /// Longer than anything takes that ends.
    const LONG: Duration = Duration::from_secs(20);

    /// Reads as zeroes; whoever flushes says so, and waits.
    struct Slow {
        begun: mpsc::Sender<()>,
        flushes: Mutex<()>,
    }

    impl Backend for Slow {
        fn export(&self) -> Export {
            Export { name: "disk".into(), size: u64::from(SIZE), preferred_block: 4096, read_only: false }
        }

        fn read_now(&self, _: u64, into: &mut [u8]) -> usize {
            into.len()
        }

        fn warm(&self, _: u64, _: u64) {}

        fn perform(&self, _: Cookie, _: Command, _: &Answers) -> Option<Reply> {
            let _ = self.begun.send(());
            drop(self.flushes.lock());
            Some(Reply::Done)
        }
    }

    fn slow() -> (Arc<Slow>, mpsc::Receiver<()>) {
        let (begun, begins) = mpsc::channel();
        (Arc::new(Slow { begun, flushes: Mutex::default() }), begins)
    }

    /// Chooses the export that has no name of its own.
    fn choose(client: &mut UnixStream) {
        client.read_exact(&mut [0; 18]).expect("the greeting");
        client.write_all(b"\0\0\0\x03IHAVEOPT\0\0\0\x01\0\0\0\0").expect("sends");
        client.read_exact(&mut [0; 10]).expect("its size");
    }

    fn request(kind: u16, handle: u64, length: u32) -> Vec<u8> {
        let head = [&0x2560_9513_u32.to_be_bytes()[..], &[0, 0], &kind.to_be_bytes(), &handle.to_be_bytes()].concat();
        [&head[..], &[0; 8], &length.to_be_bytes()].concat()
    }

    #[test]
    fn when_all_ends_what_was_asked_for_is_answered_and_no_more_is_taken() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("socket");
        let listener = Listener::unix(&path).expect("listens");
        let ((disk, begins), stop) = (slow(), Stop::new().expect("an event"));
        let (served, told) = (disk.clone(), stop.clone());
        let backend: Arc<dyn Backend> = served;
        let serving = std::thread::spawn(move || serve_all(&listener, &backend, None, &told));
        let mut client = UnixStream::connect(&path).expect("connects");
        client.set_read_timeout(Some(LONG)).expect("a bound");
        choose(&mut client);
        let waits = disk.flushes.lock().expect("nobody has it");
        client.write_all(&request(FLUSH, 1, 0)).expect("sends");
        begins.recv_timeout(LONG).expect("is flushed");
        stop.now();
        let (mut sent, began) = (1, Instant::now());
        while client.write_all(&request(FLUSH, sent + 1, 0)).is_ok() {
            sent += 1;
            assert!(began.elapsed() < LONG, "it is listened to for ever");
            std::thread::sleep(Duration::from_millis(1));
        }
        drop(waits);
        let mut answers = vec![];
        client.read_to_end(&mut answers).expect("the end");
        assert_eq!(answers.len() as u64, 16 * sent);
        serving.join().expect("ends").expect("was told to");
    }

    #[test]
    fn who_takes_no_answers_does_not_hold_up_the_end() {
        let (ours, mut client) = UnixStream::pair().expect("sockets");
        let wire = Wire::new(ours.into());
        let (hang_up, (disk, _begins), (here, gone)) = (wire.hang_up(), slow(), mpsc::channel());
        let thread = std::thread::spawn(move || {
            let _here = here;
            serve(wire, disk, None);
        });
        choose(&mut client);
        client.write_all(&request(READ, 1, SIZE)).expect("sends");
        client.read_exact(&mut [0; 16]).expect("the beginning of its answer");
        let (ended, ends) = mpsc::channel();
        let ending = std::thread::spawn(move || {
            let_go(vec![(hang_up, thread)], &gone, Duration::from_millis(100));
            ended.send(()).expect("is waited for");
        });
        ends.recv_timeout(LONG).expect("ends");
        ending.join().expect("ends");
    }
}
