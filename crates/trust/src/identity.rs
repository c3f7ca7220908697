//! A role and a name, as they stand in a certificate.

use crate::PeerError;
use crate::credentials::validity;
use rustls_pki_types::{CertificateDer, ServerName};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use std::time::SystemTime;
use thiserror::Error;
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer, X509Certificate};

/// The longest name: with the longest role before it, it is still one DNS label (63 characters).
pub const MAX_NAME: usize = 50;

const DOMAIN: &str = "godwit.internal";
const SCHEME: &str = "godwit://";

/// What a certificate's holder is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Role {
    /// Knows sites, hosts and moves; signs capabilities.
    Controller,
    /// The daemon of a host.
    Node,
    /// A person or a program that asks the controller for something.
    Client(Access),
}

/// What a client may ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Access {
    /// Everything, with enrolment of nodes and the claims that override an ownership.
    Admin,
    /// Moves, and reading.
    Operator,
}

impl Role {
    const ALL: [Self; 4] = [Self::Controller, Self::Node, Self::Client(Access::Admin), Self::Client(Access::Operator)];

    /// The word in certificates. None contains a hyphen, so that `ROLE-NAME` has one reading.
    const fn word(self) -> &'static str {
        match self {
            Self::Controller => "controller",
            Self::Node => "node",
            Self::Client(Access::Admin) => "admin",
            Self::Client(Access::Operator) => "operator",
        }
    }

    /// Whether others connect to it: a client's certificate is not good for a server.
    pub(crate) const fn serves(self) -> bool {
        !matches!(self, Self::Client(_))
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())
    }
}

/// Who somebody is. Prints, parses and serialises as `node/texas-1`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Identity {
    role: Role,
    name: String,
}

/// A text that is no identity.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum IdentityError {
    /// A name that could not stand in a certificate.
    #[error(
        "name {0:?}: use 1 to {MAX_NAME} lower-case letters, digits and hyphens, with no hyphen at the start or the end"
    )]
    Name(String),
    /// Not `ROLE/NAME` with a known role.
    #[error("identity {0:?}: write ROLE/NAME, where ROLE is controller, node, admin or operator")]
    Form(String),
}

impl Identity {
    /// An identity.
    ///
    /// # Errors
    /// The name is no DNS label of at most [`MAX_NAME`] characters.
    pub fn new(role: Role, name: impl Into<String>) -> Result<Self, IdentityError> {
        let name = name.into();
        let inside = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit() || c == b'-';
        let good = (1..=MAX_NAME).contains(&name.len())
            && name.bytes().all(inside)
            && !name.starts_with('-')
            && !name.ends_with('-');
        if good { Ok(Self { role, name }) } else { Err(IdentityError::Name(name)) }
    }

    /// A node called `name`. Errors as [`Identity::new`].
    #[allow(clippy::missing_errors_doc, reason = "said in the line above")]
    pub fn node(name: impl Into<String>) -> Result<Self, IdentityError> {
        Self::new(Role::Node, name)
    }

    /// What it is.
    #[must_use]
    pub const fn role(&self) -> Role {
        self.role
    }

    /// What it is called, without its role.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The DNS name in its certificate, such as `node-texas-1.godwit.internal`: never resolved, only compared.
    #[must_use]
    pub fn dns_name(&self) -> String {
        format!("{}-{}.{DOMAIN}", self.role, self.name)
    }

    /// The name to ask TLS for, so that a connection to anybody else fails.
    #[must_use]
    pub fn server_name(&self) -> ServerName<'static> {
        ServerName::try_from(self.dns_name()).expect("a role, a hyphen and a checked name make a DNS label")
    }

    /// The URI in its certificate, such as `godwit://node/texas-1`.
    #[must_use]
    pub fn uri(&self) -> String {
        format!("{SCHEME}{self}")
    }

    /// Refuses a peer of another role.
    ///
    /// # Errors
    /// [`PeerError::WrongRole`].
    pub fn require(&self, role: Role) -> Result<(), PeerError> {
        if self.role == role {
            return Ok(());
        }
        Err(PeerError::WrongRole { peer: self.clone(), wanted: role })
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.role, self.name)
    }
}

