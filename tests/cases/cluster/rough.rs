//! What is done to a cluster that nobody else is on.

use anyhow::{Context, ensure};
use serde_json::{Value, json};
use testbed::eventually;

use super::bed::{Bed, SOON, operator};

const DEFINITIONS: &str = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";
const DEFINITION: &str = "startupcpuboosts.autoscaling.x-k8s.io";
const ROLE: &str = "/apis/rbac.authorization.k8s.io/v1/clusterroles/headstart";

/// Deletes the definition of boosts, and all boosts with it. Returns the definition.
pub async fn delete_definition(bed: &Bed) -> anyhow::Result<Value> {
    let path = format!("{DEFINITIONS}/{DEFINITION}");
    let definition = bed.api.get(&path).await?.accepted()?;
    bed.api.delete(&path).await?.accepted()?;
    eventually("the definition is gone", SOON, || async {
        let code = bed.api.get(&path).await?.code;
        ensure!(code == 404, "it is there: {code}");
        Ok(())
    })
    .await?;
    Ok(json!({
        "apiVersion": definition["apiVersion"],
        "kind": definition["kind"],
        "metadata": {"name": DEFINITION},
        "spec": definition["spec"],
    }))
}

/// Installs it again, with no boost but that of the canaries.
pub async fn install_definition(bed: &Bed, definition: &Value) -> anyhow::Result<()> {
    bed.api.post(DEFINITIONS, definition).await?.accepted()?;
    eventually("boosts are served again", SOON, || bed.make_canary_boost()).await
}

/// Takes the right to resize pods from the operator. Returns its role as it was.
pub async fn take_right(bed: &Bed) -> anyhow::Result<Value> {
    let role = bed.api.get(ROLE).await?.accepted()?;
    let mut less = role.clone();
    let rules = less["rules"].as_array_mut().context("a role has rules")?;
    let had = rules.len();
    rules.retain(|rule| rule["resources"] != json!(["pods/resize"]));
    ensure!(rules.len() + 1 == had, "the right is one rule");
    bed.api.put(ROLE, &less).await?.accepted()?;
    may_resize(bed, false).await?;
    Ok(role)
}

/// Gives it back.
pub async fn give_right(bed: &Bed, role: &Value) -> anyhow::Result<()> {
    let mut now = bed.api.get(ROLE).await?.accepted()?;
    now["rules"] = role["rules"].clone();
    bed.api.put(ROLE, &now).await?.accepted()?;
    may_resize(bed, true).await
}

/// Waits until the API server knows whether the operator may.
async fn may_resize(bed: &Bed, may: bool) -> anyhow::Result<()> {
    let review = json!({
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {
            "user": operator(),
            "resourceAttributes": {
                "verb": "patch", "resource": "pods", "subresource": "resize", "namespace": "default",
            },
        },
    });
    let path = "/apis/authorization.k8s.io/v1/subjectaccessreviews";
    eventually("the API server knows the role", SOON, || async {
        let reviewed = bed.api.post(path, &review).await?.accepted()?;
        let allowed = reviewed["status"]["allowed"] == true;
        ensure!(allowed == may, "it is {allowed}");
        Ok(())
    })
    .await
}

/// The API server dies, with all that is under way, and comes back.
pub async fn restart_api_server(bed: &Bed) -> anyhow::Result<()> {
    let plane = &bed.cluster.plane;
    plane.stop_api_server().await?;
    plane.start_api_server().await
}
