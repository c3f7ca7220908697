//! QEMU's command line.
//!
//! An option's value is a list with commas in between, so what comes from outside (names, paths) is either quoted ([`quoted`]), or
//! given where QEMU does not split: as an argument of its own, or as JSON.

use crate::process::PID_FILE;
use crate::spec::{Accel, Boot, Placement, Start, VmSpec};
use serde_json::json;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

/// How long a guest's disk requests wait for a node that is away before they fail, in seconds. Longer than any restart.
const RECONNECT_S: u32 = 600;
/// Queues of a disk: more CPUs than this share them.
const MOST_QUEUES: u32 = 16;
/// The memory backend's name, by which it is found from outside.
pub(crate) const RAM: &str = "ram0";

/// What QEMU never has to do here: old system calls, other users' rights, other programs, other priorities. A guest that breaks
/// out of its devices cannot do them either. The same as libvirt's.
const SANDBOX: &str = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny";

/// The program.
pub(crate) const PROGRAM: &str = "qemu-system-x86_64";

pub(crate) fn qmp_socket(placement: &Placement) -> PathBuf {
    placement.run.join("qmp.sock")
}

/// Written by QEMU itself, and found on its command line.
pub(crate) fn pid_file(placement: &Placement) -> PathBuf {
    placement.run.join(crate::process::PID_NAME)
}

/// The command line. No secrets are in it.
pub(crate) fn command(spec: &VmSpec, placement: &Placement, start: Start) -> Command {
    let mut command = Command::new(PROGRAM);
    command.args([
        "-name",
        &format!("guest={}", quoted(&spec.name)),
        "-nodefaults",
        "-no-user-config",
        "-display",
        "none",
        "-vga",
        "none",
    ]);
    if has_sandbox() {
        command.args(["-sandbox", SANDBOX]);
    }
    command.args(["-machine", &format!("{},memory-backend={RAM}", spec.machine), "-cpu", &enforced(&spec.cpu)]);
    command.args(["-smp", &format!("cpus={},maxcpus={}", spec.vcpus, spec.max_vcpus)]);
    command.args(["-accel", if spec.accel == Accel::Kvm { "kvm" } else { "tcg,thread=multi" }]);
    let kib = spec.memory.0 >> 10;
    command.args(["-m", &format!("{kib}k")]);
    // Shared, so that it can be looked at from outside.
    command.args(["-object", &format!("memory-backend-memfd,id={RAM},size={kib}k,share=on")]);
    if let Boot::Kernel { kernel, initrd, cmdline } = &spec.boot {
        command.arg("-kernel").arg(kernel).args(["-append", cmdline]);
        if let Some(initrd) = initrd {
            command.arg("-initrd").arg(initrd);
        }
    }
    for (index, disk) in placement.disks.iter().enumerate() {
        let node = json!({
            "driver": "nbd",
            "node-name": format!("disk{index}"),
            "server": {"type": "unix", "path": disk.socket},
            "export": disk.export,
            "reconnect-delay": RECONNECT_S,
            "discard": "unmap",
        });
        command.args(["-blockdev", &node.to_string()]);
        // Said, because the default follows the CPUs at boot, which differ once some were plugged in.
        let queues = spec.max_vcpus.min(MOST_QUEUES);
        command.args(["-device", &format!("virtio-blk-pci,drive=disk{index},id=vd{index},num-queues={queues}")]);
    }
    for (index, nic) in placement.nics.iter().enumerate() {
        let tap = quoted(&nic.tap);
        command.args(["-netdev", &format!("tap,id=net{index},ifname={tap},script=no,downscript=no,vhost=off")]);
        let mtu = if nic.mtu == 0 { String::new() } else { format!(",host_mtu={}", nic.mtu) };
        command.args([
            "-device",
            &format!("virtio-net-pci,netdev=net{index},id=nic{index},mac={}{mtu},romfile=", quoted(&nic.mac)),
        ]);
    }
    command.args(["-device", "virtio-rng-pci,id=rng0"]);
    for device in &spec.devices {
        command.args(["-device", device]);
    }
    command.arg(PID_FILE).arg(pid_file(placement));
    let console = crate::console::path(&placement.logs);
    // Appended to: cut short behind its back it goes on from where it was cut, and not from where it had come to.
    command.arg("-chardev").arg(with_path("file,id=console,append=on,path=", &console, ""));
    command.args(["-serial", "chardev:console"]);
    command.arg("-qmp").arg(monitor_option(&qmp_socket(placement)));
    if start == Start::Incoming {
        command.args(["-S", "-incoming", "defer"]);
    }
    command
}

/// The value of `-qmp` for a socket, whose first client QEMU waits for.
pub(crate) fn monitor_option(socket: &Path) -> OsString {
    with_path("unix:", socket, godwit_qmp::LISTENS)
}

/// An option's value with a path in it.
fn with_path(before: &str, path: &Path, behind: &str) -> OsString {
    let mut value = OsString::from(before);
    for part in path.as_os_str().as_bytes().split_inclusive(|b| *b == b',') {
        value.push(OsStr::from_bytes(part));
        if part.ends_with(b",") {
            value.push(",");
        }
    }
    value.push(behind);
    value
}

/// A text as a part of an option's value.
fn quoted(text: &str) -> String {
    text.replace(',', ",,")
}

/// The CPU, of which nothing may be missing: what QEMU leaves away on one host and not on the next is a guest that breaks when it
/// is moved. Who says otherwise is obeyed.
fn enforced(cpu: &str) -> String {
    let said = cpu.split(',').skip(1).any(|p| p == "enforce" || p.starts_with("enforce="));
    if said { cpu.to_owned() } else { format!("{cpu},enforce") }
}

/// Whether this QEMU was built with a sandbox. One that was not refuses the option, whatever comes behind it. Asked once.
fn has_sandbox() -> bool {
    static HAS: OnceLock<bool> = OnceLock::new();
    *HAS.get_or_init(|| {
        let mut ask = Command::new(PROGRAM);
        ask.args(["-sandbox", SANDBOX, "-version"]);
        let has = ask.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status();
        let has = has.is_ok_and(|status| status.success());
        if !has {
            tracing::warn!("this QEMU has no sandbox: guests run without one");
        }
        has
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commas_are_doubled_and_other_bytes_left_alone() {
        assert_eq!(quoted("a,b,,c"), "a,,b,,,,c");
        let path = Path::new(OsStr::from_bytes(b"/x,y/,\xff z"));
        assert_eq!(monitor_option(path).as_bytes(), b"unix:/x,,y/,,\xff z,server=on,wait=on");
    }

    #[test]
    fn a_cpu_is_enforced_unless_somebody_says_otherwise() {
        assert_eq!(enforced("qemu64,+ssse3"), "qemu64,+ssse3,enforce");
        assert_eq!(enforced("qemu64,enforce=off"), "qemu64,enforce=off");
    }
}
