//! Routes in tables of their own, and the rules that send some packets there: how wires between sites are kept off the ways that all
//! other packets take. IPv4.

use crate::net::failed;
use crate::{Kind, LinkIndex, Net, NetError};
use futures_util::TryStreamExt;
use rtnetlink::packet_route::AddressFamily;
use rtnetlink::packet_route::IpProtocol;
use rtnetlink::packet_route::address::AddressAttribute;
use rtnetlink::packet_route::route::{
    RouteAddress, RouteAttribute, RouteMessage, RouteMetric, RouteProtocol, RouteScope, RouteType,
};
use rtnetlink::packet_route::rule::{RuleAction, RuleAttribute, RuleMessage, RulePortRange};
use rtnetlink::{IpVersion, LinkMessageBuilder, LinkWireguard, RouteMessageBuilder};
use std::net::{IpAddr, Ipv4Addr};

/// By which the kernel's routes that were made here are told from others.
const PROTOCOL: u8 = 72;

/// Whether the kernel has WireGuard, by what it said when it was to make a device: without the module it knows no such kind.
fn has_wireguard(made: Result<(), NetError>) -> Result<bool, NetError> {
    match made {
        Err(NetError::Kernel { source, .. }) if source.raw_os_error() == Some(libc::EOPNOTSUPP) => Ok(false),
        other => other.map(|()| true),
    }
}

/// Which packets a rule sends to its table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Steered {
    /// What this host itself sends by UDP to this port.
    OwnUdp(u16),
    /// What bears this mark.
    Marked(u32),
}

/// A rule. Its priority is its table's number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Steer {
    /// Which packets.
    pub what: Steered,
    /// To which table; above 255, and below 32766, which is the main table's priority.
    pub table: u32,
}

/// Where a route of a table leads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leads {
    /// Onto this interface.
    Onto(LinkIndex),
    /// To this neighbour behind this interface, in packets of at most so many bytes.
    Via(Ipv4Addr, LinkIndex, u32),
    /// Nowhere: the packet is lost.
    Nowhere,
    /// Where the other tables say.
    Elsewhere,
}

/// A route of a table; none for a host: all that have no other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Steering {
    /// Which host; none: any.
    pub to: Option<Ipv4Addr>,
    /// Where.
    pub leads: Leads,
}

/// The next hop to a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NextHop {
    /// By which interface.
    pub link: LinkIndex,
    /// Whether it is a neighbour there, not behind a router.
    pub neighbour: bool,
}

fn table_of(route: &RouteMessage) -> u32 {
    let said = route.attributes.iter().find_map(|a| match a {
        RouteAttribute::Table(table) => Some(*table),
        _ => None,
    });
    said.unwrap_or_else(|| route.header.table.into())
}

fn table_of_rule(rule: &RuleMessage) -> u32 {
    let said = rule.attributes.iter().find_map(|a| match a {
        RuleAttribute::Table(table) => Some(*table),
        _ => None,
    });
    said.unwrap_or_else(|| rule.header.table.into())
}

impl Net {
    async fn rules_to(&self, table: u32) -> Result<Vec<RuleMessage>, NetError> {
        let _alone = self.listing().await;
        let all = self.handle.rule().get(IpVersion::V4).execute();
        let all: Vec<RuleMessage> = all.try_collect().await.map_err(failed("list", "rules"))?;
        Ok(all.into_iter().filter(|rule| table_of_rule(rule) == table).collect())
    }

    /// Rules of IPv6 of this priority; none where the kernel has no IPv6.
    async fn ipv6_rules(&self, priority: u32) -> Vec<RuleMessage> {
        let _alone = self.listing().await;
        let all = self.handle.rule().get(IpVersion::V6).execute();
        let all: Vec<RuleMessage> = all.try_collect().await.unwrap_or_default();
        let of = |rule: &RuleMessage| rule.attributes.contains(&RuleAttribute::Priority(priority));
        all.into_iter().filter(of).collect()
    }

