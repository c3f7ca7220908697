//! Who is who: certificates, keys, and the TLS configurations that check them.
//!
//! One authority ([`Authority`]) signs every certificate of an installation. A certificate says which role its holder
//! has and what it is called ([`Identity`]); both stand in the certificate itself, so that a session's peer is known
//! without asking anybody. Both sides of every session show one ([`Credentials`]); TLS 1.3 only.
//!
//! # What can go wrong
//!
//! *A key leaks.* Its file is refused when group or world may read it. There is no revocation list: certificates are
//! meant to be short-lived, and [`Credentials::expiry`] tells when to renew.
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
mod credentials;
mod error;
mod identity;
mod private_file;

pub use authority::{Authority, CLOCK_SKEW, Issued, Validity};
pub use credentials::Credentials;
pub use error::{PeerError, TrustError};
pub use identity::{Access, Identity, IdentityError, MAX_NAME, Role, peer_identity};

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
