//! What a process shows to its peers, and what it checks of theirs.
//!
//! Whoever listens or connects takes its TLS configuration from here once and keeps it for as long as it runs. The
//! certificate in it can be exchanged ([`Credentials::renew`]): configurations ask for it at every handshake, so a node
//! renews its certificate without a restart, and sessions that stand are not touched. In the same way every handshake asks
//! the list of revocations ([`Credentials::revoke`]).
//!
//! # What can go wrong
//!
//! *The process dies while it exchanges its files.* A certificate and its key are two files, and of an old one with a new
//! one a node could not start. So both are first written as one file, [`RENEWED_FILE`]; from then on the new ones count, and
//! [`Credentials::load`] finishes what was begun.

use crate::capability::{Capability, CapabilityError, SignedCapability};
use crate::revocation::{Current, Revocations};
use crate::{CA_FILE, CERT_FILE, Identity, KEY_FILE, PeerCertificate, PeerError, TrustError};
use crate::{fingerprint, peer_identity, private_file};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{ResolvesClientCert, Resumption, WebPkiServerVerifier};
use rustls::crypto::{CryptoProvider, ring};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{ClientHello, NoServerSessionStorage, ResolvesServerCert, WebPkiClientVerifier};
use rustls::sign::CertifiedKey;
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, DistinguishedName, RootCertStore, ServerConfig,
    SignatureScheme, version::TLS13,
};
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime, pem::PemObject};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use x509_parser::prelude::{FromDer, X509Certificate};

/// A new certificate and its key, whole, until both are in their places. All that replaces them goes by it: what is in it is the latest.
pub const RENEWED_FILE: &str = "renewed.pem";

/// A certificate with its key and the CA that both sides trust; cheap to clone, and clones are renewed together.
#[derive(Clone)]
pub struct Credentials {
    inner: Arc<Inner>,
}

struct Inner {
    identity: Identity,
    authority: Arc<Authorities>,
    shown: Arc<Shown>,
    /// For servers that anybody may connect to; the CA's certificate follows ours, for who knows only its fingerprint.
    open: ServerConfig,
    server: ServerConfig,
    client: ClientConfig,
}

/// The CA, and what it does not stand for any more.
struct Authorities {
    pem: String,
    der: Vec<CertificateDer<'static>>,
    clients: Arc<dyn ClientCertVerifier>,
    servers: Arc<dyn ServerCertVerifier>,
    provider: Arc<CryptoProvider>,
    revoked: Arc<Current>,
}

/// What is shown now.
struct Present {
    key: Arc<CertifiedKey>,
    with_authority: Arc<CertifiedKey>,
    from: SystemTime,
    until: SystemTime,
    fingerprint: String,
}

struct Shown(RwLock<Arc<Present>>);

impl Shown {
    fn now(&self) -> Arc<Present> {
        Arc::clone(&self.0.read().unwrap_or_else(PoisonError::into_inner))
    }
}

impl fmt::Debug for Shown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Shown").field(&self.now().fingerprint).finish()
    }
}

impl ResolvesServerCert for Shown {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(Arc::clone(&self.now().key))
    }
}

impl ResolvesClientCert for Shown {
    fn resolve(&self, _: &[&[u8]], schemes: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        let key = Arc::clone(&self.now().key);
        key.key.choose_scheme(schemes).is_some().then_some(key)
    }

    fn has_certs(&self) -> bool {
        true
    }
}

#[derive(Debug)]
struct ShownWithAuthority(Arc<Shown>);

impl ResolvesServerCert for ShownWithAuthority {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(Arc::clone(&self.0.now().with_authority))
    }
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials")
            .field("identity", &self.inner.identity)
            .field("fingerprint", &self.inner.shown.now().fingerprint)
            .finish_non_exhaustive()
    }
}

