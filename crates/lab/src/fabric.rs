//! Sites, and the WAN between them.
//!
//! ```text
//!   site illinois                     emulator's namespace                      site texas
//!   br0 ── vx0 ┐                                                              ┌ vx0 ── br0
//!    │         wan ── wan1 ═══ p0-1 ──[ rate, delay, loss ]── p1-0 ═══ wan0 ── wan        │
//!   tap-web    172.31.0.1                                          172.31.0.2          tap-web
//! ```
//!
//! Each site is a namespace with one underlay address; a veth for each other site leads into the emulator's namespace,
//! where a `godwit_wan::Path` joins the two ends. There is no other way between sites: whatever one knows of another
//! crossed the WAN and was counted there. Neighbours and forwarding entries are fixed, so that no ARP adds a round trip
//! to a measurement.
//!
//! The veths of a site are ports of one bridge that carries the underlay address. Routes straight over the veths would
//! be simpler, but the kernel's VXLAN caches a route with each learned entry and keeps it when the entry moves to another
//! site: after a guest's move, frames for its new site would leave by the old site's veth, for ever.
//!
//! The guests' network is one stretched layer-2 segment: a bridge in each site, joined by VXLAN with head-end
//! replication. This is what an operator without Godwit would have; the network identity of a guest follows by QEMU's
//! own announcements and the bridges' learning.
//!
//! A site may have a second host (`carriers = 2`), a namespace of its own on the site's underlay: its cable is one more port of the bridge `wan`.
//!
//! With `network = "gateway"` that segment is not there: the sites' bridges are joined by nothing, and guests are reached
//! from the last site alone, whose bridge is their gateway's.

use crate::ns::Namespace;
use crate::scenario::{Network, PathChange, Scenario, same_pair};
use anyhow::{Context, Result, bail};
use godwit_wan::{Class, Classifier, Counters, Offload, PathSpec, set_segmentation};
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};

/// The file in a host's folder that has the number of its network namespace, by which it is found from outside.
pub const NAMESPACE: &str = "namespace";
/// Port of QEMU's migration stream: class memory.
pub const MEMORY_PORT: u16 = 4444;
/// Port of NBD: class disk.
pub const DISK_PORT: u16 = 10809;
/// TCP port of Godwit's controller: class control.
pub const CONTROLLER_PORT: u16 = 7400;
/// TCP port of a node's API: class control.
pub const NODE_PORT: u16 = 7410;
/// UDP port of the link's control lane between nodes: class control. Its other lanes are on [`DISK_PORT`] and [`MEMORY_PORT`].
pub const LINK_PORT: u16 = 7411;
/// Port of VXLAN, all that guests and their clients say: class client.
pub const VXLAN_PORT: u16 = 4789;
/// UDP ports of extenders' tunnels: class tunnel, on the paths that extenders join.
pub const TUNNEL_PORTS: std::ops::RangeInclusive<u16> = 51820..=51835;
/// MTU of the guests' segment: the underlay's 1500 less VXLAN's 50.
pub const GUEST_MTU: u16 = 1450;
/// Length of the underlay's prefix: first hosts are in 172.31.0.0/24, second ones in 172.31.1.0/24.
const UNDERLAY_PREFIX: u8 = 16;
/// First of the ports that the lab counts as memory; several VMs that move at once use one each.
const MEMORY_PORTS: std::ops::RangeInclusive<u16> = MEMORY_PORT..=MEMORY_PORT + 55;
/// As [`MEMORY_PORTS`], for disks.
const DISK_PORTS: std::ops::RangeInclusive<u16> = DISK_PORT..=DISK_PORT + 55;

/// A site under construction or use; or the second host of one, which has the same but guests and clients.
#[derive(Debug)]
pub struct Site {
    /// Its name.
    pub name: String,
    /// Its namespace.
    pub ns: Namespace,
    /// The only folder below the work folder that can be seen inside.
    pub folder: PathBuf,
    /// Its address on the WAN.
    pub underlay: Ipv4Addr,
    /// Its own address on the guests' segment, from which clients speak.
    pub client: Ipv4Addr,
}

impl Site {
    /// The folder in memory that goes with the site: sockets, guests' RAM. Only what is inside sees it.
    #[must_use]
    pub fn run_folder(&self) -> PathBuf {
        crate::sandbox::registry()
    }
}

/// The second host of a site.
#[derive(Debug)]
pub struct Second {
    /// The site's place among the sites.
    site: usize,
    /// The host.
    pub host: Site,
}

