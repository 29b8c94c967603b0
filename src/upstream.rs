//! What an install of google/kube-startup-cpu-boost (*upstream*) leaves in a cluster, by the names that it gives.
//!
//! Two operators would boost the same pods, each by its own rules, and each would take back what the other has set; and
//! upstream's validating webhook fails closed, so without its operator nobody can write a boost any more. Its
//! CustomResourceDefinition is no leftover: it is ours too, and deleting it deletes everybody's boosts.

use std::{collections::BTreeSet, fmt, sync::Arc, time::Duration};

use k8s_openapi::api::{
    admissionregistration::v1::{MutatingWebhookConfiguration, ValidatingWebhookConfiguration},
    apps::v1::Deployment,
};
use kube::{
    Api, Client, ResourceExt,
    api::{ApiResource, DynamicObject, ListParams},
};
use tokio::time::{sleep, timeout};

use crate::{error::Chain, metrics::Metrics};

/// Upstream's webhooks: the names of the entries stay, whatever its Helm chart calls the configurations.
const MUTATING_ENTRY: &str = "cpuboost.autoscaling.x-k8s.io";
const VALIDATING_ENTRY: &str = "vstartupcpuboost.autoscaling.x-k8s.io";
/// Where its manifests put it.
const NAMESPACE: &str = "kube-startup-cpu-boost-system";

/// How often `headstart run` looks; a tenth more or less, so that replicas don't look together.
const PAUSE: Duration = Duration::from_secs(5 * 60);
/// How long one request may take.
const DEADLINE: Duration = Duration::from_secs(5);

/// The three things that are left.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// It would boost pods as well.
    MutatingWebhookConfiguration,
    /// It refuses boosts when upstream does not run.
    ValidatingWebhookConfiguration,
    /// It would take back our boosts.
    Deployment,
}

impl Kind {
    /// All of them, the one that boosts first.
    pub const ALL: [Self; 3] = [
        Self::MutatingWebhookConfiguration,
        Self::ValidatingWebhookConfiguration,
        Self::Deployment,
    ];

    /// As Kubernetes spells it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::MutatingWebhookConfiguration => "MutatingWebhookConfiguration",
            Self::ValidatingWebhookConfiguration => "ValidatingWebhookConfiguration",
            Self::Deployment => "Deployment",
        }
    }

    fn resource(self) -> ApiResource {
        match self {
            Self::MutatingWebhookConfiguration => {
                ApiResource::erase::<MutatingWebhookConfiguration>(&())
            }
            Self::ValidatingWebhookConfiguration => {
                ApiResource::erase::<ValidatingWebhookConfiguration>(&())
            }
            Self::Deployment => ApiResource::erase::<Deployment>(&()),
        }
    }

    /// The name of the webhook in it, where it has any.
    fn entry(self) -> Option<&'static str> {
        match self {
            Self::MutatingWebhookConfiguration => Some(MUTATING_ENTRY),
            Self::ValidatingWebhookConfiguration => Some(VALIDATING_ENTRY),
            Self::Deployment => None,
        }
    }

    /// The name that upstream's manifests give it.
    #[must_use]
    pub fn default_name(self) -> &'static str {
        match self {
            Self::MutatingWebhookConfiguration => {
                "kube-startup-cpu-boost-mutating-webhook-configuration"
            }
            Self::ValidatingWebhookConfiguration => {
                "kube-startup-cpu-boost-validating-webhook-configuration"
            }
            Self::Deployment => "kube-startup-cpu-boost-controller-manager",
        }
    }
}

/// One thing that is left.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Leftover {
    /// What it is.
    pub kind: Kind,
    /// Where it is, if it is anywhere.
    pub namespace: Option<String>,
    /// What it is called.
    pub name: String,
}

impl Leftover {
    fn new(kind: Kind, name: impl Into<String>) -> Self {
        Self {
            kind,
            namespace: None,
            name: name.into(),
        }
    }

    /// The command that removes it.
    #[must_use]
    pub fn removal(&self) -> String {
        let kind = self.kind.as_str().to_lowercase();
        let namespace = self.namespace.as_ref();
        let namespace = namespace.map_or(String::new(), |namespace| format!("-n {namespace} "));
        format!("kubectl delete {namespace}{kind} {}", self.name)
    }
}

impl fmt::Display for Leftover {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let namespace = self.namespace.as_ref();
        let namespace = namespace.map_or(String::new(), |namespace| format!("{namespace}/"));
        write!(f, "{} {namespace}{}", self.kind.as_str(), self.name)
    }
}

/// Finds what is left of a kind, whatever it is called and wherever it is. Takes an administrator's rights.
///
/// # Errors
/// When the API server does not list them.
pub async fn find(client: &Client, kind: Kind) -> kube::Result<Vec<Leftover>> {
    if let Some(entry) = kind.entry() {
        let list = configurations(client, kind.resource()).await?;
        return Ok(of_upstream(kind, entry, list));
    }
    let api = Api::<DynamicObject>::all_with(client.clone(), &kind.resource());
    let named = ListParams::default().fields(&format!("metadata.name={}", kind.default_name()));
    let list = api.list_metadata(&named).await?.into_iter();
    let found = list.map(|object| Leftover {
        namespace: object.namespace(),
        ..Leftover::new(kind, object.name_any())
    });
    Ok(found.collect())
}