impl Credentials {
    /// Loads `ca.pem`, `cert.pem` and `key.pem` from `dir`, after finishing a renewal that was cut off there.
    ///
    /// # Errors
    /// As [`load_files`](Self::load_files).
    pub fn load(dir: &Path) -> Result<Self, TrustError> {
        let renewed = dir.join(RENEWED_FILE);
        if renewed.exists() {
            settle(dir, &private_file::read_key(&renewed)?)?;
        }
        Self::load_files(&dir.join(CA_FILE), &dir.join(CERT_FILE), &dir.join(KEY_FILE))
    }

    /// Loads a CA's certificate, our certificate (its chain may follow), and its key.
    ///
    /// # Errors
    /// A file is missing or is no PEM; group or world may read the key; the certificate has expired or has not begun,
    /// names no identity, or was not signed by that CA or for that key.
    pub fn load_files(ca: &Path, cert: &Path, key: &Path) -> Result<Self, TrustError> {
        let key_pem = private_file::read_key(key)?;
        let authority = Arc::new(Authorities::new(private_file::read(ca)?, ca)?);
        let (identity, present) = authority.present(&private_file::read(cert)?, &key_pem, (ca, cert, key))?;
        let shown = Arc::new(Shown(RwLock::new(Arc::new(present))));
        let server = |clients, shown: Arc<dyn ResolvesServerCert>| {
            let mut server = versions(ServerConfig::builder_with_provider(Arc::clone(&authority.provider)))
                .with_client_cert_verifier(clients)
                .with_cert_resolver(shown);
            server.send_tls13_tickets = 0;
            server.session_storage = Arc::new(NoServerSessionStorage {});
            server
        };
        let checked = |mandatory| Arc::new(Clients { authority: Arc::clone(&authority), mandatory });
        let open = server(checked(false), Arc::new(ShownWithAuthority(Arc::clone(&shown))));
        let strict = server(checked(true), Arc::clone(&shown) as Arc<dyn ResolvesServerCert>);
        let mut client = versions(ClientConfig::builder_with_provider(Arc::clone(&authority.provider)))
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(Servers { authority: Arc::clone(&authority) }))
            .with_client_cert_resolver(Arc::clone(&shown) as Arc<dyn ResolvesClientCert>);
        client.resumption = Resumption::disabled();
        Ok(Self { inner: Arc::new(Inner { identity, authority, shown, open, server: strict, client }) })
    }

    /// Who we are.
    #[must_use]
    pub fn identity(&self) -> &Identity {
        &self.inner.identity
    }

    /// When our certificate ends.
    #[must_use]
    pub fn expiry(&self) -> SystemTime {
        self.inner.shown.now().until
    }

    /// When to renew our certificate: when a third of its life is left.
    #[must_use]
    pub fn renew_at(&self) -> SystemTime {
        let now = self.inner.shown.now();
        // It was issued later than it begins, as a rule.
        let issued = now.from + crate::CLOCK_SKEW;
        let life = now.until.duration_since(issued).or_else(|_| now.until.duration_since(now.from));
        now.until - life.unwrap_or_default() / 3
    }

    /// Names our certificate: 32 hex digits.
    #[must_use]
    pub fn fingerprint(&self) -> String {
        self.inner.shown.now().fingerprint.clone()
    }

    /// Names the CA's certificate, as [`Authority::fingerprint`](crate::Authority::fingerprint) does.
    #[must_use]
    pub fn ca_fingerprint(&self) -> String {
        fingerprint(&self.inner.authority.der[0])
    }

    /// The CA's certificate.
    #[must_use]
    pub fn ca_pem(&self) -> &str {
        &self.inner.authority.pem
    }

    /// For whoever listens: TLS 1.3, a certificate of our CA is demanded of every client, `alpn` is agreed on or the
    /// handshake fails. Read [`peer_identity`] afterwards and decide.
    #[must_use]
    pub fn server_config(&self, alpn: &[u8]) -> Arc<ServerConfig> {
        let mut config = self.inner.server.clone();
        config.alpn_protocols = vec![alpn.to_vec()];
        Arc::new(config)
    }

    /// The same for a server that has to speak with those who have no certificate: one that is shown is checked, and none
    /// is taken for nobody. Whoever uses this decides for *each request* what nobody may do.
    #[must_use]
    pub fn open_server_config(&self, alpn: &[u8]) -> Arc<ServerConfig> {
        let mut config = self.inner.open.clone();
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

    /// Exchanges our certificate and key, in `dir` durably and for every handshake from now on. It must be of the same
    /// holder and CA.
    ///
    /// # Errors
    /// As [`load_files`](Self::load_files); what is shown, and what is in the files, is as before then. Only if a file could not be
    /// written after the new ones counted, [`load`](Self::load) finishes that.
    pub fn renew(&self, dir: &Path, cert_pem: &str, key_pem: &str) -> Result<(), TrustError> {
        let paths = [CA_FILE, CERT_FILE, KEY_FILE].map(|name| dir.join(name));
        let (identity, present) = self.inner.authority.present(cert_pem, key_pem, (&paths[0], &paths[1], &paths[2]))?;
        if identity != self.inner.identity {
            let why = format!("it is {identity}'s, and we are {}", self.inner.identity);
            return Err(TrustError::Mismatch { path: paths[1].clone(), why });
        }
        let both = begin(dir, key_pem, cert_pem)?;
        *self.inner.shown.0.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(present);
        settle(dir, &both)
    }

    /// Takes a list of revocations, if it is newer than the one at hand; whether it was. From now on no handshake succeeds with
    /// a certificate that it voids. Sessions that stand have to be ended by who holds them: [`accepts`](Self::accepts).
    ///
    /// # Errors
    /// [`TrustError::TooManyRevocations`].
    pub fn revoke(&self, list: Revocations) -> Result<bool, TrustError> {
        self.inner.authority.revoked.install(list)
    }

    /// The list of revocations at hand.
    #[must_use]
    pub fn revocations(&self) -> Revocations {
        self.inner.authority.revoked.get()
    }

    /// Whether a peer that was let in may stay: its certificate is neither revoked nor over.
    ///
    /// # Errors
    /// [`PeerError::Revoked`] or [`PeerError::Expired`].
    pub fn accepts(&self, peer: &PeerCertificate) -> Result<(), PeerError> {
        if SystemTime::now() > peer.until {
            return Err(PeerError::Expired { since: peer.until });
        }
        self.inner.authority.revoked.refuse(peer)
    }

    /// Signs what a node may do in the controller's name. What is to begin before our certificate does begins with it.
    ///
    /// # Errors
    /// Our key cannot sign, or the capability is too long to be carried.
    pub fn grant(&self, capability: &Capability) -> Result<SignedCapability, CapabilityError> {
        let now = self.inner.shown.now();
        let capability = Capability { begins: capability.begins.max(now.from), ..capability.clone() };
        SignedCapability::sign(&capability, &now.key)
    }

    /// Checks that a controller of our CA signed a capability, and reads it. Its certificate must have been good when the
    /// capability was signed, and must not be revoked now. Whether the time is right is for the caller to ask.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn open(&self, signed: &SignedCapability) -> Result<Capability, CapabilityError> {
        signed.open(|certificate, at| {
            let at = UnixTime::since_unix_epoch(at.duration_since(UNIX_EPOCH).unwrap_or_default());
            self.inner.authority.verify_client(certificate, &[], at)
        })
    }
}

