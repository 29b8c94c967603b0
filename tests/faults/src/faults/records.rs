//! What befalls records: they are spoilt, forged, or of another version.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use futures::{FutureExt as _, future::try_join_all};
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, ResourceExt as _,
    api::{Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};
use testbed::{
    eventually,
    lives::{KEY, LIMIT, NAMESPACE, ORIGINAL},
};

use super::{Fault, Repeat, Round};
use crate::bed::{GROUP, PODS, SOON};

/// What a boost sets.
const BOOSTED: &str = "2m";
/// A tenant with the built-in role `edit`, and the right to write the status of pods.
const TENANT: &str = "tenant";
/// What makes repairs possible.
const OWNER: &str = "owner";

pub(super) fn faults() -> Vec<Fault> {
    vec![
        Fault {
            number: 14,
            what: "records are spoilt: no JSON, wrong types, huge quantities, 200 kB",
            expected: "never deleted; reverted by the owner's template, else left alone and named `Unreadable`",
            repeat: Repeat::Timing,
            run: |round| spoilt(round).boxed(),
        },
        Fault {
            number: 15,
            what: "records are forged or removed by a tenant",
            expected: "refused by the policy; forged by an administrator, they raise nothing",
            repeat: Repeat::Timing,
            run: |round| forged(round).boxed(),
        },
        Fault {
            number: 16,
            what: "pods are created with a record already, with and without a webhook",
            expected: "no pod ever gets more than it asked for at rest",
            repeat: Repeat::Timing,
            run: |round| born_with_a_record(round).boxed(),
        },
        Fault {
            number: 37,
            what: "records of upstream's versions and of later ones of ours",
            expected: "reverted; what is unknown in them stays",
            repeat: Repeat::Once,
            run: |round| other_versions(round).boxed(),
        },
    ]
}

async fn annotate(pods: &Api<Pod>, name: &str, record: &Value) -> kube::Result<Pod> {
    let patch = json!({"metadata": {"annotations": {KEY: record}}});
    pods.patch(name, &PatchParams::default(), &Patch::Merge(patch))
        .await
}

async fn spoilt(round: &mut Round<'_>) -> Result<()> {
    let owner = owner(round).await?;
    let mut pods = Vec::new();
    for index in 0..PODS {
        let mut pod = round.bed.pod(None)?;
        pod.metadata.owner_references = Some(serde_json::from_value(if index % 2 == 0 {
            json!([owner])
        } else {
            json!([])
        })?);
        pods.push(pod);
    }
    let pods = round.bed.create(pods).await?;
    round.bed.lives.until_running(PODS, SOON).await?;
    let api = round.bed.pods();
    let spoil = pods.iter().map(|pod| {
        let record = spoil(round.random.usize(..4));
        let api = &api;
        async move {
            annotate(api, &pod.name_any(), &record).await?;
            anyhow::Ok(record)
        }
    });
    let records = try_join_all(spoil).await?;
    round.bed.make_ready(&pods).await?;
    round.bed.lives.until_finished(PODS / 2, SOON).await?;
    let mut left = Vec::new();
    for (pod, record) in pods.iter().zip(records) {
        let now = api.get(&pod.name_any()).await?;
        if pod.owner_references().is_empty() {
            let claimed = now.labels().contains_key(KEY);
            let record = record.as_str().map(str::to_owned);
            ensure!(claimed, "{} lost its claim", pod.name_any());
            ensure!(
                now.annotations().get(KEY).cloned() == record,
                "a record was changed"
            );
            left.push(now);
        }
    }
    eventually("they are named", SOON, || async {
        let unreadable = r#"headstart_boosts_stuck_total{reason="Unreadable"}"#;
        for replica in &round.bed.replicas {
            if replica.operator.metrics().await?.contains(unreadable) {
                return Ok(());
            }
        }
        anyhow::bail!("no replica counts them")
    })
    .await?;
    round.figures.count("repaired", PODS - left.len());
    round.figures.count("left alone", left.len());
    round.bed.delete(&left).await
}

/// The ReplicaSet that pods may say they are of. (Nobody here makes pods of it.)
async fn owner(round: &Round<'_>) -> Result<Value> {
    let container = json!({
        "name": "app", "image": "app", "resources": {"requests": {"cpu": ORIGINAL}, "limits": {"cpu": LIMIT}},
    });
    let labels = json!({"group": GROUP});
    let set = json!({
        "apiVersion": "apps/v1", "kind": "ReplicaSet", "metadata": {"name": OWNER, "namespace": NAMESPACE},
        "spec": {
            "replicas": 0, "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": {"containers": [container]}},
        },
    });
    round.bed.plane.apply(&set.to_string()).await?;
    let uid = [
        "get",
        "rs",
        "-n",
        NAMESPACE,
        OWNER,
        "-o",
        "jsonpath={.metadata.uid}",
    ];
    let uid = round.bed.plane.kubectl_ok(&uid).await?;
    Ok(json!({
        "apiVersion": "apps/v1", "kind": "ReplicaSet", "name": OWNER, "uid": uid.trim(), "controller": true,
    }))
}

fn spoil(how: usize) -> Value {
    let text = match how {
        0 => "{\"initCPURequests\":".to_owned(),
        1 => json!({"state": "Active", "initCPURequests": {"app": 5}, "initCPULimits": ["app"]})
            .to_string(),
        2 => {
            json!({"initCPURequests": {"app": "9e99"}, "initCPULimits": {"app": "-1"}}).to_string()
        }
        _ => "x".repeat(200_000),
    };
    json!(text)
}

