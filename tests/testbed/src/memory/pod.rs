//! What the API server does to pods alone: resize, the frozen spec, `QoS` classes, `LimitRange` defaults.

use serde_json::{Map, Value, json};

use super::{
    api::Refusal,
    store::{Kind, text},
};

const LISTS: [&str; 2] = ["containers", "initContainers"];

const FROZEN: &str = "pod updates may not change fields other than `spec.containers[*].image`,\
                      `spec.initContainers[*].image`,`spec.activeDeadlineSeconds`,`spec.tolerations` (only additions \
                      to existing tolerations),`spec.terminationGracePeriodSeconds` (allow it to be set to 1 if it \
                      was previously negative)";

/// Refuses a change through the main resource to anything that is frozen there, resources above all.
pub(super) fn check_update(old: &Value, new: &Value) -> Result<(), Refusal> {
    let frozen = |pod: &Value| {
        let mut spec = pod["spec"].as_object().cloned().unwrap_or_default();
        for open in [
            "activeDeadlineSeconds",
            "tolerations",
            "terminationGracePeriodSeconds",
            "schedulingGates",
        ] {
            spec.remove(open);
        }
        for list in LISTS {
            let containers = spec.remove(list).unwrap_or_default();
            for (i, container) in items(&containers).iter().enumerate() {
                let mut container = map(container).cloned().unwrap_or_default();
                container.remove("image");
                spec.insert(format!("{list}[{i}]"), container.into());
            }
        }
        spec
    };
    if frozen(old) == frozen(new) {
        Ok(())
    } else {
        Err(forbidden(old, "spec", FROZEN))
    }
}

/// What `pods/resize` stores for a pod that the request wants to be `wanted`: of it only the containers' resources
/// and resize policies count, the rest (metadata, status, other fields) is dropped without a word.
pub(super) fn resize(old: &Value, wanted: &Value) -> Result<Value, Refusal> {
    let mut new = old.clone();
    for list in LISTS {
        let (have, want) = (items(&old["spec"][list]), items(&wanted["spec"][list]));
        if have.len() != want.len() {
            let message = format!("{list} may not be added or removed on resize");
            return Err(forbidden(old, &format!("spec.{list}"), &message));
        }
        for (i, (have, want)) in have.iter().zip(want).enumerate() {
            let path = format!("spec.{list}[{i}]");
            if have["name"] != want["name"] {
                let message = format!("{list} may not be renamed or reordered on resize");
                return Err(forbidden(old, &format!("{path}.name"), &message));
            }
            for field in ["resources", "resizePolicy"] {
                match want.get(field) {
                    Some(value) => new["spec"][list][i][field] = value.clone(),
                    None => drop(
                        new["spec"][list][i]
                            .as_object_mut()
                            .and_then(|c| c.remove(field)),
                    ),
                }
            }
            check_resources(old, &path, &have["resources"], &want["resources"])?;
        }
    }
    if qos(old) != qos(&new) {
        return Err(invalid(
            old,
            "spec",
            &format!(
                "{:?}: Pod QOS Class may not change as a result of resizing",
                qos(&new)
            ),
        ));
    }
    Ok(new)
}

fn check_resources(pod: &Value, path: &str, have: &Value, want: &Value) -> Result<(), Refusal> {
    for values in ["requests", "limits"] {
        let path = format!("{path}.resources.{values}");
        let keys = map(&have[values]).into_iter().flat_map(Map::keys);
        if keys.into_iter().any(|key| want[values].get(key).is_none()) {
            return Err(forbidden(
                pod,
                &path,
                &format!("resource {values} cannot be removed"),
            ));
        }
        for (key, value) in map(&want[values]).into_iter().flatten() {
            if quantity(value).is_none_or(|q| q < 0.0) {
                return Err(invalid(
                    pod,
                    &format!("{path}[{key}]"),
                    &format!("{value}: must be a quantity of 0 or more"),
                ));
            }
            if !matches!(key.as_str(), "cpu" | "memory") && have[values].get(key) != Some(value) {
                return Err(forbidden(
                    pod,
                    "spec",
                    "only cpu and memory resources are mutable",
                ));
            }
        }
    }
    for (key, request) in map(&want["requests"]).into_iter().flatten() {
        let limit = &want["limits"][key];
        if quantity(limit).is_some_and(|limit| quantity(request) > Some(limit)) {
            let message = format!(
                "{request}: must be less than or equal to {key} limit of {}",
                text(limit)
            );
            return Err(invalid(
                pod,
                &format!("{path}.resources.requests"),
                &message,
            ));
        }
    }
    Ok(())
}