/// From here on a new key and certificate count: both, as [`settle`] takes them.
pub(crate) fn begin(dir: &Path, key_pem: &str, cert_pem: &str) -> Result<String, TrustError> {
    let (both, renewed) = (format!("{key_pem}\n{cert_pem}"), dir.join(RENEWED_FILE));
    split(&both, &renewed)?;
    private_file::replace(&renewed, 0o600, &both)?;
    Ok(both)
}

/// Puts a new key and certificate into their places.
pub(crate) fn settle(dir: &Path, both: &str) -> Result<(), TrustError> {
    let renewed: PathBuf = dir.join(RENEWED_FILE);
    let failed = |source| TrustError::File { doing: "removing", path: renewed.clone(), source };
    let (key, cert) = split(both, &renewed)?;
    private_file::replace(&dir.join(KEY_FILE), 0o600, &format!("{}\n", key.trim_end()))?;
    private_file::replace(&dir.join(CERT_FILE), 0o644, cert)?;
    std::fs::remove_file(&renewed).map_err(failed)
}

/// The key, and the certificate behind it. The path is for the error.
fn split<'a>(both: &'a str, path: &Path) -> Result<(&'a str, &'a str), TrustError> {
    let at = both.find("-----BEGIN CERTIFICATE-----");
    let none = || TrustError::Content { path: path.into(), why: "it holds no certificate".into() };
    at.map(|at| both.split_at(at)).ok_or_else(none)
}

