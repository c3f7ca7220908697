//! What all handlers share: the store, the way to the nodes, and the moves under way.

use crate::events::{Hub, Watched};
use crate::record::{Life, MoveRecord, Step, VmRecord};
use crate::store::{Change, Kind, StateStore, StoreError};
use godwit_api::host::LocalVm;
use godwit_api::progress::MoveProgress;
use godwit_api::{ApiError, HostClient, Name, Problem};
use godwit_trust::{Credentials, Identity};
use godwit_units::{MoveId, VmId};
use serde::{Deserialize, Serialize};
use std::collections::{HashMap, HashSet};
use std::future::Future;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};
use tokio::sync::watch;
use tokio::task::JoinSet;

/// A host, as it is stored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostRecord {
    /// Its name.
    pub name: Name,
    /// Its site.
    pub site: Name,
    /// Where its node's API listens.
    pub api: SocketAddr,
}

/// The controller.
pub struct Controller {
    /// What is remembered; what changes in it is told.
    pub store: Box<dyn StateStore>,
    /// Tells what happens.
    pub(crate) events: Arc<Hub>,
    credentials: Credentials,
    trust: crate::trust::Trust,
    /// Held while something is looked up and then changed; never across a question to a node.
    deciding: Mutex<()>,
    /// One client a host, so that connections are reused.
    clients: Mutex<HashMap<(Name, SocketAddr), HostClient>>,
    /// How moves under way stand.
    live: Mutex<HashMap<MoveId, MoveProgress>>,
    /// What nodes say of pre-caches.
    pub(crate) precaches: crate::precache::Said,
    /// What nodes say of extenders.
    pub(crate) extenders: crate::extenders::Said,
    /// What links were measured to carry.
    pub(crate) links: crate::predictions::Links,
    /// VMs that a request is creating, deleting, claiming or promoting just now: the sweeper leaves them alone.
    in_hand: Mutex<HashSet<VmId>>,
    /// Ends every background task when the controller is dropped or shut down.
    stop: watch::Sender<bool>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl From<StoreError> for ApiError {
    fn from(error: StoreError) -> Self {
        Self::new(Problem::Failed, error.to_string())
    }
}

/// "There is no such thing", with the command that lists them.
pub fn missing(what: &str, name: impl std::fmt::Display) -> ApiError {
    let command = if what == "move" || what == "VM" { what.to_lowercase() } else { what.to_owned() };
    ApiError::new(Problem::NotFound, format!("there is no {what} `{name}`"))
        .remedy(format!("`godwit {command} ls` lists what there is"))
}

/// A VM that is wholly there.
///
/// # Errors
/// [`Problem::Conflict`] while it is being made or taken away.
pub fn ready(vm: VmRecord) -> Result<VmRecord, ApiError> {
    let name = &vm.definition.name;
    match vm.life {
        Life::Ready => Ok(vm),
        Life::Creating => Err(conflict(format!("`{name}` is being created")).remedy("wait until that has ended")),
        Life::Deleting => Err(conflict(format!("`{name}` is being deleted"))
            .remedy("see that its host can be reached; where it still runs, `godwit vm stop --force` ends it")),
    }
}

/// "Its state does not allow this".
pub fn conflict(message: impl Into<String>) -> ApiError {
    ApiError::new(Problem::Conflict, message)
}

/// "This makes no sense".
pub fn invalid(message: impl Into<String>) -> ApiError {
    ApiError::new(Problem::Invalid, message)
}

impl Controller {
    /// Over `store`, asking nodes with `credentials`.
    #[must_use]
    pub fn new(store: Box<dyn StateStore>, credentials: Credentials) -> Arc<Self> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
        let events = Arc::new(Hub::new(now));
        Arc::new(Self {
            store: Box::new(Watched::new(store, Arc::clone(&events))),
            events,
            credentials,
            trust: crate::trust::Trust::default(),
            deciding: Mutex::default(),
            clients: Mutex::default(),
            live: Mutex::default(),
            precaches: crate::precache::Said::default(),
            extenders: crate::extenders::Said::default(),
            links: crate::predictions::Links::default(),
            in_hand: Mutex::default(),
            stop: watch::Sender::new(false),
        })
    }

    /// Its certificate and key.
    #[must_use]
    pub fn credentials(&self) -> &Credentials {
        &self.credentials
    }

    /// The CA and what goes with it.
    #[must_use]
    pub fn trust(&self) -> &crate::trust::Trust {
        &self.trust
    }

