//! The file that a component's user owns: TOML, read whole or refused with the line that is wrong.
//!
//! ```toml
//! # A routed firewall.
//! mode = "routed"
//! rules = """
//! table inet filter {
//!   chain forward {
//!     type filter hook forward priority filter; policy drop;
//!     ct state established,related accept
//!     iifname "p1" tcp dport 443 accept
//!   }
//! }
//! """
//! [[port]]
//! number = 1
//! addresses = ["10.0.0.1/24"]
//! mtu = 1450
//! [[port]]
//! number = 2
//! addresses = ["10.1.0.1/24"]
//! [[route]]
//! to = "0.0.0.0/0"
//! via = "10.1.0.254"
//! ```
//!
//! Nothing of it is believed about the host: it names no file, and no interface but the component's own, except a gateway's
//! `outside`, which an admin of the deployment gives.

use godwit_net::{PortVlans, Prefix};
use serde::{Deserialize, Serialize};
use std::net::IpAddr;
use toml::Spanned;

/// The longest file: a ruleset of some thousand rules. It travels with each move, in one message.
pub const LONGEST_CONFIG: usize = 256 << 10;
/// Routes in one file: more than that want a routing daemon, in a VM.
pub const MOST_ROUTES: usize = 1024;
/// Ports of a component: two bytes of an interface's name, and a bridge's limit is far off.
pub const MOST_PORTS: u8 = 64;
/// The least MTU that IPv4 knows.
const LEAST_MTU: u16 = 576;
const ETHERNET_MTU: u16 = 1500;
/// The largest: taps and tunnels take no more.
const MOST_MTU: u16 = 9000;

/// What a component is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// The kernel's bridge.
    Switch,
    /// The kernel's routing.
    Router,
    /// A bridge or a router that lets through what its rules say.
    Firewall,
    /// A router, one port of which is an interface of the host's outside network.
    Gateway,
}

/// What is wrong with a file, and where.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// It is no TOML, or has a key that there is not.
    #[error("{0}")]
    Form(String),
    /// A value makes no sense.
    #[error("line {line}: {why}")]
    Value {
        /// Counted from 1.
        line: usize,
        /// What, and what would do.
        why: String,
    },
    /// It is too long.
    #[error("{0} bytes are more than the {LONGEST_CONFIG} that a component's configuration may have")]
    TooLong(usize),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    vlan_filtering: Option<Spanned<bool>>,
    #[serde(default)]
    stp: Option<Spanned<bool>>,
    #[serde(default)]
    mode: Option<Spanned<Mode>>,
    #[serde(default)]
    default: Option<Spanned<Default>>,
    #[serde(default)]
    rules: Option<Spanned<String>>,
    #[serde(default)]
    outside: Option<Spanned<OutsideFile>>,
    #[serde(default)]
    port: Vec<Spanned<PortFile>>,
    #[serde(default)]
    route: Vec<Spanned<RouteFile>>,
}

/// How a firewall stands between its ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Mode {
    Bridged,
    Routed,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Default {
    Drop,
    Accept,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct OutsideFile {
    bridge: Option<String>,
    device: Option<String>,
    #[serde(default)]
    addresses: Vec<Prefix>,
    mtu: Option<u16>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PortFile {
    number: u8,
    #[serde(default)]
    addresses: Vec<Prefix>,
    mtu: Option<u16>,
    untagged: Option<u16>,
    #[serde(default)]
    tagged: Vec<u16>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RouteFile {
    to: Prefix,
    via: Option<IpAddr>,
    port: Option<u8>,
}

/// What stands between the ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Between {
    /// A bridge.
    Bridge,
    /// The kernel's routing.
    Routing,
}

/// What a gateway's outside port is an interface of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Network {
    /// The host's bridge of this name: the port becomes one of its ports.
    Bridge(String),
    /// The network behind the host's interface of this name: the port is a macvlan on it.
    Device(String),
}

/// A gateway's outside port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outside {
    /// What it is an interface of.
    pub network: Network,
    /// Its addresses.
    pub addresses: Vec<Prefix>,
    /// Bytes.
    pub mtu: u16,
}

/// A port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Port {
    /// Counted from 1; its interface inside is called `p` and this.
    pub number: u8,
    /// Its addresses, where there is routing.
    pub addresses: Vec<Prefix>,
    /// Bytes.
    pub mtu: u16,
    /// Its VLANs, where there is filtering.
    pub vlans: PortVlans,
}

