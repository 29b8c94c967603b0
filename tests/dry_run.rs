//! `--dry-run`: nothing is written to pods, boosts and Events, and what would be is told once. In process; and on a real API
//! server, with the rights that the component `manifests/dry-run` leaves.

mod common;

use std::{path::Path, time::Duration};

use anyhow::{Context as _, Result, ensure};
use common::*;
use headstart::api::BoostStatus;
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, api::PostParams};
use serde_json::{Value, json};
use testbed::{
    Behaviour, Cluster,
    cluster::manifests,
    eventually, install,
    kustomize::overlay,
    memory::{MemoryServer, Recorded},
};
use tokio::time::sleep;

const SOON: Duration = Duration::from_secs(30);

/// A replica that runs dry, with all other flags that make it write.
fn dry(server: &MemoryServer, name: &str) -> Replica {
    let mut replica = raising(server, name);
    replica.dry_run = true;
    replica
}

/// What `metrics` say of writes to pods of this kind and result.
fn written(metrics: &str, write: &str, result: &str) -> u64 {
    let series = format!(r#"headstart_pod_writes_total{{write="{write}",result="{result}"}}"#);
    counted(metrics, &series)
}

fn told(replica: &Replica, write: &str) -> u64 {
    written(&replica.metrics.text(), write, "DryRun")
}

/// All requests that change anything, dry runs of the API server's too.
fn writes(server: &MemoryServer) -> Vec<Recorded> {
    let mut requests = server.requests();
    requests.retain(|request| !["GET", "LIST", "WATCH"].contains(&request.verb));
    requests
}

// === in process ===

#[tokio::test(start_paused = true)]
async fn a_due_boost_stays_and_is_told_of_once_a_term() {
    let server = server();
    server.create(boost("b", &until_ready()));
    server.create(boosted("p", &ready_end()));
    server.create(boosted("q", &ready_end()));
    let replica = dry(&server, "dry");
    let term = replica.lead_and_report();
    sleep(secs(60)).await;
    assert_eq!(told(&replica, "resize"), 0, "it is not due");
    make_ready(&server, "p");
    until("it is told", secs(2), || told(&replica, "resize") == 1).await;
    for _ in 0..20 {
        // It goes on changing: to be due is no news.
        make_ready(&server, "p");
        sleep(secs(10)).await;
    }
    assert_eq!(told(&replica, "resize"), 1);
    // The other one's deadline.
    sleep(secs(7200)).await;
    assert_eq!(told(&replica, "resize"), 2);

    let key = (NS.to_owned(), "b".to_owned());
    let counted = replica.tally.of(&key, &BoostStatus::default());
    assert_eq!(counted, Some((2, 2)), "both are boosted");
    term.end().await;
    assert_eq!(writes(&server).len(), 0, "{:?}", writes(&server));
    let boost = server.get("startupcpuboosts", NS, "b").expect("the boost");
    assert_eq!(boost.get("status"), None);
}

/// Somebody else has taken the CPU back, or the pod has ended: all that is left to do are the marks.
#[tokio::test(start_paused = true)]
async fn marks_that_are_left_over_stay_too() {
    let server = server();
    let mut pod = boosted("p", &ready_end());
    pod["status"]["phase"] = "Succeeded".into();
    server.create(pod);
    let replica = dry(&server, "dry");
    let _term = replica.lead();
    until("it is told", secs(2), || told(&replica, "finish") == 1).await;
    sleep(secs(7200)).await;
    assert_eq!(told(&replica, "finish"), 1);
    assert_eq!(writes(&server).len(), 0, "{:?}", writes(&server));
}

/// A record that can't be read is repaired from the owner's template, which is read; the pod is not written to.
#[tokio::test(start_paused = true)]
async fn a_repaired_record_is_told_of_and_nothing_else() {
    let server = server();
    let template = pod("template")["spec"].clone();
    server.create(json!({
        "apiVersion": "apps/v1", "kind": "ReplicaSet", "metadata": {"name": "r", "namespace": NS, "uid": "owner"},
        "spec": {"template": {"spec": template}},
    }));
    let owner = server.get("replicasets", NS, "r").expect("the owner");
    let mut pod = boosted("p", &ready_end());
    pod["metadata"]["annotations"][KEY] = "garbage".into();
    pod["metadata"]["ownerReferences"] = json!([{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r",
        "uid": owner["metadata"]["uid"], "controller": true}]);
    server.create(pod);
    let replica = dry(&server, "dry");
    let _term = replica.lead();
    sleep(secs(7200)).await;
    assert_eq!(told(&replica, "resize"), 1);
    assert_eq!(writes(&server).len(), 0, "{:?}", writes(&server));
}

/// What a dry run has left alone at admission would look like it.
#[tokio::test(start_paused = true)]
async fn pods_without_marks_are_not_taken_for_missed_ones() {
    let server = server();
    server.create(boost("b", &until_ready()));
    let replica = dry(&server, "dry");
    let _term = replica.lead();
    sleep(secs(10)).await;
    let mut pod = pod("p");
    pod["spec"]["nodeName"] = "node".into();
    pod["status"] = json!({"phase": "Pending"});
    set_condition(
        &mut pod,
        "PodScheduled",
        "True",
        &server.clock().timestamp(),
    );
    server.create(pod);
    sleep(secs(7200)).await;
    assert_eq!(told(&replica, "raise"), 0);
    assert_eq!(writes(&server).len(), 0, "{:?}", writes(&server));
}

#[tokio::test(start_paused = true)]
async fn a_restart_is_told_of_and_not_boosted() {
    let server = server();
    server.create(boost("b", &until_ready()));
    server.create(boosted("p", &ready_end()));
    let real = raising(&server, "real");
    let term = real.lead();
    sleep(secs(20)).await;
    make_ready(&server, "p");
    until("its boost has ended", secs(2), || {
        record_of(&stored(&server, "p")).contains(r#""state":"Reverted""#)
    })
    .await;
    term.end().await;
    let before = stored(&server, "p");
    server.clear_requests();

    let replica = dry(&server, "dry");
    let _term = replica.lead();
    sleep(secs(60)).await;
    restart(&server);
    until("it is told", secs(2), || told(&replica, "raise") == 1).await;
    sleep(secs(7200)).await;
    assert_eq!(told(&replica, "raise"), 1);
    let after = stored(&server, "p");
    assert_eq!(
        (cpu_of(&after), record_of(&after)),
        (cpu_of(&before), record_of(&before))
    );
    assert_eq!(writes(&server).len(), 0, "{:?}", writes(&server));
}

/// A rollout, there and back: real replicas answer reviews while a dry one leads, and the other way round.
#[tokio::test(start_paused = true)]
async fn what_a_real_replica_boosts_under_a_dry_leader_ends_when_a_real_one_leads() {
    let server = server();
    server.create(boost("b", &until_ready()));
    let (old, new) = (dry(&server, "dry"), Replica::start(&server, "real"));
    let term = old.lead_and_report();
    sleep(secs(10)).await;
    for name in ["p", "q"] {
        server.create(boosted(name, &ready_end()));
    }
    make_ready(&server, "p");
    sleep(secs(60)).await;
    assert_eq!(told(&old, "resize"), 1);
    assert_eq!(writes(&server).len(), 0, "{:?}", writes(&server));
    term.end().await;

    let term = new.lead_and_report();
    until_ended(&server, "p", secs(5)).await;
    let status = || {
        let boost = server.get("startupcpuboosts", NS, "b").expect("the boost");
        let counts = ["activeContainerBoosts", "totalContainerBoosts"];
        counts.map(|count| boost["status"][count].clone())
    };
    until("both are counted", secs(10), || status() == [1, 2]).await;
    term.end().await;
    server.clear_requests();

    let term = old.lead_and_report();
    make_ready(&server, "q");
    sleep(secs(7200)).await;
    assert_eq!(writes(&server).len(), 0, "{:?}", writes(&server));
    assert_eq!(status(), [1, 2], "as the real one has left it");
    term.end().await;
    let _term = new.lead_and_report();
    until_ended(&server, "q", secs(5)).await;
    until("both have ended", secs(10), || status() == [0, 2]).await;
}

// === on a real API server ===

/// From a trial to an install: a pod that a dry run leaves alone, one that an earlier life has boosted, and the rollout.
#[tokio::test(flavor = "multi_thread")]
async fn a_trial() -> Result<()> {
    let binary = Path::new(env!("CARGO_BIN_EXE_headstart"));
    let behaviour = Behaviour {
        ready_after: Some(Duration::from_secs(1)),
        ..Behaviour::default()
    };
    let mut cluster = Cluster::start(binary, 0, behaviour).await?;
    let url = format!("https://{}/mutate-v1-pod", cluster.balancer.address());
    let components = ["manifests/dry-run"];
    let trial = overlay(&json!({"resources": ["manifests"], "components": components}))?;
    install(&cluster.plane, trial.path(), &url).await?;
    let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NS}});
    cluster.plane.apply(&namespace.to_string()).await?;
    let boost = boost("b", &until_ready()).to_string();
    cluster.plane.apply(&boost).await?;

    let dry = cluster.add_replica(&["--dry-run"]).await?;
    dry.wait_ready(SOON).await?;
    let dry = dry.name().to_owned();
    let pods = Api::<Pod>::namespaced(cluster.plane.admin(), NS);
    a_new_pod_is_told_of_and_unchanged(&cluster, &pods).await?;
    a_boosted_pod_stays_as_it_is(&cluster, &pods).await?;
    let ours = |event: &Value| {
        let user = event["user"]["username"].as_str().unwrap_or_default();
        let is_about_pods = event["objectRef"]["resource"] == "pods";
        let verb = event["verb"].as_str().unwrap_or_default();
        let is_write = !["get", "list", "watch"].contains(&verb);
        user.ends_with(":headstart") && is_about_pods && is_write
    };
    let events = cluster.plane.audit_events()?;
    let written: Vec<_> = events.iter().filter(|event| ours(event)).collect();
    ensure!(written.is_empty(), "{written:?}");

    install(&cluster.plane, &manifests(), &url).await?;
    cluster.add_replica(&[]).await?.wait_ready(SOON).await?;
    cluster.take_replica(&dry)?.stop(SOON).await?;
    eventually("the boost has ended", SOON, || async {
        let pod = serde_json::to_value(pods.get("earlier").await?)?;
        ensure!(is_ended(&pod), "{pod}");
        Ok(())
    })
    .await
}

