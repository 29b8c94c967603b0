//! Boosts and pods of the scenarios, and what becomes of them.

use std::{
    process::Output,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use testbed::eventually;

use crate::{cgroup::CpuCgroup, cluster::Cluster, images::WORKLOAD};

/// Of the claim and of the record.
pub(crate) const KEY: &str = "autoscaling.x-k8s.io/startup-cpu-boost";
/// A pod's whole life here: images are there already, and probes ask every second.
pub(crate) const SOON: Duration = Duration::from_secs(60);
/// The account in the manifests.
pub(crate) const ACCOUNT: &str = "system:serviceaccount:headstart-system:headstart";

/// Makes a namespace, and waits until pods can be made in it.
pub(crate) async fn namespace(cluster: &Cluster, name: &str) -> Result<()> {
    cluster
        .plane
        .apply(
            &json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
                .to_string(),
        )
        .await?;
    eventually("the namespace has its account", SOON, || async {
        cluster
            .kubectl(&format!("get serviceaccount default -n {name}"))
            .await
    })
    .await?;
    Ok(())
}

/// A boost of the pods `app: NAME`, until they are Ready.
pub(crate) fn boost(namespace: &str, name: &str, policies: &Value) -> Value {
    json!({
        "apiVersion": "autoscaling.x-k8s.io/v1alpha1", "kind": "StartupCPUBoost",
        "metadata": {"name": name, "namespace": namespace},
        "selector": {"matchLabels": {"app": name}},
        "spec": {
            "resourcePolicy": {"containerPolicies": policies},
            "durationPolicy": {"podCondition": {"type": "Ready", "status": "True"}},
        },
    })
}

/// A container policy by percentage.
pub(crate) fn percent(container: &str, percent: u32) -> Value {
    json!({"matchContainers": {"type": "ExactName", "value": container}, "percentageIncrease": {"value": percent}})
}

/// Applies boosts, and waits until the leader says that it knows them; every replica has the same watch.
pub(crate) async fn apply_boosts(cluster: &Cluster, boosts: &[Value]) -> Result<()> {
    cluster
        .plane
        .apply(&json!({"apiVersion": "v1", "kind": "List", "items": boosts}).to_string())
        .await?;
    for boost in boosts {
        let (name, namespace) = (&boost["metadata"]["name"], &boost["metadata"]["namespace"]);
        let kind = if namespace.is_null() { "cscb" } else { "scb" };
        let place = namespace
            .as_str()
            .map(|namespace| format!("-n {namespace}"))
            .unwrap_or_default();
        let line = format!(
            "wait {kind}/{} {place} --for=condition=Active --timeout=30s",
            name.as_str().unwrap_or_default()
        );
        cluster.kubectl(&line).await?;
    }
    Ok(())
}

/// CPU of a container; `-` is none.
pub(crate) fn cpu(request: &str, limit: &str) -> Value {
    let mut resources = json!({});
    for (key, value) in [("requests", request), ("limits", limit)] {
        if value != "-" {
            resources[key] = json!({"cpu": value});
        }
    }
    resources
}

/// A container that is Ready once `/tmp/ready` is there, and that runs this before it sleeps.
pub(crate) fn container(name: &str, resources: &Value, script: &str) -> Value {
    json!({
        "name": name, "image": WORKLOAD, "resources": resources,
        "command": ["/bin/sh", "-c", format!("{script}\nsleep 1000000 & wait")],
        "readinessProbe": {"exec": {"command": ["/bin/test", "-e", "/tmp/ready"]}, "periodSeconds": 1},
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
    })
}

/// The pod of these containers, which the boost of that name matches. It ends at once when it is deleted.
pub(crate) fn pod(namespace: &str, name: &str, app: &str, containers: &[Value]) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "labels": {"app": app}},
        "spec": {
            "containers": containers, "terminationGracePeriodSeconds": 0, "automountServiceAccountToken": false,
            "volumes": [{"name": "tmp", "emptyDir": {}}],
        },
    })
}

/// A Deployment of such pods, which its labels select.
pub(crate) fn deployment(replicas: usize, labels: &Value, pod: &Value) -> Value {
    let (name, namespace) = (&pod["metadata"]["name"], &pod["metadata"]["namespace"]);
    json!({
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "replicas": replicas, "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": pod["metadata"]["labels"], "annotations": pod["metadata"]["annotations"]},
                "spec": pod["spec"],
            },
        },
    })
}

