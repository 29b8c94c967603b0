//! The view on a real control plane: through the API server's aggregator with kubectl, and straight at each replica.
//!
//! There is no controller manager here, so roles are not aggregated (they are bound), and nobody deletes namespaces: that is
//! in `tests/e2e`.

mod callers;
mod direct;
mod list;
mod replicas;

use std::{path::Path, time::Duration};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use testbed::{
    Behaviour, Cluster, Rest,
    cluster::{run, shared},
    eventually,
    rest::{MERGE, STRATEGIC, pods},
    view::{self, API, API_SERVICE_PATH, until_available},
};
use tokio::sync::OnceCell;

const SOON: Duration = Duration::from_secs(60);
const KEY: &str = headstart::api::BOOST_KEY;

/// It ends with the process.
static CLUSTER: OnceCell<Result<Cluster, String>> = OnceCell::const_new();

/// A cluster of three replicas with a namespace `shop`, in which five pods are boosted until they are Ready, and an empty one.
/// A sixth pod's boost has ended: it has its claim for the next restart, and is shown nowhere.
async fn cluster() -> Result<&'static Cluster> {
    shared(&CLUSTER, start(3)).await
}

async fn start(replicas: usize) -> Result<Cluster> {
    let behaviour = Behaviour {
        ready_after: None,
        ..Behaviour::default()
    };
    let binary = Path::new(env!("CARGO_BIN_EXE_headstart"));
    let cluster = view::start(binary, replicas, behaviour).await?;
    let rest = rest(&cluster);
    for namespace in ["shop", "empty"] {
        let namespace = json!({"metadata": {"name": namespace}});
        let made = rest.post("/api/v1/namespaces", &namespace).await?;
        made.accepted()?;
    }
    let boosts = "/apis/autoscaling.x-k8s.io/v1alpha1/namespaces/shop/startupcpuboosts";
    for name in ["fast", "slow", "again"] {
        let mut boost = boost(name);
        boost["spec"]["boostOnRestart"] = (name == "again").into();
        rest.post(boosts, &boost).await?.accepted()?;
    }
    for name in ["fast-0", "fast-1", "fast-2", "slow-0", "slow-1", "again-0"] {
        create(&cluster, name).await?;
    }
    until_shown(&cluster, 6).await?;
    end(&cluster, "again-0").await?;
    until_shown(&cluster, 5).await?;
    Ok(cluster)
}

fn rest(cluster: &Cluster) -> Rest {
    Rest::new(cluster.plane.admin(), SOON)
}

/// Triples the CPU of the pods that are called after it.
fn boost(name: &str) -> Value {
    json!({
        "apiVersion": "autoscaling.x-k8s.io/v1alpha1", "kind": "StartupCPUBoost", "metadata": {"name": name},
        "selector": {"matchLabels": {"app": name}},
        "spec": {
            "resourcePolicy": {"containerPolicies": [{"containerName": "app", "percentageIncrease": {"value": 200}}]},
            "durationPolicy": {"podCondition": {"type": "Ready", "status": "True"}},
        },
    })
}

/// Creates a boosted pod; tried until its boost is known.
async fn create(cluster: &Cluster, name: &str) -> Result<()> {
    let app = name.split('-').next();
    let resources = json!({"requests": {"cpu": "100m"}, "limits": {"cpu": "500m"}});
    let pod = json!({
        "metadata": {"name": name, "labels": {"app": app}},
        "spec": {"containers": [{"name": "app", "image": "x", "resources": resources}]},
    });
    let rest = rest(cluster);
    let (all, dry) = (pods("shop"), format!("{}?dryRun=All", pods("shop")));
    eventually("the boost is known", SOON, || async {
        let tried = rest.post(&dry, &pod).await?.accepted()?;
        ensure!(tried["metadata"]["labels"][KEY].is_string(), "not boosted");
        Ok(())
    })
    .await?;
    rest.post(&all, &pod).await?.accepted().map(drop)
}

/// Makes a pod Ready, and waits until its boost has ended.
async fn end(cluster: &Cluster, name: &str) -> Result<()> {
    let (rest, path) = (rest(cluster), format!("{}/{name}", pods("shop")));
    let ready =
        json!({"type": "Ready", "status": "True", "lastTransitionTime": chrono::Utc::now()});
    let ready = json!({"status": {"conditions": [ready]}});
    let status = format!("{path}/status");
    rest.patch(&status, STRATEGIC, &ready).await?.accepted()?;
    eventually("its boost has ended", SOON, || async {
        let pod = rest.get(&path).await?.accepted()?;
        let record = pod["metadata"]["annotations"][KEY].as_str();
        let record: Value = serde_json::from_str(record.context("no record")?)?;
        ensure!(record["state"] == "Reverted", "{record}");
        ensure!(pod["metadata"]["labels"][KEY] == "again", "it has no claim");
        Ok(())
    })
    .await
}

