//! What is made inside another namespace: pairs of interfaces with one end there, addresses, routes, a bridge's table.

use crate::net::{entry, failed};
use crate::{Link, LinkIndex, MacAddr, Net, NetError, NetNs};
use futures_util::TryStreamExt;
use rtnetlink::packet_core::NLM_F_REPLACE;
use rtnetlink::packet_route::AddressFamily;
use rtnetlink::packet_route::address::{AddressAttribute, AddressMessage, AddressScope};
use rtnetlink::packet_route::link::{BridgeStpState, BridgeVlanInfoFlags, InfoData, InfoVeth, MacVlanMode};
use rtnetlink::packet_route::neighbour::{NeighbourAttribute, NeighbourFlags, NeighbourMessage, NeighbourState};
use rtnetlink::packet_route::route::{RouteAddress, RouteAttribute, RouteMessage, RouteProtocol};
use rtnetlink::{
    LinkBridge, LinkBridgeVlan, LinkMacVlan, LinkMessageBuilder, LinkUnspec, LinkVeth, RouteMessageBuilder,
};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::os::fd::AsRawFd;
use std::str::FromStr;

/// By which the kernel's routes that were made here are told from others.
const PROTOCOL: u8 = 71;

/// An address with the length of its network's prefix: `10.0.0.1/24`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Prefix {
    /// The address.
    pub ip: IpAddr,
    /// Bits of the network.
    pub length: u8,
}

/// Text that is no [`Prefix`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no address with a prefix; write it as in 10.0.0.1/24 or 2001:db8::1/64")]
pub struct BadPrefix(String);

impl FromStr for Prefix {
    type Err = BadPrefix;

    fn from_str(text: &str) -> Result<Self, BadPrefix> {
        let bad = || BadPrefix(text.chars().take(80).collect());
        let (ip, length) = text.split_once('/').ok_or_else(bad)?;
        let ip: IpAddr = ip.parse().map_err(|_| bad())?;
        let most = if ip.is_ipv4() { 32 } else { 128 };
        let length = length.parse().ok().filter(|length| *length <= most).ok_or_else(bad)?;
        Ok(Self { ip, length })
    }
}

impl TryFrom<String> for Prefix {
    type Error = BadPrefix;
    fn try_from(text: String) -> Result<Self, BadPrefix> {
        text.parse()
    }
}

impl From<Prefix> for String {
    fn from(prefix: Prefix) -> Self {
        prefix.to_string()
    }
}

impl fmt::Display for Prefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.ip, self.length)
    }
}

impl Prefix {
    /// The network's own address: what a route leads to.
    #[must_use]
    pub fn network(self) -> Self {
        let ip = match self.ip {
            IpAddr::V4(ip) => {
                let mask = u32::MAX.checked_shl(32 - u32::from(self.length)).unwrap_or(0);
                IpAddr::V4((u32::from(ip) & mask).into())
            }
            IpAddr::V6(ip) => {
                let mask = u128::MAX.checked_shl(128 - u32::from(self.length)).unwrap_or(0);
                IpAddr::V6((u128::from(ip) & mask).into())
            }
        };
        Self { ip, ..self }
    }
}

/// One end of a pair.
#[derive(Clone, Copy, Debug)]
pub struct VethEnd<'a> {
    /// Its name.
    pub name: &'a str,
    /// Its address.
    pub mac: MacAddr,
    /// Bytes.
    pub mtu: u16,
}

/// What a bridge does beside forwarding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BridgeKind {
    /// It looks at VLAN tags.
    pub vlan_filtering: bool,
    /// It speaks the spanning tree protocol.
    pub stp: bool,
}

/// A bridge port's VLANs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PortVlans {
    /// The one whose frames bear no tag there.
    pub untagged: Option<u16>,
    /// Those whose frames do.
    pub tagged: Vec<u16>,
}

/// A route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    /// Where to.
    pub to: Prefix,
    /// Through which neighbour; none: it is on the link.
    pub via: Option<IpAddr>,
    /// By which interface; none: the one that the neighbour is behind.
    pub by: Option<LinkIndex>,
}

