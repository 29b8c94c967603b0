//! `StartupCPUBoost`: the object that users write (API of google/kube-startup-cpu-boost, whose fields keep their
//! names, places and meanings; the fields that are ours are marked "Headstart").
//!
//! Doc comments here become the descriptions that `kubectl explain` prints. The rules on the types become the CRD's
//! schema and CEL validation; what they can't express, and objects stored before they existed, is caught again by
//! [`crate::domain::policy`].

use std::{borrow::Cow, fmt};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, de};

use crate::domain::policy::BoostKind;

/// Longest delay and deadline in seconds: 30 days.
const MONTH_SECONDS: i64 = 2_592_000;

/// A namespaced boost. `selector` stands beside `spec`, as upstream has it.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct StartupCPUBoost {
    /// Standard metadata.
    pub metadata: ObjectMeta,
    /// Which pods of the namespace; absent or empty selects all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub selector: Option<LabelSelector>,
    /// What to do with them.
    #[serde(default)]
    pub spec: BoostSpec,
    /// What was done.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<BoostStatus>,
}

/// A boost for the namespaces that it selects (Headstart).
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ClusterStartupCPUBoost {
    /// Standard metadata.
    pub metadata: ObjectMeta,
    /// Which namespaces; absent or empty selects all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespace_selector: Option<LabelSelector>,
    /// Which of their pods; absent or empty selects all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub selector: Option<LabelSelector>,
    /// What to do with them.
    #[serde(default)]
    pub spec: BoostSpec,
    /// What was done.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<BoostStatus>,
}

macro_rules! resource {
    ($type:ident, $scope:ident, $plural:literal) => {
        impl kube::Resource for $type {
            type DynamicType = ();
            type Scope = kube::core::$scope;

            fn kind((): &()) -> Cow<'_, str> {
                stringify!($type).into()
            }
            fn group((): &()) -> Cow<'_, str> {
                super::GROUP.into()
            }
            fn version((): &()) -> Cow<'_, str> {
                super::VERSION.into()
            }
            fn plural((): &()) -> Cow<'_, str> {
                $plural.into()
            }
            fn meta(&self) -> &ObjectMeta {
                &self.metadata
            }
            fn meta_mut(&mut self) -> &mut ObjectMeta {
                &mut self.metadata
            }
        }
    };
}

resource!(StartupCPUBoost, NamespaceResourceScope, "startupcpuboosts");
resource!(
    ClusterStartupCPUBoost,
    ClusterResourceScope,
    "clusterstartupcpuboosts"
);

/// What every kind of boost has, whatever its scope.
pub trait BoostObject {
    /// Which kind it is.
    fn boost_kind(&self) -> BoostKind;
    /// Which namespaces, by their labels.
    fn namespace_selector(&self) -> Option<&LabelSelector>;
    /// Which pods, by their labels.
    fn selector(&self) -> Option<&LabelSelector>;
    /// What to do with them.
    fn spec(&self) -> &BoostSpec;
    /// What was done.
    fn status(&self) -> Option<&BoostStatus>;
}

impl BoostObject for StartupCPUBoost {
    fn boost_kind(&self) -> BoostKind {
        BoostKind::Namespaced
    }
    fn namespace_selector(&self) -> Option<&LabelSelector> {
        None
    }
    fn selector(&self) -> Option<&LabelSelector> {
        self.selector.as_ref()
    }
    fn spec(&self) -> &BoostSpec {
        &self.spec
    }
    fn status(&self) -> Option<&BoostStatus> {
        self.status.as_ref()
    }
}

impl BoostObject for ClusterStartupCPUBoost {
    fn boost_kind(&self) -> BoostKind {
        BoostKind::Cluster
    }
    fn namespace_selector(&self) -> Option<&LabelSelector> {
        self.namespace_selector.as_ref()
    }
    fn selector(&self) -> Option<&LabelSelector> {
        self.selector.as_ref()
    }
    fn spec(&self) -> &BoostSpec {
        &self.spec
    }
    fn status(&self) -> Option<&BoostStatus> {
        self.status.as_ref()
    }
}