async fn forged(round: &mut Round<'_>) -> Result<()> {
    let plane = &round.bed.plane;
    for (name, role) in [
        ("edit", "edit"),
        ("status", "system:controller:node-controller"),
    ] {
        let binding = json!({
            "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding",
            "metadata": {"name": format!("{TENANT}-{name}"), "namespace": NAMESPACE},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
            "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": TENANT}],
        });
        plane.apply(&binding.to_string()).await?;
    }
    let tenant = Api::<Pod>::namespaced(plane.client_for(TENANT, &[]).await?, NAMESPACE);
    let pods = round.bed.create_waiting(2).await?;
    let name = pods[0].name_any();
    let forged = json!(forge("64", BOOSTED).to_string());
    for record in [&forged, &Value::Null] {
        let refused = annotate(&tenant, &name, record).await;
        ensure!(refused.is_err(), "a tenant wrote the record {record}");
        let patch = Patch::Merge(json!({"metadata": {"annotations": {KEY: record}}}));
        let params = PatchParams::default();
        let refused = tenant.patch_status(&name, &params, &patch).await;
        ensure!(
            refused.is_err(),
            "a tenant wrote the record {record} with the status"
        );
        round.figures.count("refused", 2);
    }
    let api = round.bed.pods();
    annotate(&api, &name, &forged).await?;
    round.bed.make_ready(&pods).await?;
    round.bed.lives.until_finished(1, SOON).await?;
    let ended = eventually("the forged one is finished", SOON, || async {
        let pod = api.get(&name).await?;
        ensure!(!pod.labels().contains_key(KEY), "it has its claim");
        Ok(pod)
    });
    let cpu = request(&ended.await?)?;
    ensure!(cpu == BOOSTED, "a forged record made {cpu} of {BOOSTED}");
    // Its owner has what he asked for by that: it is the one pod that keeps its boost.
    round.bed.delete(&pods[..1]).await
}

/// A record that says what somebody likes.
fn forge(original: &str, boosted: &str) -> Value {
    json!({
        "state": "Active", "timestamp": "2026-01-01T00:00:00Z",
        "initCPURequests": {"app": original}, "initCPULimits": {"app": original},
        "boostedCPURequests": {"app": boosted}, "boostedCPULimits": {"app": "10m"},
        "boost": GROUP, "end": {"fixedSeconds": 1, "deadlineSeconds": 60},
    })
}

fn request(pod: &Pod) -> Result<String> {
    let pod = serde_json::to_value(pod)?;
    let cpu = pod.pointer("/spec/containers/0/resources/requests/cpu");
    let cpu = cpu.and_then(Value::as_str).map(str::to_owned);
    cpu.context("it has no CPU request")
}

async fn born_with_a_record(round: &mut Round<'_>) -> Result<()> {
    let with_a_record = |pod: &mut Pod, record: &Value| {
        let annotations = pod.annotations_mut();
        annotations.insert(KEY.to_owned(), record.to_string());
        pod.labels_mut().insert(KEY.to_owned(), GROUP.to_owned());
    };
    let mut pods = Vec::new();
    for forged in [forge("64", "64"), forge("64", ORIGINAL), forge("0", "2")] {
        let mut pod = round.bed.pod(Some(Duration::ZERO))?;
        with_a_record(&mut pod, &forged);
        pods.push(pod);
    }
    round.bed.create(pods).await?;
    round.bed.lives.until_finished(3, SOON).await?;

    // Without a webhook, the record stays as it is.
    for replica in &round.bed.replicas {
        round.bed.balancer.remove(replica.operator.backend());
    }
    let mut pod = round.bed.pod(Some(Duration::ZERO))?;
    with_a_record(&mut pod, &forge("64", ORIGINAL));
    let name = pod.name_any();
    let api = round.bed.pods();
    api.create(&PostParams::default(), &pod).await?;
    for replica in &round.bed.replicas {
        round.bed.balancer.add(replica.operator.backend());
    }
    let ended = eventually("it is finished", SOON, || async {
        let pod = api.get(&name).await?;
        ensure!(!pod.labels().contains_key(KEY), "it has its claim");
        Ok(pod)
    });
    let cpu = request(&ended.await?)?;
    ensure!(cpu == ORIGINAL, "a forged record made {cpu} of {ORIGINAL}");
    round.bed.until_ready().await
}

async fn other_versions(round: &mut Round<'_>) -> Result<()> {
    let originals = json!({"initCPURequests": {"app": ORIGINAL}, "initCPULimits": {"app": LIMIT}});
    let records = [
        // Up to upstream 0.20 and of 0.21, and what a later version of ours might add.
        json!({"timestamp": "2026-01-01T00:00:00Z"}),
        json!({"timestamp": "2026-01-01T00:00:00Z", "state": "Active"}),
        json!({
            "timestamp": "2026-01-01T00:00:00Z", "state": "Active", "weather": {"rain": true}, "boost": GROUP,
            "end": {"untilTheRainEnds": true, "condition": {"type": "Ready", "status": "True", "delaySeconds": 0}},
        }),
    ];
    let pods = round.bed.create_waiting(records.len()).await?;
    let api = round.bed.pods();
    for (pod, mut record) in pods.iter().zip(records) {
        let fields = record.as_object_mut().context("no object")?;
        fields.extend(originals.as_object().context("no object")?.clone());
        annotate(&api, &pod.name_any(), &json!(record.to_string())).await?;
    }
    round.bed.make_ready(&pods).await?;
    round.bed.lives.until_finished(pods.len(), SOON).await?;
    let last = api.get(&pods[2].name_any()).await?;
    let record = last.annotations().get(KEY).context("no record")?;
    let record: Value = serde_json::from_str(record)?;
    ensure!(
        record["weather"]["rain"] == true && record["state"] == "Reverted",
        "{record}"
    );
    round.figures.count("versions", pods.len());
    Ok(())
}
