//! `godwit net`: looks at the user's virtual network as a whole.

use crate::failure::{Code, Failure};
use crate::user::User;
use clap::Subcommand;
use godwit_api::component::{ComponentKind, ComponentObject};
use godwit_api::host::Ownership;
use godwit_api::network::{HostFinding, NetKind};
use godwit_api::public::{Component, Vm};
use godwit_api::vm::{ComponentSpec, NicSpec};
use godwit_api::wire::{PortName, PortWire, WirePath, WireState};
use godwit_api::{ApiError, Name, Problem};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Duration;

#[derive(Debug, Subcommand)]
pub enum NetCommand {
    /// Show where frames of a VM or a component can go, hop by hop
    Trace {
        /// The VM or component
        object: Name,
        /// Record the frames of each of these wires, at the hosts of its ends, into files of this folder: wire-NUMBER-HOST.pcap
        #[arg(long, value_name = "DIR")]
        capture: Option<PathBuf>,
        /// For how long: at most a minute
        #[arg(long = "for", value_name = "TIME", value_parser = crate::quantity::time, default_value = "10s", requires = "capture")]
        lasting: Duration,
        /// Record at this host, too, as soon as the object comes there: name where it moves to; may be given again
        #[arg(long, value_name = "HOST", requires = "capture")]
        also: Vec<Name>,
    },
    /// Look for what keeps frames from where they should go: hosts that do not answer, wires that are not connected, objects
    /// without an owner, addresses that two interfaces have, switches in a circle, MTUs that differ along the way; and on each
    /// host interfaces, namespaces and forwarding entries that belong to no record
    Check,
}

/// A hop.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct Hop {
    /// How many wires away.
    distance: usize,
    /// The port that it leaves by.
    from: String,
    /// The port that it comes to.
    to: String,
    /// The hosts of both.
    hosts: [Name; 2],
    /// The wire's number; none of one that belongs to the interface of a VM.
    #[serde(skip_serializing_if = "Option::is_none")]
    wire: Option<u32>,
    /// `collapsed`, `tunnel`, or which extender carries it.
    path: String,
    /// What it carries, bytes.
    mtu: u16,
}

/// Something that is wrong.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct Finding {
    /// Of what kind.
    kind: &'static str,
    /// On which host, where it is one's own.
    #[serde(skip_serializing_if = "Option::is_none")]
    host: Option<Name>,
    /// What, and what to do.
    message: String,
}

impl Finding {
    fn line(&self) -> String {
        let host = self.host.as_ref().map_or_else(String::new, |host| format!("{host}: "));
        format!("{}: {host}{}\n", self.kind, self.message)
    }
}

/// Does what was asked.
///
/// # Errors
/// The controller's; of a check that something is wrong.
pub async fn run(user: &User, command: NetCommand) -> Result<(), Failure> {
    let api = user.api();
    let wires = api.port_wires().await?;
    match command {
        NetCommand::Trace { object, capture, lasting, also } => {
            let (vms, made) = (api.vms().await?, api.component_objects().await?);
            let vm = vms.iter().find(|vm| vm.name == object);
            if vm.is_none() && !made.iter().any(|component| component.name == object) {
                let unknown = ApiError::new(Problem::NotFound, format!("there is no VM and no component `{object}`"));
                return Err(unknown.remedy("see `godwit vm ls` and `godwit component ls`").into());
            }
            let mut hops = trace(&object, &wires);
            if let Some(vm) = vm.filter(|vm| vm.spec.nics.iter().any(|nic| nic.component.is_some())) {
                let mut straight = straight(vm, &api.components().await?);
                straight.append(&mut hops);
                hops = straight;
            }
            let passed = hops.iter().filter_map(|hop| hop.wire).collect();
            user.print(&hops, |hops| {
                let line = |hop: &Hop| {
                    let indent = "  ".repeat(hop.distance - 1);
                    let [a, b] = &hop.hosts;
                    let place = if a == b { format!("on {a}") } else { format!("{a} to {b}") };
                    let wire = hop.wire.map_or_else(String::new, |wire| format!("wire {wire}, "));
                    format!("{indent}{} -> {}  {wire}{}, {place}, MTU {}\n", hop.from, hop.to, hop.path, hop.mtu)
                };
                if hops.is_empty() { format!("no wire ends at `{object}`\n") } else { hops.iter().map(line).collect() }
            })?;
            let Some(folder) = capture else { return Ok(()) };
            for file in crate::capture::record(api, &passed, lasting, &also, &folder).await? {
                eprintln!("{}", file.display());
            }
            Ok(())
        }
        NetCommand::Check => {
            let (vms, components) = (api.vms().await?, api.component_objects().await?);
            let mut found = check(&vms, &components, &wires);
            let of_extenders = crate::extender::check(api).await?;
            found.extend(of_extenders.into_iter().map(|(kind, message)| Finding { kind, host: None, message }));
            match api.network().await {
                Ok(on_hosts) => found.extend(on_hosts.into_iter().map(of_host)),
                Err(error) if error.problem == Problem::Forbidden => {
                    eprintln!(
                        "what is on hosts is for the deployment's own people to see: only your objects were looked at"
                    );
                }
                Err(error) => return Err(error.into()),
            }
            user.print(&found, |found| {
                let lines: String = found.iter().map(Finding::line).collect();
                if lines.is_empty() { "nothing is wrong that can be seen from here\n".into() } else { lines }
            })?;
            if found.is_empty() { Ok(()) } else { Err(Failure::new(Code::Failed, "")) }
        }
    }
}

