//! The controller's API as an OpenAPI 3.1 document: made from the same types that are sent, and from [`operations`], the
//! list of what can be asked.
//!
//! # What can go wrong
//!
//! A document that says something else than the code. So nothing of it is written by hand but that list, and tests hold
//! the list to the code: the committed `docs/openapi.json` is compared with what is made here, the controller's router
//! with the list, and each call of [`PublicClient`](crate::PublicClient) with the document.

use crate::capture::{CaptureWire, HostCapture};
use crate::component::{ApplyConfig, ClaimComponent, ComponentObject, CreateComponent, MoveComponent};
use crate::evacuation::{Evacuation, PlanEvacuation};
use crate::extender::{ConnectExtender, DisconnectExtender, Extender};
use crate::host::{SetLimit, StopVm};
use crate::image::{CopyImage, ImageCopy};
use crate::network::HostFinding;
use crate::orphan::JudgedOrphan;
use crate::precache::{Precache, StartPrecache};
use crate::predict::MovePrediction;
use crate::profile::{Profile, ProfileLog, StartProfile};
use crate::promote::{PromoteVolume, Promoted};
use crate::public::{
    AddHost, Component, CreateVm, DryRun, Host, Move, MoveTogether, ResolveMove, Site, StartMove, Vm, Volume, Wire,
};
use crate::trust::{ApiToken, Certificate, Enrol, NewApiToken, NewToken, Renew, Revoke, Token};
use crate::verify::{Verified, VerifyVolume};
use crate::wire::{ConnectWire, PortWire, Rewire};
use crate::{ApiError, Name, Problem};
use godwit_units::MoveId;
use schemars::generate::{Contract, SchemaSettings};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;

/// The version of the API, and the first part of each of its paths. It changes when a program written for this one could
/// not go on working; new paths, new members of answers and new optional members of bodies do not change it.
pub const VERSION: &str = "v1";

/// Where a type's schema comes from.
type Of = fn(&mut SchemaGenerator) -> Schema;

/// What an answer is.
#[derive(Clone, Copy)]
enum Answers {
    /// JSON of this type.
    Json(Of),
    /// Another type of content, as text.
    Text(&'static str),
}

/// A value behind `?` in a request, or among its headers.
#[derive(Clone, Copy)]
struct Parameter {
    name: &'static str,
    place: &'static str,
    says: &'static str,
    of: Of,
}

/// A request that the API takes.
#[derive(Clone)]
pub struct Operation {
    /// The method, in lower case as in the document.
    pub method: &'static str,
    /// The path, with what varies in braces.
    pub path: &'static str,
    id: &'static str,
    says: &'static str,
    body: Option<Of>,
    answer: Answers,
    parameters: Vec<Parameter>,
    problems: BTreeSet<u16>,
}

fn operation(method: &'static str, path: &'static str, id: &'static str, says: &'static str) -> Operation {
    let problems = [Problem::Forbidden, Problem::Failed].map(Problem::status).into();
    let (answer, parameters) = (Answers::Json(nothing), vec![]);
    let new = Operation { method, path, id, says, body: None, answer, parameters, problems };
    // What the path names may be no name, or nothing's name.
    if path.contains('{') { new.may(&[Problem::Invalid, Problem::NotFound]) } else { new }
}

fn get(path: &'static str, id: &'static str, says: &'static str) -> Operation {
    operation("get", path, id, says)
}

fn post(path: &'static str, id: &'static str, says: &'static str) -> Operation {
    operation("post", path, id, says)
}

fn delete(path: &'static str, id: &'static str, says: &'static str) -> Operation {
    operation("delete", path, id, says)
}

impl Operation {
    fn answers<T: JsonSchema>(mut self) -> Self {
        self.answer = Answers::Json(SchemaGenerator::subschema_for::<T>);
        self
    }

    fn answers_text(mut self, content: &'static str) -> Self {
        self.answer = Answers::Text(content);
        self
    }

    fn takes<T: JsonSchema>(self) -> Self {
        self.takes_as(SchemaGenerator::subschema_for::<T>)
    }

