//! `cargo measure scale`: what a replica takes in a large cluster: to be Ready, in memory, and of the API server's bytes.
//!
//! The cluster grows in steps, so that the slope is measured too.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use chrono::Utc;
use futures::{StreamExt as _, TryStreamExt as _, stream};
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, api::ListParams};
use serde_json::{Value, json};
use testbed::{
    Behaviour, Cluster, Operator, OperatorOptions, Rest, eventually,
    link::Link,
    lives::{KEY, LIMIT, ORIGINAL},
    release,
    rest::{MERGE, pods},
};
use tokio::time::sleep;

use crate::start::{self, wait_ready};

/// Of so many pods one is boosted, and for so many there is a boost, a namespace and a node: 10,000, 2,000, 500 and 5,000 of
/// 150,000.
const PODS_A_BOOSTED: u32 = 15;
const PODS_A_BOOST: u32 = 75;
const PODS_A_NAMESPACE: u32 = 300;
const PODS_A_NODE: u32 = 30;
/// Steps of growth, and starts at each.
const STEPS: u32 = 2;
const STARTS: usize = 3;
/// As a kubelet reports them: most of a node's bytes.
const IMAGES: usize = 50;
const AT_ONCE: usize = 32;
/// What is measured when a replica does nothing is measured for so long.
const IDLE: Duration = Duration::from_secs(10);
const PATIENCE: Duration = Duration::from_secs(1800);
const SOON: Duration = Duration::from_secs(60);

/// How much there is.
#[derive(Clone, Copy, Default)]
struct Size {
    pods: u32,
    boosted: u32,
    boosts: u32,
    namespaces: u32,
    nodes: u32,
}

impl Size {
    fn of(pods: u32) -> Self {
        Self {
            pods,
            boosted: pods / PODS_A_BOOSTED,
            boosts: pods / PODS_A_BOOST,
            namespaces: pods / PODS_A_NAMESPACE,
            nodes: pods / PODS_A_NODE,
        }
    }
}

/// Grows a cluster to so many pods.
pub(crate) async fn scale(pods: u32) -> Result<()> {
    ensure!(
        pods >= STEPS * PODS_A_NAMESPACE,
        "at least {} pods, so that there is a namespace at each step",
        STEPS * PODS_A_NAMESPACE
    );
    // Those that are boosted stay so.
    let behaviour = Behaviour {
        ready_after: None,
        ..Behaviour::default()
    };
    let mut cluster = Cluster::start(&release::static_binary().await?, 2, behaviour).await?;
    println!(
        "| pods | boosted | boosts | namespaces | nodes | from start to Ready, ms | memory, MiB | read until Ready | … in {s} s at rest | … in {s} s after all connections were cut | memory of the leader, MiB |\n|---|---|---|---|---|---|---|---|---|---|---|",
        s = IDLE.as_secs()
    );
    let mut size = Size::default();
    measure(&mut cluster, size).await?;
    for step in 1..=STEPS {
        let larger = Size::of(pods / STEPS * step);
        grow(&cluster, size, larger).await?;
        size = larger;
        measure(&mut cluster, size).await?;
    }
    Ok(())
}

/// One replica after another starts, and its way to the API server is cut.
async fn measure(cluster: &mut Cluster, size: Size) -> Result<()> {
    let mut starts = Vec::new();
    for number in 0..STARTS {
        starts.push(Start::of(cluster, &format!("probe-{}-{number}", size.pods)).await?);
    }
    let median = |of: fn(&Start) -> f64| {
        let mut values: Vec<_> = starts.iter().map(of).collect();
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    };
    let leader = cluster.leader_other_than("").await?;
    let mut replicas = cluster.replicas.iter();
    let leader = replicas
        .find(|replica| replica.name() == leader)
        .context("somebody else leads")?;
    let Size {
        pods,
        boosted,
        boosts,
        namespaces,
        nodes,
    } = size;
    println!(
        "| {pods} | {boosted} | {boosts} | {namespaces} | {nodes} | {:.0} | {:.1} | {:.2} MB | {:.2} MB | {:.2} MB | {:.1} |",
        median(|start| start.ready_ms),
        median(|start| start.memory),
        median(|start| start.read),
        median(|start| start.at_rest),
        median(|start| start.after_cut),
        leader.process().resident()? / 1024.0,
    );
    Ok(())
}

