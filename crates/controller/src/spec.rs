//! Whether a VM's description makes sense, before any node is asked.

use crate::state::{conflict, invalid};
use godwit_api::vm::{Boot, Store, VmSpec};
use godwit_api::{ApiError, Name};
use std::collections::HashSet;

/// Sizes of disks are multiples of this: the unit in which blocks are copied and compared.
const BLOCK: u64 = 4096;

/// QEMU wants RAM in whole pages.
const PAGE: u64 = 4096;

/// More than any guest has: a bound for what is believed.
const MOST_VCPUS: u32 = 1024;

/// As many as fit on the PCI bus of a machine with what else is there.
const MOST_DEVICES: usize = 24;

/// What other VMs have, that no second one may.
#[derive(Debug, Default)]
pub struct Taken {
    /// MAC addresses, as [`canonical_mac`] writes them.
    pub macs: HashSet<String>,
    /// Names of volumes.
    pub volumes: HashSet<Name>,
}

/// A MAC address in lower case.
///
/// # Errors
/// Not six pairs of hexadecimal digits, or a group's address, or zero.
pub fn canonical_mac(text: &str) -> Result<String, ApiError> {
    let bad =
        |why: &str| invalid(format!("`{text}` {why}")).remedy("write a unicast MAC address such as 02:00:00:00:00:01");
    let parts: Vec<&str> = text.split(':').collect();
    let pair = |p: &&str| p.len() == 2 && p.bytes().all(|b| b.is_ascii_hexdigit());
    if parts.len() != 6 || !parts.iter().all(pair) {
        return Err(bad("is no MAC address"));
    }
    let first = u8::from_str_radix(parts[0], 16).map_err(|_| bad("is no MAC address"))?;
    if first & 1 == 1 {
        return Err(bad("is the MAC address of a group"));
    }
    let mac = text.to_ascii_lowercase();
    if mac == "00:00:00:00:00:00" { Err(bad("is no host's MAC address")) } else { Ok(mac) }
}

