//! What the kernel has of this host's wires, to be compared with what is remembered.

use crate::wires::net;
use crate::{WireError, WireId, Wires};
use godwit_net::{Kind, Link, MacAddr};
use std::net::IpAddr;

/// An interface under the prefix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Surveyed {
    /// Its name.
    pub name: String,
    /// What it is.
    pub part: Part,
    /// What it carries, bytes.
    pub mtu: u32,
    /// The bridge that it is a port of, by its name.
    pub on: Option<String>,
    /// Whether it is up.
    pub up: bool,
}

/// What an interface under the prefix is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    /// The device of this endpoint: a tap, or the host's side of a component's port.
    Device(u32),
    /// The bridge of this wire.
    Bridge(WireId),
    /// The tunnel of this wire, and its forwarding entries: for which address (all zeroes: for every one) to which host.
    Tunnel(WireId, Vec<(MacAddr, IpAddr)>),
    /// The end of a wire at a gateway, and its forwarding entries.
    Gateway(WireId, Vec<(MacAddr, IpAddr)>),
    /// The host's side of what this component's ports see of the world outside.
    Outside(u64),
    /// The pen.
    Pen,
    /// Nothing that this version makes.
    Other,
}

impl Wires {
    /// All interfaces under the prefix.
    ///
    /// # Errors
    /// [`WireError::Net`].
    pub async fn survey(&self) -> Result<Vec<Surveyed>, WireError> {
        let failed = || net("survey", self.prefix());
        let links = self.net().list("").await.map_err(failed())?;
        let mut found = vec![];
        for link in links.iter().filter(|link| link.name.starts_with(self.prefix())) {
            let part = match self.part(link) {
                Part::Tunnel(wire, _) => Part::Tunnel(wire, self.net().fdb(link.index).await.map_err(failed())?),
                Part::Gateway(wire, _) => Part::Gateway(wire, self.net().fdb(link.index).await.map_err(failed())?),
                part => part,
            };
            let on = link.master.and_then(|on| links.iter().find(|other| other.index == on)).map(|on| on.name.clone());
            found.push(Surveyed { name: link.name.clone(), part, mtu: link.mtu, on, up: link.up });
        }
        Ok(found)
    }

    /// Whether an interface of that name is up; none where there is no such one.
    ///
    /// # Errors
    /// [`WireError::Net`].
    pub async fn is_up(&self, name: &str) -> Result<Option<bool>, WireError> {
        Ok(self.net().find(name).await.map_err(net("survey", name))?.map(|link| link.up))
    }

    /// The addresses on this host's own links that were asked for and do not answer.
    ///
    /// # Errors
    /// [`WireError::Net`].
    pub async fn silent(&self) -> Result<Vec<IpAddr>, WireError> {
        self.net().silent_neighbours().await.map_err(net("survey", self.prefix()))
    }

    fn part(&self, link: &Link) -> Part {
        let Some(rest) = link.name.strip_prefix(self.prefix()) else { return Part::Other };
        if let Some(number) = rest.strip_prefix('t').and_then(|number| number.parse().ok()) {
            return Part::Device(number);
        }
        if let Some(number) = rest.strip_prefix('o').and_then(|number| number.parse().ok()) {
            return Part::Outside(number);
        }
        let Some(rest) = rest.strip_prefix('-') else { return Part::Other };
        let wire = rest.get(1..).and_then(|number| u32::from_str_radix(number, 16).ok()).map(WireId);
        match (rest.chars().next(), link.kind, wire) {
            (Some('b'), Kind::Bridge, Some(wire)) => Part::Bridge(wire),
            (Some('v'), Kind::Vxlan, Some(wire)) => Part::Tunnel(wire, vec![]),
            (Some('g'), Kind::Vxlan, Some(wire)) => Part::Gateway(wire, vec![]),
            _ if rest == "pen" => Part::Pen,
            _ => Part::Other,
        }
    }
}
