//! Guests for tests, and what daemons leave behind when their test is over.

pub mod checker;
pub mod pair;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

/// A QEMU's RAM, if it has so much: memory that it shares with whoever is root.
pub fn ram(pid: u32, memory: u64) -> Option<File> {
    let fds = std::fs::read_dir(format!("/proc/{pid}/fd")).ok()?;
    let is_memory = |path: &PathBuf| {
        let link = std::fs::read_link(path).unwrap_or_default();
        link.to_string_lossy().contains("memfd:") && path.metadata().is_ok_and(|m| m.len() == memory)
    };
    File::open(fds.filter_map(|fd| Some(fd.ok()?.path())).find(is_memory)?).ok()
}

/// How `vm create` is told to start a guest whose process 1 is what [`with_script`] was given.
pub const BOOTS: [&str; 9] = [
    "--cpu",
    "qemu64,+rdrand",
    "--kernel",
    "vmlinuz",
    "--initrd",
    "initrd",
    "--cmdline",
    "console=ttyS0 quiet panic=-1 oops=panic random.trust_cpu=on no_timer_check tsc=reliable nosoftlockup rdinit=/load",
    "--start",
];

/// What such a guest's script begins with.
const FIRST: &str = r#"#!/bin/busybox sh
export PATH=/bin
mount -t proc proc /proc
mount -t devtmpfs devtmpfs /dev
exec </dev/console >/dev/console 2>&1
while read -r module; do insmod "/lib/modules/$module"; done </lib/modules/order
"#;

/// The lab's tiny image, where it has been made; says so, where not.
pub fn tiny() -> Option<PathBuf> {
    let images = std::env::var_os("GODWIT_IMAGES").map_or_else(|| "/var/cache/godwit-lab/images".into(), PathBuf::from);
    let tiny = images.join("tiny");
    if tiny.join("initrd").exists() && tiny.join("vmlinuz").exists() {
        return Some(tiny);
    }
    eprintln!("SKIPPED: this needs the tiny image: scripts/setup.sh makes it");
    None
}

/// An archive in cpio's form `newc` with one program.
fn archive(name: &str, program: &[u8]) -> Vec<u8> {
    let mut out = vec![];
    for (name, mode, bytes) in [(name, 0o100_755, program), ("TRAILER!!!", 0, &b""[..])] {
        let field = |value: usize| format!("{value:08x}");
        let fields = [1, mode, 0, 0, 1, 0, bytes.len(), 0, 0, 0, 0, name.len() + 1, 0].map(field).concat();
        out.extend(format!("070701{fields}{name}\0").into_bytes());
        out.resize(out.len().next_multiple_of(4), 0);
        out.extend(bytes);
        out.resize(out.len().next_multiple_of(4), 0);
    }
    out
}

/// Puts `vmlinuz` and `initrd` of the tiny image into a folder of images, with one more program.
pub fn with_program(tiny: &Path, images: &Path, name: &str, program: &[u8]) {
    std::fs::copy(tiny.join("vmlinuz"), images.join("vmlinuz")).unwrap();
    let mut initrd = std::fs::read(tiny.join("initrd")).unwrap();
    // A second archive behind the first: the kernel unpacks both.
    initrd.resize(initrd.len().next_multiple_of(512), 0);
    initrd.extend(archive(name, program));
    std::fs::write(images.join("initrd"), initrd).unwrap();
}

/// As [`with_program`], with a script that is process 1: it begins with [`FIRST`].
pub fn with_script(tiny: &Path, images: &Path, script: &str) {
    with_program(tiny, images, "load", [FIRST, script].concat().as_bytes());
}

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
