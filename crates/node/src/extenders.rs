//! Extenders on this host: its tunnels to other sites, which way frames take, and that nothing goes in clear.
//!
//! The controller says which there are ([`ExtenderOrders`]); that is kept in a file, and so are the keys, which this host makes and nobody else
//! ever sees. From then on nobody has to be asked: every [`PROBE_EVERY`] the tunnels are probed, what has died is started anew,
//! others of the site are told whether a tunnel is up here, [`Ways`] chooses, and the kernel's tables follow.
//!
//! # What can go wrong
//!
//! *This node dies*: devices, programs, rules and tables stay as they are; the next one finds them by the same names. *A tunnel's program dies*:
//! its device is gone, and so are the routes onto it; frames go by another tunnel, or nowhere, until it is there again. *`nft` is missing*: a
//! carrier could not be kept from passing on anything, so it does not carry. *The state folder is lost*: devices that nobody knows are
//! removed, and the controller tells all again.

use crate::durable;
use crate::node::Node;
use crate::parts::lock;
use crate::proto::{self, Note};
use crate::spec;
use crate::tracker::unix_ms;
use godwit_api::extender::{
    ExtenderOrder, ExtenderOrders, LocalExtender, LocalExtenders, LocalTunnel, LocalWay, MOST_HOSTS, TunnelOrder,
};
use godwit_api::host::PeerHost;
use godwit_api::{ApiError, Name, Problem};
use godwit_units::Bytes;
use godwit_wire::extender::rules::{self, Passing};
use godwit_wire::extender::{
    Beyond, Engine, Hop, OVERHEAD, PREFIX, PROBE_EVERY, Paths, Peer, PeerState, Preference, PrivateKey, Prober,
    PublicKey, Tunnel, TunnelError, TunnelId, Way, Ways, forwards, interfaces, let_forward,
};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::sync::Notify;

/// Tunnels that end at one host: a bound for what is believed.
const MOST_TUNNELS: usize = 64;
/// How long a device that could not be made is left alone.
const TRY_AGAIN: Duration = Duration::from_secs(1);
/// How long a tunnel is given to agree on session keys anew ([`Tunnel::renews_after`]): several round trips, and less than WireGuard waits before it
/// asks again.
const RENEW_EVERY: Duration = Duration::from_secs(2);
/// How long nothing is read from a socket that has failed.
const AFTER_A_FAILURE: Duration = Duration::from_millis(100);
/// The MTU of a tunnel whose path nobody knows: Ethernet's, less what WireGuard adds.
const USUAL_MTU: u32 = 1500 - OVERHEAD;
/// The least that a tunnel may have.
const LEAST_MTU: u32 = 1280;

/// A tunnel's secrets, as they are kept.
#[derive(Clone, Serialize, Deserialize)]
struct Kept {
    key: String,
    device: String,
}

/// A tunnel of this host's.
#[derive(Debug)]
struct Own {
    tunnel: Tunnel,
    public: PublicKey,
    /// `kernel`, or the program's name.
    engine: &'static str,
    error: Option<String>,
    tried: Option<Instant>,
    /// Since when it may have session keys: it was made, or is with another peer.
    made: Instant,
    /// When its session keys were agreed on anew since.
    renewed: Option<Instant>,
}

/// What is carried out here; changed by one at a time.
#[derive(Debug, Default)]
struct Held {
    orders: ExtenderOrders,
    own: BTreeMap<u32, Own>,
    laid: Option<Paths>,
    passing: Option<Passing>,
    /// What keeps this host from carrying at all.
    refused: Option<String>,
    /// What keeps its frames from going, by extender.
    no_way: BTreeMap<u32, String>,
}

/// What is heard, and what was asked last: held for moments.
#[derive(Debug, Default)]
struct Heard {
    ways: BTreeMap<u32, Ways<Name>>,
    /// By the other end's address: the tunnel's extender, its number, and the question that is open.
    asked: BTreeMap<Ipv4Addr, (u32, TunnelId, u16, Instant)>,
    rtt: BTreeMap<TunnelId, Duration>,
    /// When each has answered last.
    answered: BTreeMap<TunnelId, Instant>,
    /// By extender.
    turns: BTreeMap<u32, Turn>,
}

