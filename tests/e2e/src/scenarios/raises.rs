//! Boosts of pods that run already, down to the kernel: a container that restarts, and a pod that was created while nobody
//! answered.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use serde_json::{Value, json};
use testbed::eventually;

use crate::{
    cluster::Cluster,
    images,
    objects::{
        SOON, apply_boosts, boost, cgroup, claim, container, cpu, create, create_boosted, exec,
        get, make_ready, namespace, percent, pod, record, remove_namespace, runs, size, until,
        until_limit,
    },
    scenarios::install::{apply, install, settled},
};

const NS: &str = "again";
const POLICY: &str = "headstart-lower-only";
/// Restarts: the kubelet waits 0 s before the first, 10 s before the second, 20 s before the third.
const RESTARTS: usize = 3;
/// Pods that are missed.
const MISSED: usize = 5;
/// Ends when it is told to, and waits to be told that it is Ready when it comes again.
const MORTAL: &str =
    "rm -f /tmp/ready /tmp/end; while ! test -e /tmp/end; do sleep 0.1; done; exit 1";

/// 50m/100m, doubled.
pub(crate) async fn raises(cluster: &mut Cluster) -> Result<Vec<String>> {
    apply(cluster, &images::root().join("tests/e2e/raises")).await?;
    for kind in [
        "validatingadmissionpolicybinding",
        "validatingadmissionpolicy",
    ] {
        cluster.kubectl(&format!("delete {kind} {POLICY}")).await?;
    }
    settled(cluster).await?;
    namespace(cluster, NS).await?;
    apply_boosts(cluster, &[boost(NS, "app", &json!([percent("app", 100)]))]).await?;
    let restarts = restarts(cluster).await?;
    let missed = missed(cluster).await?;
    remove_namespace(cluster, NS).await?;
    install(cluster).await?;
    settled(cluster).await?;
    Ok(vec![
        format!(
            "{RESTARTS} restarts; from when the container runs again until its cgroup is 200m: {restarts}"
        ),
        format!(
            "{MISSED} pods that no webhook was asked about; from when they run until their cgroup is 200m: {missed}"
        ),
    ])
}

async fn restarts(cluster: &Cluster) -> Result<String> {
    let app = container("app", &cpu("50m", "100m"), MORTAL);
    let created = create_boosted(cluster, &pod(NS, "mortal", "app", &[app])).await?;
    ensure!(size(&created, "app") == "100m/200m", "{created}");
    let mut late = Vec::new();
    for time in 1..=RESTARTS {
        make_ready(cluster, NS, "mortal", "app").await?;
        until_rested(cluster, "mortal").await?;
        exec(cluster, NS, "mortal", "app", "touch /tmp/end").await?;
        let began = until_running(cluster, "mortal", time).await?;
        late.push(until_raised(cluster, "mortal", began).await?);
        let pod = get(cluster, NS, "mortal").await?;
        ensure!(record(&pod)["cause"] == "Restart", "{}", record(&pod));
    }
    make_ready(cluster, NS, "mortal", "app").await?;
    until_rested(cluster, "mortal").await?;
    Ok(milliseconds(late))
}

async fn missed(cluster: &Cluster) -> Result<String> {
    cluster
        .kubectl("delete mutatingwebhookconfiguration headstart")
        .await?;
    let app = container("app", &cpu("50m", "100m"), "");
    eventually("the webhook is not asked any more", SOON, || async {
        let probe = pod(NS, "probe", "app", std::slice::from_ref(&app));
        let path = format!("{}?dryRun=All", testbed::rest::pods(NS));
        let made = cluster.rest().post(&path, &probe).await?.accepted()?;
        ensure!(claim(&made).is_none(), "it is");
        Ok(())
    })
    .await?;
    let mut late = Vec::new();
    for time in 1..=MISSED {
        let name = format!("late-{time}");
        let pod = pod(NS, &name, "app", std::slice::from_ref(&app));
        let created = create(cluster, &pod).await?;
        ensure!(size(&created, "app") == "50m/100m", "{created}");
        let began = until_running(cluster, &name, 0).await?;
        late.push(until_raised(cluster, &name, began).await?);
        make_ready(cluster, NS, &name, "app").await?;
        until_rested(cluster, &name).await?;
    }
    Ok(milliseconds(late))
}

fn restarted(pod: &Value) -> usize {
    let count = pod["status"]["containerStatuses"][0]["restartCount"].as_u64();
    count
        .and_then(|count| usize::try_from(count).ok())
        .unwrap_or_default()
}

/// Waits until the container runs after so many restarts, and says when it was first seen to.
async fn until_running(cluster: &Cluster, name: &str, restarts: usize) -> Result<Instant> {
    let runs = |pod: &Value| runs(pod) && restarted(pod) == restarts;
    eventually(&format!("{name} runs"), SOON, || async {
        ensure!(runs(&get(cluster, NS, name).await?), "it does not");
        Ok(Instant::now())
    })
    .await
}

/// Waits until the kernel gives the container twice its CPU, and says how long that took.
async fn until_raised(cluster: &Cluster, name: &str, began: Instant) -> Result<Duration> {
    let pod = get(cluster, NS, name).await?;
    until_limit(&cgroup(cluster, &pod, "app")?, 200).await?;
    Ok(began.elapsed())
}

/// Waits until the boost has ended, in the pod and in its cgroup; the claim stays where restarts are boosted.
async fn until_rested(cluster: &Cluster, name: &str) -> Result<()> {
    let rests = |pod: &Value| record(pod)["state"] == "Reverted" && claim(pod) == Some("app");
    let pod = until(cluster, NS, name, "rests", rests).await?;
    ensure!(size(&pod, "app") == "50m/100m", "{pod}");
    until_limit(&cgroup(cluster, &pod, "app")?, 100).await?;
    Ok(())
}

fn milliseconds(mut times: Vec<Duration>) -> String {
    times.sort_unstable();
    let median = times[times.len() / 2].as_millis();
    let last = times.last().map(Duration::as_millis).unwrap_or_default();
    format!("median {median} ms, at most {last} ms")
}