/// An address that a bridge has learnt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Learnt {
    /// Behind which port.
    pub port: LinkIndex,
    /// The address.
    pub mac: MacAddr,
    /// In which VLAN, where the bridge looks at them.
    pub vlan: Option<u16>,
}

impl Net {
    /// A pair of interfaces, `here` and, in the namespace `inside`, `there`; both in one step, so that no half of it is ever
    /// left. Does nothing where `here` exists.
    ///
    /// # Errors
    /// The kernel's.
    pub async fn ensure_veth(&self, here: VethEnd<'_>, there: VethEnd<'_>, inside: &NetNs) -> Result<Link, NetError> {
        if self.find(here.name).await?.is_none() {
            let peer = LinkMessageBuilder::<LinkUnspec>::new()
                .name(there.name)
                .address(there.mac.0.to_vec())
                .mtu(there.mtu.into())
                .setns_by_fd(inside.as_fd().as_raw_fd())
                .build();
            let pair = LinkMessageBuilder::<LinkVeth>::new(here.name, there.name)
                .set_info_data(InfoData::Veth(InfoVeth::Peer(peer)))
                .address(here.mac.0.to_vec())
                .mtu(here.mtu.into());
            self.handle.link().add(pair.build()).execute().await.map_err(failed("create pair", here.name))?;
        }
        self.get(here.name).await
    }

    /// An interface of the network behind `on`, with an address of its own, in the namespace `inside`. Fails where the name is
    /// taken there.
    ///
    /// # Errors
    /// The kernel's.
    pub async fn add_macvlan(&self, on: LinkIndex, end: VethEnd<'_>, inside: &NetNs) -> Result<(), NetError> {
        let new = LinkMacVlan::new(end.name, on.0, MacVlanMode::Bridge)
            .address(end.mac.0.to_vec())
            .mtu(end.mtu.into())
            .setns_by_fd(inside.as_fd().as_raw_fd());
        self.handle.link().add(new.build()).execute().await.map_err(failed("create macvlan", end.name))
    }

    /// The bridge `name`, with an address of its own; created (down) if need be. What it does is set anew.
    ///
    /// # Errors
    /// The kernel's: EOPNOTSUPP where it has no VLAN filtering.
    pub async fn ensure_switch(&self, name: &str, mac: MacAddr, kind: BridgeKind) -> Result<Link, NetError> {
        let stp = if kind.stp { BridgeStpState::KernelStp } else { BridgeStpState::Disabled };
        let mut wanted = LinkMessageBuilder::<LinkBridge>::new(name).stp_state(stp);
        let before = self.find(name).await?;
        // A kernel without it refuses to be told not to do it.
        if kind.vlan_filtering {
            // No port is in a VLAN that nobody gave it.
            wanted = wanted.vlan_filtering(true).vlan_default_pvid(0);
        } else if before.is_some() {
            wanted = wanted.vlan_filtering(false);
        }
        match before {
            None => {
                let new = wanted.address(mac.0.to_vec()).build();
                self.handle.link().add(new).execute().await.map_err(failed("create bridge", name))?;
            }
            Some(link) => {
                let refused = self.handle.link().change(wanted.index(link.index.0).build()).execute().await;
                match refused.map_err(failed("change bridge", name)) {
                    Err(NetError::Kernel { source, .. })
                        if !kind.vlan_filtering && source.raw_os_error() == Some(libc::EOPNOTSUPP) =>
                    {
                        let plain = LinkMessageBuilder::<LinkBridge>::new(name).stp_state(stp).index(link.index.0);
                        self.handle
                            .link()
                            .change(plain.build())
                            .execute()
                            .await
                            .map_err(failed("change bridge", name))?;
                    }
                    other => other?,
                }
            }
        }
        self.get(name).await
    }

    /// Puts a port of a filtering bridge into its VLANs.
    ///
    /// # Errors
    /// The kernel's.
    pub async fn join_vlans(&self, port: LinkIndex, vlans: &PortVlans) -> Result<(), NetError> {
        let tagged = vlans.tagged.iter().map(|vlan| (*vlan, BridgeVlanInfoFlags::empty()));
        let untagged = vlans.untagged.map(|vlan| (vlan, BridgeVlanInfoFlags::Pvid | BridgeVlanInfoFlags::Untagged));
        for (vlan, flags) in tagged.chain(untagged) {
            let wanted = LinkBridgeVlan::new(port.0).vlan(vlan, flags).build();
            let set = self.handle.link().set(wanted).execute().await;
            set.map_err(|e| failed("set VLANs of", &format!("#{}", port.0))(e))?;
        }
        Ok(())
    }

