//! What is asked before a migration begins: can this guest's stream be carried at all?
//!
//! Sections of QEMU's stream have no length. A device that sends its state in rounds, or in front of RAM, would end
//! the move in its middle; so devices are allowed by name, and what is not known is refused while that costs nothing.

use std::fmt;

/// A version of QEMU, as `query-version` tells it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct QemuVersion {
    /// 7 of 7.2.
    pub major: u32,
    /// 2 of 7.2.
    pub minor: u32,
}

impl QemuVersion {
    /// Oldest whose stream was looked at.
    pub const OLDEST: Self = Self::new(7, 2);
    /// Newest major version whose stream was looked at.
    pub const NEWEST_MAJOR: u32 = 10;

    /// A version.
    #[must_use]
    pub const fn new(major: u32, minor: u32) -> Self {
        Self { major, minor }
    }
}

impl fmt::Display for QemuVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// Something that keeps a guest from being moved.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Unsupported {
    /// QEMU itself.
    #[error("QEMU {found} is not among the versions whose migration stream is known (7.2 to 10.x)")]
    Version {
        /// What runs.
        found: QemuVersion,
    },
    /// A device that is known to be in the way.
    #[error("the device `{device}` cannot be moved: {reason}; remove it")]
    Device {
        /// Its QOM type.
        device: String,
        /// What it does.
        reason: &'static str,
    },
    /// A device of which nothing is known.
    #[error("whether the device `{device}` can be moved is not known for QEMU {version}: remove it")]
    Unknown {
        /// Its QOM type.
        device: String,
        /// The version that was asked for.
        version: QemuVersion,
    },
}

/// Devices without state in rounds and without early state, in every version since 7.2. Sorted.
const ALLOWED: &[&str] = &[
    "ICH9-LPC",
    "ICH9-SMB",
    "PIIX3",
    "PIIX4_PM",
    "ahci",
    "apic",
    "fw_cfg_io",
    "hpet",
    "i440FX",
    "i440FX-pcihost",
    "i8042",
    "i8257",
    "ich9-ahci",
    "ide-cd",
    "ide-hd",
    "ioapic",
    "isa-debug-exit",
    "isa-debugcon",
    "isa-fdc",
    "isa-i8259",
    "isa-pcspk",
    "isa-pit",
    "isa-serial",
    "kvm-apic",
    "kvm-i8259",
    "kvm-ioapic",
    "kvm-pit",
    "kvmclock",
    "kvmvapic",
    "mc146818rtc",
    "mch",
    "pci-bridge",
    "pci-serial",
    "pcie-pci-bridge",
    "pcie-root-port",
    "piix3-ide",
    "piix4-ide",
    "port92",
    "ps2-kbd",
    "ps2-mouse",
    "pvpanic",
    "pvpanic-pci",
    "q35-pcihost",
    "scsi-cd",
    "scsi-hd",
    "smbus-eeprom",
    "virtconsole",
    "virtio-balloon-device",
    "virtio-balloon-pci",
    "virtio-blk-device",
    "virtio-blk-pci",
    "virtio-keyboard-pci",
    "virtio-net-device",
    "virtio-net-pci",
    "virtio-rng-device",
    "virtio-rng-pci",
    "virtio-scsi-device",
    "virtio-scsi-pci",
    "virtio-serial-device",
    "virtio-serial-pci",
    "virtio-tablet-pci",
    "virtserialport",
    "vmcoreinfo",
    "vmgenid",
    "vmmouse",
    "vmport",
];

/// Devices that are there under another name, or not at all, before a version.
const ALLOWED_SINCE: &[(&str, QemuVersion)] =
    &[("PIIX3-xen", QemuVersion::new(7, 2)), ("fd-bus-fdc", QemuVersion::new(8, 0))];