fn of_host(found: HostFinding) -> Finding {
    let kind = match found.finding.kind {
        NetKind::Interface => "interface",
        NetKind::Namespace => "namespace",
        NetKind::Forwarding => "forwarding",
        NetKind::Neighbour => "neighbour",
        NetKind::Mtu => "mtu",
        NetKind::Wire => "wire",
        NetKind::Host => "host",
    };
    Finding { kind, host: Some(found.host), message: found.finding.message }
}

/// Switches whose wires carry frames of different sizes: nobody there could cut one, or say that it is too large.
fn narrow_switches(components: &[ComponentObject], wires: &[PortWire]) -> Vec<Finding> {
    let mut found = vec![];
    for switch in components.iter().filter(|c| c.kind == ComponentKind::Switch) {
        let ends = wires.iter().flat_map(|wire| wire.ends.iter().map(move |end| (wire, end)));
        let mine: Vec<_> = ends.filter(|(_, end)| end.end.object == switch.name).collect();
        let (Some(least), Some(most)) =
            (mine.iter().min_by_key(|(wire, _)| wire.mtu), mine.iter().max_by_key(|(wire, _)| wire.mtu))
        else {
            continue;
        };
        if least.0.mtu < most.0.mtu {
            let message = format!(
                "frames of up to {} bytes come to `{}` by {}, and {} takes {}: larger ones are lost; give both one MTU",
                most.0.mtu, switch.name, most.1.end, least.1.end, least.0.mtu
            );
            found.push(Finding { kind: "mtu", host: None, message });
        }
    }
    found
}

/// The hops of a VM's interfaces that its specification wires to what an operator has made known: one each.
fn straight(vm: &Vm, components: &[Component]) -> Vec<Hop> {
    let ports = vm.spec.ports().into_iter().zip(&vm.spec.nics);
    let hop = |(port, nic): (PortName, &NicSpec)| {
        let component = components.iter().find(|component| Some(&component.name) == nic.component.as_ref())?;
        let (host, bridge) = match &component.kind {
            ComponentSpec::Switch { bridge } => (&vm.host, bridge),
            ComponentSpec::Gateway { host, bridge, .. } => (host, bridge),
        };
        Some(Hop {
            distance: 1,
            from: format!("{}:{port}", vm.name),
            to: format!("{}, bridge {bridge}", component.name),
            hosts: [vm.host.clone(), host.clone()],
            wire: None,
            path: if host == &vm.host { "collapsed" } else { "tunnel" }.to_owned(),
            mtu: nic.mtu(),
        })
    };
    ports.filter_map(hop).collect()
}

/// Every wire that a frame of the object may pass, each once, the nearest first within each branch.
fn trace(object: &Name, wires: &[PortWire]) -> Vec<Hop> {
    let (mut hops, mut seen) = (vec![], BTreeSet::new());
    let mut open = vec![(object.clone(), 1)];
    while let Some((object, distance)) = open.pop() {
        for wire in wires {
            let here = wire.ends.iter().position(|end| end.end.object == object);
            let Some(here) = here.filter(|_| seen.insert(wire.id)) else { continue };
            let (a, b) = (&wire.ends[here], &wire.ends[1 - here]);
            hops.push(Hop {
                distance,
                from: a.end.to_string(),
                to: b.end.to_string(),
                hosts: [a.host.clone(), b.host.clone()],
                wire: Some(wire.id),
                path: crate::extender::path(wire).unwrap_or_else(|| {
                    if wire.path == WirePath::Collapsed { "collapsed" } else { "tunnel" }.to_owned()
                }),
                mtu: wire.mtu,
            });
            open.push((b.end.object.clone(), distance + 1));
        }
    }
    hops.sort_by_key(|hop| hop.distance);
    hops
}

