//! Extenders: encrypted tunnels between pairs of sites, which wires between hosts of the two sites take by themselves (VirtualWire,
//! section 3.2).
//!
//! The operator connects two sites; that is all. Hosts say whether they can *carry* ([`ExtenderOffer`]); up to [`MOST_CARRIERS`] of a site do,
//! and each has a *tunnel* to each carrier of the other site. The controller gives out numbers, addresses and public keys, again and
//! again ([`ExtenderOrders`]); which tunnel frames take the nodes decide by themselves, and go on when nobody tells them anything.
//!
//! Private keys never leave their host. A tunnel keeps its keys for ever: to rotate them there is another tunnel beside it, of a
//! later *epoch*, and when frames have gone over to that, the old one goes.

use crate::host::PeerHost;
use crate::name::Name;
use godwit_units::Bytes;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

/// Hosts of a site that carry the same extender.
pub const MOST_CARRIERS: usize = 2;
/// UDP ports that a host gives to tunnels, from the one it names on.
pub const PORTS: u16 = 16;
/// Hosts of a site whose frames an extender carries: a bound for what a node believes.
pub const MOST_HOSTS: usize = 4096;

/// That a host can carry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ExtenderOffer {
    /// Where other sites reach its tunnels; none: it can only speak first, as from behind an address translation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "crate::patterns::ip_or_null")]
    pub address: Option<IpAddr>,
    /// The first of [`PORTS`] UDP ports.
    pub port: u16,
}

/// Joins two sites.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ConnectExtender {
    /// One of the sites.
    pub a: Name,
    /// The other one.
    pub b: Name,
}

/// Parts two sites again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DisconnectExtender {
    /// Also while wires join the two sites: their frames cross the underlay in clear from then on.
    #[serde(default)]
    pub clear: bool,
}

/// An extender, as people see it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Extender {
    /// Its number, for ever.
    pub id: u32,
    /// The sites.
    pub sites: [Name; 2],
    /// Whether all hosts know of it.
    pub state: ExtenderState,
    /// Whether some tunnel is up, as both its ends say, or the one that could be asked.
    pub up: bool,
    /// What is wrong, each with what to do.
    pub problems: Vec<String>,
    /// The hosts of either site that carry, the preferred first.
    pub carriers: [Vec<Name>; 2],
    /// Its tunnels.
    pub tunnels: Vec<ExtenderTunnel>,
    /// Which way the hosts' frames take, of those that answered.
    pub ways: Vec<HostWay>,
    /// When the newest keys were made, seconds since 1970.
    pub keys_unix_s: u64,
}

/// How far an extender has got.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ExtenderState {
    /// Not all hosts of both sites could be told of it yet.
    Connecting,
    /// They have been.
    Connected,
    /// It is being taken away, until every host has forgotten it.
    Disconnecting,
}

/// A tunnel.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ExtenderTunnel {
    /// Its number, for ever.
    pub id: u32,
    /// Counts those between the same two hosts; the highest has the newest keys.
    pub epoch: u32,
    /// Its ends, in the sites' order.
    pub ends: [ExtenderEnd; 2],
}

/// A tunnel's end.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ExtenderEnd {
    /// Its host.
    pub host: Name,
    /// Where it is reached; none: it speaks first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "crate::patterns::socket_or_null")]
    pub endpoint: Option<SocketAddr>,
    /// What the host says of it; none while it cannot be asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub local: Option<LocalTunnel>,
}

/// Which way a host's frames take.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct HostWay {
    /// The host.
    pub host: Name,
    /// Which way; none: nowhere.
    pub way: Option<LocalWay>,
    /// Whether that is known to work.
    pub good: bool,
    /// Since when they take it, seconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since_unix_s: Option<u64>,
    /// How often they have gone over to another one since the host's node started.
    #[serde(default)]
    pub changes: u64,
}

/// Controller to node: all that it has to know of extenders. What is not in it any more ends.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ExtenderOrders {
    /// Hosts whose frames need no extender, by their addresses: of the node's own site, and of sites that it has none with.
    pub clear: Vec<Ipv4Addr>,
    /// Those of the node's site.
    pub extenders: Vec<ExtenderOrder>,
}

/// One of them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ExtenderOrder {
    /// Its number.
    pub id: u32,
    /// The other site.
    pub site: Name,
    /// That site's hosts, by their addresses.
    pub beyond: Vec<Ipv4Addr>,
    /// This site's hosts.
    pub mates: Vec<PeerHost>,
    /// Those of this site's hosts that carry, the preferred first.
    pub carriers: Vec<PeerHost>,
    /// The tunnels that end at this host.
    pub tunnels: Vec<TunnelOrder>,
}

/// A tunnel, from one end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TunnelOrder {
    /// Its number.
    pub id: u32,
    /// Counts those between the same two hosts.
    pub epoch: u32,
    /// The other end's host.
    pub peer: Name,
    /// That host's place among the other site's carriers.
    pub rank: u32,
    /// The UDP port here; none: any.
    pub listen: Option<u16>,
    /// Where the other end is reached; none: it speaks first.
    #[schemars(schema_with = "crate::patterns::socket_or_null")]
    pub endpoint: Option<SocketAddr>,
    /// The other end's public key, once it has made one.
    pub key: Option<String>,
    /// Addresses for probes, of this end and of the other.
    pub addresses: [Ipv4Addr; 2],
}

/// What a node has of extenders.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct LocalExtenders {
    /// Each.
    pub extenders: Vec<LocalExtender>,
}

/// An extender, as one host of its sites has it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct LocalExtender {
    /// Its number.
    pub id: u32,
    /// Which way this host's frames take; none: nowhere.
    pub way: Option<LocalWay>,
    /// Whether that is known to work.
    pub good: bool,
    /// Since when they take it, seconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since_unix_s: Option<u64>,
    /// How often they have gone over to another one since the node started.
    #[serde(default)]
    pub changes: u64,
    /// What is wrong here, with what to do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// The tunnels that end here.
    pub tunnels: Vec<LocalTunnel>,
}

/// Which way frames take.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum LocalWay {
    /// Into this tunnel, which ends at the host.
    Tunnel(u32),
    /// To this host of the same site, which carries.
    Carrier(Name),
}

/// A tunnel, as the host of one end has it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct LocalTunnel {
    /// Its number.
    pub id: u32,
    /// This end's public key.
    pub key: String,
    /// Its interface.
    pub device: String,
    /// Whether the other end has answered lately.
    pub up: bool,
    /// Whether frames are sent into it.
    pub in_use: bool,
    /// Who does the work: `kernel`, or the program's name.
    pub engine: String,
    /// Where the other end was heard.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "crate::patterns::socket_or_null")]
    pub endpoint: Option<SocketAddr>,
    /// When the two ends agreed on keys last, seconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub handshake_unix_s: Option<u64>,
    /// Received since its device was made, or since it was silent last.
    pub received: Bytes,
    /// Sent since then.
    pub sent: Bytes,
    /// There and back, as it was measured last, milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rtt_ms: Option<f64>,
    /// What is wrong with it, with what to do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// A wire that an extender carries.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Carried {
    /// The sites.
    pub sites: [Name; 2],
    /// Whether the hosts of both ends have a way that is known to work.
    pub up: bool,
}
