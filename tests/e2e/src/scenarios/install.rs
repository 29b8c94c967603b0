//! `kubectl apply -k manifests`: for the first time, over an earlier version and back, and away again.

use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use testbed::{
    cluster::{SYSTEM_NAMESPACE, manifests},
    eventually,
};

use crate::{
    cluster::Cluster,
    images,
    load::Load,
    objects::{
        KEY, SOON, apply_boosts, boost, container, cpu, create_boosted, namespace, percent, pod,
        remove_namespace,
    },
};

/// Nothing is added: the image is on the node, the manifests name it.
pub(crate) async fn install(cluster: &mut Cluster) -> Result<Vec<String>> {
    let began = Instant::now();
    apply(cluster, &manifests()).await?;
    rolled_out(cluster).await?;
    let took = began.elapsed();
    let pods = replicas(cluster).await?;
    ensure!(pods.len() == 3, "there are {} pods", pods.len());
    for pod in &pods {
        let status = &pod["status"]["containerStatuses"][0];
        ensure!(
            status["restartCount"] == 0,
            "a replica has been restarted: {status}"
        );
        ensure!(
            pod["spec"]["containers"][0]["image"] == "headstart:0.1.0",
            "{}",
            pod["spec"]
        );
    }
    webhook_is_trusted(cluster).await?;
    Ok(vec![format!(
        "apply to three Ready replicas: {:.1} s",
        took.as_secs_f32()
    )])
}

/// The manifests before these, with their image, then these, then those again, while pods are made; none is lost.
pub(crate) async fn upgrade(cluster: &mut Cluster) -> Result<Vec<String>> {
    let previous = previous();
    apply(cluster, &previous).await?;
    rolled_out(cluster).await?;
    let load = Load::start(cluster, 100).await?;
    apply(cluster, &manifests()).await?;
    rolled_out(cluster).await?;
    apply(cluster, &previous).await?;
    rolled_out(cluster).await?;
    let seen = load.end(cluster).await?;
    seen.nothing_is_lost()?;
    apply(cluster, &manifests()).await?;
    rolled_out(cluster).await?;
    Ok(vec![format!("upgrade and rollback: {seen}")])
}

/// In the documented order, with a boost in force.
pub(crate) async fn uninstall(cluster: &mut Cluster) -> Result<Vec<String>> {
    namespace(cluster, "leaving").await?;
    apply_boosts(
        cluster,
        &[boost("leaving", "app", &json!([percent("app", 100)]))],
    )
    .await?;
    let app = container("app", &cpu("50m", "100m"), "");
    create_boosted(cluster, &pod("leaving", "boosted", "app", &[app])).await?;
    end_all(cluster).await?;
    cluster
        .kubectl(&format!(
            "delete -k {} --ignore-not-found --timeout=120s",
            manifests().display()
        ))
        .await?;
    let left = cluster
        .kubectl("get crd,clusterrole,clusterrolebinding,validatingadmissionpolicy,validatingadmissionpolicybinding,mutatingwebhookconfiguration -o name")
        .await?;
    let ours: Vec<_> = left
        .lines()
        .filter(|line| line.contains("headstart") || line.contains("startupcpuboost"))
        .collect();
    ensure!(ours.is_empty(), "left behind: {ours:?}");
    remove_namespace(cluster, "leaving").await?;
    Ok(vec![
        "nothing is left behind; the boosted pod got its CPU back first".to_owned(),
    ])
}

/// Stops new boosts, and ends those in force.
pub(crate) async fn end_all(cluster: &Cluster) -> Result<()> {
    cluster
        .kubectl("delete mutatingwebhookconfiguration headstart")
        .await?;
    let output = headstart(cluster, &["revert", "--all"]).await?;
    ensure!(
        output.status.success(),
        "revert --all: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    let left = cluster
        .kubectl(&format!("get pods -A -l {KEY} -o name"))
        .await?;
    ensure!(left.trim().is_empty(), "still boosted: {left}");
    Ok(())
}

/// Applies a kustomization.
pub(crate) async fn apply(cluster: &Cluster, kustomization: &std::path::Path) -> Result<()> {
    cluster
        .kubectl(&format!("apply -k {}", kustomization.display()))
        .await
        .map(drop)
}

/// Waits until all new replicas are Ready; old ones may still be on their way out.
pub(crate) async fn rolled_out(cluster: &Cluster) -> Result<()> {
    cluster
        .kubectl("rollout status -n headstart-system deployment/headstart --timeout=180s")
        .await?;
    Ok(())
}

/// Waits until the old replicas have gone too: for some seconds they go on answering as they were told.
pub(crate) async fn settled(cluster: &Cluster) -> Result<()> {
    rolled_out(cluster).await?;
    eventually("no old replica is left", SOON, || async {
        let pods = pods(cluster).await?.len();
        ensure!(pods == replicas(cluster).await?.len(), "{pods} pods");
        Ok(())
    })
    .await
}

/// The operator's pods that are not about to go.
pub(crate) async fn replicas(cluster: &Cluster) -> Result<Vec<Value>> {
    let mut pods = pods(cluster).await?;
    pods.retain(|pod| pod["metadata"]["deletionTimestamp"].is_null());
    Ok(pods)
}

/// All of the operator's pods.
async fn pods(cluster: &Cluster) -> Result<Vec<Value>> {
    let path = testbed::rest::pods(SYSTEM_NAMESPACE);
    let list = cluster.rest().get(&path).await?.accepted()?;
    Ok(list["items"].as_array().cloned().unwrap_or_default())
}

/// A webhook without the right CA fails open: pods would go unboosted, and nobody would be told.
async fn webhook_is_trusted(cluster: &Cluster) -> Result<()> {
    let path = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/headstart";
    eventually("the webhook has a CA", SOON, || async {
        let webhook = cluster.rest().get(path).await?.accepted()?;
        let ca = webhook["webhooks"][0]["clientConfig"]["caBundle"].as_str();
        ensure!(ca.is_some_and(|ca| !ca.is_empty()), "{webhook}");
        Ok(())
    })
    .await
}

/// The manifests of the version before, as they were.
fn previous() -> PathBuf {
    images::root().join("tests/e2e/previous")
}

/// Runs the program as an administrator does, outside of the cluster.
pub(crate) async fn headstart(cluster: &Cluster, args: &[&str]) -> Result<std::process::Output> {
    let target = format!("{}-unknown-linux-musl", std::env::consts::ARCH);
    let program = images::root()
        .join("target")
        .join(target)
        .join("release/headstart");
    let run = tokio::process::Command::new(&program)
        .args(args)
        .env("KUBECONFIG", cluster.plane.admin_kubeconfig())
        .output();
    let output = tokio::time::timeout(Duration::from_secs(120), run)
        .await
        .context("headstart did not end")?;
    output.with_context(|| format!("running {}", program.display()))
}
