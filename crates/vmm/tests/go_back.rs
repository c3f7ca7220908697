//! A real QEMU whose post-copy has begun, and whose destination never was: it gets its guest back, whatever became of its stream.

#![allow(clippy::unwrap_used, reason = "a test stops at the first thing that is wrong")]

mod common;

use common::{Guest, spec, wait_for};
use godwit_vmm::{MigrationStatus, Qemu, Start, State, VmmError};
use std::fs::File;
use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;

const MIB: usize = 1 << 20;
/// The command that carries the devices' state. There is nothing like it in the noise, which is odd.
const PACKAGED: [u8; 5] = [8, 0, 7, 0, 4];

/// Fills what the firmware leaves alone, so that there is something to send.
fn fill(qemu: &Qemu) {
    let size = spec().memory;
    let found =
        std::fs::read_dir(format!("/proc/{}/fd", qemu.pid())).unwrap().filter_map(|entry| Some(entry.ok()?.path()));
    let ram = found.into_iter().find(|path| {
        let link = std::fs::read_link(path).unwrap_or_default();
        link.to_string_lossy().contains("memfd:") && path.metadata().is_ok_and(|m| m.len() == size.0)
    });
    let ram = File::options().write(true).open(ram.unwrap()).unwrap();
    let noise: Vec<u8> = (0..MIB as u32).map(|n| (n.wrapping_mul(0x9e37_79b1) >> 24) as u8 | 1).collect();
    for at in 16..96 {
        ram.write_all_at(&noise, (at * MIB) as u64).unwrap();
    }
}

fn contents(qemu: &Qemu) -> Vec<u8> {
    let mut all = vec![];
    qemu.ram(spec().memory).unwrap().read_to_end(&mut all).unwrap();
    all
}

/// When nobody reads QEMU's stream any more.
#[derive(Clone, Copy, Debug)]
enum Until {
    /// After so many bytes of the devices' state.
    Devices(usize),
    /// The devices' state is through.
    Handed,
    /// The last page is.
    Sent,
}

/// Begins a post-copy, and reads until then: the socket.
fn begin(qemu: &Qemu, until: Until) -> UnixStream {
    let mut socket = qemu.migrate(None, true).unwrap();
    socket.read_exact(&mut vec![0; MIB]).unwrap();
    wait_for("rounds", || qemu.migration().unwrap().status == MigrationStatus::Active);
    qemu.start_postcopy().unwrap();
    if let Until::Devices(n) = until {
        let (mut seen, mut piece) = (vec![], [0; 1024]);
        while !seen.windows(PACKAGED.len()).any(|window| window == PACKAGED) {
            socket.read_exact(&mut piece).unwrap();
            seen.drain(..seen.len().saturating_sub(PACKAGED.len()));
            seen.extend_from_slice(&piece);
        }
        // There may be no more of it than that; what comes then is ten pages in a second.
        socket.set_read_timeout(Some(std::time::Duration::from_millis(300))).unwrap();
        let _ = socket.read_exact(&mut vec![0; n]);
        return socket;
    }
    if let Until::Sent = until {
        qemu.follow(None).unwrap();
    }
    socket.set_nonblocking(true).unwrap();
    let (mut buffer, mut quiet) = (vec![0; MIB], 0);
    // Ten pages come in a second, when the devices' state is through.
    while quiet < if let Until::Sent = until { 500 } else { 40 } {
        match socket.read(&mut buffer) {
            Ok(n) if n > 0 => quiet = 0,
            _ => quiet += 1,
        }
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    socket.set_nonblocking(false).unwrap();
    wait_for("post-copy", || qemu.migration().unwrap().status == MigrationStatus::Postcopy);
    qemu.hold(socket.as_fd()).unwrap();
    socket
}

fn goes_on(qemu: &Qemu) {
    qemu.cont().unwrap();
    assert_eq!(qemu.state().unwrap(), State::Running);
}

#[test]
fn a_source_whose_post_copy_has_begun_goes_back_with_all_of_its_memory_and_can_do_so_again() {
    let folder = tempfile::tempdir().unwrap();
    let source = Guest::start(folder.path(), vec![], Start::Boot);
    fill(&source);
    for round in 0..3 {
        let socket = begin(&source, Until::Handed);
        assert_ne!(source.state().unwrap(), State::Running);
        let before = contents(&source);
        match round {
            // Its other end is kept and nobody reads; and once more, what is full is full.
            0 => std::thread::sleep(std::time::Duration::from_millis(300)),
            // The node is gone; QEMU itself keeps the other end.
            1 => drop(socket),
            _ => socket.shutdown(std::net::Shutdown::Both).unwrap(),
        }
        source.go_back().unwrap();
        assert!(contents(&source) == before, "it has all of its memory");
        assert!(source.migration().unwrap().status != MigrationStatus::Paused);
        goes_on(&source);
    }
}

#[test]
fn a_source_whose_stream_ends_anywhere_in_its_devices_state_goes_on_with_its_guest() {
    let folder = tempfile::tempdir().unwrap();
    for step in 0..5 {
        // A QEMU of its own each time: one whose stream ended while it wrote its devices' state is not asked to do better the next time.
        let place = folder.path().join(step.to_string());
        std::fs::create_dir(&place).unwrap();
        let source = Guest::start(&place, vec![], Start::Boot);
        fill(&source);
        drop(begin(&source, Until::Devices((step * 16) << 10)));
        wait_for("its stream's end is seen", || {
            !matches!(source.migration().unwrap().status, MigrationStatus::Active | MigrationStatus::Postcopy)
        });
        println!("{} KiB: {:?}", step * 16, source.migration().unwrap().status);
        assert_ne!(source.state().unwrap(), State::Running, "it had stopped");
        let before = contents(&source);
        source.go_back().unwrap();
        assert!(contents(&source) == before, "it has all of its memory");
        goes_on(&source);
    }
}

/// Why pages trickle until the guest has gone, and what is said where they do not.
#[test]
fn a_source_whose_stream_ends_after_its_last_page_says_that_it_is_stuck() {
    let folder = tempfile::tempdir().unwrap();
    let source = Guest::start(folder.path(), vec![], Start::Boot);
    fill(&source);
    let socket = begin(&source, Until::Sent);
    assert_eq!(source.migration().unwrap().remaining.0, 0);
    socket.shutdown(std::net::Shutdown::Both).unwrap();
    assert!(matches!(source.pause_postcopy(), Err(VmmError::Stuck)));
}
