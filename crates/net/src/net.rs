//! Links, bridge ports and forwarding tables.

use crate::{MacAddr, NetError};
use futures_util::{StreamExt, TryStreamExt};
use rtnetlink::packet_core::{
    NLM_F_ACK, NLM_F_APPEND, NLM_F_CREATE, NLM_F_REPLACE, NLM_F_REQUEST, NetlinkMessage, NetlinkPayload,
};
use rtnetlink::packet_route::link::{InfoData, InfoKind, InfoVxlan, LinkAttribute, LinkFlags, LinkInfo, LinkMessage};
use rtnetlink::packet_route::neighbour::{
    NeighbourAddress, NeighbourAttribute, NeighbourFlags, NeighbourMessage, NeighbourState,
};
use rtnetlink::packet_route::{AddressFamily, RouteNetlinkMessage};
use rtnetlink::{Error, Handle, LinkBridge, LinkBridgePort, LinkMessageBuilder, LinkUnspec, LinkVxlan};
use std::net::IpAddr;
use std::sync::Arc;
use tokio::sync::{Mutex, MutexGuard};
use tokio::task::JoinHandle;

/// The kernel's number of an interface in this namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LinkIndex(pub u32);

/// Kinds of interface that matter here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A tap (or tun).
    Tap,
    /// A bridge.
    Bridge,
    /// A VXLAN tunnel's end.
    Vxlan,
    /// A WireGuard device of the kernel's.
    Wireguard,
    /// Anything else.
    Other,
}

/// An interface as the kernel shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    /// Its number.
    pub index: LinkIndex,
    /// Its name.
    pub name: String,
    /// What it is.
    pub kind: Kind,
    /// The bridge that it is a port of.
    pub master: Option<LinkIndex>,
    /// Its address.
    pub mac: MacAddr,
    /// Bytes of payload in a frame.
    pub mtu: u32,
    /// Administratively up.
    pub up: bool,
    /// A free text that lives as long as the interface.
    pub alias: Option<String>,
    /// Frames that it received: of a tap, those that its guest sent.
    pub received: u64,
    /// Of a VXLAN device: its network number.
    pub vni: Option<u32>,
    /// Of a VXLAN device: its UDP port.
    pub port: Option<u16>,
}

impl Link {
    /// The interface itself, if it is of that kind; `wanted` says the kind in words.
    ///
    /// # Errors
    /// [`NetError::OtherKind`].
    pub fn of_kind(self, kind: Kind, wanted: &'static str) -> Result<Self, NetError> {
        if self.kind == kind { Ok(self) } else { Err(NetError::OtherKind { object: self.name, wanted }) }
    }
}

/// A point-to-point VXLAN device to be made; it reaches nobody until it has a default entry ([`Net::fdb_add`]).
#[derive(Clone, Debug)]
pub struct Vxlan<'a> {
    /// Its name.
    pub name: &'a str,
    /// 24 bits, unique on this host and port.
    pub vni: u32,
    /// This host's underlay address.
    pub local: IpAddr,
    /// The UDP port.
    pub port: u16,
}

/// Group addresses that a bridge forwards when it is asked to: of 01-80-C2-00-00-00 to -0F all but the three that the kernel keeps
/// for itself. Of those, spanning tree's passes where the bridge runs none.
const FORWARDED_BY_BRIDGE: u16 = 0xfff8;
/// The same of a bridge's port, which may forward slow protocols (LACP) as well: all but MAC PAUSE, which is a link's own.
const FORWARDED_BY_PORT: u16 = 0xfffd;

/// How a forwarding entry joins those of the same address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fdb {
    /// Beside them: frames go to each. For the default entry, so that re-pointing loses nothing.
    Append,
    /// In their place.
    Replace,
}

/// A netlink connection in the namespace of the thread that opened it. Clones share it.
#[derive(Clone, Debug)]
pub struct Net {
    pub(crate) handle: Handle,
    listing: Arc<Mutex<()>>,
    _connection: Arc<Ended>,
}

#[derive(Debug)]
struct Ended(JoinHandle<()>);

impl Drop for Ended {
    fn drop(&mut self) {
        self.0.abort();
    }
}

pub(crate) fn check_name(name: &str) -> Result<(), NetError> {
    let fine = (1..=15).contains(&name.len())
        && name != "."
        && name != ".."
        && name.bytes().all(|b| b.is_ascii_graphic() && !matches!(b, b'/' | b':' | b'%'));
    if fine { Ok(()) } else { Err(NetError::BadName(name.to_owned())) }
}

