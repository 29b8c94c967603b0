//! The cases that need a real node, under their ids.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use testbed::{eventually, rest::STRATEGIC};

use crate::{
    cluster::Cluster,
    objects::{
        SOON, apply_boosts, boost, cgroup, claim, condition_of, container, cpu, create,
        create_boosted, deployment, exec, get, is, lasting_writes, make_ready, namespace, percent,
        pod, record, remove_namespace, runs, size, until, until_finished, until_limit, writes,
    },
    scenarios::install::settled,
};

const NS: &str = "cases";

pub(crate) async fn cases(cluster: &mut Cluster) -> Result<Vec<String>> {
    namespace(cluster, NS).await?;
    let policies = json!([percent("app", 50)]);
    let mut both = boost(
        NS,
        "both",
        &json!([percent("app", 50), percent("side", 50)]),
    );
    both["spec"]["durationPolicy"] =
        json!({"containerCondition": "Started", "fixedDuration": {"unit": "Minutes", "value": 30}});
    let mut sidecars = boost(
        NS,
        "sidecars",
        &json!([{
            "matchContainers": {"type": "RegexName", "value": ".*", "includeSidecars": true}, "percentageIncrease": {"value": 100},
        }]),
    );
    sidecars["spec"]["durationPolicy"]["fixedDuration"] = json!({"unit": "Minutes", "value": 30});
    apply_boosts(
        cluster,
        &[
            boost(NS, "app", &policies),
            boost(NS, "more", &json!([percent("app", 100)])),
            both,
            sidecars,
        ],
    )
    .await?;

    let mut done = Vec::new();
    d1_e1_e20(cluster).await.context("D1, E1, E20")?;
    done.push("D1, E1, E20");
    clear(cluster).await?;
    d2(cluster).await.context("D2")?;
    done.push("D2");
    clear(cluster).await?;
    d4(cluster).await.context("D4")?;
    done.push("D4");
    clear(cluster).await?;
    d6(cluster).await.context("D6")?;
    done.push("D6");
    clear(cluster).await?;
    d35(cluster).await.context("D35")?;
    done.push("D35");
    clear(cluster).await?;
    d36(cluster).await.context("D36")?;
    done.push("D36");
    clear(cluster).await?;
    d37(cluster).await.context("D37")?;
    done.push("D37");
    clear(cluster).await?;
    d38(cluster).await.context("D38")?;
    done.push("D38");
    clear(cluster).await?;
    d39(cluster).await.context("D39")?;
    done.push("D39");
    clear(cluster).await?;
    e17(cluster).await.context("E17")?;
    done.push("E17");
    clear(cluster).await?;
    e18(cluster).await.context("E18")?;
    done.push("E18");
    clear(cluster).await?;
    e19(cluster).await.context("E19")?;
    done.push("E19");
    clear(cluster).await?;
    d3(cluster).await.context("D3")?;
    done.push("D3");
    clear(cluster).await?;
    remove_namespace(cluster, NS).await?;
    Ok(vec![format!("on a real node: {}", done.join(", "))])
}

/// The node is small: no case leaves pods to the next one.
async fn clear(cluster: &Cluster) -> Result<()> {
    cluster
        .kubectl(&format!(
            "delete deployment,pod -n {NS} --all --timeout=60s"
        ))
        .await
        .map(drop)
}

/// Creates a pod of one container, and waits until it runs boosted like this.
async fn boosted(
    cluster: &Cluster,
    name: &str,
    app: &str,
    resources: &Value,
    boosted: &str,
) -> Result<Value> {
    let wanted = pod(NS, name, app, &[container("app", resources, "")]);
    let pod = create_boosted(cluster, &wanted).await?;
    ensure!(size(&pod, "app") == boosted, "it has {}", size(&pod, "app"));
    Ok(pod)
}

/// Makes it Ready, and waits until it is finished with this size, in the cgroup too where a limit is told.
async fn ends(cluster: &Cluster, name: &str, original: &str, milli: Option<u64>) -> Result<Value> {
    let cgroup = cgroup(cluster, &get(cluster, NS, name).await?, "app")?;
    make_ready(cluster, NS, name, "app").await?;
    let pod = until_finished(cluster, NS, name).await?;
    ensure!(
        size(&pod, "app") == original,
        "it has {}",
        size(&pod, "app")
    );
    ensure!(record(&pod)["endedBy"] == "Condition", "{}", record(&pod));
    if let Some(milli) = milli {
        until_limit(&cgroup, milli).await?;
    }
    Ok(pod)
}

