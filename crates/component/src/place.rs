//! Components on this host: made, changed, isolated and removed.

use crate::config::{Between, Config, Kind, Network, Outside};
use crate::holder::Holder;
use crate::rules::{self, Hooks, RulesError};
use crate::state::{Loaded, State, Station};
use godwit_net::{
    BridgeKind, Learnt, LinkIndex, MacAddr, Net, NetError, NetNs, PacketSocket, Route, VethEnd, conntrack,
};
use godwit_wire::{WireError, Wires};
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The bridge inside.
const BRIDGE: &str = "br0";
/// A gateway's outside port.
const OUTSIDE: &str = "out";
/// When routers say where they are now: at once, and again for what was lost while wires were pointed.
const ANNOUNCE_AT_MS: [u64; 4] = [0, 50, 200, 600];

/// A component, as a host has to know it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Spec {
    /// Its number, for ever.
    pub id: u64,
    /// What it is.
    pub kind: Kind,
    /// Its ports' endpoint numbers, the first port's first.
    pub endpoints: Vec<u32>,
    /// Its file.
    pub config: Config,
}

impl Spec {
    /// The address of a port inside, or of the bridge (0), or of the outside port (255). It does not change when it moves, so
    /// neighbours need not ask again.
    fn mac(&self, port: u8) -> MacAddr {
        let [.., a, b, c] = self.id.to_be_bytes();
        MacAddr([0x02, 0x67, a, b, c, port])
    }

    fn port_of(&self, name: &str) -> Option<u8> {
        name.strip_prefix('p')?.parse().ok()
    }
}

fn inside(port: u8) -> String {
    format!("p{port}")
}

/// Why something could not be done to a component.
#[derive(Debug, thiserror::Error)]
pub enum ComponentError {
    /// The network refused.
    #[error("{doing} component {id}: {source}")]
    Net {
        /// What was tried.
        doing: &'static str,
        /// The component.
        id: u64,
        /// The reason.
        source: NetError,
    },
    /// The host's side refused.
    #[error("component {id}: {source}")]
    Wire {
        /// The component.
        id: u64,
        /// The reason.
        source: WireError,
    },
    /// Its file was refused, and nothing was changed.
    #[error("the configuration is refused, and nothing was changed: {0}")]
    Config(String),
    /// It is not here.
    #[error("component {0} has no namespace on this host; stage it first")]
    Absent(u64),
}

/// Components on this host. Clones share it.
#[derive(Clone, Debug)]
pub struct Place {
    wires: Wires,
    net: Net,
    run: PathBuf,
    prefix: String,
}

type Done<T> = Result<T, ComponentError>;

impl Place {
    /// Components of the namespace of the calling thread, their ports' devices isolated by `wires` and called by its `prefix`;
    /// files of what runs in `run`. Within a tokio runtime.
    ///
    /// # Errors
    /// There is no netlink.
    pub fn new(wires: Wires, prefix: &str, run: &Path) -> Result<Self, NetError> {
        Ok(Self { wires, net: Net::open()?, run: run.to_owned(), prefix: prefix.to_owned() })
    }

    /// A port's device on the host, by its endpoint number.
    #[must_use]
    pub fn device(&self, endpoint: u32) -> String {
        format!("{}t{endpoint}", self.prefix)
    }

    fn outside_device(&self, id: u64) -> String {
        format!("{}o{id}", self.prefix)
    }

    /// Where the process that keeps a component's namespace writes its number.
    #[must_use]
    pub fn holder_file(&self, id: u64) -> PathBuf {
        self.run.join(format!("{id}.pid"))
    }

    fn net_error(doing: &'static str, id: u64) -> impl Fn(NetError) -> ComponentError {
        move |source| ComponentError::Net { doing, id, source }
    }

    /// Its namespace, if it is here.
    #[must_use]
    pub fn namespace(&self, id: u64) -> Option<NetNs> {
        Holder::find(&self.holder_file(id))?.namespace().ok()
    }

    /// The components that are here, by number: for what nobody knows of any more.
    #[must_use]
    pub fn list(&self) -> Vec<u64> {
        let Ok(entries) = std::fs::read_dir(&self.run) else { return vec![] };
        let number = |e: std::fs::DirEntry| e.file_name().to_str()?.strip_suffix(".pid")?.parse().ok();
        let mut ids: Vec<u64> =
            entries.filter_map(|e| number(e.ok()?)).filter(|id| self.namespace(*id).is_some()).collect();
        ids.sort_unstable();
        ids
    }

