//! What befalls boost objects while pods are boosted by them.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use futures::FutureExt as _;
use serde_json::{Value, json};
use testbed::cluster::manifests;

use super::{Fault, LAG, Repeat, Round, reverted};
use crate::bed::{PODS, SOON};

/// What a revert may cost where nothing else happens.
const USUAL: Duration = Duration::from_secs(2);
const CRD: &str = "crd/startupcpuboosts.autoscaling.x-k8s.io";

pub(super) fn faults() -> Vec<Fault> {
    vec![
        Fault {
            number: 11,
            what: "the boost is deleted while pods are boosted",
            expected: "each pod is reverted when it is Ready, by its record alone, at most 2 s late",
            repeat: Repeat::Timing,
            run: |round| boost_deleted(round).boxed(),
        },
        Fault {
            number: 12,
            what: "the CRD is deleted while pods are boosted, and comes again",
            expected: "pods are created unboosted and reverted; boosted again when it is back",
            repeat: Repeat::Once,
            run: |round| crd_deleted(round).boxed(),
        },
        Fault {
            number: 13,
            what: "the boost is edited while pods are boosted: another selector, more CPU, another duration",
            expected: "the new duration counts, the original values stay",
            repeat: Repeat::Timing,
            run: |round| boost_edited(round).boxed(),
        },
    ]
}

async fn boost_deleted(round: &mut Round<'_>) -> Result<()> {
    let pods = round.bed.create_waiting(PODS).await?;
    round.bed.delete_boost().await?;
    round.bed.until_all_boost(false).await?;
    round.bed.make_ready(&pods).await?;
    reverted(round, PODS, USUAL).await?;
    round.bed.restore_boost().await
}

async fn crd_deleted(round: &mut Round<'_>) -> Result<()> {
    let pods = round.bed.create_waiting(PODS).await?;
    round.bed.plane.kubectl_ok(&["delete", CRD]).await?;
    round.bed.until_all_boost(false).await?;
    round.bed.make_ready(&pods).await?;
    round.bed.lives.until_finished(PODS, SOON).await?;
    round.figures.times(LAG, round.bed.lives.lags());

    let file = manifests().join("crd.yaml");
    let path = file.to_string_lossy();
    round.bed.plane.kubectl_ok(&["apply", "-f", &path]).await?;
    let established = ["wait", "--for=condition=Established", "--timeout=30s", CRD];
    round.bed.plane.kubectl_ok(&established).await?;
    let began = Instant::now();
    round.bed.restore_boost().await?;
    round.figures.time("until all boost again", began.elapsed());
    Ok(())
}

async fn boost_edited(round: &mut Round<'_>) -> Result<()> {
    let pods = round.bed.create_waiting(PODS).await?;
    let edits = [
        json!({"selector": {"matchLabels": {"group": "another"}}}),
        json!({"spec": {"resourcePolicy": {"containerPolicies": [{
            "matchContainers": {"type": "ExactName", "value": "app"}, "percentageIncrease": {"value": 500},
        }]}}}),
        json!({"spec": {"durationPolicy": {"podCondition": null, "fixedDuration": {"unit": "Seconds", "value": 1}}}}),
    ];
    let edit = &edits[round.random.usize(..edits.len())];
    round.bed.edit_boost(edit).await?;
    // The new duration is over already; by the old one they would stay boosted until they are told.
    if edit["spec"]["durationPolicy"] == Value::Null {
        round.bed.make_ready(&pods).await?;
    }
    let began = Instant::now();
    round.bed.lives.until_finished(PODS, SOON).await?;
    let took = began.elapsed();
    round.figures.time("until all are reverted", took);
    ensure!(took <= 2 * USUAL, "it took {took:?} after {edit}");
    round.bed.restore_boost().await
}
