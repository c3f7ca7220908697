//! `godwit component split` and `merge`: one switch becomes two with a trunk between them, and two become one (VirtualWire, sections
//! 3.5 and 5.6). So frames between VMs of one site stay there.
//!
//! [`split`] and [`merge`] say from what there is which wires are to be made and which are to go; the controller does all of that or nothing
//! ([`Rewire`]). A switch more before it, or fewer after it, joins nobody: a command that was cut short is given again, and does what is left.
//!
//! # No loops
//!
//! Two switches are joined by one trunk: where there is one already none is added, nor where somebody else was first
//! ([`Rewire::unless_joined`]), and one that joins both to themselves goes at the end, when nothing else needs it. A wire that changes its switch is
//! taken from the one before it is given to the other, so it is never at both. What was wired to other switches in a circle before is a circle
//! afterwards: that is spanning tree's.

use crate::failure::{Code, Failure};
use godwit_api::component::{ComponentKind, ComponentObject, CreateComponent};
use godwit_api::wire::{ConnectWire, PortName, PortWire, Rewire, WireEnd, WireState};
use godwit_api::{Name, PublicClient};
use std::collections::{BTreeMap, BTreeSet};

/// A wire of a switch: its number, its port there, and its far end with the host that it is on.
struct Leg<'a> {
    wire: u32,
    port: &'a PortName,
    far: &'a WireEnd,
    host: &'a Name,
}

impl Leg<'_> {
    /// It takes its far end there.
    fn takes(&self, to: WireEnd, change: &mut Rewire) {
        change.disconnect.push(self.wire);
        change.connect.push(ConnectWire { a: self.far.clone(), b: to });
    }
}

fn legs<'a>(switch: &'a Name, wires: &'a [PortWire]) -> Vec<Leg<'a>> {
    // What is being taken away is nobody's to change.
    let stay = wires.iter().filter(|wire| wire.state != WireState::Disconnecting);
    let ends = stay.flat_map(|wire| [(wire, 0, 1), (wire, 1, 0)]);
    let mine = ends.filter(|(wire, here, _)| &wire.ends[*here].end.object == switch);
    mine.map(|(wire, here, there)| Leg {
        wire: wire.id,
        port: &wire.ends[here].end.port,
        far: &wire.ends[there].end,
        host: &wire.ends[there].host,
    })
    .collect()
}

fn at(switch: &ComponentObject, port: &PortName) -> WireEnd {
    WireEnd { object: switch.name.clone(), port: port.clone() }
}

/// The switch's ports that no wire has, nor is still being taken from.
fn free(switch: &ComponentObject, wires: &[PortWire]) -> BTreeSet<PortName> {
    let ends = wires.iter().flat_map(|wire| &wire.ends).map(|placed| &placed.end);
    let taken: BTreeSet<&PortName> = ends.filter(|end| end.object == switch.name).map(|end| &end.port).collect();
    switch.ports.iter().map(|port| port.name.clone()).filter(|port| !taken.contains(port)).collect()
}

/// The port of this name if it is free, or else any.
fn take(free: &mut BTreeSet<PortName>, wanted: &PortName) -> Option<PortName> {
    free.take(wanted).or_else(|| free.pop_first())
}

fn refuse(why: impl Into<String>) -> Failure {
    Failure::new(Code::Failed, why)
}

fn alike(a: &ComponentObject, b: &ComponentObject) -> Result<(), Failure> {
    for switch in [a, b] {
        if switch.kind != ComponentKind::Switch {
            return Err(refuse(format!("`{}` is a {}: switches alone are split and merged", switch.name, switch.kind)));
        }
    }
    if a.config != b.config {
        let why = format!("`{}` and `{}` have different files: give both the same one first", a.name, b.name);
        return Err(refuse(why));
    }
    Ok(())
}

