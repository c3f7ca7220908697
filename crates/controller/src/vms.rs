//! VMs, their volumes and wires.
//!
//! Creation is recorded before a node hears of it, so that whatever a crash leaves behind is found and taken away
//! ([`sweep`]); deletion is recorded before it begins, and goes on until every node has forgotten the VM.

use crate::failpoint::{Point, reach};
use crate::record::{Life, MoveRecord, Step, VmRecord};
use crate::resolve::{contradicts, outrank};
use crate::rights::Caller;
use crate::spec::{self, Taken};
use crate::state::{Controller, HostRecord, conflict, invalid, missing, ready};
use crate::store::{Change, Counter, Kind};
use axum::Json;
use axum::extract::{Extension, Path, Query, State};
use futures_util::{StreamExt, stream};
use godwit_api::host::{GatewayPort, LocalVm, Ownership, PeerHost, RunState, StopVm};
use godwit_api::public::{Component, CreateVm, Vm, Volume, Wire};
use godwit_api::vm::{ComponentSpec, VmDefinition, WireDefinition};
use godwit_api::{ApiError, Name, Problem, done};
use godwit_units::{Bytes, Generation, Lineage, MoveId, VmId, VolumeId};
use serde::Deserialize;
use serde_json::Value;
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

type Answer<T> = Result<Json<T>, ApiError>;
type Shared = State<Arc<Controller>>;
/// What each host says of its VMs.
type Said = HashMap<Name, Result<Vec<LocalVm>, ApiError>>;

/// VMs whose hosts and gateways are told at a time who owns them.
const AT_ONCE: usize = 16;

/// VXLAN's network numbers have 24 bits.
pub(crate) const VNI_BITS: u32 = 0x00ff_ffff;

/// The host called `at`, or the first host of the site of that name whose node answers.
pub(crate) async fn place(c: &Controller, at: &Name) -> Result<HostRecord, ApiError> {
    if let Some(host) = c.store.read(Kind::Host, at)? {
        return Ok(host);
    }
    if c.store.get(Kind::Site, at.as_str())?.is_none() {
        return Err(missing("host", at).remedy("name a host or a site: `godwit host ls`, `godwit site ls`"));
    }
    let mut last = None;
    for host in c.hosts()?.into_iter().filter(|h| &h.site == at) {
        match c.node(&host).facts().await {
            Ok(_) => return Ok(host),
            Err(error) => last = Some(error),
        }
    }
    Err(last.unwrap_or_else(|| {
        conflict(format!("site `{at}` has no host")).remedy(format!("`godwit host add NAME --site {at} --api ADDR`"))
    }))
}

fn taken(c: &Controller) -> Result<Taken, ApiError> {
    let mut taken = Taken::default();
    for vm in c.vm_records()? {
        taken.macs.extend(vm.definition.spec.nics.into_iter().map(|nic| nic.mac));
        taken.volumes.extend(vm.definition.spec.disks.into_iter().map(|disk| disk.volume));
    }
    Ok(taken)
}

/// A wire's number; its low 24 bits, which number its tunnel, are never 0.
pub(crate) fn wire_number(c: &Controller) -> Result<u32, ApiError> {
    loop {
        let number = u32::try_from(c.store.next(Counter::Wire)?)
            .map_err(|_| ApiError::new(Problem::Failed, "all numbers for wires have been used"))?;
        if number & VNI_BITS != 0 {
            return Ok(number);
        }
    }
}

/// The gateways' hosts that `components` are on, as nodes have to know them.
async fn gateways(c: &Controller, components: &[Option<Component>]) -> Result<HashMap<Name, PeerHost>, ApiError> {
    let mut found = HashMap::new();
    for component in components.iter().flatten() {
        if let ComponentSpec::Gateway { host, .. } = &component.kind
            && !found.contains_key(host)
        {
            let facts = c.node_of(host)?.facts().await?;
            found.insert(host.clone(), PeerHost { name: host.clone(), link: facts.link, underlay: facts.underlay });
        }
    }
    Ok(found)
}

