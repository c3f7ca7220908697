//! What can be wrong with our own certificate, and with a peer's.

use crate::{Identity, IdentityError, Role};
use rustls::{AlertDescription, CertificateError};
use std::io;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};
use thiserror::Error;

/// Our own certificates and keys cannot be used.
#[derive(Debug, Error)]
pub enum TrustError {
    /// A file could not be read or written.
    #[error("{doing} {}: {source}", path.display())]
    File {
        /// What was tried.
        doing: &'static str,
        /// On which file.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
    /// An authority is there already.
    #[error("{} exists: open that authority, or name another folder; a new key would disown every node", .0.display())]
    AuthorityExists(PathBuf),
    /// Somebody else may read a key.
    #[error("{} has mode {mode:03o}: others may read the key; run `chmod 600 {}`", path.display(), path.display())]
    KeyReadable {
        /// The key's file.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// A PEM file holds something else.
    #[error("{}: {why}; issue it again", path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// The certificate names no identity.
    #[error("{}: {source}", path.display())]
    Unnamed {
        /// The certificate's file.
        path: PathBuf,
        /// What is wrong with its names.
        source: PeerError,
    },
    /// It is over.
    #[error("{}: expired at {}; issue a new one", path.display(), utc(*since))]
    Expired {
        /// The certificate's file.
        path: PathBuf,
        /// Since when.
        since: SystemTime,
    },
    /// It has not begun.
    #[error("{}: valid only from {}; is this host's clock right?", path.display(), utc(*from))]
    NotYetValid {
        /// The certificate's file.
        path: PathBuf,
        /// From when.
        from: SystemTime,
    },
    /// Certificate, key and CA do not belong together.
    #[error("{}: {why}; take all three files from one issue", path.display())]
    Mismatch {
        /// The certificate's file.
        path: PathBuf,
        /// What does not fit.
        why: String,
    },
    /// A name that cannot stand in a certificate.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// A text that is no token, or a token of another kind.
    #[error("this is no {kind}: it begins with {prefix} and has {parts} parts; copy the whole line, and nothing else")]
    Token {
        /// What was expected.
        kind: &'static str,
        /// How one begins.
        prefix: &'static str,
        /// How many parts, with dots between, one has.
        parts: usize,
    },
    /// The system has no randomness for a secret.
    #[error("the system gives no randomness for {what}: {why}")]
    Randomness {
        /// What it was for.
        what: &'static str,
        /// Its error.
        why: String,
    },
    /// A list of revocations that is not believed.
    #[error(
        "a list of {entries} revocations: {most} are the most that is kept; issue certificates that last less long"
    )]
    TooManyRevocations {
        /// How many it has.
        entries: usize,
        /// How many it may have.
        most: usize,
    },
    /// A certificate could not be made.
    #[error("issuing a certificate for {whom}: {why}")]
    Issue {
        /// For whom.
        whom: String,
        /// Why not.
        why: String,
    },
}

/// A peer that we do not believe, or that does not believe us.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum PeerError {
    /// It showed nothing.
    #[error("the peer showed no certificate")]
    NoCertificate,
    /// Its certificate names no identity of ours.
    #[error("the peer's certificate names no identity: {why}")]
    NoIdentity {
        /// What is wrong with its names.
        why: String,
    },
    /// Its certificate is over.
    #[error("the peer's certificate expired at {}; issue it a new one", utc(*since))]
    Expired {
        /// Since when.
        since: SystemTime,
    },
    /// Its certificate has not begun.
    #[error("the peer's certificate is valid only from {}; compare both hosts' clocks", utc(*from))]
    NotYetValid {
        /// From when.
        from: SystemTime,
    },
    /// It was revoked.
    #[error("the certificate of {peer} is revoked; enrol it again, if it is to be trusted again")]
    Revoked {
        /// Whose.
        peer: String,
    },
    /// Somebody else's CA.
    #[error(
        "the peer's certificate is not signed by our CA: it belongs to another installation, or its CA was replaced"
    )]
    WrongAuthority,
    /// A good certificate of somebody else.
    #[error("reached {reached} instead of {wanted}: is the address right?")]
    WrongName {
        /// Who was meant: the DNS name asked for.
        wanted: String,
        /// Who answered: the names in its certificate.
        reached: String,
    },
    /// A good certificate of another role.
    #[error("the peer is {peer}, but only a {wanted} may do this")]
    WrongRole {
        /// Who it is.
        peer: Identity,
        /// The role that was needed.
        wanted: Role,
    },
    /// The peer refused ours.
    #[error("the peer refused our certificate: {why}")]
    RefusedUs {
        /// Its reason, as far as TLS tells.
        why: String,
    },
    /// Anything else that TLS found.
    #[error("TLS handshake: {0}")]
    Handshake(String),
}

