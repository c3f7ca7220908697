//! A controller among fake nodes: real HTTP and certificates, no QEMU.

use axum::extract::{Path, Request, State};
use axum::http::Method;
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post, put};
use axum::{Json, Router};
use godwit_api::host::{
    Blocker, CheckReport, CheckVm, ClaimVm, GatewayPort, HostFacts, LinkAddresses, LocalMove, LocalVm, MoveOrder,
    MoveRole, OutrankVm, Ownership, RunState, SetLimit,
};
use godwit_api::orphan::Orphan;
use godwit_api::progress::{MoveProgress, Outcome};
use godwit_api::promote::{LocalImage, LocalPromotion, PromoteVm};
use godwit_api::public::{AddHost, Component, CreateVm, Move, Site, StartMove};
use godwit_api::vm::VmDefinition;
use godwit_api::wire::{LocalWire, WireOrder};
use godwit_api::{ApiError, Name, Problem, PublicClient, done, only, serve};
use godwit_controller::{Change, Controller, Counter, FileStore, Kind, StateStore, StoreError};
use godwit_trust::{Access, Authority, Credentials, Identity, Revocations, Role, Validity};
use godwit_units::{Bytes, Generation, Lineage, MoveId, VmId, VolumeId};
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

pub fn name(text: &str) -> Name {
    text.parse().unwrap()
}

