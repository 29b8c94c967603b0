//! The main job, down to the kernel: a Deployment starts with more CPU, and its cgroups are back when it is Ready.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde_json::json;
use testbed::eventually;

use crate::{
    cluster::Cluster,
    objects::{
        SOON, apply_boosts, boost, cgroup, claim, container, cpu, deployment, get, is, make_ready,
        namespace, percent, pod, record, remove_namespace, runs, size, until_finished, until_limit,
    },
};

const NS: &str = "shop";
/// Replicas, one after the other made Ready.
const REPLICAS: usize = 10;

/// 20m/200m, tripled: all of them fit on the node together.
pub(crate) async fn start(cluster: &mut Cluster) -> Result<Vec<String>> {
    namespace(cluster, NS).await?;
    apply_boosts(cluster, &[boost(NS, "app", &json!([percent("app", 200)]))]).await?;
    let app = container("app", &cpu("20m", "200m"), "");
    let deployment = deployment(
        REPLICAS,
        &json!({"app": "app"}),
        &pod(NS, "app", "app", &[app]),
    );
    cluster.plane.apply(&deployment.to_string()).await?;
    let names = eventually("all replicas run", SOON, || async {
        let list = cluster
            .rest()
            .get(&testbed::rest::pods(NS))
            .await?
            .accepted()?;
        let pods = list["items"].as_array().context("a list has items")?;
        let running: Vec<_> = pods
            .iter()
            .filter(|pod| runs(pod))
            .filter_map(|pod| pod["metadata"]["name"].as_str())
            .collect();
        ensure!(running.len() == REPLICAS, "{} do", running.len());
        Ok(running.into_iter().map(str::to_owned).collect::<Vec<_>>())
    })
    .await?;
    let mut lags = Vec::new();
    for name in &names {
        lags.push(one(cluster, name).await?);
    }
    lags.sort();
    let (median, worst) = (lags[REPLICAS / 2], lags[REPLICAS - 1]);
    ensure!(
        median < Duration::from_secs(1),
        "from Ready until the cgroup is back: {lags:?}"
    );
    described(cluster, &names[0]).await?;
    remove_namespace(cluster, NS).await?;
    Ok(vec![format!(
        "{REPLICAS} pods, cgroup 600m at the start; from Ready until it is 200m: median {} ms, at most {} ms",
        median.as_millis(),
        worst.as_millis()
    )])
}

/// From when the pod is Ready, as a client sees it, until the kernel holds its container to the original limit.
async fn one(cluster: &Cluster, name: &str) -> Result<Duration> {
    let pod = get(cluster, NS, name).await?;
    ensure!(
        size(&pod, "app") == "60m/600m" && claim(&pod) == Some("app"),
        "it is not boosted: {pod}"
    );
    let cgroup = cgroup(cluster, &pod, "app")?;
    ensure!(
        cgroup.limit()? == Some(600),
        "its cgroup has {:?}",
        cgroup.limit()?
    );
    let shares = cgroup.shares()?;
    make_ready(cluster, NS, name, "app").await?;
    let ready = async {
        // The last look at which it was not Ready is the earliest that it can have become so.
        let mut looked = Instant::now();
        loop {
            let now = Instant::now();
            if is(&get(cluster, NS, name).await?, "Ready") {
                return anyhow::Ok(looked);
            }
            looked = now;
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    let back = async {
        until_limit(&cgroup, 200).await?;
        anyhow::Ok(Instant::now())
    };
    let (ready, back) = tokio::try_join!(ready, back)?;
    let pod = until_finished(cluster, NS, name).await?;
    ensure!(
        size(&pod, "app") == "20m/200m",
        "it has {}",
        size(&pod, "app")
    );
    ensure!(
        pod["status"]["containerStatuses"][0]["restartCount"] == 0,
        "it was restarted"
    );
    ensure!(
        cgroup.shares()? < shares,
        "its share of the CPU is still {shares}"
    );
    Ok(back.saturating_duration_since(ready))
}

/// What a person sees afterwards.
async fn described(cluster: &Cluster, name: &str) -> Result<()> {
    let pod = get(cluster, NS, name).await?;
    let record = record(&pod);
    let told = [
        ("state", json!("Reverted")),
        ("boost", json!("app")),
        ("initCPURequests", json!({"app": "20m"})),
        ("initCPULimits", json!({"app": "200m"})),
        ("boostedCPURequests", json!({"app": "60m"})),
        ("boostedCPULimits", json!({"app": "600m"})),
        ("endedBy", json!("Condition")),
    ];
    for (key, value) in told {
        ensure!(record[key] == value, "{key} is {} in {record}", record[key]);
    }
    ensure!(
        record["timestamp"].is_string() && record["endedTimestamp"].is_string(),
        "{record}"
    );
    let events = eventually("an Event tells of it", SOON, || async {
        let described = cluster
            .kubectl(&format!("describe pod -n {NS} {name}"))
            .await?;
        let event = described
            .lines()
            .find(|line| line.contains("headstart") && line.contains("Boost"));
        event.map(str::to_owned).with_context(|| described.clone())
    })
    .await?;
    ensure!(events.trim_start().starts_with("Normal"), "{events}");
    Ok(())
}
