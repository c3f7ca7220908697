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
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};

/// By which the kernel's routes that were made here are told from others.
const PROTOCOL: u8 = 72;
/// The kernel's table of this host's own addresses.
const LOCAL_TABLE: u32 = 255;

/// Whether the kernel has WireGuard, by what it said when it was to make a device: without the module it knows no such kind.
fn has_wireguard(made: Result<(), NetError>) -> Result<bool, NetError> {
    match made {
        Err(NetError::Kernel { source, .. }) if source.raw_os_error() == Some(libc::EOPNOTSUPP) => Ok(false),
        other => other.map(|()| true),
    }
}

/// Which packets a rule sends to its table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Steered {
    /// What this host itself sends by UDP to this port.
    OwnUdp(u16),
    /// What bears this mark.
    Marked(u32),
    /// What comes in by this interface and is not for this host itself.
    From(String),
}

impl Steered {
    /// By which its rule is told from others.
    fn attributes(&self) -> Vec<RuleAttribute> {
        match self {
            // What the host itself sends comes in by its loopback, as far as rules go.
            Self::OwnUdp(port) => vec![
                RuleAttribute::Iifname("lo".to_owned()),
                RuleAttribute::IpProtocol(IpProtocol::Udp),
                RuleAttribute::DestinationPortRange(RulePortRange { start: *port, end: *port }),
            ],
            Self::Marked(mark) => vec![RuleAttribute::FwMark(*mark)],
            Self::From(interface) => vec![RuleAttribute::Iifname(interface.clone())],
        }
    }

    /// Whether this is its rule.
    fn is(&self, rule: &RuleMessage) -> bool {
        rule.header.action == RuleAction::ToTable && self.attributes().iter().all(|a| rule.attributes.contains(a))
    }
}

/// The rules that lead to a table. Their priority is its number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Steer {
    /// To which table; above 255, and below 32766, which is the main table's priority.
    pub table: u32,
    /// Which packets.
    pub what: Vec<Steered>,
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

fn priority_of(rule: &RuleMessage) -> u32 {
    let said = rule.attributes.iter().find_map(|a| match a {
        RuleAttribute::Priority(priority) => Some(*priority),
        _ => None,
    });
    said.unwrap_or(0)
}

/// Whether what is for this host itself is looked for before the rules of this priority are, as it is unless somebody has changed that.
fn is_local_first(rules: &[RuleMessage], priority: u32) -> bool {
    rules.iter().any(|rule| table_of_rule(rule) == LOCAL_TABLE && priority_of(rule) < priority)
}

/// For which host a route is; none: for any.
fn host_of(route: &RouteMessage) -> Option<Ipv4Addr> {
    route.attributes.iter().find_map(|a| match a {
        RouteAttribute::Destination(RouteAddress::Inet(ip)) => Some(*ip),
        _ => None,
    })
}

/// Where a route leads; none: as none does that was made here.
fn leads_of(route: &RouteMessage) -> Option<Leads> {
    let (mut link, mut neighbour, mut mtu) = (None, None, 0);
    for attribute in &route.attributes {
        match attribute {
            RouteAttribute::Oif(index) => link = Some(LinkIndex(*index)),
            RouteAttribute::Gateway(RouteAddress::Inet(ip)) => neighbour = Some(*ip),
            RouteAttribute::Metrics(metrics) => {
                let said = metrics.iter().find_map(|metric| match metric {
                    RouteMetric::Mtu(mtu) => Some(*mtu),
                    _ => None,
                });
                mtu = said.unwrap_or(0);
            }
            _ => {}
        }
    }
    match (route.header.kind, link, neighbour) {
        (RouteType::BlackHole, ..) => Some(Leads::Nowhere),
        (RouteType::Throw, ..) => Some(Leads::Elsewhere),
        (RouteType::Unicast, Some(link), None) => Some(Leads::Onto(link)),
        (RouteType::Unicast, Some(link), Some(neighbour)) => Some(Leads::Via(neighbour, link, mtu)),
        _ => None,
    }
}