    /// What this host itself sends by UDP over IPv6 to this port is lost, or not any more; the rule's priority is its only name.
    ///
    /// # Errors
    /// The kernel's; where it has no IPv6, there is nothing to do.
    pub async fn block_ipv6(&self, port: u16, priority: u32, whether: bool) -> Result<(), NetError> {
        let there = self.ipv6_rules(priority).await;
        if whether && there.is_empty() {
            let mut new = self.handle.rule().add().v6().priority(priority).action(RuleAction::Blackhole);
            new = new.input_interface("lo");
            let message = new.message_mut();
            message.header.table = 0;
            message.attributes.push(RuleAttribute::IpProtocol(IpProtocol::Udp));
            message.attributes.push(RuleAttribute::DestinationPortRange(RulePortRange { start: port, end: port }));
            return match new.execute().await.map_err(failed("add rule of IPv6 of", &priority.to_string())) {
                Err(NetError::Kernel { source, .. })
                    if matches!(source.raw_os_error(), Some(libc::EAFNOSUPPORT | libc::EOPNOTSUPP)) =>
                {
                    Ok(())
                }
                other => other,
            };
        }
        for rule in there.into_iter().filter(|_| !whether) {
            let gone = self.handle.rule().del(rule).execute().await;
            gone.map_err(failed("remove rule of IPv6 of", &priority.to_string()))?;
        }
        Ok(())
    }

    /// The rule is there, once.
    ///
    /// # Errors
    /// The kernel's.
    pub async fn ensure_rule(&self, rule: Steer) -> Result<(), NetError> {
        if !self.rules_to(rule.table).await?.is_empty() {
            return Ok(());
        }
        let mut new =
            self.handle.rule().add().v4().table_id(rule.table).priority(rule.table).action(RuleAction::ToTable);
        match rule.what {
            Steered::OwnUdp(port) => {
                // What the host itself sends comes in by its loopback, as far as rules go.
                new = new.input_interface("lo");
                let attributes = &mut new.message_mut().attributes;
                attributes.push(RuleAttribute::IpProtocol(IpProtocol::Udp));
                attributes.push(RuleAttribute::DestinationPortRange(RulePortRange { start: port, end: port }));
            }
            Steered::Marked(mark) => new = new.fw_mark(mark),
        }
        new.execute().await.map_err(|e| failed("add rule for table", &rule.table.to_string())(e))
    }

    /// No rule leads to the table, and it has no route.
    ///
    /// # Errors
    /// The kernel's.
    pub async fn drop_table(&self, table: u32) -> Result<(), NetError> {
        for rule in self.rules_to(table).await? {
            let gone = self.handle.rule().del(rule).execute().await;
            gone.map_err(|e| failed("remove rule for table", &table.to_string())(e))?;
        }
        self.set_table(table, &[]).await
    }

    /// Makes these the table's routes; those that stay are not touched, and what changes is changed in one step each.
    ///
    /// # Errors
    /// The kernel's.
    pub async fn set_table(&self, table: u32, wanted: &[Steering]) -> Result<(), NetError> {
        for steering in wanted {
            let (ip, length) = steering.to.map_or((Ipv4Addr::UNSPECIFIED, 0), |ip| (ip, 32));
            let mut new = RouteMessageBuilder::<Ipv4Addr>::new()
                .protocol(RouteProtocol::from(PROTOCOL))
                .table_id(table)
                .destination_prefix(ip, length);
            new = match steering.leads {
                Leads::Onto(link) => new.output_interface(link.0).scope(RouteScope::Link),
                Leads::Via(neighbour, link, mtu) => {
                    let mut new = new.gateway(neighbour).output_interface(link.0).onlink();
                    new.get_mut().attributes.push(RouteAttribute::Metrics(vec![RouteMetric::Mtu(mtu)]));
                    new
                }
                Leads::Nowhere => new.kind(RouteType::BlackHole),
                Leads::Elsewhere => new.kind(RouteType::Throw),
            };
            let set = self.handle.route().add(new.build()).replace().execute().await;
            set.map_err(|e| failed("set route to", &ip.to_string())(e))?;
        }
        let mut ask = RouteMessage::default();
        ask.header.address_family = AddressFamily::Inet;
        let alone = self.listing().await;
        let routes = self.handle.route().get(ask).execute();
        let routes: Vec<RouteMessage> = routes.try_collect().await.map_err(failed("list", "routes"))?;
        drop(alone);
        for route in routes.into_iter().filter(|route| table_of(route) == table) {
            let to = route.attributes.iter().find_map(|a| match a {
                RouteAttribute::Destination(RouteAddress::Inet(ip)) => Some(*ip),
                _ => None,
            });
            if !wanted.iter().any(|steering| steering.to == to) {
                let gone = self.handle.route().del(route).execute().await;
                gone.map_err(|e| failed("remove route of table", &table.to_string())(e))?;
            }
        }
        Ok(())
    }

