//! The two APIs as methods: what the tables of [`host`](crate::host) and [`public`](crate::public) list.

#![allow(clippy::missing_errors_doc, reason = "each fails as the server says, or as unreachable; see `Client`")]

use crate::capture::{Capture, CaptureHere, CaptureWire, HostCapture};
use crate::client::Client;
use crate::component::{
    ApplyConfig, ClaimComponent, ClaimOrder, ComponentDefinition, ComponentObject, ComponentOrder, CreateComponent,
    LocalComponent, MoveComponent,
};
use crate::evacuation::{Activity, Evacuation, PlanEvacuation};
use crate::extender::{ConnectExtender, DisconnectExtender, Extender, ExtenderOrders, LocalExtenders};
use crate::host::{
    CheckReport, CheckVm, ClaimVm, GatewayPort, HostFacts, LocalMove, LocalVm, MoveOrder, OutrankVm, Packs,
    PlaceVolume, SetLimit, StopVm,
};
use crate::image::{CopyImage, ImageCopy, ImageOrder};
use crate::network::{HostFinding, NetFinding};
use crate::orphan::{JudgedOrphan, Orphan};
use crate::precache::{LocalPrecache, Precache, PrecacheOrder, StartPrecache};
use crate::predict::{AskPath, MovePrediction, PathFacts, WantedPrediction};
use crate::profile::{Profile, ProfileLog, StartProfile};
use crate::promote::{LocalPromotion, PromoteVm, PromoteVolume, Promoted};
use crate::public::{
    AddHost, Component, CreateVm, DryRun, Host, Move, MoveTogether, ResolveMove, Site, StartMove, Vm, Volume, Wire,
};
use crate::verify::{Verified, VerifyOrder, VerifyVolume};
use crate::vm::VmDefinition;
use crate::wire::{ConnectWire, LocalWire, PortWire, Rewire, WireOrder};
use crate::{ApiError, Name, Problem};
use godwit_trust::{Credentials, Identity};
use godwit_units::{MoveId, VmId, VolumeId};
use serde::de::IgnoredAny;
use serde_json::Value;
use std::time::{Duration, Instant};

/// For questions that a server answers from memory.
pub const QUICK: Duration = Duration::from_secs(5);

/// For orders that wait for QEMU, the kernel or the other host's checks.
pub const ORDER: Duration = Duration::from_secs(60);

/// For orders that copy a disk in, or wait for a guest to shut down.
pub const LONG: Duration = Duration::from_secs(1800);

/// For a VM with the largest of disks from an image.
const CREATION: Duration = Duration::from_secs(24 * 3600);

type Result<T> = std::result::Result<T, ApiError>;

/// A node, as the controller asks it.
#[derive(Clone, Debug)]
pub struct HostClient(Client);

impl HostClient {
    /// For the node `expected` at `address`.
    pub fn new(address: impl ToString, expected: Identity, credentials: &Credentials) -> Self {
        Self(Client::new(address, expected, credentials, QUICK))
    }

    pub(crate) const fn client(&self) -> &Client {
        &self.0
    }

    /// `GET /v1/host`.
    pub async fn facts(&self) -> Result<HostFacts> {
        self.0.get("/v1/host").await
    }

    /// `GET /v1/vms`.
    pub async fn vms(&self) -> Result<Vec<LocalVm>> {
        self.0.get("/v1/vms").await
    }

    /// `GET /v1/vms/{id}`.
    pub async fn vm(&self, id: VmId) -> Result<LocalVm> {
        self.0.get(&format!("/v1/vms/{}", id.0)).await
    }

    /// `PUT /v1/vms/{id}`: creates volumes and endpoints. A large image on a slow disk may take longer than one request: the node goes on
    /// when nobody waits any more, and the same order again waits for that.
    pub async fn define(&self, definition: &VmDefinition) -> Result<LocalVm> {
        let (client, began) = (self.0.within(LONG), Instant::now());
        loop {
            let asked = Instant::now();
            match client.put(&format!("/v1/vms/{}", definition.id.0), definition).await {
                Err(error)
                    if error.problem == Problem::Unreachable
                        && asked.elapsed() >= LONG
                        && began.elapsed() < CREATION => {}
                answer => return answer,
            }
        }
    }