/// A route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RouteTo {
    /// Where to.
    pub to: Prefix,
    /// Through whom.
    pub via: Option<IpAddr>,
    /// By which port.
    pub port: Option<u8>,
}

/// A ruleset, and where it stands in its file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rules {
    /// For `nft`.
    pub text: String,
    /// Lines of the file before its first.
    pub before: usize,
}

/// A file, read and found to make sense.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// What stands between its ports.
    pub between: Between,
    /// Every port, by number.
    pub ports: Vec<Port>,
    /// A bridge looks at VLAN tags.
    pub vlan_filtering: bool,
    /// A bridge speaks the spanning tree protocol.
    pub stp: bool,
    /// In no order: none leads to another's neighbour.
    pub routes: Vec<RouteTo>,
    /// A gateway's outside port.
    pub outside: Option<Outside>,
    /// What it lets through.
    pub rules: Option<Rules>,
    /// Whether there has to be a rule that drops what no other accepts.
    pub closed: bool,
}

impl Config {
    /// Reads a file for a component of this kind with so many ports. An empty one is good for each kind but a gateway.
    ///
    /// # Errors
    /// [`ConfigError`], with the line.
    pub fn read(text: &str, kind: Kind, ports: u8) -> Result<Self, ConfigError> {
        if text.len() > LONGEST_CONFIG {
            return Err(ConfigError::TooLong(text.len()));
        }
        let file: File = toml::from_str(text).map_err(|e| ConfigError::Form(e.to_string().trim_end().to_owned()))?;
        Reader { text, kind, ports }.read(file)
    }
}

struct Reader<'a> {
    text: &'a str,
    kind: Kind,
    ports: u8,
}

