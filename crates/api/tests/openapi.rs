//! The document says what the code does: it is the committed one, each call of the client is in it, and what it describes is
//! what the client sends and can read.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use axum::extract::{Request, State};
use axum::{Json, Router};
use godwit_api::component::{ApplyConfig, ClaimComponent, ComponentKind, CreateComponent, MoveComponent};
use godwit_api::evacuation::PlanEvacuation;
use godwit_api::extender::{ConnectExtender, DisconnectExtender};
use godwit_api::host::{SetLimit, StopVm};
use godwit_api::image::{CopyImage, Direction};
use godwit_api::precache::{IMAGE_ROOM, StartPrecache};
use godwit_api::predict::WantedPrediction;
use godwit_api::profile::StartProfile;
use godwit_api::promote::PromoteVolume;
use godwit_api::public::{AddHost, Component, CreateVm, MoveTogether, ResolveMove, Site, StartMove};
use godwit_api::trust::{NewApiToken, TokenRole};
use godwit_api::verify::VerifyVolume;
use godwit_api::vm::{ComponentSpec, DiskSpec, Placement, VmSpec};
use godwit_api::wire::{ConnectWire, Rewire, WireEnd};
use godwit_api::{Name, PublicClient, openapi, serve};
use godwit_trust::{Access, Authority, Credentials, Identity, Role, Validity};
use godwit_units::{BitRate, Bytes, MoveId};
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::oneshot;

const COMMITTED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/openapi.json");

#[test]
fn the_committed_document_is_the_codes() {
    let committed = std::fs::read_to_string(COMMITTED).unwrap_or_default();
    assert!(
        committed == openapi::text(),
        "docs/openapi.json is not what the code says; write it anew with\n    cargo run -p godwit-api --example openapi > docs/openapi.json\nand look at what has changed for programs that use it"
    );
}

#[test]
fn every_schema_that_is_named_is_there_and_every_operation_has_a_name_of_its_own() {
    let document = openapi::document();
    let mut ids = BTreeSet::new();
    for operations in document["paths"].as_object().unwrap().values() {
        for operation in operations.as_object().unwrap().values() {
            assert!(ids.insert(operation["operationId"].as_str().unwrap().to_owned()), "{operation}");
        }
    }
    fn check(document: &Value, within: &Value) {
        match within {
            Value::Object(members) => {
                if let Some(Value::String(to)) = members.get("$ref") {
                    assert!(document.pointer(&to[1..]).is_some(), "{to} is not there");
                }
                members.values().for_each(|v| check(document, v));
            }
            Value::Array(items) => items.iter().for_each(|v| check(document, v)),
            _ => {}
        }
    }
    check(&document, &document);
}

/// A value that a schema describes: with every member that it names, or with those only that it requires.
fn sample(document: &Value, schema: &Value, all: bool) -> Value {
    if let Some(to) = schema["$ref"].as_str() {
        return sample(document, document.pointer(&to[1..]).unwrap(), all);
    }
    for key in ["anyOf", "oneOf"] {
        if let Some(first) = schema[key].as_array().and_then(|many| many.first()) {
            return sample(document, first, all);
        }
    }
    if let Some(value) = schema.get("const").or(schema["enum"].get(0)) {
        return value.clone();
    }
    let kind = schema["type"].as_str().or(schema["type"][0].as_str());
    match kind {
        Some("object") => {
            let required = |name: &str| schema["required"].as_array().is_some_and(|r| r.iter().any(|n| n == name));
            let empty = Map::new();
            let members = schema["properties"].as_object().unwrap_or(&empty).iter();
            members.filter(|(n, _)| all || required(n)).map(|(n, s)| (n.clone(), sample(document, s, all))).collect()
        }
        Some("array") => match schema["prefixItems"].as_array() {
            Some(each) => each.iter().map(|item| sample(document, item, all)).collect(),
            None => {
                let least = schema["minItems"].as_u64().unwrap_or(1).max(1);
                (0..least).map(|_| sample(document, &schema["items"], all)).collect()
            }
        },
        Some("integer") => json!(schema["minimum"].as_u64().unwrap_or(0).max(1)),
        Some("number") => json!(1.5),
        Some("boolean") => json!(true),
        Some("string") => match schema["format"].as_str() {
            Some("ip") => json!("10.0.0.1"),
            Some("socket-addr") => json!("10.0.0.1:80"),
            _ => schema["examples"].get(0).cloned().unwrap_or(json!("a")),
        },
        Some("null") | None => Value::Null,
        Some(other) => panic!("a schema of type {other}"),
    }
}

