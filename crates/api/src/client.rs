//! Asks a server of Godwit's for something: HTTP/1.1 with JSON over mutual TLS.
//!
//! # What can go wrong
//!
//! The other side cannot be reached, is not who was meant, or does not answer in time: [`Problem::Unreachable`], with
//! the cause. Then nobody knows whether a request was carried out, so every request of Godwit's may be sent again. A
//! connection that was kept may have been closed by the other side in the meantime; a request that was not sent on it
//! goes out on a new one.

use crate::server::ALPN;
use crate::{ApiError, Problem};
use axum::http::{HeaderValue, Method, Request, header};
use godwit_trust::{Credentials, Identity, PeerError, Role, peer_identity};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

/// Longest answer believed, in bytes: thousands of VMs with their disks are a few MiB.
const MAX_ANSWER: usize = 16 << 20;

/// Connections kept for the next request. More are opened when they are needed, and closed afterwards.
const MAX_KEPT: usize = 4;

/// How long a connection is kept: well below the time after which the server closes it.
const KEPT_FOR: Duration = Duration::from_secs(8);

/// How long it may take to connect, whatever the request's own time.
const CONNECT_WITHIN: Duration = Duration::from_secs(5);

type Sender = SendRequest<Full<Bytes>>;

/// Asks one server. Cheap to clone; clones share their connections.
#[derive(Clone)]
pub struct Client {
    shared: Arc<Shared>,
    timeout: Duration,
}

struct Shared {
    address: String,
    expected: Identity,
    connector: TlsConnector,
    /// For whoever has a token.
    authorization: Option<HeaderValue>,
    kept: Mutex<Vec<(Instant, Sender)>>,
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Client({} at {})", self.shared.expected, self.shared.address)
    }
}

impl Client {
    /// For the server at `address` (`HOST:PORT` or a socket address), which has to be `expected`. No request takes
    /// longer than `timeout`. Nothing is connected yet.
    pub fn new(address: impl ToString, expected: Identity, credentials: &Credentials, timeout: Duration) -> Self {
        Self::with_tls(address, expected, credentials.client_config(ALPN), timeout)
    }

    /// As [`new`](Self::new), with a TLS configuration of its own: for who has no certificate.
    pub fn with_tls(
        address: impl ToString,
        expected: Identity,
        tls: Arc<rustls::ClientConfig>,
        timeout: Duration,
    ) -> Self {
        let connector = TlsConnector::from(tls);
        let shared =
            Shared { address: address.to_string(), expected, connector, authorization: None, kept: Mutex::new(vec![]) };
        Self { shared: Arc::new(shared), timeout }
    }

    /// The same with a token in every request.
    #[must_use]
    pub fn bearing(&self, token: &str) -> Self {
        let Shared { address, expected, connector, .. } = &*self.shared;
        // What cannot stand in a header is no token of ours, and is refused as one.
        let authorization = HeaderValue::from_str(&format!("Bearer {token}")).ok().map(|mut value| {
            value.set_sensitive(true);
            value
        });
        let (address, expected, connector) = (address.clone(), expected.clone(), connector.clone());
        let shared = Shared { address, expected, connector, authorization, kept: Mutex::new(vec![]) };
        Self { shared: Arc::new(shared), timeout: self.timeout }
    }

    /// The same with another bound on the time of a request.
    #[must_use]
    pub fn within(&self, timeout: Duration) -> Self {
        Self { shared: Arc::clone(&self.shared), timeout }
    }

    /// `GET path`.
    ///
    /// # Errors
    /// The server's own, or [`Problem::Unreachable`].
    pub async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ApiError> {
        self.ask(Method::GET, path, None::<&()>).await
    }

    /// `GET path`, for an answer that is text.
    ///
    /// # Errors
    /// As [`Client::get`].
    pub async fn text(&self, path: &str) -> Result<String, ApiError> {
        let mut body = self.open(path).await?;
        let mut said = vec![];
        let reading = async {
            while let Some(piece) = body.piece().await? {
                said.extend_from_slice(&piece);
                if said.len() > MAX_ANSWER {
                    let long = format!("the answer to GET {path} is longer than {MAX_ANSWER} bytes");
                    return Err(ApiError::new(Problem::Failed, long));
                }
            }
            Ok(())
        };
        let read = tokio::time::timeout(self.timeout, reading).await;
        read.unwrap_or_else(|_| Err(self.shared.unreachable(&format!("no answer within {:?}", self.timeout))))?;
        Ok(String::from_utf8_lossy(&said).into_owned())
    }

