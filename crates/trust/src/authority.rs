//! The authority that signs every certificate of an installation.

use crate::credentials::{begin, settle};
use crate::{CA_FILE, CA_KEY_FILE, Identity, TrustError, fingerprint, private_file};
use rcgen::{
    BasicConstraints, CertificateParams, CertificateSigningRequestParams, DistinguishedName, DnType, DnValue,
    ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose, SanType,
};
use rustls_pki_types::{CertificateDer, pem::PemObject};
use std::fmt;
use std::path::Path;
use std::time::{Duration, SystemTime};

/// How long before its issue a certificate begins: hosts' clocks differ.
pub const CLOCK_SKEW: Duration = Duration::from_secs(5 * 60);

/// The authority's own certificate lasts ten years: replacing it means enrolling every node again.
const AUTHORITY_DAYS: u64 = 3650;

/// The longest request for a certificate that is looked at, bytes. Ours have some 400.
const MAX_REQUEST: usize = 8 << 10;

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// From when until when a certificate is good, to the second.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Validity {
    /// Its first moment.
    pub from: SystemTime,
    /// Its last moment.
    pub until: SystemTime,
}

impl Validity {
    /// From [`CLOCK_SKEW`] ago, for `time` from now.
    #[must_use]
    pub fn lasting(time: Duration) -> Self {
        let now = SystemTime::now();
        Self { from: now - CLOCK_SKEW, until: now + time }
    }

    /// From [`CLOCK_SKEW`] ago, for `days` from now.
    #[must_use]
    pub fn days(days: u32) -> Self {
        Self::lasting(DAY * days)
    }
}

/// A certificate, its key, and the CA that signed it, as PEM. `Debug` leaves the key out.
#[derive(Clone)]
pub struct Issued {
    /// The authority's certificate.
    pub ca_pem: String,
    /// The holder's certificate.
    pub cert_pem: String,
    /// The holder's private key (PKCS #8).
    pub key_pem: String,
}

impl fmt::Debug for Issued {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Issued").field("cert_pem", &self.cert_pem).finish_non_exhaustive()
    }
}

impl Issued {
    /// Writes `ca.pem`, `cert.pem` and `key.pem` into `dir`, where [`Credentials::load`](crate::Credentials::load)
    /// finds them. The folder becomes 0700, the key 0600. Of the certificate and its key both are replaced or neither, whatever a renewal
    /// that was cut off has left there.
    ///
    /// # Errors
    /// The file that could not be written.
    pub fn write(&self, dir: &Path) -> Result<(), TrustError> {
        private_file::make_dir(dir)?;
        private_file::replace(&dir.join(CA_FILE), 0o644, &self.ca_pem)?;
        settle(dir, &begin(dir, &self.key_pem, &self.cert_pem)?)
    }
}

/// The CA of one installation; the controller holds it.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
    fingerprint: String,
}

impl fmt::Debug for Authority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Authority").field("fingerprint", &self.fingerprint).finish_non_exhaustive()
    }
}

impl Authority {
    /// Makes a new authority in `dir` (0700): `ca.pem` and `ca-key.pem` (0600).
    ///
    /// # Errors
    /// One is there already, or a file cannot be written.
    pub fn create(dir: &Path) -> Result<Self, TrustError> {
        let (cert_path, key_path) = (dir.join(CA_FILE), dir.join(CA_KEY_FILE));
        if let Some(path) = [&cert_path, &key_path].into_iter().find(|path| path.exists()) {
            return Err(TrustError::AuthorityExists(path.clone()));
        }
        let failed = |e: rcgen::Error| TrustError::Issue { whom: "the authority".into(), why: e.to_string() };
        let key = KeyPair::generate().map_err(failed)?;
        let mut params = params("Godwit CA", Validity::lasting(DAY * AUTHORITY_DAYS as u32));
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let cert = params.self_signed(&key).map_err(failed)?;
        private_file::make_dir(dir)?;
        // The certificate last: with it, the authority exists.
        private_file::replace(&key_path, 0o600, &key.serialize_pem())?;
        private_file::replace(&cert_path, 0o644, &cert.pem())?;
        Self::open(dir)
    }

    /// Opens the authority that [`create`](Self::create) made in `dir`.
    ///
    /// # Errors
    /// A file is missing, is no PEM, or the key's is readable by others.
    pub fn open(dir: &Path) -> Result<Self, TrustError> {
        let (cert_path, key_path) = (dir.join(CA_FILE), dir.join(CA_KEY_FILE));
        let pem = private_file::read(&cert_path)?;
        let key = KeyPair::from_pem(&private_file::read_key(&key_path)?)
            .map_err(|e| TrustError::Content { path: key_path, why: e.to_string() })?;
        let der = CertificateDer::from_pem_slice(pem.as_bytes())
            .map_err(|e| TrustError::Content { path: cert_path.clone(), why: e.to_string() })?;
        let issuer = Issuer::from_ca_cert_der(&der, key)
            .map_err(|e| TrustError::Content { path: cert_path, why: e.to_string() })?;
        let fingerprint = fingerprint(&der);
        Ok(Self { issuer, pem, fingerprint })
    }