/// Creates a pod and returns it as it is stored.
pub(crate) async fn create(cluster: &Cluster, pod: &Value) -> Result<Value> {
    let namespace = pod["metadata"]["namespace"].as_str().unwrap_or_default();
    let path = testbed::rest::pods(namespace);
    cluster.rest().post(&path, pod).await?.accepted()
}

/// Creates a pod, and waits until it runs with the boost of its `app`.
pub(crate) async fn create_boosted(cluster: &Cluster, pod: &Value) -> Result<Value> {
    let created = create(cluster, pod).await?;
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let metadata = &created["metadata"];
    let (namespace, name) = (text(&metadata["namespace"]), text(&metadata["name"]));
    until_boosted(
        cluster,
        &namespace,
        &name,
        &text(&metadata["labels"]["app"]),
    )
    .await
}

/// Waits until the pod runs with the boost of that name.
pub(crate) async fn until_boosted(
    cluster: &Cluster,
    namespace: &str,
    name: &str,
    boost: &str,
) -> Result<Value> {
    let is = |pod: &Value| runs(pod) && claim(pod) == Some(boost);
    until(cluster, namespace, name, "runs boosted", is).await
}

/// The pod as it is.
pub(crate) async fn get(cluster: &Cluster, namespace: &str, name: &str) -> Result<Value> {
    cluster
        .rest()
        .get(&format!("{}/{name}", testbed::rest::pods(namespace)))
        .await?
        .accepted()
}

/// Waits until the pod is as wanted.
pub(crate) async fn until(
    cluster: &Cluster,
    namespace: &str,
    name: &str,
    what: &str,
    is: impl Fn(&Value) -> bool,
) -> Result<Value> {
    eventually(&format!("{name} {what}"), SOON, || async {
        let pod = get(cluster, namespace, name).await?;
        ensure!(is(&pod), "it is {}", brief(&pod));
        Ok(pod)
    })
    .await
}

fn brief(pod: &Value) -> String {
    let spec = pod["spec"]["containers"].as_array().into_iter().flatten();
    let resources: Vec<_> = spec
        .map(|container| container["resources"].to_string())
        .collect();
    format!(
        "{} {} {} {}",
        pod["metadata"]["labels"],
        pod["metadata"]["annotations"],
        resources.join(" "),
        pod["status"]
    )
}

/// Whether the pod's condition is True.
pub(crate) fn is(pod: &Value, condition: &str) -> bool {
    condition_of(pod, condition).is_some_and(|condition| condition["status"] == "True")
}

/// A condition of the pod.
pub(crate) fn condition_of<'a>(pod: &'a Value, kind: &str) -> Option<&'a Value> {
    pod["status"]["conditions"]
        .as_array()?
        .iter()
        .find(|condition| condition["type"] == kind)
}

/// Whether its container runs.
pub(crate) fn runs(pod: &Value) -> bool {
    let statuses = pod["status"]["containerStatuses"].as_array();
    statuses.is_some_and(|statuses| {
        statuses
            .iter()
            .all(|status| status["state"]["running"].is_object())
    })
}

/// The boost's name, while one is in force.
pub(crate) fn claim(pod: &Value) -> Option<&str> {
    pod["metadata"]["labels"][KEY].as_str()
}

/// The record, where it can be read.
pub(crate) fn record(pod: &Value) -> Value {
    let text = pod["metadata"]["annotations"][KEY]
        .as_str()
        .unwrap_or_default();
    serde_json::from_str(text).unwrap_or_default()
}

/// Request and limit of a container, as `250m/500m`.
pub(crate) fn size(pod: &Value, container: &str) -> String {
    let spec = &pod["spec"];
    let all = [&spec["containers"], &spec["initContainers"]]
        .into_iter()
        .filter_map(Value::as_array)
        .flatten();
    let resources = all
        .filter(|one| one["name"] == container)
        .map(|one| &one["resources"])
        .next();
    let value = |key: &str| {
        resources
            .and_then(|all| all[key]["cpu"].as_str())
            .unwrap_or("-")
    };
    format!("{}/{}", value("requests"), value("limits"))
}

