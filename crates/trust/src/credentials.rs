//! What a process shows to its peers, and what it checks of theirs.

use crate::{CA_FILE, CERT_FILE, Identity, KEY_FILE, TrustError, fingerprint, peer_identity, private_file};
use rustls::client::{Resumption, WebPkiServerVerifier};
use rustls::crypto::ring;
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::{ClientConfig, RootCertStore, ServerConfig, version::TLS13};
use rustls_pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject};
use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use x509_parser::prelude::{FromDer, X509Certificate};

/// A certificate with its key and the CA that both sides trust; cheap to clone.
#[derive(Clone)]
pub struct Credentials {
    inner: Arc<Inner>,
}

struct Inner {
    identity: Identity,
    expiry: SystemTime,
    fingerprint: String,
    ca_fingerprint: String,
    server: ServerConfig,
    client: ClientConfig,
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Inner { identity, fingerprint, .. } = &*self.inner;
        f.debug_struct("Credentials")
            .field("identity", identity)
            .field("fingerprint", fingerprint)
            .finish_non_exhaustive()
    }
}

impl Credentials {
    /// Loads `ca.pem`, `cert.pem` and `key.pem` from `dir`.
    ///
    /// # Errors
    /// As [`load_files`](Self::load_files).
    pub fn load(dir: &Path) -> Result<Self, TrustError> {
        Self::load_files(&dir.join(CA_FILE), &dir.join(CERT_FILE), &dir.join(KEY_FILE))
    }

    /// Loads a CA's certificate, our certificate (its chain may follow), and its key.
    ///
    /// # Errors
    /// A file is missing or is no PEM; group or world may read the key; the certificate has expired or has not begun,
    /// names no identity, or was not signed by that CA or for that key.
    pub fn load_files(ca: &Path, cert: &Path, key: &Path) -> Result<Self, TrustError> {
        let content = |path: &Path, why: String| TrustError::Content { path: path.into(), why };
        let mismatch = |why: String| TrustError::Mismatch { path: cert.into(), why };
        let key_der = PrivateKeyDer::from_pem_slice(private_file::read_key(key)?.as_bytes())
            .map_err(|e| content(key, e.to_string()))?;
        let ca_der = certificates(ca)?;
        let chain = certificates(cert)?;
        let identity = peer_identity(&chain).map_err(|source| TrustError::Unnamed { path: cert.into(), source })?;
        let (from, until) = validity(&chain[0]).map_err(|why| content(cert, why))?;
        let now = SystemTime::now();
        if now > until {
            return Err(TrustError::Expired { path: cert.into(), since: until });
        }
        if now < from {
            return Err(TrustError::NotYetValid { path: cert.into(), from });
        }

        let mut roots = RootCertStore::empty();
        for der in &ca_der {
            roots.add(der.clone()).map_err(|e| content(ca, e.to_string()))?;
        }
        let (roots, provider) = (Arc::new(roots), Arc::new(ring::default_provider()));
        let clients = WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(&provider))
            .build()
            .map_err(|e| content(ca, e.to_string()))?;
        let servers = WebPkiServerVerifier::builder_with_provider(roots, Arc::clone(&provider))
            .build()
            .map_err(|e| content(ca, e.to_string()))?;
        // Our own certificate must pass what our peers will ask of it.
        clients
            .verify_client_cert(&chain[0], &chain[1..], rustls_pki_types::UnixTime::now())
            .map_err(|e| mismatch(format!("the CA in {} did not sign it ({e})", ca.display())))?;

        let unfit = |e: rustls::Error| mismatch(format!("the key in {} does not fit it ({e})", key.display()));
        let mut server = versions(ServerConfig::builder_with_provider(Arc::clone(&provider)))
            .with_client_cert_verifier(clients)
            .with_single_cert(chain.clone(), key_der.clone_key())
            .map_err(unfit)?;
        server.send_tls13_tickets = 0;
        server.session_storage = Arc::new(NoServerSessionStorage {});
        let mut client = versions(ClientConfig::builder_with_provider(provider))
            .with_webpki_verifier(servers)
            .with_client_auth_cert(chain.clone(), key_der)
            .map_err(unfit)?;
        client.resumption = Resumption::disabled();

        let (fingerprint, ca_fingerprint) = (fingerprint(&chain[0]), fingerprint(&ca_der[0]));
        let inner = Inner { identity, expiry: until, fingerprint, ca_fingerprint, server, client };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Who we are.
    #[must_use]
    pub fn identity(&self) -> &Identity {
        &self.inner.identity
    }

    /// When our certificate ends.
    #[must_use]
    pub fn expiry(&self) -> SystemTime {
        self.inner.expiry
    }

    /// Names our certificate: 32 hex digits.
    #[must_use]
    pub fn fingerprint(&self) -> &str {
        &self.inner.fingerprint
    }

    /// Names the CA's certificate, as [`Authority::fingerprint`](crate::Authority::fingerprint) does.
    #[must_use]
    pub fn ca_fingerprint(&self) -> &str {
        &self.inner.ca_fingerprint
    }

    /// For whoever listens: TLS 1.3, a certificate of our CA is demanded of every client, `alpn` is agreed on or the
    /// handshake fails. Read [`peer_identity`] afterwards and decide.
    #[must_use]
    pub fn server_config(&self, alpn: &[u8]) -> Arc<ServerConfig> {
        let mut config = self.inner.server.clone();
        config.alpn_protocols = vec![alpn.to_vec()];
        Arc::new(config)
    }

    /// For whoever connects: TLS 1.3, our certificate is shown. Connect with the [`Identity::server_name`] of whom you
    /// mean: that name is what is checked.
    #[must_use]
    pub fn client_config(&self, alpn: &[u8]) -> Arc<ClientConfig> {
        let mut config = self.inner.client.clone();
        config.alpn_protocols = vec![alpn.to_vec()];
        Arc::new(config)
    }
}

/// TLS 1.3 alone, with a provider of our own: no default of the process is needed, or changed.
fn versions<S: rustls::ConfigSide>(
    builder: rustls::ConfigBuilder<S, rustls::WantsVersions>,
) -> rustls::ConfigBuilder<S, rustls::WantsVerifier> {
    builder.with_protocol_versions(&[&TLS13]).expect("ring's provider has suites for TLS 1.3")
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TrustError> {
    let text = private_file::read(path)?;
    let bad = |why: String| TrustError::Content { path: path.into(), why };
    let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(text.as_bytes()).collect();
    let all = all.map_err(|e| bad(e.to_string()))?;
    if all.is_empty() { Err(bad("it holds no certificate".into())) } else { Ok(all) }
}

fn validity(der: &CertificateDer<'_>) -> Result<(SystemTime, SystemTime), String> {
    let (_, cert) = X509Certificate::from_der(der).map_err(|e| e.to_string())?;
    let at = |seconds: i64| {
        let seconds = u64::try_from(seconds).map_err(|_| "its validity lies before 1970".to_string())?;
        Ok::<_, String>(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds))
    };
    let validity = cert.validity();
    Ok((at(validity.not_before.timestamp())?, at(validity.not_after.timestamp())?))
}
