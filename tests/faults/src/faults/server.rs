//! What befalls the API server and its etcd.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use futures::FutureExt as _;
use kube::ResourceExt as _;
use testbed::{Signal, Wire, proxy};
use tokio::time::sleep;

use super::{Fault, LAG, Repeat, Round, burst};
use crate::bed::{PODS, SOON};

/// How long the API server, or its etcd, is away.
const AWAY: Duration = Duration::from_secs(5);
const STALL: Duration = Duration::from_secs(10);
/// After it is back.
const RECOVERED: Duration = Duration::from_secs(5);
/// Lists of a replica, of the ten kinds that it watches, when a server has come back: each once, or again where the first was
/// cut short because the server was found to have been away.
const LISTS: usize = 20;

pub(super) fn faults() -> Vec<Fault> {
    vec![
        Fault {
            number: 6,
            what: "the API server is killed and comes back after 5 s",
            expected: "all that was due meanwhile is reverted within 5 s; no list is asked for more than twice; no replica restarts",
            repeat: Repeat::Timing,
            run: |round| api_server_restarts(round).boxed(),
        },
        Fault {
            number: 7,
            what: "etcd stalls for 10 s, or is killed and comes back after 5 s",
            expected: "all that was due meanwhile is reverted within 5 s; no replica restarts",
            repeat: Repeat::Timing,
            run: |round| etcd_fails(round).boxed(),
        },
        Fault {
            number: 8,
            what: "watches break, pods go and boosts change meanwhile, and etcd forgets its history (410 Gone)",
            expected: "all replicas list anew: no ghosts, on followers either",
            repeat: Repeat::Timing,
            run: |round| history_forgotten(round).boxed(),
        },
        Fault {
            number: 21,
            what: "every other resize is answered with 429 and Retry-After: 1",
            expected: "the second is waited for, every boost ends, the lease stays where it is",
            repeat: Repeat::Timing,
            run: |round| too_many_requests(round).boxed(),
        },
    ]
}

async fn api_server_restarts(round: &mut Round<'_>) -> Result<()> {
    burst(round).await?;
    sleep(Duration::from_millis(round.random.u64(..2_000))).await;
    for replica in &round.bed.replicas {
        replica.proxy.forget();
    }
    round.bed.plane.stop_api_server().await?;
    sleep(AWAY).await;
    round.bed.plane.start_api_server().await?;
    recovered(round).await?;
    for replica in &round.bed.replicas {
        let seen = replica.proxy.requests();
        let lists = seen.iter().filter(|seen| seen.verb == "LIST").count();
        round.figures.count("lists", lists);
        ensure!(
            lists <= LISTS,
            "{} listed {lists} times",
            replica.operator.name()
        );
    }
    Ok(())
}

async fn etcd_fails(round: &mut Round<'_>) -> Result<()> {
    burst(round).await?;
    sleep(Duration::from_millis(round.random.u64(..2_000))).await;
    if round.random.bool() {
        round.bed.plane.signal_etcd(Signal::STOP)?;
        sleep(STALL).await;
        round.bed.plane.signal_etcd(Signal::CONT)?;
    } else {
        round.bed.plane.stop_etcd().await?;
        sleep(AWAY).await;
        round.bed.plane.start_etcd().await?;
    }
    recovered(round).await
}

async fn history_forgotten(round: &mut Round<'_>) -> Result<()> {
    let pods = round.bed.create_waiting(PODS).await?;
    for replica in &round.bed.replicas {
        replica.proxy.forget();
        replica.link.set(Wire {
            refuse: true,
            ..Wire::default()
        });
        replica.link.reset();
    }
    let (ghosts, rest) = pods.split_at(PODS / 2);
    round.bed.delete(ghosts).await?;
    round.bed.delete_boost().await?;
    round.bed.plane.compact().await?;
    // What it caches, the API server would remember.
    round.bed.plane.stop_api_server().await?;
    round.bed.plane.start_api_server().await?;
    for replica in &round.bed.replicas {
        replica.link.set(Wire::default());
    }
    let began = Instant::now();
    round.bed.until_all_boost(false).await?;
    round
        .figures
        .time("until no replica boosts", began.elapsed());
    // Each leads once, and looks after what it believes to be there.
    for _ in 1..round.bed.replicas.len() {
        let leader = round.bed.leader().await?;
        ensure!(
            round.bed.take(leader).operator.stop(SOON).await? == 0,
            "it did not end well"
        );
    }
    round.bed.leader().await?;
    round.bed.make_ready(rest).await?;
    round.bed.lives.until_finished(rest.len(), SOON).await?;
    for replica in &round.bed.replicas {
        for seen in replica.proxy.requests() {
            let mut segments = seen.path.split('/');
            let ghost =
                segments.find(|segment| ghosts.iter().any(|pod| pod.name_any() == *segment));
            ensure!(ghost.is_none(), "{} {}: it is gone", seen.verb, seen.path);
        }
    }
    round.bed.restore_boost().await
}

/// From now on everything is there again.
async fn recovered(round: &mut Round<'_>) -> Result<()> {
    let began = Instant::now();
    round.bed.lives.until_finished(PODS, SOON).await?;
    let took = began.elapsed();
    round.figures.time("until all is reverted", took);
    ensure!(took <= RECOVERED, "it took {took:?}");
    Ok(())
}

async fn too_many_requests(round: &mut Round<'_>) -> Result<()> {
    let leader = round.bed.leader().await?;
    let seed = round.random.u64(..);
    let fault = proxy::Fault::on("PATCH", "/pods/*/resize");
    let fault = fault.share(0.5, seed).always().retry_after(1);
    round.bed.replicas[leader].proxy.fault(fault);
    burst(round).await?;
    round.bed.lives.until_finished(PODS, SOON).await?;
    round.figures.times(LAG, round.bed.lives.lags());
    ensure!(round.bed.leader().await? == leader, "another leads");
    Ok(())
}
