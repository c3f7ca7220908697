//! Who is who: certificates, keys, and the TLS configurations that check them.
//!
//! One authority ([`Authority`]) signs every certificate of an installation. A certificate says which role its holder
//! has and what it is called ([`Identity`]); both stand in the certificate itself, so that a session's peer is known
//! without asking anybody. Both sides of every session show one ([`Credentials`]); TLS 1.3 only.
//!
//! # What can go wrong
//!
//! *A key leaks.* Its file is refused when group or world may read it. Its holder's certificates can be revoked
//! ([`Revocations`]); and they are short-lived, and exchanged while everything goes on ([`Credentials::renew`]).
//!
//! *A node is taken over.* It has a good certificate and does with it what it likes. So a certificate says who somebody is
//! and nothing of what they may have: what one node does for another takes a [`Capability`] that the controller signed.
//!
//! *A stranger wants to be a node.* It needs an [`EnrolmentToken`].
//!
//! *A holder of a good certificate plays another.* The CA alone proves membership, not identity. So who connects asks
//! for the server's [`Identity::server_name`], which TLS checks, and who accepts reads [`peer_identity`] and decides.
//!
//! *A certificate outlives its session cache.* A resumed TLS session shows no certificate again, and would be
//! accepted after it expired: so sessions are never resumed.
//!
//! *A clock is wrong.* Certificates begin [`CLOCK_SKEW`] before they are issued, and the errors name the times compared.

#![forbid(unsafe_code)]

mod authority;
mod capability;
mod credentials;
mod enrolment;
mod error;
mod identity;
mod private_file;
mod revocation;

pub use authority::{Authority, CLOCK_SKEW, Issued, KeyRequest, Validity};
pub use capability::{Capability, CapabilityError, MAX_CAPABILITY, MAX_THINGS, SignedCapability};
pub use credentials::{Credentials, RENEWED_FILE};
pub use enrolment::{AccessToken, EnrolmentToken, Secret, check_authority, enrolment_client};
pub use error::{PeerError, TrustError};
pub use identity::{Access, Identity, IdentityError, MAX_NAME, PeerCertificate, Role, peer_identity};
pub use private_file::keep_beside;
pub use revocation::{MAX_REVOCATIONS, Revocations};

/// The file of the authority's certificate, in an authority's folder and beside a certificate that it issued.
pub const CA_FILE: &str = "ca.pem";
/// The file of the authority's key, in its own folder only.
pub const CA_KEY_FILE: &str = "ca-key.pem";
/// The file of a holder's certificate.
pub const CERT_FILE: &str = "cert.pem";
/// The file of a holder's key.
pub const KEY_FILE: &str = "key.pem";

/// The first 16 bytes, in hex, of BLAKE3 over a certificate's DER: what an enrolment token carries of its CA.
fn fingerprint(der: &[u8]) -> String {
    blake3::hash(der).to_hex()[..32].to_string()
}
