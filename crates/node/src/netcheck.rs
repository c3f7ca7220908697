//! What is wrong with this host's part of the network: what the kernel has, against what the node remembers.
//!
//! Looked for are interfaces and namespaces that belong to no record, forwarding entries that lead elsewhere than the wire does, or are
//! missing, devices of a wire or of a gateway's way out that are down or not on their bridge, hosts of other ends that do not answer, and
//! devices whose MTU is not their wire's, so that large frames are lost.
//!
//! A move changes all of this while it is looked at: so the node looks twice, and what it finds counts if it is there both times.
//!
//! A VM that cannot be read has a guest that runs, perhaps, and interfaces that nobody can name: while one is quarantined, nothing is called
//! removable that may be its.

use crate::node::{Node, network};
use godwit_api::host::{GatewayPort, Ownership};
use godwit_api::network::{NetFinding, NetKind};
use godwit_api::{ApiError, Name};
use godwit_units::VmId;
use godwit_wire::{MacAddr, Part, Surveyed, WireId};
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

/// Between the two looks: longer than a wire takes to be laid.
const AGAIN: Duration = Duration::from_millis(500);

/// What the kernel has.
#[derive(Clone, Debug, Default)]
struct Kernel {
    links: Vec<Surveyed>,
    /// Addresses that do not answer.
    silent: Vec<IpAddr>,
    /// Components' namespaces.
    namespaces: Vec<u64>,
    /// The host's own bridges that gateways name, and whether they are up.
    bridges: BTreeMap<String, bool>,
}

/// What the node remembers.
#[derive(Clone, Debug, Default)]
struct Records {
    wires: Vec<Wire>,
    /// Endpoints of the VMs and components that are known here; those of VMs are wires to components as well.
    endpoints: BTreeSet<u32>,
    /// Components that are known here.
    components: BTreeSet<u64>,
    /// Ends of VMs' own wires at gateways of this host.
    gateways: Vec<(u32, GatewayPort)>,
    /// Gateways that are this host's, and lead to one of its bridges.
    outside: Vec<Outside>,
    /// Wires between ports that cannot be read, and why.
    unread: BTreeMap<u32, String>,
    /// One of the VMs that cannot be read.
    quarantined: Option<VmId>,
}

/// A gateway's way out.
#[derive(Clone, Debug)]
struct Outside {
    component: u64,
    name: Name,
    bridge: String,
    mtu: u16,
}

/// A wire between ports.
#[derive(Clone, Debug, Default)]
struct Wire {
    id: u32,
    mtu: u16,
    /// Its ends that are open here.
    open: Vec<u32>,
    remotes: Vec<IpAddr>,
}

impl Wire {
    fn is_here(&self) -> bool {
        !self.open.is_empty()
    }
}

fn finding(kind: NetKind, message: String) -> NetFinding {
    NetFinding { kind, message }
}

/// What is wrong.
fn judge(kernel: &Kernel, records: &Records) -> Vec<NetFinding> {
    let mut found = strays(kernel, records);
    found.extend(records.gateways.iter().flat_map(|(wire, port)| astray(kernel, *wire, port)));
    found.extend(records.outside.iter().flat_map(|way| shut(kernel, way)));
    for (wire, why) in &records.unread {
        let message = format!("wire {wire} cannot be read here, wires/{wire}.json of the node's state folder: {why}");
        let remedy = "the controller tells it again if there is such a wire; if there is none, remove that file and restart the node";
        found.push(finding(NetKind::Wire, format!("{message}; {remedy}")));
    }
    for wire in &records.wires {
        found.extend(misled(kernel, wire));
        found.extend(parted(kernel, wire));
        found.extend(too_small(kernel, wire));
        for remote in wire.remotes.iter().filter(|remote| wire.is_here() && kernel.silent.contains(remote)) {
            let message = format!("{remote}, where frames of wire {} go, does not answer on this host's link", wire.id);
            found.push(finding(NetKind::Neighbour, format!("{message}: see whether that host is up")));
        }
    }
    found
}

