//! Reads from the cluster what an explanation goes by, with the rights of whoever asks.

use std::{collections::BTreeSet, fmt::Debug, time::Duration};

use kube::{Api, Client, Config, Resource, api::ListParams};
use serde::de::DeserializeOwned;
use tokio::time::timeout;

use super::objects::Objects;
use crate::{
    api::{ClusterStartupCPUBoost, LimitRange, Namespace, Node, ResourceQuota, StartupCPUBoost},
    error::Chain,
};

/// How long one list may take.
const DEADLINE: Duration = Duration::from_secs(30);

/// Why the cluster can't be asked.
#[derive(Debug, thiserror::Error)]
pub enum ClusterError {
    /// There is no cluster to ask.
    #[error(
        "no cluster is configured: set KUBECONFIG, or give --boost and other files, or --offline"
    )]
    Kubeconfig(#[source] kube::config::InferConfigError),
    /// The client can't be built.
    #[error("the API server's client could not be built")]
    Client(#[source] kube::Error),
    /// The boosts decide; without them there is nothing to explain.
    #[error("the boosts could not be read: {0}")]
    Boosts(String),
}

/// Adds the boosts and all that bounds them. What may not be read is noted, and left out.
pub(super) async fn read(objects: &mut Objects) -> Result<(), ClusterError> {
    let config = Config::infer().await.map_err(ClusterError::Kubeconfig)?;
    let client = Client::try_from(config).map_err(ClusterError::Client)?;
    let pods = objects.pods.iter();
    let namespaces: BTreeSet<String> = pods.map(|pod| pod.namespace.clone()).collect();
    for namespace in &namespaces {
        let boosts = Api::<StartupCPUBoost>::namespaced(client.clone(), namespace);
        for boost in list(&boosts).await.map_err(ClusterError::Boosts)? {
            objects.add_boost(&boost);
        }
        let ranges = Api::<LimitRange>::namespaced(client.clone(), namespace);
        for range in noted(&ranges, objects).await {
            objects.add_limit_range(range);
        }
        let quotas = Api::<ResourceQuota>::namespaced(client.clone(), namespace);
        for quota in noted(&quotas, objects).await {
            objects.add_quota(&quota);
        }
        let api = Api::<Namespace>::all(client.clone());
        match timeout(DEADLINE, api.get(namespace)).await {
            Ok(Ok(namespace)) => objects.add_namespace(namespace),
            Ok(Err(error)) => note(objects, &api, &Chain(&error).to_string()),
            Err(_) => note(objects, &api, "no answer"),
        }
    }
    for boost in noted(&Api::<ClusterStartupCPUBoost>::all(client.clone()), objects).await {
        objects.add_boost(&boost);
    }
    for node in noted(&Api::<Node>::all(client), objects).await {
        objects.add_node(&node);
    }
    Ok(())
}

async fn list<K>(api: &Api<K>) -> Result<Vec<K>, String>
where
    K: Resource + Clone + Debug + DeserializeOwned,
{
    match timeout(DEADLINE, api.list(&ListParams::default())).await {
        Ok(Ok(list)) => Ok(list.items),
        Ok(Err(error)) => Err(Chain(&error).to_string()),
        Err(_) => Err("no answer".to_owned()),
    }
}

/// A list that the explanation can do without.
async fn noted<K>(api: &Api<K>, objects: &mut Objects) -> Vec<K>
where
    K: Resource + Clone + Debug + DeserializeOwned,
{
    list(api).await.unwrap_or_else(|problem| {
        note(objects, api, &problem);
        Vec::new()
    })
}

fn note<K: Resource>(objects: &mut Objects, api: &Api<K>, problem: &str) {
    let what = api.resource_url();
    objects
        .notes
        .push(format!("{what} is not taken into account: {problem}"));
}
