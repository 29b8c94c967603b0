//! A tenant with the built-in role `edit`, in a cluster whose controllers aggregate roles and make pods of templates.
//!
//! What single requests may do is proved in `tests/security.rs`, without controllers.

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use testbed::{
    Rest, eventually,
    rest::{MERGE, pods},
};

use crate::{
    cluster::Cluster,
    objects::{
        KEY, SOON, apply_boosts, boost, claim, container, cpu, create_boosted, deployment, get, is,
        make_ready, namespace, percent, pod, remove_namespace, size, until_finished,
    },
};

const NS: &str = "tenant";

pub(crate) async fn tenant(cluster: &mut Cluster) -> Result<Vec<String>> {
    namespace(cluster, NS).await?;
    cluster
        .kubectl(&format!(
            "create rolebinding tenant -n {NS} --clusterrole=edit --user=tenant"
        ))
        .await?;
    let tenant = Rest::new(cluster.plane.client_for("tenant", &[]).await?, SOON);
    boosts_are_the_tenants(&tenant).await?;
    apply_boosts(cluster, &[boost(NS, "app", &json!([percent("app", 100)]))]).await?;
    let refused = records_are_not(cluster, &tenant).await?;
    a_template_lies_in_vain(cluster).await?;
    remove_namespace(cluster, NS).await?;
    Ok(vec![
        "edit may write boosts by aggregation".to_owned(),
        format!(
            "{refused} ways to change a record, each refused by the policy; the boost ended as it should"
        ),
        "a template with a forged record gets what it asks for, and no more after Ready".to_owned(),
    ])
}

/// By the role that the manifests bring, which the controllers have made a part of `edit`.
async fn boosts_are_the_tenants(tenant: &Rest) -> Result<()> {
    let path = format!("/apis/autoscaling.x-k8s.io/v1alpha1/namespaces/{NS}/startupcpuboosts");
    let mine = boost(NS, "mine", &json!([percent("app", 10)]));
    eventually("the tenant may make boosts", SOON, || async {
        tenant.post(&path, &mine).await?.accepted()
    })
    .await?;
    tenant.delete(&format!("{path}/mine")).await?.accepted()?;
    // Not those of the cluster.
    let mut everywhere = boost(NS, "everywhere", &json!([percent("app", 10)]));
    everywhere["kind"] = "ClusterStartupCPUBoost".into();
    everywhere["metadata"] = json!({"name": "everywhere"});
    let answer = tenant
        .post(
            "/apis/autoscaling.x-k8s.io/v1alpha1/clusterstartupcpuboosts",
            &everywhere,
        )
        .await?;
    ensure!(
        answer.code == 403,
        "a boost of the cluster: {}",
        answer.code
    );
    Ok(())
}

/// Each attempt at the record or the claim is refused; everything else of the pod is still the tenant's.
async fn records_are_not(cluster: &Cluster, tenant: &Rest) -> Result<usize> {
    let app = container("app", &cpu("50m", "100m"), "");
    let before = create_boosted(cluster, &pod(NS, "victim", "app", &[app])).await?;
    let path = format!("{}/victim", pods(NS));
    let attempts = [
        json!({"metadata": {"annotations": {KEY: null}}}),
        json!({"metadata": {"labels": {KEY: null}}}),
        json!({"metadata": {"labels": {KEY: "other"}}}),
        json!({"metadata": {"annotations": {KEY: r#"{"state":"Active","initCPURequests":{"app":"8"}}"#}}}),
        json!({"metadata": {"annotations": null, "labels": null}}),
    ];
    for attempt in &attempts {
        let answer = tenant.patch(&path, MERGE, attempt).await?;
        ensure!(
            answer.code == 403 && answer.said().contains("Headstart's record"),
            "{attempt}: {} {}",
            answer.code,
            answer.said()
        );
    }
    tenant
        .patch(
            &path,
            MERGE,
            &json!({"metadata": {"annotations": {"example.com/mine": "1"}}}),
        )
        .await?
        .accepted()?;
    for subresource in ["status", "resize"] {
        let answer = tenant
            .patch(&format!("{path}/{subresource}"), MERGE, &attempts[0])
            .await?;
        ensure!(answer.code == 403, "{subresource}: {}", answer.code);
    }
    let after = get(cluster, NS, "victim").await?;
    ensure!(
        after["metadata"]["annotations"][KEY] == before["metadata"]["annotations"][KEY],
        "the record has changed"
    );
    make_ready(cluster, NS, "victim", "app").await?;
    let pod = until_finished(cluster, NS, "victim").await?;
    ensure!(size(&pod, "app") == "50m/100m", "{}", size(&pod, "app"));
    Ok(attempts.len() + 2)
}

/// A Deployment whose template carries an Active record with originals of its own liking.
async fn a_template_lies_in_vain(cluster: &Cluster) -> Result<()> {
    let record = r#"{"state":"Active","timestamp":"2026-01-01T00:00:00Z","initCPURequests":{"app":"4"},"initCPULimits":{"app":"8"},"boostedCPURequests":{"app":"30m"},"boostedCPULimits":{"app":"60m"},"boost":"app","end":{"deadlineSeconds":2592000}}"#;
    let app = container("app", &cpu("30m", "60m"), "touch /tmp/ready");
    let mut liar = pod(NS, "liar", "liar", &[app]);
    liar["metadata"]["labels"][KEY] = "app".into();
    liar["metadata"]["annotations"] = json!({KEY: record});
    let deployment = deployment(1, &json!({"app": "liar"}), &liar);
    cluster.plane.apply(&deployment.to_string()).await?;
    let is_liar = |pod: &Value| pod["metadata"]["labels"]["app"] == "liar";
    eventually("the liar's pod is as it asked", SOON, || async {
        let list = cluster.rest().get(&pods(NS)).await?.accepted()?;
        let all = list["items"].as_array().cloned().unwrap_or_default();
        let pod = all.into_iter().find(is_liar).context("there is none")?;
        ensure!(is(&pod, "Ready"), "it is not Ready");
        ensure!(
            size(&pod, "app") == "30m/60m",
            "it has {}",
            size(&pod, "app")
        );
        ensure!(
            claim(&pod).is_none(),
            "it still has a claim: {}",
            pod["metadata"]
        );
        Ok(())
    })
    .await
}