/// How much CPU the selected pods get while they start, and when that ends.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct BoostSpec {
    /// How much CPU, by container. Without it the boost selects pods and changes nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resource_policy: Option<ResourcePolicy>,
    /// When the boost ends. Where several are set, the earliest ends it.
    pub duration_policy: DurationPolicy,
    /// Boost a container also when it restarts after its boost has ended (Headstart). Default false; the flag
    /// --boost-on-restart does so for all boosts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub boost_on_restart: Option<bool>,
}

/// How much CPU, by container.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ResourcePolicy {
    /// The first policy that fits a container is the one that counts.
    #[schemars(length(min = 1, max = 100))]
    pub container_policies: Vec<ContainerPolicy>,
}

/// How much CPU for the containers that it matches.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = [
    {
        "rule": "(has(self.containerName) && self.containerName.size() > 0) != has(self.matchContainers)",
        "message": "set exactly one of containerName and matchContainers (containerName: x is matchContainers: {type: ExactName, value: x})"
    },
    {
        "rule": "has(self.percentageIncrease) != has(self.fixedResources)",
        "message": "set exactly one of percentageIncrease and fixedResources"
    },
]))]
pub struct ContainerPolicy {
    /// Exact container name. Older spelling of `matchContainers` with type `ExactName`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub container_name: Option<String>,
    /// Which containers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub match_containers: Option<MatchContainers>,
    /// Raise what is set by a percentage, rounded up to 10m.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub percentage_increase: Option<PercentageIncrease>,
    /// Raise what is set to these values; a value that is higher already, or absent, stays as it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fixed_resources: Option<FixedResources>,
    /// Which of the two values are raised (Headstart). Default `RequestsAndLimits`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub controlled_values: Option<ControlledValues>,
}

/// Which of a container's two CPU values a policy raises (Headstart).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
pub enum ControlledValues {
    /// Both.
    #[default]
    RequestsAndLimits,
    /// The request, up to the limit and never so far that the `QoS` class changes.
    RequestsOnly,
    /// The limit: no effect on scheduling, on a quota of requests or on an HPA.
    LimitsOnly,
}

/// Which containers a policy is for.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = [
    {
        "rule": "self.type != 'RegexName' || ''.matches(self.value) || !''.matches(self.value)",
        "message": "matchContainers.value must be a regular expression in RE2 syntax"
    },
]))]
pub struct MatchContainers {
    /// `ExactName` compares the whole name; `RegexName` searches in it (`app` also fits `my-app-2`; anchor with ^ and $).
    #[serde(rename = "type")]
    pub kind: MatchType,
    /// The name, or the regular expression (RE2).
    #[schemars(length(max = 1000))]
    pub value: String,
    /// Also match sidecars, that is init containers with restartPolicy Always (Headstart). Default false.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub include_sidecars: Option<bool>,
}

/// How a container's name is matched.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
pub enum MatchType {
    /// The whole name is equal.
    #[default]
    ExactName,
    /// The regular expression is found in the name.
    RegexName,
}

/// An increase in percent.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PercentageIncrease {
    /// 50 makes 1 CPU 1500m.
    #[schemars(range(min = 1))]
    pub value: i64,
}

/// Fixed values.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = [
    {
        "rule": "(type(self.requests) == int ? self.requests > 0 : !isQuantity(self.requests) || sign(quantity(self.requests)) > 0) || (has(self.limits) && (type(self.limits) == int ? self.limits > 0 : !isQuantity(self.limits) || sign(quantity(self.limits)) > 0))",
        "message": "fixedResources: requests or limits must be above 0 (0 leaves a value as it is)"
    },
    {
        "rule": "!has(self.limits) || !isQuantity(string(self.requests)) || !isQuantity(string(self.limits)) || sign(quantity(string(self.limits))) <= 0 || quantity(string(self.limits)).compareTo(quantity(string(self.requests))) >= 0",
        "message": "limits must not be below requests (0 leaves the limit as it is)",
        "fieldPath": ".limits"
    },
]))]
pub struct FixedResources {
    /// CPU request while starting; 0 leaves it as it is.
    pub requests: CpuValue,
    /// CPU limit while starting; 0 or absent leaves it as it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limits: Option<CpuValue>,
}