    /// How this host reaches another one.
    ///
    /// # Errors
    /// The kernel's: ENETUNREACH.
    pub async fn next_hop(&self, to: Ipv4Addr) -> Result<NextHop, NetError> {
        let ask = RouteMessageBuilder::<Ipv4Addr>::new().destination_prefix(to, 32).build();
        let found = self.handle.route().get(ask).execute().try_next().await;
        let found = found.map_err(|e| failed("look for the way to", &to.to_string())(e))?;
        let attributes = found.map(|route| route.attributes).unwrap_or_default();
        let link = attributes.iter().find_map(|a| match a {
            RouteAttribute::Oif(index) => Some(LinkIndex(*index)),
            _ => None,
        });
        let missing = || NetError::Missing { operation: "look for the way to", object: to.to_string() };
        let neighbour = !attributes.iter().any(|a| matches!(a, RouteAttribute::Gateway(_)));
        Ok(NextHop { link: link.ok_or_else(missing)?, neighbour })
    }

    /// The interface of that number.
    ///
    /// # Errors
    /// The kernel's.
    pub async fn numbered(&self, link: LinkIndex) -> Result<crate::Link, NetError> {
        let all = self.list("").await?;
        let missing = || NetError::Missing { operation: "look up", object: format!("#{}", link.0) };
        all.into_iter().find(|found| found.index == link).ok_or_else(missing)
    }

    /// A WireGuard device of the kernel's, if the kernel has such; whether it has.
    ///
    /// # Errors
    /// The kernel's; [`NetError::OtherKind`] when the name is another's.
    pub async fn ensure_wireguard(&self, name: &str) -> Result<bool, NetError> {
        if let Some(there) = self.find(name).await? {
            return there.of_kind(Kind::Wireguard, "WireGuard device of the kernel's").map(|_| true);
        }
        let new = LinkMessageBuilder::<LinkWireguard>::new(name).build();
        has_wireguard(self.handle.link().add(new).execute().await.map_err(failed("create WireGuard device", name)))
    }

    /// A point-to-point interface's two addresses: this end's and the other's, which is reached by it.
    ///
    /// # Errors
    /// The kernel's.
    pub async fn ensure_pair(&self, link: LinkIndex, own: Ipv4Addr, other: Ipv4Addr) -> Result<(), NetError> {
        let mut new = self.handle.address().add(link.0, IpAddr::V4(own), 32).replace();
        let attributes = &mut new.message_mut().attributes;
        attributes.retain(|a| {
            !matches!(a, AddressAttribute::Address(_) | AddressAttribute::Local(_) | AddressAttribute::Broadcast(_))
        });
        attributes.push(AddressAttribute::Local(own.into()));
        attributes.push(AddressAttribute::Address(other.into()));
        new.execute().await.map_err(|e| failed("add address", &own.to_string())(e))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;

    #[test]
    fn a_program_stands_in_for_a_kernel_that_knows_no_wireguard_and_for_no_other_refusal() {
        let said = |code: i32| {
            let source = io::Error::from_raw_os_error(code);
            has_wireguard(Err(NetError::Kernel { operation: "create", object: "gx1".into(), source }))
        };
        assert!(has_wireguard(Ok(())).unwrap());
        assert!(!said(libc::EOPNOTSUPP).unwrap());
        assert!(said(libc::EPERM).is_err() && said(libc::EEXIST).is_err() && said(libc::ENOMEM).is_err());
    }
}
