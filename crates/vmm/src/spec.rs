//! What a VM is made of, and where its things are on this host.

use crate::facts::Version;
use godwit_units::Bytes;
use std::path::PathBuf;

/// How a guest is executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Accel {
    /// By hardware.
    Kvm,
    /// By emulation.
    Tcg,
}

impl Accel {
    /// As QEMU calls it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Kvm => "kvm",
            Self::Tcg => "tcg",
        }
    }
}

/// How a guest boots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Boot {
    /// From its first disk.
    Disk,
    /// A kernel beside it.
    Kernel {
        /// The kernel.
        kernel: PathBuf,
        /// The initial RAM disk.
        initrd: Option<PathBuf>,
        /// The kernel's command line.
        cmdline: String,
    },
}

/// A VM: the same on every host that it runs on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VmSpec {
    /// For people and process lists.
    pub name: String,
    /// Versioned machine type, or `q35`/`pc` for the newest.
    pub machine: String,
    /// CPU model with features, `qemu64,+ssse3`.
    pub cpu: String,
    /// CPUs at boot; at least 1.
    pub vcpus: u32,
    /// CPUs that can be plugged in, those at boot included.
    pub max_vcpus: u32,
    /// RAM; a multiple of 8 KiB.
    pub memory: Bytes,
    /// How it is executed.
    pub accel: Accel,
    /// How it boots.
    pub boot: Boot,
    /// Further devices, as `-device` takes them.
    pub devices: Vec<String>,
}

/// A disk: an export of an NBD server on this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Disk {
    /// The server's unix socket.
    pub socket: PathBuf,
    /// The export's name.
    pub export: String,
}

/// A network interface: a persistent tap on this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nic {
    /// The tap.
    pub tap: String,
    /// The guest's MAC address.
    pub mac: String,
    /// Its MTU, told to the guest; 0: not told.
    pub mtu: u16,
}

/// Where a VM's things are on this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// For sockets and the process id.
    pub run: PathBuf,
    /// For QEMU's log and the guest's console.
    pub logs: PathBuf,
    /// In the guest's order.
    pub disks: Vec<Disk>,
    /// In the guest's order.
    pub nics: Vec<Nic>,
}

/// How QEMU begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// Boots the guest.
    Boot,
    /// Waits for a migration, and stays paused when it has come.
    Incoming,
}

/// RAM blocks of this alignment lose dirty pages under TCG before QEMU 10.
const UNSAFE_ALIGNMENT: u64 = 256 << 10;

impl VmSpec {
    /// Whether this QEMU can run and move it.
    ///
    /// # Errors
    /// A sentence on what is wrong, and what to do.
    pub fn check(&self, version: Version) -> Result<(), String> {
        if self.vcpus == 0 || self.max_vcpus < self.vcpus {
            return Err(format!(
                "{} CPUs of at most {}: give at least one, and no more than the most",
                self.vcpus, self.max_vcpus
            ));
        }
        if self.memory.0 == 0 || !self.memory.0.is_multiple_of(8192) {
            return Err(format!("{} bytes of RAM are not a multiple of 8 KiB, as QEMU wants it", self.memory.0));
        }
        if self.accel == Accel::Tcg && version.major < 10 && self.memory.0.is_multiple_of(UNSAFE_ALIGNMENT) {
            return Err(format!(
                "QEMU {version} loses dirty pages under emulation when RAM is a multiple of 256 KiB; give {} KiB, which is not",
                (self.memory.0 >> 10) + 8
            ));
        }
        if self.cpu.split(',').next().is_none_or(|model| matches!(model, "" | "host" | "max")) {
            return Err(format!("CPU model `{}` is another CPU on another host; name a model", self.cpu));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vm(kib: u64, accel: Accel) -> VmSpec {
        VmSpec {
            name: "web".into(),
            machine: "q35".into(),
            cpu: "qemu64".into(),
            vcpus: 1,
            max_vcpus: 1,
            memory: Bytes(kib << 10),
            accel,
            boot: Boot::Disk,
            devices: vec![],
        }
    }

    #[test]
    fn ram_that_would_lose_dirty_pages_is_refused_and_the_next_size_is_named() {
        let old = Version { major: 7, minor: 2 };
        let refused = vm(524_288, Accel::Tcg).check(old).expect_err("unsafe");
        assert!(refused.contains("524296 KiB"), "{refused}");
        assert_eq!(vm(524_296, Accel::Tcg).check(old), Ok(()));
        assert_eq!(vm(524_288, Accel::Kvm).check(old), Ok(()));
        assert_eq!(vm(524_288, Accel::Tcg).check(Version { major: 10, minor: 0 }), Ok(()));
    }

    #[test]
    fn a_cpu_that_differs_from_host_to_host_is_refused() {
        for cpu in ["host", "max,+ssse3", ""] {
            assert!(
                VmSpec { cpu: cpu.into(), ..vm(8, Accel::Kvm) }.check(Version { major: 8, minor: 0 }).is_err(),
                "{cpu}"
            );
        }
    }
}
