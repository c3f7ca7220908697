//! `godwit extender`: encrypted tunnels between sites.

use crate::failure::Failure;
use crate::table::{NOTHING, Table, printable};
use crate::user::User;
use clap::Subcommand;
use godwit_api::extender::{
    ConnectExtender, DisconnectExtender, Extender, ExtenderEnd, ExtenderOffer, ExtenderState, ExtenderTunnel, LocalWay,
};
use godwit_api::wire::PortWire;
use godwit_api::{Name, Problem, PublicClient};
use serde::Deserialize;
use std::net::SocketAddr;
use std::str::FromStr;
use std::time::{SystemTime, UNIX_EPOCH};

/// The port of a host that only speaks first: nobody has to know it.
const ANY_PORT: u16 = 51820;

#[derive(Debug, Subcommand)]
pub enum ExtenderCommand {
    /// Join two sites: wires between their hosts are encrypted from now on
    Connect {
        /// One of the sites
        a: Name,
        /// The other one
        b: Name,
    },
    /// Part two sites
    Disconnect {
        /// One of the sites
        a: Name,
        /// The other one
        b: Name,
        /// Also while wires join them, whose frames then cross the underlay in clear
        #[arg(long)]
        clear: bool,
    },
    /// Make new keys now, and go over to them without losing a frame; that is done every day by itself
    Rotate {
        /// One of the sites
        a: Name,
        /// The other one
        b: Name,
    },
    /// List extenders
    Ls,
    /// Show the extender of two sites: its tunnels, as both ends have them, and which way frames take
    Show {
        /// One of the sites
        a: Name,
        /// The other one
        b: Name,
    },
}

/// Where a host that carries is reached: an address and the first of its UDP ports, or `outbound`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub enum ExtenderAt {
    /// By other sites, here.
    Address(SocketAddr),
    /// By nobody: it speaks first.
    Outbound,
}

impl FromStr for ExtenderAt {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "outbound" {
            return Ok(Self::Outbound);
        }
        let bad = |why: &str| format!("`{text}`: {why}; write IP:PORT such as 192.0.2.1:51820, or outbound");
        let at: SocketAddr = text.parse().map_err(|_| bad("neither an address with a port, nor `outbound`"))?;
        if at.port() == 0 || at.port() > u16::MAX - godwit_api::extender::PORTS {
            return Err(bad("16 ports from this one on are needed"));
        }
        if at.ip().is_unspecified() || at.ip().is_multicast() {
            return Err(bad("other sites cannot send to this address"));
        }
        Ok(Self::Address(at))
    }
}

impl TryFrom<String> for ExtenderAt {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl ExtenderAt {
    /// What the node offers.
    pub const fn offer(self) -> ExtenderOffer {
        match self {
            Self::Address(at) => ExtenderOffer { address: Some(at.ip()), port: at.port() },
            Self::Outbound => ExtenderOffer { address: None, port: ANY_PORT },
        }
    }
}

/// Does what was asked.
///
/// # Errors
/// The controller's.
pub async fn run(user: &User, command: ExtenderCommand) -> Result<(), Failure> {
    let api = user.api();
    match command {
        ExtenderCommand::Connect { a, b } => {
            user.print(&api.connect_extender(&ConnectExtender { a, b }).await?, |made| {
                let waits = "; not all hosts know it yet, and it is tried again";
                let waits = if made.state == ExtenderState::Connecting { waits } else { "" };
                format!("extender {}: {} tunnels{waits}\n", made.id, made.tunnels.len())
            })
        }
        ExtenderCommand::Disconnect { a, b, clear } => {
            Ok(api.disconnect_extender(&a, &b, DisconnectExtender { clear }).await?)
        }
        ExtenderCommand::Rotate { a, b } => user.print(&api.rotate_extender(&a, &b).await?, |_| String::new()),
        ExtenderCommand::Ls => user.print(&api.extenders().await?, |all| table(all)),
        ExtenderCommand::Show { a, b } => user.print(&api.extender(&a, &b).await?, shown),
    }
}

const fn state(extender: &Extender) -> &'static str {
    match extender.state {
        ExtenderState::Connecting => "connecting",
        ExtenderState::Connected => "connected",
        ExtenderState::Disconnecting => "disconnecting",
    }
}

