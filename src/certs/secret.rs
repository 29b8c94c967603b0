//! Certificates that Headstart makes: one Secret, rotated by whichever replica comes first, served by all.
//!
//! The Secret is watched, not mounted (a mounted file lags behind by up to minutes), and each write to it carries its
//! `resourceVersion`, so that of several replicas one wins and the others take what it made. The CAs go into the webhook
//! configuration, and back when somebody wipes them.

use std::sync::{Mutex, MutexGuard, PoisonError};

use k8s_openapi::{
    ByteString,
    api::{admissionregistration::v1::MutatingWebhookConfiguration, core::v1::Secret},
};
use kube::{
    Api, Client, ResourceExt,
    api::{ListParams, Patch, PatchParams, PostParams},
};
use serde_json::json;
use tokio::{
    sync::Notify,
    time::{Duration, Instant, timeout},
};

use super::{
    Bundle, Certs, Held, Lifetimes, PkiError,
    rotation::{self, Configuration, Step},
};
use crate::{error::Chain, watch};

/// Keys of the Secret: the names that `kubernetes.io/tls` Secrets have, and the CA's key beside them.
const SECRET_KEYS: [&str; 4] = ["ca.crt", "ca.key", "tls.crt", "tls.key"];
/// How long to go by a time that was worked out before: the wall clock may have been set, or the machine suspended.
const CHECK: Duration = Duration::from_secs(57);
/// What is due at an instant is spread over so much more, so that replicas don't all write at once.
const SPREAD: Duration = Duration::from_secs(3);
/// What follows from a change is spread over so much: one write shows the others that there is nothing left to do.
const MOMENT: Duration = Duration::from_millis(200);
/// How long a write may take.
const DEADLINE: Duration = Duration::from_secs(5);
/// After a write: until the watches have told what came of it, or until it is tried again.
const RETRY: Duration = Duration::from_secs(1);

/// Where the certificates are kept, and for how long they are made.
#[derive(Clone, Debug)]
pub struct Params {
    /// Namespace of the Secret.
    pub namespace: String,
    /// The Secret. It must exist: the manifests bring it empty, so that no right to create Secrets is needed.
    pub secret: String,
    /// The webhook configuration.
    pub webhook: String,
    /// How long certificates are valid.
    pub lifetimes: Lifetimes,
}

/// Keeps the Secret and the webhook configuration in order, for ever.
pub(super) async fn keep(certs: &Certs, client: &Client, params: &Params) {
    let keeper = Keeper {
        certs,
        params,
        secrets: Api::namespaced(client.clone(), &params.namespace),
        webhooks: Api::all(client.clone()),
        seen: Mutex::default(),
        changed: Notify::new(),
    };
    let secret = watch::one(keeper.secrets.clone(), &params.secret, |secret| {
        keeper.tell(|seen| seen.secret = secret);
    });
    let webhook = watch::one(keeper.webhooks.clone(), &params.webhook, |webhook| {
        keeper.tell(|seen| seen.read_back(webhook));
    });
    tokio::join!(secret, webhook, keeper.act());
}

struct Keeper<'a> {
    certs: &'a Certs,
    params: &'a Params,
    secrets: Api<Secret>,
    webhooks: Api<MutatingWebhookConfiguration>,
    seen: Mutex<Seen>,
    changed: Notify,
}

/// What the watches have told.
#[derive(Default)]
struct Seen {
    secret: Option<Secret>,
    webhook: Option<ReadBack>,
}

/// The webhook configuration as it was read.
#[derive(Clone)]
struct ReadBack {
    configuration: MutatingWebhookConfiguration,
    /// Since when it has had the CAs that it has.
    since: Instant,
}

/// What has to be done, and with what.
struct Task {
    step: Step,
    secret: Secret,
    held: Held,
    webhook: Option<ReadBack>,
}