/// Whether a component is a bridge that does not speak spanning tree. Its file was read strictly when it was taken.
fn is_plain_bridge(component: &ComponentObject) -> bool {
    let file: toml::Table = component.config.parse().unwrap_or_default();
    let bridges = match component.kind {
        ComponentKind::Switch => true,
        ComponentKind::Firewall => file.get("mode").and_then(toml::Value::as_str) == Some("bridged"),
        ComponentKind::Router | ComponentKind::Gateway => false,
    };
    bridges && file.get("stp").and_then(toml::Value::as_bool) != Some(true)
}

fn check(vms: &[Vm], components: &[ComponentObject], wires: &[PortWire]) -> Vec<Finding> {
    let mut found = narrow_switches(components, wires);
    let mut add = |kind, message| found.push(Finding { kind, host: None, message });
    for wire in wires.iter().filter(|wire| wire.state != WireState::Connected) {
        let [a, b] = &wire.ends;
        let message = format!("wire {} from {} to {} is not connected on all its hosts yet", wire.id, a.end, b.end);
        add("wire", format!("{message}: see that `{}` and `{}` can be reached", a.host, b.host));
    }
    let objects = vms.iter().map(|vm| (&vm.name, &vm.host, vm.ownership));
    for (name, host, ownership) in objects.chain(components.iter().map(|c| (&c.name, &c.host, c.ownership))) {
        match ownership {
            Some(Ownership::WaitsForPeer) => {
                add("owner", format!("`{name}` waits at `{host}` for the other host of its move"))
            }
            None => add("host", format!("`{host}`, where `{name}` is, does not answer")),
            Some(_) => {}
        }
    }
    let mut macs: BTreeMap<String, Vec<&Name>> = BTreeMap::new();
    for vm in vms {
        for nic in &vm.spec.nics {
            macs.entry(nic.mac.to_lowercase()).or_default().push(&vm.name);
        }
    }
    for (mac, whose) in macs.into_iter().filter(|(_, whose)| whose.len() > 1) {
        let whose: Vec<&str> = whose.into_iter().map(Name::as_str).collect();
        let message = format!("{mac} is the address of interfaces of {}", whose.join(" and "));
        add("address", format!("{message}: if they meet on a network, make one of these VMs again with another"));
    }
    // Bridges without spanning tree that can be reached from themselves: a broadcast never ends there.
    let plain = |name: &Name| components.iter().any(|c| &c.name == name && is_plain_bridge(c));
    let mut groups: BTreeMap<&Name, &Name> = BTreeMap::new();
    fn root<'a>(groups: &BTreeMap<&'a Name, &'a Name>, mut name: &'a Name) -> &'a Name {
        while let Some(up) = groups.get(name).filter(|up| **up != name) {
            name = up;
        }
        name
    }
    for wire in wires {
        let [a, b] = [&wire.ends[0].end, &wire.ends[1].end];
        if !plain(&a.object) || !plain(&b.object) {
            continue;
        }
        let (x, y) = (root(&groups, &a.object), root(&groups, &b.object));
        if x == y {
            let message = format!("wire {} from {a} to {b} closes a circle of bridges", wire.id);
            add("loop", format!("{message}: disconnect it, or give them `stp = true`"));
        } else {
            groups.insert(x, y);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn wire(id: u32, ends: [&str; 2]) -> PortWire {
        let ends = ends.map(|end| json!({"end": end, "endpoint": 1, "host": "a"}));
        serde_json::from_value(json!({
            "id": id, "vni": id, "mtu": 1500, "state": "connected", "path": "collapsed", "ends": ends,
        }))
        .unwrap()
    }

    fn switch(name: &str, config: &str) -> ComponentObject {
        serde_json::from_value(json!({
            "id": 1, "name": name, "kind": "switch", "ports": [], "host": "a", "site": "a", "config": config,
            "lineage": 0, "generation": 1, "ownership": "here", "last_move": null,
        }))
        .unwrap()
    }

    #[test]
    fn a_trace_follows_wires_through_components_and_passes_each_once() {
        let wires = [
            wire(1, ["web:eth0", "s:p1"]),
            wire(2, ["t:p1", "s:p2"]),
            wire(3, ["s:p3", "t:p2"]),
            wire(4, ["u:p1", "v:p1"]),
        ];
        let hops = trace(&"web".parse().unwrap(), &wires);
        let said: Vec<_> = hops.iter().map(|hop| (hop.distance, hop.from.as_str(), hop.to.as_str())).collect();
        assert_eq!(said, [(1, "web:eth0", "s:p1"), (2, "s:p2", "t:p1"), (2, "s:p3", "t:p2")]);
    }

    #[test]
    fn an_interface_that_its_vm_wires_itself_is_a_hop_too() {
        let vm: Vm = serde_json::from_value(json!({
            "id": 1, "name": "web", "host": "a", "site": "a",
            "spec": { "memory": 1 << 27, "nics": [
                {"mac": "02:00:00:00:00:01", "component": "lan"}, {"mac": "02:00:00:00:00:02"},
                {"mac": "02:00:00:00:00:03", "component": "out", "mtu": 1400}, {"mac": "02:00:00:00:00:04", "component": "gone"},
            ]},
            "run": "running", "ownership": "here", "lineage": 0, "generation": 1, "mv": null,
        }))
        .unwrap();
        let components: Vec<Component> = serde_json::from_value(json!([
            {"name": "lan", "kind": {"switch": {"bridge": "br0"}}},
            {"name": "out", "kind": {"gateway": {"host": "edge", "bridge": "br1"}}},
        ]))
        .unwrap();
        let hops = straight(&vm, &components);
        let said: Vec<_> = hops.iter().map(|h| (h.from.as_str(), h.to.as_str(), h.path.as_str(), h.mtu)).collect();
        let lan = ("web:eth0", "lan, bridge br0", "collapsed", 1500);
        assert_eq!(said, [lan, ("web:eth2", "out, bridge br1", "tunnel", 1400)]);
        assert_eq!(hops[1].hosts.each_ref().map(Name::as_str), ["a", "edge"]);
    }

    #[test]
    fn an_address_that_two_interfaces_have_is_found_however_it_is_written() {
        let vm = |name: &str, macs: &[&str]| -> Vm {
            let nics: Vec<_> = macs.iter().map(|mac| json!({ "mac": mac })).collect();
            serde_json::from_value(json!({
                "id": 1, "name": name, "host": "a", "site": "a", "spec": { "memory": 1 << 27, "nics": nics },
                "run": "running", "ownership": "here", "lineage": 0, "generation": 1, "mv": null,
            }))
            .unwrap()
        };
        let vms = [vm("web", &["02:00:00:00:00:0a", "02:00:00:00:00:01"]), vm("db", &["02:00:00:00:00:0A"])];
        let found = check(&vms, &[], &[]);
        assert!(found.len() == 1 && found[0].kind == "address" && found[0].message.contains("web and db"), "{found:?}");
        assert_eq!(check(&vms[..1], &[], &[]), []);
    }

    #[test]
    fn a_circle_of_switches_is_found_unless_they_speak_spanning_tree() {
        let wires = [wire(1, ["s:p1", "t:p1"]), wire(2, ["t:p2", "u:p1"]), wire(3, ["u:p2", "s:p2"])];
        let three = |config: &str| ["s", "t", "u"].map(|name| switch(name, config));
        let found = check(&[], &three(""), &wires);
        assert!(found.len() == 1 && found[0].kind == "loop" && found[0].message.contains("wire 3"), "{found:?}");
        for config in ["stp = true\n", "stp=true", "vlan_filtering = true\nstp  =  true # so\n"] {
            assert_eq!(check(&[], &three(config), &wires), [], "{config}");
        }
        assert_eq!(check(&[], &three("# stp = true\n"), &wires).len(), 1);
        // A firewall between two of them, if it is a bridge.
        let mut mixed = three("");
        (mixed[1].kind, mixed[1].config) = (ComponentKind::Firewall, "mode = \"bridged\"\n".into());
        assert_eq!(check(&[], &mixed, &wires).len(), 1);
        mixed[1].config = String::new();
        assert_eq!(check(&[], &mixed, &wires), []);
        assert_eq!(check(&[], &three(""), &wires[..2]), []);
    }

    #[test]
    fn a_switch_between_wires_of_different_sizes_is_found() {
        let mut wires = [wire(1, ["web:eth0", "s:p1"]), wire(2, ["s:p2", "db:eth0"])];
        let components = [switch("s", "")];
        assert_eq!(check(&[], &components, &wires), []);
        wires[1].mtu = 1450;
        let found = check(&[], &components, &wires);
        assert!(
            found.len() == 1 && found[0].kind == "mtu" && found[0].message.contains("s:p2 takes 1450"),
            "{found:?}"
        );
    }
}