/// A table's route, for the kernel.
fn route(table: u32, steering: Steering) -> RouteMessage {
    let (ip, length) = steering.to.map_or((Ipv4Addr::UNSPECIFIED, 0), |ip| (ip, 32));
    let new = RouteMessageBuilder::<Ipv4Addr>::new()
        .protocol(RouteProtocol::from(PROTOCOL))
        .table_id(table)
        .destination_prefix(ip, length);
    let new = match steering.leads {
        Leads::Onto(link) => new.output_interface(link.0).scope(RouteScope::Link),
        Leads::Via(neighbour, link, mtu) => {
            let mut new = new.gateway(neighbour).output_interface(link.0).onlink();
            new.get_mut().attributes.push(RouteAttribute::Metrics(vec![RouteMetric::Mtu(mtu)]));
            new
        }
        Leads::Nowhere => new.kind(RouteType::BlackHole),
        Leads::Elsewhere => new.kind(RouteType::Throw),
    };
    new.build()
}

impl Net {
    async fn rules(&self) -> Result<Vec<RuleMessage>, NetError> {
        let _alone = self.listing().await;
        let all = self.handle.rule().get(IpVersion::V4).execute();
        all.try_collect().await.map_err(failed("list", "rules"))
    }

    async fn routes_of(&self, table: u32) -> Result<Vec<RouteMessage>, NetError> {
        let mut ask = RouteMessage::default();
        ask.header.address_family = AddressFamily::Inet;
        let _alone = self.listing().await;
        let all = self.handle.route().get(ask).execute();
        let all: Vec<RouteMessage> = all.try_collect().await.map_err(failed("list", "routes"))?;
        Ok(all.into_iter().filter(|route| table_of(route) == table).collect())
    }

    /// Rules of IPv6 of this priority; none where the kernel has no IPv6.
    async fn ipv6_rules(&self, priority: u32) -> Vec<RuleMessage> {
        let _alone = self.listing().await;
        let all = self.handle.rule().get(IpVersion::V6).execute();
        let all: Vec<RuleMessage> = all.try_collect().await.unwrap_or_default();
        let of = |rule: &RuleMessage| rule.attributes.contains(&RuleAttribute::Priority(priority));
        all.into_iter().filter(of).collect()
    }

    /// What this host itself sends by UDP over IPv6 to this port is lost, or not any more; the rule's priority is its only name. Whether it
    /// was otherwise.
    ///
    /// # Errors
    /// The kernel's; where it has no IPv6, there is nothing to do.
    pub async fn block_ipv6(&self, port: u16, priority: u32, whether: bool) -> Result<bool, NetError> {
        let there = self.ipv6_rules(priority).await;
        if whether && there.is_empty() {
            let mut new = self.handle.rule().add().v6().priority(priority).action(RuleAction::Blackhole);
            new = new.input_interface("lo");
            let message = new.message_mut();
            message.header.table = 0;
            message.attributes.push(RuleAttribute::IpProtocol(IpProtocol::Udp));
            message.attributes.push(RuleAttribute::DestinationPortRange(RulePortRange { start: port, end: port }));
            return match new.execute().await.map_err(failed("add rule of IPv6 of", &priority.to_string())) {
                // It is there where rules could not be listed.
                Err(NetError::Kernel { source, .. })
                    if matches!(source.raw_os_error(), Some(libc::EAFNOSUPPORT | libc::EOPNOTSUPP | libc::EEXIST)) =>
                {
                    Ok(false)
                }
                other => other.map(|()| true),
            };
        }
        let mut changed = false;
        for rule in there.into_iter().filter(|_| !whether) {
            let gone = self.handle.rule().del(rule).execute().await;
            gone.map_err(failed("remove rule of IPv6 of", &priority.to_string()))?;
            changed = true;
        }
        Ok(changed)
    }

    /// These rules lead to the table, each once, and no others; whether it was otherwise. One of [`Steered::From`] takes all that comes in
    /// where this host's own addresses are not looked for first: it is left out there.
    ///
    /// # Errors
    /// The kernel's.
    pub async fn set_rules(&self, steer: &Steer) -> Result<bool, NetError> {
        let table = steer.table;
        let all = self.rules().await?;
        let local_first = is_local_first(&all, table);
        let wanted = steer.what.iter().filter(|what| local_first || !matches!(what, Steered::From(_)));
        let wanted: Vec<&Steered> = wanted.collect();
        let ours = |rule: &RuleMessage| priority_of(rule) == table && wanted.iter().any(|what| what.is(rule));
        let there = all.into_iter().filter(|rule| table_of_rule(rule) == table);
        let (there, left): (Vec<RuleMessage>, Vec<RuleMessage>) = there.partition(ours);
        let mut changed = false;
        for what in wanted.iter().filter(|what| !there.iter().any(|rule| what.is(rule))) {
            let mut new = self.handle.rule().add().v4().table_id(table).priority(table).action(RuleAction::ToTable);
            new.message_mut().attributes.extend(what.attributes());
            new.execute().await.map_err(|e| failed("add rule for table", &table.to_string())(e))?;
            changed = true;
        }
        for rule in left {
            let gone = self.handle.rule().del(rule).execute().await;
            gone.map_err(|e| failed("remove rule for table", &table.to_string())(e))?;
            changed = true;
        }
        Ok(changed)
    }