/// Which way frames took last, and how often that was another one.
#[derive(Debug, Default)]
struct Turn {
    way: Option<Way<Name>>,
    since_unix_s: Option<u64>,
    changes: u64,
}

impl Turn {
    fn take(&mut self, way: Option<&Way<Name>>, now_unix_s: u64) {
        if way == self.way.as_ref() {
            return;
        }
        self.changes += u64::from(self.way.is_some());
        (self.way, self.since_unix_s) = (way.cloned(), Some(now_unix_s));
    }
}

/// The extenders of this host.
#[derive(Debug)]
pub struct Extenders {
    /// For what has to survive a reboot: orders and keys.
    folder: PathBuf,
    /// For programs' numbers.
    run: PathBuf,
    begun: Instant,
    held: tokio::sync::Mutex<Held>,
    heard: Mutex<Heard>,
    wake: Notify,
    watched: AtomicBool,
}

fn failed(error: impl std::fmt::Display) -> ApiError {
    ApiError::new(Problem::Failed, error.to_string())
}

fn ipv4(host: &PeerHost) -> Option<Ipv4Addr> {
    match host.underlay {
        IpAddr::V4(ip) => Some(ip),
        IpAddr::V6(_) => None,
    }
}

impl Extenders {
    /// With nothing read yet.
    #[must_use]
    pub fn new(state: &Path, run: &Path) -> Self {
        Self {
            folder: state.join("extenders"),
            run: run.join("extenders"),
            begun: Instant::now(),
            held: tokio::sync::Mutex::default(),
            heard: Mutex::default(),
            wake: Notify::new(),
            watched: AtomicBool::new(false),
        }
    }

    fn now(&self) -> Duration {
        self.begun.elapsed()
    }

    fn orders_file(&self) -> PathBuf {
        self.folder.join("orders.json")
    }

    /// Interfaces that passed nothing on before an extender needed it.
    fn closed_file(&self) -> PathBuf {
        self.folder.join("closed.json")
    }

    fn key_file(&self, tunnel: u32) -> PathBuf {
        self.folder.join("tunnels").join(format!("{tunnel}.json"))
    }

    fn number_file(&self, device: &str) -> PathBuf {
        self.run.join(format!("{device}.pid"))
    }

    fn closed(&self) -> BTreeSet<String> {
        read(&self.closed_file()).ok().flatten().unwrap_or_default()
    }

    /// The keys and the device's name of a tunnel: those that were made before, or new ones, durable before they are used.
    async fn kept(&self, tunnel: u32) -> Result<(PrivateKey, String), TunnelOrApi> {
        let path = self.key_file(tunnel);
        if let Some(kept) = read::<Kept>(&path).map_err(failed)? {
            return Ok((PrivateKey::new(&kept.key)?, kept.device));
        }
        let key = PrivateKey::generate().await?;
        let mut drawn = [0; 4];
        getrandom::fill(&mut drawn).map_err(failed)?;
        let device = format!("{PREFIX}{:08x}", u32::from_be_bytes(drawn));
        let kept = Kept { key: key.secret().to_owned(), device: device.clone() };
        durable::replace_json(&path, &kept).map_err(|e| failed(format!("{}: {e}", path.display())))?;
        Ok((key, device))
    }

    /// The tunnels that there are keys for.
    fn kept_tunnels(&self) -> Vec<u32> {
        let Ok(entries) = std::fs::read_dir(self.folder.join("tunnels")) else { return vec![] };
        entries.filter_map(|e| e.ok()?.file_name().to_str()?.strip_suffix(".json")?.parse().ok()).collect()
    }
}

/// Either of two errors, for their words.
struct TunnelOrApi(String);

impl From<TunnelError> for TunnelOrApi {
    fn from(error: TunnelError) -> Self {
        Self(error.to_string())
    }
}

impl From<ApiError> for TunnelOrApi {
    fn from(error: ApiError) -> Self {
        Self(error.to_string())
    }
}

