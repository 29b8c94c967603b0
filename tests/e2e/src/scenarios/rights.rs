//! The audit log of the whole run beside the rights that the manifests give: every one was used, none was missing.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use testbed::eventually;

use crate::{
    cluster::Cluster,
    objects::{
        ACCOUNT, KEY, SOON, apply_boosts, boost, container, cpu, create, make_ready, namespace,
        percent, pod, remove_namespace, size, until_boosted, until_finished,
    },
};

const NS: &str = "rights";

/// Paths of the roles that every install has.
const ROLES: [&str; 2] = [
    "/apis/rbac.authorization.k8s.io/v1/clusterroles/headstart",
    "/apis/rbac.authorization.k8s.io/v1/namespaces/headstart-system/roles/headstart",
];

/// A right: verb and resource with its group.
pub(super) type Right = (String, String);

/// What no request ever shows: a policy asks for it (`policy-record.yaml`).
const ASKED_BY_POLICY: (&str, &str) = ("update", "autoscaling.x-k8s.io/startupcpuboosts/record");

pub(crate) async fn rights(cluster: &mut Cluster) -> Result<Vec<String>> {
    namespace(cluster, NS).await?;
    a_cluster_boost(cluster).await?;
    owners_are_asked(cluster).await?;
    remove_namespace(cluster, NS).await?;

    let granted = granted(cluster, &ROLES).await?;
    let events = eventually("every right was used", SOON, || async {
        let events = cluster.plane.audit_events()?;
        let used = used(&events);
        let mut unused = granted.difference(&used);
        let unused = unused.find(|(verb, what)| (verb.as_str(), what.as_str()) != ASKED_BY_POLICY);
        ensure!(unused.is_none(), "granted and never used: {unused:?}");
        Ok(events)
    })
    .await?;
    let beyond: Vec<_> = used(&events).difference(&granted).cloned().collect();
    ensure!(beyond.is_empty(), "used and not granted: {beyond:?}");
    let refused: Vec<String> = events
        .iter()
        .filter(|event| {
            event["user"]["username"] == ACCOUNT
                && event["annotations"]["authorization.k8s.io/decision"] == "forbid"
        })
        .map(|event| format!("{} {}", event["verb"], event["requestURI"]))
        .collect();
    ensure!(refused.is_empty(), "rights were missing: {refused:?}");
    Ok(vec![format!(
        "{} rights granted, each used, none missing in {} audit events",
        granted.len(),
        events.len()
    )])
}

/// Its status is written too.
async fn a_cluster_boost(cluster: &Cluster) -> Result<()> {
    let mut everywhere = boost(NS, "everywhere", &json!([percent("app", 100)]));
    everywhere["kind"] = "ClusterStartupCPUBoost".into();
    everywhere["metadata"] = json!({"name": "everywhere"});
    apply_boosts(cluster, &[everywhere]).await?;
    create(
        cluster,
        &pod(
            NS,
            "anywhere",
            "everywhere",
            &[container("app", &cpu("50m", "100m"), "touch /tmp/ready")],
        ),
    )
    .await?;
    until_finished(cluster, NS, "anywhere").await?;
    cluster.kubectl("delete cscb everywhere").await.map(drop)
}

