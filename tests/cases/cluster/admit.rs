//! Creating pods.

use anyhow::{Context, bail, ensure};
use chrono::Utc;
use serde_json::{Value, json};
use testbed::{Answer, rest::pods};

use super::{
    audit::Review,
    bed::Bed,
    compare::{same_pod, since},
};
use crate::{
    data::{Admit, Cases},
    notation::{self, merge, time},
    world::{self, BOOSTED, Boost, KEY, record_text},
};

/// What pods can have of the stand-in's node.
const NODE_CPU: u32 = 64;
/// The pod that has most of it.
pub const FILLER: &str = "filler";

/// Makes the boosts, creates the pod and compares what has become of it.
pub async fn check(
    bed: &Bed,
    cases: &Cases,
    place: &str,
    admit: &Admit,
    boosts: &[Boost],
) -> anyhow::Result<()> {
    let place = admit.namespace.as_deref().unwrap_or(place);
    bed.namespace(place).await?;
    bed.surround(place, admit).await?;
    bed.make_boosts(place, boosts).await?;
    bed.boosts_are_seen().await?;
    create(bed, cases, place, admit, boosts).await
}

/// The same on a node where other pods have left so little free: the pod is scheduled there, as without a boost.
pub async fn check_crowded(
    bed: &Bed,
    cases: &Cases,
    place: &str,
    admit: &Admit,
    boosts: &[Boost],
    free: &str,
) -> anyhow::Result<()> {
    crowd(bed, place, free).await?;
    bed.namespace(place).await?;
    bed.make_boosts(place, boosts).await?;
    bed.boosts_are_seen().await?;
    let created = make(bed, cases, place, admit, boosts).await?;
    let name = created["metadata"]["name"].as_str();
    let scheduled = bed.running(place, name.context("a pod has a name")?).await;
    scheduled.map(drop).context("it is not scheduled")
}

/// Fills the node with pods, so that this much is left free there. Returns where they are.
pub async fn crowd(bed: &Bed, place: &str, free: &str) -> anyhow::Result<String> {
    let (others, free) = (format!("{place}-others"), free.parse::<u32>()?);
    bed.namespace(&others).await?;
    let other = |name: &str, cpu: u32| -> anyhow::Result<Value> {
        let mut pod = notation::pod(&format!("app {cpu}/-"))?;
        pod["metadata"] = json!({"name": name, "namespace": others});
        Ok(pod)
    };
    let filler = other(FILLER, NODE_CPU - free)?;
    bed.create(&others, "", &filler).await?.accepted()?;
    bed.running(&others, FILLER).await?;
    let too_large = other("too-large", free + 1)?;
    bed.create(&others, "", &too_large).await?.accepted()?;
    bed.unschedulable(&others, "too-large").await?;
    bed.remove(&others, "too-large").await?;
    Ok(others)
}

/// Creates a pod where the boosts are known already, and removes it.
pub async fn create(
    bed: &Bed,
    cases: &Cases,
    place: &str,
    admit: &Admit,
    boosts: &[Boost],
) -> anyhow::Result<()> {
    let created = make(bed, cases, place, admit, boosts).await?;
    if admit.dry_run || !admit.refused.is_empty() {
        return Ok(());
    }
    let name = created["metadata"]["name"].as_str();
    bed.remove(place, name.context("a pod has a name")?).await
}

/// Creates a pod, compares it with what is right, and returns it.
async fn make(
    bed: &Bed,
    cases: &Cases,
    place: &str,
    admit: &Admit,
    boosts: &[Boost],
) -> anyhow::Result<Value> {
    ensure!(!admit.unsynced, "all replicas have read their caches");
    let sent = placed(world::written(cases, admit)?, place);
    let expected = world::answered(cases, admit, boosts, time(BOOSTED)?)?;
    let began = Utc::now();
    let answer = if admit.dry_run {
        create_dry(bed, place, &sent).await?
    } else {
        bed.create(place, "", &sent).await?
    };
    let review = bed.audit.review(place, &answer.audit_id).await?;
    if !admit.refused.is_empty() {
        let said = answer.body["message"].to_string();
        ensure!(answer.code == 403, "answered with {}: {said}", answer.code);
        for text in &admit.refused {
            ensure!(
                said.contains(text),
                "{text:?} is not in the message: {said}"
            );
        }
        same_review(admit, &review, &expected)?;
        return Ok(expected);
    }
    let mut stored = answer.accepted()?;
    if admit.manifest.is_some() {
        let note = json!({"annotations": {"kubernetes.io/limit-ranger": null}});
        merge(&mut stored["metadata"], &note);
    }
    let times = [("timestamp", since(began))];
    let is_boosted = !matches!(admit.answer.as_str(), "untouched" | "unmarked");
    same_pod(&stored, &expected, if is_boosted { &times } else { &[] })?;
    same_review(admit, &review, &stored)?;
    if let Some(class) = admit.class {
        let got = &stored["status"]["qosClass"];
        ensure!(
            *got == format!("{class:?}"),
            "the class is {got}, expected {class:?}"
        );
    }
    if let Some(expected) = &admit.record {
        same_text(record_text(&stored).unwrap_or_default(), expected)?;
    }
    Ok(stored)
}