fn read<T: serde::de::DeserializeOwned>(path: &Path) -> Result<Option<T>, String> {
    let said = |e: &dyn std::fmt::Display| format!("{}: {e}", path.display());
    match std::fs::read(path) {
        Ok(bytes) => serde_json::from_slice(&bytes).map(Some).map_err(|e| said(&e)),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(said(&e)),
    }
}

/// Refuses what no controller of ours says.
fn check(orders: &ExtenderOrders) -> Result<(), ApiError> {
    let invalid = |what: String| Err(ApiError::new(Problem::Invalid, what));
    let hosts = orders.clear.len() + orders.extenders.iter().map(|e| e.beyond.len() + e.mates.len()).sum::<usize>();
    if hosts > MOST_HOSTS {
        return invalid(format!("{hosts} hosts behind extenders, {MOST_HOSTS} are the most"));
    }
    let tunnels: Vec<&TunnelOrder> = orders.extenders.iter().flat_map(|e| &e.tunnels).collect();
    if tunnels.len() > MOST_TUNNELS {
        return invalid(format!("{} tunnels on one host, {MOST_TUNNELS} are the most", tunnels.len()));
    }
    let numbers: BTreeSet<u32> = tunnels.iter().map(|tunnel| tunnel.id).collect();
    let others: BTreeSet<Ipv4Addr> = tunnels.iter().map(|tunnel| tunnel.addresses[1]).collect();
    if numbers.len() != tunnels.len() || others.len() != tunnels.len() {
        return invalid("two tunnels have the same number, or the same address at the other end".into());
    }
    for tunnel in &tunnels {
        if let Some(key) = &tunnel.key
            && let Err(error) = PublicKey::new(key)
        {
            return invalid(format!("tunnel {}: {error}", tunnel.id));
        }
    }
    Ok(())
}

impl Node {
    /// Takes up the extenders that were here before.
    pub(crate) async fn recover_extenders(self: &Arc<Self>) {
        let extenders = self.extenders();
        match read::<ExtenderOrders>(&extenders.orders_file()) {
            Ok(Some(orders)) => {
                let mut held = extenders.held.lock().await;
                held.orders = orders;
                self.carry_out(&mut held).await;
                drop(held);
                self.watch_extenders();
            }
            Ok(None) => {}
            Err(error) => tracing::error!(error, "the extenders could not be read; the controller tells them again"),
        }
    }

    /// The controller's word on all extenders of this host.
    ///
    /// # Errors
    /// [`Problem::Invalid`], or the medium refuses. What cannot be carried out is in the answer.
    pub async fn order_extenders(self: &Arc<Self>, orders: ExtenderOrders) -> Result<LocalExtenders, ApiError> {
        check(&orders)?;
        let mut held = self.extenders().held.lock().await;
        if held.orders != orders {
            durable::replace_json(&self.extenders().orders_file(), &orders)
                .map_err(|e| failed(format!("{}: {e}", self.extenders().orders_file().display())))?;
            held.orders = orders;
            self.carry_out(&mut held).await;
        }
        if !held.orders.extenders.is_empty() {
            self.watch_extenders();
        }
        Ok(self.as_they_are(&held).await)
    }

    /// The extenders, as they are here.
    pub async fn local_extenders(&self) -> LocalExtenders {
        let held = self.extenders().held.lock().await;
        self.as_they_are(&held).await
    }

    /// The extenders' orders, each with how it is here.
    pub(crate) async fn seen_extenders(&self) -> Vec<(ExtenderOrder, LocalExtender)> {
        let held = self.extenders().held.lock().await;
        let local = self.as_they_are(&held).await.extenders;
        held.orders.extenders.iter().cloned().zip(local).collect()
    }

    /// Another host of the site says which extenders have a tunnel that is up there.
    pub(crate) fn heard_of_extenders(&self, from: &str, up: &[(u32, bool)]) {
        let Ok(from) = from.parse::<Name>() else { return };
        let (extenders, now) = (self.extenders(), self.extenders().now());
        let mut heard = lock(&extenders.heard);
        let mut lost = false;
        for (id, up) in up {
            if let Some(ways) = heard.ways.get_mut(id) {
                lost |= ways.said(&from, *up, now);
            }
        }
        drop(heard);
        if lost {
            extenders.wake.notify_one();
        }
    }
}

