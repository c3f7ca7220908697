//! A controller among fake nodes: real HTTP and certificates, no QEMU.

use axum::extract::{Path, State};
use axum::routing::{get, post, put};
use axum::{Json, Router};
use godwit_api::host::{
    Blocker, CheckReport, CheckVm, GatewayPort, HostFacts, LinkAddresses, LocalMove, LocalVm, MoveOrder, MoveRole,
    Ownership, RunState, SetLimit,
};
use godwit_api::progress::{MoveProgress, Outcome};
use godwit_api::public::{AddHost, Component, CreateVm, Move, Site, StartMove};
use godwit_api::vm::VmDefinition;
use godwit_api::{ApiError, Name, Problem, PublicClient, done, only, serve};
use godwit_controller::{Controller, FileStore};
use godwit_trust::{Access, Authority, Credentials, Identity, Role, Validity};
use godwit_units::{Bytes, Generation, Lineage, MoveId};
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

pub fn name(text: &str) -> Name {
    text.parse().unwrap()
}

/// Far in the future, as seconds since 1970.
const LATER: u64 = 4_000_000_000;

/// What a fake node knows, and what it will answer.
#[derive(Default)]
pub struct Node {
    pub vms: HashMap<u64, LocalVm>,
    pub moves: HashMap<u64, LocalMove>,
    pub gateways: BTreeMap<u32, GatewayPort>,
    pub blockers: Vec<Blocker>,
    pub staying: Vec<Blocker>,
    pub refuse_define: Option<ApiError>,
    pub refuse_begin: Option<ApiError>,
    pub refuse_gateway: bool,
    pub certificate_ends: Option<u64>,
    /// Orders for moves and cancels, limits, monitors as they came.
    pub heard: Vec<String>,
}

#[derive(Clone)]
pub struct Fake {
    pub name: String,
    pub node: Arc<Mutex<Node>>,
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
            link: LinkAddresses { control: port(1), disk: port(2), memory: port(3) },
            // So that a test can tell whose address it was.
            underlay: [10, 0, 0, self.name.len() as u8].into(),
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
            .route("/v1/vms/{id}/departure", get(Self::departure))
            .route("/v1/check", post(Self::check))
            .route("/v1/moves", post(Self::begin))
            .route("/v1/moves/{id}", get(Self::mv))
            .route("/v1/moves/{id}/cancel", post(Self::cancel))
            .route("/v1/moves/{id}/limit", post(Self::limit))
            .route("/v1/gateways/{wire}", put(Self::attach).delete(Self::detach))
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
            let vm = LocalVm {
                definition: d,
                ownership: Ownership::Here,
                lineage: Lineage::FIRST,
                generation: Generation::FIRST,
                run: RunState::Off,
                mv: None,
                allocated: Bytes::mib(1),
            };
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

    async fn departure(State(f): State<Self>, Path(id): Path<u64>) -> Answer<CheckReport> {
        let there = f.with(|n| n.vms.contains_key(&id).then(|| n.staying.clone()));
        there.map(|blockers| Json(CheckReport { blockers })).ok_or(unknown("VM"))
    }

    async fn check(State(f): State<Self>, Json(_): Json<CheckVm>) -> Answer<CheckReport> {
        Ok(Json(CheckReport { blockers: f.with(|n| n.blockers.clone()) }))
    }

    async fn begin(State(f): State<Self>, Json(order): Json<MoveOrder>) -> Answer<LocalMove> {
        f.with(|n| {
            n.heard.push(format!("begin {} to {}", order.id.0, order.to.name));
            if let Some(refusal) = n.refuse_begin.clone() {
                return Err(refusal);
            }
            let progress = running();
            let mv = LocalMove { id: order.id, vm: order.vm, role: MoveRole::Source, progress };
            Ok(Json(n.moves.entry(order.id.0).or_insert(mv).clone()))
        })
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
}

async fn bind(address: SocketAddr) -> TcpListener {
    for _ in 0..200 {
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
        let none = SocketAddr::from(([127, 0, 0, 1], 0));
        let admin = issue(&authority, &folder, Role::Client(Access::Admin), "ann");
        let api = PublicClient::new(none, controller(), &admin);
        let mut world =
            Self { folder, authority, fakes: HashMap::new(), served: HashMap::new(), controller: None, api };
        world.start_controller().await;
        for site in ["east", "west"] {
            world.api.add_site(&Site { name: name(site) }).await.unwrap();
        }
        for (host, site) in [("ohio", "east"), ("maine", "east"), ("texas", "west")] {
            world.fakes.insert(host, Fake { name: host.into(), node: Arc::default() });
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
        let store = FileStore::open(&self.folder.path().join("state")).unwrap();
        let credentials = self.credentials(Role::Controller, "controller");
        let running = Controller::new(Box::new(store), credentials);
        let listener = bind(SocketAddr::from(([127, 0, 0, 1], 0))).await;
        let address = listener.local_addr().unwrap();
        let (stop, stopped) = oneshot::channel::<()>();
        let task = tokio::spawn(async move {
            godwit_controller::serve(running, listener, async { drop(stopped.await) }).await.unwrap();
        });
        self.controller = Some(Served { stop: Some(stop), task, address });
        self.api = PublicClient::new(address, controller(), &self.credentials(Role::Client(Access::Admin), "ann"));
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
        let mut last = None;
        for _ in 0..200 {
            if let Ok(mv) = self.api.mv(id).await {
                if wanted(&mv) {
                    return mv;
                }
                last = Some(mv);
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        panic!("never as wanted within 10 s: {last:#?}");
    }

    /// Waits until a node is as wanted.
    pub async fn until_node(&self, host: &str, wanted: impl Fn(&Node) -> bool) {
        for _ in 0..1000 {
            if self.fakes[host].with(|n| wanted(n)) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("`{host}` is never as wanted within 10 s");
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
                vm: godwit_units::VmId(1),
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