async fn a_new_pod_is_told_of_and_unchanged(cluster: &Cluster, pods: &Api<Pod>) -> Result<()> {
    let object: Pod = serde_json::from_value(pod("new"))?;
    // The API server takes a moment to hear of the webhook and its CA.
    let shown = PostParams {
        dry_run: true,
        ..PostParams::default()
    };
    eventually("its dry run shows the boost", SOON, || async {
        let shown = serde_json::to_value(pods.create(&shown, &object).await?)?;
        ensure!(*cpu_of(&shown) == cpu("380m", "750m"), "{shown}");
        Ok(())
    })
    .await?;
    let created = pods.create(&PostParams::default(), &object).await?;
    let created = serde_json::to_value(created)?;
    ensure!(*cpu_of(&created) == cpu("250m", "500m"), "{created}");
    ensure!(
        !is_claimed(&created) && record_of(&created).is_empty(),
        "{created}"
    );
    let metrics = cluster.replicas[0].metrics().await?;
    for series in [
        r#"headstart_admission_reviews_total{outcome="would_boost",reason=""} 1"#,
        r#"headstart_admission_reviews_total{outcome="boosted",reason=""} 0"#,
    ] {
        ensure!(metrics.contains(series), "{series}: {metrics}");
    }
    Ok(())
}

