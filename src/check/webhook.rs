//! The webhook: configured as it should be, and answering when the API server asks.

use std::collections::BTreeMap;

use k8s_openapi::api::{
    admissionregistration::v1::{MutatingWebhook, MutatingWebhookConfiguration, ServiceReference},
    core::v1::{Pod, Service},
};
use kube::{
    Api, Client,
    api::{ApiResource, DynamicObject, PostParams},
    core::ObjectMeta,
};
use serde_json::json;

use super::{CheckArgs, Finding, ask};
use crate::api::BOOST_KEY;

/// Our configuration, as the manifests call it.
pub(super) const CONFIGURATION: &str = "headstart";
const APPLY: &str = "kubectl apply -f manifests/webhook.yaml";

/// Marks that never count, because the boost that they tell of has ended. We take them off a pod, or put ours in their place;
/// so a pod that comes back with them was not shown to us.
const CLAIM: &str = "headstart-check";
const RECORD: &str =
    r#"{"state":"Reverted","initCPURequests":{"app":"1m"},"boost":"headstart-check"}"#;

pub(super) async fn check(client: &Client, args: &CheckArgs) -> Finding {
    let api = Api::<MutatingWebhookConfiguration>::all(client.clone());
    let what = "mutatingwebhookconfigurations.admissionregistration.k8s.io";
    let configuration = match ask("get", what, api.get_opt(CONFIGURATION)).await {
        Ok(Some(configuration)) => configuration,
        Ok(None) => {
            return Finding::failed(
                format!(
                    "there is no MutatingWebhookConfiguration {CONFIGURATION}: no pod is boosted"
                ),
                APPLY,
            );
        }
        Err(trouble) => return trouble,
    };
    let entries = configuration.webhooks.unwrap_or_default();
    let mut findings = vec![of_entries(&entries, &args.namespace)];
    for service in services(&entries, &args.namespace) {
        findings.extend(missing_service(client, service).await);
    }
    findings.push(probe(client, args).await);
    Finding::all(findings)
}

/// Whether cert-manager keeps the CA, and Headstart makes no certificates; what can't be asked is told by [`check`].
pub(super) async fn is_injected(client: &Client) -> bool {
    let api = Api::<MutatingWebhookConfiguration>::all(client.clone());
    let configuration = api.get_opt(CONFIGURATION).await.ok().flatten();
    let annotations = configuration.and_then(|configuration| configuration.metadata.annotations);
    let mut keys = annotations.iter().flat_map(BTreeMap::keys);
    keys.any(|key| key.starts_with("cert-manager.io/inject-"))
}

fn of_entries(entries: &[MutatingWebhook], namespace: &str) -> Finding {
    if entries.is_empty() {
        return Finding::failed(
            format!("the MutatingWebhookConfiguration {CONFIGURATION} has no webhook"),
            APPLY,
        );
    }
    let findings = entries.iter().flat_map(|entry| of_entry(entry, namespace));
    let findings: Vec<_> = findings.collect();
    if findings.is_empty() {
        Finding::ok(format!(
            "the MutatingWebhookConfiguration {CONFIGURATION} is in order"
        ))
    } else {
        Finding::all(findings)
    }
}

/// What is wrong with a webhook.
fn of_entry(entry: &MutatingWebhook, namespace: &str) -> Vec<Finding> {
    let mut findings = Vec::new();
    let (name, config) = (&entry.name, &entry.client_config);
    if entry.failure_policy.as_deref() != Some("Ignore") {
        findings.push(Finding::failed(
            format!("{name} has not the failurePolicy Ignore: while nobody answers, no pod can be created"),
            APPLY,
        ));
    }
    if config.ca_bundle.as_ref().is_none_or(|ca| ca.0.is_empty()) {
        findings.push(Finding::failed(
            format!("{name} has no caBundle: the API server can't trust whoever answers"),
            format!(
                "any replica that runs writes it within seconds: kubectl -n {namespace} logs -l app.kubernetes.io/name=headstart says what keeps them from it"
            ),
        ));
    }
    match (&config.service, &config.url) {
        (Some(service), _) if service.namespace != namespace => findings.push(Finding::failed(
            format!(
                "{name} calls the Service {}/{}, which is not in {namespace}",
                service.namespace, service.name
            ),
            format!("{APPLY}; where Headstart is in another namespace, give --namespace"),
        )),
        (None, None) => findings.push(Finding::failed(
            format!("{name} calls neither a Service nor a URL"),
            APPLY,
        )),
        _ => {}
    }
    findings
}

/// The Services in our namespace that are called.
fn services<'a>(
    entries: &'a [MutatingWebhook],
    namespace: &'a str,
) -> impl Iterator<Item = &'a ServiceReference> {
    let services = entries
        .iter()
        .filter_map(|entry| entry.client_config.service.as_ref());
    services.filter(move |service| service.namespace == namespace)
}

async fn missing_service(client: &Client, service: &ServiceReference) -> Option<Finding> {
    let (namespace, name) = (&service.namespace, &service.name);
    let api = Api::<Service>::namespaced(client.clone(), namespace);
    let what = format!("services in {namespace}");
    match ask("get", &what, api.get_metadata_opt(name)).await {
        Ok(Some(_)) => None,
        Ok(None) => Some(Finding::failed(
            format!("there is no Service {namespace}/{name}"),
            "kubectl apply -f manifests/service.yaml",
        )),
        Err(trouble) => Some(trouble),
    }
}

