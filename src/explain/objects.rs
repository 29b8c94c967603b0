//! The objects that an explanation goes by, from files or from the cluster.

use std::{
    collections::BTreeMap,
    io::Read,
    path::{Path, PathBuf},
    sync::Arc,
};

use chrono::{DateTime, Utc};
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::{
    api::{
        BoostObject, ClusterStartupCPUBoost, Labels, LimitRange, LimitRangeItem, Namespace, Node,
        Pod, ResourceQuota, StartupCPUBoost,
    },
    domain::{
        limit_range::LimitRanges,
        nodes::{NodeFacts, Nodes},
        policy::{BoostKind, Policy, PolicyError},
        quota::Quota,
        snapshot::{BoostIndex, Snapshot},
    },
};

/// Why a file can't be used.
#[derive(Debug, thiserror::Error)]
pub enum ObjectError {
    /// It can't be read.
    #[error("{file} can't be read: {error}")]
    File {
        /// Which.
        file: PathBuf,
        /// What the system says.
        error: std::io::Error,
    },
    /// It is neither YAML nor JSON.
    #[error("{file} is no YAML: {error}")]
    Yaml {
        /// Which.
        file: PathBuf,
        /// What the parser says.
        error: Box<serde_saphyr::Error>,
    },
    /// A document is no object that matters here.
    #[error(
        "{file}: document {document} is a {kind:?}; wanted are Pods (or workloads), boosts, LimitRanges, ResourceQuotas, Nodes and Namespaces"
    )]
    Kind {
        /// In which file.
        file: PathBuf,
        /// Which, from 1.
        document: usize,
        /// What it says of itself.
        kind: String,
    },
    /// A document is not of the shape of its kind.
    #[error("{file}: document {document} is no {kind} that can be read: {error}")]
    Shape {
        /// In which file.
        file: PathBuf,
        /// Which, from 1.
        document: usize,
        /// What it says of itself.
        kind: String,
        /// What is wrong.
        error: serde_json::Error,
    },
}

/// A pod that is to be created.
#[derive(Debug)]
pub(super) struct NewPod {
    pub(super) namespace: String,
    pub(super) name: String,
    pub(super) pod: Pod,
}

/// A boost, or why it is none.
#[derive(Debug)]
pub(super) struct KnownBoost {
    pub(super) kind: BoostKind,
    pub(super) namespace: String,
    pub(super) name: String,
    pub(super) policy: Result<Arc<Policy>, PolicyError>,
}

/// Everything that was read.
#[derive(Debug, Default)]
pub(super) struct Objects {
    default_namespace: String,
    pub(super) pods: Vec<NewPod>,
    pub(super) boosts: Vec<KnownBoost>,
    /// What could not be taken into account.
    pub(super) notes: Vec<String>,
    namespaces: BTreeMap<String, Labels>,
    limit_ranges: BTreeMap<String, Vec<LimitRangeItem>>,
    quotas: BTreeMap<String, Vec<Quota>>,
    nodes: Vec<NodeFacts>,
}

impl Objects {
    pub(super) fn new(default_namespace: &str) -> Self {
        Self {
            default_namespace: default_namespace.to_owned(),
            ..Self::default()
        }
    }

    /// Reads all documents of a file.
    pub(super) fn read_file(&mut self, file: &Path) -> Result<(), ObjectError> {
        let text = read(file).map_err(|error| ObjectError::File {
            file: file.to_owned(),
            error,
        })?;
        let documents: Vec<Value> =
            serde_saphyr::from_multiple(&text).map_err(|error| ObjectError::Yaml {
                file: file.to_owned(),
                error: Box::new(error),
            })?;
        for (index, document) in documents.into_iter().enumerate() {
            for object in items(document) {
                self.add(object, file, index + 1)?;
            }
        }
        Ok(())
    }

