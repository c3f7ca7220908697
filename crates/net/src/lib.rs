//! Taps, bridges and tunnels, by netlink, in the network namespace of the thread that calls.
//!
//! Every operation is idempotent where its name says `ensure` or `remove`, because a restarted node repeats what it did.
//! What can go wrong: the name is taken by a device of another kind, rights are missing (CAP_NET_ADMIN), an operator
//! removed a device meanwhile. Errors name the operation, the object and the kernel's answer.

pub mod conntrack;
mod error;
mod frame;
mod inside;
mod mac;
mod marked;
mod net;
mod netns;
mod packet;
mod steer;
mod tap;

pub use error::NetError;
pub use frame::{Frame, arp_reply_from, arp_request, gratuitous_arp, rarp, source_of, unsolicited_neighbour};
pub use inside::{BridgeKind, Learnt, PortVlans, Prefix, Route, VethEnd};
pub use mac::{BadMac, MacAddr};
pub use marked::marked;
pub use net::{Fdb, Kind, Link, LinkIndex, Net, Vxlan};
pub use netns::NetNs;
pub use packet::PacketSocket;
pub use steer::{Leads, NextHop, Steer, Steered, Steering};
pub use tap::ensure_tap;