impl Authorities {
    fn new(pem: String, path: &Path) -> Result<Self, TrustError> {
        let bad = |why: String| TrustError::Content { path: path.into(), why };
        let der = certificates_of(&pem, path)?;
        let mut roots = RootCertStore::empty();
        for der in &der {
            roots.add(der.clone()).map_err(|e| bad(e.to_string()))?;
        }
        let (roots, provider) = (Arc::new(roots), Arc::new(ring::default_provider()));
        let clients = WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(&provider))
            .build()
            .map_err(|e| bad(e.to_string()))?;
        let servers = WebPkiServerVerifier::builder_with_provider(roots, Arc::clone(&provider))
            .build()
            .map_err(|e| bad(e.to_string()))?;
        Ok(Self { pem, der, clients, servers, provider, revoked: Arc::default() })
    }

    /// Our own certificate and key, checked. The paths are those of CA, certificate and key, for the errors.
    fn present(
        &self,
        cert_pem: &str,
        key_pem: &str,
        (ca, cert, key): (&Path, &Path, &Path),
    ) -> Result<(Identity, Present), TrustError> {
        let content = |path: &Path, why: String| TrustError::Content { path: path.into(), why };
        let mismatch = |why: String| TrustError::Mismatch { path: cert.into(), why };
        let key_der = PrivateKeyDer::from_pem_slice(key_pem.as_bytes()).map_err(|e| content(key, e.to_string()))?;
        let chain = certificates_of(cert_pem, cert)?;
        let identity = peer_identity(&chain).map_err(|source| TrustError::Unnamed { path: cert.into(), source })?;
        let (from, until) = validity(&chain[0]).map_err(|why| content(cert, why))?;
        let now = SystemTime::now();
        if now > until {
            return Err(TrustError::Expired { path: cert.into(), since: until });
        }
        if now < from {
            return Err(TrustError::NotYetValid { path: cert.into(), from });
        }
        // Our own certificate must pass what our peers will ask of it.
        self.clients
            .verify_client_cert(&chain[0], &chain[1..], UnixTime::now())
            .map_err(|e| mismatch(format!("the CA in {} did not sign it ({e})", ca.display())))?;
        let unfit = |e: rustls::Error| mismatch(format!("the key in {} does not fit it ({e})", key.display()));
        let signing = self.provider.key_provider.load_private_key(key_der).map_err(unfit)?;
        let fingerprint = fingerprint(&chain[0]);
        let key = CertifiedKey::new(chain.clone(), signing);
        key.keys_match().map_err(unfit)?;
        let with_authority = [chain, self.der.clone()].concat();
        let with_authority = Arc::new(CertifiedKey::new(with_authority, Arc::clone(&key.key)));
        Ok((identity, Present { key: Arc::new(key), with_authority, from, until, fingerprint }))
    }

    fn unrevoked(&self, certificate: &CertificateDer<'_>) -> Result<(), rustls::Error> {
        let bad = |_| rustls::Error::InvalidCertificate(CertificateError::BadEncoding);
        let peer = PeerCertificate::read(std::slice::from_ref(certificate)).map_err(bad)?;
        self.revoked.refuse(&peer).map_err(|_| rustls::Error::InvalidCertificate(CertificateError::Revoked))
    }

    fn verify_client(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        let good = self.clients.verify_client_cert(end_entity, intermediates, now)?;
        self.unrevoked(end_entity)?;
        Ok(good)
    }
}