    /// `DELETE /v1/vms/{id}`.
    pub async fn remove(&self, id: VmId) -> Result<()> {
        self.0.within(ORDER).delete::<IgnoredAny>(&format!("/v1/vms/{}", id.0)).await.map(drop)
    }

    /// `POST /v1/vms/{id}/start`.
    pub async fn start(&self, id: VmId) -> Result<()> {
        self.0.within(ORDER).post::<IgnoredAny>(&format!("/v1/vms/{}/start", id.0), &nothing()).await.map(drop)
    }

    /// `POST /v1/vms/{id}/stop`.
    pub async fn stop(&self, id: VmId, how: StopVm) -> Result<()> {
        self.0.within(LONG).post::<IgnoredAny>(&format!("/v1/vms/{}/stop", id.0), &how).await.map(drop)
    }

    /// `POST /v1/vms/{id}/monitor`: any QMP command.
    pub async fn monitor(&self, id: VmId, command: &Value) -> Result<Value> {
        self.0.within(ORDER).post(&format!("/v1/vms/{}/monitor", id.0), command).await
    }

    /// `GET /v1/vms/{id}/departure`.
    pub async fn departure(&self, id: VmId) -> Result<CheckReport> {
        self.0.within(ORDER).get(&format!("/v1/vms/{}/departure", id.0)).await
    }

    /// `GET /v1/vms/{id}/packs`.
    pub async fn packs(&self, id: VmId) -> Result<Packs> {
        self.0.within(ORDER).get(&format!("/v1/vms/{}/packs", id.0)).await
    }

    /// `POST /v1/check`.
    pub async fn check(&self, check: &CheckVm) -> Result<CheckReport> {
        self.0.within(ORDER).post("/v1/check", check).await
    }

    /// `POST /v1/moves`. May be sent again with the same number.
    pub async fn begin(&self, order: &MoveOrder) -> Result<LocalMove> {
        self.0.within(ORDER).post("/v1/moves", order).await
    }

    /// `GET /v1/moves/{id}`.
    pub async fn mv(&self, id: MoveId) -> Result<LocalMove> {
        self.0.get(&format!("/v1/moves/{}", id.0)).await
    }

    /// `POST /v1/moves/{id}/cancel`.
    pub async fn cancel(&self, id: MoveId) -> Result<LocalMove> {
        self.0.post(&format!("/v1/moves/{}/cancel", id.0), &nothing()).await
    }

    /// `POST /v1/moves/{id}/limit`.
    pub async fn limit(&self, id: MoveId, limit: SetLimit) -> Result<LocalMove> {
        self.0.post(&format!("/v1/moves/{}/limit", id.0), &limit).await
    }

    /// `POST /v1/wires/{wire}/capture`: takes as long as it records.
    pub async fn capture_wire(&self, wire: u32, asked: &CaptureHere) -> Result<Capture> {
        let patience = ORDER + Duration::from_millis(asked.for_ms);
        self.0.within(patience).post(&format!("/v1/wires/{wire}/capture"), asked).await
    }

    /// `GET /v1/network`.
    pub async fn network(&self) -> Result<Vec<NetFinding>> {
        self.0.get("/v1/network").await
    }

    /// `GET /v1/orphans`.
    pub async fn orphans(&self) -> Result<Vec<Orphan>> {
        self.0.get("/v1/orphans").await
    }

    /// `DELETE /v1/orphans/{id}`.
    pub async fn remove_orphan(&self, id: &str) -> Result<()> {
        self.0.within(ORDER).delete::<IgnoredAny>(&format!("/v1/orphans/{id}")).await.map(drop)
    }

