//! Where links end, host by host: what room is left there, and whose it may be.
//!
//! A VM goes to the host on which the least is left over behind it, so that large ones still find room later. One whose disks some
//! host has already, wholly or in part, goes there and nowhere else of that link: what it costs is reckoned for that host.

use super::{Fleet, FleetHost, FleetVm};
use std::collections::HashMap;

const MIB_A_GIB: f64 = 1024.0;

/// What is left at a host.
#[derive(Clone, Copy, Debug)]
struct Left {
    memory_mib: f64,
    disk_gib: f64,
}

/// What is left at the hosts of each link.
#[derive(Clone, Debug, Default)]
pub(super) struct Rooms(Vec<Vec<Left>>);

impl Rooms {
    /// Before anybody came. A link of which no host is known is one host with the link's own room.
    pub(super) fn of(fleet: &Fleet) -> Self {
        let all = |gib: Option<f64>| gib.unwrap_or(f64::INFINITY);
        let of_host =
            |host: &FleetHost| Left { memory_mib: all(host.memory_gib) * MIB_A_GIB, disk_gib: all(host.disk_gib) };
        let links = fleet.link.iter().map(|link| {
            let alone = Left { memory_mib: all(link.room_gib) * MIB_A_GIB, disk_gib: f64::INFINITY };
            if link.host.is_empty() { vec![alone] } else { link.host.iter().map(of_host).collect() }
        });
        Self(links.collect())
    }

    /// A VM comes to a host.
    pub(super) fn take(&mut self, link: usize, host: usize, vm: &FleetVm, held: f64) {
        let left = &mut self.0[link][host];
        left.memory_mib -= vm.room();
        left.disk_gib -= (vm.disk_gib - held).max(0.0);
    }

    /// It does not come after all.
    pub(super) fn give_back(&mut self, link: usize, host: usize, vm: &FleetVm, held: f64) {
        let left = &mut self.0[link][host];
        left.memory_mib += vm.room();
        left.disk_gib += (vm.disk_gib - held).max(0.0);
    }
}

/// Which hosts each VM may go to.
#[derive(Debug)]
pub(super) struct Homes {
    /// By kind of machine, link and host.
    runs: Vec<Vec<Vec<bool>>>,
    /// By VM.
    kind: Vec<usize>,
    /// By VM and link: the host that has most of its disks, and how much, in GiB. Empty of a VM of which no host has anything.
    has_disks: Vec<Vec<Option<(usize, f64)>>>,
}

impl Homes {
    pub(super) fn of(fleet: &Fleet) -> Self {
        let (mut kinds, mut machines) = (HashMap::new(), vec![]);
        let mut kind_of = |vm: &FleetVm| {
            let machine = vm.machine.clone();
            *kinds.entry(machine.clone()).or_insert_with(|| {
                machines.push(machine);
                machines.len() - 1
            })
        };
        let kind = fleet.vm.iter().map(&mut kind_of).collect();
        let runs_on = |machine: &Option<String>, host: &FleetHost| match (machine, &host.machines) {
            (Some(machine), Some(known)) => known.contains(machine),
            _ => true,
        };
        let of_links = |machine: &Option<String>| {
            let links = fleet.link.iter().map(|link| match link.host.is_empty() {
                true => vec![true],
                false => link.host.iter().map(|host| runs_on(machine, host)).collect(),
            });
            links.collect::<Vec<Vec<bool>>>()
        };
        let runs: Vec<Vec<Vec<bool>>> = machines.iter().map(of_links).collect();
        let mut homes = Self { runs, kind, has_disks: vec![] };
        let empty = Rooms::of(fleet);
        homes.has_disks = (0..fleet.vm.len()).map(|vm| homes.disks_of(fleet, &empty, vm)).collect();
        homes
    }

    fn disks_of(&self, fleet: &Fleet, rooms: &Rooms, vm: usize) -> Vec<Option<(usize, f64)>> {
        let known = &fleet.vm[vm];
        if known.held.is_empty() {
            return vec![];
        }
        let on = |name: &str| known.held.iter().filter(|held| held.host == name).map(|held| held.gib).sum::<f64>();
        let links = fleet.link.iter().enumerate().map(|(link, l)| {
            let there = l.host.iter().enumerate().map(|(i, host)| (i, on(&host.name)));
            there
                .filter(|(i, gib)| *gib > 0.0 && self.has_room(rooms, known, vm, (link, *i), *gib))
                .max_by(|a, b| a.1.total_cmp(&b.1))
        });
        links.collect()
    }

    fn has_room(&self, rooms: &Rooms, known: &FleetVm, vm: usize, (link, host): (usize, usize), held: f64) -> bool {
        let left = rooms.0[link][host];
        self.runs[self.kind[vm]][link][host]
            && left.memory_mib >= known.room()
            && left.disk_gib >= known.disk_gib - held
    }

    /// What of a VM's disks is where it would go over a link, in GiB.
    pub(super) fn held(&self, known: &FleetVm, vm: usize, link: usize) -> f64 {
        let there = self.has_disks[vm].get(link).copied().flatten();
        known.held_gib.max(there.map_or(0.0, |(_, gib)| gib))
    }

    /// The host that a VM would go to over a link as things stand; none where there is no room for it.
    pub(super) fn host(&self, rooms: &Rooms, known: &FleetVm, vm: usize, link: usize) -> Option<usize> {
        let held = self.held(known, vm, link);
        if let Some((host, _)) = self.has_disks[vm].get(link).copied().flatten() {
            return self.has_room(rooms, known, vm, (link, host), held).then_some(host);
        }
        let hosts = (0..rooms.0[link].len()).filter(|host| self.has_room(rooms, known, vm, (link, *host), held));
        hosts.min_by(|a, b| rooms.0[link][*a].memory_mib.total_cmp(&rooms.0[link][*b].memory_mib))
    }

    /// Whether some host of a link could run a VM if it were empty of others.
    pub(super) fn may_run(&self, vm: usize, link: usize) -> bool {
        self.runs[self.kind[vm]][link].iter().any(|runs| *runs)
    }
}
