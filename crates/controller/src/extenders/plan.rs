//! What is to be so, from the record, the hosts and what they say: who carries, which tunnels there are, when keys are made anew.
//!
//! *Rotation*: beside a tunnel another one is made, of the next epoch, with ports and keys of its own. The nodes go over to it when it has worked
//! for a while. When both ends say that it is up and that nothing is sent into the old one any more, the old one goes. Frames that are
//! under way in the old one arrive: it is taken away only then. Each two hosts do so by themselves: where one is silent, or they are still at it, it
//! waits, and keeps nobody else waiting.

use super::{ExtenderRecord, KnownHost, TunnelEnd, TunnelRecord};
use godwit_api::extender::{
    ExtenderEnd, ExtenderOrder, ExtenderOrders, ExtenderState, ExtenderTunnel, LocalTunnel, MOST_CARRIERS, PORTS,
    TunnelOrder,
};
use godwit_api::host::PeerHost;
use godwit_api::{ApiError, Name};
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

/// How long keys are used. WireGuard agrees on session keys every two minutes by itself; this bounds what a stolen private key is good for.
pub const KEYS_LAST_S: u64 = 24 * 3600;
/// Addresses for probes: two a tunnel, from here on. Link-local, and away from where clouds serve their metadata.
const FIRST_ADDRESS: u32 = u32::from_be_bytes([169, 254, 64, 0]);
/// So many tunnels have addresses of their own.
const ADDRESSES: u32 = 8192;

/// The ports in use, by host.
pub type Slots = BTreeSet<(Name, u16)>;
/// What a host says of a tunnel.
pub type Says<'a> = &'a dyn Fn(&Name, u32) -> Option<LocalTunnel>;

/// The ports that tunnels have.
pub fn slots(records: &[ExtenderRecord]) -> Slots {
    let tunnels = records.iter().flat_map(|record| &record.tunnels);
    tunnels.flat_map(|tunnel| &tunnel.ends).map(|end| (end.host.clone(), end.slot)).collect()
}

fn hosts_of<'a>(
    known: &'a BTreeMap<Name, KnownHost>,
    site: &'a Name,
) -> impl Iterator<Item = (&'a Name, &'a KnownHost)> {
    known.iter().filter(move |(_, host)| &host.site == site)
}

fn ipv4(peer: &PeerHost) -> Option<Ipv4Addr> {
    match peer.underlay {
        IpAddr::V4(ip) => Some(ip),
        IpAddr::V6(_) => None,
    }
}

/// Whether a host can carry: it says so, and its wires are on IPv4.
fn can_carry(host: &KnownHost) -> bool {
    host.offer.is_some() && ipv4(&host.peer).is_some()
}

fn is_reachable(record: &ExtenderRecord, host: &Name) -> bool {
    record.known.get(host).and_then(|host| host.offer).is_some_and(|offer| offer.address.is_some())
}

/// What keeps two sites from being joined at all.
pub fn hindrance(record: &ExtenderRecord) -> Option<String> {
    let mut reachable = false;
    for site in &record.sites {
        if let Some((host, _)) = hosts_of(&record.known, site).find(|(_, host)| ipv4(&host.peer).is_none()) {
            return Some(format!("`{host}` has an IPv6 address for tunnels; extenders carry wires on IPv4 only"));
        }
        if !hosts_of(&record.known, site).any(|(_, host)| can_carry(host)) {
            return Some(format!("no host of `{site}` that answers can carry an extender"));
        }
        reachable |= hosts_of(&record.known, site).any(|(host, _)| is_reachable(record, host));
    }
    let [a, b] = &record.sites;
    (!reachable)
        .then(|| format!("neither of `{a}` and `{b}` can be reached from the other: all their hosts only speak first"))
}

/// Whether some two hosts are making new keys.
pub fn is_rotating(record: &ExtenderRecord) -> bool {
    record.tunnels.iter().any(|tunnel| !is_only(record, tunnel))
}