/// What a replica takes that starts now: milliseconds, MiB, and megabytes that it gets from the API server.
struct Start {
    ready_ms: f64,
    memory: f64,
    read: f64,
    at_rest: f64,
    after_cut: f64,
}

impl Start {
    async fn of(cluster: &Cluster, name: &str) -> Result<Self> {
        let link = Link::start(cluster.plane.address()).await?;
        let mut options = OperatorOptions::new(release::static_binary().await?, name);
        options.server = Some(link.address());
        options.args.push("--shutdown-delay=0".to_owned());
        let began = Instant::now();
        let replica = Operator::start(&cluster.plane, &options).await?;
        wait_ready(&replica).await?;
        let ready_ms = began.elapsed().as_secs_f64() * 1000.0;
        let read = megabytes(&link);
        // What comes with the start, such as what is written once it is Ready, is over.
        sleep(IDLE).await;
        let memory = replica.process().resident()? / 1024.0;
        let before = megabytes(&link);
        sleep(IDLE).await;
        let at_rest = megabytes(&link) - before;
        let before = megabytes(&link);
        link.reset();
        sleep(IDLE).await;
        let after_cut = megabytes(&link) - before;
        ensure!(link.open() > 0, "it has not come back");
        replica.stop(SOON).await?;
        Ok(Self {
            ready_ms,
            memory,
            read,
            at_rest,
            after_cut,
        })
    }
}

#[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
fn megabytes(link: &Link) -> f64 {
    link.received() as f64 / 1e6
}

/// Adds what there is more of.
async fn grow(cluster: &Cluster, from: Size, to: Size) -> Result<()> {
    let (began, rest) = (Instant::now(), Rest::new(cluster.plane.admin(), SOON));
    let boosts = (from.boosts..to.boosts).map(|number| {
        start::boost(
            number,
            number / (PODS_A_NAMESPACE / PODS_A_BOOST),
            "ExactName",
        )
    });
    let namespaces = (from.namespaces..to.namespaces).map(start::namespace);
    start::apply(&cluster.plane, namespaces.collect()).await?;
    start::apply(&cluster.plane, boosts.collect()).await?;
    until_known(cluster, to.boosts).await?;
    all((from.nodes..to.nodes).map(|number| create_node(&rest, number))).await?;
    all((from.boosted..to.boosted).map(|number| create_boosted(&rest, number))).await?;
    let plain = (from.pods - from.boosted)..(to.pods - to.boosted);
    all(plain.map(|number| create_plain(&rest, number))).await?;
    until_running(cluster, to.boosted).await?;
    eprintln!(
        "{} pods, after {} s more",
        to.pods,
        began.elapsed().as_secs()
    );
    Ok(())
}

async fn all(writes: impl Iterator<Item = impl Future<Output = Result<()>>>) -> Result<()> {
    let writes = stream::iter(writes).buffer_unordered(AT_ONCE);
    writes.try_for_each(|()| async { Ok(()) }).await
}

/// Waits until a leader has said of so many boosts that they are in force: then every replica will soon know them.
async fn until_known(cluster: &Cluster, boosts: u32) -> Result<()> {
    eventually("the boosts are known", PATIENCE, || async {
        let active = r#"jsonpath={.items[*].status.conditions[?(@.type=="Active")].status}"#;
        let known = ["get", "scb", "-A", "-o", active];
        let known = cluster.plane.kubectl_ok(&known).await?;
        let known = known.split_whitespace().count();
        ensure!(known >= usize::try_from(boosts)?, "{known} are");
        Ok(())
    })
    .await
}