/// Waits until every replica shows so many pods, all of which have a node and run.
async fn until_shown(cluster: &Cluster, count: usize) -> Result<()> {
    for replica in &cluster.replicas {
        let caller = direct::Caller::admin(cluster).await?;
        eventually("it shows them", SOON, || async {
            let path = format!("{API}/boostedpods");
            let (code, list) = caller.get(replica, &path, &[]).await?;
            let items = list["items"]
                .as_array()
                .map(Vec::as_slice)
                .unwrap_or_default();
            let run = items
                .iter()
                .filter(|item| item["status"]["containers"][0]["actual"].is_object());
            ensure!(code == 200 && run.count() == count, "{code} {list}");
            Ok(())
        })
        .await?;
    }
    Ok(())
}

async fn kubectl(cluster: &Cluster, line: &str) -> Result<String> {
    let args: Vec<&str> = line.split_whitespace().collect();
    cluster.plane.kubectl_ok(&args).await
}

/// What it says when it fails.
async fn kubectl_fails(cluster: &Cluster, line: &str) -> Result<String> {
    let args: Vec<&str> = line.split_whitespace().collect();
    let output = cluster.plane.kubectl(&args).await?;
    ensure!(!output.status.success(), "{line} did not fail");
    Ok(String::from_utf8_lossy(&output.stderr).into_owned())
}

/// First words of the lines after the head.
fn names(table: &str) -> Vec<&str> {
    let lines = table.lines().skip(1);
    lines
        .filter_map(|line| line.split_whitespace().next())
        .collect()
}

#[test]
fn kubectl_knows_the_resources() -> Result<()> {
    run(async {
        let cluster = cluster().await?;
        let line = "api-resources --api-group=visibility.autoscaling.x-k8s.io -o wide";
        let told = kubectl(cluster, line).await?;
        let words = ["boostedpods", "bpod", "true", "BoostedPod", "get,list"];
        let told_pods = told.lines().find(|line| line.starts_with("boostedpods"));
        let told_pods = told_pods.with_context(|| told.clone())?;
        for word in words {
            ensure!(told_pods.contains(word), "{word} is not in {told_pods}");
        }
        ensure!(
            names(&told) == ["boostedpods", "boostsummaries", "clusterboostsummaries"],
            "{told}"
        );
        // Nothing else suffers from it.
        let all = kubectl(cluster, "api-resources -o name").await?;
        ensure!(all.contains("deployments.apps"), "{all}");
        let explained = kubectl_fails(cluster, "explain boostedpods").await?;
        ensure!(!explained.contains("panic"), "{explained}");
        kubectl(cluster, "explain deployments.spec").await.map(drop)
    })
}

#[test]
fn kubectl_shows_a_table() -> Result<()> {
    run(async {
        let cluster = cluster().await?;
        let table = kubectl(cluster, "get boostedpods -n shop").await?;
        let head: Vec<&str> = table
            .lines()
            .next()
            .unwrap_or_default()
            .split_whitespace()
            .collect();
        ensure!(
            head == ["NAME", "BOOST", "PHASE", "LENT", "DUE", "AGE"],
            "{table}"
        );
        let fast: Vec<&str> = table
            .lines()
            .nth(1)
            .unwrap_or_default()
            .split_whitespace()
            .collect();
        ensure!(fast[..4] == ["fast-0", "fast", "Active", "200m"], "{table}");
        ensure!(
            fast[4] == "in" && fast[5].ends_with('m'),
            "due in an hour at most: {table}"
        );
        let wide = kubectl(cluster, "get bpod -A -o wide").await?;
        ensure!(
            wide.contains("NAMESPACE") && wide.contains("app 100m/500m -> 300m/1500m"),
            "{wide}"
        );
        ensure!(
            wide.contains("Deadline") && wide.contains("NotDue"),
            "{wide}"
        );
        let one = kubectl(cluster, "get boostedpod fast-1 -n shop").await?;
        ensure!(names(&one) == ["fast-1"], "{one}");
        let none = kubectl(cluster, "get boostedpods -n empty -o json").await?;
        let none: Value = serde_json::from_str(&none)?;
        ensure!(none["items"] == json!([]), "{none}");
        Ok(())
    })
}

#[test]
fn kubectl_shows_an_object() -> Result<()> {
    run(async {
        let cluster = cluster().await?;
        let shown = kubectl(cluster, "get boostedpod slow-0 -n shop -o json").await?;
        let shown: Value = serde_json::from_str(&shown)?;
        let pod = rest(cluster)
            .get(&format!("{}/slow-0", pods("shop")))
            .await?
            .accepted()?;
        ensure!(
            shown["metadata"]["uid"] == pod["metadata"]["uid"],
            "{shown}"
        );
        ensure!(
            shown["status"]["boost"] == json!({"kind": "StartupCPUBoost", "name": "slow"}),
            "{shown}"
        );
        let original = json!({"request": "100m", "limit": "500m"});
        let boosted = json!({"request": "300m", "limit": "1500m"});
        let container =
            json!({"name": "app", "original": original, "current": boosted, "actual": boosted});
        ensure!(
            shown["status"]["containers"] == json!([container]),
            "{shown}"
        );
        let described = kubectl(cluster, "describe boostedpod slow-0 -n shop").await?;
        ensure!(described.contains("Lent:"), "{described}");
        let missing = kubectl_fails(cluster, "get boostedpod gone -n shop").await?;
        ensure!(
            missing.contains("(NotFound)") && missing.contains("\"gone\" not found"),
            "{missing}"
        );
        Ok(())
    })
}

