//! Bytes to and from a client, in the clear or by TLS.

use bytes::BytesMut;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, Shutdown, recv, send, shutdown};
use rustls::{ServerConfig, ServerConnection};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// Room for what comes: many small requests at once, or a part of a large write.
const ROOM: usize = 256 << 10;
/// Less room than this, and more is made.
const LEAST_ROOM: usize = 64 << 10;
/// Bytes that may be under way to a client on the same host. The kernel's usual 208 KiB have the server and its client wait for each other
/// by turns: four reads of 1 MiB go 2.2 times as fast with this.
const UNDER_WAY: usize = 1 << 20;
/// A TLS record and its frame: what is read at once.
const RECORD: usize = 18 << 10;

/// A client's socket, blocking.
#[derive(Debug)]
pub struct Wire {
    socket: Arc<OwnedFd>,
    /// Whether its other end is on this host.
    unix: bool,
    tls: Option<Box<ServerConnection>>,
    /// Until when the client is waited for.
    deadline: Option<Instant>,
    /// Set by a [`HangUp`]: nothing more is taken from the client.
    no_more: Arc<AtomicBool>,
}

/// Ends a client's connection from elsewhere, at the latest when it is dropped.
#[derive(Debug)]
pub struct HangUp {
    socket: Arc<OwnedFd>,
    no_more: Arc<AtomicBool>,
}

impl HangUp {
    /// Nothing more is taken from the client. What it has asked for is done and answered, and then its connection ends.
    pub(crate) fn take_no_more(&self) {
        self.no_more.store(true, Ordering::Relaxed);
        // Wakes who waits for more. An error says that it is over already.
        let _ = shutdown(&self.socket, Shutdown::Read);
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        // A [`HangUp`] may keep the socket open, and the client wait for its end.
        let _ = shutdown(&self.socket, Shutdown::Both);
    }
}

impl Drop for HangUp {
    fn drop(&mut self) {
        // An error says that it is over already.
        let _ = shutdown(&self.socket, Shutdown::Both);
    }
}

impl Wire {
    /// A connected stream socket in blocking mode.
    #[must_use]
    pub fn new(socket: OwnedFd) -> Self {
        let unix = rustix::net::sockopt::socket_domain(&socket) == Ok(rustix::net::AddressFamily::UNIX);
        if unix {
            make_room(&socket);
        }
        Self { socket: Arc::new(socket), unix, tls: None, deadline: None, no_more: Arc::default() }
    }

    /// The client has until then, for all that it sends and takes; none: as long as it likes.
    pub(crate) const fn has_until(&mut self, deadline: Option<Instant>) {
        self.deadline = deadline;
    }

    /// What ends it from elsewhere.
    #[must_use]
    pub fn hang_up(&self) -> HangUp {
        HangUp { socket: self.socket.clone(), no_more: self.no_more.clone() }
    }

    pub(crate) fn socket(&self) -> BorrowedFd<'_> {
        (*self.socket).as_fd()
    }

    /// The client begins TLS. Returns when it has shown who it is.
    pub(crate) fn start_tls(&mut self, config: Arc<ServerConfig>) -> io::Result<()> {
        let mut tls = Box::new(ServerConnection::new(config).map_err(io::Error::other)?);
        let mut socket = Socket(&self.socket, self.deadline);
        while tls.is_handshaking() {
            tls.complete_io(&mut socket)?;
        }
        self.tls = Some(tls);
        Ok(())
    }

    /// Waits for bytes and appends those that are a request's, if any; false: there will be no more. `how` says how many there is
    /// use for; TLS gives what is in a record.
    pub(crate) fn receive(&mut self, into: &mut BytesMut, how: Expected) -> io::Result<bool> {
        // A Unix socket gives what came before, and then the end. TCP's gives what comes after, too: that may never end.
        if !self.unix && self.no_more.load(Ordering::Relaxed) {
            return Ok(false);
        }
        let Some(tls) = &mut self.tls else {
            await_ready(&self.socket, PollFlags::IN, self.deadline)?;
            return Ok(append(&self.socket, into, how)? > 0);
        };
        let (mut socket, before) = (Socket(&self.socket, self.deadline), into.len());
        // The first request may have come with the handshake's last message, and nothing after it.
        match take(tls, into)? {
            Taken::Nothing => {}
            Taken::Some => return Ok(true),
            Taken::End => return Ok(into.len() > before),
        }
        let mut record = [0; RECORD];
        let n = socket.read(&mut record)?;
        let mut come = &record[..n];
        while !come.is_empty() {
            tls.read_tls(&mut come)?;
            if matches!(take(tls, into)?, Taken::End) {
                // What came before the end is done.
                return Ok(into.len() > before);
            }
        }
        while tls.wants_write() {
            tls.write_tls(&mut socket)?;
        }
        Ok(n > 0)
    }

    /// Whether its other end is on this host, and bytes go as they are: what it holds lies in large pieces.
    pub(crate) fn is_local(&self) -> bool {
        self.is_plain() && self.unix
    }

    /// Whether bytes are sent as they are.
    pub(crate) const fn is_plain(&self) -> bool {
        self.tls.is_none()
    }

    /// Sends all of it, and forgets it.
    pub(crate) fn send(&mut self, from: &mut BytesMut) -> io::Result<()> {
        let mut socket = Socket(&self.socket, self.deadline);
        match &mut self.tls {
            None => socket.write_all(from)?,
            Some(tls) => {
                let mut rest = &from[..];
                while !rest.is_empty() {
                    // As much as it keeps at once.
                    let taken = tls.writer().write(rest)?;
                    rest = &rest[taken..];
                    while tls.wants_write() {
                        tls.write_tls(&mut socket)?;
                    }
                }
            }
        }
        from.clear();
        Ok(())
    }

    /// Says that nothing more follows, where there is a word for it: else the client of a TLS connection does not know who has cut it.
    pub(crate) fn say_goodbye(&mut self) {
        let Some(tls) = &mut self.tls else { return };
        tls.send_close_notify();
        let mut socket = Socket(&self.socket, self.deadline);
        // Whoever has left already does not miss it.
        while tls.wants_write() && tls.write_tls(&mut socket).is_ok() {}
    }
}