const fn up(is: bool) -> &'static str {
    if is { "up" } else { "DOWN" }
}

fn table(all: &[Extender]) -> String {
    let mut table = Table::new(&[">ID", "A", "B", "CARRIED AT A", "CARRIED AT B", ">TUNNELS", "STATE", ""]);
    for extender in all {
        let [a, b] = &extender.sites;
        let carriers = extender.carriers.each_ref().map(|hosts| names(hosts));
        let [at_a, at_b] = carriers;
        let tunnels = extender.tunnels.len().to_string();
        let (state, up) = (state(extender).to_owned(), up(extender.up).to_owned());
        table.row([extender.id.to_string(), a.to_string(), b.to_string(), at_a, at_b, tunnels, state, up]);
    }
    table.lines()
}

fn names(hosts: &[Name]) -> String {
    if hosts.is_empty() { NOTHING.into() } else { hosts.iter().map(Name::as_str).collect::<Vec<_>>().join(", ") }
}

fn shown(extender: &Extender) -> String {
    let [a, b] = &extender.sites;
    let mut out = format!("extender {} of {a} and {b}: {}, {}\n\n", extender.id, state(extender), up(extender.up));
    let mut table = Table::new(&[
        ">TUNNEL",
        ">EPOCH",
        "HOST",
        "REACHED AT",
        "",
        "IN USE",
        "HEARD FROM",
        "KEYS AGREED",
        ">RECEIVED",
        ">SENT",
        ">RTT",
        "BY",
    ]);
    for tunnel in &extender.tunnels {
        tunnel.ends.iter().for_each(|end| table.row(row(tunnel, end)));
    }
    out += &table.lines();
    out.push('\n');
    for way in &extender.ways {
        let since = way.since_unix_s.map_or_else(String::new, |at| format!(", since {}", ago(at)));
        let changes = match way.changes {
            0 => String::new(),
            1 => ", after one change".to_owned(),
            n => format!(", after {n} changes"),
        };
        let silent = if way.good { "" } else { ", of which nothing is heard" };
        out += &format!("frames of {} go {}{since}{changes}{silent}\n", way.host, leads(way.way.as_ref()));
    }
    for problem in &extender.problems {
        out += &format!("{}\n", printable(problem));
    }
    out
}

/// Where a way leads.
pub fn leads(way: Option<&LocalWay>) -> String {
    match way {
        Some(LocalWay::Tunnel(id)) => format!("into tunnel {id}"),
        Some(LocalWay::Carrier(host)) => format!("to {host}, which carries"),
        None => "nowhere".into(),
    }
}

fn row(tunnel: &ExtenderTunnel, end: &ExtenderEnd) -> Vec<String> {
    let or = |text: Option<String>| text.unwrap_or_else(|| NOTHING.into());
    let local = end.local.as_ref();
    vec![
        tunnel.id.to_string(),
        tunnel.epoch.to_string(),
        end.host.to_string(),
        end.endpoint.map_or_else(|| "speaks first".into(), |at| at.to_string()),
        local.map_or("unknown", |local| up(local.up)).to_owned(),
        or(local.map(|local| if local.in_use { "yes" } else { "no" }.to_owned())),
        or(local.and_then(|local| local.endpoint).map(|at| at.to_string())),
        or(local.and_then(|local| local.handshake_unix_s).map(ago)),
        or(local.map(|local| local.received.to_string())),
        or(local.map(|local| local.sent.to_string())),
        or(local.and_then(|local| local.rtt_ms).map(|ms| format!("{ms:.1} ms"))),
        or(local.map(|local| local.engine.clone()).filter(|engine| !engine.is_empty())),
    ]
}