/// What belongs to no record.
fn strays(kernel: &Kernel, records: &Records) -> Vec<NetFinding> {
    let known = |wire: WireId| {
        records.endpoints.contains(&wire.0)
            || records.wires.iter().any(|w| w.id == wire.0)
            || records.unread.contains_key(&wire.0)
    };
    let remove = |name: &str, part: &Part| match records.quarantined {
        Some(vm) if matches!(part, Part::Device(_) | Part::Bridge(_) | Part::Tunnel(..)) => {
            format!("VM {} is quarantined here, and nobody can say whether this is its: mend that first", vm.0)
        }
        _ => format!("`godwit orphan ls` shows what may go, or: ip link delete {name}"),
    };
    let mut found = vec![];
    for Surveyed { name, part, .. } in &kernel.links {
        let what = match part {
            Part::Device(endpoint) if !records.endpoints.contains(endpoint) => "a port of no VM and no component",
            Part::Bridge(wire) if !known(*wire) => "the bridge of a wire that is not known here",
            Part::Tunnel(wire, _) if !known(*wire) => "the tunnel of a wire that is not known here",
            Part::Outside(component) if !records.components.contains(component) => "the way out of no component",
            Part::Other => "nothing that Godwit makes, by a name of Godwit's",
            _ => continue,
        };
        found.push(finding(NetKind::Interface, format!("`{name}` is {what}; {}", remove(name, part))));
    }
    for number in kernel.namespaces.iter().filter(|number| !records.components.contains(number)) {
        let message = format!("the namespace of component {number} is here, which this host does not know");
        let remedy = format!("end its process, whose number is in components/{number}.pid of the node's run folder");
        found.push(finding(NetKind::Namespace, format!("{message}; {remedy}")));
    }
    found
}

/// Where frames of a wire go that should not, or should and do not.
fn misled(kernel: &Kernel, wire: &Wire) -> Vec<NetFinding> {
    let tunnel = kernel.links.iter().find_map(|link| match &link.part {
        Part::Tunnel(of, entries) if of.0 == wire.id => Some((&link.name, entries)),
        _ => None,
    });
    let id = wire.id;
    match tunnel {
        _ if !wire.is_here() => vec![],
        Some((name, entries)) => misled_to(name, entries, id, &wire.remotes),
        None if wire.remotes.is_empty() => vec![],
        None => {
            let message = format!("wire {id} leads to another host, and has no tunnel here");
            vec![finding(NetKind::Forwarding, format!("{message}: restart the node, which lays it anew"))]
        }
    }
}

/// Entries of a tunnel's table that lead elsewhere than to these hosts, and those that are missing.
fn misled_to(name: &str, entries: &[(MacAddr, IpAddr)], id: u32, remotes: &[IpAddr]) -> Vec<NetFinding> {
    let mut found = vec![];
    for (mac, to) in entries {
        if *mac != MacAddr::ZERO || !remotes.contains(to) {
            let what = if *mac == MacAddr::ZERO { "all frames".to_owned() } else { format!("frames for {mac}") };
            let message = format!("`{name}` sends {what} of wire {id} to {to}, where the wire does not lead");
            let remedy = format!("bridge fdb del {mac} dev {name} dst {to}");
            found.push(finding(NetKind::Forwarding, format!("{message}: {remedy}")));
        }
    }
    for remote in remotes {
        if !entries.contains(&(MacAddr::ZERO, *remote)) {
            let message = format!("`{name}` sends nothing of wire {id} to {remote}, where the wire leads");
            let remedy = format!("bridge fdb append 00:00:00:00:00:00 dev {name} dst {remote}");
            found.push(finding(NetKind::Forwarding, format!("{message}: {remedy}")));
        }
    }
    found
}