pub async fn create(State(c): Shared, Extension(who): Extension<Caller>, Json(new): Json<CreateVm>) -> Answer<Vm> {
    who.may_create(&new)?;
    let host = place(&c, &new.at).await?;
    let mut components: Vec<Option<Component>> = vec![];
    for nic in &new.spec.nics {
        components.push(match &nic.component {
            Some(name) => Some(c.store.read(Kind::Component, name)?.ok_or_else(|| missing("component", name))?),
            None => None,
        });
    }
    let gateways = gateways(&c, &components).await?;
    let (mut record, in_hand) = reserve(&c, new, who.domain().cloned(), &host, components, &gateways)?;
    // Goes on when whoever asked hangs up: half a VM is nobody's wish.
    let task = tokio::spawn(async move {
        let _in_hand = in_hand;
        reach(Point::VmReserved, record.definition.id).await;
        match build(&c, &mut record, &host).await {
            Ok(()) => {}
            Err(error) => {
                record.life = Life::Deleting;
                c.put_vm(&record)?;
                if let Err(left) = dismantle(&c, &record).await {
                    tracing::warn!(vm = %record.definition.name, error = %left, "what was created is still there; trying again later");
                }
                return Err(error);
            }
        }
        reach(Point::VmReady, record.definition.id).await;
        if record.start_due {
            let started = c.node(&host).start(record.definition.id).await;
            // Whoever asked hears that it failed; it is not tried behind their back.
            started_or_refused(&c, &record)?;
            started.map_err(|mut error| {
                error.message =
                    format!("`{}` is created, but does not start: {}", record.definition.name, error.message);
                error
            })?;
        }
        let local = c.node(&host).vm(record.definition.id).await.ok();
        let open = open_move(&c, record.definition.id)?.map(|mv| mv.id());
        Ok(Json(shown(&c, &record, open, local.as_ref())?))
    });
    task.await.map_err(|e| ApiError::new(Problem::Failed, format!("the creation broke off: {e}")))?
}

/// Checks the description and gives out its numbers, durably, with nobody in between.
fn reserve(
    c: &Arc<Controller>,
    new: CreateVm,
    domain: Option<Name>,
    host: &HostRecord,
    components: Vec<Option<Component>>,
    gateways: &HashMap<Name, PeerHost>,
) -> Result<(VmRecord, crate::state::InHand), ApiError> {
    let _deciding = c.decide();
    let CreateVm { name, spec, start, .. } = new;
    if c.vm_records()?.iter().any(|vm| vm.definition.name == name) {
        return Err(conflict(format!("there is a VM `{name}` already")));
    }
    crate::components::check_name(c, &name)?;
    c.host(&host.name)?;
    let spec = spec::check(spec, &taken(c)?)?;
    let id = VmId(c.store.next(Counter::Vm)?);
    let mut wires = vec![];
    for component in components {
        let Some(component) = component else {
            wires.push(WireDefinition { id: wire_number(c)?, component: None, gateway: None });
            continue;
        };
        // It may have been deleted since it was looked up.
        if c.store.get(Kind::Component, component.name.as_str())?.is_none() {
            return Err(missing("component", &component.name));
        }
        let (component, gateway) = match component.kind {
            ComponentSpec::Gateway { host, bridge, .. } => {
                let gateway = gateways.get(&host).cloned();
                (ComponentSpec::Gateway { host, bridge, underlay: gateway.as_ref().map(|g| g.underlay) }, gateway)
            }
            switch @ ComponentSpec::Switch { .. } => (switch, None),
        };
        wires.push(WireDefinition { id: wire_number(c)?, component: Some(component), gateway });
    }
    let mut changes = vec![];
    let mut volumes = vec![];
    for disk in &spec.disks {
        let id = VolumeId(c.store.next(Counter::Volume)?);
        volumes.push(id);
        let replicas = vec![host.name.clone()];
        let volume = Volume { id, name: disk.volume.clone(), size: disk.size, vm: name.clone(), replicas };
        changes.push(Change::put(Kind::Volume, id.0, &volume));
    }
    let definition = VmDefinition { id, name, spec, volumes, wires, boot_files: vec![], domain: domain.clone() };
    let record = VmRecord {
        definition,
        host: host.name.clone(),
        lineage: Lineage::FIRST,
        generation: Generation::FIRST,
        life: Life::Creating,
        gateways_due: false,
        start_due: start,
        domain,
        promoted: None,
    };
    changes.push(Change::put(Kind::Vm, id.0, &record));
    let in_hand = c.take_in_hand(id);
    c.store.commit(&changes)?;
    Ok((record, in_hand))
}