/// What makes `part` serve whatever of the switch's wires ends at a host of `site`.
fn split(
    switch: &ComponentObject,
    part: &ComponentObject,
    wires: &[PortWire],
    site: &BTreeSet<Name>,
    trunk: Option<&PortName>,
) -> Result<Rewire, Failure> {
    alike(switch, part)?;
    let mut change = Rewire::default();
    let (mut here, mut there) = (free(switch, wires), free(part, wires));
    let legs = legs(&switch.name, wires);
    if !legs.iter().any(|leg| leg.far.object == part.name) {
        // By its number, not by its name.
        let last =
            || here.iter().filter(|p| there.contains(*p)).max_by_key(|p| (p.as_str().len(), p.as_str())).cloned();
        let port = trunk
            .cloned()
            .filter(|p| here.contains(p) && there.contains(p))
            .or_else(|| if trunk.is_some() { None } else { last() });
        let port = port.ok_or_else(|| {
            refuse(format!("no port is free on both `{}` and `{}` for the trunk between them", switch.name, part.name))
        })?;
        here.remove(&port);
        there.remove(&port);
        change.connect.push(ConnectWire { a: at(switch, &port), b: at(part, &port) });
        change.unless_joined = Some([switch.name.clone(), part.name.clone()]);
    }
    let others = legs.iter().filter(|leg| ![&switch.name, &part.name].contains(&&leg.far.object));
    for leg in others.filter(|leg| site.contains(leg.host)) {
        let port = take(&mut there, leg.port)
            .ok_or_else(|| refuse(format!("`{}` has not ports enough for what is at its site", part.name)))?;
        leg.takes(at(part, &port), &mut change);
    }
    Ok(change)
}

/// What leaves `from` without wires, and all of them with `into`.
fn merge(into: &ComponentObject, from: &ComponentObject, wires: &[PortWire]) -> Result<Rewire, Failure> {
    alike(into, from)?;
    let mut free = free(into, wires);
    let (trunks, others): (Vec<Leg<'_>>, Vec<Leg<'_>>) =
        legs(&from.name, wires).into_iter().partition(|leg| leg.far.object == into.name);
    let mut change = Rewire::default();
    for leg in others {
        if leg.far.object == from.name {
            let why = format!("`{}` is wired to itself at {}", from.name, leg.far);
            return Err(refuse(format!("{why}: `godwit wire disconnect {} {}` first", at(from, leg.port), leg.far)));
        }
        let port = take(&mut free, leg.port)
            .ok_or_else(|| refuse(format!("`{}` has not ports enough for the wires of `{}`", into.name, from.name)))?;
        leg.takes(at(into, &port), &mut change);
    }
    // They go last, as nothing takes their place: until then they carry what is still at the other.
    change.disconnect.extend(trunks.into_iter().map(|leg| leg.wire));
    Ok(change)
}

async fn carry_out(api: &PublicClient, change: &Rewire) -> Result<String, Failure> {
    if *change == Rewire::default() {
        return Ok(String::new());
    }
    let line = |wire: PortWire| {
        let later = if wire.state == WireState::Connected { "" } else { ", as soon as their hosts answer" };
        format!("{} is wired to {}{later}\n", wire.ends[0].end, wire.ends[1].end)
    };
    Ok(api.rewire(change).await?.into_iter().map(line).collect())
}

/// Splits a switch: a second one at `site` serves what is there. Gives what was done, in lines.
///
/// # Errors
/// The controller's; or what does not fit, before anything of the wires was changed.
pub async fn run_split(
    api: &PublicClient,
    name: &Name,
    site: &Name,
    part: Option<Name>,
    trunk: Option<&PortName>,
) -> Result<String, Failure> {
    let switch = api.component_object(name).await?;
    if &switch.site == site {
        return Err(refuse(format!("`{name}` is at `{site}` itself: name another site")));
    }
    let part = match part {
        Some(part) => part,
        None => format!("{name}-{site}").parse().map_err(|e| Failure::usage(format!("{e}; name it with --as")))?,
    };
    let made = match crate::component::find(api, &part).await? {
        Some(made) => made,
        None => {
            let ports = u8::try_from(switch.ports.len()).unwrap_or(u8::MAX);
            let (kind, config) = (switch.kind, switch.config.clone());
            if kind != ComponentKind::Switch {
                return Err(refuse(format!("`{name}` is a {kind}: switches alone are split")));
            }
            api.create_component(&CreateComponent { name: part, kind, ports, at: site.clone(), config }).await?
        }
    };
    let hosts: BTreeMap<Name, Name> = api.hosts().await?.into_iter().map(|h| (h.name, h.site)).collect();
    let there = hosts.into_iter().filter(|(_, s)| s == site).map(|(host, _)| host).collect();
    carry_out(api, &split(&switch, &made, &api.port_wires().await?, &there, trunk)?).await
}

