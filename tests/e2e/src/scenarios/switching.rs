//! From google/kube-startup-cpu-boost and back, in the order of `docs/switching.md`.
//!
//! Its program is not here: objects with the names of its install stand for it, and pods with records as it writes them for the
//! work that it leaves behind.

use anyhow::{Result, ensure};
use serde_json::{Value, json};
use testbed::{cluster::manifests, eventually};

use crate::{
    cluster::Cluster,
    images::WORKLOAD,
    objects::{
        KEY, SOON, apply_boosts, boost, cgroup, container, cpu, create, create_boosted, get,
        make_ready, namespace, percent, pod, record, remove_namespace, runs, size, until,
        until_finished, until_limit,
    },
    scenarios::install::{apply, end_all, headstart, replicas, rolled_out},
};

const NS: &str = "moving";
const UPSTREAM: &str = "kube-startup-cpu-boost-system";
const LEFT: [(&str, &str); 3] = [
    (
        "mutatingwebhookconfiguration",
        "kube-startup-cpu-boost-mutating-webhook-configuration",
    ),
    (
        "validatingwebhookconfiguration",
        "kube-startup-cpu-boost-validating-webhook-configuration",
    ),
    ("deployment", "kube-startup-cpu-boost-controller-manager"),
];

pub(crate) async fn switching(cluster: &mut Cluster) -> Result<Vec<String>> {
    fit(cluster, true, &[]).await?;
    // Headstart goes, as if it had never been; the CRD stays, as upstream's would be there.
    cluster
        .kubectl("delete mutatingwebhookconfiguration headstart")
        .await?;
    cluster
        .kubectl("delete deployment -n headstart-system headstart --timeout=90s")
        .await?;
    namespace(cluster, NS).await?;
    cluster
        .plane
        .apply(&boost(NS, "app", &json!([percent("app", 50)])).to_string())
        .await?;
    install_upstream(cluster).await?;
    let versions = [("v020", ""), ("v021", r#""state":"Active","#)];
    for (name, state) in versions {
        left_by_upstream(cluster, name, state).await?;
    }

    // Ours beside it: told, and refused as fit.
    apply(cluster, &manifests()).await?;
    rolled_out(cluster).await?;
    let names: Vec<&str> = LEFT.iter().map(|(_, name)| *name).collect();
    fit(cluster, false, &names).await?;
    told_by_run(cluster).await?;
    let another = boost(NS, "another", &json!([percent("app", 50)])).to_string();
    let refused = cluster.plane.apply(&another).await;
    ensure!(
        refused.is_err(),
        "upstream's validating webhook let a boost pass"
    );

    // The documented order.
    for (kind, name) in LEFT {
        let place = if kind == "deployment" {
            format!("-n {UPSTREAM}")
        } else {
            String::new()
        };
        cluster
            .kubectl(&format!("delete {kind} {name} {place}"))
            .await?;
    }
    apply(cluster, &manifests()).await?;
    rolled_out(cluster).await?;
    fit(cluster, true, &[]).await?;
    cluster.plane.apply(&another).await?;
    for (name, _) in versions {
        let cgroup = cgroup(cluster, &get(cluster, NS, name).await?, "app")?;
        make_ready(cluster, NS, name, "app").await?;
        until_limit(&cgroup, 50).await?;
        let pod = until_finished(cluster, NS, name).await?;
        ensure!(
            size(&pod, "app") == "25m/50m",
            "{name} has {}",
            size(&pod, "app")
        );
        ensure!(
            record(&pod)["timestamp"] == "2026-07-29T10:00:00.123456789Z",
            "{}",
            record(&pod)
        );
    }

    back(cluster).await?;
    cluster
        .kubectl(&format!("delete namespace {UPSTREAM}"))
        .await?;
    remove_namespace(cluster, NS).await?;
    Ok(vec![
        "`headstart check` names each of upstream's three leftovers, and is content without them"
            .to_owned(),
        "pods mid-boost by 0.20 and 0.21 get their CPU back, in the cgroup too".to_owned(),
        "on the way back no boost is in force".to_owned(),
    ])
}

/// Objects by its names. Its webhooks lead nowhere, as they do without its pods: one fails open, the other closed.
async fn install_upstream(cluster: &Cluster) -> Result<()> {
    namespace(cluster, UPSTREAM).await?;
    let webhook = |entry: &str, path: &str, failure: &str, group: &str, resources: Value| {
        json!({
            "name": entry, "admissionReviewVersions": ["v1"], "sideEffects": "None", "failurePolicy": failure, "timeoutSeconds": 2,
            "clientConfig": {"service": {"name": "kube-startup-cpu-boost-webhook-service", "namespace": UPSTREAM, "path": path}},
            "rules": [{"operations": ["CREATE"], "apiGroups": [group], "apiVersions": ["*"], "resources": resources}],
        })
    };
    let selector = json!({"matchLabels": {"control-plane": "controller-manager"}});
    let container = json!({"name": "manager", "image": WORKLOAD});
    let list = json!({"apiVersion": "v1", "kind": "List", "items": [
        {
            "apiVersion": "admissionregistration.k8s.io/v1", "kind": "MutatingWebhookConfiguration", "metadata": {"name": LEFT[0].1},
            "webhooks": [webhook("cpuboost.autoscaling.x-k8s.io", "/mutate-v1-pod", "Ignore", "", json!(["pods"]))],
        },
        {
            "apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingWebhookConfiguration", "metadata": {"name": LEFT[1].1},
            "webhooks": [webhook("vstartupcpuboost.autoscaling.x-k8s.io", "/validate", "Fail", "autoscaling.x-k8s.io", json!(["startupcpuboosts"]))],
        },
        {
            "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": LEFT[2].1, "namespace": UPSTREAM},
            "spec": {
                "replicas": 1, "selector": selector,
                "template": {"metadata": {"labels": selector["matchLabels"]}, "spec": {"containers": [container], "terminationGracePeriodSeconds": 0}},
            },
        },
    ]});
    cluster.plane.apply(&list.to_string()).await.map(drop)
}

/// A running pod, boosted by upstream: 25m/50m, now 40m/80m.
async fn left_by_upstream(cluster: &Cluster, name: &str, state: &str) -> Result<()> {
    let record = format!(
        r#"{{{state}"timestamp":"2026-07-29T10:00:00.123456789Z","initCPURequests":{{"app":"25m"}},"initCPULimits":{{"app":"50m"}}}}"#
    );
    let mut boosted = pod(NS, name, "app", &[container("app", &cpu("40m", "80m"), "")]);
    boosted["metadata"]["labels"][KEY] = "app".into();
    boosted["metadata"]["annotations"] = json!({KEY: record});
    create(cluster, &boosted).await?;
    until(cluster, NS, name, "runs", runs).await.map(drop)
}

/// What `headstart check` says.
async fn fit(cluster: &Cluster, fit: bool, names: &[&str]) -> Result<()> {
    eventually("headstart check says so", SOON, || async {
        let output = headstart(cluster, &["check"]).await?;
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        ensure!(
            output.status.success() == fit,
            "exit code {:?}:\n{said}",
            output.status.code()
        );
        for name in names {
            ensure!(said.contains(name), "{name} is not named:\n{said}");
        }
        Ok(())
    })
    .await
}

/// What the replicas say by themselves.
async fn told_by_run(cluster: &Cluster) -> Result<()> {
    eventually("a replica's log and metric tell of it", SOON, || async {
        let logs = cluster
            .kubectl("logs -n headstart-system -l app.kubernetes.io/name=headstart --tail=200")
            .await?;
        ensure!(LEFT.iter().all(|(_, name)| logs.contains(name)), "{logs}");
        let pods = replicas(cluster).await?;
        let pod = pods[0]["metadata"]["name"].as_str().unwrap_or_default();
        let path =
            format!("get --raw /api/v1/namespaces/headstart-system/pods/{pod}:8080/proxy/metrics");
        let metrics = cluster.kubectl(&path).await?;
        let series = metrics
            .lines()
            .filter(|line| line.starts_with("headstart_upstream_leftovers{"));
        let values: Vec<_> = series
            .map(|line| line.rsplit(' ').next().unwrap_or_default())
            .collect();
        ensure!(values == ["1"; 3], "{values:?}");
        Ok(())
    })
    .await
}

/// Before upstream comes again: stop, end all, remove. Upstream 0.20 and 0.21 would read what is in force too (case F11).
async fn back(cluster: &Cluster) -> Result<()> {
    apply_boosts(cluster, &[boost(NS, "app", &json!([percent("app", 50)]))]).await?;
    let app = container("app", &cpu("25m", "50m"), "");
    create_boosted(cluster, &pod(NS, "back", "app", &[app])).await?;
    end_all(cluster).await?;
    ensure!(
        record(&get(cluster, NS, "back").await?)["endedBy"] == "Manual",
        "it ended otherwise"
    );
    apply(cluster, &manifests()).await?;
    rolled_out(cluster).await
}