    /// An interface's addresses of networks.
    async fn addresses(&self, link: LinkIndex) -> Result<Vec<(Prefix, AddressMessage)>, NetError> {
        let _alone = self.listing().await;
        let request = self.handle.address().get().set_link_index_filter(link.0);
        let all: Vec<AddressMessage> = request
            .execute()
            .try_collect()
            .await
            .map_err(|e| failed("list addresses of", &format!("#{}", link.0))(e))?;
        let of_a_network = |message: AddressMessage| {
            let ip = message.attributes.iter().find_map(|a| match a {
                AddressAttribute::Local(ip) | AddressAttribute::Address(ip) => Some(*ip),
                _ => None,
            });
            let ip = ip.filter(|_| message.header.scope != AddressScope::Link)?;
            Some((Prefix { ip, length: message.header.prefix_len }, message))
        };
        Ok(all.into_iter().filter_map(of_a_network).collect())
    }

    /// Gives an interface these addresses and takes all others of networks from it. Those that stay are not touched, but for what the kernel
    /// takes along: with the first IPv4 address of a network it removes the others of that network. Those are given again.
    ///
    /// # Errors
    /// The kernel's.
    pub async fn set_addresses(&self, link: LinkIndex, wanted: &[Prefix]) -> Result<(), NetError> {
        let object = format!("#{}", link.0);
        let (there, left): (Vec<_>, Vec<_>) =
            self.addresses(link).await?.into_iter().partition(|(prefix, _)| wanted.contains(prefix));
        let takes = !left.is_empty();
        for (_, message) in left {
            let gone = self.handle.address().del(message).execute().await;
            match gone.map_err(|e| failed("remove address of", &object)(e)) {
                // It went along.
                Err(NetError::Kernel { source, .. }) if source.raw_os_error() == Some(libc::EADDRNOTAVAIL) => {}
                other => other?,
            }
        }
        // What went along is seen only now.
        let there = if takes { self.addresses(link).await? } else { there };
        for prefix in wanted.iter().filter(|p| there.iter().all(|(at, _)| at != *p)) {
            let added = self.handle.address().add(link.0, prefix.ip, prefix.length).execute().await;
            added.map_err(|e| failed("add address", &prefix.to_string())(e))?;
        }
        Ok(())
    }

    async fn our_routes(&self) -> Result<Vec<RouteMessage>, NetError> {
        let mut found = vec![];
        let _alone = self.listing().await;
        for family in [AddressFamily::Inet, AddressFamily::Inet6] {
            let mut ask = RouteMessage::default();
            ask.header.address_family = family;
            let routes = self.handle.route().get(ask).execute();
            let routes: Vec<RouteMessage> = routes.try_collect().await.map_err(failed("list", "routes"))?;
            found.extend(routes.into_iter().filter(|r| r.header.protocol == RouteProtocol::from(PROTOCOL)));
        }
        Ok(found)
    }