/// Has the API server ask about a pod that will not be created.
async fn probe(client: &Client, args: &CheckArgs) -> Finding {
    let namespace = &args.probe_namespace;
    // Without its type, which would bring all of a pod into the binary.
    let resource = ApiResource::erase::<Pod>(&());
    let api = Api::<DynamicObject>::namespaced_with(client.clone(), namespace, &resource);
    let dry_run = PostParams {
        dry_run: true,
        ..PostParams::default()
    };
    let what = format!("pods in {namespace}");
    match ask("create", &what, api.create(&dry_run, &pod())).await {
        Ok(pod) if is_answered(&pod.metadata) => {
            Finding::ok(format!("it answers about a pod in {namespace} (dry run)"))
        }
        Ok(_) => nobody_answers(namespace, "pods are created unboosted"),
        // It refuses the pod for us where the failurePolicy is not Ignore.
        Err(trouble) if trouble.detail.contains("failed calling webhook") => {
            nobody_answers(namespace, &trouble.detail)
        }
        Err(trouble) if trouble.detail.starts_with("you may not") => trouble,
        Err(trouble) => Finding::failed(
            format!("the API server can't be made to ask: {}", trouble.detail),
            "give a namespace that takes a small pod: --probe-namespace",
        ),
    }
}

fn nobody_answers(namespace: &str, so: &str) -> Finding {
    Finding::failed(
        format!("nobody answers the API server about a pod in {namespace} (dry run): {so}"),
        format!(
            "are replicas Ready? may the control plane reach their port 9443 (NetworkPolicy, firewall)? is the caBundle ours? does the webhook's namespaceSelector leave {namespace} out (--probe-namespace)? The API server's log says why a call failed"
        ),
    )
}

/// Small, and allowed under Pod Security `restricted`.
fn pod() -> DynamicObject {
    let amounts = json!({"cpu": "10m", "memory": "16Mi"});
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {
            "generateName": "headstart-check-",
            "labels": {BOOST_KEY: CLAIM},
            "annotations": {BOOST_KEY: RECORD},
        },
        "spec": {
            "automountServiceAccountToken": false,
            "securityContext": {"runAsNonRoot": true, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [{
                "name": "app",
                "image": "headstart-check",
                "resources": {"requests": amounts, "limits": amounts},
                "securityContext": {"allowPrivilegeEscalation": false, "readOnlyRootFilesystem": true, "capabilities": {"drop": ["ALL"]}},
            }],
        },
    });
    serde_json::from_value(pod).expect("it is a pod")
}

/// Whether somebody has taken the marks off, or put others in their place.
fn is_answered(metadata: &ObjectMeta) -> bool {
    let annotation = metadata
        .annotations
        .as_ref()
        .and_then(|map| map.get(BOOST_KEY));
    let label = metadata.labels.as_ref().and_then(|map| map.get(BOOST_KEY));
    annotation.is_none_or(|record| record != RECORD) && label.is_none_or(|claim| claim != CLAIM)
}

#[cfg(test)]
mod tests {
    use chrono::DateTime;
    use serde_json::Value;

    use super::{super::Outcome, *};
    use crate::domain::{
        admission::{Settings, admit},
        patch,
        snapshot::Snapshot,
    };

    fn entry(change: impl Fn(&mut Value)) -> Vec<MutatingWebhook> {
        let mut entry = json!({
            "name": "pods.headstart", "admissionReviewVersions": ["v1"], "sideEffects": "None", "failurePolicy": "Ignore",
            "clientConfig": {"caBundle": "Q0E=", "service": {"namespace": "ns", "name": "headstart"}},
        });
        change(&mut entry);
        vec![serde_json::from_value(entry).expect("a webhook")]
    }

    #[test]
    fn a_configuration_must_be_ours_trusted_and_harmless() {
        let outcome = |change: fn(&mut Value)| of_entries(&entry(change), "ns").outcome;
        assert_eq!(outcome(|_| {}), Outcome::Ok);
        let by_url = |entry: &mut Value| {
            entry["clientConfig"] = json!({"caBundle": "Q0E=", "url": "https://h/p"});
        };
        assert_eq!(outcome(by_url), Outcome::Ok);
        assert_eq!(
            outcome(|entry| entry["failurePolicy"] = "Fail".into()),
            Outcome::Failed
        );
        assert_eq!(
            outcome(|entry| entry["clientConfig"]["caBundle"] = Value::Null),
            Outcome::Failed
        );
        assert_eq!(
            outcome(|entry| entry["clientConfig"]["service"]["namespace"] = "other".into()),
            Outcome::Failed
        );
        assert_eq!(of_entries(&[], "ns").outcome, Outcome::Failed);
    }

    #[test]
    fn our_answer_takes_the_marks_off() {
        let mut object = serde_json::to_value(pod()).expect("JSON");
        let read = serde_json::from_value(object.clone()).expect("a pod");
        let admission = admit(
            &Snapshot::default(),
            Settings::default(),
            "ns",
            &read,
            DateTime::default(),
        );
        json_patch::patch(&mut object, &patch::admission(&read, &admission)).expect("it applies");
        let answered: Pod = serde_json::from_value(object).expect("a pod");
        assert!(is_answered(&answered.metadata));
        assert!(!is_answered(&pod().metadata));
        let of = |text: &str| Some(BTreeMap::from([(BOOST_KEY.to_owned(), text.to_owned())]));
        let boosted = ObjectMeta {
            labels: of("java"),
            annotations: of("{}"),
            ..ObjectMeta::default()
        };
        assert!(is_answered(&boosted));
    }
}