/// Whether some two hosts can begin to make new keys.
pub fn can_rotate(record: &ExtenderRecord, says: Says<'_>) -> bool {
    record.tunnels.iter().any(|tunnel| can_begin(record, tunnel, says))
}

/// Whether another one can be made beside a tunnel: there is none yet, and both ends speak, without which this one would never go.
fn can_begin(record: &ExtenderRecord, tunnel: &TunnelRecord, says: Says<'_>) -> bool {
    is_only(record, tunnel) && tunnel.ends.iter().all(|end| says(&end.host, tunnel.id).is_some())
}

/// Whether it is the only one between its hosts.
fn is_only(record: &ExtenderRecord, tunnel: &TunnelRecord) -> bool {
    !record.tunnels.iter().any(|other| other.id != tunnel.id && same_hosts(tunnel, other))
}

fn same_hosts(one: &TunnelRecord, other: &TunnelRecord) -> bool {
    (0..2).all(|i| one.ends[i].host == other.ends[i].host)
}

/// The record as it is to be now.
///
/// # Errors
/// No number can be had.
pub fn settle(
    record: &mut ExtenderRecord,
    known: &BTreeMap<Name, KnownHost>,
    says: Says<'_>,
    mut used: Slots,
    now_unix_s: u64,
    next: &mut dyn FnMut() -> Result<u32, ApiError>,
) -> Result<(), ApiError> {
    if record.state == ExtenderState::Disconnecting {
        return Ok(());
    }
    record.known.clone_from(known);
    for (side, site) in record.sites.iter().enumerate() {
        let able: Vec<Name> =
            hosts_of(&record.known, site).filter(|(_, host)| can_carry(host)).map(|(name, _)| name.clone()).collect();
        let carriers = &mut record.carriers[side];
        // Who carries goes on doing so: a change of carriers is a change of keys.
        carriers.retain(|host| able.contains(host));
        let fresh: Vec<Name> = able.into_iter().filter(|host| !carriers.contains(host)).collect();
        carriers.extend(fresh.into_iter().take(MOST_CARRIERS.saturating_sub(carriers.len())));
    }
    let carriers = record.carriers.clone();
    record.tunnels.retain(|tunnel| (0..2).all(|side| carriers[side].contains(&tunnel.ends[side].host)));
    drop_what_was_replaced(record, says);
    let rotates = record.rotate || now_unix_s.saturating_sub(record.keys_unix_s) >= KEYS_LAST_S;
    if rotates && can_rotate(record, says) {
        (record.rotate, record.keys_unix_s) = (false, now_unix_s);
        record.tunnels.iter_mut().for_each(|tunnel| tunnel.renew = true);
    }
    for a in &carriers[0] {
        for b in &carriers[1] {
            let between = |tunnel: &&TunnelRecord| tunnel.ends[0].host == *a && tunnel.ends[1].host == *b;
            let newest = record.tunnels.iter().filter(between).max_by_key(|tunnel| tunnel.epoch);
            let epoch = newest.map_or(1, |newest| newest.epoch + 1);
            let begins = newest.is_none_or(|newest| newest.renew && can_begin(record, newest, says));
            let can_meet = is_reachable(record, a) || is_reachable(record, b);
            if can_meet && begins {
                let Some(ends) = ends([a, b], &mut used) else { continue };
                record.tunnels.push(TunnelRecord { id: next()?, epoch, ends, renew: false });
            }
        }
    }
    Ok(())
}

/// Ends with ports that nobody else has; none while there are none.
fn ends(hosts: [&Name; 2], used: &mut Slots) -> Option<[TunnelEnd; 2]> {
    let mut end = |host: &Name| {
        let slot = (0..PORTS).find(|slot| !used.contains(&(host.clone(), *slot)))?;
        used.insert((host.clone(), slot));
        Some(TunnelEnd { host: host.clone(), slot, key: None })
    };
    Some([end(hosts[0])?, end(hosts[1])?])
}

