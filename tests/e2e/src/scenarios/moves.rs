//! The operator's pods move while pods are made at a rate: rolling restarts, drains, one replica, one node.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use testbed::eventually;

use crate::{
    cluster::Cluster,
    load::Load,
    objects::SOON,
    scenarios::install::{replicas, rolled_out},
};

/// Three rolling restarts one after the other, through the real Service.
pub(crate) async fn restarts(cluster: &mut Cluster) -> Result<Vec<String>> {
    let load = Load::start(cluster, 120).await?;
    let mut took = Vec::new();
    for _ in 0..3 {
        let began = Instant::now();
        cluster
            .kubectl("rollout restart -n headstart-system deployment/headstart")
            .await?;
        rolled_out(cluster).await?;
        took.push(format!("{:.0} s", began.elapsed().as_secs_f32()));
    }
    let seen = load.end(cluster).await?;
    seen.nothing_is_lost()?;
    ensure!(seen.lag_p99() <= Duration::from_secs(2), "{seen}");
    Ok(vec![format!(
        "three restarts ({}): {seen}",
        took.join(", ")
    )])
}

/// A node is drained with three replicas and with one; then there is but one node, and a rollout ends all the same.
pub(crate) async fn drain(cluster: &mut Cluster) -> Result<Vec<String>> {
    if cluster.nodes.len() == 1 {
        cluster.add_node().await?;
    }
    let mut lines = Vec::new();

    let load = Load::start(cluster, 45).await?;
    let took = drain_node(cluster, "node-1").await?;
    rolled_out(cluster).await?;
    let seen = load.end(cluster).await?;
    seen.nothing_is_lost()?;
    lines.push(format!("three replicas, drained in {took} s: {seen}"));
    cluster.kubectl("uncordon node-1").await?;

    cluster
        .kubectl("scale -n headstart-system deployment/headstart --replicas=1")
        .await?;
    eventually("one replica is left", SOON, || async {
        let pods = replicas(cluster).await?;
        ensure!(pods.len() == 1, "{} are", pods.len());
        Ok(())
    })
    .await?;
    // Whoever led before may still be on its way out.
    cluster
        .kubectl("wait pod -n headstart-system --all --for=condition=Ready --timeout=90s")
        .await?;
    let load = Load::start(cluster, 45).await?;
    let node = replicas(cluster).await?[0]["spec"]["nodeName"]
        .as_str()
        .unwrap_or_default()
        .to_owned();
    let took = drain_node(cluster, &node).await?;
    rolled_out(cluster).await?;
    let seen = load.end(cluster).await?;
    // The disruption budget lets the only replica go, or the drain would never end: pods may start unboosted until the next is Ready.
    seen.nothing_is_refused()?;
    lines.push(format!("one replica, drained in {took} s: {seen}"));
    cluster.kubectl(&format!("uncordon {node}")).await?;
    cluster
        .kubectl("scale -n headstart-system deployment/headstart --replicas=3")
        .await?;
    rolled_out(cluster).await?;

    cluster.kubectl("cordon node-2").await?;
    let load = Load::start(cluster, 45).await?;
    let began = Instant::now();
    cluster
        .kubectl("rollout restart -n headstart-system deployment/headstart")
        .await?;
    rolled_out(cluster).await?;
    let took = began.elapsed().as_secs();
    let seen = load.end(cluster).await?;
    seen.nothing_is_lost()?;
    lines.push(format!("one node, restarted in {took} s: {seen}"));
    cluster.kubectl("uncordon node-2").await?;
    Ok(lines)
}

/// Drains a node, and looks all the while that the budget is kept. Says how many seconds it took.
async fn drain_node(cluster: &Cluster, node: &str) -> Result<u64> {
    let began = Instant::now();
    let line =
        format!("drain {node} --ignore-daemonsets --delete-emptydir-data --force --timeout=180s");
    let drained = cluster.kubectl(&line);
    let watched = async {
        let wanted = cluster
            .kubectl("get deployment -n headstart-system headstart -o jsonpath={.spec.replicas}")
            .await?;
        let wanted: usize = wanted.trim().parse()?;
        let broken: anyhow::Error = loop {
            let pods = replicas(cluster).await?;
            let ready = pods
                .iter()
                .filter(|pod| crate::objects::is(pod, "Ready"))
                .count();
            if ready + 1 < wanted {
                break anyhow::anyhow!("only {ready} of {wanted} replicas are Ready");
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        };
        Err::<std::convert::Infallible, _>(broken)
    };
    tokio::select! {
        drained = drained => drained.map(|_| began.elapsed().as_secs()),
        Err(error) = watched => Err(error),
    }
}