    fn takes_as(mut self, of: Of) -> Self {
        self.body = Some(of);
        self.problems.extend([400, 413, 415]);
        self
    }

    fn may(mut self, problems: &[Problem]) -> Self {
        self.problems.extend(problems.iter().map(|p| p.status()));
        self
    }

    fn with<T: JsonSchema>(mut self, place: &'static str, name: &'static str, says: &'static str) -> Self {
        self.parameters.push(Parameter { name, place, says, of: SchemaGenerator::subschema_for::<T> });
        self.may(&[Problem::Invalid])
    }
}

/// The answer of an order that says nothing but that it was done.
fn nothing(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "null"})
}

fn qmp_command(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object",
        "description": "A QMP command.",
        "properties": {"execute": {"type": "string"}, "arguments": {"type": "object"}},
        "required": ["execute"],
    })
}

fn qmp_answer(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"description": "What QEMU answers."})
}

fn revocations(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object",
        "description": "Whose certificates are void: each holder with the moment, in seconds since 1970, until which.",
        "properties": {
            "version": {"type": "integer", "minimum": 0},
            "holders": {"type": "object", "additionalProperties": {"type": "integer", "minimum": 0}},
        },
        "required": ["version", "holders"],
    })
}

fn document_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "object", "description": "This document."})
}

fn move_or_dry_run(generator: &mut SchemaGenerator) -> Schema {
    let (mv, dry) = (generator.subschema_for::<Move>(), generator.subschema_for::<DryRun>());
    json_schema!({"description": "With `dry_run` a DryRun, else the Move.", "anyOf": [mv, dry]})
}

fn moves_or_dry_runs(generator: &mut SchemaGenerator) -> Schema {
    let (moves, dry) = (generator.subschema_for::<Vec<Move>>(), generator.subschema_for::<Vec<DryRun>>());
    json_schema!({"description": "With `dry_run` DryRuns, else the Moves.", "anyOf": [moves, dry]})
}