/// All sites and the paths between them.
#[derive(Debug)]
pub struct Fabric {
    // Paths first: they are dropped before the namespaces of the interfaces that they join.
    paths: Vec<(usize, usize, godwit_wan::Path)>,
    /// In the scenario's order.
    pub sites: Vec<Site>,
    /// How guests are reached.
    pub network: Network,
    /// Pairs of sites that extenders are to join.
    pub extenders: Vec<[String; 2]>,
    /// Hosts that carry beside the first of their site.
    pub seconds: Vec<Second>,
    _wan: Namespace,
}

impl Fabric {
    /// Builds the sites of a scenario below `work` and joins them.
    ///
    /// # Errors
    /// When the kernel refuses something; nothing that was made stays.
    pub fn build(scenario: &Scenario, work: &Path) -> Result<Self> {
        let wan = Namespace::new("wan")?;
        if let Some(processor) = scenario.wan.processor {
            wan.stay_on(processor)?;
        }
        let parent = work.join("sites");
        for site in &scenario.site {
            std::fs::create_dir_all(parent.join(site.name.get_ref()))?;
        }
        let mut sites = vec![];
        for (index, site) in scenario.site.iter().enumerate() {
            sites.push(build_site(index, site.name.get_ref(), &parent)?);
            if let Some(processor) = site.processor {
                sites[index].ns.stay_on(processor)?;
            }
            if scenario.network == Network::Switch {
                stretch(&sites[index])?;
            }
        }
        let extenders: Vec<_> = scenario.extender.iter().map(|extender| extender.between.get_ref().clone()).collect();
        let mut paths = vec![];
        for a in 0..sites.len() {
            for b in a + 1..sites.len() {
                let spec = scenario.path_spec(&sites[a].name, &sites[b].name);
                let seed = scenario.seed.wrapping_mul(1000).wrapping_add((a * 100 + b) as u64);
                let extended = extenders.iter().any(|pair| same_pair(pair, &sites[a].name, &sites[b].name));
                paths.push((a, b, join(&wan, (a, &sites[a]), (b, &sites[b]), spec, extended, seed)?));
            }
        }
        let seconds = build_seconds(scenario, &sites, &parent)?;
        for (index, site) in sites.iter().enumerate().filter(|_| scenario.network == Network::Switch) {
            let others = sites.iter().enumerate().filter(|(i, _)| *i != index);
            site.ns.bridge(others.map(|(_, o)| format!("fdb append 00:00:00:00:00:00 dev vx0 dst {}", o.underlay)))?;
        }
        Ok(Self { paths, sites, network: scenario.network, extenders, seconds, _wan: wan })
    }

