//! The units of the Debian packages, as systemd reads them. Without systemd's tools they are skipped, aloud.

use std::path::Path;
use std::process::{Command, Output};

const UNITS: [&str; 2] = ["godwit-controller.service", "godwit-node.service"];

fn systemd_analyze(words: &[&str], units: &Path) -> Option<Output> {
    let mut command = Command::new("systemd-analyze");
    command.args(words).args(UNITS.map(|unit| units.join(unit)));
    command.output().map_err(|_| eprintln!("SKIPPED: there is no systemd-analyze")).ok()
}

/// Copies of the units that run this build's program: the real path is there once the package is installed.
fn units() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for unit in UNITS {
        let text = std::fs::read_to_string(Path::new("../../packaging/systemd").join(unit)).unwrap();
        let text = text.replace("=/usr/bin/godwit", concat!("=", env!("CARGO_BIN_EXE_godwit")));
        std::fs::write(folder.path().join(unit), text).unwrap();
    }
    folder
}

#[test]
fn systemd_finds_nothing_to_say_about_the_units() {
    let folder = units();
    let Some(output) = systemd_analyze(&["verify", "--man=no", "--recursive-errors=no"], folder.path()) else { return };
    let said = String::from_utf8_lossy(&output.stderr);
    let ours: Vec<&str> = said.lines().filter(|l| l.contains("godwit")).collect();
    assert!(output.status.success() && ours.is_empty(), "{said}");
}

#[test]
fn the_units_are_confined_no_less_than_they_were() {
    let folder = units();
    for (unit, tenths) in [(UNITS[0], 12), (UNITS[1], 33)] {
        let mut command = Command::new("systemd-analyze");
        let at = folder.path().join(unit);
        command.args(["security", "--no-pager", "--offline=true", &format!("--threshold={tenths}")]).arg(&at);
        let Ok(output) = command.output() else { return eprintln!("SKIPPED: there is no systemd-analyze") };
        let said = String::from_utf8_lossy(&output.stdout);
        let verdict = said.lines().last().unwrap_or_default();
        println!("{verdict}");
        assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    }
}

#[test]
fn a_nodes_guests_outlive_whatever_ends_their_node() {
    let text = std::fs::read_to_string("../../packaging/systemd/godwit-node.service").unwrap();
    for line in ["KillMode=process", "OOMPolicy=continue", "RuntimeDirectoryPreserve=yes", "Restart=always"] {
        assert!(text.lines().any(|l| l == line), "{line}");
    }
}

#[test]
fn a_node_and_its_guests_are_one_group_for_the_scheduler() {
    let text = std::fs::read_to_string("../../packaging/systemd/godwit-node.service").unwrap();
    // Without a weight each session is a group, and the priorities of a node's threads mean nothing to its guests'.
    assert!(text.lines().any(|l| l.strip_prefix("CPUWeight=").is_some_and(|weight| weight.parse::<u32>().is_ok())));
}
