//! How a host becomes a node: a token that was carried there by hand, and a key that never leaves it.
//!
//! A token holds a name, the fingerprint of the CA's certificate, and a secret. The host makes a key, connects to the
//! controller, and believes it only if it shows a chain to a CA with that fingerprint: there is no trust on first use. Then
//! it sends the secret and the request for its key. The controller keeps of the secret its hash alone, and spends the token
//! in the same commit in which it decides to sign.
//!
//! # What can go wrong
//!
//! *Somebody reads the token on its way.* They may enrol in the host's place until it is used; the host then finds it used,
//! which it reports, and `godwit host revoke` voids the stranger's certificate. Tokens end after an hour unless told
//! otherwise.
//!
//! *Somebody reads the controller's store.* A hash of 32 random bytes tells nothing.
//!
//! *The answer is lost.* The token is spent all the same: a certificate may have been issued for a key that the host
//! still has, but who tells? Another token is cheap.

use crate::credentials::{certificates_of, versions};
use crate::{Identity, TrustError, fingerprint};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{Resumption, WebPkiServerVerifier};
use rustls::crypto::{CryptoProvider, ring, verify_tls13_signature};
use rustls::{CertificateError, ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};
use rustls_pki_types::{CertificateDer, ServerName, UnixTime};
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

const PREFIX: &str = "gwe1";
const KIND: &str = "enrolment token";

/// 32 random bytes, as hex. `Debug` shows nothing of it.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// A new one.
    ///
    /// # Errors
    /// The system has no randomness.
    pub fn new() -> Result<Self, TrustError> {
        let mut bytes = [0; 32];
        getrandom::fill(&mut bytes).map_err(|e| TrustError::Randomness { what: "a token", why: e.to_string() })?;
        Ok(Self(hex(&bytes)))
    }

    /// What a store may keep of it.
    #[must_use]
    pub fn hash(&self) -> String {
        blake3::hash(self.0.as_bytes()).to_hex().to_string()
    }

    /// Itself, to be shown to whoever it is for.
    #[must_use]
    pub fn reveal(&self) -> &str {
        &self.0
    }

    /// From what somebody gave; `None` if it is none.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let good = text.len() == 64 && text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
        good.then(|| Self(text.to_owned()))
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// What a host needs to become a node. Printed as `gwe1.NAME.CA.SECRET` by [`reveal`](Self::reveal) alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EnrolmentToken {
    /// Who may enrol with it.
    pub identity: Identity,
    /// The fingerprint of the CA's certificate.
    pub authority: String,
    /// What proves that the token was given.
    pub secret: Secret,
}

impl EnrolmentToken {
    /// The whole token: a secret.
    #[must_use]
    pub fn reveal(&self) -> String {
        format!("{PREFIX}.{}.{}.{}", self.identity.name(), self.authority, self.secret.reveal())
    }
}

impl FromStr for EnrolmentToken {
    type Err = TrustError;
    /// The error never repeats the text: it may be most of a secret.
    fn from_str(text: &str) -> Result<Self, TrustError> {
        let bad = || TrustError::Token { kind: KIND, prefix: PREFIX, parts: 4 };
        let parts: Vec<&str> = text.trim().splitn(5, '.').collect();
        let [PREFIX, name, authority, secret] = parts[..] else { return Err(bad()) };
        let identity = Identity::node(name).map_err(|_| bad())?;
        if authority.len() != 32 || !authority.bytes().all(|b| b.is_ascii_hexdigit()) {
            return Err(bad());
        }
        Ok(Self { identity, authority: authority.to_owned(), secret: Secret::parse(secret).ok_or_else(bad)? })
    }
}

/// What somebody without a certificate asks the API with. Printed as `gwa1.NAME.CA.SECRET` by [`reveal`](Self::reveal) alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AccessToken {
    /// What the token is called.
    pub name: String,
    /// The fingerprint of the CA's certificate.
    pub authority: String,
    /// What proves that the token was given.
    pub secret: Secret,
}

