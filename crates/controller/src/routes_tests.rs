//! The router and the document list the same requests.

use crate::router;
use crate::testing::controller;
use axum::Extension;
use axum::body::Body;
use axum::http::{Method, Request, header};
use godwit_api::openapi;
use godwit_trust::{Access, Identity, Role};
use std::collections::BTreeSet;
use tower::ServiceExt;

/// Every path of the router.
fn paths() -> BTreeSet<String> {
    let text = include_str!("lib.rs");
    let path = |after: &str| after.trim_start().strip_prefix('"')?.split('"').next().map(str::to_owned);
    let path = |after: &str| path(after).unwrap_or_else(|| panic!("a route whose path is no text here: {after:.60}"));
    text.split(".route(").skip(1).map(path).collect()
}

#[tokio::test]
async fn the_document_has_every_route_and_no_other() {
    let (_folder, controller) = controller();
    let admin = Identity::new(Role::Client(Access::Admin), "ann").unwrap();
    let router = router(controller).layer(Extension(admin));

    let mut served = BTreeSet::new();
    for path in paths() {
        // A method that nothing takes: the answer names those that the path does take.
        let concrete: Vec<&str> = path.split('/').map(|part| if part.starts_with('{') { "1" } else { part }).collect();
        let request = Request::builder().method(Method::TRACE).uri(concrete.join("/")).body(Body::empty()).unwrap();
        let answer = router.clone().oneshot(request).await.unwrap();
        let allow = answer.headers().get(header::ALLOW).unwrap_or_else(|| panic!("{path} is not served"));
        for method in allow.to_str().unwrap().split(',').filter(|m| *m != "HEAD") {
            served.insert((path.clone(), method.to_lowercase()));
        }
    }
    assert!(served.len() > 20, "{served:?}");
    let described: BTreeSet<(String, String)> =
        openapi::operations().into_iter().map(|o| (o.path.to_owned(), o.method.to_owned())).collect();
    let missing: Vec<_> = served.difference(&described).collect();
    assert!(
        missing.is_empty(),
        "routes that the document does not have, add them to openapi::operations(): {missing:?}"
    );
    let idle: Vec<_> = described.difference(&served).collect();
    assert!(idle.is_empty(), "the document describes what nothing serves: {idle:?}");
}