/// What is wrong with the end of a VM's own wire at a gateway of this host.
fn astray(kernel: &Kernel, id: u32, port: &GatewayPort) -> Vec<NetFinding> {
    let found = kernel.links.iter().find_map(|link| match &link.part {
        Part::Gateway(of, entries) if of.0 == id => Some((link, entries)),
        _ => None,
    });
    let forwarding = |what: String| finding(NetKind::Forwarding, what);
    let Some((link, entries)) = found else {
        let message = format!("wire {id} ends at `{}` here, and has no port there", port.bridge);
        return vec![forwarding(format!("{message}: restart the node, which makes it anew"))];
    };
    let (name, bridge) = (&link.name, &port.bridge);
    let mut found = misled_to(name, entries, id, &[port.remote]);
    if !link.up {
        found.push(forwarding(format!("`{name}` of wire {id} is down: ip link set {name} up")));
    }
    if link.on.as_ref() != Some(bridge) {
        let message = format!("`{name}` is not on `{bridge}`, where wire {id} ends");
        found.push(forwarding(format!("{message}: ip link set {name} master {bridge}")));
    }
    if link.mtu != u32::from(port.mtu) {
        let message = format!("`{name}` has MTU {}, and wire {id} has {}", link.mtu, port.mtu);
        found.push(finding(NetKind::Mtu, format!("{message}: ip link set {name} mtu {}", port.mtu)));
    }
    found
}

/// What keeps a gateway's frames from the host's network.
fn shut(kernel: &Kernel, way: &Outside) -> Vec<NetFinding> {
    let Outside { component, name, bridge, mtu } = way;
    let forwarding = |what: String| vec![finding(NetKind::Forwarding, what)];
    match kernel.bridges.get(bridge) {
        None => return forwarding(format!("`{bridge}`, which `{name}` leads to, is not on this host: make it again")),
        Some(false) => {
            return forwarding(format!("`{bridge}`, which `{name}` leads to, is down: ip link set {bridge} up"));
        }
        Some(true) => {}
    }
    let Some(link) = kernel.links.iter().find(|link| link.part == Part::Outside(*component)) else {
        return forwarding(format!("`{name}` has no port on `{bridge}`: give it its file again, which makes one"));
    };
    let device = &link.name;
    let mut found = vec![];
    if link.on.as_ref() != Some(bridge) {
        let message = format!("`{device}` is not on `{bridge}`, which `{name}` leads to");
        found.extend(forwarding(format!("{message}: ip link set {device} master {bridge}")));
    }
    if !link.up {
        found.extend(forwarding(format!("`{device}`, by which `{name}` leads out, is down: ip link set {device} up")));
    }
    if link.mtu != u32::from(*mtu) {
        let message = format!("`{device}` has MTU {}, and `{name}` leads out with {mtu}", link.mtu);
        found.push(finding(NetKind::Mtu, format!("{message}: ip link set {device} mtu {mtu}")));
    }
    found
}

/// What of a wire that has an end open here is down, or is not joined to the rest.
fn parted(kernel: &Kernel, wire: &Wire) -> Vec<NetFinding> {
    let is_bridge = |link: &&Surveyed| matches!(&link.part, Part::Bridge(of) if of.0 == wire.id);
    let bridge = kernel.links.iter().find(is_bridge).map(|link| link.name.as_str());
    let mut found = vec![];
    for link in kernel.links.iter().filter(|_| wire.is_here()) {
        let is_port = match &link.part {
            Part::Bridge(of) if of.0 == wire.id => false,
            Part::Device(endpoint) if wire.open.contains(endpoint) => true,
            Part::Tunnel(of, _) if of.0 == wire.id && !wire.remotes.is_empty() => true,
            _ => continue,
        };
        let name = &link.name;
        if !link.up {
            let message = format!("`{name}` of wire {} is down: ip link set {name} up", wire.id);
            found.push(finding(NetKind::Forwarding, message));
        }
        if let Some(bridge) = bridge.filter(|bridge| is_port && link.on.as_deref() != Some(bridge)) {
            let message = format!("`{name}` is not on `{bridge}`, the bridge of wire {}", wire.id);
            found.push(finding(NetKind::Forwarding, format!("{message}: ip link set {name} master {bridge}")));
        }
    }
    if bridge.is_none() && wire.is_here() {
        let message = format!("wire {} has an end here, and no bridge", wire.id);
        found.push(finding(NetKind::Forwarding, format!("{message}: restart the node, which lays it anew")));
    }
    found
}

