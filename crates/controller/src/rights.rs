//! Who may ask what: one table, and one place that goes by it.
//!
//! Every request passes [`guard`] before anything else looks at it. A route that the table does not have is refused, so that
//! one that somebody adds and forgets here serves nobody rather than everybody.
//!
//! # Trust domains
//!
//! A customer's objects belong to a domain: VMs, and with them their volumes, wires and moves. Who asks with a token of a domain
//! sees and changes what is in it; another's object is not there for them, in the same words as one that never was. Sites and
//! components are everybody's to read, since VMs are placed on and wired to them. Hosts, certificates and whatever reaches into a
//! host itself (a file of its disk, a device of its own, a QEMU's monitor) are the deployment's: certificates of people have that
//! right, tokens never.
//!
//! Three things are known across domains all the same: that a VM's or volume's name, or a MAC address, is taken, since these are
//! one for the whole deployment; and how much happens in it, since events have numbers in a row.

use crate::record::VmRecord;
use crate::state::{Controller, missing};
use crate::store::Kind;
use crate::tokens;
use axum::extract::{Extension, FromRequestParts, MatchedPath, RawPathParams, Request, State};
use axum::http::{Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use godwit_api::public::CreateVm;
use godwit_api::trust::TokenRole;
use godwit_api::{ApiError, Name, Problem};
use godwit_trust::{Access, Identity, Role};
use std::collections::HashSet;
use std::sync::Arc;

/// What it takes to ask something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Right {
    /// Nothing: whoever asks proves by other means that they may.
    Anybody,
    /// To be a node, for itself.
    Node,
    /// To read.
    Read,
    /// To move VMs.
    Move,
    /// To change what belongs to a domain.
    Change,
    /// To read what belongs to the deployment.
    ReadAll,
    /// To change what belongs to the deployment.
    Rule,
}

use Right::{Anybody, Change, Move, Node, Read, ReadAll, Rule};

