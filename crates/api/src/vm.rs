//! What a VM is made of: the same on every host that it will ever run on.

use crate::host::PeerHost;
use crate::name::Name;
use crate::wire::PortName;
use godwit_units::{Bytes, RadosPool, VmId, VolumeId};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::net::IpAddr;

/// A VM as its user describes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct VmSpec {
    /// Machine type. `q35` and `pc` become the newest versioned name of the host that it is created on.
    #[serde(default = "q35")]
    #[schemars(length(min = 1, max = 512), regex(pattern = r"^[A-Za-z0-9_.,+=-]+$"))]
    pub machine: String,
    /// CPU model, and features as `+name`. Not `host`: that is another CPU on another host.
    #[serde(default = "cpu")]
    #[schemars(length(min = 1, max = 512), regex(pattern = r"^[A-Za-z0-9_.,+=-]+$"))]
    pub cpu: String,
    /// CPUs at boot.
    #[serde(default = "one")]
    #[schemars(range(min = 1, max = 1024))]
    pub vcpus: u32,
    /// CPUs that can be plugged in later, those at boot included. At least `vcpus`; 0 means `vcpus`.
    #[serde(default)]
    #[schemars(range(max = 1024))]
    pub max_vcpus: u32,
    /// RAM. Under emulation by a QEMU before 10.0 it must not be a multiple of 256 KiB (those lose dirty pages).
    #[schemars(schema_with = "crate::patterns::blocks")]
    pub memory: Bytes,
    /// How it is executed.
    #[serde(default)]
    pub accel: Accel,
    /// How it boots.
    #[serde(default)]
    pub boot: Boot,
    /// Its disks, in order: the guest sees them as virtio-blk.
    #[serde(default)]
    pub disks: Vec<DiskSpec>,
    /// Its network interfaces, in order: virtio-net.
    #[serde(default)]
    pub nics: Vec<NicSpec>,
    /// Further devices, as QEMU's `-device` takes them: `virtio-balloon-pci`, `pvpanic,ioport=1285`. A VM with one whose
    /// state cannot be carried runs, and cannot be moved.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(
        length(max = 24),
        inner(length(max = 200), regex(pattern = r"^[A-Za-z0-9_.:-]+(,[A-Za-z0-9_.:,=-]*)?$"))
    )]
    pub devices: Vec<String>,
    /// What becomes of the guest while a block of its disks does not come that is still elsewhere, and that it waits for.
    #[serde(default, skip_serializing_if = "OnCut::is_default")]
    pub on_cut: OnCut,
}

fn q35() -> String {
    "q35".into()
}

fn cpu() -> String {
    "qemu64,+rdrand,+ssse3,+sse4.1,+sse4.2,+popcnt".into()
}

fn one() -> u32 {
    1
}

/// How a guest is executed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Accel {
    /// By hardware.
    #[default]
    Kvm,
    /// By emulation.
    Tcg,
}

/// What becomes of a guest whose disks follow it while a block that it waits for does not come for some seconds: its holder is cut off, or down. What
/// is here already is read and written at any time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum OnCut {
    /// All of it stands still, so that none of its own timeouts runs out, and goes on when the block has come.
    #[default]
    Pause,
    /// It runs on, and whatever in it waits for the block waits, however long that takes.
    Wait,
}

impl OnCut {
    #[allow(clippy::trivially_copy_pass_by_ref, reason = "as serde calls it")]
    fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

/// How a guest boots.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub enum Boot {
    /// From its first disk.
    #[default]
    Disk,
    /// A kernel that the host brings along. The files are looked for in the host's image folder, and have to be the
    /// same on each host that the VM moves to.
    Kernel {
        /// File name of the kernel.
        #[schemars(regex(pattern = r"^(?!\.)[^/\x00,]+$"))]
        kernel: String,
        /// File name of the initial RAM disk.
        #[serde(default)]
        #[schemars(regex(pattern = r"^(?!\.)[^/\x00,]+$"))]
        initrd: Option<String>,
        /// Kernel command line.
        #[serde(default)]
        cmdline: String,
    },
}

/// A disk of a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DiskSpec {
    /// The volume's name.
    pub volume: Name,
    /// Its size; a multiple of 4 KiB.
    #[schemars(schema_with = "crate::patterns::blocks")]
    pub size: Bytes,
    /// An image on the host that the VM is created on, to be copied in: of any format that qemu-img reads. One that does not begin
    /// with `/` is in the host's image folder.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
    /// What it lies on, if not in its node's folder. Once the VM is made a device is its first host's own matter, and storage that is
    /// shared stands here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub store: Option<Store>,
}

