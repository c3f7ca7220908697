//! A disk in memory, served at a unix socket until it is killed:
//!
//! ```text
//! cargo run --release -p godwit-nbd --example memdisk -- /tmp/memdisk.sock 1024
//! nbdinfo 'nbd+unix:///?socket=/tmp/memdisk.sock'
//! ```
//!
//! It shows what a shell around [`Server`] has to do: read, take all requests, answer, send all answers in one go.

use bytes::{Bytes, BytesMut};
use godwit_nbd::{Command, Export, Extent, Piece, ProtocolError, Reply, Server};
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, PoisonError, RwLock, RwLockWriteGuard};

/// What is allocated, and locked, at once.
const CHUNK: usize = 64 << 10;

/// Chunks; those never written are holes.
struct Disk(Vec<RwLock<Option<Box<[u8]>>>>);

/// A part of a request that lies in one chunk: its number, where it begins there, where in the request, how long.
fn parts(offset: u64, length: usize) -> impl Iterator<Item = (usize, usize, usize, usize)> {
    let start = usize::try_from(offset).expect("the disk fits into memory");
    let mut done = 0;
    std::iter::from_fn(move || {
        let (at, before) = (start + done, done);
        let n = (CHUNK - at % CHUNK).min(length - done);
        done += n;
        (n > 0).then_some((at / CHUNK, at % CHUNK, before, n))
    })
}

impl Disk {
    fn lock(&self, chunk: usize) -> RwLockWriteGuard<'_, Option<Box<[u8]>>> {
        self.0[chunk].write().unwrap_or_else(PoisonError::into_inner)
    }

    fn read(&self, offset: u64, length: u32) -> Reply {
        let pieces = parts(offset, length as usize).map(|(chunk, at, _, n)| {
            match &*self.0[chunk].read().unwrap_or_else(PoisonError::into_inner) {
                Some(bytes) => Piece::Data(Bytes::copy_from_slice(&bytes[at..at + n])),
                None => Piece::Hole(n as u32),
            }
        });
        Reply::Data(pieces.collect())
    }

    fn write(&self, offset: u64, data: &[u8]) -> Reply {
        for (chunk, at, from, n) in parts(offset, data.len()) {
            let mut chunk = self.lock(chunk);
            let bytes = chunk.get_or_insert_with(|| vec![0; CHUNK].into_boxed_slice());
            bytes[at..at + n].copy_from_slice(&data[from..from + n]);
        }
        Reply::Done
    }

    fn zero(&self, offset: u64, length: u32) -> Reply {
        for (chunk, at, _, n) in parts(offset, length as usize) {
            let mut chunk = self.lock(chunk);
            match &mut *chunk {
                whole if n == CHUNK => *whole = None,
                Some(bytes) => bytes[at..at + n].fill(0),
                None => {}
            }
        }
        Reply::Done
    }

    fn status(&self, offset: u64, length: u32) -> Reply {
        let extents = parts(offset, length as usize).map(|(chunk, _, _, n)| Extent {
            length: n as u32,
            hole: self.0[chunk].read().unwrap_or_else(PoisonError::into_inner).is_none(),
        });
        Reply::Status(extents.collect())
    }

    fn perform(&self, command: Command) -> Reply {
        match command {
            Command::Read { offset, length } => self.read(offset, length),
            Command::Write { offset, data, .. } => self.write(offset, &data),
            Command::Trim { offset, length, .. } | Command::WriteZeroes { offset, length, .. } => {
                self.zero(offset, length)
            }
            Command::BlockStatus { offset, length, .. } => self.status(offset, length),
            // Memory is as durable as it will ever be.
            Command::Flush | Command::Cache { .. } => Reply::Done,
        }
    }
}

fn serve(mut client: UnixStream, disk: &Disk, exports: Vec<Export>) -> Result<(), ProtocolError> {
    let mut server = Server::new(exports);
    let mut buffer = BytesMut::zeroed(256 << 10);
    loop {
        while let Some(request) = server.poll_request()? {
            let reply = disk.perform(request.command);
            server.reply(request.cookie, reply);
        }
        if !server.transmit().is_empty() {
            if client.write_all(server.transmit()).is_err() {
                return Ok(());
            }
            server.transmit().clear();
            // There is room again for requests that have come already.
            continue;
        }
        if server.is_closed() {
            return Ok(());
        }
        match client.read(&mut buffer) {
            Ok(n) if n > 0 => server.receive(&buffer[..n]),
            _ => return Ok(()),
        }
    }
}

fn main() -> std::io::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let (Some(socket), Some(Ok(mib))) = (arguments.next(), arguments.next().map(|a| a.parse::<usize>())) else {
        eprintln!("usage: memdisk SOCKET SIZE_IN_MIB");
        std::process::exit(2);
    };
    let listener = UnixListener::bind(&socket)?;
    let size = mib << 20;
    let disk = Arc::new(Disk((0..size.div_ceil(CHUNK)).map(|_| RwLock::new(None)).collect()));
    let exports = vec![Export { name: "disk".into(), size: size as u64, preferred_block: 4096, read_only: false }];
    for client in listener.incoming() {
        let (client, disk, exports) = (client?, disk.clone(), exports.clone());
        std::thread::spawn(move || {
            if let Err(error) = serve(client, &disk, exports) {
                eprintln!("a client was cut off: {error}");
            }
        });
    }
    Ok(())
}
