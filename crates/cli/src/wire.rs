//! `godwit wire`: what joins VMs' interfaces and components' ports.

use crate::args::WireCommand;
use crate::failure::Failure;
use crate::table::{NOTHING, Table, printable};
use crate::user::User;
use godwit_api::public::Wire;
use godwit_api::wire::{ConnectWire, PortWire, WireEnd, WirePath, WireState};
use serde::Serialize;

/// A wire of either kind.
#[derive(Serialize)]
#[serde(untagged)]
enum Any {
    ToComponent(Wire),
    BetweenPorts(Box<PortWire>),
}

/// Does what was asked.
///
/// # Errors
/// The controller's, or that there is no such wire.
pub async fn run(user: &User, command: WireCommand) -> Result<(), Failure> {
    let api = user.api();
    match command {
        WireCommand::Connect { a, b } => user.print(&api.connect_wire(&ConnectWire { a, b }).await?, |wire| {
            let waits = "; not all hosts know it yet, and it is tried again";
            let waits = if wire.state == WireState::Connecting { waits } else { "" };
            format!("wire {}{waits}\n", wire.id)
        }),
        WireCommand::Disconnect { a, b } => {
            let wire = api.port_wires().await?.into_iter().find(|wire| joins(wire, &a, &b));
            let wire =
                wire.ok_or_else(|| Failure::usage(format!("no wire joins {a} and {b}; see `godwit wire ls`")))?;
            Ok(api.disconnect_wire(wire.id).await?)
        }
        WireCommand::Ls => {
            let mut all: Vec<Any> = api.wires().await?.into_iter().map(Any::ToComponent).collect();
            all.extend(api.port_wires().await?.into_iter().map(|wire| Any::BetweenPorts(Box::new(wire))));
            user.print(&all, |all| table(all))
        }
        WireCommand::Show { wire } => {
            let id = match wire.parse::<u32>() {
                Ok(id) => id,
                Err(_) => {
                    let end: WireEnd = wire.parse().map_err(|e| Failure::usage(format!("{e}")))?;
                    let has = |wire: &PortWire| wire.ends.iter().any(|placed| placed.end == end);
                    let found = api.port_wires().await?.into_iter().find(has);
                    found.ok_or_else(|| Failure::usage(format!("{end} is not wired; see `godwit wire ls`")))?.id
                }
            };
            user.print(&api.port_wire(id).await?, shown)
        }
    }
}

fn joins(wire: &PortWire, a: &WireEnd, b: &WireEnd) -> bool {
    let [x, y] = &wire.ends;
    (&x.end == a && &y.end == b) || (&x.end == b && &y.end == a)
}

fn state(wire: &PortWire) -> &'static str {
    match wire.state {
        WireState::Connecting => "connecting",
        WireState::Connected => "connected",
        WireState::Disconnecting => "disconnecting",
    }
}

fn path(wire: &PortWire) -> String {
    crate::extender::path(wire).unwrap_or_else(|| match wire.path {
        WirePath::Collapsed => "collapsed".into(),
        WirePath::Tunnel => "tunnel".into(),
    })
}

fn table(all: &[Any]) -> String {
    let mut table = Table::new(&[">ID", "A", "B", "HOST A", "HOST B", "STATE", "PATH"]);
    for wire in all {
        table.row(match wire {
            Any::ToComponent(w) => [
                w.id.to_string(),
                format!("{}:{}", w.vm, w.nic),
                w.component.to_string(),
                w.host.to_string(),
                NOTHING.into(),
                NOTHING.into(),
                NOTHING.into(),
            ],
            Any::BetweenPorts(w) => [
                w.id.to_string(),
                w.ends[0].end.to_string(),
                w.ends[1].end.to_string(),
                w.ends[0].host.to_string(),
                w.ends[1].host.to_string(),
                state(w).into(),
                path(w),
            ],
        });
    }
    table.lines()
}

fn shown(wire: &PortWire) -> String {
    let mut out = format!("wire     {:08x} ({}), {}, {}\n", wire.id, wire.id, state(wire), path(wire));
    out += &format!("tunnel   VNI {}\nmtu      {}\n", wire.vni, wire.mtu);
    for placed in &wire.ends {
        let said = match &placed.local {
            None => "which says nothing of it".to_owned(),
            Some(local) => {
                let open = if local.open { "frames pass" } else { "isolated" };
                let to: Vec<String> = local.remotes.iter().map(ToString::to_string).collect();
                let to = if to.is_empty() { "to this host alone".into() } else { format!("to {}", to.join(" and ")) };
                let untold: Vec<&str> = local.untold.iter().map(godwit_api::Name::as_str).collect();
                let untold =
                    if untold.is_empty() { String::new() } else { format!(", not heard yet by {}", untold.join(", ")) };
                format!("{open}, {to}{untold}")
            }
        };
        out += &printable(&format!("end      {} on {}: {said}", placed.end, placed.host));
        out.push('\n');
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_wire_is_found_by_its_ends_in_either_order_and_shows_where_it_leads() {
        let end = |name: &str, host: &str, endpoint: u32| json!({"end": name, "endpoint": endpoint, "host": host});
        let wire: PortWire = serde_json::from_value(json!({
            "id": 258, "vni": 258, "mtu": 1500, "state": "connected", "path": "tunnel",
            "ends": [end("web:eth0", "maine", 1), end("db:eth1", "ohio", 2)],
        }))
        .unwrap();
        let [a, b, c] = ["web:eth0", "db:eth1", "db:eth0"].map(|text| text.parse().unwrap());
        assert!(joins(&wire, &a, &b) && joins(&wire, &b, &a) && !joins(&wire, &a, &c));
        let text = shown(&wire);
        assert!(text.contains("00000102 (258), connected, tunnel") && text.contains("db:eth1 on ohio"), "{text}");
        let text = table(&[Any::BetweenPorts(Box::new(wire))]);
        assert!(text.contains("web:eth0") && text.contains("collapsed") != text.contains("tunnel"), "{text}");
    }
}