/// Beginnings of names that are refused for a reason that is known.
const REFUSED: &[(&str, &str)] = &[
    ("vfio-", "it sends its state in rounds, which has no length that could be parsed"),
    ("virtio-mem", "it sends its state in front of RAM"),
    ("ivshmem", "its memory is shared with another process, which is not moved"),
    ("vhost-user-", "its state lives in another process"),
    ("vhost-vsock", "its connections end at this host"),
    ("usb-host", "it is a piece of this host"),
    ("usb-redir", "its connection ends at this host"),
    ("nvdimm", "its memory is a file of this host"),
    ("virtio-pmem", "its memory is a file of this host"),
    ("tpm-", "its secrets lie in another process of this host"),
    ("scsi-block", "it is a disk of this host"),
    ("scsi-generic", "it is a device of this host"),
    ("virtio-9p", "it serves a directory of this host; QEMU itself refuses it while mounted"),
    ("VGA", "its large aligned memory loses dirty pages under TCG before QEMU 10: use -vga none and a serial console"),
    ("qxl", "its display server is part of this host: use -vga none and a serial console"),
    ("sev-guest", "its memory cannot be read"),
];

/// What of a guest cannot be moved; empty if all can. `devices` are QOM types, as `info qtree` or `qom-list` name
/// them, the board's own included or not; an `x`-`cpu` type and a name's `-transitional` or `-non-transitional`
/// ending are understood.
#[must_use]
pub fn check_devices(version: QemuVersion, devices: &[impl AsRef<str>]) -> Vec<Unsupported> {
    let mut found = vec![];
    if version < QemuVersion::OLDEST || version.major > QemuVersion::NEWEST_MAJOR {
        found.push(Unsupported::Version { found: version });
    }
    found.extend(devices.iter().filter_map(|d| check_device(version, d.as_ref())));
    found
}

fn check_device(version: QemuVersion, device: &str) -> Option<Unsupported> {
    let plain = device.strip_suffix("-non-transitional").or(device.strip_suffix("-transitional")).unwrap_or(device);
    let since = ALLOWED_SINCE.iter().any(|(name, since)| *name == plain && version >= *since);
    if since || ALLOWED.binary_search(&plain).is_ok() || plain.ends_with("-x86_64-cpu") {
        return None;
    }
    let device = device.to_owned();
    Some(match REFUSED.iter().find(|(prefix, _)| plain.starts_with(prefix)) {
        Some((_, reason)) => Unsupported::Device { device, reason },
        None => Unsupported::Unknown { device, version },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const V7: QemuVersion = QemuVersion::new(7, 2);

    #[test]
    fn the_list_of_allowed_devices_is_sorted_so_that_searching_it_finds_all() {
        assert!(ALLOWED.is_sorted());
        assert_eq!(check_devices(V7, ALLOWED), []);
    }

    #[test]
    fn a_usual_guest_can_be_moved() {
        let devices = ["virtio-net-pci-non-transitional", "virtio-blk-pci", "qemu64-x86_64-cpu", "isa-serial"];
        assert_eq!(check_devices(V7, &devices), []);
    }

    #[test]
    fn what_cannot_be_moved_is_named_with_the_reason_if_there_is_one() {
        let found = check_devices(V7, &["virtio-blk-pci", "vfio-pci", "flux-capacitor"]);
        let said: Vec<String> = found.iter().map(ToString::to_string).collect();
        assert_eq!(said.len(), 2);
        assert!(said[0].contains("vfio-pci") && said[0].contains("rounds"), "{}", said[0]);
        assert!(said[1].contains("flux-capacitor") && said[1].contains("7.2"), "{}", said[1]);
    }

    #[test]
    fn a_qemu_whose_stream_nobody_looked_at_is_refused() {
        for (major, minor, refused) in [(7, 1, true), (7, 2, false), (10, 2, false), (11, 0, true)] {
            assert_eq!(!check_devices(QemuVersion::new(major, minor), &[""; 0]).is_empty(), refused);
        }
    }
}