fn ago(unix_s: u64) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    format!("{} s ago", now.saturating_sub(unix_s))
}

/// How a wire between two sites goes, if an extender carries it.
pub fn path(wire: &PortWire) -> Option<String> {
    let carried = wire.extender.as_ref()?;
    let [a, b] = &carried.sites;
    Some(if carried.up { format!("extender {a} to {b}") } else { format!("extender {a} to {b}, DOWN") })
}

/// As [`findings`], asked for. Extenders are the deployment's: to whoever is confined to a domain they do not exist.
///
/// # Errors
/// The controller's.
pub async fn check(api: &PublicClient) -> Result<Vec<(&'static str, String)>, Failure> {
    let extenders = match api.extenders().await {
        Err(error) if error.problem == Problem::Forbidden => vec![],
        answer => answer?,
    };
    // After the extenders: that has had the hosts asked.
    Ok(findings(&extenders, &api.port_wires().await?))
}

/// What is wrong with extenders, and with wires for their sake; for `godwit net check`.
fn findings(extenders: &[Extender], wires: &[PortWire]) -> Vec<(&'static str, String)> {
    let mut found = vec![];
    for extender in extenders {
        let [a, b] = &extender.sites;
        if !extender.up && extender.state != ExtenderState::Disconnecting {
            found.push((
                "extender",
                format!("no tunnel between `{a}` and `{b}` is up: what is sent there is lost, and never goes in clear"),
            ));
        }
        found.extend(extender.problems.iter().map(|problem| ("extender", format!("`{a}` and `{b}`: {problem}"))));
    }
    for wire in wires {
        if let Some(carried) = wire.extender.as_ref().filter(|carried| !carried.up) {
            let ([x, y], [a, b]) = (&wire.ends, &carried.sites);
            let what = format!("wire {} from {} to {} needs the extender of `{a}` and `{b}`", wire.id, x.end, y.end);
            found.push((
                "wire",
                format!("{what}, which is not known to work at both its ends: `godwit extender show {a} {b}`"),
            ));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn where_a_host_is_reached_is_an_address_with_room_for_its_ports_or_outbound() {
        assert_eq!("outbound".parse(), Ok(ExtenderAt::Outbound));
        let at: ExtenderAt = "192.0.2.1:51820".parse().unwrap();
        assert_eq!(at.offer().address, Some("192.0.2.1".parse().unwrap()));
        for bad in
            ["", "192.0.2.1", "192.0.2.1:0", "192.0.2.1:65530", "0.0.0.0:51820", "host:1", "Outbound", "224.0.0.1:5"]
        {
            let said = bad.parse::<ExtenderAt>().unwrap_err();
            assert!(said.contains("write IP:PORT"), "{said}");
        }
    }

    #[test]
    fn a_dead_extender_and_the_wires_that_need_it_are_found() {
        let extender = |up: bool| -> Extender {
            serde_json::from_value(json!({
                "id": 1, "sites": ["east", "west"], "state": "connected", "up": up, "problems": [],
                "carriers": [["e"], ["w"]], "tunnels": [], "ways": [], "keys_unix_s": 0,
            }))
            .unwrap()
        };
        let wire = |up: bool| -> PortWire {
            let ends = ["web:eth0", "db:eth0"].map(|end| json!({"end": end, "endpoint": 1, "host": "a"}));
            serde_json::from_value(json!({
                "id": 7, "vni": 7, "mtu": 1500, "state": "connected", "path": "tunnel", "ends": ends,
                "extender": {"sites": ["east", "west"], "up": up},
            }))
            .unwrap()
        };
        assert_eq!(findings(&[extender(true)], &[wire(true)]), []);
        let found = findings(&[extender(false)], &[wire(false)]);
        assert_eq!(found.iter().map(|(kind, _)| *kind).collect::<Vec<_>>(), ["extender", "wire"]);
        assert_eq!(path(&wire(false)).unwrap(), "extender east to west, DOWN");
    }
}
