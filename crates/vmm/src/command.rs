//! QEMU's command line.

use crate::process::PID_FILE;
use crate::spec::{Accel, Boot, Placement, Start, VmSpec};
use serde_json::json;
use std::path::PathBuf;
use std::process::Command;

/// How long a guest's disk requests wait for a node that is away before they fail, in seconds. Longer than any restart.
const RECONNECT_S: u32 = 600;
/// The memory backend's name, by which it is found from outside.
pub(crate) const RAM: &str = "ram0";

/// The program.
pub(crate) const PROGRAM: &str = "qemu-system-x86_64";

pub(crate) fn qmp_socket(placement: &Placement) -> PathBuf {
    placement.run.join("qmp.sock")
}

/// Written by QEMU itself, and found on its command line.
pub(crate) fn pid_file(placement: &Placement) -> PathBuf {
    placement.run.join("qemu.pid")
}

/// The command line. No secrets are in it.
pub(crate) fn command(spec: &VmSpec, placement: &Placement, start: Start) -> Command {
    let mut command = Command::new(PROGRAM);
    command.args(["-name", &spec.name, "-nodefaults", "-no-user-config", "-display", "none", "-vga", "none"]);
    command.args(["-machine", &format!("{},memory-backend={RAM}", spec.machine), "-cpu", &spec.cpu]);
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
        command.args(["-device", &format!("virtio-blk-pci,drive=disk{index},id=vd{index}")]);
    }
    for (index, nic) in placement.nics.iter().enumerate() {
        let tap = &nic.tap;
        command.args(["-netdev", &format!("tap,id=net{index},ifname={tap},script=no,downscript=no,vhost=off")]);
        let mtu = if nic.mtu == 0 { String::new() } else { format!(",host_mtu={}", nic.mtu) };
        command.args([
            "-device",
            &format!("virtio-net-pci,netdev=net{index},id=nic{index},mac={}{mtu},romfile=", nic.mac),
        ]);
    }
    command.args(["-device", "virtio-rng-pci,id=rng0"]);
    command.arg(PID_FILE).arg(pid_file(placement));
    command.args(["-serial", &format!("file:{}", placement.logs.join("console.log").display())]);
    command.args(["-qmp", &format!("unix:{},server=on,wait=off", qmp_socket(placement).display())]);
    if start == Start::Incoming {
        command.args(["-S", "-incoming", "defer"]);
    }
    command
}
