//! What daemons leave behind when their test is over.

#[allow(dead_code, reason = "not every test that ends daemons has a pair of hosts")]
pub mod pair;

use std::path::Path;
use std::process::{Child, Command};

/// The QEMUs of a test: found by the folder that only they have in their command lines, since they outlive their nodes by design.
pub fn guests(folder: &Path) -> Vec<u32> {
    let mine = folder.to_string_lossy().into_owned();
    let entries = std::fs::read_dir("/proc").unwrap().filter_map(Result::ok);
    let pids = entries.filter_map(|e| e.file_name().to_str()?.parse().ok());
    pids.filter(|pid: &u32| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let line = String::from_utf8_lossy(&line);
        line.contains("qemu-system-x86_64") && line.contains(&mine)
    })
    .collect()
}

/// Ends the daemons first, so that nobody boots a guest again; then the guests.
pub fn end<'a>(daemons: impl IntoIterator<Item = &'a mut Child>, folder: &Path) {
    for daemon in daemons {
        let _ = daemon.kill();
        let _ = daemon.wait();
    }
    for pid in guests(folder) {
        let _ = Command::new("kill").args(["-9", &pid.to_string()]).status();
    }
}
