//! A QEMU outlives the process that started it.

#![allow(clippy::unwrap_used, reason = "a test stops at the first thing that is wrong")]

mod common;
use common::{Guest, SOON, placement, spec};
use godwit_vmm::{Qemu, Start, State};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

const FOLDER: &str = "GODWIT_TEST_FOLDER";

/// Not a test: what the child of the test below runs.
#[test]
#[ignore = "run by `a_guest_outlives_...`"]
fn child_that_starts_a_guest() {
    let Some(folder) = std::env::var_os(FOLDER) else { return };
    let _qemu = Qemu::start(&spec(), &placement(Path::new(&folder), vec![]), Start::Boot).unwrap();
    std::fs::write(Path::new(&folder).join("up"), "").unwrap();
    std::thread::sleep(SOON * 2);
}

#[test]
fn a_guest_outlives_its_nodes_process_group_and_is_found_again() {
    let folder = tempfile::tempdir().unwrap();
    let mut node = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child_that_starts_a_guest", "--ignored"])
        .env(FOLDER, folder.path())
        .stdout(Stdio::null())
        .process_group(0)
        .spawn()
        .unwrap();
    let deadline = Instant::now() + SOON;
    while !folder.path().join("up").exists() {
        assert!(Instant::now() < deadline, "the child does not start its guest");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    let group = rustix::process::Pid::from_child(&node);
    rustix::process::kill_process_group(group, rustix::process::Signal::KILL).unwrap();
    node.wait().unwrap();

    let placement = placement(folder.path(), vec![]);
    let found = Guest(Qemu::adopt(&placement).unwrap().expect("it is there"));
    assert_eq!(found.state().unwrap(), State::Running);
    found.quit();
    assert!(!found.is_alive());
    assert!(Qemu::adopt(&placement).unwrap().is_none());
}
