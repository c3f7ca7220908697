//! Wires as objects: each joins two ports, whole at layer 2, and follows them wherever their objects move (VirtualWire, section 3).
//!
//! An *end* is `OBJECT:PORT`. The object is a VM or a component, by its name; the port is one of its own: a VM's interfaces are
//! `eth0`, `eth1`, ... in order, unless they are named in its specification, and a component's are as it defines them (`p1`, ...).
//!
//! Each port has a number for ever, its *endpoint* number, from the same row as wires'. On whichever host it is, its device is
//! called `gwt` and that number: a VM's tap, or the host's side of the veth pair whose other side is a port in a component's own
//! namespace. A wire treats both alike: what is not wired is a port of the pen, and what is, one of the wire's own bridge.
//!
//! # Where the ends are
//!
//! The nodes say so to each other, as [`EndView`]s: the latest one of an end counts, whoever relays it, and what makes it believed is
//! in it. The controller says how a wire begins ([`WireOrder`]), and what it knows later, in the same form; it is not needed for a move.

use crate::host::PeerHost;
use crate::name::Name;
use godwit_trust::SignedCapability;
use godwit_units::{Generation, Lineage};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

/// The longest name of a port: what the kernel takes for an interface.
pub const LONGEST_PORT_NAME: usize = 15;

/// A port's name: 1 to [`LONGEST_PORT_NAME`] of `a-z`, `0-9`, `-` and `.`, beginning with a letter or a digit. It can be an
/// interface's name, in a component's namespace.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct PortName(String);

/// Why a text names no port, or no end.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotAnEnd {
    /// The port's name does not do.
    #[error(
        "`{0}` is no port: use 1 to {LONGEST_PORT_NAME} letters a-z, digits, `-` and `.`, beginning with a letter or a digit"
    )]
    Port(String),
    /// It is not in two parts.
    #[error("`{0}` is no end of a wire: write OBJECT:PORT, such as web:eth0 or sw1:p1")]
    Parts(String),
    /// The object's name does not do.
    #[error(transparent)]
    Object(#[from] crate::name::NotAName),
}

impl PortName {
    /// The text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// What a VM's interface is called that has no name of its own.
    #[must_use]
    pub fn of_nic(index: usize) -> Self {
        Self(format!("eth{index}"))
    }
}

impl FromStr for PortName {
    type Err = NotAnEnd;

    fn from_str(text: &str) -> Result<Self, NotAnEnd> {
        let first = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
        let good = (1..=LONGEST_PORT_NAME).contains(&text.len())
            && text.starts_with(first)
            && text.chars().all(|c| first(c) || matches!(c, '-' | '.'));
        // What was refused is quoted, so it must not be of any length.
        if good { Ok(Self(text.to_owned())) } else { Err(NotAnEnd::Port(text.chars().take(80).collect())) }
    }
}

impl TryFrom<String> for PortName {
    type Error = NotAnEnd;

    fn try_from(text: String) -> Result<Self, NotAnEnd> {
        text.parse()
    }
}

impl From<PortName> for String {
    fn from(port: PortName) -> Self {
        port.0
    }
}

impl fmt::Display for PortName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

impl JsonSchema for PortName {
    fn schema_name() -> Cow<'static, str> {
        "PortName".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "type": "string",
            "description": "A port of a VM or of a component: eth0, p1.",
            "minLength": 1,
            "maxLength": LONGEST_PORT_NAME,
            "pattern": "^[a-z0-9][a-z0-9.-]*$",
        })
    }
}

/// A wire's end, written `OBJECT:PORT`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct WireEnd {
    /// The VM or component.
    pub object: Name,
    /// Its port.
    pub port: PortName,
}

impl FromStr for WireEnd {
    type Err = NotAnEnd;

    fn from_str(text: &str) -> Result<Self, NotAnEnd> {
        let parts = text.split_once(':').ok_or_else(|| NotAnEnd::Parts(text.chars().take(80).collect()))?;
        Ok(Self { object: parts.0.parse()?, port: parts.1.parse()? })
    }
}

impl TryFrom<String> for WireEnd {
    type Error = NotAnEnd;

    fn try_from(text: String) -> Result<Self, NotAnEnd> {
        text.parse()
    }
}

impl From<WireEnd> for String {
    fn from(end: WireEnd) -> Self {
        end.to_string()
    }
}

impl fmt::Display for WireEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("{}:{}", self.object, self.port))
    }
}

impl JsonSchema for WireEnd {
    fn schema_name() -> Cow<'static, str> {
        "WireEnd".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "type": "string",
            "description": "A wire's end: a VM or a component, and its port.",
            "pattern": "^[a-z]([a-z0-9-]{0,46}[a-z0-9])?:[a-z0-9][a-z0-9.-]{0,14}$",
            "examples": ["web:eth0"],
        })
    }
}

/// Joins two ports by a wire of their own.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ConnectWire {
    /// One of the ends.
    pub a: WireEnd,
    /// The other one.
    pub b: WireEnd,
}