/// Method, route and right.
pub const RULES: &[(&str, &str, Right)] = &[
    ("GET", "/v1/sites", Read),
    ("POST", "/v1/sites", Rule),
    ("DELETE", "/v1/sites/{site}", Rule),
    // It changes nothing, and tells what room hosts have.
    ("POST", "/v1/sites/{site}/evacuation-plan", ReadAll),
    ("GET", "/v1/hosts", ReadAll),
    ("POST", "/v1/hosts", Rule),
    ("GET", "/v1/hosts/{host}", ReadAll),
    ("DELETE", "/v1/hosts/{host}", Rule),
    ("POST", "/v1/hosts/{host}/token", Rule),
    ("POST", "/v1/hosts/{host}/revoke", Rule),
    ("GET", "/v1/components", Read),
    ("POST", "/v1/components", Rule),
    ("DELETE", "/v1/components/{component}", Rule),
    ("GET", "/v1/components/objects", Read),
    ("POST", "/v1/components/objects", Change),
    ("GET", "/v1/components/objects/{component}", Read),
    ("DELETE", "/v1/components/objects/{component}", Change),
    ("POST", "/v1/components/objects/{component}/config", Change),
    ("POST", "/v1/components/objects/{component}/move", Move),
    // A claim, as a move's.
    ("POST", "/v1/components/objects/{component}/claim", Rule),
    ("GET", "/v1/vms", Read),
    ("POST", "/v1/vms", Change),
    ("GET", "/v1/vms/{vm}", Read),
    ("DELETE", "/v1/vms/{vm}", Change),
    ("POST", "/v1/vms/{vm}/start", Change),
    ("POST", "/v1/vms/{vm}/stop", Change),
    ("POST", "/v1/vms/{vm}/monitor", Rule),
    ("GET", "/v1/vms/{vm}/prediction", Read),
    ("POST", "/v1/vms/{vm}/profiles", Change),
    ("GET", "/v1/vms/{vm}/profiles", Read),
    ("GET", "/v1/vms/{vm}/profiles/{start}", Read),
    ("GET", "/v1/volumes", Read),
    // With repair it writes.
    ("POST", "/v1/volumes/{volume}/verify", Change),
    // A file of the volume's host.
    ("POST", "/v1/volumes/{volume}/image", Rule),
    ("GET", "/v1/volumes/{volume}/image", Read),
    ("DELETE", "/v1/volumes/{volume}/image", Rule),
    // A claim, as a move's.
    ("POST", "/v1/volumes/{volume}/promote", Rule),
    ("GET", "/v1/precaches", Read),
    ("POST", "/v1/precaches", Change),
    ("DELETE", "/v1/precaches/{volume}/{to}", Change),
    ("GET", "/v1/wires", Read),
    // Of both ends' objects: the handlers look.
    ("GET", "/v1/port-wires", Read),
    ("POST", "/v1/port-wires", Change),
    ("POST", "/v1/port-wires/rewire", Change),
    ("GET", "/v1/port-wires/{wire}", Read),
    ("DELETE", "/v1/port-wires/{wire}", Change),
    // Of the deployment: all customers' wires take them.
    ("GET", "/v1/extenders", ReadAll),
    ("POST", "/v1/extenders", Rule),
    ("GET", "/v1/extenders/{a}/{b}", ReadAll),
    ("POST", "/v1/extenders/{a}/{b}/rotate", Rule),
    ("POST", "/v1/extenders/{a}/{b}/disconnect", Rule),
    // What passes is the owner's to see, and of whoever may disconnect it.
    ("POST", "/v1/port-wires/{wire}/capture", Change),
    ("GET", "/v1/moves", Read),
    ("POST", "/v1/moves", Move),
    ("POST", "/v1/moves/together", Move),
    ("GET", "/v1/moves/{id}", Read),
    ("POST", "/v1/moves/{id}/cancel", Move),
    ("POST", "/v1/moves/{id}/limit", Move),
    ("POST", "/v1/moves/{id}/retry", Move),
    // A claim sets the rules aside by which there is one owner.
    ("POST", "/v1/moves/{id}/resolve", Rule),
    ("GET", "/v1/network", ReadAll),
    ("GET", "/v1/orphans", ReadAll),
    ("DELETE", "/v1/orphans/{host}/{orphan}", Rule),
    // Each domain its own, and what is everybody's to read.
    ("GET", "/v1/events", Read),
    ("GET", "/metrics", ReadAll),
    ("GET", "/v1/openapi.json", Read),
    ("GET", "/v1/revocations", ReadAll),
    ("POST", "/v1/revocations", Rule),
    ("GET", "/v1/tokens", ReadAll),
    ("POST", "/v1/tokens", Rule),
    ("DELETE", "/v1/tokens/{token}", Rule),
    ("POST", "/v1/renewal", Node),
    // The token in it is the proof.
    ("POST", "/v1/enrolment", Anybody),
];

/// The right that a route takes.
#[must_use]
pub fn right(method: &Method, route: &str) -> Option<Right> {
    // HEAD is answered as GET is, without its body.
    let method = if method == Method::HEAD { &Method::GET } else { method };
    RULES.iter().find(|(m, r, _)| *m == method.as_str() && *r == route).map(|(_, _, right)| *right)
}

/// Who asks, and how much of the deployment is theirs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caller {
    /// For messages.
    name: String,
    kind: CallerKind,
    /// The hash of the token that they have shown.
    token: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum CallerKind {
    /// By certificate.
    Holder(Role),
    /// By token.
    Domain(Name, TokenRole),
}

impl Caller {
    fn holder(who: &Identity) -> Self {
        Self { name: who.to_string(), kind: CallerKind::Holder(who.role()), token: None }
    }

    /// Somebody of a domain.
    #[must_use]
    pub fn of_domain(name: &Name, domain: Name, role: TokenRole) -> Self {
        Self { name: format!("token/{name}"), kind: CallerKind::Domain(domain, role), token: None }
    }

