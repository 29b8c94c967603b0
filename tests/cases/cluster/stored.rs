//! Boosts that were stored under upstream's definition before ours was installed over it.

use anyhow::{Context, ensure};
use serde_json::json;
use testbed::{ControlPlane, eventually, rest::MERGE};

use super::{
    admit,
    apply::has_status,
    bed::{Bed, SOON, boosts},
};
use crate::{
    data::{Cases, Id, Layer, Stored},
    world::Boost,
};

/// Stands for upstream's definition.
const UPSTREAM: &str = include_str!("upstream-crd.yaml");

/// Where a case's boost is stored.
pub fn place(id: Id, index: usize) -> String {
    format!("c-{}-stored-{index}", id.to_string().to_lowercase())
}

/// Installs upstream's definition, and stores the boosts of all cases under it.
pub async fn store(cases: &Cases, plane: &ControlPlane) -> anyhow::Result<()> {
    plane.apply(UPSTREAM).await?;
    let established = "--for=condition=Established";
    let definition = "crd/startupcpuboosts.autoscaling.x-k8s.io";
    plane
        .kubectl_ok(&["wait", established, "--timeout=30s", definition])
        .await?;
    for (id, case) in cases
        .iter()
        .filter(|(_, case)| case.runs_in(Layer::Cluster))
    {
        for (index, stored) in case.stored.iter().enumerate() {
            let name = place(id, index);
            let namespace =
                json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}});
            let mut boosts = Boost::stored(stored)?;
            let mut boost = boosts.swap_remove(0).object;
            boost["metadata"]["namespace"] = json!(name);
            plane.apply(&namespace.to_string()).await?;
            eventually("upstream's definition is served", SOON, || async {
                plane.apply(&boost.to_string()).await
            })
            .await?;
        }
    }
    Ok(())
}

/// Compares what has become of a stored boost, and of the pods around it.
pub async fn check(bed: &Bed, cases: &Cases, place: &str, stored: &Stored) -> anyhow::Result<()> {
    let all = Boost::stored(stored)?;
    bed.make_boosts(place, &all[1..]).await?;
    bed.boosts_are_seen().await?;
    let path = |name: &str| format!("{}/{name}", boosts(place));
    let condition = |status: &str, reason: &str| {
        json!({"conditions": [{
            "type": "Active", "status": status, "reason": reason, "observedGeneration": "GENERATION",
        }]})
    };
    has_status(bed, &path("b"), &condition("False", "Invalid")).await?;
    let b = bed.api.get(&path("b")).await?.accepted()?;
    let message = &b["status"]["conditions"][0]["message"];
    let names = message.as_str().context("a condition has a message")?;
    ensure!(
        names.contains(&stored.invalid),
        "{names:?} does not name {}",
        stored.invalid
    );
    for other in &all[1..] {
        has_status(bed, &path(&other.name), &condition("True", "Ready")).await?;
    }
    for pod in &stored.pods {
        admit::create(bed, cases, place, pod, &all).await?;
    }
    if let Some(change) = &stored.corrected {
        bed.api.patch(&path("b"), MERGE, change).await?.accepted()?;
        has_status(bed, &path("b"), &condition("True", "Ready")).await?;
        bed.boosts_are_seen().await?;
        let corrected = Boost::corrected(stored)?;
        for pod in &stored.then {
            let created = admit::create(bed, cases, place, pod, &corrected).await;
            created.context("corrected")?;
        }
    }
    // Nobody starts them again.
    for replica in bed.replicas() {
        replica.operator.process().check()?;
    }
    Ok(())
}
