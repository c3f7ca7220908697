//! Extenders on this host: its tunnels to other sites, which way frames take, and that nothing goes in clear.
//!
//! The controller says which there are ([`ExtenderOrders`]); that is kept in a file, and so are the keys, which this host makes and nobody else
//! ever sees. From then on nobody has to be asked: every [`PROBE_EVERY`] the tunnels are probed, what has died is started anew,
//! others of the site are told whether a tunnel is up here, [`Ways`] chooses, and the kernel's tables follow. Every few seconds the kernel is
//! asked whether it still has what it was given, and is given what it lacks.
//!
//! # Locks
//!
//! Orders are carried out one after the other (`ordering`). What is known is changed under `held`, under which nobody waits
//! for a program: who works on a tunnel, or asks `nft`, has a lock for that alone, and takes the other one for moments, before and after. So a `wg`
//! or a tunnel's program that hangs holds up its own tunnel, and no probe.
//!
//! # What can go wrong
//!
//! *This node dies*: devices, programs, rules and tables stay as they are; the next one finds them by the same names. *A tunnel's program dies*:
//! its device is gone, and so are the routes onto it; frames go by another tunnel, or nowhere, until it is there again. *`nft` is missing*: a
//! carrier could not be kept from passing on anything, so it does not carry. *Somebody removes rules or routes*: they are laid again at the next
//! look, and whoever asks is told. *A tunnel cannot even be prepared*: that is told, and tried again; its device stays in use. *The state folder is
//! lost*: devices that nobody knows are removed, and the controller tells all again.

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
use godwit_wire::extender::rules::{self, InForce, Passing};
use godwit_wire::extender::{
    Beyond, Engine, Hop, Laid, OVERHEAD, PREFIX, PROBE_EVERY, Paths, Peer, PeerState, Preference, PrivateKey, Prober,
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
use tokio::task::JoinSet;

/// Tunnels that end at one host: a bound for what is believed.
const MOST_TUNNELS: usize = 64;
/// How long a device that could not be made is left alone.
const TRY_AGAIN: Duration = Duration::from_secs(1);
/// How often the kernel is asked whether it has what it was given. With the time until the next probe that is less than the five seconds that
/// people are told: so long frames may go in clear after somebody has removed it.
const LOOK_EVERY: Duration = Duration::from_secs(4);
/// How long is told what was missing: longer than controllers take to ask.
const TOLD_FOR: Duration = Duration::from_secs(30);
/// What is told then, of tables and of rules.
const ASTRAY: &str = "routes or rules of the tables 4789 and 4790 were gone, and frames may have gone in clear; they are laid again: see who \
                      removes them (systemd-networkd leaves them with ManageForeignRoutingPolicyRules=no and ManageForeignRoutes=no)";
const OPEN: &str = "nftables' rules of this host, or forwarding, were gone, and frames may have gone in clear; they are set again: see who \
                    removes them (whatever says `flush ruleset`)";
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
#[derive(Clone, Debug)]
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

/// A tunnel that could not be prepared: its keys could not be made, or read.
#[derive(Clone, Debug)]
struct Failed {
    /// Its extender.
    extender: u32,
    /// Its device, where that is known: it may have been made before, and does its work.
    device: Option<String>,
    why: String,
    tried: Instant,
}

/// What is carried out here. Nobody waits for a program under its lock.
#[derive(Clone, Debug, Default)]
struct Held {
    orders: ExtenderOrders,
    own: BTreeMap<u32, Own>,
    failed: BTreeMap<u32, Failed>,
    /// A tunnel, and its place in `own` and `failed`, is changed by one at a time, who has its lock.
    alone: BTreeMap<u32, Arc<tokio::sync::Mutex<()>>>,
    laid: Option<Paths>,
    /// When the kernel was asked last whether it has that.
    looked: Option<Instant>,
    /// Interfaces that passed nothing on before an extender needed it, as in their file.
    closed: BTreeSet<String>,
    /// What keeps this host from carrying at all.
    refused: Option<String>,
    /// Why the kernel does not take tables and rules.
    unlaid: Option<String>,
    /// What keeps its frames from going, by extender.
    no_way: BTreeMap<u32, String>,
    /// What somebody had removed, when that was seen last.
    mended: Option<(Instant, &'static str)>,
}

impl Held {
    fn ordered(&self, tunnel: u32) -> Option<(&ExtenderOrder, &TunnelOrder)> {
        let mut all = self.orders.extenders.iter().flat_map(|e| e.tunnels.iter().map(move |order| (e, order)));
        all.find(|(_, order)| order.id == tunnel)
    }

    fn device(&self, tunnel: TunnelId) -> Option<String> {
        let own = self.own.get(&tunnel.0).map(|own| own.tunnel.device.clone());
        own.or_else(|| self.failed.get(&tunnel.0)?.device.clone())
    }

    /// The lock of a tunnel.
    fn alone(&mut self, tunnel: u32) -> Arc<tokio::sync::Mutex<()>> {
        self.alone.entry(tunnel).or_default().clone()
    }

    /// What is wrong now with an extender.
    fn wrong(&self, extender: u32) -> Option<&String> {
        let failed = self.failed.values().find(|failed| failed.extender == extender).map(|failed| &failed.why);
        let here = failed.or(self.refused.as_ref()).or(self.unlaid.as_ref());
        self.no_way.get(&extender).or(here)
    }

    /// Says that somebody had removed something.
    fn note(&mut self, what: &'static str) {
        tracing::warn!("{what}");
        self.mended = Some((Instant::now(), what));
    }

    /// What somebody has removed lately.
    fn noted(&self) -> Option<&'static str> {
        self.mended.filter(|(at, _)| at.elapsed() < TOLD_FOR).map(|(_, what)| what)
    }
}

/// What a carrier passes on, and how that was seen when it had been put into force.
#[derive(Debug)]
struct Enforced {
    passing: Passing,
    seen: InForce,
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
    /// One order at a time.
    ordering: tokio::sync::Mutex<()>,
    /// Of whoever asks `nft`.
    enforced: tokio::sync::Mutex<Option<Enforced>>,
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
            ordering: tokio::sync::Mutex::default(),
            enforced: tokio::sync::Mutex::default(),
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
    fn kept_tunnels(&self) -> Result<Vec<u32>, String> {
        let folder = self.folder.join("tunnels");
        match std::fs::read_dir(&folder) {
            Ok(entries) => {
                Ok(entries.filter_map(|e| e.ok()?.file_name().to_str()?.strip_suffix(".json")?.parse().ok()).collect())
            }
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(vec![]),
            Err(e) => Err(format!("{}: {e}", folder.display())),
        }
    }

    /// The device of a tunnel that there are keys for.
    fn kept_device(&self, tunnel: u32) -> Result<Option<String>, String> {
        Ok(read::<Kept>(&self.key_file(tunnel))?.map(|kept| kept.device))
    }

    /// The devices of all of them; an error if one cannot be read: it may be anybody's.
    fn kept_devices(&self) -> Result<BTreeSet<String>, String> {
        let devices: Result<Vec<Option<String>>, String> =
            self.kept_tunnels()?.into_iter().map(|tunnel| self.kept_device(tunnel)).collect();
        Ok(devices?.into_iter().flatten().collect())
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
        match read::<ExtenderOrders>(&self.extenders().orders_file()) {
            Ok(Some(orders)) => {
                self.carry_out(orders).await;
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
        let node = Arc::clone(self);
        // Goes on when whoever asked hangs up: the same orders are not carried out again.
        let task = tokio::spawn(async move { node.obey_orders(orders).await });
        task.await.map_err(|e| failed(format!("carrying out broke off: {e}")))??;
        Ok(self.local_extenders().await)
    }

    async fn obey_orders(self: &Arc<Self>, orders: ExtenderOrders) -> Result<(), ApiError> {
        let extenders = self.extenders();
        let _one = extenders.ordering.lock().await;
        let any = !orders.extenders.is_empty();
        let known = extenders.held.lock().await.orders == orders;
        if !known {
            durable::replace_json(&extenders.orders_file(), &orders)
                .map_err(|e| failed(format!("{}: {e}", extenders.orders_file().display())))?;
            self.carry_out(orders).await;
        }
        if any {
            self.watch_extenders();
        }
        Ok(())
    }

    /// The extenders, as they are here.
    pub async fn local_extenders(&self) -> LocalExtenders {
        let held = self.extenders().held.lock().await.clone();
        self.as_they_are(&held).await
    }

    /// The extenders' orders, each with how it is here.
    pub(crate) async fn seen_extenders(&self) -> Vec<(ExtenderOrder, LocalExtender)> {
        let held = self.extenders().held.lock().await.clone();
        let local = self.as_they_are(&held).await.extenders;
        held.orders.extenders.into_iter().zip(local).collect()
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
    async fn carry_out(self: &Arc<Self>, orders: ExtenderOrders) {
        let extenders = self.extenders();
        let wanted: BTreeSet<u32> = orders.extenders.iter().flat_map(|e| &e.tunnels).map(|t| t.id).collect();
        let any = !orders.extenders.is_empty();
        {
            let mut held = extenders.held.lock().await;
            self.know(&orders);
            held.orders = orders;
            held.failed.retain(|id, _| wanted.contains(id));
        }
        self.enforce().await;
        // Side by side: one that hangs holds up the answer, not the others.
        let mut making = JoinSet::new();
        for id in wanted.iter().copied() {
            let node = Arc::clone(self);
            making.spawn(async move { node.make(id).await });
        }
        making.join_all().await;
        let gone: Vec<u32> = {
            let mut held = extenders.held.lock().await;
            (held.laid, held.looked) = (None, None);
            // Frames leave a tunnel before it goes.
            self.steer(&mut held).await;
            held.own.keys().copied().chain(extenders.kept_tunnels().unwrap_or_default()).collect()
        };
        for id in gone.into_iter().filter(|id| !wanted.contains(id)) {
            self.unmake(id).await;
        }
        self.remove_strays().await;
        if !any {
            self.leave_no_trace().await;
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

    /// What a carrier may pass on is in force before it has anything to pass on, and again when somebody has removed it. Whether it is.
    async fn enforce(&self) -> bool {
        let extenders = self.extenders();
        let mut enforced = extenders.enforced.lock().await;
        // Read by whose turn it is: what was lifted meanwhile is not put into force again.
        let orders = extenders.held.lock().await.orders.clone();
        let done = self.enforce_for(&orders, &mut enforced).await;
        let mut held = extenders.held.lock().await;
        held.closed = extenders.closed();
        if done == Ok(true) {
            held.note(OPEN);
        }
        held.refused = done.err();
        held.refused.is_none()
    }

    /// As [`Self::enforce`], for these orders. Whether somebody had removed something.
    async fn enforce_for(&self, orders: &ExtenderOrders, enforced: &mut Option<Enforced>) -> Result<bool, String> {
        let carrying: Vec<&ExtenderOrder> = orders.extenders.iter().filter(|e| !e.tunnels.is_empty()).collect();
        if carrying.is_empty() {
            return Ok(false);
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
        let known = enforced.as_ref().filter(|known| known.passing == passing);
        let stands = match known {
            Some(known) => rules::in_force().await.is_ok_and(|seen| seen == known.seen),
            None => false,
        };
        let again = known.is_some();
        let mut mended = again && !stands;
        if !stands {
            *enforced = None;
            let seen = rules::enforce(&passing)
                .await
                .map_err(|why| format!("this host cannot carry without nftables' rules: {why}; install nftables"))?;
            *enforced = Some(Enforced { passing, seen });
        }
        for name in towards.keys() {
            mended |= again && !forwards(name);
            let_forward(name, true).map_err(|e| e.to_string())?;
        }
        Ok(mended)
    }

    /// A tunnel is as it was ordered, or what keeps it from that is known, and tried again ([`Self::mend`]).
    async fn make(&self, id: u32) {
        let alone = self.extenders().held.lock().await.alone(id);
        let _alone = alone.lock().await;
        self.make_alone(id).await;
    }

    /// As [`Self::make`], by whoever has the tunnel's lock.
    async fn make_alone(&self, id: u32) {
        let extenders = self.extenders();
        let (extender, hosts, order, before, refused) = {
            let held = extenders.held.lock().await;
            let Some((extender, order)) = held.ordered(id) else { return };
            let before = held.own.get(&id).cloned();
            (extender.id, extender.beyond.clone(), order.clone(), before, held.refused.clone())
        };
        let made = match self.prepare(&order, hosts, before.as_ref()).await {
            // To say the same again would have its port closed and opened.
            Ok((tunnel, _)) if before.as_ref().is_some_and(|own| own.error.is_none() && own.tunnel == tunnel) => {
                Ok(None)
            }
            Ok((tunnel, public)) => {
                let engine = before.as_ref().map_or("", |own| own.engine);
                let key = |tunnel: &Tunnel| tunnel.peer.as_ref().map(|peer| peer.key.clone());
                // Other hosts behind the same peer leave the session as it is.
                let same = before.filter(|own| key(&own.tunnel) == key(&tunnel));
                let (made, renewed) = same.map_or_else(|| (Instant::now(), None), |own| (own.made, own.renewed));
                let mut own = Own { tunnel, public, engine, error: None, tried: None, made, renewed };
                self.ensure(&mut own, refused.as_deref()).await;
                Ok(Some(own))
            }
            Err(TunnelOrApi(why)) => Err(why),
        };
        let mut held = extenders.held.lock().await;
        // It may have been ordered away meanwhile; whoever does so waits to remove it.
        if held.ordered(id).is_none() {
            return;
        }
        match made {
            Ok(own) => {
                held.failed.remove(&id);
                held.own.extend(own.map(|own| (id, own)));
            }
            Err(why) => {
                if held.failed.get(&id).is_none_or(|before| before.why != why) {
                    tracing::error!(tunnel = id, why, "a tunnel cannot be prepared; trying again");
                }
                let device = extenders.kept_device(id).ok().flatten();
                held.failed.insert(id, Failed { extender, device, why, tried: Instant::now() });
            }
        }
        // Routes onto a device that was made anew have to be set anew.
        held.laid = None;
    }

    /// A tunnel as it is to be, and its public key.
    async fn prepare(
        &self,
        order: &TunnelOrder,
        hosts: Vec<Ipv4Addr>,
        before: Option<&Own>,
    ) -> Result<(Tunnel, PublicKey), TunnelOrApi> {
        let (key, device) = self.extenders().kept(order.id).await?;
        let public = match before {
            Some(own) => own.public.clone(),
            None => key.public().await?,
        };
        let peer = match &order.key {
            Some(key) => Some(Peer { key: PublicKey::new(key)?, endpoint: order.endpoint, hosts }),
            None => None,
        };
        let mtu = self.mtu_towards(order).await;
        Ok((Tunnel { device, key, listen: order.listen, addresses: order.addresses, mtu, peer }, public))
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

    async fn unmake(&self, id: u32) {
        let extenders = self.extenders();
        let (own, alone) = {
            let mut held = extenders.held.lock().await;
            (held.own.remove(&id), held.alone(id))
        };
        // After whoever works on it now.
        let _alone = alone.lock().await;
        let device = match own {
            Some(own) => Some(own.tunnel.device),
            None => extenders.kept_device(id).ok().flatten(),
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
        extenders.held.lock().await.alone.remove(&id);
    }

    /// Devices that nobody knows any more.
    async fn remove_strays(&self) {
        let (net, extenders) = (self.wires().net(), self.extenders());
        let mut known = match extenders.kept_devices() {
            Ok(known) => known,
            Err(why) => {
                tracing::error!(why, "nobody knows which tunnels' devices are strays; none is removed");
                return;
            }
        };
        known.extend(extenders.held.lock().await.own.values().map(|own| own.tunnel.device.clone()));
        let devices = Tunnel::devices(net).await.unwrap_or_default();
        for device in devices.iter().filter(|name| !known.contains(*name)) {
            tracing::warn!(device, "a tunnel that nobody knows; it is removed");
            if let Err(error) = Tunnel::remove(net, device, &extenders.number_file(device)).await {
                tracing::error!(device, %error, "it could not be removed");
            }
        }
    }

    async fn leave_no_trace(&self) {
        let extenders = self.extenders();
        let mut enforced = extenders.enforced.lock().await;
        for interface in extenders.closed() {
            // It may be gone, with what it connected to.
            let _ = let_forward(&interface, false);
        }
        let _ = durable::remove(&extenders.closed_file());
        rules::lift().await;
        *enforced = None;
        let mut held = extenders.held.lock().await;
        (held.laid, held.unlaid, held.mended) = (None, None, None);
        held.no_way.clear();
        held.closed.clear();
    }

    /// The kernel's tables follow what is chosen, and it has them still.
    async fn steer(&self, held: &mut Held) {
        let net = self.wires().net();
        let due = held.looked.is_none_or(|at| at.elapsed() >= LOOK_EVERY);
        if held.orders.extenders.is_empty() {
            if due {
                match Paths::take_up(net, spec::TUNNEL_PORT).await {
                    Ok(()) => held.looked = Some(Instant::now()),
                    Err(error) => tracing::error!(%error, "frames still go where extenders led them"),
                }
            }
            return;
        }
        let (paths, whose) = self.paths(held);
        let same = held.laid.as_ref() == Some(&paths);
        if same && !due {
            return;
        }
        held.looked = Some(Instant::now());
        match paths.lay(net, spec::TUNNEL_PORT).await {
            Ok(Laid { missing, changed }) => {
                let missing = missing.iter().filter_map(|(place, why)| Some((*whose.get(*place)?, why.to_string())));
                let no_way: BTreeMap<u32, String> = missing.collect();
                if no_way != held.no_way {
                    for why in no_way.values() {
                        tracing::warn!(why, "frames for another site go nowhere");
                    }
                }
                if same && changed && no_way.is_empty() {
                    held.note(ASTRAY);
                }
                // What leads nowhere is looked for again.
                held.laid = no_way.is_empty().then_some(paths);
                (held.no_way, held.unlaid) = (no_way, None);
            }
            Err(error) => {
                let why = error.to_string();
                if held.unlaid.as_ref() != Some(&why) {
                    tracing::error!(why, "frames may go nowhere; trying again");
                }
                // A part may have been laid.
                (held.laid, held.unlaid) = (None, Some(why));
            }
        }
    }

    /// What is chosen now, and whose the places beyond are.
    fn paths(&self, held: &Held) -> (Paths, Vec<u32>) {
        let (orders, now) = (&held.orders, self.extenders().now());
        let clear = orders.clear.iter().copied().collect();
        let mut paths = Paths { clear, beyond: vec![], closed: held.closed.clone() };
        let mut whose = vec![];
        let heard = &mut *lock(&self.extenders().heard);
        for extender in &orders.extenders {
            let Some(ways) = heard.ways.get_mut(&extender.id) else { continue };
            heard.turns.entry(extender.id).or_default().take(ways.choose(now), unix_ms() / 1000);
            let carrier = |name: &Name| extender.carriers.iter().find(|host| &host.name == name).and_then(ipv4);
            let hop = match ways.choose(now) {
                Some(Way::Tunnel(id)) => held.device(*id).map(Hop::Device),
                Some(Way::Carrier(name)) => carrier(name).map(Hop::Carrier),
                None => None,
            };
            let into = ways.takes(now).and_then(|id| held.device(id));
            paths.beyond.push(Beyond { hosts: extender.beyond.iter().copied().collect(), hop, into });
            whose.push(extender.id);
        }
        (paths, whose)
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
            loop {
                let Some(node) = node.upgrade() else { return };
                let again = if node.enforce().await { LOOK_EVERY } else { TRY_AGAIN };
                drop(node);
                tokio::time::sleep(again).await;
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
        self.begin_mending(&mut held);
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

    /// Each tunnel that nobody works on is looked at, by a task of its own.
    fn begin_mending(self: &Arc<Self>, held: &mut Held) {
        let all: BTreeSet<u32> = held.own.keys().chain(held.failed.keys()).copied().collect();
        for id in all {
            let Ok(alone) = held.alone(id).try_lock_owned() else { continue };
            let node = Arc::clone(self);
            tokio::spawn(async move {
                node.mend(id).await;
                drop(alone);
            });
        }
    }

    /// A tunnel whose device is gone is made anew, and one that somebody has set down, which took its routes, is set up. What could not be
    /// prepared is tried again. By whoever has the tunnel's lock.
    async fn mend(&self, id: u32) {
        let extenders = self.extenders();
        let (own, failed, refused) = {
            let held = extenders.held.lock().await;
            let failed = held.failed.get(&id).map(|failed| failed.tried);
            (held.own.get(&id).cloned(), failed, held.refused.clone())
        };
        if failed.is_some_and(|tried| tried.elapsed() >= TRY_AGAIN) {
            self.make_alone(id).await;
            return;
        }
        let Some(mut own) = own else { return };
        let works = matches!(self.wires().net().find(&own.tunnel.device).await, Ok(Some(link)) if link.up);
        let well = own.error.is_none() && works;
        if well {
            if !self.is_to_renew(id, &own) {
                return;
            }
            own.renewed = Some(Instant::now());
            own.error = own.tunnel.renew().await.err().map(|error| error.to_string());
        } else {
            if !works {
                lock(&extenders.heard).ways.values_mut().for_each(|ways| ways.gone(TunnelId(id)));
            }
            if own.tried.is_some_and(|tried| tried.elapsed() < TRY_AGAIN) {
                return;
            }
            if !works {
                tracing::warn!(
                    tunnel = id,
                    device = own.tunnel.device,
                    "a tunnel's device is gone or down; making it anew"
                );
                // Frames take another one meanwhile.
                extenders.wake.notify_one();
            }
            self.ensure(&mut own, refused.as_deref()).await;
            (own.made, own.renewed) = (Instant::now(), None);
        }
        let made_anew = !well && own.error.is_none();
        let mut held = extenders.held.lock().await;
        if !well {
            held.laid = None;
        }
        // Unless it was ordered away meanwhile.
        if let Some(there) = held.own.get_mut(&id) {
            *there = own;
        }
        drop(held);
        if made_anew {
            extenders.wake.notify_one();
        }
    }

    /// Whether a tunnel that works has been silent for so long that this end agrees on session keys anew.
    fn is_to_renew(&self, id: u32, own: &Own) -> bool {
        let last = lock(&self.extenders().heard).answered.get(&TunnelId(id)).copied();
        let heard = last.filter(|at| *at > own.made);
        let patience = own.tunnel.renews_after(heard.is_some());
        let silent = patience.is_some_and(|patience| heard.unwrap_or(own.made).elapsed() > patience);
        silent && own.renewed.is_none_or(|at| at.elapsed() > RENEW_EVERY)
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
        let mut asking = JoinSet::new();
        for (id, own) in &held.own {
            let (id, device) = (*id, own.tunnel.device.clone());
            asking.spawn(async move { (id, Tunnel::state(&device).await) });
        }
        let said = asking.join_all().await.into_iter().filter_map(|(id, state)| Some((id, state.ok()??)));
        let states: BTreeMap<u32, PeerState> = said.collect();
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
            let wrong = held.wrong(order.id).cloned();
            let good = ways.is_some_and(|ways| ways.is_good(now)) && wrong.is_none();
            let error = wrong.or_else(|| held.noted().map(ToOwned::to_owned));
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
    fn a_tunnel_that_cannot_be_prepared_is_told_of_until_it_is_and_its_device_stays_in_use() {
        let mut held = Held { orders: orders(vec![order(7, [169, 254, 64, 3])], 1), ..Held::default() };
        assert_eq!(held.ordered(7).map(|(extender, order)| (extender.id, order.id)), Some((1, 7)));
        assert!(held.ordered(8).is_none() && held.wrong(1).is_none() && held.device(TunnelId(7)).is_none());
        let device = Some("gx00000001".to_owned());
        held.failed.insert(7, Failed { extender: 1, device: device.clone(), why: "wg".into(), tried: Instant::now() });
        // What the tables lack is told before, and no word on them takes this one away.
        held.no_way.insert(1, "no way".into());
        assert_eq!(held.wrong(1), Some(&"no way".to_owned()));
        held.no_way.clear();
        assert_eq!((held.wrong(1), held.wrong(2)), (Some(&"wg".to_owned()), None));
        assert_eq!(held.device(TunnelId(7)), device);
        held.note(ASTRAY);
        held.failed.clear();
        assert_eq!((held.wrong(1), held.noted()), (None, Some(ASTRAY)), "what was mended is told, and not wrong now");
    }

    #[test]
    fn devices_that_there_are_keys_for_are_known_and_where_keys_cannot_be_read_nobody_says_that_he_knows_all() {
        let folder = tempfile::tempdir().expect("a folder");
        let extenders = Extenders::new(folder.path(), folder.path());
        assert_eq!(extenders.kept_devices(), Ok(BTreeSet::new()));
        let kept = Kept { key: "unread".into(), device: "gx00000001".into() };
        durable::replace_json(&extenders.key_file(1), &kept).expect("writes");
        assert_eq!(extenders.kept_devices(), Ok(BTreeSet::from(["gx00000001".to_owned()])));
        durable::replace(&extenders.key_file(2), b"{").expect("writes");
        assert!(extenders.kept_devices().is_err());
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
