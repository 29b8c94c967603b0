//! Namespaces with boosts and bounds for the crowd, each with a twin that the API server judges alone.

use std::{
    collections::HashMap,
    fmt::{self, Debug},
    sync::Arc,
};

use anyhow::Result;
use chrono::{DateTime, Utc};
use headstart::{
    api::{
        BoostObject, ClusterStartupCPUBoost, LimitRange, LimitRangeItem, Namespace, Node,
        ResourceQuota, StartupCPUBoost,
    },
    domain::{
        limit_range::LimitRanges,
        nodes::{NodeFacts, Nodes},
        policy::Policy,
        quota::Quota,
        snapshot::{BoostIndex, DISABLED, Snapshot},
    },
};
use kube::{Api, Client, Resource, ResourceExt, api::ListParams};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use testbed::{
    generate::{self, Choices, OVERHEAD, PRIORITY_CLASS, RUNTIME_CLASS, TAINT},
    rest::STRATEGIC,
};

use crate::bed::{Bed, UNCALLED};

/// Namespaces, their twins apart.
const PLACES: u32 = 20;

/// A namespace.
pub(crate) struct Place {
    pub(crate) name: String,
    /// Where the same bounds hold and our webhook is not called.
    pub(crate) twin: String,
    /// Whether pods are created in earnest.
    ///
    /// Not where a quota has little room: nobody but the API server itself counts there (the bed has no controller
    /// manager), each pod would leave less, and the answer would depend on how soon a replica has seen the last one.
    /// A dry run is judged in the same way, the quota included, and uses nothing up.
    pub(crate) in_earnest: bool,
    labels: Value,
    /// Entries of its LimitRange. There is at most one object of a kind: those the API server's plugins look up by
    /// themselves, where they have not seen them yet.
    ranges: Vec<Value>,
    quota: Option<Value>,
    boosts: Vec<Value>,
}

/// In few lines.
impl Debug for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (ranges, boosts) = (json!(self.ranges), json!(self.boosts));
        let quota = self.quota.as_ref().map(Value::to_string);
        write!(
            f,
            "{}\n  ranges {ranges}\n  quota {quota:?}\n  boosts {boosts}",
            self.name
        )
    }
}

impl Place {
    fn new(choices: &mut Choices, number: u32) -> Self {
        let name = format!("n{number:02}");
        let labels = match number {
            0 => json!({DISABLED.0: DISABLED.1}),
            1..5 => json!({"team": "a"}),
            _ => json!({}),
        };
        // One has neither a boost of its own nor one of the cluster.
        let boosts = match number {
            5 => 0,
            1..3 => choices.below(2),
            _ => 1 + choices.below(2),
        };
        let boosts = (0..boosts).map(|_| generate::boost(choices)).collect();
        let quota = match number % 3 {
            0 => Some(true),
            1 => Some(false),
            _ => None,
        };
        let ranges = if quota.is_some() && number.is_multiple_of(2) {
            // A quota refuses containers that don't say what they want.
            vec![
                json!({"type": "Container", "default": {"cpu": "1"}, "defaultRequest": {"cpu": "100m"}}),
            ]
        } else if choices.percent(60) {
            generate::limit_range_items(choices)
        } else {
            Vec::new()
        };
        Self {
            twin: format!("{name}-twin"),
            name,
            in_earnest: quota != Some(false),
            labels,
            ranges,
            quota: quota.map(|ample| generate::quota(choices, ample)),
            boosts,
        }
    }

    async fn make(&self, bed: &Bed) -> Result<()> {
        bed.namespace(&self.name, &self.labels).await?;
        bed.namespace(&self.twin, &json!({UNCALLED: "yes"})).await?;
        for namespace in [&self.name, &self.twin] {
            if !self.ranges.is_empty() {
                let items = json!(self.ranges);
                bed.limit_range(namespace, &items).await?;
            }
            if let Some(quota) = &self.quota {
                bed.quota(namespace, quota).await?;
            }
        }
        let path = format!("{BOOSTS}/namespaces/{}/startupcpuboosts", self.name);
        for (number, boost) in self.boosts.iter().enumerate() {
            let names = ["mine", "yours"];
            let boost = named(boost, "StartupCPUBoost", names[number]);
            bed.api.post(&path, &boost).await?.accepted()?;
        }
        Ok(())
    }
}

const BOOSTS: &str = "/apis/autoscaling.x-k8s.io/v1alpha1";

fn named(boost: &Value, kind: &str, name: &str) -> Value {
    let mut boost = boost.clone();
    boost["apiVersion"] = "autoscaling.x-k8s.io/v1alpha1".into();
    boost["kind"] = kind.into();
    boost["metadata"] = json!({"name": name});
    boost
}