/// All that can be asked of a controller. Whoever adds a route adds it here; a test of the controller's says so.
#[must_use]
pub fn operations() -> Vec<Operation> {
    use Problem::{Blocked, Conflict, NotFound, Unreachable};
    let mut all = vec![
        get("/v1/sites", "listSites", "Lists sites.").answers::<Vec<Site>>(),
        post("/v1/sites", "addSite", "Makes a site known.").takes::<Site>().answers::<Site>().may(&[Conflict]),
        delete("/v1/sites/{site}", "removeSite", "Forgets a site.").may(&[Conflict]),
        post(
            "/v1/sites/{site}/evacuation-plan",
            "planEvacuation",
            "Plans how a site's VMs leave it before a deadline. Nothing is moved.",
        )
        .takes::<PlanEvacuation>()
        .answers::<Evacuation>()
        .may(&[Conflict]),
        get("/v1/hosts", "listHosts", "Lists hosts, with what each says of itself.").answers::<Vec<Host>>(),
        post("/v1/hosts", "addHost", "Makes a host known.").takes::<AddHost>().answers::<Host>().may(&[
            Conflict,
            NotFound,
            Unreachable,
        ]),
        get("/v1/hosts/{host}", "showHost", "Shows a host.").answers::<Host>(),
        delete("/v1/hosts/{host}", "removeHost", "Forgets a host.").may(&[Conflict]),
        post("/v1/hosts/{host}/token", "makeToken", "Makes a token that a host enrols with, once. It is shown once.")
            .takes::<NewToken>()
            .answers::<Token>()
            .may(&[Conflict]),
        post(
            "/v1/hosts/{host}/revoke",
            "revokeHost",
            "Makes void what a host was issued until now. A body is not read.",
        )
        .answering(revocations)
        .may(&[Conflict]),
        post("/v1/enrolment", "enrol", "Certifies a host's key for its token; asked without a certificate.")
            .takes::<Enrol>()
            .answers::<Certificate>()
            .may(&[Conflict]),
        post("/v1/renewal", "renew", "Certifies another key of the node that asks.")
            .takes::<Renew>()
            .answers::<Certificate>()
            .may(&[Conflict]),
        get("/v1/revocations", "listRevocations", "Lists whose certificates are void, until when.")
            .answering(revocations),
        post("/v1/revocations", "revoke", "Makes void what somebody was issued until now.")
            .takes::<Revoke>()
            .answering(revocations)
            .may(&[Conflict]),
        get("/v1/tokens", "listTokens", "Lists the tokens of people and programs, without their secrets.")
            .answers::<Vec<ApiToken>>(),
        post("/v1/tokens", "createToken", "Makes a token with which somebody of a domain asks. It is shown once.")
            .takes::<NewApiToken>()
            .answers::<Token>()
            .may(&[Conflict]),
        delete("/v1/tokens/{token}", "removeToken", "Makes a token void.").may(&[NotFound]),
        get("/v1/components", "listComponents", "Lists what wires lead to.").answers::<Vec<Component>>(),
        post("/v1/components", "addComponent", "Makes a switch or a gateway known.")
            .takes::<Component>()
            .answers::<Component>()
            .may(&[Conflict, NotFound, Unreachable]),
        delete("/v1/components/{component}", "removeComponent", "Forgets a component.").may(&[Conflict]),
        get("/v1/components/objects", "listComponentObjects", "Lists switches, routers, firewalls and gateways.")
            .answers::<Vec<ComponentObject>>(),
        post("/v1/components/objects", "createComponent", "Makes a switch, router, firewall or gateway.")
            .takes::<CreateComponent>()
            .answers::<ComponentObject>()
            .may(&[Conflict, NotFound, Unreachable]),
        get("/v1/components/objects/{component}", "showComponentObject", "Shows one.").answers::<ComponentObject>(),
        delete("/v1/components/objects/{component}", "deleteComponent", "Deletes one.").may(&[Conflict, Unreachable]),
        post("/v1/components/objects/{component}/config", "applyConfig", "Gives one another file, wholly or not at all.")
            .takes::<ApplyConfig>()
            .answers::<ComponentObject>()
            .may(&[Conflict, Unreachable]),
        post("/v1/components/objects/{component}/move", "moveComponent", "Moves one, with what it has learnt.")
            .takes::<MoveComponent>()
            .answers::<ComponentObject>()
            .may(&[Conflict, Unreachable]),
        post("/v1/components/objects/{component}/claim", "claimComponent", "Takes one whose host is lost for good.")
            .takes::<ClaimComponent>()
            .answers::<ComponentObject>()
            .may(&[Conflict, NotFound, Unreachable]),
        get("/v1/vms", "listVms", "Lists VMs.").answers::<Vec<Vm>>(),
        post("/v1/vms", "createVm", "Creates a VM.").takes::<CreateVm>().answers::<Vm>().may(&[
            Conflict,
            NotFound,
            Blocked,
            Unreachable,
        ]),
        get("/v1/vms/{vm}", "showVm", "Shows a VM.").answers::<Vm>(),
        delete("/v1/vms/{vm}", "removeVm", "Deletes a VM that is off, with its disks.").may(&[Conflict, Unreachable]),
        post("/v1/vms/{vm}/start", "startVm", "Starts a VM. A body is not read.").may(&[Conflict, Unreachable]),
        post("/v1/vms/{vm}/stop", "stopVm", "Stops a VM.").takes::<StopVm>().may(&[Conflict, Unreachable]),
        post("/v1/vms/{vm}/monitor", "askMonitor", "Sends a QMP command that changes nothing to a VM's QEMU.")
            .with::<Option<Name>>("query", "at", "The host to ask, where the VM has more than one QEMU.")
            .takes_as(qmp_command)
            .answering(qmp_answer)
            .may(&[Conflict, Unreachable]),
        get("/v1/vms/{vm}/prediction", "predictMove", "Tells what a move of a VM would take, by each way, and which is best.")
            .with::<Name>("query", "to", "A host, or a site. It must be there.")
            .with::<Option<godwit_units::Policy>>("query", "policy", "What the move is to spare; least-downtime.")
            .with::<Option<u64>>("query", "limit", "What it may use of the link, bits a second.")
            .with::<Option<u64>>("query", "at_unix_s", "When it begins, seconds since 1970; now.")
            .with::<Option<bool>>("query", "when", "Look for the best beginning in the coming 24 hours.")
            .answers::<MovePrediction>()
            .may(&[Conflict, Unreachable]),
        post("/v1/vms/{vm}/profiles", "startProfile", "Watches which pages of a VM's memory change, and what is in them.")
            .takes::<StartProfile>()
            .answers::<Profile>()
            .may(&[Conflict, Unreachable]),
        get("/v1/vms/{vm}/profiles", "listProfiles", "Lists what a VM's guest was seen to do, at each host it has been on; the oldest first.")
            .answers::<Vec<Profile>>(),
        get("/v1/vms/{vm}/profiles/{start}", "showProfileLog", "Shows a profile with its log of pages.")
            .answers::<ProfileLog>(),
        get("/v1/volumes", "listVolumes", "Lists volumes.").answers::<Vec<Volume>>(),
        post(
            "/v1/volumes/{volume}/verify",
            "verifyVolume",
            "Compares what the replicas of a volume hold, by digests, a slice at a time; repairs what is rotten if asked to.",
        )
        .takes::<VerifyVolume>()
        .answers::<Verified>()
        .may(&[Conflict, NotFound, Unreachable]),
        post(
            "/v1/volumes/{volume}/image",
            "copyImage",
            "Begins to fill a volume from an image at its host, or to write it into one.",
        )
        .takes::<CopyImage>()
        .answers::<ImageCopy>()
        .may(&[Conflict, NotFound, Unreachable]),
        get("/v1/volumes/{volume}/image", "showImage", "Shows the import or export of a volume that is under way, or was the last.")
            .answers::<ImageCopy>()
            .may(&[Conflict, Unreachable]),
        delete("/v1/volumes/{volume}/image", "endImage", "Ends an import or export of a volume.")
            .answers::<ImageCopy>()
            .may(&[Conflict, Unreachable]),
        post(
            "/v1/volumes/{volume}/promote",
            "promoteVolume",
            "Starts a volume's VM from the images of its pre-caches at another site, because its host is lost and fenced; with `dry_run` says from what.",
        )
        .takes::<PromoteVolume>()
        .answers::<Promoted>()
        .may(&[Conflict, NotFound, Blocked, Unreachable]),
        get("/v1/precaches", "listPrecaches", "Lists pre-caches, with how each stands.").answers::<Vec<Precache>>(),
        post(
            "/v1/precaches",
            "startPrecache",
            "Keeps a volume nearly equal at another site; again with other values changes them.",
        )
        .takes::<StartPrecache>()
        .answers::<Precache>()
        .may(&[Conflict, NotFound, Unreachable]),
        delete("/v1/precaches/{volume}/{to}", "stopPrecache", "Ends a pre-cache; what is there stays.")
            .may(&[NotFound, Conflict]),
        get("/v1/wires", "listWires", "Lists wires from VMs to components.").answers::<Vec<Wire>>(),
        get("/v1/port-wires", "listPortWires", "Lists wires between ports.").answers::<Vec<PortWire>>(),
        post("/v1/port-wires", "connectWire", "Joins two ports; the wire follows both wherever they move.")
            .takes::<ConnectWire>()
            .answers::<PortWire>()
            .may(&[Conflict, NotFound]),
        post("/v1/port-wires/rewire", "rewire", "Makes wires and takes others away, all of it or nothing.")
            .takes::<Rewire>()
            .answers::<Vec<PortWire>>()
            .may(&[Conflict, NotFound]),
        get("/v1/port-wires/{wire}", "showPortWire", "Shows a wire, with what the hosts of its ends say.")
            .answers::<PortWire>(),
        post("/v1/port-wires/{wire}/capture", "captureWire", "Records what passes a wire, at the hosts of its ends.")
            .takes::<CaptureWire>()
            .answers::<Vec<HostCapture>>()
            .may(&[Conflict, Unreachable]),
        delete("/v1/port-wires/{wire}", "disconnectWire", "Takes a wire away; its ports are isolated.")
            .may(&[NotFound, Unreachable]),
        get("/v1/extenders", "listExtenders", "Lists the tunnels between sites, with how each stands.")
            .answers::<Vec<Extender>>(),
        post("/v1/extenders", "connectExtender", "Joins two sites: wires between them are encrypted from then on.")
            .takes::<ConnectExtender>()
            .answers::<Extender>()
            .may(&[Conflict, NotFound]),
        get("/v1/extenders/{a}/{b}", "showExtender", "Shows the extender of two sites.").answers::<Extender>(),
        post(
            "/v1/extenders/{a}/{b}/rotate",
            "rotateExtender",
            "Makes new keys for an extender, and goes over to them without a loss. A body is not read.",
        )
        .answers::<Extender>()
        .may(&[Conflict]),
        post("/v1/extenders/{a}/{b}/disconnect", "disconnectExtender", "Parts two sites.")
            .takes::<DisconnectExtender>()
            .may(&[NotFound, Conflict, Unreachable]),
        get("/v1/moves", "listMoves", "Lists moves, the newest first.")
            .with::<Option<Name>>("query", "vm", "Moves of this VM only.")
            .with::<Option<u64>>("query", "limit", "At most so many, and at most 1000.")
            .answers::<Vec<Move>>(),
        post("/v1/moves", "startMove", "Moves a VM, or with `dry_run` tells what would be in the way.")
            .takes::<StartMove>()
            .answering(move_or_dry_run)
            .may(&[Conflict, NotFound, Blocked, Unreachable]),
        post(
            "/v1/moves/together",
            "startMoves",
            "Moves several VMs one after another, or with `dry_run` tells what would be in the way.",
        )
        .takes::<MoveTogether>()
        .answering(moves_or_dry_runs)
        .may(&[Conflict, NotFound, Blocked, Unreachable]),
        get("/v1/moves/{id}", "showMove", "Shows a move.").answers::<Move>(),
        post(
            "/v1/moves/{id}/cancel",
            "cancelMove",
            "Takes a move back, if that is still possible. A body is not read.",
        )
        .answers::<Move>()
        .may(&[Conflict, Unreachable]),
        post("/v1/moves/{id}/limit", "limitMove", "Changes what a move may use of the link.")
            .takes::<SetLimit>()
            .answers::<Move>()
            .may(&[Conflict, Unreachable]),
        post("/v1/moves/{id}/retry", "retryMove", "Orders a move again that has failed. A body is not read.")
            .answers::<Move>()
            .may(&[Conflict, Blocked, Unreachable]),
        post("/v1/moves/{id}/resolve", "resolveMove", "Claims the VM of a move whose other host is lost for good.")
            .takes::<ResolveMove>()
            .answers::<Move>()
            .may(&[Conflict, Unreachable]),
        get("/v1/network", "checkNetwork", "Lists what hosts find wrong with their parts of the network.")
            .answers::<Vec<HostFinding>>(),
        get(
            "/v1/orphans",
            "listOrphans",
            "Lists what hosts find that nobody there looks after, and whether it may go.",
        )
        .answers::<Vec<JudgedOrphan>>(),
        delete("/v1/orphans/{host}/{orphan}", "removeOrphan", "Removes such a thing, if it may go.")
            .may(&[Conflict, Unreachable]),
        get("/v1/events", "followEvents", "Follows what happens, as server-sent events; each one's data is an Event.")
            .with::<Option<u64>>(
                "query",
                "after",
                "Begin after the event of this number; 0: with the oldest that is kept. Else: from now on.",
            )
            .with::<Option<u64>>("header", "Last-Event-ID", "As `after`, which outweighs it.")
            .with::<Option<bool>>("query", "follow", "false: end with the newest that is there.")
            .answers_text("text/event-stream")
            .may(&[Conflict]),
        get("/metrics", "showMetrics", "Figures for Prometheus.").answers_text("text/plain"),
        get("/v1/openapi.json", "showDocument", "This document.").answering(document_schema),
    ];
    all.sort_by_key(|o| (o.path, o.method));
    all
}

