//! A VM's definition in the hypervisor driver's terms, and the wires in the network's.

use crate::Config;
use godwit_api::vm::{Accel, Boot, ComponentSpec, VmDefinition};
use godwit_api::{ApiError, Problem};
use godwit_vmm::{Disk, Nic, Placement, VmSpec};
use godwit_wire::{Component, EndpointId, EndpointSpec, MacAddr, Vni, WireId};
use std::path::{Path, PathBuf};

/// The beginning of all interface names that are ours.
pub const PREFIX: &str = "gw";
/// UDP port of tunnels.
pub const TUNNEL_PORT: u16 = 4789;

/// The VM without host-local things.
///
/// # Errors
/// When it makes no sense.
pub fn of(definition: &VmDefinition) -> Result<VmSpec, ApiError> {
    with_images(definition, Path::new(""))
}

/// The VM, its boot files in `images`.
///
/// # Errors
/// When it makes no sense.
pub fn with_images(definition: &VmDefinition, images: &Path) -> Result<VmSpec, ApiError> {
    let spec = &definition.spec;
    if definition.volumes.len() != spec.disks.len() || definition.wires.len() != spec.nics.len() {
        return Err(ApiError::new(
            Problem::Invalid,
            format!("the definition of `{}` does not fit its specification", definition.name),
        ));
    }
    Ok(VmSpec {
        name: definition.name.to_string(),
        machine: spec.machine.clone(),
        cpu: spec.cpu.clone(),
        vcpus: spec.vcpus,
        max_vcpus: spec.max_vcpus.max(spec.vcpus),
        memory: spec.memory,
        accel: match spec.accel {
            Accel::Kvm => godwit_vmm::Accel::Kvm,
            Accel::Tcg => godwit_vmm::Accel::Tcg,
        },
        boot: match &spec.boot {
            Boot::Disk => godwit_vmm::Boot::Disk,
            Boot::Kernel { kernel, initrd, cmdline } => godwit_vmm::Boot::Kernel {
                kernel: images.join(kernel),
                initrd: initrd.as_ref().map(|i| images.join(i)),
                cmdline: cmdline.clone(),
            },
        },
        devices: spec.devices.clone(),
    })
}

/// The name of an interface's tap.
#[must_use]
pub fn tap(definition: &VmDefinition, nic: usize) -> String {
    // 15 bytes are the most; wires have a number for ever.
    definition.wires.get(nic).map_or_else(String::new, |wire| device(wire.id))
}

/// The name of an endpoint's device: a VM's tap, or the host's side of the veth pair to a component's port.
#[must_use]
pub fn device(endpoint: u32) -> String {
    format!("{PREFIX}t{endpoint}")
}

/// Where a volume's replica is.
#[must_use]
pub fn volume_folder(config: &Config, volume: godwit_units::VolumeId) -> PathBuf {
    config.state.join("volumes").join(volume.0.to_string())
}

/// Where the VM's things are on this host.
#[must_use]
pub fn placement(definition: &VmDefinition, folder: &Path, run: &Path) -> Placement {
    let disks = definition.spec.disks.iter().enumerate();
    let nics = definition.spec.nics.iter().enumerate();
    Placement {
        run: run.to_owned(),
        logs: folder.to_owned(),
        disks: disks.map(|(i, d)| Disk { socket: disk_socket(run, i), export: d.volume.to_string() }).collect(),
        nics: nics.map(|(i, n)| Nic { tap: tap(definition, i), mac: n.mac.clone(), mtu: n.mtu }).collect(),
    }
}

/// Where a disk's export listens.
#[must_use]
pub fn disk_socket(run: &Path, disk: usize) -> PathBuf {
    run.join(format!("disk{disk}.sock"))
}

/// The VM's endpoints.
///
/// # Errors
/// When an address makes no sense.
pub fn endpoints(definition: &VmDefinition) -> Result<Vec<EndpointSpec>, ApiError> {
    let invalid = |message: String| ApiError::new(Problem::Invalid, message);
    let mut found = vec![];
    for (i, (nic, wire)) in definition.spec.nics.iter().zip(&definition.wires).enumerate() {
        let mac: MacAddr =
            nic.mac.parse().map_err(|e| invalid(format!("`{}` of `{}`: {e}", nic.mac, definition.name)))?;
        found.push(EndpointSpec {
            id: EndpointId(u64::from(wire.id)),
            tap: tap(definition, i),
            mac,
            mtu: nic.mtu(),
            component: component(wire.id, wire.component.as_ref())?,
            ips: nic.ips.clone(),
        });
    }
    Ok(found)
}

fn component(wire: u32, component: Option<&ComponentSpec>) -> Result<Component, ApiError> {
    let Some(component) = component else { return Ok(Component::Nowhere) };
    Ok(match component {
        ComponentSpec::Switch { bridge } => Component::Switch { bridge: bridge.clone() },
        ComponentSpec::Gateway { host, bridge, underlay } => Component::Gateway {
            host: underlay.ok_or_else(|| {
                ApiError::new(Problem::Invalid, format!("the address of gateway {host} is not known"))
            })?,
            bridge: bridge.clone(),
            wire: WireId(wire),
            vni: Vni(vni(wire)),
            port: TUNNEL_PORT,
        },
    })
}

/// The tunnel's number of a wire: 24 bits, not 0.
#[must_use]
pub const fn vni(wire: u32) -> u32 {
    let low = wire & 0xff_ffff;
    if low == 0 { 1 } else { low }
}