/// What there was to be had of a TLS connection without reading its socket.
enum Taken {
    Nothing,
    Some,
    /// The client has said that no more follows.
    End,
}

fn take(tls: &mut ServerConnection, into: &mut BytesMut) -> io::Result<Taken> {
    let state = tls.process_new_packets().map_err(io::Error::other)?;
    let (start, more) = (into.len(), state.plaintext_bytes_to_read());
    into.resize(start + more, 0);
    tls.reader().read_exact(&mut into[start..])?;
    Ok(match (state.peer_has_closed(), more) {
        (true, _) => Taken::End,
        (false, 0) => Taken::Nothing,
        (false, _) => Taken::Some,
    })
}

/// Waits for bytes or the end of them, or for room, until a deadline; where there is none, whoever reads or writes waits.
fn await_ready(socket: &OwnedFd, what: PollFlags, deadline: Option<Instant>) -> io::Result<()> {
    let Some(deadline) = deadline else { return Ok(()) };
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        // Not asked of the system: a client that always has more to say is ready at any time.
        if left.is_zero() {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "the client took too long"));
        }
        let timeout = Timespec { tv_sec: left.as_secs().cast_signed(), tv_nsec: left.subsec_nanos().into() };
        let mut fds = [PollFd::from_borrowed_fd(socket.as_fd(), what)];
        match poll(&mut fds, Some(&timeout)) {
            Ok(0) | Err(Errno::INTR) => {}
            Ok(_) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
    }
}

/// A socket as the standard library has it, and until when it is waited for.
struct Socket<'a>(&'a OwnedFd, Option<Instant>);

impl Read for Socket<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        await_ready(self.0, PollFlags::IN, self.1)?;
        Ok(rustix::io::retry_on_intr(|| recv(self.0, &mut *into, RecvFlags::empty()))?.0)
    }
}

impl Write for Socket<'_> {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        // Until a deadline all waiting is done here: a timeout of the socket's would be one for each piece that the client takes.
        let wait = if self.1.is_some() { SendFlags::DONTWAIT } else { SendFlags::empty() };
        loop {
            await_ready(self.0, PollFlags::OUT, self.1)?;
            match send(self.0, from, SendFlags::NOSIGNAL | wait) {
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) if self.1.is_some() => {}
                sent => return Ok(sent?),
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// What a Unix socket may hold. TCP finds out by itself.
fn make_room(socket: &OwnedFd) {
    use rustix::net::sockopt;
    // Above the system's limit only for root; without it, it is slower and no more.
    let _ = sockopt::set_socket_send_buffer_size_force(socket, UNDER_WAY)
        .or_else(|_| sockopt::set_socket_send_buffer_size(socket, UNDER_WAY));
}

/// How much of what a client sends is taken at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Expected {
    /// Whatever is there.
    All,
    /// No more than these: what is known to be missing of a request, or what is to be known before the rest is taken otherwise.
    AtMost(usize),
}

