//! What stands on the command line, and what people set by hand.

#![allow(clippy::unwrap_used, reason = "a test stops at the first thing that is wrong")]

mod common;
use common::{Guest, NbdServer, placement, spec, wait_state};
use godwit_vmm::{Disk, HostFacts, Nic, Placement, Qemu, Start, State, VmSpec};
use serde_json::json;
use std::fs::File;
use std::path::Path;
use std::process::Command;

fn set_capability(qemu: &Qemu, name: &str) {
    let arguments = json!({"capabilities": [{"capability": name, "state": true}]});
    qemu.monitor(json!({"execute": "migrate-set-capabilities", "arguments": arguments})).unwrap();
}

fn capabilities(qemu: &Qemu) -> Vec<String> {
    let all = qemu.monitor(json!({"execute": "query-migrate-capabilities"})).unwrap();
    let on = all.as_array().unwrap().iter().filter(|c| c["state"] == true);
    on.map(|c| c["capability"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn a_folder_and_a_name_with_a_comma_and_a_space_are_like_any_other() {
    let outer = tempfile::tempdir().unwrap();
    let folder = outer.path().join("a, b,,c=d");
    std::fs::create_dir(&folder).unwrap();
    assert!(HostFacts::ask(&folder).is_ok());
    let path = |name: &str| folder.join(name);
    File::create_new(path("disk")).unwrap().set_len(4 << 20).unwrap();
    let _server = NbdServer::start(&path("disk"), &path("nbd"));
    let disk = || vec![Disk { socket: path("nbd"), export: "disk0".into() }];
    let spec = VmSpec { name: "web, the=2nd".into(), ..spec() };
    let start = |name: &str, disks, start| Guest(Qemu::start(&spec, &placement(&path(name), disks), start).unwrap());
    let source = start("source", disk(), Start::Boot);
    let destination = start("destination", disk(), Start::Incoming);
    let name = source.monitor(json!({"execute": "query-name"})).unwrap();
    assert_eq!(name["name"], "web, the=2nd");
    assert!(placement(&path("source"), vec![]).logs.join("console.log").exists());
    destination.migrate_incoming(&path("in,sock")).unwrap();
    common::migrate(&source, &path("in,sock"));
    source.stop_now().unwrap();
    wait_state(&source, State::Postmigrate);
    wait_state(&destination, State::Stopped);
    source.hang_up();
    let found = Qemu::adopt(&placement(&path("source"), vec![])).unwrap().expect("it is found there");
    assert_eq!(found.pid(), source.pid());
}

#[test]
fn what_an_operator_set_does_not_change_the_stream() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let source = Guest::start(&path("a"), vec![], Start::Boot);
    for name in ["xbzrle", "multifd", "auto-converge", "pause-before-switchover"] {
        set_capability(&source, name);
    }
    let tls = json!({"execute": "migrate-set-parameters", "arguments": {"tls-creds": "there-is-none"}});
    source.monitor(tls).unwrap();
    let destination = Guest::start(&path("b"), vec![], Start::Incoming);
    destination.migrate_incoming(&path("in.sock")).unwrap();
    // One connection, and no second: channels would find nobody.
    common::migrate(&source, &path("in.sock"));
    assert_eq!(capabilities(&source), ["events", "return-path"]);
    source.stop_now().unwrap();
    wait_state(&source, State::Postmigrate);
    wait_state(&destination, State::Stopped);
    // And again, to the same end.
    source.cont().unwrap();
    let _again = source.migrate(None, false).unwrap();
    assert_eq!(capabilities(&source), ["events", "return-path"]);
}

/// Not a test: what runs in the name space of the test below.
#[test]
#[ignore = "run by `a_guest_with_a_tap_...`"]
fn child_with_a_tap() {
    let Some(folder) = std::env::var_os("GODWIT_TEST_FOLDER") else { return };
    let folder = Path::new(&folder);
    for words in ["tuntap add dev gw,1 mode tap vnet_hdr", "link set gw,1 up"] {
        assert!(Command::new("ip").args(words.split(' ')).status().unwrap().success(), "{words}");
    }
    let nic = || Nic { tap: "gw,1".into(), mac: "52:54:00:00:00:01".into(), mtu: 1450 };
    let at = |name: &str, nics| Placement { nics, ..placement(&folder.join(name), vec![]) };
    let source = Guest(Qemu::start(&spec(), &at("a", vec![nic()]), Start::Boot).unwrap());
    let status = std::fs::read_to_string(format!("/proc/{}/status", source.pid())).unwrap();
    assert!(status.lines().any(|line| line == "Seccomp:\t2"), "it has a filter of system calls: {status}");
    assert!(source.devices().unwrap().contains(&"virtio-net-pci".to_owned()));
    assert_eq!(source.state().unwrap(), State::Running);
    let carrier = std::fs::read_to_string("/proc/self/net/dev").unwrap();
    assert!(carrier.contains("gw,1"));
    source.announce_self().unwrap();
    source.quit();
    assert!(!source.is_alive());
    std::fs::write(folder.join("ran"), "").unwrap();
}

#[test]
fn a_guest_with_a_tap_runs_behind_a_filter_of_system_calls() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("not root: a tap cannot be made");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    // The name space ends with its last process.
    let mut child = Command::new("unshare");
    child.arg("--net").arg(std::env::current_exe().unwrap()).args(["--exact", "child_with_a_tap", "--ignored"]);
    assert!(child.env("GODWIT_TEST_FOLDER", folder.path()).status().unwrap().success());
    assert!(folder.path().join("ran").exists(), "the child is the test that was meant");
}
