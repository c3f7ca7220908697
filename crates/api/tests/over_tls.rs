//! Server and client over loopback, with certificates of a real authority.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use axum::extract::{Extension, Path};
use axum::routing::{get, post};
use axum::{Json, Router};
use godwit_api::host::SetLimit;
use godwit_api::server::{MAX_BODY, MAX_STRANGERS, PATIENCE};
use godwit_api::{ApiError, Client, Problem, only, serve, serve_anybody};
use godwit_trust::{Access, Authority, Credentials, Identity, PeerCertificate, Role, Validity};
use godwit_units::BitRate;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject};
use serde_json::{Value, json};
use std::collections::HashSet;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

const WITHIN: Duration = Duration::from_secs(60);
/// How long the slow server takes.
const SLOW: Duration = Duration::from_secs(60);
const ADMIN: Role = Role::Client(Access::Admin);

/// An authority, and where its certificates go.
struct World {
    folder: TempDir,
    authority: Authority,
}

impl World {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let authority = Authority::create(&folder.path().join("ca")).unwrap();
        Self { folder, authority }
    }

    fn credentials(&self, role: Role, name: &str) -> Credentials {
        let out = self.folder.path().join(format!("{role}-{name}"));
        let identity = Identity::new(role, name).unwrap();
        self.authority.issue(&identity, Validity::days(1)).unwrap().write(&out).unwrap();
        Credentials::load(&out).unwrap()
    }
}

fn node() -> Identity {
    Identity::node("texas").unwrap()
}

fn router() -> Router {
    Router::new()
        .route("/who", get(|Extension(who): Extension<Identity>| async move { Json(who.to_string()) }))
        .route(
            "/shown",
            get(|Extension(shown): Extension<PeerCertificate>| async move { Json(shown.identity.to_string()) }),
        )
        .route(
            "/echo",
            post(|Json(value): Json<Value>| async move { Json(value) }).put(|Json(v): Json<Value>| async { Json(v) }),
        )
        .route("/limit", post(|Json(limit): Json<SetLimit>| async move { Json(limit) }))
        .route("/number/{n}", get(|Path(n): Path<u32>| async move { Json(n) }))
        .route(
            "/blocked",
            get(|| async {
                Err::<Json<()>, _>(ApiError::new(Problem::Blocked, "no room on `texas`").remedy("make some"))
            }),
        )
        .route("/slow", get(|| async { tokio::time::sleep(SLOW).await }))
        .route("/nothing", post(|Json(_): Json<Value>| async {}))
}

/// A server, ended by the sender.
async fn server(world: &World, router: Router) -> (SocketAddr, oneshot::Sender<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let credentials = world.credentials(Role::Node, "texas");
    let (stop, stopped) = oneshot::channel::<()>();
    tokio::spawn(async move {
        serve(listener, router, &credentials, async { drop(stopped.await) }).await.unwrap();
    });
    (address, stop)
}

#[tokio::test]
async fn a_request_arrives_with_the_name_of_whoever_asks() {
    let world = World::new();
    let (address, _stop) = server(&world, router()).await;
    let client = Client::new(address, node(), &world.credentials(ADMIN, "ann"), WITHIN);
    assert_eq!(client.get::<String>("/who").await.unwrap(), "admin/ann");
    assert_eq!(client.get::<String>("/shown").await.unwrap(), "admin/ann");
    let body = json!({"text": "ä", "list": [1, 2]});
    assert_eq!(client.post::<Value>("/echo", &body).await.unwrap(), body);
    assert_eq!(client.put::<Value>("/echo", &body).await.unwrap(), body);
    client.post::<()>("/nothing", &json!({})).await.unwrap();
    let limit = SetLimit { limit: Some(BitRate(5)) };
    assert_eq!(client.post::<SetLimit>("/limit", &limit).await.unwrap(), limit);
}

#[tokio::test]
async fn connections_are_used_again_and_replaced_when_the_server_restarts() {
    let world = World::new();
    let seen = Arc::new(Mutex::new(0));
    let (address, stop) = server(&world, router()).await;
    let client = Client::new(address, node(), &world.credentials(ADMIN, "ann"), WITHIN);
    // A proxy counts connections.
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let through = Client::new(listener.local_addr().unwrap(), node(), &world.credentials(ADMIN, "ann"), WITHIN);
    let count = Arc::clone(&seen);
    tokio::spawn(async move {
        loop {
            let (mut from, _) = listener.accept().await.unwrap();
            *count.lock().unwrap() += 1;
            tokio::spawn(async move {
                let mut to = TcpStream::connect(address).await.unwrap();
                drop(tokio::io::copy_bidirectional(&mut from, &mut to).await);
            });
        }
    });
    for _ in 0..20 {
        through.get::<String>("/who").await.unwrap();
    }
    assert_eq!(*seen.lock().unwrap(), 1);

    client.get::<String>("/who").await.unwrap();
    drop(stop);
    let error = loop {
        match client.get::<String>("/who").await {
            Err(error) => break error,
            Ok(_) => tokio::time::sleep(Duration::from_millis(20)).await,
        }
    };
    assert_eq!(error.problem, Problem::Unreachable, "{error}");
    let listener = loop {
        match TcpListener::bind(address).await {
            Ok(listener) => break listener,
            Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
        }
    };
    let credentials = world.credentials(Role::Node, "texas");
    tokio::spawn(async move { serve(listener, router(), &credentials, std::future::pending()).await });
    assert_eq!(client.get::<String>("/who").await.unwrap(), "admin/ann");
}