/// Makes the VM at its host and its wires' other ends, and says that it is ready.
async fn build(c: &Controller, record: &mut VmRecord, host: &HostRecord) -> Result<(), ApiError> {
    let local = c.node(host).define(&record.definition).await?;
    record.definition = local.definition;
    record.lineage = local.lineage;
    record.generation = local.generation;
    reach(Point::VmDefined, record.definition.id).await;
    point_gateways(c, record).await?;
    reach(Point::VmWired, record.definition.id).await;
    record.life = Life::Ready;
    c.put_vm(record)
}

/// The start that was part of a creation is not owed any more.
fn started_or_refused(c: &Controller, record: &VmRecord) -> Result<(), ApiError> {
    let _deciding = c.decide();
    match c.store.read::<VmRecord>(Kind::Vm, record.definition.id.0)? {
        Some(now) if now.start_due => c.put_vm(&VmRecord { start_due: false, ..now }),
        _ => Ok(()),
    }
}

/// Tells every gateway that the VM is wired to where the VM is; one that fails does not keep the others from hearing. May be
/// repeated: gateways ignore an older owner.
async fn point_gateways(c: &Controller, record: &VmRecord) -> Result<(), ApiError> {
    let is_tunnel = |wire: &WireDefinition| matches!(wire.component, Some(ComponentSpec::Gateway { .. }));
    if !record.definition.wires.iter().any(is_tunnel) {
        return Ok(());
    }
    let remote = c.node_of(&record.host)?.facts().await?.underlay;
    let mut outcome = Ok(());
    for (wire, nic) in record.definition.wires.iter().zip(&record.definition.spec.nics) {
        let Some(ComponentSpec::Gateway { host: gateway, bridge, .. }) = &wire.component else { continue };
        let (lineage, generation) = (record.lineage, record.generation);
        let mtu = nic.mtu();
        let (bridge, host, vni) = (bridge.clone(), Some(record.host.clone()), wire.id & VNI_BITS);
        let port = GatewayPort { bridge, remote, host, vni, mtu, lineage, generation };
        if let Err(error) = c.node_of(gateway)?.attach(wire.id, &port).await {
            outcome = Err(error);
        }
    }
    outcome
}

/// Takes the VM away everywhere, then its records. May be repeated.
async fn dismantle(c: &Controller, record: &VmRecord) -> Result<(), ApiError> {
    let gone = |answer: Result<(), ApiError>| match answer {
        Err(error) if error.problem != Problem::NotFound => Err(error),
        _ => Ok(()),
    };
    let id = record.definition.id;
    reach(Point::VmDeleting, id).await;
    let mut holders = BTreeSet::from([record.host.clone()]);
    let mut changes = vec![Change::remove(Kind::Vm, id.0)];
    for volume in &record.definition.volumes {
        let known: Option<Volume> = c.store.read(Kind::Volume, volume.0)?;
        holders.extend(known.into_iter().flat_map(|v| v.replicas));
        changes.push(Change::remove(Kind::Volume, volume.0));
    }
    // Where a move was to bring it, and did not, there may be half a copy.
    for mv in c.store.read_all::<MoveRecord>(Kind::Move)?.into_iter().filter(|mv| mv.order.vm == id) {
        holders.extend([mv.from, mv.order.to.name]);
    }
    // One that is away does not keep the others from hearing; the record stays until all have.
    let mut outcome = Ok(());
    for wire in &record.definition.wires {
        if let Some(ComponentSpec::Gateway { host, .. }) = &wire.component {
            outcome = outcome.and(gone(c.node_of(host)?.detach(wire.id).await));
        }
    }
    reach(Point::VmUnwired, id).await;
    for holder in holders {
        // A host that was removed took its replicas with it.
        if let Some(host) = c.store.read::<HostRecord>(Kind::Host, &holder)? {
            outcome = outcome.and(gone(c.node(&host).remove(id).await));
        }
    }
    outcome?;
    reach(Point::VmGone, id).await;
    Ok(c.store.commit(&changes)?)
}

/// Goes on with what a request, or a controller before this one, has left half done.
pub async fn sweep(c: &Arc<Controller>) -> Result<(), ApiError> {
    for listed in c.vm_records()? {
        let id = listed.definition.id;
        // Since it was listed much may have happened: a host that is away has been waited for.
        if listed.life == Life::Ready {
            let now = c.store.read::<VmRecord>(Kind::Vm, id.0)?;
            let Some(record) = now.filter(|now| now.life == Life::Ready && !c.is_in_hand(id)) else { continue };
            if record.gateways_due {
                tell_gateways(c, &record).await;
            }
            if record.start_due {
                start_what_is_due(c, &record).await?;
            }
            continue;
        }
        // A request that has it in hand sees to it.
        let Ok(_in_hand) = c.take_alone(id, &listed.definition.name) else { continue };
        let Some(record) = half_made(c, id)? else { continue };
        if let Err(error) = dismantle(c, &record).await {
            tracing::warn!(vm = %record.definition.name, %error, "cannot delete it yet; trying again later");
        }
    }
    Ok(())
}