    /// While this is held, nobody else decides anything from the records.
    pub fn decide(&self) -> MutexGuard<'_, ()> {
        lock(&self.deciding)
    }

    /// Runs `task` in the background until it ends or the controller does. What it does not finish, the next controller
    /// on the same store does.
    pub fn spawn(self: &Arc<Self>, task: impl Future<Output = ()> + Send + 'static) {
        let mut stopped = self.stop.subscribe();
        tokio::spawn(async move {
            tokio::select! {
                () = task => {}
                _ = stopped.wait_for(|stop| *stop) => {}
            }
        });
    }

    /// Ends the background tasks, wherever they are.
    pub fn stop(&self) {
        self.stop.send_replace(true);
    }

    /// A host's record.
    ///
    /// # Errors
    /// [`Problem::NotFound`].
    pub fn host(&self, name: &Name) -> Result<HostRecord, ApiError> {
        self.store.read(Kind::Host, name)?.ok_or_else(|| missing("host", name))
    }

    /// All hosts, by name.
    ///
    /// # Errors
    /// The store's.
    pub fn hosts(&self) -> Result<Vec<HostRecord>, ApiError> {
        let mut hosts: Vec<HostRecord> = self.store.read_all(Kind::Host)?;
        hosts.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(hosts)
    }

    /// The way to a host's node.
    pub fn node(&self, host: &HostRecord) -> HostClient {
        let mut clients = lock(&self.clients);
        let fresh = || {
            let identity = Identity::node(host.name.as_str()).expect("a Name is a good name in a certificate");
            HostClient::new(host.api, identity, &self.credentials)
        };
        clients.entry((host.name.clone(), host.api)).or_insert_with(fresh).clone()
    }

    /// The way to the node of the host called `name`.
    ///
    /// # Errors
    /// [`Problem::NotFound`].
    pub fn node_of(&self, name: &Name) -> Result<HostClient, ApiError> {
        Ok(self.node(&self.host(name)?))
    }

    /// Forgets the way to a host.
    pub fn forget_client(&self, name: &Name) {
        lock(&self.clients).retain(|(n, _), _| n != name);
    }

    /// All VMs, whatever their state, by name.
    ///
    /// # Errors
    /// The store's.
    pub fn vm_records(&self) -> Result<Vec<VmRecord>, ApiError> {
        let mut vms: Vec<VmRecord> = self.store.read_all(Kind::Vm)?;
        vms.sort_by(|a, b| a.definition.name.cmp(&b.definition.name));
        Ok(vms)
    }

    /// A VM that is wholly there.
    ///
    /// # Errors
    /// [`Problem::NotFound`], or [`Problem::Conflict`] while it is being made or taken away.
    pub fn vm_record(&self, name: &Name) -> Result<VmRecord, ApiError> {
        ready(self.vm_called(name)?)
    }

    /// A VM, whatever its state.
    ///
    /// # Errors
    /// [`Problem::NotFound`], or the store's.
    pub fn vm_called(&self, name: &Name) -> Result<VmRecord, ApiError> {
        let vm = self.vm_records()?.into_iter().find(|vm| &vm.definition.name == name);
        vm.ok_or_else(|| missing("VM", name))
    }

    /// Writes a VM.
    ///
    /// # Errors
    /// The store's.
    pub fn put_vm(&self, vm: &VmRecord) -> Result<(), ApiError> {
        Ok(self.store.commit(&[Change::put(Kind::Vm, vm.definition.id.0, vm)])?)
    }

    /// A move's record, with how it stands now.
    ///
    /// # Errors
    /// [`Problem::NotFound`].
    pub fn move_record(&self, id: MoveId) -> Result<MoveRecord, ApiError> {
        let record: Option<MoveRecord> = self.store.read(Kind::Move, id.0)?;
        record.map(|r| self.with_live(r)).ok_or_else(|| missing("move", id.0))
    }

    /// All moves, the newest first, each with how it stands now.
    ///
    /// # Errors
    /// The store's.
    pub fn move_records(&self) -> Result<Vec<MoveRecord>, ApiError> {
        let mut moves: Vec<MoveRecord> = self.store.read_all(Kind::Move)?;
        moves.sort_by_key(|m| std::cmp::Reverse(m.id()));
        Ok(moves.into_iter().map(|m| self.with_live(m)).collect())
    }

    /// Moves that have not ended, each with how it stands now.
    ///
    /// # Errors
    /// The store's.
    pub fn open_moves(&self) -> Result<Vec<MoveRecord>, ApiError> {
        Ok(self.move_records()?.into_iter().filter(|m| m.step != Step::Ended).collect())
    }

    fn with_live(&self, mut record: MoveRecord) -> MoveRecord {
        // Of one that was ended beside its saga the record is newer.
        if record.step != Step::Ended
            && let Some(progress) = lock(&self.live).get(&record.id())
        {
            record.progress = progress.clone();
        }
        record
    }

    /// Remembers how a move stands, or that it has ended.
    pub fn set_live(&self, id: MoveId, progress: Option<MoveProgress>) {
        let mut live = lock(&self.live);
        match progress {
            Some(progress) => live.insert(id, progress),
            None => live.remove(&id),
        };
    }

    /// Takes a VM in hand until the answer is dropped.
    pub fn take_in_hand(self: &Arc<Self>, id: VmId) -> InHand {
        lock(&self.in_hand).insert(id);
        InHand { controller: Arc::clone(self), id }
    }

    /// The same, unless another request has it in hand.
    ///
    /// # Errors
    /// [`Problem::Conflict`].
    pub fn take_alone(self: &Arc<Self>, id: VmId, name: &Name) -> Result<InHand, ApiError> {
        if !lock(&self.in_hand).insert(id) {
            let message = format!("another request has `{name}` in hand just now");
            return Err(conflict(message).remedy("wait for its end, and look at it again"));
        }
        Ok(InHand { controller: Arc::clone(self), id })
    }

    /// Whether a request has the VM in hand.
    #[must_use]
    pub fn is_in_hand(&self, id: VmId) -> bool {
        lock(&self.in_hand).contains(&id)
    }

    /// What the nodes of `hosts` say of their VMs; all are asked at once.
    pub async fn look_at(&self, hosts: Vec<HostRecord>) -> HashMap<Name, Result<Vec<LocalVm>, ApiError>> {
        let mut asking = JoinSet::new();
        for host in hosts {
            let node = self.node(&host);
            asking.spawn(async move { (host.name, node.vms().await) });
        }
        let said: HashMap<Name, Result<Vec<LocalVm>, ApiError>> = asking.join_all().await.into_iter().collect();
        said.iter().for_each(|(host, answer)| self.events.note_host(host, answer.as_ref().err()));
        said
    }
}

/// A VM that a request has in hand.
pub struct InHand {
    controller: Arc<Controller>,
    id: VmId,
}

impl Drop for InHand {
    fn drop(&mut self) {
        lock(&self.controller.in_hand).remove(&self.id);
    }
}
