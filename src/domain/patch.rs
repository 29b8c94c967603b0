//! The bodies that are written to pods: the answer's JSON Patch, the resize and the finish; and the claim, and the resize, of a
//! raise.
//!
//! They touch CPU values, our label and our annotation, and nothing else: no field is read and written back, so none
//! that this version doesn't know can be lost.

use std::collections::BTreeMap;

use json_patch::{
    AddOperation, Patch, PatchOperation, RemoveOperation, ReplaceOperation, jsonptr::PointerBuf,
};
use serde_json::{Map, Value, json};

use super::{
    admission::{Admission, Outcome},
    cpu::Cpu,
    quantity::MilliCpu,
    raise::Raise,
    record::Record,
    revert::{ContainerRevert, Finish},
};
use crate::api::{Amounts, BOOST_KEY, Pod};

/// The JSON Patch of an admission answer.
///
/// It is built against the object as it was sent, because a patch that does not apply makes the API server refuse the
/// pod: a map that is missing or null is added whole, and nothing is removed that is not there.
#[must_use]
pub fn admission(pod: &Pod, admission: &Admission) -> Patch {
    let mut patch = Vec::new();
    if admission.outcome == Outcome::Untouchable {
        return Patch(patch);
    }
    let regular = pod.spec.containers.len();
    for (index, (container, decision)) in
        pod.all_containers().zip(&admission.containers).enumerate()
    {
        let (list, position) = if index < regular {
            ("containers", index)
        } else {
            ("initContainers", index - regular)
        };
        let now = Cpu::of(container);
        let mut value = |kind: &str,
                         amounts: Option<&Amounts>,
                         now: Option<MilliCpu>,
                         to: Option<MilliCpu>| {
            if now == to {
                return;
            }
            let map = format!("/spec/{list}/{position}/resources/{kind}");
            let operation = match (now, to) {
                (Some(_), Some(to)) => replace(map + "/cpu", to.to_string()),
                (Some(_), None) => remove(map + "/cpu"),
                (None, Some(to)) if amounts.is_some() => add(map + "/cpu", to.to_string().into()),
                (None, to) => add(map, json!({"cpu": to.map(|to| to.to_string())})),
            };
            patch.push(operation);
        };
        value(
            "requests",
            container.resources.requests.as_ref(),
            now.request,
            decision.to.request,
        );
        value(
            "limits",
            container.resources.limits.as_ref(),
            now.limit,
            decision.to.limit,
        );
    }
    let boosted = admission.record.as_ref().zip(admission.boost.as_ref());
    mark(
        &mut patch,
        "labels",
        pod.metadata.labels.as_ref(),
        boosted.map(|(_, boost)| boost.name.clone()),
    );
    mark(
        &mut patch,
        "annotations",
        pod.metadata.annotations.as_ref(),
        boosted.map(|(record, _)| record.clone()),
    );
    Patch(patch)
}

/// Sets or removes our key in `metadata.labels` or `metadata.annotations`.
fn mark(
    patch: &mut Vec<PatchOperation>,
    map: &str,
    now: Option<&BTreeMap<String, String>>,
    to: Option<String>,
) {
    let key = || format!("/metadata/{map}/{}", BOOST_KEY.replace('/', "~1"));
    let present = now.and_then(|map| map.get(BOOST_KEY));
    match (now, to) {
        (_, Some(to)) if present == Some(&to) => {}
        (Some(_), Some(to)) => patch.push(add(key(), to.into())),
        (None, Some(to)) => patch.push(add(format!("/metadata/{map}"), json!({BOOST_KEY: to}))),
        (_, None) if present.is_some() => patch.push(remove(key())),
        (_, None) => {}
    }
}

fn add(path: String, value: Value) -> PatchOperation {
    PatchOperation::Add(AddOperation {
        path: pointer(path),
        value,
    })
}

fn replace(path: String, value: String) -> PatchOperation {
    PatchOperation::Replace(ReplaceOperation {
        path: pointer(path),
        value: value.into(),
    })
}

fn remove(path: String) -> PatchOperation {
    PatchOperation::Remove(RemoveOperation {
        path: pointer(path),
    })
}

fn pointer(path: String) -> PointerBuf {
    PointerBuf::parse(path)
        .expect("a path of ours begins with a slash, and slashes in it are escaped")
}

