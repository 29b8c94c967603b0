//! The webhook's certificates: what is served, and where it comes from.
//!
//! Either Headstart makes them (`secret`): a CA and a leaf in one Secret, rotated in the order of [`rotation`] by whichever
//! replica comes first, the CA written into the webhook configuration. Or somebody else does, such as cert-manager, and they
//! are read from `files`.

mod callers;
mod files;
mod pki;
pub mod rotation;
mod secret;

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use arc_swap::ArcSwapOption;
use chrono::{DateTime, Utc};
use kube::Client;
use rustls::{
    RootCertStore, ServerConfig,
    server::{ClientHello, ResolvesServerCert, danger::ClientCertVerifier},
    sign::CertifiedKey,
};

pub use self::{
    callers::CallersError,
    pki::{Bundle, Held, Leaf, PkiError},
    rotation::Lifetimes,
    secret::Params,
};
use crate::{clock::Clock, metrics::Metrics};

/// The certificate that is served. Swapping it counts from the next handshake on; no restart, no broken connection.
#[derive(Debug, Default)]
pub struct CertSlot(ArcSwapOption<CertifiedKey>);

impl CertSlot {
    /// Whether there is one.
    #[must_use]
    pub fn is_loaded(&self) -> bool {
        self.0.load().is_some()
    }
}

impl ResolvesServerCert for CertSlot {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.0.load_full()
    }
}

/// TLS as the webhook serves it: 1.2 and 1.3, HTTP/1.1 only, which is what the API server speaks to webhooks
/// (kubernetes/kubernetes#75791), and no HTTP/2 for anybody to attack.
///
/// With a file of CAs, callers must show a certificate that one of them has signed.
///
/// # Errors
/// When that file holds no usable certificates.
pub fn server_config(
    slot: Arc<CertSlot>,
    client_ca: Option<&Path>,
) -> Result<Arc<ServerConfig>, CallersError> {
    Ok(serving(slot, callers(client_ca)?))
}

/// Verifies callers by the CAs in a PEM file; without a file, nobody is asked for a certificate.
///
/// # Errors
/// When the file holds no usable certificates.
pub fn callers(client_ca: Option<&Path>) -> Result<Arc<dyn ClientCertVerifier>, CallersError> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    callers::verifier(client_ca, &provider)
}

/// The same, where callers are verified in another way.
#[must_use]
pub fn serving(slot: Arc<CertSlot>, verifier: Arc<dyn ClientCertVerifier>) -> Arc<ServerConfig> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("ring has what TLS 1.2 and 1.3 need")
        .with_client_cert_verifier(verifier)
        .with_cert_resolver(slot);
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Arc::new(config)
}

/// Where certificates come from.
pub enum Source {
    /// Headstart makes them, and keeps them in a Secret.
    Secret(Client, Params),
    /// Somebody else renews the files in this folder, as cert-manager does in a Secret that is mounted.
    Directory(PathBuf),
}

/// Keeps the certificates.
pub struct Certs {
    source: Source,
    names: Vec<String>,
    clock: Clock,
    metrics: Arc<Metrics>,
    slot: Arc<CertSlot>,
    served: ArcSwapOption<Served>,
}

/// What is in the slot, and what it is trusted by.
struct Served {
    bundle: Bundle,
    roots: Arc<RootCertStore>,
}

impl Certs {
    /// Certificates for these DNS names and addresses; the first is what we verify by.
    #[must_use]
    pub fn new(source: Source, names: Vec<String>, clock: Clock, metrics: Arc<Metrics>) -> Self {
        Self {
            source,
            names,
            clock,
            metrics,
            slot: Arc::default(),
            served: ArcSwapOption::empty(),
        }
    }

    /// What the listener serves.
    #[must_use]
    pub fn slot(&self) -> Arc<CertSlot> {
        Arc::clone(&self.slot)
    }

    /// The CAs by which the served certificate can be verified.
    #[must_use]
    pub fn roots(&self) -> Option<Arc<RootCertStore>> {
        let served = self.served.load();
        served.as_ref().map(|served| Arc::clone(&served.roots))
    }

    /// The name by which it can be verified.
    #[must_use]
    pub fn name(&self) -> &str {
        self.names.first().map(String::as_str).unwrap_or_default()
    }

    /// Keeps them, for ever.
    pub async fn keep(&self) {
        match &self.source {
            Source::Secret(client, params) => secret::keep(self, client, params).await,
            Source::Directory(directory) => files::keep(self, directory).await,
        }
    }

    /// Reads a bundle as of now.
    fn read(&self, bundle: Bundle) -> Held {
        Held::read(bundle, &self.names, self.clock.now())
    }

    /// Serves a leaf from now on, and shows when it should be renewed.
    fn serve(&self, held: &Held, leaf: &Leaf, due: DateTime<Utc>) {
        let shown = &self.metrics.certificate;
        shown.serves(leaf.state.dates.ends, leaf.authority_ends, due);
        let served = self.served.load();
        if served.as_ref().is_some_and(|it| it.bundle == held.bundle) {
            return;
        }
        self.slot.0.store(Some(Arc::clone(&leaf.key)));
        self.served.store(Some(Arc::new(Served {
            bundle: held.bundle.clone(),
            roots: Arc::new(held.roots()),
        })));
    }
}