/// Makes all that the crowd meets, and returns the namespaces.
pub(crate) async fn make(bed: &Bed, choices: &mut Choices) -> Result<Vec<Place>> {
    make_classes(bed).await?;
    make_old_node(bed).await?;
    let mut wide = named(&generate::boost(choices), "ClusterStartupCPUBoost", "wide");
    wide["namespaceSelector"] = json!({"matchLabels": {"team": "a"}});
    let path = format!("{BOOSTS}/clusterstartupcpuboosts");
    bed.api.post(&path, &wide).await?.accepted()?;
    let places: Vec<_> = (0..PLACES)
        .map(|number| Place::new(choices, number))
        .collect();
    for place in &places {
        place.make(bed).await?;
    }
    Ok(places)
}

async fn make_classes(bed: &Bed) -> Result<()> {
    let class = json!({
        "apiVersion": "node.k8s.io/v1",
        "kind": "RuntimeClass",
        "metadata": {"name": RUNTIME_CLASS},
        "handler": "x",
        "overhead": {"podFixed": {"cpu": OVERHEAD}},
    });
    let path = "/apis/node.k8s.io/v1/runtimeclasses";
    bed.api.post(path, &class).await?.accepted()?;
    let class = json!({
        "apiVersion": "scheduling.k8s.io/v1",
        "kind": "PriorityClass",
        "metadata": {"name": PRIORITY_CLASS},
        "value": 1000,
    });
    let path = "/apis/scheduling.k8s.io/v1/priorityclasses";
    bed.api.post(path, &class).await?.accepted().map(drop)
}

/// A node that can't resize, and that only pods with a toleration get to.
async fn make_old_node(bed: &Bed) -> Result<()> {
    testbed::node::create_node(&bed.client, "old", "8", "v1.32.9").await?;
    let taint = json!({"key": TAINT, "value": "yes", "effect": "NoSchedule"});
    let change = json!({"metadata": {"labels": {"pool": "old"}}, "spec": {"taints": [taint]}});
    let path = "/api/v1/nodes/old";
    bed.api
        .patch(path, STRATEGIC, &change)
        .await?
        .accepted()
        .map(drop)
}

// === what the program knows of it ===

/// What a replica goes by, made of what the API server has.
pub(crate) async fn snapshot(client: &Client) -> Result<Snapshot> {
    let mut boosts = compiled::<StartupCPUBoost>(client).await?;
    boosts.extend(compiled::<ClusterStartupCPUBoost>(client).await?);
    let namespaces = list::<Namespace>(client).await?.into_iter();
    let namespaces = namespaces.map(|namespace| {
        let labels = namespace.metadata.labels.clone().unwrap_or_default();
        (namespace.name_any().into(), Arc::new(labels))
    });
    let mut items = HashMap::<String, Vec<LimitRangeItem>>::new();
    for range in list::<LimitRange>(client).await? {
        let namespace = range.namespace().unwrap_or_default();
        items
            .entry(namespace)
            .or_default()
            .extend(range.spec.limits);
    }
    let items = items.iter();
    let mut quotas = HashMap::<String, Vec<Quota>>::new();
    for quota in list::<ResourceQuota>(client).await? {
        let namespace = quota.namespace().unwrap_or_default();
        quotas
            .entry(namespace)
            .or_default()
            .push(Quota::new(&quota));
    }
    let quotas = quotas.into_iter();
    let nodes: Vec<_> = list::<Node>(client)
        .await?
        .iter()
        .map(NodeFacts::new)
        .collect();
    Ok(Snapshot {
        boosts: Arc::new(BoostIndex::new(boosts)),
        namespaces: Arc::new(namespaces.collect()),
        limit_ranges: Arc::new(
            items
                .map(|(name, items)| (name.as_str().into(), LimitRanges::new(items)))
                .collect(),
        ),
        quotas: Arc::new(
            quotas
                .map(|(name, quotas)| (name.into(), Arc::new(quotas)))
                .collect(),
        ),
        nodes: Arc::new(Nodes::new(&nodes)),
    })
}

async fn list<K>(client: &Client) -> Result<Vec<K>>
where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned,
{
    let api = Api::<K>::all(client.clone());
    Ok(api.list(&ListParams::default()).await?.items)
}

async fn compiled<K>(client: &Client) -> Result<Vec<(String, Arc<Policy>)>>
where
    K: BoostObject + Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned,
{
    let compile = |boost: K| {
        let created = boost.meta().creation_timestamp.as_ref();
        let created = created.and_then(|time| DateTime::from_timestamp(time.0.as_second(), 0));
        let created: DateTime<Utc> = created.unwrap_or_default();
        let policy = Policy::compile(&boost.name_any(), created, &boost)?;
        Ok((boost.namespace().unwrap_or_default(), Arc::new(policy)))
    };
    list::<K>(client).await?.into_iter().map(compile).collect()
}
