//! Real QEMUs without a disk: what the hand-off relies on.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use godwit_units::Bytes;
use godwit_vmm::{Accel, Boot, MigrationStatus, Placement, Qemu, Start, State, VmSpec};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

const SHUT: [u8; 8] = [0, 1, 0, 4, 0, 0, 0, 0];

/// A QEMU that ends with the test, also when that fails.
struct Guarded(Qemu);

impl Drop for Guarded {
    fn drop(&mut self) {
        self.0.kill();
    }
}

fn spec() -> VmSpec {
    VmSpec {
        name: "test".into(),
        machine: "q35".into(),
        cpu: "qemu64".into(),
        vcpus: 1,
        max_vcpus: 2,
        memory: Bytes::kib(65_544),
        accel: Accel::Tcg,
        boot: Boot::Disk,
        devices: vec![],
    }
}

fn placement(folder: &Path) -> Placement {
    Placement { run: folder.join("run"), logs: folder.join("log"), disks: vec![], nics: vec![] }
}

fn start(folder: &Path, how: Start) -> Guarded {
    Guarded(Qemu::start(&spec(), &placement(folder), how).unwrap())
}

fn wait(what: &str, until: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(120);
    while !until() {
        assert!(Instant::now() < deadline, "{what} does not happen");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A migration whose end the destination has reached, while its SHUT is kept from the source.
struct Held {
    source: Guarded,
    destination: Guarded,
    /// The socket that the source holds for its peer.
    socket: UnixStream,
    _folder: tempfile::TempDir,
}

fn hold_shut() -> Held {
    let folder = tempfile::tempdir().unwrap();
    let source = start(&folder.path().join("a"), Start::Boot);
    let destination = start(&folder.path().join("b"), Start::Incoming);
    let into = folder.path().join("in.sock");
    destination.0.migrate_incoming(&into).unwrap();
    let from = source.0.migrate(None, false).unwrap();
    let to = UnixStream::connect(&into).unwrap();
    let (mut reader, mut writer) = (from.try_clone().unwrap(), to.try_clone().unwrap());
    std::thread::spawn(move || std::io::copy(&mut reader, &mut writer));
    let (mut back, mut source_end) = (to, from.try_clone().unwrap());
    std::thread::spawn(move || {
        let mut header = [0; 4];
        while back.read_exact(&mut header).is_ok() {
            let mut body = vec![0; usize::from(u16::from_be_bytes([header[2], header[3]]))];
            back.read_exact(&mut body).unwrap();
            if header[..2] != SHUT[..2] && source_end.write_all(&[&header[..], &body].concat()).is_err() {
                return;
            }
        }
    });
    source.0.stop_now().unwrap();
    wait("loading", || {
        destination.0.migration().is_ok_and(|m| m.status == MigrationStatus::Completed)
            && destination.0.state().is_ok_and(|s| s == State::Stopped)
    });
    Held { source, destination, socket: from, _folder: folder }
}

#[test]
fn a_source_whose_return_path_breaks_before_shut_resumes_by_itself() {
    let held = hold_shut();
    assert_ne!(held.source.0.state().unwrap(), State::Running, "it waits for SHUT");
    held.socket.shutdown(std::net::Shutdown::Both).unwrap();
    wait("resuming", || held.source.0.state().is_ok_and(|s| s == State::Running));
    assert_eq!(held.source.0.migration().unwrap().status, MigrationStatus::Failed);
    assert_eq!(held.destination.0.state().unwrap(), State::Stopped, "-S holds the destination");
}

#[test]
fn a_source_that_was_told_shut_stays_where_it_is_until_it_is_continued() {
    let mut held = hold_shut();
    held.socket.write_all(&SHUT).unwrap();
    wait("the end of the migration", || held.source.0.state().is_ok_and(|s| s == State::Postmigrate));
    held.socket.shutdown(std::net::Shutdown::Both).unwrap();
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(held.source.0.state().unwrap(), State::Postmigrate);
    assert_eq!(held.destination.0.state().unwrap(), State::Stopped);
    held.source.0.cont().unwrap();
    assert_eq!(held.source.0.state().unwrap(), State::Running);
}

#[test]
fn a_qemu_outlives_whoever_started_it_and_is_found_again() {
    let folder = tempfile::tempdir().unwrap();
    let first = start(folder.path(), Start::Boot);
    let pid = first.0.pid();
    let placement = placement(folder.path());
    // Its monitor takes one client: the first one's has to end, as a node's does with its process.
    let Guarded(qemu) = &first;
    qemu.hang_up();
    let found = Qemu::adopt(&placement).unwrap().expect("it runs");
    assert_eq!(found.pid(), pid);
    assert_eq!(found.state().unwrap(), State::Running);
    found.quit();
    assert!(!first.0.is_alive());
    assert!(Qemu::adopt(&placement).unwrap().is_none(), "nothing is left to be found");
}

#[test]
fn cpus_are_plugged_in_up_to_what_was_allowed_for() {
    let folder = tempfile::tempdir().unwrap();
    let qemu = start(folder.path(), Start::Boot);
    qemu.0.plug_vcpus(2).unwrap();
    let cpus = qemu.0.monitor(serde_json::json!({"execute": "query-cpus-fast"})).unwrap();
    assert_eq!(cpus.as_array().unwrap().len(), 2);
    assert!(qemu.0.plug_vcpus(3).unwrap_err().to_string().contains("max-vcpus"));
}

#[test]
fn what_a_host_lacks_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let facts = godwit_vmm::HostFacts::ask(folder.path()).unwrap();
    assert_eq!(godwit_vmm::check(&spec(), &facts), []);
    let strange = VmSpec { machine: "pc-q35-99.9".into(), cpu: "qemu64,+notafeature".into(), ..spec() };
    let kinds: Vec<_> = godwit_vmm::check(&strange, &facts).into_iter().map(|u| u.kind).collect();
    assert_eq!(kinds, ["machine", "cpu"]);
    assert!(facts.resolve("q35").unwrap().starts_with("pc-q35-"));
}

#[test]
fn a_cpu_that_cannot_be_had_does_not_start_and_what_emulation_can_do_does() {
    let folder = tempfile::tempdir().unwrap();
    let start = |cpu: &str| Qemu::start(&VmSpec { cpu: cpu.into(), ..spec() }, &placement(folder.path()), Start::Boot);
    for cpu in ["qemu64", "max", "qemu64,sse4.1=on,+ssse3,rdrand"] {
        let qemu = Guarded(start(cpu).unwrap());
        assert_eq!(qemu.0.state().unwrap(), State::Running, "{cpu}");
        qemu.0.quit();
    }
    let facts = godwit_vmm::HostFacts::ask(folder.path()).unwrap();
    for cpu in ["qemu64,+avx512f", "qemu64,avx512f=on", "Haswell-v2"] {
        let refused = start(cpu).map(Guarded).map_err(|e| e.to_string());
        assert!(refused.as_ref().is_err_and(|e| e.contains("features")), "{cpu}: {:?}", refused.err());
        let unmet = godwit_vmm::check(&VmSpec { cpu: cpu.into(), ..spec() }, &facts);
        assert!(!unmet.is_empty() && unmet.iter().all(|u| u.kind == "cpu"), "{cpu}: {unmet:?}");
    }
    let unmet = godwit_vmm::check(&VmSpec { cpu: "qemu64,enforce=on,sse4.1=on,-svm".into(), ..spec() }, &facts);
    assert_eq!(unmet, []);
}
