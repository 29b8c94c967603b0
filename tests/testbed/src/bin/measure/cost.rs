//! `cargo measure cost`: what a boosted pod costs the API server, beside a plain one, and beside one in a cluster without us.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, api::ListParams};
use testbed::{
    Behaviour, Cluster, eventually,
    lives::{self, Lives, NAMESPACE},
    release,
};

use crate::effort::Effort;

/// Pods a second, few enough that nothing waits.
const RATE: u32 = 20;
/// As the manifests have them.
const REPLICAS: usize = 3;
const PATIENCE: Duration = Duration::from_secs(120);

/// A series of the API server that is summed up.
struct Count {
    what: &'static str,
    series: &'static str,
    /// A label that it must have.
    with: &'static str,
    /// Verbs that are left out.
    without: &'static [&'static str],
}

/// Lists and watches are few and long, and don't belong to a single pod.
const READS: &[&str] = &[r#"verb="WATCH""#, r#"verb="LIST""#];

const fn of_pods(
    what: &'static str,
    series: &'static str,
    without: &'static [&'static str],
) -> Count {
    let with = r#"resource="pods""#;
    Count {
        what,
        series,
        with,
        without,
    }
}

const COUNTS: [Count; 7] = [
    of_pods("requests", "apiserver_request_total", READS),
    of_pods(
        "bytes of request bodies",
        "apiserver_request_body_size_bytes_sum",
        &[],
    ),
    of_pods("bytes of answers", "apiserver_response_sizes_sum", READS),
    of_pods(
        "versions of the pod in etcd",
        "apiserver_watch_cache_events_received_total",
        &[],
    ),
    of_pods("watch events sent", "apiserver_watch_events_total", &[]),
    of_pods(
        "bytes of watch events",
        "apiserver_watch_events_sizes_sum",
        &[],
    ),
    Count {
        what: "calls of the webhook",
        series: "apiserver_admission_webhook_request_total",
        with: r#"name="pods.headstart"#,
        without: &[],
    },
];

/// What a pod costs: [`COUNTS`], then milliseconds of a processor.
type Cost = [f64; COUNTS.len() + 1];

/// Lets so many pods of each kind be born, run and become Ready.
pub(crate) async fn cost(pods: u32) -> Result<()> {
    ensure!(
        pods.is_multiple_of(RATE),
        "the pods are a multiple of {RATE}"
    );
    let behaviour = Behaviour {
        run_after: Some(Duration::from_millis(200)),
        ready_after: Some(Duration::from_secs(2)),
        ..Behaviour::default()
    };
    let binary = release::static_binary().await?;
    let mut cluster = Cluster::start(&binary, REPLICAS, behaviour).await?;
    lives::prepare(&cluster.plane, &["boosted"]).await?;
    let boosted = of(&cluster, "boosted", pods).await?;
    let plain = of(&cluster, "plain", pods).await?;
    for replica in cluster.replicas.drain(..) {
        replica.crash()?;
    }
    let webhook = ["delete", "mutatingwebhookconfiguration", "headstart"];
    cluster.plane.kubectl_ok(&webhook).await?;
    let without = of(&cluster, "without", pods).await?;
    println!(
        "\n| for each pod | without Headstart | no boost is for it | boosted |\n|---|---|---|---|"
    );
    let names = COUNTS.iter().map(|count| count.what);
    let names = names.chain(["CPU of API server and etcd, ms"]);
    for (index, name) in names.enumerate() {
        let [without, plain, boosted] = [without, plain, boosted].map(|cost| cost[index]);
        println!("| {name} | {without:.2} | {plain:.2} | {boosted:.2} |");
    }
    Ok(())
}

/// What each pod of a group costs, from its creation until there is nothing more to do.
async fn of(cluster: &Cluster, group: &str, pods: u32) -> Result<Cost> {
    let lives = Lives::watch(cluster.plane.admin());
    let (before, effort) = (counts(cluster).await?, Effort::so_far(cluster)?);
    let pod = |index| lives::pod(group, index);
    let created = lives::create_at(cluster.plane.admin(), RATE, pods / RATE, pod).await;
    let created: Vec<_> = created.into_iter().collect::<Result<_>>()?;
    let boosted = created.iter().filter(|creation| creation.boosted).count();
    let wanted = if group == "boosted" { created.len() } else { 0 };
    ensure!(boosted == wanted, "{boosted} of {group} are boosted");
    lives.until_ready(created.len(), PATIENCE).await?;
    lives.until_finished(boosted, PATIENCE).await?;
    let (after, effort) = (
        counts(cluster).await?,
        Effort::so_far(cluster)?.since(&effort),
    );
    let mut cost = Cost::default();
    for (cost, (before, after)) in cost.iter_mut().zip(before.iter().zip(after)) {
        *cost = (after - before) / f64::from(pods);
    }
    cost[COUNTS.len()] = 1000.0 * effort.servers() / f64::from(pods);
    end(cluster).await?;
    Ok(cost)
}

/// Lets the pods go, so that the next find the cluster as they did.
async fn end(cluster: &Cluster) -> Result<()> {
    let delete = ["delete", "pods", "--all", "--wait=false", "-n", NAMESPACE];
    cluster.plane.kubectl_ok(&delete).await?;
    let pods: Api<Pod> = Api::namespaced(cluster.plane.admin(), NAMESPACE);
    eventually("the pods are gone", PATIENCE, || async {
        let some = ListParams::default().limit(1);
        let left = pods.list_metadata(&some).await?.items.len();
        ensure!(left == 0, "some are left");
        Ok(())
    })
    .await
}

/// What the API server has counted so far.
async fn counts(cluster: &Cluster) -> Result<[f64; COUNTS.len()]> {
    let text = cluster.plane.metrics().await?;
    let mut counts = [0.0; COUNTS.len()];
    for (sum, count) in counts.iter_mut().zip(&COUNTS) {
        for line in text.lines() {
            let Some((labels, value)) = labels_of(line, count.series) else {
                continue;
            };
            let mut without = count.without.iter();
            if labels.contains(count.with) && !without.any(|label| labels.contains(label)) {
                *sum += value.parse::<f64>().context("a number")?;
            }
        }
    }
    Ok(counts)
}

/// Labels and value, where a line is of this series.
fn labels_of<'a>(line: &'a str, series: &str) -> Option<(&'a str, &'a str)> {
    let rest = line.strip_prefix(series)?.strip_prefix('{')?;
    rest.rsplit_once("} ")
}