/// Exactly two writes, the resize and then finish, which waits until the kubelet has caught up.
async fn d1_e1_e20(cluster: &Cluster) -> Result<()> {
    let before = boosted(cluster, "d1", "app", &cpu("250m", "500m"), "380m/750m").await?;
    let after = ends(cluster, "d1", "250m/500m", Some(500)).await?;
    ensure!(
        after["metadata"]["uid"] == before["metadata"]["uid"],
        "it is another pod"
    );
    let (observed, generation) = (
        &after["status"]["observedGeneration"],
        &after["metadata"]["generation"],
    );
    ensure!(
        observed == generation,
        "the kubelet has seen {observed} of {generation}"
    );
    let writes = lasting_writes(cluster, NS, "d1")?;
    ensure!(
        writes.len() == 2 && writes.iter().all(|write| write.code == 200),
        "it was written so: {writes:?}"
    );
    let (resize, finish) = (&writes[0], &writes[1]);
    ensure!(resize.is_resize && !finish.is_resize, "in another order");
    let resources = json!([{"name": "app", "resources": {"requests": {"cpu": "250m"}, "limits": {"cpu": "500m"}}}]);
    ensure!(
        resize.body["spec"]["containers"] == resources,
        "{}",
        resize.body
    );
    for write in [resize, finish] {
        let metadata = &write.body["metadata"];
        ensure!(
            metadata["uid"] == before["metadata"]["uid"] && metadata["resourceVersion"].is_string(),
            "{metadata}"
        );
    }
    ensure!(finish.body.get("spec").is_none(), "{}", finish.body);
    Ok(())
}

async fn d2(cluster: &Cluster) -> Result<()> {
    boosted(cluster, "d2", "app", &cpu("250m", "-"), "380m/-").await?;
    ends(cluster, "d2", "250m/-", None).await?;
    let writes = writes(cluster, NS, "d2")?;
    ensure!(
        writes[0].body["spec"]["containers"][0]["resources"]
            == json!({"requests": {"cpu": "250m"}}),
        "{}",
        writes[0].body
    );
    Ok(())
}

/// Limits are removed while the boost lasts, and are put back: `REMOVE_LIMITS` is set on the Deployment, as people set it.
async fn d3(cluster: &Cluster) -> Result<()> {
    cluster
        .kubectl("set env -n headstart-system deployment/headstart REMOVE_LIMITS=true")
        .await?;
    settled(cluster).await?;
    let pod = boosted(cluster, "d3", "app", &cpu("250m", "500m"), "380m/-").await?;
    let limit = cgroup(cluster, &pod, "app")?.limit()?;
    ensure!(limit.is_none(), "the cgroup has a limit of {limit:?}");
    ends(cluster, "d3", "250m/500m", Some(500)).await?;
    cluster
        .kubectl("set env -n headstart-system deployment/headstart REMOVE_LIMITS-")
        .await?;
    settled(cluster).await
}

fn guaranteed() -> Value {
    json!({"requests": {"cpu": "200m", "memory": "32Mi"}, "limits": {"cpu": "200m", "memory": "32Mi"}})
}

async fn d4(cluster: &Cluster) -> Result<()> {
    let pod = boosted(cluster, "d4", "more", &guaranteed(), "400m/400m").await?;
    ensure!(
        pod["status"]["qosClass"] == "Guaranteed",
        "{}",
        pod["status"]["qosClass"]
    );
    let pod = ends(cluster, "d4", "200m/200m", Some(200)).await?;
    ensure!(
        pod["status"]["qosClass"] == "Guaranteed",
        "{}",
        pod["status"]["qosClass"]
    );
    Ok(())
}