    /// Makes these the routes that were ever set by this; those that stay are not touched.
    ///
    /// # Errors
    /// The kernel's: ENETUNREACH where a neighbour is on no network of an interface's.
    pub async fn set_routes(&self, wanted: &[Route]) -> Result<(), NetError> {
        for route in wanted {
            let bad = |e: &dyn fmt::Display| NetError::Kernel {
                operation: "set route to",
                object: route.to.to_string(),
                source: std::io::Error::other(e.to_string()),
            };
            let network = route.to.network();
            let mut new = RouteMessageBuilder::<IpAddr>::new()
                .protocol(RouteProtocol::from(PROTOCOL))
                .destination_prefix(network.ip, network.length)
                .map_err(|e| bad(&format!("{e:?}")))?;
            if let Some(via) = route.via {
                new = new.gateway(via).map_err(|e| bad(&format!("{e:?}")))?;
            }
            if let Some(by) = route.by {
                new = new.output_interface(by.0);
            }
            let set = self.handle.route().add(new.build()).replace().execute().await;
            set.map_err(|e| failed("set route to", &route.to.to_string())(e))?;
        }
        let wanted: Vec<Prefix> = wanted.iter().map(|r| r.to.network()).collect();
        for route in self.our_routes().await? {
            let any = if route.header.address_family == AddressFamily::Inet {
                IpAddr::from([0; 4])
            } else {
                IpAddr::from([0; 16])
            };
            let ip = route.attributes.iter().find_map(|a| match a {
                RouteAttribute::Destination(RouteAddress::Inet(ip)) => Some(IpAddr::from(*ip)),
                RouteAttribute::Destination(RouteAddress::Inet6(ip)) => Some(IpAddr::from(*ip)),
                _ => None,
            });
            let to = Prefix { ip: ip.unwrap_or(any), length: route.header.destination_prefix_length };
            if !wanted.contains(&to) {
                self.handle
                    .route()
                    .del(route)
                    .execute()
                    .await
                    .map_err(|e| failed("remove route to", &to.to_string())(e))?;
            }
        }
        Ok(())
    }

    /// What a bridge has learnt from frames; what was told it for ever is left out.
    ///
    /// # Errors
    /// The kernel's.
    pub async fn learnt(&self, bridge: LinkIndex) -> Result<Vec<Learnt>, NetError> {
        let _alone = self.listing().await;
        let request = self.handle.neighbours().get().set_address_family(AddressFamily::Bridge);
        let all: Vec<NeighbourMessage> =
            request.execute().try_collect().await.map_err(failed("list entries of", "bridge"))?;
        let mut found = vec![];
        for entry in all {
            let of = entry.attributes.contains(&NeighbourAttribute::Controller(bridge.0));
            let lasting = matches!(entry.header.state, NeighbourState::Permanent | NeighbourState::Noarp);
            let own = entry.header.flags.contains(NeighbourFlags::Own);
            if !of || lasting || own || entry.header.ifindex == bridge.0 {
                continue;
            }
            let mac = entry.attributes.iter().find_map(|a| match a {
                NeighbourAttribute::LinkLayerAddress(bytes) => <[u8; 6]>::try_from(bytes.as_slice()).ok().map(MacAddr),
                _ => None,
            });
            let vlan = entry.attributes.iter().find_map(|a| match a {
                NeighbourAttribute::Vlan(vlan) => Some(*vlan),
                _ => None,
            });
            found.extend(mac.map(|mac| Learnt { port: LinkIndex(entry.header.ifindex), mac, vlan }));
        }
        // The kernel says each twice: for the port, and for the bridge.
        found.sort_unstable();
        found.dedup();
        Ok(found)
    }

    /// Teaches a bridge what another one has learnt; it ages as usual.
    ///
    /// # Errors
    /// The kernel's: EPERM where the port is not up.
    pub async fn teach(&self, learnt: &Learnt) -> Result<(), NetError> {
        let mut new = entry(learnt.port, learnt.mac, NeighbourFlags::Controller, NeighbourState::Reachable);
        new.attributes.extend(learnt.vlan.map(NeighbourAttribute::Vlan));
        self.neighbour("teach bridge of", learnt.port, new, NLM_F_REPLACE).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_reads_back_as_written_and_its_network_has_no_host_bits() {
        for (text, network) in [
            ("10.1.2.3/24", "10.1.2.0/24"),
            ("10.1.2.3/0", "0.0.0.0/0"),
            ("2001:db8::7/64", "2001:db8::/64"),
            ("::1/0", "::/0"),
        ] {
            let prefix: Prefix = text.parse().unwrap();
            assert_eq!((prefix.to_string().as_str(), prefix.network().to_string().as_str()), (text, network));
        }
        for bad in ["", "10.0.0.1", "10.0.0.1/33", "10.0.0/8", "x/8", "::1/129", "10.0.0.1/-1"] {
            assert!(bad.parse::<Prefix>().is_err(), "{bad}");
        }
    }
}