    /// Tries a file in a namespace that is thrown away.
    ///
    /// # Errors
    /// [`ComponentError::Config`], with lines where there are any; [`ComponentError::Net`] when nothing can be tried here.
    pub async fn rehearse(&self, spec: &Spec) -> Done<()> {
        let failed = Self::net_error("try", spec.id);
        let ns = NetNs::fresh(NetNs::current).map_err(&failed)?.map_err(&failed)?;
        let net = ns.net().map_err(&failed)?;
        for port in &spec.config.ports {
            let (here, there) = (format!("h{}", port.number), inside(port.number));
            let end = |name, n| VethEnd { name, mac: spec.mac(n), mtu: port.mtu };
            let pair = net.ensure_veth(end(&here, port.number ^ 0x80), end(&there, port.number), &ns).await;
            net.up(pair.map_err(&failed)?.index).await.map_err(&failed)?;
        }
        if let Some(outside) = &spec.config.outside {
            let (Network::Bridge(name) | Network::Device(name)) = &outside.network;
            let refused = |why: &str| Err(ComponentError::Config(format!("`{name}` of this host {why}")));
            let Some(host) = self.net.find(name).await.map_err(&failed)? else {
                return Err(ComponentError::Config(format!("this host has no interface `{name}`")));
            };
            let end = |name, n| VethEnd { name, mac: spec.mac(n), mtu: outside.mtu };
            match outside.network {
                Network::Bridge(_) if host.kind != godwit_net::Kind::Bridge => {
                    return refused(&format!("is no bridge: name one, or write `outside = {{ device = \"{name}\" }}`"));
                }
                Network::Bridge(_) => {
                    let pair = net.ensure_veth(end("h0", 254), end(OUTSIDE, 255), &ns).await.map_err(&failed)?;
                    net.up(pair.index).await.map_err(&failed)?;
                }
                Network::Device(_) if u32::from(outside.mtu) > host.mtu => {
                    return refused(&format!("carries {} bytes: `mtu = {}` is too large", host.mtu, outside.mtu));
                }
                // Not by the address that it has, or will have: this component may be here.
                Network::Device(_) => {
                    if let Err(error) = self.net.add_macvlan(host.index, end(OUTSIDE, 254), &ns).await {
                        return refused(&format!("takes no macvlan; of a bridge's port, name the bridge: {error}"));
                    }
                }
            }
        }
        track(spec, &ns).await.map_err(&failed)?;
        let furnished = self.furnish(spec, &ns, &net).await;
        furnished.map_err(|e| match e {
            // Everything it is made of exists here: what is refused now comes from the file.
            ComponentError::Net { source, .. } => ComponentError::Config(source.to_string()),
            other => other,
        })
    }

    /// The component is here as its file says; no frame passes where none did. Where it is here already, it is changed, and what
    /// passed goes on passing.
    ///
    /// # Errors
    /// [`ComponentError`]; it may be repeated. A file that was not tried may be half taken.
    pub async fn stage(&self, spec: &Spec) -> Done<()> {
        let failed = Self::net_error("make", spec.id);
        std::fs::create_dir_all(&self.run).map_err(|source| {
            failed(NetError::Kernel { operation: "make folder", object: self.run.display().to_string(), source })
        })?;
        let file = self.holder_file(spec.id);
        let held = tokio::task::spawn_blocking(move || Holder::ensure(&file)).await;
        let (holder, fresh) = held.expect("nothing in it panics").map_err(&failed)?;
        let ns = holder.namespace().map_err(&failed)?;
        let net = ns.net().map_err(&failed)?;
        if fresh {
            // A reboot, or a holder that somebody ended, has left the host's sides of no port.
            tracing::info!(component = spec.id, "a namespace is made for it");
        }
        for (port, endpoint) in spec.config.ports.iter().zip(&spec.endpoints) {
            let (device, there) = (self.device(*endpoint), inside(port.number));
            let mac = spec.mac(port.number);
            let here = VethEnd { name: &device, mac: mac.of_tap(), mtu: port.mtu };
            let link =
                self.net.ensure_veth(here, VethEnd { name: &there, mac, mtu: port.mtu }, &ns).await.map_err(&failed)?;
            if link.mtu != u32::from(port.mtu) {
                self.net.set_mtu(link.index, port.mtu).await.map_err(&failed)?;
            }
            self.wires.hold_free(&device).await.map_err(|source| ComponentError::Wire { id: spec.id, source })?;
            self.net.up(link.index).await.map_err(&failed)?;
        }
        self.stage_outside(spec, &ns, &net).await.map_err(&failed)?;
        track(spec, &ns).await.map_err(&failed)?;
        self.furnish(spec, &ns, &net).await
    }

