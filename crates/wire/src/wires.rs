//! The shell: looks at the kernel, asks the machines, does what they say.

mod greet;
mod lay;

pub use greet::{Greeter, Nonce};

use crate::guard::{Allowed, Guard};
use crate::record;
use crate::{
    Action, Component, Endpoint, EndpointSpec, GatewayPort, Order, Port, PortAction, PortOrder, PortState, Refused,
    Sequence, Stale, State, Vni, WireId,
};
use futures_util::future::join_all;
use godwit_net::{Fdb, Frame, Kind, Link, MacAddr, Net, NetError, PacketSocket, Vxlan};
use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::time::{Instant, sleep, timeout};

/// When announcements are sent after an activation: at once, and again for what was lost while switches converged.
const ANNOUNCE_AT_MS: [u64; 6] = [0, 20, 60, 150, 300, 600];
/// How often a probe asks: several times within the shortest sensible bound, yet no flood.
const PROBE_EVERY: Duration = Duration::from_millis(20);
/// How long a tap is silent before it counts as drained: some scheduling rounds of QEMU's I/O thread.
const SILENCE: Duration = Duration::from_millis(1);
/// The longest prefix: the longest name is the prefix, two bytes, and a wire's eight digits; the kernel takes 15 bytes.
const MAX_PREFIX: usize = 5;

/// Why an operation on a wire failed.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    /// The network refused.
    #[error("{doing} `{object}`: {source}")]
    Net {
        /// What was tried.
        doing: &'static str,
        /// The tap, bridge or wire.
        object: String,
        /// The reason.
        source: NetError,
    },
    /// The endpoint refused.
    #[error("activate `{tap}`: {why}; ask the VM's owner for the present generation, or stage it first")]
    Stale {
        /// The endpoint's tap.
        tap: String,
        /// The reason.
        why: Stale,
    },
    /// The port at the gateway refused.
    #[error("point wire {wire:08x}: {why}; ask the VM's owner for the present generation, or attach it first", wire = .wire.0)]
    Refused {
        /// The wire.
        wire: WireId,
        /// The reason.
        why: Refused,
    },
    /// Nothing came back.
    #[error("probe `{object}`: no frame of the guest {mac} within {waited:?}; check that it runs, and its addresses")]
    NoAnswer {
        /// Where it was sought.
        object: String,
        /// The guest.
        mac: MacAddr,
        /// How long.
        waited: Duration,
    },
    /// Nobody answered at the other end of a wire.
    #[error("greet over `{device}`: nothing came back within {waited:?}; check that the hosts' UDP reaches each other")]
    NoEcho {
        /// The tunnel's.
        device: String,
        /// How long.
        waited: Duration,
    },
    /// A name that does not fit.
    #[error("`{name}` does not do: {why}")]
    BadName {
        /// The name.
        name: String,
        /// The reason, and what would do.
        why: &'static str,
    },
}

/// An interface of ours that exists on this host, for reconciliation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// Its name.
    pub name: String,
    /// What it is, and how it stands.
    pub state: FoundState,
}

/// What an interface of ours is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FoundState {
    /// An endpoint's tap.
    Endpoint(State),
    /// A wire's end at this gateway.
    Port(WireId, PortState),
    /// Part of the tunnel of this wire's endpoint.
    Tunnel(WireId),
    /// The pen, or something that is not understood.
    Other,
}

/// The wires of this host. Clones share it.
#[derive(Clone, Debug)]
pub struct Wires {
    net: Net,
    prefix: String,
    underlay: IpAddr,
    guard: Guard,
    /// One per endpoint that was activated: whether it may still announce.
    live: Arc<Mutex<HashMap<String, Arc<Mutex<bool>>>>>,
}

/// An endpoint as the kernel shows it.
#[derive(Debug)]
struct Seen {
    tap: Option<Link>,
    /// What it joins when it is activated.
    bridge: Option<Link>,
}