/// A sidecar is boosted and taken back with the pod's own containers, in one PATCH.
async fn d6(cluster: &Cluster) -> Result<()> {
    let mut wanted = pod(
        NS,
        "d6",
        "sidecars",
        &[container("app", &cpu("250m", "500m"), "")],
    );
    let mut side = container("side", &cpu("50m", "100m"), "touch /tmp/side");
    side["restartPolicy"] = "Always".into();
    side.as_object_mut()
        .context("a container is an object")?
        .remove("readinessProbe");
    wanted["spec"]["initContainers"] = json!([side]);
    create(cluster, &wanted).await?;
    let pod = until(cluster, NS, "d6", "runs boosted", runs).await?;
    ensure!(
        size(&pod, "app") == "500m/1" && size(&pod, "side") == "100m/200m",
        "{} {}",
        size(&pod, "app"),
        size(&pod, "side")
    );
    let pod = ends(cluster, "d6", "250m/500m", Some(500)).await?;
    ensure!(size(&pod, "side") == "50m/100m", "{}", size(&pod, "side"));
    let writes = lasting_writes(cluster, NS, "d6")?;
    ensure!(
        writes.len() == 2 && writes[0].body["spec"]["initContainers"][0]["name"] == "side",
        "{}",
        writes[0].body
    );
    Ok(())
}

/// Each container's boost ends when it has started by itself.
async fn d35(cluster: &Cluster) -> Result<()> {
    let with_startup = |name: &str| {
        let mut one = container(name, &cpu("100m", "200m"), "");
        one["startupProbe"] = json!({"exec": {"command": ["/bin/test", "-e", format!("/tmp/{name}")]}, "periodSeconds": 1, "failureThreshold": 300});
        one
    };
    let containers = [with_startup("app"), with_startup("side")];
    create_boosted(cluster, &pod(NS, "d35", "both", &containers)).await?;
    let start = |name: &'static str| async move {
        exec(cluster, NS, "d35", name, &format!("touch /tmp/{name}")).await
    };
    start("app").await?;
    let pod = until(cluster, NS, "d35", "has taken app back", |pod| {
        size(pod, "app") == "100m/200m"
    })
    .await?;
    ensure!(
        size(&pod, "side") == "150m/300m"
            && claim(&pod).is_some()
            && record(&pod)["state"] == "Active",
        "{pod}"
    );
    start("side").await?;
    let pod = until_finished(cluster, NS, "d35").await?;
    ensure!(
        size(&pod, "side") == "100m/200m" && record(&pod)["endedBy"] == "Condition",
        "{pod}"
    );
    Ok(())
}

/// Without a probe a container is Ready as soon as it runs.
async fn d36(cluster: &Cluster) -> Result<()> {
    let mut app = container("app", &cpu("100m", "200m"), "");
    app.as_object_mut()
        .context("a container is an object")?
        .remove("readinessProbe");
    create(cluster, &pod(NS, "d36", "app", &[app])).await?;
    let pod = until_finished(cluster, NS, "d36").await?;
    ensure!(size(&pod, "app") == "100m/200m" && runs(&pod), "{pod}");
    Ok(())
}

/// A resize is no disruption: a budget that lets no pod go does not keep it.
async fn d37(cluster: &Cluster) -> Result<()> {
    let app = container("app", &cpu("100m", "200m"), "touch /tmp/ready");
    let mut template = pod(NS, "d37", "app", &[app]);
    let labels = json!({"app": "app", "case": "d37"});
    template["metadata"]["labels"] = labels.clone();
    let list = json!({"apiVersion": "v1", "kind": "List", "items": [
        {
            "apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": {"name": "d37", "namespace": NS},
            "spec": {"minAvailable": 1, "selector": {"matchLabels": {"case": "d37"}}},
        },
        deployment(1, &labels, &template),
    ]});
    cluster.plane.apply(&list.to_string()).await?;
    eventually("the Deployment's pod is finished", SOON, || async {
        let path = format!("{}?labelSelector=case%3Dd37", testbed::rest::pods(NS));
        let list = cluster.rest().get(&path).await?.accepted()?;
        let pod = &list["items"][0];
        ensure!(
            record(pod)["endedBy"] == "Condition" && size(pod, "app") == "100m/200m",
            "{}",
            pod["metadata"]
        );
        ensure!(
            pod["status"]["containerStatuses"][0]["restartCount"] == 0,
            "it was restarted"
        );
        Ok(())
    })
    .await
}