    /// Whether the files had nothing but pods.
    pub(super) fn has_only_pods(&self) -> bool {
        self.boosts.is_empty()
            && self.namespaces.is_empty()
            && self.limit_ranges.is_empty()
            && self.quotas.is_empty()
            && self.nodes.is_empty()
    }

    /// Whether all pods exist and carry marks of a boost.
    pub(super) fn all_exist(&self) -> bool {
        self.pods.iter().all(|pod| super::end::concerns(&pod.pod))
    }

    fn add(&mut self, object: Value, file: &Path, document: usize) -> Result<(), ObjectError> {
        let kind = object["kind"].as_str().unwrap_or_default().to_owned();
        let shape = |error| ObjectError::Shape {
            file: file.to_owned(),
            document,
            kind: kind.clone(),
            error,
        };
        match kind.as_str() {
            "Pod" => self.add_pod(object).map_err(shape),
            "Deployment" | "ReplicaSet" | "StatefulSet" | "DaemonSet" | "Job" => {
                self.add_pod(of_template(&object)).map_err(shape)
            }
            "StartupCPUBoost" | "ClusterStartupCPUBoost" => {
                self.add_boost_object(&kind, object);
                Ok(())
            }
            "LimitRange" => typed(object)
                .map(|range| self.add_limit_range(range))
                .map_err(shape),
            "ResourceQuota" => typed(object)
                .map(|quota| self.add_quota(&quota))
                .map_err(shape),
            "Node" => typed(object)
                .map(|node| self.add_node(&node))
                .map_err(shape),
            "Namespace" => typed(object)
                .map(|namespace| self.add_namespace(namespace))
                .map_err(shape),
            _ => Err(ObjectError::Kind {
                file: file.to_owned(),
                document,
                kind,
            }),
        }
    }

    fn add_pod(&mut self, object: Value) -> Result<(), serde_json::Error> {
        let mut pod: Pod = serde_json::from_value(object)?;
        let meta = &pod.metadata;
        let generated = || meta.generate_name.as_ref().map(|name| format!("{name}*"));
        let name = meta.name.clone().or_else(generated).unwrap_or_default();
        let namespace = self.namespace_of(meta.namespace.as_deref());
        pod.metadata.namespace = Some(namespace.clone());
        self.pods.push(NewPod {
            namespace,
            name,
            pod,
        });
        Ok(())
    }

    /// A boost that can't be read is known as invalid, as the operator knows it.
    fn add_boost_object(&mut self, kind: &str, object: Value) {
        let metadata = object["metadata"].clone();
        if object["spec"].get("selector").is_some() {
            self.notes.push(format!(
                "{kind} {}: spec.selector is no field and is ignored; selector stands beside spec",
                metadata["name"].as_str().unwrap_or_default()
            ));
        }
        let text = |field: &str| metadata[field].as_str().map(str::to_owned);
        let unreadable = |error: serde_json::Error| PolicyError {
            field: "spec".to_owned(),
            problem: error.to_string(),
        };
        let name = text("name").unwrap_or_default();
        let created = text("creationTimestamp").and_then(|text| text.parse().ok());
        let created: DateTime<Utc> = created.unwrap_or_default();
        let (kind, policy) = if kind == "StartupCPUBoost" {
            let policy = typed::<StartupCPUBoost>(object).map_err(unreadable);
            let policy = policy.and_then(|boost| Policy::compile(&name, created, &boost));
            (BoostKind::Namespaced, policy)
        } else {
            let policy = typed::<ClusterStartupCPUBoost>(object).map_err(unreadable);
            let policy = policy.and_then(|boost| Policy::compile(&name, created, &boost));
            (BoostKind::Cluster, policy)
        };
        self.boosts.push(KnownBoost {
            kind,
            namespace: self.namespace_of(text("namespace").as_deref()),
            name,
            policy: policy.map(Arc::new),
        });
    }