pub(crate) fn failed(operation: &'static str, object: &str) -> impl FnOnce(Error) -> NetError {
    move |error| {
        let source = match error {
            Error::NetlinkError(message) => message.to_io(),
            other => std::io::Error::other(other.to_string()),
        };
        match source.raw_os_error() {
            Some(libc::ENODEV) => NetError::Missing { operation, object: object.to_owned() },
            _ => NetError::Kernel { operation, object: object.to_owned(), source },
        }
    }
}

fn numbered(link: LinkIndex) -> LinkMessageBuilder<LinkUnspec> {
    LinkUnspec::new_with_index(link.0)
}

fn read(message: LinkMessage) -> Link {
    let mut link = Link {
        index: LinkIndex(message.header.index),
        name: String::new(),
        kind: Kind::Other,
        master: None,
        mac: MacAddr::ZERO,
        mtu: 0,
        up: message.header.flags.contains(LinkFlags::Up),
        alias: None,
        received: 0,
        vni: None,
        port: None,
    };
    for attribute in message.attributes {
        match attribute {
            LinkAttribute::IfName(name) => link.name = name,
            LinkAttribute::IfAlias(alias) => link.alias = Some(alias),
            LinkAttribute::Mtu(mtu) => link.mtu = mtu,
            LinkAttribute::Controller(index) => link.master = Some(LinkIndex(index)).filter(|i| i.0 != 0),
            LinkAttribute::Address(bytes) => link.mac = bytes.try_into().map_or(MacAddr::ZERO, MacAddr),
            LinkAttribute::Stats64(stats) => link.received = stats.rx_packets,
            LinkAttribute::LinkInfo(infos) => {
                for info in infos {
                    match info {
                        LinkInfo::Kind(kind) => {
                            link.kind = match kind {
                                InfoKind::Tun => Kind::Tap,
                                InfoKind::Bridge => Kind::Bridge,
                                InfoKind::Vxlan => Kind::Vxlan,
                                InfoKind::Wireguard => Kind::Wireguard,
                                _ => Kind::Other,
                            };
                        }
                        LinkInfo::Data(InfoData::Vxlan(data)) => {
                            for item in data {
                                match item {
                                    InfoVxlan::Id(vni) => link.vni = Some(vni),
                                    InfoVxlan::Port(port) => link.port = Some(port),
                                    _ => {}
                                }
                            }
                        }
                        _ => {}
                    }
                }
            }
            _ => {}
        }
    }
    link
}

/// Somebody else may have made it since it was looked for: two guests arrive at once.
fn unless_there_now(made: Result<(), NetError>) -> Result<(), NetError> {
    match made {
        Err(NetError::Kernel { source, .. }) if source.raw_os_error() == Some(libc::EEXIST) => Ok(()),
        other => other,
    }
}

impl Net {
    /// Opens a connection; within a tokio runtime.
    ///
    /// # Errors
    /// [`NetError::Kernel`] when there is no netlink socket to be had.
    pub fn open() -> Result<Self, NetError> {
        let (connection, handle, _) = rtnetlink::new_connection().map_err(|source| NetError::Kernel {
            operation: "open",
            object: "netlink".into(),
            source,
        })?;
        Ok(Self { handle, listing: Arc::default(), _connection: Arc::new(Ended(tokio::spawn(connection))) })
    }