/// Changes wires all at once: whatever of it does not fit, nothing of it is done.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Rewire {
    /// Wires to be made. Their ports are free, or those of wires that `disconnect` names: such a one gives way to the new one at once.
    #[serde(default)]
    #[schemars(length(max = MOST_REWIRED))]
    pub connect: Vec<ConnectWire>,
    /// Wires to be taken away, by their numbers.
    #[serde(default)]
    #[schemars(length(max = MOST_REWIRED))]
    pub disconnect: Vec<u32>,
    /// Two objects that no wire joins: else it is refused, since somebody else was first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unless_joined: Option<[Name; 2]>,
}

/// Wires that are made, or taken away, at once: of a component all.
pub const MOST_REWIRED: usize = 64;

/// A wire between two ports, as people see it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PortWire {
    /// Its number, for ever.
    pub id: u32,
    /// Its tunnel's number between any two hosts, 24 bits: no other wire has it meanwhile.
    pub vni: u32,
    /// What its interfaces carry, bytes.
    pub mtu: u16,
    /// Whether all hosts know of it.
    pub state: WireState,
    /// How frames go.
    pub path: WirePath,
    /// The extender that carries them, where the tunnel leads to another site that has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub extender: Option<crate::extender::Carried>,
    /// Its two ends.
    pub ends: [PlacedEnd; 2],
}

/// An end, and where it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PlacedEnd {
    /// Which.
    pub end: WireEnd,
    /// Its endpoint number.
    pub endpoint: u32,
    /// The host that owns it.
    pub host: Name,
    /// That host's word on the wire; none where it was not asked, or cannot be reached.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub local: Option<EndWord>,
}

/// What a host says of an end that it owns.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct EndWord {
    /// Whether frames pass; not so while its VM is off.
    pub open: bool,
    /// The hosts that frames for the other end go to, by their addresses. None: it is on this host, too.
    #[schemars(schema_with = "crate::patterns::ips")]
    pub remotes: Vec<IpAddr>,
    /// Hosts that have not answered yet that they know where the ends are.
    pub untold: Vec<Name>,
}

/// How far a wire has got.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum WireState {
    /// Not all hosts of its ends could be told of it yet.
    Connecting,
    /// They have been.
    Connected,
    /// It is being taken away, until every host has forgotten it.
    Disconnecting,
}

/// How a wire's frames go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum WirePath {
    /// Both ends are on one host: from port to port.
    Collapsed,
    /// From host to host.
    Tunnel,
}

/// Controller to node: a wire, and where its ends are as far as is known. What the nodes know of a later time stays.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct WireOrder {
    /// Its number, for ever.
    pub id: u32,
    /// Its tunnel's number between any two hosts.
    pub vni: u32,
    /// What its interfaces carry, bytes.
    pub mtu: u16,
    /// Its two ends.
    pub ends: [OrderedEnd; 2],
}

/// An end, as a node has to know it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct OrderedEnd {
    /// Its endpoint number: that of its device, and of what capabilities are for.
    pub endpoint: u32,
    /// What people call it, for logs.
    pub name: WireEnd,
    /// The guest's address, to announce it by. A component has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<String>,
    /// The guest's addresses, if they are known.
    #[serde(default)]
    #[schemars(schema_with = "crate::patterns::ips")]
    pub ips: Vec<IpAddr>,
    /// Where it is.
    pub view: EndView,
}

/// Where an end is, as somebody knows it. Of two, the one of the later owner counts; of one owner's, that of the later step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct EndView {
    /// Its owner's host.
    pub host: PeerHost,
    /// Its owner's.
    pub lineage: Lineage,
    /// Its owner's.
    pub generation: Generation,
    /// Counts what that owner says of where it goes.
    #[serde(default)]
    pub step: u32,
    /// Where it is about to go: until that is decided, frames for it go to both hosts, and one of the two takes them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub coming: Option<Coming>,
    /// What shows that this host is that owner, where it came by a move.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>")]
    pub capability: Option<SignedCapability>,
}

/// Where an end is about to go.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Coming {
    /// The host.
    pub host: PeerHost,
    /// What shows that it may.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>")]
    pub capability: Option<SignedCapability>,
}

/// A wire as a node has it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct LocalWire {
    /// As it was ordered, with the ends where the node believes them.
    pub wire: WireOrder,
    /// The ends that are here and open: frames pass.
    pub open: Vec<u32>,
    /// Where frames for the other end go.
    #[schemars(schema_with = "crate::patterns::ips")]
    pub remotes: Vec<IpAddr>,
    /// Hosts that have not answered yet that they know all this.
    #[serde(default)]
    pub untold: Vec<Name>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_is_an_object_and_a_port_and_reads_back_as_written() {
        for good in ["web:eth0", "sw1:p1", "a:0", "fw-1:lan.5"] {
            assert_eq!(good.parse::<WireEnd>().map(|end| end.to_string()), Ok(good.to_owned()));
        }
        for bad in [
            "",
            "web",
            "web:",
            ":eth0",
            "web:eth0:1",
            "Web:eth0",
            "web:../x",
            "web:.",
            "web:abcdefghijklmnop",
            "web:eth 0",
        ] {
            assert!(bad.parse::<WireEnd>().is_err(), "{bad}");
        }
        assert_eq!(PortName::of_nic(3).to_string().parse(), Ok(PortName::of_nic(3)));
    }
}