    /// Two sites that a veth joins, with nothing between: to measure what is faster than the emulator.
    ///
    /// # Errors
    /// As [`Fabric::build`].
    pub fn direct<'a>(names: impl Iterator<Item = &'a str>, work: &Path) -> Result<Self> {
        let wan = Namespace::new("wan")?;
        let parent = work.join("sites");
        let mut sites = vec![];
        for (index, name) in names.enumerate() {
            std::fs::create_dir_all(parent.join(name))?;
            sites.push(build_site(index, name, &parent)?);
        }
        let [one, other] = sites.as_slice() else { bail!("a veth joins two sites, not {}", sites.len()) };
        one.ns.ip([
            format!("link add wan1 type veth peer name wan0 netns {}", other.ns.path().display()),
            "link set wan1 master wan up".into(),
        ])?;
        other.ns.ip(["link set wan0 master wan up"])?;
        Ok(Self { paths: vec![], sites, network: Network::Gateway, extenders: vec![], seconds: vec![], _wan: wan })
    }

    /// All hosts, the sites' first ones before the second ones, each with the name of its site.
    pub fn hosts(&self) -> impl Iterator<Item = (&str, &Site)> {
        let firsts = self.sites.iter().map(|site| (site.name.as_str(), site));
        firsts.chain(self.seconds.iter().map(|second| (self.sites[second.site].name.as_str(), &second.host)))
    }

    /// Whether a site's hosts carry an extender.
    #[must_use]
    pub fn carries(&self, site: &str) -> bool {
        self.extenders.iter().flatten().any(|name| name == site)
    }

    /// The site from whose segment a guest that runs in `site` is reached.
    ///
    /// # Panics
    /// As [`Fabric::site`].
    #[must_use]
    pub fn entrance(&self, site: &str) -> &Site {
        match self.network {
            Network::Switch => self.site(site),
            Network::Gateway => self.sites.last().expect("a scenario has sites"),
        }
    }

    /// The site of this name.
    ///
    /// # Panics
    /// When there is none; scenarios are checked for that.
    #[must_use]
    pub fn site(&self, name: &str) -> &Site {
        self.sites.iter().find(|s| s.name == name).expect("a checked scenario names only sites that exist")
    }

    /// The path between two sites.
    ///
    /// # Errors
    /// When the names are the same or unknown.
    pub fn path(&self, one: &str, other: &str) -> Result<&godwit_wan::Path> {
        let pair = [one.to_owned(), other.to_owned()];
        let found = self.paths.iter().find(|(a, b, _)| same_pair(&pair, &self.sites[*a].name, &self.sites[*b].name));
        match found {
            Some((_, _, path)) => Ok(path),
            None => bail!("there is no path between `{one}` and `{other}`"),
        }
    }

    /// Changes a path's figures, and the senders' segmentation with them.
    ///
    /// # Errors
    /// When the figures are out of range.
    pub fn change(&self, change: &PathChange) -> Result<()> {
        let [one, other] = change.between.get_ref();
        let path = self.path(one, other)?;
        let spec = change.apply(path.spec());
        let index = |name: &str| self.sites.iter().position(|s| s.name == name);
        let (a, b) = (index(one).context("unknown site")?, index(other).context("unknown site")?);
        segment(&self.sites[a], b, &spec)?;
        segment(&self.sites[b], a, &spec)?;
        Ok(path.set(spec)?)
    }

    /// Each path with its two sites' names.
    pub fn paths(&self) -> impl Iterator<Item = (&str, &str, &godwit_wan::Path)> {
        self.paths.iter().map(|(a, b, p)| (self.sites[*a].name.as_str(), self.sites[*b].name.as_str(), p))
    }

    /// Counters of the path between two sites.
    ///
    /// # Errors
    /// As [`Fabric::path`].
    pub fn counters(&self, one: &str, other: &str) -> Result<Counters> {
        Ok(self.path(one, other)?.counters())
    }
}

/// A host's namespace. Its folder, which is there, says which.
fn namespace(name: &str, parent: &Path) -> Result<Namespace> {
    let ns = Namespace::with_own_folder(name, parent, name)?;
    std::fs::write(parent.join(name).join(NAMESPACE), ns.number()?.to_string()).context("cannot name a namespace")?;
    Ok(ns)
}

fn build_site(index: usize, name: &str, parent: &Path) -> Result<Site> {
    let ns = namespace(name, parent)?;
    let number = u8::try_from(index + 1).expect("at most eight sites");
    let underlay = Ipv4Addr::new(172, 31, 0, number);
    let client = Ipv4Addr::new(10, 99, 255, number);
    // A bandwidth-delay product of 1 Gbit/s and 180 ms is 22 MiB; the default of 6 MiB would hold TCP back.
    ns.sysctl("net/ipv4/tcp_rmem", "4096 131072 67108864")?;
    ns.sysctl("net/ipv4/tcp_wmem", "4096 131072 67108864")?;
    ns.ip([
        "link add wan type bridge stp_state 0 forward_delay 0".into(),
        format!("link set wan address {} up", underlay_mac(index)),
        format!("address add {underlay}/{UNDERLAY_PREFIX} dev wan"),
        "link add br0 type bridge stp_state 0 forward_delay 0".into(),
        format!("link set br0 address 02:67:77:02:00:{number:02x} mtu {GUEST_MTU} up"),
        format!("address add {client}/16 dev br0"),
    ])?;
    Ok(Site { name: name.to_owned(), ns, folder: parent.join(name), underlay, client })
}

/// The second hosts of sites that have one; all hosts know them afterwards.
fn build_seconds(scenario: &Scenario, sites: &[Site], parent: &Path) -> Result<Vec<Second>> {
    let mut seconds: Vec<Second> = vec![];
    for (index, described) in scenario.site.iter().enumerate() {
        let Some(name) = described.second() else { continue };
        std::fs::create_dir_all(parent.join(&name))?;
        let second = Second { site: index, host: build_second(index, &name, &sites[index], parent)? };
        for (other, site) in sites.iter().enumerate() {
            introduce(&second, (other, site))?;
        }
        for other in &seconds {
            for (one, peer) in [(&second, other), (other, &second)] {
                neighbour(&one.host, &peer.host, &second_mac(peer.site))?;
            }
        }
        seconds.push(second);
    }
    Ok(seconds)
}

