//! Certificates in the folder that QEMU's and libnbd's users know: `server-cert.pem`, `server-key.pem` and `ca-cert.pem`.

use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Why TLS cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file.
    #[error("cannot read {}: {source}", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// What is wrong with it.
        source: rustls_pki_types::pem::Error,
    },
    /// What is in the files.
    #[error("the certificates in {} cannot be used: {why}", folder.display())]
    Unusable {
        /// Where they are.
        folder: PathBuf,
        /// What is wrong with them.
        why: String,
    },
}

/// TLS 1.3 with the server's certificate of a folder, for clients that show one of the same folder's authority.
///
/// # Errors
/// When a file is missing or makes no sense.
pub fn tls_from(folder: &Path) -> Result<Arc<ServerConfig>, TlsError> {
    let certificates = |name: &str| {
        let path = folder.join(name);
        let read = CertificateDer::pem_file_iter(&path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
        read.map_err(|source| TlsError::File { path, source })
    };
    let unusable = |why: String| TlsError::Unusable { folder: folder.to_owned(), why };
    let mut authorities = RootCertStore::empty();
    for certificate in certificates("ca-cert.pem")? {
        authorities.add(certificate).map_err(|e| unusable(format!("ca-cert.pem: {e}")))?;
    }
    let path = folder.join("server-key.pem");
    let key = PrivateKeyDer::from_pem_file(&path).map_err(|source| TlsError::File { path, source })?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let clients = WebPkiClientVerifier::builder_with_provider(authorities.into(), provider.clone())
        .build()
        .map_err(|e| unusable(e.to_string()))?;
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(|e| unusable(e.to_string()))?
        .with_client_cert_verifier(clients)
        .with_single_cert(certificates("server-cert.pem")?, key)
        .map_err(|e| unusable(e.to_string()))?;
    // A resumed session shows no certificate, and would be taken after that expired.
    config.send_tls13_tickets = 0;
    Ok(Arc::new(config))
}