    /// Before anything is listed, until all of it is there: the kernel makes one list at a time for a socket, and refuses a second one
    /// (EBUSY). Whoever changes or looks up single things need not wait.
    pub(crate) async fn listing(&self) -> MutexGuard<'_, ()> {
        self.listing.lock().await
    }

    /// The interface of that name, if there is one.
    ///
    /// # Errors
    /// [`NetError`], naming it.
    pub async fn find(&self, name: &str) -> Result<Option<Link>, NetError> {
        check_name(name)?;
        match self.handle.link().get().match_name(name).execute().try_next().await {
            Ok(message) => Ok(message.map(read)),
            Err(error) => match failed("look up", name)(error) {
                NetError::Missing { .. } => Ok(None),
                other => Err(other),
            },
        }
    }

    /// The interface of that name.
    ///
    /// # Errors
    /// [`NetError::Missing`], or the kernel's.
    pub async fn get(&self, name: &str) -> Result<Link, NetError> {
        let missing = || NetError::Missing { operation: "look up", object: name.to_owned() };
        self.find(name).await?.ok_or_else(missing)
    }

    /// All interfaces whose name begins with `prefix`: what a restarted node finds, orphans included.
    ///
    /// # Errors
    /// [`NetError::Kernel`].
    pub async fn list(&self, prefix: &str) -> Result<Vec<Link>, NetError> {
        let _alone = self.listing().await;
        let all = self.handle.link().get().execute().map_ok(read);
        let mine = all.try_filter(|link| std::future::ready(link.name.starts_with(prefix)));
        mine.try_collect().await.map_err(failed("list links", prefix))
    }

    /// The bridge `name`, created (down) if need be; `ageing` in hundredths of a second, 0 makes it a hub.
    ///
    /// # Errors
    /// [`NetError::OtherKind`] when the name is another's.
    pub async fn ensure_bridge(&self, name: &str, ageing: Option<u32>) -> Result<Link, NetError> {
        if let Some(there) = self.find(name).await? {
            return there.of_kind(Kind::Bridge, "bridge");
        }
        let mut wanted = LinkMessageBuilder::<LinkBridge>::new(name);
        if let Some(ageing) = ageing {
            wanted = wanted.ageing_time(ageing);
        }
        let made = self.handle.link().add(wanted.build()).execute().await.map_err(failed("create bridge", name));
        unless_there_now(made)?;
        self.expect(name, Kind::Bridge, "bridge").await
    }

    /// The bridge `name` as a mere wire, created (down) if need be: it learns nothing, keeps no group memberships, and (as bridges do
    /// unless they are told to know VLANs, which some kernels cannot) leaves VLAN tags alone. It forwards what bridges keep for themselves, as far as the kernel lets it (not MAC PAUSE).
    ///
    /// # Errors
    /// [`NetError::OtherKind`] when the name is another's.
    pub async fn ensure_wire_bridge(&self, name: &str) -> Result<Link, NetError> {
        if let Some(there) = self.find(name).await? {
            return there.of_kind(Kind::Bridge, "bridge");
        }
        let wanted = LinkMessageBuilder::<LinkBridge>::new(name)
            .ageing_time(0)
            .mcast_snooping(false)
            .group_fwd_mask(FORWARDED_BY_BRIDGE);
        self.handle.link().add(wanted.build()).execute().await.map_err(failed("create bridge", name))?;
        self.expect(name, Kind::Bridge, "bridge").await
    }

    /// A port of a wire's bridge passes what bridges keep for themselves.
    ///
    /// # Errors
    /// The kernel's.
    pub async fn pass_groups(&self, port: LinkIndex) -> Result<(), NetError> {
        let change = LinkBridgePort::new(port.0).group_fwd_mask(FORWARDED_BY_PORT);
        let done = self.handle.link().set_port(change.build()).execute().await;
        done.map_err(|e| failed("let group addresses pass", &format!("#{}", port.0))(e))
    }

    /// The VXLAN device, created (down, without any remote) if need be.
    ///
    /// # Errors
    /// [`NetError::OtherKind`] when the name is another's; EEXIST when the VNI is.
    pub async fn ensure_vxlan(&self, wanted: &Vxlan<'_>) -> Result<Link, NetError> {
        if let Some(there) = self.find(wanted.name).await? {
            return there.of_kind(Kind::Vxlan, "VXLAN device");
        }
        let new = LinkMessageBuilder::<LinkVxlan>::new(wanted.name).id(wanted.vni).port(wanted.port).learning(false);
        let new = match wanted.local {
            IpAddr::V4(ip) => new.local(ip),
            IpAddr::V6(ip) => new.local6(ip),
        };
        self.handle.link().add(new.build()).execute().await.map_err(failed("create vxlan", wanted.name))?;
        self.expect(wanted.name, Kind::Vxlan, "VXLAN device").await
    }

    /// The interface of that name, if it is of that kind.
    ///
    /// # Errors
    /// [`NetError::OtherKind`], [`NetError::Missing`].
    pub async fn expect(&self, name: &str, kind: Kind, wanted: &'static str) -> Result<Link, NetError> {
        self.get(name).await?.of_kind(kind, wanted)
    }

    async fn set(&self, operation: &'static str, link: LinkIndex, change: LinkMessage) -> Result<(), NetError> {
        let done = self.handle.link().set(change).execute().await;
        done.map_err(|e| failed(operation, &format!("#{}", link.0))(e))
    }

    /// Sets it up.
    ///
    /// # Errors
    /// The kernel's.
    pub async fn up(&self, link: LinkIndex) -> Result<(), NetError> {
        self.set("set up", link, numbered(link).up().build()).await
    }

    /// Sets it down.
    ///
    /// # Errors
    /// The kernel's.
    pub async fn down(&self, link: LinkIndex) -> Result<(), NetError> {
        self.set("set down", link, numbered(link).down().build()).await
    }

    /// Sets its MTU, in bytes.
    ///
    /// # Errors
    /// The kernel's.
    pub async fn set_mtu(&self, link: LinkIndex, mtu: u16) -> Result<(), NetError> {
        self.set("set MTU of", link, numbered(link).mtu(mtu.into()).build()).await
    }

    /// Sets its address.
    ///
    /// # Errors
    /// The kernel's.
    pub async fn set_mac(&self, link: LinkIndex, mac: MacAddr) -> Result<(), NetError> {
        self.set("set address of", link, numbered(link).address(mac.0.to_vec()).build()).await
    }

    /// Writes a text of at most 255 bytes on it, which lives as long as it does.
    ///
    /// # Errors
    /// The kernel's.
    pub async fn set_alias(&self, link: LinkIndex, alias: &str) -> Result<(), NetError> {
        self.set("set alias of", link, numbered(link).alias(alias).build()).await
    }

    /// Makes it a port of `bridge`, taking it from any other bridge in the same step; or of none.
    ///
    /// # Errors
    /// The kernel's.
    pub async fn set_master(&self, link: LinkIndex, bridge: Option<LinkIndex>) -> Result<(), NetError> {
        let change = match bridge {
            Some(bridge) => numbered(link).controller(bridge.0),
            None => numbered(link).nocontroller(),
        };
        self.set("change bridge of", link, change.build()).await
    }

    /// Removes the interface, if there is one.
    ///
    /// # Errors
    /// The kernel's.
    pub async fn remove(&self, name: &str) -> Result<(), NetError> {
        let Some(link) = self.find(name).await? else { return Ok(()) };
        match self.handle.link().del(link.index.0).execute().await.map_err(failed("remove", name)) {
            Err(NetError::Missing { .. }) => Ok(()),
            other => other,
        }
    }

    /// Keeps the host's own IPv6 off an interface: it would send router solicitations and reports into a guest's wire.
    ///
    /// # Errors
    /// [`NetError::Kernel`] when the setting cannot be written; a kernel without IPv6 is fine.
    pub fn without_ipv6(name: &str) -> Result<(), NetError> {
        check_name(name)?;
        match std::fs::write(format!("/proc/sys/net/ipv6/conf/{name}/disable_ipv6"), "1") {
            Err(source) if source.kind() != std::io::ErrorKind::NotFound => {
                Err(NetError::Kernel { operation: "switch IPv6 off on", object: name.to_owned(), source })
            }
            _ => Ok(()),
        }
    }

    /// A VXLAN device's entry: frames for `mac` ([`MacAddr::ZERO`]: all that have no other entry) go to the host `to`.
    ///
    /// # Errors
    /// The kernel's.
    pub async fn fdb_add(&self, vxlan: LinkIndex, mac: MacAddr, to: IpAddr, how: Fdb) -> Result<(), NetError> {
        let mut entry = entry(vxlan, mac, NeighbourFlags::Own, NeighbourState::Permanent);
        entry.attributes.push(NeighbourAttribute::Destination(destination(to)));
        let how = if how == Fdb::Append { NLM_F_APPEND } else { NLM_F_REPLACE };
        match self.neighbour("add forwarding entry to", vxlan, entry, how).await {
            // Appended before.
            Err(NetError::Kernel { source, .. }) if source.raw_os_error() == Some(libc::EEXIST) => Ok(()),
            other => other,
        }
    }

    /// Removes one destination of an entry.
    ///
    /// # Errors
    /// The kernel's; an entry that is gone is no error.
    pub async fn fdb_remove(&self, vxlan: LinkIndex, mac: MacAddr, to: IpAddr) -> Result<(), NetError> {
        let mut entry = entry(vxlan, mac, NeighbourFlags::Own, NeighbourState::Permanent);
        entry.attributes.push(NeighbourAttribute::Destination(destination(to)));
        match self.handle.neighbours().del(entry).execute().await.map_err(failed("remove entry of", "vxlan")) {
            Err(NetError::Kernel { source, .. }) if source.raw_os_error() == Some(libc::ENOENT) => Ok(()),
            other => other,
        }
    }

    /// Where a VXLAN device sends frames for `mac`.
    ///
    /// # Errors
    /// The kernel's.
    pub async fn fdb_of(&self, vxlan: LinkIndex, mac: MacAddr) -> Result<Vec<IpAddr>, NetError> {
        let all = self.fdb(vxlan).await?;
        Ok(all.into_iter().filter(|(of, _)| *of == mac).map(|(_, to)| to).collect())
    }

    /// A VXLAN device's entries: which address's frames go to which host.
    ///
    /// # Errors
    /// The kernel's.
    pub async fn fdb(&self, vxlan: LinkIndex) -> Result<Vec<(MacAddr, IpAddr)>, NetError> {
        let _alone = self.listing().await;
        let request = self.handle.neighbours().get().set_address_family(AddressFamily::Bridge);
        let all: Vec<_> = request.execute().try_collect().await.map_err(failed("list entries of", "vxlan"))?;
        let mine = all.into_iter().filter(|e| e.header.ifindex == vxlan.0);
        Ok(mine.filter_map(|e| Some((mac_of(&e)?, destination_of(&e)?))).collect())
    }

    /// The addresses that were asked for on this host's links, and of which nobody answered.
    ///
    /// # Errors
    /// The kernel's.
    pub async fn silent_neighbours(&self) -> Result<Vec<IpAddr>, NetError> {
        let mut found = vec![];
        let _alone = self.listing().await;
        for family in [AddressFamily::Inet, AddressFamily::Inet6] {
            let request = self.handle.neighbours().get().set_address_family(family);
            let all: Vec<_> = request.execute().try_collect().await.map_err(failed("list", "neighbours"))?;
            let silent =
                all.iter().filter(|e| matches!(e.header.state, NeighbourState::Failed | NeighbourState::Incomplete));
            found.extend(silent.filter_map(destination_of));
        }
        Ok(found)
    }

    /// Teaches a bridge at once that `mac` is behind its port `port`, as a frame from there would; it ages as usual.
    ///
    /// # Errors
    /// The kernel's.
    pub async fn learn(&self, port: LinkIndex, mac: MacAddr) -> Result<(), NetError> {
        let entry = entry(port, mac, NeighbourFlags::Controller, NeighbourState::Reachable);
        self.neighbour("teach bridge of", port, entry, NLM_F_REPLACE).await
    }

    pub(crate) async fn neighbour(
        &self,
        operation: &'static str,
        link: LinkIndex,
        entry: NeighbourMessage,
        how: u16,
    ) -> Result<(), NetError> {
        let object = format!("#{}", link.0);
        let mut message = NetlinkMessage::from(RouteNetlinkMessage::NewNeighbour(entry));
        message.header.flags = NLM_F_REQUEST | NLM_F_ACK | NLM_F_CREATE | how;
        let mut answers = self.handle.clone().request(message).map_err(failed(operation, &object))?;
        while let Some(answer) = answers.next().await {
            if let NetlinkPayload::Error(error) = answer.payload
                && error.code.is_some()
            {
                return Err(failed(operation, &object)(Error::NetlinkError(error)));
            }
        }
        Ok(())
    }
}