/// Devices of a wire that carry less, or more, than it does.
fn too_small(kernel: &Kernel, wire: &Wire) -> Vec<NetFinding> {
    let mine = |link: &&Surveyed| match &link.part {
        Part::Device(endpoint) => wire.open.contains(endpoint),
        Part::Tunnel(of, _) => of.0 == wire.id && wire.is_here(),
        _ => false,
    };
    let differs = |link: &&Surveyed| link.mtu != u32::from(wire.mtu);
    let tell = |link: &Surveyed| {
        let message = format!("`{}` has MTU {}, and wire {} has {}", link.name, link.mtu, wire.id, wire.mtu);
        let remedy = format!("larger frames are lost: ip link set {} mtu {}", link.name, wire.mtu);
        finding(NetKind::Mtu, format!("{message}; {remedy}"))
    };
    kernel.links.iter().filter(mine).filter(differs).map(tell).collect()
}

async fn look(node: &Arc<Node>) -> Result<Vec<NetFinding>, ApiError> {
    // The kernel first: what comes to be known in between is not taken for nobody's.
    let mut kernel = Kernel {
        links: node.wires().survey().await.map_err(network)?,
        silent: node.wires().silent().await.map_err(network)?,
        namespaces: node.components().namespaces(),
        bridges: BTreeMap::new(),
    };
    let components = node.local_components();
    let mut outside = vec![];
    for component in components.iter().filter(|component| component.ownership == Ownership::Here) {
        let definition = &component.definition;
        let Some((bridge, mtu)) = crate::components::leads_to(definition) else { continue };
        if let Some(up) = node.wires().is_up(&bridge).await.map_err(network)? {
            kernel.bridges.insert(bridge.clone(), up);
        }
        outside.push(Outside { component: definition.id.0, name: definition.name.clone(), bridge, mtu });
    }
    let vms = node.vms();
    let of_vms = vms.iter().flat_map(|vm| vm.definition().wires.into_iter().map(|wire| wire.id).collect::<Vec<_>>());
    let of_components = components.iter().flat_map(|c| c.definition.endpoints.iter().copied());
    let records = Records {
        endpoints: of_vms.chain(of_components).collect(),
        components: components.iter().map(|c| c.definition.id.0).collect(),
        outside,
        unread: node.wired().unread(),
        quarantined: node.quarantine().all().into_keys().next(),
        gateways: node.gateways().ports(),
        wires: node
            .local_wires()
            .await
            .into_iter()
            .map(|local| Wire { id: local.wire.id, mtu: local.wire.mtu, open: local.open, remotes: local.remotes })
            .collect(),
    };
    Ok(judge(&kernel, &records))
}