/// Why a step was not taken.
#[derive(Debug, thiserror::Error)]
enum SecretError {
    #[error(transparent)]
    Pki(#[from] PkiError),
    #[error(transparent)]
    Api(#[from] kube::Error),
    #[error("no answer within {DEADLINE:?}")]
    Silence(#[from] tokio::time::error::Elapsed),
}

impl Keeper<'_> {
    fn tell(&self, set: impl FnOnce(&mut Seen)) {
        set(&mut self.seen());
        self.changed.notify_one();
    }

    fn seen(&self) -> MutexGuard<'_, Seen> {
        // Nobody panics while holding it: fields are only set and cloned.
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn act(&self) {
        loop {
            let Some(task) = self.look() else {
                self.changes_within(CHECK).await;
                continue;
            };
            let waits = matches!(task.step, Step::Wait(_));
            let pause = match task.step {
                Step::Wait(time) => time.min(CHECK) + SPREAD.mul_f64(fastrand::f64()),
                _ => MOMENT.mul_f64(fastrand::f64()),
            };
            if self.changes_within(pause).await || waits {
                continue;
            }
            if let Err(error) = self.take(task).await {
                error.log();
            }
            self.changes_within(RETRY).await;
        }
    }

    async fn changes_within(&self, time: Duration) -> bool {
        timeout(time, self.changed.notified()).await.is_ok()
    }

    /// Serves what the Secret holds, and decides what has to be done.
    fn look(&self) -> Option<Task> {
        let (secret, webhook) = {
            let seen = self.seen();
            (seen.secret.clone(), seen.webhook.clone())
        };
        let Some(secret) = secret else {
            tracing::info!(
                secret = self.params.secret,
                "waiting for the certificates' Secret, which the manifests bring"
            );
            return None;
        };
        let held = self.hold(&secret);
        let (state, lifetimes) = (held.state(), self.params.lifetimes);
        if let (Ok(leaf), Some(due)) = (&held.leaf, state.due(lifetimes)) {
            self.certs.serve(&held, leaf, due);
        }
        let published = Configuration::of(webhook.as_ref(), &held.bundle);
        let step = rotation::next(&state, published, lifetimes, self.certs.clock.now());
        Some(Task {
            step,
            secret,
            held,
            webhook,
        })
    }

    /// What the Secret holds. Where nothing of it can be used, what is served still can, and its CA stays known.
    fn hold(&self, secret: &Secret) -> Held {
        let held = self.certs.read(texts(secret));
        let served = self.certs.served.load();
        match served.as_ref() {
            Some(served) if held.state().is_lost(self.certs.clock.now()) => {
                self.certs.read(Bundle {
                    ca: format!("{}{}", served.bundle.ca, held.bundle.ca),
                    ca_key: String::new(),
                    ..served.bundle.clone()
                })
            }
            _ => held,
        }
    }

    /// Takes a step.
    async fn take(&self, task: Task) -> Result<(), SecretError> {
        let (now, lifetimes) = (self.certs.clock.now(), self.params.lifetimes);
        let (names, held) = (&self.certs.names, &task.held);
        let bundle = match task.step {
            Step::Wait(_) => return Ok(()),
            Step::Publish => return self.publish_newest(&task).await,
            Step::All => held
                .needed(lifetimes, now)
                .with_authority(lifetimes, now)?
                .with_leaf(names, lifetimes, now)?,
            Step::Authority => held.needed(lifetimes, now).with_authority(lifetimes, now)?,
            Step::Leaf => held.bundle.clone().with_leaf(names, lifetimes, now)?,
            Step::Drop => held.needed(lifetimes, now),
        };
        let trouble = held.leaf.as_ref().err();
        tracing::info!(
            secret = self.params.secret,
            step = ?task.step,
            trouble = trouble.map(|error| Chain(error).to_string()),
            "rotating certificates"
        );
        self.write(task.secret, &bundle).await?;
        // Whoever has changed the CAs publishes them at once, and the others find it done.
        match &task.webhook {
            Some(webhook) if bundle.ca != held.bundle.ca => {
                self.publish(&webhook.configuration, &bundle.ca).await
            }
            _ => Ok(()),
        }
    }

    /// Writes the Secret that was read, or fails with a conflict.
    async fn write(&self, mut secret: Secret, bundle: &Bundle) -> Result<(), SecretError> {
        let read = secret.resource_version();
        let values = [&bundle.ca, &bundle.ca_key, &bundle.cert, &bundle.key];
        let data = secret.data.get_or_insert_default();
        for (key, value) in SECRET_KEYS.into_iter().zip(values) {
            data.insert(key.to_owned(), ByteString(value.as_bytes().to_vec()));
        }
        let params = PostParams::default();
        let write = self.secrets.replace(&self.params.secret, &params, &secret);
        let written = timeout(DEADLINE, write).await??;
        let mut seen = self.seen();
        // Where the watch was quicker, it may have told of a later write too.
        if version(seen.secret.as_ref()) == read {
            seen.secret = Some(written);
        }
        Ok(())
    }

    /// Publishes the CAs of a Secret that nobody has changed since. A watch that hangs tells of it a minute late, and CAs of
    /// then must not take the place of those that leaves are of by now.
    async fn publish_newest(&self, task: &Task) -> Result<(), SecretError> {
        let Some(webhook) = &task.webhook else {
            return Ok(());
        };
        let name = format!("metadata.name={}", self.params.secret);
        let params = ListParams::default().fields(&name);
        let list = timeout(DEADLINE, self.secrets.list(&params)).await??;
        let newest = list.items.into_iter().next();
        if version(newest.as_ref()) != task.secret.resource_version() {
            self.seen().secret = newest;
            self.changed.notify_one();
            return Ok(());
        }
        let ca = &task.held.bundle.ca;
        self.publish(&webhook.configuration, ca).await
    }

    /// Puts the CAs into every webhook of the configuration that has others.
    async fn publish(
        &self,
        webhook: &MutatingWebhookConfiguration,
        ca: &str,
    ) -> Result<(), SecretError> {
        let ca = ByteString(ca.as_bytes().to_vec());
        let lacking: Vec<_> = webhook
            .webhooks
            .iter()
            .flatten()
            .filter(|webhook| webhook.client_config.ca_bundle.as_ref() != Some(&ca))
            .map(|webhook| json!({"name": webhook.name, "clientConfig": {"caBundle": ca}}))
            .collect();
        tracing::info!(
            webhook = self.params.webhook,
            "writing the CA into the webhook configuration"
        );
        let body = json!({
            "metadata": {"resourceVersion": webhook.metadata.resource_version},
            "webhooks": lacking,
        });
        let params = PatchParams {
            field_manager: Some("headstart".to_owned()),
            ..PatchParams::default()
        };
        // Strategic: merged by the webhooks' names, so nothing else of them is written.
        let body = Patch::Strategic(body);
        let write = self.webhooks.patch(&self.params.webhook, &params, &body);
        timeout(DEADLINE, write).await??;
        Ok(())
    }
}

impl Seen {
    fn read_back(&mut self, configuration: Option<MutatingWebhookConfiguration>) {
        let before = self.webhook.take();
        self.webhook = configuration.map(|configuration| {
            let same = before
                .filter(|before| published(&before.configuration).eq(published(&configuration)));
            ReadBack {
                since: same.map_or_else(Instant::now, |same| same.since),
                configuration,
            }
        });
    }
}

impl Configuration {
    fn of(webhook: Option<&ReadBack>, bundle: &Bundle) -> Self {
        let Some(webhook) = webhook else {
            return Self::Absent;
        };
        let mut published = published(&webhook.configuration);
        if published.all(|ca| ca.is_some_and(|ca| ca.0 == bundle.ca.as_bytes())) {
            Self::Published(webhook.since.elapsed())
        } else {
            Self::Outdated
        }
    }
}

impl SecretError {
    fn log(&self) {
        match self {
            // Another replica was quicker; its write is on its way to us.
            Self::Api(kube::Error::Api(status)) if status.is_conflict() => {
                tracing::debug!("another replica was quicker");
            }
            error => {
                tracing::warn!(error = %Chain(error), "certificates could not be brought in order; trying again");
            }
        }
    }
}

fn version(secret: Option<&Secret>) -> Option<String> {
    secret.and_then(ResourceExt::resource_version)
}

/// The CAs in each webhook of a configuration.
fn published(
    configuration: &MutatingWebhookConfiguration,
) -> impl Iterator<Item = Option<&ByteString>> {
    let webhooks = configuration.webhooks.iter().flatten();
    webhooks.map(|webhook| webhook.client_config.ca_bundle.as_ref())
}

fn texts(secret: &Secret) -> Bundle {
    let text = |key| {
        let value = secret.data.as_ref().and_then(|data| data.get(key));
        let text = value.map(|value| String::from_utf8(value.0.clone()));
        text.and_then(Result::ok).unwrap_or_default()
    };
    let [ca, ca_key, cert, key] = SECRET_KEYS.map(text);
    Bundle {
        ca,
        ca_key,
        cert,
        key,
    }
}
