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

/// The processes that bear a mark whose value begins with `folder`: what keeps a namespace or a tunnel outlives its node by design.
#[allow(dead_code, reason = "not every test has components or extenders")]
pub fn marked(mark: &str, folder: &Path) -> Vec<u32> {
    let mine = format!("{mark}={}", folder.display());
    let entries = std::fs::read_dir("/proc").unwrap().filter_map(Result::ok);
    let pids = entries.filter_map(|e| e.file_name().to_str()?.parse().ok());
    let is_mine = |pid: &u32| {
        let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environment.split(|b| *b == 0).any(|line| line.starts_with(mine.as_bytes()))
    };
    pids.filter(is_mine).collect()
}

/// The processes that keep components' namespaces, of those who write below `folder`.
#[allow(dead_code, reason = "as above")]
pub fn holders(folder: &Path) -> Vec<u32> {
    marked("GODWIT_COMPONENT", folder)
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