/// Adds the Container defaults of the namespace's `LimitRange`s to every container, as the admission plugin does at
/// creation and on a resize. A default that is not given follows from the others, as it does when a range is stored.
pub(super) fn add_limit_range_defaults<'a>(
    pod: &mut Value,
    ranges: impl Iterator<Item = &'a Value>,
) {
    for item in ranges
        .flat_map(|range| items(&range["spec"]["limits"]))
        .filter(|item| item["type"] == "Container")
    {
        for (values, sources) in [
            ("limits", &["default", "max"][..]),
            ("requests", &["defaultRequest", "default", "max", "min"][..]),
        ] {
            for (key, value) in sources
                .iter()
                .filter_map(|source| map(&item[*source]))
                .flatten()
            {
                for_each_container(pod, |container| {
                    if container["resources"][values][key].is_null() {
                        container["resources"][values][key] = value.clone();
                    }
                });
            }
        }
    }
}

fn for_each_container(pod: &mut Value, mut change: impl FnMut(&mut Value)) {
    for list in LISTS {
        if let Some(list) = pod["spec"].get_mut(list).and_then(Value::as_array_mut) {
            list.iter_mut().for_each(&mut change);
        }
    }
}

/// The `QoS` class that the containers give a pod.
pub(super) fn qos(pod: &Value) -> &'static str {
    let mut class = None;
    for container in LISTS.iter().flat_map(|list| items(&pod["spec"][list])) {
        let value = |values: &str, key: &str| {
            quantity(&container["resources"][values][key]).filter(|q| *q > 0.0)
        };
        let pairs = ["cpu", "memory"].map(|key| (value("requests", key), value("limits", key)));
        let this = if pairs == [(None, None); 2] {
            "BestEffort"
        } else if pairs
            .iter()
            .all(|(request, limit)| limit.is_some() && request.or(*limit) == *limit)
        {
            "Guaranteed"
        } else {
            "Burstable"
        };
        class = Some(if class.unwrap_or(this) == this {
            this
        } else {
            "Burstable"
        });
    }
    class.unwrap_or("BestEffort")
}

/// A Kubernetes quantity. Fractions are divided, not multiplied, so that equal ones are equal floats.
fn quantity(value: &Value) -> Option<f64> {
    if let Some(number) = value.as_f64() {
        return Some(number);
    }
    let value = value.as_str()?;
    let split = value
        .find(|c: char| c.is_ascii_alphabetic() && !matches!(c, 'e' | 'E'))
        .unwrap_or(value.len());
    let (number, suffix) = value.split_at(split);
    let number: f64 = number.parse().ok()?;
    Some(match suffix {
        "" => number,
        "n" => number / 1e9,
        "u" => number / 1e6,
        "m" => number / 1e3,
        "k" => number * 1e3,
        "M" => number * 1e6,
        "G" => number * 1e9,
        "T" => number * 1e12,
        "Ki" => number * 1024.0,
        "Mi" => number * 1024.0 * 1024.0,
        "Gi" => number * 1024.0 * 1024.0 * 1024.0,
        "Ti" => number * 1024.0 * 1024.0 * 1024.0 * 1024.0,
        _ => return None,
    })
}

/// A list's items, if it is one.
pub(super) fn items(list: &Value) -> &[Value] {
    list.as_array().map_or(&[], Vec::as_slice)
}

fn map(value: &Value) -> Option<&Map<String, Value>> {
    value.as_object()
}

fn forbidden(pod: &Value, field: &str, message: &str) -> Refusal {
    let kind = Kind::named("pods");
    Refusal::invalid(
        kind,
        text(&pod["metadata"]["name"]),
        field,
        "FieldValueForbidden",
        &format!("Forbidden: {message}"),
    )
}

fn invalid(pod: &Value, field: &str, message: &str) -> Refusal {
    let kind = Kind::named("pods");
    Refusal::invalid(
        kind,
        text(&pod["metadata"]["name"]),
        field,
        "FieldValueInvalid",
        &format!("Invalid value: {message}"),
    )
}

/// What the server gives a new pod for a status.
pub(super) fn first_status(pod: &Value) -> Value {
    json!({"phase": "Pending", "qosClass": qos(pod)})
}