impl FromStr for Identity {
    type Err = IdentityError;
    fn from_str(text: &str) -> Result<Self, IdentityError> {
        let form = || IdentityError::Form(text.into());
        let (word, name) = text.split_once('/').ok_or_else(form)?;
        let role = Role::ALL.into_iter().find(|role| role.word() == word).ok_or_else(form)?;
        Self::new(role, name)
    }
}

impl TryFrom<String> for Identity {
    type Error = IdentityError;
    fn try_from(text: String) -> Result<Self, IdentityError> {
        text.parse()
    }
}

impl From<Identity> for String {
    fn from(identity: Identity) -> Self {
        identity.to_string()
    }
}

/// A peer's certificate, as far as it matters after the handshake.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerCertificate {
    /// Whose it is.
    pub identity: Identity,
    /// Its first moment.
    pub from: SystemTime,
    /// Its last moment.
    pub until: SystemTime,
}

impl PeerCertificate {
    /// From the chain that TLS has verified already.
    ///
    /// # Errors
    /// As [`peer_identity`].
    pub fn read(certs: &[CertificateDer<'_>]) -> Result<Self, PeerError> {
        let identity = peer_identity(certs)?;
        let (from, until) = validity(&certs[0]).map_err(|why| PeerError::NoIdentity { why })?;
        Ok(Self { identity, from, until })
    }
}

/// Who a peer is, from the chain that TLS has verified already (`quinn` and `rustls` both hand it over).
///
/// # Errors
/// No certificate, one that cannot be read, or one whose names are not exactly one identity: its URI, and the DNS name
/// that belongs to it.
pub fn peer_identity(certs: &[CertificateDer<'_>]) -> Result<Identity, PeerError> {
    let leaf = certs.first().ok_or(PeerError::NoCertificate)?;
    let unnamed = |why: String| PeerError::NoIdentity { why };
    let (_, cert) = X509Certificate::from_der(leaf).map_err(|e| unnamed(e.to_string()))?;
    let names = cert.subject_alternative_name().map_err(|e| unnamed(e.to_string()))?;
    let names = names.map_or(&[][..], |extension| &extension.value.general_names[..]);
    let (mut uris, mut hosts) = (Vec::new(), Vec::new());
    for name in names {
        match name {
            GeneralName::URI(uri) => uris.push(*uri),
            GeneralName::DNSName(host) => hosts.push(*host),
            _ => {}
        }
    }
    // A certificate with two names would let its holder choose who to be.
    let [uri] = uris[..] else { return Err(unnamed(format!("it has {} URIs, not one", uris.len()))) };
    let text = uri.strip_prefix(SCHEME).ok_or_else(|| unnamed(format!("{uri:?} does not begin with {SCHEME}")))?;
    let identity: Identity = text.parse().map_err(|e: IdentityError| unnamed(e.to_string()))?;
    if hosts != [identity.dns_name()] {
        return Err(unnamed(format!("its DNS names {hosts:?} are not {:?} alone", identity.dns_name())));
    }
    Ok(identity)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identities_read_as_they_print() {
        for role in Role::ALL {
            let identity = Identity::new(role, "texas-1").unwrap();
            assert_eq!(identity.to_string().parse(), Ok(identity.clone()));
            assert!(identity.dns_name().split('.').next().unwrap().len() <= 63);
        }
        assert_eq!(Identity::node("texas-1").unwrap().dns_name(), "node-texas-1.godwit.internal");
    }

    #[test]
    fn names_that_no_certificate_could_carry_are_refused() {
        for bad in ["", "-a", "a-", "A", "a.b", "a/b", "ä", "a b", &"a".repeat(51)] {
            assert_eq!(Identity::node(bad), Err(IdentityError::Name(bad.into())));
        }
        assert!(Identity::new(Role::Controller, "a".repeat(MAX_NAME)).is_ok());
        for bad in ["node", "nobody/x", "node-x", ""] {
            assert_eq!(bad.parse::<Identity>(), Err(IdentityError::Form(bad.into())));
        }
    }
}
