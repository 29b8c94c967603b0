//! Applying boosts.

use std::process::{Output, Stdio};

use anyhow::{Context, ensure};
use serde_json::{Value, json};
use testbed::eventually;
use tokio::io::AsyncWriteExt;

use super::{
    admit,
    bed::{Bed, SOON, boosts},
    compare::contains,
};
use crate::{
    data::{Apply, Cases, Validation},
    world::Boost,
};

/// Applies a boost as its user does, and compares what has become of it.
pub async fn check(bed: &Bed, cases: &Cases, place: &str, apply: &Apply) -> anyhow::Result<()> {
    ensure!(
        apply.refused.is_empty() == apply.accepted.is_some(),
        "is it accepted or refused?"
    );
    bed.namespace(place).await?;
    let boost = Boost::applied(apply)?;
    let mut object = boost.object.clone();
    object["metadata"]["namespace"] = json!(place);
    let path = format!("{}/b", boosts(place));
    let Some(accepted) = &apply.accepted else {
        let said = kubectl_apply(bed, &object).await?;
        let text = String::from_utf8_lossy(&said.stderr);
        ensure!(!said.status.success(), "it was accepted");
        for fragment in apply.refused.iter().chain(&apply.text) {
            ensure!(
                text.contains(fragment.as_str()),
                "{fragment:?} is not in the message:\n{text}"
            );
        }
        ensure!(bed.get(&path).await?.code == 404, "it was stored");
        return Ok(());
    };
    match apply.validation {
        None | Some(Validation::Strict) => {
            let said = kubectl_apply(bed, &object).await?;
            let text = String::from_utf8_lossy(&said.stderr);
            ensure!(said.status.success(), "it was refused:\n{text}");
        }
        Some(Validation::Ignore) => {
            let path = format!("{}?fieldValidation=Ignore", boosts(place));
            bed.post(&path, &object).await?.accepted()?;
        }
    }
    let stored = bed.get(&path).await?.accepted()?;
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
        admit::create(bed, cases, place, pod, std::slice::from_ref(&boost)).await?;
    }
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
async fn has_status(bed: &Bed, path: &str, expected: &Value) -> anyhow::Result<()> {
    eventually("the boost has its status", SOON, || async {
        let object = bed.get(path).await?.accepted()?;
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