/// A tunnel goes when a newer one between the same hosts is up at both ends, and nothing is sent into it at either.
fn drop_what_was_replaced(record: &mut ExtenderRecord, says: Says<'_>) {
    let both = |tunnel: &TunnelRecord, is: &dyn Fn(&LocalTunnel) -> bool| {
        tunnel.ends.iter().all(|end| says(&end.host, tunnel.id).is_some_and(|local| is(&local)))
    };
    let replaced: Vec<u32> = record
        .tunnels
        .iter()
        .filter(|old| {
            let newer = |other: &&TunnelRecord| same_hosts(old, other) && other.epoch > old.epoch;
            let up = record.tunnels.iter().filter(newer).any(|other| both(other, &|local| local.up));
            up && both(old, &|local| !local.in_use)
        })
        .map(|old| old.id)
        .collect();
    record.tunnels.retain(|tunnel| !replaced.contains(&tunnel.id));
}

fn endpoint(record: &ExtenderRecord, end: &TunnelEnd) -> Option<SocketAddr> {
    let offer = record.known.get(&end.host)?.offer?;
    Some((offer.address?, offer.port.saturating_add(end.slot)).into())
}

/// All that a host has to know.
pub fn orders(
    host: &Name,
    site: &Name,
    records: &[ExtenderRecord],
    known: &BTreeMap<Name, KnownHost>,
) -> ExtenderOrders {
    let mine = records.iter().filter(|r| r.state != ExtenderState::Disconnecting && r.sites.contains(site));
    let mine: Vec<(&ExtenderRecord, usize)> = mine.map(|r| (r, usize::from(r.sites[1] == *site))).collect();
    if mine.is_empty() {
        return ExtenderOrders::default();
    }
    let far = |other: &Name| mine.iter().any(|(record, side)| &record.sites[1 - side] == other);
    let clear = known.values().filter(|host| !far(&host.site)).filter_map(|host| ipv4(&host.peer)).collect();
    ExtenderOrders { clear, extenders: mine.iter().map(|(record, side)| order(host, record, *side, known)).collect() }
}

fn order(host: &Name, record: &ExtenderRecord, side: usize, known: &BTreeMap<Name, KnownHost>) -> ExtenderOrder {
    let (own, other) = (&record.sites[side], &record.sites[1 - side]);
    let carriers = record.carriers[side].iter().filter_map(|name| known.get(name)).map(|host| host.peer.clone());
    let tunnels = record.tunnels.iter().filter(|tunnel| &tunnel.ends[side].host == host);
    ExtenderOrder {
        id: record.id,
        site: other.clone(),
        beyond: hosts_of(known, other).filter_map(|(_, host)| ipv4(&host.peer)).collect(),
        mates: hosts_of(known, own).map(|(_, host)| host.peer.clone()).collect(),
        carriers: carriers.collect(),
        tunnels: tunnels.map(|tunnel| tunnel_order(record, tunnel, side)).collect(),
    }
}

fn tunnel_order(record: &ExtenderRecord, tunnel: &TunnelRecord, side: usize) -> TunnelOrder {
    let (here, there) = (&tunnel.ends[side], &tunnel.ends[1 - side]);
    let rank = record.carriers[1 - side].iter().position(|host| host == &there.host).unwrap_or(MOST_CARRIERS);
    let first = FIRST_ADDRESS + 2 * (tunnel.id % ADDRESSES);
    let address = |side: usize| Ipv4Addr::from(first + u32::from(side == 1));
    TunnelOrder {
        id: tunnel.id,
        epoch: tunnel.epoch,
        peer: there.host.clone(),
        rank: u32::try_from(rank).unwrap_or(u32::MAX),
        listen: endpoint(record, here).map(|at| at.port()),
        endpoint: endpoint(record, there),
        key: there.key.clone(),
        addresses: [address(side), address(1 - side)],
    }
}