impl Reader<'_> {
    fn line<T>(&self, what: &Spanned<T>) -> usize {
        1 + self.text.bytes().take(what.span().start).filter(|b| *b == b'\n').count()
    }

    fn wrong<T>(&self, what: &Spanned<T>, why: impl Into<String>) -> ConfigError {
        ConfigError::Value { line: self.line(what), why: why.into() }
    }

    fn only<T>(&self, what: Option<&Spanned<T>>, key: &str, good: bool, whose: &str) -> Result<(), ConfigError> {
        match what {
            Some(what) if !good => Err(self.wrong(what, format!("`{key}` is for {whose}"))),
            _ => Ok(()),
        }
    }

    fn read(&self, file: File) -> Result<Config, ConfigError> {
        let kind = self.kind;
        let mode = file.mode.as_ref().map(|m| *m.get_ref());
        let between = match (kind, mode) {
            (Kind::Switch, _) | (Kind::Firewall, Some(Mode::Bridged)) => Between::Bridge,
            (Kind::Router | Kind::Gateway | Kind::Firewall, _) => Between::Routing,
        };
        let bridge = between == Between::Bridge;
        self.only(file.mode.as_ref(), "mode", kind == Kind::Firewall, "a firewall: `bridged` or `routed`")?;
        self.only(file.default.as_ref(), "default", kind == Kind::Firewall, "a firewall: `drop` or `accept`")?;
        self.only(file.vlan_filtering.as_ref(), "vlan_filtering", kind == Kind::Switch, "a switch")?;
        self.only(file.stp.as_ref(), "stp", bridge, "a switch, or a bridged firewall")?;
        self.only(file.rules.as_ref(), "rules", kind != Kind::Switch, "a router, a firewall or a gateway")?;
        self.only(file.outside.as_ref(), "outside", kind == Kind::Gateway, "a gateway")?;
        if kind == Kind::Gateway && file.outside.is_none() {
            let why = "a gateway needs `outside = { bridge = \"NAME\" }` or `{ device = \"NAME\" }`".into();
            return Err(ConfigError::Value { line: 1, why });
        }
        let vlan_filtering = file.vlan_filtering.is_some_and(|v| v.into_inner());
        let ports = self.read_ports(&file.port, bridge, vlan_filtering)?;
        let routes = self.read_routes(&file.route, bridge)?;
        let outside = file.outside.as_ref().map(|o| self.read_outside(o)).transpose()?;
        let rules = file.rules.as_ref().map(|r| self.read_rules(r)).transpose()?;
        let accepts = file.default.is_some_and(|d| d.into_inner() == Default::Accept);
        Ok(Config {
            between,
            ports,
            vlan_filtering,
            stp: file.stp.is_some_and(|s| s.into_inner()),
            routes,
            outside,
            rules,
            closed: kind == Kind::Firewall && !accepts,
        })
    }

    fn mtu<T>(&self, at: &Spanned<T>, mtu: Option<u16>) -> Result<u16, ConfigError> {
        match mtu.unwrap_or(ETHERNET_MTU) {
            mtu @ LEAST_MTU..=MOST_MTU => Ok(mtu),
            mtu => Err(self.wrong(at, format!("`mtu = {mtu}`: {LEAST_MTU} to {MOST_MTU} bytes do"))),
        }
    }

    fn read_ports(&self, given: &[Spanned<PortFile>], bridge: bool, filtering: bool) -> Result<Vec<Port>, ConfigError> {
        let plain = |number| Port {
            number,
            addresses: vec![],
            mtu: ETHERNET_MTU,
            vlans: PortVlans { untagged: filtering.then_some(1), tagged: vec![] },
        };
        let mut ports: Vec<Port> = (1..=self.ports).map(plain).collect();
        let mut seen = vec![];
        for spanned in given {
            let port = spanned.get_ref();
            let number = port.number;
            let Some(into) = ports.iter_mut().find(|p| p.number == number) else {
                return Err(self.wrong(spanned, format!("there is no port {number}: it has {}, from 1", self.ports)));
            };
            if seen.contains(&number) {
                return Err(self.wrong(spanned, format!("port {number} is described twice")));
            }
            seen.push(number);
            if bridge && !port.addresses.is_empty() {
                return Err(
                    self.wrong(spanned, "a bridge's port has no address; a router's or a routed firewall's has")
                );
            }
            let tagged = port.untagged.is_some() || !port.tagged.is_empty();
            if tagged && !filtering {
                return Err(self.wrong(spanned, "VLANs are looked at with `vlan_filtering = true`"));
            }
            if let Some(bad) = port.tagged.iter().chain(&port.untagged).find(|vlan| !(1..=4094).contains(*vlan)) {
                return Err(self.wrong(spanned, format!("VLAN {bad}: they are numbered from 1 to 4094")));
            }
            if tagged {
                into.vlans = PortVlans { untagged: port.untagged, tagged: port.tagged.clone() };
            }
            into.addresses.clone_from(&port.addresses);
            into.mtu = self.mtu(spanned, port.mtu)?;
        }
        Ok(ports)
    }

    fn read_routes(&self, given: &[Spanned<RouteFile>], bridge: bool) -> Result<Vec<RouteTo>, ConfigError> {
        let mut routes: Vec<RouteTo> = vec![];
        for spanned in given {
            let RouteFile { to, via, port } = *spanned.get_ref();
            let why = if bridge {
                Some("a bridge has no routes".into())
            } else if routes.len() == MOST_ROUTES {
                Some(format!("more than {MOST_ROUTES} routes"))
            } else if via.is_none() && port.is_none() {
                Some("a route needs `via`, `port` or both".into())
            } else if port.is_some_and(|port| !(1..=self.ports).contains(&port)) {
                Some(format!("there is no port {}: it has {}, from 1", port.unwrap_or(0), self.ports))
            } else if via.is_some_and(|via| via.is_ipv4() != to.ip.is_ipv4()) {
                Some("`to` and `via` are of two families".into())
            } else if routes.iter().any(|r| r.to.network() == to.network()) {
                Some(format!("there are two routes to {}", to.network()))
            } else {
                None
            };
            if let Some(why) = why {
                return Err(self.wrong(spanned, why));
            }
            routes.push(RouteTo { to, via, port });
        }
        Ok(routes)
    }

    fn read_outside(&self, spanned: &Spanned<OutsideFile>) -> Result<Outside, ConfigError> {
        let given = spanned.get_ref();
        let network = match (&given.bridge, &given.device) {
            (Some(bridge), None) => Network::Bridge(bridge.clone()),
            (None, Some(device)) => Network::Device(device.clone()),
            _ => return Err(self.wrong(spanned, "name either a `bridge` or a `device` of the host")),
        };
        let (Network::Bridge(name) | Network::Device(name)) = &network;
        let good = (1..=15).contains(&name.len())
            && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
            && !matches!(name.as_str(), "." | "..");
        if !good {
            return Err(self.wrong(spanned, format!("`{name}` is no interface's name")));
        }
        Ok(Outside { network, addresses: given.addresses.clone(), mtu: self.mtu(spanned, given.mtu)? })
    }

    fn read_rules(&self, spanned: &Spanned<String>) -> Result<Rules, ConfigError> {
        let text = spanned.get_ref();
        let line = self.line(spanned);
        let raw = self.text.get(spanned.span()).unwrap_or_default();
        // A text of several lines begins on the line after its quotes, if that is where its writer began.
        let skipped = ["\"\"\"\n", "\"\"\"\r\n", "'''\n", "'''\r\n"].iter().any(|q| raw.starts_with(q));
        let before = line - usize::from(!skipped);
        // `nft` would read a file of the host, and say what is wrong with it. The word is refused wherever it stands, also
        // in a comment: no second reader of the language has to agree with nft's own about where comments end.
        if let Some(at) = text.lines().position(mentions_include) {
            let why = "`include` reads files of the host: write the rules here (the word may stand nowhere)".into();
            return Err(ConfigError::Value { line: before + at + 1, why });
        }
        Ok(Rules { text: text.clone(), before })
    }
}