impl Seen {
    fn state(&self, spec: &EndpointSpec) -> State {
        let Some(tap) = &self.tap else { return State::Absent };
        let bridge = self.bridge.as_ref().map(|b| b.index);
        let joined = match spec.component {
            Component::Nowhere => tap.master.is_some() && tap.master != bridge,
            _ => tap.master.is_some() && tap.master == bridge,
        };
        record::state(record::read(tap.alias.as_deref()).map(|r| r.0), joined)
    }

    fn tap(&self, spec: &EndpointSpec) -> Result<&Link, NetError> {
        self.tap.as_ref().ok_or_else(|| NetError::Missing { operation: "look up", object: spec.tap.clone() })
    }
}

/// What an order means for an endpoint.
#[derive(Debug)]
struct Decided<'a> {
    spec: &'a EndpointSpec,
    seen: Seen,
    actions: &'static [Action],
    /// Where it stands afterwards.
    state: State,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn net(doing: &'static str, object: &str) -> impl FnOnce(NetError) -> WireError {
    move |source| WireError::Net { doing, object: object.to_owned(), source }
}

impl Wires {
    /// The wires of the namespace of the calling thread; `prefix` begins the names of all interfaces made here, `underlay` is
    /// this host's address for tunnels. Within a tokio runtime.
    ///
    /// # Errors
    /// A prefix that is empty or longer than 5 bytes; no netlink.
    pub fn new(prefix: &str, underlay: IpAddr) -> Result<Self, WireError> {
        if prefix.is_empty() || prefix.len() > MAX_PREFIX {
            return Err(WireError::BadName { name: prefix.into(), why: "a prefix has 1 to 5 bytes" });
        }
        let opened = Net::open().map_err(net("open", "netlink"))?;
        let guard = Guard::new(prefix);
        Ok(Self { net: opened, prefix: prefix.into(), underlay, guard, live: Arc::default() })
    }

    /// The host's network.
    #[must_use]
    pub const fn net(&self) -> &Net {
        &self.net
    }

    /// What the names of all interfaces made here begin with.
    pub(crate) fn prefix(&self) -> &str {
        &self.prefix
    }

    fn device(&self, letter: char, wire: WireId) -> String {
        format!("{}-{letter}{:08x}", self.prefix, wire.0)
    }

    fn pen_name(&self) -> String {
        format!("{}-pen", self.prefix)
    }

    /// The wire's tunnel, unless the component is on this host.
    fn tunnel(&self, spec: &EndpointSpec) -> Option<(IpAddr, WireId, Vni, u16)> {
        match &spec.component {
            Component::Gateway { host, wire, vni, port, .. } if *host != self.underlay => {
                Some((*host, *wire, *vni, *port))
            }
            _ => None,
        }
    }

    fn bridge(&self, spec: &EndpointSpec) -> String {
        match (&spec.component, self.tunnel(spec)) {
            (_, Some((_, wire, ..))) => self.device('b', wire),
            (Component::Switch { bridge } | Component::Gateway { bridge, .. }, None) => bridge.clone(),
            // Whichever wire takes it from there.
            (Component::Nowhere, None) => self.pen_name(),
        }
    }

    async fn see(&self, spec: &EndpointSpec) -> Result<Seen, NetError> {
        let bridge = self.bridge(spec);
        let (tap, bridge) = tokio::try_join!(self.net.find(&spec.tap), self.net.find(&bridge))?;
        Ok(Seen { tap, bridge })
    }

