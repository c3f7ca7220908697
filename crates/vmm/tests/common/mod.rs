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

/// Has a QEMU migrate to one that listens there, and stands between them as the nodes do.
pub fn migrate(source: &Qemu, to: &Path) {
    let (source, destination) = (source.migrate(None, false).unwrap(), UnixStream::connect(to).unwrap());
    let [mut stream, mut answers] = [&source, &destination].map(|end| end.try_clone().unwrap());
    let (mut into, mut back) = (destination, source);
    std::thread::spawn(move || std::io::copy(&mut stream, &mut into));
    std::thread::spawn(move || std::io::copy(&mut answers, &mut back));
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