    /// `POST /v1/vms/{id}/claim`.
    pub async fn claim(&self, id: VmId, claim: &ClaimVm) -> Result<()> {
        self.0.within(ORDER).post::<IgnoredAny>(&format!("/v1/vms/{}/claim", id.0), claim).await.map(drop)
    }

    /// `POST /v1/vms/{id}/promote`.
    pub async fn promote(&self, order: &PromoteVm) -> Result<LocalPromotion> {
        self.0.within(ORDER).post(&format!("/v1/vms/{}/promote", order.definition.id.0), order).await
    }

    /// `POST /v1/vms/{id}/outrank`.
    pub async fn outrank(&self, id: VmId, by: OutrankVm) -> Result<()> {
        self.0.within(ORDER).post::<IgnoredAny>(&format!("/v1/vms/{}/outrank", id.0), &by).await.map(drop)
    }

    /// `POST /v1/moves/{id}/stop`: ends pre-copy at the next round.
    pub async fn stop_precopy(&self, id: MoveId) -> Result<LocalMove> {
        self.0.post(&format!("/v1/moves/{}/stop", id.0), &nothing()).await
    }

    /// `PUT /v1/precaches`: all pre-caches of this node's volumes.
    pub async fn precache(&self, all: &[PrecacheOrder]) -> Result<Vec<LocalPrecache>> {
        self.0.put("/v1/precaches", &all).await
    }

    /// `POST /v1/volumes/{id}/verify`.
    pub async fn verify(&self, order: &VerifyOrder) -> Result<Verified> {
        self.0.within(ORDER).post(&format!("/v1/volumes/{}/verify", order.volume.0), order).await
    }

    /// `PUT /v1/volumes/{id}/place`. A large device takes longer than this waits: to be sent again then.
    pub async fn place(&self, order: &PlaceVolume) -> Result<()> {
        let path = format!("/v1/volumes/{}/place", order.volume.0);
        self.0.within(ORDER).put::<IgnoredAny>(&path, order).await.map(drop)
    }

    /// `POST /v1/volumes/{id}/image`.
    pub async fn copy_image(&self, order: &ImageOrder) -> Result<ImageCopy> {
        self.0.within(ORDER).post(&format!("/v1/volumes/{}/image", order.volume.0), order).await
    }

    /// `GET /v1/volumes/{id}/image`.
    pub async fn image(&self, volume: VolumeId) -> Result<ImageCopy> {
        self.0.get(&format!("/v1/volumes/{}/image", volume.0)).await
    }

    /// `DELETE /v1/volumes/{id}/image`.
    pub async fn end_image(&self, volume: VolumeId) -> Result<ImageCopy> {
        self.0.within(ORDER).delete(&format!("/v1/volumes/{}/image", volume.0)).await
    }

    /// `POST /v1/path`.
    pub async fn path(&self, asked: &AskPath) -> Result<PathFacts> {
        self.0.post("/v1/path", asked).await
    }

    /// `GET /v1/activity`: what it knows of all its VMs' guests, at such a time of day.
    pub async fn activity(&self, at_unix_s: u64) -> Result<Vec<Activity>> {
        self.0.within(ORDER).get(&format!("/v1/activity?at_unix_s={at_unix_s}")).await
    }

    /// `POST /v1/vms/{id}/profiles`.
    pub async fn start_profile(&self, id: VmId, wanted: StartProfile) -> Result<Profile> {
        self.0.within(ORDER).post(&format!("/v1/vms/{}/profiles", id.0), &wanted).await
    }

    /// `GET /v1/vms/{id}/profiles`.
    pub async fn profiles(&self, id: VmId) -> Result<Vec<Profile>> {
        self.0.get(&format!("/v1/vms/{}/profiles", id.0)).await
    }

    /// `GET /v1/vms/{id}/profiles/{start}`.
    pub async fn profile_log(&self, id: VmId, start: u64) -> Result<ProfileLog> {
        self.0.within(ORDER).get(&format!("/v1/vms/{}/profiles/{start}", id.0)).await
    }

