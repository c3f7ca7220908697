//! The node: everything that belongs to the host rather than to one VM.

use crate::actor::Actor;
use crate::boot_files::BootFiles;
use crate::components::Components;
use crate::disk::Disk;
use crate::gateways::{self, Gateways};
use crate::incoming::Comes;
use crate::lend::Lending;
use crate::membership::Membership;
use crate::neighbours::resident::{self, Question};
use crate::orphans::FirstSeen;
use crate::parts::{Moving, Parts, lock};
use crate::peers::Peers;
use crate::precache::Precaches;
use crate::proto::{self, Note};
use crate::quarantine::Quarantine;
use crate::registry::{self, Power, VmFile};
use crate::wired::{self, Wired};
use crate::{Config, check, effects};
use anyhow::{Context, Result, bail};
use godwit_api::host::{HostFacts, LinkAddresses, LocalVm, MoveRole, PeerHost, RunState};
use godwit_api::vm::{Store, VmDefinition};
use godwit_api::{ApiError, Problem};
use godwit_handoff::{FileLedger, Generation, Ledger, Lineage, Message, Owner, Ram, Record, Seen, VmId};
use godwit_memory::CheckpointKey;
use godwit_trust::Credentials;
use godwit_units::{BitRate, Bytes};
use godwit_vmm::{Qemu, Start};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// A node's state.
#[derive(Debug)]
pub struct Node {
    config: Config,
    credentials: Credentials,
    membership: Membership,
    ledger: Mutex<FileLedger>,
    vms: Mutex<BTreeMap<VmId, Arc<Parts>>>,
    /// Disks that were opened here, as long as anybody holds them.
    opened: Mutex<Vec<Weak<Disk>>>,
    qemu: godwit_vmm::HostFacts,
    wires: godwit_wire::Wires,
    gateways: Gateways,
    components: Components,
    wired: Wired,
    extenders: crate::extenders::Extenders,
    peers: Peers,
    quarantine: Quarantine,
    first_seen: FirstSeen,
    precaches: Precaches,
    libraries: crate::libraries::Libraries,
    neighbours: crate::neighbours::Neighbours,
    lending: Lending,
    pace: crate::scrub::Pace,
    images: crate::image::Images,
    boot_files: BootFiles,
    /// VMs that are being made.
    defining: Mutex<BTreeSet<VmId>>,
}

/// A VM that is being made, until this goes.
struct Defining<'a>(&'a Arc<Node>, VmId);

impl Drop for Defining<'_> {
    fn drop(&mut self) {
        lock(&self.0.defining).remove(&self.1);
    }
}

/// How often guests' consoles are looked at.
const CONSOLES: Duration = Duration::from_secs(5);
/// How often it is looked whether a VM is made that somebody else had begun to make.
const DEFINING: Duration = Duration::from_millis(100);
/// How often a QEMU of which nothing is known is looked for.
const LOOK_AGAIN: Duration = Duration::from_secs(2);

impl Node {
    pub(crate) const fn boot_files(&self) -> &BootFiles {
        &self.boot_files
    }

    pub(crate) const fn first_seen(&self) -> &FirstSeen {
        &self.first_seen
    }

    /// Sessions that fetch blocks from here and are not complete yet.
    pub(crate) const fn lending(&self) -> &Lending {
        &self.lending
    }

    /// Pre-caches from here and here.
    #[must_use]
    pub const fn precaches(&self) -> &Precaches {
        &self.precaches
    }

    /// How fast scrubs read.
    pub(crate) const fn pace(&self) -> &crate::scrub::Pace {
        &self.pace
    }

    /// Images that are copied into volumes and out of them.
    pub(crate) const fn images(&self) -> &crate::image::Images {
        &self.images
    }

    /// VMs of this host that cannot be had.
    #[must_use]
    pub const fn quarantine(&self) -> &Quarantine {
        &self.quarantine
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        self.config.name.as_str()
    }

    /// What it was started with.
    #[must_use]
    pub const fn config(&self) -> &Config {
        &self.config
    }

    /// What QEMU can do here.
    #[must_use]
    pub const fn qemu_facts(&self) -> &godwit_vmm::HostFacts {
        &self.qemu
    }

    /// The network of this host.
    pub(crate) const fn wires(&self) -> &godwit_wire::Wires {
        &self.wires
    }

    pub(crate) const fn gateways(&self) -> &Gateways {
        &self.gateways
    }

    /// Components that are here, or were.
    pub(crate) const fn components(&self) -> &Components {
        &self.components
    }

    /// Wires between ports.
    pub(crate) const fn wired(&self) -> &Wired {
        &self.wired
    }

    /// Tunnels to other sites.
    pub(crate) const fn extenders(&self) -> &crate::extenders::Extenders {
        &self.extenders
    }

    /// Sessions with other nodes.
    #[must_use]
    pub const fn peers(&self) -> &Peers {
        &self.peers
    }