impl AccessToken {
    const PREFIX: &str = "gwa1";

    /// The whole token: a secret.
    #[must_use]
    pub fn reveal(&self) -> String {
        format!("{}.{}.{}.{}", Self::PREFIX, self.name, self.authority, self.secret.reveal())
    }
}

impl FromStr for AccessToken {
    type Err = TrustError;
    /// The error never repeats the text: it may be most of a secret.
    fn from_str(text: &str) -> Result<Self, TrustError> {
        let bad = || TrustError::Token { kind: "token of the API", prefix: Self::PREFIX, parts: 4 };
        let parts: Vec<&str> = text.trim().splitn(5, '.').collect();
        let [Self::PREFIX, name, authority, secret] = parts[..] else { return Err(bad()) };
        let (name, authority) = (name.to_owned(), authority.to_owned());
        Ok(Self { name, authority, secret: Secret::parse(secret).ok_or_else(bad)? })
    }
}

/// For whoever has a token and nothing else: TLS 1.3, no certificate is shown, and the server's must lead to a CA with
/// this fingerprint, which the server shows too.
#[must_use]
pub fn enrolment_client(authority: &str, alpn: &[u8]) -> Arc<ClientConfig> {
    let provider = Arc::new(ring::default_provider());
    let pinned = Pinned { authority: authority.to_owned(), provider: Arc::clone(&provider) };
    let mut config = versions(ClientConfig::builder_with_provider(provider))
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(pinned))
        .with_no_client_auth();
    config.resumption = Resumption::disabled();
    config.alpn_protocols = vec![alpn.to_vec()];
    Arc::new(config)
}

/// Whether this is the certificate of the CA that the fingerprint names.
///
/// # Errors
/// It is no PEM, or another's.
pub fn check_authority(pem: &str, authority: &str) -> Result<(), TrustError> {
    let path = std::path::Path::new("the CA's certificate");
    let found = certificates_of(pem, path)?;
    if fingerprint(&found[0]) == authority {
        return Ok(());
    }
    Err(TrustError::Content { path: path.into(), why: "it is not the one that the token names".into() })
}

/// Believes the CA of one fingerprint.
#[derive(Debug)]
struct Pinned {
    authority: String,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for Pinned {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let unknown = || rustls::Error::InvalidCertificate(CertificateError::UnknownIssuer);
        let authority = intermediates.iter().find(|der| fingerprint(der) == self.authority).ok_or_else(unknown)?;
        let mut roots = RootCertStore::empty();
        roots.add(authority.clone().into_owned()).map_err(|_| unknown())?;
        let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&self.provider))
            .build()
            .map_err(|_| unknown())?;
        verifier.verify_server_cert(end_entity, &[], server_name, ocsp, now)
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _cert: &CertificateDer<'_>,
        _dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Err(rustls::Error::General("TLS 1.3 only".into()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, cert, dss, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    bytes.iter().flat_map(|b| [DIGITS[usize::from(b >> 4)], DIGITS[usize::from(b & 15)]]).map(char::from).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_reads_as_it_is_revealed_and_shows_nothing_else_of_its_secret() {
        let identity = Identity::node("texas-1").unwrap();
        let token = EnrolmentToken { identity, authority: "0".repeat(32), secret: Secret::new().unwrap() };
        let text = token.reveal();
        assert_eq!(format!("{text}\n").parse::<EnrolmentToken>().unwrap(), token);
        assert!(!format!("{token:?}").contains(token.secret.reveal()));
        assert_ne!(token.secret.hash(), token.secret.reveal());
        for bad in [&text[1..], &text[..text.len() - 1], &format!("{text}.x"), &text.replace("texas-1", "Texas"), ""] {
            let error = bad.parse::<EnrolmentToken>().unwrap_err().to_string();
            assert!(error.contains("no enrolment token"), "{error}");
            assert!(!error.contains(&token.secret.reveal()[..40]), "{error}");
        }
    }
}