impl Operation {
    fn answering(mut self, of: Of) -> Self {
        self.answer = Answers::Json(of);
        self
    }
}

/// The schema of what is in braces in a path.
fn in_path(name: &str) -> Of {
    match name {
        "id" => SchemaGenerator::subschema_for::<MoveId>,
        "start" => SchemaGenerator::subschema_for::<u64>,
        "wire" => SchemaGenerator::subschema_for::<u32>,
        _ => SchemaGenerator::subschema_for::<Name>,
    }
}

fn generator(contract: Contract) -> SchemaGenerator {
    let mut settings = SchemaSettings::draft2020_12();
    settings.definitions_path = "/components/schemas".into();
    settings.meta_schema = None;
    settings.contract = contract;
    settings.into_generator()
}

/// The document.
#[must_use]
pub fn document() -> Value {
    // What is sent may leave out what has a default; what is answered has it all. So a type may have two schemas.
    let (mut bodies, mut answers) = (generator(Contract::Deserialize), generator(Contract::Serialize));
    let mut paths = Map::new();
    let mut sent = vec![];
    for o in operations() {
        let mut parameters: Vec<Value> = names(o.path)
            .map(|name| {
                let schema = in_path(name)(&mut answers);
                json!({"name": name, "in": "path", "required": true, "schema": schema})
            })
            .collect();
        parameters.extend(o.parameters.iter().map(|p| {
            let schema = (p.of)(&mut answers);
            json!({"name": p.name, "in": p.place, "required": false, "description": p.says, "schema": schema})
        }));
        let mut responses = Map::new();
        let content = match o.answer {
            Answers::Json(of) => json!({"application/json": {"schema": of(&mut answers)}}),
            Answers::Text(content) => json!({content: {"schema": {"type": "string"}}}),
        };
        responses.insert("200".into(), json!({"description": "It was done.", "content": content}));
        for status in &o.problems {
            responses.insert(status.to_string(), json!({"$ref": format!("#/components/responses/{status}")}));
        }
        let mut described = json!({"operationId": o.id, "summary": o.says, "responses": responses});
        if !parameters.is_empty() {
            described["parameters"] = parameters.into();
        }
        if let Some(of) = o.body {
            sent.push((o.path, o.method, of(&mut bodies)));
        }
        let path = paths.entry(o.path).or_insert_with(|| Value::Object(Map::new()));
        path[o.method] = described;
    }
    let error = answers.subschema_for::<ApiError>();
    // What the events' text is made of.
    let _ = answers.subschema_for::<crate::events::Event>();
    let (mut schemas, inputs) = (answers.take_definitions(true), bodies.take_definitions(true));
    let other = different(&schemas, &inputs);
    for (name, schema) in inputs {
        let (name, schema) = as_input(name, schema, &other);
        schemas.insert(name, schema);
    }
    for (path, method, schema) in sent {
        let (_, schema) = as_input(String::new(), schema.into(), &other);
        paths[path][method]["requestBody"] =
            json!({"required": true, "content": {"application/json": {"schema": schema}}});
    }
    let mut sorted: Vec<(String, Value)> = schemas.into_iter().collect();
    sorted.sort_by(|a, b| a.0.cmp(&b.0));
    let schemas: Map<String, Value> = sorted.into_iter().collect();
    let mut document = json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Godwit",
            "version": format!("{VERSION} ({})", env!("CARGO_PKG_VERSION")),
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
            "description": ABOUT,
        },
        "servers": [{"url": "https://127.0.0.1:7400", "description": "A controller, as it listens unless told otherwise."}],
        "security": [{"certificate": []}],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "responses": responses(&error),
            "securitySchemes": {"certificate": {
                "type": "mutualTLS",
                "description": "A client certificate of the deployment's authority: `admin` may do everything, `operator` read and move.",
            }},
        },
    });
    bound(&mut document);
    document
}

