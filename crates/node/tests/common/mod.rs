//! Nodes on this machine's loopback, and the authority that certifies them. They need a QEMU to say what the host can do, and skip
//! without, aloud.

#![allow(dead_code, reason = "not every test uses all of it")]

use godwit_api::Name;
use godwit_api::host::{LinkAddresses, PeerHost};
use godwit_api::vm::VmDefinition;
use godwit_handoff::{FileLedger, Ledger, Record, Ticket};
use godwit_node::Config;
use godwit_node::registry::{self, Power, VmFile};
use godwit_trust::{Authority, Credentials, Identity, Role, Validity};
use godwit_units::{Generation, Lineage, MoveId, VmId, VolumeId};
use godwit_volume::{Holder, Replica, fet};
use serde_json::json;
use std::net::IpAddr;
use std::path::Path;
use tempfile::TempDir;

pub struct World {
    pub folder: TempDir,
    pub authority: Authority,
    /// Of 127.x.y.0: a network for each world that may be there at the same time.
    net: [u8; 2],
}

pub fn name(text: &str) -> Name {
    text.parse().unwrap()
}

pub fn identity(text: &str) -> Identity {
    Identity::node(text).unwrap()
}

impl World {
    pub fn new(net: [u8; 2]) -> Option<Self> {
        if std::process::Command::new("qemu-system-x86_64").arg("--version").output().is_err() {
            eprintln!("SKIPPED: this needs qemu-system-x86_64");
            return None;
        }
        let folder = tempfile::tempdir().unwrap();
        let authority = Authority::create(&folder.path().join("ca")).unwrap();
        Some(Self { folder, authority, net })
    }

    pub fn credentials(&self, role: Role, whom: &str) -> Credentials {
        let dir = self.folder.path().join(format!("cert-{whom}"));
        let whom = Identity::new(role, whom).unwrap();
        self.authority.issue(&whom, Validity::days(1)).unwrap().write(&dir).unwrap();
        Credentials::load(&dir).unwrap()
    }

    pub fn ip(&self, host: u8) -> IpAddr {
        [127, self.net[0], self.net[1], host].into()
    }

    pub fn peer(&self, whom: &str, host: u8) -> PeerHost {
        let at = |port| (self.ip(host), port).into();
        let link = LinkAddresses { control: at(7411), disk: at(10809), memory: at(4444) };
        PeerHost { name: name(whom), link, underlay: self.ip(host) }
    }

    pub fn config(&self, whom: &str, host: u8) -> Config {
        let dir = |what: &str| self.folder.path().join(format!("{what}-{whom}"));
        Config {
            name: name(whom),
            state: dir("state"),
            run: dir("run"),
            images: dir("images"),
            pool: None,
            credentials: dir("cert"),
            address: self.ip(host),
            api_port: 7410,
            control_port: 7411,
            disk_port: 10809,
            memory_port: 4444,
            extender: None,
            watch_every: None,
        }
    }
}

pub fn definition(id: u64, machine: &str, volumes: &[u64], disk: Option<&str>) -> VmDefinition {
    let disks: Vec<_> =
        volumes.iter().map(|v| json!({"volume": format!("v{v}"), "size": 1 << 20, "from": disk})).collect();
    serde_json::from_value(json!({
        "id": id, "name": format!("vm{id}"), "volumes": volumes, "wires": [],
        "spec": {"memory": (1 << 20) + 8192, "accel": "tcg", "machine": machine, "disks": disks},
    }))
    .unwrap()
}

pub fn ticket(vm: u64) -> Ticket {
    Ticket { vm: VmId(vm), lineage: Lineage::FIRST, generation: Generation(2), mv: MoveId(5) }
}

/// What a VM's disk holds at a host that handed the VM on before its blocks, and a replica that was told so.
pub fn handed_on(here: &Path, there: &Path) -> Replica {
    let size = godwit_units::Bytes::mib(1);
    let source = Replica::create(here, VolumeId(1), size).unwrap();
    source.become_primary(Lineage::FIRST, Generation(1)).unwrap();
    source.write(0, &b"another's secret".repeat(1024)).unwrap();
    let target = Replica::create(there, VolumeId(1), size).unwrap();
    let mut telling = fet::Source::new(Holder("b".into()), Lineage::FIRST, &[]);
    let (mut told, have) = fet::Target::new(&target).unwrap();
    let have = have.all(&target).unwrap();
    have.iter().for_each(|message| telling.handle(message, &source).unwrap());
    while telling.is_comparing() {
        telling.poll(&source).unwrap().iter().for_each(|message| drop(told.handle(message, &target).unwrap()));
    }
    for stopped in [false, true] {
        if stopped {
            source.freeze();
            telling.stop(&source).unwrap();
        }
        for message in telling.poll(&source).unwrap() {
            told.handle(&message, &target).unwrap();
        }
    }
    telling.poll(&source).unwrap().iter().for_each(|message| drop(told.handle(message, &target).unwrap()));
    assert!(told.is_complete());
    source.become_secondary().unwrap();
    target.become_primary(Lineage::FIRST, Generation(2)).unwrap();
    assert_eq!(target.absent(), godwit_units::Bytes(16 << 10));
    target
}

/// Has this host's files say that VM 1 was handed on from here, to `to`, and lends its volume.
pub fn lending(here: &Config, web: &VmDefinition, to: &PeerHost) {
    let order = json!({
        "id": ticket(1).mv, "vm": 1, "disk": "postcopy", "limit": null, "vcpus": null, "to": to,
    });
    let file = VmFile {
        order: Some(serde_json::from_value(order).unwrap()),
        lent: vec![VolumeId(1)],
        ..VmFile::new(web.clone(), Power::On)
    };
    registry::store(&here.state.join("vms/1"), &file).unwrap();
    FileLedger::open(&here.state.join("records")).unwrap().store(VmId(1), &Record::Released(ticket(1))).unwrap();
}