/// The merge body for the pod that comes before a raise: claim and record.
#[must_use]
pub fn claim(pod: &Pod, raise: &Raise) -> Value {
    let mut metadata = preconditions(pod);
    metadata.insert("labels".into(), json!({BOOST_KEY: raise.boost}));
    metadata.insert("annotations".into(), json!({BOOST_KEY: raise.record}));
    json!({"metadata": metadata})
}

/// The strategic-merge body for `pods/resize`, of a revert or a raise: these containers' CPU values, merged by container name.
#[must_use]
pub fn resize(pod: &Pod, containers: &[ContainerRevert]) -> Value {
    let mut spec = Map::new();
    for container in containers {
        let mut resources = Map::new();
        for (kind, to) in [
            ("requests", container.to.request),
            ("limits", container.to.limit),
        ] {
            if let Some(to) = to {
                resources.insert(kind.into(), json!({"cpu": to.to_string()}));
            }
        }
        let list = if container.init {
            "initContainers"
        } else {
            "containers"
        };
        let entry = spec.entry(list).or_insert_with(|| Value::Array(Vec::new()));
        if let Value::Array(entries) = entry {
            entries.push(json!({"name": container.name, "resources": resources}));
        }
    }
    json!({"metadata": preconditions(pod), "spec": spec})
}

/// What the answer to a resize has beyond the CPU values that it was to set, if anything: container and resource.
#[must_use]
pub fn beyond_cpu(before: &Value, after: &Value, containers: &[ContainerRevert]) -> Option<String> {
    let mut surplus = Vec::new();
    for list in ["containers", "initContainers"] {
        let of = |pod: &Value| pod["spec"][list].as_array().cloned().unwrap_or_default();
        for (before, after) in of(before).iter().zip(&of(after)) {
            let name = after["name"].as_str().unwrap_or_default();
            let ours = |kind: &str, key: &str| {
                let mut containers = containers.iter();
                let to = containers.find(|container| container.name == name);
                let to = to.map(|container| match kind {
                    "requests" => container.to.request,
                    _ => container.to.limit,
                });
                key == "cpu" && to.flatten().is_some()
            };
            for kind in ["requests", "limits"] {
                let old = &before["resources"][kind];
                for (key, value) in after["resources"][kind].as_object().into_iter().flatten() {
                    if old[key] != *value && !ours(kind, key) {
                        surplus.push(format!("{name} {kind}.{key}={value}"));
                    }
                }
            }
        }
    }
    (!surplus.is_empty()).then(|| surplus.join(", "))
}

/// The merge body for the pod: the claim goes, unless it is kept for restarts, and the record says that the boost has ended.
#[must_use]
pub fn finish(pod: &Pod, finish: &Finish) -> Value {
    let mut metadata = preconditions(pod);
    if !finish.keeps_claim {
        metadata.insert("labels".into(), json!({BOOST_KEY: null}));
    }
    if let Some((record, _)) = &finish.ended {
        metadata.insert("annotations".into(), json!({BOOST_KEY: record.text()}));
    }
    json!({"metadata": metadata})
}

/// The merge body that changes a record and nothing else.
#[must_use]
pub fn record(pod: &Pod, record: &Record) -> Value {
    let mut metadata = preconditions(pod);
    metadata.insert("annotations".into(), json!({BOOST_KEY: record.text()}));
    json!({"metadata": metadata})
}

/// The merge body that drops both marks of a pod whose record nobody can read. Its CPU stays as it is.
#[must_use]
pub fn drop_marks(pod: &Pod) -> Value {
    let mut metadata = preconditions(pod);
    metadata.insert("labels".into(), json!({BOOST_KEY: null}));
    metadata.insert("annotations".into(), json!({BOOST_KEY: null}));
    json!({"metadata": metadata})
}

/// Makes a write safe twice and from two leaders: it holds for this pod in this version, or not at all.
fn preconditions(pod: &Pod) -> Map<String, Value> {
    let mut metadata = Map::new();
    metadata.insert("uid".into(), json!(pod.metadata.uid));
    metadata.insert(
        "resourceVersion".into(),
        json!(pod.metadata.resource_version),
    );
    metadata
}