    /// The records of hand-offs. Held for one record at a time.
    pub fn ledger(&self) -> MutexGuard<'_, FileLedger> {
        lock(&self.ledger)
    }

    /// A VM's last durable record.
    #[must_use]
    pub fn record(&self, vm: VmId) -> Option<Record> {
        self.ledger().load(vm).ok().flatten()
    }

    /// All VMs that are known here.
    #[must_use]
    pub fn vms(&self) -> Vec<Arc<Parts>> {
        lock(&self.vms).values().cloned().collect()
    }

    /// All disks that are open here, whoever holds them: of VMs, replicas that are kept for other hosts, and what is just let go of.
    pub(crate) fn disks(&self) -> Vec<Arc<Disk>> {
        lock(&self.opened).iter().filter_map(Weak::upgrade).collect()
    }

    /// A disk was opened.
    pub(crate) fn has_opened(&self, disk: &Arc<Disk>) {
        let mut opened = lock(&self.opened);
        opened.retain(|known| known.strong_count() > 0);
        opened.push(Arc::downgrade(disk));
    }

    /// One VM.
    #[must_use]
    pub fn vm(&self, id: VmId) -> Option<Arc<Parts>> {
        lock(&self.vms).get(&id).cloned()
    }

    fn folder(&self, vm: VmId) -> PathBuf {
        self.config.state.join("vms").join(vm.0.to_string())
    }

    fn run_folder(&self, vm: VmId) -> PathBuf {
        self.config.run.join("vms").join(vm.0.to_string())
    }

    /// What it has and can do.
    #[must_use]
    pub fn facts(&self) -> HostFacts {
        let disk_free = rustix::fs::statvfs(&self.config.state).map_or(0, |s| s.f_bavail * s.f_frsize);
        HostFacts {
            name: self.config.name.clone(),
            version: env!("CARGO_PKG_VERSION").into(),
            qemu: self.qemu.version.to_string(),
            machines: self.qemu.machines.clone(),
            kvm: self.qemu.kvm,
            memory_free: check::memory_free(),
            disk_free: Bytes(disk_free),
            certificate_expires_unix_s: self.credentials.expiry().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs()),
            certificate_renews: self.membership.renews(),
            revocations: self.credentials.revocations().version,
            link: self.as_peer().link,
            underlay: self.config.address,
            extender: self.config.extender,
        }
    }

    /// Itself, as another node has to know it.
    #[must_use]
    pub fn as_peer(&self) -> PeerHost {
        let at = |port| (self.config.address, port).into();
        PeerHost {
            name: self.config.name.clone(),
            link: LinkAddresses {
                control: at(self.config.control_port),
                disk: at(self.config.disk_port),
                memory: at(self.config.memory_port),
            },
            underlay: self.config.address,
        }
    }
}

impl Node {
    /// Starts everything that was here before: records, replicas, guests.
    ///
    /// # Errors
    /// When something that the node needs is missing; the error says what.
    pub async fn start(config: Config) -> Result<Arc<Self>> {
        use std::os::unix::fs::DirBuilderExt;
        for folder in [&config.state, &config.run, &config.images] {
            std::fs::DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(folder)
                .with_context(|| format!("cannot make {}", folder.display()))?;
        }
        let credentials = Credentials::load(&config.credentials)?;
        let name = credentials.identity().name();
        if name != config.name.as_str() {
            bail!("the certificate in {} is {name}'s, this node is {}", config.credentials.display(), config.name);
        }
        let membership = Membership::recall(&config.credentials, &config.state, &credentials)?;
        let ledger = FileLedger::open(&config.state.join("records"))?;
        let run = config.run.clone();
        let qemu = tokio::task::spawn_blocking(move || godwit_vmm::HostFacts::ask(&run)).await??;
        let wires = godwit_wire::Wires::new(crate::spec::PREFIX, config.address)?;
        let at = |port| (config.address, port).into();
        let listen = godwit_link::Addresses {
            control: at(config.control_port),
            disk: at(config.disk_port),
            memory: at(config.memory_port),
        };
        let peers = Peers::bind(listen, &credentials)?;
        let gateways = Gateways::new(&config.state);
        let components = Components::new(&config.state, &config.run, &wires)?;
        let wired = Wired::new(&config.state);
        let extenders = crate::extenders::Extenders::new(&config.state, &config.run);
        let precaches = Precaches::new(&config.state, &config.run);
        let node = Arc::new(Self {
            config,
            credentials,
            membership,
            ledger: Mutex::new(ledger),
            vms: Mutex::default(),
            opened: Mutex::default(),
            qemu,
            wires,
            gateways,
            components,
            wired,
            extenders,
            peers,
            quarantine: Quarantine::default(),
            first_seen: FirstSeen::default(),
            precaches,
            libraries: crate::libraries::Libraries::default(),
            neighbours: crate::neighbours::Neighbours::default(),
            lending: Lending::default(),
            pace: crate::scrub::Pace::default(),
            images: crate::image::Images::default(),
            boot_files: BootFiles::default(),
            defining: Mutex::default(),
        });
        // Before a wire could send anything.
        node.recover_extenders().await;
        node.recover_gateways().await;
        node.recover_wires().await;
        node.recover().await?;
        node.recover_components();
        node.peers.serve(&node);
        node.renew_in_time();
        node.drop_what_expires();
        node.bound_consoles();
        crate::precache::resume(&node);
        let removing = node.clone();
        tokio::task::spawn_blocking(move || crate::store::finish_all(&removing));
        Ok(node)
    }

    /// Looks every hour, and at the start, for what has been kept for too long.
    fn drop_what_expires(self: &Arc<Self>) {
        let node = Arc::downgrade(self);
        tokio::spawn(async move {
            let mut hour = tokio::time::interval(Duration::from_secs(3600));
            loop {
                hour.tick().await;
                let Some(node) = node.upgrade() else { return };
                let looking = tokio::task::spawn_blocking(move || {
                    node.vms().iter().for_each(|parts| crate::kept::expire(parts, SystemTime::now()));
                });
                let _ = looking.await;
            }
        });
    }