/// Says how great an integer may be: the format alone (`uint64`) says it only to those who know it.
fn bound(schema: &mut Value) {
    match schema {
        Value::Object(members) => {
            let most = match members.get("format").and_then(Value::as_str) {
                Some("uint64") => Some(u64::MAX),
                Some("uint32") => Some(u64::from(u32::MAX)),
                Some("uint16") => Some(u64::from(u16::MAX)),
                _ => None,
            };
            if let Some(most) = most {
                members.entry("maximum").or_insert(most.into());
            }
            members.values_mut().for_each(bound);
        }
        Value::Array(items) => items.iter_mut().for_each(bound),
        _ => {}
    }
}

/// The document as it is committed: indented, with a line's end.
#[must_use]
pub fn text() -> String {
    serde_json::to_string_pretty(&document()).expect("the document is JSON") + "\n"
}

const ABOUT: &str = "Moves running virtual machines between data centres. Every answer that is not a success has an Error: \
    what is wrong (`message`), where (`where`), and what to do (`remedy`). Sizes are bytes, rates bits a second, times \
    microseconds since 1970, unless a name says otherwise; integers are written as \
    such (1, not 1.0). The version in the path changes when a program written for it \
    could not go on working; new paths and new members of answers do not change it.";

/// What is in braces in `path`.
fn names(path: &str) -> impl Iterator<Item = &str> {
    path.split('/').filter_map(|part| part.strip_prefix('{')?.strip_suffix('}'))
}