#[test]
fn kubectl_gets_a_list_in_chunks() -> Result<()> {
    run(async {
        let cluster = cluster().await?;
        let expected = ["fast-0", "fast-1", "fast-2", "slow-0", "slow-1"];
        for size in [0, 1, 2, 5, 500] {
            let line = format!("get boostedpods -n shop --chunk-size={size}");
            let table = kubectl(cluster, &line).await?;
            ensure!(names(&table) == expected, "{size}: {table}");
        }
        let all = kubectl(cluster, "get boostedpods -A --chunk-size=2 -o name").await?;
        ensure!(all.lines().count() == expected.len(), "{all}");
        let of_one = format!("get boostedpods -A --chunk-size=1 -o name -l {KEY}=slow");
        let of_one = kubectl(cluster, &of_one).await?;
        ensure!(of_one.lines().count() == 2, "{of_one}");
        let other = kubectl_fails(cluster, "get boostedpods -A -l app=fast").await?;
        ensure!(
            other.contains("(BadRequest)") && other.contains("only"),
            "{other}"
        );
        Ok(())
    })
}

#[test]
fn summaries_tell_of_each_boost() -> Result<()> {
    run(async {
        let cluster = cluster().await?;
        let table = kubectl(cluster, "get boostsummaries -n shop --chunk-size=1").await?;
        let rows: Vec<Vec<&str>> = table
            .lines()
            .map(|line| line.split_whitespace().collect())
            .collect();
        let expected = [
            ["again", "0", "0", "0"],
            ["fast", "3", "0", "600m"],
            ["slow", "2", "0", "400m"],
        ];
        let rows: Vec<_> = rows[1..].iter().map(|row| &row[..4]).collect();
        ensure!(rows == expected, "{table}");
        let one = kubectl(
            cluster,
            "get bsum slow -n shop -o jsonpath={.status.phases}",
        )
        .await?;
        ensure!(one == r#"{"Active":2}"#, "{one}");
        let none = kubectl(cluster, "get clusterboostsummaries").await?;
        ensure!(names(&none).is_empty(), "{none}");
        let missing = kubectl_fails(cluster, "get bsum gone -n shop").await?;
        ensure!(missing.contains("(NotFound)"), "{missing}");
        Ok(())
    })
}

#[test]
fn what_can_only_be_read_says_so() -> Result<()> {
    run(async {
        let cluster = cluster().await?;
        let deleted = kubectl_fails(cluster, "delete boostedpod fast-0 -n shop").await?;
        ensure!(
            deleted.contains("(MethodNotAllowed)") && deleted.contains("headstart revert"),
            "{deleted}"
        );
        let labelled = kubectl_fails(cluster, "label boostedpod fast-0 -n shop a=b").await?;
        ensure!(labelled.contains("(MethodNotAllowed)"), "{labelled}");
        for path in [
            "boostedpods?watch=true",
            "namespaces/shop/boostedpods?watch=1",
        ] {
            let answer = rest(cluster).get(&format!("{API}/{path}")).await?;
            ensure!(
                answer.code == 405 && answer.body["kind"] == "Status",
                "{answer:?}"
            );
        }
        let pod = rest(cluster)
            .get(&format!("{}/fast-0", pods("shop")))
            .await?;
        ensure!(pod.accepted()?["metadata"]["labels"][KEY] == "fast");
        Ok(())
    })
}

#[test]
fn a_ca_that_is_wiped_comes_back() -> Result<()> {
    run(async {
        let cluster = start(1).await?;
        let rest = rest(&cluster);
        let ca = || async {
            let service = rest.get(API_SERVICE_PATH).await?.accepted()?;
            let ca = service["spec"]["caBundle"].as_str().map(str::to_owned);
            ca.context("there is none")
        };
        let published = ca().await?;
        let wiped = json!({"spec": {"caBundle": null, "insecureSkipTLSVerify": true}});
        rest.patch(API_SERVICE_PATH, MERGE, &wiped)
            .await?
            .accepted()?;
        let again = json!({"spec": {"insecureSkipTLSVerify": false}});
        rest.patch(API_SERVICE_PATH, MERGE, &again)
            .await
            .map(drop)?;
        eventually("it is back", SOON, || async {
            ensure!(ca().await? == published, "it is another");
            Ok(())
        })
        .await?;
        until_available(&cluster.plane, "True").await
    })
}