// What was ordered, carried out.
impl Node {
    async fn carry_out(&self, held: &mut Held) {
        let orders = held.orders.clone();
        self.know(&orders);
        held.refused = self.enforce(held).await.err();
        let wanted: BTreeSet<u32> = orders.extenders.iter().flat_map(|e| &e.tunnels).map(|t| t.id).collect();
        for extender in &orders.extenders {
            for order in &extender.tunnels {
                self.make(held, extender, order).await;
            }
        }
        // Frames leave a tunnel before it goes.
        self.steer(held).await;
        let gone: Vec<u32> = held.own.keys().copied().chain(self.extenders().kept_tunnels()).collect();
        for id in gone.into_iter().filter(|id| !wanted.contains(id)) {
            self.unmake(held, id).await;
        }
        self.remove_strays(held).await;
        if orders.extenders.is_empty() {
            self.leave_no_trace(held).await;
        }
    }

    /// Which tunnels and carriers there are, for the choice.
    fn know(&self, orders: &ExtenderOrders) {
        let mut heard = lock(&self.extenders().heard);
        heard.ways.retain(|id, _| orders.extenders.iter().any(|extender| extender.id == *id));
        heard.turns.retain(|id, _| orders.extenders.iter().any(|extender| extender.id == *id));
        for extender in &orders.extenders {
            let tunnels: Vec<_> = extender
                .tunnels
                .iter()
                .map(|t| (TunnelId(t.id), Preference { rank: t.rank, epoch: t.epoch }))
                .collect();
            let carriers = extender.carriers.iter().map(|host| host.name.clone());
            let others = carriers.filter(|name| name.as_str() != self.name()).collect();
            heard.ways.entry(extender.id).or_default().order(&tunnels, others);
        }
        let tunnels: BTreeSet<TunnelId> =
            orders.extenders.iter().flat_map(|e| &e.tunnels).map(|t| TunnelId(t.id)).collect();
        heard.asked.retain(|_, (_, id, ..)| tunnels.contains(id));
        heard.rtt.retain(|id, _| tunnels.contains(id));
        heard.answered.retain(|id, _| tunnels.contains(id));
    }

    /// What a carrier may pass on is in force before it has anything to pass on.
    async fn enforce(&self, held: &mut Held) -> Result<(), String> {
        let carrying: Vec<&ExtenderOrder> = held.orders.extenders.iter().filter(|e| !e.tunnels.is_empty()).collect();
        if carrying.is_empty() {
            return Ok(());
        }
        let mates: BTreeSet<Ipv4Addr> = carrying.iter().flat_map(|e| &e.mates).filter_map(ipv4).collect();
        let others = mates.iter().copied().filter(|ip| IpAddr::V4(*ip) != self.config().address).collect();
        let towards = interfaces(self.wires().net(), &others).await.map_err(|e| e.to_string())?;
        let mut closed = self.extenders().closed();
        let before = closed.len();
        closed.extend(towards.keys().filter(|name| !forwards(name)).cloned());
        if closed.len() != before {
            durable::replace_json(&self.extenders().closed_file(), &closed).map_err(|e| e.to_string())?;
        }
        let beyond = carrying.iter().flat_map(|e| &e.beyond).copied().collect();
        let passing = Passing { beyond, mates, port: spec::TUNNEL_PORT, closed };
        if held.passing.as_ref() != Some(&passing) {
            rules::enforce(&passing)
                .await
                .map_err(|why| format!("this host cannot carry without nftables' rules: {why}; install nftables"))?;
            held.passing = Some(passing);
        }
        for name in towards.keys() {
            let_forward(name, true).map_err(|e| e.to_string())?;
        }
        Ok(())
    }

