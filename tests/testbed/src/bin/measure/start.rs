//! `cargo measure start`: how soon a replica is Ready, and what it needs when it is idle.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use futures::{StreamExt, TryStreamExt, stream};
use serde_json::{Value, json};
use testbed::{Behaviour, Cluster, ControlPlane, Operator, release};
use tokio::time::sleep;

const NAMESPACES: u32 = 200;
const BOOSTS: u32 = 1_000;
const STARTS: usize = 5;
/// After it a replica has done what it does at the start.
const IDLE: Duration = Duration::from_secs(10);
const READY: Duration = Duration::from_secs(30);

/// Starts replicas one after another beside 1,000 boosts.
pub(crate) async fn start() -> Result<()> {
    let binary = release::static_binary().await?;
    println!("| figure | min | median | max |\n|---|---|---|---|");
    for (matcher, named) in [("ExactName", "exact names"), ("RegexName", "a regex each")] {
        let mut cluster = Cluster::start(&binary, 1, Behaviour::default()).await?;
        fill(&cluster, matcher).await?;
        let mut ready = Vec::new();
        let mut memory = Vec::new();
        for _ in 0..STARTS {
            let began = Instant::now();
            let replica = cluster.add_replica(&["--shutdown-delay=0"]).await?;
            wait_ready(replica).await?;
            ready.push(began.elapsed().as_secs_f64() * 1000.0);
            let name = replica.name().to_owned();
            sleep(IDLE).await;
            let replica = cluster.take_replica(&name)?;
            memory.push(replica.process().resident()? / 1024.0);
            replica.stop(READY).await?;
        }
        row(&format!("from start to Ready, ms ({named})"), &mut ready);
        row(
            &format!("resident memory when idle, MiB ({named})"),
            &mut memory,
        );
    }
    let size = std::fs::metadata(&binary)
        .context("reading the binary's size")?
        .len();
    println!("\n{BOOSTS} boosts in {NAMESPACES} namespaces, {STARTS} starts, no boosted pods.");
    println!(
        "The binary: {:.1} MiB, static.",
        f64::from(u32::try_from(size)?) / 1024.0 / 1024.0
    );
    Ok(())
}

fn row(name: &str, values: &mut [f64]) {
    values.sort_by(f64::total_cmp);
    let (least, most) = (
        values.first().copied().unwrap_or(f64::NAN),
        values.last().copied().unwrap_or(f64::NAN),
    );
    println!(
        "| {name} | {least:.1} | {:.1} | {most:.1} |",
        values[values.len() / 2]
    );
}

/// Asks without a pause: what is measured is a fraction of a second.
pub(crate) async fn wait_ready(replica: &Operator) -> Result<()> {
    let began = Instant::now();
    while replica.get("/readyz").await.is_err() {
        ensure!(
            began.elapsed() < READY,
            "{} is not Ready:\n{}",
            replica.name(),
            replica.process().last_log_lines(20)
        );
        sleep(Duration::from_millis(2)).await;
    }
    Ok(())
}

/// Makes 1,000 boosts in 200 namespaces; the one of number N, in `team-(N mod 200)`, is for the pods with `app: app-N`.
pub(crate) async fn fill(cluster: &Cluster, matcher: &str) -> Result<()> {
    let boosts = (0..BOOSTS).map(|index| boost(index, index % NAMESPACES, matcher));
    apply(&cluster.plane, (0..NAMESPACES).map(namespace).collect()).await?;
    apply(&cluster.plane, boosts.collect()).await
}

/// Applies objects, some hundred at a time.
pub(crate) async fn apply(plane: &ControlPlane, objects: Vec<Value>) -> Result<()> {
    let lists: Vec<String> = objects
        .chunks(250)
        .map(|items| json!({"apiVersion": "v1", "kind": "List", "items": items}).to_string())
        .collect();
    stream::iter(lists)
        .map(|list| async move { plane.apply(&list).await })
        .buffer_unordered(2)
        .try_for_each(|_| async { Ok(()) })
        .await
}

/// Name of the namespace of that number.
pub(crate) fn team(index: u32) -> String {
    format!("team-{index}")
}

/// The namespace of that number.
pub(crate) fn namespace(index: u32) -> Value {
    json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": team(index)}})
}

/// The boost of that number, in the namespace of that number.
pub(crate) fn boost(index: u32, namespace: u32, matcher: &str) -> Value {
    let name = match matcher {
        "RegexName" => format!("^app-{index}$"),
        _ => format!("app-{index}"),
    };
    json!({
        "apiVersion": "autoscaling.x-k8s.io/v1alpha1",
        "kind": "StartupCPUBoost",
        "metadata": {"name": format!("boost-{index}"), "namespace": team(namespace)},
        "selector": {"matchLabels": {"app": format!("app-{index}")}},
        "spec": {
            "resourcePolicy": {"containerPolicies": [
                {"matchContainers": {"type": matcher, "value": name}, "percentageIncrease": {"value": 100}},
                {"matchContainers": {"type": "ExactName", "value": "proxy"}, "fixedResources": {"requests": "1", "limits": "2"}},
            ]},
            "durationPolicy": {"podCondition": {"type": "Ready", "status": "True"}},
        },
    })
}
