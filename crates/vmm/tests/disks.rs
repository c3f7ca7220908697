//! Disks over NBD: a server that restarts, and a destination that may not write yet.

#![allow(clippy::unwrap_used, reason = "a test stops at the first thing that is wrong")]

mod common;
use common::{Guest, NbdServer, nbd_tap, placement, wait_state};
use godwit_vmm::{Disk, Qemu, Start, State};
use serde_json::json;
use std::fs::File;
use std::path::Path;
use std::time::{Duration, Instant};

const WRITE: u16 = 1;
const TRIM: u16 = 4;
const WRITE_ZEROES: u16 = 6;

fn image(path: &Path) {
    File::create_new(path).unwrap().set_len(4 << 20).unwrap();
}

fn disk(socket: &Path) -> Disk {
    Disk { socket: socket.to_owned(), export: "disk0".into() }
}

/// A request on the guest's disk, through its own device.
fn io(qemu: &Qemu, request: &str) {
    let line = json!({"command-line": format!("qemu-io -d /machine/peripheral/vd0/virtio-backend \"{request}\"")});
    let said = qemu.monitor(json!({"execute": "human-monitor-command", "arguments": line})).unwrap();
    assert_eq!(said, "", "the monitor says only what is wrong with the command");
}

/// What QEMU printed of the requests, which it writes out when it ends.
fn printed(qemu: &Qemu, folder: &Path) -> String {
    qemu.quit();
    std::fs::read_to_string(placement(folder, vec![]).logs.join("qemu.log")).unwrap()
}

#[test]
fn a_disk_request_waits_for_a_server_that_restarts() {
    const AWAY: Duration = Duration::from_secs(2);
    let folder = tempfile::tempdir().unwrap();
    let (file, socket) = (folder.path().join("disk"), folder.path().join("nbd"));
    image(&file);
    let server = NbdServer::start(&file, &socket);
    let guest = Guest::start(folder.path(), vec![disk(&socket)], Start::Boot);
    io(&guest, "write -P 7 0 4k");
    drop(server);
    let began = Instant::now();
    let restart = std::thread::spawn(move || {
        std::thread::sleep(AWAY);
        NbdServer::start(&file, &socket)
    });
    io(&guest, "read -P 7 0 4k");
    let waited = began.elapsed();
    assert!(waited >= AWAY, "{waited:?}");
    println!("waited {waited:?} for a server that was away for {AWAY:?}");
    let _server = restart.join().unwrap();
    let text = printed(&guest, folder.path());
    assert!(text.contains("read 4096/4096 bytes") && !text.contains("verification failed"), "{text}");
}

#[test]
fn a_destination_does_not_write_before_it_is_told_to_run() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    image(&path("a.disk"));
    image(&path("b.disk"));
    let _a = NbdServer::start(&path("a.disk"), &path("a.nbd"));
    let _b = NbdServer::start(&path("b.disk"), &path("b.nbd"));
    let requests = nbd_tap(&path("b.tap"), path("b.nbd"));
    let writes = || requests.lock().unwrap().iter().filter(|t| [WRITE, TRIM, WRITE_ZEROES].contains(t)).count();

    let source = Guest::start(&path("a"), vec![disk(&path("a.nbd"))], Start::Boot);
    let destination = Guest::start(&path("b"), vec![disk(&path("b.tap"))], Start::Incoming);
    destination.migrate_incoming(&path("in.sock")).unwrap();
    common::migrate(&source, &path("in.sock"));
    source.stop_now().unwrap();
    wait_state(&source, State::Postmigrate);
    wait_state(&destination, State::Stopped);
    std::thread::sleep(Duration::from_millis(500));
    println!("requests before `cont`, by type: {:?}", requests.lock().unwrap());
    assert_eq!(writes(), 0);

    destination.cont().unwrap();
    io(&destination, "write -P 7 0 4k");
    assert!(writes() > 0, "the tap sees writes, so that none seen before means none made");
}
