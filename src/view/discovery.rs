//! What there is to read, for clients that ask before they read. It is the same for everybody and says nothing of boosts, so
//! nobody is asked who they are: an API server that can't discover a group deletes no namespace.
//!
//! The aggregator asks for `APIGroupDiscoveryList` at `/apis`; older clients, and its probe, for the lists.

use serde_json::{Value, json};

use super::resource::{API_VERSION, GROUP, Resource, VERSION};

/// The media type of [`aggregated`].
pub(super) const AGGREGATED: &str =
    "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList";

const VERBS: [&str; 2] = ["get", "list"];

/// `/apis`, everything in one document.
pub(super) fn aggregated() -> Value {
    let resources = Resource::ALL.map(|resource| {
        json!({
            "resource": resource.plural(),
            "responseKind": {"group": GROUP, "version": VERSION, "kind": resource.kind()},
            "scope": if resource.is_namespaced() { "Namespaced" } else { "Cluster" },
            "singularResource": resource.singular(),
            "shortNames": [resource.short()],
            "verbs": VERBS,
        })
    });
    json!({
        "kind": "APIGroupDiscoveryList", "apiVersion": "apidiscovery.k8s.io/v2", "metadata": {},
        "items": [{
            "metadata": {"name": GROUP},
            "versions": [{"version": VERSION, "freshness": "Current", "resources": resources}],
        }],
    })
}

/// `/apis`
pub(super) fn groups() -> Value {
    json!({"kind": "APIGroupList", "apiVersion": "v1", "groups": [described()]})
}

/// `/apis/GROUP`
pub(super) fn group() -> Value {
    let mut group = described();
    (group["kind"], group["apiVersion"]) = ("APIGroup".into(), "v1".into());
    group
}

fn described() -> Value {
    let version = json!({"groupVersion": API_VERSION, "version": VERSION});
    json!({"name": GROUP, "versions": [version], "preferredVersion": version})
}

/// `/apis/GROUP/VERSION`
pub(super) fn version() -> Value {
    let resources = Resource::ALL.map(|resource| {
        json!({
            "name": resource.plural(),
            "singularName": resource.singular(),
            "namespaced": resource.is_namespaced(),
            "kind": resource.kind(),
            "shortNames": [resource.short()],
            "verbs": VERBS,
        })
    });
    json!({
        "kind": "APIResourceList", "apiVersion": "v1", "groupVersion": API_VERSION, "resources": resources,
    })
}
