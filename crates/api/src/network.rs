//! What hosts find wrong with their part of the network: `godwit net check`.

use crate::name::Name;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Of what kind a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum NetKind {
    /// An interface that belongs to no record.
    Interface,
    /// A namespace that belongs to no record.
    Namespace,
    /// A forwarding entry that leads elsewhere than its wire, or is missing.
    Forwarding,
    /// The host of a wire's other end does not answer on the link.
    Neighbour,
    /// A device carries less, or more, than its wire.
    Mtu,
    /// What hosts know of a wire does not fit together.
    Wire,
    /// A host cannot be asked.
    Host,
}

impl std::fmt::Display for NetKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Self::Interface => "interface",
            Self::Namespace => "namespace",
            Self::Forwarding => "forwarding",
            Self::Neighbour => "neighbour",
            Self::Mtu => "mtu",
            Self::Wire => "wire",
            Self::Host => "host",
        })
    }
}

/// Something that is wrong on a host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct NetFinding {
    /// Of what kind.
    pub kind: NetKind,
    /// What, and what to do.
    pub message: String,
}

/// The same, and where.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct HostFinding {
    /// On which host.
    pub host: Name,
    /// What.
    #[serde(flatten)]
    pub finding: NetFinding,
}
