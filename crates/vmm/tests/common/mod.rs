//! Tiny guests, and what ends them.
//!
//! The guests have no disk to boot from: their firmware says so and waits, and their vCPUs run, which is all that is asked.

#![allow(clippy::unwrap_used, dead_code, reason = "a test stops at the first thing that is wrong; each uses a part")]

use godwit_units::Bytes;
use godwit_vmm::{Accel, Boot, Disk, Placement, Qemu, Start, State, VmSpec};
use std::io::{Read, Write};
use std::ops::Deref;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Bound on whatever takes moments when all is well.
pub const SOON: Duration = Duration::from_secs(120);

pub fn spec() -> VmSpec {
    VmSpec {
        name: "tiny".into(),
        machine: "pc-q35-7.2".into(),
        cpu: "qemu64,+ssse3".into(),
        vcpus: 1,
        max_vcpus: 2,
        memory: Bytes::kib(131_080),
        accel: Accel::Tcg,
        boot: Boot::Disk,
        devices: vec![],
    }
}

pub fn placement(folder: &Path, disks: Vec<Disk>) -> Placement {
    Placement { run: folder.join("run"), logs: folder.join("logs"), disks, nics: vec![] }
}

/// A QEMU that ends with the test, also when that panics.
pub struct Guest(pub Qemu);

impl Guest {
    pub fn start(folder: &Path, disks: Vec<Disk>, start: Start) -> Self {
        Self(Qemu::start(&spec(), &placement(folder, disks), start).unwrap())
    }
}

impl Deref for Guest {
    type Target = Qemu;
    fn deref(&self) -> &Qemu {
        &self.0
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.0.kill();
    }
}

pub fn wait_for(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + SOON;
    while !is_so() {
        assert!(Instant::now() < deadline, "waited in vain for: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

pub fn wait_state(qemu: &Qemu, wanted: State) {
    wait_for(&format!("{wanted:?}"), || qemu.state().ok() == Some(wanted));
}

/// What a [`Relay`] does with SHUT, the destination's word that it has everything.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Shut {
    Hold,
    Pass,
}

/// Stands between two QEMUs as the nodes do, and can be cut.
pub struct Relay {
    pub socket: PathBuf,
    ends: Arc<Mutex<Vec<UnixStream>>>,
    shut_seen: Arc<Mutex<bool>>,
}

impl Relay {
    pub fn start(folder: &Path, to: PathBuf, shut: Shut) -> Self {
        let socket = folder.join("relay.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let (ends, shut_seen) = (Arc::new(Mutex::new(vec![])), Arc::new(Mutex::new(false)));
        let (theirs, seen) = (ends.clone(), shut_seen.clone());
        std::thread::spawn(move || {
            let source = listener.accept().unwrap().0;
            let destination = UnixStream::connect(to).unwrap();
            theirs.lock().unwrap().extend([source.try_clone().unwrap(), destination.try_clone().unwrap()]);
            let (mut from, mut into) = (source.try_clone().unwrap(), destination.try_clone().unwrap());
            std::thread::spawn(move || std::io::copy(&mut from, &mut into));
            back(destination, source, shut, &seen);
        });
        Self { socket, ends, shut_seen }
    }

    pub fn wait_shut(&self) {
        wait_for("SHUT", || *self.shut_seen.lock().unwrap());
    }

    pub fn cut(&self) {
        for end in self.ends.lock().unwrap().iter() {
            let _ = end.shutdown(std::net::Shutdown::Both);
        }
    }
}

/// The return path: u16 type, u16 length, data. SHUT is type 1.
fn back(mut from: UnixStream, mut to: UnixStream, shut: Shut, seen: &Mutex<bool>) {
    let mut head = [0; 4];
    while from.read_exact(&mut head).is_ok() {
        let mut data = vec![0; usize::from(u16::from_be_bytes([head[2], head[3]]))];
        if from.read_exact(&mut data).is_err() {
            return;
        }
        let is_shut = head[..2] == [0, 1];
        if !(is_shut && shut == Shut::Hold) && (to.write_all(&head).is_err() || to.write_all(&data).is_err()) {
            return;
        }
        if is_shut {
            *seen.lock().unwrap() = true;
        }
    }
}

/// `qemu-nbd` with one export, `disk0`.
pub struct NbdServer(Child);

impl NbdServer {
    pub fn start(image: &Path, socket: &Path) -> Self {
        let _ = std::fs::remove_file(socket);
        let child = Command::new("qemu-nbd")
            .args(["--persistent", "--shared=4", "--format=raw", "--export-name=disk0", "--socket"])
            .args([socket, image])
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let server = Self(child);
        wait_for("qemu-nbd", || UnixStream::connect(socket).is_ok());
        server
    }
}

impl Drop for NbdServer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Relays NBD connections, and notes the type of each request.
pub fn nbd_tap(socket: &Path, to: PathBuf) -> Arc<Mutex<Vec<u16>>> {
    let listener = UnixListener::bind(socket).unwrap();
    let seen = Arc::new(Mutex::new(vec![]));
    let notes = seen.clone();
    std::thread::spawn(move || {
        for client in listener.incoming().map_while(Result::ok) {
            let server = UnixStream::connect(&to).unwrap();
            let (mut answers, mut back) = (server.try_clone().unwrap(), client.try_clone().unwrap());
            std::thread::spawn(move || std::io::copy(&mut answers, &mut back));
            let notes = notes.clone();
            std::thread::spawn(move || note_requests(client, server, &notes));
        }
    });
    seen
}

/// A request is the magic, u16 flags, u16 type, and 20 bytes more. What the tests write does not hold the magic.
fn note_requests(mut client: UnixStream, mut server: UnixStream, notes: &Mutex<Vec<u16>>) {
    let (mut tail, mut chunk) = (vec![], [0; 65_536]);
    while let Ok(n @ 1..) = client.read(&mut chunk) {
        tail.extend_from_slice(&chunk[..n]);
        let mut at = 0;
        while at + 8 <= tail.len() {
            if tail[at..at + 4] == [0x25, 0x60, 0x95, 0x13] {
                notes.lock().unwrap().push(u16::from_be_bytes([tail[at + 6], tail[at + 7]]));
            }
            at += 1;
        }
        tail.drain(..at);
        if server.write_all(&chunk[..n]).is_err() {
            return;
        }
    }
}
