//! Network components: switches, routers, firewalls and gateways that a user wires up (VirtualWire, sections 3.1 and 3.5).
//!
//! Each is a network namespace of its own, and in it the kernel's implementation: a bridge, or routing, with an nftables ruleset
//! and connection tracking. Its ports `p1`, `p2`, ... are pairs of interfaces: one side is inside, the other, its *endpoint
//! device*, is on the host, where it is isolated until a wire takes it. It is configured by one file ([`Config`]), and by nothing else.
//!
//! [`Place`] makes, changes and removes components on this host. It remembers nothing: what is there is found in the kernel. Who may
//! have a component, and when, is decided elsewhere (`godwit_handoff`); a component has no RAM, and what moves with it is its file and
//! its [`State`]: the bridge's table and the tracked connections.
//!
//! # Who keeps the namespace
//!
//! A process that sleeps ([`holder`](self)). Not the daemon, because a component forwards on while the daemon is restarted or upgraded; not a file
//! on which the namespace is mounted, because the daemon's mounts are its own and go with it. Its tool is at hand:
//! `nsenter --net=/proc/PID/ns/net tcpdump -i p1`.
//!
//! # What can go wrong
//!
//! *A file that makes no sense to the kernel.* It is tried first in a namespace that is thrown away ([`Place::rehearse`]): rules,
//! routes, VLANs, all of it. What fails there has changed nothing.
//!
//! *A firewall that is open for a moment.* Rules are there before anything forwards, and are changed in one transaction. Connections
//! in the middle that are not in the table are no connections (`nf_conntrack_tcp_loose` is off): so one that was let through needs
//! its entry at the new place, and one that was made up has none.
//!
//! *Two at once.* The host's side of each port is isolated whenever this host is not sure to own the component; a component that is
//! staged forwards between isolated ports, which is nothing.
//!
//! *Rights.* To enter a namespace takes `CAP_SYS_ADMIN`, which the node's service does not have unless it is given
//! (`components.conf`).

#![forbid(unsafe_code)]
mod config;
mod holder;
mod place;
mod rules;
mod state;

pub use config::{
    Between, Config, ConfigError, Kind, LONGEST_CONFIG, MOST_PORTS, MOST_ROUTES, Network, Outside, Port, RouteTo, Rules,
};
pub use godwit_net::{MacAddr, NetNs};
pub use place::{ComponentError, Place, Spec};
pub use state::{Loaded, State, Station};