/// Checks a description and writes it in one way only (`max_vcpus`, MAC addresses, MTU).
///
/// # Errors
/// [`Invalid`](godwit_api::Problem::Invalid) or [`Conflict`](godwit_api::Problem::Conflict), naming the field.
pub fn check(mut spec: VmSpec, taken: &Taken) -> Result<VmSpec, ApiError> {
    let cpu = spec.cpu.split(',').next().unwrap_or_default();
    if matches!(cpu, "host" | "max") {
        return Err(invalid(format!("cpu: `{cpu}` is another CPU on another host, so the VM could not be moved"))
            .remedy("name a model that all hosts have, such as qemu64 or Skylake-Server, with features as +name"));
    }
    for (field, text) in [("cpu", &spec.cpu), ("machine", &spec.machine)] {
        let good = !text.is_empty() && text.len() <= 512;
        if !good || !text.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.,+=".contains(&b)) {
            return Err(invalid(format!("{field}: `{}` is none", text.chars().take(80).collect::<String>())));
        }
    }
    if spec.max_vcpus == 0 {
        spec.max_vcpus = spec.vcpus;
    }
    if spec.vcpus == 0 || spec.max_vcpus < spec.vcpus || spec.max_vcpus > MOST_VCPUS {
        let (n, max) = (spec.vcpus, spec.max_vcpus);
        return Err(invalid(format!(
            "vcpus: {n} with max_vcpus {max}: it takes 1 <= vcpus <= max_vcpus <= {MOST_VCPUS}"
        )));
    }
    if spec.memory.0 == 0 || !spec.memory.0.is_multiple_of(PAGE) {
        return Err(invalid(format!("memory: {} bytes is no multiple of 4 KiB", spec.memory.0)));
    }
    if spec.disks.len() + spec.nics.len() + spec.devices.len() > MOST_DEVICES {
        return Err(invalid(format!(
            "devices: more than {MOST_DEVICES}, disks and interfaces included, do not fit into a machine"
        )));
    }
    for device in &spec.devices {
        let driver = device.split(',').next().unwrap_or_default();
        // No files of a host, and no ends of other options: what a VM may have of its host it has by disks and interfaces.
        let good = !driver.is_empty() && !driver.contains('=') && device.len() <= 200;
        if !good || !device.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.,=:".contains(&b)) {
            return Err(invalid(format!("devices: `{}` is none", device.chars().take(80).collect::<String>()))
                .remedy("name QEMU's device, with properties behind commas: virtio-balloon-pci,id=balloon0"));
        }
    }
    if spec.boot == Boot::Disk && spec.disks.is_empty() {
        return Err(invalid("boot: it boots from its first disk, and has none").remedy("give it a disk or a kernel"));
    }
    if let Boot::Kernel { kernel, initrd, .. } = &spec.boot {
        for file in std::iter::once(kernel).chain(initrd) {
            if file.is_empty() || file.starts_with('.') || file.contains(['/', '\0', ',']) {
                return Err(invalid(format!("boot: `{file}` is no file name"))
                    .remedy("name a file in the hosts' image folder, without its folder"));
            }
        }
    }
    let mut volumes = HashSet::new();
    for disk in &spec.disks {
        let name = &disk.volume;
        if disk.size.0 == 0 || !disk.size.0.is_multiple_of(BLOCK) {
            return Err(invalid(format!("disks: `{name}`: {} bytes is no multiple of 4 KiB", disk.size.0)));
        }
        let (path, device) = match &disk.store {
            Some(Store::Device { path, .. }) => (Some(path), None),
            Some(Store::Shared { path, device, .. }) => (Some(path), device.as_ref()),
            Some(Store::Rados { .. }) | None => (None, None),
        };
        let is_path = |p: &&String| p.starts_with('/') && p.len() < 4096 && !p.contains('\0');
        if let Some(bad) = path.into_iter().chain(device).find(|path| !is_path(path)) {
            return Err(invalid(format!("disks: `{name}`: `{bad}` is no path at a host"))
                .remedy("name it as the host does, such as /dev/vg0/root"));
        }
        if taken.volumes.contains(name) || !volumes.insert(name.clone()) {
            return Err(conflict(format!("disks: there is a volume `{name}` already")).remedy("choose another name"));
        }
    }
    let mut ports = HashSet::new();
    if let Some(twice) = spec.ports().into_iter().find(|port| !ports.insert(port.clone())) {
        return Err(conflict(format!("nics: two interfaces are called `{twice}`")).remedy("name them apart"));
    }
    let mut macs = HashSet::new();
    for nic in &mut spec.nics {
        nic.mac = canonical_mac(&nic.mac)?;
        if taken.macs.contains(&nic.mac) || !macs.insert(nic.mac.clone()) {
            return Err(conflict(format!("nics: {} is another interface's MAC address", nic.mac)));
        }
        if nic.mtu != 0 && !(576..=9216).contains(&nic.mtu) {
            return Err(invalid(format!("nics: {}: an MTU of {} is out of range", nic.mac, nic.mtu))
                .remedy("use 576 to 9216, or 0 for 1500"));
        }
    }
    Ok(spec)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn checked(fields: Value) -> Result<VmSpec, String> {
        let mut spec = json!({"memory": 64 << 20, "boot": {"kernel": {"kernel": "vmlinuz"}}});
        for (key, value) in fields.as_object().unwrap() {
            spec[key] = value.clone();
        }
        let taken = Taken { macs: ["02:00:00:00:00:01".into()].into(), volumes: ["root".parse().unwrap()].into() };
        check(serde_json::from_value(spec).unwrap(), &taken).map_err(|e| e.to_string())
    }

    #[test]
    fn a_description_is_written_in_one_way_only() {
        let spec = checked(json!({"vcpus": 2, "nics": [{"mac": "0A:00:00:00:00:FF", "component": "lan"}]})).unwrap();
        assert_eq!(spec.max_vcpus, 2);
        assert_eq!(spec.nics[0].mac, "0a:00:00:00:00:ff");
    }

    #[test]
    fn what_makes_no_sense_is_refused_by_field() {
        let nic = |mac: &str| json!({"nics": [{"mac": mac, "component": "lan"}]});
        let disk = |volume: &str, size: u64| json!({"disks": [{"volume": volume, "size": size}]});
        for (fields, said) in [
            (json!({"cpu": "host"}), "another CPU"),
            (json!({"cpu": "max,+aes"}), "another CPU"),
            (json!({"cpu": "qemu64 -device x"}), "cpu:"),
            (json!({"machine": ""}), "machine:"),
            (json!({"vcpus": 0}), "vcpus:"),
            (json!({"vcpus": 4, "max_vcpus": 2}), "vcpus:"),
            (json!({"memory": 5000}), "memory:"),
            (json!({"boot": "disk"}), "has none"),
            (json!({"boot": {"kernel": {"kernel": "../vmlinuz"}}}), "no file name"),
            (disk("data", 5000), "no multiple of 4 KiB"),
            (disk("data", 0), "no multiple of 4 KiB"),
            (disk("root", 4096), "already"),
            (nic("02:00:00:00:00:01"), "another interface"),
            (nic("01:00:00:00:00:01"), "of a group"),
            (nic("00:00:00:00:00:00"), "no host's"),
            (nic("02:00:00:00:00"), "no MAC"),
            (nic("02:00:00:00:00:+1"), "no MAC"),
            (json!({"nics": [{"mac": "02:00:00:00:00:02", "component": "lan", "mtu": 80}]}), "out of range"),
        ] {
            let error = checked(fields.clone()).unwrap_err();
            assert!(error.contains(said), "{fields}: {error}");
        }
    }
}