/// A pod with claim, record and values of an earlier life, which is Ready and due.
async fn a_boosted_pod_stays_as_it_is(cluster: &Cluster, pods: &Api<Pod>) -> Result<()> {
    let mut object = pod("earlier");
    object["metadata"]["labels"][KEY] = "b".into();
    object["metadata"]["annotations"] = json!({KEY: record(&ready_end())});
    object["spec"]["containers"][0]["resources"] = cpu("380m", "750m");
    let object = serde_json::from_value(object)?;
    pods.create(&PostParams::default(), &object).await?;
    eventually("it is told", SOON, || async {
        let metrics = cluster.replicas[0].metrics().await?;
        ensure!(written(&metrics, "resize", "DryRun") == 1);
        Ok(())
    })
    .await?;
    let log = cluster.plane.folder().join("headstart-0.log");
    let log = std::fs::read_to_string(log)?;
    let lines: Vec<_> = log
        .lines()
        .filter(|line| line.contains("dry run: the pod"))
        .collect();
    ensure!(lines.len() == 3, "{lines:?}");
    let last: Value = serde_json::from_str(lines[2])?;
    ensure!(last["what"] == "app 380m/750m -> 250m/500m", "{last}");
    let now = serde_json::to_value(pods.get("earlier").await?)?;
    ensure!(*cpu_of(&now) == cpu("380m", "750m"), "{now}");
    record_of(&now)
        .contains(r#""state":"Active""#)
        .then_some(())
        .context("its record was changed")
}
