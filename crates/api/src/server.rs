//! Serves a router over HTTP/1.1 and mutual TLS: who asks is known before a byte of the request is read.
//!
//! # What can go wrong
//!
//! A peer that shows no certificate, or one of another authority, fails in the handshake. One that says nothing, or
//! only half a request, be it half of its body, is cut after [`PATIENCE`]. One that opens many connections finds
//! [`MAX_CONNECTIONS`] of them served and the rest waiting; those without a certificate have [`MAX_STRANGERS`] of these places, and more
//! are closed. A body beyond [`MAX_BODY`] is refused before it is held.
//!
//! Whatever handler, extractor or router refuses a request, the answer's body is an [`ApiError`] that says what, where
//! and what to do: `refusal` translates answers in plain text, so that handlers may use axum's own `Json` and `Path`.

use crate::{ApiError, Problem};
use axum::body::{Body, Bytes};
use axum::extract::{DefaultBodyLimit, Extension, Request};
use axum::http::StatusCode;
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use axum::{Json, Router};
use godwit_trust::{Credentials, Identity, PeerCertificate, Role};
use hyper::body::{Frame, SizeHint};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::time::{Sleep, sleep, timeout};
use tokio_rustls::TlsAcceptor;

/// The protocol's name in the handshake: a node's link cannot be mistaken for its API.
pub const ALPN: &[u8] = b"http/1.1";

/// Connections served at once. A controller has one for each person and program that follows something; a node a few.
pub const MAX_CONNECTIONS: usize = 256;

/// How many of them may be those of peers without a certificate: people with tokens, hosts that enrol, and anybody. Others always find the rest.
pub const MAX_STRANGERS: usize = MAX_CONNECTIONS / 2;

/// Longest body of a request, in bytes. The largest is a VM's definition with all its disks, some tens of KiB.
pub const MAX_BODY: usize = 1 << 20;

/// Longest head of a request, in bytes.
pub(crate) const MAX_HEAD: usize = 64 << 10;

/// How long a handshake, the head of a request, and its body may take each; an idle connection is closed after the same time.
pub const PATIENCE: Duration = Duration::from_secs(15);

/// How long requests under way may go on after `shutdown`.
pub const GRACE: Duration = Duration::from_secs(5);

/// How often a connection that stands is asked whether its peer may stay. A revoked peer that follows a stream of events
/// sees at most so much more of it.
const LOOK: Duration = Duration::from_secs(1);

/// As [`serve`], for peers without a certificate, too: their requests have no [`Identity`]. The router has to decide for each
/// request what nobody may do.
///
/// # Errors
/// As [`serve`].
pub async fn serve_anybody(
    listener: TcpListener,
    router: Router,
    credentials: &Credentials,
    shutdown: impl Future<Output = ()>,
) -> io::Result<()> {
    serve_with(listener, router, credentials, credentials.open_server_config(ALPN), shutdown).await
}

/// Serves `router` until `shutdown`; requests under way then have a few seconds to end. The peer's [`Identity`] is an
/// extension of each request, and so is its [`PeerCertificate`]; which roles may ask is the router's affair ([`only`], [`require`]).
///
/// # Errors
/// None while it runs: what fails with one peer is logged, and is that peer's loss.
pub async fn serve(
    listener: TcpListener,
    router: Router,
    credentials: &Credentials,
    shutdown: impl Future<Output = ()>,
) -> io::Result<()> {
    serve_with(listener, router, credentials, credentials.server_config(ALPN), shutdown).await
}

async fn serve_with(
    listener: TcpListener,
    router: Router,
    credentials: &Credentials,
    tls: Arc<rustls::ServerConfig>,
    shutdown: impl Future<Output = ()>,
) -> io::Result<()> {
    let router =
        router.layer(DefaultBodyLimit::max(MAX_BODY)).layer(from_fn(in_time)).layer(from_fn(crate::refusal::explain));
    let acceptor = TlsAcceptor::from(tls);
    let (places, strangers) = (Arc::new(Semaphore::new(MAX_CONNECTIONS)), Arc::new(Semaphore::new(MAX_STRANGERS)));
    let (stop, stopping) = watch::channel(());
    let mut shutdown = pin!(shutdown);
    loop {
        let place = tokio::select! {
            () = &mut shutdown => break,
            place = Arc::clone(&places).acquire_owned() => place.expect("nobody closes this semaphore"),
        };
        let accepted = tokio::select! {
            () = &mut shutdown => break,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((stream, from)) => {
                let (acceptor, router, stopping) = (acceptor.clone(), router.clone(), stopping.clone());
                let (credentials, strangers) = (credentials.clone(), Arc::clone(&strangers));
                tokio::spawn(async move {
                    if let Err(error) = connection(stream, acceptor, router, credentials, strangers, stopping).await {
                        tracing::debug!(%from, %error, "a connection to the API ended early");
                    }
                    drop(place);
                });
            }
            Err(error) => {
                // Out of file descriptors, as a rule: others will be closed.
                tracing::warn!(%error, "cannot accept a connection to the API; trying again");
                sleep(Duration::from_millis(200)).await;
            }
        }
    }
    drop(stopping);
    drop(listener);
    // Ends when the last connection has dropped its receiver.
    stop.send_replace(());
    let _ = timeout(GRACE, stop.closed()).await;
    Ok(())
}