/// Waits until the boost has ended and everything about it is done.
pub(crate) async fn until_finished(
    cluster: &Cluster,
    namespace: &str,
    name: &str,
) -> Result<Value> {
    let done = |pod: &Value| claim(pod).is_none() && record(pod)["state"] == "Reverted";
    until(cluster, namespace, name, "is finished", done).await
}

/// Runs a script in a container, whatever comes out.
pub(crate) async fn exec(
    cluster: &Cluster,
    namespace: &str,
    pod: &str,
    container: &str,
    script: &str,
) -> Result<Output> {
    let sh = ["--", "/bin/sh", "-c", script];
    let args = [&["exec", "-n", namespace, pod, "-c", container], &sh[..]].concat();
    cluster.plane.kubectl(&args).await
}

/// Lets a container of [`container`] be Ready.
pub(crate) async fn make_ready(
    cluster: &Cluster,
    namespace: &str,
    pod: &str,
    container: &str,
) -> Result<()> {
    let done = exec(cluster, namespace, pod, container, "touch /tmp/ready").await?;
    ensure!(
        done.status.success(),
        "{}",
        String::from_utf8_lossy(&done.stderr)
    );
    Ok(())
}

/// The CPU cgroup of a pod's container.
pub(crate) fn cgroup(cluster: &Cluster, pod: &Value, container: &str) -> Result<CpuCgroup> {
    let statuses = pod["status"]["containerStatuses"]
        .as_array()
        .into_iter()
        .flatten();
    let mut ids = statuses
        .filter(|status| status["name"] == container)
        .filter_map(|status| status["containerID"].as_str());
    let id = ids.next().context("the container does not run")?;
    let node = cluster
        .nodes
        .iter()
        .find(|node| pod["spec"]["nodeName"] == node.name.as_str());
    CpuCgroup::find(&node.context("it is on no real node")?.cgroup, id)
}

/// Waits until the kernel holds a container to this limit in milli-CPU, and says how long that took.
pub(crate) async fn until_limit(cgroup: &CpuCgroup, milli: u64) -> Result<Duration> {
    let began = Instant::now();
    loop {
        let limit = cgroup.limit()?;
        if limit == Some(milli) {
            return Ok(began.elapsed());
        }
        ensure!(
            began.elapsed() < SOON,
            "the cgroup has {limit:?} and not {milli}"
        );
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// A write to a pod by Headstart, as the audit log has it.
#[derive(Debug)]
pub(crate) struct Write {
    /// Whether it was a resize.
    pub(crate) is_resize: bool,
    /// What it sent.
    pub(crate) body: Value,
    /// What the API server answered.
    pub(crate) code: u64,
}

/// Headstart's writes to a pod without those that met a conflict: the kubelet writes the status at any instant, and each such
/// write may cost ours one, which changes nothing.
pub(crate) fn lasting_writes(cluster: &Cluster, namespace: &str, pod: &str) -> Result<Vec<Write>> {
    let mut writes = writes(cluster, namespace, pod)?;
    writes.retain(|write| write.code != 409);
    Ok(writes)
}

/// Headstart's writes to a pod, in order; dry runs are not among them.
pub(crate) fn writes(cluster: &Cluster, namespace: &str, pod: &str) -> Result<Vec<Write>> {
    let mut events = cluster.plane.audit_events()?;
    events.retain(|event| {
        let about = &event["objectRef"];
        let dry = event["requestURI"]
            .as_str()
            .is_some_and(|uri| uri.contains("dryRun"));
        event["user"]["username"] == ACCOUNT
            && about["resource"] == "pods"
            && about["namespace"] == namespace
            && about["name"] == pod
            && event["verb"] == "patch"
            && !dry
    });
    events.sort_by_key(|event| event["requestReceivedTimestamp"].to_string());
    let write = |event: &Value| Write {
        is_resize: event["objectRef"]["subresource"] == "resize",
        body: event["requestObject"].clone(),
        code: event["responseStatus"]["code"].as_u64().unwrap_or_default(),
    };
    Ok(events.iter().map(write).collect())
}

/// Removes a namespace with all that is in it.
pub(crate) async fn remove_namespace(cluster: &Cluster, name: &str) -> Result<()> {
    cluster
        .kubectl(&format!("delete namespace {name} --timeout=120s"))
        .await
        .map(drop)
}
