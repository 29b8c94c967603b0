//! The CustomResourceDefinitions: there, established, and with the fields that this version knows.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::{
    Api, Client,
    api::{ApiResource, DynamicObject},
};
use serde_json::Value;

use super::{Finding, ask};
use crate::api::{VERSION, crds};

const ADVICE: &str = "kubectl apply -f manifests/crd.yaml";
/// Differences that are told.
const NAMED: usize = 5;

pub(super) async fn check(client: &Client) -> Finding {
    // As it is stored: a typed one would drop what its type does not know.
    let resource = ApiResource::erase::<CustomResourceDefinition>(&());
    let api = Api::<DynamicObject>::all_with(client.clone(), &resource);
    let what = "customresourcedefinitions.apiextensions.k8s.io";
    let mut findings = Vec::new();
    for ours in crds() {
        let name = ours["metadata"]["name"].as_str().unwrap_or_default();
        let theirs = ask("get", what, api.get_opt(name)).await;
        findings.push(theirs.map_or_else(
            |trouble| trouble,
            |theirs| compare(name, &ours, theirs.as_ref().map(|object| &object.data)),
        ));
    }
    Finding::all(findings)
}

/// Compares a definition with the one that is installed.
fn compare(name: &str, ours: &Value, theirs: Option<&Value>) -> Finding {
    let Some(theirs) = theirs else {
        return Finding::failed(format!("{name} is missing"), ADVICE);
    };
    let conditions = theirs["status"]["conditions"].as_array();
    let is_established = conditions
        .into_iter()
        .flatten()
        .any(|condition| condition["type"] == "Established" && condition["status"] == "True");
    if !is_established {
        return Finding::failed(
            format!("{name} is not Established"),
            format!("kubectl describe crd {name} says why"),
        );
    }
    let version = |of: &Value| {
        let versions = of["spec"]["versions"].as_array();
        let mut versions = versions.into_iter().flatten();
        versions.find(|version| version["name"] == VERSION).cloned()
    };
    let Some(installed) = version(theirs).filter(|version| version["served"] == true) else {
        return Finding::failed(format!("{name} does not serve {VERSION}"), ADVICE);
    };
    if installed["subresources"]["status"].is_null() {
        return Finding::failed(format!("{name} has no subresource status"), ADVICE);
    }
    let wanted = version(ours).unwrap_or_default();
    let schema = |version: &Value| version["schema"]["openAPIV3Schema"].clone();
    let mut differences = Differences::default();
    differences.look(&schema(&wanted), &schema(&installed), "");
    differences.finding(name)
}

/// In what a schema falls short of ours.
#[derive(Debug, Default)]
struct Differences {
    /// Fields that it doesn't have: the API server would drop them.
    missing: Vec<String>,
    /// Fields that it has by other rules.
    other: Vec<String>,
}

impl Differences {
    /// Compares a schema. Fields that only theirs has are of no matter: it may be newer.
    fn look(&mut self, ours: &Value, theirs: &Value, path: &str) {
        let Value::Object(keywords) = ours else {
            return;
        };
        for (keyword, value) in keywords {
            let installed = &theirs[keyword];
            match keyword.as_str() {
                "description" => {}
                "properties" => {
                    for (field, schema) in value.as_object().into_iter().flatten() {
                        let path = if path.is_empty() {
                            field.clone()
                        } else {
                            format!("{path}.{field}")
                        };
                        match installed.get(field) {
                            Some(installed) => self.look(schema, installed, &path),
                            None => self.missing.push(path),
                        }
                    }
                }
                "items" => self.look(value, installed, &format!("{path}[]")),
                "additionalProperties" if value.is_object() => {
                    self.look(value, installed, &format!("{path}.*"));
                }
                _ if is_same(value, installed) => {}
                _ => self.differs(path),
            }
        }
        // A rule that ours doesn't have refuses what we take.
        let known = |keyword: &str| {
            ["description", "properties"].contains(&keyword) || keywords.contains_key(keyword)
        };
        let more = theirs.as_object().into_iter().flatten();
        if more.into_iter().any(|(keyword, _)| !known(keyword)) {
            self.differs(path);
        }
    }

    fn differs(&mut self, path: &str) {
        let path = if path.is_empty() { "the object" } else { path };
        if self.other.last().is_none_or(|last| last != path) {
            self.other.push(path.to_owned());
        }
    }

    fn finding(&self, name: &str) -> Finding {
        let named = |paths: &[String]| {
            let more = match paths.len().saturating_sub(NAMED) {
                0 => String::new(),
                more => format!(" and {more} more"),
            };
            paths[..paths.len().min(NAMED)].join(", ") + &more
        };
        if !self.missing.is_empty() {
            let missing = named(&self.missing);
            Finding::failed(
                format!("{name} is of another version, and lacks {missing}"),
                ADVICE,
            )
        } else if !self.other.is_empty() {
            let other = named(&self.other);
            Finding::warning(
                format!("{name} is of another version, with other rules for {other}"),
                ADVICE,
            )
        } else {
            Finding::ok(format!("{name} has all fields"))
        }
    }
}

