//! A pod, trimmed to what a boost needs: one type for the admission review and for the watch.
//!
//! A 10 kB review parses in a third of the time that the full `Pod` takes, and a cached pod costs a few hundred bytes.

use std::{collections::BTreeMap, fmt};

use chrono::{DateTime, Utc};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference, Time};
use serde::{Deserialize, Deserializer, de};

use super::cluster::{CpuAmount, Toleration};

/// A pod as far as Headstart is concerned.
#[derive(kube::Resource, Clone, Debug, Default, Deserialize)]
#[resource(inherit = "k8s_openapi::api::core::v1::Pod")]
pub struct Pod {
    /// Names, labels, annotations and versions; everything else of the metadata is dropped on reading.
    #[serde(deserialize_with = "trimmed_metadata")]
    pub metadata: ObjectMeta,
    /// What was asked for.
    pub spec: PodSpec,
    /// What the scheduler and the kubelet say.
    #[serde(default, deserialize_with = "null_is_default")]
    pub status: PodStatus,
}

/// A pod of which nothing but the metadata was asked for, trimmed alike.
#[derive(Clone, Debug, Deserialize)]
pub struct PodMetadata {
    /// As of a [`Pod`].
    #[serde(deserialize_with = "trimmed_metadata")]
    pub metadata: ObjectMeta,
}

/// The part of `spec` that is read.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodSpec {
    /// Regular containers.
    #[serde(default, deserialize_with = "null_is_default")]
    pub containers: Vec<Container>,
    /// Init containers; those with `restartPolicy: Always` are sidecars.
    #[serde(default, deserialize_with = "null_is_default")]
    pub init_containers: Vec<Container>,
    /// Set once the scheduler has bound the pod.
    #[serde(default)]
    pub node_name: Option<String>,
    /// Pod-level resources (KEP-2837).
    #[serde(default)]
    pub resources: Option<Resources>,
    /// Operating system, where the pod names one.
    #[serde(default)]
    pub os: Option<PodOs>,
    /// What the sandbox needs beside the containers (its RuntimeClass says so).
    #[serde(default)]
    pub overhead: Option<CpuAmount>,
    /// Labels that its node must have.
    #[serde(default, deserialize_with = "null_is_default")]
    pub node_selector: BTreeMap<String, String>,
    /// Taints that its node may have.
    #[serde(default, deserialize_with = "null_is_default")]
    pub tolerations: Vec<Toleration>,
    /// Seconds that it may run; a quota of scope `Terminating` counts such pods.
    #[serde(default)]
    pub active_deadline_seconds: Option<i64>,
    /// A quota may count some classes only.
    #[serde(default)]
    pub priority_class_name: Option<String>,
}

/// `spec.os`.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct PodOs {
    /// `linux` or `windows`.
    #[serde(default)]
    pub name: String,
}

/// A container or an init container.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Container {
    /// Unique in its pod, over regular and init containers.
    pub name: String,
    /// Requests, limits and claims.
    #[serde(default, deserialize_with = "null_is_default")]
    pub resources: Resources,
    /// What a resize does to the running container, by resource.
    #[serde(default, deserialize_with = "null_is_default")]
    pub resize_policy: Vec<ResizePolicy>,
    /// `Always` makes an init container a sidecar.
    #[serde(default)]
    pub restart_policy: Option<String>,
}

/// `resources` of a container or of a pod.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct Resources {
    /// Requested amounts.
    #[serde(default)]
    pub requests: Option<Amounts>,
    /// Upper bounds.
    #[serde(default)]
    pub limits: Option<Amounts>,
    /// Dynamic resource claims; only whether there are any matters.
    #[serde(default, deserialize_with = "null_is_default")]
    pub claims: Vec<de::IgnoredAny>,
}

/// A resource list, trimmed to the two resources that decide the `QoS` class.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct Amounts {
    /// CPU, as it was written.
    #[serde(default, deserialize_with = "quantity")]
    pub cpu: Option<String>,
    /// Memory, as it was written.
    #[serde(default, deserialize_with = "quantity")]
    pub memory: Option<String>,
}

/// One entry of `resizePolicy`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ResizePolicy {
    /// `cpu` or `memory`.
    pub resource_name: String,
    /// `NotRequired` or `RestartContainer`.
    pub restart_policy: String,
}