    /// No rule leads to the table, and it has no route.
    ///
    /// # Errors
    /// The kernel's.
    pub async fn drop_table(&self, table: u32) -> Result<(), NetError> {
        self.set_rules(&Steer { table, what: vec![] }).await?;
        self.set_table(table, &[]).await.map(|_| ())
    }

    /// Makes these the table's routes; those that stay are not touched, and what changes is changed in one step each. Whether they were
    /// others. What the kernel refuses keeps none of the others back.
    ///
    /// # Errors
    /// The kernel's first.
    pub async fn set_table(&self, table: u32, wanted: &[Steering]) -> Result<bool, NetError> {
        let wanted: BTreeMap<Option<Ipv4Addr>, Leads> = wanted.iter().map(|one| (one.to, one.leads)).collect();
        let (mut lacking, mut left) = (wanted.clone(), vec![]);
        for route in self.routes_of(table).await? {
            let to = host_of(&route);
            match wanted.get(&to) {
                Some(leads) if leads_of(&route) == Some(*leads) => {
                    lacking.remove(&to);
                }
                // It is replaced.
                Some(_) => {}
                None => left.push(route),
            }
        }
        let (changed, mut refused) = (!lacking.is_empty() || !left.is_empty(), None);
        // The one for all that have no other comes first.
        for (to, leads) in lacking {
            let set = self.handle.route().add(route(table, Steering { to, leads })).replace().execute().await;
            if let Err(error) = set {
                let to = to.map_or_else(|| "any host".to_owned(), |ip| ip.to_string());
                refused.get_or_insert(failed("set route to", &to)(error));
            }
        }
        for route in left {
            if let Err(error) = self.handle.route().del(route).execute().await {
                refused.get_or_insert(failed("remove route of table", &table.to_string())(error));
            }
        }
        refused.map_or(Ok(changed), Err)
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

    #[test]
    fn a_route_is_read_as_it_was_made_and_what_nobody_makes_here_is_not_taken_for_one() {
        let ip = Ipv4Addr::new(10, 0, 0, 2);
        let all = [Leads::Onto(LinkIndex(7)), Leads::Via(ip, LinkIndex(7), 1420), Leads::Nowhere, Leads::Elsewhere];
        for leads in all {
            let made = route(4789, Steering { to: Some(ip), leads });
            assert_eq!((table_of(&made), host_of(&made), leads_of(&made)), (4789, Some(ip), Some(leads)));
        }
        let mut other = route(4789, Steering { to: Some(ip), leads: Leads::Nowhere });
        other.header.kind = RouteType::Unreachable;
        assert_eq!(leads_of(&other), None);
    }

    #[test]
    fn a_rule_is_known_by_all_that_it_asks_and_what_comes_in_is_taken_only_behind_the_hosts_own_addresses() {
        let rule = |attributes: Vec<RuleAttribute>| {
            let mut rule = RuleMessage::default();
            (rule.header.action, rule.attributes) = (RuleAction::ToTable, attributes);
            rule
        };
        let all = [Steered::OwnUdp(4789), Steered::Marked(7), Steered::From("eth0".to_owned())];
        for (i, one) in all.iter().enumerate() {
            // The kernel tells more of it.
            let mut seen = one.attributes();
            seen.push(RuleAttribute::SuppressPrefixLen(u32::MAX));
            for (j, other) in all.iter().enumerate() {
                assert_eq!(other.is(&rule(seen.clone())), i == j, "{one:?}, {other:?}");
            }
            seen.remove(0);
            assert!(!one.is(&rule(seen)), "{one:?}");
        }
        assert!(!Steered::OwnUdp(4790).is(&rule(Steered::OwnUdp(4789).attributes())));

        let local = |priority: Option<u32>| {
            let mut attributes = vec![RuleAttribute::Table(LOCAL_TABLE)];
            attributes.extend(priority.map(RuleAttribute::Priority));
            [rule(attributes)]
        };
        assert!(is_local_first(&local(None), 4790) && is_local_first(&local(Some(10)), 4790));
        assert!(!is_local_first(&local(Some(32765)), 4790) && !is_local_first(&[], 4790));
    }
}