    /// By this token.
    #[must_use]
    pub fn by_token(self, hash: String) -> Self {
        Self { token: Some(hash), ..self }
    }

    /// Whether they may still ask what they asked when they came: tokens end, and are removed.
    #[must_use]
    pub fn is_good(&self, c: &Controller) -> bool {
        self.token.as_ref().is_none_or(|hash| tokens::is_good(c, hash))
    }

    /// The domain that they are confined to; none: the deployment.
    #[must_use]
    pub fn domain(&self) -> Option<&Name> {
        match &self.kind {
            CallerKind::Domain(domain, _) => Some(domain),
            CallerKind::Holder(_) => None,
        }
    }

    /// Whether a VM is theirs to see.
    #[must_use]
    pub fn sees(&self, vm: &VmRecord) -> bool {
        self.domain().is_none_or(|mine| vm.domain.as_ref() == Some(mine))
    }

    /// Refuses what is not in their domain as if it were not there.
    ///
    /// # Errors
    /// [`Problem::NotFound`], or the store's.
    pub fn find(&self, c: &Controller, vm: &Name) -> Result<(), ApiError> {
        if self.domain().is_none() {
            return Ok(());
        }
        let theirs = c.vm_records()?.iter().any(|record| &record.definition.name == vm && self.sees(record));
        if theirs { Ok(()) } else { Err(missing("VM", vm)) }
    }

    /// The numbers of the VMs that are theirs; none: all.
    ///
    /// # Errors
    /// The store's.
    pub fn vms(&self, c: &Controller) -> Result<Option<HashSet<godwit_units::VmId>>, ApiError> {
        if self.domain().is_none() {
            return Ok(None);
        }
        Ok(Some(c.vm_records()?.iter().filter(|vm| self.sees(vm)).map(|vm| vm.definition.id).collect()))
    }

    /// Refuses a VM that would reach into its host, to whoever is confined to a domain.
    ///
    /// # Errors
    /// [`Problem::Forbidden`].
    pub fn may_create(&self, new: &CreateVm) -> Result<(), ApiError> {
        let what = if new.spec.disks.iter().any(|disk| disk.from.is_some()) {
            "a disk that is copied from a file of its host"
        } else if new.spec.disks.iter().any(|disk| disk.store.is_some()) {
            "a disk that lies on what its host names"
        } else if !new.spec.devices.is_empty() {
            "devices of its own"
        } else {
            return Ok(());
        };
        if self.domain().is_none() {
            return Ok(());
        }
        Err(ApiError::new(Problem::Forbidden, format!("{} may not create a VM with {what}", self.name))
            .remedy("ask an admin of the deployment"))
    }

    /// Whether a move may put volumes on devices of its destination.
    ///
    /// # Errors
    /// [`Problem::Forbidden`].
    pub fn may_place(&self) -> Result<(), ApiError> {
        if matches!(self.kind, CallerKind::Holder(Role::Client(Access::Admin))) {
            return Ok(());
        }
        Err(ApiError::new(Problem::Forbidden, format!("{} may not name devices of a host", self.name))
            .remedy("ask an admin of the deployment; or move without a place"))
    }
}