/// Merges switches into one: their wires become its wires, and they go. Gives what was done, in lines.
///
/// # Errors
/// The controller's; or what does not fit, before anything was changed of the switch that it is about.
pub async fn run_merge(api: &PublicClient, into: &Name, others: &[Name]) -> Result<String, Failure> {
    let mut said = String::new();
    for name in others {
        if name == into {
            return Err(Failure::usage(format!("`{name}` cannot be merged into itself")));
        }
        let (into, from) = (api.component_object(into).await?, api.component_object(name).await?);
        said += &carry_out(api, &merge(&into, &from, &api.port_wires().await?)?).await?;
        api.delete_component(name).await?;
        said += &format!("`{name}` is part of `{}`\n", into.name);
    }
    Ok(said)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn switch(name: &str, ports: u32) -> ComponentObject {
        let ports: Vec<_> = (1..=ports).map(|n| json!({"name": format!("p{n}"), "endpoint": n})).collect();
        serde_json::from_value(json!({
            "id": 1, "name": name, "kind": "switch", "ports": ports, "host": "x", "site": "x", "config": "",
            "lineage": 0, "generation": 1, "ownership": "here", "last_move": null,
        }))
        .unwrap()
    }

    fn wire(id: u32, ends: [(&str, &str); 2]) -> PortWire {
        let ends = ends.map(|(end, host)| json!({"end": end, "endpoint": 1, "host": host}));
        serde_json::from_value(json!({
            "id": id, "vni": id, "mtu": 1500, "state": "connected", "path": "tunnel", "ends": ends,
        }))
        .unwrap()
    }

    fn new(a: &str, b: &str) -> ConnectWire {
        ConnectWire { a: a.parse().unwrap(), b: b.parse().unwrap() }
    }

    #[test]
    fn a_split_joins_by_one_trunk_and_takes_over_what_is_at_the_site_and_again_it_does_nothing() {
        let (whole, part) = (switch("sw", 12), switch("part", 12));
        let site = BTreeSet::from(["b".parse().unwrap()]);
        let mut wires = vec![wire(1, [("sw:p1", "a"), ("web:eth0", "b")]), wire(2, [("db:eth0", "a"), ("sw:p2", "a")])];
        let trunk = new("sw:p12", "part:p12");
        let joined = Some(["sw", "part"].map(|name| name.parse().unwrap()));
        let whole_change =
            Rewire { connect: vec![trunk, new("web:eth0", "part:p1")], disconnect: vec![1], unless_joined: joined };
        assert_eq!(split(&whole, &part, &wires, &site, None).unwrap(), whole_change);
        // Somebody has joined them.
        wires.push(wire(3, [("sw:p12", "a"), ("part:p12", "b")]));
        let rest = Rewire { connect: vec![new("web:eth0", "part:p1")], disconnect: vec![1], ..Rewire::default() };
        assert_eq!(split(&whole, &part, &wires, &site, None).unwrap(), rest);
        // Done, and the old wire is still being taken away somewhere.
        wires.push(wire(4, [("web:eth0", "b"), ("part:p1", "b")]));
        wires[0].state = WireState::Disconnecting;
        assert_eq!(split(&whole, &part, &wires, &site, None).unwrap(), Rewire::default());
        wires.push(wire(5, [("db:eth1", "b"), ("sw:p3", "a")]));
        let more = split(&whole, &part, &wires, &site, None).unwrap();
        assert_eq!(more.connect, [new("db:eth1", "part:p3")], "p1 is taken");
    }

    #[test]
    fn a_chain_is_merged_with_its_trunks_last_and_what_does_not_fit_is_refused_before() {
        let (first, second) = (switch("sw1", 3), switch("sw2", 3));
        let wires = [
            wire(1, [("sw1:p3", "a"), ("sw2:p3", "b")]),
            wire(2, [("sw2:p1", "b"), ("web:eth0", "b")]),
            wire(3, [("sw2:p2", "b"), ("sw3:p2", "c")]),
            wire(4, [("sw1:p1", "a"), ("db:eth0", "a")]),
        ];
        let refused = merge(&first, &second, &wires).unwrap_err();
        assert!(refused.message.contains("not ports enough"), "{refused}");
        let change = merge(&switch("sw1", 4), &second, &wires).unwrap();
        assert_eq!(change.connect, [new("web:eth0", "sw1:p2"), new("sw3:p2", "sw1:p4")]);
        assert_eq!((change.disconnect, change.unless_joined), (vec![2, 3, 1], None));
        let itself = [wire(1, [("sw2:p1", "b"), ("sw2:p2", "b")])];
        let refused = merge(&first, &second, &itself).unwrap_err();
        assert!(refused.message.contains("wired to itself"), "{refused}");
    }
}
