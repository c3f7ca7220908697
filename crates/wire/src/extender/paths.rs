//! The tables that lead frames of wires into tunnels, to a carrier, or nowhere.
//!
//! There are two: for what this host's own wires send, and for what others of its site give to it, which goes into a tunnel that ends
//! here or nowhere, so that nothing goes from carrier to carrier and back. In both, what no route is for goes nowhere.

use super::OVERHEAD;
use super::device::setting;
use super::rules::CARRIED;
use godwit_net::{Leads, Link, Net, NetError, Steer, Steered, Steering};
use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;

/// The table for what this host's own wires send. Its number is that of VXLAN's port, for people who look.
const OWN_TABLE: u32 = 4789;
/// The table for what others of the site give to this host.
const CARRIED_TABLE: u32 = 4790;

/// Where frames go next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Hop {
    /// Into this tunnel's device.
    Device(String),
    /// To this host of the site, which carries.
    Carrier(Ipv4Addr),
}

/// Another site's hosts, and which way to them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Beyond {
    /// Its hosts.
    pub hosts: BTreeSet<Ipv4Addr>,
    /// For what this host sends; none: nowhere.
    pub hop: Option<Hop>,
    /// The tunnel's device for what it is given; none: nowhere.
    pub into: Option<String>,
}

/// All that the tables say.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Paths {
    /// Hosts whose frames need no extender.
    pub clear: BTreeSet<Ipv4Addr>,
    /// The other sites with one.
    pub beyond: Vec<Beyond>,
}

/// A way that the kernel does not have.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoWay {
    /// The carrier is behind a router.
    #[error("the carrier {0} is not on a network of this host's, and cannot be given frames: let a host carry that is")]
    NotANeighbour(Ipv4Addr),
    /// There is no such device now.
    #[error("the tunnel's device {0} is not there")]
    NoDevice(String),
}

impl Paths {
    /// The tables say so, and the rules lead to them; what stays is not touched. Gives what cannot be done, whose frames go nowhere.
    ///
    /// # Errors
    /// The kernel's; it may be repeated.
    pub async fn lay(&self, net: &Net, port: u16) -> Result<Vec<NoWay>, NetError> {
        let nowhere = Steering { to: None, leads: Leads::Nowhere };
        let (mut own, mut carried, mut missing) = (vec![nowhere], vec![nowhere], vec![]);
        own.extend(self.clear.iter().map(|ip| Steering { to: Some(*ip), leads: Leads::Elsewhere }));
        for beyond in &self.beyond {
            let leads = match &beyond.hop {
                Some(hop) => leads(net, hop).await?,
                None => Ok(Leads::Nowhere),
            };
            let leads = leads.unwrap_or_else(|why| {
                missing.push(why);
                Leads::Nowhere
            });
            let into = match &beyond.into {
                Some(device) => net.find(device).await?.map_or(Leads::Nowhere, |link| Leads::Onto(link.index)),
                None => Leads::Nowhere,
            };
            for ip in &beyond.hosts {
                own.push(Steering { to: Some(*ip), leads });
                carried.push(Steering { to: Some(*ip), leads: into });
            }
        }
        // Sites with extenders have hosts with IPv4 addresses only; should another one come, nothing goes to it.
        net.block_ipv6(port, OWN_TABLE, true).await?;
        // First where they lead, then the rules: no packet finds a table that says nothing.
        net.set_table(OWN_TABLE, &own).await?;
        net.set_table(CARRIED_TABLE, &carried).await?;
        net.ensure_rule(Steer { what: Steered::OwnUdp(port), table: OWN_TABLE }).await?;
        net.ensure_rule(Steer { what: Steered::Marked(CARRIED), table: CARRIED_TABLE }).await?;
        Ok(missing)
    }

    /// No table and no rule is left: frames go as all other packets do.
    ///
    /// # Errors
    /// The kernel's; it may be repeated.
    pub async fn take_up(net: &Net, port: u16) -> Result<(), NetError> {
        net.block_ipv6(port, OWN_TABLE, false).await?;
        net.drop_table(OWN_TABLE).await?;
        net.drop_table(CARRIED_TABLE).await
    }
}

async fn leads(net: &Net, hop: &Hop) -> Result<Result<Leads, NoWay>, NetError> {
    Ok(match hop {
        Hop::Device(device) => {
            let link = net.find(device).await?;
            link.map(|link| Leads::Onto(link.index)).ok_or_else(|| NoWay::NoDevice(device.clone()))
        }
        Hop::Carrier(carrier) => {
            let next = net.next_hop(*carrier).await?;
            if next.neighbour {
                let link = net.numbered(next.link).await?;
                Ok(Leads::Via(*carrier, next.link, link.mtu.saturating_sub(OVERHEAD)))
            } else {
                Err(NoWay::NotANeighbour(*carrier))
            }
        }
    })
}

/// The interfaces that lead to these hosts.
///
/// # Errors
/// The kernel's.
pub async fn interfaces(net: &Net, hosts: &BTreeSet<Ipv4Addr>) -> Result<BTreeMap<String, Link>, NetError> {
    let mut found = BTreeMap::new();
    for host in hosts {
        // One that there is no way to now is no reason not to find the others'.
        let Ok(next) = net.next_hop(*host).await else { continue };
        let link = net.numbered(next.link).await?;
        if link.name != "lo" {
            found.insert(link.name.clone(), link);
        }
    }
    Ok(found)
}

/// Whether what comes in by this interface may be passed on.
#[must_use]
pub fn forwards(interface: &str) -> bool {
    std::fs::read_to_string(format!("/proc/sys/net/ipv4/conf/{interface}/forwarding"))
        .is_ok_and(|said| said.trim() != "0")
}

/// Lets what comes in by this interface be passed on, or not any more.
///
/// # Errors
/// The setting cannot be written.
pub fn let_forward(interface: &str, whether: bool) -> Result<(), NetError> {
    setting(interface, "forwarding", if whether { "1" } else { "0" })
}
