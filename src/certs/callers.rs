//! `--client-ca`: who may call the webhook.
//!
//! An API server shows a client certificate where its AdmissionConfiguration names one; most managed clusters can't be
//! told to. Without it anybody who reaches the port may ask; the answers are the same for everybody and tell of boosts
//! alone.

use std::{path::Path, sync::Arc};

use rustls::{
    RootCertStore,
    crypto::CryptoProvider,
    pki_types::{CertificateDer, pem::PemObject},
    server::{VerifierBuilderError, WebPkiClientVerifier, danger::ClientCertVerifier},
};

/// Why callers can't be verified.
#[derive(Debug, thiserror::Error)]
pub enum CallersError {
    /// The file can't be read, or is no PEM.
    #[error("the file can't be read as certificates in PEM form")]
    File(#[source] rustls::pki_types::pem::Error),
    /// It has no certificate.
    #[error("the file has no certificate")]
    Empty,
    /// One of them is no CA that can be used.
    #[error("a certificate in the file can't be used")]
    Certificate(#[source] rustls::Error),
    /// All of them together can't be used.
    #[error("the certificates in the file can't be used")]
    Verifier(#[source] VerifierBuilderError),
}

/// Verifies callers by the CAs in a PEM file; without a file, nobody is asked for a certificate.
///
/// # Errors
/// When the file holds no usable certificates.
pub(super) fn verifier(
    file: Option<&Path>,
    provider: &Arc<CryptoProvider>,
) -> Result<Arc<dyn ClientCertVerifier>, CallersError> {
    let Some(file) = file else {
        return Ok(WebPkiClientVerifier::no_client_auth());
    };
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_file_iter(file).map_err(CallersError::File)? {
        let certificate = certificate.map_err(CallersError::File)?;
        roots.add(certificate).map_err(CallersError::Certificate)?;
    }
    if roots.is_empty() {
        return Err(CallersError::Empty);
    }
    WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(provider))
        .build()
        .map(|verifier| verifier as Arc<dyn ClientCertVerifier>)
        .map_err(CallersError::Verifier)
}