    /// `GET /v1/components`.
    pub async fn components(&self) -> Result<Vec<LocalComponent>> {
        self.0.get("/v1/components").await
    }

    /// `GET /v1/components/{id}`.
    pub async fn component(&self, id: VmId) -> Result<LocalComponent> {
        self.0.get(&format!("/v1/components/{}", id.0)).await
    }

    /// `PUT /v1/components/{id}`: makes it, or gives it another file.
    pub async fn define_component(&self, definition: &ComponentDefinition) -> Result<LocalComponent> {
        self.0.within(ORDER).put(&format!("/v1/components/{}", definition.id.0), definition).await
    }

    /// `DELETE /v1/components/{id}`.
    pub async fn remove_component(&self, id: VmId) -> Result<()> {
        self.0.within(ORDER).delete::<IgnoredAny>(&format!("/v1/components/{}", id.0)).await.map(drop)
    }

    /// `POST /v1/components/{id}/move`. May be sent again with the same number.
    pub async fn move_component(&self, id: VmId, order: &ComponentOrder) -> Result<LocalComponent> {
        self.0.within(ORDER).post(&format!("/v1/components/{}/move", id.0), order).await
    }

    /// `POST /v1/components/{id}/claim`. May be sent again.
    pub async fn claim_component(&self, order: &ClaimOrder) -> Result<LocalComponent> {
        self.0.within(ORDER).post(&format!("/v1/components/{}/claim", order.definition.id.0), order).await
    }

    /// `POST /v1/components/{id}/outrank`.
    pub async fn outrank_component(&self, id: VmId, by: OutrankVm) -> Result<()> {
        self.0.within(ORDER).post::<IgnoredAny>(&format!("/v1/components/{}/outrank", id.0), &by).await.map(drop)
    }

    /// `PUT /v1/wires/{wire}`.
    ///
    /// # Errors
    /// The node's, or that it cannot be reached.
    pub async fn connect(&self, order: &WireOrder) -> Result<LocalWire> {
        self.0.within(ORDER).put(&format!("/v1/wires/{}", order.id), order).await
    }

    /// `DELETE /v1/wires/{wire}`.
    ///
    /// # Errors
    /// The node's, or that it cannot be reached.
    pub async fn disconnect(&self, wire: u32) -> Result<()> {
        self.0.within(ORDER).delete::<IgnoredAny>(&format!("/v1/wires/{wire}")).await.map(drop)
    }

    /// `GET /v1/wires`: all wires between ports that it knows.
    ///
    /// # Errors
    /// The node's, or that it cannot be reached.
    pub async fn wires(&self) -> Result<Vec<LocalWire>> {
        self.0.get("/v1/wires").await
    }

    /// `GET /v1/wires/{wire}`.
    ///
    /// # Errors
    /// The node's, or that it cannot be reached.
    pub async fn wire(&self, wire: u32) -> Result<LocalWire> {
        self.0.get(&format!("/v1/wires/{wire}")).await
    }

    /// `PUT /v1/extenders`: all of this node's.
    pub async fn order_extenders(&self, all: &ExtenderOrders) -> Result<LocalExtenders> {
        self.0.within(ORDER).put("/v1/extenders", all).await
    }

    /// `PUT /v1/gateways/{wire}`.
    pub async fn attach(&self, wire: u32, port: &GatewayPort) -> Result<()> {
        self.0.within(ORDER).put::<IgnoredAny>(&format!("/v1/gateways/{wire}"), port).await.map(drop)
    }

    /// `DELETE /v1/gateways/{wire}`.
    pub async fn detach(&self, wire: u32) -> Result<()> {
        self.0.within(ORDER).delete::<IgnoredAny>(&format!("/v1/gateways/{wire}")).await.map(drop)
    }
}

/// The controller, as people ask it.
#[derive(Clone, Debug)]
pub struct PublicClient(pub(crate) Client);

