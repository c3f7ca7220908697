//! Where a VM is, seen from outside: by its processes and its memory, whatever Godwit says of it.
//!
//! Every QEMU of a VM has the VM's number in the path of its control socket; the network namespace that it lives in says in
//! which site it is; its RAM is a file in memory that is shared, so that it can be read from here. A guest runs if its RAM
//! changes: there is no kernel that does not count time.

use crate::fabric::{Fabric, Site};
use crate::truth;
use anyhow::{Context, Result, bail};
use godwit_units::{Bytes, VmId};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::fs::{File, OpenOptions};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// For how long RAM has to stay as it is before the guest counts as stopped.
const STILL: Duration = Duration::from_secs(2);
/// What the path of each control socket of Godwit's begins with, below a site's folder in memory.
const SOCKETS: &str = "/godwit/vms/";

/// A QEMU that Godwit started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The site that it is in.
    pub site: String,
    process: u32,
}

impl Place {
    /// The guest's RAM, writable, so that a page can be damaged on purpose. Stays readable when QEMU has ended.
    ///
    /// # Errors
    /// When QEMU is gone, or has no shared memory of `size`.
    pub fn ram(&self, size: Bytes) -> Result<File> {
        let folder = format!("/proc/{}/fd", self.process);
        let entries = std::fs::read_dir(&folder).with_context(|| format!("QEMU {} is gone", self.process))?;
        for entry in entries.filter_map(Result::ok) {
            let is_memory =
                std::fs::read_link(entry.path()).is_ok_and(|link| link.to_string_lossy().contains("memfd:"));
            if !is_memory || std::fs::metadata(entry.path()).map_or(0, |m| m.len()) != size.0 {
                continue;
            }
            return OpenOptions::new().read(true).write(true).open(entry.path()).context("cannot open a guest's RAM");
        }
        bail!("QEMU {} in {} has no shared memory of {size}", self.process, self.site)
    }

    /// Kills it.
    ///
    /// # Errors
    /// When it is gone.
    pub fn kill(&self) -> Result<()> {
        kill(self.process).with_context(|| format!("cannot kill the QEMU in {}", self.site))
    }

    /// Whether its guest runs: whether its RAM changes within [`STILL`].
    ///
    /// # Errors
    /// As [`Place::ram`].
    pub fn runs(&self, size: Bytes) -> Result<bool> {
        let ram = self.ram(size)?;
        let before = truth::ram_sums(&ram, size.0)?;
        let deadline = Instant::now() + STILL;
        loop {
            std::thread::sleep(Duration::from_millis(200));
            if truth::ram_sums(&ram, size.0)? != before {
                return Ok(true);
            }
            if Instant::now() > deadline {
                return Ok(false);
            }
        }
    }
}

/// The QEMUs of a VM, in whichever sites.
#[must_use]
pub fn of(fabric: &Fabric, vm: VmId) -> Vec<Place> {
    let word = format!("{SOCKETS}{}/", vm.0);
    with(fabric, &word)
}

/// Ends every QEMU that Godwit has started in these sites, and waits until they are gone.
pub fn end_all(fabric: &Fabric) {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let left = with(fabric, SOCKETS);
        if left.is_empty() || Instant::now() > deadline {
            return;
        }
        left.iter().for_each(|place| drop(place.kill()));
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Ends the processes that keep components' namespaces: those of this run, since no others are in the sandbox's process namespace.
pub fn end_components() {
    let mark = format!("GODWIT_COMPONENT={}", crate::sandbox::registry().display());
    // One that is gone meanwhile is what is wanted.
    marked(&mark).into_iter().for_each(|id| drop(kill(id)));
}

/// Processes with a variable in their environment that begins so: those of this run, as above.
pub(super) fn marked(mark: &str) -> Vec<u32> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().filter_map(Result::ok);
    let ids = entries.filter_map(|e| e.file_name().to_str()?.parse::<u32>().ok());
    let has_mark = |id: &u32| {
        let environment = std::fs::read(format!("/proc/{id}/environ")).unwrap_or_default();
        environment.split(|b| *b == 0).any(|line| line.starts_with(mark.as_bytes()))
    };
    ids.filter(has_mark).collect()
}

