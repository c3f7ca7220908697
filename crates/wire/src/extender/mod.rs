//! Extenders: tunnels between sites, encrypted, that wires' frames take (VirtualWire, section 3.2).
//!
//! Up to two hosts of a site *carry* an extender, each with a tunnel of its own to each carrier of the other site: a WireGuard device,
//! the kernel's where it has such, else one that a program makes ([`Engine`]). VXLAN stays as it is, from host to host by their
//! underlay addresses; tables of routes that only its packets are sent to ([`Paths`]) lead those for the other site's hosts into a tunnel, or to
//! a host that carries, which passes them on. So wires know nothing of extenders, carriers nothing of wires, and a wire inside a site
//! never sees one.
//!
//! Which tunnel, and which carrier: [`Ways`]. Whether a tunnel carries: [`Prober`] asks the other end's kernel, through it.
//!
//! # Nothing goes in clear
//!
//! While a host has an extender, its table has a route for each host that it was told of, and for all others: nowhere. The route
//! to the other site is there twice in effect: when a tunnel's device goes with its program, what is left leads nowhere. Nobody has to be
//! alive for that. What others of the machine remove of tables and rules, the node sees within seconds, and lays again.
//!
//! # What can go wrong
//!
//! *The program dies*: its device goes with it; the node starts it anew, or does when it starts itself. *The node dies*: program, device and
//! routes stay, and frames go on. *The carrier is not a neighbour of a host of its site, but behind a router*: it cannot be given frames;
//! the host says so. *A carrier passes on packets of its site's hosts to the other site's, and nothing else* ([`rules`]): the other site's
//! extender is no way into this one's network.

mod device;
mod engine;
mod paths;
mod probe;
pub mod rules;
mod ways;

pub use device::{Peer, PeerState, PrivateKey, PublicKey, Tunnel, TunnelError};
pub use engine::Engine;
pub use paths::{Beyond, Hop, Laid, NoWay, Paths, forwards, interfaces, let_forward};
pub use probe::{Answered, Prober};
pub use ways::{PROBE_EVERY, Preference, SILENCE, STEADY, TunnelId, Way, Ways};

/// How the names of tunnels' devices begin. Eight hexadecimal digits follow, which the node draws: programs that stand in for the
/// kernel's WireGuard have sockets by these names in one folder of the machine, whatever its namespaces.
pub const PREFIX: &str = "gx";
/// What WireGuard adds to a packet, with IPv6 outside: 40 and 8 bytes, its header's 16, and 16 of the seal.
pub const OVERHEAD: u32 = 80;