    async fn make(&self, held: &mut Held, extender: &ExtenderOrder, order: &TunnelOrder) {
        let extenders = self.extenders();
        let made = async {
            let (key, device) = extenders.kept(order.id).await?;
            let public = match held.own.get(&order.id) {
                Some(own) => own.public.clone(),
                None => key.public().await?,
            };
            let peer = match &order.key {
                Some(key) => {
                    Some(Peer { key: PublicKey::new(key)?, endpoint: order.endpoint, hosts: extender.beyond.clone() })
                }
                None => None,
            };
            let mtu = self.mtu_towards(order).await;
            let (listen, addresses) = (order.listen, order.addresses);
            Ok::<_, TunnelOrApi>((Tunnel { device, key, listen, addresses, mtu, peer }, public))
        };
        match made.await {
            // To say the same again would have its port closed and opened.
            Ok((tunnel, _))
                if held.own.get(&order.id).is_some_and(|own| own.error.is_none() && own.tunnel == tunnel) => {}
            Ok((tunnel, public)) => {
                let before = held.own.get(&order.id);
                let engine = before.map_or("", |own| own.engine);
                let key = |tunnel: &Tunnel| tunnel.peer.as_ref().map(|peer| peer.key.clone());
                // Other hosts behind the same peer leave the session as it is.
                let same = before.filter(|own| key(&own.tunnel) == key(&tunnel));
                let (made, renewed) = same.map_or_else(|| (Instant::now(), None), |own| (own.made, own.renewed));
                let mut own = Own { tunnel, public, engine, error: None, tried: None, made, renewed };
                self.ensure(&mut own, held.refused.as_deref()).await;
                held.own.insert(order.id, own);
            }
            Err(TunnelOrApi(why)) => {
                tracing::error!(tunnel = order.id, why, "a tunnel cannot be made");
                held.no_way.insert(extender.id, why);
            }
        }
        // Routes onto a device that was made anew have to be set anew.
        held.laid = None;
    }

    async fn ensure(&self, own: &mut Own, refused: Option<&str>) {
        own.tried = Some(Instant::now());
        if let Some(why) = refused {
            own.error = Some(why.to_owned());
            return;
        }
        let file = self.extenders().number_file(&own.tunnel.device);
        if let Some(folder) = file.parent() {
            let _ = std::fs::create_dir_all(folder);
        }
        match own.tunnel.ensure(self.wires().net(), &file).await {
            Ok(engine) => {
                own.engine = if engine.is_some() { Engine::PROGRAM } else { "kernel" };
                own.error = None;
            }
            Err(error) => {
                tracing::error!(device = own.tunnel.device, %error, "a tunnel is not as it should be; trying again");
                own.error = Some(error.to_string());
            }
        }
    }

    async fn mtu_towards(&self, order: &TunnelOrder) -> u16 {
        let net = self.wires().net();
        let known = async {
            let IpAddr::V4(ip) = order.endpoint?.ip() else { return None };
            let next = net.next_hop(ip).await.ok()?;
            Some(net.numbered(next.link).await.ok()?.mtu.saturating_sub(OVERHEAD))
        };
        let mtu = known.await.unwrap_or(USUAL_MTU).clamp(LEAST_MTU, u32::from(u16::MAX));
        u16::try_from(mtu).unwrap_or(u16::MAX)
    }

    async fn unmake(&self, held: &mut Held, id: u32) {
        let extenders = self.extenders();
        let device = match held.own.remove(&id) {
            Some(own) => Some(own.tunnel.device),
            None => read::<Kept>(&extenders.key_file(id)).ok().flatten().map(|kept| kept.device),
        };
        if let Some(device) = device
            && let Err(error) = Tunnel::remove(self.wires().net(), &device, &extenders.number_file(&device)).await
        {
            // Its key stays, and with it the knowledge of what is to go.
            tracing::error!(device, %error, "a tunnel could not be removed; trying again at the next order");
            return;
        }
        if let Err(error) = durable::remove(&extenders.key_file(id)) {
            tracing::error!(tunnel = id, %error, "the keys of a tunnel that is gone could not be removed");
        }
    }

    /// Devices that nobody knows any more.
    async fn remove_strays(&self, held: &Held) {
        let net = self.wires().net();
        let devices = Tunnel::devices(net).await.unwrap_or_default();
        for device in devices.iter().filter(|name| held.own.values().all(|own| own.tunnel.device != **name)) {
            tracing::warn!(device, "a tunnel that nobody knows; it is removed");
            if let Err(error) = Tunnel::remove(net, device, &self.extenders().number_file(device)).await {
                tracing::error!(device, %error, "it could not be removed");
            }
        }
    }

