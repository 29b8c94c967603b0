//! The objects that Headstart reads and writes, as types.
//!
//! Each type holds only the fields that are used: unknown fields are dropped on reading, which is safe because nothing
//! here is ever written back whole. All writes are patches (see [`crate::domain::patch`]).

mod boost;
mod cluster;
mod crd;
mod pod;

pub use boost::{
    BoostObject, BoostSpec, BoostStatus, ClusterStartupCPUBoost, Condition, ContainerCondition,
    ContainerPolicy, ControlledValues, CpuValue, DurationPolicy, DurationUnit, FixedDuration,
    FixedResources, MatchContainers, MatchType, PercentageIncrease, PodCondition, ResourcePolicy,
    StartupCPUBoost,
};
pub use cluster::{
    CpuAmount, Keys, Labels, LimitRange, LimitRangeItem, LimitRangeSpec, Namespace, Node, NodeInfo,
    NodeSpec, NodeStatus, QuotaAmounts, QuotaSpec, QuotaStatus, ResourceQuota, ScopeRequirement,
    ScopeSelector, Taint, Toleration,
};
pub use crd::{crds, crds_yaml};
pub use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
pub use pod::{
    ActualResources, Amounts, Container, ContainerState, ContainerStatus, Pod, PodMetadata, PodOs,
    PodSpec, PodStatus, ResizePolicy, Resources, Running, StatusCondition,
};

/// Label and annotation key on pods: the label is the claim, the annotation is the record.
pub const BOOST_KEY: &str = "autoscaling.x-k8s.io/startup-cpu-boost";

/// API group of `StartupCPUBoost`.
pub const GROUP: &str = "autoscaling.x-k8s.io";

/// API version of `StartupCPUBoost`.
pub const VERSION: &str = "v1alpha1";
