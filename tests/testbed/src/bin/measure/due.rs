//! `cargo measure due`: many boosts that end at once under a leader that has just won, and memory meanwhile.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, Client,
    api::{ListParams, Patch, PatchParams},
};
use serde_json::json;
use testbed::{
    Behaviour, Cluster, Operator,
    lives::{self, KEY, LIMIT, Lives, NAMESPACE, ORIGINAL, UNRELATED},
    release,
};
use tokio::time::sleep;

use crate::effort::Effort;

/// After it a replica has done what it does when much has changed.
const SETTLE: Duration = Duration::from_secs(10);
/// Reviews after which a replica has in memory what reviews need.
const WARM_UP: u32 = 500;
const READY: Duration = Duration::from_secs(60);
const PATIENCE: Duration = Duration::from_secs(900);
/// Pods that the bare loop writes to at a time: as many as a term does at first.
const BARE_AT_ONCE: usize = 32;

/// Ends the boosts of that many pods at once.
pub(crate) async fn due(pods: u32) -> Result<()> {
    // They never become Ready: what ends them is an edit of their boost.
    let behaviour = Behaviour {
        ready_after: None,
        ..Behaviour::default()
    };
    let count = usize::try_from(pods)?;
    let mut cluster = Cluster::start(&release::static_binary().await?, 1, behaviour).await?;
    lives::prepare(&cluster.plane, &["bare", "ours"]).await?;
    let lives = Lives::watch(cluster.plane.admin());
    println!("\n| {pods} boosted pods | figure |\n|---|---|");
    let row = |name: &str, figure: String| println!("| {name} | {figure} |");
    let mebibytes = |kibibytes: f64| format!("{:.1} MiB", kibibytes / 1024.0);

    sleep(SETTLE).await;
    let idle = cluster.replicas[0].process().resident()?;
    row("memory without pods", mebibytes(idle));
    // What the first reviews bring with them is no matter of how many pods there are.
    lives::create(&cluster.plane, UNRELATED, 0..WARM_UP).await?;
    sleep(SETTLE).await;
    let idle = cluster.replicas[0].process().resident()?;
    row(&format!("memory after {WARM_UP} reviews"), mebibytes(idle));
    lives::create(&cluster.plane, UNRELATED, WARM_UP..WARM_UP + 2 * pods).await?;
    sleep(SETTLE).await;
    let more = cluster.replicas[0].process().resident()? - idle;
    row(
        &format!("more memory with {} unrelated pods", 2 * pods),
        mebibytes(more),
    );

    lives::create(&cluster.plane, "bare", 0..pods).await?;
    let bare_boosted = lives.until_running(count, PATIENCE).await?;
    // Nobody else may have a hand in it.
    crash(&mut cluster, "headstart-0")?;
    let bare = bare_loop(&cluster, &lives, bare_boosted).await?;
    row(
        "a bare loop of the same two PATCHes",
        rate(bare, bare_boosted),
    );

    lives.forget();
    start_replica(&mut cluster).await?;
    lives::create(&cluster.plane, "ours", 0..pods).await?;
    let boosted = lives.until_running(count, PATIENCE).await?;
    sleep(SETTLE).await;
    let memory = cluster.replicas[0].process().resident()?;
    row("memory of the leader, all boosted", mebibytes(memory));
    start_replica(&mut cluster).await?;
    crash(&mut cluster, "headstart-1")?;
    end_all(cluster.plane.admin(), "ours").await?;
    let before = Effort::so_far(&cluster)?;
    cluster.leader_other_than("headstart-1").await?;
    let won = Instant::now();
    lives.until_back(1, PATIENCE).await?;
    let first = won.elapsed().as_secs_f64();
    row(
        "from winning the lease to the first CPU that is back",
        format!("{first:.2} s"),
    );
    let finished = lives.until_finished(boosted, PATIENCE);
    let most = peak_until(&cluster.replicas[0], finished).await?;
    let ours = won.elapsed();
    row("until all are finished", rate(ours, boosted));
    let share = 100.0 * per_second(ours, boosted) / per_second(bare, bare_boosted);
    row("its rate, of the bare loop's", format!("{share:.0} %"));
    row("memory of the leader meanwhile, at most", mebibytes(most));
    let writes = lives::writes(&cluster.plane, "ours", boosted)?;
    row(
        "our writes a pod, conflicts included",
        format!("{writes:.3}"),
    );
    let effort = Effort::so_far(&cluster)?.since(&before);
    row("CPU meanwhile", effort.to_string());
    Ok(())
}