fn may(who: Option<&Caller>, right: Right) -> Result<(), ApiError> {
    let forbidden = |message: String, remedy: &str| Err(ApiError::new(Problem::Forbidden, message).remedy(remedy));
    let Some(who) = who else {
        if right == Anybody {
            return Ok(());
        }
        return forbidden("nobody knows who asks".into(), "ask with a certificate, or with a token");
    };
    let good = match (&who.kind, right) {
        (_, Anybody) => true,
        (CallerKind::Holder(role), Node) => *role == Role::Node,
        (CallerKind::Holder(Role::Client(Access::Admin)), _) => true,
        (CallerKind::Holder(Role::Client(Access::Operator)), Read | ReadAll | Move) => true,
        (CallerKind::Domain(_, TokenRole::Admin), Read | Move | Change) => true,
        (CallerKind::Domain(_, TokenRole::Operator), Read | Move) => true,
        (CallerKind::Domain(_, TokenRole::Viewer), Read) => true,
        _ => false,
    };
    if good {
        return Ok(());
    }
    let name = &who.name;
    match (&who.kind, right) {
        (CallerKind::Holder(Role::Client(Access::Operator)), Change | Rule) => {
            forbidden(format!("{name} may read and move, nothing else"), "ask with a certificate of the role admin")
        }
        (_, Node) => forbidden(format!("{name} is no node"), "nodes ask this by themselves"),
        (CallerKind::Holder(_), _) => forbidden(
            format!("{name} may not ask a controller"),
            "ask with a certificate of the role admin or operator",
        ),
        (CallerKind::Domain(_, role), ReadAll | Rule) => forbidden(
            format!("{name} ({role}) may not ask for what belongs to the deployment"),
            "ask with a certificate",
        ),
        (CallerKind::Domain(_, role), _) => {
            forbidden(format!("{name} is a {role}, who may not do this"), "ask with a token of another role")
        }
    }
}

/// Who asks: the holder of a certificate, else of a token.
fn caller(c: &Controller, who: Option<&Identity>, request: &Request) -> Result<Option<Caller>, ApiError> {
    if let Some(who) = who {
        return Ok(Some(Caller::holder(who)));
    }
    let Some(header) = request.headers().get(header::AUTHORIZATION) else { return Ok(None) };
    let token = header.to_str().ok().and_then(|text| text.strip_prefix("Bearer "));
    let token = token.ok_or_else(|| ApiError::new(Problem::Forbidden, "Authorization: write `Bearer TOKEN`"))?;
    tokens::caller(c, token).map(Some)
}

/// Whether what the path names is the caller's: a VM, or a move of one. Parameters are as handlers get them, decoded: what is looked at here
/// is what they will look up.
fn theirs(c: &Controller, who: &Caller, parameters: &RawPathParams) -> Result<(), ApiError> {
    if who.domain().is_none() {
        return Ok(());
    }
    let Some((what, value)) = parameters.iter().find(|(what, _)| matches!(*what, "vm" | "id")) else { return Ok(()) };
    if what == "vm" {
        // There is nothing of a name that is none.
        return value.parse().map_or_else(|_| Err(missing("VM", value)), |vm| who.find(c, &vm));
    }
    let Ok(id) = value.parse::<u64>() else { return Err(missing("move", value)) };
    let vm = c.move_record(godwit_units::MoveId(id))?.order.vm;
    let record: Option<VmRecord> = c.store.read(Kind::Vm, vm.0)?;
    if record.is_some_and(|vm| who.sees(&vm)) { Ok(()) } else { Err(missing("move", id)) }
}