pub(crate) fn entry(link: LinkIndex, mac: MacAddr, flags: NeighbourFlags, state: NeighbourState) -> NeighbourMessage {
    let mut entry = NeighbourMessage::default();
    entry.header.family = AddressFamily::Bridge;
    entry.header.ifindex = link.0;
    entry.header.flags = flags;
    entry.header.state = state;
    entry.attributes.push(NeighbourAttribute::LinkLayerAddress(mac.0.to_vec()));
    entry
}

fn mac_of(entry: &NeighbourMessage) -> Option<MacAddr> {
    entry.attributes.iter().find_map(|attribute| match attribute {
        NeighbourAttribute::LinkLayerAddress(bytes) => bytes.as_slice().try_into().ok().map(MacAddr),
        _ => None,
    })
}

fn destination_of(entry: &NeighbourMessage) -> Option<IpAddr> {
    entry.attributes.iter().find_map(|attribute| match attribute {
        NeighbourAttribute::Destination(NeighbourAddress::Inet(ip)) => Some(IpAddr::from(*ip)),
        NeighbourAttribute::Destination(NeighbourAddress::Inet6(ip)) => Some(IpAddr::from(*ip)),
        NeighbourAttribute::Destination(NeighbourAddress::Other(bytes)) => match bytes.len() {
            4 => <[u8; 4]>::try_from(bytes.as_slice()).ok().map(IpAddr::from),
            _ => <[u8; 16]>::try_from(bytes.as_slice()).ok().map(IpAddr::from),
        },
        _ => None,
    })
}

const fn destination(to: IpAddr) -> NeighbourAddress {
    match to {
        IpAddr::V4(ip) => NeighbourAddress::Inet(ip),
        IpAddr::V6(ip) => NeighbourAddress::Inet6(ip),
    }
}