impl fmt::Debug for Authorities {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Authorities").field("fingerprint", &fingerprint(&self.der[0])).finish_non_exhaustive()
    }
}

/// Checks clients: their CA, and that they are not revoked.
#[derive(Debug)]
struct Clients {
    authority: Arc<Authorities>,
    mandatory: bool,
}

impl ClientCertVerifier for Clients {
    fn client_auth_mandatory(&self) -> bool {
        self.mandatory
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.authority.clients.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        self.authority.verify_client(end_entity, intermediates, now)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.authority.clients.verify_tls12_signature(message, cert, dss)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.authority.clients.verify_tls13_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.authority.clients.supported_verify_schemes()
    }
}

/// Checks servers: their CA, their name, and that they are not revoked.
#[derive(Debug)]
struct Servers {
    authority: Arc<Authorities>,
}

impl ServerCertVerifier for Servers {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let servers = &self.authority.servers;
        let good = servers.verify_server_cert(end_entity, intermediates, server_name, ocsp, now)?;
        self.authority.unrevoked(end_entity)?;
        Ok(good)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.authority.servers.verify_tls12_signature(message, cert, dss)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.authority.servers.verify_tls13_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.authority.servers.supported_verify_schemes()
    }
}

/// TLS 1.3 alone, with a provider of our own: no default of the process is needed, or changed.
pub(crate) fn versions<S: rustls::ConfigSide>(
    builder: rustls::ConfigBuilder<S, rustls::WantsVersions>,
) -> rustls::ConfigBuilder<S, rustls::WantsVerifier> {
    builder.with_protocol_versions(&[&TLS13]).expect("ring's provider has suites for TLS 1.3")
}

/// The certificates of a PEM text; `path` is where it came from, for the error.
pub(crate) fn certificates_of(text: &str, path: &Path) -> Result<Vec<CertificateDer<'static>>, TrustError> {
    let bad = |why: String| TrustError::Content { path: path.into(), why };
    let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(text.as_bytes()).collect();
    let all = all.map_err(|e| bad(e.to_string()))?;
    if all.is_empty() { Err(bad("it holds no certificate".into())) } else { Ok(all) }
}