fn mentions_include(line: &str) -> bool {
    line.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').any(|word| word == "include")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wrong(text: &str, kind: Kind) -> String {
        Config::read(text, kind, 2).expect_err(text).to_string()
    }

    #[test]
    fn a_switch_needs_no_file() {
        let config = Config::read("", Kind::Switch, 3).expect("is good");
        assert_eq!((config.between, config.ports.len(), config.closed), (Between::Bridge, 3, false));
        assert!(Config::read("", Kind::Firewall, 2).expect("is good").closed);
    }

    #[test]
    fn what_makes_no_sense_is_refused_with_its_line() {
        for (text, kind, says) in [
            ("stp = true\nports = 3", Kind::Switch, "line 2"),
            ("\n\nmode = \"bridged\"", Kind::Switch, "line 3: `mode` is for a firewall"),
            ("\n[[port]]\nnumber = 3", Kind::Switch, "line 2: there is no port 3"),
            ("[[port]]\nnumber = 1\n[[port]]\nnumber = 1", Kind::Switch, "line 3: port 1 is described twice"),
            ("[[port]]\nnumber = 1\naddresses = [\"10.0.0.1\"]", Kind::Router, "line 3"),
            ("[[port]]\nnumber = 1\naddresses = [\"10.0.0.1/8\"]", Kind::Switch, "a bridge's port has no address"),
            ("[[port]]\nnumber = 1\ntagged = [5]", Kind::Switch, "vlan_filtering"),
            ("[[port]]\nnumber = 1\nmtu = 20", Kind::Switch, "`mtu = 20`"),
            ("[[route]]\nto = \"10.0.0.0/8\"", Kind::Router, "needs `via`"),
            ("[[route]]\nto = \"10.0.0.0/8\"\nvia = \"::1\"", Kind::Router, "two families"),
            ("", Kind::Gateway, "a gateway needs `outside"),
            ("outside = { bridge = \"a b\" }", Kind::Gateway, "no interface's name"),
            ("outside = { bridge = \"a\", device = \"b\" }", Kind::Gateway, "either a `bridge` or"),
        ] {
            let said = wrong(text, kind);
            assert!(said.contains(says), "{text}: {said}");
        }
    }

    #[test]
    fn rules_know_their_lines_in_the_file_and_never_read_another_file() {
        let read = |text| Config::read(text, Kind::Firewall, 2);
        let rules =
            read("# mine\nrules = \"\"\"\ntable inet f {\n}\n\"\"\"\n").expect("is good").rules.expect("are there");
        assert_eq!((rules.text.as_str(), rules.before), ("table inet f {\n}\n", 2));
        assert_eq!(read("rules = \"add table inet f\"").expect("is good").rules.expect("are there").before, 0);
        for text in [
            "rules = \"\"\"\n\ninclude \\\"/etc/shadow\\\"\n\"\"\"",
            "rules = \"\"\"\n\n add table x;include '/x' \"\"\"",
        ] {
            assert!(wrong(text, Kind::Firewall).starts_with("line 3: `include`"), "{}", wrong(text, Kind::Firewall));
        }
    }
}