async fn connection(
    stream: TcpStream,
    acceptor: TlsAcceptor,
    router: Router,
    credentials: Credentials,
    strangers: Arc<Semaphore>,
    mut stopping: watch::Receiver<()>,
) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let _ = stream.set_nodelay(true);
    let tls = tokio::select! {
        tls = timeout(PATIENCE, acceptor.accept(stream)) => tls??,
        _ = stopping.changed() => return Ok(()),
    };
    // That there is one, where it is demanded, is the acceptor's affair.
    let peer = tls.get_ref().1.peer_certificates().map(PeerCertificate::read).transpose()?;
    let place = peer.is_none().then(|| strangers.try_acquire()).transpose();
    let _place = place.map_err(|_| "as many peers without a certificate are served as there are places for")?;
    let router = match &peer {
        Some(peer) => {
            let (peer, credentials) = (peer.clone(), credentials.clone());
            let (allowed, shown) = (Extension(peer.identity.clone()), Extension(peer.clone()));
            // Each request anew: a connection may be kept for longer than its peer is trusted.
            let router = router.layer(from_fn(move |request: Request, next: Next| {
                let good = credentials.accepts(&peer);
                async move {
                    match good {
                        Ok(()) => next.run(request).await,
                        Err(error) => ApiError::new(Problem::Forbidden, error.to_string()).into_response(),
                    }
                }
            }));
            router.layer(allowed).layer(shown)
        }
        None => router,
    };
    let service = TowerToHyperService::new(router);
    let mut http = hyper::server::conn::http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(PATIENCE).max_buf_size(MAX_HEAD);
    let mut serving = pin!(http.serve_connection(TokioIo::new(tls), service));
    let unwelcome = async {
        let Some(peer) = &peer else { return std::future::pending().await };
        loop {
            if let Err(error) = credentials.accepts(peer) {
                return error;
            }
            sleep(LOOK).await;
        }
    };
    tokio::select! {
        done = &mut serving => return Ok(done?),
        error = unwelcome => return Err(error.into()),
        _ = stopping.changed() => serving.as_mut().graceful_shutdown(),
    }
    Ok(serving.await?)
}

/// Has each request's body come within [`PATIENCE`], or whoever reads it hears that it did not.
async fn in_time(request: Request, next: Next) -> Response {
    next.run(request.map(|body| Body::new(InTime { body, late: Box::pin(sleep(PATIENCE)) }))).await
}

/// A body that has to be there in time.
struct InTime {
    body: Body,
    late: Pin<Box<Sleep>>,
}

impl hyper::body::Body for InTime {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        if let Poll::Ready(frame) = Pin::new(&mut self.body).poll_frame(cx) {
            return Poll::Ready(frame);
        }
        self.late
            .as_mut()
            .poll(cx)
            .map(|()| Some(Err(axum::Error::new(format!("it did not come within {PATIENCE:?}")))))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// Where a listener listens; for a message when it cannot.
///
/// # Errors
/// The address is taken or not ours; the error names it.
pub async fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let named = |e: io::Error| io::Error::new(e.kind(), format!("cannot listen on {address} for the API: {e}"));
    TcpListener::bind(address).await.map_err(named)
}

/// Whether `identity` has `role`; any [`Access`](godwit_trust::Access) of a client will do.
///
/// # Errors
/// [`Problem::Forbidden`], naming who asked and who may.
pub fn require(identity: &Identity, role: Role) -> Result<(), ApiError> {
    let same = match (identity.role(), role) {
        (Role::Client(_), Role::Client(_)) => true,
        (has, wanted) => has == wanted,
    };
    if same {
        return Ok(());
    }
    let wanted = if matches!(role, Role::Client(_)) { "client".to_owned() } else { role.to_string() };
    Err(ApiError::new(
        Problem::Forbidden,
        format!("{identity} may not ask this: it takes a certificate for a {wanted}"),
    )
    .remedy("use other credentials (`godwit pki issue` makes them)"))
}

/// `router`, for peers of one role only; as [`require`].
pub fn only(router: Router, role: Role) -> Router {
    router.layer(from_fn(move |Extension(identity): Extension<Identity>, request: Request, next: Next| async move {
        match require(&identity, role) {
            Ok(()) => next.run(request).await,
            Err(error) => error.into_response(),
        }
    }))
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.problem.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        (status, Json(self)).into_response()
    }
}

/// The body of an answer that says nothing but that it was done.
pub fn done() -> Json<serde_json::Value> {
    Json(serde_json::Value::Null)
}