    /// Its certificate.
    #[must_use]
    pub fn pem(&self) -> &str {
        &self.pem
    }

    /// Names its certificate in enrolment tokens: 32 hex digits.
    #[must_use]
    pub fn fingerprint(&self) -> &str {
        &self.fingerprint
    }

    /// Makes a key and a certificate for `identity`. Nothing is kept here: the key exists only in the result.
    ///
    /// # Errors
    /// The system gave no randomness, or the validity lies outside of X.509's years.
    pub fn issue(&self, identity: &Identity, validity: Validity) -> Result<Issued, TrustError> {
        let failed = |e: rcgen::Error| TrustError::Issue { whom: identity.to_string(), why: e.to_string() };
        let params = holder(identity, validity)?;
        let key = KeyPair::generate().map_err(failed)?;
        let cert = params.signed_by(&key, &self.issuer).map_err(failed)?;
        Ok(Issued { ca_pem: self.pem.clone(), cert_pem: cert.pem(), key_pem: key.serialize_pem() })
    }

    /// Signs a key that somebody else made and keeps: a certificate for `identity`, as PEM. Of the request only the key
    /// counts, and the name in it has to be `identity`'s: what else it asks for is not granted.
    ///
    /// # Errors
    /// The request is no CSR, is not signed by its own key, or names somebody else.
    pub fn sign(&self, request_pem: &str, identity: &Identity, validity: Validity) -> Result<String, TrustError> {
        let failed = |why: String| TrustError::Issue { whom: identity.to_string(), why };
        if request_pem.len() > MAX_REQUEST {
            return Err(failed(format!("the request has more than {MAX_REQUEST} bytes")));
        }
        // Checks the request's own signature: whoever asks has the key.
        let asked = CertificateSigningRequestParams::from_pem(request_pem)
            .map_err(|e| failed(format!("the request is none: {e}")))?;
        let name = match asked.params.distinguished_name.get(&DnType::CommonName) {
            Some(DnValue::Utf8String(name)) => name.clone(),
            other => format!("{other:?}"),
        };
        if name != identity.to_string() {
            return Err(failed(format!("the request is for {name}")));
        }
        let params = holder(identity, validity)?;
        let cert = params.signed_by(&asked.public_key, &self.issuer).map_err(|e| failed(e.to_string()))?;
        Ok(cert.pem())
    }
}

/// A new key, and the request to certify it. `Debug` leaves the key out.
pub struct KeyRequest {
    /// The private key (PKCS #8, PEM): it stays where it was made.
    pub key_pem: String,
    /// The request, PEM.
    pub request_pem: String,
}

impl fmt::Debug for KeyRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeyRequest").finish_non_exhaustive()
    }
}

impl KeyRequest {
    /// Makes a key for `identity`.
    ///
    /// # Errors
    /// The system gave no randomness.
    pub fn new(identity: &Identity) -> Result<Self, TrustError> {
        let failed = |e: rcgen::Error| TrustError::Issue { whom: identity.to_string(), why: e.to_string() };
        let key = KeyPair::generate().map_err(failed)?;
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, identity.to_string());
        let request = params.serialize_request(&key).and_then(|r| r.pem()).map_err(failed)?;
        Ok(Self { key_pem: key.serialize_pem(), request_pem: request })
    }
}

/// What stands in a certificate of `identity`.
fn holder(identity: &Identity, validity: Validity) -> Result<CertificateParams, TrustError> {
    let failed = |why: String| TrustError::Issue { whom: identity.to_string(), why };
    let text = |text: String| text.try_into().map_err(|e: rcgen::Error| failed(e.to_string()));
    if validity.from >= validity.until {
        return Err(failed("its validity ends before it begins".into()));
    }
    let mut params = params(&identity.to_string(), validity);
    params.subject_alt_names = vec![SanType::URI(text(identity.uri())?), SanType::DnsName(text(identity.dns_name())?)];
    params.use_authority_key_identifier_extension = true;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    if identity.role().serves() {
        params.extended_key_usages.push(ExtendedKeyUsagePurpose::ServerAuth);
    }
    Ok(params)
}

fn params(common_name: &str, validity: Validity) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, common_name);
    params.not_before = validity.from.into();
    params.not_after = validity.until.into();
    params
}