/// A CPU quantity, written as a whole number or as a string (`2`, `"1500m"`).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct CpuValue(pub String);

impl<'de> Deserialize<'de> for CpuValue {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl de::Visitor<'_> for Visitor {
            type Value = CpuValue;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a CPU quantity: a whole number or a string such as \"1500m\"")
            }
            fn visit_i64<E>(self, number: i64) -> Result<CpuValue, E> {
                Ok(CpuValue(number.to_string()))
            }
            fn visit_u64<E>(self, number: u64) -> Result<CpuValue, E> {
                Ok(CpuValue(number.to_string()))
            }
            fn visit_str<E>(self, text: &str) -> Result<CpuValue, E> {
                Ok(CpuValue(text.to_owned()))
            }
        }
        from.deserialize_any(Visitor)
    }
}

impl JsonSchema for CpuValue {
    fn schema_name() -> Cow<'static, str> {
        "CpuValue".into()
    }
    fn inline_schema() -> bool {
        true
    }
    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "x-kubernetes-int-or-string": true,
            "maxLength": 64,
            "x-kubernetes-validations": [{
                "rule": "type(self) == int ? self >= 0 && self <= 1000000 : isQuantity(self) && sign(quantity(self)) >= 0 && quantity(self).compareTo(quantity('1M')) <= 0",
                "message": "must be a CPU quantity from 0 to 1M cores, such as 2 or 1500m",
            }],
        })
    }
}

/// When a boost ends.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = [
    {
        "rule": "has(self.fixedDuration) || has(self.podCondition) || has(self.containerCondition)",
        "message": "durationPolicy: set at least one of fixedDuration, podCondition and containerCondition"
    },
]))]
pub struct DurationPolicy {
    /// A time from scheduling on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fixed_duration: Option<FixedDuration>,
    /// A condition of the pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_condition: Option<PodCondition>,
    /// Each container's own status: its boost ends when it is `Started` or `Ready` (Headstart).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub container_condition: Option<ContainerCondition>,
}

/// A time that counts from scheduling.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct FixedDuration {
    /// Unit of `value`.
    pub unit: DurationUnit,
    /// How many.
    #[schemars(range(min = 1))]
    pub value: i64,
}

/// Unit of a fixed duration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
pub enum DurationUnit {
    /// Seconds.
    #[default]
    Seconds,
    /// Minutes.
    Minutes,
}

/// A condition of the pod, such as Ready.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PodCondition {
    /// Type of the condition.
    #[serde(rename = "type")]
    #[schemars(length(min = 1, max = 316))]
    pub kind: String,
    /// Status that ends the boost.
    #[schemars(length(min = 1, max = 64))]
    pub status: String,
    /// Keep the boost for so many seconds after the condition (Headstart). Default 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = MONTH_SECONDS))]
    pub delay_seconds: Option<i64>,
}

/// A container's own status that ends its boost (Headstart).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
pub enum ContainerCondition {
    /// It has passed its startup probe.
    Started,
    /// It passes its readiness probe.
    Ready,
}

/// What the operator says of a boost.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct BoostStatus {
    /// Containers that are boosted now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub active_container_boosts: Option<i32>,
    /// Containers boosted since the object was made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub total_container_boosts: Option<i32>,
    /// When a boost ends, in words (Headstart).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub end: Option<String>,
    /// `Active`: whether new pods are boosted, and if not, why not.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
}

/// A condition, as in `metav1.Condition`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Condition {
    /// Type of the condition.
    #[serde(rename = "type")]
    pub kind: String,
    /// True, False or Unknown.
    pub status: String,
    /// The generation of the object that this is about.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// When the status last changed.
    #[schemars(extend("format" = "date-time"))]
    pub last_transition_time: String,
    /// A word for machines.
    pub reason: String,
    /// A sentence for people.
    pub message: String,
}