/// Receives into the room at the end of a buffer, which is not filled with zeroes first: they would cost a tenth of a large write.
fn append(socket: &OwnedFd, into: &mut BytesMut, how: Expected) -> Result<usize, Errno> {
    match how {
        Expected::All if into.capacity() - into.len() < LEAST_ROOM => into.reserve(ROOM),
        Expected::All => {}
        Expected::AtMost(most) => into.reserve(most),
    }
    let room = into.spare_capacity_mut();
    let most = if let Expected::AtMost(most) = how { most } else { room.len() };
    let filled = rustix::io::retry_on_intr(|| {
        let ((filled, _), _) = recv(socket, &mut room[..most], RecvFlags::empty())?;
        Ok(filled.len())
    })?;
    // SAFETY: `recv` has written the first `filled` bytes of the room after the buffer's end.
    unsafe { into.set_len(into.len() + filled) };
    Ok(filled)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Backend, Plain};
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    use rustls::pki_types::{PrivatePkcs8KeyDer, ServerName};
    use rustls::{ClientConfig, ClientConnection, RootCertStore};
    use std::time::Duration;

    fn both() -> (Arc<ServerConfig>, Arc<ClientConfig>) {
        let key = rcgen::KeyPair::generate().expect("a key");
        let cert = rcgen::CertificateParams::new(["disks".into()]).expect("a name").self_signed(&key).expect("signs");
        let mut roots = RootCertStore::empty();
        roots.add(cert.der().clone()).expect("a certificate");
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let tls13 = [&rustls::version::TLS13];
        let server = ServerConfig::builder_with_provider(provider.clone()).with_protocol_versions(&tls13);
        let server = server.expect("TLS 1.3").with_no_client_auth();
        let key = PrivatePkcs8KeyDer::from(key.serialize_der()).into();
        let server = server.with_single_cert(vec![cert.der().clone()], key).expect("its own key");
        let client = ClientConfig::builder_with_provider(provider).with_protocol_versions(&tls13).expect("TLS 1.3");
        (Arc::new(server), Arc::new(client.with_root_certificates(roots).with_no_client_auth()))
    }

    #[test]
    fn a_request_that_comes_with_the_handshakes_last_message_is_not_waited_for() {
        use rustix::net::sockopt::{Timeout, set_socket_timeout};
        let (server, client) = both();
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).expect("two sockets");
        // A wait for what has come already would be for ever.
        let patience = Some(Duration::from_secs(20));
        set_socket_timeout(&ours, Timeout::Recv, patience).expect("a bound");
        let serving = std::thread::spawn(move || {
            let mut wire = Wire::new(ours);
            wire.start_tls(server).expect("a handshake");
            let mut got = BytesMut::new();
            while got.len() < 7 {
                assert!(wire.receive(&mut got, Expected::All).expect("reads"), "it ends after {got:?}");
            }
            got
        });
        let mut tls = ClientConnection::new(client, ServerName::try_from("disks").expect("a name")).expect("a client");
        let mut socket = Socket(&theirs, None);
        while tls.wants_write() {
            tls.write_tls(&mut socket).expect("sends its hello");
        }
        while tls.is_handshaking() {
            tls.read_tls(&mut socket).expect("reads the answer");
            tls.process_new_packets().expect("a good one");
        }
        tls.writer().write_all(b"request").expect("room for it");
        let mut last = vec![];
        while tls.wants_write() {
            tls.write_tls(&mut last).expect("appends");
        }
        socket.write_all(&last).expect("sends both at once");
        assert_eq!(&serving.join().expect("is served")[..], b"request");
        drop(theirs);
    }

    #[test]
    fn what_comes_with_the_end_of_tls_is_a_request_as_any_other() {
        let (server, client) = both();
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).expect("two sockets");
        let (shaken, hands) = std::sync::mpsc::channel();
        let (sent, all) = std::sync::mpsc::channel();
        let serving = std::thread::spawn(move || {
            let mut wire = Wire::new(ours);
            wire.start_tls(server).expect("a handshake");
            shaken.send(()).expect("is waited for");
            all.recv().expect("is sent");
            let mut got = BytesMut::new();
            assert!(wire.receive(&mut got, Expected::All).expect("reads"), "nobody looks at what came with the end");
            assert!(!wire.receive(&mut got, Expected::All).expect("reads"), "there is no more");
            got
        });
        let mut tls = ClientConnection::new(client, ServerName::try_from("disks").expect("a name")).expect("a client");
        let mut socket = Socket(&theirs, None);
        while tls.is_handshaking() {
            tls.complete_io(&mut socket).expect("a handshake");
        }
        hands.recv().expect("is served");
        tls.writer().write_all(b"request").expect("room for it");
        tls.send_close_notify();
        let mut last = vec![];
        while tls.wants_write() {
            tls.write_tls(&mut last).expect("appends");
        }
        socket.write_all(&last).expect("sends both at once");
        sent.send(()).expect("is waited for");
        assert_eq!(&serving.join().expect("is served")[..], b"request");
    }

    #[test]
    fn who_says_too_little_until_his_time_is_over_is_waited_for_no_longer() {
        let soon = || Some(Instant::now() + Duration::from_millis(100));
        let pair =
            || socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).expect("two sockets");
        // In the clear, and where TLS was begun with a byte of a hello.
        let (ours, theirs) = pair();
        let mut wire = Wire::new(ours);
        wire.has_until(soon());
        let mut got = BytesMut::new();
        let silent = wire.receive(&mut got, Expected::All).expect_err("nothing came");
        assert_eq!(silent.kind(), io::ErrorKind::TimedOut);
        Socket(&theirs, None).write_all(&[22]).expect("sends");
        let silent = wire.start_tls(both().0).expect_err("nothing more came");
        assert_eq!(silent.kind(), io::ErrorKind::TimedOut);
        // Later it may be silent for as long as it likes.
        wire.has_until(None);
        let sending = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(300));
            Socket(&theirs, None).write_all(&[1]).expect("sends");
        });
        assert!(wire.receive(&mut got, Expected::All).expect("reads"));
        sending.join().expect("ends");
    }

    #[test]
    fn who_always_has_more_to_say_is_listened_to_no_longer_than_who_says_too_little() {
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).expect("two sockets");
        let (mut wire, began) = (Wire::new(ours), Instant::now());
        wire.has_until(Some(began + Duration::from_millis(100)));
        let over = std::thread::scope(|scope| {
            // Until it is shut out.
            scope.spawn(|| while Socket(&theirs, None).write_all(&[1; 64]).is_ok() {});
            let mut got = BytesMut::new();
            loop {
                got.clear();
                if let Err(over) = wire.receive(&mut got, Expected::AtMost(1)) {
                    drop(wire);
                    break over;
                }
                assert!(began.elapsed() < Duration::from_secs(20), "it is listened to for ever");
            }
        });
        assert_eq!(over.kind(), io::ErrorKind::TimedOut);
    }

    #[test]
    fn who_takes_its_answers_bit_by_bit_has_no_longer_for_all_of_them() {
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).expect("two sockets");
        let mut wire = Wire::new(ours);
        wire.has_until(Some(Instant::now() + Duration::from_millis(100)));
        let sent = std::thread::scope(|scope| {
            // At most 4 MiB a second.
            scope.spawn(|| {
                let mut bit = [0; 4096];
                while Socket(&theirs, None).read(&mut bit).is_ok_and(|n| n > 0) {
                    std::thread::sleep(Duration::from_millis(1));
                }
            });
            let sent = wire.send(&mut BytesMut::zeroed(8 << 20));
            drop(wire);
            sent
        });
        assert_eq!(sent.expect_err("all of it was taken").kind(), io::ErrorKind::TimedOut);
    }

    #[test]
    fn who_takes_its_leave_by_tls_is_told_that_nothing_was_cut_off() {
        let folder = tempfile::tempdir().expect("a folder");
        let disk = folder.path().join("disk");
        std::fs::write(&disk, [0; 4096]).expect("a disk");
        let backend: Arc<dyn Backend> = Arc::new(Plain::open(&disk).expect("opens"));
        let option = |number: u32| [b"IHAVEOPT".as_slice(), &number.to_be_bytes(), &[0; 4]].concat();
        let goodbye = [&0x2560_9513_u32.to_be_bytes()[..], &[0, 0, 0, 2], &[0; 20]].concat();
        // In the handshake, which is answered with so many bytes; and behind the choice of an export.
        for (leave, answer) in [(option(2), 20), ([option(1), goodbye].concat(), 10)] {
            let ((server, client), backend) = (both(), backend.clone());
            let (ours, theirs) =
                socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).expect("two sockets");
            let serving = std::thread::spawn(move || crate::serve(Wire::new(ours), backend, Some(server)));
            let mut socket = Socket(&theirs, None);
            socket.read_exact(&mut [0; 18]).expect("the greeting");
            // No zeroes after the export's description; and TLS.
            socket.write_all(&[&[0, 0, 0, 3][..], &option(5)].concat()).expect("sends");
            socket.read_exact(&mut [0; 20]).expect("may begin it");
            let mut tls = ClientConnection::new(client, ServerName::try_from("disks").expect("a name")).expect("one");
            let mut talk = rustls::Stream::new(&mut tls, &mut socket);
            talk.write_all(&leave).expect("sends");
            let mut come = vec![];
            talk.read_to_end(&mut come).expect("an end that the server has told of");
            assert_eq!(come.len(), answer);
            serving.join().expect("ends");
        }
    }
}
