//! Applying boosts.

use std::process::{Output, Stdio};

use anyhow::{Context, bail, ensure};
use serde_json::{Value, json};
use testbed::eventually;
use tokio::io::AsyncWriteExt;

use super::{
    admit,
    bed::{Bed, SOON, boosts_of},
    compare::contains,
};
use crate::{
    data::{Apply, Cases, Kind, Validation},
    world::Boost,
};

/// Applies a boost as its user does, and compares what has become of it.
pub async fn check(bed: &Bed, cases: &Cases, place: &str, apply: &Apply) -> anyhow::Result<()> {
    ensure!(
        apply.refused.is_empty() == apply.accepted.is_some(),
        "is it accepted or refused?"
    );
    let Some(accepted) = &apply.accepted else {
        return check_refused(bed, place, apply, apply.kind).await;
    };
    bed.namespace(place).await?;
    let boost = Boost::applied(apply)?;
    let mut object = boost.object.clone();
    if apply.kind == Kind::StartupCPUBoost {
        object["metadata"]["namespace"] = json!(place);
    }
    let all = boosts_of(apply.kind, place);
    let path = format!("{all}/b");
    match apply.validation {
        None | Some(Validation::Strict) => {
            let said = kubectl_apply(bed, &object).await?;
            let text = String::from_utf8_lossy(&said.stderr);
            ensure!(said.status.success(), "it was refused:\n{text}");
        }
        Some(Validation::Ignore) => {
            let path = format!("{all}?fieldValidation=Ignore");
            bed.api.post(&path, &object).await?.accepted()?;
        }
    }
    let stored = bed.api.get(&path).await?.accepted()?;
    let same = contains(&stored, &object);
    if apply.validation == Some(Validation::Ignore) {
        ensure!(!same, "no field was dropped: {stored}");
    } else {
        ensure!(same, "stored is\n{stored}\napplied was\n{object}");
    }
    if let Some(status) = &apply.status {
        has_status(bed, &path, status).await?;
    }
    bed.boosts_are_seen().await?;
    for pod in accepted {
        if apply.kind == Kind::ClusterStartupCPUBoost {
            bed.label(place, &pod.namespace_labels).await?;
        }
        admit::create(bed, cases, place, pod, std::slice::from_ref(&boost)).await?;
    }
    if apply.kind == Kind::ClusterStartupCPUBoost {
        bed.api.delete(&path).await?.accepted()?;
    }
    Ok(())
}

/// Applies a boost, as one of this kind, that is refused.
pub async fn check_refused(
    bed: &Bed,
    place: &str,
    apply: &Apply,
    kind: Kind,
) -> anyhow::Result<()> {
    bed.namespace(place).await?;
    let mut object = Boost::applied_as(kind, apply)?.object;
    match kind {
        Kind::StartupCPUBoost => object["metadata"]["namespace"] = json!(place),
        // Those of the cluster have no place of their own.
        Kind::ClusterStartupCPUBoost => object["metadata"]["name"] = json!(place),
    }
    let name = object["metadata"]["name"].as_str().unwrap_or_default();
    let path = format!("{}/{name}", boosts_of(kind, place));
    let said = kubectl_apply(bed, &object).await?;
    let text = String::from_utf8_lossy(&said.stderr);
    if said.status.success() {
        bed.api.delete(&path).await?.accepted()?;
        bail!("it was accepted");
    }
    for fragment in apply.refused.iter().chain(&apply.text) {
        ensure!(
            text.contains(fragment.as_str()),
            "{fragment:?} is not in the message:\n{text}"
        );
    }
    ensure!(bed.api.get(&path).await?.code == 404, "it was stored");
    Ok(())
}

/// `kubectl apply -f -`, with the strict validation that it asks for by itself.
async fn kubectl_apply(bed: &Bed, object: &Value) -> anyhow::Result<Output> {
    let mut command = bed.cluster.plane.kubectl_command();
    command
        .args(["apply", "-f", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut kubectl = command.spawn().context("running kubectl apply")?;
    let mut input = kubectl.stdin.take().context("its input was not piped")?;
    input.write_all(object.to_string().as_bytes()).await?;
    drop(input);
    kubectl
        .wait_with_output()
        .await
        .context("waiting for kubectl apply")
}

/// Waits until all of this is in the boost's status.
pub async fn has_status(bed: &Bed, path: &str, expected: &Value) -> anyhow::Result<()> {
    eventually("the boost has its status", SOON, || async {
        let object = bed.api.get(path).await?.accepted()?;
        let mut expected = expected.clone();
        replace(
            &mut expected,
            "GENERATION",
            &object["metadata"]["generation"],
        );
        let status = &object["status"];
        ensure!(
            contains(status, &expected),
            "it is {status}, expected in it {expected}"
        );
        Ok(())
    })
    .await
}

fn replace(value: &mut Value, word: &str, by: &Value) {
    match value {
        Value::Array(list) => list.iter_mut().for_each(|entry| replace(entry, word, by)),
        Value::Object(fields) => fields
            .values_mut()
            .for_each(|entry| replace(entry, word, by)),
        value if *value == word => *value = by.clone(),
        _ => {}
    }
}
