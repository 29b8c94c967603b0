//! What befalls single writes: their pod is another one now, others write at the same time, or they are refused.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use futures::FutureExt as _;
use kube::{
    ResourceExt as _,
    api::{Patch, PatchParams},
};
use serde_json::json;
use testbed::{
    Behaviour, Resize, eventually,
    lives::KEY,
    proxy::{self, Moment},
};
use tokio::time::{interval, sleep};
use tokio_util::sync::CancellationToken;

use super::{Fault, Repeat, Round, burst};
use crate::bed::{PODS, SOON};

/// Pods in a storm of conflicts, who write to each of them, and how often.
const STORMY: usize = 2;
const WRITERS: usize = 5;
const EVERY: Duration = Duration::from_millis(20);
/// Resizes of one pod in a second, and how long it may take when the others are done.
const ATTEMPTS: f64 = 4.0;
const CALM: Duration = Duration::from_secs(5);
/// Within it a refused write is tried again once.
const PATIENCE: Duration = Duration::from_secs(65);
/// For so long a node does not do what it should.
const IDLE: Duration = Duration::from_secs(5);

pub(super) fn faults() -> Vec<Fault> {
    vec![
        Fault {
            number: 17,
            what: "the pod is deleted and one of the same name created while its revert is on its way",
            expected: "the write changes nothing; the new pod lives its own life",
            repeat: Repeat::Timing,
            run: |round| replaced(round).boxed(),
        },
        Fault {
            number: 18,
            what: "five others write to the pod every 20 ms while it is due, for 5 to 10 s",
            expected: "at most 4 attempts a second; reverted within 5 s of the last of those writes",
            repeat: Repeat::Timing,
            run: |round| conflicts(round).boxed(),
        },
        Fault {
            number: 19,
            what: "every resize is refused with 422, or 403",
            expected: "each pod is tried again at most once a minute, and reverted when it is allowed",
            repeat: Repeat::Once,
            run: |round| refused(round).boxed(),
        },
        Fault {
            number: 20,
            what: "the kubelet says Deferred, Infeasible or an error, or nothing",
            expected: "no boost is called ended before the kubelet has acted; then it is",
            repeat: Repeat::Once,
            run: |round| not_actuated(round).boxed(),
        },
    ]
}

async fn replaced(round: &mut Round<'_>) -> Result<()> {
    let leader = round.bed.leader().await?;
    let old = round.bed.create_waiting(1).await?;
    let path = format!("/pods/{}/resize", old[0].name_any());
    let hold = round.bed.replicas[leader]
        .proxy
        .hold("PATCH", &path, Moment::Before);
    round.bed.make_ready(&old).await?;
    hold.arrived(SOON).await?;
    round.bed.delete(&old).await?;
    round.bed.lives.forget();
    let mut new = round.bed.pod(None)?;
    new.metadata.name = Some(old[0].name_any());
    let new = round.bed.create([new]).await?;
    hold.release();
    round.bed.lives.until_running(1, SOON).await?;
    let answered = eventually("the late write is answered", SOON, || async {
        let seen = round.bed.replicas[leader].proxy.requests();
        let resize = seen
            .iter()
            .find(|seen| seen.verb == "PATCH" && seen.path.contains(&path));
        let status = resize.context("it was never sent")?.status;
        ensure!(status != 0, "it is not");
        Ok(status)
    });
    let status = answered.await?;
    ensure!(
        status >= 400,
        "a write for another pod was answered with {status}"
    );
    let pod = round.bed.pods().get(&new[0].name_any()).await?;
    ensure!(pod.labels().contains_key(KEY), "the new pod lost its boost");
    round.bed.make_ready(&new).await?;
    round.bed.lives.until_finished(1, SOON).await
}

