//! The webhook's certificates: one Secret with a CA and a leaf, made by whichever replica comes first, served by all.
//!
//! The Secret is watched, not mounted (a mounted file lags behind by up to minutes), and each write to it carries its
//! `resourceVersion`, so that of several replicas one wins and the others take what it made. The CA goes into the webhook
//! configuration, and back when somebody wipes it.

mod callers;
mod pki;

use std::{
    path::Path,
    sync::{Arc, Mutex, PoisonError},
};

use arc_swap::ArcSwapOption;
use k8s_openapi::{
    ByteString,
    api::{admissionregistration::v1::MutatingWebhookConfiguration, core::v1::Secret},
};
use kube::{
    Api, Client,
    api::{Patch, PatchParams, PostParams},
    runtime::watcher::Event,
};
use rustls::{
    RootCertStore, ServerConfig,
    server::{ClientHello, ResolvesServerCert, danger::ClientCertVerifier},
    sign::CertifiedKey,
};
use serde_json::json;
use tokio::{
    sync::Notify,
    time::{Duration, sleep, timeout},
};

pub use self::{
    callers::CallersError,
    pki::{Bundle, PkiError, Step, next},
};
use crate::{
    clock::Clock,
    error::Chain,
    metrics::Metrics,
    watch::{Told, forever, named},
};

/// Keys of the Secret: the names that `kubernetes.io/tls` Secrets have, and the CA's key beside them.
const SECRET_KEYS: [&str; 4] = ["ca.crt", "ca.key", "tls.crt", "tls.key"];
/// How often to look without being told, so that a certificate that ends is noticed by the wall clock.
const CHECK: Duration = Duration::from_secs(60);
/// How long a write may take.
const DEADLINE: Duration = Duration::from_secs(5);
/// After a write that failed.
const RETRY: Duration = Duration::from_secs(1);

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

/// Where the certificates are kept, and for which names.
#[derive(Clone, Debug)]
pub struct Params {
    /// Namespace of the Secret.
    pub namespace: String,
    /// The Secret. It must exist: the manifests bring it empty, so that no right to create Secrets is needed.
    pub secret: String,
    /// The webhook configuration.
    pub webhook: String,
    /// DNS names and addresses of the leaf; the first is what we verify by.
    pub names: Vec<String>,
}

/// Keeps the certificates.
pub struct Certs {
    client: Client,
    params: Params,
    clock: Clock,
    metrics: Arc<Metrics>,
    slot: Arc<CertSlot>,
    roots: ArcSwapOption<RootCertStore>,
    seen: Mutex<Seen>,
    changed: Notify,
}

/// What the watches have told.
#[derive(Debug, Default)]
struct Seen {
    secret: Option<Secret>,
    webhook: Option<MutatingWebhookConfiguration>,
}