    /// `PUT path`. Errors as [`Client::get`].
    #[allow(clippy::missing_errors_doc, reason = "said in the line above")]
    pub async fn put<T: DeserializeOwned>(&self, path: &str, body: &impl Serialize) -> Result<T, ApiError> {
        self.ask(Method::PUT, path, Some(body)).await
    }

    /// `POST path`. Errors as [`Client::get`].
    #[allow(clippy::missing_errors_doc, reason = "said in the line above")]
    pub async fn post<T: DeserializeOwned>(&self, path: &str, body: &impl Serialize) -> Result<T, ApiError> {
        self.ask(Method::POST, path, Some(body)).await
    }

    /// `DELETE path`. Errors as [`Client::get`].
    #[allow(clippy::missing_errors_doc, reason = "said in the line above")]
    pub async fn delete<T: DeserializeOwned>(&self, path: &str) -> Result<T, ApiError> {
        self.ask(Method::DELETE, path, None::<&()>).await
    }

    /// `GET path`, for an answer that comes in pieces and may have no end. The bound on a request's time is on its beginning.
    pub(crate) async fn open(&self, path: &str) -> Result<Body, ApiError> {
        let opening = async {
            let mut sender = self.shared.connect().await?;
            let mut request = Request::get(path);
            if let Some(authorization) = &self.shared.authorization {
                request = request.header(header::AUTHORIZATION, authorization.clone());
            }
            let request = request
                .header(header::HOST, self.shared.expected.dns_name())
                .body(Full::new(Bytes::new()))
                .map_err(|e| ApiError::new(Problem::Invalid, format!("`{path}` is no path: {e}")))?;
            let answer = sender.send_request(request).await.map_err(|e| self.shared.unreachable(&cause(&e)))?;
            if answer.status().is_success() {
                let client = self.clone();
                return Ok(Body { answer: answer.into_body(), client, _sender: sender });
            }
            let (_, said) = self.shared.finish(sender, answer).await?;
            Err(serde_json::from_slice(&said).unwrap_or_else(|_| {
                ApiError::new(Problem::Failed, format!("{} refused GET {path}", self.shared.expected))
            }))
        };
        let opened = tokio::time::timeout(self.timeout, opening).await;
        opened.unwrap_or_else(|_| Err(self.shared.unreachable(&format!("no answer within {:?}", self.timeout))))
    }

    async fn ask<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: Option<&impl Serialize>,
    ) -> Result<T, ApiError> {
        let body = match body {
            None => Bytes::new(),
            Some(body) => serde_json::to_vec(body)
                .map_err(|e| ApiError::new(Problem::Invalid, format!("cannot write {method} {path} as JSON: {e}")))?
                .into(),
        };
        let answer = tokio::time::timeout(self.timeout, self.shared.exchange(&method, path, body)).await;
        let (good, bytes) = answer.unwrap_or_else(|_| {
            Err(self.shared.unreachable(&format!("no answer to {method} {path} within {:?}", self.timeout)))
        })?;
        if !good {
            let said = serde_json::from_slice::<ApiError>(&bytes).map(|mut error| {
                if self.shared.expected.role() == Role::Node {
                    // Passed on by the controller it would look like the controller's own.
                    error.place = error.place.map(|place| format!("{}: {place}", self.shared.expected));
                }
                error
            });
            // Not Godwit's words: something else listens there.
            return Err(said.unwrap_or_else(|_| {
                let said: String = String::from_utf8_lossy(&bytes).chars().take(200).collect();
                ApiError::new(Problem::Failed, format!("{} refused {method} {path}: {said}", self.shared.expected))
            }));
        }
        let bytes = if bytes.is_empty() { Bytes::from_static(b"null") } else { bytes };
        serde_json::from_slice(&bytes).map_err(|e| {
            let who = &self.shared.expected;
            ApiError::new(
                Problem::Failed,
                format!("{who} answered {method} {path} with what this version cannot read: {e}"),
            )
            .remedy("run the same version of godwit on both machines")
        })
    }
}

/// An answer that comes in pieces. Its connection is its own.
#[derive(Debug)]
pub(crate) struct Body {
    answer: Incoming,
    client: Client,
    _sender: Sender,
}