async fn conflicts(round: &mut Round<'_>) -> Result<()> {
    let pods = round.bed.create_waiting(STORMY).await?;
    for replica in &round.bed.replicas {
        replica.proxy.forget();
    }
    let over = CancellationToken::new();
    let writers = pods
        .iter()
        .flat_map(|pod| (0..WRITERS).map(move |writer| (pod, writer)));
    let writers: Vec<_> = writers
        .map(|(pod, writer)| {
            let (api, name, over) = (round.bed.pods(), pod.name_any(), over.clone());
            tokio::spawn(async move {
                let mut ticks = interval(EVERY);
                let mut written = 0;
                while !over.is_cancelled() {
                    ticks.tick().await;
                    written += 1;
                    let note = json!({"metadata": {"annotations": {format!("note-{writer}"): written.to_string()}}});
                    let params = PatchParams::default();
                    api.patch(&name, &params, &Patch::Merge(note)).await?;
                }
                anyhow::Ok(())
            })
        })
        .collect();
    round.bed.make_ready(&pods).await?;
    let storm = Duration::from_millis(round.random.u64(5_000..10_000));
    sleep(storm).await;
    over.cancel();
    for writer in writers {
        writer.await??;
    }
    let began = Instant::now();
    round.bed.lives.until_finished(STORMY, SOON).await?;
    let took = began.elapsed();
    ensure!(took <= CALM, "it took {took:?} after the storm");
    round.figures.time("until all are reverted", took);
    let attempts = attempts(round);
    let most = attempts.values().max().context("none was tried")?;
    let rate = f64::from(*most) / storm.as_secs_f64();
    ensure!(rate <= ATTEMPTS, "{rate} attempts a second");
    round.figures.number("attempts a second", rate);
    Ok(())
}

/// Resizes that were sent, by pod.
fn attempts(round: &Round<'_>) -> HashMap<String, u32> {
    let mut attempts = HashMap::new();
    let replicas = round.bed.replicas.iter();
    for seen in replicas.flat_map(|replica| replica.proxy.requests()) {
        if seen.verb == "PATCH" && seen.path.contains("/resize") {
            *attempts.entry(seen.path).or_default() += 1;
        }
    }
    attempts
}

async fn refused(round: &mut Round<'_>) -> Result<()> {
    let refusals = [(422, "Invalid"), (403, "Forbidden")];
    let refusals = if round.short {
        &refusals[..1]
    } else {
        &refusals
    };
    for (number, (code, reason)) in refusals.iter().enumerate() {
        for replica in &round.bed.replicas {
            let fault = proxy::Fault::on("PATCH", "/pods/*/resize").always();
            replica.proxy.forget();
            replica
                .proxy
                .fault(fault.reply(*code, reason, "the test does not want it"));
        }
        burst(round).await?;
        sleep(PATIENCE).await;
        let attempts = attempts(round);
        let most = attempts.values().max().context("none was tried")?;
        // At once, and again a minute later, spread by a half.
        ensure!(attempts.len() == PODS && *most <= 3, "{attempts:?}");
        for replica in &round.bed.replicas {
            replica.proxy.clear();
        }
        let began = Instant::now();
        let all = PODS * (number + 1);
        round.bed.lives.until_finished(all, 2 * PATIENCE).await?;
        round
            .figures
            .number("resizes of a pod in a minute", f64::from(*most));
        round
            .figures
            .time("until all are reverted", began.elapsed());
    }
    Ok(())
}

async fn not_actuated(round: &mut Round<'_>) -> Result<()> {
    let message = "the runtime does not answer".to_owned();
    let answers = [
        Resize::Deferred,
        Resize::Infeasible,
        Resize::Error { message },
        Resize::Ignore,
    ];
    for (number, resize) in answers.into_iter().enumerate() {
        round.bed.node.set_behaviour(Behaviour {
            resize: resize.clone(),
            ..Behaviour::default()
        });
        burst(round).await?;
        round
            .bed
            .lives
            .until_back(PODS * (number + 1), SOON)
            .await?;
        sleep(IDLE).await;
        let ended = round.bed.lives.finished() - PODS * number;
        ensure!(
            ended == 0,
            "{ended} are called ended, though the kubelet says {resize:?}"
        );
        round.figures.count("called ended too early", ended);
        round.bed.node.set_behaviour(Behaviour::default());
        let all = PODS * (number + 1);
        round.bed.lives.until_finished(all, 2 * SOON).await?;
    }
    Ok(())
}