/// A VM that is to go, which this sweep has in hand: one whose creation was cut off goes, too.
fn half_made(c: &Controller, id: VmId) -> Result<Option<VmRecord>, ApiError> {
    let _deciding = c.decide();
    let now = c.store.read::<VmRecord>(Kind::Vm, id.0)?.filter(|now| now.life != Life::Ready);
    let Some(mut record) = now else { return Ok(None) };
    if record.life == Life::Creating {
        tracing::warn!(vm = %record.definition.name, "its creation was cut off; taking it back");
        record.life = Life::Deleting;
        c.put_vm(&record)?;
    }
    Ok(Some(record))
}

/// A controller died between making it and starting it.
async fn start_what_is_due(c: &Controller, record: &VmRecord) -> Result<(), ApiError> {
    match c.node_of(&record.host)?.start(record.definition.id).await {
        Err(error) if error.problem == Problem::Unreachable => {
            tracing::warn!(vm = %record.definition.name, %error, "cannot be started yet; trying again later");
            Ok(())
        }
        answer => {
            if let Err(error) = answer {
                tracing::warn!(vm = %record.definition.name, %error, "does not start; left off");
            }
            started_or_refused(c, record)
        }
    }
}

/// The move of the VM that has not ended, if there is one.
///
/// # Errors
/// The store's.
pub fn open_move(c: &Controller, vm: VmId) -> Result<Option<MoveRecord>, ApiError> {
    let moves: Vec<MoveRecord> = c.store.read_all(Kind::Move)?;
    Ok(moves.into_iter().find(|m| m.order.vm == vm && m.step != Step::Ended && !m.superseded))
}

pub async fn remove(State(c): Shared, Path(name): Path<Name>) -> Answer<Value> {
    let record = c.vm_record(&name)?;
    let id = record.definition.id;
    match c.node_of(&record.host)?.vm(id).await {
        Ok(local) if local.run != RunState::Off => {
            return Err(conflict(format!("`{name}` is not off")).remedy(format!("`godwit vm stop {name}` first")));
        }
        Err(error) if error.problem != Problem::NotFound => return Err(error),
        _ => {}
    }
    let (record, in_hand) = {
        let _deciding = c.decide();
        let mut record = c.vm_record(&name)?;
        crate::wires::refuse_removal(&c, &name)?;
        let in_hand = c.take_alone(id, &name)?;
        crate::moves::supersede(&c, id)?;
        if let Some(mv) = open_move(&c, id)? {
            return Err(conflict(format!("`{name}` is being moved (move {})", mv.id().0))
                .remedy(format!("wait for its end, or `godwit move {name} --cancel`")));
        }
        record.life = Life::Deleting;
        c.put_vm(&record)?;
        (record, in_hand)
    };
    let task = tokio::spawn(async move {
        let _in_hand = in_hand;
        dismantle(&c, &record).await
    });
    task.await.map_err(|e| ApiError::new(Problem::Failed, format!("the deletion broke off: {e}")))??;
    Ok(done())
}

pub async fn start(State(c): Shared, Path(name): Path<Name>) -> Answer<Value> {
    let record = c.vm_record(&name)?;
    let id = record.definition.id;
    // One order, nothing of which is stored: who has no answer asks again, and a VM that runs already is left as it is.
    reach(Point::VmStarting, id).await;
    c.node_of(&record.host)?.start(id).await?;
    reach(Point::VmStarted, id).await;
    Ok(done())
}

pub async fn stop(State(c): Shared, Path(name): Path<Name>, Json(how): Json<StopVm>) -> Answer<Value> {
    let known = c.vm_called(&name)?;
    // One that runs after all, and is being deleted: its deletion waits for this.
    let record = if known.life == Life::Deleting { known } else { ready(known)? };
    c.node_of(&record.host)?.stop(record.definition.id, how).await?;
    Ok(done())
}

/// Where to ask.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct At {
    at: Option<Name>,
}