/// Where a record is destroyed, the owner's template tells what the pod had.
async fn owners_are_asked(cluster: &Cluster) -> Result<()> {
    apply_boosts(
        cluster,
        &[boost(NS, "owned", &json!([percent("app", 100)]))],
    )
    .await?;
    let app = container("app", &cpu("20m", "40m"), "");
    let mut template = pod(NS, "", "owned", &[app]);
    template["spec"]["nodeSelector"] = json!({"kubernetes.io/hostname": "node-1"});
    let template = |policy: &str| {
        let mut spec = template["spec"].clone();
        spec["restartPolicy"] = policy.into();
        json!({"metadata": {"labels": {"app": "owned"}}, "spec": spec})
    };
    let selector = json!({"matchLabels": {"app": "owned"}});
    let always = template("Always");
    let owners = [
        json!({"apiVersion": "apps/v1", "kind": "ReplicaSet", "spec": {"replicas": 1, "selector": selector, "template": always}}),
        json!({"apiVersion": "apps/v1", "kind": "StatefulSet", "spec": {"replicas": 1, "selector": selector, "serviceName": "owned", "template": always}}),
        json!({"apiVersion": "apps/v1", "kind": "DaemonSet", "spec": {"selector": selector, "template": always}}),
        json!({"apiVersion": "batch/v1", "kind": "Job", "spec": {"template": template("Never")}}),
    ];
    for mut owner in owners {
        let kind = owner["kind"].as_str().unwrap_or_default().to_lowercase();
        owner["metadata"] = json!({"name": "owned", "namespace": NS});
        cluster.plane.apply(&owner.to_string()).await?;
        let name = eventually("its pod is there", SOON, || async {
            let list = cluster
                .rest()
                .get(&testbed::rest::pods(NS))
                .await?
                .accepted()?;
            let pods = list["items"].as_array().into_iter().flatten();
            let mut owned =
                pods.filter(|pod| pod["metadata"]["ownerReferences"][0]["kind"] == owner["kind"]);
            let pod = owned.next().context("it is not there")?;
            Ok(pod["metadata"]["name"]
                .as_str()
                .unwrap_or_default()
                .to_owned())
        })
        .await?;
        until_boosted(cluster, NS, &name, "owned").await?;
        cluster
            .kubectl(&format!(
                "annotate pod -n {NS} {name} --overwrite {KEY}=oops"
            ))
            .await?;
        make_ready(cluster, NS, &name, "app").await?;
        let pod = until_finished(cluster, NS, &name)
            .await
            .with_context(|| format!("the pod of a {kind}"))?;
        ensure!(size(&pod, "app") == "20m/40m", "{pod}");
        cluster
            .kubectl(&format!("delete {kind} -n {NS} owned"))
            .await?;
    }
    Ok(())
}

/// What roles of the manifests give to our account.
pub(super) async fn granted(cluster: &Cluster, roles: &[&str]) -> Result<BTreeSet<Right>> {
    let mut rights = BTreeSet::new();
    for path in roles {
        let role = cluster.rest().get(path).await?.accepted()?;
        for rule in role["rules"].as_array().into_iter().flatten() {
            for [group, resource, verb] in combinations(rule) {
                rights.insert((verb.to_owned(), join(group, resource)));
            }
        }
    }
    ensure!(!rights.is_empty(), "{roles:?} are empty");
    Ok(rights)
}

fn combinations(rule: &Value) -> Vec<[&str; 3]> {
    let list = |key: &str| {
        rule[key]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(Value::as_str)
            .collect::<Vec<_>>()
    };
    let (groups, resources, verbs) = (list("apiGroups"), list("resources"), list("verbs"));
    let mut all = Vec::new();
    for group in &groups {
        for resource in &resources {
            all.extend(verbs.iter().map(|verb| [*group, *resource, *verb]));
        }
    }
    all
}

fn join(group: &str, resource: &str) -> String {
    if group.is_empty() {
        resource.to_owned()
    } else {
        format!("{group}/{resource}")
    }
}

/// What our account did.
pub(super) fn used(events: &[Value]) -> BTreeSet<Right> {
    let ours = events
        .iter()
        .filter(|event| event["user"]["username"] == ACCOUNT);
    let right = |event: &Value| {
        let about = &event["objectRef"];
        let mut resource = about["resource"].as_str()?.to_owned();
        if let Some(sub) = about["subresource"].as_str() {
            resource = format!("{resource}/{sub}");
        }
        let group = about["apiGroup"].as_str().unwrap_or_default();
        Some((event["verb"].as_str()?.to_owned(), join(group, &resource)))
    };
    ours.filter_map(right).collect()
}