/// Whether the API server has kept a value: lists of words in any order, numbers in any form, what is empty as nothing.
fn is_same(ours: &Value, theirs: &Value) -> bool {
    match (ours, theirs) {
        (Value::Number(ours), Value::Number(theirs)) => ours.as_f64() == theirs.as_f64(),
        (Value::Array(ours), Value::Array(theirs)) => {
            let has =
                |list: &[Value], value: &Value| list.iter().any(|other| is_same(value, other));
            ours.len() == theirs.len() && ours.iter().all(|value| has(theirs, value))
        }
        (Value::Object(ours), Value::Object(theirs)) => {
            let mut keys = ours.keys().chain(theirs.keys());
            let of = |map: &serde_json::Map<String, Value>, key: &String| {
                map.get(key).cloned().unwrap_or_default()
            };
            keys.all(|key| is_same(&of(ours, key), &of(theirs, key)))
        }
        (Value::Bool(false), Value::Null) | (Value::Null, Value::Bool(false)) => true,
        (ours, theirs) => ours == theirs,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{super::Outcome, *};

    /// Our first definition as a server has it, changed.
    fn compared(change: impl Fn(&mut Value)) -> Finding {
        let ours = crds().remove(0);
        let mut theirs = ours.clone();
        theirs["status"] = json!({"conditions": [{"type": "Established", "status": "True"}]});
        change(&mut theirs);
        compare("crd", &ours, Some(&theirs))
    }

    fn schema(crd: &mut Value) -> &mut Value {
        &mut crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    }

    fn remove(value: &mut Value, key: &str) {
        let map = value.as_object_mut().expect("an object");
        map.remove(key).expect("it is there");
    }

    #[test]
    fn the_same_and_a_newer_one_are_fit() {
        assert_eq!(compared(|_| {}).outcome, Outcome::Ok);
        let newer =
            compared(|crd| schema(crd)["spec"]["properties"]["new"] = json!({"type": "string"}));
        assert_eq!(newer.outcome, Outcome::Ok);
        let reworded = compared(|crd| schema(crd)["spec"]["description"] = "other".into());
        assert_eq!(reworded.outcome, Outcome::Ok);
    }

    #[test]
    fn a_field_that_is_missing_is_named() {
        let older = compared(|crd| {
            remove(
                &mut schema(crd)["spec"]["properties"]["durationPolicy"]["properties"],
                "podCondition",
            );
        });
        assert_eq!(older.outcome, Outcome::Failed);
        assert!(
            older
                .detail
                .ends_with("lacks spec.durationPolicy.podCondition"),
            "{older:?}"
        );
        let older = compared(|crd| {
            let spec = &mut schema(crd)["spec"]["properties"];
            let policies = &mut spec["resourcePolicy"]["properties"]["containerPolicies"];
            remove(&mut policies["items"]["properties"], "matchContainers");
        });
        let path = "spec.resourcePolicy.containerPolicies[].matchContainers";
        assert!(older.detail.ends_with(path), "{older:?}");
    }

    #[test]
    fn other_rules_are_a_warning() {
        let stricter = compared(|crd| schema(crd)["spec"]["minProperties"] = 1.into());
        assert_eq!(stricter.outcome, Outcome::Warning);
        assert!(stricter.detail.ends_with("rules for spec"), "{stricter:?}");
        let laxer = compared(|crd| remove(&mut schema(crd)["spec"], "required"));
        assert_eq!(laxer.outcome, Outcome::Warning);
    }

    #[test]
    fn what_is_not_served_fails() {
        let outcome = |change: fn(&mut Value)| compared(change).outcome;
        assert_eq!(outcome(|crd| remove(crd, "status")), Outcome::Failed);
        assert_eq!(
            outcome(|crd| crd["spec"]["versions"][0]["served"] = false.into()),
            Outcome::Failed
        );
        assert_eq!(
            outcome(|crd| remove(&mut crd["spec"]["versions"][0], "subresources")),
            Outcome::Failed
        );
        assert_eq!(compare("crd", &crds()[0], None).outcome, Outcome::Failed);
    }

    #[test]
    fn what_a_server_rewrites_is_the_same() {
        for (ours, theirs, same) in [
            (json!(1), json!(1.0), true),
            (json!(["a", "b"]), json!(["b", "a"]), true),
            (json!(["a"]), json!(["a", "b"]), false),
            (json!({"a": false}), json!({}), true),
            (
                json!([{"rule": "r", "message": "m"}]),
                json!([{"message": "m", "rule": "r"}]),
                true,
            ),
            (json!([{"rule": "r"}]), json!([{"rule": "s"}]), false),
            (json!("x"), Value::Null, false),
        ] {
            assert_eq!(is_same(&ours, &theirs), same, "{ours} {theirs}");
        }
    }
}