/// Why a step was not taken.
#[derive(Debug, thiserror::Error)]
enum CertError {
    #[error(transparent)]
    Pki(#[from] PkiError),
    #[error(transparent)]
    Api(#[from] kube::Error),
    #[error("no answer within {DEADLINE:?}")]
    Silence(#[from] tokio::time::error::Elapsed),
}

impl Certs {
    /// Certificates for these names.
    #[must_use]
    pub fn new(client: Client, params: Params, clock: Clock, metrics: Arc<Metrics>) -> Self {
        Self {
            client,
            params,
            clock,
            metrics,
            slot: Arc::default(),
            roots: ArcSwapOption::empty(),
            seen: Mutex::default(),
            changed: Notify::new(),
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
        self.roots.load_full()
    }

    /// The name by which it can be verified.
    #[must_use]
    pub fn name(&self) -> &str {
        self.params
            .names
            .first()
            .map(String::as_str)
            .unwrap_or_default()
    }

    /// Keeps them, for ever.
    pub async fn keep(&self) {
        let secrets = Api::<Secret>::namespaced(self.client.clone(), &self.params.namespace);
        let webhooks = Api::<MutatingWebhookConfiguration>::all(self.client.clone());
        let secret = forever(secrets, named(&self.params.secret), |told| {
            self.tell(told, |seen, secret| seen.secret = secret);
        });
        let webhook = forever(webhooks, named(&self.params.webhook), |told| {
            self.tell(told, |seen, webhook| seen.webhook = webhook);
        });
        tokio::join!(secret, webhook, self.act());
    }

    fn tell<K>(&self, told: Told<K>, set: impl FnOnce(&mut Seen, Option<K>)) {
        let mut seen = self.seen();
        match told {
            Told::Event(Event::Apply(object) | Event::InitApply(object)) => {
                set(&mut seen, Some(object));
            }
            Told::Event(Event::Delete(_)) => set(&mut seen, None),
            Told::Event(Event::Init | Event::InitDone) | Told::Absent => return,
        }
        self.changed.notify_one();
    }

    fn seen(&self) -> std::sync::MutexGuard<'_, Seen> {
        // Nobody panics while holding it: fields are only set and cloned.
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn act(&self) {
        loop {
            let pause = match self.step().await {
                Ok(()) => CHECK,
                // Another replica was quicker; its write is on its way to us.
                Err(CertError::Api(kube::Error::Api(status))) if status.is_conflict() => RETRY,
                Err(error) => {
                    tracing::warn!(error = %Chain(&error), "certificates could not be brought in order; trying again");
                    RETRY
                }
            };
            tokio::select! {
                () = self.changed.notified() => {}
                () = sleep(pause) => {}
            }
        }
    }

    /// Takes the next step, if there is one.
    async fn step(&self) -> Result<(), CertError> {
        let (secret, webhook) = {
            let seen = self.seen();
            (seen.secret.clone(), seen.webhook.clone())
        };
        let Some(secret) = secret else {
            tracing::info!(
                secret = self.params.secret,
                "waiting for the certificates' Secret, which the manifests bring"
            );
            return Ok(());
        };
        let bundle = read(&secret);
        match next(bundle.as_ref(), &self.params.names, self.clock.now()) {
            Step::Issue(why) => {
                tracing::info!(secret = self.params.secret, why, "issuing certificates");
                self.write(
                    secret,
                    &Bundle::issue(&self.params.names, self.clock.now())?,
                )
                .await?;
            }
            Step::Serve(served) => {
                self.metrics
                    .certificate_not_after
                    .set(served.not_after_seconds);
                self.slot.0.store(Some(served.key));
                self.roots.store(Some(served.roots));
                if let (Some(bundle), Some(webhook)) = (bundle, webhook) {
                    self.publish(&webhook, &bundle.ca).await?;
                }
            }
        }
        Ok(())
    }

    /// Writes the Secret that was read, or fails with a conflict.
    async fn write(&self, mut secret: Secret, bundle: &Bundle) -> Result<(), CertError> {
        let values = [&bundle.ca, &bundle.ca_key, &bundle.cert, &bundle.key];
        let data = secret.data.get_or_insert_default();
        for (key, value) in SECRET_KEYS.into_iter().zip(values) {
            data.insert(key.to_owned(), ByteString(value.as_bytes().to_vec()));
        }
        let api = Api::<Secret>::namespaced(self.client.clone(), &self.params.namespace);
        let params = PostParams::default();
        let write = api.replace(&self.params.secret, &params, &secret);
        let written = timeout(DEADLINE, write).await??;
        self.seen().secret = Some(written);
        self.changed.notify_one();
        Ok(())
    }

    /// Puts the CA into every webhook of the configuration that lacks it.
    async fn publish(
        &self,
        webhook: &MutatingWebhookConfiguration,
        ca: &str,
    ) -> Result<(), CertError> {
        let ca = ByteString(ca.as_bytes().to_vec());
        let lacking: Vec<_> = webhook
            .webhooks
            .iter()
            .flatten()
            .filter(|webhook| webhook.client_config.ca_bundle.as_ref() != Some(&ca))
            .map(|webhook| json!({"name": webhook.name, "clientConfig": {"caBundle": ca}}))
            .collect();
        if lacking.is_empty() {
            return Ok(());
        }
        tracing::info!(
            webhook = self.params.webhook,
            "writing the CA into the webhook configuration"
        );
        let body = json!({
            "metadata": {"resourceVersion": webhook.metadata.resource_version},
            "webhooks": lacking,
        });
        let api = Api::<MutatingWebhookConfiguration>::all(self.client.clone());
        let params = PatchParams {
            field_manager: Some("headstart".to_owned()),
            ..PatchParams::default()
        };
        // Strategic: merged by the webhooks' names, so nothing else of them is written.
        let body = Patch::Strategic(body);
        let write = api.patch(&self.params.webhook, &params, &body);
        timeout(DEADLINE, write).await??;
        Ok(())
    }
}

fn read(secret: &Secret) -> Option<Bundle> {
    let data = secret.data.as_ref()?;
    let [ca, ca_key, cert, key] = SECRET_KEYS.map(|key| {
        data.get(key)
            .and_then(|value| String::from_utf8(value.0.clone()).ok())
    });
    Some(Bundle {
        ca: ca?,
        ca_key: ca_key?,
        cert: cert?,
        key: key?,
    })
}