/// Whether a value is as a schema says; else where it is not.
fn misfit(document: &Value, schema: &Value, value: &Value, at: &str) -> Option<String> {
    if let Some(to) = schema["$ref"].as_str() {
        return misfit(document, document.pointer(&to[1..]).unwrap(), value, at);
    }
    for key in ["anyOf", "oneOf"] {
        if let Some(many) = schema[key].as_array() {
            let fits = many.iter().any(|s| misfit(document, s, value, at).is_none());
            return (!fits).then(|| format!("{at}: {value} fits none of {key}"));
        }
    }
    if let Some(wanted) = schema.get("const").filter(|wanted| *wanted != value) {
        return Some(format!("{at}: {value} is not {wanted}"));
    }
    if let Some(many) = schema["enum"].as_array().filter(|many| !many.contains(value)) {
        return Some(format!("{at}: {value} is none of {many:?}"));
    }
    let is = |kind: &str| match kind {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "integer" => value.is_u64() || value.is_i64(),
        "number" => value.is_number(),
        "boolean" => value.is_boolean(),
        "string" => value.is_string(),
        _ => value.is_null(),
    };
    let fits = match &schema["type"] {
        Value::String(kind) => is(kind),
        Value::Array(kinds) => kinds.iter().any(|kind| is(kind.as_str().unwrap())),
        _ => true,
    };
    if !fits {
        return Some(format!("{at}: {value} is no {}", schema["type"]));
    }
    if let Some(members) = value.as_object() {
        for name in schema["required"].as_array().into_iter().flatten() {
            if !members.contains_key(name.as_str().unwrap()) {
                return Some(format!("{at}: {name} is missing"));
            }
        }
        for (name, member) in members {
            match schema["properties"].get(name) {
                Some(of) => {
                    if let Some(found) = misfit(document, of, member, &format!("{at}.{name}")) {
                        return Some(found);
                    }
                }
                None if schema["additionalProperties"] == json!(false) => {
                    return Some(format!("{at}: {name} is unknown"));
                }
                None => {}
            }
        }
    }
    let items = value.as_array().into_iter().flatten();
    items.enumerate().find_map(|(i, item)| misfit(document, schema.get("items")?, item, &format!("{at}[{i}]")))
}

/// The operation of the document that a request is.
fn find<'a>(document: &'a Value, method: &str, path: &str) -> Option<&'a Value> {
    let same = |template: &str| {
        let (a, b): (Vec<_>, Vec<_>) = (template.split('/').collect(), path.split('/').collect());
        a.len() == b.len() && a.iter().zip(&b).all(|(t, p)| t == p || t.starts_with('{'))
    };
    let (_, operations) = document["paths"].as_object()?.iter().find(|(template, _)| same(template))?;
    operations.get(method)
}

#[derive(Default)]
struct Seen {
    asked: BTreeSet<String>,
    wrong: Vec<String>,
    all: bool,
}

/// Answers as the document says, and notes where a request is not as it says.
async fn answer(State(seen): State<Arc<Mutex<Seen>>>, request: Request) -> Json<Value> {
    let document = openapi::document();
    let (method, uri) = (request.method().as_str().to_lowercase(), request.uri().clone());
    let body = axum::body::to_bytes(request.into_body(), 1 << 20).await.unwrap();
    let body: Value = if body.is_empty() { Value::Null } else { serde_json::from_slice(&body).unwrap() };
    let mut seen = seen.lock().unwrap();
    let Some(operation) = find(&document, &method, uri.path()) else {
        seen.wrong.push(format!("{method} {uri} is not in the document"));
        return Json(Value::Null);
    };
    let what = operation["operationId"].as_str().unwrap();
    seen.asked.insert(what.to_owned());
    match operation["requestBody"]["content"]["application/json"].get("schema") {
        Some(schema) => seen.wrong.extend(misfit(&document, schema, &body, what)),
        None if body.is_null() || body == json!({}) => {}
        None => seen.wrong.push(format!("{what}: a body that the document does not know: {body}")),
    }
    for pair in uri.query().unwrap_or_default().split('&').filter(|p| !p.is_empty()) {
        let name = pair.split('=').next().unwrap();
        if !operation["parameters"].as_array().is_some_and(|all| all.iter().any(|p| p["name"] == name)) {
            seen.wrong.push(format!("{what}: ?{name} is not in the document"));
        }
    }
    let mut schema = &operation["responses"]["200"]["content"]["application/json"]["schema"];
    if (what == "startMove" || what == "startMoves") && body["dry_run"] == json!(true) {
        schema = &schema["anyOf"][1];
    }
    Json(sample(&document, schema, seen.all))
}

fn issue(authority: &Authority, folder: &std::path::Path, role: Role, name: &str) -> Credentials {
    let identity = Identity::new(role, name).unwrap();
    let dir = folder.join(name);
    authority.issue(&identity, Validity::days(1)).unwrap().write(&dir).unwrap();
    Credentials::load(&dir).unwrap()
}

