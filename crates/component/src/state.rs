//! What moves with a component besides its file.

use godwit_net::MacAddr;
use godwit_net::conntrack::Flow;
use serde::{Deserialize, Serialize};

/// An address that a switch has learnt.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Station {
    /// Behind which port.
    pub port: u8,
    /// The address.
    pub mac: MacAddr,
    /// In which VLAN, where it looks at them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vlan: Option<u16>,
}

/// A component's state at the moment when its ports were isolated.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    /// The bridge's table.
    pub stations: Vec<Station>,
    /// The tracked connections.
    pub flows: Vec<Flow>,
}

/// How much of a [`State`] was taken over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Loaded {
    /// Addresses.
    pub stations: usize,
    /// Connections.
    pub flows: usize,
}