impl PublicClient {
    /// For the controller `expected` at `address`.
    pub fn new(address: impl ToString, expected: Identity, credentials: &Credentials) -> Self {
        Self(Client::new(address, expected, credentials, ORDER))
    }

    pub(crate) const fn of(client: Client) -> Self {
        Self(client)
    }

    /// What asks for it: for requests that this one has no words for.
    #[must_use]
    pub const fn client(&self) -> &Client {
        &self.0
    }

    /// `GET /v1/sites`.
    pub async fn sites(&self) -> Result<Vec<Site>> {
        self.0.get("/v1/sites").await
    }

    /// `POST /v1/sites`.
    pub async fn add_site(&self, site: &Site) -> Result<Site> {
        self.0.post("/v1/sites", site).await
    }

    /// `DELETE /v1/sites/{site}`.
    pub async fn remove_site(&self, site: &Name) -> Result<()> {
        self.0.delete::<IgnoredAny>(&format!("/v1/sites/{site}")).await.map(drop)
    }

    /// `POST /v1/sites/{site}/evacuation-plan`.
    pub async fn plan_evacuation(&self, site: &Name, wanted: &PlanEvacuation) -> Result<Evacuation> {
        self.0.within(LONG).post(&format!("/v1/sites/{site}/evacuation-plan"), wanted).await
    }

    /// `GET /v1/hosts`.
    pub async fn hosts(&self) -> Result<Vec<Host>> {
        self.0.get("/v1/hosts").await
    }

    /// `POST /v1/hosts`.
    pub async fn add_host(&self, host: &AddHost) -> Result<Host> {
        self.0.post("/v1/hosts", host).await
    }

    /// `GET /v1/hosts/{host}`.
    pub async fn host(&self, host: &Name) -> Result<Host> {
        self.0.get(&format!("/v1/hosts/{host}")).await
    }

    /// `DELETE /v1/hosts/{host}`.
    pub async fn remove_host(&self, host: &Name) -> Result<()> {
        self.0.delete::<IgnoredAny>(&format!("/v1/hosts/{host}")).await.map(drop)
    }

    /// `GET /v1/components`.
    pub async fn components(&self) -> Result<Vec<Component>> {
        self.0.get("/v1/components").await
    }

    /// `POST /v1/components`.
    pub async fn add_component(&self, component: &Component) -> Result<Component> {
        self.0.post("/v1/components", component).await
    }

    /// `DELETE /v1/components/{component}`.
    pub async fn remove_component(&self, component: &Name) -> Result<()> {
        self.0.delete::<IgnoredAny>(&format!("/v1/components/{component}")).await.map(drop)
    }

    /// `GET /v1/components/objects`.
    pub async fn component_objects(&self) -> Result<Vec<ComponentObject>> {
        self.0.get("/v1/components/objects").await
    }

    /// `POST /v1/components/objects`.
    pub async fn create_component(&self, new: &CreateComponent) -> Result<ComponentObject> {
        self.0.post("/v1/components/objects", new).await
    }

    /// `GET /v1/components/objects/{component}`.
    pub async fn component_object(&self, component: &Name) -> Result<ComponentObject> {
        self.0.get(&format!("/v1/components/objects/{component}")).await
    }

    /// `DELETE /v1/components/objects/{component}`.
    pub async fn delete_component(&self, component: &Name) -> Result<()> {
        self.0.delete::<IgnoredAny>(&format!("/v1/components/objects/{component}")).await.map(drop)
    }

    /// `POST /v1/components/objects/{component}/config`.
    pub async fn apply_config(&self, component: &Name, config: &ApplyConfig) -> Result<ComponentObject> {
        self.0.post(&format!("/v1/components/objects/{component}/config"), config).await
    }

    /// `POST /v1/components/objects/{component}/move`.
    pub async fn move_component(&self, component: &Name, to: &MoveComponent) -> Result<ComponentObject> {
        self.0.post(&format!("/v1/components/objects/{component}/move"), to).await
    }

