//! The four patch types.

use serde_json::{Value, json};

use super::api::Refusal;

/// What a patch makes of an object. `custom` types know no strategic merge, as on a real server.
pub(super) fn apply(
    content_type: &str,
    custom: bool,
    object: &Value,
    patch: &Value,
) -> Result<Value, Refusal> {
    let mut patched = object.clone();
    match content_type {
        "application/merge-patch+json" => json_patch::merge(&mut patched, patch),
        // Server-side apply, without its bookkeeping of owners.
        "application/apply-patch+yaml" => strategic(&mut patched, patch, ""),
        "application/strategic-merge-patch+json" if !custom => strategic(&mut patched, patch, ""),
        "application/json-patch+json" => {
            let patch: json_patch::Patch = serde_json::from_value(patch.clone())
                .map_err(|e| Refusal::bad_request(format!("error decoding patch: {e}")))?;
            json_patch::patch(&mut patched, &patch).map_err(|_| {
                let message = "the server rejected our request due to an error in our request";
                Refusal::new(422, "Invalid", message)
            })?;
        }
        _ => {
            let message = "the body of the request was in an unknown format - accepted media types include: \
                           application/json-patch+json, application/merge-patch+json, application/apply-patch+yaml";
            return Err(Refusal::new(415, "UnsupportedMediaType", message));
        }
    }
    Ok(patched)
}

/// Strategic merge: maps merge, null removes, lists with a merge key merge by it, other lists are replaced.
fn strategic(target: &mut Value, patch: &Value, field: &str) {
    match (patch, merge_key(field)) {
        (Value::Object(patch), _) => {
            if !target.is_object() {
                *target = json!({});
            }
            let map = target.as_object_mut().expect("just made sure");
            for (name, value) in patch {
                if value.is_null() {
                    map.remove(name);
                } else {
                    strategic(map.entry(name.clone()).or_insert(Value::Null), value, name);
                }
            }
        }
        (Value::Array(patch), Some(key)) => {
            if !target.is_array() {
                *target = json!([]);
            }
            let list = target.as_array_mut().expect("just made sure");
            for item in patch {
                let place = list.iter().position(|old| old[key] == item[key]);
                let place = place.unwrap_or_else(|| {
                    list.push(Value::Null);
                    list.len() - 1
                });
                strategic(&mut list[place], item, "");
            }
        }
        _ => *target = patch.clone(),
    }
}

fn merge_key(field: &str) -> Option<&'static str> {
    Some(match field {
        "containers"
        | "initContainers"
        | "ephemeralContainers"
        | "containerStatuses"
        | "initContainerStatuses"
        | "webhooks"
        | "env"
        | "volumes" => "name",
        "conditions" => "type",
        "ownerReferences" => "uid",
        "volumeMounts" => "mountPath",
        _ => return None,
    })
}