pub(crate) fn validity(der: &CertificateDer<'_>) -> Result<(SystemTime, SystemTime), String> {
    let (_, cert) = X509Certificate::from_der(der).map_err(|e| e.to_string())?;
    let at = |seconds: i64| {
        let seconds = u64::try_from(seconds).map_err(|_| "its validity lies before 1970".to_string())?;
        Ok::<_, String>(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds))
    };
    let validity = cert.validity();
    Ok((at(validity.not_before.timestamp())?, at(validity.not_after.timestamp())?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Authority, KeyRequest, Validity};

    fn enrolled(dir: &Path, name: &str) -> (Authority, Credentials) {
        let authority = Authority::create(&dir.join("ca")).unwrap();
        let node = Identity::node(name).unwrap();
        authority.issue(&node, Validity::days(1)).unwrap().write(&dir.join("node")).unwrap();
        (authority, Credentials::load(&dir.join("node")).unwrap())
    }

    #[test]
    fn a_renewal_that_was_cut_off_is_finished_and_one_that_does_not_fit_changes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let (authority, held) = enrolled(dir.path(), "a");
        let (node, first) = (dir.path().join("node"), held.fingerprint());
        let request = KeyRequest::new(held.identity()).unwrap();
        let cert = authority.sign(&request.request_pem, held.identity(), Validity::days(2)).unwrap();
        for (cert, key) in [
            (&cert, &KeyRequest::new(held.identity()).unwrap().key_pem),
            (&authority.issue(&Identity::node("b").unwrap(), Validity::days(1)).unwrap().cert_pem, &request.key_pem),
        ] {
            assert!(matches!(held.renew(&node, cert, key), Err(TrustError::Mismatch { .. })));
            assert_eq!(Credentials::load(&node).unwrap().fingerprint(), first);
        }
        // As a process leaves it that died at the first file of two.
        std::fs::write(node.join(RENEWED_FILE), format!("{}\n{cert}", request.key_pem)).unwrap();
        std::fs::set_permissions(node.join(RENEWED_FILE), std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
        std::fs::write(node.join(KEY_FILE), &request.key_pem).unwrap();
        let finished = Credentials::load(&node).unwrap();
        assert_ne!(finished.fingerprint(), first);
        assert!(!node.join(RENEWED_FILE).exists());
        held.renew(&node, &cert, &request.key_pem).unwrap();
        assert_eq!(held.fingerprint(), finished.fingerprint());
        assert!(held.expiry() > SystemTime::now() + Duration::from_secs(36 * 3600));
        let mode = |file| std::os::unix::fs::PermissionsExt::mode(&node.join(file).metadata().unwrap().permissions());
        assert_eq!(mode(KEY_FILE) & 0o777, 0o600);
    }

    #[test]
    fn what_is_issued_anew_counts_whatever_a_renewal_has_left_and_however_it_is_cut_off() {
        let dir = tempfile::tempdir().unwrap();
        let (authority, held) = enrolled(dir.path(), "a");
        let node = dir.path().join("node");
        let issue = || authority.issue(held.identity(), Validity::days(1)).unwrap();
        let fingerprint_of =
            |issued: &crate::Issued| fingerprint(&certificates_of(&issued.cert_pem, Path::new("")).unwrap()[0]);
        // A renewal that found its disk full, before the host was enrolled again.
        let (stale, fresh) = (issue(), issue());
        begin(&node, &stale.key_pem, &stale.cert_pem).unwrap();
        fresh.write(&node).unwrap();
        assert_eq!(Credentials::load(&node).unwrap().fingerprint(), fingerprint_of(&fresh));
        assert!(!node.join(RENEWED_FILE).exists());
        assert_eq!(std::fs::read_to_string(node.join(KEY_FILE)).unwrap(), fresh.key_pem);
        // One that is cut off between its two files: of the second the place is taken.
        let next = issue();
        std::fs::remove_file(node.join(CERT_FILE)).unwrap();
        std::fs::create_dir(node.join(CERT_FILE)).unwrap();
        assert!(next.write(&node).is_err());
        std::fs::remove_dir(node.join(CERT_FILE)).unwrap();
        assert_eq!(Credentials::load(&node).unwrap().fingerprint(), fingerprint_of(&next));
    }

    #[test]
    fn a_request_is_signed_only_for_the_name_in_it_and_a_revoked_holder_may_be_issued_another() {
        let dir = tempfile::tempdir().unwrap();
        let (authority, held) = enrolled(dir.path(), "a");
        let other = KeyRequest::new(&Identity::node("b").unwrap()).unwrap();
        let error = authority.sign(&other.request_pem, held.identity(), Validity::days(1)).unwrap_err();
        assert!(error.to_string().contains("node/b"), "{error}");

        let mine = PeerCertificate::read(&held.inner.shown.now().key.cert).unwrap();
        assert_eq!(held.accepts(&mine), Ok(()));
        let list = held.revocations().revoke(held.identity().clone(), SystemTime::now()).unwrap();
        assert!(held.revoke(list.clone()).unwrap());
        assert!(!held.revoke(Revocations::default()).unwrap(), "an older list counts for nothing");
        assert!(matches!(held.accepts(&mine), Err(PeerError::Revoked { .. })));
        let again = authority.issue(held.identity(), list.earliest(held.identity(), Validity::days(1))).unwrap();
        let again = certificates_of(&again.cert_pem, Path::new("")).unwrap();
        assert_eq!(held.accepts(&PeerCertificate::read(&again).unwrap()), Ok(()));
    }
}
