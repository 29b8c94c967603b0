//! What surrounds a pod: its namespace, the namespace's LimitRanges and ResourceQuotas, and the nodes, trimmed to what
//! bounds a boost.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::Deserialize;

use super::pod::{null_is_default, quantity, trimmed_metadata};

/// A namespace: its labels.
#[derive(kube::Resource, Clone, Debug, Default, Deserialize)]
#[resource(inherit = "k8s_openapi::api::core::v1::Namespace")]
pub struct Namespace {
    /// Name and labels.
    #[serde(deserialize_with = "trimmed_metadata")]
    pub metadata: ObjectMeta,
}

/// A LimitRange.
#[derive(kube::Resource, Clone, Debug, Default, Deserialize)]
#[resource(inherit = "k8s_openapi::api::core::v1::LimitRange")]
pub struct LimitRange {
    /// Name and namespace.
    #[serde(deserialize_with = "trimmed_metadata")]
    pub metadata: ObjectMeta,
    /// Its bounds.
    #[serde(default, deserialize_with = "null_is_default")]
    pub spec: LimitRangeSpec,
}

/// `spec` of a LimitRange.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct LimitRangeSpec {
    /// One entry a type.
    #[serde(default, deserialize_with = "null_is_default")]
    pub limits: Vec<LimitRangeItem>,
}

/// One entry of a LimitRange.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct LimitRangeItem {
    /// `Container`, `Pod` or `PersistentVolumeClaim`.
    #[serde(rename = "type")]
    pub kind: String,
    /// Lower bounds of requests and limits.
    #[serde(deserialize_with = "null_is_default")]
    pub min: CpuAmount,
    /// Upper bounds of requests and limits.
    #[serde(deserialize_with = "null_is_default")]
    pub max: CpuAmount,
    /// Limits of containers that name none.
    #[serde(rename = "default", deserialize_with = "null_is_default")]
    pub default_limit: Keys,
    /// Requests of containers that name none.
    #[serde(deserialize_with = "null_is_default")]
    pub default_request: Keys,
    /// Largest quotient of limit and request.
    #[serde(deserialize_with = "null_is_default")]
    pub max_limit_request_ratio: CpuAmount,
}

/// A whole resource list; only its keys matter.
pub type Keys = BTreeMap<String, serde_json::Value>;

/// A resource list, trimmed to CPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct CpuAmount {
    /// CPU, as it was written.
    #[serde(default, deserialize_with = "quantity")]
    pub cpu: Option<String>,
}

/// A ResourceQuota.
#[derive(kube::Resource, Clone, Debug, Default, Deserialize)]
#[resource(inherit = "k8s_openapi::api::core::v1::ResourceQuota")]
pub struct ResourceQuota {
    /// Name and namespace.
    #[serde(deserialize_with = "trimmed_metadata")]
    pub metadata: ObjectMeta,
    /// Which pods it counts, and the bounds that were asked for.
    #[serde(default, deserialize_with = "null_is_default")]
    pub spec: QuotaSpec,
    /// The bounds in force, and what is used of them.
    #[serde(default, deserialize_with = "null_is_default")]
    pub status: QuotaStatus,
}

/// `spec` of a ResourceQuota.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct QuotaSpec {
    /// The bounds that were asked for.
    #[serde(deserialize_with = "null_is_default")]
    pub hard: QuotaAmounts,
    /// Each must hold for a pod to be counted.
    #[serde(deserialize_with = "null_is_default")]
    pub scopes: Vec<String>,
    /// The same, with operators.
    #[serde(deserialize_with = "null_is_default")]
    pub scope_selector: ScopeSelector,
}

/// `spec.scopeSelector` of a ResourceQuota.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ScopeSelector {
    /// All must hold.
    #[serde(deserialize_with = "null_is_default")]
    pub match_expressions: Vec<ScopeRequirement>,
}

/// One requirement of a scope selector.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ScopeRequirement {
    /// Such as `PriorityClass`.
    pub scope_name: String,
    /// `In`, `NotIn`, `Exists` or `DoesNotExist`.
    pub operator: String,
    /// For the first two.
    #[serde(deserialize_with = "null_is_default")]
    pub values: Vec<String>,
}

/// `status` of a ResourceQuota.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct QuotaStatus {
    /// The bounds in force.
    #[serde(deserialize_with = "null_is_default")]
    pub hard: QuotaAmounts,
    /// What is used.
    #[serde(deserialize_with = "null_is_default")]
    pub used: QuotaAmounts,
}

/// The CPU keys of a quota.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct QuotaAmounts {
    /// Sum of requests; the older spelling.
    #[serde(deserialize_with = "quantity")]
    pub cpu: Option<String>,
    /// Sum of requests.
    #[serde(rename = "requests.cpu", deserialize_with = "quantity")]
    pub requests: Option<String>,
    /// Sum of limits.
    #[serde(rename = "limits.cpu", deserialize_with = "quantity")]
    pub limits: Option<String>,
}

/// A node.
#[derive(kube::Resource, Clone, Debug, Default, Deserialize)]
#[resource(inherit = "k8s_openapi::api::core::v1::Node")]
pub struct Node {
    /// Name and labels.
    #[serde(deserialize_with = "trimmed_metadata")]
    pub metadata: ObjectMeta,
    /// Who may be scheduled to it.
    #[serde(default, deserialize_with = "null_is_default")]
    pub spec: NodeSpec,
    /// What it has, and what runs on it.
    #[serde(default, deserialize_with = "null_is_default")]
    pub status: NodeStatus,
}

/// The part of a node's `spec` that is read.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct NodeSpec {
    /// Set by `kubectl cordon`.
    #[serde(deserialize_with = "null_is_default")]
    pub unschedulable: bool,
    /// What pods must tolerate.
    #[serde(deserialize_with = "null_is_default")]
    pub taints: Vec<Taint>,
}

/// A taint.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Deserialize)]
#[serde(default)]
pub struct Taint {
    /// Its key.
    pub key: String,
    /// Its value.
    #[serde(deserialize_with = "null_is_default")]
    pub value: String,
    /// `NoSchedule`, `PreferNoSchedule` or `NoExecute`.
    pub effect: String,
}

/// The part of a node's `status` that is read.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct NodeStatus {
    /// What pods can get of it.
    #[serde(deserialize_with = "null_is_default")]
    pub allocatable: CpuAmount,
    /// Versions.
    #[serde(deserialize_with = "null_is_default")]
    pub node_info: NodeInfo,
}

/// `status.nodeInfo`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct NodeInfo {
    /// Such as `v1.33.2`.
    pub kubelet_version: String,
    /// `linux` or `windows`.
    pub operating_system: String,
}

/// A toleration of a pod.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Toleration {
    /// Of the taint; empty with `Exists` is any.
    #[serde(deserialize_with = "null_is_default")]
    pub key: String,
    /// `Exists` or `Equal`, which is also meant by nothing.
    #[serde(deserialize_with = "null_is_default")]
    pub operator: String,
    /// Of the taint, with `Equal`.
    #[serde(deserialize_with = "null_is_default")]
    pub value: String,
    /// Of the taint; empty is any.
    #[serde(deserialize_with = "null_is_default")]
    pub effect: String,
}

/// Labels of an object.
pub type Labels = BTreeMap<String, String>;
