//! The tables that lead frames of wires into tunnels, to a carrier, or nowhere.
//!
//! There are two: for what this host's own wires send, and for what others of its site give to it, which goes into a tunnel that ends
//! here or nowhere, so that nothing goes from carrier to carrier and back. In both, what no route is for goes nowhere.
//!
//! Others of the machine change routes and rules, too: a flush takes all, systemd-networkd removes those that it does not know, and an interface
//! that goes down takes its own. So what was laid is laid again every few seconds, which touches only what has changed ([`Laid`]).

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
    /// Interfaces that pass nothing on but for others of the site: all that comes in by them and is not for this host goes where that goes,
    /// whether `nft` has marked it or not.
    pub closed: BTreeSet<String>,
}

/// How it was laid.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Laid {
    /// What cannot be done, by its place in [`Paths::beyond`]: its frames go nowhere.
    pub missing: Vec<(usize, NoWay)>,
    /// Whether the kernel had it otherwise.
    pub changed: bool,
}

/// A way that the kernel does not have.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoWay {
    /// The carrier is behind a router.
    #[error("the carrier {0} is not on a network of this host's, and cannot be given frames: let a host carry that is")]
    NotANeighbour(Ipv4Addr),
    /// No interface leads to the carrier now.
    #[error("there is no way to the carrier {0}: {1}")]
    NoRoute(Ipv4Addr, String),
    /// There is no such device now, or it is down.
    #[error("the tunnel's device {0} is not there, or not up")]
    NoDevice(String),
}

impl Paths {
    /// The tables say so, and the rules lead to them; what stays is not touched.
    ///
    /// # Errors
    /// The kernel's; it may be repeated.
    pub async fn lay(&self, net: &Net, port: u16) -> Result<Laid, NetError> {
        let nowhere = Steering { to: None, leads: Leads::Nowhere };
        let (mut own, mut carried, mut missing) = (vec![nowhere], vec![nowhere], vec![]);
        own.extend(self.clear.iter().map(|ip| Steering { to: Some(*ip), leads: Leads::Elsewhere }));
        for (place, beyond) in self.beyond.iter().enumerate() {
            let leads = match &beyond.hop {
                Some(hop) => leads(net, hop).await?,
                None => Ok(Leads::Nowhere),
            };
            let leads = leads.unwrap_or_else(|why| {
                missing.push((place, why));
                Leads::Nowhere
            });
            let into = match &beyond.into {
                Some(device) => onto(net, device).await?.unwrap_or(Leads::Nowhere),
                None => Leads::Nowhere,
            };
            for ip in &beyond.hosts {
                own.push(Steering { to: Some(*ip), leads });
                carried.push(Steering { to: Some(*ip), leads: into });
            }
        }
        let mut given = vec![Steered::Marked(CARRIED)];
        given.extend(self.closed.iter().cloned().map(Steered::From));
        // First where they lead, then the rules: no packet finds a table that says nothing. But the rules also where the kernel refuses a
        // route: without it frames go nowhere, without a rule in clear.
        let done = [
            // Sites with extenders have hosts with IPv4 addresses only; should another one come, nothing goes to it.
            net.block_ipv6(port, OWN_TABLE, true).await,
            net.set_table(OWN_TABLE, &own).await,
            net.set_table(CARRIED_TABLE, &carried).await,
            net.set_rules(&Steer { table: OWN_TABLE, what: vec![Steered::OwnUdp(port)] }).await,
            net.set_rules(&Steer { table: CARRIED_TABLE, what: given }).await,
        ];
        let mut changed = false;
        for one in done {
            changed |= one?;
        }
        Ok(Laid { missing, changed })
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
    let carrier = match hop {
        Hop::Device(device) => return Ok(onto(net, device).await?.ok_or_else(|| NoWay::NoDevice(device.clone()))),
        Hop::Carrier(carrier) => *carrier,
    };
    Ok(match net.next_hop(carrier).await {
        Ok(next) if next.neighbour => {
            let link = net.numbered(next.link).await?;
            Ok(Leads::Via(carrier, next.link, link.mtu.saturating_sub(OVERHEAD)))
        }
        Ok(_) => Err(NoWay::NotANeighbour(carrier)),
        Err(why) => Err(NoWay::NoRoute(carrier, why.to_string())),
    })
}

/// Into a device, if it is there and up.
async fn onto(net: &Net, device: &str) -> Result<Option<Leads>, NetError> {
    Ok(net.find(device).await?.filter(|link| link.up).map(|link| Leads::Onto(link.index)))
}

/// The interfaces that lead to these hosts.
///
/// # Errors
/// The kernel's.
pub async fn interfaces(net: &Net, hosts: &BTreeSet<Ipv4Addr>) -> Result<BTreeMap<String, Link>, NetError> {
    let mut lead = BTreeSet::new();
    for host in hosts {
        // One that there is no way to now is no reason not to find the others'.
        lead.extend(net.next_hop(*host).await.map(|next| next.link));
    }
    let all = net.list("").await?.into_iter().filter(|link| lead.contains(&link.index) && link.name != "lo");
    Ok(all.map(|link| (link.name.clone(), link)).collect())
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
