//! Asking callers for a certificate without demanding one: the API server's front proxy has one, a person with a token none.
//!
//! The handshake proves only that a caller has the key. Who has signed the certificate is looked at for each request, by the
//! CAs of that moment: connections live long, and CAs rotate.

use std::sync::Arc;

use rustls::{
    DigitallySignedStruct, DistinguishedName, Error, SignatureScheme,
    client::danger::HandshakeSignatureValid,
    crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature},
    pki_types::{CertificateDer, UnixTime},
    server::danger::{ClientCertVerified, ClientCertVerifier},
};

/// Longest chain that is taken, in bytes: it is kept as long as its connection.
const LONGEST_CHAIN: usize = 16 << 10;

/// Takes any certificate, or none.
#[derive(Debug)]
pub(super) struct AnyCaller(Arc<CryptoProvider>);

impl AnyCaller {
    pub(super) fn new() -> Self {
        Self(Arc::new(rustls::crypto::ring::default_provider()))
    }
}

impl ClientCertVerifier for AnyCaller {
    fn client_auth_mandatory(&self) -> bool {
        false
    }

    /// None: a client written in Go shows no certificate to somebody who names other CAs.
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        leaf: &CertificateDer<'_>,
        more: &[CertificateDer<'_>],
        _: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let bytes: usize = more.iter().map(|one| one.len()).sum();
        if leaf.len() + bytes > LONGEST_CHAIN {
            return Err(Error::General("the chain is too long".to_owned()));
        }
        Ok(ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.0.signature_verification_algorithms;
        verify_tls12_signature(message, cert, dss, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.0.signature_verification_algorithms;
        verify_tls13_signature(message, cert, dss, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