    async fn leave_no_trace(&self, held: &mut Held) {
        for interface in self.extenders().closed() {
            // It may be gone, with what it connected to.
            let _ = let_forward(&interface, false);
        }
        let _ = durable::remove(&self.extenders().closed_file());
        rules::lift().await;
        (held.passing, held.laid) = (None, None);
        held.no_way.clear();
    }

    /// The kernel's tables follow what is chosen.
    async fn steer(&self, held: &mut Held) {
        let net = self.wires().net();
        let orders = &held.orders;
        if orders.extenders.is_empty() {
            if let Err(error) = Paths::take_up(net, spec::TUNNEL_PORT).await {
                tracing::error!(%error, "frames still go where extenders led them");
            }
            return;
        }
        let now = self.extenders().now();
        let mut paths = Paths { clear: orders.clear.iter().copied().collect(), beyond: vec![] };
        {
            let heard = &mut *lock(&self.extenders().heard);
            for extender in &orders.extenders {
                let Some(ways) = heard.ways.get_mut(&extender.id) else { continue };
                heard.turns.entry(extender.id).or_default().take(ways.choose(now), unix_ms() / 1000);
                let device = |id: &TunnelId| held.own.get(&id.0).map(|own| own.tunnel.device.clone());
                let carrier = |name: &Name| extender.carriers.iter().find(|host| &host.name == name).and_then(ipv4);
                let hop = match ways.choose(now) {
                    Some(Way::Tunnel(id)) => device(id).map(Hop::Device),
                    Some(Way::Carrier(name)) => carrier(name).map(Hop::Carrier),
                    None => None,
                };
                let into = ways.takes(now).and_then(|id| device(&id));
                paths.beyond.push(Beyond { hosts: extender.beyond.iter().copied().collect(), hop, into });
            }
        }
        if held.laid.as_ref() == Some(&paths) {
            return;
        }
        match paths.lay(net, spec::TUNNEL_PORT).await {
            Ok(missing) => {
                held.no_way.clear();
                for why in &missing {
                    tracing::warn!(%why, "frames for another site go nowhere");
                }
                if let (Some(why), Some(extender)) = (missing.first(), orders.extenders.first()) {
                    held.no_way.insert(extender.id, why.to_string());
                }
                // What leads nowhere is looked for again.
                held.laid = missing.is_empty().then_some(paths);
            }
            Err(error) => tracing::error!(%error, "frames may go nowhere; trying again"),
        }
    }
}

// What is done all the time.
impl Node {
    /// Looks after the extenders from now on, once.
    fn watch_extenders(self: &Arc<Self>) {
        if self.extenders().watched.swap(true, Ordering::Relaxed) {
            return;
        }
        let mut mark = [0; 2];
        let prober = getrandom::fill(&mut mark).map_err(|e| std::io::Error::other(e.to_string()));
        let prober = match prober.and_then(|()| Prober::open(u16::from_be_bytes(mark))) {
            Ok(prober) => Arc::new(prober),
            Err(error) => {
                tracing::error!(%error, "tunnels cannot be probed: give the node CAP_NET_RAW");
                self.extenders().watched.store(false, Ordering::Relaxed);
                return;
            }
        };
        let (node, answers) = (Arc::downgrade(self), prober.clone());
        tokio::spawn(async move {
            loop {
                let answer = answers.answer().await;
                let Some(node) = node.upgrade() else { return };
                let Ok(answer) = answer else {
                    // Nothing that the kernel says once is a reason never to listen again.
                    drop(node);
                    tokio::time::sleep(AFTER_A_FAILURE).await;
                    continue;
                };
                let (extenders, now) = (node.extenders(), node.extenders().now());
                let mut heard = lock(&extenders.heard);
                let Some((extender, id, sequence, sent)) = heard.asked.get(&answer.from).copied() else { continue };
                if sequence == answer.sequence {
                    heard.rtt.insert(id, sent.elapsed());
                }
                heard.answered.insert(id, Instant::now());
                if let Some(ways) = heard.ways.get_mut(&extender) {
                    ways.answered(id, now);
                }
            }
        });
        let node = Arc::downgrade(self);
        tokio::spawn(async move {
            let mut sequence = 0_u16;
            loop {
                let Some(node) = node.upgrade() else { return };
                sequence = sequence.wrapping_add(1);
                node.look_after_extenders(&prober, sequence).await;
                let extenders = node.extenders();
                tokio::select! {
                    () = tokio::time::sleep(PROBE_EVERY) => {}
                    () = extenders.wake.notified() => {}
                }
            }
        });
    }