#[tokio::test]
async fn every_refusal_is_an_error_with_what_and_where() {
    let world = World::new();
    let (address, _stop) = server(&world, router()).await;
    let client = Client::new(address, node(), &world.credentials(ADMIN, "ann"), WITHIN);
    let blocked = client.get::<Value>("/blocked").await.unwrap_err();
    let mut expected = ApiError::new(Problem::Blocked, "no room on `texas`").remedy("make some");
    expected.place = Some("node/texas: GET /blocked".into());
    assert_eq!(blocked, expected);
    let refused = [
        (client.get::<Value>("/nowhere").await, Problem::NotFound, "GET /nowhere"),
        (client.delete::<Value>("/who").await, Problem::NotFound, "method"),
        (client.get::<Value>("/number/x").await, Problem::Invalid, "`x`"),
        (client.post::<Value>("/limit", &json!({"limit": "fast"})).await, Problem::Invalid, "limit: invalid type"),
        (client.post::<Value>("/echo", &"x".repeat(MAX_BODY)).await, Problem::Invalid, "is longer than"),
    ];
    for (answer, problem, said) in refused {
        let error = answer.unwrap_err();
        assert_eq!(error.problem, problem, "{error}");
        assert!(error.message.contains(said), "{said} in: {error}");
    }
    let misread = client.get::<u32>("/who").await.unwrap_err();
    assert!(misread.to_string().contains("same version"), "{misread}");
}

#[tokio::test]
async fn a_role_that_may_not_ask_is_told_so() {
    let world = World::new();
    let (address, _stop) = server(&world, only(router(), Role::Controller)).await;
    let client = Client::new(address, node(), &world.credentials(ADMIN, "ann"), WITHIN);
    for path in ["/who", "/nowhere"] {
        let error = client.get::<Value>(path).await.unwrap_err();
        assert_eq!(error.problem, Problem::Forbidden);
        assert!(error.message.contains("admin/ann") && error.message.contains("controller"), "{error}");
    }
    let client = Client::new(address, node(), &world.credentials(Role::Controller, "c"), WITHIN);
    client.get::<String>("/who").await.unwrap();
}

#[tokio::test]
async fn a_server_of_another_authority_is_not_asked() {
    let (ours, theirs) = (World::new(), World::new());
    let (address, _stop) = server(&ours, router()).await;
    let error = Client::new(address, node(), &theirs.credentials(ADMIN, "ann"), WITHIN).get::<Value>("/who").await;
    let error = error.unwrap_err();
    assert_eq!(error.problem, Problem::Unreachable);
    assert!(error.message.contains("not signed by our CA"), "{error}");
}

#[tokio::test]
async fn a_server_that_is_not_who_was_meant_is_not_asked() {
    let world = World::new();
    let (address, _stop) = server(&world, router()).await;
    let ann = world.credentials(ADMIN, "ann");
    for other in [Identity::node("ohio").unwrap(), Identity::new(Role::Controller, "texas").unwrap()] {
        let error = Client::new(address, other, &ann, WITHIN).get::<Value>("/who").await.unwrap_err();
        assert_eq!(error.problem, Problem::Unreachable);
        assert!(error.message.contains("node-texas") || error.message.contains("node/texas"), "{error}");
    }
}

/// A client that trusts `world`'s authority, and shows the certificate in `shown`.
async fn connect(
    world: &World,
    address: SocketAddr,
    shown: Option<&std::path::Path>,
) -> std::io::Result<TlsStream<TcpStream>> {
    let mut roots = rustls::RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(world.folder.path().join("ca/ca.pem")).unwrap()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_root_certificates(roots);
    let config = match shown {
        None => config.with_no_client_auth(),
        Some(dir) => {
            let chain = vec![CertificateDer::from_pem_file(dir.join("cert.pem")).unwrap()];
            config.with_client_auth_cert(chain, PrivateKeyDer::from_pem_file(dir.join("key.pem")).unwrap()).unwrap()
        }
    };
    let tcp = TcpStream::connect(address).await.unwrap();
    TlsConnector::from(Arc::new(config)).connect(node().server_name(), tcp).await
}