    async fn stage_outside(&self, spec: &Spec, ns: &NetNs, net: &Net) -> Result<(), NetError> {
        let Some(outside) = &spec.config.outside else { return Ok(()) };
        let mac = spec.mac(255);
        let end = VethEnd { name: OUTSIDE, mac, mtu: outside.mtu };
        let mark = match &outside.network {
            Network::Bridge(name) => format!("bridge {name}"),
            Network::Device(name) => format!("device {name}"),
        };
        // A port of another network, or one that somebody died over, is made anew; it takes its other side along.
        let known = net.find(OUTSIDE).await?;
        if known.is_some_and(|link| link.alias.as_deref() != Some(&mark)) {
            net.remove(OUTSIDE).await?;
        }
        self.make_outside(spec, outside, end, (ns, net)).await?;
        let link = net.get(OUTSIDE).await?;
        if link.mtu != u32::from(outside.mtu) {
            net.set_mtu(link.index, outside.mtu).await?;
        }
        net.set_alias(link.index, &mark).await
    }

    async fn make_outside(
        &self,
        spec: &Spec,
        outside: &Outside,
        end: VethEnd<'_>,
        (ns, net): (&NetNs, &Net),
    ) -> Result<(), NetError> {
        match &outside.network {
            Network::Bridge(_) => {
                let device = self.outside_device(spec.id);
                let here = VethEnd { name: &device, mac: end.mac.of_tap(), mtu: outside.mtu };
                let link = self.net.ensure_veth(here, end, ns).await?;
                if link.mtu != u32::from(outside.mtu) {
                    self.net.set_mtu(link.index, outside.mtu).await?;
                }
                let held = self.wires.hold_free(&device).await;
                held.map_err(|e| NetError::Kernel {
                    operation: "isolate",
                    object: device.clone(),
                    source: std::io::Error::other(e.to_string()),
                })?;
                self.net.up(link.index).await
            }
            Network::Device(name) => {
                if net.find(OUTSIDE).await?.is_none() {
                    // Down until it is opened: that is what isolates it.
                    let on = self.net.get(name).await?;
                    self.net.add_macvlan(on.index, end, ns).await?;
                }
                Ok(())
            }
        }
    }