    async fn look_after_extenders(self: &Arc<Self>, prober: &Prober, sequence: u16) {
        let extenders = self.extenders();
        let mut held = extenders.held.lock().await;
        self.mend(&mut held).await;
        for extender in &held.orders.extenders {
            for order in &extender.tunnels {
                let other = order.addresses[1];
                let asked = (extender.id, TunnelId(order.id), sequence, Instant::now());
                lock(&extenders.heard).asked.insert(other, asked);
                // That there is no way is no answer either.
                let _ = prober.ask(other, sequence);
            }
        }
        self.steer(&mut held).await;
        self.tell_mates(&held);
    }

    /// Tunnels whose devices are gone are made anew, and those that somebody has set down, which took their routes, are set up.
    async fn mend(&self, held: &mut Held) {
        if held.refused.is_some() {
            held.refused = self.enforce(held).await.err();
        }
        let refused = held.refused.clone();
        let mut made_anew = false;
        for (id, own) in &mut held.own {
            let works = matches!(self.wires().net().find(&own.tunnel.device).await, Ok(Some(link)) if link.up);
            if own.error.is_none() && works {
                let last = lock(&self.extenders().heard).answered.get(&TunnelId(*id)).copied();
                let heard = last.filter(|at| *at > own.made);
                let patience = own.tunnel.renews_after(heard.is_some());
                let silent = patience.is_some_and(|patience| heard.unwrap_or(own.made).elapsed() > patience);
                if silent && own.renewed.is_none_or(|at| at.elapsed() > RENEW_EVERY) {
                    own.renewed = Some(Instant::now());
                    if let Err(error) = own.tunnel.renew().await {
                        own.error = Some(error.to_string());
                    }
                }
                continue;
            }
            if !works {
                tracing::warn!(
                    tunnel = id,
                    device = own.tunnel.device,
                    "a tunnel's device is gone or down; making it anew"
                );
                lock(&self.extenders().heard).ways.values_mut().for_each(|ways| ways.gone(TunnelId(*id)));
            }
            if own.tried.is_none_or(|tried| tried.elapsed() >= TRY_AGAIN) {
                self.ensure(own, refused.as_deref()).await;
                (own.made, own.renewed) = (Instant::now(), None);
                made_anew = true;
            }
        }
        if made_anew {
            held.laid = None;
        }
    }

    /// Says to others of the site whether a tunnel is up here.
    fn tell_mates(self: &Arc<Self>, held: &Held) {
        let now = self.extenders().now();
        let mut words: BTreeMap<Name, (PeerHost, Vec<(u32, bool)>)> = BTreeMap::new();
        for extender in held.orders.extenders.iter().filter(|extender| !extender.tunnels.is_empty()) {
            let up = lock(&self.extenders().heard).ways.get(&extender.id).is_some_and(|ways| ways.carries(now));
            for mate in extender.mates.iter().filter(|mate| mate.name.as_str() != self.name()) {
                let word = words.entry(mate.name.clone()).or_insert_with(|| (mate.clone(), vec![]));
                word.1.push((extender.id, up));
            }
        }
        for (mate, up) in words.into_values() {
            self.peers().say(self, mate, proto::encode(&Note::Extenders { up }));
        }
    }