/// What such a client gets.
async fn raw(world: &World, address: SocketAddr, shown: Option<&std::path::Path>) -> Vec<u8> {
    let mut answer = vec![];
    // With TLS 1.3 the client's side of the handshake is done before the server has refused it.
    if let Ok(mut tls) = connect(world, address, shown).await {
        drop(tls.write_all(b"GET /who HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").await);
        drop(tls.read_to_end(&mut answer).await);
    }
    answer
}

#[tokio::test]
async fn nobody_gets_an_answer_without_a_certificate_of_the_authority() {
    let (ours, theirs) = (World::new(), World::new());
    let (address, _stop) = server(&ours, router()).await;
    ours.credentials(ADMIN, "ann");
    theirs.credentials(ADMIN, "ann");
    let answer = raw(&ours, address, Some(&ours.folder.path().join("admin-ann"))).await;
    assert!(answer.starts_with(b"HTTP/1.1 200"), "the same client with a good certificate is answered");
    assert_eq!(raw(&ours, address, Some(&theirs.folder.path().join("admin-ann"))).await, b"");
    assert_eq!(raw(&ours, address, None).await, b"");
    // And one that speaks no TLS at all.
    let (mut tcp, mut answer) = (TcpStream::connect(address).await.unwrap(), vec![]);
    tcp.write_all(b"GET /who HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
    drop(tcp.read_to_end(&mut answer).await);
    assert!(!String::from_utf8_lossy(&answer).contains("HTTP"));
}

#[tokio::test]
async fn half_a_body_is_not_waited_for_and_those_without_a_certificate_leave_places_to_others() {
    let world = World::new();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let credentials = world.credentials(Role::Node, "texas");
    tokio::spawn(async move { serve_anybody(listener, router(), &credentials, std::future::pending()).await });
    let began = Instant::now();
    let mut strangers = vec![];
    for _ in 0..=MAX_STRANGERS {
        let mut tls = connect(&world, address, None).await.unwrap();
        let head = "POST /echo HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{";
        drop(tls.write_all(head.as_bytes()).await);
        strangers.push(tls);
    }
    let opened = began.elapsed();
    let client = Client::new(address, node(), &world.credentials(ADMIN, "ann"), WITHIN);
    assert_eq!(client.get::<String>("/who").await.unwrap(), "admin/ann");

    let mut answered = 0;
    for mut tls in strangers {
        let mut answer = vec![];
        let ended = tokio::time::timeout(WITHIN, tls.read_to_end(&mut answer)).await;
        assert!(ended.is_ok(), "a connection stands that has brought half a body: {answer:?}");
        let answer = String::from_utf8_lossy(&answer).into_owned();
        answered += usize::from(!answer.is_empty());
        assert!(answer.is_empty() || answer.contains("it did not come within"), "{answer}");
    }
    // Where they came so slowly that the first ones had gone already, there was a place for the last one, too.
    assert!(answered == MAX_STRANGERS || opened > PATIENCE, "{answered} strangers were served");
    assert!(!raw(&world, address, None).await.is_empty(), "their places are not free again");
}

#[tokio::test]
async fn a_server_that_does_not_answer_is_given_up_in_time() {
    let world = World::new();
    let (address, _stop) = server(&world, router()).await;
    let client = Client::new(address, node(), &world.credentials(ADMIN, "ann"), Duration::from_millis(300));
    let began = Instant::now();
    let error = client.get::<Value>("/slow").await.unwrap_err();
    assert!(error.message.contains("no answer to GET /slow"), "{error}");
    // Somebody who listens, and says nothing: not even a handshake.
    let mute = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let to_mute =
        Client::new(mute.local_addr().unwrap(), node(), &world.credentials(ADMIN, "ann"), Duration::from_millis(300));
    assert_eq!(to_mute.get::<Value>("/who").await.unwrap_err().problem, Problem::Unreachable);
    assert!(began.elapsed() < SLOW, "it was waited for");
}

#[tokio::test]
async fn requests_under_way_end_when_the_server_is_told_to() {
    let world = World::new();
    let arrived = Arc::new(tokio::sync::Notify::new());
    let here = Arc::clone(&arrived);
    let work = get(move || async move {
        here.notify_one();
        tokio::time::sleep(Duration::from_millis(300)).await;
        Json("done")
    });
    let (address, stop) = server(&world, Router::new().route("/work", work)).await;
    let client = Client::new(address, node(), &world.credentials(ADMIN, "ann"), WITHIN);
    let asking = tokio::spawn(async move { client.get::<String>("/work").await });
    arrived.notified().await;
    drop(stop);
    assert_eq!(asking.await.unwrap().unwrap(), "done");
}

#[test]
fn every_problem_has_its_own_status() {
    let all = [
        Problem::Invalid,
        Problem::Forbidden,
        Problem::NotFound,
        Problem::Conflict,
        Problem::Blocked,
        Problem::Failed,
        Problem::Unreachable,
    ];
    let statuses: HashSet<u16> = all.map(Problem::status).into();
    assert_eq!(statuses.len(), all.len());
}