/// A crash after the boost has ended: nothing of ours, and it starts again with what it asked for.
async fn d38(cluster: &Cluster) -> Result<()> {
    boosted(cluster, "d38", "app", &cpu("100m", "200m"), "150m/300m").await?;
    ends(cluster, "d38", "100m/200m", Some(200)).await?;
    let before = writes(cluster, NS, "d38")?.len();
    let pod = crash(cluster, "d38").await?;
    ensure!(
        size(&pod, "app") == "100m/200m" && claim(&pod).is_none(),
        "{pod}"
    );
    ensure!(
        cgroup(cluster, &pod, "app")?.limit()? == Some(200),
        "the new container has {:?}",
        cgroup(cluster, &pod, "app")?.limit()?
    );
    ensure!(
        writes(cluster, NS, "d38")?.len() == before,
        "something was written"
    );
    Ok(())
}

/// A crash while boosted: still boosted, and the same rule ends it.
async fn d39(cluster: &Cluster) -> Result<()> {
    boosted(cluster, "d39", "app", &cpu("100m", "200m"), "150m/300m").await?;
    let pod = crash(cluster, "d39").await?;
    ensure!(
        size(&pod, "app") == "150m/300m" && claim(&pod).is_some(),
        "{pod}"
    );
    ensure!(
        cgroup(cluster, &pod, "app")?.limit()? == Some(300),
        "the new container has another limit"
    );
    ensure!(
        writes(cluster, NS, "d39")?.is_empty(),
        "something was written"
    );
    ends(cluster, "d39", "100m/200m", Some(200)).await.map(drop)
}

/// Ends what the container's first process waits for, and with it the container; waits until the next one runs.
async fn crash(cluster: &Cluster, name: &str) -> Result<Value> {
    // Not the first process itself: from inside, the kernel keeps signals that it has no handler for from it.
    exec(cluster, NS, name, "app", "kill -TERM -1").await?;
    let restarted = |pod: &Value| {
        runs(pod) && pod["status"]["containerStatuses"][0]["restartCount"].as_u64() >= Some(1)
    };
    until(cluster, NS, name, "has been restarted", restarted).await
}

/// A tenant's own resize that has to wait keeps ours waiting too: one pod is resized as a whole.
async fn e17(cluster: &Cluster) -> Result<()> {
    let boosted = boosted(cluster, "e17", "app", &cpu("100m", "200m"), "150m/300m").await?;
    // More memory than is free, and less than the node has.
    let node = cluster
        .rest()
        .get("/api/v1/nodes/node-1")
        .await?
        .accepted()?;
    let memory = node["status"]["allocatable"]["memory"]
        .as_str()
        .unwrap_or_default()
        .trim_end_matches("Ki")
        .parse::<u64>()?;
    let mut filler = pod(
        NS,
        "filler",
        "filler",
        &[container("app", &cpu("10m", "-"), "")],
    );
    filler["spec"]["containers"][0]["resources"]["requests"]["memory"] =
        format!("{}Ki", memory * 6 / 10).into();
    filler["spec"]["nodeName"] = boosted["spec"]["nodeName"].clone();
    create(cluster, &filler).await?;
    until(cluster, NS, "filler", "runs", runs).await?;
    let more = format!("{}Ki", memory * 7 / 10);
    resize(cluster, "e17", &json!({"requests": {"memory": more}})).await?;
    until_resize(cluster, "e17", "PodResizePending", "Deferred").await?;
    make_ready(cluster, NS, "e17", "app").await?;
    let pod = until(cluster, NS, "e17", "is told to be stuck", |pod| {
        size(pod, "app") == "100m/200m"
    })
    .await?;
    event(cluster, "e17", "Deferred").await?;
    ensure!(claim(&pod).is_some(), "it is finished");
    cluster
        .kubectl(&format!("delete pod -n {NS} filler"))
        .await?;
    let pod = until_finished(cluster, NS, "e17").await?;
    ensure!(
        condition_of(&pod, "PodResizePending").is_none(),
        "{}",
        pod["status"]
    );
    Ok(())
}