    async fn as_they_are(&self, held: &Held) -> LocalExtenders {
        let mut states: BTreeMap<u32, PeerState> = BTreeMap::new();
        for (id, own) in &held.own {
            if let Ok(Some(state)) = Tunnel::state(&own.tunnel.device).await {
                states.insert(*id, state);
            }
        }
        let now = self.extenders().now();
        let heard = lock(&self.extenders().heard);
        let extender = |order: &ExtenderOrder| {
            let ways = heard.ways.get(&order.id);
            let way = ways.and_then(|ways| ways.way().cloned());
            let into = ways.and_then(|ways| ways.takes(now));
            let tunnel = |order: &TunnelOrder| {
                let own = held.own.get(&order.id)?;
                let (id, state) = (TunnelId(order.id), states.get(&order.id).copied().unwrap_or_default());
                Some(LocalTunnel {
                    id: order.id,
                    key: own.public.as_str().to_owned(),
                    device: own.tunnel.device.clone(),
                    up: ways.is_some_and(|ways| ways.is_up(id, now)),
                    in_use: way == Some(Way::Tunnel(id)) || into == Some(id),
                    engine: own.engine.to_owned(),
                    endpoint: state.endpoint,
                    handshake_unix_s: state.handshake_unix_s,
                    received: Bytes(state.received),
                    sent: Bytes(state.sent),
                    rtt_ms: heard.rtt.get(&id).map(|rtt| rtt.as_secs_f64() * 1e3),
                    error: own.error.clone(),
                })
            };
            let tunnels = order.tunnels.iter().filter_map(tunnel).collect();
            let local = match way.clone() {
                Some(Way::Tunnel(id)) => Some(LocalWay::Tunnel(id.0)),
                Some(Way::Carrier(name)) => Some(LocalWay::Carrier(name)),
                None => None,
            };
            let turn = heard.turns.get(&order.id);
            let (since_unix_s, changes) = turn.map_or((None, 0), |turn| (turn.since_unix_s, turn.changes));
            let error = held.no_way.get(&order.id).or(held.refused.as_ref()).cloned();
            let good = ways.is_some_and(|ways| ways.is_good(now)) && error.is_none();
            LocalExtender { id: order.id, way: local, good, since_unix_s, changes, error, tunnels }
        };
        LocalExtenders { extenders: held.orders.extenders.iter().map(extender).collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(id: u32, other: [u8; 4]) -> TunnelOrder {
        TunnelOrder {
            id,
            epoch: 1,
            peer: "b".parse().expect("a name"),
            rank: 0,
            listen: None,
            endpoint: None,
            key: None,
            addresses: [[169, 254, 64, 2].into(), other.into()],
        }
    }

    fn orders(tunnels: Vec<TunnelOrder>, beyond: usize) -> ExtenderOrders {
        let beyond = vec![Ipv4Addr::new(10, 0, 0, 2); beyond];
        let site = "texas".parse().expect("a name");
        let extender = ExtenderOrder { id: 1, site, beyond, mates: vec![], carriers: vec![], tunnels };
        ExtenderOrders { clear: vec![], extenders: vec![extender] }
    }

    #[test]
    fn a_way_that_is_taken_again_is_no_change_and_the_first_one_is_none_either() {
        let (first, second) = (Way::Tunnel(TunnelId(1)), Way::Carrier("b".parse().expect("a name")));
        let mut turn = Turn::default();
        let mut seen = vec![];
        for (way, now) in
            [(None, 1), (Some(&first), 2), (Some(&first), 3), (Some(&second), 4), (None, 5), (Some(&first), 6)]
        {
            turn.take(way, now);
            seen.push((turn.changes, turn.since_unix_s));
        }
        assert_eq!(seen, [(0, None), (0, Some(2)), (0, Some(2)), (1, Some(4)), (2, Some(5)), (2, Some(6))]);
    }

    #[test]
    fn what_no_controller_says_is_refused() {
        let (one, two) = (order(1, [169, 254, 64, 3]), order(2, [169, 254, 64, 5]));
        assert!(check(&orders(vec![one.clone(), two.clone()], 2)).is_ok());
        assert!(check(&orders(vec![one.clone(), one.clone()], 2)).is_err());
        assert!(check(&orders(vec![one.clone(), TunnelOrder { id: 3, ..one.clone() }], 2)).is_err());
        assert!(check(&orders(vec![TunnelOrder { key: Some("x\nPrivateKey".into()), ..two }], 2)).is_err());
        assert!(check(&orders(vec![one], MOST_HOSTS + 1)).is_err());
        let many = (0..=64).map(|n| order(n, [169, 254, 64, u8::try_from(n).expect("it is small")])).collect();
        assert!(check(&orders(many, 1)).is_err());
    }
}