/// The part of `status` that is read.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodStatus {
    /// `Pending`, `Running`, `Succeeded`, `Failed` or `Unknown`.
    #[serde(default)]
    pub phase: Option<String>,
    /// When the kubelet first saw the pod.
    #[serde(default)]
    pub start_time: Option<DateTime<Utc>>,
    /// The generation that the kubelet has acted on; absent where it is not tracked (1.33 without its gate).
    #[serde(default)]
    pub observed_generation: Option<i64>,
    /// Pod conditions.
    #[serde(default, deserialize_with = "null_is_default")]
    pub conditions: Vec<StatusCondition>,
    /// Statuses of regular containers.
    #[serde(default, deserialize_with = "null_is_default")]
    pub container_statuses: Vec<ContainerStatus>,
    /// Statuses of init containers.
    #[serde(default, deserialize_with = "null_is_default")]
    pub init_container_statuses: Vec<ContainerStatus>,
}

/// A pod condition.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StatusCondition {
    /// Type, such as `Ready`.
    #[serde(rename = "type")]
    pub kind: String,
    /// `True`, `False` or `Unknown`.
    pub status: String,
    /// A word for machines.
    #[serde(default)]
    pub reason: Option<String>,
    /// A sentence for people.
    #[serde(default)]
    pub message: Option<String>,
    /// When `status` last changed.
    #[serde(default)]
    pub last_transition_time: Option<DateTime<Utc>>,
}

/// A container's status.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ContainerStatus {
    /// The container's name.
    pub name: String,
    /// Whether it passes its readiness probe.
    #[serde(default)]
    pub ready: bool,
    /// Whether it has passed its startup probe.
    #[serde(default)]
    pub started: Option<bool>,
    /// How often it was started again.
    #[serde(default)]
    pub restart_count: i32,
    /// What the kubelet has set aside for it.
    #[serde(default)]
    pub allocated_resources: Option<Amounts>,
    /// What it runs with.
    #[serde(default)]
    pub resources: Option<ActualResources>,
    /// Its present state.
    #[serde(default)]
    pub state: Option<ContainerState>,
}

/// `resources` of a container's status, trimmed to CPU.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct ActualResources {
    /// Requested amounts.
    #[serde(default)]
    pub requests: Option<CpuAmount>,
    /// Upper bounds.
    #[serde(default)]
    pub limits: Option<CpuAmount>,
}

/// `state` of a container.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct ContainerState {
    /// Set while it runs.
    #[serde(default)]
    pub running: Option<Running>,
}

/// `state.running` of a container.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Running {
    /// When this run of the container began.
    #[serde(default)]
    pub started_at: Option<DateTime<Utc>>,
}

impl Pod {
    /// The record: the value of our annotation.
    #[must_use]
    pub fn record_text(&self) -> Option<&str> {
        self.metadata
            .annotations
            .as_ref()?
            .get(super::BOOST_KEY)
            .map(String::as_str)
    }

    /// The claim: the value of our label, which names the boost.
    #[must_use]
    pub fn claim(&self) -> Option<&str> {
        self.metadata
            .labels
            .as_ref()?
            .get(super::BOOST_KEY)
            .map(String::as_str)
    }

    /// Forgets what a cache of boosted pods never asks for: what matters at their creation only, and others' labels and
    /// annotations. Lists give back the room beyond their end; it is a third of a pod with one container.
    pub fn trim(&mut self) {
        let Self {
            metadata,
            spec,
            status,
        } = self;
        metadata.generate_name = None;
        for marks in [&mut metadata.labels, &mut metadata.annotations] {
            let marks = marks.iter_mut();
            marks.for_each(|marks| marks.retain(|key, _| key == super::BOOST_KEY));
        }
        metadata
            .owner_references
            .iter_mut()
            .for_each(Vec::shrink_to_fit);
        spec.node_selector = BTreeMap::new();
        spec.tolerations = Vec::new();
        spec.priority_class_name = None;
        spec.containers.shrink_to_fit();
        spec.init_containers.shrink_to_fit();
        status.conditions.shrink_to_fit();
        status.container_statuses.shrink_to_fit();
        status.init_container_statuses.shrink_to_fit();
    }

    /// Regular containers, then init containers.
    pub fn all_containers(&self) -> impl Iterator<Item = &Container> {
        self.spec
            .containers
            .iter()
            .chain(&self.spec.init_containers)
    }

    /// The container of that name, regular or init.
    #[must_use]
    pub fn container(&self, name: &str) -> Option<&Container> {
        self.all_containers()
            .find(|container| container.name == name)
    }

    /// The status of the container of that name.
    #[must_use]
    pub fn container_status(&self, name: &str) -> Option<&ContainerStatus> {
        let status = &self.status;
        status
            .container_statuses
            .iter()
            .chain(&status.init_container_statuses)
            .find(|status| status.name == name)
    }