    /// A guest that writes to its serial port without end does not fill this host's disk.
    fn bound_consoles(self: &Arc<Self>) {
        let node = Arc::downgrade(self);
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(CONSOLES).await;
                let Some(node) = node.upgrade() else { return };
                let looking = tokio::task::spawn_blocking(move || {
                    for parts in node.vms() {
                        match godwit_vmm::console::bound(&parts.folder) {
                            Ok(true) => tracing::warn!(vm = parts.name, "its console had become too long, and was cut"),
                            Ok(false) => {}
                            Err(error) => tracing::warn!(vm = parts.name, %error, "its console cannot be cut"),
                        }
                    }
                });
                let _ = looking.await;
            }
        });
    }

    /// Its certificates.
    #[must_use]
    pub const fn credentials(&self) -> &Credentials {
        &self.credentials
    }

    /// Its part in the installation.
    pub(crate) const fn membership(&self) -> &Membership {
        &self.membership
    }

    /// When its certificate ends.
    #[must_use]
    pub fn certificate_expires(&self) -> SystemTime {
        self.credentials.expiry()
    }

    async fn recover(self: &Arc<Self>) -> Result<()> {
        let folder = self.config.state.join("vms");
        let mut ids = vec![];
        for entry in std::fs::read_dir(&folder).into_iter().flatten().filter_map(Result::ok) {
            let name = entry.file_name();
            match name.to_str().map(|name| (name.parse().map(VmId), crate::store::was_going(name))) {
                Some((Ok(id), _)) => ids.push(id),
                Some((_, Some(_))) => drop(std::fs::remove_dir_all(entry.path())),
                _ => {}
            }
        }
        ids.sort_unstable();
        let mut found = vec![];
        for id in ids {
            // What one VM has lost is no reason to leave the others off.
            let (parts, record) = match self.found(id) {
                Ok(found) => found,
                Err(error) => {
                    self.quarantine.add(id, format!("{error:#}"));
                    continue;
                }
            };
            let placement = crate::spec::placement(&parts.definition(), &parts.folder, &parts.run);
            // All at once: each waits for its monitor, and one that says nothing holds no other up.
            let adopting = tokio::task::spawn_blocking(move || {
                let qemu = Qemu::adopt(&placement)?.map(Arc::new);
                let state = qemu.as_deref().map(Qemu::state);
                let arriving = qemu.as_deref().is_some_and(|q| q.is_arriving().unwrap_or_default());
                Ok::<_, godwit_vmm::VmmError>((qemu, state, arriving))
            });
            found.push((parts, record, adopting));
        }
        for (parts, record, adopting) in found {
            crate::libraries::look_at(self, &parts);
            let (qemu, seen) = match adopting.await? {
                Ok((Some(qemu), state, arriving)) => {
                    if let Some(why) = qemu.unreachable() {
                        tracing::error!(
                            vm = parts.name,
                            pid = qemu.pid(),
                            why,
                            "its QEMU runs and cannot be reached; it is tried for as long as it runs"
                        );
                    }
                    parts.set_qemu(Some(qemu.clone()));
                    let seen = match (state, record) {
                        // Its pages were given up, and will never come.
                        (Some(Ok(_)), Some(Record::Owned(_) | Record::Started(_))) if arriving => Some(Seen::Gone),
                        (Some(Ok(godwit_vmm::State::Running)), _) => Some(Seen::Running),
                        // What was verified before the record was written is still loaded.
                        (
                            Some(Ok(godwit_vmm::State::Stopped)),
                            Some(Record::Prepared(_) | Record::Granted(_) | Record::Draining(_) | Record::Started(_)),
                        ) => Some(Seen::Loaded),
                        // Whether everything had come is not known any more.
                        (_, Some(Record::Staged(_))) => Some(Seen::Gone),
                        (Some(Ok(godwit_vmm::State::Stopped | godwit_vmm::State::Postmigrate)), _) => {
                            Some(Seen::Stopped)
                        }
                        (Some(Ok(godwit_vmm::State::Incoming)), _) => Some(Seen::Gone),
                        // It would be booted anew over one that may run just now: that has to be known.
                        (Some(Err(_)) | None, Some(Record::Owned(owner))) if owner.ram == Ram::Stale => None,
                        // It is there and says nothing, as QEMU does while it stops: what it holds is not given up for that.
                        (Some(Err(_)) | None, _) => Some(Seen::Stopped),
                    };
                    (Some(qemu), seen)
                }
                Ok((None, ..)) => (None, Some(Seen::Gone)),
                // Nobody knows whether one runs; beside one that does, none can be started.
                Err(error) => {
                    tracing::error!(vm = parts.name, %error, "nobody knows whether its QEMU runs");
                    (None, None)
                }
            };
            // It is known, and has a keeper, before its QEMU can say anything: nothing that it says falls between.
            let events = Self::expect_events(&parts);
            match seen {
                None => self.await_qemu(&parts, record),
                Some(seen) => {
                    tracing::info!(vm = parts.name, ?record, ?seen, "recovered");
                    parts.recover_move(record);
                    crate::drain::go_on(self, &parts, record);
                    if seen == Seen::Running && matches!(record, Some(Record::Owned(_))) {
                        let parts = parts.clone();
                        tokio::spawn(async move { effects::plug(&parts).await });
                    }
                    lock(&self.vms).insert(parts.id, parts.clone());
                    Actor::spawn(self.clone(), parts.clone(), record, seen);
                }
            }
            if let Some(qemu) = qemu {
                Self::watch(&parts, &qemu, events);
            }
        }
        Ok(())
    }

    /// A VM as it was left here.
    fn found(&self, id: VmId) -> Result<(Arc<Parts>, Option<Record>)> {
        let file = registry::load(&self.folder(id))?;
        let record = self.ledger().load(id)?;
        if file.definition.id != id {
            bail!("{} describes VM {}", registry::path(&self.folder(id)).display(), file.definition.id.0);
        }
        let parts = Arc::new(Parts::new(self.folder(id), self.run_folder(id), file));
        if record.is_some_and(|record| record.may_have_the_vm()) {
            // Whoever may have the truth must not make an empty disk of a lost one.
            let definition = parts.definition();
            for (disk, volume) in definition.spec.disks.iter().zip(&definition.volumes) {
                if let Some(folder) = crate::store::is_there(self, disk, *volume) {
                    bail!(
                        "its volume {} is not at {}; bring it back, and restart the node",
                        volume.0,
                        folder.display()
                    );
                }
            }
        }
        // Before its QEMU is looked for: an adopted guest is waiting for them.
        self.open_disks(&parts)?;
        Ok((parts, record))
    }

    /// Takes a VM in of which nobody can say whether its QEMU runs, or what that does. Nothing is done with it until that is known.
    fn await_qemu(self: &Arc<Self>, parts: &Arc<Parts>, record: Option<Record>) {
        tracing::error!(vm = parts.name, "nothing is done with it until its QEMU is heard, or known to be gone");
        lock(&self.vms).insert(parts.id, parts.clone());
        Actor::spawn_blind(self.clone(), parts.clone(), record);
        let parts = parts.clone();
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(LOOK_AGAIN).await;
                let (known, placement) =
                    (parts.qemu(), crate::spec::placement(&parts.definition(), &parts.folder, &parts.run));
                let looked = tokio::task::spawn_blocking(move || {
                    let qemu = match known {
                        Some(qemu) if qemu.is_alive() => Some(qemu),
                        Some(_) => None,
                        None => Qemu::adopt(&placement)?.map(Arc::new),
                    };
                    let state = qemu.as_deref().map(Qemu::state).transpose();
                    Ok::<_, godwit_vmm::VmmError>((qemu, state))
                });
                let seen = match looked.await {
                    Ok(Ok((None, _))) => {
                        parts.set_qemu(None);
                        Seen::Gone
                    }
                    Ok(Ok((Some(qemu), state))) => {
                        if parts.qemu().is_none() {
                            Self::take(&parts, &qemu);
                        }
                        match state {
                            Ok(Some(godwit_vmm::State::Running)) => Seen::Running,
                            Ok(Some(godwit_vmm::State::Incoming)) => Seen::Gone,
                            Ok(_) => Seen::Stopped,
                            Err(_) => continue,
                        }
                    }
                    _ => continue,
                };
                tracing::info!(vm = parts.name, ?record, ?seen, "its QEMU is known now");
                parts.recover_move(record);
                return parts.keeper().tell(crate::actor::Input::Known(seen)).await;
            }
        });
    }

    /// What the volumes here hold, by trust domains.
    pub(crate) const fn libraries(&self) -> &crate::libraries::Libraries {
        &self.libraries
    }

    /// Guests that have left this host.
    pub(crate) const fn neighbours(&self) -> &crate::neighbours::Neighbours {
        &self.neighbours
    }

    fn open_disks(&self, parts: &Parts) -> Result<()> {
        use std::os::unix::fs::DirBuilderExt;
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&parts.run)?;
        let definition = parts.definition();
        let mut disks = vec![];
        for (i, (disk, volume)) in definition.spec.disks.iter().zip(&definition.volumes).enumerate() {
            let folder = crate::spec::volume_folder(&self.config, *volume);
            let socket = crate::spec::disk_socket(&parts.run, i);
            let name = disk.volume.as_str();
            let disk = match disk.shared() {
                Some(place) => Disk::open_shared(place, &folder, socket, *volume, name, disk.size, self.name())?,
                None => {
                    let pool = self.config.pool.as_ref();
                    Disk::open_or_create(&folder, pool, socket, *volume, name, disk.size)?
                }
            };
            // What was decided before this node was started, or a pre-cache ended.
            if let Err(error) = self.precaches.moments().settle(definition.id, *volume, disk.replica()) {
                tracing::warn!(
                    volume = name,
                    error = format!("{error:#}"),
                    "an image that has come is not in its place"
                );
            }
            self.has_opened(&disk);
            if let Some(shelf) = self.libraries.shelf(definition.id, definition.domain.as_ref()) {
                disk.look_up_in(shelf);
            }
            disks.push(disk);
        }
        parts.set_disks(disks);
        Ok(())
    }

    /// Where a new QEMU's events will come.
    fn expect_events(parts: &Parts) -> tokio::sync::broadcast::Sender<godwit_vmm::QemuEvent> {
        let (events, _) = tokio::sync::broadcast::channel(256);
        parts.set_events(events.clone());
        parts.note_resumed(None);
        events
    }

    /// A QEMU is the VM's from now on, and heard.
    fn take(parts: &Arc<Parts>, qemu: &Arc<Qemu>) {
        let events = Self::expect_events(parts);
        parts.set_qemu(Some(qemu.clone()));
        Self::watch(parts, qemu, events);
    }

    /// Hears what a QEMU of the VM says, which is its present one already: of another one the end is nobody's business.
    fn watch(parts: &Arc<Parts>, qemu: &Arc<Qemu>, events: tokio::sync::broadcast::Sender<godwit_vmm::QemuEvent>) {
        let (parts, weak) = (parts.clone(), Arc::downgrade(qemu));
        let runtime = tokio::runtime::Handle::current();
        qemu.watch(move |event| {
            use godwit_vmm::QemuEvent as Q;
            if let Q::Resume { at, unix_us } = event {
                parts.note_resumed(Some((at, unix_us)));
            }
            let _ = events.send(event);
            let input = match event {
                Q::PoweredOff => crate::actor::Input::PoweredOff,
                Q::NoRoom => crate::actor::Input::Stalled,
                Q::Gone => {
                    // One that we ended ourselves is not the VM's any more.
                    let ours = parts.qemu();
                    if !ours.is_some_and(|q| std::ptr::eq(Arc::as_ptr(&q), weak.as_ptr())) {
                        return;
                    }
                    parts.set_qemu(None);
                    parts.disks().iter().for_each(|disk| disk.hang_up());
                    crate::actor::Input::Event(godwit_handoff::Event::QemuDied)
                }
                _ => return,
            };
            runtime.block_on(parts.keeper().tell(input));
        });
    }

    /// Starts a VM's QEMU, which is the VM's from then on.
    ///
    /// # Errors
    /// When it does not come up.
    pub async fn start_qemu(self: &Arc<Self>, parts: &Arc<Parts>, start: Start) -> Result<Arc<Qemu>, ApiError> {
        let definition = parts.definition();
        let spec = crate::spec::with_images(&definition, &self.config.images)?;
        let placement = crate::spec::placement(&definition, &parts.folder, &parts.run);
        let started = tokio::task::spawn_blocking(move || Qemu::start(&spec, &placement, start)).await;
        let qemu = match started {
            Ok(Ok(qemu)) => Arc::new(qemu),
            Ok(Err(error)) => return Err(ApiError::new(Problem::Failed, format!("`{}`: {error}", parts.name))),
            Err(_) => return Err(ApiError::new(Problem::Failed, "starting a QEMU ended in a bug of the node")),
        };
        Self::take(parts, &qemu);
        Ok(qemu)
    }

    /// Makes the host ready for a VM: its endpoints are staged.
    ///
    /// # Errors
    /// When the network refuses.
    pub async fn prepare_host(&self, parts: &Parts) -> Result<(), ApiError> {
        self.wires.stage_all(&crate::spec::endpoints(&parts.definition())?).await.map_err(network)
    }

    /// Lets a VM's endpoints speak that were staged, and announces them.
    ///
    /// # Errors
    /// When the network refuses.
    pub async fn activate(
        self: &Arc<Self>,
        parts: &Parts,
        lineage: Lineage,
        generation: Generation,
    ) -> Result<(), ApiError> {
        let sequence = godwit_wire::Sequence { lineage: lineage.0, generation: generation.0 };
        let endpoints = crate::spec::endpoints(&parts.definition())?;
        self.wires.activate_all(&endpoints, sequence).await.map_err(network)?;
        wired::opened(self, parts, lineage, generation).await
    }

    /// Cuts a VM's endpoints off.
    ///
    /// # Errors
    /// When the network refuses.
    pub async fn isolate(self: &Arc<Self>, parts: &Parts) -> Result<(), ApiError> {
        gateways::let_go(self, &parts.definition());
        let isolated = self.wires.isolate_all(&crate::spec::endpoints(&parts.definition())?).await.map_err(network);
        // Whoever asks again finds what is closed closed.
        let closed = wired::closed(self, parts).await;
        isolated.and(closed)
    }

    /// Removes a VM's endpoints.
    ///
    /// # Errors
    /// When the network refuses.
    pub async fn remove_endpoints(self: &Arc<Self>, parts: &Parts) -> Result<(), ApiError> {
        gateways::let_go(self, &parts.definition());
        wired::removed(self, parts).await?;
        self.wires.remove_all(&crate::spec::endpoints(&parts.definition())?).await.map_err(network)
    }

    /// Proves that the network leads to the VM here.
    ///
    /// # Errors
    /// When no proof came in time.
    pub async fn probe(self: &Arc<Self>, parts: &Parts, within: Duration) -> Result<(), ApiError> {
        let definition = parts.definition();
        for endpoint in crate::spec::endpoints(&definition)? {
            match endpoint.component {
                godwit_wire::Component::Nowhere => wired::probe(self, &endpoint, within).await?,
                _ => gateways::probe(self, &definition, &endpoint, within).await?,
            }
        }
        Ok(())
    }

    /// Creates a VM here, or says that it is there already.
    ///
    /// # Errors
    /// When it cannot be run here, or another one has its number.
    pub async fn define(self: &Arc<Self>, definition: VmDefinition) -> Result<Arc<Parts>, ApiError> {
        let vm = definition.id;
        while !lock(&self.defining).insert(vm) {
            tokio::time::sleep(DEFINING).await;
        }
        let node = self.clone();
        let made = crate::trace::spawn(async move {
            let _defining = Defining(&node, vm);
            node.define_now(definition).await
        });
        made.await.unwrap_or_else(|error| {
            Err(ApiError::new(Problem::Failed, format!("making VM {} ended in a bug of the node: {error}", vm.0)))
        })
    }

    /// Whether this VM is being made here.
    pub(crate) fn defines(&self, vm: VmId) -> bool {
        lock(&self.defining).contains(&vm)
    }

    async fn define_now(self: &Arc<Self>, mut definition: VmDefinition) -> Result<Arc<Parts>, ApiError> {
        self.quarantine.check(definition.id)?;
        if let Some(known) = self.vm(definition.id) {
            let there = known.definition();
            if there.name == definition.name && there.volumes == definition.volumes {
                return Ok(known);
            }
            return Err(ApiError::new(Problem::Conflict, format!("VM {} is another one here", definition.id.0)));
        }
        let machine = self.qemu.resolve(&definition.spec.machine);
        definition.spec.machine = machine.unwrap_or(definition.spec.machine);
        definition.spec.max_vcpus = definition.spec.max_vcpus.max(definition.spec.vcpus);
        let (node, boot) = (self.clone(), definition.spec.boot.clone());
        let files = tokio::task::spawn_blocking(move || node.boot_files.of(&node.config.images, &boot)).await;
        definition.boot_files = files
            .unwrap_or_else(|_| Err("hashing ended in a bug of the node".into()))
            .map_err(|e| ApiError::new(Problem::Invalid, e))?;
        let asked =
            godwit_api::host::CheckVm { definition: definition.clone(), disk: Bytes(0), vcpus: None, place: vec![] };
        if let Some(first) = check::check(self, &asked, check::Purpose::Create).await.blockers.into_iter().next() {
            return Err(ApiError::new(Problem::Blocked, first.message).remedy(first.remedy));
        }
        let vm = definition.id;
        let sources: Vec<Option<String>> = definition.spec.disks.iter().map(|d| d.from.clone()).collect();
        let stores: Vec<Option<Store>> = definition.spec.disks.iter().map(|d| d.store.clone()).collect();
        for disk in &mut definition.spec.disks {
            (disk.from, disk.store) = (None, crate::store::kept(disk.store.take()));
        }
        let owner = Owner::first(vm);
        let file = VmFile::new(definition, Power::Off);
        let parts = Arc::new(Parts::new(self.folder(vm), self.run_folder(vm), file));
        let failed = |e: anyhow::Error| ApiError::new(Problem::Failed, format!("{e:#}"));
        if let Err(error) = crate::store::place_all(self, &parts.definition(), stores).await {
            self.erase(&parts).await;
            crate::store::remove_shared(self, &parts.definition());
            return Err(failed(error));
        }
        let imported = self.clone().import(parts.clone(), sources, owner).await;
        if let Err(error) = imported {
            // Nothing is left of a VM that could not be made.
            self.erase(&parts).await;
            crate::store::remove_shared(self, &parts.definition());
            return Err(failed(error));
        }
        lock(&self.vms).insert(vm, parts.clone());
        Actor::spawn(self.clone(), parts.clone(), Some(Record::Owned(owner)), Seen::Gone);
        Ok(parts)
    }

    async fn import(self: Arc<Self>, parts: Arc<Parts>, sources: Vec<Option<String>>, owner: Owner) -> Result<()> {
        let (node, opened) = (self.clone(), parts.clone());
        crate::trace::spawn_blocking(move || node.open_disks(&opened)).await??;
        for (disk, source) in parts.disks().into_iter().zip(sources) {
            disk.open(owner.lineage, owner.generation).await?;
            if let Some(source) = source {
                crate::image::fill_new(&parts, &disk, &self.config.images.join(source)).await?;
            }
        }
        registry::store(&parts.folder, &parts.file())?;
        let vm = parts.id;
        crate::libraries::look_at(&self, &parts);
        tokio::task::spawn_blocking(move || self.ledger().store(vm, &Record::Owned(owner))).await??;
        Ok(())
    }

    /// A VM that is about to come here, or was here before.
    ///
    /// # Errors
    /// When its disks cannot be had.
    pub async fn adopt_definition(
        self: &Arc<Self>,
        definition: VmDefinition,
        plug: Option<u32>,
    ) -> Result<Arc<Parts>, ApiError> {
        let node = self.clone();
        // Opening its disks may wait for them.
        let adopted = crate::trace::spawn_blocking(move || node.adopt_now(definition, plug));
        adopted.await.unwrap_or_else(|e| Err(ApiError::new(Problem::Failed, e.to_string())))
    }

    fn adopt_now(self: &Arc<Self>, definition: VmDefinition, plug: Option<u32>) -> Result<Arc<Parts>, ApiError> {
        let vm = definition.id;
        self.quarantine.check(vm)?;
        let failed = |e: &dyn std::fmt::Display| ApiError::new(Problem::Failed, e.to_string());
        if let Some(known) = self.vm(vm) {
            let file = known.file();
            if file.definition.volumes != definition.volumes || file.definition.name != definition.name {
                return Err(ApiError::new(Problem::Conflict, format!("VM {} is another one here", vm.0)));
            }
            known.change(|f| (f.definition, f.plug) = (definition, plug)).map_err(|e| failed(&e))?;
            return Ok(known);
        }
        let file = VmFile { plug, ..VmFile::new(definition, Power::On) };
        let parts = Arc::new(Parts::new(self.folder(vm), self.run_folder(vm), file));
        self.open_disks(&parts).map_err(|e| failed(&format!("{e:#}")))?;
        registry::store(&parts.folder, &parts.file()).map_err(|e| failed(&e))?;
        let record = self.ledger().load(vm).map_err(|e| failed(&e))?;
        lock(&self.vms).insert(vm, parts.clone());
        Actor::spawn(self.clone(), parts.clone(), record, Seen::Gone);
        Ok(parts)
    }

    /// Removes a VM that is nobody's business here any more, and its replicas.
    ///
    /// # Errors
    /// When something cannot be removed.
    pub async fn remove(self: &Arc<Self>, parts: &Arc<Parts>) -> Result<(), ApiError> {
        let bug = |_| ApiError::new(Problem::Failed, "removing a VM ended in a bug of the node");
        let (node, parts) = (self.clone(), parts.clone());
        // It ends, whether whoever asked for it still waits or not.
        crate::trace::spawn(async move {
            effects::end_qemu(&parts).await;
            let (ledger, vm) = (node.clone(), parts.id);
            // First: what a crash leaves of the rest is nobody's then, and can be removed. A record whose volumes are gone cannot.
            let forgotten = tokio::task::spawn_blocking(move || ledger.ledger().forget(vm)).await.map_err(bug)?;
            forgotten.map_err(|error| ApiError::new(Problem::Failed, error.to_string()))?;
            lock(&node.vms).remove(&vm);
            node.erase(&parts).await;
            crate::store::remove_shared(&node, &parts.definition());
            Ok(())
        })
        .await
        .map_err(bug)?
    }

    async fn erase(self: &Arc<Self>, parts: &Arc<Parts>) {
        effects::end_qemu(parts).await;
        let _ = self.remove_endpoints(parts).await;
        // What a pre-cache brings would go on to files that are gone, and be said to be held.
        self.precaches.release(&parts.definition().volumes).await;
        for disk in parts.disks() {
            disk.end_snapshot("its replica is removed from this host");
            // Whatever still fills it, or answers from it, ends. What it cannot make durable goes with its files.
            let _ = disk.freeze().await;
        }
        parts.set_disks(vec![]);
        // Under another name first: half a folder would be that of a VM that cannot be read.
        let gone = crate::store::gone(&parts.folder);
        let _ = std::fs::rename(&parts.folder, &gone);
        for folder in [&gone, &parts.folder, &parts.run] {
            let _ = std::fs::remove_dir_all(folder);
        }
        for volume in &parts.definition().volumes {
            // A pre-cache may have asked again meanwhile.
            if let Err(error) = self.precaches.remove(*volume).await {
                tracing::error!(
                    volume = volume.0,
                    error = format!("{error:#}"),
                    "a replica cannot be removed; it is an orphan now"
                );
            }
        }
    }

    /// A VM as the API shows it.
    pub async fn local(&self, parts: &Parts) -> LocalVm {
        let view = parts.view();
        let run = match parts.qemu() {
            None => RunState::Off,
            Some(qemu) => match effects::on_qemu(&qemu, Qemu::state).await {
                Ok(godwit_vmm::State::Running) => RunState::Running,
                Ok(godwit_vmm::State::Incoming) => RunState::Incoming,
                Ok(_) => RunState::Paused,
                Err(_) if qemu.unreachable().is_some() => RunState::Silent,
                // As QEMU is while it stops for the last pages.
                Err(_) => RunState::Paused,
            },
        };
        let holders: BTreeSet<String> = parts.disks().iter().flat_map(|d| d.holders()).collect();
        LocalVm {
            definition: parts.definition(),
            ownership: view.ownership,
            lineage: Lineage(view.owner.0),
            generation: Generation(view.owner.1),
            run,
            mv: view.ticket.map(|t| t.mv),
            // What is shared needs no room elsewhere.
            allocated: Bytes(parts.disks().iter().filter(|d| !d.is_shared()).map(|d| d.allocated().0).sum()),
            absent: Bytes(parts.disks().iter().map(|d| d.absent().0).sum()),
            holders: holders.into_iter().filter_map(|name| name.parse().ok()).collect(),
            lent: parts.file().lent,
        }
    }

    /// Sends a message of the hand-off to the VM's peer.
    pub fn send(self: &Arc<Self>, parts: &Parts, message: Message) {
        if let Some(peer) = parts.file().peer {
            self.note(&peer, &Note::HandOff(message));
        }
    }

    /// Says something to another node.
    pub fn note(self: &Arc<Self>, peer: &PeerHost, note: &Note) {
        self.peers.say(self, peer.clone(), proto::encode(note));
    }

    /// Another node said something.
    pub fn heard(&self, from: &str, bytes: &[u8]) {
        match proto::decode::<Note>(bytes) {
            Ok(Note::HandOff(message)) => {
                if let Some(parts) = self.vm(message.ticket.vm) {
                    parts.keeper().try_tell(crate::actor::Input::Message { from: from.to_owned(), message });
                }
            }
            Ok(Note::Component(message)) => self.heard_of_component(from, message),
            Ok(Note::Extenders { up }) => self.heard_of_extenders(from, &up),
            Ok(Note::Resumed { ticket, unix_us, ago_us }) => {
                if let Some(moving) = self.moving(from, ticket) {
                    let one_way = self.peers.rtt(from).unwrap_or_default() / 2 + Duration::from_micros(ago_us);
                    moving.tracker.running_there(std::time::Instant::now(), one_way, Some(unix_us));
                }
            }
            Ok(Note::Proved { ticket, after_ms }) => {
                if let Some(moving) = self.moving(from, ticket) {
                    moving.tracker.update(|p| p.network_proved_ms = Some(after_ms));
                }
            }
            Err(error) => tracing::warn!(from, %error, "a message that makes no sense"),
        }
    }

    fn moving(&self, from: &str, ticket: godwit_handoff::Ticket) -> Option<Arc<Moving>> {
        let moving = self.vm(ticket.vm)?.moving()?;
        (moving.ticket == ticket && moving.peer.name.as_str() == from).then_some(moving)
    }

    /// Another node asks something; the answer.
    pub async fn asked(self: &Arc<Self>, from: &str, bytes: &[u8]) -> bytes::Bytes {
        let answer: proto::Answer = match proto::decode::<proto::Request>(bytes) {
            Ok(proto::Request::Stage(stage)) => {
                let tells = stage.tells;
                let staged = crate::incoming::stage(self, from, *stage).await;
                if tells {
                    return proto::encode(&staged);
                }
                staged.map(drop)
            }
            Ok(proto::Request::StandBy(asked)) => crate::precache::stand_by(self, from, *asked).await,
            Ok(proto::Request::Released(asked)) => crate::lend::released(self, from, &asked),
            Ok(proto::Request::Scrub(ask)) => return crate::scrub::asked(self, from, *ask).await,
            Ok(proto::Request::Component(ask)) => self.asked_of_component(from, *ask).await,
            Ok(proto::Request::Repoint(order)) => self.repoint(from, &order).await,
            Ok(proto::Request::Wire(told)) => return proto::encode(&self.told(from, *told).await),
            Ok(proto::Request::GreetWire(asked)) => return proto::encode(&self.greeted(from, &asked).await),
            Ok(proto::Request::ProbeWire(asked)) => self.probe_wire(from, &asked).await,
            Err(error) => Err(ApiError::new(Problem::Invalid, format!("{} does not understand: {error}", self.name()))),
        };
        proto::encode(&answer)
    }

    /// Another node opened a stream.
    pub fn streamed(self: &Arc<Self>, from: &str, hello: &[u8], stream: godwit_link::Stream) {
        let Ok(hello) = proto::decode::<proto::Hello>(hello) else {
            tracing::warn!(from, "a stream for what makes no sense");
            return;
        };
        let ticket = match hello {
            proto::Hello::Filler => return crate::path::swallow(stream),
            proto::Hello::Precache { volume } => return crate::precache::streamed(self, from, volume, stream),
            proto::Hello::Fetch { right, pair, fill } => {
                return crate::lend::streamed(self, from, &right, pair, fill, stream);
            }
            proto::Hello::Memory { ticket, .. }
            | proto::Hello::Mirror { ticket, .. }
            | proto::Hello::Tell { ticket, .. }
            | proto::Hello::Drain { ticket }
            | proto::Hello::Kept { ticket, .. }
            | proto::Hello::Neighbours { ticket, .. } => ticket,
        };
        // All of them come in where the VM does.
        let arriving = self.moving(from, ticket).filter(|moving| moving.role == MoveRole::Destination);
        let (Some(moving), Some(parts)) = (arriving, self.vm(ticket.vm)) else {
            tracing::warn!(from, %ticket, "a stream of an attempt that is not under way");
            return;
        };
        match hello {
            proto::Hello::Memory { ticket, key, keep, elsewhere, neighbours } => {
                moving.recycling.is_wanted(keep, elsewhere);
                let others = crate::neighbours::here(self, &parts, &neighbours);
                crate::incoming::memory(&parts, ticket, key, others, stream);
            }
            proto::Hello::Drain { .. } => crate::drain::take(&parts, moving, stream),
            proto::Hello::Kept { key, .. } => crate::kept::tell(&parts, moving, CheckpointKey(key.0), stream),
            proto::Hello::Neighbours { seed, most, .. } => {
                resident::tell(self, &parts, moving, Question { seed, most }, stream);
            }
            proto::Hello::Mirror { ticket, volume } => {
                crate::incoming::disk(&parts, ticket, volume, stream, Comes::Before)
            }
            proto::Hello::Tell { ticket, volume } => {
                crate::incoming::disk(&parts, ticket, volume, stream, Comes::After)
            }
            proto::Hello::Filler | proto::Hello::Precache { .. } | proto::Hello::Fetch { .. } => {}
        }
    }

    /// Changes the limit of a move.
    pub fn limit(&self, moving: &Moving, limit: Option<BitRate>) {
        moving.tracker.update(|p| p.limit = limit);
        let text = limit.map_or("the limit is lifted".into(), |limit| format!("the limit is {limit} from here on"));
        moving.note(godwit_api::progress::NoteKind::Decision, text);
        let peer = moving.peer.name.as_str();
        self.peers.limit(peer, self.limit_to(peer));
    }

    /// What may go to a peer in a second: the least that a move to it is limited to which is under way, or whose disks still follow it.
    pub(crate) fn limit_to(&self, peer: &str) -> Option<BitRate> {
        let of = |parts: &Arc<Parts>| {
            let file = parts.file();
            let lends = !file.lent.is_empty();
            match parts.moving() {
                Some(moving) if moving.role == MoveRole::Source && moving.peer.name.as_str() == peer => {
                    moving.tracker.get().limit.filter(|_| lends || !moving.tracker.ended())
                }
                Some(_) => None,
                None => file.order.filter(|order| lends && order.to.name.as_str() == peer)?.limit,
            }
        };
        self.vms().iter().filter_map(of).min()
    }
}

pub(crate) fn network(error: godwit_wire::WireError) -> ApiError {
    ApiError::new(Problem::Failed, error.to_string())
}