/// A Guaranteed pod on a node with a static CPU manager can't be resized, now or ever.
async fn e18(cluster: &mut Cluster) -> Result<()> {
    if cluster.nodes.len() == 1 {
        cluster.add_node().await?;
    }
    let mut wanted = pod(NS, "e18", "more", &[container("app", &guaranteed(), "")]);
    wanted["spec"]["nodeSelector"] = json!({"kubernetes.io/hostname": "node-2"});
    create_boosted(cluster, &wanted).await?;
    make_ready(cluster, NS, "e18", "app").await?;
    until_resize(cluster, "e18", "PodResizePending", "Infeasible").await?;
    event(cluster, "e18", "Infeasible").await?;
    let before = writes(cluster, NS, "e18")?.len();
    // No hot loop: what is permanent is tried about once a minute.
    tokio::time::sleep(Duration::from_secs(10)).await;
    let pod = get(cluster, NS, "e18").await?;
    ensure!(runs(&pod) && claim(&pod).is_some(), "{pod}");
    let writes = writes(cluster, NS, "e18")?.len();
    ensure!(writes <= before + 1, "{writes} writes");
    Ok(())
}

/// The kubelet takes a resize and fails at it: less memory than the container uses. Ours waits, with its text in the Event.
async fn e19(cluster: &Cluster) -> Result<()> {
    let mut resources = cpu("100m", "200m");
    resources["requests"]["memory"] = "64Mi".into();
    resources["limits"]["memory"] = "64Mi".into();
    let script = "dd if=/dev/zero of=/dev/shm/fill bs=1048576 count=30 2>/dev/null";
    let app = container("app", &resources, script);
    create_boosted(cluster, &pod(NS, "e19", "app", &[app])).await?;
    eventually("the memory is used", SOON, || async {
        let used = exec(cluster, NS, "e19", "app", "test -s /dev/shm/fill").await?;
        ensure!(used.status.success(), "{used:?}");
        Ok(())
    })
    .await?;
    let less = json!({"requests": {"memory": "8Mi"}, "limits": {"memory": "8Mi"}});
    resize(cluster, "e19", &less).await?;
    until_resize(cluster, "e19", "PodResizeInProgress", "Error").await?;
    make_ready(cluster, NS, "e19", "app").await?;
    event(cluster, "e19", "Error").await?;
    let pod = get(cluster, NS, "e19").await?;
    ensure!(claim(&pod).is_some(), "it is finished: {}", pod["status"]);
    // Its owner gives the memory back.
    resize(
        cluster,
        "e19",
        &json!({"requests": {"memory": "64Mi"}, "limits": {"memory": "64Mi"}}),
    )
    .await?;
    let pod = until_finished(cluster, NS, "e19").await?;
    ensure!(
        size(&pod, "app") == "100m/200m" && is(&pod, "Ready"),
        "{pod}"
    );
    Ok(())
}

/// A resize by somebody else.
async fn resize(cluster: &Cluster, name: &str, resources: &Value) -> Result<()> {
    let path = format!("{}/{name}/resize", testbed::rest::pods(NS));
    let body = json!({"spec": {"containers": [{"name": "app", "resources": resources}]}});
    cluster
        .rest()
        .patch(&path, STRATEGIC, &body)
        .await?
        .accepted()
        .map(drop)
}

/// Waits until the kubelet says this of a pod's resize.
async fn until_resize(cluster: &Cluster, name: &str, condition: &str, reason: &str) -> Result<()> {
    let says = |pod: &Value| {
        condition_of(pod, condition).is_some_and(|condition| condition["reason"] == reason)
    };
    until(cluster, NS, name, reason, says).await.map(drop)
}

/// Waits for a Warning about a pod that names the reason.
async fn event(cluster: &Cluster, name: &str, reason: &str) -> Result<()> {
    eventually("a Warning tells of it", SOON, || async {
        let line = format!(
            "get events -n {NS} --field-selector involvedObject.name={name},type=Warning -o json"
        );
        let list: Value = serde_json::from_str(&cluster.kubectl(&line).await?)?;
        let items = list["items"].as_array().into_iter().flatten();
        let mut ours = items.filter(|event| {
            event["reportingComponent"]
                .as_str()
                .is_some_and(|who| who.contains("headstart"))
        });
        ensure!(
            ours.any(|event| event.to_string().contains(reason)),
            "{list}"
        );
        Ok(())
    })
    .await
}