impl PeerError {
    /// What a failed handshake means, from the error that `rustls` gave on our side.
    #[must_use]
    pub fn from_rustls(error: &rustls::Error) -> Self {
        let at = |time: rustls_pki_types::UnixTime| SystemTime::UNIX_EPOCH + Duration::from_secs(time.as_secs());
        match error {
            rustls::Error::NoCertificatesPresented => Self::NoCertificate,
            rustls::Error::AlertReceived(alert) => Self::from_alert(u8::from(*alert)),
            rustls::Error::InvalidCertificate(why) => match why {
                CertificateError::ExpiredContext { not_after, .. } => Self::Expired { since: at(*not_after) },
                CertificateError::NotValidYetContext { not_before, .. } => Self::NotYetValid { from: at(*not_before) },
                // A CA of the same name and another key shows as a bad signature.
                CertificateError::UnknownIssuer | CertificateError::BadSignature => Self::WrongAuthority,
                CertificateError::Revoked => Self::Revoked { peer: "the peer".into() },
                CertificateError::NotValidForNameContext { expected, presented } => {
                    let reached =
                        presented.iter().find_map(|name| name.strip_prefix("DnsName(\"")?.strip_suffix("\")"));
                    Self::WrongName {
                        wanted: expected.to_str().into_owned(),
                        reached: reached.map_or_else(|| presented.join(", "), str::to_owned),
                    }
                }
                other => Self::Handshake(other.to_string()),
            },
            other => Self::Handshake(other.to_string()),
        }
    }

    /// What a failed handshake means where only the alert that we sent, and the words of its reason, are left of
    /// `rustls`' error: QUIC stacks keep no more.
    #[must_use]
    pub fn found(alert: u8, reason: &str) -> Self {
        match AlertDescription::from(alert) {
            AlertDescription::UnknownCA => Self::WrongAuthority,
            AlertDescription::CertificateRevoked => Self::Revoked { peer: "the peer".into() },
            _ if reason.contains("UnknownIssuer") || reason.contains("BadSignature") => Self::WrongAuthority,
            _ => Self::Handshake(reason.into()),
        }
    }

    /// What the peer's TLS alert (its number on the wire) means.
    #[must_use]
    pub fn from_alert(alert: u8) -> Self {
        let why = match AlertDescription::from(alert) {
            AlertDescription::CertificateExpired => "it has expired, or one of the two clocks is wrong".into(),
            AlertDescription::UnknownCA | AlertDescription::DecryptError => "its CA did not sign it".into(),
            AlertDescription::CertificateRequired => "none was shown".into(),
            AlertDescription::CertificateRevoked => "it is revoked".into(),
            AlertDescription::BadCertificate | AlertDescription::CertificateUnknown => {
                "it is not acceptable there".into()
            }
            AlertDescription::NoApplicationProtocol => {
                return Self::Handshake(
                    "the peer speaks another protocol on this port: compare the port numbers".into(),
                );
            }
            other => format!("{other:?}"),
        };
        Self::RefusedUs { why }
    }
}

/// `2026-11-21 07:32:58 UTC`.
pub(crate) fn utc(time: SystemTime) -> String {
    let t = time::OffsetDateTime::from(time);
    format!(
        "{:04}-{:02}-{:02} {:02}:{:02}:{:02} UTC",
        t.year(),
        u8::from(t.month()),
        t.day(),
        t.hour(),
        t.minute(),
        t.second()
    )
}
