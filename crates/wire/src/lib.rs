//! Endpoints, wires and components: a vNIC stays joined to its component wherever its VM runs (VirtualWire, section 3).
//!
//! An endpoint is *staged* at the destination long before the VM arrives, *activated* at the grant, and *isolated* at
//! the source when the vCPUs stop. [`Endpoint`] and [`Port`] are the machines that order the steps; [`Wires`] looks at
//! the kernel, asks them, and carries out what they say. Nothing is remembered but in the kernel, as the devices and
//! their aliases: a restarted node repeats its operations, and a host that lost its power has no devices either.
//!
//! # Isolation
//!
//! An isolated tap is a port of the *pen*: a bridge that is never up. The ports of such a bridge are disabled in both
//! directions and stay so when the tap's carrier comes and goes. That is why the alternatives fell: a port state
//! "disabled" on a live bridge is undone by the kernel when QEMU opens the tap; a tap without any bridge talks to the
//! host's own IP stack; and the `isolated` flag stops frames between isolated ports only. QEMU's tap stays up all along.
//!
//! # What can go wrong
//!
//! Two hosts may believe that they hold the VM's address: a [`Sequence`] on every activation and re-pointing makes the
//! later one win, and late messages lose. Announcements of a source must not follow its isolation, or switches turn back
//! to it: they are sent under a lock that isolation takes first.
//!
//! Anybody who knows a tunnel's number could speak on a wire: each end takes its packets from the other end's address only
//! (`guard.rs`), which needs `nft`. A host that was re-pointed away from is a stranger from then on.
//!
//! A guest may send frames of 1500 bytes where the underlay carries no more either: the tunnel's packets are cut on their
//! way in and put together on their way out. A packet that may not be cut is answered by the kernel with the size that
//! would fit, as by any router, so TCP adapts itself; an interface with `mtu = 1450` spares both.
//!
//! # Wires between ports
//!
//! A wire that joins two ports has a bridge of its own on each host, which learns nothing: with both ends here its ports are the two
//! devices (the wire is *collapsed*), else one device and a tunnel ([`Wires::lay`]). It carries all of layer 2: VLAN tags as they
//! are (a second tag has to fit into the MTU), and the group addresses that bridges keep for themselves (LLDP, LACP, spanning tree)
//! except MAC PAUSE, 01-80-C2-00-00-01, which the kernel forwards nowhere. Where the ends are is [`Rehoming`]'s.
//!
//! Frames cross the underlay as they are, and a sender that forges its address is not kept out; between sites that have one, an [`extender`]
//! carries them encrypted.

#![forbid(unsafe_code)]
mod capture;
mod device;
mod endpoint;
pub mod extender;
mod gateway;
mod guard;
mod record;
mod rehome;
mod spec;
mod survey;
mod wires;

pub use capture::{CaptureBounds, Captured, CapturedFrame};
pub use endpoint::{Action, Endpoint, Order, Stale, State};
pub use gateway::{Port, PortAction, PortOrder, PortState, Refused};
pub use godwit_net::{MacAddr, NetError};
pub use record::state as state_of_tap;
pub use rehome::{Outdated, Rehoming, Side, Stamp, View};
pub use spec::{Component, DEFAULT_PORT, EndpointId, EndpointSpec, GatewayPort, PortWire, Sequence, Vni, WireId};
pub use survey::{Part, Surveyed};
pub use wires::{Found, FoundState, Greeter, Nonce, WireError, Wires};
