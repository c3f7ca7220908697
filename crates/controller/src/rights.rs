//! Who may ask what: one table, and one place that goes by it.
//!
//! Every request passes [`guard`] before anything else looks at it. A route that the table does not have is refused, so that
//! one that somebody adds and forgets here serves nobody rather than everybody.

use axum::extract::{Extension, MatchedPath, Request};
use axum::http::{Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use godwit_api::{ApiError, Problem};
use godwit_trust::{Access, Identity, Role};

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
    /// To change everything.
    Change,
}

use Right::{Anybody, Change, Move, Node, Read};

/// Method, route and right.
pub const RULES: &[(&str, &str, Right)] = &[
    ("GET", "/v1/sites", Read),
    ("POST", "/v1/sites", Change),
    ("DELETE", "/v1/sites/{site}", Change),
    ("GET", "/v1/hosts", Read),
    ("POST", "/v1/hosts", Change),
    ("GET", "/v1/hosts/{host}", Read),
    ("DELETE", "/v1/hosts/{host}", Change),
    ("POST", "/v1/hosts/{host}/token", Change),
    ("POST", "/v1/hosts/{host}/revoke", Change),
    ("GET", "/v1/components", Read),
    ("POST", "/v1/components", Change),
    ("DELETE", "/v1/components/{component}", Change),
    ("GET", "/v1/vms", Read),
    ("POST", "/v1/vms", Change),
    ("GET", "/v1/vms/{vm}", Read),
    ("DELETE", "/v1/vms/{vm}", Change),
    ("POST", "/v1/vms/{vm}/start", Change),
    ("POST", "/v1/vms/{vm}/stop", Change),
    ("POST", "/v1/vms/{vm}/monitor", Change),
    ("GET", "/v1/volumes", Read),
    ("GET", "/v1/wires", Read),
    ("GET", "/v1/moves", Read),
    ("POST", "/v1/moves", Move),
    ("GET", "/v1/moves/{id}", Read),
    ("POST", "/v1/moves/{id}/cancel", Move),
    ("POST", "/v1/moves/{id}/limit", Move),
    ("POST", "/v1/moves/{id}/retry", Move),
    ("POST", "/v1/moves/{id}/resolve", Change),
    ("GET", "/v1/orphans", Read),
    ("DELETE", "/v1/orphans/{host}/{orphan}", Change),
    ("GET", "/v1/events", Read),
    ("GET", "/metrics", Read),
    ("GET", "/v1/openapi.json", Read),
    ("GET", "/v1/revocations", Read),
    ("POST", "/v1/revocations", Change),
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

fn may(who: Option<&Identity>, right: Right) -> Result<(), ApiError> {
    let forbidden = |message: String, remedy: &str| Err(ApiError::new(Problem::Forbidden, message).remedy(remedy));
    let role = who.map(Identity::role);
    match (right, role) {
        (Anybody, _) | (Node, Some(Role::Node)) => Ok(()),
        (Read | Move | Change, Some(Role::Client(Access::Admin))) => Ok(()),
        (Read | Move, Some(Role::Client(Access::Operator))) => Ok(()),
        (_, None) => forbidden("nobody knows who asks".into(), "ask with a certificate"),
        (Change, Some(Role::Client(Access::Operator))) => forbidden(
            format!("{} may read and move, nothing else", shown(who)),
            "ask with a certificate of the role admin",
        ),
        (Node, _) => forbidden(format!("{} is no node", shown(who)), "nodes ask this by themselves"),
        (Read | Move | Change, Some(Role::Controller | Role::Node)) => forbidden(
            format!("{} may not ask a controller", shown(who)),
            "ask with a certificate of the role admin or operator",
        ),
    }
}

fn shown(who: Option<&Identity>) -> String {
    who.map_or_else(|| "nobody".into(), ToString::to_string)
}

/// Lets a request pass, or not.
pub async fn guard(who: Option<Extension<Identity>>, request: Request, next: Next) -> Response {
    let Some(route) = request.extensions().get::<MatchedPath>() else {
        // No such path: the router says so, in the same words to everybody.
        return next.run(request).await;
    };
    let Some(right) = right(request.method(), route.as_str()) else {
        let takes: Vec<&str> = RULES.iter().filter(|(_, r, _)| *r == route.as_str()).map(|(m, _, _)| *m).collect();
        return (StatusCode::METHOD_NOT_ALLOWED, [(header::ALLOW, takes.join(","))]).into_response();
    };
    match may(who.as_ref().map(|Extension(who)| who), right) {
        Ok(()) => next.run(request).await,
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
        let admin = Identity::new(Role::Client(Access::Admin), "a").unwrap();
        let operator = Identity::new(Role::Client(Access::Operator), "o").unwrap();
        let node = Identity::node("n").unwrap();
        for (method, path, right) in RULES {
            assert_eq!(may(None, *right).is_ok(), *path == "/v1/enrolment", "{method} {path}");
            let reads = *method == "GET";
            // A claim sets the rules aside by which there is one owner: that is not moving.
            let moves = path.starts_with("/v1/moves") && !path.ends_with("/resolve");
            assert_eq!(may(Some(&operator), *right).is_ok(), reads || moves || *right == Anybody, "{method} {path}");
            assert_eq!(may(Some(&admin), *right).is_ok(), *right != Node, "{method} {path}");
            let own = matches!(right, Node | Anybody);
            assert_eq!(may(Some(&node), *right).is_ok(), own, "{method} {path}");
        }
    }
}
