//! What would keep a VM from running on this host: found before anything is copied.

use crate::node::Node;
use crate::parts::Parts;
use crate::spec;
use godwit_api::host::{Blocker, CheckReport, CheckVm, QEMU_MEMORY};
use godwit_api::vm::{ComponentSpec, VmDefinition};
use godwit_units::{Bytes, VolumeId};
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// Left to the host itself.
const HOST_MEMORY: Bytes = Bytes(256 << 20);
/// A certificate must outlive a move.
const CERTIFICATE_LEFT: Duration = Duration::from_secs(3600);

/// Memory that could be given to guests, by the kernel's own estimate.
#[must_use]
pub fn memory_free() -> Bytes {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|l| l.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|l| l.trim().trim_end_matches("kB").trim().parse::<u64>().ok()).unwrap_or(0);
    Bytes((kib * 1024).saturating_sub(HOST_MEMORY.0))
}

/// What a VM is to come to a host for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// To be made there. It may have devices with which it can never leave.
    Create,
    /// To be moved there.
    Arrive,
}

/// Looks at everything, and names all that is in the way.
pub async fn check(node: &Arc<Node>, asked: &CheckVm, purpose: Purpose) -> CheckReport {
    let unreachable = crate::gateways::check(node, &asked.definition).await;
    let asked_id = asked.definition.id;
    let (looking, asked) = (node.clone(), asked.clone());
    // Boot files are read, where they are not known.
    let mut report = tokio::task::spawn_blocking(move || look(&looking, &asked, purpose)).await.unwrap_or_default();
    report.blockers.extend(unreachable);
    if let Err(error) = node.quarantine().check(asked_id) {
        let remedy = error.remedy.unwrap_or_default();
        let host = node.config().name.clone();
        report.blockers.push(Blocker { host, kind: "vm".into(), message: error.message, remedy });
    }
    report
}

/// What would keep a VM that is here from leaving, as its QEMU says now.
pub async fn departure(node: &Arc<Node>, parts: &Arc<Parts>) -> CheckReport {
    let Some(qemu) = parts.qemu() else { return CheckReport::default() };
    let asked = crate::effects::on_qemu(&qemu, |q| {
        Ok((q.devices()?, q.monitor(serde_json::json!({"execute": "query-migrate"}))?))
    });
    let blockers = match asked.await {
        Ok((devices, migration)) => {
            let mut found = unsupported(node, &devices);
            let reasons = migration["blocked-reasons"].as_array().into_iter().flatten().filter_map(|r| r.as_str());
            found.extend(reasons.map(|reason| {
                let message = format!("QEMU cannot migrate `{}` now: {reason}", parts.name);
                blocker(node, "device", message, "remove what QEMU names")
            }));
            found
        }
        Err(error) => {
            let message = format!("the QEMU of `{}` does not answer: {}", parts.name, error.message);
            vec![blocker(node, "vm", message, "see its log in the node's state folder")]
        }
    };
    CheckReport { blockers }
}

fn blocker(node: &Node, kind: &str, message: String, remedy: &str) -> Blocker {
    Blocker { host: node.config().name.clone(), kind: kind.into(), message, remedy: remedy.into() }
}

/// The devices whose state cannot be carried.
fn unsupported(node: &Node, devices: &[impl AsRef<str>]) -> Vec<Blocker> {
    let version = node.qemu_facts().version;
    let version = godwit_memory::preflight::QemuVersion::new(version.major, version.minor);
    let found = godwit_memory::preflight::check_devices(version, devices).into_iter();
    found.map(|u| blocker(node, "device", format!("{}: {u}", node.name()), "move it without that device")).collect()
}

