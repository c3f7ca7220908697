//! The node: everything that belongs to the host rather than to one VM.

use crate::actor::{Actor, Handle};
use crate::disk::Disk;
use crate::parts::{Moving, Parts, lock};
use crate::peers::Peers;
use crate::proto::{self, Note};
use crate::registry::{self, Power, VmFile};
use crate::{Config, check, effects};
use anyhow::{Context, Result, bail};
use godwit_api::host::{GatewayPort, HostFacts, LinkAddresses, LocalVm, PeerHost, RunState};
use godwit_api::vm::{ComponentSpec, VmDefinition};
use godwit_api::{ApiError, Problem};
use godwit_handoff::{FileLedger, Generation, Ledger, Lineage, Message, Owner, Record, Seen, VmId};
use godwit_trust::Credentials;
use godwit_units::{BitRate, Bytes};
use godwit_vmm::{Qemu, Start};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, UNIX_EPOCH};

/// A node's state.
#[derive(Debug)]
pub struct Node {
    config: Config,
    credentials: Credentials,
    ledger: Mutex<FileLedger>,
    vms: Mutex<BTreeMap<VmId, Arc<Parts>>>,
    qemu: godwit_vmm::HostFacts,
    wires: godwit_wire::Wires,
    peers: Peers,
}

impl Node {
    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        self.config.name.as_str()
    }

    /// What it was started with.
    #[must_use]
    pub const fn config(&self) -> &Config {
        &self.config
    }

    /// What QEMU can do here.
    #[must_use]
    pub const fn qemu_facts(&self) -> &godwit_vmm::HostFacts {
        &self.qemu
    }

    /// Sessions with other nodes.
    #[must_use]
    pub const fn peers(&self) -> &Peers {
        &self.peers
    }

    /// The records of hand-offs. Held for one record at a time.
    pub fn ledger(&self) -> MutexGuard<'_, FileLedger> {
        lock(&self.ledger)
    }

    /// A VM's last durable record.
    #[must_use]
    pub fn record(&self, vm: VmId) -> Option<Record> {
        self.ledger().load(vm).ok().flatten()
    }

    /// All VMs that are known here.
    #[must_use]
    pub fn vms(&self) -> Vec<Arc<Parts>> {
        lock(&self.vms).values().cloned().collect()
    }

    /// One VM.
    #[must_use]
    pub fn vm(&self, id: VmId) -> Option<Arc<Parts>> {
        lock(&self.vms).get(&id).cloned()
    }

    fn folder(&self, vm: VmId) -> PathBuf {
        self.config.state.join("vms").join(vm.0.to_string())
    }

    fn run_folder(&self, vm: VmId) -> PathBuf {
        self.config.run.join("vms").join(vm.0.to_string())
    }

    /// What it has and can do.
    #[must_use]
    pub fn facts(&self) -> HostFacts {
        let disk_free = rustix::fs::statvfs(&self.config.state).map_or(0, |s| s.f_bavail * s.f_frsize);
        HostFacts {
            name: self.config.name.clone(),
            version: env!("CARGO_PKG_VERSION").into(),
            qemu: self.qemu.version.to_string(),
            machines: self.qemu.machines.clone(),
            kvm: self.qemu.kvm,
            memory_free: check::memory_free(),
            disk_free: Bytes(disk_free),
            certificate_expires_unix_s: self.credentials.expiry().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs()),
            link: self.as_peer().link,
            underlay: self.config.address,
        }
    }

    /// Itself, as another node has to know it.
    #[must_use]
    pub fn as_peer(&self) -> PeerHost {
        let at = |port| (self.config.address, port).into();
        PeerHost {
            name: self.config.name.clone(),
            link: LinkAddresses {
                control: at(self.config.control_port),
                disk: at(self.config.disk_port),
                memory: at(self.config.memory_port),
            },
            underlay: self.config.address,
        }
    }
}
