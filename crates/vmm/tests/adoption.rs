//! A QEMU outlives the process that started it.

#![allow(clippy::unwrap_used, reason = "a test stops at the first thing that is wrong")]

mod common;
use common::{Guest, SOON, placement, spec, wait_state};
use godwit_vmm::{Qemu, Start, State, VmmError};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const FOLDER: &str = "GODWIT_TEST_FOLDER";

/// Not a test: what the child of the tests below runs.
#[test]
#[ignore = "run by `node`"]
fn child_that_starts_a_guest() {
    let Some(folder) = std::env::var_os(FOLDER) else { return };
    std::fs::write(Path::new(&folder).join("node"), std::process::id().to_string()).unwrap();
    let _qemu = Qemu::start(&spec(), &placement(Path::new(&folder), vec![]), Start::Boot).unwrap();
    std::fs::write(Path::new(&folder).join("up"), "").unwrap();
    std::thread::sleep(SOON * 2);
}

fn node(folder: &Path) -> Command {
    let mut node = Command::new(std::env::current_exe().unwrap());
    node.args(["--exact", "child_that_starts_a_guest", "--ignored"]).env(FOLDER, folder);
    node.stdout(Stdio::null()).process_group(0);
    node
}

/// One whose guest is up.
fn node_with_a_guest(folder: &Path) -> Child {
    let node = node(folder).spawn().unwrap();
    let deadline = Instant::now() + SOON;
    while !folder.join("up").exists() {
        assert!(Instant::now() < deadline, "the child does not start its guest");
        std::thread::sleep(Duration::from_millis(10));
    }
    node
}

#[test]
fn a_guest_outlives_its_nodes_process_group_and_is_found_again() {
    let folder = tempfile::tempdir().unwrap();
    let mut node = node_with_a_guest(folder.path());
    let group = rustix::process::Pid::from_child(&node);
    rustix::process::kill_process_group(group, rustix::process::Signal::KILL).unwrap();
    node.wait().unwrap();

    let placement = placement(folder.path(), vec![]);
    let found = Guest(Qemu::adopt(&placement).unwrap().expect("it is there"));
    wait_state(&found, State::Running);
    found.quit();
    assert!(!found.is_alive());
    assert!(Qemu::adopt(&placement).unwrap().is_none());
}

/// What the kernel says of a process, from its state on: state, parent, process group, session (proc(5)).
fn stat(process: u32) -> Vec<String> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap();
    stat.rsplit(") ").next().unwrap().split(' ').map(str::to_owned).collect()
}

#[test]
fn a_guest_shares_its_nodes_session_and_stays_as_it_is_when_it_is_stopped_as_that_dies() {
    let folder = tempfile::tempdir().unwrap();
    let mut node = node_with_a_guest(folder.path());
    let found = Guest(Qemu::adopt(&placement(folder.path(), vec![])).unwrap().expect("it is there"));
    let pid = rustix::process::Pid::from_raw(found.pid() as i32).unwrap();
    // As the kernel says it of both: where the session's leader is in no namespace of theirs, it is 0.
    let session = |process: u32| stat(process)[3].clone();
    assert_eq!(session(found.pid()), session(node.id()), "they share processors by priority");
    assert_ne!(session(found.pid()), found.pid().to_string());
    rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
    node.kill().unwrap();
    node.wait().unwrap();
    // Whoever stopped it decides when it goes on.
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(stat(found.pid())[0], "T");
    rustix::process::kill_process(pid, rustix::process::Signal::CONT).unwrap();
    wait_state(&found, State::Running);
    found.quit();
}

#[test]
fn a_guest_whose_node_is_killed_while_it_is_being_started_is_found_and_gets_no_second() {
    let folder = tempfile::tempdir().unwrap();
    // Stands in for QEMU: kills the node as soon as it runs, and becomes QEMU a good while later, when it is let.
    let (bin, path) = (folder.path().join("bin"), std::env::var("PATH").unwrap());
    std::fs::create_dir(&bin).unwrap();
    let script = format!(
        "#!/bin/sh\ncase $* in *-version) exit 0;; esac\nkill -9 $(cat {0}/node)\nPATH='{path}'\n\
         while [ ! -e {0}/may ]; do [ -d {0} ] || exit 1; sleep 0.05; done\nexec qemu-system-x86_64 \"$@\"\n",
        folder.path().display()
    );
    std::fs::write(bin.join("qemu-system-x86_64"), script).unwrap();
    std::fs::set_permissions(bin.join("qemu-system-x86_64"), std::os::unix::fs::PermissionsExt::from_mode(0o755))
        .unwrap();
    let mut node = node(folder.path()).env("PATH", format!("{}:{path}", bin.display())).spawn().unwrap();
    node.wait().unwrap();

    let placement = placement(folder.path(), vec![]);
    assert!(!placement.run.join("qemu.pid").exists(), "it has not come that far");
    let may = folder.path().join("may");
    std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(500));
        std::fs::write(may, "").unwrap();
    });
    let found = Guest(Qemu::adopt(&placement).unwrap().expect("it is there"));
    wait_state(&found, State::Running);
    let second = Qemu::start(&spec(), &placement, Start::Boot).unwrap_err();
    assert!(matches!(second, VmmError::Already { pid } if pid == found.pid()), "{second}");
    found.quit();
    assert!(Qemu::adopt(&placement).unwrap().is_none());
}

#[test]
fn a_qemu_that_says_nothing_is_adopted_within_seconds_and_answers_when_it_can() {
    let folder = tempfile::tempdir().unwrap();
    let first = Guest::start(folder.path(), vec![], Start::Boot);
    first.hang_up();
    let pid = rustix::process::Pid::from_raw(i32::try_from(first.pid()).unwrap()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
    // Fills the queue of its monitor's clients: the next one that waits for its place would wait for ever.
    let socket = placement(folder.path(), vec![]).run.join("qmp.sock");
    let others: Vec<_> = (0..2).map(|_| std::os::unix::net::UnixStream::connect(&socket).unwrap()).collect();
    let began = Instant::now();
    let found = Qemu::adopt(&placement(folder.path(), vec![])).unwrap().expect("it is there, whatever it says");
    assert!(found.state().is_err());
    println!("adopted and asked in {:?}: {}", began.elapsed(), found.unreachable().unwrap());
    assert!(began.elapsed() < SOON / 2, "there is a bound on each wait, of seconds");
    assert!(found.is_alive());
    drop(others);
    rustix::process::kill_process(pid, rustix::process::Signal::CONT).unwrap();
    wait_state(&found, State::Running);
    assert_eq!(found.unreachable(), None);
}
