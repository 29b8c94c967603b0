//! What befalls thousands of boosted pods at once.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use futures::FutureExt as _;
use testbed::{
    Behaviour,
    lives::{self, UNRELATED},
};

use super::{Fault, Repeat, Round};
use crate::bed::{GROUP, REPLICAS};

/// How many, and in the short form.
const CROWD: (u32, u32) = (10_000, 1_000);
/// For all of them to be made, or to end.
const PATIENCE: Duration = Duration::from_secs(900);
/// Two writes, and what was in flight when the leader was killed, which the next sends again.
const WRITES: f64 = 2.0;
const IN_FLIGHT: f64 = 64.0;
/// Cold replicas serve after this.
const SERVING: Duration = Duration::from_secs(3);

pub(super) fn faults() -> Vec<Fault> {
    vec![
        Fault {
            number: 27,
            what: "10,000 pods are due at once, the leader is killed when half of them are reverted",
            expected: "the next goes on where it was; two writes a pod, and what was in flight once more",
            repeat: Repeat::Once,
            run: |round| killed_at_half(round).boxed(),
        },
        Fault {
            number: 28,
            what: "all replicas start cold beside 10,000 overdue and 10,000 other pods",
            expected: "serving within 3 s; reverting at the usual rate; less than 64 MiB each",
            repeat: Repeat::Once,
            run: |round| cold(round).boxed(),
        },
    ]
}

/// Makes them, boosted and running.
async fn crowd(round: &mut Round<'_>) -> Result<u32> {
    let crowd = if round.short { CROWD.1 } else { CROWD.0 };
    round.bed.node.set_behaviour(Behaviour {
        ready_after: None,
        ..Behaviour::default()
    });
    let first = round.bed.reserve(crowd);
    lives::create(&round.bed.plane, GROUP, first..first + crowd).await?;
    let boosted = round
        .bed
        .lives
        .until_running(crowd as usize, PATIENCE)
        .await?;
    ensure!(
        boosted == crowd as usize,
        "{boosted} of {crowd} are boosted"
    );
    Ok(crowd)
}

async fn killed_at_half(round: &mut Round<'_>) -> Result<()> {
    let crowd = crowd(round).await? as usize;
    round.bed.node.set_behaviour(Behaviour::default());
    round.bed.lives.until_finished(crowd / 2, PATIENCE).await?;
    let leader = round.bed.leader().await?;
    round.bed.take(leader).operator.crash()?;
    let killed = Instant::now();
    round.bed.lives.until_finished(crowd, PATIENCE).await?;
    round.figures.time("the other half took", killed.elapsed());
    let writes = lives::writes(&round.bed.plane, GROUP, crowd)?;
    round.figures.number("writes a pod", writes);
    let bound = WRITES + IN_FLIGHT / f64::from(u32::try_from(crowd)?);
    ensure!(writes <= bound, "{writes} writes a pod");
    Ok(())
}

async fn cold(round: &mut Round<'_>) -> Result<()> {
    let crowd = crowd(round).await?;
    lives::create(&round.bed.plane, UNRELATED, 0..crowd).await?;
    round.bed.crash_all()?;
    round.bed.node.set_behaviour(Behaviour::default());
    round
        .bed
        .lives
        .until_ready(crowd as usize, PATIENCE)
        .await?;
    let began = Instant::now();
    for _ in 0..REPLICAS {
        round.bed.add().await?;
    }
    round.bed.until_ready().await?;
    let serving = began.elapsed();
    round.figures.time("until all three serve", serving);
    ensure!(serving <= SERVING, "serving took {serving:?}");
    round
        .bed
        .lives
        .until_finished(crowd as usize, PATIENCE)
        .await?;
    let rate = f64::from(crowd) / began.elapsed().as_secs_f64();
    round.figures.number("reverts a second", rate);
    for replica in &round.bed.replicas {
        let memory = replica.operator.process().resident()? / 1024.0;
        round.figures.number("MiB", memory);
    }
    Ok(())
}