impl Body {
    /// The next piece; none at the end.
    pub(crate) async fn piece(&mut self) -> Result<Option<Bytes>, ApiError> {
        loop {
            match self.answer.frame().await {
                None => return Ok(None),
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        return Ok(Some(data));
                    }
                }
                Some(Err(e)) => {
                    return Err(self.client.shared.unreachable(&format!("its answer broke off: {}", cause(&e))));
                }
            }
        }
    }
}

impl Shared {
    /// Whether the answer is a success, and its body.
    async fn exchange(&self, method: &Method, path: &str, body: Bytes) -> Result<(bool, Bytes), ApiError> {
        let request = || {
            let mut builder = Request::builder();
            if let Some(authorization) = &self.authorization {
                builder = builder.header(header::AUTHORIZATION, authorization.clone());
            }
            builder
                .method(method.clone())
                .uri(path)
                .header(header::HOST, self.expected.dns_name())
                .header(header::CONTENT_TYPE, "application/json")
                .body(Full::new(body.clone()))
                .map_err(|e| ApiError::new(Problem::Invalid, format!("`{path}` is no path: {e}")))
        };
        while let Some(mut sender) = self.take() {
            if sender.ready().await.is_err() {
                continue;
            }
            match sender.send_request(request()?).await {
                Ok(response) => return self.finish(sender, response).await,
                // Closed by the other side before the request went out.
                Err(e) if e.is_canceled() || e.is_closed() => {}
                Err(e) => return Err(self.unreachable(&e.to_string())),
            }
        }
        let mut sender = self.connect().await?;
        let response = sender.send_request(request()?).await.map_err(|e| self.unreachable(&cause(&e)))?;
        self.finish(sender, response).await
    }

    async fn finish(&self, sender: Sender, answer: axum::http::Response<Incoming>) -> Result<(bool, Bytes), ApiError> {
        let good = answer.status().is_success();
        let body = Limited::new(answer.into_body(), MAX_ANSWER).collect().await;
        let bytes = body.map_err(|e| self.unreachable(&format!("its answer broke off: {e}")))?.to_bytes();
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() < MAX_KEPT {
            kept.push((Instant::now(), sender));
        }
        Ok((good, bytes))
    }

    fn take(&self) -> Option<Sender> {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.retain(|(since, sender)| since.elapsed() < KEPT_FOR && !sender.is_closed());
        kept.pop().map(|(_, sender)| sender)
    }

    async fn connect(&self) -> Result<Sender, ApiError> {
        let connecting = async {
            let tcp = TcpStream::connect(&self.address).await.map_err(|e| e.to_string())?;
            let _ = tcp.set_nodelay(true);
            let tls =
                self.connector.connect(self.expected.server_name(), tcp).await.map_err(|e| handshake_error(&e))?;
            let peer =
                peer_identity(tls.get_ref().1.peer_certificates().unwrap_or_default()).map_err(|e| e.to_string())?;
            if peer != self.expected {
                return Err(format!("it is {peer}"));
            }
            handshake(TokioIo::new(tls)).await.map_err(|e| cause(&e))
        };
        let connected = tokio::time::timeout(CONNECT_WITHIN, connecting).await;
        let connected = connected.unwrap_or_else(|_| Err(format!("no connection within {CONNECT_WITHIN:?}")));
        let (sender, connection) = connected.map_err(|e| self.unreachable(&e))?;
        // Ends by itself when the sender is dropped or the other side closes.
        tokio::spawn(connection);
        Ok(sender)
    }

    fn unreachable(&self, why: &str) -> ApiError {
        let (who, address) = (&self.expected, &self.address);
        ApiError::new(Problem::Unreachable, format!("cannot reach {who} at {address}: {why}"))
            .remedy("see that it runs there, that the port is open, and that both certificates come from one authority and are valid")
    }
}

/// What a handshake failed for, in the words of who knows certificates.
fn handshake_error(error: &std::io::Error) -> String {
    match error.get_ref().and_then(|e| e.downcast_ref::<rustls::Error>()) {
        Some(tls) => PeerError::from_rustls(tls).to_string(),
        None => error.to_string(),
    }
}

/// The innermost cause: with TLS 1.3 a server's refusal of our certificate comes with the first answer, wrapped by hyper.
fn cause(error: &hyper::Error) -> String {
    let mut inner: &(dyn std::error::Error + 'static) = error;
    while let Some(next) = inner.source() {
        inner = next;
        if let Some(io) = inner.downcast_ref::<std::io::Error>() {
            return handshake_error(io);
        }
    }
    inner.to_string()
}