fn responses(error: &Schema) -> Value {
    let described = [
        (400, "The request makes no sense: no JSON, a wrong type, an unknown member, a value out of range."),
        (403, "Whoever asks may not."),
        (404, "There is no such thing."),
        (409, "It exists already, or its state does not allow this now."),
        (413, "The body is too long."),
        (415, "The body is not said to be JSON."),
        (422, "A check before a move found what would make it fail."),
        (500, "Something failed that should work."),
        (502, "Another part of Godwit could not be reached."),
    ];
    let content = json!({"application/json": {"schema": error}});
    let one = |(status, says): (u16, &str)| (status.to_string(), json!({"description": says, "content": content}));
    Value::Object(described.map(one).into_iter().collect())
}

/// The names of types whose schema as a body is another than as an answer, or leads to such a one.
fn different(answers: &Map<String, Value>, inputs: &Map<String, Value>) -> BTreeSet<String> {
    let mut other: BTreeSet<String> = inputs
        .iter()
        .filter(|(name, schema)| answers.get(*name).is_some_and(|answer| answer != *schema))
        .map(|(name, _)| name.clone())
        .collect();
    loop {
        let more: Vec<String> = inputs
            .iter()
            .filter(|(name, schema)| !other.contains(*name) && answers.contains_key(*name) && leads_to(schema, &other))
            .map(|(name, _)| name.clone())
            .collect();
        if more.is_empty() {
            return other;
        }
        other.extend(more);
    }
}