/// Puts a pod of the data's namespace into another.
pub fn placed(mut pod: Value, place: &str) -> Value {
    if pod["metadata"].get("namespace") == Some(&json!("ns")) {
        pod["metadata"]["namespace"] = json!(place);
    }
    pod
}

/// A dry run, while nobody else creates pods: no replica counts it, and it leaves nothing behind. The same in earnest is
/// counted once.
async fn create_dry(bed: &Bed, place: &str, pod: &Value) -> anyhow::Result<Answer> {
    let _alone = bed.admissions.write().await;
    let path = pods(place);
    let before = bed.reviews().await?;
    let answer = bed.api.post(&format!("{path}?dryRun=All"), pod).await?;
    let after = bed.reviews().await?;
    ensure!(
        before == after,
        "{} reviews were counted for a dry run",
        after - before
    );
    let name = answer.body["metadata"]["name"].as_str();
    let name = name.context("a pod has a name")?;
    let there = bed.api.get(&format!("{path}/{name}")).await?;
    ensure!(there.code == 404, "a dry run has left a pod behind");

    bed.api.post(&path, pod).await?.accepted()?;
    let counted = bed.reviews().await? - after;
    ensure!(counted == 1, "{counted} reviews were counted for one pod");
    bed.remove(place, name).await?;
    Ok(answer)
}

/// Compares how the webhook was asked and what it answered.
fn same_review(admit: &Admit, review: &Review, stored: &Value) -> anyhow::Result<()> {
    if admit.uncalled {
        ensure!(!review.called, "the webhook was called: {review:?}");
        return Ok(());
    }
    ensure!(review.called, "the webhook was not called");
    match (admit.answer.as_str(), review.skipped.as_deref()) {
        ("untouched" | "unmarked", skipped) => match (admit.reason.as_deref(), skipped) {
            (Some("none"), None) | (None, Some(_)) => {}
            (None, None) if admit.answer == "unmarked" => {}
            (Some(reason), Some(skipped)) if reason == skipped => {}
            (reason, skipped) => bail!("skipped for {skipped:?}, expected {reason:?}"),
        },
        (_, Some(skipped)) => bail!("skipped for {skipped}"),
        (_, None) => {
            let by = admit.by.as_deref().unwrap_or("b");
            ensure!(
                review.boost.as_deref() == Some(by),
                "boosted by {:?}, expected {by}",
                review.boost
            );
        }
    }
    match (admit.answer.as_str(), &admit.patch) {
        ("untouched", _) => ensure!(review.patch.is_empty(), "patched: {:?}", review.patch),
        (_, Some(patch)) => same_patch(&review.patch, patch, stored)?,
        _ => ensure!(!review.patch.is_empty(), "there was no patch"),
    }
    Ok(())
}

/// Compares the operations of a patch in any order; `RECORD` stands for the record.
fn same_patch(got: &[Value], expected: &[Value], stored: &Value) -> anyhow::Result<()> {
    let record = json!(record_text(stored));
    let known = |operation: &Value| {
        let mut operation = operation.clone();
        if let Some(value) = operation.get_mut("value") {
            if *value == "RECORD" {
                *value = record.clone();
            } else if value.get(KEY) == Some(&json!("RECORD")) {
                merge(value, &json!({KEY: record}));
            }
        }
        operation
    };
    let mut left: Vec<&Value> = got.iter().collect();
    for operation in expected.iter().map(known) {
        let at = left.iter().position(|got| **got == operation);
        let at = at.with_context(|| format!("{operation} is not in the patch {got:?}"))?;
        left.swap_remove(at);
    }
    ensure!(left.is_empty(), "there is more in the patch: {left:?}");
    Ok(())
}

/// Compares two records to the byte, their timestamps apart.
fn same_text(got: &str, expected: &str) -> anyhow::Result<()> {
    let timestamp = |record: &str| -> anyhow::Result<String> {
        let record: Value = serde_json::from_str(record)?;
        let timestamp = record["timestamp"].as_str();
        Ok(timestamp.context("a record has a timestamp")?.to_owned())
    };
    let dated = got.replacen(&timestamp(got)?, &timestamp(expected)?, 1);
    ensure!(
        dated == expected,
        "the record is\n{got}\nexpected, the timestamp apart,\n{expected}"
    );
    Ok(())
}