fn look(node: &Node, asked: &CheckVm, purpose: Purpose) -> CheckReport {
    let mut blockers = vec![];
    let mut add = |kind: &str, message: String, remedy: &str| {
        blockers.push(Blocker { host: node.config().name.clone(), kind: kind.into(), message, remedy: remedy.into() });
    };
    let definition = &asked.definition;
    let name = node.name();
    match spec::of(definition) {
        Ok(vm) => {
            for unmet in godwit_vmm::check(&vm, node.qemu_facts()) {
                add(unmet.kind, unmet.message.clone(), &unmet.remedy);
            }
        }
        Err(error) => add("vm", error.message, "create the VM again with a specification that can be run"),
    }
    let (free, needed) = (memory_free(), Bytes(definition.spec.memory.0.saturating_add(QEMU_MEMORY.0)));
    if free < needed {
        add(
            "memory",
            format!("{name} has {free} of memory for guests, the VM needs {needed}"),
            "free memory, or choose another host",
        );
    }
    let (disk, here) = (node.facts().disk_free, here(node, definition));
    // New replicas lie in the pool, where there is one.
    let lacks = if node.config().pool.is_some() { Bytes(0) } else { asked.disk.saturating_sub(here) };
    if disk < lacks {
        let already = if here.0 > 0 { format!(", of which {here} are there") } else { String::new() };
        add(
            "disk",
            format!("{name} has room for {disk} of disk, the VM's disks hold {}{already}", asked.disk),
            "make room, or choose another host",
        );
    }
    for place in &asked.place {
        let mut disks = definition.spec.disks.iter().zip(&definition.volumes);
        if let Some((disk, volume)) = disks.find(|(disk, _)| disk.volume == place.volume)
            && let Some((message, remedy)) = crate::place::in_the_way(node, *volume, disk.size, place)
        {
            add("disk", message, remedy);
        }
    }
    for file in &definition.boot_files {
        if let Err(message) = node.boot_files().is_same(&node.config().images, file) {
            add(
                "boot-file",
                format!("{name}: {message}"),
                "copy the file from the VM's host into this host's image folder",
            );
        }
    }
    for wire in &definition.wires {
        if let Some(ComponentSpec::Switch { bridge }) = &wire.component
            && !has_interface(bridge)
        {
            add(
                "device",
                format!("{name} has no bridge `{bridge}`, to which wire {} leads", wire.id),
                "create the bridge, and stretch the segment to it",
            );
        }
    }
    let left = node.certificate_expires().duration_since(SystemTime::now()).unwrap_or_default();
    // One that is renewed by itself, also during a move, is in the way only when that has failed.
    if left < CERTIFICATE_LEFT && (left.is_zero() || !node.membership().renews()) {
        add(
            "certificate",
            format!("the certificate of {name} ends in {} min", left.as_secs() / 60),
            "see in the node's log why it is not renewed; or enrol the host again and restart the node",
        );
    }
    if node.record(definition.id).is_some_and(|record| record.may_have_the_vm()) {
        add("vm", format!("{name} has the VM, or is handing it over"), "move it to another host, or wait");
    }
    if purpose == Purpose::Arrive {
        for message in crate::seen::missing(definition) {
            blockers.push(blocker(node, "disk", format!("{name} {message}"), crate::seen::REMEDY));
        }
        let drivers = definition.spec.devices.iter().filter_map(|device| device.split(',').next());
        blockers.extend(unsupported(node, &drivers.collect::<Vec<_>>()));
    }
    CheckReport { blockers }
}

/// What replicas of a VM's disks take of this host's file system already: what comes to them takes no more room.
fn here(node: &Node, definition: &VmDefinition) -> Bytes {
    let blocks = |volume: &VolumeId| {
        let data = spec::volume_folder(node.config(), *volume).join("data");
        data.metadata().map_or(0, |file| file.blocks().saturating_mul(512))
    };
    Bytes(definition.volumes.iter().map(blocks).sum())
}

/// Whether this network namespace has an interface of this name; `/sys` may be another's.
fn has_interface(name: &str) -> bool {
    std::net::UdpSocket::bind("127.0.0.1:0")
        .or_else(|_| std::net::UdpSocket::bind("[::1]:0"))
        .is_ok_and(|socket| rustix::net::netdevice::name_to_index(&socket, name).is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interface_is_found_by_its_name() {
        assert!(has_interface("lo"));
        assert!(!has_interface("nosuchinterface"));
    }

    #[test]
    fn free_memory_is_what_the_kernel_says_less_the_hosts_own() {
        assert!(memory_free().0 > 0);
    }
}