/// Makes one call of the client, notes its name, and expects that the answer can be read.
macro_rules! call {
    ($api:ident, $called:ident, $name:ident $(, $argument:expr)*) => {
        $called.insert(stringify!($name));
        $api.$name($($argument),*).await.unwrap_or_else(|e| panic!("{}: {e}", stringify!($name)));
    };
}

#[tokio::test]
async fn the_client_sends_what_the_document_describes_and_reads_what_it_describes() {
    let folder = tempfile::tempdir().unwrap();
    let authority = Authority::create(&folder.path().join("ca")).unwrap();
    let server = issue(&authority, folder.path(), Role::Controller, "controller");
    let client = issue(&authority, folder.path(), Role::Client(Access::Admin), "ann");
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let seen = Arc::new(Mutex::new(Seen::default()));
    let router = Router::new().fallback(answer).with_state(seen.clone());
    let (_stop, stopped) = oneshot::channel::<()>();
    tokio::spawn(async move { serve(listener, router, &server, async { drop(stopped.await) }).await.unwrap() });
    let api = PublicClient::new(address, Identity::new(Role::Controller, "controller").unwrap(), &client);
    let web: Name = "web".parse().unwrap();
    let spec: VmSpec = serde_json::from_value(json!({"memory": 4096, "disks": [], "nics": []})).unwrap();
    let disk = DiskSpec { volume: web.clone(), size: Bytes(4096), from: Some("x".into()), store: None };
    let mut called = BTreeSet::new();
    for all in [true, false] {
        seen.lock().unwrap().all = all;
        let spec = VmSpec { disks: vec![disk.clone()], ..spec.clone() };
        let order = StartMove {
            vm: web.clone(),
            to: web.clone(),
            disk: Default::default(),
            limit: Some(BitRate(1)),
            policy: Default::default(),
            throttle: Some(80),
            memory_postcopy: Some(godwit_units::MaxDrain::DEFAULT),
            vcpus: None,
            keep_checkpoint: true,
            place: match all {
                true => vec![Placement { volume: web.clone(), device: "/dev/x".into(), overwrite: true, zeroed: true }],
                false => vec![],
            },
            dry_run: false,
        };
        let component = Component { name: web.clone(), kind: ComponentSpec::Switch { bridge: "br0".into() } };
        call!(api, called, sites);
        call!(api, called, add_site, &Site { name: web.clone() });
        call!(api, called, remove_site, &web);
        let evacuation = PlanEvacuation {
            deadline_s: 600.0,
            vms: all.then(|| vec![web.clone()]),
            to: vec![web.clone()],
            limit: Some(BitRate(1_000_000)),
            at_unix_s: Some(1),
            cold: all,
        };
        call!(api, called, plan_evacuation, &web, &evacuation);
        call!(api, called, hosts);
        call!(api, called, add_host, &AddHost { name: web.clone(), site: web.clone(), api: address });
        call!(api, called, host, &web);
        call!(api, called, remove_host, &web);
        call!(api, called, components);
        call!(api, called, add_component, &component);
        call!(api, called, remove_component, &web);
        call!(api, called, component_objects);
        let (kind, config) = (ComponentKind::Switch, String::new());
        let new = CreateComponent { name: web.clone(), kind, ports: 8, at: web.clone(), config: config.clone() };
        call!(api, called, create_component, &new);
        call!(api, called, component_object, &web);
        call!(api, called, delete_component, &web);
        call!(api, called, apply_config, &web, &ApplyConfig { config });
        call!(api, called, move_component, &web, &MoveComponent { to: web.clone() });
        let claim = ClaimComponent { at: web.clone(), fenced: "power cut at the PDU, by ann".into() };
        call!(api, called, claim_component, &web, &claim);
        call!(api, called, vms);
        call!(api, called, create_vm, &CreateVm { name: web.clone(), at: web.clone(), spec, start: true });
        call!(api, called, vm, &web);
        call!(api, called, remove_vm, &web);
        call!(api, called, start, &web);
        call!(api, called, stop, &web, StopVm { force: all });
        call!(api, called, monitor, &web, Some(&web), &json!({"execute": "query-status"}));
        let wanted = WantedPrediction {
            to: web.clone(),
            policy: Default::default(),
            limit: Some(BitRate(1_000_000)),
            at_unix_s: Some(1),
            when: all,
        };
        call!(api, called, predict, &web, &wanted);
        call!(api, called, start_profile, &web, StartProfile { for_s: 1, interval_ms: 1000 });
        call!(api, called, profiles, &web);
        call!(api, called, profile_log, &web, 7);
        call!(api, called, volumes);
        call!(api, called, wires);
        let [a, b]: [WireEnd; 2] = ["web:eth0", "web:eth1"].map(|end| end.parse().unwrap());
        call!(api, called, port_wires);
        call!(api, called, connect_wire, &ConnectWire { a: a.clone(), b: b.clone() });
        let connect = vec![ConnectWire { a, b }];
        let unless_joined = Some([web.clone(), web.clone()]);
        call!(api, called, rewire, &Rewire { connect, disconnect: vec![7], unless_joined });
        call!(api, called, port_wire, 7);
        call!(api, called, disconnect_wire, 7);
        call!(api, called, extenders);
        call!(api, called, connect_extender, &ConnectExtender { a: web.clone(), b: web.clone() });
        call!(api, called, extender, &web, &web);
        call!(api, called, rotate_extender, &web, &web);
        call!(api, called, disconnect_extender, &web, &web, DisconnectExtender { clear: all });
        call!(api, called, precaches);
        let wanted = StartPrecache {
            volume: web.clone(),
            to: web.clone(),
            limit: Some(BitRate(1)),
            unlimited: all,
            interval_ms: Some(1000),
            consistent: Some(all),
            image_room: Some(IMAGE_ROOM),
            follow: Some(true),
        };
        call!(api, called, start_precache, &wanted);
        call!(api, called, stop_precache, &web, &web);
        let verify = VerifyVolume { site: Some(web.clone()), repair: all, ..VerifyVolume::default() };
        call!(api, called, verify, &web, &verify);
        let copy = CopyImage { what: Direction::Import, path: "x".into(), format: None, overwrite: all, key: 1 };
        call!(api, called, copy_image, &web, &copy);
        call!(api, called, image, &web);
        call!(api, called, end_image, &web);
        let promote = PromoteVolume {
            site: web.clone(),
            fenced: "power cut, by ann".into(),
            also_fenced: vec![web.clone()],
            dry_run: all,
        };
        call!(api, called, promote, &web, &promote);
        call!(api, called, start_move, &order);
        call!(api, called, dry_run, &order);
        let StartMove { to, disk, limit, policy, throttle, memory_postcopy, keep_checkpoint, dry_run, .. } =
            order.clone();
        let together = MoveTogether {
            vms: vec![web.clone()],
            to,
            disk,
            limit,
            policy,
            throttle,
            memory_postcopy,
            keep_checkpoint,
            dry_run,
        };
        call!(api, called, move_together, &together);
        call!(api, called, dry_run_together, &together);
        call!(api, called, moves);
        call!(api, called, newest_move, &web);
        call!(api, called, mv, MoveId(1));
        call!(api, called, cancel, MoveId(1));
        call!(api, called, limit, MoveId(1), SetLimit { limit: None });
        call!(api, called, retry, MoveId(1));
        let how = ResolveMove { claim: web.clone(), fenced: "off".into(), peer_did_not_run: all };
        call!(api, called, resolve, MoveId(1), &how);
        call!(api, called, network);
        call!(api, called, capture_wire, 1, &godwit_api::capture::CaptureWire { for_ms: 1, also: vec![] });
        call!(api, called, orphans);
        call!(api, called, remove_orphan, &web, "volume-7");
        call!(api, called, host_token, &web, Duration::from_secs(60));
        let token = NewApiToken { name: web.clone(), domain: web.clone(), role: TokenRole::Viewer, ttl_s: 60 };
        call!(api, called, create_token, &token);
        call!(api, called, tokens);
        call!(api, called, remove_token, &web);
        call!(api, called, revoke_host, &web);
        call!(api, called, revoke, &Identity::node("web").unwrap());
        call!(api, called, revocations);
    }
    let seen = seen.lock().unwrap();
    assert_eq!(seen.wrong, Vec::<String>::new());

    // None of the client's calls was forgotten here, and none of the document's operations in the client.
    let source = include_str!("../src/clients.rs");
    let (_, public) = source.split_once("impl PublicClient {").unwrap();
    let (_, trust) = include_str!("../src/trust.rs").split_once("impl crate::PublicClient {").unwrap();
    let (trust, _) = trust.split_once("\n}\n").unwrap();
    let sources = [public, trust].concat();
    let there: BTreeSet<&str> =
        sources.split("pub async fn ").skip(1).map(|rest| rest.split('(').next().unwrap()).collect();
    assert_eq!(there, called);
    // No calls of the client that answer once; and those of a node that takes part.
    let elsewhere = ["showDocument", "showMetrics", "followEvents", "enrol", "renew"];
    for operation in
        openapi::document()["paths"].as_object().unwrap().values().flat_map(|p| p.as_object().unwrap().values())
    {
        let id = operation["operationId"].as_str().unwrap();
        assert!(seen.asked.contains(id) || elsewhere.contains(&id), "no call of the client asks for {id}");
    }
}