/// Lets a request pass, or not. Whoever asks is an extension of it from then on.
pub async fn guard(
    State(c): State<Arc<Controller>>,
    who: Option<Extension<Identity>>,
    mut request: Request,
    next: Next,
) -> Response {
    let Some(route) = request.extensions().get::<MatchedPath>().cloned() else {
        // No such path: the router says so, in the same words to everybody.
        return next.run(request).await;
    };
    let Some(right) = right(request.method(), route.as_str()) else {
        let takes: Vec<&str> = RULES.iter().filter(|(_, r, _)| *r == route.as_str()).map(|(m, _, _)| *m).collect();
        return (StatusCode::METHOD_NOT_ALLOWED, [(header::ALLOW, takes.join(","))]).into_response();
    };
    let (mut parts, body) = request.into_parts();
    let parameters = match RawPathParams::from_request_parts(&mut parts, &()).await {
        Ok(parameters) => parameters,
        Err(refusal) => return refusal.into_response(),
    };
    request = Request::from_parts(parts, body);
    let checked = caller(&c, who.as_ref().map(|Extension(who)| who), &request).and_then(|who| {
        may(who.as_ref(), right)?;
        if let Some(who) = &who {
            theirs(&c, who, &parameters)?;
        }
        Ok(who)
    });
    match checked {
        Ok(Some(who)) => {
            request.extensions_mut().insert(who);
            next.run(request).await
        }
        Ok(None) => next.run(request).await,
        Err(error) => error.into_response(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The routes as `lib.rs` has them.
    fn routes() -> Vec<(String, String)> {
        let source = include_str!("lib.rs");
        let mut found = vec![];
        for line in source.lines().filter_map(|l| l.trim().strip_prefix(".route(\"")) {
            let (path, handlers) = line.split_once('"').unwrap();
            for method in ["get", "post", "put", "delete", "patch"] {
                if handlers.contains(&format!(" {method}(")) || handlers.contains(&format!(".{method}(")) {
                    found.push((method.to_uppercase(), path.to_owned()));
                }
            }
        }
        found
    }

    #[test]
    fn every_route_has_a_rule_and_every_rule_a_route() {
        let routes = routes();
        assert!(routes.len() > 25, "{routes:?}");
        for (method, path) in &routes {
            let method = Method::from_bytes(method.as_bytes()).unwrap();
            assert!(right(&method, path).is_some(), "{method} {path} has no rule in rights.rs");
        }
        for (method, path, _) in RULES {
            assert!(routes.iter().any(|(m, p)| m == method && p == path), "{method} {path} is no route");
        }
    }

    #[test]
    fn nobody_may_do_anything_but_enrol_and_only_admins_change() {
        let holder = |role, name: &str| Caller::holder(&Identity::new(role, name).unwrap());
        let admin = holder(Role::Client(Access::Admin), "a");
        let operator = holder(Role::Client(Access::Operator), "o");
        let node = holder(Role::Node, "n");
        let token = |role| Caller::of_domain(&"t".parse().unwrap(), "d".parse().unwrap(), role);
        let plan = "/v1/sites/{site}/evacuation-plan";
        let ours = [
            "/v1/hosts",
            "/v1/revocations",
            "/v1/tokens",
            "/v1/orphans",
            "/v1/extenders",
            "/v1/network",
            "/metrics",
            plan,
        ];
        for (method, path, right) in RULES {
            let case = format!("{method} {path}");
            // A plan is asked for with a body, and changes nothing.
            let reads = *method == "GET" || *path == plan;
            let component = path.starts_with("/v1/components/objects") && !path.ends_with("claim");
            let moves =
                path.starts_with("/v1/moves") && !path.ends_with("resolve") || component && path.ends_with("/move");
            let vms = component
                || path.starts_with("/v1/precaches")
                || path.ends_with("/verify")
                || path.starts_with("/v1/port-wires")
                || path.starts_with("/v1/vms") && !path.ends_with("monitor");
            let shared = reads && !ours.iter().any(|o| path.starts_with(o));
            let open = *right == Anybody;
            assert_eq!(may(None, *right).is_ok(), *path == "/v1/enrolment", "{case}");
            assert_eq!(may(Some(&operator), *right).is_ok(), reads || moves || open, "{case}");
            assert_eq!(may(Some(&admin), *right).is_ok(), *right != Node, "{case}");
            assert_eq!(may(Some(&node), *right).is_ok(), matches!(right, Node | Anybody), "{case}");
            assert_eq!(may(Some(&token(TokenRole::Viewer)), *right).is_ok(), shared || open, "{case}");
            assert_eq!(may(Some(&token(TokenRole::Operator)), *right).is_ok(), shared || moves || open, "{case}");
            assert_eq!(may(Some(&token(TokenRole::Admin)), *right).is_ok(), shared || moves || vms || open, "{case}");
        }
    }
}