/// No wait for what takes moments on an idle machine is longer.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// Whether `is_so` comes true while there is patience.
pub async fn soon(is_so: impl AsyncFn() -> bool) -> bool {
    let until = Instant::now() + PATIENCE;
    while !is_so().await {
        if Instant::now() > until {
            return false;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    true
}

/// Far in the future, as seconds since 1970.
const LATER: u64 = 4_000_000_000;

/// What a fake node knows, and what it will answer.
#[derive(Default)]
pub struct Node {
    pub vms: HashMap<u64, LocalVm>,
    pub moves: HashMap<u64, LocalMove>,
    pub gateways: BTreeMap<u32, GatewayPort>,
    /// Between ports.
    pub wires: BTreeMap<u32, WireOrder>,
    /// Hosts that do not answer it what they know of these, until the controller has spoken.
    pub untold: Vec<Name>,
    pub orphans: BTreeMap<String, Orphan>,
    pub blockers: Vec<Blocker>,
    pub staying: Vec<Blocker>,
    pub refuse_define: Option<ApiError>,
    pub refuse_begin: Option<ApiError>,
    pub refuse_gateway: bool,
    pub certificate_ends: Option<u64>,
    /// The VM of which checks, and orders to promote, are heard and not answered yet.
    pub held: Option<Name>,
    /// What it is to keep up, as it was told last.
    pub precaches: Vec<godwit_api::precache::PrecacheOrder>,
    /// Who is revoked, as it was told last.
    pub revoked: Revocations,
    /// Orders for moves and cancels, limits, monitors as they came.
    pub heard: Vec<String>,
    /// How long ago moves were ordered, as their orders said, in milliseconds.
    pub ordered_ms_ago: Vec<u64>,
}

#[derive(Clone)]
pub struct Fake {
    pub name: String,
    pub node: Arc<Mutex<Node>>,
    fate: Arc<Fate>,
}

/// When a controller dies, counted in what it does that others can see: writes of its store, and orders to nodes.
#[derive(Default)]
pub struct Fate(Mutex<Life>);

#[derive(Default)]
struct Life {
    done: u64,
    dies_at: Option<(u64, Death)>,
    dead: bool,
}

/// How it dies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Death {
    /// Just before the deed.
    Before,
    /// The deed is done; it does not live to see the answer.
    After,
}

impl Fate {
    /// It dies at its `number`th deed from now, counted from 0.
    pub fn arm(&self, number: u64, death: Death) {
        *self.0.lock().unwrap() = Life { done: 0, dies_at: Some((number, death)), dead: false };
    }

    pub fn is_dead(&self) -> bool {
        self.0.lock().unwrap().dead
    }

    fn revive(&self) {
        *self.0.lock().unwrap() = Life::default();
    }

    /// A deed: is it done, and is it answered?
    fn deed(&self) -> (bool, bool) {
        let mut life = self.0.lock().unwrap();
        if life.dead {
            return (false, false);
        }
        let number = life.done;
        life.done += 1;
        match life.dies_at {
            Some((at, death)) if at == number => {
                life.dead = true;
                (death == Death::After, false)
            }
            _ => (true, true),
        }
    }
}

/// A store whose process may be dead.
struct Mortal {
    store: FileStore,
    fate: Arc<Fate>,
}

impl Mortal {
    fn deed<T>(&self, deed: impl FnOnce() -> Result<T, StoreError>) -> Result<T, StoreError> {
        let (done, answered) = self.fate.deed();
        let result = if done { Some(deed()) } else { None };
        match result {
            Some(result) if answered => result,
            _ => Err(StoreError::Folder {
                path: "/dead".into(),
                source: std::io::Error::other("the controller is dead"),
            }),
        }
    }
}

impl StateStore for Mortal {
    fn get(&self, kind: Kind, key: &str) -> Result<Option<Vec<u8>>, StoreError> {
        self.store.get(kind, key)
    }

    fn list(&self, kind: Kind) -> Result<Vec<(String, Vec<u8>)>, StoreError> {
        self.store.list(kind)
    }

    fn commit(&self, changes: &[Change]) -> Result<(), StoreError> {
        self.deed(|| self.store.commit(changes))
    }

    fn last(&self, counter: Counter) -> Result<u64, StoreError> {
        self.store.last(counter)
    }

    fn next(&self, counter: Counter) -> Result<u64, StoreError> {
        self.deed(|| self.store.next(counter))
    }
}

/// An order to a node whose sender may be dead.
async fn ordered(State(fate): State<Arc<Fate>>, request: Request, next: Next) -> Response {
    let lost = || ApiError::new(Problem::Unreachable, "the controller is dead").into_response();
    if request.method() == Method::GET {
        return if fate.is_dead() { lost() } else { next.run(request).await };
    }
    let (done, answered) = fate.deed();
    let answer = if done { Some(next.run(request).await) } else { None };
    answer.filter(|_| answered).unwrap_or_else(lost)
}

type Answer<T> = Result<Json<T>, ApiError>;

fn unknown(what: &str) -> ApiError {
    ApiError::new(Problem::NotFound, format!("no such {what}"))
}

impl Fake {
    pub fn with<T>(&self, change: impl FnOnce(&mut Node) -> T) -> T {
        change(&mut self.node.lock().unwrap())
    }

    fn facts(&self) -> HostFacts {
        let port = |port| SocketAddr::from(([127, 0, 0, 1], port));
        HostFacts {
            name: name(&self.name),
            version: "0".into(),
            qemu: "7.2".into(),
            machines: vec![],
            kvm: false,
            memory_free: Bytes::gib(1),
            disk_free: Bytes::gib(1),
            certificate_expires_unix_s: self.with(|n| n.certificate_ends.unwrap_or(LATER)),
            certificate_renews: false,
            revocations: self.with(|n| n.revoked.version),
            link: LinkAddresses { control: port(1), disk: port(2), memory: port(3) },
            // So that a test can tell whose address it was.
            underlay: [10, 0, 0, self.name.len() as u8].into(),
            extender: None,
        }
    }

    fn router(&self) -> Router {
        Router::new()
            .route("/v1/host", get(|State(f): State<Self>| async move { Json(f.facts()) }))
            .route(
                "/v1/vms",
                get(|State(f): State<Self>| async move { Json(f.with(|n| n.vms.values().cloned().collect::<Vec<_>>())) }),
            )
            .route("/v1/vms/{id}", get(Self::vm).put(Self::define).delete(Self::remove))
            .route("/v1/vms/{id}/start", post(Self::start))
            .route("/v1/vms/{id}/monitor", post(Self::monitor))
            .route(
                "/v1/orphans",
                get(|State(f): State<Self>| async move { Json(f.with(|n| n.orphans.values().cloned().collect::<Vec<_>>())) }),
            )
            .route("/v1/orphans/{id}", delete(Self::remove_orphan))
            .route("/v1/vms/{id}/claim", post(Self::claim))
            .route("/v1/vms/{id}/promote", post(Self::promote))
            .route("/v1/vms/{id}/outrank", post(Self::outrank))
            .route("/v1/vms/{id}/departure", get(Self::departure))
            .route("/v1/check", post(Self::check))
            .route("/v1/moves", post(Self::begin))
            .route("/v1/moves/{id}", get(Self::mv))
            .route("/v1/moves/{id}/cancel", post(Self::cancel))
            .route("/v1/moves/{id}/limit", post(Self::limit))
            .route("/v1/precaches", put(Self::precaches))
            .route("/v1/revocations", put(Self::revoke))
            .route("/v1/gateways/{wire}", put(Self::attach).delete(Self::detach))
            .route("/v1/wires", get(Self::wires))
            .route("/v1/wires/{wire}", get(Self::wire).put(Self::connect).delete(Self::disconnect))
            .layer(from_fn_with_state(Arc::clone(&self.fate), ordered))
            .with_state(self.clone())
    }

    async fn vm(State(f): State<Self>, Path(id): Path<u64>) -> Answer<LocalVm> {
        f.with(|n| n.vms.get(&id).cloned()).map(Json).ok_or(unknown("VM"))
    }

    async fn define(State(f): State<Self>, Path(id): Path<u64>, Json(mut d): Json<VmDefinition>) -> Answer<LocalVm> {
        f.with(|n| {
            if let Some(refusal) = n.refuse_define.clone() {
                return Err(refusal);
            }
            d.spec.machine = "pc-q35-7.2".into();
            let vm = whole(d);
            n.vms.insert(id, vm.clone());
            Ok(Json(vm))
        })
    }

    async fn remove(State(f): State<Self>, Path(id): Path<u64>) -> Answer<Value> {
        f.with(|n| n.vms.remove(&id)).map(|_| done()).ok_or(unknown("VM"))
    }

    async fn start(State(f): State<Self>, Path(id): Path<u64>) -> Answer<Value> {
        f.with(|n| n.vms.get_mut(&id).map(|vm| vm.run = RunState::Running)).map(|()| done()).ok_or(unknown("VM"))
    }

    async fn monitor(State(f): State<Self>, Path(_): Path<u64>, Json(command): Json<Value>) -> Answer<Value> {
        f.with(|n| n.heard.push(format!("monitor {}", command["execute"])));
        Ok(Json(json!({"at": f.name})))
    }

    async fn claim(State(f): State<Self>, Path(id): Path<u64>, Json(claim): Json<ClaimVm>) -> Answer<Value> {
        f.with(|n| {
            n.heard.push(format!("claim {id} over {}: {}", claim.newest.0, claim.fenced));
            let vm = n.vms.get_mut(&id).ok_or(unknown("VM"))?;
            (vm.ownership, vm.run) = (Ownership::Here, RunState::Running);
            (vm.lineage, vm.generation) = (claim.newest.next(), Generation::FIRST);
            Ok(done())
        })
    }

    /// Waits for as long as it is held.
    async fn hold(&self, vm: &Name) {
        while self.with(|n| n.held.as_ref() == Some(vm)) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    async fn promote(
        State(f): State<Self>,
        Path(id): Path<u64>,
        Json(order): Json<PromoteVm>,
    ) -> Answer<LocalPromotion> {
        f.with(|n| n.heard.push(format!("promote {id}")));
        f.hold(&order.definition.name).await;
        let image =
            |volume: &VolumeId| LocalImage { volume: *volume, epoch: "1.1".into(), epoch_unix_ms: 1, moment: None };
        let images = order.definition.volumes.iter().map(image).collect();
        if !order.dry_run {
            let vm = LocalVm { run: RunState::Running, lineage: order.newest.next(), ..whole(order.definition) };
            f.with(|n| n.vms.insert(id, vm));
        }
        Ok(Json(LocalPromotion { vm: VmId(id), images }))
    }

    async fn remove_orphan(State(f): State<Self>, Path(id): Path<String>) -> Answer<Value> {
        f.with(|n| n.orphans.remove(&id)).map(|_| done()).ok_or(unknown("orphan"))
    }

    async fn outrank(State(f): State<Self>, Path(id): Path<u64>, Json(by): Json<OutrankVm>) -> Answer<Value> {
        f.with(|n| {
            n.heard.push(format!("outrank {id} by {}", by.lineage.0));
            let vm = n.vms.get_mut(&id).ok_or(unknown("VM"))?;
            (vm.ownership, vm.run, vm.lineage) = (Ownership::Elsewhere, RunState::Paused, by.lineage);
            Ok(done())
        })
    }

    async fn departure(State(f): State<Self>, Path(id): Path<u64>) -> Answer<CheckReport> {
        let there = f.with(|n| n.vms.contains_key(&id).then(|| n.staying.clone()));
        there.map(|blockers| Json(CheckReport { blockers })).ok_or(unknown("VM"))
    }

    async fn check(State(f): State<Self>, Json(check): Json<CheckVm>) -> Answer<CheckReport> {
        let vm = &check.definition.name;
        f.with(|n| n.heard.push(format!("check {vm}")));
        f.hold(vm).await;
        Ok(Json(CheckReport { blockers: f.with(|n| n.blockers.clone()) }))
    }

    async fn begin(State(f): State<Self>, Json(order): Json<MoveOrder>) -> Answer<LocalMove> {
        f.with(|n| {
            n.heard.push(format!("begin {} to {}", order.id.0, order.to.name));
            n.ordered_ms_ago.push(order.ordered_ms_ago);
            if let Some(refusal) = n.refuse_begin.clone() {
                return Err(refusal);
            }
            let progress = running();
            let mv = LocalMove { id: order.id, vm: order.vm, role: MoveRole::Source, progress };
            Ok(Json(n.moves.entry(order.id.0).or_insert(mv).clone()))
        })
    }

    async fn precaches(
        State(f): State<Self>,
        Json(orders): Json<Vec<godwit_api::precache::PrecacheOrder>>,
    ) -> Answer<Vec<godwit_api::precache::LocalPrecache>> {
        use godwit_api::precache::{LocalPrecache, PrecacheFigures, PrecacheState};
        let figures =
            PrecacheFigures { state: PrecacheState::Following, lag_s: Some(1.5), ..PrecacheFigures::default() };
        let told = |o: &godwit_api::precache::PrecacheOrder| LocalPrecache {
            volume: o.volume,
            to: o.to.name.clone(),
            figures: figures.clone(),
        };
        let said = orders.iter().map(told).collect();
        f.with(|n| n.precaches = orders);
        Ok(Json(said))
    }

    async fn revoke(State(f): State<Self>, Json(list): Json<Revocations>) -> Answer<Value> {
        f.with(|n| n.revoked = list);
        Ok(done())
    }

    async fn mv(State(f): State<Self>, Path(id): Path<u64>) -> Answer<LocalMove> {
        f.with(|n| n.moves.get(&id).cloned()).map(Json).ok_or(unknown("move"))
    }

    async fn cancel(State(f): State<Self>, Path(id): Path<u64>) -> Answer<LocalMove> {
        f.with(|n| {
            n.heard.push(format!("cancel {id}"));
            let mv = n.moves.get_mut(&id)?;
            mv.progress.outcome = Outcome::Cancelled;
            Some(mv.clone())
        })
        .map(Json)
        .ok_or(unknown("move"))
    }

    async fn limit(State(f): State<Self>, Path(id): Path<u64>, Json(limit): Json<SetLimit>) -> Answer<LocalMove> {
        f.with(|n| {
            let mv = n.moves.get_mut(&id)?;
            mv.progress.limit = limit.limit;
            Some(mv.clone())
        })
        .map(Json)
        .ok_or(unknown("move"))
    }

    async fn attach(State(f): State<Self>, Path(wire): Path<u32>, Json(port): Json<GatewayPort>) -> Answer<Value> {
        f.with(|n| {
            if n.refuse_gateway {
                return Err(ApiError::new(Problem::Failed, "no such bridge"));
            }
            n.gateways.insert(wire, port);
            Ok(done())
        })
    }

    async fn connect(State(f): State<Self>, Path(wire): Path<u32>, Json(order): Json<WireOrder>) -> Answer<LocalWire> {
        f.with(|n| {
            n.untold.clear();
            n.wires.insert(wire, order)
        });
        Self::wire(State(f), Path(wire)).await
    }

    async fn wires(State(f): State<Self>) -> Answer<Vec<LocalWire>> {
        let local = |n: &Node, wire: &WireOrder| LocalWire {
            wire: wire.clone(),
            open: vec![],
            remotes: vec![],
            untold: n.untold.clone(),
        };
        Ok(Json(f.with(|n| n.wires.values().map(|wire| local(n, wire)).collect())))
    }

    async fn wire(State(f): State<Self>, Path(wire): Path<u32>) -> Answer<LocalWire> {
        let wire = f.with(|n| n.wires.get(&wire).cloned()).ok_or(unknown("wire"))?;
        Ok(Json(LocalWire { wire, open: vec![], remotes: vec![], untold: vec![] }))
    }

    async fn disconnect(State(f): State<Self>, Path(wire): Path<u32>) -> Answer<Value> {
        f.with(|n| n.wires.remove(&wire)).map(|_| done()).ok_or(unknown("wire"))
    }

    async fn detach(State(f): State<Self>, Path(wire): Path<u32>) -> Answer<Value> {
        f.with(|n| n.gateways.remove(&wire)).map(|_| done()).ok_or(unknown("wire"))
    }
}

/// A move that goes on, of which nothing is known.
pub fn running() -> MoveProgress {
    serde_json::from_value(json!({
        "outcome": "running", "phase": "reserve",
        "phases": [{"name": "reserve", "started_unix_us": 1, "ended_unix_us": null}],
        "bytes": {"memory": 0, "disk": 0, "control": 0}, "raw": 0, "zero_pages": 0, "rounds": [],
        "disk": {"total": 0, "copied": 0, "remaining": 0, "synchronous": false},
        "memory_remaining": 0, "dirty_rate": 0, "rate": 0
    }))
    .unwrap()
}

/// A server task, and what ends it.
pub struct Served {
    stop: Option<oneshot::Sender<()>>,
    task: JoinHandle<()>,
    pub address: SocketAddr,
}

impl Served {
    /// Ends it at once: requests under way are not answered any more, as when a process is killed.
    pub async fn kill(mut self) -> SocketAddr {
        self.stop = None;
        let _ = (&mut self.task).await;
        self.address
    }
}

/// An authority, fake nodes by name, and a controller that can be restarted.
pub struct World {
    folder: TempDir,
    authority: Authority,
    pub fakes: HashMap<&'static str, Fake>,
    pub served: HashMap<&'static str, Served>,
    controller: Option<Served>,
    pub api: PublicClient,
    pub fate: Arc<Fate>,
}

/// An address of this machine's that nobody else listens at or asks from, so that a port of it that was free for a moment still
/// is when it is wanted again.
fn own_address() -> SocketAddr {
    static WORLDS: AtomicU16 = AtomicU16::new(0);
    let [[high, low], [_, process]] =
        [WORLDS.fetch_add(1, Ordering::Relaxed).to_be_bytes(), (std::process::id() as u16 % 250).to_be_bytes()];
    SocketAddr::from(([127, 100 + high, process, 1 + low % 250], 0))
}

async fn bind(address: SocketAddr) -> TcpListener {
    let until = Instant::now() + PATIENCE;
    while Instant::now() < until {
        if let Ok(listener) = TcpListener::bind(address).await {
            return listener;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("{address} is not free")
}

impl World {
    /// Sites `east` (hosts `ohio`, `maine`) and `west` (`texas`), and a component of each kind; a controller that knows them.
    pub async fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let authority = Authority::create(&folder.path().join("ca")).unwrap();
        let none = own_address();
        let admin = issue(&authority, &folder, Role::Client(Access::Admin), "ann");
        let api = PublicClient::new(none, controller(), &admin);
        let fate = Arc::new(Fate::default());
        let mut world = Self {
            folder,
            authority,
            fakes: HashMap::new(),
            served: HashMap::new(),
            controller: None,
            api,
            fate: Arc::clone(&fate),
        };
        world.start_controller().await;
        for site in ["east", "west"] {
            world.api.add_site(&Site { name: name(site) }).await.unwrap();
        }
        for (host, site) in [("ohio", "east"), ("maine", "east"), ("texas", "west")] {
            world.fakes.insert(host, Fake { name: host.into(), node: Arc::default(), fate: Arc::clone(&fate) });
            world.start_node(host, none).await;
            let api = world.served[host].address;
            let added = world.api.add_host(&AddHost { name: name(host), site: name(site), api }).await.unwrap();
            assert_eq!(added.error, None);
        }
        for component in [
            json!({"name": "lan", "kind": {"switch": {"bridge": "br0"}}}),
            json!({"name": "out", "kind": {"gateway": {"host": "maine", "bridge": "br1"}}}),
        ] {
            world.api.add_component(&serde_json::from_value::<Component>(component).unwrap()).await.unwrap();
        }
        world
    }

    /// Credentials of the world's authority.
    pub fn credentials(&self, role: Role, name: &str) -> Credentials {
        issue(&self.authority, &self.folder, role, name)
    }

    /// Where these are kept, once they were issued.
    #[allow(dead_code, reason = "for the example that programs ask from outside")]
    pub fn folder(&self, role: Role, name: &str) -> PathBuf {
        self.folder.path().join(format!("{role}-{name}"))
    }

    pub fn controller_address(&self) -> SocketAddr {
        self.controller.as_ref().unwrap().address
    }

    pub async fn start_node(&mut self, host: &'static str, address: SocketAddr) {
        let listener = bind(address).await;
        let address = listener.local_addr().unwrap();
        let router = only(self.fakes[host].router(), Role::Controller);
        let credentials = self.credentials(Role::Node, host);
        let (stop, stopped) = oneshot::channel::<()>();
        let task = tokio::spawn(async move {
            serve(listener, router, &credentials, async { drop(stopped.await) }).await.unwrap();
        });
        self.served.insert(host, Served { stop: Some(stop), task, address });
    }

    /// Ends a node's API; what it knows stays.
    pub async fn stop_node(&mut self, host: &'static str) -> SocketAddr {
        self.served.remove(host).unwrap().kill().await
    }

    pub async fn start_controller(&mut self) {
        let store = self.open_store().await;
        self.fate.revive();
        let store = Mortal { store, fate: Arc::clone(&self.fate) };
        let credentials = self.credentials(Role::Controller, "controller");
        let running = Controller::new(Box::new(store), credentials);
        let listener = bind(own_address()).await;
        let address = listener.local_addr().unwrap();
        let (stop, stopped) = oneshot::channel::<()>();
        let task = tokio::spawn(async move {
            godwit_controller::serve(running, listener, async { drop(stopped.await) }).await.unwrap();
        });
        self.controller = Some(Served { stop: Some(stop), task, address });
        self.api = PublicClient::new(address, controller(), &self.credentials(Role::Client(Access::Admin), "ann"));
    }

    /// The store, once no task of an earlier controller holds it any more.
    async fn open_store(&self) -> FileStore {
        let path = self.folder.path().join("state");
        let until = Instant::now() + PATIENCE;
        while Instant::now() < until {
            if let Ok(store) = FileStore::open(&path) {
                return store;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        FileStore::open(&path).unwrap()
    }

    pub async fn stop_controller(&mut self) {
        self.controller.take().unwrap().kill().await;
    }

    /// A running VM `web` on `ohio`, wired to both components.
    pub async fn web(&self) {
        self.api.create_vm(&web("ohio")).await.unwrap();
    }

    /// Orders `web` to move.
    pub async fn order(&self, to: &str) -> Result<Move, ApiError> {
        self.api.start_move(&to_host(to)).await
    }

    /// Asks for a move until it is as wanted.
    pub async fn until(&self, id: MoveId, wanted: impl Fn(&Move) -> bool) -> Move {
        let (mut last, until) = (None, Instant::now() + PATIENCE);
        while Instant::now() < until {
            if let Ok(mv) = self.api.mv(id).await {
                if wanted(&mv) {
                    return mv;
                }
                last = Some(mv);
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        panic!("never as wanted: {last:#?}");
    }

    /// Waits until a node is as wanted.
    pub async fn until_node(&self, host: &str, wanted: impl Fn(&Node) -> bool) {
        assert!(soon(async || self.fakes[host].with(|n| wanted(n))).await, "`{host}` is never as wanted");
    }

    /// The nodes' part of a hand-off to `to`: it owns the VM now, with the next generation.
    pub fn hand_over(&self, from: &str, to: &str) {
        let mut vm = self.fakes[from].with(|n| {
            let vm = n.vms.get_mut(&1).unwrap();
            vm.ownership = Ownership::Elsewhere;
            vm.run = RunState::Off;
            vm.clone()
        });
        vm.ownership = Ownership::Here;
        vm.run = RunState::Running;
        vm.generation = vm.generation.next();
        self.fakes[to].with(|n| n.vms.insert(1, vm));
    }

    /// Sets how a node says that a move stands.
    pub fn say(&self, host: &str, id: MoveId, change: impl FnOnce(&mut MoveProgress)) {
        self.fakes[host].with(|n| {
            let mv = n.moves.entry(id.0).or_insert_with(|| LocalMove {
                id,
                vm: VmId(1),
                role: MoveRole::Destination,
                progress: running(),
            });
            change(&mut mv.progress);
        });
    }
}

fn controller() -> Identity {
    Identity::new(Role::Controller, "controller").unwrap()
}

fn issue(authority: &Authority, folder: &TempDir, role: Role, name: &str) -> Credentials {
    let out = folder.path().join(format!("{role}-{name}"));
    authority.issue(&Identity::new(role, name).unwrap(), Validity::days(1)).unwrap().write(&out).unwrap();
    Credentials::load(&out).unwrap()
}

pub fn web(at: &str) -> CreateVm {
    serde_json::from_value(json!({"name": "web", "at": at, "start": true, "spec": {
        "memory": 64 << 20, "max_vcpus": 2,
        "disks": [{"volume": "root", "size": 1 << 20}],
        "nics": [{"mac": "02:00:00:00:00:01", "component": "lan"}, {"mac": "02:00:00:00:00:02", "component": "out"}],
    }}))
    .unwrap()
}

pub fn to_host(to: &str) -> StartMove {
    serde_json::from_value(json!({"vm": "web", "to": to})).unwrap()
}

/// A VM that is off, of a host that has all of it.
fn whole(definition: VmDefinition) -> LocalVm {
    LocalVm {
        definition,
        ownership: Ownership::Here,
        lineage: Lineage::FIRST,
        generation: Generation::FIRST,
        run: RunState::Off,
        mv: None,
        allocated: Bytes::mib(1),
        absent: Bytes(0),
        holders: vec![],
        lent: vec![],
    }
}