/// Webhook configurations, each with the names of its entries.
async fn configurations(
    client: &Client,
    resource: ApiResource,
) -> kube::Result<impl Iterator<Item = (String, Vec<String>)>> {
    let api = Api::<DynamicObject>::all_with(client.clone(), &resource);
    let list = api.list(&ListParams::default()).await?.into_iter();
    Ok(list.map(|object| {
        let entries = object.data["webhooks"].as_array().into_iter().flatten();
        let names = entries.filter_map(|entry| entry["name"].as_str());
        (object.name_any(), names.map(str::to_owned).collect())
    }))
}

/// The configurations that are upstream's, by an entry's name or by their own.
fn of_upstream(
    kind: Kind,
    entry: &str,
    list: impl Iterator<Item = (String, Vec<String>)>,
) -> Vec<Leftover> {
    list.filter(|(name, entries)| {
        name == kind.default_name() || entries.iter().any(|name| name == entry)
    })
    .map(|(name, _)| Leftover::new(kind, name))
    .collect()
}

/// Looks for what is left under the names that upstream's manifests give, again and again: logs it when it changes, and
/// shows it in the metrics. Never ends. A look that fails changes nothing.
pub async fn keep(client: Client, metrics: Arc<Metrics>) {
    let mut known = BTreeSet::new();
    loop {
        let mut found = known.clone();
        for kind in Kind::ALL {
            let left = match timeout(DEADLINE, get(&client, kind)).await {
                Ok(Ok(left)) => left,
                Ok(Err(error)) => {
                    tracing::debug!(kind = kind.as_str(), error = %Chain(&error), "no look at upstream's leftovers");
                    continue;
                }
                Err(_) => {
                    tracing::debug!(
                        kind = kind.as_str(),
                        "no look at upstream's leftovers: no answer within {DEADLINE:?}"
                    );
                    continue;
                }
            };
            metrics.upstream_left(kind, left.is_some());
            found.retain(|leftover: &Leftover| leftover.kind != kind);
            found.extend(left);
        }
        if found != known {
            tell(&found);
            known = found;
        }
        sleep(PAUSE.mul_f64(0.9 + fastrand::f64() / 5.0)).await;
    }
}

fn tell(found: &BTreeSet<Leftover>) {
    if found.is_empty() {
        tracing::info!("nothing is left of kube-startup-cpu-boost any more");
        return;
    }
    let join = |texts: Vec<String>, with: &str| texts.join(with);
    tracing::warn!(
        left = join(found.iter().map(Leftover::to_string).collect(), ", "),
        todo = join(found.iter().map(Leftover::removal).collect(), "; "),
        "kube-startup-cpu-boost is installed too: both would boost the same pods and take back each other's boosts; remove what is left of it, but never its CustomResourceDefinition"
    );
}

/// One of them, if it is there under its usual name. Takes `get` on that name alone.
async fn get(client: &Client, kind: Kind) -> kube::Result<Option<Leftover>> {
    let (name, client, resource) = (kind.default_name(), client.clone(), kind.resource());
    let namespace = (kind == Kind::Deployment).then_some(NAMESPACE);
    let api: Api<DynamicObject> = match namespace {
        Some(namespace) => Api::namespaced_with(client, namespace, &resource),
        None => Api::all_with(client, &resource),
    };
    let found = api.get_metadata_opt(name).await?;
    Ok(found.map(|_| Leftover {
        namespace: namespace.map(str::to_owned),
        ..Leftover::new(kind, name)
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn configurations_are_known_by_their_entries_or_their_name() {
        let kind = Kind::MutatingWebhookConfiguration;
        let list = [
            ("renamed", vec!["other", MUTATING_ENTRY]),
            (kind.default_name(), vec![]),
            ("headstart", vec!["pods.headstart.autoscaling.x-k8s.io"]),
            ("validating", vec![VALIDATING_ENTRY]),
        ];
        let list = list.into_iter().map(|(name, entries)| {
            let entries = entries.into_iter().map(str::to_owned).collect();
            (name.to_owned(), entries)
        });
        let found = of_upstream(kind, MUTATING_ENTRY, list);
        let names: Vec<_> = found.iter().map(|found| found.name.as_str()).collect();
        assert_eq!(names, ["renamed", kind.default_name()]);
    }

    #[test]
    fn each_has_the_command_that_removes_it() {
        let webhook = Leftover::new(Kind::ValidatingWebhookConfiguration, "w");
        assert_eq!(
            webhook.removal(),
            "kubectl delete validatingwebhookconfiguration w"
        );
        assert_eq!(webhook.to_string(), "ValidatingWebhookConfiguration w");
        let deployment = Leftover {
            namespace: Some("ns".to_owned()),
            ..Leftover::new(Kind::Deployment, "d")
        };
        assert_eq!(deployment.removal(), "kubectl delete -n ns deployment d");
        assert_eq!(deployment.to_string(), "Deployment ns/d");
    }
}
