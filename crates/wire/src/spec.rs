//! What travels in the API: who an endpoint is and what it is wired to.

use godwit_net::MacAddr;
use serde::{Deserialize, Serialize};
use std::net::IpAddr;

/// An endpoint's number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct EndpointId(pub u64);

/// A wire's number in the control plane: 32 bits, as in VirtualWire, section 3.2.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct WireId(pub u32);

/// A VXLAN network identifier: 24 bits, unique among the wires of either host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Vni(pub u32);

/// IANA's UDP port for VXLAN.
pub const DEFAULT_PORT: u16 = 4789;

const fn default_port() -> u16 {
    DEFAULT_PORT
}

/// When in a VM's history something was ordered: by lineage, then by generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Sequence {
    /// Which claim of ownership.
    pub lineage: u64,
    /// Which owner within it.
    pub generation: u64,
}

/// What a wire leads to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub enum Component {
    /// A bridge of this name on the VM's own host.
    Switch {
        /// Its interface name.
        bridge: String,
    },
    /// A bridge on another host; when that is this very host, the wire collapses to a plain port (section 3.2).
    Gateway {
        /// The gateway's underlay address.
        host: IpAddr,
        /// The bridge's name there.
        bridge: String,
        /// The wire.
        wire: WireId,
        /// Its VXLAN identifier.
        vni: Vni,
        /// The tunnel's UDP port.
        #[serde(default = "default_port")]
        port: u16,
    },
    /// None. It stays in the pen until a wire between ports takes it ([`crate::Wires::lay`]).
    Nowhere,
}

/// An endpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EndpointSpec {
    /// Its number.
    pub id: EndpointId,
    /// The tap's name; begins with the prefix given to [`crate::Wires::new`].
    pub tap: String,
    /// The guest's address.
    pub mac: MacAddr,
    /// Bytes. Tunnels' packets are cut where the underlay's is less than this and 50 (IPv4) or 70 (IPv6).
    pub mtu: u16,
    /// What it is wired to.
    pub component: Component,
    /// The guest's IP addresses, if known.
    #[serde(default)]
    pub ips: Vec<IpAddr>,
}

/// A wire between two ports, as it is to be on one host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortWire {
    /// The wire.
    pub wire: WireId,
    /// Its tunnel's number, the same on both hosts.
    pub vni: Vni,
    /// The tunnel's UDP port.
    pub port: u16,
    /// Bytes.
    pub mtu: u16,
    /// The devices of the ends that are open here: taps, or host's sides of veth pairs. Both: the wire is collapsed.
    pub devices: Vec<String>,
    /// Where frames go besides, and come from. None: there is no tunnel.
    pub remotes: Vec<IpAddr>,
}

/// A wire's end at the gateway.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GatewayPort {
    /// The wire.
    pub wire: WireId,
    /// Its VXLAN identifier.
    pub vni: Vni,
    /// The tunnel's UDP port.
    #[serde(default = "default_port")]
    pub port: u16,
    /// The bridge that it is a port of.
    pub bridge: String,
    /// Bytes.
    pub mtu: u16,
}