    /// A boost that the API server has.
    pub(super) fn add_boost<K>(&mut self, boost: &K)
    where
        K: BoostObject + kube::Resource<DynamicType = ()>,
    {
        let meta = boost.meta();
        let name = meta.name.clone().unwrap_or_default();
        let created = crate::boosts::created(meta.creation_timestamp.as_ref());
        self.boosts.push(KnownBoost {
            kind: boost.boost_kind(),
            namespace: self.namespace_of(meta.namespace.as_deref()),
            policy: Policy::compile(&name, created, boost).map(Arc::new),
            name,
        });
    }

    pub(super) fn add_limit_range(&mut self, range: LimitRange) {
        let namespace = self.namespace_of(range.metadata.namespace.as_deref());
        let items = self.limit_ranges.entry(namespace).or_default();
        items.extend(range.spec.limits);
    }

    pub(super) fn add_quota(&mut self, quota: &ResourceQuota) {
        let namespace = self.namespace_of(quota.metadata.namespace.as_deref());
        let quotas = self.quotas.entry(namespace).or_default();
        quotas.push(Quota::new(quota));
    }

    pub(super) fn add_node(&mut self, node: &Node) {
        self.nodes.push(NodeFacts::new(node));
    }

    pub(super) fn add_namespace(&mut self, namespace: Namespace) {
        let meta = namespace.metadata;
        self.namespaces.insert(
            meta.name.unwrap_or_default(),
            meta.labels.unwrap_or_default(),
        );
    }

    fn namespace_of(&self, named: Option<&str>) -> String {
        named
            .filter(|name| !name.is_empty())
            .unwrap_or(&self.default_namespace)
            .to_owned()
    }

    /// What the webhook would go by.
    pub(super) fn snapshot(&self) -> Snapshot {
        let valid = self.boosts.iter().filter_map(|boost| {
            let policy = boost.policy.as_ref().ok()?;
            Some((boost.namespace.clone(), Arc::clone(policy)))
        });
        let key = |namespace: &String| Arc::<str>::from(namespace.as_str());
        let labels = self.namespaces.iter();
        let ranges = self.limit_ranges.iter();
        let quotas = self.quotas.iter();
        Snapshot {
            boosts: Arc::new(BoostIndex::new(valid)),
            namespaces: Arc::new(
                labels
                    .map(|(name, labels)| (key(name), Arc::new(labels.clone())))
                    .collect(),
            ),
            limit_ranges: Arc::new(
                ranges
                    .map(|(name, items)| (key(name), LimitRanges::new(items)))
                    .collect(),
            ),
            quotas: Arc::new(
                quotas
                    .map(|(name, quotas)| (key(name), Arc::new(quotas.clone())))
                    .collect(),
            ),
            nodes: Arc::new(Nodes::new(&self.nodes)),
        }
    }
}

fn typed<T: DeserializeOwned>(object: Value) -> Result<T, serde_json::Error> {
    serde_json::from_value(object)
}

fn read(file: &Path) -> std::io::Result<String> {
    if file.as_os_str() == "-" {
        let mut text = String::new();
        std::io::stdin().read_to_string(&mut text)?;
        return Ok(text);
    }
    std::fs::read_to_string(file)
}

/// The objects of a list, or the object itself; an empty document has none.
fn items(mut document: Value) -> Vec<Value> {
    match &mut document {
        Value::Null => Vec::new(),
        Value::Object(map) if map.get("items").is_some_and(Value::is_array) => {
            match map.remove("items") {
                Some(Value::Array(items)) => items,
                _ => Vec::new(),
            }
        }
        _ => vec![document],
    }
}

/// The pod that a workload's controller would create.
fn of_template(workload: &Value) -> Value {
    let mut pod = workload["spec"]["template"].clone();
    if let Value::Object(pod) = &mut pod {
        let metadata = pod
            .entry("metadata")
            .or_insert_with(|| Value::Object(serde_json::Map::new()));
        metadata["namespace"] = workload["metadata"]["namespace"].clone();
        if let Some(name) = workload["metadata"]["name"].as_str() {
            metadata["generateName"] = format!("{name}-").into();
        }
    }
    pod
}
