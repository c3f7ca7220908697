//! The services in the guest: control and echo over TCP, a thread for each connection with a bound on both, and an echo of datagrams.

use std::{
    io::{self, BufReader, Read, Write},
    net::{TcpListener, TcpStream, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::AcqRel, Ordering::Acquire},
    },
    thread,
    time::Duration,
};

use rustix::net::sockopt;

use crate::{
    engine::Engine,
    protocol::{Reply, Request},
    wire::{self, WireError},
};

/// Most control connections at a time; a host needs one or two.
pub const MAX_CONTROL_CONNECTIONS: usize = 32;

/// Most echo connections at a time; each is a thread.
pub const MAX_ECHO_CONNECTIONS: usize = 64;

/// Silence after which a peer is asked whether it is still there. A host that went away without a word (its network
/// was torn down) must not hold one of a bounded number of connections for ever.
const KEEPALIVE_AFTER: Duration = Duration::from_secs(60);

/// Pause after a failed accept: it fails for want of descriptors or memory, which a busy loop would not bring back.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

/// Echo buffer of a connection.
const ECHO_BYTES: usize = 16 * 1024;

/// Longest datagram that is sent back whole.
const DATAGRAM_BYTES: usize = 2048;

/// Answers control connections, for ever.
pub fn serve_control(listener: &TcpListener, engine: &Arc<Engine>) -> ! {
    let engine = engine.clone();
    accept(listener, "control", MAX_CONTROL_CONNECTIONS, refuse_control, move |stream| {
        // Whatever ends a connection ends only that: the host sees its side of it.
        let _ = control(&stream, &engine);
    })
}

/// Echoes, for ever.
pub fn serve_echo(listener: &TcpListener) -> ! {
    accept(listener, "echo", MAX_ECHO_CONNECTIONS, drop, |stream| {
        let _ = echo(&stream);
    })
}

/// Sends each datagram back to where it came from, for ever. One that cannot be sent is lost, as it may be anywhere on its way.
pub fn serve_datagrams(socket: &UdpSocket) -> ! {
    let mut buffer = [0; DATAGRAM_BYTES];
    loop {
        match socket.recv_from(&mut buffer) {
            Ok((length, from)) => drop(socket.send_to(&buffer[..length], from)),
            // A refusal by who was answered before is no reason to end; without memory a busy loop would be none to go on.
            Err(_) => thread::sleep(Duration::from_millis(1)),
        }
    }
}

fn accept(
    listener: &TcpListener,
    name: &str,
    most: usize,
    refuse: impl Fn(TcpStream),
    serve: impl Fn(TcpStream) + Clone + Send + 'static,
) -> ! {
    let open = Arc::new(AtomicUsize::new(0));
    loop {
        let Ok((stream, _)) = listener.accept() else {
            thread::sleep(ACCEPT_RETRY);
            continue;
        };
        if open.load(Acquire) >= most {
            refuse(stream);
            continue;
        }
        let _ = prepare(&stream);
        let place = Place::take(&open);
        let serve = serve.clone();
        // A thread that cannot be had closes the connection, which is all that can be said.
        let _ = thread::Builder::new().name(name.to_owned()).spawn(move || {
            let _place = place;
            serve(stream);
        });
    }
}

/// One of a bounded number of connections.
struct Place(Arc<AtomicUsize>);

impl Place {
    fn take(open: &Arc<AtomicUsize>) -> Self {
        open.fetch_add(1, AcqRel);
        Self(open.clone())
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, AcqRel);
    }
}

fn prepare(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    Ok(sockopt::set_tcp_keepidle(stream, KEEPALIVE_AFTER)?)
}

fn refuse_control(mut stream: TcpStream) {
    let why = format_args!("{MAX_CONTROL_CONNECTIONS} control connections are open already; close one and try again");
    let _ = stream.set_write_timeout(Some(Duration::from_secs(1)));
    let _ = wire::write_line(&mut stream, &wire::refuse(why));
}

/// One reply line for each request line, until the peer closes or sends what is not a line.
fn control(mut stream: &TcpStream, engine: &Engine) -> Result<(), WireError> {
    let mut reader = BufReader::new(stream);
    let mut line = Vec::new();
    loop {
        match wire::read_line(&mut reader, &mut line) {
            Ok(true) => {}
            Ok(false) => return Ok(()),
            Err(error) => return wire::write_line(&mut stream, &wire::refuse(error)),
        }
        let reply: Reply = match wire::decode::<Request>(&line) {
            Ok(request) => engine.handle(request),
            Err(error) => wire::refuse(error),
        };
        wire::write_line(&mut stream, &reply)?;
    }
}

fn echo(mut stream: &TcpStream) -> io::Result<()> {
    let mut buffer = vec![0; ECHO_BYTES];
    loop {
        match stream.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(read) => stream.write_all(&buffer[..read])?,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}