/// The tunnels, with what their hosts say.
pub fn tunnels(record: &ExtenderRecord, says: impl Fn(&Name, u32) -> Option<LocalTunnel>) -> Vec<ExtenderTunnel> {
    let shown = |tunnel: &TunnelRecord| {
        let end = |end: &TunnelEnd| ExtenderEnd {
            host: end.host.clone(),
            endpoint: endpoint(record, end),
            local: says(&end.host, tunnel.id),
        };
        ExtenderTunnel { id: tunnel.id, epoch: tunnel.epoch, ends: [end(&tunnel.ends[0]), end(&tunnel.ends[1])] }
    };
    record.tunnels.iter().map(shown).collect()
}

/// Whether a tunnel is up, as far as anybody says.
pub fn is_up(tunnel: &ExtenderTunnel) -> bool {
    let said: Vec<bool> = tunnel.ends.iter().filter_map(|end| end.local.as_ref()).map(|local| local.up).collect();
    !said.is_empty() && said.iter().all(|up| *up)
}

/// What is wrong. `says`: none of a host that did not answer, else what is wrong there.
pub fn problems(
    record: &ExtenderRecord,
    tunnels: &[ExtenderTunnel],
    says: impl Fn(&Name) -> Option<Option<String>>,
) -> Vec<String> {
    let mut found: Vec<String> = hindrance(record).into_iter().collect();
    for tunnel in tunnels {
        let [a, b] = &tunnel.ends;
        for end in &tunnel.ends {
            if let Some(error) = end.local.as_ref().and_then(|local| local.error.as_ref()) {
                found.push(format!("the tunnel {} between `{}` and `{}`: {error}", tunnel.id, a.host, b.host));
            }
        }
        let newer = |other: &ExtenderTunnel| {
            other.epoch > tunnel.epoch && (0..2).all(|i| other.ends[i].host == tunnel.ends[i].host)
        };
        if !is_up(tunnel) && !tunnels.iter().any(newer) {
            let at: Vec<String> = tunnel.ends.iter().filter_map(|end| end.endpoint).map(|at| at.to_string()).collect();
            let what = format!("the tunnel {} between `{}` and `{}` is down", tunnel.id, a.host, b.host);
            found.push(format!("{what}: see that UDP passes to {}, and that both nodes run", at.join(" and ")));
        }
    }
    for site in &record.sites {
        for (host, _) in hosts_of(&record.known, site) {
            match says(host) {
                None => found.push(format!("`{host}` of `{site}` does not answer: see that its node runs")),
                Some(Some(error)) => found.push(format!("`{host}`: {error}")),
                Some(None) => {}
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use godwit_api::extender::ExtenderOffer;
    use godwit_api::host::LinkAddresses;
    use godwit_units::Bytes;

    fn name(text: &str) -> Name {
        text.parse().unwrap()
    }

    fn host(site: &str, number: u8, offer: Option<Option<u8>>) -> KnownHost {
        let at = |port| SocketAddr::from(([10, 0, 0, number], port));
        let link = LinkAddresses { control: at(1), disk: at(2), memory: at(3) };
        let peer = PeerHost { name: name("x"), link, underlay: [10, 0, 0, number].into() };
        let offer = offer.map(|at| ExtenderOffer { address: at.map(|n| IpAddr::from([192, 0, 2, n])), port: 51820 });
        KnownHost { site: name(site), peer, offer }
    }

    /// Three that can carry at `east`, one of them behind an address translation, one that cannot; two behind one at `west`.
    fn hosts() -> BTreeMap<Name, KnownHost> {
        let all = [
            ("e1", host("east", 1, Some(Some(1)))),
            ("e2", host("east", 2, Some(None))),
            ("e3", host("east", 3, Some(Some(3)))),
            ("e4", host("east", 4, None)),
            ("w1", host("west", 11, Some(None))),
            ("w2", host("west", 12, Some(None))),
            ("n1", host("north", 21, None)),
        ];
        all.into_iter().map(|(host, known)| (name(host), known)).collect()
    }

    fn record() -> ExtenderRecord {
        ExtenderRecord {
            id: 1,
            sites: [name("east"), name("west")],
            state: ExtenderState::Connecting,
            known: hosts(),
            carriers: [vec![], vec![]],
            tunnels: vec![],
            keys_unix_s: 0,
            rotate: false,
        }
    }

    fn says(up: bool, in_use: bool) -> LocalTunnel {
        LocalTunnel {
            id: 0,
            key: String::new(),
            device: String::new(),
            up,
            in_use,
            engine: String::new(),
            endpoint: None,
            handshake_unix_s: None,
            received: Bytes(0),
            sent: Bytes(0),
            rtt_ms: None,
            error: None,
        }
    }

    fn settled(mut record: ExtenderRecord, says: Says<'_>, now: u64) -> ExtenderRecord {
        let mut last = record.tunnels.iter().map(|tunnel| tunnel.id).max().unwrap_or(0);
        let (used, known) = (slots(std::slice::from_ref(&record)), record.known.clone());
        let mut next = || {
            last += 1;
            Ok(last)
        };
        settle(&mut record, &known, says, used, now, &mut next).unwrap();
        record
    }

    #[test]
    fn two_hosts_of_each_site_carry_and_those_that_can_meet_have_a_tunnel_with_a_port_of_its_own() {
        let record = settled(record(), &|_, _| None, 0);
        assert_eq!(record.carriers, [vec![name("e1"), name("e2")], vec![name("w1"), name("w2")]]);
        let ends: Vec<_> = record.tunnels.iter().map(|t| (t.ends[0].host.as_str(), t.ends[1].host.as_str())).collect();
        assert_eq!(ends, [("e1", "w1"), ("e1", "w2")], "two that only speak first never meet");
        assert_eq!(record.tunnels.iter().map(|t| t.ends[0].slot).collect::<Vec<_>>(), [0, 1]);
        assert_eq!(settled(record.clone(), &|_, _| None, 1), record, "nothing changes by itself");

        let mut without = record.clone();
        without.known.remove(&name("e1"));
        let after = settled(without, &|_, _| None, 1);
        assert_eq!(after.carriers[0], [name("e2"), name("e3")]);
        assert!(after.tunnels.iter().all(|t| t.ends[0].host == name("e3")));
    }

    #[test]
    fn each_host_is_told_its_own_and_what_it_is_not_told_of_is_nobodys_in_clear() {
        let record = settled(record(), &|_, _| None, 0);
        let of =
            |host: &str, site: &str| orders(&name(host), &name(site), std::slice::from_ref(&record), &record.known);
        let e1 = of("e1", "east");
        let ip = |n: u8| Ipv4Addr::from([10, 0, 0, n]);
        assert_eq!(e1.clear, [ip(1), ip(2), ip(3), ip(4), ip(21)]);
        assert_eq!(e1.extenders[0].beyond, [ip(11), ip(12)]);
        let first = &e1.extenders[0].tunnels[0];
        assert_eq!((first.listen, first.endpoint), (Some(51820), None));
        let w1 = of("w1", "west");
        let same = &w1.extenders[0].tunnels[0];
        assert_eq!((same.id, same.listen), (first.id, None));
        assert_eq!(same.endpoint, Some("192.0.2.1:51820".parse().unwrap()));
        assert_eq!((same.addresses[0], same.addresses[1]), (first.addresses[1], first.addresses[0]));
        assert!(of("e4", "east").extenders[0].tunnels.is_empty());
        assert_eq!(of("n1", "north"), ExtenderOrders::default());
        let gone = ExtenderRecord { state: ExtenderState::Disconnecting, ..record.clone() };
        assert_eq!(orders(&name("e1"), &name("east"), &[gone], &record.known), ExtenderOrders::default());
    }

    #[test]
    fn an_old_tunnel_goes_only_when_both_ends_have_gone_over_to_the_new_one() {
        let before = settled(record(), &|_, _| None, 0);
        let rotating = settled(before.clone(), &|_, _| Some(says(true, true)), KEYS_LAST_S);
        assert_eq!(
            rotating.tunnels.iter().map(|t| (t.id, t.epoch)).collect::<Vec<_>>(),
            [(1, 1), (2, 1), (3, 2), (4, 2)]
        );
        assert_eq!(rotating.keys_unix_s, KEYS_LAST_S);
        let after = |says: Says<'_>| settled(rotating.clone(), says, KEYS_LAST_S + 60).tunnels.len();
        assert_eq!(after(&|_, _| None), 4, "nobody says anything");
        assert_eq!(after(&|_, id| Some(says(true, id < 3))), 4, "the old ones are in use");
        assert_eq!(after(&|host, id| Some(says(true, id < 3 && host == &name("w1")))), 3, "one end still uses one");
        assert_eq!(after(&|_, id| Some(says(id < 3, id >= 3))), 4, "the new ones are not up");
        assert_eq!(after(&|_, id| Some(says(true, id >= 3))), 2);
        let asked = settled(ExtenderRecord { rotate: true, ..before }, &|_, _| Some(says(true, true)), 5);
        assert!(asked.tunnels.len() == 4 && !asked.rotate);
        assert!(is_rotating(&asked));
    }

    #[test]
    fn two_hosts_make_new_keys_whoever_else_is_silent_and_those_that_were_silent_do_when_they_speak() {
        let epochs = |record: &ExtenderRecord| -> Vec<(u32, u32)> {
            record.tunnels.iter().map(|tunnel| (tunnel.id, tunnel.epoch)).collect()
        };
        let before = settled(record(), &|_, _| None, 0);
        // Tunnel 1 ends at `w1`, and 2 at `w2`, which is silent.
        let without_w2 = |host: &Name, id: u32| (host != &name("w2")).then(|| says(true, id != 1));
        let first = settled(before.clone(), &without_w2, KEYS_LAST_S);
        assert_eq!((epochs(&first), first.keys_unix_s), (vec![(1, 1), (2, 1), (3, 2)], KEYS_LAST_S));
        // The next day.
        let done = settled(first, &without_w2, KEYS_LAST_S + 60);
        assert_eq!(epochs(&done), [(2, 1), (3, 2)]);
        assert!(can_rotate(&done, &without_w2) && !is_rotating(&done));
        let second = settled(done, &without_w2, 2 * KEYS_LAST_S);
        assert_eq!(epochs(&second), [(2, 1), (3, 2), (4, 3)]);

        // It is silent with two tunnels: the others' keys are asked for all the same.
        let half = settled(before.clone(), &|_, _| Some(says(true, true)), KEYS_LAST_S);
        let half = settled(half, &without_w2, KEYS_LAST_S + 60);
        assert_eq!(epochs(&half), [(2, 1), (3, 2), (4, 2)]);
        assert!(is_rotating(&half) && can_rotate(&half, &without_w2));
        let asked = settled(ExtenderRecord { rotate: true, ..half }, &without_w2, KEYS_LAST_S + 90);
        assert_eq!((epochs(&asked), asked.rotate), (vec![(2, 1), (3, 2), (4, 2), (5, 3)], false));

        // It speaks again.
        let back = settled(second, &|_, _| Some(says(true, true)), 2 * KEYS_LAST_S + 60);
        assert_eq!(epochs(&back), [(2, 1), (3, 2), (4, 3), (5, 2)]);
        // Nobody can begin: it stays wanted.
        assert!(!can_rotate(&before, &|_, _| None));
        let wanted = settled(ExtenderRecord { rotate: true, ..before }, &|_, _| None, 2 * KEYS_LAST_S);
        assert!(wanted.rotate && wanted.keys_unix_s == 0 && epochs(&wanted) == [(1, 1), (2, 1)]);
    }

    #[test]
    fn what_keeps_two_sites_apart_is_said() {
        let mut record = record();
        assert_eq!(hindrance(&record), None);
        for host in record.known.values_mut() {
            host.offer = host.offer.map(|offer| ExtenderOffer { address: None, ..offer });
        }
        assert!(hindrance(&record).unwrap().contains("only speak first"));
        record.known.retain(|_, host| host.site != name("west"));
        assert!(hindrance(&record).unwrap().contains("no host of `west`"));
    }
}