/// The QEMUs in these sites, and no others of the machine's, that have `word` in their command line.
fn with(fabric: &Fabric, word: &str) -> Vec<Place> {
    let find = |process: u32| {
        let lives_in = std::fs::read_link(format!("/proc/{process}/ns/net")).ok()?;
        let site = fabric.sites.iter().find(|site| namespace_of(site).as_ref() == Some(&lives_in))?;
        Some(Place { site: site.name.clone(), process })
    };
    qemus(word).into_iter().filter_map(find).collect()
}

/// What names a site's network namespace.
pub(super) fn namespace_of(site: &Site) -> Option<PathBuf> {
    std::fs::read_link(site.ns.path()).ok()
}

/// The QEMUs that have `word` in their command line.
fn qemus(word: &str) -> Vec<u32> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().filter_map(Result::ok);
    let ids = entries.filter_map(|e| e.file_name().to_str()?.parse::<u32>().ok());
    ids.filter(|id| {
        // Of a process that has ended and was not waited for yet, this is empty.
        std::fs::read(format!("/proc/{id}/cmdline")).is_ok_and(|line| is_qemu_with(&line, word))
    })
    .collect()
}

fn is_qemu_with(line: &[u8], word: &str) -> bool {
    let mut words = line.split(|b| *b == 0).map(String::from_utf8_lossy);
    let program = words.next().unwrap_or_default().into_owned();
    let is_qemu = Path::new(&program).file_name().is_some_and(|n| n.to_string_lossy().starts_with("qemu-system-"));
    is_qemu && words.any(|w| w.contains(word))
}

/// Kills a process.
///
/// # Errors
/// When there is none of that number.
pub(super) fn kill(process: u32) -> Result<()> {
    let pid = Pid::from_raw(i32::try_from(process)?).context("0 is no process")?;
    let handle = pidfd_open(pid, PidfdFlags::empty())?;
    Ok(pidfd_send_signal(&handle, Signal::KILL)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vms_qemu_is_known_by_its_number_and_not_by_a_number_that_begins_alike() {
        let line =
            b"/usr/bin/qemu-system-x86_64\0-name\0web\0-qmp\0unix:/run/godwit-lab/godwit/vms/1/qmp.sock,server=on\0";
        assert!(is_qemu_with(line, "/godwit/vms/1/"));
        assert!(!is_qemu_with(line, "/godwit/vms/11/"));
        assert!(!is_qemu_with(&line.map(|b| if b == b'q' { b'x' } else { b }), "/godwit/vms/1/"));
        assert!(!is_qemu_with(b"", "/godwit/vms/1/"));
        // Somebody who only looks at its log is no QEMU.
        assert!(!is_qemu_with(b"tail\0-f\0/x/godwit/vms/1/qemu.log\0", "/godwit/vms/1/"));
    }

    #[test]
    fn memory_that_nobody_writes_to_stands_still_and_memory_that_somebody_writes_to_does_not() {
        let size = Bytes::mib(1);
        let memory = rustix::fs::memfd_create("lab-test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let memory = File::from(memory);
        memory.set_len(size.0).unwrap();
        let place = Place { site: "here".into(), process: std::process::id() };
        assert!(!place.runs(size).unwrap());
        std::thread::scope(|scope| {
            let looking = scope.spawn(|| place.runs(size).unwrap());
            for i in (1..=u8::MAX).cycle().take_while(|_| !looking.is_finished()) {
                std::os::unix::fs::FileExt::write_all_at(&memory, &[i], 4096).unwrap();
                std::thread::sleep(Duration::from_millis(20));
            }
            assert!(looking.join().unwrap());
        });
        assert!(place.ram(Bytes::mib(3)).is_err(), "only memory of the guest's size is its RAM");
    }
}