    /// What an order means for an endpoint; nothing has changed yet.
    async fn decide<'a>(
        &self,
        doing: &'static str,
        spec: &'a EndpointSpec,
        order: Order,
    ) -> Result<Decided<'a>, WireError> {
        if !spec.tap.starts_with(&self.prefix) || spec.tap.starts_with(&format!("{}-", self.prefix)) {
            let why = "a tap's name begins with the prefix, and not with the prefix and `-`";
            return Err(WireError::BadName { name: spec.tap.clone(), why });
        }
        let seen = self.see(spec).await.map_err(net(doing, &spec.tap))?;
        let mut endpoint = Endpoint::recover(seen.state(spec));
        let actions = endpoint.handle(order).map_err(|why| WireError::Stale { tap: spec.tap.clone(), why })?;
        Ok(Decided { spec, seen, actions, state: endpoint.state() })
    }

    async fn carry_out(&self, doing: &'static str, decided: Decided<'_>) -> Result<(), WireError> {
        let Decided { spec, seen, actions, state } = decided;
        for action in actions {
            self.perform(spec, &seen, *action, state).await.map_err(net(doing, &spec.tap))?;
        }
        Ok(())
    }

    /// One order for several endpoints, at once: a guest that stands waits for the slowest of them and not for their sum.
    ///
    /// An order that lets something in is refused whole: where one endpoint has had a later owner, none is touched. One that keeps
    /// something out is carried out wherever that is possible, and what was not possible is said afterwards.
    async fn run(&self, doing: &'static str, specs: &[EndpointSpec], order: Order) -> Result<(), WireError> {
        let decided = join_all(specs.iter().map(|spec| self.decide(doing, spec, order))).await;
        let (decided, refused): (Vec<_>, Vec<_>) = decided.into_iter().partition(Result::is_ok);
        let refused = refused.into_iter().filter_map(Result::err).next();
        if let (Order::Stage | Order::Activate(_), Some(refused)) = (order, &refused) {
            tracing::debug!(doing, why = %refused, "none of the endpoints is touched");
        } else {
            let doings = decided.into_iter().flatten().map(|decided| self.carry_out(doing, decided));
            join_all(doings).await.into_iter().collect::<Result<(), _>>()?;
        }
        refused.map_or(Ok(()), Err)
    }

    async fn perform(&self, spec: &EndpointSpec, seen: &Seen, action: Action, state: State) -> Result<(), NetError> {
        match action {
            Action::MakeTap => self.make_tap(spec, seen).await,
            Action::MakeTunnel => self.make_tunnel(spec).await,
            Action::Record => {
                let State::Active(sequence) = state else { return Ok(()) };
                self.net.set_alias(seen.tap(spec)?.index, &record::write(sequence, None)).await
            }
            // It waits in the pen for a wire.
            Action::Join if spec.component == Component::Nowhere => Ok(()),
            Action::Join => {
                let tap = seen.tap(spec)?;
                let bridge = self.net.expect(&self.bridge(spec), Kind::Bridge, "bridge").await?;
                self.net.set_master(tap.index, Some(bridge.index)).await?;
                // Otherwise frames for the guest still go to where it was until it speaks.
                if self.tunnel(spec).is_some() {
                    return Ok(());
                }
                match self.net.learn(tap.index, spec.mac).await {
                    // The kernel teaches no port without carrier: QEMU is not there yet, and its first frame will.
                    Err(NetError::Kernel { source, .. }) if source.kind() == std::io::ErrorKind::PermissionDenied => {
                        Ok(())
                    }
                    other => other,
                }
            }
            Action::Announce if spec.component == Component::Nowhere => Ok(()),
            Action::Announce => self.announce(spec, None).await,
            Action::Hush => {
                if let Some(live) = lock(&self.live).remove(&spec.tap) {
                    *lock(&live) = false;
                }
                Ok(())
            }
            Action::Pen => {
                let pen = self.pen().await?;
                self.net.set_master(seen.tap(spec)?.index, Some(pen.index)).await
            }
            Action::RemoveTap => self.net.remove(&spec.tap).await,
            Action::RemoveTunnel => {
                if let Some((_, wire, vni, _)) = self.tunnel(spec) {
                    self.net.remove(&self.device('v', wire)).await?;
                    self.net.remove(&self.device('b', wire)).await?;
                    self.guard.forget(vni).await;
                }
                Ok(())
            }
        }
    }

    /// Never up: that is what isolates. Down again at each use, should anybody have meddled.
    pub(crate) async fn pen(&self) -> Result<Link, NetError> {
        let pen = self.net.ensure_bridge(&self.pen_name(), None).await?;
        if pen.up {
            self.net.down(pen.index).await?;
        }
        Ok(pen)
    }

    async fn make_tap(&self, spec: &EndpointSpec, seen: &Seen) -> Result<(), NetError> {
        let pen = self.pen().await?;
        let tap = match &seen.tap {
            Some(tap) => tap.clone().of_kind(Kind::Tap, "tap")?,
            None => {
                godwit_net::ensure_tap(&spec.tap)?;
                self.net.expect(&spec.tap, Kind::Tap, "tap").await?
            }
        };
        let (mac, mtu) = (spec.mac.of_tap(), u32::from(spec.mtu));
        // It is set up last: one that is up was made to its end. This is repeated within the VM's pause.
        if tap.up && tap.master == Some(pen.index) && tap.mac == mac && tap.mtu == mtu {
            return Ok(());
        }
        Net::without_ipv6(&spec.tap)?;
        if tap.master != Some(pen.index) {
            self.net.set_master(tap.index, Some(pen.index)).await?;
        }
        self.net.set_mac(tap.index, mac).await?;
        self.net.set_mtu(tap.index, spec.mtu).await?;
        self.net.up(tap.index).await
    }

    async fn make_tunnel(&self, spec: &EndpointSpec) -> Result<(), NetError> {
        let Some((host, wire, vni, port)) = self.tunnel(spec) else {
            return Ok(());
        };
        let (name, bridge_name) = (self.device('v', wire), self.device('b', wire));
        // Before there is a device that could let something in. Once is enough: this is repeated within the VM's pause.
        if self.net.find(&name).await?.is_none() {
            self.guard.only(&[Allowed { vni, port, local: self.underlay, remotes: &[host] }]).await?;
        }
        let wanted = Vxlan { name: &name, vni: vni.0, local: self.underlay, port };
        let vxlan = self.net.ensure_vxlan(&wanted).await?;
        // A wire has two ends: a hub forgets nothing wrong, because it learns nothing.
        let bridge = self.net.ensure_bridge(&bridge_name, Some(0)).await?;
        Net::without_ipv6(&name)?;
        Net::without_ipv6(&bridge_name)?;
        self.net.set_mtu(vxlan.index, spec.mtu).await?;
        if vxlan.master != Some(bridge.index) {
            self.net.set_master(vxlan.index, Some(bridge.index)).await?;
        }
        self.point(&vxlan, &[host]).await?;
        self.net.up(vxlan.index).await?;
        self.net.up(bridge.index).await
    }

    /// New entries first, then the old ones go: no frame is without a way. To this host itself there is no tunnel. Gives whether
    /// anything has changed.
    async fn point(&self, vxlan: &Link, to: &[IpAddr]) -> Result<bool, NetError> {
        let old = self.net.fdb_of(vxlan.index, MacAddr::ZERO).await?;
        let to = || to.iter().filter(|to| **to != self.underlay);
        let mut changed = false;
        for new in to().filter(|new| !old.contains(new)) {
            self.net.fdb_add(vxlan.index, MacAddr::ZERO, *new, Fdb::Append).await?;
            changed = true;
        }
        for other in old.iter().filter(|other| !to().any(|to| to == *other)) {
            self.net.fdb_remove(vxlan.index, MacAddr::ZERO, *other).await?;
            changed = true;
        }
        Ok(changed)
    }

    async fn announce(&self, spec: &EndpointSpec, again: Option<Arc<Mutex<bool>>>) -> Result<(), NetError> {
        // On a switch from the bridge itself, so that spanning tree is honoured; the guest hears it too, and knows its own
        // address. On a tunnel from its end.
        let from = self.tunnel(spec).map_or_else(|| self.bridge(spec), |(_, wire, ..)| self.device('v', wire));
        self.announce_from(&from, spec, again).await
    }

    async fn announce_from(
        &self,
        from: &str,
        spec: &EndpointSpec,
        again: Option<Arc<Mutex<bool>>>,
    ) -> Result<(), NetError> {
        let socket = PacketSocket::open(self.net.get(from).await?.index)?;
        let frames: Vec<Frame> = spec
            .ips
            .iter()
            .map(|ip| match ip {
                IpAddr::V4(ip) => godwit_net::gratuitous_arp(spec.mac, *ip),
                IpAddr::V6(ip) => godwit_net::unsolicited_neighbour(spec.mac, *ip),
            })
            .chain([godwit_net::rarp(spec.mac)])
            .collect();
        let live = match again {
            Some(live) => live,
            None => {
                let live = Arc::new(Mutex::new(true));
                if let Some(before) = lock(&self.live).insert(spec.tap.clone(), Arc::clone(&live)) {
                    *lock(&before) = false;
                }
                live
            }
        };
        let tap = spec.tap.clone();
        tokio::spawn(async move {
            let start = Instant::now();
            for at in ANNOUNCE_AT_MS {
                tokio::time::sleep_until(start + Duration::from_millis(at)).await;
                let live = lock(&live);
                if !*live {
                    return;
                }
                for frame in &frames {
                    if let Err(error) = socket.send(frame) {
                        tracing::warn!(%tap, %error, "announcement not sent");
                    }
                }
            }
        });
        Ok(())
    }

    /// Makes tap and wiring; no frame passes and nothing is announced. Repeated on an active endpoint it leaves it active.
    ///
    /// # Errors
    /// [`WireError`].
    pub async fn stage(&self, spec: &EndpointSpec) -> Result<(), WireError> {
        self.stage_all(std::slice::from_ref(spec)).await
    }

    /// As [`Wires::stage`], for several at once.
    ///
    /// # Errors
    /// [`WireError`]; it may be repeated.
    pub async fn stage_all(&self, specs: &[EndpointSpec]) -> Result<(), WireError> {
        self.run("stage", specs, Order::Stage).await
    }

    /// Lets frames pass and announces the guest, the latter in the background.
    ///
    /// # Errors
    /// [`WireError::Stale`] when it was not staged or was activated by a later owner.
    pub async fn activate(&self, spec: &EndpointSpec, sequence: Sequence) -> Result<(), WireError> {
        self.activate_all(std::slice::from_ref(spec), sequence).await
    }

    /// As [`Wires::activate`], for several endpoints of one owner, at once.
    ///
    /// # Errors
    /// [`WireError::Stale`] when one of them was not staged or was activated by a later owner: none is touched then. Else it may be
    /// repeated.
    pub async fn activate_all(&self, specs: &[EndpointSpec], sequence: Sequence) -> Result<(), WireError> {
        self.run("activate", specs, Order::Activate(sequence)).await
    }

    /// Announces an active endpoint once more, as when its wire has just been pointed here. Any other says nothing: isolation
    /// ends these announcements as it ends the first ones.
    ///
    /// # Errors
    /// [`WireError::Net`].
    pub async fn announce_again(&self, spec: &EndpointSpec) -> Result<(), WireError> {
        let Some(live) = lock(&self.live).get(&spec.tap).cloned() else { return Ok(()) };
        self.announce(spec, Some(live)).await.map_err(net("announce", &spec.tap))
    }

    /// Stops every frame in both directions, and announcements. QEMU keeps its tap. On an absent endpoint: nothing.
    ///
    /// # Errors
    /// [`WireError::Net`].
    pub async fn isolate(&self, spec: &EndpointSpec) -> Result<(), WireError> {
        self.isolate_all(std::slice::from_ref(spec)).await
    }

    /// As [`Wires::isolate`], for several at once.
    ///
    /// # Errors
    /// [`WireError`], the first one; all that could be isolated are.
    pub async fn isolate_all(&self, specs: &[EndpointSpec]) -> Result<(), WireError> {
        self.run("isolate", specs, Order::Isolate).await
    }

    /// Removes tap and wiring.
    ///
    /// # Errors
    /// [`WireError::Net`].
    pub async fn remove(&self, spec: &EndpointSpec) -> Result<(), WireError> {
        self.remove_all(std::slice::from_ref(spec)).await
    }

    /// As [`Wires::remove`], for several at once.
    ///
    /// # Errors
    /// [`WireError`], the first one; all that could be removed are.
    pub async fn remove_all(&self, specs: &[EndpointSpec]) -> Result<(), WireError> {
        self.run("remove", specs, Order::Remove).await
    }

    /// After the vCPUs stopped and before isolation: waits, at most `bound`, until the guest's last frames have left QEMU.
    /// Gives how many left meanwhile.
    ///
    /// # Errors
    /// [`WireError::Net`], when the tap is gone.
    pub async fn drain(&self, spec: &EndpointSpec, bound: Duration) -> Result<u64, WireError> {
        let failed = || net("drain", &spec.tap);
        let end = Instant::now() + bound;
        let first = self.net.get(&spec.tap).await.map_err(failed())?.received;
        let mut last = first;
        while Instant::now() < end {
            sleep(SILENCE).await;
            let now = self.net.get(&spec.tap).await.map_err(failed())?.received;
            if now == last {
                break;
            }
            last = now;
        }
        Ok(last.saturating_sub(first))
    }

    /// What exists on this host under the prefix.
    ///
    /// # Errors
    /// [`WireError::Net`].
    pub async fn list(&self) -> Result<Vec<Found>, WireError> {
        let links = self.net.list(&self.prefix).await.map_err(net("list", &self.prefix))?;
        let pen = links.iter().find(|l| l.name == self.pen_name()).map(|l| l.index);
        let found = links.iter().map(|link| {
            let last = record::read(link.alias.as_deref());
            let rest = link.name.strip_prefix(&self.prefix).and_then(|r| r.strip_prefix('-'));
            let wire = rest.and_then(|r| u32::from_str_radix(r.get(1..)?, 16).ok()).map(WireId);
            let letter = rest.and_then(|r| r.chars().next());
            let state = match (link.kind, letter, wire) {
                (Kind::Tap, None, _) => {
                    let joined = link.master.is_some() && link.master != pen;
                    FoundState::Endpoint(record::state(last.map(|l| l.0), joined))
                }
                (Kind::Vxlan, Some('g'), Some(wire)) => FoundState::Port(wire, port_state(link)),
                (Kind::Vxlan, Some('v'), Some(wire)) | (Kind::Bridge, Some('b'), Some(wire)) => {
                    FoundState::Tunnel(wire)
                }
                _ => FoundState::Other,
            };
            Found { name: link.name.clone(), state }
        });
        Ok(found.collect())
    }

    /// Proof that the guest is reachable through its endpoint; gives how long it took. With an IPv4 address known, an ARP
    /// request from the component's side and its answer; without, any frame of the guest. It ends at this host's end of
    /// a tunnel: [`Wires::gateway_probe`] asks from the gateway.
    ///
    /// # Errors
    /// [`WireError::NoAnswer`] after `bound`.
    pub async fn probe(&self, spec: &EndpointSpec, bound: Duration) -> Result<Duration, WireError> {
        let known = spec.ips.iter().any(IpAddr::is_ipv4);
        let from = if known { self.bridge(spec) } else { spec.tap.clone() };
        self.probe_from(&from, spec.mac, &spec.ips, bound).await
    }

    /// At the gateway: proof that the guest is reachable through the whole wire. Asked from the bridge, as a client there
    /// would; without an IPv4 address, a frame of the guest that comes out of the wire's end.
    ///
    /// # Errors
    /// [`WireError::NoAnswer`] after `bound`; [`WireError::Refused`] when the wire does not end here.
    pub async fn gateway_probe(
        &self,
        bridge: &str,
        wire: WireId,
        guest: (MacAddr, &[IpAddr]),
        bound: Duration,
    ) -> Result<Duration, WireError> {
        let name = self.device('g', wire);
        let port = self.net.find(&name).await.map_err(net("probe", &name))?;
        match port.as_ref().map(port_state) {
            Some(PortState::Attached(_, remote)) => {
                let known = guest.1.iter().any(IpAddr::is_ipv4);
                // A guest on this very host is not behind the wire's end, but on the bridge itself.
                let from = if known || remote == self.underlay { bridge } else { &name };
                self.probe_from(from, guest.0, guest.1, bound).await
            }
            _ => Err(WireError::Refused { wire, why: Refused::NotAttached }),
        }
    }

    async fn probe_from(&self, on: &str, mac: MacAddr, ips: &[IpAddr], bound: Duration) -> Result<Duration, WireError> {
        let failed = || net("probe", on);
        let kernel = |source| NetError::Kernel { operation: "use raw socket on", object: on.to_owned(), source };
        let link = self.net.get(on).await.map_err(failed())?;
        let socket = PacketSocket::open(link.index).map_err(failed())?;
        let ip = ips.iter().find_map(|ip| if let IpAddr::V4(ip) = ip { Some(*ip) } else { None });
        let start = Instant::now();
        let mut buffer = [0; 128];
        while start.elapsed() < bound {
            if let Some(ip) = ip {
                socket.send(&godwit_net::arp_request(link.mac, ip)).map_err(|e| failed()(kernel(e)))?;
            }
            let next = (Instant::now() + PROBE_EVERY).min(start + bound);
            while let Ok(got) =
                timeout(next.saturating_duration_since(Instant::now()), socket.receive(&mut buffer)).await
            {
                let length = got.map_err(|e| failed()(kernel(e)))?;
                let frame = &buffer[..length.min(buffer.len())];
                let answered = match ip {
                    Some(ip) => godwit_net::arp_reply_from(frame, mac, ip),
                    None => godwit_net::source_of(frame) == Some(mac),
                };
                if answered {
                    return Ok(start.elapsed());
                }
                if Instant::now() >= next {
                    break;
                }
            }
        }
        Err(WireError::NoAnswer { object: on.to_owned(), mac, waited: bound })
    }

    /// At the gateway: the bridge exists and is up.
    ///
    /// # Errors
    /// [`WireError::Net`].
    pub async fn gateway_ensure(&self, bridge: &str) -> Result<(), WireError> {
        let failed = || net("ensure gateway", bridge);
        let link = self.net.ensure_bridge(bridge, None).await.map_err(failed())?;
        self.net.up(link.index).await.map_err(failed())
    }

    /// At the gateway: the wire is a port of its bridge and leads to `remote`.
    ///
    /// # Errors
    /// [`WireError::Refused`] for a sequence older than the last, or an equal one for another host.
    pub async fn gateway_attach(
        &self,
        port: &GatewayPort,
        remote: IpAddr,
        sequence: Sequence,
    ) -> Result<(), WireError> {
        self.run_port(port.wire, Some(port), PortOrder::Attach(sequence, remote)).await
    }

    /// At the gateway: an attached wire leads to `remote` from now on.
    ///
    /// # Errors
    /// As [`Wires::gateway_attach`], and when it is not attached.
    pub async fn gateway_repoint(&self, wire: WireId, remote: IpAddr, sequence: Sequence) -> Result<(), WireError> {
        self.run_port(wire, None, PortOrder::Repoint(sequence, remote)).await
    }

    /// At the gateway: the wire's port goes.
    ///
    /// # Errors
    /// [`WireError::Net`].
    pub async fn gateway_detach(&self, wire: WireId) -> Result<(), WireError> {
        self.run_port(wire, None, PortOrder::Detach).await
    }

    async fn run_port(&self, wire: WireId, spec: Option<&GatewayPort>, order: PortOrder) -> Result<(), WireError> {
        let name = self.device('g', wire);
        let failed = || net("change port", &name);
        let link = self.net.find(&name).await.map_err(failed())?;
        let mut port = Port::recover(link.as_ref().map_or(PortState::Absent, port_state));
        for action in port.handle(order).map_err(|why| WireError::Refused { wire, why })? {
            self.perform_port(&name, spec, action).await.map_err(failed())?;
        }
        Ok(())
    }

    async fn perform_port(&self, name: &str, spec: Option<&GatewayPort>, action: PortAction) -> Result<(), NetError> {
        match (action, spec) {
            (PortAction::Make, Some(spec)) => {
                // Nothing comes in before it is known who may send. Where that cannot be said it is tried again when it is pointed.
                let nobody = [Allowed { vni: spec.vni, port: spec.port, local: self.underlay, remotes: &[] }];
                if self.net.find(name).await?.is_none()
                    && let Err(error) = self.guard.only(&nobody).await
                {
                    tracing::warn!(port = name, %error, "it is not said yet that nobody may send");
                }
                let wanted = Vxlan { name, vni: spec.vni.0, local: self.underlay, port: spec.port };
                let vxlan = self.net.ensure_vxlan(&wanted).await?;
                let bridge = self.net.expect(&spec.bridge, Kind::Bridge, "bridge").await?;
                Net::without_ipv6(name)?;
                self.net.set_mtu(vxlan.index, spec.mtu).await?;
                if vxlan.master != Some(bridge.index) {
                    self.net.set_master(vxlan.index, Some(bridge.index)).await?;
                }
                self.net.up(vxlan.index).await
            }
            // Only an order to attach makes, and it comes with a specification.
            (PortAction::Make, None) => Ok(()),
            (PortAction::Record(sequence, remote), _) => {
                let link = self.net.get(name).await?;
                self.net.set_alias(link.index, &record::write(sequence, Some(remote))).await
            }
            (PortAction::Point(remote), _) => {
                let vxlan = self.net.get(name).await?;
                let mut ruled = Ok(());
                if let (Some(vni), Some(port)) = (vxlan.vni, vxlan.port) {
                    let remotes: &[IpAddr] = if remote == self.underlay { &[] } else { &[remote] };
                    ruled = self.guard.only(&[Allowed { vni: Vni(vni), port, local: self.underlay, remotes }]).await;
                }
                self.point(&vxlan, &[remote]).await?;
                // Whoever ordered it orders it again.
                ruled
            }
            (PortAction::Remove, _) => {
                let Some(vxlan) = self.net.find(name).await? else { return Ok(()) };
                self.net.remove(name).await?;
                if let Some(vni) = vxlan.vni {
                    self.guard.forget(Vni(vni)).await;
                }
                Ok(())
            }
        }
    }

    /// Removes an interface that [`Wires::list`] shows, and that is of no endpoint any more.
    ///
    /// # Errors
    /// [`WireError::Net`].
    pub async fn discard(&self, name: &str) -> Result<(), WireError> {
        let ours = self.list().await?.iter().any(|found| found.name == name);
        if ours {
            let link = self.net.find(name).await.map_err(net("look at", name))?;
            self.net.remove(name).await.map_err(net("remove", name))?;
            if let Some(vni) = link.and_then(|link| link.vni) {
                self.guard.forget(Vni(vni)).await;
            }
        }
        Ok(())
    }

    /// Rules about who may send by a number, where no tunnel has it: who made them died before the one, or after the other.
    /// A tunnel that is just being made has its rules first.
    ///
    /// # Errors
    /// [`WireError::Net`].
    pub async fn stale_rules(&self) -> Result<Vec<Vni>, WireError> {
        let numbers = self.guard.numbers().await;
        let links = self.net.list(&self.prefix).await.map_err(net("list", &self.prefix))?;
        let stale = numbers.into_iter().filter(|number| links.iter().all(|link| link.vni != Some(*number)));
        Ok(stale.map(Vni).collect())
    }

    /// Removes such rules; those of a tunnel that exists stay.
    ///
    /// # Errors
    /// [`WireError::Net`].
    pub async fn discard_rules(&self, vni: Vni) -> Result<(), WireError> {
        if self.stale_rules().await?.contains(&vni) {
            self.guard.forget(vni).await;
        }
        Ok(())
    }

    /// Removes the pen when it is empty: at the end of a test or of an installation.
    ///
    /// # Errors
    /// [`WireError::Net`].
    pub async fn tidy(&self) -> Result<(), WireError> {
        let name = self.pen_name();
        let links = self.net.list(&self.prefix).await.map_err(net("list", &name))?;
        let pen = links.iter().find(|l| l.name == name).map(|l| l.index);
        if pen.is_some() && links.iter().all(|l| l.master != pen) {
            self.net.remove(&name).await.map_err(net("remove", &name))?;
        }
        if links.iter().all(|l| l.kind != Kind::Vxlan) {
            self.guard.tidy().await;
        }
        Ok(())
    }
}

fn port_state(link: &Link) -> PortState {
    match record::read(link.alias.as_deref()) {
        Some((sequence, Some(remote))) => PortState::Attached(sequence, remote),
        _ => PortState::Absent,
    }
}
