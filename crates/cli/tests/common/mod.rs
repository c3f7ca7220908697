//! Guests for tests, and what daemons leave behind when their test is over.

#[allow(dead_code, reason = "not every test that ends daemons has a pair of hosts")]
pub mod pair;

use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// The command line of a kernel whose process 1 is what [`tiny`] was given.
#[allow(dead_code, reason = "not every test has guests of its own")]
pub const LOAD: &str =
    "console=ttyS0 quiet panic=-1 oops=panic random.trust_cpu=on no_timer_check tsc=reliable nosoftlockup rdinit=/load";

/// Puts `vmlinuz` and `initrd` of the tiny image into a folder of images, with a shell script as `/load`. False, and said, without that image.
#[allow(dead_code, reason = "as above")]
pub fn tiny(images: &Path, load: &str) -> bool {
    let all = std::env::var_os("GODWIT_IMAGES").map_or_else(|| "/var/cache/godwit-lab/images".into(), PathBuf::from);
    let image = all.join("tiny");
    let cpio = Command::new("cpio").arg("--version").output().is_ok();
    if !cpio || !image.join("initrd").exists() {
        eprintln!("SKIPPED: this needs cpio and the tiny image (scripts/setup.sh)");
        return false;
    }
    std::fs::copy(image.join("vmlinuz"), images.join("vmlinuz")).unwrap();
    // A second archive behind the first: the kernel unpacks both.
    let more = images.join("more");
    std::fs::create_dir(&more).unwrap();
    std::fs::write(more.join("load"), load).unwrap();
    std::fs::set_permissions(more.join("load"), std::fs::Permissions::from_mode(0o755)).unwrap();
    let mut cpio = Command::new("cpio");
    cpio.args(["--quiet", "--create", "--format=newc", "--owner=0:0"]).current_dir(more);
    let mut packing = cpio.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    packing.stdin.take().unwrap().write_all(b"load\n").unwrap();
    let packed = packing.wait_with_output().unwrap().stdout;
    let mut initrd = std::fs::read(image.join("initrd")).unwrap();
    initrd.resize(initrd.len().next_multiple_of(512), 0);
    initrd.extend(packed);
    std::fs::write(images.join("initrd"), initrd).unwrap();
    true
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