    /// `POST /v1/components/objects/{component}/claim`.
    pub async fn claim_component(&self, component: &Name, claim: &ClaimComponent) -> Result<ComponentObject> {
        self.0.within(ORDER).post(&format!("/v1/components/objects/{component}/claim"), claim).await
    }

    /// `GET /v1/vms`.
    pub async fn vms(&self) -> Result<Vec<Vm>> {
        self.0.get("/v1/vms").await
    }

    /// `POST /v1/vms`.
    pub async fn create_vm(&self, vm: &CreateVm) -> Result<Vm> {
        self.0.within(LONG).post("/v1/vms", vm).await
    }

    /// `GET /v1/vms/{vm}`.
    pub async fn vm(&self, vm: &Name) -> Result<Vm> {
        self.0.get(&format!("/v1/vms/{vm}")).await
    }

    /// `DELETE /v1/vms/{vm}`.
    pub async fn remove_vm(&self, vm: &Name) -> Result<()> {
        self.0.delete::<IgnoredAny>(&format!("/v1/vms/{vm}")).await.map(drop)
    }

    /// `POST /v1/vms/{vm}/start`.
    pub async fn start(&self, vm: &Name) -> Result<()> {
        self.0.post::<IgnoredAny>(&format!("/v1/vms/{vm}/start"), &nothing()).await.map(drop)
    }

    /// `POST /v1/vms/{vm}/stop`.
    pub async fn stop(&self, vm: &Name, how: StopVm) -> Result<()> {
        self.0.within(LONG).post::<IgnoredAny>(&format!("/v1/vms/{vm}/stop"), &how).await.map(drop)
    }

    /// `POST /v1/vms/{vm}/monitor`: any QMP command, at the VM's own host or at another that has something of it.
    pub async fn monitor(&self, vm: &Name, at: Option<&Name>, command: &Value) -> Result<Value> {
        let at = at.map_or(String::new(), |host| format!("?at={host}"));
        self.0.post(&format!("/v1/vms/{vm}/monitor{at}"), command).await
    }

    /// `GET /v1/vms/{vm}/prediction`, with what is wanted as its query.
    pub async fn predict(&self, vm: &Name, wanted: &WantedPrediction) -> Result<MovePrediction> {
        self.0.within(ORDER).get(&format!("/v1/vms/{vm}/prediction?{}", wanted.query())).await
    }

    /// `POST /v1/vms/{vm}/profiles`.
    pub async fn start_profile(&self, vm: &Name, wanted: StartProfile) -> Result<Profile> {
        self.0.post(&format!("/v1/vms/{vm}/profiles"), &wanted).await
    }

    /// `GET /v1/vms/{vm}/profiles`.
    pub async fn profiles(&self, vm: &Name) -> Result<Vec<Profile>> {
        self.0.get(&format!("/v1/vms/{vm}/profiles")).await
    }

    /// `GET /v1/vms/{vm}/profiles/{start}`.
    pub async fn profile_log(&self, vm: &Name, start: u64) -> Result<ProfileLog> {
        self.0.get(&format!("/v1/vms/{vm}/profiles/{start}")).await
    }

    /// `GET /v1/volumes`.
    pub async fn volumes(&self) -> Result<Vec<Volume>> {
        self.0.get("/v1/volumes").await
    }

    /// `POST /v1/volumes/{volume}/verify`: a slice.
    pub async fn verify(&self, volume: &Name, what: &VerifyVolume) -> Result<Verified> {
        self.0.within(LONG).post(&format!("/v1/volumes/{volume}/verify"), what).await
    }

    /// `POST /v1/volumes/{volume}/image`.
    pub async fn copy_image(&self, volume: &Name, copy: &CopyImage) -> Result<ImageCopy> {
        self.0.within(ORDER).post(&format!("/v1/volumes/{volume}/image"), copy).await
    }

    /// `GET /v1/volumes/{volume}/image`.
    pub async fn image(&self, volume: &Name) -> Result<ImageCopy> {
        self.0.get(&format!("/v1/volumes/{volume}/image")).await
    }