    /// Containers that have restarted, and how often; init containers that run once are left out.
    pub fn restarts(&self) -> impl Iterator<Item = (&str, i32)> {
        let sidecars = self.status.init_container_statuses.iter().filter(|status| {
            let container = self.container(&status.name);
            container.is_some_and(Container::is_sidecar)
        });
        let statuses = self.status.container_statuses.iter().chain(sidecars);
        let counts = statuses.map(|status| (status.name.as_str(), status.restart_count));
        counts.filter(|(_, count)| *count > 0)
    }

    /// The condition of that type.
    #[must_use]
    pub fn condition(&self, kind: &str) -> Option<&StatusCondition> {
        self.status
            .conditions
            .iter()
            .find(|condition| condition.kind == kind)
    }

    /// Whether it has run to its end.
    #[must_use]
    pub fn is_over(&self) -> bool {
        matches!(self.status.phase.as_deref(), Some("Succeeded" | "Failed"))
    }

    /// Whether a node has been chosen.
    #[must_use]
    pub fn has_node(&self) -> bool {
        self.spec
            .node_name
            .as_deref()
            .is_some_and(|name| !name.is_empty())
    }
}

impl ContainerStatus {
    /// When its present run began, if it runs.
    #[must_use]
    pub fn began(&self) -> Option<DateTime<Utc>> {
        self.state.as_ref()?.running.as_ref()?.started_at
    }
}

impl Container {
    /// Whether this init container keeps running beside the regular ones (KEP-753).
    #[must_use]
    pub fn is_sidecar(&self) -> bool {
        self.restart_policy.as_deref() == Some("Always")
    }

    /// CPU request, as written.
    #[must_use]
    pub fn cpu_request(&self) -> Option<&str> {
        self.resources.requests.as_ref()?.cpu.as_deref()
    }

    /// CPU limit, as written.
    #[must_use]
    pub fn cpu_limit(&self) -> Option<&str> {
        self.resources.limits.as_ref()?.cpu.as_deref()
    }
}

/// Reads `null` like an absent field: clients written in Go send both.
pub(super) fn null_is_default<'de, D: Deserializer<'de>, T: Default + Deserialize<'de>>(
    from: D,
) -> Result<T, D::Error> {
    Option::deserialize(from).map(Option::unwrap_or_default)
}

/// Reads only the metadata that is used; `managedFields` alone is often a quarter of a pod.
pub(super) fn trimmed_metadata<'de, D: Deserializer<'de>>(from: D) -> Result<ObjectMeta, D::Error> {
    #[derive(Default, Deserialize)]
    #[serde(rename_all = "camelCase", default)]
    struct Trimmed {
        name: Option<String>,
        generate_name: Option<String>,
        namespace: Option<String>,
        uid: Option<String>,
        resource_version: Option<String>,
        generation: Option<i64>,
        creation_timestamp: Option<Time>,
        deletion_timestamp: Option<Time>,
        labels: Option<BTreeMap<String, String>>,
        annotations: Option<BTreeMap<String, String>>,
        owner_references: Option<Vec<OwnerReference>>,
    }
    let read = Trimmed::deserialize(from)?;
    Ok(ObjectMeta {
        name: read.name,
        generate_name: read.generate_name,
        namespace: read.namespace,
        uid: read.uid,
        resource_version: read.resource_version,
        generation: read.generation,
        creation_timestamp: read.creation_timestamp,
        deletion_timestamp: read.deletion_timestamp,
        labels: read.labels,
        annotations: read.annotations,
        owner_references: read.owner_references,
        ..ObjectMeta::default()
    })
}

/// Reads a quantity as text; JSON and YAML written by hand may have a number.
pub(super) fn quantity<'de, D: Deserializer<'de>>(from: D) -> Result<Option<String>, D::Error> {
    Ok(Option::<Written>::deserialize(from)?.map(|written| written.0))
}

/// A quantity as it was written. (An untagged enum would do, and would keep a copy of each value on the way.)
struct Written(String);

impl<'de> Deserialize<'de> for Written {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl de::Visitor<'_> for Visitor {
            type Value = Written;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a quantity, as text or as a number")
            }

            fn visit_str<E>(self, text: &str) -> Result<Written, E> {
                Ok(Written(text.to_owned()))
            }

            fn visit_u64<E>(self, number: u64) -> Result<Written, E> {
                Ok(Written(number.to_string()))
            }

            fn visit_i64<E>(self, number: i64) -> Result<Written, E> {
                Ok(Written(number.to_string()))
            }

            fn visit_f64<E: de::Error>(self, number: f64) -> Result<Written, E> {
                // YAML has `.nan` and `.inf`.
                let number = serde_json::Number::from_f64(number)
                    .ok_or_else(|| E::invalid_value(de::Unexpected::Float(number), &self))?;
                Ok(Written(number.to_string()))
            }
        }
        from.deserialize_any(Visitor)
    }
}
