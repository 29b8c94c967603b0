//! The `CustomResourceDefinition`s, made from the types.
//!
//! `headstart crd` prints it; `manifests/crd.yaml` is that print, and a test fails when the two differ.

use schemars::{JsonSchema, generate::SchemaSettings};
use serde_json::{Map, Value, json};

use super::{BoostSpec, BoostStatus, GROUP, VERSION};

/// The definitions, as JSON values with the fields in the order in which people expect them.
#[must_use]
pub fn crds() -> Vec<Value> {
    vec![namespaced(), cluster()]
}

/// The definitions as a YAML stream.
#[must_use]
pub fn crds_yaml() -> String {
    let mut text = String::from(
        "# Printed by `headstart crd`. Do not edit: change src/api/boost.rs and print it again.\n",
    );
    for crd in crds() {
        text.push_str("---\n");
        text.push_str(&serde_saphyr::to_string(&crd).expect("a JSON value can be written as YAML"));
    }
    text
}

fn namespaced() -> Value {
    let selector = selector("Which pods of the namespace, by their labels. Absent or empty: all.");
    definition(&Names {
        kind: "StartupCPUBoost",
        scope: "Namespaced",
        short: "scb",
        description: "Gives the selected pods of its namespace more CPU while they start.",
        selectors: vec![("selector", selector)],
    })
}

fn cluster() -> Value {
    let namespaces = selector("Which namespaces, by their labels. Absent or empty: all.");
    let pods = selector("Which of their pods, by their labels. Absent or empty: all.");
    definition(&Names {
        kind: "ClusterStartupCPUBoost",
        scope: "Cluster",
        short: "cscb",
        description: "Gives the selected pods of the selected namespaces more CPU while they start (Headstart). A StartupCPUBoost of the namespace goes before it.",
        selectors: vec![("namespaceSelector", namespaces), ("selector", pods)],
    })
}

/// In what the two definitions differ.
struct Names {
    kind: &'static str,
    scope: &'static str,
    short: &'static str,
    description: &'static str,
    selectors: Vec<(&'static str, Value)>,
}

fn definition(names: &Names) -> Value {
    let singular = names.kind.to_lowercase();
    let mut properties = Map::new();
    for (name, of) in [
        ("apiVersion", "string"),
        ("kind", "string"),
        ("metadata", "object"),
    ] {
        properties.insert(name.into(), json!({"type": of}));
    }
    for (name, schema) in &names.selectors {
        properties.insert((*name).into(), schema.clone());
    }
    properties.insert("spec".into(), schema::<BoostSpec>());
    properties.insert("status".into(), schema::<BoostStatus>());
    json!({
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": format!("{singular}s.{GROUP}")},
        "spec": {
            "group": GROUP,
            "scope": names.scope,
            "names": {
                "kind": names.kind,
                "listKind": format!("{}List", names.kind),
                "plural": format!("{singular}s"),
                "singular": singular,
                "shortNames": [names.short],
            },
            "versions": [{
                "name": VERSION,
                "served": true,
                "storage": true,
                "subresources": {"status": {}},
                "additionalPrinterColumns": columns(),
                "schema": {"openAPIV3Schema": {
                    "description": names.description,
                    "type": "object",
                    "required": ["spec"],
                    "properties": properties,
                    "x-kubernetes-validations": [{
                        "rule": "self.metadata.name.size() <= 63",
                        "message": "metadata.name must have at most 63 characters, because pods carry it as a label value",
                    }],
                }},
            }],
        },
    })
}

fn columns() -> Value {
    json!([
        {"name": "Active", "type": "string", "jsonPath": ".status.conditions[?(@.type==\"Active\")].status",
         "description": "Whether new pods are boosted"},
        {"name": "Boosted now", "type": "integer", "jsonPath": ".status.activeContainerBoosts",
         "description": "Containers that are boosted now"},
        {"name": "Boosted total", "type": "integer", "jsonPath": ".status.totalContainerBoosts",
         "description": "Containers boosted since the object was made"},
        {"name": "End", "type": "string", "jsonPath": ".status.end", "description": "When a boost ends"},
        {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
    ])
}

/// A `metav1.LabelSelector`, with the rules that the API server keeps for built-in kinds.
fn selector(description: &str) -> Value {
    json!({
        "description": description,
        "type": "object",
        "x-kubernetes-map-type": "atomic",
        "properties": {
            "matchLabels": {"type": "object", "additionalProperties": {"type": "string"}},
            "matchExpressions": {
                "type": "array",
                "maxItems": 100,
                "x-kubernetes-list-type": "atomic",
                "items": {
                    "type": "object",
                    "required": ["key", "operator"],
                    "properties": {
                        "key": {"type": "string", "minLength": 1},
                        "operator": {"type": "string", "enum": ["In", "NotIn", "Exists", "DoesNotExist"]},
                        "values": {"type": "array", "x-kubernetes-list-type": "atomic", "items": {"type": "string"}},
                    },
                    "x-kubernetes-validations": [{
                        "rule": "self.operator in ['In', 'NotIn'] ? (has(self.values) && size(self.values) > 0) : (!has(self.values) || size(self.values) == 0)",
                        "message": "values must be given with In and NotIn, and left out with Exists and DoesNotExist",
                        "fieldPath": ".values",
                    }],
                },
            },
        },
    })
}

/// The structural schema of a type: everything inlined, nothing that the API server would refuse or warn about.
fn schema<T: JsonSchema>() -> Value {
    let mut schema = SchemaSettings::openapi3()
        .with(|settings| {
            settings.inline_subschemas = true;
            settings.meta_schema = None;
        })
        .with_transform(kube::core::schema::StructuralSchemaRewriter)
        .with_transform(kube::core::schema::OptionalEnum)
        .into_generator()
        .into_root_schema_for::<T>()
        .to_value();
    tidy(&mut schema);
    schema
}

/// Drops what schemars adds and CRDs don't have: titles, Rust's integer formats beside `int32` and `int64`, defaults
/// (an absent field stays absent in the stored object), nulls.
fn tidy(value: &mut Value) {
    match value {
        Value::Object(map) => {
            map.retain(|key, value| {
                !matches!(key.as_str(), "title" | "default" | "nullable") || value.is_object()
            });
            for part in map.values_mut() {
                tidy(part);
            }
        }
        Value::Array(list) => list.iter_mut().for_each(tidy),
        _ => {}
    }
}