    /// `DELETE /v1/volumes/{volume}/image`.
    pub async fn end_image(&self, volume: &Name) -> Result<ImageCopy> {
        self.0.within(ORDER).delete(&format!("/v1/volumes/{volume}/image")).await
    }

    /// `POST /v1/volumes/{volume}/promote`.
    pub async fn promote(&self, volume: &Name, how: &PromoteVolume) -> Result<Promoted> {
        self.0.within(LONG).post(&format!("/v1/volumes/{volume}/promote"), how).await
    }

    /// `GET /v1/precaches`.
    pub async fn precaches(&self) -> Result<Vec<Precache>> {
        self.0.within(ORDER).get("/v1/precaches").await
    }

    /// `POST /v1/precaches`. Again with other values it changes them.
    pub async fn start_precache(&self, wanted: &StartPrecache) -> Result<Precache> {
        self.0.post("/v1/precaches", wanted).await
    }

    /// `DELETE /v1/precaches/{volume}/{to}`.
    pub async fn stop_precache(&self, volume: &Name, to: &Name) -> Result<()> {
        self.0.delete::<IgnoredAny>(&format!("/v1/precaches/{volume}/{to}")).await.map(drop)
    }

    /// `GET /v1/port-wires`.
    pub async fn port_wires(&self) -> Result<Vec<PortWire>> {
        self.0.get("/v1/port-wires").await
    }

    /// `GET /v1/port-wires/{wire}`.
    pub async fn port_wire(&self, wire: u32) -> Result<PortWire> {
        self.0.get(&format!("/v1/port-wires/{wire}")).await
    }

    /// `POST /v1/port-wires`.
    pub async fn connect_wire(&self, new: &ConnectWire) -> Result<PortWire> {
        self.0.within(ORDER).post("/v1/port-wires", new).await
    }

    /// `POST /v1/port-wires/rewire`. Gives the wires that were made, in their order.
    pub async fn rewire(&self, change: &Rewire) -> Result<Vec<PortWire>> {
        self.0.within(LONG).post("/v1/port-wires/rewire", change).await
    }

    /// `DELETE /v1/port-wires/{wire}`.
    pub async fn disconnect_wire(&self, wire: u32) -> Result<()> {
        self.0.within(ORDER).delete::<IgnoredAny>(&format!("/v1/port-wires/{wire}")).await.map(drop)
    }

    /// `GET /v1/extenders`.
    pub async fn extenders(&self) -> Result<Vec<Extender>> {
        self.0.within(ORDER).get("/v1/extenders").await
    }

    /// `POST /v1/extenders`.
    pub async fn connect_extender(&self, new: &ConnectExtender) -> Result<Extender> {
        self.0.within(ORDER).post("/v1/extenders", new).await
    }

    /// `GET /v1/extenders/{a}/{b}`.
    pub async fn extender(&self, a: &Name, b: &Name) -> Result<Extender> {
        self.0.within(ORDER).get(&format!("/v1/extenders/{a}/{b}")).await
    }

    /// `POST /v1/extenders/{a}/{b}/rotate`.
    pub async fn rotate_extender(&self, a: &Name, b: &Name) -> Result<Extender> {
        self.0.within(ORDER).post(&format!("/v1/extenders/{a}/{b}/rotate"), &nothing()).await
    }

    /// `POST /v1/extenders/{a}/{b}/disconnect`.
    pub async fn disconnect_extender(&self, a: &Name, b: &Name, how: DisconnectExtender) -> Result<()> {
        let path = format!("/v1/extenders/{a}/{b}/disconnect");
        self.0.within(ORDER).post::<IgnoredAny>(&path, &how).await.map(drop)
    }

    /// `GET /v1/wires`.
    pub async fn wires(&self) -> Result<Vec<Wire>> {
        self.0.get("/v1/wires").await
    }

    /// `POST /v1/moves`.
    pub async fn start_move(&self, order: &StartMove) -> Result<Move> {
        self.0.post("/v1/moves", &StartMove { dry_run: false, ..order.clone() }).await
    }