    /// Everything inside is as the file says, after [`track`].
    async fn furnish(&self, spec: &Spec, ns: &NetNs, net: &Net) -> Done<()> {
        let failed = Self::net_error("configure", spec.id);
        let config = &spec.config;
        let bridge = config.between == Between::Bridge;
        let off = if bridge { "1" } else { "0" };
        let mut settings = vec![
            ("ipv4/conf/all/rp_filter", "0"),
            ("ipv4/conf/default/rp_filter", "0"),
            ("ipv4/conf/all/send_redirects", "0"),
            // Several of its ports may be on one switch. There each answers and asks for its own addresses alone: else all answer for
            // any of them, and which port a peer's packets come in by is whoever's answer came last, where rules name ports.
            ("ipv4/conf/all/arp_ignore", "1"),
            ("ipv4/conf/all/arp_announce", "2"),
        ];
        // A kernel without IPv6 has nothing to be switched off.
        let six = ns.within(|| Path::new("/proc/sys/net/ipv6").exists()).map_err(&failed)?;
        if six {
            // Its own IPv6 would speak on a bridge; a router's addresses are its user's, and need no check for doubles when
            // they have just moved.
            settings.extend([
                ("ipv6/conf/all/disable_ipv6", off),
                ("ipv6/conf/default/disable_ipv6", off),
                ("ipv6/conf/all/accept_ra", "0"),
                ("ipv6/conf/default/accept_ra", "0"),
                ("ipv6/conf/all/accept_dad", "0"),
                ("ipv6/conf/default/accept_dad", "0"),
            ]);
        }
        // Bridged IP packets pass the hooks of the families ip, ip6 and inet, with connection tracking; those behind a VLAN's tag, or in
        // PPPoE, where that is said. Where the kernel has no such thing, chains of the family bridge alone see them.
        let shown = || Path::new("/proc/sys/net/bridge/bridge-nf-call-iptables").exists();
        let by_ip = bridge && ns.within(shown).map_err(&failed)?;
        let hooks = match (bridge, by_ip) {
            (false, _) => Hooks::Ip,
            (true, false) => Hooks::Bridge,
            (true, true) => Hooks::Both,
        };
        if spec.kind == Kind::Firewall {
            settings.push((rules::LOOSE, "0"));
            if by_ip {
                settings.extend([
                    ("bridge/bridge-nf-call-iptables", "1"),
                    ("bridge/bridge-nf-call-ip6tables", "1"),
                    ("bridge/bridge-nf-filter-vlan-tagged", "1"),
                    ("bridge/bridge-nf-filter-pppoe-tagged", "1"),
                ]);
            }
        }
        let set = |settings: &[(&str, &str)]| ns.set(settings).map_err(&failed);
        set(&settings)?;
        let lo = net.get("lo").await.map_err(&failed)?;
        net.up(lo.index).await.map_err(&failed)?;
        for port in &config.ports {
            let link = net.get(&inside(port.number)).await.map_err(&failed)?;
            if link.mtu != u32::from(port.mtu) {
                net.set_mtu(link.index, port.mtu).await.map_err(&failed)?;
            }
        }
        // What was routed until now and is bridged from now on stops first, and the other way round.
        if bridge {
            self.forward(ns, six, false).map_err(&failed)?;
        } else {
            net.remove(BRIDGE).await.map_err(&failed)?;
        }
        // Rules before anything forwards. Those that are there stay, with their counters and what their sets have gathered.
        let mark = rules::mark(config, hooks);
        if lo.alias.as_deref() != Some(&mark) {
            let loaded = rules::load(ns, config.rules.as_ref(), config.closed, hooks).await;
            loaded.map_err(|e| match e {
                RulesError::Net(source) => ComponentError::Net { doing: "give rules to", id: spec.id, source },
                other => ComponentError::Config(other.to_string()),
            })?;
            net.set_alias(lo.index, &mark).await.map_err(&failed)?;
        }
        if bridge {
            self.bridge(spec, net).await.map_err(&failed)
        } else {
            self.route(spec, net).await.map_err(&failed)?;
            self.forward(ns, six, true).map_err(&failed)
        }
    }

    fn forward(&self, ns: &NetNs, six: bool, on: bool) -> Result<(), NetError> {
        let value = if on { "1" } else { "0" };
        ns.set(&[("ipv4/ip_forward", value)])?;
        if six { ns.set(&[("ipv6/conf/all/forwarding", value)]) } else { Ok(()) }
    }

    async fn bridge(&self, spec: &Spec, net: &Net) -> Result<(), NetError> {
        let config = &spec.config;
        net.set_routes(&[]).await?;
        let kind = BridgeKind { vlan_filtering: config.vlan_filtering, stp: config.stp };
        let bridge = net.ensure_switch(BRIDGE, spec.mac(0), kind).await?;
        for port in &config.ports {
            let link = net.get(&inside(port.number)).await?;
            net.set_addresses(link.index, &[]).await?;
            if config.vlan_filtering && link.master.is_some() {
                // The VLANs that it was in until now are its old place's.
                net.set_master(link.index, None).await?;
            }
            if config.vlan_filtering || link.master != Some(bridge.index) {
                net.set_master(link.index, Some(bridge.index)).await?;
            }
            if config.vlan_filtering {
                net.join_vlans(link.index, &port.vlans).await?;
            }
            net.up(link.index).await?;
        }
        net.up(bridge.index).await
    }

    async fn route(&self, spec: &Spec, net: &Net) -> Result<(), NetError> {
        let mut by: BTreeMap<u8, LinkIndex> = BTreeMap::new();
        for port in &spec.config.ports {
            let link = net.get(&inside(port.number)).await?;
            net.set_addresses(link.index, &port.addresses).await?;
            net.up(link.index).await?;
            by.insert(port.number, link.index);
        }
        if let Some(outside) = &spec.config.outside {
            let link = net.get(OUTSIDE).await?;
            net.set_addresses(link.index, &outside.addresses).await?;
            // Isolated on the host where it is a bridge's port; else down until it is opened, and its routes follow then.
            if matches!(outside.network, Network::Bridge(_)) {
                net.up(link.index).await?;
            }
        }
        if self.waits_for_outside(spec, net).await? {
            return Ok(());
        }
        net.set_routes(&routes(spec, &by)).await
    }