/// What is wrong here, and stays so.
///
/// # Errors
/// When the kernel cannot be asked.
pub async fn check(node: &Arc<Node>) -> Result<Vec<NetFinding>, ApiError> {
    let mut found = look(node).await?;
    if !found.is_empty() {
        tokio::time::sleep(AGAIN).await;
        let again = look(node).await?;
        found.retain(|finding| again.contains(finding));
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn link(name: &str, part: Part) -> Surveyed {
        let is_port = matches!(part, Part::Device(_) | Part::Tunnel(..));
        Surveyed { name: name.into(), part, mtu: 1450, on: is_port.then(|| "gw-b00000007".to_owned()), up: true }
    }

    fn ip(last: u8) -> IpAddr {
        [10, 0, 0, last].into()
    }

    /// A wire from endpoint 3, here, to the host 10.0.0.2, as it should be.
    fn well() -> (Kernel, Records) {
        let entries = vec![(MacAddr::ZERO, ip(2))];
        let links = vec![
            link("gw-pen", Part::Pen),
            link("gwt3", Part::Device(3)),
            link("gw-b00000007", Part::Bridge(WireId(7))),
            link("gw-v00000007", Part::Tunnel(WireId(7), entries)),
            Surveyed {
                on: Some("br0".into()),
                ..link("gw-g00000009", Part::Gateway(WireId(9), vec![(MacAddr::ZERO, ip(4))]))
            },
            Surveyed { on: Some("lan".into()), ..link("gwo5", Part::Outside(5)) },
        ];
        let wire = Wire { id: 7, mtu: 1450, open: vec![3], remotes: vec![ip(2)] };
        let outside = vec![Outside { component: 5, name: "g1".parse().unwrap(), bridge: "lan".into(), mtu: 1450 }];
        let port = serde_json::json!({"bridge": "br0", "remote": "10.0.0.4", "vni": 9, "mtu": 1450, "lineage": 0, "generation": 1});
        let gateways = vec![(9, serde_json::from_value(port).unwrap())];
        let records = Records {
            wires: vec![wire],
            endpoints: [3].into(),
            components: [5].into(),
            gateways,
            outside,
            ..Records::default()
        };
        let bridges = [("lan".to_owned(), true)].into();
        (Kernel { links, silent: vec![ip(8)], namespaces: vec![5], bridges }, records)
    }

    /// The kinds of what is found once something was changed.
    fn after(change: impl FnOnce(&mut Kernel, &mut Records)) -> Vec<NetKind> {
        let (mut kernel, mut records) = well();
        change(&mut kernel, &mut records);
        judge(&kernel, &records).into_iter().map(|finding| finding.kind).collect()
    }

    fn entries(kernel: &mut Kernel) -> &mut Vec<(MacAddr, IpAddr)> {
        let tunnel = kernel.links.iter_mut().find_map(|link| match &mut link.part {
            Part::Tunnel(_, entries) => Some(entries),
            _ => None,
        });
        tunnel.unwrap()
    }

    #[test]
    fn nothing_is_found_where_all_is_well() {
        assert_eq!(after(|_, _| ()), []);
    }

    #[test]
    fn an_interface_or_a_namespace_of_no_record_is_found() {
        let (bridge, tunnel) = (Part::Bridge(WireId(8)), Part::Tunnel(WireId(8), vec![]));
        for stray in [Part::Device(4), bridge, tunnel, Part::Outside(6), Part::Other] {
            let found = after(|kernel, _| kernel.links.push(link("gw-x", stray.clone())));
            assert_eq!(found, [NetKind::Interface], "{stray:?}");
        }
        assert_eq!(after(|kernel, _| kernel.namespaces.push(6)), [NetKind::Namespace]);
        // A VM's wire to a gateway has its endpoint's number.
        let known = |kernel: &mut Kernel, records: &mut Records| {
            records.endpoints.insert(8);
            kernel.links.push(link("gw-b00000008", Part::Bridge(WireId(8))));
        };
        assert_eq!(after(known), []);
    }

    #[test]
    fn nothing_is_called_removable_that_may_be_of_what_cannot_be_read() {
        let (mut kernel, mut records) = well();
        records.quarantined = Some(VmId(1));
        let wire = WireId(8);
        for (name, part) in [("gwt4", Part::Device(4)), ("gw-b00000008", Part::Bridge(wire))] {
            kernel.links.push(link(name, part));
        }
        let found = judge(&kernel, &records);
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found.iter().all(|f| f.message.contains("VM 1") && !f.message.contains("delete")), "{found:?}");
        // A wire whose file is torn is still a wire.
        records.quarantined = None;
        records.unread.insert(8, "torn".into());
        let found = judge(&kernel, &records);
        let kinds: Vec<NetKind> = found.iter().map(|finding| finding.kind).collect();
        assert_eq!(kinds, [NetKind::Interface, NetKind::Wire], "{found:?}");
        assert!(found[0].message.contains("gwt4") && found[1].message.contains("torn"), "{found:?}");
    }

    #[test]
    fn a_forwarding_entry_that_leads_elsewhere_or_is_missing_is_found() {
        assert_eq!(after(|kernel, _| entries(kernel).push((MacAddr::ZERO, ip(3)))), [NetKind::Forwarding]);
        let one = MacAddr([2, 0, 0, 0, 0, 1]);
        assert_eq!(after(|kernel, _| entries(kernel).push((one, ip(2)))), [NetKind::Forwarding]);
        assert_eq!(after(|kernel, _| entries(kernel).clear()), [NetKind::Forwarding]);
        assert_eq!(after(|kernel, _| drop(kernel.links.remove(3))), [NetKind::Forwarding]);
        // A wire of which no end is open here need not lead anywhere.
        let idle = |kernel: &mut Kernel, records: &mut Records| {
            entries(kernel).clear();
            records.wires[0].open.clear();
        };
        assert_eq!(after(idle), []);
    }

    #[test]
    fn what_is_down_or_not_joined_to_its_wire_is_found() {
        for index in [1, 2, 3] {
            assert_eq!(after(|kernel, _| kernel.links[index].up = false), [NetKind::Forwarding], "{index}");
        }
        for index in [1, 3] {
            let elsewhere = after(|kernel, _| kernel.links[index].on = Some("gw-pen".into()));
            assert_eq!(elsewhere, [NetKind::Forwarding], "{index}");
            assert_eq!(after(|kernel, _| kernel.links[index].on = None), [NetKind::Forwarding], "{index}");
        }
        assert_eq!(after(|kernel, _| drop(kernel.links.remove(2))), [NetKind::Forwarding]);
        // Whoever has the end does not run: its device is in the pen.
        let off = |kernel: &mut Kernel, records: &mut Records| {
            kernel.links[1].on = Some("gw-pen".into());
            records.wires[0].open.clear();
        };
        assert_eq!(after(off), []);
    }

    #[test]
    fn a_vms_own_wire_that_ends_at_a_gateway_here_and_leads_elsewhere_is_found() {
        assert_eq!(after(|kernel, _| kernel.links[4].up = false), [NetKind::Forwarding]);
        assert_eq!(after(|kernel, _| kernel.links[4].on = None), [NetKind::Forwarding]);
        assert_eq!(after(|kernel, _| kernel.links[4].mtu = 1500), [NetKind::Mtu]);
        assert_eq!(after(|kernel, _| drop(kernel.links.remove(4))), [NetKind::Forwarding]);
        // Its guest has moved, and this host has missed it: what led to one leads to the other's place.
        let moved = |_: &mut Kernel, records: &mut Records| records.gateways[0].1.remote = ip(5);
        assert_eq!(after(moved), [NetKind::Forwarding, NetKind::Forwarding]);
    }

    #[test]
    fn a_gateway_that_leads_nowhere_is_found() {
        assert_eq!(after(|kernel, _| kernel.bridges.clear()), [NetKind::Forwarding]);
        assert_eq!(after(|kernel, _| *kernel.bridges.get_mut("lan").unwrap() = false), [NetKind::Forwarding]);
        assert_eq!(after(|kernel, _| kernel.links[5].on = Some("gw-pen".into())), [NetKind::Forwarding]);
        assert_eq!(after(|kernel, _| kernel.links[5].up = false), [NetKind::Forwarding]);
        assert_eq!(after(|kernel, _| kernel.links[5].mtu = 1400), [NetKind::Mtu]);
        assert_eq!(after(|kernel, _| drop(kernel.links.pop())), [NetKind::Forwarding]);
    }

    #[test]
    fn a_host_that_does_not_answer_and_an_mtu_that_is_not_the_wires_are_found() {
        assert_eq!(after(|kernel, _| kernel.silent.push(ip(2))), [NetKind::Neighbour]);
        for index in [1, 3] {
            assert_eq!(after(|kernel, _| kernel.links[index].mtu = 1400), [NetKind::Mtu], "{index}");
        }
    }
}