    /// `POST /v1/moves/together`.
    pub async fn move_together(&self, order: &MoveTogether) -> Result<Vec<Move>> {
        self.0.within(LONG).post("/v1/moves/together", &MoveTogether { dry_run: false, ..order.clone() }).await
    }

    /// `POST /v1/moves/together` with `dry_run`.
    pub async fn dry_run_together(&self, order: &MoveTogether) -> Result<Vec<DryRun>> {
        self.0.within(LONG).post("/v1/moves/together", &MoveTogether { dry_run: true, ..order.clone() }).await
    }

    /// `POST /v1/moves` with `dry_run`.
    pub async fn dry_run(&self, order: &StartMove) -> Result<DryRun> {
        self.0.post("/v1/moves", &StartMove { dry_run: true, ..order.clone() }).await
    }

    /// `GET /v1/moves`: the newest [`MOST_LISTED`](crate::public::MOST_LISTED).
    pub async fn moves(&self) -> Result<Vec<Move>> {
        self.0.get("/v1/moves").await
    }

    /// `GET /v1/moves?vm=...&limit=1`: the newest move of a VM, if it was ever moved.
    pub async fn newest_move(&self, vm: &Name) -> Result<Option<Move>> {
        let moves: Vec<Move> = self.0.get(&format!("/v1/moves?vm={vm}&limit=1")).await?;
        // A controller of an earlier version answers with all moves.
        Ok(moves.into_iter().find(|mv| &mv.vm == vm))
    }

    /// `GET /v1/moves/{id}`.
    pub async fn mv(&self, id: MoveId) -> Result<Move> {
        self.0.within(QUICK).get(&format!("/v1/moves/{}", id.0)).await
    }

    /// `POST /v1/moves/{id}/cancel`.
    pub async fn cancel(&self, id: MoveId) -> Result<Move> {
        self.0.post(&format!("/v1/moves/{}/cancel", id.0), &nothing()).await
    }

    /// `POST /v1/port-wires/{wire}/capture`: takes as long as it records.
    pub async fn capture_wire(&self, wire: u32, asked: &CaptureWire) -> Result<Vec<HostCapture>> {
        let patience = ORDER * 2 + Duration::from_millis(asked.for_ms);
        self.0.within(patience).post(&format!("/v1/port-wires/{wire}/capture"), asked).await
    }

    /// `GET /v1/network`.
    pub async fn network(&self) -> Result<Vec<HostFinding>> {
        self.0.within(ORDER).get("/v1/network").await
    }

    /// `GET /v1/orphans`.
    pub async fn orphans(&self) -> Result<Vec<JudgedOrphan>> {
        self.0.within(ORDER).get("/v1/orphans").await
    }

    /// `DELETE /v1/orphans/{host}/{orphan}`.
    pub async fn remove_orphan(&self, host: &Name, id: &str) -> Result<()> {
        self.0.within(ORDER).delete::<IgnoredAny>(&format!("/v1/orphans/{host}/{id}")).await.map(drop)
    }

    /// `POST /v1/moves/{id}/retry`.
    pub async fn retry(&self, id: MoveId) -> Result<Move> {
        self.0.post(&format!("/v1/moves/{}/retry", id.0), &nothing()).await
    }

    /// `POST /v1/moves/{id}/resolve`.
    pub async fn resolve(&self, id: MoveId, how: &ResolveMove) -> Result<Move> {
        self.0.within(ORDER).post(&format!("/v1/moves/{}/resolve", id.0), how).await
    }

    /// `POST /v1/moves/{id}/limit`.
    pub async fn limit(&self, id: MoveId, limit: SetLimit) -> Result<Move> {
        self.0.post(&format!("/v1/moves/{}/limit", id.0), &limit).await
    }
}

/// The body of an order that has nothing to say: an empty object.
fn nothing() -> Value {
    Value::Object(serde_json::Map::new())
}