fn rate(took: Duration, pods: usize) -> String {
    format!(
        "{:.1} s, {:.0} pods/s",
        took.as_secs_f64(),
        per_second(took, pods)
    )
}

#[allow(clippy::cast_precision_loss)]
fn per_second(took: Duration, pods: usize) -> f64 {
    pods as f64 / took.as_secs_f64()
}

fn crash(cluster: &mut Cluster, name: &str) -> Result<()> {
    cluster.take_replica(name)?.crash()
}

async fn start_replica(cluster: &mut Cluster) -> Result<()> {
    cluster.add_replica(&[]).await?.wait_ready(READY).await
}

/// Makes a group's boosts end by a duration that has long gone by.
async fn end_all(client: Client, group: &str) -> Result<()> {
    let resource = kube::api::ApiResource {
        group: "autoscaling.x-k8s.io".to_owned(),
        version: "v1alpha1".to_owned(),
        api_version: "autoscaling.x-k8s.io/v1alpha1".to_owned(),
        kind: "StartupCPUBoost".to_owned(),
        plural: "startupcpuboosts".to_owned(),
    };
    let boosts = Api::<kube::api::DynamicObject>::namespaced_with(client, NAMESPACE, &resource);
    let duration = json!({"fixedDuration": {"unit": "Seconds", "value": 1}, "podCondition": null});
    let patch = Patch::Merge(json!({"spec": {"durationPolicy": duration}}));
    let params = PatchParams::default();
    boosts
        .patch(group, &params, &patch)
        .await
        .context("editing the boost")
        .map(drop)
}

/// Ends the boosts of the group `bare` with nothing but the two PATCHes: no decision, no look, no wait for the kubelet.
async fn bare_loop(cluster: &Cluster, lives: &Lives, count: usize) -> Result<Duration> {
    let pods: Api<Pod> = Api::namespaced(cluster.plane.admin(), NAMESPACE);
    let list = pods
        .list_metadata(&ListParams::default().labels("group=bare"))
        .await?;
    let names = list.items.into_iter().filter_map(|pod| pod.metadata.name);
    let back = json!({"requests": {"cpu": ORIGINAL}, "limits": {"cpu": LIMIT}});
    let resize = json!({"spec": {"containers": [{"name": "app", "resources": back}]}});
    let finish = json!({"metadata": {"labels": {KEY: null}, "annotations": {KEY: r#"{"state":"Reverted"}"#}}});
    let (resize, finish) = (&Patch::Strategic(resize), &Patch::Strategic(finish));
    let began = Instant::now();
    stream::iter(names)
        .map(|name| {
            let pods = pods.clone();
            async move {
                let params = PatchParams::default();
                pods.patch_resize(&name, &params, resize).await?;
                pods.patch(&name, &params, finish).await?;
                anyhow::Ok(())
            }
        })
        .buffer_unordered(BARE_AT_ONCE)
        .try_for_each(|()| async { Ok(()) })
        .await?;
    let took = began.elapsed();
    lives.until_finished(count, PATIENCE).await?;
    Ok(took)
}

/// The most memory that a replica has until then, in KiB.
async fn peak_until(replica: &Operator, end: impl Future<Output = Result<()>>) -> Result<f64> {
    let mut end = std::pin::pin!(end);
    let mut most = replica.process().resident()?;
    loop {
        tokio::select! {
            ended = &mut end => return ended.map(|()| most),
            () = sleep(Duration::from_millis(100)) => most = most.max(replica.process().resident()?),
        }
    }
}