async fn until_running(cluster: &Cluster, boosted: u32) -> Result<()> {
    let running = ListParams::default()
        .labels(KEY)
        .fields("status.phase=Running");
    eventually("all boosted pods run", PATIENCE, || async {
        // A look is as dear as what it waits for.
        sleep(Duration::from_secs(1)).await;
        let pods = Api::<Pod>::all(cluster.plane.admin());
        let count = pods.list_metadata(&running).await?.items.len();
        ensure!(
            count == usize::try_from(boosted)?,
            "{count} of {boosted} do"
        );
        Ok(())
    })
    .await
}

/// A node as large, in bytes, as one that a kubelet reports.
async fn create_node(rest: &Rest, number: u32) -> Result<()> {
    let name = format!("node-{number}");
    let image = |image: usize| {
        let name = format!("example.com/team-{image}/some/application");
        let digest = "2f1c".repeat(16);
        json!({"names": [format!("{name}@sha256:{digest}"), format!("{name}:1.2.{image}")], "sizeBytes": 123_456_789})
    };
    let size = json!({"cpu": "16", "memory": "64Gi", "pods": "110"});
    let now = Utc::now();
    let conditions = ["MemoryPressure", "DiskPressure", "PIDPressure", "Ready"].map(|kind| {
        let status = if kind == "Ready" { "True" } else { "False" };
        json!({"type": kind, "status": status, "reason": "Kubelet", "message": "as it should be", "lastHeartbeatTime": now, "lastTransitionTime": now})
    });
    let node = json!({
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {
            "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64", "kubernetes.io/hostname": name,
            "topology.kubernetes.io/region": "somewhere", "topology.kubernetes.io/zone": "somewhere-a",
        }},
        "status": {
            "capacity": size, "allocatable": size, "conditions": conditions,
            "addresses": [{"type": "InternalIP", "address": "192.0.2.1"}, {"type": "Hostname", "address": name}],
            "nodeInfo": {
                "architecture": "amd64", "operatingSystem": "linux", "kubeletVersion": "v1.36.3", "bootID": "", "containerRuntimeVersion": "",
                "kernelVersion": "", "kubeProxyVersion": "", "machineID": "", "osImage": "", "systemUUID": "",
            },
            "images": (0..IMAGES).map(image).collect::<Vec<_>>(),
        },
    });
    rest.post("/api/v1/nodes", &node).await?.accepted()?;
    // A new node is tainted until a controller, which is not here, sees that it is Ready.
    let taints = json!({"spec": {"taints": null}});
    let path = format!("/api/v1/nodes/{name}");
    rest.patch(&path, MERGE, &taints).await?.accepted()?;
    Ok(())
}

/// A pod of a boost, which gets a node and stays boosted.
async fn create_boosted(rest: &Rest, number: u32) -> Result<()> {
    let boost = number / (PODS_A_BOOST / PODS_A_BOOSTED);
    let namespace = start::team(boost / (PODS_A_NAMESPACE / PODS_A_BOOST));
    let app = format!("app-{boost}");
    let pod = pod(&format!("boosted-{number}"), &app);
    let pod = rest.post(&pods(&namespace), &pod).await?.accepted()?;
    let claim = &pod["metadata"]["labels"][KEY];
    ensure!(claim.is_string(), "boosted-{number} got no boost");
    Ok(())
}

/// A pod that no boost is for; no scheduler takes it, so that it does nothing.
async fn create_plain(rest: &Rest, number: u32) -> Result<()> {
    let here = PODS_A_NAMESPACE - PODS_A_NAMESPACE / PODS_A_BOOSTED;
    let mut pod = pod(&format!("plain-{number}"), "plain");
    pod["spec"]["schedulingGates"] = json!([{"name": "example.com/never"}]);
    let path = pods(&start::team(number / here));
    rest.post(&path, &pod).await?.accepted()?;
    Ok(())
}

fn pod(name: &str, app: &str) -> Value {
    let resources = json!({"requests": {"cpu": ORIGINAL}, "limits": {"cpu": LIMIT}});
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": app}},
        "spec": {"containers": [{"name": app, "image": "app", "resources": resources}]},
    })
}