fn build_second(index: usize, name: &str, site: &Site, parent: &Path) -> Result<Site> {
    let ns = namespace(name, parent)?;
    let [_, _, _, number] = site.underlay.octets();
    let underlay = Ipv4Addr::new(172, 31, 1, number);
    site.ns.ip([
        format!("link add second type veth peer name wan netns {}", ns.path().display()),
        "link set second master wan up".into(),
    ])?;
    // Frames that only pass the site's bridge are no business of its first host's rules.
    let bridged = "net/bridge/bridge-nf-call-iptables";
    if Path::new("/proc/sys").join(bridged).exists() {
        site.ns.sysctl(bridged, "0")?;
    }
    ns.ip([
        format!("link set wan address {} up", second_mac(index)),
        format!("address add {underlay}/{UNDERLAY_PREFIX} dev wan"),
    ])?;
    Ok(Site { name: name.to_owned(), ns, folder: parent.join(name), underlay, client: site.client })
}

/// A second host and a site's first one know each other, and that site's bridge knows where the second one's frames go.
fn introduce(second: &Second, (other, site): (usize, &Site)) -> Result<()> {
    let mac = second_mac(second.site);
    neighbour(&second.host, site, &underlay_mac(other))?;
    site.ns.ip([format!("neighbour add {} lladdr {mac} dev wan nud permanent", second.host.underlay)])?;
    let port = if other == second.site { "second".into() } else { format!("wan{}", second.site) };
    site.ns.bridge([format!("fdb add {mac} dev {port} master static")])
}

fn neighbour(host: &Site, peer: &Site, mac: &str) -> Result<()> {
    host.ns.ip([format!("neighbour add {} lladdr {mac} dev wan nud permanent", peer.underlay)])
}

/// Gives a site's bridge its port to the other sites.
fn stretch(site: &Site) -> Result<()> {
    site.ns.ip([
        format!("link add vx0 type vxlan id 77 local {} dstport {VXLAN_PORT} learning", site.underlay),
        format!("link set vx0 mtu {GUEST_MTU} master br0 up"),
    ])
}

/// MAC address of a site's bridge to the WAN.
fn underlay_mac(index: usize) -> String {
    format!("02:67:77:01:00:{:02x}", index + 1)
}

/// MAC address of a second host.
fn second_mac(site: usize) -> String {
    format!("02:67:77:03:00:{:02x}", site + 1)
}

fn join(
    wan: &Namespace,
    (a, one): (usize, &Site),
    (b, other): (usize, &Site),
    spec: PathSpec,
    extended: bool,
    seed: u64,
) -> Result<godwit_wan::Path> {
    for (i, site, j, peer) in [(a, one, b, other), (b, other, a, one)] {
        wan.ip([
            format!("link add p{i}-{j} type veth peer name wan{j} netns {}", site.ns.path().display()),
            format!("link set p{i}-{j} up"),
        ])?;
        let peer_mac = underlay_mac(j);
        site.ns.ip([
            format!("link set wan{j} master wan up"),
            format!("neighbour add {} lladdr {peer_mac} dev wan nud permanent", peer.underlay),
        ])?;
        site.ns.bridge([
            format!("link set dev wan{j} learning off flood off mcast_flood off"),
            format!("fdb add {peer_mac} dev wan{j} master static"),
        ])?;
        segment(site, j, &spec)?;
    }
    let name = format!("{}-{}", one.name, other.name);
    let rules = [
        (MEMORY_PORTS, Class::Memory),
        (DISK_PORTS, Class::Disk),
        // Before tunnels: VXLAN draws the ports that it sends from, and may draw one of theirs.
        (VXLAN_PORT..=VXLAN_PORT, Class::Client),
        (CONTROLLER_PORT..=LINK_PORT, Class::Control),
    ];
    let rules = Classifier::new(rules.into_iter().chain(extended.then_some((TUNNEL_PORTS, Class::Tunnel))));
    wan.run(move || godwit_wan::Path::start(&name, &format!("p{a}-{b}"), &format!("p{b}-{a}"), spec, rules, seed))
        .context("cannot start the WAN emulator")
}

/// Has `site` hand over single packets on its path to site `other` where loss or jitter must hit packets one by one.
fn segment(site: &Site, other: usize, spec: &PathSpec) -> Result<()> {
    let offload = if spec.needs_single_packets() { Offload::SinglePackets } else { Offload::SuperFrames };
    site.ns.run(move || set_segmentation(&format!("wan{other}"), offload))?;
    Ok(())
}