/// What a volume's blocks lie on, at one host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub enum Store {
    /// A block device of the host: an LVM volume, a partition, a whole disk. It is the volume's alone, and zeroed.
    Device {
        /// Its path; one that outlives a reboot, such as in /dev/disk/by-id.
        path: String,
        /// Take it although it has a file system, a partition table or the like.
        #[serde(default)]
        overwrite: bool,
        /// It reads as zeroes, as whoever says this vouches: it is not zeroed.
        #[serde(default)]
        zeroed: bool,
    },
    /// Objects in a pool of the host's Ceph cluster.
    Rados {
        /// The pool.
        pool: RadosPool,
    },
    /// A folder on storage that all hosts reach under this path. The volume is made there, and is never copied: a move hands it over. So
    /// the VM moves only between hosts that see it.
    Shared {
        /// The folder. It must not exist; its parent must.
        path: String,
        /// A block device that all hosts reach under this name, for the blocks. The folder has the stamps then.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        device: Option<String>,
        /// As a device's own.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        overwrite: bool,
        /// As a device's own.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        zeroed: bool,
    },
}

/// What a volume is to lie on at the host that a move brings it to, where that is not the node's folder.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Placement {
    /// The volume's name.
    pub volume: Name,
    /// A block device of that host, as in [`Store::Device`]: the volume's alone, and zeroed before anything comes.
    pub device: String,
    /// Take it although it has a file system, a partition table or the like.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub overwrite: bool,
    /// It reads as zeroes, as whoever says this vouches: it is not zeroed.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub zeroed: bool,
}

impl DiskSpec {
    /// The folder on shared storage that it lies in, if it does.
    #[must_use]
    pub fn shared(&self) -> Option<&std::path::Path> {
        match &self.store {
            Some(Store::Shared { path, .. }) => Some(path.as_ref()),
            _ => None,
        }
    }
}

/// A network interface of a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NicSpec {
    /// MAC address, `02:00:00:00:00:01`.
    #[schemars(schema_with = "crate::patterns::mac")]
    pub mac: String,
    /// The component that it is wired to. None: it is a port that wires can be connected to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub component: Option<Name>,
    /// What it is called as a port; `eth` and its place in the list if not said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<PortName>,
    /// The guest's addresses, if they are known: with them a move can announce the guest by ARP, and prove that it is
    /// reachable.
    #[serde(default)]
    #[schemars(schema_with = "crate::patterns::ips")]
    pub ips: Vec<IpAddr>,
    /// MTU; 0 means 1500.
    #[serde(default)]
    #[schemars(schema_with = "crate::patterns::mtu")]
    pub mtu: u16,
}

impl NicSpec {
    /// The MTU, told or not.
    #[must_use]
    pub const fn mtu(&self) -> u16 {
        if self.mtu == 0 { ETHERNET_MTU } else { self.mtu }
    }
}

impl VmSpec {
    /// The names of its interfaces as ports, in their order.
    #[must_use]
    pub fn ports(&self) -> Vec<PortName> {
        let name = |(i, nic): (usize, &NicSpec)| nic.name.clone().unwrap_or_else(|| PortName::of_nic(i));
        self.nics.iter().enumerate().map(name).collect()
    }
}

/// What an interface's MTU is when nobody says.
pub const ETHERNET_MTU: u16 = 1500;

/// What a node needs to know of a VM: the specification with the controller's numbers and the components' nature.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct VmDefinition {
    /// Its number, for ever.
    pub id: VmId,
    /// Its name.
    pub name: Name,
    /// What it is made of; the machine type has a version.
    pub spec: VmSpec,
    /// The volumes of its disks, in the same order.
    pub volumes: Vec<VolumeId>,
    /// The wires of its interfaces, in the same order.
    pub wires: Vec<WireDefinition>,
    /// The boot files that the VM was created with, so that another host can tell whether its own are the same.
    #[serde(default)]
    pub boot_files: Vec<BootFile>,
    /// The trust domain that it belongs to, if it does to one: with whose volumes its own may share what they hold at a site.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub domain: Option<Name>,
}

/// One wire.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct WireDefinition {
    /// Its number, for ever.
    pub id: u32,
    /// What it leads to. None: wherever a wire between ports leads ([`crate::wire`]), whose endpoint number this is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub component: Option<ComponentSpec>,
    /// Where the gateway's node is, if it leads to one: a node that is granted the VM points the gateway at itself, with
    /// the controller or without it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gateway: Option<PeerHost>,
}

/// What wires lead to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub enum ComponentSpec {
    /// A bridge of this name on whichever host the VM is on: a segment that the operator has stretched over the sites.
    Switch {
        /// The bridge's interface name.
        #[schemars(regex(pattern = r"^(?!\.{1,2}$)[A-Za-z0-9_.-]{1,15}$"))]
        bridge: String,
    },
    /// A bridge on one host, at the clients' site. Wires lead to it through tunnels, and follow the VM.
    Gateway {
        /// The host.
        host: Name,
        /// The bridge's interface name there. Made when it does not exist.
        #[schemars(regex(pattern = r"^(?!\.{1,2}$)[A-Za-z0-9_.-]{1,15}$"))]
        bridge: String,
        /// The host's address for the tunnels. Filled in by the controller.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        #[schemars(schema_with = "crate::patterns::ip_or_null")]
        underlay: Option<IpAddr>,
    },
}

/// A boot file, by content.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct BootFile {
    /// File name.
    pub name: String,
    /// BLAKE3 of its contents, in hexadecimal.
    pub blake3: String,
}