    /// Routes through the outside port cannot be set while that is down.
    async fn waits_for_outside(&self, spec: &Spec, net: &Net) -> Result<bool, NetError> {
        let on_device = spec.config.outside.as_ref().is_some_and(|o| matches!(o.network, Network::Device(_)));
        Ok(on_device && !net.get(OUTSIDE).await?.up)
    }

    /// The component may forward to wherever its ports' devices are taken: its outside port is open, and it says where its
    /// addresses are, in the background. Wires are taken to its devices by whoever has them.
    ///
    /// # Errors
    /// [`ComponentError`]; it may be repeated.
    pub async fn open(&self, spec: &Spec) -> Done<()> {
        let failed = Self::net_error("open", spec.id);
        let ns = self.namespace(spec.id).ok_or(ComponentError::Absent(spec.id))?;
        let net = ns.net().map_err(&failed)?;
        if let Some(outside) = &spec.config.outside {
            match &outside.network {
                Network::Bridge(name) => {
                    let bridge = self.net.expect(name, godwit_net::Kind::Bridge, "bridge").await.map_err(&failed)?;
                    let device = self.net.get(&self.outside_device(spec.id)).await.map_err(&failed)?;
                    self.net.set_master(device.index, Some(bridge.index)).await.map_err(&failed)?;
                }
                Network::Device(_) => {
                    let link = net.get(OUTSIDE).await.map_err(&failed)?;
                    net.up(link.index).await.map_err(&failed)?;
                    self.route(spec, &net).await.map_err(&failed)?;
                }
            }
        }
        self.announce(spec, &ns, &net).await.map_err(&failed)
    }

    async fn announce(&self, spec: &Spec, ns: &NetNs, net: &Net) -> Result<(), NetError> {
        let mut said: Vec<(PacketSocket, Vec<Vec<u8>>)> = vec![];
        let ports = spec.config.ports.iter().map(|p| (inside(p.number), spec.mac(p.number), &p.addresses));
        let outside = spec.config.outside.iter().map(|o| (OUTSIDE.to_owned(), spec.mac(255), &o.addresses));
        for (name, mac, addresses) in ports.chain(outside).filter(|(.., addresses)| !addresses.is_empty()) {
            let frames = addresses.iter().map(|address| match address.ip {
                IpAddr::V4(ip) => godwit_net::gratuitous_arp(mac, ip),
                IpAddr::V6(ip) => godwit_net::unsolicited_neighbour(mac, ip),
            });
            said.push((ns.packet_socket(net.get(&name).await?.index)?, frames.collect()));
        }
        if said.is_empty() {
            return Ok(());
        }
        // A component that is closed meanwhile says this into the pen.
        tokio::spawn(async move {
            let mut before = 0;
            for at in ANNOUNCE_AT_MS {
                tokio::time::sleep(Duration::from_millis(at - before)).await;
                before = at;
                for (socket, frames) in &said {
                    frames.iter().for_each(|frame| drop(socket.send(frame)));
                }
            }
        });
        Ok(())
    }

    /// No frame passes any port, from now on. What is absent is closed.
    ///
    /// # Errors
    /// [`ComponentError`]; it may be repeated.
    pub async fn close(&self, spec: &Spec) -> Done<()> {
        let id = spec.id;
        let outside = spec.config.outside.as_ref().map(|o| &o.network);
        let devices = spec.endpoints.iter().map(|endpoint| self.device(*endpoint));
        for device in devices.chain(outside.map(|_| self.outside_device(id))) {
            self.wires.pen_device(&device).await.map_err(|source| ComponentError::Wire { id, source })?;
        }
        if let (Some(Network::Device(_)), Some(ns)) = (outside, self.namespace(id)) {
            let failed = Self::net_error("close", id);
            let net = ns.net().map_err(&failed)?;
            if let Some(link) = net.find(OUTSIDE).await.map_err(&failed)? {
                net.down(link.index).await.map_err(&failed)?;
            }
        }
        Ok(())
    }

