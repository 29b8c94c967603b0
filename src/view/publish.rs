//! Tells the API server's aggregator by which CA our certificate is verified: the same that the webhook has, since it is the
//! same listener. Whatever is published there is copied into the APIService, and back when somebody wipes it.

use std::{
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use k8s_openapi::{
    ByteString, api::admissionregistration::v1::MutatingWebhookConfiguration,
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};
use kube::{
    Api, Client,
    api::{Patch, PatchParams},
};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::{
    sync::Notify,
    time::{sleep, timeout},
};

use crate::{error::Chain, watch};

/// The object that the manifests bring.
const API_SERVICE: &str = "v1alpha1.visibility.autoscaling.x-k8s.io";
/// How long a write may take.
const DEADLINE: Duration = Duration::from_secs(5);
/// After a write that failed.
const RETRY: Duration = Duration::from_secs(1);

/// An APIService, as far as it is read here.
#[derive(kube::Resource, Clone, Debug, Deserialize)]
#[resource(inherit = "k8s_openapi::kube_aggregator::pkg::apis::apiregistration::v1::APIService")]
struct APIService {
    metadata: ObjectMeta,
    spec: APIServiceSpec,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct APIServiceSpec {
    #[serde(default)]
    ca_bundle: Option<ByteString>,
}

/// What the watches have told.
#[derive(Default)]
struct Seen {
    published: Option<ByteString>,
    service: Option<APIService>,
}

#[derive(Default)]
struct Publisher {
    seen: Mutex<Seen>,
    changed: Notify,
}

/// Keeps the APIService's CA, for ever.
pub(super) async fn keep(client: Client, webhook: &str) {
    let publisher = Publisher::default();
    let webhooks = Api::<MutatingWebhookConfiguration>::all(client.clone());
    let webhooks = watch::one(webhooks, webhook, |found| {
        publisher.tell(|seen| seen.published = found.and_then(ca));
    });
    let services = Api::<APIService>::all(client.clone());
    let services = watch::one(services, API_SERVICE, |found| {
        publisher.tell(|seen| seen.service = found);
    });
    tokio::join!(webhooks, services, publisher.act(&client));
}

/// What the first webhook has; all have the same.
fn ca(configuration: MutatingWebhookConfiguration) -> Option<ByteString> {
    let first = configuration.webhooks?.into_iter().next()?;
    first.client_config.ca_bundle
}

impl Publisher {
    fn tell(&self, set: impl FnOnce(&mut Seen)) {
        set(&mut self.seen());
        self.changed.notify_one();
    }

    fn seen(&self) -> MutexGuard<'_, Seen> {
        // Nobody panics while holding it: fields are only set and read.
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn act(&self, client: &Client) {
        loop {
            self.changed.notified().await;
            while let Some(patch) = self.lacking() {
                let api = Api::<APIService>::all(client.clone());
                let (params, patch) = (PatchParams::default(), Patch::Merge(patch));
                match timeout(DEADLINE, api.patch(API_SERVICE, &params, &patch)).await {
                    Ok(Ok(service)) => {
                        tracing::info!(api_service = API_SERVICE, "wrote the CA");
                        self.seen().service = Some(service);
                        continue;
                    }
                    // Another replica was quicker; its write is on its way to us.
                    Ok(Err(kube::Error::Api(status))) if status.is_conflict() => {}
                    Ok(Err(error)) => {
                        tracing::warn!(api_service = API_SERVICE, error = %Chain(&error), "the CA could not be written");
                    }
                    Err(_) => tracing::warn!(api_service = API_SERVICE, "no answer in time"),
                }
                sleep(RETRY).await;
            }
        }
    }

    /// What has to be written, if anything has.
    fn lacking(&self) -> Option<Value> {
        let seen = self.seen();
        let (published, service) = (seen.published.as_ref()?, seen.service.as_ref()?);
        (service.spec.ca_bundle.as_ref() != Some(published)).then(|| {
            json!({
                "metadata": {"resourceVersion": service.metadata.resource_version},
                "spec": {"caBundle": published},
            })
        })
    }
}
