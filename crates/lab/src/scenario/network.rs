//! The user's own network in a scenario: components, the interfaces of guests that are ports, wires between them, extenders, and what
//! flows over them.
//!
//! What stands here is what `godwit component create`, `godwit vm create --nic`, `godwit wire connect` and `godwit extender connect` are told.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::net::Ipv4Addr;
use toml::Spanned;

/// Most ports of a component, as Godwit has it.
pub const MAX_PORTS: u8 = 64;
/// Largest `per_s` of a flow.
pub const MAX_FLOW_PER_S: u32 = 1000;
/// Most interfaces of a guest besides `eth0`.
pub const MAX_NICS: usize = 7;

/// A component that Godwit makes.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Component {
    /// Its name; no VM has it.
    pub name: Spanned<String>,
    /// `switch`, `router`, `firewall` or `gateway`.
    pub kind: Spanned<String>,
    /// Where it is at first.
    pub site: Spanned<String>,
    /// How many ports it has: `p1`, `p2`, ...
    pub ports: Spanned<u8>,
    /// Its file, as `docs/components.md` describes it.
    #[serde(default)]
    pub config: String,
}

/// The kinds of components.
pub const KINDS: [&str; 4] = ["switch", "router", "firewall", "gateway"];

/// An interface of a guest that is a port.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Nic {
    /// Its address with the length of its prefix: `"10.20.1.2/24"`.
    pub address: Spanned<String>,
    /// What it is called, in the guest and as a port; `eth1`, `eth2`, ... if not said.
    #[serde(default)]
    pub name: Option<Spanned<String>>,
    /// Bytes; the same as of the port that it is wired to.
    #[serde(default = "ethernet")]
    pub mtu: u16,
}

const fn ethernet() -> u16 {
    1500
}

impl Nic {
    /// Its name, as the `index`-th of a guest's `nic`.
    #[must_use]
    pub fn port(&self, index: usize) -> String {
        self.name.as_ref().map_or_else(|| format!("eth{}", index + 1), |name| name.get_ref().clone())
    }

    /// Its address; none where that is no address.
    #[must_use]
    pub fn ip(&self) -> Option<Ipv4Addr> {
        let (ip, length) = self.address.get_ref().split_once('/')?;
        let length: u8 = length.parse().ok()?;
        ip.parse().ok().filter(|_| (1..=32).contains(&length))
    }
}

/// Where a route leads, and by whom; none where that is not how routes are written.
#[must_use]
pub fn route(text: &str) -> Option<(&str, Ipv4Addr)> {
    let (to, via) = text.split_once(" via ")?;
    let (network, length) = to.split_once('/')?;
    let fine = network.parse::<Ipv4Addr>().is_ok() && length.parse::<u8>().is_ok_and(|length| length <= 32);
    via.parse().ok().filter(|_| fine).map(|via| (to, via))
}

/// A wire.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Wire {
    /// Its two ends, each `OBJECT:PORT`.
    pub ends: Spanned<[String; 2]>,
}

/// An extender: frames of wires between the two sites go through an encrypted tunnel, and never in clear.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Extender {
    /// The two sites.
    pub between: Spanned<[String; 2]>,
}

/// Numbers that go at a steady pace from inside a component to a guest's echo port and back.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Flow {
    /// The component in whose namespace it begins.
    pub from: Spanned<String>,
    /// The guest's interface that it goes to: `OBJECT:PORT`, one of its `nic`.
    pub to: Spanned<String>,
    /// As single datagrams, or over one session.
    pub kind: FlowKind,
    /// How many a second.
    pub per_s: Spanned<u32>,
}

/// What a [`Flow`] is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FlowKind {
    /// Datagrams: one that is lost is not sent again.
    Udp,
    /// One TCP session.
    Tcp,
}

impl fmt::Display for FlowKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Udp => "udp",
            Self::Tcp => "tcp",
        })
    }
}

/// An end of a wire.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct End {
    /// A guest or a component.
    pub object: String,
    /// One of its ports.
    pub port: String,
}

impl End {
    /// The end of that text; none where it is not in two parts.
    #[must_use]
    pub fn of(text: &str) -> Option<Self> {
        let (object, port) = text.split_once(':')?;
        (!object.is_empty() && !port.is_empty()).then(|| Self { object: object.into(), port: port.into() })
    }
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("{}:{}", self.object, self.port))
    }
}