pub async fn monitor(
    State(c): Shared,
    Path(name): Path<Name>,
    Query(At { at }): Query<At>,
    Json(command): Json<Value>,
) -> Answer<Value> {
    if !command.get("execute").is_some_and(Value::is_string) {
        return Err(invalid("this is no QMP command")
            .remedy(r#"write {"execute": "query-status"}, with `arguments` if it has any"#));
    }
    let record = c.vm_record(&name)?;
    let host = at.unwrap_or(record.host);
    Ok(Json(c.node_of(&host)?.monitor(record.definition.id, &command).await?))
}

/// A VM as people see it, with what its host says.
fn shown(c: &Controller, record: &VmRecord, open: Option<MoveId>, local: Option<&LocalVm>) -> Result<Vm, ApiError> {
    let host: Option<HostRecord> = c.store.read(Kind::Host, &record.host)?;
    Ok(Vm {
        id: record.definition.id,
        name: record.definition.name.clone(),
        host: record.host.clone(),
        site: host.map_or_else(|| record.host.clone(), |h| h.site),
        spec: record.definition.spec.clone(),
        run: local.map(|l| l.run),
        ownership: local.map(|l| l.ownership),
        lineage: local.map_or(record.lineage, |l| l.lineage),
        generation: local.map_or(record.generation, |l| l.generation),
        mv: open.or(local.and_then(|l| l.mv)),
        absent: local.map_or(Bytes(0), |l| l.absent),
        holders: local.map_or(vec![], |l| l.holders.clone()),
    })
}

pub async fn list(State(c): Shared, Extension(who): Extension<Caller>) -> Answer<Vec<Vm>> {
    let records: Vec<VmRecord> = c.vm_records()?.into_iter().filter(|vm| who.sees(vm)).collect();
    let with_vms: BTreeSet<&Name> = records.iter().map(|vm| &vm.host).collect();
    let hosts = c.hosts()?.into_iter().filter(|h| with_vms.contains(&h.name)).collect();
    let said = c.look_at(hosts).await;
    let of = |record: &VmRecord| {
        let locals = said.get(&record.host)?.as_ref().ok()?;
        locals.iter().find(|l| l.definition.id == record.definition.id)
    };
    let moves = c.open_moves()?.into_iter().filter(|mv| !mv.superseded);
    let open: HashMap<VmId, MoveId> = moves.map(|mv| (mv.order.vm, mv.id())).collect();
    let one = |record: &VmRecord| shown(&c, record, open.get(&record.definition.id).copied(), of(record));
    let vms: Result<Vec<Vm>, ApiError> = records.iter().map(one).collect();
    Ok(Json(vms?))
}

pub async fn show(State(c): Shared, Path(name): Path<Name>) -> Answer<Vm> {
    let record = c.vm_called(&name)?;
    let local = match c.node_of(&record.host) {
        Ok(node) => node.vm(record.definition.id).await.ok(),
        Err(_) => None,
    };
    let open = open_move(&c, record.definition.id)?.map(|mv| mv.id());
    Ok(Json(shown(&c, &record, open, local.as_ref())?))
}

pub async fn volumes(State(c): Shared, Extension(who): Extension<Caller>) -> Answer<Vec<Volume>> {
    let mut volumes: Vec<Volume> = c.store.read_all(Kind::Volume)?;
    if who.domain().is_some() {
        let theirs = c.vm_records()?.into_iter().filter(|vm| who.sees(vm));
        let theirs: BTreeSet<VolumeId> = theirs.flat_map(|vm| vm.definition.volumes).collect();
        volumes.retain(|volume| theirs.contains(&volume.id));
    }
    volumes.sort_by_key(|v| v.id);
    Ok(Json(volumes))
}

pub async fn wires(State(c): Shared, Extension(who): Extension<Caller>) -> Answer<Vec<Wire>> {
    let mut wires = vec![];
    for vm in c.vm_records()?.into_iter().filter(|vm| who.sees(vm)) {
        for (nic, (wire, spec)) in (0..).zip(vm.definition.wires.iter().zip(&vm.definition.spec.nics)) {
            let Some(component) = spec.component.clone() else { continue };
            let host = vm.host.clone();
            wires.push(Wire { id: wire.id, vm: vm.definition.name.clone(), nic, component, host });
        }
    }
    wires.sort_by_key(|w| w.id);
    Ok(Json(wires))
}

/// The VM's owner is `host` now: its record and its volumes say so, then its gateways. Safe to repeat, and ignored when a
/// newer owner is known. A gateway that cannot be told now is told later ([`sweep`]): the nodes tell it at the grant, too,
/// so this is the second time, and no reason to keep a move open.
pub async fn settle(c: &Controller, id: VmId, host: &Name, owner: (Lineage, Generation)) -> Result<(), ApiError> {
    let record = {
        let _deciding = c.decide();
        let Some(mut record) = c.store.read::<VmRecord>(Kind::Vm, id.0)? else { return Ok(()) };
        if owner < (record.lineage, record.generation) {
            return Ok(());
        }
        (record.lineage, record.generation) = owner;
        record.host = host.clone();
        record.gateways_due = true;
        let mut changes = vec![Change::put(Kind::Vm, id.0, &record)];
        for number in &record.definition.volumes {
            if let Some(mut volume) = c.store.read::<Volume>(Kind::Volume, number.0)? {
                volume.replicas.retain(|holder| holder != host);
                volume.replicas.insert(0, host.clone());
                changes.push(Change::put(Kind::Volume, number.0, &volume));
            }
        }
        c.store.commit(&changes)?;
        record
    };
    reach(Point::SagaSettled, id).await;
    tell_gateways(c, &record).await;
    Ok(())
}

/// A VM may have been given more CPUs when it arrived.
///
/// # Errors
/// The store's.
pub fn learn_vcpus(c: &Controller, id: VmId, vcpus: u32) -> Result<(), ApiError> {
    let _deciding = c.decide();
    let Some(mut record) = c.store.read::<VmRecord>(Kind::Vm, id.0)? else { return Ok(()) };
    if record.definition.spec.vcpus == vcpus {
        return Ok(());
    }
    record.definition.spec.vcpus = vcpus;
    c.put_vm(&record)
}

/// Points the gateways at the VM's owner, and notes that this was done unless the owner has changed meanwhile.
async fn tell_gateways(c: &Controller, told: &VmRecord) {
    let noted = match point_gateways(c, told).await {
        Err(error) => Err(error),
        Ok(()) => {
            let _deciding = c.decide();
            match c.store.read::<VmRecord>(Kind::Vm, told.definition.id.0) {
                Ok(Some(mut now)) if (now.lineage, now.generation) == (told.lineage, told.generation) => {
                    now.gateways_due = false;
                    c.put_vm(&now)
                }
                other => other.map(|_| ()).map_err(ApiError::from),
            }
        }
    };
    if let Err(error) = noted {
        tracing::warn!(vm = %told.definition.name, %error, "not all its gateways could be told where it is; trying again later");
    }
}

/// Asks all hosts where the VMs are: their records are the truth, ours a copy. One VM whose gateway or host does not answer keeps no other
/// waiting.
pub async fn refresh(c: &Arc<Controller>) -> Result<(), ApiError> {
    let said = c.look_at(c.hosts()?).await;
    let ready = c.vm_records()?.into_iter().filter(|r| r.life == Life::Ready);
    let learnt = stream::iter(ready).map(|record| learn_owner(c, record, &said)).buffer_unordered(AT_ONCE);
    learnt.fold(Ok(()), async |all, one| Result::and(all, one)).await
}

/// What the hosts say of one VM.
async fn learn_owner(c: &Controller, record: VmRecord, said: &Said) -> Result<(), ApiError> {
    let id = record.definition.id;
    let known = (record.lineage, record.generation);
    let owner = said
        .iter()
        .filter_map(|(host, vms)| {
            let vm = vms.as_ref().ok()?.iter().find(|vm| vm.definition.id == id)?;
            (vm.ownership == Ownership::Here).then_some(((vm.lineage, vm.generation), host))
        })
        .max();
    let lineage = owner.as_ref().map_or(known.0, |(owner, _)| known.0.max(owner.0));
    for (host, vms) in said {
        let there = vms.as_ref().ok().and_then(|vms| vms.iter().find(|vm| vm.definition.id == id));
        if there.is_some_and(|vm| contradicts(vm.ownership, vm.lineage, lineage)) {
            outrank(c, id, host, lineage).await;
        }
    }
    if let Some((owner, host)) = owner
        && (owner > known || (owner == known && host != &record.host))
    {
        tracing::info!(vm = %record.definition.name, %host, "its owner is another than was known");
        settle(c, id, host, owner).await?;
    }
    Ok(())
}