const REFERENCE: &str = "#/components/schemas/";

fn leads_to(schema: &Value, names: &BTreeSet<String>) -> bool {
    match schema {
        Value::Object(members) => members.iter().any(|(key, value)| match value.as_str() {
            Some(to) if key == "$ref" => to.strip_prefix(REFERENCE).is_some_and(|to| names.contains(to)),
            _ => leads_to(value, names),
        }),
        Value::Array(items) => items.iter().any(|item| leads_to(item, names)),
        _ => false,
    }
}

/// A body's schema under the name that it has beside the answers'.
fn as_input(name: String, mut schema: Value, other: &BTreeSet<String>) -> (String, Value) {
    rename(&mut schema, other);
    if other.contains(&name) { (name + "Input", schema) } else { (name, schema) }
}

fn rename(schema: &mut Value, other: &BTreeSet<String>) {
    match schema {
        Value::Object(members) => {
            for (key, value) in members {
                let renamed = match value.as_str().filter(|_| key == "$ref").and_then(|to| to.strip_prefix(REFERENCE)) {
                    Some(to) if other.contains(to) => Some(format!("{REFERENCE}{to}Input")),
                    _ => None,
                };
                match renamed {
                    Some(to) => *value = Value::String(to),
                    None => rename(value, other),
                }
            }
        }
        Value::Array(items) => items.iter_mut().for_each(|item| rename(item, other)),
        _ => {}
    }
}
