//! What befalls the way between a replica and the API server, while the way to its webhook is open.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use chrono::{DateTime, Utc};
use futures::FutureExt as _;
use serde_json::json;
use testbed::{eventually, link::Wire, proxy};
use tokio::time::sleep;

use super::{Fault, LAG, Repeat, Round, TAKEOVER, burst, reverted};
use crate::bed::{PODS, SOON};

/// A leader stops working 4 s after its last renewal was sent.
const STEPS_DOWN: Duration = Duration::from_secs(6);
/// A watch call lasts 45 s; 10 s more, and somebody has noticed that nothing comes.
const NOTICED: Duration = Duration::from_secs(55);
/// After a link is whole again.
const CAUGHT_UP: Duration = Duration::from_secs(5);
/// Packets vanish, in both directions.
const BLACKHOLE: Wire = Wire {
    latency: Duration::ZERO,
    bytes_per_second: None,
    blackhole: true,
    refuse: false,
};

pub(super) fn faults() -> Vec<Fault> {
    vec![
        Fault {
            number: 4,
            what: "the leader is cut off from the API server (packets vanish); its webhook is reached",
            expected: "another leads within 8 s; it steps down, stays Ready and goes on boosting from its cache",
            repeat: Repeat::Timing,
            run: |round| leader_cut_off(round).boxed(),
        },
        Fault {
            number: 5,
            what: "a follower is cut off; boosts change meanwhile",
            expected: "it goes on answering by what it knows, says since when it has heard nothing, and catches up within 5 s",
            repeat: Repeat::Timing,
            run: |round| follower_cut_off(round).boxed(),
        },
        Fault {
            number: 9,
            what: "all watches of all replicas fall silent, their connections stay open, and all else is answered",
            expected: "noticed within 55 s; nothing is lost",
            repeat: Repeat::Slow,
            run: |round| silent_watches(round).boxed(),
        },
        Fault {
            number: 22,
            what: "a slow API server: 250 ms each way, 1 % of the requests never answered",
            expected: "reviews are answered as before; every boost ends",
            repeat: Repeat::Timing,
            run: |round| slow(round).boxed(),
        },
    ]
}

async fn leader_cut_off(round: &mut Round<'_>) -> Result<()> {
    let leader = round.bed.leader().await?;
    burst(round).await?;
    let began = Instant::now();
    let cut_off = &round.bed.replicas[leader];
    cut_off.link.set(BLACKHOLE);
    let name = cut_off.operator.name().to_owned();
    let steps_down = eventually("it steps down", STEPS_DOWN, || async {
        let metrics = cut_off.operator.metrics().await?;
        ensure!(metrics.contains("headstart_leader 0"), "it leads");
        Ok(began.elapsed())
    });
    let (down, next) = tokio::join!(steps_down, round.bed.leader_other_than(&name));
    next?;
    round.figures.time("until it steps down", down?);
    round.figures.time("until another leads", began.elapsed());
    ensure!(round.bed.asks(leader).await?, "it boosts no longer");
    let readyz = round.bed.replicas[leader].operator.get("/readyz").await;
    readyz.context("it is no longer Ready")?;
    reverted(round, PODS, TAKEOVER).await
}

async fn follower_cut_off(round: &mut Round<'_>) -> Result<()> {
    let leader = round.bed.leader().await?;
    let follower = (leader + 1) % round.bed.replicas.len();
    let cut_off = &round.bed.replicas[follower];
    cut_off.link.set(BLACKHOLE);
    // It could not be told of it.
    let edit = json!({"selector": {"matchLabels": {"group": "another"}}});
    round.bed.edit_boost(&edit).await?;
    eventually("the others know", SOON, || async {
        ensure!(!round.bed.asks(leader).await?, "the leader does not");
        Ok(())
    })
    .await?;
    sleep(Duration::from_millis(round.random.u64(3_000..8_000))).await;
    ensure!(round.bed.asks(follower).await?, "it forgot what it knew");
    let metrics = cut_off.operator.metrics().await?;
    let heard = heard(&metrics).context("it does not say when it heard")?;
    let age = (Utc::now() - DateTime::UNIX_EPOCH).as_seconds_f64() - heard;
    ensure!(age >= 3.0, "it says that it heard of boosts {age} s ago");
    round
        .figures
        .time("age that it says", Duration::from_secs_f64(age));

    cut_off.link.set(Wire::default());
    let began = Instant::now();
    eventually("it knows too", CAUGHT_UP, || async {
        ensure!(!round.bed.asks(follower).await?, "it boosts as before");
        Ok(())
    })
    .await?;
    round
        .figures
        .time("until it has caught up", began.elapsed());
    round.bed.restore_boost().await
}

/// When it last heard of boosts, in Unix seconds.
fn heard(metrics: &str) -> Option<f64> {
    let series = r#"headstart_watch_heard_timestamp_seconds{resource="startupcpuboosts"} "#;
    let line = metrics.lines().find_map(|line| line.strip_prefix(series));
    line?.parse().ok()
}

async fn silent_watches(round: &mut Round<'_>) -> Result<()> {
    for replica in &round.bed.replicas {
        replica.proxy.silence();
    }
    let began = Instant::now();
    burst(round).await?;
    round.bed.lives.until_finished(PODS, 2 * NOTICED).await?;
    let took = began.elapsed();
    round.figures.time("until all is reverted", took);
    ensure!(took <= NOTICED + TAKEOVER, "it took {took:?}");
    Ok(())
}

async fn slow(round: &mut Round<'_>) -> Result<()> {
    let seed = round.random.u64(..);
    for replica in &round.bed.replicas {
        replica.link.set(Wire {
            latency: Duration::from_millis(250),
            ..Wire::default()
        });
        let hangs = proxy::Fault::on("*", "").share(0.01, seed).always().hang();
        replica.proxy.fault(hangs);
    }
    burst(round).await?;
    for replica in 0..round.bed.replicas.len() {
        let began = Instant::now();
        ensure!(round.bed.asks(replica).await?, "it does not boost");
        round
            .figures
            .time("a review, with its connection", began.elapsed());
    }
    round.bed.lives.until_finished(PODS, 2 * SOON).await?;
    round.figures.times(LAG, round.bed.lives.lags());
    Ok(())
}
