//! The same from all replicas: from the leader, from followers, and from the next leader after a crash.

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use testbed::{
    Cluster, Operator,
    cluster::run,
    eventually,
    rest::{STRATEGIC, pods},
    view::{API, send_to, until_available},
};

use super::{KEY, SOON, cluster, direct::Caller, kubectl, kubectl_fails, rest, start};

const ABOUT: &str = "visibility.autoscaling.x-k8s.io";

/// An answer without what it says of the replica, and that.
fn apart(mut answer: Value) -> (Value, Value) {
    let metadata = answer["metadata"].as_object_mut();
    let about = metadata.and_then(|metadata| metadata.remove("annotations"));
    (answer, about.unwrap_or_default())
}

async fn answers(cluster: &Cluster, replica: &Operator) -> Result<Vec<(Value, Value)>> {
    let caller = Caller::admin(cluster).await?;
    let mut answers = Vec::new();
    for path in [
        "boostedpods",
        "namespaces/shop/boostedpods/slow-1",
        "boostsummaries",
    ] {
        let (code, answer) = caller.get(replica, &format!("{API}/{path}"), &[]).await?;
        ensure!(code == 200, "{path}: {code} {answer}");
        answers.push(apart(answer));
    }
    Ok(answers)
}

#[test]
fn each_says_the_same_and_who_it_is() -> Result<()> {
    run(async {
        let cluster = cluster().await?;
        let leader = cluster.leader_other_than("").await?;
        let mut first = None;
        for replica in &cluster.replicas {
            let answers = answers(cluster, replica).await?;
            for (_, about) in &answers {
                ensure!(
                    about[format!("{ABOUT}/replica")] == replica.name(),
                    "{about}"
                );
                let leads = (replica.name() == leader).to_string();
                ensure!(about[format!("{ABOUT}/leader")] == leads, "{about}");
                let age = about[format!("{ABOUT}/cache-age-seconds")].as_str();
                let age: u64 = age.context("no age")?.parse()?;
                ensure!(age < 3600, "{about}");
            }
            let answers: Vec<_> = answers.into_iter().map(|(answer, _)| answer).collect();
            let first = first.get_or_insert_with(|| answers.clone());
            ensure!(*first == answers, "{first:?} and {answers:?}");
        }
        Ok(())
    })
}

/// Through the aggregator and kubectl; in between the leader crashes.
#[test]
fn a_crash_changes_no_answer() -> Result<()> {
    run(async {
        let mut cluster = start(3).await?;
        let leader = cluster.leader_other_than("").await?;
        let line = "get boostedpods -A -o jsonpath={range.items[*]}{.metadata.name}/{.metadata.resourceVersion}/{.status.phase}/{.status.dueTime};{end}";
        let mut said = Vec::new();
        for replica in &cluster.replicas {
            send_to(&cluster.plane, replica.backend().address).await?;
            said.push(eventually("it answers", SOON, || kubectl(&cluster, line)).await?);
        }
        send_to(&cluster.plane, cluster.balancer.address()).await?;
        cluster.take_replica(&leader)?.crash()?;
        said.push(eventually("the others answer", SOON, || kubectl(&cluster, line)).await?);
        cluster.leader_other_than(&leader).await?;
        said.push(kubectl(&cluster, line).await?);
        ensure!(said[0].matches(';').count() == 5, "{}", said[0]);
        ensure!(said.iter().all(|one| *one == said[0]), "{said:?}");
        Ok(())
    })
}

/// A record that is destroyed, a boost that is gone, and a node that does not resize show on all of them.
#[test]
fn what_is_wrong_shows_everywhere() -> Result<()> {
    run(async {
        let cluster = start(2).await?;
        let rest = rest(&cluster);
        let annotations = serde_json::json!({"metadata": {"annotations": {KEY: "oops"}}});
        let path = format!("{}/fast-0", pods("shop"));
        rest.patch(&path, STRATEGIC, &annotations)
            .await?
            .accepted()?;
        kubectl(&cluster, "delete scb slow -n shop").await?;
        kubectl(
            &cluster,
            "annotate pod fast-1 -n shop testbed/resize=infeasible",
        )
        .await?;
        let conditions = serde_json::json!({"status": {"conditions": [
            {"type": "Ready", "status": "True", "lastTransitionTime": "2026-12-01T00:00:00Z"},
        ]}});
        let path = format!("{}/fast-1/status", pods("shop"));
        rest.patch(&path, STRATEGIC, &conditions)
            .await?
            .accepted()?;
        let expected = [
            ("fast-0", "Unreadable", "Unreadable"),
            ("fast-1", "Stuck", "Infeasible"),
            ("fast-2", "Active", "NotDue"),
            ("slow-0", "Orphaned", "NotDue"),
            ("slow-1", "Orphaned", "NotDue"),
        ];
        let caller = Caller::admin(&cluster).await?;
        for replica in &cluster.replicas {
            eventually("it shows", SOON, || async {
                let (_, list) = caller
                    .get(replica, &format!("{API}/boostedpods"), &[])
                    .await?;
                for (item, (name, phase, reason)) in
                    list["items"].as_array().into_iter().flatten().zip(expected)
                {
                    let status = &item["status"];
                    ensure!(
                        item["metadata"]["name"] == name
                            && status["phase"] == phase
                            && status["reason"] == reason,
                        "{item}"
                    );
                }
                ensure!(list["items"].as_array().map(Vec::len) == Some(5), "{list}");
                Ok(())
            })
            .await?;
        }
        Ok(())
    })
}

/// What an API server can show without a controller manager: the API goes stale, and what is not ours goes on. (That it keeps
/// namespaces from being deleted, and how that ends, is shown in `tests/e2e`.)
#[test]
fn when_all_are_away_only_the_view_is() -> Result<()> {
    run(async {
        let mut cluster = start(1).await?;
        cluster.take_replica("headstart-0")?.crash()?;
        until_available(&cluster.plane, "False").await?;
        let failed = kubectl_fails(&cluster, "get boostedpods -A").await?;
        ensure!(
            failed.contains("ServiceUnavailable")
                || failed.contains("unable to handle")
                || failed.contains("doesn't have a resource type"),
            "{failed}"
        );
        kubectl(&cluster, "get pods -n shop").await?;
        kubectl(&cluster, "delete pod fast-0 -n shop --wait=false").await?;
        kubectl(
            &cluster,
            "delete apiservice v1alpha1.visibility.autoscaling.x-k8s.io",
        )
        .await?;
        kubectl(&cluster, "api-resources -o name").await.map(drop)
    })
}
