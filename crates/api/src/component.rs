//! Network components as objects: switches, routers, firewalls and gateways that a user makes, configures by a file, wires up and
//! moves (VirtualWire, sections 3.1 and 3.5).
//!
//! They are at `/v1/components/objects`; what is at `/v1/components` are bridges that an operator has made known. A component's ports
//! are `p1`, `p2`, ..., and a wire ends at one of them as at a VM's ([`crate::wire`]). Components' numbers are of one row with VMs':
//! a capability for the one is never one for the other.

use crate::host::{Ownership, PeerHost};
use crate::name::Name;
use crate::progress::Outcome;
use crate::wire::PortName;
use godwit_trust::SignedCapability;
use godwit_units::{Generation, Lineage, MoveId, VmId};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What a component is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ComponentKind {
    /// A bridge; VLANs and spanning tree if wanted.
    Switch,
    /// Addresses and routes.
    Router,
    /// A bridge or a router that lets through what its rules say, and what belongs to that.
    Firewall,
    /// A router, one port of which is an interface of its host's outside network.
    Gateway,
}

impl std::fmt::Display for ComponentKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Self::Switch => "switch",
            Self::Router => "router",
            Self::Firewall => "firewall",
            Self::Gateway => "gateway",
        })
    }
}

/// Makes a component.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateComponent {
    /// Its name. No VM and no other component may have it.
    pub name: Name,
    /// What it is.
    pub kind: ComponentKind,
    /// How many ports it has, for ever.
    #[schemars(range(min = 1, max = 64))]
    pub ports: u8,
    /// A host, or a site: its first host that answers.
    pub at: Name,
    /// Its file, in TOML. Empty: what a component of its kind does without one.
    #[serde(default)]
    pub config: String,
}

/// Gives a component another file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ApplyConfig {
    /// The file, in TOML.
    pub config: String,
}

/// Moves a component.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct MoveComponent {
    /// A host, or a site: its first host that answers.
    pub to: Name,
}

/// Takes a component for another host, because those that may own it are lost for good.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ClaimComponent {
    /// A host, or a site: its first host that answers.
    pub at: Name,
    /// How the lost hosts are kept from running it: powered off, cut from the network. Kept in the record and the log.
    #[schemars(regex(pattern = r"^\s*\S[\s\S]{6,}\S\s*$"))]
    pub fenced: String,
}

/// A component.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ComponentObject {
    /// Its number.
    pub id: VmId,
    /// Its name.
    pub name: Name,
    /// What it is.
    pub kind: ComponentKind,
    /// Its ports.
    pub ports: Vec<ComponentPort>,
    /// The host that owns it, as last heard.
    pub host: Name,
    /// That host's site.
    pub site: Name,
    /// Its file.
    pub config: String,
    /// Its lineage.
    pub lineage: Lineage,
    /// Its generation.
    pub generation: Generation,
    /// What its host says of it; none while that cannot be reached.
    pub ownership: Option<Ownership>,
    /// The move that it takes part in, or did last.
    pub last_move: Option<ComponentMove>,
}

/// A component's port.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ComponentPort {
    /// Its name.
    pub name: PortName,
    /// Its endpoint number: its device on the host is called `gwt` and this.
    pub endpoint: u32,
}

/// A component's move.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ComponentMove {
    /// Its number.
    pub id: MoveId,
    /// The host that it leaves.
    pub from: Name,
    /// The host that it goes to.
    pub to: Name,
    /// How it stands.
    pub outcome: Outcome,
    /// For how long its ports were isolated on both hosts, milliseconds, as the source saw it.
    #[serde(default)]
    pub isolated_ms: Option<f64>,
    /// Addresses of its table that went along.
    #[serde(default)]
    pub stations: usize,
    /// Tracked connections that went along.
    #[serde(default)]
    pub flows: usize,
    /// Why it failed, or waits.
    #[serde(default)]
    pub error: Option<String>,
}

/// What a node needs to know of a component.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ComponentDefinition {
    /// Its number, for ever.
    pub id: VmId,
    /// Its name.
    pub name: Name,
    /// What it is.
    pub kind: ComponentKind,
    /// Its ports' endpoint numbers, the first port's first.
    pub endpoints: Vec<u32>,
    /// Its file.
    #[serde(default)]
    pub config: String,
    /// The trust domain that it belongs to, if it does to one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub domain: Option<Name>,
}

impl ComponentDefinition {
    /// BLAKE3 of it, in a form that all versions write alike: what a capability to move it is for.
    #[must_use]
    pub fn digest(&self) -> [u8; 32] {
        let value = serde_json::to_value(self).expect("plain data has a JSON form");
        let mut hasher = blake3::Hasher::new();
        hasher.update(b"godwit component\n");
        hasher.update(&crate::canonical::bytes(&value));
        *hasher.finalize().as_bytes()
    }

    /// Its endpoints in rising order.
    #[must_use]
    pub fn sorted_endpoints(&self) -> Vec<u32> {
        let mut endpoints = self.endpoints.clone();
        endpoints.sort_unstable();
        endpoints
    }
}

/// Controller to node: the component is to go to another host. The same order may come again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ComponentOrder {
    /// The move's number.
    pub id: MoveId,
    /// Where to.
    pub to: PeerHost,
    /// What shows the other node that it was ordered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>")]
    pub capability: Option<SignedCapability>,
}

/// Controller to node: it takes the component, in a new lineage, with its file and nothing learnt. The same order may come again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClaimOrder {
    /// The component, with the newest file that is known.
    pub definition: ComponentDefinition,
    /// The hosts that may own it: a node that hears one of them refuses.
    pub lost: Vec<Name>,
    /// How they are kept from running it, and who vouches for it.
    pub fenced: String,
    /// The newest lineage that is known of: the claim begins the one after it.
    pub newest: Lineage,
}

/// Whether the network leads to a component: its host asks the hosts of the other ends of its wires when it has opened its ports.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum NetworkProof {
    /// They are being asked.
    Asking,
    /// Frames pass every wire there and back, as far as its other end is open.
    Proved,
    /// They do not: over which wire, and why.
    Unproved(String),
}

/// A component on a host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct LocalComponent {
    /// What it is.
    pub definition: ComponentDefinition,
    /// Whose it is.
    pub ownership: Ownership,
    /// As this host knows it.
    pub lineage: Lineage,
    /// As this host knows it.
    pub generation: Generation,
    /// The move that it left by, or is leaving by, as this host knows it since its node started.
    #[serde(default)]
    pub leaving: Option<ComponentMove>,
    /// Its ports' MTUs, bytes, by its file.
    #[serde(default)]
    pub mtus: Vec<u16>,
    /// Whether the network leads there; none before its ports were opened since its node started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub proof: Option<NetworkProof>,
}