    /// What it has learnt and let through. Of one that is closed nothing changes any more but by time.
    ///
    /// # Errors
    /// [`ComponentError`].
    pub async fn state(&self, spec: &Spec) -> Done<State> {
        let failed = Self::net_error("read the state of", spec.id);
        let ns = self.namespace(spec.id).ok_or(ComponentError::Absent(spec.id))?;
        let mut state = State::default();
        if spec.config.between == Between::Bridge {
            let net = ns.net().map_err(&failed)?;
            let bridge = net.get(BRIDGE).await.map_err(&failed)?;
            let names: BTreeMap<LinkIndex, String> =
                net.list("p").await.map_err(&failed)?.into_iter().map(|l| (l.index, l.name)).collect();
            for Learnt { port, mac, vlan } in net.learnt(bridge.index).await.map_err(&failed)? {
                let port = names.get(&port).and_then(|name| spec.port_of(name));
                state.stations.extend(port.map(|port| Station { port, mac, vlan }));
            }
        }
        if spec.kind != Kind::Switch {
            let dumped = tokio::task::spawn_blocking(move || ns.within(conntrack::dump)).await;
            state.flows = dumped.expect("nothing in it panics").map_err(&failed)?.map_err(&failed)?;
        }
        Ok(state)
    }

    /// Takes over what was learnt and let through elsewhere, or a part of it. What does not fit here is left out.
    ///
    /// # Errors
    /// [`ComponentError`].
    pub async fn load(&self, spec: &Spec, state: State) -> Done<Loaded> {
        let failed = Self::net_error("give its state to", spec.id);
        let ns = self.namespace(spec.id).ok_or(ComponentError::Absent(spec.id))?;
        let mut loaded = Loaded::default();
        if spec.config.between == Between::Bridge && !state.stations.is_empty() {
            let net = ns.net().map_err(&failed)?;
            let links = net.list("p").await.map_err(&failed)?;
            let ports: BTreeMap<u8, LinkIndex> =
                links.into_iter().filter_map(|link| Some((spec.port_of(&link.name)?, link.index))).collect();
            for Station { port, mac, vlan } in state.stations {
                let Some(port) = ports.get(&port).copied() else { continue };
                match net.teach(&Learnt { port, mac, vlan }).await {
                    Ok(()) => loaded.stations += 1,
                    Err(error) => tracing::debug!(component = spec.id, %mac, %error, "an address is left to be learnt"),
                }
            }
        }
        if spec.kind != Kind::Switch && !state.flows.is_empty() {
            let flows = state.flows;
            let taken = tokio::task::spawn_blocking(move || ns.within(|| conntrack::load(&flows))).await;
            loaded.flows = taken.expect("nothing in it panics").map_err(&failed)?.map_err(&failed)?;
        }
        Ok(loaded)
    }

    /// Nothing of it is left here.
    ///
    /// # Errors
    /// [`ComponentError`]; it may be repeated.
    pub async fn remove(&self, id: u64, endpoints: &[u32]) -> Done<()> {
        let failed = Self::net_error("remove", id);
        // The host's sides first: each takes the other along.
        for device in endpoints.iter().map(|e| self.device(*e)).chain([self.outside_device(id)]) {
            self.net.remove(&device).await.map_err(&failed)?;
        }
        let file = self.holder_file(id);
        let ended = tokio::task::spawn_blocking(move || match Holder::find(&file) {
            Some(holder) => holder.end(),
            None => {
                let _ = std::fs::remove_file(&file);
                Ok(())
            }
        });
        ended.await.expect("nothing in it panics").map_err(&failed)
    }
}

/// A firewall's kernel tracks connections.
async fn track(spec: &Spec, ns: &NetNs) -> Result<(), NetError> {
    if spec.kind == Kind::Firewall { rules::track(ns).await } else { Ok(()) }
}

fn routes(spec: &Spec, by: &BTreeMap<u8, LinkIndex>) -> Vec<Route> {
    let index = |port: u8| by.get(&port).copied();
    spec.config.routes.iter().map(|r| Route { to: r.to, via: r.via, by: r.port.and_then(index) }).collect()
}

/// For callers that have the file as text.
impl Spec {
    /// Reads it.
    ///
    /// # Errors
    /// [`ComponentError::Config`], with the line.
    pub fn read(id: u64, kind: Kind, endpoints: Vec<u32>, file: &str) -> Done<Self> {
        let ports = u8::try_from(endpoints.len()).unwrap_or(u8::MAX);
        let config = Config::read(file, kind, ports).map_err(|e| ComponentError::Config(e.to_string()))?;
        Ok(Self { id, kind, endpoints, config })
    }
}
